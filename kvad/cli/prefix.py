"""``kvad prefix add|list|show|rm``: texts whose keys and values stay, so that nobody computes them again.

No torch but for ``add``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from kvad.cache.disk import user_cache_dir
from kvad.cache.pins import PinnedPrefix, find_pinned_prefix, read_pinned_prefixes, remove_pinned_prefix
from kvad.cache.shelf import DiskBlockStore
from kvad.cli.common import emit_json, format_bytes, json_option, model_argument
from kvad.cli.helping import SectionedCommand
from kvad.cli.running import add_cache_options, open_llm, read_prompt_text
from kvad.errors import RequestError, UsageError, format_count

__all__ = ["prefix_group"]

CommandT = TypeVar("CommandT", bound=Callable[..., Any])
MAX_SIZE = 1 << 62  # bytes: nothing is evicted where a folder is only tidied


def _dir_option(command: CommandT) -> CommandT:
    what = click.option(
        "--tier",
        metavar="FOLDER",
        type=click.Path(path_type=Path),
        help="Where [default: kvad/tier in your cache folder].",
    )
    return what(command)


@click.group()
def prefix_group() -> None:
    """Keep the keys and values of a text that many requests begin with.

    \b
    kvad prefix add runs/demo --file system.txt --name system --tier cache
    kvad generate runs/demo "$(cat system.txt) ..." --tier cache --stats
    kvad prefix list --tier cache
    """


@prefix_group.command(cls=SectionedCommand)
@model_argument
@click.option("--prompt", metavar="TEXT", help="The text; - reads standard input.")
@click.option(
    "--file", metavar="FILE", type=click.Path(path_type=Path), help="A file of it, UTF-8; - is standard input."
)
@click.option("--name", metavar="NAME", required=True, help="What it is called from now on.")
@add_cache_options
@json_option
def prefix_add(model: Path, prompt: str | None, file: Path | None, name: str, as_json: bool, **options: Any) -> None:
    """Compute a text's whole blocks, store them on the disk, and pin them: they are never evicted.

    A request finds them if it begins with the same tokens and its cache is of the same kind: give the same
    --cache-dtype, --policy and --block-size.  An equal name is replaced.

    \b
    kvad prefix add runs/demo --file system.txt --name system --tier cache
    kvad prefix add runs/demo --prompt - --name system --cache-dtype int8 < system.txt
    """
    if prompt is None and file is None:
        raise click.UsageError("give the text with --prompt, or its --file")
    text = read_prompt_text(prompt, file)
    options["tier"] = options["tier"] or user_cache_dir("tier")
    from kvad.engine.prefixes import pin_prefix

    with open_llm(model, options, rows=1) as llm:
        if llm.model.config.kind == "encoder-decoder":
            raise RequestError(
                "what an encoder-decoder keeps of a text depends on its source: there is no prefix for many requests",
                "kvad session save keeps one text with its source",
            )
        pin = pin_prefix(llm.engine, llm.encode(text), name, text)
    told = _prefix_summary(options["tier"], pin)
    if as_json:
        emit_json(told)
    else:
        click.echo(_line(told))


@prefix_group.command("list")
@_dir_option
@json_option
def prefix_list(tier: Path | None, as_json: bool) -> None:
    """The prefixes of a folder.

    \b
    kvad prefix list --tier cache --json
    """
    folder = _prefix_folder(tier)
    told = [_prefix_summary(folder, pin) for pin in read_pinned_prefixes(folder)]
    if as_json:
        emit_json({"tier": folder, "prefixes": told})
        return
    for each in told:
        click.echo(_line(each))
    if not told:
        click.echo(f"{folder} has no prefix", err=True)


@prefix_group.command()
@click.argument("name")
@_dir_option
@json_option
def prefix_show(name: str, tier: Path | None, as_json: bool) -> None:
    """What one prefix is, and what it belongs to.

    \b
    kvad prefix show system --tier cache
    """
    folder = _prefix_folder(tier)
    pin = find_pinned_prefix(folder, name)
    told = {**_prefix_summary(folder, pin), "identity": dict(pin.fingerprint)}
    if as_json:
        emit_json(told)
        return
    click.echo(_line(told))
    click.echo(f"text       {pin.text!r}")
    for part, value in pin.fingerprint.items():
        if value:
            click.echo(f"{part:<10} {value}")


@prefix_group.command()
@click.argument("name")
@_dir_option
@json_option
def prefix_rm(name: str, tier: Path | None, as_json: bool) -> None:
    """Forget a prefix, and remove the blocks that no other one has.

    \b
    kvad prefix rm system --tier cache
    """
    folder = _prefix_folder(tier)
    pin = find_pinned_prefix(folder, name)
    others = {key for other in read_pinned_prefixes(folder) if other.name != name for key in other.keys}
    own = [key for key in pin.keys if key not in others]
    remove_pinned_prefix(folder, name)
    try:
        shelf = DiskBlockStore(folder, MAX_SIZE)
    except BlockingIOError:
        note = "another process holds the folder: its blocks go when it needs room"
        removed = 0
    else:
        note, removed = "", sum(key in shelf for key in own)
        for key in own:
            shelf.drop(key)
        shelf.release()
    if as_json:
        emit_json({"tier": folder, "name": name, "removed_blocks": removed, "note": note})
    else:
        click.echo(f"{name}: forgotten, {format_count(removed, 'block')} removed{f' ({note})' if note else ''}")


def _prefix_folder(tier: Path | None) -> Path:
    folder = user_cache_dir("tier") if tier is None else tier
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder", "name the tier's: --tier FOLDER")
    return folder


def _prefix_summary(folder: Path, pin: PinnedPrefix) -> dict[str, Any]:
    sizes = [path.stat().st_size for key in pin.keys if (path := folder / f"{key}.kv").exists()]
    return {
        "name": pin.name,
        "tokens": pin.tokens,
        "blocks": len(pin.keys),
        "missing": len(pin.keys) - len(sizes),
        "bytes": sum(sizes),
        "text": pin.text,
        "tier": folder,
    }


def _line(told: dict[str, Any]) -> str:
    missing = f", {told['missing']} of them missing" if told["missing"] else ""
    size = format_bytes(told["bytes"])
    return f"{told['name']:<10} {format_count(told['tokens'], 'token')} in {format_count(told['blocks'], 'block')}{missing}, {size}"
