"""``kvad session`` saves the cache of a text in a file; ``kvad prefix`` pins prefixes in the prefix cache.

A session is opened with the policy, formats and block size that it was saved with, unless the command sets others.
No torch until a model is loaded: ``list``, ``show`` and ``rm`` read headers only.
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
MAX_SHOWN_TOKENS = 32  # tokens shown from the end of a session

name_argument = click.argument("name", metavar="NAME")
sessions_option = click.option(
    "--session-dir",
    envvar=sessions.directory.SESSION_DIR_VARIABLE,
    metavar="FOLDER",
    type=click.Path(path_type=Path, file_okay=False),
    help=f"Folder of the sessions [default: {sessions.directory.SESSION_DIR_VARIABLE}, else the user's data folder].",
)


def prompt_options(command: CommandT) -> CommandT:
    options = [
        click.option("--prompt", metavar="TEXT", help="Text to add to the session; - reads standard input."),
        click.option(
            "--file",
            metavar="FILE",
            type=click.Path(path_type=Path),
            help="File with the text, UTF-8; - reads standard input.",
        ),
        click.option("--source", metavar="TEXT", help="Encoder input of an encoder-decoder, with the first text."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.group()
def session_group() -> None:
    """Save the cache of a text, and continue the text in another process without recomputing it.

    \b
    kvad session save runs/demo notes --file notes.txt
    kvad session continue runs/demo notes --prompt "In short: " --max-tokens 64
    kvad session list
    """


@session_group.command("save", cls=SectionedCommand)
@model_argument
@name_argument
@prompt_options
@add_cache_options
@sessions_option
@click.option("--overwrite", is_flag=True, help="Replace a session of this name.")
@json_option
def session_save(model: Path, name: str, overwrite: bool, as_json: bool, **options: Any) -> None:
    """Compute the cache of a text and save it as session NAME.

    \b
    kvad session save runs/demo notes --file notes.txt
    cat notes.txt | kvad session save runs/demo notes --prompt - --policy "sinks(4, 1020)"
    """
    text = read_prompt_text(options["prompt"], options["file"])
    if not text:
        raise UsageError("there is no text to save", "give --prompt TEXT or --file FILE")
    path = sessions.directory.session_path(name, _session_folder(options))
    if path.exists() and not overwrite:
        raise UsageError(f"session {name} exists", "--overwrite replaces it; kvad session continue adds to it")
    parse_policy_options(options)
    _prepare(path)
    with open_llm(model, options, max_num_seqs=1) as llm:
        opened = llm.session()
        opened.path, opened.name = path, name
        opened.append(text, encoder_input=options["source"])
        nbytes = opened.save()
        tokens = len(opened.tokens)
    if as_json:
        emit_json({"session": name, "path": path, "tokens": tokens, "bytes": nbytes})
    else:
        click.echo(f"{name}: {format_count(tokens, 'token')}, {format_bytes(nbytes)} in {path}")


@session_group.command("continue", cls=SectionedCommand)
@model_argument
@name_argument
@prompt_options
@sampling_options
@add_cache_options
@sessions_option
@click.option("--no-save", is_flag=True, help="Do not change the saved session.")
@json_option
def session_continue(model: Path, name: str, no_save: bool, as_json: bool, **options: Any) -> None:
    """Continue session NAME: add a text, print the continuation and save the session again.

    \b
    kvad session continue runs/demo notes --prompt "In short: " --max-tokens 64 --temperature 0
    """
    given, text = parse_sampling_options(options), read_prompt_text(options["prompt"], options["file"])
    path, header = read_session_header(name, options)
    parse_policy_options(options)
    with open_llm(model, with_saved_options(options, header), max_num_seqs=1) as llm:
        opened = llm.session(path)
        opened.name = name
        before, sampling = len(opened.tokens), resolve_sampling_options(llm, given, options["bad_word"])
        if "seed" not in given and not sampling.greedy:
            sampling = replace(sampling, seed=opened.seed)
        generated, finish = "", "abort"
        with InterruptFlag() as stop, closing(opened.stream(text, sampling, encoder_input=options["source"])) as chunks:
            for chunk in chunks:
                generated, finish = generated + chunk.text, chunk.finish_reason or finish
                if not as_json:
                    click.echo(chunk.text if llm.tokenizer is not None else f"{chunk.token_id} ", nl=False)
                if stop.requested:
                    break
        result = {
            "session": name,
            "path": path,
            "model": model,
            "restored": opened.reused,
            "before": before,
            "missed": opened.missed,
            "text": generated,
            "finish_reason": finish,
            "tokens": len(opened.tokens),
            "bytes": None if no_save else opened.save(),
        }
    if as_json:
        emit_json(result)
    else:
        click.echo()
        missed = f" ({result['missed']})" if result["missed"] else ""
        click.echo(f"kvad: {result['restored']:,} of {format_count(before, 'token')} restored{missed}", err=True)
    click.get_current_context().exit(130 if stop.requested else 0)


@session_group.command("list")
@sessions_option
@json_option
def session_list(as_json: bool, **options: Any) -> None:
    """List the sessions. Damaged files, and files that are not sessions, are marked.

    \b
    kvad session list
    kvad session list --session-dir /mnt/sessions --json
    """
    folder = _session_folder(options)
    sessions.directory.remove_session_leftovers(folder)
    files = list(sessions.directory.list_sessions(folder))
    rows = [
        {
            "name": file.path.stem,
            "state": file.state,
            **(_summary(file.header) if file.header else {"message": file.problem}),
        }
        for file in files
    ]
    if as_json:
        emit_json({"folder": folder, "sessions": rows})
        return
    if not rows:
        click.echo(f"kvad: no session in {folder}", err=True)
    width = max((len(row["name"]) for row in rows), default=0)
    for row in rows:
        if row["state"] != "whole":
            click.echo(f"{row['name']:<{width}}  {row['state']}: {row['message']}")
            continue
        size = format_bytes(row["bytes"])
        click.echo(f"{row['name']:<{width}}  {row['tokens']:>9,} tokens  {size:>10}  {row['saved']}  {row['model']}")


@session_group.command("show")
@name_argument
@click.option(
    "--model",
    metavar="MODEL",
    type=click.Path(path_type=Path),
    help="The model of the session, to show the end of the text.",
)
@sessions_option
@json_option
def session_show(name: str, model: Path | None, as_json: bool, **options: Any) -> None:
    """Show the model, the cache and the length of a session; with --model also the end of its text.

    Only the header is read; kvad doctor FOLDER reads every byte.

    \b
    kvad session show notes
    kvad session show notes --model runs/demo
    """
    path, header = read_session_header(name, options)
    result: dict[str, Any] = {"name": name, "path": path, **_summary(header), "fingerprint": dict(header.fingerprint)}
    if model is not None:
        from kvad.text import load_tokenizer

        tokenizer = load_tokenizer(model if model.is_file() else tokenizer_folder(model))
        if tokenizer.fingerprint() != header.fingerprint["tokenizer"]:
            raise StorageError(
                f"session {name}: it was saved with another tokenizer than that of {model}", reason="mismatch"
            )
        result["end"] = tokenizer.decode(sessions.directory.read_tokens(path, MAX_SHOWN_TOKENS), skip_specials=False)
    if as_json:
        emit_json(result)
        return
    if model is not None:
        result["end"] = repr(result["end"])
    cache = result.pop("cache")
    result["cache"] = ", ".join(f"{key} {value}" for key, value in cache.items() if value not in (None, False))
    result["bytes"] = f"{result['bytes']:,}"
    fingerprint = result.pop("fingerprint")
    result["belongs to"] = ", ".join(
        f"{key} {value}" for key, value in fingerprint.items() if value and key != "policy"
    )
    for key, value in result.items():
        click.echo(f"{key:<10}  {value}")


@session_group.command("rm")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@sessions_option
@json_option
def session_rm(names: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Remove sessions. Other files are not removed.

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


# ---------------------------------------------------------------- session files


def read_session_header(name: str, options: Mapping[str, Any]) -> tuple[Path, storage.container.Header]:
    """Return the file and the header of session ``name``.

    Raises:
        UsageError: If there is no such session.
        StorageError: If the file is damaged or is not a session.
    """
    path = sessions.directory.session_path(name, _session_folder(options))
    return path, _session(path)


def with_saved_options(options: Mapping[str, Any], header: storage.container.Header) -> dict[str, Any]:
    """Fill cache options that are not given with those that the session was saved with."""
    merged, cache = dict(options), header.metadata.get("writer", {}).get("cache", {})
    option_groups = (  # option -> CacheConfig field; a group is filled if none of its options is given
        {"policy": "policy", "overflow": "overflow", "endless": "endless"},
        {"cache_dtype": "dtype", "cache_key_dtype": "key_dtype", "cache_value_dtype": "value_dtype"},
        {"layout": "layout", "block_size": "block_size"},
        {"rope_at": "rope_at"},
    )
    for names in option_groups:
        if not any(options.get(option) for option in names):
            merged.update({option: cache.get(field) for option, field in names.items()})
    if cache.get("overflow") in cache_lib.config.CONTINUING_MODES and options.get("max_seq_len") is None:
        merged["max_seq_len"] = cache.get("max_seq_len")  # the kept tokens depend on it
    return {**merged, "endless": bool(merged["endless"])}


def _prepare(path: Path) -> None:
    """Check before the computation that the folder is writable and no foreign file would be overwritten."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        sessions.directory.remove_session_leftovers(path.parent)
        sessions.directory.check_overwritable(path)
    except OSError as error:
        raise SaveError(f"{path}: {error.strerror}", "choose another folder with --session-dir FOLDER") from None


