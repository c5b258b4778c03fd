"""The table of mutations fits the sources: fragments occur once, mutated files parse, and the tests exist. No torch."""

import ast
from pathlib import Path

import pytest

from tests.support.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).parents[1]


def by_name(mutation: Mutation) -> str:
    return mutation.name


def test_names_and_changes_are_unique():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 44
    assert len({(mutation.file, mutation.old, mutation.new) for mutation in MUTATIONS}) == len(MUTATIONS)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=by_name)
def test_fragment_occurs_once_and_the_result_parses(mutation):
    text = (ROOT / mutation.file).read_text(encoding="utf-8")
    assert text.count(mutation.old) == 1, f"{mutation.file}: {mutation.old!r} occurs {text.count(mutation.old)} times"
    mutated = mutation.mutated(text)
    assert mutated is not None and ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(text))
    assert mutation.file.startswith("kvad/") and "\n" not in mutation.old + mutation.new


@pytest.mark.parametrize("mutation", MUTATIONS, ids=by_name)
def test_tests_exist(mutation):
    assert mutation.tests
    for name in mutation.tests:
        assert name.startswith("tests/") and (ROOT / name).exists()


def test_a_fragment_that_is_missing_or_occurs_twice_is_stale():
    mutation = Mutation("m", "kvad/errors.py", "a", "b", ("tests/test_mutations.py",))
    assert mutation.mutated("xax") == "xbx"
    assert mutation.mutated("aa") is None and mutation.mutated("x") is None
