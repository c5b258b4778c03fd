"""From what a user names to a folder on this machine, and whether the weights in it are of a kind that kvad reads.

    resolve("runs/x")                              a folder that is there: itself
    resolve("Qwen/Qwen3-0.6B")                     the hub's, through its cache; @REVISION picks a branch, tag or commit
    resolve("hf://Qwen/Qwen3-0.6B")                the hub's, even where a folder ./Qwen is here

What looks like a path never leads to a network call, so that a misspelt path is a misspelt path.  From the hub come
config, tokenizer and safetensors files only: no pickle, and no code (``auto_map`` is the caller's to mention).  The
small files come first, and a model that kvad cannot read is refused before gigabytes of it are fetched.  No torch, and
huggingface_hub is imported when it is needed.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvad.checkpoint.folder import CONFIG, is_run, read_json
from kvad.errors import CheckpointError, KvadError, SaveError, UsageError, suggest_path

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PREFIX = "hf://"
ONLINE_HINT = "download it once while online, without HF_HUB_OFFLINE"

ADAPTER = "adapter_config.json"

SMALL = [
    "config.json",
    "generation_config.json",
    ADAPTER,  # to say what it is
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "*.model",
    "*.spm",
    "*.tiktoken",
    "*.safetensors.index.json",
]
LARGE = ["*.safetensors"]
# The hub's patterns see the whole path.  The others are the same weights once more, or somebody else's.
IGNORED_PATTERNS = ["*/*", "consolidated*", "adapter_model*", "*.fp16*", "*.fp32*", "*.bin", "*.pt", "*.pth", "*.py"]

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_NAME = re.compile(rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>[^\s@]+))?")
_YES = {"1", "ON", "YES", "TRUE"}


class _HubRequest(NamedTuple):
    repo: str
    revision: str | None
    offline: bool
    cache_dir: Path | None

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo


# ---------------------------------------------------------------- names


def resolve_model_path(
    name_or_path: str | Path,
    *,
    revision: str | None = None,
    token: str | None = None,
    offline: bool | None = None,
    cache_dir: Path | None = None,
    progress: type | None = None,
    weights: bool = True,
    adapters: bool = False,
) -> Path:
    """The folder of a model, downloaded if it must be; what an interrupted download left is gone on with.

    ``offline`` None: as HF_HUB_OFFLINE says.  ``token`` None: that of ``hf auth login`` or HF_TOKEN.  ``progress``:
    a tqdm class, handed to huggingface_hub.  ``weights`` False: config and tokenizer are enough, whatever the weights
    are.  ``adapters``: a folder on this machine may be an adapter's.

    Raises UsageError for a name that can be neither, CheckpointError for a folder or model that is not there, cannot be
    had, or cannot be read, SaveError if the disk refuses.
    """
    name = re.sub(r"^hf:/(?!/)", PREFIX, os.fspath(name_or_path))  # of two slashes pathlib leaves one
    path = Path(os.path.expanduser(name))  # of pathlib's own, and of its is_dir, some names are an exception
    if name and os.path.isdir(path):
        if revision is not None:
            raise UsageError(f"{name} is a folder: it has no revision {revision!r}", f"{PREFIX}NAME means the hub's")
        if weights and not (adapters and (path / ADAPTER).is_file()):
            _reject_bare_name(path)
        return path
    if os.path.isfile(path):
        raise CheckpointError(f"{name} is a file", _suggestions(path.name) or "name the folder that it is in")
    repo, named = _parse(name)
    if revision is not None and named is not None and revision != named:
        raise UsageError(f"two revisions of {repo}: {named!r} and {revision!r}")
    if offline is None:
        offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in _YES
    return _fetch(_HubRequest(repo, revision or named, offline, cache_dir), token, progress, weights)


def _parse(name: str) -> tuple[str, str | None]:
    """(repository, revision) of a hub's name.  Raises for what is rather a path, or neither."""
    bare = name.removeprefix(PREFIX)
    match = _NAME.fullmatch(bare)
    if bare == name and _looks_like_path(name):
        raise CheckpointError(f"no such folder: {name}", _around(Path(os.path.expanduser(name)), match is not None))
    if match is None or "--" in match["repo"] or ".." in match["repo"] or len(match["repo"]) > 96:
        raise CheckpointError(
            f"neither a folder nor a name of the hub: {name!r}",
            "the hub's names are ORG/NAME or ORG/NAME@REVISION, such as Qwen/Qwen3-0.6B",
        )
    return match["repo"], match["revision"]


def _looks_like_path(name: str) -> bool:
    """It starts like one, goes deeper than ORG/NAME, or its first folder is here."""
    plain = name.partition("@")[0]
    parts = plain.replace(os.sep, "/").split("/")
    return name.startswith((".", "/", "~", os.sep)) or len(parts) > 2 or (len(parts) == 2 and os.path.exists(parts[0]))


