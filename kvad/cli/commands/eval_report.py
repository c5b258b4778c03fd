"""What ``kvad eval`` prints: the numbers as lines of text, each with the convention that it was made by.  No torch.

What the tasks of ``kvad eval`` share: the cache that was asked for, the model behind it, a line of progress.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvad.cli.cache_options import parse_policy_options
from kvad.cli.model_options import parse_format_options
from kvad.cli.options import explicit_options
from kvad.errors import format_count

if TYPE_CHECKING:
    from kvad import evaluation
    from kvad.checkpoint import CheckpointHandle
    from kvad.llm import LLM

TextLine = dict[str, Any]  # a JSON object
TextLines = list[tuple[str, str]]  # (name, text); no name: the text stands at the left edge


def format_curve(curve: evaluation.extrapolation.LengthCurve, figures: Sequence[Path]) -> TextLines:
    page = [
        ("model", f"{curve.positions} positions, trained on rows of {curve.trained:,} tokens, limit {curve.limit:,}"),
        (
            "read",
            f"{format_count(curve.rows, 'row')} of each length; the same {curve.points[0].scored:,} tokens scored",
        ),
        ("", ""),
        ("", f"{'times':>6}{'tokens':>9}{'loss':>9}{'perplexity':>13}{'accuracy':>11}{'of whole rows':>16}"),
    ]
    for point in curve.points:
        first = f"{point.multiple:>6g}{point.length:>9,}{point.loss:>9.4f}{point.perplexity:>13.3f}"
        page.append(("", f"{first}{point.accuracy:>11.4f}{point.whole_perplexity:>16.3f}"))
    return [*page, *(("figure", str(path)) for path in figures)]


def format_match(match: evaluation.metrics.ExactMatch, *, lower: bool) -> str:
    how = "in lower case, " if lower else ""
    return f"{match.accuracy:.2%} ({match.hits:,} of {match.count:,}; {how}white space at the ends cut off)"


def format_bleu(words: evaluation.bleu.BleuScores, tokenized: str | None) -> TextLines:
    precisions = "/".join(f"{one:.1f}" for one in words.precisions)
    cut = ", both sides cut into words by kvad" if tokenized == "words" else ""
    return [
        ("BLEU", f"{words.bleu:.2f}  ({precisions}, length {words.ratio:.3f} of the references'{cut})"),
        ("", f"{'':11}{words.bleu_signature}"),
        ("chrF", f"{words.chrf:.2f}"),
        ("", f"{'':11}{words.chrf_signature}"),
    ]


def format_cache(memory: TextLine | None) -> str:
    if memory is None:
        return "without a cache"
    return (
        f"through a {memory['layout']} cache of {memory['stored']}, policy {memory['policy']}, {memory['chunk']} a step"
    )


def format_size(found: evaluation.metrics.Likelihood) -> str:
    return f"{format_count(found.tokens, 'token')}, {format_count(found.bytes, 'byte')}"


def format_likelihood_line(found: evaluation.metrics.Likelihood) -> TextLine:
    numbers = ("loss", "perplexity", "bits_per_byte", "accuracy", "word_perplexity", "word_perplexity_eos")
    return {**{name: getattr(found, name) for name in numbers}, **asdict(found)}


def format_likelihood(found: evaluation.metrics.Likelihood, *, words: bool, ends: bool = False) -> TextLines:
    """``words``: perplexity per word, too; ``ends``: of targets, whose ends were scored, too."""
    unknown = f"; {format_count(found.unknown, 'token')} of it unknown" if found.unknown else ""
    scored = f"{format_count(found.scored, 'token')} scored{', ends of targets among them' if ends else ''}{unknown}"
    page = [
        ("loss", f"{found.loss:.4f} nats per token; {scored}"),
        ("perplexity", f"{found.perplexity:.4f} per token"),
        ("bits", f"{found.bits_per_byte:.4f} per byte"),
        ("accuracy", f"{found.accuracy:.4f} of the tokens were the likeliest"),
    ]
    if words:
        end = "target" if ends else "line"
        plain = f"perplexity {found.word_perplexity:.4f} per word ({found.words:,} between white space), "
        ended = f"{found.word_perplexity_eos:.4f} with the end of every {end} as a word ({found.lines:,})"
        page.append(("words", plain + ended))
    return page


def format_labels_line(scores: evaluation.metrics.LabelScores) -> TextLine:
    rows = [{**asdict(one), "precision": one.precision, "recall": one.recall, "f1": one.f1} for one in scores.by_label]
    counts = {"count": scores.count, "hits": scores.hits}
    return {"accuracy": scores.accuracy, "macro_f1": scores.macro_f1, **counts, "labels": rows}


def format_labels(scores: evaluation.metrics.LabelScores, known: Sequence[str], size: str) -> TextLines:
    """``known``: the model's labels; ``size``: of the data, in words."""
    unknown = [one for one in scores.by_label if one.label not in known]
    wide = max(8, *(len(one.label) for one in scores.by_label)) + 2
    page = [
        ("data", f"{size}, {format_count(len(scores.by_label), 'label')}"),
        ("accuracy", f"{scores.accuracy:.4f}"),
        ("macro-F1", f"{scores.macro_f1:.4f}  (the mean over the labels below, 0 where nothing was hit)"),
    ]
    if unknown:
        names = ", ".join(one.label for one in unknown[:5])
        page.append(("unseen", f"{sum(one.support for one in unknown):,} of labels that the model lacks: {names}"))
    page += [("", ""), ("", f"{'label':<{wide}}{'F1':>8}{'precision':>11}{'recall':>9}{'gold':>9}{'said':>9}")]
    for one in scores.by_label:
        numbers = f"{one.f1:>8.4f}{one.precision:>11.4f}{one.recall:>9.4f}{one.support:>9,}{one.num_predicted:>9,}"
        page.append(("", f"{one.label:<{wide}}{numbers}"))
    return page


