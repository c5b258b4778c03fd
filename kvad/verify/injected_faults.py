"""Engines with one deliberate fault each, used by ``kvad verify --inject-fault``.

Every fault is injected from outside, into the interfaces between the parts of an engine (groups, tensors, the model
input that a cache opens, its views, the KVCacheManager's admissions), so no other package contains code for faults. A
fault is a typical programming error, not noise. Names and typical causes are in ``kvad.verify.report.FAULTS``.

Some errors are no faults here: blocks in another order, or all slots of a block shifted alike, change nothing,
because a slot's position is stored with it. The faults below are those that this does not forgive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvad import cache as cache_lib
from kvad import config as cfg
from kvad import model as model_lib
from kvad import ops, parallel
from kvad.cache import CacheConfig, CacheGroup, build_groups
from kvad.cache.device import KVCache
from kvad.config import ModelConfig, attention_specs
from kvad.engine import Engine
from kvad.errors import UsageError, suggest
from kvad.model import Transformer
from kvad.model_input import NULL_BLOCK, AttentionParams, CacheView, ModelInput, SlotMapping, SubBatch, WrappedView
from kvad.verify.report import FAULTS, UNKNOWN_FAULT

LOWER_DTYPES = {"float64": torch.float32, "float32": torch.bfloat16, "float16": torch.bfloat16}  # by format
AttentionInputs = tuple[Tensor, Tensor, AttentionParams]  # q, k, params


RANK_FAULTS = ("rank-heads", "prefix", "salt")  # those that a mesh can have


def check_fault_name(fault: str, config: ModelConfig, cache: CacheConfig, mesh: parallel.Mesh | None = None) -> None:
    """Check that a fault exists and is possible for this model and cache.

    Raises:
        UsageError: If not.
    """
    known = [name for name in FAULTS if name != UNKNOWN_FAULT]
    if fault not in known:
        raise UsageError(f"--inject-fault: unknown fault {fault!r}", suggest(fault, known))
    if config.decoder is None:
        raise UsageError("--inject-fault: an encoder has no cache")
    positions = [layer.attention.position for layer in config.stack.layer_types.values()]
    has_position = config.embedding.position is not None or any(position is not None for position in positions)
    groups, keys = build_groups(attention_specs(config), cache), cache.token_formats[0]
    moves = any(group.eviction_policy is not None or group.demotion_policy is not None for group in groups)
    shares_blocks = cache.layout == "paged" and cache.enable_prefix_caching and not moves
    no_sharing = "sequences of this cache share no blocks", "Use --layout paged and --policy full."
    get_format = cache_lib.quantization.get_format
    requirements = {  # fault: possible, reason if not, what to do instead
        "rotation": (
            any(isinstance(position, cfg.RopeConfig) for position in positions),
            "no layer of this model rotates its keys",
            "Use --inject-fault position.",
        ),
        "position": (has_position, "this model has no positions", "Use --inject-fault cursor."),
        "mask": (cache.prefill_chunk_size > 1, "with --prefill-chunk-size 1 no key is after a query", "Use 2 or more."),
        "prefix": (shares_blocks, *no_sharing),
        "salt": (shares_blocks, *no_sharing),
        "block-store": (
            shares_blocks and cache.prefix_cache_ram is not None,
            "this cache has no block store",
            "Use --prefix-cache-ram 1GiB.",
        ),
        "quantization-scale": (
            any(spec.name == "scale" and spec.granularity == "slot" for spec in get_format(keys).arrays(2)),
            f"{keys} has no scales of single keys",
            "Use --cache-dtype int8.",
        ),
        "summary": (
            any(group.has_summaries for group in groups),
            "this cache has no summaries",
            "Use --policy tiered.",
        ),
        "state": (
            any(group.spec.is_state for group in groups),
            "all layers of this model are attention",
            "Use --inject-fault cursor.",
        ),
        "rank-heads": (
            mesh is not None and mesh.tensor_parallel > 1,
            "this engine has one tensor rank",
            "Use --mesh 2x1.",
        ),
        "layer": (
            _first_shared_layers(groups) is not None,
            "no two layers of this model share a cache group",
            "Use --inject-fault table.",
        ),
    }
    is_possible, reason, hint = requirements.get(fault, (True, "", ""))
    if mesh is not None and fault not in RANK_FAULTS:
        is_possible, reason, hint = False, f"it is injected into one process, not a mesh of {mesh}", "Omit --mesh."
    if not is_possible:
        raise UsageError(f"--inject-fault {fault}: {reason}", hint)


def inject_cache_fault(fault: str | None, groups: Sequence[CacheGroup], **options: Any) -> KVCache:
    """Build a KVCache, with ``fault`` if it is one of the cache; ``options`` are those of KVCache."""
    if fault == "mask":
        groups = [group._replace(spec=group.spec._replace(causal=False)) for group in groups]
    if fault in MAPPING_FAULTS or fault in INPUT_FAULTS:
        return _FaultyKVCache(fault, groups, **options)
    if fault in ("quantization-scale", "state"):
        return (_StatelessKVCache if fault == "state" else _ScalelessKVCache)(groups, **options)
    kv_cache = KVCache(groups, **options)
    if fault == "layer":
        pair = _first_shared_layers(groups)
        assert pair is not None
        kv_cache.keys[pair[1]], kv_cache.values[pair[1]] = kv_cache.keys[pair[0]], kv_cache.values[pair[0]]
    if fault == "dtype":
        for store in kv_cache.keys:
            lower = LOWER_DTYPES.get(store.format.name, torch.float8_e5m2)
            setattr(store, "write", partial(_write_rounded, store.write, lower))  # noqa: B010
    if fault == "summary":
        kv_cache.summarizers = {layer: _half_as_many for weights in kv_cache.weights for layer in weights}
    return kv_cache


@contextmanager
def inject_model_fault(fault: str | None, model: Transformer) -> Iterator[None]:
    """Inject a fault of the model while open.

    ``position``: tokens after cached ones get a position that is too small by one. ``packed``: joined products are too
    large by 5%.
    """
    if fault == "packed":
        packs = [pack for pack, _ in model.projections()]
        for pack in packs:
            pack.__class__ = _WrongProduct
        yield
        for pack in packs:
            pack.__class__ = ops.linear.PackedLinear
    elif fault == "position":
        hook = model.register_forward_pre_hook(_shift_positions)
        yield
        hook.remove()
    else:
        yield


class _WrongProduct(ops.linear.PackedLinear):
    def __call__(self, x: Tensor, *layers: ops.linear.Linear) -> Sequence[Tensor]:
        return [1.05 * product for product in super().__call__(x, *layers)]


def inject_engine_fault(fault: str | None, engine: Engine) -> None:
    """Inject a fault of the engine's prefix cache, before the first request."""
    if fault == "salt":
        root = engine._root
        setattr(engine, "_root", lambda _salt, *rest: root("", *rest))  # noqa: B010
    elif fault == "prefix":
        _ignore_parents(engine)
    elif fault == "block-store" and engine.block_store is not None:
        stage, staged = engine.block_store.stage_load, list[Mapping[int, Any]]()

        def stage_previous(buffers: Mapping[int, Any]) -> int:
            staged.append(buffers)
            return stage(staged[-2] if len(staged) > 1 and staged[-2].keys() == buffers.keys() else buffers)

        setattr(engine.block_store, "stage_load", stage_previous)  # noqa: B010


