"""Cost of `--deterministic`: the same random weights with and without it, in alternation, medians.

    python benchmarks/deterministic_mode.py demo
    python benchmarks/deterministic_mode.py 135m --dtype bfloat16 --repeats 5

One thread (OMP_NUM_THREADS=1) and ``--clock cpu`` reduce the effect of other programs.

The output is one JSON line per measure (one sequence, eight sequences, a prompt of 512 tokens): tokens per second of
each side, the ratio, and the seconds in which an engine tries its shapes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from kvad.benchmarks.results import machine_info
from kvad.cache.config import CacheConfig
from kvad.config.model import ModelConfig
from kvad.engine import Engine, EngineConfig
from kvad.engine.scheduling.request import SamplingParams
from kvad.model.transformer import Transformer
from kvad.train.config.presets import MODEL_PRESETS

SMOLLM = {  # the shape of SmolLM 135M
    "hidden_size": 576,
    "vocab_size": 49152,
    "max_seq_len": 1024,
    "decoder": {
        "num_layers": 30,
        "layer_types": {
            "L": {"attention": {"num_heads": 9, "num_kv_heads": 3}, "mlp": {"kind": "gated", "intermediate_size": 1536}}
        },
    },
}
MEASURES = {
    "decode 1 sequence": (1, 16, 33),
    "decode 8 sequences": (8, 16, 33),
    "prefill 512": (1, 512, 1),
}  # sequences, prompt, new tokens


def engine_of(config: ModelConfig, dtype: str, deterministic: bool) -> Engine:
    torch.manual_seed(0)
    model = Transformer(config).to(getattr(torch, dtype)).eval()
    cache = CacheConfig(
        dtype=dtype, max_num_seqs=8, max_seq_len=576, prefill_chunk_size=512, enable_prefix_caching=False
    )
    return Engine(model, cache, EngineConfig(deterministic=deterministic))


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def seconds(engine: Engine, num_seqs: int, prompt: int, new: int, clock: Callable[[], float]) -> float:
    """Return seconds of the prompt if one token is generated, else of all tokens after the first."""
    draw = torch.Generator().manual_seed(num_seqs)
    for _ in range(num_seqs):
        tokens = torch.randint(0, 4000, (prompt,), generator=draw).tolist()
        engine.add_request(tokens, SamplingParams(max_tokens=new, temperature=0.0))
    began = clock()
    if new > 1:
        engine.step()
        began = clock()
    while not engine.idle:
        engine.step()
    return clock() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=["demo", "135m"])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    options = parser.parse_args()
    config = MODEL_PRESETS["demo"](4096, 1024) if options.shape == "demo" else ModelConfig.from_dict(SMOLLM)
    began = time.perf_counter()
    plain = engine_of(config, options.dtype, False)
    between = time.perf_counter()
    sides = {"plain": plain, "deterministic": engine_of(config, options.dtype, True)}
    tried = time.perf_counter() - between - (between - began)
    for name, (num_seqs, prompt, new) in MEASURES.items():
        seconds_of: dict[str, list[float]] = {side: [] for side in sides}
        for turn in range(options.repeats + 1):
            for side, engine in sides.items():
                spent = seconds(engine, num_seqs, prompt, new, CLOCKS[options.clock])
                if turn:
                    seconds_of[side].append(spent)
        work = prompt if new == 1 else num_seqs * (new - 1)
        rates = {side: round(work / statistics.median(each), 1) for side, each in seconds_of.items()}
        ratio = round(rates["deterministic"] / rates["plain"], 3)
        line = {"bench": f"deterministic {options.shape} {options.dtype}", "measure": name, "tokens_per_second": rates}
        print(
            json.dumps(
                line
                | {
                    "ratio": ratio,
                    "tried_s": round(tried, 2),
                    "clock": options.clock,
                    "seconds": seconds_of,
                    "machine": machine_info(),
                }
            )
        )


if __name__ == "__main__":
    main()
