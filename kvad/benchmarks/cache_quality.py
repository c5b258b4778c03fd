"""Quality of a cache: perplexity and KL divergence against budget, and needle recall.

Everything runs through the real engine with the tested cache; the reference is the model without any cache:

*perplexity*: teacher-forced over rows of real text. A row is read in chunks of ``prefill_chunk_size`` tokens, so a
token sees what the cache has retained, and the earlier tokens of its chunk. *kl*: the mean over the same tokens of
KL(model without a cache || model with this one), in nats. *recall*: the share of tasks (``needle_tasks.py``) whose
answer is generated greedily.

The full cache is measured first. A recall is informative only if the full cache finds the needles: if it finds no more
than ``MIN_FULL_RECALL`` at a length, that length is skipped for the others and a note reports it. Results in the file
with equal weights and options are reused.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvad.benchmarks import results
from kvad.benchmarks.needle_tasks import TASK_KINDS, HaystackLanguage, Kind, NeedleTask, make_task
from kvad.benchmarks.results import Progress, ResultFolder, ResultLine, ResultLines
from kvad.benchmarks.scorers import LogitHook, attach_logit_hook, perplexity, run_engine
from kvad.benchmarks.variants import Variant, build_engine, seq_bytes
from kvad.engine import Engine
from kvad.engine.scheduling import SamplingParams
from kvad.errors import ConfigError, DataError, UsageError
from kvad.llm import LLM

JITTER = 0.05  # of a task's depth, to each side
MIN_FULL_RECALL = 0.95  # recall of the full cache below which a recall is not informative
QuestionPosition = Literal["after", "before"]
EvictionTiming = Literal["chunk", "prompt"]


@dataclass(frozen=True)
class QualityOptions:
    """Options of the benchmark.

    ``question_position``: "after" the prompt was read and evicted, token by token; or "before", in the prompt, so a
    cache that observes queries can use it (kvpress' query-agnostic and query-aware). ``evict_after``: a ranking policy
    evicts after every "chunk", as required if memory is scarce, and holds up to a chunk more than its budget in
    between; or, in tasks, only once after the "prompt", as in kvpress.
    """

    tasks: tuple[Kind, ...] = TASK_KINDS
    lengths: tuple[int, ...] = (128, 256, 512)  # of the heat map's grid
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    samples_per_cell: int = 8
    num_texts: int = 8
    text_length: int = 512
    question_position: QuestionPosition = "after"
    evict_after: EvictionTiming = "chunk"
    max_num_seqs: int = 8
    prefill_chunk_size: int = 16  # tokens of a sequence in one step
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
    """A variant's result on the texts."""

    perplexity: float
    reference: float  # perplexity without a cache
    kl: float
    agree: float  # share of tokens with the same greedy successor
    tokens: int

    @property
    def ratio(self) -> float:
        return self.perplexity / self.reference


def measure_perplexity(llm: LLM, variant: Variant, texts: Sequence[Sequence[int]], chunk: int) -> TextQuality:
    """Measure perplexity and KL divergence of a variant over rows of token ids, one row at a time."""
    sums, longest = torch.zeros(5, dtype=torch.float64), max(map(len, texts))
    with closing(build_engine(llm, variant, longest, rows=1, capacity=longest, chunk=chunk)) as engine:
        for tokens in texts:
            reference = llm.logits(tokens).float().log_softmax(-1)
            attach_logit_hook(engine, _scoring_hook(reference, tokens, sums))
            engine.add_request(tokens, SamplingParams(max_tokens=0, prompt_logprobs=0))
            run_engine(engine)
    cached, uncached, kl, agree, count = sums.tolist()
    return TextQuality(perplexity(cached / count), perplexity(uncached / count), kl / count, agree / count, int(count))


def _scoring_hook(reference: Tensor, tokens: Sequence[int], sums: Tensor) -> LogitHook:
    """Build a hook that compares a row's logits, chunk by chunk, with ``reference`` [T, V] log-probabilities.

    It adds to ``sums`` [5]: nats of the cached and of the uncached model, KL divergence, equal greedy tokens, tokens.
    """
    ids = torch.tensor(tokens, device=reference.device)

    def add(_request: int, first: int, logits: Tensor) -> None:
        last = min(first + len(logits), len(tokens) - 1)
        if last > first:
            have, true = F.log_softmax(logits[: last - first].float(), dim=-1), reference[first:last]
            targets = ids[first + 1 : last + 1].unsqueeze(-1)
            kl = (true.exp() * (true - have)).sum(-1).clamp(min=0)
            agree = true.argmax(-1) == have.argmax(-1)
            parts = (-have.gather(-1, targets), -true.gather(-1, targets), kl, agree, torch.ones_like(targets))
            sums.add_(torch.stack([part.double().sum() for part in parts]).cpu())

    return add


def greedy_answers(engine: Engine, tasks: Sequence[NeedleTask]) -> list[list[int]]:
    """Return the greedy answers of ``task.answer_tokens`` tokens; all tasks are submitted at once."""
    requests = [_submit_task(engine, task) for task in tasks]
    tokens = run_engine(engine)
    return [tokens[request][len(task.question) :] for request, task in zip(requests, tasks, strict=True)]


def score_tasks(engine: Engine, language: HaystackLanguage, tasks: Sequence[NeedleTask]) -> list[float]:
    """Return the score of the greedy answer to each task, and close the engine."""
    with closing(engine):
        answers = greedy_answers(engine, tasks)
    return [language.answer_score(task.expected, answer) for task, answer in zip(tasks, answers, strict=True)]


def _submit_task(engine: Engine, task: NeedleTask) -> int:
    """Submit a task; the question's tokens are generated, each the only one allowed at its index."""
    all_tokens, num_prompt_tokens = range(engine.model.config.vocab_size), len(task.prompt)

    def allowed(tokens: Sequence[int]) -> Sequence[int]:
        index = len(tokens) - num_prompt_tokens
        return (task.question[index],) if index < len(task.question) else all_tokens

    max_tokens = len(task.question) + task.answer_tokens
    return engine.add_request(
        task.prompt, SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, allowed_tokens_fn=allowed)
    )


