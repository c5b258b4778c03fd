"""Packing: which token is predicted from which, and which rows a step takes."""

import numpy as np
import pytest
import torch

from kvad.errors import DataError
from kvad.model.no_cache import NoCache
from kvad.train.data.document_dataset import RowOrder, TokenSpans, build_batch, evaluation_rows, split_validation
from tests.support.random_models import build, model_config

SEPARATOR = 9


class Tokens:
    """A store in memory: documents of the given lengths; token = 10 * document + place, the separator first."""

    def __init__(self, *lengths):
        self.offsets = np.cumsum([0, *lengths])
        self.stream = np.concatenate([[SEPARATOR, *range(10 * d + 1, 10 * d + n)] for d, n in enumerate(lengths)])

    num_tokens = property(lambda self: int(self.offsets[-1]))
    num_documents = property(lambda self: len(self.offsets) - 1)

    def take(self, at):
        return self.stream[at]


def whole(store):
    return TokenSpans(store, np.stack((store.offsets[:-1], store.offsets[1:]), axis=1))


def test_the_worked_example_of_the_docstring():
    rows = whole(Tokens(4, 4, 3))
    tokens, positions, documents, targets = (a[0].tolist() for a in rows.rows(np.array([0]), 7))
    assert tokens == [9, 1, 2, 3, 9, 11, 12]
    assert positions == [0, 1, 2, 3, 0, 1, 2]
    assert documents == [0, 0, 0, 0, 1, 1, 1]
    assert targets == [1, 2, 3, 9, 11, 12, 13]


def test_a_row_from_inside_a_document_starts_at_position_0_and_the_circle_closes():
    rows = whole(Tokens(4, 3))
    tokens, positions, documents, targets = (a[0].tolist() for a in rows.rows(np.array([5]), 7))
    assert tokens == [11, 12, 9, 1, 2, 3, 9]
    assert positions == [0, 1, 0, 1, 2, 3, 0]
    assert documents == [0, 0, 1, 1, 1, 1, 2]
    assert targets == [12, 9, 1, 2, 3, 9, 11]


def test_no_target_crosses_into_the_next_documents_text():
    """The target of a document's last token is the separator; what follows one is predicted from it alone."""
    store = Tokens(3, 5, 1, 2, 7)
    rows = whole(store)
    for start in range(len(rows)):
        tokens, positions, documents, targets = (a[0] for a in rows.rows(np.array([start]), 11))
        for token, position, target in zip(tokens, positions, targets, strict=True):
            if target != SEPARATOR:
                document = target // 10
                assert token == SEPARATOR or token // 10 == document
                assert token != SEPARATOR or (position == 0 and target == 10 * document + 1)
        assert (np.diff(documents) == (tokens[1:] == SEPARATOR)).all()
        assert (positions[tokens == SEPARATOR] == 0).all()


def test_documents_do_not_see_each_other():
    """A document's loss in a packed row is what it is alone."""
    store = Tokens(6, 5)
    model = build(model_config(), dtype=torch.float64)
    memory = NoCache(model.config)

    def logits(rows, length):
        batch = build_batch(rows, np.array([0]), length)
        return model.logits(model(batch.model_input, memory), torch.arange(length))

    second = TokenSpans(store, np.array([[6, 11]]))
    alone, packed = logits(second, 5), logits(whole(store), 11)[6:]
    assert torch.allclose(alone, packed, atol=1e-12)
    batch = build_batch(whole(store), np.array([0]), 11)
    blind = batch.model_input._replace(document_ids=None)
    assert not torch.allclose(alone, model.logits(model(blind, memory), torch.arange(11))[6:], atol=1e-6)


def test_a_batch_is_one_rectangle_and_names_documents_only_where_there_are_several():
    rows = whole(Tokens(20))
    batch = build_batch(rows, np.array([0, 7]), 6)
    assert batch.model_input.sub_batches == ((2, 6, 6),) and batch.model_input.document_ids is None
    assert batch.model_input.token_ids.view(2, 6)[1].tolist() == [7, 8, 9, 10, 11, 12]
    assert batch.model_input.positions.tolist() == [*range(6), *range(6)]
    assert batch.targets.view(2, 6)[1].tolist() == [8, 9, 10, 11, 12, 13]
    assert build_batch(rows, np.array([18]), 6).model_input.document_ids is not None


def test_no_target_reaches_over_a_cut():
    store = Tokens(10)
    before, after = TokenSpans(store, np.array([[0, 6]])), TokenSpans(store, np.array([[6, 10]]))
    batch = build_batch(before, np.array([3]), 5)
    assert batch.model_input.token_ids.tolist() == [3, 4, 5, 9, 1]
    assert batch.model_input.logit_indices.tolist() == [0, 1, 3, 4] and batch.targets.tolist() == [4, 5, 1, 2]
    assert build_batch(after, np.array([0]), 6).targets.tolist() == [7, 8, 9, 7, 8]


