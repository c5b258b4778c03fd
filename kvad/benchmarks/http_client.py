"""Small asynchronous HTTP/1.1 client for load tests: JSON requests and server-sent events over kept connections."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvad.errors import UsageError

LINE_LIMIT = 1 << 24  # bytes of an event


class HttpError(Exception):
    """A response whose status is not 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP status {status}: {text}")
        self.status, self.text = status, text


@dataclass
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


@dataclass
class _Response:
    """A response whose body is read by ``parts``; ``keeps`` is False if its connection must be closed."""

    status: int
    headers: dict[str, str]
    keeps: bool = True


class HttpClient:
    """Sends requests to one server; idle connections are used again.

    Args:
        url: Address of the server, such as http://127.0.0.1:8000.
        headers: Headers of every request.

    Raises:
        UsageError: If the address is not of HTTP.
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{url}: must be an address such as http://127.0.0.1:8000")
        self._host, self._port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        fields = {"host": parts.netloc, "content-type": "application/json", **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self._base = parts.path.rstrip("/")
        self._idle: list[_Connection] = []

    async def get(self, path: str) -> tuple[int, bytes]:
        """Return the status and the body of a GET."""
        connection, response = await self._send("GET", path, b"")
        body = b"".join([part async for part in self._parts(connection, response)])
        self._release(connection, response)
        return response.status, body

    async def stream_events(self, path: str, body: bytes) -> AsyncIterator[bytes]:
        """Yield the data of the server-sent events of a POST, as they arrive.

        Raises:
            HttpError: If the status is not 200.
            OSError, EOFError: If the connection fails.
        """
        connection, response = await self._send("POST", path, body)
        is_read = False
        try:
            parts = self._parts(connection, response)
            if response.status != 200:
                text = b"".join([part async for part in parts])
                is_read = True
                raise HttpError(response.status, text.decode("utf-8", "replace"))
            pending = b""
            async for part in parts:
                *events, pending = (pending + part).replace(b"\r\n", b"\n").split(b"\n\n")
                for event in events:
                    for line in event.split(b"\n"):
                        if line.startswith(b"data:"):
                            yield line[5:].strip()
            is_read = True
        finally:
            if is_read:
                self._release(connection, response)
            else:
                connection.writer.close()

    def close(self) -> None:
        for connection in self._idle:
            connection.writer.close()
        self._idle.clear()

    async def _send(self, method: str, path: str, body: bytes) -> tuple[_Connection, _Response]:
        length = f"content-length: {len(body)}\r\n" if method == "POST" else ""
        request = f"{method} {self._base}{path} HTTP/1.1\r\n{self._head}{length}\r\n".encode() + body
        while True:
            is_reused = bool(self._idle)
            connection = self._idle.pop() if is_reused else await self._connect()
            try:
                connection.writer.write(request)
                return connection, await _read_head(connection.reader)
            except (OSError, EOFError):
                connection.writer.close()
                if not is_reused:  # a kept connection may have been closed by the server in between
                    raise
            except BaseException:
                connection.writer.close()
                raise

    async def _connect(self) -> _Connection:
        opened = await asyncio.open_connection(self._host, self._port, ssl=self._ssl, limit=LINE_LIMIT)
        return _Connection(*opened)

    async def _parts(self, connection: _Connection, response: _Response) -> AsyncIterator[bytes]:
        """Yield the parts of a body: its chunks, or pieces of what arrives."""
        reader = connection.reader
        if "chunked" in response.headers.get("transfer-encoding", ""):
            while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
                yield (await reader.readexactly(size + 2))[:-2]
            while await reader.readuntil(b"\r\n") != b"\r\n":
                pass
        elif "content-length" in response.headers:
            yield await reader.readexactly(int(response.headers["content-length"]))
        else:
            response.keeps = False
            while part := await reader.read(65536):
                yield part

    def _release(self, connection: _Connection, response: _Response) -> None:
        if response.keeps and response.headers.get("connection", "").lower() != "close":
            self._idle.append(connection)
        else:
            connection.writer.close()


async def _read_head(reader: asyncio.StreamReader) -> _Response:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {}
    for line in lines[1:-2]:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return _Response(int(lines[0].split()[1]), headers)
