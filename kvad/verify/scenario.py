"""Sequences that ``kvad verify`` runs: ragged, chunked, mixed, preempted, forked, with a shared prefix.

Row 0 is the longest, the last one (of three or more) a single token. Row 1's prompt is forked into two samples with
different continuations. One more sequence follows row 0 and shares its prompt up to the last whole block: it is
prefilled while the others decode. A pool of half the required blocks, and a KVCacheManager that refuses now and then,
preempt sequences.

``require_verify_memory`` estimates the memory of ``kvad verify`` in advance.
"""

from __future__ import annotations

import bisect
import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kvad import cache as cache_lib
from kvad.cache import CacheConfig, build_groups
from kvad.cache.sizing import plan_memory
from kvad.config import ModelConfig, attention_specs
from kvad.errors import ConfigError, EngineError, KvadError, MemoryPlanError, UsageError
from kvad.model import Transformer
from kvad.text import Tokenizer
from kvad.verify.cases import MemoryCase
from kvad.verify.replay import ReplayStream, ScenarioCounts, format_loss, run_uncached

NUM_PREEMPTIONS = 2  # preemptions to force
LONGEST_SOURCE = 48  # tokens
MAX_WIDTH = 512  # a longer window or limit than this is not exceeded by default

TEXT = """The cache remembers what the model has read: a new word costs one step, not the whole way again.
def remember(key, value, memory):
    for place, (old, _) in enumerate(memory):
        if old == key:
            memory[place] = (key, value)
            return memory
    return [*memory, (key, value)]

A row is a stream of tokens; a block holds sixteen of them; a table says which blocks belong to which row. If two rows
begin with the same words, they may share the blocks of those words, until one of them has something else to say.
class Row:
    def __init__(self, tokens, limit=1024):
        self.tokens, self.limit = list(tokens), limit
        assert len(self.tokens) <= self.limit, "a row that is too long"
"""


_FLAGS = {"num_seqs": "num-prompts", "tokens": "max-tokens"}  # fields whose flag has another name


@dataclass(frozen=True)
class ScenarioOptions:
    """Options of ``kvad verify``."""

    layouts: tuple[str, ...] = ("paged", "contiguous")
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16", "float64")  # "int8/int4" if keys and values differ
    num_seqs: int = 5  # prompts
    prefill_chunk_size: int = 32
    block_size: int = 16
    tokens: int = 32  # generated after each prompt
    preempt: bool = True
    prefix_hit: bool = True
    policies: tuple[str, ...] = ("full",)  # written out
    rotates: tuple[str, ...] = ("write",)
    endless: bool = False  # sequences may exceed the model's limit
    round_trips: tuple[str, ...] = ()  # names of kvad.verify.round_trips.ROUND_TRIPS

    def __post_init__(self) -> None:
        for name in ("num_seqs", "prefill_chunk_size", "block_size", "tokens"):
            if getattr(self, name) < 1:
                flag = _FLAGS.get(name, name).replace("_", "-")
                raise UsageError(f"--{flag}: must be at least 1, got {getattr(self, name)}")
        if not (self.layouts and self.dtypes and self.policies and self.rotates):
            raise UsageError("nothing to verify", "Give a layout and a dtype.")

    @property
    def cases(self) -> list[MemoryCase]:
        """All configurations to test."""
        return MemoryCase.product(self.layouts, self.dtypes, self.policies, self.rotates, self.endless)


