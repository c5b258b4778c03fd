"""Configurations that fit into a given memory, with their measured quality: lengths x sequences x formats x policies.

Every row is a whole plan (weights, pool and the activations of the largest step) within the memory: for a length the
most sequences, for a number of sequences the greatest length, found by bisection over ``cache/sizing``. No torch.

Quality is a measured value or omitted. The values, with their sources, are in ``cache_costs.json`` next to this file:

    kvad bench cache-quality MODEL --out FOLDER                 # lines of JSON
    python -m kvad.planning.fit --merge FOLDER > dev/results/X.jsonl   # fewer: a kind's depths in one line
    python -m kvad.planning.fit dev/results/X.jsonl...                 # writes cache_costs.json, in that order

Nothing is interpolated. A cost holds for the model that it was measured on; ``kvad plan --quality-results FOLDER``
reads other lines instead.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from kvad import cache as cache_lib
from kvad import config, storage
from kvad.cache import CacheConfig, parse_policy, resolve_for_model, sizing
from kvad.cache.sizing import MemoryPlan
from kvad.errors import ConfigError, DataError
from kvad.planning.cache_presets import policy_for_ratio, slots_to_keep

PACKAGED_COSTS = Path(__file__).with_name("cache_costs.json")
LINES_FILE = "cache-quality.jsonl"
# As in benchmarks/cache_quality.py, which imports torch: below it, other caches' recall is not informative.
MIN_FULL_RECALL = 0.95
MAX_RATIO_GAP = 0.005  # larger differences are another ratio
T = TypeVar("T")


@dataclass(frozen=True)
class CacheCost:
    """Quality of one cache on one model.

    ``perplexity_ratio``: to the perplexity without a cache; ``kl`` in nats; ``recall`` by kind of task. None, or a
    missing kind: not measured.
    """

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
        """Source of the numbers, in one line."""
        long = max([*self.options.get("lengths", ()), self.options.get("text_length", 0)])
        position = self.options.get("question_position", "after")
        return f"{self.model}, {long:,} tokens, asked {position} eviction, commit {self.commit}"


def read_costs(path: Path = PACKAGED_COSTS) -> tuple[MeasuredCosts, ...]:
    """Read ``cache_costs.json``, or the lines of a bench (a file, or its folder); DataError if it is neither."""

    def parse(file: Path, text: str) -> tuple[MeasuredCosts, ...]:
        if file.suffix == ".jsonl":
            return (collect_costs(_lines(text)),)
        return tuple(
            MeasuredCosts(**{**each, "costs": tuple(CacheCost(**cost) for cost in each["costs"])})
            for each in storage.strict_json.loads(text)["measured"]
        )

    return _parse_file(path, parse)


def read_cost_lines(path: Path) -> list[dict[str, Any]]:
    """Read a bench's lines from a file or its folder, merged by ``merge_depths``; DataError if there are none."""
    return _parse_file(path, lambda _, text: merge_depths(_lines(text)))


def _parse_file(path: Path, parse: Callable[[Path, str], T]) -> T:
    file = path / LINES_FILE if path.is_dir() else path
    try:
        return parse(file, storage.filesystem.read_text(file))
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise DataError(f"{file} has no costs: {error!r}", "Give the --out of kvad bench cache-quality.") from error


def _lines(text: str) -> list[dict[str, Any]]:
    return [storage.strict_json.loads(line) for line in text.splitlines() if line.strip()]


def collect_costs(lines: Sequence[Mapping[str, Any]]) -> MeasuredCosts:
    """Compute costs from a bench's lines: the mean of each kind's cells for which the full cache finds the needle."""
    first, costs, by_cache = lines[0], [], _group_by(lines, "cache", "ratio")
    tasks_of_full = [line for line in by_cache.get(("full", 0.0), ()) if line["measure"] != "text"]
    cells = _group_by(tasks_of_full, "measure", "length")
    informative = {cell for cell, group in cells.items() if _mean_recall(group) > MIN_FULL_RECALL}
    for (cache, ratio), own_lines in by_cache.items():
        text = next((line for line in own_lines if line["measure"] == "text"), None)
        tasks = [line for line in own_lines if (line["measure"], line["length"]) in informative]
        recall = {kind: round(_mean_recall(group), 4) for (kind,), group in _group_by(tasks, "measure").items()}
        costs.append(CacheCost(cache, ratio, _short(text, "perplexity_ratio"), _short(text, "kl"), recall))
    name = Path(str(first["model"]).rstrip("/")).name
    return MeasuredCosts(name, first["digest"], first["commit"], first["machine"], dict(first["options"]), tuple(costs))


