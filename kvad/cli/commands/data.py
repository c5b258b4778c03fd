"""``kvad data prepare|check|create``: tokenize texts once for many runs, check packing, create training data.

``data create`` writes texts that every machine can generate. No torch but for ``check``.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvad.cli.options import console, emit_json, format_bytes, json_option, parse_optional_number, with_seq_len
from kvad.errors import DataError, UsageError, format_count

if TYPE_CHECKING:
    from kvad.checkpoint import CheckpointHandle
    from kvad.model import Transformer
    from kvad.text import Tokenizer
    from kvad.train import monitoring, setup
    from kvad.train.config import RunConfig
    from kvad.train.setup import CorpusArgument, RunData

FORMATS = ("auto", "text", "lines", "jsonl", "pairs")
OBJECTIVES = ("next-token", "seq2seq", "masked-lm", "span-corruption", "tag", "classify", "chat")
EXAMPLES = ("tag", "classify", "chat")
TWO_PATHS = (click.Path(path_type=Path), click.Path(path_type=Path))

pairs_option = click.option(
    "--pairs",
    multiple=True,
    type=TWO_PATHS,
    metavar="SOURCE TARGET",
    help="Two parallel files: line n of TARGET answers line n of SOURCE. Repeatable.",
)


@click.group()
def data_group() -> None:
    """Create, prepare and check training data.

    \b
    kvad data prepare corpus/ --out data/corpus --vocab-size 8192
    kvad data check recipes/mine.toml data/corpus
    """


@data_group.command()
@click.argument("texts", metavar="[RUN.toml] IN...", nargs=-1, type=click.Path(path_type=Path))
@pairs_option
@click.option("-o", "--out", required=True, metavar="FOLDER", type=click.Path(path_type=Path), help="Folder to create.")
@click.option(
    "--objective", type=click.Choice(OBJECTIVES), help="Objective of the runs [default: next-token; for pairs seq2seq]."
)
@click.option("--format", "kind", type=click.Choice(FORMATS), help="File format [default: auto, by suffix].")
@click.option("--field", help="Field of the text in JSON lines [default: text].")
@click.option("--source-field", help="Field of the source in JSON lines of pairs [default: source].")
@click.option("--target-field", help="Field of the target in JSON lines of pairs [default: target].")
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
@click.option("--tokenizer", metavar="KIND|PATH", help="bpe, byte, char, word, or a tokenizer to load [default: bpe].")
@click.option("--vocab-size", type=int, help="Maximum size of the vocabulary [default: 4096].")
@click.option(
    "--validation", metavar="FRACTION|FILE", help="Fraction of examples to hold out, or a held-out file [default: 0.1]."
)
@click.option(
    "--validation-pairs",
    multiple=True,
    type=TWO_PATHS,
    metavar="SOURCE TARGET",
    help="Two parallel files of held-out pairs. Repeatable.",
)
@click.option("--overwrite", is_flag=True, help="Replace prepared data in --out.")
@json_option
def prepare_command(
    texts: tuple[Path, ...],
    pairs: tuple[tuple[Path, Path], ...],
    out: Path,
    objective: str | None,
    kind: str | None,
    tokenizer: str | None,
    validation: str | None,
    validation_pairs: tuple[tuple[Path, Path], ...],
    overwrite: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Convert texts to token shards and a tokenizer, once for any number of runs.

    IN are files and folders of text, JSON lines (.jsonl) or pairs (TSV, --pairs), also compressed (.gz, .zst). With
    --objective tag they are lines of WORD<tab>TAG, with classify LABEL<tab>TEXT, with chat JSON lines of messages. If a
    run file is named first, its tables apply.

    \b
    kvad data prepare corpus/ --out data/corpus --vocab-size 8192
    kvad data prepare dump.jsonl.gz --field body --out data/dump --tokenizer runs/mine
    kvad data prepare --pairs train.de train.en --out data/de-en --vocab-size 10000
    kvad data prepare train.tsv --validation dev.tsv --objective tag --out data/tags
    """
    from kvad.train import setup
    from kvad.train.setup import RunData, load_initial
    from kvad.train.setup import prepare_data as write

    setup.prepared.check_writable_target(out, overwrite)
    setup.preflight.check_writable(out)

    fraction = parse_optional_number(validation)
    renamed = {"field": "text_field", "suffixes": "file_suffixes"}
    given = {renamed.get(name, name): value for name, value in flags.items()}
    data_fields = {"format": kind, **given, "validation_fraction": fraction}
    config, texts = _config(texts, data_fields, tokenizer, objective)
    held_out = [] if validation is None or fraction is not None else [(Path(validation),)]
    named = _corpus_argument(config, texts, pairs, [*held_out, *validation_pairs])
    setup.preflight.check_output_folder(out, named, config.data.file_suffixes)
    config = _resolve_objective(config, named)
    if fraction is not None and config.objective.kind not in EXAMPLES:
        raise UsageError("--validation: a fraction of texts and pairs is set by each run", "omit it")
    start = load_initial(config)  # its tokens, special tokens and chat template apply
    opened = None if start is None else start.opened
    start_time = time.monotonic()
    with _interruptible(out), _metered() as meter:
        run_data = RunData(config, named, lambda text: click.echo(text, err=True), start=opened)
        corpus = run_data.single_corpus()
        trained = run_data.make_tokenizer() if start is None else start.tokenizer
        manifest = write(
            config, corpus, trained, out, overwrite=overwrite, progress=meter, log=lambda t: click.echo(t, err=True)
        )
    _print_prepared(out, manifest, time.monotonic() - start_time, as_json)


