"""A model and its cache on 2 and 4 ranks say what one process says: within 1e-10 in float64, and the same tokens.

Real processes with gloo, each over many cases (``mesh_cases.py``), so a test here is a whole list of cases: what is
wrong with any is said by its name.  Rank 0 has the only scheduler and ledger.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvad.cache.memory import Memory
from kvad.cache.mesh import Mesh, check_cache
from kvad.cache.sizing import CacheConfig, groups
from kvad.cache.state import State
from kvad.config import mixers
from kvad.engine.engine import Engine
from kvad.engine.request import Sampling
from kvad.errors import ConfigError, RequestError
from tests.mesh_cases import cases, shaped
from tests.mesh_restore import MESHES, restore
from tests.models import build
from tests.ranks import Case, Result, deserted, spawn

EXACT, WRONG = 1e-10, 1e-3


def objection(case: Case, result: Result) -> str | None:
    """What is wrong with a case's result."""
    if "error" in result:
        return str(result["error"])
    if case.run is deserted:
        return of_deserted(result)
    if case.run is restore:
        return of_restored(result)
    if case.wrong is not None:
        return None if result["far"] > WRONG else f"the mistake is not noticed: {result}"
    fine = result["far"] <= EXACT and result.get("argmax", True) and result.get("same_run", True)
    fine = fine and ("tokens" not in result or (result["tokens"] and result["said"] > 30))
    return None if fine else f"not what one process says: {result}"


def of_restored(result: Result) -> str | None:
    """The state that was gathered is what one process has; woken, its next tokens are what they would have been; and a
    row that lost its keys says something else, so the check can see."""
    fine = result["whole"] and result["parked"] and set(result["far"]) == set(MESHES)
    return None if fine and max(result["far"].values()) <= EXACT and result["unkept"] > WRONG else f"{result}"


def of_deserted(result: Result) -> str | None:
    said = "rank 0 of a mesh of 2x1: another rank does not answer" in result["message"]
    fine = said and "start them anew" in result["message"] and "does not answer" in (result["error_of_row"] or "")
    return None if fine else f"{result}"


def check(size: int, which: str, folder: Path) -> dict[str, Result]:
    found = spawn(folder, "tests.mesh_cases", size, which)
    wanted = cases(size, which)
    assert found.keys() == {case.name for case in wanted} and wanted
    objections = {case.name: said for case in wanted if (said := objection(case, found[case.name])) is not None}
    assert not objections, "\n".join(f"{name}: {said}" for name, said in objections.items())
    return found


def test_two_ranks_say_what_one_process_says(tmp_path: Path) -> None:
    """And among what they ran were rows that are preempted, share prefixes, copy on write, stand beside chunks."""
    found = check(2, "short", tmp_path)
    for what in ("preemptions", "copies", "hits", "mixed"):
        assert sum(result.get(what, 0) for result in found.values()) > 0, what


def test_four_ranks_say_what_one_process_says(tmp_path: Path) -> None:
    check(4, "short", tmp_path)


@pytest.mark.long(minutes=2)
@pytest.mark.parametrize("size", [2, 4])
def test_other_models_and_policies_on_meshes(size: int, tmp_path: Path) -> None:
    check(size, "long", tmp_path)


class Half(Memory):
    """What an engine on rank 0 has."""

    cut = "2x1"


@pytest.mark.parametrize("field", ["tier", "tier_ram", "park_dir"])
def test_what_would_keep_one_ranks_part_is_refused(field: str, tmp_path: Path) -> None:
    given = {"tier": str(tmp_path / "tier"), "tier_ram": 1 << 20, "park_dir": str(tmp_path)}[field]
    cache, options = CacheConfig(capacity=20, **({} if field == "park_dir" else {field: given})), {}
    if field == "park_dir":
        options = {field: given}
    with pytest.raises(ConfigError, match=f"{field}: on a mesh of 2x1 rank 0 has a part of each block alone"):
        Engine(build(shaped()), cache, memory=Half, **options)


@pytest.mark.parametrize("how", ["keep", "resume"])
def test_rows_are_not_kept_in_part(how: str) -> None:
    engine = Engine(build(shaped()), CacheConfig(capacity=20, dtype="float64"), memory=Half)
    given = {"keep": True} if how == "keep" else {"resume": State((), None, "", "", (), {})}
    with pytest.raises(RequestError, match="on a mesh of 2x1 a row is not kept or resumed by a request"):
        engine.submit([1, 2], Sampling(max_tokens=2), **given)


def test_what_is_spilled_is_not_cut() -> None:
    placed = groups(mixers(shaped()), CacheConfig(capacity=40, block_size=4, policy="spilled(8, every=8)"))
    check_cache(placed, Mesh(1, 1))
    with pytest.raises(ConfigError, match="what is spilled is not cut over a mesh of 1x2"):
        check_cache(placed, Mesh(1, 2))


def test_an_objection_is_raised() -> None:
    """The judge above, of results that are wrong in one thing each."""
    usual, wrong, kept, gone = (
        Case("a", "2x1", None, None, wrong=hook, run=run)  # type: ignore[arg-type]
        for hook, run in ((None, None), (print, None), (None, restore), (None, deserted))
    )
    right = {"far": 1e-14, "argmax": True, "same_run": True, "tokens": True, "said": 40}
    assert objection(usual, right) is None and objection(wrong, {**right, "far": 2.0}) is None
    for change in ({"far": 1e-9}, {"argmax": False}, {"same_run": False}, {"tokens": False}, {"said": 0}):
        assert objection(usual, right | change) is not None, change
    assert objection(wrong, right) is not None and objection(usual, {"error": "Traceback"}) is not None
    whole = {"whole": True, "parked": True, "far": dict.fromkeys(MESHES, 1e-14), "unkept": 4.0}
    assert objection(kept, whole) is None
    for change in ({"whole": False}, {"parked": False}, {"far": {"1x1": 0.0}}, {"unkept": 0.0}):
        assert objection(kept, whole | change) is not None, change
    assert objection(gone, {"message": "", "finish": None, "error_of_row": None}) is not None
