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
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from kvad import benchmarks
from kvad.errors import DataError, RequestError, UsageError
from kvad.evaluation.bleu import BleuOptions, BleuScores, compute_bleu
from kvad.evaluation.metrics import ExactMatch, LabelScores, Likelihood, count_exact_matches, score_labels
from kvad.llm import LLM
from kvad.text import Tokenizer

OpeningMode = Literal["none", "start", "window"]
ProgressFn = Callable[[int, int], None]  # (done, total)
AnswerT = TypeVar("AnswerT")
BATCH_LINES = 64  # lines that an engine gets at once
PAIR_BATCH = 4 * BATCH_LINES  # pairs that a scorer gets at once
MAX_BATCH_TOKENS = 1 << 16  # tokens of windows that a scorer gets at once


def _quiet(_done: int, _total: int) -> None: ...


def _sum_scores(
    scorer: benchmarks.scorers.TokenScorer, batches: Iterable[Sequence[tuple[benchmarks.scorers.ScoredRow, int]]]
) -> tuple[float, int, int]:
    """Return (nats, hits, scored tokens) of batches of rows, each scored from an index of its tokens on."""
    nats, hits, scored = 0.0, 0, 0
    for batch in batches:
        for (_, start), scores in zip(batch, scorer.score([row for row, _ in batch]), strict=True):
            nats += float(scores.nats[start - 1 :].sum())
            hits += int(scores.correct[start - 1 :].sum())
            scored += len(scores.nats) - (start - 1)
    return nats, hits, scored


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


def opening_token(llm: LLM) -> int | None:
    """Return the token that opens a text: the separator of documents, else BOS, else None."""
    specials = None if llm.tokenizer is None else llm.tokenizer.special_tokens
    if specials is not None and specials.separator is not None:
        return specials.separator
    if llm.generation.bos_token_id is not None or specials is None:
        return llm.generation.bos_token_id
    return specials.bos


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> list[EvalDocument]:
    """Encode texts, without empty ones; TokenizerError for a text that cannot be encoded."""
    non_empty = [text for text in texts if text]
    return [
        EvalDocument(
            torch.tensor(ids, dtype=torch.int64),
            bytes=len(text.encode()),
            words=len(text.split()),
            lines=text.count("\n") + (not text.endswith("\n")),
        )
        for text, ids in zip(non_empty, tokenizer.encode_batch(non_empty), strict=True)
        if ids
    ]


Span = tuple[
    benchmarks.scorers.ScoredRow, int
]  # one window of one document after the opening token, if any; first scored index


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
    """Score documents separately.

    Args:
        opening: The token that ``how.opening`` puts before documents or windows.
        most: Approximate number of tokens to score, in windows evenly spread over the text (None: all).
        unknown: The id of UNK, which is counted.

    Raises:
        DataError: If nothing can be scored.
        UsageError: If the model has no opening token.
    """
    if how.opening != "none" and opening is None:
        raise UsageError(f"--bos {how.opening}: this model has no token that opens a text", "--bos none")
    spans = [span for document in documents for span in _spans(document.tokens, how, opening)]
    spans = [(row, start) for row, start in spans if start < len(row.tokens)]
    if not spans:
        raise DataError("the text has fewer than two tokens: there is nothing to score")
    nats, hits, scored = _sum_scores(reader, _span_batches(_spread(spans, most), tick))
    unknowns = 0 if unknown is None else sum(int((document.tokens == unknown).sum()) for document in documents)
    return Likelihood(
        nats,
        hits,
        scored,
        tokens=sum(len(document.tokens) for document in documents),
        bytes=sum(document.bytes for document in documents),
        words=sum(document.words for document in documents),
        lines=sum(document.lines for document in documents),
        unknown=unknowns,
    )


def _spans(tokens: Tensor, how: WindowOptions, opening: int | None) -> Iterator[Span]:
    if how.opening == "window":
        first = torch.tensor([opening])
        for window in sliding_windows(len(tokens), how.window - 1, how.stride):
            known = window.scored - window.start if window.start else 0
            yield benchmarks.scorers.ScoredRow(torch.cat([first, tokens[window.start : window.stop]])), known + 1
        return
    if how.opening == "start":
        tokens = torch.cat([torch.tensor([opening]), tokens])
    for window in sliding_windows(len(tokens), how.window, how.stride):
        yield benchmarks.scorers.ScoredRow(tokens[window.start : window.stop]), window.scored - window.start


