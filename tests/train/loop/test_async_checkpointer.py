"""Asynchronous checkpoints: contents, order, errors."""

import itertools
import json
import math
import os
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from kvad.checkpoint.folder import list_steps, locate
from kvad.checkpoint.handle import CheckpointSnapshot, TrainingState, read_training_state
from kvad.checkpoint.native import open_folder
from kvad.errors import CheckpointError, MemoryPlanError, NumericalError, SaveError
from kvad.llm import LLM
from kvad.train.loop.async_checkpointer import AsyncCheckpointer
from kvad.train.loop.run import resume_model, train_model
from kvad.train.monitoring.callbacks import Callback
from kvad.train.objectives.cross_entropy import CrossEntropyObjective, EvalResult
from kvad.train.optim.optimizer import OptimizersContainer
from tests.support.training_runs import StopAt, hashes


class Disk:
    """Stores the weights of snapshots, each when a permit is released; ``entered``: a write has begun."""

    def __init__(self, permits=0, error=None):
        self.permits, self.entered = threading.Semaphore(permits), threading.Event()
        self.weights, self.error = [], error

    def write(self, snapshot):
        self.entered.set()
        assert self.permits.acquire(timeout=60)
        if self.error is not None:
            raise self.error
        self.weights.append({name: tensor.clone() for name, tensor in snapshot.weights.items()})
        return f"folder {snapshot.step}"

    def checkpointer(self, weights, async_save=True):
        steps, training = itertools.count(1), TrainingState({"moment": torch.zeros(2)}, {})
        snapshot = partial(CheckpointSnapshot, weights=weights, training=training, best=None)
        return AsyncCheckpointer(lambda: snapshot(next(steps)), self.write, async_save=async_save)


ONE = {"a": torch.ones(1)}


def test_a_save_holds_the_state_between_two_steps():
    weights, disk = {"a": torch.ones(4), "b": torch.zeros(2, 2)}, Disk()
    checkpointer = disk.checkpointer(weights)
    checkpointer.save()
    weights["a"].add_(1)  # the next step
    assert checkpointer.finished() == [], "reported before it was written"
    disk.permits.release(2)
    checkpointer.wait()
    assert checkpointer.finished() == [("folder 1", 1)] and checkpointer.finished() == []
    checkpointer.save()
    checkpointer.wait()
    assert [saved["a"].tolist() for saved in disk.weights] == [[1.0] * 4, [2.0] * 4]


def test_one_save_is_in_flight_and_the_next_waits():
    disk = Disk()
    checkpointer = disk.checkpointer(ONE)
    checkpointer.save()
    second = threading.Thread(target=checkpointer.save)
    second.start()
    assert disk.entered.wait(60)
    assert second.is_alive() and len(disk.weights) == 0
    disk.permits.release()
    second.join(60)
    assert not second.is_alive() and len(disk.weights) == 1
    disk.permits.release()
    checkpointer.wait()
    assert checkpointer.finished() == [("folder 1", 1), ("folder 2", 2)]


def test_save_errors_are_raised_in_training():
    checkpointer = Disk(1, SaveError("cannot save: No space left")).checkpointer(ONE)
    checkpointer.save()
    with pytest.raises(SaveError, match="No space left"):
        checkpointer.wait()
    assert checkpointer.finished() == []


def test_a_save_error_does_not_hide_another_error():
    checkpointer = Disk(1, SaveError("later")).checkpointer(ONE)
    checkpointer.save()
    checkpointer.close()  # as training does when it ends with another error


@pytest.mark.parametrize("async_save", [True, False])
def test_large_numbers_are_finite(async_save):
    checkpointer = Disk(1).checkpointer({"a": torch.full((4,), 3e38)}, async_save)  # their sum is infinite
    checkpointer.save()
    if async_save:
        checkpointer.wait()
    assert checkpointer.finished() == [("folder 1", 1)]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("async_save", [True, False])
def test_nonfinite_weights_are_not_saved(value, async_save):
    disk, weights = Disk(), {"fine": torch.ones(3), "bad.weight": torch.tensor([1.0, value])}
    with pytest.raises(NumericalError, match=r"step 1: bad.weight is no longer finite; no checkpoint was saved"):
        disk.checkpointer(weights, async_save).save()
    assert not disk.entered.is_set()


# ---------------------------------------------------------------- in a run


