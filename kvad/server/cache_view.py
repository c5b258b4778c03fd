"""State of the cache for the page: the blocks of the pools, the sequences, the stores, and the attention of a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvad.cache import CacheGroup
from kvad.engine import Engine
from kvad.errors import RequestError
from kvad.llm import LLM
from kvad.model_input import RESERVED_BLOCKS

# A block of the pool: free, only in the prefix cache, of one sequence, of several.
FREE, CACHED, USED, SHARED = "f", "c", "u", "s"
MAX_BLOCKS = 1 << 14  # of a pool's map; the rest is counted only
MAX_TOKENS = 2048  # of a text whose attention is computed


def block_map(engine: Engine, numbers: Mapping[int, int]) -> dict[str, Any]:
    """Return pools, sequences and stores as plain values.

    Args:
        engine: The engine, between two steps.
        numbers: The server's number of each of the engine's requests.
    """
    manager = engine.kv_cache_manager
    store, preemption = engine.block_store, engine.preemption.stats()
    return {
        "block_size": engine.cache.block_size,
        "first_block": RESERVED_BLOCKS,  # number of the first block of a map
        "groups": [_describe_group(group) for group in manager.groups],
        "pools": [_pool_states(pool) for pool in manager.pools],
        "sequences": [
            {
                "request": numbers.get(seq.request_id),
                "sample": seq.sample_index,
                "state": seq.state if seq.swapped is None else "swapped",
                "prompt_tokens": seq.num_prompt_tokens,
                "tokens": len(seq.token_ids),
                "computed": seq.num_computed_tokens,
                "cached": seq.request.metrics.num_cached_tokens,
                "max_len": seq.max_len,
                "blocks": [list(blocks) for blocks in manager.blocks(seq.seq_index)] if seq.seq_index >= 0 else [],
            }
            for seq in engine.scheduler.active_sequences
        ],
        "cache": asdict(manager.stats()),
        "scheduler": engine.scheduler.stats()._asdict(),
        "preemption": {
            name: getattr(preemption, name)
            for name in ("recomputed", "recomputed_tokens", "to_ram", "to_disk", "swapped_bytes", "num_lost")
        },
        "store": None if store is None else asdict(store.stats()),
    }


def _describe_group(group: CacheGroup) -> dict[str, Any]:
    return {
        "layers": list(group.layers),
        "heads": group.spec.num_kv_heads,
        "window": group.spec.pattern.window if group.spec.pattern is not None else None,
        "is_cross_attention": group.spec.is_cross_attention,
        "is_lower_level": group.lower_level is not None,
    }


def _pool_states(pool: Any) -> str:
    """Return one letter per block, up to ``MAX_BLOCKS``."""
    last = min(len(pool.refs), RESERVED_BLOCKS + MAX_BLOCKS)
    blocks = zip(pool.refs[RESERVED_BLOCKS:last], pool.prefixes[RESERVED_BLOCKS:last], strict=True)
    return "".join(
        SHARED if refs > 1 else USED if refs else FREE if prefix is None else CACHED for refs, prefix in blocks
    )


def attention_of_last_token(llm: LLM, tokens: Sequence[int], layer: int) -> dict[str, Any]:
    """Return the weights of a text's last token, per head, computed with a cache of this call; the engine waits.

    Raises:
        RequestError: If the text is too long, or the layer does not exist.
    """
    if len(tokens) > MAX_TOKENS:
        raise RequestError(f"tokens: must be at most {MAX_TOKENS} for attention weights, got {len(tokens)}")
    decoder = llm.model.config.decoder
    num_layers = 0 if decoder is None else decoder.num_layers
    if not 0 <= layer < num_layers:
        raise RequestError(f"layer: must be below {num_layers}, got {layer}")
    trace = llm.trace(list(tokens), [layer], cached=True)
    weights = trace.layers[layer].weights  # [H, T, T]
    return {"layer": layer, "tokens": list(trace.token_texts), "weights": weights[:, -1].float().tolist()}
