"""The compiled part of `PromptChain`: BLAKE2b (RFC 7693) over a prompt's hash blocks, each after the digest of the one before.

The standard library computes the same digests (`transom_core.kv_cache.hashing`) and spends most of the time between its calls. The
loop of this file takes 0.2 us for a hash block of 16 tokens; the message, the digest before and 16 tokens, is one step of the hash.
"""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt

from transom_cluster.routing.compiled import compiled, inner
from transom_core.kv_cache.hashing import DIGEST_BYTES

if sys.byteorder == "big":  # numba runs on no such processor
    raise ImportError("routers need a little-endian processor")

Words = npt.NDArray[np.uint64]
Tokens = npt.NDArray[np.uint32]

DIGEST_WORDS = DIGEST_BYTES // 8
STEP_WORDS = 16  # 64-bit words that BLAKE2b compresses at once
_PARAMETERS = np.uint64(0x01010000 ^ DIGEST_BYTES)  # no key, sequential mode, the digest's length

_INITIAL = np.array(
    [
        0x6A09E667F3BCC908,
        0xBB67AE8584CAA73B,
        0x3C6EF372FE94F82B,
        0xA54FF53A5F1D36F1,
        0x510E527FADE682D1,
        0x9B05688C2B3E6C1F,
        0x1F83D9ABFB41BD6B,
        0x5BE0CD19137E2179,
    ],
    dtype=np.uint64,
)
# The order in which each of the twelve rounds mixes in the message's words (RFC 7693, section 2.7).
_ORDER = np.array(
    [
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
        [14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3],
        [11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4],
        [7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8],
        [9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13],
        [2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9],
        [12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11],
        [13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10],
        [6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5],
        [10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0],
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
        [14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3],
    ],
    dtype=np.uint64,
)


@inner
def _rotated(x, n):
    return (x >> np.uint64(n)) | (x << np.uint64(64 - n))


@inner
def _mixed(a, b, c, d, x, y):
    """Mix two words of the message into four words of the state."""
    a = a + b + x
    d = _rotated(d ^ a, 32)
    c = c + d
    b = _rotated(b ^ c, 24)
    a = a + b + y
    d = _rotated(d ^ a, 16)
    c = c + d
    b = _rotated(b ^ c, 63)
    return a, b, c, d


@inner
def _compress(state, message, begin, num_bytes, is_last):
    """Mix 16 words of `message` from `begin` on into the state; `num_bytes` counts the message up to their end."""
    begin = np.uint64(begin)
    v0, v1, v2, v3, v4, v5, v6, v7 = state[0], state[1], state[2], state[3], state[4], state[5], state[6], state[7]
    v8, v9, v10, v11 = _INITIAL[0], _INITIAL[1], _INITIAL[2], _INITIAL[3]
    v12, v13, v14, v15 = _INITIAL[4] ^ np.uint64(num_bytes), _INITIAL[5], _INITIAL[6], _INITIAL[7]
    if is_last:
        v14 = ~v14
    for turn in range(12):
        s = _ORDER[turn]
        v0, v4, v8, v12 = _mixed(v0, v4, v8, v12, message[begin + s[0]], message[begin + s[1]])
        v1, v5, v9, v13 = _mixed(v1, v5, v9, v13, message[begin + s[2]], message[begin + s[3]])
        v2, v6, v10, v14 = _mixed(v2, v6, v10, v14, message[begin + s[4]], message[begin + s[5]])
        v3, v7, v11, v15 = _mixed(v3, v7, v11, v15, message[begin + s[6]], message[begin + s[7]])
        v0, v5, v10, v15 = _mixed(v0, v5, v10, v15, message[begin + s[8]], message[begin + s[9]])
        v1, v6, v11, v12 = _mixed(v1, v6, v11, v12, message[begin + s[10]], message[begin + s[11]])
        v2, v7, v8, v13 = _mixed(v2, v7, v8, v13, message[begin + s[12]], message[begin + s[13]])
        v3, v4, v9, v14 = _mixed(v3, v4, v9, v14, message[begin + s[14]], message[begin + s[15]])
    state[0] ^= v0 ^ v8
    state[1] ^= v1 ^ v9
    state[2] ^= v2 ^ v10
    state[3] ^= v3 ^ v11
    state[4] ^= v4 ^ v12
    state[5] ^= v5 ^ v13
    state[6] ^= v6 ^ v14
    state[7] ^= v7 ^ v15


@compiled
def extend(message: Words, tokens: Tokens, token_ids: Tokens, digests: Words) -> None:
    """Write the digests [blocks, 4] of `token_ids` (32 bits each) after the digest that `message` begins with.

    `message` holds one hash block at a time: the digest before, the tokens, and zeros up to a whole number of steps; `tokens` is
    the part of it after the digest, 32 bits an item.
    """
    num_blocks = digests.shape[0]
    block_size = len(token_ids) // num_blocks
    num_bytes = DIGEST_BYTES + 4 * block_size
    num_steps = len(message) // STEP_WORDS
    state = np.empty(8, np.uint64)
    for block in range(num_blocks):
        for i in range(block_size):
            tokens[i] = token_ids[block * block_size + i]
        for i in range(8):
            state[i] = _INITIAL[i]
        state[0] ^= _PARAMETERS
        for step in range(num_steps):
            is_last = step == num_steps - 1
            end = num_bytes if is_last else (step + 1) * 8 * STEP_WORDS
            _compress(state, message, step * STEP_WORDS, end, is_last)
        for i in range(DIGEST_WORDS):
            digests[block, i] = state[i]
            message[i] = state[i]
