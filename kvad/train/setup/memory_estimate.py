"""What training takes, from shapes and before anything of it is allocated: so that a batch that cannot be is refused.

An estimate of what is held at the same time; what comes and goes beside it (a layer's temporaries, torch itself) is not
counted, so that no run is refused that would have fitted.  P parameters; rows of S tokens; T tokens of one micro-batch
(``--batch`` rows), A micro-batches of an optimizer step; other letters as in ``step.py``, F an MLP's hidden width::

    state        16 P        weights, their gradients and AdamW's two moments, float32; with Muon 12 P and 4 V E for
                             AdamW's share, with Adafactor 8 P (12 P with beta1); 4 P more for a moving average of the
                             weights, 4 P k for the last k.  Beside frozen weights these are 4 P, and the rest (12 L and
                             the like) L of the parameters being adapters'
    copy         12 P        of what is saved, with train.save_beside: weights and moments; with averages what they
                             hold and 4 P more.  Beside frozen weights 12 L
    rows         48 T A      tokens, positions, documents, limits, wanted, targets: int64, all micro-batches at once
                             an encoder-decoder's sources 32 T A beside them
    activations  4 T x       what the backward pass of one micro-batch needs, float32; under bf16 0.6 of it, + 2 P for
                             the weights' copies.  x is the sum over layers (of the encoder too) of
                                 5 E (4 E where norms come after) + (H + K) D (twice that where it is rotated)
                                 + 2 H Dv + K Dv + 4 F (2 F where the MLP has no gate, F with ReLU)
                                 + 4 H S where attention makes its scores (softcap, sink logits), H S with a bias
                                 or Dv other than D
                             and, where a layer attends to a source, that attention's share and 2 E more;
                             with dropout of its weights, attention makes its scores, and H S more are the mask.
                             S once for all layers, the mask of packed rows (3 S with an encoder and a decoder).
                             Recomputed: E for each layer, and x of the largest one alone.  Beside frozen weights 0.7
                             of it: their inputs are kept only where an adapter reads them
    logits       8 min(T V, max(LOGITS, V))    logits, and their log-probabilities in the place of both gradients;
                             V: the labels where the head has classes, T: the hidden tokens of objective masked
    watch        4 P         a copy of the weights at evaluations, where [watch] asks for one; less activations and
                             logits, which no step holds then

A test counts what autograd really keeps.  Only the CPU's memory is asked for: another device answers for itself.
No torch, and nothing of ``kvad.cache``: how much memory there is is handed in.
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

LOGIT_CHUNK_ELEMENTS = 1 << 24  # SLICE of ops/entropy.py, which imports torch; a test holds them equal
FROZEN_ACTIVATION_RATIO = (
    0.7  # adapters beside q and v; of test_memory.py's shapes 0.67 to 0.95, and 0.81 to 1.09 beside all
)
AUTOCAST_ACTIVATION_RATIO = (
    0.6  # of the activations, where autocast multiplies in bf16: the stream and the norms stay float32
)


def training_bytes(
    model: ModelConfig,
    run: RunConfig,
    parameters: int,
    batch: int,
    *,
    half: bool = False,
    learned: int | None = None,
) -> int:
    """Bytes that training takes at least with micro-batches of ``batch`` rows; ``half``: under bf16 autocast;
    ``learned``: how many of the parameters are trained (None: all)."""
    return sum(training_parts(model, run, parameters, batch, half=half, learned=learned).values())


def training_parts(
    model: ModelConfig,
    run: RunConfig,
    parameters: int,
    batch: int,
    *,
    half: bool = False,
    learned: int | None = None,
) -> dict[str, int]:
    """The same by what it is for."""
    tokens = batch * run.data.seq_len
    stacks = [stack for stack in (model.encoder, model.decoder) if stack is not None]
    layers = [(stack, stack.layer_config(index)) for stack in stacks for index in range(stack.num_layers)]
    each = [_saved_elements(model, stack, layer, run.data.seq_len) for stack, layer in layers]
    masks = run.data.seq_len * (1 if len(stacks) == 1 else 3)
    kept = (
        4
        * tokens
        * ((model.hidden_size * len(each) + max(each) if run.train.activation_checkpointing else sum(each)) + masks)
    )
    answers = len(model.head.labels) if isinstance(model.head, ClassificationHeadConfig) else model.vocab_size
    asked = int(tokens * run.objective.noise_density) if run.objective.kind == "masked" else tokens
    logits = 8 * min(asked * answers, max(LOGIT_CHUNK_ELEMENTS, answers))
    kept = kept if learned is None else int(FROZEN_ACTIVATION_RATIO * kept)
    activations = int(AUTOCAST_ACTIVATION_RATIO * kept) + 2 * parameters if half else kept
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
        "watch": max(0, 4 * parameters - activations - logits) if run.callbacks.requested else 0,
    }


def state_bytes(model: ModelConfig, run: RunConfig, parameters: int, learned: int | None = None) -> int:
    """Bytes of weights, and of gradients, what the optimizer remembers and averages of those that are trained."""
    optim = run.optim
    each = {"adamw": 12, "muon": 8, "adafactor": 4 if optim.beta1 is None else 8}[optim.name]
    each += 4 * (optim.average_last + (optim.ema_decay > 0))
    tables = (
        4 * model.vocab_size * embedding_size(model) if optim.name == "muon" and parameters and learned is None else 0
    )
    return 4 * parameters + each * (parameters if learned is None else learned) + tables


def saved_bytes(model: ModelConfig, run: RunConfig, parameters: int, learned: int | None = None) -> int:
    """Bytes of a checkpoint's tensors: what is trained, what the optimizer remembers, and with averages those too."""
    own = parameters if learned is None else learned
    averaged = run.optim.ema_decay > 0 or run.optim.average_last > 0
    return state_bytes(model, run, parameters, learned) - 4 * parameters + 4 * own * averaged


