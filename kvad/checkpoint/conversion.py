"""Reading and writing Hugging Face checkpoints: the parts that all families share.

A family (``families/*.py``) has two functions and a table, and no ``nn.Module``: ``Family.read`` builds a
``ModelConfig`` from a ``config.json``, ``Family.write_fields`` is the inverse, which ``Family.write``
checks by reading it back, and ``Family.rules`` pairs kvad's modules with Hugging Face's.  A ``TensorRule``
works in both directions, so that every model that can be loaded can be exported:

    tensor_rule("decoder.layers.0.attention.out", "model.layers.0.self_attn.o_proj")     .weight and .bias, unchanged
    tensor_rule("decoder.layers.0.attention.out", "transformer.h.0.attn.c_proj", TRANSPOSED)     [in, out] in their file
    tensor_rule(("decoder.layers.0.attention.q", "...k", "...v"), "...attn.c_attn", STACKED)     three modules in one

Nothing is dropped silently: a tensor in the file that no rule names and ``Family.ignored`` does not list is an
error, like a tensor that is missing or of another shape; a config field that changes the model and that kvad cannot
express is refused by name (``HFConfigReader.require_one_of``).  Code from a repository is never run.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvad import config as config_lib
from kvad.config import ModelConfig, canonical_config
from kvad.errors import CheckpointError, ConfigError, suggest

Shape = tuple[int, ...]
HFTensors = Mapping[str, Tensor]


class TensorTransform(NamedTuple):
    """Conversion between Hugging Face's and kvad's tensors; both take the shapes of kvad's."""

    read: Callable[[Sequence[Tensor], Sequence[Shape]], Sequence[Tensor]]
    write: Callable[[Sequence[Tensor], Sequence[Shape]], Sequence[Tensor]]


