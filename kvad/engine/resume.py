"""Resume a request from an earlier one's state, and capture states.

A state is used up to the last token that agrees with the prompt, if the cache can be truncated there and one token
remains to compute; otherwise not at all, with a reason. Reused tokens count as ``RequestMetrics.num_cached_tokens``.
A cached prefix of that length is used instead: its blocks are already in the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from kvad.cache import sessions
from kvad.cache.device import KVCache
from kvad.cache.manager import KVCacheManager, SwappedSequence
from kvad.cache.sessions import SequenceState
from kvad.engine import scheduling
from kvad.engine.scheduling import LengthLimits, SamplingParams
from kvad.errors import RequestError


class ResumePoint(NamedTuple):
    """Start of a request: a state, or nothing."""

    swapped: SwappedSequence | None = None
    pending_restore: sessions.state.PendingRestore | None = None
    miss_reason: str = ""  # why no state is used, if that is informative


class StateKeeper:
    """States of one engine's requests; ``engine_id`` identifies the engine in its states."""

    def __init__(self, kv_cache: KVCache, kv_cache_manager: KVCacheManager, limits: LengthLimits) -> None:
        self._kv_cache, self._kv_cache_manager, self._limits = kv_cache, kv_cache_manager, limits
        self.engine_id = object()
        self._tracked: dict[int, tuple[str, str]] = {}  # request -> salt, adapter
        self._states: dict[int, SequenceState] = {}

    def resume(
        self,
        state: SequenceState | None,
        tokens: Sequence[int],
        sampling_params: SamplingParams,
        prefix_root: bytes,
        encoder_tokens: Sequence[int] | None,
        cache_salt: str,
        adapter: str,
    ) -> ResumePoint:
        """Return the resume point of this prompt; raise RequestError for another engine's state."""
        if state is None:
            return ResumePoint()
        if state.engine_id is not self.engine_id:
            raise RequestError(
                "resume: the state belongs to another engine", "Save it as a session and load that here."
            )
        regime = self._limits.rope_regime(len(tokens))
        prefix_root = scheduling.sequence.regime_root(prefix_root, regime)
        pairs = {"rope_regime": (str(regime), state.regime), "cache_salt": (cache_salt, state.salt)}
        pairs["adapter"] = adapter, state.adapter
        for label, (current, stored) in pairs.items():
            if current != stored:
                return ResumePoint(miss_reason=f"{label}: {current or 'none'} here, {stored or 'none'} in the state")
        if (None if encoder_tokens is None else tuple(encoder_tokens)) != state.encoder_tokens:
            return ResumePoint(miss_reason="encoder input: it differs from the state's")
        if sampling_params.prompt_logprobs is not None:
            return ResumePoint(miss_reason="prompt_logprobs: every token of the prompt must be computed")
        num_common = sessions.state.common_prefix_length(state, tokens)
        num_reused = min(num_common, len(tokens) - 1)
        if num_reused == 0:
            return ResumePoint(miss_reason="tokens: the first token differs" if num_common == 0 else "")
        if self._kv_cache_manager.cached_prefix_length(tokens, prefix_root) >= num_reused:
            return ResumePoint()
        fitted_state = sessions.state.fit_state(state, self._kv_cache.all_groups, num_reused)
        if isinstance(fitted_state, str):
            return ResumePoint(miss_reason=fitted_state)
        swapped = self._kv_cache_manager.import_sequence(
            tokens[:num_reused],
            prefix_root,
            fitted_state.layouts,
            fitted_state.lower_levels,
            has_encoder_blocks=encoder_tokens is not None,
        )
        return ResumePoint(swapped, sessions.state.PendingRestore(state, fitted_state))

    def begin(self, resume_point: ResumePoint) -> None:
        """Pass the state of an accepted request to the cache, until the request is admitted."""
        if resume_point.swapped is not None and resume_point.pending_restore is not None:
            self._kv_cache.swapped[resume_point.swapped.key] = resume_point.pending_restore

    def track(self, request: int, cache_salt: str, adapter: str) -> None:
        """Capture the state of this request when it ends."""
        self._tracked[request] = cache_salt, adapter

    def collect(self, finished: Sequence[scheduling.sequence.FinishedState]) -> None:
        """Copy the states of ended requests to the host before the next step overwrites them."""
        for finished_state in finished:
            tracked = self._tracked.pop(finished_state.request, None)
            if tracked is not None:
                cache_salt, adapter = tracked
                state = sessions.state.capture(
                    self._kv_cache,
                    finished_state.layout,
                    finished_state.tokens,
                    regime=str(finished_state.rope_regime),
                    salt=cache_salt,
                    engine_id=self.engine_id,
                )
                self._states[finished_state.request] = replace(state, adapter=adapter)

    def forget(self, request: int) -> None:
        self._tracked.pop(request, None)
        self._states.pop(request, None)

    def pop_state(self, request: int) -> SequenceState:
        """Return a state once; raise RequestError if there is none."""
        state = self._states.pop(request, None)
        if state is None:
            raise RequestError(
                f"request {request} has no state",
                "Submit it with keep_state=True and read the state after it ended by itself.",
            )
        return state
