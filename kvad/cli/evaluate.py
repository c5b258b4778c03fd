"""``kvad eval``: a model's numbers on texts, pairs and labels; what is measured, and how, is ``kvad.lab.evaluate``."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvad.cli.common import emit_json, given, model_argument
from kvad.cli.evaluate_page import (
    Line,
    Page,
    curve_page,
    labels_line,
    labels_page,
    likelihood_line,
    likelihood_page,
    match_said,
    memory_said,
    overlap_page,
    size_said,
)
from kvad.cli.evaluate_posed import POSED, pose
from kvad.cli.helping import Sectioned
from kvad.cli.policies import policies_asked, policy_options
from kvad.cli.running import DTYPES, adapter_option, deterministic_option, format_options, formats_asked
from kvad.errors import RequestError, UsageError, counted

if TYPE_CHECKING:
    from kvad.checkpoint.open import Opened
    from kvad.lab.evaluate import Opening
    from kvad.lab.extrapolate import Curve
    from kvad.lab.reading import Reader
    from kvad.llm import LLM

__all__ = ["evaluate"]

TASKS = ("auto", "lm", "translate", "match", "tag", "classify", "masked", "spans", "chat")
TWO_PATHS = (click.Path(path_type=Path), click.Path(path_type=Path))
MAX_TOKENS = 256  # of an answer, where neither the user nor the checkpoint says
LINES = 16  # that are answered side by side, where --rows does not say

# What each task alone heeds, and the flags' values that say nothing.
OF_ROWS = ("multiples", "figures", "trained")
OF_TEXT = ("window", "stride", "bos", "documents", "tokens", "words", "beyond", "suffixes", *OF_ROWS)
OF_ANSWERS = ("beams", "length_penalty", "max_tokens", "lower", "show", "pairs")
HEEDS: Mapping[str, tuple[str, ...]] = {
    "lm": OF_TEXT,
    "translate": (*OF_ANSWERS, "tokenized", "words"),
    "match": OF_ANSWERS,
    "tag": (),
    "classify": (),
    "masked": ("window", "documents", "suffixes"),
    "spans": ("window", "documents", "suffixes"),
    "chat": ("window",),
}
FLAGS = {"suffixes": "--suffix", "multiples": "--context-multiples", "figures": "--extrapolate"}


def _multiples(_ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[float, ...]:
    try:
        return () if value is None else tuple(float(one) for one in value.split(","))
    except ValueError:
        raise click.BadParameter("write it like 1,2,4,8,16", param=param) from None


@click.command("eval", cls=Sectioned)
@model_argument
@click.argument("data", nargs=-1, type=click.Path(path_type=Path))
@click.option("--task", type=click.Choice(TASKS), default="auto", help="[default: as the model and the data are]")
@click.option("--pairs", multiple=True, type=TWO_PATHS, metavar="SOURCE TARGET", help="Two files of lines.")
@click.option("--errors", type=click.Choice(["strict", "replace"]), default="strict", help="Bytes that are no UTF-8.")
@click.option("--suffix", "suffixes", multiple=True, metavar=".EXT", help="Which files of a folder [default: all].")
@click.option("--documents", type=click.Choice(["files", "lines", "joined"]), help="What is one text [default: files].")
@click.option("--window", type=int, help="Tokens that are read at once [default: the model's limit].")
@click.option("--stride", type=int, help="Tokens between two windows [default: half a window].")
@click.option(
    "--bos",
    type=click.Choice(["none", "start", "window"]),
    help="Where the token stands that opens a text: nowhere, before each text [default, if there is one], or window.",
)
@click.option("--beyond", is_flag=True, help="Let --window pass the model's limit.")
@click.option("--tokens", type=click.IntRange(min=1), help="Score about so many, evenly spread [default: all].")
@click.option("--words", is_flag=True, help="Perplexity per word, too.")
@click.option(
    "--context-multiples",
    "multiples",
    metavar="N,N",
    callback=_multiples,
    help="Rows so many times as long as the trained ones [of --extrapolate: 1,2,4,8,16].",
)
@click.option(
    "--extrapolate",
    "figures",
    multiple=True,
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Draw perplexity against the length of a row: PNG, SVG or PDF; may be repeated.",
)
@click.option("--trained", type=click.IntRange(min=2), help="Tokens of a trained row [default: the run's, else limit].")
@click.option("--max-tokens", type=click.IntRange(min=1), help=f"Of an answer [default: as said, else {MAX_TOKENS}].")
@click.option("--beams", type=click.IntRange(min=1), help="Beam search with so many [default: 1, greedy].")
@click.option("--length-penalty", type=float, help="Of the beam search [default: 1].")
@click.option(
    "--tokenized",
    type=click.Choice(["words", "spaces"]),
    help="BLEU of words: as kvad cuts them, or of texts that are tokenised already [default: sacrebleu's 13a].",
)
@click.option("--lower", is_flag=True, help="Compare in lower case.")
@click.option("--show", type=click.IntRange(min=1), help="Print so many answers beside what they should be.")
@click.option("--cached", is_flag=True, help="Read through the cache, as any option of the cache does.")
@click.option("--rows", type=click.IntRange(min=1), help="Of the cache: texts read side by side.")
@click.option("--layout", type=click.Choice(["paged", "contiguous"]), help="[default: paged]")
@click.option("--block-size", type=click.IntRange(min=1), help="Slots of a block [default: 16].")
@click.option("--chunk", type=click.IntRange(min=1), help="Tokens of a row in one step, through a cache [default: 16].")
@click.option("--compressor", metavar="FOLDER", type=click.Path(path_type=Path), help="Makes a hierarchy's summaries.")
@format_options
@policy_options
@adapter_option
@click.option("--dtype", type=click.Choice(DTYPES), help="What to compute in [default: what is stored].")
@deterministic_option
@click.option("--quiet", is_flag=True, help="No progress on stderr.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object; of --context-multiples a line for each.")
def evaluate(model: Path, data: tuple[Path, ...], task: str, as_json: bool, **options: Any) -> None:
    """How well does a model do?  By what it is, and by what DATA is:

    \b
    decoder          texts        loss, perplexity, bits per byte, accuracy per token
                     pairs        exact match of its answers
                     messages     --task chat: loss and accuracy of what the assistant says
    encoder-decoder  pairs        loss, BLEU, chrF, exact match
                     texts        --task spans: loss and accuracy of spans that are cut out
    encoder          words, tags  accuracy, F1 of each tag, macro-F1
                     texts, label the same, of labels
                     texts        loss and accuracy of hidden tokens, where it fills masks

    Pairs are TSV files (`SOURCE<tab>TARGET`), or --pairs names two files; words and tags are `WORD<tab>TAG` lines with
    an empty line between sentences; labels are `LABEL<tab>TEXT` lines.  With an option of the cache everything runs
    through such a cache: what a policy costs on your own text is one command.

    \b
    kvad eval runs/demo book.txt
    kvad eval gpt2 wiki.txt --window 1024 --stride 512 --bos none --words
    kvad eval runs/demo book.txt --policy "sinks(4,60)" --cache-dtype int8
    kvad eval runs/endless-alibi texts/ --documents joined --extrapolate alibi.svg
    kvad eval runs/de-en --pairs test.de test.en --beams 5
    kvad eval runs/de-en --pairs test.de test.en --tokenized words --lower
    kvad eval runs/tagger dev.tsv
    kvad eval runs/masked book.txt
    kvad eval runs/chat talks.jsonl --task chat
    """
    from kvad.checkpoint.open import open_checkpoint

    if not data and not options["pairs"]:
        raise UsageError("no data was named", "name files or folders, or --pairs SOURCE TARGET")
    policies_asked(options)
    opened = open_checkpoint(model)
    task = _task(opened, task, data, options)
    _check_heeded(task, options)
    run = {"lm": _text, "translate": _translate, "match": _translate, "tag": _tag, "classify": _classify}
    began = time.perf_counter()
    with _Progress(quiet=options["quiet"]) as progress:
        if task in POSED:
            lines, page = pose(opened, task, data, options, progress.tell)
        else:
            lines, page = run[task](opened, task, data, options, progress)
    if as_json:
        first = {"task": task, "model": str(model), "data": [str(path) for path in _paths(data, options)]}
        took = {"seconds": time.perf_counter() - began}
        for line in lines:
            emit_json({**first, **line, **took})
        return
    for name, text in page:
        click.echo(f"{name:<11}{text}" if name else text)


# ---------------------------------------------------------------- which task


def _task(opened: Opened, asked: str, data: Sequence[Path], options: Mapping[str, Any]) -> str:
    """The task, by the model's kind and the data's form.  RequestError for one that the model cannot do."""
    from kvad.cli.lines import abilities
    from kvad.config import Classes, Head

    head = opened.config.head
    pairs = bool(options["pairs"]) or any(path.suffix == ".tsv" for path in data)
    if opened.config.kind == "decoder":
        can: tuple[str, ...] = ("match", "lm", "chat") if pairs else ("lm", "match", "chat")
    elif opened.config.kind == "encoder-decoder":
        can = ("translate", "match", "spans")
    elif isinstance(head, Head):
        can = ("masked",)
    elif isinstance(head, Classes):
        can = ("tag",) if head.per == "token" else ("classify",)
    else:
        raise RequestError(f"{opened.path} is {abilities(opened.config)[0]}: there is nothing to hold its answers to")
    if asked not in ("auto", *can):
        kind = abilities(opened.config)[0]
        raise RequestError(f"--task {asked}: {opened.path} is {kind}", f"it can: {', '.join(can)}")
    return can[0] if asked == "auto" else asked


def _check_heeded(task: str, options: Mapping[str, Any]) -> None:
    """UsageError for an option that this task would not look at."""
    others = {name for names in HEEDS.values() for name in names} - set(HEEDS[task])
    for name in sorted(others):
        if options[name] not in (None, (), False):
            flag = FLAGS.get(name, f"--{name.replace('_', '-')}")
            raise UsageError(f"{flag} says nothing of --task {task}", "leave it out")
    if task in ("tag", "classify", "masked") and _cached(options):
        raise UsageError("an encoder keeps no cache", "leave the cache's options out")
    if task in POSED and (_cached(options) or options["deterministic"]):
        raise UsageError(f"--task {task} reads without an engine", "leave its options out")
    curve = bool(options["multiples"] or options["figures"])
    if options["trained"] is not None and not curve:
        raise UsageError("--trained is of --context-multiples", "give them, or leave it out")
    if curve and (_cached(options) or options["window"] or options["stride"]):
        raise UsageError(
            "--context-multiples reads rows of its own, without a cache",
            "leave --window, --stride and the cache's options out",
        )


def _cached(options: Mapping[str, Any]) -> dict[str, Any]:
    """What was said of the cache, as keywords of LLM.load; {} where nothing was."""
    said = given(options, ("layout", "block_size", "chunk", "compressor", "rows"))
    said = {**said, **formats_asked(options), **policies_asked(options)}
    return said or ({"layout": "paged"} if options["cached"] else {})


def _paths(data: Sequence[Path], options: Mapping[str, Any]) -> list[Path]:
    return [*data, *(path for pair in options["pairs"] for path in pair)]


# ---------------------------------------------------------------- texts


def _text(
    opened: Opened, task: str, data: Sequence[Path], options: Mapping[str, Any], progress: _Progress
) -> tuple[list[Line], Page]:
    from kvad.lab.evaluate import Windows, documents_of, evaluate_text, opening_of
    from kvad.lab.extrapolate import joined
    from kvad.lab.reading import Uncached
    from kvad.train.corpus import open_corpus

    how = _documents(options)
    corpus = open_corpus(data, suffixes=options["suffixes"], errors=options["errors"], lines=how == "lines")
    curve, through = bool(options["multiples"] or options["figures"]), _cached(options)
    limit = opened.config.limit
    window = options["window"] if options["window"] is not None else limit
    _check_window(window, limit, options, cached=bool(through))
    stride = options["stride"] if options["stride"] is not None else max(1, window // 2)
    if not curve:
        Windows(window, stride)  # what cannot be is said before the model is loaded
    with _load(opened, options, rows=4, capacity=min(limit, window)) as llm:
        tokenizer = _tokenizer(llm)
        first = opening_of(llm)
        bos: Opening = options["bos"] or ("none" if first is None else "start")
        documents = documents_of(tokenizer, list(corpus.texts()))
        parted = None if bos == "none" else first
        if curve:
            texts = [document.tokens for document in documents]
            texts = [joined(texts, parted)] if how == "joined" else [joined([text], parted) for text in texts]
            return _curve(opened, llm, texts, options, progress)
        if how == "joined":
            documents = [_join(documents, parted)]
        reader: Reader
        reader = _cached_reader(llm) if through else Uncached(llm.model, max(limit, window - 1))
        likelihood = evaluate_text(
            reader,
            documents,
            Windows(window, stride, bos),
            first,
            most=options["tokens"],
            unknown=tokenizer.specials.unk,
            tick=lambda done, total: progress.tell("reading", done, total),
        )
        memory = _memory(llm) if through else None
        name = "" if first is None or bos == "none" else tokenizer.token_text(first)
    read = {"documents": len(documents), "window": window, "stride": stride, "bos": bos, "opening": name or None}
    said = {"none": "no opening token", "start": f"{name} before each text", "window": f"{name} before each window"}[
        bos
    ]
    name_of = "all files as one text" if how == "joined" else counted(len(documents), "text")
    page = [
        ("text", f"{name_of}, {size_said(likelihood)}"),
        ("read", f"windows of {window:,}, stride {stride:,}, {said}; {memory_said(memory)}"),
        *likelihood_page(likelihood, words=options["words"]),
    ]
    return [{**read, "memory": memory, **likelihood_line(likelihood)}], page


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
    from kvad.lab.evaluate import Document
    from kvad.lab.extrapolate import joined

    texts = [document.tokens for document in documents]
    # Every text's opening token is read and scored within the stream, as in training; the first one is put there later.
    tokens = joined(texts, opening)[0 if opening is None else 1 :]
    sums = [sum(getattr(document, name) for document in documents) for name in ("bytes", "words", "lines")]
    return Document(tokens, *sums)


def _curve(
    opened: Opened, llm: LLM, texts: list[Any], options: Mapping[str, Any], progress: _Progress
) -> tuple[list[Line], Page]:
    from kvad.lab.extrapolate import MULTIPLES, extrapolate

    trained = options["trained"] or _trained(opened)
    asked: dict[str, Any] = {"multiples": options["multiples"] or MULTIPLES}
    if options["tokens"] is not None:
        asked["most"] = options["tokens"]
    curve = extrapolate(llm.model, texts, trained, **asked, tick=progress.tell)
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
    return lines, curve_page(curve, figures)


def _name(path: Path) -> str:
    """A run's, not that of its last step's folder."""
    return path.parent.parent.name if path.parent.name == "checkpoints" else path.name


def _trained(opened: Opened) -> int:
    """Tokens of the rows of the run, where the checkpoint tells; else the model's limit."""
    state = {} if opened.training is None else opened.training.state
    context = state.get("run", {}).get("data", {}).get("context")
    return context if isinstance(context, int) else opened.config.limit


