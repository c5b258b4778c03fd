"""``kvad prefix add|list|show|rm``: texts whose keys and values stay, so that nobody computes them again.

No torch but for ``add``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from kvad.cache.disk import user_cache
from kvad.cache.pins import Pin, find_pin, read_pins, remove_pin
from kvad.cache.shelf import Shelf
from kvad.cli.common import emit_json, format_bytes, json_option, model_argument
from kvad.cli.helping import Sectioned
from kvad.cli.running import cache_options, open_llm, read_text
from kvad.errors import RequestError, UsageError, counted

__all__ = ["prefix"]

Command = TypeVar("Command", bound=Callable[..., Any])
EVERYTHING = 1 << 62  # bytes: nothing is evicted where a folder is only tidied


def _tier_option(command: Command) -> Command:
    what = click.option(
        "--tier",
        metavar="FOLDER",
        type=click.Path(path_type=Path),
        help="Where [default: kvad/tier in your cache folder].",
    )
    return what(command)


@click.group()
def prefix() -> None:
    """Keep the keys and values of a text that many requests begin with.

    \b
    kvad prefix add runs/demo --file system.txt --name system --tier cache
    kvad generate runs/demo "$(cat system.txt) ..." --tier cache --stats
    kvad prefix list --tier cache
    """


@prefix.command(cls=Sectioned)
@model_argument
@click.option("--prompt", metavar="TEXT", help="The text; - reads standard input.")
@click.option(
    "--file", metavar="FILE", type=click.Path(path_type=Path), help="A file of it, UTF-8; - is standard input."
)
@click.option("--name", metavar="NAME", required=True, help="What it is called from now on.")
@cache_options
@json_option
def add(model: Path, prompt: str | None, file: Path | None, name: str, as_json: bool, **options: Any) -> None:
    """Compute a text's whole blocks, store them on the disk, and pin them: they are never evicted.

    A request finds them if it begins with the same tokens and its cache is of the same kind: give the same
    --cache-dtype, --policy and --block-size.  An equal name is replaced.

    \b
    kvad prefix add runs/demo --file system.txt --name system --tier cache
    kvad prefix add runs/demo --prompt - --name system --cache-dtype int8 < system.txt
    """
    if prompt is None and file is None:
        raise click.UsageError("give the text with --prompt, or its --file")
    text = read_text(prompt, file)
    options["tier"] = options["tier"] or user_cache("tier")
    from kvad.engine.prefixes import keep_prefix

    with open_llm(model, options, rows=1) as llm:
        if llm.model.config.kind == "encoder-decoder":
            raise RequestError(
                "what an encoder-decoder keeps of a text depends on its source: there is no prefix for many requests",
                "kvad session save keeps one text with its source",
            )
        pin = keep_prefix(llm.engine, llm.encode(text), name, text)
    told = _told(options["tier"], pin)
    if as_json:
        emit_json(told)
    else:
        click.echo(_line(told))


@prefix.command("list")
@_tier_option
@json_option
def list_(tier: Path | None, as_json: bool) -> None:
    """The prefixes of a folder.

    \b
    kvad prefix list --tier cache --json
    """
    folder = _folder(tier)
    told = [_told(folder, pin) for pin in read_pins(folder)]
    if as_json:
        emit_json({"tier": folder, "prefixes": told})
        return
    for each in told:
        click.echo(_line(each))
    if not told:
        click.echo(f"{folder} has no prefix", err=True)


@prefix.command()
@click.argument("name")
@_tier_option
@json_option
def show(name: str, tier: Path | None, as_json: bool) -> None:
    """What one prefix is, and what it belongs to.

    \b
    kvad prefix show system --tier cache
    """
    folder = _folder(tier)
    pin = find_pin(folder, name)
    told = {**_told(folder, pin), "identity": dict(pin.identity)}
    if as_json:
        emit_json(told)
        return
    click.echo(_line(told))
    click.echo(f"text       {pin.text!r}")
    for part, value in pin.identity.items():
        if value:
            click.echo(f"{part:<10} {value}")


@prefix.command()
@click.argument("name")
@_tier_option
@json_option
def rm(name: str, tier: Path | None, as_json: bool) -> None:
    """Forget a prefix, and remove the blocks that no other one has.

    \b
    kvad prefix rm system --tier cache
    """
    folder = _folder(tier)
    pin = find_pin(folder, name)
    others = {key for other in read_pins(folder) if other.name != name for key in other.keys}
    own = [key for key in pin.keys if key not in others]
    remove_pin(folder, name)
    try:
        shelf = Shelf(folder, EVERYTHING)
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
        click.echo(f"{name}: forgotten, {counted(removed, 'block')} removed{f' ({note})' if note else ''}")


def _folder(tier: Path | None) -> Path:
    folder = user_cache("tier") if tier is None else tier
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder", "name the tier's: --tier FOLDER")
    return folder


def _told(folder: Path, pin: Pin) -> dict[str, Any]:
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
    return (
        f"{told['name']:<10} {counted(told['tokens'], 'token')} in {counted(told['blocks'], 'block')}{missing}, {size}"
    )
