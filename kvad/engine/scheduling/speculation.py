"""Speculative decoding: a drafter proposes the next tokens of a sequence, and the model checks all of them in one step.

A decoding sequence gets its last token and its drafts in one step, with logits behind each. From these the sampler
draws the tokens that it would draw without drafts. A draft that equals its token is accepted; from the first other one
on, drafts are rejected. So a request's tokens do not depend on its drafts, whatever the options of its sampling: a draw
is a function of the tokens so far (``TokenSequence.draw_key``). Rejection sampling (Leviathan et al. 2023, Chen et al.
2023) would accept a few more drafts of a sampled request, and return other tokens than without drafts.

A wrong draft costs time, never a token. Its keys and values stay in their slots, where no query sees them: their
positions are behind it until other tokens are written there. Chunks end where a policy evicts, so no slot is moved
while it holds a rejected draft.

Integers only: no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, Protocol

from kvad import config as cfg
from kvad.engine.scheduling.sequence import TokenSequence
from kvad.errors import ConfigError, suggest

MAX_DRAFTS = 32
FIRST_STEPS = 8  # with drafts, before the first ones without
PROBE_STEPS = 8  # of the slower way, now and then
MIN_STEPS, MAX_STEPS = 64, 1024  # between two probes: more while the same way remains faster
MAX_MATCHES = 64  # earlier occurrences of the last tokens that are compared
DraftCount = Annotated[int, cfg.Range(1, MAX_DRAFTS)]


@dataclass(frozen=True)
class SpeculativeConfig:
    """Options of speculative decoding.

    ``ngram`` (prompt lookup) drafts the tokens that followed the last ones when these occurred before, in the prompt
    or the output. ``draft`` asks a smaller model with the same tokenizer.
    """

    method: Literal["ngram", "draft"] = "ngram"
    num_tokens: DraftCount = 5  # drafts of a sequence per step, at most
    min_match: cfg.PositiveInt = 2  # ngram: fewest last tokens that must have occurred before
    max_match: cfg.PositiveInt = 8  # ngram: the occurrence with most equal tokens is chosen, counted up to here
    draft_model: str | None = None  # draft: checkpoint
    adaptive: bool = True  # draft nothing while measured steps generate more tokens per second without drafts

    def __post_init__(self) -> None:
        cfg.check_fields(self, "speculative")
        if self.max_match < self.min_match:
            message = f"speculative.max_match: must be at least min_match ({self.min_match}), got {self.max_match}"
            raise ConfigError(message, "Omit it.")
        if (self.method == "draft") != (self.draft_model is not None):
            raise ConfigError(
                "speculative.draft_model: must be given with method 'draft', and with no other",
                "Give a checkpoint with the same tokenizer, or use method 'ngram'.",
            )

    @staticmethod
    def from_options(value: str | Mapping[str, Any] | SpeculativeConfig | None) -> SpeculativeConfig | None:
        """Build from "ngram", "ngram:4" (drafts per step), or a mapping of fields; raise ConfigError otherwise."""
        if value is None or isinstance(value, SpeculativeConfig):
            return value
        options: dict[str, Any] = dict(value) if isinstance(value, Mapping) else {}
        if isinstance(value, str):
            options["method"], colon, count = value.partition(":")
            if colon:
                options["num_tokens"] = int(count) if count.isdecimal() else count
        known = [field.name for field in fields(SpeculativeConfig)]
        for name in options:
            if name not in known:
                raise ConfigError(f"speculative: unknown option {name!r}", suggest(name, known))
        return SpeculativeConfig(**options)


class Drafter(Protocol):
    """Proposes tokens for the decoding sequences of a step."""

    def propose(self, seqs: Sequence[TokenSequence], max_drafts: Sequence[int]) -> Sequence[Sequence[int]]:
        """Return at most ``max_drafts`` next tokens of each sequence; those of a good guess, or none.

        ``seqs`` are all sequences that decode in the next step.
        """
        ...


class DraftGate:
    """Decides by measured steps whether drafts pay, for each power of two of decoding sequences.

    Few sequences leave the processor idle while it reads the weights, so drafts cost little; many do not. Durations are
    data: no clock.
    """

    def __init__(self) -> None:
        self._trials: dict[int, _Trial] = {}
        self._latest = _Trial()

    @property
    def is_open(self) -> bool:
        """True if the next step may have drafts."""
        return self._latest.with_drafts

    def record(self, num_seqs: int, num_tokens: int, seconds: float) -> None:
        """Record a step in which ``num_seqs`` sequences decoded and generated ``num_tokens``."""
        trial = self._trials.setdefault(num_seqs.bit_length(), self._latest if not self._trials else _Trial())
        if trial is self._latest:  # otherwise the step was decided by another number of sequences
            trial.record(num_tokens, seconds)
        self._latest = trial


class _Trial:
    """Steps with and without drafts in turn: many of the faster way, then a few of the other one."""

    def __init__(self) -> None:
        self.with_drafts, self._is_probe = True, False
        self._interval, self._speeds = MIN_STEPS, dict[bool, float]()  # with drafts or not -> tokens per second
        self._start(FIRST_STEPS)

    def _start(self, num_steps: int) -> None:
        self._is_first, self._steps_left, self._tokens, self._seconds = True, num_steps, 0, 0.0

    def record(self, num_tokens: int, seconds: float) -> None:
        if self._is_first:  # left out: a draft model reads the tokens that it missed
            self._is_first = False
            return
        self._steps_left -= 1
        self._tokens, self._seconds = self._tokens + num_tokens, self._seconds + seconds
        if self._steps_left:
            return
        self._speeds[self.with_drafts] = self._tokens / max(self._seconds, 1e-9)
        if not self._is_probe:
            self.with_drafts, self._is_probe = not self.with_drafts, True
            self._start(PROBE_STEPS)
            return
        fastest = self._speeds[True] >= self._speeds[False]
        was_fastest = not self.with_drafts
        self._interval = min(2 * self._interval, MAX_STEPS) if fastest == was_fastest else MIN_STEPS
        self.with_drafts, self._is_probe = fastest, False
        self._start(self._interval)


class NgramDrafter:
    """Drafts from the sequence itself: what followed its last tokens before (prompt lookup)."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._indices: dict[tuple[int, int], _NgramIndex] = {}  # by request and sample

    def propose(self, seqs: Sequence[TokenSequence], max_drafts: Sequence[int]) -> list[list[int]]:
        old, self._indices = self._indices, {}  # without those of sequences that ended or wait
        drafts = []
        for seq, limit in zip(seqs, max_drafts, strict=True):
            key = seq.request_id, seq.sample_index
            index = self._indices[key] = old.get(key) or _NgramIndex(self._config.min_match, self._config.max_match)
            count = min(limit, self._config.num_tokens)
            drafts.append(index.continuation(seq.token_ids, count) if count > 0 else [])
        return drafts


