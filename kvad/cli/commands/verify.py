"""``kvad verify MODEL``: every memory against the model without one; exit code 1 when one is broken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvad import cache, verify
from kvad.cli.options import console, emit_json, json_option, model_argument
from kvad.errors import RequestError, UsageError, format_count, suggest

if TYPE_CHECKING:
    from kvad import benchmarks
    from kvad.config import ModelConfig
    from kvad.text import Tokenizer
    from kvad.verify import ScenarioOptions

LAYOUTS = ("paged", "contiguous")
DTYPES = ("float32", "bfloat16", "float16", "float64")  # verified unless others are asked for
MAX_ROWS = 64  # by then a row of prompts_of has a single token
FAULT_NAMES = tuple(name for name in verify.report.FAULTS if name != verify.report.UNKNOWN_FAULT)
ROUND_TRIP_NAMES = ("park", "park-disk", "ram", "disk", "session", "spill", "spill-disk")  # lab/through.py's
ROUND_TRIP_COLUMNS = ("memory", "through", "max |dlogit|", "moved", "verdict")
LOSS_COLUMNS = ("lost by", "KL mean", "KL max", "greedy", "perplexity", "the judge's", "times", "recall")
HEADINGS = ("memory", "max |dlogit|", "tolerance", "float64 twin", "KL mean", "KL max", "greedy", "verdict")


def _names(_ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    """The names of a list with commas between, each once; UsageError offers the nearest for an unknown one."""
    known = LAYOUTS if param.name == "layouts" else tuple(cache.quantization.FORMATS)
    names = tuple(dict.fromkeys(name.strip() for name in value.split(",")))
    for name in (
        part
        for said in names
        for part in (cache.quantization.split_format_name(said) if param.name == "dtypes" else (said,))
    ):
        if ":" in name and param.name == "dtypes":
            cache.quantization.get_format(name, "--dtype")
        elif name not in known:
            raise click.BadParameter(f"{name!r} is not known; {suggest(name, known)}", param=param)
    return names


def _round_trips(_ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    """The names of a list with commas between, or all."""
    if value is None:
        return ()
    names = tuple(dict.fromkeys(name.strip() for name in value.split(",")))
    for name in names:
        if name not in (*ROUND_TRIP_NAMES, "all"):
            raise click.BadParameter(f"{name!r} is not known; {suggest(name, ROUND_TRIP_NAMES)}", param=param)
    return ROUND_TRIP_NAMES if "all" in names else names


@click.command()
@model_argument
@click.option("--layout", "layouts", callback=_names, default=",".join(LAYOUTS), show_default=True)
@click.option(
    "--dtype",
    "dtypes",
    callback=_names,
    default=",".join(DTYPES),
    show_default=True,
    help="What to store; fp8-e4m3, fp8-e5m2, int8, int4 too; int8/int4: keys/values; package.module:Class.",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME",
    help="What stays of a row, again for more: sinks(4,60), snapkv (sized for the prompts), or all.  [default: full]",
)
@click.option(
    "--rotate", type=click.Choice(["write", "read", "both"]), default="write", show_default=True, help="RoPE's keys."
)
@click.option("--endless", is_flag=True, help="Let rows pass the model's limit, under policies that allow it.")
@click.option("--rows", type=int, help="Ragged rows, beside a forked and a prefix-sharing one.  [default: 5]")
@click.option("--chunk", type=int, default=32, show_default=True, help="Tokens of a prompt in one step, at most.")
@click.option("--block-size", type=int, help="Slots of a block (paged).  [default: 16, or what fits]")
@click.option("--tokens", type=int, help="Tokens generated after every prompt.  [default: 32, or what fits]")
@click.option("--preempt/--no-preempt", default=True, show_default=True, help="Preempt rows and compute them again.")
@click.option("--prefix-hit/--no-prefix-hit", default=True, show_default=True, help="Let a row share another's prefix.")
@click.option(
    "--through",
    callback=_round_trips,
    metavar="WAYS",
    help="Send rows out of the cache and back, too: park, park-disk, ram, disk, session, spill, spill-disk, or all.",
)
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="A row's prompt; again for more rows.")
@click.option("--break", "fault", metavar="FAULT", help=f"Verify a broken memory: {', '.join(FAULT_NAMES)}.")
@json_option
@click.pass_context
def verify_command(
    ctx: click.Context,
    model: Path,
    layouts: tuple[str, ...],
    dtypes: tuple[str, ...],
    policies: tuple[str, ...],
    rotate: str,
    endless: bool,
    rows: int | None,
    chunk: int,
    block_size: int | None,
    tokens: int | None,
    preempt: bool,
    prefix_hit: bool,
    through: tuple[str, ...],
    prompts: tuple[str, ...],
    fault: str | None,
    as_json: bool,
) -> None:
    """Prove that the cache changes nothing.

    The same rows run through the model without a cache and through every memory: ragged, in chunks, preempted,
    resumed, forked, on a shared prefix.  Exit code 1 when a memory is broken; then the first difference is named,
    and what usually causes it.  A policy that goes by position is exact beside the model that sees as little; one that
    ranks or summarises must make each row a function of itself; what either loses is a number, and no failure.
    With --through, rows are parked, restored from sessions, found in tiers or spilled, and must say the same.  The
    checkpoint's files must be those that were saved: every sha256 is compared first.

    \b
    kvad verify runs/demo
    kvad verify runs/demo --dtype float32,int8,int8/int4
    kvad verify runs/demo --break mask
    kvad verify runs/demo --policy "sinks(4,60)" --policy snapkv --dtype float32,int8
    kvad verify runs/demo --policy all --rotate both
    kvad verify runs/demo --through all --dtype float32,int8
    kvad verify runs/demo --layout paged --dtype int8 --through session,disk --policy sinks
    """
    if fault is not None and fault not in FAULT_NAMES:
        raise UsageError(f"--break: no fault is called {fault!r}", suggest(fault, FAULT_NAMES))
    if prompts and rows is not None and rows != len(prompts):
        raise UsageError(f"--rows {rows}, but {len(prompts)} prompts", "leave --rows out: every --prompt is a row")
    _check_positive({"--rows": rows, "--chunk": chunk, "--block-size": block_size, "--tokens": tokens})
    try:
        from kvad import checkpoint as checkpoint_lib
        from kvad.verify import ScenarioOptions, default_sizes, parse_policies
        from kvad.verify import verify as hold_against_the_judge

        loaded, checkpoint = checkpoint_lib.loader.load_model(model, verify="tensors")
        tokens, block_size = default_sizes(loaded.config, tokens, block_size)
        options = ScenarioOptions(
            layouts, dtypes, rows or len(prompts) or 5, chunk, block_size, tokens, preempt, prefix_hit
        )
        options = replace(options, rotates=("write", "read") if rotate == "both" else (rotate,), endless=endless)
        options = replace(options, round_trips=through)
        ids = _prompts(loaded.config, options, checkpoint.tokenizer, prompts)
        longest = max(map(len, ids)) + options.tokens
        options = replace(options, policies=parse_policies(policies, longest, options.block_size))
        _check_room(loaded.config, options, ids)
        with console().status("verifying") as status:
            report = hold_against_the_judge(
                loaded,
                ids,
                options,
                fault=fault,
                language=_language(checkpoint.tokenizer),
                progress=lambda what: status.update(f"verifying: {what}"),
            )
    except KeyboardInterrupt:
        click.echo("kvad: interrupted before every memory was verified: nothing was decided", err=True)
        ctx.exit(130)
    if as_json:
        emit_json({"model": str(model), **report.to_dict()})
    else:
        _print(report)
    if report.broken:
        ctx.exit(1)


def _check_positive(values: dict[str, int | None]) -> None:
    for name, value in values.items():
        if value is not None and value < 1:
            raise UsageError(f"{name}: must be at least 1, found {value}")


def _prompts(
    config: ModelConfig, options: ScenarioOptions, tokenizer: Tokenizer | None, texts: tuple[str, ...]
) -> list[list[int]]:
    """The rows' prompts; MemoryPlanError, before any is made, when so many rows would not fit."""
    from kvad.verify import build_prompts

    if not texts:
        prompts = build_prompts(config, replace(options, num_seqs=min(options.num_seqs, MAX_ROWS)), tokenizer)
    elif tokenizer is None:
        raise RequestError("this model came without a tokenizer", "leave --prompt out: random tokens will do")
    else:
        prompts = [tokenizer.encode(text) for text in texts]
    _check_room(config, options, prompts)
    return prompts if len(prompts) == options.num_seqs else build_prompts(config, options, tokenizer)


