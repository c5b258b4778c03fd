"""What lies beside a vocabulary in a Hugging Face folder: its class, its special and added tokens, its options.

``tokenizer_config.json`` says most of it; older folders have ``special_tokens_map.json`` and ``added_tokens.json``
instead, and where no class is named the model's ``config.json`` tells it.  The rules are those of transformers'
``PreTrainedTokenizerBase._from_pretrained``.  Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvad.errors import TokenizerError
from kvad.text.base import NAMES

__all__ = [
    "CONFIG_NAME",
    "SPECIAL_ROLES",
    "AddedToken",
    "TokenizerSettings",
    "parse_object",
    "read_settings",
    "read_text",
]

CONFIG_NAME = "tokenizer_config.json"
SPECIAL_ROLES = (*NAMES, "cls", "sep", "mask")

_CLASS_OF_MODEL = {  # config.json's model_type -> class, where nothing else names it
    "bart": "Bart",
    "bert": "Bert",
    "distilbert": "Bert",
    "electra": "Bert",
    "gemma": "Gemma",
    "gpt2": "GPT2",
    "gpt_neo": "GPT2",
    "llama": "Llama",
    "m2m_100": "M2M100",
    "marian": "Marian",
    "mbart": "MBart",
    "mistral": "Llama",
    "mt5": "T5",
    "opt": "GPT2",
    "qwen2": "Qwen2",
    "roberta": "Roberta",
    "t5": "T5",
    "umt5": "T5",
    "xglm": "XGLM",
    "xlm-roberta": "XLMRoberta",
}
_CLS_SEP = {"cls": "<s>", "sep": "</s>"}
_CLASS_ROLES = {  # what a class's constructor assumes where the files are silent, of the roles that no name tells
    **dict.fromkeys(
        ("Bart", "LED", "Longformer", "MBart", "MBart50", "Nllb", "Roberta", "XGLM", "XLMRoberta"), _CLS_SEP
    ),
    "M2M100": {"sep": "</s>"},
}


@dataclass(frozen=True)
class AddedToken:
    """A token found in the text before any model sees it.  ``lstrip``, ``rstrip``: it swallows the spaces beside it."""

    content: str
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False
    special: bool = True


@dataclass(frozen=True)
class TokenizerSettings:
    """``family``: the class without ``Tokenizer`` and ``Fast`` (``"T5"``; ``""``: nobody says).

    ``roles``: role -> name as written; ``marked``: these tokens and the additional special ones, as they are spelled;
    ``added``: id -> token.
    """

    family: str = ""
    roles: Mapping[str, str | None] = field(default_factory=dict)
    marked: tuple[AddedToken, ...] = ()
    added: Mapping[int, AddedToken] = field(default_factory=dict)
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

    def roles_in(self, vocabulary: Container[str]) -> dict[str, str | None]:
        """The roles; names that the vocabulary lacks are nobody's: such files often keep the defaults of a class."""
        defaults = {role: name for role, name in _CLASS_ROLES.get(self.family, {}).items() if name in vocabulary}
        found = {role: name if name is not None and name in vocabulary else None for role, name in self.roles.items()}
        return {**defaults, **found}

    def to_dict(self) -> dict[str, Any]:
        return {
            "family": self.family,
            "roles": dict(self.roles),
            "marked": [vars(token) for token in self.marked],
            "added": {str(token_id): vars(token) for token_id, token in self.added.items()},
            "options": dict(self.options),
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> TokenizerSettings:
        return cls(
            content["family"],
            content["roles"],
            tuple(AddedToken(**token) for token in content["marked"]),
            {int(token_id): AddedToken(**token) for token_id, token in content["added"].items()},
            content["options"],
        )


def read_text(path: Path) -> str:
    """Raises TokenizerError naming the file."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise TokenizerError(
            f"there is no {path.name} in {path.parent}", "name a folder with a tokenizer.json, or the file itself"
        ) from None
    except OSError as error:
        raise TokenizerError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path}: not UTF-8 at byte {error.start}", f"a {path.name} is text") from None


def parse_object(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise TokenizerError(f"not JSON: line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise TokenizerError("not JSON that can be read: it is nested too deeply") from None
    if not isinstance(content, dict):
        raise TokenizerError(f"expected a JSON object, found a {type(content).__name__}")
    return content


def read_settings(folder: Path) -> TokenizerSettings:
    """Of a folder without any of the files: the empty settings.  Raises TokenizerError naming a file that is broken."""
    config = _read_companion_file(folder, CONFIG_NAME)
    spelled = dict(config)
    added: dict[int, AddedToken] = {}
    if "added_tokens_decoder" in config:
        listed = config["added_tokens_decoder"]
        for token_id, value in (listed if isinstance(listed, dict) else {}).items():
            if token_id.isdecimal() and (token := _token(value, special=False)) is not None:
                added[int(token_id)] = token
    else:
        spelled.update(_read_companion_file(folder, "special_tokens_map.json"))
    marked = _marked_tokens(spelled)
    if "added_tokens_decoder" not in config:
        special = {token.content for token in marked}
        for name, token_id in _read_companion_file(folder, "added_tokens.json").items():
            if type(token_id) is int:
                added[token_id] = AddedToken(name, special=name in special, normalized=name not in special)
    roles = {role: _name(spelled[f"{role}_token"]) for role in SPECIAL_ROLES if f"{role}_token" in spelled}
    taken = {f"{role}_token" for role in SPECIAL_ROLES} | {
        "added_tokens_decoder",
        "additional_special_tokens",
        "chat_template",
    }
    options = {key: value for key, value in config.items() if key not in taken and _is_plain(value)}
    return TokenizerSettings(_family(folder, config), roles, marked, added, options)


def _read_companion_file(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    if not path.is_file():
        return {}
    try:
        return parse_object(read_text(path))
    except TokenizerError as error:
        message = error.message if str(path) in error.message else f"{path}: {error.message}"
        raise TokenizerError(message, error.hint) from None


def _family(folder: Path, config: Mapping[str, Any]) -> str:
    name = config.get("tokenizer_class")
    if isinstance(name, str):
        return name.removesuffix("Fast").removesuffix("Tokenizer")
    try:
        model = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return ""  # another floor's file: whoever reads the model says what is wrong with it
    kind = model.get("model_type") if isinstance(model, dict) else None
    return _CLASS_OF_MODEL.get(kind, "") if isinstance(kind, str) else ""


def _marked_tokens(spelled: Mapping[str, Any]) -> tuple[AddedToken, ...]:
    more = spelled.get("additional_special_tokens")
    values = [spelled.get(f"{role}_token") for role in SPECIAL_ROLES] + (more if isinstance(more, list) else [])
    tokens = (_token(value, special=True) for value in values)
    return tuple({token.content: token for token in tokens if token is not None}.values())


def _token(value: object, *, special: bool) -> AddedToken | None:
    name = _name(value)
    if name is None:
        return None
    flags = value if isinstance(value, dict) else {}
    known = {
        key: flags[key] for key in ("lstrip", "rstrip", "single_word", "normalized") if type(flags.get(key)) is bool
    }
    special = special or flags.get("special") is True
    return AddedToken(name, special=special, **{"normalized": not special, **known})


def _name(value: object) -> str | None:
    name = value.get("content") if isinstance(value, dict) else value
    return name if isinstance(name, str) and name else None


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | bool | int)
