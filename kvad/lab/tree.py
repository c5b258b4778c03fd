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

from kvad.cache.sizing import CacheConfig, Group, group_bytes, groups
from kvad.cache.weights import num_parameters, weight_shapes
from kvad.config import Attention, Embedding, Layer, ModelConfig, Stack, head_dim, mixers, source_width
from kvad.errors import a, counted
from kvad.lab import describe

__all__ = ["Node", "build", "folded"]

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Node:
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
    children: tuple[Node, ...] = ()


def build(config: ModelConfig, name: str, *, dtype: str = "float32") -> Node:
    """``dtype``: of the cache, for its bytes.  ConfigError for layers that cannot be cached."""
    tree = _Builder(config)
    source = config.source
    children = [tree.embedding("embed", "embedding" if source is None else "embedding of the target", config.embed)]
    if source is not None:
        children.append(tree.embedding("source", "embedding of the source", source.embed))
    for side, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        if stack is not None:
            children.append(tree.stack(side, stack))
    title, lines = describe.head(config)
    children.append(_node("head", title, lines, tree.below("head"), facts={"kind": config.head.kind}))
    children.append(_cache(config, dtype))
    longest = counted(config.limit, "token") + ("" if source is None else f", of {source.limit:,} of source")
    said = f"width {config.width:,}, vocabulary {config.vocab:,}, rows of at most {longest}"
    facts = {"kind": config.kind, "width": config.width, "vocab": config.vocab, "limit": config.limit}
    title = f"{name}, {a(config.kind)}"
    return Node("model", title, (said,), {}, num_parameters(config), facts, tuple(children))


def folded(numbers: Iterable[int]) -> str:
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
    children: Iterable[Node] = (),
    facts: Mapping[str, object] | None = None,
) -> Node:
    """``once``: tensors that all ``times`` layers share."""
    inner, own, shared = tuple(children), tensors or {}, once or {}
    total = times * _count(own) + _count(shared) + sum(child.parameters or 0 for child in inner)
    return Node(part, title, tuple(lines), {**own, **shared}, total, facts or {}, inner)


