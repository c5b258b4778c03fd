"""Initial models and summarizers of runs: from a checkpoint or at random.

An encoder that learns to tag or classify and has no labels gets a new head for those of the data (Devlin et al. 2018,
sec. 3.2: the body is kept, the head starts at random), and is written as the class of its family with such a head.
Float32 copies of the weights are trained and stored in the run's checkpoints, whatever the dtype was: ``kvad export
--save-dtype`` narrows them again. With ``[lora]`` the weights are frozen, and only the adapters are trained and written
(``model/lora.py``, ``checkpoint/adapter.py``).

Initialization of models with an encoder: matrices by Glorot & Bengio (2010), tables normal(0, width^-1/2), as in
tensor2tensor.

``Transformer`` itself starts like GPT-2, with 0.02 for all, which suits pre-norm layers. Post-norm layers, as in the
original Transformer, hardly learn from there: reversing strings of 2 to 6 letters, 1 + 1 layers, width 32, validation
loss after 400 steps (lr 1e-2): 1.03 from 0.02, 0.01 from this initialization. A table with this deviation, times
sqrt(width), gives vectors with elements of about 1, the size of the positions'. If logits are scaled down, the table is
larger by the same factor: normal(0, 1) in T5. If attention has no softmax scale, the query matrix is divided by
sqrt(head_dim), as in T5 (Raffel et al.'s code); T5's matrices of width x width are Glorot's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvad import checkpoint
from kvad import config as cfg
from kvad import model as model_lib
from kvad.checkpoint import CheckpointHandle, open_checkpoint
from kvad.config import ModelConfig, attention_specs
from kvad.errors import CheckpointError, ConfigError, UsageError, format_count
from kvad.model import Summarizer, Transformer
from kvad.text import Tokenizer
from kvad.train import objectives
from kvad.train.config import RunConfig, TokenizerConfig
from kvad.train.objectives import Autocast, Objective
from kvad.train.setup import checkpoint_writers as writers
from kvad.train.setup.corpora import generation_config_from, load_tokenizer_from
from kvad.train.setup.memory_estimate import MemoryEstimate
from kvad.train.setup.objective_factory import build_objective, with_head
from kvad.train.setup.run_data import RunData

EMBEDDING_TABLES = ("tokens.weight", "positions.weight", "token_types.weight", "head.weight")


def init_weights(model: Transformer) -> None:
    """Initialize in parameter order from torch's random numbers; biases, norms and position logits are unchanged."""
    head = model.config.head
    table = model.config.hidden_size**-0.5 / (head.logit_scale if isinstance(head, cfg.LanguageHeadConfig) else 1.0)
    for name, parameter in model.named_parameters():
        if name.endswith(EMBEDDING_TABLES):
            nn.init.normal_(parameter, std=table)
        elif parameter.dim() == 2 and name.endswith(".weight") and "norm" not in name:
            nn.init.xavier_uniform_(parameter)
    for module in model.modules():
        if isinstance(module, model_lib.attention.Attention) and module.spec.softmax_scale == "none":
            module.q.weight.data.mul_(module.head_dim**-0.5)


def clamp_seq_len(config: RunConfig) -> RunConfig:
    """Shorten ``data.seq_len``, if it was not given explicitly, to the limit of the initial or summarized model."""
    name = config.init or config.summarizer.model
    if name is None:
        return config
    context = min(config.data.seq_len, _longest(open_checkpoint(name).config))
    return replace(config, data=replace(config.data, seq_len=context))


def _longest(model: ModelConfig) -> int:
    return model.max_seq_len if model.encoder_input is None else min(model.max_seq_len, model.encoder_input.max_seq_len)


