from __future__ import annotations

import itertools
import random

import pytest

from tests.worker.kvcache.cache_model import layout
from transom_core.errors import ConfigError
from transom_worker.kvcache.blocks.arena import FREE, Arena


def test_leases_and_returns_keep_the_runs_right() -> None:
    arena = Arena(layout(["full", "window"], num_pages=23))
    rng = random.Random(0)
    leased: list[int] = []
    for _ in range(3000):
        if leased and (rng.random() < 0.5 or not arena.num_free):
            rng.shuffle(leased)
            count = rng.randrange(1, 4)
            returned = sorted(leased[:count]) if rng.random() < 0.5 else leased[:count]
            arena.give_back(returned if rng.random() < 0.5 else returned[::-1])
            del leased[:count]
        else:
            num_pages = rng.randrange(1, 6)
            before = {page for start, end in arena.free_runs() for page in range(start, end)}
            pages = arena.lease_run(rng.randrange(2), num_pages, prefer=rng.choice([None, rng.randrange(30)]))
            assert set(pages) <= before
            assert len(pages) == num_pages or (0 < len(pages) < num_pages and pages.stop not in before)
            leased += pages
        free = {page for page, owner in enumerate(arena.owner) if owner == FREE}
        assert free == set(range(23)) - set(leased)
        runs = arena.free_runs()
        assert runs == sorted(runs)
        assert {page for start, end in runs for page in range(start, end)} == free
        assert all(end < start for (_, end), (start, _) in itertools.pairwise(runs))  # merged
        assert arena.num_free == len(free)


def test_a_preferred_page_is_given_and_else_one_with_room_behind() -> None:
    arena = Arena(layout(["full"], num_pages=16))
    assert arena.lease(0) == 0
    assert arena.lease(0, prefer=1) == 1
    assert arena.lease(0, prefer=1) == 9  # the middle of [2, 16)
    assert arena.lease(0, prefer=16) == 5


def test_blocks_know_their_page() -> None:
    arena = Arena(layout(["full", "window", "chunk"], num_pages=9))
    for group in range(3):
        for page in range(9):
            assert {arena.page_of(group, block) for block in arena.blocks(page, group)} == {page}
            assert len(arena.blocks(page, group)) >= arena.blocks_per_page[group]


def test_pages_that_hold_no_block_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"1000 bytes hold no block of KV group full \(1024 bytes\)"):
        Arena(layout(["full"], num_pages=4, page_bytes=1000))
