"""Tokenizers of SentencePiece models.

T5, Llama, Gemma, XLM-R, XGLM, mBART, NLLB, M2M100, Marian.

Ids are those of transformers' slow tokenizers, text is SentencePiece's: no space is added around a special token, and
nothing at the end of a text is stripped, because a stream has shown it already. Special tokens are parsed from text
only with ``specials=True``, Marian's ``>>fra<<`` included. A saved tokenizer is one ``tokenizer.json`` that contains
the models: ``{"kvad": {"kind": "sentencepiece", ...}}``. Needs the extra ``kvad[sentencepiece]``.

A model file is a protocol buffer (``sentencepiece_model.proto`` of google/sentencepiece). A few fields are read here,
because the package does not expose them: pieces = 1 (piece = 1, type = 3), trainer_spec = 2 (model_type = 3),
normalizer_spec = 3 (add_dummy_prefix = 3, remove_extra_whitespaces = 4).

A model numbers its pieces from 0; a family may shift them (fairseq: ``<s> <pad> </s> <unk>`` first, so a piece's id is
its number + 1) or look them up in a ``vocab.json``, and appends sentinels, languages and a mask. Each rule is that of
transformers' slow tokenizer of the same name.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from kvad.errors import TokenizerError
from kvad.text.base import FILE_NAME, BaseTokenizer, check_on_unknown, check_text, out_of_range_error, write_text
from kvad.text.hf_config import SPECIAL_ROLES, AddedToken, TokenizerSettings, read_vocabulary
from kvad.text.hf_tokenizer import find_specials
from kvad.text.post_processor import LANGUAGE_PLACEHOLDER, PostProcessor, configure_post_processor, language_codes

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
    """Yield (number, payload, whole field) of each protocol buffer field.

    A number's payload is its varint.

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
    """Return (kind, add_dummy_prefix, remove_extra_whitespaces).

    The last value of a field counts.
    """
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


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# fmt: off
_MBART = _words("""
    ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV my_MM ne_NP
    nl_XX ro_RO ru_RU si_LK tr_TR vi_VN zh_CN
""")
_MBART50 = _words("""
    af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH mk_MK ml_IN mn_MN mr_IN pl_PL ps_AF pt_XX sv_SE sw_KE
    ta_IN te_IN th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI
""")
_M2M100 = _words("""
    af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi hr ht hu hy
    id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns oc or pa pl ps pt ro ru
    sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh zu
""")
_WMT21 = _words("en ha is ja cs ru zh de")
_NLLB = _words("""
    ace_Arab ace_Latn acm_Arab acq_Arab aeb_Arab afr_Latn ajp_Arab aka_Latn amh_Ethi apc_Arab arb_Arab ars_Arab
    ary_Arab arz_Arab asm_Beng ast_Latn awa_Deva ayr_Latn azb_Arab azj_Latn bak_Cyrl bam_Latn ban_Latn bel_Cyrl
    bem_Latn ben_Beng bho_Deva bjn_Arab bjn_Latn bod_Tibt bos_Latn bug_Latn bul_Cyrl cat_Latn ceb_Latn ces_Latn
    cjk_Latn ckb_Arab crh_Latn cym_Latn dan_Latn deu_Latn dik_Latn dyu_Latn dzo_Tibt ell_Grek eng_Latn epo_Latn
    est_Latn eus_Latn ewe_Latn fao_Latn pes_Arab fij_Latn fin_Latn fon_Latn fra_Latn fur_Latn fuv_Latn gla_Latn
    gle_Latn glg_Latn grn_Latn guj_Gujr hat_Latn hau_Latn heb_Hebr hin_Deva hne_Deva hrv_Latn hun_Latn hye_Armn
    ibo_Latn ilo_Latn ind_Latn isl_Latn ita_Latn jav_Latn jpn_Jpan kab_Latn kac_Latn kam_Latn kan_Knda kas_Arab
    kas_Deva kat_Geor knc_Arab knc_Latn kaz_Cyrl kbp_Latn kea_Latn khm_Khmr kik_Latn kin_Latn kir_Cyrl kmb_Latn
    kon_Latn kor_Hang kmr_Latn lao_Laoo lvs_Latn lij_Latn lim_Latn lin_Latn lit_Latn lmo_Latn ltg_Latn ltz_Latn
    lua_Latn lug_Latn luo_Latn lus_Latn mag_Deva mai_Deva mal_Mlym mar_Deva min_Latn mkd_Cyrl plt_Latn mlt_Latn
    mni_Beng khk_Cyrl mos_Latn mri_Latn zsm_Latn mya_Mymr nld_Latn nno_Latn nob_Latn npi_Deva nso_Latn nus_Latn
    nya_Latn oci_Latn gaz_Latn ory_Orya pag_Latn pan_Guru pap_Latn pol_Latn por_Latn prs_Arab pbt_Arab quy_Latn
    ron_Latn run_Latn rus_Cyrl sag_Latn san_Deva sat_Beng scn_Latn shn_Mymr sin_Sinh slk_Latn slv_Latn smo_Latn
    sna_Latn snd_Arab som_Latn sot_Latn spa_Latn als_Latn srd_Latn srp_Cyrl ssw_Latn sun_Latn swe_Latn swh_Latn
    szl_Latn tam_Taml tat_Cyrl tel_Telu tgk_Cyrl tgl_Latn tha_Thai tir_Ethi taq_Latn taq_Tfng tpi_Latn tsn_Latn
    tso_Latn tuk_Latn tum_Latn tur_Latn twi_Latn tzm_Tfng uig_Arab ukr_Cyrl umb_Latn urd_Arab uzn_Latn vec_Latn
    vie_Latn war_Latn wol_Latn xho_Latn ydd_Hebr yor_Latn yue_Hant zho_Hans zho_Hant zul_Latn
""")
# fmt: on


