"""A model and its cache on 2 and 4 ranks say what one process says: within 1e-10 in float64, and the same tokens.

Real processes with gloo, each over many cases (``mesh_cases.py``).  Rank 0 has the only scheduler and ledger.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mesh_cases import cases
from tests.ranks import Result, answers, spawn

EXACT = 1e-10


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    return run(tmp_path_factory.mktemp("ranks"), "short")


@pytest.fixture(scope="module")
def found_long(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    return run(tmp_path_factory.mktemp("ranks"), "long")


def run(folder: Path, which: str) -> dict[str, Result]:
    every: dict[str, Result] = {}
    for size in (2, 4):
        every |= spawn(folder / f"{size}", "tests.mesh_cases", size, which)
    return every


def compared(which: str) -> list[str]:
    every = [*cases(2, which), *cases(4, which)]
    return [case.name for case in every if case.run is None and case.wrong is None]


def check(result: Result) -> None:
    assert "error" not in result, result["error"]
    assert result["far"] <= EXACT and result.get("argmax", True)
    assert result.get("same_run", True), "the scheduler planned otherwise for a mesh"
    assert "tokens" not in result or (result["tokens"] and result["said"] > 30)


@pytest.mark.parametrize("name", compared("short"))
def test_a_mesh_says_what_one_process_says(name: str, found: dict[str, Result]) -> None:
    check(found[name])


@pytest.mark.long(minutes=2)
@pytest.mark.parametrize("name", [case.name for size in (2, 4) for case in cases(size, "long")])
def test_other_meshes_do_so_too(name: str, found_long: dict[str, Result]) -> None:
    check(found_long[name])


def test_what_was_run_had_everything_in_it(found: dict[str, Result]) -> None:
    """Rows that are preempted, that share prefixes, that copy on write, beside chunks of others."""
    for what in ("preemptions", "copies", "hits", "mixed"):
        assert sum(result.get(what, 0) for result in found.values()) > 0, what


@pytest.mark.parametrize("name", [case.name for case in cases(2) if case.wrong is not None])
def test_a_mistake_on_a_mesh_is_noticed(name: str, found: dict[str, Result]) -> None:
    result = found[name]
    assert "error" not in result, result["error"]
    assert result["far"] > 1e-3


@pytest.mark.parametrize("name", [case.name for case in cases(2, "short") if case.run is answers])
def test_an_encoder_on_a_mesh_answers_as_one_process_does(name: str, found: dict[str, Result]) -> None:
    check(found[name])


def test_a_rank_that_goes_away_ends_the_step_and_says_so(found: dict[str, Result]) -> None:
    result = found["deserted 2x1"]
    assert "rank 0 of a mesh of 2x1: another rank does not answer" in result["message"], result
    assert "start them anew" in result["message"] and "does not answer" in result["error_of_row"]


@pytest.mark.parametrize("name", [case.name for case in cases(4) if case.run is not None])
def test_a_row_kept_on_one_mesh_goes_on_on_another(name: str, found: dict[str, Result]) -> None:
    """Its state is, to the byte, what one process has of it; woken, its next tokens are what they would have been."""
    result = found[name]
    assert "error" not in result, result["error"]
    assert result["whole"] and result["parked"]
    assert set(result["far"]) == {"1x1", "1x2", "2x2", "4x1"}
    assert max(result["far"].values()) <= EXACT
    assert result["unkept"] > 1e-3, "a row that lost its state says the same: the check sees nothing"
