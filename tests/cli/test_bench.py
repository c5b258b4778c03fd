"""``kvad bench``: its options, its three forms of output, and invalid input."""

import io
import json
import sys
import time

import pytest

from kvad.cli import output
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
        ("--new-tokens 4,8 --repeats 0", "repeats: must be at least 1, got 0"),
        ("--token 4", "'--new-tokens'"),
        (f"--prompt {'x' * 200}", "prompt: must have at most 96 tokens, got 200"),
    ],
)
def test_invalid_input(kvad, model, flags, message):
    result = kvad(f"bench cache {flags}", model)
    assert result.code == 2 and result.out == "" and message in result.err.splitlines()[0], result


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--new-tokens 1", "new_tokens: must be at least 2, got 1"),
        ("--new-tokens 4 --repeats 0", "repeats: must be at least 1, got 0"),
        ("--new-tokens 500", "exceed the model's limit of 96"),
        ("--speculative draft", "--speculative draft: no draft model is given"),
    ],
)
def test_invalid_input_of_speculation(kvad, model, flags, message):
    result = kvad(f"bench speculative {flags}", model)
    assert result.code == 2 and result.out == "" and message in result.err.splitlines()[0], result


def test_quick_measures_less_and_given_options_are_used(kvad, model):
    record = json.loads(kvad("bench cache --quick --new-tokens 4,8 --json", model).out)
    assert record["repeats"] == 1 and record["tokens"] == [4, 8]


@pytest.mark.parametrize("spelling", ["bench --profile", "bench profile"])
def test_profile(kvad, model, spelling):
    text = kvad(spelling, model, "--context", 8, "--new-tokens", 4, "--repeats", 1)
    assert text.code == 0 and "part of a step" in text.out and "roofline" in text.out
    record = json.loads(kvad(spelling, model, "--context", 8, "--new-tokens", 4, "--repeats", 1, "--json").out)
    assert record["what"] == "bench profile" and record["num_seqs"] == 1 and record["parts"]["sampling"] > 0
    assert 0 < record["of_roofline"] < 1 and record["tokens_per_second"] > 0


@pytest.mark.parametrize("spelling", ["bench --speculative ngram:3", "bench speculative --speculative ngram:3"])
def test_speculative(kvad, model, spelling):
    """Speed with and without drafts, how many are accepted, and whether the greedy tokens are equal."""
    flags = ("--prompt", "hey you hey you", "--new-tokens", 48, "--repeats", 2)
    text = kvad(spelling, model, *flags)
    assert text.code == 0 and "without drafts" in text.out and "all 48 tokens are equal" in text.out, text.err
    record = json.loads(kvad(spelling, model, *flags, "--json").out)
    assert record["speculative"]["method"] == "ngram" and record["speculative"]["num_tokens"] == 3
    assert record["outputs_agree"] == record["new_tokens"] == 48 and record["speedup"] > 0
    assert 0 < record["draft_steps"] < record["steps"] and record["accepted_tokens"] <= record["draft_tokens"]
    # every token comes from a step, or is an accepted draft
    assert record["steps"] + record["accepted_tokens"] == 2 * 48
    assert record["acceptance_rate"] == record["accepted_tokens"] / record["draft_tokens"]
    assert record["mean_accepted_length"] == 1 + record["accepted_tokens"] / record["draft_steps"]


def test_a_draft_model_that_agrees(kvad, model):
    flags = ("--draft-model", model, "--new-tokens", 30, "--repeats", 1, "--json")
    record = json.loads(kvad("bench speculative", model, *flags).out)
    assert record["speculative"]["method"] == "draft" and record["acceptance_rate"] > 0.9
    assert record["mean_accepted_length"] > 4


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_shows_the_time_left(monkeypatch):
    """On a terminal at once, in a file one line after five seconds."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for stream, expected in ((_Terminal(), 4), (io.StringIO(), 1)):
        monkeypatch.setattr(sys, "stderr", stream)
        with output.ProgressLine() as progress:
            for done in range(4):
                progress.update("full: text", done, 40)
                now[0] += 4
        shown = stream.getvalue().replace("\r", "\n").splitlines()
        lines = [" ".join(line.split()) for line in shown if line.strip()]
        assert len(lines) == expected and any(line.endswith("full: text 2 of 40 about 3 min left") for line in lines)
