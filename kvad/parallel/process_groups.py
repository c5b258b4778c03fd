"""What a rank talks over: process groups as values.  torch's default group is neither made nor asked for.

A stage's ranks add up their parts of a sum (tensor parallel); the stages of equal tensor rank hand hidden states on
(pipeline); all ranks hear the plans (world).  Any of torch's process groups will do; :func:`connect` makes gloo's.
Everything is called by all ranks of a group in the same order, or it waits until the group's timeout and raises
EngineError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from kvad.errors import EngineError
from kvad.parallel.mesh import Mesh

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

IDLE_TIMEOUT = 86_400.0  # seconds


class Backend(Protocol):
    """What is asked of a process group."""

    def allreduce(self, tensors: list[Tensor]) -> Any: ...
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> Any: ...
    def broadcast(self, tensors: list[Tensor], options: Any) -> Any: ...
    def send(self, tensors: list[Tensor], to: int, tag: int) -> Any: ...
    def recv(self, tensors: list[Tensor], of: int, tag: int) -> Any: ...


@dataclass(frozen=True)
class ProcessGroups:
    """``world``: all ranks; ``stage``: those of one stage, by tensor rank; ``line``: one rank of each stage, in order.
    None: this rank is alone there, and nothing is sent."""

    mesh: Mesh
    world: Backend | None = None
    stage: Backend | None = None
    pipeline: Backend | None = None

    def sum(self, x: Tensor) -> Tensor:
        """x of every rank of the stage, added up: the same bits on each of them."""
        if self.stage is None:
            return x
        if torch.is_grad_enabled() and x.requires_grad:
            raise EngineError("a model on several ranks keeps no graph", "run it under torch.no_grad()")
        x = x.contiguous()
        self._wait(self.stage.allreduce, [x])
        return x

    def gather(self, x: Tensor, every: int = 1) -> Tensor:
        """x [n, ...] of every ``every``-th rank of the stage, one behind the other: [ranks / every * n, ...]."""
        if self.stage is None:
            return x
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.mesh.tensor_parallel)]
        self._wait(self.stage.allgather, [parts], [x])
        return torch.cat(parts[::every])

    def send_next_stage(self, x: Tensor) -> None:
        """To the next stage."""
        assert self.pipeline is not None
        self._wait(self.pipeline.send, [x.contiguous()], self.mesh.stage + 1, 0)

    def receive_previous_stage(self, like: Tensor) -> Tensor:
        """From the stage before: a tensor like this one."""
        assert self.pipeline is not None
        x = torch.empty_like(like, memory_format=torch.contiguous_format)
        self._wait(self.pipeline.recv, [x], self.mesh.stage - 1, 0)
        return x

    def broadcast_from_last_stage(self, x: Tensor) -> Tensor:
        """What the last stage has, on every stage; ``x`` is like it."""
        return (
            x
            if self.pipeline is None
            else self._broadcast(self.pipeline, x.contiguous(), self.mesh.pipeline_parallel - 1)
        )

    def broadcast_from_first_rank(self, x: Tensor) -> Tensor:
        """What rank 0 has, on every rank; ``x`` is like it."""
        return x if self.world is None else self._broadcast(self.world, x.contiguous(), 0)

    def send(self, x: Tensor, rank: int) -> None:
        assert self.world is not None
        self._wait(self.world.send, [x.contiguous()], rank, 1)

    def receive(self, x: Tensor, rank: int) -> Tensor:
        """Into ``x``, which comes back."""
        assert self.world is not None
        self._wait(self.world.recv, [x], rank, 1)
        return x

    def _broadcast(self, group: Backend, x: Tensor, root: int) -> Tensor:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        self._wait(group.broadcast, [x], options)
        return x

    def _wait(self, call: Callable[..., Any], *given: Any) -> None:
        wait_for(f"rank {self.mesh.rank} of a mesh of {self.mesh}", call, *given)


def wait_for(who: str, call: Callable[..., Any], *given: Any) -> None:
    """What ``who`` asks of a group, to its end.  EngineError where another rank does not answer."""
    try:
        call(*given).wait()
    except RuntimeError as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise EngineError(
            f"{who}: another rank does not answer: {reason}",
            "it has ended, or failed while others wait: end all ranks and start them anew",
        ) from error


def create_gloo_group(
    store: Store,
    rank: int,
    size: int,
    *,
    host: str = "127.0.0.1",
    timeout: float = 60.0,
    patience: float = 30 * IDLE_TIMEOUT,
) -> Backend:
    """A group of ``size`` processes of which this is ``rank``.  In seconds: ``timeout`` to find each other, then
    ``patience`` for an answer."""
    kind: Any = dist.ProcessGroupGloo  # its options are known to no type checker
    options = kind._Options()
    options._devices = [kind.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout)
    made = kind(store, rank, size, options)
    made.set_timeout(timedelta(seconds=patience))
    talks: Backend = made
    return talks


def connect_groups(
    mesh: Mesh, store: Store, *, host: str = "127.0.0.1", timeout: float = 60.0, idle: float = 30 * IDLE_TIMEOUT
) -> ProcessGroups:
    """Gloo's groups for this rank, found through ``store`` (a file's, or a port's), on this machine's address ``host``.

    Every rank of the mesh calls it.  A mesh of its own wants a store, or a prefix, of its own.  In seconds: ``timeout``
    for ranks to find each other, and in the middle of a step; ``idle`` for rank 0 to say what is next.  A rank whose
    process has ended is noticed at once.
    """

    def group(name: str, ranks: Sequence[int], patience: float = timeout) -> Backend | None:
        if len(ranks) == 1:
            return None
        apart = dist.PrefixStore(f"{mesh} {name}", store)  # type: ignore[attr-defined]
        return create_gloo_group(
            apart, ranks.index(mesh.rank), len(ranks), host=host, timeout=timeout, patience=patience
        )

    first = mesh.stage * mesh.tensor_parallel
    return ProcessGroups(
        mesh,
        world=group("world", range(mesh.size), idle),
        stage=group(f"stage {mesh.stage}", range(first, first + mesh.tensor_parallel)),
        pipeline=group(f"line {mesh.tensor_rank}", range(mesh.tensor_rank, mesh.size, mesh.tensor_parallel)),
    )
