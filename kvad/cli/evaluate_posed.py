"""``kvad eval --task masked|spans|chat``: what training poses, posed again; the numbers are ``kvad.lab.posed``'s."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvad.cli.evaluate_page import TextLine, TextLines
from kvad.errors import RequestError, UsageError, format_count

if TYPE_CHECKING:
    from kvad.checkpoint.open import CheckpointHandle

__all__ = ["OBJECTIVE_TASKS", "eval_objective"]

OBJECTIVE_TASKS = ("masked", "spans", "chat")


def eval_objective(
    opened: CheckpointHandle,
    task: str,
    data: Sequence[Path],
    options: Mapping[str, Any],
    tell: Callable[[str, int, int], None],
) -> tuple[list[TextLine], TextLines]:
    """Their loss and accuracy, as JSON and as lines of text."""
    from kvad.checkpoint.adapter import merge_adapter
    from kvad.checkpoint.open import load_weights
    from kvad.lab.posed import SEED, chat_batches, evaluate_objective, masked_batches, span_batches
    from kvad.train.config import ObjectiveConfig
    from kvad.train.corpus import open_corpus

    if options["adapter"] is not None:
        opened = merge_adapter(opened, options["adapter"])
    limit, tokenizer = opened.config.max_seq_len, opened.tokenizer
    if opened.config.encoder_input is not None:
        limit = min(limit, opened.config.encoder_input.max_seq_len)
    window = options["window"] or limit
    if tokenizer is None:
        raise RequestError("this model came without a tokenizer: it cannot read texts")
    if not 2 <= window <= limit:
        raise UsageError(f"--window {window:,}: must be from 2 to the model's limit of {limit:,}")
    how = options["documents"] or "files"
    if how == "joined":
        raise UsageError(f"--documents joined: --task {task} reads each text by itself", "files, or lines")
    run = {} if opened.training is None else opened.training.state.get("run", {}).get("objective", {})
    asked = ObjectiveConfig(**{name: run[name] for name in ("density", "mean_span") if name in run})
    counts = [0, 0]
    if task == "chat":
        batches, counts = chat_batches(tokenizer, opened.tokenizer_folder, list(data), window, options["errors"])
        convention = "what the assistant says, behind all before it; each conversation by itself"
    else:
        corpus = open_corpus(data, suffixes=options["suffixes"], errors=options["errors"], lines=how == "lines")
        if task == "masked":
            batches = masked_batches(tokenizer, corpus.texts(), window, asked.noise_density)
            convention = f"{asked.noise_density:.0%} of a row's tokens, 80/10/10, drawn by seed {SEED}"
        else:
            batches = span_batches(tokenizer, corpus.texts(), window, asked)
            convention = (
                f"{asked.noise_density:.0%} of the tokens in spans of {asked.mean_span_length:g}, drawn by seed {SEED}"
            )
    found = evaluate_objective(
        load_weights(opened, options["dtype"]), batches, lambda rows: tell("reading rows", rows, rows)
    )
    line: TextLine = {"window": window, "loss": found.loss, "accuracy": found.accuracy, "asked": found.targets}
    line |= (
        {"conversations": counts[0], "left_out": counts[1]} if task == "chat" else {"seed": SEED, **_drawn(task, asked)}
    )
    left = f"; {format_count(counts[1], 'conversation')} longer than that left out" if counts[1] else ""
    page = [
        ("asked", convention),
        ("read", f"rows of at most {window:,} tokens, each text by itself, without a cache{left}"),
        ("loss", f"{found.loss:.4f} nats per asked token; {format_count(found.targets, 'token')} asked"),
        ("accuracy", f"{found.accuracy:.4f} of the asked tokens were the likeliest"),
    ]
    return [line], page


def _drawn(task: str, asked: Any) -> TextLine:
    return {"density": asked.noise_density} | ({"mean_span": asked.mean_span_length} if task == "spans" else {})
