"""Known models: their parameters and cache shapes equal those of the published checkpoints."""

import pytest

from kvad.checkpoint.conversion import HFConfigReader
from kvad.checkpoint.families import find_family
from kvad.config.model import ModelConfig, attention_specs
from kvad.config.parameter_shapes import num_parameters
from kvad.errors import UsageError
from kvad.planning.known_models import KNOWN_MODELS, PUBLISHED_DTYPES, known_model, published_dtype

BART = {"layers": 6, "attention_heads": 12, "ffn_dim": 3072}
T5 = {
    "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_kv": 64, "vocab_size": 32128,
    "n_positions": 512, "relative_attention_num_buckets": 32, "layer_norm_epsilon": 1e-6,
}  # fmt: skip
MARIAN = {"layers": 6, "attention_heads": 8, "ffn_dim": 2048}

# As published (model cards, safetensors indices); gpt3-175b and notes-example have no checkpoint.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "opt-125m": 125_239_296,
    "bloom-560m": 559_214_592,
    "falcon-7b": 6_921_720_704,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "smollm-135m": 134_515_008,
    "tinyllama-1.1b": 1_100_048_384,
    "bert-base": 109_514_298,  # with the masked-language-model head
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "bart-base": 139_420_416 + 50_265,  # final_logits_bias is a buffer there
    # the published number counts both sinusoid tables and not that bias
    "marian-base": 74_410_496 - 2 * 512 * 512 + 58_101,
}

# The parts of their config.json that define the model.
FILES = {
    "bert-base": {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM"],
        "hidden_size": 768,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "intermediate_size": 3072,
        "vocab_size": 30522,
        "type_vocab_size": 2,
        "max_position_embeddings": 512,
        "layer_norm_eps": 1e-12,
        "hidden_act": "gelu",
    },
    "t5-small": {**T5, "d_model": 512, "d_ff": 2048, "num_layers": 6, "num_heads": 8},
    "t5-base": {**T5, "d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
    "bart-base": {
        "model_type": "bart",
        "architectures": ["BartModel"],
        "d_model": 768,
        "vocab_size": 50265,
        **{f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in BART.items()},
        "max_position_embeddings": 1024,
        "activation_function": "gelu",
        "scale_embedding": False,
    },
    "marian-base": {
        "model_type": "marian",
        "architectures": ["MarianMTModel"],
        "d_model": 512,
        "vocab_size": 58101,
        **{f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in MARIAN.items()},
        "max_position_embeddings": 512,
        "activation_function": "swish",
        "scale_embedding": True,
    },
}


@pytest.mark.parametrize("name", FILES)
def test_config_equals_the_one_read_from_hugging_face(name):
    fields = HFConfigReader(FILES[name], "config.json")
    assert find_family(fields.model_type).read(fields) == known_model(name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_equal_published_ones(name):
    assert num_parameters(known_model(name)) == PUBLISHED[name]


def test_every_model_has_a_reference():
    assert set(KNOWN_MODELS) - set(PUBLISHED) == {"gpt3-175b", "notes-example", "transformer-base"}


@pytest.mark.parametrize(
    ("name", "published", "tolerance"),
    [
        ("gpt3-175b", 175e9, 0.003),
        ("transformer-base", 65e6, 0.04),  # table 3 gives 65 million, and "about 37000" tokens
    ],
)
def test_rounded_parameter_counts(name, published, tolerance):
    assert num_parameters(known_model(name)) == pytest.approx(published, rel=tolerance)


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_json_round_trip(name):
    config = known_model(name)
    assert ModelConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()


@pytest.mark.parametrize(
    ("name", "kv_heads", "dim", "windows"),
    [
        ("llama-2-7b", 32, 128, [None]),
        ("llama-3-8b", 8, 128, [None]),
        ("mistral-7b", 8, 128, [4096]),
        ("qwen2.5-0.5b", 2, 64, [None]),
        ("qwen3-0.6b", 8, 128, [None]),
        ("gemma-2-2b", 4, 256, [4096, None]),
        ("falcon-7b", 1, 64, [None]),
        ("gpt3-175b", 96, 128, [None]),
        ("notes-example", 32, 64, [None]),
    ],
)
def test_cached_shapes(name, kv_heads, dim, windows):
    specs = attention_specs(known_model(name))
    assert {(spec.num_kv_heads, spec.head_dim, spec.value_dim) for spec in specs} == {(kv_heads, dim, dim)}
    assert {spec.window for spec in specs} == set(windows)
    assert [spec.window for spec in specs[: len(windows)]] == windows


def test_names_are_case_insensitive_with_suggestions():
    assert known_model("GPT2") == known_model("gpt2")
    with pytest.raises(UsageError) as caught:
        known_model("lama-3-8b")
    assert caught.value.hint == "did you mean 'llama-3-8b'?"


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("gpt2", "float32"), ("llama-2-7b", "float16"), ("Llama-3-8B", "bfloat16"), ("t5-base", "float32")],
)
def test_published_dtypes(name, dtype):
    assert published_dtype(name) == dtype
    assert all(names <= KNOWN_MODELS.keys() for names in PUBLISHED_DTYPES.values())
