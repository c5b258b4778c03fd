"""Post-processors in files of the ``tokenizers`` library, and those of a tokenizer's class and settings.

The library's file has the default language filled in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvad.errors import TokenizerError, suggest
from kvad.text.base import FIRST_TEXT, LANGUAGE_PLACEHOLDER, SECOND_TEXT, PostProcessor
from kvad.text.hf_config import CONFIG_NAME, TokenizerSettings

if TYPE_CHECKING:
    import tokenizers  # type: ignore[import-untyped]

Sides = tuple[tuple[int, ...], tuple[int, ...]]  # ids before and after a text
_OPENS_WITH_BOS = ("CodeLlama", "Cohere", "Gemma", "Llama")  # if add_bos_token is missing
_LANGUAGE_FIRST = {"M2M100": "en", "MBart50": "en_XX", "Nllb": "eng_Latn"}  # [lang] x </s>, and the default language
_LANGUAGE_LAST = {"MBart": "en_XX"}  # x </s> [lang]
_CODES = re.compile(r"(?P<plain>[a-z]{2,3}_[A-Z][A-Za-z]{1,3})|__(?P<m2m>[a-z]{2,3})__|>>(?P<marian>[^<>]+)<<")


def language_codes(special_ids: Mapping[str, int]) -> dict[str, int]:
    """Return the special tokens that are languages by code: ``{"__de__": 7}`` -> ``{"de": 7}``."""
    matches = ((_CODES.fullmatch(name), token_id) for name, token_id in special_ids.items())
    return {next(filter(None, match.groups())): token_id for match, token_id in matches if match}


def read_post_processor(backend: tokenizers.Tokenizer, special_ids: Mapping[str, int]) -> PostProcessor:
    """Read the file's post-processor; a language in it marks the position of any language."""
    prefix_ids, suffix_ids = _backend_sides(backend)
    languages = language_codes(special_ids)
    code = next((token_id for token_id in prefix_ids + suffix_ids if token_id in languages.values()), None)
    if code is not None:
        prefix_ids, suffix_ids = (
            tuple(LANGUAGE_PLACEHOLDER if i == code else i for i in token_ids) for token_ids in (prefix_ids, suffix_ids)
        )
    state = None if backend.post_processor is None else json.loads(backend.post_processor.__getstate__())
    return PostProcessor(prefix_ids, suffix_ids, languages, code, () if state is None else _pair_template(state))


def _pair_template(processor: dict[str, Any]) -> tuple[tuple[int, int], ...]:
    """Return the template of two texts (``PostProcessor.pair``), () if the file has none."""
    match processor["type"]:
        case "Sequence":
            return next(filter(None, map(_pair_template, reversed(processor["processors"]))), ())
        case "BertProcessing":
            cls, sep = processor["cls"][1], processor["sep"][1]
            return (cls, 0), (FIRST_TEXT, 0), (sep, 0), (SECOND_TEXT, 1), (sep, 1)
        case "RobertaProcessing":
            cls, sep = processor["cls"][1], processor["sep"][1]
            return tuple((item, 0) for item in (cls, FIRST_TEXT, sep, sep, SECOND_TEXT, sep))
        case "TemplateProcessing":
            tokens, texts = processor["special_tokens"], {"A": FIRST_TEXT, "B": SECOND_TEXT}
            template: list[tuple[int, int]] = []
            for piece in processor["pair"]:
                ((kind, value),) = piece.items()
                ids = [texts[value["id"]]] if kind == "Sequence" else tokens[value["id"]]["ids"]
                template += ((token_id, value["type_id"]) for token_id in ids)
            return tuple(template)
    return ()


def _backend_sides(backend: tokenizers.Tokenizer) -> Sides:
    processor = backend.post_processor
    return ((), ()) if processor is None else _sides(json.loads(processor.__getstate__()))


