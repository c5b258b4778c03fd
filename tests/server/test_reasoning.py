"""Reasoning: thoughts before an answer in every form, gpt-oss's messages, and the grammars that permit thoughts."""

import itertools
import json
from types import SimpleNamespace

import pytest

from kvad.engine import StreamChunk
from kvad.engine.scheduling import StructuredOutput
from kvad.server.api import responses
from kvad.server.api.chat import _harmony_message, check_messages
from kvad.server.api.reasoning import FORMATS, HARMONY_CHANNELS, AnswerParser, find_reasoning, thinking_variables
from kvad.server.api.schema import ResponsesBody
from kvad.server.api.structured import _after
from kvad.server.api.tool_formats import HARMONY, PLAIN_JSON, call_grammar, find_format
from kvad.server.api.tools import ToolCallParser
from tests.server.test_tools import FORMS, PLAIN, F, G, _skip_check, compiler_of  # noqa: F401  # a fixture
from tests.support.server import END_THINK, THINK, THINKING_CALL, forced, parse_events

THINKING = FORMATS[-1]
GRANITE_SENTENCE = "Here is my thought process:"
CALLS = f"<tool_call>{PLAIN}</tool_call>"
A, C, FINAL = "<|channel|>analysis<|message|>", "<|channel|>commentary<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
F_CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
BAD_CALL = '<|channel|>commentary to=functions.h json<|message|>{"a": 1}<|call|>'
# Texts after <think> or without it: state of the prompt, text, reasoning, content, names of calls.
TEXTS = [
    ("start", "<think>\nLet me see.\n\n</think>\n\nIt is 5.", "Let me see.", "It is 5.", []),
    ("start", "\n<think>a  b</think>c", "a  b", "c", []),
    ("start", "It is <think>5</think>.", "", "It is <think>5</think>.", []),
    ("start", "  <thin", "", "  <thin", []),
    ("start", "<think>\n\n</think>\n\n 5 ", "", "5 ", []),
    ("start", "<think>no end </thin", "no end </thin", "", []),
    ("start", "<think>a</think> <think>b</think>", "a", "<think>b</think>", []),
    ("reasoning", "\nso\n</think>\n5</think>", "so", "5</think>", []),
    ("reasoning", "<think>so</think>5", "so", "5", []),
    ("reasoning", " so <think> ", "so <think>", "", []),
    ("reasoning", " </think>", "", "", []),
    ("content", "<think>a</think>b", "", "<think>a</think>b", []),
    ("start", f"<think>as {CALLS}</think>\n\n{CALLS}", f"as {CALLS}", "", ["f"]),
    ("reasoning", f"x</think>I call. {CALLS}", "x", "I call.", ["f"]),
    ("reasoning", CALLS, CALLS, "", []),
]
GRANITE_TEXTS = [
    ("start", "<think>a</think>\n<response>\nIt is 5.</response>\n", "a", "It is 5.", []),
    ("start", "<think>a</think><response>b </response> </resp", "a", "b </response> </resp", []),
    ("start", "<think>a</think> <response>b</response></response>", "a", "b</response>", []),
    ("start", "<think>a</think> <resp", "a", "<resp", []),
    ("start", "<think>a</think> b</response>", "a", "b</response>", []),
    ("start", "<response>b</response>", "", "<response>b</response>", []),
]
HARMONY_TEXTS = [
    ("start", f"{A}Let me see.{NEXT}{FINAL}It is 5.<|return|>", "Let me see.", "It is 5.", []),
    ("start", f"{A}a{NEXT}{A}b{NEXT}{C}I look.{NEXT}{F_CALL}<|call|>", "a\n\nb", "I look.", ["f"]),
    ("start", f"{A}a{NEXT} to=functions.f<|channel|>commentary json<|message|>{{}}", "a", "", ["f"]),
    ("start", f"{A}{CALLS}", CALLS, "", []),
    ("start", F_CALL, "", "", ["f"]),
    ("start", f"{C}I look.{NEXT}{FINAL}It is.", "", "I look.\n\nIt is.", []),
    ("start", BAD_CALL, "", BAD_CALL, []),
    ("start", f"{F_CALL}x<|call|>", "", f"{F_CALL}x<|call|>", []),
    ("start", f"<|start|>assistant{FINAL}a <|b {{", "", "a <|b {", []),
    ("start", "It is 5.", "", "It is 5.", []),
    ("start", "to be", "", "to be", []),
    ("start", f"{A}a<|end|><|start|>assist", "a", "", []),
    ("content", f"and 5.{NEXT}{FINAL}6", "", "and 5.\n\n6", []),
]


