"""``kvad train``: build a RunConfig from flags and a run file, then train (``kvad.train.loop.run``).

``--dry-run`` prints the memory, FLOPs and time of the run (``kvad.train.loop.dry_run``) as text or JSON.
"""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import click

from kvad import api, checkpoint, evaluation
from kvad.cache import sizing
from kvad.cli import output
from kvad.cli.fields import argument, command, option
from kvad.cli.line_batches import model_capabilities
from kvad.cli.parameters import COUNT, JsonOption
from kvad.cli.run_parameters import CorpusOptions, merge_options, name_corpus
from kvad.errors import UsageError, format_bytes, format_count
from kvad.train import loop, monitoring, setup
from kvad.train.config import OptimConfig, RunConfig, TrainConfig, apply_overrides, read_toml


class _TrainOptions(CorpusOptions, JsonOption):
    corpus: tuple[Path, ...] = argument("[CORPUS]...")
    out: Path | None = option("Folder of the run", short="-o")
    config: Path | None = option("Run file (TOML); flags override it", metavar="FILE")
    set: tuple[str, ...] = option(
        "Set any key of the run: optim.lr=1e-3; keys of [model] need no table: decoder.num_layers=4",
        metavar="KEY=VALUE",
    )
    objective: (
        Literal["next-token", "seq2seq", "masked-lm", "span-corruption", "tag", "classify", "chat", "summarizer"] | None
    ) = option("Training objective [default: next-token; for pairs seq2seq, for an encoder masked-lm]")
    init: str | None = option(
        "Checkpoint to start from; with --objective summarizer the model whose cache is summarized", metavar="MODEL"
    )
    lora_rank: int | None = option("Train LoRA adapters of this rank instead of all weights", metavar="RANK")
    preset: str | None = option(
        "Model preset: tiny, small, demo, medium, base, shakespeare-char, gpt2-124m, llama-small; transformer-tiny, "
        "-base, -big; marian-tiny, -base; t5-tiny, -small; encoder-tiny, bert-base [default: small]"
    )
    seq_len: int | None = option("Tokens of a training row [default: 256; with --init at most its limit]")
    batch_size: int | None = option("Rows of a micro-batch", of=TrainConfig)
    gradient_accumulation_steps: int | None = option("Micro-batches per optimizer step", of=TrainConfig)
    steps: int | None = option("Optimizer steps [default: 1000, unless --minutes is given]")
    minutes: float | None = option("Minutes of training; the learning rate follows the clock [default: no limit]")
    lr: float | None = option("Highest learning rate", of=OptimConfig)
    min_lr: float | None = option("Final learning rate", of=OptimConfig)
    warmup_steps: int | None = option("Warmup steps [default: a tenth of the steps, at most 100]")
    seed: int | None = option("Seed of weights, split and order", short="-s", of=TrainConfig)
    precision: Literal["auto", "fp32", "bf16", "fp16"] | None = option("Precision of the computation", of=TrainConfig)
    device: str | None = option("Torch device", of=TrainConfig)
    eval_interval: int | None = option("Steps between evaluations", of=TrainConfig)
    save_interval: int | None = option("Steps between checkpoints", of=TrainConfig)
    check_cache: bool = option("At evaluations, compare cached with uncached output")
    prompt: tuple[str, ...] = option("At evaluations, print a continuation of TEXT")
    bleu_samples: int | None = option("At evaluations, compute BLEU on N held-out pairs [default: off]", kind=COUNT)
    tensorboard: bool = option("Also write TensorBoard files to OUT/tensorboard")
    resume: bool = option("Resume from the last checkpoint of --out, bit for bit")
    overwrite: bool = option("Replace the run in --out")
    dry_run: bool = option("Only estimate memory, FLOPs, time and disk space of the run")


