"""Result lines of a benchmark: a JSONL file with machine and commit that a stopped benchmark continues."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from kvad import inspection
from kvad.errors import SaveError, UsageError

ResultLine = dict[str, Any]


class ResultFolder(NamedTuple):
    """Folder of a benchmark's results; earlier lines are reused, unless ``overwrite``."""

    path: Path
    overwrite: bool = False


class ResultLines:
    """Lines of one bench, appended to ``path`` (None: in memory only)."""

    def __init__(self, path: Path | None, settings: Mapping[str, Any], *, overwrite: bool = False) -> None:
        """Read earlier lines.

        Raises:
            UsageError: For a file of another model or other options.
            DataError: For another kind of file.
        """
        self.path, self.settings, self.lines = path, dict(settings), list[ResultLine]()
        if path is not None and path.exists() and path.stat().st_size and not overwrite:
            self.lines = _earlier(path, self.settings)
        self._write(self.lines, "w")

    def find(self, **key: Any) -> ResultLine | None:
        return next((line for line in self.lines if all(line.get(name) == value for name, value in key.items())), None)

    def add(self, line: ResultLine) -> ResultLine:
        """Append a complete line to the file before the next measurement."""
        complete = {**line, **self.settings}
        self._write([complete], "a")
        self.lines.append(complete)
        return complete

    def _write(self, lines: Sequence[ResultLine], mode: Literal["w", "a"]) -> None:
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open(mode, encoding="utf-8") as file:
                file.writelines(f"{_json(line)}\n" for line in lines)
        except OSError as error:
            raise SaveError(f"cannot write {self.path}: {error.strerror or error}") from error


def _json(line: ResultLine) -> str:
    """Encode a line; a non-finite number (an overflowed perplexity) is null, as JSON has no NaN."""
    plain = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in line.items()
    }
    return json.dumps(plain, allow_nan=False)


def _earlier(path: Path, settings: Mapping[str, Any]) -> list[ResultLine]:
    lines = inspection.plot.read_jsonl(path)
    for line in lines:
        for name in ("digest", "options"):
            if line.get(name) != settings[name]:
                what = "another model" if name == "digest" else "other options"
                raise UsageError(f"{path} was measured with {what}", "choose another --out, or give --overwrite")
    return lines


def machine_info() -> str:
    """Describe the processor, the cores of this process, torch's threads and version."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{_processor()}, {cores} cores, {torch.get_num_threads()} threads, torch {torch.__version__}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def commit_id() -> str:
    """Return the commit of kvad's checkout, ``-dirty`` with changes.

    "" if installed without one.
    """
    here = Path(__file__).resolve().parent
    try:
        found = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""
