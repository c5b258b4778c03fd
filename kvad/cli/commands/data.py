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
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import click

from kvad.cli.fields import argument, command, option
from kvad.cli.output import console, exit_with, format_bytes, note, print_error, print_result
from kvad.cli.parameters import COUNT, JsonOption, PairFiles
from kvad.cli.run_parameters import PAIRS_HELP, CorpusOptions, merge_options, name_corpus, with_seq_len
from kvad.errors import DataError, UsageError, format_count
from kvad.train.config import DataConfig, RunConfig

if TYPE_CHECKING:
    from kvad.checkpoint import CheckpointHandle
    from kvad.model import Transformer
    from kvad.text import Tokenizer
    from kvad.train import monitoring, setup
    from kvad.train.setup import CorpusArgument

EXAMPLES = ("tag", "classify", "chat")


@click.group()
def data_group() -> None:
    """Create, prepare and check training data.

    \b
    kvad data prepare corpus/ --out data/corpus --vocab-size 8192
    kvad data check recipes/mine.toml data/corpus
    """


class _PrepareOptions(CorpusOptions, JsonOption):
    texts: tuple[Path, ...] = argument("[RUN.toml] IN...")
    out: Path = option("Folder to create", dataclasses.MISSING, short="-o")
    objective: Literal["next-token", "seq2seq", "masked-lm", "span-corruption", "tag", "classify", "chat"] | None = (
        option("Objective of the runs [default: next-token; for pairs seq2seq]")
    )
    format: Literal["auto", "text", "lines", "jsonl", "pairs"] | None = option("File format [default: auto, by suffix]")
    field: str | None = option("Field of the text in JSON lines [default: text]")
    source_field: str | None = option("Field of the source in JSON lines of pairs", of=DataConfig)
    target_field: str | None = option("Field of the target in JSON lines of pairs", of=DataConfig)
    overwrite: bool = option("Replace prepared data in --out")


@command("prepare", _PrepareOptions, data_group)
def prepare_command(options: _PrepareOptions) -> None:
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

    out, overwrite = options.out, options.overwrite
    setup.prepared.check_writable_target(out, overwrite)
    setup.preflight.check_writable(out)
    config, texts = _config(options)
    named = _corpus_argument(config, texts, options)
    setup.preflight.check_output_folder(out, named, config.data.file_suffixes)
    config = _resolve_objective(config, named)
    if options.validation_fraction is not None and config.objective.kind not in EXAMPLES:
        raise UsageError("--validation: a fraction of texts and pairs is set by each run", "omit it")
    start = load_initial(config)  # its tokens, special tokens and chat template apply
    opened = None if start is None else start.opened
    start_time = time.monotonic()
    with _interruptible(out), _metered() as meter:
        run_data = RunData(config, named, print_error, start=opened)
        corpus = run_data.single_corpus()
        trained = run_data.make_tokenizer() if start is None else start.tokenizer
        manifest = write(config, corpus, trained, out, overwrite=overwrite, progress=meter, log=print_error)
    _print_prepared(out, manifest, time.monotonic() - start_time, options.as_json)


