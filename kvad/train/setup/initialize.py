"""A run that goes on from a checkpoint: the model it begins with, its words, and how it is written again.

Any model that kvad opens: its config, tokenizer and way of generating stay what they are, in the layout that they came
in; only numbers change.  An encoder that is to tag or classify and has no labels of its own is given a new head for
those of the data (Devlin et al. 2018, sec. 3.2: its body goes on, the head begins at random), and is written as the
class of its family that has such a head.  Trained are float32 copies of the weights, and those are what a run's
checkpoints hold, whatever the dtype was: ``kvad export --dtype`` narrows them again.  With ``[lora]`` the weights are
frozen and only the adapters are trained and written (``model/lora.py``, ``checkpoint/adapter.py``).

A run's state says which model it began with, byte for byte.  All weights trained, it is never looked at again; beside
adapters it is opened at every resume, and refused if it is another by then.

How what has an encoder begins: matrices by Glorot & Bengio (2010), tables normal(0, width^-1/2), as tensor2tensor.

``Transformer`` itself begins as GPT-2 does, with 0.02 for all: made for layers normalised before each part.  Those of
the original Transformer are normalised afterwards, and learn hardly anything from there: reversing strings of 2 to 6
letters, 1 + 1 layers, 32 wide, validation loss after 400 steps (lr 1e-2): 1.03 from 0.02, 0.01 from here.  A table with
this deviation, times sqrt(width), gives vectors with elements of about 1, which is also the size of the positions'.
Where logits are scaled down, the table is as much larger: normal(0, 1) in T5.  Where attention divides by nothing, the
queries' matrix is divided by sqrt(head_dim), as T5's is (Raffel et al.'s code); and T5's matrices of width x width are
Glorot's.
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
    """In the order of the parameters, from torch's random numbers; biases, norms and positions' logits stay."""
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
    """The same with the path of its model.init written out, so that a run finds it from anywhere."""
    if config.init is None or not Path(config.init).expanduser().is_dir():
        return config
    return replace(config, model={"init": str(Path(config.init).expanduser().resolve())})


def clamp_seq_len(config: RunConfig) -> RunConfig:
    """The same with rows no longer than the model holds that it goes on from, or compresses the cache of: for a
    ``data.context`` that nobody said.  Raises as ``open_checkpoint``."""
    name = config.init or config.summarizer.model
    if name is None:
        return config
    context = min(config.data.seq_len, _longest(open_checkpoint(name).config))
    return replace(config, data=replace(config.data, seq_len=context))


def _longest(model: ModelConfig) -> int:
    return model.max_seq_len if model.encoder_input is None else min(model.max_seq_len, model.encoder_input.max_seq_len)


@dataclass(frozen=True)
class FullCheckpointWriter:
    """A checkpoint's form: config, way of generating, tokenizer, and everything that is written beside the weights.

    ``files``: small files that are written as they are; ``tokenizer`` None where it is among them."""

    config: ModelConfig
    layout: checkpoint.hf_layout.HFLayout | None
    generation: GenerationConfig
    tokenizer: Tokenizer | None
    files: Mapping[str, bytes]
    origin: str | None = None

    def with_chat_template(self, files: Mapping[str, bytes], said: GenerationConfig) -> FullCheckpointWriter:
        """The same with a chat template in ``files``, and with what ends a turn among ``said.stops``."""
        ends = {
            checkpoint.generation_config.GENERATION_FILE: _ending(
                self.files.get(checkpoint.generation_config.GENERATION_FILE), said
            )
        }
        exact = self.layout is not None and self.layout.exact
        return replace(self, generation=said, files={**self.files, **files, **(ends if exact else {})})

    def weights(self, model: Transformer) -> dict[str, Tensor]:
        """What of the model is written, nothing copied."""
        return model.state_dict()

    def save(self, run: Path, moment: checkpoint.handle.CheckpointSnapshot, *, keep: int, fresh: bool) -> Path:
        """As ``native.save_step``."""
        return checkpoint.native.save_step(
            run,
            moment.step,
            self.config,
            moment.weights,
            self.tokenizer,
            moment.training,
            layout=self.layout,
            generation=self.generation,
            files=self.files,
            origin=self.origin,
            keep=keep,
            best=moment.best,
            fresh=fresh,
        )


@dataclass(frozen=True)
class AdapterCheckpointWriter:
    """The same of adapters: they alone are written."""

    form: checkpoint.adapter.AdapterFormat
    config: RunConfig

    def with_chat_template(self, files: Mapping[str, bytes], said: GenerationConfig) -> AdapterCheckpointWriter:
        """As :meth:`Whole.talking`, in the adapter's folder."""
        ends = {checkpoint.generation_config.GENERATION_FILE: _ending(None, said)}
        return replace(self, form=replace(self.form, tokenizer_files={**self.form.tokenizer_files, **files, **ends}))

    def weights(self, model: Transformer) -> dict[str, Tensor]:
        """As :meth:`Whole.weights`: of every adapted part ``NAME.a`` and ``NAME.b``."""
        pairs = model_lib.lora.adapter_factors(model).items()
        return {f"{name}.{side}": getattr(pair, side) for name, pair in pairs for side in "ab"}

    def save(self, run: Path, moment: checkpoint.handle.CheckpointSnapshot, *, keep: int, fresh: bool) -> Path:
        """As ``adapter.save_adapter_step``."""
        lora, found = self.config.lora, moment.weights
        assert lora is not None
        names = [name.removesuffix(".a") for name in found if name.endswith(".a")]
        return checkpoint.adapter.save_adapter_step(
            run,
            moment.step,
            self.form,
            {name: model_lib.lora.LoraFactors(found[f"{name}.a"], found[f"{name}.b"], lora.scale) for name in names},
            rank=lora.rank,
            alpha=lora.alpha,
            rslora=lora.use_rslora,
            dropout=lora.dropout,
            training=moment.training,
            keep=keep,
            best=moment.best,
            fresh=fresh,
        )


