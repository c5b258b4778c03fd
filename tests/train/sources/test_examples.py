"""Files of examples: tags and labels as columns of a store, packed rows, bad input."""

import gzip
import json

import numpy as np
import pytest

from kvad.errors import ConfigError, DataError, UsageError
from kvad.text.tokenizer import train_tokenizer
from kvad.train.config.run import RunConfig
from kvad.train.data.collate import CollateConfig, collate_rows
from kvad.train.data.packed_dataset import MixtureSource, PackedDataset
from kvad.train.data.packers import ExampleTexts, WholeTextPacker, WholeTextRows
from kvad.train.data.token_store import TokenStore, open_store
from kvad.train.sources.examples import LabeledCorpus, TagCorpus, word_separator
from kvad.train.sources.pairs import PairPaths

TAGS = "Ada\tPROPN\nsees\tVERB\nBob\tPROPN\n\nBob\tPROPN\nran\tVERB\n\n\nWho\tPRON\n?\tPUNCT"
ROLES = ("pad", "unk", "cls", "sep", "mask")
TAGGING, LABELED = TagCorpus(errors="strict"), LabeledCorpus(errors="strict")


@pytest.fixture
def written(tmp_path):
    def write(name, text):
        (tmp_path / name).write_text(text)
        return PairPaths(((tmp_path / name,),))

    return write


def with_held_out(paths, other):
    return PairPaths(paths.files, other.files)


def texts_of(store, column):
    for text in range(store.num_documents):
        at = np.arange(store.offsets[text], store.offsets[text + 1])
        yield store.take(at).tolist(), store.column(column, at).tolist()


# ---------------------------------------------------------------- tagging files


def test_word_is_tagged_at_its_first_token(written, tmp_path):
    corpus = TAGGING.open(with_held_out(written("t", TAGS), written("d", "Bob\tVERB\n")), 0.1)
    assert corpus.labels == ("PRON", "PROPN", "PUNCT", "VERB")
    assert (corpus.num_texts, corpus.num_held_out) == (4, 1)
    assert list(corpus.texts()) == ["Ada sees Bob", "Bob ran", "Who ?", "Bob"]
    tokenizer = train_tokenizer("byte", [], specials=ROLES)
    cls, sep = tokenizer.special_tokens.cls, tokenizer.special_tokens.sep
    store, _ = open_store(tmp_path / "data", corpus, tokenizer)
    first, labels = next(texts_of(store, "labels"))
    assert first == [cls, *b"Ada sees Bob", sep]
    assert labels == [-1, 1, -1, -1, 3, -1, -1, -1, -1, 1, -1, -1, -1, -1], "of ' sees' the space is the first"
    again, found = open_store(tmp_path / "data", corpus, tokenizer)
    assert found and list(texts_of(again, "labels")) == list(texts_of(store, "labels"))
    (tmp_path / "data" / "labels.bin").write_bytes(b"")
    assert not open_store(tmp_path / "data", corpus, tokenizer)[1], "a truncated column is rewritten"


@pytest.mark.parametrize("kind", ["bpe", "byte", "char", "word"])
def test_tokens_equal_those_of_the_whole_sentence(kind, written, tmp_path):
    """Tokens equal those of ``kvad tag``, and every word has one tag."""
    paths = written("t", TAGS)
    texts = ["Ada sees Bob", "Bob ran", "Who ?"] * 20
    tokenizer = train_tokenizer(kind, texts, vocab_size=300, specials=ROLES)
    corpus = TAGGING.open(with_held_out(paths, written("d", TAGS)), 0.1)
    store, _ = open_store(tmp_path / "data", corpus, tokenizer)
    for (ids, labels), text in zip(texts_of(store, "labels"), [*texts[:3], *texts[:3]], strict=True):
        assert ids == tokenizer.add_special_tokens(tokenizer.encode(text))
        assert sum(label >= 0 for label in labels) == len(text.split())
    assert word_separator(tokenizer, ("Ada", "sees")) == " "


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\tX\nb\n", "line 2: one column, and a tagging file has WORD<tab>TAG"),
        ("a\tX\nb X\n", "line 2: one column"),
        ("a\tX\n\nb\tY\tZ\n", "line 3: 3 columns"),
        ("a\tX\n\t Y\n", "line 2: the word is empty"),
        ("a\tX\nb\t\n", "line 2: the tag is empty"),
        ("\n\n", "too few sentences: 0 sentences to train on"),
        ("a\tX\n", "too few sentences: 0 sentences to train on and 1 for validation"),
    ],
)
def test_bad_tagging_files_are_named_by_line(text, message, written):
    with pytest.raises(DataError, match=message):
        TAGGING.open(written("t.tsv", text), 0.1)


