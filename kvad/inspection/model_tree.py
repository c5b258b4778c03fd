"""A model's architecture as a tree of nodes, from its configuration alone: parts, sizes, cache groups. No torch.

    model
      embedding
      encoder, decoder
        layers 0, 2, 4 (of kind L)        equal layers are one node
          norm, attention, norm, cross-attention, norm, MLP or experts        in the order of computation
        norm
      head
      cache                               cache groups

Every parameter of ``kvad.config.parameter_shapes.weight_shapes`` is counted in exactly one leaf: a node's count is
that of its own tensors, in all layers that it represents, plus its children's. The tree is printed as text of 100
columns, Mermaid, JSON or boxes for a figure, all with the same titles, lines, shapes and counts; long lines are
wrapped, never truncated.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field

from kvad import config as cfg
from kvad.cache import CacheConfig, CacheGroup, build_groups, group_bytes
from kvad.config import ModelConfig, attention_dims, attention_specs, encoder_hidden_size
from kvad.errors import format_count, with_article
from kvad.inspection import component_text
from kvad.inspection.component_text import ENCODING_SUPPORT, describe_allowed, describe_norm
from kvad.inspection.plot import Box

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class TreeNode:
    """A node of the tree."""

    part: str  # a key of PART_COLORS
    title: str
    lines: tuple[str, ...] = ()  # description
    tensors: Shapes = field(default_factory=dict)  # its own, in one of the layers that it represents
    parameters: int | None = 0  # of all of these layers, with its children's; None if it has none
    facts: Mapping[str, object] = field(default_factory=dict)  # values for JSON
    children: tuple[TreeNode, ...] = ()


def build_model_tree(config: ModelConfig, name: str, *, dtype: str = "float32") -> TreeNode:
    """Build the tree; ``dtype`` is the cache's, for its bytes.

    ConfigError for layers that cannot be cached.
    """
    tree = _Builder(config)
    source = config.encoder_input
    title = "embedding" if source is None else "embedding of the target"
    children = [tree.embedding("embedding", title, config.embedding)]
    if source is not None:
        children.append(tree.embedding("encoder_embedding", "embedding of the source", source.embedding))
    for side, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        if stack is not None:
            children.append(tree.stack(side, stack))
    title, lines = component_text.describe_head(config)
    children.append(_node("head", title, lines, tree.below("head"), facts={"kind": config.head.kind}))
    children.append(_cache(config, dtype))
    longest = format_count(config.max_seq_len, "token")
    longest += "" if source is None else f", of {source.max_seq_len:,} of source"
    text = f"width {config.hidden_size:,}, vocabulary {config.vocab_size:,}, rows of at most {longest}"
    facts = {name: getattr(config, name) for name in ("kind", "hidden_size", "vocab_size", "max_seq_len")}
    title = f"{name}, {with_article(config.kind)}"
    return _node("model", title, [text], children=children, facts=facts)


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
    return sum(map(math.prod, shapes.values()))


class _Builder:
    def __init__(self, config: ModelConfig) -> None:
        self.config, self.shapes = config, cfg.parameter_shapes.weight_shapes(config)

    def below(self, module: str) -> Shapes:
        """Return the tensors of a module, without its prefix."""
        above = f"{module}."
        return {name.removeprefix(above): shape for name, shape in self.shapes.items() if name.startswith(above)}

    def embedding(self, name: str, title: str, embed: cfg.EmbeddingConfig) -> TreeNode:
        tensors, lines = self.below(name), list(component_text.describe_embedding(embed))
        if "tokens.weight" not in tensors:
            lines.insert(0, "the target's table")
        facts: dict[str, object] = {"position": None, "allows": None}
        if embed.position is not None:
            facts["position"] = embed.position.kind
            if self.config.decoder is not None and name == "embedding":
                lines += describe_allowed(embed.position.kind)
                facts["allows"] = ENCODING_SUPPORT[embed.position.kind]._asdict()
        return _node("embedding", title, lines, tensors, facts=facts)

    def stack(self, side: str, stack: cfg.StackConfig) -> TreeNode:
        kinds: dict[str, list[int]] = {}
        for index in range(stack.num_layers):
            kinds.setdefault(stack.layer_type(index), []).append(index)
        children = [self.layers(side, stack, letter, indices) for letter, indices in kinds.items()]
        if stack.final_norm:
            norm = stack.layer_config(stack.num_layers - 1).norm
            children.append(_node("norm", f"norm at the end: {describe_norm(norm)}", [], self.below(f"{side}.norm")))
        lines = [component_text.NORM_POSITIONS[stack.norm_position]]
        if stack.residual_scale != 1.0:
            lines.append(f"what a branch adds is multiplied by {stack.residual_scale:g}")
        if len(kinds) > 1:
            lines.append(f"layers of kinds {stack.layer_pattern}, over and over")
        width = self.config.hidden_size if side == "decoder" else encoder_hidden_size(self.config)
        title = f"{side}, {format_count(stack.num_layers, 'layer')} of width {width:,}"
        facts = {name: getattr(stack, name) for name in ("num_layers", "layer_pattern", "norm_position")}
        return _node("stack", title, lines, children=children, facts=facts)

    def layers(self, side: str, stack: cfg.StackConfig, letter: str, indices: list[int]) -> TreeNode:
        layer, times = stack.layer_types[letter], len({stack.parameter_index(index) for index in indices})
        first = f"{side}.layers.{stack.parameter_index(indices[0])}"
        parts: list[TreeNode] = []
        for name, title in _order(stack, layer):
            tensors = self.below(f"{first}.{name}")
            if name == "attention":
                table = f"{side}.relative_bias.{letter}"  # tensors that layers of a kind share
                shared = {"relative (shared)": self.shapes[table]} if table in self.shapes else {}
                custom = self.below(f"{side}.positions.{letter}")
                shared |= {f"positions.{tensor}": shape for tensor, shape in custom.items()}
                rows = self.below(f"{side}.relative_embedding.{letter}")
                shared |= {f"distances.{tensor} (shared)": shape for tensor, shape in rows.items()}
                mixer = layer.attention
                if isinstance(mixer, cfg.AttentionConfig):
                    parts.append(self.attention(side, mixer, tensors, shared, times))
                else:
                    title, lines = component_text.describe_recurrent(mixer)
                    parts.append(_node("attention", title, lines, tensors, times=times, facts=asdict(mixer)))
            elif name == "cross_attention" and layer.cross_attention is not None:
                parts.append(self.attention(side, layer.cross_attention, tensors, {}, times, cross=True))
            elif name == "mlp":
                mlp_title, mlp_lines = component_text.describe_mlp(layer.mlp)
                size = {"intermediate_size": layer.mlp.intermediate_size}
                parts.append(_node("mlp", mlp_title, mlp_lines, tensors, times=times, facts=size))
            else:
                parts.append(_node("norm", f"{title}: {describe_norm(layer.norm)}", [], tensors, times=times))
        if layer.output_scale:
            scale = {"output_scale": self.shapes[f"{first}.output_scale"]}
            parts.append(_node("norm", "learned scale of the output", [], scale, times=times))
        of_kind = f" (of kind {letter})" if len(stack.layer_types) > 1 else ""
        title = f"{'layer' if len(indices) == 1 else 'layers'} {fold_indices(indices)}{of_kind}"
        lines = [f"{format_count(_count(self.below(first)), 'parameter')} each"] if times > 1 else []
        if times < len(indices):
            lines.append(f"they share {format_count(times, 'set')} of parameters")
        return _node("layers", title, lines, children=parts, facts={"layers": indices, "kind": letter})

    def attention(
        self, side: str, mixer: cfg.AttentionConfig, tensors: Shapes, shared: Shapes, times: int, *, cross: bool = False
    ) -> TreeNode:
        config = self.config
        _, kv_heads, dim, value_dim = attention_dims(config, mixer)
        source = config.encoder_input if side == "encoder" else None
        limit = config.max_seq_len if source is None else source.max_seq_len
        window = mixer.window if mixer.window is not None and mixer.window < limit else None
        title = "cross-attention" if cross else f"attention, {'causal' if mixer.causal else 'both ways'}"
        if window is not None:
            title += f", a window of {window:,}"
        position_kind = "none" if mixer.position is None else mixer.position.kind
        kind = "source" if cross else position_kind
        lines = list(component_text.describe_attention(mixer, dim))
        cached = side == "decoder" and (kind != "none" or config.embedding.position is None)
        if cached:
            lines += describe_allowed(kind)
        facts: dict[str, object] = {
            "num_heads": mixer.num_heads,
            "num_kv_heads": kv_heads,
            "head_dim": dim,
            "value_dim": value_dim,
            "values_in_keys": mixer.latent is not None,
            "window": window,
            "position": kind,
            "allows": ENCODING_SUPPORT[kind]._asdict() if cached else None,
        }
        part = "cross_attention" if cross else "attention"
        return _node(part, title, lines, tensors, times=times, once=shared, facts=facts)


def _order(stack: cfg.StackConfig, layer: cfg.LayerConfig) -> Iterator[tuple[str, str]]:
    """Yield (module, title of a norm) of a layer in order of computation."""
    behind = stack.norm_position in ("post", "after")
    is_parallel = stack.norm_position == "parallel"  # one norm for attention and the MLP
    for half, norm, what in (
        ("attention", "norm1", "attention and the MLP" if is_parallel else "attention"),
        ("cross_attention", "norm_cross", "cross-attention"),
        ("mlp", "norm2", "the MLP"),
    ):
        if half == "cross_attention" and layer.cross_attention is None:
            continue
        has_norm = layer.pre_attention_norm if norm == "norm1" else not (is_parallel and norm == "norm2")
        if has_norm and not behind:
            yield norm, f"norm before {what}"
        yield half, ""
        if has_norm and behind:
            yield norm, f"norm after {what}"
        if stack.norm_position == "sandwich":
            yield f"{norm}_after", f"norm after {what}"


def _cache(config: ModelConfig, dtype: str) -> TreeNode:
    if config.decoder is None:
        return TreeNode("cache", "no cache", ("an encoder keeps nothing between two steps",), parameters=None)
    source = 0 if config.encoder_input is None else config.encoder_input.max_seq_len
    cache_config = CacheConfig(max_num_seqs=1, max_seq_len=config.max_seq_len, max_source_len=source, dtype=dtype)
    groups = build_groups(attention_specs(config), cache_config)
    children = [_group(config, number, group) for number, group in enumerate(groups)]
    token_bytes = {False: 0, True: 0}  # by is_cross_attention
    for group in groups:
        token_bytes[group.spec.is_cross_attention] += group_bytes(group).per_token_payload
    text = f"{dtype}, a new token of a row takes {token_bytes[False]:,} bytes"
    if source:
        text += f", one of its source {token_bytes[True]:,}"
    title = f"cache, {format_count(len(children), 'group')} of layers that share a table"
    return TreeNode("cache", title, (text,), {}, None, {"dtype": dtype}, tuple(children))


def _group(config: ModelConfig, number: int, group: CacheGroup) -> TreeNode:
    assert config.decoder is not None
    size, mixer = group_bytes(group), group.spec
    layers = [index % config.decoder.num_layers for index in group.layers]
    visible = "all tokens" if mixer.window is None else f"the last {mixer.window:,} tokens"
    visible = "the source" if mixer.is_cross_attention else visible
    row = "source" if mixer.is_cross_attention else "row"
    length = group.max_blocks_per_seq * group.block_size
    held, dims = format_count(mixer.num_kv_heads, "key-value head"), mixer.dims
    if mixer.is_state:
        held, dims = "state", f"{mixer.kv_size}"
    lines = (
        f"{held} of {dims}, of {visible}",
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


WIDTH = 100  # columns


def tree_to_text(root: TreeNode) -> str:
    """Format the tree as text, without a final newline."""
    return "\n".join(line.rstrip() for line in _text(root, "", "", root.parameters or 0))


def _text(node: TreeNode, first: str, below: str, total: int) -> Iterator[str]:
    stem = below + ("│  " if node.children else "   ")
    count = _share(node, total)
    title = textwrap.wrap(node.title, WIDTH - len(below) - len(count) - 2)
    yield f"{first}{title[0]}".ljust(WIDTH - len(count)) + count
    for line in (*title[1:], *_lines(node)):
        for piece in _wrapped(line, WIDTH - len(stem)):
            yield f"{stem}{piece}"
    for number, child in enumerate(node.children):
        last = number == len(node.children) - 1
        yield from _text(child, below + ("└─ " if last else "├─ "), below + ("   " if last else "│  "), total)


def _share(node: TreeNode, total: int) -> str:
    """Format ``124,439,808`` and its share of the model."""
    return f"{node.parameters:,} {100 * node.parameters / max(total, 1):>5.1f}%" if node.parameters else ""


def _lines(node: TreeNode) -> list[str]:
    """Return the lines, and ``q 512x512, k 512x512``: a matrix under its module's name, followed by its bias."""
    shapes = (
        f"{name.removesuffix('.weight')}\N{NO-BREAK SPACE}{'x'.join(map(str, shape))}"
        for name, shape in node.tensors.items()
    )
    return [*node.lines, ", ".join(shapes)] if node.tensors else [*node.lines]


