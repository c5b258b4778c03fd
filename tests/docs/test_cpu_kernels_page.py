"""The page of the native kernels lists every reason for which a model runs in PyTorch. No torch."""

import ast
from pathlib import Path

from tests.docs.test_refusals_page import ROOT, rows_of

PAGE = "docs/reference/cpu-kernels.md"
PROGRAM, LIBRARY, RUNNER = (
    ROOT / "kvad" / path
    for path in ("engine/execution/native_program.py", "ops/native/library.py", "engine/execution/model_runner.py")
)
CALLS = {"_require": 1, "Unsupported": 0, "LoadResult": 1, "_kind": 0}  # position of the reason


def template(node: ast.expr) -> str | None:
    """Return a string with … for what is filled in, or None for another expression."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def reasons(*files: Path) -> set[str]:
    found = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in CALLS:
                continue
            position = CALLS[node.func.id]
            text = template(node.args[position]) if len(node.args) > position else None
            if text:
                found.add(
                    f"{text} of the kind …" if node.func.id == "_kind" else text.replace("…=off", "KVAD_NATIVE=off")
                )
    return found


def test_every_reason_is_listed_and_no_other():
    in_runner = {text for text in rows_of(PAGE) if text.startswith("the engine has ")}
    assert len(in_runner) == 2 and all(f'"{text}"' in RUNNER.read_text(encoding="utf-8") for text in in_runner)
    found, listed = reasons(PROGRAM, LIBRARY), rows_of(PAGE).keys() - in_runner
    assert len(found) > 40
    assert not sorted(found - listed), f"add a row to {PAGE}"
    assert not sorted(listed - found), f"no reason says this any more, remove the row from {PAGE}"


def test_a_new_reason_is_found(tmp_path):
    (tmp_path / "a.py").write_text(
        '_require(x, "a")\nraise Unsupported(f"b {y}")\n_require(z, _kind("c", z))\n_require(q, r)\n'
    )
    assert reasons(tmp_path / "a.py") == {"a", "b …", "c of the kind …"}
