"""What a cache costs in quality: perplexity and KL against budget, and how much is found again.

Everything runs through the real engine, with the cache that is judged; the judge is the model without any cache
(:class:`~kvad.model.fresh.Fresh`).  Three measures:

*perplexity*: teacher-forced over rows of real text.  A row is read in chunks of ``chunk`` tokens, so a token sees what
the cache has kept, and at most so many tokens of its own chunk.  *kl*: the mean over the same tokens of
KL(model without a cache || model with this one), in nats.  *recall*: the share of tasks (``tasks.py``) whose answer
comes out when the likeliest token is taken every time.

A recall says something only where the full cache finds what was hidden: :data:`ENOUGH`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kvad.engine.engine import Engine
from kvad.engine.request import Sampling
from kvad.engine.runner import Runner
from kvad.engine.scheduler import Plan
from kvad.errors import EngineError, UsageError
from kvad.lab.tasks import KINDS, Kind, Language, Task, make_task
from kvad.lab.variants import Variant, engine_of
from kvad.llm import LLM

__all__ = ["ENOUGH", "Asked", "Options", "Price", "Text", "answers", "cells", "judged", "listen", "measure", "price"]

JITTER = 0.05  # of a task's depth, to each side
ENOUGH = 0.95  # recall of the full cache below which a bench of recall says nothing
Asked = Literal["after", "before"]
Cut = Literal["often", "once"]


@dataclass(frozen=True)
class Options:
    """``lengths`` and ``depths``: of the heat map's grid, ``tasks``: of each of its cells.  ``texts``: rows of text,
    ``text_length`` tokens each.  ``rows``: at a time.

    ``asked``: only ``after`` the prompt was read and cut, token by token; or the prompt tells ``before`` what will be
    asked then, so that a cache that looks at queries can know what it will be good for (kvpress' query-agnostic and
    query-aware).  ``chunk``: tokens of a row in one step.  ``cut``: a policy that ranks cuts after every chunk, as it
    must where memory is scarce, and holds up to a chunk more than its budget in between; or, of tasks, only ``once``,
    right behind the prompt, as kvpress' do.
    """

    kinds: tuple[Kind, ...] = KINDS
    lengths: tuple[int, ...] = (128, 256, 512)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    tasks: int = 8
    texts: int = 8
    text_length: int = 512
    asked: Asked = "after"
    cut: Cut = "often"
    rows: int = 8
    chunk: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tasks", "rows", "chunk"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}: must be at least 1, found {getattr(self, name)}")
        if self.texts < 0 or self.text_length < 2:
            raise UsageError(f"texts {self.texts} of {self.text_length} tokens: none at least, of two at least")
        for kind in self.kinds:
            if kind not in KINDS:
                raise UsageError(f"unknown task {kind!r}", ", ".join(KINDS))
        if any(not 0 <= depth <= 1 for depth in self.depths) or not self.depths:
            raise UsageError(f"depths {self.depths}: shares of the haystack, from 0 to 1")


@dataclass(frozen=True)
class Text:
    """What a variant makes of the texts.  ``ratio``: perplexity over that without a cache; ``agree``: the share of
    tokens whose likeliest successor is the same."""

    perplexity: float
    judge: float
    kl: float
    agree: float
    tokens: int

    @property
    def ratio(self) -> float:
        return self.perplexity / self.judge


# ---------------------------------------------------------------- texts


Hear = Callable[[Plan, Tensor], None]


class _Ear(Runner):
    """The engine's runner, which shows the plan and its logits [N, V] to ``hear``."""

    hear: Hear

    def run(self, plan: Plan) -> Tensor:
        logits = super().run(plan)
        self.hear(plan, logits)
        return logits


def listen(engine: Engine, hear: Hear) -> None:
    """From now on ``hear`` is shown every step's plan and logits [N, V]."""
    ear = _Ear(engine.model, engine.memory)
    ear.hear = hear
    engine.runner = ear


def judged(llm: LLM, tokens: Sequence[int]) -> Tensor:
    """[T, V] log-probabilities in float32: what the model says without a cache."""
    return llm.logits(tokens).float().log_softmax(-1)


@dataclass
class _Tally:
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

    def told(self) -> Text:
        count = self.tokens
        own, judge = _exp(self.own / count), _exp(self.judge / count)
        return Text(own, judge, self.kl / count, self.agree / count, count)


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:  # a model that is sure of what is wrong
        return math.inf


