"""Every fault is named from evidence: the confusion table, other forms of the same mistakes, and no false alarm."""

import dataclasses
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvad.cache.config import CacheConfig
from kvad.cache.device.kv_cache import KVCache
from kvad.config.layers import (
    AlibiConfig,
    AttentionConfig,
    DynamicScalingConfig,
    EmbeddingConfig,
    GatedMLPConfig,
    LayerConfig,
    LearnedPositionsConfig,
    NormConfig,
    PlainMLPConfig,
    RopeConfig,
    SinusoidalPositionsConfig,
    StackConfig,
    T5BiasConfig,
)
from kvad.config.model import ModelConfig
from kvad.errors import KvadError, UsageError
from kvad.model.transformer import Transformer
from kvad.ops.rotary import RotaryCache
from kvad.verify.cases import MemoryCase
from kvad.verify.diagnosis import diagnose
from kvad.verify.injected_faults import check_fault_name, inject_cache_fault
from kvad.verify.report import FAULTS, UNKNOWN_FAULT
from kvad.verify.run import verify
from kvad.verify.scenario import ScenarioOptions, build_prompts, build_streams, case_cache_config, num_preemptions

NAMES = [name for name in FAULTS if name != UNKNOWN_FAULT]
OPTIONS = ScenarioOptions(num_seqs=3, prefill_chunk_size=8, block_size=4, tokens=8, dtypes=("float64",))
WINDOWED = LayerConfig(AttentionConfig(4, 2, window=12, logit_softcap=20.0, sink_logits=True), GatedMLPConfig(48))
STACKS = {
    "rope-gqa": {"L": LayerConfig(AttentionConfig(4, 2), GatedMLPConfig(48))},
    "rope-interleaved-partial": {
        "L": LayerConfig(
            AttentionConfig(4, 4, position=RopeConfig(interleaved=True, partial_rotary_factor=0.5)), GatedMLPConfig(48)
        )
    },
    "learned-mha": {"L": LayerConfig(AttentionConfig(4, position=None), PlainMLPConfig(48))},
    "alibi": {"L": LayerConfig(AttentionConfig(4, position=AlibiConfig()), PlainMLPConfig(48))},
    "t5": {"L": LayerConfig(AttentionConfig(4, position=T5BiasConfig(), softmax_scale="none"), GatedMLPConfig(48))},
    "windowed": {"L": LayerConfig(AttentionConfig(4, 2, window=12), GatedMLPConfig(48))},
    "windowed-and-global": {"L": WINDOWED, "G": LayerConfig(AttentionConfig(4, 2, qk_norm="head"), GatedMLPConfig(48))},
    "no-positions": {"L": LayerConfig(AttentionConfig(4, 1, position=None), GatedMLPConfig(48))},
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
    stack = StackConfig(
        num_layers=len(pattern) if len(kinds) > 1 else 3,
        layer_types=kinds,
        layer_pattern=pattern,
        norm_position="sandwich" if len(kinds) > 1 else "pre",
    )
    position = LearnedPositionsConfig(96) if name == "learned-mha" else None
    return loud(
        ModelConfig(hidden_size=32, vocab_size=64, max_seq_len=96, decoder=stack, embedding=EmbeddingConfig(position))
    )


def meaningless(fault, name):
    return (fault == "rotation" and not name.startswith(("rope", "windowed"))) or (
        fault == "position" and name == "no-positions"
    )


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
@pytest.mark.parametrize("name", STACKS)
def test_the_confusion_table_is_diagonal(name, layout):
    model = named(name)
    prompts = build_prompts(model.config, OPTIONS, None)
    options = dataclasses.replace(OPTIONS, layouts=(layout,))
    found = {}
    for fault in NAMES:
        try:
            (memory,) = verify(model, prompts, options, fault=fault).cases
            assert memory.verdict == "broken"
            found[fault] = memory.finding.fault if memory.finding else None
        except UsageError:
            found[fault] = "meaningless"
    assert found == {fault: "meaningless" if meaningless(fault, name) else fault for fault in NAMES}


# ---------------------------------------------------------------- other forms of the same mistakes


class Tampering(KVCache):
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
        rotate = partial(RotaryCache(late).rotate, rotary=score.rotary)
        return rotate(q), rotate(k), v, score._replace(rotary=None)

    return {"arguments": staticmethod(arguments)}


def keys_turned(how):
    def arguments(step, layer, q, k, v, score):
        angles = RotaryCache(step.positions)
        return angles.rotate(q, score.rotary), how(step, angles, k, score.rotary), v, score._replace(rotary=None)

    return {"arguments": staticmethod(arguments)}


def scaled(by):
    return {
        "arguments": staticmethod(lambda step, layer, q, k, v, score: (q, k, v, score._replace(scale=score.scale * by)))
    }


def to_the_bin(step, groups):
    """Decoded tokens are written to block 1, which nobody reads."""
    decoding = step.sub_batches and step.positions.shape[0] == sum(lane.num_seqs for lane in step.sub_batches)
    places = tuple(
        place._replace(slots=torch.full_like(place.slots, group.block_size) if decoding else place.slots)
        for place, group in zip(step.slot_mappings, groups, strict=True)
    )
    return step._replace(slot_mappings=places)


def values_rounded(step, layer, q, k, v, score):
    return q, k, v.bfloat16().to(v.dtype), score


def uncleared(memory):
    memory.apply = lambda moves: KVCache.apply(memory, moves._replace(clear=((),) * len(moves.clear)))
    return memory


FORMS = {
    "q and k a position late": ("position", turned(1)),
    "q and k three positions early": ("position", turned(-3)),
    "keys turned backwards": ("rotation", keys_turned(lambda s, a, k, r: RotaryCache(-s.positions).rotate(k, r))),
    "keys turned twice": ("rotation", keys_turned(lambda s, a, k, r: a.rotate(a.rotate(k, r), r))),
    "keys in other pairs": (
        "rotation",
        keys_turned(lambda s, a, k, r: a.rotate(k, r._replace(interleaved=not r.interleaved))),
    ),
    "no scale": ("scale", scaled(8**0.5)),
    "the newest key is nowhere": ("cursor", {"step": staticmethod(to_the_bin)}),
    "values rounded": ("dtype", {"arguments": staticmethod(values_rounded)}),
    "noise": (
        UNKNOWN_FAULT,
        {"arguments": staticmethod(lambda s, n, q, k, v, score: (q, k + 0.1 * k.sin(), v, score))},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_other_forms_of_a_fault_get_its_name(form):
    expected, methods = FORMS[form]
    cls = type("Tampered", (Tampering,), methods)
    finding = diagnose_with(named("rope-gqa"), lambda placed, probe: cls(placed, attention_hook=probe))
    assert finding is not None and finding.fault == expected, finding
    assert finding.layer == 0 and finding.difference > 0


def test_the_first_difference_is_located():
    """Layer 1's output is changed, and nothing before it."""
    methods = {"result": staticmethod(lambda layer, out: out * 1.5 if layer == 1 else out)}
    cls = type("Tampered", (Tampering,), methods)
    finding = diagnose_with(named("rope-gqa"), lambda placed, probe: cls(placed, attention_hook=probe))
    assert (finding.fault, finding.layer, finding.position, finding.what) == (UNKNOWN_FAULT, 2, 0, "q")


def test_a_mask_that_forgets_its_window():
    model = named("windowed")

    def build(placed, probe):
        seeing = [group._replace(spec=group.spec._replace(window=None)) for group in placed]
        return KVCache(seeing, attention_hook=probe)

    finding = diagnose_with(model, build)
    assert finding.fault == "mask" and finding.position >= 12


def test_blocks_handed_on_uncleared_are_seen():
    """A stale key of an earlier row is visible where nothing should be: some fault, never silence."""
    finding = diagnose_with(
        named("learned-mha"), lambda placed, probe: uncleared(KVCache(placed, attention_hook=probe))
    )
    assert finding is not None and "no sequence wrote" in finding.evidence


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
def test_float32_that_stores_less_is_named_in_float32(layout):
    """A float64 twin would not show it: the diagnosis works in the stored precision too."""

    def build(placed, probe):
        assert all(group.key_format == group.value_format == "float32" for group in placed)
        narrow = [group._replace(key_format="bfloat16", value_format="bfloat16") for group in placed]
        return KVCache(narrow, attention_hook=probe)

    finding = diagnose_with(named("rope-gqa"), build, layout=layout, dtype="float32")
    assert finding.fault == "dtype" and "bfloat16" in finding.evidence


def diagnose_with(model, build, layout="paged", dtype="float64", options=OPTIONS):
    streams = build_streams(model, build_prompts(model.config, options, None), options)
    cache = case_cache_config(model.config, streams, options, MemoryCase(layout, dtype))
    judged = model.double() if dtype == "float64" else model
    return diagnose(judged, cache, streams, build, squeezes=num_preemptions(options))


# ---------------------------------------------------------------- no false alarm

attention = st.builds(
    AttentionConfig,
    num_heads=st.just(4),
    num_kv_heads=st.sampled_from([1, 2, 4]),
    value_dim=st.sampled_from([None, 6]),
    position=st.sampled_from(
        [
            RopeConfig(),
            RopeConfig(interleaved=True, partial_rotary_factor=0.5),
            RopeConfig(scaling=DynamicScalingConfig(2.0, 16)),
            AlibiConfig(),
            T5BiasConfig(8, 16),
            None,
        ]
    ),
    window=st.sampled_from([None, 1, 5, 12]),
    qk_norm=st.sampled_from(["none", "head", "full"]),
    logit_softcap=st.sampled_from([None, 10.0]),
    sink_logits=st.booleans(),
    softmax_scale=st.sampled_from(["default", "none", 0.2]),
)
layer = st.builds(
    LayerConfig,
    attention=attention,
    mlp=st.just(GatedMLPConfig(40)),
    norm=st.sampled_from([NormConfig(), NormConfig("layer", bias=True)]),
)
configs = st.builds(
    ModelConfig,
    hidden_size=st.just(32),
    vocab_size=st.just(48),
    max_seq_len=st.just(64),
    decoder=st.builds(
        StackConfig,
        num_layers=st.just(3),
        layer_types=st.fixed_dictionaries({"L": layer, "G": layer}),
        layer_pattern=st.sampled_from(["LLLG", "LG", "LLG"]),
        norm_position=st.sampled_from(["pre", "post", "sandwich", "after", "normed", "parallel", "parallel_pair"]),
    ),
    embedding=st.builds(
        EmbeddingConfig, position=st.sampled_from([None, LearnedPositionsConfig(64), SinusoidalPositionsConfig()])
    ),
)


@settings(max_examples=15)
@given(configs, st.sampled_from(["paged", "contiguous"]), st.sampled_from([3, 4, 8]), st.integers(0, 99))
def test_an_unhurt_memory_is_never_diagnosed(config, layout, block_size, seed):
    model = loud(config, seed)
    options = dataclasses.replace(OPTIONS, block_size=block_size, layouts=(layout,), tokens=6)
    assert diagnose_with(model, partial(inject_cache_fault, None), layout=layout, options=options) is None
    assert verify(model, build_prompts(config, options, None), options).verdict() == f"exact ({layout} float64)"


@pytest.mark.long(minutes=2)
@settings(max_examples=60)
@given(configs, st.sampled_from(["paged", "contiguous"]), st.sampled_from([3, 4, 8]), st.integers(0, 99))
def test_no_random_model_confuses_two_faults(config, layout, block_size, seed):
    model = loud(config, seed)
    options = dataclasses.replace(OPTIONS, block_size=block_size, layouts=(layout,), tokens=6)
    for fault in NAMES:
        try:
            (memory,) = verify(model, build_prompts(config, options, None), options, fault=fault).cases
        except KvadError:  # meaningless here, or without effect (a window of 1 sees no second key)
            continue
        assert memory.finding is not None and memory.finding.fault == fault, memory.finding


# ---------------------------------------------------------------- what cannot be

CACHE = CacheConfig(max_num_seqs=2, max_seq_len=32, prefill_chunk_size=8, block_size=4)


@pytest.mark.parametrize(
    ("fault", "name", "cache", "word"),
    [
        ("rotation", "alibi", CACHE, "rotates"),
        ("position", "no-positions", CACHE, "no positions"),
        ("mask", "rope-gqa", dataclasses.replace(CACHE, prefill_chunk_size=1), "--prefill-chunk-size 1"),
        ("mesk", "rope-gqa", CACHE, "did you mean 'mask'"),
    ],
)
def test_a_meaningless_fault_is_refused_by_name(fault, name, cache, word):
    with pytest.raises(UsageError, match=word):
        check_fault_name(fault, named(name).config, cache)


def test_layers_of_different_groups_cannot_be_confused():
    kinds = {"L": WINDOWED, "G": LayerConfig(AttentionConfig(4, 2), GatedMLPConfig(48))}
    config = ModelConfig(
        hidden_size=32,
        vocab_size=64,
        max_seq_len=96,
        decoder=StackConfig(num_layers=2, layer_types=kinds, layer_pattern="LG"),
    )
    with pytest.raises(KvadError, match="share a cache group"):
        check_fault_name("layer", config, CACHE)
