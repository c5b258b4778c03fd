"""Run files: every key is applied or refused by name."""

from pathlib import Path

import pytest

from kvad.config import Gated, LearnedPositions, Plain, Rope
from kvad.errors import ConfigError
from kvad.train.config import DataConfig, RunConfig, TrainConfig, differences, parse_assignments
from kvad.train.presets import PRESETS

ROOT = Path(__file__).parents[2]


def run(**tables):
    return RunConfig.from_dict(tables)


def test_the_recipe_with_gpt2s_learned_positions_is_one_flag_away():
    table = RunConfig.load(ROOT / "runs" / "shakespeare-char-cpu.toml").to_dict()
    table["model"]["set"] = {"position": {"kind": "learned", "size": 64}, "decoder.kinds.L.mixer.position": None}
    model = RunConfig.from_dict(table).resolve(66)
    assert model.position == LearnedPositions(64) and model.decoder.layer(0).mixer.position is None


def test_an_empty_run_file_is_the_defaults():
    assert run() == RunConfig() and run().to_dict()["train"]["lr"] == 1e-3
    assert RunConfig.from_dict(RunConfig().to_dict()) == RunConfig()
    assert TrainConfig().last_step == 1000 and TrainConfig(minutes=1).last_step is None


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_and_what_differs_from_it(name):
    plain = run(model={"preset": name}).resolve(300)
    assert (plain.vocab, plain.limit) == (300, 256)
    table = {
        "preset": name,
        "limit": 1024,
        "decoder": {"layers": 3},
        "set": {"decoder.kinds.L.mixer.heads": 24, "decoder.kinds.L.mixer.head_dim": 8},
    }
    other = run(model=table, data={"context": 128}).resolve(300)
    assert other.limit == 1024 and other.decoder.layers == 3 and other.decoder.layer(0).mixer.heads == 24
    assert other.decoder.layer(0).mlp == plain.decoder.layer(0).mlp


def test_another_kind_of_part_replaces_the_presets_whole():
    table = {"preset": "tiny", "decoder": {"kinds": {"L": {"mlp": {"kind": "plain", "hidden": 64}}}}}
    assert run(model=table).resolve(300).decoder.layer(0).mlp == Plain(64)
    kept = {"preset": "tiny", "decoder": {"kinds": {"L": {"mlp": {"hidden": 64}}}}}
    assert run(model=kept).resolve(300).decoder.layer(0).mlp == Gated(64)


def test_the_shakespeare_recipe_is_the_published_one():
    config = RunConfig.load(ROOT / "runs" / "shakespeare-char-cpu.toml")
    model, train = config.resolve(66), config.train
    layer = model.decoder.layer(3)
    assert (model.decoder.layers, layer.mixer.heads, model.width, layer.mlp) == (4, 4, 128, Plain(512, "gelu"))
    assert model.position is None and isinstance(layer.mixer.position, Rope), "the one thing that is not nanoGPT's"
    assert layer.norm.kind == "layer" and not layer.norm.bias and not layer.mixer.bias and model.tie
    assert (config.data.context, train.batch, train.accumulate, train.steps) == (64, 12, 1, 2000)
    assert (train.lr, train.min_lr, train.warmup) == (1e-3, 1e-4, 100)
    assert (train.beta1, train.beta2, train.weight_decay, train.clip) == (0.9, 0.99, 0.1, 1.0)
    assert train.eval_tokens == 0, "judged on the whole validation split"


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ({"trian": {}}, r"unknown table \[trian\] \(did you mean 'train'"),
        ({"train": 3}, r"train: expected a table"),
        ({"train": {"stepz": 3}}, r"unknown key train.stepz \(did you mean 'steps'"),
        ({"data": {"contxt": 3}}, r"unknown key data.contxt \(did you mean 'context'"),
        ({"tokenizer": {"kind": "bep"}}, r"tokenizer.kind: 'bep' is not one of"),
        ({"train": {"lr": "fast"}}, r"train.lr: expected float"),
        ({"train": {"lr": 0}}, r"train.lr: must be above 0, found 0"),
        ({"train": {"steps": 0}}, r"train.steps: must be above 0"),
        ({"train": {"batch": 0}}, r"train.batch: must be at least 1"),
        ({"train": {"min_lr": 1.0}}, r"train.min_lr: must be at most lr 0.001"),
        ({"train": {"beta2": 1.0}}, r"train.beta2: must be in \[0, 1\)"),
        ({"train": {"precision": "fp16"}}, r"fp16 compute on a CPU is refused: its matrix products stall"),
        ({"train": {"precision": "fp16", "device": "cuda"}}, r"fp16 needs loss scaling"),
        ({"data": {"context": 0}}, r"data.context: must be at least 1"),
        ({"data": {"validation": 1.0}}, r"data.validation: must be between 0 and 1"),
    ],
)
def test_what_cannot_be_is_named(tables, says):
    with pytest.raises(ConfigError, match=says):
        RunConfig.from_dict(tables)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"preset": "tinny"}, r"model.preset: 'tinny' is not known \(did you mean 'tiny'"),
        ({"wdith": 3}, r"unknown key wdith \(did you mean 'width'"),
        ({"set": {"decoder.layrs": 3}}, r"unknown key decoder.layrs"),
        ({"set": {"decodr.layers": 3}}, r"unknown key 'decodr' \(did you mean 'decoder'"),
        ({"limit": 64}, r"model.limit: 64 is below 256, data.context"),
        ({"vocab": 64}, r"model.vocab: 64 is below 300, the tokenizer's vocabulary"),
    ],
)
def test_a_model_table_that_cannot_be(model, says):
    with pytest.raises(ConfigError, match=says):
        run(model=model).resolve(300)


def test_files_that_are_no_run_files(tmp_path):
    (tmp_path / "bad.toml").write_text("[train\n")
    for name, says in {"no.toml": "no such file", "bad.toml": r"bad.toml is not TOML"}.items():
        with pytest.raises(ConfigError, match=says):
            RunConfig.load(tmp_path / name)


def test_assignments_are_json_where_they_can_be():
    pairs = {"a": "4", "b": "1e-3", "c": "true", "d": "null", "e": "post", "f": '{"kind": "alibi"}'}
    assert parse_assignments(pairs) == {"a": 4, "b": 1e-3, "c": True, "d": None, "e": "post", "f": {"kind": "alibi"}}


def test_differences_are_named_but_for_what_changes_no_number():
    there = RunConfig(train=TrainConfig(lr=1e-3)).to_dict()
    here = RunConfig(train=TrainConfig(lr=2e-3, eval_every=7, save_every=9), data=DataConfig(context=8)).to_dict()
    assert differences(there, here) == ["data.context: 256 there, 8 here", "train.lr: 0.001 there, 0.002 here"]
