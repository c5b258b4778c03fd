"""``docs/reference/matrix.md`` equals the output of ``scripts/matrix`` and covers every policy, format and topology.

After adding one, ``scripts/matrix --run`` measures every cell again and writes both files.
"""

from __future__ import annotations

import copy
import json
import subprocess
import typing
from collections.abc import Iterable

import pytest
import torch

from kvad.cache.device import kv_cache
from kvad.cache.device.host_copy import HostCopier
from kvad.cache.device.tensors import LayerTensor
from kvad.cache.policy import Window
from kvad.cache.policy_parser import POLICIES
from kvad.cache.quantization import FORMATS, CacheFormat
from kvad.cache.sessions.state import PendingRestore
from kvad.config import layers as cfg
from kvad.verify.cases import SIZED
from tests.support.matrix import cells, lives, lives_page, page

RESULTS = json.loads(page.RESULTS.read_text("utf-8"))
TABLES = ("product", "layouts", "endless", "lives", "shards")
HINT = f"write it again: {page.AGAIN}"


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def every() -> list[tuple[str, tuple[str, ...]]]:
    """All that there is to ask."""
    return [*cells.every(), *lives.every(), *lives.sharded()]


def missing() -> list[str]:
    """Cells that the registries have and the results do not."""
    return [f"{table}: {cells.key(*cell)}" for table, cell in every() if cells.key(*cell) not in RESULTS[table]]


