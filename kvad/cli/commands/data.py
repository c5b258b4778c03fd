"""``kvad data prepare|check``: texts become tokens that many runs share; what packing promises is proved on them.

``kvad corpus lookup|python|copy|reverse DIR``: texts to train on that every machine can make.  No torch.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
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
OBJECTIVES = ("next-token", "seq2seq", "masked", "spans", "tag", "classify", "chat")
EXAMPLES = ("tag", "classify", "chat")
TWO_PATHS = (click.Path(path_type=Path), click.Path(path_type=Path))

pairs_option = click.option(
    "--pairs", multiple=True, type=TWO_PATHS, metavar="SOURCE TARGET", help="Two files; line n of one answers line n."
)


@click.group()
def data_group() -> None:
    """Prepare texts for training, and prove what packing promises.

    \b
    kvad data prepare corpus/ --out data/corpus --vocab-size 8192
    kvad data check runs/mine.toml data/corpus
    """


@data_group.command()
@click.argument("texts", metavar="[RUN.toml] IN...", nargs=-1, type=click.Path(path_type=Path))
@pairs_option
@click.option("--out", required=True, metavar="FOLDER", type=click.Path(path_type=Path), help="The folder to make.")
@click.option(
    "--objective", type=click.Choice(OBJECTIVES), help="What they are for.  [default: next-token; of pairs seq2seq]"
)
@click.option("--format", "kind", type=click.Choice(FORMATS), help="How files are read.  [default: auto, by name]")
@click.option("--field", help="Of JSON lines: the text's field.  [default: text]")
@click.option("--source-field", help="Of pairs as JSON lines.  [default: source]")
@click.option("--target-field", help="Of pairs as JSON lines.  [default: target]")
@click.option("--suffix", "suffixes", multiple=True, metavar=".EXT", help="Which files of a folder.")
@click.option("--errors", type=click.Choice(["strict", "replace"]), help="Bytes that are not UTF-8.  [default: strict]")
@click.option("--tokenizer", metavar="KIND|PATH", help="bpe, byte, char, word, or a tokenizer to load.  [default: bpe]")
@click.option("--vocab-size", type=int, help="Ceiling of the vocabulary.  [default: 4096]")
@click.option("--validation", metavar="SHARE|FILE", help="Of examples: the share held out [0.1]; or a file held out.")
@click.option(
    "--validation-pairs", multiple=True, type=TWO_PATHS, metavar="SOURCE TARGET", help="Two files of pairs held out."
)
@click.option("--overwrite", is_flag=True, help="Let prepared data that it holds give way.")
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
    """Turn texts into token shards and a tokenizer, once, for any number of runs.

    IN are files and folders: plain text, JSON lines (.jsonl), compressed ones too (.gz, .zst), or pairs (--format
    pairs: TSV, or two fields of JSON lines; --pairs: two parallel files).  With --objective tag they are lines of
    WORD<tab>TAG, with classify LABEL<tab>TEXT, with chat JSON lines of {"messages": [...]}.  A run file's [data],
    [tokenizer] and [objective] are used where one is named first.  The folder appears whole or not at all.

    \b
    kvad data prepare corpus/ --out data/corpus --vocab-size 8192
    kvad data prepare dump.jsonl.gz --field body --out data/dump --tokenizer runs/mine
    kvad data prepare --pairs train.de train.en --out data/de-en --vocab-size 10000
    kvad data prepare train.tsv --validation dev.tsv --objective tag --out data/tags
    kvad data prepare talks.jsonl --objective chat --out data/talks
    kvad train runs/mine.toml data/corpus --out runs/mine
    """
    from kvad.train import setup
    from kvad.train.setup import RunData, load_initial
    from kvad.train.setup import prepare_data as write

    setup.prepared.check_writable_target(out, overwrite)
    setup.preflight.check_writable(out)

    share = parse_optional_number(validation)
    places = {"format": kind, **flags, "validation": share}
    config, texts = _config(texts, places, tokenizer, objective)
    held = [] if validation is None or share is not None else [(Path(validation),)]
    named = _corpus_argument(config, texts, pairs, [*held, *validation_pairs])
    setup.preflight.check_output_folder(out, named, config.data.file_suffixes)
    config = _resolve_objective(config, named)
    if share is not None and config.objective.kind not in EXAMPLES:
        raise UsageError("--validation: what share of texts and pairs is held out is each run's own", "leave it out")
    start = load_initial(config)  # its tokens, its frames and its chat template are the texts'
    opened = None if start is None else start.opened
    began = time.monotonic()
    with _interruptible(out), _metered() as meter:
        material = RunData(config, named, lambda text: click.echo(text, err=True), start=opened)
        corpus = material.single_corpus()
        made = material.make_tokenizer() if start is None else start.tokenizer
        manifest = write(
            config, corpus, made, out, overwrite=overwrite, progress=meter, tell=lambda t: click.echo(t, err=True)
        )
    seconds = time.monotonic() - began
    if as_json:
        kept = ("kind", "tokens", "documents", "vocab", "largest", "tokenizer", "dtype", "key")
        emit_json({"out": out, "seconds": seconds, "shards": len(manifest["shards"]), **{k: manifest[k] for k in kept}})
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
@click.option("--model", metavar="MODEL", help="Weights to check with.  [default: the run's, or fresh ones]")
@click.option("--rows", type=click.IntRange(1), default=2, show_default=True, help="Rows of the batch.")
@json_option
def check_command(
    run: Path,
    texts: tuple[Path, ...],
    pairs: tuple[tuple[Path, Path], ...],
    model: str | None,
    rows: int,
    as_json: bool,
) -> None:
    """Prove on a real batch that documents do not see each other, and that packing changes no gradient.

    RUN_OR_CONFIG is a run's folder or a run file; DATA what it is trained on (a run knows its own).  In float64: one
    document is changed, and the logits of all others must stay as they are, to the last bit; the gradient of the packed
    batch is that of its documents one by one.  Also: how full the rows are, and what one holds.  Exit code 1 when
    something leaks; and at once, without a proof, when prepared files are damaged.

    \b
    kvad data check runs/mine.toml corpus/
    kvad data check runs/mine
    """
    import torch

    from kvad.checkpoint import open_checkpoint
    from kvad.train import setup
    from kvad.train.setup import RunData, load_initial, resolve_corpus

    torch.manual_seed(0)
    config, named = _run(run, _named(texts, pairs))
    config = setup.objective_factory.resolve_objective(config, _topology(config) or config.resolve(vocab=1).kind)
    if config.objective.kind == "compress":
        raise UsageError("objective.kind: compress cannot be checked", "check its model's own run")
    if config.objective.kind not in ("next-token", "seq2seq"):
        if not config.data.isolate_documents:
            raise UsageError("data.isolate_documents is off: of hidden tokens nothing is promised then", "leave it on")
        looked = dataclasses.replace(
            config.train, batch_size=setup.data_check.DEFAULT_ROWS, gradient_accumulation_steps=1, device="cpu"
        )
        config = dataclasses.replace(config, train=looked)
    name = model or (str(run) if run.is_dir() else None)
    named = resolve_corpus(config.objective.kind, named)
    start = load_initial(config) if name is None else None
    weights = None if name is None else open_checkpoint(name)
    began = weights if start is None else start.opened  # of a run with model.init, what its texts are framed for
    material = RunData(
        config,
        named,
        lambda text: click.echo(text, err=True),
        start=None if config.init is None else began,
        template=None if weights is None else weights.tokenizer_folder,
    )
    if damaged := material.find_corrupt():
        _print_corrupt(damaged, as_json)
        return
    if start is not None:
        start = start.with_head_for(config.objective.kind, material.labels)
        tokenizer, checked = start.tokenizer, start.model()
    else:
        tokenizer, checked = _random_model(config, material) if weights is None else _stored(weights)
    with tempfile.TemporaryDirectory() as folder:
        material.open(Path(folder) / "data", tokenizer)
        report = setup.data_check.check_packing(checked.to(torch.float64), material.data, tokenizer, rows)
    wrong = report.leaks
    if as_json:
        use = None if report.packing_stats is None else report.packing_stats._asdict()
        emit_json({"ok": not wrong, "wrong": wrong, **dataclasses.asdict(report), "use": use})
    else:
        _print_check(report, wrong)
    if wrong:
        click.get_current_context().exit(1)


def _print_corrupt(damaged: Sequence[Path], as_json: bool) -> None:
    """Nothing is proved on files that are not what was prepared."""
    if as_json:
        emit_json({"ok": False, "wrong": [f"{path} is damaged" for path in damaged]})
    else:
        for path in damaged:
            click.echo(f"damaged: {path}: prepare it again")
    click.get_current_context().exit(1)


def _print_check(report: setup.data_check.PackingReport, wrong: Sequence[str]) -> None:
    if report.packing_stats is not None:
        click.echo(f"packing     {report.packing_stats.summary()}")
    click.echo(
        f"the batch   {format_count(report.rows, 'row')}, {format_count(report.documents, 'document')}; the fullest row:"
    )
    for line in report.row:
        click.echo(f"  | {line}")
    for each in report.perturbed:
        later = "" if report.isolate else f", of later ones {each.later_change:.3g} (data.isolate_documents is off)"
        click.echo(
            f"isolation   document {each.document}, its {each.side} changed: max |dlogit| {each.own_change:.3g} of its own, "
            f"{each.leak:.3g} of {'all others' if report.isolate else 'earlier ones and other rows'}{later}"
        )
    if report.gradient is None:
        click.echo("gradients   not compared: documents see each other (data.isolate_documents is off)")
    else:
        click.echo(
            f"gradients   packed against one by one: {report.gradient:.3g} of the largest (at most 1e-12); "
            f"losses {report.loss_packed:.6f} and {report.loss_alone:.6f}"
        )
    for line in wrong:
        click.echo(f"LEAK        {line}")
    if not wrong:
        click.echo("ok")


@contextmanager
def _interruptible(out: Path) -> Iterator[None]:
    """Ctrl-C leaves nothing behind, and says so."""
    there = out.exists()
    try:
        yield
    except KeyboardInterrupt:
        left = f"{out} is as it was" if there else f"nothing was written to {out}"
        click.echo(f"kvad: interrupted: {left}", err=True)
        raise


@contextmanager
def _metered() -> Iterator[monitoring.console.ProgressMeter]:
    """Characters and tokens so far: one live line in a terminal, else a line every ten seconds."""
    from kvad.train import monitoring

    there = console()
    if not there.is_terminal:
        yield monitoring.console.ProgressMeter(lambda text: click.echo(text, err=True))
        return
    with there.status("reading") as status:
        yield monitoring.console.ProgressMeter(status.update, interval=0.0)


def _config(
    texts: tuple[Path, ...], flags: dict[str, Any], tokenizer: str | None, objective: str | None
) -> tuple[RunConfig, tuple[Path, ...]]:
    """The run file that stands first, with the flags put in, and the texts behind it."""
    from kvad.text import KINDS
    from kvad.train.config import RunConfig, read_toml

    tables: dict[str, Any] = {}
    if texts and texts[0].suffix == ".toml":
        tables, texts = read_toml(texts[0]), texts[1:]
    wanted = {name: value for name, value in flags.items() if value not in (None, ())}
    sizes = {"vocab_size": wanted.pop("vocab_size")} if "vocab_size" in wanted else {}
    if tokenizer is not None:
        sizes["kind" if tokenizer in KINDS else "path"] = tokenizer
    made = {name: list(value) if isinstance(value, tuple) else value for name, value in wanted.items()}
    kind = {} if objective is None else {"kind": objective}
    for name, more in (("data", made), ("tokenizer", sizes), ("objective", kind)):
        if isinstance(tables.get(name, {}), dict):  # what is no table is refused by RunConfig, by name
            tables[name] = {**tables.get(name, {}), **more}
    config = with_seq_len(RunConfig.from_dict(tables), tables)
    if config.data.sources:
        raise UsageError("data.sources is a mixture, and one source is prepared at a time", "name its paths instead")
    if config.data.order == "stream":
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, order="epochs"))
    return config, texts


def _corpus_argument(
    config: RunConfig,
    texts: Sequence[Path],
    pairs: Sequence[tuple[Path, Path]],
    held: Sequence[tuple[Path, ...]],
) -> CorpusArgument:
    """What is named, as the objective, the model or the options say that it is read."""
    from kvad.train.setup import resolve_corpus

    kind = config.objective.kind
    if kind == "auto":
        topology = _topology(config)
        as_pairs = bool(pairs or held) or config.data.format == "pairs" or topology == "encoder-decoder"
        kind = "seq2seq" if as_pairs else "masked" if topology == "encoder" else "next-token"
    return resolve_corpus(kind, _named(texts, pairs, held))


def _resolve_objective(config: RunConfig, named: CorpusArgument) -> RunConfig:
    """With the objective said: that of the model where one is named, else of what is."""
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
    """Of the run file's model; None where it names none."""
    from kvad.checkpoint import open_checkpoint

    if config.init is not None:
        return open_checkpoint(config.init).config.kind
    return config.resolve(vocab=1).kind if config.model else None


