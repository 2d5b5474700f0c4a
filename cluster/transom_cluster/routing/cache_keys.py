"""`CacheKeys`: which worker took the last request with each `prompt_cache_key`.

A client's key says that its requests have a prefix in common. Requests with one key but different cache salts share no cache, so
that their keys are different ones. Keys are kept as digests; those that were used longest ago are forgotten first (`FairCache`).
"""

from __future__ import annotations

from hashlib import blake2b

from transom_core.contract import Request
from transom_core.fair_cache import FairCache

KEY_BYTES = 200  # of a digest, a worker's id that others share, and an entry of the cache
MAX_BYTES = 65_536 * KEY_BYTES  # a client's quarter has 16,384 keys


class CacheKeys:
    """The workers of the last keys that this router has placed."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.workers: FairCache[bytes, str] = FairCache(max_bytes)

    def __len__(self) -> int:
        return len(self.workers)

    def worker_of(self, key: bytes) -> str | None:
        """The id of the worker that took the last request with a key; it may have left since."""
        return self.workers.get(key)

    def placed(self, key: bytes, worker_id: str, *, client: str = "") -> None:
        """Note that a worker takes a request of a client with a key."""
        self.workers.put(key, worker_id, num_bytes=KEY_BYTES, client=client)


def key_digest(request: Request) -> bytes:
    """The digest of a request's key; empty where it has none."""
    if request.prompt_cache_key is None:
        return b""
    salt = (request.cache_salt or "").encode("utf-8", "surrogatepass")
    person = blake2b(salt, digest_size=16).digest()
    return blake2b(request.prompt_cache_key.encode("utf-8", "surrogatepass"), digest_size=16, key=person).digest()
