"""Options of an engine, the keywords of ``LLM.load`` as typed dictionaries, and the plan of a cache."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

import torch

from kvad import cache as cache_lib
from kvad import config as cfg
from kvad import model as model_lib
from kvad import ops
from kvad.cache import CacheConfig, sizing
from kvad.cache.device import KVCache
from kvad.config import ModelConfig
from kvad.engine import scheduling
from kvad.engine.scheduling import SpeculativeConfig
from kvad.errors import ConfigError, MemoryPlanError, RequestError, UsageError, suggest
from kvad.model import Summarizer, Transformer
from kvad.storage import REAL_FILE_SYSTEM, FileSystem

CACHE_DTYPE_FIELDS = {"cache_dtype": "dtype", "cache_key_dtype": "key_dtype", "cache_value_dtype": "value_dtype"}


class ServedAdapter(NamedTuple):
    """An adapter that an engine keeps next to the base."""

    factors: Mapping[str, model_lib.lora.LoraFactors]  # by the name of the linear layer
    path: Path | None = None  # its folder, which may have a chat template
    stop_tokens: frozenset[int] = frozenset()  # end a text; none: the base's


@dataclass(frozen=True)
class EngineConfig:
    """Options of an engine besides its model, its cache and its tokenizer."""

    max_num_batched_tokens: int = 2048  # new tokens per step
    # Longest time between two tokens of a running sequence, in seconds: in a step in which sequences decode, others
    # read as many prompt tokens as measured steps allow. None: up to max_num_batched_tokens.
    max_inter_token: float | None = None
    # The same as a ratio to the time of a step without prompt tokens (``StepCosts``). None: no bound.
    max_slowdown: float | None = None
    kernel: ops.attention.Kernel = "auto"
    native: bool = True  # run the decoder with the native CPU kernels, where they can
    compile: bool = False  # run in PyTorch, with layers compiled by torch.compile, instead of the native kernels
    cuda_graphs: int = 64  # shapes of decoding steps that are recorded as CUDA graphs, on a GPU; 0: none
    # Logits and tokens of a request are independent of the batch and of chunking, bit for bit (CPU, one process; other
    # machines, builds and numbers of threads round differently).
    deterministic: bool = False
    speculative: SpeculativeConfig | None = None  # draft tokens that the model checks
    draft_model: Transformer | None = None  # of speculative method "draft"
    attention_hook: ops.sub_batch.AttentionHook | None = None  # called with the tensors of every attention layer
    summarizer: Summarizer | None = None  # computes the policy's summaries
    stop_tokens: frozenset[int] = frozenset()  # end a text; none: the tokenizer's separator and end token
    cache_factory: Callable[..., KVCache] = KVCache  # another one for several ranks (parallel/distributed_cache.py)
    weights_fingerprint: str | None = None  # of all ranks' weights; None: computed when a cache fingerprint needs it
    adapter_fingerprint: str = ""  # of an adapter merged into the weights
    # Adapters that requests choose by name; the base is computed as without them.
    adapters: Mapping[str, ServedAdapter] = dataclasses.field(default_factory=dict)
    swap_dir: str | Path | None = None  # for preempted sequences when ``cache.swap_space`` is full
    cost_model: scheduling.preemption.SwapCostModel | None = None  # decides between swapping and recomputing
    fs: FileSystem = REAL_FILE_SYSTEM  # for offloaded and swapped tokens

    def __post_init__(self) -> None:
        if self.cuda_graphs < 0:
            raise ConfigError(f"cuda_graphs: must be at least 0, got {self.cuda_graphs}", "Give 0 to record none.")
        if self.max_inter_token is not None and not 0 < self.max_inter_token < math.inf:
            message = f"max_inter_token: must be above 0 seconds, got {self.max_inter_token}"
            raise ConfigError(message, "Give 0.1, or omit it for no bound.")
        if self.max_slowdown is not None and not 1.2 <= self.max_slowdown < math.inf:
            message = f"max_slowdown: must be at least 1.2, got {self.max_slowdown}"
            raise ConfigError(message, "Give 2, or omit it for no bound.")
        if self.compile and self.deterministic:
            message = "compile: is not supported with deterministic, because compiled sums depend on the batch"
            raise ConfigError(message, "Omit one of them.")
        if self.compile and self.adapters:
            raise ConfigError("compile: is not supported with adapters that requests choose", "Omit one of them.")


class CacheOptions(TypedDict, total=False):
    """The fields of ``CacheConfig`` as keywords, except ``dtype``, which is ``cache_dtype`` in ``LLM.load``."""

    layout: Literal["paged", "contiguous"]
    key_dtype: str | None
    value_dtype: str | None
    block_size: int
    max_num_seqs: int
    max_seq_len: int
    prefill_chunk_size: int
    num_blocks: int | None
    enable_prefix_caching: bool
    max_source_len: int
    policy: str
    endless: bool
    rope_at: Literal["write", "read"]
    residual_length: int
    overflow: cache_lib.config.OverflowMode
    watermark: float
    offload_ram: int
    offload_dir: str | Path | None
    swap_space: int | None
    prefix_cache_dir: str | Path | None
    prefix_cache_size: int | None
    prefix_cache_ram: int | None
    prefix_cache_eviction: Literal["lru", "arc"]


class LoadOptions(CacheOptions, total=False):
    """Keywords of ``LLM.load`` for the cache and the engine; dtypes are names or torch dtypes."""

    cache_dtype: str | torch.dtype | None  # format of stored keys and values (cache/quantization.py)
    cache_key_dtype: str | torch.dtype | None
    cache_value_dtype: str | torch.dtype | None
    summarizer: str | Path | None  # folder or run of ``kvad train --objective summarizer``
    deterministic: bool
    compile: bool  # run in PyTorch, with layers compiled by torch.compile, instead of the native kernels
    speculative: (
        str | Mapping[str, Any] | SpeculativeConfig | None
    )  # "ngram", "ngram:K", or a SpeculativeConfig's fields
    swap_dir: str | Path | None
    max_num_batched_tokens: int  # new tokens of all sequences per step
    max_inter_token: float | None  # longest time between two tokens of a running sequence, in seconds
    max_slowdown: float | None  # the same, as a ratio to the time without prompts


class PlanSettings(TypedDict, total=False):
    """Arguments of ``plan_memory`` that do not concern the cache."""

    max_num_batched_tokens: int
    summarizer_shape: cfg.parameter_shapes.SummarizerShape | None
    deterministic: bool
    weights: int | None
    speculation: sizing.SpeculationShape | None
    adapters: int


def dtype_name(key: str, dtype: object, known: Iterable[str]) -> str | None:
    """Return a dtype's name (``torch.float32`` -> "float32"), or raise ConfigError."""
    name = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
    is_format = known is cache_lib.quantization.FORMATS and cache_lib.quantization.is_format(name)
    if name is None or (isinstance(name, str) and (is_format or name in known)):
        return name
    raise ConfigError(f"{key}: unknown dtype {name!r}", suggest(str(name), known))


