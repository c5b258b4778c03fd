"""Chat training from a pretrained model: chat template and end-of-turn tokens."""

import json
from dataclasses import replace

import pytest

from kvad.checkpoint.loader import open_checkpoint
from kvad.text.chat_template import ChatTemplate
from kvad.train.config.run import LoraConfig
from kvad.train.loop.run import train_model
from kvad.train.sources.pairs import PairPaths
from tests.support.training_runs import assert_resume_is_exact, tiny_config
from tests.train.objectives.test_all_objectives import files  # noqa: F401  (a fixture)
from tests.train.test_cli import kvad

OWN = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}{% endfor %}"
OWN += "{% if add_generation_prompt %}[assistant]{% endif %}"
TALK = [{"role": "user", "content": "ada"}]


def config(base, **objective):
    data, tables = {"seq_len": 128, "validation_fraction": 0.2}, {"objective": {"kind": "chat", **objective}}
    return tiny_config(init=base, data=data, tables=tables, steps=4, log_interval=1, save_interval=100)


@pytest.fixture(scope="module")
def base(files, tmp_path_factory):  # noqa: F811
    """A decoder without template, whose documents end with <|endofdoc|>; generation does not stop at it."""
    data = {"seq_len": 128, "document_unit": "lines"}
    run = tiny_config(data=data, tokenizer={"kind": "bpe", "vocab_size": 300}, steps=2)
    folder = train_model(run, [files / "next-token"], tmp_path_factory.mktemp("base") / "run").checkpoint
    file = folder / "generation_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"eos_token_id": None}))
    assert settings["eos_token_id"] is not None and kvad("doctor", folder, "--fix")[0] == 0
    return folder


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["whole", "lora"])
def test_base_without_template_gets_one_and_its_end_token(base, files, tmp_path, lora):  # noqa: F811
    talks, run = PairPaths(((files / "chat",),)), replace(config(base), lora=lora)
    assert_resume_is_exact(run, talks, tmp_path, stops=[2])
    where = [tmp_path / "whole", tmp_path / "parts"]
    if lora is not None:
        code, _, err = kvad("merge", base, tmp_path / "whole", "--out", tmp_path / "merged")
        assert code == 0, err
        where.append(tmp_path / "merged")
    assert open_checkpoint(base).generation.eos_token_ids == ()
    for out in where:
        opened = open_checkpoint(out)
        end = opened.tokenizer.special_tokens.separator
        assert opened.generation.eos_token_ids == (end,), "a turn ends with the one token that ends a document"
        template = ChatTemplate.load(opened.tokenizer_folder)
        text = template.render(TALK, generation_prompt=True).text
        assert text == "<|im_start|>user\nada<|endofdoc|>\n<|im_start|>assistant\n"


def test_given_template_replaces_the_models_default_template(base, files, tmp_path):  # noqa: F811
    talks = PairPaths(((files / "chat",),))
    train_model(config(base), talks, tmp_path / "first")
    (step,) = (tmp_path / "first/checkpoints").iterdir()
    train_model(config(step), talks, tmp_path / "second")
    (again,) = (tmp_path / "second/checkpoints").iterdir()
    for name in ("chat_template.jinja", "generation_config.json"):
        assert (again / name).read_bytes() == (step / name).read_bytes()
    (tmp_path / "own.jinja").write_text(OWN.replace("{{ eos_token }}", "<|endofdoc|>"))
    train_model(config(step, chat_template=str(tmp_path / "own.jinja")), talks, tmp_path / "third")
    template = ChatTemplate.load(open_checkpoint(tmp_path / "third").tokenizer_folder)
    assert template.render(TALK, generation_prompt=True).text == "[user]ada<|endofdoc|>[assistant]"
