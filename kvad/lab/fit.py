"""What could I run in so much memory?  Contexts x rows x formats x policies, each planned to the byte, with its price.

Every line is a whole plan (weights, pool and the largest step's work) that stays within the memory asked for: for a
context the most rows, for a number of rows the longest context, found by bisection over ``cache/planning.py``.  What a
line costs in quality is what was measured (``prices.py``), or nothing is said.  No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kvad.cache.formats import get_format, split_format_name
from kvad.cache.named import parse_policy
from kvad.cache.planning import MemoryPlan, binary_search_max, total_bytes_with
from kvad.cache.policy import BlockWindow, EvictionPolicy, Quest, Sinks, Window
from kvad.cache.settle import resolve_for_model
from kvad.cache.sizing import DTYPE_BYTES, MAX_PLANNED_SEQS, CacheConfig
from kvad.cache.weights import weight_bytes
from kvad.errors import ConfigError
from kvad.lab.caches import policy_for_ratio, slots_to_keep
from kvad.lab.prices import MeasuredCosts, find_costs

__all__ = [
    "PolicyChoice",
    "FitRow",
    "MeasuredCost",
    "FitTable",
    "policy_choices",
    "format_choices",
    "find_configurations",
    "weights_shortfall",
]

DEFAULT_POLICIES = ("sinks", "heavy-hitters", "snapkv")
DEFAULT_INTERVAL = 64  # tokens between two cuts, as the policies have it by default


@dataclass(frozen=True)
class PolicyChoice:
    """A policy as it was written, or a family of :data:`~kvad.lab.caches.POLICIES` that drops ``ratio`` of a row."""

    name: str
    ratio: float | None = None

    def policy(self, context: int) -> str:
        if self.ratio is None:
            return self.name
        return policy_for_ratio(
            self.name, self.ratio, context, min(DEFAULT_INTERVAL, slots_to_keep(self.ratio, context))
        )


@dataclass(frozen=True)
class RequestedSeqs:
    """So many rows are asked for, of the longest context; a number alone is a context, of the most rows."""

    count: int


@dataclass(frozen=True)
class MeasuredCost:
    """A price and where it was measured."""

    model: str
    digest: str
    perplexity_ratio: float | None
    kl: float | None
    recall: Mapping[str, float]


@dataclass(frozen=True)
class FitRow:
    """``rows`` rows of ``context`` tokens, stored as ``stored`` under ``policy``, take ``bytes`` bytes with the
    weights.  ``free``: nothing is dropped and nothing is rounded further than the model computes; ``paid``: what was
    measured of it, ``()`` for nothing."""

    num_seqs: int
    context: int
    bytes: int
    cache_format: str
    policy: str
    ratio: float | None
    is_lossless: bool
    measured: tuple[MeasuredCost, ...]

    @property
    def perplexity(self) -> MeasuredCost | None:
        """Of the first model that has one."""
        return next((paid for paid in self.measured if paid.perplexity_ratio is not None), None)

    @property
    def needle(self) -> MeasuredCost | None:
        """Of the first model whose full cache finds it."""
        return next((paid for paid in self.measured if "single" in paid.recall), None)


@dataclass(frozen=True)
class FitTable:
    """``refused``: caches that this model cannot have, and why; ``sources``: where prices were measured."""

    rows: tuple[FitRow, ...]
    refused: tuple[str, ...]
    sources: tuple[str, ...]


def policy_choices(plan: MemoryPlan, ratios: Sequence[float]) -> tuple[PolicyChoice, ...]:
    """Everything; and beside it the policy asked for, or some that drop so much of a row."""
    settled = resolve_for_model(plan.config, plan.cache)
    if settled.exceeds_max_seq_len or plan.cache.overflow != settled.overflow:
        return (PolicyChoice(plan.cache.policy),)  # rows that go on do so under one policy
    if plan.cache.policy != "full":
        return (PolicyChoice("full"), PolicyChoice(plan.cache.policy))
    return (PolicyChoice("full"), *(PolicyChoice(name, ratio) for ratio in ratios for name in DEFAULT_POLICIES))


def format_choices(plan: MemoryPlan) -> tuple[str, ...]:
    """The format asked for; where that is the weights' own, the packed ones beside it."""
    asked = plan.cache.format_name
    more = ("bfloat16", "int8", "int4") if asked == "float32" else ("int8", "int4")
    return (asked,) if asked != plan.weights_dtype else (asked, *more)


