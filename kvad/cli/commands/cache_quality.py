"""``kvad bench cache-quality MODEL`` and ``kvad bench streaming MODEL``: the loss of lossy caches.

Numbers go to stdout, progress and notes to stderr; ``--out`` appends JSON lines during the run and writes figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvad.cli.fields import Options, command, option
from kvad.cli.output import ProgressLine, draw_figures, format_table, json_line, note, print_result
from kvad.cli.parameters import INTEGERS, NUMBERS, JsonOption, ModelArgument
from kvad.errors import UsageError

if TYPE_CHECKING:
    from kvad import benchmarks, inspection
    from kvad.benchmarks import Variant
    from kvad.llm import LLM
    from kvad.text import Tokenizer

MAX_LENGTH = 2048  # limit of the default lengths


class _TextOption(Options):
    text: tuple[Path, ...] = option(
        "Text file to read [default: held-out sources of this Python's library]", metavar="FILE"
    )


class _QualityOptions(ModelArgument, _TextOption, JsonOption):
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


@command("cache-quality", _QualityOptions)
def cache_quality_command(options: _QualityOptions) -> None:
    """Measure the loss of lossy caches: perplexity, KL, needle recall, chains of variables.

    \b
    kvad bench cache-quality MODEL --variants snapkv,tiered+int4 --language english --out runs/quality
    """
    from kvad import benchmarks, checkpoint
    from kvad.benchmarks import bench_quality, select_variants
    from kvad.checkpoint import open_checkpoint
    from kvad.llm import LLM

    handle = open_checkpoint(options.model)
    folder = options.summarizer
    summarizer = None if folder is None else checkpoint.summarizer.load_summarizer(folder, handle)
    learned = [benchmarks.variants.LEARNED] if summarizer else []
    known = [*benchmarks.variants.known_variants(), *learned]
    names = known if options.variants is None else options.variants.split(",")
    selected = select_variants(names, options.compression_ratios, summarizer)
    with LLM.load(handle, max_num_seqs=1) as llm, ProgressLine() as progress:
        require_decoder(llm, "cache-quality")
        quality = _quality_options(options, llm.model.config.max_seq_len)
        assert llm.tokenizer is not None
        opening = _opening(llm.tokenizer)
        language = benchmarks.needle_tasks.choose_language(
            options.language, llm.tokenizer, lambda: _read(options.text), opening
        )
        texts = _perplexity_texts(language, options.text, opening, quality)
        result = bench_quality(
            llm,
            selected,
            language,
            texts,
            quality,
            model=str(options.model),
            out=None if options.out is None else benchmarks.results.ResultFolder(options.out, options.overwrite),
            progress=progress.update,
        )
    for path in [] if options.out is None else _figures(result, options.out):
        note(f"figure: {path}")
    for text in result.notes:
        note(text)
    print_result(options.as_json, result, format_quality(result))


class _StreamingOptions(ModelArgument, _TextOption, JsonOption):
    variant: str = option("Cache variant, with as many tokens as the model's limit", "sinks")
    policy: str | None = option("Cache policy with arguments, such as 'sinks(4,252)' [default: that of --variant]")
    num_tokens: int = option("Number of tokens to stream", 100_000)
    span_length: int = option("Tokens per reported perplexity", 10_000)
    prefill_chunk_size: int = option("Tokens per step", 16)
    out: Path | None = option("Folder for the result and a figure [default: not written]", short="-o")


@command("streaming", _StreamingOptions)
def streaming_command(options: _StreamingOptions) -> None:
    """Measure the perplexity along one long text, span by span, next to recomputed windows.

    Flatness is the worst span over the best, each divided by the perplexity without a cache: 1 is flat.

    \b
    kvad bench streaming runs/endless-rope --num-tokens 100000
    kvad bench streaming runs/endless-alibi --policy "sinks(4,252)" --out runs/endless-alibi/bench
    """
    from kvad.benchmarks import bench_streaming
    from kvad.llm import LLM

    with LLM.load(options.model, max_num_seqs=1) as llm, ProgressLine() as progress:
        require_decoder(llm, "streaming")
        selected = _streaming_variant(options.variant, options.policy, llm.model.config.max_seq_len)
        ids = _stream(llm, options.text, options.num_tokens)
        span, chunk = options.span_length, options.prefill_chunk_size
        result = bench_streaming(llm, selected, ids, span=span, chunk=chunk, progress=progress.update)
    for path in [] if options.out is None else _write_streaming(result, options.out, str(options.model)):
        note(f"figure: {path}")
    print_result(options.as_json, result, format_streaming(result))


# ---------------------------------------------------------------- options


def require_decoder(llm: LLM, name: str) -> None:
    """Raise UsageError if the model is not a decoder with a tokenizer."""
    if llm.model.config.kind != "decoder":
        raise UsageError(f"kvad bench {name} needs a decoder, got an {llm.model.config.kind}")
    if llm.tokenizer is None:
        raise UsageError("the model has no tokenizer, which the benchmark needs")


def _quality_options(options: _QualityOptions, limit: int) -> benchmarks.cache_quality.QualityOptions:
    from kvad import benchmarks

    longest = min(limit, MAX_LENGTH)
    lengths = options.lengths or tuple(dict.fromkeys(max(1, longest // part) for part in (8, 4, 2, 1)))
    shared = (
        "depths",
        "samples_per_cell",
        "num_texts",
        "question_position",
        "evict_after",
        "max_num_seqs",
        "prefill_chunk_size",
        "seed",
    )
    tasks: Any = tuple(options.tasks.split(",")) if options.tasks else ()
    return benchmarks.cache_quality.QualityOptions(
        tasks=tasks,
        lengths=lengths,
        text_length=options.text_length or max(lengths),
        **{name: getattr(options, name) for name in shared},
    )


def _opening(tokenizer: Tokenizer) -> list[int]:
    """Return the token that opens every training text of this model, if any."""
    specials = tokenizer.special_tokens
    first = specials.separator if specials.separator is not None else specials.bos
    return [] if first is None else [first]


def _perplexity_texts(
    language: benchmarks.needle_tasks.HaystackLanguage,
    files: Sequence[Path],
    opening: Sequence[int],
    options: benchmarks.cache_quality.QualityOptions,
) -> list[list[int]]:
    """Read the texts for the perplexity: the files, or held-out text in the language of the model."""
    from kvad import benchmarks, datasets

    count, length = options.num_texts, options.text_length
    if files or language.name != "lookup":
        return benchmarks.cache_quality.text_rows(language, _read(files), opening, count, length)
    seeds = range(datasets.synthetic.HELD_OUT_SEED, datasets.synthetic.HELD_OUT_SEED + count)
    texts = [datasets.synthetic.episode(length - len(opening), seed) for seed in seeds]
    return [[*opening, *language.encode(text)] for text in texts]


def _read(files: Sequence[Path]) -> list[str]:
    from kvad import datasets
    from kvad.train import sources as sources_lib

    if files:
        return [sources_lib.documents.read_document(path, "replace") for path in files]
    sources = datasets.stdlib_sources.find_sources()
    held_out = [
        path for path in sources.files if datasets.stdlib_sources.is_held_out(path.relative_to(sources.root).as_posix())
    ]
    return [sources_lib.documents.read_document(path, "replace") for path in held_out]


def _stream(llm: LLM, files: Sequence[Path], num_tokens: int) -> list[int]:
    """Read ``num_tokens`` tokens of the files, or of held-out text, as one document."""
    assert llm.tokenizer is not None
    if num_tokens < 2:
        raise UsageError(f"--num-tokens: must be at least 2, got {num_tokens}")
    ids, opening = list[int](), _opening(llm.tokenizer)
    for text in _read(files):
        if len(ids) < num_tokens:
            ids += llm.tokenizer.encode(text.rstrip() + "\n")
    if len(ids) + len(opening) < num_tokens:
        raise UsageError(
            f"--num-tokens {num_tokens:,}: the text has {len(ids):,} tokens", "add files with --text, or lower it"
        )
    return [*opening, *ids][:num_tokens]


def _streaming_variant(name: str, policy: str | None, limit: int) -> Variant:
    """Build a variant with as many tokens as the model's limit, by name or by a policy with arguments."""
    from kvad import benchmarks, planning
    from kvad.benchmarks import Variant

    if policy is None and name not in planning.cache_presets.POLICY_BUILDERS:
        return Variant(name, 0.0, benchmarks.variants.variant_fields(name))
    policy_text = (
        planning.cache_presets.POLICY_BUILDERS[name](planning.cache_presets.PolicySize(limit, limit, interval=1))
        if policy is None
        else policy
    )
    return Variant(policy_text, 0.0, lambda _length, _interval: {"policy": policy_text, "endless": True})


