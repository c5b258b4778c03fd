"""Messages between the server and its engine process: JSON in frames, over a socket pair. No pickle.

A frame is the length of its body in 4 bytes (big-endian) and the body, one JSON object. Numbers arrive unchanged: JSON
has Python's shortest representation of a float, which is read as the same float.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from kvad.engine.scheduling import SamplingParams, StreamChunk, StructuredOutput, TokenLogprob
from kvad.errors import RequestError

DEFAULT = SamplingParams()
MAX_FRAME = 1 << 29  # bytes; longer than the prompt tokens of any request
Message = dict[str, Any]


def encode_frame(message: Mapping[str, Any]) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    assert len(body) <= MAX_FRAME, f"a message of {len(body)} bytes"
    return len(body).to_bytes(4) + body


class FrameReader:
    """Splits a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Add bytes and return the messages that are complete now."""
        buffer, start = self._buffer, 0
        buffer += data
        messages = []
        while len(buffer) - start >= 4:
            stop = start + 4 + int.from_bytes(buffer[start : start + 4])
            if len(buffer) < stop:
                break
            messages.append(json.loads(buffer[start + 4 : stop]))
            start = stop
        del buffer[:start]
        return messages


def params_to_json(params: SamplingParams) -> Message:
    """Return the fields that differ from their defaults.

    Raises:
        RequestError: If a field is a function, which another process cannot call.
    """
    if params.allowed_tokens_fn is not None:
        raise RequestError("allowed_tokens_fn: a function cannot be sent to the engine's process", "Use kvad.LLM.")
    given = {field.name: getattr(params, field.name) for field in dataclasses.fields(SamplingParams)}
    fields = {name: value for name, value in given.items() if value != getattr(DEFAULT, name)}
    if params.structured_output is not None:
        fields["structured_output"] = params.structured_output.to_json()
    return fields


def params_from_json(fields: Message) -> SamplingParams:
    if "logit_bias" in fields:
        fields["logit_bias"] = {int(token): bias for token, bias in fields["logit_bias"].items()}
    if "bad_words_ids" in fields:
        fields["bad_words_ids"] = tuple(map(tuple, fields["bad_words_ids"]))
    for name in ("stop", "stop_token_ids"):
        if name in fields:
            fields[name] = tuple(fields[name])
    if "structured_output" in fields:
        fields["structured_output"] = StructuredOutput.from_json(fields["structured_output"])
    return SamplingParams(**fields)


def chunk_from_json(fields: list[Any]) -> StreamChunk:
    """Return the chunk whose JSON is a list of its fields."""
    chunk = StreamChunk(*fields)
    logprob: Any = chunk.logprob  # lists of fields, too
    if logprob is None and not chunk.prompt_logprobs:
        return chunk
    prompt_logprobs = tuple(map(_logprob, chunk.prompt_logprobs))
    return chunk._replace(logprob=None if logprob is None else _logprob(logprob), prompt_logprobs=prompt_logprobs)


def _logprob(fields: Any) -> TokenLogprob:
    token_id, logprob, top = fields
    return TokenLogprob(token_id, logprob, tuple((token, value) for token, value in top))
