"""Resolution of model names: from a path or a name on the hub to a local folder.

    resolve_model_path("runs/x")                   an existing folder
    resolve_model_path("Qwen/Qwen3-0.6B")          a model on the hub, through its cache; @REVISION selects a branch,
                                                   tag or commit
    resolve_model_path("hf://Qwen/Qwen3-0.6B")     the hub's model even if there is a folder ./Qwen

A name that looks like a path never causes a network call, so that a misspelled path is reported as such.  Only config,
tokenizer and safetensors files are downloaded: no pickle and no code.  Small files come first, and an unreadable
model is refused before gigabytes are downloaded.  No torch; huggingface_hub is imported when it is needed.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvad.checkpoint import folder as folder_lib
from kvad.checkpoint.folder import ADAPTER_CONFIG, CONFIG
from kvad.errors import CheckpointError, KvadError, NetworkError, SaveError, UsageError, suggest_path

PREFIX = "hf://"
ONLINE_HINT = "Download it once while online, without HF_HUB_OFFLINE."

SMALL = [
    *("config.json", "generation_config.json", ADAPTER_CONFIG, "*.safetensors.index.json"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "chat_template*"),
    *("*.model", "*.spm", "*.tiktoken"),
    *("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "[0-9]_*/config.json"),
]
LARGE = ["*.safetensors"]
# The hub matches patterns against full paths.  The other files are copies of the same weights, or unrelated.
IGNORED_PATTERNS = [
    *(
        "[!0-9]*/*",
        "[0-9][!_]*/*",
        "*_*/*/*",
    ),  # of the folders, 1_Pooling and 2_Dense of sentence-transformers are read
    "consolidated*",
    "adapter_model*",
    "*.fp16*",
    "*.fp32*",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.py",
]

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_NAME = re.compile(rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>[^\s@]+))?")


class _HubRequest(NamedTuple):
    repo: str
    revision: str | None
    offline: bool

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo


def resolve_model_path(
    name_or_path: str | Path,
    *,
    revision: str | None = None,
    token: str | None = None,
    offline: bool | None = None,
    weights: bool = True,
    adapters: bool = False,
) -> Path:
    """Return the local folder of a model, downloading it if necessary; a GGUF file is returned as it is.

    An interrupted download is resumed.

    Args:
        name_or_path: Folder, or name on the hub.
        revision: Branch, tag or commit on the hub.
        token: Access token (default: from ``hf auth login`` or HF_TOKEN).
        offline: Use the cache only (default: as HF_HUB_OFFLINE).
        weights: False if config and tokenizer suffice, whatever the weights are.
        adapters: Accept an adapter's folder.
    """
    name = re.sub(r"^hf:/(?!/)", PREFIX, os.fspath(name_or_path))  # pathlib collapses two slashes to one
    path = Path(os.path.expanduser(name))  # pathlib's expanduser and is_dir raise for some names
    if name and os.path.isdir(path):
        if revision is not None:
            raise UsageError(f"{name} is a folder and has no revision {revision!r}", f"Write {PREFIX}NAME for the hub.")
        if weights and not (adapters and (path / ADAPTER_CONFIG).is_file()):
            folder_lib.check_bare_folder(path)
        return path
    if name.endswith(".gguf") and os.path.isfile(path):
        return path
    folder_lib.check_no_file(path, name)
    repo, name_revision = _parse(name)
    if revision is not None and name_revision is not None and revision != name_revision:
        raise UsageError(f"two revisions of {repo}: {name_revision!r} and {revision!r}")
    if offline is None:
        offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    return _fetch(_HubRequest(repo, revision or name_revision, offline), token, weights)


def _parse(name: str) -> tuple[str, str | None]:
    """Return repository and revision of a name on the hub."""
    bare_name = name.removeprefix(PREFIX)
    match = _NAME.fullmatch(bare_name)
    if bare_name == name and _looks_like_path(name):
        hint = _nearby_path(Path(os.path.expanduser(name)), match is not None)
        raise CheckpointError(f"no such folder: {name}", hint)
    if match is None or "--" in match["repo"] or ".." in match["repo"] or len(match["repo"]) > 96:
        raise CheckpointError(
            f"neither a folder nor a name on the hub: {name!r}",
            "Names on the hub are ORG/NAME or ORG/NAME@REVISION, such as Qwen/Qwen3-0.6B.",
        )
    return match["repo"], match["revision"]


def _looks_like_path(name: str) -> bool:
    """Return True if a name starts like a path, has three parts, or its first folder exists."""
    repo_name = name.partition("@")[0]
    parts = repo_name.replace(os.sep, "/").split("/")
    return name.startswith((".", "/", "~", os.sep)) or len(parts) > 2 or (len(parts) == 2 and os.path.exists(parts[0]))


def _nearby_path(path: Path, is_name: bool) -> str:
    """Build a hint with the most similar path below the first existing parent."""
    parent = next((folder for folder in path.parents if os.path.isdir(folder)), Path())
    similar = suggest_path(parent / path.relative_to(parent).parts[0]) if path != parent else None
    advice = [] if similar is None else [f"did you mean {similar}?"]
    return " ".join([*advice, *([f"{PREFIX}{path} is the name on the hub."] if is_name else [])])


def _fetch(request: _HubRequest, token: str | None, weights: bool) -> Path:
    """Download a model: the small files first, then the weights."""
    import huggingface_hub

    def snapshot(revision: str | None, patterns: list[str]) -> Path:
        options: dict[str, Any] = {"token": token, "local_files_only": request.offline, "revision": revision}
        options |= {"allow_patterns": patterns, "ignore_patterns": IGNORED_PATTERNS}
        return Path(huggingface_hub.snapshot_download(request.repo, **options))

    try:
        folder = snapshot(request.revision, SMALL)
        if not weights:
            return folder
        folder_lib.check_quantization(folder / CONFIG, str(request))
        if not request.offline:
            folder = snapshot(folder.name, LARGE)  # of the same commit, even if another was pushed meanwhile
        if not folder_lib.has_weights(folder):
            if request.offline:
                raise CheckpointError(f"{request} is in the cache without its weights", ONLINE_HINT)
            files = huggingface_hub.HfApi(token=token).list_repo_files(request.repo, revision=folder.name)
            folder_lib.refuse_weights(str(request), files)
    except KvadError:
        raise
    except Exception as error:
        if (translated := _translate_error(error, request)) is None:
            raise
        raise translated from error
    return folder


def _translate_error(error: Exception, request: _HubRequest) -> KvadError | None:
    """Translate an error of any version of huggingface_hub; return None for an unexpected error."""
    from huggingface_hub import errors

    if _is_disk_full(error):
        return SaveError(
            f"no space left while downloading {request} to {_cache()}",
            "Free some, or set HF_HOME to a folder on another disk. The download will be resumed.",
        )
    if isinstance(error, errors.GatedRepoError):
        return CheckpointError(
            f"{request} is gated: its owner must grant access",
            f"Request it at https://huggingface.co/{request.repo}, then run hf auth login or set HF_TOKEN.",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        message = f"{request.repo} has no revision {request.revision or 'main'!r}"
        return CheckpointError(message, "See its branches and tags on the hub.")
    if isinstance(error, errors.RepositoryNotFoundError):
        similar = difflib.get_close_matches(request.repo, set(_cached_models()) - {request.repo}, n=1)
        advice = f"did you mean {similar[0]!r}? " if similar else ""
        advice += "Check the name. A private model needs hf auth login or HF_TOKEN."
        return CheckpointError(f"no such model on the hub: {request.repo}", advice)
    kind: type[CheckpointError] = NetworkError
    if (status := _http_status(error)) is not None:
        kind = CheckpointError if status in (401, 403) else NetworkError
        message = f"the hub responded {status} for {request}"
        advice = "Run hf auth login, or set HF_TOKEN." if status in (401, 403) else "Try again later."
    elif isinstance(error, errors.LocalEntryNotFoundError) and request.offline:
        kind = CheckpointError
        message, advice = f"{request} is not in the cache, and kvad is offline", ONLINE_HINT
    elif isinstance(error, errors.LocalEntryNotFoundError):
        message, advice = f"cannot reach the hub for {request}", "Check the connection."
    elif _is_network_error(error):
        message = f"the connection to the hub failed for {request}: {type(error).__name__}"
        advice = "Check it and run the command again. The download will be resumed."
    else:
        reason = getattr(error, "strerror", None) or error
        return SaveError(f"cannot write to {_cache()}: {reason}") if isinstance(error, OSError) else None
    names = _cached_models()
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    cached = f"Cached models: {', '.join(names[:5])}{more}." if names else "The cache is empty."
    return kind(message, f"{advice} {cached}")


def _error_chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes, at most twenty."""
    for _ in range(20):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def _is_disk_full(error: Exception) -> bool:
    """Return True if the disk is full, which hf_xet (Rust) reports only in the message."""
    return any(
        (isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)) or "os error 28" in str(cause)
        for cause in _error_chain(error)
    )


def _http_status(error: Exception) -> int | None:
    """Return the HTTP status, if the hub responded."""
    for cause in _error_chain(error):
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
    return None


def _is_network_error(error: Exception) -> bool:
    """Return True for errors of requests and httpx, and huggingface_hub's for a short file."""
    libraries = {cls.__module__.partition(".")[0] for cls in type(error).__mro__}
    return (
        isinstance(error, ConnectionError | TimeoutError)
        or bool(libraries & {"requests", "urllib3", "httpx", "httpcore"})
        or (isinstance(error, OSError) and error.errno is None)
    )


def _cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _cached_models() -> list[str]:
    """Return the names of models that have a snapshot in the cache."""
    snapshots = _cache().glob("models--*/snapshots/*/model*.safetensors")
    return sorted({path.parents[2].name.removeprefix("models--").replace("--", "/") for path in snapshots})
