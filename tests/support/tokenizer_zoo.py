"""Small tokenizers of the common kinds, trained here, and text that is hard for them.

``python tests/support/tokenizer_zoo.py`` (with transformers and sentencepiece) writes the golden files that the tests
read if transformers is missing: tiny tokenizers and the output of transformers for them.
"""

from __future__ import annotations

import base64
import functools
import io
import json
import random
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

GOLDEN = Path(__file__).parents[1] / "golden_files" / "tokenizers"
MODULES = ("argparse", "ast", "bisect", "calendar", "codecs", "heapq", "locale", "textwrap", "threading", "this")
SENTENCES = [
    "The quick brown fox isn't jumping over the lazy dog's back; it can't, won't, and doesn't care.",
    "Žluťoučký kůň úpěl ďábelské ódy, naïve café, Ærøskøbing, İstanbul'da ılık bir gün.",
    "Ελληνικά γράμματα και τόνοι: ἀρχὴ ἥμισυ παντός.",
    "Широкая электрификация южных губерний даст мощный толчок подъёму сельского хозяйства.",
    "안녕하세요 세계, 오늘은 날씨가 좋네요.",
    "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。",
    "人人生而自由，在尊严和权利上一律平等。",
    "كل البشر يولدون أحرارًا ومتساوين في الكرامة والحقوق.",
    "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता प्राप्त है।",
    "ทุกคนเกิดมามีอิสระและเสมอภาคกันในศักดิ์ศรีและสิทธิ",
    "🙂 👩‍👩‍👧 🇩🇪 ✂️ 🏳️‍🌈 👍🏽 and then some 🤖🤖🤖",
    "e\u0301 A\u030a ﬁ ﬂ ² ½ Ⅷ ｆｕｌｌ　ｗｉｄｔｈ \u00ad\u200b\u200d\ufeff",
    "def f(x, *, y=3.14):\n\treturn {'a': [x ** 2, y], \"b\": None}  # why not?\r\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i] << 2; }  // 0x1F 1e-9 1_000",
    "https://example.org/path?q=1&r=%20#frag  user@example.com  C:\\temp\\new",
    "  leading, trailing  and   many    spaces   ",
    "▁metaspace ▁▁ and <0xE4> spelled out, </s> <s> <unk> <pad> [CLS] [SEP] [MASK] <extra_id_0> <|endoftext|>",
    "1234567890 12,345.67 $5.00 50% 3:45pm 2026-11-21 +49 (0)30 12345",
    "\x00\x01\x7f\x85\xa0\u2028\u3000\U0010ffff",
]
MULTILINGUAL = [sentence for sentence in SENTENCES if "\x00" not in sentence and "</s>" not in sentence]


@functools.cache
def documents() -> list[str]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    return [(folder / f"{name}.py").read_text(encoding="utf-8") for name in MODULES]


@functools.cache
def lines(number: int = 1000) -> list[str]:
    """Return lines of code, sentences, and random cuts and joins of both; always the same lines."""
    rng = random.Random(7)
    code = [line for document in documents() for line in document.split("\n") if line.strip()]
    result = ["", " ", "\n", "a", "  a", "a  ", *SENTENCES]
    while len(result) < number:
        pick = rng.choice([code, SENTENCES, SENTENCES])
        text = rng.choice(pick)
        if rng.random() < 0.5:
            at = rng.randrange(len(text) + 1)
            text = text[at:] + rng.choice(["", " ", "\t", "\n\n"]) + rng.choice(SENTENCES)[: rng.randrange(30)]
        result.append(text)
    return result


def corpus() -> Iterator[str]:
    yield from MULTILINGUAL * 20
    for document in documents():
        yield from document.split("\n")


# ---------------------------------------------------------------- the tokenizers library


def special(*names: str) -> list[AddedToken]:
    return [AddedToken(name, special=True, normalized=False) for name in names]


def byte_level(size: int = 600) -> Tokenizer:
    """RoBERTa style: ``<s> x </s>``, a mask that includes the space before it, and ordinary added tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special("<s>", "<pad>", "</s>", "<unk>"),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(corpus(), trainer)
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True, normalized=False)])
    backend.add_tokens([AddedToken("import", single_word=True), AddedToken("<think>", rstrip=True, normalized=False)])
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return backend


def unigram(size: int = 600) -> Tokenizer:
    """T5 style: ``x </s>``, sentinels after the vocabulary, NFKC, runs of spaces as one."""
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip(left=False, right=True)]
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=size, special_tokens=special("<pad>", "</s>", "<unk>"), unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator((text for text in corpus() if "🙂" not in text), trainer)
    sentinels = [f"<extra_id_{i}>" for i in reversed(range(4))]
    backend.add_special_tokens([AddedToken(name, lstrip=True, rstrip=True, normalized=False) for name in sentinels])
    template = processors.TemplateProcessing(single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)])
    backend.post_processor = template
    return backend


def wordpiece(size: int = 600) -> Tokenizer:
    """BERT style, lowercase."""
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    names = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    trainer = trainers.WordPieceTrainer(
        vocab_size=size, special_tokens=special(*names), limit_alphabet=120, show_progress=False
    )
    backend.train_from_iterator(corpus(), trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    backend.add_tokens(["NASA", AddedToken("GmbH", normalized=False)])
    return backend


def byte_fallback(size: int = 600) -> Tokenizer:
    """Llama 2 style: BPE with ``▁`` for a space, ``<0xE4>`` for bytes without a piece, ``<s> x``."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=size, limit_alphabet=100, show_progress=False)
    trained.train_from_iterator(corpus(), trainer)
    content = json.loads(trained.to_str())["model"]
    before = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256))]
    names = [*before, *sorted(content["vocab"], key=content["vocab"].get)]
    vocab = {name: i for i, name in enumerate(names)}
    merges = [tuple(merge) for merge in content["merges"]]
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = trained.normalizer
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(special("<unk>", "<s>", "</s>"))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


