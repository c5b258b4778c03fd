"""A model whose rows do not show their neighbours: what a row's tokens give is the same, bit for bit, alone and beside
any others, in any chunks (``ops/invariant.py`` has the means, this is where a model takes them).

Norms, softmax and sampling go row by row anyway.  What is left are products, activations and attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from kvad import config as cfg
from kvad.errors import ConfigError
from kvad.model.heads import Classes, Language
from kvad.model.mixers import Attention, CrossAttention
from kvad.model.parts import Experts, Gated
from kvad.model.transformer import Transformer
from kvad.ops.invariant import KEYS, QUERIES, Product, Tiles, each, measure, widened
from kvad.ops.linear import Joint, Linear

__all__ = ["isolate"]


def isolate(model: Transformer) -> Tiles:
    """Change a model, for good, to tiles that hold on this machine; -> what its memory takes as its kernel: attention
    has tiles of its own, for what holds of its small products need not hold of the layers'.

    After :meth:`Transformer.pack`, if at all.  ConfigError names what cannot be promised.
    """
    _check(model)
    tiles = measure(_products(model))
    model.kernel = attention = measure(_attentions(model), QUERIES)
    for module in model.modules():
        if isinstance(module, (Linear, Language, Classes, Experts)):
            module.tiles = tiles
        f = getattr(module, "activation", None)
        if callable(f) and getattr(f, "func", None) is not each:
            module.activation = partial(each, f)  # type: ignore[assignment]
    return attention


def _check(model: Transformer) -> None:
    where, dtype = model.table.device.type, model.table.dtype
    if where != "cpu":
        raise ConfigError(f"deterministic: not promised on {where}: its kernels choose by the batch", "use the CPU")
    if dtype == torch.float16:
        raise ConfigError("deterministic: not promised in float16", "dtype=float32 or bfloat16")
    stacks = (model.config.decoder, model.config.encoder)
    for layer in (layer for stack in stacks if stack is not None for layer in stack.kinds.values()):
        mixer = layer.mixer
        name = mixer.position.name if isinstance(mixer.position, cfg.OwnPositions) else mixer.own
        if name is not None:
            raise ConfigError(f"deterministic: not promised of {name}, a class that kvad does not know")


def _attentions(model: Transformer) -> Iterator[Product]:
    """Every shape of a product of queries and keys, or of weights and values."""
    for module in model.modules():
        if isinstance(module, Attention):
            yield from _attention(module, model.table.dtype)


def _products(model: Transformer) -> Iterator[Product]:
    """Every shape of a product with weights that a step may compute."""
    dtype, joined = model.table.dtype, set[nn.Module]()
    packs: list[tuple[Joint, tuple[Linear, ...]]]
    for module in model.modules():
        if isinstance(module, Attention):
            packs = [(module.qkv, (module.q, module.k, module.v))]
            if isinstance(module, CrossAttention):
                packs.append((module.kv, (module.k, module.v)))
        elif isinstance(module, Gated):
            packs = [(module.gate_up, (module.gate, module.up))]
        else:
            continue
        for joint, layers in packs:
            if joint.shape is not None:
                yield Product(joint.shape[1], joint.shape[0], dtype, layers[0].bias is not None)
                joined.update(layers)
    for module in model.modules():
        if isinstance(module, Linear) and module not in joined:
            yield Product(module.in_features, module.out_features, dtype, module.bias is not None)
        elif isinstance(module, Experts):
            for weight, bias in ((module.gate, module.gate_bias), (module.down, module.down_bias)):
                yield Product(weight.shape[2], weight.shape[1], dtype, bias is not None)
        elif isinstance(module, (Language, Classes)):
            head = model.table if module.weight is None else module.weight
            yield Product(head.shape[1], head.shape[0], dtype, module.bias is not None)


def _attention(layer: Attention, dtype: torch.dtype) -> Iterator[Product]:
    group, wide = layer.heads // layer.kv_heads, widened(dtype)
    for batch in {1, layer.kv_heads, 4 * layer.kv_heads}:
        yield Product(layer.head_dim, KEYS, wide, batch=batch, group=group)
        yield Product(KEYS, layer.value_dim, wide, batch=batch, group=group, across=True)
