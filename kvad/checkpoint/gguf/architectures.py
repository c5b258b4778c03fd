"""GGUF architectures and the Hugging Face classes that they correspond to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvad.checkpoint.gguf import packings
from kvad.checkpoint.gguf.metadata import Architecture, FileContents, architecture_keys, inexpressible
from kvad.errors import CheckpointError, suggest

_SIZES = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "rope.freq_base": "rope_theta",
}
_EPS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_LAYER_NORM = {"attention.layer_norm_epsilon": "layer_norm_eps"}
_RMS = {**_SIZES, "attention.key_length": "head_dim", **_EPS}
_GPT2 = {
    "context_length": "n_positions",
    "block_count": "n_layer",
    "embedding_length": "n_embd",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_LOCAL_EXPERTS = {**_EXPERTS, "expert_count": "num_local_experts"}
_SHARED_EXPERTS = {  # of DeepSeek and of those that followed it
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "leading_dense_block_count": "first_k_dense_replace",
}
_GROUPS = {"expert_group_count": "n_group", "expert_group_used_count": "topk_group"}
_GRANITE = {
    "logit_scale": "logits_scaling",
    "residual_scale": "residual_multiplier",
    "embedding_scale": "embedding_multiplier",
    "attention.scale": "attention_multiplier",
}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_PARALLEL = {"use_parallel_residual": "use_parallel_residual"}
_WINDOW_PATTERN = "attention.sliding_window_pattern"
_SIGMOID = {"expert_gating_func": 2}


def _has_tensors(**parts: str) -> Callable[[dict[str, Any], FileContents], None]:
    """Build a function that sets fields of config.json to whether the first layer has a tensor, given by its name."""

    def complete(content: dict[str, Any], contents: FileContents) -> None:
        content |= {field: f"blk.0.{part}" in contents.tensor_names for field, part in parts.items()}

    return complete


_ATTENTION_BIAS = _has_tensors(attention_bias="attn_q.bias")
_LLAMA_BIASES = _has_tensors(attention_bias="attn_q.bias", mlp_bias="ffn_up.bias")
_SEED_OSS_BIASES = _has_tensors(
    attention_bias="attn_q.bias", attention_out_bias="attn_output.bias", mlp_bias="ffn_up.bias"
)


def _olmoe_heads(content: dict[str, Any], contents: FileContents) -> None:
    content["num_key_value_heads"] = content["num_attention_heads"]  # llama.cpp reads no other file


def _phi3_options(content: dict[str, Any], contents: FileContents) -> None:
    content["sliding_window"] = content.get("sliding_window") or None  # Phi-4's files have 0
    original = contents.values.get("rope.scaling.original_context_length")
    content |= {} if original is None else {"original_max_position_embeddings": original}


def _gpt2_width(values: dict[str, Any], content: Mapping[str, Any]) -> None:
    values.setdefault("feed_forward_length", 4 * content["n_embd"])


def _bloom_width(values: dict[str, Any], content: Mapping[str, Any]) -> None:
    values |= {"feed_forward_length": 4 * content["hidden_size"], "attention.head_count_kv": content["n_head"]}


def _falcon_heads(content: dict[str, Any], contents: FileContents) -> None:
    """Set the fields of the two decoder architectures of Falcon."""
    content.pop("head_dim", None)  # the class has no such field
    has_two_norms = "blk.0.attn_norm_2.weight" in contents.tensor_names
    has_groups = content["num_kv_heads"] not in (1, content["num_attention_heads"])
    content["new_decoder_architecture"] = has_two_norms or has_groups
    content |= {"num_ln_in_parallel_attn": 2 if has_two_norms else 1, "multi_query": content["num_kv_heads"] == 1}


# ---------------------------------------------------------------- windows


def _read_windows(content: dict[str, Any], contents: FileContents) -> None:
    """Set ``layer_types``; without a pattern, every fourth layer has no window."""
    pattern, layers = contents.values.get(_WINDOW_PATTERN, 4), range(content["num_hidden_layers"])
    windows = pattern if isinstance(pattern, list) else [(index + 1) % pattern != 0 for index in layers]
    content["layer_types"] = ["sliding_attention" if window else "full_attention" for window in windows]


def _write_windows(values: dict[str, Any], content: Mapping[str, Any]) -> None:
    values[_WINDOW_PATTERN] = [kind == "sliding_attention" for kind in content["layer_types"]]


_EXAONE4_WINDOW_LAYERS = 64  # llama.cpp has windows in models of this size only (32B)


def _read_exaone4(content: dict[str, Any], contents: FileContents) -> None:
    content["sliding_window"] = None
    if content["num_hidden_layers"] == _EXAONE4_WINDOW_LAYERS:
        content["sliding_window"] = contents.values.get("attention.sliding_window", 4096)
        _read_windows(content, contents)


def _write_exaone4(values: dict[str, Any], content: Mapping[str, Any]) -> None:
    if (content["num_hidden_layers"] == _EXAONE4_WINDOW_LAYERS) != ("attention.sliding_window" in values):
        raise inexpressible("exaone4", "llama.cpp has windows in models of 64 layers, and in these always")
    if "attention.sliding_window" in values:
        _write_windows(values, content)


# ---------------------------------------------------------------- experts


def _gpt_oss_windows(content: dict[str, Any], contents: FileContents) -> None:
    kinds = "sliding_attention", "full_attention"
    content["layer_types"] = [kinds[index % 2] for index in range(content["num_hidden_layers"])]
    if content.get("rope_scaling") is not None:
        content["rope_scaling"]["truncate"] = False


def _granite_heads(content: dict[str, Any], contents: FileContents) -> None:
    content.pop("head_dim", None)  # the class has no such field


def _routing(content: dict[str, Any], contents: FileContents) -> None:
    """Set llama.cpp's defaults of absent keys."""
    defaults = {"routed_scaling_factor": 1.0, "norm_topk_prob": False, "n_group": 1, "topk_group": 1}
    content |= {**defaults, "first_k_dense_replace": 0, **content}


