"""What the goldens of encoder-decoders do not show: other files of one model, options refused, versions at odds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvad.checkpoint.conversion import HFConfigReader, read_tensors, resolve_config, write_tensors
from kvad.checkpoint.families import FAMILIES, UNSUPPORTED, find_family
from kvad.config.layers import LanguageHeadConfig
from kvad.config.model import ModelConfig
from kvad.config.parameter_shapes import weight_shapes
from kvad.errors import CheckpointError
from kvad.model.transformer import Transformer
from tests.checkpoint.test_families import CASES, KNOWN, OTHERWISE, Read, _step, kl, outputs
from tests.hf_parity import checkpoint as oracle

PAIRS = [case for case in KNOWN if oracle.load(*case)[0]["kind"] == "encdec" and case not in OTHERWISE]


def test_every_case_is_known() -> None:
    assert {case for case in CASES if oracle.load(*case)[0]["kind"] == "encdec"} == {*PAIRS, *OTHERWISE}


def config_of(name: str, version: str = "5", **changes: Any) -> ModelConfig:
    fields = HFConfigReader({**oracle.load(version, name)[0]["config"], **changes}, "config.json")
    return find_family(fields.model_type).read(fields)


def tensors_of(read: Read, theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(read_tensors(read.family, read.config, theirs, "model.safetensors"))


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize(("version", "name"), PAIRS, ids=[f"{name}-{version}" for version, name in PAIRS])
def test_encoder_outputs(version: str, name: str, tmp_path: Path) -> None:
    read = Read(version, name, tmp_path)
    tokens, expected = read.tensor("long/input_ids"), read.tensor("long/encoder_last_hidden_state")
    assert tokens is not None and expected is not None
    with torch.inference_mode():
        torch.testing.assert_close(read.model().encode(_step(tokens)), expected)


def test_t5gemma_of_transformers_5_sees_one_token_more(tmp_path: Path) -> None:
    read = Read("5", "t5gemma", tmp_path)
    expected, encoder = read.tensor("long/logits"), read.config.encoder
    assert expected is not None and encoder is not None
    assert (outputs(read, "long") - expected).abs().max() > 0.1
    local = encoder.layer_types["L"]
    assert local.attention.window == 8
    wider = replace(local, attention=replace(local.attention, window=9))
    read.config = replace(read.config, encoder=replace(encoder, layer_types={**encoder.layer_types, "L": wider}))
    for run in ("long", "ragged0", "ragged1", "ragged2"):
        theirs = read.tensor(f"{run}/logits")
        assert theirs is not None
        ours = outputs(read, run)
        torch.testing.assert_close(ours, theirs)
        assert kl(ours, theirs) <= 1e-9


@pytest.mark.parametrize("name", ["t5gemma", "blenderbot-small", "umt5", "marian-two-vocabularies"])
def test_weight_shapes_are_the_state_dict(name: str) -> None:
    config = config_of(name)
    assert weight_shapes(config) == {key: tuple(value.shape) for key, value in Transformer(config).state_dict().items()}


SCALES = [
    ("t5", {}, True),
    ("t5", {"tie_word_embeddings": False}, False),
    ("t5", {"tie_word_embeddings": True, "scale_decoder_outputs": False}, False),
    ("mt5", {}, False),
    ("mt5", {"tie_word_embeddings": True, "transformers_version": "4.57.6"}, True),
    ("mt5", {"tie_word_embeddings": True, "transformers_version": "5.23.0"}, False),
    ("umt5", {"tie_word_embeddings": False, "transformers_version": "4.31.0"}, False),
    ("umt5", {"tie_word_embeddings": True, "transformers_version": "5.23.0"}, True),
]


@pytest.mark.parametrize(("model_type", "said", "scaled"), SCALES)
def test_whether_logits_are_scaled(model_type: str, said: dict[str, Any], scaled: bool) -> None:
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 11}
    config = find_family(model_type).read(HFConfigReader({"model_type": model_type, **sizes, **said}, "config.json"))
    assert config.head == LanguageHeadConfig(logit_scale=0.25 if scaled else 1.0)


# ---------------------------------------------------------------- other files of the same model


def test_a_file_without_the_shared_table(tmp_path: Path) -> None:
    """MADLAD-400: the table stands under the decoder's name, and the head beside it is another matrix."""
    read = Read("4.57", "t5-v1.1", tmp_path)
    theirs = dict(read.theirs)
    theirs["decoder.embed_tokens.weight"] = theirs.pop("shared.weight")
    ours = tensors_of(read, theirs)
    assert all(torch.equal(ours[key], tensor) for key, tensor in read.ours.items())


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_copies_of_the_table_must_be_equal(name: str, tmp_path: Path) -> None:
    read = Read("5", name, tmp_path)
    prefix = read.family.prefix
    copy, table = f"{prefix}encoder.embed_tokens.weight", read.theirs[f"{prefix}shared.weight"]
    ours = tensors_of(read, {**read.theirs, copy: table.clone()})
    assert all(torch.equal(ours[key], tensor) for key, tensor in read.ours.items())
    with pytest.raises(CheckpointError, match=r"encoder\.embed_tokens\.weight differs from .*shared\.weight"):
        tensors_of(read, {**read.theirs, copy: table + 1})


