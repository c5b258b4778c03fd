"""FLOPs and bytes of forward passes and training steps, with and without a cache, computed from shapes.

A product of [m, k] and [k, n] counts 2 m k n operations. Attention counts the computed rectangle, new tokens x slots,
not the visible triangle, like torch's counter (a test compares them) and document 004, section 4.7. Norms, rotations,
softmax and activations are omitted. Of experts, each token's active ones are counted, and as many matrices as the
tokens can choose.

An encoder-decoder's input is encoded and projected to keys and values once with a cache, and for every token by
recomputation.

Bytes: every weight matrix once per pass, and the keys and values that are written and read. Activations are omitted.

Over N tokens from an opening token, recomputation costs (2N + 1) / 3 times the attention (the sum of t^2 over the sum
of t) and (N + 1) / 2 times the projections (the sum of t over N) of a cache: 4.7's 2N / 3 and N / 2.

A training step costs three times its forward pass: each product has two more in the backward pass, for the gradients of
its input and of its weight. This is the convention of PaLM (Chowdhery et al. 2022, appendix B), 6 N + 12 L H Q T per
token, with every product counted. Omitted: activation checkpointing, the first pass of scheduled sampling, and the
products of adapters, with which frozen weights have one more product only.

No torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvad.config.layers import (
    AttentionConfig,
    ClassificationHeadConfig,
    EmbeddingConfig,
    GatedMLPConfig,
    MoEConfig,
    PlainMLPConfig,
    PoolingHeadConfig,
)
from kvad.config.model import ModelConfig, attention_specs, encoder_hidden_size, head_dim, head_input_size


class Cost(NamedTuple):
    """FLOPs and bytes of a pass."""

    projections: int = 0  # FLOPs of embeddings, q, k, v, out and MLPs
    attention: int = 0  # FLOPs of q.k and weights.v
    head: int = 0  # FLOPs of the head
    weights: int = 0  # bytes read
    bytes_written: int = 0  # keys and values
    bytes_read: int = 0  # keys and values

    @property
    def flops(self) -> int:
        return self.projections + self.attention + self.head

    @property
    def bytes(self) -> int:
        return self.weights + self.bytes_written + self.bytes_read

    def add(self, other: Cost) -> Cost:
        return Cost(*(a + b for a, b in zip(self, other, strict=True)))


class Gain(NamedTuple):
    """Ratio of the cost of recomputation to that of a cache."""

    attention: float
    projections: float


def uncached_pass(config: ModelConfig, length: int, *, source: int = 0, element: int = 4) -> Cost:
    """Return the cost of all ``length`` tokens at once, with logits of the last: one step of recomputation.

    An encoder alone reads ``length`` tokens, and its head is applied to all of them or to the pooled sequence. A window
    is a mask and saves nothing.

    Args:
        config: The model.
        length: Tokens of the sequence.
        source: Tokens of an encoder-decoder's encoder input.
        element: Bytes per number.
    """
    if config.decoder is None:
        return encoder_pass(config, length, element=element)
    read = encoder_pass(config, source, element=element) if source else Cost()
    return read.add(_decoder_pass(config, length, [length] * config.decoder.num_layers, source, element, element))


def cached_pass(
    config: ModelConfig, new: int, length: int, *, source: int = 0, element: int = 4, stored: float | None = None
) -> Cost:
    """Return the cost of the last ``new`` of ``length`` tokens, with logits of the last.

    The encoder's input has been encoded before. A layer with a window reads its last ``window + new - 1`` tokens.

    Args:
        config: The model.
        new: New tokens.
        length: Tokens of the sequence, new ones included.
        source: Tokens of an encoder-decoder's encoder input.
        element: Bytes per number.
        stored: Bytes per number in the cache, by default ``element``.
    """
    own = [spec for spec in attention_specs(config) if not spec.is_cross_attention]
    slots = [length if spec.window is None else min(length, spec.window + new - 1) for spec in own]
    return _decoder_pass(config, new, slots, source, element, element if stored is None else stored)


def encoder_pass(config: ModelConfig, length: int, *, element: int = 4, stored: float | None = None) -> Cost:
    """Return the cost of the encoder over ``length`` tokens.

    An encoder alone includes its head; otherwise the keys and values of cross-attention are included, with ``stored``
    bytes per number.
    """
    cost, width = _encoder(config, length, element), encoder_hidden_size(config)
    if config.decoder is None:
        return cost.add(_head_cost(config, 1 if config.pools_sequence else length, element))
    for spec in (spec for spec in attention_specs(config) if spec.is_cross_attention):
        values = spec.num_kv_heads * (spec.head_dim + spec.value_dim)
        written = round(length * values * (element if stored is None else stored))
        cost = cost.add(
            Cost(projections=2 * length * width * values, weights=width * values * element, bytes_written=written)
        )
    return cost


def training_pass(
    config: ModelConfig, rows: int, length: int, num_targets: int, *, source: int = 0, frozen: bool = False
) -> int:
    """Return the FLOPs of a forward and backward pass.

    Args:
        config: The model.
        rows: Rows of the batch.
        length: Tokens per row, padding included.
        num_targets: Targets in the whole batch.
        source: Tokens per row of the encoder input.
        frozen: The weights are not trained.
    """
    row = Cost()
    if config.encoder is not None:
        row = row.add(_encoder(config, source if config.decoder is not None else length, 0))
    if config.decoder is not None:
        row = row.add(_decoder_layers(config, length, [length] * config.decoder.num_layers, source, 0, 0))
        for spec in (spec for spec in attention_specs(config) if spec.is_cross_attention):
            values = spec.num_kv_heads * (spec.head_dim + spec.value_dim)
            row = row.add(Cost(projections=2 * source * encoder_hidden_size(config) * values))
    weighted = rows * row.projections + _head_cost(config, num_targets, 0).head
    return (2 if frozen else 3) * weighted + 3 * rows * row.attention


def generation_cost(
    config: ModelConfig, prompt: int, new: int, *, source: int = 0, element: int = 4, stored: float | None = None
) -> tuple[Cost, Cost]:
    """Return the costs (with a cache, by recomputation) of generating ``new`` tokens after a prompt."""
    cached = [encoder_pass(config, source, element=element, stored=stored)] if source else []
    cached += [cached_pass(config, prompt, prompt, source=source, element=element, stored=stored)]
    cached += [cached_pass(config, 1, prompt + i, source=source, element=element, stored=stored) for i in range(1, new)]
    return _sum(cached), _sum(uncached_pass(config, prompt + i, source=source, element=element) for i in range(new))


def closed_form_flops(tokens: int) -> Gain:
    """Return the ratios of document 004, section 4.7, for ``tokens`` tokens from an opening token."""
    return Gain(2 * tokens / 3, tokens / 2)


def _sum(costs: Iterable[Cost]) -> Cost:
    total = Cost()
    for cost in costs:
        total = total.add(cost)
    return total


def _encoder(config: ModelConfig, length: int, element: int) -> Cost:
    """Return the cost of the encoder's layers over one text."""
    assert config.encoder is not None, "this model has no encoder"
    width = encoder_hidden_size(config)
    cost = _projection(
        config.embedding if config.encoder_input is None else config.encoder_input.embedding, width, length, element
    )
    for index in range(config.encoder.num_layers):
        layer = config.encoder.layer_config(index)
        cost = cost.add(_layer(config, layer.attention, width, width, length, length, element))
        cost = cost.add(_mlp(layer.mlp, width, length, element))
    return cost


