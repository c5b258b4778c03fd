"""State of requests and their samples, and the output of the scheduler.

Plain values, changed by the scheduler only. Integers only: no torch.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from kvad import cache
from kvad.cache import manager
from kvad.cache.manager import BlockAllocation, EncoderAllocation, SwappedSequence
from kvad.engine.scheduling.beam_search import BeamSearch, DiverseBeamSearch
from kvad.engine.scheduling.request import EncoderInput, SamplingParams, TokenLogprob
from kvad.engine.scheduling.structured_output import Grammar, GrammarState
from kvad.model_input import SubBatch

if TYPE_CHECKING:
    from kvad.config import Pooling
    from kvad.model import PooledStates

WAITING, RUNNING, DONE = "waiting", "running", "done"
IDLE = "idle"  # a beam without tokens, until another beam is forked into it


@dataclass(slots=True, eq=False)
class RequestMetrics:
    """Counts and times of one request; times are seconds on the scheduler's clock."""

    num_prompt_tokens: int
    arrived: float
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens of sample 0 from a prefix hit or a resumed state
    num_preemptions: int = 0
    num_draft_tokens: int = 0  # that the model checked
    num_accepted_tokens: int = 0  # of them, those that were generated
    num_ram_tokens: int = 0  # of the cached tokens, those that were loaded from the block store's RAM
    num_disk_tokens: int = 0  # and from its disk
    is_resumed: bool = False  # the cached tokens are those of a resumed state
    is_source_cached: bool | None = None  # the encoder input was encoded before; None: there is none
    miss_reason: str = ""  # why no more prompt tokens were cached (``PrefixLookup.reason``)
    miss_cause: str | None = None  # what evicted them
    resume_miss_reason: str = ""  # why a given state was not used
    admitted: float | None = None  # for the first time
    first_token: float | None = None
    finished: float | None = None


@dataclass(slots=True, eq=False)
class Request:
    """State of one request."""

    id: int
    arrival: int
    sampling_params: SamplingParams
    prefix_root: bytes
    stop_tokens: frozenset[int]
    metrics: RequestMetrics
    encoder_input: EncoderInput | None = None
    keep_state: bool = False  # its final state was requested
    draw_salt: int = 0  # requests that differ in it draw other numbers
    grammar: Grammar | None = None  # of its structured output
    adapter: int = 0  # number in the engine's AdapterSet; 0: the base
    pooling: Pooling | None = None  # the hidden states of its tokens are pooled, and no token is sampled
    beams: BeamSearch | DiverseBeamSearch | None = None
    live_beams: list[TokenSequence] = field(default_factory=list)  # best first
    reserved_blocks: tuple[int, ...] | None = None  # per group (``limits.py``)
    sequences: list[TokenSequence] = field(default_factory=list)

    @property
    def encoder_tokens(self) -> tuple[int, ...]:
        return () if self.encoder_input is None else self.encoder_input.tokens

    def draw_hash(self) -> blake2b:
        """Return the hash of the seed, the salt and the encoder input, to which a sequence adds its tokens."""
        source = self.encoder_tokens
        header = struct.pack(f"<QQQ{len(source)}q", self.sampling_params.seed, self.draw_salt, len(source), *source)
        return blake2b(header, digest_size=8)


def regime_root(prefix_root: bytes, rope_regime: int) -> bytes:
    """Return the start of the block hash chain of one rotary regime: ``prefix_root`` itself for the short one."""
    return prefix_root + bytes(rope_regime)  # as many zero bytes


