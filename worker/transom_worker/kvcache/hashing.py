"""The hash chain of prefixes: one SHA-256 digest per unit of `block_size` tokens, H(parent, tokens), from a salted root.

What else decides the KV of a token (tenant salt, adapter, KV policy) goes into the root, and so into every digest of the chain.
Router and workers compute the same digests.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import sha256

TOKEN_BYTES = 4

_FORMAT = b"transom-kv-1"


def chain_root(
    block_size: int, *, cache_salt: str | None = None, adapter: str | None = None, kv_policy: str | None = None
) -> bytes:
    """The parent of a chain's first unit. `kv_policy` is any canonical text of the policy."""
    digest = sha256(_FORMAT)
    digest.update(block_size.to_bytes(4, "little"))
    for extra in (cache_salt, adapter, kv_policy):
        text = b"" if extra is None else extra.encode()
        length = -1 if extra is None else len(text)
        digest.update(length.to_bytes(8, "little", signed=True) + text)
    return digest.digest()


def extend_chain(chain: list[bytes], root: bytes, token_ids: Sequence[int], block_size: int) -> None:
    """Append the digests of all whole units of `token_ids` that `chain` does not have yet.

    `chain[i]` stands for tokens `[0, (i + 1) * block_size)`. Token ids must fit 32 bits.
    """
    begin = len(chain) * block_size
    end = len(token_ids) // block_size * block_size
    if end <= begin:
        return
    packed = _pack(token_ids[begin:end])
    parent = chain[-1] if chain else root
    unit_bytes = block_size * TOKEN_BYTES
    for offset in range(0, len(packed), unit_bytes):
        parent = sha256(parent + packed[offset : offset + unit_bytes]).digest()
        chain.append(parent)


def _pack(token_ids: Sequence[int]) -> bytes:
    packed = array("I", token_ids)
    if sys.byteorder == "big":  # digests are the same on every machine
        packed.byteswap()
    return packed.tobytes()
