"""Training on pairs from files to translations: learning, cached decoding, resume, commands."""

import itertools
import json
import random

import pytest

from kvad.checkpoint.loader import load_model
from kvad.checkpoint.native import open_folder
from kvad.cli.output import program_path
from kvad.errors import ConfigError, DataError, UsageError
from kvad.llm import LLM
from kvad.text.tokenizer import train_tokenizer
from kvad.train.config.run import RunConfig
from kvad.train.loop.run import read_run_config, resume_model, train_model
from kvad.train.monitoring.metrics import read_metrics
from kvad.train.monitoring.samples import greedy_decode
from kvad.train.setup.initialize import init_weights
from kvad.train.sources.pairs import PairPaths, pair_generation_config
from tests.support.training_runs import assert_resume_is_exact, tiny_config, tiny_shape
from tests.train.test_cli import RUN, kvad

SMALL = tiny_shape("encoder-decoder", layers=1, mlp=64)
WORDS = ["".join(letters) for n in (1, 2, 3, 4) for letters in itertools.product("abcd", repeat=n)]


@pytest.fixture(scope="session")
def reversals(tmp_path_factory):
    """340 words of at most four letters, each with its reverse."""
    words = list(WORDS)
    random.Random(0).shuffle(words)
    path = tmp_path_factory.mktemp("pairs") / "reversals.tsv"
    path.write_text("".join(f"{word}\t{word[::-1]}\n" for word in words))
    return path


@pytest.fixture
def pair_config():
    """``pair_config(steps=20, data={...})``: a tiny model of pairs of characters."""

    def make(*, data=None, tokenizer=None, model=None, **settings):
        model = model or {"preset": "transformer-tiny", "set": SMALL}
        settings = {"steps": 10, "batch_size": 2, "log_interval": 1, "eval_interval": 4, "save_interval": 4, **settings}
        data = {"seq_len": 24, **(data or {})}
        return tiny_config(model=model, data=data, tokenizer=tokenizer or {"kind": "char"}, **settings)

    return make


def test_a_tiny_model_learns_to_reverse(reversals, tmp_path, pair_config, listener):
    out = tmp_path / "run"
    settings = {"lr": 1e-2, "beta2": 0.98, "batch_size": 16, "warmup_steps": 20}
    config = pair_config(steps=300, eval_interval=300, save_interval=1000, data={"seq_len": 16}, **settings)
    outcome = train_model(config, [reversals], out, callbacks=[listener])
    assert listener.steps[0].loss > 1.5 and outcome.val_loss < 0.15, "it has not learned to reverse"
    held_out = [line.split("\t") for line in reversals.read_text().splitlines()[-34:]]
    with LLM.load(out, max_num_seqs=8) as llm:
        done = llm.generate([source for source, _ in held_out])
        right = sum(answer.text == target for answer, (_, target) in zip(done, held_out, strict=True))
        assert right >= 27, f"{right} of 34 held-out words"
        assert done[0].choices[0].finish_reason == "stop"
        eos = llm.tokenizer.special_tokens.eos
        assert llm.encode("abc")[-1] == eos, "a source ends as it did in training"
        ids = llm.tokenizer.encode(held_out[0][0])
        assert llm.generate([*ids, eos]).text == done[0].text
    sample = listener.samples[-1].samples[0]
    assert (sample.source, sample.target) == tuple(held_out[0]) and sample.text == done[0].text
    assert any(line["kind"] == "samples" for line in read_metrics(out / "metrics.jsonl"))


def test_greedy_decoding_without_a_cache_equals_the_engine(reversals, tmp_path, pair_config):
    train_model(pair_config(), [reversals], tmp_path / "run")
    model, opened = load_model(tmp_path / "run")
    with LLM.load(tmp_path / "run", max_num_seqs=4) as llm:
        sources = [llm.encode(word) for word in ("a", "abcd", "dcba", "bb")]
        found = greedy_decode(model, sources, opened.generation, 9)
        for source, ids in zip(sources, found, strict=True):
            tokens = llm.generate(source, max_tokens=9).tokens
            assert list(tokens)[: len(ids)] == ids and (len(ids) == 9 or tokens[-1] in opened.generation.eos_token_ids)


def test_the_checkpoint_has_generation_settings(reversals, tmp_path, pair_config):
    train_model(pair_config(steps=1), [reversals], tmp_path / "run")
    opened = open_folder(tmp_path / "run")
    assert opened.config.kind == "encoder-decoder" and opened.generation == pair_generation_config(opened.tokenizer)


