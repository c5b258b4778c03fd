"""Beginning a request from what an earlier one left, and keeping what it leaves.

A state is used as far as its tokens agree with the prompt's, where the cache can be cut there, and one token is left to
compute; else not at all, and the reason is said.  What is reused counts as ``Usage.cached``.  A known prefix that
reaches as far is taken instead: its blocks are there already.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvad.cache import sessions
from kvad.cache.device import KVCache
from kvad.cache.manager import KVCacheManager, SwappedSequence
from kvad.cache.sessions import SequenceState
from kvad.engine import scheduling
from kvad.engine.scheduling import SamplingParams
from kvad.errors import RequestError


class ResumePoint:
    """What a request goes on from: nothing (``missed`` says why, where that is worth saying), or a state."""

    def __init__(
        self,
        swapped: SwappedSequence | None = None,
        pending_restore: sessions.state.PendingRestore | None = None,
        miss_reason: str = "",
    ) -> None:
        self.swapped, self.pending_restore, self.miss_reason = swapped, pending_restore, miss_reason


class StateKeeper:
    """States of one engine's requests.  ``home``: what its states are known by."""

    def __init__(self, kv_cache: KVCache, kv_cache_manager: KVCacheManager) -> None:
        self._kv_cache, self._kv_cache_manager = kv_cache, kv_cache_manager
        self.engine_id = object()
        self._asked: dict[int, tuple[str, str]] = {}  # request -> regime, salt
        self._pop_state: dict[int, SequenceState] = {}

    def resume(
        self,
        state: SequenceState,
        tokens: Sequence[int],
        sampling: SamplingParams,
        *,
        root: bytes,
        regime: str,
        salt: str,
        source: Sequence[int] | None,
    ) -> ResumePoint:
        """How this prompt goes on from ``state``.  RequestError: it was made by another engine."""
        if state.engine_id is not self.engine_id:
            raise RequestError("the state was made by another engine", "save it as a session, and load that here")
        for name, here, there in (("regime", regime, state.regime), ("salt", salt, state.salt)):
            if here != there:
                return ResumePoint(miss_reason=f"{name}: {here or 'none'} here, {there or 'none'} there")
        if (None if source is None else tuple(source)) != state.encoder_tokens:
            return ResumePoint(miss_reason="source: it answers another source")
        if sampling.prompt_logprobs is not None:
            return ResumePoint(miss_reason="prompt_logprobs: every token of the prompt is to be computed")
        agreed = sessions.state.common_prefix_length(state, tokens)
        wanted = min(agreed, len(tokens) - 1)
        if wanted == 0:
            return ResumePoint(miss_reason="tokens: they differ from the first on" if agreed == 0 else "")
        if self._kv_cache_manager.cached_prefix_length(tokens, root) >= wanted:
            return ResumePoint()
        fitted = sessions.state.fit_state(state, self._kv_cache.all_groups, wanted)
        if isinstance(fitted, str):
            return ResumePoint(miss_reason=fitted)
        parked = self._kv_cache_manager.import_sequence(
            tokens[:wanted], root, fitted.layouts, fitted.lower_levels, source=source is not None
        )
        return ResumePoint(parked, sessions.state.PendingRestore(state, fitted))

    def begin(self, resumed: ResumePoint) -> None:
        """The request was taken: its state waits in the memory until it is seated."""
        if resumed.swapped is not None and resumed.pending_restore is not None:
            self._kv_cache.swapped[resumed.swapped.key] = resumed.pending_restore

    def track(self, request: int, regime: str, salt: str) -> None:
        """Keep what this request leaves."""
        self._asked[request] = regime, salt

    def collect(self, left: Sequence[scheduling.sequence.FinishedState]) -> None:
        """Copy out what ended rows left, before the next step writes over it."""
        for each in left:
            asked = self._asked.pop(each.request, None)
            if asked is not None:
                regime, salt = asked
                self._pop_state[each.request] = sessions.state.capture(
                    self._kv_cache, each.layout, each.tokens, regime=regime, salt=salt, home=self.engine_id
                )

    def forget(self, request: int) -> None:
        self._asked.pop(request, None)
        self._pop_state.pop(request, None)

    def pop_state(self, request: int) -> SequenceState:
        """Handed over once.  RequestError: nothing of it was kept."""
        state = self._pop_state.pop(request, None)
        if state is None:
            raise RequestError(
                f"nothing was kept of request {request}",
                "submit it with keep=True, and ask when it has ended by itself",
            )
        return state


def check_single_sequence(sampling: SamplingParams) -> None:
    """RequestError: states are of one row."""
    if sampling.n > 1 or sampling.num_beams > 1:
        what = f"{sampling.num_beams} beams" if sampling.num_beams > 1 else f"{sampling.n} samples"
        raise RequestError(f"what is resumed or kept is one row, not {what}", "leave n= and beams= out")
