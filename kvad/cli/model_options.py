"""Options of the commands that run a model: cache, dtype, adapter and sampling; prompt text and Ctrl-C.

There is one flag per field of :class:`~kvad.engine.scheduling.request.SamplingParams`. Ranges are checked before
anything is loaded; bad words, which need a tokenizer, are added afterwards. No torch until a model is loaded.
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
LOAD_OPTIONS = (
    "max_num_seqs", "layout", "block_size", "max_seq_len", "num_blocks", "swap_dir", "summarizer", "adapter"
)  # fmt: skip
DTYPES = ("float64", "float32", "bfloat16", "float16")
FORMAT_OPTIONS = (
    click.option(
        "--cache-dtype",
        metavar="FORMAT",
        type=FORMAT,
        help=f"Format of keys and values: {', '.join(cache.quantization.FORMATS)} [default: the model's dtype].",
    ),
    click.option(
        "--cache-key-dtype", metavar="FORMAT", type=FORMAT, help="Format of the keys [default: --cache-dtype]."
    ),
    click.option(
        "--cache-value-dtype", metavar="FORMAT", type=FORMAT, help="Format of the values [default: --cache-dtype]."
    ),
)


deterministic_option = click.option(
    "--deterministic", is_flag=True, help="Make results independent of the batch (CPU only, slower)."
)


adapter_option = click.option(
    "--adapter",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="LoRA adapter, kvad's or PEFT's, to merge into the weights.",
)


def add_cache_options(command: CommandT) -> CommandT:
    options: list[Callable[[Any], Any]] = [
        click.option(
            "--max-num-seqs",
            type=int,
            help="Maximum number of sequences in the cache [default: as many as requested, up to 8].",
        ),
        click.option("--layout", type=click.Choice(["paged", "contiguous"]), help="Cache layout [default: paged]."),
        *FORMAT_OPTIONS,
        click.option("--block-size", type=int, help="Tokens per block [default: 16]."),
        click.option(
            "-c", "--max-seq-len", type=int, help="Maximum tokens of a sequence [default: the model's limit]."
        ),
        click.option(
            "--num-blocks", type=int, help="Blocks of the pool [default: enough for all sequences at full length]."
        ),
        swap_space_option,
        click.option(
            "--swap-dir",
            metavar="FOLDER",
            type=click.Path(path_type=Path),
            help="Folder for swapped sequences beyond --swap-space [default: none].",
        ),
        deterministic_option,
        policy_options,
        prefix_cache_options,
        click.option(
            "--summarizer",
            metavar="FOLDER",
            type=click.Path(path_type=Path),
            help="Summarizer for a tiered policy with summaries.",
        ),
        adapter_option,
    ]
    for option in reversed(options):
        command = option(command)
    return command


def format_options(command: CommandT) -> CommandT:
    """Add the options for the formats of keys and values."""
    for option in reversed(FORMAT_OPTIONS):
        command = option(command)
    return command


def parse_format_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the explicitly given formats of keys and values."""
    return explicit_options(options, ("cache_dtype", "cache_key_dtype", "cache_value_dtype"))


def open_llm(model: Path, options: Mapping[str, Any], *, max_num_seqs: int) -> LLM:
    """Load a model with the cache that the options describe.

    Args:
        model: The checkpoint.
        options: Values of :func:`add_cache_options`.
        max_num_seqs: Number of sequences if the options do not set it.

    Raises:
        CheckpointError, ConfigError, MemoryPlanError: Each before the cache is allocated.
    """
    from kvad.llm import LLM

    fields = {"max_num_seqs": max_num_seqs, **explicit_options(options, LOAD_OPTIONS)}
    fields |= {**parse_format_options(options), **parse_policy_options(options), **parse_prefix_cache_options(options)}
    return LLM.load(model, deterministic=options["deterministic"], **fields)


def read_stdin() -> str:
    """Read standard input unchanged; DataError names the first byte that is not UTF-8."""
    raw = sys.stdin.buffer.read()
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"standard input is not UTF-8 at byte {error.start} (0x{raw[error.start]:02X})") from None


def read_prompt_text(prompt: str | None, file: Path | None) -> str:
    """Return the text of --prompt or --file ("-" reads standard input); "" without either.

    Raises:
        DataError: If the text is not UTF-8.
    """
    if prompt is not None and file is not None:
        raise click.UsageError("--prompt and --file exclude each other: give one of them.")
    if prompt == "-" or str(file) == "-":
        return read_stdin()
    if file is None:
        return prompt or ""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 at byte {error.start}") from None