def check_splits(form, state, text, expected, **options):
    """Check that the text in one piece, in single characters, and in pieces of two has the same parts."""
    pairs = [[text[:at], text[at:]] for at in range(1, len(text))]
    threes = [[text[:a], text[a:b], text[b:]] for a, b in itertools.combinations(range(1, len(text)), 2)][::97]
    for pieces in ([text], list(text), *pairs, *threes):
        calls = ToolCallParser(HARMONY if form is HARMONY_CHANNELS else FORMS["hermes"], {"f": {}})
        parser = AnswerParser.of(form, state, calls, **options)
        parts = [*map(parser.push, pieces), parser.push("", is_last=True)]
        reasoning, content = ("".join(part[kind] for part in parts) for kind in (0, 1))
        names = [call.name for part in parts for call in part.calls]
        assert (reasoning, content.rstrip() if names else content, names) == expected, pieces
        assert parser.num_calls == len(names)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.start)
def test_thoughts_are_the_same_whatever_the_split(form):
    for state, *texts, names in TEXTS:
        text, *parts = (part.replace("<think>", form.start).replace("</think>", form.end) for part in texts)
        if form is THINKING or "thin" not in texts[0].replace("think>", ""):
            check_splits(form, state, text, (*parts, names))


def test_marks_around_an_answer_of_granite_are_no_content():
    (form,) = (each for each in FORMATS if each.answer[0])
    for state, text, *parts in GRANITE_TEXTS:
        check_splits(form, state, text, tuple(parts))


def test_calls_in_thoughts_that_are_content_have_no_meaning():
    """``reasoning_format`` "none": the text is unchanged, and calls after the thoughts are read, also in plain JSON."""
    for state, thoughts in (("start", f"\n<think> as {CALLS} </think>"), ("reasoning", f"so {CALLS}\n</think>")):
        check_splits(THINKING, state, f"{thoughts}{CALLS}", ("", thoughts, ["f"]), separates=False)
        check_splits(THINKING, state, f"{thoughts}\n 5 ", ("", f"{thoughts}\n 5 ", []), separates=False)
        check_splits(THINKING, state, thoughts[:-8], ("", thoughts[:-8], []), separates=False)
    parser = AnswerParser.of(THINKING, "start", ToolCallParser(PLAIN_JSON, {"f": {}}), separates=False)
    (call,) = parser.push(f"<think>so</think>\n\n{PLAIN}", is_last=True).calls
    assert call.name == "f"


def test_messages_of_harmony_are_the_same_whatever_the_split():
    for state, text, *parts in HARMONY_TEXTS:
        check_splits(HARMONY_CHANNELS, state, text, tuple(parts))


def test_thoughts_and_content_are_passed_on_at_once():
    for form, text in ((THINKING, "<think>one two</think>three four"), (HARMONY_CHANNELS, f"{A}one{NEXT}{FINAL}two")):
        parser = AnswerParser.of(form, "start", None)
        parts = [parser.push(character) for character in text]
        assert [part.content for part in parts][-3:] == list(text[-3:])
        assert "n" in [part.reasoning for part in parts]


