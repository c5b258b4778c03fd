"""Two processes that train one model: equal to one process, and resumed to the same bits."""

import json
import math
import multiprocessing
import os
import signal
import socket
import time
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import nn

from kvad.checkpoint.handle import CheckpointSnapshot, TrainingState, read_training_state
from kvad.checkpoint.native import open_folder
from kvad.errors import ConfigError, EngineError, NumericalError, UsageError
from kvad.train.config.run import TrainConfig
from kvad.train.loop.async_checkpointer import AsyncCheckpointer
from kvad.train.loop.data_parallel import DataParallelGroup, init_data_parallel
from kvad.train.loop.run import resume_model, train_model
from kvad.train.loop.trainer import Trainer, TrainerState
from kvad.train.monitoring.callbacks import Callback
from kvad.train.monitoring.metrics import read_metrics
from kvad.train.objectives.cross_entropy import Autocast, EvalResult
from kvad.train.optim.optimizer import OptimizersContainer
from kvad.train.setup.corpora import resolve_corpus
from kvad.train.setup.objective_factory import build_objective, resolve_objective, with_head
from kvad.train.setup.run_data import RunData
from tests.support.random_models import build
from tests.support.training_runs import PRESETS, hashes, losses, metric_lines, tiny_config, tiny_shape
from tests.train.conftest import Listener

DROPOUT = {"dropout.residual": 0.2}
PATIENCE = 120  # seconds for a pair of processes, on a busy machine


def environment(rank, port):
    return {"RANK": f"{rank}", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}


def both(work, *arguments):
    """Return the exit codes of ``work(rank, port, *arguments)`` in two processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.train.loop.test_data_parallel", "torch._dynamo"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [context.Process(target=work, args=(rank, port, *arguments)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    try:
        for rank in ranks:
            rank.join(PATIENCE)
        return [rank.exitcode for rank in ranks]
    finally:
        for rank in ranks:
            if rank.is_alive():
                rank.kill()


def configured(kind, *, dropout=None, **settings):
    """A tiny run whose rows have unequal lengths; ``settings`` are keys of [optim] and [train]."""
    pairs = kind == "seq2seq"
    topology = "encoder-decoder" if pairs else "decoder"
    model = {"preset": PRESETS[topology], "set": {**tiny_shape(topology, layers=1, mlp=32), **(dropout or {})}}
    data = {"seq_len": 24, **({} if pairs else {"document_unit": "lines", "packing": "first-fit"})}
    settings = {"batch_size": 1, "gradient_accumulation_steps": 4, "log_interval": 1, "eval_interval": 3, **settings}
    return resolve_objective(tiny_config(model=model, data=data, **settings), topology)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Lines for a decoder and pairs for an encoder-decoder, of 13 to 22 letters."""
    folder = tmp_path_factory.mktemp("texts")
    words = [("abcdefghijklmnopqrstuvwxyz" * 2)[n % 11 :][: 13 + n * n * n % 10] for n in range(90)]
    (folder / "next-token.txt").write_text("\n".join(words))
    (folder / "seq2seq.tsv").write_text("".join(f"{word}\t{word[::-1]}\n" for word in words))
    return folder


class NonFiniteLoss:
    """Objective whose second loss is NaN."""

    def __init__(self, objective):
        self.objective, self.calls = objective, 0

    def accumulate_gradients(self, batch, total):
        self.calls += 1
        loss = self.objective.accumulate_gradients(batch, total)
        return loss if self.calls < 2 else float("nan")

    def evaluate_loss(self, batches):
        return self.objective.evaluate_loss(batches)


class FixedEvaluations:
    """Objective whose evaluations return the given losses."""

    def __init__(self, found, objective):
        self.accumulate_gradients, self.found = objective.accumulate_gradients, iter(found)

    def evaluate_loss(self, batches):
        return EvalResult(next(self.found), 100)


