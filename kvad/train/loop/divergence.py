"""Whether a run diverges: its loss, or its gradients, stand well above what they have been, for long.

Averages over the last twenty steps or so, weighing 0.95 ** age (as if there had been no step before the first):
L of the loss, D of how far each step's loss was from L, G of the logarithm of the gradient's norm before clipping.
Diverging is

    L > min(L) + max(0.2 min(L), 3 D, 0.1 nats)    or    L > 2 min'(L) + 0.1 nats    or    G > min'(G) + log 100

after each of 50 steps in a row; min is over all steps so far, min' over those from the twentieth on.  A noisy loss has
a large D; a loss that has come apart is noisy too, but twice what it was.  One outlier raises D as much as L, and a
step's loss counts as 4 L at most.  It is said once in a run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

KEEP, PATIENCE, FIRST = 0.95, 50, 20
SHARE, SPREADS, NATS, TIMES, MOST = 0.2, 3.0, 0.1, 2.0, 4.0
GROWTH_FACTOR = math.log(100)


class DivergenceDetector:
    """Told of every step.  ``state`` is all there is to it, numbers that a checkpoint keeps."""

    def __init__(self, state: Sequence[float] = ()) -> None:
        numbers = state or (0.0,) * 12
        self._weight, self._loss, self._spread, self._norm = numbers[:4]
        self._lowest, self._lowest_at, self._least, self._least_at = numbers[4:8]
        self._settled = numbers[8]  # the lowest from the FIRST step on
        self.high, self._grown, self._said = (int(number) for number in numbers[9:])

    @property
    def state(self) -> list[float]:
        averages = [self._weight, self._loss, self._spread, self._norm]
        least = [self._lowest, self._lowest_at, self._least, self._least_at, self._settled]
        return [*averages, *least, self.high, self._grown, self._said]

    def update(self, step: int, loss: float, norm: float, lr: float) -> str | None:
        """After a step of a finite loss; what to say, once."""
        self._add(step, loss, norm)
        margin = max(SHARE * self._lowest, SPREADS * self._spread, NATS)
        doubled = step > FIRST and self._loss > TIMES * self._settled + NATS
        self.high = self.high + 1 if doubled or self._loss > self._lowest + margin else 0
        self._grown = self._grown + 1 if step > FIRST and self._norm > self._least + GROWTH_FACTOR else 0
        if self._said or max(self.high, self._grown) < PATIENCE:
            return None
        self._said = 1
        if self.high >= PATIENCE:
            now, least, at = f"loss of {self._loss:.3f}", f"{self._lowest:.3f}", int(self._lowest_at)
        else:
            now, least, at = (
                f"gradient norm of {math.exp(self._norm):.2g}",
                f"{math.exp(self._least):.2g}",
                int(self._least_at),
            )
        return (
            f"it diverges: a {now} on average by step {step:,}, {least} at step {at:,}; "
            f"a lower optim.lr (now {lr:.1e}) or a longer optim.warmup_steps may help"
        )

    def _add(self, step: int, loss: float, norm: float) -> None:
        first = self._weight == 0
        self._weight = KEEP * self._weight + 1
        share = 1 / self._weight
        loss = loss if first else min(loss, MOST * self._loss)
        self._spread += 0.0 if first else share * (abs(loss - self._loss) - self._spread)
        self._loss += share * (loss - self._loss)
        if 0 < norm < math.inf:  # fp16 may be looking for its scale
            self._norm += share * (math.log(norm) - self._norm)
        if first or self._loss < self._lowest:
            self._lowest, self._lowest_at = self._loss, step
        if step <= FIRST or self._loss < self._settled:
            self._settled = self._loss
        if step <= FIRST or self._norm < self._least:
            self._least, self._least_at = self._norm, step
