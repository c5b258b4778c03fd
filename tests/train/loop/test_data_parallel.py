"""Two processes that train one model: its numbers are those of one process, and it goes on to the bit."""

import json
import math
import multiprocessing
import os
import signal
import socket
import time
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import nn

from kvad.checkpoint.handle import CheckpointSnapshot, TrainingState, read_training_state
from kvad.checkpoint.native import open_folder
from kvad.errors import ConfigError, EngineError, NumericalError, UsageError
from kvad.train.config.run import RunConfig, TrainConfig
from kvad.train.loop.checkpointer import AsyncCheckpointer
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

SMALL = {"hidden_size": 32, "decoder.num_layers": 1, "decoder.layer_types.L.mlp.intermediate_size": 32}
BOTH = {**SMALL, "encoder.num_layers": 1, "encoder.layer_types.L.mlp.intermediate_size": 32}
DROPOUT = {"dropout.residual": 0.2}
PATIENCE = 120  # seconds for a pair of processes, on a busy machine


def environment(rank, port):
    return {"RANK": f"{rank}", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}


def both(work, *given):
    """``work(rank, port, *given)`` in two processes; -> their exit codes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.train.loop.test_data_parallel", "torch._dynamo"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [context.Process(target=work, args=(rank, port, *given)) for rank in range(2)]
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


def configured(kind, *, accumulate=4, dropout=None, optim=None, **more):
    """A tiny run whose rows are of unequal lengths; ``more`` of its table [train]."""
    pairs = kind == "seq2seq"
    content = {
        "model": {
            "preset": "transformer-tiny" if pairs else "tiny",
            "set": {**(BOTH if pairs else SMALL), **(dropout or {})},
        },
        "data": {"seq_len": 24, **({} if pairs else {"document_unit": "lines", "packing": "first-fit"})},
        "tokenizer": {"kind": "byte"},
        "optim": optim or {},
        "train": {
            "batch_size": 1,
            "gradient_accumulation_steps": accumulate,
            "precision": "fp32",
            "log_interval": 1,
            "eval_interval": 3,
            **more,
        },
    }
    return resolve_objective(RunConfig.from_dict(content), "encoder-decoder" if pairs else "decoder")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Lines for a decoder, pairs for an encoder-decoder, of 13 to 22 letters: no two fill a row."""
    folder = tmp_path_factory.mktemp("texts")
    words = [("abcdefghijklmnopqrstuvwxyz" * 2)[n % 11 :][: 13 + n * n * n % 10] for n in range(90)]
    (folder / "next-token.txt").write_text("\n".join(words))
    (folder / "seq2seq.tsv").write_text("".join(f"{word}\t{word[::-1]}\n" for word in words))
    return folder


class Wrong:
    """An objective whose second loss is no number."""

    def __init__(self, objective):
        self.objective, self.calls = objective, 0

    def accumulate_gradients(self, batch, total):
        self.calls += 1
        loss = self.objective.accumulate_gradients(batch, total)
        return loss if self.calls < 2 else float("nan")

    def evaluate_loss(self, batches):
        return self.objective.evaluate_loss(batches)


class Judged:
    """An objective whose evaluations find the losses that are given."""

    def __init__(self, found, objective):
        self.accumulate_gradients, self.found = objective.accumulate_gradients, iter(found)

    def evaluate_loss(self, batches):
        return EvalResult(next(self.found), 100)


class Heard(Callback):
    def __init__(self):
        self.losses, self.norms, self.rates, self.found = [], [], [], []

    def on_step(self, report):
        self.losses.append(report.loss)
        self.norms.append(report.grad_norm)
        self.rates.append(report.lr)

    def on_eval(self, report):
        self.found.append(report.val_loss)


FIVE = {"steps": 5}