def find_device(device: Any) -> torch.device:
    """Return the device ("auto": the first GPU, if any); raise UsageError if it is unknown or unavailable."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch_device = torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        raise UsageError(f"unknown device {device!r}", "Use 'cpu', 'cuda', 'cuda:1' or 'auto'.") from None
    label, hint = f"device {str(torch_device)!r}", "Use device 'cpu', the default."
    if torch_device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"{label}: this torch finds no CUDA device", hint)
    try:
        torch.zeros(1, device=torch_device).item()
    except (AssertionError, RuntimeError) as error:  # includes NotImplementedError of missing backends
        reason = str(error).partition("\n")[0]
        raise UsageError(f"{label} cannot be used here: {reason}", hint) from None
    return torch_device


def free_device_bytes(device: torch.device) -> int | None:
    """Return the free memory of a device with separate memory; None if unknown."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def resolve_cache(model: ModelConfig, default_dtype: str, fields: Mapping[str, Any]) -> CacheConfig:
    """Return a paged cache for sequences up to the model's limit, with these ``LoadOptions`` of the cache."""
    known = [*(field.name for field in dataclasses.fields(CacheConfig)), *CACHE_DTYPE_FIELDS]
    for name in fields:
        if name not in known:
            raise RequestError(f"unknown cache option {name!r}", suggest(name, known))
    chosen: dict[str, Any] = {"max_seq_len": model.max_seq_len, "dtype": default_dtype}
    if model.encoder_input is not None:
        chosen["max_source_len"] = model.encoder_input.max_seq_len
    chosen |= cache_lib.config.resolve_endless({n: value for n, value in fields.items() if n not in CACHE_DTYPE_FIELDS})
    for option, name in CACHE_DTYPE_FIELDS.items():
        if fields.get(option) is not None:
            chosen[name] = dtype_name(f"cache.{name}", fields[option], cache_lib.quantization.FORMATS)
    max_seq_len = chosen["max_seq_len"]
    if isinstance(max_seq_len, int) and max_seq_len > model.max_seq_len:
        raise RequestError(f"a context of {max_seq_len} tokens exceeds the model's limit of {model.max_seq_len}")
    return CacheConfig(**chosen)


