"""``kvad translate`` and the commands of encoders: answers in the order of the lines, and failed lines."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from kvad.checkpoint.generation_config import GenerationConfig
from kvad.checkpoint.native import save_checkpoint
from kvad.cli import line_batches
from kvad.cli.commands.batch import _filling
from kvad.cli.line_batches import LineSource, LineTask, answer_lines
from kvad.config.layers import ClassificationHeadConfig, PoolingHeadConfig
from kvad.engine.output import MaskPrediction
from kvad.errors import NumericalError, RequestError
from kvad.llm import LLM
from kvad.text.tokenizer import load_tokenizer, train_tokenizer
from tests.cli.test_main import ROOT
from tests.support.random_models import build, encoder_config, pair_config

LIMIT = 32
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [*SPECIALS, "the", "cat", "sat", "on", "a", "mat", "dog", "ran", "to", "his", "house", "by", "lake"]
HEADS = {
    "fill-mask": encoder_config().head,
    "tag": ClassificationHeadConfig(("O", "B-PER", "I-PER")),
    "classify": ClassificationHeadConfig(("bad", "good", "neither"), level="row"),
    "embed": PoolingHeadConfig("mean", normalize=True),
}
TEXT = b"the cat sat on a mat\n\na dog\r\nhis house by the lake\n   \nthe dog ran to the house"
LINES = ["the cat sat on a mat", "", "a dog", "his house by the lake", "", "the dog ran to the house"]


def word_tokenizer(folder, specials=SPECIALS, first="[CLS]"):
    words = [*specials, *WORDS[len(SPECIALS) :]]
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(specials)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{first} $A [SEP]", special_tokens=[(first, words.index(first)), ("[SEP]", 3)]
    )
    backend.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    """Command -> the folder of an encoder with the head that it needs."""
    folder = tmp_path_factory.mktemp("encoders")
    tokenizer = word_tokenizer(folder)
    folders = {}
    for command, head in HEADS.items():
        config = replace(encoder_config(), vocab_size=len(WORDS), max_seq_len=LIMIT, head=head, tie_embeddings=False)
        save_checkpoint(folder / command, config, build(config).float().state_dict(), tokenizer)
        folders[command] = folder / command
    return folders


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    """An encoder-decoder of bytes, none of which is an end token."""
    folder = tmp_path_factory.mktemp("translators") / "tiny"
    return write_translator(folder, train_tokenizer("byte", []), start=256)


def write_translator(folder, tokenizer, start, banned=(), **search):
    config = replace(pair_config(), vocab_size=tokenizer.vocab_size, max_seq_len=40)
    config = replace(config, encoder_input=replace(config.encoder_input, max_seq_len=LIMIT))
    generation = GenerationConfig(
        decoder_start_token_id=start,
        eos_token_ids=(start,),
        suppress_tokens=banned,
        sampling={"max_tokens": 6, "temperature": 0.0, **search},
    )
    save_checkpoint(folder, config, build(config).float().state_dict(), tokenizer, generation=generation)
    return folder


def objects(result):
    return [json.loads(line) for line in result.out.splitlines()]


# ---------------------------------------------------------------- reading and batching lines


def sum_task(answer_batch):
    """A task whose answer to a line is the sum of its bytes."""
    return LineTask(
        lambda text: list(text.encode()), answer_batch, lambda n, answer: str(answer), lambda a: {"sum": a}, empty=0
    )


class ListSource(LineSource):
    """Lines of a list."""

    def __init__(self, lines):
        self.lines, self.total = list(lines), None

    def take(self, most):
        taken, self.lines = self.lines[:most], self.lines[most:]
        return taken


def test_answers_are_in_order_and_batched_by_length(monkeypatch):
    monkeypatch.setattr(line_batches, "WINDOW_SIZES", (4, 8))
    monkeypatch.setattr(line_batches, "BATCH_LINES", 3)
    lines = [b"x" * (1 + 7 * i % 11) for i in range(23)]
    batches = []

    def answer_batch(many):
        batches.append([len(ids) for ids in many])
        return [sum(ids) for ids in many]

    results = list(answer_lines(ListSource(lines), sum_task(answer_batch)))
    assert [line.number for line in results] == list(range(1, 24))
    assert [line.answer for line in results] == [120 * len(raw) for raw in lines]
    assert [sum(map(len, batches[:2])), sum(map(len, batches[2:5]))] == [4, 8]
    assert all(batch == sorted(batch) and len(batch) <= 3 for batch in batches)
    assert {max(batch) - min(batch) for batch in batches[2:5]} <= {1, 2, 3, 4}


def test_answer_is_yielded_as_soon_as_earlier_ones(monkeypatch):
    monkeypatch.setattr(line_batches, "BATCH_LINES", 1)
    batches = []
    results = answer_lines(
        ListSource([b"", b"a", b"b"]), sum_task(lambda many: batches.extend(many) or [1] * len(many))
    )
    assert next(results).number == 1 and batches == []
    assert next(results).number == 2 and batches == [[97]]


def test_engine_error_of_one_line_keeps_other_answers():
    def answer_batch(many):
        if [98] in many:
            raise NumericalError("request 1, sample 0: numerical")
        return [sum(ids) for ids in many]

    results = list(answer_lines(ListSource([b"a", b"b", b"c"]), sum_task(answer_batch)))
    assert [(line.answer, line.error) for line in results] == [
        (97, None),
        (None, "request 1, sample 0: numerical"),
        (99, None),
    ]


def test_usage_error_of_the_engine_is_raised():
    def answer_batch(many):
        raise RequestError("5 beams need as many rows")

    with pytest.raises(RequestError):
        list(answer_lines(ListSource([b"a"]), sum_task(answer_batch)))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", []),
        (b"\n", [b""]),
        (b"a", [b"a"]),
        (b"a\n", [b"a"]),
        (b"a\n\nb", [b"a", b"", b"b"]),
        (b"x" * 300_000 + b"\ny\n", [b"x" * 300_000, b"y"]),
    ],
)
def test_file_is_split_at_newlines(tmp_path, content, expected):
    path = tmp_path / "lines"
    path.write_bytes(content)
    with LineSource(path) as lines:
        assert lines.total == len(content)
        results = []
        while taken := lines.take(2):
            results += taken
    assert results == expected


def test_paused_pipe_returns_complete_lines(monkeypatch):
    read, write = os.pipe()
    with os.fdopen(read, "rb") as stdin, os.fdopen(write, "wb", buffering=0) as feed:
        monkeypatch.setattr(sys, "stdin", type("Stdin", (), {"buffer": stdin}))
        lines = LineSource(None)
        feed.write(b"one\ntw")
        assert lines.take(64) == [b"one"]
        feed.write(b"o\nthree\n")
        assert lines.take(1) == [b"two"]
        feed.close()
        assert lines.take(64) == [b"three"] and lines.take(64) == []


# ---------------------------------------------------------------- translate


def test_translations_are_in_line_order(kvad, translator, tmp_path):
    texts = ["Ein Haus", "a", "am See, im Wald", "", "zwei", "drei Tage"]
    with LLM.load(translator) as llm:
        expected = [llm.generate(text, max_tokens=6, temperature=0).text if text else "" for text in texts]
    expected = [" ".join(text.splitlines()) for text in expected]
    (tmp_path / "in").write_text("\n".join(texts) + "\n")
    result = kvad("translate", translator, tmp_path / "in")
    assert (result.code, result.err) == (0, "") and result.out.split("\n")[:-1] == expected
    stdin = (tmp_path / "in").read_bytes()
    assert kvad("translate", translator, stdin=stdin) == result == kvad("translate", translator, "-", stdin=stdin)
    assert kvad("translate", translator, "-", "--max-num-seqs", 1, "--max-seq-len", 20, stdin=stdin) == result


def test_translations_as_json_and_n_best(kvad, translator):
    with LLM.load(translator) as llm:
        best, second = llm.generate("Haus", num_beams=3, n=2, max_tokens=6).choices
    command = f"translate {translator} --n-best 2 --num-beams 3"
    (one, empty) = objects(kvad(f"{command} --json", stdin=b"Haus\n\n"))
    assert (one["line"], one["text"], one["score"]) == (1, best.text, pytest.approx(best.cumulative_logprob))
    assert [each["text"] for each in one["translations"]] == [best.text, second.text]
    assert empty == {"line": 2, "text": "", "score": None, "translations": []}
    rows = kvad(command, stdin=b"Haus\n\n").out.split("\n")[:-1]
    assert [row.split("\t")[0] for row in rows] == ["1", "1", "2"] and rows[2] == "2\t\t"
    assert rows[0].split("\t")[1] == f"{best.cumulative_logprob:.4f}"
    many = kvad(f"translate {translator} --n-best 3 --json", stdin=b"Haus\n")
    assert len(objects(many)[0]["translations"]) == 3


def test_sampling_and_length(kvad, translator):
    def translate(*flags):
        return objects(kvad("translate", translator, "--json", *flags, stdin=b"Haus\n"))[0]["text"]

    assert len({translate("--temperature", 1.5, "--seed", seed) for seed in range(4)}) > 2
    assert translate("--temperature", 1.5, "--seed", 3) == translate("--temperature", 1.5, "--seed", 3)
    assert translate("--seed", 3) == translate("--temperature", 1.0, "--seed", 3) != translate("--seed", 4)
    assert translate("--top-k", 1) == translate() == translate("--num-beams", 1)
    assert len(translate("--max-tokens", 2).encode("utf-8", "replace")) < len(translate().encode())


def test_search_settings_of_the_checkpoint(kvad, tmp_path):
    folder = write_translator(tmp_path / "beams", train_tokenizer("byte", []), 256, num_beams=3, length_penalty=2.0)

    def translate(*flags):
        result = kvad("translate", folder, "--json", *flags, stdin=b"Haus\n")
        assert result.code == 0 and result.err == "", result
        return objects(result)[0]

    with LLM.load(folder) as llm:
        (default,), (penalized,) = (llm.generate("Haus", **more).choices for more in ({}, {"length_penalty": -1.0}))
    assert translate() == {"line": 1, "text": default.text, "score": pytest.approx(default.cumulative_logprob)}
    score = pytest.approx(penalized.cumulative_logprob)
    assert translate("--length-penalty", -1) == {"line": 1, "text": penalized.text, "score": score}
    assert translate("--seed", 3) == translate("--temperature", 1, "--seed", 3)
    assert translate("--seed", 3)["score"] is None


def test_translation_with_a_policy(kvad, translator):
    with LLM.load(translator, policy="window(3)", max_num_seqs=1, max_seq_len=24) as llm:
        expected = llm.generate("Haus", max_tokens=20, temperature=0).text
    flags = ("--policy", "window(3)", "--max-tokens", 20)
    assert kvad("translate", translator, *flags, stdin=b"Haus\n") == (0, " ".join(expected.splitlines()) + "\n", "")
    assert kvad("translate", translator, *flags, "--overflow", "reject", stdin=b"Haus\n").out == expected + "\n"
    rejected = kvad("translate", translator, "--policy", "windw(3)", stdin=b"Haus\n")
    assert rejected.code == 2 and "did you mean 'window'" in rejected.err


def test_prefix_begins_every_translation(kvad, translator):
    with LLM.load(translator) as llm:
        tokens = llm.generate("Haus", max_tokens=6, temperature=0, target_prefix=[256, *b"The "]).tokens
        expected = llm.tokenizer.decode([*b"The ", *tokens])
    results = objects(kvad("translate", translator, "--prefix", "The ", "--json", stdin=b"Haus\n\n"))
    assert results[0]["text"] == expected and results[1]["text"] == ""


def test_languages(kvad, tmp_path):
    """The source is framed in its language, the target begins with its own, and the prefix follows."""
    tokenizer = word_tokenizer(tmp_path, [*SPECIALS, "deu_Latn", "eng_Latn"], "eng_Latn")
    folder = write_translator(tmp_path / "model", tokenizer, start=3, banned=(0, 1, 2, 4, 5, 6))
    options = {"source_language": "deu_Latn", "language": "eng_Latn", "max_tokens": 6, "temperature": 0}
    with LLM.load(folder) as llm:
        plain = llm.generate("the cat", **options).text
        tokens = llm.generate([5, 7, 8, 3], target_prefix=[3, 6, 15], max_tokens=6, temperature=0).tokens
        began = llm.tokenizer.decode([15, *tokens])
    assert began.startswith("to ") and plain not in ("", began)
    flags = ("--source-language", "deu_Latn", "--language", "eng_Latn", "--json")
    assert objects(kvad("translate", folder, *flags, stdin=b"the cat"))[0]["text"] == plain
    assert objects(kvad("translate", folder, *flags, "--prefix", "to", stdin=b"the cat"))[0]["text"] == began
    for flag, code in (("--language", "fra_Latn"), ("--source-language", "eng")):
        result = kvad("translate", folder, flag, code, stdin=b"the cat")
        assert result.code == 2 and result.out == "" and f"unknown language {code!r}" in result.err, result


def test_unknown_text_is_reported_once(kvad, encoders):
    result = kvad("tag", encoders["tag"], stdin=b"the cat\nthe ufo\na yeti\nthe end\n")
    assert result.code == 0
    assert result.err.splitlines() == [
        "kvad: line 2: 1 piece of text not in the vocabulary became UNK: 'ufo'",
        "kvad: the same in 2 other lines",
    ]


def test_invalid_line_is_reported_and_keeps_other_answers(kvad, translator):
    text = b"ab\n" + b"x" * (LIMIT + 1) + b"\nab\n\xff\n"
    result = kvad("translate", translator, stdin=text)
    first, second, third, fourth = result.out.split("\n")[:-1]
    assert result.code == 1 and first == third != "" and second == fourth == ""
    assert result.err.splitlines() == [
        f"kvad: line 2: encoder input: must have at most {LIMIT} tokens, got {LIMIT + 1}",
        "kvad: line 4: not UTF-8 at byte 0 (0xFF)",
        "kvad: 2 of 4 lines failed",
    ]
    results = objects(kvad("translate", translator, "--json", stdin=text))
    assert [set(one) for one in results] == [{"line", "text", "score"}, {"line", "error"}] * 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--num-beams", 0), "num_beams: must be from 1 to 128, got 0"),
        (("--n-best", 0), "--n-best: 0 is out of range"),
        (("--n-best", 3, "--num-beams", 2), "--n-best 3 exceeds --num-beams 2"),
        (("--num-beams", 2, "--seed", 3), "seed: cannot be combined with num_beams=2"),
        (("--temperature", -1), "temperature: must be from 0 to 100, got -1.0"),
        (("--max-tokens", -1), "max_tokens: must be at least 0, got -1"),
        (("--dtype", "int8"), "'int8' is not one of"),
    ],
)
def test_invalid_options_fail_before_opening(kvad, tmp_path, flags, message):
    result = kvad("translate", tmp_path / "absent", *flags, stdin=b"")
    assert result.code == 2 and result.out == "" and message in result.err.splitlines()[0], result


def test_unsupported_options_fail_before_reading(kvad, translator):
    for flags, message in (
        ("--language deu_Latn", "unknown language 'deu_Latn'"),
        ("--source-language deu_Latn", "language 'deu_Latn'"),
        ("--num-beams 4 --max-num-seqs 2", "--max-num-seqs: must be at least 4, the beams or samples of a line, got 2"),
        ("--max-num-seqs 0", "cache.max_num_seqs: must be at least 1, got 0"),
        ("--length-penalty 0.5", "requires num_beams above 1"),
    ):
        result = kvad(f"translate {translator} {flags}", stdin=b"a\nb\n")
        assert result.code == 2 and result.out == "" and message in result.err.splitlines()[0], result


# ---------------------------------------------------------------- encoders


def test_tags(kvad, encoders):
    with LLM.load(encoders["tag"]) as llm:
        expected = [llm.tag(text) if text else () for text in LINES]
    result = kvad("tag", encoders["tag"], stdin=TEXT)
    assert (result.code, result.err) == (0, "")
    assert result.out.split("\n")[:-1] == [
        " ".join(f"{each.word}/{each.label}" for each in words) for words in expected
    ]
    assert result.out.startswith("the/") and len(result.out.split("\n")[0].split()) == 6
    results = objects(kvad("tag", encoders["tag"], "--json", stdin=TEXT))
    assert [one["line"] for one in results] == [1, 2, 3, 4, 5, 6] and results[1]["words"] == []
    assert [one["word"] for one in results[2]["words"]] == ["a", "dog"]
    assert results[2]["words"][0]["probability"] == pytest.approx(expected[2][0].probability, abs=1e-5)


def test_labels_of_lines(kvad, encoders):
    with LLM.load(encoders["classify"]) as llm:
        expected = [llm.classify(text)[0] if text else None for text in LINES]
    result = kvad("classify", encoders["classify"], "--batch-size", 2, stdin=TEXT)
    assert result.code == 0
    assert result.out.split("\n")[:-1] == [f"{one.label}\t{one.probability:.4f}" if one else "" for one in expected]
    results = objects(kvad("classify", encoders["classify"], "--json", stdin=TEXT))
    assert {label["label"] for label in results[0]["labels"]} == {"bad", "good", "neither"}
    assert results[1]["labels"] == []


def test_masks(kvad, encoders):
    text = b"the [MASK] sat\n\nthe cat sat\nthe [MASK] [MASK] on a mat\n"
    with LLM.load(encoders["fill-mask"]) as llm:
        ids = [[2, 5, 4, 7, 3], [2, 5, 4, 4, 8, 9, 10, 3]]
        one, two = llm.fill_mask(ids, top=2)
    result = kvad("fill-mask", encoders["fill-mask"], "--top-k", 2, stdin=text)
    rows = result.out.split("\n")[:-1]
    assert result.code == 1
    assert result.err.startswith("kvad: line 3: the line has no mask; write [MASK] for each masked token\n")
    assert rows[0] == "\t".join(f"{each.text} {each.probability:.4f}" for each in one[0])
    assert rows[1] == rows[2] == "" and rows[3].count("\t|\t") == 1
    results = objects(kvad("fill-mask", encoders["fill-mask"], "--top-k", 2, "--json", stdin=text))
    assert [each["token"] for each in results[3]["masks"][1]] == [each.token for each in two[1]]
    assert results[1]["masks"] == [] and set(results[2]) == {"line", "error"}
    assert results[0]["masks"][0][0]["whole"] == one[0][0].whole


def test_unprintable_tokens_are_escaped(encoders):
    """Byte-level vocabularies have tokens of a newline or a tab."""
    results = [MaskPrediction(1, "a\nå\t", 0.5, ""), MaskPrediction(2, " b", 0.25, "")]
    with LLM.load(encoders["fill-mask"]) as llm:
        assert _filling(llm, 2).plain(1, [results, results[1:]]) == "a\\nå\\t 0.5000\t b 0.2500\t|\t b 0.2500"


def test_vectors_as_json(kvad, encoders):
    with LLM.load(encoders["embed"]) as llm:
        expected = llm.embed(LINES)  # an empty line is the empty text
    result = kvad("embed", encoders["embed"], stdin=TEXT)
    results = objects(result)
    assert result.code == 0 and [one["line"] for one in results] == [1, 2, 3, 4, 5, 6]
    got = torch.tensor([one["embedding"] for one in results])
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
    assert kvad("embed", encoders["embed"], "--json", stdin=TEXT) == result


def test_vectors_in_files(kvad, encoders, tmp_path):
    text = b"\n" + TEXT + b"\n" + b"cat " * LIMIT + b"\n"
    printed = kvad("embed", encoders["embed"], "--pooling", "first", stdin=text)
    for flags in (("--out", tmp_path / "v.npy"), ("--format", "npy", "--out", tmp_path / "v.bin")):
        result = kvad("embed", encoders["embed"], "--pooling", "first", *flags, stdin=text)
        assert result.code == 1 and result.out == "" and result.err == printed.err
        results = np.load(flags[-1])
        assert results.shape == (8, 24) and results.dtype == np.float32
        assert np.isnan(results).all(axis=1).tolist() == [False] * 7 + [True]  # the last is too long
        assert results[1].tolist() == pytest.approx(objects(printed)[1]["embedding"])
    assert kvad("embed", encoders["embed"], "--pooling", "first", "--out", tmp_path / "v.jsonl", stdin=text).out == ""
    assert (tmp_path / "v.jsonl").read_text() == printed.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v.bin", "v.jsonl", "v.npy"]


def test_no_vectors_and_invalid_outputs(kvad, encoders, tmp_path):
    result = kvad("embed", encoders["embed"], "--out", tmp_path / "v.npy", stdin=b"cat " * LIMIT)
    assert result.code == 1 and np.load(tmp_path / "v.npy").shape == (1, 0)
    result = kvad("embed", encoders["embed"], "--out", tmp_path / "v.npy", stdin=b"\n\n")
    assert result.code == 0 and np.isfinite(np.load(tmp_path / "v.npy")).all(axis=1).tolist() == [True, True]
    for flags, message in (
        (("--format", "npy"), "--format npy needs --out FILE"),
        (("--format", "npy", "--json"), "--json and --format npy exclude each other"),
        (("--out", tmp_path / "v.npy" / "v.npy"), "cannot save"),
        (("--out", tmp_path / "v.csv"), "--out: no format has the suffix '.csv'. Name it v.npy or v.jsonl"),
        (("--prompt-name", "query"), "unknown prompt 'query'"),
    ):
        result = kvad("embed", encoders["embed"], *flags, stdin=TEXT)
        assert result.code == 2 and result.out == "", result
        assert message in result.err.replace("\n", " "), result


def test_encoder_decoder_embeds_sources(kvad, translator):
    with LLM.load(translator) as llm:
        expected = llm.embed(["Haus", "am See"], pool="mean")
    results = objects(kvad("embed", translator, stdin=b"Haus\nam See\n"))
    torch.testing.assert_close(torch.tensor([one["embedding"] for one in results]), expected, atol=1e-6, rtol=1e-5)


# ---------------------------------------------------------------- invalid input and interrupts


@pytest.mark.parametrize("command", ["translate", "tag", "fill-mask", "classify", "embed"])
def test_model_of_another_kind_is_rejected(kvad, encoders, translator, model, command):
    others = {"kvad generate, kvad chat, kvad embed": model, "kvad translate, kvad embed": translator}
    others |= {f"kvad {name}, kvad embed": encoders[name] for name in ("fill-mask", "tag", "classify")}
    for commands, folder in others.items():
        if f"kvad {command}" not in commands:
            result = kvad(command, folder, stdin=b"a\n")
            assert result.code == 2 and result.out == "" and f"kvad {command} does not accept it" in result.err, result
            assert result.err.splitlines()[1] == f"kvad: hint: use {commands}"


def test_invalid_input_is_one_line(kvad, encoders, translator, tmp_path):
    for arguments, message in (
        (("tag", tmp_path / "absent"), "absent"),
        (("tag", encoders["tag"], tmp_path / "no.txt"), "no.txt: no such file or folder"),
        (("tag", encoders["tag"], tmp_path), "it is a folder"),
        (("tag", encoders["tag"], "--batch-size", 0), "0 is not in the range"),
        (("fill-mask", encoders["fill-mask"], "--top-k", 0), "0 is not in the range"),
    ):
        result = kvad(*arguments, stdin=b"a\n")
        assert result.code == 2 and result.out == "" and message in result.err.splitlines()[0], result


def test_ctrl_c_keeps_printed_lines(kvad, encoders, monkeypatch):
    monkeypatch.setattr(line_batches, "WINDOW_SIZES", (2,))
    real, calls = LLM.tag, []

    def tag(self, many):
        calls.append(many)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(self, many)

    monkeypatch.setattr(LLM, "tag", tag)
    result = kvad("tag", encoders["tag"], stdin=TEXT)
    assert result.code == 130 and len(result.out.splitlines()) == 2
    assert result.err == "kvad: interrupted after 2 lines\n"


def test_closed_pipe_ends_quietly(encoders, tmp_path):
    (tmp_path / "in").write_bytes(b"the cat\n" * 500)
    program = (
        f"import sys; from kvad.cli.main import main; "
        f"sys.exit(main(['tag', {str(encoders['tag'])!r}, {str(tmp_path / 'in')!r}]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout.readline().startswith(b"the/")
    process.stdout.close()
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (141, b"")
