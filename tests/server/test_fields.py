"""Fields of requests: values that request nothing, unknown fields inside others, names of fields in errors."""

import pytest

from kvad.server.api import responses, schema
from tests.support.server import ServerProcess, write_translator

CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings",
)  # fmt: skip
USER = {"role": "user", "content": "hi"}
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
REQUIRED = {
    CHAT: {"messages": [USER], "max_tokens": 1}, COMPLETIONS: {"prompt": "x", "max_tokens": 1},
    RESPONSES: {"input": "x", "max_output_tokens": 1}, EMBEDDINGS: {"input": "x"}, "/tokenize": {"prompt": "x"},
}  # fmt: skip


def refusal(server, path, fields):
    """Return param and message of a 400."""
    response = server.post(path, **{**REQUIRED.get(path, {}), **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["message"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"n": None, "stream": None, "reasoning_effort": None, "timings": None}),
        (COMPLETIONS, {"echo": None, "stream": None, "best_of": None, "suffix": ""}),
        (EMBEDDINGS, {"encoding_format": None, "user": None}),
        (EMBEDDINGS, {"dimensions": 64, "timeout": 20}),
        ("/tokenize", {"timeout": 20}),
        (RESPONSES, {"background": False, "top_logprobs": 0, "reasoning": None, "stream_options": None}),
        (RESPONSES, {"stream": True, "stream_options": {"include_obfuscation": False}}),
        (CHAT, {"stream": True, "stream_options": {"include_obfuscation": False}}),
        (CHAT, {"functions": [], "function_call": "none", "chat_template_kwargs": {}, "modalities": ["text"]}),
        (CHAT, {"messages": [{**USER, "name": "Ann", "function_call": None, "audio": None, "annotations": []}]}),
    ],
    ids=str,
)
def test_values_that_request_nothing_are_accepted(server, path, fields):
    response = server.post(path, **{**REQUIRED[path], **fields})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"functions": [FUNCTION]}, "functions"),
        (RESPONSES, {"background": True}, "background"),
        (RESPONSES, {"background": 0}, "background"),
        (RESPONSES, {"stream_options": {"include_obfuscation": False}}, "stream_options"),
        (CHAT, {"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        (EMBEDDINGS, {"dimensions": 32}, "dimensions"),
        (CHAT, {"response_format": {"type": "json_object", "other": 1}}, "response_format.other"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"other": 1, "schema": {}}}},
         "response_format.json_schema.other"),
        (CHAT, {"tools": [{**TOOL, "other": 1}]}, "tools[0].other"),
        (CHAT, {"tools": [TOOL, {**TOOL, "function": {**FUNCTION, "other": 1}}]}, "tools[1].function.other"),
        (CHAT, {"tools": [TOOL], "tool_choice": {**TOOL, "mode": "auto"}}, "tool_choice.mode"),
        (CHAT, {"messages": [USER, {**USER, "function_call": {"name": "f"}}]}, "messages[1].function_call"),
        ("/tokenize", {"prompt": None, "messages": [{**USER, "other": 1}]}, "messages[0].other"),
        (RESPONSES, {"tools": [{"type": "function", "name": "f", "other": 1}]}, "tools[0].other"),
        (RESPONSES, {"input": [{**USER, "other": 1}]}, "input[0].other"),
        (RESPONSES, {"text": {"format": {"type": "text", "other": 1}}}, "text.format.other"),
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
        (CHAT, {"max_tokens": 0}, "max_tokens"),
        (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
    ],
    ids=str,
)  # fmt: skip
def test_values_that_are_not_applied_are_refused(server, path, fields, param):
    assert refusal(server, path, fields)[0] == param


