"""Random sequences on the real KVCacheManager, over the fake cache of ``tests/support/streams.py``."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from kvad.cache.manager.kv_cache_manager import KVCacheManager
from kvad.cache.manager.prefix_index import digest
from kvad.cache.manager.sequence_blocks import SwappedSequence
from tests.support.manager_driver import unpublish_all
from tests.support.streams import FakeKVCache, Mismatch, Setup, SoloSequence


class ManagerHarness:
    """Sequences that extend by spans (partly discarded, as drafts are), fork, truncate, swap and end, by index."""

    def __init__(
        self,
        setup: Setup,
        manager: Callable[..., KVCacheManager] = KVCacheManager,
        kv_cache: type[FakeKVCache] = FakeKVCache,
    ) -> None:
        self.setup, self.max_num_seqs = setup, setup.config.max_num_seqs
        groups = setup.groups()
        setup.check_groups(groups)
        self.manager = manager(
            groups,
            prefix_caching=setup.config.enable_prefix_caching,
            max_num_seqs=self.max_num_seqs,
            hash_fn=lambda data: digest(data)[: setup.hash_bits // 8],
        )
        self.kv_cache = kv_cache(groups)
        self.max_len = min(setup.config.max_seq_len, self.manager.capacity)
        self.solos: dict[int, SoloSequence] = {}
        self.swapped: list[tuple[SwappedSequence, SoloSequence]] = []
        self.num_forks = self.num_swapped_in = 0
        specs = (*setup.specs, *setup.config.restrict(setup.specs))
        self.drops_tokens = self.manager.lossy or any(spec.window is not None for spec in specs)

    def admit(self, index: int, tokens: Sequence[int], root: bytes) -> None:
        length = self.manager.add_sequence(index, tokens, root)
        if index in self.solos:
            assert length is None
            return
        assert length is not None and 0 <= length < max(1, len(tokens)) and length % self.setup.config.block_size == 0
        source = (1, 2, 0, len(root)) if any(spec.is_cross_attention for spec in self.setup.specs) else ()
        if source and not self.attach(index, source, root):
            self.manager.free(index)
            return
        self.solos[index] = SoloSequence(root, self.setup.groups(), tokens[:length], source)

    def attach(self, index: int, source: tuple[int, ...], root: bytes) -> bool:
        is_cached = self.manager.attach_encoder_input(index, source, root)
        if is_cached is False:
            self.kv_cache.encode([source], self.manager.allocate_encoder_slots([index]))
            self.manager.commit_encoder_blocks(index)
        return is_cached is not None

    def extend(self, spans: dict[int, tuple[list[int], int]]) -> bool:
        """Write tokens and commit the first ones, by index (tokens, number to commit); False if the pool is full."""
        lengths = {index: len(self.solos[index].tokens) for index in spans}
        spans = {
            index: (tokens[: min(self.max_len - lengths[index], self.manager.tokens_until_eviction(index))], count)
            for index, (tokens, count) in spans.items()
            if lengths[index] < self.max_len
        }
        if not spans:
            return True
        stats = self.manager.stats()
        allocation = self.manager.allocate_slots(
            [(index, lengths[index], len(tokens)) for index, (tokens, _) in spans.items()]
        )
        if allocation is None:
            assert self.manager.stats() == stats, "a refused allocation changed something"
            return False
        written = [(lengths[index], tokens) for index, (tokens, _) in spans.items()]
        roots = [self.solos[index].root for index in spans]
        results = self.kv_cache.run(written, roots, allocation, [1 << 30] * len(written))
        for (index, (tokens, count)), values in zip(spans.items(), results, strict=True):
            solo = self.solos[index]
            if [solo.push(token) for token in tokens] != values:
                raise Mismatch(f"sequence {index} at {lengths[index]} + {len(tokens)} differs from its solo run")
            solo.truncate(lengths[index] + min(count, len(tokens)))
            self.manager.commit(index, tokens[:count])
        self.kv_cache.fill_unowned(self.manager)
        return True

    def fork(self, index: int, child: int, length: int) -> None:
        stats = self.manager.stats()
        if self.manager.fork(index, child, length):
            self.solos[child] = self.solos[index].with_tokens(self.solos[index].tokens[:length])
            self.num_forks += 1
        else:
            assert self.manager.stats() == stats
            assert self.drops_tokens

    def truncate(self, index: int, length: int) -> None:
        if index not in self.manager._swapped.pending_swap_ins:
            remaining = self.manager.truncate(index, length)
            assert remaining in (0, min(length, len(self.solos[index].tokens)))
            assert remaining or not length or self.drops_tokens
            self.solos[index].truncate(remaining)

    def swap_out(self, index: int) -> None:
        if self.manager.lossy and not self.solos[index].source:
            self.swapped.append((self.manager.swap_out(index), self.solos.pop(index)))

    def swap_in(self, index: int) -> None:
        if self.swapped and index not in self.solos and self.manager.swap_in(index, self.swapped[0][0]):
            self.solos[index] = self.swapped.pop(0)[1]
            self.num_swapped_in += 1

    def free(self, index: int, publish: bool) -> None:
        self.manager.free(index, publish)
        del self.solos[index]

    def check(self) -> None:
        self.manager.check()
        for index, solo in self.solos.items():
            assert self.manager.seq_len(index) == len(solo.tokens)

    # -------- random operations

    def operate(self, rng: random.Random, stems: Sequence[Sequence[int]]) -> None:
        draw, index = rng.random(), rng.randrange(self.max_num_seqs)
        is_used, unused = index in self.solos, [i for i in range(self.max_num_seqs) if i not in self.solos]
        if draw < 0.05 and is_used:
            self.swap_out(index)
        elif draw < 0.12:
            self.swap_in(index)
        elif draw < 0.125 and self.swapped:
            self.manager.drop_swapped(self.swapped.pop()[0])
        elif draw < 0.25:
            self.admit(index, rng.choice(stems)[: rng.randint(1, self.max_len)], rng.choice((b"", b"", b"x")))
        elif draw < 0.32 and is_used and unused:
            self.fork(index, rng.choice(unused), rng.randint(0, len(self.solos[index].tokens)))
        elif draw < 0.43 and is_used:
            length = len(self.solos[index].tokens)
            self.truncate(index, max(0, length - rng.randint(0, 5)) if rng.random() < 0.8 else rng.randint(0, length))
        elif draw < 0.48 and is_used:
            self.free(index, publish=rng.random() < 0.9)
        elif draw < 0.482:
            unpublish_all(self.manager)
        elif not self.extend(self.spans(rng, stems)):
            self.free(rng.choice(sorted(self.solos)), publish=True)

    def spans(self, rng: random.Random, stems: Sequence[Sequence[int]]) -> dict[int, tuple[list[int], int]]:
        """Extend about half of the sequences along a stem, so that prefixes match; a few tokens differ."""
        spans = {}
        for index in rng.sample(sorted(self.solos), rng.randint(0, len(self.solos))):
            start = len(self.solos[index].tokens)
            count = rng.choice((1, 1, 1, rng.randint(1, self.setup.config.prefill_chunk_size)))
            stem = stems[index % len(stems)][start : start + count]
            tokens = [token if rng.random() < 0.97 else 9 for token in stem]
            if tokens:
                spans[index] = (tokens, len(tokens) if rng.random() < 0.8 else rng.randint(0, len(tokens)))
        return spans

    @classmethod
    def random_run(
        cls, setup: Setup, seed: int, num_operations: int, check: bool = True, **parts: Any
    ) -> ManagerHarness:
        rng = random.Random(seed)
        harness = cls(setup, **parts)
        stems = [[rng.randrange(3) for _ in range(harness.max_len)] for _ in range(2)]
        for _ in range(num_operations):
            harness.operate(rng, stems)
            if check:
                harness.check()
        for index in list(harness.solos):
            harness.free(index, publish=True)
        if check:
            harness.check()
            assert all(used == 0 for used in harness.manager.stats().used), "blocks leak"
        return harness