@dataclass(frozen=True)
class InitialModel:
    """What a run begins with: the model that ``config.init`` names, and the tokenizer that it came with.

    ``answers``: the model with a new head for the labels of the data, where its own is for something else."""

    config: RunConfig
    opened: CheckpointHandle
    tokenizer: Tokenizer
    answers: ModelConfig | None = None

    @property
    def model_config(self) -> ModelConfig:
        return self.opened.config if self.answers is None else self.answers

    def with_head_for(self, kind: str, labels: tuple[str, ...]) -> InitialModel:
        """The same for objective ``kind`` and the ``labels`` of the data.  ConfigError where no head can answer."""
        own = self.opened.config
        model = with_head(own, kind, labels)
        if model == own:
            return self
        if self.config.lora is not None:
            raise ConfigError(
                f"[lora]: {self.config.init} has no head for these labels, and a new one is no adapter",
                "train all weights first, or leave [lora] out",
            )
        return replace(self, answers=model)

    @property
    def generation(self) -> GenerationConfig:
        """As :func:`said_by` reads it."""
        return generation_config_from(self.opened)

    @cached_property
    def fingerprint(self) -> str:
        return checkpoint.adapter.base_fingerprint(self.opened)

    @cached_property
    def adapted_modules(self) -> list[str]:
        """The adapted parts; [] where all weights are trained."""
        return (
            []
            if self.config.lora is None
            else checkpoint.peft.match_targets(self.model_config, self.config.lora.target_names)
        )

    @property
    def parameters(self) -> tuple[int, int]:
        """(all, those that are trained), adapters among both."""
        config = self.model_config
        every = count_parameters(config)
        if self.config.lora is None:
            return every, every
        shapes = checkpoint.peft.trainable_linears(self.model_config)
        learned = sum(self.config.lora.rank * sum(shapes[part]) for part in self.adapted_modules)
        return every + learned, learned

    def summary(self) -> list[str]:
        """What a user should know of it."""
        kind, lines = self.model_config.kind, []
        every, learned = self.parameters
        lines.append(
            f"model: {self.config.init}, {kind} of {every - learned * bool(self.adapted_modules):,} parameters"
        )
        if self.config.lora is not None:
            lines.append(
                f"adapters: rank {self.config.lora.rank} beside {format_count(len(self.adapted_modules), 'linear part')}, "
                f"{learned:,} parameters ({learned / every:.2%}) are trained"
            )
        if self.answers is not None and isinstance(self.answers.head, ClassificationHeadConfig):
            lines.append(f"head: a new one, for {format_count(len(self.answers.head.labels), 'label')}")
        return lines

    def state_record(self) -> dict[str, str]:
        """What the run's state says of it."""
        assert self.config.init is not None
        return {"model": self.config.init, "fingerprint": self.fingerprint}

    def model(self) -> Transformer:
        """Its weights in float32, to be trained; with [lora] frozen, beside adapters that add nothing yet."""
        lora = self.config.lora
        config = self.model_config
        with torch.device("meta"):
            model = Transformer(config)
        # What is trained must never be a mapped file; what is frozen may stay one.
        loaded = {name: tensor.to(torch.float32, copy=lora is None) for name, tensor in self.opened.weights()}
        if self.answers is not None:
            loaded |= _new_head(config, keep=_pooler(self.opened.config, config))
            loaded = {name: loaded[name] for name in model.state_dict()}
        model.load_state_dict(loaded, assign=True)
        if lora is not None:
            model_lib.lora.add_adapters(model, self.adapted_modules, lora.rank, lora.scale, lora.dropout)
        return model

    def checkpoint_writer(self) -> FullCheckpointWriter | AdapterCheckpointWriter:
        """How its checkpoints are written.  CheckpointError for adapters that its layout cannot hold."""
        if self.answers is not None:
            return _full_writer(self.opened, self.answers)
        if self.config.lora is None:
            return writer_like(self.opened)
        assert self.config.init is not None
        form = checkpoint.adapter.adapter_format(self.opened, self.config.init, self.fingerprint)
        form.check(self.adapted_modules)
        return AdapterCheckpointWriter(form, self.config)


