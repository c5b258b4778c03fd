"""Whole models under policies that drop and summarise, against a simulation by hand.

One token at a time, plain lists of unrotated keys, no blocks and no cuts of chunks: what each head holds, what a cut
leaves of it, what a summary is.  In float64 the engine's logits are the same to 1e-10, for rotations and for biases by
distance, whichever way keys are rotated and whatever the chunks.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvad.cache.config import CacheConfig
from kvad.cache.device.kv_cache import KVCache
from kvad.engine.engine import Engine
from kvad.engine.scheduling.request import SamplingParams
from kvad.model.transformer import Transformer
from kvad.model_input import AttentionParams, ModelInput, Rotary, SubBatch
from kvad.ops.attention import position_bias
from tests.support.driver import Stream, drive
from tests.support.random_models import VOCAB, build, model_config

EXACT = 1e-10
ENCODINGS = ("rope", "rope-partial", "alibi", "t5", "none")
BUDGET, EVERY, RECENT, SINKS = 12, 8, 3, 2


@dataclass(eq=False)
class Item:
    """A token, or what stands for several: ``at`` where its key is turned to, ``place`` as a bias counts it."""

    key: Tensor
    value: Tensor
    at: float
    place: int
    weight: float = 0.0
    mass: float = 0.0


def turned(x: Tensor, at: float, rotary: Rotary) -> Tensor:
    """x [D] by so many positions, as complex numbers."""
    half = rotary.inv_freq.shape[-1]
    head, rest = x[: 2 * half], x[2 * half :]
    pairs = head.view(half, 2) if rotary.interleaved else head.view(2, half).T
    angle = at * rotary.inv_freq.double()
    around = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle)
    back = torch.view_as_real(around)
    return torch.cat((back.flatten() if rotary.interleaved else back.T.flatten(), rest))


class ByHand:
    """A memory of one row, one token per step.  Subclasses say what happens to a head before a token comes."""

    def __init__(self, layers: int, kv_heads: int, rotate: str) -> None:
        self.heads: list[list[list[Item]]] = [[[] for _ in range(kv_heads)] for _ in range(layers)]
        self.rotate, self.edits = rotate, 0
        self.shares: dict[tuple[int, int], list[list[float]]] = {}  # by layer and query head: each query's weights
        self.keys: dict[tuple[int, int], list[Tensor]] = {}  # by layer and kv head, turned

    def open(self, step: ModelInput) -> list[HandView]:
        assert len(step.token_ids) == 1
        return [HandView(self, layer, int(step.positions[0])) for layer in range(len(self.heads))]

    def edited(self, items: list[Item], now: int) -> list[Item]:
        raise NotImplementedError


class HandView:
    def __init__(self, memory: ByHand, layer: int, now: int) -> None:
        self.memory, self.layer, self.now = memory, layer, now

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, score: AttentionParams) -> Tensor:
        assert k is not None and v is not None
        heads, now = self.memory.heads[self.layer], self.now
        group = q.shape[1] // len(heads)
        out = []
        for head, held in enumerate(heads):
            items = heads[head] = self.memory.edited(held, now)
            items.append(Item(k[0, head], v[0, head], now, now))
            places = torch.tensor([[item.place for item in items]])
            for query in range(head * group, (head + 1) * group):
                asks = q[0, query] if score.rotary is None else turned(q[0, query], now, score.rotary)
                keys = [item.key if score.rotary is None else turned(item.key, item.at, score.rotary) for item in items]
                logits = torch.stack([asks @ key for key in keys]) * score.scale
                if score.bias is not None:
                    logits = logits + position_bias(score.bias, torch.tensor([[now]]), places)[0, query, 0]
                logits = logits + torch.tensor([item.weight for item in items], dtype=torch.float64)
                shares = logits.softmax(-1)
                self.memory.shares.setdefault((self.layer, query), []).append(shares.tolist())
                self.memory.keys[self.layer, head] = keys
                for item, share in zip(items, shares.tolist(), strict=True):
                    item.mass += share
                out.append(shares @ torch.stack([item.value for item in items]))
        return torch.stack(out).unsqueeze(0)


class Hitters(ByHand):
    """Every EVERY tokens, of more than BUDGET the first SINKS, the last RECENT and those of most attention stay."""

    def edited(self, items: list[Item], now: int) -> list[Item]:
        if now <= BUDGET or now % EVERY:
            return items
        self.edits += 1
        safe = [item for item in items if item.place < SINKS or item.place >= now - RECENT]
        others = sorted((item for item in items if item not in safe), key=lambda item: -item.mass)
        kept = [*safe, *others[: BUDGET - len(safe)]]
        return sorted(kept, key=lambda item: item.place)

    policy = f"heavy-hitters({BUDGET}, interval={EVERY}, recent={RECENT}, num_sinks={SINKS})"


class Summed(ByHand):
    """Every 8 tokens, what lies before the last 8 is summed up by fours, but for the first 4; at most 16 summaries, in
    whole blocks of 4."""

    policy = "tiered(8, quantized=0, interval=8, summaries=16, ratio=4, num_sinks=4)"

    def edited(self, items: list[Item], now: int) -> list[Item]:
        if now % 8:
            return items
        old = [item for item in items if not item.weight and 4 <= item.place < now - 8]
        if not old:
            return items
        self.edits += 1
        made = []
        for at in range(0, len(old), 4):
            four = old[at : at + 4]
            middle = sum(item.place for item in four) / 4
            key = torch.stack([item.key for item in four]).mean(0)
            value = torch.stack([item.value for item in four]).mean(0)
            where = middle if self.rotate == "write" else math.floor(middle)
            made.append(Item(key, value, where, math.floor(middle), math.log(4)))
        summaries = [*(item for item in items if item.weight), *made]
        over = -(-len(summaries) // 4) - 16 // 4
        return [*summaries[max(0, over) * 4 :], *(item for item in items if not item.weight and item not in old)]


def text(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB) for _ in range(length)]


STREAM = Stream(text(41, 0), [text(50, 1)])


@torch.inference_mode()
def by_hand(kind: type[ByHand], model: Transformer, rotate: str) -> list[Tensor]:
    assert model.config.decoder is not None
    memory = kind(model.config.decoder.num_layers, 3, rotate)
    rows = []
    for at, token in enumerate(STREAM.tokens()):
        step = ModelInput(torch.tensor([token]), torch.tensor([at]), (SubBatch(1, 1, 1),), torch.tensor([0]))
        rows.append(model.logits(model(step, memory), step.logit_indices)[0])  # type: ignore[arg-type]
    assert memory.edits >= 5 * 3 * model.config.decoder.num_layers, "it was hardly ever cut"
    return rows


def wrong_by(kind: type[ByHand], position: str, rotate: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """max |dlogit| of the engine, whose angles are computed in float64, against the simulation."""
    model = build(model_config(position, "pre", "gqa"))
    right = by_hand(kind, model, rotate)
    cache = CacheConfig(
        dtype="float64",
        block_size=4,
        max_num_seqs=1,
        max_seq_len=96,
        prefill_chunk_size=chunk,
        policy=kind.policy,  # type: ignore[attr-defined]
        rope_at=rotate,  # type: ignore[arg-type]
    )
    exact = {"exact_rope": True}
    init = KVCache.__init__
    monkeypatch.setattr(KVCache, "__init__", lambda self, groups, **given: init(self, groups, **(given | exact)))
    run = drive(model, cache, [STREAM])
    got = run.logits[0, 0]
    assert len(got) == 50
    return max((logits - right[at]).abs().max().item() for at, logits in got.items())


@pytest.mark.parametrize("kind", [Hitters, Summed])
@pytest.mark.parametrize(("position", "rotate"), [(p, "write") for p in ENCODINGS] + [("rope", "read"), ("t5", "read")])
def test_a_model_is_what_it_is_by_hand(
    kind: type[ByHand], position: str, rotate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert wrong_by(kind, position, rotate, 64 if rotate == "write" else 7, monkeypatch) <= EXACT


def test_a_summary_of_rotated_keys_would_be_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulation is no echo: a mean of keys as they are stored, or one put elsewhere, is heard."""
    monkeypatch.setattr("kvad.ops.rotary.rotate_blocks", lambda keys, positions, rotary, factor: keys)
    assert wrong_by(Summed, "rope", "write", 64, monkeypatch) > 1e-3


