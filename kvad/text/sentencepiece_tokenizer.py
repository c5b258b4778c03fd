"""Tokenizers of SentencePiece models: T5, Llama, Gemma, XLM-R, XGLM, mBART, NLLB, M2M100, Marian.

Ids are those of transformers' slow tokenizers, text is SentencePiece's: no space is added around a special token, and
nothing at the end of a text is stripped, because a stream has shown it already. Special tokens are parsed from text
only with ``specials=True``, Marian's ``>>fra<<`` included. A saved tokenizer is one ``tokenizer.json`` that contains
the models: ``{"kvad": {"kind": "sentencepiece", ...}}``. Needs the package ``sentencepiece``.

A model file is a protocol buffer (``sentencepiece_model.proto`` of google/sentencepiece). A few fields are read here,
because the package does not expose them: pieces = 1 (piece = 1, type = 3), trainer_spec = 2 (model_type = 3),
normalizer_spec = 3 (add_dummy_prefix = 3, remove_extra_whitespaces = 4).
"""

from __future__ import annotations

import base64
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from kvad import storage
from kvad.errors import TokenizerError
from kvad.text.base import LANGUAGE_PLACEHOLDER, PostProcessor, Tokenizer, check_token_id
from kvad.text.hf_config import SPECIAL_ROLES, AddedToken, TokenizerSettings, read_vocabulary
from kvad.text.hf_tokenizer import find_specials
from kvad.text.post_processor import configure_post_processor, language_codes
from kvad.text.sentencepiece_families import TOKENIZER_FAMILIES, TokenizerFamily, VocabularyBuilder

if TYPE_CHECKING:
    import sentencepiece

