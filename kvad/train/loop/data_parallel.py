"""Data parallelism: processes train one model, each on its share of the micro-batches.

    micro-batches of a step     0  1  2  3  4  5        gradient_accumulation_steps = 6, two ranks
    rank 0 learns from          0     2     4           rank 1 from 1, 3, 5

Every rank builds all micro-batches, a function of seed and step, so each rank knows the number of targets of the whole
step, by which gradients are weighted. Gradients are summed over the ranks; then every rank makes the same update, so
weights and moments stay equal without being sent. Rank 0's clock and evaluation losses decide; a signal may reach any
rank. With one process nothing is sent and no number changes.

All ranks call everything in the same order. If one ends, the others raise EngineError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kvad import parallel
from kvad.errors import ConfigError, NumericalError, UsageError
from kvad.train.config import TrainConfig

REDUCE_BUCKET_ELEMENTS = 1 << 22  # gradient elements reduced in one call
TORCHRUN_HINT = "torchrun --nproc-per-node {} -m kvad train ..."


@dataclass(frozen=True)
class DataParallelGroup:
    """Process ``rank`` of ``size``."""

    rank: int = 0
    size: int = 1
    group: parallel.process_groups.Backend | None = None
    device: str = "cpu"  # device of the tensors that the group sends

    @property
    def is_main(self) -> bool:
        """True if this rank reports, evaluates for all, and saves."""
        return self.rank == 0

    def check_divisible(self, train: TrainConfig) -> None:
        """Raise ConfigError if the micro-batches cannot be shared evenly."""
        if train.gradient_accumulation_steps % self.size:
            steps = train.gradient_accumulation_steps
            raise ConfigError(
                f"train.gradient_accumulation_steps: must be a multiple of the {self.size} ranks, got {steps}",
                f"For example: --gradient-accumulation-steps {-(-steps // self.size) * self.size}",
            )

    def check_world_size(self, ranks: int) -> None:
        """Raise ConfigError if a run started with ``ranks`` ranks would resume with another number."""
        if ranks != self.size:
            command = TORCHRUN_HINT.format(ranks) if ranks > 1 else "kvad train ..., without torchrun"
            raise ConfigError(
                f"cannot resume with another configuration: ranks: {ranks} there, {self.size} here", command
            )

    def check_data_equal(self, key: Callable[[], str]) -> None:
        """Raise ConfigError if the ranks' token fingerprints, returned by ``key``, differ."""
        if self.size > 1 and len(set(self.all_gather_text(key()))) > 1:
            raise ConfigError(
                "the ranks have not read the same texts with the same tokenizer",
                "Check that the files do not change meanwhile, or use a trained tokenizer: --tokenizer PATH",
            )

    def check_weights_equal(self, model: nn.Module, step: int) -> None:
        """Raise NumericalError if the ranks' weights are not equal."""
        if self.size == 1:
            return
        sums = torch.stack([p.detach().sum(dtype=torch.float64) for p in model.parameters()])
        first, *others = (gathered.view(torch.int64) for gathered in self.all_gather(sums))
        if not all(torch.equal(first, other) for other in others):
            raise NumericalError(
                f"step {step}: the weights of the ranks differ", "Run all ranks on one machine with the same versions."
            )

    def all_reduce_gradients(self, model: nn.Module, summed: float) -> float:
        """Sum each gradient over the ranks, None if no rank has one; return the sum of ``summed``."""
        if self.size == 1:
            return summed
        learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
        has = [float(parameter.grad is not None) for parameter in learned]
        total, *flags = self._sum(torch.tensor([summed, *has], dtype=torch.float64)).tolist()
        gradients = []
        for parameter, flag in zip(learned, flags, strict=True):
            if flag and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad is not None:
                gradients.append(parameter.grad)
        for bucket in _buckets(gradients):
            if len(bucket) == 1 and bucket[0].is_contiguous():
                self._sum(bucket[0])  # in place
                continue
            flat = self._sum(torch.cat([gradient.reshape(-1) for gradient in bucket]))
            parts = flat.split([gradient.numel() for gradient in bucket])
            for gradient, part in zip(bucket, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        return float(total)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` over all ranks."""
        return x if self.size == 1 else self._sum(x).to(x.device)

    def any_rank(self, flag: bool) -> bool:
        """Return True if ``flag`` is true on any rank."""
        return flag if self.size == 1 else bool(self._sum(torch.tensor([float(flag)])).item())

    def broadcast_scalar(self, number: float) -> float:
        """Return rank 0's number."""
        if self.size == 1:
            return number
        return float(self._sum(torch.tensor([number if self.is_main else 0.0], dtype=torch.float64)).item())

    def clock(self, clock: Callable[[], float]) -> Callable[[], float]:
        """Return a clock that shows rank 0's time on all ranks."""
        return clock if self.size == 1 else lambda: self.broadcast_scalar(clock())

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Run the block on rank 0 first, then on the others."""
        if not self.is_main:
            self.any_rank(False)
        yield
        if self.is_main:
            self.any_rank(False)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Return ``x`` of every rank, ordered by rank; shapes must agree."""
        if self.group is None:
            return [x]
        there = x.to(self.device).contiguous()
        parts = [torch.empty_like(there) for _ in range(self.size)]
        self._call(self.group.allgather, [parts], [there])
        return [part.to(x.device) for part in parts]

    def all_gather_text(self, text: str) -> list[str]:
        """Return the texts of all ranks, ordered by rank."""
        content = text.encode()
        lengths = [int(length) for length in self.all_gather(torch.tensor([len(content)]))]
        padded = torch.tensor([*content, *bytes(max(lengths) + 1 - len(content))], dtype=torch.uint8)
        gathered = zip(self.all_gather(padded), lengths, strict=True)
        return [bytes(row[:length].tolist()).decode() for row, length in gathered]

    def random_state(self, device: str) -> dict[str, Tensor]:
        """Return all ranks' states as checkpoint tensors: ``rng``, ``rng.1``, ..., of GPUs ``rng_device``, ...."""
        states = random_state(device).items()
        return {_rank_key(name, rank): x for name, own in states for rank, x in enumerate(self.all_gather(own))}

    def restore_random(self, tensors: Mapping[str, Tensor], device: str) -> None:
        """Restore this rank's random number state."""
        names = [name for name in ("rng", "rng_device") if name in tensors]
        restore_random_state({name: tensors[_rank_key(name, self.rank)] for name in names}, device)

    def _sum(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks, bit-equal on each of them."""
        assert self.group is not None, "several ranks need a process group"
        x = x.to(self.device)
        self._call(self.group.allreduce, [x])
        return x

    def _call(self, call: Callable[..., Any], *arguments: Any) -> None:
        parallel.process_groups.wait_for(f"rank {self.rank} of {self.size}", call, *arguments)


SINGLE_PROCESS = DataParallelGroup()


def init_data_parallel(environment: Mapping[str, str], train: TrainConfig) -> DataParallelGroup:
    """Connect the processes that ``torchrun`` started; return SINGLE_PROCESS without torchrun.

    Uses gloo on the CPU and nccl on GPUs, where rank r takes the r-th GPU. Work that cannot be shared is refused before
    any rank waits.
    """
    size = _number(environment, "WORLD_SIZE", 1)
    if size == 1:
        return SINGLE_PROCESS
    rank = _number(environment, "RANK", None)
    if not {"MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        message = f"MASTER_ADDR, MASTER_PORT: must be set, because WORLD_SIZE is {size}"
        raise UsageError(message, TORCHRUN_HINT.format(size))
    local_size = _number(environment, "LOCAL_WORLD_SIZE", size)
    if local_size != size:
        message = f"all {size} ranks must run on one machine, got {local_size} here"
        raise ConfigError(message, TORCHRUN_HINT.format(size))
    DataParallelGroup(rank, size).check_divisible(train)
    gpu = torch.device(train.device).type == "cuda"
    if gpu:
        _take_gpu(train.device, _number(environment, "LOCAL_RANK", rank))
    store = _store(environment, rank, size)
    if not gpu:
        return DataParallelGroup(rank, size, parallel.process_groups.create_gloo_group(store, rank, size))
    kind: Any = dist.ProcessGroupNCCL  # not in a torch for the CPU
    options = kind.Options()
    options._timeout = timedelta(seconds=parallel.process_groups.IDLE_TIMEOUT)
    data_parallel = DataParallelGroup(rank, size, kind(store, rank, size, options), train.device)
    data_parallel.any_rank(False)  # nccl's first call times out after minutes: make it before any rank is busy
    return data_parallel


def _store(environment: Mapping[str, str], rank: int, size: int) -> Any:
    """Return the store where ranks meet: torchrun's own, else rank 0's."""
    own = rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    port = _number(environment, "MASTER_PORT", None)
    store = dist.TCPStore(environment["MASTER_ADDR"], port, size, own)  # type: ignore[attr-defined]
    return dist.PrefixStore(f"kvad {environment.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)  # type: ignore[attr-defined]


def _take_gpu(device: str, rank: int) -> None:
    """Make ``cuda`` this rank's own GPU."""
    if torch.device(device).index is not None:
        raise ConfigError(f"train.device: must not name one GPU, got {device!r}", 'Use "cuda"; rank r takes GPU r.')
    if rank >= torch.cuda.device_count():
        raise ConfigError(
            f"train.device: rank {rank} has no GPU, this machine has {torch.cuda.device_count()}", "Start fewer ranks."
        )
    torch.cuda.set_device(rank)


def _number(environment: Mapping[str, str], name: str, default: int | None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        raise UsageError(f"{name}: must be a number, got {text!r}", TORCHRUN_HINT.format(2))
    return int(text)


def random_state(device: str) -> dict[str, Tensor]:
    """Return a copy of the random number state of the CPU and, if ``device`` is a GPU, of that GPU."""
    state = {"rng": torch.get_rng_state()}
    if torch.device(device).type == "cuda":
        state["rng_device"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: Mapping[str, Tensor], device: str) -> None:
    """Restore what ``random_state`` returned."""
    torch.set_rng_state(state["rng"])
    if "rng_device" in state and torch.device(device).type == "cuda":  # a resumed run may use another device
        torch.cuda.set_rng_state(state["rng_device"], device)


def _rank_key(name: str, rank: int) -> str:
    return f"{name}.{rank}" if rank else name


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Group gradients of one dtype, in their order."""
    bucket, size = list[Tensor](), 0
    for gradient in gradients:
        if bucket and (size + gradient.numel() > REDUCE_BUCKET_ELEMENTS or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.numel()
    if bucket:
        yield bucket
