"""Quality of a cache: perplexity and KL divergence against budget, and needle recall.

Everything runs through the real engine with the tested cache; the reference is the model without any cache
(:class:`~kvad.model.no_cache.NoCache`). Three measures:

*perplexity*: teacher-forced over rows of real text. A row is read in chunks of ``prefill_chunk_size`` tokens, so a
token sees what the cache has retained, and the earlier tokens of its chunk. *kl*: the mean over the same tokens of
KL(model without a cache || model with this one), in nats. *recall*: the share of tasks (``needle_tasks.py``) whose
answer is generated greedily.

``kvad bench cache-quality`` measures every cache, one line of JSON per result. The full cache is first. A recall is
informative only if the full cache finds the needles: if it finds no more than :data:`MIN_FULL_RECALL` at a length, that
length is skipped for the others and a note reports it. Results in the file with equal weights and options are reused.
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
EvictionTiming = Literal["chunk", "prompt"]


@dataclass(frozen=True)
class QualityOptions:
    """Options of the bench.

    ``lengths`` and ``depths``: the heat map's grid; ``samples_per_cell``: tasks per cell; ``num_texts``: rows of text
    of ``text_length`` tokens; ``max_num_seqs``: at a time.

    ``question_position``: ``after`` the prompt was read and evicted, token by token; or in the prompt, ``before``, so a
    cache that observes queries can use it (kvpress' query-agnostic and query-aware). ``prefill_chunk_size``: tokens of
    a row in one step. ``evict_after``: a ranking policy evicts after every ``chunk``, as required if memory is scarce,
    and holds up to a chunk more than its budget in between; or, in tasks, only once after the ``prompt``, as in
    kvpress.
    """

    tasks: tuple[Kind, ...] = TASK_KINDS
    lengths: tuple[int, ...] = (128, 256, 512)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    samples_per_cell: int = 8
    num_texts: int = 8
    text_length: int = 512
    question_position: QuestionPosition = "after"
    evict_after: EvictionTiming = "chunk"
    max_num_seqs: int = 8
    prefill_chunk_size: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("samples_per_cell", "max_num_seqs", "prefill_chunk_size"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}: must be at least 1, got {getattr(self, name)}")
        if self.num_texts < 0 or self.text_length < 2:
            raise UsageError(f"texts {self.num_texts} of {self.text_length} tokens: none at least, of two at least")
        for kind in self.tasks:
            if kind not in TASK_KINDS:
                raise UsageError(f"unknown task {kind!r}", ", ".join(TASK_KINDS))
        if any(not 0 <= depth <= 1 for depth in self.depths) or not self.depths:
            raise UsageError(f"depths {self.depths}: shares of the haystack, from 0 to 1")


@dataclass(frozen=True)
class TextQuality:
    """A variant's result on the texts.

    ``ratio``: perplexity over that without a cache; ``agree``: share of tokens with the same greedy successor.
    """

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
    """The engine's runner, which passes each output and its logits [N, V] to ``hook``."""

    hook: LogitHook

    def execute(self, output: SchedulerOutput) -> Tensor:
        logits = super().execute(output)
        self.hook(output, logits)
        return logits


def attach_logit_hook(engine: Engine, hook: LogitHook) -> None:
    """Call ``hook`` with every step's output and logits [N, V] from now on."""
    runner = _LogitHookRunner(engine.model, engine.kv_cache)
    runner.hook = hook
    engine.runner = runner


def reference_logprobs(llm: LLM, tokens: Sequence[int]) -> Tensor:
    """Compute [T, V] log-probabilities in float32 without a cache."""
    return llm.logits(tokens).float().log_softmax(-1)


@dataclass
class _ScoreSums:
    """Sums over the scored tokens."""

    own: float = 0.0
    reference: float = 0.0
    kl: float = 0.0
    agree: int = 0
    tokens: int = 0

    def add(self, true: Tensor, have: Tensor, targets: Tensor) -> None:
        """Add ``true``, ``have`` [n, V] log-probabilities; ``targets`` [n]."""
        at = targets.unsqueeze(-1)
        self.own -= float(have.gather(-1, at).double().sum())
        self.reference -= float(true.gather(-1, at).double().sum())
        self.kl += float((true.exp() * (true - have)).sum(-1).clamp(min=0).double().sum())
        self.agree += int((true.argmax(-1) == have.argmax(-1)).sum())
        self.tokens += len(targets)

    def result(self) -> TextQuality:
        count = self.tokens
        own, reference = _exp(self.own / count), _exp(self.reference / count)
        return TextQuality(own, reference, self.kl / count, self.agree / count, count)


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:  # a model that is certain of a wrong token
        return math.inf


def measure_perplexity(
    llm: LLM, variant: Variant, texts: Sequence[Sequence[int]], chunk: int, tick: Callable[[], None] = lambda: None
) -> TextQuality:
    """Measure perplexity and KL divergence of a variant over rows of token ids, one row at a time."""
    tally = _ScoreSums()
    longest = max(map(len, texts))
    engine = build_engine(llm, variant, longest, rows=1, capacity=longest, chunk=chunk)
    try:
        for tokens in texts:
            true = reference_logprobs(llm, tokens)
            attach_logit_hook(engine, _scoring_hook(true, tokens, tally))
            _run(engine, [engine.add_request(tokens, SamplingParams(max_tokens=0, prompt_logprobs=0))])
            tick()
    finally:
        engine.close()
    return tally.result()


def _scoring_hook(true: Tensor, tokens: Sequence[int], tally: _ScoreSums) -> LogitHook:
    """Build a hook that adds a row's logits, chunk by chunk, compared with ``true`` [T, V]."""
    ids = torch.tensor(tokens, device=true.device)

    def record(output: SchedulerOutput, logits: Tensor) -> None:
        (scheduled,) = output.scheduled
        first = scheduled.start + scheduled.logit_offsets.start
        last = min(first + len(scheduled.logit_offsets), len(tokens) - 1)
        if last > first:
            have = F.log_softmax(logits[: last - first].float(), dim=-1)
            tally.add(true[first:last], have, ids[first + 1 : last + 1])

    return record


def _run(engine: Engine, requests: Sequence[int]) -> dict[int, list[int]]:
    """Run the engine; return the generated tokens of each request."""
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
    """Return the engine's greedy answers of ``task.answer_tokens`` tokens.

    All tasks are submitted at once.
    """
    requests = [_ask(engine, task) for task in tasks]
    found = _run(engine, requests)
    return [found[request][len(task.question) :] for request, task in zip(requests, tasks, strict=True)]


def _ask(engine: Engine, task: NeedleTask) -> int:
    """Submit a task.

    The question's tokens are generated, each the only one allowed at its index.
    """
    all_tokens, num_prompt_tokens = range(engine.model.config.vocab_size), len(task.prompt)

    def allowed(tokens: Sequence[int]) -> Sequence[int]:
        index = len(tokens) - num_prompt_tokens
        return (task.question[index],) if index < len(task.question) else all_tokens

    max_tokens = len(task.question) + task.answer_tokens
    return engine.add_request(
        task.prompt, SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, allowed_tokens_fn=allowed)
    )


