"""`CacheKeys`: remembers which worker took the last request with each `prompt_cache_key`.

A client gives the same key to requests that have a prefix in common. Requests with different cache salts share no cache, so the
same key with another salt is another key here. Keys are kept as digests; the least recently used ones are forgotten first
(`FairCache`).
"""

from __future__ import annotations

from hashlib import blake2b

from transom_core.contract import Request
from transom_core.fair_cache import FairCache

KEY_BYTES = 200  # memory of a digest and its cache entry; the worker's id is shared
MAX_BYTES = 65_536 * KEY_BYTES  # one client gets at most a quarter, which is 16,384 keys


class CacheKeys:
    """Maps the digests of recent keys to the workers that took their last requests."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.workers: FairCache[bytes, str] = FairCache(max_bytes)

    def __len__(self) -> int:
        return len(self.workers)

    def worker_of(self, key: bytes) -> str | None:
        """Return the worker that took the last request with a key (it may have left); None if the key is unknown."""
        return self.workers.get(key)

    def placed(self, key: bytes, worker_id: str, *, client: str = "") -> None:
        """Note that a worker takes a client's request with this key."""
        self.workers.put(key, worker_id, num_bytes=KEY_BYTES, client=client)


def key_digest(request: Request) -> bytes:
    """Return the digest of a request's key and cache salt; empty if the request has no key."""
    if request.prompt_cache_key is None:
        return b""
    salt = (request.cache_salt or "").encode("utf-8", "surrogatepass")
    person = blake2b(salt, digest_size=16).digest()
    return blake2b(request.prompt_cache_key.encode("utf-8", "surrogatepass"), digest_size=16, key=person).digest()
