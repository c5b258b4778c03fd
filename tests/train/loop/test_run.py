"""Runs: the loss falls, the folder loads at any moment, resume is exact, refusals."""

import dataclasses
import itertools
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from kvad.checkpoint.folder import list_steps
from kvad.checkpoint.loader import load_model
from kvad.checkpoint.native import open_folder
from kvad.errors import CheckpointError, ConfigError, DataError, NumericalError, SaveError, UsageError
from kvad.evaluation.compare_runs import loss_panels, read_run
from kvad.llm import LLM
from kvad.text.tokenizer import train_tokenizer
from kvad.train.data.token_store import open_store
from kvad.train.loop.run import read_run_config, resume_model, train_model
from kvad.train.monitoring.callbacks import Callback
from kvad.train.monitoring.metrics import MetricsFile, read_metrics
from kvad.train.objectives.cross_entropy import CrossEntropyObjective
from kvad.train.optim.optimizer import OptimizersContainer
from kvad.train.optim.schedules import Schedule
from kvad.train.setup.objective_factory import resolve_objective
from kvad.train.sources.documents import open_corpus
from tests.support.training_runs import StopAt, assert_resume_is_exact, hashes, losses, metric_lines, tiny_shape


def test_the_loss_falls_and_the_run_is_a_checkpoint(corpus, tmp_path, run_config, listener):
    config = run_config(steps=60, lr=1e-2, eval_interval=20, save_interval=25, gradient_accumulation_steps=2)
    out = tmp_path / "run"
    outcome = train_model(config, [corpus], out, callbacks=[listener])
    assert listener.steps[0].loss == pytest.approx(5.56, abs=0.15)  # ln 257
    assert outcome.reason == "done" and outcome.step == 60 and outcome.tokens == 60 * 2 * 4 * 32
    assert outcome.loss < 2.5 and outcome.val_loss < 2.5, "it has not learned to count"
    assert [e.step for e in listener.evals] == [20, 40, 60] and outcome.best == min(e.val_loss for e in listener.evals)
    assert listener.evals[0].val_loss > listener.evals[1].val_loss, "each is the best so far, and saved"
    assert listener.saves == [(f"step-{step:08d}", step) for step in (20, 25, 40, 50, 60)]
    assert [p.name for p in list_steps(out)] == ["step-00000050", "step-00000060"]
    assert listener.outcome == outcome and outcome.checkpoint == list_steps(out)[-1]
    assert json.dumps([dataclasses.asdict(one) for one in (listener.start, *listener.steps, *listener.evals)])
    model, checkpoint = load_model(out, verify=True)
    assert checkpoint.tokenizer.kind == "byte" and model.config.vocab_size == 257
    assert listener.start.parameters == sum(p.numel() for p in model.parameters())
    kinds = [line["kind"] for line in read_metrics(out / "metrics.jsonl")]
    assert kinds[0] == "run" and kinds[-1] == "end" and kinds.count("step") == 60 and kinds.count("eval") == 3
    content = json.loads((outcome.checkpoint / "config.json").read_text())
    assert content["model_type"] == "llama" and "kvad" not in content
    assert "checkpoints: Hugging Face's layout, read by transformers as LlamaForCausalLM" in listener.stages
    with LLM.load(out, max_num_seqs=1) as llm:
        assert llm.generate("1 is", max_tokens=3, temperature=0).usage.num_completion_tokens == 3
    before = hashes(out), losses(out), outcome.checkpoint.stat().st_ino
    again = resume_model(out)
    assert (again.reason, again.step, again.checkpoint) == ("unchanged", 60, outcome.checkpoint)
    assert (hashes(out), losses(out), outcome.checkpoint.stat().st_ino) == before, "a finished run is not saved again"


