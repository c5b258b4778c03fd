"""Quantized checkpoints: matrices packed by the libraries that write them, and by the published layouts in numpy."""

import functools
import json
import math
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvad import ops
from kvad.cache.config import CacheConfig
from kvad.checkpoint import open_checkpoint, quantized
from kvad.checkpoint.conversion import HFConfigReader
from kvad.checkpoint.loader import load_model
from kvad.checkpoint.safetensors_io import open_file_tensors
from kvad.engine.options import EngineConfig
from kvad.errors import CheckpointError
from kvad.llm import LLM
from kvad.ops.native import packed_store
from tests.checkpoint.test_gguf_quantized import engine_logits
from tests.file_parity.cases import write_case
from tests.support.cli_checkpoints import run
from tests.support.random_models import build

transformers = pytest.importorskip("transformers")

GOLDEN = Path(__file__).parents[1] / "golden_files" / "quantized.safetensors"
with open(GOLDEN, "rb") as _file:
    (_size,) = struct.unpack("<Q", _file.read(8))
    CASES = {name: json.loads(text) for name, text in json.loads(_file.read(_size))["__metadata__"].items()}


def dequantized(path, config, expected=()):
    scheme = quantized.read_scheme(HFConfigReader({"quantization_config": config}, "config.json"))
    return quantized.DequantizedTensors(open_file_tensors(path), scheme, torch.bfloat16, expected)


@pytest.mark.parametrize("case", CASES)
def test_a_matrix_packed_by_the_library_is_what_the_library_dequantizes(tmp_path, case):
    stored = {name.partition("/")[2]: part for name, part in load_file(GOLDEN).items() if name.startswith(f"{case}/")}
    expected, joint = stored.pop("expected"), "" if case == "mxfp4" else "."
    save_file({f"model.layers.0.x{joint}{name}": part for name, part in stored.items()}, tmp_path / "m.safetensors")
    tensors = dequantized(tmp_path / "m.safetensors", CASES[case])
    (name,) = tensors
    assert name == f"model.layers.0.x{joint and '.weight'}" and tensors.shape(name) == tuple(expected.shape)
    assert torch.equal(tensors[name], expected) and tensors.dtype(name) == torch.bfloat16


@pytest.mark.parametrize("bits", [2, 4])
def test_gptq_of_gptqmodel_borrows_from_the_next_zero_point(tmp_path, bits):
    """``convert_gptq_v2_to_v1_format_module`` subtracts 1 from all numbers of a word at once."""
    case = f"gptq-v2-{bits}"
    stored = {name.partition("/")[2]: part for name, part in load_file(GOLDEN).items() if name.startswith(f"{case}/")}
    expected = stored.pop("expected")
    assert (quantized.layouts.unpack(stored["qzeros"], bits, 32) == 0).any()
    stored["qzeros"] -= (2**32 - 1) // (2**bits - 1)
    save_file({f"x.{name}": part for name, part in stored.items()}, tmp_path / "m.safetensors")
    tensors = dequantized(tmp_path / "m.safetensors", {**CASES[case], "checkpoint_format": "gptq"})
    assert torch.equal(tensors["x.weight"], expected)


# --- whole models, packed by the published layouts


def bit_stream(numbers, bits):
    """Pack [rows, numbers] into words of 32 bits, the lowest bit first."""
    planes = (numbers[..., None].astype(np.uint8) >> np.arange(bits)) & 1
    packed = np.packbits(planes.reshape(len(numbers), -1).astype(np.uint8), axis=1, bitorder="little")
    return np.pad(packed, ((0, 0), (0, -packed.shape[1] % 4))).view(np.int32)


def rounded(weight, bits, groups):
    """Return numbers, zero points and scales in float16; ``groups`` is the group of each input."""
    columns = [weight[:, groups == group] for group in range(groups.max() + 1)]
    scales = np.stack([(part.max(1) - part.min(1)) / (2**bits - 1) for part in columns], 1).astype(np.float16)
    scales = scales.astype(np.float32)
    zeros = np.clip(np.round(np.stack([-part.min(1) for part in columns], 1) / scales), 0, 2**bits - 1)
    numbers = np.clip(np.round(weight / scales[:, groups] + zeros[:, groups]), 0, 2**bits - 1)
    return numbers, zeros, scales, (numbers - zeros[:, groups]) * scales[:, groups]


