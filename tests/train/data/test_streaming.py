"""Rows in corpus order: equal from a stream and a store and from any start; and mixtures."""

import gzip
import json
from functools import partial

import numpy as np
import pytest

from kvad.errors import ConfigError, DataError
from kvad.text import base
from kvad.text.tokenizer import train_tokenizer
from kvad.train.config.run import RunConfig
from kvad.train.data import token_store
from kvad.train.data.packed_dataset import BLOCK, MixtureRows, MixtureSource, PackedDataset
from kvad.train.data.packers import DocumentPacker
from kvad.train.data.streaming import Cursor, ShuffleBuffer, StreamItem, StreamPacker, stream_store, stream_texts
from kvad.train.data.token_store import open_store
from kvad.train.sources import formats
from kvad.train.sources.documents import open_corpus
from kvad.train.sources.pairs import PairPaths, open_pairs
from tests.train.data.test_document_packer import Tokens

BYTE = train_tokenizer("byte", [])
PAIRED = train_tokenizer("byte", [], specials=("bos", "eos", "pad"))


def config(order="stream", context=16, shuffle=8, **data):
    tables = {"seq_len": context, "order": order, "shuffle_buffer": shuffle, "validation_fraction": 0.2, **data}
    return RunConfig.from_dict({"data": tables, "train": {"batch_size": 4, "eval_tokens": 100}})


@pytest.fixture
def texts(tmp_path):
    """Documents of many lengths, one longer than a piece, with an empty line, two files compressed."""
    folder = tmp_path / "texts"
    folder.mkdir()
    random = np.random.default_rng(0)
    lines = [" ".join(str(n + i) for i in range(int(random.integers(1, 40)))) for n in range(60)]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": line, "n": 1}) + "\n" for line in lines[:20]))
    (folder / "b.txt").write_text(" ".join(lines))
    objects = "".join(json.dumps({"text": x}) + "\n" for x in lines[20:])
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(objects.encode()))
    (folder / "d.txt.gz").write_bytes(gzip.compress(lines[7].encode()))
    return folder


@pytest.fixture
def small(monkeypatch):
    """Pieces of 300 characters, blocks of 64 bytes, batches of 500: boundaries everywhere."""
    monkeypatch.setattr(base, "MAX_PIECE_CHARS", 300)
    monkeypatch.setattr(base, "split_text", partial(base.split_text, limit=300))
    monkeypatch.setattr(formats, "READ_CHUNK", 64)
    monkeypatch.setattr(token_store, "BATCH_CHARS", 500)


def sources(kind, texts, tmp_path):
    """The same items from texts and from a store."""
    if kind == "pairs":
        tsv = tmp_path / "pairs.tsv"
        lines = [f"{'x' * (1 + n % 9)}{n}\t{'y' * (n % 12)}{n}\n" for n in range(90)]
        tsv.write_text("".join(lines) + "x" * 40 + "\ty\n")
        corpus, tokenizer = open_pairs(PairPaths(((tsv,),))), PAIRED
    else:
        corpus, tokenizer = open_corpus([texts]), BYTE
    store, _ = open_store(tmp_path / f"store-{kind}", corpus, tokenizer)
    return (stream_texts(corpus, tokenizer), stream_store(store, 0, store.num_documents, pairs=kind == "pairs"), store)


def data(items, pairs, **settings):
    run = config(**settings)
    return PackedDataset(StreamPacker([(items, 1.0)], run, pairs=pairs, description="tokens"), run)


def plain(rows):
    return [[[None if x is None else x.tolist() for x in part] for part in row] for row in rows]


KINDS = [("documents", "split"), ("documents", "first-fit"), ("documents", "best-fit"), ("pairs", "first-fit")]


