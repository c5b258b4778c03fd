"""``kvad eval``: the task by model and data, numbers as text and JSON, figures, and what is refused."""

import json
from dataclasses import replace

import pytest

from kvad.checkpoint.generation_config import GenerationConfig
from kvad.checkpoint.native import save_checkpoint
from kvad.config import layers as cfg
from kvad.text.tokenizer import train_tokenizer
from tests.support.cli_checkpoints import LIMIT, run, write_model
from tests.support.random_models import build, encoder_config, pair_config

TEXT = "".join(f"Line {number} of a text that nobody wrote.\n" for number in range(6))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("eval")


@pytest.fixture(scope="module")
def decoder(folder):
    return write_model(folder / "decoder")


@pytest.fixture(scope="module")
def text(folder):
    path = folder / "texts" / "one.txt"
    path.parent.mkdir()
    path.write_text(TEXT)
    (path.parent / "two.md").write_text("Ä second one.")
    return path


@pytest.fixture(scope="module")
def translator(folder):
    tokenizer = train_tokenizer("char", ["abcdefgh "], specials=("bos", "eos", "pad", "unk"))
    bos, eos = tokenizer.special_tokens.bos, tokenizer.special_tokens.eos
    said = GenerationConfig(
        decoder_start_token_id=bos, eos_token_ids=(eos,), source_eos_token_id=eos, sampling={"temperature": 0.0}
    )
    config = replace(pair_config(), vocab_size=tokenizer.vocab_size)
    save_checkpoint(folder / "pairs", config, build(config).float().state_dict(), tokenizer, generation=said)
    (folder / "pairs.tsv").write_text("abc\tcba\nhe\teh\n\tnothing\ngab\tbag\n")
    return folder / "pairs"


def write_encoder(folder, per, labels):
    tokenizer = train_tokenizer("word", ["the dog barks a cat sleeps"])
    head = cfg.ClassificationHeadConfig(labels=labels, level=per)
    config = replace(encoder_config(), vocab_size=tokenizer.vocab_size, head=head, tie_embeddings=False)
    save_checkpoint(folder, config, build(config).float().state_dict(), tokenizer)
    return folder


def said(ran):
    assert ran.code == 0, ran.err
    return json.loads(ran.out)


