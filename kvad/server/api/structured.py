"""Structured output: ``response_format`` and ``structured_outputs`` of a request as an option of the engine."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from kvad.engine.scheduling import StructuredOutput
from kvad.errors import RequestError
from kvad.server.api.errors import ApiError, invalid
from kvad.server.api.generation import ApiContext, check_limit
from kvad.server.api.schema import GenerationBody
from kvad.server.api.tool_formats import TEXT_RULE, Thoughts, json_value, literal

_PLACE = re.compile(r"^grammar: (at \d+\(\d+\): )?")


async def structured_settings(
    context: ApiContext, body: GenerationBody, thoughts: Thoughts | None = None, marks: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the option of a request's structured output, compiled by the engine, or {} without one.

    Args:
        context: Parts of all routes.
        body: The request.
        thoughts: Grammar of the text before the output.
        marks: Names of special tokens that are part of that text.

    Raises:
        ApiError: 400 that names the field.
    """
    if body.response_format is not None and body.structured_outputs is not None:
        raise invalid("structured_outputs", "cannot be combined with response_format")
    if body.response_format is not None:
        constraint = _from_response_format(body.response_format)
        if constraint is None:
            return {}
        return await constrain(context, "response_format", constraint, marks, thoughts)
    if body.structured_outputs is None:
        return {}
    given = {name: value for name, value in body.structured_outputs.items() if value is not None}
    if "json" in given:  # vLLM's name
        given["json_schema"] = given.pop("json")
    return await constrain(context, "structured_outputs", given, marks, thoughts)


async def constrain(
    context: ApiContext,
    param: str,
    constraint: dict[str, Any],
    visible_special_tokens: Sequence[str] = (),
    thoughts: Thoughts | None = None,
) -> dict[str, Any]:
    """Return the option of the engine for a constraint such as ``{"json_schema": {...}}``.

    ``visible_special_tokens``: names of special tokens that are part of the text; ``thoughts``: text before the output.

    Raises:
        ApiError: 400 that names ``param``.
    """
    check_limit(param, len(json.dumps(constraint)), context.config.limits.max_schema_bytes, "bytes")
    try:
        output = StructuredOutput.from_json(constraint)
        if thoughts is not None and thoughts.expression:
            output = _after(thoughts, output)
        await context.compile(output, visible_special_tokens)
    except RequestError as error:
        message = str(error).removeprefix("structured_output: ")
        if param == "tools" or "grammar" not in constraint:  # the grammar is not the client's
            message = _PLACE.sub("", message)
        raise ApiError(400, f"{param}: {message}", param=param, code="invalid_value") from None
    return {"structured_output": output}


def _after(thoughts: Thoughts, output: StructuredOutput) -> StructuredOutput:
    """Return the grammar of thoughts, then an output."""
    if output.kind == "grammar":
        answer = f"%lark {{\n{output.source}\n}}"
    elif output.kind == "regex":
        answer = "/" + re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", output.source, flags=re.DOTALL) + "/"
    elif output.kind == "choice":
        answer = " | ".join(map(literal, json.loads(output.source)))
    else:
        answer = json_value(json.loads(output.source or '{"type": "object"}'))
    lines = f"start: {thoughts.expression} {thoughts.answer} answer", f"answer: {answer}", TEXT_RULE, *thoughts.rules
    return StructuredOutput("grammar", "\n".join(lines))


def _from_response_format(given: dict[str, Any]) -> dict[str, Any] | None:
    """Return the constraint of OpenAI's ``response_format``; None for plain text."""
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema":
        wrapper = given.get("json_schema")
        schema = wrapper.get("schema") if isinstance(wrapper, dict) else None
        if not isinstance(schema, dict):
            raise invalid("response_format.json_schema.schema", "must be a JSON schema")
        return {"json_schema": schema}
    raise invalid("response_format", f"type must be text, json_object or json_schema, got {str(kind)[:80]!r}")
