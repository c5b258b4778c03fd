"""Non-finite losses and gradients: the run stops and names step, texts and module."""

import math
import random

import numpy as np
import pytest
import torch

from kvad.checkpoint.native import open_folder
from kvad.errors import NumericalError
from kvad.model.layers import GatedMLP
from kvad.model.transformer import Transformer
from kvad.text.tokenizer import train_tokenizer
from kvad.train.data.collate import CollateConfig, Segment, collate_rows
from kvad.train.loop.data_parallel import random_state, restore_random_state
from kvad.train.loop.failures import locate_nonfinite
from kvad.train.loop.run import train_model
from kvad.train.monitoring.callbacks import Callback
from kvad.train.objectives.cross_entropy import Autocast, CrossEntropyObjective
from kvad.train.setup.corpora import resolve_corpus
from kvad.train.setup.objective_factory import resolve_objective
from kvad.train.setup.run_data import RunData
from kvad.train.sources.pairs import PairPaths
from tests.support.training_runs import tiny_config, tiny_shape


def batch_of(rows=3, length=8):
    tokens = np.arange(rows * length).reshape(rows, length) % 200
    return collate_rows([[Segment(row, np.roll(row, -1))] for row in tokens], CollateConfig(length))


@pytest.fixture
def model():
    torch.manual_seed(0)
    shape = {**tiny_shape(), "dropout.residual": 0.1}
    return Transformer(tiny_config(model={"preset": "tiny", "set": shape}, data={"seq_len": 8}).resolve(257)).train()


def poison(module, monkeypatch, at, value=math.nan):
    """Set the module's output at token ``at`` to ``value``."""
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
    """Only batches of more than 24 tokens overflow."""
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
    """sqrt(0) is finite, its slope is not."""
    mlp = model.decoder.layers[1].mlp
    assert isinstance(mlp, GatedMLP)
    real = mlp.down.forward
    monkeypatch.setattr(mlp.down, "forward", lambda x: real(x) + (x * 0).abs().sqrt().sum(-1, keepdim=True))
    fault = found(model, [batch_of()])
    assert fault.batch == 0 and "although the loss is finite" in fault.tensor_name
    assert "decoder.layers.1.mlp" in fault.tensor_name, "the first in the order of the backward pass"


def test_the_repeated_step_is_exact(model):
    """Dropout repeats its draws, so faults of a draw are located."""
    objective, state = CrossEntropyObjective(model, Autocast("fp32", "cpu")), random_state("cpu")
    first = objective.accumulate_gradients(batch_of(), 1.0)
    other = objective.accumulate_gradients(batch_of(), 1.0)
    restore_random_state(state, "cpu")
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


# ---------------------------------------------------------------- texts of a row


BYTE = train_tokenizer("byte", [])


def opened(config, named, tokenizer, tmp_path):
    config = resolve_objective(config, "encoder-decoder" if isinstance(named, PairPaths) else "decoder")
    run_data = RunData(config, resolve_corpus(config.objective.kind, named), lambda line: None)
    run_data.open(tmp_path / "data", tokenizer or run_data.make_tokenizer())
    return run_data


def write_documents(folder, letters, length=9):
    """Documents that repeat one letter each."""
    folder.mkdir()
    for number, letter in enumerate(letters):
        (folder / f"{number:02d}.txt").write_text(letter * (length + number))
    return folder


def assert_rows_name_their_texts(run_data, letters, count):
    for number in range(count):
        (row,) = run_data.data.rows(np.array([number]))
        tokens = {BYTE.decode([t]) for segment in row for t in segment.tokens.tolist() if t < 256}
        named = {letters[text] for text in run_data.data.packer.source.provenance(number)}
        assert tokens <= named and len(named - tokens) <= 1, "only the separator of one may be in the row"


@pytest.mark.parametrize("data", [{}, {"order": "windows"}, {"packing": "first-fit"}, {"packing": "best-fit"}], ids=str)
def test_rows_of_documents_name_their_texts(tmp_path, data):
    config = tiny_config(data={"seq_len": 16, **data}, batch_size=5, gradient_accumulation_steps=3)
    letters = "abcdefghijklmn"
    run_data = opened(config, [write_documents(tmp_path / "texts", letters)], BYTE, tmp_path)
    assert_rows_name_their_texts(run_data, letters, 60)
    text = run_data.data.packer.source.provenance(0)[0]
    assert f"{text + 1} (texts/{text:02d}.txt)" in run_data.describe_rows(range(1))
    assert run_data.describe_rows(range(60)).endswith(", ...")


def test_rows_of_a_mixture(tmp_path):
    folders = [write_documents(tmp_path / letters, letters, 30) for letters in ("abc", "klm")]
    sources = [{"paths": [str(folder)], "weight": 1.0} for folder in folders]
    run_data = opened(tiny_config(data={"seq_len": 8, "sources": sources}), [], BYTE, tmp_path)
    assert_rows_name_their_texts(run_data, "abcklm", 40)


def test_rows_of_pairs(tmp_path):
    words = ["".join(random.Random(number).choices("abcd", k=5)) for number in range(40)]
    (tmp_path / "pairs.tsv").write_text("".join(f"{word}\t{word[::-1]}\n" for word in words))
    config = tiny_config("encoder-decoder", tokenizer={"kind": "char"}, data={"seq_len": 16}, batch_size=3)
    run_data = opened(config, PairPaths(((tmp_path / "pairs.tsv",),), ()), None, tmp_path)
    pairs = []
    for number in range(30):
        (row,) = run_data.data.rows(np.array([number]))
        texts = run_data.data.packer.source.provenance(number)
        assert [len(segment.targets) for segment in row] == [6] * len(texts)
        pairs += [(tuple(part.targets.tolist()), words[text]) for part, text in zip(row, texts, strict=True)]
    word_of = dict(pairs)
    assert all(word_of[ids] == word for ids, word in pairs)
    assert len(set(word_of.values())) == len(word_of) > 20, "ids and words correspond one to one"
    assert run_data.describe_rows(range(1)).startswith("pair")


def test_rows_of_a_stream_have_no_provenance(tmp_path):
    config = tiny_config(data={"seq_len": 16, "order": "stream"}, batch_size=2)
    run_data = opened(config, [write_documents(tmp_path / "texts", "abcdefghijklmn")], BYTE, tmp_path)
    assert run_data.describe_rows(range(4)) == ""
