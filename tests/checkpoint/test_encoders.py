"""Encoders whose files decide what their configs leave open: poolers, heads, old names, biases, tables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvad.checkpoint.conversion import Family, HFConfigReader, read_tensors, resolve_config, write_tensors
from kvad.checkpoint.families import find_family
from kvad.checkpoint.families._encoder import POOLER
from kvad.config.layers import (
    ClassificationHeadConfig,
    LanguageHeadConfig,
    LearnedPositionsConfig,
    PoolingHeadConfig,
    SinusoidalPositionsConfig,
)
from kvad.config.model import ModelConfig
from kvad.config.parameter_shapes import weight_shapes
from kvad.errors import CheckpointError
from kvad.model.no_cache import NoCache
from kvad.model.transformer import Transformer
from tests.support.golden_models import whole_input

SMALL = {"vocab_size": 11, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 20}
DISTIL = {"vocab_size": 11, "dim": 12, "n_layers": 2, "n_heads": 3, "hidden_dim": 20, "max_position_embeddings": 16}
STEMS = {
    "bert": "Bert",
    "roberta": "Roberta",
    "roberta-prelayernorm": "RobertaPreLayerNorm",
    "distilbert": "DistilBert",
    "xlm-roberta-xl": "XLMRobertaXL",
    "mpnet": "MPNet",
    "albert": "Albert",
    "deberta-v2": "DebertaV2",
    "electra": "Electra",
    "roformer": "RoFormer",
    "modernbert": "ModernBert",
    "nomic_bert": "NomicBert",
}
DEBERTA = {"relative_attention": True, "share_att_key": True, "pos_att_type": ["c2p", "p2c"]}
ENDINGS = ("ForMaskedLM", "ForTokenClassification", "ForSequenceClassification", "Model")


def fields(model_type: str, ending: str, **options: Any) -> HFConfigReader:
    small = DISTIL if model_type == "distilbert" else {**SMALL, "max_position_embeddings": 16}
    small = {**small, **DEBERTA} if model_type == "deberta-v2" else small
    content = {"model_type": model_type, "architectures": [STEMS[model_type] + ending], **small, **options}
    return HFConfigReader(content, "config.json")


def file_of(family: Family, config: ModelConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in weight_shapes(config).items()}
    return dict(write_tensors(family, config, weights))


def case(model_type: str, ending: str, **options: Any) -> tuple[Family, ModelConfig, dict[str, Tensor]]:
    """Return the family, the config and the tensors of a file."""
    family = find_family(model_type)
    config = family.read(fields(model_type, ending, **options))
    return family, config, file_of(family, config)


def rewritten(family: Family, config: ModelConfig) -> ModelConfig:
    return family.read(HFConfigReader(family.write(config), "config.json"))


def load(family: Family, config: ModelConfig, stored: Mapping[str, Tensor]) -> tuple[ModelConfig, dict[str, Tensor]]:
    config = resolve_config(family, config, stored)
    return config, dict(read_tensors(family, config, stored, "model.safetensors"))


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("model_type", STEMS)
@pytest.mark.parametrize("tied", [True, False])
def test_every_task_round_trips(model_type: str, ending: str, tied: bool) -> None:
    family, config, stored = case(model_type, ending, tie_word_embeddings=tied)
    assert rewritten(family, config) == config
    read_back, weights = load(family, config, stored)
    assert read_back == config
    Transformer(config).load_state_dict(weights)
    back = dict(write_tensors(family, config, weights))
    assert back.keys() == stored.keys() and all(torch.equal(back[name], stored[name]) for name in stored)


@pytest.mark.parametrize("model_type", ["bert", "roberta", "mpnet", "albert"])
def test_a_base_model_has_a_pooler_if_its_file_has(model_type: str) -> None:
    family = find_family(model_type)
    config = family.read(fields(model_type, "Model"))
    assert config.head == POOLER
    stored = file_of(family, config)
    without = {name: tensor for name, tensor in stored.items() if not name.startswith("pooler")}
    assert len(without) == len(stored) - 2
    plain, _ = load(family, config, without)
    assert plain.head == PoolingHeadConfig()
    assert rewritten(family, plain) == plain


@pytest.mark.parametrize("model_type", STEMS)
def test_a_base_model_is_recognized_for_every_class_name(model_type: str) -> None:
    """Files of sentence-transformers name ForMaskedLM."""
    family = find_family(model_type)
    base = family.read(fields(model_type, "Model"))
    config, _ = load(family, family.read(fields(model_type, "ForMaskedLM")), file_of(family, base))
    assert config == base


def test_layers_of_a_group_share_parameters() -> None:
    """A group's layers have one set of tensors, which each of them applies."""
    family, config, stored = case("albert", "Model", num_hidden_layers=4, num_hidden_groups=2)
    assert [config.stack.parameter_index(index) for index in range(4)] == [0, 0, 1, 1]
    names = {name.split(".")[2] for name in stored if name.startswith("encoder.albert_layer_groups")}
    assert names == {"0", "1"}
    _, weights = load(family, config, stored)
    copied = replace(config, encoder=replace(config.stack, num_distinct_layers=None))
    copies = {
        name: weights[re.sub(r"layers\.(\d)", lambda match: f"layers.{int(match[1]) // 2}", name)]
        for name in weight_shapes(copied)
    }
    assert torch.equal(*(hidden_states(each, tensors) for each, tensors in ((config, weights), (copied, copies))))


