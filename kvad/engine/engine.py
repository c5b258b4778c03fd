"""Engine: submit requests, run steps and read chunks of text. Many sequences share one model and one cache.

In one step the scheduler chooses sequences and allocates blocks, the model runner computes logits, the sampler chooses
tokens, and the scheduler is updated. An error in one request ends that request with an error chunk; others continue.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from kvad import model as model_lib
from kvad import ops
from kvad.cache import CacheConfig, CacheGroup, build_groups, offload, resolve_for_model, sizing
from kvad.cache.device import KVCache
from kvad.cache.manager import KVCacheManager
from kvad.cache.offload import PinnedPrefix
from kvad.cache.sessions import SequenceState
from kvad.config import Pooling, attention_specs
from kvad.engine import scheduling
from kvad.engine.execution import (
    NONFINITE_ERROR,
    DeviceTokens,
    DraftModel,
    GrammarCompiler,
    ModelRunner,
    pool_outputs,
    sample_on_device,
    sample_outputs,
)
from kvad.engine.options import EngineConfig
from kvad.engine.output import OutputTextStream, ends_with_stop_string
from kvad.engine.requests import check_request, check_source
from kvad.engine.resume import StateKeeper
from kvad.engine.scheduling import LengthLimits, RequestMetrics, SamplingParams, SequenceOutput, StreamChunk
from kvad.engine.storage import open_block_store, open_offload_reader, open_swap_space
from kvad.errors import ConfigError, KvadError, RequestError, SaveError, UsageError
from kvad.model import Summarizer, Transformer
from kvad.storage import CacheFingerprint
from kvad.text import Tokenizer

# Up to this many bytes of weights, projections with the same input are fused; on a GPU always. In a larger model on a
# CPU, kernel launches are negligible, and fusing would copy weights that are mapped from a file.
MAX_PACKED_BYTES = 1 << 28
LOG = logging.getLogger(__name__)
POLL_SECONDS = 0.005  # longest wait for loading blocks in one call, if nothing else can run


@dataclass
class StepTimes:
    """Steps, tokens and seconds since the engine started."""

    steps: int = 0
    tokens: int = 0
    model: float = 0.0  # block operations, inputs and forward passes
    schedule: float = 0.0  # choosing sequences, allocating blocks, applying results
    sample: float = 0.0
    draft: float = 0.0  # proposing drafts
    text: float = 0.0  # detokenizing, stop strings
    total: float = 0.0  # of steps, with all of these


class Engine:
    """One model, one cache, many requests. Not thread-safe: ``EngineClient`` holds the lock.

    Args:
        model: The model.
        cache: Configuration of the cache; resolved for this model.
        config: Options of the engine.
        tokenizer: Tokenizer for output text (None: token ids only).

    Raises:
        ConfigError: If the options do not match the model or the cache.
    """

    def __init__(
        self,
        model: Transformer,
        cache: CacheConfig,
        config: EngineConfig | None = None,
        *,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        config = EngineConfig() if config is None else config
        cache = resolve_for_model(model.config, cache)
        self.model, self.tokenizer, self.cache, self.config = model, tokenizer, cache, config
        self.device = model.token_embedding.device
        self._num_tokens = None if tokenizer is None else tokenizer.vocab_size  # ids below it are sampled
        self.grammars = GrammarCompiler(tokenizer)
        if config.compile:
            _check_compile(model)
        sizing.check_policy(model.config, cache, deterministic=config.deterministic)
        _fuse_projections(model)
        self.adapters = model_lib.lora.AdapterSet(model, {name: x.factors for name, x in config.adapters.items()})
        computed = model.dtype_name
        groups = build_groups(attention_specs(model.config), cache, computed)
        summarizer = config.summarizer
        if summarizer is not None:
            _check_summarizer(summarizer, groups)
            summarizer = summarizer.to(self.device)
        max_len = model.config.max_seq_len
        short_lens = model_lib.positions.short_regime_lens(model.config.stack, max_len)
        self.limits = LengthLimits.from_config(max_len, cache, short_lens)
        self._weights_fingerprint = config.weights_fingerprint
        self._summaries = "" if summarizer is None else summarizer.fingerprint()
        with ExitStack() as resources:  # an error here leaves no file, thread or lock behind
            self.kv_cache: KVCache = self._build_kv_cache(groups, summarizer)
            resources.callback(self.kv_cache.release)
            if config.compile and self.kv_cache.ranks > 1:
                raise ConfigError(f"compile: is not supported with {self.kv_cache.ranks} ranks", "Omit it.")
            if config.adapters and self.kv_cache.ranks > 1:
                message = f"adapters: requests cannot choose one with {self.kv_cache.ranks} ranks"
                raise ConfigError(message, "Merge it into the weights.")
            self.block_store = open_block_store(cache, groups, lambda: self.cache_fingerprint(""))
            if self.block_store is not None:
                resources.callback(self.block_store.close)
            self.kv_cache.host_store = self.block_store
            self._root_seed = self._make_root_seed()
            self.kv_cache_manager = KVCacheManager(
                groups,
                prefix_caching=cache.enable_prefix_caching,
                max_num_seqs=cache.max_num_seqs,
                watermark=cache.watermark,
                block_store=self.block_store,
            )
            bounds = config.max_inter_token, config.max_slowdown
            self._step_costs = None if bounds == (None, None) else scheduling.step_costs.StepCosts(*bounds)
            self.preemption = self._build_preemption()
            resources.callback(self.preemption.close)
            self.kv_cache.copier.on_copied = self.preemption.on_copied
            self.preemption.prefetch_copy = self.kv_cache.prefetch_swapped
            self.scheduler = scheduling.Scheduler(
                self.kv_cache_manager,
                max_num_seqs=cache.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                prefill_chunk_size=min(cache.prefill_chunk_size, cache.max_seq_len),  # the window's pool is that large
                limit=self.limits,
                preemption=self.preemption,
                step_costs=self._step_costs,
            )
            if config.speculative is not None:
                self.scheduler.drafter = drafter = self._build_drafter(config.speculative)
                if isinstance(drafter, DraftModel):
                    resources.callback(drafter.release)
            self._resources = resources.pop_all()
        self.runner = ModelRunner(
            model,
            self.kv_cache,
            native=config.native,
            cuda_graphs=config.cuda_graphs,
            compile_layers=config.compile,
            num_tokens=self._num_tokens,
            adapters=self.adapters,
        )
        is_adaptive = config.speculative is not None and config.speculative.adaptive
        self._draft_gate = scheduling.speculation.DraftGate() if is_adaptive else None
        self.state_keeper = StateKeeper(self.kv_cache, self.kv_cache_manager, self.limits)
        self.times = StepTimes()
        self._next_request = 0
        self._texts: dict[tuple[int, int], OutputTextStream] = {}
        self._undelivered: list[StreamChunk] = []

    def _build_kv_cache(self, groups: Sequence[CacheGroup], summarizer: Summarizer | None) -> KVCache:
        config, kernel = self.config, self.config.kernel
        if config.deterministic:
            products = self.adapters.matmul_shapes()
            kernel = model_lib.batch_invariant.make_batch_invariant(self.model, products)
        return config.cache_factory(
            groups,
            device=self.device,
            rope_at=self.cache.rope_at,
            exact_rope=self.cache.endless,
            summarizers=None if summarizer is None else summarizer.by_layer(),
            kernel=kernel,
            attention_hook=config.attention_hook,
            offload_reader=open_offload_reader(self.cache, groups, config.fs),
        )

    def _build_preemption(self) -> scheduling.preemption.PreemptionManager:
        config, manager = self.config, self.kv_cache_manager
        swap_dir = None if config.swap_dir is None else Path(config.swap_dir)
        swap_space = open_swap_space(self.kv_cache, manager, self.cache.swap_space, swap_dir, config.fs)
        block_bytes = self.kv_cache.block_bytes()
        return scheduling.preemption.PreemptionManager(manager, config.cost_model, swap_space, block_bytes)

    def _build_drafter(self, config: scheduling.SpeculativeConfig) -> scheduling.speculation.Drafter:
        if self.model.decoder is None:
            raise ConfigError("speculative: an encoder generates no tokens", "Omit it.")
        if self.kv_cache_manager.observes_attention:
            message = f"speculative: policy {self.cache.resolved_policy} ranks tokens by the attention to them"
            raise ConfigError(f"{message}, which rejected drafts would change", "Omit it, or use another policy.")
        if config.method == "ngram":
            return scheduling.speculation.NgramDrafter(config)
        model = self.config.draft_model
        if model is None:
            raise ConfigError("speculative: method 'draft' requires EngineConfig(draft_model=...)", "Load one.")
        return self._build_draft_model(model.eval(), config.num_tokens)

    def _build_draft_model(self, model: Transformer, num_drafts: int) -> DraftModel:
        """Build the drafter of a draft model; raise ConfigError if it cannot draft for this model."""
        kinds = self.model.config.kind, model.config.kind
        if kinds != ("decoder", "decoder"):
            raise ConfigError(f"speculative: model and draft model must be decoders, got {kinds[0]} and {kinds[1]}")
        if self.kv_cache.ranks > 1:
            raise ConfigError(f"speculative: a draft model is not supported with {self.kv_cache.ranks} ranks")
        if self._num_tokens is None and model.config.vocab_size != self.model.config.vocab_size:
            sizes = f"{self.model.config.vocab_size} and {model.config.vocab_size}"
            raise ConfigError(f"speculative: the draft model must have the same vocabulary, got sizes {sizes}")
        _fuse_projections(model)
        vocab_size = self.model.config.vocab_size
        return DraftModel(
            model,
            sizing.draft_cache(model.config, self.cache, model.dtype_name),
            num_drafts=num_drafts,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            num_tokens=vocab_size if self._num_tokens is None else min(self._num_tokens, vocab_size),
            native=self.config.native,
        )

    def _make_root_seed(self) -> bytes:
        """Return the prefix of hash chain roots: not empty if blocks outlive the process."""
        if self.block_store is None or self.cache.prefix_cache_dir is None:
            return b""
        return self.cache_fingerprint("").digest() + f"{self.cache.block_size}".encode()

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        cache_salt: str = "",
        encoder_token_ids: Sequence[int] | None = None,
        resume: SequenceState | None = None,
        keep_state: bool = False,
        draw_salt: int = 0,
        adapter: str = "",
    ) -> int:
        """Queue a prompt and return the request's number.

        Args:
            prompt_token_ids: The prompt; for an encoder-decoder the start of the target.
            sampling_params: Sampling parameters.
            cache_salt: Requests share cached blocks only with requests of the same salt.
            encoder_token_ids: Input of an encoder-decoder's encoder.
            resume: State of an earlier request, used up to the first differing token (see ``RequestMetrics``).
            keep_state: Capture the final state for ``pop_state``. Like ``resume``, for one sample without beams.
            draw_salt: Requests with the same seed and tokens draw other numbers if it differs.
            adapter: Name of the adapter that computes it; "": the base.

        Raises:
            RequestError: If the request cannot be served.
        """
        check_request(self.model.config, prompt_token_ids, sampling_params, encoder_token_ids)
        self._check_options(sampling_params, draw_salt, uses_states=resume is not None or keep_state)
        request = self._next_request
        output, stop_tokens = sampling_params.structured_output, self._stop_tokens(sampling_params, adapter)
        grammar = None if output is None else self.grammars.compile(output, sampling_params.visible_special_tokens)
        texts = self._text_streams(request, sampling_params, stop_tokens)
        prefix_root = self._root(cache_salt, encoder_token_ids, adapter)
        resume_point = self.state_keeper.resume(
            resume, prompt_token_ids, sampling_params, prefix_root, encoder_token_ids, cache_salt, adapter
        )
        encoder = None if encoder_token_ids is None else scheduling.request.EncoderInput(tuple(encoder_token_ids))
        metrics = self.scheduler.add_request(
            request,
            prompt_token_ids,
            sampling_params,
            prefix_root,
            stop_tokens=stop_tokens,
            encoder_input=encoder,
            swapped=resume_point.swapped,
            keep_state=keep_state,
            draw_salt=draw_salt,
            adapter=self.adapters.number(adapter),
            has_stop_string=self._stop_string_test(sampling_params),
            grammar=grammar,
        )
        metrics.resume_miss_reason = resume_point.miss_reason
        self.state_keeper.begin(resume_point)
        if keep_state:
            self.state_keeper.track(request, cache_salt, adapter)
        self._texts.update(texts)
        self._next_request += 1
        return request

    def _text_streams(
        self, request: int, sampling_params: SamplingParams, stop_tokens: frozenset[int]
    ) -> dict[tuple[int, int], OutputTextStream]:
        """Return the detokenizer of each sample, by (request, sample)."""
        if self.tokenizer is None:
            return {}
        end_tokens = stop_tokens | frozenset(sampling_params.stop_token_ids)
        samples = range(sampling_params.n)
        return {(request, i): OutputTextStream(self.tokenizer, sampling_params, end_tokens) for i in samples}

    def _check_options(self, sampling_params: SamplingParams, draw_salt: int, *, uses_states: bool) -> None:
        if not 0 <= draw_salt <= scheduling.request.MAX_SEED:
            raise RequestError(f"draw_salt: must be from 0 to {scheduling.request.MAX_SEED}, got {draw_salt}")
        if sampling_params.stop and self.tokenizer is None:
            raise RequestError("stop: requires a tokenizer, and this model has none", "Use stop_token_ids.")
        first, has_output = sampling_params.forced_bos_token_id, sampling_params.structured_output is not None
        if has_output and first is not None and self.tokenizer is not None and self.tokenizer.decode([first]):
            raise RequestError("structured_output: the token of forced_bos_token_id must have no text")
        if uses_states and max(sampling_params.n, sampling_params.num_beams) > 1:  # a state holds one sequence
            beams, samples = f"{sampling_params.num_beams} beams", f"{sampling_params.n} samples"
            label = beams if sampling_params.num_beams > 1 else samples
            raise RequestError(f"resume, keep_state: must be one sequence, got {label}", "Omit n= and num_beams=.")
        if uses_states and self.kv_cache_manager.uses_offload:
            hint = "Use a larger cache, or another overflow mode."
            raise RequestError("keep_state, resume: unavailable with token offload", hint)

    def add_encoder_request(
        self,
        tokens: Sequence[int],
        encoder_output: scheduling.request.EncoderOutput = "head",
        token_types: Sequence[int] | None = None,
    ) -> int:
        """Queue a text for the encoder only; its one chunk carries the output (``StreamChunk.output``).

        The output is a host tensor: [T, labels] or [T, V] of a head per token, [labels] or [E] of a pooling head, [T,
        E] of an encoder-decoder; [E] if ``encoder_output`` pools. ``token_types`` are those of two texts.
        """
        if self.model.encoder is None:
            raise RequestError("this model has no encoder", "It continues prompts.")
        check_source(self.model.config, tokens)
        types = None if token_types is None else tuple(token_types)
        request = self._next_request
        encoder_input = scheduling.request.EncoderInput(tuple(tokens), encoder_output, types)
        self.scheduler.add_request(request, (), SamplingParams(max_tokens=0), encoder_input=encoder_input)
        self._next_request += 1
        return request

    def add_embedding_request(
        self, tokens: Sequence[int], pooling: Pooling = "last", *, cache_salt: str = "", adapter: str = ""
    ) -> int:
        """Queue a text for a decoder; its one chunk carries the pooled hidden states [E] (``StreamChunk.output``)."""
        if self.model.config.kind != "decoder":
            raise RequestError(f"this model is an {self.model.config.kind}", "Its encoder embeds.")
        sampling_params = SamplingParams(max_tokens=0)
        check_request(self.model.config, tokens, sampling_params, None)
        request, root = self._next_request, self._root(cache_salt, None, adapter)
        number = self.adapters.number(adapter)
        self.scheduler.add_request(request, tokens, sampling_params, root, adapter=number, pooling=pooling)
        self._next_request += 1
        return request

    def step(self) -> list[StreamChunk]:
        """Run one step; return [] if there is nothing to run.

        If a step of several requests fails, they are recomputed one after the other. An exception in a step of one
        request ends it, and is raised; its error chunk is returned by the next call.
        """
        if self._undelivered:
            chunks, self._undelivered = self._undelivered, []
            return chunks
        step_start = time.perf_counter()
        if self._draft_gate is None or self._draft_gate.is_open:
            self._propose_drafts()
        draft_end = time.perf_counter()
        output = self.scheduler.schedule()
        self.times.draft += draft_end - step_start
        self.times.schedule += time.perf_counter() - draft_end
        if states := self.scheduler.pop_finished_states():  # of sequences that ended to make room
            self.state_keeper.collect(states)
        if output is None:
            self.flush_offload()
            if self.block_store is not None:
                self.block_store.wait(POLL_SECONDS)  # nothing runs, and blocks are loading
            return [self._add_text(chunk) for chunk in self.scheduler.pop_chunks()]
        try:
            results = self._execute(output) if output.encoder_batch is None else self._encode(output.encoder_batch)
        except BaseException as error:  # includes Ctrl-C: the step's sequences end, the engine continues
            if self._retry_alone(output, error):
                return [self._add_text(chunk) for chunk in self.scheduler.pop_chunks()]
            raise
        update_start = time.perf_counter()
        chunks = self.scheduler.update_from_output(output, results)
        text_start = time.perf_counter()
        chunks = [self._add_text(chunk) for chunk in chunks]
        while accepted := self.scheduler.append_accepted():
            chunks += [self._add_text(chunk) for chunk in accepted]
        self.times.schedule += text_start - update_start
        self.times.text += time.perf_counter() - text_start
        self.times.steps += 1
        num_generated = sum(chunk.token_id is not None for chunk in chunks)
        self.times.tokens += num_generated
        if states := self.scheduler.pop_finished_states():
            self.state_keeper.collect(states)
        if self.scheduler.idle:
            self.flush_offload()
            ops.runtime.trim_heap()
        seconds = time.perf_counter() - step_start
        self.times.total += seconds
        if output.encoder_batch is None and (self._step_costs is not None or self._draft_gate is not None):
            self._record_step(output, num_generated, seconds)
        return chunks

    def _retry_alone(self, output: scheduling.SchedulerOutput, error: BaseException) -> bool:
        """Recompute the requests of a failed step one after the other; if that is not possible, end them."""
        for failed in filter(None, (output, self.scheduler.pop_next())):
            self.kv_cache.discard(failed.allocation.block_ops)
        if isinstance(error, Exception) and self.scheduler.retry_alone(output):
            LOG.error("a step of several requests failed: each is computed alone", exc_info=error)
            return True
        fault = SequenceOutput(error=f"the step failed: {type(error).__name__}: {error}")
        count = len(output.scheduled) if output.encoder_batch is None else len(output.encoder_batch.sequences)
        chunks = self.scheduler.update_from_output(output, [fault] * count)
        self._undelivered = [self._add_text(chunk) for chunk in chunks]
        return False

    def _propose_drafts(self) -> None:
        """Propose drafts; a drafter that fails is not used again, and no request ends."""
        try:
            self.scheduler.propose_drafts()
        except Exception:
            LOG.exception("drafting failed: from here on the engine runs without drafts")
            self.scheduler.drafter = None

    def _record_step(self, output: scheduling.SchedulerOutput, num_generated: int, seconds: float) -> None:
        own_spans = _own_spans(output)
        if self._step_costs is not None:
            self._step_costs.record(own_spans, seconds)
        if self._draft_gate is not None and all(count == 1 for _, count in own_spans):  # every sequence decodes
            self._draft_gate.record(len(own_spans), num_generated, seconds)

    def _execute(self, output: scheduling.SchedulerOutput) -> list[SequenceOutput]:
        start = time.perf_counter()
        logits = self.runner.execute(output)
        sample_start = time.perf_counter()
        tokens = self._run_ahead(output, logits)
        if tokens is not None:
            results = tokens.wait()
        else:
            results = sample_outputs(output, logits, self._num_tokens, self.runner.best_tokens(logits))
        if output.has_pooling:
            pool_outputs(output, self.runner.hidden, results)
        self.times.model += sample_start - start
        self.times.sample += time.perf_counter() - sample_start
        if self.kv_cache.offload_reader is not None:
            num_seqs = [batch.num_seqs for batch in output.sub_batches]
            for index, reason in self.kv_cache.failed_rows(num_seqs).items():
                results[index] = SequenceOutput(error=reason, retry=True)
        is_decoding = all(batch.num_new_tokens == 1 for batch in output.sub_batches)
        num_computed = 0 if is_decoding else sum(count for _, count in _own_spans(output))
        if num_computed > 2 * len(output.scheduled):  # most of them are prompt tokens
            self.preemption.costs.record("compute", num_computed, time.perf_counter() - start)
        return results

    def _run_ahead(self, output: scheduling.SchedulerOutput, logits: Tensor) -> DeviceTokens | None:
        """Choose a step's tokens on the device, and start the step that follows; None if the host chooses them."""
        if self.runner.graphs.reason:
            return None
        tokens = sample_on_device(output, logits, self._num_tokens)
        if tokens is not None and (next_output := self.scheduler.schedule_next()) is not None:
            self.runner.start(next_output, tokens.token_ids)
        return tokens

    def _encode(self, encoder_batch: scheduling.sequence.EncoderBatch) -> list[SequenceOutput]:
        start = time.perf_counter()
        hidden, model_input = self.runner.encode(encoder_batch)
        lengths = [len(seq.request.encoder_tokens) for seq in encoder_batch.sequences]
        is_finite = [bool(part.all()) for part in hidden.isfinite().all(dim=-1).cpu().split(lengths)]  # one device sync
        outputs: list[Tensor | None] = [None] * len(lengths)
        if encoder_batch.allocation is None:
            outputs = [output.cpu() for output in self.runner.encoder_outputs(hidden, model_input, encoder_batch)]
        results = []
        for finite, output in zip(is_finite, outputs, strict=True):
            finite = finite and (output is None or bool(output.isfinite().all()))
            results.append(SequenceOutput(output=output) if finite else SequenceOutput(error=NONFINITE_ERROR))
        self.times.model += time.perf_counter() - start
        return results

    def pop_state(self, request: int) -> SequenceState:
        """Return the final state of an ended request with ``keep_state``, once; RequestError if there is none."""
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

    def finish_request(self, request: int) -> list[StreamChunk]:
        """End a request with the tokens so far, as a stop string does, and return its last chunks."""
        chunks = self.scheduler.finish_sequence(request, None)
        if states := self.scheduler.pop_finished_states():
            self.state_keeper.collect(states)
        return [self._add_text(chunk) for chunk in chunks]

    def num_computed_tokens(self, request: int) -> int:
        """Return the number of cached tokens of a request's first sample; 0 if it waits or has ended."""
        return next((seq.num_computed_tokens for seq in self.scheduler.sequences(request)), 0)

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
        """Free the pool and swapped blocks, and close the block store after its last write; raise errors at the end."""
        with self._resources:
            self.flush_offload()

    def _stop_string_test(self, sampling_params: SamplingParams) -> Callable[[Sequence[int]], bool] | None:
        """Return the function that finds a stop string at the end of a beam's tokens, if one is needed."""
        if self.tokenizer is None or not sampling_params.stop or sampling_params.num_beams == 1:
            return None
        return partial(ends_with_stop_string, self.tokenizer, sampling_params)

    def _stop_tokens(self, sampling_params: SamplingParams, adapter: str) -> frozenset[int]:
        own = self.config.adapters.get(adapter)
        if own is not None and own.stop_tokens and not sampling_params.ignore_eos:
            return own.stop_tokens
        if sampling_params.ignore_eos or self.config.stop_tokens or self.tokenizer is None:
            return frozenset() if sampling_params.ignore_eos else self.config.stop_tokens
        return frozenset(self.tokenizer.special_tokens.end_ids)

    def _root(self, cache_salt: str, encoder_token_ids: Sequence[int] | None = None, adapter: str = "") -> bytes:
        """Return the start of the block hash chain, unique to the computation except for its rotary regime."""
        encoder_part = "" if encoder_token_ids is None else str(list(encoder_token_ids))
        policy_parts = f"{self.cache.resolved_policy}\0{self.cache.endless}\0{self.cache.rope_at}\0{self._summaries}"
        root_parts = f"{cache_salt}\0{self.cache.format_name}\0{policy_parts}\0{encoder_part}"
        root = hashlib.blake2b(self._root_seed + root_parts.encode(), digest_size=16).digest()
        if not adapter:
            return root
        return hashlib.blake2b(self.adapters.fingerprint(adapter).encode(), key=root, digest_size=16).digest()

    def block_keys(self, tokens: Sequence[int], *, cache_salt: str = "") -> list[str]:
        """Return the block store's keys of the full blocks of a prompt."""
        regime = self.limits.rope_regime(len(tokens))
        prefix_root = scheduling.sequence.regime_root(self._root(cache_salt), regime)
        return self.kv_cache_manager.block_keys(tokens, prefix_root)

    def cache_fingerprint(
        self, regime: str, *, cache_salt: str = "", template: str = "", adapter: str = ""
    ) -> CacheFingerprint:
        """Return the fingerprint of everything that keys and values of this engine's ``adapter`` depend on.

        ``template`` is the chat template's fingerprint, if any. The first call reads all weights.
        """
        if self._weights_fingerprint is None and self.kv_cache.ranks > 1:
            raise ConfigError(
                f"weights: this rank has only its shard of {self.kv_cache.ranks}",
                "Pass EngineConfig(weights_fingerprint=...) the fingerprint of the whole model.",
            )
        if self._weights_fingerprint is None:
            self._weights_fingerprint = model_lib.fingerprint.weights_fingerprint(self.model)
        cache, computed = self.cache, self.model.dtype_name
        if self.config.deterministic:
            computed += " deterministic"
        if self.model.activation_bits is not None:
            computed += f" activations int{self.model.activation_bits}"
        adapters = "+".join(filter(None, (self.config.adapter_fingerprint, self.adapters.fingerprint(adapter))))
        return CacheFingerprint(
            model=self._weights_fingerprint,
            tokenizer="" if self.tokenizer is None else self.tokenizer.fingerprint(),
            template=template,
            computed=computed,
            keys=cache.key_dtype or cache.dtype,
            values=cache.value_dtype or cache.dtype,
            policy=str(cache.resolved_policy),
            rotate=cache.rope_at,
            endless=str(cache.endless),
            summaries=self._summaries,
            regime=regime,
            salt=cache_salt,
            **({"adapter": adapters} if adapters else {}),
        )

    def _add_text(self, chunk: StreamChunk) -> StreamChunk:
        """Add the chunk's new text; a stop string or a failing tokenizer ends the sample."""
        key = chunk.request, chunk.sample_index
        stream, finish = self._texts.get(key), chunk.finish_reason
        if finish == "error":
            self.state_keeper.forget(chunk.request)
        if stream is None:
            return chunk
        text, error = "", None
        try:
            is_end = finish == "stop" and chunk.token_id in stream.stop_tokens  # which has no text
            text, stopped = stream.push(None if is_end else chunk.token_id)
            if stopped and finish in (None, "length"):
                finish = "stop"
            text += stream.flush() if finish is not None else ""
        except KvadError as failure:  # an error of this sample only, such as a token that its tokenizer lacks
            text, finish, error = "", "error", str(failure)
        if finish != chunk.finish_reason:
            self.scheduler.finish_sequence(*key, finish or "stop")  # ended samples are ignored
            chunk = chunk._replace(finish_reason=finish, error=error, limit=None)
        if finish is not None:
            del self._texts[key]
        return chunk._replace(text=text)