def grid_cells(options: QualityOptions, kind: Kind) -> list[tuple[int, float]]:
    """Return (length, depth) of a kind's grid; a chain has one column: its links are spread over the haystack."""
    return list(product(options.lengths, options.depths if kind != "chain" else (0.0,)))


class NeedleCell(NamedTuple):
    """Recall of one cell of the grid."""

    budget: int  # retained tokens after the last eviction
    recall: float
    tasks: int


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
    count = options.samples_per_cell * (len(options.depths) if kind == "chain" else 1)  # a chain has one column
    seeds = range(options.seed * 1_000_003, options.seed * 1_000_003 + count)
    before, chunk = options.question_position == "before", options.prefill_chunk_size
    tasks = [
        make_task(kind, language, length, _near(depth, seed), seed, align=chunk, question_in_prompt=before)
        for seed in seeds
    ]
    scores = []
    for read in sorted({len(task.prompt) for task in tasks}):
        group = [task for task in tasks if len(task.prompt) == read]
        interval = read if options.evict_after == "prompt" else None
        rows = min(options.max_num_seqs, len(group))
        engine = build_engine(llm, variant, read, rows=rows, capacity=length, chunk=chunk, every=interval)
        scores += score_tasks(engine, language, group)
    return NeedleCell(variant.budget(read), math.fsum(scores) / count, count)


def _near(depth: float, seed: int) -> float:
    """Draw a depth near ``depth``: retention may depend on one position, and a cell should not."""
    return min(1.0, max(0.0, depth + random.Random(seed).uniform(-JITTER, JITTER)))


LINES_FILE = "cache-quality.jsonl"


