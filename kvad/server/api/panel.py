"""Routes of the page: state of the cache as an event stream, attention of a token, the newest training run."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from kvad.server.api import generation
from kvad.server.api.errors import ApiError, invalid
from kvad.server.api.generation import ApiContext, EventStream
from kvad.server.api.schema import AttentionBody

INTERVAL = 0.05  # seconds between two states: 20 per second at most
QUIET_INTERVAL = 1.0  # while nothing runs
MAX_RUN_LINES, MAX_RUN_BYTES = 2000, 1 << 20  # of the end of a run, whose curve is shown


async def cache_state(context: ApiContext) -> dict[str, Any]:
    """Answer a request to /cache: the pools, sequences and stores now."""
    state = await context.llm.call("blocks")
    for record in (*state["sequences"], *state["prompts"], *state["evictions"]):
        record["request_id"] = context.llm.request_ids.get(record["request"])
    return {"time": time.time(), "requests": len(context.llm.streams), **state}


async def shared_state(context: ApiContext) -> dict[str, Any]:
    """Return ``cache_state``, of at most ``INTERVAL`` before: the engine answers once for all pages."""
    now = time.monotonic()
    if context.poll is None or (context.poll.done() and now - context.poll_time >= INTERVAL):
        context.poll, context.poll_time = asyncio.ensure_future(cache_state(context)), now
    return await asyncio.shield(context.poll)


def cache_events(context: ApiContext) -> EventStream:
    """Answer a request to /cache/events: the state whenever it changes, at most 20 times per second."""

    async def events() -> AsyncIterator[bytes]:
        last = b""
        while not context.draining:
            state = await shared_state(context)
            shown = {name: value for name, value in state.items() if name != "time"}
            data = generation.event(shown)
            yield data if data != last else b": ping\n\n"
            last = data
            waited = INTERVAL
            await asyncio.sleep(INTERVAL)
            while waited < QUIET_INTERVAL and not (context.llm.streams or state["sequences"]):
                await asyncio.sleep(INTERVAL)
                waited += INTERVAL

    return EventStream(events())


async def attention(context: ApiContext, body: AttentionBody, key: str) -> dict[str, Any]:
    """Answer a request to /attention: weights of a text's last token, exact, per head of one layer."""
    if not context.config.attention:
        raise ApiError(403, "attention weights are off: start the server with --attention", code="disabled")
    if context.check_model(body.model):
        raise invalid("model", "attention weights are those of the base model. Omit it.")
    prompts = generation.split_prompts(context, "prompt", body.prompt)
    tokens = await context.threads.run(len(prompts[0]), context.llm.texts.encode_prompt, prompts[0])
    return await context.llm.call("attention", token_ids=tokens, layer=body.layer)


async def training(context: ApiContext) -> dict[str, Any]:
    """Answer a request to /training: loss and samples of the newest run, {} without one."""
    folder = context.config.runs_dir
    return {} if folder is None else await asyncio.to_thread(read_newest_run, folder)


def read_newest_run(folder: Path) -> dict[str, Any]:
    """Return the name, the state and the last lines of metrics of the run that was written last."""
    metrics = [path for path in (*folder.glob("metrics.jsonl"), *folder.glob("*/metrics.jsonl")) if path.is_file()]
    if not metrics:
        return {}
    newest = max(metrics, key=lambda path: path.stat().st_mtime)
    lines = []
    with newest.open("rb") as file:  # a long run has megabytes, of which the page shows the end
        file.seek(max(0, newest.stat().st_size - MAX_RUN_BYTES))
        text = file.read().decode(errors="replace")
    for line in text.splitlines()[-MAX_RUN_LINES:]:
        try:
            lines.append(json.loads(line))
        except ValueError:  # the last line is being written, or the first one is not whole
            continue
    age = time.time() - newest.stat().st_mtime
    return {"name": newest.parent.name, "seconds_since_write": age, "lines": lines}
