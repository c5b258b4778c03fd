"""A tiny byte-level checkpoint, and a command line run that returns exit code and output."""

import io
import sys
from typing import NamedTuple

from kvad.checkpoint.native import save_checkpoint
from kvad.cli.main import main
from kvad.config.layers import AttentionConfig, GatedMLPConfig, LayerConfig, StackConfig
from kvad.config.model import ModelConfig
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
