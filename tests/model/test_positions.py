"""Position encodings compared with transformers' functions, and the rotary regime of a sequence."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as falcon_s_alibi
from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding
from transformers.models.t5.modeling_t5 import T5Attention

from kvad.config import ModelConfig
from kvad.config import layers as cfg
from kvad.config.layers import (
    DynamicScalingConfig,
    LinearScalingConfig,
    Llama3ScalingConfig,
    LongRopeScalingConfig,
    RopeConfig,
    YarnScalingConfig,
)
from kvad.config.layers import SinusoidalPositionsConfig as Sinusoidal
from kvad.model.no_cache import NoCache
from kvad.model.positions import (
    alibi_slopes,
    rope_attention_factor,
    rope_frequencies,
    short_regime_len,
    sinusoidal_embedding,
)
from kvad.model.transformer import Transformer
from kvad.model_input import AlibiSlopes, ModelInput, RelativeBuckets, SubBatch
from kvad.ops.position_bias import position_bias, t5_bucket
from tests.support.random_models import VOCAB, build, model_config

# ---------------------------------------------------------------- rope, frequencies and factors

DIM, THETA, ORIGINAL = 24, 5000.0, 64
SHORT, LONG = tuple(1 + 0.05 * i for i in range(DIM // 2)), tuple(1.5 + 0.7 * i for i in range(DIM // 2))
OLD: dict[str, Any] = {"original_max_position_embeddings": ORIGINAL}
# our config, their config, other keys of theirs
SCALINGS: dict[str, tuple[Any, dict[str, Any] | None, dict[str, Any]]] = {
    "none": (None, None, {}),
    "linear": (LinearScalingConfig(3.0), {"rope_type": "linear", "factor": 3.0}, {}),
    "dynamic": (DynamicScalingConfig(2.5, ORIGINAL), {"rope_type": "dynamic", "factor": 2.5}, {}),
    "llama3": (
        Llama3ScalingConfig(8.0, ORIGINAL),
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **OLD},
        {},
    ),
    "llama3-other-bands": (
        Llama3ScalingConfig(32.0, 512, 1.5, 9.0),
        {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.5,
            "high_freq_factor": 9.0,
            "original_max_position_embeddings": 512,
        },
        {},
    ),
    "yarn": (YarnScalingConfig(4.0, ORIGINAL), {"rope_type": "yarn", "factor": 4.0, **OLD}, {}),
    "yarn-not-truncated": (
        YarnScalingConfig(4.0, 4096, 16.0, 2.0, truncate=False),
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        {},
    ),
    "yarn-long": (
        YarnScalingConfig(40.0, 4096),
        {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096},
        {},
    ),
    "yarn-mscale": (
        YarnScalingConfig(40.0, ORIGINAL, mscale=0.7, mscale_all_dim=0.9),
        {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 0.9, **OLD},
        {},
    ),
    "yarn-one-mscale": (
        YarnScalingConfig(40.0, ORIGINAL, mscale=0.7),
        {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, **OLD},
        {},
    ),
    "yarn-factor": (
        YarnScalingConfig(4.0, ORIGINAL, attention_factor=1.3),
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3, **OLD},
        {},
    ),
    "yarn-one-band": (YarnScalingConfig(4.0, 6), {"rope_type": "yarn", "factor": 4.0} | dict.fromkeys(OLD, 6), {}),
    "longrope": (
        LongRopeScalingConfig(SHORT, LONG, ORIGINAL, factor=6.0),
        {"rope_type": "longrope", "short_factor": list(SHORT), "long_factor": list(LONG), "factor": 6.0},
        {},
    ),
    "longrope-by-lengths": (
        LongRopeScalingConfig(SHORT, LONG, ORIGINAL),
        {"rope_type": "longrope", "short_factor": list(SHORT), "long_factor": list(LONG)},
        {"original_max_position_embeddings": ORIGINAL, "max_position_embeddings": 4 * ORIGINAL},
    ),
    "longrope-factor": (
        LongRopeScalingConfig(SHORT, LONG, ORIGINAL, factor=6.0, attention_factor=0.8),
        {
            "rope_type": "longrope",
            "short_factor": list(SHORT),
            "long_factor": list(LONG),
            "factor": 6.0,
            "attention_factor": 0.8,
        },
        {},
    ),
}


def their_rope(name: str, limit: int | None, fraction: float = 1.0) -> tuple[Tensor, float]:
    _, scaling, more = SCALINGS[name]
    head_dim = int(DIM / fraction)
    options = {"max_position_embeddings": ORIGINAL, "head_dim": head_dim, "rope_theta": THETA, **more}
    config = LlamaConfig(hidden_size=96, num_attention_heads=4, partial_rotary_factor=fraction, **options)
    config.rope_scaling = scaling
    if "original_max_position_embeddings" in more:
        config.original_max_position_embeddings = more["original_max_position_embeddings"]
    return ROPE_INIT_FUNCTIONS["default" if scaling is None else scaling["rope_type"]](config, "cpu", seq_len=limit)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("limit", [20, ORIGINAL, ORIGINAL + 1, 4 * ORIGINAL, 1000])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_and_factor_equal_transformers(name: str, limit: int, fraction: float) -> None:
    """Their ``seq_len`` is our maximum sequence length."""
    rope = RopeConfig(THETA, fraction, scaling=SCALINGS[name][0])
    frequencies, factor = their_rope(name, limit, fraction)
    own = rope_frequencies(rope, int(DIM / fraction), limit)
    assert own.dtype == torch.float32 and own.shape == (DIM // 2,)
    torch.testing.assert_close(own, frequencies, rtol=0, atol=0)
    model_limit = SCALINGS[name][2].get("max_position_embeddings", ORIGINAL)
    assert rope_attention_factor(rope, model_limit) == pytest.approx(factor, rel=1e-12)


def test_every_scaling_changes_the_frequencies() -> None:
    """If two entries of the table above were equal, the test would cover less than it seems to."""
    plain = rope_frequencies(RopeConfig(THETA), DIM, 1000)
    seen = [(plain, 1.0)]
    for name, (scaling, _, _) in SCALINGS.items():
        if name != "none":
            rope = RopeConfig(THETA, scaling=scaling)
            one = (rope_frequencies(rope, DIM, 1000), rope_attention_factor(rope, 4 * ORIGINAL))
            assert not any(torch.equal(one[0], f) and one[1] == x for f, x in seen), name
            seen.append(one)


def test_unscaled_frequencies_equal_the_formula() -> None:
    for fraction, rotated in ((1.0, 24), (0.25, 6)):
        own = rope_frequencies(RopeConfig(THETA, fraction), DIM, 9)
        formula = [THETA ** (-2 * i / rotated) for i in range(rotated // 2)]
        torch.testing.assert_close(own.double(), torch.tensor(formula).double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", SCALINGS)
def test_a_model_has_two_regimes_if_their_frequencies_differ(name: str) -> None:
    rope = RopeConfig(THETA, scaling=SCALINGS[name][0])
    for max_seq_len in (1, 63, 64, 65, 128, 1000):
        short, long = (rope_frequencies(rope, DIM, n) for n in (min(ORIGINAL, max_seq_len), max_seq_len))
        expected = None if torch.equal(short, long) else ORIGINAL
        assert short_regime_len(rope, max_seq_len) == expected, max_seq_len
    assert (short_regime_len(rope, 1000) is not None) == (name.startswith("longrope") or name == "dynamic")


# ---------------------------------------------------------------- regime of a sequence


@torch.inference_mode()
def logits_of(
    model: Transformer, rows: list[tuple[list[int], int | None]], sub_batches: list[SubBatch] | None = None
) -> Tensor:
    """Return the logits of (the first tokens of a sequence, its number of tokens)."""
    tokens = torch.tensor([token for row, _ in rows for token in row])
    positions = torch.cat([torch.arange(len(row)) for row, _ in rows])
    limits = None
    if all(limit is not None for _, limit in rows):
        limits = torch.tensor([limit for row, limit in rows for _ in row])
    split_at = tuple(sub_batches or [SubBatch(1, len(row), len(row)) for row, _ in rows])
    step = ModelInput(tokens, positions, split_at, torch.arange(len(tokens)), seq_lens=limits)
    return model.logits(model(step, NoCache(model.config, kernel="reference")), step.logit_indices)


@pytest.mark.parametrize("position", ["rope-dynamic", "rope-longrope"])
def test_sequences_of_different_lengths_equal_solo_runs(position: str) -> None:
    model = build(model_config(position))
    draw = torch.Generator().manual_seed(0)
    texts = [torch.randint(VOCAB, (n,), generator=draw).tolist() for n in (9, 9, 14)]
    limits = [20, 60, 90]  # the first is within the original length of 20, the others beyond
    together = logits_of(model, list(zip(texts, limits, strict=True)), [SubBatch(2, 9, 9), SubBatch(1, 14, 14)])
    solo = torch.cat([logits_of(model, [row]) for row in zip(texts, limits, strict=True)])
    torch.testing.assert_close(together, solo, rtol=0, atol=1e-12)
    other = torch.cat([logits_of(model, [(text, 19)]) for text in texts])
    assert float((other - solo)[9:].abs().max()) > 1e-3  # the regime matters
    torch.testing.assert_close(logits_of(model, [(texts[2], 21)]), logits_of(model, [(texts[2], 90)]))  # two regimes
    torch.testing.assert_close(logits_of(model, [(texts[2], None)]), logits_of(model, [(texts[2], 96)]))


@pytest.mark.parametrize("position", ["rope", "rope-partial"])
def test_other_encodings_ignore_the_length(position: str) -> None:
    model, text = build(model_config(position)), list(range(12))
    assert torch.equal(logits_of(model, [(text, 13)]), logits_of(model, [(text, 90)]))


# ---------------------------------------------------------------- biases


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 6, 7, 8, 12, 16, 20, 33, 40, 112])
def test_alibi_slopes_equal_bloom(heads: int) -> None:
    reference = build_alibi_tensor(torch.ones(1, 5), heads, torch.float32)  # slope * key position
    torch.testing.assert_close(torch.tensor(alibi_slopes(heads)), reference[:, 0, 1], rtol=1e-6, atol=0)
    bias = position_bias(AlibiSlopes(torch.tensor(alibi_slopes(heads))), torch.tensor([[4]]), torch.arange(5)[None])
    shifted = reference - reference[:, :, 4:]  # the softmax ignores a constant: 0 at the query itself
    torch.testing.assert_close(bias[0], shifted, rtol=1e-5, atol=1e-6)


def test_alibi_slopes_equal_the_paper() -> None:
    assert alibi_slopes(8) == [2.0**-h for h in range(1, 9)]
    expected = [2**-e for e in (1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5)]
    assert alibi_slopes(12) == pytest.approx(expected, rel=1e-12)


def test_alibi_is_symmetric_for_later_keys() -> None:
    bias = position_bias(AlibiSlopes(torch.tensor([0.5])), torch.tensor([[3]]), torch.arange(7)[None])
    assert bias[0, 0, 0].tolist() == [-1.5, -1.0, -0.5, 0.0, -0.5, -1.0, -1.5]
    halved = position_bias(AlibiSlopes(torch.tensor([0.5]), 0.5), torch.tensor([[3]]), torch.arange(7)[None])
    assert torch.equal(halved, bias / 2)


def test_rounded_alibi_equals_falcon() -> None:
    """Far from the beginning neighboring keys share a bfloat16 number: 5 heads, 7 queries at the end of 900 keys."""
    heads, at, factor = 5, torch.arange(893, 900), 8**-0.5
    reference = falcon_s_alibi(torch.ones(1, 900, dtype=torch.long), heads, torch.float32) * factor
    slopes = torch.tensor(alibi_slopes(heads)).bfloat16().float()
    bias = position_bias(AlibiSlopes(slopes, factor, round_to_bfloat16=True), at[None], torch.arange(900)[None])[0]
    torch.testing.assert_close(
        bias - bias[:, :, :1], (reference - reference[:, :, :1]).expand_as(bias), rtol=1e-5, atol=1e-5
    )
    exact = position_bias(AlibiSlopes(slopes, factor), at[None], torch.arange(900)[None])[0]
    assert (bias - exact).abs().max() > 0.1


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (8, 20), (64, 300), (6, 17)])
def test_t5_buckets_equal_transformers(buckets: int, max_distance: int, bidirectional: bool) -> None:
    ahead = torch.arange(150)[None, :] - torch.arange(0, 700, 7)[:, None]
    ahead = torch.cat((ahead, -ahead))
    reference = T5Attention._relative_position_bucket(ahead, bidirectional, buckets, max_distance)
    assert torch.equal(t5_bucket(ahead, buckets, max_distance, bidirectional), reference)
    assert reference.max() == (buckets - 1) and reference.min() == 0


def test_t5_buckets_of_known_distances() -> None:
    keys = torch.arange(10)
    assert t5_bucket(keys, 32, 128, True).tolist() == [0, 17, 18, 19, 20, 21, 22, 23, 24, 24]
    assert t5_bucket(keys - 9, 32, 128, True).tolist() == [8, 8, 7, 6, 5, 4, 3, 2, 1, 0]


def test_t5_bias_is_read_from_the_table() -> None:
    table = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
    bias = position_bias(RelativeBuckets(table, 128, True), torch.tensor([[4, 150]]), torch.arange(200)[None])
    for row, query in enumerate((4, 150)):
        bucket = T5Attention._relative_position_bucket(torch.arange(200) - query, True, 32, 128)
        assert torch.equal(bias[0, :, row], table[bucket].T)


# ---------------------------------------------------------------- sinusoids

POSITIONS = torch.tensor([0, 1, 2, 3, 77, 500])


@pytest.mark.parametrize("width", [4, 10, 64])
@pytest.mark.parametrize("form", ["interleaved", "concat", "fairseq"])
def test_sinusoids_equal_the_formula(form: Any, width: int) -> None:
    spec = Sinusoidal(base=500.0, form=form, offset=3)
    own = sinusoidal_embedding(POSITIONS, width, spec, torch.float64)
    half = width // 2
    for row, position in enumerate(POSITIONS.tolist()):
        for i in range(half):
            exponent = i / (half - 1) if form == "fairseq" else 2 * i / width
            angle = (position + 3) / 500.0**exponent
            s, c = (2 * i, 2 * i + 1) if form == "interleaved" else (i, half + i)
            assert own[row, s] == pytest.approx(math.sin(angle), abs=1e-10)
            assert own[row, c] == pytest.approx(math.cos(angle), abs=1e-10)


def test_concatenated_sinusoids_equal_marian() -> None:
    reference = MarianSinusoidalPositionalEmbedding(512, 32)
    reference._init_weight()
    own = sinusoidal_embedding(torch.arange(512), 32, Sinusoidal(form="concat"))
    torch.testing.assert_close(own, reference.weight.data, rtol=0, atol=1e-6)


def test_fairseq_sinusoids_equal_m2m100() -> None:
    reference = M2M100SinusoidalPositionalEmbedding.get_embedding(130, 32, padding_idx=None)
    own = sinusoidal_embedding(torch.arange(128), 32, Sinusoidal(form="fairseq", offset=2))
    torch.testing.assert_close(own, reference[2:130], rtol=0, atol=2e-5)  # their angles are float32


def test_sinusoid_forms_differ() -> None:
    tables = [
        sinusoidal_embedding(POSITIONS, 16, Sinusoidal(form=form)) for form in ("interleaved", "concat", "fairseq")
    ]  # type: ignore[arg-type]
    assert all(float((a - b).abs().max()) > 0.1 for i, a in enumerate(tables) for b in tables[:i])


def test_sinusoids_are_accurate_at_large_positions() -> None:
    """Angles are float64: at position ten million float32 would be off by half a radian."""
    offset = sinusoidal_embedding(torch.tensor([10_000_001]), 4, Sinusoidal())
    assert offset[0, 0].item() == pytest.approx(math.sin(10_000_001), abs=1e-6)


def test_layers_of_one_kind_share_a_table() -> None:
    shared = build(model_config("t5", layers=3))
    assert [n for n, _ in shared.named_parameters() if "relative" in n] == ["decoder.relative_bias.L"]
    mixer = cfg.AttentionConfig(6, head_dim=8, position=cfg.T5BiasConfig(8, 20, shared=False))
    kinds = {"L": cfg.LayerConfig(mixer, cfg.GatedMLPConfig(40))}
    own = build(ModelConfig(24, VOCAB, 96, cfg.StackConfig(3, kinds)))
    names = [n for n, _ in own.named_parameters() if "relative" in n]
    assert names == [f"decoder.layers.{i}.attention.relative_bias" for i in range(3)]
    text = torch.randint(VOCAB, (30,), generator=torch.Generator().manual_seed(0)).tolist()
    before = logits_of(own, [(text, 96)])
    for i in range(3):  # every table is used
        with torch.no_grad():
            own.decoder.layers[i].attention.relative_bias.add_(torch.randn(8, 6, dtype=torch.float64))  # type: ignore[union-attr,operator]
        after = logits_of(own, [(text, 96)])
        assert float((after - before).abs().max()) > 1e-3
        before = after
