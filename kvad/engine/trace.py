"""Looking inside: every q, k, v, score, weight, head output and hidden state of a text, cached or not.

With ``cached`` the text goes through a real ledger and a real paged memory, its last token as a step of its own, and
what is shown is what the cache gave back, put in the order of positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvad.cache.ledger import Ledger, Span
from kvad.cache.memory import Memory
from kvad.cache.sizing import CacheConfig, groups
from kvad.config import mixers
from kvad.model.fresh import Fresh
from kvad.model.transformer import Transformer
from kvad.ops.lanes import Seen
from kvad.step import Lane, Place, Step
from kvad.step import Memory as MemoryProtocol

__all__ = ["LayerTrace", "Trace", "trace"]


@dataclass(frozen=True)
class LayerTrace:
    """One layer, for the heads asked for.  T tokens, positions 0..T-1.

    ``q`` [T, H, D]; ``k`` [T, K, D] and ``v`` [T, K, Dv] (K: the key-value heads that those query heads read), both
    rotated where the model rotates; ``scores`` and ``weights`` [H, T, T] (-inf and 0 where hidden); ``head_outputs``
    [T, H, Dv]; ``hidden`` [T, E], the residual stream after the layer.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scores: Tensor
    weights: Tensor
    head_outputs: Tensor
    hidden: Tensor


@dataclass(frozen=True)
class Trace:
    """``pieces``: the tokens in printable form; ``layers`` by number; ``logits`` [T, V]."""

    tokens: tuple[int, ...]
    pieces: tuple[str, ...]
    layers: dict[int, LayerTrace]
    logits: Tensor


class _Recorder:
    """Collects what every layer saw, over as many steps as it takes."""

    def __init__(self, wanted: Sequence[int]) -> None:
        self.wanted = set(wanted)
        self.seen: dict[int, list[Seen]] = {layer: [] for layer in wanted}
        self.hidden: dict[int, list[Tensor]] = {layer: [] for layer in wanted}

    def probe(self, seen: Seen) -> None:
        if seen.layer in self.wanted:
            self.seen[seen.layer].append(seen)

    def hook(self, layer: int) -> object:
        def keep(_module: nn.Module, _inputs: object, output: Tensor) -> None:
            self.hidden[layer].append(output)

        return keep


@torch.inference_mode()
def trace(
    model: Transformer,
    tokens: Sequence[int],
    pieces: Sequence[str],
    *,
    layers: Sequence[int],
    heads: Sequence[int] | None = None,
    cached: bool = False,
) -> Trace:
    """Run ``tokens`` once and keep what ``layers`` and ``heads`` (None: all) did."""
    recorder = _Recorder(layers)
    blocks = model.stack.layers
    hooks = [blocks[layer].register_forward_hook(recorder.hook(layer)) for layer in layers]  # type: ignore[arg-type]
    try:
        logits = _through_cache(model, tokens, recorder) if cached else _uncached(model, tokens, recorder)
    finally:
        for hook in hooks:
            hook.remove()
    shown = {layer: _layer(recorder, layer, len(tokens), heads) for layer in layers}
    return Trace(tuple(tokens), tuple(pieces), shown, logits)


def _uncached(model: Transformer, tokens: Sequence[int], recorder: _Recorder) -> Tensor:
    return _run(model, Fresh(model.config, probe=recorder.probe), tokens, 0, len(tokens), ())


def _through_cache(model: Transformer, tokens: Sequence[int], recorder: _Recorder) -> Tensor:
    config = CacheConfig(
        rows=1,
        capacity=len(tokens),
        chunk=len(tokens),
        dtype=str(model.table.dtype).removeprefix("torch."),
        prefix=False,
    )
    placed = groups(mixers(model.config), config)
    device = model.table.device
    memory = Memory(placed, device=device, probe=recorder.probe)
    ledger = Ledger(placed, prefix=False, seats=1)
    ledger.admit(0, tokens, b"")
    logits = []
    for start, count in ((0, len(tokens) - 1), (len(tokens) - 1, 1)):
        if count:
            reserved = ledger.reserve([Span(0, start, count)])
            assert reserved is not None
            memory.apply(reserved.moves)
            places = tuple(
                Place(torch.tensor(slots, device=device), (torch.tensor([tables[0]], device=device),))
                for slots, tables in zip(reserved.slots, reserved.tables, strict=True)
            )
            logits.append(_run(model, memory, tokens, start, count, places))
            ledger.commit(0, tokens[start : start + count])
    return torch.cat(logits)


def _run(
    model: Transformer, memory: MemoryProtocol, tokens: Sequence[int], start: int, count: int, places: tuple[Place, ...]
) -> Tensor:
    device = model.table.device
    every = torch.arange(count, device=device)
    step = Step(
        tokens=torch.tensor(tokens[start : start + count], device=device),
        positions=every + start,
        lanes=(Lane(1, count, start + count),),
        wanted=every,
        limits=torch.full_like(every, len(tokens)),
        places=places,
    )
    return model.logits(model(step, memory), every)


def _layer(recorder: _Recorder, layer: int, length: int, heads: Sequence[int] | None) -> LayerTrace:
    seen = recorder.seen[layer]
    last = seen[-1]
    total, kv_heads = last.q.shape[2], last.k.shape[1]
    chosen = list(range(total)) if heads is None else list(heads)
    groups_read = sorted({head // (total // kv_heads) for head in chosen})
    order = _by_position(last.positions[0], length)
    return LayerTrace(
        q=torch.cat([s.q[0] for s in seen])[:, chosen],
        k=_rows(last.k[0], order).transpose(0, 1)[:, groups_read],
        v=_rows(last.v[0], order).transpose(0, 1)[:, groups_read],
        scores=torch.cat([_dense(s.scores[0], s.positions[0], length, float("-inf")) for s in seen], dim=1)[chosen],
        weights=torch.cat([_dense(s.weights[0], s.positions[0], length, 0.0) for s in seen], dim=1)[chosen],
        head_outputs=torch.cat([s.out[0] for s in seen])[:, chosen],
        hidden=torch.cat(recorder.hidden[layer]),
    )


def _by_position(positions: Tensor, length: int) -> Tensor:
    """The slot of every position that is still held, -1 for those that a window let go."""
    order = torch.full((length,), -1, dtype=torch.int64, device=positions.device)
    held = (positions >= 0).nonzero().squeeze(-1)
    order[positions[held]] = held
    return order


def _rows(x: Tensor, order: Tensor) -> Tensor:
    """x [K, S, D] -> [K, T, D] by position; NaN where nothing is held."""
    return torch.where((order >= 0).view(1, -1, 1), x[:, order.clamp(min=0)], torch.nan)


def _dense(x: Tensor, positions: Tensor, length: int, empty: float) -> Tensor:
    """x [H, L, S] over slots -> [H, L, T] over positions."""
    out = x.new_full((*x.shape[:2], length), empty)
    held = (positions >= 0).nonzero().squeeze(-1)
    out[:, :, positions[held]] = x[:, :, held]
    return out