def _transposed(tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
    return [tensor.t() if tensor.dim() == 2 else tensor for tensor in tensors]


def _unstacked(tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> Sequence[Tensor]:
    (stacked,) = tensors
    return list(torch.split(stacked, [shape[0] for shape in shapes]))


def _stacked(tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
    return [torch.cat(list(tensors))]


SAME = TensorTransform(lambda tensors, shapes: tensors, lambda tensors, shapes: tensors)
TRANSPOSED = TensorTransform(_transposed, _transposed)  # GPT-2's Conv1D stores [in, out]
STACKED = TensorTransform(_unstacked, _stacked)  # several of kvad's, concatenated along the outputs
STACKED_COLUMNS = TensorTransform(
    lambda tensors, shapes: _unstacked(_transposed(tensors, shapes), shapes),
    lambda tensors, shapes: _transposed(_stacked(tensors, shapes), shapes),
)


def grouped_transform(groups: int) -> TensorTransform:
    """Build a transform that concatenates tensors within each of ``groups`` equal output parts.

    BLOOM stores q, k, v by head: rows [q of head 0, k of head 0, v of head 0, q of head 1, ...], one group per head.
    Falcon has one group per key-value head, whose queries precede its k and v.
    """

    def read(tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        (stacked,) = tensors
        parts = torch.split(stacked.unflatten(0, (groups, -1)), [shape[0] // groups for shape in shapes], dim=1)
        return [part.flatten(0, 1) for part in parts]

    def write(tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        return [torch.cat([tensor.unflatten(0, (groups, -1)) for tensor in tensors], dim=1).flatten(0, 1)]

    return TensorTransform(read, write)


class TensorRule(NamedTuple):
    """Pair of kvad's and Hugging Face's modules or tensors."""

    kvad_names: tuple[str, ...]
    hf_names: tuple[str, ...]
    transform: TensorTransform = SAME
    missing_ok: bool = False  # the file may lack it (a buffer of older files); kvad's tensor is zero then
    shapes: tuple[Shape, ...] = ()  # of kvad's tensors, in a rule about tensors (``expand_rules``)


def tensor_rule(
    kvad_names: str | tuple[str, ...],
    hf_names: str | tuple[str, ...],
    transform: TensorTransform = SAME,
    *,
    missing_ok: bool = False,
) -> TensorRule:
    """Build a rule from names given as strings or tuples."""
    return TensorRule(
        (kvad_names,) if isinstance(kvad_names, str) else kvad_names,
        (hf_names,) if isinstance(hf_names, str) else hf_names,
        transform,
        missing_ok,
    )


def prefix_rules(
    kvad_prefix: str, hf_prefix: str, names: Mapping[str, str], transform: TensorTransform = SAME
) -> Iterator[TensorRule]:
    """Yield one rule for each pair of names, below two prefixes."""
    for kvad_name, hf_name in names.items():
        yield tensor_rule(f"{kvad_prefix}.{kvad_name}", f"{hf_prefix}.{hf_name}", transform)


def expand_rules(rules: Iterable[TensorRule], shapes: Mapping[str, Shape]) -> list[TensorRule]:
    """Expand rules about modules to rules about tensors, one for each suffix in the model.

    Rules about modules that this model lacks (a norm, a bias) are dropped.  ``shapes`` are those of all tensors of the
    model; a tensor that no rule or two rules name is a bug in the family (AssertionError).
    """
    suffixes: dict[str, list[str]] = {}
    for name in shapes:
        module, _, suffix = name.rpartition(".")
        suffixes.setdefault(module, []).append(f".{suffix}")
        suffixes[name] = [""]
    expanded, named = [], set[str]()
    for rule in rules:
        for suffix in suffixes.get(rule.kvad_names[0], ()):
            kvad_names = tuple(module + suffix for module in rule.kvad_names)
            assert all(name in shapes for name in kvad_names), f"{kvad_names}: not all of them are in the model"
            assert not named & set(kvad_names), f"{kvad_names}: named twice"
            named |= set(kvad_names)
            hf_names = tuple(module + suffix for module in rule.hf_names)
            kvad_shapes = tuple(shapes[name] for name in kvad_names)
            expanded.append(TensorRule(kvad_names, hf_names, rule.transform, rule.missing_ok, kvad_shapes))
    unnamed = sorted(set(shapes) - named)
    assert not unnamed, f"no rule for {unnamed[:5]}"
    return expanded


def read_tensors(
    family: Family,
    config: ModelConfig,
    stored: HFTensors,
    where: str,
    report: Callable[[CheckpointError], None] | None = None,
    *,
    separate_experts: bool = False,
    unread: Collection[str] = (),
) -> Iterator[tuple[str, Tensor]]:
    """Yield kvad's tensors, one rule at a time.

    Args:
        family: Family of the file.
        config: Config of the model.
        stored: Tensors of the file; with ``report`` they may be on the meta device.
        where: Path for messages.
        report: Takes each error; None: the first is raised.
        separate_experts: Do not join experts that are stored one by one; that of index 3 has the name ``mlp.gate.3``.
        unread: Names of kvad's tensors that are not yielded; what has only these is not read.

    Raises:
        CheckpointError: If a tensor is missing, unexpected, or of another shape.
    """

    def refuse(error: CheckpointError) -> None:
        if report is None:
            raise error
        report(error)

    used: set[str] = set()
    copies: dict[str, str] = {}  # name -> tensor that it must equal
    rules = family.tensor_rules(config)
    stored = _unstack_experts(rules, stored)
    for rule in rules:
        stored_names = {name: find_stored_name(family, name, stored) for name in rule.hf_names}
        present = {name: stored_name for name, stored_name in stored_names.items() if stored_name is not None}
        used.update(present.values())
        for name, stored_name in present.items():
            copy_names = (_find_name(copy, stored, family) for copy in family.copies.get(name, ()))
            copies |= {copy: stored_name for copy in copy_names if copy is not None}
        missing = [name for name in rule.hf_names if name not in present]
        if missing and rule.missing_ok:
            yield from ((name, torch.zeros(shape)) for name, shape in zip(rule.kvad_names, rule.shapes, strict=True))
            continue
        for name in missing:
            refuse(_missing_tensor(name, stored, where))
        if missing or all(name in unread for name in rule.kvad_names):
            continue
        try:
            tensors = [(name, stored[name]) for name in present.values()]
            converted = _read(_separated(rule) if separate_experts else rule, tensors, where)
            yield from (pair for pair in converted if pair[0] not in unread)
        except CheckpointError as error:
            refuse(error)
    for extra in _extra_tensors(family, stored, used, copies, where):
        refuse(extra)
    if report is None:
        _check_constants(family, config, stored, where)


def _missing_tensor(name: str, stored: HFTensors, where: str) -> CheckpointError:
    close = difflib.get_close_matches(name, list(stored), n=1, cutoff=0.8)
    hint = f"The most similar tensor is {close[0]}." if close else "The file may be of another architecture."
    return CheckpointError(f"{where}: tensor {name} is missing", hint)


def _unstack_experts(rules: Iterable[TensorRule], stored: HFTensors) -> HFTensors:
    """Replace stacked experts, which transformers 5 can write, by one view per expert if the rules name these."""
    views: dict[str, Tensor] = {}
    stacks: set[str] = set()
    for rule in rules:
        match = re.fullmatch(r"(.*\.experts)\.0\.(gate_proj|up_proj|down_proj|w[123])\.weight", rule.hf_names[0])
        if match is None or rule.hf_names[0] in stored:
            continue
        block, part = match[1], {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}.get(match[2], match[2])
        suffix = "down_proj" if part == "down_proj" else "gate_up_proj"
        blocks = (block, block.replace(".block_sparse_moe.", ".mlp."))
        stack = next((name for each in blocks if (name := f"{each}.{suffix}") in stored), None)
        if stack is not None and len(stored[stack]) == len(rule.hf_names):
            halves = (stored[stack],) * 2 if part == "down_proj" else stored[stack].chunk(2, dim=1)
            views |= zip(rule.hf_names, halves[part == "up_proj"].unbind(), strict=True)
            stacks.add(stack)
    return {**{name: stored[name] for name in stored if name not in stacks}, **views} if views else stored


def find_mismatches(family: Family, config: ModelConfig, stored: HFTensors, where: str) -> list[str]:
    """Return what ``read_tensors`` would refuse; ``stored`` may be on the meta device."""
    errors: list[CheckpointError] = []
    for _ in read_tensors(family, config, stored, where, errors.append):
        pass
    return [error.message.removeprefix(f"{where}: ").removeprefix("tensor ") for error in errors]


def _extra_tensors(
    family: Family, stored: HFTensors, used: set[str], copies: Mapping[str, str], where: str
) -> Iterator[CheckpointError]:
    """Yield an error for each tensor that no rule used and that is neither ignored nor an equal copy."""
    ignored = re.compile("|".join(f"(?:{pattern})" for pattern in family.ignored) or r"(?!)")
    for name in stored:
        if name in used or ignored.fullmatch(name.removeprefix(family.prefix)):
            continue
        tensor = stored[name]
        if name not in copies:
            message = f"{where}: tensor {name} {list(tensor.shape)} is extra"
            yield CheckpointError(message, "The config has no such parameter.")
        elif not tensor.is_meta and not torch.equal(tensor, stored[copies[name]]):
            yield CheckpointError(f"{where}: {name} differs from {copies[name]}", "They are one tensor in the config.")


def _check_constants(family: Family, config: ModelConfig, stored: HFTensors, where: str) -> None:
    """Compare tables that kvad computes with those in the file, up to the rounding of float16."""
    for name, table in () if family.extra is None else family.extra(config):
        stored_name = _find_name(name, stored, family)
        if stored_name is None:
            continue
        stored_table, table = torch.atleast_1d(stored[stored_name]), torch.atleast_1d(table)
        num_rows = min(len(stored_table), len(table))
        rows, expected = stored_table[:num_rows].float(), table[:num_rows].float()
        if rows.shape != expected.shape or not torch.allclose(rows, expected, rtol=0.0, atol=1e-2):
            raise CheckpointError(f"{where}: {stored_name} differs from the table that the config describes")


def resolve_config(family: Family, config: ModelConfig, stored: HFTensors) -> ModelConfig:
    """Return the config with what only the tensors decide: tying, and the kind of head.

    If the file has two different matrices for embedding and head, they are not tied, as in transformers 5;
    transformers 4.57 drops the head's matrix.
    """

    def lookup(name: str) -> Tensor | None:
        stored_name = _find_name(name, stored, family)
        return None if stored_name is None else stored[stored_name]

    if config.tie_embeddings and family.head is not None:
        head, table = (find_stored_name(family, name, stored) for name in family.head)
        if head is not None and table is not None and not torch.equal(stored[head], stored[table]):
            config = replace(config, tie_embeddings=False)
    return config if family.resolve is None else family.resolve(config, lookup)


def find_stored_name(family: Family, name: str, stored: HFTensors) -> str | None:
    """Return the name in the file of a tensor or of the first of its copies, or None."""
    names = (_find_name(candidate, stored, family) for candidate in (name, *family.copies.get(name, ())))
    return next((candidate for candidate in names if candidate is not None), None)


def _find_name(name: str, stored: HFTensors, family: Family) -> str | None:
    """Return the name of a tensor in the file, or None.

    Files of a base model may lack the prefix of the model with a head, or have it; old files have other suffixes.
    """
    prefix = family.prefix
    variants = family.name_variants.items()
    spellings = [name, *(name.removesuffix(suffix) + other for suffix, other in variants if name.endswith(suffix))]
    for spelling in spellings:
        nested = spelling.replace("model.", f"model.{prefix}", 1)  # model.language_model.layers
        for candidate in (spelling, spelling.removeprefix(prefix), prefix + spelling, nested):
            if candidate in stored:
                return candidate
    return None


def _separated(rule: TensorRule) -> TensorRule:
    """Return the rule with a tensor of kvad's for each expert, if the file has one for each, and kvad [experts, ..]."""
    if [len(shape) for shape in rule.shapes] != [3] or not 1 < len(rule.hf_names) == rule.shapes[0][0]:
        return rule
    (name,), ((count, *shape),) = rule.kvad_names, rule.shapes
    names = tuple(f"{name}.{index}" for index in range(count))
    return rule._replace(kvad_names=names, transform=SAME, shapes=(tuple(shape),) * count)


def _read(rule: TensorRule, tensors: Sequence[tuple[str, Tensor]], where: str) -> Iterator[tuple[str, Tensor]]:
    try:
        converted = list(rule.transform.read([tensor for _, tensor in tensors], rule.shapes))
    except RuntimeError:
        converted = []
    if [tuple(tensor.shape) for tensor in converted] != list(rule.shapes):
        stored_shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors)
        expected = zip(rule.kvad_names, rule.shapes, strict=True)
        message = f"cannot be converted to {', '.join(f'{name} {list(shape)}' for name, shape in expected)}"
        raise CheckpointError(f"{where}: {stored_shapes} {message}", "Config and tensors disagree.")
    yield from zip(rule.kvad_names, converted, strict=True)


def write_tensors(family: Family, config: ModelConfig, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield Hugging Face's tensors, each once; tensors that are tied there are not written."""
    for rule in family.tensor_rules(config):
        converted = rule.transform.write([weights[name] for name in rule.kvad_names], rule.shapes)
        for name, tensor in zip(rule.hf_names, converted, strict=True):
            yield name, tensor.contiguous()
    if family.extra is not None:
        yield from family.extra(config)


# Keys that no family needs to read: metadata, training, options of calls, generation (``generation_config.py``).
_HARMLESS_KEYS = """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path architectures auto_map
    attn_implementation custom_pipelines dtype finetuning_task id2label label2id model_type name_or_path
    num_labels problem_type task_specific_params tokenizer_class torch_dtype transformers_version
    bad_words_ids begin_suppress_tokens bos_token_id cls_token_id decoder_start_token_id diversity_penalty do_sample
    early_stopping encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty forced_bos_token_id
    forced_eos_token_id length_penalty mask_token_id max_length min_length no_repeat_ngram_size num_beam_groups
    num_beams num_return_sequences pad_token_id prefix remove_invalid_values repetition_penalty sep_token_id
    suppress_tokens temperature top_k top_p typical_p unk_token_id
    gradient_checkpointing output_attentions output_hidden_states output_past output_router_logits output_scores
    return_dict return_dict_in_generate tf_legacy_loss torchscript use_bfloat16 use_cache cache_implementation
    embd_pdrop initializer_factor initializer_range init_std pretraining_tp router_aux_loss_coef
    input_jitter_noise router_jitter_noise scale_init_gpt label_smoothing
"""
_HARMLESS_PARTS = ("dropout", "pdrop", "layerdrop", "summary_", "pooler_")  # of training and of other heads
_HARMLESS_IN_CLASS: Mapping[str, str] = {  # model_type -> keys that its class of transformers does not use either
    **dict.fromkeys(
        ("bart", "blenderbot", "blenderbot-small", "m2m_100", "marian", "mbart", "pegasus"), "num_hidden_layers"
    ),
    **dict.fromkeys(("t5", "mt5", "umt5"), "is_encoder_decoder num_decoder_layers scale_decoder_outputs"),
    "albert": "down_scale_factor gap_size net_structure_type num_memory_blocks",
    "biogpt": "layer_norm_eps",
    "bloom": "slow_but_exact",
    "codegen": "n_ctx",
    "cohere2": "_sliding_window_pattern",
    "deepseek_v2": "aux_loss_alpha ep_size head_dim n_group qk_head_dim seq_aux topk_group",
    "deepseek_v3": "aux_loss_alpha ep_size head_dim num_nextn_predict_layers qk_head_dim seq_aux",
    "deberta-v2": "conv_act conv_groups legacy",
    "exaone4": "layer_types sliding_window_pattern",
    "falcon": "multi_query num_kv_heads num_ln_in_parallel_attn rope_parameters rope_theta",
    "gemma3_text": "_sliding_window_pattern",
    "gemma3": "boi_token_index eoi_token_index image_token_index mm_tokens_per_image vision_config",
    "gemma4": "audio_config audio_token_id boa_token_id boi_token_id eoa_token_id eoa_token_index eoi_token_id "
    "image_token_id video_token_id vision_config vision_soft_tokens_per_image",
    "mistral3": "image_token_id image_token_index multimodal_projector_bias projector_hidden_act spatial_merge_size "
    "vision_config vision_feature_layer",
    "gemma4_text": "moe_intermediate_size num_experts top_k_experts use_double_wide_mlp vocab_size_per_layer_input",
    "glm4_moe_lite": "head_dim num_nextn_predict_layers qk_head_dim",
    "gpt2": "n_ctx",
    "lfm2": "block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_swiglu block_use_xavier_init "
    "conv_dim conv_dim_out conv_use_xavier_init num_heads use_pos_enc",
    "recurrent_gemma": "final_w_init_variance_scale head_dim w_init_variance_scale",
    "gpt_bigcode": "attention_softmax_in_fp32 num_key_value_heads scale_attention_softmax_in_fp32",
    "modernbert": "deterministic_flash_attn initializer_cutoff_factor reference_compile repad_logits_with_grad "
    "sparse_pred_ignore_index sparse_prediction",
    "mpnet": "type_vocab_size",
    "mpt": "attn_impl embedding_fraction expansion_ratio init_device learned_pos_emb verbose",
    "phi3": "original_max_position_embeddings",
    "qwen2": "max_window_layers",
    "dots1": "max_window_layers sliding_window",
    "ernie4_5_moe": "moe_norm_min",
    "glm4_moe": "head_dim num_nextn_predict_layers",
    "hy_v3": "enable_moe_fp32_combine",
    "solar_open": "intermediate_size",
    "youtu": "embedding_initializer_range head_dim qk_head_dim",
    **dict.fromkeys(("granitemoe", "granitemoeshared"), "position_embedding_type"),
    "qwen2_moe": "max_window_layers sliding_window",
    "qwen3": "max_window_layers",
    "qwen3_5": "image_token_id mrope_interleaved mrope_section video_token_id vision_config vision_end_token_id "
    "vision_start_token_id",
    "qwen3_5_text": "mamba_ssm_dtype mrope_interleaved mrope_section mtp_num_hidden_layers "
    "mtp_use_dedicated_embeddings",
    "qwen3_moe": "intermediate_size",
    "t5gemma": "is_decoder vocab_size",
}
_NEUTRAL_VALUES: Mapping[str, Any] = {  # defaults of transformers' ``PretrainedConfig``
    "_remove_final_layer_norm": False,
    "add_cross_attention": False,
    "chunk_size_feed_forward": 0,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "pruned_heads": {},
    "tie_encoder_decoder": False,
    "tie_word_embeddings": True,
}


def _is_harmless(model_type: str, key: str, value: Any) -> bool:
    """Return True for a key of a ``config.json`` that cannot change what kvad computes."""
    is_neutral = value is None or (key in _NEUTRAL_VALUES and value == _NEUTRAL_VALUES[key])
    is_listed = key in _HARMLESS_KEYS.split() or key in _HARMLESS_IN_CLASS.get(model_type, "").split()
    return is_neutral or is_listed or any(part in key for part in _HARMLESS_PARTS)


MAX_LIST, MAX_INTEGER = 10_000, 2**40  # bounds of integers in a ``config.json``
_LIST_SIZES = ("layer", "experts", "labels")  # parts of the names of integers that become the length of a list


class HFConfigReader:
    """Typed reader of a ``config.json``; null means the default, invalid values are refused.

    It records the keys that are looked up, so that ``unused_keys`` can name the others.
    """

    def __init__(self, content: Mapping[str, Any], where: str) -> None:
        self.content, self.where = content, where
        self._used, self._prefix = set[str](), ""  # dotted keys; prefix of this part's keys

    @property
    def model_type(self) -> str:
        return str(self.content.get("model_type", ""))

    @property
    def architecture(self) -> str:
        """Name of the class that wrote the file, empty if it is not recorded."""
        names = self.content.get("architectures") or [""]
        return str(names[0])

    def error(self, message: str, hint: str = "") -> CheckpointError:
        """Return an error of this config."""
        return CheckpointError(f"{self.where}: {message}", hint)

    def derive(self, content: Mapping[str, Any]) -> HFConfigReader:
        """Return a reader of changed content that records keys in this one."""
        reader = HFConfigReader(content, self.where)
        reader._used, reader._prefix = self._used, self._prefix
        return reader

    def num_used_keys(self) -> int:
        """Return the number of the config's keys that were looked up."""
        return len(self._used & self.content.keys())

    def unused_keys(self) -> tuple[str, ...]:
        """Return the dotted keys with a value that nothing has looked up, except harmless ones."""

        def walk(content: Mapping[str, Any], prefix: str) -> Iterator[str]:
            types = {self.model_type, str(content.get("model_type", ""))}  # the whole config's, and this part's
            for key, value in content.items():
                name = f"{prefix}{key}"
                if name not in self._used:
                    yield from () if any(_is_harmless(kind, key, value) for kind in types) else (name,)
                elif isinstance(value, Mapping) and any(used.startswith(f"{name}.") for used in self._used):
                    yield from walk(value, f"{name}.")

        return tuple(walk(self.content, self._prefix))

    def __contains__(self, name: str) -> bool:
        return self.get(name) is not None

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value, or ``default`` if it is absent or null."""
        self._used.add(self._prefix + name)
        value = self.content.get(name)
        return default if value is None else value

    def integer(self, *names: str, default: int | None = None) -> int:
        """Return the integer under the first of ``names`` that is present."""
        value: int = self._first(names, int, "an integer", default)
        if value > (limit := MAX_LIST if any(word in names[0] for word in _LIST_SIZES) else MAX_INTEGER):
            raise self.error(f"{names[0]}: must be at most {limit:,}, got {config_lib.serialization.short_repr(value)}")
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        """Return the number under the first of ``names`` that is present."""
        return float(self._first(names, (int, float), "a number", default))

    def optional_integer(self, name: str) -> int | None:
        return self.integer(name) if name in self else None

    def optional_number(self, name: str) -> float | None:
        return self.number(name) if name in self else None

    def _first(self, names: tuple[str, ...], kind: Any, label: str, default: Any) -> Any:
        name = next((name for name in names if name in self), None)
        if name is None:
            if default is None:
                raise self.error(f"{names[0]} is missing")
            return default
        value = self.content[name]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self.error(f"{name}: must be {label}, got {config_lib.serialization.short_repr(value)}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a boolean.  Raises CheckpointError for any other value."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.error(f"{name}: must be true or false, got {config_lib.serialization.short_repr(value)}")
        return value

    def choice(self, name: str, choices: Mapping[str, Any], default: str | None = None) -> Any:
        """Return ``choices[value]``.  Raises CheckpointError for a value that is not among them."""
        value = self.get(name, default)
        if isinstance(value, dict | list) or value not in choices:
            raise self.error(
                f"{name} {config_lib.serialization.short_repr(value)} is not supported", suggest(str(value), choices)
            )
        return choices[value]

    def require_one_of(self, name: str, *allowed: Any, reason: str = "") -> None:
        """Refuse a field, with ``reason`` as hint, unless it is absent, null, or in ``allowed``."""
        value = self.get(name)
        if value is not None and value not in allowed:
            raise self.error(f"{name} {config_lib.serialization.short_repr(value)} is not supported", reason)

    def part(self, name: str) -> HFConfigReader:
        """Return a reader of a nested config (``text_config``, ``encoder``)."""
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            raise self.error(f"{name}: must be an object, got {config_lib.serialization.short_repr(value)}")
        reader = self.derive(value)
        reader.where, reader._prefix = f"{self.where}: {name}", f"{self._prefix}{name}."
        return reader


@dataclass(frozen=True)
class Family:
    """Conversion of one family's configs and tensors.

    ``write_fields`` returns the ``config.json`` of a model, with ``model_type`` and ``architectures``.  It may leave
    out what transformers has no field for, because ``write`` detects the difference.
    """

    types: tuple[str, ...]  # ``model_type`` values that are read
    read: Callable[[HFConfigReader], ModelConfig]
    rules: Callable[[ModelConfig], Iterable[TensorRule]]
    write_fields: Callable[[ModelConfig], dict[str, Any]]
    prefix: str = ""  # of the base model; some files lack it
    ignored: tuple[str, ...] = ()  # patterns without prefix: tensors that are no weights (constants, tied copies)
    extra: Callable[[ModelConfig], Iterable[tuple[str, Tensor]]] | None = None  # further tensors of the file
    head: tuple[str, str] | None = None  # the head's matrix, and the table that it may be tied to
    name_variants: Mapping[str, str] = field(default_factory=dict)  # suffix -> suffix in other files
    # Completes a config from the tensors of a file, which it looks up by name.
    resolve: Callable[[ModelConfig, Callable[[str], Tensor | None]], ModelConfig] | None = None
    # Other names that a file may have for a tensor, in its place or as an equal copy.
    copies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def read_config(self, fields: HFConfigReader) -> ModelConfig:
        """Read a ``config.json`` with any values.  Raises CheckpointError or ConfigError."""
        try:
            return self.read(fields)
        except ConfigError as error:
            raise ConfigError(f"{fields.where}: {error.message}", error.hint) from error
        except (ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise fields.error(f"a value is invalid for {fields.model_type} ({reason[:200]})") from error

    def tensor_rules(self, config: ModelConfig) -> list[TensorRule]:
        """Return the rules about the tensors of a model."""
        return expand_rules(self.rules(config), config_lib.parameter_shapes.weight_shapes(config))

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Return the ``config.json`` of a model, checked by reading it back.

        Raises CheckpointError if the family cannot express the model; it names the first part that would differ.
        """
        name = self.types[0]
        try:
            content = self.write_fields(config)
            name = content["model_type"]
            read_back = self.read(HFConfigReader(content, name))
        except (CheckpointError, ConfigError) as error:
            prefix = "" if "cannot express" in error.message else f"{name} cannot express this model: "
            raise CheckpointError(prefix + error.message) from error
        except (AssertionError, AttributeError, KeyError, TypeError) as error:  # a model of another kind
            raise CheckpointError(f"{name} cannot express this {config.kind}: {error}") from error
        for difference in config_differences(config, read_back).values():
            raise CheckpointError(f"{name} cannot express this model: {difference}")
        return content


def config_differences(config: ModelConfig, read_back: ModelConfig) -> dict[str, str]:
    """Describe the parts of a written config that are read back otherwise, by their dotted names."""
    fields, others = canonical_config(config), canonical_config(read_back)
    values = {part: (fields.get(part), others.get(part)) for part in {**fields, **others}}
    return {part: f"{part} is {a!r}, would become {b!r}" for part, (a, b) in values.items() if a != b}
