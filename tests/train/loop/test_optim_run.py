"""Runs with every optimizer, schedule and average: falling losses, exact resume."""

import json

import pytest
import torch
from safetensors.torch import load_file

from kvad.checkpoint.loader import load_model
from kvad.checkpoint.native import open_folder
from kvad.errors import ConfigError, NumericalError
from kvad.train.loop.run import resume_model, train_model
from kvad.train.monitoring.metrics import read_metrics
from kvad.train.objectives.cross_entropy import CrossEntropyObjective
from kvad.train.optim.optimizer import LossScale, OptimizersContainer
from tests.support.training_runs import StopAt, assert_resume_is_exact, hashes, tiny_shape

SMALL = tiny_shape(layers=1, mlp=32)
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


def logged(out):
    lines = read_metrics(out / "metrics.jsonl")
    steps = [(one["step"], one["loss"], one["lr"], one["grad_norm"]) for one in lines if one["kind"] == "step"]
    return steps, [(one["step"], one["val_loss"]) for one in lines if one["kind"] == "eval"]


def config_of(run_config, name, **changes):
    drops = DROPS if name in ("dropout", "recompute") else {}
    model = {"preset": "tiny", "set": {**SMALL, **drops}}
    settings = {"steps": 12, "gradient_accumulation_steps": 2, "eval_interval": 5, "save_interval": 50}
    settings |= {**RUNS[name], **changes}
    return run_config(model=model, **settings)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", RUNS)
def test_resume_is_exact(corpus, tmp_path, run_config, name):
    assert_resume_is_exact(config_of(run_config, name), [corpus], tmp_path, stops=[3, 7])


@pytest.mark.parametrize("name", ["muon", "adafactor", "ema", "dropout"])
def test_the_loss_falls(corpus, tmp_path, run_config, name):
    lr = {"lr": 0.2} if name == "adafactor" else {"lr": 1e-2, "min_lr": 1e-3}
    outcome = train_model(config_of(run_config, name, steps=40, eval_interval=40, **lr), [corpus], tmp_path / "run")
    assert outcome.val_loss < 3.6, "5.56 at the start"


def test_a_run_is_a_function_of_its_seed(corpus, tmp_path, run_config):
    for out, seed in (("one", 1), ("two", 1), ("three", 2)):
        train_model(config_of(run_config, "dropout", steps=3, seed=seed), [corpus], tmp_path / out)
        torch.rand(7)
    assert logged(tmp_path / "one") == logged(tmp_path / "two") != logged(tmp_path / "three")
    assert hashes(tmp_path / "one") == hashes(tmp_path / "two")


def test_the_comparison_detects_a_lost_random_state(corpus, tmp_path, run_config, monkeypatch):
    config = config_of(run_config, "dropout")
    train_model(config, [corpus], tmp_path / "whole")
    train_model(config, [corpus], tmp_path / "parts", callbacks=[StopAt(3)])
    monkeypatch.setattr(torch, "set_rng_state", lambda state: None)
    resume_model(tmp_path / "parts")
    assert logged(tmp_path / "parts") != logged(tmp_path / "whole")


@pytest.mark.parametrize("name", ["ema", "average"])
def test_the_average_is_evaluated_and_saved(corpus, tmp_path, run_config, monkeypatch, name):
    """The reported loss is that of the saved average, not of the trained weights."""
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
    plain = config_of(run_config, name, lr=1e-2, ema_decay=0.0, average_last=0, average_interval=None)
    train_model(plain, [corpus], tmp_path / "raw")
    assert [step[:2] for step in logged(tmp_path / "raw")[0]] == [step[:2] for step in logged(tmp_path / "run")[0]]
    assert outcome.val_loss != logged(tmp_path / "raw")[1][-1][1]


def test_resume_with_another_eval_interval_is_refused_for_plateau(corpus, tmp_path, run_config):
    out = tmp_path / "run"
    train_model(config_of(run_config, "plateau"), [corpus], out, callbacks=[StopAt(3)])
    with pytest.raises(ConfigError, match=r"train.eval_interval: 2 there, 3 here \(optim.schedule = 'plateau'\)"):
        resume_model(out, config=config_of(run_config, "plateau", eval_interval=3))
    assert resume_model(out, config=config_of(run_config, "plateau", log_interval=3)).step == 12


def test_a_gradient_that_overflows_is_skipped_within_a_run(corpus, tmp_path, run_config, monkeypatch):
    """A run whose scaled gradient overflows twice continues (the loss scale needs no GPU)."""
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
    """The trained model and its checkpoints have one matrix for embedding and head."""
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