SUFFIXES = (".model", ".spm")
_FAMILY_OF_MODEL = {
    "source.spm": "Marian", "target.spm": "Marian", "spiece.model": "T5", "tokenizer.model": "Llama"
}  # fmt: skip
_NON_LEGACY_FAMILIES = ("Llama", "T5")  # with ``legacy: false``, one space, before the whole text only
_SPACE = "▁"
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
        self.name = name
        try:
            self._fields = list(_fields(content))
            self.kind, self.leading = _kind_and_leading(self._fields)
        except (ValueError, IndexError, KeyError):
            raise _not_a_model(name, content) from None
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
            message = f"reading {self.name} requires the sentencepiece package"
            raise TokenizerError(message, "Run pip install sentencepiece.") from None
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
        spelled = [number == 1 and _is_spelled(payload, special) for number, payload, _ in self._fields]
        if any(spelled) or not prefix:
            content = b"".join(
                _as_control(payload, field_bytes) if is_spelled else field_bytes
                for is_spelled, (_, payload, field_bytes) in zip(spelled, self._fields, strict=True)
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
    message = f"{name} is not a SentencePiece model ({len(content):,} bytes)"
    return TokenizerError(message, "Check that the download is complete.")


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


def _kind_and_leading(fields: list[tuple[int, bytes, bytes]]) -> tuple[str, Literal["all", "one", "none"]]:
    """Return the kind of model, and the spaces that decoding drops; of repeated settings the last counts."""
    specs = {(2, 3): b"\x01", (3, 3): b"\x01", (3, 4): b"\x01"}  # (field, inner field) -> value, true by default
    for number, payload, _ in fields:
        if number in (2, 3):
            specs |= {(number, inner): value for inner, value, _ in _fields(payload)}
    if not any(number == 1 for number, _, _ in fields):
        raise ValueError("no pieces")
    kind, has_dummy_prefix, strips_whitespace = (_varint(specs[key], 0)[0] for key in ((2, 3), (3, 3), (3, 4)))
    return _KINDS[kind], "all" if strips_whitespace else "one" if has_dummy_prefix else "none"


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


# ---------------------------------------------------------------- the tokenizer


@dataclass(frozen=True)
class SentencePieceFiles:
    """Contents of a tokenizer: models and vocabularies by file name."""

    settings: TokenizerSettings
    models: Mapping[str, bytes]
    vocabularies: Mapping[str, Mapping[str, int]]


class SentencePieceTokenizer(Tokenizer):
    """One side of a family's tokenizer; Marian's target side owns its source side.

    ``paths``: files of the models, for messages.
    """

    def __init__(
        self, files: SentencePieceFiles, paths: Mapping[str, Path] = MappingProxyType({}), *, source_side: bool = False
    ) -> None:
        self._files, settings = files, files.settings
        family = TOKENIZER_FAMILIES[settings.family]
        name = family.models[0 if source_side else -1]
        self._model = SentencePieceModel(str(paths.get(name, name)), files.models[name])
        self.kind = self._model.kind
        self._vocabulary = _build_vocabulary(family, self._model, files, source_side=source_side)
        self.vocab_size = len(self._vocabulary.names)
        special_ids = self._vocabulary.special
        default_roles = {role: family.roles.get(role) for role in SPECIAL_ROLES if role != "separator"}
        roles = {**default_roles, **settings.roles}
        present_roles = {role: name if name in special_ids else None for role, name in roles.items()}
        self.special_tokens = find_specials(special_ids, present_roles)
        self._post_processor = self._build_post_processor(family)
        pieces = reversed([*enumerate(self._vocabulary.names)])  # of equal pieces the first one counts
        self._ids = {name: token_id for token_id, name in pieces if name and name not in special_ids}
        self._is_non_legacy = settings.family in _NON_LEGACY_FAMILIES and settings.flag("legacy", True) is False
        self._splitters = {
            specials: _AddedTokenSplitter(self._vocabulary, specials=specials) for specials in (False, True)
        }
        self._model.prepare(special_ids, prefix=not self._is_non_legacy)
        if len(family.models) > 1 and not source_side:
            self.source_tokenizer = SentencePieceTokenizer(files, paths, source_side=True)

    @classmethod
    def from_content(cls, content: Mapping[str, Any]) -> SentencePieceTokenizer:
        try:
            models = {name: base64.b64decode(text, validate=True) for name, text in content["models"].items()}
            settings = TokenizerSettings.from_dict(content["settings"])
            files = SentencePieceFiles(settings, models, content["vocabularies"])
            family = TOKENIZER_FAMILIES[settings.family]
            is_complete = set(family.models) <= set(models) and family.vocabulary <= bool(files.vocabularies)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise TokenizerError("not a SentencePiece tokenizer saved by kvad", "Copy the file again.") from error
        if not is_complete:
            raise TokenizerError("a model or a vocabulary is missing", "Copy the file again.")
        return cls(files)

    def _build_post_processor(self, family: TokenizerFamily) -> PostProcessor:
        ids: dict[str, int | None] = vars(self.special_tokens)
        prefix_ids, suffix_ids = (
            tuple(i for i in ({**ids, "language": LANGUAGE_PLACEHOLDER}[role] for role in side_roles) if i is not None)
            for side_roles in (family.prefix_tokens, family.suffix_tokens)
        )
        post_processor = PostProcessor(prefix_ids, suffix_ids, language_codes(self._vocabulary.special))
        return configure_post_processor(post_processor, self._files.settings, ids)

    # ------------------------------------------------------------ text -> ids

    def _encode(self, text: str, specials: bool, unknown: Counter[str]) -> list[int]:
        if self._is_non_legacy and text:
            prefix = _SPACE if self._files.settings.flag("add_prefix_space", True) else ""
            text = prefix + text.replace(_SPACE, " ")
        tokens: list[str | int] = []  # pieces of ordinary text, ids of added tokens
        splitter = self._splitters[specials]
        for part in splitter.split(text):
            added_id = splitter.ids.get(part)
            tokens += self._split_pieces(part, specials) if added_id is None else [added_id]
        if self._is_non_legacy and len(tokens) > 1 and tokens[0] == _SPACE and tokens[1] in self._special_ids:
            del tokens[0]
        return [token if isinstance(token, int) else self._piece_to_id(token, unknown) for token in tokens]

    def _split_pieces(self, part: str, specials: bool) -> list[str | int]:
        if self._is_non_legacy and part.startswith((_SPACE, " ")):
            unk_text, num_pieces = self._unk_pieces  # SentencePiece would strip a leading space
            return [*self._model.split(unk_text + part)[num_pieces:]]
        if specials and self._files.settings.family == "Marian" and part.startswith(">>") and "<<" in part:
            end = part.index("<<") + 2  # an unknown language is UNK like any unknown piece
            return [self._vocabulary.special.get(part[:end], part[:end]), *self._model.split(part[end:])]
        return [*self._model.split(part)]

    @cached_property
    def _unk_pieces(self) -> tuple[str, int]:
        """The unknown token, and the number of pieces it is split into."""
        unk_text = next((name for name, i in self.special_tokens.named if i == self.special_tokens.unk), "<unk>")
        return unk_text, len(self._model.split(unk_text))

    def _piece_to_id(self, piece: str, unknown: Counter[str]) -> int:
        token_id = self._ids.get(piece)
        if token_id is None:
            unknown[piece.replace(_SPACE, " ").strip() or " "] += 1
            return self.special_tokens.unk or 0  # without UNK, _report_unknown raises
        return token_id

    # ------------------------------------------------------------ ids -> text

    def incremental_decoder(self, *, skip_specials: bool = True) -> Callable[[int], bytes]:
        leading = self._model.leading

        def add(token_id: int) -> bytes:
            nonlocal leading
            special = token_id in self._special_ids
            if special and skip_specials:
                return b""
            piece = self._display_bytes(token_id)
            if leading == "none" or not piece:
                return piece
            if special:
                leading = "none"
            elif leading == "one":
                leading, piece = "none", piece.removeprefix(b" ")
            else:
                piece = piece.lstrip(b" ")
                leading = "none" if piece else "all"
            return piece

        return add

    def _display_bytes(self, token_id: int) -> bytes:
        check_token_id(token_id, self.vocab_size)
        name = self._vocabulary.names[token_id]
        if name in self._vocabulary.flags or token_id in self._special_ids:
            return name.encode()
        return self._model.bytes.get(name) or name.replace(_SPACE, " ").encode()

    # ------------------------------------------------------------ files

    @cached_property
    def file_text(self) -> str:
        files = self._files
        content = {
            "kind": "sentencepiece",
            "settings": asdict(files.settings),
            "models": {name: base64.b64encode(content).decode("ascii") for name, content in files.models.items()},
            "vocabularies": dict(files.vocabularies),
        }
        return json.dumps({"kvad": content}, ensure_ascii=False, indent=1) + "\n"


def _build_vocabulary(
    family: TokenizerFamily, model: SentencePieceModel, files: SentencePieceFiles, *, source_side: bool
) -> VocabularyBuilder:
    """Build the family's numbering, with the folder's added and special tokens."""
    names = [*files.vocabularies]
    if family.vocabulary:
        builder = VocabularyBuilder.from_ids(files.vocabularies[names[0 if source_side else -1]])
    else:
        builder = VocabularyBuilder([*model.pieces])
    family.number(builder, files.settings)
    for token_id, token in sorted(files.settings.added.items()):
        builder.add(token, token_id)
    ids = {name: token_id for token_id, name in reversed([*enumerate(builder.names)])}
    marked_tokens = {token.content: token for token in files.settings.marked}
    default_roles = {name: AddedToken(name) for name in (*family.roles.values(), *model.controls)}
    for name, token in {**default_roles, **marked_tokens}.items():
        if name in ids:
            builder.add(builder.flags.get(name, token), ids[name])
            builder.special[name] = ids[name]
    return builder


class _AddedTokenSplitter:
    """Splits added tokens from a text, longest first, like transformers' ``tokenize``."""

    def __init__(self, builder: VocabularyBuilder, *, specials: bool) -> None:
        self._flags = {name: token for name, token in builder.flags.items() if specials or not token.special}
        added_ids = {name: token_id for token_id, name in enumerate(builder.names) if name in self._flags}
        self.ids = {**added_ids, **{name: i for name, i in builder.special.items() if name in self._flags}}
        names = sorted(self._flags, key=len, reverse=True)
        self._pattern = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None

    def split(self, text: str) -> list[str]:
        if self._pattern is None:
            return [text] if text else []
        parts = [part for part in self._pattern.split(text) if part]
        for i, part in enumerate(parts):
            token = self._flags.get(part)
            if token is None:
                continue
            left = parts[i - 1] if i > 0 else ""
            right = parts[i + 1] if i + 1 < len(parts) else ""
            if token.rstrip and right:
                parts[i + 1] = right.lstrip()
            if token.lstrip and left:
                parts[i - 1] = left.rstrip()
            if token.single_word and left and left[-1] != " ":
                parts[i - 1], parts[i] = parts[i - 1] + part, ""
            elif token.single_word and right and right[0] != " ":
                parts[i + 1], parts[i] = part + parts[i + 1], ""
        return [part for part in parts if part]


# ---------------------------------------------------------------- folders


def is_sentencepiece(folder: Path, settings: TokenizerSettings) -> bool:
    """True if the folder's class is a SentencePiece family, or it has only a model file."""
    if settings.family in TOKENIZER_FAMILIES:
        return True
    has_older_vocabulary = (folder / "merges.txt").is_file() or (folder / "vocab.txt").is_file()
    return not has_older_vocabulary and any(path.suffix in SUFFIXES for path in folder.iterdir() if path.is_file())


def load_sentencepiece(folder: Path, settings: TokenizerSettings, file: Path | None = None) -> SentencePieceTokenizer:
    """Load the tokenizer of a folder with SentencePiece models, or of the model ``file``."""
    settings = replace(settings, family=_tokenizer_family(folder, settings, file))
    family = TOKENIZER_FAMILIES[settings.family]
    paths = {name: folder / name for name in family.models}
    if file is not None and len(paths) == 1:
        paths = dict.fromkeys(paths, file)
    models = {name: _read_bytes(path) for name, path in paths.items()}
    vocabularies = {}
    if family.vocabulary:
        names = ["vocab.json", "target_vocab.json"] if settings.flag("separate_vocabs") else ["vocab.json"]
        vocabularies = {name: read_vocabulary(folder / name) for name in names}
    return SentencePieceTokenizer(SentencePieceFiles(settings, models, vocabularies), paths)


def _tokenizer_family(folder: Path, settings: TokenizerSettings, file: Path | None) -> str:
    if settings.family in TOKENIZER_FAMILIES:
        return settings.family
    names = {path.name for path in folder.iterdir()} if file is None else {file.name}
    if settings.family in ("", "PreTrained"):
        for name, family in _FAMILY_OF_MODEL.items():
            if name in names:
                return family
    owner = f"the class {settings.family}Tokenizer" if settings.family else "a tokenizer_config.json without a class"
    models = ", ".join(sorted(name for name in names if Path(name).suffix in SUFFIXES))
    raise TokenizerError(f"{folder}: {models} cannot be read with {owner}", f"known: {', '.join(TOKENIZER_FAMILIES)}")


def _read_bytes(path: Path) -> bytes:
    try:
        return storage.filesystem.read_bytes(path)
    except FileNotFoundError:
        names = sorted(other.name for other in path.parent.iterdir()) if path.parent.is_dir() else ["nothing"]
        hint = f"The folder contains {', '.join(names)}."
        raise TokenizerError(f"there is no {path.name} in {path.parent}", hint) from None
    except OSError as error:
        raise TokenizerError(f"cannot read {path}: {error.strerror}") from error
