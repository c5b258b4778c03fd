"""``docs/reference/models.md`` equals the output of ``scripts/models`` and has every family and golden file.

After adding a family or a golden, ``scripts/models --run`` runs the tests and writes both files.
"""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvad.checkpoint.families import FAMILIES, UNSUPPORTED
from tests.hf_parity import checkpoint, page

RESULTS = json.loads(page.RESULTS.read_text("utf-8"))
HINT = f"write it again: {page.AGAIN}"


def rows(text: str, heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading, without its head."""
    below = text.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in below.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_page_equals_script_output() -> None:
    assert page.PAGE.read_text("utf-8") == page.page(RESULTS), HINT


def test_results_file_equals_script_output() -> None:
    assert page.RESULTS.read_text("utf-8") == page.stored(RESULTS), HINT


def test_every_family_has_a_row() -> None:
    families = [row[0].strip("`") for row in rows(page.PAGE.read_text("utf-8"), "Families")]
    assert sorted(families) == sorted(FAMILIES), HINT


def test_most_generative_families_are_decoders() -> None:
    """Note 001: generative models are mostly decoder-only; here they are those with a decoder."""
    topologies = [row[2] for row in rows(page.PAGE.read_text("utf-8"), "Families")]
    decoders, pairs = (topologies.count(name) for name in ("decoder", "encoder-decoder"))
    assert decoders > 3 * pairs > 0


def test_every_refused_model_type_is_listed() -> None:
    refused = page.PAGE.read_text("utf-8").split("## Refused models and options", 1)[1]
    assert all(f"- `{model_type}`: " in refused for model_type in UNSUPPORTED), HINT


def test_options_are_refused_by_families() -> None:
    names = {
        name for row in rows(page.PAGE.read_text("utf-8"), "Refused models and options") for name in row[3].split(", ")
    }
    assert {"`bart`", "`gpt2`", "`t5`"} <= names <= {f"`{family}`" for family in FAMILIES}


@pytest.mark.parametrize("oracle", checkpoint.ORACLES)
def test_every_golden_file_was_tested(oracle: str) -> None:
    """Outputs and the exported file agree, or the checkpoint is refused."""
    for case in checkpoint.names(oracle):
        result = RESULTS.get(case, {}).get(oracle, {})
        assert "refused" in result or {"outputs", "written"} <= set(result), f"{case} of {oracle}: {HINT}"
        for check, entry in result.items():
            assert entry["outcome"] in ("passed", "skipped"), (case, oracle, check, entry)
            assert entry["outcome"] == "passed" or "::test_" in entry["message"], (case, oracle, check, entry)
        if result.get("outputs", {}).get("outcome") == "passed":
            assert 0 <= result["outputs"]["largest"] < 1e-3


def test_results_name_existing_golden_files() -> None:
    for case, each in RESULTS.items():
        assert all(case in checkpoint.names(oracle) for oracle in each), f"{case}: {HINT}"


# ---------------------------------------------------------------- the checks can fail


def test_failures_are_shown() -> None:
    worse = copy.deepcopy(RESULTS)
    worse["gpt2"]["5"]["outputs"] = {"outcome": "failure", "message": "not close"}
    worse["gpt2"]["5"]["greedy"] = {"outcome": "failure", "message": "another token"}
    cells = next(row for row in rows(page.page(worse), "Families") if row[0] == "`gpt2`")
    assert sum("fail**" in cell for cell in cells) == 2


def test_untested_results_are_not_claimed() -> None:
    without = {case: each for case, each in RESULTS.items() if case != "gptj"}
    cells = next(row for row in rows(page.page(without), "Families") if row[0] == "`gptj`")
    assert cells[5:] == ["not run", "not run", "-", "-", "-"]
    half = copy.deepcopy(RESULTS)
    del half["gptj"]["5"]["written"]
    cells = next(row for row in rows(page.page(half), "Families") if row[0] == "`gptj`")
    assert cells[7] == "1 of 2"


def test_family_without_golden_files_is_marked() -> None:
    cells = next(row for row in rows(page.PAGE.read_text("utf-8"), "Families") if row[0] == "`nomic_bert`")
    assert cells[5] == "no reference" and re.fullmatch(r"\de-\d\d", cells[6])


def test_pytest_reports_are_read() -> None:
    report = """<testsuites><testsuite>
        <testcase name="test_outputs_equal_the_reference[llama-linear-4.57]">
          <properties><property name="largest" value="2.5e-06"/></properties></testcase>
        <testcase name="test_outputs_equal_the_reference[t5gemma-5]"><skipped message="test_x.py::test_y"/></testcase>
        <testcase name="test_greedy_tokens_equal_the_reference[t5-v1.1-5]"><failure message="no&#10;more"/></testcase>
        <testcase name="test_unsupported_options_are_refused[4.57-roformer-rotary-value]"/>
        <testcase name="test_something_else[llama-5]"/><testcase name="test_outputs_equal_the_reference"/>
        </testsuite></testsuites>"""
    assert page.parse(report) == {
        "llama-linear": {"4.57": {"outputs": {"outcome": "passed", "largest": 2.5e-06}}},
        "t5gemma": {"5": {"outputs": {"outcome": "skipped", "message": "test_x.py::test_y"}}},
        "t5-v1.1": {"5": {"greedy": {"outcome": "failure", "message": "no"}}},
        "roformer-rotary-value": {"4.57": {"refused": {"outcome": "passed"}}},
    }


def test_differences_are_recorded(recorded_files: dict[str, float]) -> None:
    assert recorded_files == {"test_far": pytest.approx(0.25), "test_near": pytest.approx(1e-6, rel=0.1)}


@pytest.fixture
def recorded_files(tmp_path: Path) -> dict[str, float]:
    """Return what the plugin writes for two tests, one of which fails."""
    (tmp_path / "test_it.py").write_text(
        "import torch\n"
        "def test_near():\n    torch.testing.assert_close(torch.ones(2), torch.ones(2) + 1e-6)\n"
        "def test_far():\n    torch.testing.assert_close(torch.ones(2), torch.tensor([1.0, 1.25]))\n"
        "def test_none():\n    pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.hf_parity.record", "--junitxml=r.xml", "test_it.py"]
    environment = {**os.environ, "PYTHONPATH": str(page.ROOT)}
    subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=120, check=False)
    results = {}
    for test in ElementTree.fromstring((tmp_path / "r.xml").read_text()).iter("testcase"):
        for result in test.iter("property"):
            results[str(test.get("name"))] = float(str(result.get("value")))
    return results
