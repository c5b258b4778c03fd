"""A model's architecture as a tree of nodes, from its configuration alone: parts, sizes, cache groups. No torch.

    model
      embedding
      encoder, decoder
        layers 0, 2, 4 (of kind L)        equal layers are one node
          norm, attention, norm, cross-attention, norm, MLP or experts        in the order of computation
        norm
      head
      cache                               cache groups

Every parameter of :func:`kvad.config.parameter_shapes.weight_shapes` is counted in exactly one leaf: a node's count is
that of its own tensors, in all layers that it represents, plus its children's. ``ENCODING_SUPPORT`` has what a
position encoding supports. The tree is drawn as text of 100 columns, SVG, Mermaid or JSON, all with the same titles,
lines, shapes and counts; long lines are wrapped, never truncated. The SVG follows the reader's light or dark scheme.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple
from xml.sax.saxutils import escape

from kvad import config as config_lib
from kvad.cache import CacheConfig, CacheGroup, build_groups, group_bytes
from kvad.config import (
    AlibiConfig,
    AttentionConfig,
    ClassificationHeadConfig,
    CustomPositionsConfig,
    DynamicScalingConfig,
    EmbeddingConfig,
    GatedMLPConfig,
    HeadTransformConfig,
    LayerConfig,
    LearnedPositionsConfig,
    LinearScalingConfig,
    Llama3ScalingConfig,
    LongRopeScalingConfig,
    ModelConfig,
    MoEConfig,
    NormConfig,
    PlainMLPConfig,
    PoolingHeadConfig,
    RopeConfig,
    RopeScalingConfig,
    SinusoidalPositionsConfig,
    StackConfig,
    T5BiasConfig,
    YarnScalingConfig,
    attention_specs,
    encoder_hidden_size,
    head_dim,
)
from kvad.errors import format_count, with_article

Position = (
    LearnedPositionsConfig
    | SinusoidalPositionsConfig
    | RopeConfig
    | AlibiConfig
    | T5BiasConfig
    | CustomPositionsConfig
    | None
)


class EncodingSupport(NamedTuple):
    """Support of a position encoding for eviction, renumbered positions and prefix reuse."""

    eviction: str
    endless: str
    reuse: str


ENCODING_SUPPORT: Mapping[str, EncodingSupport] = {
    "learned": EncodingSupport(
        "exact until the table ends",
        "impossible, positions are baked into k and v: recompute",
        "exact at the same positions only",
    ),
    "sinusoidal": EncodingSupport(
        "exact up to the limit",
        "impossible, positions are baked into k and v: recompute",
        "exact at the same positions only",
    ),
    "rope": EncodingSupport(
        "exact while positions are below the limit; keys are stored rotated",
        "rotate on read, or turn the stored keys by R(delta)",
        "exact; keys of what is no prefix must be turned",
    ),
    "alibi": EncodingSupport(
        "exact; the bias is made of stored positions when they are read",
        "renumber the stored positions, keys stay; kept ones would bias sinks away",
        "exact",
    ),
    "t5": EncodingSupport(
        "exact; the bias is made of stored positions when they are read",
        "renumber the stored positions, keys stay; kept ones would bias sinks away",
        "exact",
    ),
    "none": EncodingSupport("exact; no position enters k or v", "nothing to renumber", "exact"),
    "custom": EncodingSupport("as its class has it", "as its class has it", "exact for equal prefixes"),
    "source": EncodingSupport(
        "none of a source is evicted", "a source does not grow", "of a whole equal source, never of its part"
    ),
}

NORM_POSITIONS: Mapping[str, str] = {
    "pre": "norms before each half: x + f(norm(x))",
    "post": "norms after each half: norm(x + f(x))",
    "sandwich": "norms before and after each half: x + norm(f(norm(x)))",
    "after": "norms after each half, inside the residual: x + norm(f(x))",
    "normed": "the normed stream continues: norm(x) + f(norm(x))",
    "parallel": "attention and MLP side by side, one norm: x + attention(norm(x)) + mlp(norm(x))",
    "parallel_pair": "attention and MLP side by side, a norm each: x + attention(norm(x)) + mlp(norm(x))",
}


def encoding_kind(position: Position) -> str:
    """Return the key of :data:`ENCODING_SUPPORT`."""
    return "none" if position is None else position.kind


def describe_allowed(kind: str) -> Iterator[str]:
    """Describe the support in three lines."""
    text = ENCODING_SUPPORT[kind]
    yield f"eviction: {text.eviction}"
    yield f"endless generation: {text.endless}"
    yield f"prefix reuse: {text.reuse}"


# ---------------------------------------------------------------- positions


def describe_position(spec: Position) -> str:
    if spec is None:
        return "no positions of its own"
    if isinstance(spec, RopeConfig):
        return _rope(spec)
    if isinstance(spec, AlibiConfig):
        factor = "" if spec.factor == 1.0 else f", slopes times {spec.factor:.4g}"
        return f"ALiBi, a slope per head{factor}{', rounded to bfloat16' * spec.round_to_bfloat16}"
    if isinstance(spec, T5BiasConfig):
        ways = "both ways" if spec.bidirectional else "one way"
        whose = "one table for the stack's layers of this kind" if spec.shared else "a table per layer"
        return f"T5 bias, {spec.num_buckets} buckets up to distance {spec.max_distance:,}, {ways}, {whose}"
    if isinstance(spec, CustomPositionsConfig):
        options = ", ".join(f"{name} {value}" for name, value in spec.options.items())
        return f"positions by {spec.name}{f' ({options})' if options else ''}"
    offset = f", offset {spec.offset}" if spec.offset else ""
    if isinstance(spec, LearnedPositionsConfig):
        return f"learned positions, a table of {spec.num_positions:,}{offset}"
    return f"sinusoidal positions, {spec.form}, base {spec.base:,.10g}{offset}"


def _rope(spec: RopeConfig) -> str:
    part = "" if spec.partial_rotary_factor == 1.0 else f", of the first {spec.partial_rotary_factor:.4g} of each head"
    pairs = ", interleaved pairs" if spec.interleaved else ""
    scaled = "" if spec.scaling is None else f"; {_scaling(spec.scaling)}"
    return f"rotary, theta {spec.theta:,.10g}{part}{pairs}{scaled}"


def _scaling(spec: RopeScalingConfig) -> str:
    factor = "" if spec.factor is None else f", factor {spec.factor:g}"
    if isinstance(spec, LinearScalingConfig):
        return f"linear scaling{factor}"
    name = {
        DynamicScalingConfig: "dynamic",
        Llama3ScalingConfig: "llama3",
        YarnScalingConfig: "yarn",
        LongRopeScalingConfig: "longrope",
    }
    text = f"{name[type(spec)]} scaling{factor}, made for {spec.original_max_seq_len:,}"
    regime = isinstance(spec, (DynamicScalingConfig, LongRopeScalingConfig))
    return text + (", by a row's limit, fixed when it is admitted" if regime else "")


# ---------------------------------------------------------------- components


def describe_norm(spec: NormConfig, width: str = "") -> str:
    name = "LayerNorm" if spec.kind == "layer" else "RMSNorm"
    form = "" if spec.weight else ", no weight"
    unit = ", weight + 1" if spec.unit_offset else ""
    return f"{name}, eps {spec.eps:g}{form}{unit}{', bias' * spec.bias}{width}"


def describe_embedding(spec: EmbeddingConfig) -> Iterator[str]:
    if spec.embedding_size is not None:
        yield f"a table {spec.embedding_size:,} wide, projected at the {spec.projection}"
    if spec.scale != 1.0:
        yield f"multiplied by {spec.scale:.6g}"
    if spec.position is not None:
        yield describe_position(spec.position)
    if spec.num_token_types:
        yield f"{spec.num_token_types} segments"
    if spec.norm is not None:
        yield f"{describe_norm(spec.norm)}{', before positions are added' * spec.norm_first}"


def describe_attention(spec: AttentionConfig, dim: int) -> Iterator[str]:
    kv_heads, value_dim = spec.num_kv_heads or spec.num_heads, spec.value_dim or dim
    sharing = {spec.num_heads: "each has its own key-value head", 1: "one key-value head for all"}
    shared = sharing.get(kv_heads, f"{kv_heads} key-value heads, {spec.num_heads // kv_heads} queries each")
    if spec.num_heads == 1:
        shared = "one key-value head"
    dims = f"{dim}" if dim == value_dim else f"{dim}, values of {value_dim}"
    yield f"{spec.num_heads} heads of {dims}; {shared}"
    more = []
    if spec.softmax_scale != "default":
        more.append("no scale" if spec.softmax_scale == "none" else f"scale {spec.softmax_scale:.6g}")
    if spec.logit_softcap is not None:
        more.append(f"softcap {spec.logit_softcap:g}")
    if spec.sink_logits:
        more.append("a sink logit per head")
    if spec.qk_norm != "none":
        each = {"head": "per head, one weight", "each": "per head, a weight each", "full": "over all heads"}
        own = "" if spec.qk_norm_config is None else f" ({describe_norm(spec.qk_norm_config)})"
        more.append(f"q and k normed {each[spec.qk_norm]}{own}")
    if spec.clip_qkv is not None:
        more.append(f"q, k, v cut to {spec.clip_qkv:g}")
    if spec.qkv_bias or spec.out_bias:
        more.append(
            "biases" if spec.qkv_bias and spec.out_bias else f"bias of {'q, k, v' if spec.qkv_bias else 'the output'}"
        )
    if spec.custom_class is not None:
        more.append(f"a mixer of one's own, {spec.custom_class}")
    if more:
        yield "; ".join(more)
    yield describe_position(spec.position)


def describe_mlp(spec: PlainMLPConfig | GatedMLPConfig | MoEConfig) -> tuple[str, list[str]]:
    """Return (title, lines)."""
    biases = ", biases" * spec.bias
    if isinstance(spec, PlainMLPConfig):
        return f"MLP of {spec.intermediate_size:,}", [f"{spec.activation}{biases}"]
    if isinstance(spec, GatedMLPConfig):
        return f"gated MLP of {spec.intermediate_size:,}", [f"{spec.activation}{biases}"]
    form = spec.activation if spec.swiglu_alpha is None else f"(up + 1) gate sigmoid({spec.swiglu_alpha:g} gate)"
    clip = "" if spec.swiglu_limit is None else f", cut to {spec.swiglu_limit:g}"
    router = (
        f"a token goes to {spec.num_experts_per_token} of them, router {spec.router}{' with bias' * spec.router_bias}"
    )
    return f"{spec.num_experts} experts of {spec.intermediate_size:,}", [router, f"{form}{clip}{biases}"]


def describe_head(config: ModelConfig) -> tuple[str, list[str]]:
    """Return (title, lines)."""
    spec = config.head
    lines = [] if spec.transform is None else [_transform(spec.transform)]
    if isinstance(spec, PoolingHeadConfig):
        unit = ", scaled to length one" if spec.normalize else ""
        return "head: a vector per row", [f"the {'first state' if spec.pool == 'first' else 'mean'}{unit}", *lines]
    if isinstance(spec, ClassificationHeadConfig):
        names = ", ".join(spec.labels[:6]) + (" ..." if len(spec.labels) > 6 else "")
        per = "token" if spec.level == "token" else f"row, of its {'first state' if spec.pool == 'first' else 'mean'}"
        return f"head: {len(spec.labels)} labels per {per}", [*lines, names]
    lines.append("the matrix is the embedding's table" if config.tie_embeddings else "a matrix of its own")
    changes = [f"times {spec.logit_scale:.6g}"] if spec.logit_scale != 1.0 else []
    changes += [f"softcap {spec.logit_softcap:g}"] if spec.logit_softcap is not None else []
    changes += ["bias"] if spec.bias else []
    return "head: logits over the vocabulary", [*lines, *([", ".join(changes)] if changes else [])]


def _transform(spec: HeadTransformConfig) -> str:
    parts = ["a matrix", "bias"] if spec.bias else ["a matrix"]
    parts += [spec.activation] if spec.activation is not None else []
    parts += [describe_norm(spec.norm)] if spec.norm is not None else []
    return f"first {', '.join(parts)}"


Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class TreeNode:
    """A node of the tree.

    ``part``: model, embedding, stack, layers, norm, attention, cross_attention, mlp, head, cache or group; ``lines``:
    description; ``tensors``: its own, in one of the layers that it represents; ``parameters``: of all of them, with its
    children's, None if it has none; ``facts``: values for JSON.
    """

    part: str
    title: str
    lines: tuple[str, ...] = ()
    tensors: Shapes = field(default_factory=dict)
    parameters: int | None = 0
    facts: Mapping[str, object] = field(default_factory=dict)
    children: tuple[TreeNode, ...] = ()


def build_model_tree(config: ModelConfig, name: str, *, dtype: str = "float32") -> TreeNode:
    """Build the tree; ``dtype`` is the cache's, for its bytes.

    ConfigError for layers that cannot be cached.
    """
    tree = _Builder(config)
    source = config.encoder_input
    children = [
        tree.embedding("embedding", "embedding" if source is None else "embedding of the target", config.embedding)
    ]
    if source is not None:
        children.append(tree.embedding("encoder_embedding", "embedding of the source", source.embedding))
    for side, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        if stack is not None:
            children.append(tree.stack(side, stack))
    title, lines = describe_head(config)
    children.append(_node("head", title, lines, tree.below("head"), facts={"kind": config.head.kind}))
    children.append(_cache(config, dtype))
    longest = format_count(config.max_seq_len, "token") + (
        "" if source is None else f", of {source.max_seq_len:,} of source"
    )
    text = f"width {config.hidden_size:,}, vocabulary {config.vocab_size:,}, rows of at most {longest}"
    facts = {
        "kind": config.kind,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "max_seq_len": config.max_seq_len,
    }
    title = f"{name}, {with_article(config.kind)}"
    return TreeNode(
        "model", title, (text,), {}, config_lib.parameter_shapes.num_parameters(config), facts, tuple(children)
    )


def fold_indices(numbers: Iterable[int]) -> str:
    """Format ``0-3, 5``, or ``0, 2, 4 ... 24`` for many equal distances."""
    each = sorted(numbers)
    steps = {b - a for a, b in itertools.pairwise(each)}
    if len(each) > 6 and len(steps) == 1 and steps != {1}:
        return f"{each[0]}, {each[1]}, {each[2]} ... {each[-1]}"
    runs: list[list[int]] = []
    for number in each:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


# ---------------------------------------------------------------- from config and shapes to nodes


def _node(
    part: str,
    title: str,
    lines: Iterable[str],
    tensors: Shapes | None = None,
    *,
    times: int = 1,
    once: Shapes | None = None,
    children: Iterable[TreeNode] = (),
    facts: Mapping[str, object] | None = None,
) -> TreeNode:
    """Build a node; ``once``: tensors that all ``times`` layers share."""
    inner, own, shared = tuple(children), tensors or {}, once or {}
    total = times * _count(own) + _count(shared) + sum(child.parameters or 0 for child in inner)
    return TreeNode(part, title, tuple(lines), {**own, **shared}, total, facts or {}, inner)


def _count(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


class _Builder:
    def __init__(self, config: ModelConfig) -> None:
        self.config, self.shapes = config, config_lib.parameter_shapes.weight_shapes(config)

    def below(self, module: str) -> Shapes:
        """Return the tensors of a module, without its prefix."""
        above = f"{module}."
        return {name.removeprefix(above): shape for name, shape in self.shapes.items() if name.startswith(above)}

    def embedding(self, name: str, title: str, embed: EmbeddingConfig) -> TreeNode:
        tensors, lines = self.below(name), list(describe_embedding(embed))
        if "tokens.weight" not in tensors:
            lines.insert(0, "the target's table")
        facts: dict[str, object] = {"position": None, "allows": None}
        if embed.position is not None:
            facts["position"] = embed.position.kind
            if self.config.decoder is not None and name == "embedding":
                lines += describe_allowed(embed.position.kind)
                facts["allows"] = ENCODING_SUPPORT[embed.position.kind]._asdict()
        return _node("embedding", title, lines, tensors, facts=facts)

    def stack(self, side: str, stack: StackConfig) -> TreeNode:
        kinds: dict[str, list[int]] = {}
        for index in range(stack.num_layers):
            kinds.setdefault(stack.layer_type(index), []).append(index)
        children = [self.layers(side, stack, letter, indices) for letter, indices in kinds.items()]
        if stack.final_norm:
            norm = stack.layer_config(stack.num_layers - 1).norm
            children.append(_node("norm", f"norm at the end: {describe_norm(norm)}", [], self.below(f"{side}.norm")))
        lines = [NORM_POSITIONS[stack.norm_position]]
        if stack.residual_scale != 1.0:
            lines.append(f"what a branch adds is multiplied by {stack.residual_scale:g}")
        if len(kinds) > 1:
            lines.append(f"layers of kinds {stack.layer_pattern}, over and over")
        width = self.config.hidden_size if side == "decoder" else encoder_hidden_size(self.config)
        title = f"{side}, {format_count(stack.num_layers, 'layer')} of width {width:,}"
        facts = {
            "num_layers": stack.num_layers,
            "layer_pattern": stack.layer_pattern,
            "norm_position": stack.norm_position,
        }
        return _node("stack", title, lines, children=children, facts=facts)

    def layers(self, side: str, stack: StackConfig, letter: str, indices: list[int]) -> TreeNode:
        layer, times = stack.layer_types[letter], len(indices)
        first = f"{side}.layers.{indices[0]}"
        parts: list[TreeNode] = []
        for name, title in _order(stack, layer):
            tensors = self.below(f"{first}.{name}")
            if name == "attention":
                shared = self.shared(side, letter)
                parts.append(self.attention(side, layer.attention, tensors, shared, times))
            elif name == "cross_attention" and layer.cross_attention is not None:
                parts.append(self.attention(side, layer.cross_attention, tensors, {}, times, cross=True))
            elif name == "mlp":
                what, lines = describe_mlp(layer.mlp)
                parts.append(
                    _node(
                        "mlp",
                        what,
                        lines,
                        tensors,
                        times=times,
                        facts={"intermediate_size": layer.mlp.intermediate_size},
                    )
                )
            else:
                parts.append(_node("norm", f"{title}: {describe_norm(layer.norm)}", [], tensors, times=times))
        of_kind = f" (of kind {letter})" if len(stack.layer_types) > 1 else ""
        title = f"{'layer' if times == 1 else 'layers'} {fold_indices(indices)}{of_kind}"
        per_layer = sum(_count(self.below(f"{first}.{name}")) for name, _ in _order(stack, layer))
        lines = [f"{format_count(per_layer, 'parameter')} each"] if times > 1 else []
        return _node("layers", title, lines, children=parts, facts={"layers": indices, "kind": letter})

    def attention(
        self, side: str, mixer: AttentionConfig, tensors: Shapes, shared: Shapes, times: int, *, cross: bool = False
    ) -> TreeNode:
        config = self.config
        dim, kv_heads = head_dim(config, mixer), mixer.num_kv_heads or mixer.num_heads
        limit = (
            config.max_seq_len
            if side == "decoder" or config.encoder_input is None
            else config.encoder_input.max_seq_len
        )
        window = mixer.window if mixer.window is not None and mixer.window < limit else None
        title = "cross-attention" if cross else f"attention, {'causal' if mixer.causal else 'both ways'}"
        if window is not None:
            title += f", a window of {window:,}"
        kind = "source" if cross else encoding_kind(mixer.position)
        lines = list(describe_attention(mixer, dim))
        cached = side == "decoder" and (kind != "none" or config.embedding.position is None)
        if cached:
            lines += describe_allowed(kind)
        facts: dict[str, object] = {
            "num_heads": mixer.num_heads,
            "num_kv_heads": kv_heads,
            "head_dim": dim,
            "value_dim": mixer.value_dim or dim,
            "window": window,
            "position": kind,
            "allows": ENCODING_SUPPORT[kind]._asdict() if cached else None,
        }
        part = "cross_attention" if cross else "attention"
        return _node(part, title, lines, tensors, times=times, once=shared, facts=facts)

    def shared(self, side: str, letter: str) -> Shapes:
        """Return the tensors that layers of a kind share: a bias table, parameters of custom positions."""
        table, own = f"{side}.relative_bias.{letter}", self.below(f"{side}.positions.{letter}")
        found = {"relative (shared)": self.shapes[table]} if table in self.shapes else {}
        return {**found, **{f"positions.{name}": shape for name, shape in own.items()}}


def _order(stack: StackConfig, layer: LayerConfig) -> Iterator[tuple[str, str]]:
    """Yield (module, title of a norm) of a layer in order of computation."""
    behind = stack.norm_position in ("post", "after")
    for half, norm, what in (
        ("attention", "norm1", "attention"),
        ("cross_attention", "norm_cross", "cross-attention"),
        ("mlp", "norm2", "the MLP"),
    ):
        if half == "cross_attention" and layer.cross_attention is None:
            continue
        there = (norm != "norm1" or layer.pre_attention_norm) and not (
            norm == "norm2" and stack.norm_position == "parallel"
        )
        both = stack.norm_position == "parallel" and norm == "norm1"
        if there and not behind:
            yield norm, f"norm before {'attention and the MLP' if both else what}"
        yield half, ""
        if there and behind:
            yield norm, f"norm after {what}"
        if stack.norm_position == "sandwich":
            yield f"{norm}_after", f"norm after {what}"


# ---------------------------------------------------------------- the cache


def _cache(config: ModelConfig, dtype: str) -> TreeNode:
    if config.decoder is None:
        return TreeNode("cache", "no cache", ("an encoder keeps nothing between two steps",), parameters=None)
    source = 0 if config.encoder_input is None else config.encoder_input.max_seq_len
    cache_config = CacheConfig(max_num_seqs=1, max_seq_len=config.max_seq_len, max_source_len=source, dtype=dtype)
    made = build_groups(attention_specs(config), cache_config)
    children = [_group(config, number, group) for number, group in enumerate(made)]
    token = sum(each.facts["bytes_per_token"] for each in children if not each.facts["is_cross_attention"])  # type: ignore[misc]
    text = f"{dtype}, a new token of a row takes {token:,} bytes"
    if source:
        of_source = sum(each.facts["bytes_per_token"] for each in children if each.facts["is_cross_attention"])  # type: ignore[misc]
        text += f", one of its source {of_source:,}"
    title = f"cache, {format_count(len(children), 'group')} of layers that share a table"
    return TreeNode("cache", title, (text,), {}, None, {"dtype": dtype}, tuple(children))


def _group(config: ModelConfig, number: int, group: CacheGroup) -> TreeNode:
    assert config.decoder is not None
    size, mixer = group_bytes(group), group.spec
    layers = [index % config.decoder.num_layers for index in group.layers]
    reach = (
        "the source"
        if mixer.is_cross_attention
        else "all tokens"
        if mixer.window is None
        else f"the last {mixer.window:,} tokens"
    )
    dims = f"{mixer.head_dim}" if mixer.head_dim == mixer.value_dim else f"{mixer.head_dim} + {mixer.value_dim}"
    row = "source" if mixer.is_cross_attention else "row"
    length = group.max_blocks_per_seq * group.block_size
    lines = (
        f"{format_count(mixer.num_kv_heads, 'key-value head')} of {dims}, of {reach}",
        f"{size.per_token_payload:,} bytes per token",
        f"{size.per_seq:,} bytes of the longest {row}, {format_count(length, 'slot')} with their positions",
    )
    facts = {
        "layers": layers,
        "is_cross_attention": mixer.is_cross_attention,
        "window": mixer.window,
        "bytes_per_token": size.per_token_payload,
        "bytes_per_row": size.per_seq,
    }
    what = "cross-attention of layers" if mixer.is_cross_attention else "layers" if len(layers) > 1 else "layer"
    return TreeNode("group", f"group {number}: {what} {fold_indices(layers)}", lines, {}, None, facts)


WIDTH = 100  # columns of text


# ---------------------------------------------------------------- text


def tree_to_text(root: TreeNode) -> str:
    """Format the tree as text, without a final newline."""
    return "\n".join(line.rstrip() for line in _text(root, "", "", root.parameters or 0))


def _text(node: TreeNode, first: str, below: str, whole: int) -> Iterator[str]:
    stem = below + ("│  " if node.children else "   ")
    count = _share(node, whole)
    title = textwrap.wrap(node.title, WIDTH - len(below) - len(count) - 2)
    yield f"{first}{title[0]}".ljust(WIDTH - len(count)) + count
    for line in (*title[1:], *node.lines, *_shapes(node)):
        for piece in _wrapped(line, WIDTH - len(stem), "  "):
            yield f"{stem}{piece}"
    for number, child in enumerate(node.children):
        last = number == len(node.children) - 1
        yield from _text(child, below + ("└─ " if last else "├─ "), below + ("   " if last else "│  "), whole)


def _share(node: TreeNode, whole: int) -> str:
    """Format ``124,439,808`` and its share of the model."""
    if not node.parameters:
        return ""
    return f"{node.parameters:,} {100 * node.parameters / max(whole, 1):>5.1f}%"


def _shapes(node: TreeNode) -> list[str]:
    """Format ``q [512, 512]  k [512, 512]``: a matrix under its module's name, followed by its bias."""
    text = []
    for name, shape in node.tensors.items():
        text.append(f"{name.removesuffix('.weight')}\N{NO-BREAK SPACE}{'x'.join(map(str, shape))}")
    return [", ".join(text)] if text else []


