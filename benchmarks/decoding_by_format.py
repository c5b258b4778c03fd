"""Time of a decoding step by cache format: the same model and random keys and values, in alternation.

    python benchmarks/decoding_by_format.py --seq-len 1024 8192
    python benchmarks/decoding_by_format.py --seq-len 8192 --formats float32 int8 int8/int4 --dtype bfloat16

The shape is that of the demo preset, one sequence with blocks in random order. Keys and values are random and
encoded, so no prefill is needed; times do not depend on them. The output is one JSON line per context: milliseconds
of a step by format (medians of wall and processor time; on a busy machine use the latter, with one thread), the ratio
to the first, and the bytes per token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from kvad.benchmarks.results import commit_id, machine_info
from kvad.cache.config import CacheConfig
from kvad.cache.device.kv_cache import KVCache
from kvad.cache.groups import build_groups, group_bytes
from kvad.cache.quantization import FORMATS, split_format_name
from kvad.config.model import attention_specs
from kvad.model.transformer import Transformer
from kvad.model_input import RESERVED_BLOCKS, ModelInput, SlotMapping, SubBatch
from kvad.train.config.presets import MODEL_PRESETS

FORMS = [name for name, each in FORMATS.items() if not each.is_blockwise and name != "float64"]
BLOCK = 16


def filled(model: Transformer, cache: CacheConfig) -> KVCache:
    """Fill the cache with one sequence of full length."""
    memory = KVCache(build_groups(attention_specs(model.config), cache))
    (group,) = memory.groups
    blocks = torch.arange(RESERVED_BLOCKS, group.num_blocks)
    for store in (*memory.keys, *memory.values):
        store.write_blocks(blocks, torch.randn(len(blocks), group.spec.num_kv_heads, group.block_size, store.dim))
    return memory


def stepper(model: Transformer, cache: CacheConfig) -> Callable[[], None]:
    """Return a function that computes the sequence's last token."""
    memory, last = filled(model, cache), cache.max_seq_len - 1
    (group,) = memory.groups
    table = torch.randperm(group.num_usable_blocks, generator=torch.Generator().manual_seed(0)) + RESERVED_BLOCKS
    memory.positions[0][table] = torch.arange(group.num_usable_blocks * BLOCK).view(-1, BLOCK)
    slots = table[last // BLOCK : last // BLOCK + 1] * BLOCK + last % BLOCK
    place = SlotMapping(slots, (table.unsqueeze(0),))
    at, zero = torch.tensor([last]), torch.tensor([0])
    step = ModelInput(torch.tensor([7]), at, (SubBatch(1, 1, cache.max_seq_len),), zero, slot_mappings=(place,))

    @torch.inference_mode()
    def run() -> None:
        model.logits(model(step, memory), step.logit_indices)

    return run


def measure(model: Transformer, context: int, names: list[str], repeats: int) -> dict[str, object]:
    runs, bytes_per_token = {}, {}
    for name in names:
        keys, values = split_format_name(name)
        cache = CacheConfig(max_num_seqs=1, max_seq_len=context, block_size=BLOCK, key_dtype=keys, value_dtype=values)
        size = group_bytes(build_groups(attention_specs(model.config), cache)[0])
        bytes_per_token[name] = size.per_token_payload + size.per_token_scales
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
        "computed": str(model.token_embedding.dtype).removeprefix("torch."),
        "milliseconds": {name: round(each, 3) for name, each in wall.items()},
        "cpu_milliseconds": {name: round(each, 3) for name, each in cpu.items()},
        "cpu_ratio": {name: round(each / cpu[names[0]], 3) for name, each in cpu.items()},
        "bytes_per_token": bytes_per_token,
        "repeats": repeats,
        "machine": machine_info(),
        "commit": commit_id(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--formats", nargs="+", default=[*FORMS, "int8/int4"])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of the computation")
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Transformer(MODEL_PRESETS["demo"](4096, max(options.seq_len))).to(getattr(torch, options.dtype)).eval()
    model.fuse_projections()
    for context in options.seq_len:
        print(json.dumps(measure(model, context, options.formats, options.repeats)), flush=True)


if __name__ == "__main__":
    main()
