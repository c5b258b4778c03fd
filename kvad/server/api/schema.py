"""Request bodies. Every field is applied, documented as without effect, or refused by name.

Fields that OpenAI's API does not have are those of vLLM with the same meaning, and a few of kvad's.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from kvad import storage
from kvad.server.api.errors import ApiError

BodyT = TypeVar("BodyT", bound="Body")
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Count = Annotated[int, Field(ge=0, lt=1 << 31)]
PositiveCount = Annotated[int, Field(ge=1, lt=1 << 31)]
Seconds = Annotated[float, Field(ge=0.001, le=86400, allow_inf_nan=False)]
Number = Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)]
# Lists end at their first invalid item: errors of a million items take a minute and gigabytes.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True, max_length=1 << 16)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=1 << 16)]
LogitBias = Annotated[dict[str, Number], BeforeValidator(lambda value: _check_length(value, 1 << 16))]
# Errors of a field of several types name its description, which completes "must be".
Prompt = Annotated[
    str | TokenIds | Texts | Annotated[list[TokenIds], Field(fail_fast=True, max_length=1 << 16)],
    Field(description="a text, token ids, a list of texts or a list of lists of token ids"),
]
ToolChoice = Annotated[
    str | dict[str, Any] | None, Field(description="none, auto, required or an object that names a function")
]
TemplateVariables = Annotated[
    dict[str, Any] | None, Field(description="Variables of the chat template, such as enable_thinking.")
]
Effort = Annotated[
    Annotated[str, Field(max_length=32)] | None, Field(description="The variable of the chat template with this name.")
]
RequestId = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]

# Fields without effect here: they concern accounts and storage of OpenAI's service.
NO_EFFECT = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
)  # fmt: skip
# Fields of OpenAI's API that are refused, with the reason.
REFUSED = {
    "suffix": "this server does not insert text before a suffix",
    "functions": "use tools instead of functions",
    "function_call": "use tool_choice instead of function_call",
    "chat_template": "templates of clients are not accepted",
    "chat_template_kwargs": "only /v1/chat/completions and /tokenize take variables of the chat template",
    "prompt_embeds": "tensors of clients are not accepted",
    "previous_response_id": "responses are not stored; send the whole conversation as input",
    "conversation": "responses are not stored; send the whole conversation as input",
    "audio": "this model produces text only",
    "modalities": "this model produces text only",
    "prediction": "predicted outputs are not supported",
    "web_search_options": "this server does not search",
    "background": "responses are not stored",
    "top_logprobs": "use logprobs of /v1/completions or /v1/chat/completions",
}
# Values of refused fields that request nothing.
NEUTRAL: dict[str, Any] = {
    "suffix": "", "functions": [], "function_call": "none", "chat_template_kwargs": {}, "modalities": ["text"],
    "background": False, "top_logprobs": 0,
}  # fmt: skip
# Known fields of objects inside fields.
FORMAT_FIELDS = ("name", "description", "schema", "strict")
FUNCTION_FIELDS = ("name", "description", "parameters", "strict", "return")  # "return" is read by templates
MESSAGE_FIELDS = (
    "role", "content", "name", "tool_calls", "tool_call_id", "refusal", "annotations", "reasoning_content", "reasoning",
    "thinking",
)  # fmt: skip
ITEM_FIELDS = ("type", "role", "content", "id", "status", "call_id", "name", "arguments", "output", "summary")


class Body(BaseModel):
    """Base of request bodies: strict types, unknown fields are kept for ``validate``."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str | None = Field(None, max_length=512, description="Name of the model, as in /v1/models.")
    timeout: Seconds | None = Field(None, description="Seconds.")

    def unknown_places(self) -> list[str]:
        """Return the places of unknown fields inside fields, such as "tools[0].function.other"."""
        return []

    def field_names(self) -> dict[str, str]:
        """Return the fields of this request for the names that errors have instead (``errors.rename_fields``)."""
        return {}


