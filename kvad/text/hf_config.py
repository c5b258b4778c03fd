"""Hugging Face tokenizer folders: class, special and added tokens, options, and older vocabularies.

``tokenizer_config.json`` contains most of it; older folders have ``special_tokens_map.json`` and ``added_tokens.json``
instead, and without a class name the model's ``config.json`` determines it. The rules are those of transformers'
``PreTrainedTokenizerBase._from_pretrained``. Standard library only.

Folders without ``tokenizer.json`` have ``vocab.json`` + ``merges.txt`` (byte-level BPE in the dialects of GPT-2,
RoBERTa and Qwen2) or ``vocab.txt`` (BERT's WordPiece). Both are converted as in transformers'
``convert_slow_tokenizer.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kvad import storage
from kvad.errors import TokenizerError
from kvad.text.base import NAMES

if TYPE_CHECKING:
    import tokenizers  # type: ignore[import-untyped]

CONFIG_NAME, SPECIAL_TOKENS_MAP = "tokenizer_config.json", "special_tokens_map.json"
ROLES_KEY = "kvad_special_tokens"  # kvad's roles, if the others in the file were completed for transformers
SPECIAL_ROLES = (*NAMES, "cls", "sep", "mask")

_CLASS_OF_MODEL = {  # config.json's model_type -> class, if no other file names it
    "bart": "Bart", "bert": "Bert", "distilbert": "Bert", "electra": "Bert", "gemma": "Gemma", "gpt2": "GPT2",
    "gpt_neo": "GPT2", "llama": "Llama", "m2m_100": "M2M100", "marian": "Marian", "mbart": "MBart", "mistral": "Llama",
    "mt5": "T5", "opt": "GPT2", "qwen2": "Qwen2", "roberta": "Roberta", "t5": "T5", "umt5": "T5", "xglm": "XGLM",
    "xlm-roberta": "XLMRoberta",
}  # fmt: skip
_CLS_SEP = {"cls": "<s>", "sep": "</s>"}
_CLASS_ROLES = {  # default roles of a class's constructor that common names do not identify
    **dict.fromkeys(
        ("Bart", "LED", "Longformer", "MBart", "MBart50", "Nllb", "Roberta", "XGLM", "XLMRoberta"), _CLS_SEP
    ),
    "M2M100": {"sep": "</s>"},
}


@dataclass(frozen=True)
class AddedToken:
    """Token matched before the model; ``lstrip`` and ``rstrip`` absorb adjacent spaces."""

    content: str
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False
    special: bool = True


@dataclass(frozen=True)
class TokenizerSettings:
    """Settings of a tokenizer folder."""

    family: str = ""  # class without ``Tokenizer`` and ``Fast`` ("T5"), "" if unknown
    roles: Mapping[str, str | None] = field(default_factory=dict)  # role -> name as written
    marked: tuple[AddedToken, ...] = ()  # the special tokens with their flags
    added: Mapping[int, AddedToken] = field(default_factory=dict)  # by id
    options: Mapping[str, Any] = field(default_factory=dict)

    def flag(self, name: str, default: bool | None = None) -> bool | None:
        value = self.options.get(name)
        return value if isinstance(value, bool) else default

    def text(self, name: str) -> str | None:
        value = self.options.get(name)
        return value if isinstance(value, str) else None

    def number(self, name: str, default: int) -> int:
        value = self.options.get(name)
        return value if type(value) is int and value >= 0 else default

    def roles_in(
        self, has_token: Callable[[str], bool], defaults: Mapping[str, str] = MappingProxyType({})
    ) -> dict[str, str | None]:
        """Return the roles, by default those of the class; names missing from the vocabulary are unused defaults."""
        class_roles = {**_CLASS_ROLES.get(self.family, {}), **defaults}
        roles = {role: name if name is not None and has_token(name) else None for role, name in self.roles.items()}
        return {**{role: name for role, name in class_roles.items() if has_token(name)}, **roles}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> TokenizerSettings:
        """Build settings from the JSON form of ``dataclasses.asdict``."""
        return cls(
            content["family"],
            content["roles"],
            tuple(AddedToken(**token) for token in content["marked"]),
            {int(token_id): AddedToken(**token) for token_id, token in content["added"].items()},
            content["options"],
        )


def read_text(path: Path) -> str:
    """Read a text file; raise TokenizerError with its name."""
    try:
        return storage.filesystem.read_text(path)
    except FileNotFoundError:
        hint = "Name a folder with a tokenizer.json, or the file itself."
        raise TokenizerError(f"there is no {path.name} in {path.parent}", hint) from None
    except OSError as error:
        raise TokenizerError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path}: not UTF-8 at byte {error.start}", f"A {path.name} must be text.") from None


def parse_object(text: str) -> dict[str, Any]:
    try:
        content = storage.strict_json.loads(text)
    except ValueError as error:
        raise TokenizerError(f"not JSON: {error}") from None
    if not isinstance(content, dict):
        raise TokenizerError(f"expected a JSON object, found a {type(content).__name__}")
    return content


def read_settings(folder: Path) -> TokenizerSettings:
    """Read a folder's settings, empty if there are no files."""
    config = read_optional_object(folder / CONFIG_NAME)
    has_decoder = "added_tokens_decoder" in config
    spelling = config if has_decoder else {**config, **read_optional_object(folder / SPECIAL_TOKENS_MAP)}
    spelling = config[ROLES_KEY] if isinstance(config.get(ROLES_KEY), dict) else spelling
    additional = spelling.get("additional_special_tokens")
    values = [spelling.get(f"{role}_token") for role in SPECIAL_ROLES]
    values += additional if isinstance(additional, list) else []
    specials = (_token(value, special=True) for value in values)
    marked = tuple({token.content: token for token in specials if token is not None}.values())
    if has_decoder:
        entries = config["added_tokens_decoder"]
        tokens = {i: _token(value, special=False) for i, value in entries.items()} if isinstance(entries, dict) else {}
        added = {int(i): token for i, token in tokens.items() if i.isdecimal() and token is not None}
    else:
        special, ids = {token.content for token in marked}, read_optional_object(folder / "added_tokens.json")
        added = {
            token_id: AddedToken(name, special=name in special, normalized=name not in special)
            for name, token_id in ids.items()
            if type(token_id) is int
        }
    roles = {role: token_name(spelling[f"{role}_token"]) for role in SPECIAL_ROLES if f"{role}_token" in spelling}
    handled = {f"{role}_token" for role in SPECIAL_ROLES}
    handled |= {"added_tokens_decoder", "additional_special_tokens", "chat_template"}
    options = {
        key: value for key, value in config.items() if key not in handled and isinstance(value, str | int | None)
    }
    return TokenizerSettings(_family(folder, config), roles, marked, added, options)


