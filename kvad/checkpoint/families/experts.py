"""Mixtures of experts with shared experts, dense layers among them, or another router than a plain softmax."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from kvad import config as cfg
from kvad.checkpoint import conversion
from kvad.checkpoint.conversion import HFConfigReader, TensorRule, TensorTransform, prefix_rules, tensor_rule
from kvad.checkpoint.families import _fields as hf
from kvad.checkpoint.families import _hf_class as base
from kvad.checkpoint.families._hf_class import HFClass, LayerTypes, decoder_family
from kvad.config import ModelConfig
from kvad.errors import CheckpointError

_MLP = {part: f"{part}_proj" for part in ("gate", "up", "down")}
W123 = {"gate": "w1", "up": "w3", "down": "w2"}  # Mixtral's names
_DROPOUT = hf.dropouts(attention="attention_dropout")
_JOINED = TensorTransform(  # [experts, 2 hidden, in]: gate, then up
    lambda tensors, shapes: list(tensors[0].chunk(2, dim=1)), lambda tensors, shapes: [torch.cat(list(tensors), dim=1)]
)

_ROW = TensorTransform(  # [experts] stored as [1, experts]
    lambda tensors, shapes: [tensors[0].reshape(-1)], lambda tensors, shapes: [tensors[0].reshape(1, -1)]
)


class ExpertPlaces(NamedTuple):
    """Fields that state which layers have experts."""

    read: Callable[[HFConfigReader], Callable[[int], bool]]  # fields -> function of a layer's index
    write: Callable[[list[bool]], dict[str, Any]]  # a flag per layer -> fields


def sparse_layers(experts: hf.FieldTable, places: ExpertPlaces) -> LayerTypes:
    """Build layer types D (dense, the class's table) and E (experts; ``experts`` names the fields of MoEConfig)."""

    def read(fields: HFConfigReader, layer: cfg.LayerConfig) -> tuple[Mapping[str, cfg.LayerConfig], str]:
        assert isinstance(layer.mlp, cfg.GatedMLPConfig)
        is_sparse = places.read(fields)
        pattern = "".join("DE"[is_sparse(index)] for index in range(fields.integer("num_hidden_layers")))
        mlp = cfg.MoEConfig(**{"activation": layer.mlp.activation, **hf.read_table(experts, fields)[""]})
        return {"D": layer, "E": replace(layer, mlp=mlp)}, pattern

    def write(config: ModelConfig) -> dict[str, Any]:
        mlps = [layer.mlp for layer in config.stack.layer_configs]
        sparse = first_experts(config)
        dense = next((mlp for mlp in mlps if isinstance(mlp, cfg.GatedMLPConfig)), sparse)
        return {
            "intermediate_size": dense.intermediate_size,
            **hf.write_fields(experts, vars(sparse), config),
            **places.write([isinstance(mlp, cfg.MoEConfig) for mlp in mlps]),
        }

    return LayerTypes(read, write)


def first_experts(config: ModelConfig) -> cfg.MoEConfig:
    """Return the experts of the first layer that has some; a placeholder if all layers are dense."""
    mlps = (layer.mlp for layer in config.stack.layer_configs)
    return next((mlp for mlp in mlps if isinstance(mlp, cfg.MoEConfig)), cfg.MoEConfig(1, 1, 1, shared_size=1))


def shared_experts(name: str, *, required: bool = True) -> hf.HFField:
    """Build the size of the MLP that all tokens use, from its number of experts; 0 is none, unless ``required``."""

    def read(fields: HFConfigReader) -> int | None:
        if (number := fields.integer(name)) < 1 and required:
            raise fields.error(f"{name}: must be at least 1, got {number}")
        return fields.integer("moe_intermediate_size") * number or None

    return hf.HFField(read, lambda size, config: {name: (size or 0) // first_experts(config).intermediate_size})


def stacked_rules(block: str, names: Mapping[str, str] = _MLP) -> base.LayerRules:
    """Build the rules of experts that are stored one by one, as ``BLOCK.experts.0.NAME.weight``."""

    def rules(config: ModelConfig, kvad_prefix: str, hf_prefix: str) -> Iterator[TensorRule]:
        mlp = config.stack.layer_config(int(kvad_prefix.rpartition(".")[2])).mlp
        assert isinstance(mlp, cfg.MoEConfig)
        for part, name in names.items():
            experts = (f"{hf_prefix}.{block}.experts.{expert}.{name}.weight" for expert in range(mlp.num_experts))
            yield tensor_rule(f"{kvad_prefix}.mlp.{part}", tuple(experts), base.STACKED)

    return rules


def expert_rules(gate: str, selection_bias: str, shared: str, shared_gate: str = "") -> base.LayerRules:
    """Build the rules of dense layers and of experts that are stored one by one; the names are those in ``mlp``."""
    matrices = stacked_rules("mlp")

    def rules(config: ModelConfig, kvad_prefix: str, hf_prefix: str) -> Iterator[TensorRule]:
        mlp = config.stack.layer_config(int(kvad_prefix.rpartition(".")[2])).mlp
        kvad_mlp, hf_mlp = f"{kvad_prefix}.mlp", f"{hf_prefix}.mlp"
        if not isinstance(mlp, cfg.MoEConfig):
            yield from prefix_rules(kvad_mlp, hf_mlp, _MLP)
            return
        yield tensor_rule(f"{kvad_mlp}.router", f"{hf_mlp}.{gate}")
        if mlp.selection_bias:
            transform = _ROW if "statics" in selection_bias else conversion.SAME
            yield tensor_rule(f"{kvad_mlp}.selection_bias", f"{hf_mlp}.{selection_bias}", transform)
        if mlp.shared_size is not None:
            yield from prefix_rules(f"{kvad_mlp}.shared", f"{hf_mlp}.{shared}", _MLP)
        if mlp.shared_gate:
            yield tensor_rule(f"{kvad_mlp}.shared_gate", f"{hf_mlp}.{shared_gate}")
        yield from matrices(config, kvad_prefix, hf_prefix)

    return rules


EXPERTS: hf.FieldTable = {
    "intermediate_size": hf.integer("moe_intermediate_size"),
    "num_experts": hf.integer("num_local_experts", "num_experts", write_as="num_experts"),
    "num_experts_per_token": hf.integer("num_experts_per_tok"),
    "renormalize": hf.flag("norm_topk_prob"),
}
SIGMOID_ROUTER: hf.FieldTable = {  # DeepSeek-V3's
    "router": "sigmoid",
    "selection_bias": True,
    "num_groups": hf.integer("n_group", default=1),
    "num_groups_per_token": hf.integer("topk_group", default=1),
}


def dense_first(name: str) -> ExpertPlaces:
    """Build the places of a class whose first layers are dense, as many as the field ``name`` says."""

    def read(fields: HFConfigReader) -> Callable[[int], bool]:
        dense = fields.integer(name)
        return lambda index: index >= dense

    return ExpertPlaces(read, lambda is_sparse: {name: is_sparse.count(False)})


def read_mlp_types(fields: HFConfigReader) -> Callable[[int], bool]:
    """Return a function of a layer's index that is True if the layer has experts."""
    layers, dense = fields.integer("num_hidden_layers"), fields.integer("first_k_dense_replace")
    types = fields.get("mlp_layer_types", ["dense" if index < dense else "sparse" for index in range(layers)])
    if not isinstance(types, list) or len(types) != layers or not set(types) <= {"dense", "sparse"}:
        raise fields.error(f"mlp_layer_types {types!r} is not supported", f"It must have {layers} of dense or sparse.")
    return lambda index: types[index] == "sparse"


MLP_TYPES = ExpertPlaces(
    read_mlp_types, lambda is_sparse: {"mlp_layer_types": ["sparse" if sparse else "dense" for sparse in is_sparse]}
)
# The same, but written as the number of dense layers, which are the first ones.
FIRST_DENSE = dense_first("first_k_dense_replace")._replace(read=read_mlp_types)


# ---------------------------------------------------------------- Qwen2-MoE


def _check_qwen2_moe(fields: HFConfigReader) -> None:
    fields.require_one_of("use_sliding_window", False, reason="Windows are read for dense Qwen models.")
    full = ["full_attention"] * fields.integer("num_hidden_layers")
    fields.require_one_of("layer_types", full, reason="Windows are read for dense Qwen models.")


def _read_qwen2_places(fields: HFConfigReader) -> Callable[[int], bool]:
    dense, step = fields.get("mlp_only_layers", []), fields.integer("decoder_sparse_step", default=1)
    return lambda index: index not in dense and (index + 1) % step == 0


QWEN2_PLACES = ExpertPlaces(
    _read_qwen2_places,
    lambda is_sparse: {"mlp_only_layers": [index for index, sparse in enumerate(is_sparse) if not sparse]},
)
QWEN2_LAYERS = sparse_layers(
    {
        **EXPERTS,
        "shared_size": hf.HFField(
            lambda fields: fields.integer("shared_expert_intermediate_size"),
            lambda size, config: {"shared_expert_intermediate_size": size or 1},
        ),
        "shared_gate": True,
    },
    QWEN2_PLACES,
)

# Qwen 1.5 and 2 (Yang et al. 2024).  Experts of all tokens beside the chosen ones, times a sigmoid.
_QWEN2_MOE = HFClass(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    {**base.SIZES, **_DROPOUT, "attention.position": hf.rope(), "attention.qkv_bias": hf.flag("qkv_bias", True)},
    layer=base.ATTENTION,
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 16,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4,
        "num_experts": 60,
    },
    check=_check_qwen2_moe,
    layer_types=QWEN2_LAYERS,
    layer_rules=expert_rules("gate", "", "shared_expert", "shared_expert_gate"),
    constants={"pad_token_id": None, "decoder_sparse_step": 1, "use_sliding_window": False},
)


# ---------------------------------------------------------------- GLM-4.5, dots.llm1: the router of DeepSeek-V3


_GLM_EXPERTS: hf.FieldTable = {
    **EXPERTS,
    **SIGMOID_ROUTER,
    "num_experts": hf.integer("num_local_experts", "n_routed_experts", write_as="n_routed_experts"),
    "routed_scale": hf.number("routed_scaling_factor", 1.0),
    "shared_size": shared_experts("n_shared_experts"),
}


# Zhipu 2025, GLM-4.5.  Dense layers first; q and k are optionally normalized; partial RoPE.
_GLM4_MOE = HFClass(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    {
        **base.SIZES,
        **_DROPOUT,
        "norm.eps": hf.number("rms_norm_eps", 1e-5),
        "attention.position": hf.rope(partial=0.5),
        "attention.qkv_bias": hf.flag("attention_bias"),
        "attention.qk_norm": hf.flag("use_qk_norm", values=("none", "head")),
    },
    layer={**base.ATTENTION, **base.QK_NORM},
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
    },
    layer_types=sparse_layers(_GLM_EXPERTS, dense_first("first_k_dense_replace")),
    layer_rules=expert_rules("gate", "gate.e_score_correction_bias", "shared_experts"),
    # Of the last layers of GLM-4.5 and its Air, which predict further tokens; transformers ignores them too.
    ignored=(r".*rotary_emb\.inv_freq", r"layers\.(46|92)\..*"),
)


# Upstage 2025.  GLM-4.5 with experts in every layer, and RoPE over the full head.
_SOLAR_OPEN = _GLM4_MOE.variant(
    "solar_open",
    "SolarOpenForCausalLM",
    fields={
        **base.SIZES,
        **_DROPOUT,
        "mlp.intermediate_size": hf.integer("moe_intermediate_size"),
        "norm.eps": hf.number("rms_norm_eps", 1e-5),
        "attention.position": hf.rope(theta=1000000.0),
        "attention.qkv_bias": hf.flag("attention_bias"),
    },
    layer=base.ATTENTION,
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "moe_intermediate_size": 1280,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "norm_topk_prob": True,
        "first_k_dense_replace": 0,
    },
    ignored=(r".*rotary_emb\.inv_freq",),
)


