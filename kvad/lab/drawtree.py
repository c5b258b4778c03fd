"""A tree of ``lab/tree.py`` drawn: as text of 100 columns, as SVG, as a Mermaid flowchart, as JSON.

Every drawing says the same: titles, lines, shapes and counts; nothing is cut off, what is long goes on in the next
line.  The SVG stands alone and follows the reader's light or dark scheme.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from xml.sax.saxutils import escape

from kvad.lab.tree import TreeNode

__all__ = ["tree_to_json", "tree_to_mermaid", "tree_to_svg", "tree_to_text"]

WIDTH = 100  # columns of text


# ---------------------------------------------------------------- text


def tree_to_text(root: TreeNode) -> str:
    """Without a newline at its end."""
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
    """``124,439,808`` and what part of the model that is."""
    if not node.parameters:
        return ""
    return f"{node.parameters:,} {100 * node.parameters / max(whole, 1):>5.1f}%"


def _shapes(node: TreeNode) -> list[str]:
    """``q [512, 512]  k [512, 512]``: a matrix under its module's name, its bias beside it."""
    said = []
    for name, shape in node.tensors.items():
        said.append(f"{name.removesuffix('.weight')}\N{NO-BREAK SPACE}{'x'.join(map(str, shape))}")
    return [", ".join(said)] if said else []


def _wrapped(line: str, columns: int, indent: str = "") -> list[str]:
    """A name stays with its shape."""
    pieces = textwrap.wrap(line, columns, subsequent_indent=indent)
    return [piece.replace("\N{NO-BREAK SPACE}", " ") for piece in pieces]


# ---------------------------------------------------------------- SVG

WIDE, INDENT, LINE, PAD, GAP = 980, 26, 17, 8, 8  # pixels
CHARACTER, TITLE = 7.3, 7.9  # pixels of a character, and of a title's

PARTS = {  # part -> colour of its bar on a light and on a dark page
    "model": ("#5b6472", "#9aa5b5"),
    "embedding": ("#1f7a8c", "#4fb3c6"),
    "stack": ("#5b6472", "#9aa5b5"),
    "layers": ("#5b6472", "#9aa5b5"),
    "norm": ("#8a8f98", "#8791a0"),
    "attention": ("#2457c5", "#7aa2ff"),
    "cross": ("#7a3fb8", "#bf94f0"),
    "mlp": ("#b3541e", "#e79a63"),
    "head": ("#2c7a3f", "#72c287"),
    "cache": ("#a0284b", "#f07a9b"),
    "group": ("#a0284b", "#f07a9b"),
}
FONT = 'ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", "Liberation Mono", monospace'
SCHEME = {  # selector: what it has -> light, dark
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
    """Boxes below one another, indented as they hang together; the bar to the left says what a part is."""
    boxes: list[str] = []
    high = _box(root, GAP, GAP, root.parameters or 0, boxes)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDE}" height="{high}" viewBox="0 0 {WIDE} {high}" '
        f'role="img"><title>{_xml(root.title)}</title><style>{_style()}</style><rect class="page" width="{WIDE}" '
        f'height="{high}"/>'
    )
    return "\n".join([head, *boxes, "</svg>"]) + "\n"


def _box(node: TreeNode, x: int, y: int, whole: int, out: list[str]) -> int:
    """Draw a node and what is below it; where the next may begin."""
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


def _xml(said: str) -> str:
    return escape(said, {'"': "&quot;"})


# ---------------------------------------------------------------- Mermaid


def tree_to_mermaid(root: TreeNode) -> str:
    """A flowchart, from left to right; GitHub and its kind draw it from a block of three backticks and ``mermaid``."""
    return "\n".join(["flowchart LR", *_mermaid(root, "n0", root.parameters or 0), *CLASSES]) + "\n"


CLASSES = [f"  classDef {part} stroke:{light},stroke-width:2px" for part, (light, _) in PARTS.items()]


def _mermaid(node: TreeNode, name: str, whole: int) -> Iterator[str]:
    count = _share(node, whole)
    said = [f"<b>{_quoted(node.title)}</b>", *([" ".join(count.split())] if count else [])]
    said += [_quoted(line) for line in (*node.lines, *_shapes(node))]
    yield f'  {name}["{"<br/>".join(said)}"]:::{node.part}'
    for number, child in enumerate(node.children):
        yield from _mermaid(child, f"{name}_{number}", whole)
        yield f"  {name} --> {name}_{number}"


def _quoted(said: str) -> str:
    """As Mermaid has it: entities by name or number between # and ;."""
    said = said.replace("\N{NO-BREAK SPACE}", " ")
    codes = {"#": "#35;", '"': "#quot;", "<": "#lt;", ">": "#gt;", "`": "#96;"}
    return "".join(codes.get(char, char) for char in said)


# ---------------------------------------------------------------- JSON


def tree_to_json(node: TreeNode) -> Mapping[str, object]:
    """``{"part", "title", "lines", "tensors": {name: shape}, "parameters", "facts", "children"}``, nested."""
    return {
        "part": node.part,
        "title": node.title,
        "lines": list(node.lines),
        "tensors": {name: list(shape) for name, shape in node.tensors.items()},
        "parameters": node.parameters,
        "facts": dict(node.facts),
        "children": [tree_to_json(child) for child in node.children],
    }
