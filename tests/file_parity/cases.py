"""Models that are exported to GGUF and read by llama.cpp: configs of Hugging Face and random weights from a seed."""

import hashlib
import json
import zlib

import numpy as np
import torch
from safetensors.torch import save_file

from kvad.checkpoint.conversion import HFConfigReader, write_tensors
from kvad.checkpoint.families import find_family
from kvad.config.parameter_shapes import weight_shapes

TOKEN_IDS = np.random.default_rng(7).integers(0, 64, 24).tolist()
SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "rope_theta": 5000.0, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False}
GEMMA = {
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 8,
    "num_hidden_layers": 6,
    "tie_word_embeddings": True,
}
EXPERTS = {"num_experts": 5, "num_local_experts": 5, "num_experts_per_tok": 2}
PARTIAL = {"partial_rotary_factor": 0.5}
SHARED = {  # of DeepSeek and of those that followed it
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}
GROUPS = {"n_group": 4, "topk_group": 2}
LATENT = {
    **SHARED,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "rms_norm_eps": 1e-6,
}
GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 1.7, "attention_multiplier": 0.2}
WINDOWS = {"num_hidden_layers": 4, "sliding_window": 8}
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [1.2, 2.5, 4.0, 8.0]}
CASES = {  # name -> model_type, changes of the config
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True, "head_dim": 24}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama llama3": ("llama", {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 24}}),
    "llama linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "llama yarn": (
        "llama", {"rope_scaling": {key: value for key, value in YARN.items() if key != "truncate"}}
    ),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "gemma": ("gemma", {"head_dim": 24, "tie_word_embeddings": True}),
    "gemma2": ("gemma2", {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("gemma3_text", {**GEMMA, "rope_theta": 1e6}),
    "stablelm": ("stablelm", {**PARTIAL, "use_qkv_bias": True}),
    "starcoder2": ("starcoder2", {"use_bias": True, "sliding_window": None, "tie_word_embeddings": True}),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "vocab_size": 64}),
    "phi3": ("phi3", {"sliding_window": None, "pad_token_id": 0}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", GRANITE),
    "seed_oss": ("seed_oss", {"attention_bias": True, "attention_out_bias": False, "head_dim": 24}),
    "arcee": ("arcee", {"hidden_act": "relu2"}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 4, "pad_token_id": 0}),
    "ernie4_5": ("ernie4_5", {"head_dim": 24}),
    "nemotron": ("nemotron", {**PARTIAL, "hidden_act": "relu2", "norm_eps": 1e-5}),
    "command-r": ("cohere", {"logit_scale": 0.7, "tie_word_embeddings": True}),
    "mixtral": ("mixtral", {**EXPERTS, "sliding_window": None}),
    "qwen3moe": ("qwen3_moe", {**EXPERTS, "head_dim": 24, "moe_intermediate_size": 40, "norm_topk_prob": True}),
    "olmoe": ("olmoe", {**EXPERTS, "num_key_value_heads": 4, "norm_topk_prob": False}),
    "phi3 longrope": (
        "phi3",
        {
            **PARTIAL, "sliding_window": None, "pad_token_id": 0, "rope_scaling": LONGROPE,
            "original_max_position_embeddings": 16,
        },
    ),
    "phi2": ("phi", {**PARTIAL, "layer_norm_eps": 1e-5}),
    "olmo": ("olmo", {"clip_qkv": 2.0}),
    "olmo3": (
        "olmo3", {**WINDOWS, "rope_scaling": {key: value for key, value in YARN.items() if key != "truncate"}}
    ),
    "exaone4": ("exaone4", {"sliding_window": None}),
    "exaone4 windows": (
        "exaone4", {"num_hidden_layers": 64, "hidden_size": 16, "intermediate_size": 16, "sliding_window": 8}
    ),
    "glm4": ("glm4", {**PARTIAL, "head_dim": 24, "attention_bias": True}),
    "chatglm": ("glm", {**PARTIAL, "head_dim": 16, "attention_bias": True}),
    "cohere2": ("cohere2", {**WINDOWS, "logit_scale": 0.7, "tie_word_embeddings": True}),
    "gptneox": ("gpt_neox", {"rotary_pct": 0.5, "use_parallel_residual": True, "hidden_act": "gelu"}),
    "falcon": ("falcon", {"multi_query": True, "bias": False, "tie_word_embeddings": True}),
    "falcon groups": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": False}),
    "bloom": ("bloom", {"n_layer": 2, "n_head": 4, "seq_length": 256, "tie_word_embeddings": True}),
    "starcoder": (
        "gpt_bigcode", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "vocab_size": 64}
    ),
    "qwen2moe": (
        "qwen2_moe", {**EXPERTS, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 56}
    ),
    "granitemoe": ("granitemoe", {**GRANITE, **EXPERTS}),
    "granitemoe shared": ("granitemoeshared", {**GRANITE, **EXPERTS, "shared_intermediate_size": 56}),
    "glm4moe": (
        "glm4_moe", {**SHARED, **GROUPS, **PARTIAL, "head_dim": 24, "attention_bias": True, "use_qk_norm": True}
    ),
    "dots1": ("dots1", {**SHARED, **GROUPS, "head_dim": 24, "num_key_value_heads": 4}),
    "ernie4_5-moe": (
        "ernie4_5_moe",
        {
            "head_dim": 24, "moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 40, "moe_layer_start_index": 1,
        },
    ),
    "deepseek2 lite": (
        "deepseek_v2",
        {
            **LATENT, "num_hidden_layers": 27, "hidden_size": 16, "intermediate_size": 16, "q_lora_rank": None,
            "n_routed_experts": 4, "moe_intermediate_size": 8, "norm_topk_prob": False,
        },
    ),
    "deepseek2 yarn": (
        "deepseek_v2",
        {
            **LATENT, "norm_topk_prob": False, "rope_scaling": {
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.7,
                "mscale_all_dim": 0.7,
            },
        },
    ),
    "deepseek2 v3": ("deepseek_v3", {**LATENT, **GROUPS}),
    "gpt-oss": (
        "gpt_oss",
        {
            **EXPERTS, "num_hidden_layers": 4, "head_dim": 8, "sliding_window": 8, "rope_theta": 500.0,
            "rope_scaling": {**YARN, "original_max_position_embeddings": 16},  # llama.cpp rounds YaRN's bounds
        },
    ),
}  # fmt: skip
STORED = {"llama bfloat16": ("llama", "bfloat16"), "llama q8_0": ("llama", "q8_0")}
EXPORTS = {**{name: (name, "float32") for name in CASES}, **STORED}  # name -> case and stored dtype


