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

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvad.config import (
    AttentionConfig,
    ClassificationHeadConfig,
    GatedMLPConfig,
    LayerConfig,
    ModelConfig,
    RopeConfig,
    StackConfig,
    embedding_size,
    head_dim,
)
from kvad.errors import MemoryPlanError, format_count
from kvad.train.config import RunConfig

LOGIT_CHUNK_ELEMENTS = 1 << 24  # as in ops/cross_entropy.py, which imports torch; a test compares them
FROZEN_ACTIVATION_RATIO = (
    0.7  # adapters on q and v; 0.67 to 0.95 for test_memory.py's shapes, 0.81 to 1.09 with adapters on all
)
AUTOCAST_ACTIVATION_RATIO = 0.6  # under bf16 autocast the residual stream and the norms stay float32


def training_bytes(
    model: ModelConfig, run: RunConfig, parameters: int, batch: int, *, half: bool = False, learned: int | None = None
) -> int:
    """Return the bytes that training needs at least.

    Args:
        model: Model config.
        run: Run config.
        parameters: Number of parameters.
        batch: Rows of a micro-batch.
        half: Training uses bf16 autocast.
        learned: Number of trained parameters, None for all.
    """
    return sum(training_parts(model, run, parameters, batch, half=half, learned=learned).values())


def training_parts(
    model: ModelConfig, run: RunConfig, parameters: int, batch: int, *, half: bool = False, learned: int | None = None
) -> dict[str, int]:
    """Return the bytes of :func:`training_bytes` by purpose."""
    tokens = batch * run.data.seq_len
    stacks = [stack for stack in (model.encoder, model.decoder) if stack is not None]
    layers = [(stack, stack.layer_config(index)) for stack in stacks for index in range(stack.num_layers)]
    saved = [_saved_elements(model, stack, layer, run.data.seq_len) for stack, layer in layers]
    masks = run.data.seq_len * (1 if len(stacks) == 1 else 3)
    activation_bytes = (
        4
        * tokens
        * ((model.hidden_size * len(saved) + max(saved) if run.train.activation_checkpointing else sum(saved)) + masks)
    )
    num_classes = len(model.head.labels) if isinstance(model.head, ClassificationHeadConfig) else model.vocab_size
    num_targets = int(tokens * run.objective.noise_density) if run.objective.kind == "masked-lm" else tokens
    logits = 8 * min(num_targets * num_classes, max(LOGIT_CHUNK_ELEMENTS, num_classes))
    if learned is not None:
        activation_bytes = int(FROZEN_ACTIVATION_RATIO * activation_bytes)
    activations = int(AUTOCAST_ACTIVATION_RATIO * activation_bytes) + 2 * parameters if half else activation_bytes
    row = 48 if len(stacks) == 1 else 80
    own = parameters if learned is None else learned
    optimizer = state_bytes(model, run, parameters, learned) - 4 * (parameters + own)
    return {
        "weights": 4 * parameters,
        "gradients": 4 * own,
        "optimizer": optimizer,
        "copy": saved_bytes(model, run, parameters, learned) if run.train.async_save else 0,
        "rows": row * tokens * run.train.gradient_accumulation_steps,
        "activations": activations,
        "logits": logits,
        "callbacks": max(0, 4 * parameters - activations - logits) if run.callbacks.requested else 0,
    }


def state_bytes(model: ModelConfig, run: RunConfig, parameters: int, learned: int | None = None) -> int:
    """Return the bytes of weights, gradients, optimizer state and averages."""
    optim = run.optim
    each = {"adamw": 12, "muon": 8, "adafactor": 4 if optim.beta1 is None else 8}[optim.name]
    each += 4 * (optim.average_last + (optim.ema_decay > 0))
    tables = (
        4 * model.vocab_size * embedding_size(model) if optim.name == "muon" and parameters and learned is None else 0
    )
    return 4 * parameters + each * (parameters if learned is None else learned) + tables


def saved_bytes(model: ModelConfig, run: RunConfig, parameters: int, learned: int | None = None) -> int:
    """Return the bytes of a checkpoint's tensors: trained weights, optimizer state, averages."""
    own = parameters if learned is None else learned
    averaged = run.optim.ema_decay > 0 or run.optim.average_last > 0
    return state_bytes(model, run, parameters, learned) - 4 * parameters + 4 * own * averaged