def _draw(curve: Curve, name: str, files: Sequence[Path]) -> list[Path]:
    from kvad.lab.plot import Series, draw

    if not files:
        return []
    lengths = [float(point.length) for point in curve.points]
    series = [
        Series(f"{name}: the same tokens", lengths, [point.perplexity for point in curve.points], dots=True),
        Series("all tokens of the rows", lengths, [point.whole_perplexity for point in curve.points], dots=True),
    ]
    title = f"{name} ({curve.positions}), trained on rows of {curve.trained:,} tokens"
    return draw(series, files, title=title, x_label="tokens of a row", y_label="perplexity", log_x=True, log_y=True)


# ---------------------------------------------------------------- pairs


def _translate(
    opened: Opened, task: str, data: Sequence[Path], options: Mapping[str, Any], progress: _Progress
) -> tuple[list[Line], Page]:
    from kvad.lab import bleu
    from kvad.lab.evaluate import answers, evaluate_pairs, evaluate_texts_said
    from kvad.lab.reading import Uncached

    if task == "translate":
        bleu.require()
    pairs = _pairs(data, options)
    sampling = _sampling(opened, options)
    each = sampling.get("beams", 1)
    through = _cached(options)
    with _load(opened, options, rows=LINES * each, capacity=opened.config.limit, answers=True) as llm:
        _tokenizer(llm)
        likelihood = None
        if opened.config.kind == "encoder-decoder":
            reader: Reader = _cached_reader(llm) if through else Uncached(llm.model)
            likelihood = evaluate_pairs(
                llm, reader, pairs, tick=lambda done, total: progress.tell("scoring", done, total)
            )
        sources, references = [source for source, _ in pairs], [target for _, target in pairs]
        said = answers(llm, sources, sampling, tick=lambda done, total: progress.tell("answering", done, total))
        memory = _memory(llm)
    form = bleu.Form(options["tokenized"], options["lower"])
    match, words = evaluate_texts_said(said, references, form, compare=task == "translate")
    shown = list(zip(sources, references, said, strict=True))[: options["show"] or 0]
    line = {"pairs": len(pairs), "search": "greedy" if each == 1 else f"{each} beams", "memory": memory}
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