def _wrapped(line: str, columns: int, indent: str = "") -> list[str]:
    """Wrap a line; a name stays with its shape."""
    pieces = textwrap.wrap(line, columns, subsequent_indent=indent)
    return [piece.replace("\N{NO-BREAK SPACE}", " ") for piece in pieces]


# ---------------------------------------------------------------- SVG

WIDE, INDENT, LINE, PAD, GAP = 980, 26, 17, 8, 8  # pixels
CHARACTER, TITLE = 7.3, 7.9  # pixels of a character, and of a title's

PARTS = {  # part -> color of its bar on a light and on a dark page
    "model": ("#5b6472", "#9aa5b5"),
    "embedding": ("#1f7a8c", "#4fb3c6"),
    "stack": ("#5b6472", "#9aa5b5"),
    "layers": ("#5b6472", "#9aa5b5"),
    "norm": ("#8a8f98", "#8791a0"),
    "attention": ("#2457c5", "#7aa2ff"),
    "cross_attention": ("#7a3fb8", "#bf94f0"),
    "mlp": ("#b3541e", "#e79a63"),
    "head": ("#2c7a3f", "#72c287"),
    "cache": ("#a0284b", "#f07a9b"),
    "group": ("#a0284b", "#f07a9b"),
}
FONT = 'ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", "Liberation Mono", monospace'
SCHEME = {  # selector: attributes -> light, dark
    ".page": ("fill: #ffffff", "fill: #11151b"),
    ".box": ("fill: #f6f7f9; stroke: #c6ccd6", "fill: #1a2029; stroke: #3a4452"),
    ".link": ("fill: none; stroke: #98a1af", "fill: none; stroke: #566273"),
    "text": ("fill: #3f4856", "fill: #b4becc"),
    ".title, .count": ("fill: #14181f", "fill: #edf0f5"),
    **{f".{part}": (f"fill: {light}", f"fill: {dark}") for part, (light, dark) in PARTS.items()},
}


