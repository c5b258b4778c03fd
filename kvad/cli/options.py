"""Options and output helpers of all commands: the MODEL argument, ``--json``, byte sizes, sections of help pages.

Results go to stdout; progress, notes and errors go to stderr, so that ``kvad ... --json | jq`` always works.
No torch, and rich only when a console is requested. Help pages name values in one form: a size is SIZE, a count N,
another number X, a folder FOLDER, a file FILE, a format FORMAT.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvad import cache
from kvad.errors import UsageError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from rich.console import Console

    from kvad.train.config import RunConfig

CounterT = TypeVar("CounterT", bound="DataclassInstance")

# kvad.checkpoint checks whether the folder is a checkpoint, and names the missing file.
model_argument = click.argument("model", metavar="MODEL", type=click.Path(path_type=Path))
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object on stdout.")


def figures_option(default: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Build ``-o FILE`` for figures; ``default`` describes the files that are written without it."""
    suffix = f" [default: {default}]" if default else ""
    return click.option(
        "-o",
        "--out",
        multiple=True,
        metavar="FILE",
        type=click.Path(path_type=Path),
        help=f"File for the figure: PNG, SVG or PDF. Repeatable.{suffix}",
    )


class _FormatName(click.Choice[str]):
    """A format of ``kvad.cache.quantization``, or a custom format named as package.module:Class."""

    def __init__(self) -> None:
        super().__init__(tuple(cache.quantization.FORMATS))

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if ":" in str(value):
            return cache.quantization.get_format(value, param.opts[-1] if param is not None else "format").name
        return super().convert(value, param, ctx)


class ByteSize(click.ParamType[int]):
    """A size in bytes, read by :func:`parse_bytes`.

    Zero is refused with the message ``nothing``, if one is given.
    """

    name = "SIZE"

    def __init__(self, nothing: str = "") -> None:
        self._nothing = nothing

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        flag = param.opts[-1] if param is not None else self.name
        try:
            size = parse_bytes(str(value), zero=True)
        except UsageError as error:
            raise UsageError(f"{flag}: {error.message}", error.hint) from None
        if not size and self._nothing:
            raise UsageError(f"{flag}: {self._nothing}", "leave it out, or give it more")
        return size


FORMAT, SIZE = _FormatName(), ByteSize()
Line = tuple[str, str]  # of statistics: label, text
_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[kmgt]?)(?P<kind>i?b?)\s*", re.IGNORECASE)