def _wrapped(line: str, columns: int) -> list[str]:
    """Wrap a line; a name stays with its shape."""
    pieces = textwrap.wrap(line, columns, subsequent_indent="  ")
    return [piece.replace("\N{NO-BREAK SPACE}", " ") for piece in pieces]


PART_COLORS = {
    "model": "#5b6472",
    "embedding": "#1f7a8c",
    "stack": "#5b6472",
    "layers": "#5b6472",
    "norm": "#8a8f98",
    "attention": "#2457c5",
    "cross_attention": "#7a3fb8",
    "mlp": "#b3541e",
    "head": "#2c7a3f",
    "cache": "#a0284b",
    "group": "#a0284b",
}


def tree_to_boxes(root: TreeNode) -> list[Box]:
    """Flatten the tree to boxes, for ``kvad.inspection.plot.draw_boxes``."""

    def boxes(node: TreeNode, depth: int) -> Iterator[Box]:
        lines = [piece for line in _lines(node) for piece in _wrapped(line, WIDTH)]
        yield Box(depth, PART_COLORS[node.part], node.title, _share(node, root.parameters or 0), lines)
        for child in node.children:
            yield from boxes(child, depth + 1)

    return list(boxes(root, 0))


def tree_to_mermaid(root: TreeNode) -> str:
    """Build a flowchart from left to right, for a ``mermaid`` block in Markdown."""
    classes = [f"  classDef {part} stroke:{color},stroke-width:2px" for part, color in PART_COLORS.items()]
    return "\n".join(["flowchart LR", *_mermaid(root, "n0", root.parameters or 0), *classes]) + "\n"


def _mermaid(node: TreeNode, name: str, total: int) -> Iterator[str]:
    count = " ".join(_share(node, total).split())
    text = [f"<b>{_quoted(node.title)}</b>", *filter(None, [count]), *map(_quoted, _lines(node))]
    yield f'  {name}["{"<br/>".join(text)}"]:::{node.part}'
    for number, child in enumerate(node.children):
        yield from _mermaid(child, f"{name}_{number}", total)
        yield f"  {name} --> {name}_{number}"


def _quoted(text: str) -> str:
    """Escape for Mermaid: entities by name or number between # and ;."""
    codes = {"\N{NO-BREAK SPACE}": " ", "#": "#35;", '"': "#quot;", "<": "#lt;", ">": "#gt;", "`": "#96;"}
    return "".join(codes.get(char, char) for char in text)