def test_a_cut_by_other_ranks_would_be_another(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvad.cache.eviction_policies import HeavyHitters

    real = HeavyHitters.score
    monkeypatch.setattr(HeavyHitters, "score", lambda self, seen: -real(self, seen))
    assert wrong_by(Hitters, "rope", "write", 64, monkeypatch) > 1e-3


# ---------------------------------------------------------------- what a real run's first cut leaves


class Untouched(ByHand):
    def edited(self, items: list[Item], now: int) -> list[Item]:
        return items


LENGTH, KV_HEADS, GROUP = 24, 3, 2


def weights_of(memory: ByHand, layer: int, head: int) -> list[list[float]]:
    """[L][L]: the attention of each query, summed over the heads that read this one's keys."""
    queries = range(head * GROUP, (head + 1) * GROUP)
    rows = [[0.0] * LENGTH for _ in range(LENGTH)]
    for query in queries:
        for at, shares in enumerate(memory.shares[layer, query]):
            for key, share in enumerate(shares):
                rows[at][key] += share
    return rows


def by_definition(policy: str, memory: ByHand, layer: int, head: int) -> list[int]:
    """The 10 positions that stay of 24, as the papers say."""
    name = policy.partition("(")[0]
    ranks = [0.0] * LENGTH
    weights = weights_of(memory, layer, head)
    always: set[int] = set()
    if name == "heavy-hitters":  # Zhang et al.: all that a token got; half of the budget is recent
        ranks, always = [sum(row[key] for row in weights) for key in range(LENGTH)], set(range(LENGTH - 5, LENGTH))
    elif name == "snapkv":  # Li et al.: the last 4 queries, averaged over 3 neighbours; these 4 stay
        got = [sum(row[key] for row in weights[-4:]) for key in range(LENGTH - 4)]
        ranks = [sum(got[max(0, key - 1) : key + 2]) / 3 for key in range(LENGTH - 4)] + [0.0] * 4
        always = set(range(LENGTH - 4, LENGTH))
    elif name == "tova":  # Oren et al.: the last query, over all heads of the layer
        ranks = [sum(weights_of(memory, layer, each)[-1][key] for each in range(KV_HEADS)) for key in range(LENGTH)]
        always = {LENGTH - 1}
    elif name == "key-norm":  # Devoto et al.: short keys
        ranks = [-float(key.norm()) for key in memory.keys[layer, head]]
    order = sorted(range(LENGTH), key=lambda key: (key not in always, -ranks[key]))
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
def test_the_first_cut_of_a_run_leaves_what_the_definition_says(policy: str, position: str, chunk: int) -> None:
    model = build(model_config(position, "pre", "gqa"))
    tokens = text(LENGTH + 1, 5)
    memory = Untouched(2, KV_HEADS, "write")
    with torch.inference_mode():
        for at, token in enumerate(tokens[:LENGTH]):
            model(
                ModelInput(torch.tensor([token]), torch.tensor([at]), (SubBatch(1, 1, 1),), torch.tensor([0])), memory
            )  # type: ignore[arg-type]
    cache = CacheConfig(
        dtype="float64", block_size=4, max_num_seqs=1, max_seq_len=96, prefill_chunk_size=chunk, policy=policy
    )
    engine = Engine(model, cache)
    engine.add_request(tokens, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    while engine.kv_cache_manager.stats().used[0] == 0 or engine.kv_cache_manager.seq_len(0) <= LENGTH:
        engine.step()
    seat = engine.kv_cache_manager._sequences[0]
    assert seat is not None
    blocks = seat.groups[0].blocks
    for layer in range(2):
        for head in range(KV_HEADS):
            held = engine.kv_cache.head_metadata[layer].positions[blocks, head].flatten().tolist()
            assert held[:10] == by_definition(policy, memory, layer, head), (layer, head)
            assert held[10] == LENGTH  # what came next lies behind them
