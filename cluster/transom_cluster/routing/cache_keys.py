"""`CacheKeys`: which worker took the last request with each `prompt_cache_key`.

A client's key says that its requests have a prefix in common. Requests with one key but different cache salts share no cache, so
that their keys are different ones. Keys are kept as digests, and the one that was used longest ago is forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

from transom_core.contract import Request

MAX_KEYS = 16_384  # about 3 MB


class CacheKeys:
    """The workers of the last keys that this router has placed."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._workers: OrderedDict[bytes, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._workers)

    def worker_of(self, key: bytes) -> str | None:
        """The id of the worker that took the last request with a key; it may have left since."""
        return self._workers.get(key)

    def placed(self, key: bytes, worker_id: str) -> None:
        """Note that a worker takes a request with a key."""
        self._workers[key] = worker_id
        self._workers.move_to_end(key)
        if len(self._workers) > self._max_keys:
            self._workers.popitem(last=False)


def key_digest(request: Request) -> bytes:
    """The digest of a request's key; empty where it has none."""
    if request.prompt_cache_key is None:
        return b""
    salt = (request.cache_salt or "").encode("utf-8", "surrogatepass")
    person = blake2b(salt, digest_size=16).digest()
    return blake2b(request.prompt_cache_key.encode("utf-8", "surrogatepass"), digest_size=16, key=person).digest()