def exact(kind, texts, folder, group, settings=None, wrap=lambda objective: objective, clock=time.monotonic):
    """Return a trainer in float64 and the callback that records its reports; ``wrap`` wraps the objective."""
    config = configured(kind, **(settings or {"steps": 5}))
    (path,) = texts.glob(f"{kind}.*")
    run_data = RunData(config, resolve_corpus(kind, [path]), lambda text: None)
    tokenizer = run_data.make_tokenizer()
    run_data.open(folder / f"data-{group.rank}", tokenizer)
    model = build(with_head(config.resolve(tokenizer.vocab_size), kind, run_data.labels), dtype=torch.float64)
    objective = wrap(build_objective(config, model, Autocast("fp32", "cpu")))
    optimization, listener = OptimizersContainer(model, config.optim, config.train, 32), Listener()
    snapshot = CheckpointSnapshot(0, {}, TrainingState({}, {}), None)
    checkpointer = AsyncCheckpointer(lambda: snapshot, lambda _: folder, async_save=False)
    parts = (model, objective, optimization, run_data.data, config.train, TrainerState(), checkpointer)
    return Trainer(*parts, callbacks=[listener], clock=clock, data_parallel=group), listener


def join(rank, port, train):
    """Return the group of a process of ``both``."""
    torch.set_num_threads(1)
    return init_data_parallel(environment(rank, port), train)


def of_rank(rank, port, kind, texts, folder):
    trainer, listener = exact(kind, texts, folder, join(rank, port, configured(kind).train))
    trainer.fit()
    torch.save(dict(trainer.model.state_dict()), folder / f"weights-{rank}")
    (folder / f"steps-{rank}").write_text(json.dumps([(step.loss, step.grad_norm) for step in listener.steps]))
    done()


def done():
    os._exit(0)  # as in tests/support/mesh_worker.py


@pytest.mark.parametrize("kind", ["next-token", "seq2seq"])
def test_two_ranks_make_the_updates_of_one_process(kind, texts, tmp_path):
    assert both(of_rank, kind, texts, tmp_path) == [0, 0]
    alone, listener = exact(kind, texts, tmp_path, DataParallelGroup())
    counts = [[len(batch.targets) for batch in alone.data.micro_batches(step)] for step in range(5)]
    assert any(sum(each[::2]) != sum(each[1::2]) for each in counts), "ragged, or a mean of means would do"
    alone.fit()
    weights = [torch.load(tmp_path / f"weights-{rank}") for rank in range(2)]
    for name, tensor in alone.model.state_dict().items():
        assert torch.equal(weights[0][name], weights[1][name])
        assert (weights[0][name] - tensor).abs().max() < 1e-11, name  # Adam divides by roots of small numbers
    for rank in range(2):
        steps = json.loads((tmp_path / f"steps-{rank}").read_text())
        for step, expected in zip(steps, listener.steps, strict=True):
            assert step == pytest.approx((expected.loss, expected.grad_norm), rel=1e-12)


def one_rank_fails(rank, port, texts, folder):
    group = join(rank, port, configured("next-token").train)
    parts = nn.ParameterList([nn.Parameter(torch.zeros(3)) for _ in range(3)])
    parts[0].grad = torch.full((3,), 1.0 + rank)
    if rank:
        parts[1].grad = torch.arange(3.0)
    results = [group.all_reduce_gradients(parts, 0.25 + rank)]
    results.append([None if p.grad is None else p.grad.tolist() for p in parts])
    results += [group.any_rank(rank == 1), group.broadcast_scalar(rank + 0.5)]
    results.append(group.all_gather_text("none" if rank else "\u00fcber"))
    trainer, _ = exact("next-token", texts, folder, group, wrap=NonFiniteLoss if rank else lambda objective: objective)
    for _ in range(2):  # a loss of NaN, and weights that differ
        try:
            trainer.fit()
        except NumericalError as error:
            results.append(str(error))
        with torch.no_grad():
            next(trainer.model.parameters()).view(-1)[0] += 1e-9 * rank
    (folder / f"results-{rank}").write_text(json.dumps(results))
    if rank == 0:
        try:
            group.any_rank(False)  # the other rank has ended
        except EngineError as error:
            (folder / "lost").write_text(str(error))
    done()


def test_an_error_of_one_rank_is_raised_by_both(texts, tmp_path):
    assert both(one_rank_fails, texts, tmp_path) == [0, 0]
    first, second = (json.loads((tmp_path / f"results-{rank}").read_text()) for rank in range(2))
    assert first == second
    assert first[:5] == [1.5, [[3.0] * 3, [0.0, 1.0, 2.0], None], True, 0.5, ["\u00fcber", "none"]]
    assert "step 1: loss nan" in first[5]
    assert "the loss, although all outputs are finite, of micro-batch 2 of 4" in first[5]
    assert "the weights of the ranks differ" in first[6]
    assert "rank 0 of 2: another rank does not respond" in (tmp_path / "lost").read_text()


