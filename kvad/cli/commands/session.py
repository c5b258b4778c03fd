"""``kvad session`` saves the cache of a text in a file; ``kvad prefix`` pins prefixes in the prefix cache.

A session is opened with the policy, formats and block size that it was saved with, unless the command sets others.
No torch until a model is loaded: ``list``, ``show`` and ``rm`` read headers only.
"""

from __future__ import annotations

import dataclasses
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import click

from kvad import cache as cache_lib
from kvad import checkpoint, engine, storage
from kvad.cache import offload, sessions
from kvad.cache.offload import DiskBlockStore, PinnedPrefix
from kvad.cli.fields import CommandGroup, Options, argument, command, option
from kvad.cli.output import emit_json, exit_with, format_table, note, print_error, print_result
from kvad.cli.parameters import (
    CacheFlags,
    InterruptFlag,
    JsonOption,
    ModelArgument,
    PromptOptions,
    SamplingFlags,
    SessionDirOption,
    SpeculativeOptions,
    choose_seed,
    load_fields,
    load_tokenizer_of,
    open_llm,
)
from kvad.errors import KvadError, RequestError, SaveError, StorageError, UsageError, format_bytes, format_count

CacheFlagsT = TypeVar("CacheFlagsT", bound=CacheFlags)
MAX_SHOWN_TOKENS = 32  # tokens shown from the end of a session
MAX_SIZE = 1 << 62  # bytes of a prefix cache: removing a prefix must not evict blocks


class _NameArgument(Options):
    name: str = argument("NAME")


class _TurnOptions(
    _NameArgument, ModelArgument, PromptOptions, CacheFlags, SpeculativeOptions, SessionDirOption, JsonOption
):
    source: str | None = option("Encoder input of an encoder-decoder, with the first text", common=True)


class _SaveOptions(_TurnOptions):
    overwrite: bool = option("Replace a session of this name")


class _ContinueOptions(_TurnOptions, SamplingFlags):
    no_save: bool = option("Do not change the saved session")


class _ListOptions(SessionDirOption, JsonOption):
    """Options of ``kvad session list``."""


class _ShowOptions(_NameArgument, SessionDirOption, JsonOption):
    model: Path | None = option("The model of the session, to show the end of the text", metavar="MODEL")


class _RemoveOptions(SessionDirOption, JsonOption):
    names: tuple[str, ...] = argument("NAME...", required=True)


@click.group(cls=CommandGroup)
def session_group() -> None:
    """Save the cache of a text, and continue the text in another process without recomputing it.

    \b
    kvad session save runs/demo notes --file notes.txt
    kvad session continue runs/demo notes --prompt "In short: " --max-tokens 64
    kvad session list
    """


@command("save", _SaveOptions, session_group)
def session_save(options: _SaveOptions) -> None:
    """Compute the cache of a text and save it as session NAME.

    \b
    kvad session save runs/demo notes --file notes.txt
    cat notes.txt | kvad session save runs/demo notes --prompt - --policy "sinks(4, 1020)"
    """
    name, text = options.name, options.read_prompt()
    if not text:
        raise UsageError("there is no text to save", "give --prompt TEXT or --file FILE")
    path = sessions.directory.session_path(name, options.session_folder)
    if path.exists() and not options.overwrite:
        raise UsageError(f"session {name} exists", "--overwrite replaces it; kvad session continue adds to it")
    load = load_fields(options)
    try:  # before the computation
        path.parent.mkdir(parents=True, exist_ok=True)
        sessions.directory.remove_session_leftovers(path.parent)
        sessions.directory.check_overwritable(path)
    except OSError as error:
        raise SaveError(f"{path}: {error.strerror}", "choose another folder with --session-dir FOLDER") from error
    with open_llm(options.model, load, max_num_seqs=1) as llm:
        session = llm.session(cache_salt=options.cache_salt)
        session.path, session.name = path, name
        session.append(text, encoder_input=options.source)
        nbytes, tokens = session.save(overwrite=options.overwrite), len(session.tokens)
    line = f"{name}: {format_count(tokens, 'token')}, {format_bytes(nbytes)} in {path}"
    print_result(options.as_json, {"session": name, "path": path, "tokens": tokens, "bytes": nbytes}, line)


