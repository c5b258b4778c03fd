"""Time between tokens beside a long prompt: the measurement runs, and names its numbers."""

import json
import sys

import pytest

from kvad.benchmarks import inter_token


@pytest.fixture(autouse=True)
def short(monkeypatch):
    for name, value in {"MAX_CHAT_TOKENS": 256, "WARM_UP": 2, "ALONE_STEPS": 5}.items():
        monkeypatch.setattr(inter_token, name, value)


def test_both_modes_are_one_json_line_each(capsys, monkeypatch):
    options = "--chats 2 --prompt 90 --hidden-size 64 --layers 1 --bound 0.001"
    monkeypatch.setattr(sys, "argv", ["inter_token", *options.split()])
    inter_token.main()
    unbounded, bounded = map(json.loads, capsys.readouterr().out.splitlines())
    assert (unbounded["mode"], unbounded["bound_ms"], bounded["mode"]) == ("unbounded", None, "bounded")
    assert unbounded["prompt_tokens_read"] == bounded["prompt_tokens_read"] == 90
    assert unbounded["alone"]["steps"] == bounded["alone"]["steps"] == 10
    assert unbounded["reading"]["steps"] == 1 < bounded["reading"]["steps"], "the prompt is read in chunks"
    assert unbounded["machine"] and unbounded["commit"]


def test_percentiles():
    assert inter_token.summarize([0.001 * n for n in range(1, 101)]) == {
        "median_ms": pytest.approx(50.5), "p99_ms": pytest.approx(99.0), "steps": 100,
    }  # fmt: skip
