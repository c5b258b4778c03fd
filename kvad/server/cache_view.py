"""State of the cache for the page: the blocks of the pools, the sequences, the stores, and the attention of a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvad.engine import Engine, scheduling
from kvad.errors import RequestError
from kvad.llm import LLM
from kvad.model_input import RESERVED_BLOCKS
from kvad.server.sessions import SessionStats

# A block of the pool: free, only in the prefix cache, of one sequence, of several.
FREE, CACHED, USED, SHARED = "f", "c", "u", "s"
MAX_BLOCKS = 1 << 14  # of a pool's map; the rest is counted only
MAX_TOKENS = 2048  # of a text whose attention is computed
MAX_PROMPTS = 16  # recent requests whose prompts are described
PROMPT_FIELDS = (
    "num_prompt_tokens", "num_cached_tokens", "num_ram_tokens", "num_disk_tokens", "is_resumed", "is_source_cached",
    "miss_reason", "miss_cause", "resume_miss_reason", "num_preemptions",
)  # fmt: skip


def block_map(engine: Engine, numbers: Mapping[int, int], sessions: SessionStats) -> dict[str, Any]:
    """Return pools, sequences, stores, recent prompts and evictions as plain values.

    Args:
        engine: The engine, between two steps.
        numbers: The server's number of each of the engine's requests.
        sessions: Session files of this process.
    """
    manager, scheduler = engine.kv_cache_manager, engine.scheduler
    store, preempted = engine.block_store, engine.preemption.stats()
    return {
        "block_size": engine.cache.block_size,
        "first_block": RESERVED_BLOCKS,  # number of the first block of a map
        "groups": [_describe_group(engine, index) for index in range(len(manager.groups))],
        "pools": [_pool_states(pool) for pool in manager.pools],
        "sequences": [_describe_sequence(engine, seq, numbers) for seq in scheduler.active_sequences],
        "prompts": [
            {"request": numbers[request], **{name: getattr(metrics, name) for name in PROMPT_FIELDS}}
            for request, metrics in scheduler.recent_metrics(MAX_PROMPTS)
            if request in numbers
        ],
        "evictions": [
            {"request": numbers.get(each.request_id), "time": each.time, "cause": each.cause, "blocks": each.num_blocks}
            for each in manager.history.evictions
        ],
        "cache": asdict(manager.stats()),
        "scheduler": scheduler.stats()._asdict(),
        "preemption": {
            name: getattr(preempted, name)
            for name in ("recomputed", "recomputed_tokens", "to_ram", "to_disk", "swapped_bytes", "num_lost")
        },
        "store": None if store is None else asdict(store.stats()),
        "traffic": _traffic(engine, preempted, sessions),
        "sessions": asdict(sessions),
    }


def _describe_group(engine: Engine, index: int) -> dict[str, Any]:
    group = engine.kv_cache_manager.groups[index]
    formats = [array_format for array_format, _ in group.tensor_formats]
    reader, block_bytes = engine.kv_cache.offload_reader, engine.kv_cache.block_bytes()
    return {
        "layers": list(group.layers),
        "heads": group.spec.num_kv_heads,
        "window": group.spec.pattern.window if group.spec.pattern is not None else None,
        "is_cross_attention": group.spec.is_cross_attention,
        "is_lower_level": group.lower_level is not None,
        "token_group": index if group.lower_level is None else group.lower_level.token_group,
        "formats": "/".join(dict.fromkeys(array_format.name for array_format in formats)),
        "is_packed": any(array_format.kind != "plain" for array_format in formats),
        "has_summaries": group.has_summaries,
        "block_bytes": block_bytes[index],
        # Blocks of an offload file: the first ones are in RAM, the others on disk.
        "num_ram_blocks": reader.plan.shares[index].ram if group.is_offloaded and reader is not None else None,
    }


def _describe_sequence(engine: Engine, seq: scheduling.TokenSequence, numbers: Mapping[int, int]) -> dict[str, Any]:
    is_running = seq.seq_index >= 0
    return {
        "request": numbers.get(seq.request_id),
        "sample": seq.sample_index,
        "state": seq.state if seq.swapped is None else "swapped",
        "prompt_tokens": seq.num_prompt_tokens,
        "tokens": len(seq.token_ids),
        "computed": seq.num_computed_tokens,
        "cached": seq.request.metrics.num_cached_tokens,
        "max_len": seq.max_len,
        "blocks": [list(blocks) for blocks in engine.kv_cache_manager.blocks(seq.seq_index)] if is_running else [],
        "swapped": _describe_swapped(engine, seq),
    }


def _describe_swapped(engine: Engine, seq: scheduling.TokenSequence) -> dict[str, Any] | None:
    """Return the number of blocks of a swapped-out sequence, and where its copy is."""
    if seq.swapped is None:
        return None
    space = engine.preemption.swap_space
    is_on_disk = space is not None and space.record(seq.swapped.key).state in ("on-disk", "reading")
    return {"blocks": seq.swapped.num_blocks, "place": "disk" if is_on_disk else "ram"}


def _traffic(
    engine: Engine, preempted: scheduling.preemption.PreemptionStats, sessions: SessionStats
) -> list[dict[str, Any]]:
    """Return what was copied out of the pool and back since the start, by kind and place; None is not counted."""
    rows: list[dict[str, Any]] = []

    def add(kind: str, place: str, out: tuple[int | None, int | None], back: tuple[int | None, int | None]) -> None:
        if any(out + back):
            names = ("blocks_out", "bytes_out", "blocks_in", "bytes_in")
            rows.append({"kind": kind, "place": place, **dict(zip(names, out + back, strict=True))})

    store, offload = engine.block_store, engine.kv_cache_manager.prefix_offload
    if store is not None and offload is not None:
        stats, hits = store.stats(), offload.hits
        add("prefix", "ram", (stats.ram.written, stats.ram.written_bytes), (hits.blocks["ram"], hits.bytes["ram"]))
        add("prefix", "disk", (stats.disk.written, stats.disk.written_bytes), (hits.blocks["disk"], hits.bytes["disk"]))
    blocks, num_bytes = preempted.copied_blocks, preempted.copied_bytes
    for place in ("ram", "disk"):
        out, back = f"to {place}", f"from {place}"
        add("swapped", place, (blocks[out], num_bytes[out]), (blocks[back], num_bytes[back]))
    if engine.kv_cache.offload_reader is not None:
        offloaded = engine.kv_cache.offload_reader.stats()
        add("offload", "all", (None, offloaded.written), (None, None))
        add("offload", "ram", (None, None), (None, offloaded.from_ram))
        add("offload", "disk", (None, None), (None, offloaded.from_disk))
    add("session", "disk", (None, sessions.saved_bytes), (None, None))
    return rows


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
