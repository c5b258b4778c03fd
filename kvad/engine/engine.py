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

from kvad import cache as cache_lib
from kvad import model as model_lib
from kvad import ops
from kvad.cache import CacheConfig, build_groups, resolve_for_model
from kvad.cache.device import KVCache
from kvad.cache.manager import KVCacheManager
from kvad.cache.sessions import SequenceState
from kvad.cache.sizing import check_policy
from kvad.config import attention_specs
from kvad.engine import scheduling
from kvad.engine.execution import NONFINITE_ERROR, ModelRunner, sample_outputs
from kvad.engine.output import OutputTextStream
from kvad.engine.resume import ResumePoint, StateKeeper, check_single_sequence
from kvad.engine.scheduling import (
    LengthLimits,
    RequestMetrics,
    SamplingParams,
    Scheduler,
    SchedulerOutput,
    SequenceOutput,
    TokenLogprob,
)
from kvad.engine.storage import open_block_store, open_offload_reader, open_swap_space
from kvad.engine.validation import check_source, check_summarizer_groups, check_token_ids, check_topology
from kvad.errors import ConfigError, KvadError, RequestError
from kvad.model import Summarizer, Transformer
from kvad.storage import REAL_FILE_SYSTEM, CacheFingerprint, FileSystem
from kvad.text import Tokenizer

# Bytes of weights up to which those that share an input are joined.  In a larger model a kernel's start is nothing
# beside its reading, and joining would copy weights that are mapped from a file.
MAX_PACKED_BYTES = 1 << 28
POLL_SECONDS = 0.005  # seconds that a caller waits at once for blocks on their way, where there is nothing else to do


