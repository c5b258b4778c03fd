"""The weights of the oracle's checkpoints: a function of (name, shape, seed), so that no golden stores a weight.

Integers come from Philox, whose bits numpy promises for ever; a normal deviate is the sum of four 16 bit integers, and
all that follows is exact or correctly rounded: the same bytes on every machine and numpy version. Numpy only.

No parameter keeps the value that its family initialises it with: a dropped bias, a swapped norm, an ignored
``final_logits_bias`` or a forgotten (1 + w) changes the logits by tenths.
"""

import hashlib
import math
from dataclasses import dataclass

import numpy as np

EMBEDDINGS = ("embed", "wte", "wpe", "shared.weight")
LINEAR = ("embed_out", "embeddings_project", "embedding_hidden_mapping")  # named like a table, but a matrix


def _bits(name: str, count: int, seed: int) -> np.ndarray:
    key = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:16], "little")
    return np.random.Philox(key=key).random_raw(count)


def noise(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """float64 of mean 0 and variance 1, within +-3.5: the sum of four uniform integers of 16 bits, scaled."""
    bits = _bits(name, math.prod(shape), seed)
    mask = np.uint64(0xFFFF)
    total = sum(((bits >> np.uint64(shift)) & mask).astype(np.int64) for shift in (0, 16, 32, 48))
    return ((total - 131070) / math.sqrt((65536.0**2 - 1) / 3)).reshape(shape)


def integers(name: str, count: int, low: int, high: int, seed: int) -> np.ndarray:
    """int64 ``[count]`` in ``low .. high - 1``: the input ids."""
    return (low + _bits(name, count, seed) % np.uint64(high - low)).astype(np.int64)


@dataclass(frozen=True)
class Recipe:
    """What a case may choose of its weights.

    norm_center: around it lie the weights of norms; 0 where the family multiplies by 1 + w.
    embedding: deviation of tables of embeddings; little where they are scaled or tied, or tokens only repeat.
    gain: a matrix has deviation gain / sqrt(columns); 1 where attention divides by nothing.
    """

    seed: int = 1
    norm_center: float = 1.0
    embedding: float = 0.15
    gain: float = 1.5


def spread(name: str, shape: tuple[int, ...], recipe: Recipe) -> tuple[float, float]:
    """(mean, deviation) of a tensor by its name in the file, such that logits are of a few units.

    A table of relative positions and a sink weigh as much as a dot product.
    """
    *_, owner, last = ["", *name.split(".")]
    if last.endswith("bias"):
        return 0.0, 0.2
    if last == "sinks" or owner == "relative_attention_bias":
        return 0.0, 1.0
    if "norm" in owner.lower() or len(shape) == 1:
        return recipe.norm_center, 0.2
    if any(word in f"{owner}.{last}" for word in EMBEDDINGS) and owner not in LINEAR:
        return 0.0, recipe.embedding
    return 0.0, recipe.gain / math.sqrt(shape[-1])


def tensor(name: str, shape: tuple[int, ...], recipe: Recipe) -> np.ndarray:
    """The float32 values of tensor ``name`` of a checkpoint."""
    mean, deviation = spread(name, shape, recipe)
    return (mean + deviation * noise(name, shape, recipe.seed)).astype(np.float32)


def digest(tensors: dict[str, np.ndarray]) -> str:
    """sha256 of names, shapes and values: two checkpoints with one digest are equal."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name]
        total.update(f"{name} {value.dtype.str} {value.shape}\n".encode())
        total.update(np.ascontiguousarray(value).tobytes())
    return total.hexdigest()
