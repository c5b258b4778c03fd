"""Checkpoint folders: their location, their small files, and their manifest.  No torch.

A *checkpoint* is a folder with a ``config.json``; a *run* is a folder with ``checkpoints/step-N/`` and is read as its
newest step.  ``best`` is a link to the step with the lowest validation loss.  ``locate`` takes any of these.  The
manifest lists the size and the checksums of every file.

A run retains its newest steps and the best one::

    RUN/checkpoints/step-00000400/  step-00000500/  step-00000600/
    RUN/best -> checkpoints/step-00000400                             relative, so that a run can be moved and copied

The link is a function of the newest checkpoint's state: if a process dies between a save and its link, the link is
unchanged and the next save corrects it.  A new link replaces the old one by a rename, and a step is deleted only when
nothing links to it: ``best`` is always a complete checkpoint.

A summarizer's folder has ``summarizer.json`` instead of ``config.json`` (``summarizer.py`` reads its tensors).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, NoReturn

from kvad import config, storage
from kvad.checkpoint.safetensors_header import is_truncated
from kvad.errors import CheckpointError, ConfigError, SaveError

CONFIG, MANIFEST, TRAINING, ADAPTER_CONFIG = "config.json", "manifest.json", "training", "adapter_config.json"
MODEL, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"  # read if there are no safetensors
BEST_LINK = "best"
FORMAT = 2  # of the manifest
READ_CHUNK = 1 << 20  # bytes read at a time for a checksum

Verify = Literal["size", "crc32", "sha256"]

_STEP = re.compile(r"step-\d+")


def locate(path: Path) -> Path:
    """Return the checkpoint folder of ``path``: itself, or the newest step of the run."""
    path = resolve_best_link(path)
    if (path / CONFIG).is_file():
        return path
    if steps := list_steps(path):
        return steps[-1]
    interrupted = storage.atomic.find_interrupted(path)
    if interrupted is not None:  # a process died between the two renames of a replacement
        return interrupted
    if not path.exists():
        raise CheckpointError(f"no such folder: {path}", "Train one with kvad demo or kvad train.")
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file", "Give the checkpoint's folder.")
    if (path / "checkpoints").is_dir():
        raise CheckpointError(f"{path} has no checkpoint yet", "Its training stopped before the first save.")
    raise CheckpointError(f"{path} is not a checkpoint: it has no {CONFIG}")


def resolve_best_link(path: Path) -> Path:
    """Return the step that a run's ``best`` links to; any other path is returned unchanged.

    The result is a fixed step: a new best step does not change what has been opened.
    """
    if path.name != BEST_LINK or not path.is_symlink():
        return path
    target = path.parent / os.readlink(path)
    return target if _STEP.fullmatch(target.name) else path


def step_folder(run: Path, step: int) -> Path:
    """Return the folder of a step of a run."""
    return run / "checkpoints" / f"step-{step:08d}"


def list_steps(run: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first; ``[]`` for a folder that is not a run.

    The list includes steps that were being replaced when a process died: set aside for a step that was never finished.
    """
    folder = run / "checkpoints"
    if not folder.is_dir():
        return []
    steps = {interrupted.name: interrupted.path for interrupted in storage.temp_paths.interrupted_writes(folder)}
    steps |= {path.name: path for path in folder.iterdir()}
    return [steps[name] for name in sorted(steps) if _STEP.fullmatch(name) and steps[name].is_dir()]


def is_run(path: Path) -> bool:
    """Return True if the folder has at least one checkpoint step."""
    return bool(list_steps(path))


def is_adapter(path: Path) -> bool:
    """Return True for a folder that has an adapter and no complete model."""
    return (path / ADAPTER_CONFIG).exists() and not is_model(path)


def is_model(path: Path) -> bool:
    """Return True for a folder that has a complete model."""
    return (path / CONFIG).is_file()


