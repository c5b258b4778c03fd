"""``kvad eval``: evaluate a model on texts, pairs and labels. The measurements are in ``kvad.evaluation``."""

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

TASKS = ("auto", "lm", "translate", "match", "tag", "classify", "masked-lm", "span-corruption", "chat")
TWO_PATHS = (click.Path(path_type=Path), click.Path(path_type=Path))

# Options by the tasks that use them.
LENGTH_OPTIONS = ("length_multiples", "length_plot", "trained_seq_len")
TEXT_OPTIONS = (
    "window", "stride", "bos", "document_unit", "max_scored_tokens", "word_perplexity", "exceed_max_seq_len",
    "suffixes", *LENGTH_OPTIONS,
)  # fmt: skip
ANSWER_OPTIONS = ("num_beams", "length_penalty", "max_tokens", "lowercase", "print_samples", "pairs")
OPTIONS_BY_TASK: Mapping[str, tuple[str, ...]] = {
    "lm": TEXT_OPTIONS,
    "translate": (*ANSWER_OPTIONS, "bleu_tokenization", "word_perplexity"),
    "match": ANSWER_OPTIONS,
    "tag": (),
    "classify": (),
    "masked-lm": ("window", "document_unit", "suffixes"),
    "span-corruption": ("window", "document_unit", "suffixes"),
    "chat": ("window",),
}
FLAGS = {"suffixes": "--suffix"}


