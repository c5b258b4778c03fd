"""Cache variants to compare, by name: formats, and policies for a budget. No torch.

``benchmarks/variants.py`` builds engines from them, ``fit.py`` a table of what would fit, ``verify/scenario.py`` test
cases.

A budget is counted in *slots*: the largest number of tokens, or entries that represent tokens, that a policy retains of
a sequence. A quantized slot and a summary count as one each, so the number is independent of the head size; bytes
are computed in ``cache/sizing``. ``quest`` keeps everything: its budget is what a query reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from kvad import cache
from kvad.cache import parse_policy

RATIOS = (0.25, 0.5, 0.75, 0.875)
SINKS = 4
DEFAULT_BLOCK_SIZE = 16
OBSERVED_QUERIES = 16  # queries that SnapKV observes: its default of 32 would be most of a short sequence's budget
KERNEL = 5  # SnapKV's default
SUMMARY_RATIO = 8  # tokens of a summary, if a block can be divided so
CACHE_FORMATS = ("bfloat16", "float16", "fp8-e4m3", "int8", "int4")  # of keys and values


class PolicySize(NamedTuple):
    """Size of a policy."""

    length: int  # tokens of the sequence
    num_retained: int  # slots that stay
    interval: int  # tokens between two evictions
    block: int = DEFAULT_BLOCK_SIZE
    observed_queries: int = OBSERVED_QUERIES  # by SnapKV
    kernel: int = KERNEL  # neighbors that SnapKV averages


def _sinks(size: PolicySize) -> str:
    first = min(SINKS, max(1, size.num_retained // 4))
    return f"sinks({first}, {max(1, size.num_retained - first)})"


def _block_window(size: PolicySize) -> str:
    block = "" if size.num_retained >= size.block else f", block_size={size.num_retained}"
    return f"block-window({size.num_retained}{block})"


def _snapkv(size: PolicySize) -> str:
    kernel = "" if size.kernel == KERNEL else f", kernel={size.kernel}"
    window = min(size.observed_queries, size.interval, size.num_retained)
    return f"snapkv({size.num_retained}, interval={size.interval}, window={window}{kernel})"


def _quantized_policy(size: PolicySize) -> str:
    """Build a policy with a quarter unchanged, a block in transit, the rest quantized and older tokens dropped.

    256 slots in blocks of 8:  56 + 8 unchanged, 192 quantized
    """
    recent, quantized = _split(size.num_retained - size.block, size.block)
    return f"tiered({recent}, quantized={quantized}, interval={size.block})"


def _tiered(size: PolicySize) -> str:
    """Build a tiered policy with summaries of older tokens (at least one block); tokens without room are dropped.

    512 tokens, 256 slots in blocks of 8:  48 + 8 unchanged, 160 quantized, 40 summaries (of 304 tokens, and of 16 more)
    """
    ratio = SUMMARY_RATIO if size.block % SUMMARY_RATIO == 0 else size.block
    num_unsummarized = (size.num_retained - size.block - size.length // ratio) * ratio // (ratio - 1)
    recent, quantized = _split(num_unsummarized, size.block)
    summaries = max(1, (size.num_retained - size.block - recent - quantized) // size.block) * size.block
    return f"tiered({recent}, quantized={quantized}, interval={size.block}, summaries={summaries}, ratio={ratio})"


def _split(slots: int, block: int) -> tuple[int, int]:
    """Split slots into whole blocks, a quarter and the rest; each has at least one block."""
    blocks = max(2, slots // block)
    recent = max(1, blocks // 4)
    return recent * block, (blocks - recent) * block


# Values of CacheConfig.policy: all named policies (cache/policy_parser.py) except "full".
POLICY_BUILDERS: dict[str, Callable[[PolicySize], str]] = {
    "window": lambda size: f"window({size.num_retained})",
    "sinks": _sinks,
    "block-window": _block_window,
    "heavy-hitters": lambda size: f"heavy-hitters({size.num_retained}, interval={size.interval})",
    "snapkv": _snapkv,
    "tova": lambda size: f"tova({size.num_retained}, interval={size.interval})",
    "key-norm": lambda size: f"key-norm({size.num_retained}, interval={size.interval})",
    "random": lambda size: f"random({size.num_retained}, interval={size.interval})",
    "tiered": _tiered,
    "quest": lambda size: f"quest({max(size.num_retained, size.block)})",
}
# Policies with levels: they need blocks that are small compared with the budget (hierarchy_block_size).
TIERED_POLICIES: dict[str, Callable[[PolicySize], str]] = {"tiered": _tiered, "packed": _quantized_policy}


def slots_to_keep(ratio: float, length: int) -> int:
    """Return the number of slots that stay if the share ``ratio`` of ``length`` tokens is dropped."""
    return max(1, round((1 - ratio) * length))


def policy_for_ratio(name: str, ratio: float, length: int, interval: int, block: int = DEFAULT_BLOCK_SIZE) -> str:
    """Build the named policy that drops this share; Quest's budget is rounded down to whole blocks (at least one)."""
    num_retained = slots_to_keep(ratio, length)
    if name == "quest":
        num_retained = num_retained // block * block
    return {**POLICY_BUILDERS, **TIERED_POLICIES}[name](PolicySize(length, num_retained, interval, block))


def hierarchy_block_size(num_slots: int) -> int:
    """Return the block size of a tiered policy: each of its four parts has at least one block."""
    return next((block for block in (8, 4) if 4 * block <= num_slots), 2)


def policy_for_format(policy: str, stored: str) -> str:
    """Adapt a policy to the storage format: a tiered policy quantizes to no wider format."""
    levels = parse_policy(policy).stateful
    if not isinstance(levels, cache.policy.TieredPolicy):  # offloaded tokens keep their format
        return policy
    formats = levels.key_format, levels.value_format
    keys, values = (
        min(pair, key=lambda name: cache.quantization.get_format(name).bits)
        for pair in zip(formats, cache.quantization.split_format_name(stored), strict=True)
    )
    return policy if (keys, values) == formats else str(replace(levels, key_format=keys, value_format=values))
