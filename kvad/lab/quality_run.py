"""``kvad bench cache-quality``: every cache over every measure, a line of JSON as soon as it is known.

The full cache comes first.  Where it does not find more than :data:`~kvad.lab.quality.ENOUGH` of what was hidden at a
length, that length is not asked of the others and a note says so: it would say something about the model, not about a
cache.  What was measured before, with the same weights and options, is read from the file and not measured again.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvad.errors import ConfigError, DataError, SaveError, UsageError
from kvad.lab.bench import commit_id, machine_info
from kvad.lab.plot import read_jsonl
from kvad.lab.quality import MIN_FULL_RECALL, QualityOptions, grid_cells, measure_cell, measure_perplexity
from kvad.lab.tasks import HaystackLanguage, Kind
from kvad.lab.variants import Variant, seq_bytes
from kvad.llm import LLM

__all__ = [
    "LINES_FILE",
    "ResultLines",
    "QualityResult",
    "SummaryRow",
    "bench_quality",
    "bench_fingerprint",
    "text_rows",
]

LINES_FILE = "cache-quality.jsonl"
ResultLine = dict[str, Any]
Progress = Callable[[str, int, int], None]  # (what, cells done, of so many)


class ResultLines:
    """Lines of one bench, kept in ``path`` as they come (None: in memory only)."""

    def __init__(self, path: Path | None, settings: Mapping[str, Any], *, overwrite: bool = False) -> None:
        """Raises UsageError for a file of another model or other options, DataError for one that is no such file."""
        self.path, self.settings, self.lines = path, dict(settings), list[ResultLine]()
        if path is None:
            return
        if path.exists() and path.stat().st_size and not overwrite:
            self.lines = _earlier(path, self.settings)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f"{_json(line)}\n" for line in self.lines), encoding="utf-8")
        except OSError as error:
            raise SaveError(f"cannot write {path}: {error.strerror or error}") from error

    def find(self, **key: Any) -> ResultLine | None:
        return next((line for line in self.lines if all(line.get(name) == value for name, value in key.items())), None)

    def add(self, line: ResultLine) -> ResultLine:
        """At the end of the file, whole, before the next measurement begins."""
        whole = {**line, **self.settings}
        if self.path is not None:
            try:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(f"{_json(whole)}\n")
            except OSError as error:
                raise SaveError(f"cannot write {self.path}: {error.strerror or error}") from error
        self.lines.append(whole)
        return whole


def _json(line: ResultLine) -> str:
    """A number that is none (a perplexity beyond all floats) is null: JSON has no NaN."""
    plain = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in line.items()
    }
    return json.dumps(plain, allow_nan=False)


def _earlier(path: Path, settings: Mapping[str, Any]) -> list[ResultLine]:
    lines = read_jsonl(path)
    for line in lines:
        for name in ("digest", "options"):
            if line.get(name) != settings[name]:
                what = "another model" if name == "digest" else "other options"
                raise UsageError(f"{path} was measured with {what}", "choose another --out, or give --overwrite")
    return lines


def bench_fingerprint(llm: LLM, language: HaystackLanguage) -> str:
    """Names the weights (some of each tensor), their shape, and the language."""
    found = hashlib.blake2b(json.dumps(llm.model.config.to_dict(), sort_keys=True).encode(), digest_size=8)
    found.update(language.name.encode())
    for name, tensor in llm.model.state_dict().items():
        flat = tensor.flatten()
        some = flat[:: max(1, len(flat) // 16)][:16].double().tolist()
        found.update(f"{name} {some}".encode())
    return found.hexdigest()


def text_rows(
    language: HaystackLanguage, texts: Sequence[str], opening: Sequence[int], count: int, length: int
) -> list[list[int]]:
    """``count`` rows of ``length`` tokens, evenly spread over the texts as one stream; each begins with ``opening``."""
    if not count:
        return []
    ids = language.encode("\n".join(texts))
    size = length - len(opening)
    if len(ids) < size:
        raise DataError(f"the text has {len(ids):,} tokens, and a row takes {size:,}", "give more --text")
    room = len(ids) - size
    starts = sorted({room * number // max(1, count - 1) for number in range(count)})
    return [[*opening, *ids[start : start + size]] for start in starts]


@dataclass(frozen=True)
class SummaryRow:
    """One cache in the summary; None: not measured.  ``recall``: by kind, over all lengths that say something (of the
    full cache: over all).  ``memory``: what a text's row takes of the pool, over what it takes of the full cache's."""

    cache: str
    ratio: float
    memory: float | None
    perplexity: float | None
    perplexity_ratio: float | None  # times the perplexity without a cache
    kl: float | None
    recall: Mapping[str, float | None]


@dataclass(frozen=True)
class QualityResult:
    """``notes``: what was not measured, and why.  ``said``: the (kind, length)s whose recall says something."""

    what: str
    model: str
    machine: str
    commit: str
    language: str
    parameters: int
    options: QualityOptions
    summary: tuple[SummaryRow, ...]
    notes: tuple[str, ...]
    informative_cells: tuple[tuple[str, int], ...]
    lines: tuple[ResultLine, ...]


def bench_quality(
    llm: LLM,
    variants: Sequence[Variant],
    language: HaystackLanguage,
    texts: Sequence[Sequence[int]],
    options: QualityOptions,
    *,
    model: str = "",
    out: Path | None = None,
    overwrite: bool = False,
    progress: Progress = lambda _what, _done, _total: None,
) -> QualityResult:
    """Measure ``variants``, the full cache first; ``out``: a folder for the lines, where those of before are found.

    Raises UsageError for lengths beyond the model's limit, and as :class:`Lines` does.
    """
    assert variants and variants[0].name == "full", "the full cache is what the others are held against"
    limit = llm.model.config.max_seq_len
    for length in (*options.lengths, *map(len, texts)):
        if length > limit:
            raise UsageError(f"a length of {length:,} tokens is beyond the model's limit of {limit:,}", "ask for less")
    settings = {
        "what": "cache-quality",
        "model": model,
        "digest": bench_fingerprint(llm, language),
        "options": json.loads(json.dumps(asdict(options))),
        "machine": machine_info(),
        "commit": commit_id(),
    }
    run = _Run(
        llm,
        language,
        texts,
        options,
        ResultLines(out / LINES_FILE if out else None, settings, overwrite=overwrite),
        progress,
    )
    run.count = len(variants)
    run.total = run.count * (bool(texts) + sum(1 for kind in options.tasks for _ in grid_cells(options, kind)))
    for variant in variants:
        run.variant(variant)
    return QualityResult(
        what="cache-quality",
        model=model,
        machine=settings["machine"],
        commit=settings["commit"],
        language=language.name,
        parameters=sum(parameter.numel() for parameter in llm.model.parameters()),
        options=options,
        summary=tuple(run.row(variant) for variant in variants),
        notes=tuple(run.notes),
        informative_cells=tuple(run.said),
        lines=tuple(run.lines.lines),
    )


class _Run:
    """The measurements of one bench, and what they say so far."""

    def __init__(
        self,
        llm: LLM,
        language: HaystackLanguage,
        texts: Sequence[Sequence[int]],
        options: QualityOptions,
        lines: ResultLines,
        progress: Progress,
    ) -> None:
        self.llm, self.language, self.texts, self.options = llm, language, texts, options
        self.lines, self.progress = lines, progress
        self.said: list[tuple[Kind, int]] = [(kind, length) for kind in options.tasks for length in options.lengths]
        self.notes: list[str] = []
        self.done = self.total = 0
        self.count = 1

    def variant(self, variant: Variant) -> None:
        """All that is measured of it; a cache that cannot be for this model is noted, and the others go on."""
        before = self.done
        try:
            self._measure(variant)
        except ConfigError as error:
            if variant.name == "full":
                raise
            self.notes.append(f"{variant.label}: not for this model: {error}")
            self.done = before + self.total // self.count

    def _measure(self, variant: Variant) -> None:
        if self.texts:
            self._text(variant)
            self._tick(f"{variant.label}: text")
        for kind in self.options.tasks:
            for length, depth in grid_cells(self.options, kind):
                if (kind, length) in self.said:
                    self._cell(variant, kind, length, depth)
                self._tick(f"{variant.label}: {kind} {length}")
        if variant.name == "full":
            self._judge()

    def row(self, variant: Variant) -> SummaryRow:
        text = self.lines.find(**_key(variant), measure="text") or {}
        full = self.lines.find(cache="full", measure="text") or {}
        memory = text["bytes"] / full["bytes"] if "bytes" in text and "bytes" in full else None
        recall: dict[str, float | None] = {kind: self._recall(variant, kind) for kind in self.options.tasks}
        perplexity, times, kl = (text.get(name) for name in ("perplexity", "price", "kl"))
        return SummaryRow(variant.name, variant.ratio, memory, perplexity, times, kl, recall)

    def _tick(self, what: str) -> None:
        self.done += 1
        self.progress(what, self.done, self.total)

    def _text(self, variant: Variant) -> None:
        key = {**_key(variant), "measure": "text"}
        if self.lines.find(**key) is None:
            found = measure_perplexity(self.llm, variant, self.texts, self.options.prefill_chunk_size)
            longest = max(map(len, self.texts))
            taken = seq_bytes(self.llm, variant, longest, chunk=self.options.prefill_chunk_size)
            size = {"length": longest, "budget": variant.budget(longest), "bytes": taken}
            line = {**key, **size, **asdict(found), "price": found.ratio}
            self.lines.add(line)

    def _cell(self, variant: Variant, kind: Kind, length: int, depth: float) -> None:
        key = {**_key(variant), "measure": kind, "length": length, "depth": depth}
        if self.lines.find(**key) is None:
            found = measure_cell(self.llm, variant, self.language, kind, length, depth, self.options)
            self.lines.add({**key, "budget": found.budget, "recall": found.recall, "tasks": found.tasks})

    def _judge(self) -> None:
        """Which lengths say something: those at which the full cache finds what is hidden."""
        for kind in self.options.tasks:
            poor = []
            for length in self.options.lengths:
                recall = _mean(line["recall"] for line in self._lines("full", 0.0, kind) if line["length"] == length)
                if recall is None or recall <= MIN_FULL_RECALL:
                    self.said.remove((kind, length))
                    poor.append(f"{recall or 0:.2f} at {length}")
            if poor:
                self.notes.append(
                    f"{kind}: the full cache finds {', '.join(poor)} tokens, not more than {MIN_FULL_RECALL}: another cache's "
                    "recall would say nothing there and is not measured"
                )

    def _recall(self, variant: Variant, kind: Kind) -> float | None:
        every = self._lines(variant.name, variant.ratio, kind)
        return _mean(line["recall"] for line in every if variant.name == "full" or (kind, line["length"]) in self.said)

    def _lines(self, cache: str, ratio: float, kind: Kind) -> list[ResultLine]:
        return [
            line for line in self.lines.lines if (line["cache"], line["ratio"], line["measure"]) == (cache, ratio, kind)
        ]


def _key(variant: Variant) -> ResultLine:
    key = {"cache": variant.name, "ratio": variant.ratio}
    return key if variant.compressor is None else {**key, "compressor": variant.compressor.fingerprint()}


def _mean(values: Any) -> float | None:
    found = list(values)
    return math.fsum(found) / len(found) if found else None
