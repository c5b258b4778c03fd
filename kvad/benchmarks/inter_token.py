"""Time between the tokens of chats while a long prompt is read, with and without ``max_inter_token``.

    python -m kvad.benchmarks.inter_token [--chats 31] [--prompt 16384] [--bound MS] [--threads 1]

A random model decodes ``chats`` sequences; then a prompt arrives. Every step gives each chat one token, so the
durations of steps are the times between tokens: ``alone``, before and after the prompt is read, and ``reading``. One
JSON line without and one with a bound, with machine, commit and load. The bound is by default 1.3 times the median
time without the prompt. A CPU is busy with few sequences, so a step has room for few prompt tokens: with the default
sizes the prompt takes minutes there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from typing import Any

import torch

from kvad import config as cfg
from kvad.benchmarks.results import commit_id, machine_info
from kvad.cache import CacheConfig
from kvad.engine import Engine, EngineConfig
from kvad.engine.scheduling import SamplingParams
from kvad.model import Transformer

BLOCK_SIZE, VOCAB_SIZE, MAX_CHAT_TOKENS = 32, 512, 6144
WARM_UP, ALONE_STEPS, BOUND_RATIO = 20, 100, 1.3


def build_model(hidden_size: int, num_layers: int, max_seq_len: int) -> Transformer:
    """Build a random decoder."""
    mixer = cfg.AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=64, position=cfg.RopeConfig())
    layer = cfg.LayerConfig(mixer, cfg.GatedMLPConfig(4 * hidden_size), cfg.NormConfig("rms"))
    decoder = cfg.StackConfig(num_layers, {"L": layer})
    config = cfg.ModelConfig(
        hidden_size=hidden_size, vocab_size=VOCAB_SIZE, max_seq_len=max_seq_len, decoder=decoder, tie_embeddings=True
    )
    torch.manual_seed(0)
    return Transformer(config).eval().requires_grad_(False)


def measure(model: Transformer, num_chats: int, num_tokens: int, bound: float | None) -> dict[str, Any]:
    """Return the seconds of each step of the chats, alone and while a prompt of ``num_tokens`` tokens is read."""
    longest = model.config.max_seq_len
    cache = CacheConfig(
        max_num_seqs=num_chats + 1,
        max_seq_len=longest,
        block_size=BLOCK_SIZE,
        num_blocks=(longest + num_chats * MAX_CHAT_TOKENS) // BLOCK_SIZE + 64,
        dtype="float32",
    )
    engine = Engine(model, cache, EngineConfig(max_inter_token=bound))
    sampling = SamplingParams(max_tokens=MAX_CHAT_TOKENS - 16, temperature=0, ignore_eos=True)
    for chat in range(num_chats):
        engine.add_request([(chat * 7 + i) % VOCAB_SIZE for i in range(16)], sampling)
    alone = [_step(engine) for _ in range(WARM_UP + ALONE_STEPS)][WARM_UP:]
    prompt = [(i * i + 3) % VOCAB_SIZE for i in range(num_tokens)]
    request, start = engine.add_request(prompt, SamplingParams(max_tokens=1, temperature=0)), time.perf_counter()
    reading: list[float] = []
    while engine.metrics(request).first_token is None and len(reading) < MAX_CHAT_TOKENS - 3 * ALONE_STEPS:
        reading.append(_step(engine))
    seconds, (sequence, *_) = time.perf_counter() - start, engine.scheduler.sequences(request) or (None,)
    num_read = num_tokens if sequence is None else sequence.num_computed_tokens
    engine.abort_request(request)
    alone += [_step(engine) for _ in range(ALONE_STEPS)]
    engine.close()
    return {"alone": alone, "reading": reading, "seconds": seconds, "num_read": num_read}


def _step(engine: Engine) -> float:
    start = time.perf_counter()
    engine.step()
    return time.perf_counter() - start


def summarize(seconds: list[float]) -> dict[str, float]:
    """Return median and p99 in milliseconds, and the number of steps."""
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, math.ceil(0.99 * len(ordered)) - 1)]
    return {"median_ms": 1e3 * statistics.median(ordered), "p99_ms": 1e3 * p99, "steps": len(ordered)}


def main() -> None:
    """Measure without and with a bound, and print one JSON line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=int, default=31)
    parser.add_argument("--prompt", type=int, default=16384, help="tokens")
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--bound", type=float, help="milliseconds [default: 1.3 times the median without the prompt]")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = build_model(options.hidden_size, options.layers, max(options.prompt, MAX_CHAT_TOKENS) + BLOCK_SIZE)
    common = {**vars(options), "machine": machine_info(), "commit": commit_id()}
    unbounded = measure(model, options.chats, options.prompt, None)
    bound = BOUND_RATIO * statistics.median(unbounded["alone"]) if options.bound is None else options.bound / 1e3
    bounded = measure(model, options.chats, options.prompt, bound)
    for mode, run in (("unbounded", unbounded), ("bounded", bounded)):
        own, reading = summarize(run["alone"]), summarize(run["reading"])
        line = {"mode": mode, "bound_ms": 1e3 * bound if run is bounded else None, "alone": own, "reading": reading}
        line |= {"p99_ratio": reading["p99_ms"] / own["p99_ms"], "prompt_tokens_read": run["num_read"]}
        line |= {"seconds_to_read": run["seconds"], "load": os.getloadavg()[0], **common}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