def _print_prepared(out: Path, manifest: Mapping[str, Any], seconds: float, as_json: bool) -> None:
    if as_json:
        fields = ("kind", "tokens", "documents", "vocab", "largest", "tokenizer", "dtype", "fingerprint")
        emit_json(
            {"out": out, "seconds": seconds, "shards": len(manifest["shards"]), **{k: manifest[k] for k in fields}}
        )
        return
    noun = manifest.get("noun", "pair" if manifest["kind"] == "pairs" else "document")
    texts_in = format_count(manifest["documents"] // (2 if noun == "pair" else 1), noun)
    click.echo(
        f"{out}: {manifest['tokens']:,} tokens in {texts_in}, {format_count(len(manifest['shards']), 'shard')}, "
        f"vocabulary {manifest['vocab']:,}, {seconds:.1f} s"
    )


@data_group.command()
@click.argument("run", metavar="RUN_OR_CONFIG", type=click.Path(path_type=Path))
@click.argument("texts", metavar="[DATA]...", nargs=-1, type=click.Path(path_type=Path))
@pairs_option
@click.option("--model", metavar="MODEL", help="Model to check with [default: the run's, or random weights].")
@click.option("--num-rows", type=click.IntRange(1), default=2, show_default=True, help="Number of rows of the batch.")
@json_option
def check_command(
    run: Path,
    texts: tuple[Path, ...],
    pairs: tuple[tuple[Path, Path], ...],
    model: str | None,
    num_rows: int,
    as_json: bool,
) -> None:
    """Check on a real batch that packed documents are isolated and that packing does not change the gradient.

    RUN_OR_CONFIG is a run or a run file; DATA is its training data (a run stores its own). Exit code 1 if a document
    changes the logits of another in float64, or if prepared files are damaged.

    \b
    kvad data check recipes/mine.toml corpus/
    """
    import torch

    from kvad.checkpoint import open_checkpoint
    from kvad.train import setup
    from kvad.train.setup import RunData, load_initial, resolve_corpus

    torch.manual_seed(0)
    config, named = _run(run, _named(texts, pairs))
    config = setup.objective_factory.resolve_objective(config, _topology(config) or config.resolve(vocab=1).kind)
    if config.objective.kind == "summarizer":
        raise UsageError("objective.kind: summarizer cannot be checked", "check its model's own run")
    if config.objective.kind not in ("next-token", "seq2seq"):
        if not config.data.isolate_documents:
            raise UsageError("data.isolate_documents is off: masked tokens cannot be checked", "set it to true")
        rows = setup.data_check.DEFAULT_ROWS
        train = dataclasses.replace(config.train, batch_size=rows, gradient_accumulation_steps=1, device="cpu")
        config = dataclasses.replace(config, train=train)
    name = model or (str(run) if run.is_dir() else None)
    named = resolve_corpus(config.objective.kind, named)
    start = load_initial(config) if name is None else None
    weights = None if name is None else open_checkpoint(name)
    began = weights if start is None else start.opened  # with model.init: its special tokens apply
    template = None if weights is None else weights.tokenizer_folder
    start_handle = None if config.init is None else began
    run_data = RunData(config, named, _echo_err, start=start_handle, template=template)
    if damaged := run_data.find_corrupt():
        _print_corrupt(damaged, as_json)
        return
    if start is not None:
        start = start.with_head_for(config.objective.kind, run_data.labels)
        tokenizer, checked_model = start.tokenizer, start.model()
    else:
        tokenizer, checked_model = _random_model(config, run_data) if weights is None else _stored(weights)
    with tempfile.TemporaryDirectory() as folder:
        run_data.open(Path(folder) / "data", tokenizer)
        report = setup.data_check.check_packing(checked_model.to(torch.float64), run_data.data, tokenizer, num_rows)
    problems = report.leaks
    if as_json:
        packing = None if report.packing_stats is None else report.packing_stats._asdict()
        emit_json({"ok": not problems, "problems": problems, **dataclasses.asdict(report), "packing": packing})
    else:
        _print_check(report, problems)
    if problems:
        click.get_current_context().exit(1)


def _echo_err(text: str) -> None:
    click.echo(text, err=True)


def _print_corrupt(damaged: Sequence[Path], as_json: bool) -> None:
    """Report damaged files; they are not checked further."""
    if as_json:
        emit_json({"ok": False, "problems": [f"{path} is damaged" for path in damaged]})
    else:
        for path in damaged:
            click.echo(f"damaged: {path}: run kvad data prepare again")
    click.get_current_context().exit(1)


def _print_check(report: setup.data_check.PackingReport, problems: Sequence[str]) -> None:
    if report.packing_stats is not None:
        click.echo(f"packing     {report.packing_stats.summary()}")
    click.echo(
        f"the batch   {format_count(report.rows, 'row')}, {format_count(report.documents, 'document')}; "
        "the fullest row:"
    )
    for line in report.row:
        click.echo(f"  | {line}")
    for change in report.perturbed:
        later = "" if report.isolate else f", of later ones {change.later_change:.3g} (data.isolate_documents is off)"
        click.echo(
            f"isolation   document {change.document}, its {change.side} changed: "
            f"max |dlogit| {change.own_change:.3g} of its own, "
            f"{change.leak:.3g} of {'all others' if report.isolate else 'earlier ones and other rows'}{later}"
        )
    if report.gradient is None:
        click.echo("gradients   not compared: documents are not isolated (data.isolate_documents is off)")
    else:
        click.echo(
            f"gradients   packed against one by one: {report.gradient:.3g} of the largest (at most 1e-12); "
            f"losses {report.loss_packed:.6f} and {report.loss_alone:.6f}"
        )
    for line in problems:
        click.echo(f"LEAK        {line}")
    if not problems:
        click.echo("ok")


@contextmanager
def _interruptible(out: Path) -> Iterator[None]:
    """Report on Ctrl-C that nothing was written."""
    existed = out.exists()
    try:
        yield
    except KeyboardInterrupt:
        state = f"{out} is unchanged" if existed else f"nothing was written to {out}"
        click.echo(f"kvad: interrupted: {state}", err=True)
        raise


@contextmanager
def _metered() -> Iterator[monitoring.console.ProgressMeter]:
    """Show characters and tokens so far: a live line in a terminal, else a line every ten seconds."""
    from kvad.train import monitoring

    terminal = console()
    if not terminal.is_terminal:
        yield monitoring.console.ProgressMeter(lambda text: click.echo(text, err=True))
        return
    with terminal.status("reading") as status:
        yield monitoring.console.ProgressMeter(status.update, interval=0.0)


def _config(
    texts: tuple[Path, ...], flags: dict[str, Any], tokenizer: str | None, objective: str | None
) -> tuple[RunConfig, tuple[Path, ...]]:
    """Read the run file, if it is the first argument, merge the flags, and return the remaining texts."""
    from kvad.text import KINDS
    from kvad.train.config import RunConfig, read_toml

    tables: dict[str, Any] = {}
    if texts and texts[0].suffix == ".toml":
        tables, texts = read_toml(texts[0]), texts[1:]
    given = {name: value for name, value in flags.items() if value not in (None, ())}
    sizes = {"vocab_size": given.pop("vocab_size")} if "vocab_size" in given else {}
    if tokenizer is not None:
        sizes["kind" if tokenizer in KINDS else "path"] = tokenizer
    data_values = {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}
    kind = {} if objective is None else {"kind": objective}
    for name, more in (("data", data_values), ("tokenizer", sizes), ("objective", kind)):
        if isinstance(tables.get(name, {}), dict):  # RunConfig refuses a value that is not a table
            tables[name] = {**tables.get(name, {}), **more}
    config = with_seq_len(RunConfig.from_dict(tables), tables)
    if config.data.sources:
        raise UsageError(
            "data.sources: a mixture cannot be prepared, only one source at a time", "name its paths instead"
        )
    if config.data.order == "stream":
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, order="epochs"))
    return config, texts


