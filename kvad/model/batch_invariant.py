"""Batch-invariant models: the result of a sequence is the same, bit for bit, in any batch and in any chunks.

Uses ``ops/batch_invariant.py`` for products, activations and attention; norms, softmax and sampling are computed per
row anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import nn

from kvad import config as cfg
from kvad import ops
from kvad.errors import ConfigError
from kvad.model.attention import Attention, LatentAttention
from kvad.model.heads import ClassificationHead, LanguageHead
from kvad.model.layers import MixtureOfExperts, Router
from kvad.model.transformer import Transformer

MatmulShape = ops.batch_invariant.MatmulShape


def make_batch_invariant(model: Transformer, products: Iterable[MatmulShape] = ()) -> ops.batch_invariant.TileSizes:
    """Change a model permanently to tiles that are batch-invariant on this machine.

    Call it after ``Transformer.fuse_projections``, if both are used. ``products`` are those of adapters.

    Returns:
        The tile sizes of attention, which are the kernel of the model's cache. They may differ from the layers' sizes.

    Raises:
        ConfigError: If the model, its device or its dtype is not supported.
    """
    _check(model)
    tiles = ops.batch_invariant.find_invariant_tiles([*_products(model), *products])
    model.kernel = attention = ops.batch_invariant.find_invariant_tiles(_attentions(model), ops.batch_invariant.QUERIES)
    for module in model.modules():
        if isinstance(module, (ops.linear.Linear, LanguageHead, ClassificationHead, MixtureOfExperts)):
            module.tiles = tiles
        for name in ("activation", "sigmoid"):
            f = getattr(module, name, None)
            if callable(f) and getattr(f, "func", None) is not ops.batch_invariant.elementwise:
                setattr(module, name, partial(ops.batch_invariant.elementwise, f))
    return attention


def _check(model: Transformer) -> None:
    device, dtype = model.token_embedding.device.type, model.token_embedding.dtype
    if device != "cpu":
        message = f"deterministic: is not supported on {device}, whose kernels depend on the batch"
        raise ConfigError(message, "use the CPU")
    if dtype == torch.float16:
        raise ConfigError("deterministic: is not supported in float16", "use dtype=float32 or bfloat16")
    stacks = (model.config.decoder, model.config.encoder)
    for layer in (layer for stack in stacks if stack is not None for layer in stack.layer_types.values()):
        position, name = layer.attention.position, layer.attention.custom_class
        if isinstance(position, cfg.DisentangledConfig):
            raise ConfigError("deterministic: is not supported with disentangled attention")
        if isinstance(position, cfg.CustomPositionsConfig):
            name = position.name
        if name is not None:
            raise ConfigError(f"deterministic: is not supported with the custom class {name}")
        if isinstance(layer.attention, cfg.GatedRecurrenceConfig):
            raise ConfigError("deterministic: is not supported with a gated recurrence")
        if isinstance(layer.attention, cfg.GatedDeltaConfig):
            raise ConfigError("deterministic: is not supported with the gated delta rule")


def _attentions(model: Transformer) -> Iterator[MatmulShape]:
    """Yield the shapes of the products of queries and keys, and of weights and values."""
    wide, keys = torch.promote_types(model.token_embedding.dtype, torch.float32), ops.batch_invariant.KEYS
    for layer in model.modules():
        if isinstance(layer, Attention):
            group = layer.heads // layer.kv_heads
            for batch in {1, layer.kv_heads, 4 * layer.kv_heads}:
                yield MatmulShape(layer.head_dim, keys, wide, batch=batch, group=group)
                yield MatmulShape(keys, layer.value_dim, wide, batch=batch, group=group, across=True)


def _products(model: Transformer) -> Iterator[MatmulShape]:
    """Yield the shapes of all products with weights."""
    dtype, packed = model.token_embedding.dtype, set[nn.Module]()
    for pack, layers in model.projections():
        if pack.shape is not None:
            yield MatmulShape(pack.shape[1], pack.shape[0], dtype, layers[0].bias is not None)
            packed.update(layers)
    for module in model.modules():
        if isinstance(module, LatentAttention):
            latent = module.latent
            yield MatmulShape(latent.qk_nope_head_dim, latent.kv_lora_rank, dtype)
            yield MatmulShape(latent.kv_lora_rank, latent.v_head_dim, dtype)
        elif isinstance(module, ops.linear.Linear) and module not in packed:
            computed = torch.promote_types(dtype, torch.float32) if isinstance(module, Router) else dtype
            has_bias = module.bias is not None and not isinstance(module, ops.quantized_linear.QuantizedLinear)
            yield MatmulShape(module.in_features, module.out_features, computed, has_bias)
        elif isinstance(module, MixtureOfExperts):
            packed.update(each for each in (module.gate, module.up, module.down) if isinstance(each, ops.linear.Linear))
            width, size = module.router.in_features, module.spec.intermediate_size
            for part, inputs, outputs in (
                (module.gate, width, size),
                (module.up, width, size),
                (module.down, size, width),
            ):
                yield MatmulShape(inputs, outputs, dtype, module.spec.bias and not isinstance(part, ops.linear.Linear))
        elif isinstance(module, (LanguageHead, ClassificationHead)):
            if isinstance(module, LanguageHead) and module.output is not None:
                continue  # a Linear of its own
            head = model.token_embedding if module.weight is None else module.weight
            yield MatmulShape(head.shape[1], head.shape[0], dtype, module.bias is not None)