def bench_fingerprint(llm: LLM, language: HaystackLanguage) -> str:
    """Compute a fingerprint of the weights (some of each tensor), their shapes and the language."""
    digest = hashlib.blake2b(json.dumps(llm.model.config.to_dict(), sort_keys=True).encode(), digest_size=8)
    digest.update(language.name.encode())
    for name, tensor in llm.model.state_dict().items():
        flat = tensor.flatten()
        sample = flat[:: max(1, len(flat) // 16)][:16].double().tolist()
        digest.update(f"{name} {sample}".encode())
    return digest.hexdigest()


def text_rows(
    language: HaystackLanguage, texts: Sequence[str], opening: Sequence[int], count: int, length: int
) -> list[list[int]]:
    """Cut ``count`` rows of ``length`` tokens, each after ``opening``, evenly spread over the joined texts."""
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
    """One cache in the summary; None: not measured."""

    cache: str
    ratio: float
    memory: float | None  # bytes of a text's row in the pool, over those of the full cache
    perplexity: float | None
    perplexity_ratio: float | None  # to the perplexity without a cache
    kl: float | None
    recall: Mapping[str, float | None]  # by kind, over all informative lengths (of the full cache: all)


@dataclass(frozen=True)
class QualityResult:
    """Result of the benchmark."""

    what: str
    model: str
    machine: str
    commit: str
    language: str
    parameters: int
    options: QualityOptions
    summary: tuple[SummaryRow, ...]
    notes: tuple[str, ...]  # what was not measured, and why
    lines: tuple[ResultLine, ...]


def bench_quality(
    llm: LLM,
    variants: Sequence[Variant],
    language: HaystackLanguage,
    texts: Sequence[Sequence[int]],
    options: QualityOptions,
    *,
    model: str = "",
    out: ResultFolder | None = None,
    progress: Progress = results.no_progress,
) -> QualityResult:
    """Measure ``variants``, the full cache first, perplexity over ``texts`` (rows of token ids).

    ``model``: its name in the result. UsageError for lengths beyond the model's limit, and as ``ResultLines``.
    """
    assert variants and variants[0].name == "full", "the full cache is compared with the others"
    limit = llm.model.config.max_seq_len
    for length in (*options.lengths, *map(len, texts)):
        if length > limit:
            message = f"a length of {length:,} tokens is beyond the model's limit of {limit:,}"
            raise UsageError(message, "Use a smaller length.")
    settings = {
        "what": "cache-quality",
        "model": model,
        "digest": bench_fingerprint(llm, language),
        "options": json.loads(json.dumps(asdict(options))),
        "machine": results.machine_info(),
        "commit": results.commit_id(),
    }
    path = None if out is None else out.path / LINES_FILE
    lines = ResultLines(path, settings, overwrite=out is not None and out.overwrite)
    run = _Run(llm, language, texts, options, lines)
    steps = len(variants) * (bool(texts) + sum(len(grid_cells(options, kind)) for kind in options.tasks))
    done = 0
    progress(f"{variants[0].label}: text", 0, steps)
    for number, variant in enumerate(variants, 1):
        for label in run.measure(variant):
            done += 1
            progress(f"{variant.label}: {label}", done, steps)
        done = steps * number // len(variants)  # also if this model does not support the variant
    return QualityResult(
        what="cache-quality",
        model=model,
        machine=settings["machine"],
        commit=settings["commit"],
        language=language.name,
        parameters=sum(parameter.numel() for parameter in llm.model.parameters()),
        options=options,
        summary=tuple(run.summarize(variant) for variant in variants),
        notes=tuple(run.notes),
        lines=tuple(lines.lines),
    )


@dataclass
class _Run:
    """The measurements of one benchmark."""

    llm: LLM
    language: HaystackLanguage
    texts: Sequence[Sequence[int]]
    options: QualityOptions
    lines: ResultLines
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.informative = [(kind, length) for kind in self.options.tasks for length in self.options.lengths]

    def measure(self, variant: Variant) -> Iterator[str]:
        """Measure a variant and yield a label after each step; a cache that this model does not support is noted."""
        try:
            if self.texts:
                self._measure_text(variant)
                yield "text"
            for kind in self.options.tasks:
                for length, depth in grid_cells(self.options, kind):
                    key = {**_key(variant), "measure": kind, "length": length, "depth": depth}
                    if variant.name == "full" and self._is_hopeless(kind, length):
                        continue
                    if (kind, length) in self.informative and not self.lines.select(**key):
                        cell = measure_cell(self.llm, variant, self.language, kind, length, depth, self.options)
                        self.lines.add({**key, **cell._asdict()})
                    yield f"{kind} {length}"
        except ConfigError as error:
            if variant.name == "full":
                raise
            self.notes.append(f"{variant.label}: not for this model: {error}")
        if variant.name == "full":
            self._find_informative()

    def summarize(self, variant: Variant) -> SummaryRow:
        text, full = (
            next(iter(self.lines.select(**key, measure="text")), {}) for key in (_key(variant), {"cache": "full"})
        )
        return SummaryRow(
            cache=variant.name,
            ratio=variant.ratio,
            memory=text["bytes"] / full["bytes"] if "bytes" in text and "bytes" in full else None,
            **{name: text.get(name) for name in ("perplexity", "perplexity_ratio", "kl")},
            recall={kind: self._recall(variant, kind) for kind in self.options.tasks},
        )

    def _measure_text(self, variant: Variant) -> None:
        key, chunk = {**_key(variant), "measure": "text"}, self.options.prefill_chunk_size
        if not self.lines.select(**key):
            quality = measure_perplexity(self.llm, variant, self.texts, chunk)
            longest = max(map(len, self.texts))
            num_bytes = seq_bytes(self.llm, variant, longest, chunk=chunk)
            size = {"length": longest, "budget": variant.budget(longest), "bytes": num_bytes}
            self.lines.add({**key, **size, **asdict(quality), "perplexity_ratio": quality.ratio})

    def _full_recall(self, kind: Kind, length: int) -> float | None:
        lines = self.lines.select(cache="full", ratio=0.0, measure=kind, length=length)
        return _mean(line["recall"] for line in lines)

    def _is_hopeless(self, kind: Kind, length: int) -> bool:
        """True if the full cache found no needle at a length before this one."""
        before = self.options.lengths[: self.options.lengths.index(length)]
        return any(self._full_recall(kind, each) == 0 for each in before)

    def _find_informative(self) -> None:
        """Find the informative lengths: those at which the full cache finds the needles."""
        for kind in self.options.tasks:
            poor: list[str] = []
            for length in self.options.lengths:
                recall = self._full_recall(kind, length)
                if recall is None or recall <= MIN_FULL_RECALL:
                    self.informative.remove((kind, length))
                    poor += [] if recall is None else [f"{recall:.2f} at {length}"]
            if poor:
                skipped = "" if len(poor) == len(self.options.lengths) else " (longer tasks are skipped)"
                note = (
                    f"{kind}: the full cache finds {', '.join(poor)} tokens, not more than {MIN_FULL_RECALL}{skipped}"
                )
                self.notes.append(f"{note}: another cache's recall is not informative there and is not measured")

    def _recall(self, variant: Variant, kind: Kind) -> float | None:
        lines = self.lines.select(cache=variant.name, ratio=variant.ratio, measure=kind)
        if variant.name != "full":
            lines = [line for line in lines if (kind, line["length"]) in self.informative]
        return _mean(line["recall"] for line in lines)


def _key(variant: Variant) -> ResultLine:
    key = {"cache": variant.name, "ratio": variant.ratio}
    return key if variant.compressor is None else {**key, "summarizer": variant.compressor.fingerprint()}


def _mean(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return math.fsum(numbers) / len(numbers) if numbers else None
