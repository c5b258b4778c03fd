"""Comparison of training runs: differences of their configurations, their results and their curves.

A run is read from its folder: ``metrics.jsonl``, and the newest checkpoint's ``training/state.json`` for its
configuration (without one: ``run.toml``), its data and its tokenizer. Models are compared by their canonical
configuration, however they were written; one that began as a checkpoint is what ``model.init`` names. No torch.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvad import checkpoint, inspection
from kvad.config import ModelConfig, canonical_config
from kvad.errors import ConfigError, DataError, KvadError
from kvad.text import load_tokenizer
from kvad.train.config import RunConfig, read_toml

X_AXES = {"steps": "step", "tokens": "tokens", "seconds": "elapsed"}  # of a figure -> their key in metrics.jsonl
LABELS = {"steps": "step", "tokens": "tokens learned", "seconds": "seconds of training"}


@dataclass(frozen=True)
class RunSummary:
    """Result of a run so far."""

    parameters: int
    steps: int
    tokens: int
    seconds: float
    tokens_per_second: float  # over the whole run, evaluations and saves included
    loss: float  # smoothed
    validation: float | None
    best: float | None  # the lowest validation loss
    best_step: int | None
    mfu: float | None
    memory_peak: int | None
    precision: str
    device: str
    threads: int
    finished: bool
    failed: str | None  # the error that ended it


@dataclass(frozen=True)
class RunRecord:
    """A run."""

    name: str
    path: Path
    start: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]
    evals: Sequence[Mapping[str, Any]]
    finished: bool
    failed: str | None
    config: Mapping[str, Any]  # its tables, by dotted key, and "corpus"
    model: ModelConfig | None  # its [model] (vocabulary 1 if omitted), None if unknown
    tokenizer: str | None  # fingerprint, None without a checkpoint
    data: str | None  # fingerprint of its tokens, None without a checkpoint

    def summary(self, smooth: float) -> RunSummary:
        last = self.steps[-1]
        best = min(self.evals, key=lambda line: line["val_loss"], default=None)
        seconds = float(last["elapsed"])
        return RunSummary(
            parameters=self.start.get("parameters", 0),
            steps=last["step"],
            tokens=last["tokens"],
            seconds=seconds,
            tokens_per_second=last["tokens"] / seconds if seconds else 0.0,
            loss=smooth_curve([line["loss"] for line in self.steps], smooth)[-1],
            validation=self.evals[-1]["val_loss"] if self.evals else None,
            best=None if best is None else best["val_loss"],
            best_step=None if best is None else best["step"],
            mfu=last.get("mfu"),
            memory_peak=last.get("memory_peak"),
            precision=self.start.get("precision", ""),
            device=self.start.get("device", ""),
            threads=self.start.get("threads", 0),
            finished=self.finished,
            failed=self.failed,
        )


def read_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """Read runs, named by the distinct parts of their paths; raises as ``read_run``, and for a repeated run."""
    places = [path.resolve() for path in paths]
    if twice := next((path for at, path in enumerate(paths) if places[at] in places[:at]), None):
        raise DataError(f"{twice} is named twice")
    return [read_run(path, name) for path, name in zip(paths, _names(places), strict=True)]


def _names(places: Sequence[Path]) -> list[str]:
    for depth in range(1, max(len(place.parts) for place in places) + 1):
        names = ["/".join(place.parts[-depth:]) for place in places]
        if len(set(names)) == len(names):
            return names
    return [str(place) for place in places]


def read_run(path: Path, name: str = "") -> RunRecord:
    """Read a run; DataError for a folder that is no run, or has no logged step yet."""
    if not (path / "metrics.jsonl").is_file():
        problem = "is not a run: it has no metrics.jsonl" if path.is_dir() else "is not a folder"
        raise DataError(f"{path} {problem}", "Give the --out of a kvad train.")
    lines = inspection.plot.read_jsonl(path / "metrics.jsonl")
    steps = [line for line in lines if line.get("kind") == "step" and _finite(line.get("loss"))]
    failed = next((str(line.get("text", "")) for line in lines if line.get("kind") == "failed"), None)
    if not steps:
        if failed is not None:
            raise DataError(f"{path} failed before it had logged a step: {failed}", "start it again")
        raise DataError(f"{path} has logged no step yet", "wait for its first one")
    evals = [line for line in lines if line.get("kind") == "eval" and _finite(line.get("val_loss"))]
    start = next((line for line in lines if line.get("kind") == "run"), {})
    done = any(line.get("kind") == "end" for line in lines)
    config, model, tokenizer, data = _saved(path)
    return RunRecord(name or path.name, path, start, steps, evals, done, failed, config, model, tokenizer, data)


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _saved(path: Path) -> tuple[dict[str, Any], ModelConfig | None, str | None, str | None]:
    """Return configuration, model, tokenizer and tokens of the newest checkpoint."""
    steps = checkpoint.folder.list_steps(path)
    if not steps or not (steps[-1] / checkpoint.folder.TRAINING / "state.json").is_file():
        file = path / "run.toml"
        return (*(_read(read_toml(file)) if file.is_file() else ({}, None)), None, None)
    state = checkpoint.folder.read_json(steps[-1] / checkpoint.folder.TRAINING / "state.json")
    config, model = _read(state.get("run", {}))
    config["corpus"] = state.get("corpus")
    try:
        tokenizer: str | None = load_tokenizer(steps[-1]).fingerprint()
    except KvadError:  # of adapters and summarizers: it is stored with their model
        tokenizer = None
    return config, model, tokenizer, state.get("data_fingerprint")


def _read(tables: Mapping[str, Any]) -> tuple[dict[str, Any], ModelConfig | None]:
    """Return tables by dotted key, defaults included, and the resulting model."""
    model: ModelConfig | None = None
    try:
        run = RunConfig.from_dict(tables)
        tables = run.to_dict()
        if run.objective.kind != "summarizer" and run.init is None:
            model = run.resolve(vocab=1)
    except ConfigError:  # of another version of kvad
        pass
    # As in run.toml, null is a value in [model], unlike an omitted key.
    config = {k: "null" if value is None and k.startswith("model.") else value for k, value in _flat(tables)}
    if config.get("objective.kind") != "summarizer":  # run.toml omits it
        config = {key: value for key, value in config.items() if not key.startswith("summarizer.")}
    return config, model


def _flat(table: Mapping[str, Any], where: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{where}{key}.")
        else:
            yield f"{where}{key}", value


def run_differences(runs: Sequence[RunRecord]) -> dict[str, list[Any]]:
    """Return key -> each run's value, None if it has no such key, for keys whose values differ."""
    tables = _tables(runs)
    keys = dict.fromkeys(key for table in tables for key in table)
    known = [table for table in tables if table]
    values = {key: [table.get(key) for table in tables] for key in keys}
    if len(known) < len(runs):  # unknown configurations cannot differ
        values = {key: each for key, each in values.items() if len({str(table.get(key)) for table in known}) > 1}
    if any(run.data is None for run in runs):
        values.pop("corpus", None)
    return {key: each for key, each in values.items() if any(value != each[0] for value in each)}


