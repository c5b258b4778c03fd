"""Measure the notes' claims about training: one change at a time, equal budgets, several seeds.

    python benchmarks/training_claims.py input.txt --lines train.en --out dev/results/claims.jsonl
    python benchmarks/training_claims.py --table dev/results/claims.jsonl --figure docs/figures/claims-depth.svg

``input.txt`` is a long text (Tiny Shakespeare in training-claims.md); ``--lines`` has many short documents, one per
line, of which the last thousand are held out. The output is a JSON line per run: the final validation loss, and the
norm of each layer's gradient at the first step and after a hundred (before clipping). Runs that are already in the
file are skipped. ``--table`` prints Markdown: mean and range over the seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvad.benchmarks.results import commit_id, machine_info
from kvad.benchmarks.scorers import UncachedScorer
from kvad.errors import NumericalError
from kvad.evaluation.text import WindowOptions, encode_documents, evaluate_text
from kvad.inspection.plot import PlotSeries, draw_series
from kvad.llm import LLM
from kvad.model.transformer import TransformerLayer
from kvad.train.config.run import RunConfig, apply_overrides, read_toml
from kvad.train.loop.run import train_model
from kvad.train.monitoring.callbacks import Callback, StepReport, TrainingContext
from kvad.train.setup.initialize import init_weights

BASE = Path(__file__).parent.parent / "recipes" / "claims.toml"
MEASURED_STEPS = (1, 100)  # steps whose gradients are measured
NUM_HELD_OUT = 1000  # lines


@dataclass(frozen=True)
class Variant:
    """A change of the base run.

    Args:
        changes: KEY=VALUE, as for ``--set``.
        glorot: Initialize matrices after Glorot & Bengio.
        bare: Replace a layer's input by its branches' outputs, without residuals.
        lines: Train on short documents and evaluate each separately.
    """

    name: str
    changes: tuple[str, ...] = ()
    glorot: bool = False
    bare: bool = False
    lines: bool = False


DEEP = ("decoder.num_layers=8",)
POST = ("decoder.norm_position=post", "decoder.final_norm=false")
COLD = ("optim.warmup_steps=0",)
TOGETHER = ("data.order=epochs", "data.document_unit=lines", "data.seq_len=256", "train.batch_size=4")
CLAIMS: dict[str, tuple[Variant, ...]] = {
    "norms": (
        Variant("pre-norm, warm-up", DEEP, glorot=True),
        Variant("pre-norm, none", (*DEEP, *COLD), glorot=True),
        Variant("post-norm, warm-up", (*DEEP, *POST), glorot=True),
        Variant("post-norm, none", (*DEEP, *POST, *COLD), glorot=True),
    ),
    "parts": (
        Variant("as it is: tied head, 8 heads, rotary"),
        Variant("untied head", ("tie_embeddings=false",)),
        Variant("1 head", ("decoder.layer_types.L.attention.num_heads=1",)),
        Variant("no positions", ("decoder.layer_types.L.attention.position=null",)),
        Variant("no residuals", bare=True),
    ),
    "documents": (
        Variant("isolated", TOGETHER, lines=True),
        Variant(
            "separator alone", (*TOGETHER, "data.isolate_documents=false", "data.reset_positions=false"), lines=True
        ),
    ),
}


class GradientNorms(Callback):
    """Callback that changes the model before its first step, and measures the gradients of its layers."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self.depths: dict[int, list[float]] = {}

    def on_model(self, subject: TrainingContext) -> None:
        self.model = subject.model
        if self.variant.glorot:
            init_weights(self.model)
        for module in self.model.modules():
            if self.variant.bare and isinstance(module, TransformerLayer):
                module._add = lambda _x, branch: branch  # type: ignore[method-assign]

    def on_step(self, report: StepReport) -> None:
        if report.step in MEASURED_STEPS:
            assert self.model.decoder is not None
            every = _norm(list(self.model.parameters()))
            scale = report.grad_norm / every if every else 0.0  # undo the clipping
            self.depths[report.step] = [scale * _norm(list(each.parameters())) for each in self.model.decoder.layers]


def _norm(parameters: Sequence[torch.nn.Parameter]) -> float:
    squares = [float(p.grad.double().square().sum()) for p in parameters if p.grad is not None]
    return math.sqrt(sum(squares))


