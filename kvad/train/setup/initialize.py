"""Initial models: from a checkpoint or at random, and the writer of the run's checkpoints.

Config, tokenizer, generation settings and layout of a checkpoint stay as they are; only weights change. An encoder that
learns to tag or classify and has no labels gets a new head for those of the data (Devlin et al. 2018, sec. 3.2: the
body is kept, the head starts at random), and is written as the class of its family with such a head. Float32 copies of
the weights are trained and stored in the run's checkpoints, whatever the dtype was: ``kvad export --save-dtype``
narrows them again. With ``[lora]`` the weights are frozen, and only the adapters are trained and written
(``model/lora.py``, ``checkpoint/adapter.py``).

A run's state records the fingerprint of the model that it started from. If all weights are trained, that model is not
needed again; with adapters it is opened at every resume, and refused if it has changed.

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

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvad import checkpoint
from kvad import model as model_lib
from kvad.checkpoint import CheckpointHandle, GenerationConfig, open_checkpoint
from kvad.config import ClassificationHeadConfig, LanguageHeadConfig, ModelConfig, PoolingHeadConfig
from kvad.errors import CheckpointError, ConfigError, format_count
from kvad.model import Transformer
from kvad.text import Tokenizer, load_tokenizer
from kvad.train import data
from kvad.train.config import RunConfig, TokenizerConfig
from kvad.train.setup.objective_factory import with_head

EMBEDDING_TABLES = ("tokens.weight", "positions.weight", "token_types.weight", "head.weight")


def init_weights(model: Transformer) -> None:
    """Initialize in parameter order from torch's random numbers.

    Biases, norms and position logits stay unchanged.
    """
    head = model.config.head
    table = model.config.hidden_size**-0.5 / (head.logit_scale if isinstance(head, LanguageHeadConfig) else 1.0)
    for name, parameter in model.named_parameters():
        if name.endswith(EMBEDDING_TABLES):
            nn.init.normal_(parameter, std=table)
        elif parameter.dim() == 2 and name.endswith(".weight") and "norm" not in name:
            nn.init.xavier_uniform_(parameter)
    for module in model.modules():
        if isinstance(module, model_lib.attention.Attention) and module.spec.softmax_scale == "none":
            module.q.weight.data.mul_(module.head_dim**-0.5)


def resolve_paths(config: RunConfig) -> RunConfig:
    """Return the config with an absolute path in model.init."""
    if config.init is None or not Path(config.init).expanduser().is_dir():
        return config
    return replace(config, model={"init": str(Path(config.init).expanduser().resolve())})


def clamp_seq_len(config: RunConfig) -> RunConfig:
    """Shorten ``data.seq_len`` to what the initial or summarized model holds.

    Used if the key was not given explicitly. Raises as ``open_checkpoint``.
    """
    name = config.init or config.summarizer.model
    if name is None:
        return config
    context = min(config.data.seq_len, _longest(open_checkpoint(name).config))
    return replace(config, data=replace(config.data, seq_len=context))


def _longest(model: ModelConfig) -> int:
    return model.max_seq_len if model.encoder_input is None else min(model.max_seq_len, model.encoder_input.max_seq_len)


@dataclass(frozen=True)
class FullCheckpointWriter:
    """Writes complete checkpoints: config, generation settings, tokenizer and extra files."""

    config: ModelConfig
    layout: checkpoint.hf_layout.HFLayout | None
    generation: GenerationConfig
    tokenizer: Tokenizer | None  # None if it is among the files
    files: Mapping[str, bytes]  # small files written unchanged
    origin: str | None = None

    def with_chat_template(self, files: Mapping[str, bytes], generation: GenerationConfig) -> FullCheckpointWriter:
        """Return a writer with a chat template and the end-of-turn tokens of ``generation``."""
        ends = {
            checkpoint.generation_config.GENERATION_FILE: _generation_bytes(
                self.files.get(checkpoint.generation_config.GENERATION_FILE), generation
            )
        }
        exact = self.layout is not None and self.layout.exact
        return replace(self, generation=generation, files={**self.files, **files, **(ends if exact else {})})

    def weights(self, model: Transformer) -> dict[str, Tensor]:
        """Return the tensors to be written, without copying."""
        return model.state_dict()

    def save(self, run: Path, snapshot: checkpoint.handle.CheckpointSnapshot, *, keep: int, fresh: bool) -> Path:
        """Save a step as ``native.save_step`` does."""
        return checkpoint.native.save_step(
            run,
            snapshot.step,
            self.config,
            snapshot.weights,
            self.tokenizer,
            snapshot.training,
            layout=self.layout,
            generation=self.generation,
            files=self.files,
            origin=self.origin,
            keep=keep,
            best=snapshot.best,
            fresh=fresh,
        )


@dataclass(frozen=True)
class AdapterCheckpointWriter:
    """Writes checkpoints that hold only adapters."""

    form: checkpoint.adapter.AdapterFormat
    config: RunConfig

    def with_chat_template(self, files: Mapping[str, bytes], generation: GenerationConfig) -> AdapterCheckpointWriter:
        """Return a writer whose adapter folder also holds the chat template."""
        ends = {checkpoint.generation_config.GENERATION_FILE: _generation_bytes(None, generation)}
        return replace(self, form=replace(self.form, tokenizer_files={**self.form.tokenizer_files, **files, **ends}))

    def weights(self, model: Transformer) -> dict[str, Tensor]:
        """Return ``NAME.a`` and ``NAME.b`` of every adapted module."""
        pairs = model_lib.lora.adapter_factors(model).items()
        return {f"{name}.{side}": getattr(pair, side) for name, pair in pairs for side in "ab"}

    def save(self, run: Path, snapshot: checkpoint.handle.CheckpointSnapshot, *, keep: int, fresh: bool) -> Path:
        """Save a step as ``adapter.save_adapter_step`` does."""
        lora, weights = self.config.lora, snapshot.weights
        assert lora is not None
        names = [name.removesuffix(".a") for name in weights if name.endswith(".a")]
        return checkpoint.adapter.save_adapter_step(
            run,
            snapshot.step,
            self.form,
            {
                name: model_lib.lora.LoraFactors(weights[f"{name}.a"], weights[f"{name}.b"], lora.scale)
                for name in names
            },
            rank=lora.rank,
            alpha=lora.alpha,
            use_rslora=lora.use_rslora,
            dropout=lora.dropout,
            training=snapshot.training,
            keep=keep,
            best=snapshot.best,
            fresh=fresh,
        )


@dataclass(frozen=True)
class InitialModel:
    """Checkpoint named by ``config.init`` and its tokenizer."""

    config: RunConfig
    opened: CheckpointHandle
    tokenizer: Tokenizer
    new_head_config: ModelConfig | None = None  # with a new head for the labels of the data, if needed

    @property
    def model_config(self) -> ModelConfig:
        return self.opened.config if self.new_head_config is None else self.new_head_config

    def with_head_for(self, kind: str, labels: tuple[str, ...]) -> InitialModel:
        """Return the initial model for objective ``kind`` and the data's ``labels``.

        Raises:
            ConfigError: If its head cannot serve the objective.
        """
        own = self.opened.config
        model = with_head(own, kind, labels)
        if model == own:
            return self
        if self.config.lora is not None:
            raise ConfigError(
                f"[lora]: {self.config.init} has no head for these labels, and adapters cannot add one",
                "Train all weights first, or leave [lora] out.",
            )
        return replace(self, new_head_config=model)

    @property
    def generation(self) -> GenerationConfig:
        """Generation settings, as :func:`generation_config_from` reads them."""
        return generation_config_from(self.opened)

    @cached_property
    def fingerprint(self) -> str:
        return checkpoint.adapter.base_fingerprint(self.opened)

    @cached_property
    def adapted_modules(self) -> list[str]:
        """Names of the adapted modules; [] if all weights are trained."""
        return (
            []
            if self.config.lora is None
            else checkpoint.peft.match_targets(self.model_config, self.config.lora.target_names)
        )

    @property
    def parameters(self) -> tuple[int, int]:
        """Numbers of all and of trained parameters, both including adapters."""
        config = self.model_config
        num_parameters = count_parameters(config)
        if self.config.lora is None:
            return num_parameters, num_parameters
        shapes = checkpoint.peft.trainable_linears(self.model_config)
        num_trained = sum(self.config.lora.rank * sum(shapes[part]) for part in self.adapted_modules)
        return num_parameters + num_trained, num_trained

    def summary(self) -> list[str]:
        """Return lines about the model for the user."""
        kind, lines = self.model_config.kind, []
        num_parameters, num_trained = self.parameters
        lines.append(
            f"model: {self.config.init}, {kind} of "
            f"{num_parameters - num_trained * bool(self.adapted_modules):,} parameters"
        )
        if self.config.lora is not None:
            lines.append(
                f"adapters: rank {self.config.lora.rank} on {format_count(len(self.adapted_modules), 'linear part')}, "
                f"{num_trained:,} parameters ({num_trained / num_parameters:.2%}) are trained"
            )
        if self.new_head_config is not None and isinstance(self.new_head_config.head, ClassificationHeadConfig):
            lines.append(f"head: new, for {format_count(len(self.new_head_config.head.labels), 'label')}")
        return lines

    def state_record(self) -> dict[str, str]:
        """Return the record of this model for the run's state."""
        assert self.config.init is not None
        return {"model": self.config.init, "fingerprint": self.fingerprint}

    def model(self) -> Transformer:
        """Build the model in float32; with [lora], frozen with adapters that add nothing yet."""
        lora = self.config.lora
        config = self.model_config
        with torch.device("meta"):
            model = Transformer(config)
        # Trained weights must never be a mapped file; frozen ones may be.
        loaded = {name: tensor.to(torch.float32, copy=lora is None) for name, tensor in self.opened.weights()}
        if self.new_head_config is not None:
            loaded |= _new_head(config, keep=_pooler(self.opened.config, config))
            loaded = {name: loaded[name] for name in model.state_dict()}
        model.load_state_dict(loaded, assign=True)
        if lora is not None:
            model_lib.lora.add_adapters(model, self.adapted_modules, lora.rank, lora.scale, lora.dropout)
        return model

    def checkpoint_writer(self) -> FullCheckpointWriter | AdapterCheckpointWriter:
        """Return the writer of the run's checkpoints.

        Raises:
            CheckpointError: If the layout cannot hold the adapters.
        """
        if self.new_head_config is not None:
            return _full_writer(self.opened, self.new_head_config)
        if self.config.lora is None:
            return writer_like(self.opened)
        assert self.config.init is not None
        form = checkpoint.adapter.adapter_format(self.opened, self.config.init, self.fingerprint)
        form.check(self.adapted_modules)
        return AdapterCheckpointWriter(form, self.config)