class StreamOptions(BaseModel):
    """Options of an event stream."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool = Field(False, description="Send the token counts in a last event.")
    continuous_usage_stats: bool = Field(False, description="Send the token counts in every event.")
    include_obfuscation: Literal[False] = Field(False, description="Events are not padded.")


class ResponseStreamOptions(BaseModel):
    """Options of the event stream of a response."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_obfuscation: Literal[False] = Field(False, description="Events are not padded.")


class GenerationBody(Body):
    """Fields of all requests that generate text."""

    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = Field(None, description="0 and -1: off.")
    min_p: Number | None = None
    typical_p: Number | None = None
    n: PositiveCount = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: str | Texts | None = Field(None, description="a text or a list of texts")
    stop_token_ids: TokenIds | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    no_repeat_ngram_size: Count | None = None
    logit_bias: LogitBias | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    num_beams: Annotated[int, Field(ge=1, le=128)] | None = Field(None, description="Beam search; 1: sampling.")
    length_penalty: Number | None = None
    overflow: Literal["stop", "preempt", "reject", "sinks", "window", "offload"] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = Field(None, description="json, json_object, regex, choice or grammar.")
    cache_salt: Annotated[str, Field(max_length=256)] | None = Field(
        None, description="Cached blocks are shared only with requests of the same text."
    )
    session: Annotated[str, Field(max_length=64)] | None = Field(
        None, description="Name under which the cache is kept on disk."
    )
    timings: bool = Field(False, description="Add seconds and tokens per second to the response.")
    return_token_ids: bool = False
    request_id: RequestId | None = Field(None, description="End of the response's id; also shown by /cache.")

    def unknown_places(self) -> list[str]:
        """Return the places of unknown fields inside fields."""
        form = self.response_format or {}
        places = _unknown("response_format", form, ("type", "json_schema"))
        return places + _unknown("response_format.json_schema", form.get("json_schema"), FORMAT_FIELDS)

    def field_names(self) -> dict[str, str]:
        """Return the fields of this request for the names that errors have instead."""
        return {"structured_output": self.constraint_name, "encoder input": "prompt"}

    @property
    def constraint_name(self) -> str:
        """The field that constrains the text; "tools" if none does, because a required call does."""
        given = {"response_format": self.response_format, "structured_outputs": self.structured_outputs}
        return next((name for name, value in given.items() if value is not None), "tools")

    @property
    def wants_usage(self) -> bool:
        """True if a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_every_usage(self) -> bool:
        """True if every event has the token counts so far."""
        return self.wants_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats


class CompletionBody(GenerationBody):
    """Body of /v1/completions."""

    prompt: Prompt
    max_tokens: Count | None = 16
    logprobs: Count | None = None
    echo: bool = False
    best_of: PositiveCount | None = None


class ChatBody(GenerationBody):
    """Body of /v1/chat/completions."""

    messages: Objects = Field(min_length=1)
    max_tokens: PositiveCount | None = None
    max_completion_tokens: PositiveCount | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    tools: Objects | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: TemplateVariables = None
    reasoning_effort: Effort = None
    reasoning_format: Literal["auto", "deepseek", "none"] = Field(
        "auto", description="auto, deepseek: thoughts are reasoning_content; none: they are content, with their marks."
    )

    def unknown_places(self) -> list[str]:
        """Return the places of unknown fields inside fields."""
        places = super().unknown_places() + _unknown_in_messages(self.messages)
        for index, tool in enumerate(self.tools or ()):
            places += _unknown(f"tools[{index}]", tool, ("type", "function"))
            places += _unknown(f"tools[{index}].function", tool.get("function"), FUNCTION_FIELDS)
        return places + _unknown("tool_choice", self.tool_choice, ("type", "function"))

    def field_names(self) -> dict[str, str]:
        """Return the fields of this request for the names that errors have instead."""
        return {**super().field_names(), "prompt": "messages"}


class ResponsesBody(Body):
    """Body of /v1/responses; nothing is stored."""

    input: str | Objects = Field(description="a text or a list of items")
    instructions: str | None = None
    max_output_tokens: PositiveCount | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    text: dict[str, Any] | None = None
    tools: Objects | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["disabled"] | None = None
    include: Texts | None = Field(None, max_length=0)
    reasoning: dict[str, Any] | None = Field(None, description="effort: as reasoning_effort.")

    def unknown_places(self) -> list[str]:
        """Return the places of unknown fields inside fields."""
        text = self.text or {}
        places = _unknown("text", text, ("format",))
        places += _unknown("text.format", text.get("format"), ("type", *FORMAT_FIELDS))
        for index, item in enumerate(self.input if isinstance(self.input, list) else ()):
            places += _unknown(f"input[{index}]", item, ITEM_FIELDS)
        for index, tool in enumerate(self.tools or ()):
            places += _unknown(f"tools[{index}]", tool, ("type", *FUNCTION_FIELDS))
        places += _unknown("reasoning", self.reasoning, ("effort",))
        return places + _unknown("tool_choice", self.tool_choice, ("type", "name"))

    def message_items(self) -> list[list[int]]:
        """Return the indices of the items of each message of the same chat.

        A call belongs to the message of the assistant or the calls before it.
        """
        groups, is_answer = list[list[int]](), False
        for index, item in enumerate(self.input if isinstance(self.input, list) else ()):
            is_call = item.get("type") == "function_call"
            if is_call and is_answer:
                groups[-1].append(index)
            elif item.get("type") != "reasoning":
                groups.append([index])
            is_answer = is_call or (item.get("type", "message") == "message" and item.get("role") == "assistant")
        return groups

    def field_names(self) -> dict[str, str]:
        """Return the fields of this request for the names that errors of the same chat have instead."""
        first = int(self.instructions is not None)  # message of the first item
        places, names = dict[str, str](), dict[str, str]()
        for number, indices in enumerate(self.message_items(), first):
            places[f"messages[{number}]"] = f"input[{indices[0]}]"
            assert isinstance(self.input, list)
            calls = [index for index in indices if self.input[index].get("type") == "function_call"]
            names |= {f"messages[{number}].tool_calls[{call}].function": f"input[{i}]" for call, i in enumerate(calls)}
        names |= places
        names |= {f"tools[{index}].function": f"tools[{index}]" for index in range(len(self.tools or ()))}
        return names | {
            "messages[0]": names.get("messages[0]", "instructions"), "messages": "input", "prompt": "input",
            "response_format.json_schema": "text.format", "response_format": "text.format",
            "structured_output": "text.format" if self.text and self.text.get("format") else "tools",
            "max_completion_tokens": "max_output_tokens", "reasoning_effort": "reasoning.effort",
        }  # fmt: skip


class EmbeddingBody(Body):
    """Body of /v1/embeddings."""

    input: Prompt
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: PositiveCount | None = Field(None, description="The size of the model's vectors.")

    def field_names(self) -> dict[str, str]:
        """Return the fields of this request for the names that errors have instead."""
        return {"prompt": "input", "text": "input", "encoder input": "input"}


class TokenizeBody(Body):
    """Body of /tokenize: a prompt or messages."""

    prompt: str | None = None
    messages: Annotated[Objects, Field(min_length=1)] | None = None
    chat_template_kwargs: TemplateVariables = None
    reasoning_effort: Effort = None
    add_special_tokens: bool | None = Field(None, description="Of a prompt; true if it is not given.")
    return_token_strs: bool = False

    def unknown_places(self) -> list[str]:
        """Return the places of unknown fields inside fields."""
        return _unknown_in_messages(self.messages or ())


class DetokenizeBody(Body):
    """Body of /detokenize."""

    tokens: TokenIds


class TranslateBody(Body):
    """Body of /v1/translate."""

    text: str | Texts = Field(description="a text or a list of texts")
    target_language: str | None = Field(None, max_length=64)
    source_language: str | None = Field(None, max_length=64)
    target_prefix: str | None = None
    num_beams: Annotated[int, Field(ge=1, le=128)] | None = None
    length_penalty: Number | None = None
    max_tokens: PositiveCount | None = None
    temperature: Number | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 64)] | None = None
    request_id: RequestId | None = None
    n: PositiveCount = 1

    def field_names(self) -> dict[str, str]:
        """Return the fields of this request for the names that errors have instead."""
        return {"encoder input": "text", "prompt": "text", "target": "target_prefix"}


class AttentionBody(Body):
    """Body of /attention."""

    prompt: str | TokenIds = Field(description="a text or token ids")
    layer: Count = 0


def parse_json(data: bytes | bytearray, max_values: int = 1 << 20) -> dict[str, Any]:
    """Parse a body: one object of strict JSON without lone surrogates.

    Args:
        data: The body.
        max_values: Largest number of commas and brackets, because a value takes more time and memory than its bytes.

    Raises:
        ApiError: 400, or 413 for too many values.
    """
    if len(data) > max_values and sum(map(data.count, b",[{")) > max_values:
        raise ApiError(413, f"the body must have at most {max_values:,} values", code="body_too_large")
    try:
        value = storage.strict_json.loads(bytes(data))
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {str(error)[:200]}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    if b"\\u" in data:  # only an escape can be half of a character
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ApiError(400, "the body has a lone surrogate, which is not text", code="invalid_json") from None
    return value


def validate(kind: type[BodyT], fields: dict[str, Any], *, ignore_unknown: bool) -> tuple[BodyT, list[str]]:
    """Validate a body and return it with the names of ignored fields.

    Raises:
        ApiError: 400 that names the field.
    """
    # Null is an absent field, but for max_tokens, where it means "to the end of the context".
    is_limit = "max_tokens" in kind.model_fields
    fields = {name: value for name, value in fields.items() if value is not None or (is_limit and name == "max_tokens")}
    for name, reason in REFUSED.items():
        if name in fields and name not in kind.model_fields and not _is_neutral(name, fields[name]):
            raise ApiError(400, f"{name}: {reason}", param=name, code="unsupported_parameter")
    try:
        body = kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = [str(part) for part in first["loc"] if not _is_type_name(part)]
        param, problem = ".".join(place)[:200] or None, first["msg"]
        if len(place) < len(first["loc"]) and (forms := kind.model_fields[place[0]].description):
            param, problem = place[0], f"must be {forms}"
        raise ApiError(400, f"{param or 'body'}: {problem}", param=param, code="invalid_value") from None
    extra = [name for name in body.model_extra or {} if name not in NO_EFFECT and name not in REFUSED]
    extra += body.unknown_places()
    if extra and not ignore_unknown:
        name = extra[0][:200]
        known = list(kind.model_fields) if extra[0] in (body.model_extra or {}) else []
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
        hint = f"Did you mean {close[0]!r}? " if close else ""
        raise ApiError(400, f"{name}: unknown field. {hint}See /openapi.json.", param=name, code="unknown_parameter")
    return body, extra


def _unknown(place: str, value: Any, known: Collection[str]) -> list[str]:
    """Return the places of the fields of an object that are not known, null or empty."""
    if not isinstance(value, dict):
        return []
    return [f"{place}.{name}" for name, item in value.items() if name not in known and item not in (None, [], {})]


def _unknown_in_messages(messages: Iterable[Any]) -> list[str]:
    return [
        place
        for index, message in enumerate(messages)
        for place in _unknown(f"messages[{index}]", message, MESSAGE_FIELDS)
    ]


def _is_neutral(name: str, value: Any) -> bool:
    return name in NEUTRAL and type(value) is type(NEUTRAL[name]) and bool(value == NEUTRAL[name])


def _check_length(value: Any, limit: int) -> Any:
    if isinstance(value, dict) and len(value) > limit:
        raise ValueError(f"must have at most {limit:,} entries")
    return value


def _is_type_name(part: int | str) -> bool:
    """Return True for the parts of a place that name a member of a union, such as ``list[str]``."""
    return isinstance(part, str) and (part in ("str", "int", "float", "bool", "dict") or "[" in part)