@pytest.mark.parametrize(("kind", "packing"), KINDS)
@pytest.mark.parametrize("shuffle", [1, 8])
def test_stream_and_store_give_equal_rows(texts, small, tmp_path, kind, packing, shuffle):
    stream, stored, store = sources(kind, texts, tmp_path)
    assert kind == "pairs" or len(store.document_starts) > 5, "some documents come in pieces"
    pairs = kind == "pairs"
    a, b = data(stream, pairs, packing=packing, shuffle=shuffle), data(stored, pairs, packing=packing, shuffle=shuffle)
    numbers = np.arange(400)  # several epochs
    assert plain(a.rows(numbers)) == plain(b.rows(numbers))
    evaluations = [[x.model_input.token_ids.tolist() for x in data.evaluation()] for data in (a, b)]
    assert evaluations[0] == evaluations[1]
    if pairs:
        assert a.packer.sources[0].left_out and "left out so far" in a.summary()[1]
        assert a.packer.examples(2) == b.packer.examples(2)


@pytest.mark.parametrize(("kind", "packing"), KINDS)
def test_rows_are_independent_of_the_start(texts, small, tmp_path, kind, packing):
    """From the beginning, and from the cursor in a checkpoint."""
    stream, stored, _ = sources(kind, texts, tmp_path)
    through = data(stored, kind == "pairs", packing=packing)
    expected, cursors = [], []
    for number in range(500):
        expected += plain(through.rows(np.array([number])))
        cursors.append(json.loads(json.dumps(through.packer.position())))
    assert len({str(c) for c in cursors}) > 5 and Cursor(*cursors[-1][0]).epoch > 0
    again = data(stored, kind == "pairs", packing=packing)
    for number in (450, 3, 77, 199, 0):
        assert plain(again.rows(np.array([number]))) == expected[number : number + 1]
    for number in (60, 130, 440):
        resumed = data(stream, kind == "pairs", packing=packing)
        resumed.packer.seek(cursors[number])
        requested, (source,) = [], resumed.packer.sources
        source._items, real = lambda place: (requested.append(place), real(place))[1], source._items  # noqa: B023
        assert plain(resumed.rows(np.arange(number, number + 5))) == expected[number : number + 5]
        assert requested[0] == Cursor(*cursors[number][0]).item, "earlier items are not encoded again"


def test_epoch_has_every_token_and_its_next_token_once(texts, small, tmp_path):
    _, stored, _store = sources("documents", texts, tmp_path)
    found = data(stored, pairs=False, shuffle=3)
    source = found.packer.sources[0]
    items = [unit for unit in stored(0) if not source.is_held_out(unit.item_index)]
    training = list(source._split_items(0, held_out=False))
    targets = [pair for item in training for pair in zip(*item.part(0, len(item.tokens))[:2], strict=True)]
    rows = [row for _, block in source._epoch(Cursor()) for row in block]
    assert sorted(p for row in rows for part in row for p in zip(*part[:2], strict=True)) == sorted(targets)
    assert sum(len(part.tokens) for row in rows for part in row) == sum(len(unit.tokens) for unit in items)
    blocks = [next(source._epoch(Cursor(0, epoch)))[1] for epoch in range(4)]
    first = {min(len(row[0].tokens) if len(row) == 1 else 16 for row in block) for block in blocks}
    assert len(first) > 1, "the first row of an epoch has its own length"
    held = {unit.item_index for unit in stored(0)} - {unit.item_index for unit in items}
    assert 0.05 < len(held) / len({unit.item_index for unit in stored(0)}) < 0.5


def test_piece_before_a_held_out_piece_has_no_next_token(texts, small, tmp_path):
    _, stored, _store = sources("documents", texts, tmp_path)
    source = data(stored, pairs=False).packer.sources[0]
    pieces = [piece for piece in source._split_items(0, held_out=False) if not piece.closes]
    before = [piece.next_token for piece in pieces if source.is_held_out(piece.item_index + 1)]
    assert before and set(before) == {-1}
    assert all(piece.next_token >= 0 for piece in pieces if not source.is_held_out(piece.item_index + 1))


def test_pieces_have_the_tokens_of_the_document(texts, small, tmp_path):
    """Tokens of a text are independent of its pieces."""
    stream, _, store = sources("documents", texts, tmp_path)
    whole = [np.array([BYTE.special_tokens.separator, *text.encode()]) for text in open_corpus([texts]).texts()]
    assert np.concatenate([u.tokens for u in stream(0)]).tolist() == np.concatenate(whole).tolist()
    assert store.num_documents == len(whole)


