"""Shared fixtures: kvad's attention on one sequence, and tiny float64 models with random parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvad.config import ModelConfig
from kvad.config import layers as cfg
from kvad.model.no_cache import NoCache
from kvad.model.transformer import Transformer
from kvad.model_input import AttentionParams, AttentionPattern, CacheProtocol, ModelInput, SubBatch, TokenPositions
from kvad.ops.attention import AttentionMask, AttentionOutput, dot_product_attention

BIDIRECTIONAL = AttentionPattern(causal=False)
LAYER_NORM = cfg.NormConfig("layer", bias=True)
GELU = cfg.PlainMLPConfig(48, "gelu", bias=True)


@pytest.fixture(scope="session")
def attention() -> Callable[..., AttentionOutput]:
    """Return ``attention(q [L, H, D], k [S, K, D], v [S, K, Dv])``: one sequence, by default at positions 0, 1, ...."""

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        pattern: AttentionPattern = BIDIRECTIONAL,
        queries: Tensor | None = None,
        keys: Tensor | None = None,
        kernel: Any = "reference",
        return_weights: bool = True,
        **score: Any,
    ) -> AttentionOutput:
        queries = torch.arange(len(q)) if queries is None else queries
        keys = torch.arange(len(k)) if keys is None else keys
        reading = AttentionMask(TokenPositions(queries[None]), TokenPositions(keys[None]), pattern)
        how = AttentionParams(**{"scale": q.shape[-1] ** -0.5, **score})
        done = dot_product_attention(
            q[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            reading,
            how,
            kernel=kernel,
            return_weights=return_weights,
        )
        return AttentionOutput(*(None if part is None else part[0] for part in done))

    return attend


@pytest.fixture(scope="session")
def build() -> Callable[..., Transformer]:
    """Return a builder of tiny one-kind models; keywords are those of Attention, Stack and ModelConfig."""

    def make(
        *,
        layers: int = 2,
        norm_place: Any = "pre",
        norm: cfg.NormConfig = LAYER_NORM,
        mlp: cfg.PlainMLPConfig | cfg.GatedMLPConfig = GELU,
        width: int = 24,
        vocab: int = 32,
        limit: int = 256,
        absolute: cfg.LearnedPositionsConfig | cfg.SinusoidalPositionsConfig | None = None,
        tie: bool = True,
        seed: int = 0,
        **mixer: Any,
    ) -> Transformer:
        spec = cfg.AttentionConfig(**{"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "position": None, **mixer})
        stack = cfg.StackConfig(layers, {"L": cfg.LayerConfig(spec, mlp, norm)}, norm_position=norm_place)
        model = Transformer(
            ModelConfig(width, vocab, limit, stack, embedding=cfg.EmbeddingConfig(absolute), tie_embeddings=tie)
        ).double()
        random = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
            parameter.data = drawn * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else drawn
        return model

    return make


@pytest.fixture(scope="session")
def step_of() -> Callable[..., ModelInput]:
    """Return a builder of the ModelInput of one sequence without a cache."""

    def make(tokens: Tensor, positions: Tensor | None = None) -> ModelInput:
        n = len(tokens)
        positions = torch.arange(n) if positions is None else positions
        return ModelInput(tokens, positions, (SubBatch(1, n, n),), torch.arange(n))

    return make


@pytest.fixture(scope="session")
def hidden(step_of: Callable[..., ModelInput]) -> Callable[..., Tensor]:
    """Return ``hidden(model, tokens)`` [T, E] of one sequence, uncached unless a KVCache is given."""

    @torch.inference_mode()
    def run(model: Transformer, tokens: Tensor, kv_cache: CacheProtocol | None = None) -> Tensor:
        out: Tensor = model(step_of(tokens), kv_cache or NoCache(model.config))
        return out

    return run
