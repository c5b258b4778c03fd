"""Tokenizers of the ``tokenizers`` library against transformers' fast ones, and the folders that they come in."""

import base64
import functools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from kvad.errors import TokenizerError
from kvad.text import hf_tokenizer, sentencepiece_families
from kvad.text.base import split_text
from kvad.text.hf_tokenizer import HFTokenizer, byte_alphabet
from kvad.text.tokenizer import load_tokenizer
from tests.support import tokenizer_zoo as zoo

LINES = zoo.lines()
KINDS = {"byte_level": "bpe", "unigram": "unigram", "wordpiece": "wordpiece", "byte_fallback": "bpe"}


def backend_of(name):
    return Tokenizer.from_str(zoo.library(name))


@functools.cache
def tokenizer_of(name):
    return HFTokenizer(backend_of(name))


@pytest.fixture(scope="module")
def pretrained():
    """Return a function that loads a folder with a class of transformers."""
    transformers = pytest.importorskip("transformers")
    return lambda name, folder: getattr(transformers, name).from_pretrained(folder)


@pytest.fixture(scope="module")
def fast_tokenizer():
    transformers = pytest.importorskip("transformers")
    return lambda name: transformers.PreTrainedTokenizerFast(tokenizer_object=backend_of(name))


# ---------------------------------------------------------------- against transformers


@pytest.mark.parametrize("name", KINDS)
def test_lines_equal_transformers(name, fast_tokenizer):
    reference, tokenizer = fast_tokenizer(name), tokenizer_of(name)
    rows = tokenizer.encode_batch(LINES, specials=True)
    assert rows == reference(LINES, add_special_tokens=False)["input_ids"]
    assert [tokenizer.add_special_tokens(row) for row in rows] == reference(LINES)["input_ids"]
    for skip in (True, False):
        for row in map(tokenizer.add_special_tokens, rows):
            assert tokenizer.decode(row, skip_specials=skip) == reference.decode(row, skip_special_tokens=skip)
    assert (tokenizer.vocab_size, tokenizer.kind) == (len(reference), KINDS[name])
    assert sum(map(len, rows)) > 15_000


@pytest.mark.parametrize("name", KINDS)
def test_lines_that_spell_no_special_token_are_as_with_specials(name):
    tokenizer = tokenizer_of(name)
    plain = [line for line in LINES if not any(special in line for special in tokenizer.special_tokens.names())]
    assert len(plain) > 900
    assert tokenizer.encode_batch(plain) == tokenizer.encode_batch(plain, specials=True)


@pytest.mark.parametrize("path", sorted(path for path in zoo.GOLDEN.glob("*.json") if path.stem in KINDS))
def test_golden(path, tmp_path, stream):
    content = json.loads(path.read_text(encoding="utf-8"))
    for name, text in content["files"].items():
        (tmp_path / name).write_bytes(base64.b64decode(text))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == content["length"] and len(content["cases"]) > 20
    for case in content["cases"]:
        ids = tokenizer.encode(case["text"], specials=True)
        assert (ids, tokenizer.add_special_tokens(ids)) == (case["ids"], case["framed"])
        assert tokenizer.decode(ids) == case["decoded"] == stream(tokenizer, ids, skip=True)


# ---------------------------------------------------------------- for any text and any ids


@pytest.mark.parametrize("name", KINDS)
@given(text=st.text() | st.lists(st.sampled_from([*zoo.SENTENCES, " ", "\t", "a", "'s", ".", "##"])).map("".join))
def test_any_text(name, text, stream):
    tokenizer, backend = tokenizer_of(name), backend_of(name)
    ids = tokenizer.encode(text, specials=True)
    assert ids == backend.encode(text, add_special_tokens=False).ids
    assert tokenizer.add_special_tokens(ids) == backend.encode(text).ids
    assert tokenizer.decode(ids) == backend.decode(ids) == stream(tokenizer, ids, skip=True)


@pytest.mark.parametrize("name", KINDS)
@given(data=st.data())
def test_any_ids(name, data, stream):
    tokenizer, backend = tokenizer_of(name), backend_of(name)
    # bytes that are no valid text: one U+FFFD per byte there, one per broken sequence here
    broken = range(3 + 0x80, 3 + 256) if name == "byte_fallback" else range(0)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1).filter(lambda i: i not in broken)))
    for skip in (True, False):
        text = tokenizer.decode(ids, skip_specials=skip)
        assert text == stream(tokenizer, ids, skip)
        assert text == backend.decode(ids, skip_special_tokens=skip)