def _named(
    texts: Sequence[Path], pairs: Sequence[tuple[Path, Path]], held: Sequence[tuple[Path, ...]] = ()
) -> CorpusArgument:
    from kvad.train.sources import PairPaths

    if not pairs and not held:
        return texts
    return PairPaths((*((path,) for path in texts), *pairs), tuple(held))


def _run(run: Path, named: CorpusArgument) -> tuple[RunConfig, CorpusArgument]:
    """Of a run's folder or a run file: its configuration, and what it is trained on."""
    from kvad.train.config import RunConfig, read_toml
    from kvad.train.loop import read_model_run
    from kvad.train.sources import PairPaths

    given = bool(named.files) if isinstance(named, PairPaths) else bool(named)
    if run.is_dir():
        config, its_own = read_model_run(run)
        return config, named if given else its_own
    tables = read_toml(run)
    config = with_seq_len(RunConfig.from_dict(tables), tables)
    if not given and not config.data.sources:
        raise DataError("no data was named", "kvad data check RUN.toml DATA")
    return config, named


def _stored(opened: CheckpointHandle) -> tuple[Tokenizer, Transformer]:
    """The weights of a checkpoint, with their tokenizer."""
    from kvad.errors import CheckpointError
    from kvad.model import Transformer

    if opened.tokenizer is None:
        raise CheckpointError(f"{opened.path} came without a tokenizer", "put its tokenizer.json beside it")
    model = Transformer(opened.config)
    model.load_state_dict(dict(opened.weights()))
    return opened.tokenizer, model


