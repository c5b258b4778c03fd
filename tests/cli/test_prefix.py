"""``kvad prefix``, ``--prefix-cache-dir`` of the commands that run a model, and the doctor of a tier's folder."""

import json
import os

import pytest

from kvad.cache.offload.disk_store import DiskBlockStore
from tests.support.cli_checkpoints import run, write_model

TEXT = "def add(first, second):\n    return first + second\n\n"
GREEDY = ("--temperature", 0, "--max-tokens", 6)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def kvad(capsys, monkeypatch):
    return lambda *arguments, stdin=None: run(capsys, *arguments, stdin=stdin, monkeypatch=monkeypatch)


@pytest.fixture
def tier(tmp_path):
    return tmp_path / "tier"


def add(kvad, model, tier, *more, name="sys"):
    ran = kvad("prefix", "add", model, "--prompt", TEXT, "--name", name, "--prefix-cache-dir", tier, *more)
    assert ran.code == 0, ran.err
    return ran


def test_a_prefix_is_added_found_shown_and_removed(kvad, model, tier):
    said = add(kvad, model, tier).out
    assert said.startswith("sys") and "48 tokens in 3 blocks" in said
    plain = kvad("generate", model, TEXT + "x", *GREEDY)
    ran = kvad("generate", model, TEXT + "x", *GREEDY, "--prefix-cache-dir", tier, "--stats")
    assert ran.out == plain.out and "48 from disk" in ran.err and "3 pinned" in ran.err
    (listed,) = json.loads(kvad("prefix", "list", "--prefix-cache-dir", tier, "--json").out)["prefixes"]
    assert (listed["name"], listed["tokens"], listed["missing"]) == ("sys", 48, 0) and listed["bytes"] > 1000
    shown = kvad("prefix", "show", "sys", "--prefix-cache-dir", tier)
    assert TEXT[:20] in shown.out and "float32" in shown.out
    assert json.loads(kvad("prefix", "rm", "sys", "--prefix-cache-dir", tier, "--json").out)["removed_blocks"] == 3
    assert kvad("prefix", "list", "--prefix-cache-dir", tier).out == ""
    assert kvad("prefix", "rm", "sys", "--prefix-cache-dir", tier).code == 2


def test_blocks_that_another_prefix_has_stay(kvad, model, tier):
    add(kvad, model, tier)
    add(kvad, model, tier, name="again")
    assert "0 blocks removed" in kvad("prefix", "rm", "sys", "--prefix-cache-dir", tier).out
    assert json.loads(kvad("prefix", "show", "again", "--prefix-cache-dir", tier, "--json").out)["missing"] == 0


def test_a_file_or_standard_input_and_not_both(kvad, model, tier, tmp_path):
    (tmp_path / "text").write_text(TEXT)
    assert (
        kvad("prefix", "add", model, "--file", tmp_path / "text", "--name", "f", "--prefix-cache-dir", tier).code == 0
    )
    assert (
        kvad("prefix", "add", model, "--file", "-", "--name", "g", "--prefix-cache-dir", tier, stdin=TEXT.encode()).code
        == 0
    )
    assert kvad("prefix", "add", model, "--name", "g", "--prefix-cache-dir", tier).code == 2
    assert (
        kvad("prefix", "add", model, "--file", "x", "--prompt", "y", "--name", "g", "--prefix-cache-dir", tier).code
        == 2
    )
    short = kvad("prefix", "add", model, "--prompt", "x", "--name", "h", "--prefix-cache-dir", tier)
    assert short.code == 2 and "must have at least 16 tokens (one block), got 1" in short.err


@pytest.mark.parametrize("name", ["../up", "a/b", ".x", "", "x" * 70])
def test_tricks_in_names_are_refused(kvad, model, tier, name):
    add(kvad, model, tier)
    for ran in (
        kvad("prefix", "add", model, "--prompt", TEXT, "--name", name, "--prefix-cache-dir", tier),
        kvad("prefix", "show", name, "--prefix-cache-dir", tier),
        kvad("prefix", "rm", name, "--prefix-cache-dir", tier),
    ):
        assert ran.code == 2 and "not a valid name for a prefix" in ran.err
    assert len(list(tier.glob("*.prefix"))) == 1


