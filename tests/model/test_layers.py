"""Norms, activations, MLPs, the embedding and the head, each compared with its formula."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvad.config import layers as cfg
from kvad.config.model import ModelConfig
from kvad.model.heads import LanguageHead, PoolingHead, pool_hidden
from kvad.model.layers import ACTIVATIONS, Embedding, GatedMLP, Norm, PlainMLP, Routing, build_mlp
from kvad.model_input import SubBatch

WIDTH, VOCAB = 12, 17


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def randomise(module: nn.Module) -> Any:
    """Randomize every parameter, in float64."""
    module = module.double()
    for number, parameter in enumerate(module.parameters()):
        parameter.data = random(*parameter.shape, seed=number + 10)
    return module


# ---------------------------------------------------------------- norms


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norms(kind: Any, unit_offset: bool, bias: bool) -> None:
    norm = randomise(Norm(WIDTH, cfg.NormConfig(kind, eps=0.1, bias=bias, unit_offset=unit_offset)))
    x = 3 * random(5, WIDTH) + 2
    out = norm(x)
    weight = norm.weight + 1 if unit_offset else norm.weight
    for row, y in zip(x.tolist(), out, strict=True):
        mean = sum(row) / WIDTH if kind == "layer" else 0.0
        size = math.sqrt(sum((a - mean) ** 2 for a in row) / WIDTH + 0.1)
        expected = torch.tensor([(a - mean) / size for a in row], dtype=torch.float64) * weight
        expected = expected + norm.bias if bias else expected
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)


def test_untrained_norm_has_weight_one() -> None:
    for unit_offset in (False, True):
        norm = Norm(WIDTH, cfg.NormConfig("rms", eps=0.0, unit_offset=unit_offset)).double()
        x = random(5, WIDTH)
        torch.testing.assert_close(norm(x), x / x.square().mean(-1, keepdim=True).sqrt(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_half_precision_norms_are_computed_in_float32(kind: Any, dtype: torch.dtype) -> None:
    """Squares of 300 overflow float16, and 4,096 of them lose their sum in bfloat16."""
    norm = Norm(4096, cfg.NormConfig(kind, eps=1e-6)).to(dtype)
    x = (300 * random(2, 4096)).to(dtype)
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True) if kind == "layer" else wide
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    out = norm(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-3)


# ---------------------------------------------------------------- activations and MLPs

FORMULAS = {
    "gelu": lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "quick_gelu": lambda x: x / (1 + math.exp(-1.702 * x)),
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
    "silu": lambda x: x / (1 + math.exp(-x)),
    "tanh": math.tanh,
}


def test_activations_equal_their_formulas() -> None:
    assert set(FORMULAS) == set(ACTIVATIONS)
    xs = [-6.0, -1.5, -0.2, 0.0, 0.3, 1.0, 4.0]
    for name, formula in FORMULAS.items():
        own = ACTIVATIONS[name](torch.tensor(xs, dtype=torch.float64)).tolist()
        assert own == pytest.approx([formula(x) for x in xs], abs=1e-12), name


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", FORMULAS)
def test_mlps(activation: Any, bias: bool) -> None:
    x = random(4, WIDTH)

    def linear(layer: nn.Linear, y: Tensor) -> Tensor:
        assert (layer.bias is not None) == bias
        return y @ layer.weight.T + (layer.bias if bias else 0)

    plain = randomise(build_mlp(WIDTH, cfg.PlainMLPConfig(20, activation, bias)))
    assert isinstance(plain, PlainMLP)
    act = ACTIVATIONS[activation]
    torch.testing.assert_close(plain(x), linear(plain.down, act(linear(plain.up, x))), rtol=0, atol=1e-10)
    gated = randomise(build_mlp(WIDTH, cfg.GatedMLPConfig(20, activation, bias)))
    assert isinstance(gated, GatedMLP)
    expected = linear(gated.down, act(linear(gated.gate, x)) * linear(gated.up, x))
    torch.testing.assert_close(gated(x), expected, rtol=0, atol=1e-10)


# ---------------------------------------------------------------- embedding and head


def config(**more: Any) -> ModelConfig:
    stack = cfg.StackConfig(1, {"L": cfg.LayerConfig(cfg.AttentionConfig(2), cfg.GatedMLPConfig(8))})
    return ModelConfig(**{"hidden_size": WIDTH, "vocab_size": VOCAB, "max_seq_len": 8, "decoder": stack, **more})


TOKENS, PLACES = torch.tensor([3, 0, 16, 3]), torch.tensor([5, 0, 7, 1])


def test_embedding_scales_then_adds_positions_then_normalises() -> None:
    position = cfg.LearnedPositionsConfig(11, offset=3)
    embed = randomise(Embedding(WIDTH, VOCAB, cfg.EmbeddingConfig(position, 2.5, cfg.NormConfig("layer"))))
    x = 2.5 * embed.tokens.weight[TOKENS] + embed.positions.weight[PLACES + 3]
    torch.testing.assert_close(embed(TOKENS, PLACES), embed.norm(x), rtol=0, atol=1e-12)
    assert [name for name, _ in embed.named_parameters()] == ["tokens.weight", "positions.weight", "norm.weight"]


def test_sinusoids_are_added_and_are_no_parameter() -> None:
    embed = randomise(Embedding(WIDTH, VOCAB, cfg.EmbeddingConfig(cfg.SinusoidalPositionsConfig(), 2.5)))
    added = embed(TOKENS, PLACES) - 2.5 * embed.tokens.weight[TOKENS]
    torch.testing.assert_close(added[:, 0], PLACES.double().sin(), rtol=0, atol=1e-12)
    assert [name for name, _ in embed.named_parameters()] == ["tokens.weight"]


def test_embedding_scale_is_rounded_to_the_dtype() -> None:
    """Gemma's scale sqrt(3072) = 55.4256 is 55.5 in bfloat16."""
    embed = Embedding(WIDTH, VOCAB, cfg.EmbeddingConfig(scale=3072**0.5)).to(torch.bfloat16)
    nn.init.ones_(embed.tokens.weight)
    assert set(embed(TOKENS, PLACES).flatten().tolist()) == {55.5}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tie", [False, True])
