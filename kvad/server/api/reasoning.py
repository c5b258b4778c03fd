"""Reasoning: the thoughts that a model writes before its answer, and the messages of gpt-oss (harmony).

The marks of thoughts follow from the chat template. An answer begins in its thoughts if the prompt ends in them; else a
start mark counts only at the beginning of an answer. Thoughts without an end mark continue to the end of the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvad.engine import StreamChunk
from kvad.server.api.tool_formats import HARMONY, HARMONY_RULES, Thoughts, ToolCall, literal
from kvad.server.api.tools import ToolCallParser, split_at

State = Literal["start", "reasoning", "content", "call"]  # of a text at one position; "start": not decided yet
PROMPT_TOKENS = 32  # at the end of a prompt, that have the marks of its last line

_TAG = re.compile(r"\{[%{](.*?)[%}]\}", re.DOTALL)  # expressions and statements of Jinja, without comments
_STRING = re.compile(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"")
_BREAK = r"BREAK: /[ \t\r\n]{1,8}/"  # between thoughts and an answer
_ANALYSIS, _FINAL, _MESSAGE = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_OPENINGS = ("<|start|>", "<|channel|>", _MESSAGE, "to=")  # of the header of a message


@dataclass(frozen=True)
class ReasoningFormat:
    """Marks before and after thoughts.

    Attributes:
        start: Mark before thoughts.
        end: Mark after them.
        sign: Text of the chat template; "": the start mark.
        special: Special token with which the start mark begins; "": the mark is a token itself, or text.
        answer: Marks around the answer after thoughts, which are no content; "": there are none.
    """

    start: str
    end: str
    sign: str = ""
    special: str = ""
    answer: tuple[str, str] = ("", "")

    @property
    def all_marks(self) -> tuple[str, ...]:
        """All marks, which are special tokens in many models."""
        return HARMONY.all_marks if self is HARMONY_CHANNELS else (self.special or self.start, self.end)

    def state_after(self, prompt: str, final: str | None) -> State:
        """Return the state in which an answer begins.

        Args:
            prompt: End of the prompt.
            final: Text of the message that the answer continues; None: it begins a message.
        """
        if final:
            _, mark, thoughts = final.partition(self.start)
            begins = mark and final.lstrip().startswith(self.start)
            return "reasoning" if begins and self.end not in thoughts else "content"
        if self is HARMONY_CHANNELS:
            return "start"
        prompt = prompt.rstrip()
        return "reasoning" if prompt.endswith(self.start) else "content" if prompt.endswith(self.end) else "start"

    def grammar(self, state: State) -> Thoughts:
        """Return the grammar of the thoughts of an answer that begins in a state."""
        if state == "content":
            return Thoughts()
        if self is HARMONY_CHANNELS:
            return Thoughts(f"({literal(_ANALYSIS)} body START)*", ("FREE: TEXT", *HARMONY_RULES), literal(_FINAL))
        opened = r"(.|\n)*" if state == "reasoning" else rf"\s*{re.escape(self.start)}(.|\n)*"
        free = "FREE: TEXT" if state == "reasoning" else f"FREE: TEXT & ~/{opened}/"
        rules = f"thoughts[suffix={literal(self.end)}]: /{opened}/", _BREAK, free
        return Thoughts("thoughts BREAK?" if state == "reasoning" else "(thoughts BREAK?)?", rules)


HARMONY_CHANNELS = ReasoningFormat(_ANALYSIS, "<|end|>")
SWITCHES = ("enable_thinking", "thinking")  # of Qwen3, SmolLM3 and GLM 4.5; of DeepSeek V3.1 and Granite
EFFORT = "reasoning_effort"
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
FORMATS = (
    ReasoningFormat("<|channel>thought", "<channel|>", sign="<|channel>", special="<|channel>"),  # Gemma 4
    ReasoningFormat(
        "<think>", "</think>", "<response></response>", answer=("<response>", "</response>")
    ),  # Granite 3.3
    ReasoningFormat("Here is my thought process:", "Here is my response:"),  # Granite 3.2
    ReasoningFormat("<seed:think>", "</seed:think>"),
    ReasoningFormat("[THINK]", "[/THINK]"),  # Magistral
    ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ReasoningFormat("<think>", "</think>"),  # Qwen3, DeepSeek, GLM 4.5, SmolLM3, MiniMax M2 and most others
)


def find_reasoning(template: str) -> ReasoningFormat | None:
    """Return the marks of the thoughts of a chat template's model; None if it has none."""
    if all(sign in template for sign in HARMONY.signs):
        return HARMONY_CHANNELS
    return next((each for each in FORMATS if (each.sign or each.start) in template), None)