def _around(path: Path, is_name: bool) -> str:
    """The hint: the nearest folder of the first parent that is there."""
    parent = next((folder for folder in path.parents if os.path.isdir(folder)), Path())
    close = suggest_path(parent / path.relative_to(parent).parts[0]) if path != parent else None
    advice = [] if close is None else [f"did you mean {close}?"]
    return "; ".join([*advice, *([f"{PREFIX}{path} would be the hub's"] if is_name else [])])


# ---------------------------------------------------------------- the hub


def _fetch(wanted: _HubRequest, token: str | None, progress: type | None, weights: bool) -> Path:
    import huggingface_hub

    def snapshot(revision: str | None, patterns: list[str]) -> Path:
        options: dict[str, Any] = {"tqdm_class": progress} if progress is not None else {}
        return Path(
            huggingface_hub.snapshot_download(
                wanted.repo,
                revision=revision,
                token=token,
                cache_dir=wanted.cache_dir,
                local_files_only=wanted.offline,
                allow_patterns=patterns,
                ignore_patterns=IGNORED_PATTERNS,
                **options,
            )
        )

    try:
        folder = snapshot(wanted.revision, SMALL)
        if not weights:
            return folder
        _reject_config(str(wanted), _config(folder))
        if not wanted.offline:
            folder = snapshot(folder.name, LARGE)  # of the same commit, whatever was pushed in between
        if not _has_weights(_names(folder)):
            if wanted.offline:
                raise CheckpointError(f"{wanted} is in the cache without its weights", ONLINE_HINT)
            files = huggingface_hub.HfApi(token=token).list_repo_files(wanted.repo, revision=folder.name)
            _reject_files(str(wanted), files)
    except KvadError:
        raise
    except Exception as error:
        explained = _explain(error, wanted)
        if explained is None:
            raise
        raise explained from error
    return folder


