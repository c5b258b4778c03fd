"""Run files as text: they read back as the same run and train the same weights."""

import string
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvad.checkpoint.native import open_folder
from kvad.train.config.run import RunConfig
from kvad.train.config.toml import RUN_FILE, dumps, format_run_file
from kvad.train.loop.run import resume_model, train_model

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
KEYS = TEXTS | st.text(string.ascii_letters + "_-", min_size=1, max_size=5)
PLAIN = st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS
VALUES = st.recursive(PLAIN, lambda v: st.lists(v, max_size=3) | st.dictionaries(KEYS, v, max_size=3), max_leaves=12)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_written_toml_reads_back(content):
    assert tomllib.loads(dumps(content)) == content


def test_format_of_the_text():
    content = {"a": 1, "b": {"c": {"d": "x"}, "e": [1.5, {"f g": True}]}, "h": {}}
    assert dumps(content) == 'a = 1\n\n[b]\ne = [1.5, { "f g" = true }]\n\n[b.c]\nd = "x"\n\n[h]\n'
    assert dumps({}) == ""
    for value in (None, {1}, "\ud800"):
        with pytest.raises(ValueError, match="TOML has no form for"):
            dumps({"a": value})


CONFIGS = [
    {},
    {"model": {"preset": "gpt2-124m"}, "optim": {"name": "muon", "schedule": "wsd"}, "train": {"minutes": 1.5}},
    {
        "model": {
            "preset": "tiny",
            "set": {
                "decoder.layer_types.L.attention.position": None,
                "embedding.position": {"kind": "learned", "num_positions": 256},
            },
        }
    },
    {"model": {"init": "somewhere"}, "lora": {"rank": 4, "target_modules": ["q", "v"]}},
    {"objective": {"kind": "summarizer"}, "summarizer": {"model": "m", "ratio": 4}},
    {
        "optim": {"schedule": "inverse-sqrt", "noam_factor": 2.0, "warmup_steps": 10},
        "tokenizer": {"special_tokens": []},
    },
    {"data": {"sources": [{"paths": ["a b", "c"], "weight": 3}, {"paths": ["d"]}], "order": "stream"}},
]


@pytest.mark.parametrize("content", CONFIGS, ids=str)
def test_a_run_file_reads_back_as_the_same_run(content):
    config = RunConfig.from_dict(content)
    again = RunConfig.from_dict(tomllib.loads(format_run_file(config, ["corpus"])))
    there, here = config.to_dict(), again.to_dict()
    if config.init is None and config.objective.kind != "summarizer":
        assert config.resolve(50_257) == again.resolve(50_257)
    there.pop("model"), here.pop("model")
    assert there == here and again.init == config.init


def test_a_runs_file_trains_the_same_weights(corpus, tmp_path, run_config, listener):
    train_model(run_config(steps=4), [corpus], tmp_path / "one")
    text = (tmp_path / "one" / RUN_FILE).read_text()
    assert f'# CORPUS: ["{corpus}"]' in text and "[optim]" in text and 'kind = "next-token"' in text
    assert "[summarizer]" not in text and "[lora]" not in text
    train_model(RunConfig.load(tmp_path / "one" / RUN_FILE), [corpus], tmp_path / "two", callbacks=[listener])
    one, two = open_folder(tmp_path / "one"), open_folder(tmp_path / "two")
    assert all(tensor.equal(dict(two.weights())[name]) for name, tensor in one.weights())
    resume_model(tmp_path / "one", config=RunConfig.load(tmp_path / "one" / RUN_FILE))
