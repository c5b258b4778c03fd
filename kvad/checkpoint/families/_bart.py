"""The encoder-decoders that began in fairseq, ParlAI and Marian, and became one skeleton in transformers.

BART's names of tensors and of config fields; the families differ in :class:`Skeleton`: where norms stand, what gives
positions, whether a norm follows the embedding and a bias the head (``final_logits_bias``: [1, V] on their side).

Encoder, decoder and head share one table ``model.shared`` unless the config says otherwise; then each has its own, as
transformers 5 reads it.  Copies of a shared table, which older files hold, must be equal to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvad import model as model_lib
from kvad.checkpoint.conversion import Family, HFConfigReader, TensorRule, TensorTransform, prefix_rules, tensor_rule
from kvad.checkpoint.families._common import ACTIVATIONS, dropout_fields, hf_activation, read_dropout, single_layer_type
from kvad.config import (
    AttentionConfig,
    EmbeddingConfig,
    EncoderInputConfig,
    LanguageHeadConfig,
    LayerConfig,
    LearnedPositionsConfig,
    ModelConfig,
    NormConfig,
    PlainMLPConfig,
    SinusoidalPositionsConfig,
    StackConfig,
)
from kvad.errors import CheckpointError

Positions = LearnedPositionsConfig | SinusoidalPositionsConfig

_ROW = TensorTransform(
    lambda tensors, shapes: [tensor.reshape(shape) for tensor, shape in zip(tensors, shapes, strict=True)],
    lambda tensors, shapes: [tensor.unsqueeze(0) for tensor in tensors],
)
_ATTENTION = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "out_proj"}
_LAYER = {
    **{f"attention.{ours}": f"self_attn.{theirs}" for ours, theirs in _ATTENTION.items()},
    **{f"cross_attention.{ours}": f"encoder_attn.{theirs}" for ours, theirs in _ATTENTION.items()},
    "norm1": "self_attn_layer_norm",
    "norm_cross": "encoder_attn_layer_norm",
    "mlp.up": "fc1",
    "mlp.down": "fc2",
    "norm2": "final_layer_norm",
}
_DROPOUT = {
    "embedding": "dropout",
    "residual": "dropout",
    "attention": "attention_dropout",
    "hidden": "activation_dropout",
}
_SIDES = {"encoder": "source", "decoder": "embed"}  # their side -> our embedding


def learned_positions(offset: int) -> Callable[[HFConfigReader, int], Positions]:
    """A table with ``offset`` unused rows before the first position."""
    return lambda fields, limit: LearnedPositionsConfig(limit + offset, offset)


def concat_tables(config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """The sinusoidal tables [limit, E] that stand in their files."""
    table = model_lib.positions.sinusoidal_embedding(
        torch.arange(config.max_seq_len), config.hidden_size, SinusoidalPositionsConfig(form="concat")
    )
    for side in _SIDES:
        yield f"model.{side}.embed_positions.weight", table.clone()


@dataclass(frozen=True)
class BartFamily:
    """What tells one family from another.

    ``model``: their class; ``positions``: of a config and its limit.  ``pre``: norms before each half, and at the end.
    ``early_norm``: the decoder's embedding is normalised before positions are added.  ``limit``, ``activation``,
    ``scaled``: defaults of the config class.  ``extra``: see :class:`Family`.  ``two_vocabularies``: fields of Marian.
    """

    model_type: str
    model: str
    positions: Callable[[HFConfigReader, int], Positions]
    pre_norm: bool = False
    embed_norm: bool = False
    norm_before_positions: bool = False
    head_bias: bool = True
    limit: int = 1024
    activation: str = "gelu"
    scale_embedding: bool = False
    two_vocabularies: bool = False
    extra: Callable[[ModelConfig], Iterable[tuple[str, Tensor]]] | None = None

    # ---------------------------------------------------------------- configs

    def read(self, fields: HFConfigReader) -> ModelConfig:
        self._refuse(fields)
        width, limit = fields.integer("d_model"), fields.integer("max_position_embeddings", default=self.limit)
        vocab, target_vocab, apart = self._vocabularies(fields)
        embed = EmbeddingConfig(
            self.positions(fields, limit),
            scale=math.sqrt(width) if fields.flag("scale_embedding", self.scale_embedding) else 1.0,
            norm=_norm() if self.embed_norm else None,
        )
        return ModelConfig(
            hidden_size=width,
            vocab_size=target_vocab,
            max_seq_len=limit,
            encoder=self._stack(fields, "encoder"),
            decoder=self._stack(fields, "decoder"),
            embedding=replace(embed, norm_first=self.norm_before_positions),
            encoder_input=EncoderInputConfig(limit, embed, vocab if apart else None),
            head=LanguageHeadConfig(bias=self.head_bias),
            tie_embeddings=fields.flag("tie_word_embeddings", True),
            dropout=read_dropout(fields, **_DROPOUT),
        )

    def _refuse(self, fields: HFConfigReader) -> None:
        name, stem = fields.architecture, self.model.removesuffix("ForConditionalGeneration").removesuffix("MTModel")
        if name not in ("", f"{stem}Model") and not name.endswith(("ForConditionalGeneration", "MTModel")):
            hint = f"of this family: {self.model}"
            raise CheckpointError(f"{fields.where}: architectures {name!r} is not supported", hint)
        fields.require_one_of("is_encoder_decoder", True, why="half of an encoder-decoder is another model")
        fields.require_one_of("is_decoder", False, why="half of an encoder-decoder is another model")
        fields.require_one_of("tie_encoder_decoder", False, why="encoder and decoder have weights of their own here")

    def _vocabularies(self, fields: HFConfigReader) -> tuple[int, int, bool]:
        """(of the source, of the target, whether each has a table of its own)."""
        vocab = fields.integer("vocab_size")
        if not self.two_vocabularies:
            return vocab, vocab, not fields.flag("tie_word_embeddings", True)
        apart = not fields.flag("share_encoder_decoder_embeddings", True)
        if not apart:
            fields.require_one_of("decoder_vocab_size", vocab, why="a shared table has one size")
            fields.require_one_of(
                "tie_word_embeddings", True, why="transformers 4.57 and 5 disagree on what is then shared"
            )
        return vocab, fields.integer("decoder_vocab_size", default=vocab), apart

    def _stack(self, fields: HFConfigReader, side: str) -> StackConfig:
        heads = fields.integer(f"{side}_attention_heads")
        activation = fields.choice("activation_function", ACTIVATIONS, self.activation)
        cross = AttentionConfig(heads, position=None, causal=False, qkv_bias=True, out_bias=True)
        layer = LayerConfig(
            AttentionConfig(heads, position=None, causal=side == "decoder", qkv_bias=True, out_bias=True),
            PlainMLPConfig(fields.integer(f"{side}_ffn_dim"), activation, bias=True),
            _norm(),
            cross_attention=cross if side == "decoder" else None,
        )
        layers = fields.integer(f"{side}_layers")
        return StackConfig(
            layers, {"L": layer}, norm_position="pre" if self.pre_norm else "post", final_norm=self.pre_norm
        )

    def write(self, config: ModelConfig) -> dict[str, Any]:
        if config.encoder is None or config.decoder is None or config.encoder_input is None:
            raise CheckpointError(f"{self.model_type} cannot express this model: it is an encoder-decoder")
        fields: dict[str, Any] = {
            "architectures": [self.model],
            "model_type": self.model_type,
            "is_encoder_decoder": True,
            "d_model": config.hidden_size,
            "vocab_size": config.encoder_input.vocab_size or config.vocab_size,
            "max_position_embeddings": config.max_seq_len,
            "scale_embedding": config.embedding.scale != 1.0,
            "tie_word_embeddings": config.tie_embeddings,
            **self._sides(config.encoder, config.decoder),
            **dropout_fields(config, **_DROPOUT),
        }
        if self.two_vocabularies:
            fields |= {
                "decoder_vocab_size": config.vocab_size,
                "share_encoder_decoder_embeddings": not config.encoder_input.vocab_size,
            }
            fields["pad_token_id"] = (
                min(fields["vocab_size"], config.vocab_size) - 1
            )  # their class needs one that there is
        if isinstance(config.embedding.position, SinusoidalPositionsConfig) and config.embedding.position.offset:
            fields["pad_token_id"] = config.embedding.position.offset - 1
        return fields

    def _sides(self, encoder: StackConfig, decoder: StackConfig) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for side, stack in (("encoder", encoder), ("decoder", decoder)):
            layer: LayerConfig = single_layer_type(stack, self.model_type)
            fields |= {
                f"{side}_layers": stack.num_layers,
                f"{side}_attention_heads": layer.attention.num_heads,
                f"{side}_ffn_dim": layer.mlp.intermediate_size,
            }
            if isinstance(layer.mlp, PlainMLPConfig):
                fields["activation_function"] = hf_activation(layer.mlp.activation)
        return fields

    # ---------------------------------------------------------------- tensors

    def rules(self, config: ModelConfig) -> Iterator[TensorRule]:
        assert config.encoder_input is not None
        if config.encoder_input.vocab_size is None:
            yield tensor_rule("embedding.tokens", "model.shared")
        for side, embed in _SIDES.items():
            if config.encoder_input.vocab_size is not None:
                yield tensor_rule(f"{embed}.tokens", f"model.{side}.embed_tokens")
            yield tensor_rule(f"{embed}.positions", f"model.{side}.embed_positions")
            yield tensor_rule(f"{embed}.norm", f"model.{side}.layernorm_embedding")
            stack = config.encoder if side == "encoder" else config.decoder
            assert stack is not None
            for i in range(stack.num_layers):
                yield from prefix_rules(f"{side}.layers.{i}", f"model.{side}.layers.{i}", _LAYER)
            yield tensor_rule(f"{side}.norm", f"model.{side}.layer_norm")
        yield tensor_rule("head.weight", "lm_head.weight")
        yield tensor_rule("head.bias", "final_logits_bias", _ROW, missing_ok=True)

    def family(self) -> Family:
        return Family(
            (self.model_type,),
            self.read,
            self.rules,
            self.write,
            prefix="model.",
            ignored=(
                r"lm_head\.weight",
                r"shared\.weight",
                r"(en|de)coder\.version",
                r"(en|de)coder\.embed_positions\.weights?",
            ),
            extra=self.extra,
            head=("lm_head.weight", "model.shared.weight"),
            copies={
                "model.shared.weight": ("model.decoder.embed_tokens.weight", "model.encoder.embed_tokens.weight"),
                "model.decoder.embed_tokens.weight": ("model.shared.weight",),
                "model.encoder.embed_tokens.weight": ("model.shared.weight",),
            },
        )


def _norm() -> NormConfig:
    return NormConfig("layer", 1e-5, bias=True)