def is_hf(path: Path) -> bool:
    """Return True for Hugging Face's layout: the config has a ``model_type``, or no model."""
    content = _content(path / CONFIG)
    return content is not None and "kvad" not in content and ("model_type" in content or "model" not in content)


def _content(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file, or None if the file is missing or malformed."""
    try:
        content = storage.strict_json.loads(storage.filesystem.read_bytes(path))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; a CheckpointError names the file."""
    try:
        content = storage.strict_json.loads(storage.filesystem.read_bytes(path))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing", "The checkpoint is incomplete. Copy it again.") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: must be a JSON object, got {type(content).__name__}")
    return content


def format_json(value: object, indent: int = 1) -> str:
    """Format a JSON file; transformers indents by two spaces."""
    return json.dumps(value, ensure_ascii=False, indent=indent) + "\n"


def write_json(path: Path, value: object, *, indent: int = 1) -> None:
    """Write a JSON file."""
    path.write_text(format_json(value, indent), encoding="utf-8")


def check_format(path: Path, content: Mapping[str, Any], version: int, command: str) -> None:
    """Raise CheckpointError for a file of another format version; ``command`` writes it again."""
    if content.get("format") != version:
        raise CheckpointError(
            f"{path}: format: must be {version}, got {content.get('format')!r}",
            f"Another version of kvad wrote it. Write it again with {command}.",
        )


def check_readable_weights(folder: Path) -> None:
    """Raise CheckpointError, which names an alternative, for weights that kvad does not read."""
    check_no_file(folder)
    if not folder.is_dir():
        raise CheckpointError(f"no such folder: {folder}")
    check_quantization(folder / CONFIG, str(folder))
    if not has_weights(folder):
        refuse_weights(str(folder), sorted(os.listdir(folder)))


def check_no_file(path: Path, name: str = "") -> None:
    """Raise CheckpointError for a file in the place of a folder."""
    if os.path.isfile(path):
        raise CheckpointError(f"{name or path} is a file", _weights_hint(path.name) or "Give the folder that it is in.")


def check_bare_folder(folder: Path) -> None:
    """Raise CheckpointError for a folder without config that has unreadable weights: a GGUF file or an adapter."""
    names = sorted(os.listdir(folder))
    if CONFIG not in names and not is_run(folder) and (ADAPTER_CONFIG in names or any(map(_weights_hint, names))):
        refuse_weights(str(folder), names)


def has_weights(folder: Path) -> bool:
    """Return True for a folder with ``model.safetensors``, ``pytorch_model.bin``, or the index of either."""
    return any((folder / name).exists() for name in (MODEL, INDEX, PICKLE, PICKLE_INDEX))


QUANTIZATIONS = ("gptq", "awq", "compressed-tensors", "fp8", "mxfp4")  # methods that kvad dequantizes


def check_quantization(path: Path, where: str) -> None:
    """Raise CheckpointError for the ``config.json``, if any, of a model quantized by a method that is not read."""
    content = read_json(path) if path.is_file() else {}
    for key in ("quantization_config", "compression_config"):
        if entry := content.get(key):
            method = entry.get("quant_method") if isinstance(entry, dict) else None
            if key == "quantization_config" and method in QUANTIZATIONS:
                continue
            kind = method.upper() if isinstance(method, str) and method.isprintable() else key
            hint = "Use the model that it was made from; the model card names it."
            if method == "bitsandbytes":
                hint += " Or load it with transformers, call model.dequantize(), and save it."
            raise CheckpointError(
                f"{where} is quantized ({kind[:40]}), and kvad reads only {', '.join(QUANTIZATIONS)}", hint
            )


