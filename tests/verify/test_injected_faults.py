"""Fault injection and diagnosis: every fault is named from evidence, and an intact cache has no finding."""

import dataclasses
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvad import config as cfg
from kvad.cache.config import CacheConfig
from kvad.cache.device.kv_cache import KVCache
from kvad.config.layers import AttentionConfig, GatedMLPConfig, LayerConfig, PlainMLPConfig, RopeConfig, StackConfig
from kvad.config.model import ModelConfig
from kvad.engine import EngineConfig
from kvad.errors import KvadError, UsageError
from kvad.ops.rotary import RotaryCache
from kvad.verify import scenario
from kvad.verify.diagnosis import Subject, diagnose
from kvad.verify.injected_faults import check_fault_name
from kvad.verify.reference_model import reference_model
from kvad.verify.report import FAULTS, UNKNOWN_FAULT, MemoryCase
from tests.support.verify_models import OPTIONS, random_model, run_verify

ENGINE_FAULTS = {  # those that need a cache of their own, or a prefix cache
    "packed": {},
    "prefix": {},
    "salt": {},
    "quantization-scale": {"dtypes": ("int8", "int4")},
    "block-store": {"prefix_cache_ram": 1 << 24},
    "summary": {"policies": ("tiered(8, quantized=8, interval=8, summaries=8, ratio=2)",)},
}
NAMES = [name for name in FAULTS if name not in (UNKNOWN_FAULT, "rank-heads", *ENGINE_FAULTS)]
WINDOWED = LayerConfig(AttentionConfig(4, 2, window=12, logit_softcap=20.0, sink_logits=True), GatedMLPConfig(48))
GATED, PLAIN = GatedMLPConfig(48), PlainMLPConfig(48)
LATENT = cfg.LatentConfig(12, 6, 4, 5, q_lora_rank=9)
PARTIAL = RopeConfig(interleaved=True, partial_rotary_factor=0.5)
STACKS = {
    "rope-gqa": {"L": LayerConfig(AttentionConfig(4, 2), GATED)},
    "rope-interleaved-partial": {"L": LayerConfig(AttentionConfig(4, 4, position=PARTIAL), GATED)},
    "rope-latent": {"L": LayerConfig(AttentionConfig(4, latent=LATENT), GATED)},
    "learned-mha": {"L": LayerConfig(AttentionConfig(4, position=None), PLAIN)},
    "alibi": {"L": LayerConfig(AttentionConfig(4, position=cfg.AlibiConfig()), PLAIN)},
    "t5": {"L": LayerConfig(AttentionConfig(4, position=cfg.T5BiasConfig(), softmax_scale="none"), GATED)},
    "windowed": {"L": LayerConfig(AttentionConfig(4, 2, window=12), GATED)},
    "windowed-and-global": {"L": WINDOWED, "G": LayerConfig(AttentionConfig(4, 2, qk_norm="head"), GATED)},
    "short-conv": {"L": LayerConfig(cfg.ShortConvConfig(3), GATED), "G": LayerConfig(AttentionConfig(4, 2), GATED)},
    "recurrence": {
        "L": LayerConfig(cfg.GatedRecurrenceConfig(32, 4), GATED),
        "G": LayerConfig(AttentionConfig(4, 2), GATED),
    },
    "delta": {
        "L": LayerConfig(cfg.GatedDeltaConfig(2, 4, key_dim=8, value_dim=6), GATED),
        "G": LayerConfig(AttentionConfig(4, 2, output_gate=True), GATED),
    },
    "no-positions": {"L": LayerConfig(AttentionConfig(4, 1, position=None), GATED)},
}
STATES = ("short-conv", "recurrence", "delta")


def build(name):
    kinds = STACKS[name]
    stack = StackConfig(num_layers=3, layer_types=kinds)
    if len(kinds) > 1:
        stack = StackConfig(num_layers=4, layer_types=kinds, layer_pattern="LGLG", norm_position="sandwich")
    embedding = cfg.EmbeddingConfig(cfg.LearnedPositionsConfig(96) if name == "learned-mha" else None)
    return random_model(ModelConfig(hidden_size=32, vocab_size=64, max_seq_len=96, decoder=stack, embedding=embedding))


