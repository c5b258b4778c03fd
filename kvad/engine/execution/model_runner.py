"""Model runner: apply block operations, fill input buffers and run the model.

The model receives tensors only; ``ModelRunner.tensors`` lists all that outlive a step. Those of the input are at the
same addresses whenever a batch shape recurs. A ``BatchShape`` is everything about a step except the numbers in its
tensors: sub-batches, number of logits, table widths. All integers are in one host buffer, which goes to an accelerator
in one copy; the tensors of each shape are created once, as views. A captured graph needs this, and an eager step saves
a dozen small allocations.

    sub-batch (2 sequences x 1 token), one group, tables 3 wide:
    tokens 2 | positions 2 | logit indices 2 | slots 2 | table 2 x 3

A ModelInput of ``InputBuffers.fill`` is valid until the next one.
"""

from __future__ import annotations

import array
import ctypes
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kvad import model as model_lib
from kvad import ops
from kvad.cache.device import KVCache, paged_reason
from kvad.engine import scheduling
from kvad.engine.execution.cuda_graphs import BatchShape, GraphCache, decoding_bucket
from kvad.engine.execution.fused_decoder import FusedDecoder, build_fused_decoder
from kvad.engine.execution.native_program import NativeProgram, build_program
from kvad.engine.scheduling import SchedulerOutput
from kvad.model import Transformer
from kvad.model_input import NULL_BLOCK, PADDING_BLOCK, BlockOps, CacheProtocol, ModelInput, SlotMapping

LOG = logging.getLogger(__name__)
ALIGNED = 8  # integers, 64 bytes
MIN_CAPACITY = 1 << 12  # integers
MAX_GRAPHS = 64  # recorded steps, by default
MAX_SHAPES = 256  # cached; all are rebuilt when the limit is exceeded


class _Table:
    """Host memory of a block table, row after row."""

    def __init__(self, integers: memoryview, num_rows: int, stride: int) -> None:
        self._integers, self.stride = integers, stride  # sequences per row
        self._width = len(integers) // num_rows
        self._rows: list[list[int] | None] = [None] * num_rows  # their blocks; None: not written yet

    def forget(self) -> None:
        """Write every row the next time: the memory was used for another shape."""
        self._rows = [None] * len(self._rows)

    def write(self, tables: Sequence[Sequence[int]], start: int) -> int:
        """Write the blocks of every ``stride``-th sequence from ``start`` on, padded with NULL_BLOCK; return the end.

        Rows that have not changed are not written again, as in most decoding steps.
        """
        stop = start + len(self._rows) * self.stride
        blocks_of_rows, width = tables[start : stop : self.stride], self._width
        for index, written in enumerate(self._rows):
            blocks = blocks_of_rows[index] if index < len(blocks_of_rows) else []  # a padding sequence
            if written is None or written != blocks:
                _write(self._integers[index * width : (index + 1) * width], blocks, NULL_BLOCK)
                self._rows[index] = [*blocks]
        return stop


class _ShapeBuffers(NamedTuple):
    """Tensors of one shape, and their host memory in the order of ``_sizes``."""

    model_input: ModelInput
    vectors: list[memoryview]  # tokens, positions, logit indices, sequence lengths, slots of each group
    tables: list[list[_Table]]  # per group and sub-batch
    num_used: int


