"""API keys guard every route but /health, whatever the path, the method or the Host header are."""

import asyncio
import base64
import socket

import httpx
import pytest
from starlette.routing import Route

from kvad.server.api import ApiContext
from kvad.server.app import build_app
from kvad.server.config import ApiKeys, ServerConfig
from kvad.server.guards import OPEN_PATH, check_key, request_headers
from kvad.server.metrics import ServerMetrics
from tests.server.conftest import KEYS

SECRET = "prompt of another user"
ODD_HOSTS = (
    "x/y?",
    "/health?",
    "evil.com",
    "127.0.0.1.evil.com",
    "evil.com/@127.0.0.1",
    "[::1",
    "127.0.0.1:x",
    "",
    "a b",
)


class NoModel:
    """A model without a tokenizer, enough to build the routes."""

    tokenizer = None


def all_routes():
    """Return (method, path) of every route of the application."""
    context = ApiContext(NoModel(), ServerConfig(), None, "tiny")
    routes = build_app(context)._app.routes
    assert routes and all(type(route) is Route for route in routes)
    pairs = {(method, route.path.replace("{name:path}", "tiny")) for route in routes for method in route.methods}
    assert {("POST", "/v1/chat/completions"), ("GET", "/metrics"), ("GET", "/"), ("HEAD", "/cache")} <= pairs
    return sorted(pairs)


ROUTES = all_routes()
GUARDED = sorted({path for _, path in ROUTES} - {OPEN_PATH})