def _spread(spans: list[Span], most: int | None) -> list[Span]:
    """Select evenly spread windows with about ``most`` scored tokens; at least one."""
    total = sum(len(row.tokens) - start for row, start in spans)
    if most is None or most >= total:
        return spans
    count = max(1, len(spans) * most // total)
    return [spans[number * len(spans) // count] for number in range(count)]


def _span_batches(spans: Sequence[Span], tick: ProgressFn) -> Iterator[list[Span]]:
    """Yield windows of ``MAX_BATCH_TOKENS`` tokens; ``tick`` gets the tokens read."""
    total = sum(len(row.tokens) for row, _ in spans)
    batch, size, done = list[Span](), 0, 0
    for row, start in spans:
        batch.append((row, start))
        size += len(row.tokens)
        if size >= MAX_BATCH_TOKENS:
            yield batch
            done += size
            tick(done, total)
            batch, size = [], 0
    if batch:
        yield batch
        tick(total, total)


# ---------------------------------------------------------------- pairs


def build_pair_row(llm: LLM, source: str, target: str) -> tuple[benchmarks.scorers.ScoredRow, int]:
    """Build (a row of an encoder-decoder, number of its given tokens): opening tokens, the text, its end token, if any.

    Raises:
        RequestError: For a side that exceeds the model's limit.
    """
    generation, limit = llm.generation, llm.model.config.max_seq_len
    given = list(llm.texts.encode_target(None))
    given += [] if generation.forced_bos_token_id is None else [generation.forced_bos_token_id]
    assert llm.tokenizer is not None
    tokens = [*given, *llm.tokenizer.encode(target), *generation.eos_token_ids[:1]]
    source_tokens = llm.texts.encode_source(source)
    if len(tokens) - 1 > limit:
        raise RequestError(f"a target has {len(tokens) - 1} tokens and the model's limit is {limit}", "shorten it")
    return benchmarks.scorers.ScoredRow(torch.tensor(tokens), torch.tensor(source_tokens)), len(given)


def evaluate_pairs(
    llm: LLM, reader: benchmarks.scorers.TokenScorer, pairs: Sequence[tuple[str, str]], *, tick: ProgressFn = _quiet
) -> Likelihood:
    """Score targets given their sources, teacher-forced.

    ``tokens`` is ``scored``: all of a target's tokens and its end; ``lines`` is the number of pairs, so perplexity per
    word can count a target's end or not. Raises as ``build_pair_row``.
    """
    rows = [build_pair_row(llm, source, target) for source, target in pairs]

    def batches() -> Iterator[list[Span]]:
        for low in range(0, len(rows), PAIR_BATCH):
            yield rows[low : low + PAIR_BATCH]
            tick(min(low + PAIR_BATCH, len(rows)), len(rows))

    nats, hits, scored = _sum_scores(reader, batches())
    targets = [target for _, target in pairs]
    unknown = None if llm.tokenizer is None else llm.tokenizer.special_tokens.unk
    return Likelihood(
        nats,
        hits,
        scored,
        tokens=scored,
        bytes=sum(len(target.encode()) for target in targets),
        words=sum(len(target.split()) for target in targets),
        lines=len(targets),
        unknown=0 if unknown is None else sum(int((row.tokens == unknown).sum()) for row, _ in rows),
    )


def generate_answers(
    llm: LLM, prompts: Sequence[str], sampling: dict[str, Any], *, tick: ProgressFn = _quiet
) -> list[str]:
    """Generate the answers to prompts or sources, lines of similar length together; "" to an empty prompt.

    ``sampling``: options of ``LLM.generate``.
    """
    answers = [""] * len(prompts)
    order = sorted((n for n, text in enumerate(prompts) if text.strip()), key=lambda n: (len(prompts[n]), n))
    for low in range(0, len(order), BATCH_LINES):
        batch = order[low : low + BATCH_LINES]
        texts, numbers = [prompts[n] for n in batch], [n + 1 for n in batch]
        completions = answer_all(lambda texts: llm.generate(texts, **sampling), texts, numbers)
        for number, completion in zip(batch, completions, strict=True):
            answers[number] = completion.text
        tick(low + len(batch), len(order))
    return answers


def answer_all(
    ask: Callable[[list[str]], Sequence[AnswerT]], texts: list[str], numbers: Sequence[int]
) -> Sequence[AnswerT]:
    """Answer all texts; DataError with the number of a text that cannot be read."""
    try:
        return ask(texts)
    except RequestError:
        for number, text in zip(numbers, texts, strict=True):
            try:
                ask([text])
            except RequestError as error:
                hint = "nothing is cut: leave it out, or train with a longer --seq-len"
                raise DataError(f"text {number}: {error.message}", hint) from error
        raise


def evaluate_answers(
    predicted: Sequence[str], references: Sequence[str], form: BleuOptions, *, compare: bool = True
) -> tuple[ExactMatch, BleuScores | None]:
    """Compute exact match, and with ``compare`` BLEU and chrF."""
    match = count_exact_matches(predicted, references, lower=form.lowercase)
    return match, compute_bleu(predicted, references, form) if compare else None


# ---------------------------------------------------------------- labels


def predict_tags(llm: LLM, sentences: Sequence[Sequence[str]], *, tick: ProgressFn = _quiet) -> list[list[str]]:
    """Predict a label for every word, that of its first token; words are joined by spaces.

    Raises:
        DataError: For a sentence whose words are not separate tokens, or one that exceeds the model's limit.
    """
    tags = list[list[str]]()
    for low in range(0, len(sentences), BATCH_LINES):
        batch = sentences[low : low + BATCH_LINES]
        numbers = range(low + 1, low + 1 + len(batch))
        predicted = answer_all(llm.tag, [" ".join(words) for words in batch], numbers)
        for number, words, tagged in zip(numbers, batch, predicted, strict=True):
            if len(tagged) != len(words):
                raise DataError(
                    f"sentence {number}: the model labels {len(tagged)} words and the file has {len(words)}",
                    "words must hold no spaces and be known to the tokenizer as words",
                )
            tags.append([word.label for word in tagged])
        tick(len(tags), len(sentences))
    return tags


def evaluate_tags(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> LabelScores:
    """Score predicted labels of sentences, word by word."""
    assert [len(one) for one in gold] == [len(one) for one in predicted], "a prediction for every word"
    return score_labels([label for one in gold for label in one], [label for one in predicted for label in one])
