"""Combinations of a model and a cache that are refused, with the reason. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from kvad import config as cfg
from kvad.cache.config import CacheConfig
from kvad.cache.groups import CacheGroup, build_groups
from kvad.config import ModelConfig, attention_specs
from kvad.errors import ConfigError


def check_policy(config: ModelConfig, cache: CacheConfig, *, deterministic: bool = False) -> None:
    """Raise ConfigError if the model's positions do not support the cache; the message says what fits."""
    if config.decoder is None:
        return
    if deterministic:
        _check_deterministic(config, cache)
    if cache.rope_at == "write":
        _check_summaries(config, cache)
    if cache.endless:
        _check_endless(config, cache)


def _check_endless(config: ModelConfig, cache: CacheConfig) -> None:
    """Check that positions can be renumbered: RoPE and biases depend on distances, which a window bounds."""
    assert config.decoder is not None
    added = config.embedding.position
    if added is not None:
        raise ConfigError(
            f"cache.endless: {added.kind} positions are part of every key and value and cannot be renumbered",
            "Sequences of this model end at max_seq_len: use --overflow stop.",
        )
    specs = cache.restrict(attention_specs(config))
    for num_sinks, window in ((spec.num_sinks, spec.window) for spec in specs if not spec.is_cross_attention):
        if window is not None and num_sinks + window > config.max_seq_len:
            raise ConfigError(
                f"cache.endless: the cache must have at most {config.max_seq_len} tokens, got {num_sinks + window}",
                f"Keep at most {config.max_seq_len} tokens.",
            )
        if window is not None and num_sinks and cache.layout == "paged" and window < cache.block_size:
            raise ConfigError(
                f"cache.endless: the window must have at least a block of {cache.block_size} tokens, got {window}",
                f"Keep at least {cache.block_size}, or use a smaller cache.block_size.",
            )
    for layer_type in config.decoder.layer_types.values():
        position = layer_type.attention.position
        if isinstance(position, cfg.CustomPositionsConfig) and any(spec.renumber_positions for spec in specs):
            raise ConfigError(
                f"cache.endless: {position.name} does not support renumbered positions", "Use window(n), without sinks."
            )


def _check_deterministic(config: ModelConfig, cache: CacheConfig) -> None:
    """Refuse policies that move keys or positions: batch-invariant tiles of keys are at fixed positions."""
    for group in build_groups(attention_specs(config), cache):
        policy = group.eviction_policy or group.demotion_policy or group.sparse_read_policy
        if policy is not None or group.spec.renumber_positions:
            cause = f"the policy {policy}" if policy is not None else "renumbered sinks"
            if group.demotion_policy is not None and cache.overflow in ("summarize", "offload"):
                cause = f"overflow={cache.overflow}, which uses {cause}"
            raise ConfigError(
                f"deterministic: not supported with {cause}",
                "Use full, window(n), sinks(k, n) up to the limit, or block-window(n).",
            )


def _check_summaries(config: ModelConfig, cache: CacheConfig) -> None:
    """Check that stored keys can be rotated back to be merged; sequence-dependent RoPE frequencies prevent that."""
    for layer in range(config.stack.num_layers):
        position = config.stack.layer_config(layer).attention.position
        levels = cache.resolved_policy.for_layer(layer).tiered
        scaling = position.scaling if isinstance(position, cfg.RopeConfig) else None
        is_per_sequence = isinstance(scaling, cfg.DynamicScalingConfig | cfg.LongRopeScalingConfig)
        if scaling is not None and is_per_sequence and levels is not None and levels.summaries:
            raise ConfigError(
                f"cache.policy: {levels}: {scaling.kind} scaling gives each sequence other frequencies, so stored keys "
                f"of layer {layer} cannot be rotated back to be summarized",
                "Store them unrotated: cache.rope_at='read'.",
            )


def check_summarizer(ratio: int, groups: Sequence[CacheGroup]) -> None:
    """Raise ConfigError if the cache has no summaries of the summarizer's ratio."""
    levels = [group.lower_level for group in groups if group.lower_level is not None and group.lower_level.ratio > 1]
    if not levels:
        raise ConfigError(
            "summarizer: the cache's policy has no summaries",
            f'Use --policy "tiered(64, quantized=0, summaries=256, ratio={ratio})".',
        )
    for level in levels:
        if level.ratio != ratio:
            raise ConfigError(
                f"summarizer: must have the policy's ratio {level.ratio}, got {ratio}",
                f"Use ratio={ratio} in the policy, or another summarizer.",
            )
