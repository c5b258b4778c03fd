"""The ``quantization_config`` of a ``config.json``.

A key that decides what a stored number means is read, and refused if its value is not supported. Keys about the
calibration are ignored. All others, such as the format of activations, are listed as unused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvad.checkpoint.conversion import HFConfigReader

SECTION = "quantization_config"
# Keys about the calibration, the kernels and the origin of a file; they do not change the stored values.
_IGNORED = """
    act_group_aware backend batch_size block_name_to_quantize cache_block_outputs damp_auto_increment damp_percent
    dataset desc_act disable_exllama do_fuse exllama_config format fuse_max_seq_len global_compression_ratio
    hyb_act max_input_length meta method model_file_base_name model_name_or_path model_seqlen
    module_name_preceding_first_block modules_in_block_to_quantize modules_to_fuse mse pad_token_id
    quantization_status static_groups sym tokenizer true_sequential use_cuda_fp16 use_exllama version
"""
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")  # of compressed-tensors


@dataclass(frozen=True)
class QuantizationScheme:
    """Storage of the quantized matrices of a checkpoint."""

    method: str  # gptq, awq, compressed-tensors, fp8 or mxfp4
    description: str  # for users
    bits: frozenset[int]  # of a stored number
    group_size: int | None = None  # numbers of one scale; None: given by the shape of the scales
    block: tuple[int, int] | None = None  # rows and columns of one scale
    zero_offset: int = 0  # added to the stored zero points
    ignored: tuple[str, ...] = ()  # modules that are not quantized: names, ends of names, or re:PATTERN
    unused_keys: tuple[str, ...] = ()  # keys that kvad does not use and that may change the model

    def is_ignored(self, module: str) -> bool:
        """Return True for a module that the config lists as not quantized."""
        return any(
            re.match(entry.removeprefix("re:"), module) is not None
            if entry.startswith("re:")
            else f".{module}".endswith(f".{entry}")
            for entry in self.ignored
        )


def read_scheme(fields: HFConfigReader) -> QuantizationScheme | None:
    """Read the scheme of a checkpoint, None if it is not quantized.

    Raises:
        CheckpointError: For a method or a value that is not supported.
    """
    if SECTION not in fields:
        return None
    part = fields.part(SECTION)
    scheme: QuantizationScheme = part.choice("quant_method", _READERS)(part)
    for key in _IGNORED.split():
        part.get(key)
    for pattern in scheme.ignored:
        if pattern.startswith("re:"):
            _check_pattern(part, pattern.removeprefix("re:"))
    return QuantizationScheme(**{**vars(scheme), "unused_keys": part.unused_keys()})


def _check_pattern(part: HFConfigReader, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise part.error(f"ignore: {pattern!r} is not a pattern: {error}") from None


def _names(part: HFConfigReader, key: str) -> tuple[str, ...]:
    """Return a list of names, empty if it is absent."""
    value = part.get(key, [])
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise part.error(f"{key}: must be a list of names")
    return tuple(value)


def _group_text(group_size: int | None) -> str:
    return "one scale per output" if group_size is None else f"groups of {group_size}"


def _group_size(part: HFConfigReader, *names: str) -> int | None:
    value = part.integer(*names, default=128)
    if value != -1 and value < 1:
        raise part.error(f"{names[0]}: must be -1 or at least 1, got {value}")
    return None if value == -1 else value


def _read_gptq(part: HFConfigReader) -> QuantizationScheme:
    bits, group_size = part.integer("bits"), _group_size(part, "group_size")
    if bits not in (2, 3, 4, 8):
        raise part.error(f"bits: must be 2, 3, 4 or 8, got {bits}")
    layout = part.choice("checkpoint_format", {"gptq": 1, "gptq_v2": 0}, part.get("format", "gptq"))
    part.require_one_of("pack_dtype", "int32", reason="Only words of 32 bits are read.")
    part.require_one_of("is_marlin_format", False, reason="Marlin's layout is not read. Use the GPTQ file.")
    reason = "It gives some modules a precision of their own. Use the model that it was made from."
    part.require_one_of("dynamic", {}, reason=reason)
    part.get("lm_head")
    text = f"GPTQ, {bits} bits, {_group_text(group_size)}"
    return QuantizationScheme("gptq", text, frozenset((bits,)), group_size, zero_offset=layout)


def _read_awq(part: HFConfigReader) -> QuantizationScheme:
    bits, group_size = part.integer("bits", "w_bit", default=4), _group_size(part, "group_size", "q_group_size")
    if bits != 4:
        raise part.error(f"bits: must be 4, got {bits}")
    version = part.get("version", "gemm")
    if str(version).lower() not in ("gemm", "exllama"):
        raise part.error(f"version {version!r} is not supported", "Only the GEMM packing is read.")
    part.require_one_of("zero_point", True, reason="Files without zero points are not read.")
    part.require_one_of("backend", "autoawq", reason="llm-awq packs in another order. Use AutoAWQ's file.")
    ignored = _names(part, "modules_to_not_convert")
    return QuantizationScheme(
        "awq", f"AWQ, {bits} bits, {_group_text(group_size)}", frozenset((bits,)), group_size, ignored=ignored
    )


def _block(part: HFConfigReader, key: str) -> tuple[int, int] | None:
    value = part.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and size > 0 for size in value):
        raise part.error(f"{key}: must be two sizes, got {value!r}")
    return value[0], value[1]


def _read_fp8(part: HFConfigReader) -> QuantizationScheme:
    part.require_one_of("fmt", "e4m3", "float8_e4m3fn", reason="Only the E4M3 format is read.")
    for key in ("activation_scheme", "scale_fmt"):  # of activations, which are not quantized here
        part.get(key)
    block = _block(part, "weight_block_size")
    ignored = (*_names(part, "modules_to_not_convert"), *_names(part, "ignored_layers"))
    text = "FP8" if block is None else f"FP8, blocks of {block[0]}x{block[1]}"
    return QuantizationScheme("fp8", text, frozenset((8,)), block=block, ignored=ignored)


def _read_mxfp4(part: HFConfigReader) -> QuantizationScheme:
    part.require_one_of("dequantize", False, True)
    ignored = _names(part, "modules_to_not_convert")
    return QuantizationScheme("mxfp4", "MXFP4, groups of 32", frozenset((4,)), 32, ignored=ignored)


def _read_compressed(part: HFConfigReader) -> QuantizationScheme:
    kind = part.get("format")
    part.require_one_of("sparsity_config", {}, {"format": "dense"}, reason="Sparse formats are not read.")
    part.require_one_of("transform_config", {}, reason="Rotated weights (SpinQuant, QuIP) are not read.")
    groups = part.part("config_groups")
    if not groups.content:
        raise part.error("config_groups is missing")
    bits, texts, block = set[int](), list[str](), None
    for name in groups.content:
        group = groups.part(name)
        group.get("targets")  # the tensors show which modules are quantized
        group.choice("format", {each: each for each in _FORMATS}, kind if kind in _FORMATS else str(kind))
        weights = group.part("weights")
        width, number = weights.integer("num_bits"), weights.choice("type", {"int": "int", "float": "FP"}, "int")
        if (number, width) not in (("int", 4), ("int", 8), ("FP", 8)):
            raise weights.error(f"num_bits: {number}{width} is not supported", "Supported: int4, int8, FP8.")
        strategies = {each: each for each in ("tensor", "channel", "group", "block")}
        strategy = weights.choice("strategy", strategies, "tensor")
        if weights.get("dynamic") not in (None, False):
            raise weights.error("dynamic: must be false")
        for key in ("symmetric", "group_size", "actorder", "observer", "observer_kwargs", "scale_dtype", "zp_dtype"):
            weights.get(key)
        block = _block(weights, "block_structure") if strategy == "block" else block
        bits.add(width)
        texts.append(f"{number}{width} per {strategy}")
    text = f"compressed-tensors, {', '.join(dict.fromkeys(texts))}"
    return QuantizationScheme("compressed-tensors", text, frozenset(bits), block=block, ignored=_names(part, "ignore"))


_READERS: Mapping[str, Callable[[HFConfigReader], Any]] = {
    "gptq": _read_gptq,
    "awq": _read_awq,
    "compressed-tensors": _read_compressed,
    "fp8": _read_fp8,
    "mxfp4": _read_mxfp4,
}
