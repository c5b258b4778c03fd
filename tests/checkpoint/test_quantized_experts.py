"""Mixtures of experts with quantized weights, of ``kvad quantize`` and of GGUF files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from kvad import benchmarks, checkpoint, ops
from kvad.cache.config import CacheConfig
from kvad.cache.sizing.memory_plan import decode_step_bytes
from kvad.checkpoint import gguf as gguf_lib
from kvad.checkpoint.export import export_hf, quantize_checkpoint
from kvad.checkpoint.folder import WeightQuantization
from kvad.checkpoint.handle import quantizable
from kvad.checkpoint.native import save_checkpoint
from kvad.config import parameter_shapes
from kvad.engine.options import EngineConfig
from kvad.errors import CheckpointError, ConfigError
from kvad.llm import LLM
from kvad.model import batch_invariant
from kvad.model.layers import MixtureOfExperts
from kvad.model.transformer import Transformer
from kvad.ops.block_matrix import BlockLinear
from kvad.ops.quantized_linear import QuantizedLinear, QuantizedMatrix, quantize_matrix, round_inputs
from kvad.planning.report import plan_target, read_target
from tests.checkpoint.test_gguf_quantized import engine_logits, load, with_blocks
from tests.cli.test_quantize import dequantized
from tests.file_parity import cases
from tests.support.cli_checkpoints import run

TOKENS = [5, 6, 7, 9, 30, 21, 2, 8]
FAMILIES = ("mixtral", "qwen3moe", "gpt-oss", "deepseek2 v3", "granitemoe shared")


def quantized(tmp_path: Path, case: str, bits: int = 8, group: int = 8) -> Path:
    plain = cases.write_case(case, tmp_path / "plain")
    quantize_checkpoint(checkpoint.open_checkpoint(plain), tmp_path / "small", WeightQuantization(bits, group, 8, 8))
    return tmp_path / "small"


def mixtures(model: Transformer) -> Iterator[MixtureOfExperts]:
    yield from (module for module in model.modules() if isinstance(module, MixtureOfExperts))


def logits(model: Transformer) -> Tensor:
    return LLM(model, None, CacheConfig(max_seq_len=40), engine_config=EngineConfig(native=False)).logits(TOKENS)


@pytest.mark.parametrize(("bits", "group"), [(8, 8), (4, 8), (4, 0)])
@pytest.mark.parametrize("case", FAMILIES)
def test_the_model_is_that_of_the_dequantized_experts(tmp_path: Path, case: str, bits: int, group: int) -> None:
    folder = quantized(tmp_path, case, bits, group)
    model, handle = checkpoint.loader.load_model(folder, "float64")
    experts = [part for moe in mixtures(model) for part in (moe.gate, moe.up, moe.down)]
    assert experts and all(isinstance(part, QuantizedLinear) for part in experts)
    assert torch.equal(logits(model), logits(dequantized(folder, torch.float64)))
    original = dict(checkpoint.open_checkpoint(tmp_path / "plain").weights())
    weights, stored = dict(handle.weights()), load_file(folder / "model.safetensors")
    assert weights.keys() == original.keys()
    for name, shape in parameter_shapes.weight_shapes(handle.config).items():
        if f"{name}.data" in stored:
            scale = stored[f"{name}.scale"].float()
            assert len(shape) == 3 and scale.shape == (*shape[:2], shape[2] // (group or shape[2]))
            error = (weights[name] - original[name]).abs().unflatten(-1, (-1, group or shape[2])).amax(-1)
            assert (error <= 0.502 * scale + 1e-3 * original[name].abs().max()).all() and error.max() > 0


def test_experts_are_quantized_and_dequantized_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, dequantize = [], QuantizedMatrix.dequantize

    def record(weight: Tensor, *rest: Any) -> QuantizedMatrix:
        sizes.append(weight.numel())
        return quantize_matrix(weight, *rest)

    def record_rows(self: QuantizedMatrix, *rest: Any) -> Tensor:
        sizes.append(dequantize(self, *rest).numel())
        return dequantize(self, *rest)

    monkeypatch.setattr(ops.quantized_linear, "quantize_matrix", record)
    monkeypatch.setattr(QuantizedMatrix, "dequantize", record_rows)
    folder = quantized(tmp_path, "mixtral")
    dict(checkpoint.open_checkpoint(folder).weights())
    assert max(sizes) == 96 * 64 and len(sizes) == 3 * (2 * (4 + 5 * 3) + 1)


@pytest.mark.parametrize("part", ["data", "scale", "minimum"])
def test_damaged_experts_are_named(tmp_path: Path, part: str) -> None:
    folder = quantized(tmp_path, "mixtral", 4)
    handle, tensors = checkpoint.open_checkpoint(folder), load_file(folder / "model.safetensors")
    name, form = f"decoder.layers.1.mlp.down.{part}", WeightQuantization(4, 8, 8, 8)._asdict()
    for damaged in (tensors[name][1:], tensors[name].flatten(0, 1), tensors[name].double()):
        content = tensors | {name: damaged.contiguous()}
        save_checkpoint(tmp_path / "damaged", handle.config, content, None, quantization=form)
        with pytest.raises(CheckpointError, match=rf"{name} has shape .*, the config requires \[5, 64, "):
            checkpoint.loader.load_model(tmp_path / "damaged")
    del tensors[name]
    save_checkpoint(tmp_path / "damaged", handle.config, tensors, None, quantization=form)
    with pytest.raises(CheckpointError, match=r"decoder\.layers\.1\.mlp\.down"):
        checkpoint.loader.load_model(tmp_path / "damaged")


@pytest.mark.parametrize("bits", [8, 4])
def test_sizes_are_those_of_the_loaded_experts(tmp_path: Path, bits: int) -> None:
    folder = quantized(tmp_path, "qwen3moe", bits)
    model, handle = checkpoint.loader.load_model(folder)
    plan = plan_target(read_target(str(folder)), budget=64)
    assert plan.weights == handle.weight_bytes("float32") == sum(x.nbytes for x in model.state_dict().values())
    steps = [decode_step_bytes(plan, count, 4) for count in (1, 2, 3, 4)]
    one_expert = sum(part.matrix.num_bytes for moe in mixtures(model) for part in (moe.gate, moe.up, moe.down)) // 5
    cached = steps[3] - steps[2]  # three sequences can choose all 5 experts
    assert (steps[1] - steps[0] - cached, steps[2] - steps[1] - cached) == (2 * one_expert, one_expert)
    decoder = model.decoder
    assert decoder is not None
    few, all_experts = (sum(map(benchmarks.step_profile._read_bytes(count), decoder.modules())) for count in (1, 3))
    routers = sum(moe.router.weight.nbytes for moe in mixtures(model))
    assert all_experts - few == pytest.approx(3 * one_expert, abs=routers)


def test_other_commands_read_the_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = quantized(tmp_path, "mixtral")
    for command in ("doctor", "inspect"):
        result = run(capsys, command, folder)
        assert result.code == 0 and "problem" not in result.out, result.out + result.err
    expected = dict(checkpoint.open_checkpoint(folder).weights())
    assert run(capsys, "export", folder, tmp_path / "hf").code == 0
    gguf_lib.export_gguf(checkpoint.open_checkpoint(folder), tmp_path / "model.gguf", "float32")
    for path in (tmp_path / "hf", tmp_path / "model.gguf"):
        weights = dict(checkpoint.open_checkpoint(path).weights())
        assert weights.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in weights.items())
    for moe in mixtures(checkpoint.loader.load_model(folder)[0]):
        with pytest.raises(ConfigError, match="floating-point weights, got int8"):
            moe.train()


VERIFY = ("--num-prompts", "1", "--no-preempt", "--no-prefix-hit", "--layout", "paged", "--cache-dtype")


@pytest.mark.parametrize("case", FAMILIES)  # latent attention reads a quantized matrix as it is
def test_verify_compares_the_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    folder = quantized(tmp_path, case)
    for options in (["float32"], ["float64", "--activation-bits", "8"]):
        result = run(capsys, "verify", folder, *VERIFY, *options)
        assert result.code == 0 and "verdict: exact" in result.out, result.out + result.err


def test_activations_of_experts_are_rounded(tmp_path: Path) -> None:
    model, _ = checkpoint.loader.load_model(quantized(tmp_path, "gpt-oss"))
    model.round_activations(8)
    x = torch.randn(3, 64)
    for moe in mixtures(model):
        assert isinstance(moe.gate, QuantizedLinear) and moe.gate_bias is not None
        weight = moe.gate.matrix.dequantize(torch.float32).unflatten(0, (5, -1))[2]
        expected = round_inputs(x, 8) @ weight.t() + moe.gate_bias[2]
        torch.testing.assert_close(moe._product(x, moe.gate, moe.gate_bias, 2), expected, rtol=1e-5, atol=1e-6)
        assert (x @ weight.t() + moe.gate_bias[2] - expected).abs().max() > 1e-3


@pytest.mark.parametrize(("source", "dtype"), [("int4", "float32"), ("gguf", "bfloat16")])
def test_deterministic_experts_give_the_same_bits_in_any_batch(tmp_path: Path, source: str, dtype: str) -> None:
    if source == "gguf":
        path = with_blocks(cases.write_case("gpt-oss", tmp_path / "plain"), tmp_path / "m.gguf", {"": "Q4_0"})
    else:
        path = quantized(tmp_path, "gpt-oss", int(source[3:]))
    prompts = [[(7 * i * n + i) % 64 for i in range(n)] for n in (3, 30, 11, 7)]
    options: dict[str, Any] = {"max_tokens": 6, "logprobs": 2, "temperature": 0.9, "seed": 3}
    many, one = (
        LLM.load(path, dtype=dtype, max_seq_len=60, max_num_seqs=count, deterministic=True) for count in (4, 1)
    )
    for prompt, together in zip(prompts, many.generate(prompts, **options), strict=True):
        alone = one.generate(prompt, **options)
        assert alone.tokens == together.tokens and alone.logprobs == together.logprobs


def test_products_of_quantized_matrices_are_tested_without_their_biases(tmp_path: Path) -> None:
    """The bias is added to the product, so that a product with one would be another kernel."""
    found = []
    for path in (tmp_path / "plain", quantized(tmp_path, "gpt-oss")):
        products = list(batch_invariant._products(checkpoint.loader.load_model(path)[0]))
        found.append({(each.in_features, each.out_features) for each in products if each.bias})
    assert found == [{(64, 32), (64, 16), (32, 64), (64, 96), (96, 64), (64, 5)}, {(64, 5)}]  # the router's remains


# ---------------------------------------------------------------- GGUF

EXPERTS = [name for name, (_, changes) in cases.CASES.items() if any("experts" in key for key in changes)]
WIDTHS = {"moe_intermediate_size": 64}  # the groups of 32 divide it


def gguf_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, kinds: dict[str, str], **changes: object
) -> Path:
    model_type, content = cases.CASES[case]
    widths = {key: size for key, size in WIDTHS.items() if key in content}
    monkeypatch.setitem(cases.CASES, case, (model_type, {**content, **widths, **changes}))
    return with_blocks(cases.write_case(case, tmp_path / "plain"), tmp_path / "model.gguf", kinds)


# Others are those of ``test_gguf_quantized.py`` and the long ones.
SHORT = (*EXPERTS, "gpt2", "bloom", "gptneox", "falcon groups")


def long_unless(names: Iterable[str], short: Iterable[str]) -> list[Any]:
    return [name if name in short else pytest.param(name, marks=pytest.mark.long) for name in names]


@pytest.mark.parametrize("case", long_unless(cases.CASES, SHORT))
def test_matrices_of_every_architecture_are_those_of_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    path = gguf_file(tmp_path, monkeypatch, case, {"": "Q8_0"})
    handle, dequantized_names, part = checkpoint.open_checkpoint(path), [], gguf_lib.reader.RawTensors.part

    def record(self: gguf_lib.reader.RawTensors, name: str, expert: int | None = None) -> Tensor:
        if self.kind(name) == "Q8_0":
            dequantized_names.append(name)
        return part(self, name, expert)

    weights, matrices = dict(handle.weights_as(torch.float32)), handle.quantized_matrices
    monkeypatch.setattr(gguf_lib.reader.RawTensors, "part", record)
    unquantized = dict(handle.unquantized_weights_as(torch.float32))
    assert not [name for name in dequantized_names if "_exps." in name]
    shapes = parameter_shapes.weight_shapes(handle.config)
    for name, matrix in matrices.items():
        parameter = parameter_shapes.quantized_parameter(shapes, name)
        assert parameter is not None
        expected = weights.pop(parameter)
        assert torch.equal(matrix.dequantize(torch.float32), expected.flatten(0, -2)), name
    assert weights.keys() == unquantized.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in unquantized.items())
    experts = {name for name, shape in shapes.items() if len(shape) == 3 and shape[-1] % 32 == 0}
    assert bool(experts) == (case in EXPERTS) and matrices.keys() >= experts
    layers = set(dict(quantizable(Transformer(handle.config))))
    missing = {name for name in layers - set(matrices) if shapes.get(f"{name}.weight", (1,))[-1] % 32 == 0}
    assert not [name for name in missing if not name.endswith("kv_up")]  # of two tensors, one transposed


KINDS = {
    "mixtral": {"": "Q4_K", "ffn_down_exps": "Q6_K"},
    "qwen3moe": {"": "Q8_0"},
    "gpt-oss": {"ffn": "MXFP4"},
    "granitemoe": {"ffn_gate_exps": "Q4_1"},  # up and down are not quantized
    "deepseek2 v3": {"": "Q8_0", "ffn_down_exps": "Q4_0"},
}


@pytest.mark.parametrize("case", long_unless(KINDS, ["mixtral"]))
def test_logits_of_a_file_are_those_of_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 256, "intermediate_size": 512} if case == "mixtral" else {}
    path = gguf_file(tmp_path, monkeypatch, case, KINDS[case], **sizes)
    handle = checkpoint.open_checkpoint(path)
    model = checkpoint.loader.load_weights(handle, "float32")
    count = sum(isinstance(part, BlockLinear) for moe in mixtures(model) for part in (moe.gate, moe.up, moe.down))
    assert count == len(list(mixtures(model))) * (1 if case == "granitemoe" else 3)
    ours = logits(model)
    torch.testing.assert_close(ours, logits(dequantized(path, torch.float32)), rtol=1e-4, atol=1e-4)
    export_hf(handle, tmp_path / "hf", dtype=torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager").eval()
    with torch.no_grad():
        expected = theirs(torch.tensor([TOKENS])).logits[0]
    assert (ours - expected).abs().max() < 2e-4 * max(1.0, expected.abs().max()) and expected.std() > 0.05
    dtype = str(handle.stored_dtype).removeprefix("torch.")
    assert plan_target(read_target(str(path)), budget=64).weights == handle.weight_bytes(dtype)
    if case == "qwen3moe":
        verified = run(capsys, "verify", path, *VERIFY, "float64")
        assert verified.code == 0 and "verdict: exact" in verified.out, verified.out + verified.err


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("case", ["gpt2", "bloom", "gptneox", "falcon groups"])
def test_joined_and_transposed_matrices_are_computed_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, native: bool
) -> None:
    path = gguf_file(tmp_path, monkeypatch, case, {"": "Q8_0"})
    llm = load(path, dtype="float32")
    assert sum(isinstance(module, BlockLinear) for module in llm.model.modules()) == 2 * 6
    if not native:
        llm.engine.runner.native_reason = "KVAD_NATIVE=off"
    expected = engine_logits(LLM(dequantized(path, torch.float32), None, llm.cache_config), TOKENS)
    torch.testing.assert_close(engine_logits(llm, TOKENS), expected, rtol=2e-4, atol=2e-4 * float(expected.abs().max()))
