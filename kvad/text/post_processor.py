"""Post-processor: special tokens around one text, and language codes.

``encode`` adds nothing; ``add_special_tokens`` adds what the model was trained with. A ``PostProcessor`` has two
short rows of ids, in which ``LANGUAGE_PLACEHOLDER`` is replaced by the language's code:

    mBART     () x (</s>, LANGUAGE)        add_special_tokens([7], "de_DE") == [7, 2, 250003]
    NLLB      (LANGUAGE,) x (</s>,)        add_special_tokens([7], "deu_Latn") == [256042, 7, 2]

A library tokenizer stores it in its file's post-processor, with the default language filled in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvad.errors import TokenizerError, suggest
from kvad.text.hf_config import CONFIG_NAME, TokenizerSettings

if TYPE_CHECKING:
    import tokenizers  # type: ignore[import-untyped]

LANGUAGE_PLACEHOLDER = -1
_OPENS_WITH_BOS = ("CodeLlama", "Cohere", "Gemma", "Llama")  # if add_bos_token is missing
_LANGUAGE_FIRST = {"M2M100": "en", "MBart50": "en_XX", "Nllb": "eng_Latn"}  # [lang] x </s>, and the default language
_LANGUAGE_LAST = {"MBart": "en_XX"}  # x </s> [lang]
_CODES = re.compile(r"(?P<plain>[a-z]{2,3}_[A-Z][A-Za-z]{1,3})|__(?P<m2m>[a-z]{2,3})__|>>(?P<marian>[^<>]+)<<")


@dataclass(frozen=True)
class PostProcessor:
    """Ids before and after a text; ``languages``: code -> id; ``language``: default id."""

    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()
    languages: Mapping[str, int] = field(default_factory=dict)
    language: int | None = None

    def apply(self, ids: Sequence[int], language: str | None = None) -> list[int]:
        """Return ``ids`` with special tokens; raise TokenizerError for an unsupported language."""
        code = self.language if language is None else self._code(language)
        return [*self._fill_language(self.prefix_ids, code), *ids, *self._fill_language(self.suffix_ids, code)]

    def _code(self, language: str) -> int:
        if LANGUAGE_PLACEHOLDER not in self.prefix_ids + self.suffix_ids:
            raise TokenizerError(f"language {language!r}: this tokenizer has no language tokens")
        code = self.languages.get(language.strip("_<>"))  # "de", "__de__" and ">>de<<" are equal
        if code is None:
            raise TokenizerError(f"unknown language {language!r}", suggest(language, self.languages))
        return code

    @staticmethod
    def _fill_language(token_ids: tuple[int, ...], code: int | None) -> list[int]:
        matches = (code if token_id == LANGUAGE_PLACEHOLDER else token_id for token_id in token_ids)
        return [token_id for token_id in matches if token_id is not None]


def language_codes(special_ids: Mapping[str, int]) -> dict[str, int]:
    """Return the special tokens that are languages by code: ``{"__de__": 7}`` -> ``{"de": 7}``."""
    matches = ((_CODES.fullmatch(name), token_id) for name, token_id in special_ids.items())
    return {next(filter(None, match.groups())): token_id for match, token_id in matches if match}


def read_post_processor(backend: tokenizers.Tokenizer, special_ids: Mapping[str, int]) -> PostProcessor:
    """Read the file's post-processor; a language in it marks the position of any language."""
    prefix_ids, suffix_ids = _sides(
        None if backend.post_processor is None else json.loads(backend.post_processor.__getstate__())
    )
    languages = language_codes(special_ids)
    code = next((token_id for token_id in prefix_ids + suffix_ids if token_id in languages.values()), None)
    if code is None:
        return PostProcessor(prefix_ids, suffix_ids, languages)
    prefix_ids, suffix_ids = (
        tuple(LANGUAGE_PLACEHOLDER if i == code else i for i in token_ids) for token_ids in (prefix_ids, suffix_ids)
    )
    return PostProcessor(prefix_ids, suffix_ids, languages, code)