@dataclass(frozen=True)
class InitialModule(ABC):
    """Initial state of the module that a run trains: a model or a summarizer."""

    config: RunConfig
    model_config: ModelConfig  # of the trained model, or of the model whose cache is summarized
    tokenizer: Tokenizer

    @property
    @abstractmethod
    def parameters(self) -> tuple[int, int]:
        """Numbers of all and of trained parameters, both including adapters."""

    @abstractmethod
    def build(self) -> nn.Module:
        """Build the module to train, in float32."""

    @abstractmethod
    def build_objective(self, config: RunConfig, module: Any, autocast: Autocast) -> Objective:
        """Build the objective of ``module``; ``config`` has a resolved objective."""

    @abstractmethod
    def checkpoint_writer(self, run_data: RunData, log: Callable[[str], None]) -> writers.CheckpointWriter: ...

    def with_head_for(self, kind: str, labels: tuple[str, ...]) -> InitialModule:
        """Return the initial module for objective ``kind`` and the data's ``labels``."""
        return self

    def memory_estimate(self, config: RunConfig, *, half: bool) -> MemoryEstimate | None:
        """Return the estimate of the run's memory; None for a summarizer."""
        return None

    def summary(self) -> list[str]:
        """Return lines about a model from a checkpoint for the user."""
        return []

    @property
    def pretrained(self) -> CheckpointHandle | None:
        """The checkpoint of a model that started from one, whose special tokens and settings apply; else None."""
        return None

    @property
    def record(self) -> Mapping[str, str] | None:
        """Record in the run's state of the model that it started from, None for a random one."""
        return None


@dataclass(frozen=True)
class InitialModel(InitialModule):
    """The model that a run starts with: at random, from ``config.init``, or from the run's own newest checkpoint."""

    opened: CheckpointHandle | None = None  # has the weights (of adapters: the frozen ones); None: they are random
    run: Path | None = None  # the resumed run, whose newest checkpoint holds the adapters
    stored_record: Mapping[str, str] | None = None  # of the resumed run

    def with_head_for(self, kind: str, labels: tuple[str, ...]) -> InitialModel:
        """Return the model with a head for objective ``kind``; raise ConfigError if its own cannot serve it."""
        model = with_head(self.model_config, kind, labels)
        if model == self.model_config:
            return self
        if self.config.lora is not None:
            raise ConfigError(
                f"[lora]: {self.config.init} has no head for these labels, and adapters cannot add one",
                "Train all weights first, or leave [lora] out.",
            )
        return replace(self, model_config=model)

    @property
    def pretrained(self) -> CheckpointHandle | None:
        return self.opened if self.run is None or self.stored_record is not None else None

    @property
    def has_new_head(self) -> bool:
        return self.opened is not None and self.opened.config != self.model_config

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the model that adapters are trained on."""
        assert self.opened is not None
        return checkpoint.adapter.base_fingerprint(self.opened)

    @cached_property
    def adapted_modules(self) -> list[str]:
        """Names of the adapted modules; [] if all weights are trained."""
        lora = self.config.lora
        return [] if lora is None else checkpoint.peft.match_targets(self.model_config, lora.target_names)

    @cached_property
    def parameters(self) -> tuple[int, int]:
        lora, num_parameters = self.config.lora, cfg.parameter_shapes.num_parameters(self.model_config)
        if lora is None:
            return num_parameters, num_parameters
        shapes = checkpoint.peft.trainable_linears(self.model_config)
        num_trained = sum(lora.rank * sum(shapes[part]) for part in self.adapted_modules)
        return num_parameters + num_trained, num_trained

    def summary(self) -> list[str]:
        if self.opened is None:
            return []
        lora, (num_parameters, num_trained) = self.config.lora, self.parameters
        num_own = num_parameters if lora is None else num_parameters - num_trained
        lines = [f"model: {self.config.init}, {self.model_config.kind} of {num_own:,} parameters"]
        if lora is not None:
            lines.append(
                f"adapters: rank {lora.rank} on {format_count(len(self.adapted_modules), 'linear part')}, "
                f"{num_trained:,} parameters ({num_trained / num_parameters:.2%}) are trained"
            )
        if self.has_new_head and isinstance(self.model_config.head, cfg.ClassificationHeadConfig):
            lines.append(f"head: new, for {format_count(len(self.model_config.head.labels), 'label')}")
        return lines

    @property
    def record(self) -> Mapping[str, str] | None:
        if self.opened is None or self.run is not None:
            return self.stored_record
        assert self.config.init is not None
        return {"model": self.config.init, "fingerprint": self.fingerprint}

    def build(self) -> Transformer:
        """Build the model in float32; with [lora], frozen, and new adapters add nothing yet."""
        lora, config = self.config.lora, self.model_config
        if self.opened is None:
            model = Transformer(config)
            if config.kind != "decoder":
                init_weights(model)
            return model
        with torch.device("meta"):
            model = Transformer(config)
        # Trained weights must never be a mapped file; frozen ones may be.
        loaded = {name: tensor.to(torch.float32, copy=lora is None) for name, tensor in self.opened.weights()}
        if self.has_new_head:
            loaded |= _new_head(self.opened.config, config)
            loaded = {name: loaded[name] for name in model.state_dict()}
        model.load_state_dict(loaded, assign=True)
        if lora is not None:
            model_lib.lora.add_adapters(model, self.adapted_modules, lora.rank, lora.scale, lora.dropout)
            if self.run is not None:
                model_lib.lora.load_factors(model, checkpoint.adapter.open_adapter(self.run).factors(self.opened))
        return model

    def build_objective(self, config: RunConfig, module: Transformer, autocast: Autocast) -> Objective:
        return build_objective(config, module, autocast)

    def memory_estimate(self, config: RunConfig, *, half: bool) -> MemoryEstimate:
        num_parameters, num_trained = self.parameters
        trained = None if config.lora is None else num_trained
        return MemoryEstimate(self.model_config, config, num_parameters, trained, half)

    @cached_property
    def adapter_format(self) -> checkpoint.adapter.AdapterFormat:
        """Format of the adapters' checkpoints; raises CheckpointError if the layout cannot hold them."""
        assert self.opened is not None and self.config.init is not None
        form = checkpoint.adapter.adapter_format(self.opened, self.config.init, self.fingerprint)
        form.targets.check_supported(self.adapted_modules)
        return form

    def checkpoint_writer(self, run_data: RunData, log: Callable[[str], None]) -> writers.CheckpointWriter:
        generation, files = run_data.generation(self.tokenizer), run_data.extra_files(self.tokenizer)
        if self.pretrained is None:
            return writers.writer_of_new_model(self.model_config, generation, self.tokenizer, files, log)
        writer: writers.FullCheckpointWriter | writers.AdapterCheckpointWriter
        opened = self.pretrained
        if isinstance(opened, checkpoint.adapter.AdaptedCheckpoint):
            opened = opened.base
        if self.config.lora is not None:
            writer = writers.AdapterCheckpointWriter(self.adapter_format, self.config)
        elif self.has_new_head:
            writer = writers.writer_for_new_head(opened, self.model_config)
        else:
            writer = writers.writer_like(opened)
        return writer.with_chat_template(files, generation) if run_data.is_chat else writer


