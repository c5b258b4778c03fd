"""``kvad bench cache-quality MODEL`` and ``kvad bench endless MODEL``: what a cache that forgets costs.

Numbers go to stdout, progress and notes to stderr; ``--out`` keeps the lines as they come, and the figures.
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
MAX_LENGTH = 2048  # of the default lengths
TEXT_HELP = "A text file to read, more than one in order.  [default: held-out sources of this Python's library]"


@click.command("cache-quality")
@model_argument
@click.option(
    "--caches",
    metavar="NAME,...",
    help="As in full,int8,snapkv,snapkv+int8; full is always among them.  [default: all names that this build has]",
)
@click.option(
    "--compressor",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="Of this model's: its summaries, beside the means.",
)
@click.option("--ratios", default="0.25,0.5,0.75,0.875", show_default=True, help="Shares of the cache to drop.")
@click.option("--kinds", default="single,many,chain", show_default=True, help="Tasks: a needle, one of many, a chain.")
@click.option("--lengths", metavar="N,...", help="Tokens of a task.  [default: 1/8 to all of the limit, 2048 at most]")
@click.option("--depths", default="0,0.25,0.5,0.75,1", show_default=True, help="Where the needle stands.")
@click.option("--tasks", type=int, default=8, show_default=True, help="Of each length and depth.")
@click.option("--texts", type=int, default=8, show_default=True, help="Rows of text for the perplexity; 0: none.")
@click.option("--text-length", type=int, help="Tokens of such a row.  [default: the longest of the lengths]")
@click.option("--text", "files", multiple=True, metavar="FILE", type=click.Path(path_type=Path), help=TEXT_HELP)
@click.option("--language", type=click.Choice(["auto", "lookup", "english"]), default="auto", show_default=True)
@click.option(
    "--asked",
    type=click.Choice(["after", "before"]),
    default="after",
    show_default=True,
    help="Only after the cache was cut, or in the prompt too.",
)
@click.option("--chunk", type=int, default=16, show_default=True, help="Tokens of a row in one step.")
@click.option(
    "--cut",
    type=click.Choice(["often", "once"]),
    default="often",
    show_default=True,
    help="Of tasks, by policies that rank: after every chunk, or behind the prompt.",
)
@click.option("--rows", type=int, default=8, show_default=True, help="Tasks at a time.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the tasks.")
@click.option(
    "--out",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="A folder for lines and figures; found there, gone on from.",
)
@click.option("--overwrite", is_flag=True, help="Let what --out holds give way.")
@json_option
def cache_quality_command(
    model: Path,
    caches: str | None,
    compressor: Path | None,
    ratios: str,
    kinds: str,
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
    """What is lost with a part of the cache: perplexity, KL, needles, chains of variables.

    The model without a cache is the judge. Where the full cache itself does not find what was hidden, the bench says so
    and nothing else: train a model that looks keys up with runs/lookup-cpu.toml, or ask a larger one.

    \b
    kvad bench cache-quality runs/lookup-cpu --out runs/quality
    kvad bench cache-quality runs/lookup-cpu --caches window,snapkv,random --ratios 0.5,0.875 --asked before
    kvad bench cache-quality runs/lookup-cpu --caches snapkv,snapkv+int8,hierarchy+int4
    kvad bench cache-quality MODEL --language english --lengths 512,1024 --kinds single --json
    """
    from kvad import benchmarks
    from kvad.benchmarks import bench_quality, select_variants
    from kvad.llm import LLM

    learned = None if compressor is None else _compressor(compressor, model)
    names = (
        [*benchmarks.variants.known_variants(), *([benchmarks.variants.LEARNED] if learned else [])]
        if caches is None
        else caches.split(",")
    )
    variants = select_variants(names, _numbers("--ratios", ratios, float), learned)
    with LLM.load(model, rows=1) as llm:
        _needs_decoder(llm, "cache-quality")
        limit = llm.model.config.max_seq_len
        wanted = _default_lengths(limit) if lengths is None else _numbers("--lengths", lengths, int)
        row = text_length or max(wanted)
        options = _options(kinds, wanted, _numbers("--depths", depths, float), row, counts)
        spoken = _language(language, llm, files)
        opening = _opening(llm.tokenizer)
        texts = _rows(spoken, files, opening, options.num_texts, row)
        result = bench_quality(
            llm, variants, spoken, texts, options, model=str(model), out=out, overwrite=overwrite, progress=_progress
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
@click.option("--cache", default="sinks", show_default=True, help="With as many tokens as the model's limit.")
@click.option("--policy", help="The cache's policy in full, as in 'sinks(4,252)'.  [default: --cache, at the limit]")
@click.option("--tokens", type=int, default=100_000, show_default=True, help="Of the stream.")
@click.option("--span", type=int, default=10_000, show_default=True, help="Tokens of which one perplexity is made.")
@click.option("--chunk", type=int, default=16, show_default=True, help="Tokens in one step.")
@click.option("--text", "files", multiple=True, metavar="FILE", type=click.Path(path_type=Path), help=TEXT_HELP)
@click.option("--out", metavar="FOLDER", type=click.Path(path_type=Path), help="A folder for the result and a figure.")
@json_option
def streaming_command(
    model: Path,
    cache: str,
    policy: str | None,
    tokens: int,
    span: int,
    chunk: int,
    files: tuple[Path, ...],
    out: Path | None,
    as_json: bool,
) -> None:
    """Perplexity along one endless text, span by span, beside windows that are computed anew.

    Flatness is the worst span over the best, each divided by what the same tokens cost without a cache: 1 is flat.

    \b
    kvad bench endless runs/endless-rope --tokens 100000
    kvad bench endless runs/endless-alibi --policy "sinks(4,252)" --out runs/endless-alibi/bench
    """
    from kvad.benchmarks import bench_streaming
    from kvad.llm import LLM

    with LLM.load(model, rows=1) as llm:
        _needs_decoder(llm, "endless")
        variant = _endless_variant(cache, policy, llm.model.config.max_seq_len)
        ids = _stream(llm, files, tokens)
        result = bench_streaming(llm, variant, ids, span=span, chunk=chunk, progress=_progress)
    _clear()
    for path in [] if out is None else _keep_endless(result, out, str(model)):
        click.echo(f"kvad: figure: {path}", err=True)
    if as_json:
        emit_json(result)
    else:
        click.echo("\n".join(format_streaming(result)))


# ---------------------------------------------------------------- what was asked for


def _compressor(path: Path, model: Path) -> Summarizer:
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


def _needs_decoder(llm: LLM, what: str) -> None:
    if llm.model.config.kind != "decoder":
        raise UsageError(f"kvad bench {what} judges a decoder's cache, this is an {llm.model.config.kind}")
    if llm.tokenizer is None:
        raise UsageError("this model came without a tokenizer, and the bench asks in words")


def _default_lengths(limit: int) -> tuple[int, ...]:
    longest = min(limit, MAX_LENGTH)
    return tuple(dict.fromkeys(max(1, longest // part) for part in (8, 4, 2, 1)))


def _options(
    kinds: str, lengths: tuple[int, ...], depths: tuple[float, ...], row: int, counts: dict[str, Any]
) -> benchmarks.cache_quality.QualityOptions:
    from kvad import benchmarks

    asked: Any = tuple(kinds.split(",")) if kinds else ()
    return benchmarks.cache_quality.QualityOptions(
        tasks=asked, lengths=lengths, depths=depths, text_length=row, **counts
    )


def _language(name: str, llm: LLM, files: Sequence[Path]) -> benchmarks.needle_tasks.HaystackLanguage:
    from kvad import benchmarks

    assert llm.tokenizer is not None
    return benchmarks.needle_tasks.choose_language(name, llm.tokenizer, lambda: _read(files), _opening(llm.tokenizer))


def _opening(tokenizer: Tokenizer | None) -> list[int]:
    """The token with which every text of this model began when it was trained, if there is one."""
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
    """What perplexity is measured on: the files, or held-out text in the model's own language."""
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
    held = [
        path for path in sources.files if datasets.stdlib_sources.is_held_out(path.relative_to(sources.root).as_posix())
    ]
    return [sources_lib.documents.read_document(path, "replace") for path in held]


