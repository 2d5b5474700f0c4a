"""Random lives of sequences on tiny pools, over every mix of groups: see `cache_driver` for what is checked, and how."""

from __future__ import annotations

import random

import pytest
from cache_driver import CacheLife
from cache_model import BLOCK, ENTRY_MIXES, MIXES
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from how_many import num_examples
from transom_worker.kvcache.tree import CheckpointKind

ALL_MIXES = (*MIXES, *ENTRY_MIXES)
PREFIXES = [[random.Random(seed).randrange(9) for _ in range(70)] for seed in range(3)]
KINDS = (None, *CheckpointKind)


def prompt(prefix: int, shared: int, own: list[int]) -> list[int]:
    return [*PREFIXES[prefix][:shared], *own]


class CacheMachine(RuleBasedStateMachine):
    """Few sequences, shared prefixes, pools of a few pages."""

    @initialize(
        mix=st.sampled_from(ALL_MIXES), num_pages=st.integers(1, 24), caching=st.integers(0, 9), repair=st.booleans()
    )
    def start(self, mix: tuple[str, ...], num_pages: int, caching: int, repair: bool) -> None:
        self.life = CacheLife(mix, num_pages=num_pages, caching=caching > 0, window_repair=repair)

    @rule(
        prefix=st.integers(0, 2),
        shared=st.integers(1, 70),
        own=st.lists(st.integers(0, 1), max_size=9),
        boundaries=st.dictionaries(st.integers(1, 19), st.sampled_from(list(CheckpointKind)), max_size=3),
        reads_cache=st.integers(0, 9),
    )
    def begin(
        self,
        prefix: int,
        shared: int,
        own: list[int],
        boundaries: dict[int, CheckpointKind],
        reads_cache: int,
    ) -> None:
        tokens = prompt(prefix, shared, own)
        places = sorted((units, kind) for units, kind in boundaries.items() if units <= len(tokens) // BLOCK)
        self.life.begin(tokens, places, reads_cache=reads_cache > 0)

    @rule(wanted=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 30)), min_size=1, max_size=4))
    def plan(self, wanted: list[tuple[int, int]]) -> None:
        if self.life.lives and len(self.life.steps) < 3:
            self.life.plan(wanted)

    @rule(index=st.integers(0, 9), units_ahead=st.integers(0, 9))
    def plan_fork_checkpoint(self, index: int, units_ahead: int) -> None:
        self.life.plan_fork_checkpoint(index, units_ahead)

    @rule()
    def receive(self) -> None:
        self.life.receive()

    @rule(wanted=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 30)), min_size=1, max_size=4))
    def step(self, wanted: list[tuple[int, int]]) -> None:
        self.plan(wanted)
        self.life.receive()

    @rule(index=st.integers(0, 9), kind=st.sampled_from(KINDS))
    def release(self, index: int, kind: CheckpointKind | None) -> None:
        self.life.release(index, kind)

    @rule(index=st.integers(0, 9), kind=st.sampled_from(KINDS), chunk=st.sampled_from([1, 5, 40]))
    def complete(self, index: int, kind: CheckpointKind | None, chunk: int) -> None:
        self.life.complete(index, kind, chunk=chunk)

    @rule(index=st.integers(0, 9))
    def preempt(self, index: int) -> None:
        self.life.preempt(index)

    @rule(often=st.integers(0, 9))
    def evict_all(self, often: int) -> None:
        if not often:
            self.life.evict_all()

    def teardown(self) -> None:
        if hasattr(self, "life"):
            self.life.finish()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=num_examples(daily=50, exhaustive=120), stateful_step_count=40, deadline=None
)


def random_life(mix: tuple[str, ...], seed: int, *, num_operations: int = 100) -> CacheLife:
    """Clients return: prompts continue earlier answers, from their ends or from anywhere inside."""
    rng = random.Random(seed)
    life = CacheLife(
        mix, num_pages=len(mix) * rng.randrange(2, 11), caching=rng.random() < 0.95, window_repair=rng.random() < 0.7
    )
    max_lives, seen = rng.randrange(1, 7), list(PREFIXES)

    def begin() -> None:
        tokens = rng.choice(seen)
        tokens = tokens[: len(tokens) - rng.choice([0, 0, 3, 9, rng.randrange(len(tokens))])][:80]
        tokens = tokens + [rng.randrange(9) for _ in range(rng.randrange(1, 9))]
        seen.append(tokens)
        places = sorted(rng.sample(range(1, 19), rng.randrange(4)))
        boundaries = [(units, rng.choice(list(CheckpointKind))) for units in places if units * BLOCK < len(tokens)]
        boundaries += [((len(tokens) - 1) // BLOCK, CheckpointKind.PROMPT)] if not boundaries else []
        life.begin(tokens, boundaries, reads_cache=rng.random() < 0.95)

    for _ in range(num_operations):
        life.now_s += rng.random()
        draw = rng.random()
        if draw < 0.3 and len(life.lives) < max_lives:
            begin()
            life.plan_fork_checkpoint(-1, rng.randrange(12))
        elif draw < 0.4:
            life.complete(rng.randrange(9), rng.choice(KINDS), chunk=rng.choice([1, 5, 40]))
        elif draw < 0.44:
            life.release(rng.randrange(9), rng.choice(KINDS))
        elif draw < 0.47:
            life.preempt(rng.randrange(9))
        elif draw < 0.472:
            life.evict_all()
        elif life.lives and len(life.steps) < 3 and draw < 0.76:
            life.plan([(rng.randrange(9), rng.choice([1, 3, 10, 40])) for _ in range(rng.randrange(1, 5))])
        else:
            life.receive()
    life.finish()
    return life


@pytest.mark.parametrize("mix", ALL_MIXES, ids="+".join)
def test_random_lives(mix: tuple[str, ...]) -> None:
    lives = [random_life(mix, seed) for seed in range(num_examples(daily=3, exhaustive=6))]
    stats = [life.cache.stats() for life in lives]
    assert sum(life.num_refused for life in lives) > 0  # the pools are tiny enough to matter
    assert sum(sum(group.reuse_interval.counts) for each in stats for group in each.groups) > 0