class InputBuffers:
    """Buffers for all shapes.

    Args:
        device: Device of the tensors.
        with_seq_lens: The rotary frequencies depend on the lengths of sequences.
        block_sizes: Slots of a block in each cache group, for steps that are padded.
    """

    def __init__(self, device: torch.device, *, with_seq_lens: bool, block_sizes: Sequence[int] = ()) -> None:
        self.device, self._with_seq_lens, self._block_sizes = device, with_seq_lens, block_sizes
        self.num_allocations = 0
        self._shapes: dict[BatchShape, _ShapeBuffers] = {}
        self._last: _ShapeBuffers | None = None  # written last
        self._copied: torch.cuda.Event | None = None  # the host buffer
        self._allocate(MIN_CAPACITY)

    def tensors(self) -> list[Tensor]:
        """Return every tensor that a step's tensors are views of."""
        return [self._device_buffer]

    def fill(self, output: SchedulerOutput, shape: BatchShape | None = None) -> ModelInput:
        """Write the step's integers to the tensors of its shape, or of a larger one, whose other tokens are padding.

        A token that the sequence does not have yet (``Scheduler.schedule_next``) is 0.
        """
        if self._copied is not None:
            self._copied.synchronize()  # the step before may be running
        buffers = self._buffers_for(BatchShape.from_output(output) if shape is None else shape)
        tokens: list[int] = []
        positions: list[int] = []
        seq_lens: list[int] = []
        logit_indices: list[int] = []
        for scheduled in output.scheduled:
            end = scheduled.start + scheduled.num_tokens
            logit_indices.extend(len(tokens) + offset for offset in scheduled.logit_offsets)
            tokens.extend(scheduled.token_ids or [0])
            positions.extend(range(scheduled.start, end))
            if self._with_seq_lens:
                seq_lens.extend([len(scheduled.sequence.token_ids)] * scheduled.num_tokens)
        vectors, allocation = iter(buffers.vectors), output.allocation
        for values in (tokens, positions, logit_indices, *([seq_lens] if self._with_seq_lens else [])):
            _write(next(vectors), values)
        for group, slots in enumerate(allocation.slots):
            _write(next(vectors), slots, PADDING_BLOCK * self._block_sizes[group] if self._block_sizes else 0)
        for tables, blocks in zip(buffers.tables, allocation.block_tables, strict=True):
            _write_tables(tables, blocks)
        if self._device_buffer is not self._host_buffer:
            self._device_buffer[: buffers.num_used].copy_(self._host_buffer[: buffers.num_used], non_blocking=True)
            if self.device.type == "cuda":
                self._copied = self._copied or torch.cuda.Event()
                self._copied.record()
        return buffers.model_input

    def _buffers_for(self, shape: BatchShape) -> _ShapeBuffers:
        buffers = self._shapes.get(shape)
        if buffers is None:
            sizes = _sizes(shape, self._with_seq_lens)
            num_integers = sum(map(_aligned, map(math.prod, sizes)))
            if num_integers > len(self._host_buffer):
                self._allocate(1 << (num_integers - 1).bit_length())
            if len(self._shapes) >= MAX_SHAPES:
                self._shapes.clear()
            buffers = self._shapes[shape] = self._views(shape, sizes)
        if buffers is not self._last:
            for table in itertools.chain.from_iterable(buffers.tables):
                table.forget()
            self._last = buffers
        return buffers

    def _allocate(self, integers: int) -> None:
        self._shapes.clear()
        self.num_allocations += 1
        self._host_buffer = torch.zeros(integers, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        self._host_memory = self._host_buffer.numpy().data
        self._device_buffer = (
            self._host_buffer if self.device.type == "cpu" else torch.zeros_like(self._host_buffer, device=self.device)
        )

    def _views(self, shape: BatchShape, sizes: Sequence[tuple[int, ...]]) -> _ShapeBuffers:
        host, views, offset = [], [], 0
        for dims in sizes:
            size = math.prod(dims)
            host.append(self._host_memory[offset : offset + size])
            views.append(self._device_buffer[offset : offset + size].view(dims))
            offset += _aligned(size)
        tensors = iter(views)
        tokens, positions, logit_indices = next(tensors), next(tensors), next(tensors)
        seq_lens = next(tensors) if self._with_seq_lens else None
        slot_mappings, tables_per_group = [], list[list[_Table]]()
        memory = iter(host)
        vectors = [next(memory) for _ in range(4 if self._with_seq_lens else 3)]
        for group, widths in enumerate(shape.widths):
            slots = None
            if group < shape.num_token_groups:
                slots = next(tensors)
                vectors.append(next(memory))
            tables = tuple(next(tensors) for _ in widths)
            cross_sub_batches = None if group < shape.num_cached_groups else shape.cross_sub_batches
            slot_mappings.append(SlotMapping(slots, tables, cross_sub_batches))
            pairs = zip(shape.sub_batches, shape.group_sub_batches(group), strict=True)
            strides = [sub_batch.num_seqs // group_batch.num_seqs for sub_batch, group_batch in pairs]
            tables_per_group.append(
                [_Table(next(memory), len(table), stride) for table, stride in zip(tables, strides, strict=True)]
            )
        model_input = ModelInput(
            tokens, positions, shape.sub_batches, logit_indices, seq_lens=seq_lens, slot_mappings=tuple(slot_mappings)
        )
        return _ShapeBuffers(model_input, vectors, tables_per_group, offset)


def _pooled_tokens(output: SchedulerOutput, device: torch.device) -> Tensor:
    """Return the indices of the step's tokens whose hidden states are pooled."""
    indices, first = list[int](), 0
    for scheduled in output.scheduled:
        if scheduled.sequence.request.pooling is not None:
            indices += range(first, first + scheduled.num_tokens)
        first += scheduled.num_tokens
    return torch.tensor(indices, dtype=torch.int64, device=device)


def _sizes(shape: BatchShape, with_seq_lens: bool) -> list[tuple[int, ...]]:
    """Return the shapes of tokens, positions, logit indices, sequence lengths, slots and tables."""
    tokens = sum(sub_batch.num_seqs * sub_batch.num_new_tokens for sub_batch in shape.sub_batches)
    sizes: list[tuple[int, ...]] = [(tokens,), (tokens,), (shape.num_logits,)]
    if with_seq_lens:
        sizes.append((tokens,))
    for group, widths in enumerate(shape.widths):
        if group < shape.num_token_groups:
            sizes.append((tokens,))
        sizes.extend(
            (sub_batch.num_seqs, width) for sub_batch, width in zip(shape.group_sub_batches(group), widths, strict=True)
        )
    return sizes


def _aligned(integers: int) -> int:
    return -(-integers // ALIGNED) * ALIGNED


def _write(integers: memoryview, values: Sequence[int], padding: int = 0) -> None:
    count, size = len(values), len(integers)
    integers[:count] = array.array(integers.format, values)
    if count < size:
        integers[count:] = array.array(integers.format, [padding]) * (size - count)


def _write_tables(tables: Sequence[_Table], blocks: Sequence[Sequence[int]]) -> None:
    """Write the blocks of all sequences to the tables of the sub-batches."""
    start = 0
    for table in tables:
        start = table.write(blocks, start)


class ManagedCache(CacheProtocol, Protocol):
    """Cache that a KVCacheManager controls: ``kvad.cache.device.kv_cache.KVCache``, or a stand-in."""

    def apply(self, block_ops: BlockOps) -> None: ...

    def tensors(self) -> list[Tensor]: ...


class CudaRecorder:
    """Records functions as CUDA graphs that share one memory pool, since only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None  # torch's handle of a memory pool
        self._stream: torch.cuda.Stream | None = None

    def clear(self) -> None:
        """Use other memory for the next recordings, since a pool without graphs cannot be used again."""
        self._pool = None

    def record(self, function: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        """Record a function without running it."""
        self._stream = self._stream or torch.cuda.Stream(self._device)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                output = function()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return graph.replay, output


class ModelRunner:
    """Runs scheduled steps on one model and one cache: with the native kernels if they can, else in PyTorch.

    ``native``: False always runs in PyTorch; ``compile_layers`` also does, with ``kvad.model.compiled``, and no other
    kernels. ``native_reason`` says why the kernels are not used, once a step has run; it is logged unless the caller or
    float64 asks for PyTorch.
    On a GPU, ``fused`` computes decoders that it can, and ``graphs`` replays decoding steps: at most ``cuda_graphs``
    shapes.
    ``start`` computes a step whose tokens are still on the device; ``execute`` then returns its logits.
    ``adapters``: a step in which a sequence has one of them runs in PyTorch if the kernels do not add all their terms,
    which those of a GPU do not.
    ``num_tokens``: ids below it are sampled (None: all). ``input_seconds``: time spent so far on block operations and
    inputs. ``op_seconds``, if set, receives the time of each operation of ``program`` (``NativeProgram.run``).
    ``hidden`` [T, E]: what the head reads of the last step's sequences whose states are pooled, in scheduled order.
    """

    def __init__(
        self,
        model: Transformer,
        cache: ManagedCache,
        *,
        native: bool = True,
        cuda_graphs: int = MAX_GRAPHS,
        compile_layers: bool = False,
        num_tokens: int | None = None,
        adapters: model_lib.lora.AdapterSet | None = None,
    ) -> None:
        self.model, self.cache, self._adapters = model, cache, adapters
        self.device = model.token_embedding.device
        short_lens = model_lib.positions.short_regime_lens(model.config.stack, model.config.max_seq_len)
        block_sizes = [group.block_size for group in cache.groups] if isinstance(cache, KVCache) else []
        self.buffers = InputBuffers(self.device, with_seq_lens=bool(short_lens), block_sizes=block_sizes)
        self._compile_layers, self._computed = compile_layers, model
        self._num_tokens = num_tokens
        compile_reason = "the engine has compile=True" if compile_layers else ""
        self.native_reason = compile_reason or ("" if native else "the engine has native=False")
        self.program: NativeProgram | None = None
        self._is_prepared = self._has_logged = False
        self.fused: FusedDecoder | None = None
        self._device_reason = self.fused_reason = compile_reason or ops.gpu.unavailable_reason(self.device)
        self.graphs = GraphCache(self._forward, cuda_graphs, CudaRecorder(self.device))
        self.graphs.reason = self.graphs.reason or self._unrecordable()
        self._weights_key: tuple[int, ...] = ()  # addresses
        self._graph_key: tuple[int, ...] = ()
        self._started: tuple[SchedulerOutput, Tensor] | None = None  # a step and its logits
        self.input_seconds = 0.0
        self.hidden: Tensor | None = None
        self.op_seconds: ctypes.Array[ctypes.c_double] | None = None

    def tensors(self) -> list[Tensor]:
        """Return every tensor that a step uses and that outlives it: inputs, cache and weights."""
        return [*self.buffers.tensors(), *self.cache.tensors(), *self.model.tensors()]

    @property
    def num_compilations(self) -> int:
        """Number of graphs that torch.compile has compiled for the model, in all engines."""
        return self.model.compiler.num_compilations

    def execute(self, output: SchedulerOutput) -> Tensor:
        """Return logits [N, V] of the step's logit positions, in scheduled order.

        Between two native steps the processor's caches have the weights, so what the host touches comes from memory:
        a decoding step of the kernels calls nothing of torch that it does not need.
        """
        assert output.encoder_batch is None, "an encoder step has no logits; call encode"
        started, self._started = self._started, None
        if started is not None and started[0] == output:
            return started[1]
        return self._compute(output)

    def start(self, output: SchedulerOutput, token_ids: Tensor) -> None:
        """Start a decoding step of tokens [N] on the device, which overwrites the logits of the step before."""
        self._started = None
        self._started = output, self._compute(output, token_ids)

    def _compute(self, output: SchedulerOutput, token_ids: Tensor | None = None) -> Tensor:
        start = time.perf_counter()
        if not output.allocation.block_ops.is_empty:
            with torch.inference_mode():
                self.cache.apply(output.allocation.block_ops)
        spans = ((scheduled.sequence, scheduled.num_tokens) for scheduled in output.scheduled)
        adapters = self._select_adapters(spans) if self._adapters else None
        is_unrecorded = self.graphs.reason or adapters or output.has_pooling
        bucket = None if is_unrecorded else decoding_bucket(BatchShape.from_output(output))
        model_input = self.buffers.fill(output) if bucket is None else self.buffers.fill(output, bucket)
        if token_ids is not None:
            with torch.inference_mode():
                model_input.token_ids[: len(token_ids)] = token_ids
        self.input_seconds += time.perf_counter() - start
        if not self._is_prepared or any(scheduled.start == 0 for scheduled in output.scheduled):
            self._update_kernels()
        program = self._program_for(adapters)
        if program is not None:
            indices = _pooled_tokens(output, self.device) if output.has_pooling else None
            logits, self.hidden = program.run(model_input, self.op_seconds, adapters, indices)
            return logits
        with torch.inference_mode():
            if adapters is not None or output.has_pooling:  # the other kernels have no hidden states
                hidden = self._computed(model_input._replace(adapters=adapters), self.cache)
                self.hidden = hidden[_pooled_tokens(output, self.device)] if output.has_pooling else None
                return self.model.logits(hidden, model_input.logit_indices)
            if bucket is None:
                return self._forward(model_input)
            if self._graph_key != (key := (self.buffers.num_allocations, *self._weights_key)):
                self.graphs.clear()
                self._graph_key = key
            return self.graphs.run(bucket, model_input)[: len(output.scheduled)]

    def _select_adapters(
        self, spans: Iterable[tuple[scheduling.sequence.TokenSequence, int]]
    ) -> model_lib.lora.SelectedAdapters | None:
        """Return the adapters of a step's tokens, given (sequence, number of tokens); None if no token has one."""
        if not self._adapters:
            return None
        return self._adapters.select((seq.request.adapter, count) for seq, count in spans)

    def _program_for(self, adapters: model_lib.lora.SelectedAdapters | None) -> NativeProgram | None:
        """Return the program that computes a step; logs once if the step runs in PyTorch because of its adapters."""
        if adapters is None:
            return self.program
        layer = "" if self.program is None else self.program.unadapted_layer
        if not self._has_logged and (layer or self.fused is not None):
            where = f" to {layer}" if layer else ""
            LOG.info("steps in which a sequence has an adapter run in PyTorch: faster kernels add no terms%s", where)
            self._has_logged = True
        return None if layer else self.program

    def best_tokens(self, logits: Tensor) -> list[int] | None:
        """Return the best token of each row of ``execute``'s logits, if the kernels have found it."""
        return None if self.program is None else self.program.best_tokens(logits)

    def _forward(self, model_input: ModelInput) -> Tensor:
        if self.fused is not None:
            return self.fused.run(model_input, self.cache)
        hidden = self._computed(model_input, self.cache)
        return self.model.logits(hidden, model_input.logit_indices)

    def _unrecordable(self) -> str:
        """Return why steps cannot be recorded as CUDA graphs; "" if they can."""
        if self.device.type != "cuda":
            return f"the device is {self.device.type}"
        if type(self.cache) is not KVCache:
            return f"the cache is {type(self.cache).__name__}"
        if any(isinstance(module, model_lib.layers.MixtureOfExperts) for module in self.model.modules()):
            return "experts are chosen on the host"
        indices = range(len(self.cache.groups))
        return next((reason for index in indices if (reason := paged_reason(self.cache, index))), "")

    @torch.inference_mode()
    def _update_kernels(self) -> None:
        """Choose the kernels if none were chosen, or if the weights have changed.

        They do not change during a request, so this is called at its start.
        """
        self._is_prepared = True
        if self._compile_layers:  # a hook may have been added or removed
            self._computed = model_lib.compiled.compile_layers(self.model)
        if not self._device_reason:
            key = tuple(parameter.data_ptr() for parameter in self.model.parameters())
            if key != self._weights_key:
                fused = build_fused_decoder(self.model)
                self.fused, self.fused_reason = (None, fused) if isinstance(fused, str) else (fused, "")
            self._weights_key = key
        if self.native_reason or (self.program is not None and self.program.is_current(self.model)):
            return
        self.program = None
        program = build_program(self.model, self.cache, self._adapters)
        if isinstance(program, str):
            self.native_reason = program
            if self.device.type == "cpu" and self.model.token_embedding.dtype != torch.float64:
                has_remedy = "kvad import" in program
                LOG.log(logging.WARNING if has_remedy else logging.INFO, "PyTorch serves this model: %s", program)
        else:
            self.program = program
            if self._num_tokens is not None:
                program.num_tokens = self._num_tokens

    @torch.inference_mode()
    def encode(self, encoder_batch: scheduling.sequence.EncoderBatch) -> tuple[Tensor, ModelInput]:
        """Return the encoder's output [T, E] and its input; cross-attention keys and values are written."""
        inputs, allocation = [seq.request.encoder_tokens for seq in encoder_batch.sequences], encoder_batch.allocation
        positions = self._integers([position for tokens in inputs for position in range(len(tokens))])
        no_tokens = positions[:0]
        slots_per_group = () if allocation is None else allocation.slots
        adapters = self._select_adapters([(seq, len(seq.request.encoder_tokens)) for seq in encoder_batch.sequences])
        encoder_input = ModelInput(
            self._integers([token for tokens in inputs for token in tokens]),
            positions,
            encoder_batch.sub_batches,
            no_tokens,
            seq_lens=self._integers([len(tokens) for tokens in inputs for _ in tokens]),
            token_type_ids=self._token_types(encoder_batch),
            slot_mappings=tuple(SlotMapping(self._integers(slots), ()) for slots in slots_per_group),
            adapters=adapters,
        )
        self._update_kernels()
        if allocation is None:
            return self._computed.encode(encoder_input), encoder_input
        self.cache.apply(allocation.block_ops)
        program = self._program_for(adapters)
        if program is not None and program.encoder is not None:
            return program.encoder.encode(encoder_input, adapters), encoder_input
        model_input = ModelInput(no_tokens, no_tokens, (), no_tokens, encoder_input=encoder_input)
        return self._computed(model_input, self.cache), encoder_input

    @torch.inference_mode()
    def encoder_outputs(
        self, hidden: Tensor, model_input: ModelInput, encoder_batch: scheduling.sequence.EncoderBatch
    ) -> list[Tensor]:
        """Return the requested output of each sequence: the head's (an encoder-decoder has none), or hidden states."""
        inputs = [seq.request.encoder_input for seq in encoder_batch.sequences]
        kinds, lengths = [x.output for x in inputs if x is not None], [len(x.tokens) for x in inputs if x is not None]
        outputs: dict[str, Sequence[Tensor]] = {}
        for kind in set(kinds):
            if kind != "head":
                outputs[kind] = model_lib.heads.pool_hidden(hidden, model_input.sub_batches, kind).unbind(0)
            elif self.model.decoder is not None:
                outputs[kind] = hidden.split(lengths)
            elif self.model.config.pools_sequence:
                outputs[kind] = self.model.pooled_outputs(hidden, model_input).unbind(0)
            else:
                logits = self.model.logits(hidden, torch.arange(len(hidden), device=hidden.device))
                outputs[kind] = logits.split(lengths)
        return [outputs[kind][index] for index, kind in enumerate(kinds)]

    def _token_types(self, encoder_batch: scheduling.sequence.EncoderBatch) -> Tensor | None:
        """Return the token types [T] of a batch with pairs of texts, else None."""
        inputs = [seq.request.encoder_input for seq in encoder_batch.sequences]
        if all(each is None or each.token_types is None for each in inputs):
            return None
        return self._integers(
            [kind for each in inputs if each is not None for kind in each.token_types or [0] * len(each.tokens)]
        )

    def _integers(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