# ---------------------------------------------------------------- output


def format_quality(result: benchmarks.cache_quality.QualityResult) -> list[str]:
    """Format the result: settings, and a row per cache variant."""
    kinds = result.options.tasks
    rows = [("cache", "evicted", "memory", "perplexity", "ratio", "KL", *kinds)]
    for row in result.summary:
        scores = (_number(row.memory, 2), _number(row.perplexity, 3), _number(row.perplexity_ratio, 3))
        recalls = [_number(row.recall[kind], 2) for kind in kinds]
        rows.append((row.cache, f"{row.ratio:.1%}", *scores, _number(row.kl, 2, "e"), *recalls))
    options = result.options
    question = "after eviction" if options.question_position == "after" else "before and after eviction"
    question += ", evicted once" if options.evict_after == "prompt" else ""
    lengths = ", ".join(map(str, options.lengths))
    model = f"{result.parameters:,} parameters, language {result.language}"
    texts = f"{options.num_texts} texts of {options.text_length} tokens, in chunks of {options.prefill_chunk_size}"
    legend = "evicted: fraction of a sequence's slots (quest: not read); memory: its bytes over the full cache's; "
    legend += "ratio: to the perplexity without a cache; KL in nats; then the recall, - = none"
    return [
        f"{model}; {result.machine}; commit {result.commit or 'unknown'}",
        f"tasks of {lengths} tokens, {options.samples_per_cell} per length and depth, questions {question}; {texts}",
        "",
        *format_table(rows, left=(0,)),
        "",
        legend,
    ]