def test_held_out_tag_without_training_example_is_refused(written):
    train, other = written("train.tsv", TAGS), written("dev.tsv", "Ada\tPROPN\n\nWho\tPRON\nknew\tADJ\n")
    with pytest.raises(DataError, match=r"dev.tsv, line 4: tag 'ADJ' is held out and does not occur in training"):
        TAGGING.open(with_held_out(train, other), 0.1)
    with pytest.raises(DataError, match=r"nothing is left to hold out: 1 example of this fraction, and each has a tag"):
        TAGGING.open(train, 0.1)  # the held-out fraction is the last sentence


def test_held_out_fraction_leaves_rare_labels_in_training(written, tmp_path):
    """Otherwise in file order; the next example with that label is held out."""
    labels = ["a", "b", "a", "b", "a", "rare", "b", "rare", "odd", "a"]
    paths = written("t.tsv", "".join(f"{label}\ttext {n}\n" for n, label in enumerate(labels)))
    corpus = LABELED.open(paths, 0.5)
    assert corpus.labels == ("a", "b", "odd", "rare") and corpus.num_held_out == 3
    assert list(corpus.texts()) == [f"text {n}" for n in (0, 1, 2, 3, 4, 5, 8, 6, 7, 9)]
    assert [corpus.file_index(place) for place in range(7)] == [0, 1, 2, 3, 4, 5, 8], "indices in the file"
    assert "10 labeled texts in 1 file, 0.0 MB, 3 of them for validation; 2 labeled texts of them" in corpus.summary()
    tokenizer = train_tokenizer("byte", [], specials=ROLES)
    store, _ = open_store(tmp_path / "data", corpus, tokenizer)
    seen = [found[0] for _, found in texts_of(store, "labels")]
    assert set(seen[-3:]) <= set(seen[:-3]) == {0, 1, 2, 3}
    assert open_store(tmp_path / "data", LABELED.open(paths, 0.5), tokenizer)[1], "reused"
    assert not open_store(tmp_path / "data", LABELED.open(paths, 0.3), tokenizer)[1]
    tags = written("tags.tsv", "w\tA\nx\tB\n\n" * 18 + "w\tA\n%\tSYM\n%\tSYM\n\n" * 2)
    tagged = TAGGING.open(tags, 0.1)
    assert (tagged.train_files, tagged.num_held_out, tagged.labels) == ((18,), 1, ("A", "B", "SYM"))


def test_pairs_and_folders_are_refused_for_tagging(written, tmp_path):
    with pytest.raises(UsageError, match="must not be given, sentences are in single files"):
        TAGGING.open(PairPaths(((tmp_path / "a", tmp_path / "b"),)), 0.1)
    with pytest.raises(DataError, match="is a folder, and sentences come from files"):
        TAGGING.open(PairPaths(((tmp_path,),)), 0.1)
    with pytest.raises(DataError, match="no such file"):
        TAGGING.open(PairPaths(((tmp_path / "none",),)), 0.1)


# ---------------------------------------------------------------- labeled texts


def test_label_is_at_the_first_token(written, tmp_path):
    objects = [{"text": "fine", "label": 2}, {"text": " ", "label": 2}, {"text": "poor", "label": "bad"}]
    lines = "".join(json.dumps(each) + "\n\n" for each in [*objects, *objects])
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(lines.encode()))
    corpora = [
        LABELED.open(written("a.jsonl", lines), 0.5),
        LABELED.open(written("a.tsv", "2\tfine\n2\t \nbad\tpoor\n" * 2), 0.5),
        LABELED.open(PairPaths(((packed,),)), 0.5),
    ]
    tokenizer = train_tokenizer("byte", [], specials=ROLES)
    for number, corpus in enumerate(corpora):
        assert corpus.labels == ("2", "bad") and corpus.skipped == 2 and corpus.num_held_out == 2
        store, _ = open_store(tmp_path / str(number), corpus, tokenizer)
        ids, labels = next(texts_of(store, "labels"))
        assert ids == [tokenizer.special_tokens.cls, *b"fine", tokenizer.special_tokens.sep]
        assert labels == [0, -1, -1, -1, -1, -1]
        assert [labels[0] for _, labels in texts_of(store, "labels")] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.tsv", "x\ta b\nfine\n", "line 2: no tab, and a labeled text is LABEL<tab>TEXT"),
        ("t.tsv", "x\ta\tb\n", "line 1: two tabs or more"),
        ("t.tsv", "\ta\n", "line 1: the label is empty"),
        ("t.tsv", "x\ta\nx\tb\ny\tc\n", "1 example of this fraction, and each has a label"),
        ("t.jsonl", '{"text": "a", "label": "x"}\n{"text"\n', "line 2, is not JSON"),
        ("t.jsonl", "[1]\n", "line 1: must be an object, got list"),
        ("t.jsonl", '{"txt": "a", "label": "x"}\n', r"line 1: no field 'text' \(did you mean 'txt'"),
        ("t.jsonl", '{"text": "a", "label": 0.5}\n', "line 1: label must be a text or a whole number, got 0.5"),
        ("t.jsonl", '{"text": "a", "label": true}\n', "label must be"),
        ("t.jsonl", '{"text": 3, "label": "x"}\n', "text must be a text"),
    ],
)
def test_bad_labeled_texts_are_named_by_line(name, text, message, written):
    with pytest.raises(DataError, match=message):
        LABELED.open(written(name, text), 0.34)