def _session_folder(options: Mapping[str, Any]) -> Path:
    folder = options["session_dir"]
    return folder if folder is not None else sessions.directory.default_session_dir()


def _session(path: Path) -> storage.container.Header:
    """Read the header of a session file."""
    try:
        header = storage.container.read_header(path)
    except StorageError as error:
        if error.reason != "missing":
            raise
        raise UsageError(
            f"there is no session {path.stem} in {path.parent}", "kvad session list has their names"
        ) from None
    if header.kind != sessions.directory.CONTAINER_KIND:
        raise StorageError(f"{path}: it is a {header.kind}, not a session", "it was not changed", reason="foreign")
    return header


def _summary(header: storage.container.Header) -> dict[str, Any]:
    metadata = header.metadata
    writer = metadata.get("writer", {})
    return {
        "tokens": metadata.get("history", 0),
        "restored": metadata.get("length", 0),
        "bytes": header.nbytes,
        "policy": header.fingerprint.get("policy", ""),
        "formats": cache_lib.quantization.join_format_names(
            header.fingerprint.get("keys", ""), header.fingerprint.get("values", "")
        ),
        **{key: writer.get(key, "") for key in ("model", "created", "saved", "kvad", "seed")},
        "cache": writer.get("cache", {}),
    }


MAX_SIZE = 1 << 62  # bytes: removing a prefix must not evict blocks


