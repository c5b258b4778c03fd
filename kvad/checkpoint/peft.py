"""Adapters under PEFT's names, both ways: which of our linear parts is which module of theirs, and what to store.

PEFT keeps two matrices per adapted module, ``base_model.model.MODULE.lora_A.weight`` [r, in] and ``.lora_B.weight``
[out, r], and says in ``adapter_config.json`` what they add: alpha / r times B A (``use_rslora``: alpha / sqrt(r)).
MODULE is a name of the model's own class, which a family's rules give.  Three cases:

* One of our parts is one module: the matrices are ours.  GPT-2's Conv1D, which stores its weight [in, out], too: PEFT
  turns the product there (``fan_in_fan_out``).
* Several of our parts are one module (GPT-2's ``c_attn`` = q, k, v): adapters of rank r each are *one* of rank R, the
  sum of theirs: A is theirs one behind the other, B has a block for each, and zeros, its rows in the module's own order
  (Falcon's by group).  alpha R / r is its alpha.  Exact, and what PEFT made of such a module is read as one A that the
  parts share.
* No rule, or one that is more than an order of rows (matrices of experts): refused by name.

The linear parts of a model by name, from its config alone: beside which an adapter (``model/lora.py``) may stand.

No torch; nothing is loaded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvad import config as config_lib
from kvad import model
from kvad.checkpoint.conversion import Family, expand_rules
from kvad.config import ModelConfig
from kvad.errors import CheckpointError, ConfigError, suggest

ALL_TARGETS = "all"
EMBEDDINGS = (".tokens", ".positions", ".token_types")


def mergeable_linears(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Name -> [out, in] of every matrix that an adapter may stand beside, in the order of the parameters.

    Others' adapters also stand beside routers, and heads that are not tied."""
    found: dict[str, tuple[int, int]] = {}
    for name, shape in config_lib.parameter_shapes.weight_shapes(config).items():
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


PREFIX = "base_model.model."
TENSOR_SUFFIXES = (".lora_A.weight", ".lora_B.weight")
TASKS = {"decoder": "CAUSAL_LM", "encoder-decoder": "SEQ_2_SEQ_LM", "encoder": None}

