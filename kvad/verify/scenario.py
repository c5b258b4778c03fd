"""Which rows ``kvad verify`` runs, and in what cache: ragged, chunked, mixed, preempted, forked, on a shared prefix.

Row 0 is the longest, the last one (of three or more) a single token.  Row 1's prompt is forked into two samples that go
different ways.  One more row follows row 0 and shares its prompt up to the last whole block: its prefill runs beside
the others' decoding.  A pool of half of what the rows need, and a ledger that refuses now and then, preempt rows.

Whether there is room to verify: what the logits and the memories of ``kvad verify`` take, before any is made.
"""

from __future__ import annotations

import bisect
import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kvad import cache as cache_lib
from kvad.cache import CacheConfig, CacheGroup, build_groups
from kvad.cache.sizing import plan_memory
from kvad.config import ModelConfig, attention_specs
from kvad.errors import ConfigError, EngineError, KvadError, MemoryPlanError, UsageError
from kvad.model import NoCache, Transformer
from kvad.model_input import ModelInput, SubBatch
from kvad.text import Tokenizer
from kvad.verify.cases import MemoryCase
from kvad.verify.replay import ReplayStream, ScenarioCounts, format_loss

NUM_PREEMPTIONS = 2  # preemptions to force
LONGEST_SOURCE = 48  # tokens
MAX_WIDTH = 512  # a longer window than this is not worth passing by default, nor a longer limit

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
    """What is asked.  ``rows``: prompts; ``tokens``: generated after each; ``chunk``: tokens of a prompt per step;
    ``dtypes``: formats, "int8/int4" where keys and values differ; ``policies`` in full; ``endless``: rows may pass the
    model's limit; ``through``: ways of leaving and coming back (``through.py``)."""

    layouts: tuple[str, ...] = ("paged", "contiguous")
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16", "float64")
    num_seqs: int = 5
    chunk: int = 32
    block_size: int = 16
    tokens: int = 32
    preempt: bool = True
    prefix_hit: bool = True
    policies: tuple[str, ...] = ("full",)
    rotates: tuple[str, ...] = ("write",)
    endless: bool = False
    round_trips: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_seqs", "prefill_chunk_size", "block_size", "tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')}: must be at least 1, found {getattr(self, name)}")
        if not (self.layouts and self.dtypes and self.policies and self.rotates):
            raise UsageError("nothing to verify", "name a layout and a dtype")

    @property
    def cases(self) -> list[MemoryCase]:
        """Every memory of the product."""
        return MemoryCase.product(self.layouts, self.dtypes, self.policies, self.rotates, self.endless)


