"""Chat templates: from messages to the exact text that a model was trained to read.

A template is a Jinja program that comes with the model: ``chat_template.jinja`` (others of the same model in
``additional_chat_templates/``), or ``chat_template`` in ``tokenizer_config.json`` or ``chat_template.json``.  What it
writes is, character by character, what ``transformers.apply_chat_template(tokenize=False)`` writes; special tokens
appear in it by their names, so encode it with ``encode(text, specials=True)``.

A template is untrusted code: ``sandbox.py`` renders it with Jinja's immutable sandbox, in a child process with limits
of time, memory and output.  It takes only plain data: str, int, float, bool, None, lists and dicts; a tuple becomes a
list.  No torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvad.errors import ChatTemplateError, suggest
from kvad.text.template_sandbox import MAX_NESTING, RenderLimits, render_template

__all__ = ["ChatTemplate", "RenderLimits", "RenderedChat", "template_fingerprint"]

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"
LEGACY_FILE = "chat_template.json"
CONFIG = "tokenizer_config.json"
SPECIALS = "special_tokens_map.json"
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
ADDITIONAL, EXTRA = "additional_special_tokens", "extra_special_tokens"
RESERVED_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")

_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # transformers' own; its space tells whether the template trims messages


@dataclass(frozen=True)
class RenderedChat:
    """``text``, and ``marks``: where in it the assistant speaks, as far as the template says so (see ``spans``)."""

    text: str
    generation_marks: tuple[tuple[int, int], ...] | None = ()

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Character ranges ``[start, end)`` of what stood in ``{% generation %}`` blocks, in order: a training mask.

        Raises ChatTemplateError where such a block lies within a macro or a ``{% set %}`` block: what becomes of its
        text, nobody knows.
        """
        if self.generation_marks is None:
            raise ChatTemplateError(
                "the chat template has a {% generation %} block whose text does not go straight to the output",
                "move it out of the macro or {% set %} block",
            )
        return self.generation_marks


