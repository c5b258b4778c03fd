"""What a cache costs in quality: perplexity and KL against budget, and how much is found again.

Everything runs through the real engine, with the cache that is judged; the judge is the model without any cache
(:class:`~kvad.model.no_cache.NoCache`).  Three measures:

*perplexity*: teacher-forced over rows of real text.  A row is read in chunks of ``chunk`` tokens, so a token sees what
the cache has kept, and at most so many tokens of its own chunk.  *kl*: the mean over the same tokens of
KL(model without a cache || model with this one), in nats.  *recall*: the share of tasks (``tasks.py``) whose answer
comes out when the likeliest token is taken every time.

A recall says something only where the full cache finds what was hidden: :data:`ENOUGH`.

``kvad bench cache-quality``: every cache over every measure, a line of JSON as soon as it is known.

The full cache comes first.  Where it does not find more than :data:`~kvad.benchmarks.cache_quality.MIN_FULL_RECALL` of what was hidden at a
length, that length is not asked of the others and a note says so: it would say something about the model, not about a
cache.  What was measured before, with the same weights and options, is read from the file and not measured again.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kvad import inspection
from kvad.benchmarks.cache_speed import commit_id, machine_info
from kvad.benchmarks.needle_tasks import TASK_KINDS, HaystackLanguage, Kind, NeedleTask, make_task
from kvad.benchmarks.variants import Variant, build_engine, seq_bytes
from kvad.engine import Engine
from kvad.engine.execution import ModelRunner
from kvad.engine.scheduling import SamplingParams, SchedulerOutput
from kvad.errors import ConfigError, DataError, EngineError, SaveError, UsageError
from kvad.llm import LLM

JITTER = 0.05  # of a task's depth, to each side
MIN_FULL_RECALL = 0.95  # recall of the full cache below which a bench of recall says nothing
QuestionPosition = Literal["after", "before"]
EvictionTiming = Literal["often", "once"]


@dataclass(frozen=True)
class QualityOptions:
    """``lengths`` and ``depths``: of the heat map's grid, ``tasks``: of each of its cells.  ``texts``: rows of text,
    ``text_length`` tokens each.  ``rows``: at a time.

    ``asked``: only ``after`` the prompt was read and cut, token by token; or the prompt tells ``before`` what will be
    asked then, so that a cache that looks at queries can know what it will be good for (kvpress' query-agnostic and
    query-aware).  ``chunk``: tokens of a row in one step.  ``cut``: a policy that ranks cuts after every chunk, as it
    must where memory is scarce, and holds up to a chunk more than its budget in between; or, of tasks, only ``once``,
    right behind the prompt, as kvpress' do.
    """

    tasks: tuple[Kind, ...] = TASK_KINDS
    lengths: tuple[int, ...] = (128, 256, 512)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    samples_per_cell: int = 8
    num_texts: int = 8
    text_length: int = 512
    question_position: QuestionPosition = "after"
    evict_after: EvictionTiming = "often"
    max_num_seqs: int = 8
    prefill_chunk_size: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("samples_per_cell", "max_num_seqs", "prefill_chunk_size"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}: must be at least 1, found {getattr(self, name)}")
        if self.num_texts < 0 or self.text_length < 2:
            raise UsageError(f"texts {self.num_texts} of {self.text_length} tokens: none at least, of two at least")
        for kind in self.tasks:
            if kind not in TASK_KINDS:
                raise UsageError(f"unknown task {kind!r}", ", ".join(TASK_KINDS))
        if any(not 0 <= depth <= 1 for depth in self.depths) or not self.depths:
            raise UsageError(f"depths {self.depths}: shares of the haystack, from 0 to 1")


@dataclass(frozen=True)
class TextQuality:
    """What a variant makes of the texts.  ``ratio``: perplexity over that without a cache; ``agree``: the share of
    tokens whose likeliest successor is the same."""

    perplexity: float
    reference: float
    kl: float
    agree: float
    tokens: int

    @property
    def ratio(self) -> float:
        return self.perplexity / self.reference


# ---------------------------------------------------------------- texts


LogitHook = Callable[[SchedulerOutput, Tensor], None]


class _LogitHookRunner(ModelRunner):
    """The engine's runner, which shows the plan and its logits [N, V] to ``hear``."""

    hear: LogitHook

    def execute(self, plan: SchedulerOutput) -> Tensor:
        logits = super().execute(plan)
        self.hear(plan, logits)
        return logits


def attach_logit_hook(engine: Engine, hear: LogitHook) -> None:
    """From now on ``hear`` is shown every step's plan and logits [N, V]."""
    ear = _LogitHookRunner(engine.model, engine.kv_cache)
    ear.hear = hear
    engine.runner = ear


def reference_logprobs(llm: LLM, tokens: Sequence[int]) -> Tensor:
    """[T, V] log-probabilities in float32: what the model says without a cache."""
    return llm.logits(tokens).float().log_softmax(-1)


@dataclass
class _ScoreSums:
    """Sums over the tokens that were scored."""

    own: float = 0.0
    judge: float = 0.0
    kl: float = 0.0
    agree: int = 0
    tokens: int = 0

    def add(self, true: Tensor, have: Tensor, targets: Tensor) -> None:
        """``true``, ``have`` [n, V] log-probabilities; ``targets`` [n]."""
        at = targets.unsqueeze(-1)
        self.own -= float(have.gather(-1, at).double().sum())
        self.judge -= float(true.gather(-1, at).double().sum())
        self.kl += float((true.exp() * (true - have)).sum(-1).clamp(min=0).double().sum())
        self.agree += int((true.argmax(-1) == have.argmax(-1)).sum())
        self.tokens += len(targets)

    def told(self) -> TextQuality:
        count = self.tokens
        own, judge = _exp(self.own / count), _exp(self.judge / count)
        return TextQuality(own, judge, self.kl / count, self.agree / count, count)


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:  # a model that is sure of what is wrong
        return math.inf


