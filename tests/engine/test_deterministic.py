"""Batch invariance: with ``deterministic``, the logits of a sequence are equal, bit for bit, in any batch.

The reference is one pass of the uncached model over the whole sequence, with the same tiles. A sequence that equals it
has the same bits in any batch, chunks and order, with prefix hits, and after a preemption.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvad.cache.config import CacheConfig
from kvad.config import layers as cfg
from kvad.config.model import ModelConfig
from kvad.engine import Engine, EngineConfig
from kvad.errors import ConfigError
from kvad.llm import LLM
from kvad.model.batch_invariant import make_batch_invariant
from kvad.model.layers import xielu
from kvad.model.no_cache import NoCache
from kvad.model.positions import short_regime_lens
from kvad.model.transformer import Transformer
from kvad.ops import batch_invariant, sub_batch
from kvad.ops.attention import dot_product_attention
from kvad.ops.batch_invariant import (
    MatmulShape,
    TileSizes,
    elementwise,
    find_invariant_tiles,
    split_tiles,
    tiled_matmul,
)
from tests.cache.test_cached_equals_uncached import SCENARIOS, cache_of, happened, streams_of, with_sources
from tests.support.covering_array import Case, pairwise
from tests.support.driver import Run, Stream, drive, fresh_step
from tests.support.golden_models import GoldenModel
from tests.support.random_models import SOURCE_VOCAB, VOCAB, build, encoder_config, model_config, pair_config

DTYPES = ("float32", "bfloat16")
AXES = {
    "layout": ("paged", "contiguous"),
    "dtype": DTYPES,
    "position": ("none", "learned", "sinusoidal", "rope", "rope-longrope", "alibi", "t5"),
    "norm": ("pre", "post", "sandwich", "parallel"),
    "heads": ("mha", "gqa", "mqa", "value-dim", "qk-norm", "softcap", "sinks", "window", "window-mix", "latent"),
    "scenario": SCENARIOS,
}
PAIRS = AXES | {"heads": ("mha", "gqa", "value-dim", "softcap", "sinks", "window-mix"), "vocab": ("shared", "own")}


@pytest.fixture(autouse=True)
def many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 keys, so that short streams have several."""
    monkeypatch.setattr(batch_invariant, "KEYS", 16)


def case_id(case: Case) -> str:
    return "-".join(case.values())


@torch.inference_mode()
def full_text(model: Transformer, stream: Stream, sample: int) -> Tensor:
    """[T, V] in one pass per rotary regime: a sequence is recomputed when it outgrows the original length."""
    tokens = stream.tokens(sample)
    parts: list[Tensor] = []
    for end in (*short_regime_lens(model.config.stack, model.config.max_seq_len), len(tokens)):
        step = fresh_step(tokens[:end], source=stream.source)
        logits = model.logits(model(step, NoCache(model.config, kernel=model.kernel)), step.logit_indices)
        parts.append(logits[sum(map(len, parts)) :])
    return torch.cat(parts)


def differences(model: Transformer, streams: list[Stream], run: Run) -> int:
    """Return the number of positions whose bits differ from the reference."""
    count = 0
    for number, stream in enumerate(streams):
        for sample in range(len(stream.continuations)):
            right, actual = full_text(model, stream, sample), run.logits[number, sample]
            assert sorted(actual) == list(range(len(stream.prompt) - 1, len(stream.tokens(sample)) - 1))
            count += sum(not torch.equal(logits, right[position]) for position, logits in actual.items())
    return count


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", pairwise(AXES), ids=case_id)
def test_a_sequence_has_the_same_bits_in_any_batch(case: Case) -> None:
    model = build(model_config(case["position"], case["norm"], case["heads"]), dtype=getattr(torch, case["dtype"]))
    streams = streams_of(case["scenario"], random.Random(7))
    run = drive(model, cache_of(case), streams, budget=40, deterministic=True)
    happened(case, run)
    assert differences(model, streams, run) == 0


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", pairwise(PAIRS), ids=case_id)
def test_a_translation_has_the_same_bits_in_any_batch(case: Case) -> None:
    config = pair_config(case["position"], case["norm"], case["heads"], own=case["vocab"] == "own")
    model = build(config, dtype=getattr(torch, case["dtype"]))
    streams = with_sources(case["scenario"], streams_of(case["scenario"], draw := random.Random(7)), draw)
    run = drive(model, cache_of(case), streams, budget=40, deterministic=True)
    assert differences(model, streams, run) == 0