def _stream(llm: LLM, files: Sequence[Path], num_tokens: int) -> list[int]:
    """So many tokens of the files, or of held-out text, as one document."""
    assert llm.tokenizer is not None
    if num_tokens < 2:
        raise UsageError(f"--tokens {num_tokens}: a stream has two at least")
    ids, opening = list[int](), _opening(llm.tokenizer)
    for text in _read(files):
        if len(ids) < num_tokens:
            ids += llm.tokenizer.encode(text.rstrip() + "\n")
    if len(ids) + len(opening) < num_tokens:
        raise UsageError(
            f"--tokens {num_tokens:,}: the text has {len(ids):,} tokens", "name more with --text, or ask for fewer"
        )
    return [*opening, *ids][:num_tokens]


def _endless_variant(cache: str, policy: str | None, limit: int) -> Variant:
    """A cache of as many tokens as the model's limit, by name or by its policy in full; what keeps everything ends
    there."""
    from kvad import benchmarks, planning
    from kvad.benchmarks import Variant

    if policy is None and cache not in planning.cache_presets.POLICY_BUILDERS:
        return Variant(cache, 0.0, benchmarks.variants.variant_fields(cache))
    said = (
        planning.cache_presets.POLICY_BUILDERS[cache](planning.cache_presets.PolicySize(limit, limit, interval=1))
        if policy is None
        else policy
    )
    return Variant(said, 0.0, lambda _length, _every: {"policy": said, "endless": True})


