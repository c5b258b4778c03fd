"""Philox4x32-10 against the known answers of Random123 (kat_vectors), and what ``uniform`` makes of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvad.engine.execution.sampler import philox, uniform

ANSWERS = [  # counter, key, words
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> np.ndarray:
    return np.array([[int(word, 16)] for word in text.split()], dtype=np.uint64)


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    """Salmon et al. 2011, fig. 2, in Python integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 1 << 32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % (1 << 32), (k[1] + 0xBB67AE85) % (1 << 32)]
    return c


@pytest.mark.parametrize(("counter", "key", "answer"), ANSWERS)
def test_known_answers(counter: str, key: str, answer: str) -> None:
    assert np.array(philox(words(counter), words(key))).tolist() == words(answer).tolist()


def test_known_answers_in_one_call() -> None:
    counters, keys, answers = (np.concatenate([words(row[i]) for row in ANSWERS], axis=1) for i in range(3))
    assert np.array(philox(counters, keys)).tolist() == answers.tolist()


word = st.integers(0, 2**32 - 1)


@given(st.lists(word, min_size=4, max_size=4), st.lists(word, min_size=2, max_size=2))
def test_any_counter_and_key(counter: list[int], key: list[int]) -> None:
    mine = philox(np.array(counter, np.uint64)[:, None], np.array(key, np.uint64)[:, None])
    assert [word.item() for word in mine] == list(philox(counter, key)) == plain_philox(counter, key)


@given(st.integers(0, 2**64 - 1), word, st.integers(0, 2**40))
def test_uniform_is_53_bits_of_the_first_two_words(key: int, sample: int, position: int) -> None:
    """Position and sample are the counter, so that no two of them share a draw of one key."""
    first, second, *_ = plain_philox([position % 2**32, position >> 32, sample, 0], [key % 2**32, key >> 32])
    (u,) = uniform([key], [sample], [position])
    assert 0 <= u < 1 and u == ((first << 32 | second) >> 11) / 2**53


def test_a_draw_does_not_depend_on_others() -> None:
    rows = [(key, sample, position) for key in (0, 1, 2**63) for sample in (0, 7) for position in (0, 1, 2**33)]
    together = uniform(*zip(*rows, strict=True))
    assert len(set(together.tolist())) == len(rows)
    for row, u in zip(rows, together, strict=True):
        assert uniform(*([value] for value in row))[0] == u
    assert uniform([], [], []).shape == (0,)


@pytest.mark.parametrize("axis", ["key", "sample", "position"])
def test_draws_are_even_along_every_axis(axis: str) -> None:
    """Chi-square of 100 cells, and no correlation from one draw to the next: 40,000 counters in a row."""
    n, zeros = 40_000, [3] * 40_000
    u = uniform(*(range(n) if name == axis else zeros for name in ("key", "sample", "position")))
    counts = np.bincount((u * 100).astype(int), minlength=100)
    chi_square = ((counts - n / 100) ** 2 / (n / 100)).sum()
    assert 50 < chi_square < 160  # 99 degrees of freedom: 1e-4 to 1 - 1e-4 is 53 to 160
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.02
