"""Cost of scheduled sampling: seconds of an optimizer step compared with teacher forcing, in the same run.

    python benchmarks/scheduled_sampling.py
    python benchmarks/scheduled_sampling.py --preset transformer-base --steps 5

The output is one JSON line. Steps of both kinds alternate on the same rows, with random weights and half of the
decoder's tokens sampled; medians of seconds, and their ratio. A step is gradient, clipping and AdamW.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch

from kvad.benchmarks.results import machine_info
from kvad.model.transformer import Transformer
from kvad.train.config.run import RunConfig
from kvad.train.objectives.cross_entropy import Autocast, CrossEntropyObjective, ScheduledSamplingObjective
from kvad.train.optim.optimizer import OptimizersContainer
from kvad.train.setup.corpora import resolve_corpus
from kvad.train.setup.initialize import init_weights
from kvad.train.setup.objective_factory import resolve_objective
from kvad.train.setup.run_data import RunData


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="transformer-tiny")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=8)
    options = parser.parse_args()
    config = configured(options.preset, options.batch_size)
    with tempfile.TemporaryDirectory() as folder:
        pairs = Path(folder, "pairs.tsv")
        draw = random.Random(0)
        texts = (" ".join(str(draw.randrange(1000)) for _ in range(12)) for _ in range(800))
        pairs.write_text("".join(f"{text}\t{text[::-1]}\n" for text in texts))
        run_data = RunData(config, resolve_corpus("seq2seq", [pairs]), lambda text: None)
        tokenizer = run_data.make_tokenizer()
        run_data.open(Path(folder, "data"), tokenizer)
        print(
            json.dumps({**measured(config, run_data, tokenizer.vocab_size, options.steps), "machine": machine_info()})
        )


def configured(preset: str, batch: int) -> RunConfig:
    content = {
        "model": {"preset": preset},
        "data": {"seq_len": 128},
        "tokenizer": {"kind": "bpe", "vocab_size": 2000},
        "objective": {"kind": "seq2seq", "scheduled_sampling": 0.5, "scheduled_sampling_steps": 1},
        "train": {"batch_size": batch, "precision": "fp32"},
    }
    return resolve_objective(RunConfig.from_dict(content), "encoder-decoder")


def measured(config: RunConfig, run_data: RunData, vocab: int, steps: int) -> dict[str, object]:
    torch.manual_seed(0)
    model = Transformer(config.resolve(vocab))
    init_weights(model)
    optimization = OptimizersContainer(model, config.optim, config.train)
    autocast = Autocast("fp32", "cpu")
    objectives = {
        "forced": CrossEntropyObjective(model, autocast),
        "sampled": ScheduledSamplingObjective(model, autocast),
    }
    seconds: dict[str, list[float]] = {name: [] for name in objectives}
    for step in range(1, steps + 2):
        batches = run_data.data.micro_batches(step)
        total = sum(len(batch.targets) for batch in batches)
        for name, objective in objectives.items():
            began = time.perf_counter()
            optimization.begin_step(step, 0.0)
            for batch in batches:
                objective.accumulate_gradients(batch, total)
            optimization.step(optimization.clip_grad_norm())
            seconds[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}  # the first step is warm-up
    return {
        "bench": "scheduled-sampling",
        "preset": config.model["preset"],
        "batch": config.train.batch_size,
        "steps": steps,
        "seconds": {name: round(value, 4) for name, value in medians.items()},
        "ratio": round(medians["sampled"] / medians["forced"], 3),
    }


if __name__ == "__main__":
    main()
