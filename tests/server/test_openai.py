"""The unmodified ``openai`` package against the server: its parsers, its exceptions, its retries."""

import asyncio
import json
import math
import threading
import time
from typing import Literal

import pydantic
import pytest

from tests.server.conftest import KEYS, LIMITS
from tests.support.server import CALL, THINKING_CALL, forced, open_stream

openai = pytest.importorskip("openai")

HELLO = [{"role": "user", "content": "hello"}]
WEATHER = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": WEATHER}]
STOP, START, END, CALL_ID = 256, 257, 258, 259  # tokens of the marks


def options(server, **changes):
    return {"base_url": f"{server.url}/v1", "api_key": KEYS[0], "max_retries": 0, **changes}


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(**options(server)) as opened:
        yield opened


def arguments(*tokens):
    """Return ``forced`` as arguments of the package: a field that OpenAI's API does not have is in ``extra_body``."""
    fields = forced(*tokens)
    size = fields.pop("no_repeat_ngram_size")
    return {**fields, "extra_body": {"no_repeat_ngram_size": size}}


# ---------------------------------------------------------------- generation


def test_completion(client):
    reply = client.completions.create(model="tiny", prompt="-", logprobs=2, **arguments(*b"ABC"))
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == ("ABC", "length")
    assert reply.choices[0].logprobs.tokens == list("ABC") and len(reply.choices[0].logprobs.top_logprobs[0]) == 3
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (1, 3, 4)
    assert reply.usage.prompt_tokens_details.cached_tokens == 0 and reply.model == "tiny"


def test_stream_ends_with_the_usage(client):
    stream = client.completions.create(
        model="tiny", prompt="-", stream=True, stream_options={"include_usage": True}, **arguments(*b"ABC")
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "ABC"
    assert last.choices == [] and last.usage.completion_tokens == 3 and all(chunk.usage is None for chunk in chunks)


def test_chat_and_its_stream_agree(client):
    body = {"model": "tiny", "messages": HELLO, "max_completion_tokens": 12, "temperature": 0, "logprobs": True}
    reply = client.chat.completions.create(**body, top_logprobs=2)
    *chunks, last = client.chat.completions.create(
        **body, top_logprobs=2, stream=True, stream_options={"include_usage": True}
    )
    choice, parts = reply.choices[0], [chunk.choices[0] for chunk in chunks]
    assert choice.message.role == parts[0].delta.role == "assistant"
    assert choice.message.content == "".join(part.delta.content or "" for part in parts)
    assert choice.finish_reason == parts[-1].finish_reason == "length"
    streamed = [entry for part in parts if part.logprobs for entry in part.logprobs.content]
    assert streamed == choice.logprobs.content and len(streamed) == reply.usage.completion_tokens == 12
    assert reply.usage.prompt_tokens == last.usage.prompt_tokens


def test_async_client(server):
    async def main():
        async with openai.AsyncOpenAI(**options(server)) as client:
            body = {"model": "tiny", "messages": HELLO, **arguments(*b"ABC")}
            stream = await client.chat.completions.create(stream=True, **body)
            streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            replies = await asyncio.gather(*(client.chat.completions.create(**body) for _ in range(4)))
            return [streamed, *(reply.choices[0].message.content for reply in replies)]

    assert asyncio.run(main()) == ["ABC"] * 5


def test_a_stream_that_is_left_ends_its_request(client, server):
    stream = client.completions.create(
        model="tiny", prompt="left", max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert server.cache()["sequences"]
    stream.close()
    server.wait_for(lambda state: not state["sequences"], 2.0)


# ---------------------------------------------------------------- tools


def test_tool_call(client):
    body = {"model": "tiny", "messages": HELLO, "tools": TOOLS, **arguments(*b"OK", START, CALL_ID, END)}
    choice = client.chat.completions.create(**body).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "OK")
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather") and call.id
    assert json.loads(call.function.arguments) == {"city": "Rome"}


def test_tool_call_in_a_stream(client):
    body = {"messages": HELLO, "tools": TOOLS, **arguments(*b"OK", START, CALL_ID, END, STOP)}
    with client.chat.completions.stream(model="tiny", **body) as stream:
        final = stream.get_final_completion().choices[0]
    assert (final.finish_reason, final.message.content) == ("tool_calls", "OK")
    (call,) = final.message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Rome"} and call.function.name == "get_weather"


def test_a_conversation_with_a_call_and_its_result(client):
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
        ]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]  # fmt: skip
    reply = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS, **arguments(*b"ABC"))
    assert reply.choices[0].message.content == "ABC" and reply.choices[0].message.tool_calls is None


def test_tool_choice_none_leaves_the_text(client):
    body = {"messages": HELLO, "tools": TOOLS, "tool_choice": "none", **arguments(START, CALL_ID, END)}
    choice = client.chat.completions.create(model="tiny", **body).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.content == f"{CALL}</tool_call>", "the first mark is a special token, which has no text"