@dataclass
class VocabularyBuilder:
    """Vocabulary: ``names``: id -> piece (``""``: unused); ``special``: name -> id.

    ``flags``: added tokens.
    """

    names: list[str]
    special: dict[str, int] = field(default_factory=dict)
    flags: dict[str, AddedToken] = field(default_factory=dict)

    def add(self, token: AddedToken, token_id: int | None = None) -> None:
        """Append a token, or set it at ``token_id``."""
        token_id = len(self.names) if token_id is None else token_id
        self.names += [""] * (token_id + 1 - len(self.names))
        self.names[token_id] = token.content
        self.flags[token.content] = token
        if token.special:
            self.special[token.content] = token_id


VocabularyLayout = Callable[[Sequence[str], Mapping[str, int], TokenizerSettings], VocabularyBuilder]


def _plain(pieces: Sequence[str], _: Mapping[str, int], __: TokenizerSettings) -> VocabularyBuilder:
    return VocabularyBuilder(list(pieces))


def _t5(pieces: Sequence[str], _: Mapping[str, int], settings: TokenizerSettings) -> VocabularyBuilder:
    """Append sentinels; ``<extra_id_0>`` is the last id."""
    builder = VocabularyBuilder(list(pieces))
    for i in reversed(range(settings.number("extra_ids", 100))):
        builder.add(AddedToken(f"<extra_id_{i}>", lstrip=True, rstrip=True))
    return builder


def _fairseq(*trailing_names: str) -> VocabularyLayout:
    """Shift pieces by one (piece 3 is id 4) and append ``trailing_names``."""

    def layout(pieces: Sequence[str], _: Mapping[str, int], __: TokenizerSettings) -> VocabularyBuilder:
        builder = VocabularyBuilder([])
        for name in ("<s>", "<pad>", "</s>", "<unk>"):
            builder.add(AddedToken(name))
        builder.names += pieces[3:]
        for name in trailing_names:
            builder.add(AddedToken(name, lstrip=name == "<mask>"))
        return builder

    return layout


def _vocabulary_from_ids(vocabulary: Mapping[str, int]) -> VocabularyBuilder:
    builder = VocabularyBuilder([""] * (1 + max(vocabulary.values())))
    for name, token_id in vocabulary.items():
        if builder.names[token_id]:
            raise TokenizerError(f"the vocabulary gives id {token_id} to {builder.names[token_id]!r} and to {name!r}")
        builder.names[token_id] = name
    return builder


