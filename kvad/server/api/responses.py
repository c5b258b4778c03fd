"""/v1/responses: the stateless core of OpenAI's Responses API, answered as a conversation."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from kvad.engine import StreamChunk
from kvad.server.api import generation
from kvad.server.api.chat import submit_chat
from kvad.server.api.errors import ApiError, invalid
from kvad.server.api.generation import ApiContext, EventStream, RequestGroup
from kvad.server.api.reasoning import AnswerParser
from kvad.server.api.schema import ChatBody, ResponsesBody, validate
from kvad.server.api.tool_formats import ToolCall

# Type of an item -> its fields; contents and outputs may also be lists of parts.
ITEM_TEXTS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}


async def create_response(context: ApiContext, body: ResponsesBody, key: str) -> dict[str, Any] | EventStream:
    """Answer a request to /v1/responses."""
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "requires stream to be true")
    group, (parser,) = await submit_chat(context, _to_chat(body), key)
    with group.cancel_on_error():
        answer = _Answer(context, body, group, parser)
    if body.stream:
        return EventStream(answer.events(), answer.failed)
    chunks = (await group.all_chunks())[0]
    answer.add(chunks, is_last=True)
    group.observe()
    context.metrics.observe_finish(str(chunks[-1].finish_reason))
    return answer.response(str(chunks[-1].finish_reason))


def _to_chat(body: ResponsesBody) -> ChatBody:
    """Return the same request for the chat API."""
    messages = list[dict[str, Any]]()
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        thoughts, firsts = "", {items[0] for items in body.message_items()}
        for index, item in enumerate(body.input):
            message = _to_message(item, index)
            if item.get("type") == "reasoning":
                thoughts += message["reasoning_content"]
            elif index not in firsts:
                calls = [*messages[-1].get("tool_calls", ()), *message["tool_calls"]]
                messages[-1] = {**messages[-1], "tool_calls": calls}
            else:
                if thoughts and message["role"] == "assistant":
                    message = {**message, "reasoning_content": thoughts}
                messages.append(message)
                thoughts = ""  # those of a truncated answer have no message
    fields: dict[str, Any] = {
        "model": body.model, "messages": messages, "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature, "top_p": body.top_p, "tools": _to_tools(body.tools),
        "tool_choice": _to_choice(body.tool_choice), "response_format": _to_format(body.text),
        "parallel_tool_calls": body.parallel_tool_calls, "reasoning_effort": (body.reasoning or {}).get("effort"),
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
    if kind == "reasoning":
        parts = item.get("content") or []
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise invalid(f"{place}.content", "must be a list of parts")
        return {"reasoning_content": "".join(str(part.get("text", "")) for part in parts)}
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


# Kind of an item with text -> its part, and fields of the part and of its deltas.
TEXT_PARTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "message": ("output_text", {"annotations": [], "logprobs": []}, {"logprobs": []}),
    "reasoning": ("reasoning_text", {}, {}),
}


class _Answer:
    """Builds the response object and its events."""

    def __init__(self, context: ApiContext, body: ResponsesBody, group: RequestGroup, parser: AnswerParser) -> None:
        self._context, self._body, self._group, self._parser = context, body, group, parser
        self._id, self._created, self._sequence = generation.new_id("resp"), int(time.time()), -1
        self._items: list[dict[str, Any]] = []  # of the output
        self._open: dict[str, int] = {}  # kind of an item whose text may continue -> its index
        self._space = ""  # of content that has not begun

    def add(self, chunks: Sequence[StreamChunk], *, is_last: bool) -> bytes:
        """Add generated text; return the events of its thoughts, its content and its calls."""
        parts, events = self._parser.read_in_order(chunks, is_last=is_last), list[bytes]()
        if self._group.num_reasoning_tokens is not None:
            self._group.num_reasoning_tokens = self._parser.num_reasoning_tokens
        for reasoning, content, calls in parts:
            if "reasoning" not in self._open:
                reasoning = reasoning.lstrip("\n")  # an empty line between the thoughts of two messages
            if reasoning:
                events.append(self._write("reasoning", reasoning))
            self._space += content
            if self._space.strip() or ("message" in self._open and self._space):
                events += [self._close("reasoning", "completed"), self._write("message", self._space)]
                self._space = ""
            if calls:
                events.append(self._close("reasoning", "completed"))
            events += map(self._call_events, calls)
        if is_last and not self._items:
            events.append(self._write("message", self._space))
        return b"".join(events)

    def response(self, finish_reason: str | None) -> dict[str, Any]:
        """Return the response object; ``finish_reason`` None: it is in progress."""
        status = {None: "in_progress", "length": "incomplete", "error": "incomplete"}.get(finish_reason, "completed")
        for index in self._open.values():
            self._items[index]["status"] = status
        usage = self._group.usage()
        return {
            "id": self._id, "object": "response", "created_at": self._created, "status": status, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if finish_reason == "length" else None,
            "instructions": self._body.instructions, "max_output_tokens": self._body.max_output_tokens,
            "model": self._group.model_name, "output": [] if finish_reason is None else self._items,
            "parallel_tool_calls": self._body.parallel_tool_calls is not False, "previous_response_id": None,
            "store": False, "temperature": self._body.temperature,
            "text": self._body.text or {"format": {"type": "text"}},
            "tool_choice": self._body.tool_choice or "auto", "tools": self._body.tools or [],
            "top_p": self._body.top_p, "truncation": "disabled", "metadata": {},
            "usage": None if finish_reason is None else {
                "input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens_details": {"reasoning_tokens": self._group.num_reasoning_tokens or 0},
                "total_tokens": usage["total_tokens"],
            },
        }  # fmt: skip

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
                    if events := self.add(sample.chunks, is_last=finish is not None):
                        yield events
                if samples is None:
                    yield b": ping\n\n"
                samples = await self._group.next_chunks(generation.PING_SECONDS)
            self._group.observe()
            self._context.metrics.observe_finish(str(finish))
            yield self._end(finish)
        finally:
            self._group.cancel()

    def failed(self, error: ApiError) -> bytes:
        """Return the last events of a response that fails: the error, and the response with what was generated."""
        reason = {"code": error.code, "message": error.message}
        response = {**self.response("error"), "status": "failed", "error": reason}
        return self._event("error", **reason, param=error.param) + self._event("response.failed", response=response)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sequence += 1
        data = generation.event({"type": kind, "sequence_number": self._sequence, **fields})
        return f"event: {kind}\n".encode() + data

    def _write(self, kind: str, text: str) -> bytes:
        """Append text to the open item of a kind, or to a new one; return the events."""
        (part_type, part_fields, delta_fields), begin = TEXT_PARTS[kind], b""
        if kind not in self._open:
            self._open[kind] = len(self._items)
            item_id = generation.new_id("msg" if kind == "message" else "rs")
            fields: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            item = {"type": kind, "id": item_id, "status": "in_progress", **fields, "content": []}
            self._items.append(item)
            part = {"type": part_type, "text": "", **part_fields}
            begin = self._event("response.output_item.added", output_index=self._open[kind], item=item)
            begin += self._event("response.content_part.added", **self._place(kind), part=part)
            item["content"] = [part]
        self._items[self._open[kind]]["content"][0]["text"] += text
        if not text:
            return begin
        return begin + self._event(f"response.{part_type}.delta", **self._place(kind), delta=text, **delta_fields)

    def _place(self, kind: str) -> dict[str, Any]:
        index = self._open[kind]
        return {"item_id": self._items[index]["id"], "output_index": index, "content_index": 0}

    def _close(self, kind: str, status: str) -> bytes:
        """Return the events of the end of the open item of a kind; b"" if there is none."""
        if kind not in self._open:
            return b""
        (part_type, _, delta_fields), place = TEXT_PARTS[kind], self._place(kind)
        item = self._items[self._open.pop(kind)]
        item["status"], part = status, item["content"][0]
        done = self._event(f"response.{part_type}.done", **place, text=part["text"], **delta_fields)
        done += self._event("response.content_part.done", **place, part=part)
        return done + self._event("response.output_item.done", output_index=place["output_index"], item=item)

    def _call_events(self, call: ToolCall) -> bytes:
        item = {
            "type": "function_call", "id": generation.new_id("fc"), "call_id": call.id, "name": call.name,
            "arguments": call.arguments, "status": "completed",
        }  # fmt: skip
        index, place = len(self._items), {"item_id": item["id"], "output_index": len(self._items)}
        self._items.append(item)
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
        is_incomplete = finish == "length"
        events = [self._close(kind, "incomplete" if is_incomplete else "completed") for kind in list(self._open)]
        kind = "response.incomplete" if is_incomplete else "response.completed"
        return b"".join((*events, self._event(kind, response=self.response(finish or "stop"))))