def count_parameters(model: ModelConfig) -> int:
    """Count the parameters of a model without allocating it."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Transformer(model).parameters())


def build_new_model(config: RunConfig, model: ModelConfig, start: InitialModel | None) -> Transformer:
    """Build the model of a new run on its device, from ``start`` or at random."""
    torch.manual_seed(config.train.seed)
    module = Transformer(model) if start is None else start.model()
    if start is None and model.kind != "decoder":
        init_weights(module)
    return module.to(config.train.device)


def load_initial(config: RunConfig) -> InitialModel | None:
    """Open the model that a new run starts from; None if it starts at random.

    Raises:
        CheckpointError: If the checkpoint is not complete.
        ConfigError: If it cannot be trained as configured.
    """
    if config.init is None:
        return None
    return _start(config, open_checkpoint(config.init))


def resume_initial(config: RunConfig, out: Path, record: Mapping[str, Any]) -> InitialModel:
    """Open the base model of a resumed run of adapters.

    Raises:
        CheckpointError: If the model is missing or has changed.
    """
    assert config.init is not None and config.lora is not None
    try:
        opened = open_checkpoint(config.init)
    except CheckpointError as error:
        raise CheckpointError(
            f"cannot resume {out}: the base model of its adapters cannot be opened: {error.message}", error.hint
        ) from error
    start = _start(config, opened)
    if start.fingerprint != record.get("fingerprint"):
        raise CheckpointError(f"cannot resume {out}: {config.init} is not the model that the run started from")
    return start


def load_adapted(start: InitialModel, out: Path) -> Transformer:
    """Load the base model with the adapters of a run's newest checkpoint."""
    model = start.model()
    model_lib.lora.load_factors(model, checkpoint.adapter.open_adapter(out).factors(start.opened))
    return model


