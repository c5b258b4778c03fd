"""Packing: rows, lost tokens, and gradients that are independent of the packing."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from kvad.errors import ConfigError, DataError
from kvad.model.no_cache import NoCache
from kvad.model_input import AttentionPattern, TokenPositions
from kvad.train.config.run import RunConfig
from kvad.train.data import packing
from kvad.train.data.collate import CollateConfig, Segment, collate_rows, split_segments
from kvad.train.data.packed_dataset import PackedDataset
from kvad.train.data.packers import DocumentPacker
from kvad.train.data.packing import pack_rows, split_windows
from kvad.train.objectives.cross_entropy import Autocast, CrossEntropyObjective
from tests.support.random_models import STATES, build, model_config
from tests.train.data.test_document_packer import Tokens
from tests.train.data.test_text_packer import MANY, SMALL, Pairs, model, pair_dataset  # noqa: F401

EXACT = Autocast("fp32", "cpu")


def rows_of(packed):
    return [packed.lengths[a:b].tolist() for a, b in itertools.pairwise(packed.first)]


def column(*lengths):
    return np.array(lengths)[:, None]


# ---------------------------------------------------------------- rows


def test_docstring_examples():
    assert rows_of(pack_rows(column(3, 5, 4, 2, 6), 8, "first-fit", crop=True)) == [[[6], [2]], [[5], [3]], [[4]]]
    assert rows_of(pack_rows(column(7, 7, 7), 8, "first-fit", crop=True)) == [[[7]], [[7]], [[7]]]
    assert rows_of(pack_rows(column(7, 7, 7), 8, "best-fit", crop=True)) == [[[7], [1]], [[7]]]
    document, begin, end = split_windows(np.array([3, 10]), 4, np.array([2, 3]))
    assert list(zip(document, begin, end, strict=True)) == [(0, 0, 3), (1, 0, 3), (1, 3, 7), (1, 7, 10)]


@pytest.mark.parametrize("sides", [1, 2])
@pytest.mark.parametrize("pool", [4096, 37])
def test_first_fit_equals_its_definition(monkeypatch, sides, pool):
    monkeypatch.setattr(packing, "OPEN_ROWS", pool)
    lengths = np.random.default_rng(0).integers(1, 33, (200, sides))
    packed = pack_rows(lengths, 32, "first-fit", crop=sides == 1)
    expected = []
    for low in range(0, 200, pool):
        rows, room = [], []
        for piece in sorted(range(low, min(low + pool, 200)), key=lambda p: -lengths[p].max()):
            for row, left in zip(rows, room, strict=True):  # noqa: B007
                if (left >= lengths[piece]).all():
                    break
            else:
                row, left = [], np.full(sides, 32)
                rows.append(row)
                room.append(left)
            row.append(piece)
            left -= lengths[piece]
        expected += rows
    assert [packed.pieces[a:b].tolist() for a, b in itertools.pairwise(packed.first)] == expected


@pytest.mark.parametrize(("fit", "crop"), [("first-fit", True), ("best-fit", True), ("best-fit", False)])
def test_every_piece_is_in_one_row_that_has_room(fit, crop):
    lengths = np.random.default_rng(1).integers(1, 65, (500, 1 if crop else 2))
    packed = pack_rows(lengths, 64, fit, crop=crop)
    assert sorted(packed.pieces) == list(range(500))
    assert all((np.sum(row, axis=0) <= 64).all() for row in rows_of(packed))
    lost = lengths[packed.pieces] - packed.lengths
    assert (lost >= 0).all() and (fit == "best-fit" and crop) == bool(lost.any())
    if crop and fit == "best-fit":
        assert all(np.sum(row) == 64 for row in rows_of(packed)[:-1]), "every row but the last is full"


def test_no_pieces_give_no_rows():
    assert rows_of(pack_rows(np.empty((0, 1), int), 8, "first-fit", crop=True)) == []


# ---------------------------------------------------------------- documents


def config(context=16, batch=3, **data):
    return RunConfig.from_dict({"data": {"seq_len": context, **data}, "train": {"batch_size": batch}})


def document_dataset(store, config):
    return PackedDataset(DocumentPacker(store, config), config)


STORE = Tokens(5, 40, 1, 9, 16, 3, 17, 8, 33, 2, 7, 12)  # longer than a row, as long as one, and a lone separator
PACKINGS = ["split", "first-fit", "best-fit"]


def pairs_of(rows):
    """Input and target of every token of the rows, sorted."""
    return sorted((int(t), int(s)) for row in rows for part in row for t, s in zip(*part[:2], strict=True))


@pytest.mark.parametrize("fit", ["first-fit", "best-fit"])
def test_epoch_has_the_same_targets_as_the_split_stream(fit):
    data = document_dataset(STORE, config(packing=fit))
    use, source, training = data.packer.source.packing_stats(), data.packer.sources[0], data.packer.training
    circle = pairs_of(training.segments(np.array([0]), len(training)))
    for epoch in range(3):
        per_epoch = len(source.plan(epoch).order)
        begin = sum(len(source.plan(e).order) for e in range(epoch))
        rows = data.rows(np.arange(begin, begin + per_epoch))
        if fit == "first-fit":
            assert pairs_of(rows) == circle, "every token once, with its next token"
        else:
            assert len(pairs_of(rows)) < len(circle) and set(pairs_of(rows)) <= set(circle)
            assert sum(sum(len(part.tokens) for part in row) < 16 for row in rows) <= 1, "all rows but one are full"
    assert use.num_used + use.num_cropped == len(training)
    assert (use.num_cropped == 0) == (fit == "first-fit") and use.capacity == use.rows * 16


def test_each_epoch_has_new_offsets():
    (source,) = document_dataset(Tokens(*[100] * 12), config(packing="first-fit")).packer.sources
    layouts = [source.plan(epoch).layout for epoch in range(4)]
    begins = [set((layout.begin[layout.begin > 0] % 16).tolist()) for layout in layouts]
    assert len(set(map(tuple, begins))) == 4 and all(len(found) > 3 for found in begins)


@pytest.mark.parametrize("fit", PACKINGS)
def test_rows_are_independent_of_the_first_step(fit):
    """Includes an uneven end of an epoch, and a corpus shorter than a batch: the step continues in the next epoch."""
    for store, batch in ((STORE, 4), (Tokens(9, 8, 12), 40)):

        def steps(numbers):
            data = document_dataset(store, config(packing=fit, context=8, batch=batch))  # noqa: B023
            return {n: [b.model_input.token_ids.tolist() for b in data.micro_batches(n)] for n in numbers}

        through = steps(range(9))
        assert steps([7, 2, 8, 0]) == {n: through[n] for n in (7, 2, 8, 0)}
        assert len({str(step) for step in through.values()}) == 9
        assert len(document_dataset(store, config(packing=fit, batch=batch)).rows(np.arange(batch))) == batch


@pytest.mark.parametrize("fit", PACKINGS)
def test_evaluation_includes_an_uneven_last_batch(fit):
    data = document_dataset(STORE, config(packing=fit, validation_fraction=0.5, batch=2, context=8))
    batches = list(data.evaluation())
    assert sum(len(batch.model_input.token_ids) for batch in batches) == len(data.packer.validation) - 1
    assert len({batch.model_input.sub_batches[0] for batch in batches}) > 1


def test_packing_that_an_order_does_not_support_is_refused():
    with pytest.raises(ConfigError, match=r"data.packing: first-fit packs whole documents"):
        document_dataset(STORE, config(packing="first-fit", order="windows"))
    with pytest.raises(ConfigError, match=r"must be first-fit or best-fit for pairs"):
        pair_dataset(MANY, config(packing="split"))


def test_summary_reports_packing():
    summary = document_dataset(Tokens(*range(5, 60)), config(packing="first-fit", context=32)).summary()[1]
    assert summary.startswith("packed by first-fit: ") and "0.0% of the tokens cropped" in summary
    assert "100.0% filled, 0.0% padding" in document_dataset(Tokens(*range(5, 60)), config()).summary()[1]


@pytest.mark.parametrize("position", ["rope-dynamic", "rope-longrope"])
def test_rotary_scaling_follows_the_context_of_the_run(position):
    """A batch of short rows is rotated as rows of ``data.seq_len`` tokens are, not by its width."""
    scaled = build(model_config(position), dtype=torch.float64)
    shape = CollateConfig.of_run(RunConfig.from_dict({"data": {"seq_len": 64}}))
    step = collate_rows([[Segment(np.arange(1, 9), np.arange(2, 10))]], shape).model_input
    assert step.sub_batches[0].num_new_tokens < 20 < 64, "the original limit is 20"

    def hidden(limit):
        return scaled(step._replace(seq_lens=torch.full_like(step.token_ids, limit)), NoCache(scaled.config))

    assert (hidden(8) - hidden(64)).abs().max() > 1e-6, "the regimes differ"
    assert torch.equal(scaled(step, NoCache(scaled.config)), hidden(64))


def test_token_outside_the_vocabulary_is_refused():
    rows = [[Segment(np.array([3, 70000]), np.array([1, 2]))]]
    with pytest.raises(DataError, match=r"token id 70,000 is outside the model's vocabulary of 300"):
        collate_rows(rows, CollateConfig(8, vocab_size=300))


# ---------------------------------------------------------------- gradients


def gradient(net, batches):
    net.zero_grad()
    total = sum(len(batch.targets) for batch in batches)
    summed = sum(CrossEntropyObjective(net, EXACT).accumulate_gradients(batch, total) for batch in batches)
    return summed, torch.cat([p.grad.flatten() for p in net.parameters()])


def assert_packed_is_unpacked(net, rows, shape):
    batch = collate_rows(rows, shape)
    summed, got = gradient(net, [batch])
    loss, expected = gradient(net, list(split_segments(rows, shape)))
    assert summed == pytest.approx(loss, rel=1e-12)
    assert (got - expected).abs().max() <= 1e-12 * expected.abs().max()
    blind = batch._replace(model_input=batch.model_input._replace(document_ids=None))
    assert (gradient(net, [blind])[1] - expected).abs().max() > 1e-6, "the comparison detects a leak"


@pytest.fixture(scope="module", params=["none", "rope", "alibi", "learned"])
def decoder(request):
    return build(dataclasses.replace(model_config(request.param), vocab_size=200))


@pytest.mark.parametrize(("fit", "reset"), [("split", True), ("first-fit", False), ("best-fit", True)])
def test_packed_gradients_equal_those_of_single_documents(decoder, fit, reset):
    data = document_dataset(STORE, config(packing=fit, reset_positions=reset))
    rows = data.rows(np.arange(3, 6))
    batch = collate_rows(rows, data.shape)
    assert batch.model_input.document_ids is not None and batch.model_input.document_ids.max() >= 1
    positions = batch.model_input.positions.view(batch.model_input.sub_batches[0].num_seqs, -1)
    assert bool((positions.diff() < 0).any()) == reset
    assert_packed_is_unpacked(decoder, rows, data.shape)


@pytest.mark.parametrize("heads", STATES)
@pytest.mark.parametrize("reset", [True, False])
def test_packed_documents_have_states_of_their_own(heads, reset):
    data = document_dataset(STORE, config(packing="first-fit", reset_positions=reset))
    net = build(dataclasses.replace(model_config("none", heads=heads, layers=1), vocab_size=200))
    assert_packed_is_unpacked(net, data.rows(np.arange(3, 6)), data.shape)


@pytest.mark.parametrize(("fit", "reset"), [("first-fit", True), ("best-fit", False)])
def test_packed_gradients_equal_those_of_single_pairs(model, fit, reset):  # noqa: F811
    pairs = Pairs(*((1 + i % 7, 1 + i % 5) for i in range(30)))
    data = pair_dataset(pairs, config(12, packing=fit, reset_positions=reset), 2)
    rows = data.rows(np.arange(3))
    assert (collate_rows(rows, data.shape).model_input.document_ids < 0).any() and sum(map(len, rows)) > len(rows)
    assert_packed_is_unpacked(model, rows, data.shape)


# ---------------------------------------------------------------- reset and isolate


def naive(net, rows, reset, isolate):
    """Logits of every row's tokens with an explicit mask by (document, position), one row at a time."""
    out = []
    for row in rows:
        tokens = np.concatenate([part.tokens for part in row])
        marks = [(d, p) for d, part in enumerate(row) for p in range(len(part.tokens))]
        visible = torch.tensor([[(k[0] == q[0] if isolate else True) and k <= q for k in marks] for q in marks])
        batch = collate_rows([row], CollateConfig(16, reset_positions=reset))
        positions = torch.tensor([p for _, p in marks]) if reset else torch.arange(len(tokens))
        assert batch.model_input.positions.tolist() == positions.tolist()
        out.append(by_hand(net, torch.from_numpy(tokens), positions, visible))
    return torch.cat(out)


