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
from typing import Any, NamedTuple, TypeVar

import torch

from kvad import checkpoint, ops, storage
from kvad import config as cfg
from kvad import engine as engine_lib
from kvad import model as model_lib
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


class KernelOptions(NamedTuple):
    """Options that decide what computes a model."""

    dtype: str | None = None  # of the computation; None: the stored one
    cache: Mapping[str, Any] = {}  # those of ``LoadOptions`` that concern the cache
    deterministic: bool = False
    compile: bool = False


class CheckResult(NamedTuple):
    """Result of a check."""

    check: str
    ok: bool
    message: str
    advice: str = ""  # what to do; "" if all is well


def check_checkpoint(
    where: str | Path,
    *,
    fix: bool = False,
    adapters: Mapping[str, Path] | None = None,
    options: KernelOptions | None = None,
) -> Iterator[CheckResult]:
    """Yield the results of all checks; CheckpointError if the path is no checkpoint.

    ``fix`` writes the checksums of edited text files into the manifest; ``adapters`` are those that requests choose.
    """
    path, options = checkpoint.hub.resolve_model_path(where), options or KernelOptions()
    if path.is_file():
        yield from _check_gguf(checkpoint.gguf.GGUFCheckpoint(path), adapters or {}, options)
        return
    folder = checkpoint.folder.locate(path)
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
    if config is not None and tensors is not None:
        yield from _check_engine(handle, adapters or {}, options)


def _check_gguf(
    handle: checkpoint.gguf.GGUFCheckpoint, adapters: Mapping[str, Path], options: KernelOptions
) -> Iterator[CheckResult]:
    """Check a GGUF file, which has no checksums."""

    def describe(config: ModelConfig) -> str:
        count = cfg.parameter_shapes.num_parameters(config)
        return f"GGUF of {with_article(handle.origin)}, {with_article(config.kind)} of {count:,} parameters"

    config = yield from _try_check("config", REDOWNLOAD_HINT, lambda: handle.config, describe)
    if config is None:
        return

    def read() -> list[str]:
        return [f"{name}: NaN or infinite" for name, tensor in handle.weights() if not bool(tensor.isfinite().all())]

    broken = yield from _try_check("tensors", REDOWNLOAD_HINT, read, lambda _: TENSORS_FIT)
    if broken is not None:
        yield from _problem_results("finite", broken, "every weight is a finite number", REDOWNLOAD_HINT)
    yield from _text_files(config, handle)
    if broken is not None:
        yield from _check_engine(handle, adapters, options)


def _check_engine(
    handle: CheckpointHandle, adapters: Mapping[str, Path], options: KernelOptions
) -> Iterator[CheckResult]:
    """Describe what computes the model, and check the adapters that requests choose."""
    try:
        outline = checkpoint.loader.outline_model(handle, options.dtype)
    except CheckpointError:  # an earlier check has reported it
        return
    engine = _EngineChecks(handle, outline, options)
    if handle.config.decoder is not None:
        yield from _try_check("kernels", "choose other options", engine.describe_kernels, str)
    for name, path in adapters.items():
        run = partial(engine.describe_adapter, name, path)
        yield from _try_check("adapter", "choose an adapter of this model", run, str)


class _EngineChecks(NamedTuple):
    """Checks of an engine of a model with given options, without its weights in memory."""

    handle: CheckpointHandle
    outline: checkpoint.loader.ModelOutline
    options: KernelOptions

    def cache(self) -> CacheConfig:
        """Return the cache; raise ConfigError if it is invalid."""
        return engine_lib.options.resolve_cache(self.handle.config, self.outline.model.dtype_name, self.options.cache)

    def support(self, adapters: Mapping[str, Mapping[str, model_lib.lora.LoraFactors]]) -> execution.KernelSupport:
        """Return what the native kernels would compute."""
        if self.options.compile:
            return execution.KernelSupport("the engine has compile=True")
        model, copied = self.outline
        deterministic = self.options.deterministic
        return execution.kernel_support(model, self.cache(), copied, adapters=adapters, deterministic=deterministic)

    def describe_kernels(self) -> str:
        """Describe what runs the decoder on a CPU and on a GPU; raise ConfigError if it cannot have this cache."""
        gpu_dtype = self.options.dtype or _dtype_name(self.handle.stored_dtype)
        gpu = f"on a GPU with Triton, {execution.describe_gpu(self.handle.config, self.cache(), gpu_dtype)}"
        reason, library = self.support({}).reason, ops.native.load().library
        if reason or library is None:
            return f"on a CPU, the decoder runs in PyTorch: {reason}; {gpu}"
        return f"on a CPU, the decoder runs in the native kernels ({library.variant}); {gpu}"

    def describe_adapter(self, name: str, path: Path) -> str:
        """Describe what an adapter that requests choose changes; CheckpointError if the model cannot serve it."""
        adapters = engine_lib.loading.load_adapters(self.handle, {name: path})
        factors, num_tokens = adapters[name].factors, sizing.memory_plan.DEFAULT_BATCHED_TOKENS
        ranks, dtype = sorted({each.a.shape[0] for each in factors.values()}), self.outline.model.dtype_name
        stored = engine_lib.loading.adapter_bytes(adapters, dtype, 0)
        terms = engine_lib.loading.adapter_bytes(adapters, dtype, num_tokens) - stored
        size = f"rank {', '.join(map(str, ranks))} on {format_count(len(factors), 'layer')}"
        memory = f"{stored:,} bytes of factors, and at most {terms:,} for a step of {num_tokens:,} tokens"
        reason, layer = self.support({name: factors})
        steps = f"steps with it run in PyTorch: {reason or f'the native kernels add no terms to {layer}'}"
        steps = steps if reason or layer else "steps with it run in the native kernels"
        return f"{name}: {size}, {memory}; on a CPU, {steps}"


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
    dtypes = ", ".join(sorted({_dtype_name(tensors.dtype(name)) for name in tensors}))
    size = format_count(tensors.total_bytes, "byte")
    return f"{format_count(len(tensors), 'tensor')} in {files}, {dtypes}, {size}"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
