"""``kvad.verify``: compare the caches of a checkpoint's engine with the uncached model."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

import kvad.verify as verify_lib  # kvad.verify is also a function
from kvad import benchmarks, checkpoint, engine, parallel
from kvad.cache import sizing
from kvad.engine.scheduling import SpeculativeConfig
from kvad.errors import ConfigError, MemoryPlanError, RequestError, UsageError, check_names

if TYPE_CHECKING:
    from kvad.checkpoint import CheckpointHandle
    from kvad.config import ModelConfig
    from kvad.engine import EngineConfig
    from kvad.model import Transformer
    from kvad.text import Tokenizer

VERIFY_SETTINGS = {  # with their defaults
    "dtype": None, "device": None, "memory": None, "adapter": None, "rope_scaling": None, "activation_bits": None,
    "summarizer": None, "speculative": None,
    "deterministic": False, "compile": False, "max_num_batched_tokens": None, "max_inter_token": None,
    "layouts": ("paged", "contiguous"), "cache_dtypes": (),
    "policies": (), "rope_at": "write", "endless": False, "num_prompts": None, "max_tokens": None,
    "prefill_chunk_size": 32, "block_size": None, "preempt": True, "prefix_hit": True, "round_trips": (),
    "num_beams": 1, "prefix_cache_ram": None, "mesh": None, "against": None, "inject_fault": None,
}  # fmt: skip
HF_SETTINGS = {  # of --against hf; the length of generated prompts depends on block_size
    "dtype", "device", "memory", "adapter", "rope_scaling", "num_prompts", "max_tokens", "block_size",
    "prefill_chunk_size", "against",
}  # fmt: skip
SCENARIO_FIELDS = ("prefill_chunk_size", "preempt", "prefix_hit", "endless", "num_beams", "prefix_cache_ram")
MAX_PROMPTS = 64  # of different lengths; a longer list has prompts of a single token
PLAIN_FORMATS = ("float32", "bfloat16", "float16", "float64")


class VerifySettings(TypedDict, total=False):
    """Settings of ``verify``: the options of ``kvad verify``."""

    dtype: str | None
    device: str | None
    memory: Literal["auto"] | int | float | None
    adapter: str | Path | None
    rope_scaling: str | Mapping[str, Any] | None
    activation_bits: int | None
    summarizer: str | Path | None
    speculative: str | Mapping[str, Any] | SpeculativeConfig | None  # drafts: the right tokens, every third one wrong
    deterministic: bool
    compile: bool
    max_num_batched_tokens: int | None
    max_inter_token: float | None
    layouts: Sequence[str]
    cache_dtypes: Sequence[str]
    policies: Sequence[str]
    rope_at: Literal["write", "read", "both"]
    endless: bool
    num_prompts: int | None
    max_tokens: int | None
    prefill_chunk_size: int
    block_size: int | None
    preempt: bool
    prefix_hit: bool
    round_trips: Sequence[str]
    num_beams: int
    prefix_cache_ram: int | None
    mesh: str | None
    against: Literal["hf"] | None
    inject_fault: str | None


def verify(
    model: str | Path,
    *,
    prompts: Sequence[str] = (),
    progress: Callable[[str], None] = lambda _: None,
    **settings: Unpack[VerifySettings],
) -> verify_lib.report.VerifyReport:
    """Compare every requested cache configuration with the uncached model, as ``kvad verify`` does.

    Args:
        model: A checkpoint.
        prompts: Texts, one sequence each (default: generated ones of different length).
        progress: Called with a description of each step.
        **settings: ``VerifySettings``.

    Raises:
        UsageError: If a setting is unknown or impossible.
        MemoryPlanError: If model, reference and caches would not fit.
    """
    check_names(settings, tuple(VERIFY_SETTINGS))
    own: dict[str, Any] = {**VERIFY_SETTINGS, **settings}
    if own["against"] is not None:
        _check_hf_settings(own)
    network, handle, config = _load_served(model, own)
    dtype = network.dtype_name
    available = _available_memory(own["memory"], network)
    max_tokens, block_size = verify_lib.default_sizes(network.config, own["max_tokens"], own["block_size"])
    options = verify_lib.ScenarioOptions(
        layouts=tuple(own["layouts"]),
        dtypes=tuple(own["cache_dtypes"] or _default_formats(dtype)),
        num_seqs=own["num_prompts"] or len(prompts) or 5,
        block_size=block_size,
        tokens=max_tokens,
        rotates=("write", "read") if own["rope_at"] == "both" else (own["rope_at"],),
        round_trips=tuple(own["round_trips"]),
        mesh=None if own["mesh"] is None else parallel.Mesh.parse(own["mesh"]),
        **{name: own[name] for name in SCENARIO_FIELDS},
    )

    def check_room(lengths: Sequence[int]) -> verify_lib.ScenarioOptions:
        try:
            return verify_lib.require_verify_memory(network.config, lengths, options, available, dtype)
        except MemoryPlanError as error:
            if own["memory"] in (None, "auto"):
                raise
            raise ConfigError(f"memory: {error.message}", error.hint) from None

    streams = _encode_prompts(network.config, options, handle.tokenizer, prompts, check_room)
    longest = max(map(len, streams)) + max_tokens
    policies = verify_lib.parse_policies(own["policies"], longest, block_size)
    options = dataclasses.replace(options, policies=policies)
    lengths = [len(stream) for stream in streams]
    options = check_room(lengths)
    if own["against"] is not None:
        return _verify_hf(network, handle, streams, options, progress)
    return verify_lib.verify(
        network,
        streams,
        options,
        config=config,
        fault=own["inject_fault"],
        language=_needle_language(handle.tokenizer),
        progress=progress,
    )


def _check_hf_settings(own: Mapping[str, Any]) -> None:
    """Refuse settings of kvad's engine and caches, which transformers' caches do not have."""
    for name in (name for name, default in VERIFY_SETTINGS.items() if name not in HF_SETTINGS and own[name] != default):
        raise UsageError(f"against: {name} has no meaning for transformers' caches", "Omit it.")


def _load_served(model: str | Path, own: Mapping[str, Any]) -> tuple[Transformer, CheckpointHandle, EngineConfig]:
    """Load what ``LLM.load`` would with these settings: model, opened checkpoint and options of the engine."""
    handle = checkpoint.open_checkpoint(model, rope_scaling=own["rope_scaling"])
    if own["adapter"] is not None:
        handle = checkpoint.adapter.merge_adapter(handle, Path(own["adapter"]))
    device = engine.options.find_device(own["device"] or "cpu")
    fields = {name: own[name] for name in ("deterministic", "compile", "max_inter_token")}
    config = engine.EngineConfig(speculative=SpeculativeConfig.from_options(own["speculative"]), **fields)
    if config.speculative is not None and config.speculative.method != "ngram":
        message = f"speculative: must be ngram, got {config.speculative.method}"
        raise UsageError(message, "Drafts do not come from a model here: they are known tokens and wrong ones.")
    if own["max_num_batched_tokens"] is not None:
        config = dataclasses.replace(config, max_num_batched_tokens=own["max_num_batched_tokens"])
    config = engine.loading.with_adapters(config, handle, own["summarizer"])
    return checkpoint.loader.load_weights(handle, own["dtype"], device, own["activation_bits"]), handle, config


def _verify_hf(
    model: Transformer,
    handle: CheckpointHandle,
    prompts: Sequence[Sequence[int]],
    options: verify_lib.ScenarioOptions,
    progress: Callable[[str], None],
) -> verify_lib.report.VerifyReport:
    """Compare transformers' caches with the reference; a folder in kvad's layout is exported first."""
    with tempfile.TemporaryDirectory(prefix="kvad-verify-") as temp:
        folder = handle.path
        if not checkpoint.folder.is_hf(folder) or isinstance(handle, checkpoint.adapter.AdaptedCheckpoint):
            folder = Path(temp) / "hf"
            checkpoint.export.export_hf(handle, folder)
        return verify_lib.hf_caches.verify_hf(folder, model, prompts, options, progress)


def _available_memory(memory: Literal["auto"] | int | float | None, model: Transformer) -> int | None:
    """Return the bytes that the model, its reference and the caches may use, weights included."""
    device = model.token_embedding.device
    if device.type == "cpu":
        free = sizing.available_bytes()
    else:
        free = engine.options.free_device_bytes(device)
        weights = sum(parameter.nbytes for parameter in model.parameters())
        free = None if free is None else free + weights
    return free if memory is None else sizing.MemoryBudget(memory).resolve(free)


def _default_formats(dtype: str) -> tuple[str, ...]:
    """Return the model's dtype first, as ``generate`` stores it; of a float32 model the other plain formats too."""
    return tuple(dict.fromkeys((dtype, *(PLAIN_FORMATS if dtype == "float32" else ()))))


