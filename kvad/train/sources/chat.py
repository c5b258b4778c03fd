"""Conversations whose assistant turns are learned: JSONL files of ``{"messages": [...]}``.

A conversation becomes text by the model's chat template, as at inference. The template marks the assistant's text
(``{% generation %}``), or it is found by rendering: turn i is what the first i + 1 messages add to the first i and the
generation prompt::

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n   Hello<|im_end|>   \\n
    input                                                     target           input

So a turn begins where generation will begin, and ends with the token that ends generation; blanks that the template
adds after it are input. Each part is encoded separately, as the prompt will be, so no token spans two parts. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvad import text as text_lib
from kvad.errors import ChatTemplateError, DataError
from kvad.text import Tokenizer
from kvad.train.sources.examples import EncodedColumns, Example, ExampleBatch, ExampleCorpus
from kvad.train.sources.formats import read_json_objects

ROLES: tuple[str, ...] = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")  # special tokens that a template may name
SPECIAL_TOKENS_COMMENT = "{# the template, behind what a special token is #}"
CHATML_TOKENS: tuple[str, ...] = ("<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

ChatTemplate = text_lib.chat_template.ChatTemplate


class Conversation(NamedTuple):
    """Messages and tools of one conversation."""

    messages: list[Mapping[str, Any]]
    tools: list[Mapping[str, Any]] | None


@dataclass(frozen=True, kw_only=True)
class ChatCorpus(ExampleCorpus[Conversation]):
    """Conversations rendered by a chat template."""

    template: ChatTemplate

    noun = "conversation"
    columns = {"mask": "uint8"}  # noqa: RUF012  (never written)

    def read(self, path: Path) -> Iterator[Example[Conversation] | None]:
        for number, content in read_json_objects(path, self.errors):
            messages, tools = content.get("messages"), content.get("tools")
            if not isinstance(messages, list) or not messages:
                raise DataError(
                    f'{path}, line {number}: a conversation is {{"messages": [...]}}',
                    "Each message has a role and a content.",
                )
            for index, message in enumerate(messages):
                if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                    raise DataError(f"{path}, line {number}: messages[{index}] has no role")
                if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
                    raise DataError(f"{path}, line {number}: messages[{index}] has no content")
            if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
                raise DataError(f"{path}, line {number}: tools must be a list of objects")
            answers = any(message["role"] == "assistant" for message in messages)
            yield Example(number, Conversation(messages, tools)) if answers else None

    def tokenizer_texts(self, content: Conversation) -> Iterable[str]:
        return [text for message in content.messages if isinstance(text := message.get("content"), str)]

    def encode_batch(self, tokenizer: Tokenizer, many: ExampleBatch[Conversation]) -> Iterator[EncodedColumns]:
        template = with_tokenizer_specials(self.template, tokenizer)
        for path, example in many:
            try:
                text, spans = render_with_spans(template, example.content, tokenizer.special_tokens.names())
                ids, mask = encode_with_mask(tokenizer, text, spans)
            except (ChatTemplateError, DataError) as error:
                raise DataError(f"{path}, line {example.line}: {error.message}", error.hint) from error
            yield ids, {"mask": mask}

    def settings(self) -> dict[str, Any]:
        templates = self.template.templates.items()
        sources = {name: source.rpartition(SPECIAL_TOKENS_COMMENT)[2] for name, source in templates}
        return {**super().settings(), "template": sources}

    def template_files(self, tokenizer: Tokenizer) -> dict[str, bytes]:
        """Return the template with its special tokens set in it, so that it renders the same with other settings."""
        files, specials = {}, with_tokenizer_specials(self.template, tokenizer).specials
        for name, source in self.template.templates.items():
            values = {f"{role}_token": specials.get(f"{role}_token", "") for role in ROLES}
            prefix = "".join(f"{{% set {key} = {json.dumps(text)} %}}" for key, text in values.items() if key in source)
            path = "chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja"
            is_complete = SPECIAL_TOKENS_COMMENT in source or not prefix
            files[path] = (source if is_complete else prefix + SPECIAL_TOKENS_COMMENT + source).encode()
        return files


def with_tokenizer_specials(template: ChatTemplate, tokenizer: Tokenizer) -> ChatTemplate:
    """Return the template with a tokenizer's special tokens where it has none of its own."""
    names = {token: name for name, token in tokenizer.special_tokens.names().items()}
    tokens = ((role, getattr(tokenizer.special_tokens, role)) for role in ROLES)
    roles = {f"{role}_token": names[token] for role, token in tokens if token in names}
    return ChatTemplate(template.templates, {**roles, **template.specials})


