"""Log-probabilities in the formats of the completions and the chat API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvad.engine.scheduling import TokenLogprob
from kvad.text import Tokenizer


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
        if self._tokenizer is None or token >= self._tokenizer.vocab_size:
            return f"token_id:{token}".encode()
        return self._tokenizer.token_bytes(token) or self._tokenizer.token_text(token).encode()

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, with special ones; "" without a tokenizer."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            return ""
        return tokenizer.decode([token for token in tokens if token < tokenizer.vocab_size], skip_specials=False)


class CompletionLogprobs:
    """Collects the ``logprobs`` object of a completion's choice: parallel lists over its tokens."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts, self._offset = texts, 0

    def take(self, tokens: Sequence[int], scores: Sequence[TokenLogprob | None]) -> dict[str, Any]:
        """Return the object of further tokens; a token without a score (the first of a prompt) has null."""
        names = [self._texts(token) for token in tokens]
        offsets = []
        for name in names:
            offsets.append(self._offset)
            self._offset += len(name)
        return {
            "tokens": names,
            "token_logprobs": [None if score is None else score.logprob for score in scores],
            "top_logprobs": [None if score is None else self._alternatives(score) for score in scores],
            "text_offset": offsets,
        }

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
