"""Whole models compared with transformers (4.57.6, eager attention), with copied random weights.

transformers narrows to float32 in norms and softmax; under ``Double`` it does not, so both sides can be compared
in float64. Only the rotary angles stay float32 on both sides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_attention
from transformers.models.t5.modeling_t5 import T5Attention

from kvad.config import layers as cfg
from kvad.config.layers import NormConfig, RopeConfig
from kvad.config.model import ModelConfig
from kvad.config.serialization import override
from kvad.model.attention import Attention
from kvad.model.no_cache import NoCache
from kvad.model.transformer import Transformer
from kvad.model_input import AttentionParams, AttentionPattern, ModelInput, RelativeBuckets, SubBatch, TokenPositions
from kvad.ops.attention import AttentionMask, Kernel, dot_product_attention

VOCAB, LENGTH, LAYERS = 51, 23, 2
HEADS, KV_HEADS, DIM, WIDTH, HIDDEN = 6, 2, 8, 36, 40  # head_dim is not width / heads where a family allows it
EPS = 1e-3  # large enough to be seen


class Double(TorchFunctionMode):
    """Keeps a float64 tensor in float64 when the code requests float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            if func is Tensor.to:
                args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        # the smallest number of a mask, whose dtype is set later
        if func is torch.full and kwargs.get("dtype") is None:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


class Case(NamedTuple):
    reference_model: Any
    config: ModelConfig
    names: Mapping[str, str]  # name of our module -> name in transformers; {i} is the layer
    prepare: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda state: state
    atol: float = 1e-10
    unused: tuple[str, ...] = ()


def randomised(model: Any) -> Any:
    """Randomize every parameter and buffer; default values would hide dropped biases, swapped norms and Gemma's 1 +
    w.
    """
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=draw)
            if parameter.dim() < 2:
                parameter.copy_(0.4 * noise + (1.0 if re.search(r"(norm|ln_\w+)\.weight", name) else 0.0))
            else:
                parameter.copy_(noise * 1.3 / min(parameter.shape) ** 0.5)
    model = model.double().eval()
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            module.inv_freq = module.inv_freq.float()
    return model


def make(cls: Any, config: Any) -> Any:
    return randomised(cls._from_config(config, attn_implementation="eager"))


def their_name(reference_model: Mapping[str, str], name: str) -> str:
    """Return the transformers name of our parameter."""
    module, _, kind = name.rpartition(".")
    if layer := re.match(r"decoder\.layers\.(\d+)\.(.*)", module):
        return reference_model["layer"].format(i=layer[1]) + reference_model[layer[2]] + "." + kind
    return reference_model[module] + "." + kind


def carry_over(case: Case) -> Transformer:
    state = case.prepare(dict(case.reference_model.state_dict()))
    own_model = Transformer(case.config).double().eval()
    expected = {name: their_name(case.names, name) for name in own_model.state_dict()}
    own_model.load_state_dict({name: state[other] for name, other in expected.items()})
    spare = set(state) - set(expected.values()) - set(case.unused)
    assert not {name for name in spare if name != "lm_head.weight" or not case.config.tie_embeddings}, (
        "weights left over"
    )
    return own_model


def ids(rows: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def run_kvad(model: Transformer, tokens: Tensor, kernel: Kernel) -> Tensor:
    rows, length = tokens.shape
    flat = tokens.flatten()
    step = ModelInput(
        flat,
        torch.arange(length).repeat(rows),
        (SubBatch(rows, length, length),),
        torch.arange(len(flat)),
        seq_lens=torch.full_like(flat, length),
    )
    return model.logits(model(step, NoCache(model.config, kernel=kernel)), step.logit_indices).view(rows, length, -1)


# ---------------------------------------------------------------- families

LLAMA = {
    "embedding.tokens": "model.embed_tokens",
    "layer": "model.layers.{i}.",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp.up": "mlp.up_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.down": "mlp.down_proj",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "decoder.norm": "model.norm",
    "head": "lm_head",
}
SANDWICH = LLAMA | {
    "norm1_after": "post_attention_layernorm",
    "norm2": "pre_feedforward_layernorm",
    "norm2_after": "post_feedforward_layernorm",
}
LLAMA_OPTIONS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "rms_norm_eps": EPS,
    "max_position_embeddings": 64,
    "rope_theta": 100.0,
    "pad_token_id": 0,
}


