"""``kvad translate MODEL [FILE|-]``: every line through an encoder-decoder (translation, summaries, corrections)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from kvad.cli.cache_options import parse_policy_options, short_policy_options
from kvad.cli.line_batches import (
    LineSource,
    LineTask,
    answer_lines,
    line_options,
    open_for_command,
    print_answers,
    printer,
    require_tokenizer,
)
from kvad.cli.model_options import check_sampling_ranges, format_options, parse_format_options
from kvad.cli.options import SectionedCommand, explicit_options, model_argument
from kvad.errors import RequestError, UsageError

if TYPE_CHECKING:
    from kvad.checkpoint import CheckpointHandle
    from kvad.engine import Completion
    from kvad.llm import LLM

MAX_TOKENS = 256  # of a translation, where neither the user nor the checkpoint says
MAX_PARALLEL_LINES, MAX_SEQS = 32, 512  # at a time, where nothing is said: lines, and the beams of all of them
SAMPLING_OPTIONS = ("beams", "length_penalty", "max_tokens", "temperature", "top_k", "top_p", "seed")


class Translation(NamedTuple):
    text: str
    score: float | None = None  # of a beam search


@click.command(cls=SectionedCommand)
@model_argument
@click.option("--language", metavar="CODE", help="Of the translation, where the model writes several.")
@click.option("--source-language", metavar="CODE", help="Of the lines, where the model marks it.")
@click.option("--prefix", metavar="TEXT", help="How every translation begins.")
@click.option("--beams", type=int, help="Beam search with so many; 1 is greedy [default: the checkpoint's, else 1].")
@click.option("--length-penalty", type=float, help="Of the beam search: above 0 favours long [default: as above, 1].")
@click.option("--n-best", type=int, default=1, show_default=True, help="Translations of each line, the best first.")
@click.option("--max-tokens", type=int, help=f"Of a translation [default: the checkpoint's, else {MAX_TOKENS}].")
@click.option("--temperature", type=float, help="Sample instead of searching.")
@click.option("--top-k", type=int, help="Of the sampling: keep the K likeliest tokens.")
@click.option("--top-p", type=float, help="Of the sampling: keep the fewest tokens that reach P.")
@click.option("--seed", type=int, help="Sample, with this seed [default: 0].")
@click.option(
    "--rows", type=int, help=f"Of the cache: a line takes one per beam [default: for {MAX_PARALLEL_LINES} lines]."
)
@click.option("--context", type=int, help="Tokens of the longest row of the cache [default: what --max-tokens takes].")
@format_options
@short_policy_options
@line_options
def translate_command(model: Path, file: Path | None, **options: Any) -> None:
    """Translate every line of FILE, or of standard input.

    A line in gives a line out, in the same order; an empty line stays empty.  With --n-best N a line gives N of
    `LINE<tab>SCORE<tab>TEXT`.  A line that is too long is told on stderr and gives an empty one; the exit code is 1.

    \b
    kvad translate Helsinki-NLP/opus-mt-de-en letter.txt > letter.en.txt
    kvad translate facebook/nllb-200-distilled-600M --source-language deu_Latn --language eng_Latn < letter.txt
    echo "Ein Haus am See." | kvad translate runs/opus --beams 6 --n-best 3 --json
    """
    _check(options)
    with LineSource(file) as lines:
        opened = open_for_command(model, "translate")
        sampling = _sampling(opened, options)
        with _load(opened, sampling, options) as llm:
            task = _task(llm, sampling, options)
            show = printer(task, as_json=options["as_json"])
            failed = print_answers(answer_lines(lines, task), show, lines, quiet=options["quiet"])
    click.get_current_context().exit(1 if failed else 0)


def _check(options: Mapping[str, Any]) -> None:
    """What can be refused before anything is opened."""
    check_sampling_ranges(explicit_options(options, SAMPLING_OPTIONS))
    parse_policy_options(options)
    if options["n_best"] < 1:
        raise RequestError(f"--n-best: {options['n_best']} is out of range, must be at least 1")
    if options["beams"] is not None and options["n_best"] > options["beams"] and options["temperature"] is None:
        raise RequestError(f"--n-best {options['n_best']} exceeds --beams {options['beams']}", "search with more beams")


def _sampling(opened: CheckpointHandle, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of LLM.generate: what was asked for, over the checkpoint's own, over a greedy search."""
    from kvad.engine import scheduling

    said: Mapping[str, Any] = opened.generation.sampling or {}
    chosen = explicit_options(options, SAMPLING_OPTIONS)
    chosen.setdefault("max_tokens", min(said.get("max_tokens", MAX_TOKENS), opened.config.max_seq_len))
    sampled = any(name in chosen for name in scheduling.request.SAMPLING_ONLY_FIELDS)
    if not sampled and "beams" not in chosen and options["n_best"] > 1:
        chosen["beams"] = max(options["n_best"], said.get("beams", 1))
    if not sampled and "beams" not in chosen and not said:
        chosen["beams"] = 1
    if chosen.get("beams") == 1 and not sampled:
        chosen["temperature"] = 0.0
    if options["n_best"] > 1:
        chosen["n"] = options["n_best"]
    return chosen