# ---------------------------------------------------------------- labels


def _tag(
    opened: Opened, task: str, data: Sequence[Path], options: Mapping[str, Any], progress: _Progress
) -> tuple[list[Line], Page]:
    from kvad.lab.evaluate import evaluate_tags, predict_tags
    from kvad.lab.tagged import read_tagged

    sentences = read_tagged(data, options["errors"])
    with _load(opened, options, rows=64, capacity=1) as llm:
        _tokenizer(llm)
        words = [words for words, _ in sentences]
        said = predict_tags(llm, words, tick=lambda done, total: progress.tell("tagging", done, total))
    scores = evaluate_tags([tags for _, tags in sentences], said)
    size = f"{counted(len(sentences), 'sentence')}, {counted(scores.count, 'word')}"
    return [{"sentences": len(sentences), **labels_line(scores)}], labels_page(scores, _known(opened), size)


def _classify(
    opened: Opened, task: str, data: Sequence[Path], options: Mapping[str, Any], progress: _Progress
) -> tuple[list[Line], Page]:
    from kvad.lab.evaluate import TOGETHER, ask_all
    from kvad.lab.metrics import label_scores
    from kvad.lab.tagged import read_labelled

    labelled, said = read_labelled(data, options["errors"]), list[str]()
    with _load(opened, options, rows=64, capacity=1) as llm:
        _tokenizer(llm)
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


