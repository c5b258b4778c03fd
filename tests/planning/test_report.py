"""kvad plan: predicted bytes equal allocated bytes, bounds hold, and impossible plans are refused."""

import itertools
import json
import math
import re
import subprocess
import sys
import weakref
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvad.cache.config import CacheConfig
from kvad.cache.device.kv_cache import KVCache
from kvad.cache.offload import token_offload
from kvad.cache.sizing import activations, measure_bandwidth, memory_plan, scratch
from kvad.cache.sizing.fits import available_bytes, find_fits, require_memory, total_bytes_with
from kvad.cache.sizing.memory_plan import decode_step_bytes, plan_memory
from kvad.checkpoint.hf_layout import HFCheckpoint
from kvad.checkpoint.summarizer import save_summarizer
from kvad.cli.commands.plan import plan_command as command
from kvad.cli.main import main
from kvad.config import parameter_shapes as shapes
from kvad.config.layers import (
    AlibiConfig,
    AttentionConfig,
    ClassificationHeadConfig,
    GatedDeltaConfig,
    GatedMLPConfig,
    GatedRecurrenceConfig,
    LanguageHeadConfig,
    LatentConfig,
    LayerConfig,
    MoEConfig,
    PlainMLPConfig,
    PoolingHeadConfig,
    ShortConvConfig,
    StackConfig,
    T5BiasConfig,
)
from kvad.config.model import ModelConfig, attention_specs
from kvad.engine import Engine, EngineConfig
from kvad.engine.scheduling.request import SamplingParams
from kvad.errors import ConfigError, MemoryPlanError
from kvad.model.summarizer import Summarizer
from kvad.model.transformer import Transformer
from kvad.ops import attention, batch_invariant
from kvad.ops.quantized_linear import quantize_matrix
from kvad.planning.known_models import KNOWN_MODELS, known_model
from tests.support.lab_models import (
    CONFIGS,
    ENCODERS,
    EVERY,
    PAIRS,
    encoder,
    pair,
    tiny,
    write_checkpoint,
    write_foreign,
)

ROOT = Path(__file__).parents[2]
GIB = 2**30


def cache(**options):
    return CacheConfig(**{"max_num_seqs": 3, "max_seq_len": 40, "prefill_chunk_size": 8, "block_size": 4, **options})


# ---------------------------------------------------------------- exact bytes


@pytest.mark.parametrize("dtype", shapes.DTYPE_BYTES)
def test_weight_bytes_equal_the_plan(dtype):
    for config in EVERY.values():
        with torch.device("meta"):
            state = Transformer(config).to(getattr(torch, dtype)).state_dict()
        plan = plan_memory(config, cache(max_source_len=20), weights_dtype=dtype)
        assert plan.weights == sum(tensor.nbytes for tensor in state.values())


def test_every_tensor_belongs_to_a_component(config):
    sizes, head = shapes.component_sizes(shapes.weight_shapes(config)), config.head
    assert tuple(sizes) == shapes.COMPONENTS and sum(sizes.values()) == shapes.num_parameters(config)
    assert sizes["attention"] and sizes["mlp"] and sizes["embedding"]
    has_head = head.transform is not None or isinstance(head, ClassificationHeadConfig)
    has_matrix_or_bias = isinstance(head, LanguageHeadConfig) and (not config.tie_embeddings or head.bias)
    assert bool(sizes["head"]) == (has_head or has_matrix_or_bias)


def test_components_of_tensor_names():
    names = {
        "embedding.tokens.weight": "embedding",
        "embedding.norm.bias": "norms",
        "decoder.layers.10.attention.q_norm.weight": "norms",
        "decoder.layers.0.norm1_after.weight": "norms",
        "decoder.norm.weight": "norms",
        "decoder.relative_bias.L": "attention",
        "decoder.layers.0.attention.sink_logits": "attention",
        "decoder.layers.0.mlp.down.bias": "mlp",
        "head.weight": "head",
    }
    assert {name: shapes.tensor_component(name) for name in names} == names


LAYOUTS = ("paged", "contiguous")
SIZES = (
    {"max_num_seqs": 1, "max_source_len": 1},
    {"max_seq_len": 37, "max_source_len": 48},
    {"prefill_chunk_size": 64, "max_source_len": 7},
    {"block_size": 16, "max_source_len": 17},
)
DTYPES = (*shapes.DTYPE_BYTES, "int8", "fp8-e5m2")
CACHES = [
    *(cache(layout=layout, dtype=dtype, max_source_len=33) for layout, dtype in itertools.product(LAYOUTS, DTYPES)),
    *(cache(layout=layout, **sizes) for layout, sizes in itertools.product(LAYOUTS, SIZES)),
]


@pytest.mark.parametrize(
    "options", CACHES, ids=lambda c: f"{c.layout}-{c.dtype}-{c.max_num_seqs}x{c.max_seq_len}-{c.prefill_chunk_size}"
)
@pytest.mark.parametrize("name", ["plain", "dims", "window", "pattern", *PAIRS])
def test_pool_bytes_equal_the_plan(name, options):
    plan = plan_memory(EVERY[name], options)
    assert_pool_equals(plan)
    if EVERY[name].encoder_input is not None:
        crossing = [each for each in plan.groups if each.group.spec.is_cross_attention]
        assert sum(len(each.group.layers) for each in crossing) == EVERY[name].decoder.num_layers
        for each in crossing:
            num_slots = each.group.max_blocks_per_seq * each.group.block_size
            assert 0 <= num_slots - options.max_source_len < each.group.block_size


def assert_pool_equals(plan):
    """Compare the planned bytes with the arrays of a KVCache: each group's, in total and per sequence."""
    kv_cache = KVCache([each.group for each in plan.groups])
    for each, measured in zip(plan.groups, bytes_by_group(kv_cache), strict=True):
        assert (each.bytes.payload, each.bytes.scales, each.bytes.metadata) == measured
        if plan.cache.num_blocks is None:
            per_sequence = (each.seq_payload, each.seq_scales, each.seq_metadata)
            total = tuple(plan.cache.max_num_seqs * size for size in per_sequence)
            assert (each.payload, each.scales, each.metadata) == total
    assert plan.pool == kv_cache.payload_bytes() + kv_cache.scale_bytes() + kv_cache.metadata_bytes()


def bytes_by_group(kv_cache):
    """Measure what each group's arrays hold: payload, scales, metadata."""
    arrays = zip(kv_cache.groups, kv_cache.stores, kv_cache.weights, kv_cache.positions, strict=True)
    for group, stores, weights, positions in arrays:
        payload = sum(store.data.nbytes for pair in stores.values() for store in pair)
        stored = sum(store.nbytes for pair in stores.values() for store in pair)
        metadata = positions.nbytes + sum(weight.nbytes for weight in weights.values())
        if group.lower_level is None:
            by_layer = (kv_cache.head_metadata, kv_cache.block_bounds)
            metadata += sum(each[layer].nbytes for each in by_layer for layer in group.layers if layer in each)
        yield payload, stored - payload, metadata


def test_smaller_pool_is_planned():
    plan = plan_memory(CONFIGS["plain"], cache(num_blocks=5))
    assert_pool_equals(plan)
    assert plan.payload == 5 * 4 * plan.groups[0].bytes.per_token_payload


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_have_no_pool(name):
    plan = plan_memory(ENCODERS[name], cache())
    assert plan.groups == () and plan.pool == 0 and plan.total == plan.weights + plan.scratch + plan.activations


