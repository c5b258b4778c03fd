"""Attacks and faults of connections, bodies, templates and clocks; the parts of the server that bound their work."""

import asyncio
import gc
import json
import os
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace

import httpx
import pytest

from kvad.engine import StreamChunk
from kvad.engine.scheduling import RequestMetrics, SamplingParams, StructuredOutput
from kvad.engine.scheduling.request import NO_ALLOWED_BEAM, NO_ALLOWED_TOKEN
from kvad.engine.submission import Submission
from kvad.errors import EngineError, RequestError
from kvad.server import run
from kvad.server.api import ApiContext, ApiError, completions, generation, panel, schema, text_threads
from kvad.server.api.errors import shutting_down
from kvad.server.api.logprobs import TokenTexts
from kvad.server.app import POST_ROUTES, WITHOUT_QUEUE, build_app
from kvad.server.async_llm import AsyncLLM, RequestStream, Signal
from kvad.server.config import ServerConfig
from kvad.server.limits import ServerLimits
from kvad.server.metrics import ServerMetrics
from kvad.server.sessions import MAX_OPEN, SessionTurns
from tests.server.conftest import KEYS, LIMITS

BODY = b'{"prompt": "x", "max_tokens": 1}'
HEAD = f"Host: 127.0.0.1\r\nAuthorization: Bearer {KEYS[0]}\r\nContent-Type: application/json\r\n".encode()
POST, LENGTH = b"POST /v1/completions HTTP/1.1\r\n" + HEAD, f"Content-Length: {len(BODY)}\r\n".encode()
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"
SECONDS = max(LIMITS["header_seconds"], LIMITS["body_seconds"])


# ---------------------------------------------------------------- connections


def exchange(server, *parts, pause=0.05, repeat=False):
    """Send parts with pauses, the last one again and again if ``repeat``; return what arrives until the end."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        begun = time.monotonic()
        try:
            for part in parts:
                connection.sendall(part)
                time.sleep(pause)
            while repeat and time.monotonic() - begun < 8 * SECONDS:
                connection.sendall(parts[-1])
                time.sleep(pause)
        except OSError:  # the server has closed the connection
            pass
        assert not repeat or time.monotonic() - begun < 6 * SECONDS, "the server keeps the connection"
        data = b""
        try:
            while part := connection.recv(65536):
                data += part
        except OSError:
            pass
        return data


def one_response(server, *parts):
    """Return the only response of a connection as (status, body)."""
    head, _, body = exchange(server, *parts).partition(b"\r\n\r\n")
    assert b"HTTP/1.1 " not in body
    return int(head.split()[1]), json.loads(body)


@pytest.mark.parametrize("header", ["Connection: Upgrade\r\nUpgrade: h2c", "connection:upgrade\r\nUPGRADE :x"])
def test_a_client_that_offers_another_protocol_keeps_its_body(server, header):
    """Java's client and ``curl --http2`` offer HTTP/2 with the first request; the answer is HTTP/1.1."""
    for parts in ([BODY], [BODY[:5], BODY[5:]]):
        head = POST + LENGTH + header.encode() + b"\r\n\r\n"
        last = b"GET /none HTTP/1.1\r\nConnection: close\r\n" + HEAD + b"\r\n"
        data = exchange(server, head, *parts, last)
        assert [part.split()[0] for part in data.split(b"HTTP/1.1 ")[1:]] == [b"200", b"404"], data


@pytest.mark.parametrize("request_", [b"\x16\x03\x01\x02\x00\r\n\r\n", b"GET /\xe9 HTTP/1.1\r\n\r\n", b"HELLO\r\n\r\n",
                                      POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
                                      CHUNKED + b"zz\r\n{}\r\n"])  # fmt: skip
def test_what_is_not_http_gets_the_body_of_an_error(server, request_):
    status, body = one_response(server, request_)
    assert status == 400 and set(body["error"]) == {"message", "type", "param", "code"}


