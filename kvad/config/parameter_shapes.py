"""Names and shapes of a model's weights, computed from its config without torch.

``weight_shapes(config)`` equals the names and shapes of ``Transformer(config).state_dict()``. It is defined here,
because ``kvad plan`` must not import torch, and ``kvad.cache`` never imports the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from kvad.config import layers as cfg
from kvad.config.model import (
    AttentionSpec,
    ModelConfig,
    attention_dims,
    embedding_size,
    encoder_hidden_size,
    head_dim,
    head_input_size,
)
from kvad.config.plugins import load_plugin

TensorShape = tuple[int, ...]


class Parameter(NamedTuple):
    """A tensor of a checkpoint."""

    name: str
    shape: TensorShape
    is_matrix: bool = False  # [out, in] of a linear layer, or [experts, out, in]
    experts_per_token: int = 0  # experts that each token chooses; 0: not experts


Parameters = Iterator[Parameter]
QUANTIZED_HEAD = "head.output"  # the module of a quantized language head
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
COMPONENTS = ("embedding", "attention", "mlp", "norms", "head")


def weight_shapes(config: ModelConfig) -> dict[str, TensorShape]:
    """Return the shape of every tensor of a checkpoint by name."""
    return {parameter.name: parameter.shape for parameter in parameters(config)}


class SummarizerShape(NamedTuple):
    """Sizes of a summarizer."""

    ratio: int  # tokens per summary
    hidden: int  # hidden units


def summarizer_shapes(specs: Sequence[AttentionSpec], summarizer_shape: SummarizerShape) -> dict[str, TensorShape]:
    """Return the shape of every tensor of a ``model.Summarizer``, for the causal layers without a window."""
    shapes: dict[str, TensorShape] = {}
    for index, spec in enumerate(specs):
        if spec.is_summarizable:
            both, (ratio, hidden), name = spec.head_dim + spec.value_dim, summarizer_shape, f"layers.{index}"
            shapes[f"{name}.query"] = (spec.num_kv_heads, 2, both)
            shapes[f"{name}.position_bias"] = (spec.num_kv_heads, 2, ratio)
            shapes[f"{name}.hidden_weight"] = (spec.num_kv_heads, both, hidden)
            shapes[f"{name}.hidden_bias"] = (spec.num_kv_heads, hidden)
            shapes[f"{name}.output_weight"] = (spec.num_kv_heads, hidden, both + 1)
    return shapes


def mismatches(config: ModelConfig, stored: Mapping[str, TensorShape]) -> list[str]:
    """Describe stored tensors that are missing, unexpected or of another shape, one line each."""
    expected, stored = weight_shapes(config), dequantized_shapes(config, stored)
    lines = [f"{name} {list(shape)} is missing" for name, shape in expected.items() if name not in stored]
    for name, shape in stored.items():
        if name not in expected:
            lines.append(f"{name} {list(shape)} is extra: the config has no place for it")
        elif shape != expected[name]:
            lines.append(f"{name} is {list(shape)}, the config says {list(expected[name])}")
    return lines


def quantized_parameter(shapes: Mapping[str, TensorShape], module: str) -> str | None:
    """Return the parameter, one of ``shapes``, that a quantized matrix replaces.

    Experts are a parameter, other matrices the weight of a module. None: a tied head, whose table remains.
    """
    if module == QUANTIZED_HEAD:
        return "head.weight" if "head.weight" in shapes else None
    return module if module in shapes else f"{module}.weight"


def dequantized_shapes(config: ModelConfig, stored: Mapping[str, TensorShape]) -> dict[str, TensorShape]:
    """Replace the tensors of each matrix of ``kvad quantize`` by the matrix; that of a tied head is no parameter."""
    shapes, expected = dict(stored), weight_shapes(config)
    for name in stored:
        module, _, part = name.rpartition(".")
        if part == "data" and f"{module}.scale" in shapes:
            *rows, width = shapes.pop(name)
            del shapes[f"{module}.scale"]
            has_minimum = shapes.pop(f"{module}.minimum", None) is not None
            if (parameter := quantized_parameter(expected, module)) is not None:
                shapes[parameter] = *rows, width * (2 if has_minimum else 1)
    return shapes


def num_parameters(config: ModelConfig) -> int:
    """Return the number of parameters; a tied head's matrix counts once."""
    return sum(math.prod(shape) for shape in weight_shapes(config).values())


def num_active_parameters(config: ModelConfig) -> int:
    """Return the number of parameters that one token uses: all but those of the experts that it does not choose."""
    count = 0
    for parameter in parameters(config):
        active, size = parameter.experts_per_token, math.prod(parameter.shape)
        count += size // parameter.shape[0] * active if active else size
    return count


