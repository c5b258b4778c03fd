"""Fixtures: every tiny configuration, and a checkpoint with two kinds of layers."""

from tests.support.lab_models import checkpoint, config  # noqa: F401
