"""Masks compared with loops, the reserved blocks, and the absence of torch at import."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvad.model_input import NULL_BLOCK, PADDING_BLOCK, RESERVED_BLOCKS, AttentionPattern, BlockOps, TokenPositions


def is_visible(q: int, k: int, causal: bool, window: int | None) -> bool:
    """Apply the docstring's rule to one query and one key."""
    if k < 0:
        return False
    if causal and k > q:
        return False
    distance = q - k if causal else abs(q - k)
    return window is None or distance < window


patterns = st.builds(AttentionPattern, st.booleans(), st.none() | st.integers(1, 9))
token_lists = st.lists(st.tuples(st.integers(-1, 8), st.integers(0, 2)), min_size=1, max_size=7)


@given(patterns, token_lists, token_lists, st.sampled_from(["both", "queries", "keys", "neither"]))
def test_truth_table(
    pattern: AttentionPattern, queries: list[tuple[int, int]], keys: list[tuple[int, int]], given_to: str
) -> None:
    """Documents separate tokens only if both sides have document ids (a cache's keys have none)."""
    q_position, q_document = torch.tensor(queries).T
    k_position, k_document = torch.tensor(keys).T
    q = TokenPositions(q_position, q_document if given_to in ("both", "queries") else None)
    k = TokenPositions(k_position, k_document if given_to in ("both", "keys") else None)
    visible = pattern.visible(q, k)
    assert visible.shape == (len(queries), len(keys)) and visible.dtype == torch.bool
    for i, (q_at, q_doc) in enumerate(queries):
        for j, (k_at, k_doc) in enumerate(keys):
            together = given_to != "both" or q_doc == k_doc
            assert bool(visible[i, j]) == (together and is_visible(q_at, k_at, pattern.causal, pattern.window))


def test_sequences_have_separate_positions() -> None:
    q = torch.tensor([[0, 3], [5, 1]])
    k = torch.tensor([[0, 1, -1], [4, 5, 6]])
    for pattern in (
        AttentionPattern(),
        AttentionPattern(window=2),
        AttentionPattern(False),
        AttentionPattern(False, 2),
    ):
        together = pattern.visible(TokenPositions(q), TokenPositions(k))
        assert together.shape == (2, 2, 3)
        for row in range(2):
            assert torch.equal(together[row], pattern.visible(TokenPositions(q[row]), TokenPositions(k[row])))


@pytest.mark.parametrize(
    ("pattern", "table"),
    [
        (AttentionPattern(), ["1...", "11..", "111.", "1111"]),
        (AttentionPattern(window=1), ["1...", ".1..", "..1.", "...1"]),
        (AttentionPattern(window=2), ["1...", "11..", ".11.", "..11"]),
        (AttentionPattern(False), ["1111"] * 4),
        (AttentionPattern(False, 2), ["11..", "111.", ".111", "..11"]),
    ],
)
def test_worked_examples(pattern: AttentionPattern, table: list[str]) -> None:
    """A window counts visible keys, including the query's own."""
    positions = TokenPositions(torch.arange(4))
    assert ["".join(".1"[int(bit)] for bit in row) for row in pattern.visible(positions, positions)] == table


def test_window_has_exactly_that_many_keys() -> None:
    positions = TokenPositions(torch.arange(20))
    for window in range(1, 20):
        assert int(AttentionPattern(window=window).visible(positions, positions)[19].sum()) == window


def test_reserved_blocks_are_the_first_ones() -> None:
    assert sorted({NULL_BLOCK, PADDING_BLOCK}) == list(range(RESERVED_BLOCKS))


def test_block_ops_are_empty_only_without_any_operation() -> None:
    empty = BlockOps(((), ()), ((), ()))
    assert empty.is_empty
    for name in BlockOps._fields:
        operations: tuple[object, ...] = ((), (0,)) if name in ("clear", "copy") else (0,)
        assert not empty._replace(**{name: operations}).is_empty, name  # type: ignore[arg-type]


def test_model_input_needs_no_torch() -> None:
    code = "import kvad.model_input, kvad.config.model, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0
