"""Sequences and cache configurations that ``kvad verify`` runs.

Row 0 is the longest, the last one (of three or more) a single token. Row 1's prompt is forked into two samples with
different continuations. Further sequences follow row 0: one shares its prompt up to the last whole block and is
prefilled while the others decode; two have the same tokens in a block, but another salt or another history, and must
share none. A pool of half the required blocks preempts sequences, and so does the replay now and then.

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

from kvad import benchmarks, parallel, planning
from kvad import cache as cache_lib
from kvad import config as cfg
from kvad.cache import CacheConfig, CacheGroup, build_groups, parse_policy
from kvad.cache.sizing import check_policy, plan_memory
from kvad.config import ModelConfig, attention_specs
from kvad.engine import Engine, EngineConfig
from kvad.engine.scheduling import SamplingParams
from kvad.errors import ConfigError, EngineError, KvadError, MemoryPlanError, UsageError, format_bytes
from kvad.model import Transformer
from kvad.text import Tokenizer
from kvad.verify.reference_model import SLICE
from kvad.verify.references import format_loss
from kvad.verify.replay import ReplayResult, ReplayStream
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
    structure: bool = True  # run each cache in float64 too; needs a float64 copy of the weights
    prefix_cache_ram: int | None = None  # bytes of the block store in RAM
    num_beams: int = 1  # also search with so many beams, if more than 1
    mesh: parallel.Mesh | None = None  # the engines run on these ranks

    def __post_init__(self) -> None:
        numbers = {"num-prompts": self.num_seqs, "prefill-chunk-size": self.prefill_chunk_size}
        numbers |= {"block-size": self.block_size, "max-tokens": self.tokens, "num-beams": self.num_beams}
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


def build_streams(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    options: ScenarioOptions,
    config: EngineConfig | None = None,
    case: MemoryCase | None = None,
) -> list[ReplayStream]:
    """Build the prompts with the engine's greedy continuations, the forked sample, and sequences with shared prefixes.

    Args:
        case: The cache that generates, in the model's dtype (default: the first one of ``options``).

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
    if options.prefix_hit and "paged" in options.layouts:
        _check_shareable(ordered[0], options.block_size)
    sources, unknown = build_sources(model.config, len(ordered)), ((0,) * options.tokens,)
    streams = [ReplayStream(prompt, unknown, source=x) for prompt, x in zip(ordered, sources, strict=True)]
    dtype = model.dtype_name
    cache = case_cache_config(model.config, streams, options, replace(case or options.cases[0], dtype=dtype))
    continuations = greedy_continuations(model, streams, cache, config)
    streams = [stream._replace(forced_tokens=(new,)) for stream, new in zip(streams, continuations, strict=True)]
    forked = min(1, len(streams) - 1)
    (greedy,) = streams[forked].forced_tokens
    streams[forked] = streams[forked]._replace(forced_tokens=(greedy, greedy[::-1]))
    if options.prefix_hit and "paged" in options.layouts:
        streams += _sharing_streams(streams[0], options.block_size, model.config.vocab_size)
    return streams


def _check_shareable(longest: Sequence[int], block_size: int) -> None:
    if len(longest) <= block_size:
        reason = f"the longest prompt has {len(longest)} tokens, no more than a block of {block_size}"
        raise UsageError(
            f"--prefix-hit: {reason}", "give a longer --prompt, a smaller --block-size, or --no-prefix-hit"
        )


def _sharing_streams(first: ReplayStream, size: int, vocab_size: int) -> list[ReplayStream]:
    """Build the streams that follow ``first``: one that shares its whole blocks, and others that must share none.

    These have its first block with another salt, and its second block behind another first one.
    """
    shared = (len(first.prompt) - 1) // size * size
    other = tuple((token + 1) % vocab_size for token in first.prompt)
    short = first._replace(forced_tokens=(first.forced_tokens[0][:2],), after=0)
    whole = first._replace(forced_tokens=first.forced_tokens[:1], after=0)
    streams = [whole._replace(prompt=first.prompt[:shared] + other[shared:])]
    streams.append(short._replace(prompt=first.prompt[: size + 1], salt="other"))
    if shared >= 2 * size:
        streams.append(short._replace(prompt=other[:size] + first.prompt[size : 2 * size + 1]))
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


