"""From a checkpoint of kvad's to a Hugging Face folder that ``transformers`` loads, and from theirs to ours.

Which class of theirs can hold a model is asked of the families: one can if it writes a config that it reads back as the
very same model.  A model that came from a family goes back to it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvad.checkpoint.atomic import new_folder
from kvad.checkpoint.families import FAMILIES, find
from kvad.checkpoint.generation import Generation
from kvad.checkpoint.hf import Family, Fields, write_tensors
from kvad.checkpoint.native import save
from kvad.checkpoint.open import Opened
from kvad.checkpoint.shards import write_sharded
from kvad.config import ModelConfig
from kvad.errors import CheckpointError, UsageError, nearest

__all__ = ["BESIDE", "choose_family", "export_hf", "import_hf"]

# Files that belong to a tokenizer or a chat and are copied as they are.
BESIDE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "source.spm",
    "target.spm",
)
# Asked in this order where a model came from none: the plainest class that can hold it.
FIRST = ("llama", "gpt2", "bert", "t5", "bart")
Progress = Callable[[str, int], None]


def choose_family(config: ModelConfig, wanted: str | None = None) -> tuple[Family, dict[str, Any]]:
    """A family that can hold this model, and the config that it writes.

    ``wanted``: a ``model_type``.  CheckpointError says what of the model it cannot express; without ``wanted``, that no
    family can, and what the nearest one said.
    """
    if wanted is not None:
        if wanted not in FAMILIES:
            raise UsageError(f"unknown family {wanted!r}", nearest(wanted, FAMILIES))
        return find(wanted), _written(find(wanted), config)
    reasons = []
    for name in dict.fromkeys([*(name for name in FIRST if name in FAMILIES), *sorted(FAMILIES)]):
        try:
            return find(name), _written(find(name), config)
        except CheckpointError as error:
            reasons.append(error.message)
    raise CheckpointError("no class of transformers can hold this model", f"of the first asked: {reasons[0]}")


def _written(family: Family, config: ModelConfig) -> dict[str, Any]:
    try:
        content = family.write(config)
    except (AssertionError, AttributeError, KeyError, TypeError) as error:  # a family meets a model of another kind
        raise CheckpointError(f"{family.types[0]} cannot express this {config.kind}: {error}") from error
    again = family.read(Fields(content, "config.json"))
    if again != config:
        differing = [name for name, value in config.to_dict().items() if again.to_dict()[name] != value]
        raise CheckpointError(f"{family.types[0]} cannot express this model: {', '.join(differing)}")
    return content


def export_hf(opened: Opened, out: Path, *, family: str | None = None, dtype: torch.dtype | None = None) -> str:
    """Write a Hugging Face folder; returns the class of theirs that reads it.

    The old folder, if any, gives way when the new one is whole.  Raises CheckpointError, SaveError.
    """
    chosen, content = choose_family(opened.config, family or opened.origin)
    said = {name: value for name, value in content.items() if value is not None}
    content = {**content, **_generation_fields(opened.generation), **said}  # a family's own padding decides positions
    content["dtype"] = _name(dtype or opened.stored)
    content["torch_dtype"] = content["dtype"]
    with new_folder(out) as new:
        _write(new / "config.json", content)
        if opened.generation != Generation():
            _write(new / "generation_config.json", _generation_file(opened.generation))
        ours = dict(opened.weights())
        write_sharded(new, _cast(write_tensors(chosen, opened.config, ours), dtype))
        _write_pooling(new, opened)
        _copy_beside(opened.path, new)
        _describe_tokenizer(opened, new)
    return str(content["architectures"][0])


def import_hf(opened: Opened, out: Path, *, dtype: torch.dtype | None = None, progress: Progress | None = None) -> None:
    """Write a checkpoint of kvad's, with the tokenizer's files as they are."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in opened.weights():
        tensors[name] = tensor if dtype is None else tensor.to(dtype)
        if progress is not None:
            progress(name, tensors[name].nbytes)
    beside = [opened.path / name for name in BESIDE if (opened.path / name).is_file()]
    save(out, opened.config, tensors, None, generation=opened.generation, beside=beside, origin=opened.origin)


def _cast(tensors: Iterator[tuple[str, Tensor]], dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        yield name, tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _generation_fields(generation: Generation) -> dict[str, Any]:
    fields = {
        "bos_token_id": generation.bos,
        "eos_token_id": _one_or_list(generation.stops),
        "pad_token_id": generation.pad,
        "decoder_start_token_id": generation.start,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _generation_file(generation: Generation) -> dict[str, Any]:
    fields = _generation_fields(generation) | {
        "forced_bos_token_id": generation.forced_first,
        "forced_eos_token_id": generation.forced_last,
        "bad_words_ids": [*([token] for token in generation.banned), *map(list, generation.bad_words)] or None,
    }
    names = {"beams": "num_beams", "no_repeat_ngram": "no_repeat_ngram_size", "min_tokens": "min_new_tokens"}
    names |= {"max_tokens": "max_new_tokens"}
    said = dict(generation.sampling or {})
    if said:
        fields["do_sample"] = said.get("temperature", 1.0) != 0
    fields |= {names.get(name, name): value for name, value in said.items() if name != "temperature" or value}
    return {name: value for name, value in fields.items() if value is not None}


def _one_or_list(tokens: tuple[int, ...]) -> int | list[int] | None:
    if not tokens:
        return None
    return tokens[0] if len(tokens) == 1 else list(tokens)


def _write_pooling(new: Path, opened: Opened) -> None:
    """How an encoder's vectors are made, as sentence-transformers (and ``read_pooling``) reads it."""
    pool, unit = opened.generation.pool, opened.generation.unit
    if pool is None:
        return
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] if unit else [])]
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(kinds)
    ]
    (new / "modules.json").write_text(json.dumps(modules, indent=2) + "\n", encoding="utf-8")
    for path, _ in kinds[1:]:
        (new / path).mkdir()
    modes = {"pooling_mode_cls_token": pool == "first", "pooling_mode_mean_tokens": pool == "mean"}
    _write(new / "1_Pooling" / "config.json", {"word_embedding_dimension": opened.config.width, **modes})


def _copy_beside(folder: Path, new: Path) -> None:
    for name in BESIDE:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, new / name)


def _describe_tokenizer(opened: Opened, new: Path) -> None:
    """A tokenizer_config.json for a tokenizer.json that came without one, so that AutoTokenizer reads it; kvad's own
    tables of bytes, characters and words are no format of theirs and are left out."""
    path = new / "tokenizer.json"
    if not path.exists() or (new / "tokenizer_config.json").exists():
        return
    if json.loads(path.read_text("utf-8")).get("kvad") is not None:
        path.unlink()
        return
    assert opened.tokenizer is not None
    specials = opened.tokenizer.specials
    by_id = {token: name for name, token in specials.names().items()}
    roles = {
        "bos_token": specials.bos if specials.bos is not None else specials.separator,
        "eos_token": specials.eos if specials.eos is not None else specials.separator,
        "pad_token": specials.pad,
        "unk_token": specials.unk,
    }
    said = {role: by_id[token] for role, token in roles.items() if token is not None}
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": opened.config.limit, **said}
    _write(new / "tokenizer_config.json", {**content, "clean_up_tokenization_spaces": False})