class TokenCounts:
    """Distinct tokens of a sequence, in the order of their first places, and how often each was generated."""

    def __init__(self) -> None:
        self.tokens, self.generated = array("q"), array("q")
        self.num_counted = 0  # tokens of the sequence
        self._index: dict[int, int] = {}  # of each token in ``tokens``

    def add(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """Count the tokens that were appended since the last call."""
        for token in token_ids[self.num_counted :]:
            index = self._index.setdefault(token, len(self.tokens))
            if index == len(self.tokens):
                self.tokens.append(token)
                self.generated.append(0)
            self.generated[index] += self.num_counted >= num_prompt_tokens
            self.num_counted += 1

    def copy(self) -> TokenCounts:
        counts = copy(self)
        counts.tokens, counts.generated, counts._index = self.tokens[:], self.generated[:], dict(self._index)
        return counts


@dataclass(slots=True, eq=False)
class TokenSequence:
    """One sample of one request: prompt and generated tokens, the first ``num_computed_tokens`` of them cached."""

    request: Request = field(repr=False)
    sample_index: int
    token_ids: list[int]
    max_len: int  # tokens, prompt included
    limited_by: cache.config.LengthLimit = "model"  # what sets max_len
    overflow: cache.config.OverflowMode = "preempt"
    rope_regime: int = 0  # of its cached tokens (``LengthLimits.rope_regime``)
    request_id: int = field(init=False)
    sampling_params: SamplingParams = field(init=False)
    stop_tokens: frozenset[int] = field(init=False)
    priority: tuple[int, int] = field(init=False)  # the lowest is the oldest
    num_prompt_tokens: int = field(init=False)
    encoder_ready: bool = field(init=False)  # the encoder input, if any, is cached
    wants_prompt_logprobs: bool = field(init=False)
    state: str = WAITING
    seq_index: int = -1
    num_computed_tokens: int = 0
    num_scored_tokens: int = 0  # prompt positions whose next token is scored
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    beam_candidates: tuple[tuple[int, float], ...] | None = None  # until all beams of the request have theirs
    candidate_logprobs: tuple[TokenLogprob, ...] = ()  # of the candidates, if requested
    swapped: SwappedSequence | None = None  # its blocks while it is swapped out
    num_recoveries: int = 0  # recomputations after offloaded tokens could not be read
    prefetch: manager.prefix_offload.PrefetchRequest | None = None  # blocks loading from the block store
    read_bucket: int = 0  # upper bound of the slots read
    draft_token_ids: tuple[int, ...] = ()  # proposed next tokens, for its next step only
    draw_hash: blake2b | None = None  # with the first ``num_hashed_tokens`` tokens
    num_hashed_tokens: int = 0
    token_counts: TokenCounts | None = None  # of the first tokens, for penalties
    grammar_state: GrammarState | None = field(init=False)  # of its structured output; the sampler's
    pooled_states: PooledStates | None = None  # of its computed tokens; the engine's

    def __post_init__(self) -> None:
        request = self.request
        self.request_id, self.stop_tokens = request.id, request.stop_tokens
        self.sampling_params = request.sampling_params
        self.priority = request.arrival, self.sample_index
        self.num_prompt_tokens = len(self.token_ids)
        self.encoder_ready = request.encoder_input is None
        self.grammar_state = None if request.grammar is None else request.grammar.start()
        self.wants_prompt_logprobs = self.sample_index == 0 and self.sampling_params.prompt_logprobs is not None

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def prefix_root(self) -> bytes:
        """Start of its block hash chain."""
        return regime_root(self.request.prefix_root, self.rope_regime)

    def draw_key(self) -> int:
        """Return the 64-bit key of the next random number: a hash of the request's seed and of all tokens so far.

        It does not depend on how the tokens were computed, so a sequence that was preempted, or a prompt that contains
        an earlier output, draws the same numbers. Tokens may be appended or removed between two calls, not changed.
        """
        if self.draw_hash is None or self.num_hashed_tokens > len(self.token_ids):
            self.draw_hash, self.num_hashed_tokens = self.request.draw_hash(), 0
        new_tokens = self.token_ids[self.num_hashed_tokens :]
        self.draw_hash.update(struct.pack(f"<{len(new_tokens)}q", *new_tokens))
        self.num_hashed_tokens = len(self.token_ids)
        return int.from_bytes(self.draw_hash.digest(), "little")

    def count_tokens(self) -> TokenCounts:
        """Return the counts of all tokens so far. Of a beam, whose tokens are replaced, all are counted again."""
        counts = self.token_counts
        if counts is None or counts.num_counted > len(self.token_ids) or self.request.beams is not None:
            counts = self.token_counts = TokenCounts()
        counts.add(self.token_ids, self.num_prompt_tokens)
        return counts

    def with_drafts(self, draft_token_ids: Sequence[int]) -> TokenSequence:
        """Return a copy, for the sampler, in which these drafts are accepted."""
        seq = copy(self)
        seq.token_ids = [*self.token_ids, *draft_token_ids]
        seq.draw_hash = None if self.draw_hash is None else self.draw_hash.copy()
        seq.token_counts = None if self.token_counts is None else self.token_counts.copy()
        seq.grammar_state = None if self.grammar_state is None else self.grammar_state.copy()
        return seq

    def add_prompt_logprobs(self, end: int, scores: Sequence[TokenLogprob]) -> None:
        """Store the scores of prompt tokens up to position ``end``; the last prompt token scores none."""
        stop = min(end, self.num_prompt_tokens - 1)
        num_scores = stop - self.num_scored_tokens
        if num_scores > 0:
            assert len(scores) == num_scores, f"{len(scores)} scores for {num_scores} tokens"
            self.prompt_logprobs.extend(scores)
            self.num_scored_tokens = stop

    def pop_prompt_logprobs(self) -> tuple[TokenLogprob, ...]:
        scores, self.prompt_logprobs = tuple(self.prompt_logprobs), []
        return scores


class SchedulerStats(NamedTuple):
    """Counts of sequences, preemptions, steps and tokens."""

    running: int
    waiting: int
    preemptions: int
    steps: int
    tokens: int  # computed tokens, recomputed ones and drafts included
    draft_tokens: int = 0  # that the model checked
    accepted_tokens: int = 0  # drafts that were generated


class FinishedState(NamedTuple):
    """Final tokens of an ended request, and where their keys and values are until the next step."""

    request: int
    tokens: tuple[int, ...]
    rope_regime: int
    layout: manager.portable_layout.SequenceLayout


class ScheduledSequence(NamedTuple):
    """Part of a step for one sequence: tokens at positions ``start .. start + num_tokens - 1``.

    The last of them are ``draft_token_ids``, which the sequence does not have yet. The logits at the end of every span
    are needed, so that no block is published before finite logits after it were seen; others score tokens of the
    prompt.
    """

    sequence: TokenSequence
    start: int
    num_tokens: int
    logit_offsets: range  # offsets in the span whose logits are needed
    is_sampled: bool  # the last of them is sampled, and with drafts one more per draft
    draft_token_ids: tuple[int, ...] = ()

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the span, drafts included."""
        end = self.start + self.num_tokens - len(self.draft_token_ids)
        return [*self.sequence.token_ids[self.start : end], *self.draft_token_ids]


class EncoderBatch(NamedTuple):
    """Step of the encoder: whole inputs in flat order; ``allocation`` None: nothing is cached."""

    sequences: tuple[TokenSequence, ...]
    sub_batches: tuple[SubBatch, ...]
    allocation: EncoderAllocation | None


class SchedulerOutput(NamedTuple):
    """One step: sequences with allocated blocks, or an encoder's step."""

    scheduled: tuple[ScheduledSequence, ...]  # in the flat order of the sub-batches
    sub_batches: tuple[SubBatch, ...]
    allocation: BlockAllocation
    encoder_batch: EncoderBatch | None = None
    cross_sub_batches: tuple[SubBatch, ...] | None = None  # for cross-attention: one encoder input is one row
    has_pooling: bool = False  # hidden states of some sequences are pooled
