"""``kvad verify MODEL``: compare every cache configuration with the uncached model; exit code 1 if one is broken."""

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
DTYPES = ("float32", "bfloat16", "float16", "float64")  # default formats
MAX_ROWS = 64  # a longer list has prompts of a single token
FAULT_NAMES = tuple(name for name in verify.report.FAULTS if name != verify.report.UNKNOWN_FAULT)
ROUND_TRIP_NAMES = ("swap", "swap-disk", "prefix-ram", "prefix-disk", "session", "offload", "offload-disk")
ROUND_TRIP_COLUMNS = ("cache", "round trip", "max |dlogit|", "moved", "verdict")
LOSS_COLUMNS = ("loss of", "KL mean", "KL max", "greedy", "perplexity", "reference", "ratio", "recall")
HEADINGS = ("cache", "max |dlogit|", "tolerance", "in float64", "KL mean", "KL max", "greedy", "verdict")


def _names(_ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    """Parse a comma-separated list of names; the error for an unknown name suggests the nearest."""
    known = LAYOUTS if param.name == "layouts" else tuple(cache.quantization.FORMATS)
    names = tuple(dict.fromkeys(name.strip() for name in value.split(",")))
    for name in (
        part
        for item in names
        for part in (cache.quantization.split_format_name(item) if param.name == "dtypes" else (item,))
    ):
        if ":" in name and param.name == "dtypes":
            cache.quantization.get_format(name, "--cache-dtype")
        elif name not in known:
            raise click.BadParameter(f"{name!r} is not known; {suggest(name, known)}", param=param)
    return names


def _round_trips(_ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    """Parse a comma-separated list of round trips, or "all"."""
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
    "--cache-dtype",
    "dtypes",
    callback=_names,
    default=",".join(DTYPES),
    show_default=True,
    help="Cache formats; int8/int4 stores keys as int8 and values as int4; package.module:Class is a custom format.",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME",
    help="Policy, such as sinks(4,60), snapkv (sized for the prompts) or all. Repeatable [default: full].",
)
@click.option(
    "--rope-at",
    type=click.Choice(["write", "read", "both"]),
    default="write",
    show_default=True,
    help="Rotate RoPE keys when written or read.",
)
@click.option("--endless", is_flag=True, help="Let sequences exceed the model's limit, under policies that allow it.")
@click.option("--num-prompts", type=int, help="Number of prompts of different length [default: 5].")
@click.option("--prefill-chunk-size", type=int, default=32, show_default=True, help="Maximum prompt tokens per step.")
@click.option("--block-size", type=int, help="Tokens per block (paged layout) [default: 16, or what fits].")
@click.option("-n", "--max-tokens", type=int, help="Tokens generated after every prompt [default: 32, or what fits].")
@click.option("--preempt/--no-preempt", default=True, show_default=True, help="Preempt sequences and recompute them.")
@click.option(
    "--prefix-hit/--no-prefix-hit", default=True, show_default=True, help="Let a sequence reuse the prefix of another."
)
@click.option(
    "--round-trip",
    callback=_round_trips,
    metavar="NAMES",
    help="Also move sequences out of the cache and back: swap, swap-disk, prefix-ram, prefix-disk, session, offload,"
    " offload-disk, or all.",
)
@click.option(
    "--prompt", "prompts", multiple=True, metavar="TEXT", help="Prompt of a sequence. Repeatable [default: generated]."
)
@click.option(
    "--inject-fault", metavar="FAULT", help=f"Verify a cache with an injected fault: {', '.join(FAULT_NAMES)}."
)
@json_option
@click.pass_context
def verify_command(
    ctx: click.Context,
    model: Path,
    layouts: tuple[str, ...],
    dtypes: tuple[str, ...],
    policies: tuple[str, ...],
    rope_at: str,
    endless: bool,
    num_prompts: int | None,
    prefill_chunk_size: int,
    block_size: int | None,
    max_tokens: int | None,
    preempt: bool,
    prefix_hit: bool,
    round_trip: tuple[str, ...],
    prompts: tuple[str, ...],
    inject_fault: str | None,
    as_json: bool,
) -> None:
    """Compare every cache configuration with the uncached model.

    The same sequences run without a cache and through every configuration: with different lengths, in chunks,
    preempted, resumed, forked and with a shared prefix. Exit code 1 if a configuration is broken; the first difference
    and its usual causes are printed. A policy by position must equal the model restricted to the same positions; one
    that ranks or summarizes must depend on its own sequence only. Their loss is measured and is not a failure. With
    --round-trip, sequences are swapped, restored, loaded from the prefix cache or offloaded, and must give
    the same output. The sha256 of every file of the checkpoint is compared first.

    \b
    kvad verify runs/demo
    kvad verify runs/demo --cache-dtype float32,int8,int8/int4
    kvad verify runs/demo --inject-fault mask
    kvad verify runs/demo --policy "sinks(4,60)" --policy snapkv --cache-dtype float32,int8
    kvad verify runs/demo --policy all --rope-at both
    kvad verify runs/demo --round-trip all --cache-dtype float32,int8
    kvad verify runs/demo --layout paged --cache-dtype int8 --round-trip session,prefix-disk --policy sinks
    """
    if inject_fault is not None and inject_fault not in FAULT_NAMES:
        raise UsageError(f"--inject-fault: unknown fault {inject_fault!r}", suggest(inject_fault, FAULT_NAMES))
    if prompts and num_prompts is not None and num_prompts != len(prompts):
        raise UsageError(
            f"--num-prompts {num_prompts}, but {len(prompts)} prompts",
            "leave --num-prompts out: every --prompt is a row",
        )
    _check_positive(
        {
            "--num-prompts": num_prompts,
            "--prefill-chunk-size": prefill_chunk_size,
            "--block-size": block_size,
            "--max-tokens": max_tokens,
        }
    )
    try:
        from kvad import checkpoint as checkpoint_lib
        from kvad.verify import ScenarioOptions, default_sizes, parse_policies
        from kvad.verify import verify as run_verify

        loaded, checkpoint = checkpoint_lib.loader.load_model(model, verify="tensors")
        max_tokens, block_size = default_sizes(loaded.config, max_tokens, block_size)
        options = ScenarioOptions(
            layouts,
            dtypes,
            num_prompts or len(prompts) or 5,
            prefill_chunk_size,
            block_size,
            max_tokens,
            preempt,
            prefix_hit,
        )
        options = replace(options, rotates=("write", "read") if rope_at == "both" else (rope_at,), endless=endless)
        options = replace(options, round_trips=round_trip)
        ids = _prompts(loaded.config, options, checkpoint.tokenizer, prompts)
        longest = max(map(len, ids)) + options.tokens
        options = replace(options, policies=parse_policies(policies, longest, options.block_size))
        _check_room(loaded.config, options, ids)
        with console().status("verifying") as status:
            report = run_verify(
                loaded,
                ids,
                options,
                fault=inject_fault,
                language=_language(checkpoint.tokenizer),
                progress=lambda label: status.update(f"verifying: {label}"),
            )
    except KeyboardInterrupt:
        click.echo("kvad: interrupted before every configuration was verified: no verdict", err=True)
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
            raise UsageError(f"{name}: must be at least 1, got {value}")


def _prompts(
    config: ModelConfig, options: ScenarioOptions, tokenizer: Tokenizer | None, texts: tuple[str, ...]
) -> list[list[int]]:
    """Build the prompts; MemoryPlanError is raised first if so many would not fit."""
    from kvad.verify import build_prompts

    if not texts:
        prompts = build_prompts(config, replace(options, num_seqs=min(options.num_seqs, MAX_ROWS)), tokenizer)
    elif tokenizer is None:
        raise RequestError("the model has no tokenizer", "omit --prompt: random tokens are used")
    else:
        prompts = [tokenizer.encode(text) for text in texts]
    _check_room(config, options, prompts)
    return prompts if len(prompts) == options.num_seqs else build_prompts(config, options, tokenizer)


def _check_room(config: ModelConfig, options: ScenarioOptions, prompts: Sequence[Sequence[int]]) -> None:
    from kvad.cache.sizing import available_bytes
    from kvad.verify import require_verify_memory

    require_verify_memory(config, [len(prompt) for prompt in prompts], options, available_bytes())


def _language(tokenizer: Tokenizer | None) -> benchmarks.needle_tasks.HaystackLanguage | None:
    """Choose the text of needle tasks: the lookup language if the tokenizer has it, else the built-in text."""
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
    click.echo(
        f"reference  the model without a cache: {format_count(len(report.rows), 'sequence')} of {tokens}, ", nl=False
    )
    click.echo(f"largest |logit| {report.logit_scale:.3g}")
    for index, rule in enumerate(report.rules):
        click.echo(f"{'rules' if index == 0 else '':11}{rule}")
    if report.injected is not None:
        click.echo(f"injected   {report.injected}: {verify.report.FAULTS[report.injected].what}")
    for layout in dict.fromkeys(case.layout for case in report.cases):
        counts = next(case.scenario_counts for case in report.cases if case.layout == layout)
        click.echo(f"{layout:11}{_format_counts(counts)}")
    for note in report.notes:
        click.echo(f"note       {note}")
    _print_skipped(report)
    click.echo()
    _print_table([HEADINGS, *map(_cells, report.cases)])
    click.echo()
    lossy = [case for case in report.cases if case.loss is not None]
    if lossy:
        _print_table([LOSS_COLUMNS, *map(_loss_row, lossy)])
        click.echo()
    _print_round_trips(report)
    for case in report.cases:
        if case.policy == "full" or case.verdict != "lossy by design":  # else the table of losses has it
            _print_details(case)
    _print_findings(report)
    click.echo(f"verdict: {report.verdict()}")


def _print_round_trips(report: verify.report.VerifyReport) -> None:
    """Print the round trips, and each reason for skipped ones with the first case."""
    if not report.round_trips:
        return
    _print_table(
        [ROUND_TRIP_COLUMNS, *(_round_trip_row(each) for each in report.round_trips if each.max_dlogit is not None)]
    )
    for reason in dict.fromkeys(each.reason for each in report.round_trips if each.reason):
        names = [f"{each.memory}, round trip {each.round_trip}" for each in report.round_trips if each.reason == reason]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        click.echo(f"skipped    {names[0]}{more}: {reason}")
    click.echo()


def _round_trip_row(each: verify.report.RoundTripResult) -> tuple[str, ...]:
    return (each.memory, each.round_trip, f"{each.max_dlogit:.2e}", f"{each.moved:,} {each.unit}", each.verdict)


def _print_skipped(report: verify.report.VerifyReport) -> None:
    """Print each reason once, with the skipped configurations."""
    for reason in dict.fromkeys(each.reason for each in report.skipped):
        names = [each.memory for each in report.skipped if each.reason == reason]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        click.echo(f"skipped    {names[0]}{more}: {reason}")


def _loss_row(case: verify.report.CaseReport) -> tuple[str, ...]:
    loss = case.loss
    assert loss is not None
    text = (
        ("-", "-", "-")
        if not loss.tokens
        else (f"{loss.perplexity:.4g}", f"{loss.reference_perplexity:.4g}", f"{loss.ratio:.3f}")
    )
    recall = "-" if loss.recall is None else f"{loss.recall.recall:.2f} of {loss.recall.full:.2f}"
    return (case.name, f"{loss.kl_mean:.2e}", f"{loss.kl_max:.2e}", f"{loss.agree}/{loss.compared}", *text, recall)


def _format_counts(counts: dict[str, int]) -> str:
    words = {
        "rows": ("sequence", ""),
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


def _cells(case: verify.report.CaseReport) -> tuple[str, ...]:
    return (
        case.name,
        f"{case.max_dlogit:.2e}",
        f"{case.tolerance:.2e}",
        f"{case.structure:.2e}",
        f"{case.kl_mean:.2e}",
        f"{case.kl_max:.2e}",
        f"{case.agree}/{case.compared}",
        case.verdict,
    )


def _print_table(lines: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        first, *middle, last = line
        cells = [first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(middle, widths[1:-1], strict=True)), last]
        click.echo("  ".join(cells))


def _print_details(case: verify.report.CaseReport) -> None:
    first = case.first_divergence
    if first is not None:
        many = case.compared - case.agree
        sample = f" (sample {first.sample})" if first.sample else ""
        click.echo(
            f"{case.name}: {many} greedy token{'s' * (many > 1)} differ{'s' * (many == 1)}, "
            f"{case.ties} by a tie; first sequence {first.row}{sample}, position {first.position}: "
            f"token {first.cached_token} instead of the reference's {first.reference_token}, "
            f"whose lead is {first.gap:.2e}{' (a tie)' if first.tie else ''}"
        )


def _print_findings(report: verify.report.VerifyReport) -> None:
    """Print each finding once, with the configurations that it explains."""
    broken = [case for case in report.cases if case.verdict == "broken"]
    for finding in dict.fromkeys(case.finding for case in broken):
        names = ", ".join(m.name for m in broken if m.finding == finding)
        click.echo(f"broken     {names}")
        reason = next((m.reason for m in broken if m.finding is None and m.reason), "") if finding is None else ""
        if reason:
            click.echo(f"           {reason}")
        elif finding is None:
            click.echo(
                "           no q, k, v or attention output differs beyond rounding: check the later layers, or a "
                "model whose float64 rounding exceeds 1e-10"
            )
        else:
            click.echo(f"fault      {finding.sentence()}")
            click.echo(f"usually    {finding.causes}")
