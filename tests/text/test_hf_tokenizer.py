"""Tokenizers of the ``tokenizers`` library against transformers' fast ones, and the folders that they come in."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from kvad.errors import TokenizerError
from kvad.text import sentencepiece_families
from kvad.text.detokenizer import Detokenizer
from kvad.text.hf_tokenizer import HFTokenizer
from kvad.text.tokenizer import load_tokenizer
from tests.support import tokenizer_zoo as zoo

KINDS = {"byte_level": "bpe", "unigram": "unigram", "wordpiece": "wordpiece", "byte_fallback": "bpe"}


def ours(name: str) -> HFTokenizer:
    return HFTokenizer(Tokenizer.from_str(zoo.library(name)))


@pytest.fixture(scope="module")
def fast() -> Callable[[str], Any]:
    transformers = pytest.importorskip("transformers")
    return lambda name: transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(zoo.library(name)))


def stream(tokenizer: Any, ids: list[int], skip: bool) -> str:
    detokenizer = Detokenizer(tokenizer, skip_specials=skip)
    return "".join([*map(detokenizer.push, ids), detokenizer.flush()])


# ---------------------------------------------------------------- against transformers


@pytest.mark.parametrize("name", KINDS)
def test_a_thousand_lines(name: str, fast: Callable[[str], Any]) -> None:
    theirs, mine = fast(name), ours(name)
    rows = mine.encode_batch(zoo.lines(), specials=True)
    assert rows == theirs(zoo.lines(), add_special_tokens=False)["input_ids"]
    assert [mine.add_special_tokens(row) for row in rows] == theirs(zoo.lines())["input_ids"]
    for skip in (True, False):
        for row in map(mine.add_special_tokens, rows):
            assert mine.decode(row, skip_specials=skip) == theirs.decode(row, skip_special_tokens=skip)
    assert (mine.vocab_size, mine.kind) == (len(theirs), KINDS[name])
    assert sum(map(len, rows)) > 15_000


@pytest.mark.parametrize("name", KINDS)
def test_lines_that_spell_no_special_token_are_as_with_specials(name: str) -> None:
    mine = ours(name)
    plain = [line for line in zoo.lines() if not any(special in line for special in mine.special_tokens.names())]
    assert len(plain) > 900
    assert mine.encode_batch(plain) == mine.encode_batch(plain, specials=True)


@pytest.mark.parametrize("path", sorted(path for path in zoo.GOLDEN.glob("*.json") if path.stem in KINDS))
def test_golden(path: Path, tmp_path: Path) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    for name, text in content["files"].items():
        (tmp_path / name).write_bytes(base64.b64decode(text))
    mine = load_tokenizer(tmp_path)
    assert mine.vocab_size == content["length"] and len(content["cases"]) > 20
    for case in content["cases"]:
        ids = mine.encode(case["text"], specials=True)
        assert (ids, mine.add_special_tokens(ids)) == (case["ids"], case["framed"])
        assert mine.decode(ids) == case["decoded"] == stream(mine, ids, skip=True)


# ---------------------------------------------------------------- for any text and any ids


@pytest.mark.parametrize("name", KINDS)
@given(text=st.text() | st.lists(st.sampled_from([*zoo.SENTENCES, " ", "\t", "a", "'s", ".", "##"])).map("".join))
def test_any_text(name: str, text: str) -> None:
    mine, backend = ours(name), Tokenizer.from_str(zoo.library(name))
    ids = mine.encode(text, specials=True)
    assert ids == backend.encode(text, add_special_tokens=False).ids
    assert mine.add_special_tokens(ids) == backend.encode(text).ids
    assert mine.decode(ids) == backend.decode(ids) == stream(mine, ids, skip=True)


@pytest.mark.parametrize("name", KINDS)
@given(data=st.data())
def test_any_ids(name: str, data: st.DataObject) -> None:
    mine, backend = ours(name), Tokenizer.from_str(zoo.library(name))
    # bytes that are no valid text: one U+FFFD per byte there, one per broken sequence here
    broken = range(3 + 0x80, 3 + 256) if name == "byte_fallback" else range(0)
    ids = data.draw(st.lists(st.integers(0, mine.vocab_size - 1).filter(lambda i: i not in broken)))
    for skip in (True, False):
        text = mine.decode(ids, skip_specials=skip)
        assert text == stream(mine, ids, skip)
        assert text == backend.decode(ids, skip_special_tokens=skip)


@given(st.binary())
def test_byte_tokens_are_joined(raw: bytes) -> None:
    mine = ours("byte_fallback")
    ids = [3 + byte for byte in raw]
    expected = raw.removeprefix(b" ").decode("utf-8", "replace")
    assert mine.decode(ids) == stream(mine, ids, skip=True) == expected
    assert b"".join(map(mine.token_bytes, ids)) == raw


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_text_round_trips(name: str) -> None:
    mine = ours(name)
    for text in zoo.SENTENCES:
        assert mine.decode(mine.encode(text)) == (text if name == "byte_level" else text.replace("▁", " "))


def test_naive_streams_are_detected() -> None:
    """Every token as if it opened the text, or as if it never did, is another text."""
    for name in ("unigram", "wordpiece", "byte_fallback"):
        mine = ours(name)
        ids = mine.encode("import the names")
        whole = mine.decode(ids).encode()
        assert b"".join(mine._token_bytes.first[i] for i in ids) != whole
        assert b"".join(mine._token_bytes.rest[i] for i in ids) != whole


def test_wordpiece_decodes_as_people_write() -> None:
    mine = ours("wordpiece")
    assert mine.decode(mine.encode("Import THE names, please. Don't!")) == "import the names, please. don ' t!"
    ids = mine.encode("unimportantly")
    assert len(ids) > 1 and mine.decode(ids) == "unimportantly"
    assert mine.token_bytes(ids[0])[:1] == b" " and b"##" not in b"".join(map(mine.token_bytes, ids[1:]))


# ---------------------------------------------------------------- special tokens


@pytest.mark.parametrize("name", KINDS)
@given(data=st.data())
def test_text_creates_no_special_token(name: str, data: st.DataObject) -> None:
    mine = ours(name)
    words = st.sampled_from([*mine.special_tokens.names(), "a", " ", "</", "s>", "▁"])
    text = data.draw(st.lists(words | st.text(max_size=3)).map("".join))
    made = set(mine.encode(text)) & set(mine.special_tokens.names().values())
    assert made <= {mine.special_tokens.unk}


def test_a_unigram_model_would_make_them() -> None:
    """Why there is a blind twin: the model's own pieces are the names of special tokens."""
    backend = Tokenizer.from_str(zoo.library("unigram"))
    backend.encode_special_tokens = True
    text = "the end</s> of it"
    assert 1 in backend.encode(text, add_special_tokens=False).ids
    mine = ours("unigram")
    assert 1 not in mine.encode(text) and mine.decode(mine.encode(text)) == text
    assert mine.encode(text, specials=True).count(1) == 1


