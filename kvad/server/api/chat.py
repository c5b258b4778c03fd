"""/v1/chat/completions: answer a conversation in the model's chat template, with tools and event streams."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvad.engine import StreamChunk
from kvad.server.api import generation, reasoning, tool_formats, tools
from kvad.server.api.errors import invalid, naming
from kvad.server.api.generation import ApiContext, EventStream, RequestGroup, SampleChunks
from kvad.server.api.logprobs import chat_logprobs
from kvad.server.api.reasoning import HARMONY_CHANNELS, AnswerParser, Parts, ReasoningFormat, State
from kvad.server.api.schema import ChatBody
from kvad.server.api.structured import constrain, structured_settings
from kvad.server.api.tool_formats import PLAIN_JSON, Thoughts, ToolFormat
from kvad.server.api.tools import ToolCallParser

# Variables of a chat template that the server sets.
RESERVED_VARIABLES = (
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template",
)  # fmt: skip


@dataclass(frozen=True)
class ToolUse:
    """Use of the tools of a request."""

    tools: list[dict[str, Any]]
    is_required: bool = False
    name: str | None = None  # the function that must be called
    form: ToolFormat = PLAIN_JSON
    is_parallel: bool = True

    def grammar(self, thoughts: Thoughts = Thoughts()) -> str | None:  # noqa: B008  # immutable
        """Return the grammar of the answer; None if no call is required and no function is strict."""
        if not self.is_required and not any(tool["function"].get("strict") is True for tool in self.tools):
            return None
        is_parallel = self.is_parallel and self.name is None
        return tool_formats.call_grammar(
            self.form,
            self.tools,
            is_required=self.is_required,
            is_parallel=is_parallel,
            name=self.name,
            thoughts=thoughts,
        )

    def parser(self) -> ToolCallParser:
        """Return the parser of the calls of one sample."""
        functions = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in self.tools}
        return ToolCallParser(self.form, functions, is_parallel=self.is_parallel)

    @staticmethod
    def of(given: list[dict[str, Any]] | None, choice: Any, limit: int) -> ToolUse | None:
        """Return the use of ``tools`` and ``tool_choice``; None if no tool may be called.

        Raises:
            ApiError: 400 that names the field.
        """
        if not given:
            if choice not in (None, "none", "auto"):
                raise invalid("tool_choice", "requires tools")
            return None
        generation.check_limit("tools", len(given), limit, "tools")
        names = tools.check_tools(given)
        if choice in (None, "auto"):
            return ToolUse(given)
        if choice == "none":
            return None
        if choice == "required":
            return ToolUse(given, is_required=True)
        function = choice.get("function") if isinstance(choice, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if name not in names:
            raise invalid("tool_choice", f"must be none, auto, required or one of the tools {names}")
        return ToolUse(given, is_required=True, name=name)


async def create_chat_completion(context: ApiContext, body: ChatBody, key: str) -> dict[str, Any] | EventStream:
    """Answer a request to /v1/chat/completions."""
    group, parsers = await submit_chat(context, body, key)
    with group.cancel_on_error():
        answer = _Answer(context, body, group, parsers)
    if body.stream:
        return EventStream(generation.stream_events(group, answer.event, answer.last_events))
    return answer.response(await group.all_chunks())


async def submit_chat(context: ApiContext, body: ChatBody, key: str) -> tuple[RequestGroup, list[AnswerParser]]:
    """Submit a conversation and return its requests and the parser of each sample."""
    limits, adapter = context.config.limits, context.check_model(body.model)
    use = ToolUse.of(body.tools, body.tool_choice, limits.max_tools)
    settings = _settings(context, body)
    settings |= {"cache_salt": context.salt(key, body.cache_salt), "adapter": adapter}
    context.llm.builder.generation(None, settings)  # raises before the template is rendered
    tokens, source, final = await render(context, body, adapter)
    thinking = reasoning.find_reasoning(source)
    state = _state(context, thinking, tokens, final)
    if use is not None:
        is_parallel = body.parallel_tool_calls is not False
        use = replace(use, form=tool_formats.find_format(source), is_parallel=is_parallel)
    use = await _constrain(context, body, settings, use, thinking, state)
    submission = context.llm.builder.generation(None, settings)(tokens)
    session = generation.session_of(body, key, body.n)
    group = RequestGroup(context, [submission], session=session, request_id=body.request_id)
    separates = body.reasoning_format != "none"
    group.num_reasoning_tokens = 0 if separates and thinking is not None else None
    parsers = [
        AnswerParser.of(thinking, state, None if use is None else use.parser(), separates=separates)
        for _ in range(body.n)
    ]
    return group, parsers


async def render(context: ApiContext, body: ChatBody, adapter: str) -> tuple[list[int], str, str | None]:
    """Render a conversation.

    Returns:
        Its token ids, the source of its template, and the text of the message that an answer continues, if it does.

    Raises:
        ApiError: 400 that names the field.
    """
    size = generation.check_chars(context, "messages", [body.messages, body.tools])
    shown_tools = (body.tools or None) if body.tool_choice != "none" else None
    with naming("messages"):
        template = context.llm.chat_templates.find(adapter)
        source = "" if template is None else template.templates[template.choose(tools=shown_tools is not None)]
    messages = check_messages(
        body.messages, context.config.limits.max_messages, parses_arguments=not tool_formats.has_text_arguments(source)
    )
    variables = _template_variables(context, body, source, () if template is None else template.specials)
    if reasoning.find_reasoning(source) is HARMONY_CHANNELS:
        messages = list(map(_harmony_message, messages))
    with naming("messages"):
        tokens = await context.threads.run(
            size,
            context.llm.render_chat,
            messages,
            tools=shown_tools,
            continue_final=body.continue_final_message,
            generation_prompt=body.add_generation_prompt and not body.continue_final_message,
            variables=variables,
            adapter=adapter,
        )
    return tokens, source, messages[-1]["content"] if body.continue_final_message else None


def _state(context: ApiContext, thinking: ReasoningFormat | None, prompt: Sequence[int], final: str | None) -> State:
    """Return the state in which the answer to a prompt begins; ``final``: text of the message that it continues."""
    if thinking is None:
        return "content"
    end = prompt[-reasoning.PROMPT_TOKENS :]
    text = context.llm.texts.require_tokenizer().decode(end, skip_specials=False)
    return thinking.state_after(text, final)


def _settings(context: ApiContext, body: ChatBody) -> Any:
    """Return the options of a request as fields of SamplingParams, without those of its structured output."""
    settings = generation.sampling_settings(context, body)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if max_tokens is not None:
        settings["max_tokens"] = max_tokens
    if body.top_logprobs is not None:
        if not body.logprobs:
            raise invalid("top_logprobs", "requires logprobs to be true")
        generation.check_limit("top_logprobs", body.top_logprobs, context.config.limits.max_logprobs, "alternatives")
    if body.logprobs:
        settings["logprobs"] = body.top_logprobs or 0
    return settings


async def _constrain(
    context: ApiContext,
    body: ChatBody,
    settings: dict[str, Any],
    use: ToolUse | None,
    thinking: ReasoningFormat | None,
    state: State,
) -> ToolUse | None:
    """Add structured output, visible marks and end tokens to the settings; return the use of tools in the answer."""
    thoughts, marks = (Thoughts(), ()) if thinking is None else (thinking.grammar(state), thinking.all_marks)
    settings |= await structured_settings(context, body, thoughts, marks)
    if use is not None:
        if "structured_output" not in settings:
            marks = tuple(dict.fromkeys((*marks, *use.form.all_marks)))
            if (lark := use.grammar(thoughts)) is not None:
                settings |= await constrain(context, "tools", {"grammar": lark}, marks)
        elif use.is_required:
            raise invalid(body.constraint_name, "cannot be combined with a required tool")
        elif not use.form.start:  # the text is JSON of a schema that is no call's
            use = None
    settings["visible_special_tokens"] = marks
    if thinking is HARMONY_CHANNELS and not body.ignore_eos:
        ids = context.llm.texts.require_tokenizer().special_tokens.names()
        ends = [ids[mark] for mark in ("<|call|>", "<|return|>") if mark in ids]
        settings["stop_token_ids"] = (*settings.get("stop_token_ids", ()), *ends)
    return use


def check_messages(
    messages: Sequence[dict[str, Any]], max_messages: int, *, parses_arguments: bool = True
) -> list[dict[str, Any]]:
    """Return the messages with texts instead of lists of text parts, and arguments of calls as objects.

    ``parses_arguments`` False: arguments remain text.

    Raises:
        ApiError: 400 for too many or incomplete messages, and for parts that are no text.
    """
    generation.check_limit("messages", len(messages), max_messages, "messages")
    checked = []
    for index, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(message.get("role"), str):
            raise invalid(f"messages[{index}].role", "must be a text such as 'user'")
        if "content" not in message and "tool_calls" not in message:
            raise invalid(f"messages[{index}].content", "must be given, unless the message has tool_calls")
        if isinstance(content, list):
            content = "".join(_part_text(part, index) for part in content)
        message = {**message, "content": content} if "content" in message else dict(message)
        if isinstance(message.get("reasoning"), str):  # vLLM's name
            message.setdefault("reasoning_content", message["reasoning"])
        if message.get("role") == "developer":
            message["role"] = "system"
        if parses_arguments and isinstance(message.get("tool_calls"), list):
            message["tool_calls"] = [
                _with_parsed_arguments(call, f"messages[{index}].tool_calls[{number}]")
                for number, call in enumerate(message["tool_calls"])
            ]
        checked.append(message)
    return checked


def _harmony_message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as gpt-oss's template reads it: a call has thoughts or a content, and no empty one."""
    thoughts = message.get("reasoning_content")
    if not message.get("tool_calls") or (message.get("content") and not thoughts):
        return message
    others = {name: value for name, value in message.items() if name != "content"}
    return {**others, "thinking": thoughts} if thoughts else others


