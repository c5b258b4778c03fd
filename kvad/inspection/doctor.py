"""Checks a checkpoint, in kvad's layout or Hugging Face's, or a cache directory: problems and what to do about them.

Each check yields one result or several; a check that an earlier problem makes impossible is skipped. Every tensor is
read, one piece at a time in memory. Nothing is changed without ``fix``, and no code of the folder runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from kvad import checkpoint, ops, storage
from kvad import config as cfg
from kvad import engine as engine_lib
from kvad.cache import CacheConfig, offload, sizing
from kvad.checkpoint import CheckpointHandle, GenerationConfig
from kvad.config import ModelConfig
from kvad.engine import execution
from kvad.errors import CheckpointError, KvadError, StorageError, UsageError, format_count, with_article
from kvad.storage import REAL_FILE_SYSTEM
from kvad.text import Tokenizer

T = TypeVar("T")
MAX_LISTED = 8  # findings of one kind that are listed
REDOWNLOAD_HINT = "copy or download it again"
TENSORS_FIT = "the tensors are those of the config"


class CheckResult(NamedTuple):
    """Result of a check."""

    check: str
    ok: bool
    message: str
    advice: str = ""  # what to do; "" if all is well


def check_checkpoint(
    where: str | Path, *, fix: bool = False, adapters: Mapping[str, Path] | None = None
) -> Iterator[CheckResult]:
    """Yield the results of all checks; CheckpointError if the path is no checkpoint.

    ``fix`` writes the checksums of edited text files into the manifest; ``adapters`` are those that requests choose.
    """
    folder = checkpoint.folder.locate(checkpoint.hub.resolve_model_path(where))
    yield from _manifest(folder, fix)
    unread = set[str]()
    tensors = yield from _try_check(
        "headers", REDOWNLOAD_HINT, lambda: checkpoint.safetensors_io.open_tensors(folder), _headers, unread
    )
    is_hf = checkpoint.folder.is_hf(folder)
    handle: CheckpointHandle
    handle = checkpoint.hf_layout.HFCheckpoint(folder) if is_hf else checkpoint.native.NativeCheckpoint(folder)
    config = yield from _check_config(handle, tensors)
    if tensors is not None:
        broken = [
            f"{name}: {format_count(count, 'element')} NaN or infinite"
            for name, count in checkpoint.safetensors_io.find_nonfinite(tensors)
        ]
        advice = f"{REDOWNLOAD_HINT}; if it was trained so, go back to an older checkpoint"
        yield from _problem_results("finite", broken, "every weight is a finite number", advice)
    if config is not None:
        yield from (result for result in _text_files(config, handle) if result.message not in unread)
    if config is not None and config.decoder is not None and tensors is not None:
        yield CheckResult("kernels", True, _kernels(config, tensors))
    if config is not None and tensors is not None:
        for name, path in (adapters or {}).items():
            advice = "choose an adapter of this model"
            yield from _try_check("adapter", advice, partial(_adapter, name, path, handle, _dtype(tensors)), str)


def _manifest(folder: Path, fix: bool) -> Iterator[CheckResult]:
    """Check the manifest and its files; yields nothing for a folder that kvad did not write."""
    try:
        files = checkpoint.folder.list_files(folder)
    except CheckpointError as error:
        yield CheckResult("manifest", False, error.message, error.hint or REDOWNLOAD_HINT)
        return
    if files is None:
        return
    yield CheckResult("manifest", True, f"it lists {format_count(len(files), 'file')}")
    failed = False
    for name, entry in files.items():
        try:
            checkpoint.folder.check_file(folder / name, entry, "sha256")
        except CheckpointError as error:
            if fix and checkpoint.folder.is_text(name) and (folder / name).is_file():
                checkpoint.folder.accept_edit(folder, name)
                yield CheckResult("sha256", True, f"{folder / name}: the edit is accepted; the manifest has its sha256")
                continue
            failed = True
            yield CheckResult("sha256", False, error.message, error.hint or REDOWNLOAD_HINT)
    if not failed:
        yield CheckResult("sha256", True, "every file is the one that was saved")


def _check_config(
    handle: CheckpointHandle, tensors: checkpoint.safetensors_io.ShardedTensors | None
) -> Generator[CheckResult, None, ModelConfig | None]:
    """Check and return the configuration; check that the tensors are those that it requires."""
    hf = handle if isinstance(handle, checkpoint.hf_layout.HFCheckpoint) else None

    def read() -> ModelConfig:
        return hf.family.read(hf.fields) if hf is not None and tensors is None else handle.config

    def describe(config: ModelConfig) -> str:
        count, longest = cfg.parameter_shapes.num_parameters(config), format_count(config.max_seq_len, "token")
        origin = "" if hf is None else f"{hf.origin}, "
        return f"{origin}{with_article(config.kind)} of {count:,} parameters, at most {longest} per sequence"

    config = yield from _try_check("config", f"correct {checkpoint.folder.CONFIG}", read, describe)
    if config is None or tensors is None:
        return config
    if hf is not None:
        weights = hf.weights()
        yield from _try_check("tensors", REDOWNLOAD_HINT, lambda: sum(1 for _ in weights), lambda _: TENSORS_FIT)
    else:
        problems = cfg.parameter_shapes.mismatches(config, {name: tensors.shape(name) for name in tensors})
        yield from _problem_results("tensors", problems, TENSORS_FIT, REDOWNLOAD_HINT)
    return config


def _try_check(
    check: str, advice: str, run: Callable[[], T], describe: Callable[[T], str], failed: set[str] | None = None
) -> Generator[CheckResult, None, T | None]:
    """Call ``run``, yield a result and return the value, or None after a failure, which ``failed`` collects."""
    try:
        value = run()
    except KvadError as error:
        if failed is not None:
            failed.add(error.message)
        yield CheckResult(check, False, error.message, error.hint or advice)
        return None
    yield CheckResult(check, True, describe(value))
    return value


def _problem_results(check: str, problems: list[str], well: str, advice: str) -> Iterator[CheckResult]:
    if not problems:
        yield CheckResult(check, True, well)
    for problem in problems[:MAX_LISTED]:
        yield CheckResult(check, False, problem, advice)
    if len(problems) > MAX_LISTED:
        yield CheckResult(check, False, f"and {len(problems) - MAX_LISTED:,} more like these", advice)


def _headers(tensors: checkpoint.safetensors_io.ShardedTensors) -> str:
    files = format_count(len({tensors.file_name(name) for name in tensors}), "file")
    dtypes = ", ".join(sorted({str(tensors.dtype(name)).removeprefix("torch.") for name in tensors}))
    size = format_count(tensors.total_bytes, "byte")
    return f"{format_count(len(tensors), 'tensor')} in {files}, {dtypes}, {size}"


def _kernels(config: ModelConfig, tensors: checkpoint.safetensors_io.ShardedTensors) -> str:
    """Say what runs the decoder on a CPU and on a GPU, with the default cache."""
    dtype = _dtype(tensors)
    options = CacheConfig(
        max_seq_len=config.max_seq_len, dtype=dtype, max_source_len=1 if config.encoder is not None else 0
    )
    reason = execution.unsupported_reason(config, options, dtype)
    library = ops.native.load().library
    gpu = f"on a GPU with Triton, {execution.describe_gpu(config, options, dtype)}"
    if reason or library is None:
        return f"on a CPU, the decoder runs in PyTorch: {reason}; {gpu}"
    return f"on a CPU, the decoder runs in the native kernels ({library.variant}); {gpu}"


def _dtype(tensors: checkpoint.safetensors_io.ShardedTensors) -> str:
    """Return the dtype of most weights, without those of quantized matrices."""
    weights = (name for name in tensors if f"{name.rpartition('.')[0]}.data" not in tensors)  # not scales
    counts = Counter(str(tensors.dtype(name)).removeprefix("torch.") for name in weights)
    floats = [dtype for dtype, _ in counts.most_common() if dtype.startswith(("float", "bfloat")) and "8" not in dtype]
    return floats[0] if floats else "float32"


def _adapter(name: str, path: Path, handle: CheckpointHandle, dtype: str) -> str:
    """Say what an adapter that requests choose changes; CheckpointError if the model cannot serve it."""
    adapters = engine_lib.loading.load_adapters(handle, {name: path})
    factors, num_tokens = adapters[name].factors, sizing.memory_plan.DEFAULT_BATCHED_TOKENS
    ranks = sorted({each.a.shape[0] for each in factors.values()})
    stored = engine_lib.loading.adapter_bytes(adapters, dtype, 0)
    terms = engine_lib.loading.adapter_bytes(adapters, dtype, num_tokens) - stored
    size = f"rank {', '.join(map(str, ranks))} on {format_count(len(factors), 'layer')}"
    memory = f"{stored:,} bytes of factors, and at most {terms:,} for a step of {num_tokens:,} tokens"
    return f"{name}: {size}, {memory}; on a GPU, steps with it run in PyTorch"


def _text_files(config: ModelConfig, handle: CheckpointHandle) -> Iterator[CheckResult]:
    advice = "put the model's own tokenizer files there"
    yield from _try_check("tokenizer", advice, lambda: _fitting(config, handle.tokenizer), str)
    advice = f"correct {checkpoint.folder.CONFIG}"
    generation = yield from _try_check("generation", advice, lambda: handle.generation, _generation)
    if generation is None:
        return
    token_ids = [
        ("start", generation.decoder_start_token_id),
        ("bos", generation.bos_token_id),
        ("forced_first", generation.forced_bos_token_id),
        ("forced_last", generation.forced_eos_token_id),
        *(("end", token) for token in generation.eos_token_ids),
        *(("banned", token) for token in generation.suppress_tokens),
    ]
    outside = [
        f"{name} {token} is outside the vocabulary of {config.vocab_size:,}"
        for name, token in token_ids
        if token is not None and not 0 <= token < config.vocab_size
    ]
    if outside:
        yield from _problem_results("generation", outside, "", "correct it in the file that says so")


def _fitting(config: ModelConfig, tokenizer: Tokenizer | None) -> str:
    """Describe a tokenizer that fits; raises CheckpointError if it does not."""
    if tokenizer is None:
        return "none: prompts can only be token ids"
    source_vocab = None if config.encoder_input is None else config.encoder_input.vocab_size
    sides = [("", tokenizer, config.vocab_size)]
    if tokenizer.source_tokenizer is not None:
        sides.append((" of the source", tokenizer.source_tokenizer, source_vocab or config.vocab_size))
    parts = []
    for side, each, places in sides:
        if each.vocab_size > places:
            raise CheckpointError(
                f"the tokenizer{side} has {each.vocab_size:,} ids, the vocabulary of the model {places:,}",
                "they do not belong together: put the model's own tokenizer files there",
            )
        parts.append(f"{each.kind}{side}, {format_count(each.vocab_size, 'id')} in a vocabulary of {places:,}")
    return "; ".join(parts)


def _generation(generation: GenerationConfig) -> str:
    start, ends = generation.decoder_start_token_id, ", ".join(map(str, generation.eos_token_ids))
    begin = "" if start is None else f"a target begins with token {start}; "
    return begin + (f"a text ends at token {ends}" if ends else "no token ends a text")


def is_cache_dir(folder: Path) -> bool:
    return (folder / offload.disk_store.LOCK_NAME).is_file()


def check_cache_dir(folder: Path, *, fix: bool = False) -> Iterator[CheckResult]:
    """Yield the results for a cache directory.

    Raises:
        UsageError: If it is to be repaired, and another process uses it.
    """
    try:
        lock = REAL_FILE_SYSTEM.lock(folder / offload.disk_store.LOCK_NAME)
    except BlockingIOError:
        lock, owner = None, storage.filesystem.lock_owner(folder / offload.disk_store.LOCK_NAME)
        if fix:
            raise UsageError(f"{folder} is in use by {owner}", "stop it, or look without --fix") from None
        yield CheckResult("lock", True, f"{owner} holds it: what it writes now may look half done")
    try:
        orphans = []
        for each in storage.temp_paths.list_temp_paths(folder):
            with suppress(FileNotFoundError):
                orphans += [] if each.in_use else [each.path]
        for path in orphans:
            yield _fix_or_report("orphan", path, "a writer that died left it half written", fix)
        if not orphans:
            yield CheckResult("orphans", True, "none")
        yield from _entries(folder, fix)
        for pin in offload.pinned.read_pinned_prefixes(folder):
            missing = sum(not (folder / f"{key}.kv").exists() for key in pin.keys)
            text = f"{pin.name}: {missing} of {format_count(len(pin.keys), 'block')} are missing"
            text = text if missing else f"{pin.name}: {format_count(pin.tokens, 'token')}"
            advice = f"kvad prefix add ... --name {pin.name} computes them again"
            yield CheckResult("prefix", not missing, text, advice if missing else "")
    finally:
        if lock is not None:
            REAL_FILE_SYSTEM.close(lock)


def _entries(folder: Path, fix: bool) -> Iterator[CheckResult]:
    counts, models, sizes = Counter[str](), set[str](), 0
    for each in sorted(REAL_FILE_SYSTEM.list_files(folder)):
        path = folder / each.name
        if each.name == offload.disk_store.LOCK_NAME or storage.temp_paths.parse_temp_path(path) is not None:
            continue
        is_block = path.suffix == ".kv" and offload.disk_store.KEY_PATTERN.fullmatch(path.stem) is not None
        if not is_block and path.suffix != offload.pinned.FILE_SUFFIX:
            yield CheckResult("files", False, f"{each.name} is not the tier's", "move it elsewhere")
            continue
        state, text = _read(path, models)
        counts[state if is_block else f"pin {state}"] += 1
        sizes += each.size if state == "whole" else 0
        if state != "whole":
            yield _fix_or_report(state, path, text, fix and state == "damaged")
    pins = format_count(counts["pin whole"], "pin")
    contents = f"{format_count(counts['whole'], 'block')} and {pins} whole, {sizes:,} bytes"
    kinds = format_count(len(models), "model or way of keeping", "models or ways of keeping")
    yield CheckResult("entries", True, f"{contents}, of {kinds}")


def _read(path: Path, models: set[str]) -> tuple[str, str]:
    """Return the state of a file and what is wrong with it; its model is added to ``models``."""
    try:
        with storage.container.open_container(path) as entry:
            entry.check()
            models.add(str(sorted(entry.header.fingerprint.items())))
    except StorageError as error:
        return error.reason, error.message.removeprefix(f"{path}: ")
    except OSError as error:
        return "unread", str(error)
    return "whole", ""


def _fix_or_report(check: str, path: Path, problem: str, fix: bool) -> CheckResult:
    if fix:
        REAL_FILE_SYSTEM.remove(path)
        return CheckResult(check, True, f"{path.name}: {problem}; removed")
    is_safe = check in ("orphan", "damaged")
    advice = "kvad doctor --fix removes it" if is_safe else "it is left as it is"
    return CheckResult(check, False, f"{path.name}: {problem}", advice)
