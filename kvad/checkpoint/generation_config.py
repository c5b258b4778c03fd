"""Generation defaults of a checkpoint: special tokens and sampling parameters.

They are read from ``generation_config.json``, in older files from ``config.json``, and written likewise; kvad's layout
stores them under ``"generation"`` in ``config.json``.  Every field is applied as a default that a request may change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kvad import storage
from kvad.checkpoint.folder import read_json, write_json
from kvad.config import Activation, Pooling
from kvad.errors import CheckpointError

GENERATION_FILE = "generation_config.json"
POOLING_MODES: Mapping[str, Pooling] = {  # of sentence-transformers
    "pooling_mode_cls_token": "first",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
}
_ACTIVATIONS: Mapping[str, Activation | None] = {  # of a Dense module, by its class in torch.nn
    "Identity": None,
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
}
_MODULES = ("Transformer", "Pooling", "Dense", "Normalize")  # of sentence-transformers, in this order
_DENSE_NAMES = {"module_input_name": "sentence_embedding", "module_output_name": None}
SOURCE_EOS_KEY = "source_end_token_id"  # field of kvad; transformers leaves this to the tokenizer

# Fields that kvad does not apply, with the values that have no effect.
IGNORED_FIELDS: dict[str, tuple[Any, ...]] = {
    "min_length": (0,),
    "begin_suppress_tokens": ([],),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "penalty_alpha": (0.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "guidance_scale": (1.0,),
    "sequence_bias": (),
    "exponential_decay_length_penalty": (),
    "remove_invalid_values": (False,),
    "renormalize_logits": (False,),
}


@dataclass(frozen=True)
class GenerationConfig:
    """Generation defaults of a checkpoint."""

    decoder_start_token_id: int | None = None  # opens a target (encoder-decoder)
    bos_token_id: int | None = None  # opens a text
    eos_token_ids: tuple[int, ...] = ()  # end a text or target
    source_eos_token_id: int | None = None  # ends an encoder input, if the tokenizer does not add it
    pad_token_id: int | None = None
    forced_bos_token_id: int | None = None  # first generated token
    forced_eos_token_id: int | None = None  # token at the length limit
    suppress_tokens: tuple[int, ...] = ()  # never generated (Marian's padding)
    bad_words_ids: tuple[tuple[int, ...], ...] = ()  # sequences that are never completed
    sampling: Mapping[str, int | float | bool | str] | None = None  # fields of ``SamplingParams``
    # Of a sentence-transformers folder:
    pooling: Pooling | Literal["head"] | None = None  # head: the pooling head's output (a Dense module)
    normalize: bool = False  # vectors have length 1
    max_embed_tokens: int | None = None  # longer texts are truncated
    lowercase: bool = False  # texts are lowercased first
    prompts: Mapping[str, str] = field(default_factory=dict)  # texts before a text, by name
    prompt_name: str | None = None  # prompt of every text, unless another one is requested
    takes_pairs: bool = False  # a classifier of two texts (a cross-encoder of sentence-transformers)
    ignored_fields: tuple[str, ...] = ()  # fields that would change texts and are not applied; logged at load

    def with_source_eos(self, source: list[int]) -> list[int]:
        """Append the token that ends an encoder input, as in training, if it is missing."""
        if self.source_eos_token_id is None or not source or source[-1] == self.source_eos_token_id:
            return source
        return [*source, self.source_eos_token_id]


class DenseModule(NamedTuple):
    """A Dense module of sentence-transformers: ``activation(W x + b)`` of the pooled vector."""

    folder: Path
    pooling: Pooling
    in_features: int
    out_features: int
    bias: bool
    activation: Activation | None


def read_dense(folder: Path) -> DenseModule | None:
    """Read the Dense module of a sentence-transformers folder, if any.

    Raises:
        CheckpointError: If its options are invalid or not supported.
    """
    names = _read_modules(folder)
    if "Dense" not in names:
        return None
    path = folder / names["Dense"]
    content, file = read_json(path / "config.json"), path / "config.json"
    bias, sizes = content.get("bias", True), [content.get(key, 0) for key in ("in_features", "out_features")]
    if not all(type(size) is int and size > 0 for size in sizes) or type(bias) is not bool:
        raise CheckpointError(f"{file}: in_features, out_features: must be sizes, and bias true or false")
    name = content.get("activation_function", "torch.nn.modules.activation.Tanh")
    module, _, kind = str(name).rpartition(".")
    if not module.startswith("torch.nn") or kind not in _ACTIVATIONS:
        raise CheckpointError(f"{file}: activation_function {name!r} is not supported")
    inputs = {content.get(key, default) for key, default in _DENSE_NAMES.items()} - {None}
    if inputs != {"sentence_embedding"} or content.get("use_residual", False) is not False:
        raise CheckpointError(f"{file}: only a module that replaces the sentence's vector is supported")
    pooling = _read_pooling(folder / names["Pooling"], has_prompts=False) if "Pooling" in names else None
    if pooling is None:
        raise CheckpointError(f"{folder}: a Dense module requires a Pooling module with one pooling mode")
    return DenseModule(path, pooling, sizes[0], sizes[1], bias, _ACTIVATIONS[kind])


def _read_modules(folder: Path) -> dict[str, str]:
    """Return the folders of a sentence-transformers model by the kind of their module; {} for another folder."""
    modules = folder / "modules.json"
    if not modules.exists():
        return {}
    try:
        entries = storage.strict_json.loads(storage.filesystem.read_text(modules))
        pairs = [(str(entry["type"]).rpartition(".")[2], str(entry["path"])) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{modules}: cannot read the modules: {error}") from error
    for kind, name in pairs:
        if kind not in _MODULES:
            hint = f"Only {', '.join(_MODULES)} are. Without modules.json: kvad embed --pooling mean."
            raise CheckpointError(f"{modules}: {kind} is not supported", hint)
        if set(name) & set("/\\:") or name in (".", ".."):
            raise CheckpointError(f"{modules}: path: must be a folder's name, got {name[:80]!r}")
    kinds = [kind for kind, _ in pairs]
    if kinds != [kind for kind in _MODULES if kind in kinds]:
        raise CheckpointError(f"{modules}: the modules {', '.join(kinds)} are not supported in this order")
    return dict(pairs)


def read_embedding(folder: Path) -> dict[str, Any]:
    """Read how a sentence-transformers folder embeds texts, as fields of ``GenerationConfig``; {} for another folder.

    Raises:
        CheckpointError: If a file is invalid, or a module or option is not supported.
    """
    names = _read_modules(folder)
    if not names:
        return {}
    config = _read_optional(folder / "config_sentence_transformers.json")
    prompts, prompt_name = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(prompt, str) for prompt in prompts.values()):
        raise CheckpointError(f"{folder}/config_sentence_transformers.json: prompts: must be an object of texts")
    if prompt_name is not None and prompt_name not in prompts:
        raise CheckpointError(f"{folder}/config_sentence_transformers.json: default_prompt_name: no such prompt")
    length = _read_optional(folder / names.get("Transformer", "") / "sentence_bert_config.json")
    max_tokens = length.get("max_seq_length")
    if max_tokens is None:  # as in sentence-transformers; a tokenizer without a limit has 1e30
        limit = _read_optional(folder / names.get("Transformer", "") / "tokenizer_config.json").get("model_max_length")
        max_tokens = limit if type(limit) is int and 0 < limit < 2**31 else None
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise CheckpointError(f"{folder}/sentence_bert_config.json: max_seq_length: must be a number of tokens")
    pooling = _read_pooling(folder / names["Pooling"], bool(prompts)) if "Pooling" in names else None
    return {
        "pooling": "head" if "Dense" in names else pooling,
        "normalize": "Normalize" in names,
        "max_embed_tokens": max_tokens,
        "lowercase": length.get("do_lower_case") is True,
        "prompts": prompts,
        "prompt_name": prompt_name,
    }


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _read_pooling(folder: Path, has_prompts: bool) -> Pooling | None:
    """Read the configuration of a Pooling module."""
    content = _read_optional(folder / "config.json")
    modes = [name for name, enabled in content.items() if name.startswith("pooling_mode") and enabled]
    if len(modes) > 1 or not set(modes) <= set(POOLING_MODES):
        hint = f"Supported is one of {', '.join(POOLING_MODES)}."
        raise CheckpointError(f"{folder}: {', '.join(modes)} is not supported", hint)
    if content.get("include_prompt") is False and has_prompts:
        raise CheckpointError(f"{folder}: include_prompt: must be true for a model with prompts")
    return POOLING_MODES[modes[0]] if modes else None


def read_generation_config(config: Mapping[str, Any], generation: Mapping[str, Any] | None) -> GenerationConfig:
    """Read generation defaults from ``generation_config.json``, or without it from ``config.json``."""
    fields = config if generation is None else generation

    def token_or_none(name: str) -> int | None:
        value = fields.get(name)
        if isinstance(value, Sequence) and not isinstance(value, str):
            value = value[0] if len(value) else None
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def list_values(name: str) -> list[Any]:
        value = fields.get(name)
        values = [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
        groups = [item if isinstance(item, list) and name == "bad_words_ids" else [item] for item in values]
        tokens = [token for group in groups for token in group]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
            raise CheckpointError(f"generation_config.json: {name}: must be token ids, got {value!r}")
        return values

    bad_words = [tuple(tokens) if isinstance(tokens, list) else (tokens,) for tokens in list_values("bad_words_ids")]
    single_bad_words = [tokens[0] for tokens in bad_words if len(tokens) == 1]
    return GenerationConfig(
        decoder_start_token_id=token_or_none("decoder_start_token_id"),
        bos_token_id=token_or_none("bos_token_id"),
        eos_token_ids=tuple(list_values("eos_token_id")),
        source_eos_token_id=token_or_none(SOURCE_EOS_KEY),
        pad_token_id=token_or_none("pad_token_id"),
        forced_bos_token_id=token_or_none("forced_bos_token_id"),
        forced_eos_token_id=token_or_none("forced_eos_token_id"),
        suppress_tokens=tuple(sorted({*single_bad_words, *list_values("suppress_tokens")})),
        bad_words_ids=tuple(tokens for tokens in bad_words if len(tokens) > 1),
        sampling=_sampling(fields) if generation is not None else None,
        ignored_fields=tuple(
            name for name, neutral_values in IGNORED_FIELDS.items() if fields.get(name) not in (None, *neutral_values)
        ),
    )


def _sampling(fields: Mapping[str, Any]) -> dict[str, int | float | bool | str]:
    """Return the recommended search or sampling parameters; greedy unless ``do_sample``."""
    names = {"repetition_penalty": "repetition_penalty", "no_repeat_ngram_size": "no_repeat_ngram_size"}
    names |= {"min_new_tokens": "min_tokens", "max_new_tokens": "max_tokens"}
    # ``max_length`` counts the token that opens a target; for a decoder it is the model's limit anyway.
    max_length, has_start = fields.get("max_length"), "decoder_start_token_id" in fields
    if isinstance(max_length, int) and max_length > 1 and has_start and "max_new_tokens" not in fields:
        fields = {**fields, "max_new_tokens": max_length - 1}
    if fields.get("do_sample", False):
        names |= {name: name for name in ("temperature", "top_k", "top_p", "min_p", "typical_p")}
    elif isinstance(fields.get("num_beams"), int) and fields["num_beams"] > 1:
        beam_names = "num_beams", "num_beam_groups", "diversity_penalty", "length_penalty", "early_stopping"
        names |= dict(zip(beam_names, beam_names, strict=True))
    sampling = {kvad_name: fields[hf_name] for hf_name, kvad_name in names.items() if fields.get(hf_name) is not None}
    return sampling if fields.get("do_sample", False) else {**sampling, "temperature": 0.0}


def config_json_fields(generation: GenerationConfig) -> dict[str, Any]:
    """Return the fields that ``config.json`` repeats."""
    ends = generation.eos_token_ids
    fields = {
        "bos_token_id": generation.bos_token_id,
        "eos_token_id": ends[0] if len(ends) == 1 else list(ends) or None,
        "pad_token_id": generation.pad_token_id,
        "decoder_start_token_id": generation.decoder_start_token_id,
    }
    always = ("bos_token_id", "eos_token_id")  # transformers would use its own default ids if these were absent
    return {name: value for name, value in fields.items() if value is not None or name in always}


def generation_json(generation: GenerationConfig) -> dict[str, Any] | None:
    """Return the content of ``generation_config.json``, or None if all fields are defaults."""
    if generation == GenerationConfig():
        return None
    bad_words = [*([token] for token in generation.suppress_tokens), *map(list, generation.bad_words_ids)]
    fields = config_json_fields(generation) | {
        "forced_bos_token_id": generation.forced_bos_token_id,
        "forced_eos_token_id": generation.forced_eos_token_id,
        "bad_words_ids": bad_words or None,
        SOURCE_EOS_KEY: generation.source_eos_token_id,
    }
    names = {"min_tokens": "min_new_tokens", "max_tokens": "max_new_tokens"}
    sampling = dict(generation.sampling or {})
    if sampling:
        fields["do_sample"] = sampling.get("temperature", 1.0) != 0
    fields |= {names.get(name, name): value for name, value in sampling.items() if name != "temperature" or value}
    return {name: value for name, value in fields.items() if value is not None}


def write_embedding(folder: Path, generation: GenerationConfig, hidden_size: int) -> None:
    """Write how texts are embedded in the files of sentence-transformers; the inverse of ``read_embedding``."""
    pool, normalize = generation.pooling, generation.normalize
    if pool is None:
        return
    if pool == "head":
        message = "a model with a Dense module cannot be written as a Hugging Face folder"
        raise CheckpointError(message, "Use the folder that it came from, or kvad import.")
    parts = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] if normalize else [])]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(parts)
    ]
    write_json(folder / "modules.json", modules, indent=2)
    for path, _ in parts[1:]:
        (folder / path).mkdir()
    modes = {name: mode == pool for name, mode in POOLING_MODES.items()}
    pooling_config = {"word_embedding_dimension": hidden_size, **modes}
    write_json(folder / "1_Pooling" / "config.json", pooling_config, indent=2)
    if generation.max_embed_tokens is not None or generation.lowercase:
        content = {"max_seq_length": generation.max_embed_tokens, "do_lower_case": generation.lowercase}
        write_json(folder / "sentence_bert_config.json", content, indent=2)
    if generation.prompts:
        prompts = {"prompts": dict(generation.prompts), "default_prompt_name": generation.prompt_name}
        write_json(folder / "config_sentence_transformers.json", prompts, indent=2)