def _random_model(config: RunConfig, material: RunData) -> tuple[Tokenizer, Transformer]:
    """A model that begins, for the tokenizer and the labels of ``material``."""
    from kvad.model import Transformer
    from kvad.train import setup

    tokenizer = material.make_tokenizer()
    model = Transformer(material.with_objective_head(config.resolve(tokenizer.vocab_size)))
    if model.config.kind != "decoder":
        setup.initialize.init_weights(model)
    return tokenizer, model


folder_argument = click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))


@click.group()
def create_group() -> None:
    """Make texts to train on: a language of look-ups, this Python's own sources, or pairs of numbers.

    \b
    kvad corpus lookup data/lookup
    kvad corpus python data/python
    kvad corpus reverse data/reverse
    """


@create_group.command()
@folder_argument
@click.option("--words", type=int, default=4_000_000, show_default=True, help="In all.")
@click.option("--longest", type=int, default=511, show_default=True, help="Words of a text.")
@click.option("--seed", type=int, default=0, show_default=True)
@json_option
def create_lookup(folder: Path, words: int, longest: int, seed: int, as_json: bool) -> None:
    """Texts whose questions can only be answered by looking back: bindings, noise and questions, a text a line.

    \b
    kvad corpus lookup data/lookup
    kvad train data/lookup --config runs/lookup-cpu.toml --out runs/lookup-cpu
    """
    from kvad import datasets, text

    if longest < datasets.synthetic.MIN_WORDS or words < 1:
        raise UsageError(
            f"--words {words}, --longest {longest}: one word at least, and texts of {datasets.synthetic.MIN_WORDS}"
        )
    _check_free(folder)
    texts = list(datasets.synthetic.episodes(words, longest, seed))
    text.base.write_text(folder / "texts.txt", "\n".join(texts) + "\n")
    size = (folder / "texts.txt").stat().st_size
    if as_json:
        emit_json({"folder": folder, "texts": len(texts), "bytes": size, "words": words, "seed": seed})
    else:
        click.echo(f"{folder / 'texts.txt'}: {len(texts):,} texts, {format_bytes(size)}")


