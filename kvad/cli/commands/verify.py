"""``kvad verify MODEL``: compare every cache configuration with the uncached model; exit code 1 if one is broken."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import kvad.verify as verify  # kvad.verify is also a function
from kvad import api, cache
from kvad.cli.fields import Parsed, command, flag_of, option
from kvad.cli.output import console, exit_with, format_records, format_table, note, print_result
from kvad.cli.parameters import COUNT, POSITIVE_SIZE, JsonOption, ModelArgument, WeightOptions
from kvad.errors import UsageError, format_count, suggest

FAULT_NAMES = tuple(name for name in verify.report.FAULTS if name != verify.report.UNKNOWN_FAULT)
ROUND_TRIP_NAMES = ("swap", "swap-disk", "prefix-ram", "prefix-disk", "session", "offload", "offload-disk")
COLUMNS = {
    "cache": "{.name}", "max |dlogit|": "{.max_dlogit:.2e}", "tolerance": "{.tolerance:.2e}",
    "in float64": "{0.structure_text}", "KL mean": "{.kl_mean:.2e}", "KL max": "{.kl_max:.2e}",
    "greedy": "{0.agree}/{0.compared}", "verdict": "{.verdict}",
}  # fmt: skip
LOSS_COLUMNS = ("loss of", "KL mean", "KL max", "greedy", "perplexity", "reference", "ratio", "recall")
ROUND_TRIP_COLUMNS = {
    "cache": "{.memory}", "round trip": "{.round_trip}", "max |dlogit|": "{.max_dlogit:.2e}",
    "moved": "{0.moved:,} {0.unit}", "verdict": "{.verdict}",
}  # fmt: skip
COUNT_WORDS = {  # count -> its noun and more words
    "rows": ("sequence", ""), "steps": ("step", ""), "tokens": ("token", " computed"),
    "chunks": ("partial prompt chunk", ""), "mixed": ("step", " of prefill and decode together"),
    "preemptions": ("preemption", ""), "recomputed": ("token", " recomputed"),
    "hit_tokens": ("token", " from prefix hits"), "forks": ("forked sample", ""),
    "drafts": ("draft", ""), "rejected": ("draft", " rejected"),
}  # fmt: skip


def _names(known: Sequence[str], *, are_formats: bool = False) -> Parsed:
    """Create the type of a list of names, or of cache formats such as ``int8/int4``."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
        for name in names:
            for part in cache.quantization.split_format_name(name) if are_formats else (name,):
                if are_formats and part not in known and cache.quantization.is_format(part):
                    cache.quantization.get_format(part, "--cache-dtype")
                elif part not in known:
                    raise UsageError(f"{part!r} is not known", suggest(part, known))
        return tuple(name for name in known if name != "all") if "all" in names else names

    return Parsed("FORMAT,..." if are_formats else "NAME,...", parse, is_list=True)


class _VerifyOptions(ModelArgument, JsonOption, WeightOptions):
    section = ""
    layout: tuple[str, ...] = option("Cache layouts", ("paged", "contiguous"), kind=_names(("paged", "contiguous")))
    cache_dtype: tuple[str, ...] | None = option(
        "Cache formats; int8/int4 stores keys as int8 and values as int4; a plugin is a custom format "
        "[default: the model's dtype; of a float32 model also bfloat16,float16,float64]",
        kind=_names(tuple(cache.quantization.FORMATS), are_formats=True), metavar="FORMAT,...",
    )  # fmt: skip
    policy: tuple[str, ...] = option(
        "Policy, such as sinks(4,60), snapkv (sized for the prompts) or all [default: full]", metavar="NAME"
    )
    rope_at: Literal["write", "read", "both"] = option("Rotate RoPE keys when written or read", "write")
    endless: bool = option("Let sequences exceed the model's limit, under policies that allow it")
    num_prompts: int | None = option("Number of prompts of different length [default: 5]")
    prefill_chunk_size: int = option("Maximum prompt tokens per step", 32)
    block_size: int | None = option("Tokens per block (paged layout) [default: 16, or what fits]")
    max_tokens: int | None = option("Tokens generated after every prompt [default: 32, or what fits]", short="-n")
    preempt: bool = option("Preempt sequences and recompute them", True)
    prefix_hit: bool = option("Let a sequence reuse the prefix of another", True)
    round_trip: tuple[str, ...] | None = option(
        f"Also move sequences out of the cache and back: {', '.join(ROUND_TRIP_NAMES)}, or all",
        kind=_names((*ROUND_TRIP_NAMES, "all")), metavar="NAMES",
    )  # fmt: skip
    num_beams: int | None = option("Also compare a beam search with N beams", kind=COUNT)
    prefix_cache_ram: int | None = option(
        "Host memory for evicted blocks, which are then read back", kind=POSITIVE_SIZE
    )
    summarizer: Path | None = option("Summarizer for a tiered policy with summaries")
    speculative: str | None = option(
        "Check up to K drafts in each step: known tokens, every third one wrong [default: none]", metavar="ngram[:K]"
    )
    mesh: str | None = option("Divide the model among T x P ranks, started here, such as 2x1 [default: one process]")
    against: Literal["hf"] | None = option("Verify transformers' own caches instead, on the same checkpoint")
    prompt: tuple[str, ...] = option("Prompt of a sequence [default: generated]")
    inject_fault: str | None = option(
        f"Verify a cache with an injected fault: {', '.join(FAULT_NAMES)}", metavar="FAULT"
    )


