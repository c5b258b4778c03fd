"""What the commands that run a model share: opening it with a cache to order, Ctrl-C, and the text that it is given.

No torch until a model is opened.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvad.cache.formats import FORMATS
from kvad.cli.common import FORMAT
from kvad.cli.policies import parse_policy_options, policy_options, swap_space_option
from kvad.cli.tiers import parse_prefix_cache_options, prefix_cache_options
from kvad.errors import DataError

if TYPE_CHECKING:
    from kvad.llm import LLM

__all__ = [
    "InterruptFlag",
    "adapter_option",
    "add_cache_options",
    "deterministic_option",
    "format_options",
    "parse_format_options",
    "open_llm",
]
__all__ += ["read_stdin", "read_prompt_text"]

CommandT = TypeVar("CommandT", bound=Callable[..., Any])
DTYPES = ("float64", "float32", "bfloat16", "float16")
FORMAT_OPTIONS = (
    click.option(
        "--cache-dtype",
        metavar="FORMAT",
        type=FORMAT,
        help=f"What is stored: {', '.join(FORMATS)} [default: the model's].",
    ),
    click.option("--cache-keys", metavar="FORMAT", type=FORMAT, help="The same, of keys alone."),
    click.option("--cache-values", metavar="FORMAT", type=FORMAT, help="The same, of values alone."),
)


deterministic_option = click.option(
    "--deterministic", is_flag=True, help="The same bits alone and in any batch, on this machine (CPU; slower)."
)


adapter_option = click.option(
    "--adapter",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="A LoRA adapter, kvad's or PEFT's, merged into the weights.",
)


def add_cache_options(command: CommandT) -> CommandT:
    options: list[Callable[[Any], Any]] = [
        click.option("--rows", type=int, help="Live sequences of the cache [default: as many as asked for, up to 8]."),
        click.option("--layout", type=click.Choice(["paged", "contiguous"]), help="[default: paged]"),
        *FORMAT_OPTIONS,
        click.option("--block-size", type=int, help="Slots of a block [default: 16]."),
        click.option("--context", type=int, help="Tokens of the longest row [default: the model's limit]."),
        click.option("--blocks", type=int, help="Blocks of the pool [default: for every row at its longest]."),
        swap_space_option,
        click.option(
            "--park-dir",
            metavar="FOLDER",
            type=click.Path(path_type=Path),
            help="Where rows go for which that is too little.",
        ),
        deterministic_option,
        policy_options,
        prefix_cache_options,
        click.option(
            "--compressor",
            metavar="FOLDER",
            type=click.Path(path_type=Path),
            help="What makes a hierarchy's summaries.",
        ),
        adapter_option,
    ]
    for option in reversed(options):
        command = option(command)
    return command


def format_options(command: CommandT) -> CommandT:
    """In which formats keys and values are stored."""
    for option in reversed(FORMAT_OPTIONS):
        command = option(command)
    return command


def parse_format_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """What of ``cache_dtype``, ``cache_keys``, ``cache_values`` was said."""
    said = {name: options[name] for name in ("cache_dtype", "cache_keys", "cache_values")}
    return {name: value for name, value in said.items() if value is not None}


def open_llm(model: Path, options: Mapping[str, Any], *, rows: int) -> LLM:
    """Load a model with the cache that ``options`` ask for, of ``rows`` rows where they do not say.

    Raises CheckpointError, ConfigError or MemoryPlanError, each before the cache is allocated.
    """
    from kvad.llm import LLM

    asked = {
        "rows": options["rows"] if options["rows"] is not None else rows,
        "layout": options["layout"],
        "block_size": options["block_size"],
        "capacity": options["context"],
        "blocks": options["blocks"],
        "park_dir": options["park_dir"],
        "compressor": options["compressor"],
        "adapter": options["adapter"],
    }
    fields = {name: value for name, value in asked.items() if value is not None}
    chosen = {**parse_format_options(options), **parse_policy_options(options), **parse_prefix_cache_options(options)}
    return LLM.load(model, deterministic=options["deterministic"], **chosen, **fields)


def read_stdin() -> str:
    """All of standard input, as it is.  DataError names the first byte that is not UTF-8."""
    raw = sys.stdin.buffer.read()
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"standard input is not UTF-8 at byte {error.start} (0x{raw[error.start]:02X})") from None


def read_prompt_text(prompt: str | None, file: Path | None) -> str:
    """The text of --prompt, or of its --file; - is standard input, and "" what nobody said.  DataError: not UTF-8."""
    if prompt is not None and file is not None:
        raise click.UsageError("--prompt and --file both given: one of them is the text.")
    if prompt == "-" or str(file) == "-":
        return read_stdin()
    if file is None:
        return prompt or ""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 at byte {error.start}") from None


class InterruptFlag:
    """``with Interrupt() as stop``: the first Ctrl-C sets ``stop.asked``, so that a step in flight ends well; a second
    one raises KeyboardInterrupt.  In a thread that gets no signals it does nothing."""

    def __init__(self) -> None:
        self.requested = False
        self._before: Any = None

    def __enter__(self) -> InterruptFlag:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
