"""[compress] and [lora] of a run file: what is trained beside a model whose own weights stay.

Standard library only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvad.errors import ConfigError
from kvad.train.optim_config import check

__all__ = ["CompressConfig", "LoraConfig"]


@dataclass(frozen=True)
class CompressConfig:
    """A compressor of the cache of ``model`` (a checkpoint), which makes one summary of ``ratio`` tokens.

    It is trained to stand for all but the first ``sinks`` and the latest ``recent`` tokens of a row, for ``every``
    queries at a time, as ``hierarchy(recent, sinks=, every=, ratio=)`` lets tokens descend.  ``hidden``: units of its
    correction, for each kv head.
    """

    model: str | None = None
    ratio: int = 8
    recent: int = 64
    every: int = 16
    sinks: int = 0
    hidden: int = 16

    def __post_init__(self) -> None:
        for name, least in (("ratio", 2), ("recent", 1), ("every", 1), ("sinks", 0), ("hidden", 1)):
            check(getattr(self, name) >= least, f"compress.{name}", getattr(self, name), f"at least {least}")

    def check_context(self, context: int) -> None:
        """ConfigError where nothing of a row of ``context`` tokens would be summarised."""
        last = (context - 1) // self.every * self.every
        if max(0, last - self.recent) // self.ratio * self.ratio <= self.sinks:
            raise ConfigError(
                f"compress.recent: of rows of {context} tokens nothing is older than {self.recent}",
                f"train on a longer --context than {self.sinks + self.recent + self.every + self.ratio}",
            )


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021; ``model/lora.py``) of ``rank``, scaled by ``alpha`` / rank (``rslora``: alpha
    / sqrt(rank)), beside the linear parts that ``targets`` name: "all", "q,v", or a list, with dotted patterns in it.

    ``dropout``: of an adapter's input, while it is trained.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: str | tuple[str, ...] = ("q", "v")
    dropout: float = 0.0
    rslora: bool = False

    def __post_init__(self) -> None:
        check(self.rank >= 1, "lora.rank", self.rank, "at least 1")
        check(self.alpha > 0, "lora.alpha", self.alpha, "above 0")
        check(0 <= self.dropout < 1, "lora.dropout", self.dropout, "in [0, 1)")
        if not self.names:
            raise ConfigError("lora.targets: no part is named", 'name some, as in targets = ["q", "v"], or "all"')

    @property
    def names(self) -> tuple[str, ...]:
        """The targets, one by one."""
        said = self.targets.split(",") if isinstance(self.targets, str) else self.targets
        return tuple(name.strip() for name in said if name.strip())

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)