@given(raw=st.binary())
def test_byte_tokens_are_joined(raw, stream):
    tokenizer = tokenizer_of("byte_fallback")
    ids = [3 + byte for byte in raw]
    expected = raw.removeprefix(b" ").decode("utf-8", "replace")
    assert tokenizer.decode(ids) == stream(tokenizer, ids, skip=True) == expected
    assert b"".join(map(tokenizer.token_bytes, ids)) == raw


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_text_round_trips(name):
    tokenizer = tokenizer_of(name)
    for text in zoo.SENTENCES:
        assert tokenizer.decode(tokenizer.encode(text)) == (text if name == "byte_level" else text.replace("▁", " "))


def test_tokens_decode_differently_at_the_start_of_a_text():
    """Every token as if it opened the text, or as if it never did, is another text."""
    for name in ("unigram", "wordpiece", "byte_fallback"):
        tokenizer = tokenizer_of(name)
        ids = tokenizer.encode("import the names")
        whole = tokenizer.decode(ids).encode()
        assert b"".join(tokenizer._token_bytes.first(i) for i in ids) != whole
        assert b"".join(tokenizer._token_bytes.rest(i) for i in ids) != whole


def test_wordpiece_decoding():
    tokenizer = tokenizer_of("wordpiece")
    text = tokenizer.decode(tokenizer.encode("Import THE names, please. Don't!"))
    assert text == "import the names, please. don ' t!"
    ids = tokenizer.encode("unimportantly")
    assert len(ids) > 1 and tokenizer.decode(ids) == "unimportantly"
    assert tokenizer.token_bytes(ids[0])[:1] == b" " and b"##" not in b"".join(map(tokenizer.token_bytes, ids[1:]))


# ---------------------------------------------------------------- special tokens


@pytest.mark.parametrize("name", KINDS)
@given(data=st.data())
def test_text_creates_no_special_token(name, data):
    tokenizer = tokenizer_of(name)
    words = st.sampled_from([*tokenizer.special_tokens.names(), "a", " ", "</", "s>", "▁"])
    text = data.draw(st.lists(words | st.text(max_size=3)).map("".join))
    made = set(tokenizer.encode(text)) & set(tokenizer.special_tokens.names().values())
    assert made <= {tokenizer.special_tokens.unk}


def test_unigram_backend_would_create_special_tokens():
    """Its pieces include the names of special tokens, hence the copy whose special tokens have other names."""
    backend = backend_of("unigram")
    backend.encode_special_tokens = True
    text = "the end</s> of it"
    assert 1 in backend.encode(text, add_special_tokens=False).ids
    tokenizer = tokenizer_of("unigram")
    assert 1 not in tokenizer.encode(text) and tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text, specials=True).count(1) == 1