def _saved_elements(model: ModelConfig, stack: StackConfig, layer: LayerConfig, context: int) -> int:
    """Elements per token that a layer keeps for its backward pass."""
    kept = (4 if stack.norm_position == "post" else 5) * model.hidden_size + _attention_elements(
        model, layer.attention, context
    )
    if layer.cross_attention is not None:
        kept += 2 * model.hidden_size + _attention_elements(model, layer.cross_attention, context)
    ways = 4 if isinstance(layer.mlp, GatedMLPConfig) else 1 if layer.mlp.activation == "relu" else 2
    return kept + ways * layer.mlp.intermediate_size


def _attention_elements(model: ModelConfig, mixer: AttentionConfig, context: int) -> int:
    """Of one attention, without its input."""
    dim = head_dim(model, mixer)
    heads, kv_heads, value_dim = mixer.num_heads, mixer.num_kv_heads or mixer.num_heads, mixer.value_dim or dim
    times = 2 if isinstance(mixer.position, RopeConfig) else 1
    attention = times * (heads + kv_heads) * dim + (2 * heads + kv_heads) * value_dim
    if mixer.logit_softcap is not None or mixer.sink_logits:
        attention += 4 * heads * context
    elif value_dim != dim or not (mixer.position is None or isinstance(mixer.position, RopeConfig)):
        attention += heads * context
    if model.dropout.attention:
        attention += 3 * heads * context
    return attention


def require_training_memory(
    model: ModelConfig,
    run: RunConfig,
    parameters: int,
    available: int | None,
    *,
    half: bool = False,
    learned: int | None = None,
) -> None:
    """MemoryPlanError when training needs more than ``available``: it names need, have, and what would fit.

    ``available`` None (nobody knows) lets everything pass.
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
    hint = f"what would fit: --batch {low} (more rows to a step: --accumulate)"
    if not run.train.activation_checkpointing:
        hint += "; --set train.activation_checkpointing=true keeps fewer activations"
    if run.train.async_save:
        hint += "; train.async_save=false keeps no copy of what is saved"
    state = human_readable_bytes(state_bytes(model, run, parameters, learned))
    raise MemoryPlanError(
        f"training on {format_count(batch, 'row')} of {format_count(run.data.seq_len, 'token')} at a time needs about "
        f"{human_readable_bytes(need(batch))} (weights, gradients and moments {state}) and {human_readable_bytes(available)} is available",
        hint if low else "not even --batch 1 fits: a smaller --context, --accumulate or model would",
    )


def out_of_memory_error(
    model: ModelConfig,
    run: RunConfig,
    parameters: int,
    where: str,
    left: str,
    *,
    half: bool = False,
    learned: int | None = None,
) -> MemoryPlanError:
    """What to say of memory that ran out after all: the plan, what is ``left`` of the run, and what to lower."""
    train = run.train
    planned = training_parts(model, run, parameters, train.batch_size, half=half, learned=learned)
    told = ", ".join(f"{name} {human_readable_bytes(size)}" for name, size in planned.items() if size)
    ways = ["a lower train.batch_size (more rows to a step: train.gradient_accumulation_steps)"] * (
        train.batch_size > 1
    )
    ways += ["a lower data.seq_len"] + ["train.activation_checkpointing=true"] * (not train.activation_checkpointing)
    ways += ["train.precision=bf16"] * (not half) + ["train.async_save=false"] * train.async_save
    return MemoryPlanError(
        f"out of memory {where}, with {format_count(train.batch_size, 'row')} of {format_count(run.data.seq_len, 'token')} at a time; "
        f"planned were {human_readable_bytes(sum(planned.values()))}: {told}",
        f"{left}; what takes less: {', '.join(ways)}",
    )


@contextmanager
def translate_oom(say: Callable[[], MemoryPlanError]) -> Iterator[None]:
    """What runs out of memory in the block is raised as ``say`` has it."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch's are RuntimeErrors, on a GPU one of their own
        text = str(error)
        torchs = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in text
        if not (isinstance(error, MemoryError) or torchs or "not enough memory" in text):
            raise
        raise say() from error


def human_readable_bytes(num_bytes: int) -> str:
    """``12.5 MiB``."""
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
