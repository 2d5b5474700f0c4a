"""Digests of prompts, computed as the workers compute them: once for all workers of one block size and for all choices of one
prompt.

- **hash block**: `--block-size` tokens that are hashed together.
- **digest**: the hash of a hash block's tokens and of all tokens before it, with the cache salt and the KV
  policy.
"""

from __future__ import annotations

from transom_cluster.routing.prompt_chain import PromptChain
from transom_core.contract import Request
from transom_core.kv_cache.hashing import chain_root


class PromptHashes:
    """Makes the chains of digests, and remembers those of the last prompt, since its other choices come next."""

    def __init__(self) -> None:
        self._token_ids: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
        self._extra: tuple[str | None, str | None] = (None, None)  # salt, policy
        self._by_block_size: dict[int, PromptChain] = {}

    def of(self, request: Request, block_size: int) -> PromptChain:
        """The chain of a request's full hash blocks; the output of earlier attempts counts as part of the prompt."""
        token_ids = (request.prompt_token_ids, request.resumed_output_ids)
        extra = request.cache_salt, None if request.kv_policy is None else request.kv_policy.text
        if extra != self._extra or any(a is not b for a, b in zip(token_ids, self._token_ids, strict=True)):
            self._token_ids, self._extra, self._by_block_size = token_ids, extra, {}
        chain = self._by_block_size.get(block_size)
        if chain is None:
            salt, policy = extra
            root = chain_root(block_size, cache_salt=salt, kv_policy=policy)
            chain = PromptChain(request.prompt_token_ids + request.resumed_output_ids, root, block_size)
            self._by_block_size[block_size] = chain
        return chain