def test_a_head_has_a_limit(server):
    assert one_response(server, GET + b"Connection: close\r\nX: " + b"a" * 60_000 + b"\r\n\r\n")[0] == 200
    status, body = one_response(server, GET, b"X: " + b"a" * run.MAX_HEAD)
    assert status == 431 and f"{run.MAX_HEAD:,}" in body["error"]["message"]
    for start in (GET + b"X: ", b"GET /"):
        exchange(server, start, b"a" * 65536, pause=0, repeat=True)


@pytest.mark.parametrize(
    "parts",
    [
        (GET, b"X: 1\r\n"),  # the head of the first request
        (GET + b"\r\n", GET, b"X: 1\r\n"),  # of the second one
        (b"\r\n",),
        (GET + b"\r\n", b"\r\n"),
        (GET + b"\r\n", b"\r\n\r\n"),
        (b"POST /none HTTP/1.1\r\n" + HEAD + b"Content-Length: 9999\r\n\r\n", b"x"),  # the body of a refused request
        (POST + b"Content-Length: 9999\r\n\r\n", b" "),
        (CHUNKED, b"1\r\n \r\n"),
        (CHUNKED + b"1;x=", b"y"),
        (CHUNKED + b"0\r\n", b"X: 1\r\n"),
    ],
)
def test_slow_clients_are_closed(server, parts):
    """A byte now and then keeps no connection, wherever it is in a request."""
    exchange(server, *parts, repeat=True)


def test_bytes_around_a_body_are_counted(server):
    """The lines of chunks and of trailers are not the body, but they take memory and time, too."""
    for start, more in ((b"0\r\nX: ", b"a" * 4096), (b"1;x=", b"a" * 4096), (b"", b"1\r\n \r\n" * 400)):
        begun = time.monotonic()
        exchange(server, CHUNKED + start, more, pause=0, repeat=True)
        assert time.monotonic() - begun < SECONDS + 3


def test_connect_ends_the_connection(server):
    head = b"CONNECT evil.com:80 HTTP/1.1\r\n" + HEAD + b"\r\n"
    data = exchange(server, head, GET + b"\r\n")
    assert data.startswith((b"HTTP/1.1 400", b"HTTP/1.1 405", b"HTTP/1.1 404")), data


class Connection:
    """A connection of uvicorn; ``transport`` is itself."""

    def __init__(self, is_closing):
        self.transport, self.closing, self.aborted = self, is_closing, False

    def is_closing(self):
        return self.closing

    def abort(self):
        self.aborted = True

    def close(self):
        self.closing = True

    def get_extra_info(self, name):
        return None


def test_connections_that_do_not_close_are_aborted():
    """A client that does not read keeps the last bytes of its response in memory, and its connection."""
    server, opened, closing, late = run._Server(run.uvicorn.Config(None)), *map(Connection, (False, True, False))
    server.server_state.connections = {opened, closing, late}
    for counter in (0, 1, run.CLOSING_TICKS - 1):
        asyncio.run(server.on_tick(counter))
    late.closing = True
    assert not closing.aborted
    asyncio.run(server.on_tick(run.CLOSING_TICKS))
    assert closing.aborted and not late.aborted
    asyncio.run(server.on_tick(2 * run.CLOSING_TICKS))
    assert late.aborted and not opened.aborted


def test_a_pipelined_response_that_is_not_read_ends_its_connection():
    """Its request would count as one of its key for ever."""

    async def main():
        connection = Connection(False)
        config = run.uvicorn.Config(build_app(context_of()))
        kind = type("Protocol", (run._Protocol,), {"limits": ServerLimits(request_seconds=0.01)})
        protocol = kind(config, run.uvicorn.server.ServerState(), {})
        protocol.connection_made(connection)
        connection.abort = lambda: protocol.connection_lost(None)
        protocol.pause_writing()
        async with asyncio.timeout(1):
            await protocol.flow.drain()
        return connection.closing

    assert asyncio.run(main())


# ---------------------------------------------------------------- bodies