def is_impossible(fault, name):
    has_no_rope = not name.startswith(("rope", "windowed", *STATES))
    impossible = {"rotation": has_no_rope, "position": name == "no-positions", "state": name not in STATES}
    return impossible.get(fault, False)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layout", ["paged", "contiguous"])
@pytest.mark.parametrize("name", STACKS)
def test_every_fault_gets_its_own_name(name, layout):
    model, names = build(name), {}
    for fault in NAMES:
        try:
            (case,) = run_verify(model, layouts=(layout,), fault=fault).cases
            assert case.verdict == "broken"
            names[fault] = case.finding.fault if case.finding else None
        except UsageError:
            names[fault] = "impossible"
    assert names == {fault: "impossible" if is_impossible(fault, name) else fault for fault in NAMES}


@pytest.mark.parametrize("fault", ENGINE_FAULTS)
def test_fault_of_the_engine_gets_its_own_name(fault):
    for case in run_verify(build("rope-gqa"), layouts=("paged",), fault=fault, **ENGINE_FAULTS[fault]).cases:
        assert case.verdict == "broken" and case.finding.fault == fault, case.finding


@pytest.mark.parametrize(
    ("stack", "fault", "options"),
    [
        ("rope-gqa", "table", {"policies": ("offload(8, interval=4)",)}),
        ("rope-gqa", "dtype", {"policies": ("offload(8, interval=4)",)}),
        ("rope-gqa", "scale", {"policies": ("heavy-hitters(8, interval=4)",)}),
    ],
)
def test_fault_under_a_policy_that_moves_slots_is_named_without_the_policy(stack, fault, options):
    (case,) = run_verify(build(stack), layouts=("paged",), fault=fault, **options).cases
    assert case.verdict == "broken" and case.finding.fault == fault
    assert case.finding.evidence.endswith("without the policy too")


@pytest.mark.parametrize(
    ("stack", "options"),
    [
        ("rope-gqa", {"dtypes": ("bfloat16", "float16", "float32")}),
        ("rope-gqa", {"dtypes": ("float32", "int8"), "rotates": ("read",)}),
        ("rope-gqa", {"dtypes": ("float32",), "layouts": ("paged",), "prefix_cache_ram": 1 << 24}),
        ("rope-latent", {"dtypes": ("bfloat16", "float16")}),
    ],
)
def test_coarse_rounding_is_named_in_every_format(stack, options):
    cases = run_verify(build(stack), fault="dtype", **options).cases
    assert {case.finding and case.finding.fault for case in cases} == {"dtype"}, [case.finding for case in cases]


def test_coarse_rounding_is_named_in_a_half_precision_model():
    (case,) = run_verify(build("rope-gqa").bfloat16(), layouts=("paged",), dtypes=("bfloat16",), fault="dtype").cases
    assert case.finding.fault == "dtype" and "more than bfloat16 loses" in case.finding.evidence


@pytest.mark.parametrize("fault", ["position", "table"])
def test_fault_that_fails_in_a_deterministic_kernel_is_named(fault):
    """The kernel asserts that a sequence has no two keys of one position."""
    config = EngineConfig(deterministic=True)
    report = run_verify(build("rope-gqa").float(), dtypes=("float32",), fault=fault, config=config)
    assert {(case.verdict, case.finding and case.finding.fault) for case in report.cases} == {("broken", fault)}


def test_cases_that_cannot_have_the_fault_are_skipped():
    report = run_verify(build("rope-gqa"), layouts=("paged", "contiguous"), fault="salt")
    assert [case.layout for case in report.cases] == ["paged"]
    assert [(each.memory, each.reason) for each in report.skipped] == [
        ("contiguous float64", "--inject-fault salt: sequences of this cache share no blocks")
    ]


def test_wrong_block_of_the_store_is_named_under_a_window():
    """Block tables of a windowed group, such as that of the convolutions, do not begin at position 0."""
    options = {"layouts": ("paged",), "prefix_cache_ram": 1 << 24}
    (case,) = run_verify(build("short-conv"), fault="block-store", **options).cases
    assert case.verdict == "broken" and case.finding.fault == "block-store", case.finding