def _corpus_argument(
    config: RunConfig, texts: Sequence[Path], pairs: Sequence[tuple[Path, Path]], held_out: Sequence[tuple[Path, ...]]
) -> CorpusArgument:
    """Resolve the named files by the objective, the model or the options."""
    from kvad.train.setup import resolve_corpus

    kind = config.objective.kind
    if kind == "auto":
        topology = _topology(config)
        as_pairs = bool(pairs or held_out) or config.data.format == "pairs" or topology == "encoder-decoder"
        kind = "seq2seq" if as_pairs else "masked-lm" if topology == "encoder" else "next-token"
    return resolve_corpus(kind, _named(texts, pairs, held_out))


def _resolve_objective(config: RunConfig, named: CorpusArgument) -> RunConfig:
    """Set the objective by the model, if one is named, else by the data."""
    from kvad.train import setup
    from kvad.train.sources import PairPaths

    kind = config.objective.kind
    topology = _topology(config) or (
        setup.objective_factory.OBJECTIVE_TOPOLOGY[kind]
        if kind != "auto"
        else "encoder-decoder"
        if isinstance(named, PairPaths)
        else "decoder"
    )
    return setup.objective_factory.resolve_objective(config, topology)


def _topology(config: RunConfig) -> str | None:
    """Return the kind of the run file's model; None if it names none."""
    from kvad.checkpoint import open_checkpoint

    if config.init is not None:
        return open_checkpoint(config.init).config.kind
    return config.resolve(vocab=1).kind if config.model else None