def weight_bytes(config: ModelConfig, dtype: str, quantized: Mapping[str, int] = MappingProxyType({})) -> int:
    """Return the bytes of all weights; ``quantized`` has those of quantized parameters, by name."""
    shapes = weight_shapes(config)
    return sum(
        quantized[name] if name in quantized else math.prod(shape) * number_bytes(name, dtype)
        for name, shape in shapes.items()
    )


def number_bytes(name: str, dtype: str) -> int:
    """Return the bytes per number of a tensor of a model in ``dtype``."""
    return max(DTYPE_BYTES[dtype], 4) if is_float32(name) else DTYPE_BYTES[dtype]


def is_float32(name: str) -> bool:
    """Return True if a tensor (of kvad or Hugging Face) is never rounded to a dtype below float32."""
    return name.endswith((".selection_bias", ".e_score_correction_bias"))


def lookup_bytes(config: ModelConfig, dtype: str, *, has_head_copy: bool = False) -> int:
    """Return the bytes of tables of which a token reads one row: positions, token types, untied embeddings.

    ``has_head_copy``: a tied head reads a quantized copy of the token table.
    """
    read_whole = config.tie_embeddings and isinstance(config.head, cfg.LanguageHeadConfig) and not has_head_copy
    numbers = 0 if read_whole else config.vocab_size * embedding_size(config)
    for name, shape in weight_shapes(config).items():
        if name.endswith((".positions.weight", ".token_types.weight")) or name == "encoder_embedding.tokens.weight":
            numbers += math.prod(shape)
    return numbers * DTYPE_BYTES[dtype]


def tensor_component(name: str) -> str:
    """Return the member of ``COMPONENTS`` that a tensor belongs to."""
    pieces = name.split(".")
    if any(piece.startswith("norm") or piece.endswith("_norm") for piece in pieces):
        return "norms"
    if pieces[0] in ("embedding", "encoder_embedding", "head"):
        return "head" if pieces[0] == "head" else "embedding"
    return "mlp" if "mlp" in pieces else "attention"


def component_sizes(shapes: Mapping[str, TensorShape]) -> dict[str, int]:
    """Return the number of parameters by component, in the order of ``COMPONENTS``."""
    counts = dict.fromkeys(COMPONENTS, 0)
    for name, shape in shapes.items():
        counts[tensor_component(name)] += math.prod(shape)
    return counts


def parameters(config: ModelConfig) -> Parameters:
    """Yield every tensor of a checkpoint."""
    yield from _embedding("embedding", config.hidden_size, config.vocab_size, config.embedding)
    if (source := config.encoder_input) is not None:
        yield from _embedding("encoder_embedding", encoder_hidden_size(config), source.vocab_size, source.embedding)
    sides = (("encoder", config.encoder, encoder_hidden_size(config)), ("decoder", config.decoder, config.hidden_size))
    for name, stack, width in sides:
        if stack is not None:
            yield from _stack(name, config, stack, width)
    yield from _head(config)


def _embedding(name: str, width: int, vocab: int | None, embed: cfg.EmbeddingConfig) -> Parameters:
    table = width if embed.embedding_size is None else embed.embedding_size
    inner = width if embed.projection == "start" else table
    if vocab is not None:
        yield Parameter(f"{name}.tokens.weight", (vocab, table))
    if isinstance(embed.position, cfg.LearnedPositionsConfig):
        yield Parameter(f"{name}.positions.weight", (embed.position.num_positions, inner))
    if embed.num_token_types:
        yield Parameter(f"{name}.token_types.weight", (embed.num_token_types, inner))
    if embed.norm is not None:
        yield from _norm(f"{name}.norm", (inner,), embed.norm)
    if embed.embedding_size is not None:
        yield from _linear(f"{name}.projection", table, width, embed.projection == "end")


def _stack(name: str, config: ModelConfig, stack: cfg.StackConfig, width: int) -> Parameters:
    for index, layer in enumerate(stack.layer_configs[: stack.num_distinct_layers]):
        yield from _layer(f"{name}.layers.{index}", config, stack, layer, width)
    if stack.final_norm:
        yield from _norm(f"{name}.norm", (width,), stack.layer_config(stack.num_layers - 1).norm)
    for letter, kind in stack.layer_types.items():
        position = kind.attention.position
        if isinstance(position, cfg.T5BiasConfig) and position.shared:
            yield Parameter(f"{name}.relative_bias.{letter}", (position.num_buckets, kind.attention.num_heads))
        if isinstance(position, cfg.DisentangledConfig):
            yield Parameter(f"{name}.relative_embedding.{letter}.weight", (2 * position.span, width))
            if position.norm is not None:
                yield from _norm(f"{name}.relative_embedding.{letter}.norm", (width,), position.norm)
        if isinstance(position, cfg.CustomPositionsConfig):
            cls = load_plugin(position.name, "position.name")
            dim = head_dim(config, kind.attention)
            yield from _custom(f"{name}.positions.{letter}", cls, kind.attention, dim, **position.options)