def _check_dots1(fields: HFConfigReader) -> None:
    full = ["full_attention"] * fields.integer("num_hidden_layers")
    fields.require_one_of("layer_types", full, reason="Layers with a window are not read.")


# rednote 2025, dots.llm1.  The experts of GLM-4.5; q and k are always normalized.
_DOTS1 = _GLM4_MOE.variant(
    "dots1",
    "Dots1ForCausalLM",
    fields={
        **base.SIZES,
        **_DROPOUT,
        "attention.position": hf.rope(),
        **hf.biases("attention_bias"),
        "attention.qk_norm": "head",
    },
    defaults={
        "max_position_embeddings": 2048,
        "num_key_value_heads": 32,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 0,
    },
    check=_check_dots1,
    ignored=(r".*rotary_emb\.inv_freq",),
)


# ---------------------------------------------------------------- ERNIE 4.5

ERNIE_FIELDS: hf.FieldTable = {
    **base.SIZES,
    "tie_embeddings": hf.flag("tie_word_embeddings", True),
    "attention.position": hf.rope(theta=500000.0, interleaved=True),
    **hf.biases("use_bias"),
    "mlp.bias": hf.flag("use_bias"),
    "norm.eps": hf.number("rms_norm_eps", 1e-5),
}
_ERNIE_EXPERTS: hf.FieldTable = {
    "intermediate_size": hf.integer("moe_intermediate_size"),
    "num_experts": hf.integer("num_experts", "moe_num_experts", write_as="moe_num_experts"),
    "num_experts_per_token": hf.integer("num_experts_per_tok", "moe_k", write_as="moe_k"),
    "bias": hf.HFField(lambda fields: fields.flag("use_bias")),
    "selection_bias": True,
    "shared_size": shared_experts("moe_num_shared_experts", required=False),
}