# ---------------------------------------------------------------- rows


class Texts(TokenStore):
    """A store in memory: text i has ``lengths[i]`` tokens 10 i, 10 i + 1, ...; its last two are learned."""

    def __init__(self, lengths, column="mask"):
        self.stream = np.concatenate([10 * i + np.arange(n) for i, n in enumerate(lengths)])
        self.offsets = np.cumsum([0, *lengths])
        self.manifest = {"columns": {column: "uint8"}}
        self.values = np.concatenate([[0] * (n - 2) + [1, 1] for n in lengths])

    num_tokens = property(lambda self: len(self.stream))

    def take(self, at):
        return self.stream[at]

    def column(self, name, at):
        return self.values[at]


def build_batch(store):
    rows = WholeTextRows(ExampleTexts(store, "text"), np.arange(3), 8, "first-fit")
    assert len(rows) == 2 and rows.packing_stats()[:3] == (2, 16, 13)
    return collate_rows(rows.in_order(np.arange(2)), CollateConfig(8, 99, keep_document_ids=True))


def test_docstring_example_of_rows():
    batch = build_batch(Texts([4, 3, 6]))
    tokens = [20, 21, 22, 23, 24, 25, 99, 0, 1, 2, 3, 10, 11, 12]  # the longest first
    assert batch.model_input.token_ids.tolist() == tokens
    assert batch.model_input.document_ids.tolist() == [0, 0, 0, 0, 0, 0, -1, 0, 0, 0, 0, 1, 1, 1]
    assert batch.model_input.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 0, 1, 2, 3, 0, 1, 2]
    assert batch.model_input.logit_indices.tolist() == [3, 4, 8, 9, 11, 12], "the token before each that is learned"
    assert batch.targets.tolist() == [24, 25, 2, 3, 11, 12]
    labelled = Texts([4, 3, 6], "labels")
    labelled.values = np.array([-1, 5, -1, 6, 0, -1, -1, -1, -1, -1, -1, -1, 2])
    batch = build_batch(labelled)
    assert batch.model_input.logit_indices.tolist() == [5, 8, 10, 11] and batch.targets.tolist() == [2, 5, 6, 0]


def configured(**data):
    train = {"batch_size": 1, "gradient_accumulation_steps": 2, "seed": 3}
    return RunConfig.from_dict({"data": {"seq_len": 8, **data}, "train": train})


def example_dataset(store, config, num_held_out, noun):
    parts = [MixtureSource(0, store.num_documents, num_held_out=num_held_out)]
    packer = WholeTextPacker(ExampleTexts(store, noun), config, parts)
    return PackedDataset(packer, config, shape=CollateConfig.of_run(config, 99, keep_document_ids=True))


def test_epoch_uses_every_text_once_and_long_ones_are_counted():
    store = Texts([4, 3, 6, 9, 5, 8, 2, 4, 4])
    data = example_dataset(store, configured(), 2, "conversation")
    (training,) = data.packer.sources
    assert "left out: 1 conversation longer than data.seq_len 8 (the longest has 9 tokens)" in data.summary()
    steps = len(training) // 2
    texts = []
    for epoch in range(2):
        batches = [batch.model_input for step in range(steps) for batch in data.micro_batches(epoch * steps + step)]
        texts.append({t for b in batches for t in (b.token_ids[b.document_ids >= 0] // 10).tolist()})
    assert len(training) % 2 == 0 and texts == [{0, 1, 2, 4, 5, 6}] * 2
    assert data.train_tokens == 11, "a text's first token is no target"
    assert data.validation_tokens == 4
    held_out = [batch.model_input.token_ids for batch in data.evaluation()]
    assert {int(token) // 10 for tokens in held_out for token in tokens if token != 99} == {7, 8}


def test_turn_end():
    store = Texts([4, 4])
    packer = example_dataset(store, configured(), 1, "conversation").packer
    assert packer.turn_end() is None, "3 and 13"
    store.stream[7] = 3
    assert packer.turn_end() == 3


def test_examples_that_cannot_be_packed_are_refused():
    with pytest.raises(DataError, match="no sentence is left for training: none of 1 sentence fits"):
        example_dataset(Texts([9, 4]), configured(), 1, "sentence")
    with pytest.raises(ConfigError, match=r"data\.order: windows is for documents"):
        example_dataset(Texts([4, 4]), configured(order="windows"), 1, "sentence")