def pack_gptq(weight, config, generator):
    bits = config["bits"]
    size = config["group_size"] if config["group_size"] > 0 else weight.shape[1]
    groups = np.arange(weight.shape[1]) // size
    groups = generator.permutation(groups) if config["desc_act"] else groups
    numbers, zeros, scales, result = rounded(weight, bits, groups)
    is_v2 = config.get("checkpoint_format") == "gptq_v2"
    stored = zeros if is_v2 or bits != 3 else (zeros - 1) % 2**bits
    words = bit_stream(stored.T, bits)
    parts = {
        "qweight": bit_stream(numbers, bits).T,
        "qzeros": words if is_v2 or bits == 3 else words - np.int32((2**32 - 1) // (2**bits - 1)),
        "scales": scales.T.astype(np.float16),
        "g_idx": groups.astype(np.int32),
    }
    return parts, result


def pack_awq(weight, config, generator):
    groups = np.arange(weight.shape[1]) // config["group_size"]
    numbers, zeros, scales, result = rounded(weight, 4, groups)
    order = np.arange(len(weight)).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].ravel()
    parts = {"qweight": bit_stream(numbers.T[:, order], 4), "qzeros": bit_stream(zeros.T[:, order], 4)}
    return {**parts, "scales": scales.T.astype(np.float16)}, result


def pack_int(weight, config, generator):
    groups = np.arange(weight.shape[1]) // config["config_groups"]["group_0"]["weights"]["group_size"]
    numbers, zeros, scales, result = rounded(weight, 4, groups)
    parts = {
        "weight_packed": bit_stream(numbers, 4),
        "weight_shape": np.array(weight.shape),
        "weight_scale": scales,
        "weight_zero_point": bit_stream(zeros.T, 4).T,
    }
    return parts, result


def pack_float8(weight, config, generator):
    rows, columns = config["weight_block_size"]
    scales = np.zeros((math.ceil(weight.shape[0] / rows), math.ceil(weight.shape[1] / columns)), np.float32)
    numbers, result = np.zeros_like(weight), np.zeros_like(weight)
    for i, j in np.ndindex(*scales.shape):
        block = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        scales[i, j] = np.abs(weight[block]).max() / 448
        numbers[block] = weight[block] / scales[i, j]
        numbers[block] = torch.tensor(numbers[block]).to(torch.float8_e4m3fn).float().numpy()
        result[block] = numbers[block] * scales[i, j]
    return {"weight": torch.tensor(numbers).to(torch.float8_e4m3fn), "weight_scale_inv": scales}, result


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
PACK = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 16}
COMPRESSED = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": PACK}},
}  # fmt: skip
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [24, 40]}
METHODS = {
    "gptq": (pack_gptq, GPTQ),
    "gptq of 3 bits in another order": (pack_gptq, {**GPTQ, "bits": 3, "desc_act": True, "checkpoint_format": "gptq"}),
    "gptq_v2, whole columns": (pack_gptq, {**GPTQ, "bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"}),
    "awq": (pack_awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}),
    "compressed-tensors": (pack_int, COMPRESSED),
    "fp8": (pack_float8, FP8),
}
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
MODELS = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "phi3": ("Phi3", {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}),
    "mixtral": ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2}),
}


@functools.cache
def random_model(name):
    kind, options = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **options)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    content = {**config.to_dict(), "architectures": [f"{kind}ForCausalLM"], "dtype": "float32"}
    return json.dumps(content), model.state_dict()


def plain_model(name):
    """Return the config.json and the tensors of a random model."""
    content, weights = random_model(name)
    return json.loads(content), dict(weights)