def load_initial(config: RunConfig) -> InitialModel | None:
    """Open the model that a new run starts from and check it; None if it starts at random."""
    return None if config.init is None else _start(config, open_checkpoint(config.init))


def new_initial(config: RunConfig, run_data: RunData) -> InitialModel:
    """Return a model at random, for the tokenizer and the labels of ``run_data``."""
    tokenizer = run_data.make_tokenizer()
    model = with_head(config.resolve(tokenizer.vocab_size), config.objective.kind, run_data.labels)
    return InitialModel(config, model, tokenizer)


def resume_initial(config: RunConfig, out: Path, record: Mapping[str, str] | None) -> InitialModel:
    """Open the model of a resumed run, whose state has ``record``; refuse a base of adapters that has changed."""
    if config.lora is None:
        own = checkpoint.native.open_folder(out)
        assert own.tokenizer is not None, "every run writes its tokenizer"
        return InitialModel(config, own.config, own.tokenizer, own, out, record)
    assert config.init is not None
    try:
        opened = open_checkpoint(config.init)
    except CheckpointError as error:
        raise CheckpointError(
            f"cannot resume {out}: the base model of its adapters cannot be opened: {error.message}", error.hint
        ) from error
    start = replace(_start(config, opened), run=out, stored_record=record)
    if record is None or start.fingerprint != record.get("fingerprint"):
        raise CheckpointError(f"cannot resume {out}: {config.init} is not the model that the run started from")
    return start