def _decoder_pass(config: ModelConfig, new: int, slots: list[int], source: int, element: int, stored: float) -> Cost:
    return _decoder_layers(config, new, slots, source, element, stored).add(_head_cost(config, 1, element))


def _decoder_layers(config: ModelConfig, new: int, slots: list[int], source: int, element: int, stored: float) -> Cost:
    assert config.decoder is not None, "this model has no decoder"
    assert bool(source) == (config.encoder is not None), "only an encoder-decoder reads a source"
    cost = _projection(config.embedding, config.hidden_size, new, element)
    for index, seen in enumerate(slots):
        layer = config.decoder.layer_config(index)
        cost = cost.add(
            _layer(config, layer.attention, config.hidden_size, config.hidden_size, new, seen, element, stored)
        )
        cost = cost.add(_mlp(layer.mlp, config.hidden_size, new, element))
        if layer.cross_attention is not None:
            cost = cost.add(_layer(config, layer.cross_attention, config.hidden_size, 0, new, source, element, stored))
    return cost


def _projection(embed: EmbeddingConfig, width: int, new: int, element: int) -> Cost:
    """Return the cost of projecting a token table to the hidden size."""
    matrix = 0 if embed.embedding_size is None else embed.embedding_size * width
    return Cost(projections=2 * new * matrix, weights=matrix * element)


def _layer(
    config: ModelConfig,
    spec: AttentionConfig,
    width: int,
    own: int,
    new: int,
    seen: int,
    element: int,
    stored: float = 0,
) -> Cost:
    """Return the cost of one attention; ``own`` is the input size of keys and values, 0 if they are only read."""
    dim, kv_heads = head_dim(config, spec), spec.num_kv_heads or spec.num_heads
    value_dim = spec.value_dim or dim
    values = kv_heads * (dim + value_dim)
    matrices = width * spec.num_heads * (dim + value_dim) + own * values
    return Cost(
        projections=2 * new * matrices,
        attention=2 * new * seen * spec.num_heads * (dim + value_dim),
        weights=matrices * element,
        bytes_written=round(new * values * stored) if own else 0,
        bytes_read=round(seen * values * stored),
    )


def _mlp(mlp: PlainMLPConfig | GatedMLPConfig | MoEConfig, width: int, new: int, element: int) -> Cost:
    expert = (2 if isinstance(mlp, PlainMLPConfig) else 3) * width * mlp.intermediate_size
    if not isinstance(mlp, MoEConfig):
        return Cost(projections=2 * new * expert, weights=expert * element)
    router = width * mlp.num_experts
    chosen = min(mlp.num_experts, new * mlp.num_experts_per_token)
    active = mlp.num_experts_per_token * expert + router
    return Cost(projections=2 * new * active, weights=(chosen * expert + router) * element)


def _head_cost(config: ModelConfig, count: int, element: int) -> Cost:
    """Return the cost of the head for ``count`` tokens or pooled sequences."""
    head, width = config.head, head_input_size(config)
    outputs = (
        0
        if isinstance(head, PoolingHeadConfig)
        else len(head.labels)
        if isinstance(head, ClassificationHeadConfig)
        else config.vocab_size
    )
    matrices = width * outputs + (0 if head.transform is None else config.hidden_size * width)
    return Cost(head=2 * count * matrices, weights=matrices * element)
