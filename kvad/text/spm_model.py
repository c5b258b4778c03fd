"""One SentencePiece model: its file, the pieces in it, and text to pieces.  Needs the extra ``kvad[sentencepiece]``.

The file is a protocol buffer (``sentencepiece_model.proto`` of google/sentencepiece), of which a few fields are read
here because the package does not tell them: pieces = 1 (piece = 1, type = 3), trainer_spec = 2 (model_type = 3),
normalizer_spec = 3 (add_dummy_prefix = 3, remove_extra_whitespaces = 4).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Literal

from kvad.errors import TokenizerError

if TYPE_CHECKING:
    import sentencepiece

__all__ = ["SentencePieceModel"]

_KINDS = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
_USER_DEFINED, _CONTROL = 4, 3
_NO_PREFIX = b"\x1a\x02\x18\x00"  # normalizer_spec { add_dummy_prefix: false }: appended, it is merged into the first


class SentencePieceModel:
    """``content``: the file's bytes; ``name`` is for messages.  Raises TokenizerError for a file of another kind.

    ``leading``: which spaces ``decode`` drops at the start of a text: all of them, the one put before it, or none.
    """

    def __init__(self, name: str, content: bytes) -> None:
        self.name, self.content = name, content
        try:
            self._fields = list(_fields(content))
            self.kind, prefixed, stripped = _specs(self._fields)
        except (ValueError, IndexError, KeyError):
            raise _not_a_model(name, content) from None
        self.leading: Literal["all", "one", "none"] = "all" if stripped else "one" if prefixed else "none"
        self._processor = self._load_processor(content)
        ids = list(range(self._processor.get_piece_size()))
        self.pieces: list[str] = self._processor.id_to_piece(ids)
        self.controls = frozenset(self._chosen(self._processor.is_control(ids)))
        self.bytes = {piece: bytes.fromhex(piece[3:5]) for piece in self._chosen(self._processor.is_byte(ids))}

    def _chosen(self, flags: list[bool]) -> Iterator[str]:
        return (piece for piece, flag in zip(self.pieces, flags, strict=True) if flag)

    def _load_processor(self, content: bytes) -> sentencepiece.SentencePieceProcessor:
        try:
            import sentencepiece
        except ImportError:
            raise TokenizerError(
                f"reading {self.name} needs the sentencepiece package", "pip install kvad[sentencepiece]"
            ) from None
        processor = sentencepiece.SentencePieceProcessor()
        try:
            processor.load_from_serialized_proto(content)
        except RuntimeError as error:
            raise _not_a_model(self.name, content) from error
        return processor

    def prepare(self, special: Collection[str], *, prefix: bool) -> None:
        """Before the first cut: no text spells a special token; without ``prefix``, no space is put before a text."""
        if any(number == 1 and _is_spelled(payload, special) for number, payload, _ in self._fields) or not prefix:
            content = b"".join(
                _as_control(payload, whole) if number == 1 and _is_spelled(payload, special) else whole
                for number, payload, whole in self._fields
            )
            self._processor = self._load_processor(content + (b"" if prefix else _NO_PREFIX))
        self._fields = []  # a copy of the file, by and large

    def split(self, text: str) -> list[str]:
        """The pieces of a text; what no piece spells stays as it is written."""
        pieces: list[str] = self._processor.encode(text, out_type=str)
        return pieces


def _not_a_model(name: str, content: bytes) -> TokenizerError:
    if content.startswith(b"version https://git-lfs"):
        return TokenizerError(f"{name} is a Git LFS pointer, not the file itself", "git lfs pull")
    return TokenizerError(f"{name} is not a SentencePiece model ({len(content):,} bytes)", "is the download whole?")


# ---------------------------------------------------------------- protocol buffers


def _fields(message: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """(number, payload, whole field) of each field; a number's payload is its varint.

    Raises ValueError, IndexError or KeyError for bytes that are no message.
    """
    at = 0
    while at < len(message):
        start = at
        key, at = _varint(message, at)
        wire = key & 7
        if wire == 2:
            length, at = _varint(message, at)
        elif wire == 0:
            length = _varint(message, at)[1] - at
        else:
            length = {1: 8, 5: 4}[wire]
        if at + length > len(message):
            raise ValueError("cut off")
        yield key >> 3, message[at : at + length], message[start : at + length]
        at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise ValueError("not a varint")


def _specs(fields: list[tuple[int, bytes, bytes]]) -> tuple[str, bool, bool]:
    """(kind, add_dummy_prefix, remove_extra_whitespaces); the last value of a field holds."""
    trainer = {1: b"\x01", **_merged(fields, 2)}
    normalizer = {3: b"\x01", 4: b"\x01", **_merged(fields, 3)}
    if not any(number == 1 for number, _, _ in fields):
        raise ValueError("no pieces")
    kind = _KINDS[_varint(trainer.get(3, b"\x01"), 0)[0]]
    return kind, bool(_varint(normalizer[3], 0)[0]), bool(_varint(normalizer[4], 0)[0])


def _merged(fields: list[tuple[int, bytes, bytes]], number: int) -> dict[int, bytes]:
    found = (payload for field, payload, _ in fields if field == number)
    return {inner: value for payload in found for inner, value, _ in _fields(payload)}


def _is_spelled(payload: bytes, special: Collection[str]) -> bool:
    """Whether a piece is one of the special tokens and user-defined: those are found in any text."""
    if b"\x18\x04" not in payload:
        return False
    inner = {number: value for number, value, _ in _fields(payload)}
    return inner.get(3) == bytes([_USER_DEFINED]) and inner.get(1, b"").decode("utf-8", "replace") in special


def _as_control(payload: bytes, whole: bytes) -> bytes:
    """The field of a piece, with its type made CONTROL: such a piece has an id and no spelling."""
    payload += bytes([0x18, _CONTROL])
    length, digits = len(payload), b""
    while length > 0x7F:
        digits += bytes([length & 0x7F | 0x80])
        length >>= 7
    return whole[:1] + digits + bytes([length]) + payload
