"""Cache variants: a sequence never occupies more slots than its budget; names of policies and formats."""

import random

import pytest
import torch

from kvad import register
from kvad.benchmarks.variants import build_engine, known_variants, select_variants, seq_bytes, summarizing_policy
from kvad.cache.config import CacheConfig
from kvad.cache.device.kv_cache import KVCache
from kvad.cache.groups import build_groups
from kvad.cache.policy import Window
from kvad.cache.policy_parser import POLICIES as NAMED
from kvad.cache.policy_parser import parse_policy
from kvad.config.model import attention_specs
from kvad.engine.engine import Engine
from kvad.engine.scheduling.request import SamplingParams
from kvad.errors import UsageError
from kvad.llm import LLM
from kvad.model.summarizer import Summarizer
from kvad.planning import cache_presets
from kvad.planning.cache_presets import POLICY_BUILDERS, RATIOS, TIERED_POLICIES, PolicySize, policy_for_ratio
from kvad.verify.scenario import SIZED
from tests.support.random_models import VOCAB, build, model_config


def test_summarizing_policy_by_hand():
    made = summarizing_policy(1024, 256, 8)
    assert made == {"policy": "tiered(136, quantized=0, interval=8, summaries=112, ratio=8)", "block_size": 8}


@pytest.mark.parametrize("budget", [24, 48, 60])
def test_summaries_stay_within_the_budget(budget):
    model = build(model_config(), dtype=torch.float32)
    fields = {"max_num_seqs": 1, "max_seq_len": 96, "prefill_chunk_size": 8, "enable_prefix_caching": False}
    cache = CacheConfig(**fields, **summarizing_policy(96, budget, 4))
    assert 0.6 * budget <= max_used_slots(Engine(model, cache)) <= budget


def max_used_slots(engine):
    """Return the largest number of slots that a sequence of 96 tokens used."""
    draw, most = random.Random(0), 0
    engine.add_request([draw.randrange(VOCAB) for _ in range(95)], SamplingParams(max_tokens=1))
    while not engine.idle:
        engine.step()
        held = [
            int((positions >= 0).sum(-1)[[n for n, count in enumerate(pool.refs) if count > 0]].sum())
            for positions, pool in zip(engine.kv_cache.positions, engine.kv_cache_manager.pools, strict=True)
        ]
        most = max(most, sum(held))
    return most


@pytest.fixture(scope="module")
def llm():
    return LLM(build(model_config(), dtype=torch.float32), None, CacheConfig(max_num_seqs=1, max_seq_len=96))


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("name", [*TIERED_POLICIES, "tiered+int8"])
def test_tiered_variants_stay_within_the_budget(llm, name, ratio):
    (variant,) = select_variants([name], [ratio])[1:]
    budget = variant.budget(96)
    assert 0.6 * budget <= max_used_slots(build_engine(llm, variant, 96, rows=1, capacity=96, chunk=16)) <= budget


# ---------------------------------------------------------------- by name


def test_every_policy_has_a_size():
    assert set(POLICY_BUILDERS) == set(NAMED) - {"full", "offload"} and set(SIZED) == set(
        NAMED
    )  # neither loses anything
    assert {name for name in POLICY_BUILDERS if SIZED[name] is not POLICY_BUILDERS[name]} == {"tiered"}
    assert {*POLICY_BUILDERS, *TIERED_POLICIES} <= set(known_variants())


def test_sizes_by_hand():
    size = PolicySize(512, 256, interval=16, block=8)
    assert TIERED_POLICIES["packed"](size) == "tiered(56, quantized=192, interval=8)"
    assert TIERED_POLICIES["tiered"](size) == "tiered(48, quantized=160, interval=8, summaries=40, ratio=8)"
    assert (policy_for_ratio("quest", 0.75, 112, 16), policy_for_ratio("quest", 0.875, 112, 16)) == (
        "quest(16)",
        "quest(16)",
    )
    assert policy_for_ratio("block-window", 0.5, 100, 16) == "block-window(50)"
    assert policy_for_ratio("block-window", 0.875, 64, 16) == "block-window(8, block_size=8)"
    assert [cache_presets.hierarchy_block_size(budget) for budget in (32, 31, 16, 15, 2)] == [8, 4, 4, 2, 2]


