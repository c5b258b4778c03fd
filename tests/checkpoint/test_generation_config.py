"""Generation defaults and pooling of checkpoints, which a request may change."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from kvad.cache.config import CacheConfig
from kvad.checkpoint.generation_config import GenerationConfig, read_embedding, read_generation_config, write_embedding
from kvad.config.layers import (
    AttentionConfig,
    HeadTransformConfig,
    LayerConfig,
    PlainMLPConfig,
    PoolingHeadConfig,
    StackConfig,
)
from kvad.config.model import ModelConfig
from kvad.errors import CheckpointError, RequestError
from kvad.llm import LLM
from kvad.model import whole_sequences
from kvad.model.transformer import Transformer


def folder_of(path: Path, kinds: list[str], pooling: dict[str, Any]) -> Path:
    """Write a folder of sentence-transformers with modules of these kinds."""
    modules = [
        {"path": "" if kind == "Transformer" else kind, "type": f"sentence_transformers.models.{kind}"}
        for kind in kinds
    ]
    (path / "Pooling").mkdir(parents=True)
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "Pooling" / "config.json").write_text(json.dumps(pooling))
    return path


MEAN = {"word_embedding_dimension": 8, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}


def embedding(folder: Path) -> GenerationConfig:
    return GenerationConfig(**read_embedding(folder))


def test_pooling_and_normalization_are_read(tmp_path: Path) -> None:
    assert read_embedding(tmp_path) == {}
    read = embedding(folder_of(tmp_path / "mean", ["Transformer", "Pooling", "Normalize"], MEAN))
    assert (read.pooling, read.normalize, read.max_embed_tokens, read.prompts) == ("mean", True, None, {})
    for name, pooling in (("cls_token", "first"), ("max_tokens", "max"), ("lasttoken", "last")):
        mode = {**MEAN, "pooling_mode_mean_tokens": False, f"pooling_mode_{name}": True}
        read = embedding(folder_of(tmp_path / name, ["Transformer", "Pooling"], mode))
        assert (read.pooling, read.normalize) == (pooling, False)


def test_limits_and_prompts_are_read_and_written_back(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "a", ["Transformer", "Pooling", "Normalize"], MEAN)
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 256, "do_lower_case": true}')
    prompts = {"prompts": {"query": "Query: ", "document": ""}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps({**prompts, "__version__": {}}))
    read = embedding(folder)
    assert (read.max_embed_tokens, read.lowercase, read.prompt_name) == (256, True, "query")
    assert read.prompts == {"query": "Query: ", "document": ""}
    (tmp_path / "b").mkdir()
    write_embedding(tmp_path / "b", read, 8)
    assert embedding(tmp_path / "b") == read


@pytest.mark.parametrize(
    ("kinds", "pooling", "message"),
    [
        (["Transformer", "Pooling", "LSTM"], MEAN, "LSTM is not supported"),
        (["Transformer", "Pooling", "Normalize", "Dense"], MEAN, "Normalize, Dense are not supported in this order"),
        (
            ["Transformer", "Pooling"],
            {"pooling_mode_weightedmean_tokens": True},
            "weightedmean_tokens is not supported",
        ),
        (["Transformer", "Pooling"], {**MEAN, "pooling_mode_max_tokens": True}, "mean_tokens, pooling_mode_max_tokens"),
    ],
)
def test_other_pooling_methods_are_refused(
    tmp_path: Path, kinds: list[str], pooling: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_embedding(folder_of(tmp_path / "a", kinds, pooling))


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("modules.json", '[{"type": "a.Pooling", "path": "../.."}]', "path: must be a folder's name, got '../..'"),
        ("modules.json", '{"type": 3}', "cannot read the modules"),
        ("modules.json", "[" * 50_000, "nested too deeply"),
        ("sentence_bert_config.json", '{"max_seq_length": 0}', "max_seq_length: must be a number of tokens"),
        ("config_sentence_transformers.json", '{"prompts": {"a": 3}}', "prompts: must be an object of texts"),
        ("config_sentence_transformers.json", '{"default_prompt_name": "q"}', "default_prompt_name: no such prompt"),
        ("Pooling/config.json", '{"a": NaN}', "NaN is not a JSON number"),
    ],
)
def test_damaged_files_of_sentence_transformers_are_refused(tmp_path: Path, file: str, text: str, message: str) -> None:
    folder = folder_of(tmp_path / "a", ["Transformer", "Pooling"], MEAN)
    (folder / file).write_text(text)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read_embedding(folder)


def test_embed_pools_by_checkpoint_and_by_option() -> None:
    attention = AttentionConfig(4, causal=False)
    head = PoolingHeadConfig("first", transform=HeadTransformConfig("tanh"))
    config = ModelConfig(
        16, 31, 24, encoder=StackConfig(2, {"L": LayerConfig(attention, PlainMLPConfig(20))}), head=head
    )
    torch.manual_seed(0)
    model = Transformer(config).eval()
    ids = [[3, 4, 5], [7, 8], [9, 1, 2, 3, 4]]
    with torch.inference_mode():
        hidden = [model.encode(whole_sequences([row], torch.device("cpu"))) for row in ids]
    mean = torch.stack([each.mean(0) for each in hidden])
    generation = GenerationConfig(pooling="mean", normalize=True)
    with LLM(model, None, CacheConfig(max_seq_len=24, max_num_seqs=2), generation=generation) as llm:
        torch.testing.assert_close(llm.embed(ids), torch.nn.functional.normalize(mean, dim=-1))
        torch.testing.assert_close(llm.embed(ids, pool="mean"), mean)
        torch.testing.assert_close(llm.embed(ids, pool="first"), torch.stack([each[0] for each in hidden]))
        torch.testing.assert_close(llm.embed(ids, pool="last"), torch.stack([each[-1] for each in hidden]))
        torch.testing.assert_close(llm.embed(ids, pool="max"), torch.stack([each.amax(0) for each in hidden]))
        torch.testing.assert_close(llm.embed(ids[0], pool="head")[0], llm.logits(ids[0]))
        with pytest.raises(RequestError, match="cannot continue a text"):
            llm.generate(ids)


# ---------------------------------------------------------------- generation defaults


def test_fields_are_defaults_or_reported_as_ignored() -> None:
    fields = {
        "decoder_start_token_id": 3,
        "eos_token_id": [2, 5],
        "bad_words_ids": [[7], [8, 9]],
        "max_length": 40,
        "num_beams": 4,
        "length_penalty": 0.8,
        "encoder_no_repeat_ngram_size": 3,
        "num_beam_groups": 2,
        "diversity_penalty": 0.5,
    }
    generation = read_generation_config({}, fields)
    assert (generation.decoder_start_token_id, generation.eos_token_ids) == (3, (2, 5))
    assert (generation.suppress_tokens, generation.bad_words_ids) == ((7,), ((8, 9),))
    beams = {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5, "length_penalty": 0.8}
    assert generation.sampling == {"max_tokens": 39, "temperature": 0.0, **beams}
    assert generation.ignored_fields == ("encoder_no_repeat_ngram_size",)
    assert read_generation_config({"eos_token_id": 1, "num_beams": 4}, None).sampling is None


def test_requests_override_the_defaults() -> None:
    fields = {"num_beams": 4, "length_penalty": 0.5, "bad_words_ids": [[7, 8]], "max_new_tokens": 9}
    generation = read_generation_config({}, fields)
    attention = AttentionConfig(4)
    model = Transformer(
        ModelConfig(16, 31, 24, StackConfig(1, {"L": LayerConfig(attention, PlainMLPConfig(20))}))
    ).eval()
    with LLM(model, None, CacheConfig(max_seq_len=24, max_num_seqs=8), generation=generation) as llm:
        params = llm.sampling_params()
        assert (params.num_beams, params.length_penalty, params.max_tokens) == (4, 0.5, 9)
        assert params.bad_words_ids == ((7, 8),)
        for options, expected in (
            ({"n": 3}, (3, 4, 9)),
            ({"n": 6, "temperature": 1.0}, (6, 1, 9)),
            ({"temperature": 0.7}, (1, 1, 9)),
            ({"num_beams": 2}, (1, 2, 9)),
            ({"max_tokens": 3}, (1, 4, 3)),
        ):
            params = llm.sampling_params(**options)
            assert (params.n, params.num_beams, params.max_tokens) == expected, options