def merge_depths(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Merge the depths of a cache, kind and length into one line with their mean; the costs are unchanged."""
    merged = []
    for group in _group_by(lines, "cache", "ratio", "measure", "length").values():
        line = {name: value for name, value in group[0].items() if name != "depth"}
        if "recall" in line:
            line |= {"recall": _mean_recall(group), "tasks": sum(each["tasks"] for each in group)}
        merged.append(line)
    return merged


def _group_by(lines: Sequence[Mapping[str, Any]], *names: str) -> dict[tuple[Any, ...], list[Mapping[str, Any]]]:
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for line in lines:
        groups.setdefault(tuple(line[name] for name in names), []).append(line)
    return groups


def _mean_recall(lines: Sequence[Mapping[str, Any]]) -> float:
    return fmean([line["recall"] for line in lines])


def _short(line: Mapping[str, Any] | None, name: str) -> float | None:
    return None if line is None or line[name] is None else float(f"{line[name]:.5g}")


def find_costs(measured: Sequence[MeasuredCosts], cache: str, ratio: float) -> tuple[MeasuredCost, ...]:
    """Return the costs of this cache at this ratio, on every model that it was measured on."""
    return tuple(
        MeasuredCost(costs.model, costs.digest, cost.perplexity_ratio, cost.kl, cost.recall)
        for costs in measured
        for cost in costs.costs
        if cost.cache == cache and abs(cost.ratio - ratio) <= MAX_RATIO_GAP
    )


def main(arguments: Sequence[str]) -> None:
    """Write ``cache_costs.json`` from files or folders of lines; after ``--merge``, print them merged."""
    if arguments[:1] == ["--merge"]:
        for folder in arguments[1:]:
            print("\n".join(json.dumps(line) for line in read_cost_lines(Path(folder))))
        return
    measured = [costs for folder in arguments for costs in read_costs(Path(folder))]
    rows = []
    for costs in measured:
        lines = ",\n   ".join(json.dumps(vars(cost)) for cost in costs.costs)
        rows.append(json.dumps({**vars(costs), "costs": "@"}).replace('"@"', f"[\n   {lines}\n  ]"))
    PACKAGED_COSTS.write_text('{"measured": [\n  ' + ",\n  ".join(rows) + "\n]}\n", encoding="utf-8")


DEFAULT_POLICIES = ("sinks", "heavy-hitters", "snapkv")
DEFAULT_INTERVAL = 64  # tokens between two evictions, the policies' default


@dataclass(frozen=True)
class PolicyChoice:
    """A policy in full, or the name of one of ``POLICY_BUILDERS`` that drops ``ratio``."""

    name: str
    ratio: float | None = None

    def policy(self, context: int) -> str:
        if self.ratio is None:
            return self.name
        interval = min(DEFAULT_INTERVAL, slots_to_keep(self.ratio, context))
        return policy_for_ratio(self.name, self.ratio, context, interval)


@dataclass(frozen=True)
class MeasuredCost:
    """A cost and the model that it was measured on."""

    model: str
    digest: str
    perplexity_ratio: float | None
    kl: float | None
    recall: Mapping[str, float]


@dataclass(frozen=True)
class FitRow:
    """A configuration that fits; ``bytes`` includes the weights.

    ``is_lossless``: nothing is dropped or rounded further than the model computes; ``measured``: costs, if any.
    """

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
        """The cost on the first model with a measured perplexity."""
        return next((paid for paid in self.measured if paid.perplexity_ratio is not None), None)

    @property
    def needle(self) -> MeasuredCost | None:
        """The cost on the first model whose full cache finds the needle."""
        return next((paid for paid in self.measured if "single" in paid.recall), None)


@dataclass(frozen=True)
class FitTable:
    """Configurations that fit."""

    rows: tuple[FitRow, ...]
    refused: tuple[str, ...]  # caches that this model does not support, and why
    sources: tuple[str, ...]  # of the costs


def policy_choices(plan: MemoryPlan, ratios: Sequence[float]) -> tuple[PolicyChoice, ...]:
    """Return "full" and the requested policy, or some that drop ``ratios`` of a sequence."""
    resolved = resolve_for_model(plan.config, plan.cache)
    if resolved.exceeds_max_seq_len or plan.cache.overflow != resolved.overflow:
        return (PolicyChoice(plan.cache.policy),)  # sequences that continue do so under one policy
    if plan.cache.policy != "full":
        return (PolicyChoice("full"), PolicyChoice(plan.cache.policy))
    return (PolicyChoice("full"), *(PolicyChoice(name, ratio) for ratio in ratios for name in DEFAULT_POLICIES))


def format_choices(plan: MemoryPlan) -> tuple[str, ...]:
    """Return the requested format; if it is the weights' own, also narrower ones."""
    requested = plan.cache.format_name
    more = ("bfloat16", "int8", "int4") if requested == "float32" else ("int8", "int4")
    return (requested,) if requested != plan.weights_dtype else (requested, *more)


def find_configurations(
    plan: MemoryPlan,
    memory_bytes: int,
    *,
    contexts: Sequence[int],
    rows: Sequence[int],
    choices: Sequence[PolicyChoice],
    formats: Sequence[str],
    costs: Sequence[MeasuredCosts],
) -> FitTable:
    """Find for each length the most sequences that fit, and for each number of sequences the greatest length."""
    rows_found, refused = list[FitRow](), dict[str, None]()
    targets = [*((None, context) for context in contexts), *((num_seqs, None) for num_seqs in rows)]
    for target, choice, form in product(targets, choices, formats):
        try:
            rows_found.extend(_fit_row(plan, memory_bytes, target, choice, form, costs))
        except ConfigError as error:
            refused[f"{form}, {choice.name}: {error.message}"] = None
    shown = (("perplexity", [row.perplexity for row in rows_found]), ("finds", [row.needle for row in rows_found]))
    sources = [
        f"{label}: {each.source}"
        for label, row_costs in shown
        for each in costs
        if any(cost is not None and (cost.model, cost.digest) == (each.model, each.digest) for cost in row_costs)
    ]
    return FitTable(tuple(rows_found), tuple(refused), tuple(dict.fromkeys(sources)))


def _fit_row(
    plan: MemoryPlan,
    memory_bytes: int,
    target: tuple[int | None, int | None],
    choice: PolicyChoice,
    form: str,
    costs: Sequence[MeasuredCosts],
) -> Iterator[FitRow]:
    """Yield the row of (number of sequences, length), of which the one that is None is as large as fits, if any."""
    keys, values = cache_lib.quantization.split_format_name(form)

    def build_cache(rows: int, context: int) -> CacheConfig:
        policy = choice.policy(context)
        stored = {} if form == plan.cache.format_name else {"key_dtype": keys, "value_dtype": values}
        return replace(plan.cache, max_num_seqs=rows, max_seq_len=context, policy=policy, num_blocks=None, **stored)  # type: ignore[arg-type]

    def total(rows: int, context: int) -> int:
        return sizing.fits.total_bytes_with(plan, build_cache(rows, context))

    search, (num_seqs, length) = sizing.fits.binary_search_max, target
    rows, context = num_seqs or 0, length or plan.config.max_seq_len
    unit = min(plan.cache.block_size, context)
    if num_seqs is None:
        rows = search(sizing.fits.MAX_PLANNED_SEQS, lambda n: total(n, context) <= memory_bytes)
    elif total(rows, context) > memory_bytes:
        context = unit * search(context // unit, lambda n: total(rows, unit * n) <= memory_bytes)
    if rows and context:
        requested = build_cache(rows, context)
        policy = resolve_for_model(plan.config, requested).policy
        # Sequences at their limit may continue under another policy, and only offloading keeps all of their tokens.
        is_lossy_overflow = policy != requested.policy and plan.cache.overflow != "offload"
        name, ratio = _name(choice, context)
        is_exact = _exact(form, plan.weights_dtype)
        is_lossless = name == "full" and is_exact and not is_lossy_overflow
        if name == "full":
            name, ratio = form, 0.0
        elif not is_exact:  # A policy's own cost is for the computed format; with int8 it is that of "snapkv+int8".
            name = f"{name}+{form}"
        measured = () if is_lossless or is_lossy_overflow else find_costs(costs, name, ratio)
        yield FitRow(rows, context, total(rows, context), form, policy, choice.ratio, is_lossless, measured)


def _exact(form: str, computed: str) -> bool:
    formats = map(cache_lib.quantization.get_format, cache_lib.quantization.split_format_name(form))
    return all(fmt.loss != "lossy" and fmt.bits >= 8 * config.DTYPE_BYTES[computed] for fmt in formats)


def _name(choice: PolicyChoice, context: int) -> tuple[str, float]:
    """Return (name in a bench, share of a sequence that is dropped) of a choice.

    sinks(4, 1020), 4,096 tokens  ->  "sinks", 0.75
    """
    if choice.ratio is not None:
        return choice.name, choice.ratio
    policy = parse_policy(choice.name)
    if isinstance(policy, cache_lib.policy.Sinks):
        stay = policy.num_sinks + policy.window
    elif isinstance(policy, cache_lib.policy.Window | cache_lib.policy.BlockWindow):
        stay = policy.size
    elif isinstance(policy, cache_lib.policy.EvictionPolicy | cache_lib.policy.Quest):  # for Quest: what is read
        stay = policy.budget
    else:
        return str(policy), 0.0
    return (policy.name, 1 - stay / context) if stay < context else ("full", 0.0)


def weights_shortfall(plan: MemoryPlan, memory_bytes: int) -> tuple[int, str, int] | None:
    """Return by how many bytes the weights alone are too large, their smallest dtype and their size in it, or None."""
    if plan.weights <= memory_bytes:
        return None
    return plan.weights - memory_bytes, "bfloat16", config.parameter_shapes.weight_bytes(plan.config, "bfloat16")


if __name__ == "__main__":
    main(sys.argv[1:])