def read_optional_object(path: Path) -> dict[str, Any]:
    """Read a JSON object, empty if there is no file; raise TokenizerError with the file's name."""
    return _read_object(path) if path.exists() else {}


def _read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; raise TokenizerError with the file's name."""
    text = read_text(path)
    try:
        return parse_object(text)
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error.message}", error.hint) from None


def _family(folder: Path, config: Mapping[str, Any]) -> str:
    name = config.get("tokenizer_class")
    if isinstance(name, str):
        return name.removesuffix("Fast").removesuffix("Tokenizer")
    try:
        model = storage.strict_json.loads(storage.filesystem.read_bytes(folder / "config.json"))
    except (OSError, ValueError):
        return ""  # an invalid model config is reported when the model is read
    kind = model.get("model_type") if isinstance(model, dict) else None
    return _CLASS_OF_MODEL.get(kind, "") if isinstance(kind, str) else ""


def _token(value: object, *, special: bool) -> AddedToken | None:
    name = token_name(value)
    if name is None:
        return None
    flags = value if isinstance(value, dict) else {}
    names = ("lstrip", "rstrip", "single_word", "normalized")
    text_flags = {key: flags[key] for key in names if type(flags.get(key)) is bool}
    special = special or flags.get("special") is True
    return AddedToken(name, special=special, **{"normalized": not special, **text_flags})


def token_name(value: object) -> str | None:
    """Return the name of ``"<s>"`` or ``{"content": "<s>", ...}``; None for other values."""
    name = value.get("content") if isinstance(value, dict) else value
    return name if isinstance(name, str) and name else None


