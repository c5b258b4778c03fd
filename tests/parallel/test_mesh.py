"""A model and its cache on 2 and 4 ranks say what one process says: within 1e-10 in float64, and the same tokens.

Real processes with gloo, each over many cases (``mesh_cases.py``), so a test here is a whole list of cases: what is
wrong with any is said by its name.  Rank 0 has the only scheduler and ledger.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.mesh_cases import cases
from tests.support.mesh_restore import MESHES, restore
from tests.support.mesh_sessions import HOPS, travel
from tests.support.mesh_storage import beside
from tests.support.mesh_worker import Case, Result, deserted, spawn

EXACT, WRONG = 1e-10, 1e-3
BESIDE = "swaps", "from_ram", "from_disk", "on_mesh"  # what has to have happened


def objection(case: Case, result: Result) -> str | None:
    """What is wrong with a case's result."""
    if "error" in result:
        return str(result["error"])
    if case.run is deserted:
        return of_deserted(result)
    if case.run is restore:
        return of_restored(result)
    if case.run is beside:
        return of_beside(result)
    if case.run is travel:
        return of_travelled(result)
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


def of_travelled(result: Result) -> str | None:
    """Whatever the mesh, all of the session was used, and it says what it would have said without stopping."""
    fine = result["tokens"] and result["cached"] and result["unknown"] and len(result["far"]) == len(HOPS)
    return None if fine and max(result["far"].values()) <= EXACT and result["lost"] > WRONG else f"{result}"


def of_beside(result: Result) -> str | None:
    """Rows that were parked, and blocks that tiers kept, are as they were; what one rank could not do is refused."""
    fine = result["parked"] and result["kept"] and result["stored"] and result["said"] > 30
    fine = fine and min(result[name] for name in BESIDE) > 0 and not result["torn"]
    refused = (
        "swap_dir: unavailable with 2 ranks" in result["swap_dir"]
        and "cache.overflow: must not be offload on a mesh" in result["offload"]
    )
    return None if fine and refused and "weights" in result["unknown"] else f"{result}"


def of_deserted(result: Result) -> str | None:
    said = "rank 0 of a mesh of 2x1: another rank does not respond" in result["message"]
    fine = said and "start them again" in result["message"] and "does not respond" in (result["error_of_row"] or "")
    return None if fine else f"{result}"


def check(size: int, which: str, folder: Path) -> dict[str, Result]:
    found = spawn(folder, "tests.support.mesh_cases", size, which)
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
    trip = Case("a", "4x1", None, None, run=travel)  # type: ignore[arg-type]
    far = {f"{hop}": 1e-14 for hop in range(len(HOPS))}
    went = {"tokens": True, "cached": True, "unknown": True, "far": far, "lost": 4.0}
    assert objection(trip, went) is None
    for change in (*({name: False} for name in ("tokens", "cached", "unknown")), {"far": {}}, {"lost": 0.0}):
        assert objection(trip, went | change) is not None, change
    near = Case("a", "2x1", None, None, run=beside)  # type: ignore[arg-type]
    well = dict.fromkeys(("parked", "kept", "stored"), True) | dict.fromkeys(BESIDE, 3)
    told = {
        "swap_dir": "swap_dir: unavailable with 2 ranks",
        "offload": "cache.overflow: must not be offload on a mesh",
        "unknown": "weights: ...",
    }
    well |= {"said": 40, "torn": False, **told}
    assert objection(near, well) is None
    for name, value in well.items():
        worse = "" if isinstance(value, str) else not value if isinstance(value, bool) else 0
        assert objection(near, well | {name: worse}) is not None, name
    assert objection(gone, {"message": "", "finish": None, "error_of_row": None}) is not None
