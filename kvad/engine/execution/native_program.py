"""A model and its cache as a list of operations for the native CPU kernels (``kvad/ops/native``).

``build_program`` translates what the kernels can compute, or returns the reason why they cannot; then the model runs in
PyTorch. It reads modules by their exact types, so a plugin, an adapter in training, or a subclass of the cache is never
mistaken for what it replaces.

The residual stream, logits and sums are float32; weights, activations and attention weights have the model's dtype.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from kvad import config as cfg
from kvad import model as model_lib
from kvad import ops
from kvad.cache import CacheConfig, build_groups, resolve_for_model
from kvad.cache.device import KVCache
from kvad.config import attention_specs, encoder_attention_specs, encoder_hidden_size
from kvad.model import Transformer
from kvad.model_input import AlibiSlopes, AttentionPattern, CacheProtocol, ModelInput, RelativeBuckets, Rotary
from kvad.ops import native

MAX_STEPS = 256  # prepared inputs; all are prepared again when the limit is exceeded
MAX_COPIED_BYTES = 1 << 30  # of weights that stay in memory beside the packed ones
SCALE_DTYPES = (torch.float32, torch.float16)
QUANTIZED_LAYERS = (ops.quantized_linear.QuantizedLinear, ops.block_matrix.BlockLinear)
MAX_POSITION_BYTES = 1 << 28  # of a table of sines
PARTS = {  # of a step, by kind of operation
    "embed": "embedding",
    "norm": "norms and sums",
    "linear": "weights",
    "angles": "rotation and cache write",
    "rotate": "rotation and cache write",
    "attend": "attention and cache read",
    "add": "norms and sums",
    "select": "head",
    "experts": "weights",
    "gate": "weights",
    "lora": "weights",
}


class Unsupported(Exception):
    """The kernels cannot compute this model with this cache; the message says why."""


def build_program(
    model: Transformer, cache: CacheProtocol, adapters: model_lib.lora.AdapterSet | None = None
) -> NativeProgram | str:
    """Return the program of a model's decoder, with that of its encoder if any, or the reason why there is none."""
    try:
        if type(cache) is not KVCache:
            raise Unsupported(f"the cache is {type(cache).__name__}")
        files = native.FileMappings()
        _check(model, cache, lambda tensor: not files.contain(tensor))
        library, reason = native.load()
        if library is None:
            return reason

        def build() -> NativeProgram:
            builders = [_Builder(model, cache, library, files, adapters)]
            program = NativeProgram(builders[0], library)
            if model.encoder is not None:
                builders.append(encoder := _EncoderBuilder(model, cache, library, files, adapters))
                program.encoder = NativeEncoder(encoder, library)
            program.unadapted_layer = _unadapted_layer(model, builders, adapters)
            return program

        num_tensors = len(list(model.parameters())) + len(list(model.buffers()))
        try:
            with model.packed_weights.storing(library, num_tensors):
                return build()
        except OSError:  # of the disk; the weights are packed in memory now
            return build()
    except Unsupported as reason:
        return str(reason)


class KernelSupport(NamedTuple):
    """The part of a model that the kernels would compute."""

    reason: str = ""  # why they would not compute it; "" if they would
    unadapted_layer: str = ""  # a layer whose terms of adapters they would not add; "" if they would add all


def kernel_support(
    model: Transformer,
    cache: CacheConfig,
    copied: Collection[str],
    *,
    adapters: Mapping[str, Mapping[str, model_lib.lora.LoraFactors]] | None = None,
    deterministic: bool = False,
) -> KernelSupport:
    """Return what the kernels would compute of a model on the meta device with a cache.

    Args:
        model: The model, with the dtypes that it would be loaded with.
        cache: The cache.
        copied: Names of tensors that would not be mapped from a file.
        adapters: Factors by the name of the layer, by the name of the adapter that requests choose.
        deterministic: The model and its cache would have batch-invariant kernels.

    Raises:
        ConfigError: If the cache is invalid for this model.
    """
    library, reason = native.load()
    if library is None:
        return KernelSupport(reason)
    dtype = str(model.token_embedding.dtype).removeprefix("torch.")
    groups = build_groups(attention_specs(model.config), resolve_for_model(model.config, cache), dtype)
    kernel: ops.attention.Kernel = ops.attention.TileSizes((1,)) if deterministic else "auto"
    kv_cache = KVCache(groups, device="meta", rope_at=cache.rope_at, exact_rope=cache.endless, kernel=kernel)
    named = (*model.named_parameters(), *model.named_buffers())
    copied_tensors, files = {id(tensor) for name, tensor in named if name in copied}, native.FileMappings()
    adapter_set = model_lib.lora.AdapterSet(model, adapters or {})
    try:
        _check(model, kv_cache, lambda tensor: id(tensor) in copied_tensors)
        builders = [_Builder(model, kv_cache, None, files, adapter_set)]
        if model.encoder is not None:
            builders.append(_EncoderBuilder(model, kv_cache, None, files, adapter_set))
    except Unsupported as unsupported:
        return KernelSupport(str(unsupported))
    return KernelSupport("", _unadapted_layer(model, builders, adapter_set))


def _unadapted_layer(
    model: Transformer, builders: Sequence[_Builder], adapters: model_lib.lora.AdapterSet | None
) -> str:
    """Return the name of a layer whose terms of adapters the operations do not add, or ""."""
    adapted = {layer for builder in builders for layer in builder.adapted}
    layers = () if not adapters else model.named_modules()
    return next((name for name, layer in layers if layer not in adapted and adapters and adapters.terms(layer)), "")


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise Unsupported(reason)