_ROBERTA = ("Bart", "Blenderbot", "LED", "Longformer", "Mvp", "Roberta")
_ROBERTA_ROLES = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "sep": "</s>", "pad": "<pad>", "cls": "<s>"}
_GPT2_ROLES = {"bos": "<|endoftext|>", "eos": "<|endoftext|>"}
_BERT_ROLES = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def read_vocabulary(path: Path) -> dict[str, int]:
    """Read ``{"piece": id}``; raise TokenizerError with the file's name."""
    vocabulary = _read_object(path)
    if not vocabulary or not all(type(token_id) is int and token_id >= 0 for token_id in vocabulary.values()):
        raise TokenizerError(f"{path}: must be an object of pieces and their ids")
    return vocabulary


def _read_merges(path: Path) -> list[tuple[str, str]]:
    if not path.is_file():
        raise TokenizerError(f"there is no {path.name} in {path.parent}, next to vocab.json", "Copy both files.")
    merges = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line or (number == 1 and line.startswith("#version:")):
            continue
        pair = line.split()
        if len(pair) != 2:
            raise TokenizerError(f"{path}: line {number} is not a merge of two pieces: {line[:40]!r}")
        merges.append((pair[0], pair[1]))
    return merges


def byte_level_bpe(folder: Path, settings: TokenizerSettings) -> tuple[tokenizers.Tokenizer, dict[str, str | None]]:
    """Build the backend of ``vocab.json`` and ``merges.txt``, and its special tokens' roles."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    path = folder / "vocab.json"
    vocabulary, merges = read_vocabulary(path), _read_merges(folder / "merges.txt")
    if any(second.endswith("</w>") for _, second in merges[:100]):
        message = f"{path}: BPE over words (CLIP, GPT-1) is not supported"
        raise TokenizerError(message, "Convert it to a tokenizer.json.")
    try:
        backend = Tokenizer(models.BPE(vocabulary, merges))
    except Exception as error:  # the library raises no specific type
        raise TokenizerError(f"{path} and merges.txt do not belong together: {error}") from None
    add_prefix_space = settings.flag("add_prefix_space", False)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    backend.decoder = decoders.ByteLevel()
    if settings.family == "Qwen2":
        backend.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(_QWEN2), behavior="isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    is_roberta = settings.family in _ROBERTA
    roles = settings.roles_in(vocabulary.__contains__, _ROBERTA_ROLES if is_roberta else _GPT2_ROLES)
    _add_special(backend, roles, mask="<mask>" if is_roberta else None)
    if is_roberta:
        cls, sep = (_required_token(path, vocabulary, roles, role) for role in ("cls", "sep"))
        backend.post_processor = processors.RobertaProcessing(sep, cls, add_prefix_space=add_prefix_space)
    return backend, roles


def wordpiece(folder: Path, settings: TokenizerSettings) -> tuple[tokenizers.Tokenizer, dict[str, str | None]]:
    """Build the backend of BERT's ``vocab.txt``, and the roles of its special tokens."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    path = folder / "vocab.txt"
    lines = read_text(path).split("\n")
    vocabulary = {piece.rstrip("\r"): i for i, piece in enumerate(lines if lines[-1] else lines[:-1])}
    roles = settings.roles_in(vocabulary.__contains__, _BERT_ROLES)
    unk, cls, sep = (_required_token(path, vocabulary, roles, role) for role in ("unk", "cls", "sep"))
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token=unk[0]))
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=settings.flag("tokenize_chinese_chars", True),
        strip_accents=settings.flag("strip_accents"),
        lowercase=settings.flag("do_lower_case", True),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    _add_special(backend, roles, mask=None)
    backend.post_processor = processors.BertProcessing(sep, cls)
    return backend, roles


def _add_special(backend: tokenizers.Tokenizer, roles: Mapping[str, str | None], *, mask: str | None) -> None:
    """Register special tokens; ``mask`` is RoBERTa's, which absorbs the space before it."""
    from tokenizers import AddedToken

    names = dict.fromkeys(name for name in roles.values() if name is not None)
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in names if name != mask])
    if mask is not None and backend.token_to_id(mask) is not None:
        backend.add_special_tokens([AddedToken(mask, lstrip=True, normalized=False)])


def _required_token(
    path: Path, vocabulary: Mapping[str, int], roles: Mapping[str, str | None], role: str
) -> tuple[str, int]:
    name = roles.get(role)
    if name is None:
        hint = "Check that the vocabulary matches the tokenizer's class."
        raise TokenizerError(f"{path}: there is no {role} token", hint)
    return name, vocabulary[name]
