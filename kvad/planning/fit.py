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
# As in benchmarks/cache_quality.py, which imports torch: below it, other caches' recall is not informative.
MIN_FULL_RECALL = 0.95
MAX_RATIO_GAP = 0.005  # larger differences are another ratio


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
        return (
            f"{self.model}, {long:,} tokens, "
            f"asked {self.options.get('question_position', 'after')} eviction, commit {self.commit}"
        )


def read_costs(path: Path = PACKAGED_COSTS) -> tuple[MeasuredCosts, ...]:
    """Read ``cache_costs.json``, or the lines of a bench (a file, or its folder); DataError if it is neither."""
    file, text = _text(path)
    try:
        if file.suffix == ".jsonl":
            return (collect_costs(_lines(text)),)
        return tuple(
            MeasuredCosts(**{**each, "costs": tuple(CacheCost(**cost) for cost in each["costs"])})
            for each in json.loads(text)["measured"]
        )
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise _no_costs_error(file, error) from error


def read_cost_lines(path: Path) -> list[dict[str, Any]]:
    """Read a bench's lines from a file or its folder, merged by ``merge_depths``; DataError if there are none."""
    file, text = _text(path)
    try:
        return merge_depths(_lines(text))
    except (ValueError, KeyError, TypeError) as error:
        raise _no_costs_error(file, error) from error


def _text(path: Path) -> tuple[Path, str]:
    file = path / LINES_FILE if path.is_dir() else path
    try:
        return file, file.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror or error}") from error


def _lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def _no_costs_error(file: Path, error: Exception) -> DataError:
    return DataError(f"{file} has no costs: {error!r}", "Give the --out of kvad bench cache-quality.")


def collect_costs(lines: Sequence[Mapping[str, Any]]) -> MeasuredCosts:
    """Compute costs from a bench's lines: the mean of each kind's cells for which the full cache finds the needle."""
    first, costs = lines[0], []
    full = _cells(lines, "full", 0.0)
    informative = {cell for cell, recalls in full.items() if _mean(recalls) > MIN_FULL_RECALL}
    for cache, ratio in dict.fromkeys((line["cache"], line["ratio"]) for line in lines):
        own_lines = [line for line in lines if (line["cache"], line["ratio"]) == (cache, ratio)]
        text = next((line for line in own_lines if line["measure"] == "text"), None)
        kinds: dict[str, list[float]] = {}
        for (kind, length), recalls in _cells(lines, cache, ratio).items():
            if (kind, length) in informative:
                kinds.setdefault(kind, []).extend(recalls)
        recall = {kind: round(_mean(recalls), 4) for kind, recalls in kinds.items()}
        costs.append(CacheCost(cache, ratio, _short(text, "perplexity_ratio"), _short(text, "kl"), recall))
    name = Path(str(first["model"]).rstrip("/")).name
    return MeasuredCosts(name, first["digest"], first["commit"], first["machine"], dict(first["options"]), tuple(costs))


