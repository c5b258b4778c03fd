"""GGUF files whose matrices are computed with as they are: the same numbers, the same rows, the same bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from kvad import checkpoint, ops
from kvad.checkpoint import gguf as gguf_lib
from kvad.checkpoint.native import save_checkpoint
from kvad.config.model import ModelConfig
from kvad.engine.options import EngineConfig
from kvad.errors import CheckpointError
from kvad.llm import LLM
from kvad.model.transformer import Transformer
from kvad.ops.block_matrix import BLOCK_FORMATS, BlockLinear, BlockMatrix
from kvad.ops.native import packed_store
from tests.support.cli_checkpoints import run
from tests.support.random_models import build

gguf = pytest.importorskip("gguf")
TOKENS = [5, 6, 7, 200, 9, 3]
WIDTH, INNER, LAYERS, VOCAB = 256, 512, 2, 300
# As llama.cpp's Q4_K_M: values and some down projections have more bits.
MIXTURE = {"attn_v": "Q6_K", "blk.1.ffn_down": "Q6_K", "token_embd": "Q4_K", "output": "Q6_K"}


def config(model_type: str) -> ModelConfig:
    from kvad.checkpoint.conversion import HFConfigReader
    from kvad.checkpoint.families import find_family

    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": LAYERS}
    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "vocab_size": VOCAB, "max_position_embeddings": 64}
    fields = {"model_type": model_type, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False}
    fields |= {"pad_token_id": 0, "sliding_window": None} if model_type == "phi3" else {}
    return find_family(model_type).read(HFConfigReader({**heads, **sizes, **fields}, "config"))


def blocks(kind: str, rows: int, columns: int, generator: np.random.Generator) -> np.ndarray:
    """Return random blocks whose numbers are about 0.05."""
    known = BLOCK_FORMATS[kind]
    stored = generator.integers(0, 256, (rows, columns // known.size, known.num_bytes), dtype=np.uint8)
    largest = {"Q8_0": 64, "Q5_0": 8, "Q4_0": 4, "Q4_1": 8, "Q4_K": 256, "Q6_K": 1024}.get(kind, 0)
    if kind == "MXFP4":
        stored[..., 0] = generator.integers(119, 124, stored.shape[:2])  # exponents
    for at in known.halves:
        values = generator.uniform(0.5, 1.0, (*stored.shape[:2], 1)) * 0.06 / largest
        values *= -4 if kind == "Q4_1" and at else 1
        stored[..., at : at + 2] = values.astype(np.float16).view(np.uint8)
    return stored.reshape(rows, -1)


def write(folder: Path, kinds: dict[str, str], model_type: str = "llama") -> Path:
    """Write a random model whose matrices have these types, by part of their name; "" is for all others."""
    folder.mkdir(exist_ok=True)
    model = config(model_type)
    save_checkpoint(folder / "plain", model, build(model, dtype=torch.float32).state_dict(), None, origin=model_type)
    return with_blocks(folder / "plain", folder / "model.gguf", kinds)


def with_blocks(plain: Path, path: Path, kinds: dict[str, str]) -> Path:
    """Export a checkpoint as ``write`` does, with random blocks instead of its matrices and its experts."""
    architecture = gguf_lib.export_gguf(checkpoint.open_checkpoint(plain), plain.with_suffix(".gguf"), "float32")
    reader, generator = gguf.GGUFReader(plain.with_suffix(".gguf")), np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            gguf_lib.writer._add(writer, field.name, field.contents())
    for tensor in reader.tensors:
        names = [part for part in kinds if part and part in tensor.name]
        kind = kinds[names[0]] if names else kinds.get("")
        columns, *rows = (int(size) for size in tensor.shape)
        is_matrix = rows and tensor.name.endswith(".weight")
        if is_matrix and kind in BLOCK_FORMATS and columns % BLOCK_FORMATS[kind].size == 0:
            data = blocks(kind, math.prod(rows), columns, generator).reshape(*reversed(rows), -1)
            writer.add_tensor(tensor.name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
        else:
            writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def dequantized(path: Path, dtype: torch.dtype = torch.float32) -> Transformer:
    handle = checkpoint.open_checkpoint(path)
    with torch.device("meta"):
        model = Transformer(handle.config)
    model.load_state_dict(dict(handle.weights_as(dtype)), assign=True)
    return model.eval().requires_grad_(False)


def load(path: Path, **options: object) -> LLM:
    return LLM.load(path, max_num_seqs=1, max_seq_len=48, **options)  # type: ignore[arg-type]


def engine_logits(llm: LLM, tokens: Sequence[int] = TOKENS) -> torch.Tensor:
    """Return the logits after the tokens, as the engine computes them."""
    results: list[torch.Tensor] = []
    original = llm.engine.runner.execute

    def execute(output: object) -> torch.Tensor:
        results.append(original(output).clone())  # type: ignore[arg-type]
        return results[-1]

    llm.engine.runner.execute = execute  # type: ignore[method-assign, assignment]
    llm.generate([list(tokens)], max_tokens=8, temperature=0)
    return torch.cat(results)


@pytest.mark.parametrize("kind", [kind for kind in BLOCK_FORMATS if kind != "MXFP4 pairs"])  # of Hugging Face
@pytest.mark.parametrize("rows", [slice(None), slice(2, 4)])
def test_blocks_are_the_numbers_that_the_package_dequantizes(kind: str, rows: slice) -> None:
    stored = blocks(kind, 5, 512, np.random.default_rng(1))
    expected = torch.from_numpy(gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind]))
    raw = torch.from_numpy(stored).view(5, -1, BLOCK_FORMATS[kind].num_bytes)
    matrix = BlockMatrix(raw, None, kind)
    assert torch.equal(matrix.dequantize(torch.float32, rows), expected[rows])
    assert matrix.in_features == 512 and matrix.num_bytes == matrix.quantized().num_bytes
    order = torch.tensor([4, 0, 3, 1])
    assert torch.equal(BlockMatrix(raw, order, kind).dequantize(torch.float32, rows), expected[order][rows])
    assert (expected.abs() > 1e-3).float().mean() > 0.7 and expected.abs().max() < 1


CASES = {
    "q8_0": {"": "Q8_0"},
    "q4_0": {"": "Q4_0"},
    "q4_1": {"": "Q4_1"},
    "q5_0": {"": "Q5_0"},
    "q4_K": {"": "Q4_K"},
    "q6_K": {"": "Q6_K"},
    "a mixture": {"": "Q4_K", **MIXTURE},
    "some in float32": {"attn": "Q8_0", "ffn_down": "Q4_K"},
}


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_dequantized_model(
    tmp_path: Path, case: str, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, CASES[case])
    plain, llm = dequantized(path), load(path, dtype="float32")
    if not native:
        llm.engine.runner.native_reason = "KVAD_NATIVE=off"
    found = engine_logits(llm)
    if native:
        assert llm.engine.runner.native_reason == ops.native.load().reason
    layers = [module for module in llm.model.modules() if isinstance(module, BlockLinear)]
    assert len(layers) == (5 if case == "some in float32" else 7) * LAYERS
    reference = LLM(plain, None, llm.cache_config, engine_config=EngineConfig(native=False))
    expected = engine_logits(reference)
    assert (found - expected).abs().max() < 2e-4 * max(1.0, expected.abs().max())
    assert expected.std() > 0.1


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "phi3"])
def test_rows_of_every_architecture_are_those_of_its_tensors(tmp_path: Path, model_type: str) -> None:
    """Llama's q and k are permuted, Phi-3's q, k, v and gate and up are one matrix each."""
    handle = checkpoint.open_checkpoint(write(tmp_path, {"": "Q8_0"}, model_type))
    weights = dict(handle.weights_as(torch.float32))
    matrices = handle.quantized_matrices
    assert len(matrices) == 7 * LAYERS
    for name, matrix in matrices.items():
        assert torch.equal(matrix.dequantize(torch.float32), weights[f"{name}.weight"]), name
    assert any(matrix.order is not None for matrix in matrices.values()) == (model_type == "llama")
    unquantized = dict(handle.unquantized_weights_as(torch.float32))
    assert set(unquantized) | {f"{name}.weight" for name in matrices} == set(weights)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in unquantized.items())


def test_embedding_and_head_are_dequantized(tmp_path: Path) -> None:
    path = write(tmp_path, {"": "Q4_K", "token_embd": "Q8_0", "output.weight": "Q6_K"})
    model, _ = checkpoint.loader.load_model(path, "float32")
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name, weight in (("token_embd.weight", model.token_embedding), ("output.weight", model.head.weight)):
        assert stored[name].tensor_type.name in ("Q8_0", "Q6_K")
        expected = gguf.quants.dequantize(stored[name].data, stored[name].tensor_type)
        assert np.array_equal(weight.detach().numpy(), expected)


def test_plan_inspect_and_verify_read_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from kvad.planning.report import plan_target, read_target

    path = write(tmp_path, {"": "Q4_K", **MIXTURE})
    handle = checkpoint.open_checkpoint(path)
    matrices = handle.quantized_matrices.values()
    numbers = sum(matrix.in_features * matrix.out_features for matrix in matrices)
    assert numbers == LAYERS * (WIDTH * WIDTH * 2 + WIDTH * 64 * 2 + 3 * WIDTH * INNER)
    assert sum(matrix.num_bytes for matrix in matrices) < 0.9 * numbers
    assert plan_target(read_target(str(path)), budget=64).weights == handle.weight_bytes("bfloat16")
    llm = load(path)
    llm.generate([TOKENS], max_tokens=2, temperature=0)
    panels = sum(each.packed.nbytes for each in llm.model.packed_weights._panels.values())
    if panels:
        outside = (VOCAB + 20) * WIDTH * 2  # of the head
        assert abs(panels - sum(matrix.num_bytes for matrix in matrices) - outside) < 4096
    inspected = run(capsys, "inspect", path)
    assert inspected.code == 0 and "Q4_K, Q6_K" in inspected.out
    verified = run(capsys, "verify", path, "--json")
    assert verified.code == 0, verified.err
    assert json.loads(verified.out)


@pytest.mark.skipif(ops.native.load().library is None or not ops.native.library.SMAPS.is_file(), reason="no kernels")
def test_packed_blocks_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(packed_store.ENVIRONMENT_VARIABLE, str(tmp_path / "packed"))
    monkeypatch.setattr(packed_store, "MIN_BYTES", 0)
    path = write(tmp_path, {"": "Q8_0"})
    first = engine_logits(load(path))
    assert len(list((tmp_path / "packed").glob("*.packed"))) == 1
    monkeypatch.setattr(ops.native.library.Library, "pack_quantized", None)  # nothing is packed again
    assert torch.equal(engine_logits(load(path)), first)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_a_scale_that_is_not_finite_is_named(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, {"": kind})
    (tensor,) = (each for each in gguf.GGUFReader(path).tensors if each.name == "blk.1.ffn_up.weight")
    content = bytearray(path.read_bytes())
    at = tensor.data_offset + 3 * BLOCK_FORMATS[kind].num_bytes
    content[at : at + 2] = b"\xff\x7f"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"blk\.1\.ffn_up\.weight \({kind}\) has a block of NaN"):
        load(path)
