"""Every fault is named from evidence: the confusion table, other forms of the same mistakes, and no false alarm."""

import dataclasses
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvad.cache.memory import Memory
from kvad.cache.sizing import CacheConfig
from kvad.config import (
    Alibi,
    Attention,
    DynamicScaling,
    Embedding,
    Gated,
    Layer,
    LearnedPositions,
    ModelConfig,
    Norm,
    Plain,
    Rope,
    SinusoidalPositions,
    Stack,
    T5Bias,
)
from kvad.errors import KvadError, UsageError
from kvad.lab.diagnose import diagnose
from kvad.lab.faults import check_fault, hurt_memory
from kvad.lab.findings import FAULTS, UNKNOWN
from kvad.lab.scenario import Options, cache_config, make_streams, prompts_of, squeezes
from kvad.lab.verify import verify
from kvad.model.transformer import Transformer
from kvad.ops.rotary import Angles

NAMES = [name for name in FAULTS if name != UNKNOWN]
OPTIONS = Options(rows=3, chunk=8, block_size=4, tokens=8, dtypes=("float64",))
WINDOWED = Layer(Attention(4, 2, window=12, softcap=20.0, sinks=True), Gated(48))
STACKS = {
    "rope-gqa": {"L": Layer(Attention(4, 2), Gated(48))},
    "rope-interleaved-partial": {"L": Layer(Attention(4, 4, position=Rope(interleaved=True, fraction=0.5)), Gated(48))},
    "learned-mha": {"L": Layer(Attention(4, position=None), Plain(48))},
    "alibi": {"L": Layer(Attention(4, position=Alibi()), Plain(48))},
    "t5": {"L": Layer(Attention(4, position=T5Bias(), scale="none"), Gated(48))},
    "windowed": {"L": Layer(Attention(4, 2, window=12), Gated(48))},
    "windowed-and-global": {"L": WINDOWED, "G": Layer(Attention(4, 2, qk_norm="head"), Gated(48))},
    "no-positions": {"L": Layer(Attention(4, 1, position=None), Gated(48))},
}


@pytest.fixture(autouse=True)
def _one_thread():
    """Tiny tensors: a second thread costs more than it gives."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def loud(config, seed=0):
    """A model whose every parameter matters: at GPT-2's initialisation attention is nearly uniform."""
    torch.manual_seed(seed)
    model = Transformer(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.dim() == 1))
    return model.eval().requires_grad_(False)


def named(name):
    kinds = STACKS[name]
    pattern = "LGLG" if len(kinds) > 1 else "L"
    stack = Stack(
        layers=len(pattern) if len(kinds) > 1 else 3,
        kinds=kinds,
        pattern=pattern,
        norm_place="sandwich" if len(kinds) > 1 else "pre",
    )
    position = LearnedPositions(96) if name == "learned-mha" else None
    return loud(ModelConfig(width=32, vocab=64, limit=96, decoder=stack, embed=Embedding(position)))


def meaningless(fault, name):
    return (fault == "rotation" and not name.startswith(("rope", "windowed"))) or (
        fault == "position" and name == "no-positions"
    )


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
@pytest.mark.parametrize("name", STACKS)
def test_the_confusion_table_is_diagonal(name, layout):
    model = named(name)
    prompts = prompts_of(model.config, OPTIONS, None)
    options = dataclasses.replace(OPTIONS, layouts=(layout,))
    found = {}
    for fault in NAMES:
        try:
            (memory,) = verify(model, prompts, options, fault=fault).memories
            assert memory.verdict == "BROKEN"
            found[fault] = memory.finding.fault if memory.finding else None
        except UsageError:
            found[fault] = "meaningless"
    assert found == {fault: "meaningless" if meaningless(fault, name) else fault for fault in NAMES}


# ---------------------------------------------------------------- other forms of the same mistakes


class Tampering(Memory):
    """A Memory whose step, or whose view's arguments and result, are changed."""

    step = staticmethod(lambda step, groups: step)
    arguments = staticmethod(lambda step, layer, q, k, v, score: (q, k, v, score))
    result = staticmethod(lambda layer, out: out)

    def open(self, step):
        def wrap(layer, view):
            outer = self

            class View:
                def attend(self, q, k, v, score):
                    return outer.result(layer, view.attend(*outer.arguments(step, layer, q, k, v, score)))

            return View()

        return [wrap(layer, view) for layer, view in enumerate(super().open(self.step(step, self.groups)))]


