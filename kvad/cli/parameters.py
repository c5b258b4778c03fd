"""Parameters that several commands share, and the objects built from them, such as SamplingParams."""

from __future__ import annotations

import math
import re
import signal
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, get_args

import click

from kvad import cache, checkpoint, engine, storage
from kvad import text as text_lib
from kvad.cache import CacheConfig, sessions, sizing
from kvad.cli.fields import Options, Parsed, argument, flag_of, given_fields, is_given, option, parse_count
from kvad.cli.output import note
from kvad.engine import scheduling
from kvad.engine.scheduling import SamplingParams, SpeculativeConfig, StructuredOutput
from kvad.errors import DataError, RequestError, UsageError
from kvad.text import Tokenizer

if TYPE_CHECKING:
    from kvad.checkpoint import CheckpointHandle
    from kvad.llm import LLM

Dtype = Literal["float64", "float32", "bfloat16", "float16"]
PairFiles = tuple[tuple[Path, Path], ...]
UNITS = ("", "k", "m", "g", "t")
_SIZE = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?)\s*(?:(?P<unit>[kmgt])(?P<kind>ib|b|)|b?)\s*", re.IGNORECASE)
_TIME = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>ms|s|)\s*")
MAX_TOKENS = 128  # default of --max-tokens if the checkpoint has none
KEY_VARIABLE = "KVAD_API_KEY"  # environment variable with the API keys of a server

# ---------------------------------------------------------------- types of values


class _FormatName(click.Choice[str]):
    """A format of ``kvad.cache.quantization``, or of a plugin."""

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "FORMAT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value not in cache.quantization.FORMATS and cache.quantization.is_format(value):
            return cache.quantization.get_format(value, param.opts[-1] if param is not None else "format").name
        return super().convert(value, param, ctx)


def parse_bytes(text: str) -> int:
    """Parse a size such as ``8GiB``, ``512MiB``, ``1.5G``, ``4GB``, ``1024`` or ``0``.

    ``K M G T`` alone and with ``iB`` are powers of 1024; with ``B`` alone they are powers of 1000.
    """
    match, hint = _SIZE.fullmatch(text), "write it like 8GiB, 512MiB, 4GB or 1048576"
    if match is None:
        raise UsageError(f"{text!r} is not a size in bytes", hint)
    base = 1000 if match["unit"] and match["kind"].lower() == "b" else 1024
    number = float(match["number"])
    size = int(number * base ** UNITS.index((match["unit"] or "").lower()))
    if size < 1 and number > 0:
        raise UsageError(f"{text!r} is less than one byte", hint)
    return size


def parse_token_ids(text: str, flag: str) -> list[int]:
    """Parse token ids such as ``12 7 99``, with or without commas."""
    try:
        return [int(number) for number in text.replace(",", " ").split()]
    except ValueError as error:
        wrong = str(error).rpartition(": ")[2]
        raise UsageError(f"{flag}: {wrong} is not a token id", "write ids like '12 7 99'") from None


