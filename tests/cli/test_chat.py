"""``kvad chat``: turns that reuse the cache of earlier ones, commands, Ctrl-C and Ctrl-D."""

import builtins
import errno
import io
import json
import os
import pty
import subprocess
import sys
from contextlib import suppress

import pytest

from kvad.cli.commands import chat as module
from kvad.llm import LLM
from tests.support.cli_checkpoints import LIMIT, write_model

GREEDY = ("--temperature", 0, "--max-tokens", 6)


@pytest.fixture
def chat(kvad, model):
    def call(*lines, options=GREEDY, at=model):
        stdin = lines[0] if isinstance(lines[0], bytes) else "".join(f"{line}\n" for line in lines).encode()
        return kvad("chat", at, *options, stdin=stdin)

    return call


def continued(llm, *typed):
    """Return the replies of a chat whose turns are separate requests."""
    tokens, replies = [], []
    for line in typed:
        tokens += list(line.encode())
        done = llm.generate(tokens, max_tokens=6, temperature=0)
        tokens += done.tokens
        replies.append(done.text)
    return replies


def test_turns_extend_one_text(chat, llm):
    one, two = continued(llm, "hi\n", "\nyou\n")
    result = chat("hi", "you")
    assert result == (0, f"{one}\n{two}\n", "")


def test_turn_reuses_cache_of_previous_turn(chat):
    result = chat("hello there, who are you?", "hm", "/kv", "/stats", options=(*GREEDY, "--block-size", 4))
    assert "the last turn: 28 of its tokens were in the cache" in result.err  # 26 + 6 tokens: 7 full blocks are known
    assert "1 hit, 1 miss, 28 tokens reused in total" in result.err
    assert f"this chat: 42 tokens of at most {LIMIT}" in result.err
    for text in ("blocks in use", "cached for reuse", "28 of them from the prefix cache"):
        assert text in result.err


def test_backslash_continues_line(chat, llm):
    assert chat("hi\\", "you").out == continued(llm, "hi\nyou\n")[0] + "\n"


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (['"""hi"""'], "hi"),
        (['"""', "hi", "  /you", '"""'], "hi\n  /you"),
        (['"""hi', "", '"""'], "hi\n"),
        (['"""/quit', 'a\\"""'], "/quit\na\\"),
    ],
)
def test_a_block_is_one_turn_and_is_left_open(chat, llm, lines, text):
    assert chat(*lines).out == continued(llm, text)[0] + "\n"


def test_a_pasted_text_is_one_turn():
    """In a terminal, with readline's bracketed paste; Tab completes a command."""
    pytest.importorskip("readline")
    master, slave = pty.openpty()
    code = "from kvad.cli.chat_input import *; print([*map(repr, read_turns(['/undo', '/kv']))])"
    environment = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=slave, stdout=slave, stderr=slave, env=environment, close_fds=True
    ) as process:
        os.close(slave)
        output = b""
        lines = iter([b"\x1b[200~def f():\r\r    pass\x1b[201~\r", b"/un\t\r", b"a\\\r", b"b\r", b"\x04"])
        ready, answered = b"\x1b[?2004h", 0  # readline writes it when the terminal is as it needs it
        with suppress(OSError):  # the terminal is closed
            while part := os.read(master, 4096):
                output += part
                while answered < output.count(ready):
                    os.write(master, next(lines, b""))
                    answered += 1
        os.close(master)
    for turn in ("'def f():\\n\\n    pass'", "'/undo", "'a\\nb'"):
        assert turn in output.decode().replace("\\\\", "\\"), output
    assert process.returncode == 0


def test_beam_search_has_a_sequence_per_beam(chat, llm, model):
    with LLM.load(model, max_num_seqs=3) as wide:
        expected = wide.generate("hi\n", max_tokens=6, num_beams=3).text
    assert chat("hi", options=("--max-tokens", 6, "--num-beams", 3)).out == f"{expected}\n"


def test_undo(chat, llm):
    one, two = continued(llm, "hi\n", "\nyou\n")
    result = chat("hi", "no", "/undo", "you", "/undo", "/undo", "/undo")
    assert result.out.startswith(one) and result.out.endswith(f"{two}\n")
    assert result.err.splitlines() == [
        "1 turn is left", "1 turn is left", "0 turns are left",
        "kvad: error: there is no turn to take back",
    ]  # fmt: skip


