"""A power cut at any moment of a save: what the disk has kept are whole checkpoints, and the last that was said."""

import pytest
import torch

from kvad.checkpoint.folder import list_steps
from kvad.checkpoint.native import open_folder, save_step
from kvad.errors import CheckpointError
from kvad.storage.atomic import recover_interrupted
from tests.support.power_loss import PowerCuts
from tests.support.random_models import model_config

CONFIG, GONE = model_config(), -1  # a link to a step of a run that was overwritten
SAVES = [(1, 1, False), (2, 1, False), (3, 3, False), (4, 3, False), (4, 3, False), (2, 2, True), (3, 2, False)]


class Judge:
    """Saves are told by what their tensor holds.  ``done``: the last that was said to be there; ``doing``: the one that
    is written; ``bests``: what may be the best."""

    def __init__(self):
        self.done = self.doing = 0
        self.bests = {None}

    def __call__(self, left):
        run = left / "run"
        self.look(run)
        if (run / "checkpoints").is_dir():
            recover_interrupted(run / "checkpoints")  # as the next save does
            self.look(run)

    def look(self, run):
        found = [held(step) for step in list_steps(run)]
        assert (found[-1] if found else 0) in (self.done, self.doing), (found, self.done, self.doing)
        best = held(run / "best") if (run / "best").is_symlink() else None
        assert best in self.bests, (best, self.bests)


def held(path):
    try:
        return int(open_folder(path, verify=True).tensors["a"][0])
    except CheckpointError:
        if path.name != "best":
            raise
        return GONE


def saves(tmp_path, mute=lambda path: False):
    judge = Judge()
    (tmp_path / "disk").mkdir()
    with PowerCuts(tmp_path / "disk", judge, tmp_path / "left", mute) as disk:
        best, of_step = None, {}
        for number, (step, best_now, fresh) in enumerate(SAVES, 1):
            of_step[step] = number
            judge.doing, judge.bests = number, {best, of_step[best_now], *([GONE] * fresh)}
            tensors = {"a": torch.full((99,), float(number))}
            how = {"keep": 1, "best": best_now, "fresh": fresh}
            save_step(tmp_path / "disk" / "run", step, CONFIG, tensors, None, **how)
            best, judge.done = of_step[best_now], number
            judge.bests = {best}
            disk.check_states()
    return disk.num_checks


def test_a_power_cut_at_any_moment_leaves_whole_checkpoints(tmp_path):
    assert saves(tmp_path) > 300


@pytest.mark.parametrize("name", ["model.safetensors", "manifest.json", "checkpoints", "run"])
def test_a_missing_flush_is_detected(tmp_path, name):
    with pytest.raises(Exception, match=r"."):  # an assertion, or a checkpoint that is not whole
        saves(tmp_path, lambda path: path.name == name)