@command("train", _TrainOptions)
def train_command(options: _TrainOptions) -> None:
    """Train a model on text files and folders, or on pairs of texts.

    A run file (TOML) may be the first argument. Every file is a document. An encoder-decoder (--preset
    transformer-tiny) is trained on pairs: CORPUS are TSV files of `SOURCE<tab>TARGET` lines, or --pairs names two
    parallel files. --objective selects other objectives; CORPUS may also be a folder of kvad data prepare. Ctrl-C and
    SIGTERM save a checkpoint and print the command to resume. The run folder contains checkpoints, metrics.jsonl, and
    curves as PNG and SVG (if matplotlib is installed).

    \b
    kvad train book.txt --out runs/book --tokenizer char --preset tiny --steps 2000
    kvad train recipes/shakespeare-char-cpu.toml input.txt --dry-run
    kvad train recipes/shakespeare-char-cpu.toml input.txt --out runs/shakespeare
    kvad train src/ docs/ --suffix .py --suffix .md --out runs/code --minutes 30
    kvad train recipes/mine.toml corpus/ --out runs/mine --set optim.lr=3e-4 --set decoder.num_layers=4
    kvad train pairs.tsv --preset transformer-base --vocab-size 37000 --out runs/translate
    kvad train --pairs train.de train.en --validation-pairs val.de val.en --preset transformer-tiny --out runs/de-en
    kvad train train.tsv --validation dev.tsv --objective tag --preset encoder-tiny --out runs/tags
    kvad train talks.jsonl --objective chat --init runs/mine --out runs/chat
    kvad train --resume --out runs/mine
    kvad train more/ --init runs/mine --lr 1e-4 --out runs/tuned
    kvad train more/ --init ./SmolLM2-135M --lora-rank 8 --set lora.target_modules=all --out runs/adapter
    kvad train corpus/ --objective summarizer --init runs/mine --set ratio=8 --out runs/summaries
    """
    out, run_file, corpus = options.out, options.config, options.corpus
    if options.resume and options.overwrite:
        raise UsageError("--resume and --overwrite exclude each other")
    if options.dry_run and options.resume:
        raise UsageError("--dry-run and --resume exclude each other", "omit one of them")
    if out is None and not options.dry_run:
        raise click.UsageError("Missing option '--out'.")
    if corpus and corpus[0].suffix == ".toml":
        if run_file is not None:
            raise UsageError(f"{corpus[0]} and --config {run_file}: only one run file is allowed")
        run_file, corpus = corpus[0], corpus[1:]
    stored = loop.read_run_config(out)[0] if options.resume and out is not None else None
    tables = read_toml(run_file) if run_file is not None else {} if stored is None else stored.to_dict()
    tables = _with_options(tables, options)
    config = RunConfig.from_dict(tables)
    is_distributed = os.environ.get("WORLD_SIZE", "1") != "1"  # set by torchrun
    if is_distributed and (options.dry_run or config.objective.kind == "summarizer"):
        message = "--dry-run plans a single process" if options.dry_run else "a summarizer is trained by one process"
        raise UsageError(message, "run it without torchrun")
    data_parallel = None if options.dry_run else loop.init_data_parallel(os.environ, config.train)
    config, named = (
        api.training.with_seq_len(config, tables, stored),
        name_corpus(corpus, options.pairs, options.held_out),
    )
    if data_parallel is None or out is None:
        _show_plan(config, named, out, options)
    else:
        _train(config, named, out, data_parallel, options)


def _train(
    config: RunConfig,
    named: setup.CorpusArgument,
    out: Path,
    data_parallel: loop.DataParallelGroup,
    options: _TrainOptions,
) -> None:
    with closing(monitoring.make_progress(output.console())) as progress:
        outcome = api.training.run_training(
            config,
            named,
            out,
            [progress],
            resume=options.resume,
            overwrite=options.overwrite,
            data_parallel=data_parallel,
        )
    if data_parallel.is_main:
        _print_result(outcome, config, out, options.as_json)
    if outcome.reason == "interrupted":
        output.exit_with(128 + (outcome.signal or signal.SIGINT))


