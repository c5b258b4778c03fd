"""One memory of several ranks: rank 0 has the ledger and leads, the others do what it says.

:class:`Leading` is a ``Memory`` to whoever has it: what is asked of it (moves, a step, a row's state) it tells the
other ranks, in the same order, before it does its own part; they stand in :func:`follow`.  All ranks run the model for
the same step, because a model that ``shard`` has cut needs them all.

Invariant: every rank has seen the same moves and steps, so blocks, tables and positions are the same on all of them.

Never: a decision (the ledger's, on rank 0), or a score that leaves the device for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from kvad.cache.memory import Memory
from kvad.cache.mesh import check_cache, copies, kv_share
from kvad.cache.planning import check_policy
from kvad.cache.settle import settle
from kvad.cache.sharding import AcrossRanks, cut_groups, local_layers, merge, split
from kvad.cache.sizing import CacheConfig, Group, groups
from kvad.config import mixers
from kvad.errors import ConfigError
from kvad.model.compress import LayerCompressor
from kvad.model.transformer import Transformer
from kvad.parallel.links import Links
from kvad.parallel.shard import shard_compressor
from kvad.parallel.wire import Message, moves_in, moves_out, receive, send, step_in, step_out
from kvad.step import Moves, Step, View

__all__ = ["Leading", "Part", "follow", "lead", "part"]

Blocks = Sequence[Sequence[int]]


class Part(Memory):
    """A rank's memory.  ``every`` (group), ``compressors``: the whole cache's; ``layers``: of the whole decoder.

    ConfigError for a probe, which would see some heads and take them for all, and for tiles (``deterministic``): sums
    over ranks are added up in another order.
    """

    def __init__(
        self,
        every: Sequence[Group],
        *,
        links: Links,
        layers: int,
        compressors: Mapping[int, Any] | None = None,
        **options: Any,
    ) -> None:
        if options.get("probe") is not None:
            raise ConfigError(
                f"probe: on a mesh of {links.mesh} a rank sees its own heads alone", "look at one process"
            )
        if not isinstance(options.get("kernel", "auto"), str):
            raise ConfigError(f"deterministic: not promised on a mesh of {links.mesh}", "sums are cut by ranks there")
        check_cache(every, links.mesh)
        self.whole, self.layers, self.links = tuple(every), layers, links
        self.cut = str(links.mesh) if links.mesh.size > 1 else ""
        numbers = local_layers(every, layers, links.mesh)
        mine = {numbers[layer]: each for layer, each in (compressors or {}).items() if layer in numbers}
        parts = {layer: _compressor_part(each, links) for layer, each in mine.items()}
        super().__init__(_ranked(every, layers, links), compressors=parts, **options)

    def state(self, blocks: Blocks) -> dict[str, Tensor]:
        """This rank's part of a row's state, on the host."""
        return {each.name: each.array[each.blocks].cpu() for each in self.held(blocks)}

    def put(self, blocks: Blocks, state: Mapping[str, Tensor]) -> None:
        """The inverse of :meth:`state`, into as many blocks."""
        for each in self.held(blocks):
            each.array[each.blocks] = state[each.name].to(each.array.device)

    def parked_state(self, key: int) -> dict[str, Tensor]:
        """This rank's part of what is parked under a key."""
        copies = self.parked[key]
        assert isinstance(copies, list), "a row from elsewhere was not parked here"
        return dict(zip(self._parked_names(), copies, strict=True))

    def keep_parked(self, key: int, state: Mapping[str, Tensor]) -> None:
        """As if it had been parked here."""
        self.parked[key] = [state[name] for name in self._parked_names()]

    def _parked_names(self) -> list[str]:
        """Sources are not parked: they stand behind all other groups."""
        return [each.name for each in self.held([() for group in self.groups if not group.mixer.cross])]


