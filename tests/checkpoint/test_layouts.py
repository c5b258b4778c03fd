"""Steps of a run in Hugging Face's layout and in kvad's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvad.checkpoint.conversion import HFConfigReader
from kvad.checkpoint.families import find_family
from kvad.checkpoint.folder import accept_edit, is_hf, list_files
from kvad.checkpoint.generation_config import GenerationConfig
from kvad.checkpoint.handle import TrainingState
from kvad.checkpoint.hf_layout import HFCheckpoint, choose_layout
from kvad.checkpoint.loader import load_model
from kvad.checkpoint.native import NativeCheckpoint, open_folder
from kvad.config import layers as cfg
from kvad.config.model import ModelConfig, canonical_config
from kvad.errors import CheckpointError
from kvad.inspection.checkpoint import summarize_checkpoint
from kvad.inspection.doctor import check_checkpoint
from kvad.model.transformer import Transformer
from kvad.text.tokenizer import train_tokenizer
from tests.support.random_models import build
from tests.support.run_steps import save_step
from tests.support.trained_models import T5, configs

BPE = train_tokenizer("bpe", ["a text of some words, and a few more words of it"] * 3, vocab_size=280)
PAIRS = GenerationConfig(
    decoder_start_token_id=1,
    bos_token_id=1,
    eos_token_ids=(2,),
    source_eos_token_id=2,
    pad_token_id=3,
    suppress_tokens=(3,),
    sampling={"temperature": 0.0, "max_tokens": 9},
)
TRAINING = TrainingState({"exp_avg.x": torch.arange(3.0), "rng": torch.get_rng_state()}, {"step": 7, "loss": 0.1 + 0.2})


def saved(run: Path, kind: str, *, native: bool = False, tokenizer: Any = BPE) -> tuple[Transformer, Path]:
    config = configs()[kind]
    generation = PAIRS if kind == "encoder-decoder" else GenerationConfig()
    model = build(config, seed=2, dtype=torch.float32)
    options = {"layout": None if native else choose_layout(config, generation), "generation": generation}
    return model, save_step(run, 3, config, model.state_dict(), tokenizer, training=TRAINING, **options)


@pytest.mark.parametrize("native", [False, True], ids=["hf", "native"])
@pytest.mark.parametrize("kind", configs())
def test_a_step_round_trips_in_either_layout(tmp_path: Path, kind: str, native: bool) -> None:
    model, path = saved(tmp_path, kind, native=native)
    opened = open_folder(tmp_path, verify=True)
    assert opened.path == path and isinstance(opened, NativeCheckpoint if native else HFCheckpoint)
    assert is_hf(path) != native
    assert canonical_config(opened.config) == canonical_config(model.config)
    assert opened.generation == (PAIRS if kind == "encoder-decoder" else GenerationConfig())
    assert opened.tokenizer is not None and opened.training is not None and opened.files is not None
    assert opened.tokenizer.fingerprint() == BPE.fingerprint() and opened.tokenizer.special_tokens == BPE.special_tokens
    assert opened.training.state == TRAINING.state
    assert torch.equal(opened.training.tensors["rng"], TRAINING.tensors["rng"])
    weights = load_model(tmp_path, verify=True)[0].state_dict()
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert opened.stored_dtype == torch.float32 and len(opened.fingerprint()) == 64
    on_disk = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
    assert set(opened.files) == on_disk - {"manifest.json"}, "the manifest lists every file"


def test_the_model_is_stored_once(tmp_path: Path) -> None:
    _, path = saved(tmp_path, "decoder")
    content = json.loads((path / "config.json").read_text())
    assert content["model_type"] == "llama" and content["architectures"] == ["LlamaForCausalLM"]
    assert content["dtype"] == "float32" and "kvad" not in content and "model" not in content
    assert content["eos_token_id"] is None, "the class would use its default"
    names = load_file(path / "model.safetensors")
    assert "model.layers.0.self_attn.q_proj.weight" in names and "lm_head.weight" not in names


def test_equal_steps_have_equal_files(tmp_path: Path) -> None:
    first, second = (open_folder(saved(tmp_path / name, "encoder-decoder")[1]) for name in "ab")
    assert first.files == second.files and first.fingerprint() == second.fingerprint()


def test_a_byte_tokenizer_is_retained(tmp_path: Path) -> None:
    byte = train_tokenizer("byte", [])
    _, path = saved(tmp_path, "decoder", tokenizer=byte)
    tokenizer = open_folder(path).tokenizer
    assert tokenizer is not None and tokenizer.fingerprint() == byte.fingerprint()


# ---------------------------------------------------------------- damaged and edited folders


def test_verify_inspect_and_doctor_detect_a_flipped_bit(tmp_path: Path) -> None:
    _, path = saved(tmp_path, "decoder")
    weights = path / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-5] ^= 1
    weights.write_bytes(raw)
    open_folder(tmp_path)
    message = r"model.safetensors differs from its manifest: same size, other sha256"
    for verify in (True, "tensors"):
        with pytest.raises(CheckpointError, match=message):
            open_folder(tmp_path, verify=verify)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=message):
        summarize_checkpoint(tmp_path, check=True)
    assert {finding.check for finding in check_checkpoint(tmp_path) if not finding.ok} == {"sha256"}


def test_an_edited_config_and_a_lost_manifest(tmp_path: Path) -> None:
    _, path = saved(tmp_path, "decoder")
    text = (path / "config.json").read_text()
    (path / "config.json").write_text(text.replace('"max_position_embeddings": 64', '"max_position_embeddings": 63'))
    with pytest.raises(CheckpointError, match=r"config.json differs from its manifest.*kvad doctor .* --fix accepts"):
        _ = open_folder(path).config
    with pytest.raises(CheckpointError, match=r"config.json differs from its manifest"):
        open_folder(path, verify=True)
    accept_edit(path, "config.json")
    assert open_folder(path, verify=True).config.max_seq_len == 63
    (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest.json is missing"):
        open_folder(path)
    assert "manifest.json is missing" in summarize_checkpoint(path).problems[0]
    assert not next(iter(check_checkpoint(path))).ok


def test_a_manifest_of_another_tool_is_ignored(tmp_path: Path) -> None:
    _, path = saved(tmp_path, "decoder")
    (path / "manifest.json").write_text('{"name": "an app of the web"}')
    for file in (path / "training").iterdir():
        file.unlink()
    (path / "training").rmdir()
    assert list_files(path) is None and open_folder(path, verify=True).files is None
    assert summarize_checkpoint(path).files is None and summarize_checkpoint(path).problems == ()


def test_inspect_and_doctor_accept_a_complete_step(tmp_path: Path) -> None:
    _, path = saved(tmp_path, "encoder-decoder")
    summary, files = summarize_checkpoint(tmp_path, check=True), list_files(path)
    assert summary.problems == () and summary.checked and summary.origin == "bart"
    assert files is not None and summary.files == len(files)
    assert summary.training is not None and summary.training["step"] == 7
    assert summary.tokenizer is not None and summary.tokenizer.vocab == BPE.vocab_size
    findings = list(check_checkpoint(tmp_path))
    assert all(finding.ok for finding in findings), findings
    assert [finding.check for finding in findings][:2] == ["manifest", "sha256"]


# ---------------------------------------------------------------- choice of the layout


def test_equivalent_configs_have_the_same_layout() -> None:
    config = configs()["decoder"]
    layer = config.stack.layer_config(0)
    implicit = replace(layer, attention=replace(layer.attention, num_kv_heads=None))
    stack = replace(config.stack, layer_types={"Z": implicit}, layer_pattern="ZZ")
    layout = choose_layout(replace(config, decoder=stack), GenerationConfig())
    assert layout.hf_class == "LlamaForCausalLM" and layout.content["num_key_value_heads"] == 6


def test_a_model_that_would_be_read_back_differently_is_native() -> None:
    t5 = find_family("t5").read(HFConfigReader(T5, "t5"))
    assert t5.encoder is not None and choose_layout(t5, PAIRS).hf_class == "T5ForConditionalGeneration"
    types = {"Z": t5.encoder.layer_config(0)}
    with pytest.raises(CheckpointError, match="other parameter names"):  # the bias table is named after the letter
        choose_layout(replace(t5, encoder=replace(t5.encoder, layer_types=types, layer_pattern="Z")), PAIRS)
    with pytest.raises(CheckpointError, match="other generation defaults"):
        choose_layout(t5, replace(PAIRS, sampling={"typical_p": 0.5, "temperature": 0.0}))
    alibi = cfg.LayerConfig(
        cfg.AttentionConfig(6, position=cfg.AlibiConfig(), logit_softcap=3.0), cfg.GatedMLPConfig(52)
    )
    with pytest.raises(CheckpointError, match="no class of transformers"):
        choose_layout(ModelConfig(36, 300, 64, cfg.StackConfig(2, {"L": alibi})), GenerationConfig())