def test_other_models_create_no_special_token():
    words = Tokenizer(models.WordLevel({"<s>": 0, "a": 1, "<unk>": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    merging = Tokenizer(models.BPE({"<": 0, "s": 1, ">": 2, "<s": 3, "<s>": 4}, [("<", "s"), ("<s", ">")]))
    for backend, expected in ((words, [1, 2, 1]), (merging, [3, 2])):
        backend.add_special_tokens(["<s>"])
        text = "a <s> a" if backend is words else "<s>"
        tokenizer = HFTokenizer(backend)
        assert tokenizer.encode(text) == expected
        assert tokenizer.special_tokens.names()["<s>"] in tokenizer.encode(text, specials=True)


def test_added_tokens_absorb_spaces(fast_tokenizer):
    texts = ["import imported reimport", "a <mask> b<mask>c", "<think>   deep </think>", "import", "x import\ty"]
    expected = fast_tokenizer("byte_level")(texts, add_special_tokens=False)["input_ids"]
    assert tokenizer_of("byte_level").encode_batch(texts, specials=True) == expected
    tokenizer = tokenizer_of("wordpiece")
    nasa, gmbh = tokenizer.vocab_size - 2, tokenizer.vocab_size - 1
    assert tokenizer.encode("NASA nasa GmbH gmbh")[:2] == [nasa, nasa]  # normalized: found in the lower-cased text
    assert tokenizer.encode("NASA nasa GmbH gmbh").count(gmbh) == 1
    assert tokenizer.decode([nasa, gmbh]) == "NASA GmbH"


def test_role_keeps_the_flags_of_its_token():
    backend = backend_of("byte_level")
    tokenizer = HFTokenizer(backend, {"mask": "<mask>", "cls": "<s>", "sep": "</s>"})
    ids = tokenizer_of("byte_level").encode("a <mask> b", specials=True)
    assert tokenizer.encode("a <mask> b", specials=True) == ids
    specials = tokenizer.special_tokens
    assert (specials.cls, specials.sep, specials.mask) == (0, 2, tokenizer.vocab_size - 3)


def test_roles_by_name():
    specials = tokenizer_of("wordpiece").special_tokens
    assert (specials.pad, specials.unk, specials.cls, specials.sep, specials.mask) == (0, 1, 2, 3, 4)
    assert specials.bos is specials.eos is specials.separator is None
    assert tokenizer_of("unigram").special_tokens.eos == 1
    assert tokenizer_of("byte_fallback").special_tokens.separator == 1  # BOS, if there is no separator


@pytest.mark.parametrize("name", KINDS)
def test_save_and_load(name, tmp_path):
    tokenizer = HFTokenizer(backend_of(name))
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    for attribute in ("kind", "special_tokens", "vocab_size"):
        assert getattr(again, attribute) == getattr(tokenizer, attribute)
    assert again.fingerprint() == tokenizer.fingerprint()
    assert again.encode_batch(zoo.SENTENCES) == tokenizer.encode_batch(zoo.SENTENCES)
    assert again.add_special_tokens([7]) == tokenizer.add_special_tokens([7])


# ---------------------------------------------------------------- special tokens around a text


def with_post_processor(processor, **config):
    """A folder of a tokenizer with this post-processor."""

    def load(folder):
        backend = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "de_DE": 3, "en_XX": 4}, unk_token="a"))
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), decoders.Fuse()
        backend.add_special_tokens(["<s>", "</s>", "de_DE", "en_XX"])
        if processor is not None:
            backend.post_processor = processor
        return load_tokenizer(folder_of(folder, backend, tokenizer_config=config))

    return load


def template(single):
    names = (("<s>", 0), ("</s>", 1), ("de_DE", 3), ("en_XX", 4))
    return processors.TemplateProcessing(single=single, special_tokens=[pair for pair in names if pair[0] in single])


def with_template(single, **config):
    return with_post_processor(template(single), **config)


BOS_EOS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (with_post_processor(None), [2]),
        (with_post_processor(processors.ByteLevel()), [2]),
        (with_template("$A"), [2]),
        (with_template("<s> <s> $A </s>"), [0, 0, 2, 1]),
        (with_post_processor(processors.BertProcessing(("</s>", 1), ("<s>", 0))), [0, 2, 1]),
        (with_post_processor(processors.Sequence([template("$A </s>"), template("<s> $A")])), [0, 2, 1]),
        (with_template("<s> $A", **BOS_EOS, add_bos_token=False, add_eos_token=True), [2, 1]),
        (with_template("$A </s>", **BOS_EOS, add_bos_token=True), [0, 2, 1]),
        (with_template("<s> $A", **BOS_EOS, add_bos_token=True), [0, 2]),
        (with_template("<s> $A", add_bos_token=None), [0, 2]),
        (with_template("$A", **BOS_EOS, tokenizer_class="LlamaTokenizerFast"), [0, 2]),
        (with_template("$A", bos_token=None, tokenizer_class="LlamaTokenizerFast"), [2]),
        (with_template("$A </s>", **BOS_EOS, tokenizer_class="MBartTokenizer"), [2, 1, 4]),
        (with_template("$A </s>", **BOS_EOS, tokenizer_class="MBart50Tokenizer", src_lang="de_DE"), [3, 2, 1]),
        (with_template("$A </s>", **BOS_EOS, tokenizer_class="NllbTokenizer"), [2, 1]),
        (with_template("de_DE $A </s>"), [3, 2, 1]),
    ],
)
def test_post_processors_add_special_tokens(load, expected, tmp_path):
    tokenizer = load(tmp_path)
    assert tokenizer.add_special_tokens([2]) == expected
    assert tokenizer.add_special_tokens([]) == [i for i in expected if i != 2]
    (tmp_path / "again").mkdir()
    tokenizer.save(tmp_path / "again")
    assert load_tokenizer(tmp_path / "again").add_special_tokens([2]) == expected


