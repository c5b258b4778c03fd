"""Every pointer in the table of ``docs/reference/notes.md`` resolves, and every section of the notes has a row.

The five notes are not part of this project; ``HEADINGS`` is a transcript of their section headings (notes 001, 002
and 003 number nothing, or restart at 1, so the codes are ours). A section is covered by a row with its code or one
below it. Each check is shown to fail on a changed copy of the page.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "notes.md"
COMMANDS = "kvad/cli/main.py"
VERDICT = re.compile(r"(?:holds|corrected|measured otherwise)(?:: |$)|not built: ")
UNTESTED = re.compile(r"holds: as a reading")  # a command shows it, run by test_commands.py
ROW = re.compile(r"^\| *(\d{3})-([\d.]+)-(\d+) *\|")

HEADINGS: dict[str, dict[str, str]] = {
    "000": {
        "1": "Attention",
        "1.1": "Self Attention",
        "1.2": "Multi-Head Attention",
        "1.3": "KV-Cache",
        "2": "Positional Embedding",
    },
    "001": {
        "0": "LLM Core Concepts",
        "1": "The Transformer Architecture",
        "2": "The Self-Attention Mechanism",
        "2.1": "1. Input & Output",
        "2.2": "2. Weight Matrices (Parameters)",
        "2.3": "3. Mathematical Computation",
        "2.4": "4. Intermediate Results (Q, K, V)",
        "2.5": "5. Overall Purpose",
        "3": "Key-Value Cache",
    },
    "002": {
        "1": "Sequence to Sequence Model",
        "1.1": "1. Word Embedding",
        "1.2": "2. Positional Encoding",
        "2": "Encoder",
        "2.1": "1. Multi-Head Self Attention",
        "2.2": "2. Feed Forward Network",
        "2.3": "Layer Normalization",
        "3": "Decoder",
        "3.1": "1. Masked Multi-Head Self-Attention",
        "3.2": "2. Encoder-Decoder Attention",
        "3.3": "3. Feed Forward Network",
        "3.4": "4. ffn + LayerNorm",
        "4": "Train",
        "4.1": "1. Encoder",
        "4.2": "2. Decoder",
        "4.3": "3. Teacher Forcing",
        "5": "Attention",
        "6": "Teaching Forcing",
        "7": "Decoder の構造",
        "8": "Teacher Forcing",
        "8.1": "Residual Connection",
        "8.2": "Layer Normalization",
        "8.3": "Explanation: self-attention in matrices",
        "9": "Self-attention",
        "9.1": "Sequence Labeling",
        "10": "Multi-head Self-attention",
        "11": "Masked Multi-Head Self-Attention(遮罩多頭自我注意力)",
        "12": "Word Embedding",
        "13": "One-Hot Encoding",
        "14": "Positional Encoding",
        "14.1": "Final_embedding = Token_embedding + Positional_encoding",
        "14.2": "Transformer (w_i, theta_i)",
        "14.3": "T5",
        "14.4": "ALib",
        "15": "RoPE",
        "16": "KV Cache",
        "17": "Pre-Norm | Post-Norm",
    },
    "003": {
        "1": "Tokens & Embeddings",
        "2": "Scaled Dot-Product Attention",
        "3": "Causal Masking",
        "4": "Residuals & Layer Norm",
        "5": "Decoding & Sampling",
        "6": "KV Cache Complexity",
    },
    "004": {
        "1": "Section 1 — Core training (Next-token pretraining)",
        "1.1": "Overview",
        "1.2": "Why next-token prediction?",
        "1.3": "Data packing and context windows",
        "1.4": "From embeddings to logits (high level)",
        "2": "Section 2 — Autoregressive inference (generation)",
        "2.1": "Key difference: training vs inference",
        "2.2": "Causal masking",
        "2.3": "Why inference is expensive naively",
        "2.4": "Masked self-attention: what is computed and why",
        "2.5": "Q/K/V vs learned projection matrices",
        "2.6": "Numeric example (tiny, hand-computable)",
        "3": "Section 3 — Scaling Efficiency",
        "3.1": "Quadratic cost of attention",
        "3.2": "Sources of inefficiency at inference",
        "3.3": "High-level strategies to scale",
        "4": "Section 4 — KV cache (Key–Value cache) — theory & practice",
        "4.1": "Overview and intention",
        "4.2": "What is being cached (precisely)",
        "4.3": "Why caching gives a big speedup",
        "4.4": "Where caches live (memory) and shapes",
        "4.5": "Pseudocode: preallocated cache write and read",
        "4.6": "How attention uses the cache at a new step",
        "4.7": "Complexity analysis",
        "4.8": "Batching multiple streams / variable lengths",
        "4.9": "Masks and padding when using cache",
        "4.10": "Positional encodings and cache interactions",
        "4.11": "FP precision and numerical issues",
        "4.12": "Layer-wise cache: why each layer needs its own cache",
        "4.13": "When NOT to use a KV cache",
        "4.14": "Practical implementation patterns and optimizations",
        "4.15": "Multi-GPU and distributed inference",
        "4.16": "Cache eviction and memory management",
        "4.17": "Examples: typical cache sizes and VRAM impact",
        "4.18": "Debugging tips",
        "4.19": "Minimal end-to-end example (PyTorch-style, conceptual)",
        "4.20": "Final practical checklist (what to implement and test)",
    },
}


class Row(NamedTuple):
    note: str
    section: str
    number: int
    claim: str
    implements: str
    shows: str
    verdict: str

    @property
    def name(self) -> str:
        return f"{self.note}-{self.section}-{self.number}"


def parse(page: str) -> list[Row]:
    r"""Return the rows of the page; a ``|`` within a cell is written ``\|``."""
    rows = []
    for line in page.splitlines():
        if results := ROW.match(line):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            assert len(cells) == 5, f"{len(cells)} cells instead of 5: {line}"
            note, section, number = results.groups()
            rows.append(Row(note, section, int(number), *cells[1:]))
    return rows


@cache
def defined(path: Path) -> frozenset[str]:
    """Return every name that a module defines at top level, and ``Class.name`` for those in classes."""

    def names(body: list[ast.stmt], prefix: str = "") -> set[str]:
        out: set[str] = set()
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                out.add(prefix + node.name)
                if isinstance(node, ast.ClassDef):
                    out |= names(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                out |= {prefix + target.id for target in targets if isinstance(target, ast.Name)}
        return out

    return frozenset(names(ast.parse(path.read_text(encoding="utf-8")).body))


@cache
def commands() -> frozenset[str]:
    """Return the words that may follow ``kvad``: the keys of the command line's tables, read without an import."""
    tables = {
        ast.unparse(node.target): node.value
        for node in ast.parse((ROOT / COMMANDS).read_text(encoding="utf-8")).body
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict)
    }
    groups = [group for group in tables["GROUPS"].values if isinstance(group, ast.Dict)]
    keys = [key for table in (tables["COMMANDS"], *groups) for key in table.keys]
    return frozenset(key.value for key in keys if isinstance(key, ast.Constant))


