"""What could I run in so much memory?  Contexts x rows x formats x policies, each planned to the byte, with its price.

Every line is a whole plan (weights, pool and the largest step's work) that stays within the memory asked for: for a
context the most rows, for a number of rows the longest context, found by bisection over ``cache/planning.py``.  What a
line costs in quality is what was measured (``prices.py``), or nothing is said.  No torch.

What a cache costs in quality, as it was measured: ``prices.json`` beside this file, with where each number is from.

    kvad bench cache-quality MODEL --out FOLDER               # lines of JSON
    python -m kvad.planning.fit --merge FOLDER > runs/X.jsonl   # fewer: a kind's depths in one line
    python -m kvad.planning.fit runs/X.jsonl...                 # from either: prices.json anew, in that order

Nothing is between the numbers: what was not measured has no price.  A price is of the model that it was measured on;
another one pays another, and ``kvad plan --prices FOLDER`` reads one's own lines instead.  No torch.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvad import cache as cache_lib
from kvad import config
from kvad.cache import CacheConfig, parse_policy, resolve_for_model, sizing
from kvad.cache.sizing import MemoryPlan
from kvad.errors import ConfigError, DataError
from kvad.planning.cache_presets import policy_for_ratio, slots_to_keep

PACKAGED_COSTS = Path(__file__).with_name("cache_costs.json")
LINES_FILE = "cache-quality.jsonl"
MIN_FULL_RECALL = (
    0.95  # lab/quality.py's, which imports torch: recall of the full cache below which another's says nothing
)
MAX_RATIO_GAP = 0.005  # a ratio is another one beyond that


@dataclass(frozen=True)
class CacheCost:
    """One cache on one model.  ``times``: perplexity over that without a cache; ``kl`` in nats; ``recall`` by kind of
    task.  None, or no such kind: not measured."""

    cache: str
    ratio: float
    perplexity_ratio: float | None
    kl: float | None
    recall: Mapping[str, float]


@dataclass(frozen=True)
class MeasuredCosts:
    """The caches of one bench: ``model`` by name, ``digest`` of its weights, ``options`` of the bench."""

    model: str
    digest: str
    commit: str
    machine: str
    options: Mapping[str, Any]
    costs: tuple[CacheCost, ...]

    @property
    def source(self) -> str:
        """Where the numbers are from, in a line."""
        long = max([*self.options.get("lengths", ()), self.options.get("text_length", 0)])
        return (
            f"{self.model}, {long:,} tokens, asked {self.options.get('asked', 'after')} the cut, commit {self.commit}"
        )


def read_costs(path: Path = PACKAGED_COSTS) -> tuple[MeasuredCosts, ...]:
    """Of ``prices.json``, or of a bench's own lines (a file, or the folder that holds them).  DataError for neither."""
    where, text = _text(path)
    try:
        if where.suffix == ".jsonl":
            return (collect_costs(_lines(text)),)
        return tuple(_measured(each) for each in json.loads(text)["measured"])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise _no_costs_error(where, error) from error


def read_cost_lines(path: Path) -> list[dict[str, Any]]:
    """A bench's lines, from a file or the folder that holds them, :func:`merged`.  DataError where there are none."""
    where, text = _text(path)
    try:
        return merge_depths(_lines(text))
    except (ValueError, KeyError, TypeError) as error:
        raise _no_costs_error(where, error) from error


def _text(path: Path) -> tuple[Path, str]:
    where = path / LINES_FILE if path.is_dir() else path
    try:
        return where, where.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot read {where}: {error.strerror or error}") from error


def _lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def _no_costs_error(where: Path, error: Exception) -> DataError:
    return DataError(f"{where} holds no prices: {error!r}", "give the --out of kvad bench cache-quality")


def _measured(each: Mapping[str, Any]) -> MeasuredCosts:
    return MeasuredCosts(**{**each, "prices": tuple(CacheCost(**price) for price in each["prices"])})


def collect_costs(lines: Sequence[Mapping[str, Any]]) -> MeasuredCosts:
    """A bench's lines as prices: the mean of each kind's cells, where the full cache finds what was hidden."""
    first = lines[0]
    says = {cell for cell in _cells(lines, "full", 0.0) if _mean(_cells(lines, "full", 0.0)[cell]) > MIN_FULL_RECALL}
    prices = []
    for cache, ratio in dict.fromkeys((line["cache"], line["ratio"]) for line in lines):
        own = [line for line in lines if (line["cache"], line["ratio"]) == (cache, ratio)]
        text = next((line for line in own if line["measure"] == "text"), None)
        kinds: dict[str, list[float]] = {}
        for (kind, length), found in _cells(lines, cache, ratio).items():
            if (kind, length) in says:
                kinds.setdefault(kind, []).extend(found)
        recall = {kind: round(_mean(found), 4) for kind, found in kinds.items()}
        prices.append(CacheCost(cache, ratio, _short(text, "price"), _short(text, "kl"), recall))
    name = Path(str(first["model"]).rstrip("/")).name
    return MeasuredCosts(
        name, first["digest"], first["commit"], first["machine"], dict(first["options"]), tuple(prices)
    )


