"""Partition of a model and a cache over ranks, and splitting and merging of a sequence's state; no processes."""

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
from kvad.engine import Engine, EngineConfig
from kvad.errors import CacheError, ConfigError, KvadError, UsageError
from kvad.model.fingerprint import weights_fingerprint
from kvad.model.layers import MixtureOfExperts
from kvad.model.no_cache import NoCache
from kvad.model.transformer import Transformer
from kvad.model_input import BlockOps, EvictOp, MergeOp, ModelInput, Rotary, SlotMapping, SubBatch
from kvad.parallel.distributed_cache import ShardedKVCache, leader_cache_factory
from kvad.parallel.mesh import Mesh, check_model_fits_mesh, kv_head_range, layer_range, query_head_range
from kvad.parallel.partition import (
    block_bytes,
    local_layers,
    merge_shards,
    plan_ranks,
    shard_groups,
    split_shards,
    weight_shards,
)
from kvad.parallel.process_groups import Message, ProcessGroups, receive, send
from kvad.parallel.tensor_parallel import shard_model
from tests.support.golden_models import GoldenModel
from tests.support.mesh_cases import EXPERTS, mixed, pair, per_layer_biases, roomy, shaped, with_mlp
from tests.support.random_models import build, model_config

MESHES = [Mesh.parse(text) for text in ("1x1", "2x1", "1x2", "2x2", "4x1", "8x1")]
CACHES = {
    "full": roomy(),
    "int8": roomy(dtype="int8"),
    "levels": roomy(policy="tiered(8, quantized=8, interval=4, summaries=8, ratio=2)", value_dtype="int8"),
    "ranked": roomy(policy="0: full; random(8, interval=4)"),
    "contiguous": CacheConfig(layout="contiguous", max_num_seqs=4, max_seq_len=44, prefill_chunk_size=5),
}


# ---------------------------------------------------------------- heads and layers


def test_heads_and_layers_are_partitioned() -> None:
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


def test_a_stage_renumbers_its_layers_and_their_cross_attention() -> None:
    config = pair()
    state = build_groups(attention_specs(config), roomy(max_source_len=24))
    assert local_layers(state, Mesh(1, 2, 1)) == {1: 0, 3: 1}
    assert [group.layers for group in shard_groups(state, Mesh(2, 2, 3))] == [(0,), (1,)]
    assert [group.spec.num_kv_heads for group in shard_groups(state, Mesh(2, 2, 3))] == [2, 4]


@pytest.mark.parametrize("text", ["", "2", "2x", "0x1", "2x0", "-1x2", "2x1x1", "axb"])
def test_invalid_mesh_texts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="TENSORxPIPELINE"):
        Mesh.parse(text)


