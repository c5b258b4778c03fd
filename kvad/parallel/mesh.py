"""Which part of a model and of its cache each rank of a mesh has: kv heads by tensor rank, layers by stage.

A mesh of T x P ranks cuts a model twice.  The T ranks of a *stage* have the same layers and share their kv heads
(tensor parallel); the P stages have consecutive layers (pipeline).  Ranks are numbered stage by stage:

    2x2, 4 layers, 4 kv heads, 8 query heads:    rank 0: layers 0 1, kv heads 0 1, queries 0-3    1: 0 1, 2 3, 4-7
                                                 rank 2: layers 2 3, kv heads 0 1, queries 0-3    3: 2 3, 2 3, 4-7

Query heads follow their kv head.  With more tensor ranks than kv heads each kv head lies on several ranks, which share
its query heads.  Integers only, no torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvad.cache import CacheGroup, CachePolicy
from kvad.config import AttentionConfig, ModelConfig, StackConfig
from kvad.errors import ConfigError, UsageError


@dataclass(frozen=True)
class Mesh:
    """``tensor`` x ``pipeline`` ranks, seen from ``rank``.  ConfigError for one that cannot be."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "pipeline_parallel"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"mesh.{name}: must be a whole number of at least 1, found {value!r}")
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"mesh: rank {self.rank} of a mesh of {self.size}", f"0 to {self.size - 1}")

    @staticmethod
    def parse(text: str) -> Mesh:
        """``"2x1"``: two tensor ranks, one stage.  UsageError for anything else."""
        found = re.fullmatch(r"([1-9][0-9]*)x([1-9][0-9]*)", text.strip().lower())
        if found is None:
            raise UsageError(f"a mesh of {text!r}", "write tensor x pipeline, as in 2x1")
        return Mesh(int(found[1]), int(found[2]))

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
        """Whether this is a rank of the last stage."""
        return self.stage == self.pipeline_parallel - 1

    def with_rank(self, rank: int) -> Mesh:
        """The same mesh, seen from another rank."""
        return Mesh(self.tensor_parallel, self.pipeline_parallel, rank)

    def all_ranks(self) -> tuple[Mesh, ...]:
        """As each rank sees it, in order."""
        return tuple(self.with_rank(rank) for rank in range(self.size))


def even_share(count: int, parts: int, number: int) -> range:
    """The ``number``-th of ``parts`` consecutive shares of ``count`` things, as even as can be: 5 by 2 is 2 and 3."""
    return range(count * number // parts, count * (number + 1) // parts)


def layer_range(layers: int, mesh: Mesh) -> range:
    """The layers of this rank's stage."""
    return even_share(layers, mesh.pipeline_parallel, mesh.stage)


def kv_head_copies(kv_heads: int, mesh: Mesh) -> int:
    """On how many ranks of a stage each kv head lies."""
    return max(1, mesh.tensor_parallel // kv_heads)


def kv_head_range(kv_heads: int, mesh: Mesh) -> range:
    """The kv heads of this rank."""
    parts = min(mesh.tensor_parallel, kv_heads)
    return even_share(kv_heads, parts, mesh.tensor_rank // kv_head_copies(kv_heads, mesh))


def query_head_range(heads: int, mesh: Mesh) -> range:
    """The query heads of this rank: those of its kv heads, or a share of them."""
    return even_share(heads, mesh.tensor_parallel, mesh.tensor_rank)


def check_model_fits_mesh(config: ModelConfig, mesh: Mesh) -> None:
    """ConfigError where a model cannot be cut so: it says what fits."""
    for name, stack in (("decoder", config.decoder), ("encoder", config.encoder)):
        if stack is None:
            continue
        if mesh.pipeline_parallel > stack.num_layers:
            raise ConfigError(
                f"mesh {mesh}: {mesh.pipeline_parallel} stages, and the {name} has {stack.num_layers} layers",
                f"take at most {stack.num_layers} stages",
            )
        for letter, layer in stack.layer_types.items():
            for part, mixer in (("attention", layer.attention), ("cross", layer.cross_attention)):
                if mixer is not None:
                    _check_spec(config, mixer, mesh, f"{name}.kinds.{letter}.{part}")


def _check_spec(config: ModelConfig, mixer: AttentionConfig, mesh: Mesh, where: str) -> None:
    if mixer.custom_class is not None and mesh.tensor_parallel > 1:
        raise ConfigError(
            f"mesh {mesh}: {where}.own: {mixer.custom_class} is a class that kvad does not know how to cut by heads",
            f"cut it by layers alone: 1x{mesh.size}",
        )
    if not _fits(mixer, mesh.tensor_parallel):
        most = max(mixer.num_heads, mesh.tensor_parallel)
        fitting = [str(n) for n in range(1, most + 1) if all(_fits(each, n) for each in _all_specs(config))]
        raise ConfigError(
            f"mesh {mesh}: {where} has {mixer.num_kv_heads or mixer.num_heads} kv heads and {mixer.num_heads} query heads, which "
            f"{mesh.tensor_parallel} ranks cannot share evenly",
            f"tensor ranks that fit this model: {', '.join(fitting)}",
        )


def _fits(mixer: AttentionConfig, tensor: int) -> bool:
    """Each rank has as many kv heads as any other, or each kv head lies on as many ranks as any other."""
    kv_heads = mixer.num_kv_heads or mixer.num_heads
    return (kv_heads % tensor == 0 or tensor % kv_heads == 0) and mixer.num_heads % tensor == 0


def _all_specs(config: ModelConfig) -> list[AttentionConfig]:
    stacks: list[StackConfig] = [stack for stack in (config.decoder, config.encoder) if stack is not None]
    layers = [layer for stack in stacks for layer in stack.layer_types.values()]
    return [mixer for layer in layers for mixer in (layer.attention, layer.cross_attention) if mixer is not None]


def check_cache_fits_mesh(groups: Sequence[CacheGroup], mesh: Mesh) -> None:
    """ConfigError where a policy cannot be kept on such a mesh: it needs a sum over ranks that each have a part of the
    queries of one kv head; or tokens are spilled, whose loss on one rank no other hears of."""
    if mesh.size > 1 and any(group.lower_level is not None and group.lower_level.is_offloaded for group in groups):
        raise ConfigError(
            f"on_full=spill: not on a mesh of {mesh}: a rank that cannot read what it spilled tells no other",
            "on_full=preempt, or stop, truncate, summarise",
        )
    for group in groups:
        if kv_head_copies(group.spec.num_kv_heads, mesh) == 1:
            continue
        policy: CachePolicy | None = group.sparse_read_policy
        if group.eviction_policy is not None and group.eviction_policy.observed_queries:
            policy = group.eviction_policy
        if policy is not None:
            raise ConfigError(
                f"cache.policy: {policy} goes by what all queries of a kv head look at, and on a mesh of {mesh} the "
                f"{group.spec.num_kv_heads} kv heads of layer {group.layers[0]} lie on several ranks each",
                f"at most {group.spec.num_kv_heads} tensor ranks, or a policy that does not look at attention",
            )
