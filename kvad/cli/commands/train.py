"""``kvad train``: flags and a run file become a RunConfig; training itself is ``kvad.train.loop.run``.

``kvad train --dry-run``: what a run would take, as a page or as JSON.  The plan itself is ``kvad.train.loop.dry_run``.
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

# flag -> where its value goes in a run file
FLAG_KEYS = {
    "preset": "model.preset",
    "context": "data.seq_len",
    "suffixes": "data.file_suffixes",
    "errors": "data.encoding_errors",
    "validation": "data.validation_fraction",
    "vocab_size": "tokenizer.vocab_size",
    "batch": "train.batch_size",
    "accumulate": "train.gradient_accumulation_steps",
    "steps": "train.steps",
    "minutes": "train.minutes",
    "lr": "optim.lr",
    "min_lr": "optim.min_lr",
    "warmup": "optim.warmup_steps",
    "seed": "train.seed",
    "precision": "train.precision",
    "device": "train.device",
    "eval_every": "train.eval_interval",
    "save_every": "train.save_interval",
    "objective": "objective.kind",
    "lora_rank": "lora.rank",
    "tensorboard": "train.tensorboard",
    "check_cache": "callbacks.check_cache",
    "prompts": "callbacks.prompts",
    "bleu": "callbacks.bleu_samples",
}


TWO_PATHS = (click.Path(path_type=Path), click.Path(path_type=Path))


@click.command()
@click.argument("corpus", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--pairs", multiple=True, type=TWO_PATHS, metavar="SOURCE TARGET", help="Two files; line n of one answers line n."
)
@click.option("--out", metavar="FOLDER", type=click.Path(path_type=Path), help="The run's folder.")
@click.option(
    "--config",
    "run_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="A run file (TOML); flags go before it.",
)
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set any key of the run: optim.lr=1e-3; the model's need no table: decoder.num_layers=4.",
)
@click.option(
    "--objective",
    type=click.Choice(["next-token", "seq2seq", "masked", "spans", "tag", "classify", "chat", "compress"]),
    help="[default: next-token; of pairs seq2seq, of an encoder masked]",
)
@click.option("--init", metavar="MODEL", help="A checkpoint to go on from; of compress: whose cache is compressed.")
@click.option("--lora", "lora_rank", type=int, metavar="RANK", help="Train adapters beside it instead of its weights.")
@click.option(
    "--preset",
    help="Model shape: tiny, small, demo, medium, base, shakespeare-char, gpt2-124m, llama-small; transformer-tiny, "
    "-base, -big; marian-tiny, -base; t5-tiny, -small; encoder-tiny, bert-base.  [default: small]",
)
@click.option("--tokenizer", metavar="KIND|PATH", help="bpe, byte, char, word, or a tokenizer to load.  [default: bpe]")
@click.option("--vocab-size", type=int, help="Ceiling of the vocabulary.  [default: 4096]")
@click.option("--context", type=int, help="Tokens of a training row.  [default: 256; with --init at most its limit]")
@click.option(
    "--suffix", "suffixes", multiple=True, metavar=".EXT", help="Which files of a folder.  [default: all text]"
)
@click.option("--errors", type=click.Choice(["strict", "replace"]), help="Bytes that are not UTF-8.  [default: strict]")
@click.option(
    "--validation",
    metavar="SHARE|FILE",
    help="Share of the corpus that is held out, or a file of pairs or examples.  [default: 0.1]",
)
@click.option(
    "--validation-pairs", multiple=True, type=TWO_PATHS, metavar="SOURCE TARGET", help="Two files of pairs held out."
)
@click.option("--batch", type=int, help="Rows of a micro-batch.  [default: 16]")
@click.option("--accumulate", type=int, help="Micro-batches of an optimizer step.  [default: 1]")
@click.option("--steps", type=int, help="Optimizer steps.  [default: 1000, if no --minutes]")
@click.option("--minutes", type=float, help="Minutes of training; the learning rate follows the clock.")
@click.option("--lr", type=float, help="Highest learning rate.  [default: 1e-3]")
@click.option("--min-lr", type=float, help="Last learning rate.  [default: 1e-4]")
@click.option("--warmup", type=int, help="Steps of warmup.  [default: a tenth, at most 100]")
@click.option("--seed", type=int, help="Of weights, split and order.  [default: 0]")
@click.option("--precision", type=click.Choice(["auto", "fp32", "bf16", "fp16"]), help="[default: auto]")
@click.option("--device", help="[default: cpu]")
@click.option("--eval-every", type=int, help="Steps between evaluations.  [default: 250]")
@click.option("--save-every", type=int, help="Steps between checkpoints.  [default: 500]")
@click.option(
    "--check-cache",
    is_flag=True,
    default=None,
    help="At evaluations: does a cache say what the model says without one?",
)
@click.option(
    "--prompt", "prompts", multiple=True, metavar="TEXT", help="At evaluations: how it goes on; may be repeated."
)
@click.option("--bleu", type=click.IntRange(min=1), metavar="N", help="At evaluations: BLEU on N held-out pairs.")
@click.option("--tensorboard", is_flag=True, default=None, help="Write TensorBoard's files into OUT/tensorboard, too.")
@click.option("--resume", is_flag=True, help="Go on from the last checkpoint of --out, to the bit.")
@click.option("--overwrite", is_flag=True, help="Let a run that --out holds give way.")
@click.option("--dry-run", is_flag=True, help="Train nothing: what would it take? Memory, FLOPs, hours here, disk.")
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

    A run file (TOML) may stand before the corpus.  Every file is a document.  An encoder-decoder (--preset
    transformer-tiny) learns from pairs instead: CORPUS are TSV files of `SOURCE<tab>TARGET` lines, or --pairs names two
    parallel files.  --objective says what else may be learned; CORPUS may be a folder of kvad data prepare, too.
    Ctrl-C saves and says how to go on; so does SIGTERM.  The run's folder holds its checkpoints, metrics.jsonl, and its
    curves as PNG and SVG (where matplotlib is installed).

    \b
    kvad train book.txt --out runs/book --tokenizer char --preset tiny --steps 2000
    kvad train runs/shakespeare-char-cpu.toml input.txt --dry-run
    kvad train runs/shakespeare-char-cpu.toml input.txt --out runs/shakespeare
    kvad train src/ docs/ --suffix .py --suffix .md --out runs/code --minutes 30
    kvad train runs/mine.toml corpus/ --out runs/mine --set optim.lr=3e-4 --set decoder.num_layers=4
    kvad train pairs.tsv --preset transformer-base --vocab-size 37000 --out runs/translate
    kvad train --pairs train.de train.en --validation-pairs val.de val.en --preset transformer-tiny --out runs/de-en
    kvad train train.tsv --validation dev.tsv --objective tag --preset encoder-tiny --out runs/tags
    kvad train talks.jsonl --objective chat --init runs/mine --out runs/chat
    kvad train --resume --out runs/mine
    kvad train more/ --init runs/mine --lr 1e-4 --out runs/tuned
    kvad train more/ --init ./SmolLM2-135M --lora 8 --set lora.target_modules=all --out runs/adapter
    kvad train corpus/ --objective compress --init runs/mine --set ratio=8 --out runs/summaries
    """
    from kvad.train.config import RunConfig, read_toml
    from kvad.train.monitoring import make_progress

    if resume and overwrite:
        raise UsageError("--resume and --overwrite contradict each other")
    if dry_run and os.environ.get("WORLD_SIZE", "1") != "1":
        raise UsageError("--dry-run plans one process of a run", "leave torchrun out")
    if dry_run and resume:
        raise UsageError("--dry-run plans a new run, and --resume goes on with one", "leave one of them out")
    if out is None and not dry_run:
        raise click.UsageError("Missing option '--out'.")
    if corpus and corpus[0].suffix == ".toml":
        if run_file is not None:
            raise UsageError(f"{corpus[0]} and --config {run_file}: one run file is enough")
        run_file, corpus = corpus[0], corpus[1:]
    stored = _stored_run(out) if resume and out is not None else None
    table = {} if stored is None else stored.to_dict()
    if run_file is not None:
        table = read_toml(run_file)
    flags["validation"] = share = parse_optional_number(validation)
    table = _with_flags(table, flags, tokenizer, assignments)
    config = RunConfig.from_dict(table)
    peers = None if dry_run else _data_parallel(config)
    config = with_seq_len(config, table, stored)
    held = [(Path(validation),)] if validation is not None and share is None else []
    named = _named(corpus, pairs, [*held, *validation_pairs])
    if peers is None:
        pass

        show_plan(config, named, out, overwrite=overwrite, as_json=as_json)
        return
    assert out is not None
    progress = make_progress(console())
    try:
        outcome = _run_training(
            config, named, out, [progress, *_callbacks(config)], peers, resume=resume, overwrite=overwrite
        )
    finally:
        progress.close()
    if peers.is_main:
        _print_result(outcome, config, out, draw_loss_curve(out), as_json)
    if outcome.reason == "interrupted":
        click.get_current_context().exit(130)


