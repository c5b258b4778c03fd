"""Caches with one deliberate fault each, used by ``kvad verify --inject-fault``.

Every fault is injected from outside through KVCache's public interface (groups, tensors, the model input it opens,
its views), so ``kvad.cache`` contains no code for faults. A fault is a typical programming error, not noise. Names
and typical causes are in :data:`kvad.verify.report.FAULTS`.

Some errors are no faults here: blocks in another order, or all slots of a block shifted alike, change nothing,
because a slot's position is stored with it. The faults below are those that this does not forgive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kvad import ops
from kvad.cache import CacheConfig, CacheGroup, build_groups
from kvad.cache.device import KVCache
from kvad.config import ModelConfig, RopeConfig, attention_specs
from kvad.errors import UsageError, suggest
from kvad.model import Transformer
from kvad.model_input import NULL_BLOCK, AttentionParams, CacheView, ModelInput, SlotMapping, SubBatch
from kvad.verify.report import FAULTS, UNKNOWN_FAULT

LOWER_LEVEL_FAULTS = {"float64": "float32", "float32": "bfloat16", "float16": "bfloat16"}


def check_fault_name(fault: str, config: ModelConfig, cache: CacheConfig) -> None:
    """Check that a fault exists and is possible for this model and cache.

    Raises:
        UsageError: If not.
    """
    known = [name for name in FAULTS if name != UNKNOWN_FAULT]
    if fault not in known:
        raise UsageError(f"--inject-fault: unknown fault {fault!r}", suggest(fault, known))
    if config.decoder is None:
        raise UsageError("--inject-fault: an encoder has no cache")
    layers = [config.stack.layer_config(i).attention for i in range(config.stack.num_layers)]
    if fault == "rotation" and not any(isinstance(mixer.position, RopeConfig) for mixer in layers):
        raise UsageError(
            "--inject-fault rotation: no layer of this model rotates its keys", "Use --inject-fault position."
        )
    if fault == "position" and config.embedding.position is None and all(mixer.position is None for mixer in layers):
        raise UsageError("--inject-fault position: this model has no positions", "Use --inject-fault cursor.")
    if fault == "mask" and cache.prefill_chunk_size == 1:
        raise UsageError("--inject-fault mask: with --prefill-chunk-size 1 no key is after a query", "Use 2 or more.")
    if fault == "layer" and _first_shared_layers(build_groups(attention_specs(config), cache)) is None:
        raise UsageError(
            "--inject-fault layer: no two layers of this model share a cache group", "Use --inject-fault table."
        )


def inject_cache_fault(
    fault: str | None,
    groups: Sequence[CacheGroup],
    attention_hook: ops.sub_batch.AttentionHook | None = None,
    *,
    rotate: Literal["write", "read"] = "write",
    exact: bool = False,
) -> KVCache:
    """Build a KVCache, with ``fault`` if given.

    ``position`` is a fault of the model, see :func:`inject_model_fault`.
    """
    build = partial(KVCache, attention_hook=attention_hook, rope_at=rotate, exact_rope=exact)
    if fault == "mask":
        non_causal = [group._replace(spec=group.spec._replace(causal=False)) for group in groups]
        return build(non_causal)
    if fault == "dtype" and all(group.key_format in LOWER_LEVEL_FAULTS for group in groups):
        lower = {
            name: LOWER_LEVEL_FAULTS.get(name, name)
            for group in groups
            for name in (group.key_format, group.value_format)
        }
        return build([g._replace(key_format=lower[g.key_format], value_format=lower[g.value_format]) for g in groups])
    if fault in OP_FAULTS:
        return _MisplacingKVCache(
            OP_FAULTS[fault], groups, attention_hook=attention_hook, rope_at=rotate, exact_rope=exact
        )
    if fault in VIEW_FAULTS:
        return _ModifiedInputsKVCache(
            VIEW_FAULTS[fault], groups, attention_hook=attention_hook, rope_at=rotate, exact_rope=exact
        )
    kv_cache = build(groups)
    if fault == "layer":
        pair = _first_shared_layers(groups)
        assert pair is not None
        kv_cache.keys[pair[1]], kv_cache.values[pair[1]] = kv_cache.keys[pair[0]], kv_cache.values[pair[0]]
    return kv_cache


@contextmanager
def inject_model_fault(fault: str | None, model: Transformer) -> Iterator[None]:
    """Inject ``position``: while open, tokens after cached ones get a position that is too small by one."""
    if fault != "position":
        yield
        return
    hook = model.register_forward_pre_hook(_shift_positions)
    try:
        yield
    finally:
        hook.remove()


def _shift_positions(_model: nn.Module, inputs: tuple[ModelInput, object]) -> tuple[ModelInput, object]:
    model_input, kv_cache = inputs
    positions = model_input.positions.clone()
    for low, high in _sequence_spans(model_input.sub_batches):
        if model_input.slot_mappings and positions[low] > 0:
            positions[low:high] -= 1
    return model_input._replace(positions=positions), kv_cache


def _first_shared_layers(groups: Sequence[CacheGroup]) -> tuple[int, int] | None:
    """Return the first two layers that share a cache group."""
    return next(((group.layers[0], group.layers[1]) for group in groups if len(group.layers) > 1), None)


def _sequence_spans(sub_batches: Sequence[SubBatch]) -> list[tuple[int, int]]:
    """Return (first, last + 1) of every sequence's new tokens in the flat tensor."""
    spans = []
    for sub_batch, (low, high) in zip(sub_batches, ops.sub_batch.sub_batch_spans(sub_batches), strict=True):
        spans += [(at, at + sub_batch.num_new_tokens) for at in range(low, high, sub_batch.num_new_tokens)]
    return spans