def _head(config: ModelConfig) -> Parameters:
    head, width = config.head, config.hidden_size
    if head.transform is not None:
        width = head_input_size(config)
        yield from _linear("head.transform.dense", config.hidden_size, width, head.transform.bias)
        if head.transform.norm is not None:
            yield from _norm("head.transform.norm", (width,), head.transform.norm)
    if isinstance(head, cfg.PoolingHeadConfig):
        return
    outputs = config.vocab_size if isinstance(head, cfg.LanguageHeadConfig) else len(head.labels)
    if isinstance(head, cfg.ClassificationHeadConfig) or not config.tie_embeddings:
        yield Parameter("head.weight", (outputs, width), is_matrix=True)
    if head.bias:
        yield Parameter("head.bias", (outputs,))


def _layer(name: str, config: ModelConfig, stack: cfg.StackConfig, layer: cfg.LayerConfig, width: int) -> Parameters:
    if isinstance(layer.attention, cfg.AttentionConfig):
        yield from _attention(f"{name}.attention", config, layer.attention, layer.norm, width, width)
    elif isinstance(layer.attention, cfg.ShortConvConfig):
        yield from _short_conv(f"{name}.attention", layer.attention, width)
    elif isinstance(layer.attention, cfg.GatedDeltaConfig):
        yield from _gated_delta(f"{name}.attention", layer.attention, width)
    else:
        yield from _gated_recurrence(f"{name}.attention", layer.attention, width)
    if layer.cross_attention is not None:
        source = encoder_hidden_size(config)
        yield from _attention(f"{name}.cross_attention", config, layer.cross_attention, layer.norm, width, source)
    yield from _mlp(f"{name}.mlp", width, layer.mlp)
    norms = ["norm1"] if layer.pre_attention_norm else []
    norms += ["norm_cross"] if layer.cross_attention is not None else []
    norms += [] if stack.norm_position == "parallel" else ["norm2"]
    if stack.norm_position == "sandwich":
        norms += [f"{norm}_after" for norm in norms]
    for norm in norms:
        yield from _norm(f"{name}.{norm}", (width,), layer.norm)
    if layer.output_scale:
        yield Parameter(f"{name}.output_scale", (1,))


def _attention(
    name: str, config: ModelConfig, attention: cfg.AttentionConfig, norm: cfg.NormConfig, width: int, source: int
) -> Parameters:
    """Yield the parameters of one attention; ``source`` is the input size of keys and values."""
    heads, kv_heads, dim, value_dim = attention_dims(config, attention)
    if attention.latent is not None:
        yield from _latent(name, attention, attention.latent, attention.latent.norm or norm, width)
    else:
        yield from _linear(f"{name}.q", width, heads * dim, attention.qkv_bias)
        yield from _linear(f"{name}.k", source, kv_heads * dim, attention.qkv_bias)
        if not attention.values_from_keys:
            yield from _linear(f"{name}.v", source, kv_heads * value_dim, attention.qkv_bias)
        yield from _linear(f"{name}.out", heads * value_dim, width, attention.out_bias)
    if attention.output_gate:
        yield from _linear(f"{name}.gate", width, heads * value_dim, attention.qkv_bias)
    if attention.qk_norm != "none":
        for part, count in (("q_norm", heads), ("k_norm", kv_heads)):
            shapes: dict[str, TensorShape] = {"head": (dim,), "each": (count, dim), "full": (count * dim,)}
            yield from _norm(f"{name}.{part}", shapes[attention.qk_norm], attention.qk_norm_config or norm)
    if attention.sink_logits:
        yield Parameter(f"{name}.sink_logits", (heads,))
    if isinstance(attention.position, cfg.T5BiasConfig) and not attention.position.shared:
        yield Parameter(f"{name}.relative_bias", (attention.position.num_buckets, heads))
    if attention.custom_class is not None:
        yield from _custom(name, load_plugin(attention.custom_class, "attention.custom_class"), config, attention)


def _latent(
    name: str, attention: cfg.AttentionConfig, latent: cfg.LatentConfig, norm: cfg.NormConfig, width: int
) -> Parameters:
    """Yield the matrices and norms of latent attention (``model.LatentAttention``)."""
    heads, rank, bias = attention.num_heads, latent.kv_lora_rank, attention.qkv_bias
    queries = heads * latent.qk_head_dim
    if latent.q_lora_rank is None:
        yield from _linear(f"{name}.q", width, queries, False)
    else:
        yield from _linear(f"{name}.q_down", width, latent.q_lora_rank, bias)
        yield from _norm(f"{name}.q_norm", (latent.q_lora_rank,), norm)
        yield from _linear(f"{name}.q_up", latent.q_lora_rank, queries, False)
    yield from _linear(f"{name}.kv_down", width, rank + latent.qk_rope_head_dim, bias)
    yield from _norm(f"{name}.kv_norm", (rank,), norm)
    yield from _linear(f"{name}.kv_up", rank, heads * (latent.qk_nope_head_dim + latent.v_head_dim), False)
    yield from _linear(f"{name}.out", heads * latent.v_head_dim, width, attention.out_bias)