def _encode_prompts(
    config: ModelConfig,
    options: verify_lib.ScenarioOptions,
    tokenizer: Tokenizer | None,
    texts: Sequence[str],
    check_room: Callable[[Sequence[int]], object],
) -> list[list[int]]:
    """Build the prompts; MemoryPlanError is raised first if so many would not fit."""
    if not texts:
        few = dataclasses.replace(options, num_seqs=min(options.num_seqs, MAX_PROMPTS))
        prompts = verify_lib.build_prompts(config, few, tokenizer)
    elif tokenizer is None:
        raise RequestError("the model has no tokenizer", "omit --prompt: random tokens are used")
    else:
        prompts = [tokenizer.encode(text) for text in texts]
    check_room([len(prompt) for prompt in prompts])
    return prompts if len(prompts) == options.num_seqs else verify_lib.build_prompts(config, options, tokenizer)


def _needle_language(tokenizer: Tokenizer | None) -> benchmarks.needle_tasks.HaystackLanguage | None:
    """Return the lookup language if the tokenizer has it, else the built-in text; None without a tokenizer."""
    if tokenizer is None:
        return None
    opening = benchmarks.needle_tasks.opening_tokens(tokenizer)
    return benchmarks.needle_tasks.choose_language("auto", tokenizer, lambda: [verify_lib.scenario.TEXT], opening)