def _named(
    texts: Sequence[Path], pairs: Sequence[tuple[Path, Path]], held_out: Sequence[tuple[Path, ...]] = ()
) -> CorpusArgument:
    from kvad.train.sources import PairPaths

    if not pairs and not held_out:
        return texts
    return PairPaths((*((path,) for path in texts), *pairs), tuple(held_out))


def _run(run: Path, named: CorpusArgument) -> tuple[RunConfig, CorpusArgument]:
    """Return the configuration and the training data of a run folder or a run file."""
    from kvad.train.config import RunConfig, read_toml
    from kvad.train.loop import read_model_run
    from kvad.train.sources import PairPaths

    given = bool(named.files) if isinstance(named, PairPaths) else bool(named)
    if run.is_dir():
        config, corpus = read_model_run(run)
        return config, named if given else corpus
    tables = read_toml(run)
    config = with_seq_len(RunConfig.from_dict(tables), tables)
    if not given and not config.data.sources:
        raise DataError("no data was given", "kvad data check RUN.toml DATA")
    return config, named


def _stored(opened: CheckpointHandle) -> tuple[Tokenizer, Transformer]:
    """Load the tokenizer and the model of a checkpoint."""
    from kvad.errors import CheckpointError
    from kvad.model import Transformer

    if opened.tokenizer is None:
        raise CheckpointError(f"{opened.path} has no tokenizer", "copy its tokenizer.json into the folder")
    model = Transformer(opened.config)
    model.load_state_dict(dict(opened.weights()))
    return opened.tokenizer, model


def _random_model(config: RunConfig, run_data: RunData) -> tuple[Tokenizer, Transformer]:
    """Create a model with random weights for the tokenizer and the labels of ``run_data``."""
    from kvad.model import Transformer
    from kvad.train import setup

    tokenizer = run_data.make_tokenizer()
    model = Transformer(run_data.with_objective_head(config.resolve(tokenizer.vocab_size)))
    if model.config.kind != "decoder":
        setup.initialize.init_weights(model)
    return tokenizer, model


folder_argument = click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))


@data_group.group("create")
def create_group() -> None:
    """Create training data: a language of look-ups, the sources of this Python's library, or pairs of numbers.

    \b
    kvad data create lookup data/lookup
    kvad data create python data/python
    kvad data create reverse data/reverse
    """