def exact(kind, texts, folder, peers, settings=FIVE, aim=lambda objective: objective, clock=time.monotonic):
    """A trainer in float64, and what it tells.  ``aim``: what is made of its objective."""
    config = configured(kind, **settings)
    (path,) = texts.glob(f"{kind}.*")
    material = RunData(config, resolve_corpus(kind, [path]), lambda text: None)
    tokenizer = material.make_tokenizer()
    material.open(folder / f"data-{peers.rank}", tokenizer)
    model = build(with_head(config.resolve(tokenizer.vocab_size), kind, material.labels), dtype=torch.float64)
    objective = build_objective(config, model, Autocast("fp32", "cpu"))
    optimization = OptimizersContainer(model, config.optim, config.train, 32)
    saver = AsyncCheckpointer(
        lambda: CheckpointSnapshot(0, {}, TrainingState({}, {}), None), lambda moment: folder, async_save=False
    )
    heard, parts = Heard(), (model, aim(objective), optimization, material.data, config.train, TrainerState(), saver)
    return Trainer(*parts, callbacks=[heard], clock=clock, data_parallel=peers), heard


def of_rank(rank, port, kind, texts, folder):
    torch.set_num_threads(1)
    peers = init_data_parallel(environment(rank, port), configured(kind).train)
    made, heard = exact(kind, texts, folder, peers)
    made.fit()
    torch.save(dict(made.model.state_dict()), folder / f"weights-{rank}")
    (folder / f"told-{rank}").write_text(json.dumps([heard.losses, heard.norms]))
    done()


def done():
    os._exit(0)  # as tests/support/mesh_worker.py says


@pytest.mark.parametrize("kind", ["next-token", "seq2seq"])
def test_two_ranks_make_the_updates_of_one_process(kind, texts, tmp_path):
    assert both(of_rank, kind, texts, tmp_path) == [0, 0]
    alone, heard = exact(kind, texts, tmp_path, DataParallelGroup())
    counts = [[len(batch.targets) for batch in alone.data.micro_batches(step)] for step in range(5)]
    assert any(sum(each[::2]) != sum(each[1::2]) for each in counts), "ragged, or a mean of means would do"
    alone.fit()
    found = [torch.load(tmp_path / f"weights-{rank}") for rank in range(2)]
    for name, tensor in alone.model.state_dict().items():
        assert torch.equal(found[0][name], found[1][name])
        assert (found[0][name] - tensor).abs().max() < 1e-11, name  # Adam divides by roots of small numbers
    for rank in range(2):
        losses, norms = json.loads((tmp_path / f"told-{rank}").read_text())
        assert losses == pytest.approx(heard.losses, rel=1e-12) and norms == pytest.approx(heard.norms, rel=1e-12)


def at_odds(rank, port, texts, folder):
    torch.set_num_threads(1)
    peers = init_data_parallel(environment(rank, port), configured("next-token").train)
    parts = nn.ParameterList([nn.Parameter(torch.zeros(3)) for _ in range(3)])
    parts[0].grad = torch.full((3,), 1.0 + rank)
    if rank:
        parts[1].grad = torch.arange(3.0)
    said = [
        peers.all_reduce_gradients(parts, 0.25 + rank),
        [None if p.grad is None else p.grad.tolist() for p in parts],
    ]
    said += [
        peers.any_rank(rank == 1),
        peers.broadcast_scalar(rank + 0.5),
        peers.all_gather_text("none" if rank else "\u00fcber"),
    ]
    made, _ = exact("next-token", texts, folder, peers, aim=Wrong if rank else lambda objective: objective)
    for _ in range(2):  # a loss that is no number, and weights that differ
        try:
            made.fit()
        except NumericalError as error:
            said.append(str(error))
        with torch.no_grad():
            next(made.model.parameters()).view(-1)[0] += 1e-9 * rank
    (folder / f"said-{rank}").write_text(json.dumps(said))
    if rank == 0:
        try:
            peers.any_rank(False)  # the other has ended
        except EngineError as error:
            (folder / "lost").write_text(str(error))
    done()


