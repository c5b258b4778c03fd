"""Low-rank adapters of a frozen model: LoRA (Hu et al. 2021, sec. 4.1).

A layer y = W x + b becomes y = W x + b + scale B A x, with A [r, in] and B [out, r]; only A and B are trained. B begins
at zero, so training begins at the base model; A begins uniform in +-1/sqrt(in), as in the authors' code. ``scale`` is
alpha / r, or alpha / sqrt(r) (rank-stabilized: Kalajdzievski 2023). Outside training, adapters are always merged,
W' = W + scale B A, which gives an ordinary model.

Linear layers are adapted by their names in ``transformer.py``, such as ``decoder.layers.0.attention.q``; embeddings,
the head, norms, experts and routers are not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kvad import ops
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
