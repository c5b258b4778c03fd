"""A run retains its newest steps and the best one, to which a link points."""

import os
from pathlib import Path

import pytest
import torch

from kvad.checkpoint.folder import list_steps, locate, prune_steps, resolve_best_link, step_folder
from kvad.checkpoint.native import open_folder
from kvad.errors import CheckpointError, SaveError
from tests.support.random_models import model_config
from tests.support.run_steps import save_step

CONFIG = model_config()


def step(run, number, **options):
    return save_step(run, number, CONFIG, {"a": torch.full((3,), float(number))}, **options)


def names(run):
    return [int(path.name.removeprefix("step-")) for path in list_steps(run)]


def test_pruning_retains_the_best_and_the_newest(tmp_path):
    for number, best in ((1, None), (2, 2), (3, 2), (4, 2), (5, 2)):
        step(tmp_path, number, keep=2, best=best)
        assert (tmp_path / "best").is_symlink() == (best is not None)
    assert names(tmp_path) == [2, 4, 5]
    assert os.readlink(tmp_path / "best") == "checkpoints/step-00000002"
    assert open_folder(tmp_path / "best", verify=True).path == step_folder(tmp_path, 2)
    assert open_folder(tmp_path).path == step_folder(tmp_path, 5), "a run is its newest"
    step(tmp_path, 6, keep=2, best=6)
    assert names(tmp_path) == [5, 6] and locate(tmp_path / "best") == step_folder(tmp_path, 6)


def test_a_moved_or_copied_run_retains_its_best(tmp_path):
    step(tmp_path / "run", 7, best=7)
    (tmp_path / "run").rename(tmp_path / "moved")
    assert locate(tmp_path / "moved" / "best").is_dir()


def test_an_opened_best_step_is_fixed(tmp_path):
    step(tmp_path, 1, keep=3, best=1)
    opened = open_folder(tmp_path / "best")
    step(tmp_path, 2, keep=3, best=2)
    assert opened.tensors["a"].tolist() == [1.0] * 3


def test_no_link_without_a_best_step(tmp_path):
    step(tmp_path, 1, keep=1, best=1)
    step(tmp_path, 2, keep=1, best=None)
    assert names(tmp_path) == [2] and not (tmp_path / "best").is_symlink()
    with pytest.raises(CheckpointError, match="no such folder"):
        open_folder(tmp_path / "best")
    prune_steps(tmp_path, 1, best=1)  # gone by now
    assert not (tmp_path / "best").is_symlink()


def test_an_overwritten_run_does_not_keep_the_old_best(tmp_path):
    step(tmp_path, 1, best=1)
    step(tmp_path, 2, best=1)
    step(tmp_path, 1, fresh=True, best=None)
    assert names(tmp_path) == [1] and not (tmp_path / "best").is_symlink()


def test_a_best_that_is_not_a_link_is_left_alone(tmp_path):
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "mine").touch()
    step(tmp_path, 1, best=1)
    assert (tmp_path / "best" / "mine").exists() and resolve_best_link(tmp_path / "best") == tmp_path / "best"
    other = tmp_path / "other"
    other.mkdir()
    (other / "best").symlink_to(tmp_path)  # a link, but to no step
    assert resolve_best_link(other / "best") == other / "best"


def test_a_disk_without_links_gets_a_hint(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    with pytest.raises(SaveError, match="Operation not supported") as caught:
        step(tmp_path, 1, best=1)
    assert "train.keep_best=false" in caught.value.hint
    assert open_folder(tmp_path, verify=True).path.name == "step-00000001", "the step itself is complete"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]
