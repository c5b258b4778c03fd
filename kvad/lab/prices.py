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
    "ENOUGH",
    "LINES",
    "PACKAGED",
    "Measured",
    "Price",
    "collect",
    "find_prices",
    "merged",
    "read_lines",
    "read_prices",
]

PACKAGED = Path(__file__).with_name("prices.json")
LINES = "cache-quality.jsonl"
ENOUGH = 0.95  # lab/quality.py's, which imports torch: recall of the full cache below which another's says nothing
CLOSE = 0.005  # a ratio is another one beyond that


@dataclass(frozen=True)
class Price:
    """One cache on one model.  ``times``: perplexity over that without a cache; ``kl`` in nats; ``recall`` by kind of
    task.  None, or no such kind: not measured."""

    cache: str
    ratio: float
    times: float | None
    kl: float | None
    recall: Mapping[str, float]


@dataclass(frozen=True)
class Measured:
    """The caches of one bench: ``model`` by name, ``digest`` of its weights, ``options`` of the bench."""

    model: str
    digest: str
    commit: str
    machine: str
    options: Mapping[str, Any]
    prices: tuple[Price, ...]

    @property
    def source(self) -> str:
        """Where the numbers are from, in a line."""
        long = max([*self.options.get("lengths", ()), self.options.get("text_length", 0)])
        return (
            f"{self.model}, {long:,} tokens, asked {self.options.get('asked', 'after')} the cut, commit {self.commit}"
        )


def read_prices(path: Path = PACKAGED) -> tuple[Measured, ...]:
    """Of ``prices.json``, or of a bench's own lines (a file, or the folder that holds them).  DataError for neither."""
    where, text = _text(path)
    try:
        if where.suffix == ".jsonl":
            return (collect(_lines(text)),)
        return tuple(_measured(each) for each in json.loads(text)["measured"])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise _no_prices(where, error) from error


def read_lines(path: Path) -> list[dict[str, Any]]:
    """A bench's lines, from a file or the folder that holds them, :func:`merged`.  DataError where there are none."""
    where, text = _text(path)
    try:
        return merged(_lines(text))
    except (ValueError, KeyError, TypeError) as error:
        raise _no_prices(where, error) from error


def _text(path: Path) -> tuple[Path, str]:
    where = path / LINES if path.is_dir() else path
    try:
        return where, where.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot read {where}: {error.strerror or error}") from error


def _lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def _no_prices(where: Path, error: Exception) -> DataError:
    return DataError(f"{where} holds no prices: {error!r}", "give the --out of kvad bench cache-quality")


def _measured(each: Mapping[str, Any]) -> Measured:
    return Measured(**{**each, "prices": tuple(Price(**price) for price in each["prices"])})


def collect(lines: Sequence[Mapping[str, Any]]) -> Measured:
    """A bench's lines as prices: the mean of each kind's cells, where the full cache finds what was hidden."""
    first = lines[0]
    says = {cell for cell in _cells(lines, "full", 0.0) if _mean(_cells(lines, "full", 0.0)[cell]) > ENOUGH}
    prices = []
    for cache, ratio in dict.fromkeys((line["cache"], line["ratio"]) for line in lines):
        own = [line for line in lines if (line["cache"], line["ratio"]) == (cache, ratio)]
        text = next((line for line in own if line["measure"] == "text"), None)
        kinds: dict[str, list[float]] = {}
        for (kind, length), found in _cells(lines, cache, ratio).items():
            if (kind, length) in says:
                kinds.setdefault(kind, []).extend(found)
        recall = {kind: round(_mean(found), 4) for kind, found in kinds.items()}
        prices.append(Price(cache, ratio, _short(text, "price"), _short(text, "kl"), recall))
    name = Path(str(first["model"]).rstrip("/")).name
    return Measured(name, first["digest"], first["commit"], first["machine"], dict(first["options"]), tuple(prices))


def merged(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
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


def find_prices(measured: Sequence[Measured], cache: str, ratio: float) -> list[tuple[Measured, Price]]:
    """Of this cache at this ratio, from every model that it was measured on."""
    return [
        (each, price)
        for each in measured
        for price in each.prices
        if price.cache == cache and abs(price.ratio - ratio) <= CLOSE
    ]


def main(arguments: Sequence[str]) -> None:
    """Write ``prices.json`` from the lines in files or folders; or, after ``--merge``, print them merged."""
    if arguments[:1] == ["--merge"]:
        for folder in arguments[1:]:
            print("\n".join(json.dumps(line) for line in read_lines(Path(folder))))
        return
    found = [each for folder in arguments for each in read_prices(Path(folder))]
    plain = [{**vars(each), "prices": [vars(price) for price in each.prices]} for each in found]
    rows = [
        json.dumps({**each, "prices": "@"}).replace(
            '"@"', "[\n   " + ",\n   ".join(json.dumps(price) for price in each["prices"]) + "\n  ]"
        )
        for each in plain
    ]
    PACKAGED.write_text('{"measured": [\n  ' + ",\n  ".join(rows) + "\n]}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
