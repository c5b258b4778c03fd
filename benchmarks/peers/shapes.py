"""Random checkpoints of known shapes, and the bytes and operations that one token costs. No torch at import.

``python -m benchmarks.peers.shapes SHAPE FOLDER`` writes a Hugging Face folder, in an environment with transformers.
Weights are a function of the shape and of the versions of torch and transformers: every program reads the same file.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_POSITIONS = 32768
STORED_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0625, "int8-cache": 2.0}  # int8: a float16 scale per 32
CACHE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 2.0, "int8-cache": 1.0625}


@dataclass(frozen=True)
class Shape:
    """Sizes of one model."""

    name: str
    kind: str  # llama, qwen3-moe, gpt2, marian or t5
    layers: int  # of the decoder, and of the encoder if there is one
    width: int
    inner: int
    heads: int
    kv_heads: int
    vocab: int
    head_dim: int = 64
    experts: int = 0  # MLPs of a layer, of which a token chooses some; 0: one for all
    chosen: int = 1

    @property
    def is_encoder_decoder(self) -> bool:
        return self.kind in ("marian", "t5")

    @property
    def attention_weights(self) -> int:
        return self.width * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def mlp_weights(self) -> int:
        """Weights of one MLP, or expert."""
        return (3 if self.kind in ("llama", "qwen3-moe") else 2) * self.width * self.inner

    @property
    def router_weights(self) -> int:
        return self.width * self.experts

    @property
    def layer_weights(self) -> int:
        """Weights that one token uses in one decoder layer, without cross-attention."""
        return self.attention_weights + self.router_weights + self.chosen * self.mlp_weights

    @property
    def cross_weights(self) -> int:
        """Weights of a layer's cross-attention: of queries and output; of keys and values as many again."""
        return 2 * self.width * self.heads * self.head_dim if self.is_encoder_decoder else 0

    @property
    def head_weights(self) -> int:
        return self.width * self.vocab

    def read_weights(self, tokens: float) -> float:
        """Weights of one layer that a step of some tokens reads; they choose experts independently of each other."""
        share = 1 - (1 - self.chosen / self.experts) ** tokens if self.experts else 1
        mlps = max(1, self.experts) * share
        return self.attention_weights + self.router_weights + self.cross_weights + mlps * self.mlp_weights

    def token_bytes(self, precision: str, tokens: float = 1) -> float:
        """Bytes of weights that a step of some tokens reads; the head has the same precision."""
        return STORED_BYTES[precision] * (self.layers * self.read_weights(tokens) + self.head_weights)

    def cache_bytes(self, precision: str) -> float:
        """Bytes of keys and values of one token."""
        return 2 * CACHE_BYTES[precision] * self.layers * self.kv_heads * self.head_dim

    def token_flops(self, context: float) -> float:
        """Floating point operations of one token of a decoder that attends to ``context`` others, without the head."""
        attention = 4 * self.layers * self.heads * self.head_dim * context
        return 2 * self.layers * (self.layer_weights + self.cross_weights) + attention

    @property
    def file_bytes(self) -> int:
        """Bytes of the bfloat16 checkpoint, about."""
        embeddings = self.head_weights * (2 if self.kind in ("llama", "qwen3-moe") else 1)
        layers = self.layers * (2 if self.is_encoder_decoder else 1)
        return round(2 * (layers * self.read_weights(math.inf) + embeddings))


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("12m", "llama", 6, 384, 1024, 6, 2, 4096),
        Shape("135m", "llama", 30, 576, 1536, 9, 3, 49152),
        Shape("1.1b", "llama", 22, 2048, 5632, 32, 4, 32000),
        Shape("moe", "qwen3-moe", 12, 1024, 512, 16, 4, 32000, experts=64, chosen=8),
        Shape("gpt2", "gpt2", 12, 768, 3072, 12, 12, 50257),
        Shape("marian", "marian", 6, 512, 2048, 8, 8, 32001),
        Shape("t5-small", "t5", 6, 512, 2048, 8, 8, 32128),
    )
}


def model_of(shape: Shape) -> Any:
    """Return the model with random weights."""
    import torch
    import transformers

    torch.manual_seed(0)
    if shape.kind == "llama":
        config = transformers.LlamaConfig(
            vocab_size=shape.vocab, hidden_size=shape.width, intermediate_size=shape.inner,
            num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
            max_position_embeddings=MAX_POSITIONS, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config)
    if shape.kind == "qwen3-moe":
        config = transformers.Qwen3MoeConfig(
            vocab_size=shape.vocab, hidden_size=shape.width, moe_intermediate_size=shape.inner, head_dim=shape.head_dim,
            num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
            num_experts=shape.experts, num_experts_per_tok=shape.chosen, norm_topk_prob=True, mlp_only_layers=[],
            max_position_embeddings=MAX_POSITIONS, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        return transformers.Qwen3MoeForCausalLM(config)
    if shape.kind == "gpt2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_positions=4096))
    if shape.kind == "marian":
        config = transformers.MarianConfig(
            vocab_size=shape.vocab, d_model=shape.width, encoder_layers=shape.layers, decoder_layers=shape.layers,
            encoder_ffn_dim=shape.inner, decoder_ffn_dim=shape.inner, encoder_attention_heads=shape.heads,
            decoder_attention_heads=shape.heads, pad_token_id=shape.vocab - 1, eos_token_id=0,
            decoder_start_token_id=shape.vocab - 1, forced_eos_token_id=None, activation_function="swish",
            scale_embedding=True, max_position_embeddings=512,
        )  # fmt: skip
        return transformers.MarianMTModel(config)
    config = transformers.T5Config(decoder_start_token_id=0)
    config.tie_word_embeddings = True
    return transformers.T5ForConditionalGeneration(config)


def write_checkpoint(shape: Shape, folder: Path) -> None:
    """Write the checkpoint: decoders in bfloat16, encoder-decoders in float32."""
    import torch

    model = model_of(shape)
    if not shape.is_encoder_decoder:
        model = model.to(torch.bfloat16)
    model.save_pretrained(folder)


if __name__ == "__main__":
    write_checkpoint(SHAPES[sys.argv[1]], Path(sys.argv[2]))