@pytest.mark.parametrize(
    "optim", [{}, {"ema_decay": 0.9}, {"average_last": 2, "average_interval": 2}], ids=["adamw", "ema", "average"]
)
def test_asynchronous_and_synchronous_saves_are_equal(corpus, tmp_path, run_config, optim):
    checkpoints = []
    for async_save in (True, False):
        out = tmp_path / str(async_save)
        settings = {"steps": 6, "save_interval": 2, "keep_checkpoints": 3, "keep_best": False, **optim}
        train_model(run_config(async_save=async_save, **settings), [corpus], out)
        checkpoints.append([hashes(path) for path in list_steps(out)])
    assert checkpoints[0] == checkpoints[1] and len(checkpoints[0]) == 3


class BlockedSaves(Callback):
    """Lets no save end before step ``until``; records steps and saves in order."""

    def __init__(self, monkeypatch, until):
        self.events, self._until, self._free = [], until, threading.Event()
        real = os.fsync

        def fsync(descriptor):
            if threading.current_thread() is not threading.main_thread():
                assert self._free.wait(60)
            real(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)

    def on_step(self, report):
        self.events.append(report.step)
        if report.step == self._until:
            self._free.set()

    def on_save(self, path, step):
        assert path.is_dir() and (path / "manifest.json").is_file()
        self.events.append(path.name)


def test_training_continues_during_a_save(corpus, tmp_path, run_config, monkeypatch):
    blocked = BlockedSaves(monkeypatch, until=4)
    out = tmp_path / "run"
    train_model(
        run_config(steps=5, save_interval=2, eval_interval=100, keep_checkpoints=9), [corpus], out, callbacks=[blocked]
    )
    assert blocked.events.index("step-00000002") > blocked.events.index(4), "steps 3 and 4 were made meanwhile"
    names = ["step-00000002", "step-00000004", "step-00000005"]
    assert (
        [events for events in blocked.events if isinstance(events, str)]
        == names
        == [path.name for path in list_steps(out)]
    )
    assert read_training_state(list_steps(out)[0]).state["trainer_state"]["step"] == 2


def test_ctrl_c_waits_for_the_save_in_flight(corpus, tmp_path, run_config, monkeypatch):
    callbacks = [StopAt(3), BlockedSaves(monkeypatch, until=3)]
    outcome = train_model(run_config(save_interval=2), [corpus], tmp_path / "run", callbacks=callbacks)
    assert outcome.reason == "interrupted" and outcome.checkpoint.name == "step-00000003"
    assert [path.name for path in list_steps(tmp_path / "run")] == ["step-00000002", "step-00000003"]
    assert not [thread for thread in threading.enumerate() if thread.name == "kvad-save"]


def test_a_folder_that_becomes_read_only_leaves_the_last_checkpoint(corpus, tmp_path, run_config, monkeypatch):
    real = Path.mkdir

    class Lock(Callback):
        def on_save(self, path, step):
            def mkdir(self, *arguments, **options):
                if "checkpoints" in self.parts:
                    raise PermissionError(30, "Read-only file system")
                real(self, *arguments, **options)

            monkeypatch.setattr(Path, "mkdir", mkdir)

    out = tmp_path / "run"
    with pytest.raises(SaveError, match=r"step-00000010.*Read-only file system"):
        train_model(run_config(), [corpus], out, callbacks=[Lock()])
    monkeypatch.undo()
    assert open_folder(out, verify=True).path.name == "step-00000005"


def test_weights_broken_by_an_update_are_not_saved(corpus, tmp_path, run_config, monkeypatch):
    """The loss of that step is finite."""
    real, calls = OptimizersContainer.step, iter(range(1, 100))

    def broken(optimization, norm):
        real(optimization, norm)
        if next(calls) == 10:
            optimization._named[0][1].data[0] = math.nan

    monkeypatch.setattr(OptimizersContainer, "step", broken)
    with pytest.raises(NumericalError, match=r"step 10: embedding.tokens.weight is no longer finite"):
        train_model(run_config(eval_interval=100), [corpus], tmp_path / "run")
    assert open_folder(tmp_path / "run", verify=True).path.name == "step-00000005"


