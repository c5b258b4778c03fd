"""A row that is kept on one mesh and goes on on others: ``mesh_cases.py`` runs :func:`restore` on each rank."""

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
from kvad.parallel.process_groups import connect_groups
from tests.support.mesh_worker import TIMEOUT, Case, Result, cut
from tests.support.random_models import build

MESHES = ("1x1", "1x2", "2x2", "4x1")


class Alone:
    """One row, its ledger, and a memory: tokens in, logits out."""

    def __init__(self, case: Case, model: Transformer, memory: KVCache | None = None) -> None:
        placed = build_groups(attention_specs(case.config), case.cache)
        self.model, self.memory = model, KVCache(placed) if memory is None else memory
        self.ledger, self.seat = KVCacheManager(placed, prefix_caching=False, max_num_seqs=1), 0

    def begin(self) -> Alone:
        self.ledger.add_sequence(0, [1], b"")
        return self

    @property
    def blocks(self) -> tuple[tuple[int, ...], ...]:
        seat = self.ledger._sequence(0)
        return tuple(tuple(hold.blocks) for hold in seat.all_groups)

    @torch.inference_mode()
    def feed(self, tokens: Sequence[int]) -> list[Tensor]:
        """Logits behind every span; spans end where the policy cuts."""
        said, done = [], 0
        while done < len(tokens):
            start = self.ledger.seq_len(0)
            count = min(3, len(tokens) - done, self.ledger.tokens_until_eviction(0))
            placed = self.ledger.allocate_slots([(0, start, count)])
            assert placed is not None
            self.memory.apply(placed.block_ops)
            each = tokens[done : done + count]
            said.append(self._logits(each, start, placed.slots, placed.block_tables))
            self.ledger.commit(0, each)
            done += count
        return said

    def _logits(
        self, tokens: Sequence[int], start: int, slots: Sequence[list[int]], tables: Sequence[list[list[int]]]
    ) -> Tensor:
        written = [torch.tensor(each) for each in slots]
        places = tuple(
            SlotMapping(written[at] if at < len(written) else None, (torch.tensor(table, dtype=torch.int64),))
            for at, table in enumerate(tables)
        )
        most = max(len(table[0]) for table in tables) * self.ledger.groups[0].block_size
        positions = torch.arange(start, start + len(tokens))
        step = ModelInput(
            torch.tensor(tokens),
            positions,
            (SubBatch(1, len(tokens), most),),
            positions[-1:] - start,
            slot_mappings=places,
        )
        return self.model.logits(self.model(step, self.memory), step.logit_indices)[0]


def restore(case: Case, rank: int, store: Store) -> Result | None:
    """Feed half of a row on ``case.mesh``, keep it, and feed the other half on every mesh."""
    stream = case.streams[1]
    tokens = stream.tokens()
    half = len(tokens) * 2 // 3
    result: Result = {"far": {}}
    if rank == 0:
        whole = Alone(case, build(case.config)).begin()
        whole.feed(tokens[:half])
        state = {each.name: each.array[each.blocks].clone() for each in whole.memory.iter_arrays(whole.blocks)}
        right = whole.feed(tokens[half:])
    kept = _keep(case, Mesh.parse(case.mesh), rank, store, tokens[:half])
    for name in MESHES:
        mesh = Mesh.parse(name)
        if rank >= mesh.size:
            continue
        links = connect_groups(
            mesh.with_rank(rank), dist.PrefixStore(f"wake {name}", store), timeout=TIMEOUT, idle=TIMEOUT
        )
        model = cut(case, links)
        if rank:
            run_follower(model, build_follower_cache(model, case.cache, links))
            continue
        assert kept is not None
        parked, found, again = kept
        result["whole"] = list(found) == list(state) and all(_near(found[each], state[each]) for each in state)
        result["parked"] = list(again) == list(found) and all(found[each].equal(again[each]) for each in found)
        row = Alone(case, model, _leading(case, model, links))
        result["far"][name] = _far(right, _woken(row, parked, found, tokens[half:]))
        if name == "1x1":
            lost = {each: torch.zeros_like(x) if "keys" in each else x for each, x in found.items()}
            other = Alone(case, build(case.config))
            result["unkept"] = _far(right, _woken(other, parked, lost, tokens[half:]))
        row.memory.release()
    return result if rank == 0 else None


def _keep(
    case: Case, mesh: Mesh, rank: int, store: Store, tokens: Sequence[int]
) -> tuple[SwappedSequence, dict[str, Tensor], dict[str, Tensor]] | None:
    """The row's place and its state, read while it lives, and again from where it was parked."""
    if rank >= mesh.size:
        return None
    links = connect_groups(mesh.with_rank(rank), dist.PrefixStore("keep", store), timeout=TIMEOUT, idle=TIMEOUT)
    model = cut(case, links)
    if rank:
        run_follower(model, build_follower_cache(model, case.cache, links))
        return None
    row = Alone(case, model, _leading(case, model, links)).begin()
    row.feed(tokens)
    memory, blocks = row.memory, row.blocks
    assert isinstance(memory, LeaderKVCache)
    found = memory.read_blocks(blocks)
    parked, nothing = row.ledger.swap_out(0), ((),) * len(memory.groups)
    memory.apply(BlockOps(nothing, nothing, swap_out=((parked.key, blocks),)))
    again = memory.read_swapped(parked.key)
    memory.release()
    return parked, found, again


def _leading(case: Case, model: Transformer, links: object) -> LeaderKVCache:
    return leader_cache_factory(model, links)(build_groups(attention_specs(case.config), case.cache), device="cpu")  # type: ignore[arg-type]


def _woken(row: Alone, parked: SwappedSequence, state: dict[str, Tensor], tokens: Sequence[int]) -> list[Tensor]:
    """By the mesh's own memory, or by one process's that is given the whole."""
    assert row.ledger.swap_in(0, parked)
    if isinstance(row.memory, LeaderKVCache):
        row.memory.store_swapped(parked.key, state)
    else:
        row.memory.swapped[parked.key] = list(state.values())
    return row.feed(tokens)


def _near(a: Tensor, b: Tensor) -> bool:
    """As computed on a mesh, and by one process; integers are equal."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return a.equal(b) if not a.is_floating_point() else torch.allclose(a, b, rtol=0, atol=1e-6, equal_nan=True)


def _far(right: Sequence[Tensor], got: Sequence[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(right, got, strict=True))
