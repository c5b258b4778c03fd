"""Runs of an engine over known tokens: generated tokens, and the logits of computed positions.

One way for every measurement through a cache (quality, streaming, evaluation, ``kvad verify``): requests are submitted,
the engine runs until it is idle, and a hook receives the logits of each sequence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from torch import Tensor

from kvad.engine import Engine
from kvad.engine.execution import ModelRunner
from kvad.engine.scheduling import SchedulerOutput
from kvad.errors import EngineError

LogitHook = Callable[[int, int, Tensor], None]  # (request, position of the first, logits [n, V])


def attach_logit_hook(engine: Engine, hook: LogitHook, *, all_positions: bool = False) -> None:
    """Pass the logits of every step to ``hook`` from now on, per sequence.

    Args:
        engine: The engine.
        hook: Receives the request, the position of the first row and the logits [n, V].
        all_positions: Compute the logits of every position, also of those that no request asks for.
    """
    engine.runner = _LogitHookRunner(engine, hook, all_positions)


class _LogitHookRunner(ModelRunner):
    def __init__(self, engine: Engine, hook: LogitHook, all_positions: bool) -> None:
        super().__init__(engine.model, engine.kv_cache)
        self.hook, self.all_positions = hook, all_positions

    def execute(self, output: SchedulerOutput) -> Tensor:
        requested = [scheduled.logit_offsets for scheduled in output.scheduled]
        if self.all_positions:
            output = with_all_logits(output)
        logits = super().execute(output)
        indices, first = list[int](), 0
        for scheduled, offsets in zip(output.scheduled, requested, strict=True):
            computed = scheduled.logit_offsets
            if len(computed):
                rows = logits[first : first + len(computed)]
                self.hook(scheduled.sequence.request_id, scheduled.start + computed[0], rows)
            indices += [first + offset - computed[0] for offset in offsets]
            first += len(computed)
        return logits[indices] if self.all_positions else logits


def with_all_logits(output: SchedulerOutput) -> SchedulerOutput:
    """Request the logits of every computed position."""
    scheduled = tuple(work._replace(logit_offsets=range(work.num_tokens)) for work in output.scheduled)
    return output._replace(scheduled=scheduled)


def run_engine(engine: Engine, after_step: Callable[[int], None] = lambda _step: None) -> dict[int, list[int]]:
    """Run the engine until it is idle and return the generated tokens of each request.

    Raises:
        EngineError: If a request failed.
    """
    tokens: dict[int, list[int]] = defaultdict(list)
    step = 0
    while not engine.idle:
        for chunk in engine.step():
            if chunk.error is not None:
                raise EngineError(f"request {chunk.request} failed: {chunk.error}")
            if chunk.token_id is not None:
                tokens[chunk.request].append(chunk.token_id)
        after_step(step)
        step += 1
    return tokens
