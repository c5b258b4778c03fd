"""Non-finite losses and gradients: the run stops and names step, texts and module."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvad.checkpoint.native import open_folder
from kvad.errors import NumericalError
from kvad.model.layers import GatedMLP
from kvad.model.transformer import Transformer
from kvad.text.tokenizer import train_tokenizer
from kvad.train.config.run import RunConfig
from kvad.train.data.collate import CollateConfig, Segment, collate_rows
from kvad.train.loop.nonfinite import RandomState, locate_nonfinite
from kvad.train.loop.run import train_model
from kvad.train.monitoring.callbacks import Callback
from kvad.train.objectives.cross_entropy import Autocast, CrossEntropyObjective
from kvad.train.setup.corpora import resolve_corpus
from kvad.train.setup.objective_factory import resolve_objective
from kvad.train.setup.run_data import RunData
from kvad.train.sources.pairs import PairPaths

SHAPE = {"hidden_size": 32, "decoder.num_layers": 2, "decoder.layer_types.L.mlp.intermediate_size": 48}


def batch_of(rows=3, length=8):
    tokens = np.arange(rows * length).reshape(rows, length) % 200
    return collate_rows([[Segment(row, np.roll(row, -1))] for row in tokens], CollateConfig(length))


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = RunConfig.from_dict({"model": {"preset": "tiny", "set": {**SHAPE, "dropout.residual": 0.1}}})
    return Transformer(replace(config, data=replace(config.data, seq_len=8)).resolve(257)).train()


def poison(module, monkeypatch, at, value=math.nan):
    """The module's output is ``value`` at token ``at``."""
    real = module.forward

    def forward(*arguments, **options):
        out = real(*arguments, **options).clone()
        out[at] = value
        return out

    monkeypatch.setattr(module, "forward", forward)


def found(model, batches):
    objective = CrossEntropyObjective(model, Autocast("fp32", "cpu"))
    return locate_nonfinite(model, objective, batches, sum(len(batch.targets) for batch in batches))


def test_finite_steps_have_no_report(model):
    assert found(model, [batch_of()]) is None
    assert not model._forward_hooks and not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    "name", ["embedding", "decoder.layers.0.attention.k", "decoder.layers.1.mlp.down", "decoder.norm"]
)
def test_the_first_module_and_the_row_are_named(model, monkeypatch, name, value):
    poison(model.get_submodule(name), monkeypatch, 17, value)
    fault = found(model, [batch_of()])
    assert (fault.tensor_name, fault.batch, fault.row) == (f"the output of {name}", 0, 2)


def test_the_micro_batch_is_named(model, monkeypatch):
    """Only rows of more than eight tokens meet what is broken."""
    real = model.decoder.layers[1].mlp.forward

    def forward(x):
        return real(x) * (math.inf if len(x) > 24 else 1.0)

    monkeypatch.setattr(model.decoder.layers[1].mlp, "forward", forward)
    fault = found(model, [batch_of(), batch_of(), batch_of(4)])
    assert fault.tensor_name == "the output of decoder.layers.1.mlp" and fault.batch == 2


def test_a_nonfinite_parameter_is_reported_first(model):
    model.decoder.layers[0].mlp.up.weight.data[3, 4] = math.inf
    fault = found(model, [batch_of()])
    assert fault == ("the parameter decoder.layers.0.mlp.up.weight, since an earlier step", None, None)


def test_a_nonfinite_gradient_of_a_finite_loss_is_named(model, monkeypatch):
    """sqrt(0) is fine, its slope is not."""
    mlp = model.decoder.layers[1].mlp
    assert isinstance(mlp, GatedMLP)
    real = mlp.down.forward
    monkeypatch.setattr(mlp.down, "forward", lambda x: real(x) + (x * 0).abs().sqrt().sum(-1, keepdim=True))
    fault = found(model, [batch_of()])
    assert fault.batch == 0 and "although the loss is finite" in fault.tensor_name
    assert "decoder.layers.1.mlp" in fault.tensor_name, "the backward pass meets it there first"


def test_the_repeated_step_is_exact(model):
    """What dropout drew is drawn again: else a fault that a draw has made would not be found."""
    objective, state = CrossEntropyObjective(model, Autocast("fp32", "cpu")), RandomState("cpu")
    first = objective.accumulate_gradients(batch_of(), 1.0)
    other = objective.accumulate_gradients(batch_of(), 1.0)
    state.restore()
    assert objective.accumulate_gradients(batch_of(), 1.0) == first != other


# ---------------------------------------------------------------- in a run


class Poison(Callback):
    """From step 7 on, the down projection of a layer overflows for rows with the byte ``b``."""

    def __init__(self, monkeypatch):
        self._patch = monkeypatch

    def on_model(self, subject):
        self.model = subject.model

    def on_step(self, report):
        if report.step == 6:
            poison(self.model.get_submodule("decoder.layers.1.mlp.down"), self._patch, 40)