def test_other_models_create_no_special_token() -> None:
    words = Tokenizer(models.WordLevel({"<s>": 0, "a": 1, "<unk>": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    merging = Tokenizer(models.BPE({"<": 0, "s": 1, ">": 2, "<s": 3, "<s>": 4}, [("<", "s"), ("<s", ">")]))
    for backend, expected in ((words, [1, 2, 1]), (merging, [3, 2])):
        backend.add_special_tokens(["<s>"])
        text = "a <s> a" if backend is words else "<s>"
        mine = HFTokenizer(backend)
        assert mine.encode(text) == expected
        assert mine.special_tokens.names()["<s>"] in mine.encode(text, specials=True)


def test_added_tokens_absorb_spaces(fast: Callable[[str], Any]) -> None:
    texts = [
        "import imported reimport",
        "a <mask> b<mask>c",
        "<think>   deep </think>",
        "import",
        "x import\ty",
        "<mask><think> import",
    ]
    assert (
        ours("byte_level").encode_batch(texts, specials=True)
        == fast("byte_level")(texts, add_special_tokens=False)["input_ids"]
    )
    mine = ours("wordpiece")
    nasa, gmbh = mine.vocab_size - 2, mine.vocab_size - 1
    assert mine.encode("NASA nasa GmbH gmbh")[:2] == [nasa, nasa]  # normalized: found in the lower-cased text
    assert mine.encode("NASA nasa GmbH gmbh").count(gmbh) == 1
    assert mine.decode([nasa, gmbh]) == "NASA GmbH"


def test_a_role_retains_the_flags_of_its_token() -> None:
    backend = Tokenizer.from_str(zoo.library("byte_level"))
    mine = HFTokenizer(backend, {"mask": "<mask>", "cls": "<s>", "sep": "</s>"})
    assert mine.encode("a <mask> b", specials=True) == ours("byte_level").encode("a <mask> b", specials=True)
    assert (mine.special_tokens.cls, mine.special_tokens.sep, mine.special_tokens.mask) == (0, 2, mine.vocab_size - 3)


def test_roles_by_name() -> None:
    specials = ours("wordpiece").special_tokens
    assert (specials.pad, specials.unk, specials.cls, specials.sep, specials.mask) == (0, 1, 2, 3, 4)
    assert specials.bos is specials.eos is specials.separator is None
    assert ours("unigram").special_tokens.eos == 1


@pytest.mark.parametrize("name", KINDS)
def test_save_and_load(name: str, tmp_path: Path) -> None:
    mine = HFTokenizer(Tokenizer.from_str(zoo.library(name)))
    mine.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert (again.kind, again.special_tokens, again.vocab_size) == (mine.kind, mine.special_tokens, mine.vocab_size)
    assert again.fingerprint() == mine.fingerprint()
    assert again.encode_batch(zoo.SENTENCES) == mine.encode_batch(zoo.SENTENCES)
    assert again.add_special_tokens([7]) == mine.add_special_tokens([7])


# ---------------------------------------------------------------- frames


def framed(processor: Any, **config: Any) -> Callable[[Path], Any]:
    """A folder of a tokenizer with this post-processor."""

    def load(folder: Path) -> Any:
        backend = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "de_DE": 3, "en_XX": 4}, unk_token="a"))
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), decoders.Fuse()
        backend.add_special_tokens(["<s>", "</s>", "de_DE", "en_XX"])
        if processor is not None:
            backend.post_processor = processor
        backend.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return load_tokenizer(folder)

    return load