def _number(value: float | None, digits: int, form: str = "f") -> str:
    return "-" if value is None else f"{value:.{digits}{form}}"


def format_streaming(result: benchmarks.streaming_perplexity.StreamingResult) -> list[str]:
    """Format the result: a row per span, and the flatness."""
    rows = [
        f"{span.start:>9,} - {span.stop:<9,}{span.perplexity:>12.3f}{span.reference:>12.3f}{span.ratio:>9.4f}"
        for span in result.spans
    ]
    return [
        f"{result.cache}: {result.tokens:,} tokens through a model of {result.limit:,}, {result.chunk} in a step",
        f"{'tokens':^21}{'perplexity':>12}{'reference':>12}{'ratio':>9}",
        *rows,
        f"flatness {result.flatness:.4f} (largest ratio over smallest); of the bare perplexities {result.raw:.4f}",
        f"on average {result.mean:.4f} times the reference, the worst span {result.worst:.4f} times",
    ]


# ---------------------------------------------------------------- figures


def _figures(result: benchmarks.cache_quality.QualityResult, out: Path) -> list[Path]:
    """Write ``cache-quality.json``, the curves of perplexity and recall, and the heat maps of needle recall."""
    from kvad import text as text_lib

    text_lib.base.write_text(out / "cache-quality.json", json_line(result) + "\n")
    return draw_figures(lambda: list(_draw_all(result, out)))


def _draw_all(result: benchmarks.cache_quality.QualityResult, out: Path) -> Iterable[Path]:
    from kvad import inspection

    for name, label, series in _curves(result):
        title = f"{name} against the fraction of the cache that is kept"
        yield from inspection.plot.draw_series(
            series, _image_paths(out, name), title=title, x_label="fraction kept", y_label=label
        )
    for kind in result.options.tasks:
        grids, across = _grids(result, kind)
        if grids:
            title = f"recall of {kind}, by depth and length"
            yield from inspection.plot.draw_grids(
                grids, _image_paths(out, kind), across=across, title=title, x_label="tokens", y_label="depth"
            )


def _image_paths(out: Path, name: str) -> list[Path]:
    return [out / f"cache-quality-{name}.png", out / f"cache-quality-{name}.svg"]


