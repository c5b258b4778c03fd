"""A decoder's step on a GPU in few kernels: norms, activations and sums are parts of the products beside them.

Used for decoders of pre-norm layers with RMSNorm and gated MLPs; other models run as they are. It reads modules by
their exact types, as ``native_program.py`` does. Attention goes through the cache's views.

    one token:        (norm, q k v)  (rotate, write)  (attend)  (out, sum)  (norm, gate up, activation)  (down, sum)
    several tokens:   norm, q k v, (rotate, write), (attend), (out, sum), norm, gate up, activation, (down, sum)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvad import config as cfg
from kvad import model as model_lib
from kvad import ops
from kvad.cache import CacheConfig, build_groups, resolve_for_model
from kvad.cache.device import KVCache, paged_reason
from kvad.config import ModelConfig, attention_specs
from kvad.errors import ConfigError
from kvad.model import Transformer
from kvad.model_input import CacheProtocol, CacheView, ModelInput


class Unfused(Exception):
    """The model has a part that is not fused; the message says which."""


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise Unfused(reason)


class _Layer(NamedTuple):
    """The parts of a layer, checked."""

    attention: model_lib.attention.Attention
    mlp: model_lib.layers.GatedMLP
    norm1: ops.gpu.RMSNorm
    norm2: ops.gpu.RMSNorm
    activation: str
    letter: str  # of the layer type


class FusedDecoder:
    """Computes the logits of a step; ``build_fused_decoder`` checks the model."""

    def __init__(self, model: Transformer) -> None:
        decoder, head = model.decoder, model.head
        _require(
            type(model) is Transformer and type(decoder) is model_lib.transformer.LayerStack, "a model of a plugin"
        )
        assert decoder is not None
        _require(model.encoder is None, "an encoder")
        _require(not model._forward_pre_hooks and not model._forward_hooks, "a hook reads the model's input or output")
        _require(type(head) is model_lib.heads.LanguageHead, "the head is not a language head")
        assert isinstance(head, model_lib.heads.LanguageHead)
        _require(head.transform is None and head.tiles is None, "a transform before the head")
        _require(head.output is None, "a quantized head")
        _require(decoder.spec.norm_position == "pre", f"norm_position {decoder.spec.norm_position}")
        _require(model.token_embedding.dtype in ops.gpu.DTYPES, "weights in float64")
        self.model, self.decoder, self.head, self.norm = model, decoder, head, _rms_norm(decoder.norm)
        layers = list(decoder.layers) if decoder.spec.num_distinct_layers is None else decoder._repeated_layers()
        self.layers = [self._check_layer(index, layer) for index, layer in enumerate(layers)]

    def _check_layer(self, index: int, layer: object) -> _Layer:
        _require(type(layer) is model_lib.transformer.TransformerLayer, "a layer of a plugin")
        assert isinstance(layer, model_lib.transformer.TransformerLayer)
        attention, mlp = layer.attention, layer.mlp
        _require(type(attention) is model_lib.attention.Attention, "attention of another kind")
        _require(type(mlp) is model_lib.layers.GatedMLP, "an MLP without a gate, or experts")
        assert isinstance(attention, model_lib.attention.Attention) and isinstance(mlp, model_lib.layers.GatedMLP)
        _require(layer.cross_attention is None, "cross-attention")
        _require(layer.residual == 1.0 and layer.output_scale is None, "a scaled residual")
        _require(attention.gate is None, "a gate of the attention's output")
        spec = self.decoder.spec.layer_config(index)
        _require(getattr(spec.attention, "query_scaling", None) is None, "scaled queries")
        activation = getattr(spec.mlp, "activation", "")
        _require(activation in ops.gpu.ACTIVATIONS, f"the activation {activation}")
        for linear in (attention.out, mlp.down):
            _require(type(linear) is ops.linear.Linear and linear.tiles is None, "an adapter or a quantized weight")
        is_meta = self.model.token_embedding.is_meta  # of a model whose weights are not loaded
        for packed, parts in ((attention.qkv, attention.input_projections()), (mlp.gate_up, (mlp.gate, mlp.up))):
            _require(is_meta or packed.weight_for(*parts) is not None, "an adapter or a quantized weight")
        norms = _rms_norm(layer.norm1), _rms_norm(layer.norm2)
        return _Layer(attention, mlp, *norms, activation, self.decoder.spec.layer_type(index))

    def run(self, model_input: ModelInput, cache: CacheProtocol) -> Tensor:
        """Return logits [N, V]."""
        views = cache.open(model_input)
        x: Tensor = self.model.embedding(model_input.token_ids, model_input.positions)
        encodings = {
            letter: self.decoder.position_encoding(letter, model_input) for letter in self.decoder.spec.layer_types
        }
        apply = self._apply_to_one if len(x) == 1 else self._apply
        for layer, view in zip(self.layers, views, strict=True):
            apply(layer, x, view, encodings[layer.letter])
        return self._logits(x, model_input.logit_indices)

    def _apply_to_one(
        self, layer: _Layer, x: Tensor, view: CacheView, encoding: model_lib.attention.PositionEncoding
    ) -> None:
        """Apply a layer to one token x [1, E], in place."""
        attention, mlp, product = layer.attention, layer.mlp, ops.gpu.one_row_linear
        qkv, gate_up = _packed(layer)
        flat = product(x, qkv, attention.qkv.bias, norm=layer.norm1)
        q, k, v = attention.split_heads(attention.qkv.split(flat))
        heads = view.attend(q, k, v, attention.attention_params(encoding)).flatten(-2)
        product(heads, attention.out.weight, attention.out.bias, residual=x)
        inner = product(x, gate_up, mlp.gate_up.bias, norm=layer.norm2, activation=layer.activation)
        product(inner, mlp.down.weight, mlp.down.bias, residual=x)

    def _apply(self, layer: _Layer, x: Tensor, view: CacheView, encoding: model_lib.attention.PositionEncoding) -> None:
        """Apply a layer to x [T, E], in place."""
        attention, mlp, fused = layer.attention, layer.mlp, ops.gpu
        qkv, gate_up = _packed(layer)
        flat = ops.linear.linear(fused.rms_norm(x, layer.norm1), qkv, attention.qkv.bias)
        q, k, v = attention.split_heads(attention.qkv.split(flat))
        heads = view.attend(q, k, v, attention.attention_params(encoding)).flatten(-2)
        ops.linear.add_linear(x, heads, attention.out.weight, attention.out.bias)
        inner = ops.linear.linear(fused.rms_norm(x, layer.norm2), gate_up, mlp.gate_up.bias)
        inner = fused.gated_activation(inner, layer.activation)
        ops.linear.add_linear(x, inner, mlp.down.weight, mlp.down.bias)

    def _logits(self, x: Tensor, indices: Tensor) -> Tensor:
        weight = self.model.token_embedding if self.head.weight is None else self.head.weight
        if len(x) == len(indices) == 1:
            logits = ops.gpu.one_row_linear(x, weight, self.head.bias, norm=self.norm)
        else:
            normed = ops.gpu.rms_norm(x.index_select(0, indices), self.norm)
            logits = ops.linear.linear(normed, weight, self.head.bias)
        return self.head.scale_logits(logits)


def build_fused_decoder(model: Transformer) -> FusedDecoder | str:
    """Return the fused decoder of a model, or the reason why there is none."""
    if reason := ops.gpu.unavailable_reason(model.token_embedding.device):
        return reason
    try:
        return FusedDecoder(model)
    except Unfused as unfused:
        return str(unfused)


def _has_other_bias(position: object) -> bool:
    if isinstance(position, cfg.AlibiConfig):
        return position.round_to_bfloat16
    return position is not None and not isinstance(position, cfg.RopeConfig)


def _rms_norm(norm: model_lib.layers.Norm | None) -> ops.gpu.RMSNorm:
    _require(norm is not None, "a layer without a norm")
    assert norm is not None
    _require(type(norm) is model_lib.layers.Norm and norm.spec.kind == "rms", "a norm other than RMSNorm")
    _require(norm.bias is None and norm.width <= ops.gpu.MAX_NORM_WIDTH, "a norm with a bias")
    return ops.gpu.RMSNorm(norm.weight, norm.spec.eps, norm.spec.unit_offset)


def _packed(layer: _Layer) -> tuple[Tensor, Tensor]:
    attention, mlp = layer.attention, layer.mlp
    qkv = attention.qkv.weight_for(*attention.input_projections())
    gate_up = mlp.gate_up.weight_for(mlp.gate, mlp.up)
    assert qkv is not None and gate_up is not None, "the weights changed during a request"
    return qkv, gate_up


def describe_gpu(config: ModelConfig, cache: CacheConfig, dtype: str) -> str:
    """Say what a GPU with Triton computes with kernels over the cache's blocks, and why it does not, if so."""
    with torch.device("meta"):
        model = Transformer(config).to(getattr(torch, dtype))
    try:
        groups = build_groups(attention_specs(config), resolve_for_model(config, cache), dtype)
    except ConfigError as error:
        return f"attention runs in PyTorch: {error.message}"
    kv_cache = KVCache(groups, device="meta", rope_at=cache.rope_at, exact_rope=cache.endless)
    reasons = [paged_reason(kv_cache, index) for index in range(len(groups))]
    for spec in attention_specs(config):
        reasons.append(ops.gpu.unsupported_shape(model.token_embedding.dtype, spec.head_dim, spec.value_dim))
    kinds = () if config.decoder is None else config.decoder.layer_types.values()
    if any(_has_other_bias(getattr(kind.attention, "position", None)) for kind in kinds):
        reasons.append("a position bias other than ALiBi")
    for reason in filter(None, reasons):
        return f"attention runs in PyTorch: {reason}"
    try:
        FusedDecoder(model)
    except Unfused as reason:
        return f"attention reads the cache's blocks in place; products are not fused: {reason}"
    return "attention reads the cache's blocks in place, and products are fused"