def pointer_error(pointer: str) -> str | None:
    """Return the error of a pointer, or ``None``: a command, ``file:Symbol``, ``file::test`` or a file."""
    if pointer.startswith("kvad "):
        command = pointer.split()[1]
        return None if command in commands() else f"no command {command!r} in {COMMANDS}"
    if pointer.startswith("python "):
        pointer = pointer.split()[1]
    path, _, symbol = pointer.replace("::", ":").partition(":")
    file = ROOT / path
    if not file.is_file():
        return f"no file {path}"
    if symbol and symbol not in defined(file):
        return f"{path} defines no {symbol}"
    if "::" in pointer and not symbol.rpartition(".")[2].startswith("test_"):
        return f"{symbol} is not a test"
    return None


def pointers(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def row_errors(row: Row) -> list[str]:
    """Return the errors of one row."""
    out = []
    if row.section not in HEADINGS.get(row.note, {}):
        out.append("the notes have no such section")
    if not VERDICT.match(row.verdict):
        out.append(f"verdict {row.verdict!r}")
    if not pointers(row.shows):
        out.append("nothing shows it")
    elif "::" not in row.shows and not UNTESTED.match(row.verdict):
        out.append("no test shows it")
    return out + list(filter(None, map(pointer_error, pointers(row.implements) + pointers(row.shows))))


def page_errors(page: str) -> list[str]:
    """Return every error of the page, one line each."""
    rows = parse(page)
    out = [f"{row.name}: {error}" for row in rows for error in row_errors(row)]
    for note, sections in HEADINGS.items():
        covered = [row.section for row in rows if row.note == note]
        for code, heading in sections.items():
            if not any(have == code or have.startswith(f"{code}.") for have in covered):
                out.append(f"{note} section {code} ({heading}) has no row")
    names = [row.name for row in rows]
    out += [f"{name}: twice" for name in sorted({name for name in names if names.count(name) > 1})]
    for note, section in dict.fromkeys((row.note, row.section) for row in rows):
        numbers = [row.number for row in rows if (row.note, row.section) == (note, section)]
        if numbers != list(range(1, len(numbers) + 1)):
            out.append(f"{note}-{section}: numbered {numbers}")
    return out


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


def test_every_pointer_resolves_and_every_section_has_a_row(page: str) -> None:
    assert page_errors(page) == []


def test_every_golden_test_has_a_pointer(page: str) -> None:
    """Every golden test is named by at least one row."""
    cited = {pointer for row in parse(page) for pointer in pointers(row.shows)}
    files = sorted((ROOT / "tests" / "docs" / "notes").glob("test_*.py"))
    assert files
    for file in files:
        for name in sorted(defined(file)):
            if name.startswith("test_"):
                assert f"tests/docs/notes/{file.name}::{name}" in cited


def test_lecture_statements_are_marked(page: str) -> None:
    section = page.partition("## The lecture of note 002, reconstructed")[2]
    assert "reconstruction" in section[:600] and len(section.split()) > 600


def changed_page(page: str, row: str, cell: str, into: str) -> str:
    """Return a copy of the page with ``cell`` of ``row`` (a field of Row) replaced."""
    (line,) = [line for line in page.splitlines() if line.startswith(f"| {row} |")]
    was = getattr(next(results for results in parse(page) if results.name == row), cell)
    new = into.join(line.rsplit(was, 1))
    assert new != line
    return page.replace(line, new)


@pytest.mark.parametrize(
    ("cell", "into", "message"),
    [
        ("implements", "`kvad/nowhere.py:attend`", "no file kvad/nowhere.py"),
        ("implements", "`kvad/errors.py:NoSuchError`", "defines no NoSuchError"),
        ("shows", "`tests/docs/notes/test_notes_cache.py::test_nothing`", "defines no test_nothing"),
        ("shows", "`tests/docs/notes/test_notes_cache.py::tiny`", "test_notes_cache.py defines no tiny"),
        ("shows", "`tests/docs/test_notes_table.py::parse`", "parse is not a test"),
        ("shows", "`tests/docs/test_notes_table.py::test_wrong_cell_is_detected`, `kvad frobnicate`", "no command"),
        ("shows", "common sense", "nothing shows it"),
        ("shows", "`kvad verify`", "no test shows it"),
        ("verdict", "obvious", "verdict 'obvious'"),
        ("verdict", "planned: some day", "verdict 'planned: some day'"),
        ("verdict", "not built", "verdict 'not built'"),
    ],
)
def test_wrong_cell_is_detected(page: str, cell: str, into: str, message: str) -> None:
    (results,) = page_errors(changed_page(page, "004-4.6-1", cell, into))
    assert results.startswith("004-4.6-1: ") and message in results


@pytest.mark.parametrize(("note", "section"), [("000", "2"), ("002", "14.4"), ("003", "6"), ("004", "4.13")])
def test_missing_section_is_detected(page: str, note: str, section: str) -> None:
    without = "\n".join(line for line in page.splitlines() if not line.startswith(f"| {note}-{section}-"))
    (results,) = page_errors(without)
    assert results == f"{note} section {section} ({HEADINGS[note][section]}) has no row"


def test_unknown_and_repeated_rows_are_detected(page: str) -> None:
    line = next(line for line in page.splitlines() if line.startswith("| 004-4.6-1 |"))
    assert "004-4.6-1: twice" in page_errors(f"{page}\n{line}\n")
    assert "004-9.9-1: the notes have no such section" in page_errors(
        f"{page}\n{line.replace('004-4.6-1', '004-9.9-1')}\n"
    )