def _part_text(part: Any, index: int) -> str:
    if isinstance(part, dict) and part.get("type") in ("text", "input_text", "output_text"):
        text = part.get("text")
        if isinstance(text, str):
            return text
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise invalid(f"messages[{index}]", f"content parts must be text, got {str(kind)[:80]!r}")


def _with_parsed_arguments(call: Any, place: str) -> Any:
    """Return a call of the conversation with its arguments as an object, which templates expect."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"].strip() or "{}")}}
    except ValueError:
        return call
    except RecursionError:
        raise invalid(f"{place}.function.arguments", "nested too deeply") from None


class _Answer:
    """Builds the response or the events of one request."""

    def __init__(
        self, context: ApiContext, body: ChatBody, group: RequestGroup, parsers: Sequence[AnswerParser]
    ) -> None:
        self._context, self._body, self._group = context, body, group
        self._id, self._created = generation.new_id("chatcmpl", body.request_id), int(time.time())
        self._parsers = parsers
        self._started: set[int] = set()

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._group.model_name}

    # ------------------------------------------------------------ one response

    def response(self, results: Sequence[Sequence[StreamChunk]]) -> dict[str, Any]:
        choices = []
        for sample in range(self._body.n):
            chunks = [chunk for chunk in results[0] if chunk.sample_index == sample]
            choices.append(self._choice(SampleChunks(0, sample, chunks)))
        self._group.observe()
        response = {**self._head("chat.completion"), "choices": choices, "usage": self._group.usage()}
        return response if not self._body.timings else {**response, "timings": self._group.timings()}

    def _choice(self, sample: SampleChunks) -> dict[str, Any]:
        index = sample.sample_index
        thoughts, content, calls = self._parse(sample, is_last=True)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if thoughts:
            message |= {"reasoning_content": thoughts, "content": content or None}
        if calls:
            message |= {"content": content.strip() or None, "tool_calls": [call.as_json() for call in calls]}
        reason = "tool_calls" if calls else sample.finish_reason
        self._context.metrics.observe_finish(str(reason))
        logprobs = chat_logprobs(self._context.token_texts, sample.logprobs) if self._body.logprobs else None
        choice = {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}
        if self._body.return_token_ids:
            choice["token_ids"] = sample.token_ids
        return choice

    def _parse(self, sample: SampleChunks, *, is_last: bool) -> Parts:
        parts = self._parsers[sample.sample_index].read(sample.chunks, is_last=is_last)
        if self._group.num_reasoning_tokens is not None:
            self._group.num_reasoning_tokens = sum(parser.num_reasoning_tokens for parser in self._parsers)
        return parts

    # ------------------------------------------------------------ events

    def event(self, chunks: SampleChunks) -> bytes:
        """Return the event of the chunks; b"" if there is nothing to send yet."""
        sample, finish = chunks.sample_index, chunks.finish_reason
        known_calls = self._parsers[sample].num_calls
        thoughts, content, calls = self._parse(chunks, is_last=finish is not None)
        scores = chunks.logprobs if self._body.logprobs else []
        tokens = chunks.token_ids if self._body.return_token_ids else []
        if not (thoughts or content or calls or scores or tokens or finish):
            return b""
        delta: dict[str, Any] = {}
        if sample not in self._started:
            self._started.add(sample)
            delta["role"] = "assistant"
        if thoughts:
            delta["reasoning_content"] = thoughts
        if content or (not calls and not thoughts and "role" in delta):
            delta["content"] = content
        if calls:
            numbered = enumerate(calls, known_calls)
            delta["tool_calls"] = [{"index": number, **call.as_json()} for number, call in numbered]
        logprobs = chat_logprobs(self._context.token_texts, scores) if self._body.logprobs else None
        if finish is not None:
            reason = "tool_calls" if self._parsers[sample].num_calls else finish
            self._context.metrics.observe_finish(reason)
            if not delta:
                return self._chunk(sample, {}, logprobs, reason, tokens)
            return self._chunk(sample, delta, logprobs, None, tokens) + self._chunk(sample, {}, None, reason, [])
        return self._chunk(sample, delta, logprobs, None, tokens)

    def _chunk(
        self, sample: int, delta: dict[str, Any], logprobs: Any, finish: str | None, tokens: Sequence[int]
    ) -> bytes:
        choice = {"index": sample, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        if self._body.return_token_ids:
            choice["token_ids"] = list(tokens)
        usage = self._group.event_usage(self._body)
        return generation.event({**self._head("chat.completion.chunk"), "choices": [choice], **usage})

    def last_events(self) -> bytes:
        return self._group.last_events(self._head("chat.completion.chunk"), self._body)


def _template_variables(context: ApiContext, body: ChatBody, source: str, specials: Collection[str]) -> dict[str, Any]:
    """Return the variables of the chat template that the request gives; ``specials``: those that are special tokens.

    Raises:
        ApiError: 400 for a variable that has another origin, and for an effort that the template does not read.
    """
    variables = dict(body.chat_template_kwargs or {})
    generation.check_chars(context, "chat_template_kwargs", variables)
    for name in variables:
        if name in RESERVED_VARIABLES or name in specials:
            raise invalid(f"chat_template_kwargs.{name}", "is set by the server. Leave it out.")
    if body.reasoning_effort is not None:
        if re.search(rf"\b{reasoning.EFFORT}\b", source) is None:
            raise invalid(reasoning.EFFORT, "is not read by the chat template. Leave it out.")
        variables[reasoning.EFFORT] = body.reasoning_effort
    return variables
