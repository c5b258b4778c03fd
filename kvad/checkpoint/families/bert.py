"""BERT (Devlin et al. 2018) and encoders with its names: RoBERTa, MPNet, ELECTRA.

BERT has learned positions, token types, LayerNorm after each half of a layer.  The embedding ends in a norm.  The
masked language model's head has a transform before the tied table and a separate bias.  A base model's output is its
pooler's: a matrix and tanh on the first token; without a pooler in the file, the mean.  Old files name norms gamma
and beta, and have a next-sentence head that only ``BertForPreTraining`` reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from kvad import config as cfg
from kvad.checkpoint.conversion import Family, HFConfigReader, TensorRule, TensorTransform, prefix_rules, tensor_rule
from kvad.checkpoint.families import _encoder
from kvad.checkpoint.families._common import ACTIVATIONS, dropout_fields, hf_activation, read_dropout, single_layer_type
from kvad.checkpoint.families._encoder import with_changes
from kvad.config import ModelConfig, embedding_size
from kvad.errors import CheckpointError

_DROPOUT = {  # dropout of a task head is not supported
    "embedding": "hidden_dropout_prob",
    "residual": "hidden_dropout_prob",
    "attention": "attention_probs_dropout_prob",
}
_LAYER = {
    "attention.q": "attention.self.query",
    "attention.k": "attention.self.key",
    "attention.v": "attention.self.value",
    "attention.out": "attention.output.dense",
    "norm1": "attention.output.LayerNorm",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
    "norm2": "output.LayerNorm",
}
_EMBEDDING = {
    "embedding.tokens": "embeddings.word_embeddings",
    "embedding.positions": "embeddings.position_embeddings",
    "embedding.token_types": "embeddings.token_type_embeddings",
    "embedding.norm": "embeddings.LayerNorm",
    "embedding.projection": "embeddings_project",
}
_BOTH = TensorTransform(lambda tensors, shapes: tensors[:1], lambda tensors, shapes: [tensors[0], tensors[0].clone()])


class HeadNames(NamedTuple):
    """Names of the heads' tensors."""

    dense: str  # transform of the language head
    norm: str
    decoder: str  # matrix of the language head
    bias: str | None  # None: it is named after the matrix
    sequence_layer: bool = True  # a sequence classifier has a separate transform; else it uses the pooler


BERT_HEADS = HeadNames(
    "cls.predictions.transform.dense",
    "cls.predictions.transform.LayerNorm",
    "cls.predictions.decoder",
    "cls.predictions.bias",
    sequence_layer=False,
)
_ROBERTA_HEADS = HeadNames("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias")

Rules = Callable[[ModelConfig, str], Iterator[TensorRule]]  # of a model whose base has a prefix


# ---------------------------------------------------------------- configs


def read_base(fields: HFConfigReader, **changes: Any) -> ModelConfig:
    """Read BERT without the head of a task; ``changes`` replace fields that a family decides."""
    fields = with_changes(fields, **changes)
    _encoder.encoder_only(fields)
    max_seq_len = fields.integer("max_position_embeddings", default=512)
    norm = cfg.NormConfig("layer", fields.number("layer_norm_eps", default=1e-12), bias=True)
    heads = fields.integer("num_attention_heads")
    attention = cfg.AttentionConfig(heads, position=None, causal=False, qkv_bias=True, out_bias=True)
    activation = fields.choice("hidden_act", ACTIVATIONS, "gelu")
    mlp = cfg.PlainMLPConfig(fields.integer("intermediate_size"), activation, bias=True)
    layer, layers = cfg.LayerConfig(attention, mlp, norm), fields.integer("num_hidden_layers")
    token_types = fields.integer("type_vocab_size", default=2)
    return ModelConfig(
        hidden_size=fields.integer("hidden_size"),
        vocab_size=fields.integer("vocab_size"),
        max_seq_len=max_seq_len,
        encoder=cfg.StackConfig(layers, {"L": layer}, norm_position="post", final_norm=False),
        embedding=cfg.EmbeddingConfig(cfg.LearnedPositionsConfig(max_seq_len), norm=norm, num_token_types=token_types),
        head=_encoder.read_pooler(fields),
        tie_embeddings=fields.flag("tie_word_embeddings", True),
        dropout=read_dropout(fields, **_DROPOUT),
    )


