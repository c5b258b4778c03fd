"""Training from an encoder: masked tokens, or a new head for tags and labels."""

import json
import math
import re
from dataclasses import replace

import pytest
import torch

from kvad.checkpoint.folder import list_steps
from kvad.checkpoint.handle import read_tokenizer_files
from kvad.checkpoint.hf_layout import choose_layout
from kvad.checkpoint.loader import load_model, open_checkpoint
from kvad.checkpoint.native import save_checkpoint
from kvad.config.layers import ClassificationHeadConfig, HeadTransformConfig, PoolingHeadConfig
from kvad.errors import ConfigError
from kvad.llm import LLM
from kvad.model.transformer import Transformer
from kvad.train.config.run import LoraConfig
from kvad.train.loop.run import train_model
from kvad.train.setup.initialize import load_initial
from kvad.train.sources.pairs import PairPaths
from tests.support.training_runs import assert_resume_is_exact, tiny_config
from tests.train.objectives.test_all_objectives import WORDS, files  # noqa: F401  (a fixture)
from tests.train.test_cli import kvad

BODY = ("embedding.", "encoder.")


def config(kind, init=None, **settings):
    lines = {"document_unit": "lines"} if kind == "masked-lm" else {}
    settings = {"lr": 3e-3, "steps": 6, "log_interval": 1, "save_interval": 100, "eval_interval": 100, **settings}
    data = {"seq_len": 96, "validation_fraction": 0.2, **lines}
    return tiny_config("encoder", init=init, data=data, tables={"objective": {"kind": kind}}, **settings)


@pytest.fixture(scope="module")
def masked(files, tmp_path_factory):  # noqa: F811
    return train_model(
        config("masked-lm"), [files / "masked-lm"], tmp_path_factory.mktemp("masked-lm") / "run"
    ).checkpoint


def examples(path):
    return PairPaths(((path,),))


def test_masked_lm_continues_from_the_checkpoint(masked, files, tmp_path, listener):  # noqa: F811
    train_model(config("masked-lm", masked, steps=1), [files / "masked-lm"], tmp_path / "run", callbacks=[listener])
    base = open_checkpoint(masked).training.state["trainer_state"]["val_loss"]
    fresh = config("masked-lm", steps=1)
    train_model(fresh, [files / "masked-lm"], tmp_path / "fresh", callbacks=[listener])
    after, begun = (report.val_loss for report in listener.evals)
    assert after < base + 0.1 < begun, "it starts from the base"
    (step,) = list_steps(tmp_path / "run")
    assert json.loads((step / "config.json").read_text())["architectures"] == ["BertForMaskedLM"]


@pytest.mark.parametrize(("kind", "hf_class"), [("tag", "BertForTokenClassification"), ("classify", "Bert.*Sequence")])
def test_new_head_keeps_the_trained_body(kind, hf_class, masked, files, tmp_path, listener):  # noqa: F811
    out, base = tmp_path / "run", dict(open_checkpoint(masked).weights())
    start = load_initial(config(kind, masked))
    answering = start.with_head_for(kind, ("A", "B", "C"))
    began = answering.build()
    for name, parameter in began.state_dict().items():
        assert name.startswith("head.") or torch.equal(parameter, base[name]), name
    assert began.config.head.labels == ("A", "B", "C") and began.head.weight.shape[0] == 3
    assert began.head.weight.std() > 0.01 and not began.head.bias.any()
    outcome = train_model(config(kind, masked, steps=40), examples(files / kind), out, callbacks=[listener])
    assert any("head: new, for " in line for line in listener.stages)
    model, opened = load_model(out, verify=True)
    assert isinstance(model.config.head, ClassificationHeadConfig)
    assert opened.training.state["initial_model"]["model"] == str(masked)
    content = json.loads((outcome.checkpoint / "config.json").read_text())
    assert re.match(hf_class, content["architectures"][0])
    assert read_tokenizer_files(outcome.checkpoint) == read_tokenizer_files(masked)
    if kind == "tag":
        with LLM.load(out) as llm:
            found = [word.label for word in llm.tag([" ".join(WORDS)])[0]]
        assert set(found) <= {word[0].upper() for word in WORDS} and outcome.loss < 2 < math.log(12)


