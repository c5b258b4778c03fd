"""End of the server by kill -9: its sessions continue; the end of its engine. ``conftest.server`` ends by SIGTERM."""

import signal
import subprocess
import sys
import time

import httpx
import psutil
import pytest

from tests.server.conftest import KEYS
from tests.support.server import events_of, open_stream, read_in_background, wait_for_tokens

TURN = "a conversation of some blocks, whose cache is on disk"


def test_sigterm_while_the_model_is_loaded(model):
    command = [sys.executable, "-m", "kvad", "serve", str(model), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        while not (children := psutil.Process(process.pid).children()):
            time.sleep(0.01)
        process.terminate()
        assert (process.communicate(timeout=30)[0], process.returncode) == ("", 0)
    assert not any(child.is_running() for child in children)


def test_sigterm_saves_the_running_turn_of_a_session(start_server, llm, tmp_path):
    """Its file has the tokens so far and their cache; ``test_sessions`` continues such a file."""
    server = start_server("--session-dir", tmp_path, "--shutdown-timeout", 0.1)
    with open_stream(server, TURN, max_tokens=4000, session="talk"):
        wait_for_tokens(server, 1)
        assert server.stop() == 0, server.log
    session = llm.session("talk", tmp_path / "server" / "public")
    assert bytes(session.tokens[: len(TURN)]) == TURN.encode() and session.restored > len(TURN)


def take_turn(server, text, max_tokens):
    reply = server.complete(text, max_tokens=max_tokens, session="talk", timings=True)
    return reply["choices"][0]["text"], reply["timings"]


@pytest.mark.long
def test_killed_server_and_killed_engine(start_server, tmp_path):
    """After kill -9 of the server, its engine ends and a session continues; kill -9 of the engine ends the server.

    The servers share prefixes between keys.
    """
    options = ("--session-dir", tmp_path / "sessions", "--share-prefixes")
    first = start_server(*options, keys=KEYS)
    body = {"prompt": "shared by all keys, of two whole blocks", "max_tokens": 1}
    for key, cached in zip(KEYS, (0, 32), strict=True):
        headers = {"authorization": f"Bearer {key}"}
        usage = httpx.post(f"{first.url}/v1/completions", json=body, headers=headers).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == cached
    text, _ = take_turn(first, TURN, 20)
    engine = first.engine_process
    open_stream(first, "running", max_tokens=4000)
    assert first.stop(signal.SIGKILL) == -signal.SIGKILL
    engine.wait(10)
    second = start_server(*options, keys=KEYS)
    continued, timings = take_turn(second, f"{TURN}{text} and on", 20)
    assert timings["cached_tokens"] > len(TURN)
    assert continued == second.complete(f"{TURN}{text} and on", max_tokens=20, cache_salt="new")["choices"][0]["text"]
    threads, texts = read_in_background([open_stream(second, f"{i} runs", max_tokens=4000) for i in range(4)])
    wait_for_tokens(second, 4)
    second.engine_process.kill()
    for thread in threads:
        thread.join(10)
    for each in texts:
        *_, error, done = events_of(each)
        assert error["error"]["code"] == "engine_error" and done == "[DONE]"
    assert second.process.wait(10) == 1
