"""State of requests and their samples, and the output of the scheduler.

Plain values, changed by the scheduler only. Integers only: no torch.
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
IDLE = "idle"  # a beam without tokens, until another beam is forked into it


class RequestMetrics:
    """Counts and times of one request.

    ``num_cached_tokens``: prompt tokens of sample 0 from a prefix hit or a resumed state; ``resume_miss_reason``: why a
        state
    was not used, or "". Times are seconds on the scheduler's clock: arrived, first admitted, first token, finished.
    """

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
    """One sample of one request.

    ``token_ids``: prompt and generated tokens, the first ``num_computed_tokens`` of them cached; ``max_len``: maximum
        number
    of tokens, prompt included, set by ``limited_by``; ``encoder_ready``: the encoder input, if any, is cached;
    ``beam_candidates``: a beam's candidates, until all beams of the request have theirs.
    """

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
        self.swapped: SwappedSequence | None = None  # its blocks while it is swapped out
        self.num_recoveries = 0  # recomputations after offloaded tokens could not be read
        self.prefetch: manager.prefix_offload.PrefetchRequest | None = None  # blocks loading from the block store
        self.seq_index = -1
        self.state = WAITING
        self.num_scored_tokens = 0  # prompt positions whose next token is scored
        self.prompt_logprobs: list[TokenLogprob] = []
        self.read_bucket = 0  # upper bound of the slots read

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.sample_index == 0 and self.sampling_params.prompt_logprobs is not None


class Request:
    """State of one request.

    ``encoder_tokens``: the encoder's input, if any; ``beams``: the beam search, if any; ``reserved_blocks``: blocks per
        group
    reserved for it (``limits.py``); ``keep_state``: its final state was requested.
    """

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
        request_id: int,
        arrival: int,
        sampling_params: SamplingParams,
        prefix_root: bytes,
        stop_tokens: frozenset[int],
        metrics: RequestMetrics,
        encoder_tokens: tuple[int, ...] | None = None,
        encoder_output: str = "head",
    ) -> None:
        self.encoder_output = encoder_output  # "head", or hidden states pooled by "mean" or "first"
        self.encoder_tokens = encoder_tokens
        self.beams: BeamSearch | None = None
        self.reserved_blocks: tuple[int, ...] | None = None
        self.live_beams: list[TokenSequence] = []  # best first
        self.keep_state = False
        self.id = request_id
        self.arrival = arrival
        self.sampling_params = sampling_params
        self.prefix_root = prefix_root
        self.stop_tokens = stop_tokens
        self.metrics = metrics
        self.sequences: list[TokenSequence] = []


class FinishedState(NamedTuple):
    """Final tokens of an ended request, and where their keys and values are until the next step."""

    request: int
    tokens: tuple[int, ...]
    layout: manager.portable_layout.SequenceLayout


class ScheduledSequence(NamedTuple):
    """Part of a step for one sequence: tokens at positions ``start .. start + num_tokens - 1``.

    ``logit_offsets``: offsets in the span whose logits are needed; the last one is sampled if ``is_sampled``. The
        others
    score the next token: for prompt log-probabilities, and at the end of every span, so that no block is published
    before finite logits after it were seen.
    """

    sequence: TokenSequence
    start: int
    num_tokens: int
    logit_offsets: range
    is_sampled: bool


class EncoderBatch(NamedTuple):
    """Step of the encoder: whole inputs in flat order; ``allocation`` None: nothing is cached."""

    sequences: tuple[TokenSequence, ...]
    sub_batches: tuple[SubBatch, ...]
    allocation: EncoderAllocation | None


class SchedulerOutput(NamedTuple):
    """One step: sequences with allocated blocks, or an encoder's step.

    ``scheduled`` is in the flat order of the sub-batches.
    ``cross_sub_batches``: the same tokens for cross-attention, sequences with one encoder input as one row
        (``SlotMapping``).
    """

    scheduled: tuple[ScheduledSequence, ...]
    sub_batches: tuple[SubBatch, ...]
    allocation: BlockAllocation
    encoder_batch: EncoderBatch | None = None
    cross_sub_batches: tuple[SubBatch, ...] | None = None
