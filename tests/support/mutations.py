"""Realistic one-line bugs, each with the tests that detect it, and a command that applies them one at a time.

    python -m tests.support.mutations [--only NAME] [--jobs 1] [--table FILE]

The repository is copied to a temporary folder, so the working tree is never changed. `tests/test_mutations.py` checks
that every entry still fits the sources.
"""

from __future__ import annotations

import argparse
import compileall
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Literal, NamedTuple

ROOT = Path(__file__).parents[2]
COPIED = ("kvad", "tests", "docs", "examples", "recipes", "benchmarks", "scripts", "pyproject.toml", "README.md")
TIMEOUT = 180  # seconds per mutation

PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
# stale: the fragment or the tests do not exist any more; broken: the test fails without the bug too.
Outcome = Literal["caught", "MISSED", "timeout", "stale", "broken"]
OUTCOMES: dict[int | None, Outcome] = {0: "MISSED", None: "timeout", 4: "stale", 5: "stale"}  # by pytest's exit status


@dataclass(frozen=True)
class Mutation:
    """One bug: ``old`` occurs exactly once in ``file`` and is replaced by ``new``.

    ``tests`` are the narrowest test files that detect it, and ``keyword`` selects among their tests as pytest's -k.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    keyword: str = ""

    @property
    def command(self) -> list[str]:
        selected = ["-k", self.keyword] if self.keyword else []
        return [*PYTEST, "-x", *self.tests, *selected]

    def mutated(self, text: str) -> str | None:
        """Return the source with the bug, or None if the fragment does not occur exactly once."""
        return text.replace(self.old, self.new) if text.count(self.old) == 1 else None


class Result(NamedTuple):
    """Outcome of one mutation; ``first_failure`` is the test that failed first."""

    mutation: Mutation
    outcome: Outcome
    seconds: float
    first_failure: str = ""


# Files and tests that several entries name.
MANAGER = "kvad/cache/manager/kv_cache_manager.py"
ALLOCATION = "kvad/cache/manager/allocation.py"
MAPPING = "kvad/cache/manager/sequence_blocks.py"
POOL = "kvad/cache/manager/block_pool.py"
DEVICE = "kvad/cache/device/kv_cache.py"
EVICTION = "kvad/cache/device/eviction.py"
DISK = "kvad/cache/offload/disk_store.py"
PATTERN = "kvad/model_input.py"
QUANTIZE = "kvad/ops/quantize.py"
ATTENTION = "kvad/ops/attention.py"
POSITION_BIAS = "kvad/ops/position_bias.py"
SAMPLER = "kvad/engine/execution/sampler.py"
SCHEDULER = "kvad/engine/scheduling/scheduler.py"
ENGINE = "kvad/engine/engine.py"
CONTAINER = "kvad/storage/container.py"
ATOMIC = "kvad/storage/atomic.py"
FAMILIES = "kvad/checkpoint/families/"
COLLATE = "kvad/train/data/collate.py"
OPTIMIZER = "kvad/train/optim/optimizer.py"
SCHEDULES = "kvad/train/optim/schedules.py"

T_MANAGER = ("tests/cache/manager/test_kv_cache_manager.py",)
T_POOL = ("tests/cache/manager/test_block_pool.py",)
T_DEVICE = ("tests/cache/device/test_kv_cache.py",)
T_EVICTION = ("tests/cache/manager/test_allocation.py",)
T_POLICIES = ("tests/cache/test_policy.py", "tests/cache/test_policies_by_hand.py")
T_DISK = ("tests/cache/offload/test_disk_store.py",)
T_ORDER = ("tests/cache/offload/test_eviction_order.py",)
T_SWAP = ("tests/cache/offload/test_swap_space.py",)
T_QUANTIZE = ("tests/ops/test_quantize.py",)
T_ATTENTION = ("tests/ops/test_attention.py",)
T_ROTARY = ("tests/ops/test_rotary.py",)
T_SAMPLER = ("tests/engine/execution/test_sampler.py",)
T_SCHEDULER = ("tests/engine/scheduling/test_scheduler.py",)
T_BEAMS = ("tests/engine/scheduling/test_beam_search.py",)
T_AHEAD = ("tests/engine/execution/test_run_ahead.py",)
T_ENGINE = ("tests/engine/test_engine.py",)
T_ADAPTERS = ("tests/engine/test_adapters.py",)
T_REGIMES = ("tests/engine/test_rope_regimes.py",)
T_SOURCES = ("tests/engine/test_encoder_inputs.py",)
T_CONTAINER = ("tests/storage/test_container.py",)
T_ATOMIC = ("tests/storage/test_atomic.py",)
T_DAMAGE = ("tests/test_damaged_files.py",)
T_FAMILIES = ("tests/checkpoint/test_families.py",)
T_PACKING = ("tests/train/data/test_packing.py",)
T_OPTIMIZERS = ("tests/train/optim/test_optimizers.py",)
T_SCHEDULES = ("tests/train/optim/test_schedules.py",)

CACHE_MUTATIONS = (
    Mutation(
        "state-of-the-token-itself",
        "kvad/cache/device/views.py",
        "before = slice(None, None, sub_batch.num_new_tokens + 1)",
        "before = slice(1, None, sub_batch.num_new_tokens + 1)",
        ("tests/cache/test_cached_equals_uncached.py",),
        "states and recurrence and chunked",
    ),
    Mutation(
        "state-before-the-last-block",
        "kvad/cache/device/views.py",
        "state = states.data[blocks[:, 0]]",
        "state = states.data[blocks[:, 1]]",
        ("tests/cache/test_cached_equals_uncached.py",),
        "states and delta and chunked",
    ),
    Mutation(
        "documents-share-a-state",
        "kvad/ops/recurrence.py",
        "is_first[:, 1:] = document_id[:, 1:] != document_id[:, :-1]",
        "pass",
        ("tests/train/data/test_packing.py",),
        "states and recurrence",
    ),
    Mutation(
        "write-to-a-shared-block",
        ALLOCATION,
        "return refs > 1 or pool.prefixes[block] is not None",
        "return pool.prefixes[block] is not None",
        T_MANAGER,
    ),
    Mutation(
        "write-to-a-published-block",
        ALLOCATION,
        "return refs > 1 or pool.prefixes[block] is not None",
        "return refs > 1",
        T_MANAGER,
    ),
    Mutation(
        "window-begins-a-layer-late",
        "kvad/checkpoint/families/windowed.py",
        'index >= fields.integer("max_window_layers")',
        'index > fields.integer("max_window_layers")',
        ("tests/checkpoint/test_families.py",),
        "older_files",
    ),
    Mutation(
        "full-layers-a-layer-early",
        "kvad/checkpoint/families/_hf_class.py",
        "lambda index: (index + 1) % interval != 0",
        "lambda index: index % interval != 0",
        ("tests/checkpoint/test_families.py",),
        "older_files",
    ),
    Mutation("fork-without-references", MANAGER, "pool.incref(block)", "pass", T_MANAGER),
    Mutation("source-of-a-copy-never-freed", ALLOCATION, "copied_blocks.append(block)", "pass", T_MANAGER),
    Mutation(
        "new-block-not-cleared", ALLOCATION, "clear.append(group_blocks.blocks[index_in_sequence])", "pass", T_MANAGER
    ),
    Mutation(
        "positions-not-cleared",
        DEVICE,
        "positions.index_fill_(0, blocks, -1)",
        "positions.index_fill_(0, blocks[:0], -1)",
        T_DEVICE,
    ),
    Mutation(
        "copy-keeps-a-later-slot",
        DEVICE,
        "positions[target, num_retained:] = -1",
        "positions[target, num_retained + 1 :] = -1",
        T_DEVICE,
    ),
    Mutation(
        "written-positions-off-by-one",
        "kvad/cache/device/views.py",
        "self.slots, model_input.positions)",
        "self.slots, model_input.positions + 1)",
        ("tests/cache/test_cached_equals_uncached.py",),
        "test_a_cache_changes_nothing",
    ),
    Mutation(
        "window-mask-off-by-one", PATTERN, "recent = ahead < self.window", "recent = ahead <= self.window", T_ATTENTION
    ),
    Mutation(
        "window-freed-too-early",
        PATTERN,
        "first = max(0, query - self.window + 1)",
        "first = max(0, query - self.window + 2)",
        T_MANAGER,
    ),
    Mutation(
        "window-freed-too-late",
        PATTERN,
        "first = max(0, query - self.window + 1)",
        "first = max(0, query - self.window)",
        T_MANAGER,
    ),
    Mutation(
        "sinks-off-by-one",
        PATTERN,
        "return recent | (keys < self.num_sinks)",
        "return recent | (keys <= self.num_sinks)",
        ("tests/cache/test_position_policies.py",),
        "test_a_policy_is_a_mask",
    ),
    Mutation(
        "wider-layer-window-wins",
        "kvad/cache/policy.py",
        "spec.window <= window:",
        "spec.window >= window:",
        ("tests/cache/test_groups.py",),
    ),
    Mutation(
        "sinks-beyond-the-layers-window",
        "kvad/cache/policy.py",
        "layer_window=layer_window if num_sinks else None",
        "layer_window=None",
        T_POLICIES,
        "own_window",
    ),
    Mutation(
        "disk-order-by-name",
        DISK,
        "key=lambda file: (file.used_ns, file.name)",
        "key=lambda file: file.name",
        T_DISK,
        "order_of_use",
    ),
    Mutation(
        "hit-without-comparing-tokens",
        "kvad/cache/manager/prefix_index.py",
        "if node is None or node.parent is not parent or node.tokens != tokens:",
        "if node is None:",
        T_POOL,
    ),
    Mutation(
        "hit-leaves-no-token",
        MANAGER,
        "return len(token_ids) - 1 if max_tokens is None",
        "return len(token_ids) if max_tokens is None",
        T_MANAGER,
    ),
    Mutation("failed-blocks-stay-published", MANAGER, "if not publish:", "if publish is None:", T_MANAGER, "faulted"),
    Mutation(
        "published-before-logits",
        MANAGER,
        "self._prefix_cache.publish(sequence, sequence.length if num_sure is None else num_sure)",
        "self._prefix_cache.publish(sequence, sequence.length)",
        T_MANAGER,
        "published",
    ),
    Mutation(
        "refcounts-not-decremented",
        MANAGER,
        "pool.decref_all(group_blocks.blocks)",
        "pool.decref_all(group_blocks.blocks[1:])",
        T_MANAGER,
    ),
    Mutation(
        "free-list-from-the-wrong-end", POOL, "self._idle.popitem(last=False)", "self._idle.popitem(last=True)", T_POOL
    ),
    Mutation(
        "truncate-keeps-a-block",
        MAPPING,
        "stop, sinks = self.num_blocks(length), self.num_sink_blocks",
        "stop, sinks = self.num_blocks(length + 1), self.num_sink_blocks",
        T_MANAGER,
    ),
    Mutation(
        "truncate-keeps-the-history",
        "kvad/cache/manager/prefix_cache.py",
        'array("q", node.tokens).tolist()[:rest]',
        'array("q", node.tokens).tolist()',
        T_MANAGER,
        "truncation",
    ),
    Mutation(
        "ring-slot-off-by-one",
        MAPPING,
        "ring_offset(group_blocks.blocks[0], size, self.pattern.num_sinks, position)",
        "ring_offset(group_blocks.blocks[0], size, self.pattern.num_sinks, position + 1)",
        T_MANAGER,
    ),
    Mutation(
        "evicts-at-the-wrong-length",
        "kvad/cache/policy.py",
        "length > self.budget and length % self.interval == 0",
        "length > self.budget and length % self.interval == 1",
        T_EVICTION,
    ),
    Mutation(
        "eviction-budget-off-by-one",
        MAPPING,
        "return min(policy.budget, start - group_blocks.num_evicted_tokens)",
        "return min(policy.budget - 1, start - group_blocks.num_evicted_tokens)",
        T_EVICTION,
    ),
    Mutation(
        "oldest-recent-token-evicted",
        EVICTION,
        "context.positions >= context.length - policy.recent",
        "context.positions > context.length - policy.recent",
        T_POLICIES,
    ),
    Mutation(
        "retained-slots-not-in-order",
        EVICTION,
        ".indices[:, :num_retained].sort(dim=-1).values",
        ".indices[:, :num_retained]",
        T_POLICIES,
    ),
    Mutation(
        "observes-one-query-less",
        EVICTION,
        "next_eviction - positions <= policy.observed_queries",
        "next_eviction - positions < policy.observed_queries",
        T_POLICIES,
        "first_eviction and snapkv",
    ),
    Mutation(
        "attention-before-the-last-eviction-counts",
        EVICTION,
        "retained[-1][-1].zero_()",
        "pass",
        T_POLICIES,
        "every_eviction and snapkv",
    ),
    Mutation(
        "hit-of-another-history",
        "kvad/cache/manager/prefix_index.py",
        "or node.parent is not parent or node.tokens != tokens",
        "or node.tokens != tokens",
        T_POOL,
    ),
    Mutation(
        "fork-without-eviction-length",
        MAPPING,
        "new.num_evicted_tokens, new.last_eviction_length = old.num_evicted_tokens, old.last_eviction_length",
        "new.num_evicted_tokens = old.num_evicted_tokens",
        ("tests/engine/scheduling/test_streams.py",),
        "every_stream and tiered",
    ),
    Mutation("failed-entry-read-again", DISK, "self._order.remove(key)  # A failed", "pass  # A failed", T_DISK),
    Mutation(
        "pinned-prefix-not-flushed",
        "kvad/cache/offload/pinned.py",
        "[], durable=True",
        "[], durable=False",
        T_DISK,
        "prefix_is_flushed",
    ),
    Mutation(
        "other-groups-of-a-block-lost",
        "kvad/cache/offload/ram_store.py",
        "buffers = {**previous.raw([*previous.buffers, *previous.compressed], self._widths), **buffers}",
        "buffers = {**buffers}",
        ("tests/storage/test_byte_shuffle.py",),
    ),
    Mutation(
        "state-of-another-salt-resumed",
        "kvad/engine/resume.py",
        '"cache_salt": (cache_salt, state.salt)',
        '"cache_salt": (cache_salt, cache_salt)',
        ("tests/engine/test_sessions.py",),
        "unused_state",
    ),
    Mutation(
        "state-of-another-adapter-resumed",
        "kvad/engine/resume.py",
        'pairs["adapter"] = adapter, state.adapter',
        'pairs["adapter"] = adapter, adapter',
        T_ADAPTERS,
        "state",
    ),
    Mutation(
        "state-of-another-encoder-input-resumed",
        "kvad/engine/resume.py",
        "(None if encoder_tokens is None else tuple(encoder_tokens)) != state.encoder_tokens",
        "(encoder_tokens is None) != (state.encoder_tokens is None)",
        ("tests/engine/test_sessions.py",),
        "unused_state",
    ),
    Mutation(
        "average-attention-off-by-one",
        "kvad/cache/policy.py",
        "context.attention_mass / (context.length - context.positions)",
        "context.attention_mass / (context.length - context.positions + 1)",
        T_POLICIES,
    ),
    Mutation(
        "shared-summaries-written",
        ALLOCATION,
        "refs[level_blocks.blocks[-1]] > 1",
        "refs[level_blocks.blocks[-1]] > 2",
        T_EVICTION,
    ),
    Mutation(
        "int8-scale-over-the-wrong-axis",
        QUANTIZE,
        "x.abs().amax(dim=-1, keepdim=True)",
        "x.abs().amax(dim=-2, keepdim=True)",
        T_QUANTIZE,
    ),
    Mutation(
        "int4-halves-swapped",
        QUANTIZE,
        "return data[..., ::2] | data[..., 1::2] << 4",
        "return data[..., 1::2] | data[..., ::2] << 4",
        T_QUANTIZE,
    ),
    Mutation(
        "int4-zero-added-before-scaling",
        QUANTIZE,
        ".mul_(scale).add_(zero).to(dtype)",
        ".add_(zero).mul_(scale).to(dtype)",
        T_QUANTIZE,
    ),
    Mutation("channel-zero-not-the-middle", QUANTIZE, "else (low + high) / 2)", "else high)", T_QUANTIZE),
    Mutation("fp8-not-clamped", QUANTIZE, "x.clamp(-max_value, max_value) + (x - x)", "x + (x - x)", T_QUANTIZE),
    Mutation(
        "swap-in-without-eviction-length",
        "kvad/cache/manager/sequence_blocks.py",
        "replace(group, blocks=list(group.blocks))",
        "replace(group, blocks=list(group.blocks), last_eviction_length=0)",
        (*T_EVICTION, "tests/engine/scheduling/test_streams.py"),
        "swapped or every_stream_equals",
    ),
    Mutation(
        "swap-in-without-skipped-blocks",
        "kvad/cache/manager/sequence_blocks.py",
        "replace(group, blocks=list(group.blocks))",
        "replace(group, blocks=list(group.blocks), num_skipped_blocks=0)",
        T_EVICTION,
    ),
    Mutation(
        "swap-file-of-another-sequence",
        "kvad/cache/offload/swap_space.py",
        "if container.header.kind != CONTAINER_KIND or container.header.metadata != metadata:",
        "if container.header.kind != CONTAINER_KIND:",
        T_SWAP,
    ),
    Mutation(
        "swap-writes-the-next-sequence",
        "kvad/cache/offload/swap_space.py",
        "sorted(candidates, reverse=True)",
        "sorted(candidates)",
        T_SWAP,
    ),
    Mutation(
        "offload-checksum-not-compared",
        "kvad/cache/offload/token_offload.py",
        "elif zlib.crc32(data[begin:end]) != self._checksums[layer * self.share.disk + at + index]:",
        "elif self._checksums[layer * self.share.disk + at + index] < 0:",
        ("tests/cache/offload/test_token_offload.py",),
    ),
    Mutation("lru-reversed", DISK, "yield from self.sizes", "yield from reversed(self.sizes)", T_ORDER),
    Mutation("arc-target-inverted", DISK, "self.once.total > self.target", "self.once.total <= self.target", T_ORDER),
    Mutation("disk-read-is-no-use", DISK, "self._order.touch(key)", "pass", T_DISK),
    Mutation("pinned-entry-evicted", DISK, "if key not in self._pinned and key != keep", "if key != keep", T_DISK),
    Mutation(
        "disk-limit-exceeded",
        DISK,
        "while self._order.sizes.total + size > self.max_bytes:",
        "while self._order.sizes.total > self.max_bytes:",
        T_DISK,
    ),
    Mutation(
        "ram-store-drops-the-newest",
        "kvad/cache/offload/ram_store.py",
        "self.drop(next(iter(self._blocks)))",
        "self.drop(next(reversed(self._blocks)))",
        ("tests/storage/test_byte_shuffle.py",),
    ),
    Mutation(
        "ram-store-trusts-the-key",
        "kvad/cache/offload/ram_store.py",
        "if block is None or block.name != name or not block.has(groups):",
        "if block is None or not block.has(groups):",
        ("tests/engine/test_block_store.py",),
        "8_bit or another_prefix",
    ),
    Mutation(
        "encoder-blocks-written-twice",
        "kvad/cache/manager/encoder_blocks.py",
        "tuple(complete), written=True)",
        "tuple(complete), written=False)",
        T_SOURCES,
        "equal_source",
    ),
    Mutation(
        "proof-of-the-block-before-alone",
        "kvad/cache/manager/prefix_offload.py",
        'parent_digest = b"root" if ancestor.parent is None else ancestor.parent.full_digest',
        'parent_digest = b"root"',
        ("tests/engine/test_block_store.py",),
        "another_history",
    ),
    Mutation(
        "factor-applied-twice-to-moved-sinks",
        "kvad/ops/rotary.py",
        "return _rotate_at(x, by, rotary._replace(factor=1.0), at, torch.float64)",
        "return _rotate_at(x, by, rotary, at, torch.float64)",
        ("tests/cache/test_position_policies.py",),
        "renumbers and yarn",
    ),
    Mutation(
        "factor-not-removed-before-merging",
        EVICTION,
        "keys = ops.rotary.rotate_blocks(keys, -positions, rotary, 1 / rotary.factor)",
        "keys = ops.rotary.rotate_blocks(keys, -positions, rotary)",
        ("tests/cache/test_policies_by_hand.py",),
        "equals_the_simulation",
    ),
    Mutation(
        "summaries-without-the-factor",
        EVICTION,
        "summary_keys = ops.rotary.rotate_blocks(unrotated, mean_positions, rotary, rotary.factor).squeeze(2)",
        "summary_keys = ops.rotary.rotate_blocks(unrotated, mean_positions, rotary).squeeze(2)",
        ("tests/cache/test_policies_by_hand.py",),
        "equals_the_simulation",
    ),
    Mutation(
        "session-loses-the-rotary-pairs",
        "kvad/cache/sessions/state.py",
        "Rotary(inv_freq, bool(interleaved), float(factor))",
        "Rotary(inv_freq, False, float(factor))",
        ("tests/engine/test_sessions.py",),
        "rotaries",
    ),
    Mutation(
        "cross-attention-keys-not-clipped",
        "kvad/model/attention.py",
        "flat_k, flat_v = map(self._clip, project_together(self.kv, (self.k, self.v), encoder_output, adapters))",
        "flat_k, flat_v = project_together(self.kv, (self.k, self.v), encoder_output, adapters)",
        ("tests/model/test_topologies.py",),
        "clipped",
    ),
    Mutation(
        "adapter-merged-in-half-precision",
        "kvad/model/lora.py",
        "torch.promote_types(torch.promote_types(weight.dtype, target), torch.float32)",
        "torch.promote_types(weight.dtype, target)",
        ("tests/checkpoint/test_adapters.py",),
        "half_precision",
    ),
    Mutation(
        "mscale-all-dim-ignored",
        "kvad/model/positions.py",
        "if s.mscale and s.mscale_all_dim:",
        "if s.mscale and s.factor < 0:",
        ("tests/model/test_positions.py",),
        "mscale",
    ),
    Mutation(
        "values-not-clipped",
        "kvad/model/attention.py",
        "flat_q, flat_k, flat_v = map(self._clip, (flat_q, flat_k, flat_v))",
        "flat_q, flat_k = map(self._clip, (flat_q, flat_k))",
        ("tests/model/test_topologies.py",),
        "clipped",
    ),
    Mutation(
        "steps-of-a-template-not-counted",
        "kvad/text/template_worker.py",
        "        remaining -= 1",
        "        remaining -= 0",
        ("tests/text/test_template_worker.py",),
        "counted",
    ),
    Mutation(
        "shards-of-the-first-rank-everywhere",
        "kvad/parallel/mesh.py",
        "return even_share(kv_heads, parts, mesh.tensor_rank // kv_head_copies(kv_heads, mesh))",
        "return even_share(kv_heads, parts, 0)",
        ("tests/verify/test_mesh.py",),
        "exact",
    ),
    Mutation(
        "logits-from-joined-products",
        "kvad/llm.py",
        "with torch.enable_grad():",
        "with torch.no_grad():",
        ("tests/test_llm.py",),
        "joined",
    ),
    Mutation(
        "encoder-input-of-another-root",
        "kvad/cache/manager/encoder_blocks.py",
        r'b"source\0" + root + b"\0" + token_bytes',
        r'b"source\0" + token_bytes',
        T_SOURCES,
        "equal_source",
    ),
    Mutation(
        "encoder-blocks-not-cleared",
        "kvad/cache/manager/encoder_blocks.py",
        "clear.append(tuple(block for sequence in sequences for block in sequence.blocks[index]))",
        "clear.append(())",
        (*T_SOURCES, "tests/engine/scheduling/test_streams.py"),
        "source or translating",
    ),
)

ENGINE_MUTATIONS = (
    Mutation(
        "early-step-without-its-tokens",
        "kvad/engine/execution/model_runner.py",
        "model_input.token_ids[: len(token_ids)] = token_ids",
        "model_input.token_ids[: len(token_ids)].clone()",
        T_AHEAD,
    ),
    Mutation(
        "early-step-behind-the-last-token",
        SCHEDULER,
        "len(seq.token_ids) + 1 < seq.max_len",
        "len(seq.token_ids) < seq.max_len",
        T_AHEAD,
    ),
    Mutation(
        "early-step-only-without-waiting-sequences",
        SCHEDULER,
        "can_admit = bool(self._waiting) and not self._admission.is_blocked",
        "can_admit = bool(self._waiting)",
        T_AHEAD,
        "blocks",
    ),
    Mutation(
        "returning-copy-read-before-it-is-complete",
        "kvad/cache/device/host_copy.py",
        "self.stream.before_next_step(completion)",
        "self.stream.has_room(num_bytes)",
        ("tests/engine/test_swap.py",),
        "late",
    ),
    Mutation(
        "blocks-read-when-they-are-copied-out",
        "kvad/cache/device/host_copy.py",
        "self.stream.run(lambda: _copy(blocks, copies), blocks)",
        "self.stream.run(lambda: _copy([x.array[x.blocks] for x in selections], copies), blocks)",
        ("tests/engine/test_swap.py",),
        "late",
    ),
    Mutation(
        "counts-shared-by-copies-with-drafts",
        "kvad/engine/scheduling/sequence.py",
        "seq.token_counts = None if self.token_counts is None else self.token_counts.copy()",
        "seq.token_counts = self.token_counts",
        T_SAMPLER,
        "counted",
    ),
    Mutation(
        "counts-of-a-beam-that-was-forked",
        "kvad/engine/scheduling/sequence.py",
        "or self.request.beams is not None:",
        "or self.request.beams is False:",
        T_SAMPLER,
        "counted",
    ),
    Mutation(
        "penalties-of-the-neighbor",
        SAMPLER,
        "index = np.repeat(penalized, sizes),",
        "index = np.repeat(penalized[::-1], sizes),",
        T_SAMPLER,
        "batch",
    ),
    Mutation(
        "early-step-without-the-error-of-its-logits",
        SAMPLER,
        "chosen[:, 1] = ops.gpu.best_tokens(logits, num_tokens)[:, 1]",
        "chosen[:, 1] = ops.gpu.best_tokens(scores, num_tokens)[:, 1]",
        ("tests/engine/execution/test_gpu_kernels.py",),
        "errors",
    ),
    Mutation(
        "started-step-computed-again",
        "kvad/engine/execution/model_runner.py",
        "if started is not None and started[0] == output:",
        "if started is not None and started[0] is None:",
        T_AHEAD,
    ),
    Mutation(
        "stale-number-of-computed-tokens",
        SCHEDULER,
        "start, seq.num_computed_tokens = seq.num_computed_tokens, end",
        "start = seq.num_computed_tokens",
        T_SCHEDULER,
    ),
    Mutation(
        "waits-behind-an-aborted-sequence",
        SCHEDULER,
        "self._waiting.remove(seq)",
        "self._waiting.remove(seq); self._admission.unblock = lambda: None  # type: ignore",
        T_SCHEDULER,
        "aborted",
    ),
    Mutation(
        "published-beyond-finite-logits",
        SCHEDULER,
        "else start + logit_offsets.stop",
        "else end",
        T_SCHEDULER,
        "published",
    ),
    Mutation(
        "failed-sequence-published",
        SCHEDULER,
        'publish=reason != "error"',
        "publish=True",
        (*T_SCHEDULER, *T_ENGINE),
        "failed or nan",
    ),
    Mutation(
        "stop-token-before-min-tokens",
        SCHEDULER,
        "seq.num_generated_tokens > seq.sampling_params.min_tokens",
        "seq.num_generated_tokens >= seq.sampling_params.min_tokens",
        T_SCHEDULER,
        "stop",
    ),
    Mutation(
        "chunk-beyond-an-eviction",
        "kvad/engine/scheduling/batching.py",
        "self._kv_cache_manager.tokens_until_eviction(seq.seq_index),",
        "self._prefill_chunk_size,",
        ("tests/engine/scheduling/test_streams.py",),
        "every_stream and ranked",
    ),
    Mutation(
        "stale-block-table",
        "kvad/engine/execution/model_runner.py",
        "if written is None or written != blocks:",
        "if written is None:",
        ("tests/engine/execution/test_model_runner.py",),
    ),
    Mutation(
        "input-positions-from-zero",
        "kvad/engine/execution/model_runner.py",
        "positions.extend(range(scheduled.start, end))",
        "positions.extend(range(end - scheduled.start))",
        ("tests/engine/execution/test_model_runner.py",),
    ),
    Mutation(
        "sample-forked-after-its-last-token",
        "kvad/engine/scheduling/admission.py",
        "length = seq.num_prompt_tokens - 1",
        "length = seq.num_prompt_tokens",
        T_SCHEDULER,
    ),
    Mutation(
        "preemption-picks-the-oldest",
        "kvad/engine/scheduling/preemption.py",
        "for seq in reversed(running) if",
        "for seq in running if",
        T_SCHEDULER,
        "preempted or livelocks",
    ),
    Mutation(
        "swap-if-more-expensive",
        "kvad/engine/scheduling/preemption.py",
        "back=back) < tokens * self.seconds_per_token",
        "back=back) > tokens * self.seconds_per_token",
        ("tests/engine/scheduling/test_swap_costs.py",),
    ),
    Mutation("salt-not-in-the-root", ENGINE, r'f"{cache_salt}\0{self', r'f"\0{self', T_ENGINE, "salt"),
    Mutation("format-not-in-the-root", ENGINE, r"\0{self.cache.format_name}", r"\0", T_ENGINE, "formats"),
    Mutation(
        "rotary-regime-not-in-the-root",
        "kvad/engine/scheduling/sequence.py",
        "prefix_root + bytes(rope_regime)",
        "prefix_root + bytes(0 * rope_regime)",
        T_ENGINE,
        "regime",
    ),
    Mutation(
        "rotary-regime-of-max-tokens",
        SCHEDULER,
        "self.limits.rope_regime(len(prompt))",
        "self.limits.rope_regime(limit)",
        T_REGIMES,
        "max_tokens",
    ),
    Mutation(
        "rotary-regime-of-the-prompt",
        SCHEDULER,
        "if regime != seq.rope_regime:",
        "if regime < seq.rope_regime:",
        T_REGIMES,
        "fresh_prompt",
    ),
    Mutation(
        "sample-forked-from-another-regime",
        "kvad/engine/scheduling/admission.py",
        "if has_prompt and sibling.rope_regime == seq.rope_regime:",
        "if has_prompt:",
        T_REGIMES,
        "samples",
    ),
    Mutation(
        "bound-between-tokens-ignored",
        "kvad/engine/scheduling/batching.py",
        "if items and (prefilling or num_waiting) and self._step_costs is not None:",
        "if not items and (prefilling or num_waiting) and self._step_costs is not None:",
        ("tests/engine/scheduling/test_step_costs.py",),
        "within or alone",
    ),
    Mutation(
        "adapter-not-in-the-fingerprint",
        ENGINE,
        "filter(None, (self.config.adapter_fingerprint,",
        'filter(None, ("",',
        T_ENGINE,
        "adapter",
    ),
    Mutation(
        "adapters-share-cached-blocks", ENGINE, "if not adapter:", "if True:", T_ADAPTERS, "share_no_cached_blocks"
    ),
    Mutation(
        "adapter-of-other-tokens", "kvad/model/lora.py", "start += count", "start += 1", T_ADAPTERS, "mixed_batch"
    ),
    Mutation(
        "adapter-term-not-scaled",
        "kvad/model/lora.py",
        "= wide_a, scale * wide_b",
        "= wide_a, wide_b",
        T_ADAPTERS,
        "mixed_batch",
    ),
    Mutation(
        "adapter-left-out-by-the-native-kernels",
        "kvad/engine/execution/model_runner.py",
        "return None if layer else self.program",
        "return self.program",
        T_ADAPTERS,
        "router",
    ),
    Mutation(
        "native-adapter-of-a-joined-layer-in-other-columns",
        "kvad/engine/execution/native_program.py",
        "else _in_panels(b, column)",
        "else _in_panels(b, 0)",
        T_ADAPTERS,
        "native_kernels_add",
    ),
    Mutation(
        "end-of-a-turn-of-the-base-for-an-adapter",
        ENGINE,
        "return own.stop_tokens",
        "return self.config.stop_tokens",
        ("tests/test_llm_adapters.py",),
        "end_of_a_turn",
    ),
    Mutation(
        "adapter-not-in-the-model-fingerprint",
        "kvad/checkpoint/adapter.py",
        'f"{base} {self.adapter_fingerprint}".encode()',
        "base.encode()",
        ("tests/checkpoint/test_adapters.py",),
        "fingerprint",
    ),
    Mutation(
        "seed-not-mixed-with-the-sample",
        SAMPLER,
        "position >> 32, sample, 0)",
        "position >> 32, 0, 0)",
        ("tests/engine/execution/test_philox.py",),
    ),
    Mutation("one-philox-round-less", SAMPLER, "range(10)", "range(9)", ("tests/engine/execution/test_philox.py",)),
    Mutation(
        "padding-drawn-from-finite-logits",
        SAMPLER,
        "_select(logits, [rows[i] for i in drawn])[:, :num_tokens]",
        "_select(logits, [rows[i] for i in drawn])",
        T_SAMPLER,
    ),
    Mutation(
        "random-numbers-of-a-constant-position",
        SAMPLER,
        "[len(seq.token_ids) for seq in sequences])",
        "[seq.num_prompt_tokens for seq in sequences])",
        T_SAMPLER,
        "inverts",
    ),
    Mutation(
        "random-numbers-of-another-position",
        SAMPLER,
        "[len(seq.token_ids) for seq in sequences])",
        "[len(seq.token_ids) - 1 for seq in sequences])",
        T_SAMPLER,
        "inverts",
    ),
    Mutation(
        "logit-bias-of-the-neighbor",
        SAMPLER,
        "index = _to_device(rows, scores.device), _to_device(tokens, scores.device)",
        "index = _to_device(rows - 1, scores.device), _to_device(tokens, scores.device)",
        T_SAMPLER,
        "logit_bias",
    ),
    Mutation(
        "top-p-off-by-one",
        SAMPLER,
        "previous = probabilities.cumsum(dim=-1) - probabilities",
        "previous = probabilities.cumsum(dim=-1)",
        T_SAMPLER,
        "filters",
    ),
    Mutation(
        "top-k-off-by-one",
        SAMPLER,
        "best.gather(-1, (k - 1).clamp(min=0))",
        "best.gather(-1, k.clamp(max=max(ks) - 1))",
        T_SAMPLER,
        "filters or ties",
    ),
    Mutation(
        "repetition-penalty-without-the-prompt",
        SAMPLER,
        "repetition, presence, frequency = np.repeat(values, sizes, axis=0).T",
        "repetition, presence, frequency = np.where(generated > 0, np.repeat(values, sizes, axis=0).T, 1)",
        T_SAMPLER,
        "repetition",
    ),
    Mutation(
        "repetition-penalty-rewards-negative-logits",
        SAMPLER,
        "torch.where(old > 0, old / factor, old * factor)",
        "torch.where(old > 0, old / factor, old / factor)",
        T_SAMPLER,
        "repetition",
    ),
    Mutation(
        "presence-penalty-of-the-prompt",
        "kvad/engine/scheduling/sequence.py",
        "self.generated[index] += self.num_counted >= num_prompt_tokens",
        "self.generated[index] += 1",
        T_SAMPLER,
        "presence",
    ),
    Mutation(
        "min-tokens-off-by-one",
        SAMPLER,
        "len(tokens) - seq.num_prompt_tokens < params.min_tokens",
        "len(tokens) - seq.num_prompt_tokens <= params.min_tokens",
        T_SAMPLER,
        "min_tokens",
    ),
    Mutation(
        "prompt-logprobs-of-the-token-itself",
        SAMPLER,
        "first = scheduled.start + scheduled.logit_offsets[0] + 1",
        "first = scheduled.start + scheduled.logit_offsets[0]",
        ("tests/test_llm.py",),
        "prompt_logprobs_equal",
    ),
    Mutation(
        "stop-string-lost-across-tokens",
        "kvad/text/detokenizer.py",
        "range(min(self._max_stop_len - 1, len(text)), 0, -1)",
        "range(min(self._max_stop_len - 2, len(text)), 0, -1)",
        ("tests/text/test_stop_strings.py",),
    ),
    Mutation(
        "stop-string-before-min-tokens",
        "kvad/engine/output.py",
        "if self._min_tokens_left >= 0:",
        "if self._min_tokens_left > 0:",
        ("tests/engine/test_failures.py",),
        "min_tokens",
    ),
    Mutation(
        "length-penalty-with-the-wrong-sign",
        "kvad/engine/scheduling/beam_search.py",
        "base**params.length_penalty",
        "base**-params.length_penalty",
        T_BEAMS,
        "penalties or over or exhaustive",
    ),
    Mutation(
        "never-ignores-the-sign-of-the-length-penalty",
        "kvad/engine/scheduling/beam_search.py",
        'params.early_stopping == "never" and params.length_penalty > 0',
        'params.early_stopping == "never"',
        T_BEAMS,
        "negative_penalty",
    ),
    Mutation(
        "beam-ties-ignore-the-token",
        "kvad/engine/scheduling/beam_search.py",
        "all_candidates.sort()",
        "all_candidates.sort(key=lambda each: each[:2])",
        T_BEAMS,
        "ties",
    ),
    Mutation(
        "draws-ignore-the-tokens",
        "kvad/engine/scheduling/sequence.py",
        'self.draw_hash.update(struct.pack(f"<{len(new_tokens)}q", *new_tokens))',
        "pass",
        T_SAMPLER,
        "uncorrelated or function_of_the_tokens",
    ),
    Mutation(
        "draws-ignore-the-salt",
        "kvad/engine/scheduling/sequence.py",
        "self.sampling_params.seed, self.draw_salt, len(source)",
        "self.sampling_params.seed, 0, len(source)",
        T_SAMPLER,
        "uncorrelated",
    ),
    Mutation(
        "beam-search-ends-one-hypothesis-late",
        "kvad/engine/scheduling/beam_search.py",
        "if len(self.finished) >= self.num_beams:",
        "if len(self.finished) > self.num_beams:",
        T_BEAMS,
        "over or transformers",
    ),
)

OPS_MUTATIONS = (
    Mutation(
        "windowed-training-in-one-block",
        ATTENTION,
        "if new > 1 and _needs_grad(q) and mask.is_plain_causal:",
        "if new > 1 and _needs_grad(q):",
        T_ATTENTION,
        "whole_mask",
    ),
    Mutation(
        "rotation-in-the-negative-sense",
        "kvad/ops/rotary.py",
        "torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)",
        "torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1)",
        T_ROTARY,
    ),
    Mutation(
        "rotary-pairs-swapped",
        "kvad/ops/rotary.py",
        "a, b = head[..., 0::2], head[..., 1::2]",
        "b, a = head[..., 0::2], head[..., 1::2]",
        T_ROTARY,
    ),
    Mutation(
        "softcap-before-scale",
        ATTENTION,
        "params.logit_softcap * torch.tanh(logits / params.logit_softcap)",
        "params.scale * params.logit_softcap * torch.tanh(logits / params.scale / params.logit_softcap)",
        T_ATTENTION,
    ),
    Mutation(
        "mask-of-minus-one-billion",
        ATTENTION,
        "mask.visible(low, high), heads), -math.inf)",
        "mask.visible(low, high), heads), -1e9)",
        T_ATTENTION,
    ),
    Mutation(
        "softmax-not-in-float32",
        ATTENTION,
        "wide = torch.promote_types(q.dtype, torch.float32)",
        "wide = q.dtype",
        T_ATTENTION,
    ),
    Mutation(
        "sinks-not-shifted-by-the-maximum",
        ATTENTION,
        "total = total + (sinks - top).exp()",
        "total = total + sinks.exp()",
        T_ATTENTION,
    ),
    Mutation("causal-off-by-one", PATTERN, "seen = seen & (ahead >= 0)", "seen = seen & (ahead > 0)", T_ATTENTION),
    Mutation(
        "document-ids-ignored",
        PATTERN,
        "if q.document_id is not None and k.document_id is not None:",
        "if q.document_id is not None and k.document_id is None:",
        T_PACKING,
    ),
    Mutation(
        "alibi-factor-ignored",
        POSITION_BIAS,
        "return -slopes * bias.factor * ahead.abs()",
        "return -slopes * ahead.abs()",
        ("tests/model/test_positions.py",),
        "alibi",
    ),
    Mutation(
        "alibi-slope-of-the-wrong-sign",
        POSITION_BIAS,
        "return -slopes * bias.factor * ahead.abs()",
        "return slopes * bias.factor * ahead.abs()",
        ("tests/model/test_positions.py",),
        "alibi",
    ),
    Mutation(
        "relative-distance-of-the-wrong-sign",
        POSITION_BIAS,
        "distance = (-ahead).clamp(min=0)",
        "distance = ahead.clamp(min=0)",
        ("tests/model/test_positions.py",),
        "t5",
    ),
    Mutation(
        "smoothing-lost-in-the-gradient",
        "kvad/ops/cross_entropy.py",
        "probs.new_full(target.shape, smoothing - 1)",
        "probs.new_full(target.shape, -1.0)",
        ("tests/ops/test_cross_entropy.py",),
    ),
)

STORAGE_MUTATIONS = (
    Mutation(
        "session-replaces-a-changed-one",
        "kvad/engine/session.py",
        'if writer.get("revision") != self._revisions.get(path, ""):',
        'if "revision" not in writer:',
        ("tests/test_llm_sessions.py",),
        "meanwhile",
    ),
    Mutation("folder-name-not-flushed", ATOMIC, "fsync_path(final.parent)", "pass", T_ATOMIC),
    Mutation("renamed-before-flush", ATOMIC, "_flush_tree(temporary)", "pass", T_ATOMIC),
    Mutation(
        "single-file-not-flushed",
        ATOMIC,
        "fsync_path(temporary)",
        "pass",
        (*T_ATOMIC, "tests/checkpoint/test_power_loss.py"),
    ),
    Mutation(
        "section-checksum-not-compared", CONTAINER, "if crc32(target) != section.crc:", "if not target:", T_CONTAINER
    ),
    Mutation(
        "longer-container-accepted", CONTAINER, "if header.nbytes != size:", "if header.nbytes > size:", T_CONTAINER
    ),
    Mutation(
        "set-aside-by-a-living-process-restored",
        ATOMIC,
        "if not left.in_use and not (parent / left.name).exists():",
        "if not (parent / left.name).exists():",
        T_ATOMIC,
    ),
    Mutation(
        "replaced-folder-deleted-in-place", ATOMIC, "_delete(set_aside, final)", "shutil.rmtree(set_aside)", T_ATOMIC
    ),
    Mutation(
        "weights-not-compared",
        "kvad/checkpoint/handle.py",
        'check_file(self.path / name, entry, "size" if verification.is_current else "crc32")',
        "pass",
        T_DAMAGE,
    ),
    Mutation(
        "text-files-not-compared", "kvad/checkpoint/hf_layout.py", "check_text(self.path, self.files)", "pass", T_DAMAGE
    ),
    Mutation(
        "resumed-step-not-compared", "kvad/train/loop/run.py", "checkpoint.folder.check_all(newest)", "pass", T_DAMAGE
    ),
    Mutation(
        "adapter-sizes-only",
        "kvad/checkpoint/folder.py",
        '"size" if name.startswith(f"{TRAINING}/") else "sha256"',
        '"size"',
        T_DAMAGE,
    ),
    Mutation(
        "prepared-tokens-not-compared",
        "kvad/train/setup/prepared.py",
        "self._check_hashes(self.hashes)",
        "pass",
        ("tests/train/setup/test_prepared.py",),
    ),
    Mutation(
        "run-tokens-not-compared",
        "kvad/train/data/token_store.py",
        "and not find_corrupt_files(folder, hashes(manifest))",
        "",
        ("tests/train/data/test_token_store.py",),
    ),
    Mutation("container-not-flushed", CONTAINER, "fs.sync(file)", "pass", T_CONTAINER),
    Mutation("container-name-not-flushed", CONTAINER, "fs.sync_dir(path.parent)", "pass", T_CONTAINER),
    Mutation(
        "partial-file-under-its-final-name",
        CONTAINER,
        '    temporary = temp_path(path, "tmp")',
        "    temporary = path",
        (*T_CONTAINER, *T_DISK),
    ),
    Mutation(
        "container-header-not-bounded",
        CONTAINER,
        "if length > min(MAX_HEADER_BYTES, size - _PREFIX - len(END)):",
        "if length > size + MAX_HEADER_BYTES:",
        T_CONTAINER,
    ),
    Mutation(
        "safetensors-header-not-bounded",
        "kvad/checkpoint/safetensors_header.py",
        "if length > MAX_HEADER_BYTES:",
        "if length > LARGEST:",
        ("tests/checkpoint/test_safetensors_io.py",),
        "header",
    ),
    Mutation(
        "overlapping-tensors-accepted",
        "kvad/checkpoint/safetensors_header.py",
        "if tensor.start < end:",
        "if tensor.start + tensor.bytes < end:",
        ("tests/checkpoint/test_safetensors_io.py",),
        "broken",
    ),
    Mutation(
        "untied-head-of-the-file-dropped",
        "kvad/checkpoint/conversion.py",
        "config = replace(config, tie_embeddings=False)",
        "pass",
        ("tests/checkpoint/test_encoder_decoders.py", "tests/checkpoint/test_export.py", *T_FAMILIES),
        "tied or table or head",
    ),
    Mutation(
        "weights-not-transposed",
        "kvad/checkpoint/conversion.py",
        "return [tensor.t() if tensor.dim() == 2 else tensor for tensor in tensors]",
        "return list(tensors)",
        T_FAMILIES,
        "gpt2",
    ),
    Mutation(
        "fused-heads-not-permuted",
        f"{FAMILIES}_hf_class.py",
        "if groups is None else conversion.grouped_transform(groups(attention))",
        "if groups is None else conversion.grouped_transform(1)",
        T_FAMILIES,
        "bloom or neox or bigcode",
    ),
    Mutation(
        "keys-and-values-permuted",
        f"{FAMILIES}gpt.py",
        '.attention.{part}" for part in "qvk")',
        '.attention.{part}" for part in "qkv")',
        T_FAMILIES,
        "codegen",
    ),
    Mutation(
        "gate-and-up-exchanged",
        f"{FAMILIES}_hf_class.py",
        'gate_up_names = f"{kvad_prefix}.mlp.gate", f"{kvad_prefix}.mlp.up"',
        'gate_up_names = f"{kvad_prefix}.mlp.up", f"{kvad_prefix}.mlp.gate"',
        T_FAMILIES,
        "phi3",
    ),
    Mutation(
        "embedding-multiplier-ignored",
        f"{FAMILIES}_fields.py",
        'number("embedding_multiplier", 1.0)',
        'number("embedding_scale", 1.0)',
        T_FAMILIES,
        "granite",
    ),
    Mutation(
        "rope-theta-ignored",
        f"{FAMILIES}_fields.py",
        'values.number("rope_theta", default=',
        'values.number("theta", default=',
        T_FAMILIES,
        "llama or mistral or qwen",
    ),
    Mutation(
        "oldest-steps-retained",
        "kvad/checkpoint/folder.py",
        "for step in steps[:-keep]:",
        "for step in steps[keep:]:",
        ("tests/checkpoint/test_native.py", "tests/checkpoint/test_best_checkpoint.py"),
        "run or prun",
    ),
)

TRAIN_MUTATIONS = (
    Mutation(
        "evaluation-divided-by-batches",
        "kvad/train/objectives/cross_entropy.py",
        "count += len(batch.targets)",
        "count += 1",
        ("tests/train/objectives/test_cross_entropy.py",),
    ),
    Mutation(
        "gradient-of-the-micro-batch-mean",
        "kvad/ops/cross_entropy.py",
        "factor = x.to(dtype), weight.to(dtype), scale / total",
        "factor = x.to(dtype), weight.to(dtype), scale / x.shape[0]",
        ("tests/ops/test_cross_entropy.py", "tests/train/objectives/test_cross_entropy.py"),
    ),
    Mutation(
        "gradient-not-averaged-over-micro-batches",
        "kvad/train/loop/trainer.py",
        "total = sum(len(batch.targets) for batch in batches)",
        "total = len(batches[0].targets)",
        ("tests/train/loop/test_run.py",),
        "micro_batches",
    ),
    Mutation(
        "padding-counted",
        COLLATE,
        "targets = _padded([[segment.targets for segment in row] for row in rows], -1)",
        "targets = _padded([[segment.targets for segment in row] for row in rows], 0)",
        ("tests/train/data/test_text_packer.py", *T_PACKING),
    ),
    Mutation(
        "documents-of-a-row-share-an-id",
        COLLATE,
        "[np.full(len(piece), n) for n,",
        "[np.full(len(piece), 0) for n,",
        T_PACKING,
    ),
    Mutation(
        "documents-not-shifted",
        "kvad/train/data/packers.py",
        "return Segment(tokens[:-1], tokens[1:])",
        "return Segment(tokens[:-1], tokens[:-1])",
        T_PACKING,
    ),
    Mutation(
        "targets-of-pairs-not-shifted",
        "kvad/train/data/packers.py",
        "return Segment(target[:-1], target[1:], source)",
        "return Segment(target[:-1], target[:-1], source)",
        ("tests/train/data/test_text_packer.py",),
    ),
    Mutation(
        "mask-of-replies-off-by-one",
        "kvad/train/data/packers.py",
        "np.where(values[1:], tokens[1:], -1)",
        "np.where(values[:-1], tokens[1:], -1)",
        ("tests/train/sources/test_examples.py", "tests/train/sources/test_chat.py"),
    ),
    Mutation(
        "biases-decay",
        OPTIMIZER,
        "return parameter.dim() >= 2 and not is_excluded",
        "return not is_excluded",
        ("tests/train/optim/test_optimizer.py",),
    ),
    Mutation(
        "norms-of-heads-decay",
        OPTIMIZER,
        "return parameter.dim() >= 2 and not is_excluded",
        "return parameter.dim() >= 2",
        (*T_OPTIMIZERS, "tests/train/optim/test_optimizer.py"),
        "decay",
    ),
    Mutation(
        "gradient-not-clipped",
        OPTIMIZER,
        "clip_grad_norm_(parameters, self._config.max_grad_norm)",
        "clip_grad_norm_(parameters, math.inf)",
        ("tests/train/optim/test_optimizer.py",),
    ),
    Mutation(
        "gradient-not-unscaled",
        OPTIMIZER,
        "parameter.grad.div_(self.scale.scale)",
        "parameter.grad.div_(1.0)",
        T_OPTIMIZERS,
        "scale or overflow",
    ),
    Mutation(
        "skipped-step-applied",
        OPTIMIZER,
        "if self.scale is None or self.scale.update(norm):",
        "if self.scale is None or self.scale.update(norm) or norm:",
        T_OPTIMIZERS,
        "scale or overflow",
    ),
    Mutation(
        "warmup-off-by-one",
        SCHEDULES,
        "now = step + 1",
        "now = step",
        ("tests/train/optim/test_optimizer.py", *T_SCHEDULES),
    ),
    Mutation(
        "cosine-off-by-one",
        SCHEDULES,
        "progress = (step - warmup) / max(1, last - warmup)",
        "progress = (step + 1 - warmup) / max(1, last - warmup)",
        ("tests/train/optim/test_optimizer.py",),
    ),
    Mutation(
        "plateau-patience-off-by-one",
        SCHEDULES,
        "if self.bad > self._patience:",
        "if self.bad >= self._patience:",
        T_SCHEDULES,
    ),
    Mutation(
        "ema-without-bias-correction",
        OPTIMIZER,
        "share = (1 - self._decay) / (1 - self._decay**self._steps)",
        "share = 1 - self._decay",
        T_OPTIMIZERS,
        "ema",
    ),
    Mutation(
        "relative-tables-decay",
        OPTIMIZER,
        '"norm" in part or part == "relative_bias" for part',
        '"norm" in part for part',
        ("tests/train/optim/test_optimizer.py",),
        "decay",
    ),
    Mutation(
        "wsd-decays-early",
        SCHEDULES,
        "(run_progress - (1 - config.decay_fraction)) /",
        "(run_progress - 0.9 * (1 - config.decay_fraction)) /",
        T_SCHEDULES,
        "wsd",
    ),
    Mutation(
        "muon-rate-without-the-schedule",
        OPTIMIZER,
        "rate * (self._config.muon_lr / self.schedule.peak) if",
        "self._config.muon_lr if",
        T_OPTIMIZERS,
        "rate_of_matrices",
    ),
    Mutation(
        "last-piece-lost",
        "kvad/train/data/packing.py",
        "count = 1 + -(-(lengths - first) // context)",
        "count = 1 + (lengths - first) // context",
        T_PACKING,
        "docstring",
    ),
    Mutation(
        "crop-short",
        "kvad/train/data/packing.py",
        "-1 if at >= 0 else room))",
        "-1 if at >= 0 else room - 1))",
        T_PACKING,
        "docstring",
    ),
    Mutation(
        "saved-weights-alias-the-live-ones",
        "kvad/train/loop/async_checkpointer.py",
        "copies[name] = buffer.copy_(tensor)",
        "copies[name] = tensor",
        ("tests/train/loop/test_async_checkpointer.py",),
        "between_two_steps",
    ),
    Mutation(
        "average-of-one-copy-more",
        OPTIMIZER,
        "len(self._copies) + 1 - self._max_copies",
        "len(self._copies) - self._max_copies",
        T_OPTIMIZERS,
        "average",
    ),
    Mutation(
        "steps-repeat-rows",
        "kvad/train/data/packed_dataset.py",
        "np.arange(self._step_rows) + step * self._step_rows",
        "np.arange(self._step_rows) + step * self._train.batch_size",
        ("tests/train/loop/test_run.py",),
        "micro_batches",
    ),
    Mutation(
        "resume-draws-other-rows",
        "kvad/train/loop/trainer.py",
        "return self.data.micro_batches(self.state.step)",
        "return self.data.micro_batches(self.state.step if self.speed.seconds_per_step else 0)",
        ("tests/train/loop/test_run.py",),
        "resume_is_exact",
    ),
    Mutation(
        "resume-without-moments",
        "kvad/train/loop/run.py",
        "self.optimization.load_state_tensors(stored.tensors)",
        "pass",
        ("tests/train/loop/test_run.py",),
        "resume_is_exact",
    ),
    Mutation(
        "every-row-masked-alike",
        "kvad/train/data/packed_dataset.py",
        "return seeded_rng(seed, number, stream)",
        "return seeded_rng(seed, stream)",
        ("tests/train/objectives/test_masked_lm.py",),
    ),
    Mutation(
        "every-epoch-in-the-same-order",
        "kvad/train/data/packed_dataset.py",
        "self._order(int(epoch))[inside[in_epoch]]",
        "self._order(0)[inside[in_epoch]]",
        ("tests/train/data",),
    ),
    Mutation(
        "selection-bias-in-the-weights",
        "kvad/model/layers.py",
        "weights = scores.gather(-1, experts)",
        "weights = ranking.gather(-1, experts)",
        ("tests/model/test_layers.py",),
        "routers",
    ),
    Mutation(
        "groups-of-experts-by-their-best-only",
        "kvad/model/layers.py",
        "groups.topk(2, dim=-1).values.sum(dim=-1)",
        "groups.amax(dim=-1)",
        ("tests/model/test_layers.py",),
        "routers",
    ),
    Mutation(
        "selection-biases-move-away-from-balance",
        "kvad/train/objectives/expert_balance.py",
        "(wide.mean() - wide).sign()",
        "(wide - wide.mean()).sign()",
        ("tests/train/objectives/test_expert_balance.py",),
        "biases_move",
    ),
    Mutation(
        "padding-counts-as-load",
        "kvad/train/objectives/expert_balance.py",
        "is_token = side.document_ids >= 0",
        "is_token = side.document_ids >= -1",
        ("tests/train/objectives/test_expert_balance.py",),
        "papers",
    ),
    Mutation(
        "balancing-weighs-micro-batches-equally",
        "kvad/train/objectives/cross_entropy.py",
        "* (len(batch.targets) / total)",
        "* 0.5",
        ("tests/train/objectives/test_expert_balance.py",),
        "gradients",
    ),
    Mutation(
        "selection-biases-rounded-to-the-dtype",
        "kvad/config/parameter_shapes.py",
        'return name.endswith((".selection_bias", ".e_score_correction_bias"))',
        "return False",
        ("tests/checkpoint/test_export.py",),
        "selection",
    ),
    Mutation(
        "dropout-in-evaluation",
        "kvad/model/layers.py",
        "return rate > 0 and module.training and torch.is_grad_enabled()",
        "return rate > 0",
        ("tests/train/loop/test_dropout.py",),
        "share",
    ),
    Mutation(
        "ragged-micro-batches-count-as-the-largest",
        "kvad/train/loop/trainer.py",
        "total = sum(len(batch.targets) for batch in batches)",
        "total = len(batches) * max(len(batch.targets) for batch in batches)",
        ("tests/train/objectives/test_all_objectives.py",),
        "training_is_independent",
    ),
    Mutation(
        "rotary-regime-of-the-batch-width",
        COLLATE,
        "seq_lens=torch.full((tokens.size,), shape.seq_len, device=shape.device)",
        "seq_lens=torch.full((tokens.size,), tokens.shape[1], device=shape.device)",
        T_PACKING,
        "rotary_scaling",
    ),
    Mutation(
        "evaluation-hides-what-step-0-hides",
        "kvad/train/data/packed_dataset.py",
        "row_rng(self._train.seed, EVAL_STREAM, number + index)",
        "row_rng(self._train.seed, TRAIN_STREAM, number + index)",
        ("tests/train/objectives/test_masked_lm.py",),
        "draws_differ",
    ),
    Mutation(
        "run-folder-not-locked",
        "kvad/train/loop/run.py",
        "return setup.preflight.lock_run(self.out) if self.data_parallel.is_main else nullcontext()",
        "return nullcontext()",
        ("tests/train/loop/test_run_lock.py",),
    ),
    Mutation(
        "longer-run-with-the-old-schedule",
        "kvad/train/loop/run.py",
        "return TrainingRun(config or stored, corpus or paths, out, **options).resume(stored)",
        "return TrainingRun(stored, corpus or paths, out, **options).resume(stored)",
        ("tests/train/loop/test_run.py",),
        "follows_the_new_length",
    ),
    Mutation(
        "worst-evaluation-is-the-best",
        "kvad/train/loop/trainer.py",
        "state.val_loss < state.best:",
        "state.val_loss > state.best:",
        ("tests/train/loop/test_async_checkpointer.py",),
        "best",
    ),
)

MUTATIONS = CACHE_MUTATIONS + ENGINE_MUTATIONS + OPS_MUTATIONS + STORAGE_MUTATIONS + TRAIN_MUTATIONS


def copy_repository(target: Path) -> None:
    """Copy the files that the tests read to a new folder, and compile kvad once."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        elif source.exists():
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)
    compileall.compile_dir(target / "kvad", quiet=1)


