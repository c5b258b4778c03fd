"""Limits of session files: the oldest are removed, never one that a turn uses, also after kill -9 in between."""

import os
import signal
import socket
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from kvad.engine.scheduling import SamplingParams
from kvad.errors import RequestError
from kvad.llm import LLM
from kvad.server.engine_process import EngineProcess
from kvad.server.limits import SessionLimits
from kvad.server.sessions import SessionTurns
from kvad.storage import REAL_FILE_SYSTEM
from tests.server.conftest import KEYS, LIMITS

PROMPT = list(b"a conversation")


@pytest.fixture
def make_turns(llm, tmp_path):
    """Return a maker of turns on one folder, with limits; their chunks are those of the client."""

    def make(num_files=99, num_bytes=1 << 30):
        turns = SessionTurns(llm, tmp_path, SessionLimits(num_files, num_bytes))
        llm.client.on_chunk = turns.add_chunk
        return turns

    yield make
    llm.client.on_chunk = None


def begin(turns, name, tokens=PROMPT, owner=""):
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    return turns.begin({"name": name, "owner": owner}, tokens, None, params, cache_salt="", adapter="")


def end(llm, turns, request):
    while not llm.engine.idle:
        llm.client.step()
    return turns.end(request)["session"]


@pytest.fixture
def take_turn(llm, tmp_path):
    """Return a function that takes a turn; files of later turns are a second newer, whatever the clock's resolution."""
    times = iter(range(10**9, 10**10))

    def take(turns, name, **fields):
        report = end(llm, turns, begin(turns, name, **fields))
        (path,) = tmp_path.glob(f"*/{name}.session")
        os.utime(path, (next(times),) * 2)
        return report

    return take


def names(folder):
    return sorted(path.stem for path in folder.glob("public/*.session"))


def test_sessions_that_were_saved_longest_ago_are_removed(make_turns, take_turn, tmp_path):
    turns = make_turns(num_files=3)
    for name in ("a", "b", "c", "a", "d"):
        take_turn(turns, name)
    assert names(tmp_path) == ["a", "c", "d"]
    assert (turns.stats().removed, turns.stats().num_files, turns.stats().saved) == (1, 3, 5)
    take_turn(turns, "other", owner="a key")
    assert names(tmp_path) == ["a", "c", "d"], "each key has its own limit"
    assert take_turn(make_turns(num_files=3), "a", tokens=[*PROMPT, 1])["reused"] > 0, "and the rest continue"


