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

from kvad.cache.policy import Policy
from kvad.cache.sizing import Group
from kvad.config import Attention, ModelConfig, Stack
from kvad.errors import ConfigError, UsageError

__all__ = ["Mesh", "check_cache", "check_mesh", "copies", "kv_share", "layer_share", "query_share", "share"]


@dataclass(frozen=True)
class Mesh:
    """``tensor`` x ``pipeline`` ranks, seen from ``rank``.  ConfigError for one that cannot be."""

    tensor: int = 1
    pipeline: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline"):
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
        return f"{self.tensor}x{self.pipeline}"

    @property
    def size(self) -> int:
        return self.tensor * self.pipeline

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tensor

    @property
    def stage(self) -> int:
        return self.rank // self.tensor

    @property
    def last(self) -> bool:
        """Whether this is a rank of the last stage."""
        return self.stage == self.pipeline - 1

    def at(self, rank: int) -> Mesh:
        """The same mesh, seen from another rank."""
        return Mesh(self.tensor, self.pipeline, rank)

    def every(self) -> tuple[Mesh, ...]:
        """As each rank sees it, in order."""
        return tuple(self.at(rank) for rank in range(self.size))


def share(count: int, parts: int, number: int) -> range:
    """The ``number``-th of ``parts`` consecutive shares of ``count`` things, as even as can be: 5 by 2 is 2 and 3."""
    return range(count * number // parts, count * (number + 1) // parts)


def layer_share(layers: int, mesh: Mesh) -> range:
    """The layers of this rank's stage."""
    return share(layers, mesh.pipeline, mesh.stage)


def copies(kv_heads: int, mesh: Mesh) -> int:
    """On how many ranks of a stage each kv head lies."""
    return max(1, mesh.tensor // kv_heads)


def kv_share(kv_heads: int, mesh: Mesh) -> range:
    """The kv heads of this rank."""
    parts = min(mesh.tensor, kv_heads)
    return share(kv_heads, parts, mesh.tensor_rank // copies(kv_heads, mesh))


def query_share(heads: int, mesh: Mesh) -> range:
    """The query heads of this rank: those of its kv heads, or a share of them."""
    return share(heads, mesh.tensor, mesh.tensor_rank)


def check_mesh(config: ModelConfig, mesh: Mesh) -> None:
    """ConfigError where a model cannot be cut so: it says what fits."""
    for name, stack in (("decoder", config.decoder), ("encoder", config.encoder)):
        if stack is None:
            continue
        if mesh.pipeline > stack.layers:
            raise ConfigError(
                f"mesh {mesh}: {mesh.pipeline} stages, and the {name} has {stack.layers} layers",
                f"take at most {stack.layers} stages",
            )
        for letter, layer in stack.kinds.items():
            for part, mixer in (("mixer", layer.mixer), ("cross", layer.cross)):
                if mixer is not None:
                    _check_mixer(config, mixer, mesh, f"{name}.kinds.{letter}.{part}")


def _check_mixer(config: ModelConfig, mixer: Attention, mesh: Mesh, where: str) -> None:
    if mixer.own is not None and mesh.tensor > 1:
        raise ConfigError(
            f"mesh {mesh}: {where}.own: {mixer.own} is a class that kvad does not know how to cut by heads",
            f"cut it by layers alone: 1x{mesh.size}",
        )
    if not _fits(mixer, mesh.tensor):
        most = max(mixer.heads, mesh.tensor)
        fitting = [str(n) for n in range(1, most + 1) if all(_fits(each, n) for each in _every_mixer(config))]
        raise ConfigError(
            f"mesh {mesh}: {where} has {mixer.kv_heads or mixer.heads} kv heads and {mixer.heads} query heads, which "
            f"{mesh.tensor} ranks cannot share evenly",
            f"tensor ranks that fit this model: {', '.join(fitting)}",
        )


def _fits(mixer: Attention, tensor: int) -> bool:
    """Each rank has as many kv heads as any other, or each kv head lies on as many ranks as any other."""
    kv_heads = mixer.kv_heads or mixer.heads
    return (kv_heads % tensor == 0 or tensor % kv_heads == 0) and mixer.heads % tensor == 0


def _every_mixer(config: ModelConfig) -> list[Attention]:
    stacks: list[Stack] = [stack for stack in (config.decoder, config.encoder) if stack is not None]
    layers = [layer for stack in stacks for layer in stack.kinds.values()]
    return [mixer for layer in layers for mixer in (layer.mixer, layer.cross) if mixer is not None]


def check_cache(groups: Sequence[Group], mesh: Mesh) -> None:
    """ConfigError where a policy cannot be kept on such a mesh: it needs a sum over ranks that each have a part of the
    queries of one kv head.  And for what is spilled, which lies with one process."""
    if mesh.size > 1 and any(group.level is not None and group.level.spilled for group in groups):
        raise ConfigError(
            f"cache.policy: what is spilled is not cut over a mesh of {mesh}: one rank would have its part alone",
            "give the cache room for its rows, or run it in one process",
        )
    for group in groups:
        if copies(group.mixer.kv_heads, mesh) == 1:
            continue
        policy: Policy | None = group.chooses
        if group.scored is not None and group.scored.watch:
            policy = group.scored
        if policy is not None:
            raise ConfigError(
                f"cache.policy: {policy} goes by what all queries of a kv head look at, and on a mesh of {mesh} the "
                f"{group.mixer.kv_heads} kv heads of layer {group.layers[0]} lie on several ranks each",
                f"at most {group.mixer.kv_heads} tensor ranks, or a policy that does not look at attention",
            )