def language_head(
    config: ModelConfig, activation: str | None = None, size: int | None = None
) -> cfg.LanguageHeadConfig:
    """Build the masked language model's head for an embedding of ``size`` (default: the model's)."""
    used: Any = config.stack.layer_types["L"].mlp.activation if activation is None else activation
    transform = cfg.HeadTransformConfig(used, norm=config.embedding.norm, output_size=size)
    return cfg.LanguageHeadConfig(bias=True, transform=transform)


def read_bert(fields: HFConfigReader) -> ModelConfig:
    config = read_base(fields)
    heads = {**_encoder.task_heads(fields, language_head(config), "tanh"), "Model": config.head}
    return replace(config, head=_encoder.read_task_head(fields, heads))


def write_base(config: ModelConfig, model_type: str, stem: str) -> dict[str, Any]:
    """Return the fields that all these families have."""
    layer = single_layer_type(config, model_type)
    has_pooler = not isinstance(config.head, cfg.PoolingHeadConfig) or config.head.transform
    return {
        **_encoder.task_fields(config, stem),
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.stack.num_layers,
        "num_attention_heads": layer.attention.num_heads,
        "intermediate_size": layer.mlp.intermediate_size,
        "hidden_act": hf_activation(layer.mlp.activation),
        "max_position_embeddings": config.max_seq_len,
        "type_vocab_size": config.embedding.num_token_types,
        "layer_norm_eps": layer.norm.eps,
        "is_decoder": False,
        "add_cross_attention": False,
        "position_embedding_type": "absolute",
        "tie_word_embeddings": config.tie_embeddings,
        **dropout_fields(config, **_DROPOUT),
        **({} if has_pooler else {"add_pooling_layer": False}),
    }


# ---------------------------------------------------------------- tensors


def base_rules(config: ModelConfig, base: str, layer: Mapping[str, str] = _LAYER) -> Iterator[TensorRule]:
    """Yield embeddings and layers by BERT's names, below ``base``."""
    for kvad_name, hf_name in _EMBEDDING.items():
        yield tensor_rule(kvad_name, base + hf_name)
    side = "encoder" if config.decoder is None else "decoder"
    for i in range(config.stack.num_layers):
        yield from prefix_rules(f"{side}.layers.{i}", f"{base}encoder.layer.{i}", layer)


def head_rules(config: ModelConfig, base: str, names: HeadNames) -> Iterator[TensorRule]:
    """Yield the rules of the head.

    A language head's bias may be stored apart from its matrix.  For an untied head transformers 5 then reads
    ``decoder.bias``, 4.57 either name.
    """
    head = config.head
    if isinstance(head, cfg.LanguageHeadConfig):
        yield tensor_rule("head.transform.dense", names.dense)
        yield tensor_rule("head.transform.norm", names.norm)
        yield tensor_rule("head.weight", f"{names.decoder}.weight")
        bias = f"{names.decoder}.bias"
        if names.bias is None or config.tie_embeddings:
            yield tensor_rule("head.bias", names.bias or bias)
        else:
            yield TensorRule(("head.bias",), (bias, names.bias), _BOTH)
    elif names.sequence_layer and isinstance(head, cfg.ClassificationHeadConfig) and head.level == "row":
        yield tensor_rule("head.transform.dense", "classifier.dense")
        yield tensor_rule("head", "classifier.out_proj")
    else:
        yield tensor_rule("head.transform.dense", f"{base}pooler.dense")
        yield tensor_rule("head", "classifier")


