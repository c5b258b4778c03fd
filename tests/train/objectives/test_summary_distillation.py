"""Training of a summarizer: loss, resume, refused configurations."""

import json

import pytest
import torch

from kvad.checkpoint.export import export_hf
from kvad.checkpoint.loader import load_model, open_checkpoint
from kvad.checkpoint.summarizer import load_summarizer, open_summarizer, sampled_fingerprint
from kvad.config.model import attention_specs
from kvad.errors import CheckpointError, ConfigError, UsageError
from kvad.llm import LLM
from kvad.model.no_cache import NoCache
from kvad.model.summarizer import Summarizer
from kvad.model_input import ModelInput, SubBatch
from kvad.train.config.run import RunConfig, SummarizerConfig
from kvad.train.data.collate import Batch
from kvad.train.loop import run as job
from kvad.train.loop.run import read_run_config, resume_model, train_model
from kvad.train.monitoring.metrics import read_metrics
from kvad.train.objectives.cross_entropy import Autocast
from kvad.train.objectives.summary_distillation import SummaryDistillation, _Recorder, _Rows
from kvad.train.setup.run_data import RunData
from tests.support.training_runs import assert_resume_is_exact, tiny_config
from tests.train.test_cli import kvad

PLAIN = Autocast("fp32", "cpu")
POLICY = "tiered(8, quantized=0, interval=8, summaries=32, ratio=4)"


@pytest.fixture(scope="module")
def model(tmp_path_factory, corpus):
    """A briefly trained model that counts."""
    out = tmp_path_factory.mktemp("model") / "run"
    config = tiny_config(data={"seq_len": 64}, lr=1e-2, steps=60, batch_size=8, save_interval=1000, eval_interval=1000)
    job.train_model(config, [corpus], out)
    return out


@pytest.fixture
def config(model):
    def make(summarizer=None, data=None, **changes):
        settings = {"steps": 12, "log_interval": 1, "eval_interval": 6, "save_interval": 4, "eval_tokens": 512}
        settings |= {"lr": 1e-2, "weight_decay": 0.0, "warmup_steps": 2, **changes}
        options = {"model": str(model), "ratio": 4, "recent": 8, "interval": 8, "hidden_size": 4, **(summarizer or {})}
        tables = {"model": {}, "tokenizer": {}, "objective": {"kind": "summarizer"}, "summarizer": options}
        return tiny_config(data={"seq_len": 64, **(data or {})}, tables=tables, **settings)

    return make


