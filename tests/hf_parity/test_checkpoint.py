"""Golden files without transformers: the weights equal those that the reference read, and changes are detected."""

import json
import re

import numpy as np
import pytest

from tests.hf_parity import checkpoint, weights
from tests.hf_parity.cases import BY_NAME, CASES

EVERY = [(oracle, name) for oracle in checkpoint.ORACLES for name in checkpoint.names(oracle)]


@pytest.mark.parametrize(("oracle", "name"), EVERY, ids=lambda value: str(value))
def test_golden_files_rebuild_the_weights(oracle, name):
    meta, arrays = checkpoint.load(oracle, name)
    rebuilt = checkpoint.tensors(meta, arrays)  # compares the digests
    assert {key: list(value.shape) for key, value in rebuilt.items()} == meta["tensors"]
    assert all(value.dtype == np.float32 for value in rebuilt.values())
    assert arrays[f"long/{meta['output']}"].dtype == np.float32


def test_every_case_has_golden_files_or_a_reason():
    for oracle in checkpoint.ORACLES:
        index = json.loads((checkpoint.GOLDENS / oracle / "index.json").read_text())
        assert index["cases"] == [case.name for case in CASES if case.name not in index["skipped"]]
        assert all(index["skipped"].values())


def test_golden_files_have_the_arrays_of_their_kind():
    for oracle, name in EVERY:
        _, arrays = checkpoint.load(oracle, name)
        case = BY_NAME[name]
        runs = {key.split("/")[0] for key in arrays}
        assert {"long", "ragged0", "ragged1", "ragged2"} <= runs
        assert ("greedy" in runs) == (case.kind != "encoder")
        assert [f"beams{i}" in runs for i in range(2)] == [case.beams] * 2
        assert all(np.isfinite(value).all() for value in arrays.values())
        if case.kind != "encoder":
            best = arrays["greedy/logits"].argmax(-1)
            assert arrays["greedy/sequence"][-len(best) :].tolist() == best.tolist()


def test_changed_weight_is_detected():
    meta, arrays = checkpoint.load("4.57", "llama")
    with pytest.raises(ValueError, match="not those of the golden"):
        checkpoint.tensors(meta | {"recipe": meta["recipe"] | {"seed": 2}}, arrays)


def test_weights_depend_on_their_names():
    recipe = weights.Recipe()
    norm, bias = (weights.tensor(f"layers.0.norm.{last}", (4096,), recipe) for last in ("weight", "bias"))
    assert abs(norm.mean() - 1) < 0.02 and abs(bias.mean()) < 0.02
    assert abs(norm.std() - 0.2) < 0.01 and abs(bias.std() - 0.2) < 0.01
    # "norm" occurs only in the model's name
    matrix = weights.tensor("prelayernorm.encoder.k_proj.weight", (64, 64), recipe)
    assert abs(matrix.mean()) < 0.02 and abs(matrix.std() - recipe.gain / 8) < 0.01
    assert np.abs(weights.noise("a", (4096,), 1)).max() < 3.5


def test_case_names_are_file_names():
    assert len(BY_NAME) == len(CASES)
    assert all(re.fullmatch(r"[a-z0-9.-]+", name) for name in BY_NAME)
