"""Fixtures: every tiny configuration, a checkpoint with two kinds of layers, and ``kvad inspect``."""

import pytest

from tests.support.cli_checkpoints import run
from tests.support.lab_models import checkpoint, config  # noqa: F401


@pytest.fixture
def inspect(capsys):
    """Run ``kvad inspect`` with these arguments; returns exit code, output and errors."""
    return lambda *arguments: run(capsys, "inspect", *arguments)
