"""/v1/responses: the stateless core of OpenAI's Responses API, answered as a conversation."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from kvad.server.api import generation
from kvad.server.api.chat import submit_chat
from kvad.server.api.errors import invalid
from kvad.server.api.generation import ApiContext, EventStream, RequestGroup
from kvad.server.api.schema import ChatBody, ResponsesBody, validate
from kvad.server.api.tool_formats import ToolCall
from kvad.server.api.tools import ToolCallParser

# Type of an item -> its fields; contents and outputs may also be lists of parts.
ITEM_TEXTS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}


async def create_response(context: ApiContext, body: ResponsesBody, key: str) -> dict[str, Any] | EventStream:
    """Answer a request to /v1/responses."""
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "requires stream to be true")
    group, use = await submit_chat(context, _to_chat(body), key)
    with group.cancel_on_error():
        answer = _Answer(context, body, group, None if use is None else use.parser())
    if body.stream:
        return EventStream(answer.events())
    chunks = (await group.all_chunks())[0]
    answer.add("".join(chunk.text for chunk in chunks), is_last=True)
    group.observe()
    context.metrics.observe_finish(str(chunks[-1].finish_reason))
    return answer.response(str(chunks[-1].finish_reason))


def _to_chat(body: ResponsesBody) -> ChatBody:
    """Return the same request for the chat API."""
    messages = [{"role": "system", "content": body.instructions}] if body.instructions is not None else []
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        messages += [_to_message(item, index) for index, item in enumerate(body.input)]
    fields: dict[str, Any] = {
        "model": body.model, "messages": messages, "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature, "top_p": body.top_p, "tools": _to_tools(body.tools),
        "tool_choice": _to_choice(body.tool_choice), "response_format": _to_format(body.text),
        "parallel_tool_calls": body.parallel_tool_calls,
    }  # fmt: skip
    chat, _ = validate(ChatBody, fields, ignore_unknown=True)  # unknown fields were refused, unless they are ignored
    return chat


def _to_message(item: Mapping[str, Any], index: int) -> dict[str, Any]:
    kind, place = item.get("type", "message"), f"input[{index}]"
    if not isinstance(kind, str) or kind not in ITEM_TEXTS:
        raise invalid(place, f"type must be {', '.join(ITEM_TEXTS)}, got {str(kind)[:80]!r}")
    for name in ITEM_TEXTS[kind]:
        if not isinstance(item.get(name), str | list if name in ("content", "output") else str):
            problem = "must be a text or a list of parts" if name in ("content", "output") else "must be a text"
            raise invalid(f"{place}.{name}", problem)
    if kind == "message":
        return {"role": item["role"], "content": item["content"]}
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}
    function = {"name": item["name"], "arguments": item["arguments"]}
    call = {"id": item["call_id"], "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _to_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return tools whose fields are under ``function``, as in the chat API."""
    if tools is None:
        return None
    names = ("name", "description", "parameters", "strict")
    for index, tool in enumerate(tools):
        if tool.get("type") != "function":
            raise invalid(f"tools[{index}]", f"type must be function, got {str(tool.get('type'))[:80]!r}")
    return [
        {"type": tool.get("type"), "function": {name: tool[name] for name in names if tool.get(name) is not None}}
        for tool in tools
    ]


def _to_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _to_format(text: Mapping[str, Any] | None) -> dict[str, Any] | None:
    form = None if text is None else text.get("format")
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}


