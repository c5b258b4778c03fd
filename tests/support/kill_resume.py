"""Training killed with SIGKILL at random operations and resumed; every number must equal the uninterrupted run.

    OMP_NUM_THREADS=1 python tests/support/kill_resume.py SETUP KILLS SEED FOLDER [uncopied]   one JSON object on stdout

A parent process that has imported torch forks each child, so that a kill costs a fraction of a second. A child is
killed at its n-th operation (a flush, a rename, a new folder, a half-written tensor file, the start of a micro-batch)
or after a random time; saves run while training continues, so each may be interrupted by the other. After each kill
the newest and the best checkpoint must be complete. A finished run is compared, file by file, with one that was never
killed; then another run begins, until KILLS children were killed. "uncopied" disables the copy that makes a
concurrent save consistent, to show that the comparison fails.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # noqa: F401  imported by the optimizer in a second; here once, before the forks

from kvad.checkpoint import adapter, native, summarizer
from kvad.checkpoint.folder import TRAINING, check_file, list_steps, read_json, read_manifest
from kvad.train.config.run import RunConfig
from kvad.train.loop import async_checkpointer
from kvad.train.loop import run as loop
from kvad.train.monitoring.metrics import read_metrics
from kvad.train.objectives import cross_entropy, summary_distillation
from kvad.train.sources.pairs import PairPaths
from tests.support.crash_process import Killer, finishes

STEPS = 24
SMALL = {"hidden_size": 32, "decoder.num_layers": 1, "decoder.layer_types.L.mlp.intermediate_size": 32}
BOTH = {**SMALL, "encoder.num_layers": 1, "encoder.layer_types.L.mlp.intermediate_size": 32}
DROPOUT = {"dropout.residual": 0.2, "dropout.hidden": 0.1}
TRAIN = {
    "steps": STEPS,
    "batch_size": 3,
    "gradient_accumulation_steps": 3,
    "log_interval": 1,
    "eval_interval": 7,
    "save_interval": 2,
}
BYTES = {"data": {"seq_len": 16}, "tokenizer": {"kind": "byte"}}
DECODER = {"preset": "tiny", "set": SMALL}

SETUPS: dict[str, dict[str, Any]] = {
    "plain": {"model": DECODER, **BYTES},
    "at-once": {"model": DECODER, **BYTES, "train": {"async_save": False}},
    "ema": {"model": {"preset": "tiny", "set": {**SMALL, **DROPOUT}}, **BYTES, "optim": {"ema_decay": 0.9}},
    "muon": {
        "model": {"preset": "tiny", "set": {**SMALL, **DROPOUT}},
        "data": {"seq_len": 16, "order": "stream", "shuffle_buffer": 8},
        "tokenizer": {"kind": "byte"},
        "optim": {"name": "muon", "average_last": 3, "average_interval": 4, "schedule": "plateau"},
    },
    "pairs": {
        "model": {"preset": "transformer-tiny", "set": {**BOTH, **DROPOUT}},
        "data": {"seq_len": 12},
        "tokenizer": {"kind": "char"},
        "objective": {"label_smoothing": 0.1, "scheduled_sampling": 0.3},
    },
    "lora": {
        "model": {"init": "BASE"},
        "data": {"seq_len": 16},
        "lora": {"rank": 2, "target_modules": "all", "dropout": 0.2},
    },
    "summarizer": {
        "objective": {"kind": "summarizer"},
        "summarizer": {"model": "BASE", "ratio": 2, "recent": 2, "interval": 2, "hidden_size": 4},
        "data": {"seq_len": 16},
    },
}


class Run:
    """One setup in a folder: its training data, and its base model if it has one."""

    def __init__(self, setup: str, folder: Path, uncopied: bool) -> None:
        self.folder, self.setup, self.uncopied = folder, setup, uncopied
        text = json.dumps(SETUPS[setup]).replace('"BASE"', json.dumps(str(folder / "base")))
        content = json.loads(text)
        content["train"] = {**TRAIN, "precision": "fp32", **content.get("train", {})}
        self.config = RunConfig.from_dict(content)
        self.has_base = "BASE" in json.dumps(SETUPS[setup])
        self.corpus: Any = [folder / "corpus"]
        if setup == "pairs":
            self.corpus = PairPaths(((folder / "pairs.tsv",),), ())

    def write_corpus(self) -> None:
        (self.folder / "corpus").mkdir(parents=True)
        for number in range(12):
            words = [f"{number + i} is less than {number + i + 1}." for i in range(8)]
            (self.folder / "corpus" / f"{number:02d}.txt").write_text(" ".join(words))
        words = ["".join(random.choices("abcd", k=1 + number % 6)) for number in range(120)]
        (self.folder / "pairs.tsv").write_text("".join(f"{word}\t{word[::-1]}\n" for word in words))

    def train_base(self) -> None:
        content = {"model": DECODER, **BYTES, "train": {"steps": 2, "batch_size": 2, "precision": "fp32"}}
        loop.train_model(RunConfig.from_dict(content), self.corpus, self.folder / "base")

    def run_child(self, out: Path, killer: Killer) -> None:
        """Run one child: from the newest checkpoint, or from the beginning."""
        count_more_operations(killer)
        if self.uncopied and out.name == "parts":
            save_without_copy()
        if list_steps(out):
            loop.resume_model(out)
        else:
            loop.train_model(self.config, self.corpus, out)


def save_without_copy() -> None:
    """Write the tensors that are being trained, after three more micro-batches or 0.2 s each: they have changed."""
    batches, save = threading.Semaphore(0), native.save_tensors
    accumulate = cross_entropy.CrossEntropyObjective.accumulate_gradients

    def count(*arguments: Any, **options: Any) -> Any:
        batches.release()
        return accumulate(*arguments, **options)

    def save_late(*arguments: Any) -> None:
        for _ in range(3):
            batches.acquire(timeout=0.2)
        save(*arguments)

    cross_entropy.CrossEntropyObjective.accumulate_gradients = count  # type: ignore[method-assign]
    native.save_tensors = save_late
    async_checkpointer.AsyncCheckpointer._copy = lambda self, group, tensors: tensors  # type: ignore[method-assign]


def count_more_operations(killer: Killer) -> None:
    """Count micro-batches and halves of tensor files as operations too."""
    for owner in (
        cross_entropy.CrossEntropyObjective,
        cross_entropy.ScheduledSamplingObjective,
        summary_distillation.SummaryDistillation,
    ):
        owner.accumulate_gradients = killer.counted(owner.accumulate_gradients)  # type: ignore[method-assign]
    real = native.save_tensors

    def save_in_halves(folder: Path, path: Path, *rest: Any) -> None:
        real(folder, path, *rest)
        os.truncate(path, path.stat().st_size // 2)
        killer.tick()
        real(folder, path, *rest)

    for module in (native, adapter, summarizer):
        module.save_tensors = save_in_halves  # type: ignore[attr-defined]


def manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of a step of any kind and check every file against it."""
    tensors = next(name for name in ("model", "adapter_model", "summarizer") if (path / f"{name}.safetensors").exists())
    files = read_manifest(path, f"{tensors}.safetensors")
    for name, entry in files.items():
        check_file(path / name, entry, "sha256")
    return files