def test_head(tie: bool, bias: bool) -> None:
    head = randomise(
        LanguageHead(config(tie_embeddings=tie), cfg.LanguageHeadConfig(bias=bias, logit_softcap=2.0, logit_scale=0.25))
    )
    hidden, embedding = random(3, WIDTH), random(VOCAB, WIDTH, seed=1)
    logits = hidden @ (embedding if tie else head.weight).T + (head.bias if bias else 0)
    torch.testing.assert_close(head(hidden, embedding), 2.0 * torch.tanh(0.25 * logits / 2.0), rtol=0, atol=1e-12)
    names = {name for name, _ in head.named_parameters()}
    assert names == ({"weight"} if not tie else set()) | ({"bias"} if bias else set())


def test_tied_head_adds_its_gradient_to_the_embedding() -> None:
    head, embedding = (
        LanguageHead(config(tie_embeddings=True), cfg.LanguageHeadConfig()),
        random(VOCAB, WIDTH).requires_grad_(),
    )
    head(random(3, WIDTH), embedding).sum().backward()
    assert embedding.grad is not None and float(embedding.grad.abs().min()) > 0


def test_pooled_output_is_transformed_and_normalized() -> None:
    """Two sub-batches: two sequences of three tokens, one of two; BERT's pooler reads the first token of each."""
    hidden = torch.randn(8, 4)
    first = pool_hidden(hidden, (SubBatch(2, 3, 3), SubBatch(1, 2, 2)), "first")
    torch.testing.assert_close(first, hidden[[0, 3, 6]])
    spec = cfg.PoolingHeadConfig("first", normalize=True, transform=cfg.HeadTransformConfig("tanh", output_size=3))
    stack = cfg.StackConfig(1, {"L": cfg.LayerConfig(cfg.AttentionConfig(2, causal=False), cfg.PlainMLPConfig(4))})
    config = ModelConfig(hidden_size=4, vocab_size=5, max_seq_len=8, encoder=stack, head=spec)
    head = PoolingHead(config, spec)
    assert head.transform is not None
    with torch.no_grad():
        dense = torch.tanh(first @ torch.nn.init.normal_(head.transform.dense.weight).T)
        torch.nn.init.zeros_(head.transform.dense.bias)
        torch.testing.assert_close(head(first), dense / dense.norm(dim=-1, keepdim=True))


