"""KV cache on several ranks: rank 0 has the KVCacheManager and leads, the other ranks follow.

``LeaderKVCache`` is used like any ``KVCache``. It sends every call (block operations, a step, a sequence's state)
to the other ranks in the same order, before it does its own part; they run ``run_follower``. All ranks run the
model for the same step, because a sharded model needs them all.

Invariant: every rank applied the same block operations and steps, so blocks, tables and positions are equal on all.

This module makes no decisions (the KVCacheManager does, on rank 0) and reads no scores back to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from kvad.cache import CacheConfig, CacheGroup, build_groups, resolve_for_model
from kvad.cache import device as device_lib
from kvad.cache.device import KVCache
from kvad.cache.sizing import check_policy
from kvad.config import attention_specs
from kvad.errors import ConfigError
from kvad.model import Transformer
from kvad.model_input import BlockOps, CacheView, ModelInput, Rotary
from kvad.parallel.mesh import check_cache_fits_mesh, kv_head_copies, kv_head_range
from kvad.parallel.partition import ShardedPolicy, block_bytes, local_layers, merge_shards, shard_groups, split_shards
from kvad.parallel.process_groups import Message, ProcessGroups, receive, send
from kvad.parallel.tensor_parallel import shard_summarizer

Blocks = Sequence[Sequence[int]]
T = TypeVar("T")
# Calls of a follower's cache whose result is this rank's part of the leader's, and whose last argument is.
GATHERED_CALLS = ("read_blocks", "copy_out", "summary_rotaries")
SCATTERED_CALLS = ("write_blocks", "copy_in")


class ShardedKVCache(KVCache):
    """The KV cache of one rank.

    Args:
        all_groups: Groups of the unsharded cache.
        process_groups: Connections to the other ranks.
        summarizers: Summarizers of the unsharded cache by layer.
        **options: Options of ``KVCache``.

    Raises:
        ConfigError: For an attention hook, which would receive this rank's heads only, and for a batch-invariant
            kernel, because sums over ranks are added in another order.
    """

    def __init__(
        self,
        all_groups: Sequence[CacheGroup],
        *,
        process_groups: ProcessGroups,
        summarizers: Mapping[int, Any] | None = None,
        **options: Any,
    ) -> None:
        mesh = process_groups.mesh
        if options.get("attention_hook") is not None:
            raise ConfigError(
                f"attention_hook: is not supported on a mesh of {mesh}, where a rank has its own heads only",
                "use one process",
            )
        if not isinstance(options.get("kernel", "auto"), str):
            raise ConfigError(f"deterministic: is not supported on a mesh of {mesh}, which splits sums between ranks")
        try:
            check_cache_fits_mesh(all_groups, mesh)
        except ConfigError:
            if options.get("offload_reader") is not None:
                options["offload_reader"].close()
            raise
        self.process_groups, self.local_indices = process_groups, local_layers(all_groups, mesh)
        shards = {
            layer: shard_summarizer(summarizer, process_groups)
            for layer, summarizer in self._of_this_stage(summarizers or {}).items()
        }
        super().__init__(_rank_groups(all_groups, process_groups), summarizers=shards, **options)
        self.all_groups, self.ranks = tuple(all_groups), mesh.size

    def _of_this_stage(self, by_layer: Mapping[int, T]) -> dict[int, T]:
        """Return the values of this rank's layers, by the rank's numbers."""
        return {self.local_indices[layer]: x for layer, x in by_layer.items() if layer in self.local_indices}

    def summary_rotaries(self) -> dict[int, Rotary]:
        local = super().summary_rotaries()
        return {layer: local[index] for layer, index in self.local_indices.items() if index in local}

    def set_summary_rotaries(self, rotaries: Mapping[int, Rotary]) -> None:
        super().set_summary_rotaries(self._of_this_stage(rotaries))


class LeaderKVCache(ShardedKVCache):
    """The KV cache of rank 0, used by the KVCacheManager and the ModelRunner.

    ``release`` ends ``run_follower`` on the other ranks.
    """

    def __init__(self, all_groups: Sequence[CacheGroup], **options: Any) -> None:
        super().__init__(all_groups, **options)
        self._opened: ModelInput | None = None
        self._array_specs = KVCache(all_groups, device="meta").array_specs()
        self._block_bytes = block_bytes(all_groups, self.process_groups.mesh)
        self._released = False
        self.encoder_hook: RemovableHandle | None = None  # calls on_encoder_step

    def apply(self, block_ops: BlockOps) -> None:
        if self.host_store is not None and (block_ops.store or block_ops.load):  # on every rank, before blocks change
            device_lib.host_copy.copy_blocks_out(self, self.host_store, block_ops.store)
            device_lib.host_copy.copy_blocks_in(self, self.host_store, block_ops.load)
            block_ops = block_ops._replace(store=(), load=())
        if all(item == () for ops in block_ops for item in ops):
            return
        foreign = {key: blocks for key, blocks in block_ops.swap_in if not isinstance(self.swapped.get(key, []), list)}
        if foreign:  # only this rank has sequences from another cache; it sends each rank its part
            empty: tuple[tuple[()], ...] = ((),) * len(self.groups)
            self.apply(BlockOps(empty, empty, swap_out=block_ops.swap_out))
            for key, blocks in foreign.items():
                sequence = self.swapped.pop(key)
                assert not isinstance(sequence, list), "all ranks have a sequence that was swapped out here"
                sequence.restore(self, blocks)
            remaining = tuple(swap for swap in block_ops.swap_in if swap[0] not in foreign)
            self.apply(block_ops._replace(swap_out=(), swap_in=remaining))
            return
        self._send("apply", block_ops)
        super().apply(block_ops)

    def read_blocks(self, blocks: Blocks) -> dict[str, Tensor]:
        self._send("read_blocks", blocks)
        return self._gather_shards(super().read_blocks(blocks))

    def write_blocks(self, blocks: Blocks, state: Mapping[str, Tensor]) -> None:
        self._send("write_blocks", blocks)
        super().write_blocks(blocks, self._scatter_shards(state))

    def copy_out(self, blocks: Blocks, slots: device_lib.host_copy.SlotIndex) -> dict[str, Tensor]:
        self._send("copy_out", blocks, slots)
        return self._gather_shards(super().copy_out(blocks, slots))

    def copy_in(self, blocks: Blocks, slots: device_lib.host_copy.SlotIndex, arrays: Mapping[str, Tensor]) -> None:
        self._send("copy_in", blocks, slots)
        super().copy_in(blocks, slots, self._scatter_shards(arrays))

    def array_specs(self) -> dict[str, Tensor]:
        return self._array_specs

    def block_bytes(self) -> list[int]:
        return self._block_bytes

    def summary_rotaries(self) -> dict[int, Rotary]:
        self._send("summary_rotaries")
        rotaries = super().summary_rotaries()
        for received in self._receive_from_followers():
            rotaries |= received
        return dict(sorted(rotaries.items()))

    def set_summary_rotaries(self, rotaries: Mapping[int, Rotary]) -> None:
        if rotaries:
            self._send("set_summary_rotaries", rotaries)
            super().set_summary_rotaries(rotaries)

    def open(self, model_input: ModelInput) -> Sequence[CacheView]:
        self._opened = model_input
        self._send("forward", model_input)
        return super().open(model_input)

    def on_encoder_step(self, encoder_input: ModelInput) -> None:
        """Send an encoder step to the other ranks, unless it is part of the opened model input."""
        if self._opened is None or self._opened.encoder_input is not encoder_input:
            self._send("encode", encoder_input)

    def release(self) -> None:
        if not self._released:
            self._released = True
            self._send("stop")
            if self.encoder_hook is not None:
                self.encoder_hook.remove()
        super().release()

    def _send(self, kind: str, *arguments: Any) -> None:
        """Let the other ranks make the same call."""
        if self.process_groups.mesh.size > 1:
            send(Message(kind, arguments), self.process_groups.broadcast_from_first_rank)

    def _receive_from_followers(self) -> list[Any]:
        ranks = range(1, self.process_groups.mesh.size)
        return [receive(partial(self.process_groups.receive, rank=rank)).payload for rank in ranks]

    def _gather_shards(self, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Merge the parts of all ranks, as an unsharded cache would return them."""
        return merge_shards([local, *self._receive_from_followers()], self.all_groups, self.process_groups.mesh)

    def _scatter_shards(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Send every rank its part of an unsharded state, and return this rank's."""
        own, *others = (split_shards(state, self.all_groups, rank) for rank in self.process_groups.mesh.all_ranks())
        for rank, part in enumerate(others, start=1):
            send(Message("part", part), partial(self.process_groups.send, rank=rank))
        return own


def build_follower_cache(
    model: Transformer, cache: CacheConfig, process_groups: ProcessGroups, **options: Any
) -> ShardedKVCache:
    """Build the KV cache of a follower from the leader's ``cache`` config; options: ``summarizers``."""
    resolved = resolve_for_model(model.config, cache)
    check_policy(model.config, resolved)
    return ShardedKVCache(
        build_groups(attention_specs(model.config), resolved),
        process_groups=process_groups,
        device=model.token_embedding.device,
        rope_at=resolved.rope_at,
        exact_rope=resolved.endless,
        **options,
    )


def leader_cache_factory(model: Transformer, process_groups: ProcessGroups) -> Callable[..., LeaderKVCache]:
    """Return the ``cache_factory`` of the engine on rank 0, for a model that ``shard_model`` sharded."""
    assert process_groups.mesh.rank == 0, "the KVCacheManager runs on rank 0"

    def build(groups: Sequence[CacheGroup], **options: Any) -> LeaderKVCache:
        kv_cache = LeaderKVCache(groups, process_groups=process_groups, **options)
        if model.encoder is not None:
            kv_cache.encoder_hook = model.encoder.register_forward_pre_hook(
                lambda _, args: kv_cache.on_encoder_step(args[1]), prepend=True
            )
        return kv_cache

    return build


@torch.inference_mode()
def run_follower(model: Transformer, kv_cache: ShardedKVCache) -> None:
    """Execute the messages of rank 0 until it releases its cache.

    An error on one rank is not sent to the others; the caller that started the ranks must end them together.

    Args:
        model: This rank's sharded model.
        kv_cache: This rank's cache, from ``build_follower_cache``.

    Raises:
        EngineError: If another rank has ended, or does not respond in the middle of a step.
    """
    device, receive_bytes = model.token_embedding.device, kv_cache.process_groups.broadcast_from_first_rank
    while (message := receive(receive_bytes, device)).kind != "stop":
        _execute(model, kv_cache, message)
    kv_cache.release()


def _execute(model: Transformer, kv_cache: ShardedKVCache, message: Message) -> None:
    """Run a step of the model, or make the leader's call on this rank's cache."""
    kind, arguments, groups = message.kind, message.payload, kv_cache.process_groups
    if kind == "forward":
        model(*arguments, kv_cache)
    elif kind == "encode":
        model.encode(*arguments)
    else:
        if kind in ("copy_out", "copy_in"):
            blocks, slots = arguments
            arguments = blocks, [None if group is None else group.cpu() for group in slots]
        if kind in SCATTERED_CALLS:
            arguments = *arguments, receive(partial(groups.receive, rank=0)).payload
        result = getattr(kv_cache, kind)(*arguments)
        if kind in GATHERED_CALLS:
            send(Message("part", result), partial(groups.send, rank=0))


def _rank_groups(groups: Sequence[CacheGroup], process_groups: ProcessGroups) -> list[CacheGroup]:
    """Return this rank's groups, with policies that score as if they had all heads."""
    mesh = process_groups.mesh
    layer_ids = tuple(local_layers(groups, mesh))
    rank_groups = []
    for unsharded, group in zip(groups, shard_groups(groups, mesh), strict=True):
        policy, kv_heads = group.eviction_policy, unsharded.spec.num_kv_heads
        if policy is not None:
            gather = partial(process_groups.gather, stride=kv_head_copies(kv_heads, mesh))
            sizes = policy.budget, policy.interval, policy.recent, policy.num_sinks
            heads = kv_head_range(kv_heads, mesh)
            policy = ShardedPolicy(*sizes, policy=policy, heads=heads, head_ids=layer_ids, gather=gather)
        rank_groups.append(group._replace(eviction_policy=policy))
    return rank_groups