def test_what_one_rank_meets_both_say(texts, tmp_path):
    assert both(at_odds, texts, tmp_path) == [0, 0]
    first, second = (json.loads((tmp_path / f"said-{rank}").read_text()) for rank in range(2))
    assert first == second
    assert first[:5] == [1.5, [[3.0] * 3, [0.0, 1.0, 2.0], None], True, 0.5, ["\u00fcber", "none"]]
    assert (
        "step 1: loss nan" in first[5]
        and "the loss, although all outputs are finite, of micro-batch 2 of 4" in first[5]
    )
    assert "the weights of the ranks differ" in first[6]
    assert "rank 0 of 2: another rank does not respond" in (tmp_path / "lost").read_text()


def clocks(rank):
    """A minute, by a clock that is another for every rank: one second from look to look, or three, and 1,000 ahead."""
    settings = {"minutes": 1.0, "eval_interval": 5, "optim": {"lr": 1e-2, "min_lr": 1e-4, "warmup_steps": 0}}
    return {"settings": settings, "clock": partial(next, count(1000.0 * rank, 1 + 2 * rank))}


def judges(rank):
    """Evaluations that find another loss on every rank: no better one in the third and fourth on the first alone."""
    optim = {
        "schedule": "plateau",
        "lr": 1e-2,
        "min_lr": 1e-4,
        "warmup_steps": 0,
        "plateau_patience": 1,
        "plateau_factor": 0.5,
    }
    found = [3.0 - number for number in range(6)] if rank else [3.0, 2.0, 2.5, 2.1, 1.0, 0.9]
    settings = {"steps": 12, "eval_interval": 2, "optim": optim}
    return {"settings": settings, "aim": partial(Judged, found), "clock": clocks(rank)["clock"]}


def fitted(made, heard):
    outcome = made.fit()
    return [outcome.step, outcome.elapsed, outcome.reason, outcome.val_loss, heard.rates, heard.found, heard.losses]


def at_variance(rank, port, texts, folder):
    torch.set_num_threads(1)
    peers = init_data_parallel(environment(rank, port), configured("next-token").train)
    for name, given in (("clocks", clocks), ("judges", judges)):
        told = fitted(*exact("next-token", texts, folder / name, peers, **given(rank)))
        (folder / name / f"told-{rank}").write_text(json.dumps(told))
    done()


def test_one_clock_and_one_judge_decide_for_all_ranks(texts, tmp_path):
    """They end at one step and their rates fall together, as of one process with the clock and the judge of rank 0."""
    assert both(at_variance, texts, tmp_path) == [0, 0]
    torch.set_num_threads(1)
    told = {}
    for given in (clocks, judges):
        name = given.__name__
        found = [json.loads((tmp_path / name / f"told-{rank}").read_text()) for rank in range(2)]
        first, second = (
            fitted(*exact("next-token", texts, tmp_path, DataParallelGroup(), **given(rank))) for rank in range(2)
        )
        assert found[0] == found[1], "to the bit"
        assert found[0][:5] == first[:5] and found[0][6] == pytest.approx(first[6], rel=1e-12)
        assert first[4] != second[4], "alone, rank 1 would have decided otherwise"
        told[name] = found[0]
    step, elapsed, reason, _, rates, *_ = told["clocks"]
    assert (step, elapsed, reason) == (15, 60.0, "done"), "four looks a step, and none that would end after the minute"
    falling = [1e-4 + (1e-2 - 1e-4) * (1 + math.cos(math.pi * n / 15)) / 2 for n in range(15)]
    assert rates == pytest.approx(falling, rel=1e-12), "a cosine of the elapsed share"
    assert told["judges"][4] == [1e-2] * 8 + [5e-3] * 4, "the fourth evaluation is the second without a better loss"


