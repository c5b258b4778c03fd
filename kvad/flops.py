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

from kvad.config import (
    Attention,
    Classes,
    Embedding,
    Experts,
    Gated,
    ModelConfig,
    Plain,
    Pooled,
    head_dim,
    head_width,
    mixers,
    source_width,
)

__all__ = ["Cost", "Gain", "cached_pass", "encoder_pass", "formula", "fresh_pass", "generation", "training_pass"]


class Cost(NamedTuple):
    """``projections``: of embeddings, q, k, v, out and MLPs; ``attention``: q.k and weights.v; ``head``: the answers.
    All in FLOPs.  ``weights``, ``written`` and ``read`` (keys and values): bytes."""

    projections: int = 0
    attention: int = 0
    head: int = 0
    weights: int = 0
    written: int = 0
    read: int = 0

    @property
    def flops(self) -> int:
        return self.projections + self.attention + self.head

    @property
    def bytes(self) -> int:
        return self.weights + self.written + self.read

    def plus(self, other: Cost) -> Cost:
        return Cost(*(a + b for a, b in zip(self, other, strict=True)))


class Gain(NamedTuple):
    """How many times more a recomputation costs than a cache."""

    attention: float
    projections: float


def fresh_pass(config: ModelConfig, length: int, *, source: int = 0, element: int = 4) -> Cost:
    """All ``length`` tokens of a row at once, with logits for the last: one token's worth of recomputation.

    ``source``: tokens that an encoder-decoder's encoder reads first.  An encoder alone reads ``length``, and its head
    answers for all of them, or for the row.  ``element``: bytes per number.  A window is a mask here: it saves nothing.
    """
    if config.decoder is None:
        return encoder_pass(config, length, element=element)
    read = encoder_pass(config, source, element=element) if source else Cost()
    return read.plus(_decoder_pass(config, length, [length] * config.decoder.layers, source, element, element))


def cached_pass(
    config: ModelConfig, new: int, length: int, *, source: int = 0, element: int = 4, stored: float | None = None
) -> Cost:
    """The last ``new`` tokens of a row that is ``length`` tokens long after them, with logits for the last; its
    ``source`` has been read.

    ``stored``: bytes per number in the cache.  A layer with a window reads its last ``window + new - 1`` tokens.
    """
    own = [mixer for mixer in mixers(config) if not mixer.cross]
    slots = [length if mixer.window is None else min(length, mixer.window + new - 1) for mixer in own]
    return _decoder_pass(config, new, slots, source, element, element if stored is None else stored)


def encoder_pass(config: ModelConfig, length: int, *, element: int = 4, stored: float | None = None) -> Cost:
    """The encoder over a text of ``length`` tokens: its head, where it stands alone; else the keys and values that
    cross-attention will read, ``stored`` bytes per number."""
    cost, width = _encoder(config, length, element), source_width(config)
    if config.decoder is None:
        return cost.plus(_answers(config, 1 if config.per_row else length, element))
    for spec in (mixer for mixer in mixers(config) if mixer.cross):
        values = spec.kv_heads * (spec.head_dim + spec.value_dim)
        written = round(length * values * (element if stored is None else stored))
        cost = cost.plus(
            Cost(projections=2 * length * width * values, weights=width * values * element, written=written)
        )
    return cost


def training_pass(
    config: ModelConfig, rows: int, length: int, asked: int, *, source: int = 0, frozen: bool = False
) -> int:
    """FLOPs of the forward and the backward pass over ``rows`` rows of ``length`` tokens, as they lie in memory, beside
    sources of ``source`` tokens, with ``asked`` answers in all; ``frozen``: the weights are not trained."""
    row = Cost()
    if config.encoder is not None:
        row = row.plus(_encoder(config, source if config.decoder is not None else length, 0))
    if config.decoder is not None:
        row = row.plus(_decoder_layers(config, length, [length] * config.decoder.layers, source, 0, 0))
        for spec in (mixer for mixer in mixers(config) if mixer.cross):
            values = spec.kv_heads * (spec.head_dim + spec.value_dim)
            row = row.plus(Cost(projections=2 * source * source_width(config) * values))
    weighted = rows * row.projections + _answers(config, asked, 0).head
    return (2 if frozen else 3) * weighted + 3 * rows * row.attention


