"""Loss and generated outputs of a model on texts, pairs and labels (``kvad eval``).

**Text.** A document is read in windows of ``window`` tokens that begin every ``stride`` tokens. The first window
scores all of its tokens that have one before them; every later window scores only what the one before did not, its
last ``stride`` tokens, each with at least ``window - stride`` tokens before it (Hugging Face's "perplexity of
fixed-length models")::

    window 4, stride 2, tokens 0..6     reads 0 1 2 3   scores   1 2 3
                                        reads 2 3 4 5   scores   4 5
                                        reads 4 5 6     scores   6

With ``stride = window`` nothing overlaps and the first token of every window is not scored. The ``opening`` token (a
document's separator, BOS) precedes each document (``start``), so that its first token is scored too, or every
``window``, as one of its tokens, or nothing (``none``). It is read and never scored. Positions count from 0 in every
window. All scored tokens have equal weight; means over windows or lines are not computed.

**Pairs.** The target is scored token by token after its start token, its end token included.

**Length extrapolation**: the loss on rows longer than those of training (Press et al. 2021, fig. 1). At every length n
the *same* tokens of a text are scored, so the text's own difficulty is the same everywhere: the last ``trained / 2``
tokens of rows of n tokens, each with at least ``n - trained / 2`` tokens before it. A model that extrapolates loses
nothing, or gains from the longer context. ``whole`` is the mean over all tokens of the same rows, as in an evaluation
in rows of n tokens without overlap::

    trained 4, longest 8:   n = 4   reads 4 .. 7     scores  6  7        n = 8   reads 0 .. 7     scores  6  7
                                    reads 6 .. 9     scores  8  9                reads 2 .. 9     scores  8  9

The model's limit does not apply. RoPE, ALiBi, T5's bias, sinusoids and models without positions are computed to any
length; learned positions end with their table, and lengths beyond it are omitted with a note. No cache is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from kvad import benchmarks
from kvad.benchmarks import ScoredRow
from kvad.config import ModelConfig
from kvad.errors import DataError, RequestError, UsageError
from kvad.evaluation.metrics import Likelihood
from kvad.llm import LLM
from kvad.model import Transformer
from kvad.text import Tokenizer

OpeningMode = Literal["none", "start", "window"]
ProgressFn = Callable[[int, int], None]  # (done, total)
T = TypeVar("T")
BATCH_LINES = 64  # lines that an engine gets at once
MAX_BATCH_TOKENS = 1 << 16  # tokens of windows that a scorer gets at once
MULTIPLES = (1.0, 2.0, 4.0, 8.0, 16.0)  # of the trained length


def _quiet(_done: int, _total: int) -> None: ...


class _Sums(NamedTuple):
    nats: float  # of the scored tokens
    hits: int
    scored: int
    all_nats: float  # of all tokens of the rows


def _sum_scores(
    scorer: benchmarks.scorers.TokenScorer, rows: Sequence[ScoredRow], tick: ProgressFn, *, in_rows: bool = False
) -> _Sums:
    """Score ``rows`` in batches of ``MAX_BATCH_TOKENS`` tokens; ``tick`` gets the tokens (or rows) done."""
    nats, hits, scored, all_nats = 0.0, 0, 0, 0.0
    total, done, size = sum(len(row.tokens) for row in rows), 0, 0
    batch = list[ScoredRow]()
    for number, row in enumerate(rows, 1):
        batch.append(row)
        size += len(row.tokens)
        if size < MAX_BATCH_TOKENS and number < len(rows):
            continue
        for each, scores in zip(batch, scorer.score(batch), strict=True):
            nats += float(scores.nats[each.start - 1 :].sum())
            hits += int(scores.correct[each.start - 1 :].sum())
            scored += len(each.tokens) - each.start
            all_nats += float(scores.nats.sum())
        batch, done, size = [], done + size, 0
        tick(*((number, len(rows)) if in_rows else (done, total)))
    return _Sums(nats, hits, scored, all_nats)


# ---------------------------------------------------------------- texts


class EvalDocument(NamedTuple):
    """``tokens`` [n] int64; UTF-8 bytes, whitespace-separated words and lines of the text."""

    tokens: Tensor
    bytes: int
    words: int
    lines: int


class EvalWindow(NamedTuple):
    """Tokens ``start`` to ``stop`` of a document are read, those from ``scored`` on are scored."""

    start: int
    stop: int
    scored: int


@dataclass(frozen=True)
class WindowOptions:
    """Division of documents into windows (see the module); UsageError for invalid values."""

    window: int
    stride: int
    opening: OpeningMode = "none"

    def __post_init__(self) -> None:
        if self.window < 2:
            raise UsageError(f"--window {self.window}: a token is scored behind at least one other", "2 or more")
        if self.opening == "window" and self.stride == self.window:
            raise UsageError("--stride: of a window that begins with BOS one token fewer is text", "a smaller --stride")
        if not 1 <= self.stride <= self.window:
            raise UsageError(f"--stride {self.stride}: must be from 1 to the window of {self.window}")


def sliding_windows(tokens: int, window: int, stride: int) -> Iterator[EvalWindow]:
    """Yield the windows of a document of ``tokens`` tokens, until its last one is scored."""
    known = 0
    for start in range(0, tokens, stride):
        stop = min(start + window, tokens)
        yield EvalWindow(start, stop, max(known, start + 1))
        known = stop
        if stop == tokens:
            return


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> list[EvalDocument]:
    """Encode texts, without empty ones; TokenizerError for a text that cannot be encoded."""
    non_empty = [text for text in texts if text]
    return [
        EvalDocument(
            torch.tensor(ids), len(text.encode()), len(text.split()), text.count("\n") + (not text.endswith("\n"))
        )
        for text, ids in zip(non_empty, tokenizer.encode_batch(non_empty), strict=True)
        if ids
    ]


def evaluate_text(
    reader: benchmarks.scorers.TokenScorer,
    documents: Sequence[EvalDocument],
    how: WindowOptions,
    opening: int | None = None,
    *,
    most: int | None = None,
    unknown: int | None = None,
    tick: ProgressFn = _quiet,
) -> Likelihood:
    """Score documents separately; DataError if nothing can be scored, UsageError without a needed opening token.

    Args:
        opening: The token that ``how.opening`` puts before documents or windows.
        most: Approximate number of tokens to score, in windows evenly spread over the text (None: all).
        unknown: The id of UNK, which is counted.
    """
    if how.opening != "none" and opening is None:
        raise UsageError(f"--bos {how.opening}: this model has no token that opens a text", "--bos none")
    rows = [row for document in documents for row in _window_rows(document.tokens, how, opening)]
    rows = [row for row in rows if row.start < len(row.tokens)]
    if not rows:
        raise DataError("the text has fewer than two tokens: there is nothing to score")
    if most is not None:
        total = sum(len(row.tokens) - row.start for row in rows)
        rows = _spread(rows, max(1, len(rows) * most // total)) if most < total else rows
    return _likelihood(_sum_scores(reader, rows, tick), documents, sum(len(each.tokens) for each in documents), unknown)


def _likelihood(sums: _Sums, documents: Sequence[EvalDocument], tokens: int, unknown: int | None) -> Likelihood:
    sizes = {name: sum(getattr(each, name) for each in documents) for name in ("bytes", "words", "lines")}
    unknowns = 0 if unknown is None else sum(int((each.tokens == unknown).sum()) for each in documents)
    return Likelihood(sums.nats, sums.hits, sums.scored, tokens=tokens, **sizes, unknown=unknowns)


def _window_rows(tokens: Tensor, how: WindowOptions, opening: int | None) -> Iterator[ScoredRow]:
    """Yield the windows of one document, after the opening token, if any."""
    if how.opening == "window":
        first = torch.tensor([opening])
        for window in sliding_windows(len(tokens), how.window - 1, how.stride):
            known = window.scored - window.start if window.start else 0
            yield ScoredRow(torch.cat([first, tokens[window.start : window.stop]]), start=known + 1)
        return
    if how.opening == "start":
        tokens = torch.cat([torch.tensor([opening]), tokens])
    for window in sliding_windows(len(tokens), how.window, how.stride):
        yield ScoredRow(tokens[window.start : window.stop], start=window.scored - window.start)


def _spread(items: Sequence[T], count: int) -> list[T]:
    """Select ``count`` evenly spread items."""
    return [items[number * len(items) // count] for number in range(count)]


# ---------------------------------------------------------------- length extrapolation


@dataclass(frozen=True)
class LengthPoint:
    """Scores of rows of ``length`` tokens, ``multiple`` times the trained length."""

    multiple: float
    length: int
    scored: int  # tokens, the same at every length
    loss: float  # mean nats of them
    accuracy: float
    whole: float  # mean nats of all tokens

    @property
    def perplexity(self) -> float:
        return math.exp(min(700.0, self.loss))

    @property
    def whole_perplexity(self) -> float:
        return math.exp(min(700.0, self.whole))


@dataclass(frozen=True)
class LengthCurve:
    """A length curve."""

    positions: str  # the model's encoding
    trained: int
    limit: int
    rows: int  # of every length
    points: tuple[LengthPoint, ...]
    note: str = ""  # what was omitted


def position_kinds(config: ModelConfig) -> str:
    """Return the position encodings of a model, joined by a plus: rope, alibi, t5, learned, sinusoidal, none."""
    kinds = [config.embedding.position, *(layer.attention.position for layer in config.stack.layer_types.values())]
    return "+".join(dict.fromkeys(kind.kind for kind in kinds if kind is not None)) or "none"


def extrapolate(
    model: Transformer,
    texts: Sequence[Tensor],
    trained: int,
    *,
    multiples: Sequence[float] = MULTIPLES,
    most: int = 8_192,
    tick: benchmarks.results.Progress = benchmarks.results.no_progress,
) -> LengthCurve:
    """Compute the curve of a decoder over texts [n] of int64 ids; those shorter than the longest row are omitted.

    ``trained``: tokens of the training rows; ``most``: approximate number of scored tokens at each length. UsageError
    for impossible multiples, or if not even the first length can be computed; DataError if no text is long enough.
    """
    if not multiples or any(multiple <= 0 for multiple in multiples):
        raise UsageError("--length-multiples: numbers above 0, as in 1,2,4,8,16")
    lengths, left = {multiple: round(trained * multiple) for multiple in sorted(set(multiples))}, list[int]()
    table_end = benchmarks.scorers.max_row_length(model.config)
    if table_end is not None:
        table_end = max(table_end, model.config.max_seq_len)
        left = [length for length in lengths.values() if length > table_end]
        lengths = {multiple: length for multiple, length in lengths.items() if length <= table_end}
    if not lengths or min(lengths.values()) < 2:
        raise UsageError(f"--length-multiples: of a trained length of {trained} no row can be read", "larger ones")
    longest, scored = max(lengths.values()), min(trained, *lengths.values()) // 2
    # A row's last ``scored`` tokens are scored by no other row.
    ends = [(number, end) for number, text in enumerate(texts) for end in range(longest, len(text) + 1, scored)]
    if not ends:
        have = max(map(len, texts), default=0)
        raise DataError(
            f"the longest text has {have:,} tokens, and a row takes {longest:,}",
            "longer texts (--document-unit joined makes one of all), or smaller --length-multiples",
        )
    ends = _spread(ends, max(1, min(len(ends), most // scored)))
    scorer = benchmarks.scorers.UncachedScorer(model, longest)
    points = []
    for multiple, length in lengths.items():
        rows = [ScoredRow(texts[number][end - length : end], start=length - scored) for number, end in ends]
        sums = _sum_scores(scorer, rows, partial(tick, f"{multiple:g} times the trained length"))
        whole = sums.all_nats / (len(rows) * (length - 1))
        losses = sums.nats / sums.scored, sums.hits / sums.scored, whole
        points.append(LengthPoint(multiple, length, sums.scored, *losses))
    omitted = ", ".join(f"{length:,}" for length in left)
    note = f"learned positions end at their table of {table_end:,}: no rows of {omitted} tokens" if left else ""
    return LengthCurve(position_kinds(model.config), trained, model.config.max_seq_len, len(ends), tuple(points), note)


def join_texts(texts: Sequence[Tensor], opening: int | None) -> Tensor:
    """Join all texts to one stream, with the opening token, if any, before each."""
    first = torch.empty(0, dtype=torch.int64) if opening is None else torch.tensor([opening])
    return torch.cat([part for text in texts for part in (first, text)])


# ---------------------------------------------------------------- pairs


def build_pair_row(llm: LLM, source: str, target: str) -> ScoredRow:
    """Build a row of an encoder-decoder: opening tokens, which are not scored, the text, its end token, if any.

    RequestError for a side that exceeds the model's limit.
    """
    generation, limit = llm.generation, llm.model.config.max_seq_len
    given = list(llm.texts.encode_target(None))
    given += [] if generation.forced_bos_token_id is None else [generation.forced_bos_token_id]
    assert llm.tokenizer is not None
    tokens = [*given, *llm.tokenizer.encode(target), *generation.eos_token_ids[:1]]
    source_tokens = llm.texts.encode_source(source)
    if len(tokens) - 1 > limit:
        raise RequestError(f"a target has {len(tokens) - 1} tokens and the model's limit is {limit}", "shorten it")
    return ScoredRow(torch.tensor(tokens), torch.tensor(source_tokens), start=len(given))


def evaluate_pairs(
    llm: LLM, reader: benchmarks.scorers.TokenScorer, pairs: Sequence[tuple[str, str]], *, tick: ProgressFn = _quiet
) -> Likelihood:
    """Score targets given their sources, teacher-forced.

    ``tokens`` is ``scored``: all of a target's tokens and its end; ``lines`` is the number of pairs, so perplexity per
    word can count a target's end or not. Raises as ``build_pair_row``.
    """
    rows = [build_pair_row(llm, source, target) for source, target in pairs]
    documents = [
        EvalDocument(row.tokens, len(target.encode()), len(target.split()), lines=1)
        for row, (_, target) in zip(rows, pairs, strict=True)
    ]
    sums = _sum_scores(reader, rows, tick, in_rows=True)
    unknown = None if llm.tokenizer is None else llm.tokenizer.special_tokens.unk
    return _likelihood(sums, documents, sums.scored, unknown)


def generate_answers(
    llm: LLM, prompts: Sequence[str], sampling: dict[str, Any], *, tick: ProgressFn = _quiet
) -> list[str]:
    """Generate the answers to prompts or sources, lines of similar length together; "" to an empty prompt.

    ``sampling``: options of ``LLM.generate``.
    """
    answers = [""] * len(prompts)
    order = sorted((n for n, text in enumerate(prompts) if text.strip()), key=lambda n: (len(prompts[n]), n))
    completions = answer_all(
        lambda texts: llm.generate(texts, **sampling), [prompts[n] for n in order], tick, [n + 1 for n in order]
    )
    for number, completion in zip(order, completions, strict=True):
        answers[number] = completion.text
    return answers


def answer_all(
    ask: Callable[[list[str]], Sequence[T]], texts: list[str], tick: ProgressFn, numbers: Sequence[int] | None = None
) -> Iterator[T]:
    """Yield the answers to texts; DataError with the number (default: from 1) of a text that cannot be read."""
    numbers = numbers or range(1, len(texts) + 1)
    for low in range(0, len(texts), BATCH_LINES):
        batch = texts[low : low + BATCH_LINES]
        try:
            answers = ask(batch)
        except RequestError:
            for number, text in zip(numbers[low:], batch, strict=False):
                try:
                    ask([text])
                except RequestError as error:
                    hint = "nothing is cut: leave it out, or train with a longer --seq-len"
                    raise DataError(f"text {number}: {error.message}", hint) from error
            raise
        yield from answers
        tick(low + len(batch), len(texts))


def predict_tags(llm: LLM, sentences: Sequence[Sequence[str]], *, tick: ProgressFn = _quiet) -> list[list[str]]:
    """Predict a label for every word, that of its first token; words are joined by spaces.

    DataError for a sentence whose words are not separate tokens, or one that exceeds the model's limit.
    """
    tags = list[list[str]]()
    predicted = answer_all(llm.tag, [" ".join(words) for words in sentences], tick)
    for words, tagged in zip(sentences, predicted, strict=True):
        if len(tagged) != len(words):
            raise DataError(
                f"sentence {len(tags) + 1}: the model labels {len(tagged)} words and the file has {len(words)}",
                "words must hold no spaces and be known to the tokenizer as words",
            )
        tags.append([word.label for word in tagged])
    return tags