@pytest.mark.parametrize(
    ("path", "fields", "problem"),
    [
        (CHAT, {"tool_choice": 5}, "tool_choice: must be none, auto, required or an object that names a function"),
        (COMPLETIONS, {"prompt": [1.0]},
         "prompt: must be a text, token ids, a list of texts or a list of lists of token ids"),
        (COMPLETIONS, {"stop": [5]}, "stop: must be a text or a list of texts"),
        (RESPONSES, {"input": [5]}, "input: must be a text or a list of items"),
        (COMPLETIONS, {"logit_bias": {"int": "a"}}, "logit_bias: Input should be a valid number"),
        (RESPONSES, {"stop": "a"}, "stop: unknown field. See /openapi.json."),
        (COMPLETIONS, {"max_token": 5}, "max_token: unknown field. Did you mean 'max_tokens'? See /openapi.json."),
        (CHAT, {"response_format": {"type": "text", "x": 1}}, "response_format.x: unknown field. See /openapi.json."),
    ],
    ids=str,
)  # fmt: skip
def test_messages_of_invalid_types_and_unknown_fields(server, path, fields, problem):
    assert refusal(server, path, fields)[1] == problem


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": [USER, {"role": "user"}]}, "messages[1].content"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{**USER, "content": "x" * 601}]}, "messages"),
        (CHAT, {"messages": [{"role": "assistant", "content": None}], "continue_final_message": True}, "messages"),
        ("/detokenize", {"tokens": [65, 5000]}, "tokens"),
        (COMPLETIONS, {"overflow": "reject", "max_tokens": 10**6}, "overflow"),
        (COMPLETIONS, {"session": "beams", "num_beams": 2}, "session"),
        (COMPLETIONS, {"structured_outputs": {"regex": "a"}, "num_beams": 2}, "structured_outputs"),
        (COMPLETIONS, {"response_format": {"type": "json_object"}, "num_beams": 2}, "response_format"),
        (CHAT, {"tools": [TOOL], "tool_choice": "required", "num_beams": 2}, "tools"),
        (CHAT, {"tools": [TOOL], "tool_choice": "required", "structured_outputs": {"regex": "a"}},
         "structured_outputs"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        (EMBEDDINGS, {"input": ""}, "input"),
        (EMBEDDINGS, {"input": [[300]]}, "input"),
        (RESPONSES, {"text": {"format": {"type": "xml"}}}, "text.format"),
        (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "schema": {"properties": 5}}}}, "text.format"),
        (RESPONSES, {"input": []}, "input"),
        (RESPONSES, {"input": "x" * 601}, "input"),
        (RESPONSES, {"input": [USER, {"role": "user", "content": [1]}], "instructions": "x"}, "input[1]"),
        (RESPONSES, {"input": [USER, {"role": "user", "content": [1]}]}, "input[1]"),
        (RESPONSES, {"input": [{"role": "user"}]}, "input[0].content"),
        (RESPONSES, {"input": [USER, {"type": "function_call"}]}, "input[1].call_id"),
        (RESPONSES, {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": {}}]},
         "input[0].arguments"),
        (RESPONSES, {"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0].output"),
        (RESPONSES, {"input": [{"type": ["message"]}]}, "input[0]"),
        (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools[0]"),
        (RESPONSES, {"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ],
    ids=str,
)  # fmt: skip
def test_a_refusal_names_the_field_of_the_client(server, path, fields, param):
    named, message = refusal(server, path, fields)
    assert named == param and message.startswith(param)


def test_arguments_that_are_nested_too_deeply_are_named(server):
    deep = {"name": "f", "arguments": "[" * 2000}
    message = {"role": "assistant", "content": "", "tool_calls": [{"function": deep}]}
    named, _ = refusal(server, CHAT, {"messages": [USER, message]})
    assert named == "messages[1].tool_calls[0].function.arguments"
    item = {"type": "function_call", "call_id": "1", **deep}
    named, text = refusal(server, RESPONSES, {"input": [USER, item], "instructions": "x"})
    assert named == "input[1].arguments" and text == "input[1].arguments: nested too deeply"


@pytest.fixture
def translator(tmp_path):
    process = ServerProcess(write_translator(tmp_path / "model"))
    yield process
    process.stop()


def test_refusals_of_translations(translator):
    for fields, param in (
        ({"text": "x", "target_language": "xx"}, "target_language"),
        ({"text": "x", "source_language": "xx"}, "source_language"),
        ({"text": ["x", ""]}, "text"),
        ({"text": "x" * 65}, "text"),
        ({"text": "x", "max_tokens": 0}, "max_tokens"),
    ):
        named, message = refusal(translator, "/v1/translate", fields)
        assert named == param and message.startswith(param)
    assert refusal(translator, COMPLETIONS, {"prompt": ""})[0] == "prompt"
    assert refusal(translator, COMPLETIONS, {"echo": True, "logprobs": 1})[0] == "echo"


@pytest.mark.parametrize("key", ["01", " 1", "1_0", "-1", "", "1" * 50, "\u0661"])
def test_keys_of_logit_bias_have_one_form(server, key):
    assert refusal(server, COMPLETIONS, {"logit_bias": {key: 1}})[0] == "logit_bias"


def test_null_max_tokens_of_a_completion_is_the_context():
    """The page sends it; other fields that are null are absent."""
    body, _ = schema.validate(
        schema.CompletionBody, {"prompt": "x", "max_tokens": None, "n": None}, ignore_unknown=False
    )
    assert (body.max_tokens, body.n) == (None, 1)


def test_unknown_fields_may_be_ignored():
    fields = {"messages": [{**USER, "other": 1}], "further": 1}
    assert schema.validate(schema.ChatBody, fields, ignore_unknown=True)[1] == ["further", "messages[0].other"]
    fields = {"input": "x", "text": {"format": {"type": "text", "other": 1}}}
    body, ignored = schema.validate(schema.ResponsesBody, fields, ignore_unknown=True)
    assert ignored == ["text.format.other"] and responses._to_chat(body).messages == [{"role": "user", "content": "x"}]


def test_the_timeout_of_a_route_without_generation(server):
    response = server.post(EMBEDDINGS, input=[[65] * 600] * 8, timeout=0.001)
    assert response.status_code == 408 and response.json()["error"]["code"] == "timeout"
