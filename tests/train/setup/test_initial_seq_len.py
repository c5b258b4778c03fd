"""Default row length of runs that start from a model with a shorter limit."""

import json
import shutil

import pytest

from kvad.cli.main import main
from kvad.train.config.run import RunConfig
from kvad.train.loop.run import read_run_config, resume_model, train_model
from tests.support.training_runs import tiny_config, tiny_shape

FEW = ("--steps", "2", "--batch-size", "2", "--precision", "fp32")
LIMIT = 32


@pytest.fixture(scope="module")
def base(corpus, tmp_path_factory):
    model = {"preset": "tiny", "set": tiny_shape(layers=1, mlp=32)}
    config = tiny_config(model=model, data={"seq_len": LIMIT}, steps=1, batch_size=2)
    return train_model(config, [corpus], tmp_path_factory.mktemp("base") / "run").checkpoint


def kvad(*words):
    return main([str(word) for word in words])


def test_the_default_row_length_is_the_models_limit(corpus, tmp_path, base):
    begun, out = shutil.copytree(base, tmp_path / "base"), tmp_path / "run"
    assert kvad("train", corpus, "--init", begun, "--out", out, *FEW) == 0
    assert RunConfig.load(out / "run.toml").data.seq_len == read_run_config(out)[0].data.seq_len == LIMIT
    (tmp_path / "mine.toml").write_text(
        f'[model]\ninit = "{begun}"\n[train]\nsteps = 2\nbatch_size = 2\nprecision = "fp32"\n'
    )
    shutil.rmtree(begun)  # all weights trained, it is never looked at again
    assert kvad("train", "--resume", tmp_path / "mine.toml", "--out", out) == 0
    assert kvad("train", "--resume", "--out", out) == 0
    assert resume_model(out, config=RunConfig.load(out / "run.toml")).step == 2


def test_a_given_row_length_is_applied_or_refused(corpus, tmp_path, base, capsys):
    assert kvad("train", corpus, "--init", base, "--out", tmp_path / "run", "--seq-len", 16, *FEW) == 0
    assert read_run_config(tmp_path / "run")[0].data.seq_len == 16
    for flags in (("--seq-len", 256), ("--set", "data.seq_len=33")):
        assert kvad("train", corpus, "--init", base, "--out", tmp_path / "no", *flags, *FEW) == 2
        assert f"Use --seq-len {LIMIT}." in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_dry_run_check_and_summarizer_use_the_same_limit(corpus, tmp_path, base, capsys):
    assert kvad("train", corpus, "--init", base, "--dry-run", "--json", *FEW) == 0
    assert json.loads(capsys.readouterr().out)["config"]["data"]["seq_len"] == LIMIT
    (tmp_path / "mine.toml").write_text(f'[model]\ninit = "{base}"\n')
    assert kvad("data", "check", tmp_path / "mine.toml", corpus) == 0
    assert kvad("data", "prepare", tmp_path / "mine.toml", corpus, "--out", tmp_path / "data") == 0
    small = ("--set", "ratio=2", "--set", "recent=2", "--set", "interval=2", "--set", "hidden_size=4")
    compressing = ("--objective", "summarizer", "--init", base, *small)
    assert kvad("train", corpus, *compressing, "--out", tmp_path / "summaries", *FEW) == 0
    assert RunConfig.load(tmp_path / "summaries" / "run.toml").data.seq_len == LIMIT
    capsys.readouterr()
    assert kvad("train", corpus, *compressing, "--out", tmp_path / "no", "--seq-len", 33, *FEW) == 2
    assert f"Use --seq-len {LIMIT}." in capsys.readouterr().err