# ---------------------------------------------------------------- what is said


def _progress(what: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        click.echo(f"\r{what:<40} {done:>7,} of {total:,} ", err=True, nl=False)


def _clear() -> None:
    if sys.stderr.isatty():
        click.echo(f"\r{'':<64}\r", err=True, nl=False)


def format_quality(result: benchmarks.cache_quality.QualityResult) -> list[str]:
    """The result as text: what it ran on, and a row per cache."""
    kinds = list(result.options.tasks)
    wide = max(16, *(len(row.cache) + 1 for row in result.summary))
    head = f"{'cache':<{wide}}{'dropped':>8}{'memory':>8}{'perplexity':>12}{'times':>8}{'KL':>10}" + "".join(
        f"{kind:>8}" for kind in kinds
    )
    rows = [
        f"{row.cache:<{wide}}{row.ratio:>8.1%}{_number(row.memory, 8, 2)}{_number(row.perplexity, 12, 3)}"
        f"{_number(row.perplexity_ratio, 8, 3)}"
        f"{_number(row.kl, 10, 2, 'e')}" + "".join(_number(row.recall[kind], 8, 2) for kind in kinds)
        for row in result.summary
    ]
    options = result.options
    asked = "after the cut" if options.question_position == "after" else "before the cut and after it"
    asked += ", cut once" if options.evict_after == "once" else ""
    lengths = ", ".join(map(str, options.lengths))
    model = f"{result.parameters:,} parameters, language {result.language}"
    texts = f"{options.num_texts} texts of {options.text_length} tokens, in chunks of {options.prefill_chunk_size}"
    legend = "dropped: share of a row's slots (of quest's: not read); memory: a row's bytes over the full cache's; "
    legend += "times: the perplexity without a cache; KL in nats; then the recall, - = none"
    return [
        f"{model}; {result.machine}; commit {result.commit or 'unknown'}",
        f"tasks of {lengths} tokens, {options.samples_per_cell} per length and depth, asked {asked}; {texts}",
        "",
        head,
        *rows,
        "",
        legend,
    ]


def _number(value: float | None, width: int, digits: int, form: str = "f") -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.{digits}{form}}"


def format_streaming(result: benchmarks.streaming_perplexity.StreamingResult) -> list[str]:
    """The result as text: a row per span, and how flat they are."""
    rows = [
        f"{one.start:>9,} - {one.stop:<9,}{one.perplexity:>12.3f}{one.reference:>12.3f}{one.ratio:>9.4f}"
        for one in result.spans
    ]
    return [
        f"{result.cache}: {result.tokens:,} tokens through a model of {result.limit:,}, {result.chunk} in a step",
        f"{'tokens':^21}{'perplexity':>12}{'reference':>12}{'ratio':>9}",
        *rows,
        f"flatness {result.flatness:.4f} (largest ratio over smallest); of the bare perplexities {result.raw:.4f}",
        f"in all {result.mean:.4f} times the reference, the worst span {result.worst:.4f} times",
    ]


# ---------------------------------------------------------------- figures


