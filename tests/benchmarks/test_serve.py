"""``kvad bench serve``: known delays of a fake server give known numbers; prompts, concurrency, errors."""

import asyncio
import json
import statistics
import threading
import time

import numpy as np
import pytest

from kvad.benchmarks import serve
from kvad.benchmarks.serve import LoadOptions, LoadPrompt, PromptOptions, RequestRecord
from kvad.errors import DataError, UsageError

FIRST, GAP, NUM_EVENTS = 0.06, 0.02, 5  # seconds before the first event with text, and between two; number of them
TOKENS = 9  # of usage: more than events


class FakeServer:
    """Answers in a thread, with fixed delays, in one byte string per event."""

    def __init__(self):
        self.bodies, self.starts, self.running, self.most_running = [], [], 0, 0
        self.reject_every = 0  # each Nth completion gets a 429
        self.break_every = 0  # each Nth stream ends early
        self.texts = lambda body, number: f"{body['prompt'][:8]}-{number}"
        self._loop = asyncio.new_event_loop()
        started = threading.Event()

        async def start():
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
            started.set()

        self._loop.create_task(start())
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        assert started.wait(5)

    def close(self):
        self._loop.call_soon_threadsafe(self._server.close)

    async def _serve(self, reader, writer):
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next((int(x[15:]) for x in head.split("\r\n") if x.lower().startswith("content-length:")), 0)
                await self._answer(head.split()[1], await reader.readexactly(length), writer)
                await writer.drain()
        except (EOFError, ConnectionError):
            writer.close()

    async def _answer(self, path, body, writer):
        if path != "/v1/completions":
            known = {"/health": {}, "/v1/models": {"data": [{"id": "fake", "max_model_len": 400}]}}
            text = json.dumps(known[path])
            writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
            return
        self.bodies.append(json.loads(body))
        self.starts.append(time.perf_counter())
        number = len(self.bodies)
        if self.reject_every and number % self.reject_every == 0:
            writer.write(b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 2\r\n\r\n{}")
            return
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        await self._stream(self.bodies[-1], number, writer)
        self.running -= 1

    async def _stream(self, body, number, writer):
        def send(fields):
            data = f"data: {fields if isinstance(fields, str) else json.dumps(fields)}\n\n".encode()
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        send({"choices": [{"text": ""}], "usage": None})  # an empty delta is no first token
        await asyncio.sleep(FIRST)
        for index in range(NUM_EVENTS):
            await asyncio.sleep(GAP if index else 0)
            text = self.texts(body, index)
            send({"choices": [{"text": text, "finish_reason": None}], "usage": None})
        if self.break_every and number % self.break_every == 0:
            send({"error": {"message": "broken", "code": "engine_error"}})
        prompt_tokens = 2 * len(body["prompt"].split())
        send({"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": TOKENS}})
        send("[DONE]")
        writer.write(b"0\r\n\r\n")


@pytest.fixture
def fake():
    server = FakeServer()
    yield server
    server.close()


def run(fake, num_prompts=12, **options):
    prompts = PromptOptions(num_prompts=num_prompts, input_len=40, output_len=20)
    load = LoadOptions(fake.url, **{"num_warmups": 0, **options})
    return serve.bench_serve(load, prompts, lambda *_: None)


def test_known_delays_give_known_numbers(fake):
    """Lower bounds hold exactly, upper ones as far as a loaded machine allows: medians are compared."""
    result = run(fake, max_concurrency=4, goodput={"ttft": 1000, "tpot": 1000})
    record = result.as_json()
    assert record["completed"] == 12 and record["failed"] == 0 and record["errors"] == {}
    assert fake.most_running == record["max_concurrent_requests"] == 4 and record["model_id"] == "fake"
    assert FIRST * 1e3 <= record["median_ttft_ms"] < FIRST * 1e3 + 30
    assert GAP * 1e3 * 0.9 <= record["median_itl_ms"] < GAP * 1e3 + 15
    whole = FIRST + (NUM_EVENTS - 1) * GAP
    assert whole * 1e3 <= record["median_e2el_ms"] < whole * 1e3 + 80
    tpot = [(each.latency - each.ttft) * 1e3 / (TOKENS - 1) for each in result.records]
    assert record["mean_tpot_ms"] == pytest.approx(statistics.fmean(tpot))
    assert record["total_output_tokens"] == 12 * TOKENS, "of usage, not the number of events"
    assert record["total_input_tokens"] == sum(2 * len(each["prompt"].split()) for each in fake.bodies[1:])
    seconds = record["duration"]
    assert seconds >= 3 * whole and record["request_throughput"] == pytest.approx(12 / seconds)
    assert record["request_goodput"] == record["request_throughput"]
    assert record["output_throughput"] == pytest.approx(12 * TOKENS / seconds)
    total = 12 * TOKENS + record["total_input_tokens"]
    assert record["total_token_throughput"] == pytest.approx(total / seconds)
    assert {f"{kind}_{metric}_ms" for kind in ("mean", "median", "std", "p99") for metric in serve.METRICS} <= set(
        record
    )
    assert record["median_health_ms"] < 100 and record["median_client_lag_ms"] < 20
    json.dumps(record)


