"""Every objective from files to a checkpoint that answers, and on again to the bit."""

import json
import random

import pytest

from kvad.checkpoint.native import open_folder
from kvad.config.layers import ClassificationHeadConfig
from kvad.errors import ConfigError, DataError
from kvad.llm import LLM
from kvad.text.chat_template import ChatTemplate
from kvad.train.config.run import RunConfig
from kvad.train.loop.run import read_run_config, resume_model, train_model
from kvad.train.monitoring.metrics import read_metrics
from kvad.train.sources.pairs import PairPaths
from tests.train.loop.test_pair_run import StopAt

WORDS = {"NOUN": ["cat", "dog", "fish", "bird"], "VERB": ["eats", "sees", "likes"], "ADV": ["often", "never"]}


def sentence(draw):
    return [(draw.choice(WORDS[tag]), tag) for tag in ("NOUN", "ADV", "VERB", "NOUN")]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    folder, draw = tmp_path_factory.mktemp("jobs"), random.Random(1)
    many = [sentence(draw) for _ in range(120)]
    plain = [" ".join(word for word, _ in each) for each in many]
    (folder / "tag").write_text("\n".join("".join(f"{w}\t{t}\n" for w, t in each) for each in many))
    (folder / "classify").write_text("".join(f"{text.split()[1]}\t{text}\n" for text in plain))
    (folder / "masked-lm").write_text("\n".join(plain))
    (folder / "span-corruption").write_text("\n".join(plain))
    talks = [[("user", text.split()[0]), ("assistant", text.split()[0])] for text in plain]
    lines = ({"messages": [{"role": r, "content": c} for r, c in talk]} for talk in talks)
    (folder / "chat").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def configured(kind, steps, preset="encoder-tiny", **objective):
    side = {"hidden_size": 32, "encoder.num_layers": 1, "encoder.layer_types.L.mlp.intermediate_size": 48}
    if kind == "span-corruption":
        preset, side = (
            "t5-tiny",
            {
                **side,
                "decoder.num_layers": 1,
                "decoder.layer_types.L.mlp.intermediate_size": 48,
                "head.logit_scale": 32**-0.5,
            },
        )
    if kind == "chat":
        preset, side = (
            "tiny",
            {"hidden_size": 32, "decoder.num_layers": 1, "decoder.layer_types.L.mlp.intermediate_size": 48},
        )
    return RunConfig.from_dict(
        {
            "model": {"preset": preset, "set": side},
            "data": {"seq_len": 32, **({"document_unit": "lines"} if kind in ("masked-lm", "span-corruption") else {})},
            "tokenizer": {"kind": "bpe", "vocab_size": 420},
            "objective": {"kind": kind, **objective},
            "optim": {"lr": 1e-2, "warmup_steps": 5},
            "train": {
                "steps": steps, "batch_size": 8, "log_interval": 1, "eval_interval": 10, "save_interval": 10,
                "precision": "fp32",
            },
        }
    )  # fmt: skip


READERS = {
    "tag": "BertForTokenClassification",
    "classify": "BertForSequenceClassification",
    "masked-lm": "BertForMaskedLM",
    "span-corruption": "T5ForConditionalGeneration",
    "chat": "LlamaForCausalLM",
}


def test_a_tagger_learns_and_says_tags_by_name(corpora, tmp_path, listener):
    train_model(configured("tag", 30), [corpora / "tag"], tmp_path / "run", callbacks=[listener])
    assert any(READERS["tag"] in stage for stage in listener.stages)
    assert open_folder(tmp_path / "run").config.head == ClassificationHeadConfig(("ADV", "NOUN", "VERB"))
    assert listener.evals[-1].accuracy > 0.95
    logged = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "eval"]
    assert logged[-1]["accuracy"] == listener.evals[-1].accuracy
    with LLM.load(tmp_path / "run") as llm:
        said = llm.tag("fish never eats cat")
    assert [(each.word, each.label) for each in said] == [
        ("fish", "NOUN"), ("never", "ADV"), ("eats", "VERB"), ("cat", "NOUN"),
    ]  # fmt: skip


