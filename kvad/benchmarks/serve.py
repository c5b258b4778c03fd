"""Load test of a server with OpenAI's API: latencies, throughput, goodput, and equality of outputs under load.

Requests arrive at random times of a given rate (open loop), or as soon as one of N has ended (closed loop). Tokens are
counted from ``usage``; a first token is the first event with text. The JSON record has the keys of vLLM's
``bench serve``. No torch.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from kvad.benchmarks.http_client import HttpClient, HttpError
from kvad.errors import DataError, UsageError

Progress = Callable[[str, int, int], None]  # (label, done, total)
Dataset = Literal["random", "prefix", "file"]
METRICS = ("ttft", "tpot", "itl", "e2el")
PERCENTILES = (50, 90, 99)
MIN_TOKENS, SPREAD = 4, 8  # shortest random length, and the longest over the median
LAG_SECONDS = 0.01  # period of the timer that measures the client's lag
PROBE_SECONDS = 0.1  # period of the requests to /health, and of reading the server's RSS
SYLLABLES = ("ba", "ce", "di", "fo", "gu", "ka", "le", "mi", "no", "pu", "ra", "se", "ti", "vo", "xu")


class LoadPrompt(NamedTuple):
    """A prompt and the number of tokens to generate."""

    text: str
    max_tokens: int


@dataclass(frozen=True)
class PromptOptions:
    """Lengths in tokens; they are log-normal around the medians."""

    dataset: Dataset = "random"
    num_prompts: int = 100
    input_len: int = 128  # of a random text, in "prefix" after the shared part
    output_len: int = 64
    sigma: float = 0.6  # of the logarithm of a length; 0: all are equal
    num_prefixes: int = 4
    prefix_len: int = 256
    path: Path | None = None  # of "file": JSON lines with "prompt", and "max_tokens" if it is not ``output_len``
    seed: int = 0


@dataclass(frozen=True)
class LoadOptions:
    """Server, arrival of the requests, and their evaluation."""

    url: str  # of the server, without /v1
    model: str = ""  # "": the first of /v1/models
    chat: bool = False  # use /v1/chat/completions
    api_key: str = ""
    request_rate: float = math.inf  # requests per second
    burstiness: float = 1.0  # shape of the gamma distribution of the intervals; 1: Poisson arrivals
    max_concurrency: int | None = None
    num_warmups: int = 4  # requests before the measurement
    goodput: Mapping[str, float] = field(default_factory=dict)  # metric -> largest milliseconds of a good request
    ignore_eos: bool = True
    timeout: float = 600.0  # seconds of a request
    check_outputs: int = 0  # prompts that are sent again, alone
    server_pid: int | None = None  # for its RSS
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("request_rate", "burstiness", "timeout"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name}: must be above 0, got {getattr(self, name)}")
        if unknown := sorted(set(self.goodput) - set(METRICS)):
            raise UsageError(f"goodput: unknown metric {unknown[0]!r}", f"Known are {', '.join(METRICS)}.")


@dataclass
class RequestRecord:
    """Times of one request, in seconds from its start."""

    prompt: LoadPrompt
    start: float  # of the clock
    ttft: float = 0.0
    latency: float = 0.0
    gaps: list[float] = field(default_factory=list)  # between two events with text
    text: str = ""
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    has_usage: bool = True  # False: the server sends none; output tokens are events with text, input tokens unknown
    error: str = ""  # "": completed; an HTTP status or the name of an exception

    @property
    def tpot(self) -> float:
        """Mean time per output token after the first."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    def values(self, metric: str) -> list[float]:
        if metric == "itl":
            return self.gaps
        if metric == "tpot":
            return [self.tpot] if self.output_tokens > 1 else []
        return [self.ttft if metric == "ttft" else self.latency]

    def is_good(self, limits: Mapping[str, float]) -> bool:
        return all(max(self.values(name), default=0.0) * 1e3 <= limit for name, limit in limits.items())


