"""``kvad eval`` of what a model answers: pairs beside its answers, words and texts beside its labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvad.cli.common import explicit_options
from kvad.cli.evaluate_load import EvalProgress, build_cached_scorer, cache_options_given, describe_cache, load_for_eval
from kvad.cli.evaluate_page import (
    TextLine,
    TextLines,
    format_bleu,
    format_labels,
    format_labels_line,
    format_likelihood,
    format_likelihood_line,
    format_match,
)
from kvad.cli.lines import require_tokenizer
from kvad.errors import UsageError, format_count

if TYPE_CHECKING:
    from kvad.checkpoint.open import CheckpointHandle
    from kvad.lab.reading import TokenScorer

__all__ = ["MAX_TOKENS", "eval_pairs", "eval_labels", "eval_tags"]

MAX_TOKENS = 256  # of an answer, where neither the user nor the checkpoint says
LINES_PER_BATCH = 16  # that are answered side by side, where --rows does not say


def eval_pairs(
    opened: CheckpointHandle, task: str, data: Sequence[Path], options: Mapping[str, Any], progress: EvalProgress
) -> tuple[list[TextLine], TextLines]:
    from kvad.lab import bleu
    from kvad.lab.evaluate import evaluate_answers, evaluate_pairs, generate_answers
    from kvad.lab.reading import UncachedScorer

    if task == "translate":
        bleu.check_sacrebleu()
    pairs = _pairs(data, options)
    sampling = _sampling(opened, options)
    each = sampling.get("beams", 1)
    through = cache_options_given(options)
    with load_for_eval(
        opened, options, rows=LINES_PER_BATCH * each, capacity=opened.config.max_seq_len, answers=True
    ) as llm:
        require_tokenizer(llm)
        likelihood = None
        if opened.config.kind == "encoder-decoder":
            reader: TokenScorer = build_cached_scorer(llm) if through else UncachedScorer(llm.model)
            likelihood = evaluate_pairs(
                llm, reader, pairs, tick=lambda done, total: progress.update("scoring", done, total)
            )
        sources, references = [source for source, _ in pairs], [target for _, target in pairs]
        said = generate_answers(
            llm, sources, sampling, tick=lambda done, total: progress.update("answering", done, total)
        )
        stored = describe_cache(llm)
    form = bleu.BleuOptions(options["tokenized"], options["lower"])
    match, words = evaluate_answers(said, references, form, compare=task == "translate")
    shown = list(zip(sources, references, said, strict=True))[: options["show"] or 0]
    line = {"pairs": len(pairs), "search": "greedy" if each == 1 else f"{each} beams", "memory": stored}
    line |= {"max_tokens": sampling["max_tokens"], "exact_match": match.accuracy}
    line |= {} if words is None else asdict(words)
    line |= {} if likelihood is None else format_likelihood_line(likelihood)
    line |= {"shown": [{"source": a, "target": b, "text": c} for a, b, c in shown]} if shown else {}
    page = [("pairs", f"{format_count(len(pairs), 'pair')}; {line['search']}, at most {sampling['max_tokens']} tokens")]
    page += [] if likelihood is None else format_likelihood(likelihood, words=options["words"], ends=True)
    page += [] if words is None else format_bleu(words, options["tokenized"])
    page += [("exact", format_match(match, lower=options["lower"]))]
    for each_shown in shown:
        page += [("", ""), *zip("<=>", (" ".join(text.split()) for text in each_shown), strict=True)]
    return [line], page


def _pairs(data: Sequence[Path], options: Mapping[str, Any]) -> list[tuple[str, str]]:
    from kvad.train.pairs import PairPaths, open_pairs

    corpus = open_pairs(PairPaths((*((path,) for path in data), *options["pairs"])), options["errors"])
    if corpus.skipped:
        click.echo(f"kvad: {format_count(corpus.skipped, 'pair')} with an empty side left out", err=True)
    texts = list(corpus.texts())
    return list(zip(texts[::2], texts[1::2], strict=True))


def _sampling(opened: CheckpointHandle, options: Mapping[str, Any]) -> dict[str, Any]:
    """Greedy or a beam search; a decoder's answer ends with its line."""
    said: Mapping[str, Any] = opened.generation.sampling or {}
    chosen = explicit_options(options, ("max_tokens", "length_penalty"))
    chosen.setdefault("max_tokens", min(int(said.get("max_tokens", MAX_TOKENS)), opened.config.max_seq_len - 1))
    beams = options["beams"] or 1
    if beams > 1:
        return {**chosen, "beams": beams}
    if "length_penalty" in chosen:
        raise UsageError("--length-penalty is of a beam search", "give --beams, or leave it out")
    stop = {"stop": ("\n",)} if opened.config.kind == "decoder" else {}
    return {**chosen, "beams": 1, "temperature": 0.0, **stop}


def eval_tags(
    opened: CheckpointHandle, task: str, data: Sequence[Path], options: Mapping[str, Any], progress: EvalProgress
) -> tuple[list[TextLine], TextLines]:
    from kvad.lab.evaluate import evaluate_tags, predict_tags
    from kvad.lab.tagged import read_tagged

    sentences = read_tagged(data, options["errors"])
    with load_for_eval(opened, options, rows=64, capacity=1) as llm:
        require_tokenizer(llm)
        words = [words for words, _ in sentences]
        said = predict_tags(llm, words, tick=lambda done, total: progress.update("tagging", done, total))
    scores = evaluate_tags([tags for _, tags in sentences], said)
    size = f"{format_count(len(sentences), 'sentence')}, {format_count(scores.count, 'word')}"
    return [{"sentences": len(sentences), **format_labels_line(scores)}], format_labels(scores, _known(opened), size)


def eval_labels(
    opened: CheckpointHandle, task: str, data: Sequence[Path], options: Mapping[str, Any], progress: EvalProgress
) -> tuple[list[TextLine], TextLines]:
    from kvad.lab.evaluate import BATCH_LINES, answer_all
    from kvad.lab.metrics import score_labels
    from kvad.lab.tagged import read_labeled

    labelled, said = read_labeled(data, options["errors"]), list[str]()
    with load_for_eval(opened, options, rows=64, capacity=1) as llm:
        require_tokenizer(llm)
        for low in range(0, len(labelled), BATCH_LINES):
            some = [text for text, _ in labelled[low : low + BATCH_LINES]]
            numbers = range(low + 1, low + 1 + len(some))
            said += [labels[0].label for labels in answer_all(llm.classify, some, numbers)]
            progress.update("labelling", len(said), len(labelled))
    scores = score_labels([label for _, label in labelled], said)
    return [format_labels_line(scores)], format_labels(scores, _known(opened), format_count(len(labelled), "text"))


def _known(opened: CheckpointHandle) -> Sequence[str]:
    from kvad.config import ClassificationHeadConfig

    assert isinstance(opened.config.head, ClassificationHeadConfig)
    return opened.config.head.labels
