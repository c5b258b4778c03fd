"""Output of ``kvad eval`` as JSON and text, and loading with the requested cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from kvad.cli import parameters
from kvad.cli.fields import argument, option
from kvad.cli.output import format_records, with_properties
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
    parameters.ModelArgument,
    parameters.FormatOptions,
    parameters.PolicyOptions,
    parameters.EndlessOption,
    parameters.WeightOptions,
    parameters.TextOptions,
    parameters.JsonOption,
):
    """Options of ``kvad eval``. With --length-multiples, --json prints one object per length."""

    data: tuple[Path, ...] = argument("[DATA]...")
    task: Literal["auto", "lm", "translate", "match", "tag", "classify", "masked-lm", "span-corruption", "chat"] = (
        option("Task [default: by the model and the data]", "auto")
    )
    pairs: parameters.PairFiles = option("Two parallel files of lines", metavar="SOURCE TARGET")
    encoding_errors: Literal["strict", "replace"] = option("Handling of bytes that are not UTF-8", "strict")
    suffix: tuple[str, ...] = option("Suffix of the files to read in a folder [default: all]", metavar=".EXT")
    document_unit: Literal["files", "lines", "joined"] | None = option("Unit of one text [default: files]")
    window: int | None = option("Tokens of a window [default: those of a training row, else the model's limit]")
    stride: int | None = option("Tokens between two windows [default: half a window]")
    bos: Literal["none", "start", "window"] | None = option(
        "Put the opening token nowhere, before each text or before each window [default: start, if it exists]"
    )
    exceed_max_seq_len: bool = option("Allow a --window above the model's limit")
    max_scored_tokens: int | None = option("Score about N tokens, evenly spread [default: all]", kind=parameters.COUNT)
    word_perplexity: bool = option("Also compute the perplexity per word")
    length_multiples: tuple[float, ...] | None = option(
        "Evaluate rows of these multiples of the trained length [default with --length-plot: 1,2,4,8,16]",
        kind=parameters.NUMBERS,
    )
    length_plot: tuple[Path, ...] = option(
        "Plot perplexity by row length: PNG, SVG or PDF", kind=parameters.OUTPUT_FILE
    )
    trained_seq_len: int | None = option(
        "Tokens of a training row [default: the run's, else the model's limit]", kind=click.IntRange(min=2)
    )
    max_tokens: int | None = option(
        f"Maximum tokens of an answer [default: the checkpoint's, else {MAX_TOKENS}]", short="-n", kind=parameters.COUNT
    )
    num_beams: int | None = option("Beams of the search; 1 is greedy [default: 1]", kind=parameters.COUNT)
    length_penalty: float | None = option("Divide beam scores by length ** X [default: 1]")
    bleu_tokenization: Literal["words", "spaces"] | None = option(
        "Tokenization for BLEU: kvad's words, or spaces of tokenized texts [default: sacrebleu's 13a]"
    )
    lowercase: bool = option("Compare in lower case")
    print_samples: int | None = option("Print N answers next to their references", kind=parameters.COUNT)
    use_cache: bool = option("Evaluate through the KV cache; any cache option implies it")
    max_num_seqs: int | None = option("Maximum number of sequences in the cache", kind=parameters.COUNT)
    layout: Literal["paged", "contiguous"] | None = option("Cache layout [default: paged]")
    block_size: int | None = option("Tokens per block [default: 16]", kind=parameters.COUNT)
    prefill_chunk_size: int | None = option(
        "Tokens of a sequence per step, with a cache [default: 16]", kind=parameters.COUNT
    )

    @property
    def is_curve(self) -> bool:
        """True if the perplexity is evaluated by row length."""
        return bool(self.length_multiples or self.length_plot)

    @cached_property
    def given_cache_fields(self) -> dict[str, Any]:
        """Return the given cache options as keywords of LLM.load; {} without any."""
        fields = {
            name: value for name, value in parameters.load_fields(self).items() if name not in parameters.MODEL_FIELDS
        }
        return fields or ({"layout": "paged"} if self.use_cache else {})


def format_curve(curve: evaluation.text.LengthCurve, figures: Sequence[Path]) -> TextLines:
    rows = format_count(curve.rows, "row")
    columns = {
        "times": "{.multiple:g}", "tokens": "{.length:,}", "loss": "{.loss:.4f}", "perplexity": "{.perplexity:.3f}",
        "accuracy": "{.accuracy:.4f}", "all tokens": "{.whole_perplexity:.3f}",
    }  # fmt: skip
    return [
        ("model", f"{curve.positions} positions, trained on rows of {curve.trained:,} tokens, limit {curve.limit:,}"),
        ("read", f"{rows} of each length; the same {curve.points[0].scored:,} tokens scored"),
        *(("", line) for line in ("", *format_records(curve.points, columns))),
        *(("figure", str(path)) for path in figures),
    ]


def format_bleu(words: evaluation.metrics.BleuScores, tokenized: str | None) -> TextLines:
    precisions = "/".join(f"{score:.1f}" for score in words.precisions)
    cut = ", both sides tokenized by kvad" if tokenized == "words" else ""
    return [
        ("BLEU", f"{words.bleu:.2f}  ({precisions}, length {words.ratio:.3f} of the references'{cut})"),
        ("", f"{'':11}{words.bleu_signature}"),
        ("chrF", f"{words.chrf:.2f}"),
        ("", f"{'':11}{words.chrf_signature}"),
    ]


def format_likelihood_line(likelihood: evaluation.metrics.Likelihood) -> TextLine:
    numbers = ("loss", "perplexity", "bits_per_byte", "accuracy", "word_perplexity", "word_perplexity_eos")
    return with_properties(likelihood, *numbers)


def format_likelihood(likelihood: evaluation.metrics.Likelihood, *, words: bool, ends: bool = False) -> TextLines:
    """Format a likelihood, with ``words`` also per word; ``ends``: end tokens of targets were scored too."""
    unknown = f"; {format_count(likelihood.unknown, 'token')} of it unknown" if likelihood.unknown else ""
    scored = f"{format_count(likelihood.scored, 'token')} scored{', ends of targets among them' if ends else ''}"
    page = [
        ("loss", f"{likelihood.loss:.4f} nats per token; {scored}{unknown}"),
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
    labels = [with_properties(score, "precision", "recall", "f1") for score in scores.by_label]
    counts = {"count": scores.count, "hits": scores.hits}
    return {"accuracy": scores.accuracy, "macro_f1": scores.macro_f1, **counts, "labels": labels}


def format_labels(scores: evaluation.metrics.LabelScores, known: Sequence[str], size: str) -> TextLines:
    """Format label scores; ``known`` are the labels of the model, ``size`` describes the data."""
    unknown = [score for score in scores.by_label if score.label not in known]
    columns = {
        "label": "{.label}", "F1": "{.f1:.4f}", "precision": "{.precision:.4f}", "recall": "{.recall:.4f}",
        "gold": "{.support:,}", "output": "{.num_predicted:,}",
    }  # fmt: skip
    page = [
        ("data", f"{size}, {format_count(len(scores.by_label), 'label')}"),
        ("accuracy", f"{scores.accuracy:.4f}"),
        ("macro-F1", f"{scores.macro_f1:.4f}  (mean over the labels below)"),
    ]
    if unknown:
        names = ", ".join(score.label for score in unknown[:5])
        page.append(("unseen", f"{sum(score.support for score in unknown):,} of labels that the model lacks: {names}"))
    return [*page, *(("", line) for line in ("", *format_records(scores.by_label, columns, left=(0,))))]


def load_for_eval(
    opened: CheckpointHandle, options: EvalOptions, *, max_num_seqs: int, max_seq_len: int, answers: bool = False
) -> LLM:
    """Load a model with the requested cache, else with the smallest that is sufficient.

    The default cache has ``max_num_seqs`` sequences of ``max_seq_len`` tokens. A decoder needs it only for answers.
    """
    fields: dict[str, Any] = {"max_seq_len": max_seq_len, "prefill_chunk_size": 512}
    if options.given_cache_fields:
        fields |= {"enable_prefix_caching": False, "prefill_chunk_size": 16, **options.given_cache_fields}
    elif opened.config.kind == "decoder" and not answers:  # scored without a cache: the smallest one
        fields |= {"max_num_seqs": 1, "max_seq_len": 1}
    fields["prefill_chunk_size"] = min(fields["prefill_chunk_size"], fields["max_seq_len"])
    return parameters.open_llm(opened, {**parameters.load_fields(options), **fields}, max_num_seqs=max_num_seqs)


def describe_cache(llm: LLM) -> TextLine:
    cache, group = llm.engine.cache, llm.engine.kv_cache_manager.groups[0]
    stored, chunk = group.format_name, cache.prefill_chunk_size
    return {"policy": cache.policy, "stored": stored, "layout": cache.layout, "chunk": chunk}


def format_cache(cache: TextLine | None) -> str:
    if cache is None:
        return "without a cache"
    layout, stored, policy = cache["layout"], cache["stored"], cache["policy"]
    return f"through a {layout} cache of {stored}, policy {policy}, {cache['chunk']} tokens a step"
