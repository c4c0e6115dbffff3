"""API keys, which identify clients, and admin keys, for calls that change the server.

Keys come from the environment or from files that only their owner can read, never from the configuration, which is
shown to clients. Only a digest of each key is kept.
"""

import hashlib
import hmac
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from moe_serve.config import ServerConfig
from moe_serve.errors import ConfigError
from moe_serve.server.edge.client_limits import LIMIT_NAMES, Client, ClientLimits

API_KEY_VARIABLE = "MOE_SERVE_API_KEY"
ADMIN_KEY_VARIABLE = "MOE_SERVE_ADMIN_API_KEY"
_MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True)
class Key:
    """One key. name: shown in limits and logs;  digest: SHA-256 of the secret;  cache_scope: of its client"""

    name: str
    digest: bytes
    is_admin: bool
    limits: ClientLimits
    cache_scope: str = ""

    @property
    def client(self) -> Client:
        """The client with this key."""
        return Client("admin key" if self.is_admin else "key", self.name, self.limits, self.cache_scope)


class KeyRing:
    """All keys of a server."""

    def __init__(self, keys: tuple[Key, ...]):
        self._keys = keys
        self.has_api_keys = any(not key.is_admin for key in keys)
        self.have_limits = any(key.limits.exist for key in keys)
        self.has_admin_keys = any(key.is_admin for key in keys)

    @classmethod
    def load(cls, server: ServerConfig, environ: Mapping[str, str] = os.environ) -> Self:
        """Returns the keys of the environment and of the files in the configuration. Raises ConfigError.

        A variable holds keys separated by spaces. A file holds one key on each line, optionally after a name and limits
        of its own. Keys of one name are one client.
        """
        keys: list[Key] = []
        for setting, path, variable, is_admin in (
            ("server.api_key_file", server.api_key_file, API_KEY_VARIABLE, False),
            ("server.admin_api_key_file", server.admin_api_key_file, ADMIN_KEY_VARIABLE, True),
        ):
            lines = environ.get(variable, "").split()
            if path is not None:
                lines += _read_lines(setting, Path(path).expanduser())
            kind = "admin" if is_admin else "key"
            for number, line in enumerate(lines, 1):
                limits = ClientLimits() if is_admin else ClientLimits.of(server)
                words, limits = _read_limits(setting, line, limits)
                *name, secret = words
                keys.append(Key(" ".join(name) or f"{kind}-{number}", _digest(secret), is_admin, limits))
        for i, key in enumerate(keys):
            first = next(each for each in keys if (each.name, each.is_admin) == (key.name, key.is_admin))
            if first.limits != key.limits:
                raise ConfigError(f"keys named {key.name!r} have different limits; give them the same, or other names")
            if not server.share_prefix_cache:
                keys[i] = replace(key, cache_scope=_cache_scope(first.digest))
        return cls(tuple(keys))

    def identify(self, secret: str | None) -> Key | None:
        """Returns the key with this secret; None if there is none. Takes the same time for any secret."""
        digest = _digest(secret or "")
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def _cache_scope(digest: bytes) -> str:
    """Returns the cache scope of a client with this key: equal on all front ends, and a secret to other clients."""
    return hmac.digest(digest, b"moe_serve prefix cache", "sha256").hex()


def _read_limits(setting: str, line: str, limits: ClientLimits) -> tuple[list[str], ClientLimits]:
    """Returns the words of a line without limits, and its limits. Raises ConfigError without showing a key."""
    words, given = line.split(), {}
    for word in words[:-1]:
        name, equals, value = word.partition("=")
        if not equals:
            continue
        if name not in LIMIT_NAMES:
            raise ConfigError(f"{setting}: {name!r} is not a limit of a key; known are {', '.join(LIMIT_NAMES)}")
        is_number = value.isascii() and value.isdecimal() and int(value[:19]) > 0
        if not is_number and value != "none":
            raise ConfigError(f"{setting}: {word!r} is not a limit; give a whole number above 0, or none")
        given[name] = int(value[:19]) if is_number else None
    if words[-1].partition("=")[0] in LIMIT_NAMES:
        raise ConfigError(f"{setting}: a line ends with {words[-1]!r}; write limits before the key")
    return [word for word in words[:-1] if "=" not in word] + words[-1:], replace(limits, **given)


def _read_lines(setting: str, path: Path) -> list[str]:
    """Returns the lines of a file of keys, without empty ones and comments."""
    try:
        if not path.is_file():
            raise ConfigError(f"{setting} is {path}, which is no file; give a file with one key on each line")
        if path.stat().st_mode & 0o077:
            raise ConfigError(f"{setting}: other users may read {path}; run: chmod 600 {path}")
        with path.open("rb") as file:
            text = file.read(_MAX_FILE_BYTES).decode()
    except OSError as error:
        raise ConfigError(f"{setting}: {path} cannot be read ({error.strerror}); give a file of this user") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{setting}: {path} is no text; give a file with one key on each line") from None
    lines = [" ".join(line.split()) for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    if not lines:
        raise ConfigError(f"{setting}: {path} holds no key; write one on each line, or leave the setting out")
    return lines