def _print_prepared(out: Path, manifest: Mapping[str, Any], seconds: float, as_json: bool) -> None:
    fields = ("kind", "tokens", "documents", "vocab", "largest", "tokenizer", "dtype", "fingerprint")
    num_shards = len(manifest["shards"])
    record = {"out": out, "seconds": seconds, "shards": num_shards, **{name: manifest[name] for name in fields}}
    noun = manifest.get("noun", "pair" if manifest["kind"] == "pairs" else "document")
    texts_in = format_count(manifest["documents"] // (2 if noun == "pair" else 1), noun)
    line = (
        f"{out}: {manifest['tokens']:,} tokens in {texts_in}, {format_count(num_shards, 'shard')}, "
        f"vocabulary {manifest['vocab']:,}, {seconds:.1f} s"
    )
    print_result(as_json, record, line)


class _CheckOptions(JsonOption):
    run: Path = argument("RUN_OR_CONFIG")
    texts: tuple[Path, ...] = argument("[DATA]...")
    pairs: PairFiles = option(PAIRS_HELP, metavar="SOURCE TARGET")
    model: str | None = option("Model to check with [default: the run's, or random weights]", metavar="MODEL")
    num_rows: int = option("Number of rows of the batch", 2, kind=COUNT)


@command("check", _CheckOptions, data_group)
def check_command(options: _CheckOptions) -> None:
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
    config, named = _run(options.run, name_corpus(options.texts, options.pairs))
    config = setup.objective_factory.resolve_objective(config, _topology(config) or config.resolve(vocab=1).kind)
    if config.objective.kind == "summarizer":
        raise UsageError("objective.kind: summarizer cannot be checked", "check its model's own run")
    if config.objective.kind not in ("next-token", "seq2seq") and not config.data.isolate_documents:
        raise UsageError("data.isolate_documents is off: masked tokens cannot be checked", "set it to true")
    name = options.model or (str(options.run) if options.run.is_dir() else None)
    named = resolve_corpus(config.objective.kind, named)
    start = load_initial(config) if name is None else None
    weights = None if name is None else open_checkpoint(name)
    began = weights if start is None else start.opened  # with model.init: its special tokens apply
    template = None if weights is None else weights.tokenizer_folder
    start_handle = None if config.init is None else began
    run_data = RunData(config, named, print_error, start=start_handle, template=template)
    if damaged := run_data.find_corrupt():
        _print_corrupt(damaged, options.as_json)
    if weights is None:
        initial = setup.initialize.new_initial(config, run_data) if start is None else start
        initial = initial.with_head_for(config.objective.kind, run_data.labels)
        tokenizer, checked_model = initial.tokenizer, initial.build()
    else:
        tokenizer, checked_model = _stored(weights)
    with tempfile.TemporaryDirectory() as folder:
        run_data.open(Path(folder) / "data", tokenizer)
        report = setup.data_check.check_packing(
            checked_model.to(torch.float64), run_data.data, tokenizer, options.num_rows
        )
    problems = report.leaks
    record = {**dataclasses.asdict(report), "packing": report.packing_stats._asdict()}
    print_result(options.as_json, {"ok": not problems, "problems": problems, **record}, _check_page(report, problems))
    if problems:
        exit_with(1)


def _print_corrupt(damaged: Sequence[Path], as_json: bool) -> NoReturn:
    """Report damaged files; they are not checked further."""
    problems = [f"{path} is damaged" for path in damaged]
    lines = [f"damaged: {path}: run kvad data prepare again" for path in damaged]
    print_result(as_json, {"ok": False, "problems": problems}, lines)
    exit_with(1)


def _check_page(report: setup.data_check.PackingReport, problems: Sequence[str]) -> list[str]:
    rows, documents = format_count(report.rows, "row"), format_count(report.documents, "document")
    lines = [
        f"packing     {report.packing_stats.summary()}",
        f"the batch   {rows}, {documents}; the fullest row:",
        *(f"  | {line}" for line in report.row),
    ]
    for change in report.perturbed:
        later = "" if report.isolate else f", of later ones {change.later_change:.3g} (data.isolate_documents is off)"
        others = "all others" if report.isolate else "earlier ones and other rows"
        lines.append(
            f"isolation   document {change.document}, its {change.side} changed: "
            f"max |dlogit| {change.own_change:.3g} of its own, {change.leak:.3g} of {others}{later}"
        )
    if report.gradient is None:
        lines.append("gradients   not compared: documents are not isolated (data.isolate_documents is off)")
    else:
        lines.append(
            f"gradients   packed against one by one: {report.gradient:.3g} of the largest (at most 1e-12); "
            f"losses {report.loss_packed:.6f} and {report.loss_alone:.6f}"
        )
    return [*lines, *(f"LEAK        {problem}" for problem in problems)] if problems else [*lines, "ok"]


@contextmanager
def _interruptible(out: Path) -> Iterator[None]:
    """Report on Ctrl-C that nothing was written."""
    existed = out.exists()
    try:
        yield
    except KeyboardInterrupt:
        state = f"{out} is unchanged" if existed else f"nothing was written to {out}"
        note(f"interrupted: {state}")
        raise


@contextmanager
def _metered() -> Iterator[monitoring.console.ProgressMeter]:
    """Show characters and tokens so far: a live line in a terminal, else a line every ten seconds."""
    from kvad.train import monitoring

    terminal = console()
    if not terminal.is_terminal:
        yield monitoring.console.ProgressMeter(print_error)
        return
    with terminal.status("reading") as status:
        yield monitoring.console.ProgressMeter(status.update, interval=0.0)


def _config(options: _PrepareOptions) -> tuple[RunConfig, tuple[Path, ...]]:
    """Read the run file, if it is the first argument, merge the options, and return the remaining texts."""
    from kvad.train.config import read_toml

    texts, tables = options.texts, dict[str, Any]()
    if texts and texts[0].suffix == ".toml":
        tables, texts = read_toml(texts[0]), texts[1:]
    tables = merge_options(tables, options)
    config = with_seq_len(RunConfig.from_dict(tables), tables)
    if config.data.sources:
        raise UsageError(
            "data.sources: a mixture cannot be prepared, only one source at a time", "name its paths instead"
        )
    if config.data.order == "stream":
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, order="epochs"))
    return config, texts