def merge_depths(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Merge the depths of a cache, kind and length into one line with their mean; the costs are unchanged."""
    grouped: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for line in lines:
        grouped.setdefault(tuple(line[name] for name in ("cache", "ratio", "measure", "length")), []).append(line)
    merged = []
    for group in grouped.values():
        line = {name: value for name, value in group[0].items() if name != "depth"}
        if "recall" in line:
            line |= {"recall": _mean([each["recall"] for each in group]), "tasks": sum(each["tasks"] for each in group)}
        merged.append(line)
    return merged


def _cells(lines: Sequence[Mapping[str, Any]], cache: str, ratio: float) -> dict[tuple[str, int], list[float]]:
    cells: dict[tuple[str, int], list[float]] = {}
    for line in lines:
        if (line["cache"], line["ratio"]) == (cache, ratio) and line["measure"] != "text":
            cells.setdefault((line["measure"], line["length"]), []).append(line["recall"])
    return cells


def _short(line: Mapping[str, Any] | None, name: str) -> float | None:
    return None if line is None or line[name] is None else float(f"{line[name]:.5g}")


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def find_costs(measured: Sequence[MeasuredCosts], cache: str, ratio: float) -> list[tuple[MeasuredCosts, CacheCost]]:
    """Return the costs of this cache at this ratio, on every model that it was measured on."""
    return [
        (costs, cost)
        for costs in measured
        for cost in costs.costs
        if cost.cache == cache and abs(cost.ratio - ratio) <= MAX_RATIO_GAP
    ]


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


if __name__ == "__main__":
    main(sys.argv[1:])


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
class RequestedSeqs:
    """A requested number of sequences, with the greatest length; a plain number is a length."""

    count: int


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
    targets: list[int | RequestedSeqs] = [*contexts, *(RequestedSeqs(each) for each in rows)]
    for target in targets:
        for choice in choices:
            for form in formats:
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
    target: int | RequestedSeqs,
    choice: PolicyChoice,
    form: str,
    costs: Sequence[MeasuredCosts],
) -> Iterator[FitRow]:
    keys, values = cache_lib.quantization.split_format_name(form)

    def build_cache(rows: int, context: int) -> CacheConfig:
        policy = choice.policy(context)
        stored = {} if form == plan.cache.format_name else {"key_dtype": keys, "value_dtype": values}
        return replace(plan.cache, max_num_seqs=rows, max_seq_len=context, policy=policy, num_blocks=None, **stored)  # type: ignore[arg-type]

    def total(rows: int, context: int) -> int:
        return sizing.fits.total_bytes_with(plan, build_cache(rows, context))

    if isinstance(target, RequestedSeqs):
        rows, context = target.count, plan.config.max_seq_len
        unit = min(plan.cache.block_size, context)
        if total(rows, context) > memory_bytes:
            context = unit * sizing.fits.binary_search_max(
                context // unit, lambda n: total(target.count, unit * n) <= memory_bytes
            )
    else:
        context = target
        rows = sizing.fits.binary_search_max(sizing.fits.MAX_PLANNED_SEQS, lambda n: total(n, context) <= memory_bytes)
    if rows and context:
        requested = build_cache(rows, context)
        policy = resolve_for_model(plan.config, requested).policy
        # Sequences at their limit may continue under another policy, and only offloading keeps all of their tokens.
        is_lossy_overflow = policy != requested.policy and plan.cache.overflow != "offload"
        keeps_everything = _name(choice, context)[0] == "full" and not is_lossy_overflow
        is_lossless = keeps_everything and _exact(form, plan.weights_dtype)
        has_cost = not is_lossless and not is_lossy_overflow
        measured = _measured_cost(plan, choice, form, context, costs) if has_cost else ()
        yield FitRow(rows, context, total(rows, context), form, policy, choice.ratio, is_lossless, measured)


def _exact(form: str, computed: str) -> bool:
    formats = map(cache_lib.quantization.get_format, cache_lib.quantization.split_format_name(form))
    return all(fmt.loss != "lossy" and fmt.bits >= 8 * config.DTYPE_BYTES[computed] for fmt in formats)


def _measured_cost(
    plan: MemoryPlan, choice: PolicyChoice, form: str, context: int, costs: Sequence[MeasuredCosts]
) -> tuple[MeasuredCost, ...]:
    """Return measured costs. A policy's own cost is for the computed format; with int8 it is that of "snapkv+int8"."""
    name, ratio = _name(choice, context)
    if name == "full":
        name, ratio = form, 0.0
    elif not _exact(form, plan.weights_dtype):
        name = f"{name}+{form}"
    return tuple(
        MeasuredCost(measured.model, measured.digest, cost.perplexity_ratio, cost.kl, cost.recall)
        for measured, cost in find_costs(costs, name, ratio)
    )


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
