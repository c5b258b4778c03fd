"""``kvad prefix``, ``--prefix-cache-dir`` of the commands that run a model, and the doctor of its folder."""

import json
import os

import pytest

from kvad.cache.offload.disk_store import DiskBlockStore

TEXT = "def add(first, second):\n    return first + second\n\n"
GREEDY = ("--temperature", 0, "--max-tokens", 6)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def add(kvad, model, folder):
    """Pin the prefix TEXT."""

    def call(name="sys"):
        result = kvad(f"prefix add {model} --name {name} --prefix-cache-dir {folder} --prompt", TEXT)
        assert result.code == 0, result.err
        return result.out

    return call


def test_add_list_show_rm(kvad, model, folder, add):
    line = add()
    assert line.startswith("sys") and "48 tokens in 3 blocks" in line
    plain = kvad("generate", model, TEXT + "x", *GREEDY)
    result = kvad(f"generate --prefix-cache-dir {folder} --stats", model, TEXT + "x", *GREEDY)
    assert result.out == plain.out and "48 from disk" in result.err and "3 pinned" in result.err
    (listed,) = json.loads(kvad(f"prefix list --prefix-cache-dir {folder} --json").out)["prefixes"]
    assert (listed["name"], listed["tokens"], listed["missing"]) == ("sys", 48, 0) and listed["bytes"] > 1000
    page = kvad(f"prefix show sys --prefix-cache-dir {folder}").out
    assert TEXT[:20] in page and "float32" in page
    assert json.loads(kvad(f"prefix rm sys --prefix-cache-dir {folder} --json").out)["removed_blocks"] == 3
    assert kvad(f"prefix list --prefix-cache-dir {folder}").out == ""
    assert kvad(f"prefix rm sys --prefix-cache-dir {folder}").code == 2


def test_a_miss_names_what_differs_from_the_pinned_prefix(kvad, model, folder, add):
    add()
    run = f"generate --prefix-cache-dir {folder} --stats"
    missed = kvad(f"{run} --cache-dtype int8", model, TEXT + "x", *GREEDY).err
    assert "0 from disk; misses: 1" in missed
    assert "sys was stored with keys float32, here int8; values float32, here int8: not used" in missed
    assert "was stored with" not in kvad(run, model, TEXT + "x", *GREEDY).err


def test_add_without_a_folder_names_the_flag_that_uses_it(kvad, model, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    result = kvad(f"prefix add {model} --name sys --prompt", TEXT)
    assert result.code == 0 and f"--prefix-cache-dir {tmp_path / 'xdg'}" in result.err
    flag = f"--prefix-cache-dir {tmp_path / 'xdg' / 'kvad' / 'prefix-cache'}"
    missed = kvad("generate --stats", model, TEXT + "x", *GREEDY).err
    assert f"prefix      pinned prefixes: {flag}\n" in missed
    hit = kvad(f"generate --stats {flag}", model, TEXT + "x", *GREEDY).err
    assert "48 from disk" in hit and "pinned prefixes:" not in hit


def test_shared_blocks_are_kept(kvad, folder, add):
    add()
    add("again")
    assert "0 blocks removed" in kvad(f"prefix rm sys --prefix-cache-dir {folder}").out
    assert json.loads(kvad(f"prefix show again --prefix-cache-dir {folder} --json").out)["missing"] == 0


def test_text_comes_from_one_source(kvad, model, folder, tmp_path):
    (tmp_path / "text").write_text(TEXT)
    command = f"prefix add {model} --name p --prefix-cache-dir {folder}"
    assert kvad(f"{command} --file {tmp_path}/text").code == 0
    assert kvad(f"{command} --file -", stdin=TEXT.encode()).code == 0
    assert kvad(command).code == 2 and kvad(f"{command} --file x --prompt y").code == 2
    short = kvad(f"{command} --prompt x")
    assert short.code == 2 and "must have at least 16 tokens (one block), got 1" in short.err


@pytest.mark.parametrize("name", ["../up", "a/b", ".x", "", "x" * 70])
def test_invalid_names(kvad, model, folder, add, name):
    add()
    for command in (("add", model, "--prompt", TEXT, "--name", name), ("show", name), ("rm", name)):
        result = kvad("prefix", *command, "--prefix-cache-dir", folder)
        assert result.code == 2 and "not a valid name for a prefix" in result.err
    assert len(list(folder.glob("*.prefix"))) == 1


def test_default_folder_is_in_the_users_cache(kvad, model, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path))
    assert kvad(f"prefix add {model} --name sys --prompt", TEXT).code == 0
    assert (tmp_path / "kvad" / "prefix-cache" / "sys.prefix").exists() and "sys" in kvad("prefix list").out


