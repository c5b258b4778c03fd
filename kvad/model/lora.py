"""Low-rank adapters beside a frozen model: LoRA (Hu et al. 2021, sec. 4.1).

A product y = W x + b becomes y = W x + b + scale B A x, with A [r, in] and B [out, r]; only A and B are trained.  B
begins at zero, so an adapted model begins as the model itself; A begins uniform in +-1/sqrt(in), as in the authors'
code.  ``scale`` is alpha / r, or alpha / sqrt(r) (rank-stabilised: Kalajdzievski 2023).  Merged, W' = W + scale B A, it
is a plain model again, which every kernel, pack and cache knows: nothing but training ever computes with adapters
beside the weights.

What can be adapted are the linear parts of the layers, by their names in ``transformer.py``:
``decoder.layers.0.mixer.q``.  Embeddings, the head, norms, experts' matrices and their routers stay as they are.
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
    """What is added to a weight [out, in]: ``scale`` times b [out, r] times a [r, in]."""

    a: Tensor
    b: Tensor
    scale: float


class LoraLinear(ops.linear.Linear):
    """A linear part with its adapter beside it.  The frozen weight keeps its name and its memory."""

    def __init__(self, base: ops.linear.Linear, rank: int, scale: float, dropout: float) -> None:
        nn.Module.__init__(self)  # Linear's own would make a weight
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.scale, self.dropout = scale, nn.Dropout(dropout)
        bound = 1 / math.sqrt(base.in_features)
        self.lora_a = nn.Parameter(base.weight.new_empty(rank, base.in_features).uniform_(-bound, bound))
        self.lora_b = nn.Parameter(base.weight.new_zeros(base.out_features, rank))

    def forward(self, input: Tensor) -> Tensor:
        """[.., in] -> [.., out]."""
        low = ops.linear.linear(self.dropout(input), self.lora_a)
        return ops.linear.linear(input, self.weight, self.bias, self.tiles) + self.scale * ops.linear.linear(
            low, self.lora_b
        )


def add_adapters(model: Transformer, parts: Iterable[str], rank: int, scale: float, dropout: float = 0.0) -> None:
    """Freeze the model and put adapters beside the linear ``parts``: from now on only they want gradients.

    A random; B zero, so nothing that the model says has changed.
    """
    model.requires_grad_(False)
    for part in parts:
        parent, _, last = part.rpartition(".")
        owner, base = model.get_submodule(parent), model.get_submodule(part)
        assert isinstance(base, ops.linear.Linear) and not isinstance(base, LoraLinear), part
        setattr(owner, last, LoraLinear(base, rank, scale, dropout))


def adapter_factors(model: Transformer) -> dict[str, LoraFactors]:
    """Name -> factors of every adapted part; the tensors are the parameters' own."""
    found = ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLinear))
    return {name: LoraFactors(module.lora_a.detach(), module.lora_b.detach(), module.scale) for name, module in found}


@torch.no_grad()
def load_factors(model: Transformer, factors: Mapping[str, LoraFactors]) -> None:
    """Into an adapted model, what :func:`factors_of` gave of one with the same parts and rank."""
    adapted = {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}
    assert adapted.keys() == factors.keys()
    for name, module in adapted.items():
        module.lora_a.copy_(factors[name].a)
        module.lora_b.copy_(factors[name].b)


@torch.no_grad()
def merge_weight(weight: Tensor, factors: LoraFactors, dtype: torch.dtype | None = None) -> Tensor:
    """W + scale B A, [out, in], in ``dtype`` (the weight's own).  Made in float32 at least, and rounded once."""
    target = weight.dtype if dtype is None else dtype
    wide = torch.promote_types(torch.promote_types(weight.dtype, target), torch.float32)
    a, b = (x.to(device=weight.device, dtype=wide) for x in (factors.a, factors.b))
    return torch.addmm(weight.to(wide), b, a, alpha=factors.scale).to(target)


def factors_fingerprint(factors: Mapping[str, LoraFactors]) -> str:
    """32 hexadecimal digits that name what they add: parts, scales and every number."""
    digest = blake2b(digest_size=16)
    for name, (a, b, scale) in sorted(factors.items()):
        digest.update(f"{name} {scale!r} {a.dtype} {tuple(a.shape)} {tuple(b.shape)}".encode())
        for tensor in (a, b):
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
