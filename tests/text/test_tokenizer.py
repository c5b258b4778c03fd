"""Properties of every kind of tokenizer, and errors."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvad.errors import DataError, SaveError, TokenizerError
from kvad.text.base import NAMES
from kvad.text.tokenizer import KINDS, load_tokenizer, train_tokenizer

LOSSLESS = ("bpe", "byte", "char")


def test_text_round_trips(tokenizer, documents):
    for text in ["", *documents]:
        ids = tokenizer.encode(text)
        assert all(type(token) is int and 0 <= token < tokenizer.vocab_size for token in ids)
        if tokenizer.kind in LOSSLESS:
            assert tokenizer.decode(ids) == text
        else:
            assert tokenizer.encode(tokenizer.decode(ids)) == ids
            assert "".join(tokenizer.decode(ids).split()) == "".join(text.split())


def test_batch_equals_single_texts(tokenizer, documents):
    texts = ["", *documents, "a"]
    assert tokenizer.encode_batch(iter(texts)) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_batch([]) == []


def test_text_creates_special_tokens_only_on_request(tokenizer):
    names = tokenizer.special_tokens.names()
    assert list(names) == list(NAMES.values())
    assert len(set(names.values())) == 5
    for role, name in NAMES.items():
        token = names[name]
        assert getattr(tokenizer.special_tokens, role) == token
        plain = tokenizer.encode(f"def {name} end")
        explicit = tokenizer.encode(f"def {name} end", specials=True)
        assert token not in plain or role == "unk"  # a char or word tokenizer may lack "<"
        assert explicit.count(token) == 1
        assert tokenizer.token_bytes(token) == b""
        assert tokenizer.token_text(token) == name
        assert name not in tokenizer.decode(explicit)
        assert name in tokenizer.decode(explicit, skip_specials=False)


def test_token_bytes_spell_the_text(tokenizer):
    text = "def f(self): return 세계 🙂\n"
    spelled = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))).decode()
    assert spelled == (text.replace(" ", "") if tokenizer.kind == "word" else text)  # its tokens have no spaces
    assert all(tokenizer.token_text(token).isprintable() for token in range(tokenizer.vocab_size))


@pytest.mark.parametrize("by", ["folder", "file", "str"])
def test_save_and_load(tokenizer, documents, tmp_path, by):
    tokenizer.save(tmp_path / "new" / "folder")
    folder = tmp_path / "new" / "folder"
    config = ["tokenizer_config.json"] if tokenizer.kind == "bpe" else []  # AutoTokenizer needs its class
    assert sorted(path.name for path in folder.iterdir()) == ["tokenizer.json", *config]
    again = load_tokenizer({"folder": folder, "file": folder / "tokenizer.json", "str": str(folder)}[by])
    for name in ("kind", "vocab_size", "special_tokens"):
        assert getattr(again, name) == getattr(tokenizer, name)
    assert again.encode_batch(documents) == tokenizer.encode_batch(documents)
    assert again.fingerprint() == tokenizer.fingerprint()
    again.save(tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_fingerprints_differ(tokenizers, documents):
    others = [
        train_tokenizer("char", documents),
        train_tokenizer("char", documents, lower=True),
        train_tokenizer("word", documents, split="whitespace"),
        train_tokenizer("bpe", documents, vocab_size=300),
        train_tokenizer("byte", []),
    ]
    prints = [tokenizer.fingerprint() for tokenizer in [*tokenizers.values(), *others]]
    assert len(set(prints)) == len(prints)
    assert all(len(bytes.fromhex(one)) == 32 for one in prints)


def test_training_is_deterministic_between_processes(documents, tmp_path):
    corpus = tmp_path / "corpus.json"
    corpus.write_text(json.dumps(documents))
    program = (
        "import json, sys; from pathlib import Path; from kvad.text.tokenizer import train_tokenizer;"
        "corpus, folder = map(Path, sys.argv[1:]); texts = json.loads(corpus.read_text());"
        "[train_tokenizer(k, texts, vocab_size=600).save(folder / k) for k in ('bpe', 'char', 'word')]"
    )
    contents = []
    for threads in ("1", "2"):
        env = {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads, "PYTHONPATH": str(Path.cwd())}
        subprocess.run([sys.executable, "-c", program, corpus, tmp_path / threads], env=env, check=True, timeout=120)
        contents.append(
            [(tmp_path / threads / kind / "tokenizer.json").read_bytes() for kind in ("bpe", "char", "word")]
        )
    assert contents[0] == contents[1]


def test_text_imports_libraries_only_when_they_are_used():
    program = (
        "import sys, kvad.text.tokenizer, kvad.text.detokenizer, kvad.text.chat_template;"
        "bad = {'torch', 'tokenizers', 'sentencepiece', 'jinja2', 'numpy'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": str(Path.cwd())}, check=True, timeout=120)


def test_default_specials():
    assert train_tokenizer("byte", []).special_tokens.names() == {"<|endofdoc|>": 256}
    assert train_tokenizer("bpe", ["a"]).special_tokens.names() == {"<|endofdoc|>": 0}
    assert train_tokenizer("char", ["a"]).special_tokens.names() == {"<|endofdoc|>": 0, "<|unk|>": 1}
    assert train_tokenizer("word", ["a"], specials=["pad"]).special_tokens.names() == {"<|endofdoc|>": 0, "<|pad|>": 1}


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize("token", [-1, 10**6, None])
def test_ids_out_of_range(tokenizer, token):
    token = tokenizer.vocab_size if token is None else token
    for call in (tokenizer.token_bytes, tokenizer.token_text, lambda bad: tokenizer.decode([5, bad])):
        with pytest.raises(TokenizerError, match=f"token id {token} .* of {tokenizer.vocab_size} tokens"):
            call(token)


def test_lone_surrogate(tokenizer):
    for call in (tokenizer.encode, lambda text: tokenizer.encode_batch(["fine", text])):
        with pytest.raises(TokenizerError, match=r"character 3 is the lone surrogate U\+D83D"):
            call("a🙂b\ud83d")
    with pytest.raises(TokenizerError, match="lone surrogate"):
        train_tokenizer(tokenizer.kind, ["\udc00"]).encode("\udc00")


def test_other_types_than_text_are_refused(tokenizer):
    with pytest.raises(TokenizerError, match="must be a str, not bytes"):
        tokenizer.encode(b"bytes")
    with pytest.raises(TokenizerError, match="got one str"):
        tokenizer.encode_batch("text")


@pytest.mark.parametrize("kind", ["bpe", "char", "word"])
@pytest.mark.parametrize("texts", [[], ["", ""]])
def test_empty_corpus(kind, texts):
    with pytest.raises(DataError, match="no text") as caught:
        train_tokenizer(kind, texts)
    assert f"{len(texts)} documents" in caught.value.hint


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("bpe", {"vocab_size": 256}, "must be at least 257 .*256 bytes and 1 special token"),
        ("bpe", {"vocab_size": 260, "specials": ["bos", "eos", "pad", "unk"]}, "at least 261"),
        ("char", {"vocab_size": 2}, "at least 3"),
        ("word", {"vocab_size": 0}, "at least 3"),
        ("bpe", {"lower": True}, "lower-case"),
        ("byte", {"split": "whitespace"}, "split: requires a word tokenizer"),
        ("word", {"split": "wrods"}, "did you mean 'words'"),
        ("wrod", {}, "did you mean 'word'"),
        ("char", {"min_freq": 0}, "min_freq: must be at least 1, got 0"),
        ("char", {"specials": ["lang"]}, "role 'lang'"),
        ("char", {"specials": ["<|bos|>"]}, "has a role.*Name the role 'bos'"),
    ],
)
def test_invalid_options(kind, options, message):
    with pytest.raises(TokenizerError) as caught:
        train_tokenizer(kind, ["some text"], **options)
    assert re.search(message, str(caught.value)), str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_encoder_roles_and_custom_special_tokens(kind, tmp_path):
    roles = ("pad", "unk", "cls", "sep", "mask", "<extra_id_0>", "<|im_end|>")
    made = train_tokenizer(kind, ["some text"], vocab_size=300, specials=roles)
    made.save(tmp_path)
    for tokenizer in (made, load_tokenizer(tmp_path)):
        names, specials = tokenizer.special_tokens.names(), tokenizer.special_tokens
        assert (names["[CLS]"], names["[SEP]"], names["[MASK]"]) == (specials.cls, specials.sep, specials.mask)
        ids = tokenizer.encode("some text")
        assert tokenizer.add_special_tokens(ids) == [specials.cls, *ids, specials.sep]
        assert tokenizer.encode("<extra_id_0><|im_end|>", specials=True) == [names["<extra_id_0>"], names["<|im_end|>"]]
        assert tokenizer.fingerprint() == made.fingerprint()


def test_str_as_corpus_is_refused():
    with pytest.raises(TokenizerError, match="got one str"):
        train_tokenizer("char", "text")


def test_missing_file(tmp_path):
    with pytest.raises(TokenizerError, match=rf"no tokenizer.json in {tmp_path}"):
        load_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match=r"no other.json"):
        load_tokenizer(tmp_path / "other.json")


WORD = {"kind": "word", "specials": ["unk"], "split": "words", "lower": False, "tokens": ["a"]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON: line 1"),
        (b'{"kvad": {"kind": "char",\n oops', "not JSON: line 2, column 2"),
        (b'{"model": {"type": "BPE"', "not JSON: line 1"),
        (b"[]", "expected a JSON object, found a list"),
        (b"{}", "not readable by the tokenizers library: Model missing"),
        (b'\xff\xfe{"', "not UTF-8 at byte 0"),
        (b'{"kvad": 3}', "'kvad' must be a dict"),
        (b'{"kvad": {}}', "'kind' is missing"),
        (b'{"kvad": {"kind": "chra"}}', "did you mean 'char'"),
        ({"kind": "byte", "specials": ["what"]}, "role 'what'"),
        ({**WORD, "tokens": "abc"}, "'tokens' must be a list"),
        ({**WORD, "tokens": ["a", "b", "a"]}, "'a' twice"),
        ({**WORD, "tokens": ["a", 3]}, "non-empty strings"),
        ({**WORD, "tokens": ["a", ""]}, "non-empty strings"),
        ({**WORD, "tokens": ["\ud800"]}, "lone surrogate"),
        ({**WORD, "split": "x"}, "unknown split 'x'"),
        ({**WORD, "lower": 1}, "'lower' must be a bool"),
        ({**WORD, "kind": "char", "tokens": ["ab"]}, "single characters"),
    ],
)
def test_malformed_file(tmp_path, content, message):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps({"kvad": content}).encode())
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(tmp_path)
    assert message in str(caught.value) and str(path) in caught.value.message


def test_failed_write_keeps_the_old_file(tokenizer, tmp_path, monkeypatch):
    tokenizer.save(tmp_path)
    before = (tmp_path / "tokenizer.json").read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(SaveError, match=r"tokenizer\.json: No space left"):
        train_tokenizer("char", ["xyz"]).save(tmp_path)
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert (tmp_path / "tokenizer.json").read_bytes() == before
