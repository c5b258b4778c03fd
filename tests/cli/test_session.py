"""``kvad session``, /save and /load of ``kvad chat`` across processes, and ``kvad doctor`` on a session folder."""

import json
import os
import subprocess
import sys

import pytest

from kvad.engine.session import Session
from kvad.llm import LLM
from tests.cli.test_main import ROOT
from tests.support.cli_checkpoints import write_model

GREEDY = ("--temperature", 0, "--max-tokens", 6, "--ignore-eos")


@pytest.mark.parametrize("policy", ["full", "sinks(4, 16)", "heavy-hitters(16, 8, 8)"])
def test_save_continue_list_show_rm(kvad, model, tmp_path, policy):
    (tmp_path / "text").write_text("hello there, who are you?")
    result = kvad("session", "save", model, "trip", "--file", tmp_path / "text", "--policy", policy, "--json")
    assert result.code == 0 and json.loads(result.out)["tokens"] == 25
    with LLM.load(model, max_num_seqs=1, policy=policy) as llm:
        expected = llm.generate("hello there, who are you? hm", max_tokens=6, temperature=0, ignore_eos=True).text
    result = kvad("session", "continue", model, "trip", "--prompt", " hm", *GREEDY)
    assert (result.code, result.out) == (0, expected + "\n")
    assert result.err == "kvad: 24 of 25 tokens restored\n"
    result = kvad("session", "continue", model, "trip", *GREEDY, "--no-save", "--json")
    record = json.loads(result.out)
    assert (record["restored"], record["missed"], record["bytes"]) == (record["before"] - 1, "", None)
    listed = json.loads(kvad("session", "list", "--json").out)["sessions"]
    assert [(each["name"], each["state"], each["tokens"]) for each in listed] == [("trip", "whole", record["before"])]
    assert "trip" in kvad("session", "list").out
    shown = kvad("session", "show", "trip", "--model", model).out.replace("policy      ", "policy ")
    assert f"policy {policy}\n" in shown and ", who are you? hm" in shown
    assert json.loads(kvad("session", "show", "trip", "--json").out)["fingerprint"]["policy"] == policy
    assert kvad("session", "rm", "trip", "--json").code == 0
    assert json.loads(kvad("session", "list", "--json").out)["sessions"] == []


@pytest.mark.parametrize("json_option", [(), ("--json",)])
def test_continued_text_is_printed_when_the_session_changed_meanwhile(kvad, model, tmp_path, monkeypatch, json_option):
    assert kvad("session", "save", model, "trip", "--prompt", "hello there").code == 0
    path = tmp_path / "sessions" / "trip.session"
    expected = kvad("session", "continue", model, "trip", *GREEDY, "--no-save").out
    real, contents = Session.stream, []

    def stream(session, *arguments, **options):
        if not contents:  # another process continues the session while this one generates
            contents.append(b"")
            assert kvad("session", "continue", model, "trip", "--prompt", "no", *GREEDY).code == 0
            contents.append(path.read_bytes())
        return real(session, *arguments, **options)

    monkeypatch.setattr(Session, "stream", stream)
    result = kvad("session", "continue", model, "trip", *GREEDY, *json_option)
    assert result.code == 2 and "trip.session: changed meanwhile by another session" in result.err
    assert path.read_bytes() == contents[1]
    assert (json.loads(result.out)["text"] + "\n" if json_option else result.out) == expected


def test_invalid_sessions(kvad, model, tmp_path):
    def assert_rejected(*arguments):
        result = kvad("session", *arguments)
        assert result.code == 2 and result.err.count("\n") <= 2, result
        return result.err

    for name in ("../x", "a/b", ".hidden", "a" * 65):
        for command in (
            ("save", model, name, "--prompt", "x"),
            ("continue", model, name),
            ("show", name),
            ("rm", name),
        ):
            assert "is not a valid name of a session" in assert_rejected(*command)
    assert "there is no text to save" in assert_rejected("save", model, "trip")
    assert "exclude each other" in assert_rejected("save", model, "trip", "--prompt", "x", "--file", ROOT / "README.md")
    for command in (("continue", model, "trip"), ("show", "trip"), ("rm", "trip")):
        assert "there is no session trip" in assert_rejected(*command)
    assert kvad("session", "save", model, "trip", "--prompt", "hello there").code == 0
    assert "session trip exists" in assert_rejected("save", model, "trip", "--prompt", "hello")
    assert kvad("session", "save", model, "trip", "--prompt", "hello you", "--overwrite").code == 0
    assert "policy: window(8) here, full there" in assert_rejected("continue", model, "trip", "--policy", "window(8)")
    other = write_model(tmp_path / "other", limit=64)
    assert "does not belong to this model and cache: model" in assert_rejected("continue", other, "trip")
    path = tmp_path / "sessions" / "trip.session"
    path.write_bytes(path.read_bytes()[:-9])
    assert "the file is damaged" in assert_rejected("continue", model, "trip")
    assert "trip" in kvad("session", "list").out and "damaged" in kvad("session", "list").out
    path.write_bytes(b"%PDF-1.4 this is not ours")
    assert "not a cache file of kvad" in assert_rejected("show", "trip")