def _tables(runs: Sequence[RunRecord]) -> list[Mapping[str, Any]]:
    """Return each run's keys and values, with canonical models if all are known, else as written."""
    models = [run.model for run in runs if run.config]
    canonical = [canonical_config(model) for model in models if model is not None]
    if len(canonical) < len(models):
        return [run.config for run in runs]
    are_equal, tables = all(config == canonical[0] for config in canonical), list[Mapping[str, Any]]()
    for run in runs:
        table = {key: value for key, value in run.config.items() if not key.startswith("model.")}
        if run.model is not None and not are_equal:  # else neither the model nor the preset's name differs
            preset = {key: value for key, value in run.config.items() if key == "model.preset"}
            parts = {f"model.{key}": value for key, value in _flat(run.model.to_dict()) if value is not None}
            if run.model.max_seq_len == run.config["data.seq_len"]:
                del parts["model.max_seq_len"]
            table = {**preset, **parts, **table}
        tables.append(table)
    return tables


def comparison_warnings(runs: Sequence[RunRecord]) -> list[str]:
    """Return failed runs, and why losses, or validation losses, of these runs are not comparable."""
    warnings = [f"{run.name} failed: {run.failed}" for run in runs if run.failed is not None]
    if unsaved := [run.name for run in runs if run.data is None]:
        warnings.append(f"no checkpoint of {', '.join(unsaved)} yet: its tokenizer and its texts are not known")
    if len({run.tokenizer for run in runs if run.tokenizer is not None}) > 1:
        warnings.append(
            "tokenizers differ: losses are nats per token of each, and NOT comparable (kvad eval says bits per byte)"
        )
    if len({run.config["objective.kind"] for run in runs if "objective.kind" in run.config}) > 1:
        warnings.append("objectives differ: their losses are NOT comparable")
    keys = ("data.validation_fraction", "data.seq_len", "data.order", "train.seed", "train.eval_tokens")
    texts = {(run.data, *(str(run.config.get(key)) for key in keys)) for run in runs if run.data is not None}
    if len(texts) > 1:
        warnings.append("texts, or what is held out of them, differ: validation losses are of different texts")
    return warnings


