"""A model and its cache on 2 and 4 ranks say what one process says: within 1e-10 in float64, and the same tokens.

Real processes with gloo, each over many cases (``mesh_cases.py``).  Rank 0 has the only scheduler and ledger.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mesh_cases import cases
from tests.ranks import Result, spawn

EXACT = 1e-10


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    return {name: each for size in (2, 4) for name, each in spawn(folder / f"{size}", "tests.mesh_cases", size).items()}


def compared(size: int) -> list[str]:
    return [case.name for case in cases(size) if case.run is None and case.wrong is None]


@pytest.mark.parametrize("name", [*compared(2), *compared(4)])
def test_a_mesh_says_what_one_process_says(name: str, found: dict[str, Result]) -> None:
    result = found[name]
    assert "error" not in result, result["error"]
    assert result["far"] <= EXACT and result["argmax"]
    assert result["same_run"], "the scheduler planned otherwise for a mesh"
    assert "tokens" not in result or (result["tokens"] and result["said"] > 30)


def test_what_was_run_had_everything_in_it(found: dict[str, Result]) -> None:
    """Rows that are preempted, that share prefixes, that copy on write, beside chunks of others."""
    for what in ("preemptions", "copies", "hits", "mixed"):
        assert sum(result.get(what, 0) for result in found.values()) > 0, what


@pytest.mark.parametrize("name", [case.name for case in cases(2) if case.wrong is not None])
def test_a_mistake_on_a_mesh_is_noticed(name: str, found: dict[str, Result]) -> None:
    result = found[name]
    assert "error" not in result, result["error"]
    assert result["far"] > 1e-3


@pytest.mark.parametrize("name", [case.name for case in cases(2) if case.run is not None])
def test_an_encoder_on_a_mesh_answers_as_one_process_does(name: str, found: dict[str, Result]) -> None:
    result = found[name]
    assert "error" not in result, result["error"]
    assert result["far"] <= EXACT


@pytest.mark.parametrize("name", [case.name for case in cases(4) if case.run is not None])
def test_a_row_kept_on_one_mesh_goes_on_on_another(name: str, found: dict[str, Result]) -> None:
    """Its state is, to the byte, what one process has of it; woken, its next tokens are what they would have been."""
    result = found[name]
    assert "error" not in result, result["error"]
    assert result["whole"] and result["parked"]
    assert set(result["far"]) == {"1x1", "1x2", "2x2", "4x1"}
    assert max(result["far"].values()) <= EXACT
    assert result["unkept"] > 1e-3, "a row that lost its state says the same: the check sees nothing"