def _check(model: Transformer, cache: KVCache, is_copied: Callable[[Tensor], bool]) -> None:
    """Check all but the layers; ``is_copied`` returns False for a tensor that is mapped from a file."""
    table = model.token_embedding
    biases = {id(x.selection_bias) for x in model.modules() if isinstance(x, model_lib.layers.MixtureOfExperts)}
    weights = [parameter for parameter in model.parameters() if id(parameter) not in biases]  # which are float32
    dtypes = {parameter.dtype for parameter in weights if parameter.is_floating_point()}
    _require(table.device.type in ("cpu", "meta"), f"the device is {table.device}")
    _require(table.dtype in native.library.DTYPES, f"weights of {str(table.dtype).removeprefix('torch.')}")
    _require(dtypes == {table.dtype}, "the weights have several dtypes")
    _require(not model._forward_pre_hooks and not model._forward_hooks, "a hook reads the model's input or output")
    tensors = [x for x in (*model.parameters(), *model.buffers()) if x is not table]
    is_quantized = getattr(model.head, "output", None) is not None
    if model.config.tie_embeddings and not is_quantized:  # otherwise it is not packed
        tensors.append(table)
    is_small = sum(x.nbytes for x in tensors) <= MAX_COPIED_BYTES
    copied = 0 if is_small else sum(x.nbytes for x in tensors if is_copied(x))
    remedy = "kvad import MODEL OUT [--save-dtype DTYPE] writes a folder that is mapped"
    _require(copied <= MAX_COPIED_BYTES, f"{copied:,} bytes of weights are not mapped from a file: {remedy}")
    _require(cache.kernel == "auto", "a kernel of PyTorch was chosen")
    _require(cache.attention_hook is None, "an attention hook reads every layer")
    _require(not cache.rope_on_read, "keys are rotated when they are read")
    _require(not cache.exact_rope, "endless: positions are unlimited")
    _require(model.config.max_seq_len < 1 << 24, "positions beyond 2^24")
    for name in (name for group in cache.groups for name in (group.key_format, group.value_format)):
        _require(name in native.library.STORE_FORMATS, f"a cache of {name}")
    for group in cache.groups:
        _require(group.eviction_policy is None, "an eviction policy reads the attention weights")
        _require(group.sparse_read_policy is None, "a policy reads some blocks only")
        _require(
            group.lower_level is None and group.demotion_policy is None, "a policy moves older tokens to other levels"
        )
        _require(not group.spec.is_state, "layers with a recurrent state")
        _require(not group.spec.values_in_keys, "latent attention (MLA)")
        _require(not group.spec.pattern.renumbers_sinks, "a policy renumbers positions")