def test_micro_batches_make_the_updates_of_one_batch(corpus, tmp_path, run_config):
    steps = []
    for batch_size in (4, 2, 1):
        config = run_config(steps=3, batch_size=batch_size, gradient_accumulation_steps=4 // batch_size)
        train_model(config, [corpus], tmp_path / str(batch_size))
        lines = metric_lines(tmp_path / str(batch_size), "step")
        steps.append([(line["loss"], line["grad_norm"]) for line in lines])
    for step, parts, rows in zip(*steps, strict=True):
        assert step == pytest.approx(parts, rel=1e-4) and step == pytest.approx(rows, rel=1e-4)


@pytest.mark.parametrize("order", ["epochs", "windows"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_resume_is_exact(corpus, tmp_path, run_config, order, precision):
    config = run_config(steps=14, gradient_accumulation_steps=2, data={"order": order}, precision=precision)
    whole, _ = assert_resume_is_exact(config, [corpus], tmp_path, stops=[3, 8])
    assert len(metric_lines(whole, "eval")) == 3


@pytest.mark.parametrize("minutes", [None, 1.0])
def test_the_last_step_is_always_logged(corpus, tmp_path, run_config, minutes):
    limits = {"steps": 13} if minutes is None else {"steps": None, "minutes": minutes}
    ticks = itertools.count() if minutes is None else itertools.count(step=2.0)
    config = run_config(log_interval=10, eval_interval=100, save_interval=5, **limits)
    outcome = train_model(config, [corpus], tmp_path / "run", clock=lambda: float(next(ticks)))
    steps = metric_lines(tmp_path / "run", "step")
    assert [line["step"] for line in steps] == sorted({1, *range(10, outcome.step, 10), outcome.step})
    assert outcome.step % 10 and (steps[-1]["tokens"], steps[-1]["loss"]) == (outcome.tokens, outcome.loss)
    summary = read_run(tmp_path / "run").summary(0.0)
    assert (summary.steps, summary.tokens, summary.loss) == (outcome.step, outcome.tokens, outcome.loss)
    assert summary.seconds > 0 and summary.best_step <= summary.steps
    (curve, *_), *_ = (panel.series for panel in loss_panels([read_run(tmp_path / "run")]))
    assert curve.x[-1] == outcome.step


class Killed(Callback):
    """Kills the run in a step, or at the end, after the last save."""

    def __init__(self, step):
        self.step = step

    def on_step(self, report):
        if report.step == self.step:
            raise KeyboardInterrupt

    def on_end(self, outcome):
        raise KeyboardInterrupt


@pytest.mark.parametrize("at", [7, 99])
def test_metrics_after_a_kill_equal_those_of_an_uninterrupted_run(corpus, tmp_path, run_config, monkeypatch, at):
    config = run_config(log_interval=10, eval_interval=4, save_interval=3, steps=13)
    train_model(config, [corpus], tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(MetricsFile, "on_end", lambda *_: None)  # the kill comes first
        patch.setattr(MetricsFile, "__exit__", lambda *_: None)
        with pytest.raises(KeyboardInterrupt):
            train_model(config, [corpus], tmp_path / "parts", callbacks=[Killed(at)])
    resume_model(tmp_path / "parts")
    logged = [
        [(line["kind"], line["step"], line.get("loss")) for line in read_metrics(run / "metrics.jsonl")]
        for run in (tmp_path / "whole", tmp_path / "parts")
    ]
    assert logged[0] == logged[1] and ("step", 13) in [line[:2] for line in logged[0]]


def test_a_stopped_run_keeps_the_line_of_its_last_step(corpus, tmp_path, run_config):
    config = run_config(log_interval=10, eval_interval=100, steps=13)
    train_model(config, [corpus], tmp_path / "whole")
    train_model(config, [corpus], tmp_path / "parts", callbacks=[StopAt(7)])
    assert list(losses(tmp_path / "parts")) == [1, 7]
    assert read_run(tmp_path / "parts").summary(0.0).steps == 7
    resume_model(tmp_path / "parts", callbacks=[StopAt(10)])
    resume_model(tmp_path / "parts")
    assert [line["step"] for line in metric_lines(tmp_path / "parts", "step")] == [1, 7, 10, 13], "each once"
    whole, parts = losses(tmp_path / "whole"), losses(tmp_path / "parts")
    assert list(whole) == [1, 10, 13] and whole == {step: parts[step] for step in whole}


@pytest.mark.parametrize("lost", ["exp_avg.", "exp_avg_sq.", "step."])
def test_the_comparison_detects_a_lost_optimizer_moment(corpus, tmp_path, run_config, monkeypatch, lost):
    real = OptimizersContainer.state_tensors

    def zeroed(optimization):
        found = real(optimization)
        return {name: torch.zeros_like(t) if name.startswith(lost) else t for name, t in found.items()}

    config = run_config(steps=8)
    train_model(config, [corpus], tmp_path / "whole")
    monkeypatch.setattr(OptimizersContainer, "state_tensors", zeroed)
    train_model(config, [corpus], tmp_path / "parts", callbacks=[StopAt(3)])
    monkeypatch.undo()
    resume_model(tmp_path / "parts")
    assert losses(tmp_path / "parts") != losses(tmp_path / "whole")


def test_a_second_ctrl_c_stops_at_once(corpus, tmp_path, run_config):
    class Twice(Callback):
        def on_step(self, report):
            if report.step == 7:
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train_model(run_config(), [corpus], tmp_path / "run", callbacks=[Twice()])
    assert signal.getsignal(signal.SIGINT) is before
    assert open_folder(tmp_path / "run", verify=True).path.name == "step-00000005"


def test_a_time_limit_ends_the_run_and_the_schedule(corpus, tmp_path, run_config, listener):
    ticks = iter(range(10**6))
    config = run_config(
        steps=None, minutes=1.0, lr=1e-2, min_lr=1e-4, warmup_steps=0, eval_interval=1000, save_interval=1000
    )
    outcome = train_model(config, [corpus], tmp_path / "run", callbacks=[listener], clock=lambda: float(next(ticks)))
    assert outcome.reason == "done" and 50 <= outcome.elapsed <= 61
    assert listener.steps[0].lr == pytest.approx(1e-2) and listener.steps[-1].lr < 1e-3
    assert listener.steps[-1].eta <= 5 < listener.steps[2].eta
    assert outcome.val_loss is not None


def test_an_existing_run_is_not_overwritten(corpus, tmp_path, run_config, listener):
    out = tmp_path / "run"
    train_model(run_config(steps=9), [corpus], out)
    with pytest.raises(UsageError, match=r"already holds a run \(step-00000009\)") as caught:
        train_model(run_config(steps=2), [corpus], out)
    assert "--resume" in caught.value.hint
    train_model(run_config(steps=2), [corpus], out, overwrite=True, callbacks=[listener])
    assert any("found on disk" in stage for stage in listener.stages), "the tokens are made once"
    assert [p.name for p in list_steps(out)] == ["step-00000002"] and sorted(losses(out)) == [1, 2]


class FillDisk(Callback):
    """Fills the disk in a step, or after the first save."""

    def __init__(self, monkeypatch, step=None):
        self._monkeypatch, self._step = monkeypatch, step

    def _fill(self):
        def refuse(_descriptor):
            raise OSError(28, "No space left on device")

        self._monkeypatch.setattr(os, "fsync", refuse)

    def on_step(self, report):
        if report.step == self._step:
            self._fill()

    def on_save(self, path, step):
        if self._step is None:
            self._fill()


def test_a_replaced_run_is_complete_until_the_first_save(corpus, tmp_path, run_config, monkeypatch):
    out = tmp_path / "run"
    train_model(run_config(steps=9), [corpus], out)

    with pytest.raises(SaveError, match="No space left"):
        train_model(run_config(steps=2), [corpus], out, overwrite=True, callbacks=[FillDisk(monkeypatch, step=1)])
    monkeypatch.undo()
    assert open_folder(out, verify=True).path.name == "step-00000009"


@pytest.mark.parametrize("async_save", [True, False])
def test_a_full_disk_leaves_the_last_checkpoint(corpus, tmp_path, run_config, monkeypatch, async_save):
    out, config = tmp_path / "run", run_config(async_save=async_save)
    with pytest.raises(SaveError, match=r"cannot .*step-00000010.*: No space left"):
        train_model(config, [corpus], out, callbacks=[FillDisk(monkeypatch)])
    monkeypatch.undo()
    assert open_folder(out, verify=True).path.name == "step-00000005"
    whole = tmp_path / "whole"
    train_model(run_config(), [corpus], whole)
    resume_model(out)
    assert hashes(out) == hashes(whole)


def test_a_nonfinite_loss_stops_without_a_save(corpus, tmp_path, run_config, monkeypatch):
    real = CrossEntropyObjective.accumulate_gradients
    calls = iter(range(100))

    def poisoned(*arguments):
        return float("nan") if next(calls) == 6 else real(*arguments)

    monkeypatch.setattr(CrossEntropyObjective, "accumulate_gradients", poisoned)
    with pytest.raises(NumericalError, match=r"step 7: loss nan"):
        train_model(run_config(), [corpus], tmp_path / "run")
    assert open_folder(tmp_path / "run", verify=True).path.name == "step-00000005"


def test_a_run_in_kvads_layout_resumes_exactly(corpus, tmp_path, run_config, monkeypatch, listener):
    """Steps of both layouts may follow each other in one run."""
    from kvad.checkpoint import hf_layout

    def none(*_):
        raise CheckpointError("no class can hold it", "a hint")

    config = run_config(steps=14)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train_model(config, [corpus], whole)
    monkeypatch.setattr(hf_layout, "choose_layout", none)
    train_model(config, [corpus], parts, callbacks=[StopAt(3), listener])
    assert "checkpoints: kvad's layout, because no class can hold it (a hint)" in listener.stages
    resume_model(parts, callbacks=[StopAt(8)])
    assert "model" in json.loads((list_steps(parts)[-1] / "config.json").read_text())
    monkeypatch.undo()
    resume_model(parts)
    assert losses(parts) == losses(whole) and hashes(parts) == hashes(whole)


# ---------------------------------------------------------------- resume refuses, by name


@pytest.fixture
def stopped(corpus, tmp_path, run_config):
    out = tmp_path / "run"
    train_model(run_config(), [corpus], out, callbacks=[StopAt(3)])
    return out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 5e-3}, r"optim.lr: 0.001 there, 0.005 here"),
        ({"batch_size": 2}, r"train.batch_size: 4 there, 2 here"),
        ({"steps": 2}, r"train.steps: must be at least 3, the steps of the run so far, got 2"),
        ({"data": {"validation_fraction": 0.2}}, r"data.validation_fraction: 0.1 there, 0.2 here"),
        ({"tokenizer": {"kind": "char"}}, r"tokenizer.kind: 'byte' there, 'char' here"),
        ({"model": {"preset": "tiny"}}, r"model.hidden_size: 32 there, 128 here"),
    ],
)
def test_another_configuration_is_refused(stopped, run_config, change, message):
    with pytest.raises(ConfigError, match=message):
        resume_model(stopped, config=run_config(**change))


