"""Runs engines by turns: one computes, the others wait. Every value is one timed run of one turn.

For each shape and scenario, every engine computes it once untimed, and its tokens are compared with those of the
float32 model in transformers. Then come the rounds: in each, every engine has one turn, a short untimed run, which
brings its weights into memory again, and a timed one. The machine's limits are measured before each round and after
the last one.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from benchmarks.peers import convert
from benchmarks.peers.progress import Progress, expected_seconds
from benchmarks.peers.results import ROOT, EarlierLines, Line, Measurement, agreement_among, code_commit, result_line
from benchmarks.peers.scenarios import Scenario, Selection, cost_of, needs_of
from benchmarks.peers.shapes import Shape
from kvad.benchmarks.results import machine_info

Key = tuple[str, str]  # engine and precision
CHECKED_ROWS = 4  # of a batch; the reference reads each row alone, in float32
TICKS = os.sysconf("SC_CLK_TCK")  # of processor time, per second
RUNS_AFTER_LOADING = 2  # timed runs of a turn, if the engines are too large to stay loaded together
PAUSE = 0.3  # seconds between turns: threads that spin after their work have ended by then
MAX_RESIDENT_BYTES = 3 << 30
MIN_RUNS = 3  # timed runs that a time limit does not end: with fewer there is no spread


@dataclass(frozen=True)
class Settings:
    """What a run measures, and with what."""

    selections: tuple[Selection, ...]
    engines: tuple[str, ...]
    repeats: int  # timed runs of each engine
    max_seconds: float  # after a scenario's first turn began, no round beyond ``MIN_RUNS`` begins later than this
    threads: int
    cache: Path  # folder of checkpoints and conversions
    peers_python: str  # interpreter of the peers' environment
    kvad_python: str
    check: bool = True
    verbose: bool = False  # print every value
    log: IO[bytes] | int = subprocess.DEVNULL  # for what the engines print
    earlier: Sequence[Line] = ()  # scenarios that these lines complete are skipped

    def environment(self) -> dict[str, str]:
        """Return the variables of every worker: equal threads, this checkout's modules, no downloads.

        Python stores compiled modules, as an installation does; otherwise every load would compile them again.
        """
        threads = str(self.threads)
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        fixed = {
            "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
            "OPENVINO_TELEMETRY": "0",
        }  # fmt: skip
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        return {**inherited, **dict.fromkeys(names, threads), **fixed}


class WorkerError(RuntimeError):
    """A worker failed or ended, or (``is_refusal``) cannot run what was requested."""

    def __init__(self, message: str, *, is_refusal: bool = False) -> None:
        super().__init__(message)
        self.is_refusal = is_refusal


class WorkerProcess:
    """One engine's process."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: IO[bytes] | int) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=dict(environment), cwd=ROOT
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and return the answer; WorkerError if there is none, or if it reports a failure."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            raise WorkerError(f"the process ended with status {self._process.wait()}; --log FILE has what it printed")
        reply: dict[str, Any] = json.loads(line)
        for name in ("error", "unsupported"):
            if name in reply:
                raise WorkerError(reply[name], is_refusal=name == "unsupported")
        return reply

    def cpu_seconds(self) -> float:
        """Return the processor time that the process has used; 0 on systems without /proc."""
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_text("utf-8").rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / TICKS

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


FORMAT_OF = {
    ("kvad", "int8"): "kvad-int8", ("llama.cpp", "float32"): "gguf-float32", ("llama.cpp", "bfloat16"): "gguf-bfloat16",
    ("llama.cpp", "int8-cache"): "gguf-bfloat16", ("llama.cpp", "int8"): "gguf-int8",
    ("openvino", "bfloat16"): "openvino-bfloat16", ("openvino", "float32"): "openvino-bfloat16",
    ("openvino", "int8-cache"): "openvino-bfloat16", ("openvino", "int8"): "openvino-int8",
    ("ctranslate2", "float32"): "ctranslate2-float32", ("ctranslate2", "int8"): "ctranslate2-int8",
    ("kvad", "float32"): "hf", ("kvad", "bfloat16"): "hf", ("kvad", "int8-cache"): "hf",
    ("transformers", "float32"): "hf", ("transformers", "bfloat16"): "hf",
}  # fmt: skip


def format_of(engine: str, precision: str, shape: Shape) -> str | None:
    """Return the format that an engine reads for a precision; None if it has none for this shape."""
    if shape.is_encoder_decoder and engine in ("llama.cpp", "openvino"):
        return None
    if shape.experts and engine == "ctranslate2":
        return None
    return FORMAT_OF.get((engine, precision))


