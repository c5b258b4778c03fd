"""``kvad eval``: a model's numbers on texts, pairs and labels; what is measured, and how, is ``kvad.evaluation.text``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvad.cli.cache_options import parse_policy_options, policy_options
from kvad.cli.commands.eval_report import EvalProgress, cache_options_given
from kvad.cli.commands.eval_tasks import (
    MAX_TOKENS,
    OBJECTIVE_TASKS,
    eval_labels,
    eval_objective,
    eval_pairs,
    eval_tags,
    eval_texts,
)
from kvad.cli.model_options import DTYPES, adapter_option, deterministic_option, format_options
from kvad.cli.options import SectionedCommand, emit_json, model_argument
from kvad.errors import RequestError, UsageError

if TYPE_CHECKING:
    from kvad.checkpoint import CheckpointHandle

TASKS = ("auto", "lm", "translate", "match", "tag", "classify", "masked", "spans", "chat")
TWO_PATHS = (click.Path(path_type=Path), click.Path(path_type=Path))

# What each task alone heeds, and the flags' values that say nothing.
LENGTH_OPTIONS = ("multiples", "figures", "trained")
TEXT_OPTIONS = ("window", "stride", "bos", "documents", "tokens", "words", "beyond", "suffixes", *LENGTH_OPTIONS)
ANSWER_OPTIONS = ("beams", "length_penalty", "max_tokens", "lower", "show", "pairs")
OPTIONS_BY_TASK: Mapping[str, tuple[str, ...]] = {
    "lm": TEXT_OPTIONS,
    "translate": (*ANSWER_OPTIONS, "tokenized", "words"),
    "match": ANSWER_OPTIONS,
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


@click.command("eval", cls=SectionedCommand)
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
def eval_command(model: Path, data: tuple[Path, ...], task: str, as_json: bool, **options: Any) -> None:
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
    from kvad.checkpoint import open_checkpoint

    if not data and not options["pairs"]:
        raise UsageError("no data was named", "name files or folders, or --pairs SOURCE TARGET")
    parse_policy_options(options)
    opened = open_checkpoint(model)
    task = _task(opened, task, data, options)
    _check_unused_options(task, options)
    run = {
        "lm": eval_texts,
        "translate": eval_pairs,
        "match": eval_pairs,
        "tag": eval_tags,
        "classify": eval_labels,
    }
    began = time.perf_counter()
    with EvalProgress(quiet=options["quiet"]) as progress:
        if task in OBJECTIVE_TASKS:
            lines, page = eval_objective(opened, task, data, options, progress.update)
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


def _task(opened: CheckpointHandle, asked: str, data: Sequence[Path], options: Mapping[str, Any]) -> str:
    """The task, by the model's kind and the data's form.  RequestError for one that the model cannot do."""
    from kvad.cli.line_batches import model_capabilities
    from kvad.config import ClassificationHeadConfig, LanguageHeadConfig

    head = opened.config.head
    pairs = bool(options["pairs"]) or any(path.suffix == ".tsv" for path in data)
    if opened.config.kind == "decoder":
        can: tuple[str, ...] = ("match", "lm", "chat") if pairs else ("lm", "match", "chat")
    elif opened.config.kind == "encoder-decoder":
        can = ("translate", "match", "spans")
    elif isinstance(head, LanguageHeadConfig):
        can = ("masked",)
    elif isinstance(head, ClassificationHeadConfig):
        can = ("tag",) if head.level == "token" else ("classify",)
    else:
        raise RequestError(
            f"{opened.path} is {model_capabilities(opened.config)[0]}: there is nothing to hold its answers to"
        )
    if asked not in ("auto", *can):
        kind = model_capabilities(opened.config)[0]
        raise RequestError(f"--task {asked}: {opened.path} is {kind}", f"it can: {', '.join(can)}")
    return can[0] if asked == "auto" else asked


def _check_unused_options(task: str, options: Mapping[str, Any]) -> None:
    """UsageError for an option that this task would not look at."""
    others = {name for names in OPTIONS_BY_TASK.values() for name in names} - set(OPTIONS_BY_TASK[task])
    for name in sorted(others):
        if options[name] not in (None, (), False):
            flag = FLAGS.get(name, f"--{name.replace('_', '-')}")
            raise UsageError(f"{flag} says nothing of --task {task}", "leave it out")
    if task in ("tag", "classify", "masked") and cache_options_given(options):
        raise UsageError("an encoder keeps no cache", "leave the cache's options out")
    if task in OBJECTIVE_TASKS and (cache_options_given(options) or options["deterministic"]):
        raise UsageError(f"--task {task} reads without an engine", "leave its options out")
    curve = bool(options["multiples"] or options["figures"])
    if options["trained"] is not None and not curve:
        raise UsageError("--trained is of --context-multiples", "give them, or leave it out")
    if curve and (cache_options_given(options) or options["window"] or options["stride"]):
        raise UsageError(
            "--context-multiples reads rows of its own, without a cache",
            "leave --window, --stride and the cache's options out",
        )


def _paths(data: Sequence[Path], options: Mapping[str, Any]) -> list[Path]:
    return [*data, *(path for pair in options["pairs"] for path in pair)]
