"""Limits of requests, malformed bodies, clients that disappear or are slow, deadlines, isolation of API keys."""

import copy
import dataclasses
import json
import socket
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest

from kvad.engine.execution import grammar
from kvad.server import run
from kvad.server.api import ApiError, schema
from kvad.server.api.text_threads import count_chars
from kvad.server.limits import FIXED_LIMITS, ServerLimits
from kvad.text.chat_template import RenderLimits
from tests.server.conftest import KEYS, LIMITS, MAX_SEQS
from tests.support.server import open_stream, parse_events, reset

HUGE = 10**9
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f"}}]}
TOOL = {"type": "function", "function": {"name": "f"}}


def error_of(response):
    """Return the error of a response, which has exactly OpenAI's fields."""
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}, body
    assert body["error"]["message"] and "Traceback" not in body["error"]["message"]
    return body["error"]


# ---------------------------------------------------------------- limits


def sized(fields):
    """Return a body of exactly the largest number of bytes, or one more."""
    text = json.dumps({**fields, "user": ""})
    return lambda size: json.dumps({**fields, "user": "x" * (size - len(text))})


def completion(**fields):
    return COMPLETIONS, {"prompt": "x", "max_tokens": 1, **fields}


def chat(**fields):
    return CHAT, {"messages": [USER], "max_tokens": 1, **fields}


def filled(size, **fields):
    """Return a chat whose messages and tools have this many characters; most are in the last object's function."""
    fields = copy.deepcopy(fields)
    *_, last = fields.get("tools", fields["messages"])
    function = last["function"] if "function" in last else last["tool_calls"][0]["function"]
    name = "description" if "function" in last else "arguments"
    function[name] = ""
    function[name] = "x" * (size - count_chars([fields["messages"], fields.get("tools")]))
    return chat(**fields)


