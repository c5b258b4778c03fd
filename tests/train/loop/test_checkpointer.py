"""Asynchronous checkpoints: contents, order, errors."""

import json
import math
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvad.checkpoint.folder import list_steps, locate
from kvad.checkpoint.handle import CheckpointSnapshot, TrainingState, read_training_state
from kvad.checkpoint.native import open_folder
from kvad.errors import CheckpointError, MemoryPlanError, NumericalError, SaveError
from kvad.llm import LLM
from kvad.train.loop.checkpointer import AsyncCheckpointer
from kvad.train.loop.run import resume_model, train_model
from kvad.train.monitoring.callbacks import Callback
from kvad.train.objectives.cross_entropy import CrossEntropyObjective, EvalResult
from kvad.train.optim.optimizer import OptimizersContainer


class Disk:
    """Writes moments into a list, each when it is let; ``entered``: one is being written."""

    def __init__(self):
        self.let, self.entered, self.found, self.error = threading.Semaphore(0), threading.Event(), [], None

    def write(self, moment):
        self.entered.set()
        assert self.let.acquire(timeout=60)
        if self.error is not None:
            raise self.error
        self.found.append({name: tensor.clone() for name, tensor in moment.weights.items()})
        return f"folder {moment.step}"


def saver_of(weights, disk, beside=True):
    step = iter(range(1, 100))
    state = {"moment": torch.zeros(2)}
    return AsyncCheckpointer(
        lambda: CheckpointSnapshot(next(step), weights, TrainingState(state, {}), None), disk.write, async_save=beside
    )


def test_a_save_holds_the_state_between_two_steps():
    weights, disk = {"a": torch.ones(4), "b": torch.zeros(2, 2)}, Disk()
    saver = saver_of(weights, disk)
    saver.save()
    weights["a"].add_(1)  # training goes on
    assert saver.finished() == [], "nothing is told before it is there"
    disk.let.release()
    saver.wait()
    assert saver.finished() == [("folder 1", 1)] and saver.finished() == []
    assert disk.found[0]["a"].tolist() == [1.0] * 4
    disk.let.release()
    saver.save()
    saver.wait()
    assert disk.found[1]["a"].tolist() == [2.0] * 4


def test_one_is_in_flight_and_the_next_waits():
    weights, disk = {"a": torch.ones(1)}, Disk()
    saver = saver_of(weights, disk)
    saver.save()
    second = threading.Thread(target=saver.save)
    second.start()
    assert disk.entered.wait(60)
    assert second.is_alive() and len(disk.found) == 0
    disk.let.release()
    second.join(60)
    assert not second.is_alive() and len(disk.found) == 1
    disk.let.release()
    saver.wait()
    assert saver.finished() == [("folder 1", 1), ("folder 2", 2)]


def test_save_errors_are_raised_in_training():
    disk = Disk()
    saver = saver_of({"a": torch.ones(1)}, disk)
    disk.error = SaveError("cannot save: No space left")
    disk.let.release()
    saver.save()
    with pytest.raises(SaveError, match="No space left"):
        saver.wait()
    assert saver.finished() == []


def test_a_save_error_does_not_hide_another_error():
    disk = Disk()
    saver = saver_of({"a": torch.ones(1)}, disk)
    disk.error = SaveError("later")
    disk.let.release()
    saver.save()
    saver.close()  # as training does when it ends with an error of its own


def test_synchronous_saves():
    disk = Disk()
    saver = saver_of({"a": torch.ones(1)}, disk, beside=False)
    disk.let.release()
    saver.save()
    assert saver.finished() == [("folder 1", 1)]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("beside", [True, False])
def test_nonfinite_weights_are_not_saved(value, beside):
    disk, weights = Disk(), {"fine": torch.ones(3), "bad.weight": torch.tensor([1.0, value])}
    with pytest.raises(NumericalError, match=r"step 1: bad.weight is no longer finite; no checkpoint was saved"):
        saver_of(weights, disk, beside).save()
    assert not disk.entered.is_set()


def test_large_numbers_are_finite():
    disk = Disk()
    saver = saver_of({"a": torch.full((4,), 3e38)}, disk)  # their sum is not
    disk.let.release()
    saver.save()
    saver.wait()
    assert len(disk.found) == 1


# ---------------------------------------------------------------- in a run


def hashes(path):
    files = open_folder(path, verify=True).files
    return files["model.safetensors"]["sha256"], files["training/state.safetensors"]["sha256"]


@pytest.mark.parametrize(
    "optim", [{}, {"ema_decay": 0.9}, {"average_last": 2, "average_interval": 2}], ids=["adamw", "ema", "average"]
)
def test_asynchronous_and_synchronous_saves_are_equal(corpus, tmp_path, run_config, optim):
    for name in ("beside", "once"):
        config = run_config(
            steps=6, save_interval=2, keep_checkpoints=3, keep_best=False, async_save=name == "beside", **optim
        )
        train_model(config, [corpus], tmp_path / name)
    found = [[hashes(path) for path in list_steps(tmp_path / name)] for name in ("beside", "once")]
    assert found[0] == found[1] and len(found[0]) == 3


class Held(Callback):
    """Lets no save end before step ``until`` is done; what it was told, in order."""

    def __init__(self, monkeypatch, until):
        self.told, self._until, self._free = [], until, threading.Event()
        real = os.fsync

        def fsync(descriptor):
            if threading.current_thread() is not threading.main_thread():
                assert self._free.wait(60)
            real(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)

    def on_step(self, report):
        self.told.append(report.step)
        if report.step == self._until:
            self._free.set()

    def on_save(self, path, step):
        assert path.is_dir() and (path / "manifest.json").is_file()
        self.told.append(path.name)


