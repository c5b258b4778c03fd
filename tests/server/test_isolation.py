"""Many clients at once, half of which disappear, with a full pool: other outputs equal those of the requests alone."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvad.llm import LLM
from tests.support.server import BLOCK_SIZE, ServerProcess, parse_events, write_model

CACHES = {  # options of the server, and of the engine whose results are the reference
    "full": (["--num-blocks", 40], {}),
    "window": (["--policy", "window(64)"], {"policy": "window(64)"}),  # its sequences always fit
    "lossy": (["--policy", "tova(48)"], {"policy": "tova(48)"}),
    "int8, in RAM": (
        ["--num-blocks", 40, "--cache-dtype", "int8", "--prefix-cache-ram", "4MiB"],
        {"cache_dtype": "int8"},
    ),
}


def make_bodies(count: int, seed: int) -> list[dict[str, Any]]:
    """Return requests of many lengths, some with a shared prefix, stop strings, penalties and seeds."""
    draws = random.Random(seed)
    shared = [draws.randrange(33, 127) for _ in range(100)]
    bodies = []
    for number in range(count):
        prompt = (shared if draws.random() < 0.4 else []) + [
            draws.randrange(33, 127) for _ in range(draws.randint(1, 90))
        ]
        body = {"prompt": prompt, "max_tokens": draws.randint(1, 60), "temperature": draws.choice([0, 0, 0.8, 1.2])}
        body |= {"seed": number, "stream": draws.random() < 0.7}
        body |= {"stop": ["e", "A"]} if draws.random() < 0.2 else {}
        body |= {"frequency_penalty": 0.5} if draws.random() < 0.2 else {}
        bodies.append(body)
    return bodies


async def send(port: int, body: dict[str, Any], seconds: float | None) -> str | None:
    """Return the text of a completion; None if the client disappears after ``seconds``."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(data)}\r\n"
    writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + data)
    if seconds is not None:
        await asyncio.sleep(seconds)
        writer.transport.abort()
        return None
    reply = (await reader.read()).partition(b"\r\n\r\n")[2]
    writer.close()
    if not body["stream"]:
        return json.loads(reply)["choices"][0]["text"]
    events = parse_events(unchunked(reply).decode())
    assert events[-1] == "[DONE]" and not any("error" in event for event in events[:-1]), events[-2:]
    return "".join(event["choices"][0]["text"] for event in events[:-1] if event["choices"])


def unchunked(data: bytes) -> bytes:
    """Return a body without the lines of HTTP's chunked encoding."""
    parts = []
    while data:
        size, _, data = data.partition(b"\r\n")
        parts.append(data[: int(size, 16)])
        data = data[int(size, 16) + 2 :]
    return b"".join(parts)


@pytest.mark.long(minutes=4)
@pytest.mark.parametrize("cache", CACHES)
def test_outputs_of_200_clients_equal_solo_runs(cache: str, tmp_path: Path) -> None:
    options, settings = CACHES[cache]
    model, bodies = write_model(tmp_path / "model"), make_bodies(200, seed=len(cache))
    limits = ["--limit=max_queued_requests=1000", "--limit=max_requests_per_key=1000"]
    server = ServerProcess(model, *options, "--max-num-seqs", 12, *limits, "--session-dir", tmp_path)
    draws = random.Random(7)

    async def client(number: int) -> str | None:
        await asyncio.sleep(2 * draws.random())
        return await send(server.port, bodies[number], draws.random() if number % 2 else None)

    async def run_all() -> list[str | None]:
        return await asyncio.gather(*map(client, range(len(bodies))))

    texts = asyncio.run(run_all())
    state = server.wait_for(lambda state: not state["sequences"])
    assert server.blocks_in_use() == 0 and (state["scheduler"]["preemptions"] > 0) == ("--num-blocks" in options)
    assert server.stop() == 0, "".join(server.log)
    with LLM.load(model, block_size=BLOCK_SIZE, max_num_seqs=1, enable_prefix_caching=False, **settings) as llm:
        for number in range(0, len(bodies), 2):
            fields = {name: value for name, value in bodies[number].items() if name not in ("prompt", "stream")}
            fields["stop"] = tuple(fields.get("stop", ()))
            assert texts[number] == llm.generate(bodies[number]["prompt"], **fields).text, bodies[number]


