"""The cases: one tiny model with unusual shapes each. Plain data; only make.py imports transformers.

Unusual on purpose (families.md): 6 heads, fewer KV heads, heads x head_dim != hidden, a vocabulary of 97, odd
lengths, inputs longer than windows, bucket tables and original rope limits, two layers of each type.
"""

import re
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from tests.hf_parity.weights import Recipe

VOCAB = 97
RAGGED = (3, 9, 14)


USUAL = Recipe()


@dataclass(frozen=True)
class Case:
    """One case.

    ``model`` and ``config`` are classes of transformers, ``options`` the config's arguments. ``length`` is that of
    the long input (of the source for encoder-decoders, whose target has ``target``). ``extra`` are tensors that the
    file has in addition to those of save_pretrained, ``fixed`` the name endings of tables with real values.
    ``output`` is the compared output.
    """

    name: str
    model: str
    config: str
    kind: str  # decoder | encoder | encdec
    options: dict[str, Any]
    length: int = 31
    target: int = 17
    output: str = "logits"
    recipe: Recipe = USUAL
    beams: bool = False
    types: bool = False  # token_type_ids of 0 and 1
    extra: dict[str, tuple[int, ...]] = field(default_factory=dict)
    fixed: tuple[str, ...] = ()
    note: str = ""
    attention: str = "eager"
    without: dict[str, str] = field(default_factory=dict)  # {version: reason why it cannot compute the case}


_FIELDS = {each.name for each in fields(Case)}


def _case(kind: str, ending: str, name: str, model: str, base: dict[str, Any], **own: Any) -> Case:
    """Build a case.

    Args:
        kind: Topology.
        ending: Ending of class names, for a ``model`` without one.
        name: Name of the case.
        model: Class of the model; the config's has the same stem.
        base: Options of the config.
        own: Fields of ``Case``, and further options of the config.
    """
    stem = re.sub(r"(For[A-Z]\w*|LMHeadModel|MTModel|Model)$", "", model)
    given = {key: own.pop(key) for key in _FIELDS & own.keys()}
    model = model + ending if model == stem else model
    return Case(name, model, given.pop("config", f"{stem}Config"), kind, {"vocab_size": VOCAB, **base, **own}, **given)


_decoder = partial(_case, "decoder", "ForCausalLM")
_encoder = partial(_case, "encoder", "ForMaskedLM")
_encdec = partial(_case, "encdec", "ForConditionalGeneration")

# The same dimensions have different names in GPT-2 and in families since BERT.
GPT = {"n_embd": 36, "n_head": 6, "n_layer": 3, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 2}
SPECIAL = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
BODY = {"hidden_size": 36, "num_attention_heads": 6, "num_hidden_layers": 3, "max_position_embeddings": 64}
WIDE = {**BODY, **SPECIAL, "hidden_size": 48, "intermediate_size": 56}  # head_dim 8
GROUPED = {**WIDE, "num_key_value_heads": 2}
HEADED = {**GROUPED, "hidden_size": 42, "head_dim": 8}  # 6 x 8 != 42
BLOOM = {**SPECIAL, "hidden_size": 36, "n_head": 6, "n_layer": 3}
MPT = {**SPECIAL, "d_model": 36, "n_heads": 6, "n_layers": 3, "expansion_ratio": 2, "max_seq_len": 64}
FALCON = {**BODY, **SPECIAL, "hidden_size": 48}
NEOX = {**WIDE, "hidden_size": 96}
DEEP = {**GROUPED, "num_hidden_layers": 4}
COHERE = {**GROUPED, "rope_theta": 10000.0, "logit_scale": 0.7}
DELTA = {
    **HEADED,
    "max_position_embeddings": 80,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 4,
}
GEMMA2 = {**HEADED, "sliding_window": 8, "query_pre_attn_scalar": 10}
GEMMA4 = {
    **HEADED,
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 8,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}

LATENT = {
    **WIDE,
    "num_hidden_layers": 4,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "moe_intermediate_size": 20,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 2,
}

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

