"""Mesh of ranks: kv heads are divided by tensor rank, layers by pipeline stage.

In a mesh of T x P ranks, the T ranks of a *stage* have the same layers and divide the kv heads (tensor parallel); the P
stages have consecutive layers (pipeline parallel). Ranks are numbered stage by stage:

    2x2, 4 layers, 4 kv heads, 8 query heads:    rank 0: layers 0 1, kv heads 0 1, queries 0-3    1: 0 1, 2 3, 4-7
                                                 rank 2: layers 2 3, kv heads 0 1, queries 0-3    3: 2 3, 2 3, 4-7

Query heads follow their kv head. With more tensor ranks than kv heads, each kv head is replicated on several ranks,
which divide its query heads. Integers only, no torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvad import config as cfg
from kvad.cache import CacheGroup, CachePolicy
from kvad.config import ModelConfig, attention_specs
from kvad.errors import ConfigError, UsageError


@dataclass(frozen=True)
class Mesh:
    """A mesh of tensor_parallel x pipeline_parallel ranks, as seen from one rank."""

    tensor_parallel: cfg.PositiveInt = 1  # ranks per stage
    pipeline_parallel: cfg.PositiveInt = 1  # stages
    rank: int = 0

    def __post_init__(self) -> None:
        cfg.check_fields(self, "mesh")
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"mesh.rank: must be in 0..{self.size - 1}, got {self.rank}")

    @staticmethod
    def parse(text: str) -> Mesh:
        """Parse ``"2x1"``: two tensor ranks, one stage."""
        match = re.fullmatch(r"([1-9][0-9]*)x([1-9][0-9]*)", text.strip().lower())
        if match is None:
            raise UsageError(
                f"mesh: must be TENSORxPIPELINE, got {text!r}", "write 2x1 for two tensor ranks, one stage"
            )
        return Mesh(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.tensor_parallel}x{self.pipeline_parallel}"

    @property
    def size(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tensor_parallel

    @property
    def stage(self) -> int:
        return self.rank // self.tensor_parallel

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.pipeline_parallel - 1

    def with_rank(self, rank: int) -> Mesh:
        """Return this mesh as seen from another rank."""
        return Mesh(self.tensor_parallel, self.pipeline_parallel, rank)

    def all_ranks(self) -> tuple[Mesh, ...]:
        """Return this mesh as seen from each rank, in order."""
        return tuple(self.with_rank(rank) for rank in range(self.size))


def even_share(count: int, parts: int, index: int) -> range:
    """Return one of ``parts`` consecutive, nearly equal shares of ``count`` items: 5 in 2 parts is 2 and 3."""
    return range(count * index // parts, count * (index + 1) // parts)


def layer_range(layers: int, mesh: Mesh) -> range:
    return even_share(layers, mesh.pipeline_parallel, mesh.stage)


def kv_head_copies(kv_heads: int, mesh: Mesh) -> int:
    """Return the number of ranks of a stage that have each kv head."""
    return max(1, mesh.tensor_parallel // kv_heads)


def kv_head_range(kv_heads: int, mesh: Mesh) -> range:
    """Return the kv heads of this rank."""
    parts = min(mesh.tensor_parallel, kv_heads)
    return even_share(kv_heads, parts, mesh.tensor_rank // kv_head_copies(kv_heads, mesh))


def query_head_range(heads: int, mesh: Mesh) -> range:
    """Return the query heads of this rank: those of its kv heads, or a share of them."""
    return even_share(heads, mesh.tensor_parallel, mesh.tensor_rank)


def check_model_fits_mesh(config: ModelConfig, mesh: Mesh) -> None:
    """Raise ConfigError, with sizes that fit, if a model cannot be divided among the ranks."""
    for name, stack in (("decoder", config.decoder), ("encoder", config.encoder)):
        if stack is None:
            continue
        if mesh.pipeline_parallel > stack.num_layers:
            raise ConfigError(
                f"mesh: must have at most {stack.num_layers} stages, the layers of the {name}, got {mesh}",
                f"use at most {stack.num_layers} stages",
            )
        if mesh.pipeline_parallel > 1 and stack.num_distinct_layers is not None:
            raise ConfigError(
                f"mesh: must have one stage, because layers of the {name} share parameters, got {mesh}",
                f"divide by heads only: {mesh.tensor_parallel}x1",
            )
    if mesh.size > 1 and any(spec.is_state for spec in attention_specs(config)):
        message = "mesh: must be 1x1 for a model with layers that are not attention"
        raise ConfigError(f"{message}, got {mesh}", "their states are not divided among ranks")
    attentions = _attention_configs(config)
    for where, attention in attentions.items():
        if attention.custom_class is not None and mesh.tensor_parallel > 1:
            raise ConfigError(
                f"mesh {mesh}: {where}.custom_class: {attention.custom_class} cannot be divided by heads",
                f"divide by layers only: 1x{mesh.size}",
            )
        if attention.latent is not None and mesh.tensor_parallel > 1:
            raise ConfigError(
                f"mesh {mesh}: {where}: the latent of all heads cannot be divided by heads",
                f"divide by layers only: 1x{mesh.size}",
            )
        if not _fits(attention, mesh.tensor_parallel):
            max_ranks = max(attention.num_heads, mesh.tensor_parallel)
            fitting = [str(n) for n in range(1, max_ranks + 1) if all(_fits(spec, n) for spec in attentions.values())]
            raise ConfigError(
                f"mesh {mesh}: {mesh.tensor_parallel} ranks cannot evenly divide the {attention.num_heads} query heads "
                f"and {attention.num_kv_heads or attention.num_heads} kv heads of {where}",
                f"tensor ranks that fit this model: {', '.join(fitting)}",
            )


def _fits(attention: cfg.AttentionConfig, tensor: int) -> bool:
    """Return True if all ranks have equally many kv heads, or all kv heads are on equally many ranks."""
    kv_heads = attention.num_kv_heads or attention.num_heads
    return (kv_heads % tensor == 0 or tensor % kv_heads == 0) and attention.num_heads % tensor == 0


def _attention_configs(config: ModelConfig) -> dict[str, cfg.AttentionConfig]:
    """Return the attention of every layer type by its path in the configuration."""
    attentions: dict[str, cfg.AttentionConfig | None] = {}
    for name, stack in (("decoder", config.decoder), ("encoder", config.encoder)):
        for letter, layer in ({} if stack is None else stack.layer_types).items():
            if isinstance(layer.attention, cfg.AttentionConfig):
                attentions[f"{name}.layer_types.{letter}.attention"] = layer.attention
            attentions[f"{name}.layer_types.{letter}.cross_attention"] = layer.cross_attention
    return {where: attention for where, attention in attentions.items() if attention is not None}


def check_cache_fits_mesh(groups: Sequence[CacheGroup], mesh: Mesh) -> None:
    """Check that the cache's policies work on a mesh.

    Raises:
        ConfigError: If a policy needs the attention of all queries of a kv head whose queries are on several ranks, or
            if tokens are offloaded, because other ranks are not notified of a failed read.
    """
    if mesh.size > 1 and any(group.lower_level is not None and group.lower_level.is_offloaded for group in groups):
        raise ConfigError(
            f"cache.overflow: must not be offload on a mesh of {mesh}, because ranks do not report failed reads",
            "use preempt, stop, window or summarize",
        )
    for group in groups:
        if kv_head_copies(group.spec.num_kv_heads, mesh) == 1:
            continue
        policy: CachePolicy | None = group.sparse_read_policy
        if group.eviction_policy is not None and group.eviction_policy.observed_queries:
            policy = group.eviction_policy
        if policy is not None:
            raise ConfigError(
                f"cache.policy: {policy} needs the attention of all queries of a kv head, and on a mesh of {mesh} each "
                f"of the {group.spec.num_kv_heads} kv heads of layer {group.layers[0]} is on several ranks",
                f"use at most {group.spec.num_kv_heads} tensor ranks, or a policy that does not read attention",
            )