def thinking_variables(template: str) -> dict[str, list[bool] | list[str]]:
    """Return the variables of a chat template that turn thoughts on and off or set their length, with their values.

    The values of ``reasoning_effort`` are those that the template has as strings; gpt-oss inserts any, and was trained
    with low, medium and high.
    """
    code = " ".join(_STRING.sub("''", tag) for tag in _TAG.findall(template))
    efforts = [effort for effort in EFFORTS if re.search(rf"(['\"]){effort}\1", template)]
    values: dict[str, list[bool] | list[str]] = {name: [True, False] for name in SWITCHES}
    values[EFFORT] = efforts if len(efforts) > 1 else ["low", "medium", "high"]
    return {name: each for name, each in values.items() if re.search(rf"(?<![\w.]){name}\b", code)}


class Parts(NamedTuple):
    """New text of an answer by its kind, and the calls that are complete."""

    reasoning: str
    content: str
    calls: list[ToolCall]


def _join(parts: Sequence[Parts]) -> Parts:
    reasoning, content = "".join(part.reasoning for part in parts), "".join(part.content for part in parts)
    return Parts(reasoning, content, [call for part in parts for call in part.calls])


class AnswerParser:
    """Separates the text of one sample into reasoning, content and calls, as it arrives.

    Args:
        form: Marks of thoughts; None: there are none.
        state: State in which the text begins.
        calls: Parser of the content; None: it has no calls.
        separates: False: thoughts are content, with all marks; a mark of a call inside them has no meaning.
    """

    def __init__(
        self, form: ReasoningFormat | None, state: State, calls: ToolCallParser | None, *, separates: bool = True
    ) -> None:
        self._form, self._calls, self._separates = form, calls, separates
        # A model may write the start mark although the prompt ends with it.
        self._state: State = "content" if form is None or state == "content" else "start"
        self._default: State = "reasoning" if state == "reasoning" else "content"  # of a text without a start mark
        self._pending = ""
        self._skips_space = False  # white space before the next text is dropped
        self._answer: Literal["", "before", "inside"] = ""  # position of the content in the marks around an answer
        self.num_reasoning_tokens = 0

    @staticmethod
    def of(
        form: ReasoningFormat | None, state: State, calls: ToolCallParser | None, *, separates: bool = True
    ) -> AnswerParser:
        if form is HARMONY_CHANNELS:
            return HarmonyParser(form, state, calls) if separates else AnswerParser(None, "content", calls)
        return AnswerParser(form, state, calls, separates=separates)

    @property
    def num_calls(self) -> int:
        return 0 if self._calls is None else self._calls.num_calls

    @property
    def in_reasoning(self) -> bool:
        """True if the text so far ends in thoughts."""
        return "reasoning" in (self._state, self._default if self._state == "start" else "")

    def read(self, chunks: Iterable[StreamChunk], *, is_last: bool) -> Parts:
        """Add the next chunks, count the tokens of thoughts, and return what is new."""
        return _join(self.read_in_order(chunks, is_last=is_last))

    def read_in_order(self, chunks: Iterable[StreamChunk], *, is_last: bool) -> list[Parts]:
        """Do the same as ``read``; in each of the results thoughts precede content, and content precedes calls."""
        groups, last_kind = [list[Parts]()], 0  # kind: 0 thoughts, 1 content, 2 calls
        for part in self._read_each(chunks, is_last):
            kinds = [kind for kind, value in enumerate(part) if value]
            if kinds and kinds[0] < last_kind:
                groups.append([])
            last_kind = kinds[-1] if kinds else last_kind
            groups[-1].append(part)
        return list(map(_join, groups))

    def _read_each(self, chunks: Iterable[StreamChunk], is_last: bool) -> Iterator[Parts]:
        for chunk in chunks:
            was_in_reasoning = self.in_reasoning
            yield self.push(chunk.text)
            self.num_reasoning_tokens += chunk.token_id is not None and (was_in_reasoning or self.in_reasoning)
        if is_last:
            yield self.push("", is_last=True)

    def push(self, text: str, *, is_last: bool = False) -> Parts:
        """Add text; return what is new. After the last text, incomplete marks are text."""
        self._pending += text
        all_text, before = self._pending, ""
        reasoning = "" if self._form is None else self._take_reasoning(self._form, is_last)
        if not self._separates:
            before, reasoning = all_text[: len(all_text) - len(self._pending)], ""
            self._skips_space, self._answer = False, ""
        if self._state != "content":
            return Parts(reasoning, before, [])
        content, self._pending = self._pending, ""
        if self._skips_space:
            content = content.lstrip()
            self._skips_space = not content
        if self._answer and self._form is not None:
            content = self._unwrap(content, self._form.answer, is_last)
        if self._calls is None:
            return Parts(reasoning, before + content, [])
        content, calls = self._calls.finish(content) if is_last else self._calls.push(content)
        return Parts(reasoning, before + content, calls)

    def _unwrap(self, text: str, marks: tuple[str, str], is_last: bool) -> str:
        """Return content without the mark at its beginning and the one at its end; text that may be one is kept."""
        start, end = marks
        if self._answer == "before":
            if len(text) < len(start) and start.startswith(text) and not is_last:
                self._pending = text
                return ""
            self._answer = "inside" if text.startswith(start) else ""
            if self._answer:
                text = text[len(start) :].lstrip()
                self._skips_space = not text
        if not self._answer:
            return text
        before, mark, after = text.rpartition(end)
        is_end = bool(mark) and not after.strip()
        if is_last:
            return before if is_end else text
        self._pending = mark + after if is_end else split_at(text[1 - len(end) :], (end,))[2]
        return text[: len(text) - len(self._pending)]

    def _take_reasoning(self, form: ReasoningFormat, is_last: bool) -> str:
        """Return the thoughts in the pending text, without the white space around them."""
        if self._state == "start":
            text = self._pending.lstrip()
            if len(text) < len(form.start) and form.start.startswith(text) and not is_last:
                return ""
            has_mark = text.startswith(form.start)
            self._state = "reasoning" if has_mark else self._default
            if self._state == "reasoning":
                self._pending, self._skips_space = text[len(form.start) * has_mark :], True
        if self._state != "reasoning":
            return ""
        text, mark, rest = split_at(self._pending, (form.end,))
        if is_last and not mark:
            text, rest = text + rest, ""
        reasoning = text.rstrip()
        if mark:
            self._state, self._pending, self._answer = "content", rest, "before" if form.answer[0] else ""
        else:
            self._pending = "" if is_last else text[len(reasoning) :] + rest
        if self._skips_space:
            reasoning = reasoning.lstrip()
        self._skips_space = bool(mark) or (self._skips_space and not reasoning)
        return reasoning


