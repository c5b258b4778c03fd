"""Tiny decoders and options of the tests of ``kvad verify``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kvad.config.layers import AttentionConfig, EmbeddingConfig, GatedMLPConfig, LayerConfig, StackConfig
from kvad.config.model import ModelConfig
from kvad.engine import EngineConfig
from kvad.model.transformer import Transformer
from kvad.verify.report import VerifyReport
from kvad.verify.run import verify
from kvad.verify.scenario import ScenarioOptions, build_prompts

OPTIONS = ScenarioOptions(num_seqs=3, prefill_chunk_size=8, block_size=4, tokens=8, dtypes=("float64",))
FLAGS = ("--num-prompts", "3", "--prefill-chunk-size", "8", "--block-size", "4", "--max-tokens", "8")


def random_model(config: ModelConfig, seed: int = 0) -> Transformer:
    """Build a model whose every parameter matters: at GPT-2's initialization, attention is nearly uniform."""
    torch.manual_seed(seed)
    model = Transformer(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.dim() == 1))
    return model.eval().requires_grad_(False)


def tiny_model(
    vocab: int = 64, limit: int = 96, embedding: Any = None, layers: int = 2, **attention: Any
) -> Transformer:
    """Build a decoder; ``embedding`` are its absolute positions, ``attention`` fields of its AttentionConfig."""
    kinds = {"L": LayerConfig(AttentionConfig(**{"num_heads": 4, "num_kv_heads": 2, **attention}), GatedMLPConfig(48))}
    stack, positions = StackConfig(num_layers=layers, layer_types=kinds), EmbeddingConfig(embedding)
    return random_model(
        ModelConfig(hidden_size=32, vocab_size=vocab, max_seq_len=limit, decoder=stack, embedding=positions)
    )


def run_verify(
    model: Transformer, *, fault: str | None = None, config: EngineConfig | None = None, **options: Any
) -> VerifyReport:
    """Verify a model with generated prompts; ``options`` are fields of ScenarioOptions other than OPTIONS."""
    changed = replace(OPTIONS, **options)
    return verify(model, build_prompts(model.config, changed, None), changed, config=config, fault=fault)