def template(single: str) -> Any:
    names = (("<s>", 0), ("</s>", 1), ("de_DE", 3), ("en_XX", 4))
    used = [(name, i) for name, i in names if name in single]
    return processors.TemplateProcessing(single=single, special_tokens=used)


BOS_EOS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (framed(None), [2]),
        (framed(processors.ByteLevel()), [2]),
        (framed(template("$A")), [2]),
        (framed(template("<s> <s> $A </s>")), [0, 0, 2, 1]),
        (framed(processors.BertProcessing(("</s>", 1), ("<s>", 0))), [0, 2, 1]),
        (framed(processors.Sequence([template("$A </s>"), template("<s> $A")])), [0, 2, 1]),
        (framed(template("<s> $A"), **BOS_EOS, add_bos_token=False, add_eos_token=True), [2, 1]),
        (framed(template("$A </s>"), **BOS_EOS, add_bos_token=True), [0, 2, 1]),
        (framed(template("<s> $A"), **BOS_EOS, add_bos_token=True), [0, 2]),
        (framed(template("<s> $A"), add_bos_token=None), [0, 2]),
        (framed(template("$A"), **BOS_EOS, tokenizer_class="LlamaTokenizerFast"), [0, 2]),
        (framed(template("$A"), bos_token=None, tokenizer_class="LlamaTokenizerFast"), [2]),
        (framed(template("$A </s>"), **BOS_EOS, tokenizer_class="MBartTokenizer"), [2, 1, 4]),
        (framed(template("$A </s>"), **BOS_EOS, tokenizer_class="MBart50Tokenizer", src_lang="de_DE"), [3, 2, 1]),
        (framed(template("$A </s>"), **BOS_EOS, tokenizer_class="NllbTokenizer"), [2, 1]),  # no eng_Latn: as it is
        (framed(template("de_DE $A </s>")), [3, 2, 1]),
    ],
)
def test_frames(load: Callable[[Path], Any], expected: list[int], tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    assert tokenizer.add_special_tokens([2]) == expected
    assert tokenizer.add_special_tokens([]) == [i for i in expected if i != 2]
    (tmp_path / "again").mkdir()
    tokenizer.save(tmp_path / "again")
    assert load_tokenizer(tmp_path / "again").add_special_tokens([2]) == expected


def test_the_language_of_a_frame(tmp_path: Path) -> None:
    first = framed(template("de_DE $A </s>"))(tmp_path)
    assert dict(first.languages) == {"de_DE": 3, "en_XX": 4}
    assert first.add_special_tokens([2], language="en_XX") == [4, 2, 1]
    with pytest.raises(TokenizerError, match=r"unknown language 'en_YY' \(did you mean 'en_XX'"):
        first.add_special_tokens([2], language="en_YY")
    with pytest.raises(TokenizerError, match="has no language tokens"):
        ours("wordpiece").add_special_tokens([2], language="de")
    with pytest.raises(TokenizerError, match="has no language tokens"):
        framed(template("$A"))(tmp_path).add_special_tokens([], language="x")
    with pytest.raises(TokenizerError, match=r"tokenizer_config.json: unknown src_lang 'en'"):
        framed(template("$A"), **BOS_EOS, tokenizer_class="MBartTokenizer", src_lang="en")(tmp_path)


def test_a_template_without_the_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer.json: .* contains the text 2 times"):
        framed(template("$A <s> $A"))(tmp_path)


CODES = {
    "MBart": sentencepiece_families._MBART,
    "MBart50": sentencepiece_families._MBART + sentencepiece_families._MBART50,
    "Nllb": sentencepiece_families._NLLB,
}
LANGUAGES = {"MBart": ["en_XX", "de_DE", "ro_RO"], "MBart50": ["en_XX", "pl_PL"], "Nllb": ["eng_Latn", "deu_Latn"]}


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("family", LANGUAGES)
def test_languages_against_transformers(family: str, legacy: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    backend = Tokenizer.from_str(zoo.library("unigram"))
    config: dict[str, Any] = {
        "tokenizer_class": f"{family}Tokenizer",
        "eos_token": "</s>",
        "src_lang": LANGUAGES[family][1],
    }
    if family == "Nllb":
        config["legacy_behaviour"] = legacy
        config["additional_special_tokens"] = LANGUAGES[family]
    backend.add_special_tokens(["<s>", *CODES[family]])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    mine, theirs = load_tokenizer(tmp_path), getattr(transformers, f"{family}TokenizerFast").from_pretrained(tmp_path)
    for text in ("names of the", ""):
        ids = mine.encode(text, specials=True)
        assert mine.add_special_tokens(ids) == theirs.encode(text)
        for code in LANGUAGES[family]:
            theirs.src_lang = code
            assert mine.add_special_tokens(ids, language=code) == theirs.encode(text)
            assert mine.languages[code] == theirs.convert_tokens_to_ids(code)
        theirs.src_lang = config["src_lang"]


@pytest.mark.parametrize("ends", [{}, {"add_bos_token": False}, {"add_eos_token": True}])
@pytest.mark.parametrize("family", ["Llama", "Gemma"])
def test_ends_against_transformers(family: str, ends: dict[str, bool], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    Tokenizer.from_str(zoo.library("byte_fallback")).save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": f"{family}Tokenizer", **BOS_EOS, "pad_token": "<unk>", **ends}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = getattr(transformers, f"{family}TokenizerFast").from_pretrained(tmp_path)
    mine = load_tokenizer(tmp_path)
    for text in zoo.SENTENCES:
        assert mine.add_special_tokens(mine.encode(text, specials=True)) == theirs.encode(text)


# ---------------------------------------------------------------- what lies beside the file


def folder_of(folder: Path, backend: Tokenizer, **files: Any) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_added_tokens_of_the_config(tmp_path: Path) -> None:
    """Tokens that tokenizer_config.json has beyond tokenizer.json, or describes otherwise, are as it says."""
    transformers = pytest.importorskip("transformers")
    backend = Tokenizer.from_str(zoo.library("byte_level"))
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
    mine, theirs = load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = ["a <mask>  b", "<|im_start|>  user\n<think>  x"]
    assert mine.encode_batch(texts, specials=True) == theirs(texts, add_special_tokens=False)["input_ids"]
    assert mine.vocab_size == size + 1 == len(theirs)
    assert mine.special_tokens.mask == size - 3 and mine.special_tokens.names()["<|im_start|>"] == size


def test_roles_of_the_special_tokens_map(tmp_path: Path) -> None:
    names = {"cls_token": "<s>", "sep_token": {"content": "</s>"}, "mask_token": "<mask>", "bos_token": "<gone>"}
    folder_of(tmp_path, Tokenizer.from_str(zoo.library("byte_level")), special_tokens_map=names)
    specials = load_tokenizer(tmp_path).special_tokens
    assert (specials.cls, specials.sep, specials.bos) == (0, 2, None)
    assert specials.mask == specials.names()["<mask>"]
    (tmp_path / "special_tokens_map.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"special_tokens_map.json: not JSON"):
        load_tokenizer(tmp_path)


def test_the_roles_of_a_class(tmp_path: Path) -> None:
    folder_of(tmp_path, Tokenizer.from_str(zoo.library("byte_level")), config={"model_type": "roberta"})
    specials = load_tokenizer(tmp_path).special_tokens
    assert (specials.cls, specials.sep) == (0, 2)


@pytest.mark.parametrize("config", [b"[]", b"null", b"{oops", b'{"model_type": 3}'])
def test_a_broken_model_config_is_ignored(config: bytes, tmp_path: Path) -> None:
    folder_of(tmp_path, Tokenizer.from_str(zoo.library("unigram")))
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
def test_invalid_values_are_ignored(config: dict[str, Any], tmp_path: Path) -> None:
    folder_of(tmp_path, Tokenizer.from_str(zoo.library("unigram")), tokenizer_config=config)
    mine = load_tokenizer(tmp_path)
    assert mine.add_special_tokens(mine.encode("the names")) == ours("unigram").add_special_tokens(
        ours("unigram").encode("the names")
    )


# ---------------------------------------------------------------- older folders


def gpt2_folder(folder: Path, **config: Any) -> Path:
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
def test_vocab_and_merges_against_transformers(family: str, config: dict[str, Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    gpt2_folder(tmp_path, tokenizer_class=f"{family}Tokenizer", **config)
    theirs = getattr(transformers, f"{family}TokenizerFast").from_pretrained(tmp_path)
    mine = load_tokenizer(tmp_path)
    texts = [text for text in zoo.lines(300) if "<mask>" not in text]
    rows = mine.encode_batch(texts, specials=True)
    if family == "GPT2" and config.get("add_bos_token"):  # transformers adds it in the slow tokenizer only
        expected = transformers.GPT2Tokenizer.from_pretrained(tmp_path)
        assert [mine.add_special_tokens(row) for row in rows[:40]] == [expected.encode(text) for text in texts[:40]]
    else:
        assert [mine.add_special_tokens(row) for row in rows] == theirs(texts)["input_ids"]
    assert [mine.decode(row) for row in rows] == [theirs.decode(row, skip_special_tokens=True) for row in rows]
    assert mine.kind == "bpe"


def test_the_roles_of_gpt2(tmp_path: Path) -> None:
    specials = load_tokenizer(gpt2_folder(tmp_path)).special_tokens
    end = specials.names()["<|endoftext|>"]
    assert (specials.separator, specials.bos, specials.eos) == (end, end, end)


def bert_folder(folder: Path, **config: Any) -> Path:
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
def test_vocab_txt_against_transformers(config: dict[str, Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.BertTokenizerFast.from_pretrained(bert_folder(tmp_path, **config))
    mine = load_tokenizer(tmp_path)
    rows = mine.encode_batch(zoo.lines(300), specials=True)
    assert [mine.add_special_tokens(row) for row in rows] == theirs(zoo.lines(300))["input_ids"]
    for row in rows:  # BertTokenizer's clean-up of a whole text is not ours: see library.py
        assert mine.decode(row) == theirs.decode(row, True, clean_up_tokenization_spaces=False)
    assert (mine.kind, mine.special_tokens.mask) == ("wordpiece", 4)


def test_precedence_of_files(tmp_path: Path) -> None:
    bert_folder(gpt2_folder(tmp_path))
    assert load_tokenizer(tmp_path).kind == "bpe"
    Tokenizer.from_str(zoo.library("unigram")).save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).kind == "unigram"
    for name in ("tokenizer.json", "vocab.json", "merges.txt"):
        (tmp_path / name).unlink()
    assert load_tokenizer(tmp_path).kind == "wordpiece"


# ---------------------------------------------------------------- bad input


def test_nothing_found(tmp_path: Path) -> None:
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
def test_broken_gpt2_folders(name: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    gpt2_folder(tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(tmp_path)
    assert message in str(caught.value) and str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"hello\nworld\n", b"[UNK]\n[CLS]\n"])
def test_a_vocab_txt_of_something_else(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_bytes(content)
    with pytest.raises(TokenizerError, match=r"vocab.txt: there is no (unk|sep) token"):
        load_tokenizer(tmp_path)


def test_an_added_token_may_be_ordinary() -> None:
    backend = Tokenizer.from_str(zoo.library("byte_level"))
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    mine = HFTokenizer(backend)
    assert mine.encode("x<tool>y").count(mine.vocab_size - 1) == 1
    assert mine.token_bytes(mine.vocab_size - 1) == b"<tool>"