def draw_runs(
    runs: Sequence[RunRecord], out: Sequence[Path], x: str = "steps", smooth: float | None = None
) -> list[Path]:
    """Draw the curves into every file of ``out``. Raises as ``plot.draw_series``."""
    return inspection.plot.draw_panels(loss_panels(runs, x, smooth), out, x_label=LABELS[x])


def plot_run(path: Path) -> list[Path]:
    """Draw ``loss`` and ``curves`` of a run's folder, each as PNG and SVG; ``[]`` if no step was logged yet."""
    loss = inspection.plot.draw_loss(path / "metrics.jsonl", [path / "loss.png", path / "loss.svg"])
    return loss and [*loss, *draw_runs([read_run(path)], [path / "curves.png", path / "curves.svg"])]


def smooth_curve(values: Sequence[float], keep: float) -> list[float]:
    """Compute a moving average; a value retains ``keep`` of its weight with each later one."""
    found, average = list[float](), 0.0
    for count, value in enumerate(values, 1):
        average = keep * average + (1 - keep) * value
        found.append(average / (1 - keep**count))
    return found


def default_smoothing(runs: Sequence[RunRecord]) -> float:
    """Return the default smoothing: the same for all runs, none for few points."""
    return max(0.0, 1 - 40 / max(len(run.steps) for run in runs))


def loss_panels(
    runs: Sequence[RunRecord], x: str = "steps", smooth: float | None = None
) -> list[inspection.plot.PlotPanel]:
    """Build panels of loss (raw, smoothed, validation), learning rate and gradient norm, a color for each run."""
    key, several = X_AXES[x], len(runs) > 1
    keep = default_smoothing(runs) if smooth is None else smooth
    losses, rates, norms = (list[inspection.plot.PlotSeries]() for _ in range(3))
    for color, run in enumerate(runs):
        at = [float(line[key]) for line in run.steps]
        raw = [line["loss"] for line in run.steps]
        losses.append(inspection.plot.PlotSeries("" if several else "training", at, raw, faint=True, color=color))
        label = run.name if several else "training, smoothed"
        losses.append(inspection.plot.PlotSeries(label, at, smooth_curve(raw, keep), color=color))
        if run.evals:
            eval_at = [float(_at(run.steps, key, line["step"])) for line in run.evals]
            values, label = [line["val_loss"] for line in run.evals], "" if several else "validation"
            eval_color = color if several else color + 1
            losses.append(
                inspection.plot.PlotSeries(label, eval_at, values, dots=True, dashed=several, color=eval_color)
            )
        rates.append(inspection.plot.PlotSeries("", at, [line["lr"] for line in run.steps], color=color))
        points = [(a, line["grad_norm"]) for a, line in zip(at, run.steps, strict=True) if _finite(line["grad_norm"])]
        norms.append(inspection.plot.PlotSeries("", [a for a, _ in points], [norm for _, norm in points], color=color))
    return [
        inspection.plot.PlotPanel(
            "loss (nats per token)", losses, "thin: raw; line: smoothed; dots: validation" * several
        ),
        inspection.plot.PlotPanel("learning rate", rates),
        inspection.plot.PlotPanel("gradient norm", norms, log_y=True),
    ]


def _at(steps: Sequence[Mapping[str, Any]], key: str, step: int) -> float:
    """Interpolate the axis position of a step between the logged ones."""
    numbers = [int(line["step"]) for line in steps]
    high = min(bisect_left(numbers, step), len(steps) - 1)
    low = max(high - 1, 0)
    ends = float(steps[low][key]), float(steps[high][key])
    if numbers[high] <= step or low == high:
        return float(step) if key == "step" else ends[1]
    share = (step - numbers[low]) / (numbers[high] - numbers[low])
    return ends[0] * (1 - share) + ends[1] * share