@create_group.command()
@folder_argument
@json_option
def create_python(folder: Path, as_json: bool) -> None:
    """The sources of this Python's library: DIR/train, and DIR/held-out for a tenth of the files, by their names.

    What the benches read by default is that tenth, so a model trained on DIR/train has not seen it.

    \b
    kvad corpus python data/python
    kvad train data/python/train --config runs/endless-rope.toml --out runs/endless-rope
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


@create_group.command()
@folder_argument
@click.option("--seed", type=int, default=42, show_default=True)
@json_option
def create_copy(folder: Path, seed: int, as_json: bool) -> None:
    """Pairs that repeat: ten numbers out of ten, 32,000 times (train.tsv), and dev.tsv, test.tsv of 1,000 each.

    \b
    kvad corpus copy data/copy
    kvad train runs/copy.toml data/copy/train.tsv --validation data/copy/dev.tsv --out runs/copy
    kvad eval runs/copy data/copy/test.tsv
    """
    _write_task("copy", folder, seed, as_json)


@create_group.command()
@folder_argument
@click.option("--seed", type=int, default=42, show_default=True)
@json_option
def create_reverse(folder: Path, seed: int, as_json: bool) -> None:
    """Pairs that turn round: 1 to 25 numbers out of fifty, 40,000 times; dev.tsv and test.tsv: 1,000 of up to 30.

    \b
    kvad corpus reverse data/reverse
    kvad train runs/reverse.toml data/reverse/train.tsv --validation data/reverse/dev.tsv --out runs/reverse
    kvad eval runs/reverse data/reverse/test.tsv --tokenized spaces
    """
    _write_task("reverse", folder, seed, as_json)


def _write_task(name: str, folder: Path, seed: int, as_json: bool) -> None:
    from kvad import datasets, text

    _check_free(folder)
    drill = datasets.synthetic.SYNTHETIC_TASKS[name]
    for part in drill.parts:
        text.base.write_text(folder / f"{part.name}.tsv", "".join(f"{a}\t{b}\n" for a, b in drill.pairs(part, seed)))
    counts = {part.name: part.num_pairs for part in drill.parts}
    if as_json:
        emit_json({"folder": folder, "pairs": counts, "seed": seed})
        return
    for written, pairs in counts.items():
        click.echo(f"{folder / written}.tsv: {pairs:,} pairs")


def _check_free(folder: Path) -> None:
    """What is there is somebody's: it is not mixed with what is made."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file, and a corpus is a folder", "choose another name")
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty", "choose another folder, or remove it")