@command("continue", _ContinueOptions, session_group)
def session_continue(options: _ContinueOptions) -> None:
    """Continue session NAME: add a text, print the continuation and save the session again.

    \b
    kvad session continue runs/demo notes --prompt "In short: " --max-tokens 64 --temperature 0
    """
    given, text = options.sampling_fields(), options.read_prompt()
    path, header = read_session_header(options.name, options)
    load = load_fields(with_saved_options(options, header))
    handle = checkpoint.open_checkpoint(options.model, rope_scaling=options.rope_scaling)
    sampling = options.resolve(given, handle)
    with open_llm(handle, load, max_num_seqs=1) as llm:
        session = llm.session(path, cache_salt=options.cache_salt)
        session.name = options.name
        before = len(session.tokens)
        if session.seed is None:
            sampling = choose_seed(sampling)
        generated, finish_reason = "", "abort"
        with InterruptFlag() as stop, closing(session.stream(text, sampling, encoder_input=options.source)) as chunks:
            for chunk in chunks:
                generated, finish_reason = generated + chunk.text, chunk.finish_reason or finish_reason
                if not options.as_json:
                    click.echo(chunk.text if llm.tokenizer is not None else f"{chunk.token_id} ", nl=False)
                if stop.requested:
                    break
        result = {"session": options.name, "path": path, "model": options.model, "restored": session.reused}
        result |= {"before": before, "seed": session.seed, "missed": session.missed}
        result |= {"text": generated, "finish_reason": finish_reason}
        result |= {"tokens": len(session.tokens), "bytes": None}
        problem: KvadError | None = None
        try:
            result["bytes"] = None if options.no_save else session.save()
        except (StorageError, SaveError) as error:
            problem = error  # raised after the text was printed
    print_result(options.as_json, result, "")
    if not options.as_json:
        missed = f" ({session.missed})" if session.missed else ""
        note(f"{session.reused:,} of {format_count(before, 'token')} restored{missed}")
    if problem is not None:
        raise problem
    exit_with(130 if stop.requested else 0)


@command("list", _ListOptions, session_group)
def session_list(options: _ListOptions) -> None:
    """List the sessions. Damaged files, and files that are not sessions, are marked.

    \b
    kvad session list
    kvad session list --session-dir /mnt/sessions --json
    """
    folder = options.session_folder
    sessions.directory.remove_session_leftovers(folder)
    records, rows = [], []
    for file in sessions.directory.list_sessions(folder):
        summary = _summary(file.header) if file.header else {"message": file.problem}
        records.append({"name": file.path.stem, "state": file.state, **summary})
        row = f"{file.state}: {summary.get('message')}"
        if file.state == "whole":
            size = format_bytes(int(summary["bytes"]))
            row = f"{summary['tokens']:>9,} tokens  {size:>10}  {summary['saved']}  {summary['model']}"
        rows.append((file.path.stem, row))
    if not rows and not options.as_json:
        note(f"no session in {folder}")
    else:
        print_result(options.as_json, {"folder": folder, "sessions": records}, format_table(rows) if rows else [])


@command("show", _ShowOptions, session_group)
def session_show(options: _ShowOptions) -> None:
    """Show the model, the cache and the length of a session; with --model also the end of its text.

    Only the header is read; kvad doctor FOLDER reads every byte.

    \b
    kvad session show notes
    kvad session show notes --model runs/demo
    """
    name, model = options.name, options.model
    path, header = read_session_header(name, options)
    result: dict[str, Any] = {"name": name, "path": path, **_summary(header), "fingerprint": dict(header.fingerprint)}
    if model is not None:
        tokenizer = load_tokenizer_of(model)
        if tokenizer.fingerprint() != header.fingerprint["tokenizer"]:
            raise StorageError(
                f"session {name}: it was saved with another tokenizer than that of {model}", reason="mismatch"
            )
        result["end"] = tokenizer.decode(sessions.directory.read_tokens(path, MAX_SHOWN_TOKENS), skip_specials=False)
    cache, fingerprint = result["cache"], result["fingerprint"]
    shown = {key: value for key, value in result.items() if key not in ("cache", "fingerprint")}
    shown["cache"] = ", ".join(f"{key} {value}" for key, value in cache.items() if value not in (None, False))
    shown["bytes"] = f"{result['bytes']:,}"
    parts = [f"{key} {value}" for key, value in fingerprint.items() if value and key != "policy"]
    shown["belongs to"] = ", ".join(parts)
    if model is not None:
        shown["end"] = repr(result["end"])
    print_result(options.as_json, result, (f"{key:<10}  {value}" for key, value in shown.items()))