class ChatTemplate:
    """The templates of one model and its special tokens.  Immutable, safe to use from several threads.

    ``templates``: name -> source; ``specials``: name of a variable (``bos_token``) -> its text; ``name``: the template
    to use whatever is rendered.
    """

    def __init__(
        self,
        templates: str | Mapping[str, str],
        specials: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
        limits: RenderLimits | None = None,
    ) -> None:
        self.templates = {"default": templates} if isinstance(templates, str) else dict(templates)
        self.specials = dict(specials or {})
        self.limits = limits or RenderLimits()
        self._name = name
        if name is not None and name not in self.templates:
            raise ChatTemplateError(f"there is no chat template {name!r}", suggest(name, self.templates))

    @classmethod
    def load(cls, folder: Path, *, name: str | None = None, limits: RenderLimits | None = None) -> ChatTemplate | None:
        """The templates in a model's folder; None where it has none.

        Raises ChatTemplateError for a file that cannot be read, and for a ``name`` that is not there.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise ChatTemplateError(f"no such folder: {folder}")
        config = _read_object(folder / CONFIG)
        templates = _own_files(folder)
        for file in (CONFIG, LEGACY_FILE):
            content = config if file == CONFIG else _read_object(folder / file)
            templates = templates or _named(content.get("chat_template"), folder / file)
        if not templates:
            return None
        return cls(templates, _specials(config, _read_object(folder / SPECIALS)), name=name, limits=limits)

    def fingerprint(self) -> str:
        """Of the templates and what they may write of themselves: another one, other texts."""
        content = json.dumps([self.templates, self.specials, self._name], sort_keys=True, default=str)
        return blake2b(content.encode(), digest_size=16).hexdigest()

    def choose(self, *, tools: bool = False) -> str:
        """The name of the template that renders: the one asked for, ``tool_use`` where there are tools, ``default``."""
        if self._name is not None:
            return self._name
        if tools and "tool_use" in self.templates:
            return "tool_use"
        if "default" not in self.templates:
            names = ", ".join(sorted(self.templates))
            raise ChatTemplateError("the model has several chat templates and no default", f"name one of: {names}")
        return "default"

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        generation_prompt: bool = False,
        continue_final: bool = False,
        variables: Mapping[str, Any] | None = None,
        now: datetime | None = None,
    ) -> RenderedChat:
        """The text of a conversation.

        ``generation_prompt`` ends it with what opens the assistant's turn; ``continue_final`` ends it within the last
        message, for the model to go on.  ``tools`` are JSON schemas.  ``variables`` go before the special tokens.
        ``now`` is what ``strftime_now`` tells [default: the clock].
        Raises ChatTemplateError: a message that is none, a template that is wrong, refuses or takes too much.
        """
        if generation_prompt and continue_final:
            raise ChatTemplateError("a generation prompt and a final message to continue exclude each other")
        talk = _messages(messages)
        final = _open_end(talk[-1]) if continue_final else None
        given = {
            "messages": talk,
            "tools": _dicts(tools, "tools"),
            "documents": _dicts(documents, "documents"),
            "add_generation_prompt": generation_prompt,
        }
        extra = _plain(dict(variables or {}), "variables")
        if taken := [key for key in extra if key in RESERVED_VARIABLES]:
            raise ChatTemplateError(f"the variable {taken[0]!r} is an argument of its own")
        name = self.choose(tools=tools is not None)
        output = render_template(self.templates[name], {**self.specials, **extra, **given}, self.limits, now)
        if final is None:
            return RenderedChat(output.text, output.spans)
        text = _text_before_tag(output.text, final)
        marks = output.spans and tuple((start, min(end, len(text))) for start, end in output.spans if start < len(text))
        return RenderedChat(text, marks)


# ---------------------------------------------------------------- the conversation


def _messages(messages: Any) -> list[dict[str, Any]]:
    """A copy.  Each message has a role and, unless it calls tools, a content: a text, a list of parts, or null."""
    if not isinstance(messages, list | tuple):
        raise ChatTemplateError(f"messages must be a list, not {_kind(messages)}")
    if not messages:
        raise ChatTemplateError("there are no messages")
    form = 'a message is {"role": ..., "content": ...}'
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(message, Mapping):
            raise ChatTemplateError(f"{where} is {_kind(message)}, not an object", form)
        if not isinstance(message.get("role"), str):
            problem = f"a role that is {_kind(message['role'])}" if "role" in message else "no role"
            raise ChatTemplateError(f"{where} has {problem}", form)
        if "content" not in message and "tool_calls" not in message:
            raise ChatTemplateError(f"{where} (role {message['role']!r}) has no content", form)
        content = message.get("content")
        parts = isinstance(content, list | tuple) and all(isinstance(part, Mapping) for part in content)
        if not (content is None or isinstance(content, str) or parts):
            what = "holds what is no object" if isinstance(content, list | tuple) else f"is {_kind(content)}"
            raise ChatTemplateError(f"{where}: its content {what}", "a text, or a list of parts {'type': ...}")
    return [_plain(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _dicts(values: Any, what: str) -> list[dict[str, Any]] | None:
    if values is None:
        return None
    if not isinstance(values, list | tuple):
        raise ChatTemplateError(f"{what} must be a list of objects, not {_kind(values)}")
    for number, value in enumerate(values):
        if not isinstance(value, Mapping):
            raise ChatTemplateError(f"{what}[{number}] is {_kind(value)}, not an object")
    return [_plain(value, f"{what}[{number}]") for number, value in enumerate(values)]


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy of plain data, so that the sandbox meets nothing else; ChatTemplateError says where something else is."""
    if depth > MAX_NESTING:
        raise ChatTemplateError(f"{where.partition('.')[0]} is nested more than {MAX_NESTING} levels deep")
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise ChatTemplateError(f"{where} has the key {odd[0]!r}, which is no text")
        return {key: _plain(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{number}]", depth + 1) for number, item in enumerate(value)]
    raise ChatTemplateError(f"{where} is {_kind(value)}: a template takes texts, numbers, lists and objects")


def _kind(value: object) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", type(None): "null", int: "a number", float: "a number"}
    return kinds.get(type(value), f"a {type(value).__name__}")


def _open_end(message: dict[str, Any]) -> str:
    """Mark the end of the message's text (in place), and return that text."""
    holder, key = message, "content"
    if isinstance(message.get("content"), list | tuple):
        texts = [part for part in message["content"] if "text" in part]
        if texts:
            holder, key = texts[-1], "text"
    text = holder.get(key)
    if not isinstance(text, str):
        raise ChatTemplateError("the final message has no text to continue")
    holder[key] = text + _TAG
    return text


def _text_before_tag(text: str, final: str) -> str:
    """What stands before the mark.  A template that trimmed the message took the mark's space: then trim, too."""
    if final.strip() not in text or _TAG.strip() not in text:
        raise ChatTemplateError("the final message does not appear as it is in the rendered chat: it cannot go on")
    place = text.rindex(_TAG.strip())
    return text[:place] if text.startswith(_TAG, place) else text[:place].rstrip()


# ---------------------------------------------------------------- the files


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ChatTemplateError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ChatTemplateError(f"{path}: not UTF-8 at byte {error.start}") from None


def _read_object(path: Path) -> dict[str, Any]:
    """``{}`` where there is no such file."""
    if not path.exists():
        return {}
    try:
        content = json.loads(_read(path))
    except json.JSONDecodeError as error:
        problem = f"not JSON: line {error.lineno}, column {error.colno}: {error.msg}"
        raise ChatTemplateError(f"{path}: {problem}") from None
    if not isinstance(content, dict):
        raise ChatTemplateError(f"{path}: expected an object, found {_kind(content)}")
    return content


def _own_files(folder: Path) -> dict[str, str]:
    """``chat_template.jinja`` is the default; ``additional_chat_templates/rag.jinja`` is ``rag``."""
    paths = {path.stem: path for path in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))}
    if (folder / TEMPLATE_FILE).exists():
        paths = {"default": folder / TEMPLATE_FILE} | {name: path for name, path in paths.items() if name != "default"}
    return {name: _read(path) for name, path in paths.items()}


