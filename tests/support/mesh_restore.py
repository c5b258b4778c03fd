"""A sequence swapped out on one mesh and swapped in on others: ``mesh_cases.py`` runs ``run_swap`` per rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from kvad.cache.device.kv_cache import KVCache
from kvad.cache.groups import build_groups
from kvad.cache.manager.kv_cache_manager import KVCacheManager
from kvad.cache.manager.sequence_blocks import SwappedSequence
from kvad.config.model import attention_specs
from kvad.model.transformer import Transformer
from kvad.model_input import BlockOps, ModelInput, SlotMapping, SubBatch
from kvad.parallel.distributed_cache import LeaderKVCache, build_follower_cache, leader_cache_factory, run_follower
from kvad.parallel.mesh import Mesh
from tests.support.mesh_worker import Case, Result, build_shard, connect
from tests.support.random_models import build

MESHES = ("1x1", "1x2", "2x2", "4x1")


class ForeignState:
    """The state of a sequence of another mesh, to be swapped in."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self.state = state

    def restore(self, kv_cache: KVCache, blocks: Sequence[Sequence[int]]) -> None:
        kv_cache.write_blocks(blocks, self.state)


class SoloSequence:
    """One sequence with its KVCacheManager and KVCache: tokens in, logits out."""

    def __init__(self, case: Case, model: Transformer, kv_cache: KVCache | None = None) -> None:
        groups = build_groups(attention_specs(case.config), case.cache)
        self.model, self.kv_cache = model, KVCache(groups) if kv_cache is None else kv_cache
        self.manager, self.seq_index = KVCacheManager(groups, prefix_caching=False, max_num_seqs=1), 0

    def begin(self) -> SoloSequence:
        self.manager.add_sequence(0, [1], b"")
        return self

    @property
    def blocks(self) -> tuple[tuple[int, ...], ...]:
        sequence = self.manager._sequence(0)
        return tuple(tuple(group.blocks) for group in sequence.all_groups)

    @torch.inference_mode()
    def compute(self, tokens: Sequence[int]) -> list[Tensor]:
        """Compute the tokens in spans that end where the policy evicts; return the logits after each span."""
        span_logits, num_done = [], 0
        while num_done < len(tokens):
            start = self.manager.seq_len(0)
            count = min(3, len(tokens) - num_done, self.manager.tokens_until_eviction(0))
            allocation = self.manager.allocate_slots([(0, start, count)])
            assert allocation is not None
            self.kv_cache.apply(allocation.block_ops)
            each = tokens[num_done : num_done + count]
            span_logits.append(self._logits(each, start, allocation.slots, allocation.block_tables))
            self.manager.commit(0, each)
            num_done += count
        return span_logits

    def _logits(
        self, tokens: Sequence[int], start: int, slots: Sequence[list[int]], tables: Sequence[list[list[int]]]
    ) -> Tensor:
        written = [torch.tensor(each) for each in slots]
        mappings = tuple(
            SlotMapping(written[at] if at < len(written) else None, (torch.tensor(table, dtype=torch.int64),))
            for at, table in enumerate(tables)
        )
        num_slots = max(len(table[0]) for table in tables) * self.manager.groups[0].block_size
        positions = torch.arange(start, start + len(tokens))
        step = ModelInput(
            torch.tensor(tokens),
            positions,
            (SubBatch(1, len(tokens), num_slots),),
            positions[-1:] - start,
            slot_mappings=mappings,
        )
        return self.model.logits(self.model(step, self.kv_cache), step.logit_indices)[0]