@pytest.mark.parametrize(
    ("config", "mesh", "message_part"),
    [
        (shaped(), "3x1", "4 kv heads of decoder.layer_types.L.attention .* fit this model: 1, 2, 4, 8"),
        (shaped(kv_heads=2), "16x1", "8 query heads"),
        (
            shaped(layers=2),
            "1x3",
            "must have at most 2 stages, the layers of the decoder, got 1x3 .use at most 2 stages",
        ),
        (pair(), "1x3", "at most 2 stages, the layers of the decoder"),
        (model_config(heads="latent"), "2x1", "the latent of all heads cannot be divided by heads .* 1x2"),
        (model_config(heads="short-conv"), "1x2", "must be 1x1 for a model with layers that are not attention"),
        (shaped(custom_class="tests.support.cache_trace_models:Nothing"), "2x1", "cannot be divided by heads .* 1x2"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_with_sizes_that_do(
    config: ModelConfig, mesh: str, message_part: str
) -> None:
    with pytest.raises(ConfigError, match=message_part.replace(" .* ", ".*")):
        check_model_fits_mesh(config, Mesh.parse(mesh))


@pytest.mark.parametrize(("policy", "name"), [("tova(8)", "tova"), ("quest(8)", "quest"), ("snapkv(8)", "snapkv")])
def test_policies_that_read_attention_are_refused_if_kv_heads_are_replicated(policy: str, name: str) -> None:
    plan = plan_memory(shaped(kv_heads=2), roomy(policy=policy, prefill_chunk_size=4), weights_dtype="float64")
    with pytest.raises(ConfigError, match=f"{name}.*at most 2 tensor ranks"):
        plan_ranks(plan, Mesh(4))
    assert plan_ranks(plan, Mesh(2))


# ---------------------------------------------------------------- planned bytes


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(
    "config", [shaped(kv_heads=8), mixed(), per_layer_biases(), pair(), with_mlp(shaped(), EXPERTS)]
)
def test_a_rank_allocates_the_planned_bytes(config: ModelConfig, mesh: Mesh) -> None:
    assert config.decoder is not None
    if mesh.pipeline_parallel > config.decoder.num_layers:
        return
    for cache in CACHES.values():
        cache = resolve_for_model(config, roomy(**{**vars_of(cache), "max_source_len": 24}))
        ranks = plan_ranks(plan_memory(config, cache, weights_dtype="float64"), mesh)
        for each in mesh.all_ranks():
            links = ProcessGroups(each)
            memory = ShardedKVCache(build_groups(attention_specs(config), cache), process_groups=links)
            assert memory.payload_bytes() == ranks[each.rank].payload
            assert memory.scale_bytes() == ranks[each.rank].scales
            assert memory.metadata_bytes() == ranks[each.rank].metadata
            assert sum(leaf.nbytes for leaf in memory.tensors()) == ranks[each.rank].pool
    for each in mesh.all_ranks():
        model = build(config)
        shard_model(model, ProcessGroups(each))
        assert sum(x.nbytes for x in model.parameters()) == ranks[each.rank].weights
        shapes = {name: tuple(map(len, sharded)) for name, sharded in weight_shards(config, each).items()}
        assert sorted(tuple(x.shape) for x in model.parameters()) == sorted(shapes.values())


def vars_of(cache: CacheConfig) -> dict[str, object]:
    names = ("dtype", "policy", "layout", "value_dtype", "max_num_seqs", "max_seq_len", "prefill_chunk_size")
    return {name: getattr(cache, name) for name in names}


def test_shards_cover_the_model_and_replicated_weights_are_whole() -> None:
    """Every number of a sharded weight is on exactly one rank of a stage; other weights are on all ranks."""
    config, mesh = pair("t5"), Mesh(2, 2)
    counted: dict[str, Tensor] = {}
    for each in mesh.all_ranks():
        for name, sharded in weight_shards(config, each).items():
            ranges = tuple(slice(part.start, part.stop) for part in sharded)
            counted.setdefault(name, torch.zeros(weight_shapes(config)[name]))[ranges] += 1
    assert counted.keys() == weight_shapes(config).keys()
    for name, times in counted.items():
        assert times.min() == times.max(), f"{name}: some numbers lie on more ranks than others"
    assert (counted["decoder.layers.0.attention.q.weight"] == 1).all()
    assert (counted["decoder.layers.0.attention.out.bias"] == 1).all(), "it would be added twice"
    assert (counted["decoder.layers.0.norm1.weight"] == 2).all() and (counted["embedding.tokens.weight"] == 4).all()


@pytest.mark.parametrize("name", ["apertus", "gemma4"])
def test_shards_cover_learned_activations_and_layer_scales(name: str) -> None:
    config, mesh = GoldenModel(("5", name)).config, Mesh(2, 1)
    shards = [weight_shards(config, rank) for rank in mesh.all_ranks()]
    assert shards[0].keys() == weight_shapes(config).keys()
    ends = ("mlp.alpha_p", "mlp.alpha_n", "output_scale")
    replicated = [name for name in shards[0] if name.endswith(ends)]
    assert replicated and all(each[name] == (range(1),) for each in shards for name in replicated)


def test_layers_that_share_parameters_are_not_divided_into_stages() -> None:
    config = GoldenModel(("5", "albert")).config
    with pytest.raises(ConfigError, match="must have one stage, because layers of the encoder share parameters"):
        check_model_fits_mesh(config, Mesh.parse("1x2"))


# ---------------------------------------------------------------- state of a sequence


def random_state(config: ModelConfig, cache: CacheConfig) -> dict[str, Tensor]:
    """Build a state of four blocks in which all numbers differ."""
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
def test_block_bytes_are_summed_over_all_ranks(name: str, mesh: Mesh) -> None:
    config = shaped(kv_heads=2)
    assert config.decoder is not None
    if mesh.pipeline_parallel > config.decoder.num_layers:
        return
    state = build_groups(attention_specs(config), roomy(**vars_of(CACHES[name])))
    merged = [0] * len(state)
    for each in mesh.all_ranks():
        memory = KVCache(shard_groups(state, each))
        for block_ids in memory.iter_arrays([(2,)] * len(state)):
            merged[int(block_ids.name.partition(".")[0])] += block_ids.array[block_ids.blocks].nbytes
    assert block_bytes(state, mesh) == merged
    assert mesh.size > 1 or merged == KVCache(state).block_bytes()


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", CACHES)
def test_a_split_and_merged_state_is_unchanged(name: str, mesh: Mesh) -> None:
    for config in (mixed(), shaped(kv_heads=2), pair()):
        assert config.decoder is not None
        if mesh.pipeline_parallel > config.decoder.num_layers:
            continue
        cache = roomy(**{**vars_of(CACHES[name]), "max_source_len": 24})
        state, whole = build_groups(attention_specs(config), cache), random_state(config, cache)
        parts = [split_shards(whole, state, each) for each in mesh.all_ranks()]
        for each, part in zip(mesh.all_ranks(), parts, strict=True):
            memory = KVCache(shard_groups(state, each))
            expected = {x.name: x.array[x.blocks].shape for x in memory.iter_arrays([(2, 3, 4, 5)] * len(state))}
            assert {key: x.shape for key, x in part.items()} == expected and list(part) == list(expected)
        again = merge_shards(parts, state, mesh)
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
    ("damage", "message_part"),
    [
        (_drop, "0.1.values.0"),
        (_shift, "other positions"),
        (_narrow, "0.0.keys.0"),
        (_lose, "must have 2 shards on a mesh of 2x1, got 1"),
    ],
)
def test_incomplete_shards_are_refused(damage: Callable[[list[dict[str, Tensor]]], None], message_part: str) -> None:
    config, mesh = shaped(), Mesh(2)
    state = build_groups(attention_specs(config), roomy())
    parts = [split_shards(random_state(config, roomy()), state, each) for each in mesh.all_ranks()]
    damage(parts)
    with pytest.raises(CacheError, match=message_part):
        merge_shards(parts, state, mesh)


@pytest.mark.parametrize("name", ["9.positions", "0.7.keys.0", "x.0.keys.0", "0.y.keys.0"])
def test_a_state_of_another_cache_is_refused(name: str) -> None:
    state = build_groups(attention_specs(shaped()), roomy())
    with pytest.raises(CacheError, match=name):
        split_shards({name: torch.zeros(1, 4, 4, 8)}, state, Mesh(2))
    with pytest.raises(CacheError, match="3 kv heads, the cache has 4"):
        split_shards({"0.0.keys.0": torch.zeros(1, 3, 4, 8)}, state, Mesh(2))


# ---------------------------------------------------------------- messages between ranks


def send_and_receive(message: Message) -> Message:
    pieces: list[Tensor] = []
    send(message, pieces.append)

    def receive_like(like: Tensor) -> Tensor:
        piece = pieces.pop(0)
        assert piece.shape == like.shape and piece.dtype == like.dtype
        return piece

    got = receive(receive_like)
    assert not pieces
    return got


def test_a_message_arrives_unchanged() -> None:
    kinds = (torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.int8, torch.bool)
    tensors = tuple(torch.arange(n * 3).view(n, 3).to(dtype) for n, dtype in enumerate(kinds))
    got = send_and_receive(Message("part", {"names": ["a", 1, None], "tensors": tensors}))
    assert got.kind == "part" and got.payload["names"] == ("a", 1, None)
    for here, there in zip(tensors, got.payload["tensors"], strict=True):
        assert here.dtype == there.dtype and here.shape == there.shape and here.equal(there)
    assert send_and_receive(Message("stop")) == Message("stop")


def test_model_inputs_and_block_ops_arrive_unchanged() -> None:
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
        seq_lens=ids + 9,
        slot_mappings=places,
        encoder_input=source,
    )
    assert repr(send_and_receive(Message("step", step)).payload) == repr(step)
    mapping = BlockOps(
        clear=((3, 4), ()),
        copy=((), ((1, 2, 3),)),
        evict=((EvictOp(0, 8, (2, 3), 8, 5, (3, 2)),), ()),
        swap_out=((7, ((2,), ())),),
        swap_in=((8, ((), (5,))),),
        drop_swapped=(1, 2),
        quantize=((), ((2, 3),)),
        merge=((), (MergeOp(2, 3, 0, 3),)),
    )
    received = send_and_receive(Message("moves", mapping)).payload
    assert (
        received == mapping and isinstance(received.evict[0][0], EvictOp) and isinstance(received.merge[1][0], MergeOp)
    )
    assert send_and_receive(Message("moves", BlockOps(((), ()), ((), ())))).payload == BlockOps(((), ()), ((), ()))


def test_rotaries_and_optional_slots_are_sent_unchanged() -> None:
    rotaries = {3: Rotary(torch.arange(4.0), True, 2.0), 11: Rotary(torch.ones(2), False, 1.0)}
    assert repr(send_and_receive(Message("rotaries", rotaries)).payload) == repr(rotaries)
    blocks, slots = [[1, 2], []], [torch.arange(3), None]
    assert repr(send_and_receive(Message("slots", (blocks, slots))).payload) == repr((((1, 2), ()), (slots[0], None)))


# ---------------------------------------------------------------- refused options


def engine(model: Transformer, **options: object) -> Engine:
    links = ProcessGroups(Mesh(1))
    shard_model(model, links)
    return Engine(model, roomy(), EngineConfig(cache_factory=leader_cache_factory(model, links), **options))  # type: ignore[arg-type]


def test_unsupported_options_on_a_mesh_are_refused() -> None:
    with pytest.raises(ConfigError, match="deterministic: is not supported on a mesh"):
        engine(build(shaped(), dtype=torch.float32), deterministic=True)
    with pytest.raises(ConfigError, match="attention_hook: is not supported on a mesh"):
        engine(build(shaped()), attention_hook=lambda trace: None)


def test_fingerprints_on_a_mesh_are_those_of_the_whole_model() -> None:
    """A rank has no fingerprint alone; with the full model's fingerprint, meshes share stored blocks."""
    whole, sharded = build(shaped()), build(shaped())
    shard_model(sharded, ProcessGroups(Mesh(2)))
    one = Engine(whole, roomy()).cache_fingerprint("")
    with pytest.raises(ConfigError, match="this rank has only its shard of 2"):
        Engine(
            sharded, roomy(), EngineConfig(cache_factory=leader_cache_factory(sharded, ProcessGroups(Mesh(2))))
        ).cache_fingerprint("")
    assert weights_fingerprint(sharded) != weights_fingerprint(whole)
    fingerprint = Engine(
        sharded,
        roomy(),
        EngineConfig(
            cache_factory=leader_cache_factory(sharded, ProcessGroups(Mesh(2))),
            weights_fingerprint=weights_fingerprint(whole),
        ),
    ).cache_fingerprint("")
    assert not list(one.differences(fingerprint.parts)) and one.digest() == fingerprint.digest()


def test_a_mesh_of_one_rank_does_not_change_the_model() -> None:
    """No tensor is sharded, and no process group is needed."""
    whole, sharded = build(pair()), build(pair())
    shard_model(sharded, ProcessGroups(Mesh()))
    assert {name: x.shape for name, x in whole.named_parameters()} == {
        n: x.shape for n, x in sharded.named_parameters()
    }


def test_separate_experts_are_joined_before_they_are_cut() -> None:
    config = with_mlp(shaped(), EXPERTS)
    whole, separate = build(config), build(config)
    parts = [
        f"{name}.{part}" for name, x in whole.named_modules() if isinstance(x, MixtureOfExperts) for part in x.PARTS
    ]
    separate.separate_experts([f"{part}.0" for part in parts])
    assert parts and len(list(separate.parameters())) > len(list(whole.parameters()))
    for model in (whole, separate):
        shard_model(model, ProcessGroups(Mesh(2)))
    expected, state = whole.state_dict(), separate.state_dict()
    assert expected.keys() == state.keys() and all(torch.equal(x, state[name]) for name, x in expected.items())


def test_a_stage_refuses_views_of_another_stage() -> None:
    model = build(mixed())
    shard_model(model, ProcessGroups(Mesh(1, 2, 0), pipeline=nn.Identity()))  # type: ignore[arg-type]
    ids = torch.arange(4)
    step = ModelInput(ids, ids, (SubBatch(1, 4, 4),), ids)
    with pytest.raises(KvadError, match="2 of 4 layers got 2"):
        model(step, NoCache(model.config))
