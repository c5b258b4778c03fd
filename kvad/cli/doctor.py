"""``kvad doctor MODEL``: look a checkpoint over, all of it, and say what to do about what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvad.cli.common import emit_json, json_option, model_argument
from kvad.errors import UsageError

if TYPE_CHECKING:
    from kvad.lab.doctor import Finding

__all__ = ["doctor"]


@click.command()
@model_argument
@click.option("--fix", is_flag=True, help="Of a tier's folder: remove what is damaged or half written.")
@json_option
def doctor(model: Path, fix: bool, as_json: bool) -> None:
    """Look a checkpoint over: kvad's own, or a Hugging Face folder.

    Headers, tensors against the config, weights that are not finite, the tokenizer against the vocabulary, sha256 sums.
    A line for each: `ok`, or `problem` and what to do.  Every byte is read.  Exit code 1 when there is a problem.

    A tier's folder: blocks that are whole, torn, alien, and what a dead writer left.

    \b
    kvad doctor runs/demo
    kvad doctor ~/models/llama-3.2-1b --json
    kvad doctor ~/.cache/kvad/tier --fix
    """
    findings = []
    for finding in _examined(model, fix):
        findings.append(finding)
        if not as_json:
            todo = f"; {finding.todo}" if finding.todo else ""
            click.echo(f"{'ok' if finding.ok else 'problem':<8}{finding.check:<11}{finding.says}{todo}")
    healthy = all(finding.ok for finding in findings)
    if as_json:
        emit_json({"model": model, "healthy": healthy, "findings": findings})
    click.get_current_context().exit(0 if healthy else 1)


def _examined(folder: Path, fix: bool) -> Iterator[Finding]:
    """By the doctor for what it is.  UsageError: a checkpoint cannot be fixed."""
    from kvad.lab.doctor import examine
    from kvad.lab.doctor_tier import examine_tier, is_tier

    if is_tier(folder):
        yield from examine_tier(folder, fix=fix)
        return
    if fix:
        raise UsageError(f"--fix: {folder} is no tier's folder", "a checkpoint is copied or downloaded again")
    yield from examine(folder)