def _corpus_argument(config: RunConfig, texts: Sequence[Path], options: _PrepareOptions) -> CorpusArgument:
    """Resolve the named files by the objective, the model or the options."""
    from kvad.train.setup import resolve_corpus

    kind = config.objective.kind
    if kind == "auto":
        topology = _topology(config)
        has_pairs = bool(options.pairs or options.held_out) or config.data.format == "pairs"
        as_pairs = has_pairs or topology == "encoder-decoder"
        kind = "seq2seq" if as_pairs else "masked-lm" if topology == "encoder" else "next-token"
    return resolve_corpus(kind, options.name_corpus(texts))


def _resolve_objective(config: RunConfig, named: CorpusArgument) -> RunConfig:
    """Set the objective by the model, if one is named, else by the data."""
    from kvad.train import setup
    from kvad.train.sources import PairPaths

    kind = config.objective.kind
    by_data = "encoder-decoder" if isinstance(named, PairPaths) else "decoder"
    by_objective = by_data if kind == "auto" else setup.objective_factory.OBJECTIVE_TOPOLOGY[kind]
    topology = _topology(config) or by_objective
    return setup.objective_factory.resolve_objective(config, topology)


def _topology(config: RunConfig) -> str | None:
    """Return the kind of the run file's model; None if it names none."""
    from kvad.checkpoint import open_checkpoint

    if config.init is not None:
        return open_checkpoint(config.init).config.kind
    return config.resolve(vocab=1).kind if config.model else None


def _run(run: Path, named: CorpusArgument) -> tuple[RunConfig, CorpusArgument]:
    """Return the configuration and the training data of a run folder or a run file."""
    from kvad.train.config import read_toml
    from kvad.train.loop import read_run_config
    from kvad.train.sources import PairPaths

    given = bool(named.files) if isinstance(named, PairPaths) else bool(named)
    if run.is_dir():
        config, corpus = read_run_config(run)
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


class _CreateOptions(JsonOption):
    folder: Path = argument("DIR")


class _LookupOptions(_CreateOptions):
    num_words: int = option("Total number of words", 4_000_000)
    max_words: int = option("Maximum number of words of a text", 511)
    seed: int = option("Seed of the texts", 0, short="-s")


class _PairTaskOptions(_CreateOptions):
    seed: int = option("Seed of the pairs", 42, short="-s")


