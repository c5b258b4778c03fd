"""``kvad session``: what the cache holds of a text, in a file from which another process goes on.

A session is opened with the policy, formats and blocks that it was made with, where the command does not say others.
No torch until a model is opened; ``list``, ``show`` and ``rm`` read headers only.

``kvad prefix add|list|show|rm``: texts whose keys and values stay, so that nobody computes them again.

No torch but for ``add``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from kvad import cache as cache_lib
from kvad import storage
from kvad.cache import offload, sessions
from kvad.cache.offload import DiskBlockStore, PinnedPrefix
from kvad.cli.cache_options import parse_policy_options
from kvad.cli.model_options import (
    InterruptFlag,
    add_cache_options,
    open_llm,
    parse_sampling_options,
    read_prompt_text,
    resolve_sampling_options,
    sampling_options,
)
from kvad.cli.options import SectionedCommand, emit_json, format_bytes, json_option, model_argument, tokenizer_folder
from kvad.errors import RequestError, SaveError, StorageError, UsageError, format_count

CommandT = TypeVar("CommandT", bound=Callable[..., Any])
MAX_SHOWN_TOKENS = 32  # tokens at the end of a session

name_argument = click.argument("name", metavar="NAME")
sessions_option = click.option(
    "--sessions",
    envvar=sessions.directory.SESSION_DIR_VARIABLE,
    metavar="FOLDER",
    type=click.Path(path_type=Path, file_okay=False),
    help=f"Where sessions are [default: {sessions.directory.SESSION_DIR_VARIABLE}, else the user's data folder].",
)


def prompt_options(command: CommandT) -> CommandT:
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
def session_group() -> None:
    """Save what the cache holds of a text, and go on from it in another process without computing it again.

    \b
    kvad session save runs/demo notes --file notes.txt
    kvad session load runs/demo notes --prompt "In short: " --max-tokens 64
    kvad session list
    """


@session_group.command(cls=SectionedCommand)
@model_argument
@name_argument
@prompt_options
@add_cache_options
@sessions_option
@click.option("--replace", "over", is_flag=True, help="Write over a session of this name.")
@json_option
def session_save(model: Path, name: str, over: bool, as_json: bool, **options: Any) -> None:
    """Read a text into the cache, and save it as session NAME.

    \b
    kvad session save runs/demo notes --file notes.txt
    cat notes.txt | kvad session save runs/demo notes --prompt - --policy "sinks(4, 1020)"
    """
    text = read_prompt_text(options["prompt"], options["file"])
    if not text:
        raise UsageError("there is no text to save", "--prompt TEXT, or --file FILE")
    path = sessions.directory.session_path(name, _session_folder(options))
    if path.exists() and not over:
        raise UsageError(f"session {name} exists", "--replace writes over it; kvad session load goes on with it")
    parse_policy_options(options)
    _prepare(path)
    with open_llm(model, options, rows=1) as llm:
        opened = llm.session()
        opened.path, opened.name = path, name
        opened.append(text, source=options["source"])
        nbytes = opened.save()
        tokens = len(opened.tokens)
    if as_json:
        emit_json({"session": name, "path": path, "tokens": tokens, "bytes": nbytes})
    else:
        click.echo(f"{name}: {format_count(tokens, 'token')}, {format_bytes(nbytes)} in {path}")


@session_group.command(cls=SectionedCommand)
@model_argument
@name_argument
@prompt_options
@sampling_options
@add_cache_options
@sessions_option
@click.option("--no-save", is_flag=True, help="Leave the session as it was.")
@json_option
def session_continue(model: Path, name: str, no_save: bool, as_json: bool, **options: Any) -> None:
    """Go on with session NAME: add a text, print how it continues, and save it.

    \b
    kvad session load runs/demo notes --prompt "In short: " --max-tokens 64 --temperature 0
    """
    given, text = parse_sampling_options(options), read_prompt_text(options["prompt"], options["file"])
    path, header = read_session_header(name, options)
    parse_policy_options(options)
    with open_llm(model, with_saved_options(options, header), rows=1) as llm:
        opened = llm.session(path)
        opened.name = name
        before, sampling = len(opened.tokens), resolve_sampling_options(llm, given, options["bad_word"])
        if "seed" not in given and not sampling.greedy:
            sampling = replace(sampling, seed=opened.seed)
        said, finish = "", "cancelled"
        with InterruptFlag() as stop, closing(opened.stream(text, sampling, source=options["source"])) as pieces:
            for piece in pieces:
                said, finish = said + piece.text, piece.finish_reason or finish
                if not as_json:
                    click.echo(piece.text if llm.tokenizer is not None else f"{piece.token_id} ", nl=False)
                if stop.requested:
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
        click.echo(f"kvad: {told['restored']:,} of {format_count(before, 'token')} restored{missed}", err=True)
    click.get_current_context().exit(130 if stop.requested else 0)


@session_group.command(name="list")
@sessions_option
@json_option
def session_list(as_json: bool, **options: Any) -> None:
    """The sessions that there are.  Files that are damaged, or none of ours, are named as such.

    \b
    kvad session list
    kvad session list --sessions /mnt/sessions --json
    """
    folder = _session_folder(options)
    sessions.directory.remove_session_leftovers(folder)
    found = list(sessions.directory.list_sessions(folder))
    rows = [
        {
            "name": each.path.stem,
            "state": each.state,
            **(_summary(each.header) if each.header else {"says": each.problem}),
        }
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


@session_group.command()
@name_argument
@click.option(
    "--model", metavar="MODEL", type=click.Path(path_type=Path), help="Its model: to show the end of the text."
)
@sessions_option
@json_option
def session_show(name: str, model: Path | None, as_json: bool, **options: Any) -> None:
    """What a session is: of which model, how it is kept, how long; with --model the end of its text.

    Its header is read, no more: kvad doctor FOLDER reads every byte.

    \b
    kvad session show notes
    kvad session show notes --model runs/demo
    """
    path, header = read_session_header(name, options)
    told: dict[str, Any] = {"name": name, "path": path, **_summary(header), "identity": dict(header.fingerprint)}
    if model is not None:
        from kvad.text import load_tokenizer

        tokenizer = load_tokenizer(model if model.is_file() else tokenizer_folder(model))
        if tokenizer.fingerprint() != header.fingerprint["tokenizer"]:
            raise StorageError(f"session {name}: its tokens are of another tokenizer than {model}", reason="other")
        told["end"] = tokenizer.decode(sessions.directory.read_tokens(path, MAX_SHOWN_TOKENS), skip_specials=False)
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


@session_group.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@sessions_option
@json_option
def session_rm(names: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Remove sessions.  A file that is none is left as it is.

    \b
    kvad session rm notes
    """
    folder = _session_folder(options)
    paths = [sessions.directory.session_path(name, folder) for name in names]
    for name, path in zip(names, paths, strict=True):
        if not path.exists():
            raise UsageError(f"there is no session {name} in {folder}", "kvad session list has their names")
        sessions.directory.check_overwritable(path)
    for path in dict.fromkeys(paths):
        path.unlink()
    if as_json:
        emit_json({"folder": folder, "removed": list(dict.fromkeys(names))})


