"""Looking inside: every q, k, v, score, weight, head output and hidden state of a text, cached or not.

With ``cached`` the text goes through a real ledger and a real paged memory, its last token as a step of its own, and
what is shown is what the cache gave back, put in the order of positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvad import ops
from kvad.cache import CacheConfig, build_groups
from kvad.cache.device import KVCache
from kvad.cache.manager import KVCacheManager, TokenSpan
from kvad.config import attention_specs
from kvad.model import NoCache, Transformer
from kvad.model_input import CacheProtocol as MemoryProtocol
from kvad.model_input import ModelInput, SlotMapping, SubBatch


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
class ForwardTrace:
    """``pieces``: the tokens in printable form; ``layers`` by number; ``logits`` [T, V]."""

    tokens: tuple[int, ...]
    token_texts: tuple[str, ...]
    layers: dict[int, LayerTrace]
    logits: Tensor


class _Recorder:
    """Collects what every layer saw, over as many steps as it takes."""

    def __init__(self, wanted: Sequence[int]) -> None:
        self.wanted = set(wanted)
        self.seen: dict[int, list[ops.sub_batch.AttentionTrace]] = {layer: [] for layer in wanted}
        self.hidden: dict[int, list[Tensor]] = {layer: [] for layer in wanted}

    def probe(self, seen: ops.sub_batch.AttentionTrace) -> None:
        if seen.layer in self.wanted:
            self.seen[seen.layer].append(seen)

    def hook(self, layer: int) -> object:
        def keep(_module: nn.Module, _inputs: object, output: Tensor) -> None:
            self.hidden[layer].append(output)

        return keep


@torch.inference_mode()
def trace_forward(
    model: Transformer,
    tokens: Sequence[int],
    pieces: Sequence[str],
    *,
    layers: Sequence[int],
    heads: Sequence[int] | None = None,
    cached: bool = False,
) -> ForwardTrace:
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
    return ForwardTrace(tuple(tokens), tuple(pieces), shown, logits)


def _uncached(model: Transformer, tokens: Sequence[int], recorder: _Recorder) -> Tensor:
    return _run(model, NoCache(model.config, attention_hook=recorder.probe), tokens, 0, len(tokens), ())


def _through_cache(model: Transformer, tokens: Sequence[int], recorder: _Recorder) -> Tensor:
    config = CacheConfig(
        max_num_seqs=1,
        max_seq_len=len(tokens),
        prefill_chunk_size=len(tokens),
        dtype=str(model.token_embedding.dtype).removeprefix("torch."),
        enable_prefix_caching=False,
    )
    placed = build_groups(attention_specs(model.config), config)
    device = model.token_embedding.device
    memory = KVCache(placed, device=device, attention_hook=recorder.probe)
    ledger = KVCacheManager(placed, prefix_caching=False, max_num_seqs=1)
    ledger.add_sequence(0, tokens, b"")
    logits = []
    for start, count in ((0, len(tokens) - 1), (len(tokens) - 1, 1)):
        if count:
            reserved = ledger.allocate_slots([TokenSpan(0, start, count)])
            assert reserved is not None
            memory.apply(reserved.block_ops)
            places = tuple(
                SlotMapping(torch.tensor(slots, device=device), (torch.tensor([tables[0]], device=device),))
                for slots, tables in zip(reserved.slots, reserved.block_tables, strict=True)
            )
            logits.append(_run(model, memory, tokens, start, count, places))
            ledger.commit(0, tokens[start : start + count])
    return torch.cat(logits)


def _run(
    model: Transformer,
    memory: MemoryProtocol,
    tokens: Sequence[int],
    start: int,
    count: int,
    places: tuple[SlotMapping, ...],
) -> Tensor:
    device = model.token_embedding.device
    every = torch.arange(count, device=device)
    step = ModelInput(
        token_ids=torch.tensor(tokens[start : start + count], device=device),
        positions=every + start,
        sub_batches=(SubBatch(1, count, start + count),),
        logit_indices=every,
        max_seq_lens=torch.full_like(every, len(tokens)),
        slot_mappings=places,
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
        scores=torch.cat([_to_dense(s.scores[0], s.positions[0], length, float("-inf")) for s in seen], dim=1)[chosen],
        weights=torch.cat([_to_dense(s.weights[0], s.positions[0], length, 0.0) for s in seen], dim=1)[chosen],
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


def _to_dense(x: Tensor, positions: Tensor, length: int, empty: float) -> Tensor:
    """x [H, L, S] over slots -> [H, L, T] over positions."""
    out = x.new_full((*x.shape[:2], length), empty)
    held = (positions >= 0).nonzero().squeeze(-1)
    out[:, :, positions[held]] = x[:, :, held]
    return out