def measure_perplexity(
    llm: LLM, variant: Variant, texts: Sequence[Sequence[int]], chunk: int, tick: Callable[[], None] = lambda: None
) -> TextQuality:
    """Perplexity and KL of a variant over rows of token ids, one row at a time."""
    tally = _ScoreSums()
    longest = max(map(len, texts))
    engine = build_engine(llm, variant, longest, rows=1, capacity=longest, chunk=chunk)
    try:
        for tokens in texts:
            true = reference_logprobs(llm, tokens)
            attach_logit_hook(engine, _against(true, tokens, tally))
            _run(engine, [engine.add_request(tokens, SamplingParams(max_tokens=0, prompt_logprobs=0))])
            tick()
    finally:
        engine.close()
    return tally.told()


def _against(true: Tensor, tokens: Sequence[int], tally: _ScoreSums) -> LogitHook:
    """Tallies a row's logits as its chunks come, beside ``true`` [T, V]."""
    ids = torch.tensor(tokens, device=true.device)

    def hear(plan: SchedulerOutput, logits: Tensor) -> None:
        (work,) = plan.scheduled
        first = work.start + work.logit_offsets.start
        last = min(first + len(work.logit_offsets), len(tokens) - 1)
        if last > first:
            have = F.log_softmax(logits[: last - first].float(), dim=-1)
            tally.add(true[first:last], have, ids[first + 1 : last + 1])

    return hear


def _run(engine: Engine, requests: Sequence[int]) -> dict[int, list[int]]:
    """The tokens that each request was answered with."""
    found: dict[int, list[int]] = {request: [] for request in requests}
    while not engine.idle:
        for piece in engine.step():
            if piece.error is not None:
                raise EngineError(f"request {piece.request}: {piece.error}")
            if piece.token_id is not None:
                found[piece.request].append(piece.token_id)
    return found


# ---------------------------------------------------------------- tasks


def greedy_answers(engine: Engine, tasks: Sequence[NeedleTask]) -> list[list[int]]:
    """What the engine answers to each task, greedily, ``task.room`` tokens each; all tasks are submitted at once."""
    requests = [_ask(engine, task) for task in tasks]
    found = _run(engine, requests)
    return [found[request][len(task.question) :] for request, task in zip(requests, tasks, strict=True)]


def _ask(engine: Engine, task: NeedleTask) -> int:
    """The question's tokens are generated, each the only one that is allowed in its place."""
    every, asked = range(engine.model.config.vocab_size), len(task.prompt)

    def allowed(tokens: Sequence[int]) -> Sequence[int]:
        place = len(tokens) - asked
        return (task.question[place],) if place < len(task.question) else every

    most = len(task.question) + task.answer_tokens
    return engine.add_request(
        task.prompt, SamplingParams(max_tokens=most, temperature=0, ignore_eos=True, allowed_tokens_fn=allowed)
    )


def grid_cells(options: QualityOptions, kind: Kind) -> Iterator[tuple[int, float]]:
    """(length, depth) of a kind's grid; a chain has one column: its links are spread over the haystack."""
    depths = options.depths if kind != "chain" else (0.0,)
    for length in options.lengths:
        for depth in depths:
            yield length, depth


@dataclass(frozen=True)
class NeedleCell:
    """One cell: how much was found of what was hidden at ``depth`` of ``length`` tokens; ``budget``: what stayed of
    the tokens that were read before the cache was cut for the last time."""

    kind: Kind
    length: int
    depth: float
    recall: float
    tasks: int
    budget: int


def measure_cell(
    llm: LLM,
    variant: Variant,
    language: HaystackLanguage,
    kind: Kind,
    length: int,
    depth: float,
    options: QualityOptions,
) -> NeedleCell:
    """One cell of one variant: ``options.tasks`` tasks, of a chain as many per depth; the same for every variant."""
    count = options.samples_per_cell * (
        len(options.depths) if kind == "chain" else 1
    )  # a chain's one column weighs as much
    seeds = range(options.seed * 1_000_003, options.seed * 1_000_003 + count)
    how: dict[str, Any] = {"align": options.prefill_chunk_size, "told": options.question_position == "before"}
    tasks = [make_task(kind, language, length, _near(depth, seed), seed, **how) for seed in seeds]
    shares = []
    for read in sorted({len(task.prompt) for task in tasks}):
        some = [task for task in tasks if len(task.prompt) == read]
        every = read if options.evict_after == "once" else None
        rows = min(options.max_num_seqs, len(some))
        engine = build_engine(
            llm, variant, read, rows=rows, capacity=length, chunk=options.prefill_chunk_size, every=every
        )
        try:
            found = greedy_answers(engine, some)
        finally:
            engine.close()
        shares += [language.answer_score(task.expected, answer) for task, answer in zip(some, found, strict=True)]
    return NeedleCell(kind, length, depth, math.fsum(shares) / count, count, variant.budget(read))


def _near(depth: float, seed: int) -> float:
    """Somewhere around the depth: what a policy keeps may hang on one position, and a cell should not."""
    return min(1.0, max(0.0, depth + random.Random(seed).uniform(-JITTER, JITTER)))


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
    lines = inspection.plot.read_jsonl(path)
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