def _marian(_: Sequence[str], vocabulary: Mapping[str, int], __: TokenizerSettings) -> VocabularyBuilder:
    builder = _vocabulary_from_ids(vocabulary)
    for name, token_id in vocabulary.items():
        if name.startswith(">>") and name.endswith("<<"):
            builder.special[name] = token_id  # recognized at the start of a text only, so not an added token
    return builder


def _m2m100(_: Sequence[str], vocabulary: Mapping[str, int], settings: TokenizerSettings) -> VocabularyBuilder:
    """Append languages; ``__af__`` is the first id after the vocabulary."""
    builder = _vocabulary_from_ids(vocabulary)
    for code in _WMT21 if settings.text("language_codes") == "wmt21" else _M2M100:
        builder.add(AddedToken(f"__{code}__"))
    return builder


@dataclass(frozen=True)
class TokenizerFamily:
    """Rules of one model family.

    ``models``: its files, source before target; ``roles``: role -> name unless a file overrides it (missing roles have
        no
    token); ``prefix_tokens``, ``suffix_tokens``: roles around a text unless ``configure_post_processor`` overrides
    them.
    """

    models: tuple[str, ...]
    layout: VocabularyLayout
    roles: Mapping[str, str]
    prefix_tokens: tuple[str, ...] = ()
    suffix_tokens: tuple[str, ...] = ()
    vocabulary: bool = False  # pieces are looked up in vocab.json


_T5_ROLES = {"eos": "</s>", "pad": "<pad>", "unk": "<unk>"}
_LLAMA_ROLES = {"bos": "<s>", "eos": "</s>", "unk": "<unk>"}
_M2M100_ROLES = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>", "sep": "</s>"}
_XLM_ROLES = {**_M2M100_ROLES, "cls": "<s>"}
_MASKED_ROLES = {**_XLM_ROLES, "mask": "<mask>"}
_MBART50_ROLES = {role: name for role, name in _MASKED_ROLES.items() if role != "bos"}
_XGLM_LAST = tuple(f"<madeupword{i}>" for i in range(7))
_BPE_MODEL = ("sentencepiece.bpe.model",)

TOKENIZER_FAMILIES: Mapping[str, TokenizerFamily] = {
    "Gemma": TokenizerFamily(
        ("tokenizer.model",), _plain, {"bos": "<bos>", "eos": "<eos>", "pad": "<pad>", "unk": "<unk>"}
    ),
    "Llama": TokenizerFamily(("tokenizer.model",), _plain, _LLAMA_ROLES),
    "M2M100": TokenizerFamily(_BPE_MODEL, _m2m100, _M2M100_ROLES, vocabulary=True),
    "MBart": TokenizerFamily(_BPE_MODEL, _fairseq(*_MBART, "<mask>"), _MASKED_ROLES),
    "MBart50": TokenizerFamily(_BPE_MODEL, _fairseq(*_MBART, *_MBART50, "<mask>"), _MBART50_ROLES),
    "Marian": TokenizerFamily(
        ("source.spm", "target.spm"), _marian, _T5_ROLES, ("language",), ("eos",), vocabulary=True
    ),
    "Nllb": TokenizerFamily(_BPE_MODEL, _fairseq(*_NLLB, "<mask>"), _MASKED_ROLES),
    "T5": TokenizerFamily(("spiece.model",), _t5, _T5_ROLES, (), ("eos",)),
    "XGLM": TokenizerFamily(_BPE_MODEL, _fairseq(*_XGLM_LAST), _XLM_ROLES, ("sep",)),
    "XLMRoberta": TokenizerFamily(_BPE_MODEL, _fairseq("<mask>"), _MASKED_ROLES, ("cls",), ("sep",)),
}


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

    def save(self, folder: Path) -> None:
        write_text(Path(folder) / FILE_NAME, self._file_text)

    def fingerprint(self) -> str:
        return hashlib.sha256(self._file_text.encode()).hexdigest()


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
    """Load the tokenizer of a folder with SentencePiece models.

    ``file`` is an explicitly named model.

    Raises:
        TokenizerError: If a file is missing or broken, or the class is unknown.
    """
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
