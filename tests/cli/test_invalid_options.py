"""What stands in the way of a file, a folder or an option: refused in one line, and nothing of anybody's is touched."""

import json
import os
from dataclasses import replace

import pytest

from kvad.checkpoint.native import save_checkpoint
from kvad.text.tokenizer import train_tokenizer
from tests.support.cli_checkpoints import run, write_model
from tests.support.random_models import build, pair_config

TEXT = "def add(first, second):\n    return first + second\n\n"
GREEDY = ("--temperature", 0, "--max-tokens", 6)


def write_pair(folder):
    bytes_of = train_tokenizer("byte", [])
    config = pair_config("rope")
    config = replace(config, vocab_size=bytes_of.vocab_size)
    save_checkpoint(folder, config, build(config).float().state_dict(), bytes_of)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KVAD_SESSION_DIR", str(tmp_path / "sessions"))
    (tmp_path / "sessions").mkdir()
    return tmp_path / "sessions"


@pytest.fixture
def kvad(capsys, monkeypatch):
    def ran(*arguments, stdin=None):
        return run(capsys, *arguments, stdin=stdin, monkeypatch=monkeypatch)

    return ran


def refused(ran, *words):
    assert ran.code == 2 and "Traceback" not in ran.err and "bug in kvad" not in ran.err, ran.err
    first, *hints = ran.err.splitlines()
    assert first.startswith("kvad: error: ") and len(hints) <= 1 and len(first) < 400, ran.err
    assert all(word in ran.err for word in words), ran.err


# ---------------------------------------------------------------- sessions


def test_a_session_of_another_model_says_what_differs_and_what_it_was(kvad, folder, model, tmp_path):
    assert kvad("session", "save", model, "notes", "--prompt", TEXT).code == 0
    other = write_model(tmp_path / "other", limit=64)
    refused(kvad("session", "continue", other, "notes", "--prompt", "x"), "cache: model", f"the model was {model}"[:40])


@pytest.mark.parametrize("what", ["text", "folder", "pin"])
def test_a_file_that_is_no_session_is_neither_replaced_nor_removed(kvad, folder, model, tmp_path, what):
    path = folder / "mine.session"
    if what == "text":
        path.write_text("my thesis")
    elif what == "folder":
        path.mkdir()
    else:
        assert (
            kvad("prefix", "add", model, "--prompt", TEXT, "--name", "p", "--prefix-cache-dir", tmp_path / "tier").code
            == 0
        )
        path.write_bytes((tmp_path / "tier" / "p.prefix").read_bytes())
    was = path.read_bytes() if path.is_file() else None
    refused(kvad("session", "save", model, "mine", "--prompt", TEXT, "--overwrite"), "mine.session")
    refused(kvad("session", "rm", "mine"), "mine.session")
    refused(kvad("session", "continue", model, "mine", "--prompt", "x"), "mine.session")
    refused(kvad("session", "show", "mine"), "mine.session")
    said = kvad("chat", model, *GREEDY, stdin=b"hi\n/save mine\n/load mine\n/save other\n")
    assert said.code == 0 and said.err.count("mine.session") == 2 and "1 turn is in" in said.err
    assert path.is_dir() if was is None else path.read_bytes() == was
    assert (
        kvad("doctor", folder).code == 1 and "mine.session" in kvad("doctor", folder, "--fix", "--remove-damaged").out
    )
    assert path.is_dir() if was is None else path.read_bytes() == was


def test_a_damaged_session_can_be_replaced_and_removed(kvad, folder, model):
    for over in (True, False):
        kvad("session", "save", model, "notes", "--prompt", TEXT, "--overwrite")
        path = folder / "notes.session"
        path.write_bytes(path.read_bytes()[:-9])
        if over:
            assert kvad("session", "save", model, "notes", "--prompt", TEXT, "--overwrite").code == 0
            assert kvad("session", "show", "notes").code == 0
        else:
            assert kvad("session", "rm", "notes").code == 0 and not path.exists()


def test_a_folder_that_cannot_be_is_said_before_anything_is_computed(kvad, folder, tmp_path):
    (tmp_path / "file").write_text("x")
    refused(
        kvad(
            "session", "save", tmp_path / "no-model", "q", "--prompt", TEXT, "--session-dir", tmp_path / "file" / "sub"
        ),
        "file/sub/q.session",
        "--session-dir",
    )


def test_long_names_are_not_said_in_full(kvad, folder, model, tmp_path):
    refused(kvad("session", "save", model, "n" * 5000, "--prompt", TEXT), "is not a valid name of a session")
    add = ("prefix", "add", model, "--prompt", TEXT, "--prefix-cache-dir", tmp_path / "tier")
    refused(kvad(*add, "--name", "n" * 5000), "not a valid name for a prefix")


# ---------------------------------------------------------------- chat