def run_mutation(mutation: Mutation, copy: Path) -> Result:
    """Apply one bug to a copy of the repository, run its tests there, and undo it."""
    path, started = copy / mutation.file, time.monotonic()
    original, modified = path.read_text(encoding="utf-8"), path.stat().st_mtime_ns
    mutated = mutation.mutated(original)
    if mutated is None:
        return Result(mutation, "stale", 0.0)
    path.write_text(mutated, encoding="utf-8")
    try:
        status, failures = run_pytest(mutation.command, copy)
    finally:
        path.write_text(original, encoding="utf-8")
        os.utime(path, ns=(modified, modified))  # its .pyc is valid again
    return Result(mutation, OUTCOMES.get(status, "caught"), time.monotonic() - started, failures[0] if failures else "")


def run_pytest(command: Sequence[str], copy: Path, timeout: float = TIMEOUT) -> tuple[int | None, list[str]]:
    """Run pytest in a copy of the repository; return its exit status (None: timeout) and the failed tests."""
    # A mutated file is compiled in memory: a .pyc of the same second and size could hide the next change.
    env = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=copy, env=env, timeout=timeout, capture_output=True, text=True, check=False)
    except subprocess.TimeoutExpired:
        return None, []
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return done.returncode, [line.split(" ", 1)[1].split(" - ")[0] for line in failed]


