"""Tiny training runs: configurations, model inputs, a callback that stops a run, and results of a run folder."""

import dataclasses
import os
import signal

import torch

from kvad.checkpoint.folder import list_steps
from kvad.checkpoint.native import open_folder
from kvad.model.no_cache import NoCache
from kvad.model_input import ModelInput, SubBatch
from kvad.train.config.optim import OptimConfig
from kvad.train.config.run import RunConfig
from kvad.train.loop.run import resume_model, train_model
from kvad.train.monitoring.callbacks import Callback
from kvad.train.monitoring.metrics import read_metrics
from kvad.train.objectives.cross_entropy import Autocast

PRESETS = {"decoder": "tiny", "encoder-decoder": "transformer-tiny", "encoder": "encoder-tiny"}


def tiny_shape(topology="decoder", layers=2, mlp=48, width=32):
    """Keys of ``model.set`` for a model of this topology."""
    shape = {"hidden_size": width}
    for side in topology.split("-"):
        shape |= {f"{side}.num_layers": layers, f"{side}.layer_types.L.mlp.intermediate_size": mlp}
    return shape


def tiny_config(topology="decoder", *, model=None, init=None, data=None, tokenizer=None, tables=None, **settings):
    """Configuration of a run in float32, by default of a byte model.

    Args:
        topology: Of the model, ``tiny_shape``'s default size.
        model: Table [model] in place of that.
        init: Checkpoint to start from in place of that, with its tokenizer.
        data: Keys of [data].
        tokenizer: Table [tokenizer].
        tables: Other tables.
        settings: Keys of [optim] and [train].
    """
    model = model or {"preset": PRESETS[topology], "set": tiny_shape(topology)}
    train = {"batch_size": 4, "precision": "fp32", **settings}
    optim = {field.name for field in dataclasses.fields(OptimConfig)} & train.keys()
    content = {
        "model": model if init is None else {"init": str(init)},
        "data": {"seq_len": 32, **(data or {})},
        "tokenizer": (tokenizer or {"kind": "byte"}) if init is None else {},
        "optim": {name: train.pop(name) for name in optim},
        "train": train,
    }
    return RunConfig.from_dict({**content, **(tables or {})})


class StopAt(Callback):
    """Signals the process in a step, as Ctrl-C does."""

    def __init__(self, step, number=signal.SIGINT):
        self.step, self.number = step, number

    def on_step(self, report):
        if report.step == self.step:
            os.kill(os.getpid(), self.number)


def metric_lines(out, kind):
    """Lines of one kind of a run's metrics."""
    return [line for line in read_metrics(out / "metrics.jsonl") if line["kind"] == kind]


def losses(out):
    """Training loss of every logged step."""
    return {line["step"]: line["loss"] for line in metric_lines(out, "step")}


def hashes(out):
    """sha256 of weights and of training state of the newest checkpoint."""
    files = open_folder(out, verify=True).files
    return files["model.safetensors"]["sha256"], files["training/state.safetensors"]["sha256"]


def assert_resume_is_exact(config, corpus, folder, stops):
    """Compare a run with one that is stopped in each step of ``stops``; return the folders of both."""
    whole, parts = folder / "whole", folder / "parts"
    train_model(config, corpus, whole)
    first, *others = stops
    outcome = train_model(config, corpus, parts, callbacks=[StopAt(first)])
    assert (outcome.reason, outcome.step) == ("interrupted", first)
    for step in others:
        assert resume_model(parts, callbacks=[StopAt(step, signal.SIGTERM)]).step == step
    torch.rand(5)  # the state of the process does not matter
    assert resume_model(parts).reason == "done"
    assert _numbers(parts) == _numbers(whole) and len(losses(whole)) == config.train.steps
    assert _checkpoint(parts) == _checkpoint(whole)
    return whole, parts


def _numbers(out):
    steps = [(line["step"], line["loss"], line["lr"], line["grad_norm"]) for line in metric_lines(out, "step")]
    return steps, [(line["step"], line["val_loss"]) for line in metric_lines(out, "eval")]


def _checkpoint(out):
    """Weights, training state and config of the newest checkpoint."""
    files = [
        path for path in list_steps(out)[-1].rglob("*") if path.suffix == ".safetensors" or path.name == "config.json"
    ]
    return {path.name: path.read_bytes() for path in files}


def packed_input(config, rows, length):
    """Model input of rows of two documents each, for both sides of an encoder-decoder."""
    positions, indices = torch.arange(length).repeat(rows), torch.arange(rows * length)
    step = ModelInput(
        token_ids=indices % config.vocab_size,
        positions=positions,
        sub_batches=(SubBatch(rows, length, length),),
        logit_indices=indices,
        document_ids=(positions >= length // 2).long(),
        seq_lens=torch.full_like(indices, length),
    )
    return step if config.encoder_input is None else step._replace(encoder_input=step)


def saved_bytes(model, step, precision="fp32"):
    """Bytes that autograd saves in one forward pass, without the parameters."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved = {}

    def hold(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage  # referenced, so that no other storage gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor), Autocast(precision, "cpu")():
        model(step, NoCache(model.config))
    return sum(storage.nbytes() for storage in saved.values())
