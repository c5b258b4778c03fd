"""Many clients at once, half of which disappear, with a full pool: other outputs equal those of the requests alone."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

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
