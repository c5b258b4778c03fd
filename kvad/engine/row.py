"""What the scheduler keeps of a request (:class:`Request`), of each of its samples (:class:`Row`), and a step's plan.

Plain values; the scheduler alone changes them.  Integers only: no torch.
"""

from __future__ import annotations

from typing import NamedTuple

from kvad.cache.deposits import Fetch
from kvad.cache.full import LimitName, OnFull
from kvad.cache.ledger import Parked, Placed
from kvad.cache.sources import PlacedSources
from kvad.cache.standing import Standing
from kvad.engine.beams import BeamGroup
from kvad.engine.request import Sampling, TokenScore
from kvad.step import Lane

__all__ = ["DONE", "IDLE", "RUNNING", "WAITING", "Encoding", "Left", "Plan", "Request", "Row", "Usage", "Work"]

WAITING, RUNNING, DONE = "waiting", "running", "done"
IDLE = "idle"  # a beam without a history: it gets one when another beam has two children


class Usage:
    """What one request has used so far.  ``cached``: prompt tokens of sample 0 that a prefix hit, or what it resumed
    from, made free; ``missed``: why what it was to resume from was of no use, "" where it was.
    Times are the scheduler's clock, in seconds: arrived, first seated, first token, last sample finished."""

    __slots__ = (
        "admitted",
        "arrived",
        "cached",
        "completion",
        "finished",
        "first_token",
        "missed",
        "preemptions",
        "prompt",
    )

    def __init__(self, prompt: int, arrived: float) -> None:
        self.prompt = prompt
        self.completion = self.cached = self.preemptions = 0
        self.arrived = arrived
        self.missed = ""
        self.admitted: float | None = None
        self.first_token: float | None = None
        self.finished: float | None = None


class Row:
    """One sample of one request.  ``tokens``: prompt and generated; ``computed``: how many are in the cache.

    ``limit``: tokens, prompt included, that it may reach, ``by`` whose limit.  ``encoded``: its source can be read
    (there is none, or it is written).  ``pending``: a beam's candidates, until all beams of the request have theirs."""

    __slots__ = (
        "by",
        "computed",
        "encoded",
        "fetch",
        "group",
        "limit",
        "losses",
        "on_full",
        "order",
        "parked",
        "pending",
        "prompt_len",
        "request",
        "sample",
        "sampling",
        "scored",
        "scores",
        "seat",
        "state",
        "stop_tokens",
        "tokens",
        "width",
    )

    def __init__(
        self, group: Request, sample: int, tokens: list[int], limit: int, by: LimitName, on_full: OnFull
    ) -> None:
        self.group = group
        self.request = group.id
        self.sample = sample
        self.sampling = group.sampling
        self.stop_tokens = group.stop_tokens
        self.order = (group.arrival, sample)
        self.tokens = tokens
        self.prompt_len = len(tokens)
        self.limit, self.by = limit, by
        self.on_full = on_full
        self.computed = 0
        self.encoded = group.source is None
        self.pending: tuple[tuple[int, float], ...] | None = None
        self.parked: Parked | None = None  # what it gave back, and will have again
        self.losses = 0  # how often it was begun anew, because what it had spilled could not be read
        self.fetch: Fetch | None = None  # what it is brought from the tiers while it waits, if they were asked
        self.seat = -1
        self.state = WAITING
        self.scored = 0  # prompt positions whose successor has been scored
        self.scores: list[TokenScore] = []
        self.width = 0  # read bucket: at most this many slots

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def wants_prompt(self) -> bool:
        return self.sample == 0 and self.sampling.prompt_logprobs is not None


class Request:
    """``source``: what the encoder reads, where there is one; ``beams``: the search over it, where it is one;
    ``promised``: blocks of each group that are kept for it (``limits.py``); ``keep``: what it leaves is asked for."""

    __slots__ = (
        "arrival",
        "beams",
        "id",
        "keep",
        "live",
        "promised",
        "root",
        "rows",
        "sampling",
        "source",
        "stop_tokens",
        "usage",
        "want",
    )

    def __init__(
        self,
        number: int,
        arrival: int,
        sampling: Sampling,
        root: bytes,
        stop_tokens: frozenset[int],
        usage: Usage,
        source: tuple[int, ...] | None = None,
        want: str = "head",
    ) -> None:
        self.want = want  # of an encoder's answer: what the head says, or hidden states pooled: "mean", "first"
        self.source = source
        self.beams: BeamGroup | None = None
        self.promised: tuple[int, ...] | None = None
        self.live: list[Row] = []  # the beams, best first
        self.keep = False
        self.id = number
        self.arrival = arrival
        self.sampling = sampling
        self.root = root
        self.stop_tokens = stop_tokens
        self.usage = usage
        self.rows: list[Row] = []


class Left(NamedTuple):
    """What the one row of a request that ended has left: its tokens, and where their keys and values lie until the next
    step."""

    request: int
    tokens: tuple[int, ...]
    standing: Standing


class Work(NamedTuple):
    """One row's part of a step: its tokens at positions ``start .. start + count - 1``.

    ``wanted``: offsets in the span whose logits are needed; ``samples``: the last of them is sampled.  The others
    score the token that follows: for prompt log-probabilities, and at the end of every span, so that no block is
    published before finite logits behind it have been seen.
    """

    row: Row
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    wanted: range
    samples: bool


class Encoding(NamedTuple):
    """A step of the encoder: the sources of ``rows``, whole, in flat order; ``placed`` None: nothing is kept."""

    rows: tuple[Row, ...]
    lanes: tuple[Lane, ...]
    placed: PlacedSources | None


class Plan(NamedTuple):
    """``work`` in flat order (that of the lanes), placed; or, with no work, an encoder's step.

    ``cross``: how cross-attention cuts the same tokens: rows that share a source as one row (``step.Place``)."""

    work: tuple[Work, ...]
    lanes: tuple[Lane, ...]
    placed: Placed
    encoding: Encoding | None = None
    cross: tuple[Lane, ...] | None = None
