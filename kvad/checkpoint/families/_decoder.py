"""What decoders in Llama's manner share: names of sizes and tensors, layers of several kinds, the way back.

A file that says nothing of a size leaves it to their class, whose value the family states (:func:`known`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from kvad.checkpoint.conversion import Family, HFConfigReader, TensorRule, TensorTransform, prefix_rules, tensor_rule
from kvad.checkpoint.families._common import read_rope, shortest_pattern
from kvad.config import (
    AttentionConfig,
    LanguageHeadConfig,
    LayerConfig,
    ModelConfig,
    NormConfig,
    RopeConfig,
    StackConfig,
)
from kvad.errors import CheckpointError

LAYER = {
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
}
QK_NORM = {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}
STACKED = TensorTransform(  # one tensor of ours, along its first axis theirs
    lambda tensors, shapes: [torch.stack(list(tensors))], lambda tensors, shapes: list(tensors[0].unbind())
)
_SLIDING, _FULL = "sliding_attention", "full_attention"

LayerRules = Callable[[str, str], Iterable[TensorRule]]


# ---------------------------------------------------------------- reading


def with_defaults(fields: HFConfigReader, **defaults: Any) -> HFConfigReader:
    """The fields over what their class assumes where the file is silent.  A null stays null."""
    fields.require_one_of("quantization_config", why="convert the weights to bfloat16 first")
    return HFConfigReader({**defaults, **fields.content}, fields.where)


def full_rope(fields: HFConfigReader, *, theta: float = 10000.0, **changes: Any) -> RopeConfig:
    """Rotary positions over the whole head: their class knows no others."""
    position = read_rope(fields, limit=fields.integer("max_position_embeddings"), theta=theta, **changes)
    if position.partial_rotary_factor != 1:
        raise CheckpointError(
            f"{fields.where}: partial_rotary_factor {position.partial_rotary_factor} is not supported"
        )
    return position


def attention_config(fields: HFConfigReader, **changes: Any) -> AttentionConfig:
    """Grouped attention of their sizes; the family says the rest."""
    heads = fields.integer("num_attention_heads")
    dim = fields.integer("head_dim") if "head_dim" in fields else None
    return AttentionConfig(heads, fields.integer("num_key_value_heads", default=heads), dim, **changes)


def rms_norm(fields: HFConfigReader, default: float = 1e-6, **changes: Any) -> NormConfig:
    return NormConfig("rms", fields.number("rms_norm_eps", default=default), **changes)


def read_window(fields: HFConfigReader) -> int | None:
    """Visible tokens of a layer with a window; None where the file says null or nothing."""
    return fields.integer("sliding_window") if "sliding_window" in fields else None


def window_pattern(fields: HFConfigReader, sliding: Callable[[int], bool]) -> str:
    """L for a layer with a window, G for one without: by ``layer_types``, or ``sliding`` (of the layer's index)."""
    layers = fields.integer("num_hidden_layers")
    types = fields.get("layer_types") or [_SLIDING if sliding(index) else _FULL for index in range(layers)]
    if not isinstance(types, list) or len(types) != layers or not set(types) <= {_SLIDING, _FULL}:
        raise CheckpointError(f"{fields.where}: layer_types {types!r} is not supported", f"{_SLIDING} or {_FULL}, each")
    if _SLIDING in types and read_window(fields) is None:
        raise CheckpointError(f"{fields.where}: sliding_window is missing", "layer_types has layers with a window")
    return "".join("L" if kind == _SLIDING else "G" for kind in types)


def optional_window_pattern(fields: HFConfigReader, sliding: Callable[[int], bool]) -> str:
    """The same where ``use_sliding_window`` says whether there are windows at all."""
    used = fields.flag("use_sliding_window") and read_window(fields) is not None
    found = window_pattern(fields, lambda index: used and sliding(index))
    if "L" in found and not used:
        raise CheckpointError(f"{fields.where}: layer_types has layers with a window, use_sliding_window is false")
    return found


def build_stack(kinds: Mapping[str, LayerConfig], pattern: str, **rest: Any) -> StackConfig:
    """One letter per layer, in the shortest pattern; a single kind is L."""
    if len(set(pattern)) == 1:
        return StackConfig(len(pattern), {"L": kinds[pattern[0]]}, **rest)
    return StackConfig(
        len(pattern), {letter: kinds[letter] for letter in dict.fromkeys(pattern)}, shortest_pattern(pattern), **rest
    )


def build_model_config(fields: HFConfigReader, decoder: StackConfig, *, tie: bool = False, **rest: Any) -> ModelConfig:
    """The model around a stack.  ``tie``: what their class assumes."""
    return ModelConfig(
        hidden_size=fields.integer("hidden_size"),
        vocab_size=fields.integer("vocab_size"),
        max_seq_len=fields.integer("max_position_embeddings"),
        decoder=decoder,
        tie_embeddings=fields.flag("tie_word_embeddings", tie),
        **rest,
    )


# ---------------------------------------------------------------- tensors


def layer_rules(config: ModelConfig, layer: LayerRules) -> Iterator[TensorRule]:
    """``layer`` gives the rules of one layer, below two prefixes."""
    yield tensor_rule("embedding.tokens", "model.embed_tokens")
    for index in range(config.stack.num_layers):
        yield from layer(f"decoder.layers.{index}", f"model.layers.{index}")
    yield tensor_rule("decoder.norm", "model.norm")
    yield tensor_rule("head", "lm_head")


def decoder_rules(names: Mapping[str, str]) -> Callable[[ModelConfig], Iterator[TensorRule]]:
    """For a family whose tensors are ours under other names."""
    return lambda config: layer_rules(config, lambda ours, theirs: prefix_rules(ours, theirs, names))


# ---------------------------------------------------------------- writing


def size_fields(config: ModelConfig, model_type: str, architecture: str) -> dict[str, Any]:
    """What every such config.json holds."""
    mixer, mlp = config.stack.layer_config(0).attention, config.stack.layer_config(0).mlp
    out = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": mlp.intermediate_size,
        "num_hidden_layers": config.stack.num_layers,
        "num_attention_heads": mixer.num_heads,
        "num_key_value_heads": mixer.num_kv_heads or mixer.num_heads,
        "max_position_embeddings": config.max_seq_len,
        "tie_word_embeddings": config.tie_embeddings,
        "pad_token_id": None,  # their own is beyond a small vocabulary
    }
    return out if mixer.head_dim is None else {**out, "head_dim": mixer.head_dim}