CASES = {  # limit -> the fields that an error may name, and requests with a size
    "max_prompts": ("prompt", lambda n: completion(prompt=["x"] * n),
                    lambda n: ("/v1/embeddings", {"input": ["x"] * n})),
    "max_prompt_tokens": ("prompt", lambda n: completion(prompt=[65] * n), lambda n: completion(prompt="x" * n)),
    "max_prompt_chars": ("prompt", lambda n: ("/tokenize", {"prompt": "x" * n}),
                         lambda n: ("/tokenize", {"messages": [{"role": "user", "content": "x" * (n - 15)}]}),
                         lambda n: filled(n, messages=[USER, CALL]),
                         lambda n: filled(n, messages=[USER], tools=[TOOL])),
    "max_messages": ("messages", lambda n: chat(messages=[USER] * n)),
    "max_n": ("n", lambda n: completion(n=n, temperature=1), lambda n: completion(best_of=n), lambda n: chat(n=n)),
    "max_sequences": ("n", lambda n: completion(prompt=["x"] * min(n, 8), n=n // 8 or 1) if n <= 16 else
                      completion(prompt=["x"] * 6, n=3)),
    "max_logprobs": ("logprobs", lambda n: completion(logprobs=n), lambda n: chat(logprobs=True, top_logprobs=n)),
    "max_echo_logprobs": ("logprobs", lambda n: completion(prompt=[[65] * -(-n // 48)] * 4, n=2, temperature=1,
                                                           echo=True, logprobs=5)),
    "max_stop": ("stop", lambda n: completion(stop=["y"] * n), lambda n: completion(stop_token_ids=[7] * n)),
    "max_stop_chars": ("stop", lambda n: completion(stop="y" * n)),
    "max_logit_bias": ("logit_bias", lambda n: completion(logit_bias={str(i): 1 for i in range(n)})),
    "max_tools": ("tools", lambda n: chat(tools=[TOOL] * n)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_limit(server, name):
    """At the limit a request is served; one more is a 400 that names field and limit; 1e9 changes nothing."""
    _, *makers = CASES[name]
    param = CASES[name][0]
    for make in makers:
        path, body = make(LIMITS[name])
        response = server.http.post(path, json=body)
        assert response.status_code == 200, response.text
        path, body = make(LIMITS[name] + 1)
        response = server.http.post(path, json=body)
        assert response.status_code == 400, (body, response.text)
        error = error_of(response)
        assert param in error["param"] or error["param"] in ("input", "messages", "best_of", "stop_token_ids"), error
        assert f"{LIMITS[name]:,}" in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"n": HUGE}, {"best_of": HUGE}, {"logprobs": HUGE}, {"top_k": 1 << 40}, {"seed": 1 << 80},
        {"min_tokens": 1 << 70}, {"temperature": 1e308}, {"logit_bias": {str(HUGE): 1}}, {"logit_bias": {"1": 1e9}},
        {"logit_bias": {"x": 1}},
        {"stop_token_ids": [HUGE]}, {"prompt": [HUGE]}, {"prompt": [-1]}, {"n": -1}, {"n": True}, {"n": 1.5},
        {"n": "2"}, {"max_tokens": -1}, {"num_beams": HUGE}, {"no_repeat_ngram_size": 1 << 40}, {"timeout": 1e9},
        {"timeout": -1}, {"prompt": []}, {"prompt": ""}, {"prompt": [[]]}, {"prompt": None}, {"prompt": {"a": 1}},
        {"stop": {"a": 1}},
        {"cache_salt": "x" * 300}, {"session": "../../etc/passwd"}, {"session": "a/b"}, {"session": "x" * 65},
        {"session": "."}, {"repetition_penalty": 0}, {"top_p": 2}, {"stream_options": {"other": 1}}, {"stream": "yes"},
        {"response_format": {"type": "xml"}}, {"suffix": "x"}, {"chat_template": "{{ x }}"}, {"prompt_embeds": "AAAA"},
    ],
    ids=str,
)  # fmt: skip
def test_value_out_of_range(server, fields):
    """A 400 that names the field, for every number, text and id beyond what is possible."""
    response = server.post(COMPLETIONS, **{"prompt": "x", "max_tokens": 1, **fields})
    error = error_of(response)
    assert response.status_code == 400, error
    (name,) = fields
    assert error["param"] is None or error["param"].split(".")[0].split("[")[0] in (name, "prompt"), error
    assert name.split("_")[0] in error["message"] or error["param"] == name, error


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
        ("/v1/responses", {"input": "x", "top_logprobs": 2}, "top_logprobs"),
        ("/v1/responses", {"input": "x", "text": {"verbosity": "low"}}, "text.verbosity"),
        ("/tokenize", {"messages": [USER], "add_special_tokens": True}, "add_special_tokens"),
    ],
)  # fmt: skip
def test_a_field_without_effect_is_refused(server, path, fields, param):
    response = server.post(path, **fields)
    assert response.status_code == 400 and error_of(response)["param"] == param


def test_huge_numbers_that_are_possible(server):
    """Numbers without a limit reserve no memory."""
    body = {"prompt": [65] * 590, "max_tokens": HUGE, "seed": -1, "top_k": HUGE, "logit_bias": {"256": 1000}}
    reply = server.post(COMPLETIONS, **body).json()
    assert reply["usage"]["completion_tokens"] == 1 and reply["choices"][0]["finish_reason"] == "stop"


def test_every_limit_has_a_test():
    elsewhere = {
        "max_body_bytes", "max_schema_bytes", "max_queued_requests", "max_queued_tokens", "max_large_texts",
        "max_unread_tokens", "max_requests_per_key", "max_sessions", "max_session_bytes", "request_seconds",
        "header_seconds", "body_seconds",
    }  # fmt: skip
    assert {field.name for field in dataclasses.fields(ServerLimits)} == set(CASES) | elsewhere == set(LIMITS)


def test_fixed_limits_are_those_of_the_code():
    """The table of ``kvad serve --limits`` names them, with the values that the code applies."""
    values = {limit.name: limit.value for limit in FIXED_LIMITS}
    render = RenderLimits()
    assert values["head_bytes"] == run.MAX_HEAD and values["compile_seconds"] == grammar.MAX_COMPILE_SECONDS
    assert (values["template_steps"], values["template_seconds"]) == (render.steps, render.seconds)
    assert values["template_chars"] == render.output
    fields = {name: values[name] for name in ("num_beams", "cache_salt", "session", "request_id")}
    for name, limit in fields.items():
        for size in (limit, limit + 1):
            body = {"prompt": "x", name: size if name == "num_beams" else "x" * size}
            with pytest.raises(ApiError) if size > limit else nullcontext():
                schema.validate(schema.CompletionBody, body, ignore_unknown=False)
    rows = {name: (value, status) for name, value, status, _ in ServerLimits(max_n=5).table()}
    assert rows["max_n"] == ("5", "400") and rows["head_bytes"] == ("65,536", "431")
    assert rows.keys() == values.keys() | LIMITS.keys()


