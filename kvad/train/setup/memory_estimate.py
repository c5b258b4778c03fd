"""Estimate of training memory from shapes, so that runs that do not fit are refused early.

Counted is memory held at the same time; short-lived buffers (a layer's temporaries, torch itself) are not counted, so
no run that would fit is refused. P parameters; rows of S tokens; T tokens of one micro-batch (``--batch-size`` rows), A
micro-batches per optimizer step; F an MLP's intermediate size; other letters as in DESIGN.md::

    state        16 P        weights, gradients and AdamW's two moments, float32; with Muon 12 P and 4 V E for AdamW's
                             share, with Adafactor 8 P (12 P with beta1); 4 P more for a moving average of the weights,
                             4 P k for the last k. With frozen weights these are 4 P, and the rest (12 L and the like)
                             counts the L parameters of the adapters
    copy         12 P        of the saved state, with train.async_save: weights and moments; with averages their content
                             and 4 P more. With frozen weights 12 L
    rows         48 T A      tokens, positions, documents, limits, logit indices, targets: int64, all micro-batches at
                             once; 32 T A more for an encoder-decoder's sources
    activations  4 T x       saved for the backward pass of one micro-batch, float32; under bf16 0.6 of it, + 2 P for
                             the copies of the weights. x is the sum over layers (of the encoder too) of
                                 5 E (4 E for post-norm) + (H + K) D (twice that with rotary positions)
                                 + 2 H Dv + K Dv + 4 F (2 F if the MLP has no gate, F with ReLU)
                                 + 4 H S if attention builds its scores (softcap, sink logits), H S with a bias
                                 or Dv other than D
                             and, for cross-attention, that attention's share and 2 E more;
                             with attention dropout, scores are built, and H S more hold the mask.
                             S once for all layers, the mask of packed rows (3 S with an encoder and a decoder).
                             With activation checkpointing: E for each layer, and x of the largest one. With frozen
                             weights 0.7 of it: inputs are saved only for adapters
    logits       8 min(T V, max(LOGIT_CHUNK_ELEMENTS, V))    logits, and log-probabilities in place of both gradients;
                             V: the labels of a classification head, T: the hidden tokens of objective masked-lm
    callbacks    4 P         a copy of the weights at evaluations, if [callbacks] needs one; less activations and
                             logits, which no step holds then

A test counts what autograd saves. Only the CPU's memory is checked; other devices raise their own error.
No torch, and nothing of ``kvad.cache``: the available memory is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvad import config as cfg
from kvad.config import ModelConfig, attention_dims, embedding_size
from kvad.errors import MemoryPlanError, format_bytes, format_count
from kvad.train.config import RunConfig

LOGIT_CHUNK_ELEMENTS = 1 << 24  # as in ops/cross_entropy.py, which imports torch; a test compares them
# Adapters on q and v; 0.67 to 0.95 for test_memory_estimate.py's shapes, 0.81 to 1.09 with adapters on all.
FROZEN_ACTIVATION_RATIO = 0.7
AUTOCAST_ACTIVATION_RATIO = 0.6  # under bf16 autocast the residual stream and the norms stay float32


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that a run needs at least, as functions of the rows of a micro-batch."""

    model: ModelConfig
    run: RunConfig
    parameters: int
    trained: int | None = None  # number of trained parameters, None for all
    half: bool = False  # training uses bf16 autocast

    def total(self, batch: int) -> int:
        """Return the bytes for micro-batches of ``batch`` rows."""
        return sum(self.parts(batch).values())

    def parts(self, batch: int) -> dict[str, int]:
        """Return the bytes of ``total`` by purpose."""
        model, run, head = self.model, self.run, self.model.head
        tokens = batch * run.data.seq_len
        stacks = [stack for stack in (model.encoder, model.decoder) if stack is not None]
        num_classes = len(head.labels) if isinstance(head, cfg.ClassificationHeadConfig) else model.vocab_size
        num_targets = int(tokens * run.objective.noise_density) if run.objective.kind == "masked-lm" else tokens
        logits = 8 * min(num_targets * num_classes, max(LOGIT_CHUNK_ELEMENTS, num_classes))
        activations = self._activation_bytes(stacks, tokens)
        return {
            "weights": 4 * self.parameters,
            "gradients": 4 * self._num_trained,
            "optimizer": self.state - 4 * (self.parameters + self._num_trained),
            "copy": self.saved if run.train.async_save else 0,
            "rows": (48 if len(stacks) == 1 else 80) * tokens * run.train.gradient_accumulation_steps,
            "activations": activations,
            "logits": logits,
            "callbacks": max(0, 4 * self.parameters - activations - logits) if run.callbacks.requested else 0,
        }

    def _activation_bytes(self, stacks: Sequence[cfg.StackConfig], tokens: int) -> int:
        model, seq_len = self.model, self.run.data.seq_len
        layers = [(stack, stack.layer_config(index)) for stack in stacks for index in range(stack.num_layers)]
        saved = [_saved_elements(model, stack, layer, seq_len) for stack, layer in layers]
        is_recomputed = self.run.train.activation_checkpointing
        elements = model.hidden_size * len(saved) + max(saved) if is_recomputed else sum(saved)
        size = 4 * tokens * (elements + seq_len * (1 if len(stacks) == 1 else 3))
        if self.trained is not None:
            size = int(FROZEN_ACTIVATION_RATIO * size)
        return int(AUTOCAST_ACTIVATION_RATIO * size) + 2 * self.parameters if self.half else size

    @property
    def _num_trained(self) -> int:
        return self.parameters if self.trained is None else self.trained

    @property
    def state(self) -> int:
        """Bytes of weights, gradients, optimizer state and averages."""
        model, optim = self.model, self.run.optim
        each = {"adamw": 12, "muon": 8, "adafactor": 4 if optim.beta1 is None else 8}[optim.name]
        each += 4 * (optim.average_last + (optim.ema_decay > 0))
        has_tables = optim.name == "muon" and self.parameters and self.trained is None
        tables = 4 * model.vocab_size * embedding_size(model) if has_tables else 0
        return 4 * self.parameters + each * self._num_trained + tables

    @property
    def saved(self) -> int:
        """Bytes of a checkpoint's tensors: trained weights, optimizer state, averages."""
        averaged = self.run.optim.ema_decay > 0 or self.run.optim.average_last > 0
        return self.state - 4 * self.parameters + 4 * self._num_trained * averaged

    def largest_batch(self, available: int) -> int:
        """Return the largest micro-batch up to train.batch_size that fits; 0 if none does."""
        low, high = 0, self.run.train.batch_size + 1  # low fits or is 0; high does not fit or is not requested
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.total(middle) <= available else (low, middle)
        return low

    def require(self, available: int | None) -> None:
        """Raise MemoryPlanError if training needs more than ``available`` bytes (None: unknown).

        The message names the need, the available bytes and what would fit.
        """
        train = self.run.train
        if available is None or (fits := self.largest_batch(available)) == train.batch_size:
            return
        hint = f"This fits: --batch-size {fits} (for more rows per step: --gradient-accumulation-steps)"
        if not train.activation_checkpointing:
            hint += "; --set train.activation_checkpointing=true saves fewer activations"
        if train.async_save:
            hint += "; train.async_save=false avoids the copy of saved tensors"
        nothing_fits = (
            "Not even --batch-size 1 fits. Lower --seq-len or --gradient-accumulation-steps, or use a smaller model."
        )
        need, state = (format_bytes(size) for size in (self.total(train.batch_size), self.state))
        raise MemoryPlanError(
            f"training on {self._rows} needs about {need} (weights, gradients and moments {state}) "
            f"and {format_bytes(available)} is available",
            hint if fits else nothing_fits,
        )

    @property
    def _rows(self) -> str:
        rows, tokens = self.run.train.batch_size, self.run.data.seq_len
        return f"{format_count(rows, 'row')} of {format_count(tokens, 'token')} at a time"

    def out_of_memory(self, where: str, status: str) -> MemoryPlanError:
        """Build the error for memory that ran out despite the estimate.

        It states the estimate by purpose, the ``status`` of the run's checkpoints, and which options to lower.
        """
        train = self.run.train
        planned = self.parts(train.batch_size)
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in planned.items() if size)
        options = {
            "a lower train.batch_size (for more rows per step: train.gradient_accumulation_steps)": train.batch_size
            > 1,
            "a lower data.seq_len": True,
            "train.activation_checkpointing=true": not train.activation_checkpointing,
            "train.precision=bf16": not self.half,
            "train.async_save=false": train.async_save,
        }
        return MemoryPlanError(
            f"out of memory {where}, with {self._rows}; estimated were {format_bytes(sum(planned.values()))}: {parts}",
            f"{status}; to use less memory: {', '.join(option for option, helps in options.items() if helps)}",
        )


