"""Exported GGUF files: llama.cpp computes the logits that kvad computes (``tests/file_parity``, ``make oracle``)."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from kvad.checkpoint import gguf as gguf_lib
from kvad.checkpoint import open_checkpoint
from kvad.checkpoint.gguf import export_gguf
from kvad.config import canonical_config
from kvad.errors import CheckpointError
from kvad.llm import LLM

pytest.importorskip("gguf")
from tests.file_parity.cases import CASES, EXPORTS, TOKEN_IDS, content_digest, write_case

with np.load(Path(__file__).parents[1] / "golden_files" / "llama_cpp.npz") as _arrays:
    LOGITS = {name: _arrays[name] for name in _arrays.files if name != "digests"}
    DIGESTS = json.loads(str(_arrays["digests"]))
# ggml reads GELU from a table of float16, and rounds the input of a product with a stored type.
ROUNDED = {"bfloat16": 2e-2, "q8_0": 3e-2}
GELU = ("gemma", "gemma2", "gemma3", "starcoder2", "gpt2", "phi2", "gptneox", "falcon", "bloom", "starcoder")
YARN_DIFFERENT = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 0.5,
}  # fmt: skip
DEEP = ("exaone4 windows",)  # rounding errors of 64 layers add up


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
    exact = 3e-3 if case.split()[0] in GELU else 1e-4 if case in DEEP else 3e-5
    bound = ROUNDED.get(stored, exact) * np.abs(ours).max()
    assert np.abs(ours - LOGITS[name]).max() < bound and ours.shape == LOGITS[name].shape
    if stored == "float32":
        weights, expected = dict(handle.weights()), dict(original.weights())
        assert weights.keys() == expected.keys()
        assert all(torch.allclose(weights[key], expected[key], rtol=0, atol=1e-6) for key in expected)


def rewritten(folder, case, values, parts):
    """Export a case and write its file again with other keys and tensors; a value of None removes a key."""
    import gguf

    handle, file = open_checkpoint(write_case(case, folder / "hf")), folder / "m.gguf"
    layout, architecture, keys = gguf_lib.writer._choose(handle)
    keys = {key: value for key, value in {**keys, **values}.items() if value is not None}
    tensors = {name: tensor.numpy() for name, tensor in gguf_lib.writer._tensors(handle, layout, architecture)}
    writer = gguf.GGUFWriter(file, architecture.name)
    for name, value in {**keys, "tokenizer.ggml.model": "none"}.items():
        gguf_lib.writer._add(writer, name, value)
    for name, array in {**tensors, **parts(tensors)}.items():
        if array is not None:
            writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return handle, open_checkpoint(file)


def assert_equal_models(left, right):
    expected, weights = dict(left.weights()), dict(right.weights())
    assert canonical_config(left.config) == canonical_config(right.config) and weights.keys() == expected.keys()
    assert all(torch.allclose(weights[key], expected[key], rtol=0, atol=1e-6) for key in expected)


def test_an_older_file_with_the_latent_s_matrix_in_one_piece_is_read(tmp_path):
    """Before llama.cpp's absorbed attention, keys and values of a head were interleaved in ``attn_kv_b``."""

    def join(tensors):
        pieces = {}
        for layer in range(2):
            keys, values = (tensors[f"blk.{layer}.attn_{part}_b.weight"] for part in "kv")
            joined = np.concatenate([keys.transpose(0, 2, 1), values], 1)
            pieces[f"blk.{layer}.attn_kv_b.weight"] = joined.reshape(-1, joined.shape[-1])
        return {**pieces, **{f"blk.{layer}.attn_{part}_b.weight": None for layer in range(2) for part in "kv"}}

    sizes = {"head_count_kv": 4, "key_length": 32, "value_length": 20, "key_length_mla": None, "value_length_mla": None}
    values = {f"deepseek2.attention.{key}": value for key, value in sizes.items()}
    assert_equal_models(*rewritten(tmp_path, "deepseek2 v3", values, join))


def test_layers_that_predict_further_tokens_are_not_read(tmp_path):
    more = {"blk.2.attn_q.weight": np.zeros((96, 64)), "blk.2.nextn.eh_proj.weight": np.zeros((64, 128))}
    values = {"glm4moe.block_count": 3, "glm4moe.nextn_predict_layers": 1}
    assert_equal_models(*rewritten(tmp_path, "glm4moe", values, lambda tensors: more))


def test_the_keys_of_phi_4_are_read(tmp_path):
    """Its converter writes a window of 0, and the original length of a RoPE that is not scaled."""
    values = {"phi3.attention.sliding_window": 0, "phi3.rope.scaling.original_context_length": 256}
    assert_equal_models(*rewritten(tmp_path, "phi3", values, lambda tensors: {}))


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("deepseek2 v3", {"rms_norm_eps": 1e-5}, "norms have two epsilons"),
        ("deepseek2 v3", {"q_lora_rank": None}, "q_lora_rank"),
        ("deepseek2 yarn", {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}, "num_groups"),
        ("deepseek2 yarn", {"rope_scaling": YARN_DIFFERENT}, "mscale"),
        ("exaone4", {"sliding_window": 8}, "64 layers"),
        ("qwen2moe", {"mlp_only_layers": [1]}, "layer"),
        ("ernie4_5-moe", {"num_hidden_layers": 4, "moe_layer_interval": 2}, "layer"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(tmp_path, monkeypatch, case, changes, message):
    model_type, content = CASES[case]
    monkeypatch.setitem(CASES, case, (model_type, {**content, **changes}))
    with pytest.raises(CheckpointError, match=message):
        export_gguf(open_checkpoint(write_case(case, tmp_path / "hf")), tmp_path / "m.gguf")


def test_the_logits_of_another_model_differ():
    """The bound of the test above separates models: equal shapes, other weights or scaling."""
    for name in ("llama llama3", "llama linear", "llama yarn", "llama biases"):
        assert np.abs(LOGITS[name] - LOGITS["llama"]).max() > 0.1