def _dir_option(command: CommandT) -> CommandT:
    option = click.option(
        "--prefix-cache-dir",
        metavar="FOLDER",
        type=click.Path(path_type=Path),
        help="Folder of the prefix cache [default: kvad/prefix-cache in the user's cache folder].",
    )
    return option(command)


@click.group()
def prefix_group() -> None:
    """Pin the keys and values of a text that many requests begin with.

    \b
    kvad prefix add runs/demo --file system.txt --name system --prefix-cache-dir cache
    kvad generate runs/demo "$(cat system.txt) ..." --prefix-cache-dir cache --stats
    kvad prefix list --prefix-cache-dir cache
    """


@prefix_group.command("add", cls=SectionedCommand)
@model_argument
@click.option("--prompt", metavar="TEXT", help="Text of the prefix; - reads standard input.")
@click.option(
    "--file", metavar="FILE", type=click.Path(path_type=Path), help="File with the text, UTF-8; - reads standard input."
)
@click.option("--name", metavar="NAME", required=True, help="Name of the prefix.")
@add_cache_options
@json_option
def prefix_add(model: Path, prompt: str | None, file: Path | None, name: str, as_json: bool, **options: Any) -> None:
    """Compute the full blocks of a text, store them on disk and pin them: they are never evicted.

    A request uses them if it begins with the same tokens and has the same --cache-dtype, --policy and --block-size.
    A prefix of the same name is replaced.

    \b
    kvad prefix add runs/demo --file system.txt --name system --prefix-cache-dir cache
    kvad prefix add runs/demo --prompt - --name system --cache-dtype int8 < system.txt
    """
    if prompt is None and file is None:
        raise click.UsageError("give the text with --prompt or --file")
    text = read_prompt_text(prompt, file)
    options["prefix_cache_dir"] = options["prefix_cache_dir"] or storage.filesystem.user_cache_dir("prefix-cache")
    from kvad.engine import pin_prefix

    with open_llm(model, options, max_num_seqs=1) as llm:
        if llm.model.config.kind == "encoder-decoder":
            raise RequestError(
                "the cache of an encoder-decoder depends on its source: it has no prefix for many requests",
                "kvad session save saves one text with its source",
            )
        prefix = pin_prefix(llm.engine, llm.encode(text), name, text)
    summary = _prefix_summary(options["prefix_cache_dir"], prefix)
    if as_json:
        emit_json(summary)
    else:
        click.echo(_line(summary))


