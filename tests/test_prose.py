"""Words that kvad's code and pages do not use, and the first words of docstrings."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "kvad").rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]

PHRASES = re.compile(
    r"\b(anew|whence|whoever|nobody|somebody|(?:is|are|was|were) (?:said|told|heard)|goes on|lies beside|stands beside"
    r"|gives way|gave way|of its own accord|in our words|to the bit)\b",
    re.IGNORECASE,
)
OPENINGS = {"What", "Of", "Whether", "How", "Where", "Which", "As", "By", "Who", "Whose", "Whom"}
NAME_WORDS = re.compile(
    r"(said|told|tell|hear|heard|kept|seats?|seating|settled?|standing|whence|posed|noted|lent|attic|shelf|spool|desk|saying|forgo"
    r"|waking|descent|descend|gave|heed|beside|lays?|laid|nobody|theirs|ours|came|begun|lanes?|ledger)",
    re.IGNORECASE,
)


def phrases(text):
    """Return the banned phrases of a text as (line number, line)."""
    return [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if PHRASES.search(line)]


def openings(tree):
    """Return the first lines of docstrings that begin with a question word or a preposition."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    docs = [doc for node in ast.walk(tree) if isinstance(node, kinds) and (doc := ast.get_docstring(node))]
    return [doc.splitlines()[0] for doc in docs if re.split(r"[\s,;:]", doc, maxsplit=1)[0] in OPENINGS]


def names(tree):
    """Return the names that a module defines or assigns and that contain a banned word."""
    defined = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            defined.add(node.id if isinstance(node, ast.Name) else node.attr)
    words = {name: re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name) for name in defined}
    return sorted(name for name, parts in words.items() if any(NAME_WORDS.fullmatch(part) for part in parts))


@pytest.mark.parametrize("path", [*SOURCES, *PAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_plain_words(path):
    text = path.read_text("utf-8")
    assert not phrases(text)
    if path.suffix == ".py":
        tree = ast.parse(text)
        assert not openings(tree)
        assert not names(tree)


def test_checks_find_banned_words():
    assert phrases("x\nThe row goes on.") == [(2, "The row goes on.")]
    tree = ast.parse('def told():\n  """What was told."""\n  self.old_seat = lane = 1\ndef f(ledger): ...')
    assert openings(tree) == ["What was told."]
    assert names(tree) == ["lane", "ledger", "old_seat", "told"]