def test_body_bytes(server):
    make, limit = sized({"prompt": "x", "max_tokens": 1}), LIMITS["max_body_bytes"]
    headers = {"content-type": "application/json"}
    assert server.http.post(COMPLETIONS, content=make(limit), headers=headers).status_code == 200
    response = server.http.post(COMPLETIONS, content=make(limit + 1), headers=headers)
    assert response.status_code == 413 and f"{limit:,}" in error_of(response)["message"]
    chunks = iter([make(limit).encode(), b" "])  # without a Content-Length
    response = server.http.post(COMPLETIONS, content=chunks, headers=headers)
    assert response.status_code == 413 and error_of(response)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nHost: 127.0.0.1\r\n"
    for length in ("1" * 30, "-1", "abc"):
        status = raw_status(server, f"{head}Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n")
        assert 400 <= status < 500


def test_schema_bytes(server):
    limit = LIMITS["max_schema_bytes"]
    for size, status in ((limit - 1, 200), (limit, 200), (limit + 1, 400), (30 * limit, 400)):
        regex = "a" * (size - len(json.dumps({"regex": ""})))
        response = server.post(COMPLETIONS, prompt="x", max_tokens=1, structured_outputs={"regex": regex})
        assert response.status_code == status, response.text
    assert f"{limit:,} bytes" in error_of(response)["message"]


def test_a_text_beyond_a_limit_of_its_grammar_is_the_error_of_its_request(server):
    """Each letter adds expressions to the lexer; after about 110 there are too many. Neighbors are not affected."""
    fields = {"structured_outputs": {"regex": "([a-z]{1,90}){1,90}"}, "ignore_eos": True, "max_tokens": 300}
    alone = server.complete("a neighbor", max_tokens=150)["choices"]
    with ThreadPoolExecutor(1) as pool:
        neighbor = pool.submit(server.complete, "a neighbor", max_tokens=150)
        response = server.post(COMPLETIONS, prompt="x", **fields)
        assert neighbor.result()["choices"] == alone
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert (error["type"], error["param"]) == ("invalid_request_error", "structured_outputs")
    assert f"limit step_lexer_fuel of {grammar.LIMITS['step_lexer_fuel']:,}" in error["message"]
    body = {"messages": [USER], **fields, "stream": True}
    first, *_, last, done = parse_events(server.post(CHAT, **body).text)
    assert first["choices"][0]["delta"]["content"] and done == "[DONE]"
    assert last == {"error": error}


# ---------------------------------------------------------------- malformed requests

