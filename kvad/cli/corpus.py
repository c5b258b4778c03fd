"""``kvad corpus lookup|python|copy|reverse DIR``: texts to train on that every machine can make.  No torch."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from kvad.cli.common import emit_json, format_bytes, json_option
from kvad.errors import UsageError

__all__ = ["create_group"]

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
    from kvad.lab.lookup import MIN_WORDS, episodes
    from kvad.text.base import write_text

    if longest < MIN_WORDS or words < 1:
        raise UsageError(f"--words {words}, --longest {longest}: one word at least, and texts of {MIN_WORDS}")
    _check_free(folder)
    texts = list(episodes(words, longest, seed))
    write_text(folder / "texts.txt", "\n".join(texts) + "\n")
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
    from kvad.lab.sources import find_sources, is_held_out

    _check_free(folder)
    sources = find_sources()
    sizes = {"train": 0, "held-out": 0}
    for path in sources.files:
        name = path.relative_to(sources.root).as_posix()
        part = "held-out" if is_held_out(name) else "train"
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
    from kvad.lab.drills import SYNTHETIC_TASKS
    from kvad.text.base import write_text

    _check_free(folder)
    drill = SYNTHETIC_TASKS[name]
    for part in drill.parts:
        write_text(folder / f"{part.name}.tsv", "".join(f"{a}\t{b}\n" for a, b in drill.pairs(part, seed)))
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
