"""`KvCache` on its own: hits, blocks that slid out of windows, eviction order, pages that change groups, random sequences."""

from __future__ import annotations

import itertools

import pytest

from tests.worker.kvcache.cache_model import BLOCK, check_cache, layout
from transom_core.errors import ConfigError
from transom_core.kv_cache.hashing import chain_root, extend_chain
from transom_worker.kvcache.blocks.sequence_blocks import SequenceBlocks
from transom_worker.kvcache.manager import KvCache

ROOT = chain_root(BLOCK)


def cache_of(*mix: str, num_pages: int = 100, caching: bool = True) -> KvCache:
    return KvCache(layout(mix, num_pages=num_pages), block_size=BLOCK, enable_prefix_caching=caching)


def run(cache: KvCache, token_ids: list[int], *, chunk: int = 8, release: bool = True) -> tuple[SequenceBlocks, int]:
    """Prefill a sequence in chunks from its hit; returns it and the tokens that hit."""
    chain: list[bytes] = []
    extend_chain(chain, ROOT, token_ids, BLOCK)
    hit = cache.find(chain, len(token_ids)) if cache.enable_prefix_caching else None
    units = hit.num_hash_blocks if hit else 0
    blocks = cache.begin(chain, ROOT, hit=hit)
    cache.plan_checkpoints(blocks, [])
    for end in [*range(units * BLOCK + chunk, len(token_ids), chunk), len(token_ids)]:
        assert cache.extend(blocks, end)
        cache.advance(blocks, token_ids, end)
        check_cache(cache, [blocks])
    if release:
        cache.release(blocks)
    return blocks, units * BLOCK


def test_blocks_that_slid_out_are_evictable_and_the_others_are_pinned() -> None:
    cache = cache_of("window", num_pages=6)  # 4 blocks a page
    run(cache, list(range(40)))
    pool = cache.pools[0]
    assert [pool.published[block][1] for block in pool.evictable] == [0, 1, 2, 3, 4, 5, 6]
    assert sorted(pool.published[block][1] for block, count in enumerate(pool.pins) if count) == [7, 8, 9]


def test_blocks_of_a_sequence_are_consecutive_while_pages_are_free() -> None:
    cache = cache_of("full", "window", num_pages=400, caching=False)
    started = [cache.begin([], ROOT) for _ in range(4)]
    for end in range(1, 90):  # all grow together
        for blocks in started:
            assert cache.extend(blocks, end)
            cache.advance(blocks, [], end)
    full = [blocks.tables[0].run for blocks in started]
    breaks = sum(b != a + 1 for ids in full for a, b in itertools.pairwise(ids))
    # strides do not divide pages here: an id is skipped at some page borders, nowhere else
    borders = sum(
        cache.arena.page_of(0, a) != cache.arena.page_of(0, b) for ids in full for a, b in itertools.pairwise(ids)
    )
    assert breaks <= borders
    assert all(ids == sorted(ids) for ids in full)


def test_other_block_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="blocks of 8 tokens"):
        KvCache(layout(["full"], num_pages=9, block_size=8), block_size=4)