@pytest.mark.parametrize("packing", ["split", "first-fit", "best-fit"])
def test_pieces_and_texts_without_a_token(packing):
    """A word tokenizer gives no token for blanks: targets stay those of the tokens before them."""
    tokens = [[0, 1, 2, 3], [], [4, 5], [0, 6, 7], []]
    ends = [(True, False), (False, False), (False, True), (True, False), (False, True)]
    next_tokens = [-1, 4, 0, -1, 0]  # unknown before an empty piece
    items = [
        StreamItem(number, np.array(ids, np.int64), next_token, *bounds)
        for number, (ids, next_token, bounds) in enumerate(zip(tokens, next_tokens, ends, strict=True))
    ]
    fit = None if packing == "split" else packing
    source = ShuffleBuffer(lambda index: iter(items[index:]), 16, fit, 8, 1e-9, 0)
    segments = [segment for row in source.rows(np.arange(20)) for segment in row]
    assert all(len(segment.tokens) == len(segment.targets) for segment in segments)
    found = {token: target for part in segments for token, target in zip(*(x.tolist() for x in part[:2]), strict=True)}
    expected = {1: 2, 2: 3, 3: -1, 4: 5, 5: 0, 6: 7, 7: -1}
    assert {token: target for token, target in found.items() if token} == expected


def test_unsupported_streams_are_refused(texts, tmp_path):
    (tmp_path / "one.txt").write_text("one document alone " * 50)
    items = stream_texts(open_corpus([tmp_path / "one.txt"]), BYTE)
    with pytest.raises(DataError, match=r"too few texts to hold out a fraction of 0.2|no text is left to train on"):
        data(items, pairs=False)
    tables = config().to_dict()
    tables["train"]["eval_tokens"] = 0
    with pytest.raises(ConfigError, match=r"train.eval_tokens: must be above 0"):
        StreamPacker([(items, 1.0)], RunConfig.from_dict(tables), pairs=False, description="")
    with pytest.raises(ConfigError, match=r"must be first-fit or best-fit for pairs"):
        data(items, pairs=True, packing="split")


# ---------------------------------------------------------------- mixtures


class Numbered:
    def __init__(self, name):
        self.name = name

    def rows(self, numbers):
        return [(self.name, int(n)) for n in numbers]


def test_mixture_follows_weights_and_keeps_each_order():
    def mixture(*weights, seed=1):
        return MixtureRows([Numbered(0), Numbered(1), Numbered(2)], weights, seed)

    count = 20 * BLOCK
    rows = mixture(5, 3, 2).rows(np.arange(count))
    for source, share in ((0, 0.5), (1, 0.3), (2, 0.2)):
        numbers = [n for s, n in rows if s == source]
        assert numbers == list(range(len(numbers))), "every row of a source once"
        assert abs(len(numbers) - count * share) < 4 * (count * share * (1 - share)) ** 0.5
    assert mixture(50, 30, 20).rows(np.arange(count)) == rows
    assert mixture(5, 3, 2, seed=2).rows(np.arange(99)) != rows[:99]
    for n in (17000, 3, 9000):
        assert mixture(5, 3, 2).rows(np.arange(n, n + 5)) == rows[n : n + 5]


@pytest.mark.parametrize("packing", ["split", "first-fit"])
def test_mixture_of_documents_is_seekable(packing):
    store = Tokens(*[30] * 40)
    parts = [MixtureSource(0, 20, 3.0), MixtureSource(20, 40, 1.0)]

    def made():
        return DocumentPacker(store, config("epochs", packing=packing, context=15), parts)

    through = made()
    rows = plain(through.source.rows(np.arange(300)))
    assert plain(made().source.rows(np.arange(200, 210))) == rows[200:210]
    first = sum(max(part[0]) < 200 for row in rows for part in row[:1])
    assert 0.6 < first / 300 < 0.9
    assert len(through.validation) + len(through.training) == store.num_tokens
    documents = {int(span) // 30 for span in through.validation.spans[:, 0]}
    assert min(documents) < 20 <= max(documents), "every source holds a share out"
