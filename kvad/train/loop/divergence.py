"""Detection of diverging runs: loss or gradient norm far above past values for many steps.

Averages over about the last twenty steps, with weights 0.95 ** age (normalized, as if no steps came before the first):
L of the loss, D of the distance of each step's loss from L, G of the logarithm of the gradient norm before clipping.
A run diverges if

    L > min(L) + max(0.2 min(L), 3 D, 0.1 nats)    or    L > 2 min'(L) + 0.1 nats    or    G > min'(G) + log 100

holds after each of 50 steps in a row; min is over all steps so far, min' over those from the twentieth on. A noisy loss
has a large D; a loss that blew up is noisy too, but is twice what it was. One outlier raises D as much as L, and a
step's loss counts as at most 4 L. The warning is returned once per run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

DECAY, PATIENCE, WARMUP_STEPS = 0.95, 50, 20
RELATIVE_MARGIN, SPREADS, MIN_MARGIN, DOUBLING, MAX_RATIO = 0.2, 3.0, 0.1, 2.0, 4.0
GROWTH_FACTOR = math.log(100)


class DivergenceDetector:
    """Tracks losses and gradient norms of all steps; ``state`` holds everything as numbers for a checkpoint."""

    def __init__(self, state: Sequence[float] = ()) -> None:
        numbers = state or (0.0,) * 12
        self._weight, self._loss, self._spread, self._norm = numbers[:4]
        self._lowest, self._lowest_at, self._lowest_norm, self._lowest_norm_at = numbers[4:8]
        self._lowest_late = numbers[8]  # the lowest from the WARMUP_STEPS step on
        self.high, self._num_high_norm, self._has_warned = (int(number) for number in numbers[9:])

    @property
    def state(self) -> list[float]:
        averages = [self._weight, self._loss, self._spread, self._norm]
        least = [self._lowest, self._lowest_at, self._lowest_norm, self._lowest_norm_at, self._lowest_late]
        return [*averages, *least, self.high, self._num_high_norm, self._has_warned]

    def update(self, step: int, loss: float, norm: float, lr: float) -> str | None:
        """Add a step with a finite loss; return a warning once if the run diverges."""
        self._add(step, loss, norm)
        margin = max(RELATIVE_MARGIN * self._lowest, SPREADS * self._spread, MIN_MARGIN)
        doubled = step > WARMUP_STEPS and self._loss > DOUBLING * self._lowest_late + MIN_MARGIN
        self.high = self.high + 1 if doubled or self._loss > self._lowest + margin else 0
        is_high_norm = step > WARMUP_STEPS and self._norm > self._lowest_norm + GROWTH_FACTOR
        self._num_high_norm = self._num_high_norm + 1 if is_high_norm else 0
        if self._has_warned or max(self.high, self._num_high_norm) < PATIENCE:
            return None
        self._has_warned = 1
        if self.high >= PATIENCE:
            now, least, at = f"loss of {self._loss:.3f}", f"{self._lowest:.3f}", int(self._lowest_at)
        else:
            now, least = f"gradient norm of {math.exp(self._norm):.2g}", f"{math.exp(self._lowest_norm):.2g}"
            at = int(self._lowest_norm_at)
        return (
            f"it diverges: a {now} on average by step {step:,}, {least} at step {at:,}; "
            f"a lower optim.lr (now {lr:.1e}) or a longer optim.warmup_steps may help"
        )

    def _add(self, step: int, loss: float, norm: float) -> None:
        first = self._weight == 0
        self._weight = DECAY * self._weight + 1
        share = 1 / self._weight
        loss = loss if first else min(loss, MAX_RATIO * self._loss)
        self._spread += 0.0 if first else share * (abs(loss - self._loss) - self._spread)
        self._loss += share * (loss - self._loss)
        if 0 < norm < math.inf:  # an fp16 loss scale may still be adapting
            self._norm += share * (math.log(norm) - self._norm)
        if first or self._loss < self._lowest:
            self._lowest, self._lowest_at = self._loss, step
        if step <= WARMUP_STEPS or self._loss < self._lowest_late:
            self._lowest_late = self._loss
        if step <= WARMUP_STEPS or self._norm < self._lowest_norm:
            self._lowest_norm, self._lowest_norm_at = self._norm, step