def _style() -> str:
    light = "\n".join(f"{name} {{ {one} }}" for name, (one, _) in SCHEME.items())
    dark = "\n".join(f"{name} {{ {one} }}" for name, (_, one) in SCHEME.items())
    fonts = (
        f"text {{ font: 12px {FONT} }}\n.title {{ font-weight: 600; font-size: 13px }}\n.count {{ text-anchor: end }}"
    )
    return f"{fonts}\n{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}"


def tree_to_svg(root: TreeNode) -> str:
    """Draw indented boxes; the color bar at the left shows the part."""
    boxes: list[str] = []
    high = _box(root, GAP, GAP, root.parameters or 0, boxes)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDE}" height="{high}" viewBox="0 0 {WIDE} {high}" '
        f'role="img"><title>{_xml(root.title)}</title><style>{_style()}</style><rect class="page" width="{WIDE}" '
        f'height="{high}"/>'
    )
    return "\n".join([head, *boxes, "</svg>"]) + "\n"


def _box(node: TreeNode, x: int, y: int, whole: int, out: list[str]) -> int:
    """Draw a node and its children; return the y of the next box."""
    wide = WIDE - GAP - x
    columns = int((wide - 3 * PAD) / CHARACTER)
    count = _share(node, whole)
    title, *more = textwrap.wrap(node.title, max(20, int((wide - 3 * PAD) / TITLE) - len(count) - 2))
    lines = [piece for line in (*more, *node.lines, *_shapes(node)) for piece in _wrapped(line, columns)]
    high = LINE * (1 + len(lines)) + PAD
    out.append(f'<rect class="box" x="{x}" y="{y}" width="{wide}" height="{high}" rx="4"/>')
    out.append(f'<rect class="{node.part}" x="{x}" y="{y}" width="4" height="{high}" rx="2"/>')
    out.append(f'<text class="title" x="{x + 2 * PAD}" y="{y + LINE}">{_xml(title)}</text>')
    if count:
        out.append(f'<text class="count" x="{WIDE - GAP - PAD}" y="{y + LINE}">{count}</text>')
    for number, line in enumerate(lines, 2):
        out.append(f'<text x="{x + 2 * PAD}" y="{y + number * LINE}">{_xml(line)}</text>')
    trunk, bottom, after = x + INDENT // 2, y + high, y + high + GAP
    for child in node.children:
        middle = after + LINE - 4
        out.append(f'<path class="link" d="M{trunk} {bottom}V{middle}H{x + INDENT}"/>')
        after = _box(child, x + INDENT, after, whole, out)
    return after


