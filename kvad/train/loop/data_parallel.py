"""Several processes that train one model together (data parallel), each on its share of a step's micro-batches.

    micro-batches of a step     0  1  2  3  4  5        accumulate = 6, two ranks
    rank 0 learns from          0     2     4           rank 1 from 1, 3, 5

Every rank makes all micro-batches, a function of seed and step, so each knows how many targets the whole step has, and
its gradients are weighed by that number.  They are added up over the ranks; then every rank makes the same update, so
weights and moments stay equal without being sent.  What decides (the clock, an evaluation's loss) is rank 0's; a
signal may come to any.  One process is alone: nothing is sent, and nothing is another number.

Everything is called by all ranks in the same order.  One that ends is noticed by the others, with an EngineError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kvad import parallel
from kvad.errors import ConfigError, NumericalError, UsageError
from kvad.train.config import TrainConfig

REDUCE_BUCKET_ELEMENTS = 1 << 22  # numbers of gradients that are sent together
TORCHRUN_HINT = "torchrun --nproc-per-node {} -m kvad train ..."

T = TypeVar("T")


@dataclass(frozen=True)
class DataParallelGroup:
    """This process is ``rank`` of ``size``; ``device``: where a tensor lies when the ``group`` sends it."""

    rank: int = 0
    size: int = 1
    group: parallel.process_groups.Backend | None = None
    device: str = "cpu"

    @property
    def is_main(self) -> bool:
        """Whether this one reports, evaluates for all, and saves."""
        return self.rank == 0

    # ------------------------------------------------------------ what is refused

    def check_divisible(self, train: TrainConfig) -> None:
        """ConfigError where the micro-batches cannot be shared evenly."""
        if train.gradient_accumulation_steps % self.size:
            raise ConfigError(
                f"train.gradient_accumulation_steps: {train.gradient_accumulation_steps} micro-batches cannot be shared evenly by {self.size} ranks",
                f"a multiple of {self.size}, as in --accumulate {-(-train.gradient_accumulation_steps // self.size) * self.size}",
            )

    def check_world_size(self, ranks: int) -> None:
        """ConfigError where a run of so many ranks is to go on with another number of them."""
        if ranks != self.size:
            how = TORCHRUN_HINT.format(ranks) if ranks > 1 else "kvad train ..., without torchrun"
            raise ConfigError(f"cannot resume with another configuration: ranks: {ranks} there, {self.size} here", how)

    def check_data_equal(self, key: Callable[[], str]) -> None:
        """ConfigError where ranks would make different tokens, by the ``key`` of them."""
        if self.size > 1 and len(set(self.all_gather_text(key()))) > 1:
            raise ConfigError(
                "the ranks have not read the same texts with the same tokenizer",
                "do the files change meanwhile? A tokenizer that is trained already: --tokenizer PATH",
            )

    def check_weights_equal(self, model: nn.Module, step: int) -> None:
        """NumericalError where the ranks' weights are not the same numbers any more."""
        if self.size == 1:
            return
        sums = torch.stack([p.detach().sum(dtype=torch.float64) for p in model.parameters()])
        first, *others = (each.view(torch.int64) for each in self.all_gather(sums))
        if not all(torch.equal(first, other) for other in others):
            raise NumericalError(
                f"step {step}: the weights of the ranks differ, and are to be equal",
                "are all ranks of one machine, with the same versions?",
            )

    # ------------------------------------------------------------ a step

    def local_batches(self, batches: Sequence[T]) -> Sequence[T]:
        """Those of a step that this rank learns from."""
        return batches if self.size == 1 else batches[self.rank :: self.size]

    def global_index(self, mine: int) -> int:
        """Which of the step's micro-batches a rank's own is."""
        return self.rank + mine * self.size

    def all_reduce_gradients(self, model: nn.Module, summed: float) -> float:
        """Each gradient becomes the sum of the ranks' (None where no rank has one); -> ``summed`` of all ranks."""
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
                self._sum(bucket[0])  # in its place
                continue
            flat = self._sum(torch.cat([gradient.reshape(-1) for gradient in bucket]))
            parts = flat.split([gradient.numel() for gradient in bucket])
            for gradient, part in zip(bucket, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        return float(total)

    # ------------------------------------------------------------ what is decided alike

    def any_rank(self, said: bool) -> bool:
        """Whether any rank says so."""
        return said if self.size == 1 else bool(self._sum(torch.tensor([float(said)])).item())

    def broadcast_scalar(self, number: float) -> float:
        """Rank 0's."""
        if self.size == 1:
            return number
        return float(self._sum(torch.tensor([number if self.is_main else 0.0], dtype=torch.float64)).item())

    def clock(self, clock: Callable[[], float]) -> Callable[[], float]:
        """Rank 0's, for all."""
        return clock if self.size == 1 else lambda: self.broadcast_scalar(clock())

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """The block is rank 0's first; when it is through, the others'."""
        if not self.is_main:
            self.any_rank(False)
        yield
        if self.is_main:
            self.any_rank(False)

    # ------------------------------------------------------------ what each has

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """x of every rank, by rank; of one shape everywhere."""
        if self.group is None:
            return [x]
        there = x.to(self.device).contiguous()
        parts = [torch.empty_like(there) for _ in range(self.size)]
        self._ask(self.group.allgather, [parts], [there])
        return [part.to(x.device) for part in parts]

    def all_gather_text(self, text: str) -> list[str]:
        """What every rank says, by rank."""
        if self.size == 1:
            return [text]
        said = text.encode()
        lengths = [int(each) for each in self.all_gather(torch.tensor([len(said)]))]
        padded = torch.tensor([*said, *bytes(max(lengths) + 1 - len(said))], dtype=torch.uint8)
        found = zip(self.all_gather(padded), lengths, strict=True)
        return [bytes(each[:length].tolist()).decode() for each, length in found]

    def random_state(self, device: str) -> dict[str, Tensor]:
        """The state of all ranks' random numbers, as a checkpoint keeps it: ``rng``, ``rng.1``, ...; of a GPU's
        ``rng_device`` ..."""
        states = {"rng": torch.get_rng_state()}
        if torch.device(device).type == "cuda":
            states["rng_device"] = torch.cuda.get_rng_state(device)
        return {_of(name, rank): x for name, own in states.items() for rank, x in enumerate(self.all_gather(own))}

    def restore_random(self, tensors: Mapping[str, Tensor], device: str) -> None:
        """The reverse, of this rank."""
        torch.set_rng_state(tensors[_of("rng", self.rank)])
        if "rng_device" in tensors:
            torch.cuda.set_rng_state(tensors[_of("rng_device", self.rank)], device)

    def _sum(self, x: Tensor) -> Tensor:
        """Of every rank: the same bits on each of them."""
        assert self.group is not None, "several ranks have a group"
        x = x.to(self.device)
        self._ask(self.group.allreduce, [x])
        return x

    def _ask(self, call: Callable[..., Any], *given: Any) -> None:
        parallel.process_groups.wait_for(f"rank {self.rank} of {self.size}", call, *given)


SINGLE_PROCESS = DataParallelGroup()


def init_data_parallel(environment: Mapping[str, str], train: TrainConfig) -> DataParallelGroup:
    """Those that ``torchrun`` has started with this process, connected; alone where it has not.

    gloo on the CPU, nccl on GPUs, of which rank r takes the r-th.  Raises UsageError and ConfigError for what cannot be
    shared so, before any other rank is waited for.
    """
    size = _number(environment, "WORLD_SIZE", 1)
    if size == 1:
        return SINGLE_PROCESS
    rank = _number(environment, "RANK", None)
    if not {"MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        raise UsageError(f"WORLD_SIZE is {size}, and MASTER_ADDR or MASTER_PORT is missing", TORCHRUN_HINT.format(size))
    here = _number(environment, "LOCAL_WORLD_SIZE", size)
    if here != size:
        raise ConfigError(
            f"{size} ranks, {here} of them here: all ranks are to be of one machine", TORCHRUN_HINT.format(size)
        )
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
    peers = DataParallelGroup(rank, size, kind(store, rank, size, options), train.device)
    peers.any_rank(
        False
    )  # what nccl needs for its first word it waits for minutes only: said now, while no rank is at work
    return peers


def _store(environment: Mapping[str, str], rank: int, size: int) -> Any:
    """Where the ranks find one another: torchrun's own store, else rank 0's."""
    own = rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    port = _number(environment, "MASTER_PORT", None)
    made = dist.TCPStore(environment["MASTER_ADDR"], port, size, own)  # type: ignore[attr-defined]
    return dist.PrefixStore(f"kvad {environment.get('TORCHELASTIC_RESTART_COUNT', 0)}", made)  # type: ignore[attr-defined]


def _take_gpu(device: str, rank: int) -> None:
    """``cuda`` is this rank's own from here on."""
    if torch.device(device).index is not None:
        raise ConfigError(f"train.device: {device!r} is one GPU, and every rank has one of its own", '"cuda"')
    if rank >= torch.cuda.device_count():
        raise ConfigError(f"train.device: rank {rank} has no GPU: there are {torch.cuda.device_count()}", "fewer ranks")
    torch.cuda.set_device(rank)


def _number(environment: Mapping[str, str], name: str, usual: int | None) -> int:
    text = environment.get(name)
    if text is None and usual is not None:
        return usual
    if text is None or not text.isdecimal():
        raise UsageError(f"{name}: expected a number, found {text!r}", TORCHRUN_HINT.format(2))
    return int(text)


def _of(name: str, rank: int) -> str:
    return f"{name}.{rank}" if rank else name


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """In their order, of one dtype each."""
    found, size = list[Tensor](), 0
    for gradient in gradients:
        if found and (size + gradient.numel() > REDUCE_BUCKET_ELEMENTS or gradient.dtype != found[0].dtype):
            yield found
            found, size = [], 0
        found.append(gradient)
        size += gradient.numel()
    if found:
        yield found