def _named(templates: Any, path: Path) -> dict[str, str]:
    """A string, a list of {"name", "template"}, or an object of them."""
    if templates is None:
        return {}
    if isinstance(templates, str):
        return {"default": templates}
    if isinstance(templates, list) and all(isinstance(one, dict) for one in templates):
        templates = {one.get("name"): one.get("template") for one in templates}
    if isinstance(templates, dict) and all(isinstance(text, str) for pair in templates.items() for text in pair):
        return templates
    raise ChatTemplateError(f'{path}: chat_template is neither a text nor a list of {{"name", "template"}}')


def _specials(config: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """Variables by transformers' rule: ``special_tokens_map.json`` counts unless the config has the tokens' decoder."""
    added = _texts(config.get(ADDITIONAL))
    if "added_tokens_decoder" not in config:
        added += [token for token in _texts(table.get(ADDITIONAL)) if token not in added]
        config = {**config, **table}
    found: dict[str, Any] = {role: _text(config.get(role)) for role in ROLES}
    extra = config.get(EXTRA)
    if isinstance(extra, dict):
        found |= {name: _text(token) for name, token in extra.items()}
    return {name: token for name, token in {**found, ADDITIONAL: added}.items() if token}


def _text(token: Any) -> str | None:
    """``"<s>"`` or ``{"content": "<s>", ...}``"""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _texts(tokens: Any) -> list[str]:
    return [text for token in tokens if (text := _text(token))] if isinstance(tokens, list) else []


def template_fingerprint(folder: Path) -> str:
    """Of the template in a model's folder; "" where it has none, or none that can be read."""
    try:
        template = ChatTemplate.load(folder)
    except ChatTemplateError:  # who chats with it is told
        return ""
    return "" if template is None else template.fingerprint()