class _NgramIndex:
    """Occurrences of each ``min_match`` tokens of one sequence, latest first, as in an LZ77 match finder.

    min_match 2, tokens 5 6 7 5 6:  {(5, 6): 2, (6, 7): 3, (7, 5): 4}, the ends of the pairs that a token follows.
    The last tokens 5 6 occurred up to 2, so the draft is 7 5 6 7 5 ...
    """

    def __init__(self, min_match: int, max_match: int) -> None:
        self._min_match, self._max_match = min_match, max_match
        self._last_end: dict[tuple[int, ...], int] = {}
        self._previous_end: list[int] = []  # of the same tokens, by end; -1: none
        self._num_indexed = 0  # ends below it

    def continuation(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return the ``count`` tokens that followed the longest match; [] without one. Tokens are only appended."""
        size, last, previous = self._min_match, self._last_end, self._previous_end
        for end in range(self._num_indexed, len(tokens)):
            if end < size:
                previous.append(-1)
                continue
            key = tuple(tokens[end - size : end])
            previous.append(last.get(key, -1))
            last[key] = end
        self._num_indexed = len(tokens)
        end = last.get(tuple(tokens[-size:]), -1) if len(tokens) > size else -1
        best_end, best_length = -1, 0
        for _ in range(MAX_MATCHES):
            if end < 0 or best_length == self._max_match:
                break
            length = self._match_length(tokens, end)
            if length > best_length:
                best_end, best_length = end, length
            end = previous[end]
        if best_end < 0:
            return []
        period = len(tokens) - best_end  # the continuation may reach into itself
        return [tokens[best_end + i % period] for i in range(count)]

    def _match_length(self, tokens: Sequence[int], end: int) -> int:
        """Return how many tokens before ``end`` equal the last ones, up to ``max_match``."""
        length = self._min_match
        while length < min(self._max_match, end) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        return length
