"""Whether there is room to verify: what the logits and the memories of ``kvad verify`` take, before any is made."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from kvad.cache.planning import plan_memory
from kvad.cache.sizing import CacheConfig
from kvad.config import ModelConfig, attention_specs
from kvad.errors import MemoryPlanError
from kvad.lab.compare import format_loss
from kvad.lab.scenario import ScenarioOptions, longest_source

__all__ = ["require_verify_memory"]

MAX_SEQS = 1 << 40  # what would fit is not looked for beyond


def require_verify_memory(
    config: ModelConfig, lengths: Sequence[int], options: ScenarioOptions, available: int | None
) -> None:
    """MemoryPlanError when verifying needs more than is ``available`` (None: nobody knows); it says what would fit.

    ``lengths``: tokens of the prompts; rows of ``options`` beyond them have a prompt of one token.
    """
    prompts = sorted(lengths, reverse=True)
    logits, rest = _needs(config, prompts, options, options.num_seqs)
    if available is None or logits + rest <= available:
        return
    fit = bisect.bisect_right(
        range(1, min(options.num_seqs, MAX_SEQS)),
        available,
        key=lambda rows: sum(_needs(config, prompts, options, rows)),
    )
    raise MemoryPlanError(
        f"--rows {options.num_seqs}: verifying takes about {_size(logits + rest)} (logits of the judge and the memories "
        f"{_size(logits)}, weights, cache and work {_size(rest)}) and {_size(available)} is available",
        f"what would fit: --rows {fit}" if fit else "not even one row fits: take fewer --tokens, or a smaller model",
    )


def _needs(config: ModelConfig, prompts: Sequence[int], options: ScenarioOptions, rows: int) -> tuple[int, int]:
    """(bytes of the logits that are held at once, bytes of everything else) of so many rows, the longest ones.

    Logits stand in float32 and float64 for the judge and for that of a policy, in float64 for the twin of each layout,
    and in float32 for the memory at hand; each lossy format has a judge in float64 too, beside its memory's.
    The rest is the weights in both
    precisions and the larger layout's twin, as it is planned.
    """
    known = prompts[:rows]
    shares = options.prefix_hit and "paged" in options.layouts
    every = [*known, known[min(1, len(known) - 1)], *known[: int(shares)]]  # the forked sample, the shared prefix
    seats = rows - len(known) + len(every)
    lossy = sum(format_loss(dtype) == "lossy" for dtype in options.dtypes)
    masked = 16 * any(policy != "full" for policy in options.policies)  # a judge of each policy in turn
    numbers = 16 + masked + 8 * len(options.layouts) * len(options.rotates) + 8 * (lossy + bool(lossy))
    logits = (sum(every) + rows - len(known) + seats * options.tokens) * config.vocab_size * numbers
    size, longest = options.block_size, known[0] + options.tokens
    blocks = sum(-(-(length + options.tokens) // size) for length in every)
    blocks += (rows - len(known)) * -(-(1 + options.tokens) // size)
    tight = options.preempt and any(spec.window is None for spec in attention_specs(config))
    rest = 0
    for layout in options.layouts:
        cache = CacheConfig(
            layout="paged" if layout == "paged" else "contiguous",
            dtype="float64",
            block_size=size,
            max_num_seqs=seats,
            max_seq_len=longest,
            prefill_chunk_size=options.chunk,
            num_blocks=max(-(-longest // size) + 1, blocks // 2) if tight and layout == "paged" else None,
            max_source_len=longest_source(config),
        )
        plan = plan_memory(config, cache, weights_dtype="float64", budget=options.chunk + seats)
        rest = max(rest, plan.total + plan.weights // 2)
    return logits, rest


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
