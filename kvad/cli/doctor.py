"""``kvad doctor MODEL``: look a checkpoint over, all of it, and say what to do about what is wrong."""

from __future__ import annotations

from pathlib import Path

import click

from kvad.cli.common import emit_json, json_option, model_argument

__all__ = ["doctor"]


@click.command()
@model_argument
@json_option
def doctor(model: Path, as_json: bool) -> None:
    """Look a checkpoint over: kvad's own, or a Hugging Face folder.

    Headers, tensors against the config, weights that are not finite, the tokenizer against the vocabulary, sha256 sums.
    A line for each: `ok`, or `problem` and what to do.  Every byte is read.  Exit code 1 when there is a problem.

    \b
    kvad doctor runs/demo
    kvad doctor ~/models/llama-3.2-1b --json
    """
    from kvad.lab.doctor import examine

    findings = []
    for finding in examine(model):
        findings.append(finding)
        if not as_json:
            todo = f"; {finding.todo}" if finding.todo else ""
            click.echo(f"{'ok' if finding.ok else 'problem':<8}{finding.check:<11}{finding.says}{todo}")
    healthy = all(finding.ok for finding in findings)
    if as_json:
        emit_json({"model": model, "healthy": healthy, "findings": findings})
    click.get_current_context().exit(0 if healthy else 1)
