"""The contract: the mask's truth table against loops, the reserved blocks, and that torch is not needed for it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvad.model_input import NULL_BLOCK, PADDING_BLOCK, RESERVED_BLOCKS, AttentionPattern, TokenPositions


def may_see(q: int, k: int, causal: bool, window: int | None) -> bool:
    """The words of the docstring, one query and one key at a time."""
    if k < 0:
        return False
    if causal and k > q:
        return False
    distance = q - k if causal else abs(q - k)
    return window is None or distance < window


reaches = st.builds(AttentionPattern, st.booleans(), st.none() | st.integers(1, 9))
marks = st.lists(st.tuples(st.integers(-1, 8), st.integers(0, 2)), min_size=1, max_size=7)


@given(reaches, marks, marks, st.sampled_from(["both", "queries", "keys", "neither"]))
def test_truth_table(
    reach: AttentionPattern, queries: list[tuple[int, int]], keys: list[tuple[int, int]], given_to: str
) -> None:
    """Documents part tokens only where both sides know theirs (a cache's keys have none)."""
    q_position, q_document = torch.tensor(queries).T
    k_position, k_document = torch.tensor(keys).T
    q = TokenPositions(q_position, q_document if given_to in ("both", "queries") else None)
    k = TokenPositions(k_position, k_document if given_to in ("both", "keys") else None)
    seen = reach.visible(q, k)
    assert seen.shape == (len(queries), len(keys)) and seen.dtype == torch.bool
    for i, (q_at, q_doc) in enumerate(queries):
        for j, (k_at, k_doc) in enumerate(keys):
            together = given_to != "both" or q_doc == k_doc
            assert bool(seen[i, j]) == (together and may_see(q_at, k_at, reach.causal, reach.window))


def test_rows_are_judged_each_by_its_own_marks() -> None:
    q = torch.tensor([[0, 3], [5, 1]])
    k = torch.tensor([[0, 1, -1], [4, 5, 6]])
    for reach in (AttentionPattern(), AttentionPattern(window=2), AttentionPattern(False), AttentionPattern(False, 2)):
        together = reach.visible(TokenPositions(q), TokenPositions(k))
        assert together.shape == (2, 2, 3)
        for row in range(2):
            assert torch.equal(together[row], reach.visible(TokenPositions(q[row]), TokenPositions(k[row])))


@pytest.mark.parametrize(
    ("reach", "table"),
    [
        (AttentionPattern(), ["1...", "11..", "111.", "1111"]),
        (AttentionPattern(window=1), ["1...", ".1..", "..1.", "...1"]),
        (AttentionPattern(window=2), ["1...", "11..", ".11.", "..11"]),
        (AttentionPattern(False), ["1111"] * 4),
        (AttentionPattern(False, 2), ["11..", "111.", ".111", "..11"]),
    ],
)
def test_worked_examples(reach: AttentionPattern, table: list[str]) -> None:
    """A window counts visible keys, oneself included."""
    mark = TokenPositions(torch.arange(4))
    assert ["".join(".1"[int(bit)] for bit in row) for row in reach.visible(mark, mark)] == table


def test_a_window_holds_exactly_that_many_keys() -> None:
    mark = TokenPositions(torch.arange(20))
    for window in range(1, 20):
        assert int(AttentionPattern(window=window).visible(mark, mark)[19].sum()) == window


def test_reserved_blocks_are_the_first_ones() -> None:
    assert sorted({NULL_BLOCK, PADDING_BLOCK}) == list(range(RESERVED_BLOCKS))


def test_the_contract_needs_no_torch() -> None:
    code = "import kvad.model_input, kvad.config.model, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