class HarmonyParser(AnswerParser):
    """Separates messages of harmony: a header with a channel or a function, ``<|message|>``, a text and an end mark.

    The channel ``analysis`` is reasoning; a message to a function is its call; all others are content.
    """

    def __init__(self, form: ReasoningFormat | None, state: State, calls: ToolCallParser | None) -> None:
        super().__init__(form, state, calls)
        self._state, self._header, self._default = state, "", "content"
        self._known, self._is_new = set[State](), True  # states that had text; no text of this message is passed on

    def push(self, text: str, *, is_last: bool = False) -> Parts:
        """Add text; return what is new. A message without a header is content."""
        self._pending += text
        texts, calls = {"reasoning": "", "content": ""}, list[ToolCall]()
        while self._state != "start" or self._read_header(is_last):
            body, mark, rest = split_at(self._pending, _ENDS)
            if is_last and not mark:
                body, rest = body + rest, ""
            if self._state != "call":
                texts[self._state] += self._with_break(body)
            elif mark or is_last:
                raw = self._header + body
                content, found = (raw + mark, []) if self._calls is None else self._calls.read(raw, mark)
                texts["content"], calls = texts["content"] + content, calls + found
            else:
                rest = self._pending
            self._pending = rest
            if not mark:
                break
            self._state = "start"
        return Parts(texts["reasoning"], texts["content"], calls)

    def _with_break(self, text: str) -> str:
        """Return the text of a message, after an empty line if an earlier message has the same kind."""
        if not text or not self._is_new:
            return text
        is_first, self._is_new = self._state not in self._known, False
        self._known.add(self._state)
        return text if is_first else f"\n\n{text}"

    def _read_header(self, is_last: bool) -> bool:
        """Set the state of the next message; return False if its header is incomplete."""
        header, mark, rest = split_at(self._pending, (_MESSAGE,))
        text = self._pending.lstrip()
        is_header = any(text.startswith(each) or each.startswith(text) for each in _OPENINGS)
        if is_header and not mark and not is_last:
            return False
        if not is_header or (not mark and text and not text.startswith("<|")):
            self._state, self._header, self._is_new = "content", "", True
            return True
        self._pending = rest if mark else ""
        if mark:
            is_analysis = re.search(r"<\|channel\|>\s*analysis\b", header) is not None
            self._state = "call" if re.search(r"\bto=\S", header) else "reasoning" if is_analysis else "content"
            self._header, self._is_new = header + mark, True
        return bool(mark)
