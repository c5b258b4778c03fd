"""Models that kvad made, of each topology, written for transformers and read by it; and the way there and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvad.checkpoint.export import export_hf, import_hf
from kvad.checkpoint.generation_config import GenerationConfig
from kvad.checkpoint.hf_layout import choose_family
from kvad.checkpoint.loader import load_model, open_checkpoint
from kvad.checkpoint.native import save_checkpoint
from kvad.config import layers as cfg
from kvad.config.model import ModelConfig
from kvad.errors import CheckpointError, UsageError
from kvad.model.transformer import Transformer
from kvad.text.tokenizer import train_tokenizer
from kvad.verify.replay import run_uncached, run_whole_sequence
from tests.support.random_models import randomise
from tests.support.trained_models import configs

CLASSES = {
    "decoder": "LlamaForCausalLM",
    "encoder": "BertForMaskedLM",
    "encoder-decoder": "BartForConditionalGeneration",
}


@pytest.fixture(params=CLASSES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def made(kind: str, folder: Path) -> Transformer:
    torch.manual_seed(1)
    model = Transformer(configs()[kind])
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        randomise(name, parameter, generator)
    tokenizer = train_tokenizer("bpe", ["a text of some words, and a few more words of it"] * 3, vocab_size=300)
    facts = (
        GenerationConfig(decoder_start_token_id=1, bos_token_id=1, eos_token_ids=(2,), pad_token_id=0)
        if kind == "encoder-decoder"
        else None
    )
    save_checkpoint(folder, model.config, model.state_dict(), tokenizer, generation=facts)
    return model.eval()


IDS, SOURCE = [5, 17, 250, 9, 77, 31, 8], [40, 41, 299, 43, 44]


@torch.inference_mode()
def said(model: Transformer) -> Tensor:
    if model.config.kind == "encoder":
        step = run_whole_sequence(model, IDS)
        return model.logits(model.encode(step), step.logit_indices)
    return run_uncached(model, IDS, source=SOURCE if model.config.kind == "encoder-decoder" else None)


def test_transformers_gives_the_same_logits_for_an_export(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = made(kind, tmp_path / "ours")
    assert export_hf(open_checkpoint(tmp_path / "ours"), tmp_path / "theirs") == CLASSES[kind]
    theirs = getattr(transformers, CLASSES[kind]).from_pretrained(tmp_path / "theirs", attn_implementation="eager")
    assert isinstance(transformers.AutoModel.from_pretrained(tmp_path / "theirs"), transformers.PreTrainedModel)
    ids, source = torch.tensor([IDS]), torch.tensor([SOURCE])
    with torch.inference_mode():
        if kind == "encoder-decoder":
            expected = theirs.eval()(input_ids=source, decoder_input_ids=ids).logits[0]
        else:
            expected = theirs.eval()(input_ids=ids).logits[0]
    torch.testing.assert_close(said(model), expected, rtol=1.3e-6, atol=2e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    text = "a few words of it"
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == open_checkpoint(
        tmp_path / "ours"
    ).tokenizer.encode(text)  # type: ignore[union-attr]


def test_export_and_import_round_trip(kind: str, tmp_path: Path) -> None:
    model = made(kind, tmp_path / "ours")
    export_hf(open_checkpoint(tmp_path / "ours"), tmp_path / "theirs")
    import_hf(open_checkpoint(tmp_path / "theirs"), tmp_path / "again")
    again, opened = load_model(tmp_path / "again")
    assert opened.config == model.config and opened.origin is not None
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    straight, _ = load_model(tmp_path / "theirs")
    torch.testing.assert_close(said(straight), said(model), rtol=0, atol=0)
    if kind == "encoder-decoder":
        facts = opened.generation
        assert (facts.decoder_start_token_id, facts.eos_token_ids, facts.pad_token_id) == (1, (2,), 0)


def test_a_tied_matrix_is_written_once(tmp_path: Path) -> None:
    made("decoder", tmp_path / "ours")
    export_hf(open_checkpoint(tmp_path / "ours"), tmp_path / "theirs")
    from kvad.checkpoint.safetensors_io import open_tensors

    assert "lm_head.weight" not in open_tensors(tmp_path / "theirs")


def test_a_model_that_no_class_can_hold_is_refused(tmp_path: Path) -> None:
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
    made("decoder", tmp_path / "ours")
    export_hf(open_checkpoint(tmp_path / "ours"), tmp_path / "theirs")
    before = {path.name: path.read_bytes() for path in (tmp_path / "theirs").iterdir()}

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvad.checkpoint.export.write_sharded", full)
    with pytest.raises(Exception, match=r"[Nn]o space"):
        export_hf(open_checkpoint(tmp_path / "ours"), tmp_path / "theirs")
    assert {path.name: path.read_bytes() for path in (tmp_path / "theirs").iterdir()} == before
    assert json.loads(before["config.json"])["model_type"] == "llama"