LIBRARY: dict[str, Callable[[int], Tokenizer]] = {
    make.__name__: make for make in (byte_level, unigram, wordpiece, byte_fallback)
}


@functools.cache
def library(name: str) -> str:
    """Return the file of a trained tokenizer; callers build their own backend, because wrapping changes it."""
    return str(LIBRARY[name](600).to_str())


# ---------------------------------------------------------------- SentencePiece


@functools.cache
def spm(kind: str = "unigram", size: int = 400, *, seed: int = 0, **options: Any) -> bytes:
    """Return a model file; ``seed`` selects other sentences and so another vocabulary."""
    import sentencepiece

    sentencepiece.set_min_log_level(2)
    texts = [text for text in corpus() if text.strip()]
    random.Random(seed).shuffle(texts)
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts[:1500]),
        model_writer=file,
        model_type=kind,
        vocab_size=size,
        character_coverage=0.98,
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
        **options,
    )
    return file.getvalue()


T5 = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
LLAMA = {
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "split_digits": True,
}


def gemma() -> bytes:
    """Llama style without a space before the text, with other names."""
    names = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "bos_piece": "<bos>", "eos_piece": "<eos>"}
    return spm("bpe", 700, **LLAMA, **names, add_dummy_prefix=False)


def vocabulary_of(*models: bytes) -> dict[str, int]:
    """Return ``vocab.json`` as in Marian and M2M100: the pieces of all models in a different order."""
    import sentencepiece

    pieces: dict[str, None] = dict.fromkeys(("</s>", "<unk>"))
    for model in models:
        processor = sentencepiece.SentencePieceProcessor()
        processor.load_from_serialized_proto(model)
        pieces |= dict.fromkeys(processor.id_to_piece(i) for i in range(3, processor.get_piece_size()))
    names = [*pieces, ">>fra<<", ">>deu<<", "<pad>"]
    return {name: i for i, name in enumerate(names)}


def spm_folder(folder: Path, family: str, *, normalization: str = "nmt_nfkc", **config: Any) -> Path:
    """Write a folder like a family's checkpoints, without a tokenizer.json."""
    folder.mkdir(parents=True, exist_ok=True)

    def model(kind: str = "unigram", size: int = 400, **options: Any) -> bytes:
        return spm(kind, size, **{"normalization_rule_name": normalization, **options})

    if family == "T5":
        (folder / "spiece.model").write_bytes(model("unigram", **T5))
    elif family == "Llama":
        (folder / "tokenizer.model").write_bytes(model("bpe", 700, **LLAMA))
    elif family == "Marian":
        source, target = model("unigram"), model("unigram", 300, seed=1)
        (folder / "source.spm").write_bytes(source)
        (folder / "target.spm").write_bytes(target)
        (folder / "vocab.json").write_text(json.dumps(vocabulary_of(source, target)))
    else:
        (folder / "sentencepiece.bpe.model").write_bytes(model("unigram"))
    if family == "M2M100":
        names = ["<s>", "<pad>", *(name for name in vocabulary_of(model("unigram")) if name[:2] != ">>" != name[-2:])]
        (folder / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(dict.fromkeys(names))}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": f"{family}Tokenizer", **config}))
    return folder


# ---------------------------------------------------------------- golden files

GOLDEN_TEXTS = [*SENTENCES, "", " ", "a  b ", "NASA's GmbH import imported <think>  x <mask> y", "x <extra_id_0> y."]


def golden(tokenizer: Any, files: dict[str, bytes]) -> dict[str, Any]:
    """Return the files of a transformers tokenizer and its outputs."""
    cases = []
    for text in GOLDEN_TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        cases.append(
            {
                "text": text,
                "ids": ids,
                "framed": tokenizer.encode(text),
                "decoded": tokenizer.decode(ids, skip_special_tokens=True),
            }
        )
    return {
        "files": {name: base64.b64encode(content).decode("ascii") for name, content in files.items()},
        "length": len(tokenizer),
        "cases": cases,
    }


def write_golden() -> None:
    import transformers

    GOLDEN.mkdir(exist_ok=True)
    for name, make in LIBRARY.items():
        text = make(320).to_str()
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(text))
        write(name, golden(fast, {"tokenizer.json": text.encode()}))
    with tempfile.TemporaryDirectory() as temporary:
        for family in ("T5", "Llama", "XLMRoberta", "Marian"):
            folder = spm_folder(Path(temporary) / family, family, normalization="identity")  # else 240 kB
            slow = getattr(transformers, f"{family}Tokenizer").from_pretrained(folder)
            write(family.lower(), golden(slow, {path.name: path.read_bytes() for path in sorted(folder.iterdir())}))


def write(name: str, content: dict[str, Any]) -> None:
    (GOLDEN / f"{name}.json").write_text(json.dumps(content, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_golden()
