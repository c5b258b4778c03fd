"""``kvad eval``: evaluate a model on texts, pairs and labels. The measurements are in ``kvad.evaluation``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from kvad.cli.commands.eval_report import EvalOptions
from kvad.cli.commands.eval_tasks import OBJECTIVE_TASKS, eval_labels, eval_objective, eval_pairs, eval_tags, eval_texts
from kvad.cli.fields import command, flag_of, is_given
from kvad.cli.output import ProgressLine, emit_json
from kvad.errors import RequestError, UsageError

if TYPE_CHECKING:
    from kvad.checkpoint import CheckpointHandle

# Options by the tasks that use them.
LENGTH_OPTIONS = ("length_multiples", "length_plot", "trained_seq_len")
TEXT_OPTIONS = (
    "window", "stride", "bos", "document_unit", "max_scored_tokens", "word_perplexity", "exceed_max_seq_len",
    "suffix", *LENGTH_OPTIONS,
)  # fmt: skip
ANSWER_OPTIONS = ("num_beams", "length_penalty", "max_tokens", "lowercase", "print_samples", "pairs")
OPTIONS_BY_TASK: Mapping[str, tuple[str, ...]] = {
    "lm": TEXT_OPTIONS,
    "translate": (*ANSWER_OPTIONS, "bleu_tokenization", "word_perplexity"),
    "match": ANSWER_OPTIONS,
    "tag": (),
    "classify": (),
    "masked-lm": ("window", "document_unit", "suffix"),
    "span-corruption": ("window", "document_unit", "suffix"),
    "chat": ("window",),
}


@command("eval", EvalOptions)
def eval_command(options: EvalOptions) -> None:
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

    if not options.data and not options.pairs:
        raise UsageError("no data was given", "give files or folders, or --pairs SOURCE TARGET")
    has_cache = bool(options.given_cache_fields)
    opened = open_checkpoint(options.model)
    task = _task(opened, options)
    _check_unused_options(task, options, has_cache=has_cache)
    run = {"lm": eval_texts, "translate": eval_pairs, "match": eval_pairs, "tag": eval_tags, "classify": eval_labels}
    start = time.perf_counter()
    with ProgressLine(quiet=options.quiet) as progress:
        lines, page = run.get(task, eval_objective)(opened, task, options, progress)
    if options.as_json:
        paths = [*options.data, *(path for pair in options.pairs for path in pair)]
        first = {"task": task, "model": options.model, "data": paths}
        for line in lines:
            emit_json({**first, **line, "seconds": time.perf_counter() - start})
        return
    for name, text in page:
        click.echo(f"{name:<11}{text}" if name else text)


# ---------------------------------------------------------------- which task


def _task(opened: CheckpointHandle, options: EvalOptions) -> str:
    """Choose the task by the kind of the model and the form of the data.

    Raises:
        RequestError: If the model cannot do the requested task.
    """
    from kvad import config as cfg
    from kvad.cli.line_batches import model_capabilities

    head, requested = opened.config.head, options.task
    pairs = bool(options.pairs) or any(path.suffix == ".tsv" for path in options.data)
    if opened.config.kind == "decoder":
        tasks: tuple[str, ...] = ("match", "lm", "chat") if pairs else ("lm", "match", "chat")
    elif opened.config.kind == "encoder-decoder":
        tasks = ("translate", "match", "span-corruption")
    elif isinstance(head, cfg.LanguageHeadConfig):
        tasks = ("masked-lm",)
    elif isinstance(head, cfg.ClassificationHeadConfig):
        tasks = ("tag",) if head.level == "token" else ("classify",)
    else:
        raise RequestError(f"{opened.path} is {model_capabilities(opened.config)[0]}: it has no outputs to evaluate")
    if requested not in ("auto", *tasks):
        kind = model_capabilities(opened.config)[0]
        raise RequestError(f"--task {requested}: {opened.path} is {kind}", f"its tasks: {', '.join(tasks)}")
    return tasks[0] if requested == "auto" else requested


def _check_unused_options(task: str, options: EvalOptions, *, has_cache: bool) -> None:
    """Refuse options that the task does not use."""
    others = {name for names in OPTIONS_BY_TASK.values() for name in names} - set(OPTIONS_BY_TASK[task])
    for name in sorted(others):
        if is_given(getattr(options, name)):
            raise UsageError(f"{flag_of(name)} does not apply to --task {task}", "omit it")
    if task in ("tag", "classify", "masked-lm") and has_cache:
        raise UsageError("an encoder has no cache", "omit the cache options")
    if task in OBJECTIVE_TASKS and (has_cache or options.deterministic):
        raise UsageError(f"--task {task} runs without an engine", "omit its options")
    if options.trained_seq_len is not None and not options.is_curve:
        raise UsageError("--trained-seq-len needs --length-multiples", "add them, or omit it")
    if options.is_curve and (has_cache or options.window or options.stride):
        raise UsageError(
            "--length-multiples evaluates its own rows without a cache", "omit --window, --stride and the cache options"
        )
