"""What the scheduler keeps of a request (:class:`Request`), of each of its samples (:class:`Row`), and a step's plan.

Plain values; the scheduler alone changes them.  Integers only: no torch.
"""

from __future__ import annotations

from typing import NamedTuple

from kvad import cache
from kvad.cache import manager
from kvad.cache.manager import BlockAllocation, EncoderAllocation, SwappedSequence
from kvad.engine.scheduling.beam_search import BeamSearch
from kvad.engine.scheduling.request import SamplingParams, TokenLogprob
from kvad.model_input import SubBatch

WAITING, RUNNING, DONE = "waiting", "running", "done"
IDLE = "idle"  # a beam without a history: it gets one when another beam has two children


class RequestMetrics:
    """What one request has used so far.  ``cached``: prompt tokens of sample 0 that a prefix hit, or what it resumed
    from, made free; ``missed``: why what it was to resume from was of no use, "" where it was.
    Times are the scheduler's clock, in seconds: arrived, first seated, first token, last sample finished."""

    __slots__ = (
        "admitted",
        "arrived",
        "finished",
        "first_token",
        "num_cached_tokens",
        "num_completion_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "resume_miss_reason",
    )

    def __init__(self, num_prompt_tokens: int, arrived: float) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.num_completion_tokens = self.num_cached_tokens = self.num_preemptions = 0
        self.arrived = arrived
        self.resume_miss_reason = ""
        self.admitted: float | None = None
        self.first_token: float | None = None
        self.finished: float | None = None


class TokenSequence:
    """One sample of one request.  ``tokens``: prompt and generated; ``computed``: how many are in the cache.

    ``limit``: tokens, prompt included, that it may reach, ``by`` whose limit.  ``encoded``: its source can be read
    (there is none, or it is written).  ``pending``: a beam's candidates, until all beams of the request have theirs."""

    __slots__ = (
        "beam_candidates",
        "encoder_ready",
        "limited_by",
        "max_len",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_recoveries",
        "num_scored_tokens",
        "overflow",
        "prefetch",
        "priority",
        "prompt_logprobs",
        "read_bucket",
        "request",
        "request_id",
        "sample_index",
        "sampling_params",
        "seq_index",
        "state",
        "stop_tokens",
        "swapped",
        "token_ids",
    )

    def __init__(
        self,
        request: Request,
        sample_index: int,
        token_ids: list[int],
        max_len: int,
        limited_by: cache.config.LengthLimit,
        overflow: cache.config.OverflowMode,
    ) -> None:
        self.request = request
        self.request_id = request.id
        self.sample_index = sample_index
        self.sampling_params = request.sampling_params
        self.stop_tokens = request.stop_tokens
        self.priority = (request.arrival, sample_index)
        self.token_ids = token_ids
        self.num_prompt_tokens = len(token_ids)
        self.max_len, self.limited_by = max_len, limited_by
        self.overflow = overflow
        self.num_computed_tokens = 0
        self.encoder_ready = request.encoder_tokens is None
        self.beam_candidates: tuple[tuple[int, float], ...] | None = None
        self.swapped: SwappedSequence | None = None  # what it gave back, and will have again
        self.num_recoveries = 0  # how often it was begun anew, because what it had spilled could not be read
        self.prefetch: manager.prefix_offload.PrefetchRequest | None = (
            None  # what it is brought from the tiers while it waits, if they were asked
        )
        self.seq_index = -1
        self.state = WAITING
        self.num_scored_tokens = 0  # prompt positions whose successor has been scored
        self.prompt_logprobs: list[TokenLogprob] = []
        self.read_bucket = 0  # read bucket: at most this many slots

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.sample_index == 0 and self.sampling_params.prompt_logprobs is not None


class Request:
    """``source``: what the encoder reads, where there is one; ``beams``: the search over it, where it is one;
    ``promised``: blocks of each group that are kept for it (``limits.py``); ``keep``: what it leaves is asked for."""

    __slots__ = (
        "arrival",
        "beams",
        "encoder_output",
        "encoder_tokens",
        "id",
        "keep_state",
        "live_beams",
        "metrics",
        "prefix_root",
        "reserved_blocks",
        "sampling_params",
        "sequences",
        "stop_tokens",
    )

    def __init__(
        self,
        number: int,
        arrival: int,
        sampling_params: SamplingParams,
        prefix_root: bytes,
        stop_tokens: frozenset[int],
        metrics: RequestMetrics,
        encoder_tokens: tuple[int, ...] | None = None,
        encoder_output: str = "head",
    ) -> None:
        self.encoder_output = (
            encoder_output  # of an encoder's answer: what the head says, or hidden states pooled: "mean", "first"
        )
        self.encoder_tokens = encoder_tokens
        self.beams: BeamSearch | None = None
        self.reserved_blocks: tuple[int, ...] | None = None
        self.live_beams: list[TokenSequence] = []  # the beams, best first
        self.keep_state = False
        self.id = number
        self.arrival = arrival
        self.sampling_params = sampling_params
        self.prefix_root = prefix_root
        self.stop_tokens = stop_tokens
        self.metrics = metrics
        self.sequences: list[TokenSequence] = []


class FinishedState(NamedTuple):
    """What the one row of a request that ended has left: its tokens, and where their keys and values lie until the next
    step."""

    request: int
    tokens: tuple[int, ...]
    layout: manager.portable_layout.SequenceLayout


class ScheduledSequence(NamedTuple):
    """One row's part of a step: its tokens at positions ``start .. start + count - 1``.

    ``wanted``: offsets in the span whose logits are needed; ``samples``: the last of them is sampled.  The others
    score the token that follows: for prompt log-probabilities, and at the end of every span, so that no block is
    published before finite logits behind it have been seen.
    """

    sequence: TokenSequence
    start: int
    num_tokens: int
    logit_offsets: range
    is_sampled: bool


class EncoderBatch(NamedTuple):
    """A step of the encoder: the sources of ``rows``, whole, in flat order; ``placed`` None: nothing is kept."""

    sequences: tuple[TokenSequence, ...]
    sub_batches: tuple[SubBatch, ...]
    allocation: EncoderAllocation | None


class SchedulerOutput(NamedTuple):
    """``work`` in flat order (that of the lanes), placed; or, with no work, an encoder's step.

    ``cross``: how cross-attention cuts the same tokens: rows that share a source as one row (``step.Place``)."""

    scheduled: tuple[ScheduledSequence, ...]
    sub_batches: tuple[SubBatch, ...]
    allocation: BlockAllocation
    encoder_batch: EncoderBatch | None = None
    cross_sub_batches: tuple[SubBatch, ...] | None = None
