"""Generation defaults of a checkpoint: special tokens and sampling parameters.

They are read from ``generation_config.json``, in older files from ``config.json``, and written likewise; kvad's layout
stores them under ``"generation"`` in ``config.json``.  Every field is applied as a default that a request may change.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvad.checkpoint.folder import write_json
from kvad.errors import CheckpointError

GENERATION_FILE = "generation_config.json"
SOURCE_EOS_KEY = "source_end_token_id"  # field of kvad; transformers leaves this to the tokenizer

# Fields that kvad does not apply, with the values that have no effect.
IGNORED_FIELDS: dict[str, tuple[Any, ...]] = {
    "min_length": (0,),
    "begin_suppress_tokens": ([],),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0.0,),
    "penalty_alpha": (0.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "guidance_scale": (1.0,),
    "sequence_bias": (),
    "exponential_decay_length_penalty": (),
    "remove_invalid_values": (False,),
    "renormalize_logits": (False,),
}


@dataclass(frozen=True)
class GenerationConfig:
    """Generation defaults of a checkpoint."""

    decoder_start_token_id: int | None = None  # opens a target (encoder-decoder)
    bos_token_id: int | None = None  # opens a text
    eos_token_ids: tuple[int, ...] = ()  # end a text or target
    source_eos_token_id: int | None = None  # ends an encoder input, if the tokenizer does not add it
    pad_token_id: int | None = None
    forced_bos_token_id: int | None = None  # first generated token
    forced_eos_token_id: int | None = None  # token at the length limit
    suppress_tokens: tuple[int, ...] = ()  # never generated (Marian's padding)
    bad_words_ids: tuple[tuple[int, ...], ...] = ()  # sequences that are never completed
    sampling: Mapping[str, int | float | bool | str] | None = None  # fields of ``SamplingParams``
    pooling: Literal["mean", "first"] | None = None  # of a sentence-transformers folder
    normalize: bool = False  # vectors of a sentence-transformers folder have length 1
    ignored_fields: tuple[str, ...] = ()  # fields that would change texts and are not applied; logged at load

    def with_source_eos(self, source: list[int]) -> list[int]:
        """Append the token that ends an encoder input, as in training, if it is missing."""
        if self.source_eos_token_id is None or not source or source[-1] == self.source_eos_token_id:
            return source
        return [*source, self.source_eos_token_id]


def read_pooling(folder: Path) -> tuple[Literal["mean", "first"] | None, bool]:
    """Read how a sentence-transformers folder pools hidden states, and whether vectors are normalized.

    The result is (None, False) for any other folder.
    """
    modules = folder / "modules.json"
    if not modules.exists():
        return None, False
    try:
        entries = json.loads(modules.read_text("utf-8"))
        folders = {str(entry["type"]).rpartition(".")[2]: folder / str(entry["path"]) for entry in entries}
        has_config = "Pooling" in folders
        pooling_config = json.loads((folders["Pooling"] / "config.json").read_text("utf-8")) if has_config else {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{modules}: cannot read the pooling: {error}") from error
    supported = {"Transformer", "Pooling", "Normalize"}
    if unsupported := sorted(set(folders) - supported):
        raise CheckpointError(f"{modules}: {unsupported[0]} is not supported", "Embed with --pooling mean.")
    modes = [name for name, enabled in pooling_config.items() if name.startswith("pooling_mode") and enabled]
    pooling_by_modes: dict[tuple[str, ...], Literal["mean", "first"]] = {
        ("pooling_mode_mean_tokens",): "mean",
        ("pooling_mode_cls_token",): "first",
    }
    if modes and tuple(modes) not in pooling_by_modes:
        raise CheckpointError(f"{folders['Pooling']}: {', '.join(modes)} is not supported", "Use mean or cls.")
    return pooling_by_modes.get(tuple(modes)), "Normalize" in folders


def read_generation_config(config: Mapping[str, Any], generation: Mapping[str, Any] | None) -> GenerationConfig:
    """Read generation defaults from ``generation_config.json``, or without it from ``config.json``."""
    fields = config if generation is None else generation

    def token_or_none(name: str) -> int | None:
        value = fields.get(name)
        if isinstance(value, Sequence) and not isinstance(value, str):
            value = value[0] if len(value) else None
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def list_values(name: str) -> list[Any]:
        value = fields.get(name)
        values = [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
        groups = [item if isinstance(item, list) and name == "bad_words_ids" else [item] for item in values]
        tokens = [token for group in groups for token in group]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
            raise CheckpointError(f"generation_config.json: {name}: must be token ids, got {value!r}")
        return values

    bad_words = [tuple(tokens) if isinstance(tokens, list) else (tokens,) for tokens in list_values("bad_words_ids")]
    single_bad_words = [tokens[0] for tokens in bad_words if len(tokens) == 1]
    return GenerationConfig(
        decoder_start_token_id=token_or_none("decoder_start_token_id"),
        bos_token_id=token_or_none("bos_token_id"),
        eos_token_ids=tuple(list_values("eos_token_id")),
        source_eos_token_id=token_or_none(SOURCE_EOS_KEY),
        pad_token_id=token_or_none("pad_token_id"),
        forced_bos_token_id=token_or_none("forced_bos_token_id"),
        forced_eos_token_id=token_or_none("forced_eos_token_id"),
        suppress_tokens=tuple(sorted({*single_bad_words, *list_values("suppress_tokens")})),
        bad_words_ids=tuple(tokens for tokens in bad_words if len(tokens) > 1),
        sampling=_sampling(fields) if generation is not None else None,
        ignored_fields=tuple(
            name for name, neutral_values in IGNORED_FIELDS.items() if fields.get(name) not in (None, *neutral_values)
        ),
    )


def _sampling(fields: Mapping[str, Any]) -> dict[str, int | float | bool | str]:
    """Return the recommended search or sampling parameters; greedy unless ``do_sample``."""
    names = {"repetition_penalty": "repetition_penalty", "no_repeat_ngram_size": "no_repeat_ngram_size"}
    names |= {"min_new_tokens": "min_tokens", "max_new_tokens": "max_tokens"}
    # ``max_length`` counts the token that opens a target; for a decoder it is the model's limit anyway.
    max_length, has_start = fields.get("max_length"), "decoder_start_token_id" in fields
    if isinstance(max_length, int) and max_length > 1 and has_start and "max_new_tokens" not in fields:
        fields = {**fields, "max_new_tokens": max_length - 1}
    if fields.get("do_sample", False):
        names |= {name: name for name in ("temperature", "top_k", "top_p", "min_p", "typical_p")}
    elif isinstance(fields.get("num_beams"), int) and fields["num_beams"] > 1:
        names |= {"num_beams": "num_beams", "length_penalty": "length_penalty", "early_stopping": "early_stopping"}
    sampling = {kvad_name: fields[hf_name] for hf_name, kvad_name in names.items() if fields.get(hf_name) is not None}
    return sampling if fields.get("do_sample", False) else {**sampling, "temperature": 0.0}


def config_json_fields(generation: GenerationConfig) -> dict[str, Any]:
    """Return the fields that ``config.json`` repeats."""
    ends = generation.eos_token_ids
    fields = {
        "bos_token_id": generation.bos_token_id,
        "eos_token_id": ends[0] if len(ends) == 1 else list(ends) or None,
        "pad_token_id": generation.pad_token_id,
        "decoder_start_token_id": generation.decoder_start_token_id,
    }
    always = ("bos_token_id", "eos_token_id")  # transformers would use its own default ids if these were absent
    return {name: value for name, value in fields.items() if value is not None or name in always}


def generation_json(generation: GenerationConfig) -> dict[str, Any] | None:
    """Return the content of ``generation_config.json``, or None if all fields are defaults."""
    if generation == GenerationConfig():
        return None
    bad_words = [*([token] for token in generation.suppress_tokens), *map(list, generation.bad_words_ids)]
    fields = config_json_fields(generation) | {
        "forced_bos_token_id": generation.forced_bos_token_id,
        "forced_eos_token_id": generation.forced_eos_token_id,
        "bad_words_ids": bad_words or None,
        SOURCE_EOS_KEY: generation.source_eos_token_id,
    }
    names = {"min_tokens": "min_new_tokens", "max_tokens": "max_new_tokens"}
    sampling = dict(generation.sampling or {})
    if sampling:
        fields["do_sample"] = sampling.get("temperature", 1.0) != 0
    fields |= {names.get(name, name): value for name, value in sampling.items() if name != "temperature" or value}
    return {name: value for name, value in fields.items() if value is not None}


def write_pooling(folder: Path, generation: GenerationConfig, hidden_size: int) -> None:
    """Write an encoder's pooling in the files of sentence-transformers."""
    pool, normalize = generation.pooling, generation.normalize
    if pool is None:
        return
    parts = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] if normalize else [])]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(parts)
    ]
    write_json(folder / "modules.json", modules, indent=2)
    for path, _ in parts[1:]:
        (folder / path).mkdir()
    modes = {"pooling_mode_cls_token": pool == "first", "pooling_mode_mean_tokens": pool == "mean"}
    pooling_config = {"word_embedding_dimension": hidden_size, **modes}
    write_json(folder / "1_Pooling" / "config.json", pooling_config, indent=2)