WHOLE_HEADS = {key: value for key, value in LLAMA_OPTIONS.items() if key != "head_dim"}  # num_heads * head_dim == width


def one_kind(
    mixer: cfg.AttentionConfig,
    mlp: Any = cfg.GatedMLPConfig(HIDDEN),  # noqa: B008  a frozen dataclass
    norm: NormConfig = NormConfig(eps=EPS),
    **more: Any,
) -> ModelConfig:
    stack = {key: more.pop(key) for key in ("norm_position", "final_norm") if key in more}
    decoder = cfg.StackConfig(LAYERS, {"L": cfg.LayerConfig(mixer, mlp, norm)}, **stack)
    return ModelConfig(
        **{
            "hidden_size": WIDTH,
            "vocab_size": VOCAB,
            "max_seq_len": 64,
            "decoder": decoder,
            "tie_embeddings": False,
            **more,
        }
    )


ROPE = RopeConfig(100.0)


def grouped(position: Any = ROPE, **more: Any) -> cfg.AttentionConfig:
    return cfg.AttentionConfig(
        **{"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "position": position, **more}
    )


def llama(**options: Any) -> Any:
    return make(transformers.LlamaForCausalLM, transformers.LlamaConfig(**LLAMA_OPTIONS | options))


FACTORS = {"short_factor": (1.0, 1.1, 1.2, 1.3), "long_factor": (2.0, 3.0, 4.0, 5.0)}


def scaled(scaling: Any, atol: float = 1e-10, **reference_model: Any) -> Case:
    """Run ``LENGTH`` tokens, the limit, in a model trained for 16."""
    options = {"max_position_embeddings": 16, "rope_scaling": reference_model}
    config = one_kind(grouped(RopeConfig(100.0, scaling=scaling)), max_seq_len=LENGTH)
    return Case(llama(**options), config, LLAMA, atol=atol)


def mistral() -> Case:
    reference_model = make(
        transformers.MistralForCausalLM, transformers.MistralConfig(**LLAMA_OPTIONS, sliding_window=5)
    )
    return Case(reference_model, one_kind(grouped(window=5)), LLAMA)


def qwen2() -> Case:
    reference_model = make(
        transformers.Qwen2ForCausalLM, transformers.Qwen2Config(**WHOLE_HEADS, tie_word_embeddings=True)
    )
    return Case(reference_model, one_kind(grouped(head_dim=None, qkv_bias=True), tie_embeddings=True), LLAMA)


def qwen3() -> Case:
    reference_model = make(transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**LLAMA_OPTIONS))
    return Case(reference_model, one_kind(grouped(qk_norm="head")), LLAMA)


def gemma() -> Case:
    reference_model = make(transformers.GemmaForCausalLM, transformers.GemmaConfig(**LLAMA_OPTIONS))
    norm, mlp = NormConfig(eps=EPS, unit_offset=True), cfg.GatedMLPConfig(HIDDEN, "gelu_tanh")
    return Case(
        reference_model,
        one_kind(grouped(), mlp, norm, tie_embeddings=True, embedding=cfg.EmbeddingConfig(scale=WIDTH**0.5)),
        LLAMA,
    )


def two_kinds(local: cfg.AttentionConfig, globe: cfg.AttentionConfig, head: cfg.LanguageHeadConfig) -> ModelConfig:
    norm, mlp = NormConfig(eps=EPS, unit_offset=True), cfg.GatedMLPConfig(HIDDEN, "gelu_tanh")
    kinds = {"L": cfg.LayerConfig(local, mlp, norm), "G": cfg.LayerConfig(globe, mlp, norm)}
    decoder = cfg.StackConfig(4, kinds, "LG", norm_position="sandwich")
    return ModelConfig(WIDTH, VOCAB, 64, decoder, embedding=cfg.EmbeddingConfig(scale=WIDTH**0.5), head=head)


ALTERNATING: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 5,
    "query_pre_attn_scalar": 13,
}


def gemma2() -> Case:
    more = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    reference_model = make(
        transformers.Gemma2ForCausalLM, transformers.Gemma2Config(**LLAMA_OPTIONS | ALTERNATING | more)
    )
    globe = grouped(logit_softcap=2.0, softmax_scale=13**-0.5)
    local = grouped(logit_softcap=2.0, softmax_scale=13**-0.5, window=5)
    return Case(reference_model, two_kinds(local, globe, cfg.LanguageHeadConfig(logit_softcap=3.0)), SANDWICH)