MANY = 100_000
COSTLY = {  # bodies of less than 2 MB that took seconds, minutes or hours
    "objects for texts": b'{"prompt": [' + b",".join([b"{}"] * MANY) + b"]}",
    "lists for texts": b'{"prompt": [' + b",".join([b"[]"] * MANY) + b', "x"]}',
    "texts for numbers": b'{"prompt": "x", "logit_bias": {' + b",".join(b'"%d": "x"' % i for i in range(MANY)) + b"}}",
    "a duplicate of many keys": b'{"user": {' + b",".join(b'"%d": 1' % i for i in range(MANY)) + b', "99999": 2}}',
    "many unknown fields": b'{"prompt": "x", ' + b",".join(b'"k%d": 1' % i for i in range(MANY)) + b"}",
    "a long unknown field": b'{"prompt": "x", "' + b"n" * 1_000_000 + b'": 1}',
    "a long key": b'{"prompt": "x", "logit_bias": {"' + b"1" * 1_000_000 + b'": "x"}}',
    "numbers for stop": b'{"prompt": "x", "stop": [' + b",".join([b"1"] * MANY) + b"]}",
}  # fmt: skip


@pytest.mark.parametrize("name", COSTLY)
def test_a_costly_body_is_refused_quickly(name):
    gc.disable()  # it would read all objects of the tests before
    try:
        begun = time.thread_time()
        with pytest.raises(ApiError) as caught:
            schema.validate(schema.CompletionBody, schema.parse_json(COSTLY[name]), ignore_unknown=False)
        seconds = time.thread_time() - begun
    finally:
        gc.enable()
    assert caught.value.status == 400 and len(caught.value.message) < 1000
    assert seconds < 2.0  # measured: at most 0.2 s


def test_the_number_of_values_is_limited():
    body = json.dumps({"prompt": [1] * 98}).encode()
    assert schema.parse_json(body, 100) and schema.parse_json(b'{"prompt": "' + b"x" * 1000 + b'"}', 100)
    for count in (101, 1000):
        with pytest.raises(ApiError) as caught:
            schema.parse_json(json.dumps({"prompt": [1] * count}).encode(), 100)
        assert caught.value.status == 413 and "100 values" in caught.value.message


# ---------------------------------------------------------------- a server without a model


class NoEngine:
    """A model that detokenizes, and an engine that answers when the test allows it."""

    tokenizer, failure, streams = None, None, ()
    chat_templates = SimpleNamespace(find=lambda adapter: None)

    def __init__(self):
        self.info, self.request_ids = {"adapters": {}}, {}
        self.texts, self.running, self.most, self.calls = self, 0, 0, 0
        self.may_end = asyncio.Event()

    def require_tokenizer(self):
        return SimpleNamespace(decode=lambda tokens, skip_specials: "text")

    async def call(self, operation, **arguments):
        self.calls += 1
        self.running += 1
        self.most = max(self.most, self.running)
        await self.may_end.wait()
        self.running -= 1
        return {"sequences": [{"request": 1}], "prompts": [], "evictions": []}


def context_of(**options):
    return ApiContext(NoEngine(), ServerConfig(**options), ServerMetrics("tiny"), "tiny")


def waiting_stream(**params):
    return RequestStream(None, 1, Signal(), Submission([65] * 10, SamplingParams(**params)))


def test_samples_and_beams_count_in_the_queue():
    """A request of n samples is n sequences that wait; those that have begun wait no more."""
    context, one = context_of(limits=ServerLimits(max_queued_requests=20)), Submission([65], SamplingParams())
    stream = waiting_stream(n=16, temperature=1.0)
    generation.check_submissions(context, [stream.submission] * 2)  # an empty queue accepts any number
    context.llm.streams = [stream]
    generation.check_submissions(context, [one] * 4)
    for many in ([one] * 5, [Submission([65], SamplingParams(num_beams=5))], [stream.submission]):
        with pytest.raises(ApiError, match="has 16 sequences, its limit is 20"):
            generation.check_submissions(context, many)
    for sample in range(12):
        stream.add(StreamChunk(1, sample, text="x"))
        stream.add(StreamChunk(1, sample, text="x"))
    generation.check_submissions(context, [stream.submission])


QUEUED_BODIES = {
    "/v1/completions": {"prompt": "x", "structured_outputs": {"regex": "a+"}},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "x"}],
        "response_format": {"type": "json_object"},
    },
    "/v1/responses": {"input": "x"},
    "/v1/embeddings": {"input": "x"},
    "/v1/translate": {"text": "x"},
}


