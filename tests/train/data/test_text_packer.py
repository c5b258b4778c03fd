"""Packed pairs: rows, targets, isolation and order."""

import numpy as np
import pytest
import torch

from kvad.config.model import ModelConfig
from kvad.config.serialization import override
from kvad.errors import DataError
from kvad.model.no_cache import NoCache
from kvad.model_input import AttentionParams, AttentionPattern, TokenPositions
from kvad.ops.attention import AttentionMask, dot_product_attention
from kvad.train.config.presets import MODEL_PRESETS
from kvad.train.data.collate import CollateConfig, collate_rows
from kvad.train.data.packed_dataset import MixtureSource, PackedDataset
from kvad.train.data.packers import PairTexts, WholeTextPacker, WholeTextRows
from kvad.train.objectives.cross_entropy import Autocast, CrossEntropyObjective
from tests.support.random_models import build
from tests.support.training_runs import tiny_config, tiny_shape

BOS, EOS, PAD, VOCAB = 1, 2, 3, 40
EXACT = Autocast("fp32", "cpu")


class Pairs:
    """Store in memory: pairs of texts of the given lengths (source, target)."""

    def __init__(self, *pairs):
        self.texts = []
        for pair, (source, target) in enumerate(pairs):
            first = 4 + (3 * pair) % (VOCAB - 12)
            self.texts.append([first + i % 8 for i in range(source)] + [EOS])
            self.texts.append([BOS, *(first + (i + 3) % 8 for i in range(target)), EOS])
        self.stream = np.concatenate(self.texts)
        self.offsets = np.cumsum([0, *map(len, self.texts)])

    num_tokens = property(lambda self: len(self.stream))
    num_documents = property(lambda self: len(self.texts))

    def take(self, at):
        return self.stream[at]

    def changed(self, pair):
        """The same store with another text of one pair."""
        other = Pairs.__new__(Pairs)
        other.texts, other.offsets = self.texts, self.offsets
        other.stream = self.stream.copy()
        for side in (2 * pair, 2 * pair + 1):
            span = slice(self.offsets[side], self.offsets[side + 1])
            other.stream[span] = np.where(self.stream[span] > PAD, (self.stream[span] + 11) % (VOCAB - 4) + 4, EOS)
        return other


SMALL = Pairs((2, 3), (4, 2), (1, 1), (3, 6), (5, 1), (2, 2))