def clocks(rank):
    """A minute; the clocks of the ranks advance by one second or three at every reading, rank 1's from 1,000."""
    settings = {"minutes": 1.0, "eval_interval": 5, "lr": 1e-2, "min_lr": 1e-4, "warmup_steps": 0}
    return {"settings": settings, "clock": partial(next, count(1000.0 * rank, 1 + 2 * rank))}


def evaluations(rank):
    """Other losses on each rank: only rank 0 has no improvement in the third and fourth evaluation."""
    settings = {"steps": 12, "eval_interval": 2, "lr": 1e-2, "min_lr": 1e-4, "warmup_steps": 0}
    settings |= {"schedule": "plateau", "plateau_patience": 1, "plateau_factor": 0.5}
    losses = [3.0 - number for number in range(6)] if rank else [3.0, 2.0, 2.5, 2.1, 1.0, 0.9]
    return {"settings": settings, "wrap": partial(FixedEvaluations, losses), "clock": clocks(rank)["clock"]}


def fit(trainer, listener):
    outcome = trainer.fit()
    progress = [outcome.step, outcome.elapsed, outcome.reason, outcome.val_loss]
    steps, evals = listener.steps, listener.evals
    return [*progress, [s.lr for s in steps], [e.val_loss for e in evals], [s.loss for s in steps]]


def other_clock_and_losses(rank, port, texts, folder):
    group = join(rank, port, configured("next-token").train)
    for options in (clocks, evaluations):
        name = options.__name__
        results = fit(*exact("next-token", texts, folder / name, group, **options(rank)))
        (folder / name / f"results-{rank}").write_text(json.dumps(results))
    done()


def test_clock_and_evaluations_of_rank_0_decide(texts, tmp_path):
    """Both ranks end at the step, and have the learning rates, of one process with rank 0's clock and losses."""
    assert both(other_clock_and_losses, texts, tmp_path) == [0, 0]
    torch.set_num_threads(1)
    results, alone = {}, DataParallelGroup()
    for options in (clocks, evaluations):
        name = options.__name__
        results[name], other = (json.loads((tmp_path / name / f"results-{rank}").read_text()) for rank in range(2))
        first, second = (fit(*exact("next-token", texts, tmp_path, alone, **options(rank))) for rank in range(2))
        assert results[name] == other, "bit-equal"
        assert other[:5] == first[:5] and other[6] == pytest.approx(first[6], rel=1e-12)
        assert first[4] != second[4], "rank 1's clock and losses give other rates"
    step, elapsed, reason, _, rates, *_ = results["clocks"]
    assert (step, elapsed, reason) == (15, 60.0, "done"), "four readings per step; no step ends after the minute"
    falling = [1e-4 + (1e-2 - 1e-4) * (1 + math.cos(math.pi * n / 15)) / 2 for n in range(15)]
    assert rates == pytest.approx(falling, rel=1e-12), "a cosine of the elapsed share"
    assert results["evaluations"][4] == [1e-2] * 8 + [5e-3] * 4, "the fourth evaluation exceeds the patience"


class KillRanks(Callback):
    """Kills all ranks in a step."""

    def __init__(self, pids, step):
        self.pids, self.step = pids, step

    def on_step(self, report):
        if report.step == self.step:
            for pid in self.pids:
                os.kill(pid, signal.SIGKILL)


def whole_run(rank, port, config, path, out, kill, resume):
    group = join(rank, port, config.train)
    pids = [int(pid) for pid in group.all_gather(torch.tensor([os.getpid()]))]
    if resume:
        resume_model(out, data_parallel=group)
    else:
        callback = KillRanks([pid for pid in pids if pid != os.getpid()] + [os.getpid()], kill)
        train_model(config, [path], out, callbacks=[callback], data_parallel=group)
    done()