@pytest.mark.parametrize(
    ("template", "start"),
    [
        ("{{ '<|im_start|>assistant\\n<think>\\n' }}", "<think>"),
        ("{%- set begin = '<seed:think>' %}", "<seed:think>"),
        ("{{ '[THINK]' + part.thinking + '[/THINK]' }}", "[THINK]"),
        ("{{ '<|START_THINKING|>' }}<think>", "<|START_THINKING|>"),
        ("{{ '<|start|>' + role + '<|channel|>analysis<|message|>' }}", HARMONY_CHANNELS.start),
        ("{{ '<|channel>thought\\n<channel|>' }}", "<|channel>thought"),
        ("{% if '<|channel>' in part %}", "<|channel>thought"),
        ("thoughts after 'Here is my thought process:', the response after 'Here is my response:'", GRANITE_SENTENCE),
        ("{{ content.split('</think>')[-1] }}", None),
    ],
)
def test_marks_of_thoughts_follow_from_the_template(template, start):
    form = find_reasoning(template)
    assert (form and form.start) == start
    assert start != "<|channel>thought" or form.all_marks == ("<|channel>", "<channel|>"), "its special tokens"
    assert (find_format(template) is HARMONY) == (form is HARMONY_CHANNELS)


def test_the_state_follows_from_the_prompt():
    """Marks in the conversation have no meaning, only those at the end of the prompt or of a continued message."""
    states = [
        ("<|user|>What is <think>?<|end|>\n<|assistant|>\n", None, "start"),
        ("<|assistant|><think>\n", None, "reasoning"),
        ("<|assistant|>\n<think>\n\n</think>\n\n", None, "content"), ("</think> 5", "5", "content"),
        ("a <think>b", "a <think>b", "content"),
        ("<think>\nso", "<think>\nso", "reasoning"), ("so</think>5", "<think>so</think>5", "content"),
        ("<|assistant|><think>", "", "reasoning"),
    ]  # fmt: skip
    assert [THINKING.state_after(*case[:2]) for case in states] == [case[2] for case in states]
    assert [HARMONY_CHANNELS.state_after("<|start|>assistant", final) for final in (None, "5")] == ["start", "content"]


# ---------------------------------------------------------------- grammars


def check_grammar(source, form, marks, good, bad):
    """Check that a grammar permits texts and their ends, and that it forbids others."""
    tokenizer, _ = compiler_of(form)
    compiled = compiler_of(form)[1].compile(StructuredOutput("grammar", source), marks)
    matcher = compiled.matcher
    for text in (*good, *bad):
        tokens = [token for token in tokenizer.encode(text) if token < 256]
        state = matcher.deep_copy()
        num_valid = state.validate_tokens(tokens)
        assert (num_valid == len(tokens) and state.consume_tokens(tokens) and state.is_accepting()) == (text in good), (
            text
        )


def test_templates_of_granite_have_marks_of_an_answer():
    """The tool results of MiniMax M2 are in the same mark."""
    assert find_reasoning("Write between <think></think> and <response></response>").answer[0] == "<response>"
    assert find_reasoning("{{ '<think>' }}{{ '<response>' + tool + '</response>' }}") is THINKING


@pytest.mark.parametrize(("state", "thoughts"), [("start", "<think>{ [ \n</think>\n\n"), ("reasoning", "{ \n</think>")])
def test_thoughts_precede_calls_and_structured_output(state, thoughts):
    grammar, form = THINKING.grammar(state), FORMS["hermes"]
    call = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    plain = '{"name": "g", "arguments": {}}'
    bad = [f"{thoughts}no", thoughts] + ([call, plain] if state == "reasoning" else ["<think>x"])
    good = [thoughts + call] + ([call] if state == "start" else [])
    source = call_grammar(form, [F, G], is_required=True, is_parallel=True, thoughts=grammar)
    check_grammar(source, form, (), good, bad)
    # A mark in the thoughts is no call.
    source = call_grammar(form, [F, G], is_required=False, is_parallel=True, thoughts=grammar)
    marked = thoughts.replace("{", "<tool_call> x")
    check_grammar(source, form, (), [marked + call, f"{marked}no"], [marked + call.replace("g", "h"), marked[:-12]])
    source = call_grammar(PLAIN_JSON, [F, G], is_required=False, is_parallel=True, thoughts=grammar)
    check_grammar(source, PLAIN_JSON, (), [thoughts + plain, f"{thoughts}no"], [thoughts + "{", thoughts[:-12]])
    for output, value in (
        ({"json_schema": {"enum": [[1]]}}, "[1]"), ({"json_object": True}, "{}"), ({"regex": "a/|b\\/"}, "b/"),
        ({"choice": ['"a"', "b"]}, '"a"'), ({"grammar": 'start: x\nx: "}" // }'}, "}"),
    ):  # fmt: skip
        source = _after(grammar, StructuredOutput.from_json(output)).source
        check_grammar(source, form, (), [thoughts + value], [f"{thoughts}no", thoughts + value + value])


