"""Exports of every topology: read by transformers, and imported again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kvad.checkpoint.export import export_hf, import_hf
from kvad.checkpoint.generation_config import GenerationConfig
from kvad.checkpoint.hf_layout import choose_family
from kvad.checkpoint.loader import load_model, open_checkpoint
from kvad.checkpoint.native import save_checkpoint
from kvad.checkpoint.safetensors_io import open_tensors
from kvad.cli.main import main as kvad
from kvad.config import layers as cfg
from kvad.config.model import ModelConfig
from kvad.errors import CheckpointError, UsageError
from kvad.model.transformer import Transformer
from kvad.text.tokenizer import train_tokenizer
from tests.hf_parity.steps import TOLERANCE, logits_of, reference_logits
from tests.support.lab_models import write_foreign
from tests.support.random_models import build
from tests.support.trained_models import configs

CLASSES = {
    "decoder": "LlamaForCausalLM",
    "encoder": "BertForMaskedLM",
    "encoder-decoder": "BartForConditionalGeneration",
}


@pytest.fixture(params=CLASSES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def save_model(kind: str, folder: Path) -> Transformer:
    model = build(configs()[kind], seed=2, dtype=torch.float32)
    tokenizer = train_tokenizer("bpe", ["a text of some words, and a few more words of it"] * 3, vocab_size=300)
    tokens = {"decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_ids": (2,), "pad_token_id": 0}
    generation = GenerationConfig(**tokens) if kind == "encoder-decoder" else None
    save_checkpoint(folder, model.config, model.state_dict(), tokenizer, generation=generation)
    return model


def test_transformers_computes_the_logits_of_an_export(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = save_model(kind, tmp_path / "native")
    assert export_hf(open_checkpoint(tmp_path / "native"), tmp_path / "hf") == CLASSES[kind]
    torch.testing.assert_close(logits_of(model), reference_logits(tmp_path / "hf", kind), **TOLERANCE)
    tokenizer, text = open_checkpoint(tmp_path / "native").tokenizer, "a few words of it"
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer is not None
    assert hf_tokenizer(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(text)


def test_export_and_import_round_trip(kind: str, tmp_path: Path) -> None:
    model = save_model(kind, tmp_path / "native")
    export_hf(open_checkpoint(tmp_path / "native"), tmp_path / "hf")
    import_hf(open_checkpoint(tmp_path / "hf"), tmp_path / "read_back")
    read_back, opened = load_model(tmp_path / "read_back")
    assert opened.config == model.config and opened.origin is not None
    for name, tensor in model.state_dict().items():
        assert torch.equal(read_back.state_dict()[name], tensor), name
    direct, _ = load_model(tmp_path / "hf")
    torch.testing.assert_close(logits_of(direct), logits_of(model), rtol=0, atol=0)
    if kind == "encoder-decoder":
        generation = opened.generation
        assert (generation.decoder_start_token_id, generation.eos_token_ids, generation.pad_token_id) == (1, (2,), 0)


def test_selection_biases_stay_float32(tmp_path: Path) -> None:
    foreign = write_foreign(tmp_path / "foreign", "glm4-moe")
    name = "decoder.layers.1.mlp.selection_bias"
    before = dict(open_checkpoint(foreign).weights())[name]
    assert not torch.equal(before, before.bfloat16().float())
    model, handle = load_model(foreign, dtype="bfloat16")
    assert torch.equal(model.get_parameter(name), before) and model.token_embedding.dtype == torch.bfloat16
    export_hf(handle, tmp_path / "hf", dtype=torch.bfloat16)
    import_hf(handle, tmp_path / "native", dtype=torch.bfloat16)
    for folder in ("hf", "native"):
        stored = dict(open_checkpoint(tmp_path / folder).weights())
        assert torch.equal(stored[name], before) and stored["decoder.norm.weight"].dtype == torch.bfloat16


def test_a_tied_matrix_is_written_once(tmp_path: Path) -> None:
    save_model("decoder", tmp_path / "native")
    export_hf(open_checkpoint(tmp_path / "native"), tmp_path / "hf")
    assert "lm_head.weight" not in open_tensors(tmp_path / "hf")


def test_a_model_without_a_matching_class_is_refused(tmp_path: Path) -> None:
    layer = cfg.LayerConfig(
        cfg.AttentionConfig(6, position=cfg.AlibiConfig(), logit_softcap=3.0), cfg.GatedMLPConfig(52, "relu2")
    )
    odd = ModelConfig(36, 300, 64, cfg.StackConfig(2, {"L": layer}, norm_position="after"))
    with pytest.raises(CheckpointError, match="no class of transformers can hold this model"):
        choose_family(odd)
    with pytest.raises(CheckpointError, match="llama cannot express"):
        choose_family(odd, "llama")
    with pytest.raises(UsageError, match="unknown family 'lama'"):
        choose_family(odd, "lama")


def test_a_failed_export_leaves_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model("decoder", tmp_path / "native")
    export_hf(open_checkpoint(tmp_path / "native"), tmp_path / "hf")
    before = {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvad.checkpoint.export.write_sharded", full)
    with pytest.raises(Exception, match=r"[Nn]o space"):
        export_hf(open_checkpoint(tmp_path / "native"), tmp_path / "hf")
    assert {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()} == before
    assert json.loads(before["config.json"])["model_type"] == "llama"


def test_the_standard_snippet_of_transformers_runs(tmp_path: Path) -> None:
    """The folder of a run, its best checkpoint and its export: tokenizer, padding, end token and ``generate``."""
    transformers = pytest.importorskip("transformers")
    (tmp_path / "text.txt").write_text("a text of some words, and a few more words of it\n" * 40)
    options = "--preset tiny --seq-len 32 --steps 1 --batch-size 1 --precision fp32 --set model.hidden_size=32"
    words = ["train", str(tmp_path / "text.txt"), *options.split(), "--set", "tokenizer.vocab_size=280"]
    assert kvad([*words, "--out", str(tmp_path / "run")]) == 0
    assert kvad(["export", str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
    tokenizer = open_checkpoint(tmp_path / "run").tokenizer
    assert tokenizer is not None and tokenizer.special_tokens.eos is None, "kvad's own roles are unchanged"
    for folder in (tmp_path / "run" / "best", tmp_path / "hf"):
        tok = transformers.AutoTokenizer.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        model.generate(**tok("some words", return_tensors="pt"), max_new_tokens=4)
        padded = tok(["some words", "a text of it"], return_tensors="pt", padding=True, padding_side="left")
        assert model.generate(**padded, max_new_tokens=4, do_sample=False).shape[0] == 2
        end = tokenizer.special_tokens.separator
        assert tok.eos_token_id == tok.pad_token_id == end and model.generation_config.eos_token_id in (end, [end])
        read_back = open_checkpoint(folder).tokenizer
        assert read_back is not None and read_back.fingerprint() == tokenizer.fingerprint()
