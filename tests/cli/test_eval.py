"""``kvad eval``: the task by model and data, numbers as text and JSON, figures, and invalid input."""

import json
from dataclasses import replace

import pytest

from kvad.checkpoint.generation_config import GenerationConfig
from kvad.checkpoint.native import save_checkpoint
from kvad.config import layers as cfg
from kvad.text.tokenizer import train_tokenizer
from tests.support.cli_checkpoints import LIMIT
from tests.support.random_models import build, encoder_config, pair_config

TEXT = "".join(f"Line {number} of a text that is generated.\n" for number in range(6))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("eval")


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
    generation = GenerationConfig(
        decoder_start_token_id=bos, eos_token_ids=(eos,), source_eos_token_id=eos, sampling={"temperature": 0.0}
    )
    config = replace(pair_config(), vocab_size=tokenizer.vocab_size)
    save_checkpoint(folder / "pairs", config, build(config).float().state_dict(), tokenizer, generation=generation)
    (folder / "pairs.tsv").write_text("abc\tcba\nhe\teh\n\tnothing\ngab\tbag\n")
    return folder / "pairs"


def write_encoder(folder, per, labels):
    tokenizer = train_tokenizer("word", ["the dog barks a cat sleeps"])
    head = cfg.ClassificationHeadConfig(labels=labels, level=per)
    config = replace(encoder_config(), vocab_size=tokenizer.vocab_size, head=head, tie_embeddings=False)
    save_checkpoint(folder, config, build(config).float().state_dict(), tokenizer)
    return folder


@pytest.fixture
def evaluate(kvad):
    """Run ``kvad eval --json`` and return its object."""

    def call(*arguments):
        result = kvad("eval --json", *arguments)
        assert result.code == 0, result.err
        return json.loads(result.out)

    return call


