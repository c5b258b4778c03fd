"""Constraints of fields: ranges, types and choices, checked by one function."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

import pytest

from kvad.config.serialization import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    OpenFraction,
    PositiveFloat,
    PositiveInt,
    Range,
    changed_fields,
    check_fields,
)
from kvad.errors import ConfigError, RequestError


@dataclass(frozen=True)
class Inner:
    size: PositiveInt = 4


@dataclass(frozen=True)
class Other:
    rate: Fraction = 0.0


@dataclass(frozen=True)
class Example:
    positive: PositiveInt = 1
    count: NonNegativeInt = 0
    factor: PositiveFloat = 1.0
    eps: NonNegativeFloat = 0.0
    rate: Fraction = 0.0
    share: OpenFraction = 0.5
    ratio: Annotated[float, Range(0, 1, above=True)] = 1.0
    penalty: Annotated[float, Range(-2, 2)] = 0.0
    limit: PositiveInt | None = None
    mode: Literal["fast", "exact"] = "fast"
    scale: Literal["default"] | float = "default"
    factors: tuple[PositiveFloat, ...] = ()
    pair: tuple[int, str] = (1, "a")
    bias: Mapping[int, Fraction] = field(default_factory=dict)
    parts: Mapping[str, Inner] = field(default_factory=dict)
    part: Inner | Other = field(default_factory=Inner)
    name: str = ""
    flag: bool = False
    anything: Any = None


VALID = [
    {},
    {"positive": 5, "factor": 2, "rate": 0, "ratio": 1, "penalty": -2, "limit": 3, "mode": "exact", "scale": 2.0},
    {"factors": [1.0, 2], "pair": (3, "b"), "bias": {3: 0.5}, "parts": {"L": Inner(2)}, "part": Other(0.5)},
]

INVALID = [
    ("positive", 0, "must be at least 1, got 0"),
    ("positive", True, "must be int, got True"),
    ("positive", 1.5, "must be int, got 1.5"),
    ("count", -1, "must be at least 0, got -1"),
    ("factor", 0.0, "must be above 0, got 0.0"),
    ("factor", "2", "must be float, got '2'"),
    ("eps", -1e-9, "must be at least 0, got -1e-09"),
    ("rate", 1.0, "must be in [0, 1), got 1.0"),
    ("rate", float("nan"), "must be a finite number, got nan"),
    ("share", 0, "must be between 0 and 1, got 0"),
    ("share", 1, "must be between 0 and 1, got 1"),
    ("ratio", 0, "must be above 0 and at most 1, got 0"),
    ("penalty", 2.5, "must be from -2 to 2, got 2.5"),
    ("limit", 0, "must be at least 1, got 0"),
    ("mode", "fst", "must be one of 'fast', 'exact', got 'fst'"),
    ("scale", "x", "must be one of 'default', got 'x'"),
    ("factors", 1.0, "must be a list, got 1.0"),
    ("name", 3, "must be str, got 3"),
    ("flag", 1, "must be bool, got 1"),
    ("bias", 3, "must be an object, got 3"),
]
NESTED = [
    ({"factors": (1.0, -1.0)}, "example.factors[1]: must be above 0, got -1.0"),
    ({"bias": {7: 2.0}}, "example.bias[7]: must be in [0, 1), got 2.0"),
    ({"parts": {"L": Inner(0)}}, "example.parts.L.size: must be at least 1, got 0"),
    ({"part": Other(1.0)}, "example.part.rate: must be in [0, 1), got 1.0"),
]


@pytest.mark.parametrize("changes", VALID)
def test_valid_values_pass(changes):
    check_fields(Example(**changes), "example")


@pytest.mark.parametrize(("name", "value", "constraint"), INVALID)
def test_an_invalid_value_is_named_with_its_constraint(name, value, constraint):
    with pytest.raises(ConfigError) as caught:
        check_fields(Example(**{name: value}), "example")
    assert caught.value.message == f"example.{name}: {constraint}"


@pytest.mark.parametrize(("changes", "message"), NESTED)
def test_nested_values_are_named_by_their_dotted_key(changes, message):
    with pytest.raises(ConfigError) as caught:
        check_fields(Example(**changes), "example")
    assert caught.value.message == message


def test_the_hint_is_the_default_or_the_nearest_choice():
    for changes, hint in (({"positive": 0}, "Use 1, the default"), ({"mode": "fst"}, "did you mean 'fast'?")):
        with pytest.raises(ConfigError) as caught:
            check_fields(Example(**changes))
        assert caught.value.hint == hint


def test_the_error_class_is_chosen_by_the_caller():
    with pytest.raises(RequestError, match=r"^count: must be at least 0, got -1"):
        check_fields(Example(count=-1), error=RequestError)


def test_every_constrained_field_is_checked():
    """No annotation of the example is ignored, except Any and the fixed tuple, whose types are plain."""
    assert {name for name, _, _ in INVALID} | {"pair", "parts", "part", "anything"} == {f.name for f in fields(Example)}


def test_changed_fields_omit_defaults():
    example = Example(count=2, parts={"a": Inner(), "b": Inner(3)}, part=Other(0.5), factors=(1.0,))
    assert changed_fields(example) == {
        "count": 2, "parts": {"a": {}, "b": {"size": 3}}, "part": {"rate": 0.5}, "factors": [1.0]
    }  # fmt: skip
    assert changed_fields(Example()) == {}