class _Answer:
    """Builds the response object and its events."""

    def __init__(
        self, context: ApiContext, body: ResponsesBody, group: RequestGroup, parser: ToolCallParser | None
    ) -> None:
        self._context, self._body, self._group, self._parser = context, body, group, parser
        self._id, self._message_id = generation.new_id("resp"), generation.new_id("msg")
        self._created, self._text, self._sequence = int(time.time()), "", -1
        self._calls: list[tuple[str, ToolCall]] = []
        self._message_index: int | None = None  # in the output; None: only calls so far

    def add(self, text: str, *, is_last: bool = False) -> tuple[str, list[tuple[str, ToolCall]]]:
        """Add generated text; return the new content and the new calls with their item ids."""
        content, calls = text, list[ToolCall]()
        if self._parser is not None:
            content, calls = self._parser.finish(text) if is_last else self._parser.push(text)
        self._text += content
        if self._message_index is None and (self._text.strip() or (is_last and not self._calls and not calls)):
            self._message_index = len(self._calls)
        numbered = [(generation.new_id("fc"), call) for call in calls]
        self._calls += numbered
        return content, numbered

    def response(self, finish_reason: str | None) -> dict[str, Any]:
        """Return the response object; ``finish_reason`` None: it is in progress."""
        status = {None: "in_progress", "length": "incomplete"}.get(finish_reason, "completed")
        usage = self._group.usage()
        return {
            "id": self._id, "object": "response", "created_at": self._created, "status": status, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": self._body.instructions, "max_output_tokens": self._body.max_output_tokens,
            "model": self._group.model_name, "output": [] if finish_reason is None else self._output(status),
            "parallel_tool_calls": self._body.parallel_tool_calls is not False, "previous_response_id": None,
            "store": False, "temperature": self._body.temperature,
            "text": self._body.text or {"format": {"type": "text"}},
            "tool_choice": self._body.tool_choice or "auto", "tools": self._body.tools or [],
            "top_p": self._body.top_p, "truncation": "disabled", "metadata": {},
            "usage": None if finish_reason is None else {
                "input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": usage["total_tokens"],
            },
        }  # fmt: skip

    def _output(self, status: str) -> list[dict[str, Any]]:
        items = [self._call_item(item_id, call) for item_id, call in self._calls]
        if self._message_index is not None:
            items.insert(self._message_index, self._message(status))
        return items

    def _message(self, status: str) -> dict[str, Any]:
        content = [{"type": "output_text", "text": self._text, "annotations": [], "logprobs": []}]
        return {"type": "message", "id": self._message_id, "status": status, "role": "assistant", "content": content}

    def _call_item(self, item_id: str, call: ToolCall) -> dict[str, Any]:
        return {
            "type": "function_call", "id": item_id, "call_id": call.id, "name": call.name,
            "arguments": call.arguments, "status": "completed",
        }  # fmt: skip

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sequence += 1
        data = generation.event({"type": kind, "sequence_number": self._sequence, **fields})
        return f"event: {kind}\n".encode() + data

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of the response; they end without ``[DONE]``, as in OpenAI's API."""
        finish: str | None = None
        try:
            samples = await self._group.next_chunks(generation.REFUSAL_SECONDS)
            yield b"".join(
                self._event(f"response.{kind}", response=self.response(None)) for kind in ("created", "in_progress")
            )
            while samples or samples is None:
                for sample in samples or ():
                    finish = sample.finish_reason
                    if events := self._add_events(sample.text, is_last=finish is not None):
                        yield events
                if samples is None:
                    yield b": ping\n\n"
                samples = await self._group.next_chunks(generation.PING_SECONDS)
            self._group.observe()
            self._context.metrics.observe_finish(str(finish))
            yield self._end(finish)
        finally:
            self._group.cancel()

    def _add_events(self, text: str, *, is_last: bool) -> bytes:
        """Add generated text; return the events of its content, which begins the message, and of its calls."""
        is_new = self._message_index is None
        content, calls = self.add(text, is_last=is_last)
        events = []
        if self._message_index is not None:
            if is_new:
                events.append(self._begin())
                content = self._text
            if content:
                events.append(self._event("response.output_text.delta", **self._place(), delta=content, logprobs=[]))
        first = len(self._calls) - len(calls)
        events += [self._call_events(number, *call) for number, call in enumerate(calls, first)]
        return b"".join(events)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._message_id, "output_index": self._message_index, "content_index": 0}

    def _begin(self) -> bytes:
        message = {**self._message("in_progress"), "content": []}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        added = self._event("response.output_item.added", output_index=self._message_index, item=message)
        return added + self._event("response.content_part.added", **self._place(), part=part)

    def _call_events(self, number: int, item_id: str, call: ToolCall) -> bytes:
        index = number + (self._message_index is not None and self._message_index <= number)
        item, place = self._call_item(item_id, call), {"item_id": item_id, "output_index": index}
        started = {**item, "arguments": "", "status": "in_progress"}
        return b"".join(
            (
                self._event("response.output_item.added", output_index=index, item=started),
                self._event("response.function_call_arguments.delta", **place, delta=call.arguments),
                self._event("response.function_call_arguments.done", **place, arguments=call.arguments),
                self._event("response.output_item.done", output_index=index, item=item),
            )
        )

    def _end(self, finish: str | None) -> bytes:
        kind = "response.incomplete" if finish == "length" else "response.completed"
        events = []
        if self._message_index is not None:
            message = self._message("incomplete" if finish == "length" else "completed")
            events = [
                self._event("response.output_text.done", **self._place(), text=self._text, logprobs=[]),
                self._event("response.content_part.done", **self._place(), part=message["content"][0]),
                self._event("response.output_item.done", output_index=self._message_index, item=message),
            ]
        return b"".join((*events, self._event(kind, response=self.response(finish or "stop"))))
