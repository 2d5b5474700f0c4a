from __future__ import annotations

import itertools
import random

from tests.worker.kvcache.cache_model import layout
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
            before = {page for page, owner in enumerate(arena.owner) if owner == FREE}
            pages = arena.lease_run(rng.randrange(2), num_pages, prefer=rng.choice([None, rng.randrange(30)]))
            assert set(pages) <= before
            assert len(pages) == num_pages or (0 < len(pages) < num_pages and pages.stop not in before)
            leased += pages
        free = {page for page, owner in enumerate(arena.owner) if owner == FREE}
        assert free == set(range(23)) - set(leased)
        runs = [(start, arena._run_end[start]) for start in arena._run_starts]
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
