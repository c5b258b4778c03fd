"""Guards of every request, before it is routed: Host, Origin and API key; and the responses of errors."""

from __future__ import annotations

import base64
import ipaddress
import json
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvad.server.api import ApiContext, ApiError
from kvad.server.config import ServerConfig

LOG = logging.getLogger(__name__)
OPEN_PATH = "/health"  # the only route without an API key
EXPOSED_HEADERS = b"retry-after, x-request-id, x-kvad-ignored-fields"  # those that scripts of other sites may read


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return the response of a value; bytes are JSON already."""
    body = value if isinstance(value, bytes) else json.dumps(value, separators=(",", ":")).encode()
    return Response(body, status, dict(headers or {}), "application/json")


def error_response(error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    """Return the response of an error, with Retry-After if the client may try again."""
    fields = dict(headers or {})
    if error.retry_after is not None:
        fields["retry-after"] = str(error.retry_after)
    if error.status == 401:
        fields["www-authenticate"] = 'Basic realm="kvad"'
    return json_response(error.body(), error.status, fields)


class Guard:
    """Checks every request before it is routed: Host, Origin, API key, by the raw path."""

    def __init__(self, context: ApiContext, app: ASGIApp) -> None:
        self._context, self._app = context, app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.monotonic(), 0
        config, headers = self._context.config, request_headers(scope)

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], *_cors_headers(config, headers)]}
            await send(message)

        try:
            check_host(config, headers)
            check_origin(config, headers)
            preflight = scope["method"] == "OPTIONS" and bool(config.cors_origins) and "origin" in headers
            scope["key"] = "" if preflight else check_key(config, scope, headers)
            if preflight:
                await Response(status_code=204)(scope, receive, send_with_headers)
            else:
                await self._app(scope, receive, send_with_headers)
        except ApiError as error:
            await error_response(error)(scope, receive, send_with_headers)
        finally:
            self._context.metrics.observe_response(status)
            seconds = time.monotonic() - start
            LOG.info("%s %s %d %.3f s", scope["method"], printable(scope["path"]), status, seconds)


def printable(text: str) -> str:
    """Return text for a log line: no control characters, at most 200 characters."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text[:200])


def request_headers(scope: Scope) -> dict[str, str]:
    """Return the headers, the last one of each name; a second Host is refused by ``check_host``."""
    headers = dict[str, str]()
    for name, value in scope["headers"]:
        text = name.decode("latin-1").lower()
        headers[text] = "\0" if text == "host" and "host" in headers else value.decode("latin-1")
    return headers


def host_name(host: str) -> str:
    """Return the name in a Host header without its port; "" if it is malformed."""
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port
    except ValueError:
        return ""
    return (parts.hostname or "") if parts.netloc == host and "@" not in host else ""


def check_host(config: ServerConfig, headers: Mapping[str, str]) -> None:
    """Raise a 403 for a Host that is neither an IP address nor allowed (DNS rebinding)."""
    name = host_name(headers.get("host", ""))
    if "*" in config.hosts or name in config.hosts:
        return
    try:
        ipaddress.ip_address(name)
    except ValueError:
        message = f"the Host header {printable(headers.get('host', ''))!r} is not allowed: start with --allowed-host"
        raise ApiError(403, message, code="host_not_allowed") from None


def check_origin(config: ServerConfig, headers: Mapping[str, str]) -> None:
    """Raise a 403 for a request that a page of another site has sent."""
    origin = headers.get("origin")
    if origin is None or origin in config.cors_origins or "*" in config.cors_origins:
        return
    if origin.partition("://")[2] != headers.get("host"):
        raise ApiError(403, "requests of other sites are not allowed: start with --cors-origin", code="origin")


def _cors_headers(config: ServerConfig, headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    origin = headers.get("origin")
    if origin is None or not (origin in config.cors_origins or "*" in config.cors_origins):
        return []
    requested = headers.get("access-control-request-headers", "authorization, content-type")  # an SDK sends its own
    return [
        (b"access-control-allow-origin", origin.encode("latin-1")),
        (b"access-control-allow-headers", requested.encode("latin-1")),
        (b"access-control-allow-methods", b"GET, POST"),
        (b"access-control-expose-headers", EXPOSED_HEADERS),
        (b"vary", b"origin, access-control-request-headers"),
    ]


def check_key(config: ServerConfig, scope: Scope, headers: Mapping[str, str]) -> str:
    """Return the id of the request's API key, "" if none is required.

    The raw path decides which requests need none, because a Host header can change what other code takes for the path.

    Raises:
        ApiError: 401.
    """
    if not config.api_keys.digests:
        return ""
    is_open = scope["raw_path"] == OPEN_PATH.encode() and scope["path"] == OPEN_PATH
    kind, _, text = headers.get("authorization", "").partition(" ")
    if kind.lower() == "basic":  # of a browser: the password is the key
        with suppress(ValueError):  # neither base64 nor ASCII nor UTF-8
            text = base64.b64decode(text.strip(), validate=True).decode().partition(":")[2]
    elif kind.lower() == "bearer":
        with suppress(UnicodeDecodeError):  # headers are read as Latin-1, and clients send UTF-8, or Latin-1
            text = text.encode("latin-1").decode()
    else:
        text = ""
    key = config.api_keys.find(text.strip()) if text else None
    if key is not None:
        return key
    if is_open:
        return ""
    problem = "the API key is not valid" if text else "an API key is required"
    raise ApiError(401, f"{problem}: send it as 'Authorization: Bearer KEY'", code="invalid_api_key")
