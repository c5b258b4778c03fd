"""Dry run: its numbers equal those of the run, and nothing is written."""

import json
from dataclasses import replace

import pytest
import torch

from kvad.checkpoint.folder import TRAINING, list_steps
from kvad.cli.commands.train import training_plan_text
from kvad.errors import ConfigError
from kvad.train.config.run import RunConfig
from kvad.train.loop.dry_run import plan_training
from kvad.train.loop.run import train_model
from kvad.train.setup.run_data import RunData
from tests.train.test_cli import RUN, kvad

GIB = 1 << 30
ROOM = 64 * GIB


def plan(config, corpus, available=ROOM):
    return plan_training(config, corpus, available, lambda text: None)


def written(run):
    """Bytes of tensors in a run's newest checkpoint."""
    step = list_steps(run)[-1]
    return sum(path.stat().st_size for path in step.rglob("*.safetensors"))


OPTIMIZERS = [{}, {"name": "muon"}, {"name": "adafactor"}, {"name": "adafactor", "beta1": 0.9}, {"ema_decay": 0.9}]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("optim", [*OPTIMIZERS, {"average_last": 2, "average_interval": 1}], ids=str)
def test_plan_equals_the_run(optim, corpus, tmp_path, run_config, listener):
    config = run_config(steps=3, **optim)
    found = plan(config, [corpus])
    train_model(config, [corpus], tmp_path / "run", callbacks=[listener], available=ROOM, measure_peak=True)
    start = listener.start
    assert (found.parameters, found.train_tokens, found.validation_tokens, found.tokens_per_step, found.steps) == (
        start.parameters, start.train_tokens, start.validation_tokens, start.tokens_per_step, start.steps)  # fmt: skip
    assert found.tokens == listener.steps[-1].tokens
    assert found.epochs == pytest.approx(3 * 4 * 32 / start.train_tokens)
    small = 8_000 + 0.12 * found.checkpoint  # headers, the state of random numbers, Adafactor's rows and columns
    assert found.checkpoint <= written(tmp_path / "run") <= found.checkpoint + small
    assert start.gemm_flops > 1e8 and all(0 < step.mfu < 1 for step in listener.steps)
    assert found.trial.rows == 4 and 0 < found.trial.utilization < 1
    assert found.seconds == pytest.approx(3 * found.step_seconds + found.eval_seconds)


def test_nothing_is_written(corpus, tmp_path):
    out = tmp_path / "run"
    settings = ["--preset", "tiny", *RUN]
    code, stdout, _ = kvad("train", corpus, "--out", out, *settings, "--steps", 5, "--dry-run")
    assert code == 0 and not out.exists()
    words = {line.split()[0]: line for line in stdout.splitlines()}
    assert list(words) == ["model", "memory", "corpus", "step", "run", "measured", "time", "disk"]
    assert "5 steps, 160 tokens, " in words["run"] and "a micro-batch of the first step" in words["measured"]
    code, stdout, _ = kvad("train", corpus, *settings, "--minutes", 1, "--dry-run", "--json")  # no --out is needed
    result = json.loads(stdout)
    assert code == 0 and result["steps"] > 1 and result["seconds"] == pytest.approx(60, rel=0.2)
    assert result["bytes"] == sum(result["memory"].values()) and result["config"]["data"]["seq_len"] == 16


def test_a_run_that_would_be_refused_is_refused(corpus, tmp_path, run_config):
    code, _, stderr = kvad("train", corpus, "--dry-run", "--resume", "--out", tmp_path / "run")
    assert code == 2 and "--dry-run and --resume exclude each other" in stderr
    code, _, stderr = kvad("train", corpus)
    assert code == 2 and "Missing option '--out'" in stderr
    train_model(run_config(steps=1), [corpus], tmp_path / "run")
    code, _, stderr = kvad("train", corpus, "--dry-run", "--out", tmp_path / "run")
    assert code == 2 and "already holds a run" in stderr
    with pytest.raises(ConfigError, match=r"train\.device"):
        plan(run_config(device="nowhere"), [corpus])