def write_layer_types(config: ModelConfig) -> dict[str, Any]:
    """The window, and which layers have it."""
    windows = [config.stack.layer_config(index).attention.window for index in range(config.stack.num_layers)]
    return {
        "sliding_window": next((size for size in windows if size is not None), None),
        "layer_types": [_FULL if size is None else _SLIDING for size in windows],
    }


def with_rope_type(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    """The same with ``type`` for ``rope_type`` in ``rope_scaling``, and of the rest ``names`` alone: some classes of
    transformers 4 refuse whatever else is there."""
    scaling = fields["rope_scaling"]
    if scaling is None:
        return fields
    kept = {name: scaling[name] for name in names if name in scaling}
    return {**fields, "rope_scaling": {"type": scaling["rope_type"], **kept}}


def language_head(config: ModelConfig) -> LanguageHeadConfig:
    """The head, or a plain one where it is of another kind: reading it back will tell."""
    return config.head if isinstance(config.head, LanguageHeadConfig) else LanguageHeadConfig()


def decoder_family(
    types: tuple[str, ...],
    read: Callable[[HFConfigReader], ModelConfig],
    rules: Callable[[ModelConfig], Iterable[TensorRule]],
    write: Callable[[ModelConfig], dict[str, Any]],
) -> Family:
    return Family(
        types,
        read,
        rules,
        write,
        prefix="model.",
        ignored=(r".*rotary_emb\.inv_freq", r"lm_head\.weight"),
        head=("lm_head.weight", "model.embed_tokens.weight"),
    )
