"""Shared parts of Llama-like decoders: sizes, tensors, layers of several types, writing.

A size that is absent in a file has the default of its class, which the family states (:func:`with_defaults`).
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
STACKED = TensorTransform(  # one tensor of kvad's; the file has one per index of its first axis
    lambda tensors, shapes: [torch.stack(list(tensors))], lambda tensors, shapes: list(tensors[0].unbind())
)
_SLIDING, _FULL = "sliding_attention", "full_attention"

LayerRules = Callable[[str, str], Iterable[TensorRule]]


# ---------------------------------------------------------------- reading


def with_defaults(fields: HFConfigReader, **defaults: Any) -> HFConfigReader:
    """Return the fields over the defaults of their class.  Null stays null."""
    fields.require_one_of("quantization_config", reason="Convert the weights to bfloat16 first.")
    return HFConfigReader({**defaults, **fields.content}, fields.where)


def full_rope(fields: HFConfigReader, *, theta: float = 10000.0, **changes: Any) -> RopeConfig:
    """Read rotary positions over the full head.  Raises CheckpointError for part of a head."""
    position = read_rope(fields, max_seq_len=fields.integer("max_position_embeddings"), theta=theta, **changes)
    if position.partial_rotary_factor != 1:
        raise CheckpointError(
            f"{fields.where}: partial_rotary_factor {position.partial_rotary_factor} is not supported"
        )
    return position


def attention_config(fields: HFConfigReader, **changes: Any) -> AttentionConfig:
    """Build grouped-query attention from the file's sizes and the family's ``changes``."""
    heads = fields.integer("num_attention_heads")
    dim = fields.integer("head_dim") if "head_dim" in fields else None
    return AttentionConfig(heads, fields.integer("num_key_value_heads", default=heads), dim, **changes)


def rms_norm(fields: HFConfigReader, default: float = 1e-6, **changes: Any) -> NormConfig:
    """Build an RMSNorm from ``rms_norm_eps``."""
    return NormConfig("rms", fields.number("rms_norm_eps", default=default), **changes)


def read_window(fields: HFConfigReader) -> int | None:
    """Return the number of visible tokens in layers with a window, or None if there is none."""
    return fields.integer("sliding_window") if "sliding_window" in fields else None


def window_pattern(fields: HFConfigReader, sliding: Callable[[int], bool]) -> str:
    """Return L for layers with a window, G for others, by ``layer_types`` or ``sliding(index)``."""
    layers = fields.integer("num_hidden_layers")
    types = fields.get("layer_types") or [_SLIDING if sliding(index) else _FULL for index in range(layers)]
    if not isinstance(types, list) or len(types) != layers or not set(types) <= {_SLIDING, _FULL}:
        raise CheckpointError(
            f"{fields.where}: layer_types {types!r} is not supported", f"Each must be {_SLIDING} or {_FULL}."
        )
    if _SLIDING in types and read_window(fields) is None:
        raise CheckpointError(f"{fields.where}: sliding_window is missing", "layer_types has layers with a window.")
    return "".join("L" if kind == _SLIDING else "G" for kind in types)


def optional_window_pattern(fields: HFConfigReader, sliding: Callable[[int], bool]) -> str:
    """Return :func:`window_pattern` for a class where ``use_sliding_window`` enables windows."""
    used = fields.flag("use_sliding_window") and read_window(fields) is not None
    pattern = window_pattern(fields, lambda index: used and sliding(index))
    if "L" in pattern and not used:
        raise CheckpointError(f"{fields.where}: layer_types has layers with a window, use_sliding_window is false")
    return pattern


def build_stack(layer_types: Mapping[str, LayerConfig], pattern: str, **rest: Any) -> StackConfig:
    """Build a stack from one letter per layer; the letter of a single layer type is L."""
    if len(set(pattern)) == 1:
        return StackConfig(len(pattern), {"L": layer_types[pattern[0]]}, **rest)
    return StackConfig(
        len(pattern),
        {letter: layer_types[letter] for letter in dict.fromkeys(pattern)},
        shortest_pattern(pattern),
        **rest,
    )


def build_model_config(fields: HFConfigReader, decoder: StackConfig, *, tie: bool = False, **rest: Any) -> ModelConfig:
    """Build a decoder; ``tie`` is the class's default of ``tie_word_embeddings``."""
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
    """Yield the model's rules; ``layer`` returns those of one layer for two prefixes."""
    yield tensor_rule("embedding.tokens", "model.embed_tokens")
    for index in range(config.stack.num_layers):
        yield from layer(f"decoder.layers.{index}", f"model.layers.{index}")
    yield tensor_rule("decoder.norm", "model.norm")
    yield tensor_rule("head", "lm_head")


def decoder_rules(names: Mapping[str, str]) -> Callable[[ModelConfig], Iterator[TensorRule]]:
    """Build the rules of a family whose tensors differ only in their names."""
    return lambda config: layer_rules(config, lambda kvad_name, hf_name: prefix_rules(kvad_name, hf_name, names))


# ---------------------------------------------------------------- writing


def size_fields(config: ModelConfig, model_type: str, architecture: str) -> dict[str, Any]:
    """Return the fields that every such config.json has."""
    attention, mlp = config.stack.layer_config(0).attention, config.stack.layer_config(0).mlp
    out = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": mlp.intermediate_size,
        "num_hidden_layers": config.stack.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads or attention.num_heads,
        "max_position_embeddings": config.max_seq_len,
        "tie_word_embeddings": config.tie_embeddings,
        "pad_token_id": None,  # the class's default exceeds a small vocabulary
    }
    return out if attention.head_dim is None else {**out, "head_dim": attention.head_dim}


def write_layer_types(config: ModelConfig) -> dict[str, Any]:
    """Return the window, and the type of each layer."""
    windows = [config.stack.layer_config(index).attention.window for index in range(config.stack.num_layers)]
    return {
        "sliding_window": next((size for size in windows if size is not None), None),
        "layer_types": [_FULL if size is None else _SLIDING for size in windows],
    }


def with_rope_type(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    """Rename ``rope_type`` to ``type`` in ``rope_scaling``; retain only ``names`` besides it.

    Some classes of transformers 4 refuse any other field.
    """
    scaling = fields["rope_scaling"]
    if scaling is None:
        return fields
    retained = {name: scaling[name] for name in names if name in scaling}
    return {**fields, "rope_scaling": {"type": scaling["rope_type"], **retained}}


def language_head(config: ModelConfig) -> LanguageHeadConfig:
    """Return the head, or a default one if it is of another kind, which reading back detects."""
    return config.head if isinstance(config.head, LanguageHeadConfig) else LanguageHeadConfig()


def decoder_family(
    types: tuple[str, ...],
    read: Callable[[HFConfigReader], ModelConfig],
    rules: Callable[[ModelConfig], Iterable[TensorRule]],
    write: Callable[[ModelConfig], dict[str, Any]],
) -> Family:
    """Build a family with Llama's prefix, ignored tensors and head."""
    return Family(
        types,
        read,
        rules,
        write,
        prefix="model.",
        ignored=(r".*rotary_emb\.inv_freq", r"lm_head\.weight"),
        head=("lm_head.weight", "model.embed_tokens.weight"),
    )
