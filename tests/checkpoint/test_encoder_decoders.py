"""Encoder-decoders beyond their golden files: other files of one model, refused options, different versions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvad.checkpoint.conversion import HFConfigReader, resolve_config, write_tensors
from kvad.checkpoint.families import FAMILIES, UNSUPPORTED, find_family
from kvad.config.layers import LanguageHeadConfig
from kvad.config.model import ModelConfig
from kvad.config.parameter_shapes import weight_shapes
from kvad.errors import CheckpointError
from kvad.model.transformer import Transformer
from tests.support.golden_models import DIFFERENT, META, READ, RUNS, GoldenModel, case_id, divergence, whole_input

ENCODER_DECODERS = [case for case in READ if META[case]["kind"] == "encdec" and case not in DIFFERENT]


def config_of(name: str, version: str = "5", **changes: Any) -> ModelConfig:
    fields = HFConfigReader({**META[version, name]["config"], **changes}, "config.json")
    return find_family(fields.model_type).read(fields)


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize("case", ENCODER_DECODERS, ids=case_id)
def test_encoder_outputs(case: tuple[str, str]) -> None:
    golden = GoldenModel(case)
    with torch.inference_mode():
        hidden = golden.model().encode(whole_input(golden.tensor("long/input_ids")))
    torch.testing.assert_close(hidden, golden.tensor("long/encoder_last_hidden_state"))


def test_t5gemma_of_transformers_5_sees_one_token_more() -> None:
    golden = GoldenModel(("5", "t5gemma"))
    encoder = golden.config.encoder
    assert encoder is not None
    assert (golden.outputs("long", golden.model()) - golden.expected("long")).abs().max() > 0.1
    local = encoder.layer_types["L"]
    assert local.attention.window == 8
    wider = replace(local, attention=replace(local.attention, window=9))
    golden.config = replace(golden.config, encoder=replace(encoder, layer_types={**encoder.layer_types, "L": wider}))
    model = golden.model()
    for run in RUNS:
        logits, expected = golden.outputs(run, model), golden.expected(run)
        torch.testing.assert_close(logits, expected)
        assert divergence(logits, expected) <= 1e-9


@pytest.mark.parametrize("name", ["t5gemma", "blenderbot-small", "umt5", "marian-two-vocabularies"])
def test_weight_shapes_equal_the_state_dict(name: str) -> None:
    config = config_of(name)
    assert weight_shapes(config) == {key: tuple(value.shape) for key, value in Transformer(config).state_dict().items()}


@pytest.mark.parametrize(
    ("model_type", "options", "is_scaled"),
    [
        ("t5", {}, True),
        ("t5", {"tie_word_embeddings": False}, False),
        ("t5", {"tie_word_embeddings": True, "scale_decoder_outputs": False}, False),
        ("mt5", {}, False),
        ("mt5", {"tie_word_embeddings": True, "transformers_version": "4.57.6"}, True),
        ("mt5", {"tie_word_embeddings": True, "transformers_version": "5.23.0"}, False),
        ("umt5", {"tie_word_embeddings": False, "transformers_version": "4.31.0"}, False),
        ("umt5", {"tie_word_embeddings": True, "transformers_version": "5.23.0"}, True),
    ],
)
def test_logits_are_scaled_as_in_the_version_that_wrote_the_file(
    model_type: str, options: dict[str, Any], is_scaled: bool
) -> None:
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 11}
    config = find_family(model_type).read(HFConfigReader({"model_type": model_type, **sizes, **options}, "config.json"))
    assert config.head == LanguageHeadConfig(logit_scale=0.25 if is_scaled else 1.0)


# ---------------------------------------------------------------- other files of the same model


def assert_equal_weights(golden: GoldenModel, stored: dict[str, Tensor], *, without: str = "") -> None:
    """Check that a file has the weights of the golden file, except for ``without``."""
    weights = golden.convert(stored)
    assert all(torch.equal(weights[name], tensor) for name, tensor in golden.weights.items() if name != without)


def test_a_file_without_the_shared_table() -> None:
    """MADLAD-400 has the table under the decoder's name, and the head is another matrix."""
    golden = GoldenModel(("4.57", "t5-v1.1"))
    stored = dict(golden.stored)
    stored["decoder.embed_tokens.weight"] = stored.pop("shared.weight")
    assert_equal_weights(golden, stored)


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_copies_of_the_table_must_be_equal(name: str) -> None:
    golden = GoldenModel(("5", name))
    prefix = golden.family.prefix
    copy, table = f"{prefix}encoder.embed_tokens.weight", golden.stored[f"{prefix}shared.weight"]
    assert_equal_weights(golden, {**golden.stored, copy: table.clone()})
    with pytest.raises(CheckpointError, match=r"encoder\.embed_tokens\.weight differs from .*shared\.weight"):
        golden.convert({**golden.stored, copy: table + 1})