def plan_cache(
    model: ModelConfig,
    fields: Mapping[str, Any],
    budget: sizing.MemoryBudget,
    free_bytes: int | None,
    *,
    is_host: bool = True,
    weights_dtype: str,
    **settings: Unpack[PlanSettings],
) -> sizing.MemoryPlan:
    """Plan a model with a cache for a device with ``free_bytes`` (None: unknown).

    Args:
        model: Model configuration.
        fields: ``LoadOptions`` of the cache. Sizes that they omit follow from the budget (``fit_plan``).
        budget: Maximum memory, and sizes of use.
        free_bytes: Free memory of the device.
        is_host: The device's memory is the host's.
        weights_dtype: Dtype of the weights and of the computation.
        **settings: Arguments of ``plan_memory``.

    Raises:
        RequestError: If a field is unknown.
        ConfigError: If a value is invalid, or the budget's amount is too small.
        MemoryPlanError: If the given sizes, or one sequence of one block, do not fit into the free memory.
    """
    longest = model.max_seq_len if budget.max_seq_len is None else min(budget.max_seq_len, model.max_seq_len)
    max_tokens = settings.get("max_num_batched_tokens", sizing.memory_plan.DEFAULT_BATCHED_TOKENS)
    num_seqs = max(1, min(budget.max_num_seqs, max_tokens))  # each sequence may have a token in a step
    if "num_blocks" in fields:
        num_seqs = min(num_seqs, sizing.fits.DEFAULT_SEQS)
    cache = resolve_cache(model, weights_dtype, {"max_num_seqs": num_seqs, "max_seq_len": longest, **fields})
    plan = sizing.plan_memory(model, cache, weights_dtype=weights_dtype, **settings)
    memory = budget.resolve(free_bytes)
    host_bytes = 0 if is_host else plan.host_bytes  # not in the device's memory
    plan = sizing.fit_plan(plan, None if memory is None else memory + host_bytes, fields.keys())
    if budget.amount != "auto" and memory is not None and memory < (free_bytes or memory + 1):
        try:
            sizing.require_memory(plan, memory + host_bytes, "is allowed (--memory)")
        except MemoryPlanError as error:
            raise ConfigError(f"memory: {error.message}", error.hint) from None
    else:
        sizing.require_memory(plan, None if free_bytes is None else free_bytes + host_bytes)
    return plan