# ---------------------------------------------------------------- splits


def test_many_documents_are_held_out_whole():
    store = Tokens(*range(5, 45))
    training, validation = split_validation(store, 0.1, seed=0)
    assert len(training) + len(validation) == store.num_tokens
    assert 0.05 <= len(validation) / store.num_tokens <= 0.1
    assert training.num_documents + validation.num_documents == 40
    for part in (training, validation):
        assert part.rows(np.array([0]), 1)[0][0, 0] == SEPARATOR
    again = split_validation(store, 0.1, seed=0)[1].rows(np.array([0]), 30)[0]
    assert (again == validation.rows(np.array([0]), 30)[0]).all()
    assert (
        len({tuple(split_validation(store, 0.1, seed=seed)[1].rows(np.array([0]), 5)[0][0]) for seed in range(5)}) > 1
    )


@pytest.mark.parametrize("lengths", [(100,), (30, 30, 40), (900, *[1] * 20)])  # the last: no draw comes near a tenth
def test_few_documents_are_cut_at_the_place(lengths):
    store = Tokens(*lengths)
    training, validation = split_validation(store, 0.1, seed=0)
    cut = store.num_tokens - int(store.num_tokens * 0.1)
    assert (len(training), len(validation)) == (cut, store.num_tokens - cut)
    assert (training.rows(np.array([0]), cut - 1)[0][0] == store.stream[: cut - 1]).all()
    assert validation.rows(np.array([0]), 1)[0][0, 0] == store.stream[cut]


def test_a_corpus_too_short_says_how_many_tokens_it_has_and_needs():
    with pytest.raises(DataError, match=r"too short: 3 tokens cannot be split"):
        split_validation(Tokens(3), 0.1, seed=0)
    with pytest.raises(DataError, match=r"too short: 40 tokens to train on, and a row of 64 needs 65"):
        RowOrder("epochs", 40, 64, 4, 0)


# ---------------------------------------------------------------- order


def test_an_epoch_takes_every_row_once_at_a_fresh_offset():
    order = RowOrder("epochs", num_tokens=103, context=10, num_rows=5, seed=3)
    first, second = ([*order.starts(2 * e), *order.starts(2 * e + 1)] for e in (0, 1))
    for starts in (first, second):
        places = sorted((start - starts[0]) % 103 for start in starts)
        covered = {(start + i) % 103 for start in starts for i in range(10)}
        assert len(set(places)) == 10 and len(covered) == 100
    assert set(first) != set(second), "the second epoch cuts elsewhere"
    assert first != sorted(first)


@pytest.mark.parametrize("kind", ["epochs", "windows"])
def test_the_order_is_a_function_of_seed_and_step(kind):
    def make(seed=3):
        return RowOrder(kind, num_tokens=500, context=16, num_rows=7, seed=seed)

    forwards = make()
    expected = [forwards.starts(step).tolist() for step in range(12)]
    backwards = make()
    assert [backwards.starts(step).tolist() for step in reversed(range(12))] == expected[::-1]
    assert [make(4).starts(step).tolist() for step in range(12)] != expected
    assert len({tuple(starts) for starts in expected}) == 12


def test_windows_never_reach_over_the_end():
    order = RowOrder("windows", num_tokens=40, context=16, num_rows=500, seed=0)
    starts = order.starts(0)
    assert starts.min() == 0 and starts.max() == 40 - 16 - 1


def test_one_step_may_span_epochs():
    order = RowOrder("epochs", num_tokens=35, context=10, num_rows=8, seed=0)
    starts = [*order.starts(0), *order.starts(1), *order.starts(2)]
    assert all(len(set(starts[3 * e : 3 * e + 3])) == 3 for e in range(8))


@pytest.mark.parametrize("num_tokens", [12, 41, 48, 50, 160])
@pytest.mark.parametrize("context", [8, 16, 200])
def test_an_evaluation_covers_every_target_once(num_tokens, context):
    rows = whole(Tokens(num_tokens))
    seen = []
    for starts, length in evaluation_rows(rows, context, 0, batch=3):
        assert length <= context
        seen += [(start + i) for start in starts.tolist() for i in range(length)]
    assert seen == list(range(num_tokens - 1))


def test_a_part_of_an_evaluation_is_spread_evenly():
    rows = whole(Tokens(1000))
    starts = np.concatenate([s for s, _ in evaluation_rows(rows, 10, 100, batch=4)])
    assert len(starts) == 10 and starts[0] == 0 and starts[-1] >= 880 and len(set(np.diff(starts))) <= 2
