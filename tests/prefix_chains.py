"""The digests of prompts' hash blocks, all at once."""

from collections.abc import Sequence
from typing import Any

from transom_core.kv_cache.hashing import chain_root, extend_chain


def chain_of(token_ids: Sequence[int], block_size: int, **root: Any) -> list[bytes]:
    """The chain of a prompt whose root is `chain_root(block_size, **root)`."""
    chain: list[bytes] = []
    extend_chain(chain, chain_root(block_size, **root), token_ids, block_size)
    return chain