def test_language_of_a_post_processor(tmp_path):
    first = with_template("de_DE $A </s>")(tmp_path)
    assert dict(first.languages) == {"de_DE": 3, "en_XX": 4}
    assert first.add_special_tokens([2], language="en_XX") == [4, 2, 1]
    with pytest.raises(TokenizerError, match=r"unknown language 'en_YY' \(did you mean 'en_XX'"):
        first.add_special_tokens([2], language="en_YY")
    with pytest.raises(TokenizerError, match="has no language tokens"):
        tokenizer_of("wordpiece").add_special_tokens([2], language="de")
    with pytest.raises(TokenizerError, match="has no language tokens"):
        with_template("$A")(tmp_path).add_special_tokens([], language="x")
    with pytest.raises(TokenizerError, match=r"tokenizer_config.json: unknown src_lang 'en'"):
        with_template("$A", **BOS_EOS, tokenizer_class="MBartTokenizer", src_lang="en")(tmp_path)


def test_post_processor_with_two_texts_is_refused(tmp_path):
    with pytest.raises(TokenizerError, match=r"tokenizer.json: .* contains the text 2 times"):
        with_template("$A <s> $A")(tmp_path)


CODES = {
    "MBart": sentencepiece_families._MBART,
    "MBart50": sentencepiece_families._MBART + sentencepiece_families._MBART50,
    "Nllb": sentencepiece_families._NLLB,
}
LANGUAGES = {"MBart": ["en_XX", "de_DE", "ro_RO"], "MBart50": ["en_XX", "pl_PL"], "Nllb": ["eng_Latn", "deu_Latn"]}


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("family", LANGUAGES)
def test_languages_against_transformers(family, legacy, tmp_path, pretrained):
    backend = backend_of("unigram")
    config = {"tokenizer_class": f"{family}Tokenizer", "eos_token": "</s>", "src_lang": LANGUAGES[family][1]}
    if family == "Nllb":
        config["legacy_behaviour"] = legacy
        config["additional_special_tokens"] = LANGUAGES[family]
    backend.add_special_tokens(["<s>", *CODES[family]])
    folder_of(tmp_path, backend, tokenizer_config=config)
    tokenizer, reference = load_tokenizer(tmp_path), pretrained(f"{family}TokenizerFast", tmp_path)
    for text in ("names of the", ""):
        ids = tokenizer.encode(text, specials=True)
        assert tokenizer.add_special_tokens(ids) == reference.encode(text)
        for code in LANGUAGES[family]:
            reference.src_lang = code
            assert tokenizer.add_special_tokens(ids, language=code) == reference.encode(text)
            assert tokenizer.languages[code] == reference.convert_tokens_to_ids(code)
        reference.src_lang = config["src_lang"]


@pytest.mark.parametrize("ends", [{}, {"add_bos_token": False}, {"add_eos_token": True}])
@pytest.mark.parametrize("family", ["Llama", "Gemma"])
def test_ends_against_transformers(family, ends, tmp_path, pretrained):
    config = {"tokenizer_class": f"{family}Tokenizer", **BOS_EOS, "pad_token": "<unk>", **ends}
    folder_of(tmp_path, backend_of("byte_fallback"), tokenizer_config=config)
    tokenizer, reference = load_tokenizer(tmp_path), pretrained(f"{family}TokenizerFast", tmp_path)
    for text in zoo.SENTENCES:
        assert tokenizer.add_special_tokens(tokenizer.encode(text, specials=True)) == reference.encode(text)


# ---------------------------------------------------------------- other files of a folder


def folder_of(folder, backend, **files):
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_added_tokens_of_the_config(tmp_path, pretrained):
    """Tokens that tokenizer_config.json has beyond tokenizer.json, or describes otherwise, are as it says."""
    backend = backend_of("byte_level")
    size = backend.get_vocab_size()
    flags = {"lstrip": False, "rstrip": True, "single_word": False, "normalized": False, "special": True}
    added = {size - 3: {"content": "<mask>", **flags}, size: {"content": "<|im_start|>", **flags}}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {str(i): token for i, token in added.items()},
        "additional_special_tokens": ["<think>"],
        "mask_token": "<mask>",
    }
    folder_of(tmp_path, backend, tokenizer_config=config)
    tokenizer, reference = load_tokenizer(tmp_path), pretrained("AutoTokenizer", tmp_path)
    texts = ["a <mask>  b", "<|im_start|>  user\n<think>  x"]
    assert tokenizer.encode_batch(texts, specials=True) == reference(texts, add_special_tokens=False)["input_ids"]
    assert tokenizer.vocab_size == size + 1 == len(reference)
    assert tokenizer.special_tokens.mask == size - 3 and tokenizer.special_tokens.names()["<|im_start|>"] == size


