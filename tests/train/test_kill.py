"""kill -9 anywhere in training, in saves and between micro-batches too: what is resumed ends as if nothing had been."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
import json, random, sys
sys.path.insert(0, "tests")
from pathlib import Path
import torch
import torch._dynamo  # the optimizer imports it, a second each time: once, before the forks
from kvad.checkpoint.folder import steps_of
from kvad.checkpoint.native import load
from kvad.train.objective import NextToken
from kvad.train.config import RunConfig
from kvad.train.job import resume, train
from kvad.train.metrics import read_metrics
import mortal

corpus, whole, parts = map(Path, sys.argv[1:4])
kills, seed = map(int, sys.argv[4:])
config = RunConfig.from_dict({
    "model": {"preset": "tiny", "set": {"width": 32, "decoder.layers": 1, "decoder.kinds.L.mlp.hidden": 32}},
    "data": {"context": 16}, "tokenizer": {"kind": "byte"},
    "train": {"steps": 24, "batch": 3, "accumulate": 3, "log_every": 1, "eval_every": 7, "save_every": 2,
              "precision": "fp32"},
})

def go(out, death):
    real = NextToken.backward
    def backward(*arguments):
        death.tick()
        return real(*arguments)
    NextToken.backward = backward
    resume(out) if steps_of(out) else train(config, [corpus], out)

def summary(out):
    lines = read_metrics(out / "metrics.jsonl")
    files = load(out, verify=True).files
    return {
        "losses": [(l["step"], l["loss"]) for l in lines if l["kind"] == "step"],
        "evals": [(l["step"], l["val_loss"]) for l in lines if l["kind"] == "eval"],
        "weights": files["model.safetensors"]["sha256"], "state": files["training/state.safetensors"]["sha256"],
    }

assert mortal.live(lambda death: go(whole, death), 0)
random.seed(seed)
died, steps = 0, []
while died < kills and not mortal.live(lambda death: go(parts, death), random.randint(1, 70)):
    died += 1
    if steps_of(parts):
        steps.append(load(parts, verify=True).training.state["progress"]["step"])
assert mortal.live(lambda death: go(parts, death), 0)
print(json.dumps({"whole": summary(whole), "parts": summary(parts), "died": died, "steps": steps}))
"""


def run(corpus, tmp_path, kills, seed):
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, (corpus, tmp_path / "whole", tmp_path / "parts", kills, seed))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def judge(found, at_least):
    assert found["died"] >= at_least and found["steps"] == sorted(found["steps"])
    assert [step for step, _ in found["whole"]["losses"]] == list(range(1, 25))
    assert found["parts"] == found["whole"]


def test_killed_again_and_again_it_ends_with_the_same_bits(corpus, tmp_path):
    judge(run(corpus, tmp_path, kills=10, seed=0), at_least=5)


@pytest.mark.long(minutes=3)
@pytest.mark.parametrize("seed", range(1, 11))
def test_a_hundred_kills(corpus, tmp_path, seed):
    judge(run(corpus, tmp_path, kills=10, seed=seed), at_least=3)