# ---------------------------------------------------------------- what they share


def read_session_header(name: str, options: Mapping[str, Any]) -> tuple[Path, storage.container.Header]:
    """The file of session ``name``, and its header.  UsageError: there is none; EntryError: it is damaged, or another
    file."""
    path = sessions.directory.session_path(name, _session_folder(options))
    return path, _session(path)


def with_saved_options(options: Mapping[str, Any], header: storage.container.Header) -> dict[str, Any]:
    """A command's options, and where they say nothing of the cache, what the session was made with."""
    said, cache = dict(options), header.metadata.get("said", {}).get("cache", {})
    together = (
        {"policy": "policy", "on_full": "on_full", "endless": "endless"},
        {"cache_dtype": "dtype", "cache_keys": "keys", "cache_values": "values"},
        {"layout": "layout", "block_size": "block_size"},
        {"rotate": "rotate"},
    )
    for names in together:
        if not any(options.get(option) for option in names):
            said.update({option: cache.get(field) for option, field in names.items()})
    if cache.get("on_full") in cache_lib.config.CONTINUING_MODES and options.get("context") is None:
        said["context"] = cache.get("capacity")  # it decides what such a policy keeps
    return {**said, "endless": bool(said["endless"])}


def _prepare(path: Path) -> None:
    """Before a text is computed for it: the folder can be had, and no file that is none of ours stands there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        sessions.directory.remove_session_leftovers(path.parent)
        sessions.directory.check_overwritable(path)
    except OSError as error:
        raise SaveError(f"{path}: {error.strerror}", "name another folder: --sessions FOLDER") from None


def _session_folder(options: Mapping[str, Any]) -> Path:
    folder = options["sessions"]
    return folder if folder is not None else sessions.directory.default_session_dir()


def _session(path: Path) -> storage.container.Header:
    """The header of a session.  UsageError where there is none; EntryError for a file that is damaged or another."""
    try:
        header = storage.container.read_header(path)
    except StorageError as error:
        if error.reason != "missing":
            raise
        raise UsageError(
            f"there is no session {path.stem} in {path.parent}", "kvad session list has their names"
        ) from None
    if header.kind != sessions.directory.CONTAINER_KIND:
        raise StorageError(f"{path}: it is a {header.kind}, no session", "it is left as it is", reason="alien")
    return header


def _summary(header: storage.container.Header) -> dict[str, Any]:
    facts = header.metadata
    said = facts.get("said", {})
    return {
        "tokens": facts.get("history", 0),
        "restored": facts.get("length", 0),
        "bytes": header.nbytes,
        "policy": header.fingerprint.get("policy", ""),
        "formats": cache_lib.quantization.join_format_names(
            header.fingerprint.get("keys", ""), header.fingerprint.get("values", "")
        ),
        **{key: said.get(key, "") for key in ("model", "created", "saved", "kvad", "seed")},
        "cache": said.get("cache", {}),
    }


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
    options["tier"] = options["tier"] or storage.filesystem.user_cache_dir("tier")
    from kvad.engine import pin_prefix

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
    told = [_prefix_summary(folder, pin) for pin in offload.pinned.read_pinned_prefixes(folder)]
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
    pin = offload.pinned.find_pinned_prefix(folder, name)
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
    pin = offload.pinned.find_pinned_prefix(folder, name)
    others = {key for other in offload.pinned.read_pinned_prefixes(folder) if other.name != name for key in other.keys}
    own = [key for key in pin.keys if key not in others]
    offload.pinned.remove_pinned_prefix(folder, name)
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
    folder = storage.filesystem.user_cache_dir("tier") if tier is None else tier
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
