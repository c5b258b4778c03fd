"""Real text (sources of the running Python's standard library), and a small tokenizer of each kind trained on it."""

import sysconfig
from pathlib import Path

import pytest

from kvad.text.detokenizer import Detokenizer
from kvad.text.tokenizer import train_tokenizer

MODULES = ("argparse", "ast", "bisect", "calendar", "codecs", "heapq", "locale", "textwrap", "threading", "this")
OTHER = "안녕하세요 세계. naïve café, Ελληνικά 🙂👩‍👩‍👧 e\u0301 हिन्दी「日本」\r\n\tend"


@pytest.fixture(scope="session")
def documents():
    folder = Path(sysconfig.get_paths()["stdlib"])
    return [(folder / f"{name}.py").read_text(encoding="utf-8") for name in MODULES] + [OTHER]


@pytest.fixture(scope="session")
def tokenizers(documents):
    roles = ("bos", "eos", "pad", "unk")
    sizes = {"bpe": 700, "byte": 4096, "char": 4096, "word": 20_000}
    return {kind: train_tokenizer(kind, documents, vocab_size=size, specials=roles) for kind, size in sizes.items()}


@pytest.fixture(params=["bpe", "byte", "char", "word"])
def tokenizer(request, tokenizers):
    return tokenizers[request.param]


@pytest.fixture(scope="session")
def stream():
    """Decode ids one by one; return the text, without special tokens by default."""

    def decode(tokenizer, ids, skip=True):
        detokenizer = Detokenizer(tokenizer, skip_specials=skip)
        return "".join([*map(detokenizer.push, ids), detokenizer.flush()])

    return decode