def test_skipped_rotation_is_named_in_an_endless_cache():
    """Its angles are exact, and so are those of the injected fault."""
    options = {"policies": ("sinks(4, 12)",), "endless": True, "layouts": ("paged",)}
    (case,) = run_verify(build("rope-gqa"), fault="rotation", **options).cases
    assert case.verdict == "broken" and case.finding.fault == "rotation", case.finding


def test_wrong_salt_changes_no_number():
    """Only the owners of the blocks show it."""
    (case,) = run_verify(build("rope-gqa"), layouts=("paged",), fault="salt").cases
    assert case.max_dlogit <= case.tolerance and "with salt '', not 'other'" in case.finding.evidence


def test_block_store_is_read_and_exact():
    (case,) = run_verify(build("rope-gqa"), layouts=("paged",), prefix_cache_ram=1 << 24).cases
    assert case.verdict == "exact" and case.scenario_counts["loaded"] > 0


@pytest.mark.parametrize("rotate", ["write", "read"])
def test_summaries_of_an_intact_cache_are_those_of_the_policy(rotate):
    options = {**ENGINE_FAULTS["summary"], "dtypes": ("float32", "int8"), "rotates": (rotate,), "layouts": ("paged",)}
    assert {case.verdict for case in run_verify(build("rope-gqa"), **options).cases} == {"lossy by design"}


# ---------------------------------------------------------------- other forms of the same mistakes


class ChangedKVCache(KVCache):
    """A KVCache with changed model input, attention arguments or attention output."""

    change_input = staticmethod(lambda model_input, groups: model_input)
    change_arguments = staticmethod(lambda model_input, q, k, v, params: (q, k, v, params))
    change_output = staticmethod(lambda layer, out: out)

    def open(self, model_input):
        cache, views = self, super().open(self.change_input(model_input, self.groups))

        class View:
            def __init__(self, layer, view):
                self.layer, self.view = layer, view

            def attend(self, q, k, v, params):
                changed = cache.change_arguments(model_input, q, k, v, params)
                return cache.change_output(self.layer, self.view.attend(*changed))

        return [View(layer, view) for layer, view in enumerate(views)]


def arguments(change):
    return {"change_arguments": staticmethod(change)}


def rotated_from_position_8(shift):
    """Rotate q and k as at position p + shift, without changing the cache's positions."""

    def change(model_input, q, k, v, params):
        positions = model_input.positions + shift * (model_input.positions >= 8)
        rotate = partial(RotaryCache(positions).rotate, rotary=params.rotary)
        return rotate(q), rotate(k), v, params._replace(rotary=None)

    return arguments(change)


def rotated_keys(rotate_keys):
    def change(model_input, q, k, v, params):
        rope = RotaryCache(model_input.positions)
        return (
            rope.rotate(q, params.rotary),
            rotate_keys(model_input, rope, k, params.rotary),
            v,
            params._replace(rotary=None),
        )

    return arguments(change)


def write_to_block_1(model_input, groups):
    """Write decoded tokens to block 1, which no sequence reads."""
    decoding = model_input.sub_batches and len(model_input.positions) == sum(
        s.num_seqs for s in model_input.sub_batches
    )
    mappings = tuple(
        mapping._replace(slots=torch.full_like(mapping.slots, group.block_size) if decoding else mapping.slots)
        for mapping, group in zip(model_input.slot_mappings, groups, strict=True)
    )
    return model_input._replace(slot_mappings=mappings)


FORMS = {
    "q and k a position late": ("position", rotated_from_position_8(1)),
    "q and k three positions early": ("position", rotated_from_position_8(-3)),
    "keys rotated backwards": ("rotation", rotated_keys(lambda m, rope, k, r: RotaryCache(-m.positions).rotate(k, r))),
    "keys rotated twice": ("rotation", rotated_keys(lambda m, rope, k, r: rope.rotate(rope.rotate(k, r), r))),
    "keys in other pairs": (
        "rotation",
        rotated_keys(lambda m, rope, k, r: rope.rotate(k, r._replace(interleaved=not r.interleaved))),
    ),
    "no scale": ("scale", arguments(lambda m, q, k, v, p: (q, k, v, p._replace(scale=p.scale * 8**0.5)))),
    "newest key not written": ("cursor", {"change_input": staticmethod(write_to_block_1)}),
    "values rounded": ("dtype", arguments(lambda m, q, k, v, p: (q, k, v.bfloat16().to(v.dtype), p))),
    "noise": (UNKNOWN_FAULT, arguments(lambda m, q, k, v, p: (q, k + 0.1 * k.sin(), v, p))),
}