MALFORMED = {
    "not JSON": b"{prompt: x}",
    "empty": b"",
    "a list": b'[{"prompt": "x"}]',
    "a number": b"1",
    "null": b"null",
    "NaN": b'{"prompt": "x", "temperature": NaN}',
    "infinity": b'{"prompt": "x", "temperature": -Infinity}',
    "1e400": b'{"prompt": "x", "temperature": 1e400}',
    "duplicate key": b'{"prompt": "x", "prompt": "y"}',
    "duplicate inner key": b'{"prompt": "x", "logit_bias": {"1": 1, "1": 2}}',
    "not UTF-8": b'{"prompt": "\xff\xfe"}',
    "UTF-16": '{"prompt": "x"}'.encode("utf-16")[:-1],
    "lone surrogate": b'{"prompt": "\\ud800 x"}',
    "lone surrogate in stop": b'{"prompt": "x", "stop": "\\udfff"}',
    "lone surrogate in key": b'{"prompt": "x", "\\ud800": 1}',
    "control characters": b'{"prompt": "x\x00\n"}',
    "huge integer": b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    "deep list": b'{"prompt": ' + b"[" * 20000 + b"]" * 20000 + b"}",
    "deep object": b'{"logit_bias": ' + b'{"a":' * 9000 + b"1" + b"}" * 9000 + b"}",
    "unclosed": b'{"prompt": "' + b"x" * 1000,
    "unknown field": b'{"prompt": "x", "max_token": 5}',
    "prototype": b'{"prompt": "x", "__class__": {"__init__": 1}}',
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize"])
def test_malformed_body(server, path):
    """Always a 400 with the error's body, at once, never a 5xx.

    A response of two packets takes 40 ms if Nagle's algorithm is on.
    """
    seconds = []
    for name, body in MALFORMED.items():
        if path == CHAT:
            body = body.replace(b'"prompt": "x"', b'"messages": [{"role": "user", "content": "x"}]')
        begun = time.monotonic()
        response = server.http.post(path, content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400, (name, response.text)
        assert error_of(response)["type"] == "invalid_request_error", name
        seconds.append(time.monotonic() - begun)
    assert statistics.median(seconds) < 0.03 and max(seconds) < 2.0, seconds


def test_unknown_field_is_named_with_the_nearest(server):
    error = error_of(server.post(COMPLETIONS, prompt="x", max_token=5))
    assert error["param"] == "max_token" and "max_tokens" in error["message"]
    assert error_of(server.post(CHAT, messages=[USER], **{"x\x1b[31m\n": 1}))["code"] == "unknown_parameter"


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonx"])
def test_content_type_must_be_json(server, content_type):
    headers = {} if content_type is None else {"content-type": content_type}
    response = server.http.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=headers)
    assert response.status_code == 415 and error_of(response)["code"] == "content_type"


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
        [{"role": "user", "content": [1]}],
        [{"role": "user", "content": {"a": 1}}],
        [{"content": "x"}],
        [{"role": "user"}],
        [{"role": 1, "content": "x"}],
        [1],
        [],
        [{"role": "assistant", "content": "", "tool_calls": [1]}],
        [{"role": "assistant", "content": "", "tool_calls": "x"}],
        [{"role": "user", "content": "x\ud800"}],
    ],
    ids=str,
)
def test_odd_messages_are_no_server_errors(server, messages):
    response = server.http.post(
        CHAT, content=json.dumps({"messages": messages}), headers={"content-type": "application/json"}
    )
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        error_of(response)


# ---------------------------------------------------------------- clients that disappear


@pytest.mark.parametrize("close", [reset, socket.socket.close])
def test_blocks_of_clients_that_disappear_are_freed(server, close):
    """While decoding, in prefill, and in a group: no block is left, and other requests have their outputs."""
    expected = server.complete("not disturbed", max_tokens=300)["choices"][0]["text"]
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(server.complete, "not disturbed", max_tokens=300)
        decoding = [open_stream(server, f"{i} text", max_tokens=3000) for i in range(4)]
        for connection in decoding:
            assert b"200 OK" in connection.recv(4096)
        prefill = [open_stream(server, f"{i}" + "long" * 140, max_tokens=3000) for i in range(4)]
        for connection in decoding + prefill:
            close(connection)
        assert other.result()["choices"][0]["text"] == expected
    state = server.wait_for(lambda state: not state["sequences"], 3.0)
    assert state["cache"]["used"] == [0] and "u" not in state["pools"][0]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_with_pipelined_requests_that_disappears(server, stream):
    connection = open_stream(server, "pipelined", max_tokens=4000, stream=stream)
    server.wait_for(lambda state: state["sequences"])
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    time.sleep(0.05)
    reset(connection)
    server.wait_for(lambda state: not state["sequences"], 1.0)


def test_a_queued_client_that_disappears_leaves_the_queue(server):
    """Requests beyond the running ones wait; the ones whose client left are never computed."""
    running = [open_stream(server, f"{i} runs", max_tokens=4000) for i in range(MAX_SEQS)]
    for connection in running:
        assert b"200 OK" in connection.recv(4096)
    queued = [open_stream(server, f"{i} waits", max_tokens=4000) for i in range(3)]
    server.wait_for(lambda state: state["scheduler"]["waiting"] == 3)
    for connection in queued:
        reset(connection)
    state = server.wait_for(lambda state: state["scheduler"]["waiting"] == 0, 3.0)
    assert [sequence["state"] for sequence in state["sequences"]] == ["running"] * MAX_SEQS
    for connection in running:
        reset(connection)
    state = server.wait_for(lambda state: not state["sequences"], 3.0)
    assert state["cache"]["used"] == [0] and state["requests"] == 0


