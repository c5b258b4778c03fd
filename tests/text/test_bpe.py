"""Byte-level BPE against the library and transformers; tokenizer.json files of other makes, built here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from kvad.errors import TokenizerError
from kvad.text import hf_tokenizer
from kvad.text.base import Tokenizer, split_text
from kvad.text.detokenizer import Detokenizer
from kvad.text.hf_tokenizer import HFTokenizer, byte_alphabet
from kvad.text.tokenizer import load_tokenizer, train_tokenizer


def save(folder: Path, backend: Backend, **config: Any) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_it_compresses(tokenizers: dict[str, Tokenizer], documents: list[str]) -> None:
    text = documents[0]
    assert len(tokenizers["bpe"].encode(text)) < 0.6 * len(text.encode())


def test_vocab_size_is_reached_or_the_pairs_run_out(documents: list[str]) -> None:
    assert train_tokenizer("bpe", documents, vocab_size=400).vocab_size == 400
    few = train_tokenizer("bpe", ["abcabc"], vocab_size=4096)
    assert 257 < few.vocab_size < 265
    assert train_tokenizer("bpe", ["abcabc"], min_freq=3).vocab_size == 257


def test_the_alphabet_is_the_library_s() -> None:
    assert sorted(byte_alphabet()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_alphabet().values()) == list(range(256))
    for value in range(0x80):
        assert pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(chr(value))[0][
            0
        ] == next(char for char, byte in byte_alphabet().items() if byte == value)


def test_transformers_reads_our_file(tokenizers: dict[str, Tokenizer], documents: list[str], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = tokenizers["bpe"]
    ours.save(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    for text in documents[-3:]:
        ids = theirs.encode(text)
        assert ids == ours.encode(text, specials=True)
        assert theirs.decode(ids, clean_up_tokenization_spaces=False) == ours.decode(ids)


# ---------------------------------------------------------------- long texts


SCRAPS = [
    "a",
    "B",
    "é",
    "世",
    "\n",
    "\n\n",
    " ",
    "  ",
    ".",
    "'s",
    "1",
    "\r\n",
    "\t",
    "\x1c",
    "\x85",
    "\u3000",
    "\u200b",
]


@pytest.mark.parametrize("kind", ["bpe", "word"])
@given(text=st.lists(st.sampled_from(SCRAPS)).map("".join) | st.text())
def test_splitting_changes_no_id(tokenizers: dict[str, Tokenizer], kind: str, text: str) -> None:
    pieces = list(split_text(text, limit=1))
    assert "".join(pieces) == text
    batch = tokenizers[kind].encode_batch(pieces)
    assert [token for ids in batch for token in ids] == tokenizers[kind].encode(text)


def test_a_wrong_split_is_detected(tokenizers: dict[str, Tokenizer], documents: list[str]) -> None:
    ids = tokenizers["bpe"].encode(documents[0])
    pieces = [documents[0][at : at + 1000] for at in range(0, len(documents[0]), 1000)]
    assert [token for row in tokenizers["bpe"].encode_batch(pieces) for token in row] != ids


@pytest.mark.parametrize("limit", [10, 5000])
def test_batches_keep_their_order(
    tokenizers: dict[str, Tokenizer], documents: list[str], monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    expected = [tokenizers["bpe"].encode(text) for text in documents]
    sizes: list[int] = []
    encode = HFTokenizer._encode_pieces

    def watched(self: HFTokenizer, backend: Backend, waiting: list[tuple[list[int], str]], unknown: Any) -> None:
        sizes.append(sum(len(piece) for _, piece in waiting))
        encode(self, backend, waiting, unknown)

    monkeypatch.setattr(HFTokenizer, "_encode_pieces", watched)
    monkeypatch.setattr(hf_tokenizer, "BATCH_CHARS", 4 * limit)
    monkeypatch.setattr(hf_tokenizer, "split_text", lambda text: split_text(text, limit))
    assert tokenizers["bpe"].encode_batch(documents) == expected
    assert len(sizes) > 10 and max(sizes) <= 5 * limit + 200


# ---------------------------------------------------------------- files of other makes


def llama(**options: Any) -> Backend:
    """SentencePiece's scheme as Llama 2 has it: ▁ for a space, one before the text, bytes for what is unknown."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), *"▁abcdlo", "▁a", "lo", "▁b", "▁▁"]
    merges = [("▁", "a"), ("l", "o"), ("▁", "b"), ("▁", "▁")]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, **{"byte_fallback": True, **options}))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ("<unk>", "<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def metaspace() -> Backend:
    tokens = ["<unk>", "▁", "a", "b", "▁a", "▁b", "ab"]
    backend = Backend(models.Unigram([(token, -float(index)) for index, token in enumerate(tokens)], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<unk>"])
    return backend


def wordpiece() -> Backend:
    tokens = ["[UNK]", "[CLS]", "[SEP]", "a", "b", "##a", "##b", ".", ",", "'", "s"]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Backend(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    return backend


def word_level() -> Backend:
    backend = Backend(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<unk>"])
    return backend


OTHERS = {make.__name__: make for make in (llama, metaspace, wordpiece, word_level)}


@pytest.mark.parametrize("name", OTHERS)
@given(data=st.data())
def test_decoding_is_the_library_s(name: str, data: st.DataObject) -> None:
    backend = OTHERS[name]()
    ours = HFTokenizer(OTHERS[name]())
    # bytes that are no valid text are spelled differently: one U+FFFD per byte there, one per broken sequence here
    valid = [id for id in range(ours.vocab_size) if not (name == "llama" and 3 + 0x80 <= id < 3 + 256)]
    ids = data.draw(st.lists(st.sampled_from(valid)))
    for skip in (True, False):
        text = ours.decode(ids, skip_specials=skip)
        assert text == backend.decode(ids, skip_special_tokens=skip)
        detokenizer = Detokenizer(ours, skip_specials=skip)
        assert "".join([*map(detokenizer.push, ids), detokenizer.flush()]) == text


@pytest.mark.parametrize("text", ["a b", " a lo", "a  b", "a 한🙂 b", "", "\n"])
def test_llama_text_round_trips(text: str) -> None:
    ours = HFTokenizer(llama())
    assert ours.encode(text) == llama().encode(text, add_special_tokens=False).ids
    assert ours.decode(ours.encode(text)) == text
    assert HFTokenizer(llama()).special_tokens.separator == 1  # documents open with BOS, where there is no separator


def test_a_byte_that_opens_a_text() -> None:
    for ids in ([3 + 0x20, 261], [3 + 0xED, 3 + 0x95, 3 + 0x9C, 3 + 0x20]):
        assert HFTokenizer(llama()).decode(ids) == llama().decode(ids)


def test_a_long_text_is_split_only_where_ids_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    prefixed, spaced = gpt2_like(), gpt2_like()
    prefixed.normalizer = normalizers.Prepend("_")
    spaced.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    monkeypatch.setattr(hf_tokenizer, "split_text", lambda text: split_text(text, 1))
    text = "a\nb\nc"
    for backend in (llama(), prefixed, spaced):
        expected = backend.encode(text, add_special_tokens=False).ids
        assert HFTokenizer(backend).encode(text) == expected


def test_unknown_text_of_a_library_tokenizer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    ours = HFTokenizer(metaspace())
    assert 0 in ours.encode_batch(["a xyz b", "a"])[0]
    assert capsys.readouterr().err == "kvad: 1 piece of text not in the vocabulary became UNK: 'xyz'\n"
    ours.on_unknown = "error"
    with pytest.raises(TokenizerError, match="'xyz'"):
        ours.encode("a xyz b")
    assert 0 in ours.encode("a <unk> b", specials=True)  # asked for, so not unknown
    assert HFTokenizer(llama()).encode("z") and capsys.readouterr().err == ""  # spelled in bytes


def test_bytes_without_a_token_are_reported() -> None:
    vocab = {char: index for index, char in enumerate("abc")}
    backend = Backend(models.BPE(vocab, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    assert HFTokenizer(backend).encode("cab") == [2, 0, 1]
    with pytest.raises(TokenizerError, match="no UNK: 'x' x2, '한'"):
        HFTokenizer(backend).encode("axbx한")


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.BPEDecoder(),
        decoders.CTC(),
        decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]),
        decoders.Strip(" ", 0, 1),
    ],
)
def test_a_decoder_that_cannot_stream_is_refused(decoder: Any, tmp_path: Path) -> None:
    backend = word_level()
    backend.decoder = decoder
    with pytest.raises(TokenizerError, match=r"tokenizer.json: the decoder .* token by token"):
        load_tokenizer(save(tmp_path, backend))


def test_no_truncation_no_padding_no_added_specials(tmp_path: Path) -> None:
    backend = llama()
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    ours = load_tokenizer(save(tmp_path, backend))
    assert ours.encode("a b c d") == llama().encode("a b c d", add_special_tokens=False).ids


def gpt2_like(**extra: Any) -> Backend:
    backend = Backend(models.BPE({char: index for index, char in enumerate(sorted(byte_alphabet()))}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>"])
    backend.add_tokens(["<think>", "é x", "éé"])
    return backend


def test_roles_of_a_hugging_face_folder(tmp_path: Path) -> None:
    config = {"bos_token": None, "eos_token": {"content": "<|im_start|>"}, "pad_token": "<pad>", "add_bos_token": False}
    by_file = load_tokenizer(save(tmp_path, gpt2_like(), **config)).special_tokens
    assert (by_file.separator, by_file.bos, by_file.eos, by_file.pad) == (256, None, 257, None)
    by_hand = load_tokenizer(tmp_path, roles={"bos": "<|endoftext|>", "eos": "<think>"})
    assert (by_hand.special_tokens.bos, by_hand.special_tokens.eos) == (256, 258)
    assert 258 not in by_hand.encode("<think>")  # special by its role, so text does not make it
    with pytest.raises(TokenizerError, match="the eos token '</s>' is not among"):
        load_tokenizer(tmp_path, roles={"eos": "</s>"})
    by_hand.save(tmp_path / "again")
    again = load_tokenizer(tmp_path / "again")
    assert (again.special_tokens, again.fingerprint()) == (by_hand.special_tokens, by_hand.fingerprint())
    (tmp_path / "tokenizer_config.json").write_text("{oops")
    with pytest.raises(TokenizerError, match=r"tokenizer_config.json: not JSON"):
        load_tokenizer(tmp_path)


def test_added_tokens_decode_to_their_content() -> None:
    ours = HFTokenizer(gpt2_like())
    assert ours.encode("<think>é x<|endoftext|>", specials=True) == [258, 259, 256]
    assert ours.encode("<think>é x") == [258, 259]  # ordinary vocabulary: not special, so text may be it
    assert ours.decode([258, 259, 260, 256]) == "<think>é xéé"  # although é is in the alphabet, for the byte 0xE9
    assert ours.token_bytes(259) == "é x".encode()
    assert ours.special_tokens.names() == {"<|endoftext|>": 256, "<|im_start|>": 257}


def test_an_unused_id_decodes_to_nothing() -> None:
    backend = Backend(models.WordLevel({"a": 0, "b": 5}, unk_token="a"))
    ours = HFTokenizer(backend)
    assert ours.vocab_size == 6
    assert ours.decode([0, 3]) == "a" and ours.token_text(3) == ""