def count_parameters(model: ModelConfig) -> int:
    """Of a model that is not made."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Transformer(model).parameters())


def build_new_model(config: RunConfig, model: ModelConfig, start: InitialModel | None) -> Transformer:
    """What a new run trains, on its device: as ``start`` has it, or at random from ``train.seed``."""
    torch.manual_seed(config.train.seed)
    made = Transformer(model) if start is None else start.model()
    if start is None and model.kind != "decoder":
        init_weights(made)
    return made.to(config.train.device)


def load_initial(config: RunConfig) -> InitialModel | None:
    """What a new run begins with; None of one that begins at random.

    Raises CheckpointError for what is no whole checkpoint, ConfigError for one that cannot be trained so.
    """
    if config.init is None:
        return None
    return _start(config, open_checkpoint(config.init))


def resume_initial(config: RunConfig, out: Path, begun: Mapping[str, Any]) -> InitialModel:
    """What a run of adapters goes on beside.  CheckpointError where the model is gone, or another by now."""
    assert config.init is not None and config.lora is not None
    try:
        opened = open_checkpoint(config.init)
    except CheckpointError as error:
        raise CheckpointError(
            f"cannot resume {out}: the model that its adapters stand beside cannot be opened: {error.message}",
            error.hint,
        ) from error
    start = _start(config, opened)
    if start.fingerprint != begun.get("fingerprint"):
        raise CheckpointError(f"cannot resume {out}: {config.init} is another model than the one that it began with")
    return start


def load_adapted(start: InitialModel, out: Path) -> Transformer:
    """The model beside the adapters of a run's newest checkpoint."""
    model = start.model()
    model_lib.lora.load_factors(model, checkpoint.adapter.open_adapter(out).factors(start.opened))
    return model


def writer_like(opened: CheckpointHandle) -> FullCheckpointWriter:
    """The form that a checkpoint is in already: its config, its words and what it says about generating, as they are.
    Of an adapter with its base, the base's."""
    if isinstance(opened, checkpoint.adapter.AdaptedCheckpoint):
        opened = opened.base
    files, layout, origin = checkpoint.export.read_tokenizer_files(opened.path), None, opened.origin
    if isinstance(opened, checkpoint.hf_layout.HFCheckpoint):
        layout, origin = checkpoint.hf_layout.HFLayout(opened.family, opened.fields.content, exact=True), None
        there = opened.path / checkpoint.generation_config.GENERATION_FILE
        files |= {checkpoint.generation_config.GENERATION_FILE: there.read_bytes()} if there.is_file() else {}
    return FullCheckpointWriter(opened.config, layout, opened.generation, None, files, origin)


def _ending(before: bytes | None, said: GenerationConfig) -> bytes:
    """``generation_config.json`` with all tokens that end an answer."""
    content = checkpoint.generation_config.generation_json(said) or {} if before is None else json.loads(before)
    return json.dumps({**content, "eos_token_id": list(said.eos_token_ids)}, indent=2).encode()


