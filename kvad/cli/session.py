"""``kvad session``: what the cache holds of a text, in a file from which another process goes on.

A session is opened with the policy, formats and blocks that it was made with, where the command does not say others.
No torch until a model is opened; ``list``, ``show`` and ``rm`` read headers only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from kvad.cache.entry import Header, read_header
from kvad.cache.formats import joined
from kvad.cache.full import GOES_ON
from kvad.cache.sessions import KIND, VARIABLE, check_ours, default_folder, history, listed, named, sweep
from kvad.cli.common import emit_json, format_bytes, json_option, model_argument, words_folder
from kvad.cli.helping import Sectioned
from kvad.cli.policies import policies_asked
from kvad.cli.running import Interrupt, cache_options, open_llm, read_text
from kvad.cli.sampling import choose_sampling, read_sampling, sampling_options
from kvad.errors import EntryError, SaveError, UsageError, counted

__all__ = ["as_saved", "saved", "session", "sessions_option"]

Command = TypeVar("Command", bound=Callable[..., Any])
SHOWN = 32  # tokens at the end of a session

name_argument = click.argument("name", metavar="NAME")
sessions_option = click.option(
    "--sessions",
    envvar=VARIABLE,
    metavar="FOLDER",
    type=click.Path(path_type=Path, file_okay=False),
    help=f"Where sessions are [default: {VARIABLE}, else the user's data folder].",
)


def prompt_options(command: Command) -> Command:
    options = [
        click.option("--prompt", metavar="TEXT", help="What is added to the session; - reads standard input."),
        click.option(
            "--file", metavar="FILE", type=click.Path(path_type=Path), help="A file of it, UTF-8; - is standard input."
        ),
        click.option("--source", metavar="TEXT", help="Of an encoder-decoder, with the first text: what it answers."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.group()
def session() -> None:
    """Save what the cache holds of a text, and go on from it in another process without computing it again.

    \b
    kvad session save runs/demo notes --file notes.txt
    kvad session load runs/demo notes --prompt "In short: " --max-tokens 64
    kvad session list
    """


@session.command(cls=Sectioned)
@model_argument
@name_argument
@prompt_options
@cache_options
@sessions_option
@click.option("--replace", "over", is_flag=True, help="Write over a session of this name.")
@json_option
def save(model: Path, name: str, over: bool, as_json: bool, **options: Any) -> None:
    """Read a text into the cache, and save it as session NAME.

    \b
    kvad session save runs/demo notes --file notes.txt
    cat notes.txt | kvad session save runs/demo notes --prompt - --policy "sinks(4, 1020)"
    """
    text = read_text(options["prompt"], options["file"])
    if not text:
        raise UsageError("there is no text to save", "--prompt TEXT, or --file FILE")
    path = named(name, _folder(options))
    if path.exists() and not over:
        raise UsageError(f"session {name} exists", "--replace writes over it; kvad session load goes on with it")
    policies_asked(options)
    _prepare(path)
    with open_llm(model, options, rows=1) as llm:
        opened = llm.session()
        opened.path, opened.name = path, name
        opened.read(text, source=options["source"])
        nbytes = opened.save()
        tokens = len(opened.tokens)
    if as_json:
        emit_json({"session": name, "path": path, "tokens": tokens, "bytes": nbytes})
    else:
        click.echo(f"{name}: {counted(tokens, 'token')}, {format_bytes(nbytes)} in {path}")


@session.command(cls=Sectioned)
@model_argument
@name_argument
@prompt_options
@sampling_options
@cache_options
@sessions_option
@click.option("--no-save", is_flag=True, help="Leave the session as it was.")
@json_option
def load(model: Path, name: str, no_save: bool, as_json: bool, **options: Any) -> None:
    """Go on with session NAME: add a text, print how it continues, and save it.

    \b
    kvad session load runs/demo notes --prompt "In short: " --max-tokens 64 --temperature 0
    """
    given, text = read_sampling(options), read_text(options["prompt"], options["file"])
    path, header = saved(name, options)
    policies_asked(options)
    with open_llm(model, as_saved(options, header), rows=1) as llm:
        opened = llm.session(path)
        opened.name = name
        before, sampling = len(opened.tokens), choose_sampling(llm, given, options["bad_word"])
        if "seed" not in given and not sampling.greedy:
            sampling = replace(sampling, seed=opened.seed)
        said, finish = "", "cancelled"
        with Interrupt() as stop, closing(opened.stream(text, sampling, source=options["source"])) as pieces:
            for piece in pieces:
                said, finish = said + piece.text, piece.finish or finish
                if not as_json:
                    click.echo(piece.text if llm.tokenizer is not None else f"{piece.token} ", nl=False)
                if stop.asked:
                    break
        told = {
            "session": name,
            "path": path,
            "model": model,
            "restored": opened.reused,
            "before": before,
            "missed": opened.missed,
            "text": said,
            "finish_reason": finish,
            "tokens": len(opened.tokens),
            "bytes": None if no_save else opened.save(),
        }
    if as_json:
        emit_json(told)
    else:
        click.echo()
        missed = f" ({told['missed']})" if told["missed"] else ""
        click.echo(f"kvad: {told['restored']:,} of {counted(before, 'token')} restored{missed}", err=True)
    click.get_current_context().exit(130 if stop.asked else 0)


@session.command(name="list")
@sessions_option
@json_option
def list_command(as_json: bool, **options: Any) -> None:
    """The sessions that there are.  Files that are damaged, or none of ours, are named as such.

    \b
    kvad session list
    kvad session list --sessions /mnt/sessions --json
    """
    folder = _folder(options)
    sweep(folder)
    found = list(listed(folder))
    rows = [
        {"name": each.path.stem, "state": each.state, **(_summary(each.header) if each.header else {"says": each.says})}
        for each in found
    ]
    if as_json:
        emit_json({"folder": folder, "sessions": rows})
        return
    if not rows:
        click.echo(f"kvad: no session in {folder}", err=True)
    width = max((len(row["name"]) for row in rows), default=0)
    for row in rows:
        if row["state"] != "whole":
            click.echo(f"{row['name']:<{width}}  {row['state']}: {row['says']}")
            continue
        size = format_bytes(row["bytes"])
        click.echo(f"{row['name']:<{width}}  {row['tokens']:>9,} tokens  {size:>10}  {row['saved']}  {row['model']}")


@session.command()
@name_argument
@click.option(
    "--model", metavar="MODEL", type=click.Path(path_type=Path), help="Its model: to show the end of the text."
)
@sessions_option
@json_option
def show(name: str, model: Path | None, as_json: bool, **options: Any) -> None:
    """What a session is: of which model, how it is kept, how long; with --model the end of its text.

    Its header is read, no more: kvad doctor FOLDER reads every byte.

    \b
    kvad session show notes
    kvad session show notes --model runs/demo
    """
    path, header = saved(name, options)
    told: dict[str, Any] = {"name": name, "path": path, **_summary(header), "identity": dict(header.identity)}
    if model is not None:
        from kvad.text.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(model if model.is_file() else words_folder(model))
        if tokenizer.fingerprint() != header.identity["tokenizer"]:
            raise EntryError(f"session {name}: its tokens are of another tokenizer than {model}", why="other")
        told["end"] = tokenizer.decode(history(path, SHOWN), skip_specials=False)
    if as_json:
        emit_json(told)
        return
    if model is not None:
        told["end"] = repr(told["end"])
    cache = told.pop("cache")
    told["cache"] = ", ".join(f"{key} {value}" for key, value in cache.items() if value not in (None, False))
    told["bytes"] = f"{told['bytes']:,}"
    identity = told.pop("identity")
    told["belongs to"] = ", ".join(f"{key} {value}" for key, value in identity.items() if value and key != "policy")
    for key, value in told.items():
        click.echo(f"{key:<10}  {value}")


@session.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@sessions_option
@json_option
def rm(names: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Remove sessions.  A file that is none is left as it is.

    \b
    kvad session rm notes
    """
    folder = _folder(options)
    paths = [named(name, folder) for name in names]
    for name, path in zip(names, paths, strict=True):
        if not path.exists():
            raise UsageError(f"there is no session {name} in {folder}", "kvad session list has their names")
        check_ours(path)
    for path in dict.fromkeys(paths):
        path.unlink()
    if as_json:
        emit_json({"folder": folder, "removed": list(dict.fromkeys(names))})


