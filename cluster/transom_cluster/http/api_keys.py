"""API keys decide which requests the server accepts, and which client a request belongs to.

Client: the sender of all requests with one key; its name is a digest that does not reveal the key.
Admin key: a key from `--admin-api-key-file`. If there are any, only they give access to routes that show all clients' data.

The server compares the SHA-256 digest of a key with the digests of all known keys every time, so that the time of a comparison
reveals neither the beginning nor the length of a known key.
"""

from __future__ import annotations

import hmac
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import NamedTuple

from transom_core.config import ServerConfig
from transom_core.contract.request import MAX_CLIENT_WEIGHT, MIN_CLIENT_WEIGHT
from transom_core.errors import ConfigError

logger = logging.getLogger("transom.router")

ADMIN_FLAG = "--admin-api-key-file"
KEY_VARIABLES: dict[str, tuple[str, ...]] = {
    "api_key": ("TRANSOM_API_KEYS", "TRANSOM_API_KEY"),
    "api_key_file": ("TRANSOM_API_KEY_FILE",),
    "admin_api_key_file": ("TRANSOM_ADMIN_API_KEY_FILE",),
}
"""Setting about keys -> the environment variables from which `transom serve` reads it."""

FILE_CHECK_PERIOD_S = 1.0  # the key file is not looked at more often than this
_CLIENT_DIGITS = 32  # of a digest's 64 hexadecimal digits, in the name of a client
_WEIGHTED_KEY = re.compile(r"(\S+)\s+weight=(\S*)")
_ALL_CLIENTS_PATHS = frozenset({"/metrics", "/blocks/stream", "/blocks/describe"})
# A request there takes time from all clients.
_OPERATORS_PATHS = frozenset(
    {
        *("/transfers/measure", "/pause", "/resume", "/update_weights_from_disk"),
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    }
)


