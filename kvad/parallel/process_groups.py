"""Process groups of a rank, as values, and messages between ranks; torch's default group is not used.

The ranks of a stage add up partial sums (tensor parallel), the stages pass hidden states to the next (pipeline), and
rank 0 broadcasts to all (world). Any backend of torch works; ``connect_groups`` creates gloo groups. All ranks of a
group must make the same calls in the same order; otherwise a call raises EngineError after the group's timeout.

A message has a kind and a value of JSON values, tensors, tuples, mappings and the types of ``model_input.py``; no
pickle. It is three transfers: [2] int64 (the lengths of the others), JSON text, and the tensors' bytes, omitted if
empty. In the text, a tensor is an index into the list of dtypes and shapes; the tensors are concatenated, each at a
multiple of 8 bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from kvad.errors import EngineError
from kvad.model_input import BlockOps, EvictOp, MergeOp, ModelInput, Rotary, SlotMapping, SubBatch
from kvad.parallel.mesh import Mesh

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

IDLE_TIMEOUT = 86_400.0  # seconds
ALIGNED = 8  # bytes
FLOAT_DTYPES = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
DTYPES = {name: getattr(torch, name) for name in (*FLOAT_DTYPES, "int64", "int32", "int8", "uint8", "bool")}
TYPES = {cls.__name__: cls for cls in (BlockOps, EvictOp, MergeOp, ModelInput, Rotary, SlotMapping, SubBatch)}


class Backend(Protocol):
    """The operations of a torch process group that kvad uses."""

    def allreduce(self, tensors: list[Tensor]) -> Any: ...
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> Any: ...
    def broadcast(self, tensors: list[Tensor], options: Any) -> Any: ...
    def send(self, tensors: list[Tensor], to: int, tag: int) -> Any: ...
    def recv(self, tensors: list[Tensor], of: int, tag: int) -> Any: ...


@dataclass(frozen=True)
class ProcessGroups:
    """The process groups of a rank; None if the rank is the group's only member."""

    mesh: Mesh
    world: Backend | None = None  # all ranks
    stage: Backend | None = None  # the ranks of one stage, by tensor rank
    pipeline: Backend | None = None  # one rank of each stage, in order

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of x over the ranks of the stage, with equal bits on each."""
        if self.stage is None:
            return x
        if torch.is_grad_enabled() and x.requires_grad:
            raise EngineError("a sharded model cannot compute gradients", "run it under torch.no_grad()")
        x = x.contiguous()
        self._wait(self.stage.allreduce, [x])
        return x

    def gather(self, x: Tensor, stride: int = 1) -> Tensor:
        """Concatenate x [n, ...] of every ``stride``-th rank of the stage: [ranks / stride * n, ...]."""
        if self.stage is None:
            return x
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.mesh.tensor_parallel)]
        self._wait(self.stage.allgather, [parts], [x])
        return torch.cat(parts[::stride])

    def send_next_stage(self, x: Tensor) -> None:
        assert self.pipeline is not None
        self._wait(self.pipeline.send, [x.contiguous()], self.mesh.stage + 1, 0)

    def receive_previous_stage(self, like: Tensor) -> Tensor:
        """Receive a tensor like ``like`` from the previous stage."""
        assert self.pipeline is not None
        x = torch.empty_like(like, memory_format=torch.contiguous_format)
        self._wait(self.pipeline.recv, [x], self.mesh.stage - 1, 0)
        return x

    def broadcast_from_last_stage(self, x: Tensor) -> Tensor:
        """Return the last stage's x on every stage."""
        if self.pipeline is None:
            return x
        return self._broadcast(self.pipeline, x.contiguous(), self.mesh.pipeline_parallel - 1)

    def broadcast_from_first_rank(self, x: Tensor) -> Tensor:
        """Return rank 0's x on every rank."""
        return x if self.world is None else self._broadcast(self.world, x.contiguous(), 0)

    def send(self, x: Tensor, rank: int) -> None:
        assert self.world is not None
        self._wait(self.world.send, [x.contiguous()], rank, 1)

    def receive(self, x: Tensor, rank: int) -> Tensor:
        """Receive into x from a rank, and return it."""
        assert self.world is not None
        self._wait(self.world.recv, [x], rank, 1)
        return x

    def _broadcast(self, group: Backend, x: Tensor, root: int) -> Tensor:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        self._wait(group.broadcast, [x], options)
        return x

    def _wait(self, call: Callable[..., Any], *args: Any) -> None:
        wait_for(f"rank {self.mesh.rank} of a mesh of {self.mesh}", call, *args)


def wait_for(who: str, call: Callable[..., Any], *args: Any) -> None:
    """Make a call of a process group and wait for its result; EngineError if another rank does not respond."""
    try:
        call(*args).wait()
    except RuntimeError as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise EngineError(
            f"{who}: another rank does not respond: {reason}",
            "it ended or failed while others waited: end all ranks and start them again",
        ) from error


def create_gloo_group(
    store: Store,
    rank: int,
    size: int,
    *,
    host: str = "127.0.0.1",
    timeout: float = 60.0,
    response_timeout: float = 30 * IDLE_TIMEOUT,
) -> Backend:
    """Create a gloo group of ``size`` processes.

    Args:
        store: The store through which the processes find each other.
        host: Address of this machine.
        timeout: Seconds for the processes to find each other.
        response_timeout: Seconds to wait in a call.
    """
    cls: Any = dist.ProcessGroupGloo  # its options have no type annotations
    options = cls._Options()
    options._devices = [cls.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout)
    group = cls(store, rank, size, options)
    group.set_timeout(timedelta(seconds=response_timeout))
    backend: Backend = group
    return backend


def connect_groups(
    mesh: Mesh, store: Store, *, host: str = "127.0.0.1", timeout: float = 60.0, idle: float = 30 * IDLE_TIMEOUT
) -> ProcessGroups:
    """Create this rank's gloo groups; every rank of the mesh must call it.

    If the process of another rank ends, calls fail at once, whatever the timeouts.

    Args:
        mesh: The mesh, as seen from this rank.
        store: A file or TCP store; each mesh needs a separate store or prefix.
        host: Address of this machine.
        timeout: Seconds for ranks to find each other, and to respond within a step.
        idle: Seconds to wait for the next message of rank 0.
    """

    def group(name: str, ranks: Sequence[int], response_timeout: float = timeout) -> Backend | None:
        if len(ranks) == 1:
            return None
        prefixed = dist.PrefixStore(f"{mesh} {name}", store)  # type: ignore[attr-defined]
        return create_gloo_group(
            prefixed, ranks.index(mesh.rank), len(ranks), host=host, timeout=timeout, response_timeout=response_timeout
        )

    first = mesh.stage * mesh.tensor_parallel
    return ProcessGroups(
        mesh,
        world=group("world", range(mesh.size), idle),
        stage=group(f"stage {mesh.stage}", range(first, first + mesh.tensor_parallel)),
        pipeline=group(f"line {mesh.tensor_rank}", range(mesh.tensor_rank, mesh.size, mesh.tensor_parallel)),
    )


class Message(NamedTuple):
    """A message between ranks. Lists of its payload arrive as tuples."""

    kind: str
    payload: Any = None


def send(message: Message, put: Callable[[Tensor], object]) -> None:
    tensors: list[Tensor] = []
    payload = _encode(message.payload, tensors)
    shapes = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
    text = json.dumps([message.kind, payload, shapes]).encode()
    flat = [tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    padded = [F.pad(part, (0, -len(part) % ALIGNED)) for part in flat]
    raw = torch.cat(padded) if padded else torch.empty(0, dtype=torch.uint8)
    put(torch.tensor([len(text), len(raw)], dtype=torch.int64))
    put(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    if len(raw):
        put(raw)


def receive(take: Callable[[Tensor], Tensor], device: torch.device | str = "cpu") -> Message:
    """Receive a message with ``take``, which fills a tensor; the message's tensors are moved to ``device``."""
    length, size = take(torch.zeros(2, dtype=torch.int64)).tolist()
    text = bytes(take(torch.zeros(length, dtype=torch.uint8)).tolist())
    kind, payload, shapes = json.loads(text)
    raw = take(torch.zeros(size, dtype=torch.uint8)) if size else torch.empty(0, dtype=torch.uint8)
    return Message(kind, _decode(payload, [tensor.to(device) for tensor in _split_tensors(raw, shapes)]))


def _encode(value: Any, tensors: list[Tensor]) -> Any:
    """Encode a value as JSON values: tensors as an index into ``tensors``, named tuples with the name of their type."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, Mapping):
        return {"items": [[key, _encode(item, tensors)] for key, item in value.items()]}
    if isinstance(value, tuple | list):
        items = [_encode(item, tensors) for item in value]
        name = type(value).__name__
        return {"type": name, "fields": items} if name in TYPES else items
    return value


def _decode(value: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(value, list):
        return tuple(_decode(item, tensors) for item in value)
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "items" in value:
        return {key: _decode(item, tensors) for key, item in value["items"]}
    return TYPES[value["type"]](*(_decode(field, tensors) for field in value["fields"]))


def _split_tensors(raw: Tensor, shapes: Sequence[tuple[str, list[int]]]) -> Iterator[Tensor]:
    start = 0
    for name, shape in shapes:
        dtype = DTYPES[name]
        size = math.prod(shape) * dtype.itemsize
        yield raw[start : start + size].view(dtype).view(shape)
        start += -(-size // ALIGNED) * ALIGNED