# ---------------------------------------------------------------- a policy and a format


def made(name, ratio=0.5, length=96):
    (variant,) = select_variants([name], [ratio])[1:]
    return variant, CacheConfig(max_seq_len=length, **variant.fields(length, 16))


def test_policy_and_format_in_one_name(llm):
    variant, cache = made("snapkv+int8")
    assert (variant.name, variant.ratio, variant.label) == ("snapkv+int8", 0.5, "snapkv+int8 0.5")
    assert cache.token_formats == ("int8", "int8") and cache.policy == made("snapkv")[1].policy
    assert made("sinks+int8/int4")[1].token_formats == ("int8", "int4") == made("sinks+int8/int4")[1].token_formats
    assert select_variants(["int8/int4"])[1].fields(96, 16) == {"key_dtype": "int8", "value_dtype": "int4"}
    own = "last"
    register(own, Window)
    assert made(f"{own}+bfloat16")[1].policy == f"{own}(48)" and made(f"{own}+bfloat16")[1].dtype == "bfloat16"
    assert len(select_variants(["snapkv+int8", "snapkv+int4", "snapkv"], (0.5, 0.75))) == 7
    engine = build_engine(llm, variant, 96, rows=1, capacity=96, chunk=16)
    assert {group.key_format for group in engine.kv_cache.groups} == {"int8"}


@pytest.mark.parametrize(
    ("stored", "packed"), [("int4", "int4"), ("int8", "int8"), ("bfloat16", "int8"), ("int8/int4", "int8")]
)
def test_quantized_level_is_no_wider_than_the_stored_format(stored, packed):
    levels = parse_policy(made(f"tiered+{stored}")[1].policy).stateful
    assert levels.key_format == packed and levels.value_format == ("int4" if stored.endswith("int4") else "int8")
    plain = parse_policy(made("tiered")[1].policy).stateful
    assert (levels.recent, levels.quantized, levels.summaries) == (plain.recent, plain.quantized, plain.summaries)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("full+int8", "full is no policy"),
        ("int8+int4", "int8 is no policy"),
        ("snapkv+int9", "'int9'"),
        ("snapkv+", "unknown cache snapkv+: ''"),
        ("snapkv+int8-channel", "'int8-channel'"),
        ("snapvk+int8", "unknown cache 'snapvk'"),
        ("learned+int8", "unknown cache 'learned'"),
    ],
)
def test_impossible_combinations_are_refused(name, message):
    with pytest.raises(UsageError) as caught:
        select_variants([name])
    assert message in str(caught.value)


def test_bytes_per_sequence_equal_the_allocation(llm):
    taken = {name: seq_bytes(llm, made(name)[0], 96, chunk=16) for name in ("window", "quest", "window+int8")}
    taken["full"] = seq_bytes(llm, select_variants([])[0], 96, chunk=16)
    assert taken["window+int8"] < taken["window"] < taken["full"] < taken["quest"], "quest keeps all, and bounds"
    memory = KVCache(build_groups(attention_specs(llm.model.config), CacheConfig(max_seq_len=96, max_num_seqs=1)))
    held = memory.payload_bytes() + memory.scale_bytes() + memory.metadata_bytes()
    usable = [(group.num_usable_blocks, group.num_blocks) for group in memory.groups]
    assert len(usable) == 1 and taken["full"] == held * usable[0][0] // usable[0][1]


def test_learned_variant_needs_a_summarizer():
    compressor = Summarizer(attention_specs(model_config()), 4)
    names = [
        (variant.name, variant.compressor) for variant in select_variants(["summaries", "learned"], [0.5], compressor)
    ]
    assert names == [("full", None), ("summaries", None), ("learned", compressor)]
    with pytest.raises(UsageError, match="unknown cache 'learned'"):
        select_variants(["learned"])