def _glm4_moe_options(content: dict[str, Any], contents: FileContents) -> None:
    """Complete the options; layers that predict further tokens are the last ones of the file, and are not read."""
    _routing(content, contents)
    content["num_hidden_layers"] -= content.get("num_nextn_predict_layers") or 0
    _has_tensors(attention_bias="attn_q.bias", use_qk_norm="attn_q_norm.weight")(content, contents)


def _dots1_options(content: dict[str, Any], contents: FileContents) -> None:
    _routing(content, contents)
    content["num_key_value_heads"] = content["num_attention_heads"]  # llama.cpp reads no other file


def _ernie_shared(values: dict[str, Any], content: Mapping[str, Any]) -> None:
    size = content["moe_intermediate_size"] * content["moe_num_shared_experts"]
    values |= {"expert_shared_feed_forward_length": size} if size else {}


# ---------------------------------------------------------------- latent attention

_LATENT = {
    **{key: name for key, name in _RMS.items() if key not in ("attention.key_length", "attention.head_count_kv")},
    **_SHARED_EXPERTS,
    **_GROUPS,
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "rope.dimension_count": "qk_rope_head_dim",
}
_YARN_TEMPERATURE = "rope.scaling.yarn_log_multiplier"  # a tenth of ``mscale_all_dim``
_LATENT_DERIVED = (
    *("attention.head_count_kv", "attention.key_length", "attention.key_length_mla", "attention.value_length_mla"),
    _YARN_TEMPERATURE,
)


def _is_deepseek_v3(values: Mapping[str, Any]) -> bool:
    """Return True if the router has sigmoids; the files of GLM-4.7-Flash do not state it."""
    is_glm = values.get("block_count") in (47, 48) and values.get("vocab_size") == 154880
    return bool(values.get("expert_gating_func", 2 if is_glm else 1) == 2)