def test_messages_of_harmony_in_grammars():
    grammar = HARMONY_CHANNELS.grammar("start")
    call = '<|channel|>commentary to=functions.g <|constrain|>json<|message|>{"a": 1}'
    other = ' to=functions.g<|channel|>commentary json<|message|>{"a": 1}<|call|>'
    final = f"{FINAL}5 <| {{"
    source = call_grammar(HARMONY, [F, G], is_required=True, is_parallel=True, thoughts=grammar)
    check_grammar(source, HARMONY, (), [call, other, f"{A}x{NEXT}{call}<|call|>"], [final, f"{A}x{NEXT}{final}", "5"])
    source = call_grammar(HARMONY, [F, G], is_required=False, is_parallel=True, thoughts=grammar)
    bad = [f"{A}x{NEXT}{call.replace('}', ',')}", call.replace("functions.g", "functions.f"), f"{final}<|end|>", "5"]
    check_grammar(source, HARMONY, (), [f"{A}x{NEXT}{C}y{NEXT}{other}", final, f"{A}x{NEXT}{final}"], bad)
    source = _after(grammar, StructuredOutput.from_json({"json_object": True})).source
    check_grammar(source, HARMONY, (), [f"{FINAL}{{}}", f"{A}x{NEXT}{FINAL}{{}}"], ["{}", f"{C}{{}}", f"{FINAL}x"])


BOOLS, LEVELS = [True, False], ["low", "medium", "high"]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            "{%- if enable_thinking is defined and enable_thinking is false %}<think>{% endif %}",
            {"enable_thinking": BOOLS},
        ),
        ("{{ '/nothink' if (enable_thinking is defined and not enable_thinking) }}", {"enable_thinking": BOOLS}),
        ("{% if not thinking is defined %}{% set thinking = false %}{% endif %}", {"thinking": BOOLS}),
        ('{%- set reasoning_effort = "medium" %}{{- "Reasoning: " + reasoning_effort }}', {"reasoning_effort": LEVELS}),
        ("{% if reasoning_effort not in ['none', \"high\"] %}{% endif %}", {"reasoning_effort": ["none", "high"]}),
        ("{%- if message.thinking and 'thinking' in message %}{{ \"It's thinking\" }}{% endif %}", {}),
        ("{# enable_thinking #}thinking: {{ my_thinking }}{{ thinking_budget }}", {}),
    ],
)
def test_variables_of_a_template(template, expected):
    assert thinking_variables(template) == expected


# ---------------------------------------------------------------- a server

USER = [{"role": "user", "content": "hello"}]
WEATHER = [{"type": "function", "function": {"name": "get_weather"}}]
CHAT = "/v1/chat/completions"
A_CALL = (*THINKING_CALL, *b"AB")


