"""Drawing attention from plain lists: the terminal's cells, an SVG that is XML, JSON that is JSON."""

import json
import math
import xml.etree.ElementTree as ET

import pytest

from kvad.inspection.attention_plot import (
    SHADES,
    AttentionMap,
    attention_to_json,
    attention_to_svg,
    attention_to_text,
    shade,
)

PIECES = ("def", "␣add", "(", "a")
WEIGHTS = ((1.0, 0.0, 0.0, 0.0), (0.25, 0.75, 0.0, 0.0), (0.1, 0.1, 0.8, 0.0), (0.25, 0.25, 0.25, 0.25))
MAP = AttentionMap(2, 5, WEIGHTS)
NAMES = {"svg": "http://www.w3.org/2000/svg"}


def uniform(size):
    return AttentionMap(0, 0, [[1 / (i + 1)] * (i + 1) + [0.0] * (size - i - 1) for i in range(size)])


@pytest.mark.parametrize(
    ("weight", "char"),
    [(0, " "), (0.0156, " "), (0.0157, "░"), (0.14, "░"), (0.141, "▒"), (0.4, "▓"), (0.77, "█"), (1, "█"), (1.5, "█")],
)
def test_shades_follow_the_square_root(weight, char):
    assert shade(weight) == char


def test_what_is_not_a_number_is_seen():
    assert shade(math.nan) == shade(math.inf) == "?"
    assert "??" in attention_to_text(("a",), AttentionMap(0, 0, [[math.nan]]))
    wide = [0.0] * 200
    wide[77] = math.nan
    assert "?" in attention_to_text(["x"] * 200, AttentionMap(0, 0, [wide] * 200), width=80)


def test_a_small_map():
    assert attention_to_text(PIECES, MAP, width=80).splitlines() == [
        "layer 2, head 5: rows are queries, columns keys",
        " " * 17 + "0",
        "0 def            ██",
        "1 ␣add           ▒▒▓▓",
        "2 (              ░░░░██",
        "3 a              ▒▒▒▒▒▒▒▒",
        " " * 17 + "shades: ░ >= 0.02  ▒ >= 0.14  ▓ >= 0.39  █ >= 0.77",
    ]


def test_the_ruler_counts_keys_by_tens():
    lines = attention_to_text(["x"] * 25, uniform(25), width=80).splitlines()
    assert lines[1] == " " * 18 + "0" + " " * 19 + "10" + " " * 18 + "20"


def test_a_narrow_terminal_joins_keys_and_says_so():
    size = 200
    shown = attention_to_text(["x"] * size, uniform(size), width=80)
    assert "a cell is 4 keys and shows the largest weight among them" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert [line.split()[0] for line in shown.splitlines()[3:-1]] == [str(i) for i in range(size)]
    assert "keys and shows" not in attention_to_text(["x"] * 60, uniform(60), width=80)


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_no_line_is_wider_than_the_terminal(width):
    drawn = [line for line in attention_to_text(["tok"] * 30, uniform(30), width=width).splitlines() if "tok" in line]
    assert max(map(len, drawn)) <= max(width, 28)


def test_long_and_wide_tokens_keep_the_columns():
    pieces = ("a" * 30, "日本語日本語日本語", "é", "")
    lines = attention_to_text(pieces, MAP, width=80).splitlines()[2:6]
    assert lines[0] == "0 " + "a" * 13 + "… ██"
    assert lines[1] == "1 日本語日本語…  ▒▒▓▓"
    assert lines[2].endswith(" ░░░░██") and lines[3].endswith(" ▒▒▒▒▒▒▒▒")


def test_a_single_token():
    assert "0 x              ██" in attention_to_text(("x",), AttentionMap(0, 0, [[1.0]]))


def test_svg_is_xml_with_a_cell_per_weight():
    root = ET.fromstring(attention_to_svg(PIECES, [MAP]))
    cells = [rect for rect in root.iterfind(".//svg:rect", NAMES) if rect.get("fill-opacity")]
    assert len(cells) == sum(weight > 0 for row in WEIGHTS for weight in row)
    assert [cell.get("fill-opacity") for cell in cells][:3] == ["1.000", "0.500", "0.866"]
    titles = [title.text for title in root.iterfind(".//svg:title", NAMES)]
    assert titles[1] == "␣add to def: 0.2500"
    assert "layer 2, head 5" in [text.text for text in root.iterfind(".//svg:text", NAMES)]


def test_svg_places_maps_side_by_side():
    one, six = ET.fromstring(attention_to_svg(PIECES, [MAP])), ET.fromstring(attention_to_svg(PIECES, [MAP] * 6))
    assert int(six.get("width")) == 4 * int(one.get("width")) and int(six.get("height")) == 2 * int(one.get("height"))
    assert len({g.get("transform") for g in six.iterfind("svg:g", NAMES)}) == 6


def test_svg_holds_any_token():
    pieces = ("<b>&", "\"'", "\x00\x1b", "\udc80")
    root = ET.fromstring(
        attention_to_svg(pieces, [AttentionMap(0, 0, [[math.nan, 0.5, 0.5, 0.5]] * 4)]).encode("utf-8")
    )
    assert "<b>&" in [text.text for text in root.iterfind(".//svg:text", NAMES)]
    assert sum(rect.get("fill") == "#d00" for rect in root.iterfind(".//svg:rect", NAMES)) == 4


def test_json():
    found = json.loads(json.dumps(attention_to_json((1, 2, 3, 4), PIECES, [MAP, MAP]), allow_nan=False))
    assert found["tokens"] == [1, 2, 3, 4] and found["pieces"] == list(PIECES)
    assert found["attention"][1] == {"layer": 2, "head": 5, "weights": [list(row) for row in WEIGHTS]}
    assert attention_to_json((1,), ("a",), [AttentionMap(0, 0, [[math.nan]])])["attention"][0]["weights"] == [[None]]


def test_shades_grow():
    assert [shade(i / 100) for i in range(101)] == sorted((shade(i / 100) for i in range(101)), key=SHADES.index)
