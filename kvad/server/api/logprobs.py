"""Log-probabilities in the formats of the completions and the chat API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvad.engine.scheduling import TokenLogprob
from kvad.text import Detokenizer, Tokenizer


class TokenTexts:
    """Texts of tokens; a token that is no whole text is ``bytes:\\xe2\\x80`` (as in OpenAI's API).

    A token of the model that the tokenizer does not have is ``token_id:300``, and adds nothing to a text.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __call__(self, token: int) -> str:
        text = self._known.get(token)
        if text is None:
            text = self._known[token] = self._text(token)
        return text

    def _text(self, token: int) -> str:
        data = self.bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def bytes(self, token: int) -> bytes:
        if self._tokenizer is None or not self.is_known(token):
            return f"token_id:{token}".encode()
        return self._tokenizer.token_bytes(token) or self._tokenizer.token_text(token).encode()

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, with special ones; "" without a tokenizer."""
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode([token for token in tokens if self.is_known(token)], skip_specials=False)

    def is_known(self, token: int) -> bool:
        """Return True if the tokenizer has the token."""
        return self._tokenizer is not None and token < self._tokenizer.vocab_size

    def detokenizer(self, *, skip_specials: bool) -> Detokenizer | None:
        """Return a decoder of one text."""
        return None if self._tokenizer is None else Detokenizer(self._tokenizer, skip_specials=skip_specials)


class CompletionLogprobs:
    """Collects the ``logprobs`` object of a completion's choice: parallel lists over its tokens.

    Args:
        texts: Texts of tokens.
        is_text: The prompt is a text, which has no special tokens; those of token ids are echoed.
    """

    def __init__(self, texts: TokenTexts, *, is_text: bool) -> None:
        self._texts, self._offset = texts, 0
        self._prompt, self._sample = texts.detokenizer(skip_specials=is_text), texts.detokenizer(skip_specials=True)

    def take(
        self, tokens: Sequence[int], scores: Sequence[TokenLogprob | None], num_prompt_tokens: int = 0
    ) -> dict[str, Any]:
        """Return the object of further tokens; a token without a score (the first of a prompt) has null."""
        offsets = self._offsets(self._prompt, tokens[:num_prompt_tokens])
        if num_prompt_tokens and self._prompt is not None:
            self._offset += len(self._prompt.flush())
        offsets += self._offsets(self._sample, tokens[num_prompt_tokens:])
        return {
            "tokens": [self._texts(token) for token in tokens],
            "token_logprobs": [None if score is None else score.logprob for score in scores],
            "top_logprobs": [None if score is None else self._alternatives(score) for score in scores],
            "text_offset": offsets,
        }

    def _offsets(self, detokenizer: Detokenizer | None, tokens: Sequence[int]) -> list[int]:
        """Return where each token begins in the text; a character of several tokens begins with its first byte."""
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            if detokenizer is not None and self._texts.is_known(token):
                self._offset += len(detokenizer.push(token))
        return offsets

    def _alternatives(self, score: TokenLogprob) -> dict[str, float]:
        """Return the best tokens and the chosen one; of tokens with the same text the best one."""
        values: dict[str, float] = {}
        for token, value in (*score.top_logprobs, (score.token_id, score.logprob)):
            values.setdefault(self._texts(token), value)
        return values


def chat_logprobs(texts: TokenTexts, scores: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return the ``logprobs`` object of a chat choice."""
    return {
        "content": [
            {
                **_entry(texts, score.token_id, score.logprob),
                "top_logprobs": [_entry(texts, token, value) for token, value in score.top_logprobs],
            }
            for score in scores
        ],
        "refusal": None,
    }


def _entry(texts: TokenTexts, token: int, logprob: float) -> dict[str, Any]:
    return {"token": texts(token), "logprob": logprob, "bytes": list(texts.bytes(token))}