def diagnose_changed(methods):
    changed = type("Changed", (ChangedKVCache,), methods)
    return diagnose_with(build("rope-gqa"), lambda groups, hook: changed(groups, attention_hook=hook))


@pytest.mark.parametrize("form", FORMS)
def test_other_forms_of_a_fault_get_its_name(form):
    fault, methods = FORMS[form]
    finding = diagnose_changed(methods)
    assert finding is not None and finding.fault == fault, finding
    assert finding.layer == 0 and finding.difference > 0


def test_first_difference_is_located():
    """Only the output of layer 1 is changed, so the first difference is the query of layer 2."""
    finding = diagnose_changed({"change_output": staticmethod(lambda layer, out: out * 1.5 if layer == 1 else out)})
    assert (finding.fault, finding.layer, finding.position, finding.what) == (UNKNOWN_FAULT, 2, 0, "q")


def test_mask_without_its_window():
    def build_cache(groups, hook):
        return KVCache([g._replace(spec=g.spec._replace(window=None)) for g in groups], attention_hook=hook)

    finding = diagnose_with(build("windowed"), build_cache)
    assert finding.fault == "mask" and finding.position >= 12


def test_reused_block_that_is_not_cleared():
    """A stale key of an earlier sequence is visible in an empty slot."""

    def build_cache(groups, hook):
        cache = KVCache(groups, attention_hook=hook)
        cache.apply = lambda ops: KVCache.apply(cache, ops._replace(clear=((),) * len(ops.clear)))
        return cache

    finding = diagnose_with(build("learned-mha"), build_cache)
    assert finding is not None and "no sequence wrote" in finding.evidence


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
def test_float32_stored_as_bfloat16_is_named(layout):
    """The float64 case would not show it: the diagnosis also works in the stored precision."""

    def build_cache(groups, hook):
        assert all(group.key_format == group.value_format == "float32" for group in groups)
        narrow = [group._replace(key_format="bfloat16", value_format="bfloat16") for group in groups]
        return KVCache(narrow, attention_hook=hook)

    finding = diagnose_with(build("rope-gqa"), build_cache, layout=layout, dtype="float32")
    assert finding.fault == "dtype" and "bfloat16" in finding.evidence


def diagnose_with(model, build_cache, layout="paged", dtype="float64", options=OPTIONS):
    model, squeezes = model.double() if dtype == "float64" else model, scenario.num_preemptions(options)
    references = reference_model(model, torch.float64), reference_model(model)
    streams = scenario.build_streams(model, scenario.build_prompts(model.config, options, None), options)
    cache = scenario.case_cache_config(model.config, streams, options, MemoryCase(layout, dtype))
    config = EngineConfig(cache_factory=lambda groups, **parts: build_cache(groups, parts["attention_hook"]))
    return diagnose(Subject(model, *references, config), cache, streams, squeezes=squeezes)


# ---------------------------------------------------------------- no false alarm

