"""Exported GGUF files: llama.cpp computes the logits that kvad computes (``tests/file_parity``, ``make oracle``)."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from kvad.checkpoint import open_checkpoint
from kvad.checkpoint.gguf import export_gguf
from kvad.llm import LLM

pytest.importorskip("gguf")
from tests.file_parity.cases import EXPORTS, TOKEN_IDS, content_digest, write_case

with np.load(Path(__file__).parents[1] / "golden_files" / "llama_cpp.npz") as _arrays:
    LOGITS = {name: _arrays[name] for name in _arrays.files if name != "digests"}
    DIGESTS = json.loads(str(_arrays["digests"]))
# ggml reads GELU from a table of float16, and rounds the input of a product with a stored type.
ROUNDED = {"bfloat16": 2e-2, "q8_0": 3e-2}
GELU = ("gemma", "gemma2", "gemma3", "starcoder2", "gpt2")


@pytest.mark.parametrize("name", EXPORTS)
def test_llama_cpp_computes_the_logits_of_an_exported_file(tmp_path, name):
    case, stored = EXPORTS[name]
    source, file = write_case(case, tmp_path / "hf"), tmp_path / f"{name}.gguf"
    original = open_checkpoint(source)
    export_gguf(original, file, stored)
    assert content_digest(file) == DIGESTS[name], "the export has changed: make oracle reads it with llama.cpp again"
    handle = open_checkpoint(file)
    with LLM.load(handle, max_num_seqs=1, max_seq_len=64, dtype="float32") as llm:
        ours = llm.logits(TOKEN_IDS).numpy()
    bound = ROUNDED.get(stored, 3e-3 if case in GELU else 3e-5) * np.abs(ours).max()
    assert np.abs(ours - LOGITS[name]).max() < bound and ours.shape == LOGITS[name].shape
    if stored == "float32":
        weights, expected = dict(handle.weights()), dict(original.weights())
        assert weights.keys() == expected.keys()
        assert all(torch.allclose(weights[key], expected[key], rtol=0, atol=1e-6) for key in expected)


def test_the_logits_of_another_model_differ():
    """The bound of the test above separates models: equal shapes, other weights or scaling."""
    for name in ("llama llama3", "llama linear", "llama yarn", "llama biases"):
        assert np.abs(LOGITS[name] - LOGITS["llama"]).max() > 0.1
