"""``kvad doctor MODEL|FOLDER``: check a checkpoint, a session folder or a prefix cache folder for damage.

Nothing is removed without --fix, and foreign files are never removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from kvad import inspection
from kvad.cache import sessions
from kvad.cli import parameters
from kvad.cli.fields import argument, command, option
from kvad.cli.output import emit_json, exit_with
from kvad.cli.parameters import JsonOption

OK_STATES = ("whole", "writing")
ADVICE = {
    "leftover": "--fix removes it",
    "damaged": "it is never used; --fix --remove-damaged removes it",
    "foreign": "kvad does not change it; it does not belong here",
    "unread": "check the disk",
}


class _DoctorOptions(parameters.FormatOptions, parameters.PolicyOptions, parameters.EndlessOption, JsonOption):
    model: Path = argument("MODEL|FOLDER")
    fix: bool = option(
        "Remove leftovers and damaged files of a prefix cache, or accept edited text files of a checkpoint"
    )
    adapter: tuple[str, ...] = option(
        "LoRA adapter that requests choose, as in kvad serve: check it, and say what it changes", metavar="NAME=FOLDER"
    )
    dtype: parameters.Dtype | None = option("Dtype of the computation [default: as stored]")
    deterministic: bool = option("Results are independent of the batch")
    compile: bool = option("The layers are compiled with torch.compile")
    remove_damaged: bool = option("With --fix and a session folder: also remove damaged files")


@command("doctor", _DoctorOptions)
def doctor_command(options: _DoctorOptions) -> None:
    """Check a checkpoint of kvad or Hugging Face, a GGUF file, a session folder or a prefix cache folder for damage.

    Each check prints one line: `ok`, or `problem` and the remedy. Every byte is read. Exit code 1 if any check fails.

    Checkpoint: headers, tensors against the config, weights that are not finite, the tokenizer against the vocabulary,
    sha256 sums; what runs the decoder on a CPU and a GPU with the given dtype and cache options; of each --adapter
    whether it fits, what runs its steps, and its memory. --fix accepts text files that you edited, such as config.json:
    their sums are written into the manifest. Folders: files that are whole, damaged, foreign or left by a process that
    died. --fix removes damaged files and leftovers of a prefix cache (blocks are recomputed), and leftovers of
    sessions; never foreign files.

    \b
    kvad doctor runs/demo
    kvad doctor ~/models/llama-3.2-1b --json
    kvad doctor ./Qwen3-0.6B --adapter sql=runs/sql
    kvad doctor ./Qwen3-0.6B --cache-dtype int8 --policy "sinks(4, 252)"
    kvad doctor ~/.cache/kvad/prefix-cache --fix
    kvad doctor ~/.local/share/kvad/sessions --fix
    """
    folder, fix, remove_damaged = options.model, options.fix, options.remove_damaged
    is_session_dir = sessions.directory.is_session_dir(folder)
    if remove_damaged and not fix:
        raise click.UsageError("--remove-damaged needs --fix.")
    if remove_damaged and not is_session_dir:
        raise click.UsageError(f"--remove-damaged needs a session folder, got {folder}.")
    adapters = parameters.named_adapters(options.adapter)
    is_cache_dir = not is_session_dir and inspection.doctor.is_cache_dir(folder)
    if adapters and (is_session_dir or is_cache_dir):
        raise click.UsageError(f"--adapter needs a checkpoint, got {folder}.")
    if is_session_dir:
        checks = _check_sessions(folder, (*("leftover",) * fix, *("damaged",) * remove_damaged))
    elif is_cache_dir:
        checks = map(_text_and_record, inspection.doctor.check_cache_dir(folder, fix=fix))
    else:
        kernel_options = _kernel_options(options)
        found = inspection.doctor.check_checkpoint(folder, fix=fix, adapters=adapters, options=kernel_options)
        checks = map(_text_and_record, found)
    findings = []
    for text, finding in checks:
        findings.append(finding)
        if not options.as_json:
            advice = f"; {finding['advice']}" if finding["advice"] else ""
            click.echo(f"{'ok' if finding['ok'] else 'problem':<8}{text}{advice}")
    healthy = all(finding["ok"] for finding in findings)
    if options.as_json:
        emit_json({"folder" if is_session_dir else "model": folder, "healthy": healthy, "findings": findings})
    exit_with(0 if healthy else 1)


def _kernel_options(options: _DoctorOptions) -> inspection.doctor.KernelOptions:
    """Return the options that decide what computes a model."""
    fields = parameters.cache_fields(options)
    fields |= {name: getattr(options, name) for name in ("cache_dtype", "cache_key_dtype", "cache_value_dtype")}
    return inspection.doctor.KernelOptions(options.dtype, fields, options.deterministic, options.compile)


def _text_and_record(finding: inspection.doctor.CheckResult) -> tuple[str, dict[str, Any]]:
    return f"{finding.check:<11}{finding.message}", finding._asdict()


def _check_sessions(folder: Path, removable: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Check the files of a session folder and remove those in a removable state."""
    for file in sessions.directory.inspect_session(folder):
        removed = file.state in removable
        if removed:
            file.path.unlink(missing_ok=True)
        if file.header is None:
            message = file.problem.removeprefix(f"{file.path}: ")
        else:
            message = f"a {file.header.kind} of {file.header.nbytes:,} bytes"
        record = {"file": file.path.name, "state": file.state, "ok": removed or file.state in OK_STATES}
        advice = "removed" if removed else ADVICE.get(file.state, "")
        yield f"{file.state:<11}{file.path.name}: {message}", {**record, "message": message, "advice": advice}
