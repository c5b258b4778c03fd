"""The programs in benchmarks/: each starts and prints its options; the fast ones measure something."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.name for path in (ROOT / "benchmarks").glob("*.py"))
FAST = {
    "decoding_by_format.py": "--seq-len 64 --repeats 1",
    "decoding_by_policy.py": "--seq-len 64 --steps 2 --policies full sinks(4,12)",
    "preemption.py": "--lengths 32 --repeats 1",
    "scheduler.py": "--steps 8",
    "scheduled_sampling.py": "--steps 1 --batch-size 1",
    "decoding_by_mesh.py": "--steps 9 --max-num-seqs 1 --seq-len 8 --layers 2 --width 128",
    "token_offload.py": "--seq-len 256 --pool-size 64 --steps 2",
    "training_step.py": "recipes/shakespeare-char-cpu.toml --repeats 1",
    "training_peers.py": "--layers 1 --width 64 --heads 2 --vocab 66 --batch-size 1 --seq-len 16 --steps 1 "
    "--peers kvad nanogpt",
}


def run(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "benchmarks" / script), *options]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.long
@pytest.mark.parametrize("script", SCRIPTS)
def test_script_prints_its_options(script):
    result = run(script, "--help")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("usage:")


@pytest.mark.long
@pytest.mark.parametrize("script", FAST)
def test_script_prints_measurements_as_json_lines(script):
    result = run(script, *FAST[script].split())
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert lines and all(isinstance(line, dict) for line in lines)
