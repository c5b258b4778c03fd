"""Request bodies. Every field is applied, documented as without effect, or refused by name.

Fields that OpenAI's API does not have are those of vLLM with the same meaning, and a few of kvad's.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from kvad import storage
from kvad.errors import suggest
from kvad.server.api.errors import ApiError

ModelT = TypeVar("ModelT", bound=BaseModel)
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
Prompt = str | TokenIds | Texts | Annotated[list[TokenIds], Field(fail_fast=True, max_length=1 << 16)]
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
    "chat_template_kwargs": "variables of clients are not passed to the template",
    "prompt_embeds": "tensors of clients are not accepted",
    "previous_response_id": "responses are not stored; send the whole conversation as input",
    "conversation": "responses are not stored; send the whole conversation as input",
    "audio": "this model produces text only",
    "modalities": "this model produces text only",
    "prediction": "predicted outputs are not supported",
    "web_search_options": "this server does not search",
    "dimensions": "vectors have the model's size",
    "background": "responses are not stored",
    "top_logprobs": "use logprobs of /v1/completions or /v1/chat/completions",
}


class Body(BaseModel):
    """Base of request bodies: strict types, unknown fields are kept for ``validate``."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str | None = Field(None, max_length=512, description="Name of the model, as in /v1/models.")


class StreamOptions(BaseModel):
    """Options of an event stream."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool = Field(False, description="Send the token counts in a last event.")
    continuous_usage_stats: bool = Field(False, description="Send the token counts in every event.")


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
    stop: str | Texts | None = None
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
    timeout: Seconds | None = Field(None, description="Seconds.")

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
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class ResponsesBody(Body):
    """Body of /v1/responses; nothing is stored."""

    input: str | Objects
    instructions: str | None = None
    max_output_tokens: PositiveCount | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    stream: bool = False
    text: dict[str, Any] | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["disabled"] | None = None
    include: Texts | None = Field(None, max_length=0)
    timeout: Seconds | None = None


class EmbeddingBody(Body):
    """Body of /v1/embeddings."""

    input: Prompt
    encoding_format: Literal["float", "base64"] = "float"


class TokenizeBody(Body):
    """Body of /tokenize: a prompt or messages."""

    prompt: str | None = None
    messages: Objects | None = None
    add_special_tokens: bool | None = Field(None, description="Of a prompt; true if it is not given.")
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """Body of /detokenize."""

    tokens: TokenIds


class TranslateBody(Body):
    """Body of /v1/translate."""

    text: str | Texts
    target_language: str | None = Field(None, max_length=64)
    source_language: str | None = Field(None, max_length=64)
    target_prefix: str | None = None
    num_beams: Annotated[int, Field(ge=1, le=128)] | None = None
    length_penalty: Number | None = None
    max_tokens: Count | None = None
    temperature: Number | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 64)] | None = None
    request_id: RequestId | None = None
    n: PositiveCount = 1
    timeout: Seconds | None = None


class AttentionBody(Body):
    """Body of /attention."""

    prompt: str | TokenIds
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


def validate(kind: type[ModelT], fields: dict[str, Any], *, ignore_unknown: bool) -> tuple[ModelT, list[str]]:
    """Validate a body and return it with the names of ignored fields.

    Raises:
        ApiError: 400 that names the field.
    """
    for name, reason in REFUSED.items():
        if fields.get(name) is not None and name not in kind.model_fields:
            if name == "modalities" and fields[name] == ["text"]:
                continue
            raise ApiError(400, f"{name}: {reason}", param=name, code="unsupported_parameter")
    try:
        body = kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = [str(part) for part in first["loc"] if not _is_type_name(part)]
        param = ".".join(place)[:200] or None
        raise ApiError(400, f"{param or 'body'}: {first['msg']}", param=param, code="invalid_value") from None
    extra = [name for name in body.model_extra or {} if name not in NO_EFFECT and name not in REFUSED]
    if extra and not ignore_unknown:
        hint = suggest(extra[0][:80], list(kind.model_fields))
        message = f"{extra[0][:80]}: unknown field. {hint} See /openapi.json.".replace(".. ", ". ")
        raise ApiError(400, message, param=extra[0][:80], code="unknown_parameter")
    return body, extra


def _check_length(value: Any, limit: int) -> Any:
    if isinstance(value, dict) and len(value) > limit:
        raise ValueError(f"must have at most {limit:,} entries")
    return value


def _is_type_name(part: int | str) -> bool:
    """Return True for the parts of a place that name a member of a union, such as ``list[str]``."""
    return isinstance(part, str) and (part in ("str", "int", "float", "bool", "dict") or "[" in part)
