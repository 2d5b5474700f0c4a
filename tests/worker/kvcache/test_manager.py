"""`KvCache` on its own: hits, blocks that slid out of windows, eviction order, pages that change groups, random sequences."""

from __future__ import annotations

import itertools

import pytest

from tests.worker.kvcache.cache_model import BLOCK, MIXES, check_cache, layout
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


@pytest.mark.parametrize("mix", MIXES, ids="+".join)
def test_a_second_run_hits_all_but_the_last_hash_block(mix: tuple[str, ...]) -> None:
    cache = cache_of(*mix)
    tokens = list(range(40))
    assert run(cache, tokens)[1] == 0
    assert run(cache, tokens)[1] == 36
    assert run(cache, tokens[:17] + [99] * 5)[1] == 16  # left-behind window blocks make a hit in the middle
    assert run(cache, [99, *tokens])[1] == 0


def test_prefix_caching_off_publishes_nothing() -> None:
    cache = cache_of("full", "window", caching=False)
    run(cache, list(range(40)))
    assert cache.changes.take() is None
    assert cache.stats().free_pages == cache.stats().num_pages


def test_a_window_holds_no_more_than_its_live_blocks_and_the_next() -> None:
    cache = cache_of("full", "window", caching=False)  # window 10, blocks of 4
    blocks, _ = run(cache, list(range(60)), chunk=1, release=False)
    assert len(blocks.tables[0].run) == 15
    assert blocks.tables[1].first_block == (60 - 9) // 4
    assert len(blocks.tables[1].run) == 3
    assert cache.stats().groups[1].active_blocks == 3


def test_blocks_that_slid_out_are_evictable_and_the_others_are_pinned() -> None:
    cache = cache_of("window", num_pages=6)  # 4 blocks a page
    run(cache, list(range(40)))
    pool = cache.pools[0]
    assert [pool.published[block][1] for block in pool.evictable] == [0, 1, 2, 3, 4, 5, 6]
    assert sorted(pool.published[block][1] for block, count in enumerate(pool.pins) if count) == [7, 8, 9]


def test_another_group_gets_the_page_that_is_evicted_first() -> None:
    cache = cache_of("full", "window", num_pages=12)
    run(cache, list(range(32)))
    run(cache, [50 + i for i in range(80)])  # more than fits beside it
    stats = cache.stats()
    assert sum(stats.groups[1].evicted_blocks.values()) > 0
    assert set(stats.groups[1].evicted_blocks) <= {"own_group", "other_group"}
    assert cache.find([], 0).num_hash_blocks == 0


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


def test_unread_changes_are_bounded_and_a_late_reader_gets_the_whole_index() -> None:
    cache = cache_of("full")
    cache.changes.max_unread = 5
    run(cache, list(range(40)))
    update = cache.changes.take()
    assert update == cache.changes.whole()
    assert update.whole
    assert update.version == cache.changes.version == 10
    assert [len(run.digests) for run in update.runs] == [10]
    assert cache.changes.take() is None
    assert not cache.changes.unread_runs


def test_other_block_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="blocks of 8 tokens"):
        KvCache(layout(["full"], num_pages=9, block_size=8), block_size=4)


@pytest.mark.parametrize("mix", MIXES, ids="+".join)
def test_alone_a_sequence_of_capacity_length_always_fits(mix: tuple[str, ...]) -> None:
    for num_pages in range(1, 14):
        cache = cache_of(*mix, num_pages=num_pages, caching=False)
        capacity = cache.capacity.longest_tokens(150)
        assert cache.capacity.worst_case_pages(capacity) <= num_pages
        blocks = cache.begin([], ROOT)
        for end in range(1, capacity):  # the last token is never computed
            assert cache.extend(blocks, end)
            cache.advance(blocks, [], end)
