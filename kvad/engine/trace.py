"""Forward trace: attention tensors and hidden states of a text, cached or not.

With ``cached`` the text is computed with a real KVCacheManager and a paged KVCache, its last token as a separate step;
the trace shows what the cache returned, in the order of positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from kvad import config as cfg
from kvad import ops
from kvad._html import notebook_frame
from kvad.cache import CacheConfig, build_groups
from kvad.cache.device import KVCache
from kvad.cache.manager import KVCacheManager, TokenSpan
from kvad.config import attention_specs
from kvad.engine.attention_page import AttentionMap, attention_to_html
from kvad.errors import RequestError
from kvad.model import NoCache, Transformer
from kvad.model_input import CacheProtocol, ModelInput, SlotMapping, SubBatch


@dataclass(frozen=True)
class LayerTrace:
    """Trace of one layer for the chosen heads, T tokens at positions 0..T-1.

    ``q`` [T, H, D]; ``k`` [T, K, D] and ``v`` [T, K, Dv] (K: the key-value heads read by those query heads), both
    rotated if the model rotates; ``scores`` and ``weights`` [H, T, T] (-inf and 0 if masked); ``head_outputs`` [T, H,
    Dv]; ``hidden`` [T, E], the residual stream after the layer.
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
    """Trace of a text: printable ``token_texts``, ``layers`` by index, ``logits`` [T, V]; ``heads``: None is all.

    A notebook shows the attention weights as a page (``attention_page.py``).
    """

    tokens: tuple[int, ...]
    token_texts: tuple[str, ...]
    layers: dict[int, LayerTrace]
    logits: Tensor
    heads: tuple[int, ...] | None = None

    @property
    def attention_maps(self) -> tuple[AttentionMap, ...]:
        """The weights of every traced layer and head as lists."""
        return tuple(
            AttentionMap(layer, head, weights)
            for layer, trace in self.layers.items()
            for head, weights in zip(self.heads or range(len(trace.weights)), trace.weights.tolist(), strict=True)
        )

    def to_html(self, title: str = "attention") -> str:
        """Return the attention weights as a self-contained page."""
        return attention_to_html(self.token_texts, self.attention_maps, title)

    def _repr_html_(self) -> str:
        return notebook_frame(self.to_html(), 800)


class _Recorder:
    def __init__(self, layers: Sequence[int]) -> None:
        self.traces: dict[int, list[ops.sub_batch.AttentionTrace]] = {layer: [] for layer in layers}
        self.hidden: dict[int, list[Tensor]] = {layer: [] for layer in layers}

    def record_attention(self, trace: ops.sub_batch.AttentionTrace) -> None:
        if trace.layer in self.traces:
            self.traces[trace.layer].append(trace)

    def record_hidden(self, layer: int, _module: nn.Module, _inputs: object, output: Tensor) -> None:
        self.hidden[layer].append(output)


@torch.inference_mode()
def trace_forward(
    model: Transformer,
    tokens: Sequence[int],
    token_texts: Sequence[str],
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    cached: bool = False,
) -> ForwardTrace:
    """Run ``tokens`` once and record the given ``layers`` and ``heads`` (None: all)."""
    layers = _checked_layers(model.config.stack, layers, heads)
    recorder = _Recorder(layers)
    blocks = model.stack.layers
    hooks = [blocks[layer].register_forward_hook(partial(recorder.record_hidden, layer)) for layer in layers]
    try:
        no_cache = NoCache(model.config, attention_hook=recorder.record_attention)
        logits = _cached(model, tokens, recorder) if cached else _run(model, no_cache, tokens, 0, len(tokens), ())
    finally:
        for hook in hooks:
            hook.remove()
    layer_traces = {layer: _layer(recorder, layer, len(tokens), heads) for layer in layers}
    head_indices = None if heads is None else tuple(heads)
    return ForwardTrace(tuple(tokens), tuple(token_texts), layer_traces, logits, head_indices)