@pytest.mark.parametrize("limit", ["max_queued_requests", "max_queued_tokens"])
def test_a_full_queue_refuses_before_any_work(limit):
    """No template is rendered, no text encoded, no schema compiled: this engine can do none of it.

    The second check is after the body, in whose time the queue may fill.
    """
    context = context_of(limits=ServerLimits(**{limit: 1}))
    app, full, context.llm.call = build_app(context), [waiting_stream()], None

    async def body_of(fields):
        context.llm.streams = full
        yield json.dumps(fields).encode()

    async def post():
        headers = {"content-type": "application/json"}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            for streams in (full, ()):
                for path, fields in QUEUED_BODIES.items():
                    context.llm.streams = streams
                    yield await client.post(path, content=body_of(fields), headers=headers)
            context.llm.streams = full
            yield await client.post("/detokenize", json={"tokens": [1]})
            context.draining = True
            yield await client.post("/detokenize", json={"tokens": [1]})

    async def collect():
        return [response async for response in post()]

    *refused, served, ending = asyncio.run(collect())
    assert QUEUED_BODIES.keys() | WITHOUT_QUEUE == POST_ROUTES.keys()
    for response in refused:
        assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full"), response.text
    assert (served.status_code, ending.status_code) == (200, 503) and ending.headers["retry-after"] == "5"