def test_a_run_stops_and_names_step_layer_row_and_text(corpus, tmp_path, run_config, monkeypatch):
    with pytest.raises(NumericalError) as caught:
        train_model(
            run_config(gradient_accumulation_steps=2), [corpus], tmp_path / "run", callbacks=[Poison(monkeypatch)]
        )
    message = caught.value.message
    assert message.startswith("step 7: loss nan, gradient norm nan; first non-finite value: the output of ")
    assert "decoder.layers.1.mlp.down, of micro-batch 1 of 2, row 2 (document" in message
    assert ".txt)" in message and caught.value.exit_code == 1
    assert "the last checkpoint is whole" in caught.value.hint
    assert open_folder(tmp_path / "run", verify=True).path.name == "step-00000005"


def test_finite_repetition_is_reported(corpus, tmp_path, run_config, monkeypatch):
    real, calls = CrossEntropyObjective.accumulate_gradients, iter(range(100))

    def once(*arguments):
        return math.nan if next(calls) == 3 else real(*arguments)

    monkeypatch.setattr(CrossEntropyObjective, "accumulate_gradients", once)
    with pytest.raises(NumericalError, match=r"step 4: loss nan.*repeated, all values are finite"):
        train_model(run_config(), [corpus], tmp_path / "run")


# ---------------------------------------------------------------- which texts a row is of


def opened(config, named, tokenizer, tmp_path):
    config = resolve_objective(config, "encoder-decoder" if isinstance(named, PairPaths) else "decoder")
    material = RunData(config, resolve_corpus(config.objective.kind, named), lambda line: None)
    material.open(tmp_path / "data", tokenizer or material.make_tokenizer())
    return material


def numbered(tmp_path, count=14):
    """Documents, each of one letter of its own."""
    for number in range(count):
        (tmp_path / f"{number:02d}.txt").write_text(chr(ord("a") + number) * (9 + number))
    return [tmp_path]


@pytest.mark.parametrize("data", [{}, {"order": "windows"}, {"packing": "first-fit"}, {"packing": "best-fit"}], ids=str)
def test_rows_of_documents_name_their_texts(tmp_path, data):
    tokenizer = train_tokenizer("byte", [])
    config = RunConfig.from_dict(
        {"data": {"seq_len": 16, **data}, "train": {"batch_size": 5, "gradient_accumulation_steps": 3}}
    )
    (tmp_path / "texts").mkdir()
    material = opened(config, numbered(tmp_path / "texts"), tokenizer, tmp_path)
    for number in range(60):
        (row,) = material.data.rows(np.array([number]))
        letters = {tokenizer.decode([t]) for segment in row for t in segment.tokens.tolist() if t < 256}
        texts = material.data.provenance(number)
        named = {chr(ord("a") + text) for text in texts}
        assert letters <= named and len(named - letters) <= 1, "one may have its separator alone in the row"
    text = material.data.provenance(0)[0]
    assert f"{text + 1} (texts/{text:02d}.txt)" in material.describe_rows(range(1))
    assert material.describe_rows(range(60)).endswith(", ...")


def test_rows_of_a_mixture(tmp_path):
    tokenizer = train_tokenizer("byte", [])
    for name, first in (("one", "a"), ("two", "k")):
        (tmp_path / name).mkdir()
        for number in range(3):
            (tmp_path / name / f"{number}.txt").write_text(chr(ord(first) + number) * 30)
    sources = [{"paths": [str(tmp_path / name)], "weight": 1.0} for name in ("one", "two")]
    config = RunConfig.from_dict({"data": {"seq_len": 8, "sources": sources}, "train": {"batch_size": 4}})
    material = opened(config, [], tokenizer, tmp_path)
    for number in range(40):
        (row,) = material.data.rows(np.array([number]))
        letters = {tokenizer.decode([t]) for segment in row for t in segment.tokens.tolist() if t < 256}
        named = {"abcklm"[text] for text in material.data.provenance(number)}
        assert letters <= named and len(named - letters) <= 1


def test_rows_of_pairs(tmp_path):
    words = ["".join(random.Random(number).choices("abcd", k=5)) for number in range(40)]
    (tmp_path / "pairs.tsv").write_text("".join(f"{word}\t{word[::-1]}\n" for word in words))
    content = {
        "tokenizer": {"kind": "char"},
        "model": {"preset": "transformer-tiny"},
        "data": {"seq_len": 16},
        "train": {"batch_size": 3},
    }
    material = opened(RunConfig.from_dict(content), PairPaths(((tmp_path / "pairs.tsv",),), ()), None, tmp_path)
    said = {}
    for number in range(30):
        (row,) = material.data.rows(np.array([number]))
        texts = material.data.provenance(number)
        assert [len(segment.targets) for segment in row] == [6] * len(texts)
        said[number] = [tuple(segment.targets.tolist()) for segment in row], [words[text] for text in texts]
    meant = {ids: word for found, texts in said.values() for ids, word in zip(found, texts, strict=True)}
    assert all(meant[ids] == word for found, texts in said.values() for ids, word in zip(found, texts, strict=True))
    assert len(set(meant.values())) == len(meant) > 20, "one text, one row of ids"
    assert material.describe_rows(range(1)).startswith("pair")


def test_rows_of_a_stream_have_no_provenance(tmp_path):
    (tmp_path / "texts").mkdir()
    config = RunConfig.from_dict({"data": {"seq_len": 16, "order": "stream"}, "train": {"batch_size": 2}})
    material = opened(config, numbered(tmp_path / "texts"), train_tokenizer("byte", []), tmp_path)
    assert material.describe_rows(range(4)) == ""