def test_texts(capsys, decoder, text):
    line = said(run(capsys, "eval", decoder, text.parent, "--json", "--word-perplexity"))
    size = len(TEXT) + len("Ä second one.".encode())
    assert line["task"] == "lm" and line["documents"] == 2 and line["tokens"] == line["bytes"] == size
    assert line["scored"] == size and (line["window"], line["stride"], line["bos"]) == (LIMIT, LIMIT // 2, "start")
    assert line["words"] == 6 * 8 + 3 and line["lines"] == 7 and line["memory"] is None
    assert line["bits_per_byte"] == pytest.approx(line["loss"] / 0.6931471805599453)
    ran = run(capsys, "eval", decoder, text.parent, "--word-perplexity")
    assert ran.code == 0 and f"2 texts, {size} tokens" in ran.out and "before each text; without a cache" in ran.out
    assert f"loss       {line['loss']:.4f} nats per token; {size} tokens scored" in ran.out
    assert f"{line['word_perplexity']:.4f} per word (51 between white space)" in ran.out


def test_what_a_cache_costs_is_one_command(capsys, decoder, text):
    full = said(run(capsys, "eval", decoder, text, "--json"))
    cached = said(run(capsys, "eval", decoder, text, "--json", "--use-cache"))
    asked = ["--policy", "window(8)", "--cache-dtype", "int8", "--block-size", "4", "--prefill-chunk-size", "4"]
    dropped = said(run(capsys, "eval", decoder, text, "--json", *asked))
    assert cached["loss"] == pytest.approx(full["loss"], rel=1e-5)
    assert cached["memory"] == {"policy": "full", "stored": "float32", "layout": "paged", "chunk": 16}
    assert abs(dropped["loss"] / full["loss"] - 1) > 1e-4 and dropped["scored"] == full["scored"]
    assert dropped["memory"]["policy"] == "window(8)" and dropped["memory"]["stored"] == "int8"
    longer = said(run(capsys, "eval", decoder, text, "--json", "--policy", "sinks(4,28)", "--endless", "--window", 200))
    assert longer["window"] == 200 and longer["scored"] == full["scored"]


def test_documents_are_apart_or_one(capsys, decoder, text):
    apart, lines, joined = (
        said(run(capsys, "eval", decoder, text.parent, "--json", "--document-unit", how))
        for how in ("files", "lines", "joined")
    )
    assert lines["documents"] == 7 and lines["tokens"] == apart["tokens"] - 6  # without the ends of lines
    assert joined["documents"] == 1 and joined["tokens"] == apart["tokens"] + 1  # what opens the second, a token too
    none = said(run(capsys, "eval", decoder, text.parent, "--json", "--bos", "none", "--suffix", ".txt"))
    assert none["scored"] == len(TEXT) - 1 and none["opening"] is None
    some = said(run(capsys, "eval", decoder, text, "--json", "--max-scored-tokens", 50))
    assert 0 < some["scored"] <= 100 < some["tokens"]


def test_lengths_beyond_the_limit(capsys, decoder, text, tmp_path):
    figure = tmp_path / "curve.svg"
    asked = ["--trained-seq-len", 32, "--length-multiples", "1,2,5", "--max-scored-tokens", 64]
    ran = run(capsys, "eval", decoder, text, *asked, "--length-plot", figure, "--json")
    lines = [json.loads(line) for line in ran.out.splitlines()]
    assert [(line["multiple"], line["length"]) for line in lines] == [(1, 32), (2, 64), (5, 160)]
    assert (
        len({line["scored"] for line in lines}) == 1
        and lines[0]["positions"] == "rope"
        and "<svg" in figure.read_text()
    )
    ran = run(capsys, "eval", decoder, text, *asked)
    assert ran.code == 0 and "trained on rows of 32 tokens, limit 96" in ran.out
    beyond = said(run(capsys, "eval", decoder, text, "--json", "--window", 150, "--exceed-max-seq-len"))
    assert beyond["window"] == 150


def test_pairs(capsys, translator, folder):
    line = said(
        run(capsys, "eval", translator, folder / "pairs.tsv", "--json", "--print-samples", 1, "--max-tokens", 8)
    )
    assert line["task"] == "translate" and line["pairs"] == 3 and line["scored"] == 3 + 2 + 3 + 3
    assert "|tok:13a|" in line["bleu_signature"] and 0 <= line["exact_match"] <= 1 and len(line["shown"]) == 1
    asked = [
        "--num-beams",
        2,
        "--bleu-tokenization",
        "spaces",
        "--lowercase",
        "--cache-dtype",
        "int8",
        "--max-tokens",
        8,
    ]
    beams = run(capsys, "eval", translator, folder / "pairs.tsv", *asked)
    assert beams.code == 0 and "case:lc|eff:no|tok:none" in beams.out and "2 beams" in beams.out
    assert "1 pair with an empty side omitted" in beams.err
    (folder / "source").write_text("abc\nhe\n")
    (folder / "target").write_text("cba\neh\n")
    pairs = ["--pairs", folder / "source", folder / "target", "--max-tokens", 8]
    match = said(run(capsys, "eval", translator, *pairs, "--task", "match", "--json"))
    assert match["pairs"] == 2 and "bleu" not in match


def test_a_decoder_s_answers(capsys, decoder, folder):
    (folder / "answers.tsv").write_text("1+1=\t2\n2+2=\t4\n")
    line = said(run(capsys, "eval", decoder, folder / "answers.tsv", "--json", "--max-tokens", 3))
    assert line["task"] == "match" and line["pairs"] == 2 and "loss" not in line


def test_tags_and_labels(capsys, folder):
    tagger = write_encoder(folder / "tagger", "token", ("D", "N", "V"))
    path = folder / "tags.tsv"
    path.write_text("the\tD\ndog\tN\nbarks\tV\n\na\tD\ncat\tX\n")
    line = said(run(capsys, "eval", tagger, path, "--json"))
    assert line["sentences"] == 2 and line["count"] == 5
    gold = {row["label"]: row["support"] for row in line["labels"]}
    assert {name: count for name, count in gold.items() if count} == {"D": 2, "N": 1, "V": 1, "X": 1}
    assert line["macro_f1"] == pytest.approx(sum(row["f1"] for row in line["labels"]) / len(line["labels"]))
    ran = run(capsys, "eval", tagger, path)
    assert "1 of labels that the model lacks: X" in ran.out and "macro-F1" in ran.out
    path.write_text("the\tD\n\n" + "dog\tN\n" * 4 + "\n" + "dog\tN\n" * 500)
    ran = run(capsys, "eval", tagger, path)
    assert (
        ran.code == 2
        and "text 3: encoder input: must have at most" in ran.err
        and "nothing is cut" in ran.err
        and ran.out == ""
    )
    classifier = write_encoder(folder / "classifier", "row", ("good", "bad"))
    (folder / "labels.tsv").write_text("good\tthe dog barks\nbad\ta cat\n")
    line = said(run(capsys, "eval", classifier, folder / "labels.tsv", "--json"))
    assert line["task"] == "classify" and line["count"] == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["MODEL"], "no data was given"),
        (["MODEL", "TEXT", "--task", "tag"], "is a decoder"),
        (["MODEL", "TEXT", "--num-beams", "2"], "--num-beams does not apply to --task lm"),
        (["MODEL", "TEXT", "--window", "200"], "limit is 96"),
        (["MODEL", "TEXT", "--window", "200", "--use-cache"], "--endless"),
        (["MODEL", "TEXT", "--stride", "97"], "--stride 97"),
        (["MODEL", "TEXT", "--trained-seq-len", "8"], "--trained-seq-len needs --length-multiples"),
        (["MODEL", "TEXT", "--length-multiples", "1,x"], "is not a list of numbers"),
        (["MODEL", "TEXT", "--length-multiples", "1,2", "--use-cache"], "without a cache"),
        (["MODEL", "TEXT", "--length-multiples", "100"], "a row takes 9,600"),
        (["MODEL", "absent.txt"], "no such file"),
    ],
)
def test_refusals(capsys, decoder, text, arguments, says):
    named = {"MODEL": decoder, "TEXT": text}
    ran = run(capsys, "eval", *(named.get(each, each) for each in arguments))
    assert ran.code == 2 and says in ran.err and ran.out == ""


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("the\tD\ndog\n", "line 2: one column"),
        ("the\tD\tx\n", "line 1: 3 columns"),
        ("the\t\n", "the tag is empty"),
        ("\n", "no tagged words"),
    ],
)
def test_files_of_tags_that_cannot_be_read(capsys, folder, content, says):
    from kvad.errors import DataError
    from kvad.evaluation.metrics import read_tagged

    path = folder / "bad.tsv"
    path.write_text(content)
    with pytest.raises(DataError, match=says):
        read_tagged([path])
