"""``kvad eval`` of what a model answers: pairs beside its answers, words and texts beside its labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvad.cli.common import given
from kvad.cli.evaluate_load import Progress, cached, cached_reader, load, memory
from kvad.cli.evaluate_page import (
    Line,
    Page,
    labels_line,
    labels_page,
    likelihood_line,
    likelihood_page,
    match_said,
    overlap_page,
)
from kvad.cli.lines import tokenizer_of
from kvad.errors import UsageError, counted

if TYPE_CHECKING:
    from kvad.checkpoint.open import Opened
    from kvad.lab.reading import Reader

__all__ = ["MAX_TOKENS", "answer_pairs", "label_texts", "tag_words"]

MAX_TOKENS = 256  # of an answer, where neither the user nor the checkpoint says
LINES = 16  # that are answered side by side, where --rows does not say


def answer_pairs(
    opened: Opened, task: str, data: Sequence[Path], options: Mapping[str, Any], progress: Progress
) -> tuple[list[Line], Page]:
    from kvad.lab import bleu
    from kvad.lab.evaluate import answers, evaluate_pairs, evaluate_texts_said
    from kvad.lab.reading import Uncached

    if task == "translate":
        bleu.require()
    pairs = _pairs(data, options)
    sampling = _sampling(opened, options)
    each = sampling.get("beams", 1)
    through = cached(options)
    with load(opened, options, rows=LINES * each, capacity=opened.config.limit, answers=True) as llm:
        tokenizer_of(llm)
        likelihood = None
        if opened.config.kind == "encoder-decoder":
            reader: Reader = cached_reader(llm) if through else Uncached(llm.model)
            likelihood = evaluate_pairs(
                llm, reader, pairs, tick=lambda done, total: progress.tell("scoring", done, total)
            )
        sources, references = [source for source, _ in pairs], [target for _, target in pairs]
        said = answers(llm, sources, sampling, tick=lambda done, total: progress.tell("answering", done, total))
        stored = memory(llm)
    form = bleu.Form(options["tokenized"], options["lower"])
    match, words = evaluate_texts_said(said, references, form, compare=task == "translate")
    shown = list(zip(sources, references, said, strict=True))[: options["show"] or 0]
    line = {"pairs": len(pairs), "search": "greedy" if each == 1 else f"{each} beams", "memory": stored}
    line |= {"max_tokens": sampling["max_tokens"], "exact_match": match.share}
    line |= {} if words is None else asdict(words)
    line |= {} if likelihood is None else likelihood_line(likelihood)
    line |= {"shown": [{"source": a, "target": b, "text": c} for a, b, c in shown]} if shown else {}
    page = [("pairs", f"{counted(len(pairs), 'pair')}; {line['search']}, at most {sampling['max_tokens']} tokens")]
    page += [] if likelihood is None else likelihood_page(likelihood, words=options["words"], ends=True)
    page += [] if words is None else overlap_page(words, options["tokenized"])
    page += [("exact", match_said(match, lower=options["lower"]))]
    for each_shown in shown:
        page += [("", ""), *zip("<=>", (" ".join(text.split()) for text in each_shown), strict=True)]
    return [line], page


def _pairs(data: Sequence[Path], options: Mapping[str, Any]) -> list[tuple[str, str]]:
    from kvad.train.pairs import PairPaths, open_pairs

    corpus = open_pairs(PairPaths((*((path,) for path in data), *options["pairs"])), options["errors"])
    if corpus.skipped:
        click.echo(f"kvad: {counted(corpus.skipped, 'pair')} with an empty side left out", err=True)
    texts = list(corpus.texts())
    return list(zip(texts[::2], texts[1::2], strict=True))


def _sampling(opened: Opened, options: Mapping[str, Any]) -> dict[str, Any]:
    """Greedy or a beam search; a decoder's answer ends with its line."""
    said: Mapping[str, Any] = opened.generation.sampling or {}
    chosen = given(options, ("max_tokens", "length_penalty"))
    chosen.setdefault("max_tokens", min(int(said.get("max_tokens", MAX_TOKENS)), opened.config.limit - 1))
    beams = options["beams"] or 1
    if beams > 1:
        return {**chosen, "beams": beams}
    if "length_penalty" in chosen:
        raise UsageError("--length-penalty is of a beam search", "give --beams, or leave it out")
    stop = {"stop": ("\n",)} if opened.config.kind == "decoder" else {}
    return {**chosen, "beams": 1, "temperature": 0.0, **stop}


def tag_words(
    opened: Opened, task: str, data: Sequence[Path], options: Mapping[str, Any], progress: Progress
) -> tuple[list[Line], Page]:
    from kvad.lab.evaluate import evaluate_tags, predict_tags
    from kvad.lab.tagged import read_tagged

    sentences = read_tagged(data, options["errors"])
    with load(opened, options, rows=64, capacity=1) as llm:
        tokenizer_of(llm)
        words = [words for words, _ in sentences]
        said = predict_tags(llm, words, tick=lambda done, total: progress.tell("tagging", done, total))
    scores = evaluate_tags([tags for _, tags in sentences], said)
    size = f"{counted(len(sentences), 'sentence')}, {counted(scores.count, 'word')}"
    return [{"sentences": len(sentences), **labels_line(scores)}], labels_page(scores, _known(opened), size)


def label_texts(
    opened: Opened, task: str, data: Sequence[Path], options: Mapping[str, Any], progress: Progress
) -> tuple[list[Line], Page]:
    from kvad.lab.evaluate import TOGETHER, ask_all
    from kvad.lab.metrics import label_scores
    from kvad.lab.tagged import read_labelled

    labelled, said = read_labelled(data, options["errors"]), list[str]()
    with load(opened, options, rows=64, capacity=1) as llm:
        tokenizer_of(llm)
        for low in range(0, len(labelled), TOGETHER):
            some = [text for text, _ in labelled[low : low + TOGETHER]]
            numbers = range(low + 1, low + 1 + len(some))
            said += [labels[0].label for labels in ask_all(llm.classify, some, numbers)]
            progress.tell("labelling", len(said), len(labelled))
    scores = label_scores([label for _, label in labelled], said)
    return [labels_line(scores)], labels_page(scores, _known(opened), counted(len(labelled), "text"))


def _known(opened: Opened) -> Sequence[str]:
    from kvad.config import Classes

    assert isinstance(opened.config.head, Classes)
    return opened.config.head.labels
