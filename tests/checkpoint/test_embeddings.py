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
from safetensors.torch import save_file
from tokenizers import processors
from torch import Tensor

from kvad.checkpoint.generation_config import GenerationConfig, write_embedding
from kvad.cli.main import main
from kvad.errors import CheckpointError, RequestError
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
    with LLM.load(folder, dtype="float32", max_seq_len=16) as llm:
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
    with LLM.load(folder, dtype="float32") as llm:
        with pytest.raises(RequestError, match="text: must have at most 40 tokens, got 6"):
            llm.embed(long)
        expected = reference(folder, [long], "mean", limit=40)
        torch.testing.assert_close(llm.embed(long, truncate=True), expected, atol=1e-5, rtol=1e-4)
    assert "tokens were truncated to 40" in capsys.readouterr().err
    if folder.name.startswith("decoder"):  # it reads them into the cache
        with LLM.load(folder, dtype="float32", max_seq_len=8) as llm:
            with pytest.raises(RequestError, match="text: must have at most 8 tokens, got 6"):
                llm.embed(long)
            expected = reference(folder, [long], "mean", limit=8)
            torch.testing.assert_close(llm.embed(long, truncate=True), expected, atol=1e-5, rtol=1e-4)


# --- Dense modules


def write_dense(
    folder: Path, activation: str, bias: bool, pooling: str = "mean_tokens"
) -> tuple[Tensor, Tensor | None]:
    """Add a Dense module before the normalization; return its matrix and bias."""
    write_modules(folder, pooling, prompt=False)
    modules = json.loads((folder / "modules.json").read_text())
    dense = {"path": "2_Dense", "type": "sentence_transformers.models.Dense"}
    (folder / "modules.json").write_text(json.dumps([*modules[:2], dense, {**modules[2], "path": "3_Normalize"}]))
    (folder / "2_Dense").mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(10, 24, generator=generator)
    offset = torch.randn(10, generator=generator) if bias else None
    content = {"in_features": 24, "out_features": 10, "bias": bias, "activation_function": activation}
    (folder / "2_Dense" / "config.json").write_text(json.dumps(content))
    tensors = {"linear.weight": weight} if offset is None else {"linear.weight": weight, "linear.bias": offset}
    save_file(tensors, folder / "2_Dense" / "model.safetensors")
    return weight, offset


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "encoder", "encoder")


@pytest.mark.parametrize(("activation", "bias"), [("activation.Tanh", True), ("linear.Identity", False)])
def test_a_dense_module_is_applied_between_pooling_and_normalization(
    encoder: Path, capsys: pytest.CaptureFixture[str], activation: str, bias: bool
) -> None:
    """As in sentence-transformers: the activation of W x + b, then the length is 1."""
    weight, offset = write_dense(encoder, f"torch.nn.modules.{activation}", bias)
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoder)
    model, expected = transformers.AutoModel.from_pretrained(encoder).eval(), []
    for text in TEXTS:
        ids = tokenizer(text.lower(), truncation=True, max_length=LIMIT, return_tensors="pt").input_ids
        with torch.inference_mode():
            out = weight @ model(input_ids=ids).last_hidden_state[0].mean(0) + (0 if offset is None else offset)
        out = torch.tanh(out) if activation.endswith("Tanh") else out
        expected.append(out / out.norm())
    with LLM.load(encoder, dtype="float32", max_seq_len=8) as llm:
        torch.testing.assert_close(llm.embed(TEXTS), torch.stack(expected), atol=1e-5, rtol=1e-4)
        assert llm.embed("home", pool="mean").shape == (1, 24)
    assert main(["inspect", str(encoder)]) == 0 and "problem" not in capsys.readouterr().out
    assert main(["import", str(encoder), str(encoder / "native")]) == 0
    with LLM.load(encoder / "native", dtype="float32", max_seq_len=8) as llm:
        torch.testing.assert_close(llm.embed(TEXTS), torch.stack(expected), atol=1e-5, rtol=1e-4)
    assert main(["export", str(encoder), str(encoder / "out")]) == 2
    assert "bert cannot express this model" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="a model with a Dense module cannot be written"):
        write_embedding(encoder, GenerationConfig(pooling="head"), 24)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation_function": "os.system"}, "activation_function 'os.system' is not supported"),
        ({"activation_function": "torch.nn.modules.activation.Softplus"}, "is not supported"),
        ({"in_features": 25}, "must follow an encoder of width 25"),
        ({"out_features": "many"}, "in_features, out_features: must be sizes"),
        ({"out_features": 11}, "the tensors must be"),
        ({"bias": False}, "the tensors must be"),
        ({"use_residual": True}, "only a module that replaces the sentence's vector"),
        ({"module_input_name": "token_embeddings"}, "only a module that replaces the sentence's vector"),
    ],
)
def test_other_dense_modules_are_refused(encoder: Path, change: dict[str, Any], message: str) -> None:
    write_dense(encoder, "torch.nn.modules.activation.Tanh", bias=True)
    path = encoder / "2_Dense" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CheckpointError, match=message):
        LLM.load(encoder)


def test_a_decoder_with_a_dense_module_is_refused(folder: Path) -> None:
    if "decoder" in folder.name:
        write_dense(folder, "torch.nn.modules.activation.Tanh", bias=True)
        with pytest.raises(CheckpointError, match="must follow an encoder"):
            LLM.load(folder)


def test_the_tokenizer_limits_texts_if_the_folder_does_not(encoder: Path) -> None:
    """sentence-transformers truncates at the tokenizer's model_max_length; 1e30 is no limit."""
    write_modules(encoder, "mean_tokens", prompt=False)
    (encoder / "sentence_bert_config.json").unlink()
    path = encoder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": 7}))
    long = "cat " * 60
    with LLM.load(encoder, dtype="float32", max_seq_len=8) as llm:
        torch.testing.assert_close(llm.embed(long), reference(encoder, [long], "mean", limit=7), atol=1e-5, rtol=1e-4)
