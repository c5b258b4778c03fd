"""FLOPs and bytes of forward passes and training steps, with and without a cache, computed from shapes.

A product of [m, k] and [k, n] counts 2 m k n operations. Attention counts the computed rectangle, new tokens x slots,
not the visible triangle, like torch's counter (a test compares them) and document 004, section 4.7. Norms, rotations,
softmax and activations are omitted. Of experts, each token's active ones are counted, and as many matrices as the
tokens can choose.

An encoder-decoder's input is encoded and projected to keys and values once with a cache, and for every token by
recomputation. Bytes: every weight matrix once per pass, and the keys and values that are written and read; activations
are omitted.

Over N tokens from an opening token, recomputation costs (2N + 1) / 3 times the attention (the sum of t^2 over the sum
of t) and (N + 1) / 2 times the projections (the sum of t over N) of a cache: 4.7's 2N / 3 and N / 2.

A training step costs three times its forward pass: each product has two more in the backward pass, for the gradients of
its input and of its weight. This is the convention of PaLM (Chowdhery et al. 2022, appendix B), 6 N + 12 L H Q T per
token, with every product counted. Omitted: activation checkpointing, the first pass of scheduled sampling, and the
products of adapters, with which frozen weights have one more product only.

In all functions, ``source`` is the number of tokens of an encoder-decoder's encoder input, ``element`` the bytes per
number, and ``stored`` the bytes per number in the cache, by default ``element``. No torch.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from kvad.config.layers import DisentangledConfig, LanguageHeadConfig, RecurrentMixer, TokenMixer
from kvad.config.model import ModelConfig, attention_dims, attention_specs, head_input_size, kv_size
from kvad.config.parameter_shapes import parameters

Part = Literal["encoder", "source", "decoder", "head"]  # source: keys and values of cross-attention


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


class Gain(NamedTuple):
    """Ratio of the cost of recomputation to that of a cache."""

    attention: float
    projections: float


def sum_costs(costs: Iterable[Cost]) -> Cost:
    """Add costs field by field."""
    return Cost(*map(sum, zip(Cost(), *costs, strict=True)))


def uncached_pass(config: ModelConfig, length: int, *, source: int = 0, element: int = 4) -> Cost:
    """Return the cost of all ``length`` tokens at once, with logits of the last: one step of recomputation.

    An encoder alone reads ``length`` tokens, and its head is applied to all of them or to the pooled sequence. A window
    is a mask and saves nothing.
    """
    if config.decoder is None:
        return encoder_pass(config, length, element=element)
    read = encoder_pass(config, source, element=element) if source else Cost()
    layers = _stack_cost(config, "decoder", length, source, element, element)
    return sum_costs([read, layers, _linear_cost(config, "head", 1, element)])


def cached_pass(
    config: ModelConfig, new: int, length: int, *, source: int = 0, element: int = 4, stored: float | None = None
) -> Cost:
    """Return the cost of the last ``new`` of ``length`` tokens, with logits of the last.

    The encoder's input has been encoded before. A layer with a window reads its last ``window + new - 1`` tokens.
    """
    own = [spec for spec in attention_specs(config) if not spec.is_cross_attention]
    slots = [length if spec.window is None else min(length, spec.window + new - 1) for spec in own]
    layers = _stack_cost(config, "decoder", new, source, element, element if stored is None else stored, slots)
    return sum_costs([layers, _linear_cost(config, "head", 1, element)])


def encoder_pass(config: ModelConfig, length: int, *, element: int = 4, stored: float | None = None) -> Cost:
    """Return the cost of the encoder over ``length`` tokens, with its head, or cross-attention's keys and values."""
    cost = _stack_cost(config, "encoder", length, 0, element, 0)
    if config.decoder is None:
        return sum_costs([cost, _linear_cost(config, "head", 1 if config.pools_sequence else length, element)])
    projected = _linear_cost(config, "source", length, element)
    size = element if stored is None else stored
    written = sum(round(length * spec.kv_size * size) for spec in attention_specs(config) if spec.is_cross_attention)
    return sum_costs([cost, projected, Cost(bytes_written=written)])


def training_pass(
    config: ModelConfig, rows: int, length: int, num_targets: int, *, source: int = 0, frozen: bool = False
) -> int:
    """Return the FLOPs of a forward and backward pass over ``rows`` of ``length`` tokens, padding included.

    ``num_targets`` counts the whole batch; ``frozen`` weights are not trained.
    """
    costs = []
    if config.encoder is not None:
        costs.append(_stack_cost(config, "encoder", length if config.decoder is None else source, 0, 0, 0))
    if config.decoder is not None:
        costs.append(_stack_cost(config, "decoder", length, source, 0, 0))
        costs.append(_linear_cost(config, "source", source, 0))
    row = sum_costs(costs)
    weighted = rows * row.projections + _linear_cost(config, "head", num_targets, 0).head
    return (2 if frozen else 3) * weighted + 3 * rows * row.attention


