"""Documents as rows: targets, validation split, order of the rows."""

import numpy as np
import pytest
import torch

from kvad.errors import DataError
from kvad.model.no_cache import NoCache
from kvad.train.data.collate import CollateConfig, collate_rows
from kvad.train.data.packers import SplitRows, TokenSpans, evaluation_rows, split_validation
from tests.support.random_models import build, model_config

SEPARATOR = 9


class Tokens:
    """Store in memory: documents of the given lengths; token = 10 * document + index, the separator first."""

    def __init__(self, *lengths):
        self.offsets = np.cumsum([0, *lengths])
        self.stream = np.concatenate([[SEPARATOR, *range(10 * d + 1, 10 * d + n)] for d, n in enumerate(lengths)])

    num_tokens = property(lambda self: int(self.offsets[-1]))
    num_documents = property(lambda self: len(self.offsets) - 1)

    def take(self, at):
        return self.stream[at]


def whole(store):
    return TokenSpans(store, np.stack((store.offsets[:-1], store.offsets[1:]), axis=1))


def build_batch(rows, starts, length):
    return collate_rows(rows.segments(np.array(starts), length), CollateConfig(length))


def row_at(rows, start, length):
    """Tokens, positions, documents and targets of one row, [length] each; target -1 is none."""
    (row,) = rows.segments(np.array([start]), length)
    batch = collate_rows([row], CollateConfig(length, keep_document_ids=True)).model_input
    targets = np.concatenate([segment.targets for segment in row])
    return batch.token_ids.numpy(), batch.positions.numpy(), batch.document_ids.numpy(), targets


def test_docstring_example():
    tokens, positions, documents, targets = (a.tolist() for a in row_at(whole(Tokens(4, 4, 3)), 0, 7))
    assert tokens == [9, 1, 2, 3, 9, 11, 12]
    assert positions == [0, 1, 2, 3, 0, 1, 2]
    assert documents == [0, 0, 0, 0, 1, 1, 1]
    assert targets == [1, 2, 3, 9, 11, 12, 13]


def test_row_inside_a_document_starts_at_position_0_and_wraps_around():
    tokens, positions, documents, targets = (a.tolist() for a in row_at(whole(Tokens(4, 3)), 5, 7))
    assert tokens == [11, 12, 9, 1, 2, 3, 9]
    assert positions == [0, 1, 0, 1, 2, 3, 0]
    assert documents == [0, 0, 1, 1, 1, 1, 2]
    assert targets == [12, 9, 1, 2, 3, 9, 11]


def test_no_target_crosses_documents():
    """A last token's target is the separator; the token after a separator is predicted from it alone."""
    store = Tokens(3, 5, 1, 2, 7)
    rows = whole(store)
    for start in range(len(rows)):
        tokens, positions, documents, targets = row_at(rows, start, 11)
        for token, position, target in zip(tokens, positions, targets, strict=True):
            if target != SEPARATOR:
                document = target // 10
                assert token == SEPARATOR or token // 10 == document
                assert token != SEPARATOR or (position == 0 and target == 10 * document + 1)
        assert (np.diff(documents) == (tokens[1:] == SEPARATOR)).all()
        assert (positions[tokens == SEPARATOR] == 0).all()


def test_packed_documents_are_isolated():
    """A document's logits in a packed row equal those of the document alone."""
    store = Tokens(6, 5)
    model = build(model_config(), dtype=torch.float64)
    no_cache = NoCache(model.config)

    def logits(rows, length):
        batch = build_batch(rows, [0], length)
        return model.logits(model(batch.model_input, no_cache), torch.arange(length))

    second = TokenSpans(store, np.array([[6, 11]]))
    alone, packed = logits(second, 5), logits(whole(store), 11)[6:]
    assert torch.allclose(alone, packed, atol=1e-12)
    batch = build_batch(whole(store), [0], 11)
    blind = batch.model_input._replace(document_ids=None)
    assert not torch.allclose(alone, model.logits(model(blind, no_cache), torch.arange(11))[6:], atol=1e-6)


def test_batch_has_document_ids_only_if_a_row_has_several_documents():
    rows = whole(Tokens(20))
    batch = build_batch(rows, [0, 7], 6)
    assert batch.model_input.sub_batches == ((2, 6, 6),) and batch.model_input.document_ids is None
    assert batch.model_input.token_ids.view(2, 6)[1].tolist() == [7, 8, 9, 10, 11, 12]
    assert batch.model_input.positions.tolist() == [*range(6), *range(6)]
    assert batch.targets.view(2, 6)[1].tolist() == [8, 9, 10, 11, 12, 13]
    assert build_batch(rows, [18], 6).model_input.document_ids is not None


