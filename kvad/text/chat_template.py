"""Chat templates: convert messages to the exact text that a model was trained on.

A template is a Jinja program that comes with the model: ``chat_template.jinja`` (others of the same model in
``additional_chat_templates/``), or ``chat_template`` in ``tokenizer_config.json`` or ``chat_template.json``. The output
equals that of ``transformers.apply_chat_template(tokenize=False)`` character by character; special tokens appear by
name, so encode it with ``encode(text, specials=True)``.

Templates are untrusted code: ``template_worker.py`` renders them with Jinja's immutable sandbox in a process without
torch that is started once and renders any number of templates, with limits of work, memory and output. Work is counted
in steps, the same on every machine; CPU time only ends single operations that never return, and memory those that
hoard: then the process ends, and the next render starts another. Only the calling thread waits. Input is plain data
only: str, int, float, bool, None, lists and dicts; a tuple becomes a list. No torch.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import blake2b
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

from kvad.errors import ChatTemplateError, TokenizerError, suggest
from kvad.text.hf_config import CONFIG_NAME, SPECIAL_TOKENS_MAP, read_optional_object, read_text, token_name

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"
LEGACY_FILE = "chat_template.json"
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
ADDITIONAL, EXTRA = "additional_special_tokens", "extra_special_tokens"

_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # same as in transformers; its space shows whether the template trims messages

MAX_SOURCE = 1 << 16  # characters of a template; the longest in use have about 30,000
MAX_NESTING = 200  # levels of lists and objects within each other
MAX_WORKERS = 4  # renders at the same time, each in a process of about 20 MB
MAX_SPANS = 16 << 20  # bytes of a reply in addition to its text
START_SECONDS, WAIT_FACTOR = 60.0, 6.0  # a render waits so long, and for each second of CPU, on a busy machine
T = TypeVar("T")
START = "import sys; sys.path += sys.argv[1:]; from template_worker import main; main()"


@dataclass(frozen=True)
class RenderLimits:
    """Limits of one render. Its memory is limited by ``template_worker.MAX_MEMORY``, on Linux."""

    steps: int = 10_000_000  # lines of Python, of compiling and of rendering; about 20,000 messages
    seconds: float = 10.0  # CPU time of both, for single operations that take long
    output: int = 4 << 20  # characters


@dataclass(frozen=True)
class RenderedChat:
    """Rendered text, and the positions of its ``{% generation %}`` blocks, the assistant's (see ``spans``)."""

    text: str
    generation_marks: tuple[tuple[int, int], ...] | None = ()  # in order; None if a block is part of another text

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
    """Templates of one model (a source, or sources by name) and its special tokens. Immutable and thread-safe.

    ``specials`` are the texts of variables such as ``bos_token``; ``name`` is the template to use always.
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
        config, legacy, table = (
            _read(read_optional_object, folder / file) for file in (CONFIG_NAME, LEGACY_FILE, SPECIAL_TOKENS_MAP)
        )
        templates = _own_files(folder)
        for file, content in ((CONFIG_NAME, config), (LEGACY_FILE, legacy)):
            templates = templates or _named(content.get("chat_template"), folder / file)
        return cls(templates, _specials(config, table), name=name, limits=limits) if templates else None

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
        copied_messages = _copy_messages(messages)
        final_text = _append_tag(copied_messages[-1]) if continue_final else None
        template_variables = {
            "messages": copied_messages,
            "tools": None if tools is None else _copy_objects(tools, "tools"),
            "documents": None if documents is None else _copy_objects(documents, "documents"),
            "add_generation_prompt": generation_prompt,
        }
        extra = _copy_plain_data(dict(variables or {}), "variables")
        if reserved := [key for key in extra if key in template_variables]:
            raise ChatTemplateError(f"the variable {reserved[0]!r} is a separate argument")
        name = self.choose(tools=tools is not None)
        chat = render_template(self.templates[name], {**self.specials, **extra, **template_variables}, self.limits, now)
        if final_text is None:
            return chat
        text, marks = _text_before_tag(chat.text, final_text), chat.generation_marks
        size = len(text)
        return RenderedChat(text, marks and tuple((start, min(end, size)) for start, end in marks if start < size))


# ---------------------------------------------------------------- the conversation


def _copy_messages(messages: Any) -> list[dict[str, Any]]:
    """Copy and check messages: a role, and a content (text, parts, null) unless it calls tools."""
    form = 'a message is {"role": ..., "content": ...}'
    copies = _copy_objects(messages, "messages", form)
    if not copies:
        raise ChatTemplateError("there are no messages")
    for index, message in enumerate(copies):
        if not isinstance(message.get("role"), str):
            problem = f"a role that is {_kind(message['role'])}" if "role" in message else "no role"
            raise ChatTemplateError(f"messages[{index}] has {problem}", form)
        if "content" not in message and "tool_calls" not in message:
            raise ChatTemplateError(f"messages[{index}] (role {message['role']!r}) has no content", form)
        content = message.get("content")
        is_list = isinstance(content, list)
        if not (content is None or isinstance(content, str) or (is_list and all(isinstance(p, dict) for p in content))):
            problem = "contains an item that is not an object" if is_list else f"is {_kind(content)}"
            hint = "Use a text, or a list of parts {'type': ...}."
            raise ChatTemplateError(f"messages[{index}]: its content {problem}", hint)
    return copies


def _copy_objects(values: Any, label: str, hint: str = "") -> list[dict[str, Any]]:
    if not isinstance(values, list | tuple):
        raise ChatTemplateError(f"{label} must be a list of objects, not {_kind(values)}", hint)
    for index, value in enumerate(values):
        if not isinstance(value, Mapping):
            raise ChatTemplateError(f"{label}[{index}] is {_kind(value)}, not an object", hint)
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
    if isinstance(message.get("content"), list):
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


# ---------------------------------------------------------------- rendering in child processes


def render_template(
    source: str, values: dict[str, Any], limits: RenderLimits, now: datetime | None = None
) -> RenderedChat:
    """Render a template with plain data, from any thread; each worker compiles it once.

    Raises:
        ChatTemplateError: If the template is wrong, rejects its variables or exceeds a limit.
    """
    if len(source) > MAX_SOURCE:
        raise ChatTemplateError(f"the chat template has {len(source):,} characters; the limit is {MAX_SOURCE:,}")
    clock = (now or datetime.now()).isoformat()
    request = {"source": source, "values": values, "now": clock, "seconds": limits.seconds}
    request |= {"max_output": limits.output, "max_steps": limits.steps}
    body = json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass")
    pool = _pool(os.getpid())
    worker = pool.get()
    try:
        if worker is None or not worker.is_alive():
            worker = _Worker()
        reply = worker.exchange(body, limits)
    finally:
        pool.put(worker)
    if "error" in reply:
        raise ChatTemplateError(reply["error"])
    spans = reply["spans"]
    return RenderedChat(reply["text"], None if spans is None else tuple((start, end) for start, end in spans))


@functools.cache
def _pool(pid: int) -> queue.LifoQueue[_Worker | None]:
    """Return the idle workers of a process, not of its parent; None is one to start."""
    pool = queue.LifoQueue[_Worker | None]()
    for _ in range(MAX_WORKERS):
        pool.put(None)
    return pool


class _Worker:
    """Child process that renders one template at a time and ends with this process."""

    def __init__(self) -> None:
        self._socket, child_end = socket.socketpair()
        self._reader = self._socket.makefile("rb")
        command = [sys.executable, "-I", "-c", START, str(Path(__file__).parent), *filter(None, sys.path)]
        with child_end:
            self._process = subprocess.Popen(
                command,
                stdin=child_end.fileno(),
                stdout=child_end.fileno(),
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # the terminal's Ctrl-C is for this process
            )
        self.stop = weakref.finalize(self, _stop, self._process, self._socket, self._reader)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def exchange(self, body: bytes, limits: RenderLimits) -> dict[str, Any]:
        """Send a request and return the reply, or an "error" that describes how the process ended."""
        wait = START_SECONDS + WAIT_FACTOR * limits.seconds
        size, reply = 0, b""
        self._socket.settimeout(wait)
        try:
            self._socket.sendall(len(body).to_bytes(8) + body)
            size = int.from_bytes(self._reader.read(8))
            reply = self._reader.read(size) if size <= 8 * limits.output + MAX_SPANS else b""
        except TimeoutError:
            return {"error": f"the chat template took more than {wait:g} s"}
        except OSError:  # the process ended before it read everything
            pass
        finally:
            if not 0 < size == len(reply):
                self.stop()  # after KeyboardInterrupt, too: the next request must not get this one's reply
        if self.stop.alive:
            answer: dict[str, Any] = json.loads(reply.decode("utf-8", "surrogatepass"))
            return answer
        status = self._process.returncode
        endings = {-signal.SIGPROF: f"took more than {limits.seconds:g} s of CPU", errno.ENOMEM: "ran out of memory"}
        return {"error": f"the chat template {endings.get(status, f'ended its process with status {status}')}"}


def _stop(process: subprocess.Popen[bytes], connection: socket.socket, reader: BufferedReader) -> None:
    """End a child process; in a fork of its parent, only close the connection."""
    process.kill()
    process.wait()
    reader.close()
    connection.close()


# ---------------------------------------------------------------- the files


def _read(read: Callable[[Path], T], path: Path) -> T:
    try:
        return read(path)
    except TokenizerError as error:
        raise ChatTemplateError(error.message, error.hint) from error.__cause__


def _own_files(folder: Path) -> dict[str, str]:
    """Read ``chat_template.jinja`` as default and ``additional_chat_templates/rag.jinja`` as rag."""
    paths = {path.stem: path for path in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))}
    if (folder / TEMPLATE_FILE).exists():
        paths = {"default": folder / TEMPLATE_FILE} | {name: path for name, path in paths.items() if name != "default"}
    return {name: _read(read_text, path) for name, path in paths.items()}


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
    variables: dict[str, Any] = {role: token_name(config.get(role)) for role in ROLES}
    extra = config.get(EXTRA)
    if isinstance(extra, dict):
        variables |= {name: token_name(token) for name, token in extra.items()}
    return {name: token for name, token in {**variables, ADDITIONAL: added}.items() if token}


def _texts(tokens: Any) -> list[str]:
    return [text for token in tokens if (text := token_name(token))] if isinstance(tokens, list) else []


class ChatTemplates:
    """Templates of a model and of its adapters by name (the model's: ""), each loaded when it is first used."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self.folders = folders
        self._templates: dict[str, ChatTemplate | None] = {}

    def find(self, adapter: str = "") -> ChatTemplate | None:
        """Return the template of an adapter, else the model's, if there is one."""
        if adapter not in self._templates:
            folder = self.folders.get(adapter)
            template = None if folder is None else ChatTemplate.load(folder)
            self._templates[adapter] = self.find() if template is None and adapter else template
        return self._templates[adapter]


def template_fingerprint(folder: Path) -> str:
    """Return the fingerprint of a folder's template, or "" if none can be read."""
    try:
        template = ChatTemplate.load(folder)
    except ChatTemplateError:  # reported when the template is used
        return ""
    return "" if template is None else template.fingerprint()
