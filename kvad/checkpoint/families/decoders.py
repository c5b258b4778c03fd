"""What decoders in Llama's manner share: names of sizes and tensors, layers of several kinds, the way back.

A file that says nothing of a size leaves it to their class, whose value the family states (:func:`known`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from kvad.checkpoint.families.common import rope, shortest
from kvad.checkpoint.hf import Family, Fields, Rule, Way, rule, rules_under
from kvad.config import Attention, Head, Layer, ModelConfig, Norm, Rope, Stack
from kvad.errors import CheckpointError

__all__ = [
    "LAYER",
    "QK_NORM",
    "STACKED",
    "attention",
    "chosen_letters",
    "family",
    "full_rope",
    "known",
    "language_head",
    "layer_types",
    "letters",
    "make",
    "rms",
    "rules",
    "rules_of",
    "sizes",
    "stack",
    "window",
    "with_type",
]

LAYER = {
    "mixer.q": "self_attn.q_proj",
    "mixer.k": "self_attn.k_proj",
    "mixer.v": "self_attn.v_proj",
    "mixer.out": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
}
QK_NORM = {"mixer.q_norm": "self_attn.q_norm", "mixer.k_norm": "self_attn.k_norm"}
STACKED = Way(  # one tensor of ours, along its first axis theirs
    lambda tensors, shapes: [torch.stack(list(tensors))], lambda tensors, shapes: list(tensors[0].unbind())
)
_SLIDING, _FULL = "sliding_attention", "full_attention"

LayerRules = Callable[[str, str], Iterable[Rule]]


# ---------------------------------------------------------------- reading


def known(fields: Fields, **defaults: Any) -> Fields:
    """The fields over what their class assumes where the file is silent.  A null stays null."""
    fields.refuse("quantization_config", why="convert the weights to bfloat16 first")
    return Fields({**defaults, **fields.content}, fields.where)


def full_rope(fields: Fields, *, theta: float = 10000.0, **changes: Any) -> Rope:
    """Rotary positions over the whole head: their class knows no others."""
    position = rope(fields, limit=fields.integer("max_position_embeddings"), theta=theta, **changes)
    if position.fraction != 1:
        raise CheckpointError(f"{fields.where}: partial_rotary_factor {position.fraction} is not supported")
    return position


def attention(fields: Fields, **changes: Any) -> Attention:
    """Grouped attention of their sizes; the family says the rest."""
    heads = fields.integer("num_attention_heads")
    dim = fields.integer("head_dim") if "head_dim" in fields else None
    return Attention(heads, fields.integer("num_key_value_heads", default=heads), dim, **changes)


def rms(fields: Fields, default: float = 1e-6, **changes: Any) -> Norm:
    return Norm("rms", fields.number("rms_norm_eps", default=default), **changes)


def window(fields: Fields) -> int | None:
    """Visible tokens of a layer with a window; None where the file says null or nothing."""
    return fields.integer("sliding_window") if "sliding_window" in fields else None


def letters(fields: Fields, sliding: Callable[[int], bool]) -> str:
    """L for a layer with a window, G for one without: by ``layer_types``, or ``sliding`` (of the layer's index)."""
    layers = fields.integer("num_hidden_layers")
    types = fields.get("layer_types") or [_SLIDING if sliding(index) else _FULL for index in range(layers)]
    if not isinstance(types, list) or len(types) != layers or not set(types) <= {_SLIDING, _FULL}:
        raise CheckpointError(f"{fields.where}: layer_types {types!r} is not supported", f"{_SLIDING} or {_FULL}, each")
    if _SLIDING in types and window(fields) is None:
        raise CheckpointError(f"{fields.where}: sliding_window is missing", "layer_types has layers with a window")
    return "".join("L" if kind == _SLIDING else "G" for kind in types)


def chosen_letters(fields: Fields, sliding: Callable[[int], bool]) -> str:
    """The same where ``use_sliding_window`` says whether there are windows at all."""
    used = fields.flag("use_sliding_window") and window(fields) is not None
    found = letters(fields, lambda index: used and sliding(index))
    if "L" in found and not used:
        raise CheckpointError(f"{fields.where}: layer_types has layers with a window, use_sliding_window is false")
    return found


def stack(kinds: Mapping[str, Layer], pattern: str, **rest: Any) -> Stack:
    """One letter per layer, in the shortest pattern; a single kind is L."""
    if len(set(pattern)) == 1:
        return Stack(len(pattern), {"L": kinds[pattern[0]]}, **rest)
    return Stack(len(pattern), {letter: kinds[letter] for letter in dict.fromkeys(pattern)}, shortest(pattern), **rest)


def make(fields: Fields, decoder: Stack, *, tie: bool = False, **rest: Any) -> ModelConfig:
    """The model around a stack.  ``tie``: what their class assumes."""
    return ModelConfig(
        width=fields.integer("hidden_size"),
        vocab=fields.integer("vocab_size"),
        limit=fields.integer("max_position_embeddings"),
        decoder=decoder,
        tie=fields.flag("tie_word_embeddings", tie),
        **rest,
    )


# ---------------------------------------------------------------- tensors


def rules_of(config: ModelConfig, layer: LayerRules) -> Iterator[Rule]:
    """``layer`` gives the rules of one layer, below two prefixes."""
    yield rule("embed.tokens", "model.embed_tokens")
    for index in range(config.stack.layers):
        yield from layer(f"decoder.layers.{index}", f"model.layers.{index}")
    yield rule("decoder.norm", "model.norm")
    yield rule("head", "lm_head")


def rules(names: Mapping[str, str]) -> Callable[[ModelConfig], Iterator[Rule]]:
    """For a family whose tensors are ours under other names."""
    return lambda config: rules_of(config, lambda ours, theirs: rules_under(ours, theirs, names))


# ---------------------------------------------------------------- writing


def sizes(config: ModelConfig, model_type: str, architecture: str) -> dict[str, Any]:
    """What every such config.json holds."""
    mixer, mlp = config.stack.layer(0).mixer, config.stack.layer(0).mlp
    out = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": config.vocab,
        "hidden_size": config.width,
        "intermediate_size": mlp.hidden,
        "num_hidden_layers": config.stack.layers,
        "num_attention_heads": mixer.heads,
        "num_key_value_heads": mixer.kv_heads or mixer.heads,
        "max_position_embeddings": config.limit,
        "tie_word_embeddings": config.tie,
        "pad_token_id": None,  # their own is beyond a small vocabulary
    }
    return out if mixer.head_dim is None else {**out, "head_dim": mixer.head_dim}


def layer_types(config: ModelConfig) -> dict[str, Any]:
    """The window, and which layers have it."""
    windows = [config.stack.layer(index).mixer.window for index in range(config.stack.layers)]
    return {
        "sliding_window": next((size for size in windows if size is not None), None),
        "layer_types": [_FULL if size is None else _SLIDING for size in windows],
    }


def with_type(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    """The same with ``type`` for ``rope_type`` in ``rope_scaling``, and of the rest ``names`` alone: some classes of
    transformers 4 refuse whatever else is there."""
    scaling = fields["rope_scaling"]
    if scaling is None:
        return fields
    kept = {name: scaling[name] for name in names if name in scaling}
    return {**fields, "rope_scaling": {"type": scaling["rope_type"], **kept}}


def language_head(config: ModelConfig) -> Head:
    """The head, or a plain one where it is of another kind: reading it back will tell."""
    return config.head if isinstance(config.head, Head) else Head()


def family(
    types: tuple[str, ...],
    read: Callable[[Fields], ModelConfig],
    rules: Callable[[ModelConfig], Iterable[Rule]],
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
