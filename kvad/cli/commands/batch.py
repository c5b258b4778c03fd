"""``kvad translate``, ``tag``, ``classify``, ``fill-mask`` and ``embed``: run a model on every line of a file.

``translate`` runs an encoder-decoder (translation, summaries, corrections), the others an encoder.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple, TypeVar

import click

from kvad import engine, storage
from kvad.cli import line_batches, parameters
from kvad.cli.fields import command, given_fields, option
from kvad.cli.output import exit_with, json_line
from kvad.cli.parameters import load_fields, open_llm
from kvad.engine import scheduling
from kvad.engine.scheduling import SamplingParams
from kvad.errors import RequestError, UsageError

if TYPE_CHECKING:
    from kvad.checkpoint import CheckpointHandle
    from kvad.engine import Completion
    from kvad.llm import LLM

T = TypeVar("T")
MAX_TOKENS = 256  # tokens of a translation, if neither the user nor the checkpoint sets it
OUT_SUFFIXES = (".npy", ".json", ".jsonl")  # of embed --out
MAX_PARALLEL_LINES, MAX_SEQS = 32, 512  # default limits of translate: lines, and beams of all lines


# ---------------------------------------------------------------- translate


class Translation(NamedTuple):
    """One translation of a line."""

    text: str
    score: float | None = None  # of a beam search only


class _TranslateOptions(line_batches.LineOptions, parameters.FormatOptions, parameters.PolicyOptions):
    language: str | None = option("Target language of a multilingual model", metavar="CODE")
    source_language: str | None = option("Language of the lines, for models that mark it", metavar="CODE")
    prefix: str = option("Beginning of every translation", "")
    num_beams: int | None = option("Beams of the search; 1 is greedy [default: the checkpoint's, else 1]")
    length_penalty: float | None = option("Divide beam scores by length ** X [default: the checkpoint's, else 1]")
    n_best: int = option("Number of translations per line, best first", 1)
    max_tokens: int | None = option(
        f"Maximum tokens of a translation [default: the checkpoint's, else {MAX_TOKENS}]", short="-n"
    )
    temperature: float | None = option("Sample at this temperature instead of searching [default: off]", short="-t")
    top_k: int | None = option("Sample from the K most likely tokens [default: 0, off]")
    top_p: float | None = option("Sample from the most likely tokens that together reach probability X [default: 1]")
    seed: int | None = option("Sample with this seed [default: random, printed on stderr]", short="-s")
    max_num_seqs: int | None = option(
        f"Maximum number of sequences in the cache, one per beam [default: {MAX_PARALLEL_LINES} lines]"
    )
    max_seq_len: int | None = option("Maximum tokens of a sequence [default: as --max-tokens needs]", short="-c")


@command("translate", _TranslateOptions)
def translate_command(options: _TranslateOptions) -> None:
    """Translate every line of FILE, or of standard input.

    Every line gives one line, in order; an empty line stays empty. With --n-best N every line gives N lines
    `LINE<tab>SCORE<tab>TEXT`. A line that is too long is reported on stderr and gives an empty line; exit code 1.

    \b
    kvad translate Helsinki-NLP/opus-mt-de-en letter.txt > letter.en.txt
    kvad translate facebook/nllb-200-distilled-600M --source-language deu_Latn --language eng_Latn < letter.txt
    echo "Ein Haus am See." | kvad translate runs/opus --num-beams 6 --n-best 3 --json
    """
    given, n_best = given_fields(options, SamplingParams), options.n_best
    parameters.check_sampling_ranges(given)
    if n_best < 1:
        raise RequestError(f"--n-best: {n_best} is out of range, must be at least 1")
    if options.num_beams is not None and n_best > options.num_beams and options.temperature is None:
        raise RequestError(f"--n-best {n_best} exceeds --num-beams {options.num_beams}", "search with more beams")
    load = load_fields(options)
    with line_batches.LineSource(options.file) as lines:
        opened = line_batches.open_for_command(options.model, "translate", options.rope_scaling)
        sampling = _sampling(opened, given, n_best)
        resolved = parameters.choose_seed(engine.requests.resolve_sampling(sampling, opened.generation))
        if resolved.uses_seed:
            sampling["seed"] = resolved.seed
        with _load(opened, sampling, load, len(options.prefix.encode())) as llm:
            code = line_batches.print_answers(lines, _task(llm, sampling, options), options)
    exit_with(code)


def _sampling(opened: CheckpointHandle, given: dict[str, Any], n_best: int) -> dict[str, Any]:
    """Merge the options with the checkpoint's sampling defaults; without both, search greedily."""
    defaults: Mapping[str, Any] = opened.generation.sampling or {}
    chosen = {"max_tokens": min(defaults.get("max_tokens", MAX_TOKENS), opened.config.max_seq_len), **given}
    sampled = any(name in chosen for name in scheduling.request.SAMPLING_ONLY_FIELDS)
    if not sampled and "num_beams" not in chosen and n_best > 1:
        chosen["num_beams"] = max(n_best, defaults.get("num_beams", 1))
    if not sampled and "num_beams" not in chosen and not defaults:
        chosen["num_beams"] = 1
    if chosen.get("num_beams") == 1 and not sampled:
        chosen["temperature"] = 0.0
    if n_best > 1:
        chosen["n"] = n_best
    return chosen