def test_keys_without_effect_on_numbers_may_change(stopped, run_config, listener):
    config = run_config(eval_interval=4, save_interval=3, log_interval=2)
    assert resume_model(stopped, config=config, callbacks=[listener]).step == 12
    changed = [line for line in listener.stages if line.startswith("changed")]
    assert changed == [f"changed: train.{key}_interval: {old} -> {new}" for key, old, new in CHANGED]


CHANGED = (("eval", 5, 4), ("log", 1, 2), ("save", 5, 3))


@pytest.mark.parametrize("stop", [7, None])
def test_a_longer_run_continues_as_if_it_had_been_longer_from_the_start(corpus, tmp_path, run_config, stop):
    """With a rate that does not depend on the length, every number of the longer run is equal."""
    schedule = {"schedule": "constant", "warmup_steps": 3}
    train_model(run_config(steps=20, **schedule), [corpus], tmp_path / "whole")
    parts = tmp_path / "parts"
    train_model(run_config(**schedule), [corpus], parts, callbacks=[StopAt(stop)] if stop else [])
    outcome = resume_model(parts, config=run_config(steps=20, **schedule), callbacks=[StopAt(16)])
    assert (outcome.reason, outcome.step) == ("interrupted", 16)
    assert read_run_config(parts)[0].train.steps == 20
    assert resume_model(parts).reason == "done"
    assert losses(parts) == losses(tmp_path / "whole") and hashes(parts) == hashes(tmp_path / "whole")
    assert metric_lines(parts, "end")[0]["step"] == 20 and len(metric_lines(parts, "end")) == 1


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_the_rate_of_a_longer_run_follows_the_new_length(corpus, tmp_path, run_config, listener, schedule):
    options = {"schedule": schedule, "warmup_steps": 2}
    train_model(run_config(**options), [corpus], tmp_path / "run")
    longer = run_config(steps=16, **options)
    resume_model(tmp_path / "run", config=longer, callbacks=[listener])
    rates = [Schedule(longer.optim, longer.train).lr(step, 0.0) for step in range(12, 16)]
    assert [report.lr for report in listener.steps] == rates
    before = Schedule(longer.optim, run_config(**options).train).lr(12, 0.0)
    assert "changed: train.steps: 12 -> 16" in listener.stages
    (line,) = (line for line in listener.stages if line.startswith("learning rate"))
    shown = f"over the new length: {rates[0]:.2e} at step 13, it was {before:.2e}"
    assert line.endswith(shown if schedule != "constant" else "constant, unchanged by the new length")


