"""The strict JSON parser: what it accepts, and the position in every refusal."""

import json

import pytest

from kvad.storage.strict_json import MAX_DEPTH, MAX_DIGITS, loads

REFUSED = {
    "NaN": ('{"a": "NaN",\n "b": NaN}', "line 2, column 7: NaN is not a JSON number"),
    "-Infinity": ("[0, -Infinity]", "line 1, column 5: -Infinity is not a JSON number"),
    "a float beyond float64": ("[-1e999]", "line 1, column 2: a number beyond the range of a float is not supported"),
    "an integer": ("[" + "9" * 9000 + "]", "line 1, column 2: an integer of 9,000 digits is not supported"),
    "a duplicate key": ('{"a": {"c": 1, "c": 1}}', "an object contains 'c' twice"),
    "deep lists": ("[" * 100_000, "line 1, column 101: nested too deeply, beyond 100 levels"),
    "deep objects": ('{"[":' * 100_000, "line 1, column 501: nested too deeply, beyond 100 levels"),
    "one level too many": ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "column 101: nested too deeply"),
    "no UTF-8": (b'{"a": "\xff"}', "not UTF-8 at byte 7"),
    "UTF-16": ("{}".encode("utf-16"), "not UTF-8 at byte 0"),
    "a syntax error": ('{"a": 1,\n b}', "line 2, column 2: Expecting property name"),
    "nothing": (b"", "line 1, column 1: Expecting value"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_are_one_line_with_the_position(case):
    content, message = REFUSED[case]
    with pytest.raises(ValueError, match=r"^[^\n]*$") as caught:
        loads(content)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.5, -0.0, None, True, "NaN é \u2028 \\"], "b": {"a": {}}},
        10**MAX_DIGITS - 1,
        json.loads("[" * MAX_DEPTH + "]" * MAX_DEPTH),
        7,
    ],
)
def test_strict_json_equals_the_standard_parser(value):
    text = json.dumps(value, ensure_ascii=False)
    assert loads(text) == loads(text.encode()) == loads(b"\xef\xbb\xbf" + text.encode()) == value