def grid_cells(options: QualityOptions, kind: Kind) -> Iterator[tuple[int, float]]:
    """Yield (length, depth) of a kind's grid.

    A chain has one column: its links are spread over the haystack.
    """
    depths = options.depths if kind != "chain" else (0.0,)
    for length in options.lengths:
        for depth in depths:
            yield length, depth


@dataclass(frozen=True)
class NeedleCell:
    """Recall of one cell, at ``depth`` of ``length`` tokens.

    ``budget``: retained tokens after the last eviction.
    """

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
    """Measure one cell of one variant: the same tasks for every variant, of a chain as many per depth."""
    count = options.samples_per_cell * (
        len(options.depths) if kind == "chain" else 1
    )  # a chain's one column weighs as much
    seeds = range(options.seed * 1_000_003, options.seed * 1_000_003 + count)
    before = options.question_position == "before"
    how: dict[str, Any] = {"align": options.prefill_chunk_size, "question_in_prompt": before}
    tasks = [make_task(kind, language, length, _near(depth, seed), seed, **how) for seed in seeds]
    shares = []
    for read in sorted({len(task.prompt) for task in tasks}):
        some = [task for task in tasks if len(task.prompt) == read]
        every = read if options.evict_after == "prompt" else None
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
    """Draw a depth near ``depth``: retention may depend on one position, and a cell should not."""
    return min(1.0, max(0.0, depth + random.Random(seed).uniform(-JITTER, JITTER)))


LINES_FILE = "cache-quality.jsonl"
ResultLine = dict[str, Any]
Progress = Callable[[str, int, int], None]  # (label, cells done, total)