def _own_spans(output: scheduling.SchedulerOutput) -> list[tuple[int, int]]:
    """Return (first position, new tokens) of each sequence of a step, without drafts."""
    return [(each.start, each.num_tokens - len(each.draft_token_ids)) for each in output.scheduled]


def _check_compile(model: Transformer) -> None:
    """Raise ConfigError if the model's layers cannot be compiled."""
    if isinstance(model.kernel, ops.attention.TileSizes):
        raise ConfigError("compile: the model is batch-invariant (deterministic)", "Load it again, or omit compile.")
    if not model_lib.compiled.compilable_layers(model):
        raise ConfigError("compile: this model has no layer that can be compiled", "Omit it.")
    reason = ops.runtime.compile_error(str(model.token_embedding.device), backward=False)
    if reason is not None:
        raise ConfigError(f"compile: torch cannot compile for {model.token_embedding.device}: {reason}", "Omit it.")
    LOG.info("layers are compiled with torch.compile and run in PyTorch; native and fused kernels are not used")


def _fuse_projections(model: Transformer) -> None:
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    if num_bytes <= MAX_PACKED_BYTES or model.token_embedding.device.type == "cuda":
        model.fuse_projections()


def _check_summarizer(summarizer: Summarizer, groups: Sequence[CacheGroup]) -> None:
    """Raise ConfigError if the summarizer was not trained for these cache groups."""
    sizing.check_summarizer(summarizer.ratio, groups)
    layers = summarizer.by_layer()
    for group in (group for group in groups if group.lower_level is not None and group.lower_level.ratio > 1):
        sizes = group.spec.num_kv_heads, group.spec.head_dim, group.spec.value_dim
        for layer in group.layers:
            if layer not in layers or layers[layer].sizes != sizes:
                raise ConfigError(f"summarizer: it does not match layer {layer} of this model")


