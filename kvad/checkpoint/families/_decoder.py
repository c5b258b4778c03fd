"""Decoders that differ only in fields and names: one ``DecoderClass`` for each class of transformers.

A class lists the fields of its config (``_fields.py``) and the names of its tensors.  ``decoder_family`` makes a
family of one or several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from kvad import config as cfg
from kvad.checkpoint import conversion
from kvad.checkpoint.conversion import Family, HFConfigReader, TensorRule, TensorTransform, prefix_rules, tensor_rule
from kvad.checkpoint.families._common import shortest_pattern
from kvad.checkpoint.families._fields import (
    FieldTable,
    activation,
    flag,
    integer,
    number,
    optional_integer,
    read_table,
    write_table,
)
from kvad.config import ModelConfig, head_dim
from kvad.errors import CheckpointError

LAYER = {  # kvad -> Hugging Face
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
TENSORS = {
    "embedding.tokens": "model.embed_tokens",
    "decoder.layers": "model.layers",
    "decoder.norm": "model.norm",
    "head": "lm_head",
}
SIZES: FieldTable = {  # of classes with Llama's names; a class states its defaults
    "hidden_size": integer("hidden_size"),
    "vocab_size": integer("vocab_size"),
    "max_seq_len": integer("max_position_embeddings"),
    "tie_embeddings": flag("tie_word_embeddings"),
    "stack.num_layers": integer("num_hidden_layers"),
    "attention.num_heads": integer("num_attention_heads"),
    "attention.num_kv_heads": integer(
        "num_key_value_heads", default=lambda fields: fields.integer("num_attention_heads")
    ),
    "attention.head_dim": optional_integer("head_dim", write_none=False),
    "mlp.intermediate_size": integer("intermediate_size"),
    "mlp.activation": activation("hidden_act", "silu"),
    "norm.eps": number("rms_norm_eps", 1e-6),
}
STACKED = TensorTransform(  # one tensor of kvad's; the file has one per index of its first axis
    lambda tensors, shapes: [torch.stack(list(tensors))], lambda tensors, shapes: list(tensors[0].unbind())
)
_SLIDING, _FULL = "sliding_attention", "full_attention"

# The model and a layer's prefixes in kvad's and Hugging Face's names -> rules.
LayerRules = Callable[[ModelConfig, str, str], Iterable[TensorRule]]


class LayerTypes(NamedTuple):
    """Reader and writer of layer types, for a class whose layers differ."""

    # Fields and the layer of the table -> layer types, and the letter of each layer.
    read: Callable[[HFConfigReader, cfg.LayerConfig], tuple[Mapping[str, cfg.LayerConfig], str]]
    write: Callable[[ModelConfig], dict[str, Any]]


@dataclass(frozen=True)
class DecoderClass:
    """One decoder class of transformers."""

    model_type: str
    architecture: str  # name of the class
    fields: FieldTable
    layer: Mapping[str, str] = field(default_factory=lambda: LAYER)  # tensors of a layer, kvad -> Hugging Face
    tensors: Mapping[str, str] = field(default_factory=lambda: TENSORS)  # the others, and the prefix of the layers
    mlp: type[cfg.GatedMLPConfig | cfg.PlainMLPConfig | cfg.MoEConfig] = cfg.GatedMLPConfig
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of the class, for fields that files leave out
    check: Callable[[HFConfigReader], None] | None = None  # raises CheckpointError for unsupported options
    layer_types: LayerTypes | None = None  # None: all layers are equal
    layer_rules: LayerRules | None = None  # of tensors that ``layer`` does not name
    # Further fields to write.  The default of ``pad_token_id`` exceeds a small vocabulary.
    constants: Mapping[str, Any] = field(default_factory=lambda: {"pad_token_id": None})
    prefix: str = "model."
    ignored: tuple[str, ...] = (r".*rotary_emb\.inv_freq",)  # besides the matrix of a tied head

    def variant(self, model_type: str, architecture: str, **changes: Any) -> DecoderClass:
        """Return a class that differs in ``changes``."""
        return replace(self, model_type=model_type, architecture=architecture, **changes)

    def read(self, fields: HFConfigReader) -> ModelConfig:
        if self.check is not None:
            self.check(fields)
        fields = with_defaults(fields, **self.defaults)
        values = read_table(self.fields, fields)
        layer = cfg.LayerConfig(
            cfg.AttentionConfig(**values["attention"]), self.mlp(**values["mlp"]), cfg.NormConfig(**values["norm"])
        )
        if self.layer_types is None:
            decoder = cfg.StackConfig(layer_types={"L": layer}, **values["stack"])
        else:
            decoder = build_stack(*self.layer_types.read(fields, layer), **values["stack"])
        return ModelConfig(
            **values[""],
            decoder=decoder,
            embedding=cfg.EmbeddingConfig(**values["embedding"]),
            head=cfg.LanguageHeadConfig(**values["head"]),
            dropout=cfg.DropoutConfig(**values["dropout"]),
        )

    def write(self, config: ModelConfig) -> dict[str, Any]:
        try:
            content = write_table(self.fields, config)
        except CheckpointError as error:
            raise CheckpointError(f"{self.model_type} cannot express this model: {error.message}") from error
        if "head_dim" in self.defaults:
            content["head_dim"] = head_dim(config, config.stack.layer_config(0).attention)
        if self.layer_types is not None:
            content |= self.layer_types.write(config)
        return {"architectures": [self.architecture], "model_type": self.model_type, **content, **self.constants}

    def rules(self, config: ModelConfig) -> Iterator[TensorRule]:
        for kvad_name, hf_name in self.tensors.items():
            if kvad_name != "decoder.layers":
                yield tensor_rule(kvad_name, hf_name)
                continue
            for index in range(config.stack.num_layers):
                prefixes = f"decoder.layers.{index}", f"{hf_name}.{index}"
                if self.layer_rules is not None:
                    yield from self.layer_rules(config, *prefixes)
                yield from prefix_rules(*prefixes, self.layer)


def decoder_family(*classes: DecoderClass, choose: Callable[[ModelConfig], str] | None = None) -> Family:
    """Build the family of some classes that name and ignore the same tensors.

    ``choose`` returns the ``model_type`` of the class that can express a model (default: the only class).
    """
    by_type = {decoder.model_type: decoder for decoder in classes}
    first = classes[0]

    def chosen(config: ModelConfig) -> DecoderClass:
        return first if choose is None else by_type[choose(config)]

    head = f"{first.tensors['head']}.weight"
    return Family(
        tuple(by_type),
        lambda fields: by_type.get(fields.model_type, first).read(fields),
        lambda config: chosen(config).rules(config),
        lambda config: chosen(config).write(config),
        prefix=first.prefix,
        ignored=(*first.ignored, head.replace(".", r"\.")),
        head=(head, f"{first.tensors['embedding.tokens']}.weight"),
    )


def with_defaults(fields: HFConfigReader, **defaults: Any) -> HFConfigReader:
    """Return the fields over the defaults of their class.  Null stays null."""
    fields.require_one_of("quantization_config", reason="Convert the weights to bfloat16 first.")
    return HFConfigReader({**defaults, **fields.content}, fields.where)


# ---------------------------------------------------------------- layers of several types


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
    """Return ``window_pattern`` for a class where ``use_sliding_window`` enables windows."""
    used = fields.flag("use_sliding_window") and read_window(fields) is not None
    pattern = window_pattern(fields, lambda index: used and sliding(index))
    if "L" in pattern and not used:
        raise CheckpointError(f"{fields.where}: layer_types has layers with a window, use_sliding_window is false")
    return pattern


def with_attention(layer: cfg.LayerConfig, **changes: Any) -> cfg.LayerConfig:
    return replace(layer, attention=replace(layer.attention, **changes))


def window_layers(pattern: Callable[[HFConfigReader], str], *, requires_window: bool = False) -> LayerTypes:
    """Build layer types G (full) and L (window) in the order of ``pattern``.

    Args:
        pattern: Returns the letter of each layer.
        requires_window: The class requires a window even if no layer has one.
    """

    def read(fields: HFConfigReader, layer: cfg.LayerConfig) -> tuple[Mapping[str, cfg.LayerConfig], str]:
        return {"G": layer, "L": with_attention(layer, window=read_window(fields))}, pattern(fields)

    def write(config: ModelConfig) -> dict[str, Any]:
        content = write_layer_types(config)
        if requires_window and content["sliding_window"] is None:
            content["sliding_window"] = config.max_seq_len
        return content

    return LayerTypes(read, write)


def write_layer_types(config: ModelConfig | cfg.StackConfig) -> dict[str, Any]:
    """Return the window, and the type of each layer."""
    stack = config if isinstance(config, cfg.StackConfig) else config.stack
    windows = [stack.layer_config(index).attention.window for index in range(stack.num_layers)]
    return {
        "sliding_window": next((size for size in windows if size is not None), None),
        "layer_types": [_FULL if size is None else _SLIDING for size in windows],
    }


def build_stack(layer_types: Mapping[str, cfg.LayerConfig], pattern: str, **rest: Any) -> cfg.StackConfig:
    """Build a stack from one letter per layer; the letter of a single layer type is L."""
    if len(set(pattern)) == 1:
        return cfg.StackConfig(layer_types={"L": layer_types[pattern[0]]}, **rest)
    used_types = {letter: layer_types[letter] for letter in dict.fromkeys(pattern)}
    return cfg.StackConfig(layer_types=used_types, layer_pattern=shortest_pattern(pattern), **rest)


# ---------------------------------------------------------------- tensors


def fused_qkv(name: str, groups: Callable[[cfg.AttentionConfig], int] | None = None) -> LayerRules:
    """Build the rule of a matrix of q, k and v, in ``groups`` parts (None: all q, then all k, then all v)."""

    def rules(config: ModelConfig, kvad_prefix: str, hf_prefix: str) -> Iterator[TensorRule]:
        qkv = tuple(f"{kvad_prefix}.attention.{part}" for part in "qkv")
        attention = config.stack.layer_config(0).attention
        transform = conversion.STACKED if groups is None else conversion.grouped_transform(groups(attention))
        yield tensor_rule(qkv, f"{hf_prefix}.{name}", transform)

    return rules


def kv_heads(attention: cfg.AttentionConfig) -> int:
    return attention.num_kv_heads or attention.num_heads