def test_out_of_memory_in_a_step_states_the_estimate(corpus, tmp_path, run_config):
    class Hungry(Callback):
        def on_step(self, report):
            if report.step == 7:
                torch.empty(1 << 60)

    with pytest.raises(MemoryPlanError, match=r"out of memory in step 8, with 4 rows of 32 tokens") as caught:
        train_model(run_config(), [corpus], tmp_path / "run", callbacks=[Hungry()])
    assert "weights 92.75 KiB" in caught.value.message and "a lower train.batch_size" in caught.value.hint
    assert open_folder(tmp_path / "run", verify=True).path.name == "step-00000005"


# ---------------------------------------------------------------- the best


@pytest.fixture
def eval_losses(monkeypatch):
    """``eval_losses(1.0, 0.5, ...)`` replaces the results of a run's evaluations."""

    def make(*values):
        losses = iter(values)
        monkeypatch.setattr(CrossEntropyObjective, "evaluate_loss", lambda *_: EvalResult(next(losses), 100))

    return make


def test_the_best_step_is_saved_and_kept(corpus, tmp_path, run_config, eval_losses, listener):
    eval_losses(3.0, 2.0, 2.5, math.nan, 2.0, 2.1)
    out = tmp_path / "run"
    outcome = train_model(run_config(eval_interval=2, save_interval=5), [corpus], out, callbacks=[listener])
    assert [step for _, step in listener.saves] == [2, 4, 5, 10, 12]
    assert [path.name for path in list_steps(out)] == ["step-00000004", "step-00000010", "step-00000012"]
    assert locate(out / "best").name == "step-00000004" and outcome.best == 2.0
    assert locate(out).name == "step-00000012"
    with LLM.load(out / "best", max_num_seqs=1) as llm:
        assert llm.generate("1 is", max_tokens=3, temperature=0).usage.num_completion_tokens == 3


def test_without_keep_best_only_the_newest_stay(corpus, tmp_path, run_config, eval_losses, listener):
    eval_losses(3.0, 2.0, 2.5, 2.6, 2.7, 2.8)
    config = run_config(eval_interval=2, save_interval=5, keep_best=False)
    train_model(config, [corpus], tmp_path / "run", callbacks=[listener])
    assert [step for _, step in listener.saves] == [5, 10, 12] and not (tmp_path / "run" / "best").is_symlink()


def test_resume_uses_the_newest_step_and_keeps_the_best(corpus, tmp_path, run_config, eval_losses):
    out = tmp_path / "run"
    eval_losses(3.0, 2.0, 2.5)
    assert train_model(run_config(eval_interval=2, save_interval=3), [corpus], out, callbacks=[StopAt(7)]).step == 7
    assert locate(out / "best").name == "step-00000004"
    eval_losses(2.4, 2.3, 1.9)
    seen = []

    class First(Callback):
        def on_start(self, report):
            seen.append(report.step)

        def on_eval(self, report):
            seen.append(locate(out / "best").name)

    assert resume_model(out, callbacks=[First()]).step == 12
    assert seen == [7, *["step-00000004"] * 3], "8 and 10 are no better"
    assert locate(out / "best").name == "step-00000012"


def test_the_best_of_adapters(corpus, tmp_path, run_config, eval_losses):
    from kvad.checkpoint.loader import open_checkpoint
    from kvad.train.config.run import LoraConfig, TokenizerConfig

    base = train_model(run_config(steps=1), [corpus], tmp_path / "base").checkpoint
    config = replace(
        run_config(steps=6, eval_interval=2, save_interval=100, keep_checkpoints=1),
        model={"init": str(base)}, tokenizer=TokenizerConfig(), lora=LoraConfig(2),
    )  # fmt: skip
    eval_losses(3.0, 2.0, 2.5)
    train_model(config, [corpus], tmp_path / "run")
    found = open_checkpoint(tmp_path / "run" / "best")
    assert found.path.name == "step-00000004" and open_checkpoint(tmp_path / "run").path.name == "step-00000006"
    state = json.loads((found.path / "training" / "state.json").read_text())
    assert state["trainer_state"]["best_step"] == 4


def test_a_checkpoint_cannot_resume(corpus, tmp_path, run_config, eval_losses):
    eval_losses(3.0, 2.0, 2.5)
    train_model(run_config(steps=3, eval_interval=1), [corpus], tmp_path / "run")
    for name in ("best", "checkpoints/step-00000003"):
        with pytest.raises(CheckpointError, match="is a checkpoint, not a run") as caught:
            resume_model(tmp_path / "run" / name)
        assert caught.value.hint.endswith(f"--resume --out {tmp_path / 'run'}")