def _short_conv(name: str, conv: cfg.ShortConvConfig, width: int) -> Parameters:
    yield from _linear(f"{name}.input", width, 3 * width, conv.bias)
    yield Parameter(f"{name}.conv.weight", (width, conv.kernel_size))
    if conv.bias:
        yield Parameter(f"{name}.conv.bias", (width,))
    yield from _linear(f"{name}.out", width, width, conv.bias)


def _gated_recurrence(name: str, mixer: cfg.GatedRecurrenceConfig, width: int) -> Parameters:
    size, blocks = mixer.width // mixer.num_blocks, mixer.num_blocks
    yield Parameter(f"{name}.decay", (mixer.width,))
    for part in ("gate", "input"):
        yield from _linear(f"{name}.{part}", width, mixer.width, True)
    yield Parameter(f"{name}.conv.weight", (mixer.width, mixer.kernel_size))
    yield Parameter(f"{name}.conv.bias", (mixer.width,))
    for part in ("input_gate", "decay_gate"):
        yield Parameter(f"{name}.{part}.weight", (blocks, size, size), is_matrix=True)
        yield Parameter(f"{name}.{part}.bias", (blocks, size))
    yield from _linear(f"{name}.out", mixer.width, width, True)


def _gated_delta(name: str, mixer: cfg.GatedDeltaConfig, width: int) -> Parameters:
    keys, values, heads = mixer.keys_size, mixer.values_size, mixer.num_value_heads
    for part, size in {"q": keys, "k": keys, "v": values, "gate": values, "beta": heads, "decay": heads}.items():
        yield from _linear(f"{name}.{part}", width, size, False)
    yield Parameter(f"{name}.conv.weight", (2 * keys + values, mixer.kernel_size))
    for part in ("decay_bias", "log_rate"):
        yield Parameter(f"{name}.{part}", (heads,))
    yield Parameter(f"{name}.norm.weight", (mixer.value_dim,))
    yield from _linear(f"{name}.out", values, width, False)


def _custom(name: str, cls: Any, *args: object, **options: object) -> Parameters:
    """Yield the parameters that a custom class lists in ``shapes``, if it has any."""
    shapes: Mapping[str, TensorShape] = cls.shapes(*args, **options) if hasattr(cls, "shapes") else {}
    yield from (Parameter(f"{name}.{own}", shape) for own, shape in shapes.items())


def _mlp(name: str, width: int, mlp: cfg.PlainMLPConfig | cfg.GatedMLPConfig | cfg.MoEConfig) -> Parameters:
    hidden = mlp.intermediate_size
    sizes = {"gate": (hidden, width), "up": (hidden, width), "down": (width, hidden)}  # outputs, inputs
    if isinstance(mlp, cfg.MoEConfig):
        yield from _linear(f"{name}.router", width, mlp.num_experts, mlp.router_bias)
        if mlp.selection_bias:
            yield Parameter(f"{name}.selection_bias", (mlp.num_experts,))
        for part, shape in sizes.items():
            yield Parameter(f"{name}.{part}", (mlp.num_experts, *shape), True, mlp.num_experts_per_token)
            if mlp.bias:
                yield Parameter(f"{name}.{part}_bias", (mlp.num_experts, shape[0]), False, mlp.num_experts_per_token)
        if mlp.shared_size is not None:
            yield from _mlp(f"{name}.shared", width, cfg.GatedMLPConfig(mlp.shared_size, mlp.activation, mlp.bias))
        if mlp.shared_gate:
            yield from _linear(f"{name}.shared_gate", width, 1, False)
        return
    for part, (outputs, inputs) in sizes.items():
        if part != "gate" or isinstance(mlp, cfg.GatedMLPConfig):
            yield from _linear(f"{name}.{part}", inputs, outputs, mlp.bias)
    if mlp.activation == "xielu":
        yield from (Parameter(f"{name}.{part}", (1,)) for part in ("alpha_p", "alpha_n"))


def _linear(name: str, inputs: int, outputs: int, bias: bool) -> Parameters:
    yield Parameter(f"{name}.weight", (outputs, inputs), is_matrix=True)
    if bias:
        yield Parameter(f"{name}.bias", (outputs,))


def _norm(name: str, shape: TensorShape, norm: cfg.NormConfig) -> Parameters:
    if norm.weight:
        yield Parameter(f"{name}.weight", shape)
    if norm.bias:
        yield Parameter(f"{name}.bias", shape)
