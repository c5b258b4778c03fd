"""Configuration of the server. Plain values, no torch."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from pathlib import Path

from kvad.errors import ConfigError, UsageError
from kvad.server.limits import ServerLimits

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class ApiKeys:
    """API keys as hashes; a key's id is the first 12 hexadecimal digits of its hash."""

    digests: tuple[bytes, ...] = ()

    @staticmethod
    def from_texts(keys: list[str]) -> ApiKeys:
        if any(len(key) < 8 for key in keys):
            raise UsageError("API keys: must have at least 8 characters", "Use a long random text.")
        return ApiKeys(tuple(hashlib.sha256(key.encode()).digest() for key in keys))

    @staticmethod
    def from_file(path: Path) -> ApiKeys:
        """Read one key per line; empty lines and lines that begin with # are skipped.

        Raises:
            UsageError: If the file cannot be read or has no key.
        """
        try:
            lines = path.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{path}: {error}", "Give a text file with one API key per line.") from None
        keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not keys:
            raise UsageError(f"{path}: has no API key", "Write one key per line.")
        return ApiKeys.from_texts(keys)

    def find(self, key: str) -> str | None:
        """Return the id of a key, or None; every stored digest is compared, in constant time."""
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self.digests]
        return digest.hex()[:12] if any(matches) else None


@dataclass(frozen=True)
class ServerConfig:
    """Options of the server, apart from those of the model and its cache."""

    model_name: str = ""  # in responses and /v1/models; "": the checkpoint's name
    host: str = "127.0.0.1"
    port: int = 8000  # 0: a free one
    api_keys: ApiKeys = field(default_factory=ApiKeys)  # none: no key is required
    allowed_hosts: tuple[str, ...] = ()  # Host headers besides the local ones and the host itself; "*": every one
    cors_origins: tuple[str, ...] = ()
    limits: ServerLimits = field(default_factory=ServerLimits)
    num_replicas: int = 1  # engines; several are behind Ray Serve
    shutdown_seconds: float = 10.0  # running requests may finish in this time
    session_dir: Path | None = None
    shares_prefixes: bool = False  # between API keys
    ignores_unknown_fields: bool = False
    runs_dir: Path | None = None  # its newest training run is shown on the page
    attention: bool = False  # clients may read attention weights

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise ConfigError(f"port: must be from 0 to 65535, got {self.port}")
        if self.num_replicas < 1:
            raise ConfigError(f"num_replicas: must be at least 1, got {self.num_replicas}")
        if not self.shutdown_seconds >= 0:
            raise ConfigError(f"shutdown_seconds: must be at least 0, got {self.shutdown_seconds}")

    @property
    def hosts(self) -> frozenset[str]:
        """Names that a Host header may have; "*" for every one."""
        return frozenset((*LOCAL_HOSTS, self.host, *self.allowed_hosts))
