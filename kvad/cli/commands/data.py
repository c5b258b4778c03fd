"""``kvad data prepare|check|create``: tokenize texts once for many runs, check packing, create training data."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import click

from kvad import api, checkpoint, datasets, storage
from kvad import model as model_lib
from kvad.cli.fields import CommandGroup, argument, command, option
from kvad.cli.output import console, note, print_error, print_result
from kvad.cli.parameters import COUNT, JsonOption, PairFiles
from kvad.cli.run_parameters import PAIRS_HELP, CorpusOptions, merge_options, name_corpus
from kvad.errors import CheckpointError, DataError, UsageError, format_bytes, format_count
from kvad.train import loop, monitoring, setup
from kvad.train.config import DataConfig, RunConfig, read_toml
from kvad.train.sources import PairPaths

EXAMPLES = ("tag", "classify", "chat")


@click.group(cls=CommandGroup)
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
    out, overwrite = options.out, options.overwrite
    setup.prepared.check_writable_target(out, overwrite)
    setup.preflight.check_writable(out)
    config, texts = _config(options)
    kind, factory, topology = config.objective.kind, setup.objective_factory, _topology(config)
    if kind == "auto":  # by the model or the options
        has_pairs = bool(options.pairs or options.held_out) or config.data.format == "pairs"
        as_pairs = has_pairs or topology == "encoder-decoder"
        kind = "seq2seq" if as_pairs else "masked-lm" if topology == "encoder" else "next-token"
    named = setup.resolve_corpus(kind, name_corpus(texts, options.pairs, options.held_out))
    setup.preflight.check_output_folder(out, named, config.data.file_suffixes)
    by_data = "encoder-decoder" if isinstance(named, PairPaths) else "decoder"
    by_objective = by_data if config.objective.kind == "auto" else factory.OBJECTIVE_TOPOLOGY[config.objective.kind]
    config = factory.resolve_objective(config, topology or by_objective)
    if options.validation_fraction is not None and config.objective.kind not in EXAMPLES:
        raise UsageError("--validation: a fraction of texts and pairs is set by each run", "omit it")
    start = setup.load_initial(config)  # its tokens, special tokens and chat template apply
    opened = None if start is None else start.opened
    start_time = time.monotonic()
    with _metered(out) as meter:
        run_data = setup.RunData(config, named, print_error, start=opened)
        corpus = run_data.single_corpus()
        trained = run_data.make_tokenizer() if start is None else start.tokenizer
        manifest = setup.prepare_data(
            config, corpus, trained, out, overwrite=overwrite, progress=meter, log=print_error
        )
    seconds, num_shards = time.monotonic() - start_time, len(manifest["shards"])
    names = ("kind", "tokens", "documents", "vocab", "largest", "tokenizer", "dtype", "fingerprint")
    record = {"out": out, "seconds": seconds, "shards": num_shards, **{name: manifest[name] for name in names}}
    noun = manifest.get("noun", "pair" if manifest["kind"] == "pairs" else "document")
    texts_in = format_count(manifest["documents"] // (2 if noun == "pair" else 1), noun)
    size = f"{manifest['tokens']:,} tokens in {texts_in}, {format_count(num_shards, 'shard')}"
    print_result(options.as_json, record, f"{out}: {size}, vocabulary {manifest['vocab']:,}, {seconds:.1f} s")


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

    torch.manual_seed(0)
    config, named = _run(options.run, name_corpus(options.texts, options.pairs))
    config = setup.objective_factory.resolve_objective(config, _topology(config) or config.resolve(vocab=1).kind)
    if config.objective.kind == "summarizer":
        raise UsageError("objective.kind: summarizer cannot be checked", "check its model's own run")
    if config.objective.kind not in ("next-token", "seq2seq") and not config.data.isolate_documents:
        raise UsageError("data.isolate_documents is off: masked tokens cannot be checked", "set it to true")
    name = options.model or (str(options.run) if options.run.is_dir() else None)
    named = setup.resolve_corpus(config.objective.kind, named)
    start = setup.load_initial(config) if name is None else None
    weights = None if name is None else checkpoint.open_checkpoint(name)
    template = None if weights is None else weights.tokenizer_folder
    start_handle = weights if start is None else start.opened
    start_handle = None if config.init is None else start_handle  # with model.init: its special tokens apply
    run_data = setup.RunData(config, named, print_error, start=start_handle, template=template)
    if damaged := run_data.find_corrupt():  # these are not checked further
        lines = [f"damaged: {path}: run kvad data prepare again" for path in damaged]
        record = {"ok": False, "problems": [f"{path} is damaged" for path in damaged]}
        print_result(options.as_json, record, lines, failed=True)
        return
    if weights is None:
        initial = setup.initialize.new_initial(config, run_data) if start is None else start
        initial = initial.with_head_for(config.objective.kind, run_data.labels)
        tokenizer, checked_model = initial.tokenizer, initial.build()
    else:
        if weights.tokenizer is None:
            raise CheckpointError(f"{weights.path} has no tokenizer", "copy its tokenizer.json into the folder")
        tokenizer, checked_model = weights.tokenizer, model_lib.Transformer(weights.config)
        checked_model.load_state_dict(dict(weights.weights()))
    with tempfile.TemporaryDirectory() as folder:
        run_data.open(Path(folder) / "data", tokenizer)
        report = setup.data_check.check_packing(checked_model.double(), run_data.data, tokenizer, options.num_rows)
    first = {"ok": not report.leaks, "problems": report.leaks}
    record = {**first, **dataclasses.asdict(report), "packing": report.packing_stats._asdict()}
    print_result(options.as_json, record, _check_page(report), failed=bool(report.leaks))


def _check_page(report: setup.data_check.PackingReport) -> list[str]:
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
    return [*lines, *(f"LEAK        {problem}" for problem in report.leaks)] if report.leaks else [*lines, "ok"]


@contextmanager
def _metered(out: Path) -> Iterator[monitoring.console.ProgressMeter]:
    """Show characters and tokens so far: a live line, or one every ten seconds. Report Ctrl-C."""
    existed, terminal = out.exists(), console()
    try:
        if terminal.is_terminal:
            with terminal.status("reading") as status:
                yield monitoring.console.ProgressMeter(status.update, interval=0.0)
        else:
            yield monitoring.console.ProgressMeter(print_error)
    except KeyboardInterrupt:
        note(f"interrupted: {f'{out} is unchanged' if existed else f'nothing was written to {out}'}")
        raise


def _config(options: _PrepareOptions) -> tuple[RunConfig, tuple[Path, ...]]:
    """Read the run file, if it is the first argument, merge the options, and return the remaining texts."""
    texts, tables = options.texts, dict[str, Any]()
    if texts and texts[0].suffix == ".toml":
        tables, texts = read_toml(texts[0]), texts[1:]
    tables = merge_options(tables, options)
    config = api.training.with_seq_len(RunConfig.from_dict(tables), tables)
    if config.data.sources:
        message = "data.sources: a mixture cannot be prepared, only one source at a time"
        raise UsageError(message, "name its paths instead")
    if config.data.order == "stream":
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, order="epochs"))
    return config, texts


def _topology(config: RunConfig) -> str | None:
    """Return the kind of the run file's model; None if it names none."""
    if config.init is not None:
        return checkpoint.open_checkpoint(config.init).config.kind
    return config.resolve(vocab=1).kind if config.model else None


