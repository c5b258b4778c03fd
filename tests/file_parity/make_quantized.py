"""Pack random matrices with the libraries that write quantized checkpoints, and store what they dequantize.

    /tmp/kvad-oracle/quantizers/bin/python tests/file_parity/make_quantized.py OUT.safetensors

AutoGPTQ, GPTQModel, AutoAWQ and compressed-tensors pack; each library's own code computes the matrix that the parts
stand for. MXFP4 is dequantized by transformers. ``tests/checkpoint/test_quantized.py`` compares kvad with the file.
"""

import importlib
import importlib.machinery
import json
import sys
import sysconfig
import types
from pathlib import Path

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

OUTPUTS, INPUTS = 32, 64
LIBRARIES = ("auto_gptq", "auto_gptq.nn_modules", "auto_gptq.nn_modules.qlinear", "awq", "awq.modules")
GPTQMODEL = {  # modules of the library whose names its packing imports, and does not use
    "adapter.adapter": ("LORA_MERGED_WEIGHT_PATHS", "Adapter"),
    "models._const": ("DEVICE", "PLATFORM"),
    "utils.backend": ("BACKEND",),
    "utils.logger": ("setup_logger",),
}


def load(module):
    """Import one module of a library without its package, which requires a GPU and many other libraries."""
    for name in (*LIBRARIES, "awq.modules.linear", "awq.utils"):
        if name not in sys.modules:
            package = types.ModuleType(name)
            package.__path__ = [str(Path(sysconfig.get_path("purelib"), *name.split(".")))]
            package.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
            sys.modules[name] = package
    return importlib.import_module(module)


def linear():
    layer = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
    torch.nn.init.normal_(layer.weight)
    return layer


def ranges(weight, groups, bits, symmetric):
    """Return scales and zero points [outputs, groups] of the columns' groups."""
    scales, zeros = [], []
    for group in range(max(groups) + 1):
        columns = weight[:, [index for index, each in enumerate(groups) if each == group]]
        if symmetric:
            scales.append(columns.abs().amax(1) * 2 / (2**bits - 1))
            zeros.append(torch.full_like(scales[-1], 2.0 ** (bits - 1)))
        else:
            scales.append((columns.amax(1) - columns.amin(1)) / (2**bits - 1))
            zeros.append((-columns.amin(1) / scales[-1]).round().clamp(1, 2**bits - 1))
    return torch.stack(scales, 1).half().float(), torch.stack(zeros, 1)