def test_the_default_folder_is_in_the_users_cache(kvad, model, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path))
    assert kvad("prefix", "add", model, "--prompt", TEXT, "--name", "sys").code == 0
    assert (tmp_path / "kvad" / "prefix-cache" / "sys.prefix").exists() and "sys" in kvad("prefix", "list").out


@pytest.mark.parametrize("flag", ["--prefix-cache-size", "--prefix-cache-ram"])
@pytest.mark.parametrize(
    ("size", "says"), [("0", "must be at least 1"), ("0GiB", "must be at least 1"), ("much", "not a size")]
)
def test_sizes_that_are_none_are_refused(kvad, model, tier, flag, size, says):
    ran = kvad("generate", model, "x", "--prefix-cache-dir", tier, flag, size)
    assert ran.code == 2 and says in ran.err and flag in ran.err and not tier.exists()


def test_a_folder_in_use_and_one_that_is_none(kvad, model, tier, tmp_path, caplog):
    holder = DiskBlockStore(tier, 1 << 20)
    ran = kvad("generate", model, TEXT, *GREEDY, "--prefix-cache-dir", tier)
    assert ran.code == 0 and "in use by another process" in caplog.text
    assert kvad("prefix", "add", model, "--prompt", TEXT, "--name", "x", "--prefix-cache-dir", tier).code == 2
    assert kvad("doctor", tier, "--fix").code == 2 and kvad("doctor", tier).code == 0
    holder.release()
    (tmp_path / "file").write_text("x")
    assert kvad("generate", model, "x", "--prefix-cache-dir", tmp_path / "file").code == 2
    assert kvad("generate", model, "x", "--prefix-cache-size", "5MiB").code == 2
    assert kvad("prefix", "list", "--prefix-cache-dir", tmp_path / "none").code == 2


def test_the_plan_counts_the_memory_of_tiers(kvad, model):
    plain, tiered = (
        json.loads(kvad("plan", model, "--json", *more).out)["bytes"] for more in ((), ("--prefix-cache-ram", "1MiB"))
    )
    assert (
        tiered["prefix_cache_host_bytes"] == 1 << 20
        and tiered["total"] - plain["total"] == 1 << 20
        and plain["prefix_cache_host_bytes"] == 0
    )
    assert "at most, in host memory" in kvad("plan", model, "--prefix-cache-ram", "1MiB").out


def test_the_doctor_names_what_is_wrong_and_mends_what_is_safe(kvad, model, tier):
    add(kvad, model, tier)
    healthy = kvad("doctor", tier)
    assert healthy.code == 0 and "3 blocks and 1 pin whole" in healthy.out
    first, second, _ = sorted(tier.glob("*.kv"))
    first.write_bytes(first.read_bytes()[:-30])
    second.write_bytes(b"#!/bin/sh\n" * 100)
    orphan = tier / ".00aa.kv.999999.0123abcd.tmp"
    orphan.write_bytes(b"half")
    (tier / "notes.txt").write_text("mine")
    ran = kvad("doctor", tier)
    kinds = [line.split()[1] for line in ran.out.splitlines() if line.startswith("problem")]
    assert ran.code == 1 and sorted(kinds) == ["damaged", "files", "foreign", "orphan"]
    fixed = json.loads(kvad("doctor", tier, "--fix", "--json").out)
    assert not first.exists() and not orphan.exists() and second.exists() and (tier / "notes.txt").exists()
    assert sum("removed" in each["message"] for each in fixed["findings"]) == 2
    assert any("1 of 3 blocks are missing" in each["message"] for each in fixed["findings"])


def test_a_checkpoint_is_not_fixed(kvad, model):
    ran = kvad("doctor", model, "--fix")
    assert (
        ran.code == 2 and "neither a session folder nor a prefix cache" in ran.err and kvad("doctor", model).code == 0
    )