def default_sizes(config: ModelConfig, tokens: int | None, block_size: int | None) -> tuple[int, int]:
    """Return ``tokens`` and ``block_size``, by default 32 and 16, or less for a model with a low limit."""
    if tokens is None:
        tokens = max(1, min(32, config.max_seq_len // 2))
    if block_size is None:
        block_size = 16
        while block_size > 1 and block_size >= config.max_seq_len - tokens:
            block_size //= 2
    return tokens, block_size


def build_prompts(config: ModelConfig, options: ScenarioOptions, tokenizer: Tokenizer | None) -> list[list[int]]:
    """Build ragged prompts of known text, or of random tokens if the tokenizer cannot encode the text.

    Raises:
        UsageError: If the model's limit leaves no room for a prompt and ``options.tokens``.
    """
    room = config.max_seq_len - options.tokens
    if room < 1:
        raise UsageError(
            f"--max-tokens {options.tokens} leaves no room for a prompt: the model's limit is {config.max_seq_len}",
            f"give at most --max-tokens {config.max_seq_len - 1}",
        )
    windows = [spec.window for spec in attention_specs(config) if spec.window is not None and spec.window <= MAX_WIDTH]
    chunk = options.prefill_chunk_size
    longest = min(room, max(3 * chunk + 1, 3 * options.block_size + 1, *(w + chunk for w in windows), 2))
    if options.endless and config.max_seq_len <= MAX_WIDTH:
        longest = config.max_seq_len + chunk
    lengths = [max(1, int(longest * 0.6**row)) for row in range(options.num_seqs)]
    if options.num_seqs > 2:
        lengths[-1] = 1
    source = _known_text(tokenizer) if tokenizer is not None else None
    if not source:
        source = torch.randint(config.vocab_size, (4096,), generator=_generator(0)).tolist()
    starts = [row * 17 % len(source) for row in range(len(lengths))]
    repeated = source * (2 + longest // len(source))
    return [repeated[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def _known_text(tokenizer: Tokenizer) -> list[int] | None:
    strict = copy.copy(tokenizer)
    strict.on_unknown = "error"
    try:
        return strict.encode(TEXT)
    except KvadError:
        return None


def build_streams(model: Transformer, prompts: Sequence[Sequence[int]], options: ScenarioOptions) -> list[ReplayStream]:
    """Build the prompts with the reference's continuations, the forked sample, and the sequence with a shared prefix.

    Raises:
        UsageError: If a prompt is empty or too long, or no prompt has a whole block to share.
    """
    limit = model.config.max_seq_len
    if model.config.decoder is None:
        raise UsageError("this model is an encoder: it has no cache to verify")
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise UsageError(f"prompt {number} has no tokens", "Give at least one.")
        if len(prompt) + options.tokens > limit and not options.endless:
            raise UsageError(
                f"prompt {number} has {len(prompt)} tokens, with --max-tokens {options.tokens} that is more than the "
                f"model's limit of {limit}"
            )
    ordered = sorted((tuple(prompt) for prompt in prompts), key=len, reverse=True)
    sources = build_sources(model.config, len(ordered))
    forced = greedy_continuations(model, ordered, options.tokens, sources)
    streams = [
        ReplayStream(prompt, (after,), source=source)
        for prompt, after, source in zip(ordered, forced, sources, strict=True)
    ]
    twin = min(1, len(streams) - 1)
    streams[twin] = streams[twin]._replace(forced_tokens=(forced[twin], forced[twin][::-1]))
    if options.prefix_hit and "paged" in options.layouts:
        first = streams[0]
        shared = (len(first.prompt) - 1) // options.block_size * options.block_size
        if not shared:
            longest = f"the longest prompt has {len(first.prompt)} tokens, no more than a block of {options.block_size}"
            raise UsageError(
                f"--prefix-hit: {longest}", "give a longer --prompt, a smaller --block-size, or --no-prefix-hit"
            )
        rest = tuple((token + 1) % model.config.vocab_size for token in first.prompt[shared:])
        streams.append(ReplayStream(first.prompt[:shared] + rest, (forced[0],), after=0, source=first.source))
    return streams


def outline_streams(
    config: ModelConfig, prompts: Sequence[Sequence[int]], options: ScenarioOptions
) -> list[ReplayStream]:
    """Build sequences of the same lengths, to check cache configurations before anything is computed."""
    return [
        ReplayStream(tuple(prompt), ((0,) * options.tokens,), source=source)
        for prompt, source in zip(prompts, build_sources(config, len(prompts)), strict=True)
    ]


def build_sources(config: ModelConfig, rows: int) -> list[tuple[int, ...] | None]:
    """Build ragged random encoder inputs of an encoder-decoder, the longest first; None for other models."""
    if config.encoder_input is None:
        return [None] * rows
    vocab = config.vocab_size if config.encoder_input.vocab_size is None else config.encoder_input.vocab_size
    ids = torch.randint(vocab, (rows, longest_source(config)), generator=_generator(1)).tolist()
    return [tuple(row[: max(1, int(len(row) * 0.7**number))]) for number, row in enumerate(ids)]


def longest_source(config: ModelConfig) -> int:
    """Return the number of tokens of the longest encoder input; 0 without an encoder."""
    return 0 if config.encoder_input is None else min(config.encoder_input.max_seq_len, LONGEST_SOURCE)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@torch.inference_mode()
def greedy_continuations(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    count: int,
    sources: Sequence[tuple[int, ...] | None] | None = None,
) -> list[tuple[int, ...]]:
    """Return ``count`` greedy tokens after each prompt, each computed from the whole sequence, without a cache."""
    continuations = []
    for prompt, source in zip(prompts, sources or [None] * len(prompts), strict=True):
        tokens = list(prompt)
        for _ in range(count):
            logits = run_uncached(model, tokens, len(prompt) + count, source=source, last_only=True)
            tokens.append(int(logits[-1].argmax()))
        continuations.append(tuple(tokens[len(prompt) :]))
    return continuations


def case_cache_config(
    config: ModelConfig, streams: Sequence[ReplayStream], options: ScenarioOptions, case: MemoryCase
) -> CacheConfig:
    """Build a cache with room for every sequence, or for half of them with forced preemptions.

    Raises:
        ConfigError: If the case is impossible.
    """
    size, (keys, values) = options.block_size, cache_lib.quantization.split_format_name(case.dtype)
    num_blocks = [-(-stream.limit // size) for stream in streams for _ in stream.forced_tokens]
    if case.layout not in ("paged", "contiguous"):
        raise ConfigError(f"--layout: {case.layout!r} is not one of paged, contiguous")
    longest = max(stream.limit for stream in streams)
    cache = CacheConfig(
        layout="paged" if case.layout == "paged" else "contiguous",
        key_dtype=keys,
        value_dtype=values,
        block_size=size,
        max_num_seqs=len(num_blocks),
        max_seq_len=min(longest, config.max_seq_len) if case.endless else longest,
        prefill_chunk_size=options.prefill_chunk_size,
        enable_prefix_caching=options.prefix_hit,
        max_source_len=max((len(stream.source) for stream in streams if stream.source is not None), default=0),
        policy=case.policy,
        endless=case.endless,
        rope_at="read" if case.rotate == "read" else "write",
    )
    token_groups = [
        (group.spec, group.eviction_policy or group.demotion_policy)
        for group in build_groups(attention_specs(config), cache)
        if group.lower_level is None and not group.spec.is_cross_attention
    ]
    if case.layout == "paged" and options.preempt and cache_lib.groups.grows_with_length(token_groups):
        return replace(cache, num_blocks=max(max(num_blocks) + 1, sum(num_blocks) // 2))
    return cache


def num_preemptions(options: ScenarioOptions) -> int:
    return NUM_PREEMPTIONS if options.preempt else 0


def check_scenario_counts(
    counts: ScenarioCounts, streams: Sequence[ReplayStream], options: ScenarioOptions, layout: str, shares: bool = True
) -> None:
    """Check that every requested event occurred; ``shares``: sequences of this cache may share blocks.

    Raises:
        EngineError: If one did not, so it was not tested.
    """
    longest = max(len(stream.prompt) for stream in streams)
    expected = {
        "preemption": (options.preempt, counts.preemptions),
        "prefix hit": (options.prefix_hit and layout == "paged" and shares, counts.hit_tokens),
        "chunked prompt": (options.prefill_chunk_size < longest, counts.chunks),
    }
    for label, (requested, count) in expected.items():
        if requested and not count:
            raise EngineError(
                f"{layout}: the requested {label} did not occur, so it was not verified",
                "Give more --num-prompts or --max-tokens, or leave it out: --no-preempt, --no-prefix-hit.",
            )


MAX_SEQS = 1 << 40  # larger numbers that would fit are not searched


def require_verify_memory(
    config: ModelConfig, lengths: Sequence[int], options: ScenarioOptions, available: int | None
) -> None:
    """Check that verifying fits into ``available`` bytes (None: unknown).

    Args:
        lengths: Tokens of the prompts; sequences of ``options`` beyond them have a prompt of one token.

    Raises:
        MemoryPlanError: If not; the hint has the number of prompts that would fit.
    """
    prompts = sorted(lengths, reverse=True)
    logits, rest = _needs(config, prompts, options, options.num_seqs)
    if available is None or logits + rest <= available:
        return
    fit = bisect.bisect_right(
        range(1, min(options.num_seqs, MAX_SEQS)),
        available,
        key=lambda rows: sum(_needs(config, prompts, options, rows)),
    )
    parts = f"logits of the reference and the caches {_size(logits)}, weights, cache and activations {_size(rest)}"
    needed = f"verifying takes about {_size(logits + rest)} ({parts}) and {_size(available)} is available"
    hint = (
        f"what would fit: --num-prompts {fit}"
        if fit
        else "not even one row fits: take fewer --max-tokens, or a smaller model"
    )
    raise MemoryPlanError(f"--num-prompts {options.num_seqs}: {needed}", hint)


def _needs(config: ModelConfig, prompts: Sequence[int], options: ScenarioOptions, rows: int) -> tuple[int, int]:
    """Return (bytes of the logits stored at once, bytes of everything else) of the ``rows`` longest sequences.

    Logits are stored in float32 and float64 for the reference and for that of a policy, in float64 for the float64 case
    of each layout, and in float32 for the current case; each lossy format has a float64 reference too. The rest is the
    weights in both precisions and the larger layout's float64 cache, as planned.
    """
    lengths = prompts[:rows]
    shares = options.prefix_hit and "paged" in options.layouts
    all_lengths = [
        *lengths,
        lengths[min(1, len(lengths) - 1)],
        *lengths[: int(shares)],
    ]  # the forked sample, the shared prefix
    num_seqs = rows - len(lengths) + len(all_lengths)
    lossy = sum(format_loss(dtype) == "lossy" for dtype in options.dtypes)
    policy_bytes = 16 * any(policy != "full" for policy in options.policies)  # a reference of each policy in turn
    bytes_per_logit = 16 + policy_bytes + 8 * len(options.layouts) * len(options.rotates) + 8 * (lossy + bool(lossy))
    logits = (sum(all_lengths) + rows - len(lengths) + num_seqs * options.tokens) * config.vocab_size * bytes_per_logit
    size, longest = options.block_size, lengths[0] + options.tokens
    blocks = sum(-(-(length + options.tokens) // size) for length in all_lengths)
    blocks += (rows - len(lengths)) * -(-(1 + options.tokens) // size)
    tight = options.preempt and any(spec.window is None for spec in attention_specs(config))
    rest = 0
    for layout in options.layouts:
        cache = CacheConfig(
            layout="paged" if layout == "paged" else "contiguous",
            dtype="float64",
            block_size=size,
            max_num_seqs=num_seqs,
            max_seq_len=longest,
            prefill_chunk_size=options.prefill_chunk_size,
            num_blocks=max(-(-longest // size) + 1, blocks // 2) if tight and layout == "paged" else None,
            max_source_len=longest_source(config),
        )
        plan = plan_memory(
            config, cache, weights_dtype="float64", max_num_batched_tokens=options.prefill_chunk_size + num_seqs
        )
        rest = max(rest, plan.total + plan.weights // 2)
    return logits, rest


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
