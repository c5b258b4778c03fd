"""From a plan to logits: apply the moves, put the plan's integers into the step's static buffers, run the model once.

The model sees tensors only; :meth:`Runner.leaves` is the flat list of all that outlive a step.  It runs eagerly.
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
    """A memory that a ledger moves: :class:`kvad.cache.device.kv_cache.KVCache`, or a stand-in for it."""

    def apply(self, moves: BlockOps) -> None: ...

    def tensors(self) -> list[Tensor]: ...


class ModelRunner:
    """Runs plans on one model and one cache."""

    def __init__(self, model: Transformer, cache: ManagedCache) -> None:
        self.model, self.cache = model, cache
        self.device = model.token_embedding.device
        encoder = model.config.encoder
        self._sources_have_limits = encoder is not None and _asks_for_limits(encoder)
        self.buffers = InputBuffers(
            self.device, longest=model.config.max_seq_len if _asks_for_limits(model.config.stack) else None
        )

    def rope_regime(self, limit: int) -> str:
        """Names the rotary regime of a row that may reach ``limit``: rows of other regimes share no blocks."""
        kinds = self.model.config.stack.layer_types
        ropes = [
            layer.attention.position for layer in kinds.values() if isinstance(layer.attention.position, cfg.RopeConfig)
        ]
        return ",".join(str(model_lib.positions.rope_regime(rope, limit)) for rope in ropes)

    def tensors(self) -> list[Tensor]:
        """Every tensor that a step reads or writes and that outlives it: inputs, cache, weights; none is made anew."""
        return [*self.buffers.tensors(), *self.cache.tensors(), *self.model.tensors()]

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> Tensor:
        """Logits [N, V] of the plan's wanted positions, in the order of its work."""
        assert plan.encoder_batch is None, "an encoder's step gives no logits: encode it"
        self.cache.apply(plan.allocation.block_ops)
        step = self.buffers.fill(plan)
        hidden = self.model(step, self.cache)
        return self.model.logits(hidden, step.logit_indices)

    @torch.inference_mode()
    def encode(self, encoding: scheduling.sequence.EncoderBatch) -> tuple[Tensor, ModelInput]:
        """The encoder's output [T, E] and its step; what cross-attention will read of it is written.

        A source's limit, which decides its rotary regime, is its own length: it never grows.
        """
        tokens = [token for row in encoding.sequences for token in row.request.encoder_tokens or ()]
        positions = [at for row in encoding.sequences for at in range(len(row.request.encoder_tokens or ()))]
        placed = encoding.allocation
        places = () if placed is None else tuple(SlotMapping(self._integers(slots), ()) for slots in placed.slots)
        where = self._integers(positions)
        nothing = where[:0]
        lengths = (
            [len(row.request.encoder_tokens or ()) for row in encoding.sequences] if self._sources_have_limits else []
        )
        limits = self._integers([length for length in lengths for _ in range(length)]) if lengths else None
        source = ModelInput(
            self._integers(tokens), where, encoding.sub_batches, nothing, max_seq_lens=limits, slot_mappings=places
        )
        if placed is None:
            return self.model.encode(source), source
        self.cache.apply(placed.block_ops)
        return self.model(ModelInput(nothing, nothing, (), nothing, encoder_input=source), self.cache), source

    @torch.inference_mode()
    def encoder_outputs(
        self, hidden: Tensor, step: ModelInput, lengths: Sequence[int], wants: Sequence[str]
    ) -> list[Tensor]:
        """What each row of an encoder's step asks for: the head's answer, or its hidden states pooled."""
        said: dict[str, Sequence[Tensor]] = {}
        if "head" in wants:
            said["head"] = self._head(hidden, step, list(lengths))
        if "mean" in wants:
            said["mean"] = model_lib.heads.pool_hidden(hidden, step.sub_batches, "mean").unbind(0)
        if "first" in wants:
            said["first"] = model_lib.heads.pool_hidden(hidden, step.sub_batches, "first").unbind(0)
        return [said[want][number] for number, want in enumerate(wants)]

    def _head(self, hidden: Tensor, step: ModelInput, lengths: list[int]) -> Sequence[Tensor]:
        """Of every token, or of the whole row; the hidden states of an encoder-decoder's source."""
        rows: tuple[Tensor, ...]
        if self.model.decoder is not None:
            rows = hidden.split(lengths)
        elif self.model.config.pools_sequence:
            rows = self.model.pooled_outputs(hidden, step).unbind(0)
        else:
            rows = self.model.logits(hidden, torch.arange(len(hidden), device=hidden.device)).split(lengths)
        return rows

    def _integers(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def _asks_for_limits(stack: cfg.StackConfig) -> bool:
    """Whether a rotary regime of the stack depends on how long a row may become."""
    positions = [layer.attention.position for layer in stack.layer_types.values()]
    return any(
        isinstance(position, cfg.RopeConfig) and model_lib.positions.depends_on_length(position)
        for position in positions
    )
