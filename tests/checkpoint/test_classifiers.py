"""Text classifiers compared with transformers' text-classification pipeline: functions of scores, pairs of texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvad.checkpoint.conversion import HFConfigReader
from kvad.checkpoint.families import find_family
from kvad.cli.main import main
from kvad.config.layers import ClassificationHeadConfig
from kvad.errors import CheckpointError, RequestError
from kvad.llm import LLM

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "on", "a", "mat", "dog", "ran", "home"]
SIZES = {"vocab_size": len(WORDS), "hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2}
SIZES |= {"intermediate_size": 40, "max_position_embeddings": 40}
DISTIL = {"vocab_size": len(WORDS), "dim": 24, "n_heads": 4, "n_layers": 2, "hidden_dim": 40}
TEXTS, SECOND = ["the cat sat on a mat", "a dog", "home"], ["a dog ran home", "the cat", "on the mat"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "one label": ("Bert", {"num_labels": 1}),
    "three labels": ("Bert", {"num_labels": 3}),
    "single label": ("Bert", {"num_labels": 3, "problem_type": "single_label_classification"}),
    "multi-label": ("Bert", {"num_labels": 3, "problem_type": "multi_label_classification"}),
    "regression": ("Bert", {"num_labels": 1, "problem_type": "regression"}),
    "regression of two": ("Bert", {"num_labels": 2, "problem_type": "regression"}),
    "one multi-label": ("Bert", {"num_labels": 1, "problem_type": "multi_label_classification"}),
    "without token types": ("DistilBert", {"num_labels": 1}),
}


def write_classifier(folder: Path, name: str, options: dict[str, Any]) -> Path:
    """Write a folder of transformers with random parameters and a word-piece tokenizer."""
    torch.manual_seed(7)
    sizes = DISTIL if name == "DistilBert" else SIZES
    config = getattr(transformers, f"{name}Config")(**sizes, **options)
    model = getattr(transformers, f"{name}ForSequenceClassification")(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    getattr(transformers, f"{name}TokenizerFast")(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def reference(folder: Path, *inputs: Any) -> list[list[list[tuple[str, float]]]]:
    """Return labels and scores of each list of inputs."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    classify = transformers.TextClassificationPipeline(model=model, tokenizer=tokenizer, top_k=None, device="cpu")
    return [[[(x["label"], x["score"]) for x in labels] for labels in classify(texts)] for texts in inputs]


def check(results: list[Any], expected: list[list[tuple[str, float]]]) -> None:
    assert [[each.label for each in labels] for labels in results] == [[name for name, _ in x] for x in expected]
    for labels, scores in zip(results, expected, strict=True):
        assert [each.probability for each in labels] == pytest.approx([score for _, score in scores], abs=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_labels_equal_the_pipeline_of_transformers(case: str, tmp_path: Path) -> None:
    """One text and two, whose token types are those of the tokenizer's template."""
    folder = write_classifier(tmp_path, *CASES[case])
    pairs = [{"text": first, "text_pair": second} for first, second in zip(TEXTS, SECOND, strict=True)]
    with LLM.load(folder, dtype="float32") as llm:
        one, two = reference(folder, TEXTS, pairs)
        check(llm.classify(TEXTS), one)
        check(llm.classify(TEXTS, SECOND), two)
        assert llm.classify(TEXTS[0], SECOND[0]) == llm.classify(TEXTS[:1], SECOND[:1])[0]
        swapped, plain = llm.classify(SECOND[0], TEXTS[0]), llm.classify(f"{TEXTS[0]} {SECOND[0]}")
        assert len({each[0].probability for each in (llm.classify(TEXTS[0], SECOND[0]), swapped, plain)}) == 3


@pytest.mark.parametrize("case", CASES)
def test_the_function_of_the_scores_is_written_back(case: str, tmp_path: Path) -> None:
    name, options = CASES[case]
    sizes = DISTIL if name == "DistilBert" else SIZES
    content = getattr(transformers, f"{name}Config")(**sizes, **options).to_json_string(use_diff=False)
    content = json.loads(content)
    content["architectures"] = [f"{name}ForSequenceClassification"]
    family = find_family(content["model_type"])
    config = family.read(HFConfigReader(content, "config.json"))
    written = family.write(config)
    assert family.read(HFConfigReader(written, "config.json")) == config
    is_named = content["problem_type"] in ("regression", "multi_label_classification") and case != "one multi-label"
    assert written.get("problem_type") == (content["problem_type"] if is_named else None)


CONFIG = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], **SIZES, "id2label": {"0": "x"}}


@pytest.mark.parametrize(
    ("keys", "activation"),
    [
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "5"}}, "none"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, None),
        ({"problem_type": "ranking"}, "problem_type 'ranking' is not supported"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}, "activation_fn 'torch.nn.Tanh' is not"),
    ],
)
def test_the_functions_of_cross_encoders(keys: dict[str, Any], activation: str | None) -> None:
    fields = HFConfigReader({**CONFIG, **keys}, "config.json")
    if activation in (None, "none"):
        head = find_family("bert").read(fields).head
        assert isinstance(head, ClassificationHeadConfig) and head.activation == activation
    else:
        with pytest.raises(CheckpointError, match=activation):
            find_family("bert").read(fields)


def test_one_text_and_two_are_not_confused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model without a second token type takes one text, a cross-encoder two; anything else is one line, exit 2."""
    single = write_classifier(tmp_path / "single", "Bert", {"num_labels": 2, "type_vocab_size": 1})
    lines = tmp_path / "pairs.tsv"
    lines.write_text('the cat\ta dog\n{"text": "the cat", "text_pair": "a dog"}\n\nthe cat\n')
    assert main(["classify", str(single), str(lines), "--pairs"]) == 2
    assert capsys.readouterr().err.startswith("kvad: error: this model has 1 token type, two texts need 2\n")

    cross = write_classifier(tmp_path / "cross", "Bert", {"num_labels": 1})
    content = json.loads((cross / "config.json").read_text())
    content["sentence_transformers"] = {"activation_fn": "torch.nn.modules.linear.Identity"}
    (cross / "config.json").write_text(json.dumps(content))
    assert main(["classify", str(cross), str(lines)]) == 2
    assert "compares two texts, the lines have one\n" in capsys.readouterr().err
    assert main(["classify", str(cross), str(lines), "--pairs", "--json"]) == 1
    out, err = capsys.readouterr()
    first, second, empty, failed = map(json.loads, out.splitlines())
    assert first["labels"] == second["labels"] != [] and empty["labels"] == []
    assert "line 4: must have two texts" in err and "must have two texts" in failed["error"]
    with LLM.load(cross, dtype="float32") as llm:
        assert llm.classify("the cat", "a dog")[0].probability == pytest.approx(first["labels"][0]["probability"])
        for arguments in (("the cat",), (["the cat"], ["a", "b"]), ("the cat", ["a"])):
            with pytest.raises(RequestError, match="text_pairs"):
                llm.classify(*arguments)


def test_unused_keys_are_printed_at_load_and_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_classifier(tmp_path / "model", "Bert", {"num_labels": 2})
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "mystery": 1, "hidden_dropout_prob": 0.2}))
    (tmp_path / "lines.txt").write_text("the cat\n")
    assert main(["classify", str(folder), str(tmp_path / "lines.txt")]) == 0
    assert capsys.readouterr().err.splitlines()[0] == f"kvad: {folder}: config.json: not used: mystery"
    assert main(["inspect", str(folder)]) == 0
    assert "\nconfig.json: not used: mystery\n" in capsys.readouterr().out
    assert main(["inspect", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unused_keys"] == ["mystery"]