def by_hand(net, tokens, positions, visible):
    """Logits with a reference attention: distances by ``positions``, mask ``visible``."""

    class Plain:
        def open(self, step):
            return [self] * len(net.decoder.layers)

        def attend(self, q, k, v, score):
            if score.rotary is not None:
                q, k = (turned(x, positions, score.rotary) for x in (q, k))
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
            logits = torch.einsum("qhd,khd->hqk", q, k) * score.scale
            if score.bias is not None:
                far = (positions[:, None] - positions[None]).abs()
                logits = logits - score.bias.slopes.double()[:, None, None] * score.bias.factor * far
            weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)
            return torch.einsum("hqk,khd->qhd", weights, v)

    step = collate_rows([[Segment(tokens.numpy(), tokens.numpy())]], CollateConfig(16)).model_input
    step = step._replace(positions=positions)
    return net.logits(net(step, Plain()), torch.arange(len(tokens)))


def turned(x, positions, rotary):
    half = len(rotary.inv_freq)
    angle = positions[:, None, None].double() * rotary.inv_freq.double()
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = angle.cos() * rotary.factor, angle.sin() * rotary.factor
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


@pytest.mark.parametrize("fit", ["split", "first-fit"])
@pytest.mark.parametrize(("reset", "isolate"), list(itertools.product([True, False], repeat=2)))
def test_reset_and_isolate_equal_an_explicit_mask(decoder, fit, reset, isolate):
    data = document_dataset(STORE, config(packing=fit, reset_positions=reset, isolate_documents=isolate))
    rows = data.rows(np.arange(3))
    batch = collate_rows(rows, data.shape)
    hidden = decoder(batch.model_input, NoCache(decoder.config, exact_rope=True))
    width = batch.model_input.sub_batches[0].num_new_tokens
    real = np.concatenate([r * width + np.arange(sum(len(p.tokens) for p in row)) for r, row in enumerate(rows)])
    got = decoder.logits(hidden, torch.from_numpy(real))
    assert torch.allclose(got, naive(decoder, rows, reset, isolate), atol=1e-10, rtol=0)
    assert (got - naive(decoder, rows, reset, not isolate)).abs().max() > 1e-4, "the other mask changes the logits"