def turned(by):
    """Both q and k turned as at position p + by, the column left right."""

    def arguments(step, layer, q, k, v, score):
        late = step.positions + by * (step.positions >= 8)
        rotate = partial(Angles(late).rotate, rotary=score.rotary)
        return rotate(q), rotate(k), v, score._replace(rotary=None)

    return {"arguments": staticmethod(arguments)}


def keys_turned(how):
    def arguments(step, layer, q, k, v, score):
        angles = Angles(step.positions)
        return angles.rotate(q, score.rotary), how(step, angles, k, score.rotary), v, score._replace(rotary=None)

    return {"arguments": staticmethod(arguments)}


def scaled(by):
    return {
        "arguments": staticmethod(lambda step, layer, q, k, v, score: (q, k, v, score._replace(scale=score.scale * by)))
    }


def to_the_bin(step, groups):
    """Decoded tokens are written to block 1, which nobody reads."""
    decoding = step.lanes and step.positions.shape[0] == sum(lane.rows for lane in step.lanes)
    places = tuple(
        place._replace(slots=torch.full_like(place.slots, group.block_size) if decoding else place.slots)
        for place, group in zip(step.places, groups, strict=True)
    )
    return step._replace(places=places)


def values_rounded(step, layer, q, k, v, score):
    return q, k, v.bfloat16().to(v.dtype), score


def uncleared(memory):
    memory.apply = lambda moves: Memory.apply(memory, moves._replace(clear=((),) * len(moves.clear)))
    return memory


FORMS = {
    "q and k a position late": ("position", turned(1)),
    "q and k three positions early": ("position", turned(-3)),
    "keys turned backwards": ("rotation", keys_turned(lambda s, a, k, r: Angles(-s.positions).rotate(k, r))),
    "keys turned twice": ("rotation", keys_turned(lambda s, a, k, r: a.rotate(a.rotate(k, r), r))),
    "keys in other pairs": (
        "rotation",
        keys_turned(lambda s, a, k, r: a.rotate(k, r._replace(interleaved=not r.interleaved))),
    ),
    "no scale": ("scale", scaled(8**0.5)),
    "the newest key is nowhere": ("cursor", {"step": staticmethod(to_the_bin)}),
    "values rounded": ("dtype", {"arguments": staticmethod(values_rounded)}),
    "noise": (UNKNOWN, {"arguments": staticmethod(lambda s, n, q, k, v, score: (q, k + 0.1 * k.sin(), v, score))}),
}


@pytest.mark.parametrize("form", FORMS)
def test_other_forms_of_a_fault_get_its_name(form):
    expected, methods = FORMS[form]
    cls = type("Tampered", (Tampering,), methods)
    finding = diagnose_with(named("rope-gqa"), lambda placed, probe: cls(placed, probe=probe))
    assert finding is not None and finding.fault == expected, finding
    assert finding.layer == 0 and finding.difference > 0


def test_the_first_difference_is_located():
    """Layer 1's output is changed, and nothing before it."""
    methods = {"result": staticmethod(lambda layer, out: out * 1.5 if layer == 1 else out)}
    cls = type("Tampered", (Tampering,), methods)
    finding = diagnose_with(named("rope-gqa"), lambda placed, probe: cls(placed, probe=probe))
    assert (finding.fault, finding.layer, finding.position, finding.what) == (UNKNOWN, 2, 0, "q")


def test_a_mask_that_forgets_its_window():
    model = named("windowed")

    def build(placed, probe):
        seeing = [group._replace(mixer=group.mixer._replace(window=None)) for group in placed]
        return Memory(seeing, probe=probe)

    finding = diagnose_with(model, build)
    assert finding.fault == "mask" and finding.position >= 12


def test_blocks_handed_on_uncleared_are_seen():
    """A stale key of an earlier row is visible where nothing should be: some fault, never silence."""
    finding = diagnose_with(named("learned-mha"), lambda placed, probe: uncleared(Memory(placed, probe=probe)))
    assert finding is not None and "nobody wrote" in finding.evidence


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
def test_float32_that_stores_less_is_named_in_float32(layout):
    """A float64 twin would not show it: the diagnosis works in the stored precision too."""

    def build(placed, probe):
        assert all(group.keys == group.values == "float32" for group in placed)
        return Memory([group._replace(keys="bfloat16", values="bfloat16") for group in placed], probe=probe)

    finding = diagnose_with(named("rope-gqa"), build, layout=layout, dtype="float32")
    assert finding.fault == "dtype" and "bfloat16" in finding.evidence