def test_texts(kvad, evaluate, model, text):
    line = evaluate(model, text.parent, "--word-perplexity")
    size = len(TEXT) + len("Ä second one.".encode())
    assert line["task"] == "lm" and line["documents"] == 2 and line["tokens"] == line["bytes"] == size
    assert line["scored"] == size and (line["window"], line["stride"], line["bos"]) == (LIMIT, LIMIT // 2, "start")
    assert line["words"] == 6 * 8 + 3 and line["lines"] == 7 and line["memory"] is None
    assert line["bits_per_byte"] == pytest.approx(line["loss"] / 0.6931471805599453)
    result = kvad("eval", model, text.parent, "--word-perplexity")
    assert result.code == 0 and f"2 texts, {size} tokens" in result.out
    assert "before each text; without a cache" in result.out
    assert f"loss       {line['loss']:.4f} nats per token; {size} tokens scored" in result.out
    assert f"{line['word_perplexity']:.4f} per word (51 between white space)" in result.out


def test_loss_of_a_cache(evaluate, model, text):
    full = evaluate(model, text)
    cached = evaluate(model, text, "--use-cache")
    flags = ["--policy", "window(8)", "--cache-dtype", "int8", "--block-size", "4", "--prefill-chunk-size", "4"]
    dropped = evaluate(model, text, *flags)
    assert cached["loss"] == pytest.approx(full["loss"], rel=1e-5)
    assert cached["memory"] == {"policy": "full", "stored": "float32", "layout": "paged", "chunk": 16}
    assert abs(dropped["loss"] / full["loss"] - 1) > 1e-4 and dropped["scored"] == full["scored"]
    assert dropped["memory"]["policy"] == "window(8)" and dropped["memory"]["stored"] == "int8"
    longer = evaluate(model, text, "--policy", "sinks(4,28)", "--endless", "--window", 200)
    assert longer["window"] == 200 and longer["scored"] == full["scored"]


def test_document_units(evaluate, model, text):
    apart, lines, joined = (
        evaluate(model, text.parent, "--document-unit", unit) for unit in ("files", "lines", "joined")
    )
    assert lines["documents"] == 7 and lines["tokens"] == apart["tokens"] - 6  # without the ends of lines
    assert joined["documents"] == 1 and joined["tokens"] == apart["tokens"] + 1  # what opens the second, a token too
    none = evaluate(model, text.parent, "--bos", "none", "--suffix", ".txt")
    assert none["scored"] == len(TEXT) - 1 and none["opening"] is None
    some = evaluate(model, text, "--max-scored-tokens", 50)
    assert 0 < some["scored"] <= 100 < some["tokens"]


def test_lengths_beyond_the_limit(kvad, evaluate, model, text, tmp_path):
    figure = tmp_path / "curve.svg"
    flags = ["--trained-seq-len", 32, "--length-multiples", "1,2,5", "--max-scored-tokens", 64]
    result = kvad("eval", model, text, *flags, "--length-plot", figure, "--json")
    lines = [json.loads(line) for line in result.out.splitlines()]
    assert [(line["multiple"], line["length"]) for line in lines] == [(1, 32), (2, 64), (5, 160)]
    assert len({line["scored"] for line in lines}) == 1 and lines[0]["positions"] == "rope"
    assert "<svg" in figure.read_text()
    result = kvad("eval", model, text, *flags)
    assert result.code == 0 and "trained on rows of 32 tokens, limit 96" in result.out
    beyond = evaluate(model, text, "--window", 150, "--exceed-max-seq-len")
    assert beyond["window"] == 150


def test_pairs(kvad, evaluate, translator, folder):
    line = evaluate(translator, folder / "pairs.tsv", "--print-samples", 1, "--max-tokens", 8)
    assert line["task"] == "translate" and line["pairs"] == 3 and line["scored"] == 3 + 2 + 3 + 3
    assert "|tok:13a|" in line["bleu_signature"] and 0 <= line["exact_match"] <= 1 and len(line["shown"]) == 1
    flags = "--num-beams 2 --bleu-tokenization spaces --lowercase --cache-dtype int8 --max-tokens 8"
    beams = kvad(f"eval {flags}", translator, folder / "pairs.tsv")
    assert beams.code == 0 and "case:lc|eff:no|tok:none" in beams.out and "2 beams" in beams.out
    assert "1 pair with an empty side omitted" in beams.err
    (folder / "source").write_text("abc\nhe\n")
    (folder / "target").write_text("cba\neh\n")
    pairs = ["--pairs", folder / "source", folder / "target", "--max-tokens", 8]
    match = evaluate(translator, *pairs, "--task", "match")
    assert match["pairs"] == 2 and "bleu" not in match


def test_answers_of_a_decoder(evaluate, model, folder):
    (folder / "answers.tsv").write_text("1+1=\t2\n2+2=\t4\n")
    line = evaluate(model, folder / "answers.tsv", "--max-tokens", 3)
    assert line["task"] == "match" and line["pairs"] == 2 and "loss" not in line


def test_tags_and_labels(kvad, evaluate, folder):
    tagger = write_encoder(folder / "tagger", "token", ("D", "N", "V"))
    path = folder / "tags.tsv"
    path.write_text("the\tD\ndog\tN\nbarks\tV\n\na\tD\ncat\tX\n")
    line = evaluate(tagger, path)
    assert line["sentences"] == 2 and line["count"] == 5
    gold = {row["label"]: row["support"] for row in line["labels"]}
    assert {name: count for name, count in gold.items() if count} == {"D": 2, "N": 1, "V": 1, "X": 1}
    assert line["macro_f1"] == pytest.approx(sum(row["f1"] for row in line["labels"]) / len(line["labels"]))
    result = kvad("eval", tagger, path)
    assert "1 of labels that the model lacks: X" in result.out and "macro-F1" in result.out
    path.write_text("the\tD\n\n" + "dog\tN\n" * 4 + "\n" + "dog\tN\n" * 500)
    result = kvad("eval", tagger, path)
    assert result.code == 2 and "text 3: encoder input: must have at most" in result.err
    assert "nothing is cut" in result.err and result.out == ""
    classifier = write_encoder(folder / "classifier", "row", ("good", "bad"))
    (folder / "labels.tsv").write_text("good\tthe dog barks\nbad\ta cat\n")
    line = evaluate(classifier, folder / "labels.tsv")
    assert line["task"] == "classify" and line["count"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
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
def test_invalid_options(kvad, model, text, arguments, message):
    named = {"MODEL": model, "TEXT": text}
    result = kvad("eval", *(named.get(each, each) for each in arguments))
    assert result.code == 2 and message in result.err and result.out == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("the\tD\ndog\n", "line 2: one column"),
        ("the\tD\tx\n", "line 1: 3 columns"),
        ("the\t\n", "the tag is empty"),
        ("\n", "no tagged words"),
    ],
)
def test_invalid_tag_files(folder, content, message):
    from kvad.errors import DataError
    from kvad.evaluation.metrics import read_tagged

    path = folder / "bad.tsv"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        read_tagged([path])


def test_windows_have_the_trained_length(kvad, evaluate, tmp_path):
    """A model that was trained on 32 tokens and whose limit is 96: beyond 32, there is a warning."""
    text, run = tmp_path / "text.txt", tmp_path / "run"
    text.write_text(TEXT * 10)
    options = "--tokenizer byte --preset tiny --seq-len 32 --steps 1 --batch-size 1 --precision fp32"
    model = "--set model.max_seq_len=96 --set model.hidden_size=32"
    assert kvad("train", text, *options.split(), *model.split(), "--out", run).code == 0
    assert evaluate(run, text)["window"] == 32 and evaluate(run, text, "--policy", "window(16)")["window"] == 32
    assert "windows of 32 (as in training)" in kvad("eval", run, text).out
    longer = kvad("eval", run, text, "--window", 96)
    assert "windows of 96," in longer.out and "trained on 32" in longer.err