def _sides(processor: dict[str, Any] | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    processor_type = None if processor is None else processor["type"]
    if processor is None or processor_type == "ByteLevel":  # changes offsets only
        return (), ()
    if processor_type == "Sequence":
        children = [_sides(child) for child in processor["processors"]]
        prefix_ids = tuple(token_id for token_ids, _ in reversed(children) for token_id in token_ids)
        return prefix_ids, tuple(token_id for _, token_ids in children for token_id in token_ids)
    if processor_type in ("BertProcessing", "RobertaProcessing"):
        return (processor["cls"][1],), (processor["sep"][1],)
    if processor_type == "TemplateProcessing":
        return _template_sides(processor)
    raise TokenizerError(f"unknown post-processor {processor_type}")


def _template_sides(processor: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    both_sides: tuple[list[int], list[int]] = ([], [])
    num_texts = 0
    for piece in processor["single"]:
        if "Sequence" in piece:
            num_texts += 1
        else:
            both_sides[min(num_texts, 1)].extend(processor["special_tokens"][piece["SpecialToken"]["id"]]["ids"])
    if num_texts != 1:
        raise TokenizerError(f"the post-processor's template contains the text {num_texts} times")
    return tuple(both_sides[0]), tuple(both_sides[1])


def write_post_processor(backend: tokenizers.Tokenizer, post_processor: PostProcessor) -> None:
    """Store a post-processor with its default language, unless the backend already has it."""
    from tokenizers.processors import TemplateProcessing  # type: ignore[import-untyped]

    prefix_ids, suffix_ids = (
        tuple(PostProcessor._fill_language(token_ids, post_processor.language))
        for token_ids in (post_processor.prefix_ids, post_processor.suffix_ids)
    )
    if _sides(None if backend.post_processor is None else json.loads(backend.post_processor.__getstate__())) == (
        prefix_ids,
        suffix_ids,
    ):
        return
    names = {token_id: backend.id_to_token(token_id) for token_id in prefix_ids + suffix_ids}
    template = [*(f"{names[i]}:0" for i in prefix_ids), "$A:0", *(f"{names[i]}:0" for i in suffix_ids)]
    backend.post_processor = TemplateProcessing(
        single=template, pair=[*template, "$B:1"], special_tokens=[(name, token_id) for token_id, name in names.items()]
    )


# ---------------------------------------------------------------- settings of a Hugging Face folder


def configure_post_processor(
    post_processor: PostProcessor, settings: TokenizerSettings, ids: Mapping[str, int | None]
) -> PostProcessor:
    """Apply the tokenizer's class and its ``add_bos_token``, ``add_eos_token`` and ``src_lang``.

    ``ids``: role -> id. Raises TokenizerError for an unknown ``src_lang``.
    """
    return _with_language(post_processor, settings, ids.get("eos")) or _with_ends(post_processor, settings, ids)


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
        raise TokenizerError(
            f"{CONFIG_NAME}: unknown src_lang {requested_language!r}",
            suggest(requested_language, post_processor.languages),
        )
    if code is None:
        return None
    return PostProcessor(
        (LANGUAGE_PLACEHOLDER,) if leading_default else (),
        (eos,) if leading_default else (eos, LANGUAGE_PLACEHOLDER),
        post_processor.languages,
        code,
    )


def _with_ends(
    post_processor: PostProcessor, settings: TokenizerSettings, ids: Mapping[str, int | None]
) -> PostProcessor:
    """Add or remove BOS and EOS."""
    is_bos_family = settings.family in _OPENS_WITH_BOS
    add_bos = settings.flag("add_bos_token", True if is_bos_family else None)
    add_eos = settings.flag("add_eos_token", False if is_bos_family else None)
    prefix_ids = _with_end(post_processor.prefix_ids, ids.get("bos"), add_bos, index=0)
    suffix_ids = _with_end(post_processor.suffix_ids, ids.get("eos"), add_eos, index=len(post_processor.suffix_ids))
    return PostProcessor(prefix_ids, suffix_ids, post_processor.languages, post_processor.language)


def _with_end(token_ids: tuple[int, ...], end_id: int | None, add: bool | None, *, index: int) -> tuple[int, ...]:
    if end_id is None or add is None or add == (end_id in token_ids):
        return token_ids
    return (
        (*token_ids[:index], end_id, *token_ids[index:])
        if add
        else tuple(token_id for token_id in token_ids if token_id != end_id)
    )
