"""Request options (:class:`SamplingParams`) and results (:class:`SequenceEvent`).

Plain values, no torch.

Every field of :class:`SamplingParams` is applied or refused by name; ranges are checked once, here. Sampling state is a
function of the tokens, the seed, the sample index and the position, so nothing is stored and no neighbor can change it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

from kvad import cache
from kvad.errors import RequestError, suggest

FinishReason = Literal["stop", "length", "abort", "error"]
MAX_SAMPLES = 128
MAX_LOGPROBS = 100
BEAM_ONLY_FIELDS = (
    "num_beams",
    "length_penalty",
    "length_penalty_form",
    "early_stopping",
    "patience",
)  # options of beam search only
SAMPLING_ONLY_FIELDS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed")  # any of them requests sampling
NON_BEAM_FIELDS = ("logprobs", "stop", "prompt_logprobs")  # also unavailable with beams


@dataclass(frozen=True)
class SamplingParams:
    """Options for choosing the next tokens.

    Filters apply in this order: bans (``bad_words_ids``, ``min_tokens``), ``logit_bias``, penalties, forced tokens,
    temperature, ``top_k``, ``top_p``, ``min_p``, ``typical_p``. With ``num_beams`` > 1 a beam search runs instead of
    sampling (``beam_search.py``), and the ``n`` best hypotheses are returned at its end.
    """

    max_tokens: int | None = None  # None: up to the limit of the model or the cache
    min_tokens: int = 0  # before it, end tokens are banned and stop strings ignored
    temperature: float = 1.0  # 0: greedy, ties go to the lowest id
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0  # > 1 discourages; over prompt and output (Keskar et al. 2019)
    presence_penalty: float = 0.0  # for output tokens, once per distinct token
    frequency_penalty: float = 0.0  # for output tokens, per occurrence
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words_ids: tuple[tuple[int, ...], ...] = ()  # token sequences that must not be completed
    stop: tuple[str, ...] = ()  # strings, matched across token boundaries
    stop_token_ids: tuple[int, ...] = ()  # end a sample and are not part of its text
    ignore_eos: bool = False  # continue past the tokenizer's end tokens
    seed: int = 0
    n: int = 1  # samples
    logprobs: int | None = None  # alternatives per token; 0: only the chosen one, None: none
    prompt_logprobs: int | None = None  # the same for prompt tokens but the first
    no_repeat_ngram_size: int = 0  # 0 = off
    forced_bos_token_id: int | None = None  # first generated token
    forced_eos_token_id: int | None = None  # token at the length limit
    allowed_tokens_fn: Callable[[Sequence[int]], Sequence[int]] | None = None
    num_beams: int = 1
    length_penalty: float = 1.0
    length_penalty_form: Literal["length", "gnmt"] = "length"
    early_stopping: bool | Literal["never"] = False
    patience: float = 1.0
    overflow: cache.config.OverflowMode | None = None  # one of cache.config.OVERFLOW_MODES; None: the engine's

    def __post_init__(self) -> None:
        _check(self)

    @property
    def greedy(self) -> bool:
        """True at temperature 0 (ties: the lowest token id)."""
        return self.temperature == 0

    @staticmethod
    def from_options(**options: Any) -> SamplingParams:
        """Build from keywords; raise RequestError with the nearest name for an unknown one."""
        known_names = [f.name for f in fields(SamplingParams)]
        for name in options:
            if name not in known_names:
                raise RequestError(f"unknown sampling option {name!r}", suggest(name, known_names))
        return SamplingParams(**options)


def _check(params: SamplingParams) -> None:
    _integer("max_tokens", params.max_tokens, 0, None, optional=True)
    _integer("min_tokens", params.min_tokens, 0, None)
    _integer("top_k", params.top_k, 0, None)
    _integer("n", params.n, 1, MAX_SAMPLES)
    _integer("seed", params.seed, 0, 2**64 - 1)
    _integer("logprobs", params.logprobs, 0, MAX_LOGPROBS, optional=True)
    _integer("prompt_logprobs", params.prompt_logprobs, 0, MAX_LOGPROBS, optional=True)
    _integer("no_repeat_ngram_size", params.no_repeat_ngram_size, 0, None)
    _integer("forced_bos_token_id", params.forced_bos_token_id, 0, None, optional=True)
    _integer("forced_eos_token_id", params.forced_eos_token_id, 0, None, optional=True)
    _number("temperature", params.temperature, 0, 100)
    _number("top_p", params.top_p, 0, 1, above=True)
    _number("min_p", params.min_p, 0, 1)
    _number("typical_p", params.typical_p, 0, 1, above=True)
    _number("repetition_penalty", params.repetition_penalty, 0, 100, above=True)
    _number("presence_penalty", params.presence_penalty, -100, 100)
    _number("frequency_penalty", params.frequency_penalty, -100, 100)
    if not isinstance(params.logit_bias, Mapping):
        raise RequestError(f"logit_bias: must be a mapping of token ids to numbers, got {params.logit_bias!r}")
    _sequence("stop", params.stop, str, "texts")
    _sequence("stop_token_ids", params.stop_token_ids, int, "token ids")
    _sequence("bad_words_ids", params.bad_words_ids, (tuple, list), "sequences of token ids")
    for word in params.bad_words_ids:
        _sequence("bad_words_ids", word, int, "token ids")
    for token, bias in params.logit_bias.items():
        _number(f"logit_bias[{token}]", bias, -1000, 1000)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise RequestError(f"min_tokens: must be at most max_tokens ({params.max_tokens}), got {params.min_tokens}")
    if params.overflow is not None and params.overflow not in cache.config.OVERFLOW_MODES:
        raise RequestError(f"overflow: {params.overflow!r}", suggest(str(params.overflow), cache.config.OVERFLOW_MODES))
    _check_beams(params)
    if any(not text for text in params.stop):
        raise RequestError("stop: must not contain an empty string")
    if any(not word for word in params.bad_words_ids):
        raise RequestError("bad_words_ids: must not contain an empty sequence")


def _check_beams(params: SamplingParams) -> None:
    _integer("num_beams", params.num_beams, 1, MAX_SAMPLES)
    _number("length_penalty", params.length_penalty, -100, 100)
    _number("patience", params.patience, 0, 100, above=True)
    if params.length_penalty_form not in ("length", "gnmt"):
        raise RequestError(
            f"length_penalty_form: {params.length_penalty_form!r}",
            suggest(str(params.length_penalty_form), ("length", "gnmt")),
        )
    if params.early_stopping not in (True, False, "never"):
        raise RequestError(f"early_stopping: must be true, false or 'never', got {params.early_stopping!r}")
    if params.allowed_tokens_fn is not None and not callable(params.allowed_tokens_fn):
        raise RequestError(
            f"allowed_tokens_fn: must be a function of the tokens so far, got {params.allowed_tokens_fn!r}"
        )
    if params.num_beams == 1:
        for name in BEAM_ONLY_FIELDS:
            if getattr(params, name) != getattr(SamplingParams, name):
                raise RequestError(f"{name}: requires num_beams above 1", "Set num_beams=4, for example.")
        return
    if params.n > params.num_beams:
        raise RequestError(f"n: must be at most num_beams ({params.num_beams}), got {params.n}")
    required_values = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "stop": (), "logprobs": None}
    required_values |= {"prompt_logprobs": None, "seed": 0}
    for name, value in required_values.items():
        if getattr(params, name) != value:
            raise RequestError(
                f"{name}: cannot be combined with num_beams={params.num_beams}", "Beam search does not sample."
            )
    if params.temperature not in (0, 1):
        raise RequestError(
            f"temperature: cannot be combined with num_beams={params.num_beams}, got {params.temperature}", "Omit it."
        )


def _sequence(name: str, values: object, kind: type | tuple[type, ...], label: str) -> None:
    if isinstance(values, str) or not isinstance(values, Sequence) or not all(isinstance(v, kind) for v in values):
        raise RequestError(f"{name}: must be a list of {label}, got {values!r}")


def _integer(name: str, value: object, low: int, high: int | None, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestError(f"{name}: must be an integer, got {value!r}")
    if value < low or (high is not None and value > high):
        raise RequestError(f"{name}: must be {_range(low, high)}, got {value}")


def _number(name: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise RequestError(f"{name}: must be a finite number, got {value!r}")
    if value < low or value > high or (above and value == low):
        constraint = f"above {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
        raise RequestError(f"{name}: must be {constraint}, got {value}")


def _range(low: int, high: int | None) -> str:
    return f"at least {low}" if high is None else f"from {low} to {high}"


class TokenLogprob(NamedTuple):
    """Log-probability of a token before temperature and filters, and the best alternatives."""

    token_id: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...] = ()


class SequenceOutput(NamedTuple):
    """Result of the model runner and the sampler for one scheduled sequence."""

    token_id: int | None = None  # None: the span ends before the sequence's last token
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the prompt tokens after the span's logit positions
    error: str | None = None  # non-finite numbers, for example; tokens and blocks must not be used
    output: Any = None  # encoder output for a request without a decoder
    candidates: tuple[tuple[int, float], ...] = ()  # best continuations of a beam (token, log-probability), best first
    retry: bool = False  # with an error from lost data: the tokens can be recomputed


class SequenceEvent(NamedTuple):
    """Event of one sample: a token, prompt log-probabilities, an encoder's output, or its end."""

    request: int
    sample_index: int
    token_id: int | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    output: Any = None
    cumulative_logprob: float | None = None  # score of a beam search's hypothesis
    limit: cache.config.LengthLimit | None = None  # the limit reached, for finish reason "length"
