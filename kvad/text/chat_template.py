"""Chat templates: convert messages to the exact text that a model was trained on.

A template is a Jinja program that comes with the model: ``chat_template.jinja`` (others of the same model in
``additional_chat_templates/``), or ``chat_template`` in ``tokenizer_config.json`` or ``chat_template.json``. The output
equals that of ``transformers.apply_chat_template(tokenize=False)`` character by character; special tokens appear by
name, so encode it with ``encode(text, specials=True)``.

Templates are untrusted code: ``template_sandbox.py`` renders them with Jinja's immutable sandbox in a child process
with limits of time, memory and output. Input is plain data only: str, int, float, bool, None, lists and dicts; a tuple
becomes a list. No torch.
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

_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # same as in transformers; its space shows whether the template trims messages


@dataclass(frozen=True)
class RenderedChat:
    """Rendered text and, if the template marks them, the assistant's ranges (see ``spans``)."""

    text: str
    generation_marks: tuple[tuple[int, int], ...] | None = ()

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Character ranges ``[start, end)`` of ``{% generation %}`` blocks (a training mask).

        Raises ChatTemplateError for a block inside a macro or a ``{% set %}`` block, whose output is unknown.
        """
        if self.generation_marks is None:
            raise ChatTemplateError(
                "the chat template has a {% generation %} block whose text is not written directly to the output",
                "Move it out of the macro or {% set %} block.",
            )
        return self.generation_marks


class ChatTemplate:
    """Templates of one model and its special tokens. Immutable and thread-safe.

    Args:
        templates: Source, or sources by name.
        specials: Texts of variables such as ``bos_token``.
        name: Template to use always.
        limits: Limits of rendering.
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
        """Load the templates in a model's folder; None if there are none."""
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
        """Return a hash of the templates and their special tokens."""
        content = json.dumps([self.templates, self.specials, self._name], sort_keys=True, default=str)
        return blake2b(content.encode(), digest_size=16).hexdigest()

    def choose(self, *, tools: bool = False) -> str:
        """Return the template's name: the given one, ``tool_use`` if there are tools, or ``default``."""
        if self._name is not None:
            return self._name
        if tools and "tool_use" in self.templates:
            return "tool_use"
        if "default" not in self.templates:
            names = ", ".join(sorted(self.templates))
            raise ChatTemplateError("the model has several chat templates and no default", f"Choose one of: {names}.")
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
        """Render a conversation.

        Args:
            messages: Objects with role and content.
            tools: JSON schemas of tools.
            documents: Documents for retrieval templates.
            generation_prompt: End with the start of the assistant's turn.
            continue_final: End inside the last message, to continue it.
            variables: More variables; they override the special tokens.
            now: Time for ``strftime_now`` (default: the clock).

        Raises:
            ChatTemplateError: If a message is invalid, or the template fails, raises or exceeds a limit.
        """
        if generation_prompt and continue_final:
            raise ChatTemplateError("generation_prompt and continue_final cannot be combined")
        checked_messages = _messages(messages)
        final_text = _append_tag(checked_messages[-1]) if continue_final else None
        template_variables = {
            "messages": checked_messages,
            "tools": _dicts(tools, "tools"),
            "documents": _dicts(documents, "documents"),
            "add_generation_prompt": generation_prompt,
        }
        extra = _copy_plain_data(dict(variables or {}), "variables")
        if reserved := [key for key in extra if key in RESERVED_VARIABLES]:
            raise ChatTemplateError(f"the variable {reserved[0]!r} is a separate argument")
        name = self.choose(tools=tools is not None)
        output = render_template(
            self.templates[name], {**self.specials, **extra, **template_variables}, self.limits, now
        )
        if final_text is None:
            return RenderedChat(output.text, output.spans)
        text = _text_before_tag(output.text, final_text)
        generation_marks = output.spans and tuple(
            (start, min(end, len(text))) for start, end in output.spans if start < len(text)
        )
        return RenderedChat(text, generation_marks)


# ---------------------------------------------------------------- the conversation


