"""An optimizer step of a run file's model, by optimizer and by activation checkpointing: the same rows, alternating.

    OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 python benchmarks/training_step.py recipes/shakespeare-char-cpu.toml
    python benchmarks/training_step.py recipes/shakespeare-char-cpu.toml --clock wall --repeats 20

The tokens are random, because the work does not depend on them. The output is one JSON line: medians in milliseconds
of processor time by default (use it on a busy machine, with one thread); ``update`` is the optimizer's part of the
step. ``saved``: bytes that autograd stores after a forward pass, without the parameters; with recomputation the
activations of one layer exist at a time. ``state``: bytes of the optimizer's state.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kvad.benchmarks.results import commit_id, machine_info
from kvad.model.no_cache import NoCache
from kvad.model.transformer import Transformer
from kvad.model_input import ModelInput, SubBatch
from kvad.train.config.optim import OptimConfig
from kvad.train.config.run import RunConfig, TrainConfig
from kvad.train.data.collate import Batch
from kvad.train.loop.trainer import apply_acceleration
from kvad.train.objectives.cross_entropy import Autocast, CrossEntropyObjective
from kvad.train.optim.optimizer import OptimizersContainer

CASES: dict[str, tuple[dict[str, str], bool]] = {
    "adamw": ({}, False),
    "adafactor": ({"name": "adafactor"}, False),
    "muon": ({"name": "muon"}, False),
    "adamw, recomputed": ({}, True),
}


def rows(run: RunConfig, vocab: int) -> Batch:
    count, length = run.train.batch_size, run.data.seq_len
    tokens = torch.randint(vocab, (count * length,))
    positions = torch.arange(length).repeat(count)
    every, documents = torch.arange(count * length), torch.zeros_like(positions)
    step = ModelInput(tokens, positions, (SubBatch(count, length, length),), every, document_ids=documents)
    return Batch(step, torch.randint(vocab, (count * length,)))


class Case:
    """One model, its optimizer, and the times of its steps."""

    def __init__(self, run: RunConfig, vocab: int, optim: dict[str, str], recompute: bool) -> None:
        torch.manual_seed(0)
        train = TrainConfig(steps=1000, activation_checkpointing=recompute)
        self.model = Transformer(run.resolve(vocab)).train()
        apply_acceleration(self.model, train)
        self.objective = CrossEntropyObjective(self.model, Autocast("fp32", "cpu"))
        self.optimization = OptimizersContainer(self.model, OptimConfig(**optim), train)  # type: ignore[arg-type]
        self.steps: list[float] = []
        self.updates: list[float] = []

    def step(self, batch: Batch, clock: Callable[[], float]) -> None:
        began = clock()
        self.optimization.begin_step(len(self.steps), 0.0)
        self.objective.accumulate_gradients(batch, len(batch.targets))
        middle = clock()
        self.optimization.step(self.optimization.clip_grad_norm())
        ended = clock()
        self.steps.append(1e3 * (ended - began))
        self.updates.append(1e3 * (ended - middle))

    def saved_bytes(self, batch: Batch) -> int:
        parameters = {parameter.untyped_storage().data_ptr() for parameter in self.model.parameters()}
        storages = {}

        def hold(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                storages[storage.data_ptr()] = storage  # kept alive, so that an address identifies one storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
            self.model(batch.model_input, NoCache(self.model.config))
        return sum(storage.nbytes() for storage in storages.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--vocab", type=int, default=66)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--clock", choices=["cpu", "wall"], default="cpu")
    options = parser.parse_args()
    run = RunConfig.load(options.run)
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    cases = {name: Case(run, options.vocab, *case) for name, case in CASES.items()}
    batch = rows(run, options.vocab)
    for _ in range(options.repeats + 2):
        for case in cases.values():
            case.step(batch, clock)
    measured = {
        name: {
            "step_ms": round(statistics.median(case.steps[2:]), 2),
            "update_ms": round(statistics.median(case.updates[2:]), 2),
            "saved": case.saved_bytes(batch),
            "state": sum(tensor.nbytes for tensor in case.optimization.state_tensors().values()),
        }
        for name, case in cases.items()
    }
    parameters = sum(p.numel() for p in cases["adamw"].model.parameters())
    printed = {"run": options.run.name, "parameters": parameters, "clock": options.clock, "repeats": options.repeats}
    print(
        json.dumps(
            {
                **printed,
                "threads": torch.get_num_threads(),
                **measured,
                "commit": commit_id(),
                "machine": machine_info(),
            }
        )
    )


if __name__ == "__main__":
    main()