def greedy_continuations(
    model: Transformer, streams: Sequence[ReplayStream], cache: CacheConfig, config: EngineConfig | None = None
) -> list[tuple[int, ...]]:
    """Return the greedy tokens after each stream's prompt, as many as it has forced tokens, from the engine."""
    engine = Engine(model, cache, config)
    for stream in streams:
        sampling = SamplingParams(max_tokens=len(stream.forced_tokens[0]), temperature=0, ignore_eos=True)
        engine.add_request(stream.prompt, sampling, encoder_token_ids=stream.source)
    try:
        tokens = benchmarks.scorers.run_engine(engine)
    finally:
        engine.close()
    return [tuple(tokens[request]) for request in range(len(streams))]


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
        prefix_cache_ram=options.prefix_cache_ram if case.layout == "paged" or "paged" not in options.layouts else None,
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
        groups = build_groups(attention_specs(config), cache)
        check_policy(config, cache)
        if options.mesh is not None:
            parallel.mesh.check_cache_fits_mesh(groups, options.mesh)
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
        ("block from the block store", options.prefix_cache_ram is not None and shares, counts.loaded),
    )
    for label, requested, count in expected:
        if requested and not count:
            raise EngineError(
                f"{layout}: the requested {label} did not occur, so it was not verified",
                "Give more --num-prompts or --max-tokens, or leave it out: --no-preempt, --no-prefix-hit.",
            )


MAX_SEQS = 1 << 40  # larger numbers that would fit are not searched
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # of a weight


def require_verify_memory(
    config: ModelConfig, lengths: Sequence[int], options: ScenarioOptions, available: int | None, dtype: str = "float32"
) -> ScenarioOptions:
    """Check that verifying prompts of these lengths, and more of one token, fits into ``available`` bytes (or None).

    Returns:
        The options, without the float64 engine (``structure``) if only that does not fit.

    Raises:
        MemoryPlanError: If not; the hint has the number of prompts that would fit.
    """
    prompts = sorted(lengths, reverse=True)
    for chosen in (options, replace(options, structure=False)):
        logits, rest = _needs(config, prompts, chosen, options.num_seqs, dtype)
        if available is None or logits + rest <= available:
            return chosen
    assert available is not None
    candidates = range(1, min(options.num_seqs, MAX_SEQS))
    fit = bisect.bisect_right(candidates, available, key=lambda rows: sum(_needs(config, prompts, chosen, rows, dtype)))
    parts = f"{format_bytes(logits)}, weights, cache and activations {format_bytes(rest)}"
    needed = f"verifying takes about {format_bytes(logits + rest)} (logits of the reference and the caches {parts})"
    needed += f" and {format_bytes(available)} is available"
    hint = f"what would fit: --num-prompts {fit}"
    if not fit:
        hint = "not even one prompt fits: use fewer --max-tokens, or a smaller model"
    raise MemoryPlanError(f"--num-prompts {options.num_seqs}: {needed}", hint)


def _needs(
    config: ModelConfig, prompts: Sequence[int], options: ScenarioOptions, rows: int, dtype: str
) -> tuple[int, int]:
    """Return (bytes of the logits stored at once, bytes of everything else) of the ``rows`` longest sequences.

    Logits are stored in float64 and in the engine's dtype for the reference and for that of a policy, for the current
    case, and in float64 for the float64 case of each layout; each format that rounds has a reference too. The rest is
    the weights, one layer and a slice of the vocabulary in float64, the larger layout's cache as planned, and with
    ``options.structure`` a float64 copy of the weights.
    """
    lengths = prompts[:rows]
    forked, shares = lengths[min(1, len(lengths) - 1)], options.prefix_hit and "paged" in options.layouts
    short = [2 * options.block_size + 1] * 2 * shares  # of the sequences that share no block
    all_lengths, num_single = [*lengths, forked, *lengths[: int(shares)], *short], rows - len(lengths)
    num_seqs = num_single + len(all_lengths)
    rounded = sum(format_loss(stored, dtype) != "none" for stored in options.dtypes)
    policy_bytes = 12 * any(policy != "full" for policy in options.policies)  # a reference of each policy in turn
    bytes_per_logit = 16 + policy_bytes + 8 * rounded
    bytes_per_logit += 8 * len(options.layouts) * len(options.rotates) * options.structure
    logits = (sum(all_lengths) + num_single + num_seqs * options.tokens) * config.vocab_size * bytes_per_logit
    size, longest = options.block_size, lengths[0] + options.tokens
    blocks = sum(-(-(length + options.tokens) // size) for length in all_lengths)
    blocks += num_single * -(-(1 + options.tokens) // size)
    tight = options.preempt and any(spec.window is None for spec in attention_specs(config))
    rest, batched_tokens = 0, options.prefill_chunk_size + num_seqs
    for layout in options.layouts:
        cache = CacheConfig(
            layout="paged" if layout == "paged" else "contiguous",
            dtype="float64" if options.structure else "float32",
            block_size=size,
            max_num_seqs=num_seqs,
            max_seq_len=longest,
            prefill_chunk_size=options.prefill_chunk_size,
            num_blocks=max(-(-longest // size) + 1, blocks // 2) if tight and layout == "paged" else None,
            max_source_len=longest_source(config),
        )
        plan = plan_memory(config, cache, weights_dtype=dtype, max_num_batched_tokens=batched_tokens)
        double = plan.weights * 8 // BYTES[dtype]
        layer = double // config.stack.num_layers + SLICE * config.hidden_size * 8
        rest = max(rest, plan.total + (double if options.structure and dtype != "float64" else layer))
    return logits, rest


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