def experts(config: ModelConfig, clip: float | None) -> ModelConfig:
    assert config.decoder is not None
    mlp = cfg.MoEConfig(
        40,
        num_experts=5,
        num_experts_per_token=2,
        bias=True,
        swiglu_limit=clip,
        swiglu_alpha=None if clip is None else 1.7,
        router="softmax" if clip is None else "sigmoid",
        selection_bias=clip is not None,
        shared_size=24,
        shared_gate=True,
    )
    kinds = {letter: replace(layer, mlp=mlp) for letter, layer in config.decoder.layer_types.items()}
    return replace(config, decoder=replace(config.decoder, layer_types=kinds))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("clip", [None, 3.0])
def test_experts_have_the_same_bits_in_any_batch(clip: float | None, dtype: str) -> None:
    model = build(experts(model_config(), clip), dtype=getattr(torch, dtype))
    for scenario in ("ragged", "mixed", "preempted"):
        case = {"layout": "paged", "dtype": dtype, "heads": "gqa", "scenario": scenario}
        streams = streams_of(scenario, random.Random(3))
        assert differences(model, streams, drive(model, cache_of(case), streams, deterministic=True)) == 0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_streams_in_random_engines(dtype: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams of up to 300 tokens that share prefixes, in engines of random sizes; tiles as they are in use."""
    monkeypatch.setattr(batch_invariant, "KEYS", 128)
    draw = random.Random(seed)
    config = replace(model_config(draw.choice(("rope", "alibi", "t5", "sinusoidal"))), max_seq_len=320)
    model = build(config, dtype=getattr(torch, dtype), seed=seed)
    shared = [draw.randrange(VOCAB) for _ in range(200)]
    streams = []
    for _ in range(5):
        text = [draw.randrange(VOCAB) for _ in range(draw.randrange(1, 60))]
        prompt = shared[: draw.choice((0, 40, 199))] + text
        ends = [[draw.randrange(VOCAB) for _ in range(draw.randrange(1, 12))]]
        streams.append(Stream(prompt, ends, arrives=draw.choice((0, 0, 2, 1000))))
    cache = CacheConfig(
        layout=draw.choice(("paged", "contiguous")),
        dtype=dtype,
        block_size=draw.choice((4, 16)),
        max_num_seqs=draw.randrange(1, 5),
        max_seq_len=320,
        prefill_chunk_size=draw.choice((7, 33, 256)),
    )
    run = drive(model, cache, streams, budget=draw.choice((16, 100, 512)), deterministic=True)
    assert differences(model, streams, run) == 0


# ---------------------------------------------------------------- tokens, searches and encoders


def llm_of(config: ModelConfig, dtype: str, *, max_num_seqs: int, prefill_chunk_size: int = 32) -> LLM:
    cache = CacheConfig(
        dtype=dtype,
        block_size=4,
        max_num_seqs=max_num_seqs,
        max_seq_len=60,
        prefill_chunk_size=prefill_chunk_size,
        max_source_len=40,
    )
    return LLM(
        build(config, dtype=getattr(torch, dtype)),
        None,
        cache,
        engine_config=EngineConfig(max_num_batched_tokens=256, deterministic=True),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "how",
    [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9, "seed": 3}, {"temperature": 1.3, "top_k": 9, "seed": 4}],
)
def test_tokens_and_their_log_probabilities(how: dict[str, float], dtype: str) -> None:
    draw = random.Random(1)
    prompts = [[draw.randrange(VOCAB) for _ in range(n)] for n in (3, 30, 11, 7, 22)]
    options = how | {"max_tokens": 16, "logprobs": 3}
    with (
        llm_of(model_config(), dtype, max_num_seqs=4, prefill_chunk_size=6) as many,
        llm_of(model_config(), dtype, max_num_seqs=1) as one,
    ):
        together = many.generate(prompts, **options)
        for prompt, done in zip(prompts, together, strict=True):
            alone = one.generate(prompt, **options)
            assert alone.tokens == done.tokens and alone.logprobs == done.logprobs


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_beam_search(dtype: str) -> None:
    """Beams are one row of cross-attention; alone and in a batch."""
    draw = random.Random(1)
    sources = [[draw.randrange(SOURCE_VOCAB) for _ in range(n)] for n in (3, 30, 11, 7, 22)]
    options = {"num_beams": 3, "n": 2, "max_tokens": 12, "target_prefix": [1]}
    config = pair_config("t5", own=True)
    with (
        llm_of(config, dtype, max_num_seqs=9, prefill_chunk_size=6) as many,
        llm_of(config, dtype, max_num_seqs=3) as one,
    ):
        for source, done in zip(sources, many.generate(sources, **options), strict=True):
            alone = one.generate(source, **options)
            assert replace(alone, timings=done.timings) == done


@pytest.mark.parametrize("dtype", DTYPES)
def test_encoder_outputs_have_the_same_bits(dtype: str) -> None:
    draw = random.Random(1)
    texts = [[draw.randrange(VOCAB) for _ in range(n)] for n in (3, 30, 11, 30, 22, 1)]
    config = encoder_config("alibi")
    with llm_of(config, dtype, max_num_seqs=6) as many, llm_of(config, dtype, max_num_seqs=1) as one:
        for pool in ("mean", "first"):
            together = many.embed(texts, pool=pool)
            assert all(
                torch.equal(one.embed(text, pool=pool)[0], row) for text, row in zip(texts, together, strict=True)
            )


def test_uncached_logits_have_the_same_bits() -> None:
    with llm_of(model_config(), "float32", max_num_seqs=2) as llm:
        tokens = [random.Random(1).randrange(VOCAB) for _ in range(40)]
        prefixes = [llm.logits(tokens[: n + 1])[-1] for n in range(40)]
        assert torch.equal(torch.stack(prefixes), llm.logits(tokens))


# ---------------------------------------------------------------- without it; what breaks it


def test_without_determinism_bits_differ() -> None:
    """The products of one row and of several rows differ in float32, as do those of a chunk and of a token."""
    model = build(model_config(), dtype=torch.float32)
    streams = streams_of("ragged", random.Random(7))
    case = {"layout": "paged", "dtype": "float32", "heads": "gqa", "scenario": "ragged"}
    assert differences(model, streams, drive(model, cache_of(case), streams)) > 0


@pytest.mark.parametrize("broken", ["products", "activations", "attention"])
def test_each_part_is_needed(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = model_config("alibi")
    assert config.decoder is not None
    kinds = {"L": replace(config.decoder.layer_types["L"], mlp=cfg.PlainMLPConfig(40, "silu"))}
    model = build(replace(config, decoder=replace(config.decoder, layer_types=kinds)), dtype=torch.float32)
    if broken == "products":
        monkeypatch.setattr("kvad.ops.linear.tiled_matmul", lambda x, weight, bias, tiles: F.linear(x, weight, bias))
    elif broken == "activations":
        monkeypatch.setattr(batch_invariant, "elementwise", lambda f, x: f(x))
    else:
        monkeypatch.setattr(sub_batch, "invariant_attention", lambda *args: dot_product_attention(*args[:-1]).out)
    streams = streams_of("mixed", random.Random(7))
    case = {"layout": "paged", "dtype": "float32", "heads": "gqa", "scenario": "mixed"}
    assert differences(model, streams, drive(model, cache_of(case), streams, deterministic=True)) > 0


# ---------------------------------------------------------------- its means


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("outer", "inner"), [(3, 24), (40, 24), (67, 40), (96, 64)])
def test_a_row_of_a_product_has_the_same_bits_at_any_index(outer: int, inner: int, dtype: torch.dtype) -> None:
    tiles = find_invariant_tiles([MatmulShape(inner, outer, dtype, bias=True)])
    draw = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, generator=draw).to(dtype) for shape in ((300, inner), (outer, inner), (outer,))
    )
    right = tiled_matmul(x, weight, bias, tiles)
    torch.testing.assert_close(right, F.linear(x, weight, bias))
    for low, high in ((0, 1), (7, 9), (5, 45), (100, 233), (299, 300)):
        assert torch.equal(tiled_matmul(x[low:high], weight, bias, tiles), right[low:high])
    assert tiled_matmul(x[:0], weight, bias, tiles).shape == (0, outer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_element_has_the_same_bits_at_any_index(dtype: torch.dtype) -> None:
    x = (3 * torch.randn(70_000, generator=torch.Generator().manual_seed(0))).to(dtype)
    slopes = torch.tensor([0.2], dtype=dtype), torch.tensor([-1.0], dtype=dtype)
    for f, *rest in ((F.silu,), (F.gelu,), (torch.sigmoid,), (xielu, *slopes)):
        right = elementwise(f, x, *rest)
        torch.testing.assert_close(right, f(x, *rest))
        for low, high in ((0, 1), (3, 20), (63, 130), (16_000, 33_333)):
            assert torch.equal(elementwise(f, x[low:high], *rest), right[low:high])
        assert torch.equal(elementwise(f, x.view(700, 100)[:, 3:50], *rest), right.view(700, 100)[:, 3:50])


def test_tiles_cover_all_rows() -> None:
    assert list(split_tiles(45, (8, 32))) == [(0, 32), (32, 40), (40, 48)]
    assert list(split_tiles(1, (8, 32, 128))) == [(0, 8)] and list(split_tiles(0, (8,))) == []


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_threads(count: int, threads: None) -> None:
    torch.set_num_threads(count)
    model = build(model_config(), dtype=torch.float32)
    streams = streams_of("mixed", random.Random(7))
    case = {"layout": "paged", "dtype": "float32", "heads": "gqa", "scenario": "mixed"}
    assert differences(model, streams, drive(model, cache_of(case), streams, deterministic=True)) == 0


def test_short_convolutions_are_batch_invariant() -> None:
    model = build(model_config(heads="short-conv", layers=3), dtype=torch.float32)
    streams = streams_of("mixed", random.Random(7))
    case = {"layout": "paged", "dtype": "float32", "heads": "short-conv", "scenario": "mixed"}
    assert differences(model, streams, drive(model, cache_of(case), streams, deterministic=True)) == 0


# ---------------------------------------------------------------- refusals


def refused(model: Transformer, dtype: str = "float32") -> str:
    with pytest.raises(ConfigError) as error:
        Engine(model, CacheConfig(dtype=dtype, max_num_seqs=1, max_seq_len=16), EngineConfig(deterministic=True))
    return str(error.value)


def test_unsupported_models_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "float16" in refused(build(model_config(), dtype=torch.float16), "float16")
    assert "gated recurrence" in refused(build(model_config(heads="recurrence"), dtype=torch.float32))
    assert "gated delta rule" in refused(build(model_config(heads="delta"), dtype=torch.float32))
    with pytest.raises(ConfigError, match="is not supported with disentangled attention"):
        make_batch_invariant(GoldenModel(("5", "deberta-v2")).model())
    assert "is not supported on meta" in refused(build(model_config(), dtype=torch.float32).to("meta"))
    real = F.linear
    monkeypatch.setattr(F, "linear", lambda x, *rest: real(x, *rest) + 1e-6 * torch.arange(len(x))[:, None])
    assert "depends on the batch" in refused(build(model_config(), dtype=torch.float32))


def test_a_tile_that_disagrees_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    real = F.linear
    monkeypatch.setattr(F, "linear", lambda x, *rest: real(x, *rest) * (1 + 1e-6 * (len(x) < 20)))
    assert find_invariant_tiles([MatmulShape(24, 40, torch.float32)]) == TileSizes((32, 128))
