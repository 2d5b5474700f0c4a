"""Prompts hashed as workers hash them, once for all workers of one block size and for all choices of one prompt."""

from __future__ import annotations

from transom_worker.contract import Request
from transom_worker.kvcache.hashing import chain_root, extend_chain


class PromptHashes:
    """Remembers the last prompt: other choices of it, and the same request on its way to another worker, follow at once."""

    def __init__(self) -> None:
        self._token_ids: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
        self._salt: str | None = None
        self._by_block_size: dict[int, list[bytes]] = {}

    def of(self, request: Request, block_size: int) -> list[bytes]:
        """The digests of a request's whole units, resumed tokens with them."""
        token_ids = (request.prompt_token_ids, request.resumed_output_ids)
        salt = request.cache_salt
        if salt != self._salt or any(a is not b for a, b in zip(token_ids, self._token_ids, strict=True)):
            self._token_ids, self._salt, self._by_block_size = token_ids, salt, {}
        chain = self._by_block_size.get(block_size)
        if chain is None:
            chain = self._by_block_size[block_size] = []
            root = chain_root(block_size, cache_salt=salt)
            extend_chain(chain, root, request.prompt_token_ids + request.resumed_output_ids, block_size)
        return chain