def test_the_same_question_after_undo_has_another_reply(chat):
    options = ("--temperature", 1.2, "--max-tokens", 9)
    result = chat("hi", "/undo", "hi", "/undo", "hi", "/stats", options=(*options, "--stop", "\n", "--ignore-eos"))
    assert len(set(result.out.split("\n")[:3])) == 3
    seed = result.err.splitlines()[0].removeprefix("kvad: seed: ")
    assert seed.isdecimal() and result.err.splitlines()[-1] == f"seed        {seed}"
    seeded = ("hi", "/undo", "hi", "/undo", "hi")
    repeated = chat(*seeded, options=(*options, "--stop", "\n", "--ignore-eos", "--seed", seed))
    assert repeated.out == result.out and "seed" not in repeated.err
    assert chat(*seeded, options=options).out != chat(*seeded, options=options).out


def test_a_loaded_chat_draws_what_the_saved_one_draws(chat):
    options = ("--temperature", 1.2, "--max-tokens", 9, "--stop", "\n", "--ignore-eos")
    saved = chat("hi", "you", "/undo", "/save trip", "you", "now", options=options).out.split("\n")
    assert len(saved) == 5 and saved[1] != saved[2]
    assert chat("/load trip", "you", "now", options=options).out.split("\n") == saved[2:]


def test_save_and_load(chat, llm, tmp_path):
    path = tmp_path / "path.json"
    replies = continued(llm, "hi\n", "\nyou\n", "\nbye\n")
    saved_message = chat("hi", "you", f"/save {path}").err
    assert saved_message.startswith(f"2 turns are in {path}; ")
    assert saved_message.endswith(f" of cache in {path}.session\n")
    saved = json.loads(path.read_text("utf-8"))
    assert [turn["typed"] for turn in saved["turns"]] == ["hi\n", "\nyou\n"]
    assert [turn["reply"] for turn in saved["turns"]] == replies[:2]
    again = chat(f"/load {path}", "bye")
    assert again.out == f"{replies[2]}\n" and "2 turns, 20 tokens from" in again.err
    saved["tokenizer"] = "another"
    path.write_text(json.dumps(saved), "utf-8")
    assert "2 turns" in chat(f"/load {path}").err


@pytest.mark.parametrize("name", ["trip", "trip.json"])
def test_save_replaces_another_chat_only_with_overwrite(chat, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    first = chat("hi", f"/save {name}", "you", f"/save {name}").err
    assert "1 turn is in" in first and "2 turns are in" in first, "its own file is replaced"
    refused = chat("bye", f"/save {name}").err
    what = "session trip" if name == "trip" else name
    assert refused == f"kvad: error: {what} exists; /save {name} --overwrite replaces it\n"
    assert "2 turns, " in chat(f"/load {name}", "and", f"/save {name}").err
    assert "3 turns, " in chat(f"/load {name}").err
    assert "1 turn is in" in chat("bye", f"/save {name} --overwrite").err
    assert "1 turn, " in chat(f"/load {name}").err


def test_failed_save_keeps_previous_file(chat, tmp_path, monkeypatch):
    path = tmp_path / "path.json"
    old = '{"kvad_chat": 1, "turns": []}'
    path.write_text(old, "utf-8")

    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    result = chat("hi", f"/save {path} --overwrite", "more")
    assert result.code == 0 and "cannot save" in result.err and path.read_text("utf-8") == old
    assert os.listdir(tmp_path) == ["path.json"] and result.out.count("\n") >= 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read"),
        ("{", "is not JSON"),
        ("[]", "is not a chat that /save wrote"),
        ('{"kvad_chat": 2}', "is not a chat that /save wrote"),
        ('{"kvad_chat": 1, "tokenizer": "", "turns": [{"typed": "x"}]}', "is not a chat that /save wrote"),
    ],
)
def test_load_rejects_invalid_file_and_keeps_chat(chat, tmp_path, content, message):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content, "utf-8")
    result = chat("hi", f"/load {path}", "/kv")
    assert result.code == 0 and message in result.err and "this chat: 9 tokens" in result.err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/sav", "no such command /sav; did you mean '/save'?"),
        ("/save", "/save needs a name or a file"),
        ("/undo 3", "/undo takes nothing after it"),
        ("x" * LIMIT, f"no room for a reply: {LIMIT + 1} tokens with this line, the limit is {LIMIT}; shorten it"),
        ("x" * (LIMIT - 1), f"no room for a reply: {LIMIT} tokens with this line, the limit is {LIMIT}; shorten it"),
    ],
)
def test_invalid_line_is_reported_and_chat_continues(chat, llm, line, message):
    result = chat(line, "hi")
    assert result.code == 0 and result.err == f"kvad: error: {message}\n"
    assert result.out == continued(llm, "hi\n")[0] + "\n"


