"""What several commands share: the MODEL argument, ``--json``, sizes in bytes, and where output goes.

Results go to stdout; progress, notes and errors go to stderr, so that ``kvad ... --json | jq`` always works.
Imports no torch, and rich only when a console is asked for.

Help pages: one way of writing what an option takes, and long lists of options in sections.

A size is a SIZE, a count N, another number X, a folder FOLDER, a file FILE, a format FORMAT.  No torch.
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

# Whether the folder is a checkpoint is for kvad.checkpoint to say: it names what is missing.
model_argument = click.argument("model", metavar="MODEL", type=click.Path(path_type=Path))
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object on stdout.")


def figures_option(default: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``-o FILE``: figures to draw; ``default`` says where they lie without it."""
    said = f"  [default: {default}]" if default else ""
    return click.option(
        "-o",
        "--out",
        multiple=True,
        metavar="FILE",
        type=click.Path(path_type=Path),
        help=f"PNG, SVG or PDF; may be repeated.{said}",
    )


class _FormatName(click.Choice[str]):
    """A format of ``kvad/cache/formats.py``, or package.module:Class of one's own."""

    def __init__(self) -> None:
        super().__init__(tuple(cache.quantization.FORMATS))

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if ":" in str(value):
            return cache.quantization.get_format(value, param.opts[-1] if param is not None else "format").name
        return super().convert(value, param, ctx)


class ByteSize(click.ParamType[int]):
    """Bytes, as :func:`parse_bytes` reads them; 0 too, but where that would be ``nothing``."""

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
Line = tuple[str, str]  # of statistics: what it is about, and what there is to say
_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[kmgt]?)(?P<kind>i?b?)\s*", re.IGNORECASE)


def explicit_options(options: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Those of a command's options that were given."""
    return {name: options[name] for name in names if options.get(name) is not None}


def counter_diff(before: CounterT, now: CounterT, names: Iterable[str]) -> CounterT:
    """``now``, but of these counts what has come since ``before``."""
    moved = {name: getattr(now, name) - getattr(before, name) for name in names}
    return dataclasses.replace(now, **moved)


def token_ids(text: str, flag: str) -> list[int]:
    """``12 7 99``, with commas or without."""
    try:
        return [int(number) for number in text.replace(",", " ").split()]
    except ValueError as error:
        wrong = str(error).rpartition(": ")[2]
        raise UsageError(f"{flag}: {wrong} is not a token id", "write them like '12 7 99'") from None


def tokenizer_folder(model: Path) -> Path:
    """Where a model's tokenizer and chat template are; of a model on the hub nothing else is fetched."""
    from kvad import checkpoint

    folder = checkpoint.hub.resolve_model_path(model, weights=False)
    return checkpoint.folder.locate(folder) if checkpoint.folder.is_run(folder) else folder


def console() -> Console:
    """A rich console on stderr."""
    from rich.console import Console

    return Console(stderr=True)


def emit_json(result: object) -> None:
    """Print ``result`` as one line of JSON on stdout.

    Dataclasses and NamedTuples become objects, paths become strings, NaN and infinities become null (JSON has none).
    """
    click.echo(json_line(result))


def json_line(result: object) -> str:
    """What :func:`emit_json` prints, without its newline."""
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
    """Bytes of ``8GiB``, ``512MiB``, ``1.5G``, ``4GB`` or ``1024``.

    ``K M G T`` alone and with ``iB`` are powers of 1024; with ``B`` alone powers of 1000, as on a disk's label.

    Raises:
        UsageError: not a size, or less than one byte (``zero``: but not 0).
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
    """Of an option that is a number or a file's name: the number, or None."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def format_bytes(num_bytes: int | float) -> str:
    """``3221225472`` -> ``3.00 GiB``; under 1 KiB in plain bytes."""
    size = float(num_bytes)
    if abs(size) < 1024:
        return f"{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if abs(size) < 1023.995:
            return f"{size:.2f} {unit}"
    return f"{size / 1024:.2f} TiB"


def with_seq_len(config: RunConfig, tables: Mapping[str, Any], stored: RunConfig | None = None) -> RunConfig:
    """The same as the run file's ``tables`` say it; where they do not say how long rows are, and it goes on from a
    checkpoint, they are as long as that model holds, or as the run's own ``stored`` configuration has them.

    Raises CheckpointError for a model that cannot be opened."""
    if "context" in tables.get("data", {}) or (config.init is None and config.summarizer.model is None):
        return config
    if stored is not None:
        return dataclasses.replace(config, data=dataclasses.replace(config.data, seq_len=stored.data.seq_len))
    from kvad.train import setup

    return setup.initialize.clamp_seq_len(config)


_WORDS = {"INTEGER": "N", "FLOAT": "X"}
OVERFLOW_OPTIONS = ("on_full", "watermark", "park_ram", "park_dir", "spill_ram", "spill_dir")
PREFIX_CACHE_OPTIONS = ("tier", "tier_bytes", "tier_ram", "tier_replacement")
SECTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Length and end", ("max_tokens", "min_tokens", "stop", "ignore_eos", "endless")),
    ("Sampling", ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "n", "logit_bias", "bad_word")),
    ("Repetition", ("repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram")),
    ("Search", ("beams", "length_penalty", "n_best")),
    ("Cache: size and format", ("rows", "context", "source_context", "layout", "block_size", "blocks")),
    ("", ("dtype", "cache_dtype", "cache_keys", "cache_values", "weights_dtype", "deterministic")),
    ("Cache: what stays of a row", ("policy", "rotate", "compressor")),
    ("Cache: when it is full", OVERFLOW_OPTIONS),
    ("Cache: beyond the request and the process", (*PREFIX_CACHE_OPTIONS, "session", "sessions")),
)


class SectionedCommand(click.Command):
    """A command with many options: its own first, then those that commands share, by what they are about."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        records = {each.name: found for each in options if (found := each.get_help_record(ctx))}
        placed: list[tuple[str, list[tuple[str, str]]]] = []
        for title, names in SECTIONS:
            rows = [records.pop(name) for name in names if name in records]
            if title:
                placed.append((title, rows))
            else:  # the last one's, goes on
                placed[-1][1].extend(rows)
        for title, rows in (("Options", list(records.values())), *placed):
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows, col_max=30)


def normalize_metavars(command: click.Command) -> click.Command:
    """Say what its options take as this page's first lines do; in the commands of a group, too."""
    for param in command.params:
        word = _WORDS.get(param.type.name.upper().partition(" ")[0])  # of a range, too
        if isinstance(param, click.Option) and param.metavar is None and word and not (param.is_flag or param.count):
            param.metavar = word
    if isinstance(command, click.Group):
        for child in command.commands.values():
            normalize_metavars(child)
    return command