def _load(opened: CheckpointHandle, sampling: Mapping[str, Any], load: dict[str, Any], prefix_bytes: int) -> LLM:
    """Load the model with a cache for at most 32 lines that takes at most half of the available memory."""
    requested = engine.requests.resolve_sampling(sampling, opened.generation)
    seqs_per_line = max(requested.num_beams, requested.n)
    longest = sampling["max_tokens"] + prefix_bytes + 2  # a text has at most one token per byte
    num_seqs = max(1, min(MAX_PARALLEL_LINES, MAX_SEQS // seqs_per_line)) * seqs_per_line
    requested_seqs = load.get("max_num_seqs", num_seqs)
    if requested_seqs < seqs_per_line:
        needed = f"must be at least {seqs_per_line}, the beams or samples of a line"
        raise UsageError(f"--max-num-seqs: {needed}, got {requested_seqs}")
    return open_llm(opened, {"memory": 0.5, **load}, max_num_seqs=num_seqs, max_seq_len=longest)


def _task(
    llm: LLM, sampling: Mapping[str, Any], options: _TranslateOptions
) -> line_batches.LineTask[Sequence[Translation]]:
    language, source_language = options.language, options.source_language
    if line_batches.require_tokenizer(llm).source_tokenizer is not None and language is not None:
        language, source_language = None, language  # Marian marks the target language in the source
    target_prefix, prefix_tokens = _target_prefix(llm, options.prefix, language)
    llm.texts.encode_source("a", source_language)  # an unknown language is an error of the command, not of a line
    numbered = options.n_best > 1

    def generate(many: list[list[int]]) -> list[list[Translation]]:
        target_language = None if target_prefix is not None else language
        # Equal lines have equal translations, also if they are in one batch.
        settings = {**sampling, "target_prefix": target_prefix, "language": target_language, "draw_salt": 0}
        completions = llm.generate(many, **settings)
        return [_translations(llm, done, prefix_tokens) for done in completions]

    def fields(translations: Sequence[Translation]) -> dict[str, object]:
        best = translations[0] if translations else Translation("")
        more = {"translations": [translation._asdict() for translation in translations]} if numbered else {}
        return {"text": best.text, "score": best.score, **more}

    def plain(number: int, translations: Sequence[Translation]) -> str:
        shown = translations or [Translation("")]
        texts = [" ".join(each.text.splitlines()) for each in shown]  # each on one line
        if not numbered:
            return texts[0]
        scores = ["" if each.score is None else f"{each.score:.4f}" for each in shown]
        return "\n".join(f"{number}\t{score}\t{text}" for score, text in zip(scores, texts, strict=True))

    return line_batches.LineTask(
        lambda text: llm.texts.encode_source(text, source_language), generate, plain, fields, empty=()
    )


def _target_prefix(llm: LLM, prefix: str, language: str | None) -> tuple[list[int] | None, list[int]]:
    """Return the first tokens of every target (None without a prefix) and the tokens of the prefix."""
    code = llm.generation.forced_bos_token_id if language is None else llm.texts.language_token(language)
    if not prefix:
        return None, []
    prefix_tokens = line_batches.require_tokenizer(llm).encode(prefix)
    return [*llm.texts.encode_target(None), *([] if code is None else [code]), *prefix_tokens], prefix_tokens


def _translations(llm: LLM, completion: Completion, prefix_tokens: list[int]) -> list[Translation]:
    """Put the prefix before the samples and decode both together, because a space may be between them."""
    translations = []
    for sample in completion.choices:
        text = sample.text
        if prefix_tokens:
            tokens = sample.token_ids[:-1] if sample.finish_reason == "stop" else sample.token_ids
            text = line_batches.require_tokenizer(llm).decode([*prefix_tokens, *tokens])
        translations.append(Translation(text, sample.cumulative_logprob))
    return translations


# ---------------------------------------------------------------- encoders


class _EncodeOptions(line_batches.LineOptions):
    batch_size: int = option(
        "Maximum number of lines per batch", line_batches.BATCH_LINES, kind=click.IntRange(1), common=True
    )


@command("tag", _EncodeOptions)
def tag_command(options: _EncodeOptions) -> None:
    """Assign a label to each word of FILE, or of standard input: `Angela/B-PER Merkel/I-PER spoke/O`.

    Every line gives one line, in order; an empty line stays empty.

    \b
    kvad tag dslim/bert-base-NER news.txt > news.tags
    echo "Angela Merkel spoke in Bonn." | kvad tag dslim/bert-base-NER --json
    """

    def plain(_number: int, words: Sequence[engine.output.TokenLabel]) -> str:
        return " ".join(f"{each.word}/{each.label}" for each in words)

    def task(llm: LLM) -> line_batches.LineTask[Sequence[engine.output.TokenLabel]]:
        return line_batches.LineTask(llm.encode, llm.tag, plain, lambda words: {"words": words}, ())

    exit_with(_answer("tag", options, task))


class _ClassifyOptions(_EncodeOptions):
    pairs: bool = option('Two texts per line: separated by a tab, or {"text": ..., "text_pair": ...}', common=True)


@command("classify", _ClassifyOptions)
def classify_command(options: _ClassifyOptions) -> None:
    """Assign a label to each line of FILE, or of standard input: the most likely `LABEL<tab>PROBABILITY`.

    Every line gives one line, in order; an empty line stays empty. --json prints all labels. A model of independent
    labels (problem_type multi_label_classification) has a probability for each, a regression its value.

    \b
    kvad classify distilbert/distilbert-base-uncased-finetuned-sst-2-english reviews.txt
    echo "What a film." | kvad classify runs/sst2 --json
    kvad classify cross-encoder/ms-marco-MiniLM-L6-v2 pairs.tsv --pairs
    """

    def plain(_number: int, labels: Sequence[engine.output.Label]) -> str:
        return "\t".join(f"{each.label}\t{each.probability:.4f}" for each in labels[:1])

    def task(llm: LLM) -> line_batches.LineTask[Sequence[engine.output.Label]]:
        if options.pairs:
            llm.texts.encode_pair("", "")  # a model of one text is an error of the command, not of a line
        elif llm.generation.takes_pairs:
            raise RequestError(f"{options.model} compares two texts, the lines have one", "use --pairs")
        prepare = (lambda line: llm.texts.encode_pair(*_two_texts(line))) if options.pairs else llm.encode
        return line_batches.LineTask(prepare, llm.classify, plain, lambda labels: {"labels": labels}, ())

    exit_with(_answer("classify", options, task))


def _two_texts(line: str) -> tuple[str, str]:
    """Split a line of ``--pairs``."""
    try:
        content = storage.strict_json.loads(line) if line.startswith("{") else line.split("\t")
    except ValueError as error:
        raise RequestError(f"not JSON: {error}") from None
    texts = [content.get("text"), content.get("text_pair")] if isinstance(content, dict) else content
    match texts:
        case [str(first), str(second)] if first.strip() and second.strip():
            return first, second
    raise RequestError("must have two texts, separated by a tab or as text and text_pair of a JSON object")


class _FillMaskOptions(_EncodeOptions):
    top_k: int = option("Number of tokens to print for each mask", 5, kind=parameters.COUNT)


@command("fill-mask", _FillMaskOptions)
def fill_mask_command(options: _FillMaskOptions) -> None:
    """Predict the masked tokens of FILE, or of standard input.

    Prints `TOKEN PROBABILITY`, most likely first, separated by tabs; ` | ` separates several masks. Every line
    gives one line, in order; an empty line stays empty. Write the mask as the model's tokenizer spells it; a line
    without a mask is reported on stderr.

    \b
    echo "Paris is the [MASK] of France." | kvad fill-mask google-bert/bert-base-cased --top-k 3
    kvad fill-mask FacebookAI/xlm-roberta-base masked.txt --json
    """
    exit_with(_answer("fill-mask", options, lambda llm: _filling(llm, options.top_k)))


def _filling(llm: LLM, top: int) -> line_batches.LineTask[Sequence[Sequence[engine.output.MaskPrediction]]]:
    tokenizer = line_batches.require_tokenizer(llm)
    mask = tokenizer.special_tokens.mask
    if mask is None:
        raise RequestError("the tokenizer of this model has no mask token", "use kvad embed")
    spelled = next(name for name, token in tokenizer.special_tokens.names().items() if token == mask)

    def prepare(text: str) -> list[int]:
        ids = llm.encode(tokenizer.add_special_tokens(tokenizer.encode(text, specials=True)))
        if mask not in ids:
            raise RequestError(f"the line has no mask; write {spelled} for each masked token")
        return ids

    def plain(number: int, masks: Sequence[Sequence[engine.output.MaskPrediction]]) -> str:
        return "\t|\t".join("\t".join(f"{escape(each.text)} {each.probability:.4f}" for each in one) for one in masks)

    def escape(token: str) -> str:
        """Escape unprintable characters, so that a token stays on one line and in one column."""
        return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in token)

    return line_batches.LineTask(
        prepare, lambda many: llm.fill_mask(many, top=top), plain, lambda masks: {"masks": masks}, empty=()
    )


class _EmbedOptions(_EncodeOptions):
    pooling: Literal["mean", "first", "last", "max", "head"] | None = option(
        "Vector of a line: mean or maximum of its tokens, the first or last token, or the head's [default: the "
        "model's, else last for a decoder, mean for others]"
    )
    prompt_name: str | None = option("Prompt of the model that precedes every line [default: the model's, if any]")
    truncate: bool = option("Truncate lines that are too long, instead of refusing them", common=True)
    format: Literal["json", "npy"] | None = option("Output format [default: from the suffix of --out, else json]")
    out: Path | None = option("Output file [default: stdout]", short="-o", kind=parameters.OUTPUT_FILE)


@command("embed", _EmbedOptions)
def embed_command(options: _EmbedOptions) -> None:
    """Compute a vector for each line of FILE, or of standard input, with an encoder or a decoder.

    JSON is one object per line, {"line": 1, "embedding": [...]}; npy is one float32 array [lines, hidden_size], with
    NaN for a line that failed (exit code 1). An empty line is the empty text. A folder of sentence-transformers
    decides pooling, normalization, prompts and the length at which lines are truncated.

    \b
    kvad embed sentence-transformers/all-MiniLM-L6-v2 sentences.txt --out sentences.npy
    echo "A house by the lake." | kvad embed runs/bert --pooling first
    """
    out, as_json = options.out, options.as_json
    if as_json and options.format == "npy":
        raise click.UsageError("--json and --format npy exclude each other.")
    form = options.format or ("npy" if out is not None and out.suffix == ".npy" and not as_json else "json")
    if form == "npy" and out is None:
        raise click.UsageError("--format npy needs --out FILE.")
    if options.format is None and not as_json and out is not None and out.suffix not in OUT_SUFFIXES:
        hint = f"Name it {out.stem}.npy or {out.stem}.jsonl, or set --format."
        raise click.UsageError(f"--out: no format has the suffix {out.suffix or 'of a file without one'!r}. {hint}")

    def task(llm: LLM) -> line_batches.LineTask[list[float] | None]:
        embed = partial(llm.embed, pool=options.pooling)
        run, fields = lambda many: embed(many).float().tolist(), lambda vector: {"embedding": vector}
        prepare = partial(llm.texts.encode_embedding, prompt_name=options.prompt_name, truncate=options.truncate)
        if options.prompt_name is not None:
            prepare("a")  # an unknown prompt is an error of the command, not of a line
        return line_batches.LineTask(prepare, run, None, fields, None, runs_empty=True)

    if out is None:
        exit_with(_answer("embed", options, task))
    with storage.atomic.new_file(out) as temporary, temporary.open("wb") as file:
        if form == "npy":
            with _Matrix(file) as matrix:
                code = _answer("embed", options, task, matrix.show)
        else:
            code = _answer("embed", options, task, partial(_write_object, file))
    exit_with(code)


def _write_object(file: BinaryIO, line: line_batches.LineResult[list[float] | None]) -> None:
    result = {"embedding": line.answer} if line.error is None else {"error": line.error}
    file.write(f"{json_line({'line': line.number, **result})}\n".encode())


class _Matrix:
    """Writes NumPy's format 1.0 row by row; the header has 128 bytes for any shape and is written at the end."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._rows, self._width, self._num_empty = file, 0, 0, 0

    def __enter__(self) -> _Matrix:
        self._file.write(bytes(128))
        return self

    def show(self, line: line_batches.LineResult[list[float] | None]) -> None:
        self._rows += 1
        if line.answer is None and not self._width:
            self._num_empty += 1  # the width is unknown until the first answer
            return
        vector = line.answer or [math.nan] * self._width
        if not self._width:
            self._width = len(vector)
            self._file.write(struct.pack("<f", math.nan) * (self._width * self._num_empty))
        self._file.write(struct.pack(f"<{self._width}f", *vector))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({self._rows}, {self._width}), }}"
            self._file.seek(0)
            self._file.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", 118) + header.ljust(117).encode() + b"\n")


def _answer(
    command: str,
    options: _EncodeOptions,
    task: Callable[[LLM], line_batches.LineTask[T]],
    show: Callable[[line_batches.LineResult[T]], None] | None = None,
) -> int:
    """Answer all lines and return the exit code; without ``show`` the answers are printed."""
    with line_batches.LineSource(options.file) as lines:
        opened = line_batches.open_for_command(options.model, command, options.rope_scaling)
        # A decoder reads the lines into the cache; an encoder has none, and that of an encoder-decoder is not used.
        sizes: dict[str, Any] = {"encoder": {}, "decoder": {"memory": 0.5}}.get(
            opened.config.kind, {"max_seq_len": 1, "max_source_len": 1}
        )
        longest = opened.generation.max_embed_tokens if opened.config.kind == "decoder" else None
        fields = {**sizes, **load_fields(options)}
        with open_llm(opened, fields, max_num_seqs=options.batch_size, max_seq_len=longest) as llm:
            line_batches.require_tokenizer(llm)
            return line_batches.print_answers(lines, task(llm), options, show)