def _ignore_parents(engine: Engine) -> None:
    """Find blocks by their own tokens: the first block of an earlier sequence replaces the one before them."""
    manager, size = engine.kv_cache_manager, engine.cache.block_size
    add_sequence, known = manager.add_sequence, list[Sequence[int]]()

    def add(seq_index: int, token_ids: Sequence[int], *rest: Any) -> int | None:
        other = next((tokens for tokens in known if tokens[size : 2 * size] == token_ids[size : 2 * size]), token_ids)
        known.append(list(token_ids[: 2 * size]))
        return add_sequence(seq_index, [*other[:size], *token_ids[size:]], *rest)

    setattr(manager, "add_sequence", add)  # noqa: B010


def give_heads_of_first_rank(model: Transformer, mesh: parallel.Mesh) -> None:
    """``rank-heads``: the shard of q, k and v that this rank will take is that of the stage's first rank."""
    for module in model.modules():
        if isinstance(module, model_lib.attention.Attention):
            for layer in (module.q, module.k, module.v):
                for parameter in (x for x in (layer.weight, layer.bias) if x is not None):
                    parameter.data = parameter.data.roll(len(parameter) // mesh.tensor_parallel * mesh.tensor_rank, 0)


def _write_rounded(write: Callable[..., None], dtype: torch.dtype, blocks: Tensor, offsets: Tensor, x: Tensor) -> None:
    """``dtype``: keys are rounded to a lower precision before they are written."""
    write(blocks, offsets, x.to(dtype).to(x.dtype))


def _half_as_many(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Summarize by means, with the weight of half as many tokens."""
    return keys.mean(dim=2), values.mean(dim=2), keys.new_full(keys.shape[:2], -math.log(2))


def _shift_positions(_model: nn.Module, inputs: tuple[ModelInput, object]) -> tuple[ModelInput, object]:
    model_input, kv_cache = inputs
    positions = model_input.positions.clone()
    for low, high in _sequence_spans(model_input.sub_batches):
        if model_input.slot_mappings and positions[low] > 0:
            positions[low:high] -= 1
    return model_input._replace(positions=positions), kv_cache


def _first_shared_layers(groups: Sequence[CacheGroup]) -> tuple[int, int] | None:
    return next(((group.layers[0], group.layers[1]) for group in groups if len(group.layers) > 1), None)


def _sequence_spans(sub_batches: Sequence[SubBatch]) -> list[tuple[int, int]]:
    """Return (first, last + 1) of every sequence's new tokens in the flat tensor."""
    spans = []
    for sub_batch, (low, high) in zip(sub_batches, ops.sub_batch.sub_batch_spans(sub_batches), strict=True):
        spans += [(at, at + sub_batch.num_new_tokens) for at in range(low, high, sub_batch.num_new_tokens)]
    return spans


class _FaultyKVCache(KVCache):
    """Opens every step with changed slot mappings, or changes q, k and the parameters of every call."""

    def __init__(self, fault: str, groups: Sequence[CacheGroup], **options: Any) -> None:
        super().__init__(groups, **options)
        self._change_mapping, self._change_inputs = MAPPING_FAULTS.get(fault), INPUT_FAULTS.get(fault)

    def open(self, model_input: ModelInput) -> Sequence[CacheView]:
        if self._change_mapping is not None:
            mappings = model_input.slot_mappings  # none in an encoder's step
            changed = tuple(
                self._change_mapping(mapping, group, model_input) if mapping.slots is not None else mapping
                for mapping, group in zip(mappings, self.groups, strict=False)
            )
            return super().open(model_input._replace(slot_mappings=changed))
        assert self._change_inputs is not None
        rope = ops.rotary.RotaryCache(model_input.positions, exact=self.exact_rope)
        return [_FaultyView(view, rope, self._change_inputs) for view in super().open(model_input)]


class _ScalelessKVCache(KVCache):
    """Loses the scales of all keys before every step."""

    def open(self, model_input: ModelInput) -> Sequence[CacheView]:
        for store in self.keys:
            for spec, array in zip(store.format.arrays(store.dim), store.arrays, strict=True):
                if spec.name == "scale":
                    array.fill_(1.0)
        return super().open(model_input)


class _StatelessKVCache(KVCache):
    """Loses all states before every step."""

    def open(self, model_input: ModelInput) -> Sequence[CacheView]:
        for group, positions in zip(self.groups, self.positions, strict=True):
            if group.spec.is_state:
                positions.fill_(-1)
        return super().open(model_input)


@dataclass
class _FaultyView(WrappedView):
    view: CacheView
    rope: ops.rotary.RotaryCache
    change: Callable[[AttentionInputs, ops.rotary.RotaryCache], AttentionInputs]

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, params: AttentionParams) -> Tensor:
        if k is not None:
            q, k, params = self.change((q, k, params), self.rope)
        return self.view.attend(q, k, v, params)


def _write_one_slot_early(mapping: SlotMapping, group: CacheGroup, model_input: ModelInput) -> SlotMapping:
    """``cursor``: tokens after cached ones are written one slot early, over the last of them."""
    assert mapping.slots is not None
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
    """``table``: the first block is read from the last one's index; a sequence of one block reads the null block."""
    tables = tuple(sub_batch_tables.clone() for sub_batch_tables in mapping.block_tables)
    for row in (row for sub_batch_tables in tables for row in sub_batch_tables):
        count = int((row != NULL_BLOCK).sum())
        if count > 1:
            row[0] = row[count - 1]
        elif group.max_blocks_per_seq == 1:
            row[0] = NULL_BLOCK
    return mapping._replace(block_tables=tables)


def _neighbor_block(mapping: SlotMapping, _group: CacheGroup, _model_input: ModelInput) -> SlotMapping:
    """``neighbor``: the first block is read from the block table of the next sequence of the step."""
    rows = [row for sub_batch_tables in mapping.block_tables for row in sub_batch_tables.tolist()]
    tables = tuple(sub_batch_tables.clone() for sub_batch_tables in mapping.block_tables)
    targets = [row for sub_batch_tables in tables for row in sub_batch_tables]
    for index, target in enumerate(targets):
        others = (other[0] for other in (*rows[index + 1 :], *rows[:index]) if other[0] not in rows[index])
        target[0] = next(others, target[0])
    return mapping._replace(block_tables=tables)


def _skip_key_rope(inputs: AttentionInputs, rope: ops.rotary.RotaryCache) -> AttentionInputs:
    """``rotation``: queries are rotated, keys are stored unrotated."""
    q, k, params = inputs
    if params.rotary is None:
        return inputs
    return rope.rotate(q, params.rotary), k, params._replace(rotary=None)


def _scale_twice(inputs: AttentionInputs, _rope: ops.rotary.RotaryCache) -> AttentionInputs:
    """``scale``: divided by sqrt(head dim) once more."""
    q, k, params = inputs
    return q, k, params._replace(scale=params.scale / max(k.shape[-1], 2) ** 0.5)


MAPPING_FAULTS: dict[str, Callable[[SlotMapping, CacheGroup, ModelInput], SlotMapping]] = {
    "cursor": _write_one_slot_early,
    "table": _wrong_block,
    "neighbor": _neighbor_block,
}
INPUT_FAULTS: dict[str, Callable[[AttentionInputs, ops.rotary.RotaryCache], AttentionInputs]] = {
    "rotation": _skip_key_rope,
    "scale": _scale_twice,
}