def hidden_states(config: ModelConfig, weights: Mapping[str, Tensor]) -> Tensor:
    model = Transformer(config).eval()
    model.load_state_dict(weights)
    with torch.no_grad():
        return model(whole_input(torch.arange(7)), NoCache(config))


def test_old_norm_names_and_unused_heads() -> None:
    family, config, stored = case("bert", "ForMaskedLM")
    names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    old = {}
    for name, tensor in stored.items():
        end = next((end for end in names if name.endswith(end)), "")
        old[name.removesuffix(end) + names.get(end, "")] = tensor
    old["cls.seq_relationship.weight"] = old["bert.pooler.dense.weight"] = torch.zeros(1)
    assert not any(name.endswith("LayerNorm.weight") for name in old)
    _, weights = load(family, config, old)
    _, expected = load(family, config, stored)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize("model_type", ["bert", "roberta", "roformer"])
def test_a_bias_with_two_names(model_type: str) -> None:
    family, config, stored = case(model_type, "ForMaskedLM")
    (bias,) = (name for name in stored if name in family.copies)
    (other,) = family.copies[bias]
    _, weights = load(family, config, {other if name == bias else name: tensor for name, tensor in stored.items()})
    assert torch.equal(weights["head.bias"], stored[bias])
    load(family, config, {**stored, other: stored[bias].clone()})
    with pytest.raises(CheckpointError, match="differs"):
        load(family, config, {**stored, other: stored[bias] + 1})


def test_an_untied_bias_has_the_name_of_its_matrix() -> None:
    """transformers 5 leaves ``cls.predictions.bias`` unused then."""
    family, config, stored = case("bert", "ForMaskedLM", tie_word_embeddings=False)
    _, weights = load(family, config, {**stored, "cls.predictions.bias": torch.zeros(11)})
    assert torch.equal(weights["head.bias"], stored["cls.predictions.decoder.bias"])


def test_changed_sinusoids_are_learned_positions() -> None:
    family = find_family("distilbert")
    config = family.read(fields("distilbert", "ForMaskedLM", sinusoidal_pos_embds=True))
    assert isinstance(config.embedding.position, SinusoidalPositionsConfig)
    stored = file_of(family, config)
    name = "distilbert.embeddings.position_embeddings.weight"
    halved, _ = load(family, config, {**stored, name: stored[name].bfloat16()})
    assert halved == config
    changed, weights = load(family, config, {**stored, name: stored[name] + 0.1})
    assert changed.embedding.position == LearnedPositionsConfig(16)
    assert torch.equal(weights["embedding.positions.weight"], stored[name] + 0.1)


def test_roformer_table_must_match_the_config() -> None:
    family, config, stored = case("roformer", "ForMaskedLM")
    with pytest.raises(CheckpointError, match="embed_positions"):
        load(family, config, {**stored, "roformer.encoder.embed_positions.weight": torch.zeros(16, 4)})


def test_roformer_may_be_a_decoder() -> None:
    family = find_family("roformer")
    config = family.read(fields("roformer", "ForCausalLM", is_decoder=True))
    assert config.kind == "decoder" and config.stack.layer_types["L"].attention.causal
    assert rewritten(family, config) == config
    for ending, decoder in (("ForCausalLM", False), ("ForMaskedLM", True)):
        with pytest.raises(CheckpointError, match="is_decoder"):
            family.read(fields("roformer", ending, is_decoder=decoder))