def test_requests_are_deterministic_and_greedy(fake):
    run(fake, 5, max_concurrency=1)
    first = fake.bodies[1:]
    fake.bodies.clear()
    run(fake, 5, max_concurrency=5)
    assert sorted(map(str, fake.bodies[1:])) == sorted(map(str, first)) and len({each["prompt"] for each in first}) == 5
    assert all(each["temperature"] == 0 and each["ignore_eos"] and each["stream"] for each in first)
    assert all(each["stream_options"] == {"include_usage": True} for each in first)


def test_errors_are_counted_and_excluded(fake):
    fake.reject_every, fake.break_every = 4, 3
    record = run(fake, 11, max_concurrency=1).as_json()
    assert record["errors"] == {"429": 3, "500": 3} and record["completed"] == 5
    assert record["total_output_tokens"] == 5 * TOKENS and record["median_reject_ms"] < 30


def test_goodput_counts_requests_within_all_limits():
    good = RequestRecord(LoadPrompt("", 1), 0.0, ttft=0.1, latency=1.0, gaps=[0.3], output_tokens=4)
    assert good.is_good({"ttft": 100, "tpot": 300, "e2el": 1000, "itl": 300}) and good.tpot == pytest.approx(0.3)
    for limits in ({"ttft": 99}, {"tpot": 299}, {"e2el": 999}, {"itl": 299}, {"ttft": 100, "e2el": 1}):
        assert not good.is_good(limits)


def test_outputs_that_change_under_load_are_found(fake):
    assert run(fake, 6, max_concurrency=3, check_outputs=4).as_json()["outputs_equal"] == 4
    fake.texts = lambda body, index: f"{index}{'x' if fake.running > 1 else ''}"
    record = run(fake, 6, max_concurrency=3, check_outputs=6).as_json()
    assert record["outputs_checked"] == 6 and record["outputs_equal"] < 6


def test_open_loop_has_random_arrivals_of_the_rate(fake):
    run(fake, 60, request_rate=150.0)
    gaps = np.diff(fake.starts[1:])
    assert 0.7 / 150 < gaps.mean() < 1.8 / 150 and gaps.std() > 0.4 * gaps.mean()
    assert fake.most_running > 8, "requests do not wait for each other"


def test_warmups_are_not_measured(fake):
    result = run(fake, 4, max_concurrency=2, num_warmups=3)
    assert len(fake.bodies) == 1 + 3 + 4 and len(result.records) == 4


def test_concurrency():
    records = [RequestRecord(LoadPrompt("", 1), start, latency=1.0) for start in (0.0, 0.5, 0.9, 1.0, 3.0)]
    assert serve.max_concurrent(records) == 3


def test_lengths_are_log_normal_and_fit():
    options = PromptOptions(num_prompts=2000, input_len=100, output_len=50)
    prompts = serve.make_prompts(options, 2.0, None)
    words = [len(prompt.text.split()) for prompt in prompts]
    assert 45 < statistics.median(words) < 55 and 47 < statistics.median(p.max_tokens for p in prompts) < 53
    assert 0.5 < statistics.pstdev(np.log(words)) < 0.7
    for prompt in serve.make_prompts(options, 2.0, 128):
        assert 2 * len(prompt.text.split()) + prompt.max_tokens <= 128
    equal = serve.make_prompts(PromptOptions(num_prompts=3, sigma=0.0), 1.0, None)
    assert {(len(prompt.text.split()), prompt.max_tokens) for prompt in equal} == {(128, 64)}


def test_prefixes_are_shared_and_the_rest_is_not():
    options = PromptOptions("prefix", num_prompts=8, num_prefixes=2, prefix_len=40, input_len=10)
    texts = [prompt.text for prompt in serve.make_prompts(options, 2.0, None)]
    assert len(set(texts)) == 8
    heads = [" ".join(text.split()[:20]) for text in texts]
    assert heads[::2] == [heads[0]] * 4 and heads[1::2] == [heads[1]] * 4 and heads[0] != heads[1]


def test_file_of_prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "max_tokens": 3}\n{"prompt": "b"}\n')
    options = PromptOptions("file", num_prompts=3, path=path, output_len=7)
    assert serve.make_prompts(options, 1.0, None) == [("a", 3), ("b", 7), ("a", 3)]
    for text, problem in (("", "no line"), ("x\n", "line 1"), ('{"prompt": "a"}\n{"text": "b"}\n', "line 2")):
        path.write_text(text)
        with pytest.raises(DataError, match=problem):
            serve.make_prompts(options, 1.0, None)
    with pytest.raises(UsageError, match="--path"):
        serve.make_prompts(PromptOptions("file"), 1.0, None)


def test_bad_options_and_servers(fake):
    for options in ({"request_rate": 0.0}, {"burstiness": -1.0}, {"timeout": 0.0}, {"goodput": {"latency": 1.0}}):
        with pytest.raises(UsageError):
            LoadOptions(fake.url, **options)
    for url in ("http://127.0.0.1:9", "ftp://x", "127.0.0.1:8000"):
        with pytest.raises(UsageError):
            serve.bench_serve(LoadOptions(url), PromptOptions(), lambda *_: None)
    fake.reject_every = 1
    with pytest.raises(UsageError, match="429"):
        run(fake)
