"""Tokenizers of SentencePiece models.

T5, Llama, Gemma, XLM-R, XGLM, mBART, NLLB, M2M100, Marian.

Ids are those of transformers' slow tokenizers, text is SentencePiece's: no space is added around a special token, and
nothing at the end of a text is stripped, because a stream has shown it already. Special tokens are parsed from text
only with ``specials=True``, Marian's ``>>fra<<`` included. A saved tokenizer is one ``tokenizer.json`` that contains
the models: ``{"kvad": {"kind": "sentencepiece", ...}}``. Needs the extra ``kvad[sentencepiece]``.
"""

from __future__ import annotations

import base64
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvad.errors import TokenizerError
from kvad.text.base import BaseTokenizer, check_on_unknown, check_text, out_of_range_error
from kvad.text.hf_config import SPECIAL_ROLES, AddedToken, TokenizerSettings, read_vocabulary
from kvad.text.hf_tokenizer import find_specials
from kvad.text.post_processor import LANGUAGE_PLACEHOLDER, PostProcessor, configure_post_processor, language_codes
from kvad.text.sentencepiece_families import TOKENIZER_FAMILIES, TokenizerFamily, VocabularyBuilder
from kvad.text.sentencepiece_model import SentencePieceModel

SUFFIXES = (".model", ".spm")
_NON_LEGACY_FAMILIES = ("Llama", "T5")  # with ``legacy: false``, one space, before the whole text only
_SPACE = "▁"


@dataclass(frozen=True)
class SentencePieceFiles:
    """Contents of a tokenizer: models and vocabularies by file name."""

    settings: TokenizerSettings
    models: Mapping[str, bytes]
    vocabularies: Mapping[str, Mapping[str, int]]

    def to_content(self) -> dict[str, Any]:
        return {
            "kind": "sentencepiece",
            "settings": self.settings.to_dict(),
            "models": {name: base64.b64encode(content).decode("ascii") for name, content in self.models.items()},
            "vocabularies": dict(self.vocabularies),
        }

    @classmethod
    def from_content(cls, content: Mapping[str, Any]) -> SentencePieceFiles:
        models = {name: base64.b64decode(text, validate=True) for name, text in content["models"].items()}
        return cls(TokenizerSettings.from_dict(content["settings"]), models, content["vocabularies"])


class SentencePieceTokenizer(BaseTokenizer):
    """One side of a family's tokenizer; Marian's target side owns its source side.

    ``paths``: files of the models, for messages.
    """

    units = "piece of text", "pieces of text"
    source_tokenizer: SentencePieceTokenizer | None

    def __init__(
        self,
        files: SentencePieceFiles,
        paths: Mapping[str, Path] = MappingProxyType({}),
        *,
        on_unknown: str = "warn",
        source_side: bool = False,
    ) -> None:
        self.on_unknown = check_on_unknown(on_unknown)
        self._files, settings = files, files.settings
        family = TOKENIZER_FAMILIES[settings.family]
        name = family.models[0 if source_side else -1]
        self._model = SentencePieceModel(str(paths.get(name, name)), files.models[name])
        self.kind = self._model.kind
        self._vocabulary = _build_vocabulary(family, self._model, files, source_side=source_side)
        self.vocab_size = len(self._vocabulary.names)
        special_ids = self._vocabulary.special
        default_roles = {role: family.roles.get(role) for role in SPECIAL_ROLES if role != "separator"}
        roles = {
            role: name if name in special_ids else None for role, name in {**default_roles, **settings.roles}.items()
        }
        self.special_tokens = find_specials(special_ids, roles)
        self.languages: Mapping[str, int] = language_codes(special_ids)
        self._post_processor = self._build_post_processor(family)
        self._special_ids = frozenset(special_ids.values())
        self._ids = _ordinary_pieces(self._vocabulary)
        self._is_non_legacy = settings.family in _NON_LEGACY_FAMILIES and settings.flag("legacy", True) is False
        self._splitters = {
            specials: _AddedTokenSplitter(self._vocabulary, specials=specials) for specials in (False, True)
        }
        self._model.prepare(special_ids, prefix=not self._is_non_legacy)
        self.source_tokenizer = None
        if len(family.models) > 1 and not source_side:
            self.source_tokenizer = SentencePieceTokenizer(files, paths, on_unknown=on_unknown, source_side=True)

    @classmethod
    def from_content(cls, content: Mapping[str, Any], on_unknown: str = "warn") -> SentencePieceTokenizer:
        try:
            files = SentencePieceFiles.from_content(content)
            family = TOKENIZER_FAMILIES[files.settings.family]
            field_bytes = set(family.models) <= set(files.models) and family.vocabulary <= bool(files.vocabularies)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise TokenizerError("not a SentencePiece tokenizer saved by kvad", "Copy the file again.") from error
        if not field_bytes:
            raise TokenizerError("a model or a vocabulary is missing", "Copy the file again.")
        return cls(files, on_unknown=on_unknown)

    def _build_post_processor(self, family: TokenizerFamily) -> PostProcessor:
        ids: dict[str, int | None] = vars(self.special_tokens)
        prefix_and_suffix = [
            tuple(i for i in ({**ids, "language": LANGUAGE_PLACEHOLDER}[role] for role in side_roles) if i is not None)
            for side_roles in (family.prefix_tokens, family.suffix_tokens)
        ]
        return configure_post_processor(
            PostProcessor(prefix_and_suffix[0], prefix_and_suffix[1], self.languages), self._files.settings, ids
        )

    # ------------------------------------------------------------ text -> ids

    def _encode(self, text: str, specials: bool, unknown: Counter[str]) -> list[int]:
        check_text(text)
        if self._is_non_legacy and text:
            prefix = _SPACE if self._files.settings.flag("add_prefix_space", True) else ""
            text = prefix + text.replace(_SPACE, " ")
        tokens: list[str | int] = []  # pieces of ordinary text, ids of added tokens
        splitter = self._splitters[specials]
        for part in splitter.split(text):
            matches = splitter.ids.get(part)
            if matches is not None:
                tokens.append(matches)
            else:
                tokens += self._split_pieces(part, specials)
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
            return self.special_tokens.unk or 0  # without UNK, report_unknown raises
        return token_id

    def add_special_tokens(self, ids: Sequence[int], *, language: str | None = None) -> list[int]:
        return self._post_processor.apply(ids, language)

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
        if not 0 <= token_id < self.vocab_size:
            raise out_of_range_error(token_id, self.vocab_size)
        name = self._vocabulary.names[token_id]
        if name in self._vocabulary.flags or token_id in self._special_ids:
            return name.encode()
        return self._model.bytes.get(name) or name.replace(_SPACE, " ").encode()

    def token_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._special_ids else self._display_bytes(token_id)

    # ------------------------------------------------------------ files

    @cached_property
    def _file_text(self) -> str:
        return json.dumps({"kvad": self._files.to_content()}, ensure_ascii=False, indent=1) + "\n"


