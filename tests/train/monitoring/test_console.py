"""Console output, metrics file and speed."""

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from kvad.config.flops import training_pass
from kvad.errors import NumericalError
from kvad.model_input import ModelInput, SubBatch
from kvad.train.config.presets import MODEL_PRESETS
from kvad.train.data.collate import Batch
from kvad.train.loop.run import train_model
from kvad.train.monitoring.callbacks import EvalReport, StartReport, StepReport, TrainingResult, WarningReport
from kvad.train.monitoring.console import ConsoleDashboard, PlainProgress, format_seconds, make_progress
from kvad.train.monitoring.metrics import MetricsFile, read_metrics
from kvad.train.monitoring.throughput import SpeedMeter, ThroughputMeter
from tests.train.conftest import Listener

START = StartReport(0, 2000, None, 804_224, 10, 10, 768, "fp32", "cpu", 2, "2.13")


def step(number, elapsed=1.0, eta=31.0):
    return StepReport(number, 1.7126, 4.1e-4, 0.9, number * 768, elapsed, 23_400.0, eta)


def test_status_line():
    progress = PlainProgress(Console(file=io.StringIO(), width=200))
    progress.on_start(START)
    progress.on_step(step(1240))
    line = "step 1,240/2,000  loss 1.713  lr 4.1e-04  grad_norm 0.9  23,400 tokens/s  0:31 left"
    assert progress.status_line() == line
    progress.on_eval(EvalReport(1240, 1.9017, 100, 1.9))
    assert "loss 1.713  val 1.902  lr" in progress.status_line()
    assert format_seconds(75) == "1:15" and format_seconds(3700) == "1:01:40"


def test_plain_lines_are_printed_every_ten_seconds_and_at_evaluations():
    out = io.StringIO()
    progress = make_progress(Console(file=out, width=200))
    assert type(progress) is PlainProgress
    progress.on_start(START)
    for number in range(1, 31):
        progress.on_step(step(number, elapsed=float(number)))
    progress.on_eval(EvalReport(30, 1.9, 100, 1.9))
    lines = out.getvalue().splitlines()
    assert [line.split("/")[0] for line in lines[1:]] == ["step 10", "step 20", "step 30", "step 30"]
    assert "\x1b" not in out.getvalue()


def test_warnings_are_printed():
    out = io.StringIO()
    PlainProgress(Console(file=out, width=200)).on_warning(WarningReport(70, "it diverges: a loss of 4.0"))
    assert out.getvalue() == "warning: it diverges: a loss of 4.0\n"


def test_dashboard_lines():
    board = ConsoleDashboard(Console(file=io.StringIO(), force_terminal=True, width=120))
    board.start = START
    measured = {"mfu": 0.123, "memory": 412 << 20, "memory_peak": 3 << 30}
    for number, loss in ((1, 3.0), (2, 2.0)):
        report = StepReport(**{**step(number).__dict__, "loss": loss, **measured})
        board.on_step(report)
    board.on_eval(EvalReport(2, 1.9017, 100, 1.899, 0.441))
    first, second = board.lines()
    smooth = (0.9 * 3 + 2) / 1.9
    assert first == f"loss  {smooth:.3f}   raw 2.000   validation 1.902, best 1.899   acc 44.1%"
    assert second == ("rate  4.1e-04   grad_norm 0.9   23,400 tokens/s   12.3% MFU   412.00 MiB   at most 3.00 GiB")
    console = Console(file=io.StringIO(), width=120, force_terminal=False)
    console.print(board.render())
    shown = console.file.getvalue().splitlines()
    assert len(shown) == 3 and "step 2/2,000   0:31 left" in shown[0] and "12.3% MFU" in shown[2]


def test_the_dashboard_is_removed_at_the_end(corpus, tmp_path, run_config):
    out = io.StringIO()
    progress = make_progress(Console(file=out, force_terminal=True, width=120))
    assert isinstance(progress, ConsoleDashboard)
    outcome = train_model(run_config(), [corpus], tmp_path / "run", callbacks=[progress])
    progress.close()
    assert "tokens/s" in out.getvalue() and str(outcome.checkpoint.name) in out.getvalue().replace("\n", "")
    assert out.getvalue().rstrip().endswith("\x1b[0m") or "\x1b[?25h" in out.getvalue()  # the cursor is back


