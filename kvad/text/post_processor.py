"""What a tokenizer puts around one text: ``[CLS] x [SEP]``, ``x </s>``, and where the code of a language goes.

``encode`` adds nothing by itself; ``frame`` adds what the model was trained with.  A :class:`Frame` is two short rows
of ids, in which :data:`LANGUAGE` stands for the language's code:

    mBART     () x (</s>, LANGUAGE)        frame([7], "de_DE") == [7, 2, 250003]
    NLLB      (LANGUAGE,) x (</s>,)        frame([7], "deu_Latn") == [256042, 7, 2]

A library tokenizer keeps its frame in the file's post-processor, where one language is written out: the default.
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
_OPENS_WITH_BOS = ("CodeLlama", "Cohere", "Gemma", "Llama")  # where add_bos_token is not said
_LANGUAGE_FIRST = {"M2M100": "en", "MBart50": "en_XX", "Nllb": "eng_Latn"}  # [lang] x </s>, and the default language
_LANGUAGE_LAST = {"MBart": "en_XX"}  # x </s> [lang]
_CODES = re.compile(r"(?P<plain>[a-z]{2,3}_[A-Z][A-Za-z]{1,3})|__(?P<m2m>[a-z]{2,3})__|>>(?P<marian>[^<>]+)<<")


@dataclass(frozen=True)
class PostProcessor:
    """Ids before and after a text; ``languages``: code -> id; ``language``: the id used where none is asked for."""

    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()
    languages: Mapping[str, int] = field(default_factory=dict)
    language: int | None = None

    def apply(self, ids: Sequence[int], language: str | None = None) -> list[int]:
        """Raises TokenizerError for a language that the tokenizer does not know, or has no place for."""
        code = self.language if language is None else self._code(language)
        return [*self._filled(self.prefix_ids, code), *ids, *self._filled(self.suffix_ids, code)]

    def _code(self, language: str) -> int:
        if LANGUAGE_PLACEHOLDER not in self.prefix_ids + self.suffix_ids:
            raise TokenizerError(f"language {language!r}: this tokenizer's texts carry no language")
        code = self.languages.get(language.strip("_<>"))  # "de", "__de__" and ">>de<<" are one
        if code is None:
            raise TokenizerError(f"unknown language {language!r}", suggest(language, self.languages))
        return code

    @staticmethod
    def _filled(side: tuple[int, ...], code: int | None) -> list[int]:
        found = (code if token_id == LANGUAGE_PLACEHOLDER else token_id for token_id in side)
        return [token_id for token_id in found if token_id is not None]


def language_codes(named: Mapping[str, int]) -> dict[str, int]:
    """The special tokens that are languages, by their code: ``{"__de__": 7}`` -> ``{"de": 7}``."""
    found = ((_CODES.fullmatch(name), token_id) for name, token_id in named.items())
    return {next(filter(None, match.groups())): token_id for match, token_id in found if match}


def read_post_processor(backend: tokenizers.Tokenizer, named: Mapping[str, int]) -> PostProcessor:
    """The frame that the file's post-processor describes; a language in it marks the place of any language."""
    before, after = _sides(
        None if backend.post_processor is None else json.loads(backend.post_processor.__getstate__())
    )
    languages = language_codes(named)
    code = next((token_id for token_id in before + after if token_id in languages.values()), None)
    if code is None:
        return PostProcessor(before, after, languages)
    before, after = (tuple(LANGUAGE_PLACEHOLDER if i == code else i for i in side) for side in (before, after))
    return PostProcessor(before, after, languages, code)


def _sides(processor: dict[str, Any] | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    kind = None if processor is None else processor["type"]
    if processor is None or kind == "ByteLevel":  # moves offsets, adds nothing
        return (), ()
    if kind == "Sequence":
        inner = [_sides(child) for child in processor["processors"]]
        before = tuple(token_id for side, _ in reversed(inner) for token_id in side)
        return before, tuple(token_id for _, side in inner for token_id in side)
    if kind in ("BertProcessing", "RobertaProcessing"):
        return (processor["cls"][1],), (processor["sep"][1],)
    if kind == "TemplateProcessing":
        return _template_sides(processor)
    raise TokenizerError(f"unknown post-processor {kind}")


def _template_sides(processor: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    sides: tuple[list[int], list[int]] = ([], [])
    texts = 0
    for piece in processor["single"]:
        if "Sequence" in piece:
            texts += 1
        else:
            sides[min(texts, 1)].extend(processor["special_tokens"][piece["SpecialToken"]["id"]]["ids"])
    if texts != 1:
        raise TokenizerError(f"the post-processor's template holds the text {texts} times")
    return tuple(sides[0]), tuple(sides[1])


def write_post_processor(backend: tokenizers.Tokenizer, frame: PostProcessor) -> None:
    """Put a frame into the post-processor, with its default language; nothing is written where it says so already."""
    from tokenizers.processors import TemplateProcessing  # type: ignore[import-untyped]

    before, after = (
        tuple(PostProcessor._filled(side, frame.language)) for side in (frame.prefix_ids, frame.suffix_ids)
    )
    if _sides(None if backend.post_processor is None else json.loads(backend.post_processor.__getstate__())) == (
        before,
        after,
    ):
        return
    names = {token_id: backend.id_to_token(token_id) for token_id in before + after}
    template = [*(f"{names[i]}:0" for i in before), "$A:0", *(f"{names[i]}:0" for i in after)]
    backend.post_processor = TemplateProcessing(
        single=template, pair=[*template, "$B:1"], special_tokens=[(name, token_id) for token_id, name in names.items()]
    )


# ---------------------------------------------------------------- what a Hugging Face folder says of it


def configure_post_processor(
    frame: PostProcessor, settings: TokenizerSettings, ids: Mapping[str, int | None]
) -> PostProcessor:
    """The frame as the tokenizer's class and its ``add_bos_token``, ``add_eos_token`` and ``src_lang`` have it.

    ``ids``: role -> id.  Raises TokenizerError for a ``src_lang`` that is none of the languages.
    """
    return _with_language(frame, settings, ids.get("eos")) or _with_ends(frame, settings, ids)


def _with_language(frame: PostProcessor, settings: TokenizerSettings, eos: int | None) -> PostProcessor | None:
    """The frame of a class that marks its texts' language; None: of another class, or a vocabulary without it."""
    first, last = _LANGUAGE_FIRST.get(settings.family), _LANGUAGE_LAST.get(settings.family)
    if settings.family == "Nllb" and settings.flag("legacy_behaviour"):
        first, last = None, first
    default, named = first or last, settings.text("src_lang")
    if default is None or eos is None or not frame.languages:
        return None
    code = frame.languages.get((named or default).strip("_"))
    if code is None and named is not None:
        raise TokenizerError(f"{CONFIG_NAME}: unknown src_lang {named!r}", suggest(named, frame.languages))
    if code is None:
        return None
    return PostProcessor(
        (LANGUAGE_PLACEHOLDER,) if first else (),
        (eos,) if first else (eos, LANGUAGE_PLACEHOLDER),
        frame.languages,
        code,
    )


def _with_ends(frame: PostProcessor, settings: TokenizerSettings, ids: Mapping[str, int | None]) -> PostProcessor:
    """BOS and EOS put in or taken out."""
    by_class = settings.family in _OPENS_WITH_BOS
    add_bos = settings.flag("add_bos_token", True if by_class else None)
    add_eos = settings.flag("add_eos_token", False if by_class else None)
    before = _with_end(frame.prefix_ids, ids.get("bos"), add_bos, at=0)
    after = _with_end(frame.suffix_ids, ids.get("eos"), add_eos, at=len(frame.suffix_ids))
    return PostProcessor(before, after, frame.languages, frame.language)


def _with_end(side: tuple[int, ...], end: int | None, add: bool | None, *, at: int) -> tuple[int, ...]:
    if end is None or add is None or add == (end in side):
        return side
    return (*side[:at], end, *side[at:]) if add else tuple(token_id for token_id in side if token_id != end)
