"""A model's architecture as a tree of nodes, from its config alone: what stands where, how large it is, what it caches.

    model
      embedding
      encoder, decoder
        layers 0, 2, 4 (of kind L)        equal layers are one node
          norm, attention, norm, cross-attention, norm, MLP or experts        in the order in which they are computed
        norm
      head
      cache                               the groups of layers that share a table

Every parameter of :func:`kvad.cache.weights.weight_shapes` is counted in exactly one leaf: a node's count is that of
its own tensors, in all layers that it stands for, and its children's.  ``drawtree.py`` draws it.  No torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from kvad.cache.sizing import CacheConfig, CacheGroup, build_groups, group_bytes
from kvad.cache.weights import num_parameters, weight_shapes
from kvad.config import (
    AttentionConfig,
    EmbeddingConfig,
    LayerConfig,
    ModelConfig,
    StackConfig,
    attention_specs,
    encoder_hidden_size,
    head_dim,
)
from kvad.errors import format_count, with_article
from kvad.lab import describe

__all__ = ["TreeNode", "build_model_tree", "fold_indices"]

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class TreeNode:
    """``part``: model, embedding, stack, layers, norm, attention, cross, mlp, head, cache or group.

    ``lines``: what there is to say of it.  ``tensors``: its own, in one layer of those that it stands for.
    ``parameters``: of all of them, with its children's; None where it has nothing to do with parameters.  ``facts``:
    the same for machines.
    """

    part: str
    title: str
    lines: tuple[str, ...] = ()
    tensors: Shapes = field(default_factory=dict)
    parameters: int | None = 0
    facts: Mapping[str, object] = field(default_factory=dict)
    children: tuple[TreeNode, ...] = ()


def build_model_tree(config: ModelConfig, name: str, *, dtype: str = "float32") -> TreeNode:
    """``dtype``: of the cache, for its bytes.  ConfigError for layers that cannot be cached."""
    tree = _Builder(config)
    source = config.encoder_input
    children = [tree.embedding("embed", "embedding" if source is None else "embedding of the target", config.embedding)]
    if source is not None:
        children.append(tree.embedding("source", "embedding of the source", source.embedding))
    for side, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        if stack is not None:
            children.append(tree.stack(side, stack))
    title, lines = describe.describe_head(config)
    children.append(_node("head", title, lines, tree.below("head"), facts={"kind": config.head.kind}))
    children.append(_cache(config, dtype))
    longest = format_count(config.max_seq_len, "token") + (
        "" if source is None else f", of {source.max_seq_len:,} of source"
    )
    said = f"width {config.hidden_size:,}, vocabulary {config.vocab_size:,}, rows of at most {longest}"
    facts = {"kind": config.kind, "width": config.hidden_size, "vocab": config.vocab_size, "limit": config.max_seq_len}
    title = f"{name}, {with_article(config.kind)}"
    return TreeNode("model", title, (said,), {}, num_parameters(config), facts, tuple(children))


def fold_indices(numbers: Iterable[int]) -> str:
    """``0-3, 5``; ``0, 2, 4 ... 24`` where many are equally far apart."""
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
    """``once``: tensors that all ``times`` layers share."""
    inner, own, shared = tuple(children), tensors or {}, once or {}
    total = times * _count(own) + _count(shared) + sum(child.parameters or 0 for child in inner)
    return TreeNode(part, title, tuple(lines), {**own, **shared}, total, facts or {}, inner)


def _count(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


class _Builder:
    def __init__(self, config: ModelConfig) -> None:
        self.config, self.shapes = config, weight_shapes(config)

    def below(self, module: str) -> Shapes:
        """The tensors of a module, under what is left of their names."""
        above = f"{module}."
        return {name.removeprefix(above): shape for name, shape in self.shapes.items() if name.startswith(above)}

    def embedding(self, name: str, title: str, embed: EmbeddingConfig) -> TreeNode:
        tensors, lines = self.below(name), list(describe.describe_embedding(embed))
        if "tokens.weight" not in tensors:
            lines.insert(0, "the target's table")
        facts: dict[str, object] = {"position": None, "allows": None}
        if embed.position is not None:
            facts["position"] = embed.position.kind
            if self.config.decoder is not None and name == "embed":
                lines += describe.describe_allowed(embed.position.kind)
                facts["allows"] = describe.ENCODING_SUPPORT[embed.position.kind]._asdict()
        return _node("embedding", title, lines, tensors, facts=facts)

    def stack(self, side: str, stack: StackConfig) -> TreeNode:
        kinds: dict[str, list[int]] = {}
        for index in range(stack.num_layers):
            kinds.setdefault(stack.layer_type(index), []).append(index)
        children = [self.layers(side, stack, letter, indices) for letter, indices in kinds.items()]
        if stack.final_norm:
            norm = stack.layer_config(stack.num_layers - 1).norm
            children.append(
                _node("norm", f"norm at the end: {describe.describe_norm(norm)}", [], self.below(f"{side}.norm"))
            )
        lines = [describe.NORM_POSITIONS[stack.norm_position]]
        if stack.residual_scale != 1.0:
            lines.append(f"what a branch adds is multiplied by {stack.residual_scale:g}")
        if len(kinds) > 1:
            lines.append(f"layers of kinds {stack.layer_pattern}, over and over")
        width = self.config.hidden_size if side == "decoder" else encoder_hidden_size(self.config)
        title = f"{side}, {format_count(stack.num_layers, 'layer')} of width {width:,}"
        facts = {"layers": stack.num_layers, "pattern": stack.layer_pattern, "norm_place": stack.norm_position}
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
            elif name == "cross" and layer.cross_attention is not None:
                parts.append(self.attention(side, layer.cross_attention, tensors, {}, times, cross=True))
            elif name == "mlp":
                what, lines = describe.describe_mlp(layer.mlp)
                parts.append(
                    _node("mlp", what, lines, tensors, times=times, facts={"hidden": layer.mlp.intermediate_size})
                )
            else:
                parts.append(_node("norm", f"{title}: {describe.describe_norm(layer.norm)}", [], tensors, times=times))
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
        kind = "source" if cross else describe.encoding_kind(mixer.position)
        lines = list(describe.describe_attention(mixer, dim))
        cached = side == "decoder" and (kind != "none" or config.embedding.position is None)
        if cached:
            lines += describe.describe_allowed(kind)
        facts: dict[str, object] = {
            "heads": mixer.num_heads,
            "kv_heads": kv_heads,
            "head_dim": dim,
            "value_dim": mixer.value_dim or dim,
            "window": window,
            "position": kind,
            "allows": describe.ENCODING_SUPPORT[kind]._asdict() if cached else None,
        }
        part = "cross" if cross else "attention"
        return _node(part, title, lines, tensors, times=times, once=shared, facts=facts)

    def shared(self, side: str, letter: str) -> Shapes:
        """What layers of a kind have together: a table of biases, parameters of positions of one's own."""
        table, own = f"{side}.relative_bias.{letter}", self.below(f"{side}.positions.{letter}")
        found = {"relative (shared)": self.shapes[table]} if table in self.shapes else {}
        return {**found, **{f"positions.{name}": shape for name, shape in own.items()}}