@dataclass
class Probe:
    """Measurements beside the requests: lag of this process, /health, memory of the server."""

    lags: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    rss: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class LoadResult:
    """Records of a run; ``as_json`` has the summary."""

    model: str
    options: LoadOptions
    records: tuple[RequestRecord, ...]
    duration: float
    probe: Probe
    checked: tuple[bool, ...] = ()  # whether a text alone equals the text under load

    @property
    def completed(self) -> list[RequestRecord]:
        return [record for record in self.records if not record.error]

    @property
    def errors(self) -> dict[str, int]:
        return dict(Counter(record.error for record in self.records if record.error))

    def as_json(self) -> dict[str, Any]:
        """Return the summary with the keys of vLLM's result; times in milliseconds, ``duration`` in seconds."""
        completed, options, seconds = self.completed, self.options, self.duration
        input_tokens = sum(record.input_tokens for record in completed)
        output_tokens = sum(record.output_tokens for record in completed)
        good = sum(record.is_good(options.goodput) for record in completed)
        rejects = [record.latency for record in self.records if record.error == "429"]
        result: dict[str, Any] = {
            "model_id": self.model, "num_prompts": len(self.records),
            "request_rate": options.request_rate if math.isfinite(options.request_rate) else "inf",
            "burstiness": options.burstiness, "max_concurrency": options.max_concurrency, "duration": seconds,
            "completed": len(completed), "failed": len(self.records) - len(completed), "errors": self.errors,
            "total_input_tokens": input_tokens, "total_output_tokens": output_tokens,
            "total_cached_tokens": sum(record.cached_tokens for record in completed),
            "request_throughput": len(completed) / seconds,
            "request_goodput": good / seconds if options.goodput else None,
            "output_throughput": output_tokens / seconds,
            "total_token_throughput": (input_tokens + output_tokens) / seconds,
            "max_concurrent_requests": max_concurrent(completed),
            "tokens_from_usage": all(record.has_usage for record in completed),
        }  # fmt: skip
        for metric in METRICS:
            result |= summarize(metric, [value for record in completed for value in record.values(metric)])
        result |= summarize("reject", rejects) | summarize("health", self.probe.health)
        result |= summarize("client_lag", self.probe.lags)
        if self.probe.rss:
            result |= {"server_rss_start": self.probe.rss[0], "server_rss_max": max(self.probe.rss)}
        if self.checked:
            result |= {"outputs_checked": len(self.checked), "outputs_equal": sum(self.checked)}
        return result


