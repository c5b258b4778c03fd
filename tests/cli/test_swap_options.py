"""--num-blocks, --swap-space, --swap-dir: rows that give way, and what is said of it."""

import json
import re

import pytest

from kvad.storage.temp_paths import list_temp_paths
from tests.support.cli_checkpoints import run, write_model

PROMPTS = ("hey you there, what is this", "who are you and why", "what was that")
ASKED = (
    "--max-tokens",
    12,
    "--temperature",
    0,
    "--ignore-eos",
    "--block-size",
    4,
    "--num-blocks",
    14,
    "--max-num-seqs",
    3,
    "--json",
    "--stats",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def kvad(capsys, monkeypatch):
    return lambda *arguments: run(capsys, *arguments, monkeypatch=monkeypatch)


@pytest.mark.parametrize("policy", [(), ("--policy", "0: full; key-norm(8, interval=4)")])
def test_texts_are_the_same_however_rows_give_way(kvad, model, policy, tmp_path):
    wide = kvad("generate", model, *PROMPTS, *(200 if each == 14 else each for each in ASKED), *policy)
    right = texts(wide)
    assert said(wide)["preemptions"] == 0
    for ways in ((), ("--swap-space", "1MiB"), ("--swap-space", 0, "--swap-dir", tmp_path)):
        ran = kvad("generate", model, *PROMPTS, *ASKED, *policy, *ways)
        assert texts(ran) == right
        gave = said(ran)["preemptions_by_kind"]
        count = gave["recomputed"] + gave["to_ram"] + gave["to_disk"]
        assert count == said(ran)["preemptions"] > 0
        assert not policy or (gave["to_disk"] if "--swap-dir" in ways else gave["to_ram"]) == count
    assert not list_temp_paths(tmp_path)


def texts(ran):
    assert ran.code == 0, ran.err
    return [[each["token_ids"] for each in answer["choices"]] for answer in json.loads(ran.out)["completions"]]


def said(ran):
    return json.loads(ran.out)["stats"]


def test_stats_say_how_rows_gave_way(kvad, model):
    plain = [each for each in ASKED if each != "--json"]
    ran = kvad(
        "generate", model, *PROMPTS, *plain, "--swap-space", "1MiB", "--policy", "0: full; key-norm(8, interval=4)"
    )
    assert re.search(
        r"preempted   0 recomputed \(0 tokens\), [1-9]\d* swapped to memory, 0 to disk; .* swapped", ran.err
    )
    assert re.search(r"preempted   a token costs .* us; a MiB .* ms out, .* ms in", ran.err)


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--swap-space", "1q", "not a size"),
        ("--swap-space", "-1", "not a size"),
        ("--swap-dir", "/proc/nix", "swap_dir: /proc/nix"),
    ],
)
def test_what_cannot_be_is_refused(kvad, model, option, value, told):
    ran = kvad("generate", model, "hey", option, value)
    assert ran.code == 2 and told in ran.err and not ran.out


def test_the_plan_counts_it(kvad, model):
    bare, bound = (json.loads(kvad("plan", model, "--json", *more).out) for more in ((), ("--swap-space", "8MiB")))
    assert bound["bytes"]["total"] == bare["bytes"]["total"] + (8 << 20)
    assert (bare["swap_space"], bound["swap_space"]) == (None, 8 << 20)
    assert "swap space" in kvad("plan", model, "--swap-space", "8MiB").out
    assert "swap space " not in kvad("plan", model).out
