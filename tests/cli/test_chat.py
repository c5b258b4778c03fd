"""kvad chat: one growing text, its cache reused from turn to turn; commands; Ctrl-C and Ctrl-D."""

import builtins
import errno
import io
import json
import os
import signal
import sys

import pytest

from kvad.cli.commands import chat as module
from kvad.cli.stats import RunMeter
from kvad.llm import LLM
from tests.support.cli_checkpoints import LIMIT, run, write_model

GREEDY = ("--temperature", 0, "--max-tokens", 6)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def llm(model):
    with LLM.load(model, max_num_seqs=1) as opened:
        yield opened


@pytest.fixture
def chat(capsys, monkeypatch, model):
    def talk(*lines, options=GREEDY, at=None):
        stdin = lines[0] if isinstance(lines[0], bytes) else "".join(f"{line}\n" for line in lines).encode()
        return run(capsys, "chat", at or model, *options, stdin=stdin, monkeypatch=monkeypatch)

    return talk


def continued(llm, *typed):
    """The replies of a chat without any cache between its turns."""
    tokens, replies = [], []
    for line in typed:
        tokens += list(line.encode())
        done = llm.generate(tokens, max_tokens=6, temperature=0)
        tokens += done.tokens
        replies.append(done.text)
    return replies


def test_turns_grow_one_text(chat, llm):
    one, two = continued(llm, "hi\n", "\nyou\n")
    ran = chat("hi", "you")
    assert ran == (0, f"{one}\n{two}\n", "")


def test_the_next_turn_finds_the_last_one_in_the_cache(chat):
    ran = chat("hello there, who are you?", "hm", "/kv", "/stats", options=(*GREEDY, "--block-size", 4))
    assert "the last turn: 28 of its tokens were in the cache" in ran.err  # 26 + 6 tokens: 7 full blocks are known
    assert "1 hit, 1 miss, 28 tokens reused in total" in ran.err
    assert f"this chat: 42 tokens of at most {LIMIT}" in ran.err
    assert (
        "blocks in use" in ran.err and "cached for reuse" in ran.err and "28 of them from the prefix cache" in ran.err
    )


def test_a_backslash_leaves_the_line_open(chat, llm):
    assert chat("hi\\").out == continued(llm, "hi")[0] + "\n"


def test_a_search_has_a_row_for_each_beam(chat, llm, model):
    with LLM.load(model, max_num_seqs=3) as wide:
        found = wide.generate("hi\n", max_tokens=6, num_beams=3).text
    assert chat("hi", options=("--max-tokens", 6, "--num-beams", 3)).out == f"{found}\n"


def test_undo_takes_back_a_turn(chat, llm):
    one, two = continued(llm, "hi\n", "\nyou\n")
    ran = chat("hi", "no", "/undo", "you", "/undo", "/undo", "/undo")
    assert ran.out.startswith(one) and ran.out.endswith(f"{two}\n")
    assert ran.err.splitlines() == [
        "1 turn is left", "1 turn is left", "0 turns are left",
        "kvad: error: there is no turn to take back",
    ]  # fmt: skip


def test_save_and_load(chat, llm, tmp_path):
    kept = tmp_path / "kept.json"
    replies = continued(llm, "hi\n", "\nyou\n", "\nbye\n")
    said = chat("hi", "you", f"/save {kept}").err
    assert said.startswith(f"2 turns are in {kept}; ") and said.endswith(f" of cache in {kept}.session\n")
    saved = json.loads(kept.read_text("utf-8"))
    assert [turn["typed"] for turn in saved["turns"]] == ["hi\n", "\nyou\n"]
    assert [turn["reply"] for turn in saved["turns"]] == replies[:2]
    again = chat(f"/load {kept}", "bye")
    assert again.out == f"{replies[2]}\n" and "2 turns, 20 tokens from" in again.err
    saved["tokenizer"] = "another"
    kept.write_text(json.dumps(saved), "utf-8")
    assert "2 turns" in chat(f"/load {kept}").err


def test_a_save_that_fails_leaves_the_old_one_whole(chat, tmp_path, monkeypatch):
    kept = tmp_path / "kept.json"
    old = '{"kvad_chat": 1, "turns": []}'
    kept.write_text(old, "utf-8")

    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    ran = chat("hi", f"/save {kept}", "more")
    assert ran.code == 0 and "cannot write" in ran.err and kept.read_text("utf-8") == old
    assert os.listdir(tmp_path) == ["kept.json"] and ran.out.count("\n") >= 2


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot read"),
        ("{", "is not JSON"),
        ("[]", "is not a chat that /save wrote"),
        ('{"kvad_chat": 2}', "is not a chat that /save wrote"),
        ('{"kvad_chat": 1, "tokenizer": "", "turns": [{"typed": "x"}]}', "is not a chat that /save wrote"),
    ],
)
def test_load_refuses_what_is_no_chat_and_keeps_this_one(chat, tmp_path, content, says):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content, "utf-8")
    ran = chat("hi", f"/load {path}", "/kv")
    assert ran.code == 0 and says in ran.err and "this chat: 9 tokens" in ran.err


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("/sav", "no such command /sav; did you mean '/save'?"),
        ("/save", "/save needs a name or a file"),
        ("/undo 3", "/undo takes nothing after it"),
        ("x" * LIMIT, f"no room for a reply: {LIMIT + 1} tokens with this line, the limit is {LIMIT}; shorten it"),
        ("x" * (LIMIT - 1), f"no room for a reply: {LIMIT} tokens with this line, the limit is {LIMIT}; shorten it"),
    ],
)
def test_a_line_that_cannot_be_is_told_and_the_chat_goes_on(chat, llm, line, says):
    ran = chat(line, "hi")
    assert ran.code == 0 and ran.err == f"kvad: error: {says}\n"
    assert ran.out == continued(llm, "hi\n")[0] + "\n"