def writer_like(opened: CheckpointHandle) -> FullCheckpointWriter:
    """Return a writer that keeps a checkpoint's config, tokenizer, settings and layout.

    For an adapter with its base, those of the base.
    """
    if isinstance(opened, checkpoint.adapter.AdaptedCheckpoint):
        opened = opened.base
    files, layout, origin = checkpoint.export.read_tokenizer_files(opened.path), None, opened.origin
    if isinstance(opened, checkpoint.hf_layout.HFCheckpoint):
        layout, origin = checkpoint.hf_layout.HFLayout(opened.family, opened.fields.content, exact=True), None
        generation_file = opened.path / checkpoint.generation_config.GENERATION_FILE
        files |= (
            {checkpoint.generation_config.GENERATION_FILE: generation_file.read_bytes()}
            if generation_file.is_file()
            else {}
        )
    return FullCheckpointWriter(opened.config, layout, opened.generation, None, files, origin)


def _generation_bytes(before: bytes | None, generation: GenerationConfig) -> bytes:
    """Return ``generation_config.json`` with all tokens that end an answer."""
    content = checkpoint.generation_config.generation_json(generation) or {} if before is None else json.loads(before)
    return json.dumps({**content, "eos_token_id": list(generation.eos_token_ids)}, indent=2).encode()


