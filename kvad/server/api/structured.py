"""Structured output: ``response_format`` and ``structured_outputs`` of a request as options of the engine."""

from __future__ import annotations

import json
from typing import Any

from kvad.server.api.errors import ApiError, invalid
from kvad.server.api.generation import check_limit
from kvad.server.api.schema import GenerationBody
from kvad.server.limits import ServerLimits


def structured_settings(body: GenerationBody, limits: ServerLimits) -> dict[str, Any]:
    """Return the option of a request's structured output, or {} without one.

    Raises:
        ApiError: 400 that names the field.
    """
    constraint: dict[str, Any] | None = None
    if body.response_format is not None:
        constraint = _from_response_format(body.response_format)
    if body.structured_outputs is not None:
        if constraint is not None:
            raise invalid("structured_outputs", "cannot be combined with response_format")
        constraint = body.structured_outputs
    return {} if constraint is None else constrained(constraint, limits)


def constrained(constraint: dict[str, Any], limits: ServerLimits) -> dict[str, Any]:
    """Return the option of the engine for a constraint such as ``{"json": {...}}``."""
    size = len(json.dumps(constraint))
    check_limit("structured_outputs", size, limits.max_schema_bytes, "bytes")
    raise ApiError(400, "response_format: structured output is not available yet", param="response_format")


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
        if not isinstance(schema, dict | bool):
            raise invalid("response_format", "json_schema.schema must be a JSON schema")
        return {"json": schema}
    raise invalid("response_format", f"type must be text, json_object or json_schema, got {str(kind)[:80]!r}")
