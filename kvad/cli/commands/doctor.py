"""``kvad doctor MODEL|FOLDER``: check a checkpoint, a session folder or a prefix cache folder for damage.

Nothing is removed without --fix, and foreign files are never removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvad.cache import sessions
from kvad.cli.fields import argument, command, option
from kvad.cli.output import emit_json, exit_with
from kvad.cli.parameters import JsonOption
from kvad.errors import UsageError

if TYPE_CHECKING:
    from kvad import inspection

OK_STATES = ("whole", "writing")
ADVICE = {
    "leftover": "--fix removes it",
    "damaged": "it is never used; --fix --remove-damaged removes it",
    "foreign": "kvad does not change it; it does not belong here",
    "unread": "check the disk",
}


class _DoctorOptions(JsonOption):
    model: Path = argument("MODEL|FOLDER")
    fix: bool = option("Remove leftovers of dead processes, and damaged files of a prefix cache")
    remove_damaged: bool = option("With --fix and a session folder: also remove damaged files")


@command("doctor", _DoctorOptions)
def doctor_command(options: _DoctorOptions) -> None:
    """Check a kvad checkpoint, a Hugging Face folder, a session folder or a prefix cache folder for damage.

    Each check prints one line: `ok`, or `problem` and the remedy. Every byte is read. Exit code 1 if any check fails.

    Checkpoint: headers, tensors against the config, weights that are not finite, the tokenizer against the vocabulary,
    sha256 sums. Folders: files that are whole, damaged, foreign or left by a process that died. --fix removes damaged
    files and leftovers of a prefix cache (blocks are recomputed), and leftovers of sessions; never foreign files.

    \b
    kvad doctor runs/demo
    kvad doctor ~/models/llama-3.2-1b --json
    kvad doctor ~/.cache/kvad/prefix-cache --fix
    kvad doctor ~/.local/share/kvad/sessions --fix
    """
    model, fix, remove_damaged, as_json = options.model, options.fix, options.remove_damaged, options.as_json
    if remove_damaged and not fix:
        raise click.UsageError("--remove-damaged needs --fix.")
    if sessions.directory.is_session_dir(model):
        _check_sessions(model, (*("leftover",) * fix, *("damaged",) * remove_damaged), as_json)
        return
    if remove_damaged:
        raise click.UsageError(f"--remove-damaged needs a session folder, got {model}.")
    findings = []
    for finding in _check_folder(model, fix):
        findings.append(finding)
        if not as_json:
            todo = f"; {finding.advice}" if finding.advice else ""
            click.echo(f"{'ok' if finding.ok else 'problem':<8}{finding.check:<11}{finding.message}{todo}")
    healthy = all(finding.ok for finding in findings)
    if as_json:
        emit_json({"model": model, "healthy": healthy, "findings": findings})
    exit_with(0 if healthy else 1)


def _check_folder(folder: Path, fix: bool) -> Iterator[inspection.doctor.CheckResult]:
    """Run the checks for the kind of folder; --fix does not apply to a checkpoint."""
    from kvad import inspection

    if inspection.doctor.is_cache_dir(folder):
        yield from inspection.doctor.check_cache_dir(folder, fix=fix)
        return
    if fix:
        raise UsageError(
            f"--fix: {folder} is neither a session folder nor a prefix cache", "copy or download a checkpoint again"
        )
    yield from inspection.doctor.check_checkpoint(folder)


def _check_sessions(folder: Path, removable: tuple[str, ...], as_json: bool) -> None:
    findings, healthy = [], True
    for file in sessions.directory.inspect_session(folder):
        removed = file.state in removable
        if removed:
            file.path.unlink(missing_ok=True)
        is_ok = removed or file.state in OK_STATES
        healthy &= is_ok
        advice = "removed" if removed else ADVICE.get(file.state, "")
        findings.append(
            {"file": file.path.name, "state": file.state, "ok": is_ok, "message": _describe(file), "advice": advice}
        )
        if not as_json:
            end = f"; {advice}" if advice else ""
            click.echo(f"{'ok' if is_ok else 'problem':<8}{file.state:<11}{file.path.name}: {_describe(file)}{end}")
    if as_json:
        emit_json({"folder": folder, "healthy": healthy, "findings": findings})
    exit_with(0 if healthy else 1)


def _describe(file: sessions.directory.SessionFile) -> str:
    if file.header is None:
        return file.problem.removeprefix(f"{file.path}: ")
    return f"a {file.header.kind} of {file.header.nbytes:,} bytes"
