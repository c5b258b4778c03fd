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

from kvad.config import Attention, Classes, Gated, Layer, ModelConfig, Rope, Stack, head_dim, table_width
from kvad.errors import MemoryPlanError, counted
from kvad.train.config import RunConfig

__all__ = ["outgrown", "require", "saved_bytes", "shown", "state_bytes", "training_bytes", "training_parts", "within"]

LOGITS = 1 << 24  # SLICE of ops/entropy.py, which imports torch; a test holds them equal
FROZEN = 0.7  # adapters beside q and v; of test_memory.py's shapes 0.67 to 0.95, and 0.81 to 1.09 beside all
HALF = 0.6  # of the activations, where autocast multiplies in bf16: the stream and the norms stay float32


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
    tokens = batch * run.data.context
    stacks = [stack for stack in (model.encoder, model.decoder) if stack is not None]
    layers = [(stack, stack.layer(index)) for stack in stacks for index in range(stack.layers)]
    each = [_kept(model, stack, layer, run.data.context) for stack, layer in layers]
    masks = run.data.context * (1 if len(stacks) == 1 else 3)
    kept = 4 * tokens * ((model.width * len(each) + max(each) if run.train.recompute else sum(each)) + masks)
    answers = len(model.head.labels) if isinstance(model.head, Classes) else model.vocab
    asked = int(tokens * run.objective.density) if run.objective.kind == "masked" else tokens
    logits = 8 * min(asked * answers, max(LOGITS, answers))
    kept = kept if learned is None else int(FROZEN * kept)
    activations = int(HALF * kept) + 2 * parameters if half else kept
    row = 48 if len(stacks) == 1 else 80
    own = parameters if learned is None else learned
    optimizer = state_bytes(model, run, parameters, learned) - 4 * (parameters + own)
    return {
        "weights": 4 * parameters,
        "gradients": 4 * own,
        "optimizer": optimizer,
        "copy": saved_bytes(model, run, parameters, learned) if run.train.save_beside else 0,
        "rows": row * tokens * run.train.accumulate,
        "activations": activations,
        "logits": logits,
        "watch": max(0, 4 * parameters - activations - logits) if run.watch.asked else 0,
    }


def state_bytes(model: ModelConfig, run: RunConfig, parameters: int, learned: int | None = None) -> int:
    """Bytes of weights, and of gradients, what the optimizer remembers and averages of those that are trained."""
    optim = run.optim
    each = {"adamw": 12, "muon": 8, "adafactor": 4 if optim.beta1 is None else 8}[optim.name]
    each += 4 * (optim.average + (optim.ema > 0))
    tables = 4 * model.vocab * table_width(model) if optim.name == "muon" and parameters and learned is None else 0
    return 4 * parameters + each * (parameters if learned is None else learned) + tables


def saved_bytes(model: ModelConfig, run: RunConfig, parameters: int, learned: int | None = None) -> int:
    """Bytes of a checkpoint's tensors: what is trained, what the optimizer remembers, and with averages those too."""
    own = parameters if learned is None else learned
    averaged = run.optim.ema > 0 or run.optim.average > 0
    return state_bytes(model, run, parameters, learned) - 4 * parameters + 4 * own * averaged


def _kept(model: ModelConfig, stack: Stack, layer: Layer, context: int) -> int:
    """Elements per token that a layer keeps for its backward pass."""
    kept = (4 if stack.norm_place == "post" else 5) * model.width + _attended(model, layer.mixer, context)
    if layer.cross is not None:
        kept += 2 * model.width + _attended(model, layer.cross, context)
    ways = 4 if isinstance(layer.mlp, Gated) else 1 if layer.mlp.activation == "relu" else 2
    return kept + ways * layer.mlp.hidden


def _attended(model: ModelConfig, mixer: Attention, context: int) -> int:
    """Of one attention, without its input."""
    dim = head_dim(model, mixer)
    heads, kv_heads, value_dim = mixer.heads, mixer.kv_heads or mixer.heads, mixer.value_dim or dim
    times = 2 if isinstance(mixer.position, Rope) else 1
    attention = times * (heads + kv_heads) * dim + (2 * heads + kv_heads) * value_dim
    if mixer.softcap is not None or mixer.sinks:
        attention += 4 * heads * context
    elif value_dim != dim or not (mixer.position is None or isinstance(mixer.position, Rope)):
        attention += heads * context
    if model.dropout.attention:
        attention += 3 * heads * context
    return attention


def require(
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

    batch = run.train.batch
    if available is None or need(batch) <= available:
        return
    low, high = 0, batch  # low fits or is 0; high does not fit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if need(middle) <= available else (low, middle)
    hint = f"what would fit: --batch {low} (more rows to a step: --accumulate)"
    if not run.train.recompute:
        hint += "; --set train.recompute=true keeps fewer activations"
    if run.train.save_beside:
        hint += "; train.save_beside=false keeps no copy of what is saved"
    state = shown(state_bytes(model, run, parameters, learned))
    raise MemoryPlanError(
        f"training on {counted(batch, 'row')} of {counted(run.data.context, 'token')} at a time needs about "
        f"{shown(need(batch))} (weights, gradients and moments {state}) and {shown(available)} is available",
        hint if low else "not even --batch 1 fits: a smaller --context, --accumulate or model would",
    )


def outgrown(
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
    planned = training_parts(model, run, parameters, train.batch, half=half, learned=learned)
    told = ", ".join(f"{name} {shown(size)}" for name, size in planned.items() if size)
    ways = ["a lower train.batch (more rows to a step: train.accumulate)"] * (train.batch > 1)
    ways += ["a lower data.context"] + ["train.recompute=true"] * (not train.recompute)
    ways += ["train.precision=bf16"] * (not half) + ["train.save_beside=false"] * train.save_beside
    return MemoryPlanError(
        f"out of memory {where}, with {counted(train.batch, 'row')} of {counted(run.data.context, 'token')} at a time; "
        f"planned were {shown(sum(planned.values()))}: {told}",
        f"{left}; what takes less: {', '.join(ways)}",
    )


@contextmanager
def within(say: Callable[[], MemoryPlanError]) -> Iterator[None]:
    """What runs out of memory in the block is raised as ``say`` has it."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch's are RuntimeErrors, on a GPU one of their own
        text = str(error)
        torchs = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in text
        if not (isinstance(error, MemoryError) or torchs or "not enough memory" in text):
            raise
        raise say() from error


def shown(num_bytes: int) -> str:
    """``12.5 MiB``."""
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
