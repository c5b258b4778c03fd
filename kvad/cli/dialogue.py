"""How a chat becomes tokens: in the model's chat template, or as one growing text where it has none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import click

from kvad.text.detokenize import ids_of_text

if TYPE_CHECKING:
    from kvad.text.chat import ChatTemplate
    from kvad.text.tokenizer import Tokenizer

__all__ = ["ChatFormat", "ChatTurn", "choose_chat_format", "ids_of_text"]


@dataclass(frozen=True)
class ChatTurn:
    """What was typed (as it entered the text) and what came, as text and as ids."""

    user_text: str
    user_ids: tuple[int, ...]
    reply: str
    reply_ids: tuple[int, ...]


class ChatFormat(Protocol):
    """``name``: what kind of chat this is, for /help and files."""

    name: str

    def encode_turn(self, turns: Sequence[ChatTurn], line: str) -> tuple[str, tuple[int, ...]]:
        """The line as it enters the chat, and its own ids where a turn has such."""
        ...

    def prompt(self, turns: Sequence[ChatTurn], typed: str, ids: Sequence[int]) -> list[int]:
        """Everything that the model is to go on from."""
        ...


def choose_chat_format(folder: Path, tokenizer: Tokenizer, system: str | None) -> ChatFormat:
    """In the template of the model's folder, where there is one.  ``system``: what the model is told first."""
    from kvad.text.chat import ChatTemplate

    template = ChatTemplate.load(folder)
    if template is not None:
        return TemplatedChat(template, tokenizer, system)
    if system is not None:
        from kvad.errors import UsageError

        raise UsageError("--system needs a chat template, and this model has none", "type it as the first line")
    return PlainText(tokenizer)


class PlainText:
    """One growing text.  History is kept as ids, so that each turn begins with exactly the tokens of the last one."""

    name = "plain continuation: each line is a line of the text, and the model goes on"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode_turn(self, turns: Sequence[ChatTurn], line: str) -> tuple[str, tuple[int, ...]]:
        """On a line of its own, unless it ends with a backslash."""
        text = "".join(turn.user_text + turn.reply for turn in turns)
        before = "\n" if text and not text.endswith("\n") else ""
        typed = before + (line[:-1] if line.endswith("\\") else f"{line}\n" if line else "")
        return typed, tuple(self._tokenizer.encode(typed))

    def prompt(self, turns: Sequence[ChatTurn], typed: str, ids: Sequence[int]) -> list[int]:
        return [token for turn in turns for token in (*turn.user_ids, *turn.reply_ids)] + list(ids)


class TemplatedChat:
    """Messages in the model's own template.  Special tokens that a message spells out would be read as such: said once
    per message."""

    name = "the model's own chat template"

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, system: str | None) -> None:
        self._template, self._tokenizer, self._system = template, tokenizer, system

    def encode_turn(self, turns: Sequence[ChatTurn], line: str) -> tuple[str, tuple[int, ...]]:
        spelled = [name for name in self._tokenizer.special_tokens.names() if name and name in line]
        if spelled:
            click.echo(f"kvad: {spelled[0]} in your text is a special token, and will be read as one", err=True)
        return line, tuple(self._tokenizer.encode(line))

    def prompt(self, turns: Sequence[ChatTurn], typed: str, ids: Sequence[int]) -> list[int]:
        messages = [{"role": "system", "content": self._system}] if self._system is not None else []
        for turn in turns:
            messages += [{"role": "user", "content": turn.user_text}, {"role": "assistant", "content": turn.reply}]
        messages.append({"role": "user", "content": typed})
        text = self._template.render(messages, generation_prompt=True).text
        return self._tokenizer.encode(text, specials=True)
