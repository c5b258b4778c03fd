"""Parameter shapes computed from a config equal those of the model, for every topology and variant."""

import pytest
import torch
from torch import nn

from kvad.config.layers import MoEConfig
from kvad.config.parameter_shapes import (
    mismatches,
    num_active_parameters,
    num_parameters,
    parameters,
    weight_bytes,
    weight_shapes,
)
from kvad.model.heads import ClassificationHead, LanguageHead
from kvad.model.layers import MixtureOfExperts
from kvad.model.transformer import Transformer
from kvad.planning.known_models import KNOWN_MODELS
from tests.support.covering_array import pairwise
from tests.support.lab_models import EVERY
from tests.support.random_models import HEADS, NORMS, POSITIONS, encoder_config, model_config, pair_config

TOPOLOGIES = {"decoder": model_config, "encoder": encoder_config, "encoder-decoder": pair_config}


def meta_model(config):
    with torch.device("meta"):
        return Transformer(config)


def shapes_of(model):
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("case", pairwise({"position": POSITIONS, "norm": NORMS, "heads": HEADS}))
def test_shapes_of_every_topology_equal_those_of_the_model(topology, case):
    if topology == "encoder-decoder" and case["norm"] == "parallel":
        pytest.skip("cross-attention is not supported with norm_position parallel")
    config = TOPOLOGIES[topology](**case)
    assert weight_shapes(config) == shapes_of(meta_model(config))


@pytest.mark.parametrize("name", EVERY)
def test_shapes_of_every_variant_equal_those_of_the_model(name):
    assert weight_shapes(EVERY[name]) == shapes_of(meta_model(EVERY[name]))


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_shapes_of_known_models_equal_those_of_the_model(name):
    config = KNOWN_MODELS[name]()
    assert weight_shapes(config) == shapes_of(meta_model(config))


@pytest.mark.parametrize("name", EVERY)
def test_matrices_are_those_of_linear_layers_experts_and_the_head(name):
    model = meta_model(EVERY[name])
    expected = set()
    for prefix, module in model.named_modules():
        if isinstance(module, nn.Linear):
            expected.add(f"{prefix}.weight")
        elif isinstance(module, MixtureOfExperts):
            expected |= {f"{prefix}.{part}" for part in ("gate", "up", "down")}
        elif isinstance(module, (LanguageHead, ClassificationHead)) and module.weight is not None:
            expected.add(f"{prefix}.weight")
    assert {parameter.name for parameter in parameters(EVERY[name]) if parameter.is_matrix} == expected


def test_experts_have_the_number_that_each_token_chooses():
    config = EVERY["experts bias"]
    assert config.decoder is not None
    mlp = config.decoder.layer_config(0).mlp
    assert isinstance(mlp, MoEConfig)
    experts = {p.name.split(".mlp.")[1]: p for p in parameters(config) if ".0.mlp." in p.name}
    chosen = {name for name, parameter in experts.items() if parameter.experts_per_token == mlp.num_experts_per_token}
    assert chosen == {"gate", "up", "down", "gate_bias", "up_bias", "down_bias"}


def test_mismatch_names_the_changed_tensor():
    shapes = weight_shapes(EVERY["plain"])
    name = "decoder.layers.0.mlp.up.weight"
    (line,) = mismatches(EVERY["plain"], {**shapes, name: (1, 2)})
    assert line.startswith(f"{name} is [1, 2]")


def test_active_parameters_leave_out_the_experts_that_a_token_does_not_choose():
    config = EVERY["experts"]  # 2 layers, 8 experts of 3 matrices [40, 24], 2 of which are chosen
    assert num_parameters(config) - num_active_parameters(config) == 2 * 6 * 3 * 40 * 24
    assert num_active_parameters(EVERY["window"]) == num_parameters(EVERY["window"])


def test_selection_biases_take_four_bytes():
    config = EVERY["experts shared"]  # 2 layers of 4 experts
    assert weight_bytes(config, "bfloat16") == 2 * num_parameters(config) + 2 * 2 * 4
    assert weight_bytes(config, "float32") == 4 * num_parameters(config)