def send(server, method, target, *headers):
    """Send a request to the byte and return (status, head, body)."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        lines = [f"{method} {target} HTTP/1.1", *headers, "Connection: close", "", ""]
        connection.sendall("\r\n".join(lines).encode())
        data = b""
        while part := connection.recv(65536):
            data += part
            if method == "GET" and b"text/event-stream" in data:
                break  # it does not end
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), head.decode("latin-1").lower(), body


HOST = "Host: 127.0.0.1"
BODY = ("Content-Type: application/json", "Content-Length: 0")
BAD_KEYS = (
    "", "Authorization: Bearer wrong-key-0001", f"Authorization: Bearer {KEYS[0]}x", f"Authorization: Digest {KEYS[0]}",
    "Authorization: Bearer", "Authorization: Basic %%%", "Authorization: Basic é",
    f"Authorization: Bearer {KEYS[0].upper()}", f"X-Api-Key: {KEYS[0]}",
)  # fmt: skip


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE"])
def test_every_route_requires_a_key(server, method):
    for path in GUARDED:
        for authorization in BAD_KEYS[:2] if method != "GET" else BAD_KEYS:
            headers = [HOST, *BODY, *([authorization] if authorization else [])]
            status, head, body = send(server, method, path, *headers)
            assert status == 401, (method, path, authorization)
            assert ("www-authenticate: basic" in head and b"invalid_api_key" in body) or method == "HEAD"
    assert send(server, method, OPEN_PATH, HOST)[0] == (200 if method in ("GET", "HEAD") else 405)


def test_a_good_key_opens_every_route(server):
    for method, path in ROUTES:
        status, _, body = send(server, method, path, HOST, *BODY, f"Authorization: Bearer {KEYS[1]}")
        assert status == (200 if method in ("GET", "HEAD") else 400), (method, path, body)


@pytest.mark.parametrize(
    "target",
    [
        "//v1/models", "/v1//models", "/v1/models/", "/%76%31/models", "/v1/%6dodels", "/v1/models/%2e%2e/tiny",
        "/v1/../v1/models", "/./v1/models", "/health/../v1/models", "/health/..%2fv1/models",
        "/health%2f..%2fv1%2fmodels", "/V1/MODELS", "/health/", "//health", "/health?x=/v1/models", "/HEALTH",
        "/%68ealth", "/health%00", "/health;x", "/v1/models?key=1", "/v1/models#/health", "/health#/v1/models", "http://127.0.0.1/v1/models",
        "http://127.0.0.1/health/../cache", "*", "/static/../app.py", "/..%2f..%2fetc/passwd", "/app.js/../../run.py",
    ],
)  # fmt: skip
def test_odd_paths_open_nothing(server, target):
    """Without a key, only the exact path of /health has an answer other than a refusal."""
    status, _, body = send(server, "GET", target, HOST)
    is_open = target.partition("?")[0].partition("#")[0] == OPEN_PATH
    assert status == 200 if is_open else status in (400, 401, 404), (status, body)
    assert body == b'{"status":"ok"}' if is_open else b"tiny" not in body and b"root:" not in body
    status, _, body = send(server, "GET", target, HOST, f"Authorization: Bearer {KEYS[0]}")
    assert status < 500 and b"root:" not in body and b"import " not in body


@pytest.mark.parametrize("host", ODD_HOSTS)
def test_odd_hosts_are_refused(server, host):
    """A Host header is neither taken for the path nor accepted from another site (DNS rebinding)."""
    for authorization in ([], [f"Authorization: Bearer {KEYS[0]}"]):
        for path in ("/v1/models", "/cache", "/health"):
            status, _, body = send(server, "GET", path, f"Host: {host}", *authorization)
            assert status in (400, 403), (host, path, body)


def test_two_or_no_hosts_are_refused(server):
    key = f"Authorization: Bearer {KEYS[0]}"
    assert send(server, "GET", "/v1/models", HOST, "Host: evil.com", key)[0] in (400, 403)
    assert send(server, "GET", "/v1/models", "Host: evil.com", HOST, key)[0] in (400, 403)
    assert send(server, "GET", "/v1/models", key)[0] in (400, 403)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8000", "localhost:1", "[::1]:80", "192.168.1.7", "LOCALHOST"])
def test_local_names_and_addresses_are_accepted(server, host):
    assert send(server, "GET", "/v1/models", f"Host: {host}", f"Authorization: Bearer {KEYS[0]}")[0] == 200


@pytest.mark.parametrize("origin", ["https://evil.com", "null", "http://127.0.0.1.evil.com", "http://127.0.0.1:1"])
def test_pages_of_other_sites_are_refused(server, origin):
    key = f"Authorization: Bearer {KEYS[0]}"
    status, head, _ = send(server, "GET", "/v1/models", HOST, key, f"Origin: {origin}")
    assert status == 403 and "access-control" not in head
    status, head, _ = send(server, "OPTIONS", "/v1/models", HOST, f"Origin: {origin}")
    assert status in (401, 403) and "access-control" not in head
    assert send(server, "GET", "/v1/models", HOST, key, "Origin: http://127.0.0.1")[0] == 200


SITE = "https://app.example"
SDK_HEADERS = "authorization,content-type,x-stainless-lang,x-stainless-retry-count"  # of OpenAI's package for browsers


def answer_of_cors(method, **headers):
    """Return the response of a server with one allowed site and an API key."""
    config = ServerConfig(cors_origins=(SITE,), api_keys=ApiKeys.from_texts(list(KEYS)))
    app = build_app(ApiContext(NoModel(), config, ServerMetrics("tiny"), "tiny"))
    request = httpx.Request(method, "http://127.0.0.1/v1/chat/completions", headers=headers)
    return asyncio.run(httpx.ASGITransport(app).handle_async_request(request))


def test_an_allowed_site_may_send_the_headers_of_an_sdk():
    names = {"access-control-request-method": "POST", "access-control-request-headers": SDK_HEADERS}
    reply = answer_of_cors("OPTIONS", origin=SITE, **names)
    assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (204, SITE)
    assert reply.headers["access-control-allow-headers"] == SDK_HEADERS
    reply = answer_of_cors("POST", origin=SITE)
    assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (401, SITE)
    exposed = set(reply.headers["access-control-expose-headers"].split(", "))
    assert exposed == {"retry-after", "x-request-id", "x-kvad-ignored-fields"}
    reply = answer_of_cors("OPTIONS", origin="https://evil.com", **names)
    assert reply.status_code == 403 and not any(name.startswith("access-control") for name in reply.headers)


def test_basic_authentication_of_a_browser(server):
    def authorization(text):
        return f"Authorization: Basic {base64.b64encode(text.encode()).decode()}"

    assert send(server, "GET", "/v1/models", HOST, authorization(f"anyone:{KEYS[0]}"))[0] == 200
    assert send(server, "GET", "/v1/models", HOST, authorization(f"{KEYS[0]}:"))[0] == 401
    assert send(server, "GET", "/v1/models", HOST, authorization(KEYS[0]))[0] == 401


def test_the_log_has_neither_prompts_nor_keys(server):
    server.complete(SECRET, max_tokens=2)
    send(server, "GET", "/x%0a%1b[31mforged", HOST)
    text = "".join(server.log)
    assert SECRET not in text and not any(key in text for key in KEYS) and "\x1b" not in text


def test_keys_are_found_by_their_hash():
    keys = ApiKeys.from_texts(list(KEYS))
    assert keys.find(KEYS[0]) != keys.find(KEYS[1]) and keys.find("other") is None and keys.find("") is None
    assert not any(key.encode() in digest for key in KEYS for digest in keys.digests)


def test_a_key_of_any_script_is_found_in_utf_8_and_latin_1():
    key = "schl\u00fcssel-\u00e0"  # its last byte in UTF-8 is a space in Latin-1
    config = ServerConfig(api_keys=ApiKeys.from_texts([key]))
    scope = {"raw_path": b"/v1/models", "path": "/v1/models"}
    for encoding in ("utf-8", "latin-1"):
        headers = request_headers({"headers": [(b"authorization", f"Bearer {key}".encode(encoding))]})
        assert check_key(config, scope, headers) == config.api_keys.find(key)


def test_salt_of_a_key_is_its_own_unless_prefixes_are_shared():
    context, shared = (
        ApiContext(NoModel(), ServerConfig(shares_prefixes=given), None, "tiny") for given in (False, True)
    )
    salts = [context.salt(*given) for given in (("a", None), ("b", None), ("a", "b"), ("", "a"), ("", None))]
    assert len(set(salts)) == 5 and salts[-1] == ""
    assert (
        shared.salt("a", None) == shared.salt("b", None) == "" and shared.salt("a", "x") == shared.salt("b", "x") != ""
    )
