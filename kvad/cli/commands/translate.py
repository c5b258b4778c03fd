"""``kvad translate MODEL [FILE|-]``: run an encoder-decoder on every line (translation, summaries, corrections)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from kvad.cli.fields import command, given_fields, option
from kvad.cli.line_batches import (
    LineOptions,
    LineSource,
    LineTask,
    answer_lines,
    open_for_command,
    print_answer,
    print_answers,
    require_tokenizer,
)
from kvad.cli.output import exit_with
from kvad.cli.parameters import FormatOptions, PolicyOptions, check_sampling_ranges, load_fields
from kvad.engine.scheduling import SamplingParams
from kvad.errors import RequestError, UsageError

if TYPE_CHECKING:
    from kvad.checkpoint import CheckpointHandle
    from kvad.engine import Completion
    from kvad.llm import LLM

MAX_TOKENS = 256  # tokens of a translation, if neither the user nor the checkpoint sets it
NO_CACHE_FIELDS = ("dtype", "adapter", "deterministic")  # keywords of LLM.load
MAX_PARALLEL_LINES, MAX_SEQS = 32, 512  # default limits: lines, and beams of all lines


class Translation(NamedTuple):
    """One translation of a line."""

    text: str
    score: float | None = None  # of a beam search only


class _TranslateOptions(LineOptions, FormatOptions, PolicyOptions):
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
    seed: int | None = option("Sample with this seed [default: 0]", short="-s")
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
    given, load = _check(options), load_fields(options)
    with LineSource(options.file) as lines:
        opened = open_for_command(options.model, "translate")
        sampling = _sampling(opened, given, options.n_best)
        with _load(opened, sampling, load, len(options.prefix.encode())) as llm:
            task = _task(llm, sampling, options)
            show = partial(print_answer, task, as_json=options.as_json)
            failed = print_answers(answer_lines(lines, task), show, lines, quiet=options.quiet)
    exit_with(1 if failed else 0)


def _check(options: _TranslateOptions) -> dict[str, Any]:
    """Check the options before a model is opened; return the given fields of SamplingParams."""
    given, n_best = given_fields(options, SamplingParams), options.n_best
    check_sampling_ranges(given)
    if n_best < 1:
        raise RequestError(f"--n-best: {n_best} is out of range, must be at least 1")
    if options.num_beams is not None and n_best > options.num_beams and options.temperature is None:
        raise RequestError(f"--n-best {n_best} exceeds --num-beams {options.num_beams}", "search with more beams")
    return given


def _sampling(opened: CheckpointHandle, given: dict[str, Any], n_best: int) -> dict[str, Any]:
    """Merge the options with the checkpoint's sampling defaults; without both, search greedily."""
    from kvad.engine import scheduling

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
    from kvad import engine
    from kvad.llm import LLM

    requested = engine.options.resolve_sampling(sampling, opened.generation)
    seqs_per_line = max(requested.num_beams, requested.n)
    longest = sampling["max_tokens"] + prefix_bytes + 2  # a text has at most one token per byte
    load.setdefault("max_seq_len", min(opened.config.max_seq_len, longest))
    max_num_seqs = load.get("max_num_seqs")
    if max_num_seqs is None:
        load["max_num_seqs"] = _max_num_seqs(opened, seqs_per_line, load)
    elif max_num_seqs < seqs_per_line:
        raise UsageError(
            f"--max-num-seqs: must be at least {seqs_per_line}, the beams or samples of a line, got {max_num_seqs}"
        )
    return LLM.load(opened, **load)


def _max_num_seqs(opened: CheckpointHandle, seqs_per_line: int, load: Mapping[str, Any]) -> int:
    """Choose the number of sequences that half of the available memory can hold."""
    from kvad.cache import CacheConfig
    from kvad.cache.sizing import available_bytes, plan_memory

    available, source = available_bytes(), opened.config.encoder_input
    assert source is not None, "an encoder-decoder has an encoder input"
    stored = str(opened.stored_dtype).removeprefix("torch.")
    computed = load.get("dtype") or ("float32" if stored == "float16" else stored)
    names = {name: name.removeprefix("cache_") for name in load if name not in NO_CACHE_FIELDS}
    fields = {"dtype": computed, **{field: load[name] for name, field in names.items()}}
    lines = max(1, min(MAX_PARALLEL_LINES, MAX_SEQS // seqs_per_line))
    while lines > 1 and available is not None:
        cache = CacheConfig(max_num_seqs=lines * seqs_per_line, max_source_len=source.max_seq_len, **fields)
        if plan_memory(opened.config, cache, weights_dtype=computed).total <= available // 2:
            break
        lines //= 2
    return lines * seqs_per_line


# ---------------------------------------------------------------- the task


def _task(llm: LLM, sampling: Mapping[str, Any], options: _TranslateOptions) -> LineTask[Sequence[Translation]]:
    language, source_language = options.language, options.source_language
    if require_tokenizer(llm).source_tokenizer is not None and language is not None:
        language, source_language = None, language  # Marian marks the target language in the source
    target_prefix, prefix_tokens = _target_prefix(llm, options.prefix, language)
    llm.texts.encode_source("a", source_language)  # an unknown language is an error of the command, not of a line
    numbered = options.n_best > 1

    def generate(many: list[list[int]]) -> list[list[Translation]]:
        chosen = {
            **sampling,
            "target_prefix": target_prefix,
            "language": None if target_prefix is not None else language,
        }
        return [_translations(llm, done, prefix_tokens) for done in llm.generate(many, **chosen)]

    def fields(translations: Sequence[Translation]) -> dict[str, object]:
        best = translations[0] if translations else Translation("")
        more = {"translations": [translation._asdict() for translation in translations]} if numbered else {}
        return {"text": best.text, "score": best.score, **more}

    def plain(number: int, translations: Sequence[Translation]) -> str:
        if not numbered:
            return _one_line(translations[0].text) if translations else ""
        return "\n".join(
            f"{number}\t{_score(translation)}\t{_one_line(translation.text)}"
            for translation in translations or [Translation("")]
        )

    return LineTask(lambda text: llm.texts.encode_source(text, source_language), generate, plain, fields, empty=())


def _target_prefix(llm: LLM, prefix: str, language: str | None) -> tuple[list[int] | None, list[int]]:
    """Return the first tokens of every target (None without a prefix) and the tokens of the prefix."""
    code = llm.generation.forced_bos_token_id if language is None else llm.texts.language_token(language)
    if not prefix:
        return None, []
    assert llm.tokenizer is not None
    prefix_tokens = llm.tokenizer.encode(prefix)
    return [*llm.texts.encode_target(None), *([] if code is None else [code]), *prefix_tokens], prefix_tokens


def _translations(llm: LLM, completion: Completion, prefix_tokens: list[int]) -> list[Translation]:
    """Put the prefix before the samples and decode both together, because a space may be between them."""
    if not prefix_tokens:
        return [Translation(sample.text, sample.cumulative_logprob) for sample in completion.choices]
    assert llm.tokenizer is not None
    translations = []
    for sample in completion.choices:
        tokens = sample.token_ids[:-1] if sample.finish_reason == "stop" else sample.token_ids
        translations.append(Translation(llm.tokenizer.decode([*prefix_tokens, *tokens]), sample.cumulative_logprob))
    return translations


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())


def _score(translation: Translation) -> str:
    return "" if translation.score is None else f"{translation.score:.4f}"
