"""Adapters by PEFT's names: which linear layer is which module, and what is stored.

PEFT stores two matrices per adapted module, ``base_model.model.MODULE.lora_A.weight`` [r, in] and ``.lora_B.weight``
[out, r]; by ``adapter_config.json`` they add alpha / r times B A (``use_rslora``: alpha / sqrt(r)).  MODULE is a name
in the model's Hugging Face class, given by a family's rules.  Three cases:

* One of kvad's linear layers is one module: the matrices are the same.  This includes GPT-2's Conv1D, which stores its
  weight [in, out]: PEFT transposes the product (``fan_in_fan_out``).
* Several layers are one module (GPT-2's ``c_attn`` = q, k, v): adapters of rank r each become *one* of rank R, the sum
  of their ranks: A is the concatenation, B has a block for each and zeros, its rows in the module's order (Falcon's by
  group), and its alpha is alpha R / r.  This is exact.  An adapter that PEFT made for such a module is read as one A
  that the layers share.
* There is no rule, or the rule does more than reorder rows (matrices of experts): refused by name.

The linear layers that an adapter (``model/lora.py``) may be added to follow from the config; nothing is loaded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvad import config as config_lib
from kvad import model
from kvad.checkpoint.conversion import Family
from kvad.config import ModelConfig
from kvad.errors import CheckpointError, ConfigError, suggest

ALL_TARGETS = "all"
EMBEDDINGS = (".tokens", ".positions", ".token_types")


def mergeable_linears(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return name -> [out, in] of all matrices that an adapter, also another tool's, may be on."""
    linears: dict[str, tuple[int, int]] = {}
    for name, shape in config_lib.parameter_shapes.weight_shapes(config).items():
        module, _, parameter = name.rpartition(".")
        if parameter == "weight" and len(shape) == 2 and "norm" not in module and not module.endswith(EMBEDDINGS):
            linears[module] = (shape[0], shape[1])
    return linears