@data_group.group("create")
def create_group() -> None:
    """Create training data: a language of look-ups, the sources of this Python's library, or pairs of numbers.

    \b
    kvad data create lookup data/lookup
    kvad data create python data/python
    kvad data create reverse data/reverse
    """


@command("lookup", _LookupOptions, create_group)
def create_lookup(options: _LookupOptions) -> None:
    """Create texts of bindings, noise and questions that need earlier tokens, one text per line.

    \b
    kvad data create lookup data/lookup
    kvad train data/lookup --config recipes/lookup-cpu.toml --out runs/lookup-cpu
    """
    from kvad import datasets, text

    folder, num_words, max_words = options.folder, options.num_words, options.max_words
    if max_words < datasets.synthetic.MIN_WORDS or num_words < 1:
        raise UsageError(
            f"--num-words {num_words}, --max-words {max_words}: must be at least 1, and {datasets.synthetic.MIN_WORDS}"
        )
    _check_free(folder)
    texts, path = list(datasets.synthetic.episodes(num_words, max_words, options.seed)), folder / "texts.txt"
    text.base.write_text(path, "\n".join(texts) + "\n")
    size = path.stat().st_size
    record = {"folder": folder, "texts": len(texts), "bytes": size, "words": num_words, "seed": options.seed}
    print_result(options.as_json, record, f"{path}: {len(texts):,} texts, {format_bytes(size)}")


@command("python", _CreateOptions, create_group)
def create_python(options: _CreateOptions) -> None:
    """Copy the sources of this Python's library to DIR/train, and a tenth of the files, by name, to DIR/held-out.

    The benchmarks read that tenth by default, so a model trained on DIR/train was not trained on it.

    \b
    kvad data create python data/python
    kvad train data/python/train --config recipes/endless-rope.toml --out runs/endless-rope
    """
    from kvad import datasets

    folder = options.folder
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
    record = {"folder": folder, "what": sources.description, "files": len(sources.files), "bytes": sizes}
    lines = [f"{sources.description}: {len(sources.files):,} files"]
    lines += [f"{folder / part}: {format_bytes(size)}" for part, size in sizes.items()]
    print_result(options.as_json, record, lines)


@command("copy", _PairTaskOptions, create_group)
def create_copy(options: _PairTaskOptions) -> None:
    """Create pairs with equal sides: ten numbers below ten, 32,000 in train.tsv, 1,000 each in dev and test.

    \b
    kvad data create copy data/copy
    kvad train recipes/copy.toml data/copy/train.tsv --validation data/copy/dev.tsv --out runs/copy
    kvad eval runs/copy data/copy/test.tsv
    """
    _write_task("copy", options)


@command("reverse", _PairTaskOptions, create_group)
def create_reverse(options: _PairTaskOptions) -> None:
    """Create pairs with reversed targets: 1 to 25 numbers below fifty, 40,000 in train.tsv; 1,000 each in dev and test.

    \b
    kvad data create reverse data/reverse
    kvad train recipes/reverse.toml data/reverse/train.tsv --validation data/reverse/dev.tsv --out runs/reverse
    kvad eval runs/reverse data/reverse/test.tsv --bleu-tokenization spaces
    """
    _write_task("reverse", options)


def _write_task(name: str, options: _PairTaskOptions) -> None:
    from kvad import datasets, text

    folder, seed = options.folder, options.seed
    _check_free(folder)
    task = datasets.synthetic.SYNTHETIC_TASKS[name]
    for part in task.parts:
        text.base.write_text(folder / f"{part.name}.tsv", "".join(f"{a}\t{b}\n" for a, b in task.pairs(part, seed)))
    counts = {part.name: part.num_pairs for part in task.parts}
    lines = [f"{folder / part}.tsv: {pairs:,} pairs" for part, pairs in counts.items()]
    print_result(options.as_json, {"folder": folder, "pairs": counts, "seed": seed}, lines)


def _check_free(folder: Path) -> None:
    """Refuse a folder that is not empty."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file, not a folder", "choose another name")
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty", "choose another folder, or remove it")
