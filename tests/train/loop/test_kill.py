"""kill -9 anywhere in training and saves: the resumed run ends with the same bits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SETUPS = ["plain", "at-once", "ema", "muon", "pairs", "lora", "summarizer"]  # of tests/support/kill_resume.py


def run(setup, kills, seed, folder, *more, limit=600):
    return subprocess.run(
        [sys.executable, "tests/support/kill_resume.py", setup, *map(str, (kills, seed, folder)), *more],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=limit,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )


def check(ran, kills):
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout)
    assert result["kills"] == kills and result["runs"] >= 1 and result["reached"] >= 2, result


@pytest.mark.parametrize(
    ("setup", "kills"), [("ema", 5), *(pytest.param(setup, 3, marks=pytest.mark.long) for setup in ("pairs", "lora"))]
)
def test_repeated_kills_end_with_the_same_bits(tmp_path, setup, kills):
    check(run(setup, kills, 0, tmp_path / "kills"), kills)


@pytest.mark.long
def test_the_comparison_detects_a_save_without_copy(tmp_path):
    ran = run("plain", 12, 0, tmp_path / "kills", "uncopied")
    assert ran.returncode != 0 and "AssertionError: plain: run" in ran.stderr


@pytest.mark.long(minutes=3)
@pytest.mark.parametrize("setup", SETUPS)
def test_five_hundred_kills(tmp_path, setup):
    check(run(setup, 72, 1, tmp_path / "kills", limit=3600), 72)
