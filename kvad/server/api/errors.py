"""Errors of the API: HTTP status and OpenAI's error body."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvad.errors import EngineError, KvadError, NumericalError, StorageError, UsageError

# The field at the start of a message: "prompt:", "tools[0].type:", "top_k, top_p:", "overflow=reject:".
_PARAM = re.compile(r"(encoder input|[a-z][a-z0-9_]*(?:\[\d+\])?(?:\.[a-z0-9_]+)*)(?:=\w+)?(?:, [a-z_]+)*:")
_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 408: "timeout_error", 409: "conflict_error", 413: "invalid_request_error",
    415: "invalid_request_error", 429: "rate_limit_error", 500: "server_error", 503: "unavailable_error",
    504: "timeout_error",
}  # fmt: skip


class ApiError(Exception):
    """A request that is refused or failed.

    Args:
        status: HTTP status.
        message: One line with the problem and a fix.
        param: Field of the request.
        code: Machine-readable reason.
        retry_after: Seconds after which the client may try again (429, 503).
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """Return OpenAI's error body."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def from_exception(error: Exception) -> ApiError:
    """Return the API's error for an exception; the message of an unknown one is not sent to the client."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, NumericalError):
        return ApiError(500, str(error), code="numerical_error")
    if isinstance(error, StorageError):
        return ApiError(409, str(error), code=f"storage_{error.reason}")
    if isinstance(error, UsageError):
        match = _PARAM.match(error.message)
        return ApiError(400, str(error), param=None if match is None else match[1], code="invalid_value")
    if isinstance(error, KvadError):
        is_gone = isinstance(error, EngineError) and "process has ended" in error.message
        return ApiError(503 if is_gone else 500, str(error), code="engine_error", retry_after=5 if is_gone else None)
    if isinstance(error, TimeoutError):
        return ApiError(
            504, "the request exceeded its time limit: shorten it, or give a larger timeout", code="timeout"
        )
    return ApiError(500, "internal error: the server's log has the reason", code="internal_error")


def shutting_down() -> ApiError:
    """Return the 503 of new requests during a shutdown, and of those that it ends."""
    return ApiError(503, "the server is shutting down", code="shutting_down", retry_after=5)


def invalid(param: str, problem: str) -> ApiError:
    """Return a 400 that names the field: ``invalid("n", "must be at most 16, got 99")``."""
    return ApiError(400, f"{param}: {problem}", param=param, code="invalid_value")


@contextmanager
def naming(param: str) -> Iterator[None]:
    """Name a field in errors of the library that name none."""
    try:
        yield
    except UsageError as error:
        if _PARAM.match(error.message):
            raise
        raise invalid(param, str(error)) from error


def rename_fields(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """Return an error with the names of the request's fields in place of those of the library or another route.

    Args:
        error: The error; it is changed.
        names: Name that errors have -> name of the field. The first one that matches is replaced.
    """
    for name, field in names.items():
        pattern = re.compile(rf"{re.escape(name)}(?=[.:\[]|\Z)")
        if error.param is not None and pattern.match(error.param):
            error.param = field + error.param[len(name) :]
            if pattern.match(error.message):
                error.message = field + error.message[len(name) :]
            break
    return error
