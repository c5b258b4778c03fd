"""``kvad serve [MODEL]``: OpenAI's API and a web page for one model."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvad.cache import sizing
from kvad.cli import parameters
from kvad.cli.fields import argument, command, option
from kvad.cli.output import exit_with, format_table, note
from kvad.errors import UsageError, format_count, suggest
from kvad.server import ApiKeys, ServerConfig, ServerLimits

if TYPE_CHECKING:
    from kvad.server import AsyncLLM

DEMO_RUN = Path("runs/demo")
MAX_SEQS = 64  # default of --max-num-seqs, if the memory suffices


class _ServeOptions(
    parameters.CacheSizeOptions, parameters.FormatOptions, parameters.PolicyOptions, parameters.EndlessOption,
    parameters.PrefixCacheOptions, parameters.SpeculativeOptions, parameters.ComputeOptions,
    parameters.SessionDirOption,
):  # fmt: skip
    model: Path | None = argument("[MODEL]")
    host: str = option("Address to listen on", "127.0.0.1", common=True)
    port: int = option("Port to listen on; 0 is a free one", 8000, short="-p", common=True)
    model_name: str = option("Name of the model in the API [default: the folder's name]", "", metavar="NAME")
    adapter: tuple[str, ...] = option(
        "LoRA adapter, kvad's or PEFT's: NAME=FOLDER is served next to the base, as the model NAME; "
        "FOLDER is merged into the weights",
        metavar="NAME=FOLDER",
    )
    api_key_file: Path | None = option(
        f"File with one API key per line [default: {parameters.KEY_VARIABLE}, else no key is required]",
        metavar="FILE",
        common=True,
    )
    allowed_host: tuple[str, ...] = option("Host header to accept besides local ones and IP addresses; * is every one")
    cors_origin: tuple[str, ...] = option("Site whose pages may send requests, such as https://example.org")
    limit: tuple[str, ...] = option("Change a limit of requests, such as max_n=4", metavar="NAME=N")
    limits: bool = option("Print the limits of requests, and exit")
    shutdown_timeout: float = option(
        "Time in which running requests may finish after SIGTERM", 10.0, kind=parameters.SECONDS
    )
    max_slowdown: float = option(
        "Ratio by which reading prompts may lengthen the time between tokens of running sequences; 0 is no bound", 2.0
    )
    engine_nice: int = option(
        "Lower priority of the engine than of the server, 0 to 19: the server answers sooner while all cores compute", 0
    )
    replicas: int = option("Engines behind Ray Serve, which needs kvad[ray]; 1 is an engine without Ray", 1)
    share_prefixes: bool = option("Share cached prefixes between API keys")
    ignore_unknown_fields: bool = option("Ignore unknown fields of requests, and name them in a header, instead of 400")
    attention: bool = option("Let clients read attention weights")
    runs: Path = option("Folder of training runs that the page shows", Path("runs"))


@command("serve", _ServeOptions)
def serve_command(options: _ServeOptions) -> None:
    """Serve a model over HTTP: OpenAI's API under /v1, a web page at /, metrics at /metrics.

    Without MODEL, the model of kvad demo is served; it is trained first if there is none.

    \b
    kvad serve runs/demo
    kvad serve ./Qwen3-0.6B --port 8080 --max-num-seqs 32 --api-key-file keys.txt
    kvad serve ./Qwen3-0.6B --adapter sql=runs/sql --adapter law=runs/law
    curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
        -d '{"prompt": "def __init__(self", "max_tokens": 32}'
    """
    limits = _limits(options.limit)
    if options.limits:
        rows = [("limit", "value", "status", ""), *limits.table()]
        click.echo("\n".join(format_table(rows)))
        return
    load = {**parameters.load_fields(options), **_adapters(options.adapter)}
    load |= {"max_slowdown": options.max_slowdown or None, "nice": options.engine_nice}
    config = ServerConfig(
        model_name=options.model_name,
        host=options.host,
        port=options.port,
        api_keys=_api_keys(options.api_key_file),
        allowed_hosts=options.allowed_host,
        cors_origins=options.cors_origin,
        limits=limits,
        num_replicas=options.replicas,
        shutdown_seconds=options.shutdown_timeout,
        session_dir=options.session_folder / "server",
        shares_prefixes=options.share_prefixes,
        ignores_unknown_fields=options.ignore_unknown_fields,
        runs_dir=options.runs,
        attention=options.attention,
    )
    from kvad.cli.commands import demo
    from kvad.server import check_address, serve

    check_address(config)  # before a model is trained or loaded
    model = DEMO_RUN if options.model is None else options.model
    if options.model is None and demo.needs_training(model):
        note(f"no MODEL is given: training the demo's model in {model}, about {demo.MINUTES:g} minutes; stop: Ctrl-C")
        demo.train_demo(model, demo.MINUTES)
    budget = sizing.MemoryBudget(load.get("memory", "auto"), MAX_SEQS)
    exit_with(serve(model, {**load, "memory": budget}, config, _announce))


def _announce(address: str, llm: AsyncLLM) -> None:
    info = llm.info
    tokens = info["num_blocks"][0] * info["block_size"] if info["num_blocks"] else 0
    room = f"room for {format_count(info['max_num_seqs'], 'sequence')} and {tokens:,} cached tokens" if tokens else ""
    note(f"{info['name']} in {info['dtype']}: {room}" if room else f"{info['name']} in {info['dtype']}")
    click.echo(f"serving {address}  (page: {address}/  API: {address}/v1  stop: Ctrl-C)")


def _adapters(given: tuple[str, ...]) -> dict[str, Any]:
    """Return the keywords ``adapter`` (merged) and ``adapters`` (by name) of ``LLM.load``."""
    merged, named = parameters.split_adapters(given)
    if len(merged) > 1:
        message = f"--adapter: {merged[0]} and {merged[1]} cannot both be merged"
        raise UsageError(message, "Write NAME=FOLDER to serve each as a model.")
    return {"adapter": Path(merged[0]) if merged else None, "adapters": named}


def _api_keys(path: Path | None) -> ApiKeys:
    if path is not None:
        return ApiKeys.from_file(path)
    text = os.environ.get(parameters.KEY_VARIABLE, "")
    return ApiKeys.from_texts(text.split(",")) if text else ApiKeys()


def _limits(given: tuple[str, ...]) -> ServerLimits:
    fields = {field.name: field for field in dataclasses.fields(ServerLimits)}
    values: dict[str, Any] = {}
    for text in given:
        name, _, value = text.partition("=")
        if name not in fields:
            raise UsageError(f"--limit: unknown limit {name!r}", suggest(name, fields))
        is_float = isinstance(fields[name].default, float)
        try:
            values[name] = float(value) if is_float else int(value)
        except ValueError:
            raise UsageError(f"--limit: {name} must be a number, got {value!r}", "Write it like max_n=4.") from None
    return ServerLimits(**values)