def _check_room(config: ModelConfig, options: ScenarioOptions, prompts: Sequence[Sequence[int]]) -> None:
    from kvad.cache.sizing import available_bytes
    from kvad.verify import require_verify_memory

    require_verify_memory(config, [len(prompt) for prompt in prompts], options, available_bytes())


def _language(tokenizer: Tokenizer | None) -> benchmarks.needle_tasks.HaystackLanguage | None:
    """What needles are hidden in: the lookup language where the tokenizer is its own, else known text."""
    from kvad import benchmarks, verify

    if tokenizer is None:
        return None
    first = (
        tokenizer.special_tokens.separator
        if tokenizer.special_tokens.separator is not None
        else tokenizer.special_tokens.bos
    )
    return benchmarks.needle_tasks.choose_language(
        "auto", tokenizer, lambda: [verify.scenario.TEXT], [] if first is None else [first]
    )


# ---------------------------------------------------------------- the page


def _print(report: verify.report.VerifyReport) -> None:
    tokens = ", ".join(map(str, report.rows)) + (" token" if report.rows == (1,) else " tokens")
    click.echo(f"judge      the model without a cache: {format_count(len(report.rows), 'row')} of {tokens}, ", nl=False)
    click.echo(f"largest |logit| {report.logit_scale:.3g}")
    for number, rule in enumerate(report.rules):
        click.echo(f"{'rules' if number == 0 else '':11}{rule}")
    if report.injected is not None:
        click.echo(f"injected   {report.injected}: {verify.report.FAULTS[report.injected].what}")
    for layout in dict.fromkeys(memory.layout for memory in report.cases):
        happened = next(memory.scenario_counts for memory in report.cases if memory.layout == layout)
        click.echo(f"{layout:11}{_format_counts(happened)}")
    for note in report.notes:
        click.echo(f"note       {note}")
    _print_skipped(report)
    click.echo()
    _print_table([HEADINGS, *map(_cells, report.cases)])
    click.echo()
    lost = [memory for memory in report.cases if memory.loss is not None]
    if lost:
        _print_table([LOSS_COLUMNS, *map(_lost, lost)])
        click.echo()
    _print_round_trips(report)
    for memory in report.cases:
        if memory.policy == "full" or memory.verdict != "lossy by design":  # else 'lost by' has said it
            _print_details(memory)
    _print_findings(report)
    click.echo(f"verdict: {report.verdict()}")


