"""What a training run tells whoever listens: plain values, and a base class whose methods do nothing.

A listener is handed in; the loop knows nothing of terminals, files or figures.  Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from kvad.checkpoint import GenerationConfig
    from kvad.model import Transformer
    from kvad.text import Tokenizer
    from kvad.train.data import TrainingData


@dataclass(frozen=True)
class StartReport:
    """``step``: how many steps are done already; ``steps`` and ``minutes`` are the limits (None: no such limit).

    ``gemm_flops``: FLOP/s of a large matrix product here (None: nobody measured).
    """

    step: int
    steps: int | None
    minutes: float | None
    parameters: int
    train_tokens: int
    validation_tokens: int
    tokens_per_step: int
    precision: str
    device: str
    threads: int
    torch: str
    gemm_flops: float | None = None


@dataclass(frozen=True)
class StepReport:
    """After optimizer step ``step`` (1 is the first).  ``loss``: mean nats per target of this step's rows.

    ``tokens``: targets so far; ``elapsed`` and ``eta``: seconds of training, ``eta`` None before it can be known.
    ``mfu``: model FLOPs a second over ``StartReport.gemm_flops`` (``gauge.py``; None where either is not known).
    ``memory`` and ``memory_peak``: bytes held now and at most.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    elapsed: float
    tokens_per_second: float
    eta: float | None
    mfu: float | None = None
    memory: int | None = None
    memory_peak: int | None = None


@dataclass(frozen=True)
class EvalReport:
    """``val_loss``: mean nats per target over ``val_tokens`` targets of the validation split; ``accuracy``: the share
    of them for which the likeliest answer is right (None: nobody asked)."""

    step: int
    val_loss: float
    val_tokens: int
    best: float
    accuracy: float | None = None


@dataclass(frozen=True)
class TextSample:
    """What a model makes of a held-out ``source``, and the ``target`` that stands beside it."""

    source: str
    target: str
    text: str


@dataclass(frozen=True)
class SamplesReport:
    """With an evaluation, where the model answers sources."""

    step: int
    samples: tuple[TextSample, ...]


@dataclass(frozen=True)
class CallbackReport:
    """What a listener found out about the model at ``step``: ``what`` it measured, numbers by name, and the same in
    ``words``."""

    step: int
    what: str
    values: Mapping[str, float | str]
    words: str


@dataclass(frozen=True)
class WarningReport:
    """What a user should look at: training goes on."""

    step: int
    text: str


@dataclass(frozen=True)
class TrainingContext:
    """What a listener needs that runs the model itself.  It must change nothing of it: no weight, no random number.

    ``tell`` hands what it found to every listener, by its method's name (``on_measured``, ``on_samples``).
    """

    model: Transformer
    tokenizer: Tokenizer
    generation: GenerationConfig
    data: TrainingData
    log: Callable[[str, object], None]


@dataclass(frozen=True)
class TrainingResult:
    """``reason``: the run is done, or Ctrl-C ended it early; either way ``checkpoint`` holds its last step.

    ``best``: the lowest validation loss, found at ``best_step``.
    """

    reason: Literal["done", "interrupted"]
    step: int
    loss: float | None
    val_loss: float | None
    best: float | None
    tokens: int
    elapsed: float
    checkpoint: Path
    best_step: int | None = None


class Callback:
    """Override what you want to hear.  Called in the training thread; what a method takes counts as training time.

    ``watches``: the key of [watch] that it answers, if it does.
    """

    handles: ClassVar[str | None] = None

    def on_stage(self, text: str) -> None:
        """Before training: one line about what is being prepared."""

    def on_model(self, subject: TrainingContext) -> None:
        """Before ``on_start``: what is trained."""

    def on_start(self, report: StartReport) -> None: ...

    def on_step(self, report: StepReport) -> None: ...

    def on_eval(self, report: EvalReport) -> None: ...

    def on_samples(self, report: SamplesReport) -> None: ...

    def on_callback_report(self, report: CallbackReport) -> None: ...

    def on_warning(self, report: WarningReport) -> None: ...

    def on_save(self, path: Path, step: int) -> None:
        """The checkpoint of an earlier step, or of this one, is there."""

    def on_end(self, outcome: TrainingResult) -> None: ...
