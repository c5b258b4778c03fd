"""``kvad train``: build a RunConfig from flags and a run file, then train (``kvad.train.loop.run``).

``--dry-run`` prints the memory, FLOPs and time of the run (``kvad.train.loop.dry_run``) as text or JSON.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvad.cli.options import console, emit_json, format_bytes, json_option, parse_optional_number, with_seq_len
from kvad.errors import UsageError, format_count, suggest

if TYPE_CHECKING:
    from kvad.train.config import RunConfig
    from kvad.train.loop import DataParallelGroup, TrainingPlan
    from kvad.train.monitoring import Callback, TrainingResult
    from kvad.train.setup import CorpusArgument

TOKENIZER_KINDS = ("bpe", "byte", "char", "word")

# option -> key of the run file
FLAG_KEYS = {
    "preset": "model.preset",
    "seq_len": "data.seq_len",
    "suffixes": "data.file_suffixes",
    "encoding_errors": "data.encoding_errors",
    "validation": "data.validation_fraction",
    "vocab_size": "tokenizer.vocab_size",
    "batch_size": "train.batch_size",
    "gradient_accumulation_steps": "train.gradient_accumulation_steps",
    "steps": "train.steps",
    "minutes": "train.minutes",
    "lr": "optim.lr",
    "min_lr": "optim.min_lr",
    "warmup_steps": "optim.warmup_steps",
    "seed": "train.seed",
    "precision": "train.precision",
    "device": "train.device",
    "eval_interval": "train.eval_interval",
    "save_interval": "train.save_interval",
    "objective": "objective.kind",
    "lora_rank": "lora.rank",
    "tensorboard": "train.tensorboard",
    "check_cache": "callbacks.check_cache",
    "prompts": "callbacks.prompts",
    "bleu_samples": "callbacks.bleu_samples",
}


TWO_PATHS = (click.Path(path_type=Path), click.Path(path_type=Path))


@click.command()
@click.argument("corpus", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--pairs",
    multiple=True,
    type=TWO_PATHS,
    metavar="SOURCE TARGET",
    help="Two parallel files: line n of TARGET answers line n of SOURCE. Repeatable.",
)
@click.option("-o", "--out", metavar="FOLDER", type=click.Path(path_type=Path), help="Folder of the run.")
@click.option(
    "--config", "run_file", metavar="FILE", type=click.Path(path_type=Path), help="Run file (TOML); flags override it."
)
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set any key of the run: optim.lr=1e-3; keys of [model] need no table: decoder.num_layers=4. Repeatable.",
)
@click.option(
    "--objective",
    type=click.Choice(
        ["next-token", "seq2seq", "masked-lm", "span-corruption", "tag", "classify", "chat", "summarizer"]
    ),
    help="Training objective [default: next-token; for pairs seq2seq, for an encoder masked-lm].",
)
@click.option(
    "--init",
    metavar="MODEL",
    help="Checkpoint to start from; with --objective summarizer the model whose cache is summarized.",
)
@click.option("--lora-rank", type=int, metavar="RANK", help="Train LoRA adapters of this rank instead of all weights.")
@click.option(
    "--preset",
    help="Model preset: tiny, small, demo, medium, base, shakespeare-char, gpt2-124m, llama-small; transformer-tiny, "
    "-base, -big; marian-tiny, -base; t5-tiny, -small; encoder-tiny, bert-base [default: small].",
)
@click.option("--tokenizer", metavar="KIND|PATH", help="bpe, byte, char, word, or a tokenizer to load [default: bpe].")
@click.option("--vocab-size", type=int, help="Maximum size of the vocabulary [default: 4096].")
@click.option("--seq-len", type=int, help="Tokens of a training row [default: 256; with --init at most its limit].")
@click.option(
    "--suffix",
    "suffixes",
    multiple=True,
    metavar=".EXT",
    help="Suffix of the files to read in a folder. Repeatable [default: all text].",
)
@click.option(
    "--encoding-errors",
    type=click.Choice(["strict", "replace"]),
    help="Handling of bytes that are not UTF-8 [default: strict].",
)
@click.option(
    "--validation",
    metavar="FRACTION|FILE",
    help="Fraction of the corpus to hold out, or a file of pairs or examples [default: 0.1].",
)
@click.option(
    "--validation-pairs",
    multiple=True,
    type=TWO_PATHS,
    metavar="SOURCE TARGET",
    help="Two parallel files of held-out pairs. Repeatable.",
)
@click.option("--batch-size", type=int, help="Rows of a micro-batch [default: 16].")
@click.option("--gradient-accumulation-steps", type=int, help="Micro-batches per optimizer step [default: 1].")
@click.option("--steps", type=int, help="Optimizer steps [default: 1000, unless --minutes is given].")
@click.option(
    "--minutes", type=float, help="Minutes of training; the learning rate follows the clock [default: no limit]."
)
@click.option("--lr", type=float, help="Highest learning rate [default: 1e-3].")
@click.option("--min-lr", type=float, help="Final learning rate [default: 1e-4].")
@click.option("--warmup-steps", type=int, help="Warmup steps [default: a tenth of the steps, at most 100].")
@click.option("-s", "--seed", type=int, help="Seed of weights, split and order [default: 0].")
@click.option(
    "--precision",
    type=click.Choice(["auto", "fp32", "bf16", "fp16"]),
    help="Precision of the computation [default: auto].",
)
@click.option("--device", help="Torch device [default: cpu].")
@click.option("--eval-interval", type=int, help="Steps between evaluations [default: 250].")
@click.option("--save-interval", type=int, help="Steps between checkpoints [default: 500].")
@click.option("--check-cache", is_flag=True, default=None, help="At evaluations, compare cached with uncached output.")
@click.option(
    "--prompt",
    "prompts",
    multiple=True,
    metavar="TEXT",
    help="At evaluations, print a continuation of TEXT. Repeatable.",
)
@click.option(
    "--bleu-samples",
    type=click.IntRange(min=1),
    metavar="N",
    help="At evaluations, compute BLEU on N held-out pairs [default: off].",
)
@click.option("--tensorboard", is_flag=True, default=None, help="Also write TensorBoard files to OUT/tensorboard.")
@click.option("--resume", is_flag=True, help="Resume from the last checkpoint of --out, bit for bit.")
@click.option("--overwrite", is_flag=True, help="Replace the run in --out.")
@click.option("--dry-run", is_flag=True, help="Only estimate memory, FLOPs, time and disk space of the run.")
@json_option
def train_command(
    corpus: tuple[Path, ...],
    pairs: tuple[tuple[Path, Path], ...],
    validation: str | None,
    validation_pairs: tuple[tuple[Path, Path], ...],
    out: Path | None,
    run_file: Path | None,
    assignments: tuple[str, ...],
    tokenizer: str | None,
    resume: bool,
    overwrite: bool,
    dry_run: bool,
    as_json: bool,
    **flags: Any,
) -> None:
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
    from kvad.train.config import RunConfig, read_toml
    from kvad.train.monitoring import make_progress

    if resume and overwrite:
        raise UsageError("--resume and --overwrite exclude each other")
    if dry_run and os.environ.get("WORLD_SIZE", "1") != "1":
        raise UsageError("--dry-run plans a single process", "run it without torchrun")
    if dry_run and resume:
        raise UsageError("--dry-run and --resume exclude each other", "omit one of them")
    if out is None and not dry_run:
        raise click.UsageError("Missing option '--out'.")
    if corpus and corpus[0].suffix == ".toml":
        if run_file is not None:
            raise UsageError(f"{corpus[0]} and --config {run_file}: only one run file is allowed")
        run_file, corpus = corpus[0], corpus[1:]
    stored = _stored_run(out) if resume and out is not None else None
    table = {} if stored is None else stored.to_dict()
    if run_file is not None:
        table = read_toml(run_file)
    flags["validation"] = fraction = parse_optional_number(validation)
    table = _with_flags(table, flags, tokenizer, assignments)
    config = RunConfig.from_dict(table)
    data_parallel = None if dry_run else _data_parallel(config)
    config = with_seq_len(config, table, stored)
    held_out = [(Path(validation),)] if validation is not None and fraction is None else []
    named = _named(corpus, pairs, [*held_out, *validation_pairs])
    if data_parallel is None:
        show_plan(config, named, out, overwrite=overwrite, as_json=as_json)
        return
    assert out is not None
    progress = make_progress(console())
    try:
        outcome = _run_training(
            config, named, out, [progress, *_callbacks(config)], data_parallel, resume=resume, overwrite=overwrite
        )
    finally:
        progress.close()
    if data_parallel.is_main:
        _print_result(outcome, config, out, draw_loss_curve(out), as_json)
    if outcome.reason == "interrupted":
        click.get_current_context().exit(130)


def _is_summarizer_run(out: Path) -> bool:
    from kvad import checkpoint

    return any((path / checkpoint.folder.SUMMARIZER_FILE).is_file() for path in checkpoint.folder.list_steps(out)[-1:])


def _stored_run(out: Path) -> RunConfig:
    from kvad.train.loop import read_model_run, read_summarizer_run

    return read_summarizer_run(out)[0] if _is_summarizer_run(out) else read_model_run(out)[0]


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
    *,
    resume: bool,
    overwrite: bool,
) -> TrainingResult:
    from kvad.cache.sizing import available_bytes
    from kvad.train.config import SummarizerConfig
    from kvad.train.loop import resume_model, resume_summarizer, train_model, train_summarizer

    if config.objective.kind == "summarizer":
        if resume:
            return resume_summarizer(out, config=config, corpus=named, callbacks=callbacks)
        return train_summarizer(config, named, out, overwrite=overwrite, callbacks=callbacks)
    if config.summarizer != SummarizerConfig():
        raise UsageError("[summarizer] is for --objective summarizer", "--init MODEL without it continues a checkpoint")
    available = available_bytes()
    if resume:
        return resume_model(
            out,
            config=config,
            corpus=named,
            available=available,
            callbacks=callbacks,
            measure_peak=True,
            data_parallel=data_parallel,
        )
    return train_model(
        config,
        named,
        out,
        overwrite=overwrite,
        available=available,
        callbacks=callbacks,
        measure_peak=True,
        data_parallel=data_parallel,
    )


def _named(
    corpus: Sequence[Path], pairs: Sequence[tuple[Path, Path]], held_out: Sequence[tuple[Path, ...]]
) -> CorpusArgument:
    """Return the paths of documents or TSV files, or all pairs if any are given."""
    from kvad.train.sources import PairPaths

    if not pairs and not held_out:
        return corpus
    return PairPaths((*((path,) for path in corpus), *pairs), tuple(held_out))


def _with_flags(
    table: Mapping[str, Any], flags: Mapping[str, Any], tokenizer: str | None, assignments: Iterable[str]
) -> dict[str, Any]:
    """Merge the given flags and --set into the tables of a run file."""
    from kvad.train.config import apply_overrides

    merged = {name: dict(value) if isinstance(value, Mapping) else value for name, value in table.items()}

    def put(path: str, value: object) -> None:
        name, _, key = path.partition(".")
        inner = merged.setdefault(name, {})
        if isinstance(inner, dict):  # RunConfig refuses a value that is not a table
            inner[key] = value

    init, flags = flags.get("init"), {name: value for name, value in flags.items() if name != "init"}
    for flag, value in flags.items():
        if value is not None and value != ():
            put(FLAG_KEYS[flag], list(value) if isinstance(value, tuple) else value)
    if init is not None:
        put("summarizer.model" if _kind(merged) == "summarizer" else "model.init", init)
    if tokenizer is not None:
        _check_tokenizer(tokenizer)
        put(*(("tokenizer.kind", tokenizer) if tokenizer in TOKENIZER_KINDS else ("tokenizer.path", tokenizer)))
    return apply_overrides(merged, _pairs(assignments, is_summarizer=_kind(merged) == "summarizer"))


def _kind(tables: Mapping[str, Any]) -> object:
    objective = tables.get("objective", {})
    return objective.get("kind") if isinstance(objective, dict) else None


def _check_tokenizer(tokenizer: str) -> None:
    if tokenizer not in TOKENIZER_KINDS and not Path(tokenizer).exists():
        raise UsageError(f"--tokenizer {tokenizer!r} is neither a kind nor a file", suggest(tokenizer, TOKENIZER_KINDS))


def _pairs(assignments: Iterable[str], *, is_summarizer: bool) -> Iterator[tuple[str, str]]:
    """Parse --set KEY=VALUE; for a summarizer run, a key without a table belongs to [summarizer]."""
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or not key:
            raise UsageError(f"--set {assignment!r} is not KEY=VALUE", "write it like --set optim.lr=1e-3")
        yield f"summarizer.{key}" if is_summarizer and "." not in key else key, value


def draw_loss_curve(out: Path) -> list[Path]:
    """Draw the curves of the run; none if matplotlib is not installed or nothing was logged."""
    from kvad import evaluation

    try:
        return evaluation.compare_runs.plot_run(out)
    except ModuleNotFoundError:
        click.echo("kvad: no curves: matplotlib is not installed (pip install 'kvad[plot]')", err=True)
        return []


def _next_command(outcome: TrainingResult, config: RunConfig) -> str:
    """Return the command that runs the trained model."""
    from kvad.checkpoint import open_checkpoint

    kind = config.resolve(vocab=1).kind if config.init is None else open_checkpoint(outcome.checkpoint).config.kind
    by_objective = {"masked-lm": "fill", "tag": "tag", "classify": "classify", "chat": "chat"}
    default = {"encoder-decoder": "translate", "encoder": "fill-mask"}.get(kind, "generate")
    return by_objective.get(config.objective.kind, default)


def _print_result(outcome: TrainingResult, config: RunConfig, out: Path, figures: list[Path], as_json: bool) -> None:
    if as_json:
        emit_json({**dataclasses.asdict(outcome), "out": out, "figures": figures, "config": config.to_dict()})
    losses = [
        f"{name} {value:.4f}"
        for name, value in (("loss", outcome.loss), ("validation", outcome.val_loss))
        if value is not None
    ]
    click.echo(
        f"{format_count(outcome.step, 'step')}, {format_count(outcome.tokens, 'token')} in {outcome.elapsed:.0f} s: "
        f"{', '.join(losses)}",
        err=True,
    )
    if config.train.keep_best and outcome.best is not None and outcome.best_step not in (None, outcome.step):
        click.echo(f"best:  {out / 'best'}, validation {outcome.best:.4f} at step {outcome.best_step:,}", err=True)
    if outcome.reason == "interrupted":
        click.echo(f"stopped and saved. Resume with:  kvad train --resume --out {out}", err=True)
    elif config.objective.kind == "summarizer":
        summarizer = config.summarizer
        recent, ratio, interval = summarizer.recent, summarizer.ratio, summarizer.interval
        policy = f"tiered({recent}, quantized=0, summaries=N, ratio={ratio}, interval={interval})"
        click.echo(f'next:  kvad generate {summarizer.model} --summarizer {out} --policy "{policy}"', err=True)
    else:
        click.echo(f"next:  kvad {_next_command(outcome, config)} {out}", err=True)


def show_plan(config: RunConfig, named: CorpusArgument, out: Path | None, *, overwrite: bool, as_json: bool) -> None:
    """Print the plan; exit code 1 if the run would not fit into memory."""
    from kvad.cache.sizing import available_bytes
    from kvad.train import setup
    from kvad.train.loop import plan_training

    if out is not None:
        setup.preflight.check_run_folder(config, named, out, overwrite)
    plan = plan_training(config, named, available_bytes(), lambda text: click.echo(text, err=True))
    if as_json:
        more = {"tokens": plan.tokens, "flops": plan.flops, "bytes": plan.bytes}
        emit_json({**dataclasses.asdict(plan), **more, "config": config.to_dict()})
    else:
        click.echo("\n".join(training_plan_text(plan)))
    if plan.fits is not None and plan.fits < plan.batch:
        click.get_current_context().exit(1)


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