def _is_compressor(out: Path) -> bool:
    from kvad import checkpoint

    return any((path / checkpoint.folder.NAME).is_file() for path in checkpoint.folder.list_steps(out)[-1:])


def _stored_run(out: Path) -> RunConfig:
    from kvad.train.loop import read_model_run, read_summarizer_run

    return read_summarizer_run(out)[0] if _is_compressor(out) else read_model_run(out)[0]


def _callbacks(config: RunConfig) -> list[Callback]:
    if not config.callbacks.requested:
        return []
    from kvad.evaluation import build_callbacks  # the engine, which a run alone does not need

    return build_callbacks(config.callbacks)


def _data_parallel(config: RunConfig) -> DataParallelGroup:
    """The processes that torchrun has started.  UsageError for what one process trains."""
    from kvad.train.loop import init_data_parallel

    if config.objective.kind == "compress" and os.environ.get("WORLD_SIZE", "1") != "1":
        raise UsageError("a compressor is trained by one process", "leave torchrun out")
    return init_data_parallel(os.environ, config.train)


def _run_training(
    config: RunConfig,
    named: CorpusArgument,
    out: Path,
    heard: Sequence[Callback],
    peers: DataParallelGroup,
    *,
    resume: bool,
    overwrite: bool,
) -> TrainingResult:
    from kvad.cache.sizing import available_bytes
    from kvad.train.config import SummarizerConfig
    from kvad.train.loop import resume_model, resume_summarizer, train_model, train_summarizer

    if config.objective.kind == "compress":
        if resume:
            return resume_summarizer(out, config=config, corpus=named, callbacks=heard)
        return train_summarizer(config, named, out, overwrite=overwrite, callbacks=heard)
    if config.summarizer != SummarizerConfig():
        raise UsageError("[compress] is for --objective compress", "--init MODEL alone goes on from a checkpoint")
    available = available_bytes()
    if resume:
        return resume_model(
            out, config=config, corpus=named, available=available, callbacks=heard, gauged=True, peers=peers
        )
    return train_model(
        config, named, out, overwrite=overwrite, available=available, callbacks=heard, gauged=True, peers=peers
    )