def trainable_linears(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the linear layers that kvad trains adapters on: all layers' but experts' routers."""
    linears = mergeable_linears(config)
    return {name: linears[name] for name in linears if ".layers." in name and not name.endswith(".router")}


def match_targets(config: ModelConfig, targets: Iterable[str]) -> list[str]:
    """Return the linear layers that ``targets`` name, in the order of the parameters.

    A target is ``all``, a component of a dotted name (``q``, ``cross_attention``, ``mlp``, ``encoder``), or a dotted
    pattern for its end (``cross_attention.q``, ``layers.*.attention.v``).  Raises ConfigError if one matches no layer.
    """
    linears = list(trainable_linears(config))
    chosen: set[str] = set()
    for target in targets:
        matches = [name for name in linears if target in (ALL_TARGETS, *name.split("."))]
        if "." in target:
            matches = [name for name in linears if fnmatchcase(f".{name}", f"*.{target}")]
        if not matches:
            names = {ALL_TARGETS, *(part for name in linears for part in name.split(".") if not part.isdigit())}
            hint = f"A linear layer has a name such as {linears[0]}." if "." in target else suggest(target, names)
            raise ConfigError(f"lora.target_modules: {target!r} matches no linear layer of this model", hint)
        chosen.update(matches)
    return [name for name in linears if name in chosen]


PREFIX = "base_model.model."
TENSOR_SUFFIXES = (".lora_A.weight", ".lora_B.weight")
TASKS = {"decoder": "CAUSAL_LM", "encoder-decoder": "SEQ_2_SEQ_LM", "encoder": None}

# Fields of adapter_config.json that do not change the sum, or that follow from the tensors.
IGNORED_KEYS = (
    *("peft_type", "task_type", "base_model_name_or_path", "revision", "inference_mode", "peft_version"),
    *("r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "fan_in_fan_out"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "auto_mapping"),
    *("runtime_config", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "init_lora_weights"),
    *("megatron_core", "qalora_group_size", "ensure_weight_tying"),
)


class AdapterTarget(NamedTuple):
    """One of PEFT's modules."""

    peft_name: str
    kvad_name: tuple[str, ...]  # linear layers that make up the module, in its order
    row_order: Tensor | None  # row of the concatenated layers for each of its rows; None: the same order
    transposed: bool  # it stores its weight [in, out]


class AdapterTargets(NamedTuple):
    """Modules of a model that PEFT can adapt."""

    targets: tuple[AdapterTarget, ...]
    modules: tuple[str, ...]  # all modules with weights, adaptable or not
    unsupported: Mapping[str, str]  # linear layer -> module that PEFT cannot adapt
    prefix: str  # of the base model
    shapes: Mapping[str, tuple[int, int]]  # linear layer -> [out, in]

    def check_supported(self, names: Iterable[str]) -> None:
        """Raise CheckpointError for a linear layer of which PEFT's layout cannot hold an adapter."""
        for name in names:
            if name in self.unsupported:
                raise CheckpointError(
                    f"PEFT's layout has no adapter for {self.unsupported[name]}, which is {name} in kvad",
                    "Leave it out of lora.target_modules.",
                )


def find_targets(family: Family, config: ModelConfig) -> AdapterTargets:
    """Return the targets of a model of this family."""
    linears = mergeable_linears(config)
    targets, modules, unsupported = list[AdapterTarget](), list[str](), dict[str, str]()
    for rule in family.tensor_rules(config):
        names = [name.removesuffix(".weight") for name in rule.kvad_names if name.endswith(".weight")]
        hf_modules = [name.removesuffix(".weight") for name in rule.hf_names if name.endswith(".weight")]
        modules += hf_modules
        if len(names) < len(rule.kvad_names) or not linears.keys() >= set(names):
            continue
        order = _row_order([linears[name][0] for name in names], rule.transform.write)
        if order is None or len(rule.hf_names) > 1:
            unsupported |= dict.fromkeys(names, rule.hf_names[0].removesuffix(".weight"))
        else:
            targets.append(AdapterTarget(rule.hf_names[0].removesuffix(".weight"), tuple(names), *order))
    return AdapterTargets(tuple(targets), tuple(modules), unsupported, family.prefix, linears)


def native_targets(config: ModelConfig) -> AdapterTargets:
    """Return the targets of a model that has only kvad's names."""
    linears, names = mergeable_linears(config), config_lib.parameter_shapes.weight_shapes(config)
    targets = tuple(AdapterTarget(name, (name,), None, False) for name in linears)
    modules = tuple(name.removesuffix(".weight") for name in names if name.endswith(".weight"))
    return AdapterTargets(targets, modules, {}, "", linears)


def _row_order(out_sizes: Sequence[int], write: Any) -> tuple[Tensor | None, bool] | None:
    """Return a transform's row order and whether it transposes, or None if it does more."""
    total = sum(out_sizes)
    num_columns = 2 if total != 2 else 3  # never square, so that a transposition is visible
    row_numbers = torch.arange(total).unsqueeze(1).expand(total, num_columns).contiguous()
    try:
        written = list(write(list(row_numbers.split(list(out_sizes))), [(out, num_columns) for out in out_sizes]))
    except (RuntimeError, IndexError, ValueError):
        return None
    if len(written) != 1 or tuple(written[0].shape) not in ((total, num_columns), (num_columns, total)):
        return None
    transposed = written[0].shape[0] != total
    rows = (written[0].t() if transposed else written[0])[:, 0]
    if not torch.equal(rows.sort().values, torch.arange(total)):
        return None
    return (None if torch.equal(rows, torch.arange(total)) else rows), transposed


def write_factors(
    targets: AdapterTargets, factors: Mapping[str, model.lora.LoraFactors]
) -> tuple[dict[str, Tensor], dict[str, tuple[int, float]]]:
    """Convert adapters by kvad's names to PEFT's tensors, and the rank and scale of every adapted module.

    Raises CheckpointError if PEFT's layout has no place for one of the adapters.
    """
    targets.check_supported(factors)
    tensors: dict[str, Tensor] = {}
    modules: dict[str, tuple[int, float]] = {}
    for target in targets.targets:
        if not any(name in factors for name in target.kvad_name):
            continue
        out_sizes = [targets.shapes[name][0] for name in target.kvad_name]
        a, b, scale = _join([factors.get(name) for name in target.kvad_name], out_sizes)
        b = b if target.row_order is None else b[target.row_order]
        tensors |= {f"{PREFIX}{target.peft_name}{suffix}": x for suffix, x in zip(TENSOR_SUFFIXES, (a, b), strict=True)}
        modules[target.peft_name] = a.shape[0], scale
    return tensors, modules


def _join(factors: Sequence[model.lora.LoraFactors | None], out_sizes: Sequence[int]) -> model.lora.LoraFactors:
    """Join the adapters of a module's layers (None: no adapter); a shared A is stored once."""
    present = [factor for factor in factors if factor is not None]
    first = present[0]
    assert all(factor.scale == first.scale for factor in present), "all layers of a module have one scale"
    shared = all(torch.equal(factor.a, first.a) for factor in present)
    a = first.a if shared else torch.cat([factor.a for factor in present])
    b = first.b.new_zeros(sum(out_sizes), a.shape[0])
    row = column = 0
    for factor, out in zip(factors, out_sizes, strict=True):
        if factor is not None:
            rank = factor.a.shape[0]
            start = 0 if shared else column
            b[row : row + out, start : start + rank] = factor.b
            column += rank
        row += out
    return model.lora.LoraFactors(a, b, first.scale)


def write_peft_config(
    targets: AdapterTargets,
    modules: Mapping[str, tuple[int, float]],
    *,
    kind: str,
    base: str,
    rank: int,
    alpha: float,
    use_rslora: bool,
    dropout: float,
) -> dict[str, Any]:
    """Return the content of ``adapter_config.json``.

    Rank and alpha are given once, and separately for each module that has others (a fused one).

    Args:
        targets: Targets of the model.
        modules: Rank and scale by module, from ``write_factors``.
        kind: Kind of the model.
        base: Path or name of the base.
        rank, alpha, dropout: Settings of the training.
        use_rslora: Scale by alpha / sqrt(rank) instead of alpha / rank.
    """
    transposed = {target.peft_name: target.transposed for target in targets.targets}
    ranks, alphas = {}, {}
    for name, (r, scale) in modules.items():
        module_alpha = scale * (math.sqrt(r) if use_rslora else r)
        if r != rank:
            ranks[name] = r
        if not math.isclose(module_alpha, alpha, rel_tol=1e-12):
            alphas[name] = module_alpha
    return {
        "peft_type": "LORA",
        "task_type": TASKS[kind],
        "base_model_name_or_path": base,
        "revision": None,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": dropout,
        "use_rslora": use_rslora,
        "target_modules": _suffixes(modules, targets.modules),
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "fan_in_fan_out": any(transposed[name] for name in modules),
        "bias": "none",
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
    }


def _suffixes(chosen: Iterable[str], modules: Sequence[str]) -> list[str]:
    """Return the shortest suffixes, which PEFT compares, of all of ``chosen`` and no other module."""
    chosen = set(chosen)
    others = [name for name in modules if name not in chosen]
    suffixes: set[str] = set()
    for name in chosen:
        components = name.split(".")
        for count in range(1, len(components) + 1):
            suffix = ".".join(components[-count:])
            if not any(other == suffix or other.endswith(f".{suffix}") for other in others):
                suffixes.add(suffix)
                break
        else:
            suffixes.add(name)
    return sorted(suffixes)


def check_peft_config(content: Mapping[str, Any], where: str) -> None:
    """Check that an adapter is two matrices per module; nothing is ignored silently."""

    def refuse(label: str, hint: str = "Merge it into its base with PEFT's merge_and_unload().") -> None:
        raise CheckpointError(f"{where}: {label} is not supported", hint)

    if content.get("peft_type") != "LORA":
        refuse(f"peft_type {content.get('peft_type')!r}", "kvad reads LoRA adapters.")
    if content.get("bias", "none") != "none":
        refuse(f"bias {content['bias']!r}: trained biases")
    init = content.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower() not in ("gaussian", "eva", "orthogonal", "lora_ga"):
        refuse(f"init_lora_weights {init!r}: the base's weights were changed too")
    if content.get("lora_ga_config") or init == "lora_ga":
        refuse("init_lora_weights 'lora_ga': the base's weights were changed too")
    for name, value in content.items():
        if name not in IGNORED_KEYS and value not in (None, False, [], {}, ""):
            refuse(f"{name} {value!r}")
    for name, kind in (("r", int), ("lora_alpha", (int, float))):
        value = content.get(name)
        if not isinstance(value, kind) or isinstance(value, bool) or not value > 0:
            raise CheckpointError(f"{where}: {name}: must be a number above 0, got {value!r}")
    for name in ("rank_pattern", "alpha_pattern"):
        if not isinstance(content.get(name) or {}, Mapping):
            raise CheckpointError(f"{where}: {name}: must be an object, got {content[name]!r}")


def read_factors(
    targets: AdapterTargets,
    stored: Mapping[str, Tensor],
    content: Mapping[str, Any],
    where: str,
    adapted: Collection[str] | None = None,
) -> dict[str, model.lora.LoraFactors]:
    """Convert PEFT's tensors to adapters by kvad's names.

    Args:
        targets: Targets of the model.
        stored: Tensors of the file.
        content: ``adapter_config.json``.
        where: Path for messages.
        adapted: Layers that were adapted, for a file that kvad wrote: an adapter of a fused module is split again.
    """
    factors: dict[str, model.lora.LoraFactors] = {}
    by_name: dict[str, AdapterTarget] = {}
    for target in targets.targets:  # a file has its names with or without the base model's prefix
        bare_name = target.peft_name.removeprefix(targets.prefix)
        by_name |= dict.fromkeys((target.peft_name, bare_name, targets.prefix + bare_name), target)
    for module in dict.fromkeys(_module_name(name, where) for name in stored):
        if module not in by_name:
            hint = "The adapter may belong to another base."
            raise CheckpointError(f"{where}: {module} is no adaptable layer of this model", hint)
        target = by_name[module]
        pair = [stored.get(f"{PREFIX}{module}{suffix}") for suffix in TENSOR_SUFFIXES]
        if pair[0] is None or pair[1] is None:
            raise CheckpointError(f"{where}: tensor {module}{TENSOR_SUFFIXES[pair[1] is None]} is missing")
        a, b = pair[0], pair[1]
        shapes = [targets.shapes[name] for name in target.kvad_name]
        out_sizes, in_size = [out for out, _ in shapes], shapes[0][1]
        if a.dim() != 2 or b.dim() != 2 or (b.shape[0], *a.shape[::-1]) != (sum(out_sizes), in_size, b.shape[1]):
            sizes = f"A {list(a.shape)} and B {list(b.shape)}"
            raise CheckpointError(
                f"{where}: {module}: {sizes} do not fit the model's [{sum(out_sizes)}, {in_size}]",
                "The adapter belongs to another base.",
            )
        scale = _scale(module, a.shape[0], content, where)
        if target.row_order is not None:
            b = torch.empty_like(b).index_copy_(0, target.row_order, b)
        factors |= _split(target.kvad_name, out_sizes, model.lora.LoraFactors(a, b, scale), adapted)
    return factors


def _split(
    kvad_names: Sequence[str], out_sizes: Sequence[int], joined: model.lora.LoraFactors, adapted: Collection[str] | None
) -> dict[str, model.lora.LoraFactors]:
    """Reverse ``_join``; layers without an adapter are left out."""
    adapted_names = [name for name in kvad_names if adapted is None or name in adapted]
    rows = dict(zip(kvad_names, joined.b.split(list(out_sizes)), strict=True))
    is_concatenated = adapted is not None and len(adapted_names) > 1
    rank = joined.a.shape[0] // len(adapted_names) if is_concatenated else joined.a.shape[0]
    factors = {}
    for i, name in enumerate(adapted_names):
        span = slice(i * rank, (i + 1) * rank) if is_concatenated else slice(None)
        factors[name] = model.lora.LoraFactors(joined.a[span], rows[name][:, span], joined.scale)
    return factors


def _module_name(name: str, where: str) -> str:
    for suffix in TENSOR_SUFFIXES:
        if name.startswith(PREFIX) and name.endswith(suffix):
            return name.removeprefix(PREFIX).removesuffix(suffix)
    raise CheckpointError(f"{where}: tensor {name} is not supported", "kvad reads lora_A and lora_B of linear modules.")


def _scale(module: str, rank: int, content: Mapping[str, Any], where: str) -> float:
    config_rank = _pattern_value(module, content.get("rank_pattern") or {}, content["r"])
    alpha = _pattern_value(module, content.get("alpha_pattern") or {}, content["lora_alpha"])
    if config_rank != rank:
        raise CheckpointError(f"{where}: {module} has rank {rank}, its config has {config_rank}")
    return float(alpha / math.sqrt(rank) if content.get("use_rslora") else alpha / rank)


def _pattern_value(module: str, pattern: Mapping[str, Any], default: Any) -> Any:
    """Return the value of the first key, a regular expression, for the module's dotted suffix."""
    for key, value in pattern.items():
        try:
            matches = re.match(rf"(.*\.)?({key})$", module)
        except re.error:
            matches = None  # PEFT fails on such a key, so it names no module
        if matches:
            return value
    return default
