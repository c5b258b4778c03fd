"""Models of one stack that differ only in fields and names: one ``HFClass`` for each class of transformers.

A class lists the fields of its config (``_fields.py``) and the names of its tensors.  ``decoder_family`` makes a
family of one or several; ``_encoder.py`` adds the heads of encoders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import torch

from kvad import config as cfg
from kvad.checkpoint import conversion
from kvad.checkpoint.conversion import Family, HFConfigReader, TensorRule, TensorTransform, prefix_rules, tensor_rule
from kvad.checkpoint.families import _fields as hf
from kvad.config import ModelConfig
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
ATTENTION = {name: LAYER[name] for name in LAYER if not name.startswith("mlp.")}
QK_NORM = {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}
TENSORS = {
    "embedding.tokens": "model.embed_tokens",
    "stack.layers": "model.layers",
    "stack.norm": "model.norm",
    "head": "lm_head",
}
SIZES: hf.FieldTable = {  # of classes with Llama's names; a class states its defaults
    **hf.sizes(),
    "max_seq_len": hf.integer("max_position_embeddings"),
    "tie_embeddings": hf.flag("tie_word_embeddings"),
    "attention.num_kv_heads": hf.integer(
        "num_key_value_heads", default=lambda fields: fields.integer("num_attention_heads")
    ),
    "attention.head_dim": hf.HFField(
        lambda fields: fields.optional_integer("head_dim"), lambda dim, _: {} if dim is None else {"head_dim": dim}
    ),
    "mlp.activation": hf.activation("hidden_act", "silu"),
    "norm.eps": hf.number("rms_norm_eps", 1e-6),
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
class HFClass:
    """One class of transformers; its stack is the decoder if its attention is causal, else the encoder."""

    model_type: str
    architecture: str  # name of the class
    fields: hf.FieldTable
    layer: Mapping[str, str] = field(default_factory=lambda: LAYER)  # tensors of a layer, kvad -> Hugging Face
    # The others, and the prefix of the layers; in kvad's names ``stack`` is the decoder or the encoder.
    tensors: Mapping[str, str] = field(default_factory=lambda: TENSORS)
    mlp: type[cfg.GatedMLPConfig | cfg.PlainMLPConfig | cfg.MoEConfig] = cfg.GatedMLPConfig
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of the class, for fields that files leave out
    check: Callable[[HFConfigReader], None] | None = None  # raises CheckpointError for unsupported options
    layer_types: LayerTypes | None = None  # None: all layers are equal
    layer_rules: LayerRules | None = None  # of tensors that ``layer`` does not name
    # Further fields to write.  The default of ``pad_token_id`` exceeds a small vocabulary.
    constants: Mapping[str, Any] = field(default_factory=lambda: {"pad_token_id": None})
    prefix: str = "model."
    ignored: tuple[str, ...] = (r".*rotary_emb\.inv_freq",)  # besides the matrix of a tied head
    name_variants: Mapping[str, str] = field(default_factory=dict)  # ``Family.name_variants``

    def variant(self, model_type: str, architecture: str, **changes: Any) -> Self:
        """Return a class that differs in ``changes``."""
        return replace(self, model_type=model_type, architecture=architecture, **changes)

    def read(self, fields: HFConfigReader) -> ModelConfig:
        if self.check is not None:
            self.check(fields)
        fields = with_defaults(fields, **self.defaults)
        values = hf.read_table(self.fields, fields)
        layer = build_layer(values, self.mlp)
        if self.layer_types is None:
            stack = cfg.StackConfig(layer_types={"L": layer}, **values["stack"])
        else:
            stack = build_stack(*self.layer_types.read(fields, layer), **values["stack"])
        values[""]["decoder" if layer.attention.causal else "encoder"] = stack
        return ModelConfig(
            **values[""],
            embedding=cfg.EmbeddingConfig(**values["embedding"]),
            head=self.read_head(fields, values),
            dropout=cfg.DropoutConfig(**values["dropout"]),
        )

    def read_head(
        self, fields: HFConfigReader, values: hf.FieldValues
    ) -> cfg.LanguageHeadConfig | cfg.ClassificationHeadConfig | cfg.PoolingHeadConfig:
        """Return the head: a language model's, with the table's values."""
        return cfg.LanguageHeadConfig(**values["head"])

    def write(self, config: ModelConfig) -> dict[str, Any]:
        try:
            content = hf.write_table(self.fields, config)
        except CheckpointError as error:
            raise CheckpointError(f"{self.model_type} cannot express this model: {error.message}") from error
        if "head_dim" in self.defaults:
            content["head_dim"] = hf.first_head_dim(config)
        if self.layer_types is not None:
            content |= self.layer_types.write(config)
        return {"architectures": [self.architecture], "model_type": self.model_type, **content, **self.constants}

    def rules(self, config: ModelConfig, base: str = "") -> Iterator[TensorRule]:
        """Yield the rules of the tables; ``base`` precedes Hugging Face's names."""
        side = "encoder" if config.decoder is None else "decoder"
        for kvad_name, hf_name in self.tensors.items():
            name = kvad_name.replace("stack.", f"{side}.")
            if kvad_name != "stack.layers":
                yield tensor_rule(name, base + hf_name)
                continue
            for index in range(config.stack.num_distinct_layers or config.stack.num_layers):
                prefixes = f"{name}.{index}", f"{base}{hf_name}.{index}"
                if self.layer_rules is not None:
                    yield from self.layer_rules(config, *prefixes)
                yield from prefix_rules(*prefixes, self.layer)