def _read_ernie_places(fields: HFConfigReader) -> Callable[[int], bool]:
    first, last = fields.integer("moe_layer_start_index"), fields.get("moe_layer_end_index", -1)
    interval, end = fields.integer("moe_layer_interval"), last if last != -1 else fields.integer("num_hidden_layers")
    return lambda index: first <= index <= end and (index + 1) % interval == 0


def _write_ernie_places(is_sparse: list[bool]) -> dict[str, Any]:
    """Write the first interval from 1 that gives the places; reading back detects if there is none."""
    places = [index for index, sparse in enumerate(is_sparse) if sparse]
    interval = places[1] - places[0] if len(places) > 1 else 1
    first, last = (places[0], places[-1]) if places else (len(is_sparse), -1)
    return {"moe_layer_start_index": first, "moe_layer_end_index": last, "moe_layer_interval": interval}


# Baidu 2025.  ERNIE 4.5 with experts: a softmax router with a selection bias, rotary positions on neighboring dims.
_ERNIE_MOE = HFClass(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    ERNIE_FIELDS,
    layer=base.ATTENTION,
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 4,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
    },
    check=lambda fields: fields.require_one_of("use_bias", False, reason="Biases of experts are not read."),
    layer_types=sparse_layers(_ERNIE_EXPERTS, ExpertPlaces(_read_ernie_places, _write_ernie_places)),
    layer_rules=expert_rules("gate", "moe_statics.e_score_correction_bias", "shared_experts"),
    ignored=(r".*rotary_emb\.inv_freq", r".*mtp.*"),
    name_variants={"mlp.moe_statics.e_score_correction_bias": "mlp.gate.moe_statics.e_score_correction_bias"},
)


