"""Draft model: a smaller model with its own cache, which proposes the next tokens of all decoding sequences.

It follows the sequences of an engine: before a step it reads the tokens that are new, truncates the drafts that were
rejected, and then continues every sequence by itself. Its copies of the sequences have the same sampling parameters,
seed and tokens, so they draw with the random numbers that the model will use: where the distributions agree, the tokens
do. A prompt is read in chunks; without all of its tokens a sequence gets no drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

from kvad import model as model_lib
from kvad.cache import CacheConfig, build_groups
from kvad.cache.device import KVCache
from kvad.cache.manager import KVCacheManager
from kvad.config import attention_specs
from kvad.engine import scheduling
from kvad.engine.execution.model_runner import ModelRunner
from kvad.engine.execution.sampler import sample_outputs
from kvad.engine.scheduling import LengthLimits, ScheduledSequence, SchedulerOutput, SequenceOutput, TokenSequence
from kvad.model import Transformer


class DraftModel:
    """A drafter (``kvad.engine.scheduling.speculation.Drafter``).

    Args:
        model: The draft model, a decoder.
        cache: Its cache (``kvad.cache.sizing.draft_cache``).
        num_drafts: Drafts of a sequence per step, at most.
        max_num_batched_tokens: New tokens of a step.
        num_tokens: Ids below it are drafted (None: all).
        native: Use the native kernels, where they can.
    """

    def __init__(
        self,
        model: Transformer,
        cache: CacheConfig,
        *,
        num_drafts: int,
        max_num_batched_tokens: int,
        num_tokens: int | None = None,
        native: bool = True,
    ) -> None:
        computed = str(model.token_embedding.dtype).removeprefix("torch.")
        groups = build_groups(attention_specs(model.config), cache, computed)
        self.kv_cache = KVCache(groups, device=model.token_embedding.device)
        self.manager = KVCacheManager(groups, prefix_caching=True, max_num_seqs=cache.max_num_seqs)
        self.runner = ModelRunner(model, self.kv_cache, native=native, num_tokens=num_tokens)
        short_lens = model_lib.positions.short_regime_lens(model.config.stack, model.config.max_seq_len)
        self._limits = LengthLimits(cache.max_seq_len, short_regime_lens=short_lens)
        self._batches = scheduling.batching.BatchBuilder(self.manager, max_num_batched_tokens, cache.prefill_chunk_size)
        self._num_drafts, self._num_tokens = num_drafts, num_tokens
        self._copies: dict[int, TokenSequence] = {}  # by index, which is that of the sequence

    def propose(self, seqs: Sequence[TokenSequence], max_drafts: Sequence[int]) -> list[list[int]]:
        self._drop_others(seqs)
        limits: dict[int, int] = {}  # by index: tokens of the sequence with all drafts
        for seq, limit in zip(seqs, max_drafts, strict=True):
            num_tokens = len(seq.token_ids)
            room = min(self._limits.max_len - num_tokens, self._limits.rope_regime_room(num_tokens))
            if (count := min(limit, self._num_drafts, room)) > 0 and self._knows_tokens(seq):
                limits[seq.seq_index] = num_tokens + count
        drafting = [self._follow(seq) for seq in seqs if seq.seq_index in limits]
        while drafting:
            drafting = [seq for seq in self._step(drafting) if len(seq.token_ids) < limits[seq.seq_index]]
        copies = [self._copies.get(seq.seq_index) if seq.seq_index in limits else None for seq in seqs]
        return [
            [] if copied is None else copied.token_ids[len(seq.token_ids) :]
            for seq, copied in zip(seqs, copies, strict=True)
        ]

    def release(self) -> None:
        """Free the memory of the cache."""
        self._copies.clear()
        self.kv_cache.release()

    def _knows_tokens(self, seq: TokenSequence) -> bool:
        """True if the model has an embedding of every token: its table may be shorter than that of the other model."""
        copied = self._copies.get(seq.seq_index)
        num_known = 0 if copied is None else max(0, len(copied.token_ids) - self._num_drafts - 1)
        return max(seq.token_ids[num_known:]) < self.runner.model.config.vocab_size

    def _drop_others(self, seqs: Sequence[TokenSequence]) -> None:
        """Drop the copies of sequences that do not decode, or that another one replaced at their index."""
        current = {seq.seq_index: (seq.request_id, seq.sample_index) for seq in seqs}
        for index, seq in list(self._copies.items()):
            regime = self._limits.rope_regime(len(seq.token_ids))
            if current.get(index) != (seq.request_id, seq.sample_index) or regime != seq.rope_regime:
                self._drop(index)

    def _drop(self, index: int, *, publish: bool = True) -> None:
        del self._copies[index]
        self.manager.free(index, publish)

    def _follow(self, seq: TokenSequence) -> TokenSequence:
        """Return the sequence's copy with its tokens, of which the cache holds those that it has in common."""
        copied = self._copies.get(seq.seq_index)
        if copied is None:
            copied = copy(seq)
            copied.sampling_params = replace(seq.sampling_params, logprobs=None)
            copied.token_ids, copied.draft_token_ids, copied.draw_hash = list(seq.token_ids), (), None
            copied.wants_prompt_logprobs, copied.read_bucket = False, 0
            copied.grammar_state = None if seq.request.grammar is None else seq.request.grammar.start()
            copied.rope_regime = self._limits.rope_regime(len(seq.token_ids))
            length = self.manager.add_sequence(seq.seq_index, copied.token_ids, copied.prefix_root)
            assert length is not None, f"index {seq.seq_index} is in use"
            copied.num_computed_tokens = length
            self._copies[seq.seq_index] = copied
            return copied
        stop = min(copied.num_computed_tokens, len(seq.token_ids) - 1)
        length = max(0, min(stop, copied.num_computed_tokens - self._num_drafts))  # equal: only drafts differ
        while length < stop and copied.token_ids[length] == seq.token_ids[length]:
            length += 1
        if length < copied.num_computed_tokens:
            length = copied.num_computed_tokens = self.manager.truncate(seq.seq_index, length)
        copied.token_ids[length:] = seq.token_ids[length:]
        copied.draw_hash = None if seq.draw_hash is None else seq.draw_hash.copy()
        copied.num_hashed_tokens = seq.num_hashed_tokens
        return copied

    def _step(self, seqs: Sequence[TokenSequence]) -> list[TokenSequence]:
        """Compute the next tokens of the copies; return those that got a draft."""
        items, _, _ = self._batches.continue_running(seqs, num_waiting=0)
        items = self._batches.sort(items)
        while items:
            allocation = self.manager.allocate_slots([(s.seq_index, s.num_computed_tokens, n) for _, s, n in items])
            if allocation is not None:
                break
            self._drop(items.pop()[1].seq_index)  # the pool is full: it gets no drafts
        else:
            return []
        sub_batches, _ = self._batches.build(items, allocation)
        scheduled = tuple(scheduling.batching.schedule_span(seq, num_new_tokens) for _, seq, num_new_tokens in items)
        output = SchedulerOutput(scheduled, sub_batches, allocation)
        logits = self.runner.execute(output)
        results = sample_outputs(output, logits, self._num_tokens, self.runner.best_tokens(logits))
        return [span.sequence for span, result in zip(scheduled, results, strict=True) if self._append(span, result)]

    def _append(self, span: ScheduledSequence, result: SequenceOutput) -> bool:
        """Commit the tokens of a span and append its draft; return False if the copy drafts no more in this step."""
        seq = span.sequence
        if result.error is not None:  # numbers that are not finite, or an exception in a caller's function
            self._drop(seq.seq_index, publish=False)
            return False
        seq.num_computed_tokens = span.start + span.num_tokens
        self.manager.commit(seq.seq_index, span.token_ids, span.start + span.logit_offsets.stop)
        if result.token_id is None or not span.is_sampled:
            return False
        seq.token_ids.append(result.token_id)
        return result.token_id not in seq.stop_tokens and not result.is_complete