def progress(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_json(path / TRAINING / "state.json")["trainer_state"]
    return {key: value for key, value in found.items() if key != "elapsed"}


def summary(out: Path) -> dict[str, Any]:
    """Collect all that must be equal: every loss, every byte of the newest and the best checkpoint except times."""
    lines = read_metrics(out / "metrics.jsonl")
    found: dict[str, Any] = {
        "losses": [(line["step"], line["loss"], line["grad_norm"]) for line in lines if line["kind"] == "step"],
        "evals": [(line["step"], line["val_loss"], line["best"]) for line in lines if line["kind"] == "eval"],
    }
    for which, path in (("newest", list_steps(out)[-1]), ("best", locate_best(out))):
        files = manifest(path)
        found[which] = (
            path.name,
            progress(path),
            {n: e["sha256"] for n, e in files.items() if n != "training/state.json"},
        )
    return found


def locate_best(out: Path) -> Path:
    return out / "checkpoints" / Path(os.readlink(out / "best")).name


def main(setup: str, kills: int, seed: int, folder: Path, uncopied: bool = False) -> None:
    run, began = Run(setup, folder, uncopied), time.monotonic()
    random.seed(seed)
    run.write_corpus()
    if run.has_base:
        assert finishes(lambda killer: run.train_base(), 0)
    first = time.monotonic()
    assert finishes(lambda killer: run.run_child(folder / "whole", killer), 0)
    whole, took = summary(folder / "whole"), time.monotonic() - first
    assert [step for step, *_ in whole["losses"]] == list(range(1, STEPS + 1))
    num_kills, runs, steps, out = 0, 0, list[int](), folder / "parts"
    while num_kills < kills:
        shutil.rmtree(out, ignore_errors=True)
        before, ended = 0, False
        while not ended:
            if num_kills >= kills:
                at, within = 0, None  # the last child is not killed
            elif random.random() < 0.5:
                at, within = random.randint(1, 120), None
            else:
                at, within = 0, random.uniform(0.1, 0.9) * took
            ended = finishes(lambda killer: run.run_child(out, killer), at, within)
            num_kills += not ended
            if list_steps(out):
                newest = list_steps(out)[-1]
                manifest(newest)
                now = progress(newest)["step"]
                assert now >= before, "a checkpoint was lost"
                before, steps = now, [*steps, now]
                if (out / "best").is_symlink():
                    manifest(locate_best(out))
        runs += 1
        assert json.dumps(summary(out)) == json.dumps(whole), f"{setup}: run {runs}, {num_kills} kills"
    report = {"setup": setup, "seed": seed, "kills": num_kills, "runs": runs, "reached": len(set(steps))}
    print(json.dumps({**report, "seconds": round(time.monotonic() - began, 1)}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5:] == ["uncopied"])