def gptq(bits, group_size, *, symmetric=True, act_order=False):
    quant_linear = load("auto_gptq.nn_modules.qlinear.qlinear_cuda").QuantLinear
    layer, groups = linear(), [index // (group_size if group_size > 0 else INPUTS) for index in range(INPUTS)]
    if act_order:
        groups = [groups[index] for index in torch.randperm(INPUTS).tolist()]
    scales, zeros = ranges(layer.weight.detach(), groups, bits, symmetric)
    packed = quant_linear(bits, group_size, INPUTS, OUTPUTS, False, weight_dtype=torch.float32)
    packed.pack(layer, scales, zeros, torch.tensor(groups, dtype=torch.int32))
    config = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": symmetric, "desc_act": act_order}
    parts = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
    expected = packed.float()(torch.eye(INPUTS)).t()
    return config, {**parts, "scales": parts["scales"].half()}, expected


def gptq_v2(bits, group_size):
    """Pack with GPTQModel, whose zero points of ``gptq_v2`` may be 0."""
    for name, attributes in GPTQMODEL.items():
        for part in ("gptqmodel", "gptqmodel.nn_modules", f"gptqmodel.{name.partition('.')[0]}", f"gptqmodel.{name}"):
            sys.modules.setdefault(part, types.ModuleType(part)).__path__ = []
        vars(sys.modules[f"gptqmodel.{name}"]).update({each: type(each, (), {}) for each in attributes})
    sys.modules["gptqmodel.nn_modules"].__path__ = [sysconfig.get_path("purelib") + "/gptqmodel/nn_modules"]
    library = importlib.import_module("gptqmodel.nn_modules.qlinear")
    library.BaseQuantLinear.post_init = lambda self: None
    packed = library.PackableQuantLinear.__new__(library.PackableQuantLinear)
    torch.nn.Module.__init__(packed)
    sizes = {"bits": bits, "maxq": 2**bits - 1, "pack_factor": 32 // bits, "pack_dtype_bits": 32}
    types_ = {"pack_np_math_dtype": np.uint32, "pack_np_dtype": np.int32, "dequant_dtype": torch.int16}
    groups = [index // group_size for index in range(INPUTS)]
    vars(packed).update({**sizes, **types_, "g_idx": torch.tensor(groups, dtype=torch.int32)})
    layer, scales = linear(), torch.rand(OUTPUTS, INPUTS // group_size).half().float() + 0.25
    packed.pack(layer, scales * 8 / 2**bits, torch.randint(0, 2**bits, scales.shape).float())
    packed.post_init()
    packed.scales = packed.scales.float()
    config = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": False, "desc_act": False}
    parts = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
    return (
        {**config, "checkpoint_format": "gptq_v2"},
        {**parts, "scales": parts["scales"].half()},
        packed.dequantize_weight().t(),
    )


def awq(group_size):
    gemm, packing = load("awq.modules.linear.gemm"), load("awq.utils.packing_utils")
    layer, groups = linear(), [index // group_size for index in range(INPUTS)]
    scales, zeros = ranges(layer.weight.detach(), groups, 4, symmetric=False)
    packed = gemm.WQLinear_GEMM.from_linear(layer, 4, group_size, scales=scales.t(), zeros=zeros.t())
    parts = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales")}
    expected = packing.dequantize_gemm(parts["qweight"], parts["qzeros"], parts["scales"].float(), 4, group_size).t()
    return (
        {"quant_method": "awq", "bits": 4, "group_size": group_size, "version": "gemm", "zero_point": True},
        parts,
        (expected),
    )


def compressed(form, strategy, **options):
    args = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": strategy, **options}
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    weight = linear().weight.detach()
    group_size = args.get("group_size") or INPUTS
    rows, columns = args.get("block_structure") or (OUTPUTS if strategy == "tensor" else 1, group_size)
    blocks = weight.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
    limit = 448.0 if args["type"] == "float" else 2 ** (args["num_bits"] - 1) - 1
    scales, zeros = blocks.abs().amax((1, 3)) / limit, torch.zeros(1)
    state = {"weight": weight, "weight_scale": scales.reshape(-1) if strategy == "tensor" else scales}
    if not args["symmetric"]:
        zeros = torch.randint(-5, 6, scales.shape, dtype=torch.int8)
        state |= {"weight_scale": scales * 2, "weight_zero_point": zeros}
    compressor = BaseCompressor.get_value_from_registry(form)
    parts = compressor.compress(state, scheme)
    weights = json.loads(scheme.weights.model_dump_json(exclude_none=True))
    group = {"targets": ["Linear"], "weights": weights}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": []}
    return config, parts, compressor.decompress(parts, scheme)["weight"]


def mxfp4():
    parts = {
        "_blocks": torch.randint(0, 256, (2, OUTPUTS, 2, 16), dtype=torch.uint8),
        "_scales": torch.randint(110, 130, (2, OUTPUTS, 2), dtype=torch.uint8),
    }
    expected = convert_moe_packed_tensors(parts["_blocks"], parts["_scales"], dtype=torch.float32)
    return {"quant_method": "mxfp4"}, parts, expected


def main(out):
    torch.manual_seed(0)
    cases = {f"gptq-{bits}": gptq(bits, 32, symmetric=bits != 3) for bits in (2, 3, 4, 8)}
    cases |= {
        "gptq-4-channel": gptq(4, -1, symmetric=False),
        "gptq-4-act-order": gptq(4, 16, symmetric=False, act_order=True),
        "awq": awq(32),
        "pack-4-group": compressed("pack-quantized", "group", num_bits=4, group_size=32),
        "pack-4-zeros": compressed("pack-quantized", "group", num_bits=4, group_size=16, symmetric=False),
        "pack-4-channel": compressed("pack-quantized", "channel", num_bits=4),
        "pack-8-zeros": compressed("pack-quantized", "channel", symmetric=False),
        "int-8-channel": compressed("int-quantized", "channel"),
        "int-8-zeros": compressed("int-quantized", "channel", symmetric=False),
        "float-8-tensor": compressed("float-quantized", "tensor", type="float"),
        "float-8-channel": compressed("float-quantized", "channel", type="float"),
        "float-8-block": compressed("float-quantized", "block", type="float", block_structure=[16, 32]),
        "mxfp4": mxfp4(),
        **{f"gptq-v2-{bits}": gptq_v2(bits, 32) for bits in (2, 3, 4, 8)},
    }
    tensors = {f"{case}/{name}": part for case, (_, parts, _) in cases.items() for name, part in parts.items()}
    tensors |= {f"{case}/expected": expected.float() for case, (_, _, expected) in cases.items()}
    configs = {case: json.dumps(config) for case, (config, _, _) in cases.items()}
    save_file({name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}, out, configs)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
