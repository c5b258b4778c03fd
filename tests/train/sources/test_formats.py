"""Compressed files, JSON lines, pieces, and refused files."""

import gzip
import json
import sys

import pytest

from kvad.errors import DataError
from kvad.text.base import split_text
from kvad.train.sources import formats
from kvad.train.sources.documents import open_corpus
from kvad.train.sources.formats import FORMATS, read_blocks, read_lines
from kvad.train.sources.pairs import PairPaths, open_pairs

TEXT = "Grüße — 한국어 🙂 aus dem Märchenwald, 12 mal.\n" * 40


def zstd(content):
    zstandard = pytest.importorskip("zstandard")
    return zstandard.ZstdCompressor().compress(content)


PACK = {".txt": lambda x: x, ".txt.gz": gzip.compress, ".txt.zst": zstd}


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("block", [1, 7, 1 << 20])
def test_text_is_independent_of_compression_and_block_size(tmp_path, monkeypatch, suffix, block):
    monkeypatch.setattr(formats, "READ_CHUNK", block)
    path = tmp_path / f"x{suffix}"
    path.write_bytes(PACK[suffix](b"\xef\xbb\xbf" + TEXT.encode()))
    assert "".join(read_blocks(path, "strict")) == TEXT
    assert list(read_lines(path, "strict")) == TEXT.splitlines()


@pytest.mark.parametrize("suffix", [".txt.gz", ".txt.zst"])
def test_concatenated_frames_are_read_and_a_truncated_one_is_refused(tmp_path, suffix):
    once = PACK[suffix](TEXT.encode())
    path = tmp_path / f"x{suffix}"
    path.write_bytes(once + once)
    assert "".join(read_blocks(path, "strict")) == 2 * TEXT
    for content in (once[:-9], once + once[:-9], b"no such thing " * 9):
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"x{suffix} is damaged or truncated"):
            list(read_blocks(path, "strict"))


def test_missing_zstandard_is_named(tmp_path, monkeypatch):
    (tmp_path / "x.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(DataError, match=r"zstandard is not installed \(pip install zstandard\)"):
        open_corpus([tmp_path / "x.zst"])


def test_pieces_equal_the_split_of_the_whole_text(tmp_path, monkeypatch):
    real = split_text
    monkeypatch.setattr("kvad.text.base.MAX_PIECE_CHARS", 50)
    monkeypatch.setattr("kvad.text.base.split_text", lambda text: real(text, 50))
    monkeypatch.setattr(formats, "READ_CHUNK", 33)
    (tmp_path / "x.txt").write_text(TEXT)
    found = list(FORMATS["text"](tmp_path / "x.txt", "strict", "text"))
    assert [piece.text for piece in found] == list(split_text(TEXT, 50)) and len(found) > 20
    assert [p.opens for p in found] == [True] + [False] * (len(found) - 1)
    assert [p.closes for p in found] == [False] * (len(found) - 1) + [True]
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": TEXT}))
    assert list(FORMATS["jsonl"](tmp_path / "x.jsonl", "strict", "text")) == found
    assert list(open_corpus([tmp_path / "x.txt"]).texts()) == [TEXT]


def test_invalid_byte_is_named_at_any_offset(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "READ_CHUNK", 4)
    for at in range(9):
        (tmp_path / "x.txt").write_bytes(b"\xc3\xa9" * 2 + b"a" * (at % 2) + b"\n" * (at - at % 2) + b"\xe9zz")
        message = rf"x.txt, line {1 + at - at % 2}, is not UTF-8: byte 0xE9 at offset {4 + at} "
        with pytest.raises(DataError, match=message):
            list(read_blocks(tmp_path / "x.txt", "strict"))


def test_json_lines_are_documents_by_their_field(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(
        gzip.compress(b'{"body": "one\\ntwo", "n": 3}\n\n{"body": " "}\n{"body": "3"}\n')
    )
    (tmp_path / "b.txt").write_text("plain")
    corpus = open_corpus([tmp_path], field="body")
    assert list(corpus.texts()) == ["one\ntwo", "3", "plain"]
    assert corpus.settings()["field"] == "body" and "field" not in open_corpus([tmp_path / "b.txt"]).settings()
    assert [s.name for s in open_corpus([tmp_path], suffixes=[".jsonl"]).sources] == [f"{tmp_path.name}/a.jsonl.gz"]
    whole = open_corpus([tmp_path / "b.txt"], format="lines")
    assert whole.one_per_line and list(whole.texts()) == ["plain"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"txt": "a"}', r"x.jsonl, line 2: no field 'text' \(did you mean 'txt'\?\)"),
        ('{"messages": []}', r"line 2: no field 'text' \(messages are .* --objective chat, kvad eval --task chat"),
        ('{"text": 3}', r"x.jsonl, line 2: text must be a text, got 3"),
        ('["a"]', r"x.jsonl, line 2: must be an object, got list"),
        ('{"text": "a"', r"x.jsonl, line 2, is not JSON: .*delimiter"),
    ],
)
def test_invalid_json_lines_are_named_by_line(tmp_path, line, message):
    (tmp_path / "x.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        list(open_corpus([tmp_path / "x.jsonl"]).texts())


def test_pairs_of_json_lines_and_compressed_parallel_files(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"de": "eins", "en": "one"}\n{"de": "", "en": "-"}\n')
    pairs = open_pairs(PairPaths(((tmp_path / "p.jsonl",),)), fields=("de", "en"))
    assert list(pairs.texts()) == ["eins", "one"] and pairs.skipped == 1 and pairs.settings()["pairs"]["fields"]
    for name, text in (("a.gz", "eins\nzwei\ndrei\n"), ("b.gz", "one\ntwo\n")):
        (tmp_path / name).write_bytes(gzip.compress(text.encode()))
    with pytest.raises(DataError, match=r"a.gz has 3 lines, .*b.gz has 2 lines; line 3 of the longer one"):
        open_pairs(PairPaths(((tmp_path / "a.gz", tmp_path / "b.gz"),)))