def _with_options(tables: Mapping[str, Any], options: _TrainOptions) -> dict[str, Any]:
    """Merge the given options and --set into the tables; a summarizer run's key without a table is [summarizer]'s."""
    merged = merge_options(tables, options)
    objective = merged.get("objective", {})
    is_summarizer = isinstance(objective, dict) and objective.get("kind") == "summarizer"
    if options.init is not None:
        api.training.set_key(merged, "summarizer.model" if is_summarizer else "model.init", options.init)
    assignments = []
    for assignment in options.set:
        key, equals, value = assignment.partition("=")
        if not equals or not key:
            raise UsageError(f"--set {assignment!r} is not KEY=VALUE", "write it like --set optim.lr=1e-3")
        assignments.append((f"summarizer.{key}" if is_summarizer and "." not in key else key, value))
    return apply_overrides(merged, assignments)


def draw_loss_curve(out: Path) -> list[Path]:
    """Draw the curves of the run; none if matplotlib is not installed or nothing was logged."""
    return output.draw_figures(lambda: evaluation.compare_runs.plot_run(out), "curves")


def _print_result(outcome: monitoring.TrainingResult, config: RunConfig, out: Path, as_json: bool) -> None:
    figures = draw_loss_curve(out)
    if as_json:
        output.emit_json({**dataclasses.asdict(outcome), "out": out, "figures": figures, "config": config.to_dict()})
    results = {"loss": outcome.loss, "validation": outcome.val_loss}
    losses = ", ".join(f"{name} {value:.4f}" for name, value in results.items() if value is not None)
    steps, tokens = format_count(outcome.step, "step"), format_count(outcome.tokens, "token")
    output.print_error(f"{steps}, {tokens} in {outcome.elapsed:.0f} s: {losses}")
    if config.train.keep_best and outcome.best is not None and outcome.best_step not in (None, outcome.step):
        output.print_error(f"best:  {out / 'best'}, validation {outcome.best:.4f} at step {outcome.best_step:,}")
    if outcome.reason == "unchanged":
        is_complete = config.train.last_step == outcome.step
        length = f"has all {steps}" if is_complete else f"has used its {config.train.minutes:g} minutes"
        output.print_error(f"nothing to do: the run {length}. Extend it with --steps or --minutes")
    kvad = output.program_path()
    if outcome.reason == "interrupted":
        output.print_error(f"stopped and saved. Resume with:  {kvad} train --resume --out {out}")
    elif config.objective.kind == "summarizer":
        summarizer = config.summarizer
        recent, ratio, interval = summarizer.recent, summarizer.ratio, summarizer.interval
        policy = f"tiered({recent}, quantized=0, summaries=N, ratio={ratio}, interval={interval})"
        output.print_error(f'next:  {kvad} generate {summarizer.model} --summarizer {out} --policy "{policy}"')
    else:
        trained = checkpoint.open_checkpoint(outcome.checkpoint).config
        name = "chat" if config.objective.kind == "chat" else model_capabilities(trained)[1][0]
        output.print_error(f"next:  {kvad} {name} {out}")


def _show_plan(config: RunConfig, named: setup.CorpusArgument, out: Path | None, options: _TrainOptions) -> None:
    """Print the plan; exit code 1 if the run would not fit into memory."""
    if out is not None:
        setup.preflight.check_run_folder(config, named, out, options.overwrite)
    plan = loop.plan_training(config, named, sizing.available_bytes(), output.print_error)
    record = output.with_properties(plan, "tokens", "flops", "bytes") | {"config": config.to_dict()}
    does_not_fit = plan.fits is not None and plan.fits < plan.batch
    output.print_result(options.as_json, record, training_plan_text(plan), failed=does_not_fit)


