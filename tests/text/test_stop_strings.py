"""Stop strings against their naive definition, however the text is pushed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvad.errors import RequestError
from kvad.text.detokenizer import StopStringMatcher


def naive(text, stops):
    found = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    _, start, stop = min(found)
    return text[:start], stop


def run(pieces, stops):
    matcher = StopStringMatcher(stops)
    emitted, stopped = "", None
    for piece in pieces:
        more, stopped = matcher.push(piece)
        emitted += more
    return emitted + matcher.flush(), stopped


FEW = st.text(st.sampled_from("ab\n"), max_size=4)


@given(pieces=st.lists(FEW, max_size=12), stops=st.lists(FEW.filter(bool), max_size=3))
def test_matches_equal_the_definition(pieces, stops):
    assert run(pieces, stops) == naive("".join(pieces), stops)


@given(text=st.text(st.sampled_from("ab"), max_size=20), stops=st.lists(FEW.filter(bool), min_size=1, max_size=3))
def test_only_a_prefix_of_a_stop_is_held(text, stops):
    matcher = StopStringMatcher(stops)
    emitted = ""
    for end, char in enumerate(text, 1):
        more, stopped = matcher.push(char)
        emitted += more
        if stopped is not None:
            return
        held = text[len(emitted) : end]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["def f", "oo\n", "\nclass"], ["\n\n"], ("def foo", "\n\n")),
        (["<|e", "nd|", ">x"], ["<|end|>"], ("", "<|end|>")),
        (["aab"], ["ab"], ("a", "ab")),
        (["a", "a", "b"], ["aab", "ab"], ("", "aab")),  # both end here: the one that began first
        (["abc", "d"], ["abcd", "bc"], ("a", "bc")),  # complete first
        (["un", "finished <|en"], ["<|end|>"], ("unfinished <|en", None)),
        (["끝", "이다"], ["이"], ("끝", "이")),
        (["x"], [], ("x", None)),
    ],
)
def test_examples(pieces, stops, expected):
    assert run(pieces, stops) == expected == naive("".join(pieces), stops)


def test_nothing_is_emitted_after_a_stop():
    matcher = StopStringMatcher(["b"])
    assert matcher.push("abc") == ("a", "b")
    assert matcher.push("more") == ("", "b")
    assert matcher.flush() == ""


def test_text_that_cannot_become_a_stop_string_is_emitted():
    matcher = StopStringMatcher(["###"])
    assert [matcher.push(piece)[0] for piece in ("a", "#", "b", "##", "c")] == ["a", "", "#b", "", "##c"]


def test_invalid_stop_strings_are_refused():
    with pytest.raises(RequestError, match="empty"):
        StopStringMatcher(["a", ""])
    with pytest.raises(RequestError, match="must be a list"):
        StopStringMatcher("ab")


def test_matching_piece_by_piece_gives_another_result():
    """Looking at each piece alone misses a stop across a boundary."""
    pieces, stops = ["a\n", "\nb"], ["\n\n"]
    alone = "".join(naive(piece, stops)[0] for piece in pieces)
    assert (alone, None) != naive("".join(pieces), stops) == run(pieces, stops)
