"""The digests of `prompt_cache_key`s, by which the placer remembers which worker took the last request with each key.

A client gives the same key to requests that have a prefix in common. Requests with different cache salts share no cache, so the
same key with another salt is another key here. Keys are kept as digests; the least recently used ones are forgotten first
(`FairCache`).
"""

from __future__ import annotations

from hashlib import blake2b

from transom_core.contract import Request

KEY_BYTES = 200  # memory of a digest and its cache entry; the worker's id is shared
MAX_BYTES = 65_536 * KEY_BYTES  # one client gets at most a quarter, which is 16,384 keys


def key_digest(request: Request) -> bytes:
    """Return the digest of a request's key and cache salt; empty if the request has no key."""
    if request.prompt_cache_key is None:
        return b""
    salt = (request.cache_salt or "").encode("utf-8", "surrogatepass")
    person = blake2b(salt, digest_size=16).digest()
    return blake2b(request.prompt_cache_key.encode("utf-8", "surrogatepass"), digest_size=16, key=person).digest()
