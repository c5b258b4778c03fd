"""Hugging Face checkpoints, read and written: what all families share.

A family (``families/*.py``) is two functions and a table, with no ``nn.Module`` anywhere: :attr:`Family.read` makes a
:class:`ModelConfig` of a ``config.json``, :attr:`Family.spell` the inverse, which :meth:`Family.write` reads back
before it believes it, and :attr:`Family.rules` pairs our modules with theirs.  A :class:`Rule` is read in both
directions, so what loads also exports:

    rule("decoder.layers.0.mixer.out", "model.layers.0.self_attn.o_proj")            .weight and .bias, as they are
    rule("decoder.layers.0.mixer.out", "transformer.h.0.attn.c_proj", TRANSPOSED)    [in, out] on their side
    rule(("decoder.layers.0.mixer.q", "...k", "...v"), "...attn.c_attn", STACKED)    three of ours, one of theirs

Nothing is dropped in silence: a tensor of theirs that no rule names and :attr:`Family.ignored` does not list is an
error, like one that is missing or of another shape; a field of their config that changes the model and that kvad cannot
express is refused by name (:meth:`Fields.refuse`).  Code from a repository is never run.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvad import config as config_lib
from kvad.config import ModelConfig, canonical_config
from kvad.errors import CheckpointError, ConfigError, suggest

Shape = tuple[int, ...]
HFTensors = Mapping[str, Tensor]


# ---------------------------------------------------------------- tensors


class TensorTransform(NamedTuple):
    """From their tensors to ours and back.  Both get the shapes of ours, in the order of the rule."""

    read: Callable[[Sequence[Tensor], Sequence[Shape]], Sequence[Tensor]]
    write: Callable[[Sequence[Tensor], Sequence[Shape]], Sequence[Tensor]]


def _transposed(tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
    return [tensor.t() if tensor.dim() == 2 else tensor for tensor in tensors]


def _unstacked(tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> Sequence[Tensor]:
    (whole,) = tensors
    return list(torch.split(whole, [shape[0] for shape in shapes]))


def _stacked(tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
    return [torch.cat(list(tensors))]


SAME = TensorTransform(lambda tensors, shapes: tensors, lambda tensors, shapes: tensors)
TRANSPOSED = TensorTransform(_transposed, _transposed)  # GPT-2's Conv1D stores [in, out]
STACKED = TensorTransform(_unstacked, _stacked)  # several of ours, one behind the other along the outputs
STACKED_COLUMNS = TensorTransform(
    lambda tensors, shapes: _unstacked(_transposed(tensors, shapes), shapes),
    lambda tensors, shapes: _transposed(_stacked(tensors, shapes), shapes),
)


def grouped_transform(groups: int) -> TensorTransform:
    """Several of ours, one behind the other within each of ``groups`` equal parts of the outputs.

    BLOOM's q, k, v by head: rows [q of head 0, k of head 0, v of head 0, q of head 1, ...], with one group per head;
    Falcon's with one group per key-value head, whose queries stand before its k and v.
    """

    def read(tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        (whole,) = tensors
        parts = torch.split(whole.unflatten(0, (groups, -1)), [shape[0] // groups for shape in shapes], dim=1)
        return [part.flatten(0, 1) for part in parts]

    def write(tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        return [torch.cat([tensor.unflatten(0, (groups, -1)) for tensor in tensors], dim=1).flatten(0, 1)]

    return TensorTransform(read, write)


class TensorRule(NamedTuple):
    """``ours`` and ``theirs``: modules, or whole tensors' names; see :func:`expand`.

    ``missing_ok``: their file may lack it (a buffer that older files have); ours then keeps zeros.
    """

    kvad_names: tuple[str, ...]
    hf_names: tuple[str, ...]
    transform: TensorTransform = SAME
    missing_ok: bool = False


def tensor_rule(
    ours: str | tuple[str, ...], theirs: str | tuple[str, ...], way: TensorTransform = SAME, *, missing_ok: bool = False
) -> TensorRule:
    """Names given alone or as tuples."""
    return TensorRule(
        (ours,) if isinstance(ours, str) else ours, (theirs,) if isinstance(theirs, str) else theirs, way, missing_ok
    )


def prefix_rules(ours: str, theirs: str, names: Mapping[str, str], way: TensorTransform = SAME) -> Iterator[TensorRule]:
    """One rule for each pair of names, below two prefixes."""
    for mine, other in names.items():
        yield tensor_rule(f"{ours}.{mine}", f"{theirs}.{other}", way)


class _Tensors(NamedTuple):
    """A rule about tensors."""

    kvad_names: tuple[str, ...]
    theirs: tuple[str, ...]
    shapes: tuple[Shape, ...]
    way: TensorTransform
    missing_ok: bool


def expand_rules(rules: Iterable[TensorRule], shapes: Mapping[str, Shape]) -> list[_Tensors]:
    """Rules about modules as rules about tensors: each suffix (``weight``, ``bias``) that ours have, in our model.

    Rules about modules that this model lacks (a norm, a bias) vanish.  AssertionError for a tensor of ours that no rule
    names, or two do: a bug in the family.
    """
    suffixes: dict[str, list[str]] = {}
    for name in shapes:
        module, _, last = name.rpartition(".")
        suffixes.setdefault(module, []).append(f".{last}")
        suffixes[name] = [""]
    out, named = [], set[str]()
    for each in rules:
        for suffix in suffixes.get(each.kvad_names[0], ()):
            ours = tuple(module + suffix for module in each.kvad_names)
            assert all(name in shapes for name in ours), f"{ours}: not all of them are in the model"
            assert not named & set(ours), f"{ours}: named twice"
            named |= set(ours)
            theirs = tuple(module + suffix for module in each.hf_names)
            out.append(_Tensors(ours, theirs, tuple(shapes[name] for name in ours), each.transform, each.missing_ok))
    left = sorted(set(shapes) - named)
    assert not left, f"no rule for {left[:5]}"
    return out


def read_tensors(family: Family, config: ModelConfig, found: HFTensors, where: str) -> Iterator[tuple[str, Tensor]]:
    """Our tensors, one rule at a time.  CheckpointError names what is missing, extra or of another shape."""
    taken: set[str] = set()
    copies: dict[str, str] = {}  # name -> the tensor that it must be equal to
    for each in expand_rules(family.rules(config), config_lib.parameter_shapes.weight_shapes(config)):
        names = [_name_in(family, name, found) for name in each.theirs]
        absent = [name for name, there in zip(each.theirs, names, strict=True) if there is None]
        if absent and each.missing_ok:
            yield from ((name, torch.zeros(shape)) for name, shape in zip(each.kvad_names, each.shapes, strict=True))
            continue
        if absent:
            raise CheckpointError(f"{where}: tensor {absent[0]} is missing", _nearest_tensor(absent[0], found))
        taken |= {name for name in names if name is not None}
        for name, there in zip(each.theirs, names, strict=True):
            others = (_their_name(other, found, family) for other in family.copies.get(name, ()))
            copies |= {other: there for other in others if other is not None and there is not None}
        yield from _read(each, [(name, found[name]) for name in names if name is not None], where)
    for name in _extra(family, found, taken):
        if name not in copies:
            raise CheckpointError(
                f"{where}: tensor {name} {list(found[name].shape)} is extra", "the config has no place for it"
            )
        if not torch.equal(found[name], found[copies[name]]):
            raise CheckpointError(f"{where}: {name} differs from {copies[name]}", "the config says that they are one")
    _check_constants(family, config, found, where)


def find_mismatches(family: Family, config: ModelConfig, found: HFTensors, where: str) -> list[str]:
    """All that :func:`read_tensors` would object to in names and shapes; ``found`` may be on the meta device."""
    said: list[str] = []
    taken: set[str] = set()
    for each in expand_rules(family.rules(config), config_lib.parameter_shapes.weight_shapes(config)):
        names = [_name_in(family, name, found) for name in each.theirs]
        for name, there in zip(each.theirs, names, strict=True):
            if there is None and not each.missing_ok:
                said.append(f"{name} is missing")
            others = (_their_name(other, found, family) for other in family.copies.get(name, ()))
            taken |= {other for other in (there, *others) if other is not None}
        if None in names:
            continue
        try:
            list(_read(each, [(name, found[name]) for name in names if name is not None], where))
        except CheckpointError as error:
            said.append(error.message.removeprefix(f"{where}: "))
    return said + [f"{name} {list(found[name].shape)} is extra" for name in _extra(family, found, taken)]


def _extra(family: Family, found: HFTensors, taken: set[str]) -> list[str]:
    """What no rule took, and is not to be ignored."""
    allowed = re.compile("|".join(f"(?:{pattern})" for pattern in family.ignored) or r"(?!)")
    return [name for name in found if name not in taken and not allowed.fullmatch(name.removeprefix(family.prefix))]


def _check_constants(family: Family, config: ModelConfig, found: HFTensors, where: str) -> None:
    """Tables that kvad computes are those of the file, as far as both go and float16 can tell."""
    for name, tensor in () if family.extra is None else family.extra(config):
        there = _their_name(name, found, family)
        if there is None:
            continue
        theirs = found[there]
        rows = min(len(theirs), len(tensor))
        if theirs.shape[1:] != tensor.shape[1:] or not torch.allclose(
            theirs[:rows].float(), tensor[:rows].float(), rtol=0.0, atol=1e-2
        ):
            raise CheckpointError(f"{where}: {there} is not the table that the config describes")


def resolve_tying(family: Family, config: ModelConfig, found: HFTensors) -> ModelConfig:
    """A config that says *tied* of a file that holds two different matrices: the file is right, as transformers 5 has
    it (4.57 drops the head's)."""
    if not config.tie_embeddings or family.head is None:
        return config
    head, table = (_name_in(family, name, found) for name in family.head)
    if head is None or table is None or torch.equal(found[head], found[table]):
        return config
    return replace(config, tie_embeddings=False)


def resolve_config(family: Family, config: ModelConfig, found: HFTensors) -> ModelConfig:
    """The config of what is in the file, where that decides: a matrix that is not tied, a head that it lacks."""

    def look(name: str) -> Tensor | None:
        there = _their_name(name, found, family)
        return None if there is None else found[there]

    config = resolve_tying(family, config, found)
    return config if family.resolve is None else family.resolve(config, look)


def _name_in(family: Family, name: str, found: HFTensors) -> str | None:
    """As it stands in the file, or the first of its copies that does."""
    names = (_their_name(each, found, family) for each in (name, *family.copies.get(name, ())))
    return next((each for each in names if each is not None), None)


def _their_name(name: str, found: HFTensors, family: Family) -> str | None:
    """As it stands in the file: files of a base model lack the prefix of the model with a head, or have it, and old
    ones spell some endings otherwise."""
    prefix = family.prefix
    others = [name.removesuffix(end) + other for end, other in family.name_variants.items() if name.endswith(end)]
    for one in (name, *others):
        for candidate in (one, one.removeprefix(prefix), prefix + one):
            if candidate in found:
                return candidate
    return None


def _read(each: _Tensors, tensors: Sequence[tuple[str, Tensor]], where: str) -> Iterator[tuple[str, Tensor]]:
    try:
        made = list(each.way.read([tensor for _, tensor in tensors], each.shapes))
    except RuntimeError:
        made = []
    if [tuple(tensor.shape) for tensor in made] != list(each.shapes):
        theirs = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors)
        ours = ", ".join(f"{name} {list(shape)}" for name, shape in zip(each.kvad_names, each.shapes, strict=True))
        raise CheckpointError(f"{where}: {theirs} does not give {ours}", "the config and the tensors disagree")
    yield from zip(each.kvad_names, made, strict=True)


