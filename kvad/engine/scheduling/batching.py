"""Sub-batches of a step: sequences with equally many new tokens and similar read lengths. Integers only: no torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from kvad.cache.manager import BlockAllocation, KVCacheManager
from kvad.engine.scheduling.sequence import ScheduledSequence, TokenSequence
from kvad.engine.scheduling.step_costs import MIN_TOKENS, PromptBudget, StepCosts
from kvad.model_input import MAX_READ_SLOTS, SubBatch

OLDEST_SHARE = 0.5  # of the time for prompts that the oldest one has at least
MIN_READ_BUCKET = 64  # slots; shorter reads share a bucket, because another sub-batch costs more than reading

BatchItem = tuple[int, TokenSequence, int]  # sort key, sequence, number of new tokens


class BatchBuilder:
    """Chooses the running sequences' next tokens, and groups the sequences of a step into sub-batches."""

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        max_num_batched_tokens: int,
        prefill_chunk_size: int,
        step_costs: StepCosts | None = None,
    ) -> None:
        self._kv_cache_manager, self._groups, self._step_costs = kv_cache_manager, kv_cache_manager.groups, step_costs
        self.max_num_batched_tokens, self._prefill_chunk_size = max_num_batched_tokens, prefill_chunk_size
        self._reads_encoder = kv_cache_manager.max_source_len > 0
        paged_groups = [group for group in self._groups if group.max_blocks_per_seq > 1]
        self._bucket_unit = max([MIN_READ_BUCKET, *(group.block_size for group in paged_groups)])
        self._max_read_slots = max((g.max_blocks_per_seq * g.block_size for g in self._groups), default=1)

    def continue_running(
        self, running: Sequence[TokenSequence], num_waiting: int
    ) -> tuple[list[BatchItem], PromptBudget, TokenSequence | None]:
        """Return the running sequences' next tokens, what is left for others, which wait, and a prompt for the rest.

        Where the time of a step is bounded, a long prompt leaves time for the short ones behind it: the oldest prompt
        comes last, with ``OLDEST_SHARE`` of the time and what the others leave. The shortest of these is first.
        """
        items: list[BatchItem] = []
        prefilling: list[TokenSequence] = []
        num_tokens_left = self.max_num_batched_tokens
        for seq in running:
            assert seq.encoder_ready, "the encoder input is computed first"
            if seq.beam_candidates is not None:
                continue  # this beam waits for the other beams
            if seq.num_computed_tokens + 1 == len(seq.token_ids):
                items.append(self.decode_item(seq))
                num_tokens_left -= items[-1][2]
            else:
                prefilling.append(seq)
        budget, oldest = PromptBudget(num_tokens_left), None
        if items and (prefilling or num_waiting) and self._step_costs is not None:
            budget = self._step_costs.budget(num_tokens_left, len(items), len(prefilling) + num_waiting)
        if budget.is_bounded and prefilling:
            oldest, *prefilling = prefilling
            prefilling.sort(key=lambda seq: len(seq.token_ids) - seq.num_computed_tokens)
            if prefilling or num_waiting:
                budget.reserve(OLDEST_SHARE)
        for number, seq in enumerate(prefilling, 1):
            if not budget.has_room:
                break
            others_follow = budget.is_bounded and (number < len(prefilling) or num_waiting)
            items.append(self.prefill_item(seq, budget, share=0.5 if others_follow else 1.0))
        return items, budget, oldest

    def use_rest(self, oldest: TokenSequence | None, budget: PromptBudget) -> list[BatchItem]:
        """Return the oldest prompt of a bounded step, if any, with its share and what the others have left."""
        budget.release()
        return [] if oldest is None or not budget.tokens else [self.prefill_item(oldest, budget)]

    def decode_item(self, seq: TokenSequence) -> BatchItem:
        """Return the sequence with its last token and its drafts."""
        num_new_tokens = 1 + len(seq.draft_token_ids)
        return self._sort_key(seq, num_new_tokens), seq, num_new_tokens

    def max_drafts(self, seqs: Sequence[TokenSequence]) -> list[int]:
        """Return how many drafts each decoding sequence may have: they share half of the tokens of a step.

        Drafts are a chunk, so that a windowed group holds what their queries need, and end where the policy evicts.
        """
        share = (self.max_num_batched_tokens - len(seqs)) // 2 // max(1, len(seqs))
        limit = min(share, self._prefill_chunk_size - 1)
        until_eviction = self._kv_cache_manager.tokens_until_eviction
        return [min(limit, until_eviction(seq.seq_index) - 1, seq.max_len - len(seq.token_ids) - 1) for seq in seqs]

    def prefill_item(self, seq: TokenSequence, budget: PromptBudget, *, share: float = 1.0) -> BatchItem:
        """Return the sequence with its next tokens: a chunk that ends where the policy evicts.

        They take at most a share of the budget, but are not fewer than ``MIN_TOKENS``.
        """
        start = seq.num_computed_tokens
        num_new_tokens = min(
            len(seq.token_ids) - start,
            self._prefill_chunk_size,
            max(budget.max_tokens(start, share), min(MIN_TOKENS, budget.tokens)),
            self._kv_cache_manager.tokens_until_eviction(seq.seq_index),
        )
        budget.spend(start, num_new_tokens)
        return self._sort_key(seq, num_new_tokens), seq, num_new_tokens

    def sort(self, items: list[BatchItem]) -> list[BatchItem]:
        """Sort by sub-batch, and within it by index, or by request so that sequences of one source are adjacent."""
        return sorted(items, key=(lambda item: (item[0] >> 16, item[1].priority)) if self._reads_encoder else None)

    def _sort_key(self, seq: TokenSequence, num_new_tokens: int) -> int:
        """Return a sort key: (new tokens, read bucket, index). Buckets are units times powers of two."""
        end = seq.num_computed_tokens + num_new_tokens
        if end > seq.read_bucket:
            units = -(-min(end, self._max_read_slots) // self._bucket_unit)
            seq.read_bucket = self._bucket_unit << (units - 1).bit_length()
        return ((num_new_tokens << 40 | seq.read_bucket) << 16) + seq.seq_index

    def build(
        self, items: list[BatchItem], allocation: BlockAllocation
    ) -> tuple[tuple[SubBatch, ...], tuple[SubBatch, ...] | None]:
        """Split sorted items into sub-batches; the second ones are those of cross-attention, if any."""
        sub_batches, begin = [], 0
        for stop in range(1, len(items) + 1):
            num_seqs = max(1, MAX_READ_SLOTS // min(items[begin][1].read_bucket, self._max_read_slots))
            is_full = stop - begin == num_seqs
            if stop == len(items) or is_full or items[stop][0] >> 16 != items[begin][0] >> 16:
                sub_batches.append(
                    SubBatch(stop - begin, items[begin][2], self._num_read_slots(items, allocation, begin, stop))
                )
                begin = stop
        return tuple(sub_batches), _group_by_source(items, sub_batches) if self._reads_encoder else None

    def _num_read_slots(self, items: list[BatchItem], allocation: BlockAllocation, begin: int, stop: int) -> int:
        """Return the slots that the sub-batch's longest sequence reads in the group with most slots."""
        num_read_slots = 0
        for group, tables in zip(self._groups, allocation.block_tables, strict=True):
            if group.lower_level is not None:
                continue
            if group.max_blocks_per_seq > 1:
                slots = max(map(len, tables[begin:stop])) * group.block_size
            else:  # a sequence's only block is read up to its last written slot
                length = max(seq.num_computed_tokens + num_new_tokens for _, seq, num_new_tokens in items[begin:stop])
                slots = min(group.block_size, -(-length // MIN_READ_BUCKET) * MIN_READ_BUCKET)
            num_read_slots = max(num_read_slots, slots)
        return num_read_slots


def _group_by_source(items: list[BatchItem], sub_batches: Sequence[SubBatch]) -> tuple[SubBatch, ...]:
    """Regroup sub-batches for cross-attention: runs of one request's sequences become one row.

    Applies if all runs of a sub-batch have the same length. ``num_read_slots`` is the longest encoder input's length.
    """
    cross_sub_batches, begin = [], 0
    for sub_batch in sub_batches:
        seqs = [seq for _, seq, _ in items[begin : begin + sub_batch.num_seqs]]
        begin += sub_batch.num_seqs
        runs = [1]
        for previous, seq in pairwise(seqs):
            if seq.request is previous.request:
                runs[-1] += 1
            else:
                runs.append(1)
        run_length = runs[0] if len(set(runs)) == 1 else 1
        num_read_slots = max(len(seq.request.encoder_tokens) for seq in seqs)
        cross_sub_batches.append(
            SubBatch(sub_batch.num_seqs // run_length, run_length * sub_batch.num_new_tokens, num_read_slots)
        )
    return tuple(cross_sub_batches)


def schedule_span(seq: TokenSequence, num_new_tokens: int) -> ScheduledSequence:
    """Return the sequence's next tokens with the offsets whose logits are needed."""
    start, drafts = seq.num_computed_tokens, seq.draft_token_ids
    if seq.request.pooling is not None:  # finite hidden states validate the span
        return ScheduledSequence(seq, start, num_new_tokens, range(0), False)
    end = start + num_new_tokens - len(drafts)
    is_sampled = end == len(seq.token_ids) and end < seq.max_len
    # The last token scores the next one, if any: finite logits there validate the span (Scheduler.update_from_output).
    stop = num_new_tokens if is_sampled or end < len(seq.token_ids) else num_new_tokens - 1
    first_offset = stop - 1 - len(drafts)
    if seq.wants_prompt_logprobs and seq.num_scored_tokens < seq.num_prompt_tokens - 1:
        first_offset = min(first_offset, max(seq.num_scored_tokens - start, 0))
    return ScheduledSequence(seq, start, num_new_tokens, range(max(first_offset, 0), stop), is_sampled, drafts)


def next_encoder_batch(
    unencoded: Sequence[TokenSequence], max_tokens: int
) -> tuple[tuple[TokenSequence, ...], tuple[SubBatch, ...]]:
    """Choose encoder inputs of up to ``max_tokens`` tokens, at least one; all are cached, or all are returned."""
    chosen: list[TokenSequence] = []
    for seq in unencoded:
        if bool(seq.token_ids) != bool(unencoded[0].token_ids):
            continue
        max_tokens -= len(seq.request.encoder_tokens)
        if chosen and max_tokens < 0:
            break
        chosen.append(seq)
    chosen.sort(key=lambda seq: (len(seq.request.encoder_tokens), seq.seq_index))
    lengths = [len(seq.request.encoder_tokens) for seq in chosen]
    return tuple(chosen), tuple(SubBatch(lengths.count(n), n, n) for n in sorted(set(lengths)))
