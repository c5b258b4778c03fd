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
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvad.checkpoint.folder import CONFIG, is_run, read_json
from kvad.errors import CheckpointError, KvadError, SaveError, UsageError, suggest_path

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PREFIX = "hf://"
ONLINE_HINT = "Download it once while online, without HF_HUB_OFFLINE."

ADAPTER = "adapter_config.json"

SMALL = [
    "config.json",
    "generation_config.json",
    ADAPTER,  # identifies an adapter
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
# The hub matches patterns against full paths.  The other files are copies of the same weights, or unrelated.
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
    """Return the local folder of a model, downloading it if necessary.

    An interrupted download is resumed.

    Args:
        name_or_path: Folder, or name on the hub.
        revision: Branch, tag or commit on the hub.
        token: Access token (default: from ``hf auth login`` or HF_TOKEN).
        offline: Use the cache only (default: as HF_HUB_OFFLINE).
        cache_dir: Cache folder of huggingface_hub.
        progress: tqdm class for huggingface_hub.
        weights: False if config and tokenizer suffice, whatever the weights are.
        adapters: Accept an adapter's folder.
    """
    name = re.sub(r"^hf:/(?!/)", PREFIX, os.fspath(name_or_path))  # pathlib collapses two slashes to one
    path = Path(os.path.expanduser(name))  # pathlib's expanduser and is_dir raise for some names
    if name and os.path.isdir(path):
        if revision is not None:
            raise UsageError(f"{name} is a folder and has no revision {revision!r}", f"Write {PREFIX}NAME for the hub.")
        if weights and not (adapters and (path / ADAPTER).is_file()):
            _reject_bare_name(path)
        return path
    if os.path.isfile(path):
        raise CheckpointError(f"{name} is a file", _suggestions(path.name) or "Give the folder that it is in.")
    repo, name_revision = _parse(name)
    if revision is not None and name_revision is not None and revision != name_revision:
        raise UsageError(f"two revisions of {repo}: {name_revision!r} and {revision!r}")
    if offline is None:
        offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in _YES
    return _fetch(_HubRequest(repo, revision or name_revision, offline, cache_dir), token, progress, weights)


def _parse(name: str) -> tuple[str, str | None]:
    """Return repository and revision of a name on the hub."""
    bare_name = name.removeprefix(PREFIX)
    match = _NAME.fullmatch(bare_name)
    if bare_name == name and _looks_like_path(name):
        raise CheckpointError(
            f"no such folder: {name}", _nearby_path(Path(os.path.expanduser(name)), match is not None)
        )
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


# ---------------------------------------------------------------- the hub


def _fetch(request: _HubRequest, token: str | None, progress: type | None, weights: bool) -> Path:
    """Download a model: the small files first, then the weights."""
    import huggingface_hub

    def snapshot(revision: str | None, patterns: list[str]) -> Path:
        options: dict[str, Any] = {"tqdm_class": progress} if progress is not None else {}
        return Path(
            huggingface_hub.snapshot_download(
                request.repo,
                revision=revision,
                token=token,
                cache_dir=request.cache_dir,
                local_files_only=request.offline,
                allow_patterns=patterns,
                ignore_patterns=IGNORED_PATTERNS,
                **options,
            )
        )

    try:
        folder = snapshot(request.revision, SMALL)
        if not weights:
            return folder
        _reject_config(str(request), _config(folder))
        if not request.offline:
            folder = snapshot(folder.name, LARGE)  # of the same commit, even if another was pushed meanwhile
        if not _has_weights(_names(folder)):
            if request.offline:
                raise CheckpointError(f"{request} is in the cache without its weights", ONLINE_HINT)
            files = huggingface_hub.HfApi(token=token).list_repo_files(request.repo, revision=folder.name)
            _reject_files(str(request), files)
    except KvadError:
        raise
    except Exception as error:
        translated = _translate_error(error, request)
        if translated is None:
            raise
        raise translated from error
    return folder


def _translate_error(error: Exception, request: _HubRequest) -> KvadError | None:
    """Translate an error of any version of huggingface_hub; return None for an unexpected error."""
    from huggingface_hub import errors

    if _is_disk_full(error):
        return SaveError(
            f"no space left while downloading {request} to {_cache(request)}",
            "Free some, or set HF_HOME to a folder on another disk. The download will be resumed.",
        )
    if isinstance(error, errors.GatedRepoError):
        return CheckpointError(
            f"{request} is gated: its owner must grant access",
            f"Request it at https://huggingface.co/{request.repo}, then run hf auth login or set HF_TOKEN.",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return CheckpointError(
            f"{request.repo} has no revision {request.revision or 'main'!r}", "See its branches and tags on the hub."
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        advice = [*_nearest_cached(request), "Check the name. A private model needs hf auth login or HF_TOKEN."]
        return CheckpointError(f"no such model on the hub: {request.repo}", " ".join(advice))
    if (status := _http_status(error)) is not None:
        advice = ["Run hf auth login, or set HF_TOKEN." if status in (401, 403) else "Try again later."]
        return CheckpointError(f"the hub responded {status} for {request}", " ".join([*advice, *_cached_hint(request)]))
    if isinstance(error, errors.LocalEntryNotFoundError) and request.offline:
        advice = [ONLINE_HINT, *_cached_hint(request)]
        return CheckpointError(f"{request} is not in the cache, and kvad is offline", " ".join(advice))
    if isinstance(error, errors.LocalEntryNotFoundError):
        advice = ["Check the connection.", *_cached_hint(request)]
        return CheckpointError(f"cannot reach the hub for {request}", " ".join(advice))
    if _is_network_error(error):
        advice = ["Check it and run the command again. The download will be resumed.", *_cached_hint(request)]
        return CheckpointError(
            f"the connection to the hub failed for {request}: {type(error).__name__}", " ".join(advice)
        )
    if isinstance(error, OSError):
        return SaveError(f"cannot write to {_cache(request)}: {error.strerror or error}")
    return None


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


def _cache(request: _HubRequest) -> Path:
    from huggingface_hub import constants

    return Path(request.cache_dir or constants.HF_HUB_CACHE)


def _cached_models(request: _HubRequest) -> list[str]:
    """Return the names of models that have a snapshot in the cache."""
    snapshots = _cache(request).glob("models--*/snapshots/*/model*.safetensors")
    return sorted({path.parents[2].name.removeprefix("models--").replace("--", "/") for path in snapshots})


def _cached_hint(request: _HubRequest) -> list[str]:
    names = _cached_models(request)
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return [f"Cached models: {', '.join(names[:5])}{more}."] if names else ["The cache is empty."]


def _nearest_cached(request: _HubRequest) -> list[str]:
    similar = difflib.get_close_matches(request.repo, _cached_models(request), n=1)
    return [f"did you mean {similar[0]!r}?"] if similar and similar[0] != request.repo else []


# ---------------------------------------------------------------- kinds of weights


def check_readable_weights(folder: Path) -> None:
    """Raise CheckpointError, which names an alternative, for weights that kvad does not read."""
    if folder.is_file():
        raise CheckpointError(f"{folder} is a file", _suggestions(folder.name) or "Give the folder that it is in.")
    if not folder.is_dir():
        raise CheckpointError(f"no such folder: {folder}")
    _reject_config(str(folder), _config(folder))
    names = _names(folder)
    if not _has_weights(names):
        _reject_files(str(folder), names)


def _reject_bare_name(folder: Path) -> None:
    """Refuse a folder without config that has unreadable weights: a GGUF file or an adapter."""
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
                f"{where} is quantized ({kind[:40]}), and kvad reads only unquantized weights",
                "Use the model that it was made from; the model card names it.",
            )


def _reject_files(where: str, names: Collection[str]) -> None:
    """Refuse a folder or repository that has neither ``model.safetensors`` nor its index."""
    if ADAPTER in names:
        raise CheckpointError(
            f"{where} is an adapter (LoRA), not a model",
            "Download it, then run kvad merge BASE FOLDER --out NEW, or open BASE with --adapter FOLDER.",
        )
    shards = [name for name in names if name.endswith(".safetensors") and "/" not in name]
    if shards:
        raise CheckpointError(
            f"{where} has neither {SINGLE} nor {INDEX}, only {shards[0]}", "Download or copy it again."
        )
    for name in names:
        if hint := _suggestions(name):
            raise CheckpointError(f"{where} has no safetensors, only {name}", hint)
    raise CheckpointError(f"{where} has no weights: neither {SINGLE} nor {INDEX}")


def _suggestions(name: str) -> str:
    """Return a hint for a file of weights that kvad does not read, empty for any other file."""
    if name.endswith(".gguf"):
        return "GGUF is llama.cpp's format. Use the repository of safetensors that it was made from."
    if name.endswith((".bin", ".pt", ".pth", ".ckpt", ".pkl", ".bin.index.json")):
        return (
            "A pickle can run code, so kvad opens none. Look for a revision with safetensors on the hub (refs/pr/N), "
            "or convert it with transformers: AutoModelForCausalLM.from_pretrained(OLD)"
            ".save_pretrained(NEW, safe_serialization=True)."
        )
    if name.endswith((".h5", ".msgpack", ".onnx", ".ot")):
        return "kvad reads safetensors. Load it with its own library and save it as safetensors."
    return ""