def _sides(processor: dict[str, Any]) -> Sides:
    processor_type = processor["type"]
    if processor_type == "ByteLevel":  # changes offsets only
        return (), ()
    if processor_type == "Sequence":
        children = [_sides(child) for child in processor["processors"]]
        prefix_ids = tuple(token_id for token_ids, _ in reversed(children) for token_id in token_ids)
        return prefix_ids, tuple(token_id for _, token_ids in children for token_id in token_ids)
    if processor_type in ("BertProcessing", "RobertaProcessing"):
        return (processor["cls"][1],), (processor["sep"][1],)
    if processor_type != "TemplateProcessing":
        raise TokenizerError(f"unknown post-processor {processor_type}")
    pieces, tokens = processor["single"], processor["special_tokens"]
    texts = [index for index, piece in enumerate(pieces) if "Sequence" in piece]
    if len(texts) != 1:
        raise TokenizerError(f"the post-processor's template contains the text {len(texts)} times")
    sides = pieces[: texts[0]], pieces[texts[0] + 1 :]
    prefix_ids, suffix_ids = (
        tuple(i for piece in side for i in tokens[piece["SpecialToken"]["id"]]["ids"]) for side in sides
    )
    return prefix_ids, suffix_ids


def write_post_processor(backend: tokenizers.Tokenizer, post_processor: PostProcessor) -> None:
    """Store a post-processor with its default language, unless the backend already has it."""
    from tokenizers.processors import TemplateProcessing  # type: ignore[import-untyped]

    prefix_ids, suffix_ids = post_processor.filled(post_processor.language)
    if _backend_sides(backend) == (prefix_ids, suffix_ids):
        return
    names = {token_id: backend.id_to_token(token_id) for token_id in prefix_ids + suffix_ids}
    template = [*(f"{names[i]}:0" for i in prefix_ids), "$A:0", *(f"{names[i]}:0" for i in suffix_ids)]
    backend.post_processor = TemplateProcessing(
        single=template, pair=[*template, "$B:1"], special_tokens=[(name, token_id) for token_id, name in names.items()]
    )


def configure_post_processor(
    post_processor: PostProcessor, settings: TokenizerSettings, ids: Mapping[str, int | None]
) -> PostProcessor:
    """Apply the tokenizer's class and its ``add_bos_token``, ``add_eos_token`` and ``src_lang``.

    ``ids``: role -> id. Raises TokenizerError for an unknown ``src_lang``.
    """
    if (with_language := _with_language(post_processor, settings, ids.get("eos"))) is not None:
        return with_language
    is_bos_family = settings.family in _OPENS_WITH_BOS
    add_bos = settings.flag("add_bos_token", True if is_bos_family else None)
    add_eos = settings.flag("add_eos_token", False if is_bos_family else None)
    prefix_ids = _with_end(post_processor.prefix_ids, ids.get("bos"), add_bos, index=0)
    suffix_ids = _with_end(post_processor.suffix_ids, ids.get("eos"), add_eos, index=len(post_processor.suffix_ids))
    return replace(post_processor, prefix_ids=prefix_ids, suffix_ids=suffix_ids)


def _with_language(post_processor: PostProcessor, settings: TokenizerSettings, eos: int | None) -> PostProcessor | None:
    """Return the post-processor of a class with language tokens; None for others."""
    leading_default, trailing_default = _LANGUAGE_FIRST.get(settings.family), _LANGUAGE_LAST.get(settings.family)
    if settings.family == "Nllb" and settings.flag("legacy_behaviour"):
        leading_default, trailing_default = None, leading_default
    default_code, requested_language = leading_default or trailing_default, settings.text("src_lang")
    if default_code is None or eos is None or not post_processor.languages:
        return None
    code = post_processor.languages.get((requested_language or default_code).strip("_"))
    if code is None and requested_language is not None:
        hint = suggest(requested_language, post_processor.languages)
        raise TokenizerError(f"{CONFIG_NAME}: unknown src_lang {requested_language!r}", hint)
    if code is None:
        return None
    sides: Sides = ((LANGUAGE_PLACEHOLDER,), (eos,)) if leading_default else ((), (eos, LANGUAGE_PLACEHOLDER))
    return PostProcessor(*sides, post_processor.languages, code)


def _with_end(token_ids: tuple[int, ...], end_id: int | None, add: bool | None, *, index: int) -> tuple[int, ...]:
    if end_id is None or add is None or add == (end_id in token_ids):
        return token_ids
    if add:
        return (*token_ids[:index], end_id, *token_ids[index:])
    return tuple(token_id for token_id in token_ids if token_id != end_id)
