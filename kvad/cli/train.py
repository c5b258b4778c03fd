"""``kvad train``: flags and a run file become a RunConfig; training itself is ``kvad.train.job``."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvad.cli.common import console, emit_json, json_option, parse_optional_number, with_seq_len
from kvad.errors import UsageError, format_count, suggest

if TYPE_CHECKING:
    from kvad.train.config import RunConfig
    from kvad.train.material import CorpusArgument
    from kvad.train.peers import DataParallelGroup
    from kvad.train.reports import Callback, TrainingResult

__all__ = ["draw_loss_curve", "train_command"]

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
    from kvad.train.board import make_progress
    from kvad.train.config import RunConfig, read_toml

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
        from kvad.cli.train_plan import show_plan

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
    from kvad.checkpoint.compressor_folder import NAME
    from kvad.checkpoint.folder import list_steps

    return any((path / NAME).is_file() for path in list_steps(out)[-1:])


def _stored_run(out: Path) -> RunConfig:
    from kvad.train import compress, job

    return compress.read_summarizer_run(out)[0] if _is_compressor(out) else job.read_model_run(out)[0]


def _callbacks(config: RunConfig) -> list[Callback]:
    if not config.callbacks.requested:
        return []
    from kvad.lab.callbacks import build_callbacks  # the engine, which a run alone does not need

    return build_callbacks(config.callbacks)


def _data_parallel(config: RunConfig) -> DataParallelGroup:
    """The processes that torchrun has started.  UsageError for what one process trains."""
    from kvad.train.peers import init_data_parallel

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
    from kvad.cache.available import available_bytes
    from kvad.train import compress, job
    from kvad.train.config import SummarizerConfig

    if config.objective.kind == "compress":
        if resume:
            return compress.resume_summarizer(out, config=config, corpus=named, callbacks=heard)
        return compress.train_summarizer(config, named, out, overwrite=overwrite, callbacks=heard)
    if config.summarizer != SummarizerConfig():
        raise UsageError("[compress] is for --objective compress", "--init MODEL alone goes on from a checkpoint")
    available = available_bytes()
    if resume:
        return job.resume_model(
            out, config=config, corpus=named, available=available, callbacks=heard, gauged=True, peers=peers
        )
    return job.train_model(
        config, named, out, overwrite=overwrite, available=available, callbacks=heard, gauged=True, peers=peers
    )


def _named(
    corpus: Sequence[Path], pairs: Sequence[tuple[Path, Path]], held: Sequence[tuple[Path, ...]]
) -> CorpusArgument:
    """Paths alone are what the model reads, documents or TSV files; with any of the other two they are TSV files."""
    from kvad.train.pairs import PairPaths

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
    from kvad.lab.runs import plot_run

    try:
        return plot_run(out)
    except ModuleNotFoundError:
        click.echo("kvad: no curves: pip install 'kvad[plot]' draws it", err=True)
        return []


def _next_command(outcome: TrainingResult, config: RunConfig) -> str:
    """The command that asks the trained model."""
    from kvad.checkpoint.open import open_checkpoint

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