# ---------------------------------------------------------------- what they share


def _load(opened: Opened, options: Mapping[str, Any], *, rows: int, capacity: int, answers: bool = False) -> LLM:
    """With the cache that was asked for; else the smallest that will do, or for ``answers`` one of ``rows`` rows."""
    from kvad.llm import LLM

    said = _cached(options)
    fields: dict[str, Any] = {"prefix": False, "chunk": 16, "rows": rows, "capacity": capacity, **said}
    if not said:
        reads = opened.config.kind == "decoder" and not answers  # without a cache: one that holds next to nothing
        fields = {"rows": 1, "capacity": 1} if reads else {"rows": rows, "capacity": capacity}
    fields["chunk"] = min(fields.get("chunk", 512), fields["capacity"])
    chosen = {name: options[name] for name in ("dtype", "deterministic", "adapter")}
    return LLM.load(opened.path, **chosen, **fields)


def _tokenizer(llm: LLM) -> Any:
    from kvad.cli.lines import tokenizer_of

    return tokenizer_of(llm)


def _cached_reader(llm: LLM) -> Reader:
    from kvad.lab.reading import Cached

    return Cached(llm.engine)


def _memory(llm: LLM) -> Line:
    from kvad.cache.formats import joined

    cache, group = llm.engine.cache, llm.engine.ledger.groups[0]
    stored = joined(group.keys, group.values)
    return {"policy": cache.policy, "stored": stored, "layout": cache.layout, "chunk": cache.chunk}


class _Progress:
    """A line on stderr where that is a terminal."""

    def __init__(self, *, quiet: bool) -> None:
        self._shown = not quiet and sys.stderr.isatty()

    def tell(self, what: str, done: int, total: int) -> None:
        if self._shown:
            click.echo(f"\r{what:<36} {done:>11,} of {total:,} ", err=True, nl=False)

    def done(self) -> None:
        if self._shown:
            click.echo(f"\r{'':<72}\r", err=True, nl=False)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.done()
