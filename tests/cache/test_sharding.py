"""Which rank has what, to the byte, and a row's state cut for a mesh and put together again: no process is started."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from kvad.cache.memory import Memory
from kvad.cache.mesh import Mesh, check_mesh, kv_share, layer_share, query_share
from kvad.cache.planning import plan_memory
from kvad.cache.portions import plan_ranks, weight_cuts
from kvad.cache.settle import settle
from kvad.cache.sharding import block_bytes, cut_groups, local_layers, merge, split
from kvad.cache.sizing import CacheConfig, groups
from kvad.cache.weights import weight_shapes
from kvad.config import ModelConfig, mixers
from kvad.engine.engine import Engine
from kvad.errors import CacheError, ConfigError, KvadError, UsageError
from kvad.model.fingerprint import fingerprint
from kvad.model.fresh import Fresh
from kvad.model.transformer import Transformer
from kvad.parallel.links import Links
from kvad.parallel.ranks import Part, lead
from kvad.parallel.shard import shard
from kvad.parallel.wire import Message, moves_in, moves_out, receive, send, step_in, step_out
from kvad.step import Compact, Fold, Lane, Moves, Place, Step
from tests.mesh_cases import EXPERTS, mixed, own_tables, pair, roomy, shaped, with_mlp
from tests.models import build

MESHES = [Mesh.parse(text) for text in ("1x1", "2x1", "1x2", "2x2", "4x1", "8x1")]
CACHES = {
    "full": roomy(),
    "int8": roomy(dtype="int8"),
    "levels": roomy(policy="hierarchy(8, packed=8, every=4, summaries=8, ratio=2)", values="int8"),
    "ranked": roomy(policy="0: full; random(8, every=4)"),
    "contiguous": CacheConfig(layout="contiguous", rows=4, capacity=44, chunk=5),
}


# ---------------------------------------------------------------- who has what


def test_every_head_and_layer_is_somewhere_and_queries_are_with_their_keys() -> None:
    for tensor, kv_heads, group in product((1, 2, 3, 4, 6, 8), (1, 2, 4, 6), (1, 2, 4)):
        heads = kv_heads * group
        if heads % tensor or (kv_heads % tensor and tensor % kv_heads):
            continue
        seen: list[int] = []
        for mesh in Mesh(tensor).every():
            queries, keys = query_share(heads, mesh), kv_share(kv_heads, mesh)
            seen += queries
            assert {query // group for query in queries} == set(keys)
            assert len(queries) % len(keys) == 0, "a rank's query heads are spread evenly over its kv heads"
        assert seen == list(range(heads))
    for stages, layers in ((1, 5), (2, 5), (3, 5), (5, 5)):
        assert [x for mesh in Mesh(1, stages).every() for x in layer_share(layers, mesh)] == list(range(layers))


def test_a_stage_numbers_its_layers_and_their_cross_attention_anew() -> None:
    config = pair()
    made = groups(mixers(config), roomy(source_capacity=24))
    assert local_layers(made, 2, Mesh(1, 2, 1)) == {1: 0, 3: 1}
    assert [group.layers for group in cut_groups(made, 2, Mesh(2, 2, 3))] == [(0,), (1,)]
    assert [group.mixer.kv_heads for group in cut_groups(made, 2, Mesh(2, 2, 3))] == [2, 4]


@pytest.mark.parametrize("text", ["", "2", "2x", "0x1", "2x0", "-1x2", "2x1x1", "axb"])
def test_what_is_no_mesh_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="tensor x pipeline"):
        Mesh.parse(text)


@pytest.mark.parametrize(
    ("config", "mesh", "says"),
    [
        (shaped(), "3x1", "decoder.kinds.L.mixer has 4 kv heads .* fit this model: 1, 2, 4, 8"),
        (shaped(kv_heads=2), "16x1", "8 query heads"),
        (shaped(layers=2), "1x3", "3 stages, and the decoder has 2 layers .take at most 2 stages"),
        (pair(), "1x3", "the decoder has 2 layers"),
        (shaped(own="tests.lab.looker:Nothing"), "2x1", "does not know how to cut by heads .* 1x2"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_and_told_what_does(config: ModelConfig, mesh: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace(" .* ", ".*")):
        check_mesh(config, Mesh.parse(mesh))


@pytest.mark.parametrize(("policy", "name"), [("tova(8)", "tova"), ("quest(8)", "quest"), ("snapkv(8)", "snapkv")])
def test_policies_that_watch_are_refused_where_a_kv_head_lies_on_several_ranks(policy: str, name: str) -> None:
    plan = plan_memory(shaped(kv_heads=2), roomy(policy=policy, chunk=4), weights_dtype="float64")
    with pytest.raises(ConfigError, match=f"{name}.*at most 2 tensor ranks"):
        plan_ranks(plan, Mesh(4))
    assert plan_ranks(plan, Mesh(2))


# ---------------------------------------------------------------- to the byte


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("config", [shaped(kv_heads=8), mixed(), own_tables(), pair(), with_mlp(shaped(), EXPERTS)])
def test_a_rank_has_the_bytes_that_were_planned(config: ModelConfig, mesh: Mesh) -> None:
    assert config.decoder is not None
    if mesh.pipeline > config.decoder.layers:
        return
    for cache in CACHES.values():
        cache = settle(config, roomy(**{**vars_of(cache), "source_capacity": 24}))
        ranks = plan_ranks(plan_memory(config, cache, weights_dtype="float64"), mesh)
        for each in mesh.every():
            links = Links(each)
            memory = Part(groups(mixers(config), cache), links=links, layers=config.decoder.layers)
            assert memory.payload_bytes() == ranks[each.rank].payload
            assert memory.scale_bytes() == ranks[each.rank].scales
            assert memory.column_bytes() == ranks[each.rank].columns
            assert sum(leaf.nbytes for leaf in memory.leaves()) == ranks[each.rank].pool
    for each in mesh.every():
        model = build(config)
        shard(model, Links(each))
        assert sum(x.nbytes for x in model.parameters()) == ranks[each.rank].weights
        shapes = {name: tuple(map(len, cut)) for name, cut in weight_cuts(config, each).items()}
        assert sorted(tuple(x.shape) for x in model.parameters()) == sorted(shapes.values())


def vars_of(cache: CacheConfig) -> dict[str, object]:
    return {name: getattr(cache, name) for name in ("dtype", "policy", "layout", "values", "rows", "capacity", "chunk")}


def test_what_all_ranks_have_is_the_model_and_what_is_whole_is_whole_on_each() -> None:
    """Every number of a cut weight lies on exactly one rank of a stage; what is not cut lies on all of them."""
    config, mesh = pair("t5"), Mesh(2, 2)
    counted: dict[str, Tensor] = {}
    for each in mesh.every():
        for name, cut in weight_cuts(config, each).items():
            ranges = tuple(slice(part.start, part.stop) for part in cut)
            counted.setdefault(name, torch.zeros(weight_shapes(config)[name]))[ranges] += 1
    assert counted.keys() == weight_shapes(config).keys()
    for name, times in counted.items():
        assert times.min() == times.max(), f"{name}: some numbers lie on more ranks than others"
    assert (counted["decoder.layers.0.mixer.q.weight"] == 1).all()
    assert (counted["decoder.layers.0.mixer.out.bias"] == 1).all(), "it would be added twice"
    assert (counted["decoder.layers.0.norm1.weight"] == 2).all() and (counted["embed.tokens.weight"] == 4).all()


# ---------------------------------------------------------------- a row's state


def a_row(config: ModelConfig, cache: CacheConfig) -> dict[str, Tensor]:
    """A state of four blocks, every number of which is another."""
    memory = Memory(groups(mixers(config), cache))
    at = 0
    state = {}
    for each in memory.held([(2, 3, 4, 5)] * len(memory.groups)):
        shape = each.array[each.blocks].shape
        state[each.name] = torch.arange(at, at + shape.numel(), dtype=torch.float64).view(shape)
        at += shape.numel()
    return state


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", CACHES)
def test_the_bytes_of_a_block_are_those_of_all_ranks(name: str, mesh: Mesh) -> None:
    config = shaped(kv_heads=2)
    assert config.decoder is not None
    layers = config.decoder.layers
    if mesh.pipeline > layers:
        return
    made = groups(mixers(config), roomy(**vars_of(CACHES[name])))
    found = [0] * len(made)
    for each in mesh.every():
        memory = Memory(cut_groups(made, layers, each))
        for held in memory.held([(2,)] * len(made)):
            found[int(held.name.partition(".")[0])] += held.array[held.blocks].nbytes
    assert block_bytes(made, layers, mesh) == found
    assert mesh.size > 1 or found == Memory(made).block_bytes()


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", CACHES)
def test_a_state_that_is_cut_and_put_together_is_the_same(name: str, mesh: Mesh) -> None:
    for config in (mixed(), shaped(kv_heads=2), pair()):
        assert config.decoder is not None
        layers = config.decoder.layers
        if mesh.pipeline > layers:
            continue
        cache = roomy(**{**vars_of(CACHES[name]), "source_capacity": 24})
        made, whole = groups(mixers(config), cache), a_row(config, cache)
        parts = [split(whole, made, layers, each) for each in mesh.every()]
        for each, part in zip(mesh.every(), parts, strict=True):
            memory = Memory(cut_groups(made, layers, each))
            expected = {x.name: x.array[x.blocks].shape for x in memory.held([(2, 3, 4, 5)] * len(made))}
            assert {key: x.shape for key, x in part.items()} == expected and list(part) == list(expected)
        again = merge(parts, made, layers, mesh)
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
    [(_drop, "0.1.values.0"), (_shift, "other positions"), (_narrow, "0.0.keys.0"), (_lose, "has 2 parts, found 1")],
)
def test_parts_that_do_not_make_a_whole_are_refused(
    damage: Callable[[list[dict[str, Tensor]]], None], says: str
) -> None:
    config, mesh = shaped(), Mesh(2)
    made = groups(mixers(config), roomy())
    parts = [split(a_row(config, roomy()), made, 2, each) for each in mesh.every()]
    damage(parts)
    with pytest.raises(CacheError, match=says):
        merge(parts, made, 2, mesh)


@pytest.mark.parametrize("name", ["9.positions", "0.7.keys.0", "x.0.keys.0", "0.y.keys.0"])
def test_a_state_of_another_cache_is_refused(name: str) -> None:
    made = groups(mixers(shaped()), roomy())
    with pytest.raises(CacheError, match=name):
        split({name: torch.zeros(1, 4, 4, 8)}, made, 2, Mesh(2))
    with pytest.raises(CacheError, match="3 kv heads, the cache has 4"):
        split({"0.0.keys.0": torch.zeros(1, 3, 4, 8)}, made, 2, Mesh(2))


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
    assert got.kind == "part" and got.said == ["a", 1, None]
    for here, there in zip(tensors, got.tensors, strict=True):
        assert here.dtype == there.dtype and here.shape == there.shape and here.equal(there)
    assert sent_and_taken(Message("stop")) == Message("stop")


def test_a_step_and_its_moves_come_as_they_went() -> None:
    ids, none = torch.arange(5), torch.arange(0)
    source = Step(ids, ids, (Lane(1, 5, 5),), none, places=(Place(ids + 8, ()),))
    places = (Place(ids, (ids.view(1, 5), none.view(1, 0))), Place(None, (ids.view(1, 5),), (Lane(1, 5, 20),)))
    step = Step(ids, ids + 1, (Lane(2, 1, 8), Lane(1, 3, 16)), ids[1:], limits=ids + 9, places=places, source=source)
    said, tensors = step_out(step)
    got = sent_and_taken(Message("step", said, tensors))
    assert repr(step_in(got.said, got.tensors)) == repr(step)
    moves = Moves(
        clear=((3, 4), ()),
        copy=((), ((1, 2, 3),)),
        compact=((Compact(0, 8, (2, 3), 8, 5, (3, 2)),), ()),
        park=((7, ((2,), ())),),
        wake=((8, ((), (5,))),),
        drop=(1, 2),
        pack=((), ((2, 3),)),
        fold=((), (Fold(2, 3, 0, 3),)),
    )
    assert moves_in(sent_and_taken(Message("moves", moves_out(moves))).said) == moves
    assert moves_in(sent_and_taken(Message("moves", moves_out(moves._replace(clear=((), ()))))).said).clear == ((), ())
    assert moves_out(Moves(((), ()), ((), ()))) is None, "nothing to tell"


# ---------------------------------------------------------------- what is refused


def engine(model: Transformer, **options: object) -> Engine:
    links = Links(Mesh(1))
    shard(model, links)
    return Engine(model, roomy(), memory=lead(model, links), **options)  # type: ignore[arg-type]


def test_what_a_mesh_does_not_promise_is_refused() -> None:
    with pytest.raises(ConfigError, match="deterministic: not promised on a mesh"):
        engine(build(shaped(), dtype=torch.float32), deterministic=True)
    with pytest.raises(ConfigError, match="probe: on a mesh"):
        engine(build(shaped()), probe=lambda seen: None)


def test_what_a_mesh_keeps_belongs_to_the_whole_model() -> None:
    """A rank does not say what it cannot know; with the whole one's fingerprint, what one mesh has stored is
    another's."""
    whole, cut = build(shaped()), build(shaped())
    shard(cut, Links(Mesh(2)))
    one = Engine(whole, roomy()).identity("")
    with pytest.raises(ConfigError, match="one of 2 ranks, which sees a part of them alone"):
        Engine(cut, roomy(), memory=lead(cut, Links(Mesh(2)))).identity("")
    assert fingerprint(cut) != fingerprint(whole)
    known = Engine(cut, roomy(), memory=lead(cut, Links(Mesh(2))), weights=fingerprint(whole)).identity("")
    assert not list(one.differs(known.parts)) and one.digest() == known.digest()


def test_a_mesh_of_one_is_the_model_itself() -> None:
    """Not a number is cut, and no process group is asked for."""
    whole, cut = build(pair()), build(pair())
    shard(cut, Links(Mesh()))
    assert {name: x.shape for name, x in whole.named_parameters()} == {n: x.shape for n, x in cut.named_parameters()}


def test_a_stage_refuses_a_memory_that_is_not_its_own() -> None:
    model = build(mixed())
    shard(model, Links(Mesh(1, 2, 0), line=nn.Identity()))  # type: ignore[arg-type]
    ids = torch.arange(4)
    step = Step(ids, ids, (Lane(1, 4, 4),), ids)
    with pytest.raises(KvadError, match="2 of 4 layers was given 2"):
        model(step, Fresh(model.config))