# ---------------------------------------------------------------- faults of slots and block tables


class _MisplacingKVCache(KVCache):
    """Opens every step with changed slot mappings."""

    def __init__(
        self,
        change: Callable[[SlotMapping, CacheGroup, ModelInput], SlotMapping],
        groups: Sequence[CacheGroup],
        **cache_options: Any,
    ) -> None:
        super().__init__(groups, **cache_options)
        self._change = change

    def open(self, model_input: ModelInput) -> Sequence[CacheView]:
        slot_mappings = tuple(
            self._change(mapping, group, model_input) if mapping.slots is not None else mapping
            for mapping, group in zip(
                model_input.slot_mappings, self.groups, strict=False
            )  # an encoder's step has no slot mappings
        )
        return super().open(model_input._replace(slot_mappings=slot_mappings))


def _write_one_slot_early(mapping: SlotMapping, group: CacheGroup, model_input: ModelInput) -> SlotMapping:
    """``cursor``: tokens after cached ones are written one slot early, over the last of them."""
    if mapping.slots is None:
        return mapping
    slots, size = mapping.slots.clone(), group.block_size
    tables = [table for sub_batch_tables in mapping.block_tables for table in sub_batch_tables.tolist()]
    for (low, high), table in zip(_sequence_spans(model_input.sub_batches), tables, strict=True):
        block, offset = divmod(int(slots[low]), size)
        before = table.index(block) - 1
        if model_input.positions[low] == 0 or (offset == 0 and before < 0 and group.max_blocks_per_seq > 1):
            continue
        last = slots[low:high].clone()
        slots[low] = block * size + offset - 1 if offset else table[before] * size + size - 1
        slots[low + 1 : high] = last[:-1]
    return mapping._replace(slots=slots)


def _wrong_block(mapping: SlotMapping, group: CacheGroup, _model_input: ModelInput) -> SlotMapping:
    """``table``: the first block is read from the last one's index.

    A sequence of one block reads the null block.
    """
    tables = []
    for sub_batch_tables in mapping.block_tables:
        sub_batch_tables = sub_batch_tables.clone()
        for row in sub_batch_tables:
            count = int((row != NULL_BLOCK).sum())
            if count > 1:
                row[0] = row[count - 1]
            elif group.max_blocks_per_seq == 1:
                row[0] = NULL_BLOCK
        tables.append(sub_batch_tables)
    return mapping._replace(block_tables=tuple(tables))


def _neighbor_block(mapping: SlotMapping, _group: CacheGroup, _model_input: ModelInput) -> SlotMapping:
    """``neighbor``: the first block is read from the block table of the next sequence of the step."""
    rows = [row for sub_batch_tables in mapping.block_tables for row in sub_batch_tables.tolist()]
    tables = tuple(sub_batch_tables.clone() for sub_batch_tables in mapping.block_tables)
    targets = [row for sub_batch_tables in tables for row in sub_batch_tables]
    for index, target in enumerate(targets):
        for other in (*rows[index + 1 :], *rows[:index]):
            if other[0] not in rows[index]:
                target[0] = other[0]
                break
    return mapping._replace(block_tables=tables)


# ---------------------------------------------------------------- arithmetic faults


FaultFn = Callable[[Tensor, Tensor, AttentionParams, ModelInput], tuple[Tensor, Tensor, AttentionParams]]


class _ModifiedInputsKVCache(KVCache):
    """Changes q, k and the attention parameters of every call."""

    def __init__(self, change: FaultFn, groups: Sequence[CacheGroup], **cache_options: Any) -> None:
        super().__init__(groups, **cache_options)
        self._change = change

    def open(self, model_input: ModelInput) -> Sequence[CacheView]:
        return [_ModifiedInputsView(view, model_input, self._change) for view in super().open(model_input)]


class _ModifiedInputsView:
    def __init__(self, view: CacheView, model_input: ModelInput, change: FaultFn) -> None:
        self._view, self._model_input, self._change = view, model_input, change

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, params: AttentionParams) -> Tensor:
        if k is not None:
            q, k, params = self._change(q, k, params, self._model_input)
        return self._view.attend(q, k, v, params)

    def write(self, k: Tensor, v: Tensor) -> None:
        self._view.write(k, v)


def _skip_key_rope(
    q: Tensor, k: Tensor, params: AttentionParams, model_input: ModelInput
) -> tuple[Tensor, Tensor, AttentionParams]:
    """``rotation``: queries are rotated, keys are stored unrotated."""
    if params.rotary is None:
        return q, k, params
    return ops.rotary.RotaryCache(model_input.positions).rotate(q, params.rotary), k, params._replace(rotary=None)


def _scale_twice(
    q: Tensor, k: Tensor, params: AttentionParams, _model_input: ModelInput
) -> tuple[Tensor, Tensor, AttentionParams]:
    """``scale``: divided by sqrt(head dim) once more."""
    return q, k, params._replace(scale=params.scale / max(k.shape[-1], 2) ** 0.5)


def _round_keys_to_8_bits(
    q: Tensor, k: Tensor, params: AttentionParams, _model_input: ModelInput
) -> tuple[Tensor, Tensor, AttentionParams]:
    """``dtype`` if no coarser tensor format exists: keys are rounded to eight bits."""
    return q, k.to(torch.float8_e5m2).to(k.dtype), params


OP_FAULTS = {"cursor": _write_one_slot_early, "table": _wrong_block, "neighbor": _neighbor_block}
VIEW_FAULTS = {"rotation": _skip_key_rope, "scale": _scale_twice, "dtype": _round_keys_to_8_bits}