def generation(
    config: ModelConfig, prompt: int, new: int, *, source: int = 0, element: int = 4, stored: float | None = None
) -> tuple[Cost, Cost]:
    """(with a cache, by recomputation): what it costs to generate ``new`` tokens after a prompt, greedily."""
    cached = [encoder_pass(config, source, element=element, stored=stored)] if source else []
    cached += [cached_pass(config, prompt, prompt, source=source, element=element, stored=stored)]
    cached += [cached_pass(config, 1, prompt + i, source=source, element=element, stored=stored) for i in range(1, new)]
    return _sum(cached), _sum(fresh_pass(config, prompt + i, source=source, element=element) for i in range(new))


def formula(tokens: int) -> Gain:
    """Document 004, section 4.7, for ``tokens`` tokens from an opening token."""
    return Gain(2 * tokens / 3, tokens / 2)


def _sum(costs: Iterable[Cost]) -> Cost:
    total = Cost()
    for cost in costs:
        total = total.plus(cost)
    return total


def _encoder(config: ModelConfig, length: int, element: int) -> Cost:
    """Its layers, over one text."""
    assert config.encoder is not None, "this model has no encoder"
    width = source_width(config)
    cost = _projection(config.embed if config.source is None else config.source.embed, width, length, element)
    for index in range(config.encoder.layers):
        layer = config.encoder.layer(index)
        cost = cost.plus(_layer(config, layer.mixer, width, width, length, length, element))
        cost = cost.plus(_mlp(layer.mlp, width, length, element))
    return cost


def _decoder_pass(config: ModelConfig, new: int, slots: list[int], source: int, element: int, stored: float) -> Cost:
    return _decoder_layers(config, new, slots, source, element, stored).plus(_answers(config, 1, element))


def _decoder_layers(config: ModelConfig, new: int, slots: list[int], source: int, element: int, stored: float) -> Cost:
    assert config.decoder is not None, "an encoder generates nothing"
    assert bool(source) == (config.encoder is not None), "an encoder-decoder reads a source, and no other does"
    cost = _projection(config.embed, config.width, new, element)
    for index, seen in enumerate(slots):
        layer = config.decoder.layer(index)
        cost = cost.plus(_layer(config, layer.mixer, config.width, config.width, new, seen, element, stored))
        cost = cost.plus(_mlp(layer.mlp, config.width, new, element))
        if layer.cross is not None:
            cost = cost.plus(_layer(config, layer.cross, config.width, 0, new, source, element, stored))
    return cost


def _projection(embed: Embedding, width: int, new: int, element: int) -> Cost:
    """From a table of another width to the model's."""
    matrix = 0 if embed.width is None else embed.width * width
    return Cost(projections=2 * new * matrix, weights=matrix * element)


def _layer(
    config: ModelConfig, mixer: Attention, width: int, own: int, new: int, seen: int, element: int, stored: float = 0
) -> Cost:
    """One attention.  ``own``: the width that keys and values are made of; 0: none are made, they are read only."""
    dim, kv_heads = head_dim(config, mixer), mixer.kv_heads or mixer.heads
    value_dim = mixer.value_dim or dim
    values = kv_heads * (dim + value_dim)
    matrices = width * mixer.heads * (dim + value_dim) + own * values
    return Cost(
        projections=2 * new * matrices,
        attention=2 * new * seen * mixer.heads * (dim + value_dim),
        weights=matrices * element,
        written=round(new * values * stored) if own else 0,
        read=round(seen * values * stored),
    )


def _mlp(mlp: Plain | Gated | Experts, width: int, new: int, element: int) -> Cost:
    one = (2 if isinstance(mlp, Plain) else 3) * width * mlp.hidden
    if not isinstance(mlp, Experts):
        return Cost(projections=2 * new * one, weights=one * element)
    router = width * mlp.count
    chosen = min(mlp.count, new * mlp.active)
    return Cost(projections=2 * new * (mlp.active * one + router), weights=(chosen * one + router) * element)


def _answers(config: ModelConfig, count: int, element: int) -> Cost:
    """The head, of ``count`` tokens or pooled rows."""
    head, width = config.head, head_width(config)
    outputs = 0 if isinstance(head, Pooled) else len(head.labels) if isinstance(head, Classes) else config.vocab
    matrices = width * outputs + (0 if head.transform is None else config.width * width)
    return Cost(head=2 * count * matrices, weights=matrices * element)
