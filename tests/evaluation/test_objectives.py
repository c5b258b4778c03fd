"""Evaluation of masked tokens, corrupted spans and assistant turns: reproducible, and equal to training's loss."""

import json
from dataclasses import replace

import pytest
import torch

from kvad.checkpoint.loader import load_model, open_checkpoint
from kvad.evaluation.objectives import chat_batches, evaluate_objective, masked_batches, span_batches
from kvad.model.no_cache import NoCache
from kvad.text.tokenizer import train_tokenizer
from kvad.train.config.run import ObjectiveConfig
from kvad.train.loop.run import train_model
from kvad.train.setup.objective_factory import SPECIAL_TOKENS
from kvad.train.sources.pairs import PairPaths
from tests.support.random_models import build
from tests.train.conftest import Listener
from tests.train.objectives.test_all_objectives import configured, files  # noqa: F401  (a fixture)
from tests.train.test_cli import kvad

TEXTS = ["ada bob cleo dan eve finn gus hana ivo jo kim lea " * 3, "ada bob", ""]


def tokenizer_for(kind):
    return train_tokenizer("byte", [], specials=SPECIAL_TOKENS.get(kind))


def model_for(kind, tokenizer):
    return build(configured(kind).resolve(tokenizer.vocab_size))


def test_masked_tokens_are_reproducible_and_their_targets_right():
    tokenizer = tokenizer_for("masked-lm")
    once, again = (list(masked_batches(tokenizer, TEXTS, 32, 0.15)) for _ in range(2))
    assert all(torch.equal(a.model_input.token_ids, b.model_input.token_ids) for a, b in zip(once, again, strict=True))
    ids = [token for text in TEXTS[:2] for token in tokenizer.add_special_tokens(tokenizer.encode(text))]
    model_input = once[0].model_input
    width = model_input.sub_batches[0].num_new_tokens
    rows, documents = model_input.token_ids.view(-1, width).tolist(), model_input.document_ids.view(-1, width)
    targets = dict(zip(model_input.logit_indices.tolist(), once[0].targets.tolist(), strict=True))
    index, special = 0, set(tokenizer.special_tokens.names().values())
    for number, row in enumerate(rows):
        for column in range(int((documents[number] >= 0).sum())):
            at, true = number * width + column, ids[index]
            assert targets.get(at, true) == true and (row[column] == true or at in targets)
            index += 1
    assert index == len(ids) and not special & set(targets.values())
    free = sum(token not in special for token in ids)
    assert 0.1 < len(targets) / free < 0.25


def test_loss_and_accuracy_equal_those_of_the_logits():
    tokenizer = tokenizer_for("masked-lm")
    model = model_for("masked-lm", tokenizer).double()
    (batch,) = masked_batches(tokenizer, TEXTS[1:2], 32, 0.5)
    logits = model.logits(model(batch.model_input, NoCache(model.config)), batch.model_input.logit_indices)
    loss = torch.nn.functional.cross_entropy(logits, batch.targets).item()
    found = evaluate_objective(model, [batch])
    assert found.loss == pytest.approx(loss, rel=1e-12) and found.targets == len(batch.targets)
    assert found.num_correct == int((logits.argmax(-1) == batch.targets).sum())
    every = list(masked_batches(tokenizer, TEXTS[:1], 24, 0.3))
    whole = evaluate_objective(model, every)
    assert whole.targets == sum(len(each.targets) for each in every)


def test_targets_of_span_corruption():
    tokenizer = tokenizer_for("span-corruption")
    first = tokenizer.special_tokens.names()["<extra_id_0>"]
    (batch,) = span_batches(tokenizer, TEXTS[:1], 48, ObjectiveConfig(kind="span-corruption"))
    num_rows = batch.model_input.sub_batches[0].num_seqs
    assert (batch.targets == first).sum() == num_rows, "every row begins with the first sentinel"
    model = model_for("span-corruption", tokenizer).double()
    assert evaluate_objective(model, [batch]).targets == len(batch.targets)


def test_chat_loss_equals_that_of_training(files, tmp_path):  # noqa: F811
    listener, out, dev = Listener(), tmp_path / "run", tmp_path / "dev.jsonl"
    dev.write_text("".join((files / "chat").read_text().splitlines(keepends=True)[:9]))
    config = configured("chat")
    config = replace(config, train=replace(config.train, steps=2, eval_tokens=0))
    train_model(config, PairPaths(((files / "chat",),), ((dev,),)), out, callbacks=[listener])
    model, opened = load_model(out)
    batches, counts = chat_batches(opened.tokenizer, opened.tokenizer_folder, [dev], 96, "strict")
    found = evaluate_objective(model, batches)
    assert counts == [9, 0] and found.loss == pytest.approx(listener.evals[-1].val_loss, rel=1e-6)
    assert found.targets == listener.evals[-1].val_tokens
    code, text, err = kvad("eval", out, dev, "--task", "chat", "--json")
    line = json.loads(text)
    assert code == 0 and line["loss"] == pytest.approx(found.loss, rel=1e-6), err
    assert (line["conversations"], line["left_out"]) == (9, 0)
    code, text, _ = kvad("eval", out, dev, "--task", "chat", "--window", 40)
    assert code == 0 and "longer than that omitted" in text and "after everything before them" in text
    for more, message in (
        (["--use-cache"], "runs without an engine"),
        (["--word-perplexity"], "--word-perplexity does not apply to --task chat"),
    ):
        code, _, err = kvad("eval", out, dev, "--task", "chat", *more)
        assert code == 2 and message in err


@pytest.mark.parametrize("kind", ["masked-lm", "span-corruption"])
def test_command(kind, files, tmp_path):  # noqa: F811
    config = configured(kind)
    train_model(replace(config, train=replace(config.train, steps=1)), [files / kind], tmp_path / "run")
    task = [] if kind == "masked-lm" else ["--task", kind]
    found = [kvad("eval", tmp_path / "run", files / kind, *task, "--json") for _ in range(2)]
    lines = [json.loads(out) for code, out, _ in found if code == 0]
    assert len(lines) == 2 and {**lines[0], "seconds": 0} == {**lines[1], "seconds": 0}
    assert lines[0]["task"] == kind and lines[0]["noise_density"] == 0.15 and 4 < lines[0]["loss"] < 7
    code, out, _ = kvad("eval", tmp_path / "run", files / kind, *task, "--document-unit", "lines")
    assert code == 0 and "seed 0" in out and "each text separately" in out
    code, _, err = kvad("eval", tmp_path / "run", files / kind, *task, "--window", 4096)
    assert code == 2 and "must be from 2 to the model's limit of 48" in err
    (tmp_path / "short").write_text("a" if kind == "span-corruption" else "\n\n")
    code, _, err = kvad("eval", tmp_path / "run", tmp_path / "short", *task)
    assert code == 2 and "Traceback" not in err
    assert open_checkpoint(tmp_path / "run").config.max_seq_len == 48
