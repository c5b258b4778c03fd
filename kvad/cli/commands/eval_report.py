"""Output of ``kvad eval`` as JSON and text, loading with the requested cache, and a line of progress. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from kvad.cli.fields import argument, option
from kvad.cli.parameters import (
    COUNT,
    NUMBERS,
    OUTPUT_FILE,
    DtypeOption,
    EndlessOption,
    FormatOptions,
    JsonOption,
    ModelArgument,
    PairFiles,
    PolicyOptions,
    QuietOption,
    WeightOptions,
    cache_fields,
    given_formats,
)
from kvad.errors import format_count

if TYPE_CHECKING:
    from kvad import evaluation
    from kvad.checkpoint import CheckpointHandle
    from kvad.llm import LLM

MAX_TOKENS = 256  # tokens of an answer, if neither the user nor the checkpoint sets it
TextLine = dict[str, Any]  # a JSON object
TextLines = list[tuple[str, str]]  # (name, text); text without a name is not indented
EvalResult = tuple[list[TextLine], TextLines]


class EvalOptions(
    ModelArgument, FormatOptions, PolicyOptions, EndlessOption, WeightOptions, DtypeOption, QuietOption, JsonOption
):
    """Options of ``kvad eval``. With --length-multiples, --json prints one object per length."""

    data: tuple[Path, ...] = argument("[DATA]...")
    task: Literal["auto", "lm", "translate", "match", "tag", "classify", "masked-lm", "span-corruption", "chat"] = (
        option("Task [default: by the model and the data]", "auto")
    )
    pairs: PairFiles = option("Two parallel files of lines", metavar="SOURCE TARGET")
    encoding_errors: Literal["strict", "replace"] = option("Handling of bytes that are not UTF-8", "strict")
    suffix: tuple[str, ...] = option("Suffix of the files to read in a folder [default: all]", metavar=".EXT")
    document_unit: Literal["files", "lines", "joined"] | None = option("Unit of one text [default: files]")
    window: int | None = option("Tokens of a window [default: the model's limit]")
    stride: int | None = option("Tokens between two windows [default: half a window]")
    bos: Literal["none", "start", "window"] | None = option(
        "Put the opening token nowhere, before each text or before each window [default: start, if it exists]"
    )
    exceed_max_seq_len: bool = option("Allow a --window above the model's limit")
    max_scored_tokens: int | None = option("Score about N tokens, evenly spread [default: all]", kind=COUNT)
    word_perplexity: bool = option("Also compute the perplexity per word")
    length_multiples: tuple[float, ...] | None = option(
        "Evaluate rows of these multiples of the trained length [default with --length-plot: 1,2,4,8,16]", kind=NUMBERS
    )
    length_plot: tuple[Path, ...] = option("Plot perplexity by row length: PNG, SVG or PDF", kind=OUTPUT_FILE)
    trained_seq_len: int | None = option(
        "Tokens of a training row [default: the run's, else the model's limit]", kind=click.IntRange(min=2)
    )
    max_tokens: int | None = option(
        f"Maximum tokens of an answer [default: the checkpoint's, else {MAX_TOKENS}]", short="-n", kind=COUNT
    )
    num_beams: int | None = option("Beams of the search; 1 is greedy [default: 1]", kind=COUNT)
    length_penalty: float | None = option("Divide beam scores by length ** X [default: 1]")
    bleu_tokenization: Literal["words", "spaces"] | None = option(
        "Tokenization for BLEU: kvad's words, or spaces of tokenized texts [default: sacrebleu's 13a]"
    )
    lowercase: bool = option("Compare in lower case")
    print_samples: int | None = option("Print N answers next to their references", kind=COUNT)
    use_cache: bool = option("Evaluate through the KV cache; any cache option implies it")
    max_num_seqs: int | None = option("Maximum number of sequences in the cache", kind=COUNT)
    layout: Literal["paged", "contiguous"] | None = option("Cache layout [default: paged]")
    block_size: int | None = option("Tokens per block [default: 16]", kind=COUNT)
    prefill_chunk_size: int | None = option("Tokens of a sequence per step, with a cache [default: 16]", kind=COUNT)

    @property
    def is_curve(self) -> bool:
        """True if the perplexity is evaluated by row length."""
        return bool(self.length_multiples or self.length_plot)

    @cached_property
    def given_cache_fields(self) -> dict[str, Any]:
        """Return the given cache options as keywords of LLM.load; {} without any."""
        summarizer = {} if self.summarizer is None else {"summarizer": self.summarizer}
        fields = {**cache_fields(self), **summarizer, **given_formats(self)}
        return fields or ({"layout": "paged"} if self.use_cache else {})


def format_curve(curve: evaluation.extrapolation.LengthCurve, figures: Sequence[Path]) -> TextLines:
    page = [
        ("model", f"{curve.positions} positions, trained on rows of {curve.trained:,} tokens, limit {curve.limit:,}"),
        (
            "read",
            f"{format_count(curve.rows, 'row')} of each length; the same {curve.points[0].scored:,} tokens scored",
        ),
        ("", ""),
        ("", f"{'times':>6}{'tokens':>9}{'loss':>9}{'perplexity':>13}{'accuracy':>11}{'all tokens':>16}"),
    ]
    for point in curve.points:
        first = f"{point.multiple:>6g}{point.length:>9,}{point.loss:>9.4f}{point.perplexity:>13.3f}"
        page.append(("", f"{first}{point.accuracy:>11.4f}{point.whole_perplexity:>16.3f}"))
    return [*page, *(("figure", str(path)) for path in figures)]


def format_match(match: evaluation.metrics.ExactMatch, *, lower: bool) -> str:
    case = "in lower case, " if lower else ""
    return f"{match.accuracy:.2%} ({match.hits:,} of {match.count:,}; {case}stripped white space)"


def format_bleu(words: evaluation.bleu.BleuScores, tokenized: str | None) -> TextLines:
    precisions = "/".join(f"{score:.1f}" for score in words.precisions)
    cut = ", both sides tokenized by kvad" if tokenized == "words" else ""
    return [
        ("BLEU", f"{words.bleu:.2f}  ({precisions}, length {words.ratio:.3f} of the references'{cut})"),
        ("", f"{'':11}{words.bleu_signature}"),
        ("chrF", f"{words.chrf:.2f}"),
        ("", f"{'':11}{words.chrf_signature}"),
    ]


def format_cache(cache: TextLine | None) -> str:
    if cache is None:
        return "without a cache"
    layout, stored, policy = cache["layout"], cache["stored"], cache["policy"]
    return f"through a {layout} cache of {stored}, policy {policy}, {cache['chunk']} tokens a step"


def format_size(likelihood: evaluation.metrics.Likelihood) -> str:
    return f"{format_count(likelihood.tokens, 'token')}, {format_count(likelihood.bytes, 'byte')}"


def format_likelihood_line(likelihood: evaluation.metrics.Likelihood) -> TextLine:
    numbers = ("loss", "perplexity", "bits_per_byte", "accuracy", "word_perplexity", "word_perplexity_eos")
    return {**{name: getattr(likelihood, name) for name in numbers}, **asdict(likelihood)}


def format_likelihood(likelihood: evaluation.metrics.Likelihood, *, words: bool, ends: bool = False) -> TextLines:
    """Format a likelihood.

    Args:
        likelihood: The likelihood.
        words: Include the perplexity per word.
        ends: The texts are targets, whose end tokens were scored too.
    """
    unknown = f"; {format_count(likelihood.unknown, 'token')} of it unknown" if likelihood.unknown else ""
    scored = (
        f"{format_count(likelihood.scored, 'token')} scored{', ends of targets among them' if ends else ''}{unknown}"
    )
    page = [
        ("loss", f"{likelihood.loss:.4f} nats per token; {scored}"),
        ("perplexity", f"{likelihood.perplexity:.4f} per token"),
        ("bits", f"{likelihood.bits_per_byte:.4f} per byte"),
        ("accuracy", f"{likelihood.accuracy:.4f} of the tokens were the most likely"),
    ]
    if words:
        end = "target" if ends else "line"
        plain = f"perplexity {likelihood.word_perplexity:.4f} per word ({likelihood.words:,} between white space), "
        ended = f"{likelihood.word_perplexity_eos:.4f} with the end of every {end} as a word ({likelihood.lines:,})"
        page.append(("words", plain + ended))
    return page


def format_labels_line(scores: evaluation.metrics.LabelScores) -> TextLine:
    rows = [
        {**asdict(score), "precision": score.precision, "recall": score.recall, "f1": score.f1}
        for score in scores.by_label
    ]
    counts = {"count": scores.count, "hits": scores.hits}
    return {"accuracy": scores.accuracy, "macro_f1": scores.macro_f1, **counts, "labels": rows}


def format_labels(scores: evaluation.metrics.LabelScores, known: Sequence[str], size: str) -> TextLines:
    """Format label scores.

    Args:
        scores: Accuracy and scores by label.
        known: Labels of the model.
        size: Description of the size of the data.
    """
    unknown = [score for score in scores.by_label if score.label not in known]
    wide = max(8, *(len(score.label) for score in scores.by_label)) + 2
    page = [
        ("data", f"{size}, {format_count(len(scores.by_label), 'label')}"),
        ("accuracy", f"{scores.accuracy:.4f}"),
        ("macro-F1", f"{scores.macro_f1:.4f}  (mean over the labels below)"),
    ]
    if unknown:
        names = ", ".join(score.label for score in unknown[:5])
        page.append(("unseen", f"{sum(score.support for score in unknown):,} of labels that the model lacks: {names}"))
    page += [("", ""), ("", f"{'label':<{wide}}{'F1':>8}{'precision':>11}{'recall':>9}{'gold':>9}{'output':>9}")]
    for score in scores.by_label:
        numbers = (
            f"{score.f1:>8.4f}{score.precision:>11.4f}{score.recall:>9.4f}{score.support:>9,}{score.num_predicted:>9,}"
        )
        page.append(("", f"{score.label:<{wide}}{numbers}"))
    return page


def load_for_eval(
    opened: CheckpointHandle, options: EvalOptions, *, max_num_seqs: int, max_seq_len: int, answers: bool = False
) -> LLM:
    """Load a model with the requested cache, else with the smallest that is sufficient.

    Args:
        opened: The checkpoint.
        options: Options of the command.
        max_num_seqs: Sequences of the default cache.
        max_seq_len: Tokens of a sequence of the default cache.
        answers: The model generates, so a decoder needs the default cache too.
    """
    from kvad.llm import LLM

    requested = options.given_cache_fields
    fields: dict[str, Any] = {
        "enable_prefix_caching": False,
        "prefill_chunk_size": 16,
        "max_num_seqs": max_num_seqs,
        "max_seq_len": max_seq_len,
        **requested,
    }
    if not requested:
        reads_only = opened.config.kind == "decoder" and not answers  # scored without a cache: the smallest one
        fields = (
            {"max_num_seqs": 1, "max_seq_len": 1}
            if reads_only
            else {"max_num_seqs": max_num_seqs, "max_seq_len": max_seq_len}
        )
    fields["prefill_chunk_size"] = min(fields.get("prefill_chunk_size", 512), fields["max_seq_len"])
    chosen: dict[str, Any] = {name: getattr(options, name) for name in ("dtype", "deterministic", "adapter")}
    return LLM.load(opened, **chosen, **fields)


def describe_cache(llm: LLM) -> TextLine:
    from kvad import cache as cache_lib

    cache, group = llm.engine.cache, llm.engine.kv_cache_manager.groups[0]
    stored = cache_lib.quantization.join_format_names(group.key_format, group.value_format)
    return {"policy": cache.policy, "stored": stored, "layout": cache.layout, "chunk": cache.prefill_chunk_size}
