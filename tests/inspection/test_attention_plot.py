"""Attention maps from plain lists: terminal cells, figures, JSON, HTML."""

import base64
import io
import json
import math
import re
import xml.etree.ElementTree as ET

import pytest
from matplotlib.image import imread

from kvad.engine import attention_to_html
from kvad.errors import RequestError
from kvad.inspection.attention_plot import SHADES, AttentionMap, attention_to_json, attention_to_text, shade
from kvad.inspection.plot import draw_attention

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
    shades = [shade(i / 100) for i in range(101)]
    assert shades == sorted(shades, key=SHADES.index)


def test_nan_is_visible():
    assert shade(math.nan) == shade(math.inf) == "?"
    assert "??" in attention_to_text(("a",), AttentionMap(0, 0, [[math.nan]]))
    wide = [0.0] * 200
    wide[77] = math.nan
    assert "?" in attention_to_text(["x"] * 200, AttentionMap(0, 0, [wide] * 200), width=80)


def test_text_of_a_small_map():
    assert attention_to_text(PIECES, MAP, width=80).splitlines() == [
        "layer 2, head 5: rows are queries, columns keys",
        " " * 17 + "0",
        "0 def            ██",
        "1 ␣add           ▒▒▓▓",
        "2 (              ░░░░██",
        "3 a              ▒▒▒▒▒▒▒▒",
        " " * 17 + "shades: ░ >= 0.02  ▒ >= 0.14  ▓ >= 0.39  █ >= 0.77",
    ]


def test_ruler_counts_keys_by_tens():
    lines = attention_to_text(["x"] * 25, uniform(25), width=80).splitlines()
    assert lines[1] == " " * 18 + "0" + " " * 19 + "10" + " " * 18 + "20"


def test_narrow_terminal_joins_keys():
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


def test_single_token():
    assert "0 x              ██" in attention_to_text(("x",), AttentionMap(0, 0, [[1.0]]))


def draw(pieces, maps):
    """Return the SVG tree, its texts and the pixels [rows, columns, 4] of its first map, from the top."""
    target = io.BytesIO()
    assert draw_attention(pieces, maps, [target]) == []
    root = ET.fromstring(target.getvalue())
    texts = ["".join(text.itertext()) for text in root.iterfind(".//svg:text", NAMES)]
    image = next(root.iterfind(".//svg:image", NAMES)).get("{http://www.w3.org/1999/xlink}href")
    return root, texts, imread(io.BytesIO(base64.b64decode(image.partition(",")[2])))[::-1]


def test_a_large_figure_is_capped_with_labels_at_its_edges(tmp_path):
    """Eight heads of 90 tokens: at full size 7,200 pixels wide."""
    path, pieces = tmp_path / "heads.png", [f"t{number}" for number in range(90)]
    assert draw_attention(pieces, [uniform(90)] * 8, [path]) == [path]
    height, width, _ = imread(path).shape
    assert width <= 3000 and height <= 3000
    _, texts, _ = draw(pieces, [uniform(90)] * 8)
    assert texts.count("t0") == 4 + 2 and "t1" not in texts and {"key", "query"} <= {*texts}


def test_svg_has_a_shade_per_weight():
    _, texts, pixels = draw(PIECES, [MAP])
    assert "layer 2, head 5" in texts and [texts.count(piece) for piece in PIECES] == [2] * 4
    edge = len(pixels) // 4
    centers = [(2 * index + 1) * edge // 2 for index in range(4)]
    light = [float(pixels[row, column, :3].sum()) for row in centers for column in centers]
    darkest_first = sorted(zip(light, (weight for row in WEIGHTS for weight in row), strict=True))
    weights = [weight for _, weight in darkest_first]
    assert weights == sorted(weights, reverse=True) and weights[0] == 1.0


def test_svg_has_four_maps_in_a_row():
    (one, *_), (six, texts, _) = draw(PIECES, [MAP]), draw(PIECES, [MAP] * 6)
    sizes = [[float(root.get(name).removesuffix("pt")) for name in ("width", "height")] for root in (one, six)]
    assert sizes[1] == pytest.approx([4 * sizes[0][0], 2 * sizes[0][1]])
    assert texts.count("layer 2, head 5") == 6


def test_svg_escapes_tokens_and_nan_is_red():
    _, texts, pixels = draw(
        ("<b>&", "\"'", "\x00\x1b", "\udc80"), [AttentionMap(0, 0, [[math.nan, 0.5, 0.5, 0.5]] * 4)]
    )
    assert "<b>&" in texts and "\N{REPLACEMENT CHARACTER}" in texts
    red = (pixels[..., 0] > 0.8) & (pixels[..., 1] < 0.1)
    assert red[:, : len(pixels) // 5].all() and not red[:, len(pixels) // 3 :].any()


def test_json():
    found = json.loads(json.dumps(attention_to_json((1, 2, 3, 4), PIECES, [MAP, MAP]), allow_nan=False))
    assert found["tokens"] == [1, 2, 3, 4] and found["pieces"] == list(PIECES)
    assert found["attention"][1] == {"layer": 2, "head": 5, "weights": [list(row) for row in WEIGHTS]}
    assert attention_to_json((1,), ("a",), [AttentionMap(0, 0, [[math.nan]])])["attention"][0]["weights"] == [[None]]


# ---------------------------------------------------------------- HTML


def page_data(source):
    """Return the JSON that a page embeds."""
    return json.loads(source.partition('id="data">')[2].partition("</script>")[0])


def test_html_page_holds_every_weight():
    pieces = ("<b>&", "</script><script>alert(1)", "c", "\u2028")
    weights = [[1.0, 0, 0, 0], [0.25, 0.75, 0, 0], [0.1, 0.2, 0.7, 0], [math.nan, 0.5, 0.25, 0.25]]
    cross = AttentionMap(1, 3, [[0.5, 0.5]], "cross", ("q",), ("k", "l"))
    source = attention_to_html(pieces, [AttentionMap(2, 5, weights), cross], "<title>")
    data = page_data(source)
    assert data["texts"] == [list(pieces), ["q"], ["k", "l"]] and data["title"] == "<title>"
    assert [one["name"] for one in data["maps"]] == ["layer 2, head 5", "cross, layer 1, head 3"]
    raw = base64.b64decode(data["maps"][0]["weights"])
    codes = [int.from_bytes(raw[at : at + 2], "little") for at in range(0, len(raw), 2)]
    assert codes[12] == 65535 and codes[:2] == [65534, 0]
    assert all(
        abs(code / 65534 - weight) < 1e-5
        for code, weight in zip(codes[:12], (x for row in weights[:3] for x in row), strict=True)
    )
    assert source.count("<script") == 2 and "<b>" not in source and "alert(1)" in source
    code = source.rpartition("<script>")[2]
    assert not re.search(r"https?:|fetch\(|XMLHttp|eval\(|innerHTML|document\.write", code)
    assert set(re.findall(r'\$\("([a-z]+)"\)', code)) <= set(re.findall(r'id="([a-z]+)"', source))


def test_html_page_refuses_too_many_weights(monkeypatch):
    monkeypatch.setattr("kvad.engine.attention_page.MAX_WEIGHTS", 15)
    with pytest.raises(RequestError, match="at most 15 weights, got 16"):
        attention_to_html("abcd", [AttentionMap(0, 0, [[0.25] * 4] * 4)])