def test_a_run_that_is_ended_where_it_stopped_is_evaluated(stopped, run_config):
    outcome = resume_model(stopped, config=run_config(steps=3))
    assert (outcome.reason, outcome.step) == ("done", 3) and outcome.val_loss is not None
    assert resume_model(stopped).reason == "unchanged" and read_run_config(stopped)[0].train.steps == 3


def test_a_run_that_the_clock_ended_continues_with_more_minutes(corpus, tmp_path, run_config):
    config = run_config(steps=None, minutes=1.0, eval_interval=1000, save_interval=1000)
    clock = map(float, itertools.count()).__next__
    first = train_model(config, [corpus], tmp_path / "run", clock=clock)
    second = resume_model(
        tmp_path / "run",
        config=dataclasses.replace(config, train=dataclasses.replace(config.train, minutes=2.0)),
        clock=clock,
    )
    assert second.reason == "done" and second.step > 1.5 * first.step and 110 <= second.elapsed <= 121


def test_another_tokenizer_is_refused(stopped, run_config, tmp_path):
    train_tokenizer("char", ["other"]).save(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"tokenizer.path: must be the tokenizer of this run, got .*other"):
        resume_model(stopped, config=run_config(tokenizer={"path": str(tmp_path / "other")}))
    train_tokenizer("byte", []).save(tmp_path / "same")
    assert resume_model(stopped, config=run_config(tokenizer={"path": str(tmp_path / "same")})).step == 12