def test_measuring_throughput_changes_no_bit(corpus, tmp_path, run_config, listener):
    config = run_config(steps=3)
    train_model(config, [corpus], tmp_path / "measured", callbacks=[listener], measure_peak=True)
    plain = Listener()
    train_model(config, [corpus], tmp_path / "plain", callbacks=[plain])
    assert [step.loss for step in listener.steps] == [step.loss for step in plain.steps]
    assert all(step.mfu > 0 for step in listener.steps) and all(step.mfu is None for step in plain.steps)
    assert all(0 < step.memory <= step.memory_peak for step in plain.steps)
    lines = read_metrics(tmp_path / "measured" / "metrics.jsonl")
    assert lines[0]["gemm_flops"] > 1e8 and lines[1]["mfu"] == listener.steps[0].mfu and lines[1]["grad_norm"] > 0


def test_utilisation_is_flops_over_seconds_over_the_peak():
    speed, meter = SpeedMeter(), ThroughputMeter(MODEL_PRESETS["tiny"](256, 32), peak=1e12)
    tokens = torch.zeros(4 * 32, dtype=torch.int64)
    batch = Batch(ModelInput(tokens, tokens, (SubBatch(4, 32, 32),), tokens), tokens)
    count = meter.count_flops([batch, batch])
    assert count == 2 * training_pass(meter.model, 4, 32, 128)
    assert ThroughputMeter(meter.model, 1e12, frozen=True).count_flops([batch, batch]) < count
    for _ in range(3):
        speed.add(256, 2.0, count)
    assert speed.flops_per_second == pytest.approx(count / 2)


def test_metrics_drop_steps_that_will_be_repeated(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path, log_interval=2)
    first.on_start(START)
    for number in range(1, 8):
        first.on_step(step(number))
    first.on_eval(EvalReport(6, 1.9, 100, 1.9))
    first.close()
    with path.open("a") as file:
        file.write('{"kind": "step", "step": 8, "lo')  # killed here
    again = MetricsFile(path, log_interval=2)
    again.on_start(StartReport(**{**START.__dict__, "step": 5}))
    again.on_step(step(6))
    again.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [("step", number) for number in (1, 2, 4, 6)]
    assert [(line["kind"], line["step"]) for line in lines] == [("run", 0), *steps]
    assert lines[-1]["loss"] == step(6).loss, "the resumed run's"
    fresh = MetricsFile(path, log_interval=1)
    fresh.on_start(START)
    fresh.close()
    assert [line["kind"] for line in read_metrics(path)] == ["run"]


def test_evaluated_and_last_steps_are_logged(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, log_interval=10)
    metrics.on_start(START)
    for number in range(1, 6):
        metrics.on_step(step(number))
        if number == 3:
            metrics.on_eval(EvalReport(3, 1.9, 100, 1.9))
    expected = [("run", 0), ("step", 1), ("step", 3), ("eval", 3)]
    assert [(line["kind"], line["step"]) for line in read_metrics(path)] == expected
    metrics.on_end(TrainingResult("done", 5, 1.7, 1.9, 1.9, 5, 1.0, tmp_path))
    metrics.close()
    expected += [("step", 5), ("end", 5)]
    assert [(line["kind"], line["step"]) for line in read_metrics(path)] == expected, "once"


def test_a_disk_error_at_the_end_does_not_hide_the_error(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl", log_interval=10)
    metrics.on_start(START)
    with Path("/dev/full").open("a") as full:
        metrics._file.close()
        metrics._file = full
        error = NumericalError("not finite")
        metrics.on_step(step(2))
        with pytest.raises(NumericalError), metrics:
            raise error


def test_speed_discounts_old_steps():
    speed = SpeedMeter()
    assert speed.tokens_per_second == 0.0 == speed.seconds_per_step
    for _ in range(50):
        speed.add(100, 1.0)
    assert speed.tokens_per_second == pytest.approx(100) and speed.seconds_per_step == pytest.approx(1.0)
    for _ in range(100):
        speed.add(100, 0.5)
    assert speed.tokens_per_second == pytest.approx(200, rel=0.01)
    assert speed.seconds_per_step == pytest.approx(0.5, 0.01)
