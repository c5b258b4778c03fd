"""Models under policies that evict, summarize and read sparsely, compared with a simulation on lists of unrotated keys.

The simulation takes one token at a time and has no blocks or chunks. In float64 the engine's logits are equal to 1e-10,
for rotations and for position biases, for keys rotated at writing and at reading, and for all chunk sizes.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from kvad.cache.config import CacheConfig
from kvad.cache.device.kv_cache import KVCache
from kvad.cache.policy import HeavyHitters
from kvad.engine.engine import Engine
from kvad.engine.scheduling.request import SamplingParams
from kvad.model.transformer import Transformer
from kvad.model_input import AttentionParams, ModelInput, Rotary, SubBatch
from kvad.ops.position_bias import position_bias
from tests.support.driver import Stream, drive
from tests.support.random_models import VOCAB, build, model_config

EXACT = 1e-10
ENCODINGS = ("rope", "rope-partial", "rope-yarn", "alibi", "t5", "none")
BUDGET, INTERVAL, RECENT, SINKS, WINDOW = 12, 8, 3, 2, 4
KV_HEADS, GROUP = 3, 2


@dataclass(eq=False)
class Item:
    """A token or a summary; its key is rotated to ``angle``, and a bias depends on ``position``."""

    key: Tensor
    value: Tensor
    angle: float
    position: int
    weight: float = 0.0
    received: dict[int, float] = field(default_factory=dict)  # attention by position of the query

    def mass(self, first_query: int = 0) -> float:
        return sum(weight for query, weight in self.received.items() if query >= first_query)


def rotate(x: Tensor, angle: float, rotary: Rotary) -> Tensor:
    """Rotate x [D] to a position, as complex numbers."""
    half = rotary.inv_freq.shape[-1]
    head, rest = x[: 2 * half], x[2 * half :]
    pairs = head.view(half, 2) if rotary.interleaved else head.view(2, half).T
    angles = angle * rotary.inv_freq.double()
    rotated = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.full_like(angles, rotary.factor), angles)
    real = torch.view_as_real(rotated)
    return torch.cat((real.flatten() if rotary.interleaved else real.T.flatten(), rest))


class SimulatedCache:
    """Cache of one sequence, one token per step. Subclasses edit a head's items before a token is added."""

    def __init__(self, layers: int, rope_at: str) -> None:
        self.heads: list[list[list[Item]]] = [[[] for _ in range(KV_HEADS)] for _ in range(layers)]
        self.rope_at, self.num_edits = rope_at, 0
        self.weights: dict[tuple[int, int], list[list[float]]] = {}  # by layer and query head: of each query
        self.keys: dict[tuple[int, int], list[Tensor]] = {}  # by layer and kv head, rotated

    def open(self, step: ModelInput) -> list[SimulatedView]:
        assert len(step.token_ids) == 1
        return [SimulatedView(self, layer, int(step.positions[0])) for layer in range(len(self.heads))]

    def edit(self, items: list[Item], length: int) -> list[Item]:
        return items

    def reads(self, queries: list[Tensor], keys: list[Tensor]) -> list[bool]:
        """Return which keys the query heads of a group read."""
        return [True] * len(keys)

    @torch.inference_mode()
    def run(self, model: Transformer, tokens: list[int]) -> list[Tensor]:
        """Return the logits of each token."""
        logits = []
        for position, token in enumerate(tokens):
            step = ModelInput(torch.tensor([token]), torch.tensor([position]), (SubBatch(1, 1, 1),), torch.tensor([0]))
            logits.append(model.logits(model(step, self), step.logit_indices)[0])  # type: ignore[arg-type]
        return logits