def decoder_family(*classes: HFClass, choose: Callable[[ModelConfig], str] | None = None) -> Family:
    """Build the family of some classes that name and ignore the same tensors.

    ``choose`` returns the ``model_type`` of the class that can express a model (default: the only class).
    """
    by_type = {decoder.model_type: decoder for decoder in classes}
    first = classes[0]

    def chosen(config: ModelConfig) -> HFClass:
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
        name_variants=first.name_variants,
    )


def with_defaults(fields: HFConfigReader, **defaults: Any) -> HFConfigReader:
    """Return the fields over the defaults of their class.  Null stays null."""
    return fields.derive({**defaults, **fields.content})


def check_decoder(fields: HFConfigReader) -> None:
    reason = "A decoder of an encoder-decoder is read with its encoder."
    fields.require_one_of("add_cross_attention", False, reason=reason)


# ---------------------------------------------------------------- layers of several types


def window_pattern(fields: HFConfigReader, sliding: Callable[[int], bool]) -> str:
    """Return L for layers with a window, G for others, by ``layer_types`` or ``sliding(index)``."""
    layers = fields.integer("num_hidden_layers")
    types = fields.get("layer_types") or [_SLIDING if sliding(index) else _FULL for index in range(layers)]
    if not isinstance(types, list) or len(types) != layers or not set(types) <= {_SLIDING, _FULL}:
        raise fields.error(f"layer_types {types!r} is not supported", f"Each must be {_SLIDING} or {_FULL}.")
    if _SLIDING in types and "sliding_window" not in fields:
        raise fields.error("sliding_window is missing", "layer_types has layers with a window.")
    return "".join("L" if kind == _SLIDING else "G" for kind in types)


def optional_window_pattern(fields: HFConfigReader, sliding: Callable[[int], bool]) -> str:
    """Return ``window_pattern`` for a class where ``use_sliding_window`` enables windows."""
    used = fields.flag("use_sliding_window") and "sliding_window" in fields
    pattern = window_pattern(fields, lambda index: used and sliding(index))
    if "L" in pattern and not used:
        raise fields.error("layer_types has layers with a window, use_sliding_window is false")
    return pattern


def interval_pattern(fields: HFConfigReader) -> str:
    """Return a full layer in every n-th place, others with a window."""
    interval = fields.integer("sliding_window_pattern")
    return window_pattern(fields, lambda index: (index + 1) % interval != 0)


def alternating_pattern(fields: HFConfigReader) -> str:
    """Return layers with a window and full ones in turn."""
    return window_pattern(fields, lambda index: index % 2 == 0)


def with_attention(layer: cfg.LayerConfig, **changes: Any) -> cfg.LayerConfig:
    return replace(layer, attention=replace(layer.attention, **changes))


def with_window(layer: cfg.LayerConfig, fields: HFConfigReader, **changes: Any) -> cfg.LayerConfig:
    """Return the layer with the window of the fields, if any, which is the number of visible tokens."""
    return with_attention(layer, window=fields.optional_integer("sliding_window"), **changes)


def window_layers(pattern: Callable[[HFConfigReader], str]) -> LayerTypes:
    """Build layer types G (full) and L (window) in the order of ``pattern``, which returns the letter of each layer.

    The class requires a window even if no layer has one.
    """

    def read(fields: HFConfigReader, layer: cfg.LayerConfig) -> tuple[Mapping[str, cfg.LayerConfig], str]:
        return {"G": layer, "L": with_window(layer, fields)}, pattern(fields)

    def write(config: ModelConfig) -> dict[str, Any]:
        content = write_layer_types(config)
        if content["sliding_window"] is None:
            content["sliding_window"] = config.max_seq_len
        return content

    return LayerTypes(read, write)