def test_large_texts_wait_in_their_own_bounded_queue(monkeypatch):
    """Small requests are encoded while large ones wait, those are limited, and cancelled ones are not encoded."""
    monkeypatch.setattr(text_threads, "LARGE", 1000)
    context, may_end, encoded = context_of(limits=ServerLimits(max_large_texts=2)), threading.Event(), []

    def encode(text, specials=True):
        encoded.append(text)
        assert len(text) < 1000 or may_end.wait(30)
        return [len(text)]

    def render(messages, **settings):
        return encode(messages[-1]["content"])

    tokenizer = SimpleNamespace(encode=encode, add_special_tokens=list)
    context.llm.info["max_len"] = 4096
    context.llm.require_tokenizer, context.llm.render_chat = lambda: tokenizer, render

    async def main():
        app = build_app(context)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:

            async def post(text, *, is_chat=False):
                body = {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
                return await client.post("/tokenize", json=body)

            large = [asyncio.ensure_future(post(letter * 2000)) for letter in "ab"]
            while len(context.threads._large_calls) < 2:
                await asyncio.sleep(0)
            refused = [await post("c" * 2000), await post("c" * 2000, is_chat=True)]
            small = [(await post("d" * 10)).json(), (await post("e" * 10, is_chat=True)).json()]
            large[1].cancel()
            await asyncio.gather(large[1], return_exceptions=True)
            large[1] = asyncio.ensure_future(post("f" * 2000))
            while context.threads._large_calls[1].cancelled():
                await asyncio.sleep(0)
            may_end.set()
            return refused, small, [(await each).json() for each in large]

    refused, small, large = asyncio.run(main())
    assert [each.status_code for each in refused] == [429, 429] and refused[0].headers["retry-after"] == "1"
    assert [reply["tokens"] for reply in small] == [[10], [10]] and [reply["tokens"] for reply in large] == [[2000]] * 2
    assert "".join(text[0] for text in encoded) == "adef"


@pytest.mark.parametrize("count", [0, 1, text_threads.SLICE, 2 * text_threads.SLICE + 1])
def test_json_of_large_replies(count):
    fields = {"count": count, "tokens": list(range(count)), "token_strs": ['a"é'] * count, "other": {"x": [1, None]}}
    assert json.loads(text_threads.encode_json(fields)) == fields
    assert text_threads.encode_slowly(fields) == json.dumps(fields, separators=(",", ":")).encode()


def test_ignored_fields_of_any_script_are_named_in_the_header():
    async def post():
        app = build_app(context_of(ignores_unknown_fields=True))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            body = json.dumps({"tokens": [1], "日本": 1, "a\r\nb: c": 2, "x" * 9000: 3})
            return await client.post("/detokenize", content=body, headers={"content-type": "application/json"})

    response = asyncio.run(post())
    assert response.status_code == 200 and response.json() == {"prompt": "text"}
    assert response.headers["x-kvad-ignored-fields"].startswith(r"\u65e5\u672c, a\r\nb: c, xxx")
    assert len(response.headers["x-kvad-ignored-fields"]) <= 500


def test_ignored_fields_of_a_stream_are_named_too(monkeypatch):
    async def stream(context, body, key):
        async def events():
            yield b"data: 1\n\n"

        return generation.EventStream(events())

    async def post():
        monkeypatch.setitem(POST_ROUTES, "/detokenize", (schema.DetokenizeBody, stream))
        app = build_app(context_of(ignores_unknown_fields=True))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.post("/detokenize", json={"tokens": [1], "other": 1})

    response = asyncio.run(post())
    assert (response.text, response.headers["x-kvad-ignored-fields"]) == ("data: 1\n\n", "other")


@pytest.mark.parametrize(("timeout", "status"), [(0.01, 408), (10, 504), (None, 504)])
def test_a_timeout_beyond_the_limit_is_the_servers(monkeypatch, timeout, status):
    async def wait(context, body, key):
        await asyncio.sleep(10)

    async def post():
        monkeypatch.setitem(POST_ROUTES, "/detokenize", (schema.DetokenizeBody, wait))
        app = build_app(context_of(limits=ServerLimits(request_seconds=0.05)))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.post("/detokenize", json={"tokens": [1], "timeout": timeout})

    assert asyncio.run(post()).status_code == status


def test_attention_is_that_of_the_base_model():
    context = context_of(attention=True)
    context.llm.info["adapters"] = {"sql": "folder"}
    for name, status in (("other", 404), ("sql", 400)):
        body = schema.AttentionBody(prompt=[1], model=name)
        with pytest.raises(ApiError) as caught:
            asyncio.run(panel.attention(context, body, ""))
        assert (caught.value.status, caught.value.param) == (status, "model")


def test_the_server_is_ready_when_a_request_ends_a_pause():
    """A request after a minute without any must not look like one whose engine has been silent for so long."""

    async def main():
        llm = AsyncLLM()
        llm._send, llm.last_message = lambda message: None, time.monotonic() - 1000
        llm._open({"op": "embed", "token_ids": [1]}, Signal())
        assert time.monotonic() - llm.last_message < 10
        llm.last_message = before = time.monotonic() - 1000
        llm._open({"op": "embed", "token_ids": [1]}, Signal())
        assert llm.last_message == before

    asyncio.run(main())


def test_a_session_has_one_running_request(llm, tmp_path):
    """Also if more sessions than stay in memory have turns."""
    turns = SessionTurns(llm, tmp_path)

    def begin(number):
        identity, params = {"name": f"s{number}", "owner": ""}, SamplingParams(max_tokens=5)
        return turns.begin(identity, [1, 2, 3], None, params, cache_salt="", adapter="")

    requests = [begin(number) for number in range(MAX_OPEN + 1)]
    with pytest.raises(RequestError, match="running request"):
        begin(0)
    for request in requests:
        turns.cancel(request)
        llm.engine.abort_request(request)
    turns.cancel(again := begin(0))
    llm.engine.abort_request(again)


def test_of_a_long_run_the_end_is_read(monkeypatch, tmp_path):
    lines = "".join(json.dumps({"kind": "step", "step": step}) + "\n" for step in range(1000))
    (tmp_path / "metrics.jsonl").write_text(f"{lines}{{")
    monkeypatch.setattr(panel, "MAX_RUN_BYTES", 400)
    steps = [line["step"] for line in panel.read_newest_run(tmp_path)["lines"]]
    assert 5 < len(steps) < 20 and steps == list(range(1000 - len(steps), 1000))


def test_compilations_of_requests_that_have_ended_leave_the_queue():
    """Else short timeouts could fill the queue of the engine with work for hours."""

    async def main():
        context, output = context_of(), StructuredOutput("regex", "a")
        tasks = [asyncio.ensure_future(context.compile(output)) for _ in range(20)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks[1:], return_exceptions=True)
        later = asyncio.ensure_future(context.compile(output))
        context.llm.may_end.set()
        await asyncio.gather(tasks[0], later)
        return context.llm

    llm = asyncio.run(main())
    assert llm.most == generation.MAX_COMPILATIONS and llm.calls == generation.MAX_COMPILATIONS + 1


def test_pages_share_the_state_of_the_cache():
    """Forty event streams ask the engine as often as one, and see the state change."""

    async def main():
        context = context_of()
        context.llm.may_end.set()

        async def read():
            events = panel.cache_events(context).events
            return [await anext(events) for _ in range(4)]

        results = await asyncio.gather(*(read() for _ in range(40)))
        return context.llm.calls, results

    calls, results = asyncio.run(main())
    assert 2 <= calls <= 8 and all(result[0].startswith(b"data: ") for result in results)


def test_a_stream_that_nobody_reads_ends():
    """Beyond a number of unread tokens the request fails, and its sequence is freed."""
    context, cancelled = context_of(limits=ServerLimits(max_unread_tokens=10)), []
    context.llm.submit = lambda submission, session, signal: RequestStream(context.llm, 1, signal, submission)
    context.llm.cancel = cancelled.append
    submission = Submission([1], SamplingParams())
    group = generation.RequestGroup(context, [submission])
    (stream,) = group.streams
    for _ in range(10):
        stream.add(StreamChunk(1, 0, text="x"))
    assert len(stream.take()) == 10 and not cancelled
    for _ in range(11):
        stream.add(StreamChunk(1, 0, text="x"))
    assert cancelled == [stream]
    with pytest.raises(RequestError, match="10 tokens unread"):
        stream.take()


def test_a_long_beam_search_is_read():
    """All its chunks arrive in one message."""

    async def main():
        llm = AsyncLLM()
        llm._streams[1] = stream = RequestStream(llm, 1, Signal())
        stream.max_unread, llm._send = 10, lambda message: None
        chunks = [list(StreamChunk(1, beam, text="x")) for beam in range(11)]
        llm.on_message({"chunks": chunks})
        assert len(stream.take()) == 11
        llm.on_message({"chunks": chunks})
        llm.on_message({"chunks": chunks[:1]})
        with pytest.raises(RequestError, match="unread"):
            stream.take()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("end", "code", "reasons"),
    [
        ("finish", None, {"stop": 1}),
        ("cancel", "cancelled", {"stop": 1, "abort": 2}),
        (shutting_down(), "shutting_down", {"stop": 1, "abort": 2}),
        (EngineError("the step failed"), "engine_error", {"stop": 1, "error": 2}),
        ("numerical error", "numerical_error", {"stop": 1, "error": 2}),
        ("the step failed: every token is banned", "engine_error", {"stop": 1, "error": 2}),
        (NO_ALLOWED_TOKEN, "invalid_value", {"stop": 1}),
        (NO_ALLOWED_BEAM, "invalid_value", {"stop": 1}),
        (RequestError("n: too many"), "invalid_value", {"stop": 1}),
    ],
    ids=str,
)  # fmt: skip
def test_requests_that_end_early_are_counted(end, code, reasons):
    """By the code of the error, and their samples by the reason, as in vLLM; each once."""
    context = context_of()
    context.llm.submit = lambda submission, session, signal: RequestStream(context.llm, 1, signal, submission)
    context.llm.cancel = lambda stream: None
    group = generation.RequestGroup(context, [Submission([1], SamplingParams(n=3, temperature=1.0))])
    (stream,) = group.streams

    async def read():
        stream.add(StreamChunk(1, 0, token_id=5, finish_reason="stop"))
        samples = await group.next_chunks()
        context.metrics.observe_finish(samples[0].finish_reason)  # as the routes do
        if isinstance(end, Exception):
            stream.fail(end)
        elif end == "finish":
            for sample in (1, 2):
                stream.add(StreamChunk(1, sample, finish_reason="length"))
        elif end != "cancel":
            stream.add(StreamChunk(1, 1, finish_reason="error", error=end))
        with suppress(Exception):
            if end != "cancel":
                await group.next_chunks()
        group.cancel()
        group.cancel()

    asyncio.run(read())
    text = context.metrics.expose(None, 0).decode()
    failures = dict(re.findall(r'^kvad:request_failures_total{code="(\w+)".*} ([\d.]+)$', text, re.MULTILINE))
    finished = re.findall(r'^vllm:request_success_total{finished_reason="(\w+)".*} ([\d.]+)$', text, re.MULTILINE)
    assert failures == ({} if code is None else {code: "1.0"}), text
    assert {reason: int(float(count)) for reason, count in finished} == reasons


