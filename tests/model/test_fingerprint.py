"""A model's fingerprint depends on every number of the model and on nothing else."""

import copy
import dataclasses

import torch

from kvad.checkpoint.families._hf_class import with_attention
from kvad.config import layers as cfg
from kvad.config.serialization import LATER_FIELDS
from kvad.model.fingerprint import HASH_CHUNK, state_fingerprint, weights_fingerprint
from kvad.model.transformer import Transformer
from kvad.train.config.presets import MODEL_PRESETS


def model():
    torch.manual_seed(0)
    return Transformer(MODEL_PRESETS["tiny"](300, 64)).eval()


def test_equal_models_have_equal_fingerprints():
    first = model()
    name = weights_fingerprint(first)
    assert name == weights_fingerprint(model()) == weights_fingerprint(copy.deepcopy(first))
    first.fuse_projections()  # other storage, the same numbers
    assert weights_fingerprint(first) == name


def test_any_changed_number_changes_the_fingerprint(monkeypatch):
    monkeypatch.setattr("kvad.model.fingerprint.HASH_CHUNK", 1 << 13)
    one = model()
    name, seen = weights_fingerprint(one), set()
    for tensor in [*one.parameters(), *one.buffers()]:
        flat = tensor.data.view(-1)
        for at in {0, flat.numel() // 2, flat.numel() - 1}:
            flat[at] += 1
            seen.add(weights_fingerprint(one))
            flat[at] -= 1
    assert name not in seen
    assert len(seen) >= len(list(one.parameters()))
    assert HASH_CHUNK > 1 << 13


def test_dtype_and_config_change_the_fingerprint():
    one = model()
    assert weights_fingerprint(one) != weights_fingerprint(model().to(torch.bfloat16))
    other = Transformer(MODEL_PRESETS["tiny"](300, 128)).eval()
    other.load_state_dict(one.state_dict(), strict=False)
    assert weights_fingerprint(one) != weights_fingerprint(other)


def test_later_fields_are_hashed_only_if_they_differ_from_their_default():
    """Fingerprints of earlier versions stay valid (tests/test_golden_files.py), and a changed field changes them."""
    classes = cfg.AttentionConfig, cfg.LayerConfig, cfg.StackConfig, cfg.MoEConfig
    defaults = {field.name: field.default for each in classes for field in dataclasses.fields(each)}
    assert {name: defaults[name] for name in LATER_FIELDS} == LATER_FIELDS
    config, stack = model().config, model().config.stack
    scaling = cfg.QueryScalingConfig(0.1, 8)
    layers = {"L": with_attention(stack.layer_types["L"], query_scaling=scaling)}
    scaled = dataclasses.replace(config, decoder=dataclasses.replace(stack, layer_types=layers))
    assert state_fingerprint(config, {}) != state_fingerprint(scaled, {})
