"""RoPE scaling and a longer limit given at load, compared with transformers given the same config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvad.checkpoint import families
from kvad.checkpoint.loader import open_checkpoint, parse_rope_scaling, scale_rope
from kvad.errors import KvadError, RequestError
from kvad.llm import LLM
from tests.support.cli_checkpoints import run
from tests.support.random_models import model_config

LIMIT = 32
SIZES = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 61, "max_position_embeddings": LIMIT, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ORIGINAL = {"original_max_position_embeddings": LIMIT}
LONG = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 3.0, 5.0, 9.0]}
SCALINGS: dict[str, tuple[dict[str, Any], int]] = {  # rope_scaling, limit of the extended model
    "linear": ({"rope_type": "linear", "factor": 2.0}, 64),
    "dynamic": ({"rope_type": "dynamic", "factor": 2.0}, 64),
    "yarn": ({"rope_type": "yarn", "factor": 4.0, **ORIGINAL}, 128),
    "yarn, betas": ({"rope_type": "yarn", "factor": 3.0, "beta_fast": 20, "attention_factor": 1.3, **ORIGINAL}, 96),
    "llama3": (
        {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL},
        128,
    ),
    "longrope": ({"rope_type": "longrope", "factor": 4.0, **LONG, **ORIGINAL}, 128),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("llama")
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(path)
    return path


def hf_logits(folder: Path, scaling: dict[str, Any], limit: int, tokens: list[int]) -> torch.Tensor:
    config = LlamaConfig.from_pretrained(folder)
    config.rope_scaling = dict(scaling)
    if scaling["rope_type"] != "dynamic":  # transformers scales from max_position_embeddings
        config.max_position_embeddings = limit
    if scaling["rope_type"] == "longrope":
        config.original_max_position_embeddings = LIMIT
    model = LlamaForCausalLM.from_pretrained(folder, config=config, dtype=torch.float64)
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("name", SCALINGS)
def test_a_scaling_given_at_load_equals_transformers(folder: Path, name: str) -> None:
    scaling, limit = SCALINGS[name]
    tokens = [3 + 7 * i % 50 for i in range(limit)]  # dynamic: transformers scales by the length, kvad by the limit
    expected = hf_logits(folder, scaling, limit, tokens)
    with LLM.load(folder, dtype="float64", rope_scaling=scaling, max_num_seqs=1) as llm:
        assert llm.model.config.max_seq_len == llm.cache_config.max_seq_len == limit
        error = float((llm.logits(tokens) - expected).abs().max())
        assert error < 1e-5 * float(expected.abs().max())  # frequencies are float32 in both
    with LLM.load(folder, dtype="float64", max_seq_len=LIMIT, max_num_seqs=1) as plain:
        with pytest.raises(RequestError, match=f"at most {LIMIT} tokens"):
            plain.logits(tokens)
        if name != "dynamic":  # which scales longer prompts only
            assert (plain.logits(tokens[:30]) - expected[:30]).abs().max() > 1e-2


def test_the_cache_of_an_extended_model_is_exact(folder: Path) -> None:
    tokens = [3 + 7 * i % 50 for i in range(100)]
    with LLM.load(folder, dtype="float64", rope_scaling="yarn,factor=4,original=32", max_num_seqs=1) as llm:
        done = llm.generate(tokens, max_tokens=20, temperature=0, ignore_eos=True)
        out = [int(token) for token in llm.logits([*tokens, *done.tokens]).argmax(-1)[len(tokens) - 1 : -1]]
        assert list(done.tokens) == out
    with pytest.raises(RequestError, match="exceeds the model's limit of 128"):
        LLM.load(folder, rope_scaling="yarn,factor=4,original=32", max_seq_len=129)


def test_a_text_names_the_same_scaling(folder: Path) -> None:
    scaling = SCALINGS["yarn"][0]
    assert parse_rope_scaling("yarn,factor=4.0,original=32") == scaling == parse_rope_scaling(json.dumps(scaling))
    handle = open_checkpoint(folder)
    stored = handle.config
    scale_rope(handle, "yarn,factor=4,original=32")
    scale_rope(handle, scaling)  # from the stored config
    assert handle.config.max_seq_len == 128 and handle.stored_config == stored


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ("yarn,factor", "'yarn,factor' is not a scaling"),
        ("{", "is not a scaling"),
        ("yarn,faktor=4", "unknown key 'faktor'"),
        ("half,factor=4", "rope_type 'half' is not supported"),
        ("linear", "factor"),
        ("yarn", "yarn must have a factor, got none"),
        ("yarn,factor=-1", "factor"),
    ],
)
def test_invalid_scalings_are_refused(folder: Path, scaling: str, message: str) -> None:
    with pytest.raises(KvadError, match=message):
        LLM.load(folder, rope_scaling=scaling)


def test_commands_scale_the_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = " ".join(str(3 + 7 * i % 50) for i in range(60))
    flags = ("--ids", prompt, "--max-tokens", 5, "--temperature", 0, "--json", "--dtype", "float64")
    result = run(capsys, "generate", folder, *flags, "--rope-scaling", "yarn,factor=4,original=32")
    with LLM.load(folder, dtype="float64", rope_scaling=SCALINGS["yarn"][0], max_num_seqs=1) as llm:
        expected = llm.generate([int(token) for token in prompt.split()], max_tokens=5, temperature=0)
    assert json.loads(result.out)["completions"][0]["choices"][0]["token_ids"] == list(expected.tokens)
    refused = run(capsys, "generate", folder, *flags)
    assert refused.code == 2 and "must have at most 32 tokens" in refused.err
    assert run(capsys, "verify", folder, "--rope-scaling", "half").code == 2


def test_a_model_without_rope_is_refused() -> None:
    with pytest.raises(KvadError, match="no rotary positions"):
        families.scale_rope(model_config("alibi"), {"rope_type": "linear", "factor": 2.0})