@pytest.mark.parametrize("kind", ["bpe", "byte", "word"])
def test_every_kind_of_tokenizer_has_the_tokens_of_pairs(reversals, tmp_path, pair_config, kind):
    config = pair_config(steps=1, tokenizer={"kind": kind, "vocab_size": 300 if kind == "bpe" else 900})
    train_model(config, [reversals], tmp_path / "run")
    with LLM.load(tmp_path / "run", max_num_seqs=1) as llm:
        assert llm.encode("abc")[-1] == llm.tokenizer.special_tokens.eos
        assert llm.generate("abc", max_tokens=3).usage.num_completion_tokens <= 3


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("preset", "layout"), [("transformer-tiny", "model"), ("marian-tiny", "model_type")])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_resume_is_exact(reversals, tmp_path, pair_config, precision, preset, layout):
    scale = 32**0.5  # Marian's is sqrt(width) or none
    model = {"preset": preset, "set": {**SMALL, "embedding.scale": scale, "encoder_input.embedding.scale": scale}}
    config = pair_config(steps=12, gradient_accumulation_steps=2, precision=precision, model=model)
    whole, parts = assert_resume_is_exact(config, [reversals], tmp_path, stops=[3, 9])
    assert open_folder(parts).generation == open_folder(whole).generation
    assert layout in json.loads((open_folder(parts).path / "config.json").read_text())
    kinds = [[(e["kind"], e["step"]) for e in read_metrics(out / "metrics.jsonl")[1:]] for out in (whole, parts)]
    assert kinds[0] == kinds[1]


def test_parallel_files_with_files_held_out(tmp_path, pair_config, listener):
    sides = {}
    for name, words in (("train", WORDS[:300]), ("val", WORDS[300:330])):
        for side, turn in (("src", 1), ("tgt", -1)):
            sides[name, side] = tmp_path / f"{name}.{side}"
            sides[name, side].write_text("".join(f"{word[::turn]}\n" for word in words))
    paths = PairPaths(((sides["train", "src"], sides["train", "tgt"]),), ((sides["val", "src"], sides["val", "tgt"]),))
    out = tmp_path / "run"
    train_model(pair_config(eval_tokens=0), paths, out, callbacks=[listener])
    assert listener.evals[0].val_tokens == sum(len(word) + 1 for word in WORDS[300:330])
    assert listener.start.train_tokens == sum(len(word) + 1 for word in WORDS[:300])
    assert read_run_config(out)[1] == paths
    assert resume_model(out).step == 10
    swapped = PairPaths(paths.held_out, paths.files)
    with pytest.raises(ConfigError, match="its corpus has changed"):
        resume_model(out, corpus=swapped)
    sides["val", "tgt"].write_text(sides["val", "tgt"].read_text().replace("a", "b"))
    with pytest.raises(ConfigError, match=r"its corpus has changed: .*/val.tgt"):
        resume_model(out)