def _xml(text: str) -> str:
    return escape(text, {'"': "&quot;"})


# ---------------------------------------------------------------- Mermaid


def tree_to_mermaid(root: TreeNode) -> str:
    """Build a flowchart from left to right, for a ``mermaid`` block in Markdown."""
    return "\n".join(["flowchart LR", *_mermaid(root, "n0", root.parameters or 0), *CLASSES]) + "\n"


CLASSES = [f"  classDef {part} stroke:{light},stroke-width:2px" for part, (light, _) in PARTS.items()]


def _mermaid(node: TreeNode, name: str, whole: int) -> Iterator[str]:
    count = _share(node, whole)
    text = [f"<b>{_quoted(node.title)}</b>", *([" ".join(count.split())] if count else [])]
    text += [_quoted(line) for line in (*node.lines, *_shapes(node))]
    yield f'  {name}["{"<br/>".join(text)}"]:::{node.part}'
    for number, child in enumerate(node.children):
        yield from _mermaid(child, f"{name}_{number}", whole)
        yield f"  {name} --> {name}_{number}"


def _quoted(text: str) -> str:
    """Escape for Mermaid: entities by name or number between # and ;."""
    text = text.replace("\N{NO-BREAK SPACE}", " ")
    codes = {"#": "#35;", '"': "#quot;", "<": "#lt;", ">": "#gt;", "`": "#96;"}
    return "".join(codes.get(char, char) for char in text)


# ---------------------------------------------------------------- JSON


def tree_to_json(node: TreeNode) -> Mapping[str, object]:
    """Build ``{"part", "title", "lines", "tensors": {name: shape}, "parameters", "facts", "children"}``, nested."""
    return {
        "part": node.part,
        "title": node.title,
        "lines": list(node.lines),
        "tensors": {name: list(shape) for name, shape in node.tensors.items()},
        "parameters": node.parameters,
        "facts": dict(node.facts),
        "children": [tree_to_json(child) for child in node.children],
    }
