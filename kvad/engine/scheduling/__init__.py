"""Requests, sequences, scheduler, batching, preemption and beam search; no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad._lazy import lazy_names

if TYPE_CHECKING:
    from kvad.engine.scheduling import batching as batching
    from kvad.engine.scheduling import preemption as preemption
    from kvad.engine.scheduling import request as request
    from kvad.engine.scheduling import sequence as sequence
    from kvad.engine.scheduling import speculation as speculation
    from kvad.engine.scheduling import step_costs as step_costs
    from kvad.engine.scheduling import structured_output as structured_output
    from kvad.engine.scheduling.beam_search import num_candidates as num_candidates
    from kvad.engine.scheduling.limits import LengthLimits as LengthLimits
    from kvad.engine.scheduling.request import SamplingOptions as SamplingOptions
    from kvad.engine.scheduling.request import SamplingParams as SamplingParams
    from kvad.engine.scheduling.request import SequenceOutput as SequenceOutput
    from kvad.engine.scheduling.request import StreamChunk as StreamChunk
    from kvad.engine.scheduling.request import TokenLogprob as TokenLogprob
    from kvad.engine.scheduling.scheduler import Scheduler as Scheduler
    from kvad.engine.scheduling.sequence import RequestMetrics as RequestMetrics
    from kvad.engine.scheduling.sequence import ScheduledSequence as ScheduledSequence
    from kvad.engine.scheduling.sequence import SchedulerOutput as SchedulerOutput
    from kvad.engine.scheduling.sequence import TokenSequence as TokenSequence
    from kvad.engine.scheduling.speculation import SpeculativeConfig as SpeculativeConfig
    from kvad.engine.scheduling.structured_output import StructuredOutput as StructuredOutput

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
