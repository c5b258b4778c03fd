"""``kvad eval`` of texts: perplexity by windows, with a cache or without, and the curve over the length of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvad.cli.evaluate_load import EvalProgress, build_cached_scorer, cache_options_given, describe_cache, load_for_eval
from kvad.cli.evaluate_page import (
    TextLine,
    TextLines,
    format_cache,
    format_curve,
    format_likelihood,
    format_likelihood_line,
    format_size,
)
from kvad.cli.lines import require_tokenizer
from kvad.errors import UsageError, format_count

if TYPE_CHECKING:
    from kvad.checkpoint.open import CheckpointHandle
    from kvad.lab.evaluate import OpeningMode
    from kvad.lab.extrapolate import LengthCurve
    from kvad.lab.reading import TokenScorer
    from kvad.llm import LLM

__all__ = ["eval_texts"]


def eval_texts(
    opened: CheckpointHandle, task: str, data: Sequence[Path], options: Mapping[str, Any], progress: EvalProgress
) -> tuple[list[TextLine], TextLines]:
    from kvad.lab.evaluate import WindowOptions, encode_documents, evaluate_text, opening_token
    from kvad.lab.extrapolate import join_texts
    from kvad.lab.reading import UncachedScorer
    from kvad.train.corpus import open_corpus

    how = _documents(options)
    corpus = open_corpus(data, suffixes=options["suffixes"], errors=options["errors"], lines=how == "lines")
    curve, through = bool(options["multiples"] or options["figures"]), cache_options_given(options)
    limit = opened.config.max_seq_len
    window = options["window"] if options["window"] is not None else limit
    _check_window(window, limit, options, cached=bool(through))
    stride = options["stride"] if options["stride"] is not None else max(1, window // 2)
    if not curve:
        WindowOptions(window, stride)  # what cannot be is said before the model is loaded
    with load_for_eval(opened, options, rows=4, capacity=min(limit, window)) as llm:
        tokenizer = require_tokenizer(llm)
        first = opening_token(llm)
        bos: OpeningMode = options["bos"] or ("none" if first is None else "start")
        documents = encode_documents(tokenizer, list(corpus.texts()))
        parted = None if bos == "none" else first
        if curve:
            texts = [document.tokens for document in documents]
            texts = [join_texts(texts, parted)] if how == "joined" else [join_texts([text], parted) for text in texts]
            return _curve(opened, llm, texts, options, progress)
        if how == "joined":
            documents = [_join(documents, parted)]
        reader: TokenScorer
        reader = build_cached_scorer(llm) if through else UncachedScorer(llm.model, max(limit, window - 1))
        likelihood = evaluate_text(
            reader,
            documents,
            WindowOptions(window, stride, bos),
            first,
            most=options["tokens"],
            unknown=tokenizer.special_tokens.unk,
            tick=lambda done, total: progress.update("reading", done, total),
        )
        stored = describe_cache(llm) if through else None
        name = "" if first is None or bos == "none" else tokenizer.token_text(first)
    read = {"documents": len(documents), "window": window, "stride": stride, "bos": bos, "opening": name or None}
    said = {"none": "no opening token", "start": f"{name} before each text", "window": f"{name} before each window"}[
        bos
    ]
    name_of = "all files as one text" if how == "joined" else format_count(len(documents), "text")
    page = [
        ("text", f"{name_of}, {format_size(likelihood)}"),
        ("read", f"windows of {window:,}, stride {stride:,}, {said}; {format_cache(stored)}"),
        *format_likelihood(likelihood, words=options["words"]),
    ]
    return [{**read, "memory": stored, **format_likelihood_line(likelihood)}], page


def _documents(options: Mapping[str, Any]) -> str:
    return options["documents"] or "files"


def _check_window(window: int, limit: int, options: Mapping[str, Any], *, cached: bool) -> None:
    if options["beyond"] and cached:
        raise UsageError("--beyond is for reading without a cache", "a cache's rows pass the limit with --endless")
    if cached and options["endless"]:
        return
    most = limit if cached else limit + 1  # the last token of a window is read by nobody
    if window > most and not options["beyond"]:
        raise UsageError(
            f"--window {window:,}: the model's limit is {limit:,}",
            "with --endless rows go on, by the cache's policy" if cached else "--beyond lets it pass the limit",
        )


def _join(documents: Sequence[Any], opening: int | None) -> Any:
    from kvad.lab.evaluate import EvalDocument
    from kvad.lab.extrapolate import join_texts

    texts = [document.tokens for document in documents]
    # Every text's opening token is read and scored within the stream, as in training; the first one is put there later.
    tokens = join_texts(texts, opening)[0 if opening is None else 1 :]
    sums = [sum(getattr(document, name) for document in documents) for name in ("bytes", "words", "lines")]
    return EvalDocument(tokens, *sums)


def _curve(
    opened: CheckpointHandle, llm: LLM, texts: list[Any], options: Mapping[str, Any], progress: EvalProgress
) -> tuple[list[TextLine], TextLines]:
    from kvad.lab.extrapolate import MULTIPLES, extrapolate

    trained = options["trained"] or _trained(opened)
    asked: dict[str, Any] = {"multiples": options["multiples"] or MULTIPLES}
    if options["tokens"] is not None:
        asked["most"] = options["tokens"]
    curve = extrapolate(llm.model, texts, trained, **asked, tick=progress.update)
    name = _name(opened.path)
    progress.done()
    figures = _draw(curve, name, options["figures"])
    if curve.note:
        click.echo(f"kvad: {curve.note}", err=True)
    shared = {"what": "extrapolation", "name": name, "positions": curve.positions, "trained": curve.trained}
    shared |= {"limit": curve.limit, "rows": curve.rows}
    lines = [
        {**shared, **asdict(point), "perplexity": point.perplexity, "whole_perplexity": point.whole_perplexity}
        for point in curve.points
    ]
    return lines, format_curve(curve, figures)


def _name(path: Path) -> str:
    """A run's, not that of its last step's folder."""
    return path.parent.parent.name if path.parent.name == "checkpoints" else path.name


def _trained(opened: CheckpointHandle) -> int:
    """Tokens of the rows of the run, where the checkpoint tells; else the model's limit."""
    state = {} if opened.training is None else opened.training.state
    context = state.get("run", {}).get("data", {}).get("context")
    return context if isinstance(context, int) else opened.config.max_seq_len


def _draw(curve: LengthCurve, name: str, files: Sequence[Path]) -> list[Path]:
    from kvad.lab.plot import PlotSeries, draw_series

    if not files:
        return []
    lengths = [float(point.length) for point in curve.points]
    series = [
        PlotSeries(f"{name}: the same tokens", lengths, [point.perplexity for point in curve.points], dots=True),
        PlotSeries("all tokens of the rows", lengths, [point.whole_perplexity for point in curve.points], dots=True),
    ]
    title = f"{name} ({curve.positions}), trained on rows of {curve.trained:,} tokens"
    return draw_series(
        series, files, title=title, x_label="tokens of a row", y_label="perplexity", log_x=True, log_y=True
    )
