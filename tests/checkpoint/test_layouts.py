"""A training step in Hugging Face's layout is as whole, as checked and as much a run's as one in kvad's own."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvad.checkpoint.conversion import HFConfigReader
from kvad.checkpoint.families import find_family
from kvad.checkpoint.folder import is_hf, list_files
from kvad.checkpoint.generation_config import GenerationConfig
from kvad.checkpoint.handle import TrainingState
from kvad.checkpoint.hf_layout import HFCheckpoint, choose_layout
from kvad.checkpoint.loader import load_model
from kvad.checkpoint.native import NativeCheckpoint, open_folder, save_step
from kvad.config import layers as cfg
from kvad.config.model import ModelConfig, canonical_config
from kvad.errors import CheckpointError
from kvad.inspection.checkpoint import summarize_checkpoint
from kvad.inspection.doctor import check_checkpoint
from kvad.model.transformer import Transformer
from kvad.text.tokenizer import train_tokenizer
from tests.support.random_models import randomise
from tests.support.trained_models import T5, configs

BPE = train_tokenizer("bpe", ["a text of some words, and a few more words of it"] * 3, vocab_size=280)
SAMPLING = {"temperature": 0.0, "max_tokens": 9}
PAIRS = GenerationConfig(
    decoder_start_token_id=1,
    bos_token_id=1,
    eos_token_ids=(2,),
    source_eos_token_id=2,
    pad_token_id=3,
    suppress_tokens=(3,),
    sampling=SAMPLING,
)
TRAINING = TrainingState({"exp_avg.x": torch.arange(3.0), "rng": torch.get_rng_state()}, {"step": 7, "loss": 0.1 + 0.2})


def saved(run: Path, kind: str, *, own: bool = False, step: int = 3, tokenizer: Any = BPE) -> tuple[Transformer, Path]:
    config = configs()[kind]
    said = PAIRS if kind == "encoder-decoder" else GenerationConfig()
    torch.manual_seed(1)
    model, generator = Transformer(config), torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        randomise(name, parameter, generator)
    layout = None if own else choose_layout(config, said)
    path = save_step(run, step, config, model.state_dict(), tokenizer, TRAINING, layout=layout, generation=said)
    return model, path


@pytest.mark.parametrize("own", [False, True], ids=["theirs", "own"])
@pytest.mark.parametrize("kind", configs())
def test_a_step_round_trips_in_either_layout(tmp_path: Path, kind: str, own: bool) -> None:
    model, path = saved(tmp_path, kind, own=own)
    opened = open_folder(tmp_path, verify=True)
    assert opened.path == path and isinstance(opened, NativeCheckpoint if own else HFCheckpoint) and is_hf(path) != own
    assert canonical_config(opened.config) == canonical_config(model.config)
    assert opened.generation == (PAIRS if kind == "encoder-decoder" else GenerationConfig())
    assert opened.tokenizer is not None and opened.training is not None and opened.files is not None
    assert opened.tokenizer.fingerprint() == BPE.fingerprint() and opened.tokenizer.special_tokens == BPE.special_tokens
    assert opened.training.state == TRAINING.state
    assert torch.equal(opened.training.tensors["rng"], TRAINING.tensors["rng"])
    again, _ = load_model(tmp_path, verify=True)
    assert again.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert opened.stored_dtype == torch.float32 and len(opened.fingerprint()) == 64
    on_disk = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
    assert set(opened.files) == on_disk - {"manifest.json"}, "the manifest lists every file"


def test_the_model_is_stored_once(tmp_path: Path) -> None:
    _, path = saved(tmp_path, "decoder")
    content = json.loads((path / "config.json").read_text())
    assert content["model_type"] == "llama" and content["architectures"] == ["LlamaForCausalLM"]
    assert content["dtype"] == "float32" and "kvad" not in content and "model" not in content
    assert content["eos_token_id"] is None, "their class would stop at a token of its own"
    names = load_file(path / "model.safetensors")
    assert "model.layers.0.self_attn.q_proj.weight" in names and "lm_head.weight" not in names


def test_the_same_step_twice_is_the_same_bytes(tmp_path: Path) -> None:
    first, second = (open_folder(saved(tmp_path / name, "encoder-decoder")[1]) for name in "ab")
    assert first.files == second.files and first.fingerprint() == second.fingerprint()


def test_a_byte_tokenizer_is_retained(tmp_path: Path) -> None:
    byte = train_tokenizer("byte", [])
    _, path = saved(tmp_path, "decoder", tokenizer=byte)
    found = open_folder(path).tokenizer
    assert found is not None and found.fingerprint() == byte.fingerprint()


# ---------------------------------------------------------------- what is not as it was saved


def test_verify_inspect_and_doctor_detect_a_flipped_bit(tmp_path: Path) -> None:
    _, path = saved(tmp_path, "decoder")
    weights = path / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-5] ^= 1
    weights.write_bytes(raw)
    open_folder(tmp_path)
    says = r"model.safetensors differs from its manifest: same size, other sha256"
    with pytest.raises(CheckpointError, match=says):
        open_folder(tmp_path, verify="tensors")
    with pytest.raises(CheckpointError, match=says):
        summarize_checkpoint(tmp_path, check=True)
    assert {finding.check for finding in check_checkpoint(tmp_path) if not finding.ok} == {"sha256"}


def test_a_truncated_step_names_an_older_one(tmp_path: Path) -> None:
    saved(tmp_path, "decoder", step=3)
    _, path = saved(tmp_path, "decoder", step=4)
    os.truncate(path / "model.safetensors", 1000)
    with pytest.raises(CheckpointError, match=r"is truncated: 1,000 of .*An older checkpoint is .*step-00000003"):
        open_folder(tmp_path)


def test_an_edited_config_and_a_lost_manifest(tmp_path: Path) -> None:
    _, path = saved(tmp_path, "decoder")
    text = (path / "config.json").read_text()
    (path / "config.json").write_text(text.replace('"max_position_embeddings": 64', '"max_position_embeddings": 63'))
    assert open_folder(path).config.max_seq_len == 63
    with pytest.raises(CheckpointError, match=r"config.json differs from its manifest"):
        open_folder(path, verify=True)
    (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest.json is missing"):
        open_folder(path)
    assert "manifest.json is missing" in summarize_checkpoint(path).problems[0]
    assert not next(iter(check_checkpoint(path))).ok


def test_a_foreign_manifest_is_ignored(tmp_path: Path) -> None:
    _, path = saved(tmp_path, "decoder")
    (path / "manifest.json").write_text('{"name": "an app of the web"}')
    for file in (path / "training").iterdir():
        file.unlink()
    (path / "training").rmdir()
    assert list_files(path) is None and open_folder(path, verify=True).files is None
    assert summarize_checkpoint(path).files is None and summarize_checkpoint(path).problems == ()


def test_inspect_and_doctor_accept_a_complete_step(tmp_path: Path) -> None:
    _, path = saved(tmp_path, "encoder-decoder")
    found, files = summarize_checkpoint(tmp_path, check=True), list_files(path)
    assert found.problems == () and found.checked and found.origin == "bart"
    assert files is not None and found.files == len(files)
    assert found.training is not None and found.training["step"] == 7
    assert found.tokenizer is not None and found.tokenizer.vocab == BPE.vocab_size
    findings = list(check_checkpoint(tmp_path))
    assert all(finding.ok for finding in findings), findings
    assert [finding.check for finding in findings][:2] == ["manifest", "sha256"]


# ---------------------------------------------------------------- which layout


def test_equal_spellings_choose_the_same_layout() -> None:
    config = configs()["decoder"]
    layer = config.stack.layer_config(0)
    spelled = replace(layer, attention=replace(layer.attention, num_kv_heads=None))
    stack = replace(config.stack, layer_types={"Z": spelled}, layer_pattern="ZZ")
    layout = choose_layout(replace(config, decoder=stack), GenerationConfig())
    assert layout.hf_class == "LlamaForCausalLM" and layout.content["num_key_value_heads"] == 6


def test_a_model_that_would_be_read_back_differently_is_native() -> None:
    t5 = find_family("t5").read(HFConfigReader(T5, "t5"))
    assert t5.encoder is not None and choose_layout(t5, PAIRS).hf_class == "T5ForConditionalGeneration"
    kinds = {"Z": t5.encoder.layer_config(0)}
    with pytest.raises(CheckpointError, match="other parameter names"):  # the table of distances is kept by letter
        choose_layout(replace(t5, encoder=replace(t5.encoder, layer_types=kinds, layer_pattern="Z")), PAIRS)
    with pytest.raises(CheckpointError, match="other generation defaults"):
        choose_layout(t5, replace(PAIRS, sampling={"typical_p": 0.5, "temperature": 0.0}))
    alibi = cfg.LayerConfig(
        cfg.AttentionConfig(6, position=cfg.AlibiConfig(), logit_softcap=3.0), cfg.GatedMLPConfig(52)
    )
    with pytest.raises(CheckpointError, match="no class of transformers"):
        choose_layout(ModelConfig(36, 300, 64, cfg.StackConfig(2, {"L": alibi})), GenerationConfig())
