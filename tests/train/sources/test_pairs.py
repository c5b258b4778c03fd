"""Pairs from files: all forms, skipped pairs, refused lines."""

import pytest

from kvad.cli.main import main
from kvad.errors import DataError
from kvad.text.tokenizer import train_tokenizer
from kvad.train.sources.pairs import ROLES, PairPaths, open_pairs, pair_generation_config

BYTE = train_tokenizer("byte", [], specials=ROLES)


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def tsv(*paths, held_out=()):
    return PairPaths(tuple((path,) for path in paths), tuple((path,) for path in held_out))


def test_a_tsv_file(write):
    corpus = open_pairs(tsv(write("a.tsv", "ein Haus\ta house\n\tnothing\neins \tone\r\nzwei\t \ndrei\tthree")))
    assert list(corpus.texts()) == ["ein Haus", "a house", "eins ", "one", "drei", "three"]
    assert (corpus.num_pairs, corpus.num_held_out, corpus.skipped) == (3, 0, 2)
    assert corpus.summary() == "corpus: 3 pairs in 1 file, 0.0 MB; 2 pairs with an empty side left out"


def test_parallel_files_of_the_same_name_in_two_folders(write, tmp_path):
    for side, text in {"de": "\ufeffeins\n\ndrei\tvier\n", "en": "one\ntwo\nthree\x0bfour\n"}.items():
        (tmp_path / side).mkdir()
        write(f"{side}/train", text)
    corpus = open_pairs(PairPaths(((tmp_path / "de" / "train", tmp_path / "en" / "train"),)))
    assert list(corpus.texts()) == ["eins", "one", "drei\tvier", "three\x0bfour"] and corpus.skipped == 1
    assert [source.name for source in corpus.sources] == ["de/train", "en/train"]


def test_held_out_files_come_last_and_are_counted(write):
    corpus = open_pairs(tsv(write("a.tsv", "a\tb\nc\td\n"), held_out=[write("v.tsv", "x\ty\n\t\n")]))
    assert list(corpus.texts()) == ["a", "b", "c", "d", "x", "y"]
    assert (corpus.num_pairs, corpus.num_held_out, corpus.skipped) == (3, 1, 1)
    assert "1 of them for validation" in corpus.summary()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a\tb\nc d\n", r"a.tsv, line 2: no tab, and a pair is SOURCE<tab>TARGET .*--pairs SOURCE TARGET"),
        ("a\tb\tc\n", r"a.tsv, line 1: 2 tabs"),
        ("a\tb\n\nc\td\n", r"a.tsv, line 2: no tab"),
        (b"a\tb\nca\xe9\td\n", r"a.tsv, line 2, is not UTF-8: byte 0xE9 at offset 6 .*--encoding-errors replace"),
        (b"a\0\tb\n", r"a.tsv is binary \(a zero byte at offset 1\)"),
        ("", r"no pairs in .*a.tsv"),
        ("\tb\na\t\n", r"no pairs in .*a.tsv \(2 pairs with an empty side"),
    ],
)
def test_invalid_lines_are_refused(write, content, message):
    with pytest.raises(DataError, match=message):
        open_pairs(tsv(write("a.tsv", content)))


def test_errors_replace(write):
    corpus = open_pairs(tsv(write("a.tsv", b"ca\xe9\td\n")), errors="replace")
    assert list(corpus.texts()) == ["ca\ufffd", "d"]


@pytest.mark.parametrize(("first", "second"), [(3, 5), (5, 3), (0, 1)])
def test_parallel_files_of_unequal_length_are_refused_with_both_counts(write, first, second):
    files = tuple(write(name, "line\n" * count) for name, count in (("a.de", first), ("a.en", second)))
    message = rf"unequal length: .*a.de has {first} lines?, .*a.en has {second} lines?"
    with pytest.raises(DataError, match=message):
        open_pairs(PairPaths((files,)))


def test_missing_files_are_refused(tmp_path):
    for paths, message in (
        (tsv(tmp_path / "no.tsv"), "no such file"),
        (tsv(tmp_path), "is a folder"),
        (tsv(), "no pairs were"),
    ):
        with pytest.raises(DataError, match=message):
            open_pairs(paths)


def test_frame_of_both_sides(write):
    frame = open_pairs(tsv(write("a.tsv", "a\tb\n"))).framer(BYTE)
    bos, eos = BYTE.special_tokens.bos, BYTE.special_tokens.eos
    assert frame(0, [7, 8]) == [7, 8, eos] and frame(1, [7, 8]) == [bos, 7, 8, eos]


def test_generation_config_of_pairs():
    generation, specials = pair_generation_config(BYTE), BYTE.special_tokens
    assert (generation.decoder_start_token_id, generation.eos_token_ids) == (specials.bos, (specials.eos,))
    assert (generation.source_eos_token_id, generation.suppress_tokens) == (specials.eos, (specials.pad,))
    assert generation.with_source_eos([5]) == [5, specials.eos] == generation.with_source_eos([5, specials.eos])
    assert generation.with_source_eos([]) == []


@pytest.mark.parametrize("roles", [("bos",), ("eos", "pad")])
def test_tokenizer_without_bos_or_eos_is_refused(roles):
    missing = "EOS" if "bos" in roles else "BOS"
    with pytest.raises(DataError, match=f"no {missing} token"):
        pair_generation_config(train_tokenizer("byte", [], specials=roles))


def test_paths_are_stored_absolute(write, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    paths = PairPaths(((write("a.tsv", "a\tb").relative_to(tmp_path),),), ())
    assert PairPaths.from_dict(paths.to_dict()).files == ((tmp_path / "a.tsv",),)


def test_json_lines_by_name_and_by_format(write, tmp_path, capsys):
    lines = "".join(f'{{"source": "a b {n}", "target": "b a {n}"}}\n' for n in range(30))
    for name, more in (("p.jsonl", ()), ("p.txt", ("--format", "jsonl")), ("q.jsonl", ("--format", "pairs"))):
        path = write(name, lines)
        options = ("--objective", "seq2seq", "--tokenizer", "char", "--out", tmp_path / f"out-{name}")
        assert main([str(word) for word in ("data", "prepare", path, *options, *more)]) == 0, name
        assert "corpus: 30 pairs in 1 file" in capsys.readouterr().err
    both = ("--pairs", write("a", "x\n" * 9), write("b", "y\n" * 9), "--format", "jsonl", "--out", tmp_path / "c")
    assert main(["data", "prepare", *map(str, both)]) == 2
    assert "data.format: must be 'auto' or 'pairs' for parallel files" in capsys.readouterr().err