def explicit_options(options: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the explicitly given options among ``names``."""
    return {name: options[name] for name in names if options.get(name) is not None}


def counter_diff(before: CounterT, now: CounterT, names: Iterable[str]) -> CounterT:
    """Return ``now`` with the named counters reduced by their values in ``before``."""
    changed = {name: getattr(now, name) - getattr(before, name) for name in names}
    return dataclasses.replace(now, **changed)


def token_ids(text: str, flag: str) -> list[int]:
    """Parse token ids such as ``12 7 99``, with or without commas."""
    try:
        return [int(number) for number in text.replace(",", " ").split()]
    except ValueError as error:
        wrong = str(error).rpartition(": ")[2]
        raise UsageError(f"{flag}: {wrong} is not a token id", "write ids like '12 7 99'") from None


def tokenizer_folder(model: Path) -> Path:
    """Return the folder of a model's tokenizer and chat template; no weights are downloaded from the hub."""
    from kvad import checkpoint

    folder = checkpoint.hub.resolve_model_path(model, weights=False)
    return checkpoint.folder.locate(folder) if checkpoint.folder.is_run(folder) else folder


def console() -> Console:
    """Create a rich console on stderr."""
    from rich.console import Console

    return Console(stderr=True)


def emit_json(result: object) -> None:
    """Print ``result`` as one line of JSON on stdout.

    Dataclasses and NamedTuples become objects, paths become strings, NaN and infinities become null (JSON has none).
    """
    click.echo(json_line(result))


def json_line(result: object) -> str:
    """Format ``result`` as :func:`emit_json` prints it, without the newline."""
    return json.dumps(_plain(result), ensure_ascii=False, allow_nan=False)


def _plain(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"emit_json: {type(value).__name__} has no JSON form")


def parse_bytes(text: str, *, zero: bool = False) -> int:
    """Parse a size such as ``8GiB``, ``512MiB``, ``1.5G``, ``4GB`` or ``1024``.

    ``K M G T`` alone and with ``iB`` are powers of 1024; with ``B`` alone they are powers of 1000.

    Args:
        text: The size.
        zero: Accept 0.

    Returns:
        The size in bytes.

    Raises:
        UsageError: If ``text`` is not a size, or less than one byte.
    """
    match = _SIZE.fullmatch(text)
    if match is None or (match["kind"].lower() == "i") or (not match["unit"] and match["kind"].lower() == "ib"):
        raise UsageError(f"{text!r} is not a size in bytes", "write it like 8GiB, 512MiB, 4GB or 1048576")
    base = 1000 if match["unit"] and match["kind"].lower() == "b" else 1024
    number = float(match["number"])
    size = int(number * base ** _UNITS[match["unit"].lower()])
    if size < 1 and not (zero and number == 0):
        raise UsageError(f"{text!r} is less than one byte", "write it like 8GiB, 512MiB, 4GB or 1048576")
    return size


def parse_optional_number(text: str | None) -> float | None:
    """Parse the value of an option that is a number or a file name; None if it is not a number."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def format_bytes(num_bytes: int | float) -> str:
    """Format a size: ``3221225472`` -> ``3.00 GiB``; below 1 KiB in bytes."""
    size = float(num_bytes)
    if abs(size) < 1024:
        return f"{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if abs(size) < 1023.995:
            return f"{size:.2f} {unit}"
    return f"{size / 1024:.2f} TiB"


def with_seq_len(config: RunConfig, tables: Mapping[str, Any], stored: RunConfig | None = None) -> RunConfig:
    """Set ``data.seq_len`` of a run that starts from a checkpoint and does not set it.

    Args:
        config: The run, read from ``tables``.
        tables: The tables of the run file.
        stored: The configuration of the run that is resumed; its ``seq_len`` is used.

    Returns:
        ``config``, or a copy whose rows are at most as long as the checkpoint allows.

    Raises:
        CheckpointError: If the model cannot be opened.
    """
    if "seq_len" in tables.get("data", {}) or (config.init is None and config.summarizer.model is None):
        return config
    if stored is not None:
        return dataclasses.replace(config, data=dataclasses.replace(config.data, seq_len=stored.data.seq_len))
    from kvad.train import setup

    return setup.initialize.clamp_seq_len(config)


_WORDS = {"INTEGER": "N", "FLOAT": "X"}
OVERFLOW_OPTIONS = ("overflow", "watermark", "swap_space", "swap_dir", "offload_ram", "offload_dir")
PREFIX_CACHE_OPTIONS = ("prefix_cache_dir", "prefix_cache_size", "prefix_cache_ram", "prefix_cache_eviction")
SECTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Length", ("max_tokens", "min_tokens", "stop", "ignore_eos", "endless")),
    ("Sampling", ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "n", "logit_bias", "bad_word")),
    ("Repetition", ("repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size")),
    ("Search", ("num_beams", "length_penalty", "n_best")),
    ("Cache size and format", ("max_num_seqs", "max_seq_len", "max_source_len", "layout", "block_size", "num_blocks")),
    ("", ("dtype", "cache_dtype", "cache_key_dtype", "cache_value_dtype", "deterministic")),
    ("Cache policy", ("policy", "rope_at", "summarizer")),
    ("Cache overflow", OVERFLOW_OPTIONS),
    ("Prefix cache and sessions", (*PREFIX_CACHE_OPTIONS, "session", "session_dir")),
)


class SectionedCommand(click.Command):
    """A command with many options: its own options first, then the shared ones in sections."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        records = {option.name: record for option in options if (record := option.get_help_record(ctx))}
        sections: list[tuple[str, list[tuple[str, str]]]] = []
        for title, names in SECTIONS:
            rows = [records.pop(name) for name in names if name in records]
            if title:
                sections.append((title, rows))
            else:  # continues the previous section
                sections[-1][1].extend(rows)
        for title, rows in (("Options", list(records.values())), *sections):
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows, col_max=30)


def normalize_metavars(command: click.Command) -> click.Command:
    """Give the options of a command, and of the commands of a group, the metavars of the module docstring."""
    for param in command.params:
        word = _WORDS.get(param.type.name.upper().partition(" ")[0])  # of a range, too
        if isinstance(param, click.Option) and param.metavar is None and word and not (param.is_flag or param.count):
            param.metavar = word
    if isinstance(command, click.Group):
        for child in command.commands.values():
            normalize_metavars(child)
    return command