@pytest.mark.parametrize("flag", ["--prefix-cache-size", "--prefix-cache-ram"])
@pytest.mark.parametrize(
    ("size", "message"), [("0", "must be at least 1"), ("0GiB", "must be at least 1"), ("much", "not a size")]
)
def test_invalid_sizes(kvad, model, folder, flag, size, message):
    result = kvad(f"generate {model} x --prefix-cache-dir {folder} {flag} {size}")
    assert result.code == 2 and message in result.err and flag in result.err and not folder.exists()


def test_unusable_folders(kvad, model, folder, tmp_path, caplog):
    other_process = DiskBlockStore(folder, 1 << 20)
    result = kvad(f"generate --prefix-cache-dir {folder}", model, TEXT, *GREEDY)
    assert result.code == 0 and "in use by this process" in caplog.text
    assert kvad(f"prefix add {model} --name x --prefix-cache-dir {folder} --prompt", TEXT).code == 2
    assert kvad("doctor", folder, "--fix").code == 2 and kvad("doctor", folder).code == 0
    other_process.release()
    (tmp_path / "file").write_text("x")
    assert kvad(f"generate {model} x --prefix-cache-dir {tmp_path}/file").code == 2
    assert kvad(f"generate {model} x --prefix-cache-size 5MiB").code == 2
    assert kvad(f"prefix list --prefix-cache-dir {tmp_path}/none").code == 2


def test_plan_includes_host_memory(kvad, model):
    ram = "--prefix-cache-ram 1MiB"
    plain, cached = (json.loads(kvad(f"plan {model} --json {flags}").out)["bytes"] for flags in ("", ram))
    assert (plain["prefix_cache_host_bytes"], cached["prefix_cache_host_bytes"]) == (0, 1 << 20)
    assert cached["total"] - plain["total"] == 1 << 20
    assert "at most, in host memory" in kvad(f"plan {model} {ram}").out


def test_doctor_reports_damage_and_fixes_what_is_safe(kvad, folder, add):
    add()
    healthy = kvad("doctor", folder)
    assert healthy.code == 0 and "3 blocks and 1 pin whole" in healthy.out
    first, second, _ = sorted(folder.glob("*.kv"))
    first.write_bytes(first.read_bytes()[:-30])
    second.write_bytes(b"#!/bin/sh\n" * 100)
    orphan = folder / ".00aa.kv.999999.0123abcd.tmp"
    orphan.write_bytes(b"half")
    (folder / "notes.txt").write_text("mine")
    result = kvad("doctor", folder)
    kinds = [line.split()[1] for line in result.out.splitlines() if line.startswith("problem")]
    assert result.code == 1 and sorted(kinds) == ["damaged", "files", "foreign", "orphan"]
    fixed = json.loads(kvad("doctor", folder, "--fix", "--json").out)
    assert not first.exists() and not orphan.exists() and second.exists() and (folder / "notes.txt").exists()
    assert sum("removed" in each["message"] for each in fixed["findings"]) == 2
    assert any("1 of 3 blocks are missing" in each["message"] for each in fixed["findings"])


def test_fix_leaves_an_intact_checkpoint_unchanged(kvad, model):
    before = {path: path.read_bytes() for path in model.rglob("*") if path.is_file()}
    assert kvad("doctor", model, "--fix").code == 0 and kvad("doctor", model).code == 0
    assert {path: path.read_bytes() for path in model.rglob("*") if path.is_file()} == before