# ---------------------------------------------------------------- what they share


def saved(name: str, options: Mapping[str, Any]) -> tuple[Path, Header]:
    """The file of session ``name``, and its header.  UsageError: there is none; EntryError: it is damaged, or another
    file."""
    path = named(name, _folder(options))
    return path, _session(path)


def as_saved(options: Mapping[str, Any], header: Header) -> dict[str, Any]:
    """A command's options, and where they say nothing of the cache, what the session was made with."""
    said, cache = dict(options), header.facts.get("said", {}).get("cache", {})
    together = (
        {"policy": "policy", "on_full": "on_full", "endless": "endless"},
        {"cache_dtype": "dtype", "cache_keys": "keys", "cache_values": "values"},
        {"layout": "layout", "block_size": "block_size"},
        {"rotate": "rotate"},
    )
    for names in together:
        if not any(options.get(option) for option in names):
            said.update({option: cache.get(field) for option, field in names.items()})
    if cache.get("on_full") in GOES_ON and options.get("context") is None:
        said["context"] = cache.get("capacity")  # it decides what such a policy keeps
    return {**said, "endless": bool(said["endless"])}


def _prepare(path: Path) -> None:
    """Before a text is computed for it: the folder can be had, and no file that is none of ours stands there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        sweep(path.parent)
        check_ours(path)
    except OSError as error:
        raise SaveError(f"{path}: {error.strerror}", "name another folder: --sessions FOLDER") from None


def _folder(options: Mapping[str, Any]) -> Path:
    folder = options["sessions"]
    return folder if folder is not None else default_folder()


def _session(path: Path) -> Header:
    """The header of a session.  UsageError where there is none; EntryError for a file that is damaged or another."""
    try:
        header = read_header(path)
    except EntryError as error:
        if error.why != "missing":
            raise
        raise UsageError(
            f"there is no session {path.stem} in {path.parent}", "kvad session list has their names"
        ) from None
    if header.kind != KIND:
        raise EntryError(f"{path}: it is a {header.kind}, no session", "it is left as it is", why="alien")
    return header


def _summary(header: Header) -> dict[str, Any]:
    facts = header.facts
    said = facts.get("said", {})
    return {
        "tokens": facts.get("history", 0),
        "restored": facts.get("length", 0),
        "bytes": header.nbytes,
        "policy": header.identity.get("policy", ""),
        "formats": joined(header.identity.get("keys", ""), header.identity.get("values", "")),
        **{key: said.get(key, "") for key in ("model", "created", "saved", "kvad", "seed")},
        "cache": said.get("cache", {}),
    }