def _saved_elements(model: ModelConfig, stack: cfg.StackConfig, layer: cfg.LayerConfig, context: int) -> int:
    """Return the elements per token that a layer saves for its backward pass."""
    saved = (4 if stack.norm_position == "post" else 5) * model.hidden_size
    saved += _attention_elements(model, layer.attention, context)
    if layer.cross_attention is not None:
        saved += 2 * model.hidden_size + _attention_elements(model, layer.cross_attention, context)
    plain_factors = {"relu": 1, "xielu": 6}  # others: 2
    mlp_factor = 4 if isinstance(layer.mlp, cfg.GatedMLPConfig) else plain_factors.get(layer.mlp.activation, 2)
    return saved + mlp_factor * layer.mlp.intermediate_size


def _attention_elements(model: ModelConfig, attention: cfg.TokenMixer, context: int) -> int:
    """Return the saved elements per token of one attention, without its input."""
    if isinstance(attention, cfg.ShortConvConfig):
        return (7 + 2 * attention.kernel_size) * model.hidden_size
    if isinstance(attention, cfg.GatedRecurrenceConfig):
        return (24 + 2 * attention.kernel_size) * attention.width
    if isinstance(attention, cfg.GatedDeltaConfig):
        inputs, others, state = attention.state_sizes(model.hidden_size)
        heads, chunk = attention.num_value_heads, min(context, 64)  # of ops/recurrence.py
        repeated = 2 * heads * (attention.key_dim + attention.value_dim)
        return (attention.kernel_size + 2) * inputs + 2 * others + repeated + 7 * heads * chunk + 3 * state // chunk
    heads, kv_heads, dim, value_dim = attention_dims(model, attention)
    times = 2 if isinstance(attention.position, cfg.RopeConfig) else 1
    elements = times * (heads + kv_heads) * dim + (2 * heads + kv_heads) * value_dim
    elements += 3 * heads * value_dim * attention.output_gate
    if (latent := attention.latent) is not None:
        elements += 3 * (dim + (latent.q_lora_rank or 0)) + heads * (latent.qk_head_dim + latent.v_head_dim)
    if attention.logit_softcap is not None or attention.sink_logits:
        elements += 4 * heads * context
    elif value_dim != dim or not (attention.position is None or isinstance(attention.position, cfg.RopeConfig)):
        elements += heads * context
    if model.dropout.attention:
        elements += 3 * heads * context
    return elements


@contextmanager
def translate_oom(make_error: Callable[[], MemoryPlanError]) -> Iterator[None]:
    """Raise the error built by ``make_error`` if the block runs out of memory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError, on a GPU a subclass
        text = str(error)
        is_torch_oom = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in text
        if not (isinstance(error, MemoryError) or is_torch_oom or "not enough memory" in text):
            raise
        raise make_error() from error
