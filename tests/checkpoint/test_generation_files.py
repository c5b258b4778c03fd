"""What a checkpoint says about generating and pooling: defaults that a caller may change, and what is not applied."""

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
    modules = [
        {"idx": i, "path": f"{i}_{kind}", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    for module in modules:
        (path / module["path"]).mkdir()
        if module["type"].endswith("Pooling"):
            (path / module["path"] / "config.json").write_text(json.dumps(pooling))
    return path


MEAN = {"word_embedding_dimension": 8, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}


def test_mean_and_first_and_unit_length(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) == (None, False)
    assert read_pooling(folder_of(tmp_path, ["Transformer", "Pooling", "Normalize"], MEAN)) == ("mean", True)
    other = tmp_path / "other"
    other.mkdir()
    first = {**MEAN, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    assert read_pooling(folder_of(other, ["Transformer", "Pooling"], first)) == ("first", False)


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
    mixer = AttentionConfig(4, causal=False)
    head = PoolingHeadConfig("first", transform=HeadTransformConfig("tanh"))
    config = ModelConfig(16, 31, 24, encoder=StackConfig(2, {"L": LayerConfig(mixer, PlainMLPConfig(20))}), head=head)
    torch.manual_seed(0)
    model = Transformer(config).eval()
    ids = [[3, 4, 5], [7, 8], [9, 1, 2, 3, 4]]
    with torch.inference_mode():
        hidden = [model.encode(run_whole_sequence(model, row)) for row in ids]
    mean = torch.stack([each.mean(0) for each in hidden])
    with LLM(
        model,
        None,
        CacheConfig(max_seq_len=24, max_num_seqs=2),
        generation=GenerationConfig(pooling="mean", normalize=True),
    ) as llm:
        torch.testing.assert_close(llm.embed(ids), torch.nn.functional.normalize(mean, dim=-1))
        torch.testing.assert_close(llm.embed(ids, pool="mean"), mean)
        torch.testing.assert_close(llm.embed(ids, pool="first"), torch.stack([each[0] for each in hidden]))
        torch.testing.assert_close(llm.embed(ids[0], pool="head")[0], llm.logits(ids[0]))
        with pytest.raises(RequestError, match="cannot continue a text"):
            llm.generate(ids)


# ---------------------------------------------------------------- what a checkpoint says about generating


def test_fields_are_defaults_or_reported_as_ignored() -> None:
    said = {
        "decoder_start_token_id": 3,
        "eos_token_id": [2, 5],
        "bad_words_ids": [[7], [8, 9]],
        "max_length": 40,
        "num_beams": 4,
        "length_penalty": 0.8,
        "encoder_no_repeat_ngram_size": 3,
        "num_beam_groups": 1,
    }
    facts = read_generation_config({}, said)
    assert (facts.decoder_start_token_id, facts.eos_token_ids, facts.suppress_tokens, facts.bad_words_ids) == (
        3,
        (2, 5),
        (7,),
        ((8, 9),),
    )
    assert facts.sampling == {"max_tokens": 39, "num_beams": 4, "length_penalty": 0.8, "temperature": 0.0}
    assert facts.ignored_fields == ("encoder_no_repeat_ngram_size",)
    assert read_generation_config({"eos_token_id": 1, "num_beams": 4}, None).sampling is None


def test_requests_override_the_defaults() -> None:
    facts = read_generation_config(
        {}, {"num_beams": 4, "length_penalty": 0.5, "bad_words_ids": [[7, 8]], "max_new_tokens": 9}
    )
    mixer = AttentionConfig(4)
    model = Transformer(ModelConfig(16, 31, 24, StackConfig(1, {"L": LayerConfig(mixer, PlainMLPConfig(20))}))).eval()
    with LLM(model, None, CacheConfig(max_seq_len=24, max_num_seqs=8), generation=facts) as llm:
        plain = llm.sampling_params()
        assert (plain.num_beams, plain.length_penalty, plain.max_tokens, plain.bad_words_ids) == (4, 0.5, 9, ((7, 8),))
        assert (llm.sampling_params(n=3).num_beams, llm.sampling_params(n=3).n) == (4, 3)
        assert llm.sampling_params(n=6, temperature=1.0).num_beams == 1
        assert (llm.sampling_params(temperature=0.7).num_beams, llm.sampling_params(temperature=0.7).max_tokens) == (
            1,
            9,
        )
        assert (llm.sampling_params(num_beams=2).num_beams, llm.sampling_params(max_tokens=3).max_tokens) == (2, 3)
