"""Request options (``SamplingParams``) and results (``StreamChunk``). Plain values, no torch.

Every field of ``SamplingParams`` is applied or refused by name; ranges are checked once, here. Sampling state is a
function of the tokens, the seed and the sample index, so nothing is stored and no neighbor can change it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypedDict

from kvad import cache
from kvad import config as cfg
from kvad.engine.scheduling.structured_output import StructuredOutput
from kvad.errors import RequestError, suggest

if TYPE_CHECKING:
    from torch import Tensor

EncoderOutput = Literal["head", "first", "last", "max", "mean"]  # the head's result, or hidden states pooled
FinishReason = Literal["stop", "length", "abort", "error"]
# Errors of a sample whose options contradict each other.
NO_ALLOWED_TOKEN = (
    "every token is banned by allowed_tokens_fn, bad_words_ids, logit_bias, min_tokens, no_repeat_ngram_size or "
    "structured_output"
)
NO_ALLOWED_BEAM = "the beams have no allowed continuation"
MAX_SAMPLES = 128
MAX_LOGPROBS = 100
MAX_SEED = 2**64 - 1
# Options of beam search, and options that request sampling.
BEAM_ONLY_FIELDS = (
    "num_beams", "num_beam_groups", "diversity_penalty", "length_penalty", "length_penalty_form", "early_stopping",
    "patience",
)  # fmt: skip
SAMPLING_ONLY_FIELDS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed")

UnitInterval = Annotated[float, cfg.Range(0, 1, above=True)]  # (0, 1]
Penalty = Annotated[float, cfg.Range(-100, 100)]
PositivePenalty = Annotated[float, cfg.Range(0, 100, above=True)]
LogprobCount = Annotated[int, cfg.Range(0, MAX_LOGPROBS)]
SampleCount = Annotated[int, cfg.Range(1, MAX_SAMPLES)]


@dataclass(frozen=True)
class SamplingParams:
    """Options for choosing the next tokens.

    Filters apply in this order: bans (``bad_words_ids``, ``min_tokens``), ``logit_bias``, penalties,
    ``structured_output``, forced tokens, temperature, ``top_k``, ``top_p``, ``min_p``, ``typical_p``. With
    ``num_beams`` > 1 a beam search runs instead of sampling (``beam_search.py``), and the ``n`` best hypotheses are
    returned at its end.
    """

    max_tokens: cfg.NonNegativeInt | None = None  # None: up to the limit of the model or the cache
    min_tokens: cfg.NonNegativeInt = 0  # before it, end tokens are banned and stop strings ignored
    temperature: Annotated[float, cfg.Range(0, 100)] = 1.0  # 0: greedy, ties go to the lowest id
    top_k: cfg.NonNegativeInt = 0  # 0 = off
    top_p: UnitInterval = 1.0
    min_p: Annotated[float, cfg.Range(0, 1)] = 0.0
    typical_p: UnitInterval = 1.0
    repetition_penalty: PositivePenalty = 1.0  # > 1 discourages; over prompt and output (Keskar et al. 2019)
    presence_penalty: Penalty = 0.0  # for output tokens, once per distinct token
    frequency_penalty: Penalty = 0.0  # for output tokens, per occurrence
    logit_bias: Mapping[int, Annotated[float, cfg.Range(-1000, 1000)]] = field(default_factory=dict)
    bad_words_ids: tuple[tuple[int, ...], ...] = ()  # token sequences that must not be completed
    stop: tuple[str, ...] = ()  # strings, matched across token boundaries
    stop_token_ids: tuple[int, ...] = ()  # end a sample and are not part of its text
    visible_special_tokens: tuple[str, ...] = ()  # names of special tokens that are part of the text; others are not
    ignore_eos: bool = False  # continue past the tokenizer's end tokens
    seed: Annotated[int, cfg.Range(0, MAX_SEED)] | None = None  # None: a random one for each call
    n: SampleCount = 1  # samples
    logprobs: LogprobCount | None = None  # alternatives per token; 0: only the chosen one, None: none
    prompt_logprobs: LogprobCount | None = None  # the same for prompt tokens but the first
    no_repeat_ngram_size: cfg.NonNegativeInt = 0  # 0 = off
    forced_bos_token_id: cfg.NonNegativeInt | None = None  # first generated token
    forced_eos_token_id: cfg.NonNegativeInt | None = None  # token at the length limit
    allowed_tokens_fn: Callable[[Sequence[int]], Sequence[int]] | None = None
    # Form of the text. A sample ends with "stop", without an end token, as soon as its text is complete and nothing can
    # continue it, also with ``ignore_eos`` or before ``min_tokens``; end tokens are allowed only where a text may end.
    structured_output: StructuredOutput | None = None
    num_beams: SampleCount = 1
    num_beam_groups: SampleCount = 1  # equal parts of the beams, searched one after the other in each step
    # Subtracted from a token's log-probability per beam of an earlier group that chose it in the same step.
    diversity_penalty: Annotated[float, cfg.Range(0, 100)] = 0.0
    length_penalty: Penalty = 1.0
    length_penalty_form: Literal["length", "gnmt"] = "length"
    early_stopping: bool | Literal["never"] = False
    patience: PositivePenalty = 1.0
    overflow: cache.config.OverflowMode | None = None  # one of cache.config.OVERFLOW_MODES; None: the engine's

    def __post_init__(self) -> None:
        if self.early_stopping not in (True, False, "never"):
            raise RequestError(f"early_stopping: must be true, false or 'never', got {self.early_stopping!r}")
        cfg.check_fields(self, error=RequestError)
        if any(not text for text in self.stop):
            raise RequestError("stop: must not contain an empty string")
        if any(not word for word in self.bad_words_ids):
            raise RequestError("bad_words_ids: must not contain an empty sequence")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens: must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}")
        function = self.allowed_tokens_fn
        if function is not None and not callable(function):
            raise RequestError(f"allowed_tokens_fn: must be a function of the tokens so far, got {function!r}")
        _check_beams(self)

    @property
    def greedy(self) -> bool:
        """True at temperature 0 (ties: the lowest token id)."""
        return self.temperature == 0

    @property
    def beams_per_group(self) -> int:
        return self.num_beams // self.num_beam_groups

    @property
    def uses_seed(self) -> bool:
        """True if tokens are drawn with random numbers."""
        return not self.greedy and self.num_beams == 1

    @cached_property
    def edits_scores(self) -> bool:
        """True if bans, biases, penalties or forced tokens change scores before temperature and filters."""
        return self.edits_log_probabilities or any((self.bad_words_ids, self.min_tokens, self.no_repeat_ngram_size))

    @cached_property
    def edits_log_probabilities(self) -> bool:
        """True if biases, penalties or forced tokens change scores; of beams these are log-probabilities."""
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        forced = self.forced_bos_token_id, self.forced_eos_token_id, self.allowed_tokens_fn, self.structured_output
        return bool(self.logit_bias) or penalties != (1.0, 0.0, 0.0) or forced != (None, None, None, None)

    @cached_property
    def needs_host(self) -> bool:
        """True if the host chooses the next token: of a beam, with typical-p, a forced one, one that a mask allows."""
        forced = self.forced_bos_token_id, self.forced_eos_token_id, self.allowed_tokens_fn, self.structured_output
        return self.num_beams > 1 or forced != (None, None, None, None) or (not self.greedy and self.typical_p < 1)

    @cached_property
    def needs_token_only(self) -> bool:
        """True if the best token is all that is needed, or one drawn after temperature, top-k, top-p and min-p."""
        return not self.needs_host and self.logprobs is None and not self.edits_scores

    @cached_property
    def needs_best_only(self) -> bool:
        """True if the token with the best logit is all that is needed."""
        return self.needs_token_only and self.greedy

    def with_seed(self) -> SamplingParams:
        """Return these options with a random seed if they need one and have none."""
        return replace(self, seed=secrets.randbits(32)) if self.uses_seed and self.seed is None else self

    @staticmethod
    def from_options(**options: Any) -> SamplingParams:
        """Build from keywords; raise RequestError with the nearest name for an unknown one."""
        known_names = [f.name for f in fields(SamplingParams)]
        for name in options:
            if name not in known_names:
                raise RequestError(f"unknown sampling option {name!r}", suggest(name, known_names))
        return SamplingParams(**options)


class SamplingOptions(TypedDict, total=False):
    """The fields of ``SamplingParams`` as keywords."""

    max_tokens: int | None
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    bad_words_ids: tuple[tuple[int, ...], ...]
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    seed: int | None
    n: int
    logprobs: int | None
    prompt_logprobs: int | None
    no_repeat_ngram_size: int
    visible_special_tokens: tuple[str, ...]
    forced_bos_token_id: int | None
    forced_eos_token_id: int | None
    allowed_tokens_fn: Callable[[Sequence[int]], Sequence[int]] | None
    structured_output: StructuredOutput | None
    num_beams: int
    num_beam_groups: int
    diversity_penalty: float
    length_penalty: float
    length_penalty_form: Literal["length", "gnmt"]
    early_stopping: bool | Literal["never"]
    patience: float
    overflow: cache.config.OverflowMode | None


def _check_beams(params: SamplingParams) -> None:
    if params.num_beams == 1:
        for name in BEAM_ONLY_FIELDS:
            if getattr(params, name) != getattr(SamplingParams, name):
                raise RequestError(f"{name}: requires num_beams above 1", "Set num_beams=4, for example.")
        return
    if params.n > params.num_beams:
        raise RequestError(f"n: must be at most num_beams ({params.num_beams}), got {params.n}")
    if params.num_beams % params.num_beam_groups:
        message = f"num_beam_groups: must divide num_beams ({params.num_beams}), got {params.num_beam_groups}"
        raise RequestError(message)
    if params.diversity_penalty and params.num_beam_groups == 1:
        raise RequestError("diversity_penalty: requires num_beam_groups above 1", "Set num_beam_groups=2, for example.")
    for name in (*SAMPLING_ONLY_FIELDS, "structured_output"):
        if name != "temperature" and getattr(params, name) != getattr(SamplingParams, name):
            raise RequestError(
                f"{name}: cannot be combined with num_beams={params.num_beams}", "Beam search does not sample."
            )
    if params.temperature not in (0, 1):
        message = f"temperature: cannot be combined with num_beams={params.num_beams}, got {params.temperature}"
        raise RequestError(message, "Omit it.")


class EncoderInput(NamedTuple):
    """Input of the encoder, and which output a request without a decoder returns."""

    tokens: tuple[int, ...]
    output: EncoderOutput = "head"
    token_types: tuple[int, ...] | None = None  # of two texts; None: all tokens have type 0


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
    output: Tensor | None = None  # encoder output for a request without a decoder, or pooled hidden states
    candidates: tuple[tuple[int, float], ...] = ()  # best continuations of a beam (token, log-probability), best first
    candidate_logprobs: tuple[TokenLogprob, ...] = ()  # of the candidates, if requested
    retry: bool = False  # with an error from lost data: the tokens can be recomputed
    is_complete: bool = False  # the token completes a structured output
    next_outputs: tuple[SequenceOutput, ...] = ()  # of the tokens after the accepted drafts, one per draft


class StreamChunk(NamedTuple):
    """Output of one step for one sample: a token, prompt log-probabilities, an encoder's output, or its end.

    The scheduler fills all fields but ``text``, which the engine adds.
    """

    request: int
    sample_index: int
    token_id: int | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    output: Tensor | None = None
    cumulative_logprob: float | None = None  # score of a beam search's hypothesis
    limit: cache.config.LengthLimit | None = None  # the limit reached, for finish reason "length"
    text: str = ""  # new text, whole UTF-8, without stop strings