def generation_cost(
    config: ModelConfig, prompt: int, new: int, *, source: int = 0, element: int = 4, stored: float | None = None
) -> tuple[Cost, Cost]:
    """Return the costs (with a cache, by recomputation) of generating ``new`` tokens after a prompt."""
    cached = [encoder_pass(config, source, element=element, stored=stored)] if source else []
    cached += [cached_pass(config, prompt, prompt, source=source, element=element, stored=stored)]
    cached += [cached_pass(config, 1, prompt + i, source=source, element=element, stored=stored) for i in range(1, new)]
    recomputed = [uncached_pass(config, prompt + i, source=source, element=element) for i in range(new)]
    return sum_costs(cached), sum_costs(recomputed)


def closed_form_flops(tokens: int) -> Gain:
    """Return the ratios of document 004, section 4.7, for ``tokens`` tokens from an opening token."""
    return Gain(2 * tokens / 3, tokens / 2)


def _stack_cost(
    config: ModelConfig, part: Part, new: int, source: int, element: int, stored: float, slots: Sequence[int] = ()
) -> Cost:
    """Return the cost of a stack for ``new`` tokens; each layer reads its ``slots``, by default the new tokens."""
    stack = config.encoder if part == "encoder" else config.decoder
    assert stack is not None, f"this model has no {part}"
    assert bool(source) == (config.kind == "encoder-decoder" and part == "decoder"), "only a decoder reads a source"
    costs = [_linear_cost(config, part, new, element)]
    for layer, num_read in zip(stack.layer_configs, slots or [new] * stack.num_layers, strict=True):
        written = round(new * kv_size(config, layer.attention) * stored)
        costs += [_attention_cost(config, layer.attention, new, num_read, stored), Cost(bytes_written=written)]
        if layer.cross_attention is not None:
            costs.append(_attention_cost(config, layer.cross_attention, new, source, stored))
    return sum_costs(costs)


def _attention_cost(config: ModelConfig, attention: TokenMixer, new: int, num_read: int, stored: float) -> Cost:
    dims = attention_dims(config, attention)
    numbers = dims.num_heads * (dims.head_dim + dims.value_dim)  # of a token's queries and outputs
    read = round(num_read * kv_size(config, attention) * stored)
    if isinstance(attention, RecurrentMixer):
        state = attention.state_sizes(config.hidden_size).snapshot  # S^T k, its change, and S^T q for each token
        operations = 2 * new * (attention.kernel_size * dims.head_dim + 3 * state)
        return Cost(attention=operations, bytes_read=read + round(state * stored))
    cost = Cost(attention=2 * new * num_read * numbers, bytes_read=read)
    if isinstance(attention.position, DisentangledConfig):  # the table is projected, and multiplied by q or k
        position, width = attention.position, dims.num_heads * dims.head_dim
        table = 2 * position.span * width * (position.content_to_position + position.position_to_content)
        cost = sum_costs([cost, Cost(projections=2 * table * config.hidden_size, attention=2 * table * new)])
    return cost


class _ConfigKey:
    """A config as the key of a cache, by identity: its mappings cannot be hashed."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def __hash__(self) -> int:
        return id(self.config)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ConfigKey) and self.config is other.config


@functools.lru_cache(maxsize=16)
def _linear_sizes(key: _ConfigKey) -> Mapping[tuple[Part, int, int], int]:
    """Return the numbers in linear weights, of one expert, by (part, experts, active experts per token)."""
    config, sizes = key.config, Counter[tuple[Part, int, int]]()
    for parameter in parameters(config):
        if parameter.is_matrix:
            active = parameter.experts_per_token
            num_experts = parameter.shape[0] if active else 1
            owner = _part_of(config, parameter.name)
            size = math.prod(parameter.shape) // num_experts
            sizes[owner, num_experts, active or 1] += size * _num_uses(config, parameter.name)
    if config.tie_embeddings and isinstance(config.head, LanguageHeadConfig):
        sizes["head", 1, 1] += config.vocab_size * head_input_size(config)
    return sizes


def _num_uses(config: ModelConfig, name: str) -> int:
    """Return the number of layers that use a matrix: several, if layers share their parameters."""
    stack, pieces = config.encoder, name.split(".")
    if stack is None or stack.num_distinct_layers is None or pieces[:2] != ["encoder", "layers"]:
        return 1
    return sum(stack.parameter_index(index) == int(pieces[2]) for index in range(stack.num_layers))


def _linear_cost(config: ModelConfig, part: Part, tokens: int, element: int) -> Cost:
    """Return the cost of a part's linear layers for ``tokens`` tokens."""
    used_per_token = num_read = 0
    for (owner, num_experts, active), size in _linear_sizes(_ConfigKey(config)).items():
        if owner == part:
            used_per_token += size * active
            num_read += size * min(num_experts, tokens * active)
    if part == "head":
        return Cost(head=2 * tokens * used_per_token, weights=used_per_token * element)
    return Cost(projections=2 * tokens * used_per_token, weights=num_read * element)


def _part_of(config: ModelConfig, name: str) -> Part:
    root = name.partition(".")[0]
    if root == "head":
        return "head"
    if ".cross_attention.k." in name or ".cross_attention.v." in name:
        return "source"
    return "encoder" if root in ("encoder", "encoder_embedding") or config.decoder is None else "decoder"