class StreamChunk(NamedTuple):
    """What one step gave one sample: new text (UTF-8 whole, never part of a stop string), its token, or the end
    (``limit``: which one it came to, where it ended by its length)."""

    request: int
    sample_index: int
    text: str = ""
    token_id: int | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: scheduling.request.FinishReason | None = None
    error: str | None = None
    output: Tensor | None = None
    cumulative_logprob: float | None = None
    limit: cache_lib.config.LengthLimit | None = None


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
        max_num_batched_tokens: int = 2048,
        kernel: ops.attention.Kernel = "auto",
        deterministic: bool = False,
        attention_hook: ops.sub_batch.AttentionHook | None = None,
        summarizer: Summarizer | None = None,
        stop_tokens: frozenset[int] = frozenset(),
        cache_factory: Callable[..., KVCache] | None = None,
        weights_fingerprint: str | None = None,
        adapter_fingerprint: str = "",
        swap_dir: str | Path | None = None,
        cost_model: scheduling.preemption.SwapCostModel | None = None,
        fs: FileSystem = REAL_FILE_SYSTEM,
    ) -> None:
        cache = resolve_for_model(model.config, cache)
        self.model, self.tokenizer, self.cache = model, tokenizer, cache
        self.device = model.token_embedding.device
        check_policy(model.config, cache, deterministic=deterministic)
        if sum(parameter.nbytes for parameter in model.parameters()) <= MAX_PACKED_BYTES:
            model.fuse_projections()
        if deterministic:
            kernel = model_lib.batch_invariant.make_batch_invariant(model)
        placed = build_groups(attention_specs(model.config), cache)
        if summarizer is not None:
            check_summarizer_groups(summarizer, placed)
            summarizer = summarizer.to(self.device)
        self.deterministic = deterministic
        self._weights_fingerprint = weights_fingerprint  # their fingerprint, when it was asked for
        self._adapter_fingerprint = {"adapter": adapter_fingerprint} if adapter_fingerprint else {}
        self._summaries = "" if summarizer is None else summarizer.fingerprint()
        with ExitStack() as opened:  # what fails on the way leaves no file, no thread and no lock behind
            self.kv_cache = (KVCache if cache_factory is None else cache_factory)(
                placed,
                device=self.device,
                rope_at=cache.rope_at,
                exact_rope=cache.endless,
                summarizers=None if summarizer is None else summarizer.by_layer(),
                kernel=kernel,
                attention_hook=attention_hook,
                offload_reader=open_offload_reader(cache, placed, fs),
            )
            opened.callback(self.kv_cache.release)
            self.block_store = open_block_store(cache, placed, lambda: self.cache_fingerprint(""))
            if self.block_store is not None:
                opened.callback(self.block_store.close)
            self.kv_cache.host_store = self.block_store
            self._stored = b""  # what the roots of chains begin with where blocks outlive the process
            if self.block_store is not None and cache.prefix_cache_dir is not None:
                self._stored = self.cache_fingerprint("").digest() + f"{cache.block_size}".encode()
            self.kv_cache_manager = KVCacheManager(
                placed,
                prefix_caching=cache.enable_prefix_caching,
                max_num_seqs=cache.max_num_seqs,
                watermark=cache.watermark,
                block_store=self.block_store,
            )
            self.limits = LengthLimits.from_config(model.config.max_seq_len, cache)
            chunk = min(cache.prefill_chunk_size, cache.max_seq_len)  # what a window's pool is sized for
            folder = None if swap_dir is None else Path(swap_dir)
            parking = open_swap_space(self.kv_cache, self.kv_cache_manager, cache.swap_space, folder, fs)
            self.preemption = scheduling.preemption.PreemptionManager(
                self.kv_cache_manager, cost_model, parking, self.kv_cache.block_bytes()
            )
            opened.callback(self.preemption.close)
            self.kv_cache.copier.on_copied = self.preemption.on_copied
            self.scheduler = Scheduler(
                self.kv_cache_manager,
                max_num_seqs=cache.max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                prefill_chunk_size=chunk,
                limit=self.limits,
                preemption=self.preemption,
            )
            self._opened = opened.pop_all()
        self.runner = ModelRunner(model, self.kv_cache)
        self.state_keeper = StateKeeper(self.kv_cache, self.kv_cache_manager)
        self.times = StepTimes()
        self._next, self._ends = 0, stop_tokens
        self._texts: dict[tuple[int, int], OutputTextStream] = {}
        self._undelivered: list[StreamChunk] = []

    def add_request(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        *,
        salt: str = "",
        source: Sequence[int] | None = None,
        resume: SequenceState | None = None,
        keep: bool = False,
    ) -> int:
        """Queue a prompt and return the request's number.  RequestError names what cannot be served.

        ``source``: what an encoder-decoder translates; ``tokens`` then begin the target.  ``salt`` separates prefix
        reuse: requests share blocks only with requests of the same salt.  ``resume``: what an earlier request left,
        used as far as it agrees (``resume.py``; ``usage(request).cached`` says how far, ``missed`` why not); ``keep``:
        what this one leaves is kept for :meth:`kept`.  Both are of one sample, without beams.
        """
        check_topology(self.model.config, source)
        check_token_ids(self.model.config, tokens, sampling, source)
        if sampling.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this model came without one", "use stop_tokens")
        if resume is not None or keep:
            check_single_sequence(sampling)
            if self.kv_cache_manager.uses_offload:
                raise RequestError(
                    "a row that spills is neither kept nor resumed", "give the cache room for it, or another on_full"
                )
        request, texts = self._next, []
        if self.tokenizer is not None:
            texts = [OutputTextStream(self.tokenizer, sampling) for _ in range(sampling.n)]
        root, stops = self._root(tokens, sampling, salt, source), self._stops(sampling)
        regime, going = self.rope_regime(tokens, sampling), ResumePoint()
        if resume is not None:
            going = self.state_keeper.resume(
                resume, tokens, sampling, root=root, regime=regime, salt=salt, source=source
            )
        usage = self.scheduler.add_request(
            request, tokens, sampling, root, stop_tokens=stops, source=source, parked=going.swapped, keep=keep
        )
        usage.resume_miss_reason = going.miss_reason
        self.state_keeper.begin(going)
        if keep:
            self.state_keeper.track(request, regime, salt)
        self._next += 1
        self._texts.update({(request, number): text for number, text in enumerate(texts)})
        return request

    def add_encoder_request(self, tokens: Sequence[int], want: Literal["head", "mean", "first"] = "head") -> int:
        """Queue a text for the encoder alone: its one piece carries what the head answers (``Piece.output``).

        A tensor on the host: [T, labels] or [T, V] of a head that answers for tokens, [labels] or [E] of one that pools
        the row, [T, E] of an encoder-decoder; [E] where ``want`` is a way of pooling the hidden states.
        """
        if self.model.encoder is None:
            raise RequestError("this model has no encoder", "it continues prompts")
        check_source(self.model.config, tokens)
        request = self._next
        self.scheduler.add_request(request, (), SamplingParams(max_tokens=0), source=tokens, want=want)
        self._next += 1
        return request

    def step(self) -> list[StreamChunk]:
        """Run one plan; an empty list when there is nothing to do.

        An exception ends the rows of its step; their pieces, which say so, come with the next call.
        """
        if self._undelivered:
            pieces, self._undelivered = self._undelivered, []
            return pieces
        began = time.perf_counter()
        plan = self.scheduler.schedule()
        self.state_keeper.collect(self.scheduler.pop_finished_states())  # of rows that gave way to this step
        if plan is None:
            self.flush_offload()
            if self.block_store is not None:
                self.block_store.wait(POLL_SECONDS)  # nobody runs, and somebody's blocks are on their way
            return self._pieces(self.scheduler.pop_events())
        inside = time.perf_counter()
        try:
            if plan.encoder_batch is not None:
                results = self._encode(plan.encoder_batch)
                self.times.model += time.perf_counter() - inside
            else:
                logits = self.runner.execute(plan)
                self.times.model += time.perf_counter() - inside
                results = sample_outputs(plan, logits)
                for number, why in self.kv_cache.failed_rows([lane.num_seqs for lane in plan.sub_batches]).items():
                    results[number] = SequenceOutput(error=why, retry=True)
                self._weigh(plan, time.perf_counter() - inside)
        except BaseException as error:  # Ctrl-C too: the rows of this step end, the engine goes on
            self.kv_cache.discard(plan.allocation.block_ops)
            fault = SequenceOutput(error=f"the step failed: {type(error).__name__}: {error}")
            rows = len(plan.scheduled) if plan.encoder_batch is None else len(plan.encoder_batch.sequences)
            self._undelivered = self._pieces(self.scheduler.update_from_output(plan, [fault] * rows))
            raise
        events = self.scheduler.update_from_output(plan, results)
        self.times.steps += 1
        self.times.tokens += sum(event.token_id is not None for event in events)
        pieces = self._pieces(events)
        self.state_keeper.collect(self.scheduler.pop_finished_states())
        if self.scheduler.idle:
            self.flush_offload()
            ops.malloc.trim_heap()
        self.times.total += time.perf_counter() - began
        return pieces

    def pop_state(self, request: int) -> SequenceState:
        """What a request submitted with ``keep`` has left, handed over once.  RequestError: it was not, it has not
        ended, or it was cancelled or failed."""
        return self.state_keeper.pop_state(request)

    def metrics(self, request: int) -> RequestMetrics:
        """What a request used, kept up to date while it runs and for a while after its end."""
        return self.scheduler.metrics(request)

    def abort_request(self, request: int) -> None:
        """End a request now; its rows are released before the next step."""
        self.scheduler.abort_request(request)
        self.state_keeper.forget(request)
        for key in [key for key in self._texts if key[0] == request]:
            del self._texts[key]

    @property
    def idle(self) -> bool:
        """Nothing to do, and nothing to tell."""
        return self.scheduler.idle and not self._undelivered

    def flush_offload(self) -> None:
        """Hand the tiers what has been published since the last step.  (A step does it too.)"""
        moves = self.kv_cache_manager.flush_offload()
        if moves is not None:
            self.kv_cache.apply(moves)

    def close(self) -> None:
        """Free the pool and what was parked, and let the tiers' folder go when all is written.  The engine serves
        nothing afterwards.  What fails on the way is raised when all the rest is closed."""
        with self._opened:
            self.flush_offload()

    def _weigh(self, plan: SchedulerOutput, seconds: float) -> None:
        """What a step has cost per token, where most of its tokens were read and not said."""
        tokens = sum(work.num_tokens for work in plan.scheduled)
        if tokens > 2 * len(plan.scheduled):
            self.preemption.costs.record_compute(tokens, seconds)

    def _encode(self, encoding: scheduling.sequence.EncoderBatch) -> list[SequenceOutput]:
        """Run the encoder; its answers where they are wanted."""
        hidden, step = self.runner.encode(encoding)
        lengths = [lane.num_new_tokens for lane in step.sub_batches for _ in range(lane.num_seqs)]
        fine = hidden.isfinite().all(dim=-1).cpu().split(lengths)  # one wait for the device
        outputs: Sequence[Tensor | None] = [None] * len(lengths)
        if encoding.allocation is None:
            wants = [row.request.encoder_output for row in encoding.sequences]
            outputs = [answer.cpu() for answer in self.runner.encoder_outputs(hidden, step, lengths, wants)]
        results = []
        for row, output in zip(fine, outputs, strict=True):
            finite = bool(row.all()) and (output is None or bool(output.isfinite().all()))
            results.append(SequenceOutput(output=output) if finite else SequenceOutput(error=NONFINITE_ERROR))
        return results

    def _stops(self, sampling: SamplingParams) -> frozenset[int]:
        ends: set[int] = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            ends |= self._ends
        if self.tokenizer is not None and not sampling.ignore_eos and not self._ends:
            specials = self.tokenizer.special_tokens
            opens = specials.separator if specials.separator != specials.bos or specials.eos is None else None
            ends |= {token for token in (opens, specials.eos) if token is not None}
        return frozenset(ends)

    def _root(
        self, tokens: Sequence[int], sampling: SamplingParams, salt: str, source: Sequence[int] | None = None
    ) -> bytes:
        """Where this row's chain of block hashes starts: nothing computed under other conditions can match."""
        regime = self.rope_regime(tokens, sampling)
        kept = f"{self.cache.resolved_policy}\0{self.cache.endless}\0{self.cache.rope_at}\0{self._summaries}"
        name = f"{salt}\0{self.cache.format_name}\0{kept}\0{regime}\0{'' if source is None else list(source)}"
        return hashlib.blake2b(self._stored + name.encode(), digest_size=16).digest()

    def block_keys(self, tokens: Sequence[int], sampling: SamplingParams, *, salt: str = "") -> list[str]:
        """Under which keys the tiers have the whole blocks of such a request's prompt."""
        return self.kv_cache_manager.block_keys(tokens, self._root(tokens, sampling, salt))

    def rope_regime(self, tokens: Sequence[int], sampling: SamplingParams) -> str:
        """Names how positions are turned into angles for such a request, where its length decides that."""
        longest = self.limits.max_len_for(sampling)[0]
        wanted = len(tokens) + (longest if sampling.max_tokens is None else sampling.max_tokens)
        return self.runner.rope_regime(min(longest, wanted, self.model.config.max_seq_len))

    def cache_fingerprint(self, regime: str, *, salt: str = "", template: str = "") -> CacheFingerprint:
        """What the keys and values of this engine's rows belong to, for whatever is stored beyond its life.
        ``template``: the fingerprint of the chat template, where there is one.  The first call reads every weight."""
        if self._weights_fingerprint is None and self.kv_cache.ranks > 1:
            raise ConfigError(
                f"weights: this is one of {self.kv_cache.ranks} ranks, which sees a part of them alone",
                "give Engine(weights=...) the fingerprint of the whole model",
            )
        if self._weights_fingerprint is None:
            self._weights_fingerprint = model_lib.fingerprint.weights_fingerprint(self.model)
        cache = self.cache
        return CacheFingerprint(
            model=self._weights_fingerprint,
            tokenizer="" if self.tokenizer is None else self.tokenizer.fingerprint(),
            template=template,
            computed=f"{self.model.token_embedding.dtype}".removeprefix("torch.")
            + self.deterministic * " deterministic",
            keys=cache.key_dtype or cache.dtype,
            values=cache.value_dtype or cache.dtype,
            policy=str(cache.resolved_policy),
            rotate=cache.rope_at,
            endless=str(cache.endless),
            summaries=self._summaries,
            regime=regime,
            salt=salt,
            **self._adapter_fingerprint,
        )

    def _pieces(self, events: Sequence[scheduling.request.SequenceEvent]) -> list[StreamChunk]:
        return [self._piece(event) for event in events]

    def _piece(self, event: scheduling.request.SequenceEvent) -> StreamChunk:
        text = self._texts.get((event.request, event.sample_index))
        emitted, finish, error = "", event.finish_reason, event.error
        if finish == "error":
            self.state_keeper.forget(event.request)
        if text is not None:
            try:
                emitted, finish = self._next_text(text, event)
            except KvadError as failure:  # of this sample alone: a token that its tokenizer does not know, say
                self.scheduler.finish_sequence(event.request, event.sample_index, "error")
                finish, error = "error", str(failure)
            if finish is not None:
                del self._texts[event.request, event.sample_index]
        numbers = event.token_id, event.logprob, event.prompt_logprobs
        limit = event.limit if finish == "length" else None
        return StreamChunk(
            event.request,
            event.sample_index,
            emitted,
            *numbers,
            finish,
            error,
            event.output,
            event.cumulative_logprob,
            limit,
        )

    def _next_text(
        self, text: OutputTextStream, event: scheduling.request.SequenceEvent
    ) -> tuple[str, scheduling.request.FinishReason | None]:
        """What this event adds to its sample's text, and how the sample ends if it does."""
        finish = event.finish_reason
        emitted, stopped = text.push(None if finish == "stop" else event.token_id)  # a stop token is no text
        if stopped and finish is None:
            self.scheduler.finish_sequence(event.request, event.sample_index, "stop")
        if stopped and finish in (None, "length"):
            finish = "stop"
        return emitted + (text.flush() if finish is not None else ""), finish