def write_pair(folder, model="llama", method="gptq", dtype="float32", **changes):
    """Write a quantized folder and one with the matrices that its parts stand for; return both."""
    content, weights = plain_model(model)
    for name in ("plain", "quantized"):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(content))
    pack, quantization = METHODS[method]
    quantization = {**quantization, **changes}
    generator, parts = np.random.default_rng(0), {}
    for name in [name for name in weights if "_proj.weight" in name or ".experts." in name]:
        packed, result = pack(weights[name].numpy() * 8, quantization, generator)
        weights[name] = torch.tensor(result)
        module = name.removesuffix(".weight")
        parts |= {f"{module}.{suffix}": torch.as_tensor(array) for suffix, array in packed.items()}
    save_file(weights, folder / "plain" / "model.safetensors", {"format": "pt"})
    kept = {name: weights[name] for name in weights if not any(part.startswith(name[:-6]) for part in parts)}
    save_file({**kept, **{name: part.contiguous() for name, part in parts.items()}}, quantized_file(folder))
    content = {**content, "dtype": dtype, "torch_dtype": dtype, "quantization_config": quantization}
    (folder / "quantized" / "config.json").write_text(json.dumps(content))
    return folder / "quantized", folder / "plain"


def quantized_file(folder):
    return folder / "quantized" / "model.safetensors"


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def logits(folder, **options):
    with LLM.load(folder, max_num_seqs=1, max_seq_len=48, **options) as llm:
        return llm.logits(list(range(3, 40)))


@pytest.mark.parametrize(
    ("model", "method"), [*(("llama", method) for method in METHODS), ("phi3", "awq"), ("mixtral", "gptq")]
)
def test_a_quantized_model_is_the_model_of_its_dequantized_matrices(tmp_path, model, method):
    stored, plain = write_pair(tmp_path, model, method)
    expected = dict(open_checkpoint(plain).weights())
    for name, tensor in open_checkpoint(stored).weights():
        assert tensor.shape == expected[name].shape and (tensor - expected[name]).abs().max() < 1e-6, name
    if model != "llama":
        assert (logits(stored) - logits(plain)).abs().max() < 1e-4


def test_matrices_have_the_dtype_of_the_config_or_the_given_one(tmp_path):
    stored, plain = write_pair(tmp_path, dtype="bfloat16")
    handle, expected = open_checkpoint(stored), dict(open_checkpoint(plain).weights())
    assert handle.stored_dtype == torch.bfloat16 and handle.quantization == "GPTQ, 4 bits, groups of 32"
    weights = load_model(stored)[0].state_dict()
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    name = "decoder.layers.0.mlp.down.weight"
    assert torch.equal(weights[name], expected[name].bfloat16())
    weights = load_model(stored, "float32")[0].state_dict()
    assert (weights[name] - expected[name]).abs().max() < 1e-6 and weights[name].is_contiguous()


def test_the_commands_count_name_and_convert_it(tmp_path, capsys):
    stored, plain = write_pair(tmp_path, "phi3", "compressed-tensors")
    planned = [json.loads(run(capsys, "plan", folder, "--json").out) for folder in (stored, plain)]
    assert planned[0]["bytes"] == planned[1]["bytes"]
    shown = run(capsys, "inspect", stored)
    assert shown.code == 0 and "quantized: compressed-tensors, int4 per group; dequantized when" in shown.out
    assert json.loads(run(capsys, "inspect", stored, "--json").out)["quantization"].startswith("compressed-tensors")
    assert run(capsys, "doctor", stored).code == 0
    assert run(capsys, "export", stored, tmp_path / "out").code == 0
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in content and content["torch_dtype"] == "float32"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        expected = theirs(torch.tensor([list(range(3, 40))])).logits[0]
    assert (logits(stored) - expected).abs().max() < 1e-3
    assert run(capsys, "import", stored, tmp_path / "native").code == 0
    assert torch.equal(logits(tmp_path / "native"), logits(stored))


