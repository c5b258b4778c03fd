"""Encoder-decoders with BART's skeleton, from fairseq, ParlAI and Marian.

They have BART's tensor names and config fields; ``BartFamily`` has the differences: positions of norms, kind of
positions, a norm after the embedding, a bias of the head (``final_logits_bias``: [1, V] in the file).

Encoder, decoder and head share one table ``model.shared`` unless the config separates them, as transformers 5 reads
it.  Copies of a shared table in older files must be equal to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvad import config as cfg
from kvad import model as model_lib
from kvad.checkpoint.conversion import Family, HFConfigReader, TensorRule, TensorTransform, prefix_rules, tensor_rule
from kvad.checkpoint.families._common import ACTIVATIONS, dropout_fields, hf_activation, read_dropout, single_layer_type
from kvad.config import EncoderInputConfig, ModelConfig
from kvad.errors import CheckpointError

Positions = cfg.LearnedPositionsConfig | cfg.SinusoidalPositionsConfig

_ROW = TensorTransform(
    lambda tensors, shapes: [tensor.reshape(shape) for tensor, shape in zip(tensors, shapes, strict=True)],
    lambda tensors, shapes: [tensor.unsqueeze(0) for tensor in tensors],
)
_ATTENTION = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "out_proj"}
_LAYER = {
    **{f"attention.{kvad_name}": f"self_attn.{hf_name}" for kvad_name, hf_name in _ATTENTION.items()},
    **{f"cross_attention.{kvad_name}": f"encoder_attn.{hf_name}" for kvad_name, hf_name in _ATTENTION.items()},
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
_SIDES = {"encoder": "encoder_embedding", "decoder": "embedding"}  # side in their file -> kvad's embedding


def learned_positions(offset: int) -> Callable[[HFConfigReader, int], Positions]:
    """Build learned positions with ``offset`` unused rows before the first position."""
    return lambda fields, max_seq_len: cfg.LearnedPositionsConfig(max_seq_len + offset, offset)


def concat_sinusoids(fields: HFConfigReader, max_seq_len: int) -> Positions:
    """Build sinusoids with all sines before all cosines."""
    return cfg.SinusoidalPositionsConfig(form="concat")


def concat_tables(config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the sinusoidal tables [max_seq_len, E] that files of the family have."""
    table = model_lib.positions.sinusoidal_embedding(
        torch.arange(config.max_seq_len), config.hidden_size, cfg.SinusoidalPositionsConfig(form="concat")
    )
    for side in _SIDES:
        yield f"model.{side}.embed_positions.weight", table.clone()