def _named(
    corpus: Sequence[Path], pairs: Sequence[tuple[Path, Path]], held: Sequence[tuple[Path, ...]]
) -> CorpusArgument:
    """Paths alone are what the model reads, documents or TSV files; with any of the other two they are TSV files."""
    from kvad.train.sources import PairPaths

    if not pairs and not held:
        return corpus
    return PairPaths((*((path,) for path in corpus), *pairs), tuple(held))


def _with_flags(
    table: Mapping[str, Any], flags: Mapping[str, Any], tokenizer: str | None, assignments: Iterable[str]
) -> dict[str, Any]:
    """A run file's tables with the flags that were given put in."""
    from kvad.train.config import apply_overrides

    merged = {name: dict(value) if isinstance(value, Mapping) else value for name, value in table.items()}

    def put(place: str, value: object) -> None:
        name, _, key = place.partition(".")
        inner = merged.setdefault(name, {})
        if isinstance(inner, dict):  # what is no table is refused by RunConfig, by name
            inner[key] = value

    init, flags = flags.get("init"), {name: value for name, value in flags.items() if name != "init"}
    for flag, value in flags.items():
        if value is not None and value != ():
            put(FLAG_KEYS[flag], list(value) if isinstance(value, tuple) else value)
    if init is not None:
        put("summarizer.model" if _kind(merged) == "compress" else "model.init", init)
    if tokenizer is not None:
        _check_tokenizer(tokenizer)
        put(*(("tokenizer.kind", tokenizer) if tokenizer in TOKENIZER_KINDS else ("tokenizer.path", tokenizer)))
    return apply_overrides(merged, _pairs(assignments, compress=_kind(merged) == "compress"))