def _explain(error: Exception, wanted: _HubRequest) -> KvadError | None:
    """One line for what huggingface_hub raises, by any of its versions; None for what is no trouble of the world's."""
    from huggingface_hub import errors

    if _is_full(error):
        return SaveError(
            f"no space left while downloading {wanted} to {_cache(wanted)}",
            "free some, or set HF_HOME to a folder on another disk; what has come so far is kept",
        )
    if isinstance(error, errors.GatedRepoError):
        return CheckpointError(
            f"{wanted} is gated: its owner must let you in",
            f"ask at https://huggingface.co/{wanted.repo}, then run: hf auth login (or set HF_TOKEN)",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return CheckpointError(f"{wanted.repo} has no revision {wanted.revision or 'main'!r}", "see its branches, tags")
    if isinstance(error, errors.RepositoryNotFoundError):
        advice = [*_nearest_cached(wanted), "check the name; a private one needs: hf auth login (or HF_TOKEN)"]
        return CheckpointError(f"no such model on the hub: {wanted.repo}", "; ".join(advice))
    if (status := _status(error)) is not None:
        advice = ["hf auth login, or set HF_TOKEN" if status in (401, 403) else "try again later"]
        return CheckpointError(f"the hub answered {status} for {wanted}", "; ".join([*advice, *_cached_hint(wanted)]))
    if isinstance(error, errors.LocalEntryNotFoundError) and wanted.offline:
        advice = [ONLINE_HINT, *_cached_hint(wanted)]
        return CheckpointError(f"{wanted} is not in the cache, and kvad is offline", "; ".join(advice))
    if isinstance(error, errors.LocalEntryNotFoundError):
        advice = ["check the connection", *_cached_hint(wanted)]
        return CheckpointError(f"cannot reach the hub for {wanted}", "; ".join(advice))
    if _is_network(error):
        advice = ["check it and run this again: what has come so far is kept", *_cached_hint(wanted)]
        return CheckpointError(
            f"the connection to the hub failed for {wanted}: {type(error).__name__}", "; ".join(advice)
        )
    if isinstance(error, OSError):
        return SaveError(f"cannot write to {_cache(wanted)}: {error.strerror or error}")
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it came from, up to twenty deep."""
    for _ in range(20):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def _is_full(error: Exception) -> bool:
    """hf_xet, in Rust, has only words for it."""
    return any(
        (isinstance(one, OSError) and one.errno in (errno.ENOSPC, errno.EDQUOT)) or "os error 28" in str(one)
        for one in _chain(error)
    )


def _status(error: Exception) -> int | None:
    """The HTTP status, where the hub gave an answer."""
    for one in _chain(error):
        status = getattr(getattr(one, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
    return None


def _is_network(error: Exception) -> bool:
    """An error of requests (huggingface_hub < 1) or httpx, or its own of a file that came short: no error of a disk."""
    libraries = {cls.__module__.partition(".")[0] for cls in type(error).__mro__}
    return (
        isinstance(error, ConnectionError | TimeoutError)
        or bool(libraries & {"requests", "urllib3", "httpx", "httpcore"})
        or (isinstance(error, OSError) and error.errno is None)
    )


def _cache(wanted: _HubRequest) -> Path:
    from huggingface_hub import constants

    return Path(wanted.cache_dir or constants.HF_HUB_CACHE)


def _cached(wanted: _HubRequest) -> list[str]:
    """Names of the models of which the cache holds a snapshot."""
    found = _cache(wanted).glob("models--*/snapshots/*/model*.safetensors")
    return sorted({path.parents[2].name.removeprefix("models--").replace("--", "/") for path in found})


def _cached_hint(wanted: _HubRequest) -> list[str]:
    names = _cached(wanted)
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return [f"cached: {', '.join(names[:5])}{more}"] if names else ["nothing is cached"]


def _nearest_cached(wanted: _HubRequest) -> list[str]:
    close = difflib.get_close_matches(wanted.repo, _cached(wanted), n=1)
    return [f"did you mean {close[0]!r}?"] if close and close[0] != wanted.repo else []


# ---------------------------------------------------------------- kinds of weights


def check_readable_weights(folder: Path) -> None:
    """Raises CheckpointError, with the way out, for a folder whose weights kvad does not read."""
    if folder.is_file():
        raise CheckpointError(f"{folder} is a file", _suggestions(folder.name) or "name the folder that it is in")
    if not folder.is_dir():
        raise CheckpointError(f"no such folder: {folder}")
    _reject_config(str(folder), _config(folder))
    names = _names(folder)
    if not _has_weights(names):
        _reject_files(str(folder), names)


def _reject_bare_name(folder: Path) -> None:
    """For a folder without config whose weights kvad does not read: a GGUF has its config inside, an adapter none."""
    names = _names(folder)
    if CONFIG not in names and not is_run(folder) and (ADAPTER in names or any(map(_suggestions, names))):
        _reject_files(str(folder), names)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _has_weights(names: Collection[str]) -> bool:
    return SINGLE in names or INDEX in names


def _config(folder: Path) -> dict[str, Any]:
    if not (folder / CONFIG).is_file():
        return {}
    try:
        return read_json(folder / CONFIG)
    except RecursionError as error:
        raise CheckpointError(f"{folder / CONFIG} is not JSON: nested too deeply") from error


def _reject_config(where: str, config: dict[str, Any]) -> None:
    for key in ("quantization_config", "compression_config"):
        entry = config.get(key)
        if entry:
            method = entry.get("quant_method") if isinstance(entry, dict) else None
            kind = method.upper() if isinstance(method, str) and method.isprintable() else key
            raise CheckpointError(
                f"{where} is quantized ({kind[:40]}), and kvad reads plain weights only",
                "use the model that it was made from; its model card names it",
            )


def _reject_files(where: str, names: Collection[str]) -> None:
    """For a folder, or the files of a repository, without ``model.safetensors`` and index."""
    if ADAPTER in names:
        raise CheckpointError(
            f"{where} is an adapter (LoRA), not a model",
            "download it; then kvad merge BASE FOLDER --out NEW, or --adapter FOLDER beside its base",
        )
    shards = [name for name in names if name.endswith(".safetensors") and "/" not in name]
    if shards:
        raise CheckpointError(
            f"{where} has neither {SINGLE} nor {INDEX}, only {shards[0]}", "download or copy it again"
        )
    for name in names:
        if way := _suggestions(name):
            raise CheckpointError(f"{where} has no safetensors, only {name}", way)
    raise CheckpointError(f"{where} holds no weights: neither {SINGLE} nor {INDEX}")


def _suggestions(name: str) -> str:
    """What to do about a file of weights that kvad does not read; "" for any other file."""
    if name.endswith(".gguf"):
        return "GGUF is llama.cpp's format: use the repository of safetensors that it was made from"
    if name.endswith((".bin", ".pt", ".pth", ".ckpt", ".pkl", ".bin.index.json")):
        return (
            "a pickle can run code, so kvad opens none: look for a revision with safetensors on the hub (refs/pr/N), "
            "or convert it: transformers' AutoModelForCausalLM.from_pretrained(IT)"
            ".save_pretrained(NEW, safe_serialization=True)"
        )
    if name.endswith((".h5", ".msgpack", ".onnx", ".ot")):
        return "kvad reads safetensors: load it with its own library and save it as such"
    return ""
