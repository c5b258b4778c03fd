"""The page of refusals lists every error by which kvad refuses what it cannot do, each with its reason. No torch."""

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = "docs/reference/refusals.md"
# An error with one of these phrases is a refusal. Those of single model families are on docs/reference/models.md.
PHRASES = (
    "not supported", "not support", "cannot be combined", "cannot be renumbered", "cannot be divided",
    "cannot be traced", "cannot be saved", "to be summarized", "cannot be prepared", "cannot be checked",
    "cannot express", "cannot compute gradients", "cannot continue a text", "cannot resume with", "for storage only",
    "not available yet", "needs a decoder", "has no cache", "has no meaning", "has no tensor like", "kvad reads only",
)  # fmt: skip
REFUSAL = re.compile("|".join(map(re.escape, PHRASES)))
FAMILIES = "kvad/checkpoint/families/"


def texts(file: Path) -> set[str]:
    """Return the strings of a file but for docstrings and assertions, with … for what is filled in."""
    tree, inner = ast.parse(file.read_text(encoding="utf-8")), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inner.update(map(id, node.values))
        elif isinstance(node, ast.Expr):
            inner.add(id(node.value))
        elif isinstance(node, ast.Assert):  # a fault of kvad, no refusal
            inner.add(id(node.msg))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) and id(node) not in inner:
            parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            found.add("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            found.add(node.value)
    return {re.sub("(… ?)+$", "…", text) for text in found}


def rows_of(page: str) -> dict[str, str]:
    """Return the reason of every message of a page."""
    rows = re.findall(r"^\| `(.+?)` \| (.*?) \|$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert len({message for message, _ in rows}) == len(rows), "a message is listed twice"
    return dict(rows)


@functools.cache
def messages() -> dict[str, str]:
    """Return the file of every string of kvad, without those of model families."""
    files = sorted((ROOT / "kvad").rglob("*.py"))
    names = {file: file.relative_to(ROOT).as_posix() for file in files}
    return {text: name for file, name in names.items() if not name.startswith(FAMILIES) for text in texts(file)}


def test_every_refusal_is_listed_with_its_reason():
    rows, found = rows_of(PAGE), messages()
    missing = sorted(f"{found[text]}: {text}" for text in found if REFUSAL.search(text) and text not in rows)
    assert not missing, f"add a row with the reason to {PAGE}: {missing}"
    assert [text for text, reason in rows.items() if len(reason.split()) < 4] == []


def test_every_row_is_an_error_of_kvad():
    stale = sorted(set(rows_of(PAGE)) - set(messages()))
    assert not stale, f"no error says this any more, remove the row from {PAGE}: {stale}"


def test_a_new_refusal_is_found(tmp_path):
    (tmp_path / "a.py").write_text('"""Not supported."""\nraise E(f"x: {y} is not supported on " f"{z}")\n')
    assert texts(tmp_path / "a.py") == {"x: … is not supported on …"}