@command("rm", _RemoveOptions, session_group)
def session_rm(options: _RemoveOptions) -> None:
    """Remove sessions. Other files are not removed.

    \b
    kvad session rm notes
    """
    folder = options.session_folder
    paths = {name: sessions.directory.session_path(name, folder) for name in options.names}
    for path in paths.values():
        if not path.exists():
            raise _missing_session(path)
        sessions.directory.check_overwritable(path)
    for path in paths.values():
        path.unlink()
    if options.as_json:
        emit_json({"folder": folder, "removed": list(paths)})


# ---------------------------------------------------------------- session files


def read_session_header(name: str, options: SessionDirOption) -> tuple[Path, storage.container.Header]:
    """Return the file and the header of session ``name``.

    Raises:
        UsageError: If there is no such session.
        StorageError: If the file is damaged or is not a session.
    """
    path = sessions.directory.session_path(name, options.session_folder)
    try:
        header = storage.container.read_header(path)
    except StorageError as error:
        if error.reason != "missing":
            raise
        raise _missing_session(path) from None
    if header.kind != sessions.directory.CONTAINER_KIND:
        raise StorageError(f"{path}: it is a {header.kind}, not a session", "it was not changed", reason="foreign")
    return path, header


def _missing_session(path: Path) -> UsageError:
    return UsageError(f"there is no session {path.stem} in {path.parent}", "kvad session list has their names")


def with_saved_options(options: CacheFlagsT, header: storage.container.Header) -> CacheFlagsT:
    """Fill cache options that are not given with those that the session was saved with."""
    cache = header.metadata.get("writer", {}).get("cache", {})
    saved: dict[str, Any] = {}
    option_groups = (  # option -> CacheConfig field; a group is filled if none of its options is given
        {"policy": "policy", "overflow": "overflow", "endless": "endless"},
        {"cache_dtype": "dtype", "cache_key_dtype": "key_dtype", "cache_value_dtype": "value_dtype"},
        {"layout": "layout", "block_size": "block_size"},
        {"rope_at": "rope_at"},
    )
    for names in option_groups:
        if not any(getattr(options, name) for name in names):
            saved |= {name: cache.get(field) for name, field in names.items()}
    if cache.get("overflow") in cache_lib.config.CONTINUING_MODES and options.max_seq_len is None:
        saved["max_seq_len"] = cache.get("max_seq_len")  # the kept tokens depend on it
    return dataclasses.replace(options, **saved)


def _summary(header: storage.container.Header) -> dict[str, Any]:
    metadata, fingerprint = header.metadata, header.fingerprint
    writer = metadata.get("writer", {})
    return {
        "tokens": metadata.get("history", 0),
        "restored": metadata.get("length", 0),
        "bytes": header.nbytes,
        "policy": fingerprint.get("policy", ""),
        "formats": cache_lib.quantization.join_format_names(fingerprint.get("keys", ""), fingerprint.get("values", "")),
        **{key: writer.get(key, "") for key in ("model", "created", "saved", "kvad", "seed")},
        "cache": writer.get("cache", {}),
    }


# ---------------------------------------------------------------- prefixes


class _PrefixDirOption(JsonOption):
    prefix_cache_dir: Path | None = option(
        "Folder of the prefix cache [default: kvad/prefix-cache in the user's cache folder]", common=True
    )

    @property
    def folder(self) -> Path:
        folder = self.prefix_cache_dir or storage.filesystem.user_cache_dir("prefix-cache")
        if not folder.is_dir():
            hint = "give the folder of the prefix cache with --prefix-cache-dir FOLDER"
            raise UsageError(f"{folder} is not a folder", hint)
        return folder


class _NamedPrefixOptions(_NameArgument, _PrefixDirOption):
    pass


class _PrefixAddOptions(ModelArgument, PromptOptions, CacheFlags, JsonOption):
    name: str = option("Name of the prefix", dataclasses.MISSING, metavar="NAME")


@click.group(cls=CommandGroup)
def prefix_group() -> None:
    """Pin the keys and values of a text that many requests begin with.

    \b
    kvad prefix add runs/demo --file system.txt --name system --prefix-cache-dir ./prefix-store
    kvad generate runs/demo "$(cat system.txt) ..." --prefix-cache-dir ./prefix-store --stats
    kvad prefix list --prefix-cache-dir ./prefix-store
    """


