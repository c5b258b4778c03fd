"""Invalid files, folders and options: rejected in one line, and no foreign file is changed."""

import json
import os
from dataclasses import replace

import pytest

from kvad.checkpoint.native import save_checkpoint
from kvad.text.tokenizer import train_tokenizer
from tests.support.cli_checkpoints import write_model
from tests.support.random_models import build, pair_config

TEXT = "def add(first, second):\n    return first + second\n\n"
GREEDY = ("--temperature", 0, "--max-tokens", 6)


@pytest.fixture
def session_dir(tmp_path):
    (tmp_path / "sessions").mkdir()
    return tmp_path / "sessions"


@pytest.fixture
def rejects(kvad):
    """Run a command and check that its error is one line with at most one hint, and has these words."""

    def call(command, *arguments, words, stdin=None):
        result = kvad(command, *arguments, stdin=stdin)
        assert result.code == 2 and "Traceback" not in result.err and "bug in kvad" not in result.err, result.err
        first, *hints = [line for line in result.err.splitlines() if "; the engine continues" not in line]
        assert first.startswith("kvad: error: ") and len(hints) <= 1 and len(first) < 400, result.err
        assert all(word in result.err for word in words), result.err

    return call


# ---------------------------------------------------------------- sessions


def test_session_of_another_model_names_the_difference(kvad, rejects, model, tmp_path):
    assert kvad("session save", model, "notes", "--prompt", TEXT).code == 0
    other = write_model(tmp_path / "other", limit=64)
    words = ["cache: model", f"the model was {model}"[:40]]
    rejects("session continue", other, "notes", "--prompt", "x", words=words)


@pytest.mark.parametrize("kind", ["text", "folder", "prefix"])
def test_foreign_file_is_neither_replaced_nor_removed(kvad, rejects, session_dir, model, tmp_path, kind):
    path, cache_dir = session_dir / "mine.session", tmp_path / "cache"
    if kind == "text":
        path.write_text("my thesis")
    elif kind == "folder":
        path.mkdir()
    else:
        assert kvad(f"prefix add {model} --name p --prefix-cache-dir {cache_dir} --prompt", TEXT).code == 0
        path.write_bytes((cache_dir / "p.prefix").read_bytes())
    content = path.read_bytes() if path.is_file() else None
    rejects(f"session save {model} mine --overwrite --prompt", TEXT, words=["mine.session"])
    for command in ("session rm mine", f"session continue {model} mine --prompt x", "session show mine"):
        rejects(command, words=["mine.session"])
    result = kvad("chat", model, *GREEDY, stdin=b"hi\n/save mine\n/load mine\n/save other\n")
    assert result.code == 0 and result.err.count("mine.session") == 2 and "1 turn is in" in result.err
    assert kvad("doctor", session_dir).code == 1
    assert "mine.session" in kvad("doctor", session_dir, "--fix", "--remove-damaged").out
    assert path.is_dir() if content is None else path.read_bytes() == content


def test_damaged_session_can_be_replaced_and_removed(kvad, session_dir, model):
    path = session_dir / "notes.session"
    save = f"session save {model} notes --overwrite --prompt"
    kvad(save, TEXT)
    path.write_bytes(path.read_bytes()[:-9])
    assert kvad(save, TEXT).code == 0 and kvad("session show notes").code == 0
    path.write_bytes(path.read_bytes()[:-9])
    assert kvad("session rm notes").code == 0 and not path.exists()


def test_invalid_session_dir_fails_before_computing(rejects, tmp_path):
    (tmp_path / "file").write_text("x")
    words = ["file/sub/q.session", "--session-dir"]
    rejects(f"session save {tmp_path}/no-model q --prompt x --session-dir {tmp_path}/file/sub", words=words)


def test_long_names_are_shortened_in_errors(rejects, model, tmp_path):
    name = "n" * 5000
    rejects("session save", model, name, "--prompt", TEXT, words=["is not a valid name of a session"])
    add = f"prefix add {model} --prefix-cache-dir {tmp_path}/cache --prompt x --name"
    rejects(add, name, words=["not a valid name for a prefix"])


# ---------------------------------------------------------------- chat