def _build_vocabulary(
    family: TokenizerFamily, model: SentencePieceModel, files: SentencePieceFiles, *, source_side: bool
) -> VocabularyBuilder:
    """Build the family's numbering, with the folder's added and special tokens."""
    names = [*files.vocabularies]
    vocabulary = files.vocabularies[names[0 if source_side else -1]] if names else {}
    builder = family.layout(model.pieces, vocabulary, files.settings)
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


def _ordinary_pieces(builder: VocabularyBuilder) -> dict[str, int]:
    """Return piece -> id for ordinary text; of equal pieces the first counts."""
    ids = {name: token_id for token_id, name in reversed([*enumerate(builder.names)]) if name}
    for name in builder.special:
        ids.pop(name, None)
    return ids


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


def load_sentencepiece(
    folder: Path,
    settings: TokenizerSettings,
    file: Path | None = None,
    *,
    roles: Mapping[str, str | None] | None = None,
    on_unknown: str = "warn",
) -> SentencePieceTokenizer:
    """Load the tokenizer of a folder with SentencePiece models, or of the model ``file``."""
    settings = replace(settings, family=_tokenizer_family(folder, settings, file))
    family = TOKENIZER_FAMILIES[settings.family]
    paths = [folder / name for name in family.models]
    if file is not None and len(paths) == 1:
        paths = [file]
    models = {name: _read_bytes(path) for name, path in zip(family.models, paths, strict=True)}
    vocabularies = {}
    if family.vocabulary:
        names = ["vocab.json", "target_vocab.json"] if settings.flag("separate_vocabs") else ["vocab.json"]
        vocabularies = {name: read_vocabulary(folder / name) for name in names}
    if roles is not None:
        settings = replace(settings, roles=roles)
    path_by_name = dict(zip(family.models, paths, strict=True))
    tokenizer = SentencePieceTokenizer(
        SentencePieceFiles(settings, models, vocabularies), path_by_name, on_unknown=on_unknown
    )
    for role, name in (roles or {}).items():
        if name is not None and name not in tokenizer.special_tokens.names():
            raise TokenizerError(
                f"{folder}: the {role} token {name!r} is not among the special tokens",
                ", ".join(tokenizer.special_tokens.names()),
            )
    return tokenizer


def _tokenizer_family(folder: Path, settings: TokenizerSettings, file: Path | None) -> str:
    if settings.family in TOKENIZER_FAMILIES:
        return settings.family
    names = {path.name for path in folder.iterdir()} if file is None else {file.name}
    if settings.family in ("", "PreTrained"):
        if {"source.spm", "target.spm"} & names:
            return "Marian"
        for name, family in (("spiece.model", "T5"), ("tokenizer.model", "Llama")):
            if name in names:
                return family
    class_description = (
        f"the class {settings.family}Tokenizer" if settings.family else "a tokenizer_config.json without a class"
    )
    matches = ", ".join(sorted(name for name in names if Path(name).suffix in SUFFIXES))
    raise TokenizerError(
        f"{folder}: {matches} cannot be read with {class_description}", f"known: {', '.join(TOKENIZER_FAMILIES)}"
    )


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        matches = (
            ", ".join(sorted(other.name for other in path.parent.iterdir())) if path.parent.is_dir() else "nothing"
        )
        raise TokenizerError(f"there is no {path.name} in {path.parent}", f"The folder contains {matches}.") from None
    except OSError as error:
        raise TokenizerError(f"cannot read {path}: {error.strerror}") from error