def chatml(tokenizer: Tokenizer | None) -> str:
    """Return ChatML; if the tokenizer has no <|im_end|>, a turn ends with the token that ends a text."""
    if tokenizer is None or CHATML_TOKENS[1] in tokenizer.special_tokens.names():
        return CHATML
    specials = tokenizer.special_tokens
    end = specials.separator if specials.eos is None else specials.eos
    named = [name for name, token in specials.names().items() if token == end]
    return CHATML.replace(CHATML_TOKENS[1], named[0]) if named else CHATML


def render_with_spans(
    template: ChatTemplate, conversation: Conversation, specials: Iterable[str]
) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Return a conversation's text and the character ranges [start, end) of the assistant.

    Blanks after one of the special tokens ``specials`` that ends a turn are not in its range. Raises ChatTemplateError
    if the template does not append messages one after the other.
    """
    messages, tools = conversation

    def render_prefix(count: int, *, prompt: bool = False) -> str:
        return template.render(messages[:count], tools=tools, generation_prompt=prompt).text

    rendered = template.render(messages, tools=tools)
    if rendered.spans:
        return rendered.text, rendered.spans
    names, spans = tuple(specials), []
    for number, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        if not number:
            raise ChatTemplateError("messages[0] is the assistant's and has no prompt", "Begin with another role.")
        before, after = render_prefix(number, prompt=True), render_prefix(number + 1)
        if not after.startswith(before) or not rendered.text.startswith(after):
            raise ChatTemplateError(
                f"messages[{number}]: the chat template does not render it as a prompt and its answer",
                "Put {% generation %} ... {% endgeneration %} around the assistant's text.",
            )
        stripped = after.rstrip()
        end = stripped if stripped.endswith(names) and len(stripped) > len(before) else after
        spans.append((len(before), len(end)))
    return rendered.text, tuple(spans)


def encode_with_mask(tokenizer: Tokenizer, text: str, spans: Iterable[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Return the ids of a text, and 1 for each id in a span.

    Each part is encoded separately. If that changes the text (SentencePiece adds a space to each), the whole text is
    encoded; DataError if a token then spans a boundary.
    """
    parts, at = list[tuple[str, int]](), 0
    for start, end in spans:
        parts += [(text[at:start], 0), (text[start:end], 1)]
        at = end
    parts = [(part, flag) for part, flag in [*parts, (text[at:], 0)] if part]
    pieces = tokenizer.encode_batch((part for part, _ in parts), specials=True)
    ids = [token for piece in pieces for token in piece]
    whole = tokenizer.encode(text, specials=True)
    if ids == whole or tokenizer.decode(ids, skip_specials=False) == tokenizer.decode(whole, skip_specials=False):
        return ids, [flag for (_, flag), piece in zip(parts, pieces, strict=True) for _ in piece]
    return whole, _aligned_mask(tokenizer, whole, parts)


def _aligned_mask(tokenizer: Tokenizer, ids: list[int], parts: list[tuple[str, int]]) -> list[int]:
    """Return 1 for each token in a span, by the bytes that tokens add to the text."""
    decoder = tokenizer.incremental_decoder(skip_specials=False)
    sizes = [len(decoder(token)) for token in ids]
    mask, token = list[int](), 0
    for part, flag in parts:
        left = len(part.encode())
        while token < len(ids) and sizes[token] <= left and (left or not sizes[token]):
            left -= sizes[token]
            mask.append(flag)
            token += 1
        if left:
            raise DataError(
                "a token of this tokenizer spans the prompt and the assistant's text",
                "Use a template whose turns begin after a special token or a line break.",
            )
    if token != len(ids):
        raise DataError("this tokenizer does not decode a conversation to its text, so no mask is exact")
    return mask
