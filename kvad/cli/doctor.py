"""``kvad doctor MODEL|FOLDER``: look a checkpoint over, or a folder of sessions, and say what to do.

Nothing is removed that was not asked for, and never what is not ours.
"""

from __future__ import annotations

from pathlib import Path

import click

from kvad.cache.sessions import Found, examined, is_folder
from kvad.cli.common import emit_json, json_option, model_argument

__all__ = ["doctor"]

FINE = ("whole", "writing")
TODO = {
    "leftover": "--fix removes it",
    "torn": "nothing of it is ever used; --fix --torn removes it",
    "alien": "kvad leaves it as it is; it does not belong here",
    "unread": "look after the disk",
}


@click.command()
@model_argument
@click.option("--fix", is_flag=True, help="Of a folder of sessions: remove what dead writers left.")
@click.option("--torn", is_flag=True, help="With --fix: remove damaged files, too.")
@json_option
def doctor(model: Path, fix: bool, torn: bool, as_json: bool) -> None:
    """Look a checkpoint over: kvad's own, or a Hugging Face folder; or a folder of sessions.

    Headers, tensors against the config, weights that are not finite, the tokenizer against the vocabulary, sha256 sums.
    Of sessions: whole, torn, alien (not ours), or left behind by a process that died.  A line for each: `ok`, or
    `problem` and what to do.  Every byte is read.  Exit code 1 when there is a problem.

    \b
    kvad doctor runs/demo
    kvad doctor ~/models/llama-3.2-1b --json
    kvad doctor ~/.local/share/kvad/sessions --fix
    """
    if torn and not fix:
        raise click.UsageError("--torn says what --fix may remove: give both.")
    if is_folder(model):
        _look_at_sessions(model, (*("leftover",) * fix, *("torn",) * torn), as_json)
        return
    if fix:
        raise click.UsageError(f"--fix is for a folder of sessions, and {model} is none.")
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


def _look_at_sessions(folder: Path, removable: tuple[str, ...], as_json: bool) -> None:
    told, healthy = [], True
    for found in examined(folder):
        removed = found.state in removable
        if removed:
            found.path.unlink(missing_ok=True)
        fine = removed or found.state in FINE
        healthy &= fine
        todo = "removed" if removed else TODO.get(found.state, "")
        told.append({"file": found.path.name, "state": found.state, "ok": fine, "says": _says(found), "todo": todo})
        if not as_json:
            end = f"; {todo}" if todo else ""
            click.echo(f"{'ok' if fine else 'problem':<8}{found.state:<11}{found.path.name}: {_says(found)}{end}")
    if as_json:
        emit_json({"folder": folder, "healthy": healthy, "findings": told})
    click.get_current_context().exit(0 if healthy else 1)


def _says(found: Found) -> str:
    if found.header is None:
        return found.says.removeprefix(f"{found.path}: ")
    return f"a {found.header.kind} of {found.header.nbytes:,} bytes"