def run(variant: Variant, seed: int, text: Path, lines: Path | None) -> dict[str, Any]:
    """Run one training. A loss that is not a number is recorded too."""
    changes = [tuple(change.split("=", 1)) for change in (*variant.changes, f"train.seed={seed}")]
    config = RunConfig.from_dict(apply_overrides(read_toml(BASE), changes))  # type: ignore[arg-type]
    look = GradientNorms(variant)
    with tempfile.TemporaryDirectory() as folder:
        corpus = text
        if variant.lines:
            assert lines is not None
            every = lines.read_text("utf-8").splitlines()
            corpus, held_out = Path(folder, "lines.txt"), every[-NUM_HELD_OUT:]
            corpus.write_text("\n".join(every[:-NUM_HELD_OUT]) + "\n", "utf-8")
        try:
            outcome = train_model(config, [corpus], Path(folder, "run"), callbacks=[look])
        except NumericalError as error:
            return {"loss": None, "why": str(error), "depths": look.depths}
        if outcome.reason == "interrupted":  # no result
            raise KeyboardInterrupt
        runs = {"loss": outcome.val_loss, "tokens": outcome.tokens, "depths": look.depths}
        return {**runs, "loss": _document_loss(Path(folder, "run"), held_out)} if variant.lines else runs


def _document_loss(out: Path, held_out: Sequence[str]) -> float:
    """Return the mean nats per token of documents, each evaluated separately after the separator."""
    with LLM.load(out, max_num_seqs=1, max_seq_len=256) as llm:
        assert llm.tokenizer is not None
        how = WindowOptions(256, 128, "start")
        documents = encode_documents(llm.tokenizer, held_out)
        return evaluate_text(UncachedScorer(llm.model), documents, how, llm.texts.opening_token()).loss


def table(path: Path) -> str:
    """Format the results as Markdown."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    runs = ["| | | loss, mean | range | runs |", "|---|---|--:|--:|--:|"]
    for claim, variants in CLAIMS.items():
        for variant in variants:
            variant_runs = [line for line in lines if (line["claim"], line["variant"]) == (claim, variant.name)]
            losses = [line["loss"] for line in variant_runs if line["loss"] is not None]
            label = f"{statistics.mean(losses):.3f} | {min(losses):.3f} to {max(losses):.3f}" if losses else "none |"
            nan_runs = f", {len(variant_runs) - len(losses)} broke" if len(losses) < len(variant_runs) else ""
            runs.append(f"| {claim} | {variant.name} | {label} | {len(variant_runs)}{nan_runs} |")
    return "\n".join(runs)


def figure(path: Path, out: Path) -> None:
    """Plot the gradient of each layer at the first step, averaged over the seeds."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    series = []
    for variant in CLAIMS["norms"][::2]:
        variant_runs = [line["depths"] for line in lines if (line["claim"], line["variant"]) == ("norms", variant.name)]
        for step in MEASURED_STEPS:
            stored_runs = [each[str(step)] for each in variant_runs if str(step) in each]
            means = [statistics.mean(layer) for layer in zip(*stored_runs, strict=True)]
            name = f"{variant.name.split(',')[0]}, step {step}"
            series.append(PlotSeries(name, list(range(1, len(means) + 1)), means, dots=True))
    draw_series(series, [out], x_label="layer", y_label="norm of its gradient", log_y=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="?", type=Path)
    parser.add_argument("--lines", type=Path)
    parser.add_argument("--out", type=Path, default=Path("dev/results/claims.jsonl"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--claims", nargs="+", choices=CLAIMS, default=list(CLAIMS))
    parser.add_argument("--table", type=Path, metavar="FILE")
    parser.add_argument("--figure", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.table is not None:
        print(table(options.table))
        if options.figure is not None:
            figure(options.table, options.figure)
        return
    if options.text is None or ("documents" in options.claims and options.lines is None):
        parser.error("a text, and --lines for the claim about documents")
    before = options.out.read_text().splitlines() if options.out.exists() else []
    there = {(line["claim"], line["variant"], line["seed"]) for line in map(json.loads, before)}
    for seed in range(1, options.seeds + 1):
        for claim in options.claims:
            for variant in CLAIMS[claim]:
                if (claim, variant.name, seed) in there:
                    continue
                runs = run(variant, seed, options.text, options.lines)
                line = {
                    "claim": claim,
                    "variant": variant.name,
                    "seed": seed,
                    **runs,
                    "machine": machine_info(),
                    "commit": commit_id(),
                }
                with options.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(f"{claim}: {variant.name}, seed {seed}: {runs['loss']}", flush=True)


if __name__ == "__main__":
    main()