def _run(run: Path, named: setup.CorpusArgument) -> tuple[RunConfig, setup.CorpusArgument]:
    """Return the configuration and the training data of a run folder or a run file."""
    given = bool(named.files) if isinstance(named, PairPaths) else bool(named)
    if run.is_dir():
        config, corpus = loop.read_run_config(run)
        return config, named if given else corpus
    tables = read_toml(run)
    config = api.training.with_seq_len(RunConfig.from_dict(tables), tables)
    if not given and not config.data.sources:
        raise DataError("no data was given", "kvad data check RUN.toml DATA")
    return config, named


class _CreateOptions(JsonOption):
    folder: Path = argument("DIR")


class _LookupOptions(_CreateOptions):
    num_words: int = option("Total number of words", 4_000_000)
    max_words: int = option("Maximum number of words of a text", 511)
    seed: int = option("Seed of the texts", 0, short="-s")


class _PairTaskOptions(_CreateOptions):
    seed: int = option("Seed of the pairs", 42, short="-s")


@data_group.group("create", cls=CommandGroup)
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
    folder, num_words, max_words = options.folder, options.num_words, options.max_words
    if max_words < datasets.synthetic.MIN_WORDS or num_words < 1:
        raise UsageError(
            f"--num-words {num_words}, --max-words {max_words}: must be at least 1, and {datasets.synthetic.MIN_WORDS}"
        )
    _check_free(folder)
    texts, path = list(datasets.synthetic.episodes(num_words, max_words, options.seed)), folder / "texts.txt"
    storage.atomic.write_bytes(path, ("\n".join(texts) + "\n").encode())
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
    folder, seed = options.folder, options.seed
    _check_free(folder)
    task = datasets.synthetic.SYNTHETIC_TASKS[name]
    for part in task.parts:
        content = "".join(f"{a}\t{b}\n" for a, b in task.pairs(part, seed))
        storage.atomic.write_bytes(folder / f"{part.name}.tsv", content.encode())
    counts = {part.name: part.num_pairs for part in task.parts}
    lines = [f"{folder / part}.tsv: {pairs:,} pairs" for part, pairs in counts.items()]
    print_result(options.as_json, {"folder": folder, "pairs": counts, "seed": seed}, lines)


def _check_free(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file, not a folder", "choose another name")
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty", "choose another folder, or remove it")