def combined_layers(mixers: LayerTypes, mlps: LayerTypes, letters: Mapping[str, str]) -> LayerTypes:
    """Build layers that differ in their mixer and in their MLP; ``letters``: those of both -> one letter."""

    def read(fields: HFConfigReader, layer: cfg.LayerConfig) -> tuple[Mapping[str, cfg.LayerConfig], str]:
        (by_mixer, kinds), (by_mlp, places) = mixers.read(fields, layer), mlps.read(fields, layer)
        types = {letters[m + p]: replace(by_mixer[m], mlp=by_mlp[p].mlp) for m in by_mixer for p in by_mlp}
        return types, "".join(letters[m + p] for m, p in zip(kinds, places, strict=True))

    return LayerTypes(read, lambda config: {**mlps.write(config), **mixers.write(config)})


def write_layer_types(config: ModelConfig | cfg.StackConfig) -> dict[str, Any]:
    """Return the window, and the type of each layer."""
    stack = config if isinstance(config, cfg.StackConfig) else config.stack
    windows = [stack.layer_config(index).attention.window for index in range(stack.num_layers)]
    return {
        "sliding_window": next((size for size in windows if size is not None), None),
        "layer_types": [_FULL if size is None else _SLIDING for size in windows],
    }


def build_layer(
    values: hf.FieldValues,
    mlp: type[cfg.GatedMLPConfig | cfg.PlainMLPConfig | cfg.MoEConfig],
    *,
    has_cross_attention: bool = False,
) -> cfg.LayerConfig:
    """Build a layer from the values of a table; cross-attention is like attention, without mask and positions."""
    attention = cfg.AttentionConfig(**values["attention"])
    cross = replace(attention, position=None, causal=False) if has_cross_attention else None
    return cfg.LayerConfig(attention, mlp(**values["mlp"]), cfg.NormConfig(**values["norm"]), cross)


def build_stack(layer_types: Mapping[str, cfg.LayerConfig], pattern: str, **rest: Any) -> cfg.StackConfig:
    """Build a stack from one letter per layer; the letter of a single layer type is L."""
    if len(set(pattern)) == 1:
        return cfg.StackConfig(layer_types={"L": layer_types[pattern[0]]}, **rest)
    used_types = {letter: layer_types[letter] for letter in dict.fromkeys(pattern)}
    lengths = range(1, len(pattern) + 1)  # of the part that is repeated: 2 in GLGLG
    shortest = next(pattern[:n] for n in lengths if all(pattern[i % n] == pattern[i] for i in range(len(pattern))))
    return cfg.StackConfig(layer_types=used_types, layer_pattern=shortest, **rest)


# ---------------------------------------------------------------- tensors


def fused_rules(
    qkv: str | None = None, *, groups: Callable[[cfg.TokenMixer], int] | None = None, gate_up: str | None = None
) -> LayerRules:
    """Build the rules of fused matrices.

    Args:
        qkv: Matrix of q, k and v, if they are fused.
        groups: Number of parts that each have q, k and v.  None: all q, then all k, then all v.
        gate_up: Matrix of gate and up, if they are fused.
    """

    def rules(config: ModelConfig, kvad_prefix: str, hf_prefix: str) -> Iterator[TensorRule]:
        if qkv is not None:
            qkv_names = tuple(f"{kvad_prefix}.attention.{part}" for part in "qkv")
            attention = config.stack.layer_config(0).attention
            transform = conversion.STACKED if groups is None else conversion.grouped_transform(groups(attention))
            yield tensor_rule(qkv_names, f"{hf_prefix}.{qkv}", transform)
        if gate_up is not None:
            gate_up_names = f"{kvad_prefix}.mlp.gate", f"{kvad_prefix}.mlp.up"
            yield tensor_rule(gate_up_names, f"{hf_prefix}.{gate_up}", conversion.STACKED)

    return rules


def kv_heads(attention: cfg.TokenMixer) -> int:
    return attention.num_kv_heads or attention.num_heads


def multimodal_family(text: Family, model_type: str, text_type: str, ignored: tuple[str, ...]) -> Family:
    """Return the family of a model of which only the text model is read; kvad writes it as ``text_type``.

    Args:
        text: Family of the text model.
        model_type: ``model_type`` of the whole model, whose ``text_config`` describes the text model.
        text_type: ``model_type`` of the text model.
        ignored: Patterns of tensors besides the text model's.
    """

    def read(fields: HFConfigReader) -> ModelConfig:
        if fields.model_type == text_type:  # as kvad writes it
            return text.read(fields)
        part = fields.part("text_config")
        outer = {"model_type": text_type, "tie_word_embeddings": fields.get("tie_word_embeddings")}
        return text.read(part.derive({**outer, **part.content}))

    return replace(text, types=(model_type,), read=read, prefix="language_model.", ignored=ignored)