def test_a_path_that_cannot_be_does_not_end_the_chat(kvad, folder, model, tmp_path):
    (tmp_path / "file").write_text("mine")
    lines = ["hi", f"/save {tmp_path}/file/x", f"/save {tmp_path}", f"/load {tmp_path}", f"/save {'n' * 3000}"]
    lines += [f"/load ./{'n' * 3000}", f"/save {tmp_path}/file", "/load nobody", "/save last"]
    ran = kvad("chat", model, *GREEDY, stdin="\n".join(lines).encode())
    assert ran.code == 0 and ran.err.count("kvad: error: ") == 7, ran.err
    assert "there is no session nobody" in ran.err and "1 turn is in" in ran.err.splitlines()[-1]
    assert (tmp_path / "file").read_text() == "mine" and "is not overwritten" in ran.err


def test_a_chat_that_spills_goes_on_and_its_text_is_kept(kvad, folder, model, tmp_path):
    spill = ("--overflow", "offload", "--max-seq-len", 32, "--offload-dir", tmp_path / "spill", "--offload-ram", 0)
    lines = f"hello, how are you?\nand now\n/save gone\n/save {tmp_path}/kept.json\n/load {tmp_path}/kept.json\nyes\n"
    ran = kvad("chat", model, *GREEDY, *spill, stdin=lines.encode())
    plain = kvad("chat", model, *GREEDY, stdin=lines.replace("/save gone\n", "").encode())
    lines = kvad("chat", model, *GREEDY, *spill, stdin=b"hi\n/kv\n").err.splitlines()
    assert "2 layers, all tokens: " in lines[0] and "2 layers, older tokens, offloaded: " in lines[1]
    assert ran.code == 0 and ran.out == plain.out and len(ran.out.splitlines()) >= 3
    assert (
        "offloaded tokens cannot be saved" in ran.err
        and "its cache is not saved, because its tokens are offloaded" in ran.err
    )
    assert len(json.loads((tmp_path / "kept.json").read_text())["turns"]) == 2 and not os.listdir(folder)


# ---------------------------------------------------------------- options and prefixes


@pytest.mark.parametrize("flag", ["--offload-ram", "--swap-space", "--prefix-cache-ram", "--prefix-cache-size"])
@pytest.mark.parametrize("size", ["-1", "abc", "", "nan", "4XB", "1e9"])
def test_what_is_no_size_is_refused_by_the_options_name(kvad, model, tmp_path, flag, size):
    more = ("--overflow", "offload", "--max-seq-len", 48, "--prefix-cache-dir", tmp_path / "tier")[
        : 4 if flag == "--offload-ram" else None
    ]
    refused(kvad("generate", model, "x", *more, flag, size), flag, repr(size), "8GiB")
    assert not (tmp_path / "tier").exists()


@pytest.mark.parametrize("option", [("--offload-ram", "1MiB"), ("--offload-dir", "there")])
def test_an_option_of_spilling_without_spilling_is_refused(kvad, model, option):
    for command in (("generate", model, "x"), ("chat", model), ("plan", model)):
        refused(kvad(*command, *option, stdin=b""), option[0], "nothing is offloaded", "--overflow offload")


def test_a_plan_has_no_tier_where_a_cache_would_have_none(kvad, model):
    refused(
        kvad("plan", model, "--prefix-cache-ram", "1MiB", "--policy", "snapkv(32)"),
        "policy snapkv(32, 64, 32) shares no blocks",
    )


def test_a_smaller_budget_leaves_pinned_blocks(kvad, model, tmp_path):
    tier = tmp_path / "tier"
    assert kvad("prefix", "add", model, "--prompt", TEXT, "--name", "sys", "--prefix-cache-dir", tier).code == 0
    ran = kvad(
        "generate", model, TEXT + "x", *GREEDY, "--prefix-cache-dir", tier, "--prefix-cache-size", "1", "--stats"
    )
    assert ran.code == 0 and "48 from disk" in ran.err and "3 pinned" in ran.err
    refused(
        kvad(
            "prefix",
            "add",
            model,
            "--prompt",
            "y" * 40,
            "--name",
            "b",
            "--prefix-cache-dir",
            tier,
            "--prefix-cache-size",
            "1",
        )
    )
    assert kvad("doctor", tier).code == 0 and "3 blocks" in kvad("prefix", "list", "--prefix-cache-dir", tier).out


@pytest.mark.parametrize("on_full", ["offload", "summarize"])
def test_rows_without_an_end_are_refused_where_they_have_one(kvad, model, on_full):
    for command in (("generate", model, "x"), ("plan", model)):
        ran = kvad(*command, "--endless", "--overflow", on_full, "--max-seq-len", 48)
        refused(ran, "endless", on_full, "ends at the model's limit")


def test_an_encoder_decoder_has_no_prefix_for_many(kvad, tmp_path):
    """In the words of what it is, before the engine asks for a source that this command has no option for."""
    pair = write_pair(tmp_path / "pair")
    refused(
        kvad("prefix", "add", pair, "--prompt", TEXT, "--name", "p", "--prefix-cache-dir", tmp_path / "tier"),
        "its source",
    )