def refuse_weights(where: str, names: Sequence[str]) -> NoReturn:
    """Raise CheckpointError for the files of a folder or repository without readable weights."""
    if ADAPTER_CONFIG in names:
        raise CheckpointError(
            f"{where} is an adapter (LoRA), not a model",
            "Download it, then run kvad merge BASE FOLDER --out NEW, or open BASE with --adapter FOLDER.",
        )
    for name in names:
        if name.endswith(".safetensors") and "/" not in name:
            raise CheckpointError(f"{where} has neither {MODEL} nor {INDEX}, only {name}", "Download or copy it again.")
    for name in names:
        if hint := _weights_hint(name):
            raise CheckpointError(f"{where} has no safetensors, only {name}", hint)
    raise CheckpointError(f"{where} has no weights: neither {MODEL} nor {INDEX}")


def _weights_hint(name: str) -> str:
    """Return a hint for a file of weights that kvad does not read, empty for any other file."""
    if name.endswith(".gguf"):
        return "GGUF is llama.cpp's format. Give the file itself as the model."
    if name.endswith((".bin", ".pt", ".pth", ".ckpt", ".pkl", ".bin.index.json")):
        return (
            f"Of pickles, kvad reads {PICKLE} in a local folder, and only its tensors. Download it, look for a "
            "revision with safetensors on the hub (refs/pr/N), or convert it with transformers: "
            "AutoModelForCausalLM.from_pretrained(OLD).save_pretrained(NEW, safe_serialization=True)."
        )
    if name.endswith((".h5", ".msgpack", ".onnx", ".ot")):
        return "kvad reads safetensors. Load it with its own library and save it as safetensors."
    return ""