def test_reasoning_and_a_call(thinker):
    """A model writes thoughts, then a call; both are in the response and in the stream."""
    body = {"model": "tiny", "messages": HELLO, "tools": TOOLS, **arguments(*THINKING_CALL)}
    with openai.OpenAI(**options(thinker)) as client:
        reply = client.chat.completions.create(**body)
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**body, stream=True)]
    choice, (call,) = reply.choices[0], reply.choices[0].message.tool_calls
    assert (choice.message.reasoning_content, choice.message.content, choice.finish_reason) == (
        "XY",
        None,
        "tool_calls",
    )
    assert call.function.name == "get_weather" and json.loads(call.function.arguments) == {"city": "Rome"}
    assert reply.usage.completion_tokens_details.reasoning_tokens == 4
    assert "".join(getattr(chunk.delta, "reasoning_content", "") for chunk in chunks) == "XY"
    assert chunks[-1].finish_reason == choice.finish_reason == "tool_calls"


# ---------------------------------------------------------------- structured output

ENUMS = {"ok": {"type": "boolean"}, "color": {"enum": ["red", "green"]}}
SCHEMA = {"type": "object", "properties": ENUMS, "required": ["ok", "color"], "additionalProperties": False}


def test_structured_output(client):
    """A random model writes an object of the schema, in both forms of a response, and ends by itself."""
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    body = {"model": "tiny", "messages": HELLO, "response_format": form, "temperature": 0.8, "seed": 4}
    reply = client.chat.completions.create(**body)
    value = json.loads(reply.choices[0].message.content)
    assert set(value) == {"ok", "color"} and isinstance(value["ok"], bool) and value["color"] in ("red", "green")
    assert reply.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(**body) as stream:
        assert stream.get_final_completion().choices[0].message.content == reply.choices[0].message.content


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=str)
def test_required_tool_call(client, choice):
    """A random model calls the function, with arguments of its schema."""
    parameters = {**SCHEMA, "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]
    body = {"model": "tiny", "messages": HELLO, "tools": tools, "tool_choice": choice, "temperature": 0.8, "seed": 4}
    answer = client.chat.completions.create(**body).choices[0]
    (call,) = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    assert call.function.name == "get_weather" and json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")


def test_strict_call_that_the_model_chooses(client):
    """A random model writes free text; after the mark, which a bias makes likely, it writes a call of the schema."""
    parameters = {**SCHEMA, "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters, "strict": True}}]
    body = {"messages": HELLO, "tools": tools, "parallel_tool_calls": False, "temperature": 0.8, "seed": 4}
    answer = client.chat.completions.create(model="tiny", **body, logit_bias={str(START): 100}).choices[0]
    (call,) = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls" and json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    text = arguments(*b"OK", STOP)
    with client.chat.completions.stream(model="tiny", messages=HELLO, tools=tools, **text) as stream:
        final = stream.get_final_completion().choices[0]
    assert (final.finish_reason, final.message.content) == ("stop", "OK")


def test_required_call_of_a_tool_with_definitions(client):
    """References of the parameters are those of its own schema, also of one of several tools."""

    class Point(pydantic.BaseModel):
        axis: Literal["x", "y"]

    class Line(pydantic.BaseModel):
        start: Point
        end: Point

    body = {"messages": HELLO, "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0.8, "seed": 4}
    for tools in ([openai.pydantic_function_tool(Line)], [openai.pydantic_function_tool(Line), *TOOLS]):
        choice = client.chat.completions.create(model="tiny", **body, tools=tools).choices[0]
        (call,) = choice.message.tool_calls
        if call.function.name == "Line":
            assert Line.model_validate_json(call.function.arguments)
        else:
            assert len(tools) == 2


def test_bad_schema_is_a_bad_request(client):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": 5}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=HELLO, response_format=form)
    assert caught.value.param == "response_format"


# ---------------------------------------------------------------- other routes


def test_embeddings_have_the_same_numbers_in_both_encodings(client, llm):
    """The package requests base64 unless another encoding is given, and decodes it."""
    texts = ["one", "another text"]
    packed = client.embeddings.create(model="tiny", input=texts)
    plain = client.embeddings.create(model="tiny", input=texts, encoding_format="float")
    for first, second, expected in zip(packed.data, plain.data, llm.embed(texts).tolist(), strict=True):
        assert first.embedding == pytest.approx(second.embedding, abs=1e-7)
        assert second.embedding == pytest.approx(expected, abs=1e-5)
        assert math.isclose(sum(value * value for value in expected), sum(v * v for v in first.embedding), rel_tol=1e-3)
    assert plain.usage.prompt_tokens == len("".join(texts))
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="tiny", input=[10**6])
    assert caught.value.param == "input"


def test_models(client):
    (model,) = client.models.list().data
    assert model.id == "tiny" and client.models.retrieve("tiny").owned_by == "kvad"
    assert model.root == "tiny", "the name, no path of the server"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-5")


def test_responses(client):
    body = {"model": "tiny", "input": "hello", "temperature": 0, "max_output_tokens": 8}
    reply = client.responses.create(**body, instructions="be brief")
    assert reply.status == "incomplete" and reply.incomplete_details.reason == "max_output_tokens"
    assert reply.usage.output_tokens == 8 and reply.output_text
    events = list(client.responses.create(**body, instructions="be brief", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == reply.output_text == events[-1].response.output_text
    assert events[-1].response.usage.input_tokens == reply.usage.input_tokens
    check_items(events, ["message"])


def test_a_streamed_response_without_text_has_no_message(client):
    parameters = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"]}
    tool = {"type": "function", "name": "f", "parameters": {**parameters, "additionalProperties": False}}
    body = {"model": "tiny", "input": "hello", "temperature": 0, "max_output_tokens": 200}
    events = list(
        client.responses.create(**body, tools=[tool], tool_choice={"type": "function", "name": "f"}, stream=True)
    )
    check_items(events, ["function_call"])


def test_strict_functions_of_responses(client):
    """A schema with a keyword that no grammar has is refused if the function is strict."""
    tool = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"x": {"not": {}}}}}
    body = {"model": "tiny", "input": "hello", "max_output_tokens": 1}
    with pytest.raises(openai.BadRequestError, match=r"- tools: failed to compile JSON schema: .*not") as caught:
        client.responses.create(**body, tools=[{**tool, "strict": True}])
    assert caught.value.param == "tools"
    assert client.responses.create(**body, tools=[tool]).output
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**body, tools=[{**tool, "strict": "yes"}])
    assert caught.value.param == "tools[0].strict"


