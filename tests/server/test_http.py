"""The routes over HTTP, to the byte: event streams, log-probabilities, samples, stop strings, texts of any script."""

import json
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from pathlib import Path

import pytest

from tests.support.server import forced

SCRIPTS = "éж한日😀"  # Latin, Cyrillic, Hangul, Han, emoji; no byte occurs twice
HELLO = [{"role": "user", "content": "hello"}]


def read_stream(server, path, **fields):
    """Return the chunks of bytes and the text of an event stream."""
    with server.http.stream("POST", path, json={"stream": True, **fields}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        chunks = list(response.iter_raw())
    return chunks, b"".join(chunks).decode()


def masked(text):
    """Return the events with fixed ids and times."""
    events = [json.loads(part[6:]) if part != "data: [DONE]" else part for part in text.split("\n\n")[:-1]]
    for event in events:
        if isinstance(event, dict):
            assert event.pop("id").startswith(("chatcmpl-", "cmpl-")) and event.pop("created") > 1.7e9
    return events


# ---------------------------------------------------------------- event streams


def test_chat_stream_is_as_specified(server):
    body = {"messages": HELLO, **forced(*b"ABC"), "stream_options": {"include_usage": True}}
    _, text = read_stream(server, "/v1/chat/completions", **body)
    head = {"object": "chat.completion.chunk", "model": "tiny"}

    def chunk(delta, reason=None):
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return {**head, "choices": [choice], "usage": None}

    *events, last, done = masked(text)
    contents = [event["choices"][0]["delta"].pop("content") for event in events[:-1]]
    assert all(contents) and "".join(contents) == "ABC"  # tokens that come at the same time are one event
    assert events == [chunk({"role": "assistant"}), *[chunk({})] * (len(contents) - 1), chunk({}, "length")]
    assert last["usage"].pop("prompt_tokens_details")["cached_tokens"] in (0, 16)  # 16: not the first such prompt
    assert last == {**head, "choices": [], "usage": {"completion_tokens": 3, "prompt_tokens": 25, "total_tokens": 28}}
    assert done == "data: [DONE]"
    assert text.startswith("data: {") and text.endswith("\n\ndata: [DONE]\n\n")


@pytest.mark.parametrize(("path", "prompt"), [("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {})])
def test_without_include_usage_no_chunk_has_usage(server, path, prompt):
    prompt = prompt or {"messages": HELLO}
    _, text = read_stream(server, path, **prompt, **forced(*b"XY"))
    *events, done = masked(text)
    assert all("usage" not in event and event["choices"] for event in events) and done == "data: [DONE]"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_of_every_event(server, path):
    prompt = {"messages": HELLO} if "chat" in path else {"prompt": "x"}
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, last, _ = masked(read_stream(server, path, **prompt, **forced(*b"ABCDEFGH"), stream_options=options)[1])
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and 1 <= counts[0] <= counts[-1] == 8 == last["usage"]["completion_tokens"]
    assert {event["usage"]["prompt_tokens"] for event in events} == {last["usage"]["prompt_tokens"]}


def test_completion_stream_equals_the_response(server):
    body = {"prompt": "the same text", "max_tokens": 20, "temperature": 0, "logprobs": 2, "n": 2, "echo": True}
    whole = server.post("/v1/completions", **body).json()
    body["stream_options"] = {"include_usage": True}
    *events, last, _ = masked(read_stream(server, "/v1/completions", **body)[1])
    for index, choice in enumerate(sorted(whole["choices"], key=itemgetter("index"))):
        parts = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [choice["finish_reason"]]
        for name in ("tokens", "token_logprobs"):
            streamed = [value for part in parts if part["logprobs"] for value in part["logprobs"][name]]
            assert streamed == choice["logprobs"][name]
    assert all(event["usage"] is None for event in events) and last["choices"] == []
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 40


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_characters_of_several_bytes_arrive_whole(server, path):
    prompt = {"prompt": "-"} if "chat" not in path else {"messages": HELLO}
    chunks, text = read_stream(server, path, **prompt, **forced(*SCRIPTS.encode()))
    for chunk in chunks:
        assert b"\\ufffd" not in chunk and "\ufffd" not in chunk.decode()
    choices = [event["choices"][0] for event in masked(text)[:-1]]
    pieces = [choice["text"] if "chat" not in path else choice["delta"].get("content", "") for choice in choices]
    assert "".join(pieces) == SCRIPTS


def test_an_incomplete_character_is_replaced_at_the_end(server):
    """The model may end inside a character; its bytes become one U+FFFD, in both forms of a response."""
    fields = {"prompt": "-", **forced(*"a한".encode()[:3])}
    assert server.post("/v1/completions", **fields).json()["choices"][0]["text"] == "a\ufffd"
    choices = [event["choices"][0] for event in masked(read_stream(server, "/v1/completions", **fields)[1])[:-1]]
    assert "".join(choice["text"] for choice in choices) == "a\ufffd"


# ---------------------------------------------------------------- log-probabilities


def lm_eval_scores(response, context_lengths):
    """Return sum and greedy test of each choice, as lm-eval's local-completions computes them."""
    results = []
    for choice, length in zip(sorted(response["choices"], key=itemgetter("index")), context_lengths, strict=True):
        logprobs = choice["logprobs"]["token_logprobs"][length:-1]
        top_logprobs = choice["logprobs"]["top_logprobs"][length:-1]
        is_greedy = all(value == max(top.values()) for value, top in zip(logprobs, top_logprobs, strict=True))
        results.append((sum(logprobs), is_greedy))
    return results


def test_scores_of_lm_eval_equal_scores_in_process(server, llm):
    greedy = llm.generate("a greedy continuation: ", max_tokens=12, temperature=0, ignore_eos=True)
    context = llm.encode("a greedy continuation: ")
    rows = [(context, list(greedy.tokens)), (llm.encode("The sky is"), llm.encode(" blue")), ([40], [41, 42, 43])]
    body = {
        "model": "tiny", "prompt": [head + tail for head, tail in rows], "temperature": 0, "max_tokens": 1,
        "logprobs": 1, "seed": 1234, "echo": True,
    }  # fmt: skip
    response = server.http.post("/v1/completions", json=body).json()
    scores = lm_eval_scores(response, [len(head) for head, _ in rows])
    for (head, tail), (total, is_greedy) in zip(rows, scores, strict=True):
        expected = llm.score(head + tail)
        assert total == pytest.approx(sum(expected.logprobs[len(head) :]), abs=1e-4)
        best = [max(score.top_logprobs, key=itemgetter(1)) for score in _scores(llm, head + tail)[len(head) - 1 :]]
        assert is_greedy == (tail == [token for token, _ in best])
    assert scores[0][1] and not scores[2][1]
    usage, choices = response["usage"], response["choices"]
    assert usage["prompt_tokens"] == sum(len(head + tail) for head, tail in rows) and usage["completion_tokens"] == 3
    for choice, (head, tail) in zip(choices, rows, strict=True):
        assert len(choice["logprobs"]["tokens"]) == len(head + tail) + 1
        assert choice["logprobs"]["token_logprobs"][0] is None and choice["logprobs"]["top_logprobs"][0] is None


def _scores(llm, tokens):
    return llm.generate(tokens, max_tokens=1, temperature=0, prompt_logprobs=1).prompt_logprobs


def test_echo_without_new_tokens_scores_the_prompt(server, llm):
    response = server.complete([104, 105, 33], max_tokens=0, echo=True, logprobs=0)
    (choice,) = response["choices"]
    assert choice["text"] == "hi!" and response["usage"]["completion_tokens"] == 0
    assert choice["logprobs"]["tokens"] == ["h", "i", "!"] and choice["logprobs"]["text_offset"] == [0, 1, 2]
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(llm.score([104, 105, 33]).logprobs[1:], abs=1e-5)


def test_text_offsets_are_places_in_the_text(server):
    """A character of several tokens adds one to the text, with its last byte."""
    body = {"prompt": [97, *"😀".encode(), 256, 98], **forced(*"c한d".encode()), "echo": True, "logprobs": 0}
    (choice,) = server.post("/v1/completions", **body).json()["choices"]
    assert choice["text"] == "a😀</s>bc한d"
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1, 1, 2, 6, 7, 8, 8, 8, 9]
    streamed = [
        event["choices"][0]["logprobs"] for event in masked(read_stream(server, "/v1/completions", **body)[1])[:-1]
    ]
    offsets = [offset for part in streamed if part for offset in part["text_offset"]]
    assert offsets == choice["logprobs"]["text_offset"]


def test_chat_logprobs(server):
    body = {"messages": HELLO, **forced(*b"ABC"), "logprobs": True}
    (choice,) = server.post("/v1/chat/completions", **body).json()["choices"]
    entries = choice["logprobs"]["content"]
    assert [(entry["token"], entry["bytes"], entry["top_logprobs"]) for entry in entries] == [
        (letter, [ord(letter)], []) for letter in "ABC"
    ]
    (choice,) = server.post("/v1/chat/completions", **body, top_logprobs=3).json()["choices"]
    assert all(len(entry["top_logprobs"]) == 3 for entry in choice["logprobs"]["content"])
    refused = server.post("/v1/chat/completions", messages=HELLO, top_logprobs=3)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "top_logprobs"


# ---------------------------------------------------------------- samples, stop strings, prompts


def test_greedy_output_equals_the_library(server, llm):
    expected = llm.generate("once upon a time", max_tokens=40, temperature=0, ignore_eos=True).text
    assert server.complete("once upon a time", max_tokens=40)["choices"][0]["text"] == expected
    assert server.complete(llm.encode("once upon a time"), max_tokens=40)["choices"][0]["text"] == expected


def test_prompts_and_samples_are_ordered(server):
    prompts = ["one", "two", "three"]
    body = {"max_tokens": 6, "temperature": 1.0, "seed": 5, "n": 2}
    response = server.complete(prompts, **body)
    assert [choice["index"] for choice in response["choices"]] == list(range(6))
    alone = [choice["text"] for prompt in prompts for choice in server.complete(prompt, **body)["choices"]]
    assert [choice["text"] for choice in response["choices"]] == alone and len(set(alone)) == 6


def test_best_of_returns_the_most_probable_samples(server):
    body = {"max_tokens": 8, "temperature": 1.5, "seed": 9, "logprobs": 0}
    samples = server.complete("best", **body, n=4)["choices"]
    best = server.complete("best", **body, n=2, best_of=4)
    means = [sum(each["logprobs"]["token_logprobs"]) / 8 for each in samples]
    expected = [text for _, text in sorted(zip(means, (each["text"] for each in samples), strict=True), reverse=True)]
    assert [choice["text"] for choice in best["choices"]] == expected[:2]
    assert best["usage"]["completion_tokens"] == 32
    refused = server.post("/v1/completions", prompt="best", n=2, best_of=1)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "best_of"


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_across_tokens(server, stream):
    """The text ends before the stop string; a beginning of one that does not continue is part of the text."""
    fields = {"prompt": "-", **forced(*b"abcdefg"), "stop": ["bx", "ef"]}
    if stream:
        events = masked(read_stream(server, "/v1/completions", **fields)[1])[:-1]
        text, reason = "".join(event["choices"][0]["text"] for event in events), events[-1]["choices"][0]
    else:
        reason = server.post("/v1/completions", **fields).json()["choices"][0]
        text = reason["text"]
    assert (text, reason["finish_reason"]) == ("abcd", "stop")


def test_seed_has_the_same_output_whatever_runs_beside(server):
    body = {"max_tokens": 24, "temperature": 1.0, "seed": 77}
    alone = server.complete("a seeded text", **body)["choices"][0]["text"]
    with ThreadPoolExecutor(9) as pool:
        others = [pool.submit(server.complete, f"{i} other", max_tokens=60, temperature=1.0) for i in range(6)]
        again = [pool.submit(server.complete, "a seeded text", **body) for _ in range(3)]
        assert [future.result()["choices"][0]["text"] for future in again] == [alone] * 3
        assert len({future.result()["choices"][0]["text"] for future in others}) == 6
    assert server.complete("a seeded text", **{**body, "seed": 78})["choices"][0]["text"] != alone


def test_cached_tokens_are_reported_and_change_nothing(server):
    prompt = "a long prompt that is sent twice, of several blocks of the cache"
    first, second = (server.complete(prompt, max_tokens=10) for _ in range(2))
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    cached = [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in (first, second)]
    assert cached == [0, 48], "whole blocks of 16 before the last token"


def test_the_server_runs_without_torch(server):
    server.post("/v1/completions", prompt="x", max_tokens=2)
    maps, engine_maps = (Path(f"/proc/{pid}/maps") for pid in (server.process.pid, server.engine_process.pid))
    if not maps.exists():
        pytest.skip("this system has no /proc")
    assert "libtorch" in engine_maps.read_text() and "libtorch" not in maps.read_text()


def test_tokenize_and_detokenize(server):
    text = f"{SCRIPTS}<tool_call>"
    reply = server.post("/tokenize", prompt=text, add_special_tokens=False).json()
    assert reply["tokens"] == [*SCRIPTS.encode(), 257] and reply["count"] == 15
    assert server.post("/detokenize", tokens=reply["tokens"]).json() == {"prompt": text}
    info = server.http.get("/tokenizer_info").json()
    assert server.post("/tokenize", prompt=info["eos_token"], add_special_tokens=False).json()["tokens"] == [256]
    assert info["eos_token"] == "</s>" and "[assistant]" in info["chat_template"]
