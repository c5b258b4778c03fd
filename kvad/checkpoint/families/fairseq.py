"""Models with fairseq's names: encoder-decoders like BART; the decoders OPT, XGLM and BioGPT.

Encoder-decoders of fairseq, ParlAI and Marian have BART's tensor names and config fields; ``BartFamily`` has the
differences: positions of norms, kind of positions, a norm after the embedding, a bias of the head
(``final_logits_bias``: [1, V] in the file).

Encoder, decoder and head share one table ``model.shared`` unless the config separates them, as transformers 5 reads
it.  Copies of a shared table in older files must be equal to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvad import config as cfg
from kvad import model as model_lib
from kvad.checkpoint.conversion import Family, HFConfigReader, TensorRule, TensorTransform, prefix_rules, tensor_rule
from kvad.checkpoint.families import _fields as hf
from kvad.checkpoint.families._hf_class import HFClass, build_layer, check_decoder, decoder_family
from kvad.config import EncoderInputConfig, ModelConfig
from kvad.errors import CheckpointError

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
_SIDES = {"encoder": "encoder_embedding", "decoder": "embedding"}  # side in the file -> kvad's embedding
_CONCAT = cfg.SinusoidalPositionsConfig(form="concat")  # all sines before all cosines


def _concat_tables(config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the sinusoidal tables [max_seq_len, E] that files have."""
    positions = torch.arange(config.max_seq_len)
    table = model_lib.positions.sinusoidal_embedding(positions, config.hidden_size, _CONCAT)
    for side in _SIDES:
        yield f"model.{side}.embed_positions.weight", table.clone()


@dataclass(frozen=True)
class BartFamily:
    """Differences of one family; sizes and flags are defaults of its config class."""

    model_type: str
    model: str  # class name in transformers
    position: Any  # entry of the table, or the number of unused rows before the first of learned positions
    pre_norm: bool = False  # norms before each half of a layer and at the end
    embed_norm: bool = False  # a norm after the embedding
    norm_before_positions: bool = False  # the decoder's embedding is normalized before positions are added
    head_bias: bool = True
    max_seq_len: int = 1024
    activation: str = "gelu"
    scale_embedding: bool = False
    two_vocabularies: bool = False  # the config may have Marian's fields for two vocabularies

    # ---------------------------------------------------------------- configs

    def _fields(self) -> hf.FieldTable:
        """Return the fields of the model; those of its stacks are ``_side_fields``."""
        position = self.position
        if isinstance(position, int):
            position = hf.learned_positions("max_position_embeddings", self.max_seq_len, offset=position)
        return {
            "hidden_size": hf.integer("d_model"),
            "max_seq_len": hf.integer("max_position_embeddings", default=self.max_seq_len),
            "tie_embeddings": hf.flag("tie_word_embeddings", True),
            "embedding.position": position,
            "embedding.scale": hf.embedding_scale("d_model", self.scale_embedding),
            "embedding.norm": cfg.NormConfig("layer", 1e-5, bias=True) if self.embed_norm else None,
            "head.bias": self.head_bias,
            **hf.dropouts(
                embedding="dropout", residual="dropout", attention="attention_dropout", hidden="activation_dropout"
            ),
        }

    def _side_fields(self, side: str) -> hf.FieldTable:
        return {
            "stack.num_layers": hf.integer(f"{side}_layers"),
            "stack.norm_position": "pre" if self.pre_norm else "post",
            "stack.final_norm": self.pre_norm,
            "attention.num_heads": hf.integer(f"{side}_attention_heads"),
            "attention.position": None,
            "attention.causal": side == "decoder",
            **hf.ALL_BIASES,
            "mlp.intermediate_size": hf.integer(f"{side}_ffn_dim"),
            "mlp.activation": hf.activation("activation_function", self.activation),
            "norm.kind": "layer",
            "norm.bias": True,
        }

    def read(self, fields: HFConfigReader) -> ModelConfig:
        self._check_supported(fields)
        values = hf.read_table(self._fields(), fields)
        max_seq_len = values[""]["max_seq_len"]
        vocab_size, target_vocab, separate = self._vocabularies(fields)
        embedding = cfg.EmbeddingConfig(**values["embedding"])
        return ModelConfig(
            **values[""],
            vocab_size=target_vocab,
            encoder=self._stack(fields, "encoder"),
            decoder=self._stack(fields, "decoder"),
            embedding=replace(embedding, norm_first=self.norm_before_positions),
            encoder_input=EncoderInputConfig(max_seq_len, embedding, vocab_size if separate else None),
            head=cfg.LanguageHeadConfig(**values["head"]),
            dropout=cfg.DropoutConfig(**values["dropout"]),
        )

    def _check_supported(self, fields: HFConfigReader) -> None:
        name, stem = fields.architecture, self.model.removesuffix("ForConditionalGeneration").removesuffix("MTModel")
        if name not in ("", f"{stem}Model") and not name.endswith(("ForConditionalGeneration", "MTModel")):
            raise fields.error(f"architectures {name!r} is not supported", f"The family's class is {self.model}.")
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
            reason = "transformers 4.57 and 5 disagree on what is shared."
            fields.require_one_of("tie_word_embeddings", True, reason=reason)
        return vocab_size, fields.integer("decoder_vocab_size", default=vocab_size), separate

    def _stack(self, fields: HFConfigReader, side: str) -> cfg.StackConfig:
        values = hf.read_table(self._side_fields(side), fields)
        layer = build_layer(values, cfg.PlainMLPConfig, has_cross_attention=side == "decoder")
        return cfg.StackConfig(layer_types={"L": layer}, **values["stack"])

    def write(self, config: ModelConfig) -> dict[str, Any]:
        if config.encoder is None or config.decoder is None or config.encoder_input is None:
            raise CheckpointError(f"{self.model_type} cannot express this model: it must be an encoder-decoder")
        fields: dict[str, Any] = {
            "architectures": [self.model],
            "model_type": self.model_type,
            "is_encoder_decoder": True,
            "vocab_size": config.encoder_input.vocab_size or config.vocab_size,
            **hf.write_table(self._fields(), config),
        }
        for side, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
            hf.require_single_layer_type(stack, self.model_type)
            fields |= hf.write_table(self._side_fields(side), config, stack)
        if self.two_vocabularies:
            fields["decoder_vocab_size"] = config.vocab_size
            fields["share_encoder_decoder_embeddings"] = not config.encoder_input.vocab_size
            # The class requires an id inside both vocabularies.
            fields["pad_token_id"] = min(fields["vocab_size"], config.vocab_size) - 1
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
            ignored=(r"(lm_head|shared)\.weight", r"(en|de)coder\.(version|embed_positions\.weights?)"),
            extra=_concat_tables if self.position == _CONCAT else None,
            head=("lm_head.weight", "model.shared.weight"),
            copies={
                "model.shared.weight": ("model.decoder.embed_tokens.weight", "model.encoder.embed_tokens.weight"),
                "model.decoder.embed_tokens.weight": ("model.shared.weight",),
                "model.encoder.embed_tokens.weight": ("model.shared.weight",),
            },
        )


