"""Masked language modelling: which tokens are drawn, what becomes of them, and that only they are in the loss."""

import numpy as np
import pytest
import torch

from kvad.errors import DataError
from kvad.model_input import ModelInput, SubBatch
from kvad.text.tokenizer import train_tokenizer
from kvad.train.data.collate import Batch
from kvad.train.objectives.masked_lm import (
    EVAL_STREAM,
    TRAIN_STREAM,
    InputMaskingDataset,
    MaskedLMDataset,
    mask_row,
    row_rng,
)

TOKENIZER = train_tokenizer("byte", [], specials=("pad", "cls", "sep", "mask"))
MASK, CLS, SEP, PAD = (getattr(TOKENIZER.special_tokens, role) for role in ("mask", "cls", "sep", "pad"))


class Rows:
    """Rows of [CLS] text [SEP] and padding, as next-token data gives them."""

    train_tokens = validation_tokens = tokens_per_step = 400

    def __init__(self, rows=4, length=100, padding=7):
        random = np.random.default_rng(0)
        tokens = random.integers(0, 256, (rows, length))
        tokens[:, 0], tokens[:, -padding - 1], tokens[:, -padding:] = CLS, SEP, PAD
        documents = np.zeros_like(tokens)
        documents[:, -padding:] = -1
        flat = [torch.from_numpy(x.reshape(-1)) for x in (tokens, np.tile(np.arange(length), rows), documents)]
        step = ModelInput(flat[0], flat[1], (SubBatch(rows, length, length),), torch.arange(5), document_ids=flat[2])
        self.batch = Batch(step, torch.zeros(5, dtype=torch.int64))

    def micro_batches(self, step):
        return [self.batch]

    def evaluation(self):
        yield self.batch
        yield self.batch

    def summary(self):
        return ["rows"]


def hidden(density=0.15, seed=0):
    return MaskedLMDataset(Rows(), TOKENIZER, density, seed, 4)


def test_eighty_ten_ten():
    """200,000 drawn tokens: within five standard deviations of 0.8, 0.1 and 0.1 (Devlin et al. 2018, sec. 3.1)."""
    tokens, places = np.arange(1000) % 200, np.arange(1000)
    masked = random = kept = 0
    for number in range(400):
        read, drawn = mask_row(tokens, places, np.arange(200, 256), MASK, 0.5, row_rng(0, TRAIN_STREAM, number))
        assert len(drawn) == 500 and (np.diff(drawn) > 0).all()
        now = read[drawn]
        masked, kept = masked + (now == MASK).sum(), kept + (now == tokens[drawn]).sum()
        random += ((now >= 200) & (now < 256)).sum()
        rest = np.setdiff1d(places, drawn)
        assert (read[rest] == tokens[rest]).all(), "what was not drawn stays"
    total = 200_000
    assert masked + random + kept == total
    for count, share in ((masked, 0.8), (random, 0.1), (kept, 0.1)):
        assert abs(count / total - share) < 5 * (share * (1 - share) / total) ** 0.5


def test_only_what_was_drawn_is_asked_and_nothing_special_is_drawn():
    batch, rows = hidden().micro_batches(0)[0], Rows().batch
    original = rows.model_input.token_ids
    assert torch.equal(batch.targets, original[batch.model_input.logit_indices])
    assert not set(batch.targets.tolist()) & {CLS, SEP, PAD, MASK}
    changed = (batch.model_input.token_ids != original).nonzero().view(-1)
    assert set(changed.tolist()) <= set(batch.model_input.logit_indices.tolist())
    per_row = torch.bincount(batch.model_input.logit_indices // 100, minlength=4)
    assert per_row.tolist() == [round(0.15 * 91)] * 4, "100 places, less 7 of padding, [CLS] and [SEP]"
    assert torch.equal(batch.model_input.document_ids, rows.model_input.document_ids)


def test_random_tokens_are_never_special():
    tokens = torch.cat([hidden(0.9, seed).micro_batches(0)[0].model_input.token_ids for seed in range(20)])
    names = set(TOKENIZER.special_tokens.names().values()) - {CLS, SEP, PAD, MASK}
    assert not set(tokens.tolist()) & names


def test_every_step_and_row_draws_anew_and_evaluation_never():
    data = hidden()
    wanted = [set(data.micro_batches(step)[0].model_input.logit_indices.tolist()) for step in range(3)]
    assert wanted[0] != wanted[1] != wanted[2]
    rows = [{place % 100 for place in wanted[0] if place // 100 == row} for row in range(4)]
    assert len({frozenset(row) for row in rows}) == 4
    first, second = (list(data.evaluation()) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.model_input.token_ids, other.model_input.token_ids)
    assert not torch.equal(first[0].model_input.token_ids, first[1].model_input.token_ids)
    assert row_rng(0, TRAIN_STREAM, 1).random() != row_rng(0, EVAL_STREAM, 1).random()


def test_a_row_of_one_token_hides_it_and_an_empty_one_nothing():
    one = np.array([7])
    assert mask_row(one, np.array([0]), one, MASK, 0.15, row_rng(0, 1, 0))[1].tolist() == [0]
    read, drawn = mask_row(np.array([CLS]), np.empty(0, np.int64), one, MASK, 0.15, row_rng(0, 1, 0))
    assert read.tolist() == [CLS] and not len(drawn)


def test_a_tokenizer_without_a_mask_is_refused():
    with pytest.raises(DataError, match=r"has no mask token, and objective\.kind = masked-lm needs one"):
        MaskedLMDataset(Rows(), train_tokenizer("byte", []), 0.15, 0, 4)


def test_hiding_changes_what_is_read_and_nothing_that_is_asked():
    rows = Rows()
    data = InputMaskingDataset(rows, TOKENIZER, 0.3, 0, 4)
    shares = []
    for step in range(50):
        (batch,) = data.micro_batches(step)
        hidden = batch.model_input.token_ids != rows.batch.model_input.token_ids
        assert (batch.model_input.token_ids[hidden] == MASK).all() and not hidden[
            rows.batch.model_input.token_ids > 255
        ].any()
        assert torch.equal(batch.targets, rows.batch.targets) and torch.equal(
            batch.model_input.logit_indices, rows.batch.model_input.logit_indices
        )
        shares.append(hidden.sum().item() / (4 * 91))
    assert np.mean(shares) == pytest.approx(0.3, abs=0.02) and len(set(shares)) > 10
    assert all(batch is rows.batch for batch in data.evaluation())
    with pytest.raises(DataError, match=r"objective\.input_mask_ratio needs one"):
        InputMaskingDataset(rows, train_tokenizer("byte", []), 0.3, 0, 4)
