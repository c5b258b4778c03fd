"""``kvad bench cache-quality MODEL`` and ``kvad bench streaming MODEL``: the loss of lossy caches.

Numbers go to stdout, progress and notes to stderr; ``--out`` appends JSON lines during the run and writes figures.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvad.cli.options import emit_json, json_line, json_option, model_argument
from kvad.errors import UsageError

if TYPE_CHECKING:
    from kvad import benchmarks, inspection
    from kvad.benchmarks import Variant
    from kvad.llm import LLM
    from kvad.model import Summarizer
    from kvad.text import Tokenizer

T = TypeVar("T")
MAX_LENGTH = 2048  # limit of the default lengths
TEXT_HELP = "Text file to read. Repeatable [default: held-out sources of this Python's library]."


@click.command("cache-quality")
@model_argument
@click.option(
    "--variants",
    metavar="NAME,...",
    help="Cache variants, such as int8,snapkv,snapkv+int8; full is always included [default: all].",
)
@click.option(
    "--summarizer",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="Also measure the summaries of this summarizer.",
)
@click.option(
    "--compression-ratios", default="0.25,0.5,0.75,0.875", show_default=True, help="Fractions of the cache to evict."
)
@click.option(
    "--tasks", default="single,many,chain", show_default=True, help="Needle tasks: one needle, one of many, a chain."
)
@click.option("--lengths", metavar="N,...", help="Tokens of a task [default: 1/8 to 1 of the limit, at most 2048].")
@click.option("--depths", default="0,0.25,0.5,0.75,1", show_default=True, help="Relative positions of the needle.")
@click.option(
    "--samples-per-cell", type=int, default=8, show_default=True, help="Number of tasks per length and depth."
)
@click.option(
    "--num-texts", type=int, default=8, show_default=True, help="Number of texts for the perplexity; 0 is nspan."
)
@click.option("--text-length", type=int, help="Tokens of such a text [default: the longest of --lengths].")
@click.option("--text", "files", multiple=True, metavar="FILE", type=click.Path(path_type=Path), help=TEXT_HELP)
@click.option(
    "--language",
    type=click.Choice(["auto", "lookup", "english"]),
    default="auto",
    show_default=True,
    help="Language of the tasks.",
)
@click.option(
    "--question-position",
    type=click.Choice(["after", "before"]),
    default="after",
    show_default=True,
    help="Ask the question only after eviction, or also in the prompt.",
)
@click.option("--prefill-chunk-size", type=int, default=16, show_default=True, help="Tokens of a sequence per step.")
@click.option(
    "--evict-after",
    type=click.Choice(["chunk", "prompt"]),
    default="chunk",
    show_default=True,
    help="When ranking policies evict: after every chunk, or once after the prompt.",
)
@click.option("--max-num-seqs", type=int, default=8, show_default=True, help="Maximum number of sequences.")
@click.option("-s", "--seed", type=int, default=0, show_default=True, help="Seed of the tasks.")
@click.option(
    "-o",
    "--out",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="Folder for lines and figures; a previous run in it is continued [default: not written].",
)
@click.option("--overwrite", is_flag=True, help="Replace the contents of --out.")
@json_option
def cache_quality_command(
    model: Path,
    variants: str | None,
    summarizer: Path | None,
    compression_ratios: str,
    tasks: str,
    lengths: str | None,
    depths: str,
    files: tuple[Path, ...],
    language: str,
    text_length: int | None,
    out: Path | None,
    overwrite: bool,
    as_json: bool,
    **counts: Any,
) -> None:
    """Measure the loss of lossy caches: perplexity, KL, needle recall, chains of variables.

    \b
    kvad bench cache-quality MODEL --variants snapkv,tiered+int4 --language english --out runs/quality
    """
    from kvad import benchmarks
    from kvad.benchmarks import bench_quality, select_variants
    from kvad.llm import LLM

    loaded_summarizer = None if summarizer is None else _load_summarizer(summarizer, model)
    learned = [benchmarks.variants.LEARNED] if loaded_summarizer else []
    names = [*benchmarks.variants.known_variants(), *learned] if variants is None else variants.split(",")
    selected = select_variants(names, _numbers("--compression-ratios", compression_ratios, float), loaded_summarizer)
    with LLM.load(model, max_num_seqs=1) as llm:
        _require_decoder(llm, "cache-quality")
        limit = llm.model.config.max_seq_len
        task_lengths = _default_lengths(limit) if lengths is None else _numbers("--lengths", lengths, int)
        max_length = text_length or max(task_lengths)
        options = _options(tasks, task_lengths, _numbers("--depths", depths, float), max_length, counts)
        haystack_language = _language(language, llm, files)
        opening = _opening(llm.tokenizer)
        texts = _rows(haystack_language, files, opening, options.num_texts, max_length)
        result = bench_quality(
            llm,
            selected,
            haystack_language,
            texts,
            options,
            model=str(model),
            out=out,
            overwrite=overwrite,
            progress=_progress,
        )
    _clear()
    for path in [] if out is None else _figures(result, out):
        click.echo(f"kvad: figure: {path}", err=True)
    for note in result.notes:
        click.echo(f"kvad: {note}", err=True)
    if as_json:
        emit_json(result)
    else:
        click.echo("\n".join(format_quality(result)))


@click.command()
@model_argument
@click.option(
    "--variant", default="sinks", show_default=True, help="Cache variant, with as many tokens as the model's limit."
)
@click.option("--policy", help="Cache policy with arguments, such as 'sinks(4,252)' [default: that of --variant].")
@click.option("--num-tokens", type=int, default=100_000, show_default=True, help="Number of tokens to stream.")
@click.option("--span-length", type=int, default=10_000, show_default=True, help="Tokens per reported perplexity.")
@click.option("--prefill-chunk-size", type=int, default=16, show_default=True, help="Tokens per step.")
@click.option("--text", "files", multiple=True, metavar="FILE", type=click.Path(path_type=Path), help=TEXT_HELP)
@click.option(
    "-o",
    "--out",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="Folder for the result and a figure [default: not written].",
)
@json_option
def streaming_command(
    model: Path,
    variant: str,
    policy: str | None,
    num_tokens: int,
    span_length: int,
    prefill_chunk_size: int,
    files: tuple[Path, ...],
    out: Path | None,
    as_json: bool,
) -> None:
    """Measure the perplexity along one long text, span by span, next to recomputed windows.

    Flatness is the worst span over the best, each divided by the perplexity without a cache: 1 is flat.

    \b
    kvad bench streaming runs/endless-rope --num-tokens 100000
    kvad bench streaming runs/endless-alibi --policy "sinks(4,252)" --out runs/endless-alibi/bench
    """
    from kvad.benchmarks import bench_streaming
    from kvad.llm import LLM

    with LLM.load(model, max_num_seqs=1) as llm:
        _require_decoder(llm, "streaming")
        selected = _streaming_variant(variant, policy, llm.model.config.max_seq_len)
        ids = _stream(llm, files, num_tokens)
        result = bench_streaming(llm, selected, ids, span=span_length, chunk=prefill_chunk_size, progress=_progress)
    _clear()
    for path in [] if out is None else _write_streaming(result, out, str(model)):
        click.echo(f"kvad: figure: {path}", err=True)
    if as_json:
        emit_json(result)
    else:
        click.echo("\n".join(format_streaming(result)))


# ---------------------------------------------------------------- options


def _load_summarizer(path: Path, model: Path) -> Summarizer:
    from kvad import checkpoint
    from kvad.checkpoint import open_checkpoint

    return checkpoint.summarizer.load_summarizer(path, open_checkpoint(model))


def _numbers(option: str, text: str, kind: Callable[[str], T]) -> tuple[T, ...]:
    try:
        return tuple(kind(number) for number in text.split(","))
    except ValueError:
        raise UsageError(
            f"{option}: {text!r} is not a list of numbers", "write them like 0.25,0.5 or 128,256"
        ) from None


def _require_decoder(llm: LLM, name: str) -> None:
    if llm.model.config.kind != "decoder":
        raise UsageError(f"kvad bench {name} needs a decoder, got an {llm.model.config.kind}")
    if llm.tokenizer is None:
        raise UsageError("the model has no tokenizer, which the benchmark needs")


def _default_lengths(limit: int) -> tuple[int, ...]:
    longest = min(limit, MAX_LENGTH)
    return tuple(dict.fromkeys(max(1, longest // part) for part in (8, 4, 2, 1)))


def _options(
    kinds: str, lengths: tuple[int, ...], depths: tuple[float, ...], row: int, counts: dict[str, Any]
) -> benchmarks.cache_quality.QualityOptions:
    from kvad import benchmarks

    tasks: Any = tuple(kinds.split(",")) if kinds else ()
    return benchmarks.cache_quality.QualityOptions(
        tasks=tasks, lengths=lengths, depths=depths, text_length=row, **counts
    )


def _language(name: str, llm: LLM, files: Sequence[Path]) -> benchmarks.needle_tasks.HaystackLanguage:
    from kvad import benchmarks

    assert llm.tokenizer is not None
    return benchmarks.needle_tasks.choose_language(name, llm.tokenizer, lambda: _read(files), _opening(llm.tokenizer))


def _opening(tokenizer: Tokenizer | None) -> list[int]:
    """Return the token that opens every training text of this model, if any."""
    assert tokenizer is not None
    specials = tokenizer.special_tokens
    first = specials.separator if specials.separator is not None else specials.bos
    return [] if first is None else [first]


def _rows(
    language: benchmarks.needle_tasks.HaystackLanguage,
    files: Sequence[Path],
    opening: Sequence[int],
    count: int,
    length: int,
) -> list[list[int]]:
    """Read the texts for the perplexity: the files, or held-out text in the language of the model."""
    from kvad import benchmarks, datasets

    if files or language.name != "lookup":
        return benchmarks.cache_quality.text_rows(language, _read(files), opening, count, length)
    texts = [
        datasets.synthetic.episode(length - len(opening), datasets.synthetic.HELD_OUT_SEED + number)
        for number in range(count)
    ]
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


def _progress(label: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        click.echo(f"\r{label:<40} {done:>7,} of {total:,} ", err=True, nl=False)


def _clear() -> None:
    if sys.stderr.isatty():
        click.echo(f"\r{'':<64}\r", err=True, nl=False)


def format_quality(result: benchmarks.cache_quality.QualityResult) -> list[str]:
    """Format the result: settings, and a row per cache variant."""
    kinds = list(result.options.tasks)
    wide = max(16, *(len(row.cache) + 1 for row in result.summary))
    head = f"{'cache':<{wide}}{'evicted':>8}{'memory':>8}{'perplexity':>12}{'ratio':>8}{'KL':>10}" + "".join(
        f"{kind:>8}" for kind in kinds
    )
    rows = [
        f"{row.cache:<{wide}}{row.ratio:>8.1%}{_number(row.memory, 8, 2)}{_number(row.perplexity, 12, 3)}"
        f"{_number(row.perplexity_ratio, 8, 3)}"
        f"{_number(row.kl, 10, 2, 'e')}" + "".join(_number(row.recall[kind], 8, 2) for kind in kinds)
        for row in result.summary
    ]
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
        head,
        *rows,
        "",
        legend,
    ]


def _number(value: float | None, width: int, digits: int, form: str = "f") -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.{digits}{form}}"


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
    from kvad import inspection
    from kvad import text as text_lib

    text_lib.base.write_text(out / "cache-quality.json", json_line(result) + "\n")
    files = list[Path]()
    try:
        for name, label, series in _curves(result):
            title = f"{name} against the fraction of the cache that is kept"
            files += inspection.plot.draw_series(
                series, _pair(out, name), title=title, x_label="fraction kept", y_label=label
            )
        for kind in result.options.tasks:
            grids, across = _grids(result, kind)
            if grids:
                title = f"recall of {kind}, by depth and length"
                files += inspection.plot.draw_grids(
                    grids, _pair(out, kind), across=across, title=title, x_label="tokens", y_label="depth"
                )
    except ModuleNotFoundError:
        click.echo("kvad: no figures: matplotlib is not installed (pip install 'kvad[plot]')", err=True)
    return files


def _pair(out: Path, name: str) -> list[Path]:
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
        "machine": benchmarks.cache_speed.machine_info(),
        "commit": benchmarks.cache_speed.commit_id(),
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
    try:
        return inspection.plot.draw_series(series, files, title=title, x_label="tokens", y_label="perplexity of a span")
    except ModuleNotFoundError:
        click.echo("kvad: no figure: matplotlib is not installed (pip install 'kvad[plot]')", err=True)
        return []
