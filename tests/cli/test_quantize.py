"""``kvad quantize``: what it writes, what every command makes of it, its loss, and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kvad
from kvad import checkpoint, ops
from kvad.checkpoint.folder import WeightQuantization
from kvad.checkpoint.native import save_checkpoint
from kvad.config import parameter_shapes
from kvad.config.layers import ClassificationHeadConfig, LanguageHeadConfig
from kvad.config.model import ModelConfig
from kvad.engine.scheduling import SamplingParams
from kvad.errors import CheckpointError, ConfigError
from kvad.model.transformer import Transformer
from kvad.ops.quantized_linear import QuantizedLinear, WeightFormat
from kvad.text.simple_tokenizers import ByteTokenizer
from kvad.verify.reference_model import ReferenceModel, reference_model
from tests.support.cli_checkpoints import run
from tests.support.random_models import build, encoder_config, model_config, pair_config

FORMATS = [(8, 8), (4, 8), (8, 24), (8, 0), (4, 0)]


def write(folder: Path, config: ModelConfig, dtype: torch.dtype = torch.float32) -> Transformer:
    model = build(config, dtype=dtype)
    save_checkpoint(folder, config, model.state_dict(), None)
    return model


def quantized(tmp_path: Path, config: ModelConfig, bits: int, group: int, head_bits: int = 8) -> Path:
    write(tmp_path / "model", config)
    form = WeightQuantization(bits, group, head_bits, 8 if head_bits else 0)
    handle = checkpoint.open_checkpoint(tmp_path / "model")
    result = checkpoint.export.quantize_checkpoint(handle, tmp_path / "small", form)
    assert result.quantized > 4 and result.head_bits == head_bits
    assert (result.head_copy > 0) == (config.tie_embeddings and head_bits > 0)
    return tmp_path / "small"


def untied(config: ModelConfig) -> ModelConfig:
    return replace(config, tie_embeddings=False)


def dequantized(folder: Path, dtype: torch.dtype) -> Transformer:
    """Return a plain model with the numbers of a quantized one; it has a head of its own."""
    handle = checkpoint.open_checkpoint(folder)
    weights = dict(handle.weights_as(dtype))
    matrix = handle.quantized_matrices.get("head.output")
    config = handle.config if matrix is None else untied(handle.config)
    if matrix is not None:
        weights["head.weight"] = matrix.dequantize(dtype)
    with torch.device("meta"):
        plain = Transformer(config)
    plain.load_state_dict(weights, assign=True)
    return plain.eval().requires_grad_(False)


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
    assert isinstance(model.head.output, QuantizedLinear)
    sizes = {"max_source_len": 3} if kind == "encoder-decoder" else {}
    assert greedy(model, **sizes) == greedy(dequantized(folder, getattr(torch, dtype)), **sizes)
    groups = f"groups of {group}" if group else "one scale for each row"
    copied = " (a copy of the token table)" if config.tie_embeddings else ""
    assert handle.quantization == f"int{bits}, {groups}; head: int8, groups of 8{copied}"


HEADS = [(True, 8), (True, 0), (False, 8), (False, 0)]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("tied", "head_bits"), HEADS)
def test_logits_are_those_of_the_stored_head(tmp_path: Path, tied: bool, head_bits: int, bits: int) -> None:
    head = LanguageHeadConfig(bias=True, logit_scale=0.5, logit_softcap=3.0)
    config = replace(model_config(), tie_embeddings=tied, head=head)
    folder = quantized(tmp_path, config, bits, 8, head_bits)
    model, handle = checkpoint.loader.load_model(folder)
    hidden, rows = torch.randn(5, config.hidden_size, generator=torch.Generator().manual_seed(0)), torch.arange(5)
    logits = model.logits(hidden, rows)
    torch.testing.assert_close(logits, dequantized(folder, torch.float32).logits(hidden, rows), rtol=1e-5, atol=1e-6)
    original = checkpoint.loader.load_model(tmp_path / "model")[0].logits(hidden, rows)
    assert torch.equal(logits, original) == (head_bits == 0)
    torch.testing.assert_close(logits, original, rtol=0, atol=0.05)
    stored = json.loads((folder / "config.json").read_text("utf-8"))["quantization"]
    assert stored == {"bits": bits, "group_size": 8, "head_bits": head_bits, "head_group_size": head_bits and 8}
    assert ("head.weight" in handle.tensors) == (not tied and head_bits == 0)
    assert ("head.output.data" in handle.tensors) == (head_bits == 8)
    reference = reference_model(model, torch.float64)
    expected = reference.logits(hidden.double(), rows)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-6)
    assert set(dict(handle.weights())) == set(parameter_shapes.weight_shapes(config))  # what export and training read


@pytest.mark.parametrize("tied", [True, False])
def test_folders_without_a_quantized_head_are_read(tmp_path: Path, tied: bool) -> None:
    config = replace(model_config(), tie_embeddings=tied)
    folder = quantized(tmp_path, config, 8, 8, head_bits=0)
    before = greedy(checkpoint.loader.load_model(folder)[0])
    tensors = {name: tensor.clone() for name, tensor in checkpoint.open_checkpoint(folder).tensors.items()}
    save_checkpoint(folder, config, tensors, None, quantization={"bits": 8, "group_size": 8})  # as written before
    model, handle = checkpoint.loader.load_model(folder)
    assert model.head.output is None and handle.quantization == "int8, groups of 8"
    assert greedy(model) == before


@pytest.mark.parametrize("tied", [True, False])
def test_a_decode_step_reads_the_quantized_head(tmp_path: Path, tied: bool) -> None:
    from kvad.cache.sizing.memory_plan import decode_step_bytes
    from kvad.planning.report import plan_target, read_target

    config = replace(model_config(), tie_embeddings=tied)
    read, copies = {}, {}
    for head_bits in (0, 8):
        folder = quantized(tmp_path / str(head_bits), config, 8, 8, head_bits)
        plan = plan_target(read_target(str(folder)), budget=64)
        read[head_bits], copies[head_bits] = decode_step_bytes(plan, 1, 10), plan.head_copy
    numbers = config.vocab_size * config.hidden_size
    stored = numbers + 2 * numbers // 8  # int8, and a scale in float16 for each 8
    assert read[0] - read[8] == 4 * numbers - stored
    assert copies == {0: 0, 8: stored if tied else 0}


@pytest.mark.parametrize(("bits", "group"), FORMATS)
@pytest.mark.parametrize("tied", [True, False])
def test_the_plan_has_the_bytes_that_are_loaded(tmp_path: Path, bits: int, group: int, tied: bool) -> None:
    from kvad.planning.report import plan_target, read_target

    folder = quantized(tmp_path, replace(model_config(), tie_embeddings=tied), bits, group)
    model, handle = checkpoint.loader.load_model(folder)
    loaded = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert handle.weight_bytes("float32") == loaded
    assert plan_target(read_target(str(folder)), budget=64).weights == loaded
    whole = sum(tensor.nbytes for _, tensor in checkpoint.open_checkpoint(tmp_path / "model").weights())
    assert loaded < 0.75 * whole


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("tied", "head_bits"), HEADS)
def test_the_native_kernels_compute_with_the_integers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool, head_bits: int, bits: int
) -> None:
    folder = quantized(tmp_path, replace(model_config(), tie_embeddings=tied), bits, 8, head_bits)
    formats, panels = [], ops.native.PackedWeights.panels

    def record(self: ops.native.PackedWeights, library: object, weights: list[Any], *rest: Any, **options: Any) -> Any:
        formats.append(weights[0].dtype if isinstance(weights[0], torch.Tensor) else weights[0].format)
        return panels(self, library, weights, *rest, **options)

    monkeypatch.setattr(ops.native.PackedWeights, "panels", record)
    llm = kvad.LLM.load(folder, max_num_seqs=1, max_seq_len=40)
    (generation,) = llm.generate([[5, 6, 7]], max_tokens=20, temperature=0)
    assert llm.engine.runner.native_reason == ops.native.load().reason
    assert list(generation.tokens) == greedy(checkpoint.loader.load_model(folder)[0])
    if ops.native.load().library is not None:  # it reads the integers of the head
        assert formats[-1] == (WeightFormat(8, 8, torch.float16) if head_bits else torch.float32)


def test_the_command_reports_sizes_and_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = ByteTokenizer()
    config = replace(model_config(), vocab_size=tokenizer.vocab_size, hidden_size=32)
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
        assert f"quantized: int{bits}, groups of 8; head: int8, groups of 32 (a copy of the token table)" in checked.out
        assert f"{sum(p.numel() for p in build(config).parameters()):,} parameters" in checked.out
    assert 0 < lines["8"]["kl_divergence"] < lines["4"]["kl_divergence"]
    assert (
        lines["8"]["tokens"] == 300 - -(-300 // config.max_seq_len)
        and lines["8"]["bytes_after"] > lines["4"]["bytes_after"]
    )
    assert lines["8"]["perplexity_before"] == pytest.approx(lines["4"]["perplexity_before"])
    again = run(capsys, "quantize", tmp_path / "int8", tmp_path / "twice")
    assert again.code == 2 and "is quantized already (int8, groups of 8; head: int8" in again.err
    assert lines["8"]["head_bits"] == 8 and lines["8"]["head_copy"] == config.vocab_size * (32 + 2)
    planned = run(capsys, "plan", tmp_path / "int8", "--max-seq-len", "32")
    assert planned.code == 0 and "of them the head's copy of the token table" in planned.out


def test_the_command_says_what_became_of_the_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    labels = ClassificationHeadConfig(("no", "yes"))
    cases = {
        "tied": (replace(model_config(), hidden_size=32), [], "head: int8, groups of 32; 2.22 KiB in addition to the"),
        "untied": (untied(replace(model_config(), hidden_size=32)), [], "head: int8, groups of 32\n"),
        "requested": (replace(model_config(), hidden_size=32), ["--head-bits", "0"], "head: left, as requested"),
        "narrow": (model_config(), [], "head: left, groups of 32 do not divide its width of 24"),
        "labels": (replace(encoder_config(), head=labels), [], "head: left, it is no language head"),
    }
    for name, (config, options, text) in cases.items():
        write(tmp_path / name, config)
        out = tmp_path / f"{name}-int4"
        arguments = ["--bits", "4", "--group-size", "8", *options]
        result = run(capsys, "quantize", tmp_path / name, out, *arguments)
        assert result.code == 0 and text in result.out, result.out + result.err
        matrices = checkpoint.open_checkpoint(out).quantized_matrices
        checkpoint.loader.load_model(out)
        assert ("head.output" in matrices) == ("head: int8" in text)
        if "head.output" in matrices:
            assert (matrices["head.output"].format[:2], matrices["decoder.layers.0.mlp.up"].format[:2]) == (
                (8, 32),
                (4, 8),
            )


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


@pytest.mark.parametrize("tied", [True, False])
def test_other_readers_get_dequantized_matrices(tmp_path: Path, capsys: pytest.CaptureFixture[str], tied: bool) -> None:
    folder = quantized(tmp_path, replace(model_config(), tie_embeddings=tied), 8, 8)
    assert run(capsys, "export", folder, tmp_path / "hf").code == 0
    exported, own = (checkpoint.open_checkpoint(path) for path in (tmp_path / "hf", folder))
    theirs = dict(exported.weights())
    for name, tensor in own.weights():
        assert torch.equal(theirs[name], tensor), name
    model, _ = checkpoint.loader.load_model(folder)
    with pytest.raises(ConfigError, match="floating-point weights, got int8"):
        model.train()


@pytest.mark.parametrize("tied", [True, False])
def test_verify_compares_with_the_dequantized_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tied: bool
) -> None:
    folder = quantized(tmp_path, replace(model_config(), tie_embeddings=tied), 4, 8)
    result = run(capsys, "verify", folder, "--json")
    assert result.code == 0, result.err
    faulty = run(capsys, "verify", folder, "--inject-fault", "packed")
    assert faulty.code == 1 and "the joined product of decoder.layers.0.attention" in faulty.out


def test_rounded_activations_are_verified_and_refused_without_quantized_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, orders, whole_logits = quantized(tmp_path, model_config(), 8, 8), set(), ReferenceModel.whole_logits

    def record(self: ReferenceModel, *rest: Any, sum_order: int = 0, **options: Any) -> list[torch.Tensor]:
        orders.add(sum_order)
        return whole_logits(self, *rest, sum_order=sum_order, **options)

    monkeypatch.setattr(ReferenceModel, "whole_logits", record)
    result = run(capsys, "verify", folder, "--activation-bits", "8", "--num-prompts", "3", "--json")
    assert result.code == 0 and orders == set(range(12)), result.err
    plain, rounded = kvad.LLM.load(folder, max_seq_len=40), kvad.LLM.load(folder, max_seq_len=40, activation_bits=8)
    assert plain.engine.cache_fingerprint("") != rounded.engine.cache_fingerprint("")
    assert plain.score([[1, 2, 3]])[0] != rounded.score([[1, 2, 3]])[0]
    divided = run(capsys, "verify", folder, "--mesh", "1x2")
    assert divided.code == 2 and "weights: int8 and int4 are not supported on a mesh of 1x2" in divided.err
    for model, bits, message in (("model", 8, "the model has no int8 or int4 weights"), ("small", 4, "must be 8")):
        with pytest.raises(ConfigError, match=message):
            kvad.LLM.load(tmp_path / model, activation_bits=bits)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--group-size", "0"], "--group-size: must be at least 1, got 0"),
        (["--group-size", "7"], "group_size: 7 divides the inputs of no matrix"),
        (["--data-tokens", "1"], "--data-tokens: must be at least 2, got 1"),
        (["--data", "no-such-file"], "--data: the model has no tokenizer"),
        (["--bits", "5"], "'5' is not one of '8', '4'"),
        (["--head-bits", "4"], "'4' is not one of '8', '0'"),
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


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"head_bits": 5}, "head_bits must be 0, 4 or 8"),
        ({"head_group_size": -1}, "group_size not negative"),
        ({"head_size": 5}, "must have bits and group_size"),
    ],
)
def test_a_damaged_head_is_named(tmp_path: Path, content: dict[str, int], text: str) -> None:
    folder = quantized(tmp_path, model_config(), 8, 8)
    tensors = {name: tensor.clone() for name, tensor in checkpoint.open_checkpoint(folder).tensors.items()}
    form = WeightQuantization(8, 8, 8, 8)._asdict()
    save_checkpoint(folder, model_config(), tensors, None, quantization=form | content)
    with pytest.raises(ConfigError, match=text):
        checkpoint.loader.load_model(folder)
    del tensors["head.output.scale"]
    save_checkpoint(folder, model_config(), tensors, None, quantization=form)
    with pytest.raises(CheckpointError, match=r"tensor head\.output\.scale \[67, 3\] is missing"):
        checkpoint.loader.load_model(folder)