def default_sizes(config: ModelConfig, tokens: int | None, block_size: int | None) -> tuple[int, int]:
    """``tokens`` and ``block_size`` where they are not given: 32 and 16, or less for a model of a low limit."""
    if tokens is None:
        tokens = max(1, min(32, config.max_seq_len // 2))
    if block_size is None:
        block_size = 16
        while block_size > 1 and block_size >= config.max_seq_len - tokens:
            block_size //= 2
    return tokens, block_size


def build_prompts(config: ModelConfig, options: ScenarioOptions, tokenizer: Tokenizer | None) -> list[list[int]]:
    """Ragged prompts of known text, or of random tokens where the tokenizer has no ids for it.

    UsageError: the model's limit leaves no room for a prompt and ``options.tokens``.
    """
    room = config.max_seq_len - options.tokens
    if room < 1:
        raise UsageError(
            f"--tokens {options.tokens} leaves no room for a prompt: the model's limit is {config.max_seq_len}",
            f"give at most --tokens {config.max_seq_len - 1}",
        )
    windows = [spec.window for spec in attention_specs(config) if spec.window is not None and spec.window <= MAX_WIDTH]
    wished = max(3 * options.chunk + 1, 3 * options.block_size + 1, *(w + options.chunk for w in windows), 2)
    longest = min(wished, room)
    if options.endless and config.max_seq_len <= MAX_WIDTH:
        longest = config.max_seq_len + options.chunk
    lengths = [max(1, int(longest * 0.6**row)) for row in range(options.num_seqs)]
    if options.num_seqs > 2:
        lengths[-1] = 1
    source = _known_text(tokenizer) if tokenizer is not None else None
    if not source:
        source = torch.randint(config.vocab_size, (4096,), generator=_generator(0)).tolist()
    prompts = []
    for row, length in enumerate(lengths):
        start = row * 17 % len(source)
        repeated = source[start:] + source * (1 + length // len(source))
        prompts.append(repeated[:length])
    return prompts


def _known_text(tokenizer: Tokenizer) -> list[int] | None:
    strict = copy.copy(tokenizer)
    strict.on_unknown = "error"
    try:
        return strict.encode(TEXT)
    except KvadError:
        return None


def build_streams(model: Transformer, prompts: Sequence[Sequence[int]], options: ScenarioOptions) -> list[ReplayStream]:
    """The prompts with the judge's own continuations, the forked sample, and the row that shares a prefix.

    UsageError: a prompt is empty or too long, or no prompt has a whole block to share.
    """
    limit = model.config.max_seq_len
    if model.config.decoder is None:
        raise UsageError("this model is an encoder: it keeps no cache that could be verified")
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise UsageError(f"prompt {number} has no tokens", "give at least one")
        if len(prompt) + options.tokens > limit and not options.endless:
            raise UsageError(
                f"prompt {number} has {len(prompt)} tokens, with --tokens {options.tokens} that is more than the "
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
            raise UsageError(
                f"--prefix-hit: the longest prompt has {len(first.prompt)} tokens, "
                f"no more than a block of {options.block_size}",
                "give a longer --prompt, a smaller --block-size, or --no-prefix-hit",
            )
        rest = tuple((token + 1) % model.config.vocab_size for token in first.prompt[shared:])
        streams.append(ReplayStream(first.prompt[:shared] + rest, (forced[0],), after=0, source=first.source))
    return streams


def outline_streams(
    config: ModelConfig, prompts: Sequence[Sequence[int]], options: ScenarioOptions
) -> list[ReplayStream]:
    """Rows of the same lengths, to ask what a memory for them would be before anything is computed."""
    return [
        ReplayStream(tuple(prompt), ((0,) * options.tokens,), source=source)
        for prompt, source in zip(prompts, build_sources(config, len(prompts)), strict=True)
    ]


def build_sources(config: ModelConfig, rows: int) -> list[tuple[int, ...] | None]:
    """Ragged random sources for an encoder-decoder's rows, the longest first; None for other models."""
    if config.encoder_input is None:
        return [None] * rows
    vocab = config.vocab_size if config.encoder_input.vocab_size is None else config.encoder_input.vocab_size
    ids = torch.randint(vocab, (rows, longest_source(config)), generator=_generator(1)).tolist()
    return [tuple(row[: max(1, int(len(row) * 0.7**number))]) for number, row in enumerate(ids)]


def longest_source(config: ModelConfig) -> int:
    """Tokens of the longest source that is verified with; 0 for a model without an encoder's side."""
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
    """``count`` greedy tokens after each prompt, every one computed from the whole row, without a cache."""
    rows = [list(prompt) for prompt in prompts]
    limits = [len(prompt) + count for prompt in prompts]
    memory = NoCache(model.config)
    read = [source for source in sources or () if source is not None]
    source = _rows(read, [len(each) for each in read]) if read else None
    for _ in range(count):
        step = _rows(rows, limits)._replace(encoder_input=source)
        chosen = model.logits(model(step, memory), step.logit_indices).argmax(dim=-1).tolist()
        for row, token in zip(rows, chosen, strict=True):
            row.append(token)
    return [tuple(row[len(prompt) :]) for row, prompt in zip(rows, prompts, strict=True)]


def _rows(rows: Sequence[Sequence[int]], limits: Sequence[int]) -> ModelInput:
    """A lane per row, each from its first token on; the logits after the last are wanted."""
    return ModelInput(
        token_ids=torch.tensor([token for row in rows for token in row]),
        positions=torch.cat([torch.arange(len(row)) for row in rows]),
        sub_batches=tuple(SubBatch(1, len(row), len(row)) for row in rows),
        logit_indices=torch.tensor([len(row) for row in rows]).cumsum(0) - 1,
        max_seq_lens=torch.cat([torch.full((len(row),), limit) for row, limit in zip(rows, limits, strict=True)]),
    )


def cache_config(
    config: ModelConfig, streams: Sequence[ReplayStream], options: ScenarioOptions, layout: str, dtype: str
) -> CacheConfig:
    """The cache of a memory that keeps everything, see :func:`cache_of`."""
    return case_cache_config(config, streams, options, MemoryCase(layout, dtype))


def case_cache_config(
    config: ModelConfig, streams: Sequence[ReplayStream], options: ScenarioOptions, asked: MemoryCase
) -> CacheConfig:
    """A cache with a seat for every row; where preemptions are wanted, with half of the blocks that they need.

    ConfigError for a memory that cannot be.
    """
    size, (keys, values) = options.block_size, cache_lib.quantization.split_format_name(asked.dtype)
    needed = [-(-stream.limit // size) for stream in streams for _ in stream.forced_tokens]
    if asked.layout not in ("paged", "contiguous"):
        raise ConfigError(f"--layout: {asked.layout!r} is not one of paged, contiguous")
    longest = max(stream.limit for stream in streams)
    cache = CacheConfig(
        layout="paged" if asked.layout == "paged" else "contiguous",
        key_dtype=keys,
        value_dtype=values,
        block_size=size,
        max_num_seqs=len(needed),
        max_seq_len=min(longest, config.max_seq_len) if asked.endless else longest,
        prefill_chunk_size=options.chunk,
        enable_prefix_caching=options.prefix_hit,
        max_source_len=max((len(stream.source) for stream in streams if stream.source is not None), default=0),
        policy=asked.policy,
        endless=asked.endless,
        rope_at="read" if asked.rotate == "read" else "write",
    )
    own = [
        group
        for group in build_groups(attention_specs(config), cache)
        if group.lower_level is None and not group.spec.is_cross_attention
    ]
    if (
        asked.layout == "paged"
        and options.preempt
        and cache_lib.groups.grows_with_length((group.spec, _ranked(group)) for group in own)
    ):
        return replace(cache, num_blocks=max(max(needed) + 1, sum(needed) // 2))
    return cache


def _ranked(
    group: CacheGroup,
) -> cache_lib.policy.EvictionPolicy | cache_lib.policy.TieredPolicy | cache_lib.policy.OffloadPolicy | None:
    return group.eviction_policy or group.demotion_policy


def num_preemptions(options: ScenarioOptions) -> int:
    return NUM_PREEMPTIONS if options.preempt else 0


def check_scenario_counts(
    happened: ScenarioCounts,
    streams: Sequence[ReplayStream],
    options: ScenarioOptions,
    layout: str,
    shares: bool = True,
) -> None:
    """EngineError: something that was asked for did not take place, so that nothing is known about it.

    ``shares``: whether rows of this memory may share blocks at all.
    """
    longest = max(len(stream.prompt) for stream in streams)
    expected = {
        "preemption": (options.preempt, happened.preemptions),
        "prefix hit": (options.prefix_hit and layout == "paged" and shares, happened.hit_tokens),
        "chunked prompt": (options.chunk < longest, happened.chunks),
    }
    for what, (wanted, count) in expected.items():
        if wanted and not count:
            raise EngineError(
                f"{layout}: the {what} asked for did not happen, so it was not verified",
                "give more --rows or --tokens, or leave it out: --no-preempt, --no-prefix-hit",
            )


MAX_SEQS = 1 << 40  # what would fit is not looked for beyond


def require_verify_memory(
    config: ModelConfig, lengths: Sequence[int], options: ScenarioOptions, available: int | None
) -> None:
    """MemoryPlanError when verifying needs more than is ``available`` (None: nobody knows); it says what would fit.

    ``lengths``: tokens of the prompts; rows of ``options`` beyond them have a prompt of one token.
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
    raise MemoryPlanError(
        f"--rows {options.num_seqs}: verifying takes about {_size(logits + rest)} (logits of the judge and the memories "
        f"{_size(logits)}, weights, cache and work {_size(rest)}) and {_size(available)} is available",
        f"what would fit: --rows {fit}" if fit else "not even one row fits: take fewer --tokens, or a smaller model",
    )


def _needs(config: ModelConfig, prompts: Sequence[int], options: ScenarioOptions, rows: int) -> tuple[int, int]:
    """(bytes of the logits that are held at once, bytes of everything else) of so many rows, the longest ones.

    Logits stand in float32 and float64 for the judge and for that of a policy, in float64 for the twin of each layout,
    and in float32 for the memory at hand; each lossy format has a judge in float64 too, beside its memory's.
    The rest is the weights in both
    precisions and the larger layout's twin, as it is planned.
    """
    known = prompts[:rows]
    shares = options.prefix_hit and "paged" in options.layouts
    every = [*known, known[min(1, len(known) - 1)], *known[: int(shares)]]  # the forked sample, the shared prefix
    seats = rows - len(known) + len(every)
    lossy = sum(format_loss(dtype) == "lossy" for dtype in options.dtypes)
    masked = 16 * any(policy != "full" for policy in options.policies)  # a judge of each policy in turn
    numbers = 16 + masked + 8 * len(options.layouts) * len(options.rotates) + 8 * (lossy + bool(lossy))
    logits = (sum(every) + rows - len(known) + seats * options.tokens) * config.vocab_size * numbers
    size, longest = options.block_size, known[0] + options.tokens
    blocks = sum(-(-(length + options.tokens) // size) for length in every)
    blocks += (rows - len(known)) * -(-(1 + options.tokens) // size)
    tight = options.preempt and any(spec.window is None for spec in attention_specs(config))
    rest = 0
    for layout in options.layouts:
        cache = CacheConfig(
            layout="paged" if layout == "paged" else "contiguous",
            dtype="float64",
            block_size=size,
            max_num_seqs=seats,
            max_seq_len=longest,
            prefill_chunk_size=options.chunk,
            num_blocks=max(-(-longest // size) + 1, blocks // 2) if tight and layout == "paged" else None,
            max_source_len=longest_source(config),
        )
        plan = plan_memory(config, cache, weights_dtype="float64", budget=options.chunk + seats)
        rest = max(rest, plan.total + plan.weights // 2)
    return logits, rest


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
