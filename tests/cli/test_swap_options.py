"""``--num-blocks``, ``--swap-space``, ``--swap-dir``: preempted sequences and their statistics."""

import json
import logging
import re

import pytest

from kvad.storage.temp_paths import list_temp_paths

PROMPTS = ("hey you there, what is this", "who are you and why", "what was that")
GENERATE = "generate --max-tokens 12 --temperature 0 --ignore-eos --block-size 4 --max-num-seqs 3 --stats"
EXACT_AND_LOSSY = "0: full; key-norm(8, interval=4)"


@pytest.mark.parametrize("policy", [(), ("--policy", EXACT_AND_LOSSY)])
def test_preemption_keeps_the_texts(kvad, model, policy, tmp_path):
    wide = kvad(f"{GENERATE} --json --num-blocks 200", model, *PROMPTS, *policy)
    expected = texts(wide)
    assert stats(wide)["preemptions"] == 0
    for swap in ((), ("--swap-space", "1MiB"), ("--swap-space", 0, "--swap-dir", tmp_path)):
        result = kvad(f"{GENERATE} --json --num-blocks 14", model, *PROMPTS, *policy, *swap)
        assert texts(result) == expected
        counts = stats(result)["preemptions_by_kind"]
        count = counts["recomputed"] + counts["to_ram"] + counts["to_disk"]
        assert count == stats(result)["preemptions"] > 0
        assert not policy or (counts["to_disk"] if "--swap-dir" in swap else counts["to_ram"]) == count
    assert not list_temp_paths(tmp_path)


def texts(result):
    assert result.code == 0, result.err
    return [[each["token_ids"] for each in answer["choices"]] for answer in json.loads(result.out)["completions"]]


def stats(result):
    return json.loads(result.out)["stats"]


def test_stats_of_preemption(kvad, model):
    command = f"{GENERATE} --num-blocks 14 --swap-space 1MiB"
    result = kvad(command, model, *PROMPTS, "--policy", EXACT_AND_LOSSY)
    counts = r"preempted   0 recomputed \(0 tokens\), [1-9]\d* swapped to memory, 0 to disk; .* swapped"
    assert re.search(counts, result.err)
    assert re.search(r"preempted   a token costs .* us; a MiB .* ms out, .* ms in", result.err)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--swap-space", "1q", "not a size"),
        ("--swap-space", "-1", "not a size"),
        ("--swap-dir", "/proc/nix", "swap_dir: /proc/nix"),
    ],
)
def test_invalid_values(kvad, model, option, value, message):
    result = kvad("generate", model, "hey", option, value)
    assert result.code == 2 and message in result.err and not result.out


def test_plan_includes_swap_space(kvad, model):
    bare, swapped = (json.loads(kvad("plan", model, "--json", *more).out) for more in ((), ("--swap-space", "8MiB")))
    assert swapped["bytes"]["total"] == bare["bytes"]["total"] + (8 << 20)
    assert (bare["swap_space"], swapped["swap_space"]) == (None, 8 << 20)
    assert "swap space" in kvad("plan", model, "--swap-space", "8MiB").out
    assert "swap space " not in kvad("plan", model).out


def test_verbose_prints_the_log(kvad, model, caplog, request):
    request.addfinalizer(lambda: logging.getLogger("kvad").setLevel(logging.NOTSET))
    command = f"{GENERATE} --num-blocks 14"
    assert kvad(command, model, *PROMPTS).code == 0 and "the pool is full" not in caplog.text
    assert kvad(f"{command} -v", model, *PROMPTS).code == 0 and "the pool is full" in caplog.text
