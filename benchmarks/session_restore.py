"""A session restored from its file compared with prefill: seconds to the first new token of each.

    python benchmarks/session_restore.py --num-tokens 4096
    python benchmarks/session_restore.py --num-tokens 32768 --dtype float32 --cold

Random weights of SmolLM 135M's shape; both sides are measured. ``restore_s`` includes everything: reading the file,
comparing every checksum, filling the blocks, and one step; ``fingerprint_s`` (a hash of every weight, once per
process) is reported separately. ``--cold`` drops the file from the page cache first. The output is one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import torch
from deterministic_mode import SMOLLM

from kvad.benchmarks.results import machine_info
from kvad.cache.config import CacheConfig
from kvad.cache.sessions.state import load_session, save_session
from kvad.config.model import ModelConfig
from kvad.engine import Engine, EngineConfig
from kvad.engine.scheduling.request import SamplingParams
from kvad.model.transformer import Transformer


def engine_of(model: Transformer, options: argparse.Namespace) -> Engine:
    cache = CacheConfig(
        dtype=options.dtype,
        max_num_seqs=1,
        max_seq_len=options.num_tokens + 64,
        prefill_chunk_size=512,
        layout=options.layout,
        policy=options.policy,
    )
    return Engine(model, cache, EngineConfig(max_num_batched_tokens=512))


def first_token(engine: Engine, tokens: list[int], **options: object) -> tuple[float, int, int]:
    """Return (seconds, request, the token)."""
    began = time.perf_counter()
    request = engine.add_request(tokens, SamplingParams(max_tokens=1, temperature=0), **options)  # type: ignore[arg-type]
    token, seconds = -1, 0.0
    while not engine.idle:
        for piece in engine.step():
            if piece.token_id is not None:
                token, seconds = piece.token_id, time.perf_counter() - began
    return seconds, request, token


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-tokens", type=int, default=4096)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--layout", choices=["paged", "contiguous"], default="paged")
    parser.add_argument("--policy", default="full")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--folder", type=Path, default=None, help="where the file is written [a temporary folder]")
    options = parser.parse_args()
    torch.manual_seed(0)
    config = ModelConfig.from_dict({**SMOLLM, "max_seq_len": options.num_tokens + 64})
    model = Transformer(config).to(getattr(torch, options.dtype)).eval()
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 4000, (options.num_tokens,), generator=draw).tolist()

    engine = engine_of(model, options)
    first_token(engine, tokens[:64])  # warm-up
    prefill, request, _ = first_token(engine, tokens[:-1], keep_state=True)
    state = engine.pop_state(request)
    _, _, right = first_token(engine, tokens)  # its prefix is in the pool, except the last block
    began = time.perf_counter()
    identity = engine.cache_fingerprint(state.regime)
    hashed = time.perf_counter() - began
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "bench.session"
        began = time.perf_counter()
        nbytes = save_session(path, state, identity, tokens, {})
        saved = time.perf_counter() - began
        engine.close()
        del state, engine
        other = engine_of(model, options)
        other.cache_fingerprint("")
        if options.cold:
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)
        began = time.perf_counter()
        loaded = load_session(
            path,
            lambda regime, salt: other.cache_fingerprint(regime, cache_salt=salt),
            other.kv_cache,
            other.state_keeper.engine_id,
        )
        read = time.perf_counter() - began
        filled, request, token = first_token(other, tokens, resume=loaded.state)
    assert token == right and other.metrics(request).num_cached_tokens == options.num_tokens - 1, (
        "another token, or not restored"
    )
    line = {
        "bench": f"session 135m {options.dtype} {options.layout} {options.policy}",
        "tokens": options.num_tokens,
        "bytes": nbytes,
        "prefill_s": round(prefill, 3),
        "restore_s": round(read + filled, 3),
        "times_faster": round(prefill / (read + filled), 1),
        "read_s": round(read, 3),
        "fill_s": round(filled, 3),
        "save_s": round(saved, 3),
        "fingerprint_s": round(hashed, 3),
        "cold": options.cold,
        "machine": machine_info(),
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