def test_no_target_crosses_a_cut():
    store = Tokens(10)
    before, after = TokenSpans(store, np.array([[0, 6]])), TokenSpans(store, np.array([[6, 10]]))
    batch = build_batch(before, [3], 5)
    assert batch.model_input.token_ids.tolist() == [3, 4, 5, 9, 1]
    assert batch.model_input.logit_indices.tolist() == [0, 1, 3, 4] and batch.targets.tolist() == [4, 5, 1, 2]
    assert build_batch(after, [0], 6).targets.tolist() == [7, 8, 9, 7, 8]


# ---------------------------------------------------------------- splits


def test_many_documents_are_held_out_whole():
    store = Tokens(*range(5, 45))
    training, validation = split_validation(store, 0.1, seed=0)
    assert len(training) + len(validation) == store.num_tokens
    assert 0.05 <= len(validation) / store.num_tokens <= 0.1
    assert len(training.spans) + len(validation.spans) == 40
    for part in (training, validation):
        assert row_at(part, 0, 1)[0][0] == SEPARATOR
    assert (split_validation(store, 0.1, seed=0)[1].spans == validation.spans).all()
    assert len({str(split_validation(store, 0.1, seed=seed)[1].spans) for seed in range(5)}) > 1


@pytest.mark.parametrize("lengths", [(100,), (30, 30, 40), (900, *[1] * 20)])  # the last: no draw comes near a tenth
def test_few_documents_are_split_at_the_fraction(lengths):
    store = Tokens(*lengths)
    training, validation = split_validation(store, 0.1, seed=0)
    cut = store.num_tokens - int(store.num_tokens * 0.1)
    assert (len(training), len(validation)) == (cut, store.num_tokens - cut)
    assert (row_at(training, 0, cut - 1)[0] == store.stream[: cut - 1]).all()
    assert row_at(validation, 0, 1)[0][0] == store.stream[cut]


def test_too_short_corpus_is_refused():
    with pytest.raises(DataError, match=r"too short: 3 tokens cannot be split"):
        split_validation(Tokens(3), 0.1, seed=0)
    with pytest.raises(DataError, match=r"too short: 40 tokens to train on, and a row of 64 needs 65"):
        order_of(40, 64, 4, seed=0)


# ---------------------------------------------------------------- order


def order_of(num_tokens, context, num_rows, seed, windows=False):
    """Return a function from the number of a step to the starts of its rows."""
    rows = SplitRows(whole(Tokens(num_tokens)), context, num_rows, seed, windows=windows)
    return lambda step: rows.starts(np.arange(num_rows) + step * num_rows)


def test_epoch_uses_every_row_once_at_a_new_offset():
    starts_of = order_of(num_tokens=103, context=10, num_rows=5, seed=3)
    first, second = ([*starts_of(2 * e), *starts_of(2 * e + 1)] for e in (0, 1))
    for starts in (first, second):
        places = sorted((start - starts[0]) % 103 for start in starts)
        covered = {(start + i) % 103 for start in starts for i in range(10)}
        assert len(set(places)) == 10 and len(covered) == 100
    assert set(first) != set(second), "the second epoch cuts elsewhere"
    assert first != sorted(first)


@pytest.mark.parametrize("windows", [False, True])
def test_the_order_is_a_function_of_seed_and_step(windows):
    def make(seed=3):
        return order_of(num_tokens=500, context=16, num_rows=7, seed=seed, windows=windows)

    forwards = make()
    expected = [forwards(step).tolist() for step in range(12)]
    backwards = make()
    assert [backwards(step).tolist() for step in reversed(range(12))] == expected[::-1]
    assert [make(4)(step).tolist() for step in range(12)] != expected
    assert len({tuple(starts) for starts in expected}) == 12


def test_windows_end_inside_the_split():
    starts = order_of(num_tokens=40, context=16, num_rows=500, seed=0, windows=True)(0)
    assert starts.min() == 0 and starts.max() == 40 - 16 - 1


def test_one_step_may_span_epochs():
    starts_of = order_of(num_tokens=35, context=10, num_rows=8, seed=0)
    starts = [*starts_of(0), *starts_of(1), *starts_of(2)]
    assert all(len(set(starts[3 * e : 3 * e + 3])) == 3 for e in range(8))


@pytest.mark.parametrize("num_tokens", [12, 41, 48, 50, 160])
@pytest.mark.parametrize("context", [8, 16, 200])
def test_evaluation_covers_every_target_once(num_tokens, context):
    rows = whole(Tokens(num_tokens))
    seen = []
    for starts, length in evaluation_rows(rows, context, 0, batch=3):
        assert length <= context
        seen += [(start + i) for start in starts.tolist() for i in range(length)]
    assert seen == list(range(num_tokens - 1))


def test_partial_evaluation_is_evenly_spread():
    rows = whole(Tokens(1000))
    starts = np.concatenate([s for s, _ in evaluation_rows(rows, 10, 100, batch=4)])
    assert len(starts) == 10 and starts[0] == 0 and starts[-1] >= 880 and len(set(np.diff(starts))) <= 2