@create_group.command("lookup")
@folder_argument
@click.option("--num-words", type=int, default=4_000_000, show_default=True, help="Total number of words.")
@click.option("--max-words", type=int, default=511, show_default=True, help="Maximum number of words of a text.")
@click.option("-s", "--seed", type=int, default=0, show_default=True, help="Seed of the texts.")
@json_option
def create_lookup(folder: Path, num_words: int, max_words: int, seed: int, as_json: bool) -> None:
    """Create texts of bindings, noise and questions that need earlier tokens, one text per line.

    \b
    kvad data create lookup data/lookup
    kvad train data/lookup --config recipes/lookup-cpu.toml --out runs/lookup-cpu
    """
    from kvad import datasets, text

    if max_words < datasets.synthetic.MIN_WORDS or num_words < 1:
        raise UsageError(
            f"--num-words {num_words}, --max-words {max_words}: must be at least 1, and {datasets.synthetic.MIN_WORDS}"
        )
    _check_free(folder)
    texts = list(datasets.synthetic.episodes(num_words, max_words, seed))
    text.base.write_text(folder / "texts.txt", "\n".join(texts) + "\n")
    size = (folder / "texts.txt").stat().st_size
    if as_json:
        emit_json({"folder": folder, "texts": len(texts), "bytes": size, "words": num_words, "seed": seed})
    else:
        click.echo(f"{folder / 'texts.txt'}: {len(texts):,} texts, {format_bytes(size)}")


@create_group.command("python")
@folder_argument
@json_option
def create_python(folder: Path, as_json: bool) -> None:
    """Copy the sources of this Python's library to DIR/train, and a tenth of the files, by name, to DIR/held-out.

    The benchmarks read that tenth by default, so a model trained on DIR/train was not trained on it.

    \b
    kvad data create python data/python
    kvad train data/python/train --config recipes/endless-rope.toml --out runs/endless-rope
    """
    from kvad import datasets

    _check_free(folder)
    sources = datasets.stdlib_sources.find_sources()
    sizes = {"train": 0, "held-out": 0}
    for path in sources.files:
        name = path.relative_to(sources.root).as_posix()
        part = "held-out" if datasets.stdlib_sources.is_held_out(name) else "train"
        target = folder / part / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        sizes[part] += target.stat().st_size
    if as_json:
        emit_json({"folder": folder, "what": sources.description, "files": len(sources.files), "bytes": sizes})
    else:
        click.echo(f"{sources.description}: {len(sources.files):,} files")
        for part, size in sizes.items():
            click.echo(f"{folder / part}: {format_bytes(size)}")


@create_group.command("copy")
@folder_argument
@click.option("-s", "--seed", type=int, default=42, show_default=True, help="Seed of the pairs.")
@json_option
def create_copy(folder: Path, seed: int, as_json: bool) -> None:
    """Create pairs with equal sides: ten numbers below ten, 32,000 in train.tsv, 1,000 each in dev and test.

    \b
    kvad data create copy data/copy
    kvad train recipes/copy.toml data/copy/train.tsv --validation data/copy/dev.tsv --out runs/copy
    kvad eval runs/copy data/copy/test.tsv
    """
    _write_task("copy", folder, seed, as_json)


@create_group.command("reverse")
@folder_argument
@click.option("-s", "--seed", type=int, default=42, show_default=True, help="Seed of the pairs.")
@json_option
def create_reverse(folder: Path, seed: int, as_json: bool) -> None:
    """Create pairs with reversed targets: 1 to 25 numbers below fifty, 40,000 in train.tsv; 1,000 each in dev and test.

    \b
    kvad data create reverse data/reverse
    kvad train recipes/reverse.toml data/reverse/train.tsv --validation data/reverse/dev.tsv --out runs/reverse
    kvad eval runs/reverse data/reverse/test.tsv --bleu-tokenization spaces
    """
    _write_task("reverse", folder, seed, as_json)


def _write_task(name: str, folder: Path, seed: int, as_json: bool) -> None:
    from kvad import datasets, text

    _check_free(folder)
    task = datasets.synthetic.SYNTHETIC_TASKS[name]
    for part in task.parts:
        text.base.write_text(folder / f"{part.name}.tsv", "".join(f"{a}\t{b}\n" for a, b in task.pairs(part, seed)))
    counts = {part.name: part.num_pairs for part in task.parts}
    if as_json:
        emit_json({"folder": folder, "pairs": counts, "seed": seed})
        return
    for written, pairs in counts.items():
        click.echo(f"{folder / written}.tsv: {pairs:,} pairs")


def _check_free(folder: Path) -> None:
    """Refuse a folder that is not empty."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file, not a folder", "choose another name")
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty", "choose another folder, or remove it")