def test_full_context_is_reported_and_undo_frees_room(chat, llm):
    """3 + 6 tokens, 5 + 6, then 4 more leave room for 2 of 26; after /undo, a line of 3 leaves room for 3."""
    options = (*GREEDY, "--max-seq-len", 26, "--logit-bias", "97=500")
    result = chat("hi", "you", "hm", "hm", "/undo", "/kv", "a", options=options)
    assert result.code == 0 and result.out.splitlines() == ["aaaaaa", "aaaaaa", "aa", "aaa"]
    full, refused, left, *kv, again = result.err.splitlines()
    hint = "/undo takes back the last turn, /clear all turns; kvad chat --overflow sinks continues without the oldest"
    assert full == again == f"the context of 26 tokens is full: {hint} tokens"
    assert refused == f"kvad: error: no room for a reply: 30 tokens with this line, the limit is 26; {hint} tokens"
    assert left == "2 turns are left" and "this chat: 20 tokens of at most 26" in kv


def test_kv_after_undo_describes_the_chat_that_is_left(chat):
    kv = "the last turn: 0 of its tokens were in the cache"
    result = chat("hi", "/kv", "/undo", "/kv", "/stats", options=(*GREEDY, "--policy", "window(8)"))
    before, after = result.err.split("0 turns are left")
    assert "this chat: 9 tokens" in before and kv in before and "policy window(8), 2 tokens evicted per head" in before
    assert "this chat: 0 tokens" in after and "the last turn" not in after and "0 tokens evicted per head" in after
    assert "no reply was generated yet" in after


def test_retry_samples_another_reply(chat, tmp_path):
    files = [tmp_path / f"{number}.json" for number in range(3)]
    saves = [f"/save {path}" for path in files]
    options = ("--temperature", 1, "--max-tokens", 8, "--seed", 3)
    chat("hi", saves[0], "/retry", saves[1], "/clear", "hi", saves[2], options=options)
    ids = [json.loads(path.read_text("utf-8"))["ids"] for path in files]
    assert all(len(turns) == 1 and turns[0]["typed"] == ids[0][0]["typed"] for turns in ids)
    assert len({str(turns[0]["reply"]) for turns in ids}) == 3
    result = chat("/retry", "hi", "/retry", "/kv")
    assert "there is no reply to replace" in result.err and "this chat: 9 tokens" in result.err


def test_clear_starts_an_empty_chat(chat, llm):
    one, two = continued(llm, "hi\n")[0], continued(llm, "you\n")[0]
    result = chat("hi", "/clear", "/kv", "you", "/kv")
    assert result.out == f"{one}\n{two}\n" and result.err.startswith("the chat is empty\n")
    assert "this chat: 0 tokens" in result.err and "this chat: 10 tokens" in result.err


def test_set_changes_the_sampling(chat):
    result = chat("/set temperature 0", "/set max-tokens=2", "hi", "/set", options=("--logit-bias", "97=500"))
    assert result.out == "aa\n" and "temperature 0.0" in result.err and "max_tokens 2" in result.err.splitlines()[-1]
    errors = {
        "/set temprature 1": "no sampling option temprature; did you mean 'temperature'?",
        "/set top_k x": "/set top_k: 'x' is not a number",
        "/set temperature -1": "temperature: must be",
    }
    for line, message in errors.items():
        assert message in chat(line).err


def test_saved_chat_keeps_its_system_message(chat, tmp_path):
    folder, path = write_model(tmp_path / "chatty"), tmp_path / "x.json"
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}")
    whole = chat("hi", "you", options=(*GREEDY, "--system", "S"), at=folder).out
    first = chat("hi", f"/save {path}", options=(*GREEDY, "--system", "S"), at=folder).out
    result = chat(f"/load {path}", "/system", "you", at=folder)
    assert "system message: S" in result.err and first + result.out == whole
    path.write_text(path.read_text("utf-8").replace('"system": "S"', '"system": 1'), "utf-8")
    assert "is not a chat that /save wrote" in chat(f"/load {path}", at=folder).err


