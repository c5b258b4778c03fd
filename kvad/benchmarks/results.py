"""Result lines of a benchmark: a JSONL file with machine and commit that a stopped benchmark continues."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from kvad import inspection
from kvad.errors import SaveError, UsageError

ResultLine = dict[str, Any]
Progress = Callable[[str, int, int], None]  # (label, done, total)


def no_progress(_label: str, _done: int, _total: int) -> None: ...


class ResultFolder(NamedTuple):
    """Folder of a benchmark's results; earlier lines are reused, unless ``overwrite``."""

    path: Path
    overwrite: bool = False


class ResultLines:
    """Lines of one bench, appended to ``path`` (None: in memory only)."""

    def __init__(self, path: Path | None, settings: Mapping[str, Any], *, overwrite: bool = False) -> None:
        """Read earlier lines; UsageError for those of another model or options, DataError for another kind of file."""
        self.path, self.settings, self.lines = path, dict(settings), list[ResultLine]()
        if path is not None and path.exists() and path.stat().st_size and not overwrite:
            self.lines = inspection.plot.read_jsonl(path)
        for name, problem in (("digest", "another model"), ("options", "other options")):
            if any(line.get(name) != settings[name] for line in self.lines):
                raise UsageError(f"{path} was measured with {problem}", "choose another --out, or give --overwrite")
        self._write(self.lines, "w")

    def select(self, **key: Any) -> list[ResultLine]:
        """Return the lines with these values."""
        return [line for line in self.lines if all(line.get(name) == value for name, value in key.items())]

    def add(self, line: ResultLine) -> ResultLine:
        """Append a complete line to the file before the next measurement."""
        complete = {**line, **self.settings}
        self._write([complete], "a")
        self.lines.append(complete)
        return complete

    def _write(self, lines: Sequence[ResultLine], mode: Literal["w", "a"]) -> None:
        """Write lines; a non-finite number (an overflowed perplexity) is null, as JSON has no NaN."""
        if self.path is None:
            return

        def plain(value: object) -> object:
            return None if isinstance(value, float) and not math.isfinite(value) else value

        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open(mode, encoding="utf-8") as file:
                for line in lines:
                    file.write(json.dumps({key: plain(value) for key, value in line.items()}, allow_nan=False) + "\n")
        except OSError as error:
            raise SaveError(f"cannot write {self.path}: {error.strerror or error}") from error


def machine_info() -> str:
    """Describe the processor, the cores of this process, torch's threads and version."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        lines, processor = Path("/proc/cpuinfo").read_text("utf-8").splitlines(), platform.machine()
    except OSError:
        lines, processor = [], platform.processor() or platform.machine()
    processor = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), processor)
    return f"{processor}, {cores} cores, {torch.get_num_threads()} threads, torch {torch.__version__}"


def commit_id() -> str:
    """Return the commit of kvad's checkout, ``-dirty`` with changes; "" if installed without one."""
    command = ["git", "-C", str(Path(__file__).resolve().parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""