# ---------------------------------------------------------------- Phi-3.5-MoE

_MSCALES = ("short_mscale", "long_mscale")


def _read_phimoe_rope(fields: HFConfigReader) -> cfg.RopeConfig:
    """Read LongRoPE, whose two factors of cos and sin must agree."""
    content = dict(fields.content)
    for name in ("rope_scaling", "rope_parameters"):
        part = fields.part(name)
        short, long = (part.optional_number(scale) for scale in _MSCALES)
        if short != long:
            raise fields.error(f"{name}: short_mscale {short} and long_mscale {long} must agree")
        if short is not None:
            content[name] = {**part.content, "attention_factor": short}
    return hf.require_longrope(fields, hf.read_full_rope(fields.derive(content), theta=1000000.0))


def _write_phimoe_rope(position: object, config: ModelConfig) -> dict[str, Any]:
    content = hf.rope_fields(position)
    scaling = hf.require_rope(position).scaling
    if scaling is None:
        return content
    factor = getattr(scaling, "attention_factor", None)
    if factor is None:
        raise CheckpointError("its RoPE scaling has no attention_factor")
    for name in ("rope_scaling", "rope_parameters"):
        content[name] |= dict.fromkeys(_MSCALES, factor)
    return content


# Abdin et al. 2024, Phi-3.5-MoE.  LayerNorm, a bias of the head, two experts chosen by SparseMixer.
_PHIMOE = HFClass(
    "phimoe",
    "PhimoeForCausalLM",
    {
        **{name: base.SIZES[name] for name in base.SIZES if name != "attention.head_dim"},
        **_DROPOUT,
        **hf.layer_norm("rms_norm_eps"),
        "attention.position": hf.HFField(_read_phimoe_rope, _write_phimoe_rope),
        "attention.window": hf.optional_integer("sliding_window"),
        **hf.biases("attention_bias"),
        "head.bias": hf.flag("lm_head_bias"),
        "mlp.num_experts": hf.integer("num_local_experts"),
        "mlp.num_experts_per_token": hf.integer("num_experts_per_tok"),
        "mlp.sparsemixer_jitter": hf.number("router_jitter_noise", 0.01),
    },
    layer={**base.ATTENTION, "mlp.router": "block_sparse_moe.gate"},
    mlp=cfg.MoEConfig,
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "num_experts_per_tok": 2,
    },
    layer_rules=stacked_rules("block_sparse_moe", W123),
    name_variants={"block_sparse_moe.gate.weight": "mlp.router.weight"},
)