def _read_latent(content: dict[str, Any], contents: FileContents) -> None:
    """Set the sizes of a head; older files have no keys for those before the matrices are joined."""
    values = contents.values
    key = values.get("attention.key_length_mla", values["attention.key_length"])
    content["qk_nope_head_dim"] = key - content["qk_rope_head_dim"]
    content["v_head_dim"] = values.get("attention.value_length_mla", values["attention.value_length"])
    content["num_key_value_heads"] = content["num_attention_heads"]
    content.setdefault("q_lora_rank", None)
    if _YARN_TEMPERATURE in values and "rope_scaling" in content:
        temperature = float(f"{10 * values[_YARN_TEMPERATURE]:.6g}")
        content["rope_scaling"] |= {"mscale": temperature, "mscale_all_dim": temperature}
    _routing(content, contents)


def _read_deepseek_v2(content: dict[str, Any], contents: FileContents) -> None:
    _read_latent(content, contents)
    content["topk_method"] = "greedy" if content["n_group"] == 1 else "group_limited_greedy"


def _read_deepseek_v3(content: dict[str, Any], contents: FileContents) -> None:
    _read_latent(content, contents)
    content |= {"rope_interleave": True, "topk_method": "noaux_tc"}


def _write_latent(values: dict[str, Any], content: Mapping[str, Any]) -> None:
    """Write the sizes of one key-value head, the latent, and of the heads that it stands for."""
    scaling = content.get("rope_scaling") or {}
    temperature = scaling.get("mscale_all_dim") or 0.0
    if scaling and (not temperature or scaling.get("mscale") != temperature):
        raise inexpressible("deepseek2", "mscale and mscale_all_dim of YaRN differ")
    if content["rms_norm_eps"] != 1e-6:  # that of the norms of latents in transformers
        raise inexpressible("deepseek2", "its norms have two epsilons")
    layers = content["num_hidden_layers"]
    is_lite = layers in (26, 27) or (layers, values["vocab_size"]) == (48, 128256)
    if is_lite != (content.get("q_lora_rank") is None):
        raise inexpressible("deepseek2", "models of 26 or 27 layers have no q_lora_rank in llama.cpp, others have one")
    width = content["kv_lora_rank"] + content["qk_rope_head_dim"]
    values |= {
        "attention.head_count_kv": 1,
        "attention.key_length": width,
        "attention.value_length": content["kv_lora_rank"],
        "attention.key_length_mla": content["qk_nope_head_dim"] + content["qk_rope_head_dim"],
        "attention.value_length_mla": content["v_head_dim"],
    }
    values |= {_YARN_TEMPERATURE: 0.1 * temperature} if scaling else {}


def _gemma_scale(content: dict[str, Any], contents: FileContents) -> None:
    """Set the attention scale, which llama.cpp derives from the size of the model (27B has its own)."""
    is_27b = content["num_hidden_layers"] == {"gemma2": 46}.get(content["model_type"], 62)
    width = content["hidden_size"] // content["num_attention_heads"]
    content["query_pre_attn_scalar"] = width if is_27b else content["head_dim"]


