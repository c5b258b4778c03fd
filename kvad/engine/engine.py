"""The engine: submit requests, step, and read pieces of text; many rows share one model and one cache.

One step is: the scheduler places a plan, the runner computes its logits, the sampler chooses, the scheduler settles.
What fails for one request ends that request with an error piece; its neighbours go on.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from torch import Tensor

from kvad.cache.disk import DISK, Disk
from kvad.cache.full import LimitName
from kvad.cache.identity import Identity
from kvad.cache.ledger import Ledger
from kvad.cache.memory import Memory
from kvad.cache.planning import check_policy
from kvad.cache.settle import settle
from kvad.cache.sizing import CacheConfig, groups
from kvad.cache.state import State
from kvad.config import mixers
from kvad.engine.checks import check_compressor_of, check_ids, check_kind, check_source
from kvad.engine.costs import Costs
from kvad.engine.limits import Limits
from kvad.engine.outcome import results_of
from kvad.engine.parked import parking_of
from kvad.engine.request import Event, FinishReason, Result, Sampling, TokenScore
from kvad.engine.resume import Keeper, Resumed, check_one
from kvad.engine.row import Encoding
from kvad.engine.runner import Runner
from kvad.engine.sampler import FAULT
from kvad.engine.saying import Saying
from kvad.engine.scheduler import Plan, Scheduler, Usage
from kvad.engine.storage import open_spill, open_tiers
from kvad.engine.swaps import Swaps
from kvad.errors import ConfigError, KvadError, RequestError
from kvad.model.compress import Compressor
from kvad.model.fingerprint import fingerprint
from kvad.model.isolate import isolate
from kvad.model.transformer import Transformer
from kvad.ops.attend import Kernel
from kvad.ops.heap import give_back
from kvad.ops.lanes import Probe
from kvad.text.tokenizer import Tokenizer

__all__ = ["Engine", "Piece", "StepTimes"]

# Bytes of weights up to which those that share an input are joined.  In a larger model a kernel's start is nothing
# beside its reading, and joining would copy weights that are mapped from a file.
PACKED = 1 << 28
POLL = 0.005  # seconds that a caller waits at once for blocks on their way, where there is nothing else to do


class Piece(NamedTuple):
    """What one step gave one sample: new text (UTF-8 whole, never part of a stop string), its token, or the end
    (``limit``: which one it came to, where it ended by its length)."""

    request: int
    sample: int
    text: str = ""
    token: int | None = None
    score: TokenScore | None = None
    prompt: tuple[TokenScore, ...] = ()
    finish: FinishReason | None = None
    error: str | None = None
    output: Tensor | None = None
    total: float | None = None
    limit: LimitName | None = None


@dataclass
class StepTimes:
    """Where the time went since the engine started, in seconds: ``model`` in the forward pass, ``total`` in all."""

    steps: int = 0
    tokens: int = 0
    model: float = 0.0
    total: float = 0.0


class Engine:
    """One model, one cache, many requests.  Not safe for several threads: :class:`kvad.llm.LLM` holds the lock.

    ``cache``: settled for this model (``cache/settle.py``) and kept so.
    ``budget``: at most so many new tokens per step; ``cache.chunk``: at most so many of them for one row.
    ``stop_tokens``: what ends a text; the tokenizer's separator and end where none are given.  ``deterministic``: a
    request's logits and tokens are the same, bit for bit, whatever runs beside it and however its tokens are cut into
    steps (on a CPU, of one process: other machines, builds and numbers of threads round otherwise).
    ``compressor``: what makes the policy's summaries; ConfigError where the policy has none, or of another ratio.
    ``memory``: what makes the memory, where it is one of several ranks (``parallel/ranks.py``); ``weights``: the
    fingerprint of all ranks' weights, for :meth:`identity`, which sees this rank's part alone.  ``adapter``: the
    fingerprint of what was merged into the weights, which :meth:`identity` names.
    ``park_dir``: where rows that give way are written when ``cache.park_ram`` is full; ``costs``: what decides whether
    they are.  ``disk``: what spilled and parked tokens go through (tests break it).
    """

    def __init__(
        self,
        model: Transformer,
        cache: CacheConfig,
        *,
        tokenizer: Tokenizer | None = None,
        budget: int = 2048,
        kernel: Kernel = "auto",
        deterministic: bool = False,
        probe: Probe | None = None,
        compressor: Compressor | None = None,
        stop_tokens: frozenset[int] = frozenset(),
        memory: Callable[..., Memory] | None = None,
        weights: str | None = None,
        adapter: str = "",
        park_dir: str | Path | None = None,
        costs: Costs | None = None,
        disk: Disk = DISK,
    ) -> None:
        cache = settle(model.config, cache)
        self.model, self.tokenizer, self.cache = model, tokenizer, cache
        self.device = model.table.device
        check_policy(model.config, cache, deterministic=deterministic)
        if sum(parameter.nbytes for parameter in model.parameters()) <= PACKED:
            model.pack()
        if deterministic:
            kernel = isolate(model)
        placed = groups(mixers(model.config), cache)
        if compressor is not None:
            check_compressor_of(compressor, placed)
            compressor = compressor.to(self.device)
        self.deterministic = deterministic
        self._weights = weights  # their fingerprint, when it was asked for
        self._adapter = {"adapter": adapter} if adapter else {}
        self._summaries = "" if compressor is None else compressor.fingerprint()
        with ExitStack() as opened:  # what fails on the way leaves no file, no thread and no lock behind
            self.memory = (Memory if memory is None else memory)(
                placed,
                device=self.device,
                rotate=cache.rotate,
                exact=cache.endless,
                compressors=None if compressor is None else compressor.by_layer(),
                kernel=kernel,
                probe=probe,
                spill=open_spill(cache, placed, disk),
            )
            opened.callback(self.memory.release)
            self.tiers = open_tiers(cache, placed, lambda: self.identity(""))
            if self.tiers is not None:
                opened.callback(self.tiers.close)
            self.memory.tiers = self.tiers
            self._stored = b""  # what the roots of chains begin with where blocks outlive the process
            if self.tiers is not None and cache.tier is not None:
                self._stored = self.identity("").digest() + f"{cache.block_size}".encode()
            self.ledger = Ledger(
                placed, prefix=cache.prefix, seats=cache.rows, watermark=cache.watermark, tier=self.tiers
            )
            self.limits = Limits.of(model.config.limit, cache)
            chunk = min(cache.chunk, cache.capacity)  # what a window's pool is sized for
            folder = None if park_dir is None else Path(park_dir)
            parking = parking_of(self.memory, self.ledger, cache.park_ram, folder, disk)
            self.swaps = Swaps(self.ledger, costs, parking, self.memory.block_bytes())
            opened.callback(self.swaps.close)
            self.memory.copier.told = self.swaps.told
            self.scheduler = Scheduler(
                self.ledger, rows=cache.rows, budget=budget, chunk=chunk, limit=self.limits, swaps=self.swaps
            )
            self._opened = opened.pop_all()
        self.runner = Runner(model, self.memory)
        self.keeper = Keeper(self.memory, self.ledger)
        self.times = StepTimes()
        self._next, self._ends = 0, stop_tokens
        self._texts: dict[tuple[int, int], Saying] = {}
        self._undelivered: list[Piece] = []

    def submit(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        salt: str = "",
        source: Sequence[int] | None = None,
        resume: State | None = None,
        keep: bool = False,
    ) -> int:
        """Queue a prompt and return the request's number.  RequestError names what cannot be served.

        ``source``: what an encoder-decoder translates; ``tokens`` then begin the target.  ``salt`` separates prefix
        reuse: requests share blocks only with requests of the same salt.  ``resume``: what an earlier request left,
        used as far as it agrees (``resume.py``; ``usage(request).cached`` says how far, ``missed`` why not); ``keep``:
        what this one leaves is kept for :meth:`kept`.  Both are of one sample, without beams.
        """
        check_kind(self.model.config, source)
        check_ids(self.model.config, tokens, sampling, source)
        if sampling.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this model came without one", "use stop_tokens")
        if resume is not None or keep:
            check_one(sampling)
            if self.ledger.spills:
                raise RequestError(
                    "a row that spills is neither kept nor resumed", "give the cache room for it, or another on_full"
                )
        request, texts = self._next, []
        if self.tokenizer is not None:
            texts = [Saying(self.tokenizer, sampling) for _ in range(sampling.n)]
        root, stops = self._root(tokens, sampling, salt, source), self._stops(sampling)
        regime, going = self.regime(tokens, sampling), Resumed()
        if resume is not None:
            going = self.keeper.resume(resume, tokens, sampling, root=root, regime=regime, salt=salt, source=source)
        usage = self.scheduler.add(
            request, tokens, sampling, root, stop_tokens=stops, source=source, parked=going.parked, keep=keep
        )
        usage.missed = going.missed
        self.keeper.begin(going)
        if keep:
            self.keeper.ask(request, regime, salt)
        self._next += 1
        self._texts.update({(request, number): text for number, text in enumerate(texts)})
        return request

    def submit_source(self, tokens: Sequence[int], want: Literal["head", "mean", "first"] = "head") -> int:
        """Queue a text for the encoder alone: its one piece carries what the head answers (``Piece.output``).

        A tensor on the host: [T, labels] or [T, V] of a head that answers for tokens, [labels] or [E] of one that pools
        the row, [T, E] of an encoder-decoder; [E] where ``want`` is a way of pooling the hidden states.
        """
        if self.model.encoder is None:
            raise RequestError("this model has no encoder", "it continues prompts")
        check_source(self.model.config, tokens)
        request = self._next
        self.scheduler.add(request, (), Sampling(max_tokens=0), source=tokens, want=want)
        self._next += 1
        return request

    def step(self) -> list[Piece]:
        """Run one plan; an empty list when there is nothing to do.

        An exception ends the rows of its step; their pieces, which say so, come with the next call.
        """
        if self._undelivered:
            pieces, self._undelivered = self._undelivered, []
            return pieces
        began = time.perf_counter()
        plan = self.scheduler.plan()
        self.keeper.collect(self.scheduler.left())  # of rows that gave way to this step
        if plan is None:
            self.store()
            if self.tiers is not None:
                self.tiers.wait(POLL)  # nobody runs, and somebody's blocks are on their way
            return self._pieces(self.scheduler.drain())
        inside = time.perf_counter()
        try:
            if plan.encoding is not None:
                results = self._encode(plan.encoding)
                self.times.model += time.perf_counter() - inside
            else:
                logits = self.runner.run(plan)
                self.times.model += time.perf_counter() - inside
                results = results_of(plan, logits)
                for number, why in self.memory.lost([lane.rows for lane in plan.lanes]).items():
                    results[number] = Result(fault=why, again=True)
                self._weigh(plan, time.perf_counter() - inside)
        except BaseException as error:  # Ctrl-C too: the rows of this step end, the engine goes on
            self.memory.forgo(plan.placed.moves)
            fault = Result(fault=f"the step failed: {type(error).__name__}: {error}")
            rows = len(plan.work) if plan.encoding is None else len(plan.encoding.rows)
            self._undelivered = self._pieces(self.scheduler.settle(plan, [fault] * rows))
            raise
        events = self.scheduler.settle(plan, results)
        self.times.steps += 1
        self.times.tokens += sum(event.token is not None for event in events)
        pieces = self._pieces(events)
        self.keeper.collect(self.scheduler.left())
        if self.scheduler.idle:
            self.store()
            give_back()
        self.times.total += time.perf_counter() - began
        return pieces

    def kept(self, request: int) -> State:
        """What a request submitted with ``keep`` has left, handed over once.  RequestError: it was not, it has not
        ended, or it was cancelled or failed."""
        return self.keeper.kept(request)

    def usage(self, request: int) -> Usage:
        """What a request used, kept up to date while it runs and for a while after its end."""
        return self.scheduler.usage(request)

    def cancel(self, request: int) -> None:
        """End a request now; its rows are released before the next step."""
        self.scheduler.cancel(request)
        self.keeper.forget(request)
        for key in [key for key in self._texts if key[0] == request]:
            del self._texts[key]

    @property
    def idle(self) -> bool:
        """Nothing to do, and nothing to tell."""
        return self.scheduler.idle and not self._undelivered

    def store(self) -> None:
        """Hand the tiers what has been published since the last step.  (A step does it too.)"""
        moves = self.ledger.store_now()
        if moves is not None:
            self.memory.apply(moves)

    def close(self) -> None:
        """Free the pool and what was parked, and let the tiers' folder go when all is written.  The engine serves
        nothing afterwards.  What fails on the way is raised when all the rest is closed."""
        with self._opened:
            self.store()

    def _weigh(self, plan: Plan, seconds: float) -> None:
        """What a step has cost per token, where most of its tokens were read and not said."""
        tokens = sum(work.count for work in plan.work)
        if tokens > 2 * len(plan.work):
            self.swaps.costs.computed(tokens, seconds)

    def _encode(self, encoding: Encoding) -> list[Result]:
        """Run the encoder; its answers where they are wanted."""
        hidden, step = self.runner.encode(encoding)
        lengths = [lane.new for lane in step.lanes for _ in range(lane.rows)]
        fine = hidden.isfinite().all(dim=-1).cpu().split(lengths)  # one wait for the device
        outputs: Sequence[Tensor | None] = [None] * len(lengths)
        if encoding.placed is None:
            wants = [row.group.want for row in encoding.rows]
            outputs = [answer.cpu() for answer in self.runner.answers(hidden, step, lengths, wants)]
        results = []
        for row, output in zip(fine, outputs, strict=True):
            finite = bool(row.all()) and (output is None or bool(output.isfinite().all()))
            results.append(Result(output=output) if finite else Result(fault=FAULT))
        return results

    def _stops(self, sampling: Sampling) -> frozenset[int]:
        ends: set[int] = set(sampling.stop_tokens)
        if not sampling.ignore_eos:
            ends |= self._ends
        if self.tokenizer is not None and not sampling.ignore_eos and not self._ends:
            specials = self.tokenizer.specials
            opens = specials.separator if specials.separator != specials.bos or specials.eos is None else None
            ends |= {token for token in (opens, specials.eos) if token is not None}
        return frozenset(ends)

    def _root(self, tokens: Sequence[int], sampling: Sampling, salt: str, source: Sequence[int] | None = None) -> bytes:
        """Where this row's chain of block hashes starts: nothing computed under other conditions can match."""
        regime = self.regime(tokens, sampling)
        kept = f"{self.cache.kept}\0{self.cache.endless}\0{self.cache.rotate}\0{self._summaries}"
        name = f"{salt}\0{self.cache.stored}\0{kept}\0{regime}\0{'' if source is None else list(source)}"
        return hashlib.blake2b(self._stored + name.encode(), digest_size=16).digest()

    def block_keys(self, tokens: Sequence[int], sampling: Sampling, *, salt: str = "") -> list[str]:
        """Under which keys the tiers have the whole blocks of such a request's prompt."""
        return self.ledger.keys(tokens, self._root(tokens, sampling, salt))

    def regime(self, tokens: Sequence[int], sampling: Sampling) -> str:
        """Names how positions are turned into angles for such a request, where its length decides that."""
        longest = self.limits.longest(sampling)[0]
        wanted = len(tokens) + (longest if sampling.max_tokens is None else sampling.max_tokens)
        return self.runner.regime(min(longest, wanted, self.model.config.limit))

    def identity(self, regime: str, *, salt: str = "", template: str = "") -> Identity:
        """What the keys and values of this engine's rows belong to, for whatever is stored beyond its life.
        ``template``: the fingerprint of the chat template, where there is one.  The first call reads every weight."""
        if self._weights is None and self.memory.ranks > 1:
            raise ConfigError(
                f"weights: this is one of {self.memory.ranks} ranks, which sees a part of them alone",
                "give Engine(weights=...) the fingerprint of the whole model",
            )
        if self._weights is None:
            self._weights = fingerprint(self.model)
        cache = self.cache
        return Identity(
            model=self._weights,
            tokenizer="" if self.tokenizer is None else self.tokenizer.fingerprint(),
            template=template,
            computed=f"{self.model.table.dtype}".removeprefix("torch.") + self.deterministic * " deterministic",
            keys=cache.keys or cache.dtype,
            values=cache.values or cache.dtype,
            policy=str(cache.kept),
            rotate=cache.rotate,
            endless=str(cache.endless),
            summaries=self._summaries,
            regime=regime,
            salt=salt,
            **self._adapter,
        )

    def _pieces(self, events: Sequence[Event]) -> list[Piece]:
        return [self._piece(event) for event in events]

    def _piece(self, event: Event) -> Piece:
        text = self._texts.get((event.request, event.sample))
        emitted, finish, error = "", event.finish, event.error
        if finish == "error":
            self.keeper.forget(event.request)
        if text is not None:
            try:
                emitted, finish = self._text_of(text, event)
            except KvadError as failure:  # of this sample alone: a token that its tokenizer does not know, say
                self.scheduler.finish(event.request, event.sample, "error")
                finish, error = "error", str(failure)
            if finish is not None:
                del self._texts[event.request, event.sample]
        numbers = event.token, event.score, event.prompt
        limit = event.limit if finish == "length" else None
        return Piece(event.request, event.sample, emitted, *numbers, finish, error, event.output, event.total, limit)

    def _text_of(self, text: Saying, event: Event) -> tuple[str, FinishReason | None]:
        """What this event adds to its sample's text, and how the sample ends if it does."""
        finish = event.finish
        emitted, stopped = text.push(None if finish == "stop" else event.token)  # a stop token is no text
        if stopped and finish is None:
            self.scheduler.finish(event.request, event.sample, "stop")
        if stopped and finish in (None, "length"):
            finish = "stop"
        return emitted + (text.flush() if finish is not None else ""), finish