# ---------------------------------------------------------------- Granite 3 MoE


def _granite_rules(config: ModelConfig, kvad_prefix: str, hf_prefix: str) -> Iterator[TensorRule]:
    mlp = config.stack.layer_config(0).mlp
    assert isinstance(mlp, cfg.MoEConfig)
    experts, shared = f"{hf_prefix}.block_sparse_moe", f"{hf_prefix}.shared_mlp"
    yield tensor_rule((f"{kvad_prefix}.mlp.gate", f"{kvad_prefix}.mlp.up"), f"{experts}.input_linear.weight", _JOINED)
    yield tensor_rule(f"{kvad_prefix}.mlp.down", f"{experts}.output_linear.weight")
    if mlp.shared_size is not None:
        kvad_names = f"{kvad_prefix}.mlp.shared.gate", f"{kvad_prefix}.mlp.shared.up"
        yield tensor_rule(kvad_names, f"{shared}.input_linear", conversion.STACKED)
        yield tensor_rule(f"{kvad_prefix}.mlp.shared.down", f"{shared}.output_linear")


# IBM 2024.  Granite with experts, gate and up of which are one tensor.
_GRANITE_MOE = HFClass(
    "granitemoe",
    "GraniteMoeForCausalLM",
    {
        **{name: base.SIZES[name] for name in base.SIZES if name != "attention.head_dim"},
        **_DROPOUT,
        "attention.position": hf.rope(),
        **hf.biases("attention_bias"),
        **hf.GRANITE_SCALES,
        "mlp.num_experts": hf.integer("num_local_experts"),
        "mlp.num_experts_per_token": hf.integer("num_experts_per_tok"),
    },
    layer={**base.ATTENTION, "mlp.router": "block_sparse_moe.router.layer"},
    mlp=cfg.MoEConfig,
    defaults={"max_position_embeddings": 2048, "num_local_experts": 8, "num_experts_per_tok": 2},
    layer_rules=_granite_rules,
    name_variants={
        "block_sparse_moe.router.layer.weight": "block_sparse_moe.router.weight",
        "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
        "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
    },
)

# The same with a shared expert.
_GRANITE_SHARED = _GRANITE_MOE.variant(
    "granitemoeshared",
    "GraniteMoeSharedForCausalLM",
    fields={
        **_GRANITE_MOE.fields,
        "mlp.shared_size": hf.HFField(
            lambda fields: fields.integer("shared_intermediate_size", default=0) or None,
            lambda size, config: {"shared_intermediate_size": size or 0},
        ),
    },
)


def _choose_granite(config: ModelConfig) -> str:
    mlp = config.stack.layer_config(0).mlp
    return "granitemoe" if getattr(mlp, "shared_size", None) is None else "granitemoeshared"


FAMILIES = (
    decoder_family(_QWEN2_MOE),
    decoder_family(_GLM4_MOE),
    decoder_family(_SOLAR_OPEN),
    decoder_family(_DOTS1),
    decoder_family(_ERNIE_MOE),
    decoder_family(_PHIMOE),
    decoder_family(_GRANITE_MOE, _GRANITE_SHARED, choose=_choose_granite),
)