def find_configurations(
    plan: MemoryPlan,
    memory: int,
    *,
    contexts: Sequence[int],
    rows: Sequence[int],
    choices: Sequence[PolicyChoice],
    formats: Sequence[str],
    prices: Sequence[MeasuredCosts],
) -> FitTable:
    """For each context the most rows, for each number of rows the longest context; what does not fit has no line."""
    found, refused = list[FitRow](), dict[str, None]()
    wanted: list[int | RequestedSeqs] = [*contexts, *(RequestedSeqs(each) for each in rows)]
    for asked in wanted:
        for choice in choices:
            for form in formats:
                try:
                    found.extend(_fit_row(plan, memory, asked, choice, form, prices))
                except ConfigError as error:
                    refused[f"{form}, {choice.name}: {error.message}"] = None
    said = (("perplexity", [offer.perplexity for offer in found]), ("finds", [offer.needle for offer in found]))
    sources = [
        f"{what}: {each.source}"
        for what, paid in said
        for each in prices
        if any(one is not None and (one.model, one.digest) == (each.model, each.digest) for one in paid)
    ]
    return FitTable(tuple(found), tuple(refused), tuple(dict.fromkeys(sources)))


def _fit_row(
    plan: MemoryPlan,
    memory: int,
    asked: int | RequestedSeqs,
    choice: PolicyChoice,
    form: str,
    prices: Sequence[MeasuredCosts],
) -> Iterator[FitRow]:
    keys, values = split_format_name(form)

    def cache_of(rows: int, context: int) -> CacheConfig:
        policy = choice.policy(context)
        stored = {} if form == plan.cache.format_name else {"keys": keys, "values": values}
        return replace(plan.cache, max_num_seqs=rows, max_seq_len=context, policy=policy, num_blocks=None, **stored)  # type: ignore[arg-type]

    def total(rows: int, context: int) -> int:
        return total_bytes_with(plan, cache_of(rows, context))

    if isinstance(asked, RequestedSeqs):
        rows, context = asked.count, plan.config.max_seq_len
        unit = min(plan.cache.block_size, context)
        if total(rows, context) > memory:
            context = unit * binary_search_max(context // unit, lambda n: total(asked.count, unit * n) <= memory)
    else:
        context = asked
        rows = binary_search_max(MAX_PLANNED_SEQS, lambda n: total(n, context) <= memory)
    if rows and context:
        asked_for = cache_of(rows, context)
        policy = resolve_for_model(plan.config, asked_for).policy
        another = policy != asked_for.policy  # rows go on under it when they are full
        kept = _name(choice, context)[0] == "full" and (not another or plan.cache.overflow == "spill")
        free = kept and _exact(form, plan.weights_dtype)
        paid = (
            ()
            if free or (another and plan.cache.overflow != "spill")
            else _measured_cost(plan, choice, form, context, prices)
        )
        yield FitRow(rows, context, total(rows, context), form, policy, choice.ratio, free, paid)


def _exact(form: str, computed: str) -> bool:
    return all(
        get_format(name).loss != "lossy" and get_format(name).bits >= 8 * DTYPE_BYTES[computed]
        for name in split_format_name(form)
    )


def _measured_cost(
    plan: MemoryPlan, choice: PolicyChoice, form: str, context: int, prices: Sequence[MeasuredCosts]
) -> tuple[MeasuredCost, ...]:
    """A policy's own price is of what is stored as it was computed; with another format it goes as "snapkv+int8"."""
    name, ratio = _name(choice, context)
    if name == "full":
        found = find_costs(prices, form, 0.0)
    else:
        cache = name if _exact(form, plan.weights_dtype) else f"{name}+{form}"
        found = find_costs(prices, cache, ratio)
    return tuple(
        MeasuredCost(each.model, each.digest, price.perplexity_ratio, price.kl, price.recall) for each, price in found
    )


def _name(choice: PolicyChoice, context: int) -> tuple[str, float]:
    """What a choice is called in a bench, and which share of a row it drops.

    sinks(4, 1020), 4,096 tokens  ->  "sinks", 0.75
    """
    if choice.ratio is not None:
        return choice.name, choice.ratio
    policy = parse_policy(choice.name)
    if isinstance(policy, Sinks):
        stay = policy.num_sinks + policy.window
    elif isinstance(policy, Window | BlockWindow):
        stay = policy.size
    elif isinstance(policy, EvictionPolicy | Quest):  # of quest's: what is read
        stay = policy.budget
    else:
        return str(policy), 0.0
    return (policy.name, 1 - stay / context) if stay < context else ("full", 0.0)


def weights_shortfall(plan: MemoryPlan, memory: int) -> tuple[int, str, int] | None:
    """Where the weights alone are too large: by how many bytes, the smallest dtype that they could have, and what they
    take then.  None where they are not."""
    if plan.weights <= memory:
        return None
    return plan.weights - memory, "bfloat16", weight_bytes(plan.config, "bfloat16")