@dataclass(frozen=True)
class BartFamily:
    """Differences of one family; sizes and flags are defaults of its config class."""

    model_type: str
    model: str  # class name in transformers
    positions: Callable[[HFConfigReader, int], Positions]  # from config and max_seq_len
    pre_norm: bool = False  # norms before each half of a layer and at the end
    embed_norm: bool = False  # a norm after the embedding
    norm_before_positions: bool = False  # the decoder's embedding is normalized before positions are added
    head_bias: bool = True
    max_seq_len: int = 1024
    activation: str = "gelu"
    scale_embedding: bool = False
    two_vocabularies: bool = False  # the config may have Marian's fields for two vocabularies
    extra: Callable[[ModelConfig], Iterable[tuple[str, Tensor]]] | None = None  # see ``Family.extra``

    # ---------------------------------------------------------------- configs

    def read(self, fields: HFConfigReader) -> ModelConfig:
        self._check_supported(fields)
        hidden_size, max_seq_len = (
            fields.integer("d_model"),
            fields.integer("max_position_embeddings", default=self.max_seq_len),
        )
        vocab_size, target_vocab, separate = self._vocabularies(fields)
        embedding = cfg.EmbeddingConfig(
            self.positions(fields, max_seq_len),
            scale=math.sqrt(hidden_size) if fields.flag("scale_embedding", self.scale_embedding) else 1.0,
            norm=_norm() if self.embed_norm else None,
        )
        return ModelConfig(
            hidden_size=hidden_size,
            vocab_size=target_vocab,
            max_seq_len=max_seq_len,
            encoder=self._stack(fields, "encoder"),
            decoder=self._stack(fields, "decoder"),
            embedding=replace(embedding, norm_first=self.norm_before_positions),
            encoder_input=EncoderInputConfig(max_seq_len, embedding, vocab_size if separate else None),
            head=cfg.LanguageHeadConfig(bias=self.head_bias),
            tie_embeddings=fields.flag("tie_word_embeddings", True),
            dropout=read_dropout(fields, **_DROPOUT),
        )

    def _check_supported(self, fields: HFConfigReader) -> None:
        name, stem = fields.architecture, self.model.removesuffix("ForConditionalGeneration").removesuffix("MTModel")
        if name not in ("", f"{stem}Model") and not name.endswith(("ForConditionalGeneration", "MTModel")):
            hint = f"The family's class is {self.model}."
            raise CheckpointError(f"{fields.where}: architectures {name!r} is not supported", hint)
        fields.require_one_of("is_encoder_decoder", True, reason="Half of an encoder-decoder is another model.")
        fields.require_one_of("is_decoder", False, reason="Half of an encoder-decoder is another model.")
        fields.require_one_of("tie_encoder_decoder", False, reason="Encoder and decoder have separate weights in kvad.")

    def _vocabularies(self, fields: HFConfigReader) -> tuple[int, int, bool]:
        """Return both vocabulary sizes (encoder, decoder), and whether their tables are separate."""
        vocab_size = fields.integer("vocab_size")
        if not self.two_vocabularies:
            return vocab_size, vocab_size, not fields.flag("tie_word_embeddings", True)
        separate = not fields.flag("share_encoder_decoder_embeddings", True)
        if not separate:
            fields.require_one_of("decoder_vocab_size", vocab_size, reason="A shared table has one size.")
            fields.require_one_of(
                "tie_word_embeddings", True, reason="transformers 4.57 and 5 disagree on what is shared."
            )
        return vocab_size, fields.integer("decoder_vocab_size", default=vocab_size), separate

    def _stack(self, fields: HFConfigReader, side: str) -> cfg.StackConfig:
        heads = fields.integer(f"{side}_attention_heads")
        activation = fields.choice("activation_function", ACTIVATIONS, self.activation)
        cross = cfg.AttentionConfig(heads, position=None, causal=False, qkv_bias=True, out_bias=True)
        layer = cfg.LayerConfig(
            cfg.AttentionConfig(heads, position=None, causal=side == "decoder", qkv_bias=True, out_bias=True),
            cfg.PlainMLPConfig(fields.integer(f"{side}_ffn_dim"), activation, bias=True),
            _norm(),
            cross_attention=cross if side == "decoder" else None,
        )
        layers = fields.integer(f"{side}_layers")
        return cfg.StackConfig(
            layers, {"L": layer}, norm_position="pre" if self.pre_norm else "post", final_norm=self.pre_norm
        )

    def write(self, config: ModelConfig) -> dict[str, Any]:
        if config.encoder is None or config.decoder is None or config.encoder_input is None:
            raise CheckpointError(f"{self.model_type} cannot express this model: it must be an encoder-decoder")
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
            )  # the class requires an id inside both vocabularies
        if isinstance(config.embedding.position, cfg.SinusoidalPositionsConfig) and config.embedding.position.offset:
            fields["pad_token_id"] = config.embedding.position.offset - 1
        return fields

    def _sides(self, encoder: cfg.StackConfig, decoder: cfg.StackConfig) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for side, stack in (("encoder", encoder), ("decoder", decoder)):
            layer: cfg.LayerConfig = single_layer_type(stack, self.model_type)
            fields |= {
                f"{side}_layers": stack.num_layers,
                f"{side}_attention_heads": layer.attention.num_heads,
                f"{side}_ffn_dim": layer.mlp.intermediate_size,
            }
            if isinstance(layer.mlp, cfg.PlainMLPConfig):
                fields["activation_function"] = hf_activation(layer.mlp.activation)
        return fields

    # ---------------------------------------------------------------- tensors

    def rules(self, config: ModelConfig) -> Iterator[TensorRule]:
        assert config.encoder_input is not None
        if config.encoder_input.vocab_size is None:
            yield tensor_rule("embedding.tokens", "model.shared")
        for side, embedding in _SIDES.items():
            if config.encoder_input.vocab_size is not None:
                yield tensor_rule(f"{embedding}.tokens", f"model.{side}.embed_tokens")
            yield tensor_rule(f"{embedding}.positions", f"model.{side}.embed_positions")
            yield tensor_rule(f"{embedding}.norm", f"model.{side}.layernorm_embedding")
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