def diagnose_with(model, build, layout="paged", dtype="float64", options=OPTIONS):
    streams = make_streams(model, prompts_of(model.config, options, None), options)
    cache = cache_config(model.config, streams, options, layout, dtype)
    judged = model.double() if dtype == "float64" else model
    return diagnose(judged, cache, streams, build, squeezes=squeezes(options))


# ---------------------------------------------------------------- no false alarm

attention = st.builds(
    Attention,
    heads=st.just(4),
    kv_heads=st.sampled_from([1, 2, 4]),
    value_dim=st.sampled_from([None, 6]),
    position=st.sampled_from(
        [
            Rope(),
            Rope(interleaved=True, fraction=0.5),
            Rope(scaling=DynamicScaling(2.0, 16)),
            Alibi(),
            T5Bias(8, 16),
            None,
        ]
    ),
    window=st.sampled_from([None, 1, 5, 12]),
    qk_norm=st.sampled_from(["none", "head", "full"]),
    softcap=st.sampled_from([None, 10.0]),
    sinks=st.booleans(),
    scale=st.sampled_from(["default", "none", 0.2]),
)
layer = st.builds(
    Layer, mixer=attention, mlp=st.just(Gated(40)), norm=st.sampled_from([Norm(), Norm("layer", bias=True)])
)
configs = st.builds(
    ModelConfig,
    width=st.just(32),
    vocab=st.just(48),
    limit=st.just(64),
    decoder=st.builds(
        Stack,
        layers=st.just(3),
        kinds=st.fixed_dictionaries({"L": layer, "G": layer}),
        pattern=st.sampled_from(["LLLG", "LG", "LLG"]),
        norm_place=st.sampled_from(["pre", "post", "sandwich", "after", "normed", "parallel", "parallel_pair"]),
    ),
    embed=st.builds(Embedding, position=st.sampled_from([None, LearnedPositions(64), SinusoidalPositions()])),
)


@settings(max_examples=15)
@given(configs, st.sampled_from(["paged", "contiguous"]), st.sampled_from([3, 4, 8]), st.integers(0, 99))
def test_an_unhurt_memory_is_never_diagnosed(config, layout, block_size, seed):
    model = loud(config, seed)
    options = dataclasses.replace(OPTIONS, block_size=block_size, layouts=(layout,), tokens=6)
    assert diagnose_with(model, partial(hurt_memory, None), layout=layout, options=options) is None
    assert verify(model, prompts_of(config, options, None), options).verdict() == f"exact ({layout} float64)"


@pytest.mark.long(minutes=2)
@settings(max_examples=60)
@given(configs, st.sampled_from(["paged", "contiguous"]), st.sampled_from([3, 4, 8]), st.integers(0, 99))
def test_no_random_model_confuses_two_faults(config, layout, block_size, seed):
    model = loud(config, seed)
    options = dataclasses.replace(OPTIONS, block_size=block_size, layouts=(layout,), tokens=6)
    for fault in NAMES:
        try:
            (memory,) = verify(model, prompts_of(config, options, None), options, fault=fault).memories
        except KvadError:  # meaningless here, or without effect (a window of 1 sees no second key)
            continue
        assert memory.finding is not None and memory.finding.fault == fault, memory.finding


# ---------------------------------------------------------------- what cannot be

CACHE = CacheConfig(rows=2, capacity=32, chunk=8, block_size=4)


@pytest.mark.parametrize(
    ("fault", "name", "cache", "word"),
    [
        ("rotation", "alibi", CACHE, "rotates"),
        ("position", "no-positions", CACHE, "no positions"),
        ("mask", "rope-gqa", dataclasses.replace(CACHE, chunk=1), "--chunk 1"),
        ("mesk", "rope-gqa", CACHE, "did you mean 'mask'"),
    ],
)
def test_a_meaningless_fault_is_refused_by_name(fault, name, cache, word):
    with pytest.raises(UsageError, match=word):
        check_fault(fault, named(name).config, cache)


def test_layers_of_different_groups_cannot_be_confused():
    kinds = {"L": WINDOWED, "G": Layer(Attention(4, 2), Gated(48))}
    config = ModelConfig(width=32, vocab=64, limit=96, decoder=Stack(layers=2, kinds=kinds, pattern="LG"))
    with pytest.raises(KvadError, match="share a cache group"):
        check_fault("layer", config, CACHE)