def _curves(result: benchmarks.cache_quality.QualityResult) -> list[tuple[str, str, list[inspection.plot.PlotSeries]]]:
    """Return (name, label, curves): one curve per lossy cache, each starting at the full cache."""
    from kvad import inspection

    def curves(
        value: Callable[[benchmarks.cache_quality.SummaryRow], float | None],
    ) -> list[inspection.plot.PlotSeries]:
        full = result.summary[0]
        found = []
        for cache in dict.fromkeys(row.cache for row in result.summary if row.ratio):
            rows = [row for row in (full, *result.summary) if row is full or row.cache == cache]
            points = sorted((1 - row.ratio, y) for row in rows if (y := value(row)) is not None)
            if len(points) > 1:
                found.append(
                    inspection.plot.PlotSeries(cache, [x for x, _ in points], [y for _, y in points], dots=True)
                )
        return found

    every = [("perplexity", "ratio to the perplexity without a cache", curves(lambda row: row.perplexity_ratio))]
    every += [("kl", "KL, nats per token", curves(lambda row: row.kl))]
    for kind in result.options.tasks:
        every.append((f"recall-{kind}", "recall", curves(partial(_recall, kind))))
    return [(name, label, series) for name, label, series in every if series]


def _recall(kind: str, row: benchmarks.cache_quality.SummaryRow) -> float | None:
    return row.recall[kind]


def _grids(
    result: benchmarks.cache_quality.QualityResult, kind: str
) -> tuple[list[inspection.plot.HeatMapGrid | None], int]:
    """Return a heat map per cache (depth by length), and the number of maps per row."""
    from kvad import inspection

    lines = [line for line in result.lines if line["measure"] == kind]
    lengths, depths = sorted({line["length"] for line in lines}), sorted({line["depth"] for line in lines})
    across = len({row.ratio for row in result.summary if row.ratio}) or 4
    grids: list[inspection.plot.HeatMapGrid | None] = []
    before = None
    for row in result.summary:
        recalls = {
            (line["depth"], line["length"]): line["recall"]
            for line in lines
            if (line["cache"], line["ratio"]) == (row.cache, row.ratio)
        }
        if not recalls:
            continue
        if row.ratio and row.cache != before:  # each policy starts a row
            grids += [None] * (-len(grids) % across)
        before = row.cache
        values = [[recalls.get((depth, length)) for length in lengths] for depth in depths]
        name = f"{row.cache}, {row.ratio:g} evicted" if row.ratio else row.cache
        grids.append(
            inspection.plot.HeatMapGrid(
                name, [str(length) for length in lengths], [f"{depth:g}" for depth in depths], values
            )
        )
    return grids, min(across, max(1, len(grids)))


def _write_streaming(result: benchmarks.streaming_perplexity.StreamingResult, out: Path, model: str) -> list[Path]:
    """Write ``bench-streaming.json``, ``bench-streaming.jsonl`` (a line per span) and the figure."""
    from dataclasses import asdict

    from kvad import benchmarks, inspection
    from kvad import text as text_lib

    text_lib.base.write_text(out / "bench-streaming.json", json_line(result) + "\n")
    settings = {
        "model": model,
        "limit": result.limit,
        "chunk": result.chunk,
        "machine": benchmarks.results.machine_info(),
        "commit": benchmarks.results.commit_id(),
    }
    first = {"what": "streaming", "cache": result.cache}
    lines = [{**first, **asdict(span), "ratio": span.ratio, **settings} for span in result.spans]
    text_lib.base.write_text(out / "bench-streaming.jsonl", "".join(f"{json_line(line)}\n" for line in lines))
    x = [span.stop for span in result.spans]
    series = [
        inspection.plot.PlotSeries(result.cache, x, [span.perplexity for span in result.spans], dots=True),
        inspection.plot.PlotSeries("recomputed windows", x, [span.reference for span in result.spans], dots=True),
    ]
    files = [out / "bench-streaming.png", out / "bench-streaming.svg"]
    title = f"stream through a limit of {result.limit:,}: flatness {result.flatness:.3f}"
    return draw_figures(
        lambda: inspection.plot.draw_series(
            series, files, title=title, x_label="tokens", y_label="perplexity of a span"
        )
    )
