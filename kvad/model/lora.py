"""Low-rank adapters of a frozen model: LoRA (Hu et al. 2021, sec. 4.1).

A layer y = W x + b becomes y = W x + b + scale B A x, with A [r, in] and B [out, r]; only A and B are trained. B begins
at zero, so training begins at the base model; A begins uniform in +-1/sqrt(in), as in the authors' code. ``scale`` is
alpha / r, or alpha / sqrt(r) (rank-stabilized: Kalajdzievski 2023). Outside training, an adapter is either merged,
W' = W + scale B A, which gives an ordinary model, or one of an ``AdapterSet``: each token of a step then adds the terms
of its own adapter to the products of the base.

Linear layers are adapted by their names in ``transformer.py``, such as ``decoder.layers.0.attention.q``; embeddings,
the head, norms, experts and routers are not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kvad import config as cfg
from kvad import ops
from kvad.config import ModelConfig
from kvad.errors import RequestError, suggest
from kvad.model.transformer import Transformer


class LoraFactors(NamedTuple):
    """Factors of the term ``scale * b @ a`` that is added to a weight [out, in]."""

    a: Tensor  # [r, in]
    b: Tensor  # [out, r]
    scale: float


class LoraLinear(ops.linear.Linear):
    """A linear layer with an adapter; the frozen weight keeps its name and storage."""

    def __init__(self, base: ops.linear.Linear, rank: int, scale: float, dropout: float) -> None:
        nn.Module.__init__(self)  # Linear.__init__ would allocate a weight
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.scale, self.dropout = scale, nn.Dropout(dropout)
        bound = 1 / math.sqrt(base.in_features)
        self.lora_a = nn.Parameter(base.weight.new_empty(rank, base.in_features).uniform_(-bound, bound))
        self.lora_b = nn.Parameter(base.weight.new_zeros(base.out_features, rank))

    def forward(self, input: Tensor) -> Tensor:
        """Apply layer and adapter: [.., in] -> [.., out]."""
        low = ops.linear.linear(self.dropout(input), self.lora_a)
        base = ops.linear.linear(input, self.weight, self.bias, self.tiles)
        return base + self.scale * ops.linear.linear(low, self.lora_b)

    def effective_weight(self) -> Tensor:
        """Return W + scale B A [out, in]; products with it have no dropout."""
        return self.weight + self.scale * (self.lora_b @ self.lora_a)


def add_adapters(model: Transformer, parts: Iterable[str], rank: int, scale: float, dropout: float = 0.0) -> None:
    """Freeze the model and add adapters to the linear layers ``parts``; outputs do not change, because B is zero."""
    model.requires_grad_(False)
    for part in parts:
        parent, _, last = part.rpartition(".")
        owner, base = model.get_submodule(parent), model.get_submodule(part)
        assert isinstance(base, ops.linear.Linear) and not isinstance(base, LoraLinear), part
        setattr(owner, last, LoraLinear(base, rank, scale, dropout))


def adapter_factors(model: Transformer) -> dict[str, LoraFactors]:
    """Return the factors of every adapted layer by name; the tensors share the parameters' storage."""
    adapted = ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLinear))
    return {name: LoraFactors(x.lora_a.detach(), x.lora_b.detach(), x.scale) for name, x in adapted}


@torch.no_grad()
def load_factors(model: Transformer, factors: Mapping[str, LoraFactors]) -> None:
    """Load factors from ``adapter_factors`` into a model with the same adapters."""
    adapted = adapter_factors(model)
    assert adapted.keys() == factors.keys()
    for name, own in adapted.items():
        own.a.copy_(factors[name].a)
        own.b.copy_(factors[name].b)


@torch.no_grad()
def merge_weight(weight: Tensor, factors: LoraFactors, dtype: torch.dtype | None = None) -> Tensor:
    """Return W + scale B A, [out, in], in ``dtype`` or the weight's, computed in at least float32 and rounded once."""
    target = weight.dtype if dtype is None else dtype
    wide = torch.promote_types(torch.promote_types(weight.dtype, target), torch.float32)
    a, b = (x.to(device=weight.device, dtype=wide) for x in (factors.a, factors.b))
    return torch.addmm(weight.to(wide), b, a, alpha=factors.scale).to(target)