def check_items(events, types):
    """The items of the last event are those that were announced, each at its index."""
    output = events[-1].response.output
    assert [item.type for item in output] == types
    announced = [(event.output_index, event.item.id) for event in events if event.type == "response.output_item.added"]
    assert announced == [(index, item.id) for index, item in enumerate(output)]


# ---------------------------------------------------------------- errors and retries


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        (openai.BadRequestError, {"prompt": "x", "temperature": -1}, "temperature"),
        (openai.BadRequestError, {"prompt": "x", "n": 0}, "n"),
        (openai.BadRequestError, {"prompt": "x", "suffix": "y"}, "suffix"),
        (openai.NotFoundError, {"prompt": "x", "model": "gpt-5"}, "model"),
    ],
)
def test_errors_have_the_class_of_the_package(client, kind, fields, param):
    with pytest.raises(kind) as caught:
        client.completions.create(**{"model": "tiny", **fields})
    assert caught.value.param == param and param in caught.value.message
    assert caught.value.body["type"] in ("invalid_request_error", "not_found_error") and caught.value.code


def test_a_wrong_key_is_an_authentication_error(server):
    with openai.OpenAI(**options(server, api_key="not-a-key")) as other, pytest.raises(openai.AuthenticationError):
        other.models.list()


def test_an_error_inside_a_stream_is_raised(client):
    """A request that exceeds its time ends its stream with an error event."""
    stream = client.completions.create(
        model="tiny", prompt="x", max_tokens=4000, stream=True, extra_body={"timeout": 0.2, "ignore_eos": True}
    )
    with pytest.raises(openai.APIError, match="time limit"):
        list(stream)


def test_an_error_inside_the_stream_of_a_response_is_an_event(client):
    """As in OpenAI's API: ``error``, then ``response.failed`` with the text that was generated."""
    form = {"type": "json_schema", "name": "long", "schema": {"type": "string", "minLength": 3000}}
    body = {"model": "tiny", "input": "x", "max_output_tokens": 4000, "text": {"format": form}}
    *events, error, failed = client.responses.create(**body, stream=True, extra_body={"timeout": 0.3})
    assert (error.type, error.code, error.param) == ("error", "timeout", None) and "time limit" in error.message
    assert (failed.type, failed.response.status, failed.response.error.code) == ("response.failed", "failed", "timeout")
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text and failed.response.output_text == text and failed.response.output[0].status == "incomplete"
    assert [event.sequence_number for event in (*events, error, failed)] == list(range(len(events) + 2))


def test_retry_after_is_honored(server):
    """While a key has its maximum of requests, the next one gets a 429; the package tries again after a second."""
    limit = LIMITS["max_requests_per_key"]
    opened = [open_stream(server, "x", key=KEYS[1], max_tokens=4000) for _ in range(limit)]
    server.wait_for(lambda state: state["requests"] == limit)
    with openai.OpenAI(**options(server, api_key=KEYS[1])) as client, pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(model="tiny", prompt="x")
    assert caught.value.response.headers["retry-after"] == "1"
    with openai.OpenAI(**options(server, api_key=KEYS[1], max_retries=2)) as client:
        waits = threading.Timer(0.4, lambda: [connection.close() for connection in opened])
        waits.start()
        begun = time.monotonic()
        assert client.completions.create(model="tiny", prompt="x", max_tokens=1).usage.completion_tokens == 1
    assert 0.9 < time.monotonic() - begun < 5, "without Retry-After, the package waits half a second"
    waits.join()
