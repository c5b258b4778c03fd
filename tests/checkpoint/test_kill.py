"""kill -9 in the middle of a save: the next start loads the last whole checkpoint, whichever operation it was."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Saves checkpoints of constant tensors over each other; dies at every operation in turn, in the middle of the tensor
# file too; after each death it says what a reader finds.
PROGRAM = """
import itertools, json, os, sys
sys.path.insert(0, "tests")
from pathlib import Path
import torch
from kvad.checkpoint import native
from kvad.checkpoint.native import open_folder, save_checkpoint, save_step
from kvad.config.model import ModelConfig
from tests.support.random_models import model_config
from tests.support import crash_process as mortal

CONFIG, SHAPES = model_config(), [(300, 7), (41,), (5, 5, 5)]

def tensors(value):
    return {str(i): torch.full(shape, float(value)) for i, shape in enumerate(SHAPES)}

def torn(death):
    real = native.save_file
    def save_file(content, path, *metadata):
        real(content, path, *metadata)
        whole = path.stat().st_size
        os.truncate(path, whole // 2)
        death.tick()
        os.truncate(path, 0)
        real(content, path, *metadata)
    native.save_file = save_file

def write(mode, run, value):
    if mode == "steps":
        save_step(run, value, CONFIG, tensors(value), None, keep=2)
    elif mode == "overwrite":
        save_step(run, 1000 - value, CONFIG, tensors(value), None, keep=2, fresh=True)
    elif mode == "folder":
        save_checkpoint(run, CONFIG, tensors(value), None)
    else:  # a writer without the renames: the test must see it fail
        run.mkdir(exist_ok=True)
        (run / "config.json").write_text(json.dumps(CONFIG.to_dict()))
        native.save_file(tensors(value), run / "model.safetensors")
        (run / "manifest.json").write_text(json.dumps({"format": native.FORMAT, "files": {
            name: native.file_digest(run / name) for name in ("config.json", "model.safetensors")}}))

def child(death, *arguments):
    torn(death)
    write(*arguments)

def die_everywhere(mode, run):
    write(mode, run, 1)
    value, done = 1, False
    for at in itertools.count(1):
        done = mortal.live(lambda death: child(death, mode, run, value + 1), at)
        try:
            found = {float(x) for tensor in open_folder(run, verify=True).tensors.values() for x in tensor.flatten()}
        except Exception as error:
            found = {repr(error)}
        one = {"mode": mode, "at": at, "done": done, "before": value, "found": sorted(map(str, found))}
        if not done:
            write(mode, run, value + 2)  # the next save, after which nothing of the dead one is left
            value += 2
        folder = run / "checkpoints" if (run / "checkpoints").exists() else run.parent
        print(json.dumps({**one, "left": sorted(path.name for path in folder.iterdir())}))
        if done:
            return

for mode in ("steps", "overwrite", "folder", "broken"):
    folder = Path(sys.argv[1], mode)
    folder.mkdir()
    die_everywhere(mode, folder / "run")
"""


@pytest.fixture(scope="module")
def deaths(tmp_path_factory):
    """By mode: one line per death."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path_factory.mktemp("deaths"))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, list] = {}
    for line in ran.stdout.splitlines():
        one = json.loads(line)
        found.setdefault(one["mode"], []).append(one)
    return found


@pytest.mark.parametrize("mode", ["steps", "overwrite", "folder"])
def test_a_kill_at_every_operation_of_a_save(deaths, mode):
    tries = deaths[mode]
    assert len(tries) >= 8 and tries[-1]["done"]
    for one in tries:
        old, new = str(float(one["before"])), str(float(one["before"] + 1))
        assert one["found"] in ([old], [new]), one
        assert not [name for name in one["left"] if name.startswith(".")], one
    assert tries[0]["found"] == [str(float(tries[0]["before"]))], "the first operation is before the commit"
    assert tries[-1]["found"] == [str(float(tries[-1]["before"] + 1))]


def test_a_writer_without_the_renames_is_caught(deaths):
    assert any("Error" in found for one in deaths["broken"] for found in one["found"])
