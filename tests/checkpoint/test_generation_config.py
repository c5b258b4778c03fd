"""Generation defaults and pooling of checkpoints, which a request may change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvad.cache.config import CacheConfig
from kvad.checkpoint.generation_config import GenerationConfig, read_generation_config, read_pooling
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
from kvad.model.transformer import Transformer
from kvad.verify.replay import run_whole_sequence


def folder_of(path: Path, kinds: list[str], pooling: dict[str, Any]) -> Path:
    """Write a folder of sentence-transformers with modules of these kinds."""
    modules = [{"path": kind, "type": f"sentence_transformers.models.{kind}"} for kind in kinds]
    (path / "Pooling").mkdir(parents=True)
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "Pooling" / "config.json").write_text(json.dumps(pooling))
    return path


MEAN = {"word_embedding_dimension": 8, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}


def test_pooling_and_normalization_are_read(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) == (None, False)
    assert read_pooling(folder_of(tmp_path, ["Transformer", "Pooling", "Normalize"], MEAN)) == ("mean", True)
    first = {**MEAN, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    assert read_pooling(folder_of(tmp_path / "first", ["Transformer", "Pooling"], first)) == ("first", False)


@pytest.mark.parametrize(
    ("kinds", "pooling", "message"),
    [
        (["Transformer", "Pooling", "Dense"], MEAN, "Dense is not supported"),
        (["Transformer", "Pooling"], {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens is not supported"),
    ],
)
def test_other_pooling_methods_are_refused(
    tmp_path: Path, kinds: list[str], pooling: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_pooling(folder_of(tmp_path, kinds, pooling))


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
        hidden = [model.encode(run_whole_sequence(model, row)) for row in ids]
    mean = torch.stack([each.mean(0) for each in hidden])
    generation = GenerationConfig(pooling="mean", normalize=True)
    with LLM(model, None, CacheConfig(max_seq_len=24, max_num_seqs=2), generation=generation) as llm:
        torch.testing.assert_close(llm.embed(ids), torch.nn.functional.normalize(mean, dim=-1))
        torch.testing.assert_close(llm.embed(ids, pool="mean"), mean)
        torch.testing.assert_close(llm.embed(ids, pool="first"), torch.stack([each[0] for each in hidden]))
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
        "num_beam_groups": 1,
    }
    generation = read_generation_config({}, fields)
    assert (generation.decoder_start_token_id, generation.eos_token_ids) == (3, (2, 5))
    assert (generation.suppress_tokens, generation.bad_words_ids) == ((7,), ((8, 9),))
    assert generation.sampling == {"max_tokens": 39, "num_beams": 4, "length_penalty": 0.8, "temperature": 0.0}
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