def test_window_counts_tokens_of_the_row_without_isolation():
    rows = [[Segment(np.arange(3), np.arange(3)), Segment(np.arange(4), np.arange(4))]]
    step = collate_rows(rows, CollateConfig(16, isolate_documents=False)).model_input
    mark = TokenPositions(step.positions, step.document_ids, step.causal_order)
    plain = torch.arange(7)
    assert step.document_ids is None and step.positions.tolist() == [0, 1, 2, 0, 1, 2, 3]
    for options in ({}, {"window": 3}, {"causal": False}, {"causal": False, "window": 2}):
        pattern = AttentionPattern(**options)
        assert torch.equal(pattern.visible(mark, mark), pattern.visible(TokenPositions(plain), TokenPositions(plain)))


def test_pairs_without_isolation_attend_to_all_sources_but_no_padding(model):  # noqa: F811
    data = pair_dataset(SMALL, config(12, isolate_documents=False, validation_fraction=0.2), 1)
    step = collate_rows(data.rows(np.arange(2)), data.shape).model_input
    source, indices = step.encoder_input, step.logit_indices
    assert step.document_ids is None and (source.causal_order < 0).any()

    def logits_of(tokens):
        other = step._replace(encoder_input=source._replace(token_ids=tokens))
        return model.logits(model(other, NoCache(model.config)), indices)

    logits = logits_of(source.token_ids)
    changed = source.token_ids.clone()
    changed[source.causal_order < 0] = 7  # no token attends to padding
    assert torch.equal(logits, logits_of(changed))
    changed[0] = 9
    touched = (logits_of(changed) != logits).any(dim=1)
    in_row = indices // step.sub_batches[0].num_new_tokens
    assert set(in_row[touched].tolist()) == {0}
    assert touched[in_row == 0].all(), "every target of the row reads every source of it"