def test_a_changed_corpus_is_refused(stopped, corpus):
    path = corpus / "07.txt"
    before = path.read_text()
    path.write_text(before + " And more.")
    try:
        with pytest.raises(ConfigError, match=r"its corpus has changed: .*/07.txt"):
            resume_model(stopped)
    finally:
        path.write_text(before)
    assert resume_model(stopped).step == 12


def test_nothing_to_resume(tmp_path, stopped):
    with pytest.raises(CheckpointError, match="no such folder"):
        resume_model(tmp_path / "nowhere")
    (tmp_path / "killed" / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        resume_model(tmp_path / "killed")
    state = list_steps(stopped)[-1] / "training" / "state.json"
    content = json.loads(state.read_text())
    del content["corpus"]
    state.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"state.json: key 'corpus' is missing"):
        resume_model(stopped)


def test_the_stored_configuration_equals_the_runs(stopped, corpus, run_config):
    config, paths = read_run_config(stopped)
    assert config == resolve_objective(run_config(), "decoder") and paths == [corpus]


# ---------------------------------------------------------------- bad input, before anything is trained


def test_a_corpus_too_short_for_one_row(tmp_path, run_config):
    (tmp_path / "short.txt").write_text("thirty characters are too short")
    with pytest.raises(DataError, match=r"too short: 29 tokens to train on, and a row of 32 needs 33"):
        train_model(run_config(), [tmp_path / "short.txt"], tmp_path / "run")


def test_invalid_utf8_and_replace(tmp_path, run_config):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 100)
    with pytest.raises(DataError, match=r"latin.txt, line 1, is not UTF-8: byte 0xE9 at offset 3"):
        train_model(run_config(), [tmp_path / "latin.txt"], tmp_path / "run")
    outcome = train_model(
        run_config(steps=1, data={"encoding_errors": "replace"}), [tmp_path / "latin.txt"], tmp_path / "run"
    )
    assert outcome.step == 1


def test_real_text_is_learned(tmp_path, run_config):
    """The standard library's json package, byte by byte: far better than the frequencies of bytes."""
    folder, model = Path(json.__file__).parent, {"preset": "tiny", "set": tiny_shape(mlp=128, width=64)}
    data = {"seq_len": 64, "file_suffixes": [".py"]}
    config = run_config(steps=150, lr=1e-2, batch_size=8, eval_interval=150, data=data, model=model)
    outcome = train_model(config, [folder], tmp_path / "run")
    tokenizer = open_folder(tmp_path / "run").tokenizer
    tokens, _ = open_store(tmp_path / "run" / "data", open_corpus([folder], suffixes=[".py"]), tokenizer)
    counts = np.bincount(tokens.take(np.arange(tokens.num_tokens)))
    share = counts[counts > 0] / counts.sum()
    frequencies = float(-(share * np.log(share)).sum())
    assert outcome.val_loss < 0.9 * frequencies, (outcome.val_loss, frequencies)