def test_a_file_of_the_base_model(tmp_path: Path) -> None:
    """facebook/bart-base: no prefix, and no bias of the head."""
    read = Read("5", "bart", tmp_path)
    theirs = {key.removeprefix("model."): tensor for key, tensor in read.theirs.items() if key != "final_logits_bias"}
    ours = tensors_of(read, theirs)
    assert not ours["head.bias"].any()
    assert all(torch.equal(ours[key], tensor) for key, tensor in read.ours.items() if key != "head.bias")


def test_a_table_in_the_file_is_the_one_that_is_computed(tmp_path: Path) -> None:
    """OPUS-MT's files hold Marian's sinusoids, in half precision; another table would be another model."""
    read = Read("5", "marian", tmp_path)
    written = dict(write_tensors(read.family, read.config, read.ours))
    key = "model.encoder.embed_positions.weight"
    tensors_of(read, {**written, key: written[key].half()})
    with pytest.raises(CheckpointError, match="differs from the table that the config describes"):
        tensors_of(read, {**written, key: written[key].roll(1, 0)})


def test_a_head_that_is_not_tied_is_read_and_not_written(tmp_path: Path) -> None:
    """transformers 5 reads such a file so; no config says it of BART."""
    read = Read("5", "bart", tmp_path)
    head = read.theirs["model.shared.weight"] + 1
    theirs = {**read.theirs, "lm_head.weight": head}
    read.config = resolve_config(read.family, read.config, theirs)
    assert torch.equal(tensors_of(read, theirs)["head.weight"], head)
    with pytest.raises(CheckpointError, match="cannot express"):
        read.family.write(read.config)


def test_three_tables_where_nothing_is_tied(tmp_path: Path) -> None:
    read = Read("5", "bart", tmp_path)
    table = read.theirs["model.shared.weight"]
    own = {"model.encoder.embed_tokens.weight": table + 1, "model.decoder.embed_tokens.weight": table + 2}
    read.config = config_of("bart", tie_word_embeddings=False)
    ours = tensors_of(read, {**read.theirs, **own, "lm_head.weight": table + 3})
    for step, key in enumerate(("encoder_embedding.tokens.weight", "embedding.tokens.weight", "head.weight"), start=1):
        assert torch.equal(ours[key], table + step)


# ---------------------------------------------------------------- what is refused

OPTIONS = [
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
]


@pytest.mark.parametrize(("name", "changes", "word"), OPTIONS, ids=[f"{n}-{w}" for n, _, w in OPTIONS])
def test_an_option_is_refused_by_name(name: str, changes: dict[str, Any], word: str) -> None:
    with pytest.raises(CheckpointError, match=word):
        config_of(name, **changes)


@pytest.mark.parametrize("model_type", UNSUPPORTED)
def test_a_family_is_refused_with_its_reason(model_type: str) -> None:
    assert model_type not in FAMILIES
    with pytest.raises(CheckpointError, match=model_type) as raised:
        find_family(model_type)
    assert raised.value.hint == UNSUPPORTED[model_type]


def test_umt5_has_no_tied_head_that_is_not_scaled() -> None:
    config = replace(config_of("umt5", "4.57"), tie_embeddings=True)
    with pytest.raises(CheckpointError, match="umt5 cannot express"):
        find_family("umt5").write(config)


@pytest.mark.parametrize("family", ["bart", "t5", "t5gemma"])
def test_half_an_encoder_decoder_is_not_written(family: str) -> None:
    with pytest.raises(CheckpointError, match=f"{family} cannot express"):
        find_family(family).write(config_of("gpt2"))