class InterruptFlag:
    """Flag that the first Ctrl-C sets, so that the current step can finish; the second raises KeyboardInterrupt.

    Use it as ``with InterruptFlag() as stop`` and read ``stop.requested``. Outside the main thread it does nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: Any = None

    def __enter__(self) -> InterruptFlag:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._set)
        return self

    def _set(self, signum: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)


MAX_TOKENS = 128  # default of --max-tokens if the checkpoint has none


_NUMBERS: tuple[tuple[str, type, str], ...] = (
    ("-t/--temperature", float, "Sampling temperature; 0 is greedy [default: 1]."),
    ("--top-k", int, "Sample from the K most likely tokens; 0 is off [default: 0]."),
    ("--top-p", float, "Sample from the most likely tokens that together reach probability P [default: 1]."),
    ("--min-p", float, "Drop tokens below P times the highest probability [default: 0]."),
    ("--typical-p", float, "Sample from the tokens of most typical information, up to probability P [default: 1]."),
    ("--repetition-penalty", float, "Above 1, make tokens of prompt and output less likely [default: 1]."),
    ("--presence-penalty", float, "Subtract X from the logits of tokens that the output contains [default: 0]."),
    ("--frequency-penalty", float, "Subtract X per occurrence in the output [default: 0]."),
    ("--min-tokens", int, "Minimum number of new tokens [default: 0]."),
    ("--no-repeat-ngram-size", int, "Never repeat a sequence of N tokens; 0 is off [default: 0]."),
    ("--num-beams", int, "Beams of a beam search; 1 is sampling [default: 1]."),
    ("--length-penalty", float, "Divide beam scores by length ** X [default: 1]."),
    ("-s/--seed", int, "Seed of the samples, independent of the batch [default: 0]."),
)
_FIELDS = tuple(flag.rpartition("--")[2].replace("-", "_") for flag, _, _ in _NUMBERS)


def sampling_options(command: CommandT) -> CommandT:
    """Add the sampling options except ``--n`` and the log-probabilities, which only ``kvad generate`` has."""
    options = [
        click.option(
            "-n", "--max-tokens", type=int, help="Maximum number of new tokens [default: 128; none with --endless]."
        ),
        *(click.option(*flag.split("/"), type=kind, help=text) for flag, kind, text in _NUMBERS),
        click.option("--logit-bias", multiple=True, metavar="ID=V", help="Add V to the logit of token ID. Repeatable."),
        click.option(
            "--bad-word", multiple=True, metavar="TEXT", help="Never generate TEXT, also after a space. Repeatable."
        ),
        click.option("--stop", multiple=True, metavar="TEXT", help="Stop before TEXT. Repeatable."),
        click.option("--ignore-eos", is_flag=True, help="Continue after end tokens."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def parse_sampling_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the explicitly given sampling options as SamplingParams fields.

    Raises:
        RequestError: If a value is out of range.
    """
    names = (*_FIELDS, "max_tokens", "n", "logprobs", "prompt_logprobs")
    collections: dict[str, Any] = {"logit_bias": _biases(options["logit_bias"]), "stop": tuple(options["stop"])}
    collections["ignore_eos"] = options["ignore_eos"]
    fields = {**explicit_options(options, names), **{name: value for name, value in collections.items() if value}}
    check_sampling_ranges({"max_tokens": MAX_TOKENS, **fields})
    return fields


def check_sampling_ranges(fields: Mapping[str, Any]) -> None:
    """Check the ranges of sampling options before anything is loaded.

    Beam options without --num-beams may belong to the checkpoint's own beam search; only their ranges are checked.

    Raises:
        RequestError: If a value is out of range.
    """
    from kvad.engine import scheduling
    from kvad.engine.scheduling import SamplingParams

    beam_fields = {} if "num_beams" in fields else explicit_options(fields, scheduling.request.BEAM_ONLY_FIELDS)
    SamplingParams.from_options(num_beams=2, **beam_fields)
    SamplingParams.from_options(**{name: value for name, value in fields.items() if name not in beam_fields})


def resolve_sampling_options(
    llm: LLM, fields: Mapping[str, Any], bad_words: Sequence[str], *, endless: bool = False
) -> SamplingParams:
    """Merge the options with the defaults of the checkpoint.

    Args:
        llm: The loaded model.
        fields: Explicitly given SamplingParams fields.
        bad_words: Texts that must not be generated.
        endless: Without --max-tokens, generation has no maximum length.
    """
    params = llm.sampling_params(**fields)
    if endless and "max_tokens" not in fields:
        params = replace(params, max_tokens=None)
    elif params.max_tokens is None:
        params = replace(params, max_tokens=MAX_TOKENS)
    return _with_bad_words(params, bad_words, llm.tokenizer)


def _biases(pairs: Sequence[str]) -> dict[int, float]:
    biases = {}
    for pair in pairs:
        token, _, value = pair.partition("=")
        try:
            biases[int(token)] = float(value)
        except ValueError:
            raise RequestError(f"--logit-bias: {pair!r} is not ID=V", "write it like 42=-5.5") from None
    return biases


def _with_bad_words(sampling: SamplingParams, bad_words: Sequence[str], tokenizer: Tokenizer | None) -> SamplingParams:
    """Ban the tokens of each text, and of the text after a space, which a tokenizer encodes differently."""
    if not bad_words:
        return sampling
    if tokenizer is None:
        raise RequestError("--bad-word: the model has no tokenizer", "use --logit-bias ID=-1000")
    if "" in bad_words:
        raise RequestError("--bad-word: must not be empty")
    spelled = {tuple(tokenizer.encode(text)) for word in bad_words for text in (word, f" {word}")}
    return replace(sampling, bad_words_ids=(*sampling.bad_words_ids, *sorted(spelled)))