def _count(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


class _Builder:
    def __init__(self, config: ModelConfig) -> None:
        self.config, self.shapes = config, weight_shapes(config)

    def below(self, module: str) -> Shapes:
        """The tensors of a module, under what is left of their names."""
        above = f"{module}."
        return {name.removeprefix(above): shape for name, shape in self.shapes.items() if name.startswith(above)}

    def embedding(self, name: str, title: str, embed: Embedding) -> Node:
        tensors, lines = self.below(name), list(describe.embedding(embed))
        if "tokens.weight" not in tensors:
            lines.insert(0, "the target's table")
        facts: dict[str, object] = {"position": None, "allows": None}
        if embed.position is not None:
            facts["position"] = embed.position.kind
            if self.config.decoder is not None and name == "embed":
                lines += describe.allows(embed.position.kind)
                facts["allows"] = describe.ALLOWS[embed.position.kind]._asdict()
        return _node("embedding", title, lines, tensors, facts=facts)

    def stack(self, side: str, stack: Stack) -> Node:
        kinds: dict[str, list[int]] = {}
        for index in range(stack.layers):
            kinds.setdefault(stack.kind_of(index), []).append(index)
        children = [self.layers(side, stack, letter, indices) for letter, indices in kinds.items()]
        if stack.final_norm:
            norm = stack.layer(stack.layers - 1).norm
            children.append(_node("norm", f"norm at the end: {describe.norm(norm)}", [], self.below(f"{side}.norm")))
        lines = [describe.PLACES[stack.norm_place]]
        if stack.residual != 1.0:
            lines.append(f"what a branch adds is multiplied by {stack.residual:g}")
        if len(kinds) > 1:
            lines.append(f"layers of kinds {stack.pattern}, over and over")
        width = self.config.width if side == "decoder" else source_width(self.config)
        title = f"{side}, {counted(stack.layers, 'layer')} of width {width:,}"
        facts = {"layers": stack.layers, "pattern": stack.pattern, "norm_place": stack.norm_place}
        return _node("stack", title, lines, children=children, facts=facts)

    def layers(self, side: str, stack: Stack, letter: str, indices: list[int]) -> Node:
        layer, times = stack.kinds[letter], len(indices)
        first = f"{side}.layers.{indices[0]}"
        parts: list[Node] = []
        for name, title in _order(stack, layer):
            tensors = self.below(f"{first}.{name}")
            if name == "mixer":
                shared = self.shared(side, letter)
                parts.append(self.attention(side, layer.mixer, tensors, shared, times))
            elif name == "cross" and layer.cross is not None:
                parts.append(self.attention(side, layer.cross, tensors, {}, times, cross=True))
            elif name == "mlp":
                what, lines = describe.mlp(layer.mlp)
                parts.append(_node("mlp", what, lines, tensors, times=times, facts={"hidden": layer.mlp.hidden}))
            else:
                parts.append(_node("norm", f"{title}: {describe.norm(layer.norm)}", [], tensors, times=times))
        of_kind = f" (of kind {letter})" if len(stack.kinds) > 1 else ""
        title = f"{'layer' if times == 1 else 'layers'} {folded(indices)}{of_kind}"
        per_layer = sum(_count(self.below(f"{first}.{name}")) for name, _ in _order(stack, layer))
        lines = [f"{counted(per_layer, 'parameter')} each"] if times > 1 else []
        return _node("layers", title, lines, children=parts, facts={"layers": indices, "kind": letter})

    def attention(
        self, side: str, mixer: Attention, tensors: Shapes, shared: Shapes, times: int, *, cross: bool = False
    ) -> Node:
        config = self.config
        dim, kv_heads = head_dim(config, mixer), mixer.kv_heads or mixer.heads
        limit = config.limit if side == "decoder" or config.source is None else config.source.limit
        window = mixer.window if mixer.window is not None and mixer.window < limit else None
        title = "cross-attention" if cross else f"attention, {'causal' if mixer.causal else 'both ways'}"
        if window is not None:
            title += f", a window of {window:,}"
        kind = "source" if cross else describe.kind_of(mixer.position)
        lines = list(describe.attention(mixer, dim))
        cached = side == "decoder" and (kind != "none" or config.embed.position is None)
        if cached:
            lines += describe.allows(kind)
        facts: dict[str, object] = {
            "heads": mixer.heads,
            "kv_heads": kv_heads,
            "head_dim": dim,
            "value_dim": mixer.value_dim or dim,
            "window": window,
            "position": kind,
            "allows": describe.ALLOWS[kind]._asdict() if cached else None,
        }
        part = "cross" if cross else "attention"
        return _node(part, title, lines, tensors, times=times, once=shared, facts=facts)

    def shared(self, side: str, letter: str) -> Shapes:
        """What layers of a kind have together: a table of biases, parameters of positions of one's own."""
        table, own = f"{side}.relative.{letter}", self.below(f"{side}.positions.{letter}")
        found = {"relative (shared)": self.shapes[table]} if table in self.shapes else {}
        return {**found, **{f"positions.{name}": shape for name, shape in own.items()}}


def _order(stack: Stack, layer: Layer) -> Iterator[tuple[str, str]]:
    """(module, title of a norm) of a layer, in the order in which they are computed."""
    behind = stack.norm_place in ("post", "after")
    for half, norm, what in (
        ("mixer", "norm1", "attention"),
        ("cross", "norm_cross", "cross-attention"),
        ("mlp", "norm2", "the MLP"),
    ):
        if half == "cross" and layer.cross is None:
            continue
        there = (norm != "norm1" or layer.first_norm) and not (norm == "norm2" and stack.norm_place == "parallel")
        both = stack.norm_place == "parallel" and norm == "norm1"
        if there and not behind:
            yield norm, f"norm before {'attention and the MLP' if both else what}"
        yield half, ""
        if there and behind:
            yield norm, f"norm after {what}"
        if stack.norm_place == "sandwich":
            yield f"{norm}_after", f"norm after {what}"


# ---------------------------------------------------------------- the cache


def _cache(config: ModelConfig, dtype: str) -> Node:
    if config.decoder is None:
        return Node("cache", "no cache", ("an encoder keeps nothing between two steps",), parameters=None)
    source = 0 if config.source is None else config.source.limit
    asked = CacheConfig(rows=1, capacity=config.limit, source_capacity=source, dtype=dtype)
    made = groups(mixers(config), asked)
    children = [_group(config, number, group) for number, group in enumerate(made)]
    token = sum(each.facts["bytes_per_token"] for each in children if not each.facts["cross"])  # type: ignore[misc]
    said = f"{dtype}, a new token of a row takes {token:,} bytes"
    if source:
        of_source = sum(each.facts["bytes_per_token"] for each in children if each.facts["cross"])  # type: ignore[misc]
        said += f", one of its source {of_source:,}"
    title = f"cache, {counted(len(children), 'group')} of layers that share a table"
    return Node("cache", title, (said,), {}, None, {"dtype": dtype}, tuple(children))


def _group(config: ModelConfig, number: int, group: Group) -> Node:
    assert config.decoder is not None
    size, mixer = group_bytes(group), group.mixer
    layers = [index % config.decoder.layers for index in group.layers]
    reach = (
        "the source" if mixer.cross else "all tokens" if mixer.window is None else f"the last {mixer.window:,} tokens"
    )
    dims = f"{mixer.head_dim}" if mixer.head_dim == mixer.value_dim else f"{mixer.head_dim} + {mixer.value_dim}"
    row = "source" if mixer.cross else "row"
    length = group.blocks_per_row * group.block_size
    lines = (
        f"{counted(mixer.kv_heads, 'key-value head')} of {dims}, of {reach}",
        f"{size.per_token_payload:,} bytes per token",
        f"{size.per_row:,} bytes of the longest {row}, {counted(length, 'slot')} with their positions",
    )
    facts = {
        "layers": layers,
        "cross": mixer.cross,
        "window": mixer.window,
        "bytes_per_token": size.per_token_payload,
        "bytes_per_row": size.per_row,
    }
    what = "cross-attention of layers" if mixer.cross else "layers" if len(layers) > 1 else "layer"
    return Node("group", f"group {number}: {what} {folded(layers)}", lines, {}, None, facts)
