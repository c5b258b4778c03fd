"""``kvad tokenize``: pieces, ids, counts and bytes, decoding, and no torch."""

import json

import pytest

from kvad.text.tokenizer import train_tokenizer
from tests.cli.test_main import assert_loads_no_torch
from tests.support.random_models import build, model_config
from tests.support.run_steps import save_step

TEXT = "def über():\n"


def test_table(kvad, tmp_path):
    tokenizer = train_tokenizer("bpe", ["def f():\n    return f\n"] * 9, vocab_size=300)
    tokenizer.save(tmp_path)
    result = kvad("tokenize", tmp_path, "def f")
    ids = tokenizer.encode("def f")
    assert result.code == 0 and result.err == ""
    head, *rows, last = result.out.splitlines()
    assert head.split() == ["index", "id", "piece", "bytes"]
    assert [int(row.split()[1]) for row in rows] == ids
    assert [row.split()[2] for row in rows] == [tokenizer.token_text(token) for token in ids]
    assert "64 65 66" in result.out and last.startswith(f"{len(ids)} tokens, ")
    assert f"{5 / len(ids):.2f} bytes per token" in last
    assert kvad("tokenize", tmp_path / "tokenizer.json", "def f").out == result.out


def test_ids_and_back(kvad, model):
    ids = kvad("tokenize", model, TEXT, "--ids").out
    assert ids == " ".join(str(byte) for byte in TEXT.encode()) + "\n"
    assert kvad("tokenize", model, "--decode", ids).out == TEXT + "\n"
    assert kvad("tokenize", model, "--decode", "256 104").out == "<|endofdoc|>h\n"


def test_json(kvad, model):
    record = json.loads(kvad("tokenize", model, TEXT, "--json").out)
    assert record["kind"] == "byte" and record["vocab_size"] == 257 and record["text"] == TEXT
    assert record["ids"] == list(TEXT.encode()) and b"".join(map(bytes, record["bytes"])) == TEXT.encode()
    assert record["pieces"][3] == "␣" and len(record["pieces"]) == record["num_tokens"] == record["num_bytes"] == 13
    assert record["num_characters"] == 12 and record["bytes_per_token"] == 1.0
    assert json.loads(kvad("tokenize", model, "--decode", "104 105", "--json").out)["text"] == "hi"


@pytest.mark.parametrize("dash", [(), ("-",)])
def test_stdin(kvad, model, dash):
    assert kvad("tokenize", model, *dash, "--ids", stdin=b"hi\n").out == "104 105 10\n"


def test_empty_text(kvad, model):
    assert kvad("tokenize", model, "").out.splitlines()[-1] == "0 tokens, 0 different; 0 characters, 0 bytes"
    assert json.loads(kvad("tokenize", model, "", "--json").out)["bytes_per_token"] is None


@pytest.mark.parametrize(
    ("flags", "stdin", "message"),
    [
        (("--decode", "1 x"), None, "--decode: 'x' is not a token id"),
        (("--decode", "999"), None, "token id 999 is outside the vocabulary of 257"),
        (("--ids", "--decode", "1"), None, "exclude each other"),
        (("-",), b"a\xe9", "standard input is not UTF-8 at byte 1 (0xE9)"),
        (("hi", "--jsn"), None, "'--json'"),
    ],
)
def test_invalid_input(kvad, model, flags, stdin, message):
    result = kvad("tokenize", model, *flags, stdin=stdin)
    assert result.code == 2 and result.out == "" and message in result.err.splitlines()[0], result


def test_folder_without_tokenizer(kvad, tmp_path):
    for path, message in ((tmp_path, "there is no tokenizer.json"), (tmp_path / "absent", "no such folder")):
        result = kvad("tokenize", path, "hi")
        assert result.code == 2 and message in result.err


def test_loads_no_torch(model):
    assert_loads_no_torch("tokenize", str(model), "hi")


def test_run_folder_means_newest_checkpoint(kvad, tmp_path):
    tokenizer, model = train_tokenizer("char", ["abc"]), build(model_config())
    save_step(tmp_path / "run", 3, model.config, model.state_dict(), tokenizer)
    result = kvad("tokenize", tmp_path / "run", "abba", "--ids")
    assert result.code == 0 and result.out.split() == [str(token) for token in tokenizer.encode("abba")]
