"""Callbacks of a training run: reports as plain values, and a base class.

Callbacks are passed in; the loop itself uses no terminal, file or figure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kvad import storage

if TYPE_CHECKING:
    from kvad.checkpoint import GenerationConfig
    from kvad.model import Transformer
    from kvad.text import Tokenizer
    from kvad.train.data import PackedDataset


@dataclass(frozen=True)
class StartReport:
    """State at the start of training."""

    step: int  # steps already done
    steps: int | None  # limit, None for none
    minutes: float | None  # limit, None for none
    parameters: int
    train_tokens: int
    validation_tokens: int
    tokens_per_step: int
    precision: str
    device: str
    threads: int
    torch: str
    gemm_flops: float | None = None  # FLOP/s of a large matrix product here, None if not measured


@dataclass(frozen=True)
class StepReport:
    """State after optimizer step ``step`` (the first is 1)."""

    step: int
    loss: float  # mean nats per target of this step
    lr: float
    grad_norm: float  # before clipping
    tokens: int  # targets so far
    elapsed: float  # seconds of training
    tokens_per_second: float
    eta: float | None  # seconds, None if unknown
    mfu: float | None = None  # model FLOP/s over StartReport.gemm_flops, None if unknown
    memory: int | None = None  # bytes
    memory_peak: int | None = None  # bytes
    expert_load: Mapping[str, float] | None = None  # by layer with experts: largest load over the mean
    starved_experts: Mapping[str, int] | None = None  # by layer: experts with less than a tenth of the mean load


@dataclass(frozen=True)
class EvalReport:
    """Result of an evaluation."""

    step: int
    val_loss: float  # mean nats per target
    val_tokens: int  # targets
    best: float  # lowest val_loss so far
    accuracy: float | None = None  # share of targets that were the most likely class, None if not counted


@dataclass(frozen=True)
class TextSample:
    """Model output for a held-out ``source``, with its reference ``target``."""

    source: str
    target: str
    text: str


@dataclass(frozen=True)
class SamplesReport:
    """Samples at an evaluation."""

    step: int
    samples: tuple[TextSample, ...]


@dataclass(frozen=True)
class CallbackReport:
    """Numbers that a callback measured at ``step``."""

    step: int
    name: str  # of the measurement
    values: Mapping[str, float | str]
    words: str  # the same as text


@dataclass(frozen=True)
class WarningReport:
    """Warning for the user; training continues."""

    step: int
    text: str


@dataclass(frozen=True)
class TrainingContext:
    """Access to the model for callbacks, which must change neither weights nor random numbers.

    ``log`` passes a report to all callbacks, by the name of their method (``on_callback_report``, ``on_samples``).
    """

    model: Transformer
    tokenizer: Tokenizer
    generation: GenerationConfig
    data: PackedDataset
    log: Callable[[str, object], None]


@dataclass(frozen=True)
class TrainingResult:
    """Result of a run; ``checkpoint`` holds its last step."""

    # interrupted by a signal; unchanged: a resumed run had all of its steps
    reason: Literal["done", "interrupted", "unchanged"]
    step: int
    loss: float | None
    val_loss: float | None
    best: float | None  # lowest validation loss, found at best_step
    tokens: int
    elapsed: float
    checkpoint: Path
    best_step: int | None = None
    signal: int | None = None  # number of the signal that interrupted it

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return storage.strict_json.plain_value(self)  # type: ignore[return-value]


class Callback:
    """Base class of callbacks; methods run in the training thread and count as training time.

    ``handles`` is the key of [callbacks] that the class implements, if any.
    """

    handles: ClassVar[str | None] = None

    def on_stage(self, text: str) -> None:
        """Receive one line about a stage of preparation, before training."""

    def on_model(self, context: TrainingContext) -> None:
        """Receive the model, before ``on_start``."""

    def on_start(self, report: StartReport) -> None: ...
    def on_step(self, report: StepReport) -> None: ...
    def on_eval(self, report: EvalReport) -> None: ...
    def on_samples(self, report: SamplesReport) -> None: ...
    def on_callback_report(self, report: CallbackReport) -> None: ...
    def on_warning(self, report: WarningReport) -> None: ...
    def on_save(self, path: Path, step: int) -> None:
        """Receive a written checkpoint, of this or an earlier step."""

    def on_end(self, outcome: TrainingResult) -> None: ...