def price(
    llm: LLM, variant: Variant, texts: Sequence[Sequence[int]], chunk: int, tick: Callable[[], None] = lambda: None
) -> Text:
    """Perplexity and KL of a variant over rows of token ids, one row at a time."""
    tally = _Tally()
    longest = max(map(len, texts))
    engine = engine_of(llm, variant, longest, rows=1, capacity=longest, chunk=chunk)
    try:
        for tokens in texts:
            true = judged(llm, tokens)
            listen(engine, _against(true, tokens, tally))
            _run(engine, [engine.submit(tokens, Sampling(max_tokens=0, prompt_logprobs=0))])
            tick()
    finally:
        engine.close()
    return tally.told()


def _against(true: Tensor, tokens: Sequence[int], tally: _Tally) -> Hear:
    """Tallies a row's logits as its chunks come, beside ``true`` [T, V]."""
    ids = torch.tensor(tokens, device=true.device)

    def hear(plan: Plan, logits: Tensor) -> None:
        (work,) = plan.work
        first = work.start + work.wanted.start
        last = min(first + len(work.wanted), len(tokens) - 1)
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
            if piece.token is not None:
                found[piece.request].append(piece.token)
    return found


# ---------------------------------------------------------------- tasks


def answers(engine: Engine, tasks: Sequence[Task]) -> list[list[int]]:
    """What the engine answers to each task, greedily, ``task.room`` tokens each; all tasks are submitted at once."""
    requests = [_ask(engine, task) for task in tasks]
    found = _run(engine, requests)
    return [found[request][len(task.question) :] for request, task in zip(requests, tasks, strict=True)]


def _ask(engine: Engine, task: Task) -> int:
    """The question's tokens are generated, each the only one that is allowed in its place."""
    every, asked = range(engine.model.config.vocab), len(task.prompt)

    def allowed(tokens: Sequence[int]) -> Sequence[int]:
        place = len(tokens) - asked
        return (task.question[place],) if place < len(task.question) else every

    most = len(task.question) + task.room
    return engine.submit(task.prompt, Sampling(max_tokens=most, temperature=0, ignore_eos=True, allowed=allowed))


def cells(options: Options, kind: Kind) -> Iterator[tuple[int, float]]:
    """(length, depth) of a kind's grid; a chain has one column: its links are spread over the haystack."""
    depths = options.depths if kind != "chain" else (0.0,)
    for length in options.lengths:
        for depth in depths:
            yield length, depth


@dataclass(frozen=True)
class Price:
    """One cell: how much was found of what was hidden at ``depth`` of ``length`` tokens; ``budget``: what stayed of
    the tokens that were read before the cache was cut for the last time."""

    kind: Kind
    length: int
    depth: float
    recall: float
    tasks: int
    budget: int


def measure(
    llm: LLM, variant: Variant, language: Language, kind: Kind, length: int, depth: float, options: Options
) -> Price:
    """One cell of one variant: ``options.tasks`` tasks, of a chain as many per depth; the same for every variant."""
    count = options.tasks * (len(options.depths) if kind == "chain" else 1)  # a chain's one column weighs as much
    seeds = range(options.seed * 1_000_003, options.seed * 1_000_003 + count)
    how: dict[str, Any] = {"align": options.chunk, "told": options.asked == "before"}
    tasks = [make_task(kind, language, length, _near(depth, seed), seed, **how) for seed in seeds]
    shares = []
    for read in sorted({len(task.prompt) for task in tasks}):
        some = [task for task in tasks if len(task.prompt) == read]
        every = read if options.cut == "once" else None
        rows = min(options.rows, len(some))
        engine = engine_of(llm, variant, read, rows=rows, capacity=length, chunk=options.chunk, every=every)
        try:
            found = answers(engine, some)
        finally:
            engine.close()
        shares += [language.share(task.parts, answer) for task, answer in zip(some, found, strict=True)]
    return Price(kind, length, depth, math.fsum(shares) / count, count, variant.budget(read))


def _near(depth: float, seed: int) -> float:
    """Somewhere around the depth: what a policy keeps may hang on one position, and a cell should not."""
    return min(1.0, max(0.0, depth + random.Random(seed).uniform(-JITTER, JITTER)))
