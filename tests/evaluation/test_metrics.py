"""Metrics compared with numbers by hand, and BLEU with sacrebleu."""

import math

import pytest
import sacrebleu
from sacrebleu.metrics import BLEU, CHRF

from kvad.evaluation.metrics import BleuOptions, ExactMatch, Likelihood, compute_bleu, count_exact_matches, score_labels

GOLD = list("NNNVVDD..X")
PREDICTED = list("NNVVNDD.DY")


def test_perplexities_and_bits_by_hand():
    found = Likelihood(nats=20 * math.log(2), hits=5, scored=10, tokens=11, bytes=22, words=4, lines=2)
    assert found.loss == pytest.approx(2 * math.log(2))
    assert found.perplexity == pytest.approx(4) and found.accuracy == 0.5
    assert found.bits_per_byte == pytest.approx(2 * 11 / 22)  # two bits a token, half a token a byte
    assert found.word_perplexity == pytest.approx(2 ** (2 * 11 / 4))
    assert found.word_perplexity_eos == pytest.approx(2 ** (2 * 11 / 6))
    assert Likelihood(1e6, 0, 1, 1, 1, 1, 1).perplexity == math.inf


def test_f1_by_hand():
    found = score_labels(GOLD, PREDICTED)
    each = {one.label: one for one in found.by_label}
    assert found.accuracy == 0.6 and (found.count, found.hits) == (10, 6)
    # N: gold 3, predicted 3, both 2.  V: 2, 2, 1.  D: 2, 3, 2.  '.': 2, 1, 1.  X is never predicted, Y never right.
    assert {name: one.f1 for name, one in each.items()} == pytest.approx(
        {"N": 2 / 3, "V": 1 / 2, "D": 4 / 5, ".": 2 / 3, "X": 0.0, "Y": 0.0}
    )
    assert (each["D"].precision, each["D"].recall) == (pytest.approx(2 / 3), 1.0)
    assert (each["X"].precision, each["X"].recall, each["Y"].precision, each["Y"].recall) == (0, 0, 0, 0)
    assert found.macro_f1 == pytest.approx((2 / 3 + 1 / 2 + 4 / 5 + 2 / 3) / 6)
    assert [one.label for one in found.by_label] == ["N", ".", "D", "V", "X", "Y"]  # by how often, then by name


def test_exact_match():
    assert count_exact_matches([" a b\n", "A", ""], ["a b", "a", ""]) == ExactMatch(2, 3)
    assert count_exact_matches(["A"], ["a"], lower=True).accuracy == 1.0


TEXTS = ["The dog doesn't bark .", "A man, in a RED coat!", "two well-known towns"]
REFERENCES = ["The dog does not bark.", "A man in a red coat!", "Two well-known towns ."]


@pytest.mark.parametrize("lower", [False, True])
def test_bleu_and_chrf_equal_sacrebleu(lower):
    found = compute_bleu(TEXTS, REFERENCES, BleuOptions(lowercase=lower))
    by_hand = sacrebleu.corpus_bleu(TEXTS, [REFERENCES], lowercase=lower)
    assert found.bleu == by_hand.score > 0 and list(found.precisions) == by_hand.precisions
    assert found.chrf == CHRF(lowercase=lower).corpus_score(TEXTS, [REFERENCES]).score
    assert f"case:{'lc' if lower else 'mixed'}|" in found.bleu_signature and "|tok:13a|" in found.bleu_signature
    assert f"version:{sacrebleu.__version__}" in found.bleu_signature


def test_bleu_of_tokenized_texts():
    found = compute_bleu(TEXTS, REFERENCES, BleuOptions("spaces"))
    plain = BLEU(tokenize="none", force=True)
    assert found.bleu == plain.corpus_score(TEXTS, [REFERENCES]).score and "|tok:none|" in found.bleu_signature
    cut = [
        ["The dog doesn't bark .", "A man , in a RED coat !", "two well-known towns"],
        ["The dog does not bark .", "A man in a red coat !", "Two well-known towns ."],
    ]
    assert compute_bleu(TEXTS, REFERENCES, BleuOptions("words")).bleu == plain.corpus_score(cut[0], [cut[1]]).score