def test_roles_of_the_special_tokens_map(tmp_path):
    names = {"cls_token": "<s>", "sep_token": {"content": "</s>"}, "mask_token": "<mask>", "bos_token": "<gone>"}
    folder_of(tmp_path, backend_of("byte_level"), special_tokens_map=names)
    specials = load_tokenizer(tmp_path).special_tokens
    assert (specials.cls, specials.sep, specials.bos) == (0, 2, None)
    assert specials.mask == specials.names()["<mask>"]
    (tmp_path / "special_tokens_map.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"special_tokens_map.json: not JSON"):
        load_tokenizer(tmp_path)


def test_the_roles_of_a_class(tmp_path):
    folder_of(tmp_path, backend_of("byte_level"), config={"model_type": "roberta"})
    specials = load_tokenizer(tmp_path).special_tokens
    assert (specials.cls, specials.sep) == (0, 2)


@pytest.mark.parametrize("config", [b"[]", b"null", b"{oops", b'{"model_type": 3}'])
def test_invalid_model_config_is_ignored(config, tmp_path):
    folder_of(tmp_path, backend_of("unigram"))
    (tmp_path / "config.json").write_bytes(config)
    assert load_tokenizer(tmp_path).kind == "unigram"


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": [1]},
        {"added_tokens_decoder": {"x": {"content": "a"}, "5": 3, "6": {"content": 1}}},
        {"additional_special_tokens": "abc", "eos_token": 5, "bos_token": [], "tokenizer_class": 3},
        {"add_bos_token": "yes", "src_lang": 3},
    ],
)
def test_invalid_values_are_ignored(config, tmp_path):
    folder_of(tmp_path, backend_of("unigram"), tokenizer_config=config)
    tokenizers = load_tokenizer(tmp_path), tokenizer_of("unigram")
    rows = [tokenizer.add_special_tokens(tokenizer.encode("the names")) for tokenizer in tokenizers]
    assert rows[0] == rows[1]


# ---------------------------------------------------------------- older folders


def gpt2_folder(folder, **config):
    content = json.loads(zoo.library("byte_level"))["model"]
    vocab = {**content["vocab"], "<|endoftext|>": len(content["vocab"])}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    merges = "".join(f"{' '.join(pair)}\n" for pair in content["merges"])
    (folder / "merges.txt").write_text("#version: 0.2\n" + merges, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("GPT2", {}),
        ("GPT2", {"add_prefix_space": True}),
        ("GPT2", {"add_bos_token": True, "bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>"}),
        ("Roberta", {"mask_token": "Ġimport"}),
        ("Bart", {}),
        ("Qwen2", {}),
    ],
)
def test_vocab_and_merges_against_transformers(family, config, tmp_path, pretrained):
    gpt2_folder(tmp_path, tokenizer_class=f"{family}Tokenizer", **config)
    reference = pretrained(f"{family}TokenizerFast", tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    texts = [text for text in LINES[:300] if "<mask>" not in text]
    rows = tokenizer.encode_batch(texts, specials=True)
    if family == "GPT2" and config.get("add_bos_token"):  # transformers adds it in the slow tokenizer only
        expected = pretrained("GPT2Tokenizer", tmp_path)
        assert [tokenizer.add_special_tokens(row) for row in rows[:40]] == [
            expected.encode(text) for text in texts[:40]
        ]
    else:
        assert [tokenizer.add_special_tokens(row) for row in rows] == reference(texts)["input_ids"]
    assert [tokenizer.decode(row) for row in rows] == [reference.decode(row, skip_special_tokens=True) for row in rows]
    assert tokenizer.kind == "bpe"


def test_the_roles_of_gpt2(tmp_path):
    specials = load_tokenizer(gpt2_folder(tmp_path)).special_tokens
    end = specials.names()["<|endoftext|>"]
    assert (specials.separator, specials.bos, specials.eos) == (end, end, end)


def bert_folder(folder, **config):
    vocab = json.loads(zoo.library("wordpiece"))["model"]["vocab"]
    (folder / "vocab.txt").write_text("".join(f"{name}\n" for name in sorted(vocab, key=vocab.get)), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"do_lower_case": False},
        {"do_lower_case": True, "strip_accents": False},
        {"tokenize_chinese_chars": False, "tokenizer_class": "BertTokenizer"},
    ],
)
def test_vocab_txt_against_transformers(config, tmp_path, pretrained):
    reference = pretrained("BertTokenizerFast", bert_folder(tmp_path, **config))
    tokenizer = load_tokenizer(tmp_path)
    rows = tokenizer.encode_batch(LINES[:300], specials=True)
    assert [tokenizer.add_special_tokens(row) for row in rows] == reference(LINES[:300])["input_ids"]
    for row in rows:  # BertTokenizer's clean-up of a whole text is not applied (hf_tokenizer.py)
        assert tokenizer.decode(row) == reference.decode(row, True, clean_up_tokenization_spaces=False)
    assert (tokenizer.kind, tokenizer.special_tokens.mask) == ("wordpiece", 4)