def _messages(messages: Any) -> list[dict[str, Any]]:
    """Copy and check messages: a role, and a content (text, parts, null) unless it calls tools."""
    if not isinstance(messages, list | tuple):
        raise ChatTemplateError(f"messages must be a list, not {_kind(messages)}")
    if not messages:
        raise ChatTemplateError("there are no messages")
    form = 'a message is {"role": ..., "content": ...}'
    for index, message in enumerate(messages):
        path_in_messages = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise ChatTemplateError(f"{path_in_messages} is {_kind(message)}, not an object", form)
        if not isinstance(message.get("role"), str):
            problem = f"a role that is {_kind(message['role'])}" if "role" in message else "no role"
            raise ChatTemplateError(f"{path_in_messages} has {problem}", form)
        if "content" not in message and "tool_calls" not in message:
            raise ChatTemplateError(f"{path_in_messages} (role {message['role']!r}) has no content", form)
        content = message.get("content")
        has_parts = isinstance(content, list | tuple) and all(isinstance(part, Mapping) for part in content)
        if not (content is None or isinstance(content, str) or has_parts):
            label = (
                "contains an item that is not an object"
                if isinstance(content, list | tuple)
                else f"is {_kind(content)}"
            )
            raise ChatTemplateError(
                f"{path_in_messages}: its content {label}", "Use a text, or a list of parts {'type': ...}."
            )
    return [_copy_plain_data(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _dicts(values: Any, label: str) -> list[dict[str, Any]] | None:
    if values is None:
        return None
    if not isinstance(values, list | tuple):
        raise ChatTemplateError(f"{label} must be a list of objects, not {_kind(values)}")
    for index, value in enumerate(values):
        if not isinstance(value, Mapping):
            raise ChatTemplateError(f"{label}[{index}] is {_kind(value)}, not an object")
    return [_copy_plain_data(value, f"{label}[{index}]") for index, value in enumerate(values)]


def _copy_plain_data(value: Any, path_in_messages: str, depth: int = 0) -> Any:
    """Copy plain data for the sandbox; a ChatTemplateError names the place of other values."""
    if depth > MAX_NESTING:
        raise ChatTemplateError(f"{path_in_messages.partition('.')[0]} is nested more than {MAX_NESTING} levels deep")
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        if bad_keys := [key for key in value if not isinstance(key, str)]:
            raise ChatTemplateError(f"{path_in_messages} has the key {bad_keys[0]!r}, which is not a text")
        return {key: _copy_plain_data(item, f"{path_in_messages}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copy_plain_data(item, f"{path_in_messages}[{index}]", depth + 1) for index, item in enumerate(value)]
    raise ChatTemplateError(f"{path_in_messages} is {_kind(value)}: a template takes texts, numbers, lists and objects")


def _kind(value: object) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", type(None): "null", int: "a number", float: "a number"}
    return kinds.get(type(value), f"a {type(value).__name__}")


def _append_tag(message: dict[str, Any]) -> str:
    """Append the tag to the message's text (in place), and return the text."""
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


def _text_before_tag(text: str, final_text: str) -> str:
    """Return the text before the tag; if the template trimmed the tag's space, trim too."""
    if final_text.strip() not in text or _TAG.strip() not in text:
        raise ChatTemplateError("the final message is not in the rendered chat unchanged and cannot be continued")
    index = text.rindex(_TAG.strip())
    return text[:index] if text.startswith(_TAG, index) else text[:index].rstrip()


# ---------------------------------------------------------------- the files


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ChatTemplateError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ChatTemplateError(f"{path}: not UTF-8 at byte {error.start}") from None


def _read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; ``{}`` if the file does not exist."""
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
    """Read ``chat_template.jinja`` as default and ``additional_chat_templates/rag.jinja`` as rag."""
    paths = {path.stem: path for path in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))}
    if (folder / TEMPLATE_FILE).exists():
        paths = {"default": folder / TEMPLATE_FILE} | {name: path for name, path in paths.items() if name != "default"}
    return {name: _read(path) for name, path in paths.items()}


def _named(templates: Any, path: Path) -> dict[str, str]:
    """Return templates by name from a string, a list of {"name", "template"}, or an object."""
    if templates is None:
        return {}
    if isinstance(templates, str):
        return {"default": templates}
    if isinstance(templates, list) and all(isinstance(entry, dict) for entry in templates):
        templates = {entry.get("name"): entry.get("template") for entry in templates}
    if isinstance(templates, dict) and all(isinstance(text, str) for pair in templates.items() for text in pair):
        return templates
    raise ChatTemplateError(f'{path}: chat_template is neither a text nor a list of {{"name", "template"}}')


def _specials(config: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """Return transformers' variables; a config with the decoder precedes the map file."""
    added = _texts(config.get(ADDITIONAL))
    if "added_tokens_decoder" not in config:
        added += [token for token in _texts(table.get(ADDITIONAL)) if token not in added]
        config = {**config, **table}
    variables: dict[str, Any] = {role: _text(config.get(role)) for role in ROLES}
    extra = config.get(EXTRA)
    if isinstance(extra, dict):
        variables |= {name: _text(token) for name, token in extra.items()}
    return {name: token for name, token in {**variables, ADDITIONAL: added}.items() if token}


def _text(token: Any) -> str | None:
    """Return the text of ``"<s>"`` or ``{"content": "<s>", ...}``."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _texts(tokens: Any) -> list[str]:
    return [text for token in tokens if (text := _text(token))] if isinstance(tokens, list) else []


def template_fingerprint(folder: Path) -> str:
    """Return the fingerprint of a folder's template, or "" if none can be read."""
    try:
        template = ChatTemplate.load(folder)
    except ChatTemplateError:  # reported when the template is used
        return ""
    return "" if template is None else template.fingerprint()