def encoder_family(
    types: tuple[str, ...],
    base: str,
    read: Callable[[HFConfigReader], ModelConfig],
    write: Callable[[ModelConfig], dict[str, Any]],
    *,
    names: HeadNames = BERT_HEADS,
    rules: Rules = base_rules,
    ignored: tuple[str, ...] = (r"embeddings\.position_ids",),
    has_pooler: bool = False,
) -> Family:
    """Build a family.

    Args:
        types: The ``model_type`` values; the first one is written.
        base: Prefix of the base model, which a file of the base model lacks.
        read, write: Conversion of configs.
        names: Names of the heads' tensors.
        rules: Yields the rules of the base model.
        ignored: Patterns of tensors that are not weights, besides the matrix of a tied head.
        has_pooler: A file of the base model may have a pooler.
    """

    def all_rules(config: ModelConfig) -> Iterator[TensorRule]:
        prefix = "" if isinstance(config.head, cfg.PoolingHeadConfig) else base
        yield from rules(config, prefix)
        yield from head_rules(config, prefix, names)

    matrix, bias = f"{names.decoder}.weight", f"{names.decoder}.bias"
    pooler = f"{base}pooler.dense.weight" if has_pooler else None
    return Family(
        types,
        read,
        all_rules,
        write,
        prefix=base,
        ignored=(*ignored, *((r"pooler\..*",) if has_pooler else ()), matrix.replace(".", r"\.")),
        head=(matrix, f"{base}embeddings.word_embeddings.weight"),
        name_variants=_encoder.LEGACY_NORMS,
        resolve=_encoder.head_resolver(f"{names.dense}.weight", pooler),
        copies={} if names.bias is None else {names.bias: (bias,), bias: (names.bias,)},  # a file has either or both
    )


_BERT = encoder_family(
    ("bert",),
    "bert.",
    read_bert,
    lambda config: write_base(config, "bert", "Bert"),
    ignored=(r"embeddings\.position_ids", r"cls\.seq_relationship\..*"),
    has_pooler=True,
)


# ---------------------------------------------------------------- RoBERTa

# RoBERTa (Liu et al. 2019), XLM-R (Conneau et al. 2020), CamemBERT (Martin et al. 2020).  Positions count from
# ``pad_token_id + 1``, so that a table of 514 rows has room for 512 tokens.  The language head's activation is always
# gelu; the classes of a sequence are computed from its first token through a separate matrix and tanh.  All three are
# written as ``roberta``: they differ only in their tokenizers.


def read_roberta(fields: HFConfigReader) -> ModelConfig:
    offset, config = fields.integer("pad_token_id", default=1) + 1, read_base(fields)
    if not 0 <= offset < config.max_seq_len:
        raise CheckpointError(f"{fields.where}: pad_token_id {offset - 1} leaves no positions of {config.max_seq_len}")
    heads = _encoder.task_heads(fields, language_head(config, "gelu"), "tanh")
    positions = cfg.LearnedPositionsConfig(config.max_seq_len, offset=offset)
    return replace(
        config,
        max_seq_len=config.max_seq_len - offset,
        embedding=replace(config.embedding, position=positions),
        head=_encoder.read_task_head(fields, {**heads, "Model": config.head}),
    )


def write_roberta(config: ModelConfig, model_type: str, stem: str) -> dict[str, Any]:
    """Return BERT's fields with the size of the position table, and the padding id that its offset follows from."""
    fields, position = write_base(config, model_type, stem), config.embedding.position
    if not isinstance(position, cfg.LearnedPositionsConfig):
        raise CheckpointError("roberta cannot express this model: its positions are not learned")
    return {**fields, "max_position_embeddings": position.num_positions, "pad_token_id": position.offset - 1}


_ROBERTA = encoder_family(
    ("roberta", "xlm-roberta", "camembert"),
    "roberta.",
    read_roberta,
    lambda config: write_roberta(config, "roberta", "Roberta"),
    names=_ROBERTA_HEADS,
    has_pooler=True,
)


def _read_prelayernorm(fields: HFConfigReader) -> ModelConfig:
    config = read_roberta(fields)
    return replace(config, encoder=replace(config.stack, norm_position="pre", final_norm=True))


def _prelayernorm_rules(config: ModelConfig, base: str) -> Iterator[TensorRule]:
    norms = {"norm1": "attention.LayerNorm", "norm2": "intermediate.LayerNorm"}
    yield from base_rules(config, base, {**_LAYER, **norms})
    yield tensor_rule("encoder.norm", f"{base}LayerNorm")


# RoBERTa with LayerNorm before each half of a layer, fairseq's ``--encoder-normalize-before``.  A final norm follows
# the last layer; the embedding's norm remains.
_PRELAYERNORM = encoder_family(
    ("roberta-prelayernorm",),
    "roberta_prelayernorm.",
    _read_prelayernorm,
    lambda config: write_roberta(config, "roberta-prelayernorm", "RobertaPreLayerNorm"),
    names=_ROBERTA_HEADS,
    rules=_prelayernorm_rules,
    has_pooler=True,
)