@prefix_group.command("list")
@_dir_option
@json_option
def prefix_list(prefix_cache_dir: Path | None, as_json: bool) -> None:
    """List the pinned prefixes.

    \b
    kvad prefix list --prefix-cache-dir cache --json
    """
    folder = _prefix_folder(prefix_cache_dir)
    summaries = [_prefix_summary(folder, prefix) for prefix in offload.pinned.read_pinned_prefixes(folder)]
    if as_json:
        emit_json({"prefix_cache_dir": folder, "prefixes": summaries})
        return
    for summary in summaries:
        click.echo(_line(summary))
    if not summaries:
        click.echo(f"{folder} contains no prefix", err=True)


@prefix_group.command("show")
@click.argument("name")
@_dir_option
@json_option
def prefix_show(name: str, prefix_cache_dir: Path | None, as_json: bool) -> None:
    """Show a prefix and the model and cache that it belongs to.

    \b
    kvad prefix show system --prefix-cache-dir cache
    """
    folder = _prefix_folder(prefix_cache_dir)
    prefix = offload.pinned.find_pinned_prefix(folder, name)
    summary = {**_prefix_summary(folder, prefix), "fingerprint": dict(prefix.fingerprint)}
    if as_json:
        emit_json(summary)
        return
    click.echo(_line(summary))
    click.echo(f"text       {prefix.text!r}")
    for part, value in prefix.fingerprint.items():
        if value:
            click.echo(f"{part:<10} {value}")


@prefix_group.command("rm")
@click.argument("name")
@_dir_option
@json_option
def prefix_rm(name: str, prefix_cache_dir: Path | None, as_json: bool) -> None:
    """Unpin a prefix and remove the blocks that no other prefix uses.

    \b
    kvad prefix rm system --prefix-cache-dir cache
    """
    folder = _prefix_folder(prefix_cache_dir)
    prefix = offload.pinned.find_pinned_prefix(folder, name)
    others = {key for other in offload.pinned.read_pinned_prefixes(folder) if other.name != name for key in other.keys}
    keys = [key for key in prefix.keys if key not in others]
    offload.pinned.remove_pinned_prefix(folder, name)
    try:
        store = DiskBlockStore(folder, MAX_SIZE)
    except BlockingIOError:
        note = "another process uses the folder: the blocks are evicted when it needs space"
        removed = 0
    else:
        note, removed = "", sum(key in store for key in keys)
        for key in keys:
            store.drop(key)
        store.release()
    if as_json:
        emit_json({"prefix_cache_dir": folder, "name": name, "removed_blocks": removed, "note": note})
    else:
        click.echo(f"{name}: unpinned, {format_count(removed, 'block')} removed{f' ({note})' if note else ''}")


def _prefix_folder(prefix_cache_dir: Path | None) -> Path:
    folder = storage.filesystem.user_cache_dir("prefix-cache") if prefix_cache_dir is None else prefix_cache_dir
    if not folder.is_dir():
        raise UsageError(
            f"{folder} is not a folder", "give the folder of the prefix cache with --prefix-cache-dir FOLDER"
        )
    return folder


def _prefix_summary(folder: Path, prefix: PinnedPrefix) -> dict[str, Any]:
    sizes = [path.stat().st_size for key in prefix.keys if (path := folder / f"{key}.kv").exists()]
    return {
        "name": prefix.name,
        "tokens": prefix.tokens,
        "num_blocks": len(prefix.keys),
        "missing": len(prefix.keys) - len(sizes),
        "bytes": sum(sizes),
        "text": prefix.text,
        "prefix_cache_dir": folder,
    }


def _line(summary: dict[str, Any]) -> str:
    missing = f", {summary['missing']} of them missing" if summary["missing"] else ""
    size = format_bytes(summary["bytes"])
    blocks = format_count(summary["num_blocks"], "block")
    return f"{summary['name']:<10} {format_count(summary['tokens'], 'token')} in {blocks}{missing}, {size}"
