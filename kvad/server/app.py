"""ASGI application: guards, routes, and the conversion of results and errors to HTTP responses."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvad.errors import KvadError
from kvad.server import api
from kvad.server.api import ApiContext, ApiError, EventStream
from kvad.server.config import ServerConfig
from kvad.server.guards import Guard, error_response, json_response, printable, request_headers

chat, completions, errors, generation = api.chat, api.completions, api.errors, api.generation
panel, plain_routes, responses, schema = api.panel, api.plain_routes, api.responses, api.schema
LOG = logging.getLogger(__name__)
STATIC = Path(__file__).with_name("static")
MEDIA_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
PAGE_FILES = {f"/{path.name}": path.name for path in sorted(STATIC.iterdir()) if path.suffix in MEDIA_TYPES}
PAGE_FILES["/"] = PAGE_FILES.pop("/index.html")
LAST_SECONDS = 5.0  # for the last event of a stream
INLINE_BYTES = 1 << 14  # a longer body is parsed in a thread, between the events of other requests
MORE_VALUES = 100_000  # values of a body besides the tokens of its prompt
STEP_SECONDS = 60.0  # a running engine that sends nothing for so long is not ready
PAGE_HEADERS = {
    "content-security-policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "object-src 'none'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
WITHOUT_QUEUE = frozenset({"/tokenize", "/detokenize", "/attention"})  # routes that are served while the queue is full
Handler = Callable[[ApiContext, Any, str], Awaitable[Any]]

POST_ROUTES: dict[str, tuple[type[schema.Body], Handler]] = {
    "/v1/completions": (schema.CompletionBody, completions.create_completion),
    "/v1/chat/completions": (schema.ChatBody, chat.create_chat_completion),
    "/v1/responses": (schema.ResponsesBody, responses.create_response),
    "/v1/embeddings": (schema.EmbeddingBody, plain_routes.create_embeddings),
    "/v1/translate": (schema.TranslateBody, plain_routes.translate),
    "/tokenize": (schema.TokenizeBody, plain_routes.tokenize),
    "/detokenize": (schema.DetokenizeBody, plain_routes.detokenize),
    "/attention": (schema.AttentionBody, panel.attention),
}


def build_app(context: ApiContext) -> ASGIApp:
    """Return the application of a loaded model."""
    routes = [
        Route(path, _Endpoint(context, kind, handler, is_queued=path not in WITHOUT_QUEUE), methods=["POST"])
        for path, (kind, handler) in POST_ROUTES.items()
    ]
    getters: dict[str, Callable[..., Any]] = {
        "/v1/models": lambda: plain_routes.list_models(context),
        "/v1/models/{name:path}": lambda name: plain_routes.describe_model(context, context.check_model(name)),
        "/tokenizer_info": lambda: plain_routes.tokenizer_info(context),
        "/cache": lambda: panel.cache_state(context),
        "/cache/events": lambda: panel.cache_events(context),
        "/training": lambda: panel.training(context),
        "/metrics": lambda: _metrics(context),
        "/health": lambda: {"status": "ok"},
        "/ready": lambda: _ready(context),
        "/openapi.json": lambda: openapi(context),
    }
    for path, name in PAGE_FILES.items():
        media_type = MEDIA_TYPES[Path(name).suffix]
        getters[path] = partial(FileResponse, STATIC / name, headers=PAGE_HEADERS, media_type=media_type)
    routes += [Route(path, _Getter(getter), methods=["GET"]) for path, getter in getters.items()]
    handlers: dict[Any, Any] = {404: _http_error, 405: _http_error}
    return Guard(context, Starlette(routes=routes, exception_handlers=handlers))


async def _http_error(request: Any, error: Any) -> Response:
    path = str(request.scope["path"])[:200]
    message = f"{request.method} {path}: " + ("no such route" if error.status_code == 404 else "method not allowed")
    code = "not_found" if error.status_code == 404 else "method_not_allowed"
    return error_response(ApiError(error.status_code, f"{message}. See /openapi.json.", code=code), error.headers)


# ---------------------------------------------------------------- endpoints


class _Endpoint:
    """Reads and validates a JSON body, calls a handler and sends its result."""

    def __init__(self, context: ApiContext, kind: type[schema.Body], handler: Handler, *, is_queued: bool) -> None:
        self._context, self._kind, self._handler = context, kind, handler
        self._check_room = context.check_room if is_queued else context.check_running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context, key = self._context, scope["key"]
        if context.active[key] >= context.config.limits.max_requests_per_key:  # before its body takes memory
            message = "too many requests of this API key at the same time"
            error = ApiError(429, message, code="rate_limit", retry_after=1)
            await error_response(error)(scope, receive, send)
            return
        context.active[key] += 1
        try:
            await self._serve(scope, receive, send)
        except ConnectionError:
            LOG.debug("the client of %s has disconnected", printable(scope["path"]))
        finally:
            context.active[key] -= 1
            if not context.active[key]:
                del context.active[key]

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        config = self._context.config
        headers: dict[str, str] = {}
        try:
            self._check_room()  # before the body takes memory
            data = await read_body(config, scope, receive)
            self._check_room()  # before texts are encoded and schemas compiled; the exact check is at submission
            is_short = len(data) <= INLINE_BYTES
            body, ignored = self._parse(data) if is_short else await asyncio.to_thread(self._parse, data)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        if ignored:
            names = ", ".join(ascii(name[:200])[1:-1] for name in ignored[:20])
            headers["x-kvad-ignored-fields"] = names[:500]
        limit = config.limits.request_seconds
        deadline = asyncio.get_running_loop().time() + min(getattr(body, "timeout", None) or limit, limit)
        await generation.cancel_on_disconnect(receive, self._answer(scope, receive, send, body, headers, deadline))

    def _parse(self, data: bytearray) -> tuple[schema.Body, list[str]]:
        config = self._context.config
        fields = schema.parse_json(data, config.limits.max_prompt_tokens + MORE_VALUES)
        return schema.validate(self._kind, fields, ignore_unknown=config.ignores_unknown_fields)

    async def _answer(
        self, scope: Scope, receive: Receive, send: Send, body: schema.Body, headers: dict[str, str], deadline: float
    ) -> None:
        limit = self._context.config.limits.request_seconds
        try:
            async with asyncio.timeout_at(deadline):
                result = await self._handler(self._context, body, scope["key"])
                first = b""
                if isinstance(result, EventStream):
                    first = await anext(result.events)  # an error before it has its own status
        except Exception as error:
            converted = errors.rename_fields(_api_error(error, scope), body.field_names())
            if isinstance(error, TimeoutError) and (getattr(body, "timeout", None) or limit) < limit:
                converted.status = 408  # what the client asked for is no failure of the server
            await error_response(converted)(scope, receive, send)
            return
        if isinstance(result, EventStream):
            await send_events(scope, send, first, result, deadline, headers, body.field_names())
        else:
            await json_response(result, headers=headers)(scope, receive, send)


def _api_error(error: Exception, scope: Scope) -> ApiError:
    converted = errors.from_exception(error)
    if converted.code == "internal_error":
        LOG.error("%s failed", printable(scope["path"]), exc_info=error)
    return converted


async def send_events(
    scope: Scope,
    send: Send,
    first: bytes,
    stream: EventStream,
    deadline: float | None,
    headers: Mapping[str, str],
    names: Mapping[str, str],
) -> None:
    """Send events as they come; an error becomes the last events of the stream.

    ``names``: those that errors have instead of the names of the request's fields (``errors.rename_fields``).
    """
    await send(
        {
            "type": "http.response.start",
            "status": 200,
            "headers": [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
                *((name.encode(), value.encode()) for name, value in headers.items()),
            ],
        }
    )
    last = b""
    async with aclosing(stream.events) as rest:  # type: ignore[type-var]
        try:
            if first:
                await send({"type": "http.response.body", "body": first, "more_body": True})
            async with asyncio.timeout_at(deadline):
                async for data in rest:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:
            last = stream.failed(errors.rename_fields(_api_error(error, scope), names))
    with suppress(TimeoutError):  # of a client that reads nothing, which would keep its place for ever
        async with asyncio.timeout(LAST_SECONDS):
            await send({"type": "http.response.body", "body": last, "more_body": False})


async def read_body(config: ServerConfig, scope: Scope, receive: Receive) -> bytearray:
    """Return the body of a JSON request, within the limits of size and time.

    Raises:
        ApiError: 415, 413 or 408.
    """
    limit, seconds = config.limits.max_body_bytes, config.limits.body_seconds
    headers = request_headers(scope)
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the Content-Type must be application/json", code="content_type")
    too_large = ApiError(413, f"the body must be at most {limit:,} bytes", code="body_too_large")
    length = headers.get("content-length", "0")
    if not (length.isdecimal() and length.isascii()) or int(length) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ApiError(400, "the client has disconnected", code="disconnected")
                body += message.get("body", b"")
                if len(body) > limit:
                    raise too_large
                if not message.get("more_body", False):
                    return body
    except TimeoutError:
        raise ApiError(408, f"the body has not arrived within {seconds:g} s", code="timeout", retry_after=1) from None


class _Getter:
    """Sends the result of a function of the path's parameters."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            result = self._function(**scope["path_params"])
            if isinstance(result, Awaitable):
                result = await result
        except Exception as error:
            await error_response(_api_error(error, scope))(scope, receive, send)
            return
        if isinstance(result, EventStream) and scope["method"] == "HEAD":
            await Response(media_type="text/event-stream")(scope, receive, send)
        elif isinstance(result, EventStream):
            with suppress(ConnectionError):
                await generation.cancel_on_disconnect(receive, send_events(scope, send, b"", result, None, {}, {}))
        else:
            await (result if isinstance(result, Response) else json_response(result))(scope, receive, send)