def _kind(tables: Mapping[str, Any]) -> object:
    objective = tables.get("objective", {})
    return objective.get("kind") if isinstance(objective, dict) else None


def _check_tokenizer(tokenizer: str) -> None:
    if tokenizer not in TOKENIZER_KINDS and not Path(tokenizer).exists():
        raise UsageError(f"--tokenizer {tokenizer!r} is neither a kind nor a file", suggest(tokenizer, TOKENIZER_KINDS))


def _pairs(assignments: Iterable[str], *, compress: bool) -> Iterator[tuple[str, str]]:
    """``compress``: a key without a table is the compressor's; the model is another run's, and stays."""
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or not key:
            raise UsageError(f"--set {assignment!r} is not KEY=VALUE", "as in --set optim.lr=1e-3")
        yield f"compress.{key}" if compress and "." not in key else key, value


def draw_loss_curve(out: Path) -> list[Path]:
    """The run's curves; nothing where matplotlib is not installed, or nothing was logged yet."""
    from kvad import evaluation

    try:
        return evaluation.compare_runs.plot_run(out)
    except ModuleNotFoundError:
        click.echo("kvad: no curves: pip install 'kvad[plot]' draws it", err=True)
        return []


def _next_command(outcome: TrainingResult, config: RunConfig) -> str:
    """The command that asks the trained model."""
    from kvad.checkpoint import open_checkpoint

    kind = config.resolve(vocab=1).kind if config.init is None else open_checkpoint(outcome.checkpoint).config.kind
    said = {"masked": "fill", "tag": "tag", "classify": "classify", "chat": "chat"}
    usual = {"encoder-decoder": "translate", "encoder": "fill"}.get(kind, "generate")
    return said.get(config.objective.kind, usual)


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
        click.echo(f"stopped, and saved. Go on with:  kvad train --resume --out {out}", err=True)
    elif config.objective.kind == "compress":
        wanted = config.summarizer
        policy = f"hierarchy({wanted.recent}, packed=0, summaries=N, ratio={wanted.ratio}, every={wanted.interval})"
        click.echo(f'next:  kvad generate {wanted.model} --compressor {out} --policy "{policy}"', err=True)
    else:
        click.echo(f"next:  kvad {_next_command(outcome, config)} {out}", err=True)


def show_plan(config: RunConfig, named: CorpusArgument, out: Path | None, *, overwrite: bool, as_json: bool) -> None:
    """Print the plan; exit code 1 where the run would not fit into memory.  Raises as ``job.train``."""
    from kvad.cache.sizing import available_bytes
    from kvad.train import setup
    from kvad.train.loop import plan_training

    if out is not None:
        setup.preflight.check_run_folder(config, named, out, overwrite)
    found = plan_training(config, named, available_bytes(), lambda text: click.echo(text, err=True))
    if as_json:
        more = {"tokens": found.tokens, "flops": found.flops, "bytes": found.bytes}
        emit_json({**dataclasses.asdict(found), **more, "config": config.to_dict()})
    else:
        click.echo("\n".join(training_plan_text(found)))
    if found.fits is not None and found.fits < found.batch:
        click.get_current_context().exit(1)


