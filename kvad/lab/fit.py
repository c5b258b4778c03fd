"""What could I run in so much memory?  Contexts x rows x formats x policies, each planned to the byte, with its price.

Every line is a whole plan (weights, pool and the largest step's work) that stays within the memory asked for: for a
context the most rows, for a number of rows the longest context, found by bisection over ``cache/planning.py``.  What a
line costs in quality is what was measured (``prices.py``), or nothing is said.  No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kvad.cache.formats import find_format, parted
from kvad.cache.named import parse_policy
from kvad.cache.planning import MemoryPlan, largest, planned_total
from kvad.cache.policy import Quest, Scored, Sinks, Truncate, Window
from kvad.cache.settle import settle
from kvad.cache.sizing import DTYPE_BYTES, MOST_ROWS, CacheConfig
from kvad.cache.weights import weight_bytes
from kvad.errors import ConfigError
from kvad.lab.caches import budget_of, sized_for
from kvad.lab.prices import Measured, find_prices

__all__ = ["Choice", "Offer", "Paid", "Table", "choices_of", "formats_of", "offers", "shortfall"]

FAMILIES = ("sinks", "heavy-hitters", "snapkv")
EVERY = 64  # tokens between two cuts, as the policies have it by default


@dataclass(frozen=True)
class Choice:
    """A policy as it was written, or a family of :data:`~kvad.lab.caches.POLICIES` that drops ``ratio`` of a row."""

    name: str
    ratio: float | None = None

    def policy(self, context: int) -> str:
        if self.ratio is None:
            return self.name
        return sized_for(self.name, self.ratio, context, min(EVERY, budget_of(self.ratio, context)))


@dataclass(frozen=True)
class Rows:
    """So many rows are asked for, of the longest context; a number alone is a context, of the most rows."""

    count: int


@dataclass(frozen=True)
class Paid:
    """A price and where it was measured."""

    model: str
    digest: str
    times: float | None
    kl: float | None
    recall: Mapping[str, float]


@dataclass(frozen=True)
class Offer:
    """``rows`` rows of ``context`` tokens, stored as ``stored`` under ``policy``, take ``bytes`` bytes with the
    weights.  ``free``: nothing is dropped and nothing is rounded further than the model computes; ``paid``: what was
    measured of it, ``()`` for nothing."""

    rows: int
    context: int
    bytes: int
    stored: str
    policy: str
    ratio: float | None
    free: bool
    paid: tuple[Paid, ...]

    @property
    def perplexity(self) -> Paid | None:
        """Of the first model that has one."""
        return next((paid for paid in self.paid if paid.times is not None), None)

    @property
    def needle(self) -> Paid | None:
        """Of the first model whose full cache finds it."""
        return next((paid for paid in self.paid if "single" in paid.recall), None)


@dataclass(frozen=True)
class Table:
    """``refused``: caches that this model cannot have, and why; ``sources``: where prices were measured."""

    offers: tuple[Offer, ...]
    refused: tuple[str, ...]
    sources: tuple[str, ...]


def choices_of(plan: MemoryPlan, ratios: Sequence[float]) -> tuple[Choice, ...]:
    """Everything; and beside it the policy asked for, or some that drop so much of a row."""
    settled = settle(plan.config, plan.cache)
    if settled.outgrown or plan.cache.on_full != settled.on_full:
        return (Choice(plan.cache.policy),)  # rows that go on do so under one policy
    if plan.cache.policy != "full":
        return (Choice("full"), Choice(plan.cache.policy))
    return (Choice("full"), *(Choice(name, ratio) for ratio in ratios for name in FAMILIES))


def formats_of(plan: MemoryPlan) -> tuple[str, ...]:
    """The format asked for; where that is the weights' own, the packed ones beside it."""
    asked = plan.cache.stored
    more = ("bfloat16", "int8", "int4") if asked == "float32" else ("int8", "int4")
    return (asked,) if asked != plan.weights_dtype else (asked, *more)