# ---------------------------------------------------------------- slow clients, deadlines, full queues


def raw_status(server, request, *, wait=5.0):
    """Send bytes and return the status of the response; 0 if the connection is closed without one."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=wait) as connection:
        connection.sendall(request.encode() if isinstance(request, str) else request)
        data = connection.recv(65536)
        return int(data.split()[1]) if data else 0


def test_a_slow_head_is_closed(server):
    begun = time.monotonic()
    assert raw_status(server, "GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n") == 0
    assert LIMITS["header_seconds"] * 0.9 < time.monotonic() - begun < 4


def test_a_slow_body_is_a_408(server):
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEYS[0]}\r\n"
    begun = time.monotonic()
    status = raw_status(server, f"{head}Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{{")
    assert status == 408 and LIMITS["body_seconds"] * 0.9 < time.monotonic() - begun < 4


def test_a_deadline_of_the_client_is_a_408_or_an_error_event(server):
    body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "timeout": 0.15}
    response = server.post(COMPLETIONS, **body)
    assert response.status_code == 408 and error_of(response)["code"] == "timeout"
    response = server.post(COMPLETIONS, **body, stream=True)
    *events, error, done = parse_events(response.text)
    assert response.status_code == 200 and events and error["error"]["code"] == "timeout" and done == "[DONE]"
    server.wait_for(lambda state: not state["sequences"], 2.0)


def test_a_full_queue_is_a_429(server):
    """Requests and tokens that wait are limited; the others are refused at once and may try again."""
    prompts = [[number] * 590 for number in range(1, 8)]
    body = {"prompt": prompts[:5], "max_tokens": 64, "temperature": 0, "ignore_eos": True}
    with ThreadPoolExecutor(4) as pool:
        responses = list(pool.map(lambda body: server.http.post(COMPLETIONS, json=body), [body] * 4))
    statuses = sorted(response.status_code for response in responses)
    assert statuses[0] == 200 and statuses[-1] == 429, statuses
    for response in responses:
        if response.status_code == 429:
            assert error_of(response)["code"] == "queue_full" and response.headers["retry-after"] == "1"


# ---------------------------------------------------------------- isolation of API keys


def test_keys_share_no_prefixes(server):
    """Blocks are shared only within a key and a salt."""
    text = "a secret of the first key, of more than three blocks of sixteen"

    def cached(key, **fields):
        response = server.http.post(
            COMPLETIONS, json={"prompt": text, "max_tokens": 1, **fields}, headers={"authorization": f"Bearer {key}"}
        )
        return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached(KEYS[0]), cached(KEYS[0])] == [0, 48]
    assert [cached(KEYS[1]), cached(KEYS[1])] == [0, 48]
    assert [cached(KEYS[0], cache_salt="other"), cached(KEYS[0], cache_salt="other")] == [0, 48]


def test_a_session_reuses_nothing_of_another_salt(server):
    prompt = list(b"a text of a session that is kept under one salt, and sent with another one")
    fields = {"max_tokens": 4, "session": "salted", "timings": True}

    def num_cached(salt):
        reply = server.complete(prompt, cache_salt=salt, **fields)
        return reply["usage"]["prompt_tokens_details"]["cached_tokens"], reply["choices"][0]["text"]

    (first, text), (again, same), (other, equal) = num_cached("one"), num_cached("one"), num_cached("two")
    assert (first, other) == (0, 0) and again > 0 and text == same == equal


def test_sessions_of_keys_are_separate(server):
    """The same name of another key is another session; its file is in another folder."""
    body = {
        "prompt": "a session with some text, of one or two blocks",
        "max_tokens": 4,
        "session": "talk",
        "timings": True,
    }
    replies = []
    for key in KEYS:
        response = server.http.post(COMPLETIONS, json=body, headers={"authorization": f"Bearer {key}"})
        replies.append(response.json()["timings"])
    assert [reply["cached_tokens"] for reply in replies] == [0, 0]
    assert len(list((server.session_folder / "server").glob("*/talk*"))) == 2
