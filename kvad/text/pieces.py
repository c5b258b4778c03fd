"""The bytes of each token of a ``tokenizers`` library tokenizer, so that ids become text one by one.

Three schemes are known: byte level (GPT-2's alphabet of 256 printable characters), SentencePiece (``▁`` for a space,
``<0xE3>`` for a byte) and WordPiece (``##``).  In the last two a token that opens a text is written without its leading
space: hence ``first`` and ``rest``.  The library's decoder says what a token looks like, asked once per token; bytes
are ours, because text cannot hold half a character.  A decoder that must look ahead or back is refused by name.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvad.errors import TokenizerError
from kvad.text.base import out_of_range_error

if TYPE_CHECKING:
    import tokenizers  # type: ignore[import-untyped]

__all__ = ["TokenBytes", "byte_alphabet", "flatten_components"]

_STEPWISE = {"ByteLevel", "Metaspace", "WordPiece", "Replace", "ByteFallback", "Fuse", "Strip"}
_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """``first[id]`` and ``rest[id]``: the bytes that a token adds at the start of a text and inside it."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._added = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()}
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        steps = flatten_components(backend.decoder)
        types = [step["type"] for step in steps]
        self.byte_level = types == ["ByteLevel"]
        self._byte_fallback = "ByteFallback" in types
        refused = [type_ for type_ in types if type_ not in _STEPWISE]
        if refused or ("ByteLevel" in types and not self.byte_level) or any(step.get("stop") for step in steps):
            raise TokenizerError(f"the decoder {' + '.join(refused or types)} cannot decode token by token")
        self.rest = _DecodeCache(self._inside)
        self.first = self.rest if self.byte_level else _DecodeCache(self._opening)

    def _token(self, token_id: int) -> str:
        if not 0 <= token_id < self.vocab_size:
            raise out_of_range_error(token_id, self.vocab_size)
        return self._backend.id_to_token(int(token_id)) or ""

    def is_unused(self, token_id: int) -> bool:
        """Whether the numbering leaves this id out: then it is no token, and says nothing."""
        return self._backend.id_to_token(int(token_id)) is None

    def _inside(self, token_id: int) -> bytes:
        token = self._token(token_id)
        if self.byte_level:
            return token.encode() if token_id in self._added else _from_alphabet(token)
        byte = self._fallback(token)
        return self._decoded(["a", token])[1:].encode() if byte is None and token else byte or b""

    def _opening(self, token_id: int) -> bytes:
        token = self._token(token_id)
        byte = self._fallback(token)
        if byte is None or byte == b" ":  # a space by its byte is stripped from the start like any other
            return self._decoded([token]).encode()
        return byte

    def _fallback(self, token: str) -> bytes | None:
        match = _FALLBACK.fullmatch(token) if self._byte_fallback else None
        return bytes.fromhex(match[1]) if match else None

    def _decoded(self, tokens: list[str]) -> str:
        decoder = self._backend.decoder
        text: str = decoder.decode(tokens) if decoder is not None else " ".join(tokens)
        return text

    def missing_bytes(self) -> frozenset[int]:
        """Byte values that a byte-level vocabulary has no token for, and that the library would drop in silence."""
        if not self.byte_level or getattr(self._backend.model, "unk_token", None) is not None:
            return frozenset()
        alphabet = byte_alphabet()
        return frozenset(alphabet[char] for char in alphabet if self._backend.token_to_id(char) is None)


class _DecodeCache(dict[int, bytes]):
    """Computed when first asked for: a vocabulary of 250,000 costs nothing until it is used."""

    def __init__(self, compute: Callable[[int], bytes]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, token_id: int) -> bytes:
        piece = self[token_id] = self._compute(token_id)
        return piece


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the byte values: themselves where printable, else 256 and up in order.

    Source: ``bytes_to_unicode`` in openai/gpt-2, ``encoder.py``.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + i): value for i, value in enumerate(others)}


def _from_alphabet(token: str) -> bytes:
    alphabet = byte_alphabet()
    try:
        return bytes([alphabet[char] for char in token])
    except KeyError:  # not of this alphabet, so it stands for itself
        return token.encode()


def flatten_components(component: Any) -> list[dict[str, Any]]:
    """What a normalizer, pre-tokenizer or decoder of the library is made of, sequences flattened: [{"type": ...}]."""

    def flat(state: dict[str, Any]) -> list[dict[str, Any]]:
        inner = next((state[key] for key in ("decoders", "pretokenizers", "normalizers") if key in state), None)
        return [state] if inner is None else [part for child in inner for part in flat(child)]

    return [] if component is None else flat(json.loads(component.__getstate__()))
