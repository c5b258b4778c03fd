"""SentencePiece models: their pieces, and text to pieces.

A model file is a protocol buffer (``sentencepiece_model.proto`` of google/sentencepiece). A few fields are read here,
because the package does not expose them: pieces = 1 (piece = 1, type = 3), trainer_spec = 2 (model_type = 3),
normalizer_spec = 3 (add_dummy_prefix = 3, remove_extra_whitespaces = 4).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Literal

from kvad.errors import TokenizerError

if TYPE_CHECKING:
    import sentencepiece

_KINDS = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
_USER_DEFINED, _CONTROL = 4, 3
_NO_PREFIX = b"\x1a\x02\x18\x00"  # normalizer_spec { add_dummy_prefix: false }; appended, it is merged into the first


class SentencePieceModel:
    """One SentencePiece model: its pieces, and text to pieces.

    ``leading``: spaces that decoding drops at the start of a text: all, the one that was prepended, or none.

    Args:
        name: Name for messages.
        content: Bytes of the file; TokenizerError if it is not a SentencePiece model.
    """

    def __init__(self, name: str, content: bytes) -> None:
        self.name, self.content = name, content
        try:
            self._fields = list(_fields(content))
            self.kind, has_dummy_prefix, strips_whitespace = _specs(self._fields)
        except (ValueError, IndexError, KeyError):
            raise _not_a_model(name, content) from None
        self.leading: Literal["all", "one", "none"] = (
            "all" if strips_whitespace else "one" if has_dummy_prefix else "none"
        )
        self._processor = self._load_processor(content)
        ids = list(range(self._processor.get_piece_size()))
        self.pieces: list[str] = self._processor.id_to_piece(ids)
        self.controls = frozenset(self._select(self._processor.is_control(ids)))
        self.bytes = {piece: bytes.fromhex(piece[3:5]) for piece in self._select(self._processor.is_byte(ids))}

    def _select(self, flags: list[bool]) -> Iterator[str]:
        return (piece for piece, flag in zip(self.pieces, flags, strict=True) if flag)

    def _load_processor(self, content: bytes) -> sentencepiece.SentencePieceProcessor:
        try:
            import sentencepiece
        except ImportError:
            raise TokenizerError(
                f"reading {self.name} requires the sentencepiece package", "Run pip install kvad[sentencepiece]."
            ) from None
        processor = sentencepiece.SentencePieceProcessor()
        try:
            processor.load_from_serialized_proto(content)
        except RuntimeError as error:
            raise _not_a_model(self.name, content) from error
        return processor

    def prepare(self, special: Collection[str], *, prefix: bool) -> None:
        """Adapt the model before the first split.

        Text never spells a ``special`` token, and without ``prefix`` no space is prepended to a text.
        """
        if (
            any(field_number == 1 and _is_spelled(payload, special) for field_number, payload, _ in self._fields)
            or not prefix
        ):
            content = b"".join(
                _as_control(payload, field_bytes)
                if field_number == 1 and _is_spelled(payload, special)
                else field_bytes
                for field_number, payload, field_bytes in self._fields
            )
            self._processor = self._load_processor(content + (b"" if prefix else _NO_PREFIX))
        self._fields = []  # drop what is almost a copy of the file

    def split(self, text: str) -> list[str]:
        """Return the pieces of a text; unknown text remains as written."""
        pieces: list[str] = self._processor.encode(text, out_type=str)
        return pieces


def _not_a_model(name: str, content: bytes) -> TokenizerError:
    if content.startswith(b"version https://git-lfs"):
        return TokenizerError(f"{name} is a Git LFS pointer, not the file itself", "Run git lfs pull.")
    return TokenizerError(
        f"{name} is not a SentencePiece model ({len(content):,} bytes)", "Check that the download is complete."
    )


# ---------------------------------------------------------------- protocol buffers


def _fields(message: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield (number, payload, whole field) of each protocol buffer field; a number's payload is its varint.

    Raises ValueError, IndexError or KeyError for invalid bytes.
    """
    offset = 0
    while offset < len(message):
        start = offset
        tag, offset = _varint(message, offset)
        wire_type = tag & 7
        if wire_type == 2:
            length, offset = _varint(message, offset)
        elif wire_type == 0:
            length = _varint(message, offset)[1] - offset
        else:
            length = {1: 8, 5: 4}[wire_type]
        if offset + length > len(message):
            raise ValueError("truncated message")
        yield tag >> 3, message[offset : offset + length], message[start : offset + length]
        offset += length


def _varint(message: bytes, offset: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[offset]
        value |= (byte & 0x7F) << shift
        offset, shift = offset + 1, shift + 7
        if byte < 0x80:
            return value, offset
        if shift > 63:
            raise ValueError("not a varint")


def _specs(fields: list[tuple[int, bytes, bytes]]) -> tuple[str, bool, bool]:
    """Return (kind, add_dummy_prefix, remove_extra_whitespaces); the last value counts."""
    trainer = {1: b"\x01", **_merged(fields, 2)}
    normalizer = {3: b"\x01", 4: b"\x01", **_merged(fields, 3)}
    if not any(field_number == 1 for field_number, _, _ in fields):
        raise ValueError("no pieces")
    kind = _KINDS[_varint(trainer.get(3, b"\x01"), 0)[0]]
    return kind, bool(_varint(normalizer[3], 0)[0]), bool(_varint(normalizer[4], 0)[0])


def _merged(fields: list[tuple[int, bytes, bytes]], field_number: int) -> dict[int, bytes]:
    matches = (payload for field, payload, _ in fields if field == field_number)
    return {subfields: value for payload in matches for subfields, value, _ in _fields(payload)}


def _is_spelled(payload: bytes, special: Collection[str]) -> bool:
    """True if a piece is a user-defined special token, which would be matched in any text."""
    if b"\x18\x04" not in payload:
        return False
    subfields = {field_number: value for field_number, value, _ in _fields(payload)}
    return subfields.get(3) == bytes([_USER_DEFINED]) and subfields.get(1, b"").decode("utf-8", "replace") in special


def _as_control(payload: bytes, field_bytes: bytes) -> bytes:
    """Return a piece's field with type CONTROL: the piece has an id but no spelling."""
    payload += bytes([0x18, _CONTROL])
    length, digits = len(payload), b""
    while length > 0x7F:
        digits += bytes([length & 0x7F | 0x80])
        length >>= 7
    return field_bytes[:1] + digits + bytes([length]) + payload