def _saved_elements(model: ModelConfig, stack: StackConfig, layer: LayerConfig, context: int) -> int:
    """Return the elements per token that a layer saves for its backward pass."""
    saved = (4 if stack.norm_position == "post" else 5) * model.hidden_size + _attention_elements(
        model, layer.attention, context
    )
    if layer.cross_attention is not None:
        saved += 2 * model.hidden_size + _attention_elements(model, layer.cross_attention, context)
    mlp_factor = 4 if isinstance(layer.mlp, GatedMLPConfig) else 1 if layer.mlp.activation == "relu" else 2
    return saved + mlp_factor * layer.mlp.intermediate_size


def _attention_elements(model: ModelConfig, attention: AttentionConfig, context: int) -> int:
    """Return the saved elements per token of one attention, without its input."""
    dim = head_dim(model, attention)
    heads, kv_heads, value_dim = (
        attention.num_heads,
        attention.num_kv_heads or attention.num_heads,
        attention.value_dim or dim,
    )
    times = 2 if isinstance(attention.position, RopeConfig) else 1
    elements = times * (heads + kv_heads) * dim + (2 * heads + kv_heads) * value_dim
    if attention.logit_softcap is not None or attention.sink_logits:
        elements += 4 * heads * context
    elif value_dim != dim or not (attention.position is None or isinstance(attention.position, RopeConfig)):
        elements += heads * context
    if model.dropout.attention:
        elements += 3 * heads * context
    return elements


def require_training_memory(
    model: ModelConfig,
    run: RunConfig,
    parameters: int,
    available: int | None,
    *,
    half: bool = False,
    learned: int | None = None,
) -> None:
    """Raise MemoryPlanError if training needs more than ``available`` bytes.

    The message names the need, the available bytes and what would fit. None for ``available`` accepts everything.
    """

    def need(batch: int) -> int:
        return training_bytes(model, run, parameters, batch, half=half, learned=learned)

    batch = run.train.batch_size
    if available is None or need(batch) <= available:
        return
    low, high = 0, batch  # low fits or is 0; high does not fit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if need(middle) <= available else (low, middle)
    hint = f"This fits: --batch-size {low} (for more rows per step: --gradient-accumulation-steps)"
    if not run.train.activation_checkpointing:
        hint += "; --set train.activation_checkpointing=true saves fewer activations"
    if run.train.async_save:
        hint += "; train.async_save=false avoids the copy of saved tensors"
    state = human_readable_bytes(state_bytes(model, run, parameters, learned))
    raise MemoryPlanError(
        f"training on {format_count(batch, 'row')} of {format_count(run.data.seq_len, 'token')} at a time needs about "
        f"{human_readable_bytes(need(batch))} (weights, gradients and moments {state}) "
        f"and {human_readable_bytes(available)} is available",
        hint
        if low
        else "Not even --batch-size 1 fits. Lower --seq-len or --gradient-accumulation-steps, or use a smaller model.",
    )


def out_of_memory_error(
    model: ModelConfig,
    run: RunConfig,
    parameters: int,
    where: str,
    status: str,
    *,
    half: bool = False,
    learned: int | None = None,
) -> MemoryPlanError:
    """Build the error for memory that ran out despite the estimate.

    It states the estimate by purpose, the ``status`` of the run's checkpoints, and which options to lower.
    """
    train = run.train
    planned = training_parts(model, run, parameters, train.batch_size, half=half, learned=learned)
    parts = ", ".join(f"{name} {human_readable_bytes(size)}" for name, size in planned.items() if size)
    options = ["a lower train.batch_size (for more rows per step: train.gradient_accumulation_steps)"] * (
        train.batch_size > 1
    )
    options += ["a lower data.seq_len"] + ["train.activation_checkpointing=true"] * (not train.activation_checkpointing)
    options += ["train.precision=bf16"] * (not half) + ["train.async_save=false"] * train.async_save
    return MemoryPlanError(
        f"out of memory {where}, with {format_count(train.batch_size, 'row')} of "
        f"{format_count(run.data.seq_len, 'token')} at a time; "
        f"estimated were {human_readable_bytes(sum(planned.values()))}: {parts}",
        f"{status}; to use less memory: {', '.join(options)}",
    )


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


def human_readable_bytes(num_bytes: int) -> str:
    """Format bytes, such as ``12.5 MiB``."""
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