def _print_round_trips(report: verify.report.VerifyReport) -> None:
    """Rows that left and came back; below, each reason why some did not, with where that was."""
    if not report.round_trips:
        return
    _print_table(
        [ROUND_TRIP_COLUMNS, *(_round_trip_row(each) for each in report.round_trips if each.max_dlogit is not None)]
    )
    for reason in dict.fromkeys(each.reason for each in report.round_trips if each.reason):
        names = [f"{each.memory} through {each.round_trip}" for each in report.round_trips if each.reason == reason]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        click.echo(f"skipped    {names[0]}{more}: {reason}")
    click.echo()


def _round_trip_row(each: verify.report.RoundTripResult) -> tuple[str, ...]:
    return (each.memory, each.round_trip, f"{each.max_dlogit:.2e}", f"{each.moved:,} {each.unit}", each.verdict)


def _print_skipped(report: verify.report.VerifyReport) -> None:
    """Each reason once, with the memories that it forbids."""
    for reason in dict.fromkeys(each.reason for each in report.skipped):
        names = [each.memory for each in report.skipped if each.reason == reason]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        click.echo(f"skipped    {names[0]}{more}: {reason}")


def _lost(memory: verify.report.CaseReport) -> tuple[str, ...]:
    loss = memory.loss
    assert loss is not None
    text = (
        ("-", "-", "-")
        if not loss.tokens
        else (f"{loss.perplexity:.4g}", f"{loss.reference_perplexity:.4g}", f"{loss.ratio:.3f}")
    )
    recall = "-" if loss.recall is None else f"{loss.recall.recall:.2f} of {loss.recall.full:.2f}"
    return (memory.name, f"{loss.kl_mean:.2e}", f"{loss.kl_max:.2e}", f"{loss.agree}/{loss.compared}", *text, recall)


