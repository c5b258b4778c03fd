"""The model that every engine is compared with: unpacked weights, plain kernels, any dtype.

``reference_model`` builds a second ``Transformer`` from the weights as they are when it is called, before an engine
packs them. Every product is ``F.linear`` of one layer's weight, attention is the reference kernel, and nothing is
joined, tiled or fused. Activations have the requested dtype; weights stay in the stored one and are converted where
they are used, one matrix at a time, so a float64 reference of a model of N bytes needs little more than N bytes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvad import model as model_lib
from kvad import ops
from kvad.model import Transformer, whole_sequences
from kvad.model_input import CacheProtocol

SLICE = 1 << 13  # rows of the output matrix that are converted at a time


class WholeSequence(NamedTuple):
    """Tokens of one sequence and of its encoder input."""

    tokens: Sequence[int]
    source: Sequence[int] | None = None


class ReferenceModel(Transformer):
    """A Transformer with plain kernels; build it with ``reference_model``."""

    compute_dtype: torch.dtype

    def logits(self, hidden: Tensor, indices: Tensor) -> Tensor:
        """Compute logits [N, V] from hidden [T, E], for ``SLICE`` tokens of the vocabulary at a time."""
        head, selected = self.head, hidden.index_select(0, indices)
        if not isinstance(head, model_lib.heads.LanguageHead):
            return super().logits(hidden, indices)
        selected, slices = head.pre_logits(selected), []
        output: Any = head.output  # a _PlainLinear
        if output is not None and output.is_rounded:
            selected = ops.quantized_linear.round_inputs(selected, output.matrix.format[1])
        weight = self.token_embedding if head.weight is None else head.weight
        for low in range(0, self.config.vocab_size, SLICE):
            rows = slice(low, low + SLICE)
            bias = None if head.bias is None else head.bias[rows].to(hidden.dtype)
            part = weight[rows] if head.output is None else head.output.matrix.dequantize(hidden.dtype, rows)
            slices.append(F.linear(selected, part.to(hidden.dtype), bias))
        logits = torch.cat(slices, dim=-1) * head.spec.logit_scale
        cap = head.spec.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def whole_logits(
        self, sequences: Sequence[WholeSequence], cache: CacheProtocol, *, last_only: bool = False, sum_order: int = 0
    ) -> list[Tensor]:
        """Compute [T, V] of each sequence (``last_only``: [1, V]), all in one pass over the weights.

        ``sum_order``: linear layers, but not the head and unquantized experts, sum over their inputs in an order that
        is drawn with this seed (0: that of the weights).
        """
        for module in self.modules():
            if isinstance(module, _PlainLinear):
                module.sum_order = sum_order
        device = self.token_embedding.device
        model_input = whole_sequences([each.tokens for each in sequences], device, last_only=last_only)
        sources = [each.source for each in sequences if each.source is not None]
        if sources:
            model_input = model_input._replace(encoder_input=whole_sequences(sources, device))
        # Kernels for inference are not used while gradients are recorded; no weight requires one.
        with torch.enable_grad():
            logits = self.logits(self(model_input, cache), model_input.logit_indices).cpu()
        return list(logits.split([1 if last_only else len(each.tokens) for each in sequences]))


def reference_model(model: Transformer, dtype: torch.dtype | None = None) -> ReferenceModel:
    """Build the reference of ``model`` in ``dtype`` (default: the model's) from its weights as they are now.

    Weights are shared, not copied: an engine that packs them binds its layers to a copy.
    """
    with torch.device("meta"):
        reference = ReferenceModel(model.config).eval().requires_grad_(False)
    quantized = {
        name: layer.matrix
        for name, layer in model.named_modules()
        if isinstance(layer, ops.quantized_linear.QuantizedLinear)
    }
    reference.use_quantized(quantized)
    if model.activation_bits is not None:
        reference.round_activations(model.activation_bits)
    state = {name: x.detach() for name, x in model.state_dict().items()}
    reference.separate_experts(state)
    reference.load_state_dict(state, assign=True)
    reference.compute_dtype = model.token_embedding.dtype if dtype is None else dtype
    reference.kernel = "reference"
    for own, stack in ((reference.encoder, model.encoder), (reference.decoder, model.decoder)):
        if own is not None and stack is not None:
            # Custom encodings may have constants, and are small.
            own.positions = copy.deepcopy(stack.positions).to(reference.compute_dtype).requires_grad_(False)
    for parent in list(reference.modules()):
        for name, part in [*parent.named_children(), *vars(parent).items()]:
            if isinstance(part, ops.linear.Linear):
                setattr(parent, name, _PlainLinear(part))
            elif isinstance(part, ops.linear.PackedLinear):
                setattr(parent, name, _separate_products)
        if isinstance(parent, model_lib.layers.MixtureOfExperts):
            parent.register_forward_pre_hook(_convert_experts)
            parent.register_forward_hook(_restore_experts)
        elif isinstance(parent, model_lib.layers.Embedding):
            parent.register_forward_pre_hook(_convert_embedded, with_kwargs=True)
            parent.compute_dtype = reference.compute_dtype  # type: ignore[assignment]
    return reference


class _PlainLinear(nn.Module):
    """One product with one weight, converted to the dtype of its input."""

    def __init__(self, layer: ops.linear.Linear) -> None:
        super().__init__()
        self.matrix = layer.matrix if isinstance(layer, ops.quantized_linear.QuantizedLinear) else None
        self.weight, self.bias, self.tiles = None if self.matrix else layer.weight, layer.bias, None
        self.out_features = layer.out_features
        self.is_rounded = getattr(layer, "activation_bits", None) is not None  # its inputs are
        self.sum_order = 0

    def forward(self, x: Tensor) -> Tensor:
        return self._multiply(x, slice(None), self.bias)

    def multiply_rows(self, x: Tensor, low: int, high: int, bias: Tensor | None = None) -> Tensor:
        """Multiply by some rows, those of an expert."""
        return self._multiply(x, slice(low, high), bias)

    def _multiply(self, x: Tensor, rows: slice, bias: Tensor | None) -> Tensor:
        x, weight = self._rounded(x), self._rows(x.dtype, rows)
        if self.sum_order:
            draw = torch.Generator().manual_seed(self.sum_order)
            order = torch.randperm(x.shape[-1], generator=draw).to(x.device)
            x, weight = x[..., order], weight[:, order]
        return F.linear(x, weight, None if bias is None else bias.to(x.dtype))

    def _rows(self, dtype: torch.dtype, rows: slice) -> Tensor:
        if self.matrix is not None:
            return self.matrix.dequantize(dtype, rows)
        return self.effective_weight()[rows].to(dtype)

    def _rounded(self, x: Tensor) -> Tensor:
        if not self.is_rounded:
            return x
        assert self.matrix is not None
        return ops.quantized_linear.round_inputs(x, self.matrix.format[1])

    def effective_weight(self) -> Tensor:
        if self.matrix is not None:
            return self.matrix.dequantize(torch.float32)  # as ``QuantizedLinear.effective_weight``
        assert self.weight is not None
        return self.weight


def _separate_products(x: Tensor, *layers: nn.Module) -> list[Tensor]:
    return [layer(x) for layer in layers]


def _convert_experts(module: nn.Module, inputs: tuple[Tensor]) -> None:
    lists = [x for x in module.children() if isinstance(x, nn.ParameterList)]
    module.stored = [(owner, dict(owner._parameters)) for owner in (module, *lists)]  # type: ignore[assignment]
    for owner in (module, *lists):
        for name, x in owner._parameters.items():
            if x is not None:
                owner._parameters[name] = x.to(inputs[0].dtype)  # type: ignore[assignment]


def _restore_experts(module: nn.Module, _inputs: object, _output: object) -> None:
    stored: Any = module.stored
    for owner, parameters in stored:
        owner._parameters.update(parameters)


def _convert_embedded(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace the table by the rows of the step's tokens, in the reference's dtype."""
    tokens, positions, *rest = args
    table = rest[0] if rest else kwargs.get("table")
    assert isinstance(module, model_lib.layers.Embedding)
    if table is None:
        assert module.tokens is not None
        table = module.tokens.weight
    ids, inverse = tokens.unique(return_inverse=True)
    dtype: Any = module.compute_dtype
    return (inverse, positions), {**kwargs, "table": table[ids].to(dtype)}