def test_a_run_of_two_ranks_has_the_losses_of_one_process(texts, tmp_path):
    config, path = configured("next-token", steps=6), texts / "next-token.txt"
    assert both(whole_run, config, path, tmp_path / "two", 0, False) == [0, 0]
    torch.set_num_threads(1)
    train_model(config, [path], tmp_path / "one")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    lines = read_metrics(tmp_path / "two" / "metrics.jsonl")
    kinds = [line["kind"] for line in lines]
    assert [kinds.count(kind) for kind in ("run", "step", "eval", "end")] == [1, 6, 2, 1], "of one rank alone"
    counts = [line["tokens"] for line in lines if line["kind"] == "step"]
    assert counts == [line["tokens"] for line in read_metrics(tmp_path / "one" / "metrics.jsonl") if "lr" in line]


def test_two_ranks_balance_experts_by_the_loads_of_both(texts, tmp_path):
    experts = {"kind": "moe", "intermediate_size": 8, "num_experts": 4, "num_experts_per_token": 1}
    layer = {"decoder.layer_types.L.mlp": {**experts, "router": "sigmoid", "selection_bias": True}}
    config, path = configured("next-token", steps=5, dropout=layer), texts / "next-token.txt"
    objective = replace(config.objective, router_aux_loss_coef=0.1, router_bias_update_rate=0.125)
    config = replace(config, objective=objective)
    assert both(whole_run, config, path, tmp_path / "two", 0, False) == [0, 0]
    torch.set_num_threads(1)
    train_model(config, [path], tmp_path / "one")
    two, one = (dict(open_folder(tmp_path / out).weights()) for out in ("two", "one"))
    name = "decoder.layers.0.mlp.selection_bias"
    assert torch.equal(two[name], one[name]) and one[name].any()
    loads = [[line["expert_load"] for line in metric_lines(tmp_path / out, "step")] for out in ("two", "one")]
    assert loads[0] == loads[1]
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


def test_a_killed_run_resumes_to_the_same_bits(texts, tmp_path):
    config, path = configured("next-token", steps=8, save_interval=2, dropout=DROPOUT), texts / "next-token.txt"
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert both(whole_run, config, path, whole, 0, False) == [0, 0]
    assert both(whole_run, config, path, parts, 5, False) == [-signal.SIGKILL] * 2
    with pytest.raises(ConfigError, match="ranks: 2 there, 1 here"):
        resume_model(parts)
    assert both(whole_run, config, path, parts, 0, True) == [0, 0]
    assert losses(parts) == losses(whole) and len(losses(whole)) == 8
    assert hashes(parts) == hashes(whole)
    random = read_training_state(open_folder(whole).path).tensors
    assert not torch.equal(random["rng"], random["rng.1"]), "dropout differs between ranks"


TWO_STEPS = {"gradient_accumulation_steps": 2}


@pytest.mark.parametrize(
    ("change", "train", "error", "message"),
    [
        ({}, {"gradient_accumulation_steps": 3}, ConfigError, r"must be a multiple of the 2 ranks, got 3"),
        ({"LOCAL_WORLD_SIZE": "1"}, TWO_STEPS, ConfigError, "ranks must run on one machine"),
        ({}, {**TWO_STEPS, "device": "cuda:1"}, ConfigError, "must not name one GPU"),
        ({"MASTER_PORT": None}, TWO_STEPS, UsageError, "MASTER_PORT: must be set"),
        ({"RANK": None}, TWO_STEPS, UsageError, "RANK: must be a number"),
    ],
)
def test_unsupported_environments_are_refused(change, train, error, message):
    variables = {key: value for key, value in {**environment(0, 1), **change}.items() if value is not None}
    with pytest.raises(error, match=message):
        init_data_parallel(variables, TrainConfig(**train))


@pytest.mark.parametrize("variables", [{}, {"WORLD_SIZE": "1", "RANK": "0"}])
def test_one_process_needs_no_group(variables):
    assert init_data_parallel(variables, TrainConfig()) == DataParallelGroup()


def test_the_command_refuses_ranks_for_single_process_tasks(texts, tmp_path, monkeypatch, capsys):
    from kvad.cli.main import main

    monkeypatch.setenv("WORLD_SIZE", "2")
    path = texts / "next-token.txt"
    assert main(["train", str(path), "--objective", "summarizer", "--init", "x", "--out", str(tmp_path / "x")]) == 2
    assert "a summarizer is trained by one process" in capsys.readouterr().err
    assert main(["train", str(path), "--dry-run"]) == 2
    assert "--dry-run plans a single process" in capsys.readouterr().err and not Path(tmp_path / "x").exists()