def _parse_list(number: type[int] | type[float], noun: str, example: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(number(parse_count(part) or part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"{text!r} is not a list of {noun}", f"write them like {example}") from None


def _parse_token_bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise UsageError(f"{text!r} is not ID=V", "write it like 42=-5.5") from None


def _parse_positive_bytes(text: str) -> int:
    if size := parse_bytes(text):
        return size
    raise UsageError("must be at least 1 byte", "leave it out, or give it more")


def parse_memory(text: str) -> Literal["auto"] | int | float:
    """Parse ``auto``, a size such as ``8GiB``, or a fraction of the free memory such as ``0.5`` or ``50%``."""
    if text == "auto":
        return "auto"
    hint = "write it like auto, 8GiB or 0.5 (of the free memory)"
    number, scale = (text[:-1], 100) if text.endswith("%") else (text, 1)
    try:
        fraction = float(number) / scale
    except ValueError:
        fraction = math.nan
    if scale > 1 or ("." in text and not math.isnan(fraction)):
        if not 0 < fraction <= 1:
            raise UsageError(f"a fraction must be above 0 and at most 1, got {text}", hint)
        return fraction
    try:
        return _parse_positive_bytes(text)
    except UsageError as error:
        raise UsageError(error.message, hint) from None


def parse_seconds(text: str) -> float:
    """Parse a time such as ``100ms``, ``0.5s`` or ``2`` (seconds)."""
    match = _TIME.fullmatch(text)
    seconds = 0.0 if match is None else float(match["number"]) * (1e-3 if match["unit"] == "ms" else 1.0)
    if not seconds:
        raise UsageError(f"{text!r} is not a time above 0", "write it like 100ms or 0.5s")
    return seconds


FORMAT = _FormatName(tuple(cache.quantization.FORMATS))
SIZE, POSITIVE_SIZE = Parsed("SIZE", parse_bytes), Parsed("SIZE", _parse_positive_bytes)
INTEGERS = Parsed("N,...", partial(_parse_list, int, "whole numbers", "128,256"), is_list=True)
NUMBERS = Parsed("X,...", partial(_parse_list, float, "numbers", "0.25,0.5"), is_list=True)
MEMORY = Parsed("SIZE|FRACTION", parse_memory)
SECONDS = Parsed("TIME", parse_seconds)
COUNT = click.IntRange(min=1)
OUTPUT_FILE = click.Path(path_type=Path, dir_okay=False)

# ---------------------------------------------------------------- options of most commands


class ModelArgument(Options):
    """The checkpoint."""

    model: Path = argument("MODEL")  # kvad.checkpoint checks it, and names the missing file


class JsonOption(Options):
    """``--json``."""

    as_json: bool = option("Print the result as one JSON object on stdout", flag="--json", common=True)


class DeviceOptions(Options):
    """Device, dtype and memory of a model, steps of its engine, and the log."""

    section = "Device, memory and log"
    device: str | None = option(
        "Device: cpu, cuda, cuda:N, or auto for the first GPU, if any [default: cpu]", metavar="DEVICE", common=True
    )
    dtype: Dtype | None = option("Dtype of the computation [default: as stored]")
    memory: Literal["auto"] | int | float | None = option(
        "Memory for model and cache: auto (0.9 of what is free), a size or a fraction [default: auto]",
        kind=MEMORY, common=True,
    )  # fmt: skip
    max_num_batched_tokens: int | None = option(
        f"Maximum new tokens of all sequences per step [default: {sizing.memory_plan.DEFAULT_BATCHED_TOKENS}]",
        kind=COUNT,
    )
    max_inter_token: float | None = option(
        "Longest time between tokens of running sequences while prompts are read, such as 100ms [default: none]",
        kind=SECONDS,
    )
    verbose: int | None = option(
        "Print the log on stderr: full pools, preempted sequences; -vv also every scheduled sequence and block",
        short="-v", is_count=True, common=True,
    )  # fmt: skip


class ActivationOptions(DeviceOptions):
    """Options for computing with quantized weights."""

    activation_bits: int | None = option(
        "Round the inputs of int8 and int4 weights to BITS bits, which is faster: 8 [default: not rounded]",
        metavar="BITS",
    )


class ComputeOptions(ActivationOptions):
    """Options for loading weights without adapters."""

    compile: bool = option("Compile the layers with torch.compile instead of using the native CPU kernels")
    deterministic: bool = option("Make results independent of the batch (CPU only, slower)")
    rope_scaling: str | None = option(
        "RoPE scaling, which extends the model's limit: yarn,factor=4,original=4096, or transformers' as JSON "
        "[default: the checkpoint's]",
        metavar="SCALING",
    )


class WeightOptions(ComputeOptions):
    """Options for loading weights."""

    adapter: Path | None = option("LoRA adapter, kvad's or PEFT's, to merge into the weights")


class SpeculativeOptions(Options):
    """Speculative decoding."""

    section = "Speculative decoding"
    speculative: str | None = option(
        "Check up to K drafts in each step, with the same output: ngram[:K], or draft[:K] with --draft-model "
        "[default: none; K 5]",
        metavar="METHOD[:K]", common=True,
    )  # fmt: skip
    draft_model: str | None = option("Smaller model with the same tokenizer, which drafts", metavar="MODEL")


class TextOptions(Options):
    """Options of the commands that run a model on many texts."""

    quiet: bool = option("Show no progress on stderr", short="-q", common=True)


class PromptOptions(Options):
    """Text of a prompt."""

    prompt: str | None = option("Text to add; - reads standard input", common=True)
    file: Path | None = option("File with the text, UTF-8; - reads standard input", metavar="FILE", common=True)

    def read_prompt(self) -> str:
        """Return the text of --prompt or --file; "" without either."""
        if self.prompt is not None and self.file is not None:
            raise click.UsageError("--prompt and --file exclude each other: give one of them.")
        return read_text_or_stdin(self.prompt) if self.file is None else read_text(self.file)


class SessionDirOption(Options):
    """Folder of the sessions."""

    section = "Sessions"
    session_dir: Path | None = option(
        f"Folder of the sessions [default: {sessions.directory.SESSION_DIR_VARIABLE}, else the user's data folder]",
        kind=click.Path(path_type=Path, file_okay=False), metavar="FOLDER",
        envvar=sessions.directory.SESSION_DIR_VARIABLE, common=True,
    )  # fmt: skip

    @property
    def session_folder(self) -> Path:
        return self.session_dir if self.session_dir is not None else sessions.directory.default_session_dir()


# ---------------------------------------------------------------- options of a cache


def _name_table(first: str, lines: Mapping[str, str]) -> str:
    """Build a help text with one unwrapped line per name."""
    width = max(map(len, lines))
    return "\n".join([first, "", "\b", *(f"{name:<{width}}  {text}" for name, text in lines.items())])


class FormatOptions(Options):
    """Formats of keys and values."""

    section = "Cache size and format"
    cache_dtype: str | None = option(
        f"Format of keys and values: {', '.join(cache.quantization.FORMATS)} [default: the model's dtype]",
        kind=FORMAT, common=True,
    )  # fmt: skip
    cache_key_dtype: str | None = option("Format of the keys [default: --cache-dtype]", kind=FORMAT)
    cache_value_dtype: str | None = option("Format of the values [default: --cache-dtype]", kind=FORMAT)


class PolicyOptions(Options):
    """Policy, overflow and offload."""

    section = "Cache policy and overflow"
    policy: str | None = option(
        _name_table("Tokens that the cache keeps [default: full]:", cache.policy_parser.POLICY_HELP),
        metavar="NAME(N,...)", common=True,
    )  # fmt: skip
    rope_at: str | None = option(
        "Rotate RoPE keys when they are written or each time they are read", metavar="write|read", of=CacheConfig
    )
    overflow: str | None = option(
        _name_table(
            "Action at a length limit L or when the pool is full [default: preempt]:", cache.config.OVERFLOW_MODES
        ),
        metavar="NAME", common=True,
    )  # fmt: skip
    swap_space: int | None = option(
        "Host memory for preempted sequences [default: only those that cannot be recomputed]", kind=SIZE
    )
    summarizer: Path | None = option("Summarizer for a tiered policy with summaries")
    watermark: float | None = option(
        "Fraction of the blocks that stays free when a sequence is admitted [default: 0]", of=CacheConfig
    )
    offload_dir: str | None = option(
        "Folder for offloaded tokens beyond --offload-ram [default: the user's cache folder]", metavar="FOLDER"
    )
    offload_ram: int | None = option(
        "Host memory for offloaded tokens; the rest is written to disk [default: 1GiB]", kind=SIZE
    )


class EndlessOption(Options):
    """``--endless``, for commands whose sequences may grow without a limit."""

    section = PolicyOptions.section
    endless: bool = option(
        "Let sequences exceed the length limit; without --policy this is --overflow sinks", common=True
    )


class PrefixCacheOptions(Options):
    """The prefix cache beyond the pool."""

    section = "Prefix cache"
    prefix_cache_dir: str | None = option("Folder of the prefix cache [default: pool only]", metavar="FOLDER")
    prefix_cache_size: int | None = option("Maximum size of that folder [default: 4GiB]", kind=POSITIVE_SIZE)
    prefix_cache_ram: int | None = option(
        "Host memory for blocks that the pool evicted [default: none]", kind=POSITIVE_SIZE
    )
    prefix_cache_eviction: str | None = option(
        "Order in which its blocks are evicted", metavar="lru|arc", of=CacheConfig
    )


class CacheSaltOption(Options):
    """``--cache-salt``."""

    section = PrefixCacheOptions.section
    cache_salt: str | None = option(
        "Share cached blocks only with requests of the same TEXT [default: none; of a session: its own]", metavar="TEXT"
    )


class CacheSizeOptions(Options):
    """Sequences, lengths and blocks."""

    section = FormatOptions.section
    max_num_seqs: int | None = option(
        "Maximum number of running sequences [default: what the command can use and the memory allows]"
    )
    max_seq_len: int | None = option(
        "Maximum tokens of a sequence [default: the model's limit, or what fits]", short="-c", common=True
    )
    layout: Literal["paged", "contiguous"] | None = option("Cache layout", of=CacheConfig)
    block_size: int | None = option("Tokens per block", of=CacheConfig)
    num_blocks: int | None = option("Blocks of the pool [default: all sequences at full length, or what fits]")
    prefill_chunk_size: int | None = option("Maximum new tokens of one sequence per step", of=CacheConfig, kind=COUNT)
    swap_dir: Path | None = option("Folder for swapped sequences beyond --swap-space [default: none]")


class CacheFlags(
    CacheSizeOptions, FormatOptions, PolicyOptions, EndlessOption, PrefixCacheOptions, CacheSaltOption, WeightOptions
):  # fmt: skip
    """All options of a cache and its model."""


# Keywords of LLM.load that do not concern the cache.
MODEL_FIELDS = (
    "device", "dtype", "memory", "max_num_batched_tokens", "max_inter_token", "adapter", "deterministic",
    "rope_scaling", "activation_bits", "compile",
)  # fmt: skip
_LOAD_NAMES = (*MODEL_FIELDS, "cache_dtype", "cache_key_dtype", "cache_value_dtype", "summarizer", "swap_dir")


def cache_fields(options: Any) -> dict[str, Any]:
    """Return the given options that are fields of CacheConfig.

    Raises:
        ConfigError: If a value is invalid for every model.
        UsageError: If an offload option is given without offloading.
    """
    fields = cache.config.resolve_endless(given_fields(options, CacheConfig))
    fields.pop("dtype", None)  # of the computation, not of the cache
    CacheConfig(**{"max_seq_len": 1, **fields})
    unused = [name for name in ("offload_ram", "offload_dir") if name in fields]
    if unused and fields.get("overflow") != "offload" and "offload(" not in fields.get("policy", ""):
        message = f"{flag_of(unused[0])}: nothing is offloaded"
        raise UsageError(message, "add --overflow offload or --policy 'offload(N)'")
    return fields


def model_fields(options: Any) -> dict[str, Any]:
    """Return the given options of the model and its device as keywords of ``kvad.llm.LLM.load``."""
    return {name: value for name in MODEL_FIELDS if (value := getattr(options, name, None))}


def load_fields(options: Any) -> dict[str, Any]:
    """Return the given options, those of the cache included, as keywords of ``kvad.llm.LLM.load``."""
    given = {name: value for name in _LOAD_NAMES if (value := getattr(options, name, None))}
    speculative = speculative_config(options)
    return {**given, **({} if speculative is None else {"speculative": speculative}), **cache_fields(options)}


def split_adapters(given: Sequence[str]) -> tuple[list[str], dict[str, Path]]:
    """Return the folders of ``--adapter FOLDER`` and, by name, of ``--adapter NAME=FOLDER``."""
    merged, named = list[str](), dict[str, Path]()
    for text in given:
        name, equals, folder = text.partition("=")
        if not equals or Path(text).exists():
            merged.append(text)
        elif name in named:
            raise UsageError(f"--adapter: {name!r} is given twice", "Choose another NAME.")
        else:
            named[name] = Path(folder)
    return merged, named


def named_adapters(given: Sequence[str]) -> dict[str, Path]:
    """Return the folders of ``--adapter NAME=FOLDER`` by name; UsageError for a folder without a name."""
    merged, named = split_adapters(given)
    if merged:
        message = f"--adapter: {merged[0]} has no name; a merged adapter takes no memory of its own"
        raise UsageError(message, "Write NAME=FOLDER.")
    return named


def speculative_config(options: Any) -> SpeculativeConfig | None:
    """Return the options of ``SpeculativeOptions``, if given; raise ConfigError or UsageError if they are invalid."""
    text, draft_model = getattr(options, "speculative", None), getattr(options, "draft_model", None)
    if draft_model is None:
        if text is not None and text.partition(":")[0] == "draft":
            raise UsageError("--speculative draft: no draft model is given", "add --draft-model MODEL")
        return SpeculativeConfig.from_options(text)
    method, _, count = (text or "draft").partition(":")
    if method != "draft":
        raise UsageError(f"--draft-model: --speculative {text} does not use it", "omit one of them")
    num_tokens = {"num_tokens": int(count) if count.isdecimal() else count} if count else {}
    return SpeculativeConfig.from_options({"method": "draft", "draft_model": draft_model, **num_tokens})


def open_llm(
    model: Path | CheckpointHandle,
    fields: Mapping[str, Any],
    *,
    max_num_seqs: int,
    max_seq_len: int | None = None,
    shows_room: bool = False,
) -> LLM:
    """Load a model with the result of ``load_fields``.

    Args:
        model: The checkpoint.
        fields: Keywords of ``LLM.load``.
        max_num_seqs: Number of sequences that the command can use; fewer if the memory does not suffice.
        max_seq_len: Tokens of its longest sequence, likewise; None: the model's limit.
        shows_room: Print on stderr what fits.

    Raises:
        CheckpointError, ConfigError, MemoryPlanError: Each before the cache is allocated.
    """
    from kvad.llm import LLM

    budget = sizing.MemoryBudget(fields.get("memory", "auto"), max_num_seqs, max_seq_len)
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always", UserWarning)
        llm = LLM.load(model, **{**fields, "memory": budget})
    for each in notes:
        note(str(each.message))
    if shows_room and llm.memory_plan is not None:
        note(sizing.describe_room(llm.memory_plan))
    return llm


# ---------------------------------------------------------------- sampling


class SamplingFlags(Options):
    """Fields of SamplingParams, except ``n`` and the log-probabilities."""

    section = "Sampling"
    max_tokens: int | None = option(
        f"Maximum number of new tokens [default: {MAX_TOKENS}; none with --endless]", short="-n", common=True
    )
    temperature: float | None = option("Sampling temperature; 0 is greedy", short="-t", of=SamplingParams, common=True)
    top_k: int | None = option("Sample from the K most likely tokens; 0 is off [default: 0]", common=True)
    top_p: float | None = option(
        "Sample from the most likely tokens that together reach probability X", of=SamplingParams, common=True
    )
    min_p: float | None = option("Drop tokens below X times the highest probability", of=SamplingParams)
    typical_p: float | None = option(
        "Sample from the tokens of most typical information, up to probability X", of=SamplingParams
    )
    seed: int | None = option(
        "Seed of the samples, independent of the batch [default: random, printed on stderr]", short="-s", common=True
    )
    stop: tuple[str, ...] = option("Stop before TEXT", common=True)
    min_tokens: int | None = option("Minimum number of new tokens", of=SamplingParams)
    ignore_eos: bool = option("Continue after end tokens")
    logit_bias: tuple[tuple[int, float], ...] = option(
        "Add V to the logit of token ID", kind=Parsed("ID=V", _parse_token_bias)
    )
    bad_word: tuple[str, ...] = option("Never generate TEXT, also after a space")
    repetition_penalty: float | None = option(
        "Above 1, make tokens of prompt and output less likely", of=SamplingParams
    )
    presence_penalty: float | None = option(
        "Subtract X from the logits of tokens that the output contains", of=SamplingParams
    )
    frequency_penalty: float | None = option("Subtract X per occurrence in the output", of=SamplingParams)
    no_repeat_ngram_size: int | None = option(
        "Never repeat a sequence of N tokens; 0 is off [default: 0]", of=SamplingParams
    )
    num_beams: int | None = option("Beams of a beam search; 1 is sampling", of=SamplingParams)
    num_beam_groups: int | None = option(
        "Split the beams into N groups that avoid each other's tokens", of=SamplingParams
    )
    diversity_penalty: float | None = option(
        "Subtract X from a token's log-probability per beam of an earlier group that chose it", of=SamplingParams
    )
    length_penalty: float | None = option("Divide beam scores by length ** X", of=SamplingParams)
    json_schema: str | None = option("Generate JSON of this schema: a file, or the schema itself", metavar="FILE|JSON")
    json_object: bool = option("Generate a JSON object")
    regex: str | None = option("Generate a text that this regular expression matches as a whole", metavar="REGEX")
    grammar: Path | None = option("Generate a text of this Lark grammar", metavar="FILE")
    choice: tuple[str, ...] = option("Generate this TEXT, or another one of them", metavar="TEXT")

    def structured_output(self) -> StructuredOutput | None:
        """Return the form of the output that was given.

        Raises:
            UsageError: If several forms are given.
            RequestError: If it is invalid.
            DataError: If its file cannot be read.
        """
        given = [
            name
            for name in get_args(scheduling.structured_output.StructuredOutputKind)
            if is_given(getattr(self, name))
        ]
        if len(given) > 1:
            flags = " and ".join(map(flag_of, given))
            raise UsageError(f"{flags} exclude each other", "Give one of them.")
        if not given:
            return None
        (kind,) = given
        if kind == "json_schema" and not (self.json_schema or "").lstrip().startswith("{"):
            return StructuredOutput(kind, read_text(Path(self.json_schema or "")))
        if self.grammar is not None:
            return StructuredOutput("grammar", read_text(self.grammar))
        value = getattr(self, kind)
        return StructuredOutput.from_json({kind: list(value) if kind == "choice" else value})

    def sampling_fields(self) -> dict[str, Any]:
        """Return the given options as fields of SamplingParams, except bad words, which need a tokenizer.

        Raises:
            RequestError: If a value is out of range.
        """
        fields = given_fields(self, SamplingParams)
        if self.logit_bias:
            fields["logit_bias"] = dict(self.logit_bias)
        if (output := self.structured_output()) is not None:
            fields["structured_output"] = output
        check_sampling_ranges({"max_tokens": MAX_TOKENS, **fields})
        return fields

    def resolve(self, fields: Mapping[str, Any], handle: CheckpointHandle, *, endless: bool = False) -> SamplingParams:
        """Combine ``fields`` with the checkpoint's defaults; an endless generation has no default --max-tokens."""
        params = engine.requests.resolve_sampling(fields, handle.generation)
        if endless and self.max_tokens is None:
            params = replace(params, max_tokens=None)
        elif params.max_tokens is None:
            params = replace(params, max_tokens=MAX_TOKENS)
        if not self.bad_word:
            return params
        tokenizer = handle.tokenizer
        if tokenizer is None:
            raise RequestError("--bad-word: the model has no tokenizer", "use --logit-bias ID=-1000")
        if "" in self.bad_word:
            raise RequestError("--bad-word: must not be empty")
        # A text after a space is encoded differently.
        encoded = {tuple(tokenizer.encode(text)) for word in self.bad_word for text in (word, f" {word}")}
        return replace(params, bad_words_ids=(*params.bad_words_ids, *sorted(encoded)))


def choose_seed(params: SamplingParams) -> SamplingParams:
    """Return the options with a seed; a random one is printed on stderr."""
    seeded = params.with_seed()
    if seeded.seed != params.seed:
        note(f"seed: {seeded.seed}")
    return seeded


def check_sampling_ranges(fields: Mapping[str, Any]) -> None:
    """Check the ranges of sampling options before anything is loaded.

    Beam options without --num-beams may belong to the checkpoint's own beam search, so they are checked apart.

    Raises:
        RequestError: If a value is out of range.
    """
    beam_names = () if "num_beams" in fields else scheduling.request.BEAM_ONLY_FIELDS
    beam_fields = {name: fields[name] for name in beam_names if name in fields}
    SamplingParams(**{"num_beams": 2 * beam_fields.get("num_beam_groups", 1), **beam_fields})
    SamplingParams(**{name: value for name, value in fields.items() if name not in beam_fields})


# ---------------------------------------------------------------- texts and Ctrl-C


def read_text_or_stdin(text: str | None, *, raw: bool = True) -> str:
    """Return a text given on the command line; "-" is standard input, unless ``raw`` without its final newline."""
    if text != "-":
        return text or ""
    read = read_text(Path("-"))
    return read if raw else read.removesuffix("\n").removesuffix("\r")


def read_text(path: Path) -> str:
    """Read a file in UTF-8, unchanged; "-" is standard input.

    Raises:
        DataError: If the file cannot be read, or with the first byte that is not UTF-8.
    """
    is_stdin = str(path) == "-"
    try:
        with nullcontext(sys.stdin.buffer) if is_stdin else storage.filesystem.open_input(path) as file:
            raw = file.read()
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        place = f"{'standard input' if is_stdin else path} is not UTF-8 at byte {error.start}"
        hint = "Convert it, as in iconv -f LATIN1 -t UTF-8."
        raise DataError(f"{place} (0x{raw[error.start]:02X})", hint) from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None


def tokenizer_folder(model: Path) -> Path:
    """Return the folder of a model's tokenizer and chat template; no weights are downloaded from the hub."""
    folder = checkpoint.hub.resolve_model_path(model, weights=False)
    if folder.is_file():
        return checkpoint.gguf.GGUFCheckpoint(folder).tokenizer_folder
    folder = checkpoint.folder.locate(folder) if checkpoint.folder.is_run(folder) else folder
    if checkpoint.folder.is_model(folder):
        checkpoint.folder.check_text(folder, checkpoint.folder.list_files(folder))
    return folder


def load_tokenizer_of(model: Path) -> Tokenizer:
    """Load the tokenizer of a model, or a tokenizer file."""
    is_file = model.is_file() and model.suffix != ".gguf"
    return text_lib.load_tokenizer(model if is_file else tokenizer_folder(model))


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

    def __exit__(self, *_: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