def _multiples(_ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[float, ...]:
    try:
        return () if value is None else tuple(float(number) for number in value.split(","))
    except ValueError:
        raise click.BadParameter("write it like 1,2,4,8,16", param=param) from None


@click.command("eval", cls=SectionedCommand)
@model_argument
@click.argument("data", nargs=-1, type=click.Path(path_type=Path))
@click.option("--task", type=click.Choice(TASKS), default="auto", help="Task [default: by the model and the data].")
@click.option(
    "--pairs", multiple=True, type=TWO_PATHS, metavar="SOURCE TARGET", help="Two parallel files of lines. Repeatable."
)
@click.option(
    "--encoding-errors",
    type=click.Choice(["strict", "replace"]),
    default="strict",
    show_default=True,
    help="Handling of bytes that are not UTF-8.",
)
@click.option(
    "--suffix",
    "suffixes",
    multiple=True,
    metavar=".EXT",
    help="Suffix of the files to read in a folder. Repeatable [default: all].",
)
@click.option(
    "--document-unit", type=click.Choice(["files", "lines", "joined"]), help="Unit of one text [default: files]."
)
@click.option("--window", type=int, help="Tokens of a window [default: the model's limit].")
@click.option("--stride", type=int, help="Tokens between two windows [default: half a window].")
@click.option(
    "--bos",
    type=click.Choice(["none", "start", "window"]),
    help="Put the opening token nowhere, before each text or before each window [default: start, if it exists].",
)
@click.option("--exceed-max-seq-len", is_flag=True, help="Allow a --window above the model's limit.")
@click.option(
    "--max-scored-tokens", type=click.IntRange(min=1), help="Score about N tokens, evenly spread [default: all]."
)
@click.option("--word-perplexity", is_flag=True, help="Also compute the perplexity per word.")
@click.option(
    "--length-multiples",
    metavar="N,N",
    callback=_multiples,
    help="Evaluate rows of these multiples of the trained length [default with --length-plot: 1,2,4,8,16].",
)
@click.option(
    "--length-plot",
    multiple=True,
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Plot perplexity by row length: PNG, SVG or PDF. Repeatable.",
)
@click.option(
    "--trained-seq-len",
    type=click.IntRange(min=2),
    help="Tokens of a training row [default: the run's, else the model's limit].",
)
@click.option(
    "-n",
    "--max-tokens",
    type=click.IntRange(min=1),
    help=f"Maximum tokens of an answer [default: the checkpoint's, else {MAX_TOKENS}].",
)
@click.option("--num-beams", type=click.IntRange(min=1), help="Beams of the search; 1 is greedy [default: 1].")
@click.option("--length-penalty", type=float, help="Divide beam scores by length ** X [default: 1].")
@click.option(
    "--bleu-tokenization",
    type=click.Choice(["words", "spaces"]),
    help="Tokenization for BLEU: kvad's words, or spaces of tokenized texts [default: sacrebleu's 13a].",
)
@click.option("--lowercase", is_flag=True, help="Compare in lower case.")
@click.option("--print-samples", type=click.IntRange(min=1), help="Print N answers next to their references.")
@click.option("--use-cache", is_flag=True, help="Evaluate through the KV cache; any cache option implies it.")
@click.option("--max-num-seqs", type=click.IntRange(min=1), help="Maximum number of sequences in the cache.")
@click.option("--layout", type=click.Choice(["paged", "contiguous"]), help="Cache layout [default: paged].")
@click.option("--block-size", type=click.IntRange(min=1), help="Tokens per block [default: 16].")
@click.option(
    "--prefill-chunk-size",
    type=click.IntRange(min=1),
    help="Tokens of a sequence per step, with a cache [default: 16].",
)
@click.option(
    "--summarizer",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="Summarizer for a tiered policy with summaries.",
)
@format_options
@policy_options
@adapter_option
@click.option("--dtype", type=click.Choice(DTYPES), help="Dtype of the computation [default: as stored].")
@deterministic_option
@click.option("-q", "--quiet", is_flag=True, help="Show no progress on stderr.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; with --length-multiples one per length.")
def eval_command(model: Path, data: tuple[Path, ...], task: str, as_json: bool, **options: Any) -> None:
    """Evaluate a model.

    The task depends on the model and on DATA:

    \b
    decoder          texts        loss, perplexity, bits per byte, accuracy per token
                     pairs        exact match of its answers
                     messages     --task chat: loss and accuracy of the assistant's tokens
    encoder-decoder  pairs        loss, BLEU, chrF, exact match
                     texts        --task span-corruption: loss and accuracy of removed spans
    encoder          words, tags  accuracy, F1 of each tag, macro-F1
                     texts, label the same for labels
                     texts        loss and accuracy of masked tokens

    Pairs are TSV files (`SOURCE<tab>TARGET`), or --pairs names two files; words and tags are `WORD<tab>TAG` lines with
    an empty line between sentences; labels are `LABEL<tab>TEXT` lines. With a cache option everything runs through
    such a cache, which measures the loss of a policy on your text.

    \b
    kvad eval runs/demo book.txt
    kvad eval gpt2 wiki.txt --window 1024 --stride 512 --bos none --word-perplexity
    kvad eval runs/demo book.txt --policy "sinks(4,60)" --cache-dtype int8
    kvad eval runs/endless-alibi texts/ --document-unit joined --length-plot alibi.svg
    kvad eval runs/de-en --pairs test.de test.en --num-beams 5
    kvad eval runs/de-en --pairs test.de test.en --bleu-tokenization words --lowercase
    kvad eval runs/tagger dev.tsv
    kvad eval runs/masked book.txt
    kvad eval runs/chat talks.jsonl --task chat
    """
    from kvad.checkpoint import open_checkpoint

    if not data and not options["pairs"]:
        raise UsageError("no data was given", "give files or folders, or --pairs SOURCE TARGET")
    parse_policy_options(options)
    opened = open_checkpoint(model)
    task = _task(opened, task, data, options)
    _check_unused_options(task, options)
    run = {"lm": eval_texts, "translate": eval_pairs, "match": eval_pairs, "tag": eval_tags, "classify": eval_labels}
    start = time.perf_counter()
    with EvalProgress(quiet=options["quiet"]) as progress:
        if task in OBJECTIVE_TASKS:
            lines, page = eval_objective(opened, task, data, options, progress.update)
        else:
            lines, page = run[task](opened, task, data, options, progress)
    if as_json:
        first = {"task": task, "model": str(model), "data": [str(path) for path in _paths(data, options)]}
        timing = {"seconds": time.perf_counter() - start}
        for line in lines:
            emit_json({**first, **line, **timing})
        return
    for name, text in page:
        click.echo(f"{name:<11}{text}" if name else text)


# ---------------------------------------------------------------- which task


def _task(opened: CheckpointHandle, requested: str, data: Sequence[Path], options: Mapping[str, Any]) -> str:
    """Choose the task by the kind of the model and the form of the data.

    Raises:
        RequestError: If the model cannot do the requested task.
    """
    from kvad.cli.line_batches import model_capabilities
    from kvad.config import ClassificationHeadConfig, LanguageHeadConfig

    head = opened.config.head
    pairs = bool(options["pairs"]) or any(path.suffix == ".tsv" for path in data)
    if opened.config.kind == "decoder":
        tasks: tuple[str, ...] = ("match", "lm", "chat") if pairs else ("lm", "match", "chat")
    elif opened.config.kind == "encoder-decoder":
        tasks = ("translate", "match", "span-corruption")
    elif isinstance(head, LanguageHeadConfig):
        tasks = ("masked-lm",)
    elif isinstance(head, ClassificationHeadConfig):
        tasks = ("tag",) if head.level == "token" else ("classify",)
    else:
        raise RequestError(f"{opened.path} is {model_capabilities(opened.config)[0]}: it has no outputs to evaluate")
    if requested not in ("auto", *tasks):
        kind = model_capabilities(opened.config)[0]
        raise RequestError(f"--task {requested}: {opened.path} is {kind}", f"its tasks: {', '.join(tasks)}")
    return tasks[0] if requested == "auto" else requested


def _check_unused_options(task: str, options: Mapping[str, Any]) -> None:
    """Refuse options that the task does not use."""
    others = {name for names in OPTIONS_BY_TASK.values() for name in names} - set(OPTIONS_BY_TASK[task])
    for name in sorted(others):
        if options[name] not in (None, (), False):
            flag = FLAGS.get(name, f"--{name.replace('_', '-')}")
            raise UsageError(f"{flag} does not apply to --task {task}", "omit it")
    if task in ("tag", "classify", "masked-lm") and cache_options_given(options):
        raise UsageError("an encoder has no cache", "omit the cache options")
    if task in OBJECTIVE_TASKS and (cache_options_given(options) or options["deterministic"]):
        raise UsageError(f"--task {task} runs without an engine", "omit its options")
    curve = bool(options["length_multiples"] or options["length_plot"])
    if options["trained_seq_len"] is not None and not curve:
        raise UsageError("--trained-seq-len needs --length-multiples", "add them, or omit it")
    if curve and (cache_options_given(options) or options["window"] or options["stride"]):
        raise UsageError(
            "--length-multiples evaluates its own rows without a cache", "omit --window, --stride and the cache options"
        )


def _paths(data: Sequence[Path], options: Mapping[str, Any]) -> list[Path]:
    return [*data, *(path for pair in options["pairs"] for path in pair)]