# ---------------------------------------------------------------- families

# Lewis et al. 2020.  The original Transformer with learned positions, which two unused rows precede, and erf-gelu.
# LayerNorm follows each half of a layer and the embedding, none is at the end.  The target starts with ``</s>``.
_BART = BartFamily("bart", "BartForConditionalGeneration", 2, embed_norm=True)

# Liu et al. 2020.  BART with LayerNorm before each half of a layer and at the end of each stack.  Its checkpoints scale
# embeddings by sqrt(hidden_size).  The target starts with the token of its language.
_MBART = BartFamily("mbart", "MBartForConditionalGeneration", 2, pre_norm=True, embed_norm=True)

# Roller et al. 2020, 2.7B and larger.  Norms before each half, learned positions from row 0.
_BLENDERBOT = BartFamily("blenderbot", "BlenderbotForConditionalGeneration", 0, pre_norm=True, max_seq_len=128)

# Roller et al. 2020, 90M.  Learned positions from row 0; only the decoder normalizes the embedding before positions are
# added.
_BLENDERBOT_SMALL = BartFamily(
    "blenderbot-small",
    "BlenderbotSmallForConditionalGeneration",
    0,
    embed_norm=True,
    norm_before_positions=True,
    max_seq_len=512,
)

# Zhang et al. 2020, for summaries.  Norms before each half, Marian's sinusoids, scaled embeddings.  The sinusoidal
# table is in the files, but is not a weight.
_PEGASUS = BartFamily("pegasus", "PegasusForConditionalGeneration", _CONCAT, pre_norm=True)

# Junczys-Dowmunt et al. 2018; the 1,000 pairs of OPUS-MT, Tiedemann & Thottingal 2020.  The original Transformer: norms
# after each half, sinusoidal positions with all sines before all cosines.  Older files have their tables, which are not
# weights.  With ``share_encoder_decoder_embeddings`` false there are two vocabularies with separate tables.
# ``final_logits_bias`` is trained.  The target starts with padding, which must not be generated.
_MARIAN = BartFamily("marian", "MarianMTModel", _CONCAT, two_vocabularies=True)

# Fan et al. 2020, and NLLB, Costa-jussa et al. 2022: translation between 100 and 200 languages.  Norms before each
# half, ReLU, sinusoidal positions with tensor2tensor's frequencies, counted from the padding id + 1 (2); the table is
# in no file.  Scaled embeddings, no bias in the head.
_M2M_100 = BartFamily(
    "m2m_100",
    "M2M100ForConditionalGeneration",
    hf.HFField(
        lambda fields: cfg.SinusoidalPositionsConfig(
            form="fairseq", offset=fields.integer("pad_token_id", default=1) + 1
        ),
        lambda position, config: {"pad_token_id": position.offset - 1},
    ),
    pre_norm=True,
    head_bias=False,
    activation="relu",
    scale_embedding=True,
)

# ---------------------------------------------------------------- decoders


_DECODER: hf.FieldTable = {
    "tie_embeddings": hf.flag("tie_word_embeddings", True),
    "attention.position": None,
    **hf.ALL_BIASES,
    "norm.kind": "layer",
    "norm.eps": 1e-5,
    "norm.bias": True,
}