def file_digest(path: Path) -> dict[str, Any]:
    """Return the manifest entry of a file: its size, sha256, and crc32, which takes a fifth of the time."""
    with storage.filesystem.open_regular(path) as file:
        entry = {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
        file.seek(0)
        return {**entry, "crc32": _crc32(file)}


def _crc32(file: BinaryIO) -> int:
    crc = 0
    while chunk := file.read(READ_CHUNK):
        crc = zlib.crc32(chunk, crc)
    return crc


def is_native(path: Path) -> bool:
    """Return True if kvad wrote the folder, in either layout.

    Such a folder has a manifest, or should have one.  Other tools may write a ``manifest.json`` of another kind.
    """
    return not is_hf(path) or (path / TRAINING).is_dir() or "kvad" in (_content(path / MANIFEST) or {})


def list_files(path: Path) -> dict[str, dict[str, Any]] | None:
    """Return ``read_manifest`` of a folder that kvad wrote, None for any other folder."""
    return read_manifest(path) if is_native(path) else None


def read_manifest(path: Path, tensors: str | None = MODEL) -> dict[str, dict[str, Any]]:
    """Return the manifest entries by file name, with ``tensors``, if given, among them."""
    content = read_json(path / MANIFEST)
    files = content.get("files")
    check_format(path / MANIFEST, content, FORMAT, "kvad import MODEL --out DIR, or kvad train")
    if not isinstance(files, dict) or tensors not in (None, *files) or not all(map(_is_entry, files.values())):
        raise CheckpointError(f"{path / MANIFEST} does not list the checkpoint's files")
    for name in files:
        if name.startswith(("/", "\\")) or ".." in re.split(r"[/\\]", name):
            raise CheckpointError(f"{path / MANIFEST}: {name!r} is not a file in this folder")
    return files


def _is_entry(value: object) -> bool:
    return isinstance(value, dict) and type(value.get("bytes")) is int and isinstance(value.get("sha256"), str)


def check_file(path: Path, entry: Mapping[str, Any], verify: Verify = "size") -> None:
    """Compare a file with its manifest entry: the size of a tensor file, and the size and checksum of any file.

    Args:
        path: File.
        entry: Its entry.
        verify: "crc32" reads 6 GB/s, "sha256" 1.4 GB/s.
    """
    if not path.is_file():
        problem = "is not a regular file" if path.exists() else "is missing"
        raise CheckpointError(f"{path} {problem}", "The checkpoint is incomplete. Copy it again.")
    size, saved_size, is_tensor_file = path.stat().st_size, entry["bytes"], path.suffix == ".safetensors"
    if size != saved_size and (verify != "size" or is_tensor_file):
        problem = f"differs from its manifest: {size:,} bytes instead of {saved_size:,}"
        if size < saved_size and is_tensor_file and is_truncated(path):
            problem = f"is truncated: {size:,} of {saved_size:,} bytes"
    elif verify != "size" and not _has_checksum(path, entry, verify):
        problem = "differs from its manifest: same size, other sha256"
    else:
        return
    if not is_tensor_file and is_model(path.parent):
        hint = f"Copy it again. If you edited it: kvad doctor {path.parent} --fix accepts the edit."
        raise CheckpointError(f"{path} {problem}", hint)
    step = next((parent for parent in path.parents if parent.name.startswith("step-")), None)
    other_steps = [other for other in list_steps(step.parent.parent) if other != step] if step is not None else []
    hint = f"An older checkpoint is {other_steps[-1]}." if other_steps else "Copy it again."
    raise CheckpointError(f"{path} {problem}", hint)


def _has_checksum(path: Path, entry: Mapping[str, Any], verify: Verify) -> bool:
    try:
        with storage.filesystem.open_regular(path) as file:
            if verify == "crc32" and "crc32" in entry:
                return bool(_crc32(file) == entry["crc32"])
            return bool(hashlib.file_digest(file, "sha256").hexdigest() == entry["sha256"])
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error


def is_text(name: str) -> bool:
    """Return True for a file of a manifest that may be edited by hand: neither tensors nor training state."""
    return not name.endswith(".safetensors") and not name.startswith(f"{TRAINING}/")


def check_text(path: Path, files: Mapping[str, Mapping[str, Any]] | None) -> None:
    """Compare the config, the tokenizer and other text files of a folder with its manifest (None: it has none)."""
    for name, entry in (files or {}).items():
        if is_text(name):
            check_file(path / name, entry, "sha256")


def check_all(path: Path) -> None:
    """Compare every file of a folder that kvad wrote, with a model, an adapter or a summarizer, with its manifest."""
    for name, entry in read_manifest(path, None).items():
        check_file(path / name, entry, "sha256")


def check_all_but_training(path: Path, tensors: str) -> None:
    """Compare the files of an adapter or a summarizer, but only the sizes of the training state's.

    ``tensors`` is a file that the manifest must list. The training state is compared when the run is resumed.
    """
    for name, entry in read_manifest(path, tensors).items():
        check_file(path / name, entry, "size" if name.startswith(f"{TRAINING}/") else "sha256")


def accept_edit(path: Path, name: str) -> None:
    """Write the checksum of an edited text file into the manifest of its folder."""
    content = read_json(path / MANIFEST)
    content["files"][name] = file_digest(path / name)
    storage.atomic.write_bytes(path / MANIFEST, format_json(content).encode())


def prune_steps(run: Path, keep: int, best: int | None) -> None:
    """Link ``best`` and delete all steps but the newest ``keep`` and the best one.

    With None, or a step that no longer exists, the run has no ``best`` link.  If the link cannot be written
    (SaveError), no step is deleted.
    """
    steps = list_steps(run)
    best_step = next((step for step in steps if best is not None and step == step_folder(run, best)), None)
    try:
        _link(run, best_step)
    except OSError as error:
        message = storage.atomic.disk_error(run / BEST_LINK, error).message
        raise SaveError(message, "On a disk without links set train.keep_best=false.") from error
    for step in steps[:-keep]:
        if step != best_step:
            storage.atomic.remove_folder(step)


def _link(run: Path, step: Path | None) -> None:
    """Point ``run/best`` to ``step``.  An existing ``best`` that is not a link is left alone."""
    link = run / BEST_LINK
    if link.exists() and not link.is_symlink():
        return
    if step is None:
        link.unlink(missing_ok=True)
        return
    target = step.relative_to(run)
    if link.is_symlink() and Path(os.readlink(link)) == target:
        return
    storage.atomic.recover_interrupted(run)
    temp_link = storage.temp_paths.temp_path(link, "tmp")
    try:
        temp_link.symlink_to(target)
        temp_link.replace(link)
        storage.atomic.fsync_path(run)
    finally:
        with suppress(OSError):
            temp_link.unlink(missing_ok=True)


SUMMARIZER_FILE, SUMMARIZER_TENSORS, SUMMARIZER_FORMAT = "summarizer.json", "summarizer.safetensors", 2


def read_summarizer_folder(path: Path) -> tuple[Path, dict[str, Any]]:
    """Return a summarizer's folder (of a run: its newest step) and its summarizer.json."""
    path = resolve_best_link(Path(path))
    steps = list_steps(path)
    folder = path if (path / SUMMARIZER_FILE).is_file() or not steps else steps[-1]
    if not (folder / SUMMARIZER_FILE).is_file():
        reason = "no such folder" if not path.exists() else f"it has no {SUMMARIZER_FILE}"
        hint = "Train one with kvad train --objective summarizer."
        raise CheckpointError(f"{path} is not a summarizer: {reason}", hint)
    check_all_but_training(folder, SUMMARIZER_TENSORS)
    content = read_json(folder / SUMMARIZER_FILE)
    check_format(folder / SUMMARIZER_FILE, content, SUMMARIZER_FORMAT, "kvad train --objective summarizer")
    for key, value_type in (("model", str), ("ratio", int), ("hidden_size", int)):
        if type(content.get(key)) is not value_type:
            raise CheckpointError(
                f"{folder / SUMMARIZER_FILE}: {key}: must be {value_type.__name__}, got {content.get(key)!r}",
                "Train it again: kvad train --objective summarizer.",
            )
    return folder, content


def read_summarizer_shape(path: Path) -> config.parameter_shapes.SummarizerShape:
    """Return the shape of a summarizer."""
    _, content = read_summarizer_folder(path)
    return config.parameter_shapes.SummarizerShape(content["ratio"], content["hidden_size"])


class WeightQuantization(NamedTuple):
    """Format of the matrices of a checkpoint that ``kvad quantize`` wrote."""

    bits: int
    group_size: int  # 0: one scale for each row
    head_bits: int = 0  # 0: the head is not quantized
    head_group_size: int = 0

    def describe(self, model: config.ModelConfig) -> str:
        """Return a short description, as ``int4, groups of 32; head: int8, groups of 32``."""
        text = describe_groups(self.bits, self.group_size)
        if not self.head_bits:
            return text
        copied = " (a copy of the token table)" if model.tie_embeddings else ""
        return f"{text}; head: {describe_groups(self.head_bits, self.head_group_size)}{copied}"


def describe_groups(bits: int, group_size: int) -> str:
    """Describe a format of quantized matrices, as ``int8, groups of 32``."""
    return f"int{bits}, " + (f"groups of {group_size}" if group_size else "one scale for each row")


def read_quantization(path: Path) -> WeightQuantization | None:
    """Read the format of a checkpoint in kvad's layout, or return None if its matrices are not quantized."""
    content = read_json(path / CONFIG).get("quantization")
    if content is None:
        return None
    where = f"{path / CONFIG}: quantization"
    fields = set(WeightQuantization._fields)
    if not isinstance(content, dict) or set(content) not in ({"bits", "group_size"}, fields):  # older ones have no head
        raise ConfigError(f"{where}: must have bits and group_size, got {content!r}")
    found = WeightQuantization(**content)
    sizes = (found.group_size, found.head_group_size)
    if found.bits not in (4, 8) or any(type(size) is not int or size < 0 for size in sizes):
        raise ConfigError(f"{where}: bits must be 4 or 8 and group_size not negative, got {content!r}")
    if found.head_bits not in (0, 4, 8):
        raise ConfigError(f"{where}: head_bits must be 0, 4 or 8, got {content!r}")
    return found