def _ready(context: ApiContext) -> Response:
    """Return 200 if requests are accepted and the engine runs."""
    problem = ""
    if context.llm.failure is not None:
        problem = "the engine has ended"
    elif context.draining:
        problem = "the server is shutting down"
    elif context.llm.streams and time.monotonic() - context.llm.last_message > STEP_SECONDS:
        problem = f"the engine has sent nothing for {STEP_SECONDS:g} s"
    if problem:
        return error_response(ApiError(503, problem, code="not_ready", retry_after=5))
    return json_response({"status": "ready", "model": context.model_name})


async def _metrics(context: ApiContext) -> Response:
    stats = None
    with suppress(TimeoutError, KvadError):  # a long step delays the reply; an engine may have ended
        async with asyncio.timeout(2.0):
            stats = await context.llm.call("stats")
    text = context.metrics.expose(stats, len(context.llm.streams))
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def openapi(context: ApiContext) -> dict[str, Any]:
    """Return the description of all routes (OpenAPI 3.1)."""
    from kvad import __version__

    definitions: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    error = {
        "description": "Error",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    answers = {"200": {"description": "Success"}, "4XX": error, "5XX": error}
    for path, (kind, handler) in POST_ROUTES.items():
        form = kind.model_json_schema(ref_template="#/components/schemas/{model}")
        definitions |= form.pop("$defs", {})
        form["additionalProperties"] = False
        for name in form["properties"].keys() - set(form.get("required", ())):  # null is an absent field
            form["properties"][name] = {"anyOf": [form["properties"][name], {"type": "null"}]}
        form["properties"] |= {name: {"description": "Without effect."} for name in schema.NO_EFFECT}
        definitions[kind.__name__] = form
        reference = {"$ref": f"#/components/schemas/{kind.__name__}"}
        content = {"application/json": {"schema": reference}}
        summary = (handler.__doc__ or "").partition("\n")[0]
        paths[path] = {
            "post": {"summary": summary, "requestBody": {"required": True, "content": content}, "responses": answers}
        }
    for path in ("/v1/models", "/tokenizer_info", "/cache", "/training", "/metrics", "/health", "/ready"):
        paths[path] = {"get": {"summary": f"Get {path}.", "responses": answers}}
    paths["/health"]["get"]["security"] = []
    definitions["Error"] = {
        "type": "object", "required": ["error"],
        "properties": {"error": {"type": "object", "required": ["message", "type", "param", "code"]}},
    }  # fmt: skip
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvad", "version": __version__, "description": f"Serves {context.model_name}."},
        "paths": paths,
        "security": [{"key": []}] if context.config.api_keys.digests else [],
        "components": {"schemas": definitions, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }
