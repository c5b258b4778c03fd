"""Texts as a model wants them: a decoder's prompts, an encoder-decoder's sources and targets, an encoder's rows.

A tokenizer knows its own frame (``[CLS] x [SEP]``, ``<s> x``); a checkpoint knows where targets begin
(:class:`Generation`).  Here the two meet, and lengths and ids are checked before anything is queued.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvad.checkpoint.generation import GenerationConfig
from kvad.config import ModelConfig
from kvad.errors import RequestError, suggest
from kvad.text.tokenizer import Tokenizer

__all__ = ["PromptInput", "PromptEncoder", "normalize_prompts"]

PromptInput = str | Sequence[int]


@dataclass(frozen=True)
class PromptEncoder:
    """``tokenizer`` None: ids only."""

    config: ModelConfig
    tokenizer: Tokenizer | None
    generation: GenerationConfig
    endless: bool = False

    def encode_prompt(self, prompt: PromptInput, *, whole: bool = False) -> list[int]:
        """What a decoder continues; an empty text becomes the token that opens every text.  It may be as long as rows
        may; ``whole``: as the model sees at once."""
        tokens = self._ids(prompt, self.tokenizer, None)
        if not tokens:
            opening = self._opening()
            if opening is None:
                raise RequestError("the prompt is empty and this model has no opening token", "give at least one token")
            return [opening]
        _check(
            tokens,
            "prompt",
            self.config.vocab_size,
            len(tokens) if self.endless and not whole else self.config.max_seq_len,
        )
        return tokens

    def encode_continuation(self, text: PromptInput) -> list[int]:
        """What is added to a text that has begun: as it is spelled, without what opens a text."""
        tokens = self._encoder(self.tokenizer).encode(text) if text and isinstance(text, str) else _integers(text or ())
        _check(tokens, "text", self.config.vocab_size, len(tokens))
        return tokens

    def encode_source(self, text: PromptInput, language: str | None = None, *, specials: bool = False) -> list[int]:
        """What an encoder reads, in its frame; ids are taken as they are.  ``specials``: special tokens that the text
        spells (``[MASK]``) are read as such."""
        source, tokenizer = self.config.encoder_input, self.tokenizer
        if tokenizer is not None and tokenizer.source_tokenizer is not None:
            tokenizer = tokenizer.source_tokenizer
        if language is not None and not isinstance(text, str):
            raise RequestError(f"language {language!r}: the source is ids, taken as they are", "give a text")
        tokens = self._ids(text, tokenizer, language, specials)
        if isinstance(text, str):
            tokens = self.generation.with_source_eos(tokens)
        if not tokens:
            raise RequestError("the text is empty: an encoder reads at least one token")
        vocab = self.config.vocab_size if source is None or source.vocab_size is None else source.vocab_size
        _check(tokens, "source", vocab, self.config.max_seq_len if source is None else source.max_seq_len)
        return tokens

    def encode_target(self, prefix: PromptInput | None, first: int | None = None) -> list[int]:
        """How the target begins: the token that opens it, and a prefix forced on it, behind the token ``first`` (of a
        language, say).  Ids are the whole start."""
        if prefix is not None and not isinstance(prefix, str):
            tokens = _integers(prefix)
        else:
            start = self.generation.decoder_start_token_id
            if start is None:
                start = self.generation.bos_token_id if self.generation.bos_token_id is not None else self._opening()
            if start is None:
                raise RequestError("this checkpoint does not say how a target begins", "give prefix= as token ids")
            tokens = [start]
            if prefix:
                tokens += [] if first is None else [first]
                tokens += self._encoder(self.tokenizer).encode(prefix)
        _check(tokens, "target", self.config.vocab_size, self.config.max_seq_len)
        return tokens

    def language_token(self, code: str) -> int:
        """The id with which targets in this language begin."""
        known = {} if self.tokenizer is None else self.tokenizer.languages
        if code not in known:
            raise RequestError(f"unknown language {code!r}", suggest(code, known) if known else "this model has none")
        return known[code]

    def _opening(self) -> int | None:
        specials = None if self.tokenizer is None else self.tokenizer.special_tokens
        if specials is not None and specials.separator is not None:
            return specials.separator
        return (
            self.generation.bos_token_id
            if self.generation.bos_token_id is not None
            else specials.bos
            if specials
            else None
        )

    def _ids(
        self, text: PromptInput, tokenizer: Tokenizer | None, language: str | None, specials: bool = False
    ) -> list[int]:
        if not isinstance(text, str):
            return _integers(text)
        encoder = self._encoder(tokenizer)
        ids = encoder.encode(text, specials=specials)
        return encoder.add_special_tokens(ids, language=language) if ids else []

    def _encoder(self, tokenizer: Tokenizer | None) -> Tokenizer:
        if tokenizer is None:
            raise RequestError("this model came without a tokenizer", "give token ids")
        return tokenizer


def _check(tokens: Sequence[int], what: str, vocab: int, limit: int) -> None:
    for token in tokens:
        if not 0 <= token < vocab:
            raise RequestError(f"{what}: token id {token} is outside the vocabulary of {vocab}")
    if len(tokens) > limit:
        raise RequestError(f"the {what} has {len(tokens)} tokens and the model's limit is {limit}", "shorten it")


def normalize_prompts(prompts: Any) -> tuple[bool, list[Any]]:
    """(whether it is one prompt, the prompts): a text, ids (a tensor or an array too), or a list of either.

    An empty list is one empty prompt.
    """
    if isinstance(prompts, str):
        return True, [prompts]
    items = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if not isinstance(items, Iterable):
        raise RequestError(f"prompt: expected text or token ids, found {prompts!r}", "give 'text', [1, 2] or a list")
    items = list(items)
    one = not items or (not isinstance(items[0], (str, Sequence)) and not hasattr(items[0], "tolist"))
    return one, [items] if one else items


def _integers(prompt: Any) -> list[int]:
    """Token ids as plain integers; RequestError for what is none."""
    try:
        return [operator.index(token) for token in (prompt.tolist() if hasattr(prompt, "tolist") else prompt)]
    except TypeError as error:
        raise RequestError(f"prompt: expected text or token ids: {error}") from None
