"""``kvad bench serve``: a load test of a server with OpenAI's API."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from kvad import benchmarks
from kvad.cli import output
from kvad.cli.fields import Options, argument, command, option
from kvad.cli.parameters import KEY_VARIABLE, JsonOption
from kvad.errors import UsageError, format_bytes, format_count

NAMES = {
    "ttft": "time to first token", "tpot": "time per token", "itl": "between two events", "e2el": "whole request",
    "reject": "refusal (429)", "health": "/health", "client_lag": "lag of this client",
}  # fmt: skip


class _PromptOptions(Options):
    section = "Requests"
    dataset: Literal["random", "prefix", "file"] = option(
        "Random words, random words after shared prefixes, or a file", "random"
    )
    num_prompts: int = option("Number of requests", 100, short="-n", common=True)
    input_len: int = option("Median tokens of a random text", 128)
    output_len: int = option("Median tokens to generate", 64)
    sigma: float = option("Spread of the lengths: standard deviation of their logarithms", 0.6)
    num_prefixes: int = option("Number of shared prefixes (prefix)", 4)
    prefix_len: int = option("Tokens of a shared prefix (prefix)", 256)
    path: Path | None = option('JSON lines with "prompt" and "max_tokens" (file)', metavar="FILE")
    seed: int = option("Seed of prompts and arrival times", 0, short="-s")


class _ServeBenchOptions(_PromptOptions, JsonOption):
    target: str = argument("URL|MODEL", required=True)
    request_rate: float = option("Requests per second, at random times; inf sends all at once", math.inf, common=True)
    burstiness: float = option("Regularity of the arrival times: 1 is a Poisson process, more is more regular", 1.0)
    max_concurrency: int | None = option("Maximum number of requests at the same time", common=True)
    goodput: str = option(
        "Latencies of a good request in milliseconds, such as ttft:500,tpot:50", "", metavar="NAME:MS,..."
    )
    check_outputs: int = option("Send N of the prompts again, alone, and compare the texts", 0)
    num_warmups: int = option("Requests before the measurement", 4)
    chat: bool = option("Use /v1/chat/completions instead of /v1/completions")
    model_name: str = option("Name of the model [default: the first of /v1/models]", "", metavar="NAME")
    api_key: str = option("API key", "", metavar="KEY", envvar=KEY_VARIABLE)
    stop_at_eos: bool = option("Let texts end at the end token, instead of after exactly their number of tokens")
    timeout: float = option("Maximum seconds of a request", 600.0)
    server_pid: int | None = option("Process of a local server, to report its memory")


@command("serve", _ServeBenchOptions)
def serve_bench_command(options: _ServeBenchOptions) -> None:
    """Measure a server with OpenAI's API under load; with a MODEL, kvad serve is started for it.

    Requests arrive at random times of --request-rate, or as soon as one of --max-concurrency has ended. The JSON
    record has the keys of vLLM's benchmark.

    \b
    kvad bench serve runs/demo --max-concurrency 8
    kvad bench serve http://127.0.0.1:8000 --request-rate 4 --goodput ttft:500,tpot:50 --check-outputs 20
    """
    with _server(options.target, options.model_name) as (url, pid), output.ProgressLine() as progress:
        load = benchmarks.serve.LoadOptions(
            url=url,
            model=options.model_name,
            chat=options.chat,
            api_key=options.api_key,
            request_rate=options.request_rate,
            burstiness=options.burstiness,
            max_concurrency=options.max_concurrency,
            num_warmups=options.num_warmups,
            goodput=_parse_goodput(options.goodput),
            ignore_eos=not options.stop_at_eos,
            timeout=options.timeout,
            check_outputs=options.check_outputs,
            server_pid=options.server_pid if pid is None else pid,
            seed=options.seed,
        )
        names = benchmarks.serve.PromptOptions.__dataclass_fields__
        prompts = benchmarks.serve.PromptOptions(**{name: getattr(options, name) for name in names})
        result = benchmarks.bench_serve(load, prompts, progress.update)
    record = result.as_json()
    output.print_result(options.as_json, record, serve_lines(record))


@contextmanager
def _server(target: str, model_name: str) -> Iterator[tuple[str, int | None]]:
    """Yield the address of a server and, if it was started here for a model, its process; that one has no API keys."""
    if target.startswith(("http://", "https://")):
        yield target, None
        return
    command_line = [sys.executable, "-m", "kvad", "serve", target, "--port", "0"]
    command_line += ["--model-name", model_name] if model_name else []
    environment = {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}
    with subprocess.Popen(command_line, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            words = process.stdout.readline().split()
            if words[:1] != ["serving"]:
                raise UsageError(f"kvad serve {target} has ended with {process.wait()}", "Its message is above.")
            yield words[1], process.pid
        finally:
            process.terminate()


def _parse_goodput(text: str) -> dict[str, float]:
    limits = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition(":")
        try:
            limits[name.strip()] = float(value)
        except ValueError:
            raise UsageError(f"--goodput: must be NAME:MS, got {part!r}", "Write it like ttft:500,tpot:50.") from None
    return limits


def serve_lines(record: dict[str, Any]) -> list[str]:
    """Format a record: requests, tokens, rates, then a table of latencies."""
    rows = [("milliseconds", "mean", *(f"p{q}" for q in benchmarks.serve.PERCENTILES))]
    for metric, name in NAMES.items():
        if f"mean_{metric}_ms" in record:
            numbers = [
                record[f"{part}_{metric}_ms"] for part in ("mean", *(f"p{q}" for q in benchmarks.serve.PERCENTILES))
            ]
            rows.append((name, *(f"{number:.2f}" for number in numbers)))
    failed = "".join(f", {count} failed with {error}" for error, count in record["errors"].items())
    cached, most = f"{record['total_cached_tokens']:,} cached", record["max_concurrent_requests"]
    rates = [("request", "requests"), ("output", "generated tokens"), ("total_token", "tokens")]
    lines = [
        f"{record['model_id']}: {format_count(record['completed'], 'request')} in {record['duration']:.2f} s{failed}",
        f"{record['total_input_tokens']:,} tokens in ({cached}), {record['total_output_tokens']:,} tokens out",
        ", ".join(f"{record[f'{key}_throughput']:.1f} {noun}/s" for key, noun in rates),
        f"at most {most} requests at the same time",
    ]
    if record["request_goodput"] is not None:
        lines.append(f"goodput: {record['request_goodput']:.2f} requests/s")
    if "server_rss_max" in record:
        start, most = (format_bytes(record[f"server_rss_{name}"]) for name in ("start", "max"))
        lines.append(f"memory of the server: {start} at the start, at most {most}")
    if "outputs_checked" in record:
        lines.append(f"{record['outputs_equal']} of {record['outputs_checked']} texts are the same alone")
    return [*lines, "", *output.format_table(rows, left=(0,))]