@pytest.mark.parametrize(("dtype", "payload"), [("float32", 3_221_225_472), ("bfloat16", 1_610_612_736)])
def test_example_of_the_notes(dtype, payload, capsys):
    """Document 004, 4.17: 24 layers, 32 heads of 64, 8,192 tokens in float32 are "about 4 GB": 3,221,225,472 bytes."""
    plan = plan_memory(known_model("notes-example"), CacheConfig(max_num_seqs=1, max_seq_len=8192, dtype=dtype))
    assert plan.payload == payload == plan.groups[0].seq_payload == 2 * 24 * 32 * 64 * 8192 * shapes.DTYPE_BYTES[dtype]
    assert plan.metadata == 8 * 8192
    assert plan.reserved == 2 * 16 * (payload // 8192 + 8)
    options = f"notes-example --max-seq-len 8192 --max-num-seqs 1 --cache-dtype {dtype} --bandwidth 10"
    assert main(["plan", *options.split()]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("cache payload"))
    assert f" {payload:,} " in line and dtype in line


POLICIES = {  # tests/cache/sizing has the others
    "full": {},
    "sinks": {"policy": "sinks(3, 9)"},
    "packed, few": {"policy": "tiered(8, quantized=8, key_format=int4, value_format=float16, interval=8, num_sinks=4)"},
    "summaries alone": {"policy": "tiered(8, quantized=0, summaries=400, ratio=4, interval=4, num_sinks=4)"},
    "of layers": {"policy": "0: tova(8, interval=4); sinks(2, 6)"},
    "both": {"policy": "window(16) + block-window(8)"},
    "channels": {"key_dtype": "int8-channel", "value_dtype": "int4", "residual_length": 8, "max_seq_len": 120},
    "endless": {"overflow": "sinks"},
    "unrotated": {"policy": "sinks(3, 9)", "rope_at": "read"},
    "overflow": {"overflow": "summarize"},
}
UNPAGED = ("sinks", "of layers", "both", "endless")
POLICY_LAYOUTS = [*((name, "paged") for name in POLICIES), *((name, "contiguous") for name in UNPAGED)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(("name", "layout"), POLICY_LAYOUTS)
@pytest.mark.parametrize("model", ["plain", "pattern", "dims", "pair"])
def test_pool_bytes_of_every_policy_equal_the_plan(model, name, layout, dtype):
    if (name, model) in (("packed, few", "dims"), ("channels", "dims")):
        pytest.skip("its values have an odd width, and int4 packs pairs")
    options = cache(layout=layout, dtype=dtype, max_source_len=21, **{"block_size": 4, **POLICIES[name]})
    plan = plan_memory(EVERY[model], options)
    assert_pool_equals(plan)
    own = [each for each in plan.groups if not each.group.spec.is_cross_attention]
    assert plan.swapped_seq_bytes in (0, sum(each.seq_payload + each.seq_scales + each.seq_metadata for each in own))


@pytest.mark.parametrize(
    "policy", ["sinks(4, 60)", "window(64)", "block-window(64)", "heavy-hitters(64)", "snapkv(64)"]
)
@pytest.mark.parametrize("layout", ["paged", "contiguous"])
def test_bounded_policies_do_not_grow_with_the_context(layout, policy):
    config = replace(CONFIGS["plain"], max_seq_len=100_000)

    def pool(length, **policy):
        options = CacheConfig(layout=layout, max_seq_len=length, prefill_chunk_size=32, **policy)
        return plan_memory(config, options).pool

    assert pool(1024, policy=policy) == pool(65536, policy=policy) < pool(1024) / 2


# ---------------------------------------------------------------- bounds of temporary memory


def test_budgets_and_tiles_equal_those_of_the_kernels():
    assert (scratch.MASK_BUDGET, scratch.SCORE_BUDGET) == (attention.MASK_BUDGET, attention.SCORE_BUDGET)
    assert scratch.TILES == batch_invariant.SIZES
    assert (scratch.KEYS, scratch.NARROW) == (batch_invariant.KEYS, batch_invariant.NARROW)


class Peak(TorchDispatchMode):
    """Records the largest number of bytes alive at once inside the block."""

    def __init__(self):
        super().__init__()
        self.live, self.now, self.peak = {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                store = tensor.untyped_storage()
                key = store._cdata
                if key not in self.live and key not in given:
                    self.live[key] = store.nbytes()
                    self.now += self.live[key]
                    weakref.finalize(store, self._drop, key)
        self.peak = max(self.peak, self.now)
        return out

    def _drop(self, key):
        self.now -= self.live.pop(key)


def medium_config(mixer, mlp=None, vocab=500):
    stack = StackConfig(1, {"L": LayerConfig(mixer, mlp or GatedMLPConfig(192))})
    return ModelConfig(64, vocab, 2048, stack)


def medium_encoder_decoder(mixer, mlp=None, *, source_width=None, shared=True):
    sizes = {"width": 64, "limit": 2048, "layers": 1 if shared else 5, "source_vocab": 300}
    config = pair(mixer, mlp or PlainMLPConfig(192), source_width=source_width, **sizes)
    return replace(config, encoder_input=replace(config.encoder_input, max_seq_len=1024), vocab_size=500)


def medium_encoder(mixer, mlp=None, vocab=500, **rest):
    return encoder(mixer, mlp=mlp or PlainMLPConfig(192), width=64, limit=2048, vocab=vocab, **rest)


def bounded(config=None, dtype="float32", *, cache_dtype="float32", **changes):
    """Return a case: a model (by default with grouped heads), its cache, and the dtype of its weights."""
    sizes = {"max_num_seqs": 2, "max_seq_len": 256, "prefill_chunk_size": 128, "max_source_len": 200}
    options = {**sizes, "dtype": cache_dtype, "enable_prefix_caching": False, **changes}
    return config or medium_config(GQA), CacheConfig(**options), dtype


GQA = AttentionConfig(8, 4)
LATENT = AttentionConfig(8, latent=LatentConfig(48, 8, 4, 8, q_lora_rank=32))
T5 = AttentionConfig(8, 4, head_dim=8, position=T5BiasConfig())
UMT5 = replace(T5, position=T5BiasConfig(shared=False))
ALIBI = AttentionConfig(8, 4, position=AlibiConfig())
IN_PLACE = {"layout": "contiguous", "max_num_seqs": 1}
pytestmark = pytest.mark.usefixtures("much_memory")
LONG_SOURCE = {"max_seq_len": 8, "max_source_len": 900}
HITTERS = {"policy": "heavy-hitters(96, interval=32)"}
CAPPED_EXPERT = MoEConfig(512, 1, 1, swiglu_alpha=1.7, swiglu_limit=7.0)
SHARED_EXPERT = MoEConfig(
    64, 8, 2, router="sigmoid", selection_bias=True, num_groups=4, num_groups_per_token=2, shared_size=2048
)
CAPPED_HEAD = LanguageHeadConfig(logit_softcap=9.0, logit_scale=2.0)
BOUNDED = {
    "paged": bounded(),
    "contiguous": bounded(layout="contiguous"),
    "one row in place": bounded(**IN_PLACE),
    "int8": bounded(cache_dtype="int8"),
    "int4, half": bounded(dtype="bfloat16", cache_dtype="int4"),
    "fp8, half": bounded(dtype="bfloat16", cache_dtype="fp8-e4m3"),
    "int8 and int4 in place": bounded(**IN_PLACE, key_dtype="int8", value_dtype="int4"),
    "widened": bounded(cache_dtype="bfloat16"),
    "half": bounded(dtype="bfloat16", cache_dtype="bfloat16"),
    "latent": bounded(medium_config(LATENT)),
    "latent in place": bounded(medium_config(LATENT), **IN_PLACE),
    "latent, int4": bounded(medium_config(LATENT), cache_dtype="int4"),
    "window": bounded(medium_config(AttentionConfig(8, 4, window=64))),
    "short convolution": bounded(medium_config(ShortConvConfig(3), PlainMLPConfig(8))),
    "short convolution, half": bounded(medium_config(ShortConvConfig(3), PlainMLPConfig(8)), "bfloat16"),
    "recurrence": bounded(medium_config(GatedRecurrenceConfig(96, 4), PlainMLPConfig(8))),
    "recurrence, half": bounded(medium_config(GatedRecurrenceConfig(96, 4), PlainMLPConfig(8)), "bfloat16"),
    "delta": bounded(medium_config(GatedDeltaConfig(4, 8, 16, 16), PlainMLPConfig(8))),
    "delta, half": bounded(medium_config(GatedDeltaConfig(4, 8, 32, 32), PlainMLPConfig(8)), "bfloat16"),
    "gated heads": bounded(medium_config(AttentionConfig(8, output_gate=True), PlainMLPConfig(8)), max_seq_len=64),
    "wide mlp": bounded(medium_config(AttentionConfig(8), PlainMLPConfig(1024)), max_seq_len=64),
    "wide gated mlp": bounded(medium_config(AttentionConfig(8), GatedMLPConfig(1024)), max_seq_len=64),
    "wide relu2 mlp": bounded(medium_config(AttentionConfig(8), PlainMLPConfig(1024, "relu2")), max_seq_len=64),
    "experts": bounded(medium_config(AttentionConfig(8), MoEConfig(512, 4, 2)), max_seq_len=64),
    "one expert": bounded(medium_config(AttentionConfig(8), MoEConfig(512, 1, 1)), max_seq_len=64),
    "shared expert": bounded(medium_config(AttentionConfig(8), SHARED_EXPERT), max_seq_len=64),
    "capped experts": bounded(medium_config(AttentionConfig(8), CAPPED_EXPERT), max_seq_len=64),
    "large vocabulary": bounded(medium_config(AttentionConfig(8), vocab=20000), max_seq_len=64, max_num_seqs=16),
    "softcap": bounded(medium_config(replace(GQA, logit_softcap=30.0))),
    "softcap half": bounded(medium_config(replace(GQA, logit_softcap=30.0)), "bfloat16", cache_dtype="bfloat16"),
    "values of another width": bounded(medium_config(replace(GQA, value_dim=24))),
    "alibi": bounded(medium_config(ALIBI)),
    "t5": bounded(medium_config(T5)),
    "t5, one head": bounded(medium_config(AttentionConfig(1, head_dim=8, position=T5BiasConfig()))),
    "sinks": bounded(policy="sinks(4, 60)"),
    "endless": bounded(policy="sinks(4, 60)", endless=True),
    "read": bounded(rope_at="read"),
    "read, half": bounded(rope_at="read", cache_dtype="bfloat16", dtype="bfloat16"),
    "read, in place": bounded(rope_at="read", **IN_PLACE),
    "read, endless": bounded(policy="sinks(4, 60)", endless=True, rope_at="read"),
    "hitters": bounded(**HITTERS),
    "hitters, half": bounded(**HITTERS, cache_dtype="bfloat16", dtype="bfloat16"),
    "snapkv, read": bounded(policy="snapkv(96, interval=32)", rope_at="read", prefill_chunk_size=32),
    "hitters, t5": bounded(medium_config(T5), **HITTERS),
    "key-norm, alibi": bounded(medium_config(ALIBI), policy="key-norm(96, interval=32)"),
    "key-norm, int8, in place": bounded(policy="key-norm(96, interval=32)", cache_dtype="int8", **IN_PLACE),
    "key-norm, short chunks": bounded(
        policy="key-norm(96, interval=4)", prefill_chunk_size=4, max_seq_len=144, **IN_PLACE
    ),
    "packed": bounded(policy="tiered(32, interval=32)"),
    "packed, half": bounded(
        dtype="bfloat16", cache_dtype="bfloat16", policy="tiered(32, interval=32, key_format=int4)"
    ),
    "summaries": bounded(policy="tiered(32, quantized=64, summaries=32, interval=32)"),
    "summaries, t5, read": bounded(
        medium_config(T5), policy="tiered(32, quantized=0, summaries=64, interval=32)", rope_at="read"
    ),
    "long summaries": bounded(policy="tiered(16, quantized=0, summaries=64, interval=128)", prefill_chunk_size=16),
    "channels": bounded(key_dtype="int4-channel", residual_length=32),
    "offload": bounded(policy="offload(32, interval=32)"),
    "offload, int8, read": bounded(
        policy="offload(32, interval=32)", dtype="bfloat16", cache_dtype="int8", rope_at="read", offload_ram=4000
    ),
    "offload, t5": bounded(medium_config(T5), policy="offload(64, interval=64)"),
    "quest": bounded(policy="quest(64)"),
    "quest, small blocks": bounded(policy="quest(64)", block_size=2),
    "quest, int8": bounded(policy="quest(64)", cache_dtype="int8", dtype="bfloat16"),
    "pair": bounded(medium_encoder_decoder(GQA)),
    "pair, hitters": bounded(medium_encoder_decoder(GQA), **HITTERS),
    "pair, short targets": bounded(medium_encoder_decoder(GQA), max_seq_len=8),
    "pair, long sources": bounded(medium_encoder_decoder(GQA), **LONG_SOURCE),
    "pair, int4, long sources": bounded(medium_encoder_decoder(GQA), "bfloat16", **LONG_SOURCE, cache_dtype="int4"),
    "pair t5": bounded(medium_encoder_decoder(T5), max_seq_len=8),
    "pair t5 half": bounded(medium_encoder_decoder(T5), "bfloat16", max_seq_len=8, cache_dtype="bfloat16"),
    "pair t5, long sources": bounded(medium_encoder_decoder(T5), **LONG_SOURCE),
    "pair umt5": bounded(medium_encoder_decoder(UMT5, shared=False), max_seq_len=16, max_source_len=256),
    "pair, wide encoder": bounded(medium_encoder_decoder(replace(GQA, head_dim=8), source_width=200), max_seq_len=8),
    "pair, contiguous": bounded(medium_encoder_decoder(GQA), layout="contiguous", max_seq_len=8),
    "encoder": bounded(medium_encoder(GQA)),
    "encoder half": bounded(medium_encoder(GQA), "bfloat16", cache_dtype="bfloat16"),
    "encoder, long": bounded(medium_encoder(GQA), max_seq_len=1500),
    "encoder t5": bounded(medium_encoder(T5)),
    "encoder, large vocabulary": bounded(
        medium_encoder(AttentionConfig(8), vocab=9000), max_seq_len=64, max_num_seqs=8
    ),
    "encoder, capped": bounded(
        medium_encoder(AttentionConfig(8), vocab=9000, head=CAPPED_HEAD), max_seq_len=64, max_num_seqs=8
    ),
    "encoder, pooled": bounded(medium_encoder(AttentionConfig(8, window=9), head=PoolingHeadConfig("first"))),
}


def fill(engine, config, options):
    """Run every sequence at its maximum length, with every source."""
    for row in range(options.max_num_seqs):
        if config.kind == "encoder":
            engine.add_encoder_request([(7 * row + i) % 97 for i in range(options.max_seq_len)])
            continue
        source = None if config.encoder_input is None else [(5 * row + i) % 97 for i in range(options.max_source_len)]
        prompt = [(7 * row + i) % 97 for i in range(options.max_seq_len - 4)]
        engine.add_request(prompt, SamplingParams(max_tokens=2, temperature=0.0), encoder_token_ids=source)


def measured_step(
    config,
    options,
    dtype="float32",
    *,
    budget=1024,
    ratio=9,
    summarizer=None,
    deterministic=False,
    native=False,
    bits=0,
):
    """Run an engine, compare its peak with the plan's scratch and activations; return the plan and the peak.

    ``bits``: of the weights of experts; 0: as they are.
    """
    choices = {"summarizer": summarizer, "deterministic": deterministic, "native": native}
    settings = EngineConfig(max_num_batched_tokens=budget, **choices)
    model = Transformer(config).to(getattr(torch, dtype))
    for part in ("gate", "up", "down") if bits else ():
        name = f"decoder.layers.0.mlp.{part}"
        model.use_quantized({name: quantize_matrix(model.get_parameter(name).detach().flatten(0, 1), bits, 32)})
    engine = Engine(model, options, settings)
    fill(engine, config, options)
    with Peak() as measured:
        while not engine.idle:
            engine.step()
    plan = plan_memory(
        config,
        options,
        weights_dtype=dtype,
        max_num_batched_tokens=budget,
        summarizer_shape=summarizer and shapes.SummarizerShape(8, summarizer.hidden),
        deterministic=deterministic,
    )
    bound = plan.scratch + plan.activations
    if native:
        program = engine.runner.program
        peak = 0 if program is None else program.peak_bytes
        assert max(measured.peak, peak) <= bound + NATIVE_BYTES, (measured.peak, peak, bound)
        return plan, peak
    assert measured.peak <= bound <= ratio * measured.peak, (measured.peak, bound)
    return plan, measured.peak


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", BOUNDED)
def test_step_is_within_scratch_and_activations(name):
    measured_step(*BOUNDED[name])


NATIVE_BYTES = 4 << 20  # "not counted" in memory_plan.py


def test_activations_of_a_native_step_are_planned():
    config, options, dtype = bounded(max_num_seqs=4, max_seq_len=1024, prefill_chunk_size=1024)
    plan, peak = measured_step(config, options, dtype, budget=4096, native=True)
    assert NATIVE_BYTES < peak <= plan.scratch + plan.activations


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bits", [0, 4, 8])
def test_activations_of_native_experts_are_planned(bits, dtype):
    """Each token has a row for each of its experts; with quantized weights, they are converted to integers."""
    moe = medium_config(AttentionConfig(8), MoEConfig(160, 16, 8))
    sizes = {"max_num_seqs": 4, "max_seq_len": 1024, "prefill_chunk_size": 1024}
    config, options, _ = bounded(moe, dtype, cache_dtype=dtype, **sizes)
    plan, peak = measured_step(config, options, dtype, budget=4096, native=True, bits=bits)
    assert 5 * NATIVE_BYTES < peak <= plan.activations


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", BOUNDED)
def test_native_step_is_within_scratch_and_activations(name):
    measured_step(*BOUNDED[name], native=True)


TILED = [
    *("paged", "one row in place", "int8", "half", "window", "wide gated mlp", "experts", "softcap", "alibi", "t5"),
    *("values of another width", "sinks", "pair", "pair t5 half", "encoder", "encoder t5", "encoder, capped"),
]


@pytest.mark.parametrize("name", TILED)
def test_deterministic_step_is_within_scratch_and_activations(name):
    config, options, dtype = BOUNDED[name]
    plan, _ = measured_step(config, options, dtype, deterministic=True)
    assert plan.pool == plan_memory(config, options, weights_dtype=dtype, max_num_batched_tokens=1024).pool


@pytest.mark.parametrize("rows", [1, 4])
def test_tiles_between_sinks_and_last_tokens(rows):
    """A query block sees from the first sink to the last token, so its tiles are bounded by positions."""
    sizes = {"max_num_seqs": rows, "max_seq_len": 700, "prefill_chunk_size": 64}
    config, options, _ = bounded(medium_config(ALIBI), policy="sinks(4, 60)", **sizes)
    measured_step(config, options, budget=512, deterministic=True)


@pytest.mark.parametrize(
    ("options", "dtype", "error"),
    [
        ({"policy": "snapkv(16)"}, "float32", "not supported with the policy snapkv"),
        ({}, "float16", "not supported in float16"),
    ],
)
def test_unsupported_options_are_not_planned(options, dtype, error):
    with pytest.raises(ConfigError, match=error):
        plan_memory(CONFIGS["plain"], cache(**options), weights_dtype=dtype, deterministic=True)


# ---------------------------------------------------------------- learned summaries


SUMMARIES = {"policy": "tiered(8, quantized=8, summaries=12, ratio=2, interval=4)"}


@pytest.mark.parametrize("name", ["plain", "dims", "window", "pattern"])
@pytest.mark.parametrize("hidden", [1, 16])
def test_summarizer_bytes_equal_the_plan(name, hidden):
    own = attention_specs(EVERY[name])
    if not any(mixer.window is None for mixer in own):
        pytest.skip("no layer keeps all its tokens")
    state = Summarizer(own, 2, hidden).state_dict()
    learned = shapes.SummarizerShape(2, hidden)
    assert shapes.summarizer_shapes(own, learned) == {key: tuple(tensor.shape) for key, tensor in state.items()}
    plan = plan_memory(EVERY[name], cache(**SUMMARIES), weights_dtype="bfloat16", summarizer_shape=learned)
    plain = plan_memory(EVERY[name], cache(**SUMMARIES), weights_dtype="bfloat16")
    assert plan.summarizer == sum(tensor.nbytes for tensor in state.values()) and plain.summarizer == 0
    assert (plan.weights, plan.pool) == (plain.weights, plain.pool)
    assert plan.total - plain.total == plan.summarizer + plan.scratch - plain.scratch


@pytest.mark.parametrize("hidden", [4, 2000])
@pytest.mark.parametrize("policy", ["summaries, t5, read", "long summaries"])
def test_summarizing_is_within_scratch_and_activations(policy, hidden):
    config, options, dtype = BOUNDED[policy]
    measured_step(config, options, dtype, summarizer=Summarizer(attention_specs(config), 8, hidden))


def test_summarizer_requires_its_ratio():
    with pytest.raises(ConfigError, match="has no summaries"):
        plan_memory(CONFIGS["plain"], cache(), summarizer_shape=shapes.SummarizerShape(2, 4))
    with pytest.raises(ConfigError, match="must have the policy's ratio 2, got 8"):
        plan_memory(CONFIGS["plain"], cache(**SUMMARIES), summarizer_shape=shapes.SummarizerShape(8, 4))


def test_suggestions_include_the_summarizer():
    plan = plan_memory(CONFIGS["plain"], cache(**SUMMARIES), summarizer_shape=shapes.SummarizerShape(2, 16))
    full = plan_memory(CONFIGS["plain"], cache())
    assert total_bytes_with(plan, plan.cache) == plan.total and total_bytes_with(plan, full.cache) == full.total
    tiled = plan_memory(CONFIGS["plain"], cache(), deterministic=True)
    assert total_bytes_with(tiled, tiled.cache) == tiled.total > full.total


def test_summarizer_folder_is_planned(tmp_path, run_plan, plan_json, plan_error):
    config = CONFIGS["plain"]
    folder = write_checkpoint(tmp_path / "run", config)
    compressor = Summarizer(attention_specs(config), 4, 8)
    printed = {"ratio": 4, "hidden_size": 8}
    save_summarizer(tmp_path / "learned", compressor.state_dict(), "of the model", printed)
    policy = ("--policy", "tiered(16, quantized=0, summaries=16, ratio=4, interval=16)")
    options = (folder, *policy, "--summarizer", tmp_path / "learned")
    values = plan_json(*options)
    taken = sum(tensor.nbytes for tensor in compressor.state_dict().values())
    assert values["bytes"]["summarizer"] == taken and values["deterministic"] is False
    _, out, _ = run_plan(*options, "--bandwidth", "10")
    assert f"{taken:,} " in next(line for line in out.splitlines() if line.startswith("summarizer"))
    assert "has no summaries" in plan_error(folder, "--summarizer", tmp_path / "learned")
    assert "is not a summarizer: no such folder" in plan_error(folder, *policy, "--summarizer", tmp_path / "none")


def test_deterministic_flag_is_planned(run_plan, plan_json):
    plain, same = (plan_json("gpt2 --max-num-seqs 2", *more) for more in ((), ("--deterministic",)))
    assert same["deterministic"] and same["bytes"]["pool"] == plain["bytes"]["pool"]
    assert same["bytes"]["scratch"] > plain["bytes"]["scratch"]
    assert same["bytes"]["activations"] > plain["bytes"]["activations"]
    assert "masks, tiles" in run_plan("gpt2 --deterministic --bandwidth 10")[1]


def test_offload_scratch_does_not_grow_with_the_sequence(monkeypatch):
    """Except for positions and tile masks, a sequence four times as long is read with the same memory."""
    monkeypatch.setattr(token_offload, "TILE", 30_000)
    config, peaks, planned = medium_config(GQA), [], []
    for capacity in (240, 960):
        _, options, _ = bounded(policy="offload(32, interval=32)", max_seq_len=capacity, prefill_chunk_size=32)
        engine = Engine(Transformer(config), options, EngineConfig(max_num_batched_tokens=64))
        offload = engine.kv_cache.offload_reader
        assert sum(buffer.nbytes for buffer in offload._staging) == offload.plan.staging_bytes
        engine.close()
        plan, peak = measured_step(config, options, budget=64, ratio=math.inf)
        assert plan.offload == offload.plan
        peaks.append(peak)
        planned.append(plan.scratch + plan.activations)
    positions = 8 * 2 * (960 - 240)
    assert peaks[1] - peaks[0] <= 4 * positions and planned[1] - planned[0] == positions
    offload, full = (
        plan_memory(config, replace(options, policy=policy, max_seq_len=1920), max_num_batched_tokens=64)
        for policy in (options.policy, "full")
    )
    assert offload.scratch + offload.activations < full.scratch / 4


def test_long_prompts_are_computed_in_several_steps():
    config, options = medium_encoder(GQA), CacheConfig(max_num_seqs=8, max_seq_len=300)
    assert activations.max_encoder_tokens(config, options, 1024) == 1024
    assert activations.max_encoder_tokens(config, options, 100) == 300
    assert activations.max_encoder_tokens(config, replace(options, max_num_seqs=2), 1024) == 600
    measured_step(config, options, ratio=8)


# ---------------------------------------------------------------- what fits and what is refused


def test_max_num_seqs_is_the_largest_that_fits():
    config = known_model("gemma-2-2b")
    options = CacheConfig(max_num_seqs=4, max_seq_len=4096, dtype="bfloat16")
    plan, memory = plan_memory(config, options, weights_dtype="bfloat16"), 12 * GIB
    values = find_fits(plan, memory)
    assert [fit.num_seqs for fit in values] == sorted(fit.num_seqs for fit in values)
    assert {1, 2, 4, 8, 16} <= {fit.num_seqs for fit in values}

    def total(rows, capacity):
        larger = replace(options, max_num_seqs=rows, max_seq_len=capacity)
        return plan_memory(config, larger, weights_dtype="bfloat16").total

    for rows, capacity, size in values:
        assert size == total(rows, capacity) <= memory
        at_limit = capacity == config.max_seq_len
        whole = capacity == 4096 and total(rows + 1, 4096) > memory
        assert at_limit or whole or total(rows, capacity + 16) > memory
    most = [fit.num_seqs for fit in values if fit.max_seq_len == 4096]
    assert most and total(most[-1] + 1, 4096) > memory


def test_nothing_fits_if_the_weights_do_not():
    assert find_fits(plan_memory(known_model("llama-3-8b"), CacheConfig(max_seq_len=4096)), 8 * GIB) == ()


def test_require_reports_need_and_suggestion():
    plan = plan_memory(known_model("gpt2"), CacheConfig(max_num_seqs=64, max_seq_len=1024))
    require_memory(plan, plan.total)
    require_memory(plan, None)
    with pytest.raises(MemoryPlanError) as caught:
        require_memory(plan, 2 * GIB)
    assert caught.value.exit_code == 1
    for text in ("64 sequences of 1,024 tokens need", "2.00 GiB is available"):
        assert text in caught.value.message
    assert "what would fit: " in caught.value.hint and "of 1,024 tokens" in caught.value.hint
    named = re.findall(r"([\d,]+) sequences? of ([\d,]+) tokens", caught.value.hint)
    assert len(named) >= 2
    for sizes in named:
        num_seqs, length = (int(size.replace(",", "")) for size in sizes)
        smaller = replace(plan.cache, max_num_seqs=num_seqs, max_seq_len=length)
        require_memory(plan_memory(plan.config, smaller), 2 * GIB)


def test_require_reports_that_nothing_fits():
    plan = plan_memory(known_model("llama-3-8b"), CacheConfig(max_num_seqs=1, max_seq_len=8192))
    with pytest.raises(MemoryPlanError, match="no sequence fits"):
        require_memory(plan, GIB)


@pytest.mark.parametrize(
    ("given", "error"),
    [({"weights_dtype": "float23"}, "float32"), ({"max_num_batched_tokens": 0}, "at least 1, got 0")],
)
def test_invalid_plans_are_refused(given, error):
    with pytest.raises(ConfigError, match=error):
        plan_memory(CONFIGS["plain"], cache(), **given)


# ---------------------------------------------------------------- the machine


def fake_machine(root, cgroup="", files=()):
    contents = {
        "proc/meminfo": "MemTotal:  16000000 kB\nMemAvailable:  8000000 kB\n",
        "proc/self/cgroup": cgroup,
        **{f"sys/fs/cgroup/{name}": text for name, text in dict(files).items()},
    }
    for name, text in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


VERSION_1 = {
    "memory/memory.limit_in_bytes": "9223372036854771712\n",
    "memory/memory.usage_in_bytes": "5000000\n",
    "memory/box/memory.limit_in_bytes": "2000000000\n",
    "memory/box/memory.usage_in_bytes": "2500000000\n",
}
VERSION_2 = {
    "pod/box/memory.max": "4000000000\n",
    "pod/box/memory.current": "1500000000\n",
    "pod/box/memory.stat": "anon 1000000000\ninactive_file 500000000\n",
    "pod/memory.max": "max\n",
    "pod/memory.current": "1500000000\n",
}


@pytest.mark.parametrize(
    ("cgroup", "files", "available"),
    [
        ("", {}, 8_000_000 * 1024),
        ("0::/pod/box\n", VERSION_2, 3_000_000_000),
        ("9:name=systemd:/\n4:memory:/box\n1:cpu:/\n", VERSION_1, 0),
    ],
)
def test_available_memory_of_a_machine_and_of_control_groups(tmp_path, cgroup, files, available):
    assert available_bytes(fake_machine(tmp_path, cgroup, files)) == available


def test_this_machine_is_measured():
    assert 1e8 < measure_bandwidth(0.01) < 1e13 and (available_bytes() or 0) > 2**20


def test_step_bytes_are_weights_and_visible_slots():
    config = tiny(AttentionConfig(4, 2, window=7), tie_embeddings=False)
    plan = plan_memory(config, cache())
    each = plan.groups[0].bytes.per_token_payload + plan.groups[0].bytes.per_token_metadata
    weights = shapes.weight_bytes(config, "float32") - shapes.lookup_bytes(config, "float32")
    assert shapes.lookup_bytes(config, "float32") == 61 * 24 * 4
    assert decode_step_bytes(plan, 1, 5) == weights + 5 * each
    assert decode_step_bytes(plan, 3, 30) == weights + 3 * 7 * each


@pytest.mark.parametrize(
    ("policy", "slots"),
    [
        ("sinks(3, 9)", [12]),
        ("key-norm(8, interval=4)", [12]),
        ("tiered(8, quantized=8, summaries=12, ratio=2, interval=4)", [12, 8, 7]),
    ],
)
def test_decode_step_reads_the_retained_slots(policy, slots):
    """30 tokens: 8 + 4 unchanged, 8 quantized, the first 14 as 7 summaries."""
    plan = plan_memory(CONFIGS["plain"], cache(policy=policy))
    sizes = [each.bytes for each in plan.groups]
    token = [size.per_token_payload + size.per_token_scales + size.per_token_metadata for size in sizes]
    read = sum(count * each for count, each in zip(slots, token, strict=True))
    assert decode_step_bytes(plan, 3, 30) - decode_step_bytes(plan, 2, 30) == read


# ---------------------------------------------------------------- the command


def test_json_has_the_plan(plan_json):
    values = plan_json("mistral-7b --max-seq-len 8192 --max-num-seqs 2 --cache-dtype bfloat16 --fit-memory 40GiB")
    cache = CacheConfig(max_num_seqs=2, max_seq_len=8192, dtype="bfloat16")
    plan = plan_memory(known_model("mistral-7b"), cache, weights_dtype="bfloat16")  # as published
    assert values["bytes"]["total"] == plan.total and values["bytes"]["pool"] == plan.pool
    assert values["groups"][0]["window"] == 4096 and values["groups"][0]["max_blocks_per_seq"] == 289
    assert values["groups"][0]["bytes_per_token"] == {"payload": 32 * 8 * 256 * 2, "scales": 0, "metadata": 8}
    assert values["speeds"][1]["tokens_per_second"] == pytest.approx(2 * 1e10 / decode_step_bytes(plan, 2, 8192))
    assert values["fit"]["largest"][-1]["bytes"] <= values["fit"]["bytes"] == 40 * GIB
    assert values["bandwidth_measured"] is False


def test_text_has_the_plan(run_plan):
    code, out, err = run_plan("gemma-2-2b --max-num-seqs 2 --fit-memory 16GiB --bandwidth 20")
    assert (code, err) == (0, "")
    plan = plan_memory(known_model("gemma-2-2b"), CacheConfig(max_num_seqs=2, max_seq_len=8192))
    for name in ("weights", "payload", "metadata", "reserved", "scratch", "activations", "total"):
        assert f" {getattr(plan, name):,} " in out
    assert "group 0: layers 0, 2, ..., 24 (13): the last 4,096 tokens (the model's window), float32" in out
    assert "group 1: layers 1, 3, ..., 25 (13): everything, float32" in out
    assert "20.0 GB/s (as given)" in out and "tokens each" in out and max(map(len, out.splitlines())) <= 120


def test_key_and_value_formats_are_planned_separately(run_plan, plan_json):
    options = ("llama-3-8b", "--max-seq-len", "8192", "--max-num-seqs", "2", "--dtype", "bfloat16", "--bandwidth", "20")
    values = plan_json(*options, "--cache-key-dtype", "int8", "--cache-value-dtype", "int4")
    cached, (group,) = values["cache"], values["groups"]
    assert (cached["dtype"], cached["key_dtype"], cached["value_dtype"]) == ("bfloat16", "int8", "int4")
    heads = 32 * 8
    assert group["bytes_per_token"] == {"payload": heads * (128 + 64), "scales": heads * (4 + 8), "metadata": 8}
    assert values["bytes"]["payload"] == 2 * 8192 * heads * 192 and values["bytes"]["scales"] == 2 * 8192 * heads * 12
    assert values["bytes"]["pool"] == sum(
        values["bytes"][name] for name in ("payload", "scales", "metadata", "reserved")
    )
    _, out, _ = run_plan(*options, "--cache-dtype", "int8", "--cache-value-dtype", "int4")
    assert "int8 keys and int4 values of the sequences, exact" in out and "cache scales" in out
    assert "payload 49,152, scales 3,072, metadata 8" in out
    plain = run_plan(*options)[1]
    assert "scales" not in plain and "bfloat16 keys and values" in plain


def test_plan_that_does_not_fit(monkeypatch, run_plan, plan_json):
    monkeypatch.setattr("kvad.cache.sizing.available_bytes", lambda: GIB)
    code, out, _ = run_plan("llama-3-70b --fit-memory 2GiB --bandwidth 20")
    assert code == 1 and "it does not fit" in out and "not even one sequence" in out
    code, out, _ = run_plan("llama-3.1-8b --bandwidth 20")
    assert code == 1 and "available here: 1.00 GiB: it does not fit" in out
    code, out, _ = run_plan("llama-3.1-8b --max-seq-len 131072 --memory 24GiB --bandwidth 20")
    assert code == 1 and "memory: 24.00 GiB: it does not fit" in out
    assert plan_json("gpt2")["is_too_large"] is False


@pytest.mark.parametrize("name", ["qwen3-0.6b", "llama-3.2-1b", "llama-3.1-8b"])
def test_one_sequence_in_the_published_dtype_is_planned(run_plan, name):
    code, out, _ = run_plan(f"{name} --memory 24GiB --bandwidth 20")
    assert code == 0 and "layers; 1 sequence of " in out and "   bfloat16, exact" in out
    verdict = "not at this length; without --max-seq-len: room for 1 sequence of "
    assert (verdict if name == "llama-3.1-8b" else "memory: 24.00 GiB: it fits") in out


def test_defaults_are_those_of_the_cache():
    defaults = {field.name: field.default for field in fields(CacheConfig)}
    given = {param.name: param.default for param in command.params}
    for name in ("layout", "block_size", "prefill_chunk_size"):
        assert given[name] == defaults[name]
    assert "[default: 1]" in next(param.help for param in command.params if param.name == "max_num_seqs")
    assert given["max_num_batched_tokens"] == memory_plan.DEFAULT_BATCHED_TOKENS


def test_checkpoint_is_planned_in_its_dtype(tmp_path, plan_json):
    folder = write_checkpoint(tmp_path / "run", CONFIGS["pattern"], dtype=torch.bfloat16)
    values = plan_json(folder)
    assert (values["weights_dtype"], values["cache"]["dtype"], values["max_seq_len"]) == ("bfloat16", "bfloat16", 64)
    assert values["bytes"]["weights"] == shapes.weight_bytes(CONFIGS["pattern"], "bfloat16")


def test_stored_float16_is_planned_as_loaded(tmp_path, plan_json):
    folder = write_checkpoint(tmp_path / "run", CONFIGS["plain"], dtype=torch.float16)
    assert plan_json(folder)["weights_dtype"] == "float32"


def test_configs_are_read_as_json_and_toml(tmp_path, plan_json):
    config = CONFIGS["plain"].to_dict()
    (tmp_path / "m.json").write_text(json.dumps(config))
    mixer = "[model.decoder.layer_types.L.attention]\nnum_heads = 4\nnum_kv_heads = 2\n"
    mlp = '[model.decoder.layer_types.L.mlp]\nkind = "gated"\nintermediate_size = 40\n'
    (tmp_path / "m.toml").write_text(
        f"[model]\nhidden_size = 24\nvocab_size = 61\nmax_seq_len = 64\n[model.decoder]\nnum_layers = 2\n{mixer}{mlp}"
    )
    first, second = plan_json(tmp_path / "m.json"), plan_json(tmp_path / "m.toml")
    assert first["bytes"] == second["bytes"] and first["parameters"] == shapes.num_parameters(CONFIGS["plain"])


def test_run_files_are_read(tmp_path, plan_json, plan_error):
    recipe = tmp_path / "r.toml"
    recipe.write_text('[model]\npreset = "tiny"\n[tokenizer]\nvocab_size = 4096\n[data]\nseq_len = 128\n')
    values = plan_json(recipe)
    assert values["max_seq_len"] == 128 and values["parameters"] == pytest.approx(1.26e6, rel=0.01)
    recipe.write_text('[model]\npreset = "tiny"\n[tokenizer]\nkind = "char"\n')
    assert "set model.vocab_size" in plan_error(recipe)
    recipe.write_text('[model]\npreset = "tiny"\n[tokenizr]\nkind = "char"\n[data]\n')
    assert "did you mean 'tokenizer'?" in plan_error(recipe)


def test_known_models_are_listed(run_plan):
    code, out, _ = run_plan("--list-models")
    assert code == 0 and all(name in out for name in KNOWN_MODELS)
    code, out, _ = run_plan("--list-models --json")
    assert json.loads(out)["gpt2"] == 124_439_808


def run_in_process(arguments, loads_torch):
    """Run ``kvad plan`` in a new process; it must load torch, or not."""
    program = (
        "import sys\nfrom kvad.cli.main import main\ncode = main(['plan', *sys.argv[1:]])\n"
        f"assert ('torch' in sys.modules) == {loads_torch}\nsys.exit(code)"
    )
    command = [sys.executable, "-c", program, *map(str, arguments)]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_plan_does_not_load_torch():
    words = "llama-3-8b --max-num-seqs 2 --fit-memory 64GiB --max-seq-len 4096 --policy snapkv(128)"
    out = run_in_process(words.split(), loads_torch=False)
    assert "(measured)" in out and "snapkv(128)" in out


def test_only_hugging_face_configs_load_torch(tmp_path):
    """A family's file also has its conversion tables, which need torch."""
    run_in_process([write_foreign(tmp_path / "m", "llama", weights=False), "--bandwidth", "10"], loads_torch=True)
    run_in_process([write_checkpoint(tmp_path / "run", PAIRS["pair"]), "--bandwidth", "10"], loads_torch=False)


# ---------------------------------------------------------------- encoder-decoders and encoders


def test_encoder_input_is_planned(plan_json):
    values = plan_json("t5-small --max-source-len 100 --max-seq-len 32 --max-num-seqs 4 --fit-memory 2GiB")
    options = CacheConfig(max_num_seqs=4, max_seq_len=32, max_source_len=100)
    plan = plan_memory(known_model("t5-small"), options)
    assert values["bytes"]["total"] == plan.total and values["bytes"]["pool"] == plan.pool
    assert (values["kind"], values["max_seq_len"], values["max_source_len"]) == ("encoder-decoder", 32, 100)
    own, cross = values["groups"]
    assert (own["is_cross_attention"], cross["is_cross_attention"]) == (False, True)
    assert own["layers"] == cross["layers"] == [0, 1, 2, 3, 4, 5]
    assert (own["max_blocks_per_seq"], cross["max_blocks_per_seq"]) == (2, 7)
    assert cross["payload"] == 4 * 7 * 16 * cross["bytes_per_token"]["payload"] == 4 * 7 * 16 * 6 * 2 * 8 * 64 * 4
    for fit in values["fit"]["largest"]:
        again = replace(options, max_num_seqs=fit["num_seqs"], max_seq_len=fit["max_seq_len"])
        assert plan_memory(known_model("t5-small"), again).total == fit["bytes"] <= 2 * GIB
    assert plan_json("t5-small")["max_source_len"] == 512


def test_text_of_a_source(run_plan):
    code, out, err = run_plan("bart-base --max-num-seqs 8 --max-source-len 300 --fit-memory 4GiB --bandwidth 10")
    assert (code, err) == (0, "") and max(map(len, out.splitlines())) <= 120
    assert "6 + 6 layers; 8 sequences of 1,024 tokens, 300 of source each, paged" in out
    assert "group 1: layers 0-5 (6): cross-attention, the whole encoder input, float32" in out
    assert "per source  payload" in out
    assert "at most: 2,048 new tokens, 8 sequences of logits; or 2,048 of source" in out
    assert "8 sequences at 1,024 tokens, 300 of encoder input: " in out and "encoder inputs of 300 tokens:" in out


def test_decode_step_does_not_read_the_encoder():
    """It reads the decoder, its head and the sequences' caches, not the encoder or the projections of sources."""
    config = PAIRS["pair of widths"]
    plan = plan_memory(config, cache(max_source_len=20))
    pattern, weights = re.compile(r"encoder[._]|.*\.cross_attention\.[kv]\."), shapes.weight_shapes(config)
    unread = sum(math.prod(shape) for name, shape in weights.items() if pattern.match(name))
    own, cross = (each.bytes.per_token_payload + each.bytes.per_token_metadata for each in plan.groups)
    read = plan.weights - 4 * unread
    assert decode_step_bytes(plan, 3, 9) == read + 3 * (9 * own + 20 * cross)


def test_decode_step_reads_reachable_experts():
    plan = plan_memory(tiny(mlp=MoEConfig(40, 8, 2)), cache())
    one, cached = 2 * 3 * 24 * 40 * 4, decode_step_bytes(plan, 2, 1) - decode_step_bytes(plan, 1, 1)
    each = sum(group.bytes.per_token_payload + group.bytes.per_token_metadata for group in plan.groups)
    assert cached == 2 * one + each
    assert decode_step_bytes(plan, 5, 1) - decode_step_bytes(plan, 4, 1) == each


def test_encoder_plan_has_no_cache(run_plan, plan_json):
    values = plan_json("bert-base --max-num-seqs 4 --max-seq-len 128")
    assert values["groups"] == [] and values["bytes"]["pool"] == 0 and values["speeds"] == []
    assert values["max_source_len"] is None and values["bytes"]["activations"] > 0
    code, out, _ = run_plan("bert-base --max-num-seqs 4 --max-seq-len 128 --fit-memory 2GiB")
    assert code == 0 and "12 layers of an encoder; 4 texts of 128 tokens at once" in out
    assert "none: an encoder has no cache" in out and "a step of 512 tokens of texts\n" in out
    assert "decoding" not in out and "group" not in out and "tokens each" in out


def test_require_error_names_the_sources():
    plan = plan_memory(known_model("t5-base"), CacheConfig(max_num_seqs=64, max_seq_len=512, max_source_len=512))
    with pytest.raises(MemoryPlanError, match="64 sequences of 512 tokens and encoder inputs of 512 need"):
        require_memory(plan, GIB)


# ---------------------------------------------------------------- Hugging Face


@pytest.mark.parametrize("name", ["llama", "t5", "marian-two-vocabularies", "bert-tokens", "gpt-oss"])
def test_folder_and_its_config_have_equal_plans(name, tmp_path, plan_json):
    whole, bare = write_foreign(tmp_path / "whole", name), write_foreign(tmp_path / "bare", name, weights=False)
    values = [plan_json(path) for path in (whole, bare, bare / "config.json", whole / "config.json")]
    assert all(each["bytes"] == values[0]["bytes"] for each in values)
    config = HFCheckpoint(whole).config
    assert values[0]["parameters"] == shapes.num_parameters(config) and values[0]["kind"] == config.kind


def test_weights_override_an_ambiguous_config(tmp_path, plan_json):
    """T5 v1.1's config in transformers 5 has tied weights, but the file contains a separate head."""
    whole, bare = write_foreign(tmp_path / "whole", "t5-v1.1"), write_foreign(tmp_path / "b", "t5-v1.1", weights=False)
    there, config_only = plan_json(whole), plan_json(bare)
    assert there["parameters"] == config_only["parameters"] + 97 * HFCheckpoint(whole).config.hidden_size


def test_dtype_of_a_config(tmp_path, plan_json):
    for number, (printed, planned) in enumerate(
        [({"dtype": "bfloat16"}, "bfloat16"), ({"dtype": "float16"}, "float32"), ({"dtype": "int4"}, "float32")]
    ):
        folder = write_foreign(tmp_path / str(number), "llama", weights=False, **printed)
        assert plan_json(folder)["weights_dtype"] == planned
    older = write_foreign(tmp_path / "older", "llama", weights=False, dtype=None, torch_dtype="bfloat16")
    assert plan_json(older)["weights_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"model_type": "lama"}, "did you mean 'llama'?"),
        ({"model_type": "switch_transformers"}, "drop tokens beyond a capacity"),
        ({"quantization_config": {"quant_method": "hqq"}}, "is quantized (HQQ)"),
        ({"quantization_config": {"quant_method": "gptq"}}, "bits is missing"),
        ({"hidden_size": "many"}, "hidden_size: must be an integer"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type 'spiral' is not supported"),
    ],
)
def test_unsupported_hugging_face_configs_are_refused(tmp_path, changes, error, plan_error):
    folder = write_foreign(tmp_path / "m", "llama", weights=False, **changes)
    err = plan_error(folder)
    assert error in err and "config.json" in err


# ---------------------------------------------------------------- bad input


def test_config_with_a_typo(tmp_path, plan_error):
    config = CONFIGS["plain"].to_dict()
    config["decoder"]["num_layer"] = config["decoder"].pop("num_layers")
    (tmp_path / "typo.json").write_text(json.dumps(config))
    err = plan_error(tmp_path / "typo.json")
    assert "typo.json: unknown key decoder.num_layer\n" in err and err.endswith("did you mean 'num_layers'?\n")


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("a.json", "{", "is not JSON"),
        ("a.toml", "= 3", "is not TOML"),
        ("b.json", "[]", "must be an object of keys, got list"),
        ("missing.json", None, "no such file"),
        ("", None, "is not a checkpoint: it has no config.json"),
    ],
)
def test_broken_files(tmp_path, name, text, error, plan_error):
    if text is not None:
        (tmp_path / name).write_text(text)
    err = plan_error(tmp_path / name)
    assert error in err and name in err


LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
LLAMA |= {"intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 128}
KVAD = """{"hidden_size": 8, "vocab_size": 9, "max_seq_len": 7, "decoder": {"num_layers": %d, "layer_types": {"L":
    {"attention": {"num_heads": 2}, "mlp": {"kind": "gated", "intermediate_size": 4}}}}}"""
HOSTILE = {  # changes of a config, or a text; the refusal
    "10^6 layers": ({"num_hidden_layers": 10**6}, "num_hidden_layers: must be at most 10,000, got 1000000"),
    "10^9 layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers: must be at most 10,000, got 1000000000"),
    "0 layers": ({"num_hidden_layers": 0}, "decoder.num_layers: must be at least 1, got 0"),
    "a size of 10^18": ({"hidden_size": 10**18}, "hidden_size: must be at most 1,099,511,627,776, got 1"),
    "10^9 heads": ({"num_attention_heads": 10**9, "head_dim": 8}, "num_heads: must be at most 16,777,216, got 10"),
    "a limit of 10^400": ({"max_position_embeddings": 10**400}, "column 166: an integer of 401 digits"),
    "a limit of 10^99": ({"max_position_embeddings": 10**99}, "max_position_embeddings: must be at most 1,099"),
    "a list as activation": ({"hidden_act": ["silu"]}, "hidden_act ['silu'] is not supported"),
    "epsilon 10^300": ({"rms_norm_eps": 1e300}, "norm.eps: must be at most 1, got 1e+300"),
    "epsilon 10^999": ('{"model_type": "llama", "rms_norm_eps": 1e999}', "column 41: a number beyond the range"),
    "epsilon Infinity": ('{"model_type": "llama", "rms_norm_eps": Infinity}', "column 41: Infinity is not a JSON"),
    "a key twice": ('{"model_type": "llama", "vocab_size": 5, "vocab_size": 6}', "contains 'vocab_size' twice"),
    "100,000 lists": ("[" * 100_000, "column 101: nested too deeply"),
    "100,000 objects": ('{"model":' * 100_000, "nested too deeply"),
    "10^9 kvad layers": (KVAD % 10**9, "decoder.num_layers: must be at most 10,000, got 1000000000"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_config_is_refused_in_one_line(tmp_path, case, plan_error):
    change, message = HOSTILE[case]
    text = change if isinstance(change, str) else json.dumps({**LLAMA, **change})
    (tmp_path / "config.json").write_text(text)
    err = plan_error(tmp_path / "config.json")
    assert message in err and "config.json" in err and len(err) < 500


def test_truncated_checkpoint(checkpoint, plan_error):
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "model.safetensors is truncated" in plan_error(checkpoint)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("lama-3-8b", "did you mean 'llama-3-8b'?"),
        ("", "Missing argument"),
        ("gpt2 --max-num-seqs 0", "cache.max_num_seqs: must be at least 1, got 0"),
        ("gpt2 --max-num-seqs -3", "got -3"),
        ("gpt2 --max-num-seqs many", "'many' is not a list of whole numbers"),
        ("gpt2 --max-seq-len 0", "got 0"),
        ("gpt2 --max-seq-len 4096", "a length of 4,096 tokens is beyond the limit of gpt2, 1,024 tokens"),
        ("t5-small --max-seq-len 513", "a length of 513 tokens is beyond the limit of t5-small, 512 tokens"),
        ("t5-small --max-source-len 513", "a source of 513 tokens is beyond the limit of t5-small, 512 tokens"),
        ("t5-small --max-source-len 0", "--max-source-len: must be at least 1, got 0"),
        ("gpt2 --max-source-len 3", "gpt2 has no encoder input: it is a decoder"),
        ("bert-base --max-source-len 3", "bert-base has no encoder input: it is an encoder"),
        ("gpt2 --block-size 0", "cache.block_size"),
        ("gpt2 --prefill-chunk-size 0", "cache.prefill_chunk_size"),
        ("gpt2 --max-num-batched-tokens 0", "max_num_batched_tokens: must be at least 1, got 0"),
        ("gpt2 --cache-dtype float23", "did you mean 'float32'?"),
        ("gpt2 --cache-dtype int9", "--cache-dtype: unknown dtype 'int9'"),
        ("gpt2 --cache-key-dtype int9", "--cache-key-dtype: unknown dtype 'int9'"),
        ("gpt2 --cache-value-dtype int9", "--cache-value-dtype: unknown dtype 'int9'"),
        ("gpt2 --dtype foo", "--dtype: unknown dtype 'foo'"),
        ("gpt2 --dtype bf16", "did you mean 'bfloat16'?"),
        ("gpt2 --cache-value-dtype int9", "did you mean 'int8'?"),
        ("gpt2 --layout ring", "'ring'"),
        ("gpt2 --fit-memory 8gigs", "'8gigs' is not a size in bytes"),
        ("gpt2 --bandwidth 0", "must be above 0"),
        ("gpt2 --max-seq-ln 3", "--max-seq-len"),
        ("gpt2 --max-seq-len 256,512", "add the memory, as in --fit-memory 8GiB"),
        ("gpt2 --max-num-seqs 1,2", "add the memory"),
        ("gpt2 --fit-memory 2GiB --compression-ratios 1.5", "must be between 0 and 1"),
        ("gpt2 --fit-memory 2GiB --compression-ratios half", "'half' is not a list of numbers"),
        ("gpt2 --fit-memory 2GiB --max-num-seqs 0,4", "must be at least 1, got 0"),
        ("gpt2 --fit-memory 2GiB --quality-results nowhere", "cannot read nowhere"),
        ("gpt2 --max-seq-len a,b", "'a,b' is not a list of whole numbers"),
        ("gpt2 --deterministic --policy quest(64)", "not supported with the policy quest(64)"),
    ],
)
def test_invalid_options_are_refused(words, error, plan_error):
    assert error in plan_error(words)


def test_singular_units(run_plan):
    code, out, _ = run_plan("gpt2 --max-seq-len 1 --max-num-seqs 1 --bandwidth 10")
    assert code == 0 and "1 sequence of 1 token, " in out and "a step of 1 new token, 1 sequence of logits" in out
    assert "1 sequence at 1 token: " in out and "1 tokens" not in out


def test_bidirectional_model_has_no_cache(tmp_path, plan_error):
    (tmp_path / "b.json").write_text(json.dumps(tiny(AttentionConfig(4, causal=False)).to_dict()))
    assert "bidirectional" in plan_error(tmp_path / "b.json")


def test_load_that_does_not_fit_is_refused_early(tmp_path, monkeypatch):
    import kvad.llm

    folder = write_checkpoint(tmp_path / "run", CONFIGS["plain"])
    monkeypatch.setattr(kvad.llm, "Engine", lambda *_, **__: pytest.fail("the pool was made"))
    monkeypatch.setattr("kvad.engine.loading.available_bytes", lambda: 2 * 2**20)
    with pytest.raises(MemoryPlanError) as caught:
        kvad.llm.LLM.load(folder, max_num_seqs=2000, max_seq_len=64)
    for text in ("2,000 sequences of 64 tokens need", "2.00 MiB is available"):
        assert text in caught.value.message
    assert "what would fit: 1 sequence of 64 tokens" in caught.value.hint