class ResultLines:
    """Lines of one bench, appended to ``path`` (None: in memory only)."""

    def __init__(self, path: Path | None, settings: Mapping[str, Any], *, overwrite: bool = False) -> None:
        """Read earlier lines.

        Raises:
            UsageError: For a file of another model or other options.
            DataError: For another kind of file.
        """
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
        """Append a complete line to the file before the next measurement."""
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
    """Encode a line; a non-finite number (an overflowed perplexity) is null, as JSON has no NaN."""
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
    """Compute a fingerprint of the weights (some of each tensor), their shapes and the language."""
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
    """Cut ``count`` rows of ``length`` tokens, evenly spread over the joined texts.

    Each begins with ``opening``.
    """
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
    """One cache in the summary; None: not measured.

    ``recall``: by kind, over all informative lengths (of the full cache: all); ``memory``: bytes of a text's row in the
    pool, over those of the full cache.
    """

    cache: str
    ratio: float
    memory: float | None
    perplexity: float | None
    perplexity_ratio: float | None  # to the perplexity without a cache
    kl: float | None
    recall: Mapping[str, float | None]


@dataclass(frozen=True)
class QualityResult:
    """Result of the bench.

    ``notes``: what was not measured, and why; ``informative_cells``: the (kind, length)s with an informative recall.
    """

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
    """Measure ``variants``, the full cache first.

    ``out``: a folder for the lines, reused if present.

    Raises:
        UsageError: For lengths beyond the model's limit, and as :class:`ResultLines`.
    """
    assert variants and variants[0].name == "full", "the full cache is compared with the others"
    limit = llm.model.config.max_seq_len
    for length in (*options.lengths, *map(len, texts)):
        if length > limit:
            raise UsageError(
                f"a length of {length:,} tokens is beyond the model's limit of {limit:,}", "Use a smaller length."
            )
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
        informative_cells=tuple(run.informative),
        lines=tuple(run.lines.lines),
    )


class _Run:
    """The measurements of one bench."""

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
        self.informative: list[tuple[Kind, int]] = [
            (kind, length) for kind in options.tasks for length in options.lengths
        ]
        self.notes: list[str] = []
        self.done = self.total = 0
        self.count = 1

    def variant(self, variant: Variant) -> None:
        """Measure a variant; a cache that this model does not support is noted and skipped."""
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
                if (kind, length) in self.informative:
                    self._cell(variant, kind, length, depth)
                self._tick(f"{variant.label}: {kind} {length}")
        if variant.name == "full":
            self._find_informative()

    def row(self, variant: Variant) -> SummaryRow:
        text = self.lines.find(**_key(variant), measure="text") or {}
        full = self.lines.find(cache="full", measure="text") or {}
        memory = text["bytes"] / full["bytes"] if "bytes" in text and "bytes" in full else None
        recall: dict[str, float | None] = {kind: self._recall(variant, kind) for kind in self.options.tasks}
        perplexity, times, kl = (text.get(name) for name in ("perplexity", "perplexity_ratio", "kl"))
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
            line = {**key, **size, **asdict(found), "perplexity_ratio": found.ratio}
            self.lines.add(line)

    def _cell(self, variant: Variant, kind: Kind, length: int, depth: float) -> None:
        key = {**_key(variant), "measure": kind, "length": length, "depth": depth}
        if self.lines.find(**key) is None:
            found = measure_cell(self.llm, variant, self.language, kind, length, depth, self.options)
            self.lines.add({**key, "budget": found.budget, "recall": found.recall, "tasks": found.tasks})

    def _find_informative(self) -> None:
        """Find the informative lengths: those at which the full cache finds the needles."""
        for kind in self.options.tasks:
            poor = []
            for length in self.options.lengths:
                recall = _mean(line["recall"] for line in self._lines("full", 0.0, kind) if line["length"] == length)
                if recall is None or recall <= MIN_FULL_RECALL:
                    self.informative.remove((kind, length))
                    poor.append(f"{recall or 0:.2f} at {length}")
            if poor:
                self.notes.append(
                    f"{kind}: the full cache finds {', '.join(poor)} tokens, not more than {MIN_FULL_RECALL}: "
                    "another cache's "
                    "recall is not informative there and is not measured"
                )

    def _recall(self, variant: Variant, kind: Kind) -> float | None:
        every = self._lines(variant.name, variant.ratio, kind)
        return _mean(
            line["recall"] for line in every if variant.name == "full" or (kind, line["length"]) in self.informative
        )

    def _lines(self, cache: str, ratio: float, kind: Kind) -> list[ResultLine]:
        return [
            line for line in self.lines.lines if (line["cache"], line["ratio"], line["measure"]) == (cache, ratio, kind)
        ]


def _key(variant: Variant) -> ResultLine:
    key = {"cache": variant.name, "ratio": variant.ratio}
    return key if variant.compressor is None else {**key, "summarizer": variant.compressor.fingerprint()}


def _mean(values: Any) -> float | None:
    found = list(values)
    return math.fsum(found) / len(found) if found else None