def _figures(result: benchmarks.cache_quality.QualityResult, out: Path) -> list[Path]:
    """``cache-quality.json`` beside the lines; perplexity and recall against the budget, and the needle's heat maps."""
    from kvad import inspection
    from kvad import text as text_lib

    text_lib.base.write_text(out / "cache-quality.json", json_line(result) + "\n")
    found = list[Path]()
    try:
        for name, label, series in _curves(result):
            title = f"{name} against the share of the cache that is kept"
            found += inspection.plot.draw_series(
                series, _pair(out, name), title=title, x_label="share kept", y_label=label
            )
        for kind in result.options.tasks:
            grids, across = _grids(result, kind)
            if grids:
                title = f"recall of {kind}, by depth and length"
                found += inspection.plot.draw_grids(
                    grids, _pair(out, kind), across=across, title=title, x_label="tokens", y_label="depth"
                )
    except ModuleNotFoundError:
        click.echo("kvad: no figures: matplotlib is not installed (pip install 'kvad[plot]')", err=True)
    return found


def _pair(out: Path, name: str) -> list[Path]:
    return [out / f"cache-quality-{name}.png", out / f"cache-quality-{name}.svg"]


def _curves(result: benchmarks.cache_quality.QualityResult) -> list[tuple[str, str, list[inspection.plot.PlotSeries]]]:
    """(name, label, curves): one curve per cache that drops, each from the full cache's own point."""
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

    every = [("perplexity", "times the perplexity without a cache", curves(lambda row: row.perplexity_ratio))]
    every += [("kl", "KL, nats per token", curves(lambda row: row.kl))]
    for kind in result.options.tasks:
        every.append((f"recall-{kind}", "recall", curves(partial(_recall, kind))))
    return [(name, label, series) for name, label, series in every if series]


def _recall(kind: str, row: benchmarks.cache_quality.SummaryRow) -> float | None:
    return row.recall[kind]


def _grids(
    result: benchmarks.cache_quality.QualityResult, kind: str
) -> tuple[list[inspection.plot.HeatMapGrid | None], int]:
    """A heat map per cache, depth down and length across; (maps, how many in a row: a policy's ratios)."""
    from kvad import inspection

    lines = [line for line in result.lines if line["measure"] == kind]
    lengths, depths = sorted({line["length"] for line in lines}), sorted({line["depth"] for line in lines})
    across = len({row.ratio for row in result.summary if row.ratio}) or 4
    grids: list[inspection.plot.HeatMapGrid | None] = []
    before = None
    for row in result.summary:
        mine = {
            (line["depth"], line["length"]): line["recall"]
            for line in lines
            if (line["cache"], line["ratio"]) == (row.cache, row.ratio)
        }
        if not mine:
            continue
        if row.ratio and row.cache != before:  # each policy has a row of its own
            grids += [None] * (-len(grids) % across)
        before = row.cache
        values = [[mine.get((depth, length)) for length in lengths] for depth in depths]
        name = f"{row.cache}, {row.ratio:g} dropped" if row.ratio else row.cache
        grids.append(
            inspection.plot.HeatMapGrid(
                name, [str(length) for length in lengths], [f"{depth:g}" for depth in depths], values
            )
        )
    return grids, min(across, max(1, len(grids)))


def _keep_endless(result: benchmarks.streaming_perplexity.StreamingResult, out: Path, model: str) -> list[Path]:
    """``bench-endless.json``, ``bench-endless.jsonl`` (a line per span) and the figure."""
    from dataclasses import asdict

    from kvad import benchmarks, inspection
    from kvad import text as text_lib

    text_lib.base.write_text(out / "bench-endless.json", json_line(result) + "\n")
    ran = {
        "model": model,
        "limit": result.limit,
        "chunk": result.chunk,
        "machine": benchmarks.cache_speed.machine_info(),
        "commit": benchmarks.cache_speed.commit_id(),
    }
    first = {"what": "endless", "cache": result.cache}
    lines = [{**first, **asdict(one), "ratio": one.ratio, **ran} for one in result.spans]
    text_lib.base.write_text(out / "bench-endless.jsonl", "".join(f"{json_line(line)}\n" for line in lines))
    x = [one.stop for one in result.spans]
    series = [
        inspection.plot.PlotSeries(result.cache, x, [one.perplexity for one in result.spans], dots=True),
        inspection.plot.PlotSeries("windows computed anew", x, [one.reference for one in result.spans], dots=True),
    ]
    files = [out / "bench-endless.png", out / "bench-endless.svg"]
    title = f"one stream through a limit of {result.limit:,}: flatness {result.flatness:.3f}"
    try:
        return inspection.plot.draw_series(series, files, title=title, x_label="tokens", y_label="perplexity of a span")
    except ModuleNotFoundError:
        click.echo("kvad: no figure: matplotlib is not installed (pip install 'kvad[plot]')", err=True)
        return []