# ---------------------------------------------------------------- slow readers and overload


def slow_reader(port: int, number: int) -> socket.socket:
    """Begin a stream of about 300 kB on a connection with a small buffer."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port))
    body = {"prompt": f"slow {number}", "max_tokens": 300, "stream": True, "ignore_eos": True, "logprobs": 5}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
    connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + data)
    return connection


def seconds_of_a_request(server: ServerProcess, number: int) -> float:
    begun = time.monotonic()
    server.complete(f"{number} quick", max_tokens=200)
    return time.monotonic() - begun


@pytest.mark.long(minutes=3)
def test_500_slow_readers(tmp_path: Path) -> None:
    """They read a byte per second: memory is bounded, other requests take their usual time, and all are dropped."""
    limits = {"max_queued_requests": 1000, "max_requests_per_key": 1000, "request_seconds": 60}
    options = [f"--limit={name}={value}" for name, value in limits.items()]
    server = ServerProcess(write_model(tmp_path / "model"), *options, "--max-num-seqs", 32)
    process = psutil.Process(server.process.pid)
    alone, before = min(seconds_of_a_request(server, number) for number in range(9)), process.memory_info().rss
    connections = [slow_reader(server.port, number) for number in range(500)]
    server.wait_for(lambda state: state["requests"] == 500, 20)
    while server.cache()["requests"]:  # all tokens are generated, and wait for their readers
        for connection in connections:
            assert connection.recv(1)
        time.sleep(0.5)
    assert process.memory_info().rss - before < 400 << 20  # 0.6 MB of events per stream
    assert min(seconds_of_a_request(server, number) for number in range(9, 27)) < 1.1 * alone + 0.01
    assert len(process.net_connections()) > 500
    end = time.monotonic() + 110  # the deadline, then 5 s for the last event, then up to 20 s until they are aborted
    while len(process.net_connections()) > 5:
        assert time.monotonic() < end, "connections are left"
        time.sleep(1)
    assert server.blocks_in_use() == 0 and server.stop() == 0
    for connection in connections:
        connection.close()


@pytest.mark.long(minutes=2)
def test_five_times_the_capacity(tmp_path: Path) -> None:
    """Refused requests get a 429 with Retry-After at once; the others are as many as without overload."""
    limits = {"max_queued_requests": 16, "max_requests_per_key": 1000}
    options = [f"--limit={name}={value}" for name, value in limits.items()]
    server = ServerProcess(write_model(tmp_path / "model"), *options, "--max-num-seqs", 8)
    process, statuses = psutil.Process(server.process.pid), list[int]()
    ends = list[tuple[int, float]]()

    def request(number: int) -> int:
        body = {"prompt": f"{number} text", "max_tokens": 1500, "temperature": 0, "ignore_eos": True}
        response = server.http.post("/v1/completions", json=body)
        if response.status_code == 429:
            assert response.headers["retry-after"]
        statuses.append(response.status_code)
        ends.append((response.status_code, time.monotonic()))
        return response.status_code

    with ThreadPoolExecutor(8) as pool:  # closed loop
        begun = time.monotonic()
        assert set(pool.map(request, range(48))) == {200}
        peak = 48 / (time.monotonic() - begun)
    before, seconds = process.memory_info().rss, 15.0
    with ThreadPoolExecutor(200) as pool:  # open loop
        begun, sent = time.monotonic(), 0
        while (now := time.monotonic() - begun) < seconds:
            while sent < 5 * peak * now:
                pool.submit(request, 1000 + sent)
                sent += 1
            time.sleep(0.005)
        good = sum(status == 200 and begun + 3 < end < begun + seconds for status, end in ends) / (seconds - 3)
    assert set(statuses) == {200, 429} and statuses.count(429) > sent / 3
    assert good > 0.9 * peak, (good, peak)
    assert process.memory_info().rss - before < 50 << 20
    assert server.stop() == 0