@pytest.mark.parametrize("is_of_its_sample", [True, False], ids=["sample", "request"])
def test_chunks_that_arrive_with_an_error_are_read_before_it(is_of_its_sample):
    """A stream's text does not depend on how many messages of the engine are read at once."""
    context = context_of()
    context.llm.submit = lambda submission, session, signal: RequestStream(context.llm, 1, signal, submission)
    context.llm.cancel = lambda stream: None
    group = generation.RequestGroup(context, [Submission([1], SamplingParams()) for _ in range(2)])
    first, second = group.streams
    first.add(StreamChunk(1, 0, text="a", token_id=5))
    if is_of_its_sample:
        second.add(StreamChunk(2, 0, text="b", token_id=6), StreamChunk(2, 0, finish_reason="error", error="no token"))
    else:
        second.fail(EngineError("no token"))

    seen = []

    async def read():
        async for data in generation.stream_events(group, lambda sample: sample.text.encode(), bytes):
            seen.append(data)

    with pytest.raises(EngineError, match="no token"):
        asyncio.run(read())
    assert seen == [b"ab" if is_of_its_sample else b"a"]


def test_a_response_that_cannot_be_built_ends_its_request(monkeypatch):
    """The request was submitted before; nothing reads its tokens."""
    context, cancelled = context_of(), []
    context.llm.submit = lambda submission, session, signal: RequestStream(context.llm, 1, signal, submission)
    context.llm.cancel = cancelled.append
    context.llm.config = SimpleNamespace(kind="decoder")
    context.llm.builder = SimpleNamespace(generation=lambda params, settings: None)

    async def build(context, make, prompts):
        return [Submission([1], SamplingParams())]

    monkeypatch.setattr(generation, "build", build)
    monkeypatch.setattr(completions._Answer, "_prompt_text", lambda self, prompt: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(completions.create_completion(context, schema.CompletionBody(prompt=[1], echo=True), ""))
    assert len(cancelled) == 1


def test_tokens_that_the_tokenizer_lacks_have_names(llm):
    """A model may have a larger vocabulary, whose ids a client may send and alternatives may contain."""
    texts, unknown = TokenTexts(llm.tokenizer), llm.tokenizer.vocab_size
    assert [texts(token) for token in (104, unknown)] == ["h", f"token_id:{unknown}"]
    assert texts.decode([104, unknown, 105, 256]) == "hi</s>" and TokenTexts(None).decode([1]) == ""


def test_the_prefix_cache_is_counted_in_tokens():
    """With the names and the meaning of vLLM: counters of tokens, not of lookups."""
    metrics = ServerMetrics("tiny")
    for cached in (0, 48):
        metrics.observe_request(RequestMetrics(60, 0.0, num_cached_tokens=cached))
    text = metrics.expose(None, 0).decode()
    for line in (
        'prefix_cache_queries_total{model_name="tiny"} 120.0',
        'prefix_cache_hits_total{model_name="tiny"} 48.0',
    ):
        assert f"vllm:{line}" in text


@pytest.mark.long
def test_odd_clocks_zones_and_locales(start_server, monkeypatch, tmp_path):
    """Under a jumping clock, in an odd zone and with an ASCII locale, texts are whole and no time is negative."""
    (tmp_path / "sitecustomize.py").write_text(
        "import itertools, time\nreal, calls = time.time, itertools.count()\n"
        "time.time = lambda: real() + (-86400 if next(calls) % 2 else 3600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    for name, value in {
        "TZ": "Pacific/Kiritimati",
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
    }.items():
        monkeypatch.setenv(name, value)
    server = start_server()
    for text in ("éж한日😀", "\u202eطب\u0000\r\n"):
        reply = server.complete(text, max_tokens=8, echo=True, timings=True)
        assert reply["choices"][0]["text"].startswith(text)
        timings = reply["timings"]
        assert all(timings[name] >= 0 for name in ("queue_seconds", "first_token_seconds", "total_seconds"))
        assert timings["total_seconds"] < 60
    values = [line.rpartition(" ")[2] for line in server.http.get("/metrics").text.splitlines() if line[:1] != "#"]
    assert values and all(float(value) >= 0 for value in values)
    assert server.http.get("/ready").status_code == 200 and server.stop() == 0


# ---------------------------------------------------------------- templates, grammars, load


def test_a_template_that_does_not_end_is_stopped(server):
    """The template's process is killed; other conversations are answered meanwhile and afterwards."""
    bomb, plain = ({"messages": [{"role": "user", "content": text}], "max_tokens": 1} for text in ("bomb", "hi"))
    begun = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        bombs = [pool.submit(server.post, "/v1/chat/completions", **bomb) for _ in range(2)]
        assert server.post("/v1/chat/completions", **plain).status_code == 200
        health = httpx.get(f"{server.url}/health", timeout=2)
        responses = [future.result() for future in bombs]
    assert health.status_code == 200 and time.monotonic() - begun < 10
    for response in responses:
        assert response.status_code == 400 and "template" in response.json()["error"]["message"], response.text
    assert server.post("/v1/chat/completions", **plain).status_code == 200


@pytest.mark.parametrize("value", [{"regex": "(a|" * 200 + "b" + ")*" * 200}, {"grammar": "start: start"},
                                   {"json": {"$ref": "#"}}, {"regex": "(" * 400}], ids=str)  # fmt: skip
def test_grammars_without_an_end_are_refused(server, value):
    response = server.post("/v1/completions", prompt="x", max_tokens=4, structured_outputs=value)
    assert response.status_code == 400 and response.json()["error"]["param"] == "structured_outputs"
    assert server.complete("x", max_tokens=1)


@pytest.mark.parametrize("options", [{"structured_outputs": {"regex": "aaaa"}}, {"num_beams": 2, "max_tokens": 300}])
def test_options_that_leave_no_token_are_an_error_of_the_request(server, options):
    """In a stream, too: as an event after the first ones, or as its response if the sample has ended before them."""
    fields = {"prompt": "x", "max_tokens": 8, "no_repeat_ngram_size": 1, "ignore_eos": True, **options}
    response = server.post("/v1/completions", **fields)
    error = response.json()["error"]
    assert response.status_code == 400 and error["type"] == "invalid_request_error" and "Omit one" in error["message"]
    if "num_beams" not in options:
        stream = server.post("/v1/completions", stream=True, **fields)
        if stream.status_code == 200:
            *_, event, done = stream.text.split("\n\n")[:-1]
            assert json.loads(event.removeprefix("data: ")) == {"error": error} and done == "data: [DONE]"
        else:
            assert stream.json() == {"error": error}


def test_a_request_has_the_same_bytes_fifty_times_under_load(server):
    """Seeded samples and their log-probabilities, while requests of other lengths come and go."""
    body = {"prompt": "the same again", "max_tokens": 12, "temperature": 0.9, "seed": 11, "n": 2, "logprobs": 1}
    others = [{"prompt": f"{i} " * (i % 23 + 1), "max_tokens": 5 + 7 * (i % 5), "temperature": 1} for i in range(50)]
    alone = [choice["text"] for choice in server.post("/v1/completions", **body).json()["choices"]]
    with ThreadPoolExecutor(6) as pool:  # 12 sequences, the queue's limit
        noise = [pool.submit(server.post, "/v1/completions", **other) for other in others]
        replies = [pool.submit(server.post, "/v1/completions", **body) for _ in range(50)]
        texts = {tuple(choice["text"] for choice in future.result().json()["choices"]) for future in replies}
        assert texts == {tuple(alone)} and len(set(alone)) == 2
        assert all(future.result().status_code == 200 for future in noise)