class _Builder:
    """Operations, widths of the buffers, and what the operations point to."""

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        library: native.Library | None,
        files: native.FileMappings,
        adapters: model_lib.lora.AdapterSet | None = None,
    ) -> None:
        self.model, self.cache, self.library, self.files, self.adapters = model, cache, library, files, adapters
        self.dtype = model.token_embedding.dtype
        self.type, self.itemsize = native.library.DTYPES.index(self.dtype), self.dtype.itemsize
        self.ops: list[native.Op] = []
        self.widths: list[int] = []
        self.referenced: list[object] = []
        self.adapted: set[nn.Module] = set()  # layers whose terms are added
        self.stack, self.size = self._find_stack()
        is_known = type(model) is Transformer and type(self.stack) is model_lib.transformer.LayerStack
        _require(is_known, "a model of a plugin")
        self.stream = self._buffer(_padded(self.size), torch.float32)
        self.input = self._buffer(_padded(self.size), self.dtype)
        self._named: dict[tuple[str, int], int] = {}
        self._angles: dict[str, tuple[int, Rotary]] = {}
        self._build()

    def _find_stack(self) -> tuple[model_lib.transformer.LayerStack, int]:
        """Return the layers and their width."""
        _require(self.model.decoder is not None, "the model has no decoder")
        assert self.model.decoder is not None
        return self.model.decoder, self.model.config.hidden_size

    def _build(self) -> None:
        self._embedding(self.model.embedding, self.model.token_embedding, self.model.config.max_seq_len)
        self._layers()
        self._head()

    def _layers(self) -> None:
        stack = self.stack
        layers = list(stack.layers) if stack.spec.num_distinct_layers is None else stack._repeated_layers()
        for index, layer in enumerate(layers):
            self._layer(index, layer, len(layers))

    def _buffer(self, numbers: int, dtype: torch.dtype) -> int:
        _require(len(self.widths) < 64, "too many kinds of layers")
        self.widths.append(numbers * dtype.itemsize)
        return len(self.widths) - 1

    def _shared(self, name: str, numbers: int, dtype: torch.dtype) -> int:
        """Return the buffer of a purpose and a width, which all layers share."""
        if (name, numbers) not in self._named:
            self._named[name, numbers] = self._buffer(numbers, dtype)
        return self._named[name, numbers]

    def _op(self, kind: str, **fields: Any) -> None:
        self.ops.append(self._new_op(kind, **fields))

    def _new_op(self, kind: str, **fields: Any) -> native.Op:
        for name, value in fields.items():
            if isinstance(value, Tensor):
                self.referenced.append(value)
                fields[name] = value.data_ptr()
        kind_index, scale = native.library.OPERATIONS.index(kind), fields.pop("scale", 1.0)
        return native.Op(kind=kind_index, type=self.type, scale=scale, **fields)

    def _float(self, x: Tensor | None, size: int = 0) -> Tensor | None:
        """Return a contiguous float32 copy, with zeros up to ``size``."""
        if x is None:
            return None
        x = x.detach().float().flatten()
        return torch.cat((x, x.new_zeros(max(0, size - len(x))))).contiguous()

    # Embedding and head

    def _embedding(self, embedding: model_lib.layers.Embedding, table: Tensor, length: int) -> None:
        """Embed tokens by their rows of a table, at less than ``length`` positions."""
        spec = embedding.spec
        _require(embedding.projection is None, "an embedding of another size")
        _require(embedding.token_types is None, "token types")
        _require(not spec.norm_first or spec.norm is None, "a norm before the positions are added")
        table, offset, scale = table.detach(), 0, spec.scale
        if scale != 1.0:
            scale = float(torch.tensor(scale, dtype=self.dtype))
        positions: Tensor | None = None
        if isinstance(spec.position, cfg.LearnedPositionsConfig):
            assert embedding.positions is not None
            positions, offset = embedding.positions.weight.detach().float().contiguous(), spec.position.offset
        elif isinstance(spec.position, cfg.SinusoidalPositionsConfig):
            _require(length * self.size * 4 <= MAX_POSITION_BYTES, "a table of sines this long")
            positions = model_lib.positions.sinusoidal_embedding(torch.arange(length), self.size, spec.position)
        self._op("embed", out=self.stream, out_stride=_padded(self.size), k=self.size, scale=scale,
                 weight=table, bias=positions, bias_offset=offset)  # fmt: skip
        if embedding.norm is not None:
            self._norm(embedding.norm, self.stream, self.stream, to_float=True)

    def _head(self) -> None:
        head = self.model.head
        _require(type(head) is model_lib.heads.LanguageHead, "the head is not a language head")
        assert isinstance(head, model_lib.heads.LanguageHead)
        _require(head.transform is None, "a transform before the head")
        _require(head.tiles is None, "batch-invariant products of PyTorch")
        self._norm(self.stack.norm, self.stream, self.input)
        selected = self._buffer(_padded(self.size), self.dtype)
        self._op("select", input=self.input, out=selected, k=_padded(self.size) * self.itemsize, n=self.size)
        weight: native.library.Matrix = self.model.token_embedding if head.weight is None else head.weight
        if head.output is not None:
            weight = head.output.matrix
        self._product(selected, 0, [weight], head.bias, mode="logits", n=self.model.config.vocab_size,
                      in_stride=_padded(self.size), scale=head.spec.logit_scale,
                      softcap=head.spec.logit_softcap or 0.0)  # fmt: skip

    # Layers

    def _layer(self, index: int, layer: nn.Module, num_layers: int) -> None:
        assert isinstance(layer, model_lib.transformer.TransformerLayer)
        position = layer.norm_position
        mlp_input = self.input
        if position in ("parallel", "parallel_pair"):
            self._norm(layer.norm1, self.stream, self.input)
            if layer.norm2 is not None:
                mlp_input = self._shared("mlp input", _padded(self.size), self.dtype)
                self._norm(layer.norm2, self.stream, mlp_input)
            self._attention(index, layer.attention, layer.residual, self.stream)
            self._mlp(layer.mlp, mlp_input, layer.residual, self.stream)
        else:
            self._branch(
                layer, layer.norm1, layer.norm1_after, lambda *to: self._attention(index, layer.attention, *to)
            )
            if layer.cross_attention is not None:
                cross = layer.cross_attention
                group_index = num_layers + index
                after = layer.norm_cross_after
                self._branch(layer, layer.norm_cross, after, lambda *to: self._attention(group_index, cross, *to))
            self._branch(layer, layer.norm2, layer.norm2_after, lambda *to: self._mlp(layer.mlp, self.input, *to))
        if layer.output_scale is not None:
            scale = 1.0 if layer.output_scale.is_meta else float(layer.output_scale.detach())
            self._op("norm", input=self.stream, out=self.stream, in_stride=_padded(self.size), scale=scale,
                     out_stride=_padded(self.size), k=self.size, out_float=1)  # fmt: skip

    def _branch(self, layer: model_lib.transformer.TransformerLayer, norm: Any, after: Any, compute: Any) -> None:
        """Add a branch: ``compute(scale, buffer)`` adds its output to a buffer, or stores it there if scale is None."""
        position = layer.norm_position
        if position == "post":
            self._norm(None, self.stream, self.input)
            compute(layer.residual, self.stream)
            self._norm(norm, self.stream, self.stream, to_float=True)
            return
        out = self.stream
        if position in ("after", "sandwich"):
            out = self._shared("branch", _padded(self.size), torch.float32)
        self._norm(None if position == "after" else norm, self.stream, self.input)
        if position == "normed":
            self._norm(norm, self.stream, self.stream, to_float=True)
        compute(layer.residual if out == self.stream else None, out)
        if out != self.stream:
            self._norm(norm if position == "after" else after, out, out, to_float=True)
            self._op("add", input=out, out=self.stream, in_stride=_padded(self.size), out_stride=_padded(self.size),
                     k=self.size, scale=layer.residual)  # fmt: skip

    def _norm(
        self, norm: model_lib.layers.Norm | None, source: int, out: int, *, to_float: bool = False, **fields: Any
    ) -> None:
        """Normalize; without a norm, convert."""
        kind, eps, weight, bias = "none", 0.0, None, None
        if norm is not None:
            _require(type(norm) is model_lib.layers.Norm, "a norm of a plugin")
            kind, eps = norm.spec.kind, norm.spec.eps
            weight, bias = self._float(norm.weight), self._float(norm.bias)
            weight = weight + 1.0 if weight is not None and norm.spec.unit_offset else weight
        strides = {"in_stride": _padded(self.size), "out_stride": _padded(self.size), "k": self.size}
        self._op("norm", input=source, out=out, mode=native.library.NORMS.index(kind), eps=eps, weight=weight,
                 bias=bias, out_float=to_float, **(strides | fields))  # fmt: skip

    def _product(
        self,
        source: int,
        out: int,
        weights: Sequence[native.library.Matrix],
        bias: Tensor | None,
        *,
        mode: str,
        interleaved: bool = False,
        **fields: Any,
    ) -> None:
        """Multiply by the weights."""
        fields |= {"input": source, "out": out, "mode": native.library.OUTPUT_MODES.index(mode)}
        self.ops.append(self._product_op(weights, bias, interleaved=interleaved, **fields))

    def _product_op(
        self, weights: Sequence[native.library.Matrix], bias: Tensor | None, *, interleaved: bool = False, **fields: Any
    ) -> native.Op:
        """Return a product by the weights."""
        first = weights[0]
        form, quantization = _format(first), {}
        _require(len(set(map(_format, weights))) == 1, "joined weights of several formats")
        if form is not None:
            _require(form.group_size % 2 == 0, "groups with an odd number of weights")
            _require(form.scale_dtype in SCALE_DTYPES, f"scales in {form.scale_dtype}")
            quantization = {"bits": form.bits, "quantized_group": form.group_size, "is_e2m1": form.is_e2m1,
                            "half_scales": form.scale_dtype == torch.float16,
                            "activation_bits": self.model.activation_bits or 0}  # fmt: skip
        panels = self.model.packed_weights.panels(self.library, weights, self.files, interleaved=interleaved)
        width = panels.shape[1] if isinstance(first, (Tensor, nn.ParameterList)) else first.in_features
        return self._new_op("linear", weight=panels, k=width, bias=self._float(bias, len(panels)),
                            **({"n": len(panels)} | quantization | fields))  # fmt: skip

    def _linear_product(
        self,
        source: int,
        out: int,
        layers: Sequence[ops.linear.Linear],
        bias: Tensor | None,
        *,
        interleaved: bool = False,
        **fields: Any,
    ) -> None:
        """Multiply by the weights of layers and add the terms of adapters."""
        adapters, low_size = self._adapter_terms(layers, interleaved)
        if adapters is not None:
            low = self._shared("lora", _padded(low_size), torch.float32)
            address, stride = ctypes.addressof(adapters), _padded(low_size)
            self._op("lora", input=source, out=low, in_stride=fields["in_stride"], out_stride=stride, n=low_size,
                     k=layers[0].in_features, adapters=address)  # fmt: skip
            fields |= {"adapters": address, "low": low, "low_stride": stride}
        self._product(source, out, [_matrix(layer) for layer in layers], bias, interleaved=interleaved, **fields)

    def _adapter_terms(
        self, layers: Sequence[ops.linear.Linear], interleaved: bool
    ) -> tuple[ctypes.Array[native.Adapter] | None, int]:
        """Return each adapter's terms for the product of joined layers, if it has any, and the largest total rank."""
        tables = [{} if self.adapters is None else self.adapters.terms(layer) for layer in layers]
        if not any(tables):
            return None, 0
        assert self.adapters is not None
        self.adapted.update(layers)
        result, low_size = (native.Adapter * len(self.adapters.names))(), 0
        for number, adapter in enumerate(result, 1):
            terms, rank, column = [], 0, 0
            for index, (layer, table) in enumerate(zip(layers, tables, strict=True)):
                if number in table:
                    a, b = table[number]
                    blocks, first = (_half_panels(b, index), 0) if interleaved else _in_panels(b, column)
                    terms.append(native.LoraTerm(a.data_ptr(), blocks.data_ptr(), len(a), first, blocks.shape[1]))
                    self.referenced += [a, blocks]
                    rank += len(a)
                column += layer.out_features
            array = (native.LoraTerm * len(terms))(*terms)
            adapter.terms, adapter.num_terms = ctypes.addressof(array), len(terms)
            self.referenced.append(array)
            low_size = max(low_size, rank)
        self.referenced.append(result)
        return result, low_size

    def _linear(self, layer: nn.Module) -> ops.linear.Linear:
        is_known = type(layer) in (ops.linear.Linear, *QUANTIZED_LAYERS)
        _require(is_known, _kind("a layer", layer))
        assert isinstance(layer, ops.linear.Linear)
        _require(layer.tiles is None, "batch-invariant products of PyTorch")
        return layer

    def _biases(self, layers: Sequence[ops.linear.Linear]) -> Tensor | None:
        if all(layer.bias is None for layer in layers):
            return None
        table = self.model.token_embedding
        parts = [table.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers]
        return torch.cat([part.detach() for part in parts])

    def _attention(self, index: int, attention: nn.Module, scale: float | None, out: int) -> None:
        """Add the attention of the cache's layer ``index``."""
        is_cross = type(attention) is model_lib.attention.CrossAttention
        _require(is_cross or type(attention) is model_lib.attention.Attention, _kind("attention", attention))
        assert isinstance(attention, model_lib.attention.Attention)
        spec, heads, kv_heads = attention.spec, attention.heads, attention.kv_heads
        dim, value_dim = attention.head_dim, attention.value_dim
        _require(type(attention.qkv) is ops.linear.PackedLinear, "joined products of another kind")
        _require(max(dim, value_dim) <= native.library.MAX_HEAD_DIM, "heads this wide")
        value = attention.k if spec.values_from_keys else attention.v
        layers = [self._linear(layer) for layer in ((attention.q,) if is_cross else (attention.q, attention.k, value))]
        width = sum(layer.out_features for layer in layers)
        stride = _padded(width)
        joined = [layers]
        if len({_format(_matrix(layer)) for layer in layers}) > 1:  # each writes whole panels
            stride, joined = stride + native.library.PANEL, [[layer] for layer in layers]
        projected, at = self._shared("projections", stride, torch.float32), 0
        for part in joined:
            self._linear_product(self.input, projected, part, self._biases(part), mode="float",
                                 in_stride=_padded(self.size), out_offset=at, out_stride=stride,
                                 clip=spec.clip_qkv or 0.0)  # fmt: skip
            at += sum(layer.out_features for layer in part)
        at = 0
        norms = [(attention.q_norm, heads, dim), (None if is_cross else attention.k_norm, kv_heads, dim)]
        for norm, count, size in [*norms, (None if is_cross else attention.v_norm, kv_heads, value_dim)]:
            if norm is not None:
                self._norm(norm, projected, projected, to_float=True, in_offset=at, out_offset=at, k=norm.width,
                           in_stride=stride, out_stride=stride, heads=count * size // norm.width,
                           own_weights=norm.num_weights)  # fmt: skip
            at += count * size
        position = {} if is_cross else self._position(index, attention)
        shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": dim, "value_dim": value_dim}
        shape |= self._stores(index, attention)
        query_size = heads * _even(dim)
        queries = self._shared("queries", _padded(query_size), self.dtype)
        rotary = {name: position.pop(name, 0) for name in ("angles", "rotary_dim", "interleaved")}
        self._op("rotate", input=projected, out=queries, in_stride=stride, out_stride=_padded(query_size),
                 query_scale=self._query_scale(spec), **shape, **rotary)  # fmt: skip
        attended = self._shared("attended", _padded(heads * value_dim), self.dtype)
        self._op("attend", input=queries, out=attended, in_stride=_padded(query_size),
                 out_stride=_padded(heads * value_dim), scale=attention.scale, softcap=spec.logit_softcap or 0.0,
                 sink_logits=self._float(attention.sink_logits), **shape, **position)  # fmt: skip
        if attention.gate is not None:
            self._gate(attention.gate, self.input, attended, heads * value_dim, own_weights=True)
        self._output(attention.out, attended, _padded(heads * value_dim), scale, out)

    def _query_scale(self, spec: cfg.AttentionConfig) -> Tensor | None:
        """Return the factors of queries by position."""
        if spec.query_scaling is None:
            return None
        length = self.model.config.max_seq_len
        _require(length * 4 <= MAX_POSITION_BYTES, "a table of factors this long")
        return model_lib.positions.query_scale(spec.query_scaling, torch.arange(length)).float()

    def _gate(self, layer: nn.Module, source: int, out: int, width: int, **fields: bool) -> None:
        """Multiply ``out`` by the sigmoid of a product of ``source``: by one per row, or (``own_weights``) number."""
        linear = self._linear(layer)
        size = _padded(linear.out_features)
        gates = self._shared("gates", size, torch.float32)
        self._linear_product(source, gates, [linear], linear.bias, mode="float",
                             in_stride=_padded(self.size), out_stride=size)  # fmt: skip
        self._op("gate", input=gates, out=out, in_stride=size, out_stride=_padded(width), k=width, **fields)

    def _output(self, layer: nn.Module, source: int, stride: int, scale: float | None, out: int) -> None:
        """Multiply by the last matrix of a branch, and add to the stream or store."""
        last = self._linear(layer)
        self._linear_product(source, out, [last], last.bias, mode="float" if scale is None else "add",
                             in_stride=stride, out_stride=_padded(self.size),
                             scale=1.0 if scale is None else scale)  # fmt: skip

    def _stores(self, layer: int, attention: model_lib.attention.Attention) -> dict[str, int]:
        """Return the group of the cache's layer, and the addresses of its keys and values."""
        index, group = next((index, group) for index, group in enumerate(self.cache.groups) if layer in group.layers)
        keys, values = self.cache.stores[index][layer]
        stores = {"keys": self._store(keys, group.key_format), "values": self._store(values, group.value_format)}
        return {"group": index, **stores}

    def _store(self, tensor: Any, format_name: str) -> int:
        """Return the address of a description of keys or values."""
        arrays = [*tensor.arrays, None, None][:3]
        pointers = [0 if array is None else array.data_ptr() for array in arrays]
        store = native.Store(*pointers, len(tensor.data), native.library.STORE_FORMATS.index(format_name))
        self.referenced += [store, *tensor.arrays]
        return ctypes.addressof(store)

    def _position(self, index: int, attention: model_lib.attention.Attention) -> dict[str, Any]:
        """Return the fields of a layer's position encoding."""
        letter = self.stack.spec.layer_type(index)
        position = attention.spec.position
        _require(not isinstance(position, cfg.CustomPositionsConfig | cfg.DisentangledConfig), "custom positions")
        if isinstance(position, cfg.RopeConfig):
            return self._rope(letter)
        empty = torch.empty(0, dtype=torch.int64)
        shared = self.stack.position_encoding(letter, ModelInput(empty, empty, (), empty))
        bias = attention.attention_params(shared).bias
        if isinstance(bias, AlibiSlopes):
            _require(not bias.round_to_bfloat16, "a rounded ALiBi bias")
            return {"slopes": self._float(bias.slopes * bias.factor)}
        if isinstance(bias, RelativeBuckets):
            distances = torch.arange(-bias.max_distance if bias.bidirectional else 0, bias.max_distance + 1)
            buckets = ops.position_bias.t5_bucket(-distances, len(bias.table), bias.max_distance, bias.bidirectional)
            table = self._float(bias.table[buckets].T.contiguous())
            return {"position_bias": table, "bias_size": len(distances), "bias_offset": -int(distances[0])}
        return {}

    def _rope(self, letter: str) -> dict[str, Any]:
        if letter not in self._angles:
            position = self.stack.spec.layer_types[letter].attention.position
            assert isinstance(position, cfg.RopeConfig)
            short_len = model_lib.positions.short_regime_len(position, self.stack.max_seq_len)
            rotary = self._rotary(letter, [0])
            both = rotary.inv_freq if short_len is None else self._rotary(letter, [short_len, short_len + 1]).inv_freq
            size = 2 * rotary.inv_freq.shape[-1]
            buffer = self._buffer(max(size, 1), torch.float32)
            self._op("angles", out=buffer, out_stride=size, rotary_dim=size, weight=self._float(both),
                     scale=rotary.factor, short_len=short_len or 0)  # fmt: skip
            self._angles[letter] = buffer, rotary
        buffer, rotary = self._angles[letter]
        return {"angles": buffer, "rotary_dim": 2 * rotary.inv_freq.shape[-1], "interleaved": rotary.interleaved}

    def _rotary(self, letter: str, seq_lens: list[int]) -> Rotary:
        """Return the rotation of tokens of sequences of these lengths."""
        tokens = torch.zeros(len(seq_lens), dtype=torch.int64)
        step = ModelInput(tokens, tokens, (), tokens, seq_lens=torch.tensor(seq_lens))
        rotary = self.stack.position_encoding(letter, step)
        assert isinstance(rotary, Rotary)
        return rotary

    def _experts(self, mlp: model_lib.layers.MixtureOfExperts, source: int, scale: float | None, out: int) -> None:
        spec = mlp.spec
        _require(type(mlp.router) is model_lib.layers.Router, _kind("a router", mlp.router))
        _require(mlp.tiles is None, "batch-invariant products of PyTorch")
        _require(spec.num_experts <= native.library.MAX_EXPERTS, "this many experts")
        _require(spec.swiglu_alpha != 0.0, "a swiglu_alpha of 0")
        gate, up, down = (_expert_matrix(weights) for weights in (mlp.gate, mlp.up, mlp.down))
        is_whole = spec.intermediate_size % native.library.PANEL == self.size % native.library.PANEL == 0
        is_plain = all(_format(matrix) is None for matrix in (gate, up, down))
        _require(is_whole or is_plain, "int8 or int4 experts of a size that 32 does not divide")
        size, half = _whole_panels(spec.intermediate_size), native.library.PANEL // 2
        gate_up_bias = down_bias = None
        if mlp.gate_bias is not None and mlp.up_bias is not None and mlp.down_bias is not None:
            pair = torch.stack([_pad_last(bias.detach(), size) for bias in (mlp.gate_bias, mlp.up_bias)], dim=1)
            gate_up_bias = pair.unflatten(-1, (-1, half)).transpose(1, 2)
            down_bias = _pad_last(mlp.down_bias.detach(), _whole_panels(self.size))
        products = [
            self._product_op([gate, up], gate_up_bias, interleaved=True, in_stride=_padded(self.size)),
            self._product_op([down], down_bias, in_stride=size),
        ]
        router = self._float(_pad_last(mlp.router.weight.detach(), _padded(self.size)))
        tensors = [router, self._float(mlp.router.bias), self._float(mlp.selection_bias)]
        experts = native.Experts(
            *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
            *map(ctypes.addressof, products),
            *(spec.num_experts, spec.num_experts_per_token, spec.intermediate_size),
            *(spec.num_groups, spec.num_groups_per_token, spec.router == "sigmoid", spec.renormalize),
            *(spec.routed_scale, -1.0 if spec.sparsemixer_jitter is None else spec.sparsemixer_jitter),
            *(spec.swiglu_alpha or 0.0, spec.swiglu_limit or 0.0),
        )
        self.referenced += [experts, *tensors, *products]
        is_silu = spec.swiglu_alpha is not None  # the activation is a sigmoid then
        mode = native.library.OUTPUT_MODES.index("float" if scale is None else "add")
        self._op("experts", input=source, out=out, in_stride=_padded(self.size), out_stride=_padded(self.size),
                 k=self.size, n=self.size, mode=mode, scale=1.0 if scale is None else scale,
                 activation=0 if is_silu else _activation(mlp.activation),
                 experts=ctypes.addressof(experts))  # fmt: skip
        if mlp.shared is None:
            return
        scale = 1.0 if scale is None else scale
        if mlp.shared_gate is None:
            self._mlp(mlp.shared, source, scale, out)
            return
        shared = self._shared("shared expert", _padded(self.size), torch.float32)
        self._mlp(mlp.shared, source, None, shared)
        self._gate(mlp.shared_gate, source, shared, self.size, out_float=True)
        self._op("add", input=shared, out=out, in_stride=_padded(self.size), out_stride=_padded(self.size),
                 k=self.size, scale=scale)  # fmt: skip

    def _mlp(self, mlp: nn.Module, source: int, scale: float | None, out: int) -> None:
        stride = _padded(self.size)
        if type(mlp) is model_lib.layers.MixtureOfExperts:
            self._experts(mlp, source, scale, out)
            return
        if type(mlp) is model_lib.layers.GatedMLP:
            _require(type(mlp.gate_up) is ops.linear.PackedLinear, "joined products of another kind")
            gate, up, size = self._linear(mlp.gate), self._linear(mlp.up), mlp.gate.out_features
            half = -(-size // (native.library.PANEL // 2)) * (native.library.PANEL // 2)
            inner = self._shared("inner", _padded(half), self.dtype)
            bias = None
            if gate.bias is not None and up.bias is not None:
                pair = torch.stack([_pad(layer.bias.detach(), half) for layer in (gate, up)])
                bias = pair.view(2, -1, native.library.PANEL // 2).transpose(0, 1).flatten()
            self._linear_product(source, inner, [gate, up], bias, mode="gated", interleaved=True,
                                 activation=_activation(mlp.activation), in_stride=stride,
                                 out_stride=_padded(half))  # fmt: skip
        else:
            _require(type(mlp) is model_lib.layers.PlainMLP, _kind("an MLP", mlp))
            assert isinstance(mlp, model_lib.layers.PlainMLP)
            _require(mlp.alpha_p is None, "a learned activation")
            up, size = self._linear(mlp.up), mlp.up.out_features
            half = _padded(size)
            inner = self._shared("inner", half, self.dtype)
            self._linear_product(source, inner, [up], up.bias, mode="activated", out_stride=half, in_stride=stride,
                                 activation=_activation(mlp.activation))  # fmt: skip
        self._output(mlp.down, inner, _padded(half), scale, out)


def _in_panels(b: Tensor, column: int) -> tuple[Tensor, int]:
    """Return b [out, r] as [r, panels, PANEL] and its first panel, if it begins at a column of a product."""
    first, end = column // native.library.PANEL, -(-(column + len(b)) // native.library.PANEL)
    before = column - first * native.library.PANEL
    after = (end - first) * native.library.PANEL - before - len(b)
    return nn.functional.pad(b.T, (before, after)).unflatten(1, (-1, native.library.PANEL)).contiguous(), first


def _half_panels(b: Tensor, half: int) -> Tensor:
    """Return b [out, r] as [r, panels, PANEL], in the first or the second half of each panel."""
    size = native.library.PANEL // 2
    halves = nn.functional.pad(b.T, (0, -len(b) % size)).unflatten(1, (-1, size))
    return nn.functional.pad(halves, (size * half, size * (1 - half))).contiguous()


def _kind(what: str, module: object) -> str:
    return f"{what} of the kind {type(module).__name__}"


def _matrix(layer: ops.linear.Linear) -> native.library.Matrix:
    return layer.matrix if isinstance(layer, ops.quantized_linear.QuantizedLinear) else layer.weight


def _expert_matrix(weights: model_lib.layers.ExpertWeights) -> native.library.Matrix:
    if isinstance(weights, (Tensor, nn.ParameterList)):
        return weights
    _require(type(weights) in QUANTIZED_LAYERS, _kind("experts", weights))
    return weights.matrix


def _format(matrix: native.library.Matrix) -> ops.quantized_linear.WeightFormat | None:
    return None if isinstance(matrix, (Tensor, nn.ParameterList)) else matrix.format


def _activation(function: object) -> int:
    names = [name for name, known in model_lib.layers.ACTIVATIONS.items() if known is function]
    _require(bool(names) and names[0] in native.library.ACTIVATIONS, "an activation of a plugin")
    return native.library.ACTIVATIONS.index(names[0])


def _pad(x: Tensor, size: int) -> Tensor:
    return torch.cat((x, x.new_zeros(size - len(x))))


def _pad_last(x: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, size - x.shape[-1]))


def _whole_panels(numbers: int) -> int:
    return -(-numbers // native.library.PANEL) * native.library.PANEL


def _padded(numbers: int) -> int:
    """Return the stride of rows: rows that are a multiple of 2 KiB apart would share few sets of the L1 cache."""
    size = _whole_panels(numbers)
    return size + native.library.PANEL * (size % 1024 == 0)


def _even(numbers: int) -> int:
    return numbers + numbers % 2


class _EncoderBuilder(_Builder):
    """Operations of an encoder-decoder's encoder, which also write the keys and values of cross-attention.

    Its own keys and values are in memory that all layers share (``own_stores``: of each shape, with the numbers of a
    token): slot t is that of the step's token t.
    """

    def _find_stack(self) -> tuple[model_lib.transformer.LayerStack, int]:
        self.own_stores: list[tuple[native.Store, int]] = []
        assert self.model.encoder is not None
        return self.model.encoder, encoder_hidden_size(self.model.config)

    def _build(self) -> None:
        model, spec = self.model, self.model.config.encoder_input
        _require(spec is not None, "an encoder without its own input")
        assert spec is not None
        embedding = model.encoder_embedding or model.embedding
        table = model.token_embedding if embedding.tokens is None else embedding.tokens.weight
        self._embedding(embedding, table, spec.max_seq_len)
        self.layer_patterns = [layer.pattern for layer in encoder_attention_specs(model.config)]
        self.patterns = list(dict.fromkeys(self.layer_patterns))  # of the groups after those of the cache
        self._layers()
        self._norm(self.stack.norm, self.stream, self.stream, to_float=True)
        self._op("select", input=self.stream, out=-1, in_stride=_padded(self.size), k=self.size * 4)
        self._norm(None, self.stream, self.input)
        assert model.decoder is not None
        for index, layer in enumerate(model.decoder.layers):
            assert isinstance(layer, model_lib.transformer.TransformerLayer)
            self._cross_attention(len(model.decoder.layers) + index, layer.cross_attention)

    def _cross_attention(self, index: int, attention: nn.Module | None) -> None:
        """Write the keys and values of the encoder's output to the cache's layer ``index``."""
        _require(type(attention) is model_lib.attention.CrossAttention, _kind("attention", attention))
        assert isinstance(attention, model_lib.attention.CrossAttention)
        kv_heads, dim, value_dim = attention.kv_heads, attention.head_dim, attention.value_dim
        layers = [self._linear(attention.k), self._linear(attention.v)]
        width = _padded(kv_heads * (dim + value_dim))
        projected = self._shared("projections", width, torch.float32)
        self._linear_product(self.input, projected, layers, self._biases(layers), mode="float",
                             in_stride=_padded(self.size), out_stride=width,
                             clip=attention.spec.clip_qkv or 0.0)  # fmt: skip
        norm = attention.k_norm
        if norm is not None:
            self._norm(norm, projected, projected, to_float=True, k=norm.width, in_stride=width, out_stride=width,
                       heads=kv_heads * dim // norm.width, own_weights=norm.num_weights)  # fmt: skip
        self._op("rotate", input=projected, in_stride=width, kv_heads=kv_heads, head_dim=dim, value_dim=value_dim,
                 **super()._stores(index, attention))  # fmt: skip

    def _stores(self, layer: int, attention: model_lib.attention.Attention) -> dict[str, int]:
        stores = []
        for dim in (attention.head_dim, attention.value_dim):
            store = native.Store(format=self.type)  # formats begin with the dtypes
            self.own_stores.append((store, attention.kv_heads * dim))
            stores.append(ctypes.addressof(store))
        group = len(self.cache.groups) + self.patterns.index(self.layer_patterns[layer])
        return {"group": group, "keys": stores[0], "values": stores[1]}


class _PreparedStep(NamedTuple):
    """The addresses of an input's tensors, which are the same in every step of its shape."""

    model_input: ModelInput
    step: native.StepInput
    best: ctypes.Array[ctypes.c_int32]  # receives the best token of each row
    referenced: list[object]  # what must outlive the addresses


class NativeProgram:
    """The operations of one model and one cache, and the inputs of recent steps.

    ``unadapted_layer``: a layer whose terms of adapters it does not add; "" if it adds all.
    """

    encoder: NativeEncoder | None = None
    unadapted_layer = ""

    def __init__(self, builder: _Builder, library: native.Library) -> None:
        self._library, self._referenced = library, builder.referenced
        self._vocab_size, self._hidden_size = builder.model.config.vocab_size, builder.size
        self._ops = (native.Op * len(builder.ops))(*builder.ops)
        self._widths = np.array(builder.widths, dtype=np.int64)
        self._program = native.Program(
            ctypes.addressof(self._ops), self._widths.ctypes.data, len(builder.ops), len(self._widths)
        )
        self._state = native.library.weight_state(builder.model)
        self._groups, self._positions = builder.cache.groups, builder.cache.positions
        self._steps: dict[int, _PreparedStep] = {}
        self._finalizer = weakref.finalize(self, library.free, self._program)
        self.num_tokens = self._vocab_size  # ids below it are sampled
        self._logits: weakref.ref[Tensor] | None = None  # of the last step
        self._best: ctypes.Array[ctypes.c_int32] = (ctypes.c_int32 * 0)()  # of each row; -1 if one is not finite

    @property
    def variant(self) -> str:
        """Instruction set of the kernels."""
        return self._library.variant

    @property
    def parts(self) -> list[str]:
        """Part of a step that each operation belongs to: a value of ``PARTS``, or the head."""
        logits = native.library.OUTPUT_MODES.index("logits")
        kinds = [(native.library.OPERATIONS[op.kind], op.mode) for op in self._ops]
        return ["head" if kind == "linear" and mode == logits else PARTS[kind] for kind, mode in kinds]

    @property
    def peak_bytes(self) -> int:
        """Bytes of the activations of the largest step so far."""
        return int(self._program.peak_bytes)

    def is_current(self, model: Transformer) -> bool:
        """Return False if a weight has changed, or a hook reads or changes the model's input."""
        return (
            self._state == native.library.weight_state(model)
            and not model._forward_pre_hooks
            and not model._forward_hooks
        )

    def run(
        self,
        model_input: ModelInput,
        seconds: ctypes.Array[ctypes.c_double] | None = None,
        adapters: model_lib.lora.SelectedAdapters | None = None,
        hidden_indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Write the new tokens to the cache; return logits [N, V] and, if requested, hidden states [H, E], float32.

        ``seconds`` [operations + 1] receives the first thread's time in each operation, then its waiting for others.
        ``adapters``: those of the tokens. ``hidden_indices`` [H]: tokens, in T.
        """
        known = self._steps.get(id(model_input))
        if known is None or known.model_input is not model_input:
            if len(self._steps) >= MAX_STEPS:
                self._steps.clear()
            step, referenced = self._step(model_input)
            best = (ctypes.c_int32 * step.num_logits)()
            step.best = ctypes.addressof(best)
            known = self._steps[id(model_input)] = _PreparedStep(model_input, step, best, referenced)
        known.step.num_tokens = self.num_tokens
        hidden = None
        if hidden_indices is not None:
            hidden = torch.empty(len(hidden_indices), self._hidden_size)
            known.step.hidden, known.step.hidden_indices = hidden.data_ptr(), hidden_indices.data_ptr()
        known.step.num_hidden = 0 if hidden is None else len(hidden)
        logits = self._run(known.step, self._vocab_size, seconds, adapters)
        self._logits, self._best = weakref.ref(logits), known.best
        return logits, hidden

    def best_tokens(self, logits: Tensor) -> list[int] | None:
        """Return the best token of each row of the last step's logits; None if these are others, or not finite."""
        best: list[int] = self._best[:]
        return None if self._logits is None or self._logits() is not logits or min(best, default=0) < 0 else best

    def _run(
        self,
        step: native.StepInput,
        width: int,
        seconds: ctypes.Array[ctypes.c_double] | None = None,
        adapters: model_lib.lora.SelectedAdapters | None = None,
    ) -> Tensor:
        out = torch.empty(step.num_logits, width, dtype=torch.float32)
        step.logits, step.seconds = out.data_ptr(), None if seconds is None else ctypes.addressof(seconds)
        numbers = None if adapters is None else adapters.numbers  # until the step has run
        step.adapters = None if numbers is None else numbers.ctypes.data
        self._program.threads = torch.get_num_threads()
        self._library.step(self._program, step)
        return out

    def _step(self, model_input: ModelInput) -> tuple[native.StepInput, list[object]]:
        """Return the addresses of an input's tensors, and what must outlive them."""
        referenced: list[object] = []
        groups = (native.GroupInput * len(self._groups))()
        for group, mapping, positions, to in zip(
            self._groups, model_input.slot_mappings, self._positions, groups, strict=True
        ):
            sub_batches = model_input.sub_batches if mapping.sub_batches is None else mapping.sub_batches
            tables = (native.SubBatchTable * len(sub_batches))()
            for sub_batch, table, entry in zip(sub_batches, mapping.block_tables, tables, strict=True):
                width = table.shape[1]
                slots = min(sub_batch.num_read_slots, group.block_size) if width == 1 else width * group.block_size
                entry.num_seqs, entry.num_new, entry.width = sub_batch.num_seqs, sub_batch.num_new_tokens, width
                entry.slots, entry.table = slots, table.data_ptr()
            to.slots = None if mapping.slots is None else mapping.slots.data_ptr()
            to.positions, to.sub_batches = positions.data_ptr(), ctypes.addressof(tables)
            to.num_sub_batches, to.block_size = len(sub_batches), group.block_size
            _set_pattern(to, group.spec.pattern)
            referenced.append(tables)
        step = native.StepInput(
            tokens=len(model_input.token_ids),
            num_logits=len(model_input.logit_indices),
            num_groups=len(groups),
            token_ids=model_input.token_ids.data_ptr(),
            positions=model_input.positions.data_ptr(),
            logit_indices=model_input.logit_indices.data_ptr(),
            seq_lens=None if model_input.seq_lens is None else model_input.seq_lens.data_ptr(),
            groups=ctypes.addressof(groups),
        )
        return step, [*referenced, groups]


def _set_pattern(group: native.GroupInput, pattern: AttentionPattern) -> None:
    group.causal, group.window, group.num_sinks = pattern.causal, pattern.window or 0, pattern.num_sinks
    group.window_step, group.layer_window = pattern.window_step, pattern.layer_window or 0


class NativeEncoder(NativeProgram):
    """The operations of an encoder-decoder's encoder and of the keys and values of its output."""

    def __init__(self, builder: _EncoderBuilder, library: native.Library) -> None:
        super().__init__(builder, library)
        self._size, self._dtype = builder.size, builder.dtype
        self._patterns, self._own_stores = builder.patterns, builder.own_stores
        self._numbers = max(numbers for _, numbers in builder.own_stores)  # of a token's keys, or values

    def encode(self, encoder_input: ModelInput, adapters: model_lib.lora.SelectedAdapters | None = None) -> Tensor:
        """Return the encoder's output [T, E], float32; the keys and values of cross-attention are written.

        ``adapters``: as in ``run``.
        """
        tokens = len(encoder_input.token_ids)
        memory = torch.empty(2, self._numbers * tokens, dtype=self._dtype)
        for index, (store, _) in enumerate(self._own_stores):
            store.data, store.blocks = memory[index % 2].data_ptr(), tokens
        slots, positions = torch.arange(tokens), torch.empty(tokens, dtype=torch.int64)
        groups = (native.GroupInput * (len(self._groups) + len(self._patterns)))()
        mappings = iter(encoder_input.slot_mappings)
        for group, cached_positions, to in zip(self._groups, self._positions, groups, strict=False):
            to.positions, to.block_size = cached_positions.data_ptr(), group.block_size
            if group.spec.is_cross_attention:
                written = next(mappings).slots
                assert written is not None
                to.slots = written.data_ptr()
        tables = (native.SubBatchTable * len(encoder_input.sub_batches))()
        first = 0
        for sub_batch, table in zip(encoder_input.sub_batches, tables, strict=True):
            count = table.slots = table.width = table.num_new = sub_batch.num_new_tokens
            table.num_seqs, table.table = sub_batch.num_seqs, slots[first:].data_ptr()
            first += sub_batch.num_seqs * count
        for own, pattern in zip(groups[len(self._groups) :], self._patterns, strict=True):
            own.slots, own.positions, own.block_size = slots.data_ptr(), positions.data_ptr(), 1
            own.sub_batches, own.num_sub_batches = ctypes.addressof(tables), len(tables)
            _set_pattern(own, pattern)
        step = native.StepInput(
            tokens=tokens,
            num_logits=tokens,
            num_groups=len(groups),
            token_ids=encoder_input.token_ids.data_ptr(),
            positions=encoder_input.positions.data_ptr(),
            logit_indices=slots.data_ptr(),
            seq_lens=None if encoder_input.seq_lens is None else encoder_input.seq_lens.data_ptr(),
            groups=ctypes.addressof(groups),
        )
        return self._run(step, self._size, adapters=adapters)
