"""Embeddings of sentence-transformers' folders compared with transformers' forward and the formulas of pooling."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import processors
from torch import Tensor

from kvad.cli.main import main
from kvad.errors import RequestError
from kvad.llm import LLM
from tests.checkpoint.test_classifiers import SIZES, WORDS

LIMIT, PROMPT = 9, "the dog "
TEXTS = ["A Cat", "", "the cat sat on a mat " * 5, "home"]
POOLING = {"cls_token": "first", "mean_tokens": "mean", "max_tokens": "max", "lasttoken": "last"}


def write_model(folder: Path, kind: str) -> Path:
    """Write an encoder, or a decoder whose tokenizer ends texts with a token, with random parameters."""
    torch.manual_seed(5)
    if kind == "encoder":
        model: Any = transformers.BertModel(transformers.BertConfig(**SIZES), add_pooling_layer=False)
    else:
        model = transformers.Qwen3Model(transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=6))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    tokenizer = transformers.BertTokenizerFast(str(folder / "vocab.txt"), do_lower_case=False)
    if kind == "decoder":
        config = json.loads((folder / "config.json").read_text())
        config |= {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True}  # as Qwen3-Embedding's files
        (folder / "config.json").write_text(json.dumps(config))
        end = processors.TemplateProcessing(single="$A [SEP]", special_tokens=[("[SEP]", WORDS.index("[SEP]"))])
        tokenizer.backend_tokenizer.post_processor = end
    tokenizer.save_pretrained(folder)
    return folder


def write_modules(folder: Path, pooling: str, prompt: bool = True) -> None:
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = {f"pooling_mode_{name}": name == pooling for name in POOLING}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 24, **modes}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": LIMIT, "do_lower_case": True}))
    prompts = {"prompts": {"query": PROMPT, "plain": ""}, "default_prompt_name": "query" if prompt else None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))


def reference(folder: Path, texts: Sequence[str], pooling: str, limit: int = LIMIT) -> Tensor:
    """Pool transformers' last hidden states [L, E] of each text as sentence-transformers does, to length 1."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model, vectors = transformers.AutoModel.from_pretrained(folder).eval(), []
    for text in texts:
        ids = tokenizer(text.lower(), truncation=True, max_length=limit, return_tensors="pt").input_ids
        with torch.inference_mode():
            states = model(input_ids=ids).last_hidden_state[0]
        pooled = {"first": states[0], "last": states[-1], "mean": states.sum(0) / len(states), "max": states.max(0)[0]}
        vectors.append(pooled[pooling] / pooled[pooling].norm())
    return torch.stack(vectors)


@pytest.fixture(scope="module", params=["encoder", "decoder"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("pooling", POOLING)
def test_vectors_equal_the_formulas(folder: Path, pooling: str) -> None:
    """Pooling, normalization, lower case, the prompt and the length are those of the folder."""
    write_modules(folder, pooling)
    expected = reference(folder, [PROMPT + text for text in TEXTS], POOLING[pooling])
    with LLM.load(folder, dtype="float32", max_seq_len=8) as llm:
        torch.testing.assert_close(llm.embed(TEXTS), expected, atol=1e-5, rtol=1e-4)
        plain = llm.embed(TEXTS, prompt_name="plain")
        torch.testing.assert_close(plain, reference(folder, TEXTS, POOLING[pooling]), atol=1e-5, rtol=1e-4)
        assert (plain[0] - expected[0]).abs().max() > 1e-3  # the prompt matters
        with pytest.raises(RequestError, match=r"unknown prompt 'quer'.*query"):
            llm.embed(TEXTS, prompt_name="quer")


def test_the_command_writes_the_same_vectors(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Truncated lines are noted, an empty line is the empty text; no line becomes NaN."""
    write_modules(folder, "mean_tokens", prompt=False)
    lines, out = folder / "lines.txt", folder / "v.npy"
    lines.write_text("\n".join(TEXTS) + "\n")
    assert main(["embed", str(folder), str(lines), "--out", str(out), "--dtype", "float32"]) == 0
    np.testing.assert_allclose(np.load(out), reference(folder, TEXTS, "mean"), atol=1e-5)
    assert "line 3: 3" in (err := capsys.readouterr().err) and "tokens were truncated to 9" in err


def test_a_longer_text_is_refused_or_truncated(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a length in the folder the model's limit holds, 40 tokens."""
    write_modules(folder, "mean_tokens", prompt=False)
    (folder / "sentence_bert_config.json").unlink()
    long = "cat " * 60
    with LLM.load(folder, dtype="float32", max_seq_len=8) as llm:
        with pytest.raises(RequestError, match="text: must have at most 40 tokens, got 6"):
            llm.embed(long)
        expected = reference(folder, [long], "mean", limit=40)
        torch.testing.assert_close(llm.embed(long, truncate=True), expected, atol=1e-5, rtol=1e-4)
    assert "tokens were truncated to 40" in capsys.readouterr().err
