"""Statements of the notes on the layer around attention: residuals, norms, the MLP, context (001, 002, 003)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvad.config import layers as cfg
from kvad.model.no_cache import NoCache
from kvad.model.transformer import Transformer
from kvad.model_input import ModelInput
from kvad.planning.known_models import known_model

Build = Callable[..., Transformer]
Hidden = Callable[..., Tensor]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_embedding_depends_on_earlier_tokens(build: Build, hidden: Hidden) -> None:
    """001, Overall Purpose: static embeddings become context-aware; under a causal mask, by earlier tokens only."""
    model, bank = build(position=cfg.RopeConfig()), 7
    river, money = torch.tensor([1, 2, bank, 4]), torch.tensor([1, 3, bank, 4])
    a, b = hidden(model, river), hidden(model, money)
    torch.testing.assert_close(model.embedding(river, torch.arange(4))[2], model.embedding(money, torch.arange(4))[2])
    assert a.shape == (4, 24) and float((a[2] - b[2]).abs().max()) > 1e-2
    torch.testing.assert_close(a[0], b[0], rtol=0, atol=1e-12)  # tokens before the difference


def test_residual_gradient(build: Build, step_of: Callable[..., ModelInput]) -> None:
    """002, Residual Connection: y = F(x) + x, dL/dx = dL/dy (dF/dx + 1), and not "(dy/dF + 1)"."""
    model = build(layers=1, position=cfg.RopeConfig())
    layer, step = model.decoder.layers[0], step_of(torch.zeros(3, dtype=torch.long))
    (view,) = NoCache(model.config, kernel="reference").open(step)
    encoding, x = model.decoder.position_encoding("L", step), random(3, 24)

    def jacobian(f: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.func.jacrev(f)(x).reshape(72, 72).detach()

    def branch(x: Tensor) -> Tensor:
        """Return the part of the two residual steps that is added to x."""
        mixed: Tensor = layer.attention(layer.norm1(x), view, encoding)
        normalized: Tensor = layer.mlp(layer.norm2(x + mixed))
        return mixed + normalized

    through = jacobian(lambda x: layer(x, view, None, encoding))
    torch.testing.assert_close(through, jacobian(branch) + torch.eye(72, dtype=torch.float64), rtol=0, atol=1e-12)
    # so "at least 1" is true of the identity path, not of the sum
    assert float(torch.linalg.svdvals(through).min()) < 0.9


@torch.inference_mode()
def test_layer_norm_ignores_other_tokens_unlike_batch_norm(build: Build) -> None:
    """002, Layer Normalization: sequences of 9 and 3 tokens; layer norm of a token ignores all other tokens."""
    norm = build().decoder.layers[0].norm1
    long, short = random(9, 24, seed=1) * 3, random(3, 24, seed=2)
    batch = torch.nn.BatchNorm1d(24).double()
    together = torch.cat([long, short])
    torch.testing.assert_close(norm(together)[9:], norm(short), rtol=0, atol=1e-12)
    assert float((batch(together)[9:] - batch(short)).abs().max()) > 0.1


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@torch.inference_mode()
def test_feed_forward_network_is_per_token(activation: Any, build: Build) -> None:
    """002, Feed Forward Network: linear(ReLU or GELU(linear(x))), garbled there into a sum."""
    mlp, x = build(mlp=cfg.PlainMLPConfig(48, activation, bias=True)).decoder.layers[0].mlp, random(5, 24)
    inner = x.numpy() @ mlp.up.weight.numpy().T + mlp.up.bias.numpy()
    cdf = 0.5 * (1 + torch.erf(torch.from_numpy(inner) / 2**0.5)).numpy()
    active = np.maximum(inner, 0) if activation == "relu" else inner * cdf
    expected = active @ mlp.down.weight.numpy().T + mlp.down.bias.numpy()
    np.testing.assert_allclose(mlp(x).numpy(), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(mlp(x[3:4]), mlp(x)[3:4], rtol=0, atol=1e-12)


@torch.inference_mode()
def test_pre_norm_and_post_norm(build: Build, step_of: Callable[..., ModelInput]) -> None:
    """002, Pre-Norm | Post-Norm: x + F(LN(x)) compared with LN(x + F(x)), for both sub-layers."""
    out = {}
    for place in ("pre", "post"):
        model = build(layers=1, position=cfg.RopeConfig(), norm_place=place)
        layer, step, x = model.decoder.layers[0], step_of(torch.zeros(4, dtype=torch.long)), random(4, 24)
        (view,), encoding = NoCache(model.config).open(step), model.decoder.position_encoding("L", step)
        if place == "pre":
            y = x + layer.attention(layer.norm1(x), view, encoding)
            expected = y + layer.mlp(layer.norm2(y))
        else:
            y = layer.norm1(x + layer.attention(x, view, encoding))
            expected = layer.norm2(y + layer.mlp(y))
        out[place] = layer(x, view, None, encoding)
        torch.testing.assert_close(out[place], expected, rtol=0, atol=1e-12)
    assert float((out["pre"] - out["post"]).abs().max()) > 0.1


@torch.inference_mode()
def test_a_stack_is_attention_and_a_feed_forward_network_in_turn(
    build: Build, step_of: Callable[..., ModelInput]
) -> None:
    """001: a Transformer is stacked layers, each with attention and a feed-forward network; "GPT-3 has 96 layers"."""
    model, tokens = build(layers=3, position=cfg.RopeConfig()), torch.tensor([3, 14, 15, 9])
    step = step_of(tokens)
    views = NoCache(model.config).open(step)
    x, encoding = model.embedding(tokens, step.positions), model.decoder.position_encoding("L", step)
    outputs = []
    for layer, view in zip(model.decoder.layers, views, strict=True):
        x = x + layer.attention(layer.norm1(x), view, encoding)
        x = x + layer.mlp(layer.norm2(x))
        outputs.append(model.decoder.norm(x))
    torch.testing.assert_close(model(step, NoCache(model.config)), outputs[-1], rtol=0, atol=1e-12)
    assert float((outputs[-1] - outputs[-2]).abs().max()) > 1e-2
    assert known_model("gpt3-175b").stack.num_layers == 96