def chat(server, *tokens, **fields):
    """Return message, finish reason and reasoning tokens of an answer with these tokens; a stream has the same."""
    body = {"messages": USER, **forced(*tokens), **fields}
    reply = server.post(CHAT, **body)
    assert reply.status_code == 200, reply.text
    reply = reply.json()
    message, details = reply["choices"][0]["message"], reply["usage"].get("completion_tokens_details")
    *events, usage, _ = parse_events(
        server.post(CHAT, **body, stream=True, stream_options={"include_usage": True}).text
    )
    for name in ("reasoning_content", "content"):
        streamed = "".join(event["choices"][0]["delta"].get(name) or "" for event in events)
        assert streamed.strip() == (message.get(name) or "").strip()
    assert usage["usage"].get("completion_tokens_details") == details
    return message, reply["choices"][0]["finish_reason"], details and details["reasoning_tokens"]


def test_reasoning_of_a_server(thinker):
    tokens = (THINK, *b"XY\t", END_THINK, *b"AB")
    message, _, num_tokens = chat(thinker, *tokens)
    assert (message["reasoning_content"], message["content"], num_tokens) == ("XY", "AB", 5)
    assert chat(thinker, *tokens, reasoning_format="none")[0]["content"] == "<think>XY\t</think>AB"
    message, _, num_tokens = chat(thinker, *b"XY", chat_template_kwargs={"enable_thinking": True})
    assert (message["reasoning_content"], message["content"], num_tokens) == ("XY", None, 2)
    message, _, num_tokens = chat(thinker, *b"XY", chat_template_kwargs={"enable_thinking": False})
    assert "reasoning_content" not in message and (message["content"], num_tokens) == ("XY", 0)
    final = {"role": "assistant", "content": "<think>so"}
    message, _, _ = chat(thinker, *b"XY", messages=[*USER, final], continue_final_message=True)
    assert (message["reasoning_content"], message["content"]) == ("XY", None)
    form = {"type": "json_schema", "json_schema": {"schema": {"const": 5}}}
    message, finish, _ = chat(thinker, *b"XY", END_THINK, *b"5", response_format=form, max_tokens=20)
    assert (message["content"], finish) == ("5", "stop"), "no thoughts are required"
    message, finish, _ = chat(thinker, THINK, *b"XY", END_THINK, *b"5", response_format=form, max_tokens=20)
    assert (message["reasoning_content"], message["content"], finish) == ("XY", "5", "stop")


def test_tokens_of_a_chat_with_variables(thinker):
    """A client learns which variables control the thoughts, and counts the tokens of a prompt that has them."""
    assert thinker.http.get("/v1/models").json()["data"][0]["thinking"] == {
        "enable_thinking": BOOLS, "reasoning_effort": LEVELS,
    }  # fmt: skip
    plain, closed = (
        thinker.post("/tokenize", messages=USER, chat_template_kwargs=variables).json()["tokens"]
        for variables in (None, {"enable_thinking": False})
    )
    assert closed[len(plain) :] == [THINK, END_THINK] and closed[: len(plain)] == plain
    refused = thinker.post("/tokenize", messages=USER, chat_template_kwargs={"messages": []})
    assert refused.json()["error"]["param"] == "chat_template_kwargs.messages"


def test_calls_of_gpt_oss(thinker):
    message, finish, num_tokens = chat(thinker, *A_CALL, tools=WEATHER)
    assert (message["reasoning_content"], message["content"], finish, num_tokens) == ("XY", None, "tool_calls", 4)
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "get_weather" and json.loads(call["function"]["arguments"]) == {"city": "Rome"}
    message, finish, _ = chat(thinker, *A_CALL, tools=WEATHER, reasoning_format="none")
    assert message["content"].startswith("<|channel|>analysis<|message|>XY<|end|>") and finish == "stop"


