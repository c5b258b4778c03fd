"""What a forward pass costs, from shapes alone: floating point operations and bytes, with a cache and without one.

A product of [m, k] and [k, n] is 2 m k n operations.  Attention is counted as the rectangle that is computed, new
tokens x slots, and not as the triangle that is visible: so counts torch's own counter (the test holds them together),
and so does document 004, section 4.7.  Norms, rotations, softmax and activations are not products and are left out.
Of experts each token's active ones are counted, and as many matrices as the tokens can choose.

An encoder-decoder's source is read by the encoder and made into keys and values once with a cache, and again for every
token by recomputation.

Bytes: every weight matrix once per pass, and the keys and values that are written and read.  Activations are left out.

Over N tokens from an opening token, recomputation costs (2N + 1) / 3 times the attention (the sum of t^2 over the sum
of t) and (N + 1) / 2 times the projections (the sum of t over N) of a cache: 4.7's 2N / 3 and N / 2.

A training step costs three times its forward pass: each product has two more in the backward pass, one for what it was
given and one for its weights.  This is the convention of PaLM (Chowdhery et al. 2022, appendix B), 6 N + 12 L H Q T per
token, with every product counted: what is computed again (``train.recompute``) and what scheduled sampling reads first
are not the model's and are left out; so are the products of adapters, beside which frozen weights have one more only.

Nothing here imports torch.
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
    """``projections``: of embeddings, q, k, v, out and MLPs; ``attention``: q.k and weights.v; ``head``: the answers.
    All in FLOPs.  ``weights``, ``written`` and ``read`` (keys and values): bytes."""

    projections: int = 0
    attention: int = 0
    head: int = 0
    weights: int = 0
    bytes_written: int = 0
    bytes_read: int = 0

    @property
    def flops(self) -> int:
        return self.projections + self.attention + self.head

    @property
    def bytes(self) -> int:
        return self.weights + self.bytes_written + self.bytes_read

    def add(self, other: Cost) -> Cost:
        return Cost(*(a + b for a, b in zip(self, other, strict=True)))


class Gain(NamedTuple):
    """How many times more a recomputation costs than a cache."""

    attention: float
    projections: float


def uncached_pass(config: ModelConfig, length: int, *, source: int = 0, element: int = 4) -> Cost:
    """All ``length`` tokens of a row at once, with logits for the last: one token's worth of recomputation.

    ``source``: tokens that an encoder-decoder's encoder reads first.  An encoder alone reads ``length``, and its head
    answers for all of them, or for the row.  ``element``: bytes per number.  A window is a mask here: it saves nothing.
    """
    if config.decoder is None:
        return encoder_pass(config, length, element=element)
    read = encoder_pass(config, source, element=element) if source else Cost()
    return read.add(_decoder_pass(config, length, [length] * config.decoder.num_layers, source, element, element))


def cached_pass(
    config: ModelConfig, new: int, length: int, *, source: int = 0, element: int = 4, stored: float | None = None
) -> Cost:
    """The last ``new`` tokens of a row that is ``length`` tokens long after them, with logits for the last; its
    ``source`` has been read.

    ``stored``: bytes per number in the cache.  A layer with a window reads its last ``window + new - 1`` tokens.
    """
    own = [mixer for mixer in attention_specs(config) if not mixer.is_cross_attention]
    slots = [length if mixer.window is None else min(length, mixer.window + new - 1) for mixer in own]
    return _decoder_pass(config, new, slots, source, element, element if stored is None else stored)


def encoder_pass(config: ModelConfig, length: int, *, element: int = 4, stored: float | None = None) -> Cost:
    """The encoder over a text of ``length`` tokens: its head, where it stands alone; else the keys and values that
    cross-attention will read, ``stored`` bytes per number."""
    cost, width = _encoder(config, length, element), encoder_hidden_size(config)
    if config.decoder is None:
        return cost.add(_answers(config, 1 if config.pools_sequence else length, element))
    for spec in (mixer for mixer in attention_specs(config) if mixer.is_cross_attention):
        values = spec.num_kv_heads * (spec.head_dim + spec.value_dim)
        written = round(length * values * (element if stored is None else stored))
        cost = cost.add(
            Cost(projections=2 * length * width * values, weights=width * values * element, bytes_written=written)
        )
    return cost


def training_pass(
    config: ModelConfig, rows: int, length: int, asked: int, *, source: int = 0, frozen: bool = False
) -> int:
    """FLOPs of the forward and the backward pass over ``rows`` rows of ``length`` tokens, as they lie in memory, beside
    sources of ``source`` tokens, with ``asked`` answers in all; ``frozen``: the weights are not trained."""
    row = Cost()
    if config.encoder is not None:
        row = row.add(_encoder(config, source if config.decoder is not None else length, 0))
    if config.decoder is not None:
        row = row.add(_decoder_layers(config, length, [length] * config.decoder.num_layers, source, 0, 0))
        for spec in (mixer for mixer in attention_specs(config) if mixer.is_cross_attention):
            values = spec.num_kv_heads * (spec.head_dim + spec.value_dim)
            row = row.add(Cost(projections=2 * source * encoder_hidden_size(config) * values))
    weighted = rows * row.projections + _answers(config, asked, 0).head
    return (2 if frozen else 3) * weighted + 3 * rows * row.attention


def generation_cost(
    config: ModelConfig, prompt: int, new: int, *, source: int = 0, element: int = 4, stored: float | None = None
) -> tuple[Cost, Cost]:
    """(with a cache, by recomputation): what it costs to generate ``new`` tokens after a prompt, greedily."""
    cached = [encoder_pass(config, source, element=element, stored=stored)] if source else []
    cached += [cached_pass(config, prompt, prompt, source=source, element=element, stored=stored)]
    cached += [cached_pass(config, 1, prompt + i, source=source, element=element, stored=stored) for i in range(1, new)]
    return _sum(cached), _sum(uncached_pass(config, prompt + i, source=source, element=element) for i in range(new))


def closed_form_flops(tokens: int) -> Gain:
    """Document 004, section 4.7, for ``tokens`` tokens from an opening token."""
    return Gain(2 * tokens / 3, tokens / 2)


def _sum(costs: Iterable[Cost]) -> Cost:
    total = Cost()
    for cost in costs:
        total = total.add(cost)
    return total


def _encoder(config: ModelConfig, length: int, element: int) -> Cost:
    """Its layers, over one text."""
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
    return _decoder_layers(config, new, slots, source, element, stored).add(_answers(config, 1, element))


def _decoder_layers(config: ModelConfig, new: int, slots: list[int], source: int, element: int, stored: float) -> Cost:
    assert config.decoder is not None, "an encoder generates nothing"
    assert bool(source) == (config.encoder is not None), "an encoder-decoder reads a source, and no other does"
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
    """From a table of another width to the model's."""
    matrix = 0 if embed.embedding_size is None else embed.embedding_size * width
    return Cost(projections=2 * new * matrix, weights=matrix * element)


