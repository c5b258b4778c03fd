"""How a chat becomes tokens: in the model's chat template, or as one growing text where it has none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import click

from kvad.text.detokenize import kept_ids

if TYPE_CHECKING:
    from kvad.text.chat import ChatTemplate
    from kvad.text.tokenizer import Tokenizer

__all__ = ["Dialogue", "Turn", "dialogue_of", "kept_ids"]


@dataclass(frozen=True)
class Turn:
    """What was typed (as it entered the text) and what came, as text and as ids."""

    typed: str
    typed_ids: tuple[int, ...]
    reply: str
    reply_ids: tuple[int, ...]


class Dialogue(Protocol):
    """``name``: what kind of chat this is, for /help and files."""

    name: str

    def entered(self, turns: Sequence[Turn], line: str) -> tuple[str, tuple[int, ...]]:
        """The line as it enters the chat, and its own ids where a turn has such."""
        ...

    def prompt(self, turns: Sequence[Turn], typed: str, ids: Sequence[int]) -> list[int]:
        """Everything that the model is to go on from."""
        ...


def dialogue_of(folder: Path, tokenizer: Tokenizer, system: str | None) -> Dialogue:
    """In the template of the model's folder, where there is one.  ``system``: what the model is told first."""
    from kvad.text.chat import ChatTemplate

    template = ChatTemplate.load(folder)
    if template is not None:
        return Templated(template, tokenizer, system)
    if system is not None:
        from kvad.errors import UsageError

        raise UsageError("--system needs a chat template, and this model has none", "type it as the first line")
    return Plain(tokenizer)


class Plain:
    """One growing text.  History is kept as ids, so that each turn begins with exactly the tokens of the last one."""

    name = "plain continuation: each line is a line of the text, and the model goes on"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def entered(self, turns: Sequence[Turn], line: str) -> tuple[str, tuple[int, ...]]:
        """On a line of its own, unless it ends with a backslash."""
        text = "".join(turn.typed + turn.reply for turn in turns)
        before = "\n" if text and not text.endswith("\n") else ""
        typed = before + (line[:-1] if line.endswith("\\") else f"{line}\n" if line else "")
        return typed, tuple(self._tokenizer.encode(typed))

    def prompt(self, turns: Sequence[Turn], typed: str, ids: Sequence[int]) -> list[int]:
        return [token for turn in turns for token in (*turn.typed_ids, *turn.reply_ids)] + list(ids)


class Templated:
    """Messages in the model's own template.  Special tokens that a message spells out would be read as such: said once
    per message."""

    name = "the model's own chat template"

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, system: str | None) -> None:
        self._template, self._tokenizer, self._system = template, tokenizer, system

    def entered(self, turns: Sequence[Turn], line: str) -> tuple[str, tuple[int, ...]]:
        spelled = [name for name in self._tokenizer.specials.names() if name and name in line]
        if spelled:
            click.echo(f"kvad: {spelled[0]} in your text is a special token, and will be read as one", err=True)
        return line, tuple(self._tokenizer.encode(line))

    def prompt(self, turns: Sequence[Turn], typed: str, ids: Sequence[int]) -> list[int]:
        messages = [{"role": "system", "content": self._system}] if self._system is not None else []
        for turn in turns:
            messages += [{"role": "user", "content": turn.typed}, {"role": "assistant", "content": turn.reply}]
        messages.append({"role": "user", "content": typed})
        text = self._template.render(messages, generation_prompt=True).text
        return self._tokenizer.encode(text, specials=True)