def test_new_head_resumes_exactly(masked, files, tmp_path):  # noqa: F811
    assert_resume_is_exact(config("tag", masked), examples(files / "tag"), tmp_path, stops=[2])


def test_a_head_with_the_labels_is_kept(masked, files, tmp_path):  # noqa: F811
    out = tmp_path / "run"
    train_model(config("tag", masked, steps=1), examples(files / "tag"), out)
    start = load_initial(config("tag", out))
    assert start.with_head_for("tag", ("A", "B")) is start, "the head has these labels"
    with pytest.raises(ConfigError, match="adapters cannot add one"):
        load_initial(replace(config("tag", masked), lora=LoraConfig())).with_head_for("tag", ("A",))


def test_adapters_of_an_encoder(masked, files, tmp_path):  # noqa: F811
    train_model(config("tag", masked, steps=2), examples(files / "tag"), tmp_path / "base")
    lora_config = replace(config("tag", tmp_path / "base"), lora=LoraConfig(rank=2))
    train_model(lora_config, examples(files / "tag"), tmp_path / "adapter")
    base, tuned = (load_model(tmp_path / name)[0] for name in ("base", "adapter"))
    assert torch.equal(base.head.weight, tuned.head.weight)
    moved = [name for name, p in base.named_parameters() if not torch.equal(p, tuned.get_parameter(name))]
    assert moved and all(name.endswith(("q.weight", "v.weight")) for name in moved)
    code, out, err = kvad("merge", tmp_path / "base", tmp_path / "adapter", "--out", tmp_path / "merged")
    assert code == 0 and "kvad tag " in out, err
    alone = load_model(tmp_path / "merged")[0]
    assert all(torch.equal(p, alone.get_parameter(name)) for name, p in tuned.named_parameters())


def test_berts_pooler_is_kept(masked, tmp_path):
    """A model with a pooler keeps it below a new head for labels of texts."""
    opened = open_checkpoint(masked)
    pooled = replace(opened.config, head=PoolingHeadConfig("first", transform=HeadTransformConfig("tanh")))
    model = Transformer(pooled)
    layout = choose_layout(pooled, opened.generation)
    assert layout.hf_class == "BertModel"
    save_checkpoint(
        tmp_path / "base", pooled, model.state_dict(), None, layout=layout, files=read_tokenizer_files(masked)
    )
    began = load_initial(config("classify", tmp_path / "base")).with_head_for("classify", ("A", "B")).build()
    assert torch.equal(began.head.transform.dense.weight, model.head.transform.dense.weight)
    other = load_initial(config("classify", masked)).with_head_for("classify", ("A", "B")).build()
    assert not torch.equal(other.head.transform.dense.weight, dict(opened.weights())["head.transform.dense.weight"])


def test_commands_with_an_adapter(masked, files, tmp_path):  # noqa: F811
    """tag, embed and eval with --adapter equal those of the adapter's run."""
    train_model(config("tag", masked, steps=2), examples(files / "tag"), tmp_path / "base")
    lora_config = replace(config("tag", tmp_path / "base", steps=30), lora=LoraConfig(rank=4, target_modules="all"))
    train_model(lora_config, examples(files / "tag"), tmp_path / "adapter")
    (tmp_path / "lines").write_text("ada bob cleo\ngus hana\n")
    outputs = {}
    for name, model in (
        ("base", ["base"]),
        ("run", ["adapter"]),
        ("both", ["base", "--adapter", tmp_path / "adapter"]),
    ):
        where = [tmp_path / model[0], *model[1:]]
        for command, file in (("tag", "lines"), ("embed", "lines"), ("eval", files / "tag")):
            code, out, err = kvad(command, where[0], tmp_path / file, *where[1:], "--json")
            assert code == 0, err
            lines = [json.loads(line) for line in out.splitlines()]
            dropped = ("seconds", "model")
            outputs[name, command] = [{k: v for k, v in line.items() if k not in dropped} for line in lines]
    for command in ("tag", "embed", "eval"):
        assert outputs["both", command] == outputs["run", command]
    assert outputs["both", "embed"] != outputs["base", "embed"]
