"""The linear parts of a model by name, from its config alone: beside which an adapter (``model/lora.py``) may stand.

No torch; nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from kvad.cache.weights import weight_shapes
from kvad.config import ModelConfig
from kvad.errors import ConfigError, suggest

__all__ = ["trainable_linears", "mergeable_linears", "match_targets"]

ALL_TARGETS = "all"
EMBEDDINGS = (".tokens", ".positions", ".token_types")


def mergeable_linears(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Name -> [out, in] of every matrix that an adapter may stand beside, in the order of the parameters.

    Others' adapters also stand beside routers, and heads that are not tied."""
    found: dict[str, tuple[int, int]] = {}
    for name, shape in weight_shapes(config).items():
        module, _, last = name.rpartition(".")
        if last == "weight" and len(shape) == 2 and "norm" not in module and not module.endswith(EMBEDDINGS):
            found[module] = (shape[0], shape[1])
    return found


def trainable_linears(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Those that are trained here: the linear parts of the layers but experts' routers."""
    every = mergeable_linears(config)
    return {name: every[name] for name in every if ".layers." in name and not name.endswith(".router")}


def match_targets(config: ModelConfig, targets: Iterable[str]) -> list[str]:
    """The linear parts that ``targets`` name, in the order of the parameters.

    A target is ``all``, a name that stands anywhere in a part's dotted name (``q``, ``cross``, ``mlp``, ``encoder``),
    or a dotted pattern for its end (``cross.q``, ``layers.*.mixer.v``).
    ConfigError for one that names no part, with the nearest that does.
    """
    parts = list(trainable_linears(config))
    chosen: set[str] = set()
    for target in targets:
        hit = [part for part in parts if _named(part, target)]
        if not hit:
            known = {ALL_TARGETS, *(word for part in parts for word in part.split(".") if not word.isdigit())}
            hint = f"a part is called like {parts[0]}" if "." in target else suggest(target, known)
            raise ConfigError(f"lora.target_modules: {target!r} is no linear part of this model's layers", hint)
        chosen.update(hit)
    return [part for part in parts if part in chosen]


def _named(part: str, target: str) -> bool:
    if target == ALL_TARGETS:
        return True
    if "." not in target:
        return target in part.split(".")
    return fnmatchcase(part, target) or fnmatchcase(part, f"*.{target}")
