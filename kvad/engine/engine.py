"""Engine: submit requests, run steps and read chunks of text.

Many sequences share one model and one cache.

In one step the scheduler chooses sequences and allocates blocks, the model runner computes logits, the sampler chooses
tokens, and the scheduler is updated. An error in one request ends that request with an error chunk; others continue.
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

# Up to this many bytes of weights, projections with the same input are fused. In a larger model, kernel launches are
# negligible, and fusing would copy weights that are mapped from a file.
MAX_PACKED_BYTES = 1 << 28
POLL_SECONDS = 0.005  # longest wait for loading blocks in one call, if nothing else can run


class StreamChunk(NamedTuple):
    """Output of one step for one sample.

    New text (whole UTF-8, no stop strings), its token, or its end.
    """

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
    """Seconds since the engine started: ``model`` in forward passes, ``total`` in all."""

    steps: int = 0
    tokens: int = 0
    model: float = 0.0
    total: float = 0.0


class Engine:
    """One model, one cache, many requests.

    Not thread-safe: :class:`kvad.llm.LLM` holds the lock.

    Args:
        model: The model.
        cache: Configuration of the cache; resolved for this model.
        tokenizer: Tokenizer for output text (None: token ids only).
        max_num_batched_tokens: New tokens per step.
        kernel: Attention kernel.
        deterministic: Make logits and tokens of a request independent of the batch and of chunking, bit for bit (CPU,
            one process; other machines, builds and numbers of threads round differently).
        attention_hook: Called with the tensors of every attention layer.
        summarizer: Computes the policy's summaries; ConfigError if the policy has none, or another ratio.
        stop_tokens: Tokens that end a text (default: the tokenizer's separator and end token).
        cache_factory: Builds the KVCache, if it is one of several ranks (``parallel/distributed_cache.py``).
        weights_fingerprint: Fingerprint of all ranks' weights, for :meth:`cache_fingerprint`.
        adapter_fingerprint: Fingerprint of an adapter merged into the weights.
        swap_dir: Folder for preempted sequences when ``cache.swap_space`` is full.
        cost_model: Costs that decide between swapping and recomputing.
        fs: File system for offloaded and swapped tokens (replaced in tests).
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
        groups = build_groups(attention_specs(model.config), cache)
        if summarizer is not None:
            check_summarizer_groups(summarizer, groups)
            summarizer = summarizer.to(self.device)
        self.deterministic = deterministic
        self._weights_fingerprint = weights_fingerprint  # computed on first use
        self._adapter_fingerprint = {"adapter": adapter_fingerprint} if adapter_fingerprint else {}
        self._summaries = "" if summarizer is None else summarizer.fingerprint()
        with ExitStack() as resources:  # an error here leaves no file, thread or lock behind
            self.kv_cache = (KVCache if cache_factory is None else cache_factory)(
                groups,
                device=self.device,
                rope_at=cache.rope_at,
                exact_rope=cache.endless,
                summarizers=None if summarizer is None else summarizer.by_layer(),
                kernel=kernel,
                attention_hook=attention_hook,
                offload_reader=open_offload_reader(cache, groups, fs),
            )
            resources.callback(self.kv_cache.release)
            self.block_store = open_block_store(cache, groups, lambda: self.cache_fingerprint(""))
            if self.block_store is not None:
                resources.callback(self.block_store.close)
            self.kv_cache.host_store = self.block_store
            self._root_seed = b""  # prefix of hash chain roots, if blocks outlive the process
            if self.block_store is not None and cache.prefix_cache_dir is not None:
                self._root_seed = self.cache_fingerprint("").digest() + f"{cache.block_size}".encode()
            self.kv_cache_manager = KVCacheManager(
                groups,
                prefix_caching=cache.enable_prefix_caching,
                max_num_seqs=cache.max_num_seqs,
                watermark=cache.watermark,
                block_store=self.block_store,
            )
            self.limits = LengthLimits.from_config(model.config.max_seq_len, cache)
            prefill_chunk_size = min(
                cache.prefill_chunk_size, cache.max_seq_len
            )  # the window's pool is sized for this chunk
            swap_path = None if swap_dir is None else Path(swap_dir)
            swap_space = open_swap_space(self.kv_cache, self.kv_cache_manager, cache.swap_space, swap_path, fs)
            self.preemption = scheduling.preemption.PreemptionManager(
                self.kv_cache_manager, cost_model, swap_space, self.kv_cache.block_bytes()
            )
            resources.callback(self.preemption.close)
            self.kv_cache.copier.on_copied = self.preemption.on_copied
            self.scheduler = Scheduler(
                self.kv_cache_manager,
                max_num_seqs=cache.max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                prefill_chunk_size=prefill_chunk_size,
                limit=self.limits,
                preemption=self.preemption,
            )
            self._resources = resources.pop_all()
        self.runner = ModelRunner(model, self.kv_cache)
        self.state_keeper = StateKeeper(self.kv_cache, self.kv_cache_manager)
        self.times = StepTimes()
        self._next, self._eos_token_ids = 0, stop_tokens
        self._texts: dict[tuple[int, int], OutputTextStream] = {}
        self._undelivered: list[StreamChunk] = []

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        cache_salt: str = "",
        encoder_token_ids: Sequence[int] | None = None,
        resume: SequenceState | None = None,
        keep_state: bool = False,
    ) -> int:
        """Queue a prompt and return the request's number.

        Args:
            prompt_token_ids: The prompt; for an encoder-decoder the start of the target.
            sampling_params: Sampling parameters.
            cache_salt: Requests share cached blocks only with requests of the same salt.
            encoder_token_ids: Input of an encoder-decoder's encoder.
            resume: State of an earlier request, used up to the first differing token (see ``RequestMetrics``).
            keep_state: Capture the final state for :meth:`pop_state`. Like ``resume``, for one sample without beams.

        Raises:
            RequestError: If the request cannot be served.
        """
        check_topology(self.model.config, encoder_token_ids)
        check_token_ids(self.model.config, prompt_token_ids, sampling_params, encoder_token_ids)
        if sampling_params.stop and self.tokenizer is None:
            raise RequestError("stop: requires a tokenizer, and this model has none", "Use stop_token_ids.")
        if resume is not None or keep_state:
            check_single_sequence(sampling_params)
            if self.kv_cache_manager.uses_offload:
                hint = "Use a larger cache, or another overflow mode."
                raise RequestError("keep_state, resume: unavailable with token offload", hint)
        request, texts = self._next, []
        if self.tokenizer is not None:
            texts = [OutputTextStream(self.tokenizer, sampling_params) for _ in range(sampling_params.n)]
        prefix_root = self._root(prompt_token_ids, sampling_params, cache_salt, encoder_token_ids)
        stops = self._stops(sampling_params)
        regime, resume_point = self.rope_regime(prompt_token_ids, sampling_params), ResumePoint()
        if resume is not None:
            resume_point = self.state_keeper.resume(
                resume,
                prompt_token_ids,
                sampling_params,
                prefix_root=prefix_root,
                regime=regime,
                cache_salt=cache_salt,
                encoder_tokens=encoder_token_ids,
            )
        metrics = self.scheduler.add_request(
            request,
            prompt_token_ids,
            sampling_params,
            prefix_root,
            stop_tokens=stops,
            encoder_tokens=encoder_token_ids,
            swapped=resume_point.swapped,
            keep_state=keep_state,
        )
        metrics.resume_miss_reason = resume_point.miss_reason
        self.state_keeper.begin(resume_point)
        if keep_state:
            self.state_keeper.track(request, regime, cache_salt)
        self._next += 1
        self._texts.update({(request, number): text for number, text in enumerate(texts)})
        return request

    def add_encoder_request(
        self, tokens: Sequence[int], encoder_output: Literal["head", "mean", "first"] = "head"
    ) -> int:
        """Queue a text for the encoder only.

        Its one chunk carries the output (``StreamChunk.output``).

        The output is a host tensor: [T, labels] or [T, V] of a head per token, [labels] or [E] of a pooling head, [T,
        E] of an encoder-decoder; [E] if ``encoder_output`` is "mean" or "first".
        """
        if self.model.encoder is None:
            raise RequestError("this model has no encoder", "It continues prompts.")
        check_source(self.model.config, tokens)
        request = self._next
        self.scheduler.add_request(
            request, (), SamplingParams(max_tokens=0), encoder_tokens=tokens, encoder_output=encoder_output
        )
        self._next += 1
        return request

    def step(self) -> list[StreamChunk]:
        """Run one step; return [] if there is nothing to run.

        An exception ends the sequences of its step; their error chunks are returned by the next call.
        """
        if self._undelivered:
            chunks, self._undelivered = self._undelivered, []
            return chunks
        step_start = time.perf_counter()
        output = self.scheduler.schedule()
        self.state_keeper.collect(self.scheduler.pop_finished_states())  # of sequences that ended to make room
        if output is None:
            self.flush_offload()
            if self.block_store is not None:
                self.block_store.wait(POLL_SECONDS)  # nothing runs, and blocks are loading
            return self._to_chunks(self.scheduler.pop_events())
        model_start = time.perf_counter()
        try:
            if output.encoder_batch is not None:
                results = self._encode(output.encoder_batch)
                self.times.model += time.perf_counter() - model_start
            else:
                logits = self.runner.execute(output)
                self.times.model += time.perf_counter() - model_start
                results = sample_outputs(output, logits)
                for number, reason in self.kv_cache.failed_rows(
                    [sub_batch.num_seqs for sub_batch in output.sub_batches]
                ).items():
                    results[number] = SequenceOutput(error=reason, retry=True)
                self._record_compute_cost(output, time.perf_counter() - model_start)
        except BaseException as error:  # includes Ctrl-C: the step's sequences end, the engine continues
            self.kv_cache.discard(output.allocation.block_ops)
            fault = SequenceOutput(error=f"the step failed: {type(error).__name__}: {error}")
            rows = len(output.scheduled) if output.encoder_batch is None else len(output.encoder_batch.sequences)
            self._undelivered = self._to_chunks(self.scheduler.update_from_output(output, [fault] * rows))
            raise
        events = self.scheduler.update_from_output(output, results)
        self.times.steps += 1
        self.times.tokens += sum(event.token_id is not None for event in events)
        chunks = self._to_chunks(events)
        self.state_keeper.collect(self.scheduler.pop_finished_states())
        if self.scheduler.idle:
            self.flush_offload()
            ops.malloc.trim_heap()
        self.times.total += time.perf_counter() - step_start
        return chunks

    def pop_state(self, request: int) -> SequenceState:
        """Return the final state of a request with ``keep_state``, once.

        Raises:
            RequestError: If none was requested, or the request has not ended, was aborted or failed.
        """
        return self.state_keeper.pop_state(request)

    def metrics(self, request: int) -> RequestMetrics:
        """Return a request's metrics, updated while it runs and available for a while after its end."""
        return self.scheduler.metrics(request)

    def abort_request(self, request: int) -> None:
        """End a request now; its blocks are freed before the next step."""
        self.scheduler.abort_request(request)
        self.state_keeper.forget(request)
        for key in [key for key in self._texts if key[0] == request]:
            del self._texts[key]

    @property
    def idle(self) -> bool:
        """True if there is no request to run and no chunk to return."""
        return self.scheduler.idle and not self._undelivered

    def flush_offload(self) -> None:
        """Pass blocks published since the last step to the block store (a step does this too)."""
        block_ops = self.kv_cache_manager.flush_offload()
        if block_ops is not None:
            self.kv_cache.apply(block_ops)

    def close(self) -> None:
        """Free the pool and swapped blocks, and close the block store after its last write.

        Errors are raised at the end.
        """
        with self._resources:
            self.flush_offload()

    def _record_compute_cost(self, output: SchedulerOutput, seconds: float) -> None:
        """Record the cost per token of a step, if most of its tokens were prompt tokens."""
        tokens = sum(scheduled.num_tokens for scheduled in output.scheduled)
        if tokens > 2 * len(output.scheduled):
            self.preemption.costs.record_compute(tokens, seconds)

    def _encode(self, encoder_batch: scheduling.sequence.EncoderBatch) -> list[SequenceOutput]:
        """Run the encoder; return its outputs if requested."""
        hidden, model_input = self.runner.encode(encoder_batch)
        lengths = [sub_batch.num_new_tokens for sub_batch in model_input.sub_batches for _ in range(sub_batch.num_seqs)]
        finite_rows = hidden.isfinite().all(dim=-1).cpu().split(lengths)  # one device synchronization
        outputs: Sequence[Tensor | None] = [None] * len(lengths)
        if encoder_batch.allocation is None:
            output_kinds = [row.request.encoder_output for row in encoder_batch.sequences]
            outputs = [
                encoder_output.cpu()
                for encoder_output in self.runner.encoder_outputs(hidden, model_input, lengths, output_kinds)
            ]
        results = []
        for row, output in zip(finite_rows, outputs, strict=True):
            finite = bool(row.all()) and (output is None or bool(output.isfinite().all()))
            results.append(SequenceOutput(output=output) if finite else SequenceOutput(error=NONFINITE_ERROR))
        return results

    def _stops(self, sampling_params: SamplingParams) -> frozenset[int]:
        stop_ids: set[int] = set(sampling_params.stop_token_ids)
        if not sampling_params.ignore_eos:
            stop_ids |= self._eos_token_ids
        if self.tokenizer is not None and not sampling_params.ignore_eos and not self._eos_token_ids:
            specials = self.tokenizer.special_tokens
            separator = specials.separator if specials.separator != specials.bos or specials.eos is None else None
            stop_ids |= {token for token in (separator, specials.eos) if token is not None}
        return frozenset(stop_ids)

    def _root(
        self,
        tokens: Sequence[int],
        sampling_params: SamplingParams,
        cache_salt: str,
        encoder_token_ids: Sequence[int] | None = None,
    ) -> bytes:
        """Return the start of the block hash chain, unique to the conditions of the computation."""
        regime = self.rope_regime(tokens, sampling_params)
        encoder_part = "" if encoder_token_ids is None else str(list(encoder_token_ids))
        policy_parts = f"{self.cache.resolved_policy}\0{self.cache.endless}\0{self.cache.rope_at}\0{self._summaries}"
        root_parts = f"{cache_salt}\0{self.cache.format_name}\0{policy_parts}\0{regime}\0{encoder_part}"
        return hashlib.blake2b(self._root_seed + root_parts.encode(), digest_size=16).digest()

    def block_keys(self, tokens: Sequence[int], sampling_params: SamplingParams, *, cache_salt: str = "") -> list[str]:
        """Return the block store's keys of the full blocks of a prompt."""
        return self.kv_cache_manager.block_keys(tokens, self._root(tokens, sampling_params, cache_salt))

    def rope_regime(self, tokens: Sequence[int], sampling_params: SamplingParams) -> str:
        """Return the rotary regime of such a request, if it depends on the length."""
        max_len = self.limits.max_len_for(sampling_params)[0]
        num_requested = len(tokens) + (max_len if sampling_params.max_tokens is None else sampling_params.max_tokens)
        return self.runner.rope_regime(min(max_len, num_requested, self.model.config.max_seq_len))

    def cache_fingerprint(self, regime: str, *, cache_salt: str = "", template: str = "") -> CacheFingerprint:
        """Return the fingerprint of everything that this engine's keys and values depend on.

        ``template`` is the chat template's fingerprint, if any. The first call reads all weights.
        """
        if self._weights_fingerprint is None and self.kv_cache.ranks > 1:
            raise ConfigError(
                f"weights: this rank has only its shard of {self.kv_cache.ranks}",
                "Pass Engine(weights_fingerprint=...) the fingerprint of the whole model.",
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
            salt=cache_salt,
            **self._adapter_fingerprint,
        )

    def _to_chunks(self, events: Sequence[scheduling.request.SequenceEvent]) -> list[StreamChunk]:
        return [self._to_chunk(event) for event in events]

    def _to_chunk(self, event: scheduling.request.SequenceEvent) -> StreamChunk:
        text = self._texts.get((event.request, event.sample_index))
        emitted, finish, error = "", event.finish_reason, event.error
        if finish == "error":
            self.state_keeper.forget(event.request)
        if text is not None:
            try:
                emitted, finish = self._next_text(text, event)
            except KvadError as failure:  # an error of this sample only, such as a token that its tokenizer lacks
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
        """Return the event's new text, and the finish reason if the sample ends."""
        finish = event.finish_reason
        emitted, stopped = text.push(
            None if finish == "stop" else event.token_id
        )  # a stop token is not part of the text
        if stopped and finish is None:
            self.scheduler.finish_sequence(event.request, event.sample_index, "stop")
        if stopped and finish in (None, "length"):
            finish = "stop"
        return emitted + (text.flush() if finish is not None else ""), finish