class SimulatedView:
    def __init__(self, cache: SimulatedCache, layer: int, position: int) -> None:
        self.cache, self.layer, self.position = cache, layer, position

    def attend(self, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        heads, position, out = self.cache.heads[self.layer], self.position, []
        for head, held in enumerate(heads):
            items = heads[head] = self.cache.edit(held, position)
            items.append(Item(k[0, head], v[0, head], position, position))
            positions = torch.tensor([[item.position for item in items]])
            rotary = params.rotary
            keys = [item.key if rotary is None else rotate(item.key, item.angle, rotary) for item in items]
            self.cache.keys[self.layer, head] = keys
            group = q[0, head * GROUP : (head + 1) * GROUP]
            queries = [query if rotary is None else rotate(query, position, rotary) for query in group]
            read = torch.tensor(self.cache.reads(queries, keys))
            for index, query in enumerate(queries, head * GROUP):
                logits = torch.stack([query @ key for key in keys]) * params.scale
                if params.bias is not None:
                    logits = logits + position_bias(params.bias, torch.tensor([[position]]), positions)[0, index, 0]
                logits = logits + torch.tensor([item.weight for item in items], dtype=torch.float64)
                weights = logits.masked_fill(~read, -math.inf).softmax(-1)
                self.cache.weights.setdefault((self.layer, index), []).append(weights.tolist())
                for item, weight in zip(items, weights.tolist(), strict=True):
                    item.received[position] = item.received.get(position, 0.0) + weight
                out.append(weights @ torch.stack([item.value for item in items]))
        return torch.stack(out).unsqueeze(0)


class SimulatedEviction(SimulatedCache):
    """Every INTERVAL tokens, if there are more than BUDGET: sinks, recent ones and those of most attention stay."""

    policy = f"heavy-hitters({BUDGET}, interval={INTERVAL}, recent={RECENT}, num_sinks={SINKS})"

    def edit(self, items: list[Item], length: int) -> list[Item]:
        if length <= BUDGET or length % INTERVAL:
            return items
        self.num_edits += 1
        always = [item for item in items if item.position < SINKS or item.position >= length - RECENT]
        others = sorted((item for item in items if item not in always), key=lambda item: -item.mass())
        return sorted([*always, *others[: BUDGET - len(always)]], key=lambda item: item.position)


class SimulatedSnapKV(SimulatedCache):
    """Every INTERVAL tokens: the last WINDOW ones stay, and those that these attended to, averaged over 3 neighbors."""

    policy = f"snapkv({BUDGET}, interval={INTERVAL}, window={WINDOW}, kernel=3)"

    def edit(self, items: list[Item], length: int) -> list[Item]:
        if length <= BUDGET or length % INTERVAL:
            return items
        self.num_edits += 1
        older, mass = items[:-WINDOW], [item.mass(length - WINDOW) for item in items[:-WINDOW]]
        scores = [sum(mass[max(0, index - 1) : index + 2]) / 3 for index in range(len(mass))]
        order = sorted(range(len(older)), key=lambda index: -scores[index])[: BUDGET - WINDOW]
        return [*(older[index] for index in sorted(order)), *items[-WINDOW:]]


class SimulatedTOVA(SimulatedCache):
    """Every INTERVAL tokens: the last one stays, and those that it attended to most, over all heads."""

    policy = f"tova({BUDGET}, interval={INTERVAL})"

    def edit(self, items: list[Item], length: int) -> list[Item]:
        if length <= BUDGET or length % INTERVAL:
            return items
        self.num_edits += 1
        heads = next(heads for heads in self.heads if any(held is items for held in heads))
        if items is heads[0]:  # all heads of the layer have the same tokens
            scores = [sum(held[index].mass(length - 1) for held in heads) for index in range(len(items) - 1)]
            self.order = sorted(sorted(range(len(scores)), key=lambda index: -scores[index])[: BUDGET - 1])
        return [*(items[index] for index in self.order), items[-1]]


class SimulatedSummaries(SimulatedCache):
    """Every 8 tokens, those before the last 8 but the first 4 are merged by fours; at most 4 blocks of summaries."""

    policy = "tiered(8, quantized=0, interval=8, summaries=16, ratio=4, num_sinks=4)"

    def edit(self, items: list[Item], length: int) -> list[Item]:
        older = [item for item in items if not item.weight and 4 <= item.position < length - 8]
        if length % 8 or not older:
            return items
        self.num_edits += 1
        summaries = [item for item in items if item.weight]
        for start in range(0, len(older), 4):
            merged = older[start : start + 4]
            mean = sum(item.position for item in merged) / 4
            key, value = (torch.stack([getattr(item, name) for item in merged]).mean(0) for name in ("key", "value"))
            angle = mean if self.rope_at == "write" else math.floor(mean)
            summaries.append(Item(key, value, angle, math.floor(mean), math.log(4)))
        num_excess = max(0, -(-len(summaries) // 4) - 16 // 4)
        return [*summaries[num_excess * 4 :], *(item for item in items if not item.weight and item not in older)]


class SimulatedQuest(SimulatedCache):
    """A query reads its own block of 4 and the two whose keys allow the largest q.k of any head of its group."""

    policy = f"quest({BUDGET})"

    def reads(self, queries: list[Tensor], keys: list[Tensor]) -> list[bool]:
        blocks = [torch.stack(keys[start : start + 4]) for start in range(0, len(keys), 4)]
        pairs = [(block.amin(0), block.amax(0)) for block in blocks[:-1]]
        bounds = [max(float(torch.maximum(q * low, q * high).sum()) for q in queries) for low, high in pairs]
        best = sorted(range(len(bounds)), key=lambda block: -bounds[block])[: BUDGET // 4 - 1]
        self.num_edits += len(best) < len(bounds)
        return [index // 4 in (*best, len(bounds)) for index in range(len(keys))]


def text(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB) for _ in range(length)]


STREAM = Stream(text(41, 0), [text(50, 1)])


def difference(
    kind: type[SimulatedCache], position: str, rope_at: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> float:
    """Return max |dlogit| between the engine, with angles in float64, and the simulation."""
    model = build(model_config(position, "pre", "gqa"))
    simulated = kind(2, rope_at)
    expected = simulated.run(model, STREAM.tokens())
    assert simulated.num_edits >= 5 * KV_HEADS * 2, "the policy hardly applied"
    sizes = {"block_size": 4, "max_num_seqs": 1, "max_seq_len": 96, "prefill_chunk_size": chunk}
    cache = CacheConfig(dtype="float64", policy=kind.policy, rope_at=rope_at, **sizes)  # type: ignore[attr-defined]
    init = KVCache.__init__
    exact = {"exact_rope": True}
    monkeypatch.setattr(KVCache, "__init__", lambda self, groups, **options: init(self, groups, **(options | exact)))
    logits = drive(model, cache, [STREAM]).logits[0, 0]
    assert len(logits) == 50
    return max((each - expected[at]).abs().max().item() for at, each in logits.items())


@pytest.mark.parametrize("kind", [SimulatedEviction, SimulatedSummaries])
@pytest.mark.parametrize(
    ("position", "rope_at"),
    [(name, "write") for name in ENCODINGS] + [("rope", "read"), ("rope-yarn", "read"), ("t5", "read")],
)
def test_a_model_equals_the_simulation(kind, position, rope_at, monkeypatch):
    assert difference(kind, position, rope_at, 64 if rope_at == "write" else 7, monkeypatch) <= EXACT


@pytest.mark.parametrize("kind", [SimulatedSnapKV, SimulatedTOVA])
@pytest.mark.parametrize("chunk", [64, 7])
def test_every_eviction_scores_the_latest_queries_only(kind, chunk, monkeypatch):
    assert difference(kind, "rope", "write", chunk, monkeypatch) <= EXACT


@pytest.mark.parametrize(("position", "chunk"), [("rope", 64), ("rope", 7), ("alibi", 7)])
def test_a_query_reads_the_blocks_of_the_definition(position, chunk, monkeypatch):
    assert difference(SimulatedQuest, position, "write", chunk, monkeypatch) <= EXACT


def test_reading_the_blocks_of_the_lowest_bounds_differs(monkeypatch):
    monkeypatch.setattr("kvad.cache.device.quest.round_mantissa", lambda x, bits: -x)
    assert difference(SimulatedQuest, "rope", "write", 64, monkeypatch) > 1e-3


def test_attention_observed_before_an_earlier_eviction_differs(monkeypatch):
    monkeypatch.setattr(Tensor, "zero_", lambda self: self)
    assert difference(SimulatedSnapKV, "rope", "write", 64, monkeypatch) > 1e-3


def test_a_mean_of_rotated_keys_differs(monkeypatch):
    monkeypatch.setattr("kvad.ops.rotary.rotate_blocks", lambda keys, positions, rotary, factor: keys)
    assert difference(SimulatedSummaries, "rope", "write", 64, monkeypatch) > 1e-3


def test_an_eviction_by_other_scores_differs(monkeypatch):
    real = HeavyHitters.score
    monkeypatch.setattr(HeavyHitters, "score", lambda self, context: -real(self, context))
    assert difference(SimulatedEviction, "rope", "write", 64, monkeypatch) > 1e-3


# ---------------------------------------------------------------- the first eviction of a run

LENGTH = 24


def weights_of(cache: SimulatedCache, layer: int, head: int) -> Tensor:
    """Return the weights [L, L] of each query, summed over the query heads of a kv head."""
    rows = torch.zeros(LENGTH, LENGTH, dtype=torch.float64)
    for query_head in range(head * GROUP, (head + 1) * GROUP):
        for query, weights in enumerate(cache.weights[layer, query_head]):
            rows[query, : len(weights)] += torch.tensor(weights, dtype=torch.float64)
    return rows


def retained_by_definition(policy: str, cache: SimulatedCache, layer: int, head: int) -> list[int]:
    """Return the 10 of 24 positions that stay, as the papers define it."""
    name, weights = policy.partition("(")[0], weights_of(cache, layer, head)
    scores, num_recent = [0.0] * LENGTH, 0
    if name == "heavy-hitters":  # Zhang et al.: all attention that a token received; half of the budget is recent
        scores, num_recent = weights.sum(0).tolist(), 5
    elif name == "snapkv":  # Li et al.: the last 4 queries, averaged over 3 neighbors; these 4 stay
        mass = weights[-4:].sum(0)[:-4].tolist()
        scores, num_recent = [sum(mass[max(0, key - 1) : key + 2]) / 3 for key in range(LENGTH - 4)] + [0.0] * 4, 4
    elif name == "tova":  # Oren et al.: the last query, over all heads of the layer
        scores = sum(weights_of(cache, layer, each)[-1] for each in range(KV_HEADS)).tolist()  # type: ignore[union-attr]
        num_recent = 1
    elif name == "key-norm":  # Devoto et al.: short keys
        scores = [-float(key.norm()) for key in cache.keys[layer, head]]
    order = sorted(range(LENGTH), key=lambda key: (key < LENGTH - num_recent, -scores[key]))
    return sorted(order[:10])


@pytest.mark.parametrize("chunk", [5, 64])
@pytest.mark.parametrize("position", ["rope", "t5"])
@pytest.mark.parametrize(
    "policy",
    [
        "heavy-hitters(10, interval=24)",
        "snapkv(10, interval=24, window=4, kernel=3)",
        "tova(10, interval=24)",
        "key-norm(10, interval=24, recent=0)",
    ],
)
def test_the_first_eviction_of_a_run_follows_the_definition(policy, position, chunk):
    model, tokens = build(model_config(position, "pre", "gqa")), text(LENGTH + 1, 5)
    simulated = SimulatedCache(2, "write")
    simulated.run(model, tokens[:LENGTH])
    sizes = {"block_size": 4, "max_num_seqs": 1, "max_seq_len": 96, "prefill_chunk_size": chunk}
    engine = Engine(model, CacheConfig(dtype="float64", policy=policy, **sizes))
    engine.add_request(tokens, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    manager = engine.kv_cache_manager
    while manager.stats().used[0] == 0 or manager.seq_len(0) <= LENGTH:
        engine.step()
    blocks = manager._sequence(0).groups[0].blocks
    for layer in range(2):
        for head in range(KV_HEADS):
            held = engine.kv_cache.head_metadata[layer].positions[blocks, head].flatten().tolist()
            assert held[:10] == retained_by_definition(policy, simulated, layer, head), (layer, head)
            assert held[10] == LENGTH  # The next token is behind them.
