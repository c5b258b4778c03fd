"""Checkpoints of kvad in transformers: the newest step of a run, loaded by Auto classes, gives the same logits.

    FOLDER/5/bin/python -m tests.hf_parity.steps [--only NAME ...]

A tiny model of each topology is trained by kvad (an encoder is only saved as training would save it), then loaded
from its step's folder by kvad and by transformers. Both tokenize the texts, and both decode greedily.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvad.checkpoint.conversion import HFConfigReader
from kvad.checkpoint.families import find_family
from kvad.checkpoint.folder import list_steps
from kvad.checkpoint.generation_config import GenerationConfig
from kvad.checkpoint.hf_layout import choose_layout
from kvad.checkpoint.loader import load_model
from kvad.config.model import ModelConfig
from kvad.config.serialization import to_dict
from kvad.llm import LLM
from kvad.model import whole_sequences
from kvad.model.transformer import Transformer
from kvad.text.tokenizer import train_tokenizer
from kvad.train.config.run import RunConfig
from kvad.train.loop.run import train_model
from tests.support.random_models import build
from tests.support.run_steps import save_step
from tests.support.trained_models import T5, configs
from tests.support.uncached import run_uncached

CLASSES = {
    "llama": "LlamaForCausalLM",
    "bert": "BertForMaskedLM",
    "marian": "MarianMTModel",
    "bart": "BartForConditionalGeneration",
    "t5": "T5ForConditionalGeneration",
}
AUTO = {
    "decoder": "AutoModelForCausalLM",
    "encoder": "AutoModelForMaskedLM",
    "encoder-decoder": "AutoModelForSeq2SeqLM",
}
TEXT = "the fox and the dog"
WORDS = ["the quick fox", "the lazy dog", "a quick dog", "the fox and the dog", "a lazy fox and a dog"]
IDS, SOURCE = [5, 17, 250, 9, 77, 31, 8], [40, 41, 255, 43, 44]
TOLERANCE = {"rtol": 1.3e-6, "atol": 2e-5}


def model_of(name: str) -> dict[str, Any]:
    """Return the ``model`` of a run's configuration."""
    if name in ("llama", "marian"):
        return {"preset": {"llama": "tiny", "marian": "marian-tiny"}[name]}
    config = find_family("t5").read(HFConfigReader(T5, "t5")) if name == "t5" else configs()["encoder-decoder"]
    return to_dict(config)  # type: ignore[no-any-return]


def make(name: str, folder: Path) -> Path:
    """Train a model, or save one as training would; return its newest step."""
    run = folder / "run"
    if name == "bert":
        return save_encoder(configs()["encoder"], run)
    corpus = folder / "corpus.tsv"
    pairs = name != "llama"
    lines = [f"{words}\t{words[::-1]}" if pairs else f"{words}." for words in WORDS * 12]
    corpus.write_text("\n".join(lines) + "\n")
    config = RunConfig.from_dict(
        {
            "model": model_of(name),
            "data": {"seq_len": 64 if pairs else 32},
            "tokenizer": {"kind": "bpe", "vocab_size": 290},
            "optim": {"lr": 1e-2},
            "train": {"steps": 12, "batch_size": 4, "precision": "fp32", "log_interval": 100, "save_interval": 100},
        }
    )
    train_model(config, [corpus], run)
    return list_steps(run)[-1]


def save_encoder(config: ModelConfig, run: Path) -> Path:
    model = build(config, seed=2, dtype=torch.float32)
    tokenizer = train_tokenizer("bpe", WORDS, vocab_size=290)
    return save_step(run, 1, config, model.state_dict(), tokenizer, layout=choose_layout(config, GenerationConfig()))


@torch.inference_mode()
def logits_of(model: Transformer) -> Tensor:
    """Return the logits [T, V] of the uncached model."""
    if model.config.kind == "encoder":
        read = whole_sequences([IDS], model.token_embedding.device)
        return model.logits(model.encode(read), read.logit_indices)
    return run_uncached(model, IDS, source=SOURCE if model.config.kind == "encoder-decoder" else None)


@torch.inference_mode()
def reference_logits(step: Path, kind: str) -> Tensor:
    """Return the same logits, computed by the class that transformers chooses for a folder."""
    import transformers

    model = getattr(transformers, AUTO[kind]).from_pretrained(step).eval()
    assert isinstance(transformers.AutoModel.from_pretrained(step), transformers.PreTrainedModel)
    ids, source = torch.tensor([IDS]), torch.tensor([SOURCE])
    if kind == "encoder-decoder":
        return model(input_ids=source, decoder_input_ids=ids).logits[0]  # type: ignore[no-any-return]
    return model(input_ids=ids).logits[0]  # type: ignore[no-any-return]


def check(name: str, folder: Path) -> float:
    """Return the largest difference of logits. Raises AssertionError if anything else differs."""
    import transformers

    step = make(name, folder)
    model = load_model(step)[0]
    kind = model.config.kind
    expected, logits = reference_logits(step, kind), logits_of(model)
    torch.testing.assert_close(logits, expected, **TOLERANCE)
    config = transformers.AutoConfig.from_pretrained(step)
    assert config.architectures == [CLASSES[name]], config.architectures
    tokenizer = transformers.AutoTokenizer.from_pretrained(step)
    with LLM.load(step, max_num_seqs=1) as llm:
        inputs = tokenizer(TEXT, return_tensors="pt")
        assert inputs["input_ids"][0].tolist() == llm.encode(TEXT)
        if kind != "encoder":
            reference = getattr(transformers, AUTO[kind]).from_pretrained(step).eval()
            options = {"attention_mask": inputs["attention_mask"], "do_sample": False, "max_new_tokens": 8}
            tokens = reference.generate(inputs["input_ids"], **options)[0].tolist()
            start = len(inputs["input_ids"][0]) if kind == "decoder" else 1
            assert tokens[start:] == list(llm.generate(TEXT, max_tokens=8, temperature=0).tokens)
    return float((expected - logits).abs().max())


def main() -> int:
    import transformers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", default=list(CLASSES))
    for name in parser.parse_args().only:
        with tempfile.TemporaryDirectory() as folder:
            largest = check(name, Path(folder))
        print(f"{name:8} {CLASSES[name]:30} transformers {transformers.__version__}: {largest:.1e}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