class Leading(Part):
    """Rank 0's, which the ledger moves and the runner opens.  ``release`` ends :func:`follow` on the others."""

    def __init__(self, every: Sequence[Group], **options: Any) -> None:
        super().__init__(every, **options)
        self._opened: Step | None = None
        self._over = False
        self.heard: RemovableHandle | None = None  # the encoder's word that it is about to read

    def apply(self, moves: Moves) -> None:
        said = moves_out(moves)
        if said is not None:
            self._tell("moves", said)
            super().apply(moves)

    def open(self, step: Step) -> Sequence[View]:
        self._opened = step
        said, tensors = step_out(step)
        self._tell("step", said, tensors)
        return super().open(step)

    def encodes(self, source: Step) -> None:
        """The encoder is about to read this step: the others hear of it, unless it came with an opened one."""
        if self._opened is None or self._opened.source is not source:
            said, tensors = step_out(source)
            self._tell("encode", said, tensors)

    def release(self) -> None:
        if not self._over:
            self._over = True
            self._tell("stop")
            if self.heard is not None:
                self.heard.remove()
        super().release()

    def row(self, blocks: Blocks) -> dict[str, Tensor]:
        """The whole state of a row, from all ranks, as one process would have it (``Memory.held``)."""
        self._tell("state", [list(each) for each in blocks])
        return self._gathered(self.state(blocks))

    def put_row(self, blocks: Blocks, state: Mapping[str, Tensor]) -> None:
        """The inverse of :meth:`row`: to every rank its part."""
        self._tell("put", [list(each) for each in blocks])
        self.put(blocks, self._scattered(state))

    def parked_row(self, key: int) -> dict[str, Tensor]:
        """The whole state of a parked row."""
        self._tell("parked", key)
        return self._gathered(self.parked_state(key))

    def keep_row(self, key: int, state: Mapping[str, Tensor]) -> None:
        """A parked row of another mesh, to be woken here: to every rank its part."""
        self._tell("keep", key)
        self.keep_parked(key, self._scattered(state))

    def _tell(self, kind: str, said: Any = None, tensors: tuple[Tensor, ...] = ()) -> None:
        if self.links.mesh.size > 1:
            send(Message(kind, said, tensors), self.links.of_first)

    def _gathered(self, mine: Mapping[str, Tensor]) -> dict[str, Tensor]:
        parts = [mine]
        for rank in range(1, self.links.mesh.size):
            got = receive(lambda x, rank=rank: self.links.receive(x, rank))  # type: ignore[misc]
            parts.append(dict(zip(got.said, got.tensors, strict=True)))
        return merge(parts, self.whole, self.layers, self.links.mesh)

    def _scattered(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        mesh = self.links.mesh
        for rank in range(1, mesh.size):
            part = split(state, self.whole, self.layers, mesh.at(rank))
            message = Message("part", list(part), tuple(part.values()))
            send(message, lambda x, rank=rank: self.links.send(x, rank))  # type: ignore[misc]
        return split(state, self.whole, self.layers, mesh)


def part(model: Transformer, cache: CacheConfig, links: Links, **options: Any) -> Part:
    """The memory of a rank that follows: as rank 0's engine has it of the same ``cache``.  ``options``: compressors."""
    settled = settle(model.config, cache)
    check_policy(model.config, settled)
    return Part(
        groups(mixers(model.config), settled),
        links=links,
        layers=model.config.stack.layers,
        device=model.table.device,
        rotate=settled.rotate,
        exact=settled.endless,
        **options,
    )


def lead(model: Transformer, links: Links) -> Callable[..., Leading]:
    """What makes the memory of an engine on rank 0 (``Engine(..., memory=lead(model, links))``); ``model`` is cut."""
    assert links.mesh.rank == 0, "the ledger is rank 0's"

    def make(every: Sequence[Group], **options: Any) -> Leading:
        memory = Leading(every, links=links, layers=model.config.stack.layers, **options)
        if model.encoder is not None:

            def hook(_: nn.Module, given: tuple[Any, ...]) -> None:
                memory.encodes(given[1])

            memory.heard = model.encoder.register_forward_pre_hook(hook, prepend=True)
        return memory

    return make


@torch.inference_mode()
def follow(model: Transformer, memory: Part) -> None:
    """Do what rank 0 says, until it releases its memory.  ``model``: cut; ``memory``: made as rank 0's was.

    EngineError where a rank that is waited for has ended, or is silent for too long in the middle of a step.  What
    fails on one rank is told to no other: whoever starts ranks ends them together.
    """
    links = memory.links
    device = model.table.device
    while True:
        kind, said, tensors = receive(links.of_first, device)
        if kind == "stop":
            memory.release()
            return
        if kind == "moves":
            memory.apply(moves_in(said))
        elif kind == "step":
            model(step_in(said, tensors), memory)
        elif kind == "encode":
            model.encode(step_in(said, tensors))
        elif kind == "state":
            _answer(memory.state(said), links)
        elif kind == "parked":
            _answer(memory.parked_state(said), links)
        elif kind == "put":
            memory.put(said, _given(links))
        else:
            assert kind == "keep", kind
            memory.keep_parked(said, _given(links))


def _answer(state: Mapping[str, Tensor], links: Links) -> None:
    send(Message("part", list(state), tuple(state.values())), lambda x: links.send(x, 0))


def _given(links: Links) -> dict[str, Tensor]:
    got = receive(lambda x: links.receive(x, 0))
    return dict(zip(got.said, got.tensors, strict=True))


def _compressor_part(compressor: Any, links: Links) -> Any:
    """``levels.Compressor`` is any function; a learned one has numbers for each head."""
    if not isinstance(compressor, LayerCompressor):
        raise ConfigError(
            f"compressor: {type(compressor).__name__} cannot be cut by heads", "one that kvad trained can"
        )
    return shard_compressor(compressor, links)


def _ranked(every: Sequence[Group], layers: int, links: Links) -> list[Group]:
    """A rank's groups, whose policies answer as they would for all heads."""
    mesh = links.mesh
    numbers = tuple(local_layers(every, layers, mesh))
    made = []
    for whole, group in zip(every, cut_groups(every, layers, mesh), strict=True):
        policy, kv_heads = group.scored, whole.mixer.kv_heads
        if policy is not None:
            gather = partial(links.gather, every=copies(kv_heads, mesh))
            policy = AcrossRanks.of(policy, kv_share(kv_heads, mesh), numbers, gather)
        made.append(group._replace(scored=policy))
    return made