def training_plan_text(plan: loop.TrainingPlan) -> list[str]:
    """Format the plan, one line per topic."""
    share = "all trained" if plan.trained == plan.parameters else f"{plan.trained:,} of them trained"
    held_out = f"{plan.validation_tokens:,} for validation"
    corpus = f"number of training tokens unknown: a stream is not counted; {held_out}"
    if plan.train_tokens is not None:
        corpus = f"{format_count(plan.train_tokens, 'token')} to train on, {held_out}"
    rows = ("" if plan.accumulate == 1 else f"{plan.accumulate} x ") + format_count(plan.batch, "row")
    flops = "FLOPs not counted" if plan.step_flops is None else f"{_flops(plan.step_flops)} forward and backward"
    num_checkpoints, size = plan.num_checkpoints + 1, format_bytes((plan.num_checkpoints + 1) * plan.checkpoint)
    lines = {
        "model": f"{plan.kind}, objective {plan.objective}: {format_count(plan.parameters, 'parameter')}, {share}",
        "memory": _memory(plan),
        "corpus": corpus,
        "step": f"{rows} of {format_count(plan.context, 'token')}, {plan.tokens_per_step:,} of them targets; {flops}",
        "run": _run_settings(plan),
        "measured": _measured(plan),
        "time": _time(plan),
        "disk": f"{format_bytes(plan.checkpoint)} a checkpoint (and the tokenizer); "
        f"up to {num_checkpoints} of them, {size}, while one is written",
    }
    return [f"{name:<10}{text}" for name, text in lines.items()]


def _memory(plan: loop.TrainingPlan) -> str:
    if plan.memory is None:
        return "not planned for a summarizer"
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in plan.memory.items())
    available = "available memory unknown" if plan.available is None else f"{format_bytes(plan.available)} available"
    text = f"at least {format_bytes(plan.bytes or 0)} ({parts}); {available}"
    if plan.device != "cpu":
        text += f" on the host; {plan.device} memory is not planned"
    if plan.fits is None or plan.fits >= plan.batch:
        return text
    if not plan.fits:
        return f"{text}: DOES NOT FIT, not even --batch-size 1"
    more = "with --gradient-accumulation-steps for more rows per step"
    return f"{text}: DOES NOT FIT; --batch-size {plan.fits} fits, {more}"


def _run_settings(plan: loop.TrainingPlan) -> str:
    if plan.steps is None:
        return f"{plan.minutes:g} minutes; number of steps unknown, because nothing was measured"
    clock = "" if plan.minutes is None else f" (in {plan.minutes:g} minutes)"
    epochs = "epochs unknown" if plan.epochs is None else f"{plan.epochs:,.2f} epochs"
    flops = "" if plan.flops is None else f", {_flops(plan.flops)}"
    return f"{format_count(plan.steps, 'step')}{clock}, {format_count(plan.tokens or 0, 'token')}, {epochs}{flops}"


def _measured(plan: loop.TrainingPlan) -> str:
    where = f"{plan.precision} on {plan.device}, {format_count(plan.threads, 'thread')}"
    product = f"a matrix product {_flops(plan.gemm_flops)}/s ({where})"
    trial = plan.trial
    if trial is None:
        return f"{product}; no step measured, because it would not fit"
    rows = "a micro-batch" if trial.rows == plan.batch else f"{format_count(trial.rows, 'row')} of the {plan.batch}"
    share = "" if trial.utilization is None else f", {trial.utilization:.1%} MFU"
    seconds, update = _seconds(trial.seconds), _seconds(trial.update)
    return f"{product}; {rows} of the first step in {seconds}{share}; an update {update}"


def _time(plan: loop.TrainingPlan) -> str:
    if plan.seconds is None or plan.step_seconds is None or plan.eval_seconds is None:
        return "unknown, because nothing was measured"
    step = f"{_seconds(plan.step_seconds)} a step, {plan.tokens_per_step / plan.step_seconds:,.0f} tokens/s"
    evaluations = f"evaluations {plan.eval_seconds / plan.seconds:.0%} of it"
    return f"{plan.seconds / 3600:.2f} hours ({step}), {evaluations}; saves and samples not counted"


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _flops(count: float) -> str:
    """``3.91e9`` -> ``3.91 GFLOP``."""
    for power, name in ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M")):
        if count >= 10**power:
            return f"{count / 10**power:,.2f} {name}FLOP"
    return f"{count:,.0f} FLOP"