def test_bytes_of_session_files_are_limited(llm, make_turns, take_turn, tmp_path):
    take_turn(make_turns(), "a")
    size = (tmp_path / "public" / "a.session").stat().st_size
    turns = make_turns(num_bytes=size * 5 // 2)
    take_turn(turns, "b")
    take_turn(turns, "c")
    assert names(tmp_path) == ["b", "c"]
    with pytest.raises(RequestError, match=r"session: has [\d,]+ bytes, the limit is [\d,]+; it is not on disk"):
        end(llm, turns, begin(turns, "long", PROMPT * 40))
    assert names(tmp_path) == ["b", "c"], "a session that is too large displaces no other"


def test_a_session_in_use_is_not_removed(llm, make_turns, take_turn, tmp_path):
    turns = make_turns(num_files=1)
    take_turn(turns, "a")
    request = begin(turns, "a", [*PROMPT, 1])
    take_turn(make_turns(num_files=1), "b")  # of another process: a lock is one of an open file, not of a process
    assert names(tmp_path) == ["a", "b"]
    turns.cancel(request)
    llm.engine.abort_request(request)
    take_turn(turns, "c")
    assert names(tmp_path) == ["c"]


@pytest.mark.parametrize("length", [0, 2], ids=["length", "stop string"])
def test_saving_a_turn_waits_for_no_other_request(llm, make_turns, monkeypatch, length):
    """The state is captured when the turn ends, also if a stop string is cut off its text."""
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    if length:
        text = llm.generate(PROMPT, params).choices[0].text
        params = replace(params, stop=(text[length : length + 2],))
    turns = make_turns()
    request = turns.begin({"name": "a", "owner": ""}, PROMPT, None, params, cache_salt="", adapter="")
    while not llm.engine.idle:
        llm.client.step()
    monkeypatch.setattr(llm.engine, "add_request", None)
    turns.end(request)
    monkeypatch.undo()
    llm.client.on_chunk = None
    turns = make_turns()  # of another process
    assert end(llm, turns, begin(turns, "a", [*PROMPT, *b"?"]))["reused"] == len(PROMPT)


def test_a_failed_turn_leaves_the_session_as_it_was(llm, make_turns, take_turn, monkeypatch, tmp_path):
    turns = make_turns()
    take_turn(turns, "a")
    before = (tmp_path / "public" / "a.session").read_bytes()
    request = begin(turns, "a", [*PROMPT, 1, 2])
    monkeypatch.setattr(llm.engine.runner, "execute", lambda output: torch.full((1, 300), torch.nan))
    with suppress(Exception):
        while not llm.engine.idle:
            llm.client.step()
    monkeypatch.undo()
    llm.client.on_chunk = turns.add_chunk
    assert turns._turns[request].chunks[-1].error is not None and turns.end(request) == {}
    assert (tmp_path / "public" / "a.session").read_bytes() == before
    assert take_turn(turns, "a", tokens=[*PROMPT, 1])["reused"] > 0


def test_an_exception_while_a_session_is_saved_is_reported(model, tmp_path, monkeypatch):
    """Other requests run on: what is not known to be an error of the disk is one of this session, too."""
    with LLM.load(model) as llm:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            process = EngineProcess(llm, ours, SessionTurns(llm, tmp_path))
            request = llm.engine.add_request(PROMPT, SamplingParams(max_tokens=1))
            monkeypatch.setattr(process._sessions, "end", lambda request: 1 // 0)
            assert process._end(7, request)["session"] == {
                "error": "ZeroDivisionError: integer division or modulo by zero"
            }


@pytest.mark.parametrize("options", [{"block_size": 16}, {"layout": "contiguous"}], ids=["prefix cache", "state"])
@pytest.mark.parametrize(("num_steps", "length"), [(12, 300), (1, 3000), (0, 300)], ids=["decode", "prompt", "queue"])
def test_a_shutdown_saves_running_turns(model, tmp_path, num_steps, length, options):
    """They end with the tokens so far, and another process continues them as if they had not been interrupted."""
    prompt = [number % 251 for number in range(length)]
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)

    def tokens_of(turns, request):
        return [chunk.token_id for chunk in turns._turns[request].chunks if chunk.token_id is not None]

    def start(llm):
        turns = SessionTurns(llm, tmp_path)
        llm.client.on_chunk = turns.add_chunk
        identity = {"name": "talk", "owner": ""}
        return turns, turns.begin(identity, prompt, None, params, cache_salt="", adapter="")

    with LLM.load(model, max_num_seqs=8, **options) as llm:
        turns, request = start(llm)
        for _ in range(num_steps):
            llm.client.step()
        tokens = tokens_of(turns, request)
        turns.end_all()
        assert llm.engine.idle and not turns._turns
    assert bool(tokens) == (num_steps > 1) and names(tmp_path) == ["talk"] * (num_steps > 0)
    with LLM.load(model, max_num_seqs=8, **options) as llm:
        turns, request = start(llm)
        while not llm.engine.idle:
            llm.client.step()
        continued = tokens_of(turns, request)
        reused = turns.end(request)["session"]["reused"]
        llm.client.on_chunk = None
        expected = llm.generate(prompt, params, cache_salt="other").choices[0].token_ids
    assert tokens == list(expected[: len(tokens)]) and continued == list(expected)
    assert reused == 0 if num_steps == 0 else reused == length - 1 if tokens else 16 < reused < length - 1


def test_kill_9_leaves_whole_sessions_and_no_lock(make_turns, take_turn, tmp_path):
    turns = make_turns()
    for name in "abcde":
        take_turn(turns, name)
    folder = tmp_path / "public"
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            remaining = make_turns(num_files=2)
            REAL_FILE_SYSTEM.hold(folder / "d.session")
            remove = remaining._remove
            remaining._remove = lambda path: remove(path) and os.kill(os.getpid(), signal.SIGKILL)
            remaining._remove_oldest(folder / "e.session")
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert names(tmp_path) == ["b", "c", "d", "e"]
    leftover = folder / f".d.session.{child}.0badcafe.tmp"  # of a turn that the process was saving
    leftover.write_bytes(b"half")
    assert take_turn(make_turns(num_files=2), "d", tokens=[*PROMPT, 1])["reused"] > 0
    assert names(tmp_path) == ["d", "e"] and not leftover.exists()


def test_limit_of_a_server(server):
    """A key's sessions beyond the limit replace its own, not those of another key; the page shows it."""
    headers = {"authorization": f"Bearer {KEYS[1]}"}
    body = {"prompt": PROMPT, "max_tokens": 1, "session": "stays"}
    assert server.http.post("/v1/completions", json=body, headers=headers).status_code == 200
    for number in range(LIMITS["max_sessions"] + 2):
        server.complete(PROMPT, max_tokens=1, session=f"many-{number}")
    files = [path.stem for path in (server.session_folder / "server").glob("*/*.session")]
    many = [name for name in files if name.startswith("many-")]
    assert len(many) == LIMITS["max_sessions"] and "many-0" not in many and "stays" in files
    assert server.cache()["sessions"]["removed"] >= 2
    reply = server.complete(PROMPT * 40, max_tokens=1, session="long", timings=True)
    assert "the limit is 200,000" in reply["timings"]["session"]["error"] and reply["choices"][0]["text"]
