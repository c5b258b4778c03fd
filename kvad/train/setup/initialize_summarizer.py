"""Summarizers to train for the cache of a frozen model (``[summarizer]`` of the run file)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from kvad import checkpoint
from kvad.checkpoint import CheckpointHandle, open_checkpoint
from kvad.config import attention_specs
from kvad.errors import ConfigError, UsageError
from kvad.model import Summarizer
from kvad.train import objectives
from kvad.train.config import RunConfig, TokenizerConfig
from kvad.train.objectives import Autocast, Objective
from kvad.train.setup.checkpoint_writers import SummarizerWriter
from kvad.train.setup.initialize import InitialModule, count_parameters
from kvad.train.setup.run_data import RunData


@dataclass(frozen=True)
class InitialSummarizer(InitialModule):
    """The summarizer that a run starts with: at random, or from the run's newest checkpoint."""

    opened: CheckpointHandle  # the model whose cache is summarized
    stored: checkpoint.summarizer.StoredSummarizer | None = None

    @cached_property
    def parameters(self) -> tuple[int, int]:
        num_trained = sum(parameter.numel() for parameter in self.build().parameters())
        return count_parameters(self.model_config) + num_trained, num_trained

    def build(self) -> Summarizer:
        """Build the summarizer; raise CheckpointError if the stored one was trained for another model."""
        if self.stored is not None:
            return self.stored.load(self.opened).requires_grad_(True)
        options = self.config.summarizer
        return Summarizer(attention_specs(self.model_config), options.ratio, options.hidden_size)

    def build_objective(self, config: RunConfig, module: Summarizer, autocast: Autocast) -> Objective:
        model = checkpoint.loader.load_weights(self.opened, "float32", config.train.device)
        return objectives.summary_distillation.SummaryDistillation(model, module, config.summarizer, autocast)

    def checkpoint_writer(self, run_data: RunData, log: Callable[[str], None]) -> SummarizerWriter:
        return SummarizerWriter(checkpoint.summarizer.sampled_fingerprint(self.opened), self.config.summarizer)


def load_initial_summarizer(config: RunConfig) -> InitialSummarizer:
    """Open the model whose cache is summarized.

    Raises:
        KvadError: If it cannot be used, or the run has options that only models have.
    """
    options = config.summarizer
    for name in ("activation_checkpointing", "compile"):
        if getattr(config.train, name):
            raise ConfigError(
                f"train.{name}: must be false for objective 'summarizer', whose model is frozen", "Leave it out."
            )
    if options.model is None:
        raise UsageError("summarizer.model: must name a model", "Name its checkpoint: --init MODEL")
    if config.model or config.tokenizer != TokenizerConfig():
        table = "model" if config.model else "tokenizer"
        raise ConfigError(
            f"[{table}]: must be empty, because the model is {options.model} with its own tokenizer", "Leave it out."
        )
    opened = open_checkpoint(options.model)
    if opened.config.kind != "decoder":
        raise ConfigError(f"summarizer.model: must be a decoder, got an {opened.config.kind}: {options.model}")
    if opened.tokenizer is None:
        raise ConfigError(
            f"summarizer.model: {options.model} has no tokenizer", "Put its tokenizer.json into the same folder."
        )
    if config.data.seq_len > (limit := opened.config.max_seq_len):
        raise ConfigError(
            f"data.seq_len: {config.data.seq_len} is beyond the model's limit of {limit}", f"Use --seq-len {limit}."
        )
    options.check_context(config.data.seq_len)
    data = config.data
    if data.packing not in ("auto", "split") or not (data.reset_positions and data.isolate_documents):
        raise ConfigError(
            "data: a summarizer is trained on rows cut from the corpus",
            "Leave out packing, reset_positions and isolate_documents.",
        )
    return InitialSummarizer(config, opened.config, opened.tokenizer, opened)


def resume_summarizer(config: RunConfig, out: Path) -> InitialSummarizer:
    """Open the summarizer of a resumed run and its model."""
    return replace(load_initial_summarizer(config), stored=checkpoint.summarizer.open_summarizer(out))
