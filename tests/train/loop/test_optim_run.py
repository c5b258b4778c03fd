"""Whole runs under every optimizer, schedule and average: they learn, and a stopped one goes on to the bit."""

import json
import os
import signal

import pytest
import torch
from safetensors.torch import load_file

from kvad.checkpoint.loader import load_model
from kvad.checkpoint.native import open_folder
from kvad.errors import ConfigError, NumericalError
from kvad.train.loop.run import resume_model, train_model
from kvad.train.monitoring.callbacks import Callback
from kvad.train.monitoring.metrics import read_metrics
from kvad.train.objectives.cross_entropy import CrossEntropyObjective
from kvad.train.optim.optimizer import LossScale, OptimizersContainer

SMALL = {"hidden_size": 32, "decoder.num_layers": 1, "decoder.layer_types.L.mlp.intermediate_size": 32}
DROPS = {f"dropout.{name}": 0.2 for name in ("embedding", "residual", "attention", "hidden")}
RUNS = {
    "adafactor": {"name": "adafactor", "schedule": "relative"},
    "adafactor-average": {"name": "adafactor", "beta1": 0.9, "schedule": "inverse-sqrt", "noam_factor": 0.1},
    "muon": {"name": "muon", "schedule": "wsd", "muon_lr": 0.02},
    "plateau": {"schedule": "plateau", "plateau_patience": 0, "eval_interval": 2},
    "ema": {"ema_decay": 0.9, "schedule": "linear"},
    "average": {"average_last": 3, "average_interval": 2, "schedule": "constant"},
    "dropout": {},
    "recompute": {"activation_checkpointing": True},
}


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_step(self, report):
        if report.step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def told(out):
    lines = read_metrics(out / "metrics.jsonl")
    steps = [(one["step"], one["loss"], one["lr"], one["grad_norm"]) for one in lines if one["kind"] == "step"]
    return steps, [(one["step"], one["val_loss"]) for one in lines if one["kind"] == "eval"]


def hashes(out):
    files = open_folder(out, verify=True).files
    return files["model.safetensors"]["sha256"], files["training/state.safetensors"]["sha256"]


def config_of(run_config, name, **changes):
    drops = DROPS if name in ("dropout", "recompute") else {}
    model = {"preset": "tiny", "set": {**SMALL, **drops}}
    settings = {
        "steps": 12,
        "gradient_accumulation_steps": 2,
        "eval_interval": 5,
        "save_interval": 50,
        **RUNS[name],
        **changes,
    }
    return run_config(model=model, **settings)


@pytest.mark.parametrize("name", RUNS)
def test_resume_goes_on_to_the_bit(corpus, tmp_path, run_config, name):
    config = config_of(run_config, name)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train_model(config, [corpus], whole)
    train_model(config, [corpus], parts, callbacks=[StopAt(3)])
    resume_model(parts, callbacks=[StopAt(7)])
    torch.rand(3)
    assert resume_model(parts).reason == "done"
    assert told(parts) == told(whole) and len(told(whole)[0]) == 12
    assert hashes(parts) == hashes(whole)


@pytest.mark.parametrize("name", ["muon", "adafactor", "ema", "dropout"])
def test_it_learns(corpus, tmp_path, run_config, name):
    lr = {"lr": 0.2} if name == "adafactor" else {"lr": 1e-2, "min_lr": 1e-3}
    outcome = train_model(config_of(run_config, name, steps=40, eval_interval=40, **lr), [corpus], tmp_path / "run")
    assert outcome.val_loss < 3.6, "5.56 is what it begins with"


def test_one_seed_is_one_run_and_another_is_another(corpus, tmp_path, run_config):
    for out, seed in (("one", 1), ("two", 1), ("three", 2)):
        train_model(config_of(run_config, "dropout", steps=3, seed=seed), [corpus], tmp_path / out)
        torch.rand(7)
    assert told(tmp_path / "one") == told(tmp_path / "two") != told(tmp_path / "three")
    assert hashes(tmp_path / "one") == hashes(tmp_path / "two")


def test_a_lost_random_state_is_seen(corpus, tmp_path, run_config, monkeypatch):
    config = config_of(run_config, "dropout")
    train_model(config, [corpus], tmp_path / "whole")
    train_model(config, [corpus], tmp_path / "parts", callbacks=[StopAt(3)])
    monkeypatch.setattr(torch, "set_rng_state", lambda state: None)
    resume_model(tmp_path / "parts")
    assert told(tmp_path / "parts") != told(tmp_path / "whole")