@command("verify", _VerifyOptions)
def verify_command(options: _VerifyOptions) -> None:
    """Compare every cache configuration with the uncached model.

    The same sequences run through the engine that generate uses, with these options and in every configuration, and
    through a plain model without a cache, in float64: with different lengths, in chunks, preempted, resumed, forked and
    with a shared prefix. Exit code 1 if a configuration is broken; the first difference and its usual causes are
    printed. The tolerance is derived from the plain model in the engine's dtype. A policy by position must equal the
    model restricted to the same positions; one that ranks or summarizes must depend on its own sequence only. Their
    loss is measured and is not a failure. With --round-trip, sequences are swapped, restored, loaded from the prefix
    cache or offloaded, and must give the same output. The sha256 of every file of the checkpoint is compared first.

    \b
    kvad verify runs/demo
    kvad verify runs/demo --cache-dtype float32,int8,int8/int4
    kvad verify runs/demo --inject-fault mask
    kvad verify runs/demo --dtype bfloat16 --deterministic --num-beams 4
    kvad verify runs/demo --policy "sinks(4,60)" --policy snapkv --cache-dtype float32,int8
    kvad verify runs/demo --policy all --rope-at both
    kvad verify runs/demo --speculative ngram --layout paged
    kvad verify runs/demo --round-trip all --cache-dtype float32,int8
    kvad verify runs/demo --layout paged --cache-dtype int8 --round-trip session,prefix-disk --policy sinks
    """
    fault, num_prompts, prompts = options.inject_fault, options.num_prompts, options.prompt
    if fault is not None and fault not in FAULT_NAMES:
        raise UsageError(f"--inject-fault: unknown fault {fault!r}", suggest(fault, FAULT_NAMES))
    if prompts and num_prompts is not None and num_prompts != len(prompts):
        hint = "leave --num-prompts out: every --prompt is a sequence"
        raise UsageError(f"--num-prompts {num_prompts}, but {len(prompts)} prompts", hint)
    for name in ("num_prompts", "prefill_chunk_size", "block_size", "max_tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UsageError(f"{flag_of(name)}: must be at least 1, got {value}")
    try:
        report = _verify(options)
    except KeyboardInterrupt:
        note("interrupted before every configuration was verified: no verdict")
        exit_with(130)
    print_result(options.as_json, {"model": options.model, **report.to_dict()}, _page(report), failed=report.broken)


def _verify(options: _VerifyOptions) -> verify.report.VerifyReport:
    own = {"layouts", "cache_dtypes", "policies", "round_trips"}  # of other names here
    names = api.verification.VERIFY_SETTINGS.keys() - own
    settings = {name: value for name in names if (value := getattr(options, name)) is not None}
    with console().status("verifying") as status:
        return api.verify(
            options.model,
            prompts=options.prompt,
            progress=lambda label: status.update(f"verifying: {label}"),
            layouts=options.layout,
            cache_dtypes=options.cache_dtype or (),
            policies=options.policy,
            round_trips=options.round_trip or (),
            **settings,
        )


# ---------------------------------------------------------------- the page


def _page(report: verify.report.VerifyReport) -> list[str]:
    tokens = ", ".join(map(str, report.rows)) + (" token" if report.rows == (1,) else " tokens")
    size = f"{format_count(len(report.rows), 'sequence')} of {tokens}, largest |logit| {report.logit_scale:.3g}"
    lines = [f"reference  the plain model in float64 without a cache: {size}"]
    if report.injected is not None:
        lines.append(f"injected   {report.injected}: {verify.report.FAULTS[report.injected].what}")
    for layout in dict.fromkeys(case.layout for case in report.cases):
        counts = next(case.scenario_counts for case in report.cases if case.layout == layout)
        counted = (name for name in COUNT_WORDS if counts[name] or name not in ("drafts", "rejected"))
        words = (format_count(counts[name], COUNT_WORDS[name][0]) + COUNT_WORDS[name][1] for name in counted)
        lines.append(f"{layout:11}{', '.join(words)}")
    lines += [f"note       {text}" for text in report.notes]
    lines += _skipped([(each.reason, each.memory) for each in report.skipped])
    lines += ["", *format_records(report.cases, COLUMNS, left=(0, -1)), ""]
    if losses := [(case.name, case.loss) for case in report.cases if case.loss is not None]:
        lines += [*format_table([LOSS_COLUMNS, *(_loss_row(name, loss) for name, loss in losses)]), ""]
    if report.round_trips:
        measured = [each for each in report.round_trips if each.max_dlogit is not None]
        names = [(each.reason, f"{each.memory}, round trip {each.round_trip}") for each in report.round_trips]
        lines += [*format_records(measured, ROUND_TRIP_COLUMNS, left=(0, -1)), *_skipped(names), ""]
    for case in report.cases:
        if case.first_divergence is not None and (case.policy == "full" or case.verdict != "lossy by design"):
            lines.append(_divergence(case, case.first_divergence))  # else the table of losses has it
    rules = [f"{'' if index else 'rules':11}{rule}" for index, rule in enumerate(report.rules)] if report.broken else []
    return [*lines, *_findings(report), *rules, f"verdict: {report.verdict()}"]


def _skipped(cases: Sequence[tuple[str, str]]) -> list[str]:
    """Format each reason once, with the first skipped configuration; ``cases`` are (reason or "", name)."""
    lines = []
    for reason in dict.fromkeys(reason for reason, _ in cases if reason):
        names = [name for other, name in cases if other == reason]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        lines.append(f"skipped    {names[0]}{more}: {reason}")
    return lines


def _loss_row(name: str, loss: verify.report.LossReport) -> tuple[str, ...]:
    perplexity = ("-", "-", "-")
    if loss.tokens:
        perplexity = (f"{loss.perplexity:.4g}", f"{loss.reference_perplexity:.4g}", f"{loss.ratio:.3f}")
    recall = "-" if loss.recall is None else f"{loss.recall.recall:.2f} of {loss.recall.full:.2f}"
    greedy = f"{loss.agree}/{loss.compared}"
    return (name, f"{loss.kl_mean:.2e}", f"{loss.kl_max:.2e}", greedy, *perplexity, recall)


def _divergence(case: verify.report.CaseReport, first: verify.report.TokenDivergence) -> str:
    many = case.compared - case.agree
    sample = f" (sample {first.sample})" if first.sample else ""
    return (
        f"{case.name}: {many} greedy token{'s' * (many > 1)} differ{'s' * (many == 1)}, "
        f"{case.ties} by a tie; first sequence {first.row}{sample}, position {first.position}: "
        f"token {first.cached_token} instead of the reference's {first.reference_token}, "
        f"whose lead is {first.gap:.2e}{' (a tie)' if first.tie else ''}"
    )


def _findings(report: verify.report.VerifyReport) -> list[str]:
    """Format each finding once, with the configurations that it explains."""
    broken, lines = [case for case in report.cases if case.verdict == "broken"], list[str]()
    for finding in dict.fromkeys(case.finding for case in broken):
        lines.append(f"broken     {', '.join(case.name for case in broken if case.finding == finding)}")
        if finding is not None:
            lines += [f"fault      {finding.sentence()}", f"usually    {finding.causes}"]
            continue
        unexplained = (
            "no q, k, v or attention output differs beyond rounding: check the later layers, or a model whose float64 "
            "rounding exceeds 1e-10"
        )
        reason = next((case.reason for case in broken if case.finding is None and case.reason), unexplained)
        lines.append(f"           {reason}")
    return lines
