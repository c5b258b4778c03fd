"""``kvad train --dry-run``: what a run would take, as a page or as JSON.  The plan itself is ``kvad.train.plan``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvad.cli.common import emit_json, format_bytes
from kvad.errors import format_count

if TYPE_CHECKING:
    from kvad.train.config import RunConfig
    from kvad.train.material import CorpusArgument
    from kvad.train.plan import TrainingPlan

__all__ = ["training_plan_text", "show_plan"]


def show_plan(config: RunConfig, named: CorpusArgument, out: Path | None, *, overwrite: bool, as_json: bool) -> None:
    """Print the plan; exit code 1 where the run would not fit into memory.  Raises as ``job.train``."""
    from kvad.cache.available import available_bytes
    from kvad.train.plan import plan_training
    from kvad.train.refusals import check_run_folder

    if out is not None:
        check_run_folder(config, named, out, overwrite)
    found = plan_training(config, named, available_bytes(), lambda text: click.echo(text, err=True))
    if as_json:
        more = {"tokens": found.tokens, "flops": found.flops, "bytes": found.bytes}
        emit_json({**dataclasses.asdict(found), **more, "config": config.to_dict()})
    else:
        click.echo("\n".join(training_plan_text(found)))
    if found.fits is not None and found.fits < found.batch:
        click.get_current_context().exit(1)


def training_plan_text(plan: TrainingPlan) -> list[str]:
    """A line about each thing."""
    lines = {
        "model": _model(plan),
        "memory": _memory(plan),
        "corpus": _corpus(plan),
        "step": _step(plan),
        "run": _run_settings(plan),
        "measured": _measured(plan),
        "time": _time(plan),
        "disk": f"{format_bytes(plan.checkpoint)} a checkpoint (and the tokenizer); up to {plan.num_checkpoints + 1} of them, "
        f"{format_bytes((plan.num_checkpoints + 1) * plan.checkpoint)}, while one is written",
    }
    return [f"{name:<10}{text}" for name, text in lines.items()]


def _model(plan: TrainingPlan) -> str:
    share = "all trained" if plan.trained == plan.parameters else f"{plan.trained:,} of them trained"
    return f"{plan.kind}, objective {plan.objective}: {format_count(plan.parameters, 'parameter')}, {share}"


def _memory(plan: TrainingPlan) -> str:
    if plan.memory is None:
        return "not planned for a compressor"
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in plan.memory.items())
    there = "what is available is not known" if plan.available is None else f"{format_bytes(plan.available)} available"
    said = f"at least {format_bytes(plan.bytes or 0)} ({parts}); {there}"
    if plan.device != "cpu":
        said += f" beside {plan.device}, which answers for itself"
    if plan.fits is None or plan.fits >= plan.batch:
        return said
    if not plan.fits:
        return f"{said}: DOES NOT FIT, not even --batch 1"
    return f"{said}: DOES NOT FIT; --batch {plan.fits} would, with --accumulate for more rows to a step"


def _corpus(plan: TrainingPlan) -> str:
    held = f"{plan.validation_tokens:,} to judge by"
    if plan.train_tokens is None:
        return f"tokens to train on unknown: they are read in their order, and nobody has counted them; {held}"
    return f"{format_count(plan.train_tokens, 'token')} to train on, {held}"


def _step(plan: TrainingPlan) -> str:
    rows = format_count(plan.batch, "row")
    if plan.accumulate > 1:
        rows = f"{plan.accumulate} x {rows}"
    flops = "FLOPs not counted" if plan.step_flops is None else f"{_flops(plan.step_flops)} forwards and backwards"
    return f"{rows} of {format_count(plan.context, 'token')}, {plan.tokens_per_step:,} of which are learned; {flops}"


def _run_settings(plan: TrainingPlan) -> str:
    if plan.steps is None:
        return f"{plan.minutes:g} minutes; how many steps they are is not known, for nothing was measured"
    clock = "" if plan.minutes is None else f" (in {plan.minutes:g} minutes)"
    epochs = "epochs unknown" if plan.epochs is None else f"{plan.epochs:,.2f} epochs"
    flops = "" if plan.flops is None else f", {_flops(plan.flops)}"
    return f"{format_count(plan.steps, 'step')}{clock}, {format_count(plan.tokens or 0, 'token')}, {epochs}{flops}"


def _measured(plan: TrainingPlan) -> str:
    where = f"{plan.precision} on {plan.device}, {format_count(plan.threads, 'thread')}"
    product = f"a matrix product {_flops(plan.gemm_flops)}/s ({where})"
    trial = plan.trial
    if trial is None:
        return f"{product}; no step, for it would not fit"
    of = "a micro-batch" if trial.rows == plan.batch else f"{format_count(trial.rows, 'row')} of the {plan.batch}"
    share = "" if trial.utilization is None else f", {trial.utilization:.1%} of that"
    return f"{product}; {of} of the first step in {_seconds(trial.seconds)}{share}; an update {_seconds(trial.update)}"


def _time(plan: TrainingPlan) -> str:
    if plan.seconds is None or plan.step_seconds is None or plan.eval_seconds is None:
        return "not known, for nothing was measured"
    speed = f"{plan.tokens_per_step / plan.step_seconds:,.0f} tokens/s"
    share = plan.eval_seconds / plan.seconds
    return (
        f"{plan.seconds / 3600:.2f} hours ({_seconds(plan.step_seconds)} a step, {speed}), evaluations {share:.0%} of "
        "it; saves and samples not counted"
    )


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _flops(count: float) -> str:
    """``3.91e9`` -> ``3.91 GFLOP``."""
    for power, name in ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M")):
        if count >= 10**power:
            return f"{count / 10**power:,.2f} {name}FLOP"
    return f"{count:,.0f} FLOP"
