"""[compress] and [lora] of a run file: what is trained beside a model whose own weights stay.

Standard library only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvad.errors import ConfigError
from kvad.train.optim_config import require

__all__ = ["SummarizerConfig", "LoraConfig"]


@dataclass(frozen=True)
class SummarizerConfig:
    """A compressor of the cache of ``model`` (a checkpoint), which makes one summary of ``ratio`` tokens.

    It is trained to stand for all but the first ``sinks`` and the latest ``recent`` tokens of a row, for ``every``
    queries at a time, as ``hierarchy(recent, sinks=, every=, ratio=)`` lets tokens descend.  ``hidden``: units of its
    correction, for each kv head.
    """

    model: str | None = None
    ratio: int = 8
    recent: int = 64
    interval: int = 16
    num_sinks: int = 0
    hidden_size: int = 16

    def __post_init__(self) -> None:
        for name, least in (("ratio", 2), ("recent", 1), ("interval", 1), ("num_sinks", 0), ("hidden_size", 1)):
            require(getattr(self, name) >= least, f"compress.{name}", getattr(self, name), f"at least {least}")

    def check_context(self, context: int) -> None:
        """ConfigError where nothing of a row of ``context`` tokens would be summarised."""
        last = (context - 1) // self.interval * self.interval
        if max(0, last - self.recent) // self.ratio * self.ratio <= self.num_sinks:
            raise ConfigError(
                f"summarizer.recent: of rows of {context} tokens nothing is older than {self.recent}",
                f"train on a longer --context than {self.num_sinks + self.recent + self.interval + self.ratio}",
            )


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021; ``model/lora.py``) of ``rank``, scaled by ``alpha`` / rank (``rslora``: alpha
    / sqrt(rank)), beside the linear parts that ``targets`` name: "all", "q,v", or a list, with dotted patterns in it.

    ``dropout``: of an adapter's input, while it is trained.
    """

    rank: int = 8
    alpha: float = 16.0
    target_modules: str | tuple[str, ...] = ("q", "v")
    dropout: float = 0.0
    use_rslora: bool = False

    def __post_init__(self) -> None:
        require(self.rank >= 1, "lora.rank", self.rank, "at least 1")
        require(self.alpha > 0, "lora.alpha", self.alpha, "above 0")
        require(0 <= self.dropout < 1, "lora.dropout", self.dropout, "in [0, 1)")
        if not self.target_names:
            raise ConfigError(
                "lora.target_modules: no part is named", 'name some, as in targets = ["q", "v"], or "all"'
            )

    @property
    def target_names(self) -> tuple[str, ...]:
        """The targets, one by one."""
        said = self.target_modules.split(",") if isinstance(self.target_modules, str) else self.target_modules
        return tuple(name.strip() for name in said if name.strip())

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)
