"""``kvad quantize``: what it writes, what every command makes of it, its loss, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import kvad
from kvad import checkpoint, ops
from kvad.checkpoint.native import save_checkpoint
from kvad.config.model import ModelConfig
from kvad.engine.scheduling import SamplingParams
from kvad.errors import CheckpointError, ConfigError
from kvad.model.transformer import Transformer
from kvad.ops.quantized_linear import QuantizedLinear
from kvad.text.simple_tokenizers import ByteTokenizer
from tests.support.cli_checkpoints import run
from tests.support.random_models import build, model_config, pair_config

FORMATS = [(8, 8), (4, 8), (8, 24), (8, 0), (4, 0)]


def write(folder: Path, config: ModelConfig, dtype: torch.dtype = torch.float32) -> Transformer:
    model = build(config, dtype=dtype)
    save_checkpoint(folder, config, model.state_dict(), None)
    return model


def quantized(tmp_path: Path, config: ModelConfig, bits: int, group: int, dtype: torch.dtype = torch.float32) -> Path:
    write(tmp_path / "model", config, dtype)
    result = checkpoint.export.quantize_checkpoint(
        checkpoint.open_checkpoint(tmp_path / "model"), tmp_path / "small", bits, group
    )
    assert result.quantized > 4
    return tmp_path / "small"


def greedy(model: Transformer, **sizes: int) -> list[int]:
    from kvad.cache.config import CacheConfig
    from kvad.engine.engine import Engine
    from kvad.engine.options import EngineConfig

    engine = Engine(model, CacheConfig(max_seq_len=40, max_num_seqs=2, **sizes), EngineConfig(native=False))
    source = [3, 4, 5] if sizes else None
    engine.add_request([5, 6, 7], SamplingParams(max_tokens=20, temperature=0.0), encoder_token_ids=source)
    tokens = []
    while not engine.idle:
        tokens += [chunk.token_id for chunk in engine.step() if chunk.token_id is not None]
    return tokens


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(("bits", "group"), FORMATS)
@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder", "post"])
def test_the_model_computes_with_the_integers_that_are_stored(
    tmp_path: Path, kind: str, bits: int, group: int, dtype: str
) -> None:
    config = pair_config() if kind == "encoder-decoder" else model_config(norm="post" if kind == "post" else "pre")
    folder = quantized(tmp_path, config, bits, group)
    model, handle = checkpoint.loader.load_model(folder, dtype)
    assert any(isinstance(module, QuantizedLinear) for module in model.modules())
    with torch.device("meta"):
        plain = Transformer(config)
    plain.load_state_dict(dict(handle.weights_as(getattr(torch, dtype))), assign=True)  # dequantized
    sizes = {"max_source_len": 3} if kind == "encoder-decoder" else {}
    assert greedy(model, **sizes) == greedy(plain.eval().requires_grad_(False), **sizes)
    assert handle.quantization == f"int{bits}, " + (f"groups of {group}" if group else "one scale for each row")


@pytest.mark.parametrize(("bits", "group"), FORMATS)
def test_the_plan_has_the_bytes_that_are_loaded(tmp_path: Path, bits: int, group: int) -> None:
    from kvad.planning.report import plan_target, read_target

    folder = quantized(tmp_path, model_config(), bits, group)
    model, handle = checkpoint.loader.load_model(folder)
    loaded = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert handle.weight_bytes("float32") == loaded
    assert plan_target(read_target(str(folder)), budget=64).weights == loaded
    whole = sum(tensor.nbytes for _, tensor in checkpoint.open_checkpoint(tmp_path / "model").weights())
    assert loaded < 0.75 * whole


def test_the_native_kernels_compute_with_the_integers(tmp_path: Path) -> None:
    folder = quantized(tmp_path, model_config(), 8, 8)
    llm = kvad.LLM.load(folder, max_num_seqs=1, max_seq_len=40)
    (generation,) = llm.generate([[5, 6, 7]], max_tokens=20, temperature=0)
    assert llm.engine.runner.native_reason == ops.native.load().reason
    assert list(generation.tokens) == greedy(checkpoint.loader.load_model(folder)[0])


def test_the_command_reports_sizes_and_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from dataclasses import replace

    tokenizer = ByteTokenizer()
    config = replace(model_config(), vocab_size=tokenizer.vocab_size)
    save_checkpoint(tmp_path / "model", config, build(config, dtype=torch.float32).state_dict(), tokenizer)
    text = tmp_path / "text.txt"
    text.write_text("A text of some words, and then some more. " * 20, "utf-8")
    lines = {}
    for bits in ("8", "4"):
        out = tmp_path / f"int{bits}"
        result = run(capsys, "quantize", tmp_path / "model", out, "--bits", bits, "--group-size", "8", "--data", text,
                     "--data-tokens", "300", "--json")  # fmt: skip
        assert result.code == 0, result.err
        lines[bits] = json.loads(result.out)
        for command in ("doctor", "inspect"):
            checked = run(capsys, command, out)
            assert checked.code == 0 and "problem" not in checked.out, checked.out
        assert f"quantized: int{bits}, groups of 8" in checked.out
        assert f"{sum(p.numel() for p in build(config).parameters()):,} parameters" in checked.out
    assert 0 < lines["8"]["kl_divergence"] < lines["4"]["kl_divergence"]
    assert (
        lines["8"]["tokens"] == 300 - -(-300 // config.max_seq_len)
        and lines["8"]["bytes_after"] > lines["4"]["bytes_after"]
    )
    assert lines["8"]["perplexity_before"] == pytest.approx(lines["4"]["perplexity_before"])
    again = run(capsys, "quantize", tmp_path / "int8", tmp_path / "twice")
    assert again.code == 2 and "is quantized already (int8, groups of 8)" in again.err


def test_matrices_that_groups_do_not_divide_are_left_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "model", model_config())
    result = run(capsys, "quantize", tmp_path / "model", tmp_path / "out", "--group-size", "24")
    assert result.code == 0
    assert "left: decoder.layers.0.mlp.down" in result.out and "whose width groups of 24 do not divide" in result.out
    matrices = checkpoint.open_checkpoint(tmp_path / "out").quantized_matrices
    assert "decoder.layers.0.mlp.up" in matrices and "decoder.layers.0.mlp.down" not in matrices
    result = run(capsys, "quantize", tmp_path / "model", tmp_path / "rows", "--per-channel", "--json")
    assert result.code == 0 and json.loads(result.out)["group_size"] == 0 and not json.loads(result.out)["left"]


def test_other_readers_get_dequantized_matrices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = quantized(tmp_path, model_config(), 8, 8)
    assert run(capsys, "export", folder, tmp_path / "hf").code == 0
    exported, own = (checkpoint.open_checkpoint(path) for path in (tmp_path / "hf", folder))
    theirs = dict(exported.weights())
    for name, tensor in own.weights():
        assert torch.equal(theirs[name], tensor), name
    model, _ = checkpoint.loader.load_model(folder)
    with pytest.raises(ConfigError, match="floating-point weights, got int8"):
        model.train()


def test_verify_compares_with_the_dequantized_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = quantized(tmp_path, model_config(), 4, 8)
    result = run(capsys, "verify", folder, "--json")
    assert result.code == 0, result.err
    faulty = run(capsys, "verify", folder, "--inject-fault", "packed")
    assert faulty.code == 1 and "the joined product of decoder.layers.0.attention" in faulty.out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--group-size", "0"], "--group-size: must be at least 1, got 0"),
        (["--group-size", "7"], "group_size: 7 divides the inputs of no matrix"),
        (["--data-tokens", "1"], "--data-tokens: must be at least 2, got 1"),
        (["--data", "no-such-file"], "--data: the model has no tokenizer"),
        (["--bits", "5"], "'5' is not one of '8', '4'"),
    ],
)
def test_bad_options_write_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    write(tmp_path / "model", model_config())
    result = run(capsys, "quantize", tmp_path / "model", tmp_path / "out", *arguments)
    assert result.code == 2 and text in result.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("part", ["data", "scale", "minimum"])
def test_a_damaged_matrix_is_named(tmp_path: Path, part: str) -> None:
    from safetensors.torch import load_file

    folder = quantized(tmp_path, model_config(), 4, 8)
    tensors, name = load_file(folder / "model.safetensors"), f"decoder.layers.1.mlp.down.{part}"
    tensors[name] = tensors[name][:-1].contiguous()
    config = model_config()
    save_checkpoint(folder, config, tensors, None, quantization={"bits": 4, "group_size": 8})
    with pytest.raises(CheckpointError, match=f"{name} has shape"):
        checkpoint.loader.load_model(folder)
    del tensors[name]
    save_checkpoint(folder, config, tensors, None, quantization={"bits": 4, "group_size": 8})
    with pytest.raises(CheckpointError, match=r"decoder\.layers\.1\.mlp\.down"):
        checkpoint.loader.load_model(folder)