def gemma3() -> Case:
    """Use two rotary bases, and q and k normalized with 1 + w."""
    options = LLAMA_OPTIONS | ALTERNATING | {"rope_local_base_freq": 20.0}
    reference_model = make(transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig(**options))
    globe = grouped(qk_norm="head", softmax_scale=13**-0.5)
    local = grouped(RopeConfig(20.0), qk_norm="head", softmax_scale=13**-0.5, window=5)
    return Case(reference_model, two_kinds(local, globe, cfg.LanguageHeadConfig()), SANDWICH)


def split(
    state: dict[str, Tensor], fused: str, split_rows: Callable[[Tensor], tuple[Tensor, ...]]
) -> dict[str, Tensor]:
    """Split every fused projection into ``.q``, ``.k`` and ``.v``."""
    out = {}
    for name, value in state.items():
        if f".{fused}." not in name:
            out[name] = value
            continue
        for letter, part in zip("qkv", split_rows(value), strict=True):
            out[name.replace(f".{fused}.", f".{letter}.")] = part
    return out


def per_head(value: Tensor) -> tuple[Tensor, ...]:
    """Split [H, 3, D] rows, the layout of BLOOM and GPT-NeoX."""
    parts = value.unflatten(0, (HEADS, 3, -1)).unbind(1)
    return tuple(part.flatten(0, 1) for part in parts)


