"""Fixtures of the workbench's tests: every tiny config, and a checkpoint with two kinds of layers."""

import pytest

from tests.lab.models import CONFIGS, EVERY, write_checkpoint


@pytest.fixture(params=EVERY)
def config(request):
    return EVERY[request.param]


@pytest.fixture
def checkpoint(tmp_path):
    return write_checkpoint(tmp_path / "run", CONFIGS["pattern"])