def test_list_loads_no_torch(tmp_path):
    code = "import sys; from kvad.cli.main import main; main(['session', 'list']); sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "KVAD_SESSION_DIR": str(tmp_path)}
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=False, timeout=60).returncode == 0
    )


# ---------------------------------------------------------------- chat

KILLED = """
import os, signal, sys
from kvad.cli.commands import chat
real = chat._Chat.save
def save(self, where):
    print(real(self, where), file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
chat._Chat.save = save
from kvad.cli.main import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize(("policy", "named"), [("full", True), ("heavy-hitters(16, 8)", False)])
def test_chat_continues_after_kill_9(kvad, model, tmp_path, named, policy):
    where = "talk" if named else tmp_path / "talk.json"
    options = (*GREEDY, "--policy", policy)
    expected = kvad("chat", model, *options, stdin=b"hello there\nand\nyou\n")
    result = subprocess.run(
        [sys.executable, "-c", KILLED, *map(str, ("chat", model, *options))],
        input=f"hello there\nand\n/save {where}\nnever\n".encode(), cwd=ROOT, capture_output=True, check=False,
        timeout=120,
    )  # fmt: skip
    assert result.returncode == -9, result.stderr
    assert "of cache" in result.stderr.decode()
    after = kvad("chat", model, *options, stdin=f"/load {where}\nyou\n/kv\n".encode())
    assert expected.out.encode("utf-8", "replace").endswith(after.out.encode("utf-8", "replace")) and after.code == 0
    restored, every = after.err.split("; ")[1].split()[0], after.err.split("; ")[1].split()[2]
    assert int(every) - 1 <= int(restored) <= int(every)
    assert f"the last turn: {restored} of its tokens were in the cache" in after.err


def test_chat_of_another_cache_is_recomputed(kvad, model, tmp_path):
    assert kvad("chat", model, *GREEDY, stdin=b"hello\n/save talk\n").code == 0
    result = kvad("chat", model, *GREEDY, "--policy", "window(24)", stdin=b"/load talk\nyou\n/kv\n")
    assert "0 of " in result.err and "policy: window(24) here, full there" in result.err
    assert "this chat: " in result.err and result.out
    path = tmp_path / "sessions" / "talk.session"
    raw = bytearray(path.read_bytes())
    raw[-30] ^= 1
    path.write_bytes(raw)
    assert "the file is damaged" in kvad("chat", model, *GREEDY, stdin=b"/load talk\n").err


def test_chat_file_without_session(kvad, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert kvad("chat", model, *GREEDY, stdin=b"hello\n/save old.json\n").code == 0
    (tmp_path / "old.json.session").unlink()
    (tmp_path / "old.json").rename(tmp_path / "old")
    expected = kvad("chat", model, *GREEDY, stdin=b"hello\nyou\n").out
    result = kvad("chat", model, *GREEDY, stdin=b"/load old\nyou\n")
    assert expected.endswith(result.out) and "1 turn, " in result.err and "0 of " in result.err


# ---------------------------------------------------------------- doctor


def test_doctor_of_a_session_folder(kvad, model, tmp_path):
    assert kvad("session", "save", model, "trip", "--prompt", "hello there").code == 0
    folder = tmp_path / "sessions"
    result = kvad("doctor", folder)
    assert result.code == 0 and result.out.startswith("ok      whole      trip.session: a session of ")
    raw = (folder / "trip.session").read_bytes()
    (folder / "damaged.session").write_bytes(raw[:200])
    (folder / "notes.txt").write_bytes(b"{}")
    (folder / ".trip.session.999999999.01234567.tmp").write_bytes(raw[:9])

    def states(*options):
        result = kvad("doctor", folder, "--json", *options)
        record = json.loads(result.out)
        assert record["healthy"] == (result.code == 0)
        return {each["file"].removesuffix(".session"): (each["state"], each["ok"]) for each in record["findings"]}

    assert states() == {
        ".trip.session.999999999.01234567.tmp": ("leftover", False),
        "notes.txt": ("foreign", False),
        "damaged": ("damaged", False),
        "trip": ("whole", True),
    }
    assert states("--fix")[".trip.session.999999999.01234567.tmp"] == ("leftover", True)
    assert set(os.listdir(folder)) == {"trip.session", "damaged.session", "notes.txt"}
    assert states("--fix", "--remove-damaged")["damaged"] == ("damaged", True)
    assert set(os.listdir(folder)) == {"trip.session", "notes.txt"}
    (folder / "notes.txt").unlink()
    assert states() == {"trip": ("whole", True)}
    assert kvad("doctor", folder, "--remove-damaged").code == 2
