"""Models on 2 and 4 ranks compared with one process: logits within 1e-10 in float64, and equal tokens.

Real processes with gloo run many cases each (``mesh_cases.py``), so one test covers a list of cases and names the
case that fails. Only rank 0 has a scheduler and a KVCacheManager.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.mesh_cases import cases
from tests.support.mesh_restore import MESHES, run_swap
from tests.support.mesh_sessions import HOPS, run_session
from tests.support.mesh_storage import run_storage
from tests.support.mesh_worker import Case, Result, run_lost_rank, spawn

EXACT, WRONG = 1e-10, 1e-3
POSITIVE = "swaps", "from_ram", "from_disk", "from_disk_on_mesh"  # these must be positive


def describe_error(case: Case, result: Result) -> str | None:
    """Describe the error in a case's result, or return None."""
    if "error" in result:
        return str(result["error"])
    if case.run is run_lost_rank:
        return check_lost_rank(result)
    if case.run is run_swap:
        return check_swap(result)
    if case.run is run_storage:
        return check_storage(result)
    if case.run is run_session:
        return check_session(result)
    if case.wrong is not None:
        return None if result["difference"] > WRONG else f"the fault was not detected: {result}"
    fine = result["difference"] <= EXACT and result.get("argmax", True) and result.get("same_run", True)
    fine = fine and ("tokens" not in result or (result["tokens"] and result["num_tokens"] > 30))
    return None if fine else f"differs from one process: {result}"


def check_swap(result: Result) -> str | None:
    """The gathered state equals one process's; the next tokens agree on every mesh, and differ without the keys."""
    fine = result["equal_state"] and result["equal_swapped"] and set(result["difference"]) == set(MESHES)
    return (
        None if fine and max(result["difference"].values()) <= EXACT and result["without_keys"] > WRONG else f"{result}"
    )


def check_session(result: Result) -> str | None:
    """On every mesh the whole session was used and the output equals an uninterrupted run."""
    fine = (
        result["tokens"]
        and result["cached"]
        and result["fingerprint_required"]
        and len(result["difference"]) == len(HOPS)
    )
    return (
        None if fine and max(result["difference"].values()) <= EXACT and result["without_keys"] > WRONG else f"{result}"
    )


def check_storage(result: Result) -> str | None:
    """Swapped sequences and stored blocks are unchanged; options for one rank only are refused."""
    fine = result["swapped"] and result["ram_store"] and result["disk_store"] and result["num_tokens"] > 30
    fine = fine and min(result[name] for name in POSITIVE) > 0 and not result["store_failed"]
    refused = (
        "swap_dir: unavailable with 2 ranks" in result["swap_dir"]
        and "cache.overflow: must not be offload on a mesh" in result["offload"]
    )
    return None if fine and refused and "weights" in result["fingerprint_required"] else f"{result}"


def check_lost_rank(result: Result) -> str | None:
    message = "rank 0 of a mesh of 2x1: another rank does not respond" in result["message"]
    fine = (
        message and "start them again" in result["message"] and "does not respond" in (result["sequence_error"] or "")
    )
    return None if fine else f"{result}"


def check(size: int, which: str, folder: Path) -> dict[str, Result]:
    results = spawn(folder, "tests.support.mesh_cases", size, which)
    expected = cases(size, which)
    assert results.keys() == {case.name for case in expected} and expected
    errors = {
        case.name: message for case in expected if (message := describe_error(case, results[case.name])) is not None
    }
    assert not errors, "\n".join(f"{name}: {message}" for name, message in errors.items())
    return results


def test_two_ranks_equal_one_process(tmp_path: Path) -> None:
    """The runs include preemptions, shared prefixes, copy-on-write, and chunks next to single tokens."""
    results = check(2, "short", tmp_path)
    for what in ("preemptions", "copies", "hits", "mixed"):
        assert sum(result.get(what, 0) for result in results.values()) > 0, what


@pytest.mark.long
def test_four_ranks_equal_one_process(tmp_path: Path) -> None:
    check(4, "short", tmp_path)


@pytest.mark.long(minutes=2)
@pytest.mark.parametrize("size", [2, 4])
def test_other_models_and_policies_on_meshes(size: int, tmp_path: Path) -> None:
    check(size, "long", tmp_path)


def test_each_wrong_result_is_detected() -> None:
    """Each check above fails for a result with one wrong field."""
    plain_case, fault_case, swap_case, lost_rank_case = (
        Case("a", "2x1", None, None, wrong=hook, run=run)  # type: ignore[arg-type]
        for hook, run in ((None, None), (print, None), (None, run_swap), (None, run_lost_rank))
    )
    good = {"difference": 1e-14, "argmax": True, "same_run": True, "tokens": True, "num_tokens": 40}
    assert describe_error(plain_case, good) is None and describe_error(fault_case, {**good, "difference": 2.0}) is None
    for change in ({"difference": 1e-9}, {"argmax": False}, {"same_run": False}, {"tokens": False}, {"num_tokens": 0}):
        assert describe_error(plain_case, good | change) is not None, change
    assert (
        describe_error(fault_case, good) is not None and describe_error(plain_case, {"error": "Traceback"}) is not None
    )
    good_swap = {
        "equal_state": True,
        "equal_swapped": True,
        "difference": dict.fromkeys(MESHES, 1e-14),
        "without_keys": 4.0,
    }
    assert describe_error(swap_case, good_swap) is None
    for change in (
        {"equal_state": False},
        {"equal_swapped": False},
        {"difference": {"1x1": 0.0}},
        {"without_keys": 0.0},
    ):
        assert describe_error(swap_case, good_swap | change) is not None, change
    session_case = Case("a", "4x1", None, None, run=run_session)  # type: ignore[arg-type]
    differences = {f"{hop}": 1e-14 for hop in range(len(HOPS))}
    good_session = {
        "tokens": True,
        "cached": True,
        "fingerprint_required": True,
        "difference": differences,
        "without_keys": 4.0,
    }
    assert describe_error(session_case, good_session) is None
    for change in (
        *({name: False} for name in ("tokens", "cached", "fingerprint_required")),
        {"difference": {}},
        {"without_keys": 0.0},
    ):
        assert describe_error(session_case, good_session | change) is not None, change
    storage_case = Case("a", "2x1", None, None, run=run_storage)  # type: ignore[arg-type]
    good_storage = dict.fromkeys(("swapped", "ram_store", "disk_store"), True) | dict.fromkeys(POSITIVE, 3)
    refusals = {
        "swap_dir": "swap_dir: unavailable with 2 ranks",
        "offload": "cache.overflow: must not be offload on a mesh",
        "fingerprint_required": "weights: ...",
    }
    good_storage |= {"num_tokens": 40, "store_failed": False, **refusals}
    assert describe_error(storage_case, good_storage) is None
    for name, value in good_storage.items():
        bad_value = "" if isinstance(value, str) else not value if isinstance(value, bool) else 0
        assert describe_error(storage_case, good_storage | {name: bad_value}) is not None, name
    assert describe_error(lost_rank_case, {"message": "", "finish": None, "sequence_error": None}) is not None
