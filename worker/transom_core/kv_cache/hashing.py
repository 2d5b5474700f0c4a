"""Hashes token prefixes: each whole hash block of a prompt gets a digest that names the block and all tokens before it.

A *hash block* is `block_size` (`--block-size`) consecutive tokens. A prompt's *chain* is the list of its hash blocks' digests:

    root = BLAKE2b(format, block size, identity, cache salt, KV policy, adapter)
    chain[0] = BLAKE2b(root + tokens 0 ... 15), chain[1] = BLAKE2b(chain[0] + tokens 16 ... 31), ...   (block size 16)

So two prompts share `chain[i]` exactly if they share their first `(i + 1) * block_size` tokens, the identity of the model
(`CacheShape.identity`), the salt, the policy and the identity of the LoRA adapter. Whatever else decides the KV of a token goes
into the root. Digests have 32 bytes, token ids are 32-bit little-endian integers.

Router and workers compute the same digests. BLAKE2b hashes a parent (32 bytes) and 16 tokens (64 bytes) in one step of 128 bytes,
where SHA-256 needs two of 64, and it is fast on processors without instructions for hashing.
"""

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

TOKEN_BYTES = 4
DIGEST_BYTES = 32

_FORMAT = b"transom-kv-5"


def chain_root(
    block_size: int,
    *,
    identity: str = "",
    cache_salt: str | None = None,
    kv_policy: str | None = None,
    adapter: str | None = None,
) -> bytes:
    """Return the parent digest of a chain's first hash block. `identity` is the model's, `kv_policy` is any canonical text of the
    policy, and `adapter` is the identity of the LoRA adapter."""
    digest = blake2b(_FORMAT, digest_size=DIGEST_BYTES)
    digest.update(block_size.to_bytes(4, "little"))
    for extra in (identity, cache_salt, kv_policy, adapter):
        text = b"" if extra is None else extra.encode()
        length = -1 if extra is None else len(text)
        digest.update(length.to_bytes(8, "little", signed=True) + text)
    return digest.digest()


def extend_chain(chain: list[bytes], root: bytes, token_ids: Sequence[int], block_size: int) -> None:
    """Append the digests of all whole hash blocks of `token_ids` that `chain` does not have yet.

    `chain[i]` stands for tokens `[0, (i + 1) * block_size)`. Token ids must fit 32 bits.
    """
    begin = len(chain) * block_size
    end = len(token_ids) // block_size * block_size
    if end <= begin:
        return
    packed = _pack(token_ids[begin:end])
    parent = chain[-1] if chain else root
    hash_block_bytes = block_size * TOKEN_BYTES
    for offset in range(0, len(packed), hash_block_bytes):
        parent = blake2b(parent + packed[offset : offset + hash_block_bytes], digest_size=DIGEST_BYTES).digest()
        chain.append(parent)


def _pack(token_ids: Sequence[int]) -> bytes:
    packed = array("I", token_ids)
    if sys.byteorder == "big":  # digests are the same on every machine
        packed.byteswap()
    return packed.tobytes()
