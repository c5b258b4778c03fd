"""What the golden tests share: kvad's attention on one row, and tiny float64 models with every parameter random."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvad import config as cfg
from kvad.model.fresh import Fresh
from kvad.model.transformer import Transformer
from kvad.ops.attend import Attended, Reading, attend
from kvad.step import Lane, Mark, Memory, Reach, Score, Step

BIDIRECTIONAL = Reach(causal=False)
LAYER_NORM = cfg.Norm("layer", bias=True)
GELU = cfg.Plain(48, "gelu", bias=True)


@pytest.fixture(scope="session")
def attention() -> Callable[..., Attended]:
    """``attention(q [L, H, D], k [S, K, D], v [S, K, Dv])``: one row, positions 0, 1, ... unless they are given."""

    def ask(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        reach: Reach = BIDIRECTIONAL,
        queries: Tensor | None = None,
        keys: Tensor | None = None,
        kernel: Any = "reference",
        want: bool = True,
        **score: Any,
    ) -> Attended:
        queries = torch.arange(len(q)) if queries is None else queries
        keys = torch.arange(len(k)) if keys is None else keys
        reading = Reading(Mark(queries[None]), Mark(keys[None]), reach)
        how = Score(**{"scale": q.shape[-1] ** -0.5, **score})
        done = attend(q[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], reading, how, kernel=kernel, want=want)
        return Attended(*(None if part is None else part[0] for part in done))

    return ask


@pytest.fixture(scope="session")
def build() -> Callable[..., Transformer]:
    """A tiny model of one kind of layer; keywords are those of the config's Attention, Stack and ModelConfig."""

    def make(
        *,
        layers: int = 2,
        norm_place: Any = "pre",
        norm: cfg.Norm = LAYER_NORM,
        mlp: cfg.Plain | cfg.Gated = GELU,
        width: int = 24,
        vocab: int = 32,
        limit: int = 256,
        absolute: cfg.LearnedPositions | cfg.SinusoidalPositions | None = None,
        tie: bool = True,
        seed: int = 0,
        **mixer: Any,
    ) -> Transformer:
        spec = cfg.Attention(**{"heads": 4, "kv_heads": 2, "head_dim": 8, "position": None, **mixer})
        stack = cfg.Stack(layers, {"L": cfg.Layer(spec, mlp, norm)}, norm_place=norm_place)
        model = Transformer(
            cfg.ModelConfig(width, vocab, limit, stack, embed=cfg.Embedding(absolute), tie=tie)
        ).double()
        random = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
            parameter.data = drawn * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else drawn
        return model

    return make


@pytest.fixture(scope="session")
def step_of() -> Callable[..., Step]:
    """The step of one row that is new from end to end, for Fresh."""

    def make(tokens: Tensor, positions: Tensor | None = None) -> Step:
        n = len(tokens)
        positions = torch.arange(n) if positions is None else positions
        return Step(tokens, positions, (Lane(1, n, n),), torch.arange(n))

    return make


@pytest.fixture(scope="session")
def hidden(step_of: Callable[..., Step]) -> Callable[..., Tensor]:
    """``hidden(model, tokens)`` [T, E] of one row, uncached unless a memory is given."""

    @torch.inference_mode()
    def run(model: Transformer, tokens: Tensor, memory: Memory | None = None) -> Tensor:
        out: Tensor = model(step_of(tokens), memory or Fresh(model.config))
        return out

    return run
