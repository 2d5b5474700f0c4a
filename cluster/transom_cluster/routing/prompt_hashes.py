"""Computes digests of prompts as the workers do: once for all workers of one identity and block size, and for all choices of a
prompt.

- **hash block**: `--block-size` tokens that are hashed together.
- **digest**: the hash (BLAKE2b, 32 bytes) of the previous hash block's digest and this block's tokens; it identifies the block and
  all tokens before it. The first block's previous digest is the chain's root, a hash of the block size, the model's identity, the
  cache salt, the KV policy and the LoRA adapter (`transom_core.kv_cache.hashing`).

Hashing the 8,192 hash blocks of a prompt of 131,072 tokens takes 4 to 8 ms. A prompt that no worker has cached is not hashed to its
end.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from transom_core.contract import Request
from transom_core.contract.kv_events import CacheShape
from transom_core.kv_cache.hashing import DIGEST_BYTES, chain_root, extend_chain

_DIGEST_WORDS = DIGEST_BYTES // 8


class PromptChain:
    """The digests of a prompt's whole hash blocks. `hashed` computes them as far as they are needed."""

    def __init__(self, token_ids: Sequence[int], root: bytes, block_size: int) -> None:
        self.block_size = block_size
        self.num_blocks = len(token_ids) // block_size
        self._token_ids = token_ids
        self._parent = root  # the digest before the first block that is not hashed yet
        self._digests = np.empty((self.num_blocks, _DIGEST_WORDS), dtype=np.uint64)
        self._num_hashed = 0

    def hashed(self, num_blocks: int) -> npt.NDArray[np.uint64]:
        """Return the digests as 64-bit words, [blocks, 4], of which at least the first `num_blocks` rows are computed, or all."""
        begin, end = self._num_hashed, min(num_blocks, self.num_blocks)
        if end > begin:
            new: list[bytes] = []
            token_ids = self._token_ids[begin * self.block_size : end * self.block_size]
            extend_chain(new, self._parent, token_ids, self.block_size)
            self._digests[begin:end] = np.frombuffer(b"".join(new), np.uint64).reshape(-1, _DIGEST_WORDS)
            self._parent, self._num_hashed = new[-1], end
        return self._digests

    def digest(self, block: int) -> bytes:
        """Return the digest of one hash block."""
        return bytes(self.hashed(block + 1)[block].tobytes())


class PromptHashes:
    """Makes chains of digests, and keeps those of the last prompt, since the prompt's other choices come next."""

    def __init__(self) -> None:
        self._token_ids: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
        self._extra: dict[str, str | None] = {}  # what else the root depends on: salt, policy and adapter
        self._chains: dict[tuple[str, int], PromptChain] = {}  # by identity and block size

    def of(self, request: Request, shape: CacheShape) -> PromptChain:
        """Return the chain of a request's whole hash blocks for workers with this cache. The output of earlier attempts counts as a
        part of the prompt."""
        token_ids = (request.prompt_token_ids, request.resumed_output_ids)
        extra = {
            "cache_salt": request.cache_salt,
            "kv_policy": None if request.kv_policy is None else request.kv_policy.text,
            "adapter": None if request.adapter is None else request.adapter.identity,
        }
        if extra != self._extra or any(a is not b for a, b in zip(token_ids, self._token_ids, strict=True)):
            self._token_ids, self._extra, self._chains = token_ids, extra, {}
        chain = self._chains.get((shape.identity, shape.block_size))
        if chain is None:
            root = chain_root(shape.block_size, identity=shape.identity, **extra)
            chain = PromptChain(request.prompt_token_ids + request.resumed_output_ids, root, shape.block_size)
            self._chains[shape.identity, shape.block_size] = chain
        return chain