def test_labels_are_read_in_order_and_written() -> None:
    names = {"1": "no", "0": "yes", "2": "maybe"}
    config = find_family("bert").read(fields("bert", "ForSequenceClassification", id2label=names))
    assert isinstance(config.head, ClassificationHeadConfig) and config.head.labels == ("yes", "no", "maybe")
    assert find_family("bert").write(config)["id2label"] == {"0": "yes", "1": "no", "2": "maybe"}
    with pytest.raises(CheckpointError, match="id2label"):
        find_family("bert").read(fields("bert", "ForTokenClassification", id2label={"1": "a", "2": "b"}))
    assert isinstance(
        find_family("bert").read(fields("bert", "ForMaskedLM", id2label={"x": "a"})).head, LanguageHeadConfig
    )


def test_electra_discriminator() -> None:
    config = find_family("electra").read(fields("electra", "ForPreTraining", embedding_size=6))
    assert isinstance(config.head, ClassificationHeadConfig) and config.head.labels == ("replaced",)
    assert find_family("electra").write(config)["architectures"] == ["ElectraForPreTraining"]


def test_both_formats_of_modernbert_layers() -> None:
    family = find_family("modernbert")
    old = family.read(
        fields("modernbert", "Model", num_hidden_layers=5, global_attn_every_n_layers=2, local_attention=8)
    )
    types = ["full_attention", "sliding_attention"] * 2 + ["full_attention"]
    thetas = {"full_attention": {"rope_theta": 160000.0}, "sliding_attention": {"rope_theta": 10000.0}}
    new = fields(
        "modernbert", "Model", num_hidden_layers=5, layer_types=types, rope_parameters=thetas, local_attention=8
    )
    assert family.read(new) == old
    stack = old.stack
    assert [stack.layer_config(i).attention.window for i in range(5)] == [None, 5, None, 5, None]
    assert [stack.layer_config(i).pre_attention_norm for i in range(5)] == [False, True, True, True, True]
    other = family.read(fields("modernbert", "Model", layer_types=["sliding_attention", "full_attention"]))
    assert rewritten(family, other) == other
    null = family.read(fields("modernbert", "Model", local_rope_theta=None, global_rope_theta=500.0))
    assert {layer.attention.position.theta for layer in null.stack.layer_types.values()} == {500.0}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("model_type", "ending", "options"),
    [
        ("bert", "ForMaskedLM", {"position_embedding_type": "relative_key"}),
        ("bert", "ForMaskedLM", {"is_decoder": True}),
        ("bert", "ForMaskedLM", {"add_cross_attention": True}),
        ("bert", "ForMaskedLM", {"pruned_heads": {"0": [1]}}),
        ("bert", "LMHeadModel", {}),
        ("bert", "ForPreTraining", {}),
        ("roberta", "ForMaskedLM", {"pad_token_id": 20}),
        ("mpnet", "ForMaskedLM", {"relative_attention_num_buckets": 16}),
        ("roformer", "ForMaskedLM", {"rotary_value": True}),
        ("albert", "ForMaskedLM", {"inner_group_num": 2}),
        ("deberta-v2", "Model", {"relative_attention": False}),
        ("deberta-v2", "Model", {"share_att_key": False}),
        ("deberta-v2", "Model", {"pos_att_type": ["c2p", "p2p"]}),
        ("deberta-v2", "Model", {"pos_att_type": []}),
        ("deberta-v2", "Model", {"conv_kernel_size": 3}),
        ("deberta-v2", "Model", {"embedding_size": 6}),
        ("deberta-v2", "Model", {"attention_head_size": 5}),
        ("deberta-v2", "Model", {"pooler_hidden_size": 5}),
        ("deberta-v2", "ForSequenceClassification", {"pooler_hidden_act": "mish"}),
        ("deberta-v2", "ForMaskedLM", {"legacy": False}),
        ("modernbert", "ForMaskedLM", {"layer_types": ["full_attention", "chunked_attention"]}),
        ("modernbert", "ForSequenceClassification", {"classifier_pooling": "max"}),
        ("modernbert", "ForMaskedLM", {"rope_theta": 500.0}),
    ],
)
def test_refusals_name_the_option(model_type: str, ending: str, options: dict[str, Any]) -> None:
    name = next(iter(options), ending)
    with pytest.raises(CheckpointError, match=name):
        find_family(model_type).read(fields(model_type, ending, **options))