def _load(opened: CheckpointHandle, sampling: Mapping[str, Any], options: Mapping[str, Any]) -> LLM:
    """With a cache of rows for as many lines as half of the memory holds, 32 at most."""
    from kvad.llm import LLM, resolve_sampling

    asked = resolve_sampling(sampling, opened.generation)
    each = max(asked.num_beams, asked.n)
    longest = sampling["max_tokens"] + len((options["prefix"] or "").encode()) + 2  # no text has more tokens than bytes
    capacity = min(opened.config.max_seq_len, longest) if options["context"] is None else options["context"]
    if options["rows"] is not None and options["rows"] < each:
        raise UsageError(f"--rows {options['rows']}: a line's {each} beams or samples take a row each", f"give {each}")
    rows = _rows(opened, each, options, capacity) if options["rows"] is None else options["rows"]
    chosen = {
        **parse_format_options(options),
        **parse_policy_options(options),
        "deterministic": options["deterministic"],
    }
    chosen["adapter"] = options["adapter"]
    return LLM.load(opened.path, dtype=options["dtype"], rows=rows, capacity=capacity, **chosen)


def _rows(opened: CheckpointHandle, each: int, options: Mapping[str, Any], capacity: int) -> int:
    """``each``: of one line."""
    from kvad.cache import CacheConfig
    from kvad.cache.sizing import available_bytes, plan_memory

    have, source = available_bytes(), opened.config.encoder_input
    assert source is not None, "an encoder-decoder has a source"
    stored = str(opened.stored_dtype).removeprefix("torch.")
    computed = options["dtype"] or ("float32" if stored == "float16" else stored)
    fields: dict[str, Any] = {
        name.removeprefix("cache_"): value for name, value in parse_format_options(options).items()
    }
    fields |= parse_policy_options(options)
    lines = max(1, min(MAX_PARALLEL_LINES, MAX_SEQS // each))
    while lines > 1 and have is not None:
        cache = CacheConfig(
            max_num_seqs=lines * each,
            max_seq_len=capacity,
            max_source_len=source.max_seq_len,
            **{"dtype": computed, **fields},
        )
        if plan_memory(opened.config, cache, weights_dtype=computed).total <= have // 2:
            break
        lines //= 2
    return lines * each


# ---------------------------------------------------------------- the task


def _task(llm: LLM, sampling: Mapping[str, Any], options: Mapping[str, Any]) -> LineTask[Sequence[Translation]]:
    language, source_language = options["language"], options["source_language"]
    if (
        require_tokenizer(llm).source_tokenizer is not None and language is not None
    ):  # Marian marks what it translates to in the source
        language, source_language = None, language
    prefix, spelled = _start(llm, options["prefix"], language)
    llm.texts.encode_source("a", source_language)  # an unknown language is nobody's line
    numbered = options["n_best"] > 1

    def ask(many: list[list[int]]) -> list[list[Translation]]:
        chosen = {**sampling, "prefix": prefix, "language": None if prefix is not None else language}
        return [_translations(llm, done, spelled) for done in llm.generate(many, **chosen)]

    def fields(found: Sequence[Translation]) -> dict[str, object]:
        best = found[0] if found else Translation("")
        more = {"translations": [each._asdict() for each in found]} if numbered else {}
        return {"text": best.text, "score": best.score, **more}

    def plain(number: int, found: Sequence[Translation]) -> str:
        if not numbered:
            return _one_line(found[0].text) if found else ""
        return "\n".join(f"{number}\t{_score(each)}\t{_one_line(each.text)}" for each in found or [Translation("")])

    return LineTask(lambda text: llm.texts.encode_source(text, source_language), ask, plain, fields, empty=())


def _start(llm: LLM, prefix: str | None, language: str | None) -> tuple[list[int] | None, list[int]]:
    """(how every target begins where there is a prefix: its opening token, its language, the prefix; the prefix)."""
    code = llm.generation.forced_bos_token_id if language is None else llm.texts.language_token(language)
    if not prefix:
        return None, []
    assert llm.tokenizer is not None
    spelled = llm.tokenizer.encode(prefix)
    return [*llm.texts.encode_target(None), *([] if code is None else [code]), *spelled], spelled


def _translations(llm: LLM, done: Completion, spelled: list[int]) -> list[Translation]:
    """The samples with the prefix put before them, spelled together: a space may stand between."""
    if not spelled:
        return [Translation(sample.text, sample.cumulative_logprob) for sample in done.choices]
    assert llm.tokenizer is not None
    found = []
    for sample in done.choices:
        tokens = sample.token_ids[:-1] if sample.finish_reason == "stop" else sample.token_ids
        found.append(Translation(llm.tokenizer.decode([*spelled, *tokens]), sample.cumulative_logprob))
    return found


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())


def _score(found: Translation) -> str:
    return "" if found.score is None else f"{found.score:.4f}"
