"""After kill -9 at any operation of a save, the last complete checkpoint is loaded."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Saves checkpoints of constant tensors over each other. The process is killed at every operation in turn, and in the
# middle of the tensor file; after each kill the program prints what a reader finds.
PROGRAM = """
import itertools, json, os, sys
sys.path.insert(0, "tests")
from pathlib import Path
import torch
from kvad.checkpoint import folder, safetensors_io
from kvad.checkpoint.native import open_folder, save_checkpoint
from tests.support.run_steps import save_step
from kvad.config.model import ModelConfig
from tests.support.random_models import model_config
from tests.support import crash_process

CONFIG, SHAPES = model_config(), [(300, 7), (41,), (5, 5, 5)]

def tensors(value):
    return {str(i): torch.full(shape, float(value)) for i, shape in enumerate(SHAPES)}

def tear_files(kill):
    real = safetensors_io.save_file
    def save_file(content, path, *metadata):
        real(content, path, *metadata)
        os.truncate(path, path.stat().st_size // 2)
        kill.tick()
        os.truncate(path, 0)
        real(content, path, *metadata)
    safetensors_io.save_file = save_file

def write(mode, run, value):
    if mode == "steps":
        save_step(run, value, CONFIG, tensors(value))
    elif mode == "overwrite":
        save_step(run, 1000 - value, CONFIG, tensors(value), fresh=True)
    elif mode in ("better", "worse"):  # the interrupted saves, which have even numbers, are the best, or are not
        best = value if mode == "better" or value % 2 else value - 1
        save_step(run, value, CONFIG, tensors(value), keep=1, best=best)
    elif mode == "folder":
        save_checkpoint(run, CONFIG, tensors(value), None)
    else:  # a writer without renames, which the test must detect
        run.mkdir(exist_ok=True)
        (run / "config.json").write_text(json.dumps(CONFIG.to_dict()))
        safetensors_io.save_file(tensors(value), run / "model.safetensors")
        (run / "manifest.json").write_text(json.dumps({"format": folder.FORMAT, "files": {
            name: folder.file_digest(run / name) for name in ("config.json", "model.safetensors")}}))

def child(kill, *arguments):
    tear_files(kill)
    Path.symlink_to, Path.unlink = kill.counted(Path.symlink_to), kill.counted(Path.unlink)
    write(*arguments)

def kill_everywhere(mode, run):
    write(mode, run, 1)
    value, done = 1, False
    for at in itertools.count(1):
        done = crash_process.finishes(lambda kill: child(kill, mode, run, value + 1), at)
        try:
            values = {float(x) for tensor in open_folder(run, verify=True).tensors.values() for x in tensor.flatten()}
        except Exception as error:
            values = {repr(error)}
        result = {"mode": mode, "at": at, "done": done, "before": value, "values": sorted(map(str, values))}
        if (run / "best").is_symlink():
            result["best"] = float(open_folder(run / "best", verify=True).tensors["1"][0])
        if not done:
            write(mode, run, value + 2)  # the next save removes all files of the killed one
            value += 2
        parent = run / "checkpoints" if (run / "checkpoints").exists() else run.parent
        result |= {"files": sorted(path.name for path in parent.iterdir()), "run": sorted(os.listdir(run))}
        print(json.dumps(result))
        if done:
            return

for mode in ("steps", "overwrite", "better", "worse", "folder", "broken"):
    path = Path(sys.argv[1], mode)
    path.mkdir()
    kill_everywhere(mode, path / "run")
"""


@pytest.fixture(scope="module")
def kills(tmp_path_factory):
    """Return the results of all kills by mode."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path_factory.mktemp("kills"))]
    options = {"cwd": ROOT, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
    process = subprocess.run(command, capture_output=True, text=True, timeout=300, **options)
    assert process.returncode == 0, process.stderr
    results: dict[str, list] = {}
    for line in process.stdout.splitlines():
        results.setdefault(json.loads(line)["mode"], []).append(json.loads(line))
    return results


@pytest.mark.parametrize("mode", ["steps", "overwrite", "better", "worse", "folder"])
def test_a_kill_at_any_operation_leaves_the_old_or_the_new_checkpoint(kills, mode):
    results = kills[mode]
    assert len(results) >= 8 and results[-1]["done"]
    for result in results:
        old, new = str(float(result["before"])), str(float(result["before"] + 1))
        assert result["values"] in ([old], [new]), result
        assert not [name for name in result["files"] if name.startswith(".")], result
    assert results[0]["values"] == [str(float(results[0]["before"]))], "the first operation is before the commit"
    assert results[-1]["values"] == [str(float(results[-1]["before"] + 1))]


@pytest.mark.parametrize("mode", ["better", "worse"])
def test_best_is_complete_after_a_kill_at_any_operation(kills, mode):
    for result in kills[mode]:
        new = result["before"] + (mode == "better")
        is_saved = result["values"] == [str(float(result["before"] + 1))]
        assert result["best"] in {result["before"], new if is_saved else result["before"]}, result
        assert result["run"] == ["best", "checkpoints"], "no file of the killed process remains"
        assert result["done"] or len(result["files"]) == 1, "older steps are deleted"
    assert kills[mode][-1]["best"] == new


def test_a_writer_without_renames_is_detected(kills):
    assert any("Error" in value for result in kills["broken"] for value in result["values"])