def test_a_file_of_the_base_model() -> None:
    """facebook/bart-base has no prefix, and no bias of the head."""
    golden = GoldenModel(("5", "bart"))
    stored = {name.removeprefix("model."): tensor for name, tensor in golden.stored.items()}
    del stored["final_logits_bias"]
    assert not golden.convert(stored)["head.bias"].any()
    assert_equal_weights(golden, stored, without="head.bias")


def test_a_stored_sinusoidal_table_must_equal_the_computed_one() -> None:
    """OPUS-MT's files have Marian's sinusoids, in half precision."""
    golden = GoldenModel(("5", "marian"))
    written = dict(write_tensors(golden.family, golden.config, golden.weights))
    name = "model.encoder.embed_positions.weight"
    golden.convert({**written, name: written[name].half()})
    with pytest.raises(CheckpointError, match="differs from the table that the config describes"):
        golden.convert({**written, name: written[name].roll(1, 0)})


def test_an_untied_head_is_read_and_not_written() -> None:
    """transformers 5 reads such a file in the same way; no config of BART expresses it."""
    golden = GoldenModel(("5", "bart"))
    head = golden.stored["model.shared.weight"] + 1
    stored = {**golden.stored, "lm_head.weight": head}
    golden.config = resolve_config(golden.family, golden.config, stored)
    assert torch.equal(golden.convert(stored)["head.weight"], head)
    with pytest.raises(CheckpointError, match="cannot express"):
        golden.family.write(golden.config)


def test_three_tables_if_none_is_tied() -> None:
    golden = GoldenModel(("5", "bart"))
    table = golden.stored["model.shared.weight"]
    own = {"model.encoder.embed_tokens.weight": table + 1, "model.decoder.embed_tokens.weight": table + 2}
    golden.config = config_of("bart", tie_word_embeddings=False)
    weights = golden.convert({**golden.stored, **own, "lm_head.weight": table + 3})
    for offset, name in enumerate(("encoder_embedding.tokens.weight", "embedding.tokens.weight", "head.weight"), 1):
        assert torch.equal(weights[name], table + offset)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("name", "changes", "word"),
    [
        ("bart", {"architectures": ["BartForSequenceClassification"]}, "architectures"),
        ("bart", {"is_encoder_decoder": False}, "is_encoder_decoder"),
        ("bart", {"is_decoder": True}, "is_decoder"),
        ("bart", {"tie_encoder_decoder": True}, "tie_encoder_decoder"),
        ("bart", {"activation_function": "mish"}, "activation_function"),
        ("marian", {"decoder_vocab_size": 12}, "decoder_vocab_size"),
        ("marian", {"tie_word_embeddings": False}, "tie_word_embeddings"),
        ("t5", {"architectures": ["T5ForTokenClassification"]}, "architectures"),
        ("t5", {"feed_forward_proj": "sparse-relu"}, "feed_forward_proj"),
        ("t5", {"dense_act_fn": "mish"}, "dense_act_fn"),
        ("t5", {"tie_encoder_decoder": True}, "tie_encoder_decoder"),
        ("t5gemma", {"architectures": ["T5GemmaEncoderModel"]}, "architectures"),
        ("t5gemma", {"encoder": None}, "encoder"),
    ],
)
def test_unsupported_options_are_named(name: str, changes: dict[str, Any], word: str) -> None:
    with pytest.raises(CheckpointError, match=word):
        config_of(name, **changes)


@pytest.mark.parametrize("model_type", UNSUPPORTED)
def test_an_unsupported_type_is_refused_with_its_reason(model_type: str) -> None:
    assert model_type not in FAMILIES
    with pytest.raises(CheckpointError, match=model_type) as raised:
        find_family(model_type)
    assert raised.value.hint == UNSUPPORTED[model_type]


def test_umt5_has_no_tied_head_without_a_scale() -> None:
    config = replace(config_of("umt5", "4.57"), tie_embeddings=True)
    with pytest.raises(CheckpointError, match="umt5 cannot express"):
        find_family("umt5").write(config)


@pytest.mark.parametrize("family", ["bart", "t5", "t5gemma"])
def test_a_decoder_is_not_written_as_an_encoder_decoder(family: str) -> None:
    with pytest.raises(CheckpointError, match=f"{family} cannot express"):
        find_family(family).write(config_of("gpt2"))
