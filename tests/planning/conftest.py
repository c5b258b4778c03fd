"""Fixtures: the command ``kvad plan``, every tiny configuration, and a checkpoint with two kinds of layers."""

import json

import pytest

from kvad.cli.main import main
from tests.support.lab_models import checkpoint, config  # noqa: F401


@pytest.fixture
def run_plan(capsys):
    """Run ``kvad plan`` with the words of a text and more arguments; return its status, output and errors."""

    def run(words, *arguments):
        status = main(["plan", *str(words).split(), *map(str, arguments)])
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def plan_json(run_plan):
    """Run ``kvad plan --json``, which must succeed, and return its values."""

    def run(words, *arguments):
        status, out, err = run_plan(words, *arguments, "--json", "--bandwidth", "10")
        assert (status, err) == (0, "")
        return json.loads(out)

    return run


@pytest.fixture
def plan_error(run_plan):
    """Run ``kvad plan``, which must refuse its arguments, and return the error."""

    def run(words, *arguments):
        status, out, err = run_plan(words, *arguments)
        assert (status, out) == (2, "") and err.startswith(("kvad: error: ", "Usage: "))
        return err

    return run