def test_invalid_path_does_not_end_the_chat(kvad, session_dir, model, tmp_path):
    (tmp_path / "file").write_text("mine")
    lines = ["hi", f"/save {tmp_path}/file/x", f"/save {tmp_path}", f"/load {tmp_path}", f"/save {'n' * 3000}"]
    lines += [f"/load ./{'n' * 3000}", f"/save {tmp_path}/file", "/load absent", "/save last"]
    result = kvad("chat", model, *GREEDY, stdin="\n".join(lines).encode())
    assert result.code == 0 and result.err.count("kvad: error: ") == 7, result.err
    assert "there is no session absent" in result.err and "1 turn is in" in result.err.splitlines()[-1]
    assert (tmp_path / "file").read_text() == "mine" and "is not overwritten" in result.err


def test_chat_with_offload_continues_and_saves_its_text(kvad, session_dir, model, tmp_path):
    flags = f"--overflow offload --max-seq-len 32 --offload-dir {tmp_path}/offload --offload-ram 0"
    lines = f"hello, how are you?\nand now\n/save gone\n/save {tmp_path}/kept.json\n/load {tmp_path}/kept.json\nyes\n"
    result = kvad(f"chat {model} {flags}", *GREEDY, stdin=lines.encode())
    plain = kvad("chat", model, *GREEDY, stdin=lines.replace("/save gone\n", "").encode())
    groups = kvad(f"chat {model} {flags}", *GREEDY, stdin=b"hi\n/kv\n").err.splitlines()
    assert (
        "2 layers, policy offload(16, 80, 16), 0 tokens evicted per head: " in groups[0]
        and "older tokens, offloaded: " in groups[1]
    )
    assert result.code == 0 and result.out == plain.out and len(result.out.splitlines()) >= 3
    assert "offloaded tokens cannot be saved" in result.err
    assert "its cache is not saved, because its tokens are offloaded" in result.err
    assert len(json.loads((tmp_path / "kept.json").read_text())["turns"]) == 2 and not os.listdir(session_dir)


# ---------------------------------------------------------------- options and prefixes


@pytest.mark.parametrize("flag", ["--offload-ram", "--swap-space", "--prefix-cache-ram", "--prefix-cache-size"])
@pytest.mark.parametrize("size", ["-1", "abc", "", "nan", "4XB", "1e9"])
def test_invalid_size_names_the_option(rejects, model, tmp_path, flag, size):
    more = "--overflow offload --max-seq-len 48" + f" --prefix-cache-dir {tmp_path}/cache" * (flag != "--offload-ram")
    rejects(f"generate {model} x {more}", flag, size, words=[flag, repr(size), "8GiB"])
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("command", ["generate MODEL x", "chat MODEL", "plan MODEL"])
def test_options_that_do_not_fit_each_other(rejects, model, command):
    command = command.replace("MODEL", str(model))
    for flags in ("--offload-ram 1MiB", "--offload-dir there"):
        words = [flags.split()[0], "nothing is offloaded", "--overflow offload"]
        rejects(f"{command} {flags}", stdin=b"", words=words)
    for overflow in ("offload", "summarize"):
        words = ["endless", overflow, "ends at the model's limit"]
        rejects(f"{command} --endless --overflow {overflow} --max-seq-len 48", stdin=b"", words=words)


def test_plan_rejects_prefix_cache_of_unshared_policy(rejects, model):
    command = f"plan {model} --prefix-cache-ram 1MiB --policy 'snapkv(32)'"
    rejects(command, words=["policy snapkv(32, 64, 32) shares no blocks"])


def test_smaller_size_keeps_pinned_blocks(kvad, rejects, model, tmp_path):
    cache = f"--prefix-cache-dir {tmp_path}/cache"
    assert kvad(f"prefix add {model} --name sys {cache} --prompt", TEXT).code == 0
    result = kvad(f"generate {model} {cache} --prefix-cache-size 1 --stats", TEXT + "x", *GREEDY)
    assert result.code == 0 and "48 from disk" in result.err and "3 pinned" in result.err
    rejects(f"prefix add {model} --prompt {'y' * 40} --name b {cache} --prefix-cache-size 1", words=[])
    assert kvad("doctor", tmp_path / "cache").code == 0 and "3 blocks" in kvad(f"prefix list {cache}").out


def test_prefix_of_encoder_decoder(rejects, tmp_path):
    """The error names the kind of model, before the engine requires a source, for which there is no option."""
    tokenizer = train_tokenizer("byte", [])
    config = replace(pair_config("rope"), vocab_size=tokenizer.vocab_size)
    save_checkpoint(tmp_path / "pair", config, build(config).float().state_dict(), tokenizer)
    command = f"prefix add {tmp_path}/pair --name p --prefix-cache-dir {tmp_path}/cache --prompt"
    rejects(command, TEXT, words=["its source"])