def items_of(events):
    """Return the items of a response; check that its events announce, write and end each of them."""
    items = events[-1]["response"]["output"]
    for index, item in enumerate(items):
        own = [event for event in events if event.get("output_index") == index]
        assert (own[0]["type"], own[-1]["type"]) == ("response.output_item.added", "response.output_item.done")
        assert own[0]["item"]["id"] == item["id"] and own[-1]["item"] == item
        if item["type"] != "message":  # its text may continue after calls
            assert events.index(own[-1]) - events.index(own[0]) == len(own) - 1
        if item["type"] != "function_call":
            deltas = [event["delta"] for event in own if event["type"].endswith("text.delta")]
            assert "".join(deltas) == item["content"][0]["text"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return [(item["type"], item["status"], item.get("name") or item["content"][0]["text"]) for item in items]


def test_reasoning_of_responses(thinker):
    """Thoughts are an item, which a client sends back and a template may render."""
    body = {"temperature": 0, "reasoning": {"effort": "high"}, "max_output_tokens": 9}
    reply = thinker.post("/v1/responses", input="hello", **body).json()
    events = parse_events(thinker.post("/v1/responses", input="hello", **body, stream=True).text)
    (item,) = items_of(events)
    (other,) = reply["output"]
    assert item == ("reasoning", "incomplete", other["content"][0]["text"]) and item[2]
    assert other["status"] == "incomplete"
    assert reply["usage"]["output_tokens_details"]["reasoning_tokens"] == 9
    part = {"type": "reasoning_text", "text": "so"}
    history = [*USER, {"type": "reasoning", "id": "rs", "summary": [], "content": [part]}]
    sizes = []
    for turns in (history[:1], history):
        turns = [*turns, {"role": "assistant", "content": "x"}]
        sizes.append(thinker.post("/v1/responses", input=turns, **body).json()["usage"]["input_tokens"])
    assert sizes[1] - sizes[0] == len("(so)")
    error = thinker.post("/v1/responses", input=[*history, {"role": "user"}]).json()["error"]
    assert error["param"] == "input[2].content"
    error = thinker.post("/v1/responses", input=[*history, {"role": "user", "content": [1]}]).json()["error"]
    assert error["param"] == "input[2]", "the message has another index, because thoughts are none"


@pytest.mark.parametrize("is_stream", [False, True])
def test_items_of_a_response_are_in_the_order_of_the_text(is_stream):
    text = f"{A}a{NEXT}{C}I look.{NEXT}{A}b{NEXT}{F_CALL}<|call|>"
    calls = ToolCallParser(HARMONY, {"f": {}})
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3, "prompt_tokens_details": {}}
    group = SimpleNamespace(num_reasoning_tokens=0, model_name="m", usage=lambda: usage)
    answer = responses._Answer(None, ResponsesBody(input="x"), group, AnswerParser.of(HARMONY_CHANNELS, "start", calls))
    chunks = [StreamChunk(0, 0, 5, text=character) for character in text]
    groups = [*([chunk] for chunk in chunks), []] if is_stream else [chunks]
    events = b"".join(answer.add(group, is_last=group is groups[-1]) for group in groups) + answer._end("stop")
    assert items_of(parse_events(events.decode())) == [
        ("reasoning", "completed", "a"), ("message", "completed", "I look."), ("reasoning", "completed", "b"),
        ("function_call", "completed", "f"),
    ]  # fmt: skip


def test_calls_of_a_response_are_one_message_of_the_conversation():
    """As in the chat API; thoughts without a message, of a truncated answer, belong to no later one."""
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    thoughts = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "so"}]}
    output, text = (
        {"type": "function_call_output", "call_id": "1", "output": "5"},
        {"role": "assistant", "content": "x"},
    )
    items = [
        *USER,
        thoughts,
        text,
        call,
        {**call, "name": "g"},
        output,
        output,
        thoughts,
        call,
        output,
        thoughts,
        *USER,
        text,
    ]
    body = ResponsesBody(input=items, instructions="be brief")
    messages = responses._to_chat(body).messages
    assert [message["role"] for message in messages] == [
        "system", "user", "assistant", "tool", "tool", "assistant", "tool", "user", "assistant",
    ]  # fmt: skip
    assert [[each["function"]["name"] for each in message.get("tool_calls", ())] for message in messages[2::3]] == [
        ["f", "g"], ["f"], [],
    ]  # fmt: skip
    assert [message.get("reasoning_content") for message in messages[2::3]] == ["so", "so", None]
    names = body.field_names()
    assert (names["messages[2].tool_calls[1].function"], names["messages[5]"]) == ("input[4]", "input[8]")


