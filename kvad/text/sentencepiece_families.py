"""Numbering of SentencePiece pieces by model family.

A model numbers its pieces from 0; a family may shift them (fairseq: ``<s> <pad> </s> <unk>`` first, so a piece's id is
its number + 1) or look them up in a ``vocab.json``, and appends sentinels, languages and a mask. Each rule is that of
transformers' slow tokenizer of the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvad.errors import TokenizerError
from kvad.text.hf_config import AddedToken, TokenizerSettings


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
    """Vocabulary of a tokenizer."""

    names: list[str]  # piece of each id, "" if unused
    special: dict[str, int] = field(default_factory=dict)  # name -> id
    flags: dict[str, AddedToken] = field(default_factory=dict)  # added tokens by name

    @classmethod
    def from_ids(cls, ids: Mapping[str, int]) -> VocabularyBuilder:
        """Build the vocabulary of a ``vocab.json``."""
        names = [""] * (1 + max(ids.values()))
        for name, token_id in ids.items():
            if names[token_id]:
                raise TokenizerError(f"the vocabulary gives id {token_id} to {names[token_id]!r} and to {name!r}")
            names[token_id] = name
        return cls(names)

    def add(self, token: AddedToken, token_id: int | None = None) -> None:
        """Append a token, or set it at ``token_id``."""
        token_id = len(self.names) if token_id is None else token_id
        self.names += [""] * (token_id + 1 - len(self.names))
        self.names[token_id] = token.content
        self.flags[token.content] = token
        if token.special:
            self.special[token.content] = token_id


Numbering = Callable[[VocabularyBuilder, TokenizerSettings], None]  # applied to the model's pieces or a vocab.json


def _plain(_: VocabularyBuilder, __: TokenizerSettings) -> None:
    pass


def _t5(builder: VocabularyBuilder, settings: TokenizerSettings) -> None:
    """Append sentinels; ``<extra_id_0>`` is the last id."""
    for i in reversed(range(settings.number("extra_ids", 100))):
        builder.add(AddedToken(f"<extra_id_{i}>", lstrip=True, rstrip=True))


def _fairseq(*trailing_names: str) -> Numbering:
    """Shift pieces by one (piece 3 is id 4) and append ``trailing_names``."""

    def shift(builder: VocabularyBuilder, _: TokenizerSettings) -> None:
        pieces, builder.names = builder.names[3:], []
        for name in ("<s>", "<pad>", "</s>", "<unk>"):
            builder.add(AddedToken(name))
        builder.names += pieces
        for name in trailing_names:
            builder.add(AddedToken(name, lstrip=name == "<mask>"))

    return shift


def _marian(builder: VocabularyBuilder, _: TokenizerSettings) -> None:
    """Make languages special; they are recognized at the start of a text only, so they are no added tokens."""
    ids = {name: token_id for token_id, name in enumerate(builder.names)}
    builder.special |= {name: i for name, i in ids.items() if name.startswith(">>") and name.endswith("<<")}


def _m2m100(builder: VocabularyBuilder, settings: TokenizerSettings) -> None:
    """Append languages; ``__af__`` is the first id after the vocabulary."""
    for code in _WMT21 if settings.text("language_codes") == "wmt21" else _M2M100:
        builder.add(AddedToken(f"__{code}__"))


@dataclass(frozen=True)
class TokenizerFamily:
    """Rules of one model family."""

    models: tuple[str, ...]  # its files, source before target
    number: Numbering
    roles: Mapping[str, str]  # role -> name unless a file overrides it; missing roles have no token
    prefix_tokens: tuple[str, ...] = ()  # roles around a text unless ``configure_post_processor`` overrides them
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