def packed(store, context=12, pairs=None):
    pairs = np.arange(store.num_documents // 2) if pairs is None else np.array(pairs)
    return WholeTextRows(PairTexts(store), pairs, context, "first-fit")


def build_batch(rows, numbers, context=12):
    return collate_rows(rows.in_order(np.array(numbers)), CollateConfig(context, PAD))


def pair_dataset(store, config, num_held_out=0, transform=None):
    parts = [MixtureSource(0, store.num_documents // 2, num_held_out=num_held_out)]
    packer = WholeTextPacker(PairTexts(store), config, parts)
    return PackedDataset(packer, config, transform, CollateConfig.of_run(config, PAD))


def config(context=12, validation_fraction=0.25, **train):
    data = {"seq_len": context, "validation_fraction": validation_fraction}
    return tiny_config("encoder-decoder", data=data, **{"batch_size": 2, **train})


@pytest.fixture(scope="module")
def model():
    shape = tiny_shape("encoder-decoder", mlp=24, width=16)
    for layer in ("encoder.layer_types.L", "decoder.layer_types.L"):
        shape[f"{layer}.attention.num_heads"] = 2
    shape["decoder.layer_types.L.cross_attention.num_heads"] = 2
    content = MODEL_PRESETS["transformer-tiny"](VOCAB, 32).to_dict()
    return build(ModelConfig.from_dict(override(content, shape)))


# ---------------------------------------------------------------- rows


def test_docstring_example():
    store = Pairs((2, 2), (1, 1))
    batch = build_batch(packed(store, context=6), [0], context=6)
    (x1, x2, _), (_, t1, t2, _), (y1, _), (_, u1, _) = store.texts
    step, source = batch.model_input, batch.model_input.encoder_input
    assert source.token_ids.tolist() == [x1, x2, EOS, y1, EOS]
    assert source.positions.tolist() == [0, 1, 2, 0, 1] and source.document_ids.tolist() == [0, 0, 0, 1, 1]
    assert step.token_ids.tolist() == [BOS, t1, t2, BOS, u1] and step.positions.tolist() == [0, 1, 2, 0, 1]
    assert step.document_ids.tolist() == [0, 0, 0, 1, 1] and step.logit_indices.tolist() == [0, 1, 2, 3, 4]
    assert batch.targets.tolist() == [t1, t2, EOS, u1, EOS]
    assert step.sub_batches == ((1, 5, 5),) == source.sub_batches


def test_batch_has_every_pair_once():
    rows = packed(SMALL)
    assert len(rows) > 1
    batch = build_batch(rows, range(len(rows)))
    found = []
    for side, first in ((batch.model_input.encoder_input, 0), (batch.model_input, 1)):
        width = side.sub_batches[0].num_new_tokens
        for row in range(len(rows)):
            tokens, positions, documents = (
                x.view(len(rows), width)[row] for x in (side.token_ids, side.positions, side.document_ids)
            )
            assert (tokens[documents < 0] == PAD).all() and (positions[documents < 0] == 0).all()
            for document in range(int(documents.max()) + 1):
                in_document = documents == document
                assert positions[in_document].tolist() == list(range(int(in_document.sum())))
                found.append((first, tuple(tokens[in_document].tolist())))
    texts = [(i % 2, tuple(text if i % 2 == 0 else text[:-1])) for i, text in enumerate(SMALL.texts)]
    assert sorted(found) == sorted(texts)
    indices = batch.model_input.logit_indices
    documents = batch.model_input.document_ids
    assert (documents[indices] >= 0).all() and len(indices) == (documents >= 0).sum()
    assert sorted(batch.targets.tolist()) == sorted(t for text in SMALL.texts[1::2] for t in text[1:])


def logits_of(model, store, rows):
    batch = build_batch(rows, range(len(rows)))
    logits = model.logits(model(batch.model_input, NoCache(model.config)), batch.model_input.logit_indices)
    documents = batch.model_input.document_ids[batch.model_input.logit_indices]
    row = batch.model_input.logit_indices // batch.model_input.sub_batches[0].num_new_tokens
    return logits, row * 100 + documents


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_packed_pairs_are_isolated(model, dtype):
    model = model.to(dtype)
    before, owner = logits_of(model, SMALL, packed(SMALL))
    for pair in range(6):
        after, _ = logits_of(model, SMALL, packed(SMALL.changed(pair)))
        touched = (before != after).any(dim=1)
        assert len(set(owner[touched].tolist())) == 1, "one pair, and no other, exactly"
    model.to(torch.float64)


def gradient(model, batches):
    model.zero_grad()
    total = sum(len(batch.targets) for batch in batches)
    summed = sum(CrossEntropyObjective(model, EXACT).accumulate_gradients(batch, total) for batch in batches)
    return summed, torch.cat([p.grad.flatten() for p in model.parameters()])


def test_packed_gradients_equal_those_of_single_pairs(model):
    rows = packed(SMALL)
    alone = [build_batch(packed(SMALL, pairs=[pair]), [0]) for pair in range(6)]
    assert all(batch.model_input.document_ids is None for batch in alone), "one pair without padding needs no mask"
    loss, expected = gradient(model, alone)
    together = build_batch(rows, range(len(rows)))
    assert (together.model_input.document_ids < 0).any() and (together.model_input.encoder_input.document_ids < 0).any()
    for batches in ([together], [build_batch(rows, [row]) for row in range(len(rows))]):
        summed, got = gradient(model, batches)
        assert summed == pytest.approx(loss, rel=1e-12)
        assert (got - expected).abs().max() <= 1e-12 * expected.abs().max()
    source = together.model_input.encoder_input._replace(document_ids=None)
    blind = together._replace(model_input=together.model_input._replace(encoder_input=source))
    assert (gradient(model, [blind])[1] - expected).abs().max() > 1e-3, "the comparison detects a leak"


@pytest.mark.parametrize("kernel", ["reference", "sdpa"])
def test_fully_masked_padding_gives_zeros(kernel):
    """A decoder's padding in a row whose source has none."""
    q, k, v = (torch.randn(1, *shape, requires_grad=True) for shape in ((4, 2, 8), (2, 3, 8), (2, 3, 8)))
    marks = (
        TokenPositions(torch.zeros(1, n, dtype=torch.int64), torch.tensor([d]))
        for n, d in ((4, [0, 0, -1, -1]), (3, [0] * 3))
    )
    out = dot_product_attention(
        q, k, v, AttentionMask(*marks, AttentionPattern(causal=False)), AttentionParams(1.0), kernel=kernel
    ).out
    assert (out[:, 2:] == 0).all() and (out[:, :2] != 0).all()
    out.square().sum().backward()
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v)) and (q.grad[:, 2:] == 0).all()


# ---------------------------------------------------------------- a run's data

MANY = Pairs(*((1 + i % 7, 1 + i % 5) for i in range(80)))


def data(store=MANY, num_held_out=0, **keywords):
    return pair_dataset(store, config(**keywords), num_held_out)


def seen(rows):
    return sorted(rows.layout.text.tolist())


def test_last_pairs_are_held_out():
    found = data()
    packer = found.packer
    assert seen(packer.sources[0]) == list(range(60)) and seen(packer.validation) == list(range(60, 80))
    assert seen(data(num_held_out=3).packer.validation) == [77, 78, 79]
    assert found.train_tokens == sum(2 + i % 5 for i in range(60))
    source, target = packer.examples(3)[0]
    assert [source, target] == MANY.texts[120:122]


def test_pairs_longer_than_a_row_are_left_out_and_counted():
    store = Pairs((3, 3), (9, 2), (2, 9), (7, 7), (2, 2), (30, 2), (1, 1), (1, 1))
    found = data(store, context=8)
    assert seen(found.packer.sources[0]) == [0, 3, 4] and seen(found.packer.validation) == [6, 7]
    assert "left out: 3 pairs longer than data.seq_len 8 (the longest side has 31 tokens)" in found.summary()
    with pytest.raises(DataError, match=r"no pair is left for validation: none of 2 pairs fits data.seq_len 8"):
        data(Pairs((3, 3), (3, 3), (3, 3), (3, 3), (3, 3), (3, 3), (9, 2), (2, 9)), context=8)
    with pytest.raises(DataError, match=r"no pair is left for training"):
        data(Pairs((3, 3)))


def test_utilization_is_reported():
    found = data()
    count = len(found.packer.sources[0])
    taken = sum(2 + i % 7 for i in range(60)) / (12 * count)
    assert taken > 0.85
    assert found.summary()[-1].startswith(f"packed: {count} rows of 12 + 12 tokens, {taken:.1%} of the sources")


def flat(batches):
    return [batch.model_input.token_ids.tolist() + batch.targets.tolist() for batch in batches]


def test_the_order_is_a_function_of_seed_and_step():
    forwards = data(gradient_accumulation_steps=2)
    expected = [flat(forwards.micro_batches(step)) for step in range(12)]
    backwards = data(gradient_accumulation_steps=2)
    assert [flat(backwards.micro_batches(step)) for step in reversed(range(12))] == expected[::-1]
    assert [flat(data(gradient_accumulation_steps=2, seed=1).micro_batches(step)) for step in range(12)] != expected
    assert all(len(step) == 2 for step in expected)


def test_epoch_uses_every_pair_once():
    found = data(batch_size=1)
    count = len(found.packer.sources[0])
    epochs = [[found.micro_batches(step)[0] for step in range(e * count, (e + 1) * count)] for e in (0, 1)]
    targets = [sorted(t for batch in epoch for t in batch.targets.tolist()) for epoch in epochs]
    assert targets[0] == targets[1] == sorted(t for i in range(60) for t in MANY.texts[2 * i + 1][1:])
    assert flat(epochs[0]) != flat(epochs[1])


def test_evaluation_covers_all_pairs_or_a_part():
    found = data(eval_tokens=0)
    assert sum(len(batch.targets) for batch in found.evaluation()) == found.validation_tokens
    part = data(eval_tokens=found.validation_tokens // 2)
    assert 0 < sum(len(batch.targets) for batch in part.evaluation()) < found.validation_tokens