def test_system_message_can_be_changed(chat, tmp_path):
    folder = write_model(tmp_path / "chatty")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}")
    result = chat("/system", "/system S", "hi", at=folder)
    assert result.out == chat("hi", options=(*GREEDY, "--system", "S"), at=folder).out
    assert result.err.splitlines()[:2] == ["no system message", "system message: S"]
    assert "the model has no chat template" in chat("/system S").err


def test_counts_of_one_are_singular(chat, tmp_path):
    path = tmp_path / "path.json"
    result = chat(
        '""""""', f"/save {path}", f"/load {path}", "/stats", options=("--max-tokens", 1, "--logit-bias", "97=500")
    )
    lines = result.err.splitlines()
    assert any(line.startswith(f"1 turn is in {path}; ") for line in lines)
    assert f"1 turn, 1 token from {path}; 1 of 1 token restored" in lines
    assert any(line.startswith("generated   1 token in ") and line.endswith(" 1 step") for line in lines)


def test_help_and_quit(chat):
    result = chat("/help", "/stats", "/quit", "never")
    assert result.out == "" and "no reply was generated yet" in result.err
    assert all(name in result.err for name in module.CHAT_COMMANDS if name != "/help")


def test_empty_first_line_uses_opening_token(chat, llm):
    result = chat("")
    assert result.out == llm.generate([256], max_tokens=6, temperature=0).text + "\n"
    assert "opening token <|endofdoc|>" in result.err


def test_stop_string_and_end_token_are_not_in_history(chat, tmp_path):
    path = tmp_path / "path.json"
    options = (*GREEDY, "--logit-bias", "97=500", "--stop", "aaa")
    chat("hi", f"/save {path}", options=options)
    assert json.loads(path.read_text("utf-8"))["ids"] == [{"typed": [104, 105, 10], "reply": []}]
    chat("hi", f"/save {path} --overwrite", options=(*GREEDY, "--logit-bias", "256=500"))  # the end of a document
    assert json.loads(path.read_text("utf-8"))["ids"] == [{"typed": [104, 105, 10], "reply": []}]


def test_ctrl_c_ends_only_the_reply(chat, interrupt_after):
    interrupt_after(3)
    result = chat("hi", "you", "/kv", options=(*GREEDY, "--logit-bias", "97=500"))
    assert result.code == 0 and result.out == "aaa\naaaaaa\n"
    assert "this chat: 17 tokens" in result.err and "0 of 6 blocks in use" in result.err


class Keyboard(io.TextIOWrapper):
    def isatty(self):
        return True


def test_keyboard_ctrl_c_drops_line_and_ctrl_d_ends(kvad, monkeypatch, model, llm):
    typed = iter(["hi", KeyboardInterrupt, "/undo", EOFError])

    def read(prompt):
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(builtins, "input", read)
    monkeypatch.setattr(sys, "stdin", Keyboard(io.BytesIO()))
    result = kvad("chat", model, *GREEDY)
    assert result.code == 0 and result.out == continued(llm, "hi\n")[0] + "\n\n"
    assert "Ctrl-D leaves" in result.err and "0 turns are left" in result.err


def test_invalid_input(chat, tmp_path):
    result = chat(b"hi\n\xff\xfe\n")
    assert result.code == 2 and result.err == "kvad: error: standard input, line 2: not UTF-8 at byte 0\n"
    result = chat("hi", at=write_model(tmp_path / "bare", tokenizer=False))
    assert result.code == 2 and "has no tokenizer" in result.err
    assert chat("hi", at=tmp_path).code == 2


def test_hub_name_uses_its_template(chat, tmp_path, monkeypatch):
    folder = write_model(tmp_path / "chatty")
    (folder / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    monkeypatch.setattr("kvad.checkpoint.hub._fetch", lambda *_: folder)
    result, local = (chat("hi", options=(*GREEDY, "--system", "S"), at=at) for at in ("kvad-test/chatty", folder))
    assert result == local and result.code == 0