# Fields of adapter_config.json that say nothing about what the matrices add, or that the tensors say themselves.
IGNORED_KEYS = (
    *("peft_type", "task_type", "base_model_name_or_path", "revision", "inference_mode", "peft_version"),
    *("r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "fan_in_fan_out"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "auto_mapping"),
    *("runtime_config", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "init_lora_weights"),
    *("megatron_core", "qalora_group_size", "ensure_weight_tying"),
)


class AdapterTarget(NamedTuple):
    """A module of theirs.

    ``ours``: the parts that it is, in its order; ``rows``: which row of ours, one part behind the other, each of its
    rows is (None: the same); ``turned``: it stores its weight [in, out]."""

    peft_name: str
    kvad_name: tuple[str, ...]
    row_order: Tensor | None
    transposed: bool


class AdapterTargets(NamedTuple):
    """``known``: what PEFT can adapt of a model; ``modules``: all modules with weights, adapted or not; ``refused``:
    parts of ours -> the module that has no adapters of PEFT's; ``prefix``: of their base model."""

    targets: tuple[AdapterTarget, ...]
    modules: tuple[str, ...]
    unsupported: Mapping[str, str]
    prefix: str


def find_targets(family: Family, config: ModelConfig) -> AdapterTargets:
    """Of a model of this family."""
    parts = mergeable_linears(config)
    known, modules, refused = list[AdapterTarget](), list[str](), dict[str, str]()
    for each in expand_rules(family.rules(config), config_lib.parameter_shapes.weight_shapes(config)):
        names = [name.removesuffix(".weight") for name in each.kvad_names]
        modules += [name.removesuffix(".weight") for name in each.theirs if name.endswith(".weight")]
        if not all(
            name in parts and f"{name}.weight" == whole for name, whole in zip(names, each.kvad_names, strict=True)
        ):
            continue
        theirs = each.theirs[0].removesuffix(".weight")
        found = _order([parts[name][0] for name in names], each.way.write) if len(each.theirs) == 1 else None
        if found is None:
            refused |= dict.fromkeys(names, theirs)
        else:
            known.append(AdapterTarget(theirs, tuple(names), *found))
    return AdapterTargets(tuple(known), tuple(modules), refused, family.prefix)


def native_targets(config: ModelConfig) -> AdapterTargets:
    """Of a model that has kvad's names alone."""
    names = list(mergeable_linears(config))
    modules = [
        name.removesuffix(".weight")
        for name in config_lib.parameter_shapes.weight_shapes(config)
        if name.endswith(".weight")
    ]
    return AdapterTargets(tuple(AdapterTarget(name, (name,), None, False) for name in names), tuple(modules), {}, "")


def _order(outs: Sequence[int], write: Any) -> tuple[Tensor | None, bool] | None:
    """Where a way puts rows that are numbered, and whether it turns them; None where it does more than that."""
    total = sum(outs)
    columns = 2 if total != 2 else 3  # never square, so that what is turned shows
    numbered = torch.arange(total).unsqueeze(1).expand(total, columns).contiguous()
    try:
        made = list(write(list(numbered.split(list(outs))), [(out, columns) for out in outs]))
    except (RuntimeError, IndexError, ValueError):
        return None
    if len(made) != 1 or tuple(made[0].shape) not in ((total, columns), (columns, total)):
        return None
    turned = made[0].shape[0] != total
    rows = (made[0].t() if turned else made[0])[:, 0]
    if not torch.equal(rows.sort().values, torch.arange(total)):
        return None
    return (None if torch.equal(rows, torch.arange(total)) else rows), turned


# ---------------------------------------------------------------- writing


def write_factors(
    sites: AdapterTargets, shapes: Mapping[str, tuple[int, int]], factors: Mapping[str, model.lora.LoraFactors]
) -> tuple[dict[str, Tensor], dict[str, tuple[int, float]]]:
    """Tensors by PEFT's names, and of every adapted module its rank and scale.

    ``shapes``: [out, in] of our parts.  CheckpointError names a part that PEFT cannot adapt.
    """
    left = [name for name in factors if name in sites.unsupported]
    if left:
        raise CheckpointError(
            f"PEFT's layout has no adapter for {sites.unsupported[left[0]]}, which is {left[0]} here",
            "leave it out of lora.target_modules",
        )
    tensors: dict[str, Tensor] = {}
    modules: dict[str, tuple[int, float]] = {}
    for site in sites.targets:
        if not any(name in factors for name in site.kvad_name):
            continue
        a, b, scale = _joined(
            [factors.get(name) for name in site.kvad_name], [shapes[name][0] for name in site.kvad_name]
        )
        tensors[f"{PREFIX}{site.peft_name}{TENSOR_SUFFIXES[0]}"] = a
        tensors[f"{PREFIX}{site.peft_name}{TENSOR_SUFFIXES[1]}"] = b if site.row_order is None else b[site.row_order]
        modules[site.peft_name] = a.shape[0], scale
    return tensors, modules


def _joined(parts: Sequence[model.lora.LoraFactors | None], outs: Sequence[int]) -> model.lora.LoraFactors:
    """One adapter [sum of outs, in] of the parts' (None: nothing is added to it): of one A, if they share it."""
    there = [part for part in parts if part is not None]
    first = there[0]
    assert all(part.scale == first.scale for part in there), "the parts of a module are scaled alike"
    shared = all(torch.equal(part.a, first.a) for part in there)
    a = first.a if shared else torch.cat([part.a for part in there])
    b = first.b.new_zeros(sum(outs), a.shape[0])
    row = column = 0
    for part, out in zip(parts, outs, strict=True):
        if part is not None:
            rank = part.a.shape[0]
            at = 0 if shared else column
            b[row : row + out, at : at + rank] = part.b
            column += rank
        row += out
    return model.lora.LoraFactors(a, b, first.scale)


def write_peft_config(
    sites: AdapterTargets,
    modules: Mapping[str, tuple[int, float]],
    *,
    kind: str,
    base: str,
    rank: int,
    alpha: float,
    rslora: bool,
    dropout: float,
) -> dict[str, Any]:
    """``adapter_config.json``: ``modules`` as :func:`write_factors` gives them.

    ``rank`` and ``alpha`` are said once, and of each module that has others (a fused one)."""
    turned = {site.peft_name: site.transposed for site in sites.targets}
    ranks, alphas = {}, {}
    for name, (r, scale) in modules.items():
        its_alpha = scale * (math.sqrt(r) if rslora else r)
        if r != rank:
            ranks[name] = r
        if not math.isclose(its_alpha, alpha, rel_tol=1e-12):
            alphas[name] = its_alpha
    return {
        "peft_type": "LORA",
        "task_type": TASKS[kind],
        "base_model_name_or_path": base,
        "revision": None,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": dropout,
        "use_rslora": rslora,
        "target_modules": _suffixes(modules, sites.modules),
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "fan_in_fan_out": any(turned[name] for name in modules),
        "bias": "none",
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
    }


def _suffixes(chosen: Iterable[str], every: Sequence[str]) -> list[str]:
    """The shortest ends of names that all of ``chosen`` have and none of the others: PEFT compares ends."""
    chosen = set(chosen)
    others = [name for name in every if name not in chosen]
    ends: set[str] = set()
    for name in chosen:
        words = name.split(".")
        for count in range(1, len(words) + 1):
            end = ".".join(words[-count:])
            if not any(other == end or other.endswith(f".{end}") for other in others):
                ends.add(end)
                break
        else:
            ends.add(name)
    return sorted(ends)


# ---------------------------------------------------------------- reading


def check_peft_config(content: Mapping[str, Any], where: str) -> None:
    """CheckpointError for an adapter that is more than two matrices per module: nothing is left out in silence."""

    def refuse(what: str, hint: str = "merge it into its base with peft: merge_and_unload()") -> None:
        raise CheckpointError(f"{where}: {what} is not supported", hint)

    if content.get("peft_type") != "LORA":
        refuse(f"peft_type {content.get('peft_type')!r}", "kvad reads LoRA adapters")
    if content.get("bias", "none") != "none":
        refuse(f"bias {content['bias']!r}: biases that were trained")
    start = content.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower() not in ("gaussian", "eva", "orthogonal", "lora_ga"):
        refuse(f"init_lora_weights {start!r}: the base's weights were changed, too")
    if content.get("lora_ga_config") or start == "lora_ga":
        refuse("init_lora_weights 'lora_ga': the base's weights were changed, too")
    for name, value in content.items():
        if name not in IGNORED_KEYS and value not in (None, False, [], {}, ""):
            refuse(f"{name} {value!r}")
    for name, kind in (("r", int), ("lora_alpha", (int, float))):
        value = content.get(name)
        if not isinstance(value, kind) or isinstance(value, bool) or not value > 0:
            raise CheckpointError(f"{where}: {name}: expected a number above 0, found {value!r}")
    for name in ("rank_pattern", "alpha_pattern"):
        if not isinstance(content.get(name) or {}, Mapping):
            raise CheckpointError(f"{where}: {name}: expected an object, found {content[name]!r}")


def read_factors(
    sites: AdapterTargets,
    shapes: Mapping[str, tuple[int, int]],
    found: Mapping[str, Tensor],
    content: Mapping[str, Any],
    where: str,
    targets: Iterable[str] | None = None,
) -> dict[str, model.lora.LoraFactors]:
    """What a file of PEFT's adds to our parts.

    ``targets``: the parts that were adapted, of a file that kvad wrote: a fused module's adapter comes apart again.
    CheckpointError for a tensor that belongs to no part, and for another shape than the model's.
    """
    factors: dict[str, model.lora.LoraFactors] = {}
    by_name = {spelled: site for site in sites.targets for spelled in _spellings(site.peft_name, sites.prefix)}
    for module in dict.fromkeys(_module(name, where) for name in found):
        site = by_name.get(module)
        if site is None:
            raise CheckpointError(
                f"{where}: {module} is no part of this model that can be adapted", "is it another base's?"
            )
        pair = [found.get(f"{PREFIX}{module}{end}") for end in TENSOR_SUFFIXES]
        if pair[0] is None or pair[1] is None:
            raise CheckpointError(f"{where}: tensor {module}{TENSOR_SUFFIXES[pair[1] is None]} is missing")
        a, b = pair[0], pair[1]
        outs, width = [shapes[name][0] for name in site.kvad_name], shapes[site.kvad_name[0]][1]
        if a.dim() != 2 or b.dim() != 2 or (b.shape[0], *a.shape[::-1]) != (sum(outs), width, b.shape[1]):
            sizes = f"A {list(a.shape)} and B {list(b.shape)}"
            raise CheckpointError(
                f"{where}: {module}: {sizes} do not fit the model's [{sum(outs)}, {width}]",
                "the adapter belongs to another base",
            )
        scale = _scale(module, a.shape[0], content, where)
        if site.row_order is not None:
            b = torch.empty_like(b).index_copy_(0, site.row_order, b)
        factors |= _apart(
            site.kvad_name, outs, model.lora.LoraFactors(a, b, scale), None if targets is None else set(targets)
        )
    return factors


def _apart(
    ours: Sequence[str], outs: Sequence[int], joined: model.lora.LoraFactors, targets: set[str] | None
) -> dict[str, model.lora.LoraFactors]:
    """The reverse of :func:`_joined`; parts that nothing is added to are left out."""
    kept = [name for name in ours if targets is None or name in targets]
    rows = dict(zip(ours, joined.b.split(list(outs)), strict=True))
    rank, cut = joined.a.shape[0], targets is not None and len(kept) > 1
    if not cut:
        return {name: model.lora.LoraFactors(joined.a, rows[name], joined.scale) for name in kept}
    each = rank // len(kept)
    spans = {name: slice(i * each, (i + 1) * each) for i, name in enumerate(kept)}
    return {
        name: model.lora.LoraFactors(joined.a[span], rows[name][:, span], joined.scale) for name, span in spans.items()
    }


def _module(name: str, where: str) -> str:
    for end in TENSOR_SUFFIXES:
        if name.startswith(PREFIX) and name.endswith(end):
            return name.removeprefix(PREFIX).removesuffix(end)
    raise CheckpointError(f"{where}: tensor {name} is not supported", "kvad reads lora_A and lora_B of linear modules")


def _spellings(theirs: str, prefix: str) -> tuple[str, ...]:
    """An adapter may have been made for their base model, whose names lack the prefix, or for one with a head."""
    return (theirs,) if not prefix else (theirs, theirs.removeprefix(prefix), prefix + theirs.removeprefix(prefix))


def _scale(module: str, rank: int, content: Mapping[str, Any], where: str) -> float:
    said = _of_pattern(module, content.get("rank_pattern") or {}, content["r"])
    alpha = _of_pattern(module, content.get("alpha_pattern") or {}, content["lora_alpha"])
    if said != rank:
        raise CheckpointError(f"{where}: {module} has rank {rank}, its config says {said}")
    return float(alpha / math.sqrt(rank) if content.get("use_rslora") else alpha / rank)


def _of_pattern(module: str, pattern: Mapping[str, Any], usual: Any) -> Any:
    """The first key that is the module's name, or its end after a dot; PEFT reads them as regular expressions."""
    for key, value in pattern.items():
        try:
            hit = re.match(rf"(.*\.)?({key})$", module)
        except re.error:
            hit = None  # PEFT would fail here; what it cannot name, it does not say
        if hit:
            return value
    return usual
