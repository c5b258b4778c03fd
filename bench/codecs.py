"""A decoding step by the format of the cache: the same model, the same random keys and values, taking turns.

    python bench/codecs.py --context 1024 8192
    python bench/codecs.py --context 8192 --formats float32 int8 int8/int4 --dtype bfloat16

The demo preset's shape, one row, its blocks in any order.  Keys and values are drawn at random and encoded, so that
there is nothing to prefill: times do not depend on them.  One JSON line per context: milliseconds of a step by format
(medians, of the clock and of the processor: on a busy machine believe the second, with one thread), the ratio to the
first, and the bytes that a token takes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from kvad.cache.formats import FORMATS, parted
from kvad.cache.memory import Memory
from kvad.cache.sizing import CacheConfig, group_bytes, groups
from kvad.config import mixers
from kvad.lab.bench import commit, machine
from kvad.model.transformer import Transformer
from kvad.step import RESERVED_BLOCKS, Lane, Place, Step
from kvad.train.presets import PRESETS

FORMS = [name for name, each in FORMATS.items() if not each.sealed and name != "float64"]
BLOCK = 16


def filled(model: Transformer, cache: CacheConfig) -> Memory:
    """One row at its whole length."""
    memory = Memory(groups(mixers(model.config), cache))
    (group,) = memory.groups
    blocks = torch.arange(RESERVED_BLOCKS, group.blocks)
    for store in (*memory.keys, *memory.values):
        store.pack(blocks, torch.randn(len(blocks), group.mixer.kv_heads, group.block_size, store.dim))
    return memory


def stepper(model: Transformer, cache: CacheConfig) -> Callable[[], None]:
    """Computes the row's last token again and again."""
    memory, last = filled(model, cache), cache.capacity - 1
    (group,) = memory.groups
    table = torch.randperm(group.usable, generator=torch.Generator().manual_seed(0)) + RESERVED_BLOCKS
    memory.positions[0][table] = torch.arange(group.usable * BLOCK).view(-1, BLOCK)
    slots = table[last // BLOCK : last // BLOCK + 1] * BLOCK + last % BLOCK
    place = Place(slots, (table.unsqueeze(0),))
    at, zero = torch.tensor([last]), torch.tensor([0])
    step = Step(torch.tensor([7]), at, (Lane(1, 1, cache.capacity),), zero, places=(place,))

    @torch.inference_mode()
    def run() -> None:
        model.logits(model(step, memory), step.wanted)

    return run


def measure(model: Transformer, context: int, names: list[str], repeats: int) -> dict[str, object]:
    runs, taken = {}, {}
    for name in names:
        keys, values = parted(name)
        cache = CacheConfig(rows=1, capacity=context, block_size=BLOCK, keys=keys, values=values)
        size = group_bytes(groups(mixers(model.config), cache)[0])
        taken[name] = size.per_token_payload + size.per_token_scales
        runs[name] = stepper(model, cache)
    clocks = {"wall": time.perf_counter, "cpu": time.process_time}
    seconds: dict[str, dict[str, list[float]]] = {clock: {name: [] for name in names} for clock in clocks}
    for number in range(repeats + 3):
        for name, run in runs.items():
            began = {clock: now() for clock, now in clocks.items()}
            run()
            for clock, now in clocks.items():
                if number >= 3:  # warm
                    seconds[clock][name].append(now() - began[clock])
    wall, cpu = ({name: 1e3 * statistics.median(s) for name, s in seconds[clock].items()} for clock in clocks)
    return {
        "bench": "codecs",
        "context": context,
        "computed": str(model.table.dtype).removeprefix("torch."),
        "milliseconds": {name: round(each, 3) for name, each in wall.items()},
        "cpu_milliseconds": {name: round(each, 3) for name, each in cpu.items()},
        "cpu_ratio": {name: round(each / cpu[names[0]], 3) for name, each in cpu.items()},
        "bytes_per_token": taken,
        "repeats": repeats,
        "machine": machine(),
        "commit": commit(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--formats", nargs="+", default=[*FORMS, "int8/int4"])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="What to compute in.")
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Transformer(PRESETS["demo"](4096, max(options.context))).to(getattr(torch, options.dtype)).eval()
    model.pack()
    for context in options.context:
        print(json.dumps(measure(model, context, options.formats, options.repeats)), flush=True)


if __name__ == "__main__":
    main()