def conv1d(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Transpose weights stored as [in, out] and split c_attn into q | k | v."""
    turned = {n: v.T if re.search(r"\.c_\w+\.weight", n) else v for n, v in state.items()}
    return split(turned, "c_attn", lambda value: value.chunk(3))


GPT2 = {
    "embedding.tokens": "transformer.wte",
    "embedding.positions": "transformer.wpe",
    "layer": "transformer.h.{i}.",
    "attention.q": "attn.q",
    "attention.k": "attn.k",
    "attention.v": "attn.v",
    "attention.out": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
    "norm1": "ln_1",
    "norm2": "ln_2",
    "decoder.norm": "transformer.ln_f",
    "head": "lm_head",
}
GPT_OPTIONS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": WIDTH,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_positions": 40,
    "layer_norm_epsilon": EPS,
}
LAYER_NORM = NormConfig("layer", EPS, bias=True)
LEARNED: dict[str, Any] = {"embedding": cfg.EmbeddingConfig(cfg.LearnedPositionsConfig(40)), "max_seq_len": 40}


def everywhere(position: Any = None, **more: Any) -> cfg.AttentionConfig:
    """Return full heads of width / heads with biases."""
    return cfg.AttentionConfig(**{"num_heads": HEADS, "position": position, "qkv_bias": True, "out_bias": True, **more})


def gpt2() -> Case:
    reference_model = make(transformers.GPT2LMHeadModel, transformers.GPT2Config(**GPT_OPTIONS, n_inner=HIDDEN))
    mlp = cfg.PlainMLPConfig(HIDDEN, "gelu_tanh", bias=True)
    return Case(reference_model, one_kind(everywhere(), mlp, LAYER_NORM, tie_embeddings=True, **LEARNED), GPT2, conv1d)


def gpt_bigcode() -> Case:
    """One KV head; q | k | v fused by rows."""
    options = GPT_OPTIONS | {"n_inner": HIDDEN, "multi_query": True, "activation_function": "gelu_pytorch_tanh"}
    reference_model = make(transformers.GPTBigCodeForCausalLM, transformers.GPTBigCodeConfig(**options))
    mlp = cfg.PlainMLPConfig(HIDDEN, "gelu_tanh", bias=True)

    def prepare(state: dict[str, Tensor]) -> dict[str, Tensor]:
        return split(state, "c_attn", lambda value: value.split((WIDTH, WIDTH // HEADS, WIDTH // HEADS)))

    return Case(
        reference_model,
        one_kind(everywhere(num_kv_heads=1), mlp, LAYER_NORM, tie_embeddings=True, **LEARNED),
        GPT2,
        prepare,
    )


def openai_gpt() -> Case:
    """Post-norm, no final norm, an MLP of four widths."""
    reference_model = make(transformers.OpenAIGPTLMHeadModel, transformers.OpenAIGPTConfig(**GPT_OPTIONS, afn="gelu"))
    names = GPT2 | {
        "embedding.tokens": "transformer.tokens_embed",
        "embedding.positions": "transformer.positions_embed",
    }
    mlp = cfg.PlainMLPConfig(4 * WIDTH, "gelu_tanh", bias=True)
    config = one_kind(
        everywhere(), mlp, LAYER_NORM, tie_embeddings=True, norm_position="post", final_norm=False, **LEARNED
    )
    return Case(reference_model, config, names, conv1d)


def gptj() -> Case:
    """Parallel, interleaved, partial rotary, a bias in the head; head dim 16, whose square root is exact in float32."""
    options = GPT_OPTIONS | {"n_embd": 96, "rotary_dim": 8, "n_inner": HIDDEN, "tie_word_embeddings": False}
    reference_model = make(transformers.GPTJForCausalLM, transformers.GPTJConfig(**options))
    names = GPT2 | {f"attention.{letter}": f"attn.{letter}_proj" for letter in "qkv"}
    names |= {"attention.out": "attn.out_proj", "mlp.up": "mlp.fc_in", "mlp.down": "mlp.fc_out"}
    mixer = cfg.AttentionConfig(HEADS, position=RopeConfig(10000.0, 0.5, interleaved=True))
    mlp = cfg.PlainMLPConfig(HIDDEN, "gelu_tanh", bias=True)
    config = one_kind(
        mixer, mlp, LAYER_NORM, norm_position="parallel", hidden_size=96, head=cfg.LanguageHeadConfig(bias=True)
    )
    return Case(reference_model, config, names)


def bloom() -> Case:
    """ALiBi on six heads, a norm after the embedding; the gelu uses sqrt(2/pi) with eight digits."""
    options = {key: value for key, value in GPT_OPTIONS.items() if key not in ("n_embd", "n_positions")}
    reference_model = make(transformers.BloomForCausalLM, transformers.BloomConfig(hidden_size=WIDTH, **options))
    names = GPT2 | {
        "embedding.tokens": "transformer.word_embeddings",
        "embedding.norm": "transformer.word_embeddings_layernorm",
        "attention.out": "self_attention.dense",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
        "norm1": "input_layernorm",
        "norm2": "post_attention_layernorm",
    }
    names |= {f"attention.{letter}": f"self_attention.{letter}" for letter in "qkv"}
    mlp = cfg.PlainMLPConfig(4 * WIDTH, "gelu_tanh", bias=True)
    config = one_kind(
        everywhere(cfg.AlibiConfig()),
        mlp,
        LAYER_NORM,
        tie_embeddings=True,
        embedding=cfg.EmbeddingConfig(norm=LAYER_NORM),
    )
    return Case(reference_model, config, names, lambda state: split(state, "query_key_value", per_head), atol=1e-7)


def mpt() -> Case:
    """ALiBi, norms without a bias, q | k | v fused, erf gelu."""
    options = {"d_model": WIDTH, "n_heads": HEADS, "n_layers": LAYERS, "max_seq_len": 64, "vocab_size": VOCAB}
    reference_model = make(transformers.MptForCausalLM, transformers.MptConfig(**options, layer_norm_epsilon=EPS))
    names = GPT2 | {
        "layer": "transformer.blocks.{i}.",
        "attention.out": "attn.out_proj",
        "mlp.up": "ffn.up_proj",
        "mlp.down": "ffn.down_proj",
        "norm1": "norm_1",
        "norm2": "norm_2",
        "decoder.norm": "transformer.norm_f",
    }
    mixer = everywhere(cfg.AlibiConfig(), qkv_bias=False, out_bias=False)
    config = one_kind(mixer, cfg.PlainMLPConfig(4 * WIDTH, "gelu"), NormConfig("layer", EPS), tie_embeddings=True)

    def prepare(state: dict[str, Tensor]) -> dict[str, Tensor]:
        return split(state, "Wqkv", lambda value: value.chunk(3))

    return Case(reference_model, config, names, prepare)


def opt() -> Case:
    """ReLU; learned positions with an offset of two rows."""
    options = {"ffn_dim": HIDDEN, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    config = transformers.OPTConfig(**options, vocab_size=VOCAB, max_position_embeddings=40, word_embed_proj_dim=WIDTH)
    names = {name: other.replace("model.", "model.decoder.") for name, other in LLAMA.items()} | {
        "embedding.positions": "model.decoder.embed_positions",
        "attention.out": "self_attn.out_proj",
        "mlp.up": "fc1",
        "mlp.down": "fc2",
        "norm1": "self_attn_layer_norm",
        "norm2": "final_layer_norm",
        "decoder.norm": "model.decoder.final_layer_norm",
    }
    position: dict[str, Any] = {
        "embedding": cfg.EmbeddingConfig(cfg.LearnedPositionsConfig(42, offset=2)),
        "max_seq_len": 40,
    }
    norm = NormConfig("layer", 1e-5, bias=True)
    own_model = one_kind(
        everywhere(), cfg.PlainMLPConfig(HIDDEN, "relu", bias=True), norm, tie_embeddings=True, **position
    )
    return Case(make(transformers.OPTForCausalLM, config), own_model, names)


def xglm() -> Case:
    """fairseq's sinusoids with an offset of two positions, embeddings times sqrt(width)."""
    options = {"d_model": WIDTH, "ffn_dim": HIDDEN, "num_layers": LAYERS, "attention_heads": HEADS}
    config = transformers.XGLMConfig(**options, vocab_size=VOCAB, max_position_embeddings=64)
    names = LLAMA | {
        "attention.out": "self_attn.out_proj",
        "mlp.up": "fc1",
        "mlp.down": "fc2",
        "norm1": "self_attn_layer_norm",
        "norm2": "final_layer_norm",
        "decoder.norm": "model.layer_norm",
    }
    norm, mlp = NormConfig("layer", 1e-5, bias=True), cfg.PlainMLPConfig(HIDDEN, "gelu", bias=True)
    embed = cfg.EmbeddingConfig(cfg.SinusoidalPositionsConfig(form="fairseq", offset=2), scale=WIDTH**0.5)
    own_model = one_kind(everywhere(), mlp, norm, tie_embeddings=True, embedding=embed)
    return Case(
        make(transformers.XGLMForCausalLM, config), own_model, names, atol=1e-4
    )  # the transformers table is float32


def phi() -> Case:
    """Parallel with one norm, half-split rotary on half of each head, biases everywhere, also in the head."""
    options = WHOLE_HEADS | {"num_key_value_heads": 3, "partial_rotary_factor": 0.5, "layer_norm_eps": EPS}
    options |= {"hidden_size": 48, "hidden_act": "gelu_new"}
    reference_model = make(transformers.PhiForCausalLM, transformers.PhiConfig(**options))
    names = LLAMA | {"attention.out": "self_attn.dense", "mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"}
    names |= {"decoder.norm": "model.final_layernorm"}
    mixer = everywhere(RopeConfig(100.0, 0.5), num_kv_heads=3)
    mlp = cfg.PlainMLPConfig(HIDDEN, "gelu_tanh", bias=True)
    return Case(
        reference_model,
        one_kind(
            mixer, mlp, LAYER_NORM, norm_position="parallel", hidden_size=48, head=cfg.LanguageHeadConfig(bias=True)
        ),
        names,
    )


def cohere() -> Case:
    """Parallel, interleaved on whole heads, norms without a bias, scaled logits."""
    options = WHOLE_HEADS | {"hidden_size": 48, "layer_norm_eps": EPS, "logit_scale": 0.3}
    reference_model = make(transformers.CohereForCausalLM, transformers.CohereConfig(**options))
    mixer = grouped(RopeConfig(100.0, interleaved=True))
    head = cfg.LanguageHeadConfig(logit_scale=0.3)
    config = one_kind(
        mixer, norm=NormConfig("layer", EPS), norm_position="parallel", hidden_size=48, tie_embeddings=True, head=head
    )
    return Case(reference_model, config, LLAMA)


def gpt_neox() -> Case:
    """Sequential form: rotary on a quarter, q, k, v fused per head, erf gelu."""
    options = WHOLE_HEADS | {"hidden_size": 96, "rotary_pct": 0.25, "rotary_emb_base": 100, "layer_norm_eps": EPS}
    options |= {"use_parallel_residual": False, "hidden_act": "gelu"}
    reference_model = make(transformers.GPTNeoXForCausalLM, transformers.GPTNeoXConfig(**options))
    names = LLAMA | {
        "embedding.tokens": "gpt_neox.embed_in",
        "layer": "gpt_neox.layers.{i}.",
        "attention.out": "attention.dense",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
        "decoder.norm": "gpt_neox.final_layer_norm",
        "head": "embed_out",
    }
    names |= {f"attention.{letter}": f"attention.{letter}" for letter in "qkv"}
    mixer = everywhere(RopeConfig(100.0, 0.25))
    config = one_kind(mixer, cfg.PlainMLPConfig(HIDDEN, "gelu", bias=True), LAYER_NORM, hidden_size=96)
    return Case(reference_model, config, names, lambda state: split(state, "query_key_value", per_head))


CASES: dict[str, Callable[[], Case]] = {
    "llama": lambda: Case(llama(), one_kind(grouped()), LLAMA),
    "llama-tied": lambda: Case(llama(tie_word_embeddings=True), one_kind(grouped(), tie_embeddings=True), LLAMA),
    "llama-biases": lambda: Case(
        llama(attention_bias=True, mlp_bias=True),
        one_kind(grouped(qkv_bias=True, out_bias=True), cfg.GatedMLPConfig(HIDDEN, bias=True)),
        LLAMA,
    ),
    "llama-linear": lambda: scaled(cfg.LinearScalingConfig(2.5), rope_type="linear", factor=2.5),
    # transformers computes the new base from a float32 tensor
    "llama-dynamic": lambda: scaled(cfg.DynamicScalingConfig(2.5, 16), 1e-4, rope_type="dynamic", factor=2.5),
    "llama-llama3": lambda: scaled(
        cfg.Llama3ScalingConfig(4.0, 16, 1.0, 4.0),
        rope_type="llama3",
        factor=4.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=16,
    ),
    "llama-yarn": lambda: scaled(
        cfg.YarnScalingConfig(4.0, 16, 4.0),
        rope_type="yarn",
        factor=4.0,
        beta_fast=4.0,
        original_max_position_embeddings=16,
    ),
    "llama-longrope": lambda: scaled(
        cfg.LongRopeScalingConfig(**FACTORS, original_max_seq_len=16, factor=4.0),
        rope_type="longrope",
        factor=4.0,
        short_factor=list(FACTORS["short_factor"]),
        long_factor=list(FACTORS["long_factor"]),
    ),
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "gpt2": gpt2,
    "gpt-bigcode": gpt_bigcode,
    "openai-gpt": openai_gpt,
    "gptj": gptj,
    "bloom": bloom,
    "mpt": mpt,
    "opt": opt,
    "xglm": xglm,
    "phi": phi,
    "cohere": cohere,
    "gpt-neox": gpt_neox,
}


@torch.no_grad()
def reference(case: Case, tokens: Tensor) -> Tensor:
    with Double():
        logits: Tensor = case.reference_model(tokens, use_cache=False).logits
    return logits


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str) -> None:
    case = CASES[name]()
    own_model, tokens = carry_over(case), ids()
    expected = reference(case, tokens)
    assert expected.dtype == torch.float64 and float(expected.std()) > 0.1
    for kernel in ("reference", "sdpa"):
        torch.testing.assert_close(run_kvad(own_model, tokens, kernel), expected, rtol=0, atol=case.atol)  # type: ignore[arg-type]
    check_every_weight_matters(own_model, tokens)