def test_what_is_not_used_is_listed_and_a_bias_of_zeros_is_dropped(tmp_path):
    activations = {"num_bits": 8, "type": "int", "dynamic": True}
    group = {"targets": ["Linear"], "weights": PACK, "input_activations": activations}
    stored, plain = write_pair(
        tmp_path, method="compressed-tensors", config_groups={"group_0": group}, kv_cache_scheme={"a": 1}
    )
    handle = open_checkpoint(stored)
    expected = ("quantization_config.config_groups.group_0.input_activations", "quantization_config.kv_cache_scheme")
    assert handle.unused_keys == expected
    bias = "model.layers.0.mlp.up_proj.bias"
    change_tensors(stored, lambda tensors: tensors.update({bias: torch.zeros(96)}))
    assert len(dict(open_checkpoint(stored).weights())) == len(dict(open_checkpoint(plain).weights()))
    change_tensors(stored, lambda tensors: tensors.update({bias: torch.ones(96)}))
    with pytest.raises(CheckpointError, match=r"up_proj.bias \[96\] is extra"):
        dict(open_checkpoint(stored).weights())


GROUP = {"targets": ["Linear"], "weights": PACK}
REFUSED = {
    "bits": ({**GPTQ, "bits": 5}, "bits: must be 2, 3, 4 or 8, got 5"),
    "group": ({**GPTQ, "group_size": 0}, "group_size: must be -1 or at least 1, got 0"),
    "dynamic": ({**GPTQ, "dynamic": {"a": {"bits": 8}}}, "dynamic .* is not supported"),
    "marlin": ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported"),
    "words": ({**GPTQ, "pack_dtype": "int16"}, "pack_dtype 'int16' is not supported"),
    "gemv": ({**METHODS["awq"][1], "version": "gemv"}, "version 'gemv' is not supported"),
    "no zeros": ({**METHODS["awq"][1], "zero_point": False}, "zero_point False is not supported"),
    "blocks": ({**FP8, "weight_block_size": [0]}, "weight_block_size: must be two sizes"),
    "fp8 format": ({**FP8, "fmt": "e5m2"}, "fmt 'e5m2' is not supported"),
    "nvfp4": ({**COMPRESSED, "format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized' is not supported"),
    "no groups": ({**COMPRESSED, "config_groups": {}}, "config_groups is missing"),
    "sparse": ({**COMPRESSED, "sparsity_config": {"format": "sparse-24"}}, "sparsity_config .* is not supported"),
    "pattern": ({**COMPRESSED, "ignore": ["re:("]}, "is not a pattern"),
    "width": (
        {**COMPRESSED, "config_groups": {"g": {**GROUP, "weights": {**PACK, "num_bits": 3}}}}, "int3 is not supported"
    ),
    "bitsandbytes": ({"quant_method": "bitsandbytes"}, "BITSANDBYTES.*call model.dequantize"),
    "unknown": ({"quant_method": "hqq"}, r"quantized \(HQQ\), and kvad reads only gptq, awq"),
    "no list": ({**COMPRESSED, "ignore": "lm_head"}, "ignore: must be a list of names"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_read_is_refused_by_name(tmp_path, case):
    config, message = REFUSED[case]
    stored, _ = write_pair(tmp_path)
    content = json.loads((stored / "config.json").read_text()) | {"quantization_config": config}
    (stored / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(stored).config  # noqa: B018
    assert "\n" not in str(caught.value)


def test_transposed_families_are_refused(tmp_path):
    config = {"model_type": "gpt2", "quantization_config": GPTQ}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="a quantized gpt2 is not supported"):
        open_checkpoint(tmp_path).config  # noqa: B018


Q_PROJ = "model.layers.0.self_attn.q_proj"
DAMAGE = {
    "no zeros": ("gptq", lambda t: t.pop(f"{Q_PROJ}.qzeros"), "q_proj.qzeros is missing"),
    "shape of scales": ("gptq", lambda t: t.update({f"{Q_PROJ}.scales": torch.ones(3, 64)}), r"must be \[2, 64\]"),
    "group": ("gptq", lambda t: t[f"{Q_PROJ}.g_idx"].fill_(2), r"g_idx must be in \[0, 2\)"),
    "groups": ("gptq", lambda t: t.update({f"{Q_PROJ}.g_idx": torch.arange(9)}), r"g_idx must be \[64\], got \[9\]"),
    "half a matrix": (
        "gptq", lambda t: t.update({f"{Q_PROJ}.qweight": t[f"{Q_PROJ}.qweight"][:4].clone()}),
        r"scales must be \[1, 64\]",
    ),
    "dtype": ("awq", lambda t: t.update({f"{Q_PROJ}.qweight": torch.ones(64, 8)}), "qweight must be int32"),
    "vector": ("awq", lambda t: t.update({f"{Q_PROJ}.qzeros": torch.ones(8).int()}), "qzeros must have 2 dimensions"),
    "no scales": ("awq", lambda t: t.pop(f"{Q_PROJ}.scales"), "q_proj.scales is missing"),
    "stored shape": (
        "compressed-tensors", lambda t: t[f"{Q_PROJ}.weight_shape"].fill_(99), r"weight_shape \[99, 99\] does not fit"
    ),
    "zero points": (
        "compressed-tensors", lambda t: t.update({f"{Q_PROJ}.weight_zero_point": torch.ones(3, 4).int()}),
        r"weight_zero_point must be \[8, 4\]",
    ),
    "scale": (
        "compressed-tensors", lambda t: t.update({f"{Q_PROJ}.weight_scale": torch.ones(63, 4)}),
        r"weight_scale \[63, 4\] does not fit a matrix of \[64, 64\]",
    ),
    "no scale": ("fp8", lambda t: t.pop(f"{Q_PROJ}.weight_scale_inv"), "weight_scale is missing"),
    "blocks": ("fp8", lambda t: t.update({f"{Q_PROJ}.weight_scale_inv": torch.ones(2, 2)}), r"scales must be \[3, 2\]"),
    "another matrix": (
        "fp8", lambda t: t.update({f"{Q_PROJ}.weight": t[f"{Q_PROJ}.weight"][:50].clone()}), "cannot be converted to"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
def test_parts_that_do_not_fit_are_refused_in_one_line(tmp_path, capsys, case):
    method, damage, message = DAMAGE[case]
    stored, _ = write_pair(tmp_path, method=method)
    change_tensors(stored, damage)
    refused = run(capsys, "generate", stored, "--ids", "1,2,3", "--max-tokens", 1)
    assert refused.code == 2 and re.search(message, refused.err), refused
    assert len(refused.err.strip().splitlines()) <= 2 and "Traceback" not in refused.err


def test_a_module_that_the_config_excludes_must_not_be_quantized(tmp_path):
    for entry in ("model.layers.0.mlp.up_proj", "up_proj", "re:.*up_proj$"):
        stored, _ = write_pair(tmp_path / entry[:2], method="compressed-tensors", ignore=[entry])
        with pytest.raises(CheckpointError, match="up_proj is quantized, but quantization_config lists it"):
            dict(open_checkpoint(stored).weights())


def test_experts_of_gpt_oss_in_mxfp4_are_what_transformers_converts(tmp_path):
    convert = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    folder, packed = write_mxfp4(tmp_path / "m")
    expected = {name: convert(blocks, scales, dtype=torch.float32) for name, (blocks, scales) in packed.items()}
    handle = open_checkpoint(folder)
    assert handle.unused_keys == ("num_experts",) and handle.quantization == "MXFP4, groups of 32"
    weights = dict(handle.weights())
    down = expected["model.layers.1.mlp.experts.down_proj"]
    assert torch.equal(weights["decoder.layers.1.mlp.down"], down.transpose(1, 2))
    joined = expected["model.layers.1.mlp.experts.gate_up_proj"].transpose(1, 2)
    assert torch.equal(weights["decoder.layers.1.mlp.gate"], joined[:, ::2])
    assert logits(folder, dtype="float32").isfinite().all()


def test_experts_in_mxfp4_are_computed_with_as_they_are_stored(tmp_path, monkeypatch):
    monkeypatch.setenv(packed_store.ENVIRONMENT_VARIABLE, str(tmp_path / "packed"))
    monkeypatch.setattr(packed_store, "MIN_BYTES", 0)
    monkeypatch.setattr("kvad.engine.execution.native_program.MAX_COPIED_BYTES", 100_000)
    folder, _ = write_mxfp4(tmp_path / "m")
    model, handle = load_model(folder, "float64")
    weights, files = dict(handle.weights()), ops.native.FileMappings()
    layers = {
        name: module for name, module in model.named_modules() if isinstance(module, ops.block_matrix.BlockLinear)
    }
    assert layers.keys() == {name for name in weights if re.search(r"mlp\.(gate|up|down)$", name)}
    for name, layer in layers.items():
        assert torch.equal(layer.effective_weight().view(weights[name].shape), weights[name])
        if ops.native.library.SMAPS.is_file():
            assert files.contain(layer.blocks) and files.contain(layer.scales)
    plain = build(handle.config).double()
    plain.load_state_dict(dict(handle.weights_as(torch.float64)))
    tokens, engine_config = list(range(3, 40)), EngineConfig(native=False)
    config = CacheConfig(max_num_seqs=1, max_seq_len=48)
    outputs = [LLM(each, None, config, engine_config=engine_config).logits(tokens) for each in (model, plain)]
    assert torch.equal(*outputs)
    for start in range(2):  # packed, then mapped
        with LLM.load(folder, max_num_seqs=1, max_seq_len=48, dtype="float32") as llm:
            have = engine_logits(llm, tokens)[0]
            assert torch.allclose(have.double(), outputs[0][-1].double(), atol=1e-4, rtol=1e-4)
            assert llm.engine.runner.native_reason == ops.native.load().reason
        assert ops.native.load().library is None or len(list((tmp_path / "packed").glob("*.packed"))) == 1, start


def test_mxfp4_is_planned_as_it_is_stored(tmp_path, capsys):
    folder, packed = write_mxfp4(tmp_path / "m")
    handle = open_checkpoint(folder)
    experts = sum(blocks.numel() + 4 * scales.numel() for blocks, scales in packed.values())  # scales in float32
    others = sum(x.numel() for name, x in handle.weights() if not re.search(r"mlp\.(gate|up|down)$", name))
    for name in ("", "config.json", "model.safetensors"):
        if name == "model.safetensors":  # planned without the weights, as from the hub
            (folder / name).unlink()
        report = json.loads(run(capsys, "plan", folder / "config.json" if name else folder, "--json").out)
        assert report["weights_dtype"] == "bfloat16" and report["bytes"]["weights"] == experts + 2 * others


@pytest.mark.parametrize("part", ["blocks", "scales"])
def test_damaged_mxfp4_is_named(tmp_path, part):
    folder, _ = write_mxfp4(tmp_path / "m")
    name = f"model.layers.1.mlp.experts.down_proj_{part}"
    change_tensors(folder, lambda tensors: tensors.update({name: tensors[name][:, :-1].contiguous()}))
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.down_proj"):
        load_model(folder)


def write_mxfp4(folder):
    """Write a gpt-oss with experts in MXFP4; return the folder, and blocks and scales by the matrix."""
    write_case("gpt-oss", folder)
    generator, packed = torch.Generator().manual_seed(0), {}

    def pack(tensors):
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            experts, inputs, outputs = tensors.pop(name).shape
            shape = (experts, outputs, inputs // 32)
            blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(118, 124, shape, dtype=torch.uint8, generator=generator)
            packed[name] = blocks, scales
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}

    change_tensors(folder, pack)
    content = json.loads((folder / "config.json").read_text())
    content["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn", "lm_head"]}
    content["torch_dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(content))
    return folder, packed


def test_an_adapter_is_merged_into_the_dequantized_matrices_in_their_dtype(tmp_path, capsys):
    stored, plain = write_pair(tmp_path, dtype="bfloat16")
    adapter, generator = tmp_path / "adapter", torch.Generator().manual_seed(1)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    factors = {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{side}.weight": torch.randn(
            shape, generator=generator
        )
        for layer in range(2)
        for side, shape in (("A", (2, 64)), ("B", (64, 2)))
    }
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(stored)}))
    save_file(factors, adapter / "adapter_model.safetensors")
    assert run(capsys, "merge", stored, adapter, "--out", tmp_path / "out").code == 0
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in content and content["torch_dtype"] == "bfloat16"
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}
    name, weights = Q_PROJ + ".weight", load_file(plain / "model.safetensors")
    first, second = (factors[f"base_model.model.{Q_PROJ}.lora_{side}.weight"] for side in "AB")
    assert torch.equal(merged[name], (weights[name] + 2 * second @ first).bfloat16())