def summarize(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return mean, median, standard deviation and percentiles in milliseconds; {} without values."""
    if not values:
        return {}
    times = np.asarray(values) * 1e3
    numbers = {"mean": times.mean(), "median": np.median(times), "std": times.std()}
    numbers |= {f"p{q}": np.percentile(times, q) for q in PERCENTILES}
    return {f"{number}_{name}_ms": float(value) for number, value in numbers.items()}


def max_concurrent(records: Sequence[RequestRecord]) -> int:
    """Return the largest number of requests that ran at the same time."""
    changes = [(record.start, 1) for record in records] + [(record.start + record.latency, -1) for record in records]
    running = most = 0
    for _, change in sorted(changes):
        running += change
        most = max(most, running)
    return most


# ---------------------------------------------------------------- prompts


def make_prompts(options: PromptOptions, tokens_per_word: float, max_len: int | None) -> list[LoadPrompt]:
    """Return the prompts of a dataset; equal options give equal prompts.

    Args:
        options: Dataset and lengths.
        tokens_per_word: Of the served model, for random words.
        max_len: Longest sequence of the server, if known; random texts are shortened to fit.

    Raises:
        DataError: If the file has a line that is no prompt.
    """
    if options.dataset == "file":
        return _read_prompts(options)
    rng = random.Random(options.seed)
    prefixes = [""]
    if options.dataset == "prefix":
        size = max(1, round(options.prefix_len / tokens_per_word))
        prefixes = [random_words(rng, size) + " " for _ in range(options.num_prefixes)]
    prompts = []
    for number in range(options.num_prompts):
        prefix = prefixes[number % len(prefixes)]
        max_tokens = random_length(rng, options.output_len, options.sigma)
        length = random_length(rng, options.input_len, options.sigma)
        if max_len is not None:
            max_tokens = min(max_tokens, max_len // 2)
            used = len(prefix.split()) * tokens_per_word
            length = min(length, max(MIN_TOKENS, int((max_len - max_tokens - used) * 0.8)))
        prompts.append(LoadPrompt(prefix + random_words(rng, max(1, round(length / tokens_per_word))), max_tokens))
    return prompts


def random_length(rng: random.Random, median: int, sigma: float) -> int:
    """Return a log-normal length within the limits of this benchmark."""
    length = median * math.exp(rng.gauss(0.0, sigma)) if sigma else median
    return max(min(MIN_TOKENS, median), min(round(length), SPREAD * median))


def random_words(rng: random.Random, count: int) -> str:
    return " ".join("".join(rng.choices(SYLLABLES, k=rng.randint(1, 3))) for _ in range(count))


def _read_prompts(options: PromptOptions) -> list[LoadPrompt]:
    if options.path is None:
        raise UsageError("--dataset file: requires --path")
    prompts = []
    try:
        lines = options.path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{options.path}: {error}", "Give a file of JSON lines.") from None
    for number, line in enumerate(lines, 1):
        try:
            fields = json.loads(line)
            prompts.append(LoadPrompt(str(fields["prompt"]), int(fields.get("max_tokens", options.output_len))))
        except (ValueError, KeyError, TypeError):
            message = f'{options.path}: line {number} must be an object with "prompt"'
            raise DataError(message, 'Write {"prompt": "...", "max_tokens": 64}.') from None
    if not prompts:
        raise DataError(f"{options.path}: has no line")
    return [prompts[number % len(prompts)] for number in range(options.num_prompts)]


# ---------------------------------------------------------------- a run


class LoadClient:
    """Sends the requests of a run.

    Args:
        options: How they are sent.
        progress: Called after each request.
    """

    def __init__(self, options: LoadOptions, progress: Progress) -> None:
        self._options, self._progress = options, progress
        headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        self._http = HttpClient(options.url.removesuffix("/").removesuffix("/v1"), headers)
        self._path = "/v1/chat/completions" if options.chat else "/v1/completions"
        self.model, self.max_len = options.model, None

    async def run(self, prompt_options: PromptOptions) -> LoadResult:
        """Run the whole benchmark.

        Raises:
            UsageError: If the server cannot be reached or refuses a first request.
        """
        options = self._options
        await self._describe_model()
        words = random_words(random.Random(1), 32)
        first = await self.send(LoadPrompt(words, 2))
        if first.error:
            raise UsageError(f"{options.url}: a first request failed: {first.error} {first.text[:200]}".rstrip())
        prompts = make_prompts(prompt_options, max(first.input_tokens, 1) / 32, self.max_len)
        warmups = prompts[: options.num_warmups]
        await asyncio.gather(*(self.send(prompt._replace(text=f"warm-up {prompt.text}")) for prompt in warmups))
        probe = Probe()
        probes = [asyncio.create_task(each) for each in (self._probe_lag(probe), self._probe_server(probe))]
        start = time.perf_counter()
        records = await self._send_all(prompts)
        duration = time.perf_counter() - start
        for task in probes:
            task.cancel()
        await asyncio.gather(*probes, return_exceptions=True)
        checked = await self._check_outputs([record for record in records if not record.error])
        self._http.close()
        return LoadResult(self.model, options, tuple(records), duration, probe, tuple(checked))

    async def _describe_model(self) -> None:
        try:
            status, body = await self._http.get("/v1/models")
            models = json.loads(body)["data"] if status == 200 else []
        except (OSError, HttpError, ValueError, KeyError) as error:
            raise UsageError(f"{self._options.url}: {error}", "Start a server first: kvad serve MODEL.") from None
        if not models and not self.model:
            raise UsageError(f"{self._options.url}/v1/models: HTTP status {status}", "Is --api-key missing?")
        chosen = next((each for each in models if each["id"] == self.model), models[0] if models else {})
        self.model, self.max_len = self.model or chosen["id"], chosen.get("max_model_len")

    async def _send_all(self, prompts: Sequence[LoadPrompt]) -> list[RequestRecord]:
        options, rng = self._options, random.Random(self._options.seed)
        limit = asyncio.Semaphore(options.max_concurrency or len(prompts) or 1)
        done = 0

        async def send(prompt: LoadPrompt) -> RequestRecord:
            nonlocal done
            async with limit:
                record = await self.send(prompt)
            done += 1
            self._progress("requests", done, len(prompts))
            return record

        tasks, due = [], time.perf_counter()
        for prompt in prompts:
            tasks.append(asyncio.create_task(send(prompt)))
            if math.isfinite(options.request_rate):
                due += rng.gammavariate(options.burstiness, 1 / (options.request_rate * options.burstiness))
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
        return list(await asyncio.gather(*tasks))

    def _body(self, prompt: LoadPrompt) -> dict[str, Any]:
        options = self._options
        text: dict[str, Any] = {"prompt": prompt.text, "max_tokens": prompt.max_tokens}
        if options.chat:
            messages = [{"role": "user", "content": prompt.text}]
            text = {"messages": messages, "max_completion_tokens": prompt.max_tokens, "max_tokens": prompt.max_tokens}
        common = {"model": self.model, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        return {**common, **text, **({"ignore_eos": True} if options.ignore_eos else {})}

    async def send(self, prompt: LoadPrompt) -> RequestRecord:
        """Send one request and return its times and its text; an error is a field of the record."""
        record = RequestRecord(prompt, time.perf_counter())
        try:
            async with asyncio.timeout(self._options.timeout):
                await self._read(record, json.dumps(self._body(prompt)).encode())
        except HttpError as error:
            record.error, record.text = str(error.status), error.text
        except (OSError, EOFError, ValueError, TimeoutError) as error:
            record.error = type(error).__name__
        record.latency = time.perf_counter() - record.start
        return record

    async def _read(self, record: RequestRecord, body: bytes) -> None:
        last, parts, has_usage = record.start, list[str](), False
        async for data in self._http.stream_events(self._path, body):
            now = time.perf_counter()
            if data == b"[DONE]":
                continue
            fields = json.loads(data)
            if "error" in fields:
                raise HttpError(500, str(fields["error"].get("code") or fields["error"]))
            if usage := fields.get("usage"):
                has_usage = True
                record.input_tokens, record.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
                record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            for choice in fields.get("choices") or ():
                text = choice.get("text") if not self._options.chat else (choice.get("delta") or {}).get("content")
                if text:
                    if parts:
                        record.gaps.append(now - last)
                    else:
                        record.ttft = now - record.start
                    last = now
                    parts.append(text)
        record.text = "".join(parts)
        record.has_usage = has_usage
        if not has_usage:  # llama-cpp-python sends none
            record.output_tokens = len(parts)
        record.ttft = record.ttft or time.perf_counter() - record.start  # no token had a text

    async def _check_outputs(self, records: Sequence[RequestRecord]) -> list[bool]:
        """Send prompts again, one at a time; return whether each text equals the one under load."""
        chosen, equal = records[: self._options.check_outputs], list[bool]()
        for record in chosen:
            alone = await self.send(record.prompt)
            equal.append(not alone.error and alone.text == record.text)
            self._progress("outputs checked", len(equal), len(chosen))
        return equal

    # ------------------------------------------------------------ beside the requests

    async def _probe_lag(self, probe: Probe) -> None:
        """Measure how much later than requested a timer of this process runs."""
        while True:
            start = time.perf_counter()
            await asyncio.sleep(LAG_SECONDS)
            probe.lags.append(max(0.0, time.perf_counter() - start - LAG_SECONDS))

    async def _probe_server(self, probe: Probe) -> None:
        while True:
            if self._options.server_pid is not None:
                probe.rss.append(resident_bytes(self._options.server_pid))
            start = time.perf_counter()
            with suppress(OSError, HttpError, EOFError, ValueError):
                status, _ = await self._http.get("/health")
                if status == 200:
                    probe.health.append(time.perf_counter() - start)
            await asyncio.sleep(PROBE_SECONDS)


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process and its children (Linux)."""
    total, pids = 0, [pid]
    while pids:
        folder = Path(f"/proc/{pids.pop()}")
        with suppress(OSError, StopIteration, ValueError):
            status = (folder / "status").read_text().splitlines()
            total += 1024 * int(next(line for line in status if line.startswith("VmRSS:")).split()[1])
            for task in (folder / "task").iterdir():
                pids += map(int, (task / "children").read_text().split())
    return total


def bench_serve(options: LoadOptions, prompts: PromptOptions, progress: Progress) -> LoadResult:
    """Measure a running server.

    Args:
        options: The server, and how requests are sent.
        prompts: What they are.
        progress: Called after each request.

    Raises:
        UsageError: If the server cannot be reached or refuses a first request.
        DataError: If the file of prompts is invalid.
    """
    return asyncio.run(LoadClient(options, progress).run(prompts))