# ---------------------------------------------------------------- XGLM, BioGPT

# Lin et al. 2021.  Sinusoids from position 2 on, LayerNorm before each half.  Embeddings are multiplied by
# sqrt(hidden_size), and the norms have a fixed epsilon.  The sinusoids are not weights, but old files may have them.
_XGLM = HFClass(
    "xglm",
    "XGLMForCausalLM",
    {
        **_DECODER,
        **hf.sizes("d_model", "num_layers", "attention_heads", "ffn_dim"),
        "max_seq_len": hf.integer("max_position_embeddings", default=2048),
        "mlp.activation": hf.activation("activation_function", "gelu"),
        "embedding.position": cfg.SinusoidalPositionsConfig(form="fairseq", offset=2),
        "embedding.scale": hf.embedding_scale("d_model"),
    },
    layer=_LAYER,
    tensors={
        "embedding.tokens": "model.embed_tokens",
        "stack.layers": "model.layers",
        "stack.norm": "model.layer_norm",
        "head": "lm_head",
    },
    mlp=cfg.PlainMLPConfig,
    check=check_decoder,
    constants={},
    ignored=(r"embed_positions\.weights",),
)

# Luo et al. 2022.  Learned positions, which two unused rows precede; embeddings are multiplied by sqrt(hidden_size).
# transformers' class normalizes with epsilon 1e-5 whatever ``layer_norm_eps`` is; kvad does the same.
_BIOGPT = _XGLM.variant(
    "biogpt",
    "BioGptForCausalLM",
    fields={
        **_DECODER,
        **hf.sizes(),
        "max_seq_len": hf.integer("max_position_embeddings", default=1024),
        "mlp.activation": hf.activation("hidden_act", "gelu"),
        "norm.eps": hf.HFField(lambda fields: 1e-5, lambda eps, config: {"layer_norm_eps": eps}),
        "embedding.position": hf.learned_positions("max_position_embeddings", 1024, offset=2),
        "embedding.scale": hf.embedding_scale("hidden_size"),
    },
    tensors={
        "embedding.tokens": "biogpt.embed_tokens",
        "embedding.positions": "biogpt.embed_positions",
        "stack.layers": "biogpt.layers",
        "stack.norm": "biogpt.layer_norm",
        "head": "output_projection",
    },
    prefix="biogpt.",
    ignored=(),
)


# ---------------------------------------------------------------- OPT


_TABLE_SIZE = hf.table_size("word_embed_proj_dim")


def _read_projection(fields: HFConfigReader) -> cfg.HeadTransformConfig | None:
    size = _TABLE_SIZE.read(fields)
    return None if size is None else cfg.HeadTransformConfig(activation=None, bias=False, output_size=size)


_AFFINE = hf.flag("layer_norm_elementwise_affine", True)
# Zhang et al. 2022.  Learned positions after two unused rows, ReLU, LayerNorm with a fixed epsilon.  Only OPT-350M
# normalizes after each half (``do_layer_norm_before`` false), has no final norm, and has a smaller embedding, with a
# projection to and from it.  ``_remove_final_layer_norm`` marks files written before a bug was fixed.
_OPT = _XGLM.variant(
    "opt",
    "OPTForCausalLM",
    fields={
        **_DECODER,
        **hf.sizes(intermediate_size="ffn_dim"),
        "max_seq_len": hf.integer("max_position_embeddings", default=2048),
        "stack.norm_position": hf.flag("do_layer_norm_before", True, values=("post", "pre")),
        "stack.final_norm": hf.HFField(
            lambda fields: fields.flag("do_layer_norm_before", True) and not fields.flag("_remove_final_layer_norm"),
            lambda final_norm, config: {
                "_remove_final_layer_norm": config.stack.norm_position == "pre" and not final_norm
            },
        ),
        **hf.biases("enable_bias", True),
        "mlp.activation": hf.activation("activation_function", "relu"),
        "mlp.bias": hf.flag("enable_bias", True),
        "norm.bias": _AFFINE,
        "norm.weight": _AFFINE,
        "embedding.position": hf.learned_positions("max_position_embeddings", 2048, offset=2),
        "embedding.embedding_size": _TABLE_SIZE,
        "embedding.projection": hf.HFField(lambda fields: "end" if _TABLE_SIZE.read(fields) is None else "start"),
        "head.transform": hf.HFField(_read_projection),
    },
    tensors={
        "embedding.tokens": "model.decoder.embed_tokens",
        "embedding.positions": "model.decoder.embed_positions",
        "embedding.projection": "model.decoder.project_in",
        "stack.layers": "model.decoder.layers",
        "stack.norm": "model.decoder.final_layer_norm",
        "head.transform.dense": "model.decoder.project_out",
        "head": "lm_head",
    },
    check=None,
    ignored=(),
)

FAMILIES = (
    *(row.family() for row in (_BART, _MBART, _BLENDERBOT, _BLENDERBOT_SMALL, _PEGASUS, _MARIAN, _M2M_100)),
    *map(decoder_family, (_XGLM, _BIOGPT, _OPT)),
)
