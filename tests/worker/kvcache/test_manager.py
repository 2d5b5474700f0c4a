"""`KvCache` on its own; `test_cache_random` has random sequences."""

from __future__ import annotations

import itertools

import pytest

from tests.worker.kvcache.cache_model import BLOCK, check_cache, layout
from transom_core.errors import ConfigError
from transom_core.kv_cache.hashing import chain_root, extend_chain
from transom_worker.kvcache.blocks.arena import Arena
from transom_worker.kvcache.eviction.eviction_policy import Watched
from transom_worker.kvcache.manager import KvCache
from transom_worker.kvcache.prefix.tree import Node

ROOT = chain_root(BLOCK)


def cache_of(*mix: str, num_pages: int = 100, caching: bool = True) -> KvCache:
    return KvCache(layout(mix, num_pages=num_pages), block_size=BLOCK, enable_prefix_caching=caching)


def run(cache: KvCache, token_ids: list[int]) -> None:
    """Prefill a sequence in chunks of 8 tokens from its hit, and release it."""
    chain: list[bytes] = []
    extend_chain(chain, ROOT, token_ids, BLOCK)
    hit = cache.find(chain, len(token_ids))
    blocks = cache.begin(chain, ROOT, hit=hit)
    cache.plan_checkpoints(blocks, [])
    for end in [*range(hit.start + 8, len(token_ids), 8), len(token_ids)]:
        assert cache.extend(blocks, end)
        cache.advance(blocks, token_ids, end)
        check_cache(cache, [blocks])
    cache.release(blocks)


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


def test_a_preferred_page_is_given_and_else_one_with_room_after_it() -> None:
    arena = Arena(layout(["full"], num_pages=16))
    assert arena.lease(0) == 0
    assert arena.lease(0, prefer=1) == 1
    assert arena.lease(0, prefer=1) == 9  # the middle of [2, 16)
    assert arena.lease(0, prefer=16) == 5


def test_other_block_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="blocks of 8 tokens"):
        KvCache(layout(["full"], num_pages=9, block_size=8), block_size=4)


# What the cache learns of clients that return to a checkpoint

TURN = 24  # tokens


def owner(cache: KvCache, token_ids: list[int], num_tokens: int) -> Node:
    """The node whose segment has the last whole hash block of these tokens."""
    chain: list[bytes] = []
    extend_chain(chain, ROOT, token_ids[:num_tokens], BLOCK)
    return cache.checkpoints.tree.owner[chain[-1]]


def turn(cache: KvCache, history: list[int], number: int, *, rendered_anew: int) -> list[int]:
    """Run a turn's prompt: the last one's without the tokens that its template renders anew, then new ones."""
    begin = len(history) - rendered_anew if history else 0
    token_ids = history[:begin] + [1_000 * number + at for at in range(rendered_anew + TURN)]
    run(cache, token_ids)
    return token_ids


@pytest.mark.parametrize("mix", [("full",), ("full", "window")], ids="+".join)
@pytest.mark.parametrize("rendered_anew", [0, BLOCK, 2 * BLOCK + 1])
def test_a_turn_is_a_return_though_the_end_of_the_last_prompt_was_rendered_anew(
    mix: tuple[str, ...], rendered_anew: int
) -> None:
    cache = cache_of(*mix)
    history: list[int] = []
    for number in range(1, 4):
        history = turn(cache, history, number, rendered_anew=rendered_anew)
        assert owner(cache, history, len(history)).num_returns == number - 1


@pytest.mark.parametrize("mix", [("full",), ("full", "window")], ids="+".join)
def test_what_was_rendered_anew_is_evicted_first(mix: tuple[str, ...]) -> None:
    cache = cache_of(*mix)
    first = turn(cache, [], 1, rendered_anew=0)
    history = turn(cache, first, 2, rendered_anew=2 * BLOCK)
    other = [5_000 + at for at in range(TURN)]
    run(cache, other)
    stub, shared = owner(cache, first, len(first)), owner(cache, first, len(first) - 2 * BLOCK)
    assert shared is stub.parent
    assert isinstance(shared.policy_state, Watched)
    assert shared.policy_state.own.watched_from > 0
    assert cache.eviction.evict_one()
    assert stub.parent is None
    for kept in (history, other):
        assert owner(cache, kept, len(kept)).parent is not None
