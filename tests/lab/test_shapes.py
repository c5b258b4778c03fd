"""Known shapes: the parameters of each are those of the published checkpoint, and what they cache is theirs."""

import pytest

from kvad.cache.weights import num_parameters
from kvad.config import ModelConfig, mixers
from kvad.errors import UsageError
from kvad.lab.shapes import SHAPES, shape

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
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name):
    assert num_parameters(shape(name)) == PUBLISHED[name]


def test_every_shape_is_held_against_something():
    assert set(SHAPES) - set(PUBLISHED) == {"gpt3-175b", "notes-example"}


def test_gpt3_is_about_175_billion():
    assert num_parameters(shape("gpt3-175b")) == pytest.approx(175e9, rel=0.003)


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_survives_json(name):
    config = shape(name)
    assert ModelConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()


@pytest.mark.parametrize(
    ("name", "kv_heads", "dim", "windows"),
    [
        ("llama-2-7b", 32, 128, {None}),
        ("llama-3-8b", 8, 128, {None}),
        ("mistral-7b", 8, 128, {4096}),
        ("qwen2.5-0.5b", 2, 64, {None}),
        ("qwen3-0.6b", 8, 128, {None}),
        ("gemma-2-2b", 4, 256, {4096, None}),
        ("falcon-7b", 1, 64, {None}),
        ("gpt3-175b", 96, 128, {None}),
        ("notes-example", 32, 64, {None}),
    ],
)
def test_what_is_cached(name, kv_heads, dim, windows):
    specs = mixers(shape(name))
    assert {(spec.kv_heads, spec.head_dim, spec.value_dim) for spec in specs} == {(kv_heads, dim, dim)}
    assert {spec.window for spec in specs} == windows


def test_gemma_alternates_from_a_windowed_layer():
    assert [spec.window for spec in mixers(shape("gemma-2-2b"))][:3] == [4096, None, 4096]


def test_names_are_case_insensitive_and_the_nearest_is_offered():
    assert shape("GPT2") == shape("gpt2")
    with pytest.raises(UsageError) as caught:
        shape("lama-3-8b")
    assert caught.value.hint == "did you mean 'llama-3-8b'?"
