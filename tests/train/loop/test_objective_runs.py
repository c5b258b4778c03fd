"""Every objective from files to a checkpoint and its predictions; exact resume."""

import json
import random

import pytest

from kvad.checkpoint.folder import list_steps
from kvad.checkpoint.native import open_folder
from kvad.config.layers import ClassificationHeadConfig
from kvad.errors import ConfigError, DataError
from kvad.llm import LLM
from kvad.text.chat_template import ChatTemplate
from kvad.train.config.run import RunConfig
from kvad.train.loop.run import read_run_config, resume_model, train_model
from kvad.train.setup.objective_factory import OBJECTIVE_TOPOLOGY
from kvad.train.sources.pairs import PairPaths
from tests.support.training_runs import PRESETS, assert_resume_is_exact, metric_lines, tiny_config, tiny_shape

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


def configured(kind, steps, **objective):
    topology = OBJECTIVE_TOPOLOGY[kind]
    shape = tiny_shape(topology, layers=1)
    if kind == "span-corruption":
        shape["head.logit_scale"] = 32**-0.5
    preset = "t5-tiny" if kind == "span-corruption" else PRESETS[topology]
    data = {"document_unit": "lines"} if kind in ("masked-lm", "span-corruption") else {}
    settings = {"lr": 1e-2, "warmup_steps": 5, "steps": steps, "batch_size": 8, "log_interval": 1}
    return tiny_config(
        model={"preset": preset, "set": shape},
        data=data,
        tokenizer={"kind": "bpe", "vocab_size": 420},
        tables={"objective": {"kind": kind, **objective}},
        **{**settings, "eval_interval": 10, "save_interval": 10},
    )


READERS = {
    "tag": "BertForTokenClassification",
    "classify": "BertForSequenceClassification",
    "masked-lm": "BertForMaskedLM",
    "span-corruption": "T5ForConditionalGeneration",
    "chat": "LlamaForCausalLM",
}


def test_a_tagger_learns(corpora, tmp_path, listener):
    train_model(configured("tag", 30), [corpora / "tag"], tmp_path / "run", callbacks=[listener])
    assert any(READERS["tag"] in stage for stage in listener.stages)
    assert open_folder(tmp_path / "run").config.head == ClassificationHeadConfig(("ADV", "NOUN", "VERB"))
    assert listener.evals[-1].accuracy > 0.95
    assert metric_lines(tmp_path / "run", "eval")[-1]["accuracy"] == listener.evals[-1].accuracy
    with LLM.load(tmp_path / "run") as llm:
        result = llm.tag("fish never eats cat")
    assert [(word.word, word.label) for word in result][1:3] == [("never", "ADV"), ("eats", "VERB")]
    assert [word.label for word in result] == ["NOUN", "ADV", "VERB", "NOUN"]


def test_a_classifier_learns(corpora, tmp_path):
    train_model(configured("classify", 30), [corpora / "classify"], tmp_path / "run")
    with LLM.load(tmp_path / "run") as llm:
        assert [llm.classify(f"dog {word} eats bird")[0].label for word in ("often", "never")] == ["often", "never"]


def test_a_masked_model_fills_masks(corpora, tmp_path):
    train_model(configured("masked-lm", 20), [corpora / "masked-lm"], tmp_path / "run")
    with LLM.load(tmp_path / "run") as llm:
        assert llm.tokenizer.special_tokens.mask is not None
        (candidates,) = llm.fill_mask("cat [MASK] eats bird", top=5)
    assert len(candidates) == 5 and candidates[0].probability > 2 / 420, "better than uniform"


def test_a_chat_model_answers_and_stops(corpora, tmp_path):
    outcome = train_model(configured("chat", 60), [corpora / "chat"], tmp_path / "run")
    saved = open_folder(tmp_path / "run")
    assert saved.tokenizer.special_tokens.names()["<|im_end|>"] in saved.generation.eos_token_ids
    template = ChatTemplate.load(outcome.checkpoint)
    prompt = template.render([{"role": "user", "content": "fish"}], generation_prompt=True).text
    with LLM.load(tmp_path / "run") as llm:
        result = llm.generate(llm.tokenizer.encode(prompt, specials=True), max_tokens=20, temperature=0)
    assert result.text in WORDS["NOUN"] and result.finish_reason == "stop"


@pytest.mark.parametrize(("kind", "hf_class"), READERS.items())
def test_resume_is_exact(kind, hf_class, corpora, tmp_path):
    config = configured(kind, 8, label_smoothing=0.1)
    whole, parts = assert_resume_is_exact(config, [corpora / kind], tmp_path, stops=[3])
    assert read_run_config(parts)[0].objective.kind == kind
    assert json.loads((list_steps(whole)[-1] / "config.json").read_text())["architectures"] == [hf_class]


def test_resume_with_another_objective_is_refused(corpora, tmp_path):
    train_model(configured("tag", 2), [corpora / "tag"], tmp_path / "run")
    with pytest.raises(ConfigError, match=r"objective\.label_smoothing"):
        resume_model(tmp_path / "run", config=configured("tag", 2, label_smoothing=0.2))


def test_refused_runs_leave_no_folder(corpora, tmp_path):
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
