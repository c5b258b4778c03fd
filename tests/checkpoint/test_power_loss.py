"""A power cut at any moment of a save leaves complete checkpoints on disk, with the last one that was reported."""

import pytest
import torch

from kvad.checkpoint.folder import list_steps
from kvad.checkpoint.native import open_folder
from kvad.errors import CheckpointError
from kvad.storage.atomic import recover_interrupted
from tests.support.power_loss import PowerCuts
from tests.support.random_models import model_config
from tests.support.run_steps import save_step

CONFIG, MISSING = model_config(), -1  # a link to a step of a run that was overwritten
# (step, best step, first save of a new run)
SAVES = [(1, 1, False), (2, 1, False), (3, 3, False), (4, 3, False), (4, 3, False), (2, 2, True), (3, 2, False)]


class Check:
    """Checks the disk after a power cut; a save is identified by the values of its tensor."""

    def __init__(self):
        self.completed = self.current = 0  # the last save that returned, and the one in progress
        self.bests = {None}  # saves that ``best`` may link to

    def __call__(self, disk):
        run = disk / "run"
        self.check_run(run)
        if (run / "checkpoints").is_dir():
            recover_interrupted(run / "checkpoints")  # as the next save does
            self.check_run(run)

    def check_run(self, run):
        saves = [read_number(step) for step in list_steps(run)]
        assert (saves[-1] if saves else 0) in (self.completed, self.current), (saves, self.completed, self.current)
        best = read_number(run / "best") if (run / "best").is_symlink() else None
        assert best in self.bests, (best, self.bests)


def read_number(path):
    try:
        return int(open_folder(path, verify=True).tensors["a"][0])
    except CheckpointError:
        if path.name != "best":
            raise
        return MISSING


def save_all(tmp_path, is_unflushed=lambda path: False):
    check = Check()
    (tmp_path / "disk").mkdir()
    with PowerCuts(tmp_path / "disk", check, tmp_path / "left", is_unflushed) as disk:
        best, numbers = None, {}
        for number, (step, best_step, fresh) in enumerate(SAVES, 1):
            numbers[step] = number
            check.current, check.bests = number, {best, numbers[best_step], *([MISSING] * fresh)}
            tensors = {"a": torch.full((99,), float(number))}
            save_step(tmp_path / "disk" / "run", step, CONFIG, tensors, keep=1, best=best_step, fresh=fresh)
            best, check.completed = numbers[best_step], number
            check.bests = {best}
            disk.check_states()
    return disk.num_checks


def test_a_power_cut_at_any_moment_leaves_complete_checkpoints(tmp_path):
    assert save_all(tmp_path) > 300


@pytest.mark.parametrize("name", ["model.safetensors", "manifest.json", "checkpoints", "run"])
def test_a_missing_flush_is_detected(tmp_path, name):
    with pytest.raises(Exception, match=r"."):  # an assertion, or an incomplete checkpoint
        save_all(tmp_path, lambda path: path.name == name)