GRIFFIN = {  # without a cache: in 4.57 its keys have no gradients
    **GROUPED,
    "num_hidden_layers": 4,
    "lru_width": 48,
    "conv1d_width": 3,
    "logits_soft_cap": 3.0,
    "attention_bias": True,
    "use_cache": False,
}

UNSATURATED = Recipe(norm_center=0.0, embedding=0.1, gain=1.0)  # 1 - a^2 loses digits where a gate is nearly 0
GEMMA = Recipe(norm_center=0.0, embedding=0.1)
SCALED = Recipe(embedding=0.1)
MARIANS = Recipe(embedding=0.3)
UNDIVIDED = Recipe(gain=1.0, embedding=0.3)

DECODERS = [
    _decoder("gpt2", "GPT2LMHeadModel", GPT, beams=True),
    _decoder(
        "gpt2-inverse-layer",
        "GPT2LMHeadModel",
        GPT,
        n_inner=52,
        scale_attn_by_inverse_layer_idx=True,
        layer_norm_epsilon=1e-2,
        activation_function="relu",
    ),
    _decoder("openai-gpt", "OpenAIGPTLMHeadModel", GPT),
    _decoder("opt", "OPT", BODY | SPECIAL, ffn_dim=52, word_embed_proj_dim=36),
    _decoder("opt-350m", "OPT", BODY | SPECIAL, ffn_dim=52, word_embed_proj_dim=20, do_layer_norm_before=False),
    _decoder(
        "gpt-neo",
        "GPTNeo",
        SPECIAL,
        hidden_size=36,
        num_heads=6,
        num_layers=4,
        attention_types=[[["global", "local"], 2]],
        window_size=8,
        intermediate_size=52,
        max_position_embeddings=64,
        recipe=UNDIVIDED,
    ),
    _decoder("bloom", "Bloom", BLOOM),
    _decoder(
        "bloom-post-layernorm", "Bloom", BLOOM, apply_residual_connection_post_layernorm=True, layer_norm_epsilon=1e-2
    ),
    _decoder("mpt", "Mpt", MPT),
    _decoder("mpt-clip", "Mpt", MPT, attn_config={"clip_qkv": 0.8, "softmax_scale": 0.6}, layer_norm_epsilon=1e-2),
    # The reference's eager attention adds the bias twice: with the mask and in the attention.
    _decoder(
        "falcon-alibi",
        "Falcon",
        BODY | SPECIAL,
        ffn_hidden_size=52,
        alibi=True,
        multi_query=False,
        parallel_attn=False,
        bias=True,
        attention="sdpa",
    ),
    _decoder("falcon-rotary-mha", "Falcon", FALCON, ffn_hidden_size=52, multi_query=False, parallel_attn=True),
    _decoder(
        "falcon-mqa", "Falcon", FALCON, multi_query=True, parallel_attn=True, rope_theta=500.0, layer_norm_epsilon=1e-2
    ),
    _decoder("falcon-new-decoder", "Falcon", FALCON, new_decoder_architecture=True, num_kv_heads=2),
    _decoder(
        "falcon-new-decoder-one-norm",
        "Falcon",
        FALCON,
        new_decoder_architecture=True,
        num_kv_heads=2,
        num_ln_in_parallel_attn=1,
    ),
    _decoder("gptj", "GPTJ", GPT, n_embd=48, n_inner=52, rotary_dim=4, tie_word_embeddings=False),
    _decoder("gpt-neox", "GPTNeoX", NEOX, rotary_pct=0.25),
    _decoder(
        "gpt-neox-sequential",
        "GPTNeoX",
        NEOX,
        rotary_pct=0.5,
        layer_norm_eps=1e-2,
        use_parallel_residual=False,
        attention_bias=False,
    ),
    _decoder("phi", "Phi", GROUPED, partial_rotary_factor=0.75),
    _decoder("stablelm", "StableLm", GROUPED, partial_rotary_factor=0.25),
    _decoder(
        "stablelm-qk-norm",
        "StableLm",
        GROUPED,
        partial_rotary_factor=0.5,
        qk_layernorm=True,
        use_parallel_residual=True,
        use_qkv_bias=True,
    ),
    _decoder("llama", "Llama", HEADED),
    _decoder(
        "llama-llama3",
        "Llama",
        HEADED,
        rope_theta=500.0,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        length=41,
    ),
    _decoder("llama-linear", "Llama", HEADED, rope_scaling={"rope_type": "linear", "factor": 4.0}, length=41),
    _decoder(
        "llama-dynamic",
        "Llama",
        HEADED,
        max_position_embeddings=16,
        rope_scaling={"rope_type": "dynamic", "factor": 2.0},
        length=41,
    ),
    _decoder("llama-yarn", "Llama", HEADED, rope_theta=500.0, rope_scaling=YARN, length=41),
    _decoder(
        "llama-bias",
        "Llama",
        HEADED,
        attention_bias=True,
        mlp_bias=True,
        rope_theta=500.0,
        rms_norm_eps=1e-2,
        hidden_act="gelu",
    ),
    _decoder("llama-tied", "Llama", HEADED, tie_word_embeddings=True),
    _decoder("mistral", "Mistral", HEADED, sliding_window=8),
    _decoder("mixtral", "Mixtral", HEADED, sliding_window=None, num_local_experts=5, num_experts_per_tok=3, length=47),
    _decoder(
        "qwen2", "Qwen2", DEEP, tie_word_embeddings=True, use_sliding_window=True, sliding_window=8, max_window_layers=2
    ),
    _decoder("qwen3", "Qwen3", HEADED, rope_theta=5000.0, rms_norm_eps=1e-2),
    _decoder("gemma", "Gemma", HEADED, recipe=GEMMA),
    _decoder(
        "gemma2",
        "Gemma2",
        GEMMA2,
        num_hidden_layers=4,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=2.0,
        rms_norm_eps=1e-2,
        recipe=GEMMA,
    ),
    _decoder(
        "gemma3",
        "Gemma3",
        GEMMA2,
        config="Gemma3TextConfig",
        num_hidden_layers=6,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        rope_theta=300000.0,
        rope_local_base_freq=500.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        recipe=GEMMA,
    ),
    _decoder("olmo", "Olmo", GROUPED, clip_qkv=0.8),
    _decoder("olmo2", "Olmo2", GROUPED, rms_norm_eps=1e-2),
    _decoder("smollm3", "SmolLM3", DEEP, no_rope_layer_interval=2),
    _decoder("seed-oss", "SeedOss", HEADED, mlp_bias=True, attention_out_bias=True),
    _decoder("ernie4-5", "Ernie4_5", HEADED, use_bias=True, rms_norm_eps=1e-2),
    _decoder("exaone4", "Exaone4", GROUPED, num_hidden_layers=5, sliding_window=8, sliding_window_pattern=2),
    _decoder("exaone4-full", "Exaone4", GROUPED, sliding_window=None, layer_types=["full_attention"] * 3),
    _decoder("olmo3", "Olmo3", GROUPED, num_hidden_layers=8, sliding_window=8, rope_scaling=YARN, length=41),
    _decoder("glm", "Glm", HEADED, rms_norm_eps=1e-2),
    _decoder("glm4", "Glm4", HEADED, attention_bias=False, tie_word_embeddings=True, partial_rotary_factor=0.25),
    _decoder(
        "qwen3-moe",
        "Qwen3Moe",
        HEADED,
        moe_intermediate_size=20,
        num_experts=4,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        length=47,
    ),
    _decoder(
        "qwen2-moe",
        "Qwen2Moe",
        GROUPED,
        mlp_only_layers=[1],
        moe_intermediate_size=20,
        shared_expert_intermediate_size=28,
        num_experts=5,
        num_experts_per_tok=2,
        length=47,
    ),
    _decoder(
        "glm4-moe",
        "Glm4Moe",
        HEADED,
        moe_intermediate_size=20,
        n_routed_experts=6,
        n_shared_experts=2,
        n_group=3,
        topk_group=2,
        num_experts_per_tok=3,
        routed_scaling_factor=1.5,
        use_qk_norm=True,
        attention_bias=True,
        length=63,
    ),
    _decoder(
        "dots1",
        "Dots1",
        GROUPED,
        moe_intermediate_size=20,
        n_routed_experts=6,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    ),
    _decoder(
        "ernie4-5-moe",
        "Ernie4_5_Moe",
        GROUPED,
        num_hidden_layers=4,
        moe_intermediate_size=20,
        moe_num_experts=4,
        moe_k=3,
        moe_layer_interval=2,
        length=63,
    ),
    _decoder(
        "phimoe",
        "Phimoe",
        GROUPED,
        max_position_embeddings=96,
        num_local_experts=5,
        router_jitter_noise=0.2,
        attention_bias=True,
        lm_head_bias=True,
        rope_scaling={
            "type": "longrope",
            "rope_type": "longrope",
            "short_factor": [1.0, 1.25, 1.5, 2.0],
            "long_factor": [2.0, 4.0, 6.0, 8.0],
            "short_mscale": 1.25,
            "long_mscale": 1.25,
            "original_max_position_embeddings": 48,
        },
        recipe=UNDIVIDED,
    ),
    _decoder(
        "granitemoe",
        "GraniteMoe",
        GROUPED,
        num_local_experts=5,
        num_experts_per_tok=3,
        embedding_multiplier=3.0,
        logits_scaling=2.0,
        residual_multiplier=0.7,
        attention_multiplier=0.4,
        length=47,
    ),
    _decoder(
        "granitemoe-shared",
        "GraniteMoeShared",
        GROUPED,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=28,
        residual_multiplier=0.7,
        attention_multiplier=0.4,
    ),
    _decoder(
        "qwen3-moe-dense",
        "Qwen3Moe",
        HEADED,
        num_hidden_layers=5,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        moe_intermediate_size=20,
        num_experts=4,
        num_experts_per_tok=2,
    ),
    _decoder(
        "mellum",
        "Mellum",
        HEADED,
        num_hidden_layers=4,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        mlp_layer_types=["dense", "dense", "sparse", "sparse"],
        sliding_window=8,
        moe_intermediate_size=20,
        num_experts=4,
        num_experts_per_tok=3,
        rope_parameters={
            "full_attention": {**YARN, "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
        length=47,
    ),
    _decoder(
        "exaone-moe",
        "ExaoneMoe",
        HEADED,
        num_hidden_layers=5,
        sliding_window=8,
        sliding_window_pattern=2,
        moe_intermediate_size=20,
        num_experts=6,
        num_shared_experts=2,
        num_experts_per_tok=3,
        n_group=3,
        topk_group=2,
        mlp_layer_types=["dense", "dense", "sparse", "sparse", "sparse"],
        length=63,
    ),
    _decoder(
        "hy-v3",
        "HYV3",
        HEADED,
        moe_intermediate_size=20,
        num_experts=5,
        num_shared_experts=2,
        num_experts_per_tok=2,
        router_scaling_factor=1.7,
        attention_bias=True,
        length=47,
    ),
    _decoder(
        "solar-open",
        "SolarOpen",
        HEADED,
        moe_intermediate_size=20,
        n_routed_experts=6,
        n_shared_experts=2,
        n_group=3,
        topk_group=2,
        num_experts_per_tok=3,
        routed_scaling_factor=1.5,
        attention_bias=True,
        length=63,
    ),
    _decoder("flex-olmo", "FlexOlmo", GROUPED, num_experts=4, num_experts_per_tok=3, rms_norm_eps=1e-2, length=47),
    _decoder(
        "minimax-m2",
        "MiniMaxM2",
        HEADED,
        num_local_experts=5,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        length=47,
    ),
    _decoder(
        "granite-swa",
        "GraniteSWA",
        GROUPED,
        num_hidden_layers=5,
        sliding_window=8,
        layer_rope_theta=[0, 500.0, 50.0, 500.0, 50.0],
        embedding_multiplier=3.0,
        logits_scaling=2.0,
        residual_multiplier=0.7,
        attention_multiplier=0.4,
        attention_bias=True,
    ),
    _decoder("olmoe", "Olmoe", GROUPED, num_experts=4, num_experts_per_tok=3, length=47),
    _decoder(
        "gpt-oss",
        "GptOss",
        HEADED,
        num_hidden_layers=4,
        sliding_window=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_theta=500.0,
        rope_scaling={**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    ),
    _decoder("cohere", "Cohere", COHERE),
    _decoder("cohere-qk-norm", "Cohere", COHERE, use_qk_norm=True, layer_norm_eps=1e-2),
    _decoder("cohere2", "Cohere2", COHERE, num_hidden_layers=8, sliding_window=8, attention_bias=True),
    _decoder("codegen", "CodeGen", SPECIAL, n_embd=64, n_head=8, n_layer=3, n_positions=64, n_ctx=64, rotary_dim=4),
    _decoder(
        "xglm",
        "XGLM",
        SPECIAL,
        d_model=36,
        ffn_dim=52,
        attention_heads=6,
        num_layers=3,
        max_position_embeddings=64,
        recipe=SCALED,
    ),
    _decoder("phi3", "Phi3", GROUPED, sliding_window=8),
    _decoder(
        "phi3-longrope",
        "Phi3",
        GROUPED,
        original_max_position_embeddings=16,
        rope_scaling={"type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.6], "long_factor": [1.2, 2.0, 3.1, 4.0]},
    ),
    _decoder(
        "granite",
        "Granite",
        GROUPED,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.2,
        logits_scaling=1.7,
    ),
    _decoder("biogpt", "BioGpt", BODY | SPECIAL, intermediate_size=52, recipe=SCALED),
    _decoder("gpt-bigcode", "GPTBigCode", GPT, n_inner=52, multi_query=True),
    _decoder("starcoder2", "Starcoder2", GROUPED, sliding_window=8, norm_epsilon=1e-2),
    _decoder("arcee", "Arcee", HEADED, attention_bias=True, mlp_bias=True),
    _decoder("nemotron", "Nemotron", HEADED, partial_rotary_factor=0.5, norm_eps=1e-2, recipe=GEMMA),
    _decoder("jais2", "Jais2", GROUPED, layer_norm_eps=1e-2),
    _decoder(
        "apertus",
        "Apertus",
        GROUPED,
        rope_scaling=LLAMA3,
        length=41,
        fixed=("act_fn.beta", "act_fn.eps"),
        without={"4.57": "rounds the numbers of xIELU to bfloat16"},
    ),
    _decoder("nanochat", "NanoChat", GROUPED, attention_bias=True, final_logit_softcapping=3.0),
    _decoder("helium", "Helium", GROUPED, head_dim=8, attention_bias=True, mlp_bias=True, rms_norm_eps=1e-2),
    _decoder("internlm3", "Llama", HEADED, config="InternLM3Config", attention_bias=True, mlp_bias=True),
    _decoder("iquestcoder", "Llama", HEADED, config="IQuestCoderConfig", rms_norm_eps=1e-2),
    _decoder(
        "hyperclovax",
        "HyperCLOVAX",
        GROUPED,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.2,
        logits_scaling=0.7,
    ),
    _decoder("hyperclovax-pre", "HyperCLOVAX", GROUPED, use_post_norm=False, attention_bias=True),
    _decoder(
        "ministral", "Ministral", HEADED, sliding_window=8, layer_types=["full_attention", *["sliding_attention"] * 2]
    ),
    _decoder("cwm", "Cwm", HEADED, num_hidden_layers=5, sliding_window=8, rope_parameters=LLAMA3, length=41),
    _decoder(
        "ministral3",
        "Ministral3",
        HEADED,
        sliding_window=None,
        rope_parameters={
            **YARN,
            "rope_theta": 500.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
            "max_position_embeddings": 64,
        },
        length=41,
    ),
    _decoder(
        "lfm2",
        "Lfm2",
        GROUPED,
        num_hidden_layers=4,
        layer_types=["conv", "full_attention", "conv", "conv"],
        conv_L_cache=3,
        conv_bias=True,
        block_multiple_of=20,
        norm_eps=1e-2,
    ),
    _decoder(
        "deepseek-v2",
        "DeepseekV2",
        LATENT,
        q_lora_rank=14,
        n_routed_experts=6,
        n_shared_experts=2,
        topk_method="group_limited_greedy",
        n_group=3,
        topk_group=2,
        routed_scaling_factor=1.5,
        attention_bias=True,
        length=41,
    ),
    _decoder(
        "deepseek-v2-lite",
        "DeepseekV2",
        LATENT,
        q_lora_rank=None,
        n_routed_experts=5,
        n_shared_experts=1,
        rms_norm_eps=1e-2,
        first_k_dense_replace=1,
        length=41,
        recipe=UNDIVIDED,
    ),
    _decoder(
        "deepseek-v3",
        "DeepseekV3",
        LATENT,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        num_key_value_heads=6,
        q_lora_rank=14,
        n_routed_experts=6,
        n_shared_experts=1,
        num_experts_per_tok=3,
        n_group=3,
        topk_group=2,
        rope_theta=500.0,
        rope_scaling={**YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
        length=47,
    ),
    _decoder(
        "glm4-moe-lite",
        "Glm4MoeLite",
        LATENT,
        num_hidden_layers=3,
        num_key_value_heads=6,
        q_lora_rank=14,
        n_routed_experts=5,
        num_experts_per_tok=3,
        mlp_layer_types=["sparse", "dense", "sparse"],
        rope_interleave=False,
        length=47,
    ),
    _decoder(
        "youtu",
        "Youtu",
        {
            name: LATENT[name]
            for name in LATENT
            if "expert" not in name and name not in ("moe_intermediate_size", "first_k_dense_replace")
        },
        num_hidden_layers=3,
        num_key_value_heads=6,
        q_lora_rank=14,
        pad_token_id=None,  # the class sets this row of the table to 0 when it reads a file
        rope_theta=500.0,
    ),
    _decoder(
        "lfm2-moe",
        "Lfm2Moe",
        GROUPED,
        num_hidden_layers=5,
        layer_types=["conv", "full_attention", "conv", "full_attention", "conv"],
        num_dense_layers=2,
        moe_intermediate_size=20,
        num_experts=5,
        num_experts_per_tok=2,
        routed_scaling_factor=1.7,
        norm_eps=1e-2,
    ),
    _decoder(
        "qwen3-next",
        "Qwen3Next",
        DELTA,
        num_hidden_layers=5,
        layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention", "linear_attention"],
        mlp_only_layers=[0, 1],
        attention_bias=True,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=28,
        num_experts=5,
        num_experts_per_tok=2,
        rms_norm_eps=1e-2,
        recipe=UNSATURATED,
        length=71,
    ),
    _decoder(
        "qwen3-5",
        "Qwen3_5",
        DELTA,
        config="Qwen3_5TextConfig",
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
        rms_norm_eps=1e-2,
        recipe=UNSATURATED,
    ),
    _decoder("recurrent-gemma", "RecurrentGemma", GRIFFIN, attention_window_size=64, recipe=UNSATURATED),
    _decoder(
        "recurrent-gemma-window",
        "RecurrentGemma",
        GRIFFIN,
        attention_window_size=8,
        recipe=UNSATURATED,
        without={"4.57": "applies its window to the cache only, not while a prompt is read"},
    ),
    _decoder(
        "gemma4",
        "Gemma4",
        GEMMA4,
        config="Gemma4TextConfig",
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        final_logit_softcapping=2.0,
    ),
    _decoder(
        "gemma4-values",
        "Gemma4",
        GEMMA4,
        config="Gemma4TextConfig",
        attention_bias=True,
        rms_norm_eps=1e-2,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 500.0},
        },
    ),
    _decoder("vaultgemma", "VaultGemma", GEMMA2, num_hidden_layers=4, attn_logit_softcapping=3.0, recipe=GEMMA),
]

BERT = {**BODY, "intermediate_size": 52, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
ROBERTA = {**BODY, **SPECIAL, "intermediate_size": 52, "type_vocab_size": 1}
DISTIL = {"dim": 36, "n_heads": 6, "n_layers": 3, "hidden_dim": 52, "max_position_embeddings": 64, "pad_token_id": 0}
ALBERT = {**BERT, "embedding_size": 20, "num_hidden_layers": 5, "num_hidden_groups": 2}
DEBERTA = {
    **BERT,
    "relative_attention": True,
    "share_att_key": True,
    "pos_att_type": "c2p|p2c",
    "norm_rel_ebd": "layer_norm",
    "position_buckets": 8,
    "max_relative_positions": 20,
    "position_biased_input": False,
}
MODERN = {
    **WIDE,
    "cls_token_id": 0,
    "sep_token_id": 2,
    "num_hidden_layers": 5,
    "global_attn_every_n_layers": 2,
    "local_attention": 8,
    "global_rope_theta": 20000.0,
    "local_rope_theta": 100.0,
}
T5_SIZES = {
    "d_model": 36,
    "d_kv": 8,
    "num_heads": 6,
    "d_ff": 52,
    "num_layers": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
}
LABELS = {"num_labels": 5}
TABLES = ("embed_positions.weight",)

ENCODERS = [
    _encoder("bert", "Bert", BERT, types=True),
    _encoder("bert-base", "BertModel", BERT, output="last_hidden_state", types=True),
    _encoder("bert-tokens", "BertForTokenClassification", BERT | LABELS, layer_norm_eps=1e-2),
    _encoder("bert-sequence", "BertForSequenceClassification", BERT | LABELS, hidden_act="relu"),
    _encoder("roberta", "Roberta", ROBERTA),
    _encoder("roberta-base", "RobertaModel", ROBERTA, output="last_hidden_state"),
    _encoder("roberta-tokens", "RobertaForTokenClassification", ROBERTA | LABELS),
    _encoder("roberta-sequence", "RobertaForSequenceClassification", ROBERTA | LABELS),
    _encoder("roberta-prelayernorm", "RobertaPreLayerNorm", ROBERTA),
    _encoder("distilbert", "DistilBert", DISTIL),
    _encoder(
        "distilbert-sinusoidal", "DistilBert", DISTIL, sinusoidal_pos_embds=True, fixed=("position_embeddings.weight",)
    ),
    _encoder("distilbert-tokens", "DistilBertForTokenClassification", DISTIL | LABELS),
    _encoder("distilbert-sequence", "DistilBertForSequenceClassification", DISTIL | LABELS),
    _encoder("mpnet", "MPNet", BODY | SPECIAL, intermediate_size=52, length=41),
    _encoder("modernbert", "ModernBert", MODERN),
    _encoder("modernbert-tokens", "ModernBertForTokenClassification", MODERN | LABELS),
    _encoder("modernbert-sequence", "ModernBertForSequenceClassification", MODERN | LABELS, classifier_pooling="mean"),
    # With a gain of 1.5 the model's float32 differs from its float64 by 1.6e-5.
    _encoder("nomic-bert", "NomicBert", BERT, hidden_size=48, types=True, recipe=Recipe(gain=1.0)),
    _encoder("roformer", "RoFormer", BERT, hidden_size=48, embedding_size=36, types=True, fixed=TABLES),
    _encoder(
        "roformer-rotary-value", "RoFormer", BERT, hidden_size=48, embedding_size=48, rotary_value=True, fixed=TABLES
    ),
    _encoder("electra", "Electra", BERT, embedding_size=20, types=True),
    _encoder("xlm-roberta", "XLMRoberta", ROBERTA),
    _encoder("camembert", "Camembert", ROBERTA),
    _encoder("deberta-v2", "DebertaV2", DEBERTA),
    _encoder("deberta-v2-base", "DebertaV2Model", DEBERTA, output="last_hidden_state", type_vocab_size=2, types=True),
    _encoder(
        "deberta-v2-distances",
        "DebertaV2ForTokenClassification",
        DEBERTA | LABELS,
        position_buckets=-1,
        max_relative_positions=12,
        pos_att_type=["c2p"],
        norm_rel_ebd="none",
        position_biased_input=True,
        layer_norm_eps=1e-2,
    ),
    _encoder(
        "deberta-v2-sequence", "DebertaV2ForSequenceClassification", DEBERTA | LABELS, pos_att_type="p2c", length=61
    ),
    _encoder("albert", "Albert", ALBERT, types=True),
    _encoder("albert-base", "AlbertModel", ALBERT, output="last_hidden_state", embedding_size=36, num_hidden_groups=3),
    _encoder("albert-tokens", "AlbertForTokenClassification", ALBERT | LABELS, num_hidden_groups=1, hidden_act="relu"),
    _encoder("albert-sequence", "AlbertForSequenceClassification", ALBERT | LABELS, layer_norm_eps=1e-2),
    _encoder("xlm-roberta-xl", "XLMRobertaXL", ROBERTA),
    _encoder("xlm-roberta-xl-sequence", "XLMRobertaXLForSequenceClassification", ROBERTA | LABELS),
    _encoder("t5-encoder", "T5EncoderModel", T5_SIZES, config="T5Config", output="last_hidden_state", recipe=UNDIVIDED),
]

SEQ = {
    **SPECIAL,
    "d_model": 36,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 52,
    "decoder_ffn_dim": 44,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
}
MARIAN = {
    **SEQ,
    "pad_token_id": 96,
    "decoder_start_token_id": 96,
    "activation_function": "swish",
    "scale_embedding": True,
}
T5 = {
    **T5_SIZES,
    "num_decoder_layers": 2,  # with more than the encoder's, 4.57 fails
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
GATED = {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
UNTIED = {"lm_head.weight": (VOCAB, 36)}
T5GEMMA = {
    "vocab_size": VOCAB,
    "hidden_size": 42,
    "intermediate_size": 56,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 4,
    "max_position_embeddings": 64,
    "sliding_window": 8,
    "query_pre_attn_scalar": 10,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 2.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}

ENCDECS = [
    _encdec("bart", "Bart", SEQ, beams=True),
    _encdec("mbart", "MBart", SEQ, scale_embedding=True, activation_function="relu", recipe=SCALED),
    _encdec("marian", "MarianMTModel", MARIAN, beams=True, fixed=TABLES, recipe=MARIANS),
    _encdec(
        "marian-two-tables",
        "MarianMTModel",
        MARIAN,
        share_encoder_decoder_embeddings=False,
        decoder_vocab_size=VOCAB,
        fixed=TABLES,
        recipe=MARIANS,
    ),
    _encdec(
        "marian-two-vocabularies",
        "MarianMTModel",
        MARIAN,
        share_encoder_decoder_embeddings=False,
        decoder_vocab_size=103,
        tie_word_embeddings=False,
        fixed=TABLES,
        recipe=MARIANS,
        without={"4.57": "gives the decoder's table the size of the source vocabulary, and cannot read a true one"},
    ),
    _encdec("m2m-100", "M2M100", SEQ, scale_embedding=True, recipe=SCALED),
    _encdec("pegasus", "Pegasus", SEQ, scale_embedding=True, fixed=TABLES, recipe=SCALED),
    _encdec("blenderbot", "Blenderbot", SEQ, scale_embedding=True),
    _encdec("blenderbot-small", "BlenderbotSmall", SEQ),
    _encdec("t5", "T5", T5, target=27, beams=True, recipe=UNDIVIDED),
    _encdec(
        "t5-distance-128",
        "T5",
        T5,
        relative_attention_num_buckets=32,
        relative_attention_max_distance=128,
        length=151,
        target=139,
        recipe=UNDIVIDED,
    ),
    _encdec(
        "t5-v1.1",
        "T5",
        GATED,
        layer_norm_epsilon=1e-2,
        extra=UNTIED,
        target=27,
        beams=True,
        note="lm_head.weight is in the file and differs from shared.weight, whatever the version would save",
        recipe=UNDIVIDED,
    ),
    _encdec("mt5", "MT5", GATED, extra=UNTIED, target=27, recipe=UNDIVIDED),
    _encdec("umt5", "UMT5", GATED, extra=UNTIED, target=27, recipe=UNDIVIDED),
    _encdec(
        "t5gemma",
        "T5Gemma",
        {},
        encoder=T5GEMMA,
        decoder={**T5GEMMA, "hidden_size": 48, "num_key_value_heads": 3},
        recipe=GEMMA,
    ),
]

CASES = [*DECODERS, *ENCODERS, *ENCDECS]
BY_NAME = {case.name: case for case in CASES}
