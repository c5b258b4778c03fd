"""``kvad bench``: the speed of a model with and without its cache or drafts, and the quality of lossy caches.

Numbers go to stdout, progress and notes to stderr; ``--out`` writes JSON lines and figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click
from click.core import ParameterSource

from kvad import benchmarks, checkpoint, datasets, inspection, planning, storage
from kvad.cli import output
from kvad.cli.commands.bench_serve import serve_bench_command
from kvad.cli.fields import CommandGroup, Options, command, given_fields, option
from kvad.cli.parameters import (
    INTEGERS,
    NUMBERS,
    ActivationOptions,
    DeviceOptions,
    FormatOptions,
    JsonOption,
    ModelArgument,
    PromptOptions,
    SpeculativeOptions,
    load_fields,
    model_fields,
    open_llm,
)
from kvad.errors import UsageError, format_bytes
from kvad.text import Tokenizer
from kvad.train import sources

if TYPE_CHECKING:
    from kvad.llm import LLM

ResultT = TypeVar("ResultT")
OptionsT = TypeVar("OptionsT", bound=Options)
TOKENS = (64, 128, 256, 512)
MAX_LENGTH = 2048  # limit of the default lengths of needle tasks
CURVES = {"cache": "cache", "cat": "torch.cat", "recompute": "recompute"}  # curve -> its printed name
QUALITY_LEGEND = (
    "evicted: fraction of a sequence's slots (quest: not read); memory: its bytes over the full cache's; "
    "ratio: to the perplexity without a cache; KL in nats; then the recall, - = none"
)


class _BenchGroup(CommandGroup):
    """``kvad bench --profile MODEL`` is ``kvad bench profile MODEL``; ``--speculative`` selects a command, too."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        commands = {"--profile": ["profile", *args[1:]], "--speculative": ["speculative", *args]}
        return super().parse_args(ctx, commands.get(args[0], args) if args else args)


@click.group(cls=_BenchGroup)
def bench_group() -> None:
    """Measure the speed of a model with and without its cache or drafts, and the quality of lossy caches.

    \b
    kvad bench cache runs/demo
    kvad bench profile runs/demo
    kvad bench speculative runs/demo --speculative ngram
    kvad bench cache-quality runs/lookup-cpu
    kvad bench streaming runs/endless-rope
    kvad bench serve runs/demo --max-concurrency 8
    """


bench_group.add_command(serve_bench_command)


class _QuickOption(Options):
    quick: bool = option("Measure less: smaller defaults for the options that are not given", common=True)


QUICK = {  # defaults of --quick
    "repeats": 1,
    "new_tokens": (64, 128),
    "variants": "int8,int4,sinks,heavy-hitters,snapkv",
    "compression_ratios": (0.5,),
    "depths": (0.0, 0.5, 1.0),
    "samples_per_cell": 2,
    "num_texts": 2,
    "num_tokens": 4_000,
    "span_length": 1_000,
}
QUICK_LENGTH = 256  # tokens of a task


def _with_quick_defaults(options: OptionsT) -> OptionsT:
    """Return the options, with --quick with its defaults."""
    if not getattr(options, "quick", False):
        return options
    source = click.get_current_context().get_parameter_source
    names = [field.name for field in fields(options) if field.name in QUICK]
    return replace(options, **{name: QUICK[name] for name in names if source(name) is ParameterSource.DEFAULT})


class _BenchOptions(ModelArgument, FormatOptions, ActivationOptions, _QuickOption, JsonOption):
    new_tokens: tuple[int, ...] | None = option(
        "Numbers of new tokens to time [default: 64,128,256,512, or what fits]", kind=INTEGERS
    )
    prompt: str = option("Prompt to continue [default: the opening token]", "")
    repeats: int = option("Number of runs; medians are reported", 3)
    out: Path | None = option("Folder for the JSON lines and the figure [default: not written]", short="-o")