def test_loss_falls_below_that_of_means(config, corpus, tmp_path, listener, model):
    torch.manual_seed(0)
    outcome = train_model(config(steps=40), [corpus], tmp_path / "run", callbacks=[listener])
    opened = open_checkpoint(model)
    untrained = Summarizer(attention_specs(opened.config), 4, 4)
    frozen, _ = load_model(model)
    objective = SummaryDistillation(frozen, untrained, config().summarizer, PLAIN)
    run_data = RunData(config(), [corpus], lambda _: None)
    run_data.open(tmp_path / "data", opened.tokenizer)
    mean, tokens, _ = objective.evaluate_loss(run_data.data.evaluation())
    assert tokens > 256 and outcome.reason == "done" and outcome.val_loss < 0.8 * mean
    assert [line["kind"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")][-1] == "end"
    content = json.loads((outcome.checkpoint / "summarizer.json").read_text())
    assert (content["ratio"], content["recent"], content["val_loss"]) == (4, 8, outcome.val_loss)
    assert content["model"] == sampled_fingerprint(opened)


def test_resume_is_exact(config, corpus, tmp_path):
    _, parts = assert_resume_is_exact(config(), [corpus], tmp_path, stops=[3])
    assert read_run_config(parts)[0] == config()


def test_resume_refuses_another_configuration(config, corpus, tmp_path, model):
    train_model(config(steps=2), [corpus], tmp_path / "run")
    with pytest.raises(ConfigError, match=r"summarizer\.ratio: 4 there, 8 here"):
        resume_model(tmp_path / "run", config=config({"ratio": 8}, steps=2))
    (corpus / "00.txt").write_text((text := (corpus / "00.txt").read_text()) + " more")
    try:
        with pytest.raises(ConfigError, match=r"its corpus has changed: .*00\.txt"):
            resume_model(tmp_path / "run")
    finally:
        (corpus / "00.txt").write_text(text)


def other_model(model, out):
    """The same model after one more step."""
    config, paths = job.read_run_config(model)
    table = config.to_dict()
    table["train"]["steps"] = 61
    return job.train_model(RunConfig.from_dict(table), paths, out).checkpoint


def test_summarizer_of_another_model_is_refused(config, corpus, tmp_path, model):
    train_model(config(steps=2), [corpus], tmp_path / "run")
    other = other_model(model, tmp_path / "other")
    with pytest.raises(CheckpointError, match="trained for another model than"):
        LLM.load(other, summarizer=tmp_path / "run", policy=POLICY, block_size=4)
    with LLM.load(model, summarizer=tmp_path / "run", policy=POLICY, block_size=4) as llm:
        assert llm.generate("1 is less", max_tokens=40, temperature=0).usage.num_completion_tokens == 40


def test_fingerprint_is_independent_of_the_layout(tmp_path, model):
    _, opened = load_model(model)
    export_hf(opened, tmp_path / "theirs")
    assert sampled_fingerprint(open_checkpoint(tmp_path / "theirs")) == sampled_fingerprint(opened)


@pytest.mark.parametrize("file", ["summarizer.safetensors", "summarizer.json", "manifest.json"])
def test_incomplete_summarizer_is_refused(config, corpus, tmp_path, model, file):
    folder = train_model(config(steps=1), [corpus], tmp_path / "run").checkpoint
    (folder / file).unlink()
    with pytest.raises(CheckpointError):
        load_summarizer(folder, open_checkpoint(model))


def test_changed_options_are_applied(config, corpus, tmp_path, model):
    folder = train_model(config(steps=1), [corpus], tmp_path / "run").checkpoint
    content = bytearray((folder / "summarizer.safetensors").read_bytes())
    content[-3] ^= 1
    (folder / "summarizer.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="sha256"):
        open_summarizer(folder)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"summarizer": {"model": None}}, UsageError, "summarizer.model: must name a model"),
        ({"summarizer": {"model": "nowhere"}}, CheckpointError, "nowhere"),
        ({"summarizer": {"recent": 64}}, ConfigError, "rows of 64 tokens have nothing older than 64"),
        ({"data": {"seq_len": 128}}, ConfigError, "data.seq_len: 128 is beyond the model's limit of 64"),
        ({"summarizer": {"ratio": 1}}, ConfigError, "summarizer.ratio: must be at least 2"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(config, corpus, tmp_path, change, error, message):
    with pytest.raises(error, match=message):
        train_model(config(**change), [corpus], tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_command(corpus, tmp_path, model, monkeypatch):
    out = tmp_path / "run"
    changes = [part for change in ("ratio=4", "recent=8", "interval=8") for part in ("--set", change)]
    options = ["--objective", "summarizer", "--init", model, *changes]
    quick = ["--seq-len", 64, "--batch-size", 2, "--steps", 2, "--precision", "fp32"]
    code, stdout, stderr = kvad("train", corpus, "--out", out, *options, *quick, "--json")
    assert code == 0 and json.loads(stdout)["config"]["summarizer"]["ratio"] == 4, stderr
    assert f"kvad generate {model} --summarizer {out}" in stderr
    code, _, stderr = kvad("train", "--resume", "--out", out, "--eval-interval", 7)
    assert code == 0 and "2 steps" in stderr
    code, stdout, stderr = kvad("generate", model, "1 is", "--summarizer", out, "--policy", POLICY, "--block-size", 4,
                                "--max-tokens", 20)  # fmt: skip
    assert code == 0, stderr
    code, _, stderr = kvad("generate", model, "1 is", "--summarizer", out)
    assert code == 2 and "the cache's policy has no summaries" in stderr
    code, _, stderr = kvad("train", corpus, "--out", tmp_path / "b", *options, "--preset", "tiny")
    assert code == 2 and "[model]: must be empty, because the model is" in stderr
    code, _, stderr = kvad("train", corpus, "--out", tmp_path / "b", "--init", model, "--set", "summarizer.ratio=4")
    assert code == 2 and "[summarizer] is for --objective summarizer" in stderr


# ---------------------------------------------------------------- packed documents


def packed():
    """A row of 40 tokens: documents of 18 and 22; with ratio 4 the chunk 16..19 spans both."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 250, (40,), generator=generator)
    positions, documents = torch.cat((torch.arange(18), torch.arange(22))), torch.tensor([0] * 18 + [1] * 22)
    step = ModelInput(tokens, positions, (SubBatch(1, 40, 40),), torch.arange(40), document_ids=documents)
    return Batch(step, tokens)


def test_chunk_of_two_documents_is_not_summarized():
    rows = _Rows(packed().model_input, SummarizerConfig(ratio=4, recent=8, interval=8))
    last = rows.spans[-1]
    assert (last.first, last.low, last.high) == (24, 32, 40)
    assert last.older.keys.position[0].tolist() == [1, 5, 9, 13, -1, 3]
    assert last.older.keys.document_id[0].tolist() == [0, 0, 0, 0, 0, 1]
    assert (
        last.exact.keys.position[0, 16:20].tolist() == [16, 17, 0, 1]
        and int((last.exact.keys.position >= 0).sum()) == 4
    )


def test_summaries_of_documents_are_isolated(model):
    """The first document's tokens do not change the second one's outputs."""
    frozen, opened = load_model(model)
    compressor = Summarizer(attention_specs(opened.config), 4, 4)
    results = []
    for token in (1, 2):
        batch = packed()
        batch.model_input.token_ids[:18] = token
        rows = _Rows(batch.model_input, SummarizerConfig(ratio=4, recent=8, interval=8))
        recorder = _Recorder(NoCache(opened.config), [0])
        with torch.no_grad():
            frozen(batch.model_input, recorder)
            results.append([answer for _, answer in rows.answers(recorder.records[0], compressor.by_layer()[0])][-1])
    assert torch.equal(*results)