def cache_options_given(options: Mapping[str, Any]) -> dict[str, Any]:
    """What was said of the cache, as keywords of LLM.load; {} where nothing was."""
    said = explicit_options(options, ("layout", "block_size", "chunk", "compressor", "rows"))
    said = {**said, **parse_format_options(options), **parse_policy_options(options)}
    return said or ({"layout": "paged"} if options["cached"] else {})


def load_for_eval(
    opened: CheckpointHandle, options: Mapping[str, Any], *, rows: int, capacity: int, answers: bool = False
) -> LLM:
    """With the cache that was asked for; else the smallest that will do, or for ``answers`` one of ``rows`` rows."""
    from kvad.llm import LLM

    said = cache_options_given(options)
    fields: dict[str, Any] = {"prefix": False, "chunk": 16, "rows": rows, "capacity": capacity, **said}
    if not said:
        reads = opened.config.kind == "decoder" and not answers  # without a cache: one that holds next to nothing
        fields = {"rows": 1, "capacity": 1} if reads else {"rows": rows, "capacity": capacity}
    fields["chunk"] = min(fields.get("chunk", 512), fields["capacity"])
    chosen = {name: options[name] for name in ("dtype", "deterministic", "adapter")}
    return LLM.load(opened.path, **chosen, **fields)


def build_cached_scorer(llm: LLM) -> evaluation.readers.TokenScorer:
    from kvad import evaluation

    return evaluation.readers.CachedScorer(llm.engine)


def describe_cache(llm: LLM) -> TextLine:
    from kvad import cache as cache_lib

    cache, group = llm.engine.cache, llm.engine.kv_cache_manager.groups[0]
    stored = cache_lib.quantization.join_format_names(group.key_format, group.value_format)
    return {"policy": cache.policy, "stored": stored, "layout": cache.layout, "chunk": cache.prefill_chunk_size}


class EvalProgress:
    """A line on stderr where that is a terminal."""

    def __init__(self, *, quiet: bool) -> None:
        self._shown = not quiet and sys.stderr.isatty()

    def update(self, what: str, done: int, total: int) -> None:
        if self._shown:
            click.echo(f"\r{what:<36} {done:>11,} of {total:,} ", err=True, nl=False)

    def done(self) -> None:
        if self._shown:
            click.echo(f"\r{'':<72}\r", err=True, nl=False)

    def __enter__(self) -> EvalProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self.done()