def merge_depths(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The depths of a cache, kind and length in one line, their mean; what it says of prices is the same."""
    found: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for line in lines:
        found.setdefault(tuple(line[name] for name in ("cache", "ratio", "measure", "length")), []).append(line)
    made = []
    for some in found.values():
        line = {name: value for name, value in some[0].items() if name != "depth"}
        if "recall" in line:
            line |= {"recall": _mean([each["recall"] for each in some]), "tasks": sum(each["tasks"] for each in some)}
        made.append(line)
    return made


def _cells(lines: Sequence[Mapping[str, Any]], cache: str, ratio: float) -> dict[tuple[str, int], list[float]]:
    found: dict[tuple[str, int], list[float]] = {}
    for line in lines:
        if (line["cache"], line["ratio"]) == (cache, ratio) and line["measure"] != "text":
            found.setdefault((line["measure"], line["length"]), []).append(line["recall"])
    return found


def _short(line: Mapping[str, Any] | None, name: str) -> float | None:
    return None if line is None or line[name] is None else float(f"{line[name]:.5g}")


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def find_costs(measured: Sequence[MeasuredCosts], cache: str, ratio: float) -> list[tuple[MeasuredCosts, CacheCost]]:
    """Of this cache at this ratio, from every model that it was measured on."""
    return [
        (each, price)
        for each in measured
        for price in each.costs
        if price.cache == cache and abs(price.ratio - ratio) <= MAX_RATIO_GAP
    ]


def main(arguments: Sequence[str]) -> None:
    """Write ``prices.json`` from the lines in files or folders; or, after ``--merge``, print them merged."""
    if arguments[:1] == ["--merge"]:
        for folder in arguments[1:]:
            print("\n".join(json.dumps(line) for line in read_cost_lines(Path(folder))))
        return
    found = [each for folder in arguments for each in read_costs(Path(folder))]
    plain = [{**vars(each), "prices": [vars(price) for price in each.costs]} for each in found]
    rows = [
        json.dumps({**each, "prices": "@"}).replace(
            '"@"', "[\n   " + ",\n   ".join(json.dumps(price) for price in each["prices"]) + "\n  ]"
        )
        for each in plain
    ]
    PACKAGED_COSTS.write_text('{"measured": [\n  ' + ",\n  ".join(rows) + "\n]}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])


DEFAULT_POLICIES = ("sinks", "heavy-hitters", "snapkv")
DEFAULT_INTERVAL = 64  # tokens between two cuts, as the policies have it by default


@dataclass(frozen=True)
class PolicyChoice:
    """A policy as it was written, or a family of :data:`~kvad.planning.cache_presets.POLICY_BUILDERS` that drops ``ratio`` of a row."""

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
    keys, values = cache_lib.quantization.split_format_name(form)

    def cache_of(rows: int, context: int) -> CacheConfig:
        policy = choice.policy(context)
        stored = {} if form == plan.cache.format_name else {"keys": keys, "values": values}
        return replace(plan.cache, max_num_seqs=rows, max_seq_len=context, policy=policy, num_blocks=None, **stored)  # type: ignore[arg-type]

    def total(rows: int, context: int) -> int:
        return sizing.memory_plan.total_bytes_with(plan, cache_of(rows, context))

    if isinstance(asked, RequestedSeqs):
        rows, context = asked.count, plan.config.max_seq_len
        unit = min(plan.cache.block_size, context)
        if total(rows, context) > memory:
            context = unit * sizing.memory_plan.binary_search_max(
                context // unit, lambda n: total(asked.count, unit * n) <= memory
            )
    else:
        context = asked
        rows = sizing.memory_plan.binary_search_max(
            cache_lib.groups.MAX_PLANNED_SEQS, lambda n: total(n, context) <= memory
        )
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
        cache_lib.quantization.get_format(name).loss != "lossy"
        and cache_lib.quantization.get_format(name).bits >= 8 * config.DTYPE_BYTES[computed]
        for name in cache_lib.quantization.split_format_name(form)
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
    if isinstance(policy, cache_lib.policy.Sinks):
        stay = policy.num_sinks + policy.window
    elif isinstance(policy, cache_lib.policy.Window | cache_lib.policy.BlockWindow):
        stay = policy.size
    elif isinstance(policy, cache_lib.policy.EvictionPolicy | cache_lib.policy.Quest):  # of quest's: what is read
        stay = policy.budget
    else:
        return str(policy), 0.0
    return (policy.name, 1 - stay / context) if stay < context else ("full", 0.0)


def weights_shortfall(plan: MemoryPlan, memory: int) -> tuple[int, str, int] | None:
    """Where the weights alone are too large: by how many bytes, the smallest dtype that they could have, and what they
    take then.  None where they are not."""
    if plan.weights <= memory:
        return None
    return plan.weights - memory, "bfloat16", config.parameter_shapes.weight_bytes(plan.config, "bfloat16")