def test_precedence_of_files(tmp_path):
    bert_folder(gpt2_folder(tmp_path))
    assert load_tokenizer(tmp_path).kind == "bpe"
    backend_of("unigram").save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).kind == "unigram"
    for name in ("tokenizer.json", "vocab.json", "merges.txt"):
        (tmp_path / name).unlink()
    assert load_tokenizer(tmp_path).kind == "wordpiece"


# ---------------------------------------------------------------- backends of other programs


def word_level():
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<unk>"])
    return backend


def gpt2_like():
    backend = Tokenizer(models.BPE({char: index for index, char in enumerate(sorted(byte_alphabet()))}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>"])
    backend.add_tokens(["<think>", "é x", "éé"])
    return backend


def test_word_level_decoding(stream):
    tokenizer, backend = HFTokenizer(word_level()), word_level()
    for ids in ([], [1], [1, 0, 2], [0, 0]):
        for skip in (True, False):
            text = backend.decode(ids, skip_special_tokens=skip)
            assert tokenizer.decode(ids, skip_specials=skip) == stream(tokenizer, ids, skip) == text


def test_long_text_is_split_only_where_ids_are_equal(monkeypatch):
    prefixed, spaced = gpt2_like(), gpt2_like()
    prefixed.normalizer = normalizers.Prepend("_")
    spaced.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    monkeypatch.setattr(hf_tokenizer, "split_text", lambda text: split_text(text, 1))
    text = "a\nb\nc"
    for backend in (backend_of("byte_fallback"), prefixed, spaced):
        expected = backend.encode(text, add_special_tokens=False).ids
        assert HFTokenizer(backend).encode(text) == expected


def test_unknown_text_of_a_library_tokenizer_is_named(capsys):
    tokenizer = HFTokenizer(backend_of("unigram"))
    unk = tokenizer.special_tokens.unk
    assert unk in tokenizer.encode_batch(["a ꙮꙮ b", "a"])[0]
    assert capsys.readouterr().err == "kvad: 1 piece of text not in the vocabulary became UNK: 'ꙮꙮ'\n"
    tokenizer.on_unknown = "error"
    with pytest.raises(TokenizerError, match="'ꙮꙮ'"):
        tokenizer.encode("a ꙮꙮ b")
    assert unk in tokenizer.encode("a <unk> b", specials=True)  # explicit, so not unknown
    assert tokenizer_of("byte_fallback").encode("ꙮ") and capsys.readouterr().err == ""  # spelled in bytes


def test_bytes_without_a_token_are_reported():
    vocab = {char: index for index, char in enumerate("abc")}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    assert HFTokenizer(backend).encode("cab") == [2, 0, 1]
    with pytest.raises(TokenizerError, match="no UNK: 'x' x2, '한'"):
        HFTokenizer(backend).encode("axbx한")


SEQUENCE = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])


@pytest.mark.parametrize("decoder", [decoders.BPEDecoder(), decoders.CTC(), SEQUENCE, decoders.Strip(" ", 0, 1)])
def test_decoder_with_lookahead_is_refused(decoder, tmp_path):
    backend = word_level()
    backend.decoder = decoder
    with pytest.raises(TokenizerError, match=r"tokenizer.json: the decoder .* token by token"):
        load_tokenizer(folder_of(tmp_path, backend))