def write_case(name, folder):
    """Write a Hugging Face folder with a case's config and random weights."""
    model_type, changes = CASES[name]
    content = {**({} if model_type == "gpt2" else SIZES), **changes, "model_type": model_type}
    family = find_family(model_type)
    config = family.read_config(HFConfigReader(content, name))
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    weights = {}
    for tensor, shape in weight_shapes(config).items():
        values = generator.standard_normal(shape, np.float32)
        is_norm = len(shape) == 1 and tensor.endswith("weight")
        weights[tensor] = torch.from_numpy(1 + 0.2 * values if is_norm else values * (0.15 if len(shape) > 1 else 0.3))
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(content))
    save_file(dict(write_tensors(family, config, weights)), folder / "model.safetensors", {"format": "pt"})
    return folder


def content_digest(path):
    """Return a checksum of a GGUF file's keys, values and tensors, whatever their order and alignment."""
    import gguf

    reader, digest = gguf.GGUFReader(path), hashlib.sha256()
    for name, entry in sorted(reader.fields.items()):
        if not name.startswith(("GGUF.", "general.name")):
            digest.update(f"{name}={entry.contents()!r}\n".encode())
    for tensor in sorted(reader.tensors, key=lambda tensor: tensor.name):
        digest.update(f"{tensor.name} {tensor.tensor_type.name} {tensor.shape.tolist()}\n".encode())
        digest.update(np.ascontiguousarray(tensor.data).tobytes())
    return digest.hexdigest()