_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}
_SILU = {"hidden_act": "silu"}
_NO_BIAS = {**_SILU, "attention_bias": False}
ARCHITECTURES = {
    architecture.model_type: architecture
    for architecture in (
        Architecture("llama", "llama", "LlamaForCausalLM", _RMS, _SILU, _LLAMA_BIASES, interleaves_rotary=True),
        Architecture("qwen2", "qwen2", "Qwen2ForCausalLM", _RMS, _SILU),
        Architecture("qwen3", "qwen3", "Qwen3ForCausalLM", _RMS, _NO_BIAS),
        Architecture(
            "gemma2", "gemma2", "Gemma2ForCausalLM",
            {
                **_RMS, **_WINDOW, "attn_logit_softcapping": "attn_logit_softcapping",
                "final_logit_softcapping": "final_logit_softcapping",
            },
            _GEMMA, _gemma_scale, norm_offset=1.0,
        ),
        Architecture(
            "gemma3", "gemma3_text", "Gemma3ForCausalLM", {**_RMS, **_WINDOW},
            {**_GEMMA, "rope_local_base_freq": 10000.0}, _gemma_scale, norm_offset=1.0,
        ),
        Architecture(
            "stablelm", "stablelm", "StableLmForCausalLM",
            {**_SIZES, **_LAYER_NORM, **_PARALLEL}, _SILU,
            _has_tensors(use_qkv_bias="attn_q.bias", qk_layernorm="attn_q_norm.weight"), is_partial=True,
        ),
        Architecture(
            "starcoder2", "starcoder2", "Starcoder2ForCausalLM",
            {**_SIZES, "attention.layer_norm_epsilon": "norm_epsilon", **_WINDOW},
            {"hidden_act": "gelu_pytorch_tanh"}, _has_tensors(use_bias="attn_q.bias"), not_written=tuple(_WINDOW),
        ),
        Architecture(
            "gemma", "gemma", "GemmaForCausalLM", _RMS,
            {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh", "attention_bias": False},
            norm_offset=1.0,
        ),
        Architecture(
            "phi3", "phi3", "Phi3ForCausalLM", {**_SIZES, **_EPS, **_WINDOW}, _SILU, _phi3_options,
            is_partial=True, has_longrope=True, not_written=tuple(_WINDOW),
        ),
        Architecture(
            "phi2", "phi", "PhiForCausalLM", {**_SIZES, **_LAYER_NORM},
            {"hidden_act": "gelu_new", "qk_layernorm": False}, is_partial=True,
        ),
        Architecture(
            "olmo2", "olmo2", "Olmo2ForCausalLM", _RMS, _NO_BIAS,
            is_chosen=lambda values: not values.get("attention.sliding_window"),
        ),
        Architecture(
            "olmo2", "olmo3", "Olmo3ForCausalLM", {**_RMS, **_WINDOW}, _NO_BIAS,
            _read_windows, _write_windows, (_WINDOW_PATTERN,),
            is_chosen=lambda values: bool(values.get("attention.sliding_window")),
        ),
        Architecture(
            "olmo", "olmo", "OlmoForCausalLM",
            {**_SIZES, "attention.key_length": "head_dim", "attention.clamp_kqv": "clip_qkv"},
            _NO_BIAS, fixed={"attention.layer_norm_epsilon": 1e-5}, interleaves_rotary=True,
        ),
        Architecture(
            "exaone4", "exaone4", "Exaone4ForCausalLM", {**_SIZES, **_EPS, **_WINDOW}, _SILU, _read_exaone4,
            _write_exaone4, (_WINDOW_PATTERN, "attention.key_length"),  # llama.cpp reads no other width
        ),
        Architecture("glm4", "glm4", "Glm4ForCausalLM", _RMS, _SILU, _ATTENTION_BIAS, is_partial=True),
        Architecture(
            "chatglm", "glm", "GlmForCausalLM", {**_SIZES, **_EPS}, _SILU, _ATTENTION_BIAS, is_partial=True,
        ),
        Architecture(
            "granite", "granite", "GraniteForCausalLM",
            {**_RMS, **_GRANITE}, _SILU, _LLAMA_BIASES, interleaves_rotary=True,
        ),
        Architecture("seed_oss", "seed_oss", "SeedOssForCausalLM", _RMS, _SILU, _SEED_OSS_BIASES),
        Architecture(
            "arcee", "arcee", "ArceeForCausalLM", _RMS,
            {"hidden_act": "relu2", "attention_bias": False, "mlp_bias": False}, interleaves_rotary=True,
        ),
        Architecture(
            "smollm3", "smollm3", "SmolLM3ForCausalLM", _RMS, {**_SILU, "no_rope_layer_interval": 4}, _LLAMA_BIASES,
            interleaves_rotary=True,
        ),
        Architecture("ernie4_5", "ernie4_5", "Ernie4_5ForCausalLM", _RMS, {**_SILU, "use_bias": False}),
        Architecture(
            "nemotron", "nemotron", "NemotronForCausalLM",
            {**_SIZES, "attention.layer_norm_epsilon": "norm_eps"},
            {"hidden_act": "relu2", "attention_bias": False, "mlp_bias": False}, is_partial=True, norm_offset=1.0,
        ),
        Architecture(
            "command-r", "cohere", "CohereForCausalLM",
            {**_SIZES, **_LAYER_NORM, "logit_scale": "logit_scale"}, _NO_BIAS,
        ),
        Architecture(
            "cohere2", "cohere2", "Cohere2ForCausalLM",
            {**_SIZES, **_WINDOW, "attention.key_length": "head_dim", **_LAYER_NORM, "logit_scale": "logit_scale"},
            _NO_BIAS, _read_windows, _write_windows, (_WINDOW_PATTERN,),
        ),
        Architecture(
            "llama", "mixtral", "MixtralForCausalLM", {**_RMS, **_LOCAL_EXPERTS}, _SILU, interleaves_rotary=True
        ),
        Architecture(
            "qwen2moe", "qwen2_moe", "Qwen2MoeForCausalLM",
            {
                **_RMS, **_EXPERTS, "expert_feed_forward_length": "moe_intermediate_size",
                "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
            },
            {**_SILU, "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
            _has_tensors(qkv_bias="attn_q.bias"), row_vectors=("ffn_gate_inp_shexp",),
        ),
        Architecture(
            "granitemoe", "granitemoe", "GraniteMoeForCausalLM", {**_SIZES, **_EPS, **_GRANITE, **_LOCAL_EXPERTS},
            _NO_BIAS, _granite_heads, interleaves_rotary=True,
            packings=lambda content: packings.GRANITE_EXPERTS,
            is_chosen=lambda values: "expert_shared_feed_forward_length" not in values,
        ),
        Architecture(
            "granitemoe", "granitemoeshared", "GraniteMoeSharedForCausalLM",
            {
                **_SIZES, **_EPS, **_GRANITE, **_LOCAL_EXPERTS,
                "expert_shared_feed_forward_length": "shared_intermediate_size",
            },
            _NO_BIAS, _granite_heads, interleaves_rotary=True,
            packings=lambda content: packings.GRANITE_EXPERTS,
            is_chosen=lambda values: "expert_shared_feed_forward_length" in values,
        ),
        Architecture(
            "glm4moe", "glm4_moe", "Glm4MoeForCausalLM",
            {**_RMS, **_SHARED_EXPERTS, **_GROUPS, "nextn_predict_layers": "num_nextn_predict_layers"}, _SILU,
            _glm4_moe_options, fixed=_SIGMOID, is_partial=True,
        ),
        Architecture(
            "dots1", "dots1", "Dots1ForCausalLM", {**_RMS, **_SHARED_EXPERTS, **_GROUPS},
            _NO_BIAS, _dots1_options, fixed=_SIGMOID,
        ),
        Architecture(
            "ernie4_5-moe", "ernie4_5_moe", "Ernie4_5_MoeForCausalLM",
            {
                **_RMS, "expert_count": "moe_num_experts", "expert_used_count": "moe_k",
                "expert_feed_forward_length": "moe_intermediate_size", "expert_shared_count": "moe_num_shared_experts",
                "leading_dense_block_count": "moe_layer_start_index",
            },
            # llama.cpp requires the experts of every layer from the first one on.
            {**_SILU, "use_bias": False, "moe_layer_interval": 1, "moe_layer_end_index": -1},
            finish=_ernie_shared, derived=("expert_shared_feed_forward_length",),
            fixed={"interleave_moe_layer_step": 1}, row_vectors=("exp_probs_b",),
        ),
        Architecture(
            "deepseek2", "deepseek_v2", "DeepseekV2ForCausalLM", _LATENT, _NO_BIAS,
            _read_deepseek_v2, _write_latent, _LATENT_DERIVED, {"expert_gating_func": 1},
            lambda values: not _is_deepseek_v3(values), packings=packings.latent_packings, not_written=tuple(_GROUPS),
        ),
        Architecture(
            "deepseek2", "deepseek_v3", "DeepseekV3ForCausalLM", _LATENT, _NO_BIAS,
            _read_deepseek_v3, _write_latent, _LATENT_DERIVED, _SIGMOID, packings=packings.latent_packings,
            is_chosen=_is_deepseek_v3,
        ),
        Architecture(
            "qwen3moe", "qwen3_moe", "Qwen3MoeForCausalLM",
            {**_RMS, **_EXPERTS, "expert_feed_forward_length": "moe_intermediate_size"},
            {**_SILU, "attention_bias": False, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        ),
        Architecture(
            "olmoe", "olmoe", "OlmoeForCausalLM", {**_RMS, **_EXPERTS},
            {**_SILU, "attention_bias": False, "norm_topk_prob": False}, _olmoe_heads,
        ),
        Architecture(
            "gpt-oss", "gpt_oss", "GptOssForCausalLM",
            {**_RMS, **_LOCAL_EXPERTS, "expert_feed_forward_length": "intermediate_size", **_WINDOW},
            {**_SILU, "attention_bias": True}, _gpt_oss_windows, packings=lambda content: packings.GPT_OSS,
        ),
        Architecture(
            "gpt2", "gpt2", "GPT2LMHeadModel", _GPT2, {"activation_function": "gelu_new"},
            finish=_gpt2_width, transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
        ),
        Architecture(
            "starcoder", "gpt_bigcode", "GPTBigCodeForCausalLM", _GPT2,
            {"activation_function": "gelu_pytorch_tanh", "multi_query": True}, finish=_gpt2_width,
            fixed={"attention.head_count_kv": 1},
        ),
        Architecture(
            "gptneox", "gpt_neox", "GPTNeoXForCausalLM",
            {
                **{key: _SIZES[key] for key in _SIZES if key != "attention.head_count_kv"}, **_LAYER_NORM, **_PARALLEL,
            },
            {"hidden_act": "gelu", "attention_bias": True}, is_partial=True,
            packings=lambda content: packings.grouped_qkv("attention", *2 * [content["num_attention_heads"]]),
        ),
        Architecture(
            "falcon", "falcon", "FalconForCausalLM",
            {
                **_SIZES, "feed_forward_length": "ffn_hidden_size", "attention.head_count_kv": "num_kv_heads",
                "attention.layer_norm_epsilon": "layer_norm_epsilon",
            },
            {"activation": "gelu", "alibi": False, "bias": False, "parallel_attn": True}, _falcon_heads,
            derived=("tensor_data_layout",),
            packings=lambda content: packings.grouped_qkv(
                "self_attention", content["num_attention_heads"], content["num_kv_heads"]
            ),
        ),
        Architecture(
            "bloom", "bloom", "BloomForCausalLM",
            {
                "context_length": "seq_length", "block_count": "n_layer", "embedding_length": "hidden_size",
                "attention.head_count": "n_head", "attention.layer_norm_epsilon": "layer_norm_epsilon",
            },
            {"apply_residual_connection_post_layernorm": False}, finish=_bloom_width,
            derived=("feed_forward_length", "attention.head_count_kv"),
            packings=lambda content: packings.grouped_qkv("self_attention", *2 * [content["n_head"]]),
        ),
    )
}  # fmt: skip


def find_architecture(values: Mapping[str, Any], where: str) -> Architecture:
    """Return the architecture; a CheckpointError names the closest of those that are read."""
    name = values.get("general.architecture")
    candidates = [architecture for architecture in ARCHITECTURES.values() if architecture.name == name]
    if not candidates:
        names = {architecture.name: architecture for architecture in ARCHITECTURES.values()}
        raise CheckpointError(f"{where}: general.architecture {name!r} is not read", suggest(str(name), names))
    keys = architecture_keys(str(name), values)
    has_experts = bool(keys.get("expert_count"))
    chosen = (each for each in candidates if each.has_experts == has_experts and each.is_chosen(keys))
    return next(chosen, candidates[0])