def _format_counts(counts: dict[str, int]) -> str:
    words = {
        "rows": ("row", ""),
        "steps": ("step", ""),
        "tokens": ("token", " computed"),
        "chunks": ("partial prompt chunk", ""),
        "mixed": ("step", " of prefill and decode together"),
        "preemptions": ("preemption", ""),
        "recomputed": ("token", " recomputed"),
        "hit_tokens": ("token", " from prefix hits"),
        "forks": ("forked sample", ""),
    }
    return ", ".join(format_count(counts[name], noun) + rest for name, (noun, rest) in words.items())


def _cells(memory: verify.report.CaseReport) -> tuple[str, ...]:
    return (
        memory.name,
        f"{memory.max_dlogit:.2e}",
        f"{memory.tolerance:.2e}",
        f"{memory.structure:.2e}",
        f"{memory.kl_mean:.2e}",
        f"{memory.kl_max:.2e}",
        f"{memory.agree}/{memory.compared}",
        memory.verdict,
    )


def _print_table(lines: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        first, *middle, last = line
        cells = [first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(middle, widths[1:-1], strict=True)), last]
        click.echo("  ".join(cells))


def _print_details(memory: verify.report.CaseReport) -> None:
    first = memory.first_divergence
    if first is not None:
        many = memory.compared - memory.agree
        sample = f" (sample {first.sample})" if first.sample else ""
        click.echo(
            f"{memory.name}: {many} greedy token{'s' * (many > 1)} differ{'s' * (many == 1)}, "
            f"{memory.ties} by a tie; first row {first.row}{sample}, position {first.position}: token {first.cached_token} "
            f"for the judge's {first.reference_token}, whose lead is {first.gap:.2e}{' (a tie)' if first.tie else ''}"
        )


def _print_findings(report: verify.report.VerifyReport) -> None:
    """Each finding once, with the memories that it explains."""
    broken = [memory for memory in report.cases if memory.verdict == "BROKEN"]
    for finding in dict.fromkeys(memory.finding for memory in broken):
        names = ", ".join(m.name for m in broken if m.finding == finding)
        click.echo(f"BROKEN     {names}")
        said = next((m.reason for m in broken if m.finding is None and m.reason), "") if finding is None else ""
        if said:
            click.echo(f"           {said}")
        elif finding is None:
            click.echo(
                "           no q, k, v or attention output differs beyond rounding: look at what follows them, or at a "
                "model whose own float64 noise is above 1e-10"
            )
        else:
            click.echo(f"fault      {finding.sentence()}")
            click.echo(f"usually    {finding.causes}")
