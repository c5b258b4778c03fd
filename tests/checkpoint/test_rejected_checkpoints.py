"""Options and models that the decoder families refuse by name: no field that changes numbers is ignored."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvad.checkpoint.conversion import HFConfigReader
from kvad.checkpoint.families import find_family
from kvad.checkpoint.families._hf_class import with_attention
from kvad.config import head_dim
from kvad.config.model import ModelConfig
from kvad.errors import CheckpointError

GPT = {"vocab_size": 97, "n_embd": 48, "n_head": 6, "n_layer": 3}
BODY = {"vocab_size": 97, "hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 3, "intermediate_size": 52}
NEO = {"vocab_size": 97, "hidden_size": 48, "num_heads": 6, "num_layers": 4}
NEW = {"new_decoder_architecture": True, "num_kv_heads": 2}
FILES: dict[str, dict[str, Any]] = {
    "openai-gpt": GPT,
    "opt": {**BODY, "ffn_dim": 52},
    "gpt_neo": {**NEO, "attention_types": [[["global", "local"], 2]]},
    "bloom": {**GPT, "hidden_size": 48},
    "mpt": {"vocab_size": 97, "d_model": 48, "n_heads": 6, "n_layers": 3},
    "falcon": BODY,
    "gptj": {**GPT, "rotary_dim": 4},
    "codegen": {**GPT, "n_head": 8, "n_embd": 64, "rotary_dim": 4},
    "gpt_neox": BODY,
    "phi": BODY,
    "stablelm": {**BODY, "num_key_value_heads": 2},
    "xglm": {"vocab_size": 97, "d_model": 48, "attention_heads": 6, "num_layers": 3, "ffn_dim": 52},
    "biogpt": BODY,
    "gpt_bigcode": GPT,
    **dict.fromkeys(("arcee", "nemotron", "jais2", "nanochat"), BODY),
    "ministral": {**BODY, "num_key_value_heads": 2},
    **{name: {**BODY, "head_dim": 8, "num_key_value_heads": 2} for name in ("internlm3", "iquestcoder", "helium")},
    "apertus": {**BODY, "rope_parameters": {"rope_theta": 500.0}},
    "cwm": {**BODY, "num_key_value_heads": 2, "rope_parameters": {"rope_theta": 500.0}},
    "ministral3": {
        **BODY,
        "num_key_value_heads": 2,
        "rope_parameters": {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 8},
    },
}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("openai-gpt", {"afn": "gelu_new"}, "afn 'gelu_new'"),
    ("opt", {"activation_function": "mish"}, "activation_function 'mish'"),
    ("gpt_neo", {"attention_types": [[["strided"], 4]]}, "attention_types"),
    ("gpt_neo", {"attention_types": [[["global"], 3]]}, "disagree"),
    ("gpt_neo", {"attention_layers": ["local"] * 4}, "disagree"),
    ("mpt", {"attn_config": {"alibi": False}}, "alibi False"),
    ("mpt", {"attn_config": {"alibi_bias_max": 16}}, "alibi_bias_max 16"),
    ("mpt", {"attn_config": {"qk_ln": True}}, "qk_ln True"),
    ("mpt", {"attn_config": {"prefix_lm": True}}, "prefix_lm True"),
    ("mpt", {"attn_config": {"attn_type": "multiquery_attention"}}, "attn_type 'multiquery_attention'"),
    ("mpt", {"logit_scale": "inv_sqrt_d_model"}, "logit_scale"),
    ("mpt", {"no_bias": False}, "no_bias False"),
    ("mpt", {"norm_type": "rmsnorm"}, "norm_type 'rmsnorm'"),
    ("falcon", {"multi_query": False, "num_kv_heads": 2}, "num_kv_heads 2"),
    ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn 2"),
    ("falcon", {**NEW, "num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn 3"),
    ("falcon", {**NEW, "parallel_attn": False}, "parallel_attn False"),
    ("falcon", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm True"),
    ("gptj", {"rotary_dim": None}, "rotary_dim is missing"),
    ("gptj", {"rotary": False}, "rotary False"),
    ("codegen", {"scale_attn_weights": False}, "scale_attn_weights False"),
    ("gpt_neox", {"rotary_pct": 0.25, "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ("gpt_neox", {"rotary_emb_base": 10000, "rope_theta": 500.0}, "rope_theta 500.0"),
    ("gpt_neox", {"rope_scaling": {"rope_type": "spiral"}}, "rope_type 'spiral'"),
    ("phi", {"head_dim": 4}, "head_dim 4"),
    ("stablelm", {"head_dim": 4}, "head_dim 4"),
    ("xglm", {"add_cross_attention": True}, "add_cross_attention True"),
    ("biogpt", {"add_cross_attention": True}, "add_cross_attention True"),
    ("gpt_bigcode", {"add_cross_attention": True}, "add_cross_attention True"),
    ("arcee", {"hidden_act": "xielu"}, "hidden_act 'xielu'"),
    ("apertus", {"hidden_act": "mish"}, "hidden_act 'mish'"),
    ("apertus", {"rope_parameters": None}, "rope_scaling is missing"),
    ("cwm", {"rope_parameters": None}, "rope_scaling is missing"),
    ("nanochat", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type 'yarn'"),
    ("helium", {"head_dim": 6}, "must equal hidden_size 48, got 36"),
    ("internlm3", {"qkv_bias": True}, "qkv_bias and bias differ"),
    ("iquestcoder", {"clip_qkv": 8.0}, "clip_qkv 8.0"),
    ("iquestcoder", {"use_sliding_window": True}, "use_sliding_window True"),
    ("ministral3", {"rope_parameters": {"original_max_position_embeddings": 8}}, "llama_4_scaling_beta is missing"),
    (
        "ministral3",
        {
            "rope_parameters": {
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 8,
                "max_position_embeddings": 9,
            }
        },
        "max_position_embeddings 9",
    ),
]


def read(name: str, **changes: Any) -> ModelConfig:
    return find_family(name).read(HFConfigReader({**FILES[name], **changes, "model_type": name}, "config.json"))


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED, ids=[f"{n}-{m}" for n, _, m in REFUSED])
def test_unsupported_options_are_refused_by_name(name: str, changes: dict[str, Any], message: str) -> None:
    read(name)
    with pytest.raises(CheckpointError, match=message):
        read(name, **changes)


def altered(config: ModelConfig, **attention: Any) -> ModelConfig:
    stack = config.stack
    types = {letter: with_attention(layer, **attention) for letter, layer in stack.layer_types.items()}
    return replace(config, decoder=replace(stack, layer_types=types))


@pytest.mark.parametrize("name", FILES)
def test_a_model_that_the_class_cannot_express_is_not_written(name: str) -> None:
    config = read(name)
    write = find_family(name).write
    assert read(name, **write(config)) == config
    for part, value in {"logit_softcap": 5.0, "sink_logits": True, "softmax_scale": 0.3}.items():
        if (name, part) != ("mpt", "softmax_scale"):
            with pytest.raises(CheckpointError, match=rf"decoder\.layers\.0\.attention\.{part}"):
                write(altered(config, **{part: value}))
    with pytest.raises(CheckpointError, match=r"embedding\.scale is 3"):
        write(replace(config, embedding=replace(config.embedding, scale=3.0)))
    with pytest.raises(CheckpointError, match="cannot express"):
        write(replace(config, decoder=replace(config.stack, norm_position="sandwich")))


@pytest.mark.parametrize("name", FILES)
def test_an_equivalent_config_is_written(name: str) -> None:
    """The number of key-value heads, the head dim and the scale as explicit numbers give the same fields."""
    config = read(name)
    attention = config.stack.layer_config(0).attention
    dim = head_dim(config, attention)
    explicit = altered(
        config,
        num_kv_heads=attention.num_kv_heads or attention.num_heads,
        head_dim=dim,
        value_dim=dim,
        softmax_scale=dim**-0.5 if attention.softmax_scale == "default" else 1.0,
    )
    content, expected = find_family(name).write(explicit), find_family(name).write(config)
    names = content.keys() - {"head_dim", "attn_config"}
    assert {key: content[key] for key in names} == {key: expected[key] for key in names}
