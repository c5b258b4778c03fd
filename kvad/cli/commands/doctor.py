"""``kvad doctor MODEL|FOLDER``: look a checkpoint over, or a folder of sessions or of a tier; say what to do about what
is wrong.

Nothing is removed that was not asked for, and never what is not ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvad.cache import sessions
from kvad.cli.options import emit_json, json_option
from kvad.errors import UsageError

if TYPE_CHECKING:
    from kvad import inspection

OK_STATES = ("whole", "writing")
ADVICE = {
    "leftover": "--fix removes it",
    "torn": "nothing of it is ever used; --fix --torn removes it",
    "alien": "kvad leaves it as it is; it does not belong here",
    "unread": "look after the disk",
}


@click.command()
@click.argument("model", metavar="MODEL|FOLDER", type=click.Path(path_type=Path))
@click.option("--fix", is_flag=True, help="Remove what dead writers left, and of a tier's folder what is damaged.")
@click.option("--torn", is_flag=True, help="With --fix, of a folder of sessions: remove damaged files, too.")
@json_option
def doctor_command(model: Path, fix: bool, torn: bool, as_json: bool) -> None:
    """Look a checkpoint over: kvad's own, or a Hugging Face folder; or a folder of sessions, or of a tier.

    A line for each thing looked at: `ok`, or `problem` and what to do.  Every byte is read.  Exit code 1: there is a
    problem.

    Of a checkpoint: headers, tensors against the config, weights that are not finite, the tokenizer against the
    vocabulary, sha256 sums.  Of the folders: what is whole, torn (damaged), alien (not ours) or left by a process that
    died.  --fix removes of a tier what is torn or left (it is computed again), of sessions what is left; what is alien
    it never touches.

    \b
    kvad doctor runs/demo
    kvad doctor ~/models/llama-3.2-1b --json
    kvad doctor ~/.cache/kvad/tier --fix
    kvad doctor ~/.local/share/kvad/sessions --fix
    """
    if torn and not fix:
        raise click.UsageError("--torn says what --fix may remove: give both.")
    if sessions.directory.is_session_dir(model):
        _check_sessions(model, (*("leftover",) * fix, *("torn",) * torn), as_json)
        return
    if torn:
        raise click.UsageError(f"--torn is for a folder of sessions, and {model} is none.")
    findings = []
    for finding in _examined(model, fix):
        findings.append(finding)
        if not as_json:
            todo = f"; {finding.advice}" if finding.advice else ""
            click.echo(f"{'ok' if finding.ok else 'problem':<8}{finding.check:<11}{finding.message}{todo}")
    healthy = all(finding.ok for finding in findings)
    if as_json:
        emit_json({"model": model, "healthy": healthy, "findings": findings})
    click.get_current_context().exit(0 if healthy else 1)


def _examined(folder: Path, fix: bool) -> Iterator[inspection.doctor.CheckResult]:
    """By the doctor for what it is.  UsageError: a checkpoint cannot be fixed."""
    from kvad import inspection

    if inspection.doctor.is_cache_dir(folder):
        yield from inspection.doctor.check_cache_dir(folder, fix=fix)
        return
    if fix:
        raise UsageError(
            f"--fix: {folder} is no folder of sessions and no tier's", "a checkpoint is copied or downloaded again"
        )
    yield from inspection.doctor.check_checkpoint(folder)


def _check_sessions(folder: Path, removable: tuple[str, ...], as_json: bool) -> None:
    told, healthy = [], True
    for found in sessions.directory.inspect_session(folder):
        removed = found.state in removable
        if removed:
            found.path.unlink(missing_ok=True)
        fine = removed or found.state in OK_STATES
        healthy &= fine
        todo = "removed" if removed else ADVICE.get(found.state, "")
        told.append(
            {"file": found.path.name, "state": found.state, "ok": fine, "says": _format_result(found), "todo": todo}
        )
        if not as_json:
            end = f"; {todo}" if todo else ""
            click.echo(
                f"{'ok' if fine else 'problem':<8}{found.state:<11}{found.path.name}: {_format_result(found)}{end}"
            )
    if as_json:
        emit_json({"folder": folder, "healthy": healthy, "findings": told})
    click.get_current_context().exit(0 if healthy else 1)


def _format_result(found: sessions.directory.SessionFile) -> str:
    if found.header is None:
        return found.problem.removeprefix(f"{found.path}: ")
    return f"a {found.header.kind} of {found.header.nbytes:,} bytes"