class Killer(Callback):
    """kill -9 of all ranks in the middle of the run."""

    def __init__(self, pids, step):
        self.pids, self.step = pids, step

    def on_step(self, report):
        if report.step == self.step:
            for pid in self.pids:
                os.kill(pid, signal.SIGKILL)


def whole_run(rank, port, config, path, out, kill, again):
    torch.set_num_threads(1)
    peers = init_data_parallel(environment(rank, port), config.train)
    pids = [int(pid) for pid in peers.all_gather(torch.tensor([os.getpid()]))]
    if again:
        resume_model(out, data_parallel=peers)
    else:
        heard = [Killer([pid for pid in pids if pid != os.getpid()] + [os.getpid()], kill)]
        train_model(config, [path], out, callbacks=heard, data_parallel=peers)
    done()


def losses(out):
    return {line["step"]: line["loss"] for line in read_metrics(out / "metrics.jsonl") if line["kind"] == "step"}


def test_a_run_of_two_ranks_says_the_losses_of_one_process(texts, tmp_path):
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


def test_killed_it_goes_on_to_the_bit_with_as_many_ranks(texts, tmp_path):
    config, path = configured("next-token", steps=8, save_interval=2, dropout=DROPOUT), texts / "next-token.txt"
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert both(whole_run, config, path, whole, 0, False) == [0, 0]
    assert both(whole_run, config, path, parts, 5, False) == [-signal.SIGKILL] * 2
    with pytest.raises(ConfigError, match="ranks: 2 there, 1 here"):
        resume_model(parts)
    assert both(whole_run, config, path, parts, 0, True) == [0, 0]
    assert losses(parts) == losses(whole) and len(losses(whole)) == 8
    files = [open_folder(out, verify=True).files for out in (whole, parts)]
    for name in ("model.safetensors", "training/state.safetensors"):
        assert files[0][name]["sha256"] == files[1][name]["sha256"], name
    random = read_training_state(open_folder(whole).path).tensors
    assert not torch.equal(random["rng"], random["rng.1"]), "dropout differs between ranks"


def test_what_cannot_be_shared_is_refused_by_name():
    asked = environment(0, 1)
    with pytest.raises(
        ConfigError, match=r"train\.gradient_accumulation_steps: must be a multiple of the 2 ranks, got 3"
    ):
        init_data_parallel(asked, TrainConfig(gradient_accumulation_steps=3))
    with pytest.raises(ConfigError, match="ranks must run on one machine"):
        init_data_parallel({**asked, "LOCAL_WORLD_SIZE": "1"}, TrainConfig(gradient_accumulation_steps=2))
    with pytest.raises(ConfigError, match="must not name one GPU"):
        init_data_parallel(asked, TrainConfig(gradient_accumulation_steps=2, device="cuda:1"))
    with pytest.raises(UsageError, match="MASTER_PORT: must be set"):
        init_data_parallel(
            {name: asked[name] for name in ("RANK", "WORLD_SIZE")}, TrainConfig(gradient_accumulation_steps=2)
        )
    with pytest.raises(UsageError, match="RANK: must be a number"):
        init_data_parallel({"WORLD_SIZE": "2"}, TrainConfig(gradient_accumulation_steps=2))
    assert (
        init_data_parallel({}, TrainConfig())
        == DataParallelGroup()
        == init_data_parallel({"WORLD_SIZE": "1", "RANK": "0"}, TrainConfig())
    )


def test_the_command_refuses_what_one_process_does(texts, tmp_path, monkeypatch, capsys):
    from kvad.cli.main import main

    monkeypatch.setenv("WORLD_SIZE", "2")
    path = texts / "next-token.txt"
    assert main(["train", str(path), "--objective", "summarizer", "--init", "x", "--out", str(tmp_path / "x")]) == 2
    assert "a summarizer is trained by one process" in capsys.readouterr().err
    assert main(["train", str(path), "--dry-run"]) == 2
    assert "--dry-run plans a single process" in capsys.readouterr().err and not Path(tmp_path / "x").exists()
