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

from kvad.checkpoint.families.common import ACTIVATIONS, dropout_fields, dropout_of, one_kind, their_activation
from kvad.checkpoint.hf import Family, Fields, Rule, Way, rule, rules_under
from kvad.config import (
    Attention,
    Embedding,
    Head,
    Layer,
    LearnedPositions,
    ModelConfig,
    Norm,
    Plain,
    SinusoidalPositions,
    Source,
    Stack,
)
from kvad.errors import CheckpointError
from kvad.model.positions import sinusoid

__all__ = ["Skeleton", "concat_tables", "learned"]

Positions = LearnedPositions | SinusoidalPositions

_ROW = Way(
    lambda tensors, shapes: [tensor.reshape(shape) for tensor, shape in zip(tensors, shapes, strict=True)],
    lambda tensors, shapes: [tensor.unsqueeze(0) for tensor in tensors],
)
_ATTENTION = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "out_proj"}
_LAYER = {
    **{f"mixer.{ours}": f"self_attn.{theirs}" for ours, theirs in _ATTENTION.items()},
    **{f"cross.{ours}": f"encoder_attn.{theirs}" for ours, theirs in _ATTENTION.items()},
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


def learned(offset: int) -> Callable[[Fields, int], Positions]:
    """A table with ``offset`` unused rows before the first position."""
    return lambda fields, limit: LearnedPositions(limit + offset, offset)


def concat_tables(config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """The sinusoidal tables [limit, E] that stand in their files."""
    table = sinusoid(torch.arange(config.limit), config.width, SinusoidalPositions(form="concat"))
    for side in _SIDES:
        yield f"model.{side}.embed_positions.weight", table.clone()


@dataclass(frozen=True)
class Skeleton:
    """What tells one family from another.

    ``model``: their class; ``positions``: of a config and its limit.  ``pre``: norms before each half, and at the end.
    ``early_norm``: the decoder's embedding is normalised before positions are added.  ``limit``, ``activation``,
    ``scaled``: defaults of the config class.  ``extra``: see :class:`Family`.  ``two_vocabularies``: fields of Marian.
    """

    model_type: str
    model: str
    positions: Callable[[Fields, int], Positions]
    pre: bool = False
    embed_norm: bool = False
    early_norm: bool = False
    head_bias: bool = True
    limit: int = 1024
    activation: str = "gelu"
    scaled: bool = False
    two_vocabularies: bool = False
    extra: Callable[[ModelConfig], Iterable[tuple[str, Tensor]]] | None = None

    # ---------------------------------------------------------------- configs

    def read(self, fields: Fields) -> ModelConfig:
        self._refuse(fields)
        width, limit = fields.integer("d_model"), fields.integer("max_position_embeddings", default=self.limit)
        vocab, target_vocab, apart = self._vocabularies(fields)
        embed = Embedding(
            self.positions(fields, limit),
            scale=math.sqrt(width) if fields.flag("scale_embedding", self.scaled) else 1.0,
            norm=_norm() if self.embed_norm else None,
        )
        return ModelConfig(
            width=width,
            vocab=target_vocab,
            limit=limit,
            encoder=self._stack(fields, "encoder"),
            decoder=self._stack(fields, "decoder"),
            embed=replace(embed, norm_first=self.early_norm),
            source=Source(limit, embed, vocab if apart else None),
            head=Head(bias=self.head_bias),
            tie=fields.flag("tie_word_embeddings", True),
            dropout=dropout_of(fields, **_DROPOUT),
        )

    def _refuse(self, fields: Fields) -> None:
        name, stem = fields.architecture, self.model.removesuffix("ForConditionalGeneration").removesuffix("MTModel")
        if name not in ("", f"{stem}Model") and not name.endswith(("ForConditionalGeneration", "MTModel")):
            hint = f"of this family: {self.model}"
            raise CheckpointError(f"{fields.where}: architectures {name!r} is not supported", hint)
        fields.refuse("is_encoder_decoder", True, why="half of an encoder-decoder is another model")
        fields.refuse("is_decoder", False, why="half of an encoder-decoder is another model")
        fields.refuse("tie_encoder_decoder", False, why="encoder and decoder have weights of their own here")

    def _vocabularies(self, fields: Fields) -> tuple[int, int, bool]:
        """(of the source, of the target, whether each has a table of its own)."""
        vocab = fields.integer("vocab_size")
        if not self.two_vocabularies:
            return vocab, vocab, not fields.flag("tie_word_embeddings", True)
        apart = not fields.flag("share_encoder_decoder_embeddings", True)
        if not apart:
            fields.refuse("decoder_vocab_size", vocab, why="a shared table has one size")
            fields.refuse("tie_word_embeddings", True, why="transformers 4.57 and 5 disagree on what is then shared")
        return vocab, fields.integer("decoder_vocab_size", default=vocab), apart

    def _stack(self, fields: Fields, side: str) -> Stack:
        heads = fields.integer(f"{side}_attention_heads")
        activation = fields.choice("activation_function", ACTIVATIONS, self.activation)
        cross = Attention(heads, position=None, causal=False, bias=True, out_bias=True)
        layer = Layer(
            Attention(heads, position=None, causal=side == "decoder", bias=True, out_bias=True),
            Plain(fields.integer(f"{side}_ffn_dim"), activation, bias=True),
            _norm(),
            cross=cross if side == "decoder" else None,
        )
        layers = fields.integer(f"{side}_layers")
        return Stack(layers, {"L": layer}, norm_place="pre" if self.pre else "post", final_norm=self.pre)

    def write(self, config: ModelConfig) -> dict[str, Any]:
        if config.encoder is None or config.decoder is None or config.source is None:
            raise CheckpointError(f"{self.model_type} cannot express this model: it is an encoder-decoder")
        fields: dict[str, Any] = {
            "architectures": [self.model],
            "model_type": self.model_type,
            "is_encoder_decoder": True,
            "d_model": config.width,
            "vocab_size": config.source.vocab or config.vocab,
            "max_position_embeddings": config.limit,
            "scale_embedding": config.embed.scale != 1.0,
            "tie_word_embeddings": config.tie,
            **self._sides(config.encoder, config.decoder),
            **dropout_fields(config, **_DROPOUT),
        }
        if self.two_vocabularies:
            fields |= {"decoder_vocab_size": config.vocab, "share_encoder_decoder_embeddings": not config.source.vocab}
            fields["pad_token_id"] = min(fields["vocab_size"], config.vocab) - 1  # their class needs one that there is
        if isinstance(config.embed.position, SinusoidalPositions) and config.embed.position.offset:
            fields["pad_token_id"] = config.embed.position.offset - 1
        return fields

    def _sides(self, encoder: Stack, decoder: Stack) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for side, stack in (("encoder", encoder), ("decoder", decoder)):
            layer: Layer = one_kind(stack, self.model_type)
            fields |= {
                f"{side}_layers": stack.layers,
                f"{side}_attention_heads": layer.mixer.heads,
                f"{side}_ffn_dim": layer.mlp.hidden,
            }
            if isinstance(layer.mlp, Plain):
                fields["activation_function"] = their_activation(layer.mlp.activation)
        return fields

    # ---------------------------------------------------------------- tensors

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        assert config.source is not None
        if config.source.vocab is None:
            yield rule("embed.tokens", "model.shared")
        for side, embed in _SIDES.items():
            if config.source.vocab is not None:
                yield rule(f"{embed}.tokens", f"model.{side}.embed_tokens")
            yield rule(f"{embed}.positions", f"model.{side}.embed_positions")
            yield rule(f"{embed}.norm", f"model.{side}.layernorm_embedding")
            stack = config.encoder if side == "encoder" else config.decoder
            assert stack is not None
            for i in range(stack.layers):
                yield from rules_under(f"{side}.layers.{i}", f"model.{side}.layers.{i}", _LAYER)
            yield rule(f"{side}.norm", f"model.{side}.layer_norm")
        yield rule("head.weight", "lm_head.weight")
        yield rule("head.bias", "final_logits_bias", _ROW, missing_ok=True)

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


def _norm() -> Norm:
    return Norm("layer", 1e-5, bias=True)
