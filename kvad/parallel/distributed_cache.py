"""One memory of several ranks: rank 0 has the ledger and leads, the others do what it says.

:class:`Leading` is a ``Memory`` to whoever has it: what is asked of it (moves, a step, a row's state) it tells the
other ranks, in the same order, before it does its own part; they stand in :func:`follow`.  All ranks run the model for
the same step, because a model that ``shard`` has cut needs them all.

Invariant: every rank has seen the same moves and steps, so blocks, tables and positions are the same on all of them.

Never: a decision (the ledger's, on rank 0), or a score that leaves the device for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from kvad import model as model_lib
from kvad.cache import CacheConfig, CacheGroup, build_groups, resolve_for_model
from kvad.cache import device as device_lib
from kvad.cache.device import KVCache
from kvad.cache.sizing import check_policy
from kvad.config import attention_specs
from kvad.errors import ConfigError
from kvad.model import Transformer
from kvad.model_input import BlockOps, CacheView, ModelInput, Rotary
from kvad.parallel.mesh import check_cache_fits_mesh, kv_head_copies, kv_head_range
from kvad.parallel.messages import (
    Message,
    decode_block_ops,
    decode_model_input,
    decode_rotaries,
    decode_slots,
    encode_block_ops,
    encode_model_input,
    encode_rotaries,
    encode_slots,
    receive,
    send,
)
from kvad.parallel.partition import ShardedPolicy, block_bytes, local_layers, merge_shards, shard_groups, split_shards
from kvad.parallel.process_groups import ProcessGroups
from kvad.parallel.tensor_parallel import shard_summarizer

Blocks = Sequence[Sequence[int]]


class ShardedKVCache(KVCache):
    """A rank's memory.  ``every`` (group), ``compressors``: the whole cache's; ``layers``: of the whole decoder.

    ConfigError for a probe, which would see some heads and take them for all, and for tiles (``deterministic``): sums
    over ranks are added up in another order.
    """

    def __init__(
        self,
        all_groups: Sequence[CacheGroup],
        *,
        links: ProcessGroups,
        layers: int,
        compressors: Mapping[int, Any] | None = None,
        **options: Any,
    ) -> None:
        if options.get("probe") is not None:
            raise ConfigError(
                f"probe: on a mesh of {links.mesh} a rank sees its own heads alone", "look at one process"
            )
        if not isinstance(options.get("kernel", "auto"), str):
            raise ConfigError(f"deterministic: not promised on a mesh of {links.mesh}", "sums are cut by ranks there")
        try:
            check_cache_fits_mesh(all_groups, links.mesh)
        except ConfigError:
            if options.get("spill") is not None:
                options["spill"].close()
            raise
        self.layers, self.links = layers, links
        numbers = local_layers(all_groups, layers, links.mesh)
        mine = {numbers[layer]: each for layer, each in (compressors or {}).items() if layer in numbers}
        parts = {layer: _summarizer_shard(each, links) for layer, each in mine.items()}
        super().__init__(_ranked(all_groups, layers, links), summarizers=parts, **options)
        self.all_groups, self.ranks = tuple(all_groups), links.mesh.size
        self.numbers = numbers

    def summary_rotaries(self) -> dict[int, Rotary]:
        mine = super().summary_rotaries()
        return {layer: mine[number] for layer, number in self.numbers.items() if number in mine}

    def set_summary_rotaries(self, rotaries: Mapping[int, Rotary]) -> None:
        super().set_summary_rotaries(
            {self.numbers[layer]: each for layer, each in rotaries.items() if layer in self.numbers}
        )

    def swapped_shard(self, key: int) -> dict[str, Tensor]:
        """This rank's part of what is parked under a key."""
        copies = self.swapped[key]
        assert isinstance(copies, list), "a row from elsewhere was not parked here"
        return dict(zip(self._parked_names(), copies, strict=True))

    def store_swapped_shard(self, key: int, state: Mapping[str, Tensor]) -> None:
        """As if it had been parked here."""
        self.swapped[key] = [state[name] for name in self._parked_names()]

    def _parked_names(self) -> list[str]:
        """Sources are not parked: they stand behind all other groups."""
        return [
            each.name for each in self.iter_arrays([() for group in self.groups if not group.spec.is_cross_attention])
        ]