def test_pairs_are_refused_for_a_decoder(reversals, tmp_path, run_config, pair_config):
    with pytest.raises(UsageError, match=r"pairs are for an encoder-decoder.*--preset transformer-tiny"):
        train_model(run_config(), PairPaths(((reversals,),)), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"data\.file_suffixes"):
        train_model(pair_config(data={"file_suffixes": [".tsv"]}), [reversals], tmp_path / "run")
    train_tokenizer("byte", []).save(tmp_path / "mute")
    with pytest.raises(DataError, match="no BOS token"):
        train_model(pair_config(tokenizer={"path": str(tmp_path / "mute")}), [reversals], tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_initial_weights_of_an_encoder_decoder():
    """Embedded tokens have elements of about 1; the first loss is not far from ln V."""
    import torch

    from kvad.model.transformer import Transformer
    from kvad.train.config.presets import MODEL_PRESETS

    torch.manual_seed(0)
    model = Transformer(MODEL_PRESETS["transformer-tiny"](500, 64))
    init_weights(model)
    assert model.token_embedding.std().item() * model.config.embedding.scale == pytest.approx(1, abs=0.02)
    up = model.encoder.layers[0].mlp.up
    assert up.weight.std().item() == pytest.approx((2 / (128 + 512)) ** 0.5, rel=0.02)
    assert not up.bias.any() and (model.decoder.layers[0].norm1.weight == 1).all()


# ---------------------------------------------------------------- the command


SHAPE = [part for key, value in SMALL.items() for part in ("--set", f"{key}={value}")]
QUICK = ["--preset", "transformer-tiny", *RUN, *SHAPE]


def test_the_command_trains_on_a_tsv_and_translates(tmp_path):
    file, out = tmp_path / "a.tsv", tmp_path / "run"
    file.write_text("abc\tcba\n" * 40 + "\tx\n" + "x" * 30 + "\ty\n" + "ab\tba\n" * 9)
    code, stdout, stderr = kvad("train", file, "--out", out, *QUICK, "--steps", 2, "--json")
    assert code == 0, stderr
    assert "corpus: 50 pairs in 1 file" in stderr and "1 pair with an empty side left out" in stderr
    assert "left out: 1 pair longer than data.seq_len 16 (the longest side has 31 tokens)" in stderr
    assert "packed: " in stderr and "of the sources and" in stderr and "  < ab\n  = ba\n  > " in stderr
    assert f"next:  {program_path()} translate {out}" in stderr and json.loads(stdout)["step"] == 2
    assert "tokens:" in stderr and (out / "loss.png").exists()
    code, stdout, stderr = kvad("translate", out, file.with_name("a.tsv"), "--max-tokens", 2)
    assert code in (0, 1) and len(stdout.splitlines()) == 51
    code, _, stderr = kvad("train", "--resume", "--out", out)
    assert code == 0 and "from step 2" in stderr


def test_the_command_reads_parallel_files_and_validation_files(tmp_path):
    for name, lines in {"a.de": 12, "a.en": 12, "v.de": 3, "v.en": 3, "short.en": 2}.items():
        (tmp_path / name).write_text("ab\n" * lines)
    (tmp_path / "v.tsv").write_text("ab\tab\n" * 4)
    pairs = ["--pairs", tmp_path / "a.de", tmp_path / "a.en"]

    def run(*flags):
        return kvad("train", "--out", tmp_path / "run", *QUICK, "--steps", 1, "--overwrite", *flags)

    for flags, held in (
        (["--validation-pairs", tmp_path / "v.de", tmp_path / "v.en"], 3),
        (["--validation", tmp_path / "v.tsv"], 4),
        (["--validation", tmp_path / "v.tsv", "--validation-pairs", tmp_path / "v.de", tmp_path / "v.en"], 7),
    ):
        code, _, stderr = run(*pairs, *flags)
        assert code == 0 and f"{held} of them for validation" in stderr, stderr
    assert run(*pairs, "--validation", "0.5")[0] == 0
    code, _, stderr = kvad("train", "--out", tmp_path / "other", "--preset", "tiny", *pairs)
    assert code == 2 and "pairs are for an encoder-decoder" in stderr
    for flags, message in (
        (["--pairs", tmp_path / "a.de", tmp_path / "short.en"], "a.de has 12 lines, "),
        ([*pairs, "--validation", tmp_path / "no.tsv"], "no such file: "),
        ([*pairs, "--validation", "2"], "data.validation_fraction: must be between 0 and 1"),
        ([tmp_path / "a.de"], "a.de, line 1: no tab"),
        ([], "no pairs were named"),
        (["--validation", tmp_path / "v.tsv"], "no pairs were named"),
        ([*pairs, "--seq-len", "2"], "no pair is left for training: none of 11 pairs fits data.seq_len 2"),
        ([*pairs, "--batch-size", "100000000"], "training on 100,000,000 rows"),
    ):
        code, stdout, stderr = run(*flags)
        assert code == (1 if "--batch-size" in flags else 2), stderr
        assert message in stderr and not stdout and "Traceback" not in stderr, stderr


def test_translate_with_an_adapter(reversals, tmp_path, pair_config):
    """Base with adapter, the adapter's run, and the merged model are equal; another base is refused."""
    base, other = (
        train_model(pair_config(steps=2, seed=seed), [reversals], tmp_path / f"base{seed}").checkpoint
        for seed in (0, 1)
    )
    content = pair_config(steps=40, lr=2e-2).to_dict()
    content |= {"model": {"init": str(base)}, "tokenizer": {}, "lora": {"rank": 4, "target_modules": "all"}}
    adapted = RunConfig.from_dict(content)
    adapter = train_model(adapted, [reversals], tmp_path / "adapter").checkpoint
    assert kvad("merge", base, adapter, "--out", tmp_path / "merged")[0] == 0
    (tmp_path / "lines").write_text("abc\n\nda\ncbba\n")
    options = [tmp_path / "lines", "--max-tokens", 6, "--num-beams", 2, "--json"]
    outputs = {}
    for name, model in {
        "base": [base],
        "both": [base, "--adapter", adapter],
        "run": [base, "--adapter", tmp_path / "adapter"],
        "alone": [adapter],
        "merged": [tmp_path / "merged"],
    }.items():
        code, stdout, stderr = kvad("translate", model[0], *options, *model[1:])
        assert code == 0, stderr
        lines = [json.loads(line) for line in stdout.splitlines()]
        outputs[name] = [(line["text"], line["score"]) for line in lines]
    assert len(outputs["base"]) == 4 and outputs["both"] == outputs["run"] == outputs["alone"] == outputs["merged"]
    assert all(
        one[0] != two[0] for one, two in zip(outputs["base"], outputs["both"], strict=True) if one[1] is not None
    )
    for model, named, why in (
        (other, adapter, "this adapter was trained on another model than"),
        (base, other, "is not an adapter: it is a complete model"),
        (base, tmp_path / "none", "is not an adapter: no such folder"),
    ):
        code, stdout, stderr = kvad("translate", model, *options, "--adapter", named)
        line, hint = stderr.splitlines()
        assert (code, stdout) == (2, "") and why in line and hint.startswith("kvad: hint: "), stderr