def tokenizer_path(path: str | Path) -> Path:
    """The folder or file of a tokenizer that is named; of a run, its newest checkpoint's; of prepared data, its own."""
    if data.token_store.is_prepared(Path(path)):
        return Path(path) / data.token_store.TOKENIZER
    return checkpoint.folder.locate(Path(path)) if checkpoint.folder.is_run(Path(path)) else Path(path)


def load_tokenizer_from(path: str | Path) -> Tokenizer:
    """The tokenizer of a file, a folder, a run or prepared data.  Raises TokenizerError."""
    return load_tokenizer(tokenizer_path(path))


def _full_writer(opened: CheckpointHandle, config: ModelConfig) -> FullCheckpointWriter:
    """With another head: in the layout of its own family, else of any other that can hold it, else kvad's own."""
    if isinstance(opened, checkpoint.adapter.AdaptedCheckpoint):
        opened = opened.base
    said, words = (
        replace(opened.generation, pooling=None, normalize=False),
        checkpoint.export.read_tokenizer_files(opened.path),
    )
    for family in (opened.origin, None):
        try:
            return FullCheckpointWriter(
                config, checkpoint.hf_layout.choose_layout(config, said, family), said, None, words
            )
        except CheckpointError:
            continue
    return FullCheckpointWriter(config, None, said, None, words)


def _new_head(config: ModelConfig, keep: tuple[str, ...]) -> dict[str, Tensor]:
    """The parameters of a head that begins, but for those that begin with ``keep``."""
    fresh = Transformer(config)
    init_weights(fresh)
    head = {name: tensor for name, tensor in fresh.state_dict().items() if name.startswith("head.")}
    return {name: tensor for name, tensor in head.items() if not name.startswith(keep or ("-",))}


def _pooler(own: ModelConfig, wanted: ModelConfig) -> tuple[str, ...]:
    """The part of a head that both have: BERT's pooler, which a model without labels answers by."""
    same = (
        isinstance(own.head, PoolingHeadConfig)
        and isinstance(wanted.head, ClassificationHeadConfig)
        and own.head.transform is not None
    )
    return ("head.transform.",) if same and own.head.transform == wanted.head.transform else ()


def generation_config_from(opened: CheckpointHandle) -> GenerationConfig:
    """What a checkpoint says about generating, with the token that opens a target where it is said as a text's."""
    said = opened.generation
    if said.decoder_start_token_id is not None or opened.config.kind != "encoder-decoder":
        return said
    return replace(said, decoder_start_token_id=said.bos_token_id)


def _start(config: RunConfig, opened: CheckpointHandle) -> InitialModel:
    model, name = opened.config, config.init
    if model.kind != "encoder" and not isinstance(model.head, LanguageHeadConfig):
        raise ConfigError(f"model.init: {name} has no head over a vocabulary", "a language model has one")
    if opened.tokenizer is None:
        raise ConfigError(f"model.init: {name} came without a tokenizer", "put its tokenizer.json beside it")
    if config.data.seq_len > (longest := _longest(model)):
        raise ConfigError(
            f"data.seq_len: {config.data.seq_len} is beyond the limit of {name}, {longest}", f"--context {longest} fits"
        )
    if config.lora is not None and isinstance(opened, checkpoint.adapter.AdaptedCheckpoint):
        raise ConfigError(
            f"model.init: {name} is an adapter already", "merge it first: kvad merge BASE ADAPTER --out DIR"
        )
    _check_vocabulary(config.tokenizer, opened.tokenizer, str(name))
    start = InitialModel(config, opened, opened.tokenizer)
    if model.kind == "encoder-decoder":
        if opened.tokenizer.languages:
            raise ConfigError(f"model.init: {name} marks languages, and pairs of texts name none")
        if start.generation.decoder_start_token_id is None or not start.generation.eos_token_ids:
            raise ConfigError(f"model.init: {name} does not say which tokens begin and end a target")
    return start


def _check_vocabulary(wanted: TokenizerConfig, tokenizer: Tokenizer, name: str) -> None:
    """ConfigError for another tokenizer than the model's."""
    if wanted == TokenizerConfig():
        return
    if wanted != TokenizerConfig(path=wanted.path):
        raise ConfigError(f"[tokenizer]: {name} has its own tokenizer", "leave the table out")
    assert wanted.path is not None
    if load_tokenizer_from(wanted.path).fingerprint() != tokenizer.fingerprint():
        raise ConfigError(f"tokenizer.path: {wanted.path} is not the tokenizer of {name}", "leave it out")