# ---------------------------------------------------------------- experts


@pytest.mark.parametrize(("alpha", "clip"), [(None, None), (1.702, 0.5)])
def test_experts_are_the_best_of_each_token(alpha: float | None, clip: float | None) -> None:
    spec = cfg.MoEConfig(7, 5, 2, bias=True, router_bias=True, swiglu_alpha=alpha, swiglu_limit=clip)
    experts = randomise(build_mlp(WIDTH, spec))
    x = random(6, WIDTH, seed=3)
    out = experts(x)
    for token, y in zip(x, out, strict=True):
        logits = experts.router.weight @ token + experts.router.bias
        best = logits.topk(2).indices.tolist()
        shares = torch.stack([logits[i] for i in best]).softmax(-1)
        expected = torch.zeros(WIDTH, dtype=torch.float64)
        for share, i in zip(shares, best, strict=True):
            gate = experts.gate[i] @ token + experts.gate_bias[i]
            up = experts.up[i] @ token + experts.up_bias[i]
            if clip is not None:
                gate, up = gate.clamp(max=clip), up.clamp(-clip, clip)
            inner = (up + 1) * gate * torch.sigmoid(alpha * gate) if alpha else ACTIVATIONS["silu"](gate) * up
            expected = expected + share * (experts.down[i] @ inner + experts.down_bias[i])
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)


