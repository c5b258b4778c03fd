"""What a checkpoint says about generating with it: where targets begin, which tokens end them, and its defaults.

Read from ``generation_config.json``, and from ``config.json`` where older files say it there, and written so; in kvad's
own layout kept under ``"generation"`` in ``config.json``.  Every field is applied, as a default that a request may
change.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvad.errors import CheckpointError

GENERATION_FILE = "generation_config.json"
SOURCE_EOS_KEY = "source_end_token_id"  # kvad's own field: theirs leave it to the tokenizer


# Fields that would change a text, and their values that would not.
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
    """``start``: the token that opens a target (encoder-decoder) or, ``bos``, a text.  ``stops`` end it.
    ``source_end``: the token that ends a source, where the tokenizer's own frame does not put it there.

    ``forced_first``, ``forced_last``: the first generated token, and the one at the very limit.  ``banned``: never
    generated (Marian's padding); ``bad_words``: sequences that are never completed.  ``sampling``: defaults by their
    names in :class:`kvad.engine.scheduling.request.SamplingParams`.  ``pool`` and ``unit``: how a sentence-transformers folder makes one
    vector of a text's hidden states.  ``unheard``: fields of the file that would change texts and that kvad does not
    apply; they are said when the model is loaded.
    """

    decoder_start_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    source_eos_token_id: int | None = None
    pad_token_id: int | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | None = None
    suppress_tokens: tuple[int, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    sampling: Mapping[str, int | float | bool | str] | None = None
    pooling: Literal["mean", "first"] | None = None
    normalize: bool = False
    ignored_fields: tuple[str, ...] = ()

    def with_source_eos(self, source: list[int]) -> list[int]:
        """A framed source with the token that ends it: what training wrote, and what an encoder is given to read."""
        if self.source_eos_token_id is None or not source or source[-1] == self.source_eos_token_id:
            return source
        return [*source, self.source_eos_token_id]


def read_pooling(folder: Path) -> tuple[Literal["mean", "first"] | None, bool]:
    """(pool, unit) of a sentence-transformers folder, (None, False) of another.  CheckpointError for a way of pooling
    that is not known."""
    modules = folder / "modules.json"
    if not modules.exists():
        return None, False
    try:
        listed = json.loads(modules.read_text("utf-8"))
        kinds = {str(each["type"]).rpartition(".")[2]: folder / str(each["path"]) for each in listed}
        said = json.loads((kinds["Pooling"] / "config.json").read_text("utf-8")) if "Pooling" in kinds else {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{modules}: cannot read how texts are pooled: {error}") from error
    known = {"Transformer", "Pooling", "Normalize"}
    if set(kinds) - known:
        raise CheckpointError(f"{modules}: {sorted(set(kinds) - known)[0]} is not supported", "embed with --pool mean")
    modes = [name for name, on in said.items() if name.startswith("pooling_mode") and on]
    ways: dict[tuple[str, ...], Literal["mean", "first"]] = {
        ("pooling_mode_mean_tokens",): "mean",
        ("pooling_mode_cls_token",): "first",
    }
    if modes and tuple(modes) not in ways:
        raise CheckpointError(f"{kinds['Pooling']}: {', '.join(modes)} is not supported", "mean or cls")
    return ways.get(tuple(modes)), "Normalize" in kinds


def read_generation_config(config: Mapping[str, Any], generation: Mapping[str, Any] | None) -> GenerationConfig:
    """``generation``: the content of ``generation_config.json``, None where there is none (then ``config`` says it)."""
    said = config if generation is None else generation

    def one(name: str) -> int | None:
        value = said.get(name)
        if isinstance(value, Sequence) and not isinstance(value, str):
            value = value[0] if len(value) else None
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def many(name: str) -> list[Any]:
        value = said.get(name)
        listed = [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
        words = [each if isinstance(each, list) and name == "bad_words_ids" else [each] for each in listed]
        plain = [token for word in words for token in word]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in plain):
            raise CheckpointError(f"generation_config.json: {name}: expected token ids, found {value!r}")
        return listed

    stops = tuple(many("eos_token_id"))
    words = [tuple(word) if isinstance(word, list) else (word,) for word in many("bad_words_ids")]
    bad = [word[0] for word in words if len(word) == 1]
    suppressed = many("suppress_tokens")
    return GenerationConfig(
        decoder_start_token_id=one("decoder_start_token_id"),
        bos_token_id=one("bos_token_id"),
        eos_token_ids=stops,
        source_eos_token_id=one(SOURCE_EOS_KEY),
        pad_token_id=one("pad_token_id"),
        forced_bos_token_id=one("forced_bos_token_id"),
        forced_eos_token_id=one("forced_eos_token_id"),
        suppress_tokens=tuple(sorted({*bad, *suppressed})),
        bad_words_ids=tuple(word for word in words if len(word) > 1),
        sampling=_sampling(said) if generation is not None else None,
        ignored_fields=tuple(name for name, quiet in IGNORED_FIELDS.items() if said.get(name) not in (None, *quiet)),
    )


def _sampling(said: Mapping[str, Any]) -> dict[str, int | float | bool | str]:
    """The search or the sampling that the checkpoint recommends: greedy unless ``do_sample``."""
    names = {"repetition_penalty": "repetition_penalty", "no_repeat_ngram_size": "no_repeat_ngram"}
    names |= {"min_new_tokens": "min_tokens", "max_new_tokens": "max_tokens"}
    longest = said.get("max_length")  # a target's with the token that opens it; a decoder's is its limit here anyway
    if isinstance(longest, int) and longest > 1 and "decoder_start_token_id" in said and "max_new_tokens" not in said:
        said = {**said, "max_new_tokens": longest - 1}
    if said.get("do_sample", False):
        names |= {name: name for name in ("temperature", "top_k", "top_p", "min_p", "typical_p")}
    elif isinstance(said.get("num_beams"), int) and said["num_beams"] > 1:
        names |= {"num_beams": "beams", "length_penalty": "length_penalty", "early_stopping": "early_stopping"}
    found = {ours: said[theirs] for theirs, ours in names.items() if said.get(theirs) is not None}
    return found if said.get("do_sample", False) else {**found, "temperature": 0.0}


# ---------------------------------------------------------------- writing


def config_json_fields(generation: GenerationConfig) -> dict[str, Any]:
    """What ``config.json`` says of it, too."""
    fields = {
        "bos_token_id": generation.bos_token_id,
        "eos_token_id": _one_or_list(generation.eos_token_ids),
        "pad_token_id": generation.pad_token_id,
        "decoder_start_token_id": generation.decoder_start_token_id,
    }
    always = ("bos_token_id", "eos_token_id")  # where nothing is said, transformers would take ids of its own
    return {name: value for name, value in fields.items() if value is not None or name in always}


def generation_json(generation: GenerationConfig) -> dict[str, Any] | None:
    """The content of ``generation_config.json``; None where there is nothing to say."""
    if generation == GenerationConfig():
        return None
    fields = config_json_fields(generation) | {
        "forced_bos_token_id": generation.forced_bos_token_id,
        "forced_eos_token_id": generation.forced_eos_token_id,
        "bad_words_ids": [*([token] for token in generation.suppress_tokens), *map(list, generation.bad_words_ids)]
        or None,
        SOURCE_EOS_KEY: generation.source_eos_token_id,
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


def write_pooling(folder: Path, generation: GenerationConfig, width: int) -> None:
    """How an encoder's vectors are made, as sentence-transformers (and :func:`read_pooling`) reads it."""
    pool, unit = generation.pooling, generation.normalize
    if pool is None:
        return
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] if unit else [])]
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules, indent=2) + "\n", encoding="utf-8")
    for path, _ in kinds[1:]:
        (folder / path).mkdir()
    modes = {"pooling_mode_cls_token": pool == "first", "pooling_mode_mean_tokens": pool == "mean"}
    said = {"word_embedding_dimension": width, **modes}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
