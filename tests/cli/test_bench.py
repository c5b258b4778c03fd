"""``kvad bench``: its options, its three forms of output, and invalid input."""

import json

import pytest

from tests.support.cli_checkpoints import write_model


def test_text(kvad, model):
    result = kvad("bench cache", model, "--new-tokens", "4,8", "--repeats", 1, "--prompt", "hey")
    assert result.code == 0 and result.err == ""
    assert "2N/3" in result.out and "exponent" in result.out


def test_json_is_one_line_with_machine_and_commit(kvad, model, tmp_path):
    result = kvad("bench cache --new-tokens 8,4 --repeats 1 --json", model, "--out", tmp_path)
    assert result.code == 0 and result.out.count("\n") == 1
    record = json.loads(result.out)
    assert record["what"] == "bench cache" and record["machine"] and "commit" in record and record["tokens"] == [4, 8]
    assert json.loads((tmp_path / "bench-cache.json").read_text("utf-8")) == record


def test_default_lengths_are_those_that_fit(kvad, tmp_path):
    result = kvad("bench cache --repeats 1 --json", write_model(tmp_path / "short", limit=21))
    assert json.loads(result.out)["tokens"] == [2, 5, 10, 20]
    assert result.err == "kvad: the model's limit leaves room for 20 new tokens: timing [2, 5, 10, 20]\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--new-tokens 4,x", "'4,x' is not a list of whole numbers"),
        ("--new-tokens 4", "two different numbers"),
        ("--new-tokens 4,500", "exceed the model's limit of 96"),
        ("--new-tokens 4,8 --repeats 0", "repeats: 0 is out of range"),
        ("--token 4", "'--new-tokens'"),
        (f"--prompt {'x' * 200}", "prompt: must have at most 96 tokens, got 200"),
    ],
)
def test_invalid_input(kvad, model, flags, message):
    result = kvad(f"bench cache {flags}", model)
    assert result.code == 2 and result.out == "" and message in result.err.splitlines()[0], result