def test_a_classifier_learns_and_says_labels_by_name(corpora, tmp_path):
    train_model(configured("classify", 30), [corpora / "classify"], tmp_path / "run")
    with LLM.load(tmp_path / "run") as llm:
        assert [llm.classify(f"dog {word} eats bird")[0].label for word in ("often", "never")] == ["often", "never"]


def test_a_masked_model_fills_what_it_has_seen(corpora, tmp_path):
    train_model(configured("masked-lm", 20), [corpora / "masked-lm"], tmp_path / "run")
    with LLM.load(tmp_path / "run") as llm:
        assert llm.tokenizer.special_tokens.mask is not None
        (candidates,) = llm.fill_mask("cat [MASK] eats bird", top=5)
    assert len(candidates) == 5 and candidates[0].probability > 2 / 420, "it knows more than nothing"


def test_a_chat_model_answers_and_stops(corpora, tmp_path):
    outcome = train_model(configured("chat", 60), [corpora / "chat"], tmp_path / "run")
    saved = open_folder(tmp_path / "run")
    assert saved.tokenizer.special_tokens.names()["<|im_end|>"] in saved.generation.eos_token_ids
    template = ChatTemplate.load(outcome.checkpoint)
    prompt = template.render([{"role": "user", "content": "fish"}], generation_prompt=True).text
    with LLM.load(tmp_path / "run") as llm:
        said = llm.generate(llm.tokenizer.encode(prompt, specials=True), max_tokens=20, temperature=0)
    assert said.text in WORDS["NOUN"] and said.finish_reason == "stop"


def final(out):
    files = open_folder(out, verify=True).files
    return {name: files[name]["sha256"] for name in ("model.safetensors", "training/state.safetensors", "config.json")}


@pytest.mark.parametrize("kind", READERS)
def test_a_run_that_was_stopped_goes_on_to_the_bit(kind, corpora, tmp_path, listener):
    config = configured(kind, 8, label_smoothing=0.1)
    train_model(config, [corpora / kind], tmp_path / "whole", callbacks=[listener])
    assert any(READERS[kind] in stage for stage in listener.stages), listener.stages
    train_model(config, [corpora / kind], tmp_path / "cut", callbacks=[StopAt(3)])
    assert read_run_config(tmp_path / "cut")[0].objective.kind == kind
    resume_model(tmp_path / "cut", config=config)
    assert final(tmp_path / "whole") == final(tmp_path / "cut")
    losses = [
        [line["loss"] for line in read_metrics(tmp_path / name / "metrics.jsonl") if line["kind"] == "step"]
        for name in ("whole", "cut")
    ]
    assert losses[0] == losses[1]


def test_another_objective_is_no_resume(corpora, tmp_path):
    train_model(configured("tag", 2), [corpora / "tag"], tmp_path / "run")
    with pytest.raises(ConfigError, match=r"objective\.label_smoothing"):
        resume_model(tmp_path / "run", config=configured("tag", 2, label_smoothing=0.2))


def test_what_cannot_be_learned_leaves_nothing(corpora, tmp_path):
    with pytest.raises(DataError, match="no tab"):
        train_model(configured("classify", 2), [corpora / "masked-lm"], tmp_path / "run")
    held = tmp_path / "held"
    held.write_text("cat\tX\n")
    with pytest.raises(DataError, match="held out and does not occur"):
        train_model(configured("tag", 2), PairPaths(((corpora / "tag",),), ((held,),)), tmp_path / "run")
    plain = {**configured("masked-lm", 2).to_dict(), "tokenizer": {"kind": "byte", "special_tokens": ["pad"]}}
    with pytest.raises(DataError, match="no mask token"):
        train_model(RunConfig.from_dict(plain), [corpora / "masked-lm"], tmp_path / "run")
    assert not (tmp_path / "run").exists()
