"""Model runner: apply block operations, fill input buffers and run the model.

The model receives tensors only; ``ModelRunner.tensors`` lists all that outlive a step. It runs eagerly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvad import config as cfg
from kvad import model as model_lib
from kvad.engine import scheduling
from kvad.engine.execution.input_buffers import InputBuffers
from kvad.engine.scheduling import SchedulerOutput
from kvad.model import Transformer
from kvad.model_input import BlockOps, CacheProtocol, ModelInput, SlotMapping


class ManagedCache(CacheProtocol, Protocol):
    """Cache that a KVCacheManager controls: ``kvad.cache.device.kv_cache.KVCache``, or a stand-in."""

    def apply(self, block_ops: BlockOps) -> None: ...

    def tensors(self) -> list[Tensor]: ...


class ModelRunner:
    """Runs scheduled steps on one model and one cache."""

    def __init__(self, model: Transformer, cache: ManagedCache) -> None:
        self.model, self.cache = model, cache
        self.device = model.token_embedding.device
        encoder = model.config.encoder
        self._encoder_depends_on_length = encoder is not None and _depends_on_length(encoder)
        self.buffers = InputBuffers(
            self.device, max_model_len=model.config.max_seq_len if _depends_on_length(model.config.stack) else None
        )

    def rope_regime(self, max_len: int) -> str:
        """Return the rotary regime of a sequence of up to ``max_len`` tokens; others share no blocks with it."""
        layer_types = self.model.config.stack.layer_types
        ropes = [
            layer.attention.position
            for layer in layer_types.values()
            if isinstance(layer.attention.position, cfg.RopeConfig)
        ]
        return ",".join(str(model_lib.positions.rope_regime(rope, max_len)) for rope in ropes)

    def tensors(self) -> list[Tensor]:
        """Return every tensor that a step uses and that outlives it: inputs, cache and weights."""
        return [*self.buffers.tensors(), *self.cache.tensors(), *self.model.tensors()]

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> Tensor:
        """Return logits [N, V] of the step's logit positions, in scheduled order."""
        assert output.encoder_batch is None, "an encoder step has no logits; call encode"
        self.cache.apply(output.allocation.block_ops)
        model_input = self.buffers.fill(output)
        hidden = self.model(model_input, self.cache)
        return self.model.logits(hidden, model_input.logit_indices)

    @torch.inference_mode()
    def encode(self, encoder_batch: scheduling.sequence.EncoderBatch) -> tuple[Tensor, ModelInput]:
        """Return the encoder's output [T, E] and its input; cross-attention keys and values are written.

        The limit of an encoder input, which decides its rotary regime, is its own length, because it never grows.
        """
        inputs, allocation = [seq.request.encoder_tokens for seq in encoder_batch.sequences], encoder_batch.allocation
        positions = self._integers([position for tokens in inputs for position in range(len(tokens))])
        no_tokens = positions[:0]
        slots_per_group = () if allocation is None else allocation.slots
        limits = None
        if self._encoder_depends_on_length:
            limits = self._integers([len(tokens) for tokens in inputs for _ in tokens])
        encoder_input = ModelInput(
            self._integers([token for tokens in inputs for token in tokens]),
            positions,
            encoder_batch.sub_batches,
            no_tokens,
            max_seq_lens=limits,
            slot_mappings=tuple(SlotMapping(self._integers(slots), ()) for slots in slots_per_group),
        )
        if allocation is None:
            return self.model.encode(encoder_input), encoder_input
        self.cache.apply(allocation.block_ops)
        model_input = ModelInput(no_tokens, no_tokens, (), no_tokens, encoder_input=encoder_input)
        return self.model(model_input, self.cache), encoder_input

    @torch.inference_mode()
    def encoder_outputs(
        self, hidden: Tensor, model_input: ModelInput, encoder_batch: scheduling.sequence.EncoderBatch
    ) -> list[Tensor]:
        """Return the requested output of each sequence: the head's, or pooled hidden states."""
        inputs = [seq.request.encoder_input for seq in encoder_batch.sequences]
        kinds, lengths = [x.output for x in inputs if x is not None], [len(x.tokens) for x in inputs if x is not None]
        outputs: dict[str, Sequence[Tensor]] = {}
        for kind in set(kinds):
            if kind == "head":
                outputs[kind] = self._head(hidden, model_input, lengths)
            else:
                outputs[kind] = model_lib.heads.pool_hidden(hidden, model_input.sub_batches, kind).unbind(0)
        return [outputs[kind][index] for index, kind in enumerate(kinds)]

    def _head(self, hidden: Tensor, model_input: ModelInput, lengths: list[int]) -> Sequence[Tensor]:
        """Return the head's output per sequence; hidden states for an encoder-decoder."""
        parts: tuple[Tensor, ...]
        if self.model.decoder is not None:
            parts = hidden.split(lengths)
        elif self.model.config.pools_sequence:
            parts = self.model.pooled_outputs(hidden, model_input).unbind(0)
        else:
            parts = self.model.logits(hidden, torch.arange(len(hidden), device=hidden.device)).split(lengths)
        return parts

    def _integers(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def _depends_on_length(stack: cfg.StackConfig) -> bool:
    """True if a rotary regime of the stack depends on the sequence's maximum length."""
    positions = [layer.attention.position for layer in stack.layer_types.values()]
    return any(
        isinstance(position, cfg.RopeConfig) and model_lib.positions.depends_on_length(position)
        for position in positions
    )