def test_truncation_and_padding_of_a_file_are_ignored(tmp_path):
    backend = backend_of("byte_fallback")
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    tokenizer = load_tokenizer(folder_of(tmp_path, backend))
    assert tokenizer.encode("a b c d") == backend_of("byte_fallback").encode("a b c d", add_special_tokens=False).ids


def test_roles_of_a_hugging_face_folder(tmp_path):
    config = {"bos_token": None, "eos_token": {"content": "<|im_start|>"}, "pad_token": "<pad>", "add_bos_token": False}
    by_file = load_tokenizer(folder_of(tmp_path, gpt2_like(), tokenizer_config=config)).special_tokens
    assert (by_file.separator, by_file.bos, by_file.eos, by_file.pad) == (256, None, 257, None)
    by_hand = HFTokenizer(gpt2_like(), {"bos": "<|endoftext|>", "eos": "<think>"})
    assert (by_hand.special_tokens.bos, by_hand.special_tokens.eos) == (256, 258)
    assert 258 not in by_hand.encode("<think>")  # special by its role, so text does not make it
    with pytest.raises(TokenizerError, match="the eos token '</s>' is not among"):
        HFTokenizer(gpt2_like(), {"eos": "</s>"})
    by_hand.save(tmp_path / "again")
    again = load_tokenizer(tmp_path / "again")
    assert (again.special_tokens, again.fingerprint()) == (by_hand.special_tokens, by_hand.fingerprint())
    (tmp_path / "tokenizer_config.json").write_text("{oops")
    with pytest.raises(TokenizerError, match=r"tokenizer_config.json: not JSON"):
        load_tokenizer(tmp_path)


def test_added_tokens_decode_to_their_content():
    tokenizer = HFTokenizer(gpt2_like())
    assert tokenizer.encode("<think>é x<|endoftext|>", specials=True) == [258, 259, 256]
    assert tokenizer.encode("<think>é x") == [258, 259]  # ordinary vocabulary: not special, so text may be it
    assert tokenizer.decode([258, 259, 260, 256]) == "<think>é xéé"  # although é is in the alphabet, for the byte 0xE9
    assert tokenizer.token_bytes(259) == "é x".encode()
    assert tokenizer.special_tokens.names() == {"<|endoftext|>": 256, "<|im_start|>": 257}


def test_unused_id_decodes_to_nothing():
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 5}, unk_token="a"))
    tokenizer = HFTokenizer(backend)
    assert tokenizer.vocab_size == 6
    assert tokenizer.decode([0, 3]) == "a" and tokenizer.token_text(3) == ""


# ---------------------------------------------------------------- bad input


def test_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(TokenizerError, match=rf"no tokenizer.json in {tmp_path}, nor .* \(The folder is empty\.\)"):
        load_tokenizer(tmp_path)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(TokenizerError, match=r"The folder contains config.json, model.safetensors"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("vocab.json", b"{", "vocab.json: not JSON: line 1"),
        ("vocab.json", b"[1]", "vocab.json: expected a JSON object"),
        ("vocab.json", b"{}", "vocab.json: must be an object of pieces and their ids"),
        ("vocab.json", b'{"a": "b"}', "vocab.json: must be an object of pieces and their ids"),
        ("vocab.json", b'{"a": 1}', "vocab.json and merges.txt do not belong together"),
        ("vocab.json", b"\xff", "vocab.json: not UTF-8 at byte 0"),
        ("merges.txt", None, "there is no merges.txt in "),
        ("merges.txt", b"a b\na b c\n", "merges.txt: line 2 is not a merge of two pieces: 'a b c'"),
        ("merges.txt", b"a b</w>\n", "BPE over words"),
    ],
)
def test_broken_gpt2_folders(name, content, message, tmp_path):
    gpt2_folder(tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(tmp_path)
    assert message in str(caught.value) and str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"hello\nworld\n", b"[UNK]\n[CLS]\n"])
def test_vocab_txt_without_special_tokens_is_refused(content, tmp_path):
    (tmp_path / "vocab.txt").write_bytes(content)
    with pytest.raises(TokenizerError, match=r"vocab.txt: there is no (unk|sep) token"):
        load_tokenizer(tmp_path)


def test_added_token_without_the_special_flag_is_ordinary():
    backend = backend_of("byte_level")
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    tokenizer = HFTokenizer(backend)
    assert tokenizer.encode("x<tool>y").count(tokenizer.vocab_size - 1) == 1
    assert tokenizer.token_bytes(tokenizer.vocab_size - 1) == b"<tool>"