SCALED = RopeConfig(scaling=cfg.DynamicScalingConfig(2.0, 16))
POSITIONS = [RopeConfig(), PARTIAL, SCALED, cfg.AlibiConfig(), cfg.T5BiasConfig(8, 16), None]
ABSOLUTE = [None, cfg.LearnedPositionsConfig(64), cfg.SinusoidalPositionsConfig()]
NORM_POSITIONS = ["pre", "post", "sandwich", "after", "normed", "parallel", "parallel_pair"]
LAYERS = st.builds(
    LayerConfig,
    attention=st.builds(
        AttentionConfig,
        num_heads=st.just(4),
        num_kv_heads=st.sampled_from([1, 2, 4]),
        value_dim=st.sampled_from([None, 6]),
        position=st.sampled_from(POSITIONS),
        window=st.sampled_from([None, 1, 5, 12]),
        qk_norm=st.sampled_from(["none", "head", "full"]),
        logit_softcap=st.sampled_from([None, 10.0]),
        sink_logits=st.booleans(),
        softmax_scale=st.sampled_from(["default", "none", 0.2]),
    ),
    mlp=st.just(GatedMLPConfig(40)),
    norm=st.sampled_from([cfg.NormConfig(), cfg.NormConfig("layer", bias=True)]),
)
STACK = st.builds(
    StackConfig,
    num_layers=st.just(3),
    layer_types=st.fixed_dictionaries({"L": LAYERS, "G": LAYERS}),
    layer_pattern=st.sampled_from(["LLLG", "LG", "LLG"]),
    norm_position=st.sampled_from(NORM_POSITIONS),
)
CONFIGS = st.builds(
    partial(ModelConfig, hidden_size=32, vocab_size=48, max_seq_len=64),
    decoder=STACK,
    embedding=st.builds(cfg.EmbeddingConfig, position=st.sampled_from(ABSOLUTE)),
)
random_cases = given(CONFIGS, st.sampled_from(["paged", "contiguous"]), st.sampled_from([3, 4, 8]), st.integers(0, 99))


@settings(max_examples=15)
@random_cases
def test_intact_cache_has_no_finding(config, layout, block_size, seed):
    model, options = random_model(config, seed), {"block_size": block_size, "layouts": (layout,), "tokens": 6}
    intact = lambda groups, hook: KVCache(groups, attention_hook=hook)  # noqa: E731
    assert diagnose_with(model, intact, layout=layout, options=dataclasses.replace(OPTIONS, **options)) is None
    assert run_verify(model, **options).verdict() == f"exact ({layout} float64)"


def test_sequence_that_is_recomputed_with_other_frequencies_has_no_finding():
    """Its steps before it exceeds the original length have other queries than the whole sequence."""
    decoder = StackConfig(num_layers=2, layer_types={"L": LayerConfig(AttentionConfig(4, 2, position=SCALED), GATED)})
    model = random_model(ModelConfig(hidden_size=32, vocab_size=64, max_seq_len=96, decoder=decoder))
    assert diagnose_with(model, lambda groups, hook: KVCache(groups, attention_hook=hook)) is None


@pytest.mark.long(minutes=2)
@settings(max_examples=60)
@random_cases
def test_faults_of_random_models_get_their_names(config, layout, block_size, seed):
    model = random_model(config, seed)
    for fault in NAMES:
        try:
            (case,) = run_verify(model, block_size=block_size, layouts=(layout,), tokens=6, fault=fault).cases
        except KvadError:  # impossible here, or without effect (a window of 1 sees no second key)
            continue
        assert case.finding is not None and case.finding.fault == fault, case.finding


# ---------------------------------------------------------------- impossible faults

CACHE = CacheConfig(max_num_seqs=2, max_seq_len=32, prefill_chunk_size=8, block_size=4)


@pytest.mark.parametrize(
    ("fault", "name", "chunk", "message"),
    [
        ("rotation", "alibi", 8, "rotates"),
        ("position", "no-positions", 8, "no positions"),
        ("mask", "rope-gqa", 1, "--prefill-chunk-size 1"),
        ("mesk", "rope-gqa", 8, "did you mean 'mask'"),
        ("quantization-scale", "rope-gqa", 8, "float32 has no scales"),
        ("block-store", "rope-gqa", 8, "no block store"),
        ("summary", "rope-gqa", 8, "no summaries"),
    ],
)
def test_impossible_faults_are_refused(fault, name, chunk, message):
    with pytest.raises(UsageError, match=message):
        check_fault_name(fault, build(name).config, dataclasses.replace(CACHE, prefill_chunk_size=chunk))


def test_layer_fault_needs_layers_that_share_a_group():
    kinds = {"L": WINDOWED, "G": LayerConfig(AttentionConfig(4, 2), GATED)}
    decoder = StackConfig(num_layers=2, layer_types=kinds, layer_pattern="LG")
    config = ModelConfig(hidden_size=32, vocab_size=64, max_seq_len=96, decoder=decoder)
    with pytest.raises(KvadError, match="share a cache group"):
        check_fault_name("layer", config, CACHE)