def _layer(
    config: ModelConfig,
    mixer: AttentionConfig,
    width: int,
    own: int,
    new: int,
    seen: int,
    element: int,
    stored: float = 0,
) -> Cost:
    """One attention.  ``own``: the width that keys and values are made of; 0: none are made, they are read only."""
    dim, kv_heads = head_dim(config, mixer), mixer.num_kv_heads or mixer.num_heads
    value_dim = mixer.value_dim or dim
    values = kv_heads * (dim + value_dim)
    matrices = width * mixer.num_heads * (dim + value_dim) + own * values
    return Cost(
        projections=2 * new * matrices,
        attention=2 * new * seen * mixer.num_heads * (dim + value_dim),
        weights=matrices * element,
        bytes_written=round(new * values * stored) if own else 0,
        bytes_read=round(seen * values * stored),
    )


def _mlp(mlp: PlainMLPConfig | GatedMLPConfig | MoEConfig, width: int, new: int, element: int) -> Cost:
    one = (2 if isinstance(mlp, PlainMLPConfig) else 3) * width * mlp.intermediate_size
    if not isinstance(mlp, MoEConfig):
        return Cost(projections=2 * new * one, weights=one * element)
    router = width * mlp.num_experts
    chosen = min(mlp.num_experts, new * mlp.num_experts_per_token)
    return Cost(
        projections=2 * new * (mlp.num_experts_per_token * one + router), weights=(chosen * one + router) * element
    )


def _answers(config: ModelConfig, count: int, element: int) -> Cost:
    """The head, of ``count`` tokens or pooled rows."""
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
