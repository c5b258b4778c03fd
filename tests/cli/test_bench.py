"""kvad bench: its options, its three forms of output, and what it refuses."""

import json

import pytest

from tests.support.cli_checkpoints import run, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def kvad(capsys):
    return lambda *arguments: run(capsys, *arguments)


def test_text(kvad, model):
    ran = kvad("bench", "cache", model, "--new-tokens", "4,8", "--repeats", 1, "--prompt", "hey")
    assert ran.code == 0 and ran.err == ""
    assert "2N/3" in ran.out and "exponent" in ran.out and "in the engine" not in ran.err


def test_json_is_one_line_with_machine_and_commit(kvad, model, tmp_path):
    ran = kvad("bench", "cache", model, "--new-tokens", "8,4", "--repeats", 1, "--json", "--out", tmp_path / "out")
    assert ran.code == 0 and ran.out.count("\n") == 1
    found = json.loads(ran.out)
    assert found["what"] == "bench cache" and found["machine"] and "commit" in found and found["tokens"] == [4, 8]
    assert json.loads((tmp_path / "out" / "bench-cache.json").read_text("utf-8")) == found


def test_without_marks_it_times_what_fits_and_says_so(kvad, tmp_path):
    ran = kvad("bench", "cache", write_model(tmp_path / "short", limit=21), "--repeats", 1, "--json")
    assert json.loads(ran.out)["tokens"] == [2, 5, 10, 20]
    assert ran.err == "kvad: the model's limit leaves room for 20 new tokens: timing [2, 5, 10, 20]\n"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--new-tokens", "4,x"), "'4,x' is not a list of whole numbers"),
        (("--new-tokens", "4"), "two different numbers"),
        (("--new-tokens", "4,500"), "exceed the model's limit of 96"),
        (("--new-tokens", "4,8", "--repeats", 0), "repeats: 0 is out of range"),
        (("--token", "4"), "'--new-tokens'"),
        (("--prompt", "x" * 200), "prompt: must have at most 96 tokens, got 200"),
    ],
)
def test_bad_input(kvad, model, flags, says):
    ran = kvad("bench", "cache", model, *flags)
    assert ran.code == 2 and ran.out == "" and says in ran.err.splitlines()[0], ran


def test_no_checkpoint(kvad, tmp_path):
    assert kvad("bench", "cache", tmp_path).code == 2