def weighted_experts(spec: cfg.MoEConfig, logits: list[float], biases: list[float]) -> dict[int, float]:
    """Route one token by the papers' formulas, without tensors: weight by expert."""
    exponentials = [math.exp(logit) for logit in logits]
    scores = [1 / (1 + math.exp(-logit)) for logit in logits]
    if spec.router == "softmax":
        scores = [x / sum(exponentials) for x in exponentials]
    ranking = [score + bias for score, bias in zip(scores, biases, strict=True)]
    size = spec.num_experts // spec.num_groups
    groups = [ranking[low : low + size] for low in range(0, spec.num_experts, size)]
    values = [sum(sorted(group)[-2:]) if spec.selection_bias else max(group) for group in groups]
    best = sorted(range(spec.num_groups), key=lambda group: -values[group])[: spec.num_groups_per_token]
    allowed = [expert for expert in range(spec.num_experts) if expert // size in best]
    chosen = sorted(allowed, key=lambda expert: -ranking[expert])[: spec.num_experts_per_token]
    total = sum(scores[expert] for expert in chosen) if spec.renormalize else 1.0
    return {expert: spec.routed_scale * scores[expert] / total for expert in chosen}


def sparsemixer_weights(logits: list[float], jitter: float) -> dict[int, float]:
    """Route one token by the rule of PhiMoE, without tensors."""
    weights: dict[int, float] = {}
    for _ in range(2):
        left = [expert for expert in range(len(logits)) if expert not in weights]
        best = max(left, key=lambda expert: logits[expert])
        top = logits[best]
        near = [i for i in left if (top - logits[i]) / max(abs(logits[i]), top) <= 2 * jitter]
        weights[best] = math.exp(top) / sum(math.exp(logits[i]) for i in near)
    return weights


ROUTERS = {
    "plain": cfg.MoEConfig(7, 6, 2, renormalize=False),
    "scaled": cfg.MoEConfig(7, 6, 3, routed_scale=2.5),
    "sigmoid": cfg.MoEConfig(7, 6, 2, router="sigmoid", router_bias=True),
    "sigmoid, not renormalized": cfg.MoEConfig(7, 6, 2, router="sigmoid", renormalize=False, routed_scale=0.5),
    "selection bias": cfg.MoEConfig(7, 6, 2, selection_bias=True),
    "groups, DeepSeek-V2": cfg.MoEConfig(7, 8, 3, renormalize=False, num_groups=4, num_groups_per_token=2),
    "groups, DeepSeek-V3": cfg.MoEConfig(
        7, 8, 3, router="sigmoid", selection_bias=True, num_groups=4, num_groups_per_token=2, shared_size=9
    ),
    "shared, Qwen2-MoE": cfg.MoEConfig(7, 6, 2, renormalize=False, shared_size=10, shared_gate=True),
    "sparsemixer, PhiMoE": cfg.MoEConfig(7, 6, 2, sparsemixer_jitter=0.2),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_routers(name: str) -> None:
    spec = ROUTERS[name]
    experts = randomise(build_mlp(WIDTH, spec))
    x = random(9, WIDTH, seed=4) / 3
    routings: list[Routing] = []
    out = experts(x, routings)
    (routing,) = routings
    for token, y, logits, chosen in zip(x, out, routing.logits.tolist(), routing.experts.tolist(), strict=True):
        biases = experts.selection_bias.tolist() if spec.selection_bias else [0.0] * spec.num_experts
        if spec.sparsemixer_jitter is None:
            weights = weighted_experts(spec, logits, biases)
        else:
            weights = sparsemixer_weights(logits, spec.sparsemixer_jitter)
        assert set(chosen) == set(weights)
        expected = torch.zeros(WIDTH, dtype=torch.float64)
        for i, weight in weights.items():
            inner = ACTIVATIONS["silu"](experts.gate[i] @ token) * (experts.up[i] @ token)
            expected = expected + weight * (experts.down[i] @ inner)
        if spec.shared_size is not None:
            shared = experts.shared
            inner = ACTIVATIONS["silu"](shared.gate.weight @ token) * (shared.up.weight @ token)
            gate = torch.sigmoid(experts.shared_gate.weight[0] @ token) if spec.shared_gate else 1.0
            expected = expected + gate * (shared.down.weight @ inner)
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)


def test_selection_bias_and_router_have_at_least_float32() -> None:
    spec = cfg.MoEConfig(7, 64, 2, router="sigmoid", selection_bias=True)
    experts = randomise(build_mlp(WIDTH, spec))
    biases, weight = experts.selection_bias.float(), experts.router.weight.bfloat16()
    half = experts.float().bfloat16()
    assert torch.equal(half.selection_bias, biases) and half.gate.dtype == torch.bfloat16
    x = random(5, WIDTH, seed=4).bfloat16()
    routings: list[Routing] = []
    assert half(x, routings).dtype == torch.bfloat16
    torch.testing.assert_close(routings[0].logits, x.float() @ weight.float().T, rtol=1e-6, atol=1e-6)


def test_selection_bias_is_not_trained() -> None:
    experts = build_mlp(WIDTH, cfg.MoEConfig(7, 4, 2, selection_bias=True))
    assert [name for name, x in experts.named_parameters() if not x.requires_grad] == ["selection_bias"]


def test_norms_per_head_and_without_weight() -> None:
    x = random(4, 3, WIDTH)
    each = randomise(Norm(WIDTH, cfg.NormConfig("layer", bias=True), heads=3))
    bare = Norm(WIDTH, cfg.NormConfig("layer", weight=False))
    plain = torch.nn.functional.layer_norm(x, (WIDTH,), eps=1e-5)
    torch.testing.assert_close(each(x), plain * each.weight + each.bias, rtol=0, atol=1e-12)
    torch.testing.assert_close(bare(x), plain, rtol=0, atol=1e-12)
    assert not list(bare.parameters())
