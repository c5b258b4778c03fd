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

from kvad.cache.device import kv_cache
from kvad.cache.device.host_copy import HostCopier
from kvad.cache.device.tensors import LayerTensor
from kvad.cache.policy import Window
from kvad.cache.policy_parser import POLICIES
from kvad.cache.quantization import FORMATS, CacheFormat
from kvad.cache.sessions.state import PendingRestore
from kvad.config import layers as cfg
from kvad.verify.scenario import SIZED
from tests.support.matrix import cells, lives, lives_page, page

RESULTS = json.loads(page.RESULTS.read_text("utf-8"))
TABLES = ("product", "layouts", "endless", "lives", "shards")
HINT = f"measure again: {page.AGAIN}"


pytestmark = pytest.mark.usefixtures("one_thread")


def all_cells() -> list[tuple[str, tuple[str, ...]]]:
    """Return all cells that the registries define."""
    return [*cells.all_cells(), *lives.storage_cells(), *lives.sharded()]


def missing() -> list[str]:
    """Return cells in the registries without a result."""
    return [f"{table}: {cells.key(*cell)}" for table, cell in all_cells() if cells.key(*cell) not in RESULTS[table]]


def some(number: int, cells_to_measure: Iterable[tuple[str, tuple[str, ...]]]) -> list[tuple[str, tuple[str, ...]]]:
    """Return about ``number`` measured cells, spread evenly."""
    measured = [(t, cell) for t, cell in cells_to_measure if "refused" not in RESULTS[t].get(cells.key(*cell), {})]
    return measured[:: max(1, len(measured) // number)]


# ---------------------------------------------------------------- the page is current


def test_page_equals_script_output() -> None:
    assert page.PAGE.read_text("utf-8") == page.page(RESULTS), HINT


def test_short_table_equals_script_output() -> None:
    text = page.SHORT.read_text("utf-8")
    assert text == lives_page.with_table(text, RESULTS, page._table), HINT


def test_results_file_equals_script_output() -> None:
    assert page.RESULTS.read_text("utf-8") == page.stored(RESULTS), HINT


def test_every_cell_has_a_result() -> None:
    assert not missing(), HINT
    expected = {(table, cells.key(*cell)) for table, cell in all_cells()}
    results = [(table, cell) for table in TABLES for cell in RESULTS[table]]
    assert not set(results) - expected, f"cells that no longer exist: {HINT}"


def test_every_encoding_and_topology_has_a_column() -> None:
    """A custom encoding is covered by docs/contributing/extending.md; disentangled attention has no cache."""
    hints = (
        typing.get_type_hints(cfg.AttentionConfig)["position"],
        typing.get_type_hints(cfg.EmbeddingConfig)["position"],
    )
    kinds = {kind.kind for hint in hints for kind in typing.get_args(hint) if hasattr(kind, "kind")}
    assert kinds == {*cells.ENCODINGS, "custom", "disentangled"} - {"none"}
    assert {cells.config_of(each, "rope").kind for each in cells.TOPOLOGIES} == set(cells.TOPOLOGIES)
    assert set(SIZED) == set(POLICIES)


def test_no_cell_is_broken() -> None:
    for table in TABLES:
        for cell, result in RESULTS[table].items():
            assert "refused" in result or result["structure"] <= cells.EXACT, (table, cell, result)


def test_refusals_are_unchanged() -> None:
    for table, cell in cells.all_cells():
        result = RESULTS[table][cells.key(*cell)]
        if "refused" in result and (table != "product" or cell[0] != "encoder" or cell[3] == "int8"):
            assert cells.measure_cell(table, cell) == result, HINT


@pytest.mark.parametrize(
    ("table", "cell"), some(24, cells.all_cells()), ids=lambda part: part if isinstance(part, str) else "-".join(part)
)
def test_sampled_cells_measured_again(table: str, cell: tuple[str, ...]) -> None:
    before, now = RESULTS[table][cells.key(*cell)], cells.measure_cell(table, cell)
    assert now["structure"] <= cells.EXACT
    assert now.get("loss", 0) == pytest.approx(before.get("loss", 0), rel=0.1, abs=1e-12)


# ---------------------------------------------------------------- storage


def test_round_trips_transfer_blocks() -> None:
    """If nothing is refused, blocks were really transferred; sequences under offload are not swapped."""
    recomputed = {cell for cell, result in RESULTS["lives"].items() if result.get("moved") == 0}
    assert all("| offload |" in cell and "swapped" in cell for cell in recomputed)
    assert len(recomputed) < 20 < sum("moved" in result for result in RESULTS["lives"].values())


def test_refusals_of_round_trips_are_unchanged() -> None:
    examples = {}
    for _, cell in lives.storage_cells():
        result = RESULTS["lives"][cells.key(*cell)]
        if "refused" in result:
            examples.setdefault(result["refused"], cell)
    for refused, cell in examples.items():
        assert lives.measure_round_trip(cell) == {"refused": refused}, HINT


@pytest.mark.parametrize(("table", "cell"), some(16, lives.storage_cells()), ids=lambda part: str(part))
def test_sampled_round_trips_measured_again(table: str, cell: tuple[str, ...]) -> None:
    before, now = RESULTS[table][cells.key(*cell)], lives.measure_round_trip(cell)
    assert now["structure"] <= cells.EXACT
    assert now.get("reference") == before.get("reference") and bool(now["moved"]) == bool(before["moved"])


def test_sampled_meshes_measured_again() -> None:
    for result in lives.shards([cell for _, cell in some(3, lives.sharded())]).values():
        assert result["structure"] <= cells.EXACT


@pytest.mark.parametrize("way", ["swapped to RAM", "swapped to disk"])
def test_wrong_swap_is_measured_as_broken(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_in = HostCopier.copy_in
    monkeypatch.setattr(
        HostCopier,
        "copy_in",
        lambda self, key, held, copies: copy_in(self, key, held, [each.flip(0) for each in copies]),
    )
    assert lives.measure_round_trip(("decoder", "rope", "full", "int8", way))["structure"] > cells.EXACT


@pytest.mark.parametrize("way", ["session", "session, other layout"])
def test_wrong_session_is_measured_as_broken(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PendingRestore, "restore", lambda *_: None)
    assert lives.measure_round_trip(("decoder", "rope", "full", "float64", way))["structure"] > cells.EXACT


@pytest.mark.parametrize("way", ["prefix from RAM", "prefix from disk"])
def test_wrong_prefix_is_measured_as_broken(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        kv_cache, "copy_blocks_in", lambda _memory, host, loads: [host.take(number) for number, _ in loads]
    )
    assert lives.measure_round_trip(("decoder", "rope", "full", "float64", way))["structure"] > cells.EXACT


@pytest.mark.long(minutes=10)
def test_every_round_trip_measured_again() -> None:
    wrong = [
        cell
        for _, cell in some(1 << 20, lives.storage_cells())
        if not lives.measure_round_trip(cell)["structure"] <= cells.EXACT
    ]
    assert not wrong


@pytest.mark.long(minutes=30)
def test_every_cell_measured_again() -> None:
    wrong = [
        cell
        for table, cell in some(1 << 20, cells.all_cells())
        if not cells.measure_cell(table, cell)["structure"] <= cells.EXACT
    ]
    assert not wrong


def test_script_has_valid_syntax() -> None:
    assert subprocess.run(["bash", "-n", str(page.ROOT / "scripts" / "matrix")], timeout=60).returncode == 0


# ---------------------------------------------------------------- the checks can fail


def test_new_policy_or_format_has_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "latest", Window)
    assert any("latest" in cell for cell in missing())
    monkeypatch.delitem(POLICIES, "latest")
    monkeypatch.setitem(FORMATS, "int3", CacheFormat("int3", "token", 8, "lossy", 1.0, 1.0))
    assert any("int3" in cell for cell in missing())


def test_broken_cell_is_shown() -> None:
    results = copy.deepcopy(RESULTS)
    results["product"][cells.key("decoder", "rope", "sinks", "int8")] = {"structure": 0.5, "loss": 1.0}
    results["product"].pop(cells.key("decoder", "alibi", "sinks", "int8"))
    text = page.page(results)
    assert "**BROKEN** by 5.0e-01" in text and "not measured" in text


@pytest.mark.parametrize("policy", ["full", "sinks"])
def test_broken_format_is_measured_as_broken(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """Reads return values that are off by 1e-6."""
    read = LayerTensor.read
    monkeypatch.setattr(LayerTensor, "read", lambda self, table, dtype: read(self, table, dtype) * (1 + 1e-6))
    assert cells.measure_cell("product", ("decoder", "rope", policy, "int8"))["structure"] > cells.EXACT


def test_benchmark_lines_become_a_table(tmp_path) -> None:
    common = {"model": "runs/m", "digest": "d", "commit": "c", "machine": "here", "length": 64}
    common["options"] = {"evict_after": "prompt"}
    task = {"measure": "single", "tasks": 8}
    variant = {"cache": "snapkv", "ratio": 0.5}
    lines = [
        {**common, **task, "cache": "full", "ratio": 0.0, "depth": 0.0, "recall": 1.0},
        {**common, **task, "cache": "full", "ratio": 0.0, "depth": 0.0, "recall": 0.5, "length": 128},
        {**common, **variant, "measure": "text", "perplexity_ratio": 1.25, "kl": 0.03},
        {**common, **variant, **task, "depth": 0.5, "recall": 0.75},
        {**common, **variant, **task, "depth": 0.0, "recall": 0.25},
    ]
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    text = page.page({**RESULTS, "quality": page.quality(path)})
    assert "| `full` | 0.0% | - | - | 1.00 | - | - |" in text
    assert "| `snapkv` | 50.0% | 3.0e-02 | 1.250 | 0.50 | - | - |" in text
    assert "`m` at c, question after eviction, evicted after each prompt" in text