def offers(
    plan: MemoryPlan,
    memory: int,
    *,
    contexts: Sequence[int],
    rows: Sequence[int],
    choices: Sequence[Choice],
    formats: Sequence[str],
    prices: Sequence[Measured],
) -> Table:
    """For each context the most rows, for each number of rows the longest context; what does not fit has no line."""
    found, refused = list[Offer](), dict[str, None]()
    wanted: list[int | Rows] = [*contexts, *(Rows(each) for each in rows)]
    for asked in wanted:
        for choice in choices:
            for form in formats:
                try:
                    found.extend(_offer(plan, memory, asked, choice, form, prices))
                except ConfigError as error:
                    refused[f"{form}, {choice.name}: {error.message}"] = None
    said = (("perplexity", [offer.perplexity for offer in found]), ("finds", [offer.needle for offer in found]))
    sources = [
        f"{what}: {each.source}"
        for what, paid in said
        for each in prices
        if any(one is not None and (one.model, one.digest) == (each.model, each.digest) for one in paid)
    ]
    return Table(tuple(found), tuple(refused), tuple(dict.fromkeys(sources)))


def _offer(
    plan: MemoryPlan,
    memory: int,
    asked: int | Rows,
    choice: Choice,
    form: str,
    prices: Sequence[Measured],
) -> Iterator[Offer]:
    keys, values = parted(form)

    def cache_of(rows: int, context: int) -> CacheConfig:
        policy = choice.policy(context)
        stored = {} if form == plan.cache.stored else {"keys": keys, "values": values}
        return replace(plan.cache, rows=rows, capacity=context, policy=policy, blocks=None, **stored)  # type: ignore[arg-type]

    def total(rows: int, context: int) -> int:
        return planned_total(plan, cache_of(rows, context))

    if isinstance(asked, Rows):
        rows, context = asked.count, plan.config.limit
        unit = min(plan.cache.block_size, context)
        if total(rows, context) > memory:
            context = unit * largest(context // unit, lambda n: total(asked.count, unit * n) <= memory)
    else:
        context = asked
        rows = largest(MOST_ROWS, lambda n: total(n, context) <= memory)
    if rows and context:
        asked_for = cache_of(rows, context)
        policy = settle(plan.config, asked_for).policy
        another = policy != asked_for.policy  # rows go on under it when they are full
        kept = _name(choice, context)[0] == "full" and (not another or plan.cache.on_full == "spill")
        free = kept and _exact(form, plan.weights_dtype)
        paid = () if free or (another and plan.cache.on_full != "spill") else _paid(plan, choice, form, context, prices)
        yield Offer(rows, context, total(rows, context), form, policy, choice.ratio, free, paid)


def _exact(form: str, computed: str) -> bool:
    return all(
        find_format(name).loss != "lossy" and find_format(name).bits >= 8 * DTYPE_BYTES[computed]
        for name in parted(form)
    )


def _paid(plan: MemoryPlan, choice: Choice, form: str, context: int, prices: Sequence[Measured]) -> tuple[Paid, ...]:
    """A policy's own price is of what is stored as it was computed; with another format it goes as "snapkv+int8"."""
    name, ratio = _name(choice, context)
    if name == "full":
        found = find_prices(prices, form, 0.0)
    else:
        cache = name if _exact(form, plan.weights_dtype) else f"{name}+{form}"
        found = find_prices(prices, cache, ratio)
    return tuple(Paid(each.model, each.digest, price.times, price.kl, price.recall) for each, price in found)


def _name(choice: Choice, context: int) -> tuple[str, float]:
    """What a choice is called in a bench, and which share of a row it drops.

    sinks(4, 1020), 4,096 tokens  ->  "sinks", 0.75
    """
    if choice.ratio is not None:
        return choice.name, choice.ratio
    policy = parse_policy(choice.name)
    if isinstance(policy, Sinks):
        stay = policy.sinks + policy.window
    elif isinstance(policy, Window | Truncate):
        stay = policy.size
    elif isinstance(policy, Scored | Quest):  # of quest's: what is read
        stay = policy.budget
    else:
        return str(policy), 0.0
    return (policy.name, 1 - stay / context) if stay < context else ("full", 0.0)


def shortfall(plan: MemoryPlan, memory: int) -> tuple[int, str, int] | None:
    """Where the weights alone are too large: by how many bytes, the smallest dtype that they could have, and what they
    take then.  None where they are not."""
    if plan.weights <= memory:
        return None
    return plan.weights - memory, "bfloat16", weight_bytes(plan.config, "bfloat16")