@dataclass(frozen=True)
class Task:
    """One scenario and the engines and precisions that are measured by turns."""

    selection: Selection
    scenario: Scenario
    keys: tuple[Key, ...]


@dataclass
class Rounds:
    """Results of one scenario."""

    able: dict[Key, Measurement] = field(default_factory=dict)
    refusals: dict[Key, str] = field(default_factory=dict)  # the reasons
    limits: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # by precision
    ended_after: float | None = None  # the time limit in seconds, if it ended the rounds


class Driver:
    """Measures what the settings name and yields one result line per engine, precision and scenario."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.header = {
            "machine": machine_info(), "threads": settings.threads, "commit": code_commit(), "checked": settings.check,
        }  # fmt: skip
        self.tasks = self._open_tasks()
        self._best_products: dict[str, float] = {}  # operations per second, by precision
        self._workers: dict[Key, LoadedWorker] = {}  # least recently used first
        self._limits_workers: dict[str, WorkerProcess] = {}  # by precision
        self._needs: dict[str, int] = {}
        self._max_resident = 1

    def run(self) -> Iterator[Line]:
        """Measure the scenarios that the earlier lines do not complete; yield a line per engine, refusals included."""
        tasks, repeats = self.tasks, self.settings.repeats
        progress = Progress(
            [expected_seconds(each.selection.shape, each.scenario, each.keys, repeats) for each in tasks]
        )
        for selection in self.settings.selections:
            mine = [each for each in tasks if each.selection is selection]
            if not mine:
                continue
            self._needs = needs_of(selection.scenarios)
            self._max_resident = max(1, MAX_RESIDENT_BYTES // selection.shape.file_bytes)
            try:
                paths = self._convert_all(selection.shape, dict.fromkeys(key for task in mine for key in task.keys))
                for task in mine:
                    yield from self._measure(task, paths, progress)
                    progress.finish()
            finally:
                self._close_all()

    def prepare(self) -> None:
        """Write and convert all checkpoints without measuring."""
        for task in self.tasks:
            self._convert_all(task.selection.shape, task.keys)

    def _open_tasks(self) -> list[Task]:
        """Return the scenarios to measure: those with a precision that the earlier lines do not complete."""
        settings, tasks, skipped = self.settings, list[Task](), 0
        earlier = EarlierLines(self.header, settings.repeats, settings.max_seconds, settings.earlier)
        for selection in settings.selections:
            shape = selection.shape
            able = {
                precision: [
                    engine
                    for engine in selection.engines(precision, settings.engines)
                    if format_of(engine, precision, shape) is not None
                ]
                for precision in selection.precisions
            }
            keys = tuple((engine, precision) for precision, engines in able.items() for engine in engines)
            for scenario in selection.scenarios:
                if keys and earlier.complete((shape.name, scenario.name, *key) for key in keys):
                    skipped += 1
                elif keys:
                    tasks.append(Task(selection, scenario, keys))
        if skipped:
            notice(f"skipped: {skipped} scenarios that were measured at commit {self.header['commit']} already")
        return tasks

    def _convert_all(self, shape: Shape, keys: Collection[Key]) -> dict[Key, Path]:
        """Convert the checkpoint for each engine; name and skip what cannot be."""
        self._convert("hf", shape)
        paths: dict[Key, Path] = {}
        for engine, precision in keys:
            name = format_of(engine, precision, shape)
            assert name is not None
            try:
                paths[engine, precision] = self._convert(name, shape)
            except (RuntimeError, OSError) as error:
                notice(f"skipped: {engine} {precision}: {error}")
        return paths

    def _convert(self, name: str, shape: Shape) -> Path:
        python = self.settings.kvad_python if name.startswith(("gguf", "kvad")) else self.settings.peers_python
        return convert.ensure(name, shape, self.settings.cache, python, self.settings.environment())

    def _measure(self, task: Task, paths: dict[Key, Path], progress: Progress) -> Iterator[Line]:
        shape, scenario = task.selection.shape, task.scenario
        name, prompts, rounds = f"{shape.name} {scenario.name}", scenario.prompts(shape), Rounds()
        progress.show(f"{name}: untimed runs", 0.0, always=True)
        for key in task.keys:
            if key in paths:
                with self._reported(key, f"skipped: {name}", rounds):
                    worker = self._worker(key, paths[key])
                    output = worker.prepare(scenario, prompts)
                    rounds.able[key] = Measurement(*key, versions=worker.versions, output=output)
        checks = self._check(shape, scenario, prompts, list(rounds.able.values())) if self.settings.check else {}
        self._run_rounds(task, paths, rounds, progress)
        place = {"shape": shape.name, "scenario": scenario.name}
        header = {**self.header, "date": time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime())}
        if code_commit() != header["commit"] and not header["commit"].endswith("-dirty"):
            header["commit"] += "-dirty"  # files changed during the run
        for (engine, precision), reason in rounds.refusals.items():
            names = {"engine": engine, "precision": precision, "reason": reason}
            yield {"bench": "peers-refused", **place, **names, **header}
        if rounds.ended_after is not None:
            header["ended_after"] = rounds.ended_after
        for measurement in rounds.able.values():
            if measurement.values:
                line = result_line(shape, scenario, measurement, rounds.limits[measurement.precision])
                yield {**line, **checks.get(measurement.key, {}), **header}

    def _run_rounds(self, task: Task, paths: dict[Key, Path], rounds: Rounds, progress: Progress) -> None:
        """Let the engines run by turns, until each has its timed runs or the time is over."""
        shape, scenario, able = task.selection.shape, task.scenario, rounds.able
        name, prompts, start = f"{shape.name} {scenario.name}", scenario.prompts(shape), time.monotonic()
        per_turn = 1 if len(able) <= self._max_resident else RUNS_AFTER_LOADING
        turns = -(-self.settings.repeats // per_turn) if able else 0
        for turn in range(turns):
            runs = turn * per_turn
            if runs >= MIN_RUNS and time.monotonic() - start > self.settings.max_seconds:
                rounds.ended_after = self.settings.max_seconds
                notice(f"{name}: {runs} timed runs only, because of --max-seconds")
                break
            progress.show(f"{name}: turn {turn + 1} of {turns}", (turn + 1) / (turns + 1))
            self._measure_limits(shape, scenario, rounds)
            first = turn % len(able)
            for key in [*able][first:] + [*able][:first]:
                with self._reported(key, f"failed: {name}", rounds):
                    for _ in range(per_turn):
                        able[key].add(self._turn(key, paths[key], scenario, prompts), scenario, turn)
                        if self.settings.verbose:
                            notice(f"{scenario.name} {' '.join(key)}: {able[key].values[-1]:.4g} {scenario.unit}")
        self._measure_limits(shape, scenario, rounds)

    def _measure_limits(self, shape: Shape, scenario: Scenario, rounds: Rounds) -> None:
        """Add a measurement of the machine's limits for each precision."""
        for precision in dict.fromkeys(precision for _, precision in rounds.able):
            step_bytes = cost_of(shape, scenario, precision).bytes / scenario.steps
            read, products = self._limits(step_bytes, precision)
            self._best_products[precision] = max(products, self._best_products.get(precision, 0.0))
            rounds.limits.setdefault(precision, []).append((read, self._best_products[precision]))

    @contextlib.contextmanager
    def _reported(self, key: Key, what: str, rounds: Rounds) -> Iterator[None]:
        """Report a worker's failure, end the worker and continue with the other engines."""
        try:
            yield
        except WorkerError as error:
            notice(f"{what} {' '.join(key)}: {error}")
            if error.is_refusal:
                rounds.refusals[key] = str(error)
            else:
                self._close(key)

    def _worker(self, key: Key, path: Path) -> LoadedWorker:
        """Return the engine's process with its model; start it, and end others beyond the limit, if needed."""
        if key in self._workers:
            self._workers[key] = self._workers.pop(key)
            return self._workers[key]
        while len(self._workers) >= self._max_resident:
            self._close(next(iter(self._workers)))
        process = self._start(key[0])
        try:
            worker = LoadedWorker(
                process, path=str(path), precision=key[1], needs=self._needs, threads=self.settings.threads
            )
        except WorkerError:
            process.close()
            raise
        self._workers[key] = worker
        return worker

    def _start(self, engine: str) -> WorkerProcess:
        python = self.settings.kvad_python if engine in ("kvad", "limits") else self.settings.peers_python
        module = f"benchmarks.peers.engines.{engine.replace('.', '_')}_engine"
        return WorkerProcess([python, "-m", module], self.settings.environment(), self.settings.log)

    def _turn(self, key: Key, path: Path, scenario: Scenario, prompts: list[list[int]]) -> dict[str, Any]:
        """Warm an engine up, let the others' threads come to rest, and return its timed run."""
        if scenario.kind == "load":
            self._close(key)
            time.sleep(PAUSE)
            worker = self._worker(key, path)
            reply = worker.process.ask(op="run", scenario=scenario.as_json(), prompts=prompts)
            self._close(key)
            reply["first_token_seconds"] = reply["seconds"]
            for name in ("seconds", "major_faults"):
                reply[name] += worker.loaded[name]
            return {**reply, "imported_rss": worker.loaded["imported_rss"]}
        worker = self._worker(key, path)
        if worker.prepare(scenario, prompts) is None:
            worker.warm_up(scenario, prompts)
        time.sleep(PAUSE)
        start, busy = time.perf_counter(), machine_cpu_seconds() - worker.process.cpu_seconds()
        reply = worker.process.ask(op="run", scenario=scenario.as_json(), prompts=prompts)
        busy = machine_cpu_seconds() - worker.process.cpu_seconds() - busy
        reply["others_cpu"] = max(0.0, busy) / (time.perf_counter() - start) / (os.cpu_count() or 1)
        return reply

    def _limits(self, step_bytes: float, precision: str) -> tuple[float, float]:
        """Return bytes per second of reading and operations per second of products."""
        if precision not in self._limits_workers:
            worker = self._limits_workers[precision] = self._start("limits")
            worker.ask(op="load", path="", precision=precision, needs={}, threads=self.settings.threads)
        values = []
        for kind in ("read", "multiply"):
            request = Scenario(kind, kind, (1,), int(step_bytes)).as_json()
            reply = self._limits_workers[precision].ask(op="run", scenario=request, prompts=[])
            values.append(reply["tokens"] / reply["seconds"])
        return values[0], values[1]

    def _check(
        self, shape: Shape, scenario: Scenario, prompts: list[list[int]], measurements: list[Measurement]
    ) -> dict[str, dict[str, Any]]:
        """Compare each engine's tokens with the float32 model of transformers, which reads them in one pass."""
        if shape.is_encoder_decoder:
            return agreement_among(measurements)
        worker = self._start("transformers")
        try:
            path = str(self._convert("hf", shape))
            worker.ask(op="load", path=path, precision="float32", needs=self._needs, threads=self.settings.threads)
            rows = range(0, len(prompts), max(1, len(prompts) // CHECKED_ROWS))[:CHECKED_ROWS]
            outputs = [[(each.output or [])[row] for row in rows] for each in measurements]
            reply = worker.ask(op="check", prompts=[prompts[row] for row in rows], outputs=outputs)
            return {each.key: check for each, check in zip(measurements, reply["checks"], strict=True)}
        except WorkerError as error:
            notice(f"tokens not checked: {shape.name} {scenario.name}: {error}")
            return {}
        finally:
            worker.close()

    def _close(self, key: Key) -> None:
        if key in self._workers:
            self._workers.pop(key).process.close()

    def _close_all(self) -> None:
        for key in list(self._workers):
            self._close(key)
        while self._limits_workers:
            self._limits_workers.popitem()[1].close()


class LoadedWorker:
    """A process that loaded its model."""

    def __init__(self, process: WorkerProcess, **request: Any) -> None:
        self.process = process
        self.loaded = process.ask(op="load", **request)
        self.versions: dict[str, str] = self.loaded["versions"]
        self._prepared: set[str] = set()

    def prepare(self, scenario: Scenario, prompts: list[list[int]]) -> list[list[int]] | None:
        """Run a scenario untimed, the first time only, and return its tokens."""
        if scenario.name in self._prepared:
            return None
        reply = self.process.ask(op="run", scenario=scenario.as_json(), prompts=prompts)
        self._prepared.add(scenario.name)
        output: list[list[int]] = reply["output"]
        return output

    def warm_up(self, scenario: Scenario, prompts: list[list[int]]) -> None:
        """Run a short part of a scenario: the system may have taken pages of the weights back meanwhile."""
        new = min(scenario.new, 4)
        short = replace(scenario, new=new)
        if scenario.kind not in ("decode", "prefix-hit"):  # their prompts are cached
            short = replace(short, lengths=(8,) * scenario.rows)
            prompts = [prompt[:8] for prompt in prompts]
        self.process.ask(op="run", scenario=short.as_json(), prompts=prompts)


def machine_cpu_seconds() -> float:
    """Return the processor time that all processes have used; 0 on systems without /proc."""
    try:
        user, nice, system = Path("/proc/stat").read_text("utf-8").split(maxsplit=4)[1:4]
    except OSError:
        return 0.0
    return (int(user) + int(nice) + int(system)) / TICKS


def notice(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