def test_a_full_context_is_told_and_undo_makes_room(chat, llm):
    """3 + 6 tokens, 5 + 6, then 4 more leave room for 2 of 26; taken back, a line of 3 leaves room for 3."""
    options = (*GREEDY, "--max-seq-len", 26, "--logit-bias", "97=500")
    ran = chat("hi", "you", "hm", "hm", "/undo", "/kv", "a", options=options)
    assert ran.code == 0 and ran.out.splitlines() == ["aaaaaa", "aaaaaa", "aa", "aaa"]
    full, refused, left, *kv, again = ran.err.splitlines()
    assert full == again == "the context of 26 tokens is full: /undo takes back the last turn"
    assert refused == (
        "kvad: error: no room for a reply: 30 tokens with this line, the limit is 26; /undo takes back the last turn"
    )
    assert left == "2 turns are left" and "this chat: 20 tokens of at most 26" in kv


def test_one_is_singular(chat, tmp_path):
    kept = tmp_path / "kept.json"
    ran = chat("\\", f"/save {kept}", f"/load {kept}", "/stats", options=("--max-tokens", 1, "--logit-bias", "97=500"))
    lines = ran.err.splitlines()
    assert any(line.startswith(f"1 turn is in {kept}; ") for line in lines)
    assert f"1 turn, 1 token from {kept}; 1 of 1 token restored" in lines
    assert any(line.startswith("generated   1 token in ") and line.endswith(" 1 step") for line in lines)


def test_help_and_quit(chat):
    ran = chat("/help", "/stats", "/quit", "never")
    assert ran.out == "" and "no reply was generated yet" in ran.err
    assert all(name in ran.err for name in module.CHAT_COMMANDS if name != "/help")


def test_an_empty_first_line_begins_with_the_opening_token(chat, llm):
    ran = chat("")
    assert ran.out == llm.generate([256], max_tokens=6, temperature=0).text + "\n"
    assert "opening token <|endofdoc|>" in ran.err


def test_a_stop_string_is_no_part_of_the_history(chat, tmp_path):
    kept = tmp_path / "kept.json"
    options = (*GREEDY, "--logit-bias", "97=500", "--stop", "aaa")
    chat("hi", f"/save {kept}", options=options)
    assert json.loads(kept.read_text("utf-8"))["ids"] == [{"typed": [104, 105, 10], "reply": []}]
    chat("hi", f"/save {kept}", options=(*GREEDY, "--logit-bias", "256=500"))  # the end of a document
    assert json.loads(kept.read_text("utf-8"))["ids"] == [{"typed": [104, 105, 10], "reply": []}]


def test_ctrl_c_stops_the_reply_only(chat, llm, monkeypatch):
    real, seen = RunMeter.add, []

    def see(self, piece):
        real(self, piece)
        seen.append(piece)
        if len(seen) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(RunMeter, "add", see)
    ran = chat("hi", "you", "/kv", options=(*GREEDY, "--logit-bias", "97=500"))
    assert ran.code == 0 and ran.out == "aaa\naaaaaa\n"
    assert "this chat: 17 tokens" in ran.err and "0 of 6 blocks in use" in ran.err


class Keyboard(io.TextIOWrapper):
    def isatty(self):
        return True


def test_a_keyboard_ctrl_c_drops_the_line_and_ctrl_d_leaves(capsys, monkeypatch, model, llm):
    typed = iter(["hi", KeyboardInterrupt, "/undo", EOFError])

    def read(prompt):
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(builtins, "input", read)
    monkeypatch.setattr(sys, "stdin", Keyboard(io.BytesIO()))
    ran = run(capsys, "chat", model, *GREEDY)
    assert ran.code == 0 and ran.out == continued(llm, "hi\n")[0] + "\n\n"
    assert "Ctrl-D leaves" in ran.err and "0 turns are left" in ran.err


def test_input_that_is_not_utf8(chat):
    ran = chat(b"hi\n\xff\xfe\n")
    assert ran.code == 2 and ran.err == "kvad: error: standard input, line 2: not UTF-8 at byte 0\n"


def test_a_model_without_a_tokenizer(chat, tmp_path):
    ran = chat("hi", at=write_model(tmp_path / "bare", tokenizer=False))
    assert ran.code == 2 and "has no tokenizer" in ran.err


def test_bad_options(chat, tmp_path):
    assert "temperature: must be from 0 to 100, got -1.0" in chat("hi", options=("--temperature", -1)).err
    assert chat("hi", at=tmp_path).code == 2


def test_a_name_of_the_hub_has_its_template(chat, tmp_path, monkeypatch):
    folder = write_model(tmp_path / "chatty")
    (folder / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    monkeypatch.setattr("kvad.checkpoint.hub._fetch", lambda *_: folder)
    ran, beside = (chat("hi", options=(*GREEDY, "--system", "S"), at=at) for at in ("kvad-test/chatty", folder))
    assert ran == beside and ran.code == 0