def fails_without_bug(results: Sequence[Result], copy: Path) -> set[str]:
    """Return the tests that detected a bug and fail in the unchanged repository too."""
    names = sorted({result.first_failure for result in results if "::" in result.first_failure})
    command = [*PYTEST, *names]
    return set(run_pytest(command, copy, timeout=TIMEOUT * max(1, len(names)))[1]) if names else set()


def run_mutations(mutations: Sequence[Mutation], copies: Sequence[Path]) -> Iterator[Result]:
    """Yield the result of each mutation in order; each copy of the repository has one at a time."""
    unused: SimpleQueue[Path] = SimpleQueue()
    for copy in copies:
        unused.put(copy)

    def run(mutation: Mutation) -> Result:
        copy = unused.get()
        try:
            return run_mutation(mutation, copy)
        finally:
            unused.put(copy)

    with ThreadPoolExecutor(len(copies)) as executor:
        yield from executor.map(run, mutations)


def table_row(result: Result) -> str:
    """Return a line of the Markdown table."""
    caught_by = result.first_failure if result.outcome == "caught" else result.outcome
    return f"| {result.mutation.name} | {result.mutation.file} | {caught_by} | {result.seconds:.1f} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the mutations; return 1 if one was missed or does not fit the sources any more."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--only", metavar="NAME", action="append", help="run this mutation; may be repeated")
    parser.add_argument("--jobs", type=int, default=1, help="number of copies that run at the same time")
    parser.add_argument("--table", type=Path, metavar="FILE", help="append the results to a Markdown table")
    options = parser.parse_args(arguments)
    chosen = [mutation for mutation in MUTATIONS if not options.only or mutation.name in options.only]
    if not chosen:
        parser.error(f"no mutation has this name: {', '.join(options.only)}")
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="kvad-mutations-") as folder:
        copies = [Path(folder) / str(number) for number in range(options.jobs)]
        for copy in copies:
            copy_repository(copy)
        for result in run_mutations(chosen, copies):
            results.append(result)
            print(f"{result.outcome} {result.seconds:.1f} {result.mutation.name} {result.mutation.file}", flush=True)
            if options.table is not None:
                with options.table.open("a", encoding="utf-8") as file:
                    file.write(table_row(result) + "\n")
        broken = fails_without_bug(results, copies[0])
    results = [result._replace(outcome="broken") if result.first_failure in broken else result for result in results]
    failed = [f"{result.mutation.name} ({result.outcome})" for result in results if result.outcome != "caught"]
    print(f"{len(results) - len(failed)} of {len(results)} caught{'; not: ' if failed else ''}{', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
