"""kvad translate, tag, fill, classify, embed: a line in is a line out, in order; what fails costs no other line."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from kvad.checkpoint.generation_config import GenerationConfig
from kvad.checkpoint.native import save_checkpoint
from kvad.cli import line_batches
from kvad.cli.commands.encode import _filling
from kvad.cli.line_batches import LineSource, LineTask, answer_lines
from kvad.config.layers import (
    AttentionConfig,
    ClassificationHeadConfig,
    EmbeddingConfig,
    HeadTransformConfig,
    LanguageHeadConfig,
    LayerConfig,
    LearnedPositionsConfig,
    NormConfig,
    PlainMLPConfig,
    PoolingHeadConfig,
    StackConfig,
)
from kvad.config.model import EncoderInputConfig, ModelConfig
from kvad.engine.output import MaskPrediction
from kvad.errors import NumericalError, RequestError
from kvad.llm import LLM
from kvad.text.tokenizer import load_tokenizer, train_tokenizer
from tests.cli.test_main import ROOT, kvad_process
from tests.support.cli_checkpoints import run, write_model
from tests.support.random_models import build

LIMIT = 32
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [*SPECIALS, "the", "cat", "sat", "on", "a", "mat", "dog", "ran", "to", "his", "house", "by", "lake"]
HEADS = {
    "fill-mask": LanguageHeadConfig(
        bias=True, transform=HeadTransformConfig("gelu", norm=NormConfig("layer", bias=True))
    ),
    "tag": ClassificationHeadConfig(("O", "B-PER", "I-PER")),
    "classify": ClassificationHeadConfig(("bad", "good", "neither"), level="row"),
    "embed": PoolingHeadConfig("mean", normalize=True),
}
TEXT = b"the cat sat on a mat\n\na dog\r\nhis house by the lake\n   \nthe dog ran to the house"
LINES = ["the cat sat on a mat", "", "a dog", "his house by the lake", "", "the dog ran to the house"]


def word_tokenizer(folder):
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(SPECIALS)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    backend.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    """Command -> the folder of an encoder with the head that it needs."""
    folder = tmp_path_factory.mktemp("encoders")
    tokenizer = word_tokenizer(folder)
    layer = LayerConfig(
        AttentionConfig(4, position=None, causal=False, qkv_bias=True),
        PlainMLPConfig(40, bias=True),
        NormConfig("layer", bias=True),
    )
    found = {}
    for command, head in HEADS.items():
        config = ModelConfig(
            hidden_size=24,
            vocab_size=len(WORDS),
            max_seq_len=LIMIT,
            encoder=StackConfig(2, {"L": layer}, norm_position="post", final_norm=False),
            embedding=EmbeddingConfig(LearnedPositionsConfig(LIMIT), norm=NormConfig("layer", bias=True)),
            head=head,
        )
        save_checkpoint(folder / command, config, build(config).float().state_dict(), tokenizer)
        found[command] = folder / command
    return found


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    """An encoder-decoder that speaks bytes, and ends at none of them."""
    folder = tmp_path_factory.mktemp("translators") / "tiny"
    return write_translator(folder, train_tokenizer("byte", []), start=256)


def write_translator(folder, tokenizer, start, banned=(), **search):
    mixer, free = AttentionConfig(4, 2), AttentionConfig(4, position=None, causal=False)
    decoder = LayerConfig(mixer, PlainMLPConfig(40), cross_attention=free)
    encoder = LayerConfig(AttentionConfig(4, causal=False), PlainMLPConfig(40))
    config = ModelConfig(
        hidden_size=24,
        vocab_size=tokenizer.vocab_size,
        max_seq_len=40,
        decoder=StackConfig(2, {"L": decoder}),
        encoder=StackConfig(2, {"L": encoder}),
        encoder_input=EncoderInputConfig(LIMIT),
    )
    said = GenerationConfig(
        decoder_start_token_id=start,
        eos_token_ids=(start,),
        suppress_tokens=banned,
        sampling={"max_tokens": 6, "temperature": 0.0, **search},
    )
    save_checkpoint(folder, config, build(config).float().state_dict(), tokenizer, generation=said)
    return folder


@pytest.fixture
def kvad(capsys, monkeypatch):
    return lambda *arguments, stdin=None: run(capsys, *arguments, stdin=stdin, monkeypatch=monkeypatch)


def objects(ran):
    return [json.loads(line) for line in ran.out.splitlines()]


# ---------------------------------------------------------------- lines, whoever answers them


def lengths(ask):
    """A task whose answer to a line is the sum of its bytes."""
    return LineTask(lambda text: list(text.encode()), ask, lambda n, answer: str(answer), lambda a: {"sum": a}, empty=0)


class Fed(LineSource):
    """Lines of a list."""

    def __init__(self, given):
        self.given, self.total = list(given), None

    def take(self, most):
        taken, self.given = self.given[:most], self.given[most:]
        return taken


def test_answers_come_in_order_in_batches_of_like_length(monkeypatch):
    monkeypatch.setattr(line_batches, "WINDOW_SIZES", (4, 8))
    monkeypatch.setattr(line_batches, "BATCH_LINES", 3)
    given = [b"x" * (1 + 7 * i % 11) for i in range(23)]
    batches = []

    def ask(many):
        batches.append([len(ids) for ids in many])
        return [sum(ids) for ids in many]

    found = list(answer_lines(Fed(given), lengths(ask)))
    assert [line.number for line in found] == list(range(1, 24))
    assert [line.answer for line in found] == [120 * len(raw) for raw in given]
    assert [sum(map(len, batches[:2])), sum(map(len, batches[2:5]))] == [4, 8]
    assert all(batch == sorted(batch) and len(batch) <= 3 for batch in batches)
    assert {max(batch) - min(batch) for batch in batches[2:5]} <= {1, 2, 3, 4}


def test_an_answer_is_shown_as_soon_as_those_before_it_are(monkeypatch):
    monkeypatch.setattr(line_batches, "BATCH_LINES", 1)
    asked = []
    found = answer_lines(Fed([b"", b"a", b"b"]), lengths(lambda many: asked.extend(many) or [1] * len(many)))
    assert next(found).number == 1 and asked == []
    assert next(found).number == 2 and asked == [[97]]


def test_a_line_that_fails_in_the_engine_costs_no_other_its_answer():
    def ask(many):
        if [98] in many:
            raise NumericalError("request 1, sample 0: numerical")
        return [sum(ids) for ids in many]

    found = list(answer_lines(Fed([b"a", b"b", b"c"]), lengths(ask)))
    assert [(line.answer, line.error) for line in found] == [
        (97, None),
        (None, "request 1, sample 0: numerical"),
        (99, None),
    ]


def test_what_nobody_can_be_asked_ends_everything():
    def ask(many):
        raise RequestError("5 beams need as many rows")

    with pytest.raises(RequestError):
        list(answer_lines(Fed([b"a"]), lengths(ask)))


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
def test_a_file_is_cut_at_its_newlines(tmp_path, content, expected):
    path = tmp_path / "lines"
    path.write_bytes(content)
    with LineSource(path) as lines:
        assert lines.total == len(content)
        found = []
        while taken := lines.take(2):
            found += taken
    assert found == expected


def test_a_pipe_that_pauses_is_not_waited_for(monkeypatch):
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


def test_translations_in_the_order_of_the_lines(kvad, translator, tmp_path):
    texts = ["Ein Haus", "a", "am See, im Wald", "", "zwei", "drei Tage"]
    with LLM.load(translator) as llm:
        expected = [llm.generate(text, max_tokens=6, temperature=0).text if text else "" for text in texts]
    expected = [" ".join(text.splitlines()) for text in expected]
    (tmp_path / "in").write_text("\n".join(texts) + "\n")
    ran = kvad("translate", translator, tmp_path / "in")
    assert (ran.code, ran.err) == (0, "") and ran.out.split("\n")[:-1] == expected
    stdin = (tmp_path / "in").read_bytes()
    assert kvad("translate", translator, stdin=stdin) == ran == kvad("translate", translator, "-", stdin=stdin)
    assert kvad("translate", translator, "-", "--max-num-seqs", 1, "--max-seq-len", 20, stdin=stdin) == ran


def test_translations_as_json_and_the_n_best(kvad, translator):
    with LLM.load(translator) as llm:
        done = llm.generate("Haus", num_beams=3, n=2, max_tokens=6)
    (one, nothing) = objects(
        kvad("translate", translator, "--n-best", 2, "--num-beams", 3, "--json", stdin=b"Haus\n\n")
    )
    assert (
        one["line"] == 1
        and one["text"] == done.text
        and one["score"] == pytest.approx(done.choices[0].cumulative_logprob)
    )
    assert [each["text"] for each in one["translations"]] == [sample.text for sample in done.choices]
    assert nothing == {"line": 2, "text": "", "score": None, "translations": []}
    rows = kvad("translate", translator, "--n-best", 2, "--num-beams", 3, stdin=b"Haus\n\n").out.split("\n")[:-1]
    assert [row.split("\t")[0] for row in rows] == ["1", "1", "2"] and rows[2] == "2\t\t"
    assert rows[0].split("\t")[1] == f"{done.choices[0].cumulative_logprob:.4f}"
    same = kvad("translate", translator, "--n-best", 3, "--json", stdin=b"Haus\n")
    assert len(objects(same)[0]["translations"]) == 3


def test_sampling_and_length(kvad, translator):
    def say(*flags):
        return objects(kvad("translate", translator, "--json", *flags, stdin=b"Haus\n"))[0]["text"]

    assert len({say("--temperature", 1.5, "--seed", seed) for seed in range(6)}) > 3
    assert say("--temperature", 1.5, "--seed", 3) == say("--temperature", 1.5, "--seed", 3)
    assert say("--seed", 3) == say("--temperature", 1.0, "--seed", 3) != say("--seed", 4)
    assert say("--top-k", 1) == say() == say("--num-beams", 1)
    assert len(say("--max-tokens", 2).encode("utf-8", "replace")) < len(say().encode())


def test_over_the_search_that_the_checkpoint_asks_for(kvad, tmp_path):
    folder = write_translator(tmp_path / "beams", train_tokenizer("byte", []), 256, num_beams=3, length_penalty=2.0)

    def say(*flags):
        ran = kvad("translate", folder, "--json", *flags, stdin=b"Haus\n")
        assert ran.code == 0 and ran.err == "", ran
        return objects(ran)[0]

    with LLM.load(folder) as llm:
        (said,), (asked,) = (llm.generate("Haus", **more).choices for more in ({}, {"length_penalty": -1.0}))
    assert say() == {"line": 1, "text": said.text, "score": pytest.approx(said.cumulative_logprob)}
    assert say("--length-penalty", -1) == {
        "line": 1,
        "text": asked.text,
        "score": pytest.approx(asked.cumulative_logprob),
    }
    assert say("--seed", 3) == say("--temperature", 1, "--seed", 3) and say("--seed", 3)["score"] is None


def test_a_penalty_of_no_search_is_refused(kvad, translator):
    ran = kvad("translate", translator, "--length-penalty", 0.5, stdin=b"Haus\n")
    assert (ran.code, ran.out) == (2, "") and "requires num_beams above 1" in ran.err


def test_a_translation_under_a_policy_is_the_model_s_under_it(kvad, translator):
    with LLM.load(translator, policy="window(3)", max_num_seqs=1, max_seq_len=24) as llm:
        told = llm.generate("Haus", max_tokens=20, temperature=0).text
    flags = ("--policy", "window(3)", "--max-tokens", 20)
    assert kvad("translate", translator, *flags, stdin=b"Haus\n") == (0, " ".join(told.splitlines()) + "\n", "")
    assert kvad("translate", translator, *flags, "--overflow", "reject", stdin=b"Haus\n").out == told + "\n"
    refused = kvad("translate", translator, "--policy", "windw(3)", stdin=b"Haus\n")
    assert refused.code == 2 and "did you mean 'window'" in refused.err


def test_a_prefix_begins_every_translation(kvad, translator):
    with LLM.load(translator) as llm:
        tokens = llm.generate("Haus", max_tokens=6, temperature=0, target_prefix=[256, *b"The "]).tokens
        expected = llm.tokenizer.decode([*b"The ", *tokens])
    found = objects(kvad("translate", translator, "--prefix", "The ", "--json", stdin=b"Haus\n\n"))
    assert found[0]["text"] == expected and found[1]["text"] == ""


def test_languages(kvad, tmp_path):
    """The source is framed in its language, the target begins with its own, and a prefix comes after that."""
    names = [*SPECIALS, "deu_Latn", "eng_Latn"]
    backend = Backend(models.WordLevel({word: i for i, word in enumerate([*names, *WORDS[5:]])}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(names)
    backend.post_processor = processors.TemplateProcessing(
        single="eng_Latn $A [SEP]", special_tokens=[("eng_Latn", 6), ("[SEP]", 3)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    folder = write_translator(tmp_path / "model", load_tokenizer(tmp_path), start=3, banned=(0, 1, 2, 4, 5, 6))
    asked = {"source_language": "deu_Latn", "language": "eng_Latn", "max_tokens": 6, "temperature": 0}
    with LLM.load(folder) as llm:
        plain = llm.generate("the cat", **asked).text
        tokens = llm.generate([5, 7, 8, 3], target_prefix=[3, 6, 15], max_tokens=6, temperature=0).tokens
        began = llm.tokenizer.decode([15, *tokens])
    assert began.startswith("to ") and plain not in ("", began)
    flags = ("--source-language", "deu_Latn", "--language", "eng_Latn", "--json")
    assert objects(kvad("translate", folder, *flags, stdin=b"the cat"))[0]["text"] == plain
    assert objects(kvad("translate", folder, *flags, "--prefix", "to", stdin=b"the cat"))[0]["text"] == began
    for flag, code in (("--language", "fra_Latn"), ("--source-language", "eng")):
        ran = kvad("translate", folder, flag, code, stdin=b"the cat")
        assert ran.code == 2 and ran.out == "" and f"unknown language {code!r}" in ran.err, ran


def test_what_became_unk_is_told_once(kvad, encoders):
    ran = kvad("tag", encoders["tag"], stdin=b"the cat\nthe ufo\na yeti\nthe end\n")
    assert ran.code == 0 and ran.err.splitlines() == [
        "kvad: line 2: 1 piece of text not in the vocabulary became UNK: 'ufo'",
        "kvad: the same in 2 other lines",
    ]


def test_a_line_too_long_or_broken_is_told_and_costs_no_other(kvad, translator):
    text = b"ab\n" + b"x" * (LIMIT + 1) + b"\nab\n\xff\n"
    ran = kvad("translate", translator, stdin=text)
    first, second, third, fourth = ran.out.split("\n")[:-1]
    assert ran.code == 1 and first == third != "" and second == fourth == ""
    assert ran.err.splitlines() == [
        f"kvad: line 2: encoder input: must have at most {LIMIT} tokens, got {LIMIT + 1}",
        "kvad: line 4: not UTF-8 at byte 0 (0xFF)",
        "kvad: 2 of 4 lines failed",
    ]
    found = objects(kvad("translate", translator, "--json", stdin=text))
    assert [set(one) for one in found] == [{"line", "text", "score"}, {"line", "error"}] * 2


@pytest.mark.parametrize(
    ("flags", "says"),
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
def test_options_that_cannot_be_are_refused_before_anything_is_opened(kvad, tmp_path, flags, says):
    ran = kvad("translate", tmp_path / "absent", *flags, stdin=b"")
    assert ran.code == 2 and ran.out == "" and says in ran.err.splitlines()[0], ran


def test_what_the_model_cannot_do_is_refused_before_a_line_is_read(kvad, translator):
    for flags, says in (
        (("--language", "deu_Latn"), "unknown language 'deu_Latn'"),
        (("--source-language", "deu_Latn"), "language 'deu_Latn'"),
        (
            ("--num-beams", 4, "--max-num-seqs", 2),
            "--max-num-seqs: must be at least 4, the beams or samples of a line, got 2",
        ),
        (("--max-num-seqs", 0), "cache.max_num_seqs: must be at least 1, got 0"),
    ):
        ran = kvad("translate", translator, *flags, stdin=b"a\nb\n")
        assert ran.code == 2 and ran.out == "" and says in ran.err.splitlines()[0], ran


# ---------------------------------------------------------------- encoders


def test_tags(kvad, encoders):
    with LLM.load(encoders["tag"]) as llm:
        expected = [llm.tag(text) if text else () for text in LINES]
    ran = kvad("tag", encoders["tag"], stdin=TEXT)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.split("\n")[:-1] == [" ".join(f"{each.word}/{each.label}" for each in words) for words in expected]
    assert ran.out.startswith("the/") and len(ran.out.split("\n")[0].split()) == 6
    found = objects(kvad("tag", encoders["tag"], "--json", stdin=TEXT))
    assert [one["line"] for one in found] == [1, 2, 3, 4, 5, 6] and found[1]["words"] == []
    assert [one["word"] for one in found[2]["words"]] == ["a", "dog"]
    assert found[2]["words"][0]["probability"] == pytest.approx(expected[2][0].probability, abs=1e-5)


def test_labels_of_lines(kvad, encoders):
    with LLM.load(encoders["classify"]) as llm:
        expected = [llm.classify(text)[0] if text else None for text in LINES]
    ran = kvad("classify", encoders["classify"], "--batch-size", 2, stdin=TEXT)
    assert ran.code == 0
    assert ran.out.split("\n")[:-1] == [f"{one.label}\t{one.probability:.4f}" if one else "" for one in expected]
    found = objects(kvad("classify", encoders["classify"], "--json", stdin=TEXT))
    assert {label["label"] for label in found[0]["labels"]} == {"bad", "good", "neither"} and found[1]["labels"] == []


def test_masks(kvad, encoders):
    text = b"the [MASK] sat\n\nthe cat sat\nthe [MASK] [MASK] on a mat\n"
    with LLM.load(encoders["fill-mask"]) as llm:
        ids = [[2, 5, 4, 7, 3], [2, 5, 4, 4, 8, 9, 10, 3]]
        one, two = llm.fill_mask(ids, top=2)
    ran = kvad("fill-mask", encoders["fill-mask"], "--top-k", 2, stdin=text)
    rows = ran.out.split("\n")[:-1]
    assert ran.code == 1 and ran.err.startswith(
        "kvad: line 3: the line has no mask; write [MASK] for each masked token\n"
    )
    assert rows[0] == "\t".join(f"{each.text} {each.probability:.4f}" for each in one[0])
    assert rows[1] == rows[2] == "" and rows[3].count("\t|\t") == 1
    found = objects(kvad("fill-mask", encoders["fill-mask"], "--top-k", 2, "--json", stdin=text))
    assert [each["token"] for each in found[3]["masks"][1]] == [each.token for each in two[1]]
    assert found[1]["masks"] == [] and set(found[2]) == {"line", "error"}
    assert found[0]["masks"][0][0]["whole"] == one[0][0].whole


def test_a_token_that_breaks_lines_is_shown_in_one(encoders):
    """Byte-level vocabularies have tokens of a newline or a tab."""
    found = [MaskPrediction(1, "a\nå\t", 0.5, ""), MaskPrediction(2, " b", 0.25, "")]
    with LLM.load(encoders["fill-mask"]) as llm:
        assert _filling(llm, 2).plain(1, [found, found[1:]]) == "a\\nå\\t 0.5000\t b 0.2500\t|\t b 0.2500"


def test_vectors_as_json(kvad, encoders):
    with LLM.load(encoders["embed"]) as llm:
        expected = llm.embed([text for text in LINES if text])
    ran = kvad("embed", encoders["embed"], stdin=TEXT)
    found = objects(ran)
    assert ran.code == 0 and [one["line"] for one in found] == [1, 2, 3, 4, 5, 6]
    assert found[1]["embedding"] is None and found[4]["embedding"] is None
    got = torch.tensor([one["embedding"] for one in found if one["embedding"]])
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
    assert kvad("embed", encoders["embed"], "--json", stdin=TEXT) == ran


def test_vectors_in_files(kvad, encoders, tmp_path):
    text = b"\n" + TEXT + b"\n" + b"cat " * LIMIT + b"\n"
    printed = kvad("embed", encoders["embed"], "--pooling", "first", stdin=text)
    for flags in (("--out", tmp_path / "v.npy"), ("--format", "npy", "--out", tmp_path / "v.bin")):
        ran = kvad("embed", encoders["embed"], "--pooling", "first", *flags, stdin=text)
        assert ran.code == 1 and ran.out == "" and ran.err == printed.err
        found = np.load(flags[-1])
        assert found.shape == (8, 24) and found.dtype == np.float32
        assert np.isnan(found).all(axis=1).tolist() == [True, False, True, False, False, True, False, True]
        assert found[1].tolist() == pytest.approx(objects(printed)[1]["embedding"])
    assert kvad("embed", encoders["embed"], "--pooling", "first", "--out", tmp_path / "v.jsonl", stdin=text).out == ""
    assert (tmp_path / "v.jsonl").read_text() == printed.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v.bin", "v.jsonl", "v.npy"]


def test_no_vectors_at_all_and_files_that_cannot_be(kvad, encoders, tmp_path):
    ran = kvad("embed", encoders["embed"], "--out", tmp_path / "v.npy", stdin=b"\n\n")
    assert ran.code == 0 and np.load(tmp_path / "v.npy").shape == (2, 0)
    for flags, says in (
        (("--format", "npy"), "--format npy needs --out FILE"),
        (("--format", "npy", "--json"), "--json and --format npy exclude each other"),
        (("--out", tmp_path / "absent" / "v.npy"), "cannot write"),
    ):
        ran = kvad("embed", encoders["embed"], *flags, stdin=TEXT)
        assert ran.code == 2 and ran.out == "" and says in ran.err.splitlines()[0], ran


def test_an_encoder_decoder_embeds_its_sources(kvad, translator):
    with LLM.load(translator) as llm:
        expected = llm.embed(["Haus", "am See"], pool="mean")
    found = objects(kvad("embed", translator, stdin=b"Haus\nam See\n"))
    torch.testing.assert_close(torch.tensor([one["embedding"] for one in found]), expected, atol=1e-6, rtol=1e-5)


# ---------------------------------------------------------------- what is refused, and what ends early


@pytest.mark.parametrize("command", ["translate", "tag", "fill-mask", "classify", "embed"])
def test_a_model_of_another_kind_is_refused_with_what_it_can_do(kvad, encoders, translator, tmp_path, command):
    decoder = write_model(tmp_path / "decoder")
    others = {"kvad generate, kvad chat": decoder, "kvad translate, kvad embed": translator}
    others |= {f"kvad {name}, kvad embed": encoders[name] for name in ("fill-mask", "tag", "classify")}
    for can, folder in others.items():
        if f"kvad {command}" not in can:
            ran = kvad(command, folder, stdin=b"a\n")
            assert ran.code == 2 and ran.out == "" and f"kvad {command} does not accept it" in ran.err, ran
            assert ran.err.splitlines()[1] == f"kvad: hint: use {can}"


def test_bad_input_is_one_line(kvad, encoders, translator, tmp_path):
    for arguments, says in (
        (("tag", tmp_path / "absent"), "absent"),
        (("tag", encoders["tag"], tmp_path / "no.txt"), "no.txt: no such file or folder"),
        (("tag", encoders["tag"], tmp_path), "it is a folder"),
        (("tag", encoders["tag"], "--batch-size", 0), "cache.max_num_seqs: must be at least 1"),
        (("fill-mask", encoders["fill-mask"], "--top-k", 0), "0 is not in the range"),
    ):
        ran = kvad(*arguments, stdin=b"a\n")
        assert ran.code == 2 and ran.out == "" and says in ran.err.splitlines()[0], ran


def test_ctrl_c_keeps_what_was_printed(kvad, encoders, monkeypatch):
    monkeypatch.setattr(line_batches, "WINDOW_SIZES", (2,))
    real, calls = LLM.tag, []

    def tag(self, many):
        calls.append(many)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(self, many)

    monkeypatch.setattr(LLM, "tag", tag)
    ran = kvad("tag", encoders["tag"], stdin=TEXT)
    assert ran.code == 130 and len(ran.out.splitlines()) == 2 and ran.err == "kvad: interrupted after 2 lines\n"


def test_a_reader_that_goes_away_ends_it_quietly(encoders, tmp_path):
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


@pytest.mark.parametrize("command", ["translate", "tag", "fill-mask", "classify", "embed"])
def test_help_has_examples_and_does_not_import_torch(command):
    ran = kvad_process(command, "--help", code="import atexit\natexit.register(lambda: print('torch' in sys.modules))")
    assert ran.returncode == 0 and ran.stdout.endswith("False\n") and ran.stdout.count(f"kvad {command} ") >= 2, ran
