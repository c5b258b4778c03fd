"""Files as documents, and refused files."""

import os

import pytest

from kvad.errors import DataError
from kvad.train.sources.documents import open_corpus
from kvad.train.sources.formats import read_blocks


@pytest.fixture
def tree(tmp_path):
    for name, content in {
        "b.txt": b"bee",
        "a/deep/z.py": b"zed",
        "a/c.txt": "sé".encode(),
        "empty.txt": b" \n",
        "image.png": b"\x89PNG\0\0",
        ".hidden/x.txt": b"no",
        ".secret": b"no",
    }.items():
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "tree"


def test_a_folder_is_read_recursively_in_one_order(tree):
    corpus = open_corpus([tree])
    assert [source.name for source in corpus.sources] == ["tree/b.txt", "tree/a/c.txt", "tree/a/deep/z.py"]
    assert list(corpus.texts()) == ["bee", "sé", "zed"] == list(corpus.texts())
    assert corpus.skipped == 2 and sum(source.num_bytes for source in corpus.sources) == 9


def test_suffixes_select_files_of_folders_only(tree):
    assert [s.name for s in open_corpus([tree], suffixes=[".py"]).sources] == ["tree/a/deep/z.py"]
    assert [s.name for s in open_corpus([tree / "b.txt"], suffixes=[".py"]).sources] == ["b.txt"]


def test_a_changed_file_has_another_hash(tree):
    before = open_corpus([tree]).sources
    (tree / "b.txt").write_text("bees")
    after = open_corpus([tree]).sources
    assert before[1:] == after[1:] and before[0].sha256 != after[0].sha256


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.txt", r"no such file or folder: .*nowhere.txt \(looked for /"),
        ("emty.txt", r"no such file or folder: .*emty.txt \(did you mean '/.*/empty.txt'\?\)"),
        ("empty.txt", r"empty.txt is empty"),
        ("image.png", r"image.png is binary \(a zero byte at offset 4\)"),
    ],
)
def test_invalid_paths_are_refused(tree, name, message):
    with pytest.raises(DataError, match=message):
        open_corpus([tree / name])


@pytest.mark.parametrize("name", ["offsets.bin", "tokens-00000.bin"])
def test_a_folder_of_tokens_is_never_read_as_text(tree, name):
    """Its manifest and tokenizer are JSON; a suffix selects other files."""
    (tree / "a" / name).write_bytes(b"\1\0")
    (tree / "a" / "manifest.json").write_text("{}")
    with pytest.raises(DataError, match=r"a has tokens, as kvad data prepare writes them, and no text .*--suffix"):
        open_corpus([tree])
    assert len(open_corpus([tree], suffixes=[".txt"]).sources) == 2


def test_corpus_without_text_is_refused(tree):
    with pytest.raises(DataError, match=r"no text files ending in \.md in .*tree \(Select files with --suffix"):
        open_corpus([tree], suffixes=[".md"])
    (tree / "hollow").mkdir()
    with pytest.raises(DataError, match=r"no text files in .*hollow \(Name text files, or their folder.\)"):
        open_corpus([tree / "hollow"])
    (tree / "hollow" / "nothing.txt").touch()
    with pytest.raises(DataError, match=r"no text files in .*hollow \(1 file there is empty or binary\)"):
        open_corpus([tree / "hollow"])
    with pytest.raises(DataError, match="no corpus was named"):
        open_corpus([])


def test_an_unreadable_file_is_named(tree, monkeypatch):
    def refuse(_path, *_how):
        raise PermissionError(13, "Permission denied")  # simulated, because root can read every file

    monkeypatch.setattr(type(tree), "open", refuse)
    with pytest.raises(DataError, match=r"cannot read .*b.txt: Permission denied"):
        open_corpus([tree])


def test_an_unreadable_folder_is_named(tree, monkeypatch):
    real = os.scandir

    def refuse(path):
        if str(path).endswith("deep"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=r"cannot read .*deep: Permission denied"):
        open_corpus([tree])


def test_invalid_utf8_is_named_by_file_and_byte(tree):
    (tree / "latin.txt").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(DataError, match=r"latin.txt, line 1, is not UTF-8: byte 0xE9 at offset 3") as caught:
        list(open_corpus([tree]).texts())
    assert "--encoding-errors replace" in caught.value.hint
    assert "caf\ufffd au lait" in list(open_corpus([tree], errors="replace").texts())


def test_byte_order_mark_is_removed(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"\xef\xbb\xbfabc")
    assert "".join(read_blocks(tmp_path / "x.txt", "strict")) == "abc"
