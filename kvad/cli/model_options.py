"""What the commands that run a model share: opening it with a cache to order, Ctrl-C, and the text that it is given.

No torch until a model is opened.

The sampling options of the command line: one flag per field of :class:`kvad.engine.scheduling.request.SamplingParams`.

Ranges are checked before anything is loaded; what needs a tokenizer (bad words) is added afterwards.  No torch.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvad import cache
from kvad.cli.cache_options import (
    parse_policy_options,
    parse_prefix_cache_options,
    policy_options,
    prefix_cache_options,
    swap_space_option,
)
from kvad.cli.options import FORMAT, explicit_options
from kvad.errors import DataError, RequestError

if TYPE_CHECKING:
    from kvad.engine.scheduling import SamplingParams
    from kvad.llm import LLM
    from kvad.text import Tokenizer

CommandT = TypeVar("CommandT", bound=Callable[..., Any])
DTYPES = ("float64", "float32", "bfloat16", "float16")
FORMAT_OPTIONS = (
    click.option(
        "--cache-dtype",
        metavar="FORMAT",
        type=FORMAT,
        help=f"What is stored: {', '.join(cache.quantization.FORMATS)} [default: the model's].",
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


MAX_TOKENS = 128  # where neither the caller nor the checkpoint says


_NUMBERS: tuple[tuple[str, type, str], ...] = (
    ("--temperature", float, "0 is greedy [default: 1]."),
    ("--top-k", int, "Keep the K likeliest tokens [default: 0, all]."),
    ("--top-p", float, "Keep the fewest tokens whose probabilities reach P [default: 1]."),
    ("--min-p", float, "Keep tokens of at least P times the likeliest one's probability [default: 0]."),
    ("--typical-p", float, "Keep the tokens of the most typical surprise, up to mass P [default: 1]."),
    ("--repetition-penalty", float, "Above 1: tokens of prompt and output are less likely [default: 1]."),
    ("--presence-penalty", float, "Subtracted from the logits of tokens of the output, once [default: 0]."),
    ("--frequency-penalty", float, "The same, once per occurrence [default: 0]."),
    ("--min-tokens", int, "No end before so many tokens [default: 0]."),
    ("--no-repeat-ngram", int, "No sequence of N tokens comes twice [default: 0, off]."),
    ("--beams", int, "Search with so many beams instead of sampling [default: 1]."),
    ("--length-penalty", float, "Beams: scores are divided by length ** A [default: 1]."),
    ("--seed", int, "The same seed gives the same text, whoever else is in the batch [default: 0]."),
)
_FIELDS = tuple(flag.removeprefix("--").replace("-", "_") for flag, _, _ in _NUMBERS)


def sampling_options(command: CommandT) -> CommandT:
    """All of them but ``--n`` and the log-probabilities, which only ``kvad generate`` has."""
    options = [
        click.option("--max-tokens", type=int, help="New tokens, at most [default: 128; --endless: no end]."),
        *(click.option(flag, type=kind, help=text) for flag, kind, text in _NUMBERS),
        click.option("--logit-bias", multiple=True, metavar="ID=V", help="Add V to the logit of token ID. Repeatable."),
        click.option("--bad-word", multiple=True, metavar="TEXT", help="Never complete TEXT, or it after a space."),
        click.option("--stop", multiple=True, metavar="TEXT", help="End before TEXT. Repeatable."),
        click.option("--ignore-eos", is_flag=True, help="Go on past the token that ends a document."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def parse_sampling_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """What was given, by the names of :class:`Sampling`; the rest is the checkpoint's to say.

    RequestError for a value out of range.
    """
    names = (*_FIELDS, "max_tokens", "n", "logprobs", "prompt_logprobs")
    several = {"logit_bias": _biases(options["logit_bias"]), "stop": tuple(options["stop"])}
    several["ignore_eos"] = options["ignore_eos"]
    asked = {**explicit_options(options, names), **{name: value for name, value in several.items() if value}}
    check_sampling_ranges({"max_tokens": MAX_TOKENS, **asked})
    return asked


def check_sampling_ranges(asked: Mapping[str, Any]) -> None:
    """RequestError for a value out of range, before anything is opened.  What is said of a search without --beams may
    be for the checkpoint's own search: whether it has one is found when it is opened."""
    from kvad.engine import scheduling
    from kvad.engine.scheduling import SamplingParams

    of_beams = {} if "beams" in asked else explicit_options(asked, scheduling.request.BEAM_ONLY_FIELDS)
    SamplingParams.from_options(beams=2, **of_beams)
    SamplingParams.from_options(**{name: value for name, value in asked.items() if name not in of_beams})


def resolve_sampling_options(
    llm: LLM, asked: Mapping[str, Any], words: Sequence[str], *, endless: bool = False
) -> SamplingParams:
    """The options over the checkpoint's own defaults, with the bad words as this tokenizer spells them.  ``endless``:
    what is not said of the length is no length."""
    chosen = llm.sampling_params(**asked)
    if endless and "max_tokens" not in asked:
        chosen = replace(chosen, max_tokens=None)
    elif chosen.max_tokens is None:
        chosen = replace(chosen, max_tokens=MAX_TOKENS)
    return _with_bad_words(chosen, words, llm.tokenizer)


def _biases(pairs: Sequence[str]) -> dict[int, float]:
    biases = {}
    for pair in pairs:
        token, _, value = pair.partition("=")
        try:
            biases[int(token)] = float(value)
        except ValueError:
            raise RequestError(f"--logit-bias: {pair!r} is not ID=V", "write it like 42=-5.5") from None
    return biases


def _with_bad_words(sampling: SamplingParams, words: Sequence[str], tokenizer: Tokenizer | None) -> SamplingParams:
    """Each text as it is spelled, and as it is spelled after a space: to a tokenizer those are different tokens."""
    if not words:
        return sampling
    if tokenizer is None:
        raise RequestError("--bad-word needs a tokenizer, and this model came without one", "use --logit-bias ID=-1000")
    if "" in words:
        raise RequestError("--bad-word: an empty text would ban nothing or everything")
    spelled = {tuple(tokenizer.encode(text)) for word in words for text in (word, f" {word}")}
    return replace(sampling, bad_words_ids=(*sampling.bad_words_ids, *sorted(spelled)))
