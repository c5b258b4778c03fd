"""``kvad.train``, ``kvad.plan`` and ``kvad.verify``: the functions behind the commands, and their reports."""

import inspect
import json

import pytest

import kvad
import kvad.train
import kvad.verify
from kvad.api.training import RENAMED_SETTINGS, SETTING_TABLES, merge_settings
from kvad.errors import UsageError
from kvad.train.config import RunConfig, TrainConfig
from tests.support.cli_checkpoints import write_model
from tests.support.training_runs import tiny_shape

TABLES = {"model": {"preset": "tiny", "set": tiny_shape(layers=1, mlp=32)}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def corpus(tmp_path):
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(f"text {number} of a small corpus. " * 20)
    return sorted(tmp_path.glob("*.txt"))


def test_train_returns_the_result_and_resumes(corpus, tmp_path, capsys):
    settings = {"seq_len": 16, "batch_size": 2, "precision": "fp32", "kind": "byte"}
    done = kvad.train(corpus, tmp_path / "run", config=TABLES, steps=3, progress=False, **settings)
    assert (done.reason, done.step) == ("done", 3) and json.loads(json.dumps(done.to_dict()))["step"] == 3
    assert capsys.readouterr().err == ""
    more = kvad.train((), tmp_path / "run", resume=True, steps=4)
    assert more.step == 4 and "changed: train.steps: 3 -> 4" in capsys.readouterr().err
    assert kvad.LLM.load(tmp_path / "run").model.config.decoder.num_layers == 1


def test_a_setting_overrides_the_config_and_names_one_key():
    config = RunConfig(train=TrainConfig(steps=5, seed=2))
    tables = merge_settings(config.to_dict(), {"steps": 7, "lora_rank": 4, "objective": "chat", "prompts": ("a",)})
    assert tables["train"]["steps"] == 7 and tables["train"]["seed"] == 2
    assert tables["lora"]["rank"] == 4 and tables["objective"]["kind"] == "chat"
    assert tables["callbacks"]["prompts"] == ["a"]
    names = [name for kind in SETTING_TABLES.values() for name in kind.__dataclass_fields__]
    assert len(names) == len({*names}) and not {*names} & {*RENAMED_SETTINGS}


def test_plan_equals_the_command(model, capsys):
    report = kvad.plan(model, max_num_seqs=2, max_seq_len=32, cache_dtype="int8", bandwidth=1e9, memory=2**30)
    from kvad.cli.main import main

    words = ["plan", str(model), "--max-num-seqs", "2", "--max-seq-len", "32", "--cache-dtype", "int8"]
    assert main([*words, "--bandwidth", "1", "--memory", "1GiB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(report.to_dict()))
    assert repr(report).startswith("PlanReport(") and repr(report).endswith("available 1.00 GiB: fits)")
    assert kvad.plan("llama-3-8b", memory=2**30, max_seq_len=64, max_num_seqs=1, bandwidth=1e9).is_too_large


def test_plan_lists_what_fits():
    report = kvad.plan("gpt2", fit_memory=2**30, fit_seq_lens=(256,), compression_ratios=(0.5,), bandwidth=1e9)
    assert {row.context for row in report.table.rows} == {256}


def test_verify_returns_a_verdict(model):
    steps = []
    report = kvad.verify(
        model, prompts=["ab", "cde"], cache_dtypes=("float32",), layouts=("paged",), max_tokens=4, preempt=False,
        prefix_hit=False, progress=steps.append,
    )  # fmt: skip
    assert not report.broken and report.verdict() == "exact (paged float32)"
    assert repr(report).startswith("VerifyReport(exact (paged float32); ") and steps
    assert len(report.rows) >= 2 and report.to_dict()["verdict"] == report.verdict()


@pytest.mark.parametrize(
    ("call", "nearest"),
    [
        (lambda: kvad.train("a", "b", step=3), "'step'; did you mean 'steps'"),
        (lambda: kvad.plan("gpt2", max_len=3), "'max_len'"),
        (lambda: kvad.verify("a", layout="paged"), "'layout'; did you mean 'layouts'"),
    ],
)
def test_an_unknown_setting_is_refused(call, nearest):
    with pytest.raises(UsageError) as error:
        call()
    name, _, hint = nearest.partition("; ")
    assert f"unknown setting {name}" in error.value.message and hint in error.value.hint


def test_packages_are_functions_too():
    assert "corpus" in inspect.signature(kvad.train).parameters
    assert "prompts" in inspect.signature(kvad.verify).parameters
    assert kvad.train.config.RunConfig is RunConfig