def _nearest_tensor(name: str, found: HFTensors) -> str:
    close = difflib.get_close_matches(name, list(found), n=1, cutoff=0.8)
    return f"there is {close[0]}" if close else "is it another architecture's?"


def write_tensors(family: Family, config: ModelConfig, ours: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Their tensors, each once: what is tied on their side is not written."""
    for each in expand_rules(family.rules(config), config_lib.parameter_shapes.weight_shapes(config)):
        made = each.way.write([ours[name] for name in each.kvad_names], each.shapes)
        for name, tensor in zip(each.theirs, made, strict=True):
            yield name, tensor.contiguous()
    if family.extra is not None:
        yield from family.extra(config)


# ---------------------------------------------------------------- configs


class HFConfigReader:
    """A ``config.json``, read by name: numbers are numbers, null is a default, and what cannot be is refused."""

    def __init__(self, content: Mapping[str, Any], where: str) -> None:
        self.content, self.where = content, where

    @property
    def model_type(self) -> str:
        return str(self.content.get("model_type", ""))

    @property
    def architecture(self) -> str:
        """The class that wrote it, ``""`` where the file does not say."""
        names = self.content.get("architectures") or [""]
        return str(names[0])

    def __contains__(self, name: str) -> bool:
        return self.content.get(name) is not None

    def get(self, name: str, default: Any = None) -> Any:
        """The value, or ``default`` where it is absent or null."""
        value = self.content.get(name)
        return default if value is None else value

    def integer(self, *names: str, default: int | None = None) -> int:
        """The first of the names that is there.  CheckpointError where none is, or it is no whole number."""
        for name in names:
            value = self.get(name)
            if value is not None:
                if not isinstance(value, int) or isinstance(value, bool):
                    raise CheckpointError(f"{self.where}: {name}: expected a whole number, found {value!r}")
                return value
        if default is None:
            raise CheckpointError(f"{self.where}: {names[0]} is missing")
        return default

    def number(self, *names: str, default: float | None = None) -> float:
        for name in names:
            value = self.get(name)
            if value is not None:
                if not isinstance(value, (int, float)) or isinstance(value, bool):
                    raise CheckpointError(f"{self.where}: {name}: expected a number, found {value!r}")
                return float(value)
        if default is None:
            raise CheckpointError(f"{self.where}: {names[0]} is missing")
        return default

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {name}: expected true or false, found {value!r}")
        return value

    def choice(self, name: str, known: Mapping[str, Any], default: str | None = None) -> Any:
        """The value that ``known`` gives for the field's; refused by name where it gives none."""
        value = self.get(name, default)
        if value not in known:
            raise CheckpointError(f"{self.where}: {name} {value!r} is not supported", suggest(str(value), known))
        return known[value]

    def require_one_of(self, name: str, *allowed: Any, why: str = "") -> None:
        """CheckpointError unless the field is absent, null, or one of ``allowed``."""
        value = self.content.get(name)
        if value is not None and value not in allowed:
            raise CheckpointError(f"{self.where}: {name} {value!r} is not supported", why)

    def part(self, name: str) -> HFConfigReader:
        """A nested config (``text_config``, ``encoder``)."""
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            raise CheckpointError(f"{self.where}: {name}: expected an object, found {value!r}")
        return HFConfigReader(value, f"{self.where}: {name}")


@dataclass(frozen=True)
class Family:
    """``types``: the ``model_type`` values that are read.  ``spell`` gives the ``config.json`` of what kvad has, with
    ``model_type`` and ``architectures``; what it has no field for it may leave out, for :meth:`write` will notice.

    ``prefix``: of their base model, which some files have and some lack.  ``ignored``: patterns of tensors that are not
    weights (constants, copies of tied ones), without the prefix.  ``extra``: what their files hold beside our weights.
    ``head``: their head's matrix and the table that it is tied to, where it may be.  ``spellings``: endings of tensors'
    names, and how other files spell them.  ``settle``: the config of what is in a file, given a way to look at it.
    ``copies``: other names under which a file may hold a tensor, instead of its own or, then equal, beside it.
    """

    types: tuple[str, ...]
    read: Callable[[HFConfigReader], ModelConfig]
    rules: Callable[[ModelConfig], Iterable[TensorRule]]
    write_fields: Callable[[ModelConfig], dict[str, Any]]
    prefix: str = ""
    ignored: tuple[str, ...] = ()
    extra: Callable[[ModelConfig], Iterable[tuple[str, Tensor]]] | None = None
    head: tuple[str, str] | None = None
    name_variants: Mapping[str, str] = field(default_factory=dict)
    resolve: Callable[[ModelConfig, Callable[[str], Tensor | None]], ModelConfig] | None = None
    copies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """The ``config.json`` of a model, proven: read back, it is this model.  CheckpointError names the first part
        that would be another, because their class has no place for it."""
        name = self.types[0]
        try:
            content = self.write_fields(config)
            name = content["model_type"]
            again = self.read(HFConfigReader(content, name))
        except (CheckpointError, ConfigError) as error:
            said = (
                error.message
                if "cannot express" in error.message
                else f"{name} cannot express this model: {error.message}"
            )
            raise CheckpointError(said) from error
        except (AssertionError, AttributeError, KeyError, TypeError) as error:  # it met a model of another kind
            raise CheckpointError(f"{name} cannot express this {config.kind}: {error}") from error
        ours, theirs = canonical_config(config), canonical_config(again)
        for part in {**ours, **theirs}:
            mine, other = ours.get(part), theirs.get(part)
            if mine != other:
                raise CheckpointError(f"{name} cannot express this model: {part} is {mine!r}, would become {other!r}")
        return content
