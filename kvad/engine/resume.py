"""Beginning a request from what an earlier one left, and keeping what it leaves.

A state is used as far as its tokens agree with the prompt's, where the cache can be cut there, and one token is left to
compute; else not at all, and the reason is said.  What is reused counts as ``Usage.cached``.  A known prefix that
reaches as far is taken instead: its blocks are there already.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvad.cache.ledger import Ledger, Parked
from kvad.cache.memory import Memory
from kvad.cache.state import Laid, State, agreeing, fit, take
from kvad.engine.request import Sampling
from kvad.engine.row import Left
from kvad.errors import RequestError

__all__ = ["Keeper", "Resumed", "check_one"]


class Resumed:
    """What a request goes on from: nothing (``missed`` says why, where that is worth saying), or a state."""

    def __init__(self, parked: Parked | None = None, laid: Laid | None = None, missed: str = "") -> None:
        self.parked, self.laid, self.missed = parked, laid, missed


class Keeper:
    """States of one engine's requests.  ``home``: what its states are known by."""

    def __init__(self, memory: Memory, ledger: Ledger) -> None:
        self._memory, self._ledger = memory, ledger
        self.home = object()
        self._asked: dict[int, tuple[str, str]] = {}  # request -> regime, salt
        self._kept: dict[int, State] = {}

    def resume(
        self,
        state: State,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        root: bytes,
        regime: str,
        salt: str,
        source: Sequence[int] | None,
    ) -> Resumed:
        """How this prompt goes on from ``state``.  RequestError: it was made by another engine."""
        if state.home is not self.home:
            raise RequestError("the state was made by another engine", "save it as a session, and load that here")
        for name, here, there in (("regime", regime, state.regime), ("salt", salt, state.salt)):
            if here != there:
                return Resumed(missed=f"{name}: {here or 'none'} here, {there or 'none'} there")
        if (None if source is None else tuple(source)) != state.source:
            return Resumed(missed="source: it answers another source")
        if sampling.prompt_logprobs is not None:
            return Resumed(missed="prompt_logprobs: every token of the prompt is to be computed")
        agreed = agreeing(state, tokens)
        wanted = min(agreed, len(tokens) - 1)
        if wanted == 0:
            return Resumed(missed="tokens: they differ from the first on" if agreed == 0 else "")
        if self._ledger.known(tokens, root) >= wanted:
            return Resumed()
        fitted = fit(state, self._memory.whole, wanted)
        if isinstance(fitted, str):
            return Resumed(missed=fitted)
        parked = self._ledger.adopt(tokens[:wanted], root, fitted.lays, fitted.below, source=source is not None)
        return Resumed(parked, Laid(state, fitted))

    def begin(self, resumed: Resumed) -> None:
        """The request was taken: its state waits in the memory until it is seated."""
        if resumed.parked is not None and resumed.laid is not None:
            self._memory.parked[resumed.parked.key] = resumed.laid

    def ask(self, request: int, regime: str, salt: str) -> None:
        """Keep what this request leaves."""
        self._asked[request] = regime, salt

    def collect(self, left: Sequence[Left]) -> None:
        """Copy out what ended rows left, before the next step writes over it."""
        for each in left:
            asked = self._asked.pop(each.request, None)
            if asked is not None:
                regime, salt = asked
                self._kept[each.request] = take(
                    self._memory, each.standing, each.tokens, regime=regime, salt=salt, home=self.home
                )

    def forget(self, request: int) -> None:
        self._asked.pop(request, None)
        self._kept.pop(request, None)

    def kept(self, request: int) -> State:
        """Handed over once.  RequestError: nothing of it was kept."""
        state = self._kept.pop(request, None)
        if state is None:
            raise RequestError(
                f"nothing was kept of request {request}",
                "submit it with keep=True, and ask when it has ended by itself",
            )
        return state


def check_one(sampling: Sampling) -> None:
    """RequestError: states are of one row."""
    if sampling.n > 1 or sampling.beams > 1:
        what = f"{sampling.beams} beams" if sampling.beams > 1 else f"{sampling.n} samples"
        raise RequestError(f"what is resumed or kept is one row, not {what}", "leave n= and beams= out")