def factors_fingerprint(factors: Mapping[str, LoraFactors]) -> str:
    """Return a hash of the factors' names, scales and values, 32 hexadecimal digits."""
    digest = blake2b(digest_size=16)
    for name, (a, b, scale) in sorted(factors.items()):
        digest.update(f"{name} {scale!r} {a.dtype} {tuple(a.shape)} {tuple(b.shape)}".encode())
        for tensor in (a, b):
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class AdapterSet:
    """Adapters of one model, of which each sequence uses one, or none.

    Every adapter has its own rank, without padding, so that a token's numbers do not depend on the other adapters. The
    terms are computed in at least float32 and rounded once, when they are added.

    Args:
        model: The base, which is not changed.
        adapters: Factors by the name of the linear layer, by the name of the adapter; ``unsupported_layer`` is None.
    """

    def __init__(self, model: Transformer, adapters: Mapping[str, Mapping[str, LoraFactors]]) -> None:
        table = model.token_embedding
        self._device, self._dtype = table.device, torch.promote_types(table.dtype, torch.float32)
        self._fingerprints = {name: factors_fingerprint(factors) for name, factors in adapters.items()}
        self._terms: dict[nn.Module, dict[int, tuple[Tensor, Tensor]]] = {}  # layer -> number -> A, scale B
        for number, factors in enumerate(adapters.values(), 1):
            for layer_name, (a, b, scale) in factors.items():
                layer = model.get_submodule(layer_name)
                assert isinstance(layer, ops.linear.Linear), f"{layer_name} has no adapters"
                wide_a, wide_b = (x.detach().to(self._device, self._dtype).contiguous() for x in (a, b))
                self._terms.setdefault(layer, {})[number] = wide_a, scale * wide_b

    def __bool__(self) -> bool:
        return bool(self._fingerprints)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._fingerprints)

    def number(self, name: str) -> int:
        """Return the number of an adapter, 0 for the base (""); raise RequestError for others."""
        if not name:
            return 0
        if name not in self._fingerprints:
            hint = suggest(name, self.names) if self.names else "No adapters were loaded."
            raise RequestError(f"adapter: unknown adapter {name!r}", hint)
        return self.names.index(name) + 1

    def fingerprint(self, name: str) -> str:
        """Return the fingerprint of an adapter's factors; "" for the base."""
        return self._fingerprints[self.names[self.number(name) - 1]] if name else ""

    def matmul_shapes(self) -> Iterator[ops.batch_invariant.MatmulShape]:
        """Yield the shapes of all products with factors."""
        for terms in self._terms.values():
            for a, b in terms.values():
                for x in (a, b):
                    yield ops.batch_invariant.MatmulShape(x.shape[1], x.shape[0], self._dtype)

    def select(self, spans: Iterable[tuple[int, int]]) -> SelectedAdapters | None:
        """Return the adapters of a step's tokens, or None if no token has one.

        Args:
            spans: (number of the adapter, number of tokens) of each sequence, in the order of the tokens.

        Example: (1, 2), (0, 3), (2, 1), (1, 1) -> adapter 1 has the tokens 0, 1 and 6, adapter 2 the token 5.
        """
        spans = list(spans)
        if not any(number for number, _ in spans):
            return None
        return SelectedAdapters(self._terms, spans, self._device)

    def terms(self, layer: nn.Module) -> Mapping[int, tuple[Tensor, Tensor]]:
        """Return A [r, in] and scale * B [out, r] of a layer by the adapter's number, from 1."""
        return self._terms.get(layer, {})


class SelectedAdapters:
    """Adapters of the tokens of one step: a ``TokenAdapters``. Each adapter in use takes two products per layer."""

    def __init__(
        self,
        terms: Mapping[nn.Module, Mapping[int, tuple[Tensor, Tensor]]],
        spans: Sequence[tuple[int, int]],  # number of the adapter, number of tokens
        device: torch.device,
    ) -> None:
        self._terms, self._spans, self._device = terms, spans, device

    @property
    def numbers(self) -> NDArray[np.int32]:
        """Number of the adapter of each token [T], 0: none."""
        numbers, counts = zip(*self._spans, strict=True)
        return np.repeat(np.array(numbers, np.int32), counts)

    @cached_property
    def _rows(self) -> dict[int, slice | Tensor]:
        """Tokens of each adapter, by its number."""
        tokens: dict[int, list[int]] = {}
        start = 0
        for number, count in self._spans:
            if number:
                tokens.setdefault(number, []).extend(range(start, start + count))
            start += count
        return {number: self._indices(indices) for number, indices in tokens.items()}

    def _indices(self, indices: list[int]) -> slice | Tensor:
        if indices[-1] - indices[0] == len(indices) - 1:
            return slice(indices[0], indices[-1] + 1)
        return ops.gpu.to_device(torch.tensor(indices), self._device)

    def add(self, layer: nn.Module, x: Tensor, out: Tensor) -> Tensor:
        """Add the terms for ``layer``, given its input x [T, in], to ``out`` [T, out] in place."""
        terms = self._terms.get(layer)
        if terms is None:
            return out
        assert isinstance(layer, ops.linear.Linear)
        for number, rows in self._rows.items():
            if number not in terms:
                continue
            a, b = terms[number]
            low = ops.linear.linear(x[rows].to(a.dtype), a, None, layer.tiles)
            term = ops.linear.linear(low, b, None, layer.tiles)
            if isinstance(rows, slice):
                out[rows] += term
            else:
                out.index_copy_(0, rows, (out[rows] + term).to(out.dtype))
        return out


def unsupported_layer(config: ModelConfig, names: Iterable[str]) -> str | None:
    """Return a layer whose terms an ``AdapterSet`` cannot compute, with the reason, or None."""
    stacks = [stack for stack in (config.encoder, config.decoder) if stack is not None]
    for name in names:
        if ".layers." not in name:
            return f"{name}: only layers of the decoder and the encoder have adapters"
        if name.endswith(".conv"):
            return f"{name}: convolutions have no adapters"
        if name.endswith(".kv_up"):
            return f"{name}: latent attention multiplies it into queries and outputs"
        for layer in (layer for stack in stacks for layer in stack.layer_types.values()):
            if isinstance(layer.attention, cfg.AttentionConfig) and layer.attention.custom_class is not None:
                return f"{name}: the attention is the custom class {layer.attention.custom_class}"
    return None


def factor_bytes(adapters: Iterable[Mapping[str, LoraFactors]], dtype: str, num_tokens: int) -> int:
    """Return the bytes of an ``AdapterSet`` for weights of ``dtype``, and of the terms of a step of ``num_tokens``."""
    size = 8 if dtype == "float64" else 4
    factors = [each for adapter in adapters for each in adapter.values()]
    stored = sum(a.numel() + 3 * b.numel() for a, b, _ in factors)  # the CPU's kernels have a copy of b, half empty
    widest = max((a.shape[1] + a.shape[0] + 2 * b.shape[0] for a, b, _ in factors), default=0)
    return size * (stored + num_tokens * widest)