def _new_head(own: ModelConfig, wanted: ModelConfig) -> dict[str, Tensor]:
    """Initialize the parameters of the head of ``wanted``, except BERT's pooler if ``own`` has an equal one."""
    fresh = Transformer(wanted)
    init_weights(fresh)
    head = {name: tensor for name, tensor in fresh.state_dict().items() if name.startswith("head.")}
    if (
        isinstance(own.head, cfg.PoolingHeadConfig)
        and isinstance(wanted.head, cfg.ClassificationHeadConfig)
        and own.head.transform is not None
        and own.head.transform == wanted.head.transform
    ):
        return {name: tensor for name, tensor in head.items() if not name.startswith("head.transform.")}
    return head


def _start(config: RunConfig, opened: CheckpointHandle) -> InitialModel:
    model, name = opened.config, config.init
    if model.kind != "encoder" and not isinstance(model.head, cfg.LanguageHeadConfig):
        raise ConfigError(f"model.init: {name} has no language head", "Use a language model.")
    if opened.tokenizer is None:
        raise ConfigError(f"model.init: {name} has no tokenizer", "Put its tokenizer.json into the same folder.")
    if config.data.seq_len > (longest := _longest(model)):
        raise ConfigError(
            f"data.seq_len: must be at most {longest}, the limit of {name}, got {config.data.seq_len}",
            f"Use --seq-len {longest}.",
        )
    if config.lora is not None and isinstance(opened, checkpoint.adapter.AdaptedCheckpoint):
        raise ConfigError(f"model.init: {name} is an adapter", "Merge it first: kvad merge BASE ADAPTER --out DIR")
    _check_vocabulary(config.tokenizer, opened.tokenizer, str(name))
    if model.kind == "encoder-decoder":
        if opened.tokenizer.languages:
            raise ConfigError(f"model.init: {name} requires language tokens, which pairs do not have")
        generation = generation_config_from(opened)
        if generation.decoder_start_token_id is None or not generation.eos_token_ids:
            raise ConfigError(f"model.init: {name} does not define the tokens that begin and end a target")
    start = InitialModel(config, model, opened.tokenizer, opened)
    if config.lora is not None:
        _ = start.adapter_format  # fail before texts are read
    return start


def _check_vocabulary(options: TokenizerConfig, tokenizer: Tokenizer, name: str) -> None:
    """Raise ConfigError if [tokenizer] names another tokenizer than the model's."""
    if options == TokenizerConfig():
        return
    if options != TokenizerConfig(path=options.path):
        raise ConfigError(f"[tokenizer]: must be empty, {name} has its own tokenizer", "Leave the table out.")
    assert options.path is not None
    if load_tokenizer_from(options.path).fingerprint() != tokenizer.fingerprint():
        raise ConfigError(f"tokenizer.path: must be the tokenizer of {name}, got {options.path}", "Leave it out.")


@dataclass(frozen=True)
class InitialSummarizer(InitialModule):
    """The summarizer that a run starts with: at random, or from the run's newest checkpoint."""

    opened: CheckpointHandle  # the model whose cache is summarized
    stored: checkpoint.summarizer.StoredSummarizer | None = None

    @cached_property
    def parameters(self) -> tuple[int, int]:
        num_trained = sum(parameter.numel() for parameter in self.build().parameters())
        return cfg.parameter_shapes.num_parameters(self.model_config) + num_trained, num_trained

    def build(self) -> Summarizer:
        """Build the summarizer; raise CheckpointError if the stored one was trained for another model."""
        if self.stored is not None:
            return self.stored.load(self.opened).requires_grad_(True)
        options = self.config.summarizer
        return Summarizer(attention_specs(self.model_config), options.ratio, options.hidden_size)

    def build_objective(self, config: RunConfig, module: Summarizer, autocast: Autocast) -> Objective:
        model = checkpoint.loader.load_weights(self.opened, "float32", config.train.device)
        return objectives.summary_distillation.SummaryDistillation(model, module, config.summarizer, autocast)

    def checkpoint_writer(self, run_data: RunData, log: Callable[[str], None]) -> writers.SummarizerWriter:
        return writers.SummarizerWriter(checkpoint.summarizer.sampled_fingerprint(self.opened), self.config.summarizer)


def load_initial_summarizer(config: RunConfig) -> InitialSummarizer:
    """Open the model whose cache is summarized; raise KvadError if the run has options that only models have."""
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