def pin_prefix(
    engine: Engine, tokens: Sequence[int], name: str, text: str = "", *, cache_salt: str = ""
) -> PinnedPrefix:
    """Store and pin the full blocks of ``tokens``; later requests with this prefix reuse them.

    Raises:
        UsageError: If there is no disk store, or the name is invalid.
        RequestError: If the prefix is shorter than a block, or the engine rejects it.
        SaveError: If the disk cannot be written; nothing is pinned.
    """
    offload.pinned.check_prefix_name(name)
    block_size = engine.cache.block_size
    if engine.block_store is None or engine.cache.prefix_cache_dir is None or not engine.block_store.on_disk:
        message = f"{engine.cache.prefix_cache_dir} cannot be used"
        raise UsageError(message, "Another process uses it, or it cannot be written.")
    if len(tokens) < block_size:
        message = f"prefix: must have at least {block_size} tokens (one block), got {len(tokens)}"
        raise RequestError(message, "Give a longer prefix.")
    sampling_params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    engine.add_request(tokens, sampling_params, cache_salt=cache_salt)
    while not engine.idle:
        for chunk in engine.step():
            if chunk.error is not None:
                raise RequestError(f"the prefix cannot be computed: {chunk.error}")
    engine.flush_offload()
    keys = engine.block_keys(tokens, cache_salt=cache_salt)
    try:
        stored, parts = tuple(engine.block_store.pin_blocks(keys)), engine.cache_fingerprint("").parts
        pinned_prefix = PinnedPrefix(name, stored, len(keys) * block_size, text[:80], parts)
        offload.pinned.write_pinned_prefix(engine.block_store.folder, pinned_prefix)
    except OSError as error:
        message = f"{engine.cache.prefix_cache_dir}: the prefix is not pinned: {error}"
        raise SaveError(message, "Free disk space, or use another folder.") from error
    return pinned_prefix