@pytest.mark.parametrize("name", ["ema", "average"])
def test_the_average_is_what_is_evaluated_and_saved(corpus, tmp_path, run_config, monkeypatch, name):
    """The loss that the run reports is that of the weights that its folder holds, and not of those it trains."""
    outcome = train_model(config_of(run_config, name, lr=1e-2), [corpus], tmp_path / "run")
    stored = open_folder(tmp_path / "run")
    saved, raw = dict(stored.weights()), stored.training.tensors
    assert all(not torch.equal(saved[key], raw[f"raw.{key}"]) for key in saved)
    if name == "average":
        for key in saved:
            kept = torch.stack([raw[f"kept.{number}.{key}"] for number in range(3)])
            assert torch.equal(saved[key], kept.mean(dim=0))
        assert torch.equal(raw["kept.2.embedding.tokens.weight"], raw["raw.embedding.tokens.weight"])  # of step 12
    model, _ = load_model(tmp_path / "run")
    assert torch.equal(model.token_embedding, saved["embedding.tokens.weight"])
    train_model(
        config_of(run_config, name, lr=1e-2, ema_decay=0.0, average_last=0, average_interval=None),
        [corpus],
        tmp_path / "raw",
    )
    assert [step[:2] for step in told(tmp_path / "raw")[0]] == [step[:2] for step in told(tmp_path / "run")[0]]
    assert outcome.val_loss != told(tmp_path / "raw")[1][-1][1]


def test_where_evaluations_pace_the_rate_they_stay_where_they_are(corpus, tmp_path, run_config):
    out = tmp_path / "run"
    train_model(config_of(run_config, "plateau"), [corpus], out, callbacks=[StopAt(3)])
    with pytest.raises(ConfigError, match=r"train.eval_interval: 2 there, 3 here \(optim.schedule = 'plateau'\)"):
        resume_model(out, config=config_of(run_config, "plateau", eval_interval=3))
    assert resume_model(out, config=config_of(run_config, "plateau", log_interval=3)).step == 12


def test_a_gradient_that_overflows_is_skipped_within_a_run(corpus, tmp_path, run_config, monkeypatch):
    """fp16's arithmetic needs a GPU; its scale does not: a run whose scaled gradient overflows twice, and goes on."""
    real_init, real_backward = OptimizersContainer.__init__, CrossEntropyObjective.accumulate_gradients
    scales, calls = [], iter(range(100))

    def with_scale(self, *arguments):
        real_init(self, *arguments)
        self.scale = LossScale(8.0)

    def backward(self, batch, total):
        loss = real_backward(self, batch, total)
        scales.append(len(batch.targets) / total)
        if next(calls) in (1, 2):
            self._model.token_embedding.grad[0, 0] = float("inf")
        return loss

    monkeypatch.setattr(OptimizersContainer, "__init__", with_scale)
    monkeypatch.setattr(CrossEntropyObjective, "accumulate_gradients", backward)
    config = config_of(run_config, "dropout", steps=5, gradient_accumulation_steps=1)
    outcome = train_model(config, [corpus], tmp_path / "run")
    assert outcome.step == 5 and scales == [8.0, 8.0, 4.0, 2.0, 2.0]
    state = open_folder(tmp_path / "run").training.tensors
    assert state["loss_scale"].tolist() == [2.0, 2.0] and state["step.embedding.tokens.weight"].item() == 3.0
    calls = iter([1] * 100)
    with pytest.raises(NumericalError, match=r"step 4: loss \d.*gradient norm (inf|nan)"):
        train_model(config, [corpus], tmp_path / "other")


@pytest.mark.parametrize(
    "settings",
    [{}, {"name": "adafactor"}, {"name": "muon"}, {"ema_decay": 0.9}, {"average_last": 2, "average_interval": 2}],
    ids=str,
)
def test_tied_weights_stay_tied(run_config, corpus, tmp_path, settings):
    """One matrix, that both ends read: of the model that is trained, of its checkpoints, and of what resumes."""
    own = {"preset": "tiny", "set": {**SMALL, "tie_embeddings": True}}
    config = run_config(model=own, steps=6, eval_interval=2, save_interval=100, **settings)
    outcome = train_model(config, [corpus], tmp_path / "run")
    model, opened = load_model(tmp_path / "run")
    assert opened.config.tie_embeddings and model.head.weight is None
    assert not [name for name in dict(opened.weights()) if name.startswith("head.")]
    stored = load_file(outcome.checkpoint / "model.safetensors")
    assert [name for name in stored if "embed_tokens" in name] and "lm_head.weight" not in stored
    content = json.loads((outcome.checkpoint / "config.json").read_text())
    assert content["tie_word_embeddings"] is True
    hidden = torch.randn(3, opened.config.hidden_size)
    table = model.embedding.tokens.weight
    assert torch.equal(model.logits(hidden, torch.arange(3)), hidden @ table.T)