def _checked_layers(stack: cfg.StackConfig, layers: Sequence[int] | None, heads: Sequence[int] | None) -> list[int]:
    """Return the layers; raise RequestError if one of them, or a head, does not exist."""
    all_layers = range(stack.num_layers)
    for layer in layers or ():
        if layer not in all_layers:
            raise RequestError(f"layers: must be in 0..{all_layers[-1]}, got {layer}")
    with_attention = [at for at in all_layers if isinstance(stack.layer_config(at).attention, cfg.AttentionConfig)]
    for layer in layers or ():
        if layer not in with_attention:
            raise RequestError(f"layers: layer {layer} has no attention", f"Layers with attention: {with_attention}")
    chosen = with_attention if layers is None else list(layers)
    for layer in chosen:
        num_heads = stack.layer_config(layer).attention.num_heads
        for head in heads or ():
            if not 0 <= head < num_heads:
                raise RequestError(f"heads: must be in 0..{num_heads - 1} for layer {layer}, got {head}")
    return chosen


def _cached(model: Transformer, tokens: Sequence[int], recorder: _Recorder) -> Tensor:
    config = CacheConfig(
        max_num_seqs=1,
        max_seq_len=len(tokens),
        prefill_chunk_size=len(tokens),
        dtype=model.dtype_name,
        enable_prefix_caching=False,
    )
    groups = build_groups(attention_specs(model.config), config, config.dtype)
    device = model.token_embedding.device
    cache = KVCache(groups, device=device, attention_hook=recorder.record_attention)
    manager = KVCacheManager(groups, prefix_caching=False, max_num_seqs=1)
    manager.add_sequence(0, tokens, b"")
    logits = []
    for start, num_tokens in ((0, len(tokens) - 1), (len(tokens) - 1, 1)):
        if num_tokens:
            allocation = manager.allocate_slots([TokenSpan(0, start, num_tokens)])
            assert allocation is not None
            cache.apply(allocation.block_ops)
            slot_mappings = tuple(
                SlotMapping(torch.tensor(slots, device=device), (torch.tensor([tables[0]], device=device),))
                for slots, tables in zip(allocation.slots, allocation.block_tables, strict=True)
            )
            logits.append(_run(model, cache, tokens, start, num_tokens, slot_mappings))
            manager.commit(0, tokens[start : start + num_tokens])
    return torch.cat(logits)


def _run(
    model: Transformer,
    cache: CacheProtocol,
    tokens: Sequence[int],
    start: int,
    num_tokens: int,
    slot_mappings: tuple[SlotMapping, ...],
) -> Tensor:
    device = model.token_embedding.device
    offsets = torch.arange(num_tokens, device=device)
    model_input = ModelInput(
        token_ids=torch.tensor(tokens[start : start + num_tokens], device=device),
        positions=offsets + start,
        sub_batches=(SubBatch(1, num_tokens, start + num_tokens),),
        logit_indices=offsets,
        seq_lens=torch.full_like(offsets, len(tokens)),
        slot_mappings=slot_mappings,
    )
    return model.logits(model(model_input, cache), offsets)


def _layer(recorder: _Recorder, layer: int, length: int, heads: Sequence[int] | None) -> LayerTrace:
    traces = recorder.traces[layer]
    last_trace = traces[-1]
    num_heads, num_kv_heads = last_trace.q.shape[2], last_trace.k.shape[1]
    head_indices = list(range(num_heads)) if heads is None else list(heads)
    kv_head_indices = sorted({head // (num_heads // num_kv_heads) for head in head_indices})
    k, v = (
        _to_dense(x[0].transpose(1, 2), last_trace.positions[0], length, math.nan).permute(2, 0, 1)
        for x in (last_trace.k, last_trace.v)
    )
    scores = [_to_dense(trace.scores[0], trace.positions[0], length, -math.inf) for trace in traces]
    weights = [_to_dense(trace.weights[0], trace.positions[0], length, 0.0) for trace in traces]
    return LayerTrace(
        q=torch.cat([s.q[0] for s in traces])[:, head_indices],
        k=k[:, kv_head_indices],
        v=v[:, kv_head_indices],
        scores=torch.cat(scores, dim=1)[head_indices],
        weights=torch.cat(weights, dim=1)[head_indices],
        head_outputs=torch.cat([s.out[0] for s in traces])[:, head_indices],
        hidden=torch.cat(recorder.hidden[layer]),
    )


def _to_dense(x: Tensor, positions: Tensor, length: int, fill_value: float) -> Tensor:
    """Scatter x [H, L, S] over slots to [H, L, T] over positions; evicted ones get ``fill_value``."""
    out = x.new_full((*x.shape[:2], length), fill_value)
    occupied = (positions >= 0).nonzero().squeeze(-1)
    out[:, :, positions[occupied]] = x[:, :, occupied]
    return out