def _order(stack: StackConfig, layer: LayerConfig) -> Iterator[tuple[str, str]]:
    """(module, title of a norm) of a layer, in the order in which they are computed."""
    behind = stack.norm_position in ("post", "after")
    for half, norm, what in (
        ("attention", "norm1", "attention"),
        ("cross", "norm_cross", "cross-attention"),
        ("mlp", "norm2", "the MLP"),
    ):
        if half == "cross" and layer.cross_attention is None:
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
    asked = CacheConfig(max_num_seqs=1, max_seq_len=config.max_seq_len, max_source_len=source, dtype=dtype)
    made = build_groups(attention_specs(config), asked)
    children = [_group(config, number, group) for number, group in enumerate(made)]
    token = sum(each.facts["bytes_per_token"] for each in children if not each.facts["cross"])  # type: ignore[misc]
    said = f"{dtype}, a new token of a row takes {token:,} bytes"
    if source:
        of_source = sum(each.facts["bytes_per_token"] for each in children if each.facts["cross"])  # type: ignore[misc]
        said += f", one of its source {of_source:,}"
    title = f"cache, {format_count(len(children), 'group')} of layers that share a table"
    return TreeNode("cache", title, (said,), {}, None, {"dtype": dtype}, tuple(children))


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
        "cross": mixer.is_cross_attention,
        "window": mixer.window,
        "bytes_per_token": size.per_token_payload,
        "bytes_per_row": size.per_seq,
    }
    what = "cross-attention of layers" if mixer.is_cross_attention else "layers" if len(layers) > 1 else "layer"
    return TreeNode("group", f"group {number}: {what} {fold_indices(layers)}", lines, {}, None, facts)