def tokenizer_path(path: str | Path) -> Path:
    """Return the tokenizer's path, also for runs and prepared data."""
    if data.token_store.is_prepared(Path(path)):
        return Path(path) / data.token_store.TOKENIZER
    return checkpoint.folder.locate(Path(path)) if checkpoint.folder.is_run(Path(path)) else Path(path)


def load_tokenizer_from(path: str | Path) -> Tokenizer:
    """Load the tokenizer of a file, a folder, a run or prepared data; raises TokenizerError."""
    return load_tokenizer(tokenizer_path(path))


def _full_writer(opened: CheckpointHandle, config: ModelConfig) -> FullCheckpointWriter:
    """Return a writer for a new head: in its own family's layout, else another one, else kvad's."""
    if isinstance(opened, checkpoint.adapter.AdaptedCheckpoint):
        opened = opened.base
    generation, tokenizer_files = (
        replace(opened.generation, pooling=None, normalize=False),
        checkpoint.export.read_tokenizer_files(opened.path),
    )
    for family in (opened.origin, None):
        try:
            return FullCheckpointWriter(
                config,
                checkpoint.hf_layout.choose_layout(config, generation, family),
                generation,
                None,
                tokenizer_files,
            )
        except CheckpointError:
            continue
    return FullCheckpointWriter(config, None, generation, None, tokenizer_files)


def _new_head(config: ModelConfig, keep: tuple[str, ...]) -> dict[str, Tensor]:
    """Initialize a head's parameters except those whose names begin with ``keep``."""
    fresh = Transformer(config)
    init_weights(fresh)
    head = {name: tensor for name, tensor in fresh.state_dict().items() if name.startswith("head.")}
    return {name: tensor for name, tensor in head.items() if not name.startswith(keep or ("-",))}


def _pooler(own: ModelConfig, wanted: ModelConfig) -> tuple[str, ...]:
    """Return the name prefix of BERT's pooler if both heads have an equal one."""
    same = (
        isinstance(own.head, PoolingHeadConfig)
        and isinstance(wanted.head, ClassificationHeadConfig)
        and own.head.transform is not None
    )
    return ("head.transform.",) if same and own.head.transform == wanted.head.transform else ()


def generation_config_from(opened: CheckpointHandle) -> GenerationConfig:
    """Return a checkpoint's generation settings.

    An encoder-decoder without a decoder start token uses its BOS token.
    """
    generation = opened.generation
    if generation.decoder_start_token_id is not None or opened.config.kind != "encoder-decoder":
        return generation
    return replace(generation, decoder_start_token_id=generation.bos_token_id)


def _start(config: RunConfig, opened: CheckpointHandle) -> InitialModel:
    model, name = opened.config, config.init
    if model.kind != "encoder" and not isinstance(model.head, LanguageHeadConfig):
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
    start = InitialModel(config, opened, opened.tokenizer)
    if model.kind == "encoder-decoder":
        if opened.tokenizer.languages:
            raise ConfigError(f"model.init: {name} requires language tokens, which pairs do not have")
        if start.generation.decoder_start_token_id is None or not start.generation.eos_token_ids:
            raise ConfigError(f"model.init: {name} does not define the tokens that begin and end a target")
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