class ApiKeys:
    """The keys from the settings and from a file, which is read again when it changes. `clock` returns seconds.

    If the file becomes unreadable or malformed, the keys stay as they were, so that a mistake neither locks clients out nor lets
    others in.

    Raises:
        ConfigError: the file is not a key file; `read_key_file` lists the reasons.
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
        self._fixed = [_digest_and_owner(key) for key in keys]
        self._path = path
        self._clock = clock
        self._next_check_s = clock() + FILE_CHECK_PERIOD_S
        self._version = None if path is None else _version(path)
        self._from_file = [] if path is None else self._read(path)

    @property
    def are_required(self) -> bool:
        """Return whether any keys are configured, so that requests need one."""
        return bool(self._fixed) or self._path is not None

    def owner_of(self, presented: bytes) -> KeyOwner | None:
        """Return the client that has the presented key; None if no client has it."""
        self._reload_if_changed()
        presented_digest = sha256(presented).digest()
        found = None
        for digest, owner in (*self._fixed, *self._from_file):
            if hmac.compare_digest(digest, presented_digest):
                found = owner
        return found

    def _read(self, path: str) -> list[tuple[bytes, KeyOwner]]:
        return [_digest_and_owner(*one) for one in read_key_file(path, flag=self._flag).items()]

    def _reload_if_changed(self) -> None:
        """Read the key file again if it has changed; look at most once every `FILE_CHECK_PERIOD_S`."""
        now_s = self._clock()
        if self._path is None or now_s < self._next_check_s:
            return
        self._next_check_s = now_s + FILE_CHECK_PERIOD_S
        version = _version(self._path)
        if version == self._version:
            return
        self._version = version
        try:
            self._from_file = self._read(self._path)
            logger.info("Read %d API keys from %s.", len(self._from_file), self._path)
        except ConfigError as error:
            logger.error("API keys stay as they were: %s", error)


class KeyOwner(NamedTuple):
    """The client of a key: its name, from which the key cannot be computed, and the weight of its share relative to others."""

    client: str
    weight: float


def _digest_and_owner(key: str, weight: float = 1.0) -> tuple[bytes, KeyOwner]:
    """Return a key's digest, and its client. The digest cannot be computed from the client's name."""
    raw = key.encode()
    client = sha256(b"transom client\0" + raw).hexdigest()[:_CLIENT_DIGITS]
    return sha256(raw).digest(), KeyOwner(client, weight)


def read_key_file(path: str, *, flag: str = "--api-key-file") -> dict[str, float]:
    """Read a file with one key per line, and return the weight of each key. Empty lines and lines that begin with # are ignored.

    A line is a key, or a key and its weight: `KEY weight=2`. Errors name the file by `flag`.

    Raises:
        ConfigError: the path is empty; the file is missing, is readable by all users of the machine, is not text or has no key; or
            a weight is not a number in the allowed range.
    """
    if not path.strip():
        raise ConfigError(f"{flag} is empty; give a file with one key per line, or leave it out to serve without keys.")
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read()
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read ({error.strerror}).") from None
    if mode & stat.S_IROTH:
        raise ConfigError(
            f"{flag} {path} is readable by all users of this machine (mode {stat.S_IMODE(mode):o}); "
            "run chmod 600 on it."
        )
    try:
        lines = [line.strip() for line in content.decode().splitlines()]
    except UnicodeDecodeError:
        raise ConfigError(f"{flag} {path} is not UTF-8 text; write one key per line.") from None
    entries = [line for line in lines if line and not line.startswith("#")]
    keys = dict(_key_and_weight(line, at=f"{flag} {path}") for line in entries)
    if not keys:
        raise ConfigError(f"{flag} {path} has no key; write at least one, one per line.")
    return keys


def _key_and_weight(line: str, *, at: str) -> tuple[str, float]:
    match = _WEIGHTED_KEY.fullmatch(line)
    if match is None:
        return line, 1.0
    try:
        weight = float(match[2])
    except ValueError:
        weight = 0.0
    if not MIN_CLIENT_WEIGHT <= weight <= MAX_CLIENT_WEIGHT:
        raise ConfigError(
            f"{at} has a key with weight={match[2][:20]}; give a number from {MIN_CLIENT_WEIGHT:g} to {MAX_CLIENT_WEIGHT:g}."
        )
    return match[1], weight


def check_key_variables(environment: Mapping[str, str], given: Mapping[str, object]) -> None:
    """Check that every environment variable about keys that is set has become a setting; `given` has the settings by name.

    With a variable that is empty, for example because a secret is missing, the server must not start without keys.

    Raises:
        ConfigError: a variable is set, and the settings have no value for it.
    """
    for setting, variables in KEY_VARIABLES.items():
        needed = ("api_key", "api_key_file") if setting == "api_key" else (setting,)
        if any(given.get(name) for name in needed):
            continue
        for variable in variables:
            if not environment.get(variable, "unset").strip():
                raise ConfigError(f"{variable} is empty; give it a value, or unset it to serve without keys.")
            if variable in environment:
                raise ConfigError(
                    f"{variable} is set, but only `transom serve` reads it; give {setting} among the app's settings, or unset it."
                )


def current_keys(config: ServerConfig) -> tuple[str, ...]:
    """Return the keys that a server with these settings accepts now.

    Raises:
        ConfigError: the key file has become unreadable or malformed.
    """
    from_file = () if config.api_key_file is None else tuple(read_key_file(config.api_key_file))
    return config.api_keys + from_file


def address_digest(address: str) -> str:
    """Return a name for the clients at an address, for servers without keys. The name does not reveal the address to workers."""
    return sha256(b"transom address\0" + address.encode()).hexdigest()[:_CLIENT_DIGITS]


def needs_admin_key(path: str, *, has_keys: bool, has_admins: bool) -> bool:
    """Return whether a path needs an admin key where clients have keys (`has_keys`) or admins have.

    Paths that show data of all clients together, as the metrics do, need it if there are admin keys; those that are for operators
    alone also where only clients have keys, so that no client opens them.
    """
    is_shared = path in _ALL_CLIENTS_PATHS or path.startswith("/metrics/")
    return (has_admins and is_shared) or ((has_admins or has_keys) and path in _OPERATORS_PATHS)


def _version(path: str) -> tuple[int, ...] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode
