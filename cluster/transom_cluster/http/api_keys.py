"""API keys: which requests may come in, and which client each of them is from.

Keys are compared as SHA-256 digests, all of them every time, so that neither their beginnings nor their lengths show in the time
that it takes.
"""

from __future__ import annotations

import hmac
import logging
import os
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256

from transom_worker.config import ServerConfig
from transom_worker.errors import ConfigError

logger = logging.getLogger("transom.router")

ADMIN_FLAG = "--admin-api-key-file"
KEY_VARIABLES: dict[str, tuple[str, ...]] = {
    "api_key": ("TRANSOM_API_KEYS", "TRANSOM_API_KEY"),
    "api_key_file": ("TRANSOM_API_KEY_FILE",),
    "admin_api_key_file": ("TRANSOM_ADMIN_API_KEY_FILE",),
}
"""Settings about keys, and the environment's names for them; `transom serve` reads these."""

LOOK_AGAIN_S = 1.0
_CLIENT_DIGITS = 32
_SHARED_PATHS = frozenset({"/metrics", "/blocks/stream", "/blocks/describe"})


class ApiKeys:
    """The keys of settings and of a file, which is read again when it changes. `clock` counts seconds.

    A file that cannot be read any more leaves the keys as they were: a mistake locks nobody out and lets nobody in.

    Raises:
        ConfigError: the file is no key file; see `read_key_file`.
    """

    def __init__(
        self,
        keys: Sequence[str] = (),
        path: str | None = None,
        *,
        flag: str = "--api-key-file",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._flag = flag
        self._fixed = [_Key(key) for key in keys]
        self._path = path
        self._clock = clock
        self._look_again_s = clock() + LOOK_AGAIN_S
        self._version = None if path is None else _version(path)
        self._from_file = [] if path is None else [_Key(key) for key in read_key_file(path, flag=flag)]

    @classmethod
    def from_config(cls, config: ServerConfig) -> ApiKeys:
        """Those that a server is set to."""
        return cls(config.api_keys, config.api_key_file)

    @classmethod
    def admins_from_config(cls, config: ServerConfig) -> ApiKeys:
        """Those that alone open what shows all clients together."""
        return cls((), config.admin_api_key_file, flag=ADMIN_FLAG)

    @property
    def are_required(self) -> bool:
        """Whether requests need a key."""
        return bool(self._fixed) or self._path is not None

    def client(self, presented: bytes) -> str | None:
        """The client whose key this is: a name that does not tell the key. None: a wrong one."""
        self._read_again()
        digest = sha256(presented).digest()
        found = None
        for key in (*self._fixed, *self._from_file):
            if hmac.compare_digest(key.digest, digest):
                found = key.client
        return found

    def _read_again(self) -> None:
        now_s = self._clock()
        if self._path is None or now_s < self._look_again_s:
            return
        self._look_again_s = now_s + LOOK_AGAIN_S
        version = _version(self._path)
        if version == self._version:
            return
        self._version = version
        try:
            self._from_file = [_Key(key) for key in read_key_file(self._path, flag=self._flag)]
            logger.info("Read %d API keys from %s.", len(self._from_file), self._path)
        except ConfigError as error:
            logger.error("API keys stay as they were: %s", error)


class _Key:
    """One key's digest, and its client's name, from which no digest follows."""

    __slots__ = ("client", "digest")

    def __init__(self, key: str) -> None:
        raw = key.encode()
        self.digest = sha256(raw).digest()
        self.client = sha256(b"transom client\0" + raw).hexdigest()[:_CLIENT_DIGITS]


def read_key_file(path: str, *, flag: str = "--api-key-file") -> tuple[str, ...]:
    """Keys, one a line; empty lines and those that begin with # do not count. `flag` names the file in errors.

    Raises:
        ConfigError: the path is empty, the file is not there, everybody on this machine may read it, it is not text, or has no key.
    """
    if not path.strip():
        raise ConfigError(f"{flag} is empty; give a file with a key a line, or leave it out to do without.")
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read()
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read ({error.strerror}).") from None
    if mode & stat.S_IROTH:
        raise ConfigError(
            f"{flag} {path} may be read by everybody on this machine (mode {stat.S_IMODE(mode):o}); "
            "make it your own with chmod 600."
        )
    try:
        lines = [line.strip() for line in content.decode().splitlines()]
    except UnicodeDecodeError:
        raise ConfigError(f"{flag} {path} is not UTF-8 text; give a key a line.") from None
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"{flag} {path} has no key; give at least one, a key a line.")
    return keys


def check_key_variables(environment: Mapping[str, str], given: Mapping[str, object]) -> None:
    """See that a variable about keys has become a setting; `given` are those that have a value.

    One that is set and empty, as after a secret that is missing, must not open the server.

    Raises:
        ConfigError: it has not.
    """
    for setting, variables in KEY_VARIABLES.items():
        needed = ("api_key", "api_key_file") if setting == "api_key" else (setting,)
        if any(given.get(name) for name in needed):
            continue
        for variable in variables:
            if not environment.get(variable, "unset").strip():
                raise ConfigError(f"{variable} is empty; give it a value, or unset it to serve without.")
            if variable in environment:
                raise ConfigError(
                    f"{variable} is set, but only `transom serve` reads it; give {setting} among the app's settings, or unset it."
                )


def current_keys(config: ServerConfig) -> tuple[str, ...]:
    """The keys that a server with these settings takes now.

    Raises:
        ConfigError: the key file is none any more.
    """
    from_file = () if config.api_key_file is None else read_key_file(config.api_key_file)
    return config.api_keys + from_file


def client_cache_salt(cache_salt: str | None, client: str) -> str:
    """A request's cache salt, made the client's own: no other client's request has the same."""
    return f"{client}:{cache_salt or ''}"


def shows_all_clients(path: str) -> bool:
    """Whether a path shows what all clients do together: the block map's data, and metrics."""
    return path in _SHARED_PATHS or path.startswith("/metrics/")


def _version(path: str) -> tuple[int, ...] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode
