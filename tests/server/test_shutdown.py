"""End of the server: SIGTERM with running streams, a killed engine, a killed server whose sessions continue."""

import shutil
import signal
import threading
import time

import httpx
import pytest

from tests.server.conftest import KEYS
from tests.support.server import open_stream, parse_events

TURN = "a conversation of some blocks, whose cache is on disk"


def read_in_background(connections):
    """Read sockets to their ends in threads; return (threads, texts)."""
    texts = [""] * len(connections)

    def read(index):
        data = b""
        while part := connections[index].recv(65536):
            data += part
        texts[index] = data.decode()

    threads = [threading.Thread(target=read, args=(index,)) for index in range(len(connections))]
    for thread in threads:
        thread.start()
    return threads, texts


def events_of(text):
    """Return the events of a whole response with a chunked body."""
    rest, body = text.partition("\r\n\r\n")[2], ""
    while rest != "0\r\n\r\n":
        size, _, rest = rest.partition("\r\n")
        length = int(size, 16)
        body, rest = body + rest[:length], rest[length + 2 :]
    return parse_events(body)


def take_turn(server, text, max_tokens):
    reply = server.complete(text, max_tokens=max_tokens, session="talk", timings=True)
    return reply["choices"][0]["text"], reply["timings"]


def test_a_restarted_server_continues_then_drains(start_server, server, tmp_path):
    """A copy of the session folder, taken between two turns, is all that a new server needs.

    At SIGTERM it refuses new requests, and ends streams at the timeout.
    """
    text, _ = take_turn(server, TURN, 20)
    shutil.copytree(server.session_folder, tmp_path / "sessions")
    expected, timings = take_turn(server, f"{TURN}{text} and on", 20)
    options = ("--session-dir", tmp_path / "sessions", "--shutdown-timeout", 0.5)
    restarted = start_server(*options, keys=KEYS)
    continued, again = take_turn(restarted, f"{TURN}{text} and on", 20)
    assert continued == expected and again["cached_tokens"] == timings["cached_tokens"] > len(TURN)
    check_drain(restarted)


def check_drain(server):
    short = [open_stream(server, f"{i} short", max_tokens=200) for i in range(2)]
    long = [open_stream(server, f"{i} long", max_tokens=4000) for i in range(3)]
    server.wait_for(lambda state: len(state["sequences"]) >= 3 and all(s["computed"] for s in state["sequences"]))
    watcher = httpx.Client(base_url=server.url, headers=server.http.headers)
    assert watcher.get("/ready").status_code == 200
    begun = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    threads, texts = read_in_background([*short, *long])
    time.sleep(0.15)
    ready, refused = watcher.get("/ready"), watcher.post("/v1/completions", json={"prompt": "x"})
    assert ready.status_code == 503 and refused.status_code == 503
    assert refused.json()["error"]["code"] == "shutting_down" and refused.headers["retry-after"]
    assert watcher.get("/health").status_code == 200
    for thread in threads:
        thread.join(10)
    assert 0.4 < time.monotonic() - begun < 6
    for text in texts[:2]:
        *_, last, done = events_of(text)
        assert last["choices"][0]["finish_reason"] == "length" and done == "[DONE]"
    for text in texts[2:]:
        *_, error, done = events_of(text)
        assert "shutting down" in error["error"]["message"] and done == "[DONE]"
    watcher.close()
    assert server.stop() == 0, server.log


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
    second.wait_for(lambda state: len(state["sequences"]) == 4)
    second.engine_process.kill()
    for thread in threads:
        thread.join(10)
    for each in texts:
        *_, error, done = events_of(each)
        assert error["error"]["code"] == "engine_error" and done == "[DONE]"
    assert second.process.wait(10) == 1
