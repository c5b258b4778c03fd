"""The loss scale of fp16 (Micikevicius et al. 2018, sec. 3.2): gradients too small for its exponents are made larger.

The rule is that of ``torch.amp.GradScaler``: begin at 2^16; a gradient that is not finite halves the scale and its step
is left out; 2,000 steps in a row that were taken double it.  Scales are powers of two, so scaling rounds nothing.
"""

from __future__ import annotations

import math

__all__ = ["LossScale"]

START, PATIENCE = 2.0**16, 2000


class LossScale:
    """``state``: (scale, steps taken since it last changed), all there is to remember."""

    def __init__(self, scale: float = START, patience: int = PATIENCE) -> None:
        self.scale, self.good, self._patience = scale, 0, patience

    def update(self, norm: float) -> bool:
        """Of a step's gradient, its norm: whether the step is to be taken.  Changes the scale for the next one."""
        if not math.isfinite(norm):
            self.scale, self.good = self.scale / 2, 0
            return False
        self.good += 1
        if self.good == self._patience:
            self.scale, self.good = self.scale * 2, 0
        return True

    @property
    def at_minimum(self) -> bool:
        """Whether a gradient that is not finite cannot be the scale's fault any more."""
        return self.scale <= 1.0

    @property
    def state(self) -> tuple[float, float]:
        return self.scale, float(self.good)

    @state.setter
    def state(self, numbers: tuple[float, float]) -> None:
        self.scale, self.good = numbers[0], int(numbers[1])
