"""A model's fingerprint depends on every number of the model and on nothing else."""

import copy

import torch

from kvad.model.fingerprint import HASH_CHUNK, weights_fingerprint
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