# ---------------------------------------------------------------- MPNet

_MPNET_LAYER = {
    **_LAYER,
    **{f"attention.{part}": f"attention.attn.{part}" for part in "qkv"},
    "attention.out": "attention.attn.o",
    "norm1": "attention.LayerNorm",
}


def _read_mpnet(fields: HFConfigReader) -> ModelConfig:
    fields.require_one_of(
        "relative_attention_num_buckets", 32, reason="transformers computes 32 buckets whatever the table's size."
    )
    config = read_roberta(with_changes(fields, pad_token_id=1, type_vocab_size=0))
    layer = config.stack.layer_types["L"]
    attention = replace(layer.attention, position=cfg.T5BiasConfig(32, 128, bidirectional=True))
    return replace(config, encoder=replace(config.stack, layer_types={"L": replace(layer, attention=attention)}))


def _mpnet_rules(config: ModelConfig, base: str) -> Iterator[TensorRule]:
    yield from base_rules(config, base, _MPNET_LAYER)
    yield tensor_rule("encoder.relative_bias.L", f"{base}encoder.relative_attention_bias.weight")


# Song et al. 2020.  BERT's layers with learned positions and T5's bucketed bias, shared by all layers.  Positions count
# from 2 whatever the padding is.  There are 32 buckets up to a distance of 128: the table's size is a config field, but
# transformers computes with these.  There are no token types.
_MPNET = encoder_family(
    ("mpnet",),
    "mpnet.",
    _read_mpnet,
    lambda config: {**write_roberta(config, "mpnet", "MPNet"), "relative_attention_num_buckets": 32},
    names=_ROBERTA_HEADS,
    rules=_mpnet_rules,
    has_pooler=True,
)


# ---------------------------------------------------------------- ELECTRA

_REPLACED = ("replaced",)


def _read_electra(fields: HFConfigReader) -> ModelConfig:
    config, size = read_base(fields), fields.integer("embedding_size", default=128)
    narrow = None if size == config.hidden_size else size
    activation: Any = config.stack.layer_types["L"].mlp.activation
    heads = _encoder.task_heads(fields, language_head(config, "gelu", narrow), "gelu")
    heads["ForPreTraining"] = cfg.ClassificationHeadConfig(_REPLACED, transform=cfg.HeadTransformConfig(activation))
    return replace(
        config, embedding=replace(config.embedding, embedding_size=narrow), head=_encoder.read_task_head(fields, heads)
    )


def _is_discriminator(config: ModelConfig) -> bool:
    head = config.head
    return isinstance(head, cfg.ClassificationHeadConfig) and head.labels == _REPLACED and head.level == "token"


def _write_electra(config: ModelConfig) -> dict[str, Any]:
    fields = {**write_base(config, "electra", "Electra"), "embedding_size": embedding_size(config)}
    if _is_discriminator(config):
        fields |= {"architectures": ["ElectraForPreTraining"], "id2label": None, "label2id": None}
    return fields


_ELECTRA_HEADS = HeadNames(
    "generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head", bias=None
)
_ELECTRA_GENERATOR = encoder_family(("electra",), "electra.", _read_electra, _write_electra, names=_ELECTRA_HEADS)


def _electra_rules(config: ModelConfig) -> Iterator[TensorRule]:
    if not _is_discriminator(config):
        yield from _ELECTRA_GENERATOR.rules(config)
        return
    yield from base_rules(config, "electra.")
    yield tensor_rule("head.transform.dense", "discriminator_predictions.dense")
    yield tensor_rule("head", "discriminator_predictions.dense_prediction")


# Clark et al. 2020.  BERT's layers over an embedding of ``embedding_size``, projected to the model's.  The generator is
# a masked language model whose head projects back to that size; the discriminator (``ForPreTraining``) scores each
# token: above zero, it was replaced.  There is no pooler; the classes of a sequence use gelu.
_ELECTRA = replace(_ELECTRA_GENERATOR, rules=_electra_rules)

FAMILIES = (_BERT, _ROBERTA, _PRELAYERNORM, _MPNET, _ELECTRA)
