"""Masked language modeling: draws, replacements and targets."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvad.errors import DataError
from kvad.text.tokenizer import train_tokenizer
from kvad.train.config.run import RunConfig
from kvad.train.data.collate import CollateConfig, Segment, collate_rows
from kvad.train.data.packed_dataset import EVAL_STREAM, TRAIN_STREAM, PackedDataset, Packer, row_rng
from kvad.train.objectives.denoising import InputMasking, TokenMasking, mask_row

TOKENIZER = train_tokenizer("byte", [], specials=("pad", "cls", "sep", "mask"))
MASK, CLS, SEP, PAD = (getattr(TOKENIZER.special_tokens, role) for role in ("mask", "cls", "sep", "pad"))


ROWS, LENGTH = 4, 92  # [CLS] text [SEP]


class Rows(Packer):
    """Rows of [CLS] text [SEP], as next-token data gives them; the same ones in every step."""

    train_tokens = validation_tokens = tokens_per_step = 400

    def __init__(self):
        tokens = np.random.default_rng(0).integers(0, 256, (ROWS, LENGTH + 1))
        tokens[:, 0], tokens[:, LENGTH - 1] = CLS, SEP
        self.packed = [[Segment(row[:-1], row[1:])] for row in tokens]
        self.source = self

    def rows(self, numbers):
        return [self.packed[number % ROWS] for number in numbers.tolist()]

    def evaluation_rows(self, num_tokens, batch_size):
        yield self.packed
        yield self.packed

    def summary(self):
        return ["rows"]


CONFIG = RunConfig.from_dict({"data": {"seq_len": 128}, "train": {"batch_size": ROWS}})
BATCH = collate_rows(Rows().packed, CollateConfig.of_run(CONFIG))


def dataset(transform, seed=0):
    config = replace(CONFIG, train=replace(CONFIG.train, seed=seed))
    return PackedDataset(Rows(), config, transform)


def hidden(density=0.15, seed=0):
    return dataset(TokenMasking(TOKENIZER, density), seed)


def test_eighty_ten_ten():
    """200,000 drawn tokens: within five standard deviations of 0.8, 0.1 and 0.1 (Devlin et al. 2018, sec. 3.1)."""
    tokens, places = np.arange(1000) % 200, np.arange(1000)
    masked = random = unchanged = 0
    for number in range(400):
        read, drawn = mask_row(tokens, places, np.arange(200, 256), MASK, 0.5, row_rng(0, TRAIN_STREAM, number))
        assert len(drawn) == 500 and (np.diff(drawn) > 0).all()
        now = read[drawn]
        masked, unchanged = masked + (now == MASK).sum(), unchanged + (now == tokens[drawn]).sum()
        random += ((now >= 200) & (now < 256)).sum()
        rest = np.setdiff1d(places, drawn)
        assert (read[rest] == tokens[rest]).all(), "other tokens are unchanged"
    total = 200_000
    assert masked + random + unchanged == total
    for count, share in ((masked, 0.8), (random, 0.1), (unchanged, 0.1)):
        assert abs(count / total - share) < 5 * (share * (1 - share) / total) ** 0.5


def test_only_drawn_tokens_are_targets_and_no_special_token_is_drawn():
    batch, original = hidden().micro_batches(0)[0], BATCH.model_input.token_ids
    assert torch.equal(batch.targets, original[batch.model_input.logit_indices])
    assert not set(batch.targets.tolist()) & {CLS, SEP, PAD, MASK}
    changed = (batch.model_input.token_ids != original).nonzero().view(-1)
    assert set(changed.tolist()) <= set(batch.model_input.logit_indices.tolist())
    per_row = torch.bincount(batch.model_input.logit_indices // LENGTH, minlength=4)
    assert per_row.tolist() == [round(0.15 * 90)] * 4, "all but [CLS] and [SEP]"


def test_a_masked_row_keeps_its_documents():
    row = [Segment(np.arange(low, low + 5), np.arange(5)) for low in (10, 20, 30)]
    masked = TokenMasking(TOKENIZER, 0.5)(row, row_rng(0, TRAIN_STREAM, 0), 0)
    assert [len(segment.tokens) for segment in masked] == [5, 5, 5]
    for before, after in zip(row, masked, strict=True):
        drawn = after.targets >= 0
        assert (after.targets[drawn] == before.tokens[drawn]).all()
        assert (after.tokens[~drawn] == before.tokens[~drawn]).all()
    assert sum((segment.targets >= 0).sum() for segment in masked) == 8


def test_random_tokens_are_never_special():
    tokens = torch.cat([hidden(0.9, seed).micro_batches(0)[0].model_input.token_ids for seed in range(20)])
    names = set(TOKENIZER.special_tokens.names().values()) - {CLS, SEP, PAD, MASK}
    assert not set(tokens.tolist()) & names


def test_draws_differ_by_step_and_row_but_not_by_evaluation():
    data = hidden()
    indices = [set(data.micro_batches(step)[0].model_input.logit_indices.tolist()) for step in range(3)]
    assert indices[0] != indices[1] != indices[2]
    rows = [{place % LENGTH for place in indices[0] if place // LENGTH == row} for row in range(4)]
    assert len({frozenset(row) for row in rows}) == 4
    first, second = (list(data.evaluation()) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.model_input.token_ids, other.model_input.token_ids)
    assert not torch.equal(first[0].model_input.token_ids, first[1].model_input.token_ids)
    assert set(first[0].model_input.logit_indices.tolist()) != indices[0], "the same rows, hidden as in step 0"
    assert row_rng(0, TRAIN_STREAM, 1).random() != row_rng(0, EVAL_STREAM, 1).random()


def test_rows_of_one_and_no_maskable_token():
    one = np.array([7])
    assert mask_row(one, np.array([0]), one, MASK, 0.15, row_rng(0, 1, 0))[1].tolist() == [0]
    read, drawn = mask_row(np.array([CLS]), np.empty(0, np.int64), one, MASK, 0.15, row_rng(0, 1, 0))
    assert read.tolist() == [CLS] and not len(drawn)


def test_a_tokenizer_without_a_mask_is_refused():
    with pytest.raises(DataError, match=r"has no mask token, and objective\.kind = masked-lm needs one"):
        TokenMasking(train_tokenizer("byte", []), 0.15)


def test_input_masking_changes_inputs_only():
    data, original = dataset(InputMasking(TOKENIZER, 0.3)), BATCH.model_input.token_ids
    shares = []
    for step in range(50):
        (batch,) = data.micro_batches(step)
        hidden = batch.model_input.token_ids != original
        assert (batch.model_input.token_ids[hidden] == MASK).all() and not hidden[original > 255].any()
        assert torch.equal(batch.targets, BATCH.targets)
        assert torch.equal(batch.model_input.logit_indices, BATCH.model_input.logit_indices)
        shares.append(hidden.sum().item() / (4 * 90))
    assert np.mean(shares) == pytest.approx(0.3, abs=0.02) and len(set(shares)) > 10
    assert all(torch.equal(batch.model_input.token_ids, original) for batch in data.evaluation())
    with pytest.raises(DataError, match=r"objective\.input_mask_ratio needs one"):
        InputMasking(train_tokenizer("byte", []), 0.3)
