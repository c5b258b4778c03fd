"""kvad tokenize: pieces, ids, counts and bytes; there and back; without torch."""

import json

import pytest

from kvad.text.tokenizer import train_tokenizer
from tests.cli.test_main import kvad_process
from tests.support.cli_checkpoints import run, write_model

TEXT = "def über():\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def kvad(capsys, monkeypatch):
    return lambda *arguments, stdin=None: run(capsys, *arguments, stdin=stdin, monkeypatch=monkeypatch)


def test_a_table_of_pieces_ids_and_bytes(kvad, tmp_path):
    tokenizer = train_tokenizer("bpe", ["def f():\n    return f\n"] * 9, vocab_size=300)
    tokenizer.save(tmp_path)
    ran = kvad("tokenize", tmp_path, "def f")
    ids = tokenizer.encode("def f")
    assert ran.code == 0 and ran.err == ""
    head, *rows, last = ran.out.splitlines()
    assert head.split() == ["index", "id", "piece", "bytes"]
    assert [int(row.split()[1]) for row in rows] == ids
    assert [row.split()[2] for row in rows] == [tokenizer.token_text(token) for token in ids]
    assert (
        "64 65 66" in ran.out
        and last.startswith(f"{len(ids)} tokens, ")
        and f"{5 / len(ids):.2f} bytes per token" in last
    )
    assert kvad("tokenize", tmp_path / "tokenizer.json", "def f").out == ran.out


def test_ids_and_back(kvad, model):
    ids = kvad("tokenize", model, TEXT, "--ids").out
    assert ids == " ".join(str(byte) for byte in TEXT.encode()) + "\n"
    assert kvad("tokenize", model, "--decode", ids).out == TEXT + "\n"
    assert kvad("tokenize", model, "--decode", "256 104").out == "<|endofdoc|>h\n"


def test_json(kvad, model):
    found = json.loads(kvad("tokenize", model, TEXT, "--json").out)
    assert found["kind"] == "byte" and found["vocab_size"] == 257 and found["text"] == TEXT
    assert found["ids"] == list(TEXT.encode()) and b"".join(map(bytes, found["bytes"])) == TEXT.encode()
    assert found["pieces"][3] == "␣" and len(found["pieces"]) == found["num_tokens"] == found["num_bytes"] == 13
    assert found["num_characters"] == 12 and found["bytes_per_token"] == 1.0
    assert json.loads(kvad("tokenize", model, "--decode", "104 105", "--json").out)["text"] == "hi"


@pytest.mark.parametrize("dash", [(), ("-",)])
def test_stdin(kvad, model, dash):
    assert kvad("tokenize", model, *dash, "--ids", stdin=b"hi\n").out == "104 105 10\n"


def test_an_empty_text(kvad, model):
    assert kvad("tokenize", model, "").out.splitlines()[-1] == "0 tokens, 0 different; 0 characters, 0 bytes"
    assert json.loads(kvad("tokenize", model, "", "--json").out)["bytes_per_token"] is None


@pytest.mark.parametrize(
    ("flags", "stdin", "says"),
    [
        (("--decode", "1 x"), None, "--decode: 'x' is not a token id"),
        (("--decode", "999"), None, "token id 999 is outside the vocabulary of 257"),
        (("--ids", "--decode", "1"), None, "exclude each other"),
        (("-",), b"a\xe9", "standard input is not UTF-8 at byte 1 (0xE9)"),
        (("hi", "--jsn"), None, "'--json'"),
    ],
)
def test_bad_input(kvad, model, flags, stdin, says):
    ran = kvad("tokenize", model, *flags, stdin=stdin)
    assert ran.code == 2 and ran.out == "" and says in ran.err.splitlines()[0], ran


def test_no_tokenizer(kvad, tmp_path):
    for path, says in ((tmp_path, "there is no tokenizer.json"), (tmp_path / "absent", "no such folder")):
        ran = kvad("tokenize", path, "hi")
        assert ran.code == 2 and says in ran.err


def test_it_needs_no_torch(model):
    ran = kvad_process(
        "tokenize", str(model), "hi", code="import atexit\natexit.register(lambda: print('torch' in sys.modules))"
    )
    assert ran.returncode == 0 and ran.stdout.endswith("False\n"), ran


def test_a_run_folder_stands_for_its_newest_checkpoint(tmp_path, capsys):
    from kvad.checkpoint.native import save_step
    from kvad.cli.main import main
    from kvad.text.tokenizer import train_tokenizer
    from tests.support.random_models import build, model_config

    tokenizer, model = train_tokenizer("char", ["abc"]), build(model_config())
    save_step(tmp_path / "run", 3, model.config, model.state_dict(), tokenizer)
    assert main(["tokenize", str(tmp_path / "run"), "abba", "--ids"]) == 0
    assert capsys.readouterr().out.split() == [str(token) for token in tokenizer.encode("abba")]