class LeaderKVCache(ShardedKVCache):
    """Rank 0's, which the ledger moves and the runner opens.  ``release`` ends :func:`follow` on the others."""

    def __init__(self, all_groups: Sequence[CacheGroup], **options: Any) -> None:
        super().__init__(all_groups, **options)
        self._opened: ModelInput | None = None
        whole = KVCache(all_groups, device="meta")
        self._array_specs = whole.array_specs()
        self._block_bytes = block_bytes(all_groups, self.layers, self.links.mesh)
        self._over = False
        self.heard: RemovableHandle | None = None  # the encoder's word that it is about to read

    def apply(self, moves: BlockOps) -> None:
        if self.host_store is not None and (moves.store or moves.load):  # they ask every rank, before its blocks change
            device_lib.host_copy.copy_blocks_out(self, self.host_store, moves.store)
            device_lib.host_copy.copy_blocks_in(self, self.host_store, moves.load)
            moves = moves._replace(store=(), load=())
        said = encode_block_ops(moves)
        if said is None:
            return
        strange = {key: blocks for key, blocks in moves.swap_in if not isinstance(self.swapped.get(key, []), list)}
        if strange:  # rows from elsewhere: this rank alone has them, and tells each of the others its part
            nothing: tuple[tuple[()], ...] = ((),) * len(self.groups)
            self.apply(BlockOps(nothing, nothing, swap_out=moves.swap_out))
            for key, blocks in strange.items():
                self._settle(key, blocks)
            moves = moves._replace(swap_out=(), swap_in=tuple(each for each in moves.swap_in if each[0] not in strange))
            self.apply(moves)
            return
        self._tell("moves", said)
        super().apply(moves)

    def _settle(self, key: int, blocks: Blocks) -> None:
        row = self.swapped.pop(key)
        assert not isinstance(row, list), "a row that was parked here is known to all ranks"
        row.restore(self, blocks)

    def copy_out(self, blocks: Blocks, slots: device_lib.slot_copy.SlotIndex) -> dict[str, Tensor]:
        self._tell("lines", *encode_slots(blocks, slots))
        return self._gathered(super().copy_out(blocks, slots))

    def copy_in(self, blocks: Blocks, slots: device_lib.slot_copy.SlotIndex, arrays: Mapping[str, Tensor]) -> None:
        self._tell("lay", *encode_slots(blocks, slots))
        super().copy_in(blocks, slots, self._scattered(arrays))

    def array_specs(self) -> dict[str, Tensor]:
        return self._array_specs

    def block_bytes(self) -> list[int]:
        return self._block_bytes

    def summary_rotaries(self) -> dict[int, Rotary]:
        self._tell("folding")
        found = super().summary_rotaries()
        for rank in range(1, self.links.mesh.size):
            got = receive(lambda x, rank=rank: self.links.receive(x, rank))  # type: ignore[misc]
            found |= decode_rotaries(got.payload, got.tensors)
        return dict(sorted(found.items()))

    def set_summary_rotaries(self, rotaries: Mapping[int, Rotary]) -> None:
        if rotaries:
            self._tell("rotaries", *encode_rotaries(rotaries))
            super().set_summary_rotaries(rotaries)

    def open(self, step: ModelInput) -> Sequence[CacheView]:
        self._opened = step
        said, tensors = encode_model_input(step)
        self._tell("step", said, tensors)
        return super().open(step)

    def on_encoder_step(self, source: ModelInput) -> None:
        """The encoder is about to read this step: the others hear of it, unless it came with an opened one."""
        if self._opened is None or self._opened.encoder_input is not source:
            said, tensors = encode_model_input(source)
            self._tell("encode", said, tensors)

    def release(self) -> None:
        if not self._over:
            self._over = True
            self._tell("stop")
            if self.heard is not None:
                self.heard.remove()
        super().release()

    def read_blocks(self, blocks: Blocks) -> dict[str, Tensor]:
        """The whole state of a row, from all ranks, as one process would have it (``Memory.held``)."""
        self._tell("state", [list(each) for each in blocks])
        return self._gathered(super().read_blocks(blocks))

    def write_blocks(self, blocks: Blocks, state: Mapping[str, Tensor]) -> None:
        """The inverse of :meth:`row`: to every rank its part."""
        self._tell("put", [list(each) for each in blocks])
        super().write_blocks(blocks, self._scattered(state))

    def read_swapped(self, key: int) -> dict[str, Tensor]:
        """The whole state of a parked row."""
        self._tell("parked", key)
        return self._gathered(self.swapped_shard(key))

    def store_swapped(self, key: int, state: Mapping[str, Tensor]) -> None:
        """A parked row of another mesh, to be woken here: to every rank its part."""
        self._tell("keep", key)
        self.store_swapped_shard(key, self._scattered(state))

    def _tell(self, kind: str, said: Any = None, tensors: tuple[Tensor, ...] = ()) -> None:
        if self.links.mesh.size > 1:
            send(Message(kind, said, tensors), self.links.broadcast_from_first_rank)

    def _gathered(self, mine: Mapping[str, Tensor]) -> dict[str, Tensor]:
        parts = [mine]
        for rank in range(1, self.links.mesh.size):
            got = receive(lambda x, rank=rank: self.links.receive(x, rank))  # type: ignore[misc]
            parts.append(dict(zip(got.payload, got.tensors, strict=True)))
        return merge_shards(parts, self.all_groups, self.layers, self.links.mesh)

    def _scattered(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        mesh = self.links.mesh
        for rank in range(1, mesh.size):
            part = split_shards(state, self.all_groups, self.layers, mesh.with_rank(rank))
            message = Message("part", list(part), tuple(part.values()))
            send(message, lambda x, rank=rank: self.links.send(x, rank))  # type: ignore[misc]
        return split_shards(state, self.all_groups, self.layers, mesh)


def build_follower_cache(
    model: Transformer, cache: CacheConfig, links: ProcessGroups, **options: Any
) -> ShardedKVCache:
    """The memory of a rank that follows: as rank 0's engine has it of the same ``cache``.  ``options``: compressors."""
    settled = resolve_for_model(model.config, cache)
    check_policy(model.config, settled)
    return ShardedKVCache(
        build_groups(attention_specs(model.config), settled),
        links=links,
        layers=model.config.stack.num_layers,
        device=model.token_embedding.device,
        rotate=settled.rope_at,
        exact=settled.endless,
        **options,
    )


def leader_cache_factory(model: Transformer, links: ProcessGroups) -> Callable[..., LeaderKVCache]:
    """What makes the memory of an engine on rank 0 (``Engine(..., memory=lead(model, links))``); ``model`` is cut."""
    assert links.mesh.rank == 0, "the ledger is rank 0's"

    def make(every: Sequence[CacheGroup], **options: Any) -> LeaderKVCache:
        memory = LeaderKVCache(every, links=links, layers=model.config.stack.num_layers, **options)
        if model.encoder is not None:

            def hook(_: nn.Module, given: tuple[Any, ...]) -> None:
                memory.on_encoder_step(given[1])

            memory.heard = model.encoder.register_forward_pre_hook(hook, prepend=True)
        return memory

    return make


@torch.inference_mode()
def run_follower(model: Transformer, memory: ShardedKVCache) -> None:
    """Do what rank 0 says, until it releases its memory.  ``model``: cut; ``memory``: made as rank 0's was.

    EngineError where a rank that is waited for has ended, or is silent for too long in the middle of a step.  What
    fails on one rank is told to no other: whoever starts ranks ends them together.
    """
    links = memory.links
    device = model.token_embedding.device
    while True:
        kind, said, tensors = receive(links.broadcast_from_first_rank, device)
        if kind == "stop":
            memory.release()
            return
        if kind == "moves":
            memory.apply(decode_block_ops(said))
        elif kind == "step":
            model(decode_model_input(said, tensors), memory)
        elif kind == "encode":
            model.encode(decode_model_input(said, tensors))
        else:
            _row(memory, kind, said, tensors)


def _row(memory: ShardedKVCache, kind: str, said: Any, tensors: tuple[Tensor, ...]) -> None:
    """This rank's part of what is asked of a row, or given to one."""
    links = memory.links
    if kind == "state":
        _answer(memory.read_blocks(said), links)
    elif kind == "parked":
        _answer(memory.swapped_shard(said), links)
    elif kind == "lines":
        _answer(memory.copy_out(*decode_slots(said, tensors)), links)
    elif kind == "folding":
        send(Message("part", *encode_rotaries(memory.summary_rotaries())), lambda x: links.send(x, 0))
    elif kind == "put":
        memory.write_blocks(said, _receive_tensors(links))
    elif kind == "lay":
        memory.copy_in(*decode_slots(said, tensors), _receive_tensors(links))
    elif kind == "rotaries":
        memory.set_summary_rotaries(decode_rotaries(said, tensors))
    else:
        assert kind == "keep", kind
        memory.store_swapped_shard(said, _receive_tensors(links))


def _answer(state: Mapping[str, Tensor], links: ProcessGroups) -> None:
    send(Message("part", list(state), tuple(state.values())), lambda x: links.send(x, 0))


def _receive_tensors(links: ProcessGroups) -> dict[str, Tensor]:
    got = receive(lambda x: links.receive(x, 0))
    return dict(zip(got.payload, got.tensors, strict=True))


def _summarizer_shard(compressor: Any, links: ProcessGroups) -> Any:
    """``levels.Compressor`` is any function; a learned one has numbers for each head."""
    if not isinstance(compressor, model_lib.summarizer.LayerSummarizer):
        raise ConfigError(
            f"compressor: {type(compressor).__name__} cannot be cut by heads", "one that kvad trained can"
        )
    return shard_summarizer(compressor, links)


def _ranked(every: Sequence[CacheGroup], layers: int, links: ProcessGroups) -> list[CacheGroup]:
    """A rank's groups, whose policies answer as they would for all heads."""
    mesh = links.mesh
    numbers = tuple(local_layers(every, layers, mesh))
    made = []
    for whole, group in zip(every, shard_groups(every, layers, mesh), strict=True):
        policy, kv_heads = group.eviction_policy, whole.spec.num_kv_heads
        if policy is not None:
            gather = partial(links.gather, every=kv_head_copies(kv_heads, mesh))
            policy = ShardedPolicy.wrap(policy, kv_head_range(kv_heads, mesh), numbers, gather)
        made.append(group._replace(eviction_policy=policy))
    return made