def training_plan_text(plan: TrainingPlan) -> list[str]:
    """A line about each thing."""
    lines = {
        "model": _model(plan),
        "memory": _memory(plan),
        "corpus": _corpus(plan),
        "step": _step(plan),
        "run": _run_settings(plan),
        "measured": _measured(plan),
        "time": _time(plan),
        "disk": f"{format_bytes(plan.checkpoint)} a checkpoint (and the tokenizer); up to {plan.num_checkpoints + 1} of them, "
        f"{format_bytes((plan.num_checkpoints + 1) * plan.checkpoint)}, while one is written",
    }
    return [f"{name:<10}{text}" for name, text in lines.items()]


def _model(plan: TrainingPlan) -> str:
    share = "all trained" if plan.trained == plan.parameters else f"{plan.trained:,} of them trained"
    return f"{plan.kind}, objective {plan.objective}: {format_count(plan.parameters, 'parameter')}, {share}"


def _memory(plan: TrainingPlan) -> str:
    if plan.memory is None:
        return "not planned for a compressor"
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in plan.memory.items())
    there = "what is available is not known" if plan.available is None else f"{format_bytes(plan.available)} available"
    said = f"at least {format_bytes(plan.bytes or 0)} ({parts}); {there}"
    if plan.device != "cpu":
        said += f" beside {plan.device}, which answers for itself"
    if plan.fits is None or plan.fits >= plan.batch:
        return said
    if not plan.fits:
        return f"{said}: DOES NOT FIT, not even --batch 1"
    return f"{said}: DOES NOT FIT; --batch {plan.fits} would, with --accumulate for more rows to a step"


def _corpus(plan: TrainingPlan) -> str:
    held = f"{plan.validation_tokens:,} to judge by"
    if plan.train_tokens is None:
        return f"tokens to train on unknown: they are read in their order, and nobody has counted them; {held}"
    return f"{format_count(plan.train_tokens, 'token')} to train on, {held}"


def _step(plan: TrainingPlan) -> str:
    rows = format_count(plan.batch, "row")
    if plan.accumulate > 1:
        rows = f"{plan.accumulate} x {rows}"
    flops = "FLOPs not counted" if plan.step_flops is None else f"{_flops(plan.step_flops)} forwards and backwards"
    return f"{rows} of {format_count(plan.context, 'token')}, {plan.tokens_per_step:,} of which are learned; {flops}"


def _run_settings(plan: TrainingPlan) -> str:
    if plan.steps is None:
        return f"{plan.minutes:g} minutes; how many steps they are is not known, for nothing was measured"
    clock = "" if plan.minutes is None else f" (in {plan.minutes:g} minutes)"
    epochs = "epochs unknown" if plan.epochs is None else f"{plan.epochs:,.2f} epochs"
    flops = "" if plan.flops is None else f", {_flops(plan.flops)}"
    return f"{format_count(plan.steps, 'step')}{clock}, {format_count(plan.tokens or 0, 'token')}, {epochs}{flops}"


def _measured(plan: TrainingPlan) -> str:
    where = f"{plan.precision} on {plan.device}, {format_count(plan.threads, 'thread')}"
    product = f"a matrix product {_flops(plan.gemm_flops)}/s ({where})"
    trial = plan.trial
    if trial is None:
        return f"{product}; no step, for it would not fit"
    of = "a micro-batch" if trial.rows == plan.batch else f"{format_count(trial.rows, 'row')} of the {plan.batch}"
    share = "" if trial.utilization is None else f", {trial.utilization:.1%} of that"
    return f"{product}; {of} of the first step in {_seconds(trial.seconds)}{share}; an update {_seconds(trial.update)}"


def _time(plan: TrainingPlan) -> str:
    if plan.seconds is None or plan.step_seconds is None or plan.eval_seconds is None:
        return "not known, for nothing was measured"
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