def test_tokens_of_messages_are_those_of_a_chat(thinker):
    for fields in ({}, {"chat_template_kwargs": {"enable_thinking": True}}, {"reasoning_effort": "high"}):
        body = {"messages": [*USER, {"role": "assistant", "content": "x", "reasoning": "so"}], **fields}
        count = thinker.post("/tokenize", **body).json()["count"]
        assert count == thinker.post(CHAT, **body, max_tokens=1).json()["usage"]["prompt_tokens"]
        assert count - thinker.post("/tokenize", messages=body["messages"]).json()["count"] == 2 * bool(fields)
    for name, value in (("chat_template_kwargs", {"enable_thinking": True}), ("reasoning_effort", "high")):
        reply = thinker.post("/tokenize", prompt="x", **{name: value})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)


def test_no_tools_are_none_for_the_template(thinker):
    sizes = [
        thinker.post(CHAT, messages=USER, max_tokens=1, **fields).json()["usage"] for fields in ({}, {"tools": []})
    ]
    assert sizes[0]["prompt_tokens"] == sizes[1]["prompt_tokens"]


def test_a_call_of_the_conversation_without_arguments_has_an_empty_object():
    for text in ("", " "):
        call = {"type": "function", "function": {"name": "f", "arguments": text}}
        (message,) = check_messages([{"role": "assistant", "tool_calls": [call]}], 1)
        assert message["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs.add_generation_prompt"),
        ({"chat_template_kwargs": {"eos_token": "x"}}, "chat_template_kwargs.eos_token"),
        ({"chat_template_kwargs": {"text": "x" * 5000}}, "chat_template_kwargs"),
        ({"reasoning_format": "other"}, "reasoning_format"),
    ],
)
def test_variables_that_are_refused(thinker, path, fields, param):
    reply = thinker.post(path, messages=USER, **fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_an_effort_that_the_template_does_not_read_is_refused(server):
    reply = server.post(CHAT, messages=USER, max_tokens=1, reasoning_effort="low")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "reasoning_effort")
    reply = server.post("/tokenize", messages=USER, reasoning_effort="low")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "reasoning_effort")
    reply = server.post("/v1/responses", input="x", reasoning={"effort": "low"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "reasoning.effort")


def test_effort_and_thoughts_of_earlier_turns_are_rendered(thinker):
    """They change the number of tokens of the prompt."""

    def size(**fields):
        return thinker.post(CHAT, **{"messages": USER, "max_tokens": 1, **fields}).json()["usage"]["prompt_tokens"]

    efforts = [size(tools=WEATHER, reasoning_effort=effort) for effort in ("low", "medium")]
    assert efforts[1] - efforts[0] == len("medium") - len("low")
    turn = {"role": "assistant", "content": "x"}
    sizes = [size(messages=[*USER, {**turn, name: "so"}]) for name in ("refusal", "reasoning", "reasoning_content")]
    assert sizes[1] == sizes[2] == sizes[0] + len("(so)")
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}
    sizes = [size(messages=[*USER, {**call, "reasoning": text}], tools=WEATHER) for text in ("so", "sososo")]
    assert sizes[1] == sizes[0] + 4, "gpt-oss's template reads them as thinking"


def test_calls_of_a_conversation_are_as_the_template_of_gpt_oss_reads_them():
    call = {"role": "assistant", "tool_calls": [{}]}
    for fields, expected in (
        ({"content": None}, {}), ({"content": "x"}, {"content": "x"}),
        ({"content": "x", "reasoning_content": "so"}, {"reasoning_content": "so", "thinking": "so"}),
    ):  # fmt: skip
        assert _harmony_message({**call, **fields}) == {**call, **expected}
    assert _harmony_message({"role": "user", "content": ""}) == {"role": "user", "content": ""}