def check_every_weight_matters(model: Transformer, tokens: Tensor) -> None:
    """Check that the logits depend on every weight, so that the comparison covers all of them."""
    right = run_kvad(model, tokens, "sdpa")
    for name, parameter in model.named_parameters():
        if name.endswith("k.bias"):
            continue  # q.b adds the same number to all keys without rotation; the softmax cancels it
        unused_weights = parameter.detach().clone()
        with torch.no_grad():
            parameter.zero_()
        assert float((run_kvad(model, tokens, "sdpa") - right).abs().max()) > 1e-3, name
        with torch.no_grad():
            parameter.copy_(unused_weights)


def test_logits_in_float32() -> None:
    """Compare in float32 at the default tolerance."""
    case = CASES["llama"]()
    case.reference_model.float()
    own_model = carry_over(case).float()
    with torch.no_grad():
        expected = case.reference_model(ids(), use_cache=False).logits
    torch.testing.assert_close(run_kvad(own_model, ids(), "auto"), expected, rtol=1.3e-6, atol=1e-5)


WRONG: dict[str, Callable[[ModelConfig], dict[str, Any]]] = {
    "theta": lambda c: {"decoder.layer_types.L.attention.position.theta": 101.0},
    "window": lambda c: {"decoder.layer_types.L.attention.window": 6},
    "softcap": lambda c: {"decoder.layer_types.G.attention.logit_softcap": 2.1},
    "scale": lambda c: {"decoder.layer_types.G.attention.softmax_scale": "default"},
    "activation": lambda c: {"decoder.layer_types.L.mlp.activation": "gelu"},
    "1 + w": lambda c: {"decoder.layer_types.L.norm.unit_offset": False},
    "eps": lambda c: {"decoder.layer_types.L.norm.eps": 1e-5},
    "order": lambda c: {"decoder.layer_pattern": "GL"},
    "embedding": lambda c: {"embedding.scale": 1.0},
    "head": lambda c: {"head.logit_softcap": None},
    "interleaved": lambda c: {"decoder.layer_types.L.attention.position.interleaved": True},
}


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_config_is_detected(fault: str) -> None:
    case = CASES["gemma2"]()
    data = override(case.config.to_dict(), WRONG[fault](case.config))
    wrong = carry_over(case._replace(config=ModelConfig.from_dict(data)))
    assert float((run_kvad(wrong, ids(), "sdpa") - reference(case, ids())).abs().max()) > 1e-4