def some(number: int, asked: Iterable[tuple[str, tuple[str, ...]]]) -> list[tuple[str, tuple[str, ...]]]:
    """So many of those cells that were measured, spread evenly."""
    measured = [(t, cell) for t, cell in asked if "refused" not in RESULTS[t].get(cells.key(*cell), {})]
    return measured[:: max(1, len(measured) // number)]


# ---------------------------------------------------------------- the page is fresh


def test_the_page_is_what_the_script_writes() -> None:
    assert page.PAGE.read_text("utf-8") == page.page(RESULTS), HINT


def test_the_short_form_is_what_the_script_writes() -> None:
    text = page.SHORT.read_text("utf-8")
    assert text == lives_page.placed(text, RESULTS, page._table), HINT


def test_the_results_are_written_as_the_script_writes_them() -> None:
    assert page.RESULTS.read_text("utf-8") == page.stored(RESULTS), HINT


def test_every_cell_was_asked() -> None:
    assert not missing(), HINT
    known = {(table, cells.key(*cell)) for table, cell in every()}
    old = [(table, cell) for table in TABLES for cell in RESULTS[table]]
    assert not set(old) - known, f"of what is gone: {HINT}"


def test_every_encoding_and_topology_is_a_column() -> None:
    """One of one's own is proved on docs/contributing/extending.md."""
    hints = (
        typing.get_type_hints(cfg.AttentionConfig)["position"],
        typing.get_type_hints(cfg.EmbeddingConfig)["position"],
    )
    kinds = {kind.kind for hint in hints for kind in typing.get_args(hint) if hasattr(kind, "kind")}
    assert kinds == {*cells.ENCODINGS, "custom"} - {"none"}
    assert {cells.config_of(each, "rope").kind for each in cells.TOPOLOGIES} == set(cells.TOPOLOGIES)
    assert set(SIZED) == set(POLICIES)


def test_nothing_measured_is_broken() -> None:
    for table in TABLES:
        for cell, said in RESULTS[table].items():
            assert "refused" in said or said["structure"] <= cells.EXACT, (table, cell, said)


def test_a_refusal_is_still_made_in_these_words() -> None:
    for table, cell in cells.every():
        said = RESULTS[table][cells.key(*cell)]
        if "refused" in said and (table != "product" or cell[0] != "encoder" or cell[3] == "int8"):
            assert cells.ask(table, cell) == said, HINT


@pytest.mark.parametrize(
    ("table", "cell"), some(24, cells.every()), ids=lambda part: part if isinstance(part, str) else "-".join(part)
)
def test_some_cells_asked_again(table: str, cell: tuple[str, ...]) -> None:
    before, now = RESULTS[table][cells.key(*cell)], cells.ask(table, cell)
    assert now["structure"] <= cells.EXACT
    assert now.get("loss", 0) == pytest.approx(before.get("loss", 0), rel=0.1, abs=1e-12)


# ---------------------------------------------------------------- where it lives


def test_what_went_that_way_and_what_did_not() -> None:
    """Where nothing is refused, something really left and came back; but rows under offload are not parked."""
    stayed = {cell for cell, said in RESULTS["lives"].items() if said.get("moved") == 0}
    assert all("| offload |" in cell and "parked" in cell for cell in stayed)
    assert len(stayed) < 20 < sum("moved" in said for said in RESULTS["lives"].values())


def test_a_refusal_to_leave_is_still_made_in_these_words() -> None:
    words = {}
    for _, cell in lives.every():
        said = RESULTS["lives"][cells.key(*cell)]
        if "refused" in said:
            words.setdefault(said["refused"], cell)
    for refused, cell in words.items():
        assert lives.ask(cell) == {"refused": refused}, HINT


@pytest.mark.parametrize(("table", "cell"), some(16, lives.every()), ids=lambda part: str(part))
def test_some_ways_asked_again(table: str, cell: tuple[str, ...]) -> None:
    before, now = RESULTS[table][cells.key(*cell)], lives.ask(cell)
    assert now["structure"] <= cells.EXACT
    assert now.get("judge") == before.get("judge") and bool(now["moved"]) == bool(before["moved"])


def test_some_meshes_asked_again() -> None:
    for said in lives.shards([cell for _, cell in some(3, lives.sharded())]).values():
        assert said["structure"] <= cells.EXACT


@pytest.mark.parametrize("way", ["parked in RAM", "parked on disk"])
def test_a_row_that_comes_back_wrong_is_measured_as_broken(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    back = HostCopier.copy_in
    monkeypatch.setattr(
        HostCopier, "copy_in", lambda self, key, held, copies: back(self, key, held, [each.flip(0) for each in copies])
    )
    assert lives.ask(("decoder", "rope", "full", "int8", way))["structure"] > cells.EXACT


@pytest.mark.parametrize("way", ["session", "session, other layout"])
def test_a_session_that_comes_back_wrong_is_measured_as_broken(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PendingRestore, "restore", lambda *_: None)
    assert lives.ask(("decoder", "rope", "full", "float64", way))["structure"] > cells.EXACT


@pytest.mark.parametrize("way", ["prefix from RAM", "prefix from disk"])
def test_a_prefix_that_comes_back_wrong_is_measured_as_broken(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        kv_cache, "copy_blocks_in", lambda _memory, host, loads: [host.take(number) for number, _ in loads]
    )
    assert lives.ask(("decoder", "rope", "full", "float64", way))["structure"] > cells.EXACT


@pytest.mark.long(minutes=10)
def test_every_way_asked_again() -> None:
    wrong = [cell for _, cell in some(1 << 20, lives.every()) if not lives.ask(cell)["structure"] <= cells.EXACT]
    assert not wrong


@pytest.mark.long(minutes=30)
def test_every_cell_asked_again() -> None:
    wrong = [
        cell for table, cell in some(1 << 20, cells.every()) if not cells.ask(table, cell)["structure"] <= cells.EXACT
    ]
    assert not wrong


def test_the_script_runs() -> None:
    assert subprocess.run(["bash", "-n", str(page.ROOT / "scripts" / "matrix")], check=False).returncode == 0


# ---------------------------------------------------------------- it can say no


def test_a_new_policy_or_format_has_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "latest", Window)
    assert any("latest" in cell for cell in missing())
    monkeypatch.delitem(POLICIES, "latest")
    monkeypatch.setitem(FORMATS, "int3", CacheFormat("int3", "token", 8, "lossy", 1.0, 1.0))
    assert any("int3" in cell for cell in missing())


def test_a_broken_cell_is_written_as_such() -> None:
    results = copy.deepcopy(RESULTS)
    results["product"][cells.key("decoder", "rope", "sinks", "int8")] = {"structure": 0.5, "loss": 1.0}
    results["product"].pop(cells.key("decoder", "alibi", "sinks", "int8"))
    text = page.page(results)
    assert "**BROKEN** by 5.0e-01" in text and "not measured" in text


@pytest.mark.parametrize("policy", ["full", "sinks"])
def test_a_cell_of_a_broken_format_is_measured_as_broken(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """A store that forgets the scales of what it copies or reads."""
    read = LayerTensor.read
    monkeypatch.setattr(LayerTensor, "read", lambda self, table, dtype: read(self, table, dtype) * (1 + 1e-6))
    assert cells.ask("product", ("decoder", "rope", policy, "int8"))["structure"] > cells.EXACT


def test_the_lines_of_a_bench_become_a_table(tmp_path) -> None:
    same = {
        "model": "runs/m",
        "digest": "d",
        "commit": "c",
        "machine": "here",
        "options": {"evict_after": "prompt"},
        "length": 64,
    }
    task = {"measure": "single", "tasks": 8}
    half = {"cache": "snapkv", "ratio": 0.5}
    lines = [
        {**same, **task, "cache": "full", "ratio": 0.0, "depth": 0.0, "recall": 1.0},
        {**same, **task, "cache": "full", "ratio": 0.0, "depth": 0.0, "recall": 0.5, "length": 128},
        {**same, **half, "measure": "text", "perplexity_ratio": 1.25, "kl": 0.03},
        {**same, **half, **task, "depth": 0.5, "recall": 0.75},
        {**same, **half, **task, "depth": 0.0, "recall": 0.25},
    ]
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    text = page.page({**RESULTS, "quality": page.quality(path)})
    assert "| `full` | 0.0% | - | - | 1.00 | - | - |" in text
    assert "| `snapkv` | 50.0% | 3.0e-02 | 1.250 | 0.50 | - | - |" in text
    assert "Of `m` at c, asked after eviction, evicted after each prompt" in text
