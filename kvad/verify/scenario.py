"""Sequences and cache configurations that ``kvad verify`` runs.

Row 0 is the longest, the last one (of three or more) a single token. Row 1's prompt is forked into two samples with
different continuations. One more sequence follows row 0 and shares its prompt up to the last whole block: it is
prefilled while the others decode. A pool of half the required blocks, and a KVCacheManager that refuses now and then,
preempt sequences.

All combinations of layout, format, policy and ``rope_at`` are tested; an impossible one is refused by the component
that cannot support it (``unsupported_reason``). The required exactness follows from the policy: a policy by position is
*exact* compared with the model under the same mask, offload keeps everything, and one that ranks or summarizes is a
function of the sequence alone, exact until its first eviction (``first_loss_length``).
"""

from __future__ import annotations

import bisect
import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from kvad import cache as cache_lib
from kvad import config as cfg
from kvad import planning
from kvad.cache import CacheConfig, CacheGroup, build_groups, parse_policy
from kvad.cache.sizing import check_policy, plan_memory
from kvad.config import ModelConfig, attention_specs
from kvad.errors import ConfigError, EngineError, KvadError, MemoryPlanError, UsageError
from kvad.model import Transformer
from kvad.text import Tokenizer
from kvad.verify.replay import ReplayResult, ReplayStream, format_loss, run_uncached
from kvad.verify.report import MemoryCase

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
        numbers = {"num-prompts": self.num_seqs, "prefill-chunk-size": self.prefill_chunk_size}
        numbers |= {"block-size": self.block_size, "max-tokens": self.tokens}
        for flag, number in numbers.items():
            if number < 1:
                raise UsageError(f"--{flag}: must be at least 1, got {number}")
        if not (self.layouts and self.dtypes and self.policies and self.rotates):
            raise UsageError("nothing to verify", "Give a layout and a dtype.")

    @property
    def cases(self) -> list[MemoryCase]:
        """All configurations to test, those of one policy next to each other."""
        names = product(self.policies, self.rotates, self.layouts, self.dtypes)
        return [MemoryCase(layout, dtype, policy, rotate, self.endless) for policy, rotate, layout, dtype in names]


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
    source: list[int] = []
    if tokenizer is not None:
        strict = copy.copy(tokenizer)
        strict.on_unknown = "error"
        with contextlib.suppress(KvadError):
            source = strict.encode(TEXT)
    if not source:
        source = torch.randint(config.vocab_size, (4096,), generator=torch.Generator().manual_seed(0)).tolist()
    starts = [row * 17 % len(source) for row in range(len(lengths))]
    repeated = source * (2 + longest // len(source))
    return [repeated[start : start + length] for start, length in zip(starts, lengths, strict=True)]


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
    streams = []
    for prompt, source in zip(ordered, build_sources(model.config, len(ordered)), strict=True):
        greedy = greedy_continuation(model, prompt, options.tokens, source)
        streams.append(ReplayStream(prompt, (greedy,), source=source))
    forked = min(1, len(streams) - 1)
    (greedy,) = streams[forked].forced_tokens
    streams[forked] = streams[forked]._replace(forced_tokens=(greedy, greedy[::-1]))
    if options.prefix_hit and "paged" in options.layouts:
        first = streams[0]
        shared = (len(first.prompt) - 1) // options.block_size * options.block_size
        if not shared:
            longest = f"the longest prompt has {len(first.prompt)} tokens, no more than a block of {options.block_size}"
            hint = "give a longer --prompt, a smaller --block-size, or --no-prefix-hit"
            raise UsageError(f"--prefix-hit: {longest}", hint)
        rest = tuple((token + 1) % model.config.vocab_size for token in first.prompt[shared:])
        prompt = first.prompt[:shared] + rest
        streams.append(ReplayStream(prompt, first.forced_tokens[:1], after=0, source=first.source))
    return streams


def build_sources(config: ModelConfig, rows: int) -> list[tuple[int, ...] | None]:
    """Build ragged random encoder inputs of an encoder-decoder, the longest first; None for other models."""
    if config.encoder_input is None:
        return [None] * rows
    vocab, generator = config.encoder_input.vocab_size or config.vocab_size, torch.Generator().manual_seed(1)
    ids = torch.randint(vocab, (rows, longest_source(config)), generator=generator).tolist()
    return [tuple(row[: max(1, int(len(row) * 0.7**number))]) for number, row in enumerate(ids)]


def longest_source(config: ModelConfig) -> int:
    """Return the number of tokens of the longest encoder input; 0 without an encoder."""
    return 0 if config.encoder_input is None else min(config.encoder_input.max_seq_len, LONGEST_SOURCE)


def greedy_continuation(
    model: Transformer, prompt: Sequence[int], count: int, source: Sequence[int] | None
) -> tuple[int, ...]:
    """Return ``count`` greedy tokens after a prompt, each computed from the whole sequence, without a cache."""
    tokens = list(prompt)
    for _ in range(count):
        logits = run_uncached(model, tokens, len(prompt) + count, source=source, last_only=True)
        tokens.append(int(logits.argmax()))
    return tuple(tokens[len(prompt) :])


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


def unsupported_reason(
    config: ModelConfig, streams: Sequence[ReplayStream], options: ScenarioOptions, case: MemoryCase
) -> KvadError | None:
    """Return why this configuration is impossible, or None."""
    try:
        cache = case_cache_config(config, streams, options, case)
        build_groups(attention_specs(config), cache)
        check_policy(config, cache)
    except KvadError as error:
        return error
    positions = (layer.attention.position for layer in config.stack.layer_types.values())
    if case.rotate == "read" and not any(isinstance(position, cfg.RopeConfig) for position in positions):
        return UsageError("no layer of this model rotates its keys", "as with rotate=write")
    return None


def num_preemptions(options: ScenarioOptions) -> int:
    return NUM_PREEMPTIONS if options.preempt else 0


def check_scenario_counts(
    replayed: ReplayResult, streams: Sequence[ReplayStream], options: ScenarioOptions, layout: str
) -> None:
    """Check that every requested event occurred.

    Raises:
        EngineError: If one did not, so it was not tested.
    """
    counts, longest = replayed.counts, max(len(stream.prompt) for stream in streams)
    shares = replayed.shares_blocks and layout == "paged"
    expected = (
        ("preemption", options.preempt, counts.preemptions),
        ("prefix hit", options.prefix_hit and shares, counts.hit_tokens),
        ("chunked prompt", options.prefill_chunk_size < longest, counts.chunks),
    )
    for label, requested, count in expected:
        if requested and not count:
            raise EngineError(
                f"{layout}: the requested {label} did not occur, so it was not verified",
                "Give more --num-prompts or --max-tokens, or leave it out: --no-preempt, --no-prefix-hit.",
            )


MAX_SEQS = 1 << 40  # larger numbers that would fit are not searched


def require_verify_memory(
    config: ModelConfig, lengths: Sequence[int], options: ScenarioOptions, available: int | None
) -> None:
    """Check that verifying prompts of these lengths, and more of one token, fits into ``available`` bytes (or None).

    Raises:
        MemoryPlanError: If not; the hint has the number of prompts that would fit.
    """
    prompts = sorted(lengths, reverse=True)
    logits, rest = _needs(config, prompts, options, options.num_seqs)
    if available is None or logits + rest <= available:
        return
    candidates = range(1, min(options.num_seqs, MAX_SEQS))
    fit = bisect.bisect_right(candidates, available, key=lambda rows: sum(_needs(config, prompts, options, rows)))
    parts = f"logits of the reference and the caches {_size(logits)}, weights, cache and activations {_size(rest)}"
    needed = f"verifying takes about {_size(logits + rest)} ({parts}) and {_size(available)} is available"
    hint = f"what would fit: --num-prompts {fit}"
    if not fit:
        hint = "not even one row fits: take fewer --max-tokens, or a smaller model"
    raise MemoryPlanError(f"--num-prompts {options.num_seqs}: {needed}", hint)


def _needs(config: ModelConfig, prompts: Sequence[int], options: ScenarioOptions, rows: int) -> tuple[int, int]:
    """Return (bytes of the logits stored at once, bytes of everything else) of the ``rows`` longest sequences.

    Logits are stored in float32 and float64 for the reference and for that of a policy, in float64 for the float64 case
    of each layout, and in float32 for the current case; each lossy format has a float64 reference too. The rest is the
    weights in both precisions and the larger layout's float64 cache, as planned.
    """
    lengths = prompts[:rows]
    forked, shares = lengths[min(1, len(lengths) - 1)], options.prefix_hit and "paged" in options.layouts
    all_lengths, num_single = [*lengths, forked, *lengths[: int(shares)]], rows - len(lengths)
    num_seqs = num_single + len(all_lengths)
    lossy = sum(format_loss(dtype) == "lossy" for dtype in options.dtypes)
    policy_bytes = 16 * any(policy != "full" for policy in options.policies)  # a reference of each policy in turn
    bytes_per_logit = 16 + policy_bytes + 8 * len(options.layouts) * len(options.rotates) + 8 * (lossy + bool(lossy))
    logits = (sum(all_lengths) + num_single + num_seqs * options.tokens) * config.vocab_size * bytes_per_logit
    size, longest = options.block_size, lengths[0] + options.tokens
    blocks = sum(-(-(length + options.tokens) // size) for length in all_lengths)
    blocks += num_single * -(-(1 + options.tokens) // size)
    tight = options.preempt and any(spec.window is None for spec in attention_specs(config))
    rest, batched_tokens = 0, options.prefill_chunk_size + num_seqs
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
        plan = plan_memory(config, cache, weights_dtype="float64", max_num_batched_tokens=batched_tokens)
        rest = max(rest, plan.total + plan.weights // 2)
    return logits, rest


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def first_loss_length(groups: Sequence[CacheGroup]) -> int | None:
    """Return the length at which a sequence first loses data, or None if no policy ranks, summarizes or selects."""
    lengths = []
    for group in groups:
        losing = group.eviction_policy or group.demotion_policy
        if losing is not None and not isinstance(losing, cache_lib.policy.OffloadPolicy):
            lengths.append(losing.next_trigger_length(0))
        if group.sparse_read_policy is not None:
            lengths.append(-(-group.sparse_read_policy.budget // group.block_size) * group.block_size)
    return min(lengths, default=None)


def _tiered(size: planning.cache_presets.PolicySize) -> str:
    """Build a tiered policy: every level holds some tokens, and some tokens are dropped."""
    retained = -(-size.num_retained // (2 * size.block)) * size.block  # rounded up to whole blocks
    if size.block % 2:
        return f"tiered({retained}, interval={2 * size.block})"
    return f"tiered({retained}, quantized={retained}, interval={2 * size.block}, summaries={retained}, ratio=2)"


# One policy of each kind. All but the tiered one are sized as in planning/cache_presets.py.
SIZED: dict[str, Callable[[planning.cache_presets.PolicySize], str]] = {
    "full": lambda _size: "full",
    **planning.cache_presets.POLICY_BUILDERS,
    "tiered": _tiered,
    "offload": lambda size: f"offload({-(-size.num_retained // size.block) * size.block}, interval={2 * size.block})",
}


def sized_policy(name: str, longest: int, block_size: int) -> str:
    """Write out a policy that retains a quarter of ``longest`` tokens and evicts twice."""
    retained = max(1, longest // 4)
    interval, observed = max(1, retained // 2), max(1, retained // 4)
    return SIZED[name](planning.cache_presets.PolicySize(longest, retained, interval, block_size, observed, kernel=3))


def parse_policies(values: Sequence[str], longest: int, block_size: int) -> tuple[str, ...]:
    """Parse the values of ``--policy``: "all", bare names, or policies in full, without duplicates.

    Raises:
        ConfigError: If a value is not a policy.
    """
    policies: dict[str, None] = {}
    for name in values:
        for policy in cache_lib.policy_parser.POLICIES if name == "all" else (name,):
            text = sized_policy(policy, longest, block_size) if policy in SIZED else policy
            policies[text if str(parse_policy(text)) != "full" else "full"] = None
    return tuple(policies) or ("full",)