def test_training_continues_during_a_save(corpus, tmp_path, run_config, monkeypatch):
    held = Held(monkeypatch, until=4)
    out = tmp_path / "run"
    train_model(
        run_config(steps=5, save_interval=2, eval_interval=100, keep_checkpoints=9), [corpus], out, callbacks=[held]
    )
    assert held.told.index("step-00000002") > held.told.index(4), "steps 3 and 4 were made meanwhile"
    names = ["step-00000002", "step-00000004", "step-00000005"]
    assert [told for told in held.told if isinstance(told, str)] == names == [path.name for path in list_steps(out)]
    assert read_training_state(list_steps(out)[0]).state["trainer_state"]["step"] == 2


def test_ctrl_c_waits_for_the_save_in_flight(corpus, tmp_path, run_config, monkeypatch):
    class Stop(Held):
        def on_step(self, report):
            if report.step == 3:
                os.kill(os.getpid(), signal.SIGINT)
            super().on_step(report)

    outcome = train_model(
        run_config(save_interval=2), [corpus], tmp_path / "run", callbacks=[Stop(monkeypatch, until=3)]
    )
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
    """The loss of that step was fine; only the next would tell."""
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
    assert "weights 0.1 MiB" in caught.value.message and "a lower train.batch_size" in caught.value.hint
    assert open_folder(tmp_path / "run", verify=True).path.name == "step-00000005"


# ---------------------------------------------------------------- the best


@pytest.fixture
def judged(monkeypatch):
    """``judged(1.0, 0.5, ...)``: what the evaluations of a run find, one after the other."""

    def make(*values):
        found = iter(values)
        monkeypatch.setattr(CrossEntropyObjective, "evaluate_loss", lambda *_: EvalResult(next(found), 100))

    return make


def test_the_best_step_is_saved_and_kept(corpus, tmp_path, run_config, judged, listener):
    judged(3.0, 2.0, 2.5, math.nan, 2.0, 2.1)
    out = tmp_path / "run"
    outcome = train_model(run_config(eval_interval=2, save_interval=5), [corpus], out, callbacks=[listener])
    assert [step for _, step in listener.saves] == [2, 4, 5, 10, 12]
    assert [path.name for path in list_steps(out)] == ["step-00000004", "step-00000010", "step-00000012"]
    assert locate(out / "best").name == "step-00000004" and outcome.best == 2.0
    assert locate(out).name == "step-00000012"
    with LLM.load(out / "best", max_num_seqs=1) as llm:
        assert llm.generate("1 is", max_tokens=3, temperature=0).usage.num_completion_tokens == 3


def test_without_keep_best_only_the_newest_stay(corpus, tmp_path, run_config, judged, listener):
    judged(3.0, 2.0, 2.5, 2.6, 2.7, 2.8)
    config = run_config(eval_interval=2, save_interval=5, keep_best=False)
    train_model(config, [corpus], tmp_path / "run", callbacks=[listener])
    assert [step for _, step in listener.saves] == [5, 10, 12] and not (tmp_path / "run" / "best").is_symlink()


def test_resume_uses_the_newest_step_and_keeps_the_best(corpus, tmp_path, run_config, judged):
    class StopAt7(Callback):
        def on_step(self, report):
            if report.step == 7:
                os.kill(os.getpid(), signal.SIGINT)

    out = tmp_path / "run"
    judged(3.0, 2.0, 2.5)
    assert train_model(run_config(eval_interval=2, save_interval=3), [corpus], out, callbacks=[StopAt7()]).step == 7
    assert locate(out / "best").name == "step-00000004"
    judged(2.4, 2.3, 1.9)
    seen = []

    class First(Callback):
        def on_start(self, report):
            seen.append(report.step)

        def on_eval(self, report):
            seen.append(locate(out / "best").name)

    assert resume_model(out, callbacks=[First()]).step == 12
    assert seen == [7, *["step-00000004"] * 3], "8 and 10 are no better"
    assert locate(out / "best").name == "step-00000012"


def test_the_best_of_adapters(corpus, tmp_path, run_config, judged):
    from kvad.checkpoint.loader import open_checkpoint
    from kvad.train.config.data import TokenizerConfig
    from kvad.train.config.run import LoraConfig

    base = train_model(run_config(steps=1), [corpus], tmp_path / "base").checkpoint
    config = replace(
        run_config(steps=6, eval_interval=2, save_interval=100, keep_checkpoints=1),
        model={"init": str(base)}, tokenizer=TokenizerConfig(), lora=LoraConfig(2),
    )  # fmt: skip
    judged(3.0, 2.0, 2.5)
    train_model(config, [corpus], tmp_path / "run")
    found = open_checkpoint(tmp_path / "run" / "best")
    assert found.path.name == "step-00000004" and open_checkpoint(tmp_path / "run").path.name == "step-00000006"
    state = json.loads((found.path / "training" / "state.json").read_text())
    assert state["trainer_state"]["best_step"] == 4


def test_a_checkpoint_cannot_resume(corpus, tmp_path, run_config, judged):
    judged(3.0, 2.0, 2.5)
    train_model(run_config(steps=3, eval_interval=1), [corpus], tmp_path / "run")
    for name in ("best", "checkpoints/step-00000003"):
        with pytest.raises(CheckpointError, match="is a checkpoint, not a run") as caught:
            resume_model(tmp_path / "run" / name)
        assert caught.value.hint.endswith(f"--resume --out {tmp_path / 'run'}")