# ---------------------------------------------------------------- parts without a whole model


def test_sink_logits_equal_gpt_oss() -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 9, 8, generator=draw, dtype=torch.float64) for n in (6, 2, 2))
    sinks = torch.randn(6, generator=draw, dtype=torch.float64)
    module: Any = SimpleNamespace(num_key_value_groups=3, sinks=sinks, training=False)
    mask = torch.full((9, 9), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    expected, weights = gpt_oss_attention(module, q, k, v, mask, scaling=0.3)
    positions = TokenPositions(torch.arange(9).repeat(2, 1))
    reading = AttentionMask(positions, positions, AttentionPattern())
    done = dot_product_attention(
        q.transpose(1, 2), k, v, reading, AttentionParams(0.3, sink_logits=sinks), return_weights=True
    )
    torch.testing.assert_close(done.out, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(done.weights, weights, rtol=0, atol=1e-12)


@pytest.mark.parametrize("decoder", [False, True])
@pytest.mark.parametrize("length", [9, 200])
def test_relative_attention_equals_t5(decoder: bool, length: int) -> None:
    """No scale, a table per bucket and head, heads * d_kv different from the width; beyond the last bucket of 128."""
    reference_config = transformers.T5Config(
        d_model=WIDTH, d_kv=5, num_heads=HEADS, relative_attention_num_buckets=32, is_decoder=decoder
    )
    reference_model = randomised(T5Attention(reference_config, has_relative_attention_bias=True, layer_idx=0))
    position = cfg.T5BiasConfig(32, 128, bidirectional=not decoder)
    spec = cfg.AttentionConfig(HEADS, head_dim=5, position=position, causal=decoder, softmax_scale="none")
    own_model = Attention(one_kind(spec), spec, NormConfig()).double()
    names = {"q": "q", "k": "k", "v": "v", "out": "o"}
    own_model.load_state_dict({f"{a}.weight": reference_model.state_dict()[f"{b}.weight"] for a, b in names.items()})
    x = torch.randn(1, length, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = torch.zeros(1, 1, length, length, dtype=torch.float64)
    if decoder:
        mask = mask.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
    with Double(), torch.no_grad():
        expected = reference_model(x, mask=mask, cache_position=torch.arange(length))[0][0]
    positions = torch.arange(length)
    step = ModelInput(positions, positions, (SubBatch(1, length, length),), positions)
    (view, *_) = NoCache(one_kind(spec)).open(step)
    table = reference_model.relative_attention_bias.weight
    with torch.no_grad():
        out = own_model(x[0], view, RelativeBuckets(table, 128, not decoder))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
    assert isinstance(own_model, nn.Module) and float(expected.std()) > 0.1
