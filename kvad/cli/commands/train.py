"""``kvad train``: build a RunConfig from flags and a run file, then train (``kvad.train.loop.run``).

``--dry-run`` prints the memory, FLOPs and time of the run (``kvad.train.loop.dry_run``) as text or JSON.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from kvad.cli.fields import argument, command, option
from kvad.cli.output import console, draw_figures, emit_json, exit_with, format_bytes, print_error, print_result
from kvad.cli.parameters import COUNT, JsonOption
from kvad.cli.run_parameters import CorpusOptions, merge_options, set_key, with_seq_len
from kvad.errors import UsageError, format_count
from kvad.train.config import OptimConfig, RunConfig, TrainConfig

if TYPE_CHECKING:
    from kvad.train.loop import DataParallelGroup, TrainingPlan
    from kvad.train.monitoring import Callback, TrainingResult
    from kvad.train.setup import CorpusArgument


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
    from kvad.train.config import read_toml
    from kvad.train.loop import read_run_config

    out, run_file, corpus = options.out, options.config, options.corpus
    _check_options(options)
    if corpus and corpus[0].suffix == ".toml":
        if run_file is not None:
            raise UsageError(f"{corpus[0]} and --config {run_file}: only one run file is allowed")
        run_file, corpus = corpus[0], corpus[1:]
    stored = read_run_config(out)[0] if options.resume and out is not None else None
    tables = read_toml(run_file) if run_file is not None else {} if stored is None else stored.to_dict()
    tables = _with_options(tables, options)
    config = RunConfig.from_dict(tables)
    data_parallel = None if options.dry_run else _data_parallel(config)
    config, named = with_seq_len(config, tables, stored), options.name_corpus(corpus)
    if data_parallel is None:
        show_plan(config, named, out, overwrite=options.overwrite, as_json=options.as_json)
    else:
        assert out is not None
        _train(config, named, out, data_parallel, options)


def _check_options(options: _TrainOptions) -> None:
    if options.resume and options.overwrite:
        raise UsageError("--resume and --overwrite exclude each other")
    if options.dry_run and os.environ.get("WORLD_SIZE", "1") != "1":
        raise UsageError("--dry-run plans a single process", "run it without torchrun")
    if options.dry_run and options.resume:
        raise UsageError("--dry-run and --resume exclude each other", "omit one of them")
    if options.out is None and not options.dry_run:
        raise click.UsageError("Missing option '--out'.")


def _train(
    config: RunConfig, named: CorpusArgument, out: Path, data_parallel: DataParallelGroup, options: _TrainOptions
) -> None:
    from kvad.train.monitoring import make_progress

    progress = make_progress(console())
    try:
        callbacks = [progress, *_callbacks(config)]
        outcome = _run_training(config, named, out, callbacks, data_parallel, options)
    finally:
        progress.close()
    if data_parallel.is_main:
        _print_result(outcome, config, out, draw_loss_curve(out), options.as_json)
    if outcome.reason == "interrupted":
        exit_with(130)


def _callbacks(config: RunConfig) -> list[Callback]:
    if not config.callbacks.requested:
        return []
    from kvad.evaluation import build_callbacks  # imports the engine, which plain runs do not need

    return build_callbacks(config.callbacks)


def _data_parallel(config: RunConfig) -> DataParallelGroup:
    """Initialize the processes that torchrun started; a summarizer is trained by one process."""
    from kvad.train.loop import init_data_parallel

    if config.objective.kind == "summarizer" and os.environ.get("WORLD_SIZE", "1") != "1":
        raise UsageError("a summarizer is trained by one process", "run it without torchrun")
    return init_data_parallel(os.environ, config.train)


def _run_training(
    config: RunConfig,
    named: CorpusArgument,
    out: Path,
    callbacks: Sequence[Callback],
    data_parallel: DataParallelGroup,
    options: _TrainOptions,
) -> TrainingResult:
    from kvad.cache.sizing import available_bytes
    from kvad.train.config import SummarizerConfig
    from kvad.train.loop import RunOptions, resume_model, train_model

    if config.objective.kind != "summarizer" and config.summarizer != SummarizerConfig():
        raise UsageError("[summarizer] is for --objective summarizer", "--init MODEL without it continues a checkpoint")
    run_options = RunOptions(
        available=available_bytes(), callbacks=callbacks, measure_peak=True, data_parallel=data_parallel
    )
    if options.resume:
        return resume_model(out, config=config, corpus=named, **run_options)
    return train_model(config, named, out, overwrite=options.overwrite, **run_options)


def _with_options(tables: Mapping[str, Any], options: _TrainOptions) -> dict[str, Any]:
    """Merge the given options and --set into the tables of a run file."""
    from kvad.train.config import apply_overrides

    merged = merge_options(tables, options)
    is_summarizer = _kind(merged) == "summarizer"
    if options.init is not None:
        set_key(merged, "summarizer.model" if is_summarizer else "model.init", options.init)
    return apply_overrides(merged, _assignments(options.set, is_summarizer=is_summarizer))


def _kind(tables: Mapping[str, Any]) -> object:
    objective = tables.get("objective", {})
    return objective.get("kind") if isinstance(objective, dict) else None


def _assignments(assignments: Iterable[str], *, is_summarizer: bool) -> Iterator[tuple[str, str]]:
    """Parse --set KEY=VALUE; for a summarizer run, a key without a table belongs to [summarizer]."""
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or not key:
            raise UsageError(f"--set {assignment!r} is not KEY=VALUE", "write it like --set optim.lr=1e-3")
        yield f"summarizer.{key}" if is_summarizer and "." not in key else key, value


def draw_loss_curve(out: Path) -> list[Path]:
    """Draw the curves of the run; none if matplotlib is not installed or nothing was logged."""
    from kvad import evaluation

    return draw_figures(lambda: evaluation.compare_runs.plot_run(out), "curves")


def _next_command(outcome: TrainingResult, config: RunConfig) -> str:
    """Return the command that runs the trained model."""
    from kvad.checkpoint import open_checkpoint

    kind = config.resolve(vocab=1).kind if config.init is None else open_checkpoint(outcome.checkpoint).config.kind
    by_objective = {"masked-lm": "fill-mask", "tag": "tag", "classify": "classify", "chat": "chat"}
    default = {"encoder-decoder": "translate", "encoder": "fill-mask"}.get(kind, "generate")
    return by_objective.get(config.objective.kind, default)


def _print_result(outcome: TrainingResult, config: RunConfig, out: Path, figures: list[Path], as_json: bool) -> None:
    if as_json:
        emit_json({**dataclasses.asdict(outcome), "out": out, "figures": figures, "config": config.to_dict()})
    results = {"loss": outcome.loss, "validation": outcome.val_loss}
    losses = ", ".join(f"{name} {value:.4f}" for name, value in results.items() if value is not None)
    steps, tokens = format_count(outcome.step, "step"), format_count(outcome.tokens, "token")
    print_error(f"{steps}, {tokens} in {outcome.elapsed:.0f} s: {losses}")
    if config.train.keep_best and outcome.best is not None and outcome.best_step not in (None, outcome.step):
        print_error(f"best:  {out / 'best'}, validation {outcome.best:.4f} at step {outcome.best_step:,}")
    if outcome.reason == "interrupted":
        print_error(f"stopped and saved. Resume with:  kvad train --resume --out {out}")
    elif config.objective.kind == "summarizer":
        summarizer = config.summarizer
        recent, ratio, interval = summarizer.recent, summarizer.ratio, summarizer.interval
        policy = f"tiered({recent}, quantized=0, summaries=N, ratio={ratio}, interval={interval})"
        print_error(f'next:  kvad generate {summarizer.model} --summarizer {out} --policy "{policy}"')
    else:
        print_error(f"next:  kvad {_next_command(outcome, config)} {out}")


def show_plan(config: RunConfig, named: CorpusArgument, out: Path | None, *, overwrite: bool, as_json: bool) -> None:
    """Print the plan; exit code 1 if the run would not fit into memory."""
    from kvad.cache.sizing import available_bytes
    from kvad.train import setup
    from kvad.train.loop import plan_training

    if out is not None:
        setup.preflight.check_run_folder(config, named, out, overwrite)
    plan = plan_training(config, named, available_bytes(), print_error)
    totals = {"tokens": plan.tokens, "flops": plan.flops, "bytes": plan.bytes}
    record = {**dataclasses.asdict(plan), **totals, "config": config.to_dict()}
    print_result(as_json, record, training_plan_text(plan))
    if plan.fits is not None and plan.fits < plan.batch:
        exit_with(1)


def training_plan_text(plan: TrainingPlan) -> list[str]:
    """Format the plan, one line per topic."""
    lines = {
        "model": _model(plan),
        "memory": _memory(plan),
        "corpus": _corpus(plan),
        "step": _step(plan),
        "run": _run_settings(plan),
        "measured": _measured(plan),
        "time": _time(plan),
        "disk": f"{format_bytes(plan.checkpoint)} a checkpoint (and the tokenizer); "
        f"up to {plan.num_checkpoints + 1} of them, "
        f"{format_bytes((plan.num_checkpoints + 1) * plan.checkpoint)}, while one is written",
    }
    return [f"{name:<10}{text}" for name, text in lines.items()]


def _model(plan: TrainingPlan) -> str:
    share = "all trained" if plan.trained == plan.parameters else f"{plan.trained:,} of them trained"
    return f"{plan.kind}, objective {plan.objective}: {format_count(plan.parameters, 'parameter')}, {share}"


def _memory(plan: TrainingPlan) -> str:
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


def _corpus(plan: TrainingPlan) -> str:
    held_out = f"{plan.validation_tokens:,} for validation"
    if plan.train_tokens is None:
        return f"number of training tokens unknown: a stream is not counted; {held_out}"
    return f"{format_count(plan.train_tokens, 'token')} to train on, {held_out}"


def _step(plan: TrainingPlan) -> str:
    rows = format_count(plan.batch, "row")
    if plan.accumulate > 1:
        rows = f"{plan.accumulate} x {rows}"
    flops = "FLOPs not counted" if plan.step_flops is None else f"{_flops(plan.step_flops)} forward and backward"
    return f"{rows} of {format_count(plan.context, 'token')}, {plan.tokens_per_step:,} of them targets; {flops}"


def _run_settings(plan: TrainingPlan) -> str:
    if plan.steps is None:
        return f"{plan.minutes:g} minutes; number of steps unknown, because nothing was measured"
    clock = "" if plan.minutes is None else f" (in {plan.minutes:g} minutes)"
    epochs = "epochs unknown" if plan.epochs is None else f"{plan.epochs:,.2f} epochs"
    flops = "" if plan.flops is None else f", {_flops(plan.flops)}"
    return f"{format_count(plan.steps, 'step')}{clock}, {format_count(plan.tokens or 0, 'token')}, {epochs}{flops}"


def _measured(plan: TrainingPlan) -> str:
    where = f"{plan.precision} on {plan.device}, {format_count(plan.threads, 'thread')}"
    product = f"a matrix product {_flops(plan.gemm_flops)}/s ({where})"
    trial = plan.trial
    if trial is None:
        return f"{product}; no step measured, because it would not fit"
    rows = "a micro-batch" if trial.rows == plan.batch else f"{format_count(trial.rows, 'row')} of the {plan.batch}"
    share = "" if trial.utilization is None else f", {trial.utilization:.1%} MFU"
    return (
        f"{product}; {rows} of the first step in {_seconds(trial.seconds)}{share}; an update {_seconds(trial.update)}"
    )


def _time(plan: TrainingPlan) -> str:
    if plan.seconds is None or plan.step_seconds is None or plan.eval_seconds is None:
        return "unknown, because nothing was measured"
    speed = f"{plan.tokens_per_step / plan.step_seconds:,.0f} tokens/s"
    share = plan.eval_seconds / plan.seconds
    return (
        f"{plan.seconds / 3600:.2f} hours ({_seconds(plan.step_seconds)} a step, {speed}), evaluations {share:.0%} of "
        "it; saves and samples not counted"
    )


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _flops(count: float) -> str:
    """``3.91e9`` -> ``3.91 GFLOP``."""
    for power, name in ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M")):
        if count >= 10**power:
            return f"{count / 10**power:,.2f} {name}FLOP"
    return f"{count:,.0f} FLOP"
