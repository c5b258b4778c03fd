"""Training callbacks that run the engine: they change nothing, and report a broken cache."""

import dataclasses
import re
import shutil

import pytest
import torch

from kvad.cache.device.kv_cache import KVCache
from kvad.checkpoint.native import open_folder
from kvad.cli.main import main
from kvad.errors import ConfigError, RequestError, UsageError
from kvad.evaluation.training_callbacks import CheckCache, SamplePrompts, TranslationBleu, build_callbacks
from kvad.train.config.run import CallbacksConfig, RunConfig
from kvad.train.loop.run import read_run_config, train_model
from kvad.train.monitoring.metrics import read_metrics
from tests.train.conftest import corpus, run_config  # noqa: F401  fixtures

PAIRS = [("ab" * n + "c", "c" + "ba" * n) for n in range(1, 5)] * 12
SMALL = ("hidden_size=16", "encoder.num_layers=1", "decoder.num_layers=1", "train.log_interval=1")
SMALL = (*SMALL, "train.save_interval=2")


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{source}\t{target}\n" for source, target in PAIRS))
    return path


def lines(out, kind):
    return [line for line in read_metrics(out / "metrics.jsonl") if line["kind"] == kind]


def test_callbacks_do_not_change_the_run(corpus, run_config, tmp_path):  # noqa: F811
    config = run_config(steps=2, eval_interval=1)
    plain = train_model(config, [corpus], tmp_path / "plain")
    callbacks = [CheckCache(), SamplePrompts(["1 is", "2 is less"], tokens=3, temperature=0.8)]
    observed = train_model(config, [corpus], tmp_path / "observed", callbacks=callbacks)
    assert (plain.loss, plain.val_loss) == (observed.loss, observed.val_loss)
    one, other = (dict(open_folder(tmp_path / name).weights()) for name in ("plain", "observed"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    found = lines(tmp_path / "observed", "callback")
    assert [line["step"] for line in found] == [1, 2] and all(line["name"] == "cache" for line in found)
    assert all(0 < line["max_dlogit"] <= line["tolerance"] and line["greedy"] == line["tokens"] > 32 for line in found)
    samples = lines(tmp_path / "observed", "samples")
    assert [[sample["source"] for sample in line["samples"]] for line in samples] == [["1 is", "2 is less"]] * 2
    assert all(sample["text"] for line in samples for sample in line["samples"])


def test_cache_check_and_bleu_of_pairs(pairs, tmp_path):
    run = ["train", pairs, "--out", tmp_path / "run", "--preset", "transformer-tiny", "--tokenizer", "char"]
    run += ["--seq-len", 16, "--batch-size", 2, "--steps", 2, "--eval-interval", 1, "--precision", "fp32"]
    run += [part for each in SMALL for part in ("--set", each)]
    assert main([str(each) for each in (*run, "--check-cache", "--bleu-samples", 3, "--prompt", "ca")]) == 0
    found = lines(tmp_path / "run", "callback")
    assert [(line["step"], line["name"]) for line in found] == [(1, "cache"), (1, "bleu"), (2, "cache"), (2, "bleu")]
    assert all(line["max_dlogit"] <= line["tolerance"] for line in found if line["name"] == "cache")
    samples = [sample["source"] for line in lines(tmp_path / "run", "samples") for sample in line["samples"]]
    assert samples.count("ca") == 2
    bleu = found[-1]
    assert bleu["pairs"] == 3 and 0 <= bleu["bleu"] <= 100 and "|tok:13a|" in bleu["signature"]


def test_broken_cache_is_reported(corpus, run_config, tmp_path, monkeypatch, in_pytorch):  # noqa: F811
    open_step = KVCache.open

    def lossy_open(self, step):
        for positions in self.positions:
            positions[positions == 3] = -1
        return open_step(self, step)

    monkeypatch.setattr(KVCache, "open", lossy_open)
    reports = []

    class Recorder(CheckCache):
        def on_callback_report(self, report):
            reports.append(report)

    train_model(run_config(steps=2, eval_interval=2), [corpus], tmp_path / "run", callbacks=[Recorder(tokens=8)])
    assert reports[0].values["max_dlogit"] > reports[0].values["tolerance"] and "BEYOND ROUNDING" in reports[0].words


def test_impossible_callbacks_are_refused(corpus, run_config, tmp_path, capsys):  # noqa: F811
    with pytest.raises(UsageError, match=r"--bleu-samples.*: only what is trained on pairs"):
        train_model(run_config(), [corpus], tmp_path / "run", callbacks=[TranslationBleu(3)])
    assert not (tmp_path / "run" / "run.toml").exists()
    code = main(["train", str(corpus), "--objective", "summarizer", "--check-cache", "--out", str(tmp_path / "c")])
    message = "callbacks.check_cache: must not be given when a summarizer is trained"
    assert code == 2 and message in capsys.readouterr().err
    for name, model, callback, words in (
        ("encoder", {"preset": "encoder-tiny"}, SamplePrompts(["1 is"]), "an encoder continues no text"),
        ("long", {}, SamplePrompts(["1 is less than 2 " * 20]), "prompt: must have at most 32 tokens, got 340"),
    ):
        with pytest.raises((UsageError, RequestError), match=words):
            train_model(run_config(model=model), [corpus], tmp_path / name, callbacks=[callback])
        assert not (tmp_path / name / "checkpoints").exists(), "refused before the first step"


def test_resumed_run_keeps_its_callbacks(corpus, tmp_path, capsys):  # noqa: F811
    out, small = tmp_path / "run", ("--preset", "tiny", "--tokenizer", "char", "--seq-len", 16, "--batch-size", 2)
    words = ["train", corpus, "--out", out, *small, "--steps", 4, "--eval-interval", 2, "--save-interval", 2]
    words += ["--prompt", "1 is", "--prompt", "2 is", "--check-cache", "--set", "callbacks.max_tokens=2"]
    assert main([str(word) for word in words]) == 0
    wanted = CallbacksConfig(check_cache=True, prompts=("1 is", "2 is"), max_tokens=2)
    assert RunConfig.load(out / "run.toml").callbacks == wanted == read_run_config(out)[0].callbacks
    shutil.rmtree(out / "checkpoints" / "step-00000004")
    assert main(["train", "--resume", "--out", str(out)]) == 0
    assert (
        [line["step"] for line in lines(out, "samples")] == [2, 4] == [line["step"] for line in lines(out, "callback")]
    )
    shutil.rmtree(out / "checkpoints" / "step-00000004")
    more = ("--set", 'callbacks.prompts=["3 is"]', "--set", "callbacks.check_cache=false")
    assert main(["train", "--resume", "--out", str(out), *more]) == 0  # callbacks may change
    assert [sample["source"] for sample in lines(out, "samples")[-1]["samples"]] == ["3 is"]
    assert [line["step"] for line in lines(out, "callback")] == [2]
    capsys.readouterr()


def test_requested_callback_without_handler_is_refused(corpus, run_config, tmp_path):  # noqa: F811
    config = dataclasses.replace(run_config(), callbacks=CallbacksConfig(prompts=("1 is",), bleu_samples=3))
    with pytest.raises(UsageError, match=r"callbacks\.bleu_samples: no callback handles it"):
        train_model(config, [corpus], tmp_path / "run", callbacks=[SamplePrompts(["1 is"])])
    assert [type(each) for each in build_callbacks(config.callbacks)] == [SamplePrompts, TranslationBleu]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"max_tokens": 3}, "callbacks.max_tokens: has no meaning without callbacks.prompts"),
        ({"prompts": [""]}, "callbacks.prompts: must be non-empty texts"),
        ({"bleu_samples": 0}, "callbacks.bleu_samples: must be at least 1"),
        ({"prompt": ["a"]}, "unknown key callbacks.prompt"),
        ({"prompts": ["a"], "temperature": -1}, "callbacks.temperature: must be at least 0"),
    ],
)
def test_invalid_callbacks_are_refused(table, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        RunConfig.from_dict({"callbacks": table})