def _norm() -> cfg.NormConfig:
    return cfg.NormConfig("layer", 1e-5, bias=True)


# ---------------------------------------------------------------- families

# Lewis et al. 2020.  The original Transformer with learned positions, which two unused rows precede, and erf-gelu.
# LayerNorm follows each half of a layer and the embedding, none is at the end.  The target starts with ``</s>``.
_BART = BartFamily("bart", "BartForConditionalGeneration", learned_positions(2), embed_norm=True)

# Liu et al. 2020.  BART with LayerNorm before each half of a layer and at the end of each stack.  Its checkpoints scale
# embeddings by sqrt(hidden_size).  The target starts with the token of its language.
_MBART = BartFamily("mbart", "MBartForConditionalGeneration", learned_positions(2), pre_norm=True, embed_norm=True)

# Roller et al. 2020, 2.7B and larger.  Norms before each half, learned positions from row 0.
_BLENDERBOT = BartFamily(
    "blenderbot", "BlenderbotForConditionalGeneration", learned_positions(0), pre_norm=True, max_seq_len=128
)

# Roller et al. 2020, 90M.  Learned positions from row 0; only the decoder normalizes the embedding before positions are
# added.
_BLENDERBOT_SMALL = BartFamily(
    "blenderbot-small",
    "BlenderbotSmallForConditionalGeneration",
    learned_positions(0),
    embed_norm=True,
    norm_before_positions=True,
    max_seq_len=512,
)

# Zhang et al. 2020, for summaries.  Norms before each half, Marian's sinusoids, scaled embeddings.  The sinusoidal
# table is in the files, but is not a weight.
_PEGASUS = BartFamily(
    "pegasus", "PegasusForConditionalGeneration", concat_sinusoids, pre_norm=True, extra=concat_tables
)

# Junczys-Dowmunt et al. 2018; the 1,000 pairs of OPUS-MT, Tiedemann & Thottingal 2020.  The original Transformer: norms
# after each half, sinusoidal positions with all sines before all cosines.  Older files have their tables, which are not
# weights.  With ``share_encoder_decoder_embeddings`` false there are two vocabularies with separate tables.
# ``final_logits_bias`` is trained.  The target starts with padding, which must not be generated.
_MARIAN = BartFamily("marian", "MarianMTModel", concat_sinusoids, two_vocabularies=True, extra=concat_tables)

# Fan et al. 2020, and NLLB, Costa-jussa et al. 2022: translation between 100 and 200 languages.  Norms before each
# half, ReLU, sinusoidal positions with tensor2tensor's frequencies, counted from the padding id + 1 (2); the table is
# in no file.  Scaled embeddings, no bias in the head.
_M2M_100 = BartFamily(
    "m2m_100",
    "M2M100ForConditionalGeneration",
    lambda fields, max_seq_len: cfg.SinusoidalPositionsConfig(
        form="fairseq", offset=fields.integer("pad_token_id", default=1) + 1
    ),
    pre_norm=True,
    head_bias=False,
    activation="relu",
    scale_embedding=True,
)

FAMILIES = tuple(row.family() for row in (_BART, _MBART, _BLENDERBOT, _BLENDERBOT_SMALL, _PEGASUS, _MARIAN, _M2M_100))
