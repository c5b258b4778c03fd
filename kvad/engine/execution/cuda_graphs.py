"""CUDA graphs of decoding steps: a step is recorded once per shape and replayed, in one call for all its kernels.

Steps are padded to few shapes (``decoding_bucket``). Padding sequences write to PADDING_BLOCK and read nothing. A shape
runs once as it is, which compiles its kernels, and is recorded when it occurs again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from kvad.engine.scheduling import SchedulerOutput
from kvad.model_input import ModelInput, SubBatch

MIN_READ_SLOTS = 64
SEQS_STEP = 8  # numbers of sequences above it are multiples of it


class BatchShape(NamedTuple):
    """Shape of a step."""

    sub_batches: tuple[SubBatch, ...]
    num_logits: int
    widths: tuple[tuple[int, ...], ...]  # per cache group and sub-batch: blocks of its longest sequence
    cross_sub_batches: tuple[SubBatch, ...] | None = None  # used by cross-attention groups, which come last
    num_token_groups: int = 0  # the first groups, which store tokens
    num_cached_groups: int = 0  # the groups before those of cross-attention

    @staticmethod
    def from_output(output: SchedulerOutput) -> BatchShape:
        sub_batches, cross_sub_batches, allocation = output.sub_batches, output.cross_sub_batches, output.allocation
        widths = tuple(_widths(sub_batches, tables) for tables in allocation.block_tables)
        num_logits = sum(len(scheduled.logit_offsets) for scheduled in output.scheduled)
        num_token_groups = len(allocation.slots)
        num_cached_groups = num_token_groups + allocation.num_lower_levels
        return BatchShape(sub_batches, num_logits, widths, cross_sub_batches, num_token_groups, num_cached_groups)

    def group_sub_batches(self, group: int) -> tuple[SubBatch, ...]:
        if group < self.num_cached_groups or self.cross_sub_batches is None:
            return self.sub_batches
        return self.cross_sub_batches


def _widths(sub_batches: Sequence[SubBatch], tables: Sequence[Sequence[int]]) -> tuple[int, ...]:
    widths, start = [], 0
    for sub_batch in sub_batches:
        widths.append(max(map(len, tables[start : start + sub_batch.num_seqs])))
        start += sub_batch.num_seqs
    return tuple(widths)


def decoding_bucket(shape: BatchShape) -> BatchShape | None:
    """Return the padded shape of a step in which every sequence decodes one token; None for another step.

    All sequences are one sub-batch, because the kernels read each up to its own length.

    Example: 5 sequences with tables of 3 blocks, and 1 with 9 -> 8 sequences (6 and 2 of padding) with 16 blocks.
    """
    num_seqs = sum(sub_batch.num_seqs for sub_batch in shape.sub_batches)
    is_decoding = all(sub_batch.num_new_tokens == 1 for sub_batch in shape.sub_batches)
    if not is_decoding or shape.num_logits != num_seqs or shape.cross_sub_batches is not None:
        return None
    if shape.num_token_groups != len(shape.widths):  # lower levels are read in parts
        return None
    slots = max(MIN_READ_SLOTS, *(sub_batch.num_read_slots for sub_batch in shape.sub_batches))
    bucket = num_seqs_bucket(num_seqs)
    return shape._replace(
        sub_batches=(SubBatch(bucket, 1, power_of_two(slots)),),
        num_logits=bucket,
        widths=tuple((power_of_two(max(widths)),) for widths in shape.widths),
    )


def num_seqs_bucket(num_seqs: int) -> int:
    """Return the number of sequences with padding: 1, 2, 4, 8, 16, 24, 32, ..."""
    return power_of_two(num_seqs) if num_seqs < SEQS_STEP else -(-num_seqs // SEQS_STEP) * SEQS_STEP


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least ``number``."""
    return 1 << max(0, number - 1).bit_length()


class Recording(NamedTuple):
    """A recorded step."""

    replay: Callable[[], object]
    logits: Tensor  # written by ``replay``
    model_input: ModelInput  # its tensors stay allocated while the graph exists


class Recorder(Protocol):
    """Records functions; ``ModelRunner`` has one for CUDA."""

    def record(self, function: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        """Return what replays a function, and its output, which each replay overwrites."""
        ...

    def clear(self) -> None:
        """Forget the memory of all recordings, which are no longer used."""
        ...


class GraphCache:
    """Recorded steps by shape, the least recently used of which is dropped at the limit.

    Args:
        forward: Computes logits from a step's input.
        limit: Number of graphs; 0: none are recorded.
        recorder: Records a step.
    """

    def __init__(self, forward: Callable[[ModelInput], Tensor], limit: int, recorder: Recorder) -> None:
        self._forward, self.limit, self._recorder = forward, limit, recorder
        self._recordings: OrderedDict[BatchShape, Recording] = OrderedDict()
        self._prepared: set[BatchShape] = set()
        self.reason = "" if limit > 0 else "the engine has cuda_graphs=0"  # why no step is recorded
        self.num_recorded = 0

    def __len__(self) -> int:
        return len(self._recordings)

    def clear(self) -> None:
        """Drop all graphs, whose tensors are replaced."""
        self._recordings.clear()
        self._prepared.clear()
        self._recorder.clear()

    def run(self, shape: BatchShape, model_input: ModelInput) -> Tensor:
        """Return the logits of a padded step; the next call may overwrite them."""
        recording = self._recordings.get(shape)
        if recording is None:
            if self.reason or shape not in self._prepared:
                self._prepared.add(shape)
                return self._forward(model_input)
            try:
                replay, logits = self._recorder.record(lambda: self._forward(model_input))
            except RuntimeError as error:  # of CUDA, or of an operation that waits for the device
                self.reason = f"a step cannot be recorded: {str(error).partition(chr(10))[0]}"
                return self._forward(model_input)
            if len(self._recordings) >= self.limit:
                self._recordings.popitem(last=False)
            recording = self._recordings[shape] = Recording(replay, logits, model_input)
            self.num_recorded += 1
        self._recordings.move_to_end(shape)
        recording.replay()
        return recording.logits