@command("add", _PrefixAddOptions, prefix_group)
def prefix_add(options: _PrefixAddOptions) -> None:
    """Compute the full blocks of a text, store them on disk and pin them: they are never evicted.

    A request uses them if it begins with the same tokens and has the same --cache-dtype, --policy and --block-size.
    A prefix of the same name is replaced.

    \b
    kvad prefix add runs/demo --file system.txt --name system --prefix-cache-dir ./prefix-store
    kvad prefix add runs/demo --prompt - --name system --cache-dtype int8 < system.txt
    """
    if options.prompt is None and options.file is None:
        raise click.UsageError("give the text with --prompt or --file")
    text = options.read_prompt()
    folder = options.prefix_cache_dir or str(storage.filesystem.user_cache_dir("prefix-cache"))
    load = load_fields(dataclasses.replace(options, prefix_cache_dir=folder))
    with open_llm(options.model, load, max_num_seqs=1) as llm:
        if llm.model.config.kind == "encoder-decoder":
            raise RequestError(
                "the cache of an encoder-decoder depends on its source: it has no prefix for many requests",
                "kvad session save saves one text with its source",
            )
        prefix = engine.pin_prefix(
            llm.engine, llm.encode(text), options.name, text, cache_salt=options.cache_salt or ""
        )
    summary = _prefix_summary(Path(folder), prefix)
    print_result(options.as_json, summary, _line(summary))
    if options.prefix_cache_dir is None:
        note(f"other commands use it with --prefix-cache-dir {folder}")


@command("list", _PrefixDirOption, prefix_group)
def prefix_list(options: _PrefixDirOption) -> None:
    """List the pinned prefixes.

    \b
    kvad prefix list --prefix-cache-dir ./prefix-store --json
    """
    folder = options.folder
    summaries = [_prefix_summary(folder, prefix) for prefix in offload.pinned.read_pinned_prefixes(folder)]
    if summaries or options.as_json:
        print_result(options.as_json, {"prefix_cache_dir": folder, "prefixes": summaries}, map(_line, summaries))
    else:
        print_error(f"{folder} contains no prefix")


@command("show", _NamedPrefixOptions, prefix_group)
def prefix_show(options: _NamedPrefixOptions) -> None:
    """Show a prefix and the model and cache that it belongs to.

    \b
    kvad prefix show system --prefix-cache-dir ./prefix-store
    """
    prefix = offload.pinned.find_pinned_prefix(options.folder, options.name)
    summary = _prefix_summary(options.folder, prefix)
    parts = [f"{part:<10} {value}" for part, value in prefix.fingerprint.items() if value]
    lines = [_line(summary), f"text       {prefix.text!r}", *parts]
    print_result(options.as_json, {**summary, "fingerprint": dict(prefix.fingerprint)}, lines)


@command("rm", _NamedPrefixOptions, prefix_group)
def prefix_rm(options: _NamedPrefixOptions) -> None:
    """Unpin a prefix and remove the blocks that no other prefix uses.

    \b
    kvad prefix rm system --prefix-cache-dir ./prefix-store
    """
    folder, name = options.folder, options.name
    prefix = offload.pinned.find_pinned_prefix(folder, name)
    others = {key for other in offload.pinned.read_pinned_prefixes(folder) if other.name != name for key in other.keys}
    keys = [key for key in prefix.keys if key not in others]
    offload.pinned.remove_pinned_prefix(folder, name)
    reason, removed = "", 0
    try:
        store = DiskBlockStore(folder, MAX_SIZE)
    except BlockingIOError:
        owner = storage.filesystem.lock_owner(folder / offload.disk_store.LOCK_NAME)
        reason = f"{owner} uses the folder: the blocks are evicted when it needs space"
    else:
        removed = sum(key in store for key in keys)
        for key in keys:
            store.drop(key)
        store.release()
    record = {"prefix_cache_dir": folder, "name": name, "removed_blocks": removed, "note": reason}
    line = f"{name}: unpinned, {format_count(removed, 'block')} removed{f' ({reason})' if reason else ''}"
    print_result(options.as_json, record, line)


def _prefix_summary(folder: Path, prefix: PinnedPrefix) -> dict[str, Any]:
    sizes = [path.stat().st_size for key in prefix.keys if (path := folder / f"{key}.kv").exists()]
    counts = {"num_blocks": len(prefix.keys), "missing": len(prefix.keys) - len(sizes), "bytes": sum(sizes)}
    first = {"name": prefix.name, "tokens": prefix.tokens}
    return {**first, **counts, "text": prefix.text, "prefix_cache_dir": folder}


def _line(summary: dict[str, Any]) -> str:
    missing = f", {summary['missing']} of them missing" if summary["missing"] else ""
    size, blocks = format_bytes(summary["bytes"]), format_count(summary["num_blocks"], "block")
    return f"{summary['name']:<10} {format_count(summary['tokens'], 'token')} in {blocks}{missing}, {size}"
