"""What a caller asks for (:class:`Sampling`) and what comes back (:class:`Event`): plain values, no torch.

Every field of :class:`Sampling` is applied or refused by name; the ranges are checked once, here.  All sampling state
is a function of the tokens, the seed, the sample's number and the position: there is nothing to save and nothing that
a neighbour could change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

from kvad import cache
from kvad.errors import RequestError, suggest

FinishReason = Literal["stop", "length", "cancelled", "error"]
MAX_SAMPLES = 128
MAX_LOGPROBS = 100
BEAM_ONLY_FIELDS = (
    "num_beams",
    "length_penalty",
    "length_penalty_form",
    "early_stopping",
    "patience",
)  # what only a beam search heeds
SAMPLING_ONLY_FIELDS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed")  # any of them asks for samples
NON_BEAM_FIELDS = ("logprobs", "stop", "prompt_logprobs")  # these of no beam search either


@dataclass(frozen=True)
class SamplingParams:
    """How to choose the next tokens.

    ``temperature`` 0 is greedy (ties: the lowest id).  Filters apply in this order: bans (``bad_words``,
    ``min_tokens``), ``logit_bias``, penalties, temperature, ``top_k``, ``top_p``, ``min_p``, ``typical_p``.
    ``max_tokens``: at most so many; the model's or the cache's limit may end a sample before (finish reason "length"
    either way; ``Event.limit`` says which).  ``on_full``: what is done at a limit and when the pool runs out, one of
    kvad/cache/full.py; None: as the engine does.
    ``min_tokens``: before it, end tokens are banned and stop strings are not looked for.
    ``stop_tokens`` end a sample and are not part of its text; ``stop`` are strings, matched across token boundaries.
    ``ignore_eos`` goes on past the tokenizer's end tokens.  ``logprobs``: the number of alternatives reported beside
    the chosen token (0 = only the chosen one's, None = none); reported before temperature and filters.
    ``prompt_logprobs``: likewise for every prompt token but the first.
    ``no_repeat_ngram``: no sequence of so many tokens comes twice.  ``forced_first`` and ``forced_last``: the first
    generated token, and the one at the limit.  ``allowed``: given all tokens so far, the ids that may come next.

    ``beams`` > 1 searches instead of sampling (``beams.py``): the ``n`` best of its hypotheses come when all is done.
    """

    max_tokens: int | None = None  # None: up to the model's limit
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0  # > 1 discourages; over prompt and output (Keskar et al. 2019)
    presence_penalty: float = 0.0  # over the output, once per distinct token
    frequency_penalty: float = 0.0  # over the output, per occurrence
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words_ids: tuple[tuple[int, ...], ...] = ()  # token sequences that must not be completed
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    no_repeat_ngram_size: int = 0
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | None = None
    allowed_tokens_fn: Callable[[Sequence[int]], Sequence[int]] | None = None
    num_beams: int = 1
    length_penalty: float = 1.0
    length_penalty_form: Literal["length", "gnmt"] = "length"
    early_stopping: bool | Literal["never"] = False
    patience: float = 1.0
    overflow: cache.config.OverflowMode | None = None

    def __post_init__(self) -> None:
        _check(self)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @staticmethod
    def from_options(**options: Any) -> SamplingParams:
        """Build from keywords; RequestError offers the nearest name for an unknown one."""
        known = [f.name for f in fields(SamplingParams)]
        for name in options:
            if name not in known:
                raise RequestError(f"unknown sampling option {name!r}", suggest(name, known))
        return SamplingParams(**options)


def _check(s: SamplingParams) -> None:
    _integer("max_tokens", s.max_tokens, 0, None, optional=True)
    _integer("min_tokens", s.min_tokens, 0, None)
    _integer("top_k", s.top_k, 0, None)
    _integer("n", s.n, 1, MAX_SAMPLES)
    _integer("seed", s.seed, 0, 2**64 - 1)
    _integer("logprobs", s.logprobs, 0, MAX_LOGPROBS, optional=True)
    _integer("prompt_logprobs", s.prompt_logprobs, 0, MAX_LOGPROBS, optional=True)
    _integer("no_repeat_ngram", s.no_repeat_ngram_size, 0, None)
    _integer("forced_first", s.forced_bos_token_id, 0, None, optional=True)
    _integer("forced_last", s.forced_eos_token_id, 0, None, optional=True)
    _number("temperature", s.temperature, 0, 100)
    _number("top_p", s.top_p, 0, 1, above=True)
    _number("min_p", s.min_p, 0, 1)
    _number("typical_p", s.typical_p, 0, 1, above=True)
    _number("repetition_penalty", s.repetition_penalty, 0, 100, above=True)
    _number("presence_penalty", s.presence_penalty, -100, 100)
    _number("frequency_penalty", s.frequency_penalty, -100, 100)
    if not isinstance(s.logit_bias, Mapping):
        raise RequestError(f"logit_bias: expected token ids with numbers, found {s.logit_bias!r}")
    _sequence("stop", s.stop, str, "texts")
    _sequence("stop_tokens", s.stop_token_ids, int, "token ids")
    _sequence("bad_words", s.bad_words_ids, (tuple, list), "sequences of token ids")
    for word in s.bad_words_ids:
        _sequence("bad_words", word, int, "token ids")
    for token, bias in s.logit_bias.items():
        _number(f"logit_bias[{token}]", bias, -1000, 1000)
    if s.max_tokens is not None and s.min_tokens > s.max_tokens:
        raise RequestError(f"min_tokens {s.min_tokens} exceeds max_tokens {s.max_tokens}")
    if s.overflow is not None and s.overflow not in cache.config.OVERFLOW_MODES:
        raise RequestError(f"on_full: {s.overflow!r}", suggest(str(s.overflow), cache.config.OVERFLOW_MODES))
    _check_beams(s)
    if any(not text for text in s.stop):
        raise RequestError("stop: an empty string would stop at once")
    if any(not word for word in s.bad_words_ids):
        raise RequestError("bad_words: an empty sequence")


def _check_beams(s: SamplingParams) -> None:
    _integer("beams", s.num_beams, 1, MAX_SAMPLES)
    _number("length_penalty", s.length_penalty, -100, 100)
    _number("patience", s.patience, 0, 100, above=True)
    if s.length_penalty_form not in ("length", "gnmt"):
        raise RequestError(
            f"length_form: {s.length_penalty_form!r}", suggest(str(s.length_penalty_form), ("length", "gnmt"))
        )
    if s.early_stopping not in (True, False, "never"):
        raise RequestError(f"early_stopping: {s.early_stopping!r} is not true, false or 'never'")
    if s.allowed_tokens_fn is not None and not callable(s.allowed_tokens_fn):
        raise RequestError(f"allowed: expected a function of the tokens so far, found {s.allowed_tokens_fn!r}")
    if s.num_beams == 1:
        for name in BEAM_ONLY_FIELDS:
            if getattr(s, name) != getattr(SamplingParams, name):
                raise RequestError(f"{name}= is for a beam search, and there are no beams", "give beams=4, say")
        return
    if s.n > s.num_beams:
        raise RequestError(f"n {s.n} exceeds beams {s.num_beams}")
    plain = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "stop": (), "logprobs": None}
    plain |= {"prompt_logprobs": None, "seed": 0}
    for name, value in plain.items():
        if getattr(s, name) != value:
            raise RequestError(f"{name} and beams={s.num_beams} cannot go together", "beam search does not sample")
    if s.temperature not in (0, 1):
        raise RequestError(f"temperature {s.temperature} and beams={s.num_beams} cannot go together", "leave it out")


def _sequence(name: str, values: object, kind: type | tuple[type, ...], what: str) -> None:
    if isinstance(values, str) or not isinstance(values, Sequence) or not all(isinstance(v, kind) for v in values):
        raise RequestError(f"{name}: expected a list of {what}, found {values!r}")


def _integer(name: str, value: object, low: int, high: int | None, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestError(f"{name}: expected an integer, found {value!r}")
    if value < low or (high is not None and value > high):
        raise RequestError(f"{name}: {value} is out of range, must be {_range(low, high)}")


def _number(name: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise RequestError(f"{name}: expected a finite number, found {value!r}")
    if value < low or value > high or (above and value == low):
        wanted = f"above {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
        raise RequestError(f"{name}: {value} is out of range, must be {wanted}")


def _range(low: int, high: int | None) -> str:
    return f"at least {low}" if high is None else f"from {low} to {high}"


class TokenLogprob(NamedTuple):
    """A token's log-probability under the model (before temperature and filters) and the best alternatives."""

    token_id: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...] = ()


class SequenceOutput(NamedTuple):
    """What the runner and sampler found for one span of a plan.

    ``token`` None: this span ends before its row's last token, so there was nothing to sample.
    ``prompt``: scores of the prompt tokens that follow this span's wanted positions.
    ``fault``: why this row's numbers cannot be trusted; its tokens and blocks must not be used.
    ``candidates``: a beam's best continuations (token, log-probability), best first.
    ``again``: beside a fault that is not the row's own: what it read is gone, and can be computed anew.
    ``output``: what an encoder answers for a row that asks for that (numbers; the scheduler hands it on).
    """

    token_id: int | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None
    output: Any = None
    candidates: tuple[tuple[int, float], ...] = ()
    retry: bool = False


class SequenceEvent(NamedTuple):
    """One thing that happened to one sample of a request: a token, prompt scores, an encoder's answer, or its end.

    ``total``: the score of a beam search's hypothesis, with its end.  ``limit``: of the finish reason "length", which.
    """

    request: int
    sample_index: int
    token_id: int | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    output: Any = None
    cumulative_logprob: float | None = None
    limit: cache.config.LengthLimit | None = None