@command("cache", _BenchOptions, bench_group)
def cache_command(options: _BenchOptions) -> None:
    """Time generation with the cache, by recomputation, and with a cache extended by torch.cat, alternately.

    \b
    kvad bench cache runs/demo
    kvad bench cache runs/demo --new-tokens 64,128,256 --repeats 5 --json >> dev/results/bench.jsonl
    """
    options = _with_quick_defaults(options)
    prompt, lengths = options.prompt, options.new_tokens
    with open_llm(options.model, load_fields(options), max_num_seqs=1) as llm, output.ProgressLine() as progress:
        _require_decoder(llm, "cache")
        if lengths is None:
            room = llm.model.config.max_seq_len - len(llm.encode(prompt))
            lengths = TOKENS if room >= TOKENS[-1] else tuple(max(1, room // part) for part in (8, 4, 2, 1))
            if room < TOKENS[-1]:
                output.note(f"the model's limit leaves room for {room} new tokens: timing {list(lengths)}")
        result = benchmarks.bench_cache(llm, lengths, options.repeats, progress.update, prompt=prompt)
    _print(options, result, bench_lines(result), write_results)


class _ProfileOptions(ModelArgument, FormatOptions, ActivationOptions, JsonOption):
    num_seqs: int = option("Number of sequences that decode together", 1)
    context: int = option("Tokens of each sequence before the first step; of an encoder-decoder: of its source", 128)
    new_tokens: int = option("Number of steps to measure", 64)
    repeats: int = option("Number of runs; the median is reported", 3)


@command("profile", _ProfileOptions, bench_group)
def profile_command(options: _ProfileOptions) -> None:
    """Measure where the time of a decoding step goes, beside the time of reading its weights and cache once.

    \b
    kvad bench profile runs/demo
    kvad bench profile runs/demo --num-seqs 32 --context 64 --json
    """
    length = None if options.context < 1 else options.context + options.new_tokens + 16
    with (
        open_llm(options.model, load_fields(options), max_num_seqs=options.num_seqs, max_seq_len=length) as llm,
        output.ProgressLine() as progress,
    ):
        if llm.model.decoder is None:
            raise UsageError("kvad bench --profile needs a model that generates, got an encoder")
        numbers = options.num_seqs, options.context, options.new_tokens, options.repeats
        result = benchmarks.bench_profile(llm, *numbers, progress.update)
    record = output.with_properties(result, "tokens_per_second", "of_roofline")
    output.print_result(options.as_json, record, profile_lines(result))


class _SpeculativeOptions(
    ModelArgument, PromptOptions, SpeculativeOptions, FormatOptions, ActivationOptions, JsonOption
):  # fmt: skip
    new_tokens: int = option("Number of new tokens to generate", 128)
    repeats: int = option("Number of runs; medians are reported", 3)


@command("speculative", _SpeculativeOptions, bench_group)
def speculative_command(options: _SpeculativeOptions) -> None:
    """Measure greedy generation with and without speculative decoding, by turns [default: --speculative ngram].

    Without --prompt or --file, the text begins with the opening token. Mean accepted length: tokens of a step with
    drafts, including the one that the model adds.

    \b
    kvad bench speculative runs/demo --speculative ngram:8 --file source.py
    kvad bench speculative MODEL --draft-model SMALL --prompt "def __init__(self" --json
    """
    fields = {"speculative": "ngram", **load_fields(options)}
    with open_llm(options.model, fields, max_num_seqs=1) as llm, output.ProgressLine() as progress:
        _require_decoder(llm, "speculative")
        result = benchmarks.bench_speculation(
            llm, options.new_tokens, options.repeats, progress.update, prompt=options.read_prompt()
        )
    record = output.with_properties(result, "speedup", "acceptance_rate", "mean_accepted_length")
    output.print_result(options.as_json, record, speculation_lines(result))


class _TextOption(Options):
    text: tuple[Path, ...] = option(
        "Text file to read [default: held-out sources of this Python's library]", metavar="FILE"
    )


class _QualityOptions(ModelArgument, _TextOption, DeviceOptions, _QuickOption, JsonOption):
    variants: str | None = option(
        "Cache variants, such as int8,snapkv,snapkv+int8; full is always included [default: all]", metavar="NAME,..."
    )
    summarizer: Path | None = option("Also measure the summaries of this summarizer")
    compression_ratios: tuple[float, ...] = option(
        "Fractions of the cache to evict", (0.25, 0.5, 0.75, 0.875), kind=NUMBERS
    )
    tasks: str = option("Needle tasks: one needle, one of many, a chain", "single,many,chain")
    lengths: tuple[int, ...] | None = option(
        "Tokens of a task [default: 1/8 to 1 of the limit, at most 2048]", kind=INTEGERS
    )
    depths: tuple[float, ...] = option("Relative positions of the needle", (0.0, 0.25, 0.5, 0.75, 1.0), kind=NUMBERS)
    samples_per_cell: int = option("Number of tasks per length and depth", 8)
    num_texts: int = option("Number of texts for the perplexity; 0 omits it", 8)
    text_length: int | None = option("Tokens of such a text [default: the longest of --lengths]")
    language: Literal["auto", "lookup", "english"] = option("Language of the tasks", "auto")
    question_position: Literal["after", "before"] = option(
        "Ask the question only after eviction, or also in the prompt", "after"
    )
    prefill_chunk_size: int = option("Tokens of a sequence per step", 16)
    evict_after: Literal["chunk", "prompt"] = option(
        "When ranking policies evict: after every chunk, or once after the prompt", "chunk"
    )
    max_num_seqs: int = option("Maximum number of sequences", 8)
    seed: int = option("Seed of the tasks", 0, short="-s")
    out: Path | None = option(
        "Folder for lines and figures; a previous run in it is continued [default: not written]", short="-o"
    )
    overwrite: bool = option("Replace the contents of --out")


@command("cache-quality", _QualityOptions, bench_group)
def cache_quality_command(options: _QualityOptions) -> None:
    """Measure the loss of lossy caches: perplexity, KL, needle recall, chains of variables.

    \b
    kvad bench cache-quality runs/demo --quick
    kvad bench cache-quality MODEL --variants snapkv,tiered+int4 --language english --out runs/quality
    """
    options = _with_quick_defaults(options)
    handle, folder = checkpoint.open_checkpoint(options.model), options.summarizer
    summarizer = None if folder is None else checkpoint.summarizer.load_summarizer(folder, handle)
    learned = [benchmarks.variants.LEARNED] if summarizer else []
    known = [*benchmarks.variants.known_variants(), *learned]
    names = known if options.variants is None else options.variants.split(",")
    selected = benchmarks.select_variants(names, options.compression_ratios, summarizer)
    with open_llm(handle, model_fields(options), max_num_seqs=1) as llm, output.ProgressLine() as progress:
        tokenizer = _require_decoder(llm, "cache-quality")
        quality, needle_tasks = _quality_options(options, llm.model.config.max_seq_len), benchmarks.needle_tasks
        opening = needle_tasks.opening_tokens(tokenizer)
        language = needle_tasks.choose_language(options.language, tokenizer, lambda: _read(options.text), opening)
        texts = _perplexity_texts(language, options.text, opening, quality)
        out = None if options.out is None else benchmarks.results.ResultFolder(options.out, options.overwrite)
        result = benchmarks.bench_quality(
            llm, selected, language, texts, quality, model=str(options.model), out=out, progress=progress.update
        )
    _print(options, result, format_quality(result), _write_quality, result.notes)


class _StreamingOptions(ModelArgument, _TextOption, DeviceOptions, _QuickOption, JsonOption):
    variant: str = option("Cache variant, with as many tokens as the model's limit", "sinks")
    policy: str | None = option("Cache policy with arguments, such as 'sinks(4,252)' [default: that of --variant]")
    num_tokens: int = option("Number of tokens to stream", 100_000)
    span_length: int = option("Tokens per reported perplexity", 10_000)
    prefill_chunk_size: int = option("Tokens per step", 16)
    out: Path | None = option("Folder for the result and a figure [default: not written]", short="-o")


@command("streaming", _StreamingOptions, bench_group)
def streaming_command(options: _StreamingOptions) -> None:
    """Measure the perplexity along one long text, span by span, next to recomputed windows.

    Flatness is the worst span over the best, each divided by the perplexity without a cache: 1 is flat.

    \b
    kvad bench streaming runs/endless-rope --num-tokens 100000
    kvad bench streaming runs/endless-alibi --policy "sinks(4,252)" --out runs/endless-alibi/bench
    """
    options = _with_quick_defaults(options)
    with open_llm(options.model, model_fields(options), max_num_seqs=1) as llm, output.ProgressLine() as progress:
        tokenizer = _require_decoder(llm, "streaming")
        selected = _streaming_variant(options.variant, options.policy, llm.model.config.max_seq_len)
        ids = _stream(tokenizer, options.text, options.num_tokens)
        span, chunk = options.span_length, options.prefill_chunk_size
        result = benchmarks.bench_streaming(llm, selected, ids, span=span, chunk=chunk, progress=progress.update)
    _print(options, result, format_streaming(result), partial(_write_streaming, model=str(options.model)))


# ---------------------------------------------------------------- inputs


def _require_decoder(llm: LLM, name: str) -> Tokenizer:
    """Return the tokenizer of a decoder; raise UsageError for another model."""
    if llm.model.config.kind != "decoder":
        raise UsageError(f"kvad bench {name} needs a decoder, got an {llm.model.config.kind}")
    if llm.tokenizer is None:
        raise UsageError("the model has no tokenizer, which the benchmark needs")
    return llm.tokenizer


def _quality_options(options: _QualityOptions, limit: int) -> benchmarks.cache_quality.QualityOptions:
    longest = min(limit, MAX_LENGTH)
    lengths = options.lengths or tuple(dict.fromkeys(max(1, longest // part) for part in (8, 4, 2, 1)))
    if options.quick and options.lengths is None:
        lengths = (min(longest, QUICK_LENGTH),)
    fields = given_fields(options, benchmarks.cache_quality.QualityOptions)
    fields |= {"tasks": tuple(options.tasks.split(",")) if options.tasks else (), "lengths": lengths}
    return benchmarks.cache_quality.QualityOptions(**{**fields, "text_length": options.text_length or max(lengths)})


def _perplexity_texts(
    language: benchmarks.needle_tasks.HaystackLanguage,
    files: Sequence[Path],
    opening: Sequence[int],
    options: benchmarks.cache_quality.QualityOptions,
) -> list[list[int]]:
    """Read the texts for the perplexity: the files, or held-out text in the language of the model."""
    count, length = options.num_texts, options.text_length
    if files or language.name != "lookup":
        return benchmarks.cache_quality.text_rows(language, _read(files), opening, count, length)
    seeds = range(datasets.synthetic.HELD_OUT_SEED, datasets.synthetic.HELD_OUT_SEED + count)
    texts = [datasets.synthetic.episode(length - len(opening), seed) for seed in seeds]
    return [[*opening, *language.encode(text)] for text in texts]


def _read(files: Sequence[Path]) -> list[str]:
    if not files:
        found = datasets.stdlib_sources.find_sources()
        names = {path: path.relative_to(found.root).as_posix() for path in found.files}
        files = [path for path, name in names.items() if datasets.stdlib_sources.is_held_out(name)]
    return [sources.documents.read_document(path) for path in files]


def _stream(tokenizer: Tokenizer, files: Sequence[Path], num_tokens: int) -> list[int]:
    """Read ``num_tokens`` tokens of the files, or of held-out text, as one document."""
    if num_tokens < 2:
        raise UsageError(f"--num-tokens: must be at least 2, got {num_tokens}")
    ids, opening = list[int](), benchmarks.needle_tasks.opening_tokens(tokenizer)
    for text in _read(files):
        if len(ids) < num_tokens:
            ids += tokenizer.encode(text.rstrip() + "\n")
    if len(ids) + len(opening) < num_tokens:
        raise UsageError(
            f"--num-tokens {num_tokens:,}: the text has {len(ids):,} tokens", "add files with --text, or lower it"
        )
    return [*opening, *ids][:num_tokens]


def _streaming_variant(name: str, policy: str | None, limit: int) -> benchmarks.Variant:
    """Build a variant with as many tokens as the model's limit, by name or by a policy with arguments."""
    presets = planning.cache_presets
    if policy is None and name not in presets.POLICY_BUILDERS:
        return benchmarks.Variant(name, 0.0, benchmarks.variants.variant_fields(name))
    if policy is None:
        policy = presets.POLICY_BUILDERS[name](presets.PolicySize(limit, limit, interval=1))
    fields = {"policy": policy, "endless": True}
    return benchmarks.Variant(policy, 0.0, lambda _length, _interval: fields)


# ---------------------------------------------------------------- speed


def _print(
    options: _BenchOptions | _QualityOptions | _StreamingOptions,
    result: ResultT,
    lines: Sequence[str],
    write: Callable[[ResultT, Path], list[Path]],
    notes: Sequence[str] = (),
) -> None:
    """Write the files of a result to --out, if given, and print it; names of figures and notes go to stderr."""
    figures = [] if options.out is None else write(result, options.out)
    for text in (*(f"figure: {path}" for path in figures), *notes):
        output.note(text)
    output.print_result(options.as_json, result, lines)


def _write_json(result: object, lines: Iterable[object], out: Path) -> None:
    for suffix, values in ((".json", [result]), (".jsonl", lines)):
        text = "".join(f"{output.json_line(value)}\n" for value in values)
        storage.atomic.write_bytes(out.with_suffix(suffix), text.encode())


def _image_paths(stem: Path) -> list[Path]:
    return [stem.with_suffix(".png"), stem.with_suffix(".svg")]


def write_results(result: benchmarks.cache_speed.BenchResult, out: Path) -> list[Path]:
    """Write ``bench-cache.json``, ``bench-cache.jsonl`` (a line per curve and length) and the figure.

    Returns:
        The files of the figure; none if matplotlib is not installed.
    """
    stem = out / "bench-cache"
    _write_json(result, result.lines(), stem)
    series = [
        inspection.plot.PlotSeries(text, result.tokens, result.curves[name].seconds, dots=True)
        for name, text in CURVES.items()
    ]
    title = f"{result.speedup[-1]:.1f} times faster with the cache at {result.tokens[-1]} new tokens"
    labels: dict[str, Any] = {"x_label": "new tokens", "y_label": "seconds", "log_x": True, "log_y": True}
    return output.draw_figures(lambda: inspection.plot.draw_series(series, _image_paths(stem), title=title, **labels))


def bench_lines(result: benchmarks.cache_speed.BenchResult) -> list[str]:
    """Format the result: machine, times, slopes, counted FLOPs and bytes, and the gains that the formulas predict."""
    curves = {text: result.curves[name] for name, text in CURVES.items()}
    times = [("new tokens", *curves, "speedup")]
    for index, length in enumerate(result.tokens):
        seconds = [f"{curve.seconds[index]:.3f} s" for curve in curves.values()]
        times.append((str(length), *seconds, f"{result.speedup[index]:.1f}x"))
    times.append(("exponent", *(f"{curve.exponent:.2f}" for curve in curves.values()), ""))
    first, last = min(32, result.tokens[-1]), result.tokens[-1]
    return [
        f"{result.parameters:,} parameters in {result.dtype}, cache {result.layout} in {result.cache_dtype}",
        f"{result.machine}; commit {result.commit or 'unknown'}",
        "",
        *output.format_table(times, left=()),
        "",
        *(
            f"one token, {name + ':':<11} {curve.early:8.2f} ms at token {first}, {curve.late:8.2f} ms at token {last}"
            for name, curve in curves.items()
        ),
        f"flatness of the cache: {result.flatness:.2f} (1 = the time per token does not depend on the length)",
        f"of one step, the model takes {result.model_ms:.2f} ms and the engine {result.engine_ms:.3f} ms",
        f"all three generate the same first {result.outputs_agree} of {last} tokens",
        "",
        *output.format_records(result.counted, COUNT_COLUMNS),
    ]


def profile_lines(result: benchmarks.step_profile.StepProfile) -> list[str]:
    """Format the profile: the parts of a step, the largest first, then the bytes and the time of reading them."""
    engine = benchmarks.step_profile.ENGINE_PARTS
    parts = sorted(result.parts.items(), key=lambda item: -item[1])
    rows = [
        (name, f"{value:.3f} ms", f"{value / result.step_ms:.1%}", "engine" if name in engine else "model")
        for name, value in parts
    ]
    read = f"{format_bytes(result.weight_bytes)} of weights and {format_bytes(result.cache_bytes)} of cache"
    speed = f"{result.step_ms:.2f} ms (slowest run {result.slowest_ms:.2f}), {result.tokens_per_second:.1f} tokens/s"
    rate = f"at {result.bandwidth / 1e9:.1f} GB/s take {result.roofline_ms:.2f} ms"
    return [
        f"{result.parameters:,} parameters in {result.dtype}, cache in {result.cache_dtype}; kernels: {result.kernels}",
        f"{result.machine}; commit {result.commit or 'unknown'}",
        f"{result.num_seqs} sequences of {result.context} tokens, {result.new_tokens} steps, of {result.repeats} runs",
        "",
        *output.format_table([("part of a step", "time", "share", "of"), *rows], left=(0, 3)),
        "",
        f"one step: {speed}; the engine's share is {result.engine_share:.1%}",
        f"roofline: {read} {rate}: {result.of_roofline:.0%} of the step",
    ]


def speculation_lines(result: benchmarks.speculation.SpeculationResult) -> list[str]:
    """Format the result: tokens per second with and without drafts, accepted drafts, and equal tokens."""
    config, count = result.speculative, result.outputs_agree
    rows = [
        ("", "tokens/s", ""),
        ("without drafts", f"{result.baseline_tokens_per_second:.1f}", ""),
        (f"{config.method}, up to {config.num_tokens}", f"{result.tokens_per_second:.1f}", f"{result.speedup:.2f}x"),
    ]
    rate, length = result.acceptance_rate, result.mean_accepted_length
    drafts = f"{result.accepted_tokens:,} of {result.draft_tokens:,} drafts accepted"
    steps = f"drafts in {result.draft_steps:,} of {result.steps:,} steps"
    is_equal = count == result.new_tokens
    return [
        f"{result.parameters:,} parameters in {result.dtype}; {result.machine}; commit {result.commit or 'unknown'}",
        f"{result.prompt} prompt tokens, {result.new_tokens} new ones; medians of {result.repeats} runs by turns",
        "",
        *output.format_table(rows, left=(0,)),
        "",
        f"{drafts} ({output.format_optional(rate, '.0%')}), {steps}",
        f"mean accepted length {output.format_optional(length, '.2f')}",
        f"all {count} tokens are equal" if is_equal else f"the first {count} of {result.new_tokens} tokens are equal",
    ]


COUNT_COLUMNS: dict[str, str | Callable[[benchmarks.cache_speed.FlopCount], str]] = {
    "new tokens": "{.tokens}",
    "GFLOP": lambda count: f"{count.cached.flops / 1e9:.2f}",
    "recomputed": lambda count: f"{count.recomputed.flops / 1e9:.2f}",
    "cache read": lambda count: format_bytes(count.cached.bytes_read),
    "all bytes": lambda count: format_bytes(count.cached.bytes),
    "attention": "{0.gain.attention:.1f}x",
    "2N/3": "{0.formula.attention:.1f}",
    "projections": "{0.gain.projections:.1f}x",
    "N/2": "{0.formula.projections:.1f}",
}


# ---------------------------------------------------------------- quality


def format_quality(result: benchmarks.cache_quality.QualityResult) -> list[str]:
    options = result.options
    rows = [("cache", "evicted", "memory", "perplexity", "ratio", "KL", *options.tasks)]
    for row in result.summary:
        numbers = [(row.memory, ".2f"), (row.perplexity, ".3f"), (row.perplexity_ratio, ".3f"), (row.kl, ".2e")]
        numbers += [(row.recall[kind], ".2f") for kind in options.tasks]
        rows.append((row.cache, f"{row.ratio:.1%}", *(output.format_optional(value, spec) for value, spec in numbers)))
    question = "after eviction" if options.question_position == "after" else "before and after eviction"
    question += ", evicted once" if options.evict_after == "prompt" else ""
    lengths = ", ".join(map(str, options.lengths))
    model = f"{result.parameters:,} parameters, language {result.language}"
    texts = f"{options.num_texts} texts of {options.text_length} tokens, in chunks of {options.prefill_chunk_size}"
    return [
        f"{model}; {result.machine}; commit {result.commit or 'unknown'}",
        f"tasks of {lengths} tokens, {options.samples_per_cell} per length and depth, questions {question}; {texts}",
        "",
        *output.format_table(rows, left=(0,)),
        "",
        QUALITY_LEGEND,
    ]


def format_streaming(result: benchmarks.streaming_perplexity.StreamingResult) -> list[str]:
    columns = {
        "tokens": "{0.start:,} - {0.stop:,}", "perplexity": "{.perplexity:.3f}", "reference": "{.reference:.3f}",
        "ratio": "{.ratio:.4f}",
    }  # fmt: skip
    return [
        f"{result.cache}: {result.tokens:,} tokens through a model of {result.limit:,}, {result.chunk} in a step",
        *output.format_records(result.spans, columns),
        f"flatness {result.flatness:.4f} (largest ratio over smallest); of the bare perplexities {result.raw:.4f}",
        f"on average {result.mean:.4f} times the reference, the worst span {result.worst:.4f} times",
    ]


def _write_quality(result: benchmarks.cache_quality.QualityResult, out: Path) -> list[Path]:
    """Write ``cache-quality.json``, the curves of perplexity and recall, and the heat maps of needle recall."""
    storage.atomic.write_bytes(out / "cache-quality.json", f"{output.json_line(result)}\n".encode())
    return output.draw_figures(lambda: list(_draw_all(result, out)))


def _draw_all(result: benchmarks.cache_quality.QualityResult, out: Path) -> Iterable[Path]:
    rows, tasks = result.summary, result.options.tasks
    measures = [  # name, label, values of the summary rows
        ("perplexity", "ratio to the perplexity without a cache", [row.perplexity_ratio for row in rows]),
        ("kl", "KL, nats per token", [row.kl for row in rows]),
        *((f"recall-{kind}", "recall", [row.recall[kind] for row in rows]) for kind in tasks),
    ]
    for name, label, values in measures:
        if series := _curves(rows, values):
            title, files = f"{name} against the fraction of the cache that is kept", out / f"cache-quality-{name}"
            yield from inspection.plot.draw_series(
                series, _image_paths(files), title=title, x_label="fraction kept", y_label=label
            )
    for kind in tasks:
        grids, across = _grids(result, kind)
        if grids:
            title, files = f"recall of {kind}, by depth and length", out / f"cache-quality-{kind}"
            yield from inspection.plot.draw_grids(
                grids, _image_paths(files), across=across, title=title, x_label="tokens", y_label="depth"
            )


def _curves(
    rows: Sequence[benchmarks.cache_quality.SummaryRow], values: Sequence[float | None]
) -> list[inspection.plot.PlotSeries]:
    """Return one curve per lossy cache, each starting at the full cache, the first row."""
    points = {row.cache: [(1.0, values[0])] for row in rows if row.ratio}
    for row, value in zip(rows[1:], values[1:], strict=True):
        points.setdefault(row.cache, []).append((1 - row.ratio, value))
    series = []
    for cache, pairs in points.items():
        measured = sorted((x, y) for x, y in pairs if y is not None)
        if len(measured) > 1:
            xs, ys = zip(*measured, strict=True)
            series.append(inspection.plot.PlotSeries(cache, xs, ys, dots=True))
    return series


def _grids(
    result: benchmarks.cache_quality.QualityResult, kind: str
) -> tuple[list[inspection.plot.HeatMapGrid | None], int]:
    """Return a heat map per cache (depth by length), and the number of maps per row."""
    recalls: dict[tuple[str, float], dict[tuple[float, int], float]] = {}
    for line in result.lines:
        if line["measure"] == kind:
            cells = recalls.setdefault((line["cache"], line["ratio"]), {})
            cells[line["depth"], line["length"]] = line["recall"]
    places = [place for cells in recalls.values() for place in cells]
    depths, lengths = sorted({depth for depth, _ in places}), sorted({length for _, length in places})
    across = len({row.ratio for row in result.summary if row.ratio}) or 4
    grids: list[inspection.plot.HeatMapGrid | None] = []
    before = None
    for row in result.summary:
        if (cell := recalls.get((row.cache, row.ratio))) is None:
            continue
        if row.ratio and row.cache != before:  # each policy starts a row
            grids += [None] * (-len(grids) % across)
        before = row.cache
        values = [[cell.get((depth, length)) for length in lengths] for depth in depths]
        name = f"{row.cache}, {row.ratio:g} evicted" if row.ratio else row.cache
        grids.append(inspection.plot.HeatMapGrid(name, list(map(str, lengths)), [f"{d:g}" for d in depths], values))
    return grids, min(across, max(1, len(grids)))


def _write_streaming(result: benchmarks.streaming_perplexity.StreamingResult, out: Path, model: str) -> list[Path]:
    """Write ``bench-streaming.json``, ``bench-streaming.jsonl`` (a line per span) and the figure."""
    stem, first = out / "bench-streaming", {"what": "streaming", "cache": result.cache}
    settings = {"model": model, "limit": result.limit, "chunk": result.chunk}
    settings |= {"machine": benchmarks.results.machine_info(), "commit": benchmarks.results.commit_id()}
    _write_json(result, [{**first, **asdict(span), "ratio": span.ratio, **settings} for span in result.spans], stem)
    x = [span.stop for span in result.spans]
    series = [
        inspection.plot.PlotSeries(result.cache, x, [span.perplexity for span in result.spans], dots=True),
        inspection.plot.PlotSeries("recomputed windows", x, [span.reference for span in result.spans], dots=True),
    ]
    title = f"stream through a limit of {result.limit:,}: flatness {result.flatness:.3f}"
    labels: dict[str, Any] = {"title": title, "x_label": "tokens", "y_label": "perplexity of a span"}
    return output.draw_figures(lambda: inspection.plot.draw_series(series, _image_paths(stem), **labels))
