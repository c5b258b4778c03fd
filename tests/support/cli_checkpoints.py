"""A tiny byte-level checkpoint, and a command line run that returns exit code and output."""

import io
import sys
from dataclasses import replace
from typing import NamedTuple

import torch

from kvad.checkpoint.adapter import adapter_format, base_fingerprint, save_adapter
from kvad.checkpoint.loader import open_checkpoint
from kvad.checkpoint.native import save_checkpoint
from kvad.checkpoint.peft import trainable_linears
from kvad.cli.main import main
from kvad.config.layers import AttentionConfig, GatedMLPConfig, LayerConfig, StackConfig
from kvad.config.model import ModelConfig
from kvad.model.lora import LoraFactors
from kvad.text.tokenizer import train_tokenizer
from tests.support.random_models import build

LIMIT = 96


def write_model(folder, *, tokenizer=True, limit=LIMIT, padding=0):
    """Write a tiny checkpoint; its embedding has ``padding`` rows without a token."""
    byte_tokenizer = train_tokenizer("byte", [])
    vocab = byte_tokenizer.vocab_size + padding if tokenizer else 40
    config = ModelConfig(
        hidden_size=24,
        vocab_size=vocab,
        max_seq_len=limit,
        decoder=StackConfig(2, {"L": LayerConfig(AttentionConfig(4, 2), GatedMLPConfig(40))}),
    )
    model = build(config)
    save_checkpoint(folder, config, model.float().state_dict(), byte_tokenizer if tokenizer else None)
    return folder


def write_adapter(folder, base, rank, *, uses=lambda layer: True, template=None):
    """Write a LoRA adapter with random factors for the layers that ``uses`` accepts."""
    opened = open_checkpoint(base)
    form = adapter_format(opened, str(base), base_fingerprint(opened))
    if template is not None:
        form = replace(form, tokenizer_files={**form.tokenizer_files, "chat_template.jinja": template.encode()})
    shapes = trainable_linears(opened.config)
    torch.manual_seed(rank)
    names = filter(uses, shapes)
    factors = {n: LoraFactors(torch.randn(rank, shapes[n][1]), torch.randn(shapes[n][0], rank), 0.5) for n in names}
    save_adapter(folder, form, factors, rank=rank, alpha=rank / 2, use_rslora=False, dropout=0.0)
    return folder


class CommandResult(NamedTuple):
    code: int
    out: str
    err: str


def run(capsys, *arguments, stdin=None, monkeypatch=None):
    """Run ``kvad arguments``; ``stdin`` is bytes."""
    if stdin is not None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
    capsys.readouterr()
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return CommandResult(code, captured.out, captured.err)