def run_swap(case: Case, rank: int, store: Store) -> Result | None:
    """Compute part of a sequence on ``case.mesh``, swap it out, and compute the rest on every mesh."""
    stream = case.streams[1]
    tokens = stream.tokens()
    half = len(tokens) * 2 // 3
    result: Result = {"difference": {}}
    if rank == 0:
        full = SoloSequence(case, build(case.config)).begin()
        full.compute(tokens[:half])
        state = {each.name: each.array[each.blocks].clone() for each in full.kv_cache.iter_arrays(full.blocks)}
        expected = full.compute(tokens[half:])
    swapped_out = _swap_out(case, Mesh.parse(case.mesh), rank, store, tokens[:half])
    for name in MESHES:
        mesh = Mesh.parse(name)
        if rank >= mesh.size:
            continue
        groups = connect(mesh, rank, dist.PrefixStore(f"swap in {name}", store))
        model = build_shard(case, groups)
        if rank:
            run_follower(model, build_follower_cache(model, case.cache, groups))
            continue
        assert swapped_out is not None
        swapped, state_now, state_swapped = swapped_out
        result["equal_state"] = list(state_now) == list(state) and all(
            _close(state_now[each], state[each]) for each in state
        )
        result["equal_swapped"] = list(state_swapped) == list(state_now) and all(
            state_now[each].equal(state_swapped[each]) for each in state_now
        )
        sequence = SoloSequence(case, model, _leader_cache(case, model, groups))
        result["difference"][name] = _difference(expected, _swap_in(sequence, swapped, state_now, tokens[half:]))
        if name == "1x1":
            zeroed = {each: torch.zeros_like(x) if "keys" in each else x for each, x in state_now.items()}
            other = SoloSequence(case, build(case.config))
            result["without_keys"] = _difference(expected, _swap_in(other, swapped, zeroed, tokens[half:]))
        sequence.kv_cache.release()
    return result if rank == 0 else None


def _swap_out(
    case: Case, mesh: Mesh, rank: int, store: Store, tokens: Sequence[int]
) -> tuple[SwappedSequence, dict[str, Tensor], dict[str, Tensor]] | None:
    """Return the swapped sequence, its state read before the swap, and its state after it was swapped in again."""
    if rank >= mesh.size:
        return None
    groups = connect(mesh, rank, dist.PrefixStore("swap out", store))
    model = build_shard(case, groups)
    if rank:
        run_follower(model, build_follower_cache(model, case.cache, groups))
        return None
    sequence = SoloSequence(case, model, _leader_cache(case, model, groups)).begin()
    sequence.compute(tokens)
    kv_cache, blocks = sequence.kv_cache, sequence.blocks
    assert isinstance(kv_cache, LeaderKVCache)
    state_now = kv_cache.read_blocks(blocks)
    swapped, nothing = sequence.manager.swap_out(0), ((),) * len(kv_cache.groups)
    kv_cache.apply(BlockOps(nothing, nothing, swap_out=((swapped.key, blocks),)))
    kv_cache.apply(BlockOps(tuple(tuple(ids) for ids in blocks), nothing))
    kv_cache.apply(BlockOps(nothing, nothing, swap_in=((swapped.key, blocks),)))
    state_swapped = kv_cache.read_blocks(blocks)
    kv_cache.release()
    return swapped, state_now, state_swapped


def _leader_cache(case: Case, model: Transformer, groups: object) -> LeaderKVCache:
    return leader_cache_factory(model, groups)(build_groups(attention_specs(case.config), case.cache), device="cpu")  # type: ignore[arg-type]


def _swap_in(
    sequence: SoloSequence, swapped: SwappedSequence, state: dict[str, Tensor], tokens: Sequence[int]
) -> list[Tensor]:
    """Swap in on the mesh's cache, or on one process's cache."""
    assert sequence.manager.swap_in(0, swapped)
    sequence.kv_cache.swapped[swapped.key] = ForeignState(state)
    return sequence.compute(tokens)


def _close(a: Tensor, b: Tensor) -> bool:
    """True if tensors agree up to the rounding of a mesh; integers must be equal."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return a.equal(b) if not a.is_floating_point() else torch.allclose(a, b, rtol=0, atol=1e-6, equal_nan=True)


def _difference(expected: Sequence[Tensor], got: Sequence[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(expected, got, strict=True))
