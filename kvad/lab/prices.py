"""What a cache costs in quality, as it was measured: ``prices.json`` beside this file, with where each number is from.

    kvad bench cache-quality MODEL --out FOLDER               # lines of JSON
    python -m kvad.lab.prices --merge FOLDER > runs/X.jsonl   # fewer: a kind's depths in one line
    python -m kvad.lab.prices runs/X.jsonl...                 # from either: prices.json anew, in that order

Nothing is between the numbers: what was not measured has no price.  A price is of the model that it was measured on;
another one pays another, and ``kvad plan --prices FOLDER`` reads one's own lines instead.  No torch.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvad.errors import DataError

__all__ = [
    "MIN_FULL_RECALL",
    "LINES_FILE",
    "PACKAGED_COSTS",
    "MeasuredCosts",
    "CacheCost",
    "collect_costs",
    "find_costs",
    "merge_depths",
    "read_cost_lines",
    "read_costs",
]

PACKAGED_COSTS = Path(__file__).with_name("prices.json")
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
