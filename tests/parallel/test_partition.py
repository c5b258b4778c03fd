"""Which rank has what, to the byte, and a row's state cut for a mesh and put together again: no process is started."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from kvad.cache.config import CacheConfig, resolve_for_model
from kvad.cache.device.kv_cache import KVCache
from kvad.cache.groups import build_groups
from kvad.cache.sizing.memory_plan import plan_memory
from kvad.config.model import ModelConfig, attention_specs
from kvad.config.parameter_shapes import weight_shapes
from kvad.engine.engine import Engine
from kvad.errors import CacheError, ConfigError, KvadError, UsageError
from kvad.model.fingerprint import weights_fingerprint
from kvad.model.no_cache import NoCache
from kvad.model.transformer import Transformer
from kvad.model_input import BlockOps, EvictOp, MergeOp, ModelInput, SlotMapping, SubBatch
from kvad.parallel.distributed_cache import ShardedKVCache, leader_cache_factory
from kvad.parallel.mesh import Mesh, check_model_fits_mesh, kv_head_range, layer_range, query_head_range
from kvad.parallel.messages import (
    Message,
    decode_block_ops,
    decode_model_input,
    encode_block_ops,
    encode_model_input,
    receive,
    send,
)
from kvad.parallel.partition import (
    block_bytes,
    local_layers,
    merge_shards,
    plan_ranks,
    shard_groups,
    split_shards,
    weight_shards,
)
from kvad.parallel.process_groups import ProcessGroups
from kvad.parallel.tensor_parallel import shard_model
from tests.support.mesh_cases import EXPERTS, mixed, own_tables, pair, roomy, shaped, with_mlp
from tests.support.random_models import build

MESHES = [Mesh.parse(text) for text in ("1x1", "2x1", "1x2", "2x2", "4x1", "8x1")]
CACHES = {
    "full": roomy(),
    "int8": roomy(dtype="int8"),
    "levels": roomy(policy="tiered(8, quantized=8, interval=4, summaries=8, ratio=2)", value_dtype="int8"),
    "ranked": roomy(policy="0: full; random(8, interval=4)"),
    "contiguous": CacheConfig(layout="contiguous", max_num_seqs=4, max_seq_len=44, prefill_chunk_size=5),
}


# ---------------------------------------------------------------- who has what


def test_every_head_and_layer_is_somewhere_and_queries_are_with_their_keys() -> None:
    for tensor, kv_heads, group in product((1, 2, 3, 4, 6, 8), (1, 2, 4, 6), (1, 2, 4)):
        heads = kv_heads * group
        if heads % tensor or (kv_heads % tensor and tensor % kv_heads):
            continue
        seen: list[int] = []
        for mesh in Mesh(tensor).all_ranks():
            queries, keys = query_head_range(heads, mesh), kv_head_range(kv_heads, mesh)
            seen += queries
            assert {query // group for query in queries} == set(keys)
            assert len(queries) % len(keys) == 0, "a rank's query heads are spread evenly over its kv heads"
        assert seen == list(range(heads))
    for stages, layers in ((1, 5), (2, 5), (3, 5), (5, 5)):
        assert [x for mesh in Mesh(1, stages).all_ranks() for x in layer_range(layers, mesh)] == list(range(layers))


def test_a_stage_numbers_its_layers_and_their_cross_attention_anew() -> None:
    config = pair()
    made = build_groups(attention_specs(config), roomy(max_source_len=24))
    assert local_layers(made, 2, Mesh(1, 2, 1)) == {1: 0, 3: 1}
    assert [group.layers for group in shard_groups(made, 2, Mesh(2, 2, 3))] == [(0,), (1,)]
    assert [group.spec.num_kv_heads for group in shard_groups(made, 2, Mesh(2, 2, 3))] == [2, 4]


@pytest.mark.parametrize("text", ["", "2", "2x", "0x1", "2x0", "-1x2", "2x1x1", "axb"])
def test_what_is_no_mesh_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="TENSORxPIPELINE"):
        Mesh.parse(text)


@pytest.mark.parametrize(
    ("config", "mesh", "says"),
    [
        (shaped(), "3x1", "4 kv heads of decoder.layer_types.L.attention .* fit this model: 1, 2, 4, 8"),
        (shaped(kv_heads=2), "16x1", "8 query heads"),
        (
            shaped(layers=2),
            "1x3",
            "must have at most 2 stages, the layers of the decoder, got 1x3 .use at most 2 stages",
        ),
        (pair(), "1x3", "at most 2 stages, the layers of the decoder"),
        (shaped(custom_class="tests.support.cache_trace_models:Nothing"), "2x1", "cannot be divided by heads .* 1x2"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_and_told_what_does(config: ModelConfig, mesh: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace(" .* ", ".*")):
        check_model_fits_mesh(config, Mesh.parse(mesh))


@pytest.mark.parametrize(("policy", "name"), [("tova(8)", "tova"), ("quest(8)", "quest"), ("snapkv(8)", "snapkv")])
def test_policies_that_watch_are_refused_where_a_kv_head_lies_on_several_ranks(policy: str, name: str) -> None:
    plan = plan_memory(shaped(kv_heads=2), roomy(policy=policy, prefill_chunk_size=4), weights_dtype="float64")
    with pytest.raises(ConfigError, match=f"{name}.*at most 2 tensor ranks"):
        plan_ranks(plan, Mesh(4))
    assert plan_ranks(plan, Mesh(2))


# ---------------------------------------------------------------- to the byte


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("config", [shaped(kv_heads=8), mixed(), own_tables(), pair(), with_mlp(shaped(), EXPERTS)])
def test_a_rank_has_the_bytes_that_were_planned(config: ModelConfig, mesh: Mesh) -> None:
    assert config.decoder is not None
    if mesh.pipeline_parallel > config.decoder.num_layers:
        return
    for cache in CACHES.values():
        cache = resolve_for_model(config, roomy(**{**vars_of(cache), "max_source_len": 24}))
        ranks = plan_ranks(plan_memory(config, cache, weights_dtype="float64"), mesh)
        for each in mesh.all_ranks():
            links = ProcessGroups(each)
            memory = ShardedKVCache(
                build_groups(attention_specs(config), cache), process_groups=links, layers=config.decoder.num_layers
            )
            assert memory.payload_bytes() == ranks[each.rank].payload
            assert memory.scale_bytes() == ranks[each.rank].scales
            assert memory.metadata_bytes() == ranks[each.rank].metadata
            assert sum(leaf.nbytes for leaf in memory.tensors()) == ranks[each.rank].pool
    for each in mesh.all_ranks():
        model = build(config)
        shard_model(model, ProcessGroups(each))
        assert sum(x.nbytes for x in model.parameters()) == ranks[each.rank].weights
        shapes = {name: tuple(map(len, cut)) for name, cut in weight_shards(config, each).items()}
        assert sorted(tuple(x.shape) for x in model.parameters()) == sorted(shapes.values())


def vars_of(cache: CacheConfig) -> dict[str, object]:
    names = ("dtype", "policy", "layout", "value_dtype", "max_num_seqs", "max_seq_len", "prefill_chunk_size")
    return {name: getattr(cache, name) for name in names}


def test_what_all_ranks_have_is_the_model_and_what_is_whole_is_whole_on_each() -> None:
    """Every number of a cut weight lies on exactly one rank of a stage; what is not cut lies on all of them."""
    config, mesh = pair("t5"), Mesh(2, 2)
    counted: dict[str, Tensor] = {}
    for each in mesh.all_ranks():
        for name, cut in weight_shards(config, each).items():
            ranges = tuple(slice(part.start, part.stop) for part in cut)
            counted.setdefault(name, torch.zeros(weight_shapes(config)[name]))[ranges] += 1
    assert counted.keys() == weight_shapes(config).keys()
    for name, times in counted.items():
        assert times.min() == times.max(), f"{name}: some numbers lie on more ranks than others"
    assert (counted["decoder.layers.0.attention.q.weight"] == 1).all()
    assert (counted["decoder.layers.0.attention.out.bias"] == 1).all(), "it would be added twice"
    assert (counted["decoder.layers.0.norm1.weight"] == 2).all() and (counted["embedding.tokens.weight"] == 4).all()


# ---------------------------------------------------------------- a row's state


def a_row(config: ModelConfig, cache: CacheConfig) -> dict[str, Tensor]:
    """A state of four blocks, every number of which is another."""
    memory = KVCache(build_groups(attention_specs(config), cache))
    at = 0
    state = {}
    for each in memory.iter_arrays([(2, 3, 4, 5)] * len(memory.groups)):
        shape = each.array[each.blocks].shape
        state[each.name] = torch.arange(at, at + shape.numel(), dtype=torch.float64).view(shape)
        at += shape.numel()
    return state


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", CACHES)
def test_the_bytes_of_a_block_are_those_of_all_ranks(name: str, mesh: Mesh) -> None:
    config = shaped(kv_heads=2)
    assert config.decoder is not None
    layers = config.decoder.num_layers
    if mesh.pipeline_parallel > layers:
        return
    made = build_groups(attention_specs(config), roomy(**vars_of(CACHES[name])))
    found = [0] * len(made)
    for each in mesh.all_ranks():
        memory = KVCache(shard_groups(made, layers, each))
        for held in memory.iter_arrays([(2,)] * len(made)):
            found[int(held.name.partition(".")[0])] += held.array[held.blocks].nbytes
    assert block_bytes(made, layers, mesh) == found
    assert mesh.size > 1 or found == KVCache(made).block_bytes()


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", CACHES)
def test_a_state_that_is_cut_and_put_together_is_the_same(name: str, mesh: Mesh) -> None:
    for config in (mixed(), shaped(kv_heads=2), pair()):
        assert config.decoder is not None
        layers = config.decoder.num_layers
        if mesh.pipeline_parallel > layers:
            continue
        cache = roomy(**{**vars_of(CACHES[name]), "max_source_len": 24})
        made, whole = build_groups(attention_specs(config), cache), a_row(config, cache)
        parts = [split_shards(whole, made, layers, each) for each in mesh.all_ranks()]
        for each, part in zip(mesh.all_ranks(), parts, strict=True):
            memory = KVCache(shard_groups(made, layers, each))
            expected = {x.name: x.array[x.blocks].shape for x in memory.iter_arrays([(2, 3, 4, 5)] * len(made))}
            assert {key: x.shape for key, x in part.items()} == expected and list(part) == list(expected)
        again = merge_shards(parts, made, layers, mesh)
        assert list(again) == list(whole)
        assert all(again[key].equal(whole[key]) for key in whole)


def _drop(parts: list[dict[str, Tensor]]) -> None:
    del parts[1]["0.1.values.0"]


def _shift(parts: list[dict[str, Tensor]]) -> None:
    parts[1]["0.positions"] = parts[1]["0.positions"] + 1


def _narrow(parts: list[dict[str, Tensor]]) -> None:
    parts[1]["0.0.keys.0"] = parts[1]["0.0.keys.0"][:, :1]


def _lose(parts: list[dict[str, Tensor]]) -> None:
    parts.pop()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_drop, "0.1.values.0"),
        (_shift, "other positions"),
        (_narrow, "0.0.keys.0"),
        (_lose, "must have 2 shards on a mesh of 2x1, got 1"),
    ],
)
def test_parts_that_do_not_make_a_whole_are_refused(
    damage: Callable[[list[dict[str, Tensor]]], None], says: str
) -> None:
    config, mesh = shaped(), Mesh(2)
    made = build_groups(attention_specs(config), roomy())
    parts = [split_shards(a_row(config, roomy()), made, 2, each) for each in mesh.all_ranks()]
    damage(parts)
    with pytest.raises(CacheError, match=says):
        merge_shards(parts, made, 2, mesh)


@pytest.mark.parametrize("name", ["9.positions", "0.7.keys.0", "x.0.keys.0", "0.y.keys.0"])
def test_a_state_of_another_cache_is_refused(name: str) -> None:
    made = build_groups(attention_specs(shaped()), roomy())
    with pytest.raises(CacheError, match=name):
        split_shards({name: torch.zeros(1, 4, 4, 8)}, made, 2, Mesh(2))
    with pytest.raises(CacheError, match="3 kv heads, the cache has 4"):
        split_shards({"0.0.keys.0": torch.zeros(1, 3, 4, 8)}, made, 2, Mesh(2))


# ---------------------------------------------------------------- what ranks tell one another


def sent_and_taken(message: Message) -> Message:
    pieces: list[Tensor] = []
    send(message, pieces.append)

    def take(like: Tensor) -> Tensor:
        piece = pieces.pop(0)
        assert piece.shape == like.shape and piece.dtype == like.dtype
        return piece

    got = receive(take)
    assert not pieces
    return got


def test_a_message_comes_as_it_went() -> None:
    kinds = (torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.int8, torch.bool)
    tensors = tuple(torch.arange(n * 3).view(n, 3).to(dtype) for n, dtype in enumerate(kinds))
    got = sent_and_taken(Message("part", ["a", 1, None], tensors))
    assert got.kind == "part" and got.payload == ["a", 1, None]
    for here, there in zip(tensors, got.tensors, strict=True):
        assert here.dtype == there.dtype and here.shape == there.shape and here.equal(there)
    assert sent_and_taken(Message("stop")) == Message("stop")


def test_a_step_and_its_moves_come_as_they_went() -> None:
    ids, none = torch.arange(5), torch.arange(0)
    source = ModelInput(ids, ids, (SubBatch(1, 5, 5),), none, slot_mappings=(SlotMapping(ids + 8, ()),))
    places = (
        SlotMapping(ids, (ids.view(1, 5), none.view(1, 0))),
        SlotMapping(None, (ids.view(1, 5),), (SubBatch(1, 5, 20),)),
    )
    step = ModelInput(
        ids,
        ids + 1,
        (SubBatch(2, 1, 8), SubBatch(1, 3, 16)),
        ids[1:],
        max_seq_lens=ids + 9,
        slot_mappings=places,
        encoder_input=source,
    )
    said, tensors = encode_model_input(step)
    got = sent_and_taken(Message("step", said, tensors))
    assert repr(decode_model_input(got.payload, got.tensors)) == repr(step)
    moves = BlockOps(
        clear=((3, 4), ()),
        copy=((), ((1, 2, 3),)),
        evict=((EvictOp(0, 8, (2, 3), 8, 5, (3, 2)),), ()),
        swap_out=((7, ((2,), ())),),
        swap_in=((8, ((), (5,))),),
        drop_swapped=(1, 2),
        quantize=((), ((2, 3),)),
        merge=((), (MergeOp(2, 3, 0, 3),)),
    )
    assert decode_block_ops(sent_and_taken(Message("moves", encode_block_ops(moves))).payload) == moves
    assert decode_block_ops(
        sent_and_taken(Message("moves", encode_block_ops(moves._replace(clear=((), ()))))).payload
    ).clear == ((), ())
    assert encode_block_ops(BlockOps(((), ()), ((), ()))) is None, "nothing to tell"


# ---------------------------------------------------------------- what is refused


def engine(model: Transformer, **options: object) -> Engine:
    links = ProcessGroups(Mesh(1))
    shard_model(model, links)
    return Engine(model, roomy(), cache_factory=leader_cache_factory(model, links), **options)  # type: ignore[arg-type]


def test_what_a_mesh_does_not_promise_is_refused() -> None:
    with pytest.raises(ConfigError, match="deterministic: is not supported on a mesh"):
        engine(build(shaped(), dtype=torch.float32), deterministic=True)
    with pytest.raises(ConfigError, match="attention_hook: is not supported on a mesh"):
        engine(build(shaped()), attention_hook=lambda trace: None)


def test_what_a_mesh_keeps_belongs_to_the_whole_model() -> None:
    """A rank does not say what it cannot know; with the whole one's fingerprint, what one mesh has stored is
    another's."""
    whole, cut = build(shaped()), build(shaped())
    shard_model(cut, ProcessGroups(Mesh(2)))
    one = Engine(whole, roomy()).cache_fingerprint("")
    with pytest.raises(ConfigError, match="this rank has only its shard of 2"):
        Engine(cut, roomy(), cache_factory=leader_cache_factory(cut, ProcessGroups(Mesh(2)))).cache_fingerprint("")
    assert weights_fingerprint(cut) != weights_fingerprint(whole)
    known = Engine(
        cut,
        roomy(),
        cache_factory=leader_cache_factory(cut, ProcessGroups(Mesh(2))),
        weights_fingerprint=weights_fingerprint(whole),
    ).cache_fingerprint("")
    assert not list(one.differences(known.parts)) and one.digest() == known.digest()


def test_a_mesh_of_one_is_the_model_itself() -> None:
    """Not a number is cut, and no process group is asked for."""
    whole, cut = build(pair()), build(pair())
    shard_model(cut, ProcessGroups(Mesh()))
    assert {name: x.shape for name, x in whole.named_parameters()} == {n: x.shape for n, x in cut.named_parameters()}


def test_a_stage_refuses_a_memory_that_is_not_its_own() -> None:
    model = build(mixed())
    shard_model(model, ProcessGroups(Mesh(1, 2, 0), pipeline=nn.Identity()))  # type: ignore[arg-type]
    ids = torch.arange(4)
    step = ModelInput(ids, ids, (SubBatch(1, 4, 4),), ids)
    with pytest.raises(KvadError, match="2 of 4 layers got 2"):
        model(step, NoCache(model.config))