def test_a_batch_that_does_not_fit_is_not_measured(corpus, run_config):
    config = run_config(steps=3, batch_size=64)
    whole = plan(config, [corpus])
    tight = plan(config, [corpus], whole.bytes // 2)
    assert tight.trial is None and tight.seconds is None and 0 < tight.fits < 64
    assert f"DOES NOT FIT; --batch-size {tight.fits} fits" in training_plan_text(tight)[1]
    again = plan(replace(config, train=replace(config.train, batch_size=tight.fits)), [corpus], whole.bytes // 2)
    assert again.trial is not None
    none = plan(config, [corpus], 1000)
    assert none.fits == 0 and "not even --batch-size 1" in training_plan_text(none)[1]


def test_tokens_and_epochs_of_a_stream_are_unknown(corpus, run_config):
    found = plan(
        run_config(data={"order": "stream", "shuffle_buffer": 4, "validation_fraction": 0.3}, steps=3), [corpus]
    )
    assert found.train_tokens is None and found.epochs is None and found.tokens == 3 * 128 and found.seconds > 0
    assert "unknown" in training_plan_text(found)[2] and "epochs unknown" in training_plan_text(found)[4]


def test_prepared_data_mixtures_and_pairs_can_be_planned(corpus, tmp_path, run_config):
    assert kvad("data", "prepare", corpus, "--out", tmp_path / "prepared", "--tokenizer", "byte")[0] == 0
    prepared, texts = plan(run_config(), [tmp_path / "prepared"]), plan(run_config(), [corpus])
    assert (prepared.train_tokens, prepared.epochs) == (texts.train_tokens, texts.epochs)
    sources = [{"paths": [str(tmp_path / "prepared")], "weight": 3}, {"paths": [str(corpus)]}]
    mixed = plan(run_config(data={"sources": sources}, tokenizer={}), [])
    assert abs(mixed.train_tokens - 2 * texts.train_tokens) < 200 and mixed.tokens_per_step == texts.tokens_per_step


def test_plan_of_a_summarizer_has_no_memory_and_flops(corpus, tmp_path, run_config):
    train_model(run_config(steps=1), [corpus], tmp_path / "base")
    summarizer = {"model": str(tmp_path / "base"), "ratio": 2, "recent": 8, "interval": 4}
    content = {**run_config(steps=3).to_dict(), "model": {}, "tokenizer": {}, "summarizer": summarizer}
    found = plan(RunConfig.from_dict({**content, "objective": {"kind": "summarizer"}}), [corpus])
    assert found.memory is None and found.step_flops is None and found.trial.rows == 4 and found.seconds > 0
    assert 0 < found.trained < found.parameters and found.checkpoint == 12 * found.trained
    text = training_plan_text(found)
    assert "not planned" in text[1] and "FLOPs not counted" in text[3] and "micro-batch of the first step" in text[5]


def test_plan_of_adapters_counts_trained_parameters(corpus, tmp_path, run_config):
    train_model(run_config(steps=1), [corpus], tmp_path / "base")
    content = run_config(steps=2).to_dict()
    content = {**content, "model": {"init": str(tmp_path / "base")}, "tokenizer": {}, "lora": {"rank": 2}}
    config = RunConfig.from_dict(content)
    found = plan(config, [corpus])
    whole = plan(RunConfig.from_dict({k: v for k, v in content.items() if k != "lora"}), [corpus])
    assert found.trained < found.parameters and found.parameters == whole.parameters + found.trained
    assert whole.step_flops * 0.6 < found.step_flops < whole.step_flops
    train_model(config, [corpus], tmp_path / "run")
    assert found.checkpoint <= written(tmp_path / "run") <= found.checkpoint + 20_000
    assert (list_steps(tmp_path / "run")[-1] / TRAINING).is_dir()


def test_first_rows_are_those_of_the_first_micro_batch(corpus, tmp_path, run_config):
    config = run_config()
    run_data = RunData(replace(config, objective=replace(config.objective, kind="next-token")), [corpus], print)
    run_data.open(tmp_path, run_data.make_tokenizer())
    whole = run_data.data.micro_batches(0)[0]
    some = run_data.data.first_rows(2)
    assert some.model_input.sub_batches[0].num_seqs == 2
    assert torch.equal(some.model_input.token_ids, whole.model_input.token_ids[:64])
    assert len(some.targets) == len(some.model_input.logit_indices) == int((whole.model_input.logit_indices < 64).sum())
    assert run_data.data.first_rows(4).targets.equal(whole.targets)
