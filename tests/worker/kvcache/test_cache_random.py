"""Random operations on sequences on tiny pools, over every mix of groups: see `cache_driver` for what is checked, and how."""

import random

import pytest

from tests.how_many import num_examples
from tests.worker.kvcache.cache_driver import CacheDriver
from tests.worker.kvcache.cache_model import BLOCK, ENTRY_MIXES, MIXES
from transom_core.kv_cache import load_rates
from transom_core.kv_cache.tiers import DEVICE
from transom_worker.kvcache.prefix.tree import CheckpointKind

ALL_MIXES = (*MIXES, *ENTRY_MIXES)
PREFIXES = [[random.Random(seed).randrange(9) for _ in range(70)] for seed in range(3)]
KINDS = (None, *CheckpointKind)


def random_life(
    mix: tuple[str, ...], seed: int, *, has_host: bool = False, has_disk: bool = False, receives: bool = False
) -> CacheDriver:
    """Clients return: prompts continue earlier answers, from their ends or from anywhere inside."""
    rng = random.Random(seed)
    driver = CacheDriver(
        mix,
        num_pages=len(mix) * rng.randrange(2, 5 if has_disk else 11),
        host_pages=len(mix) * rng.randrange(1, 5 if has_disk else 20) if has_host else 0,
        has_disk=has_disk,
        caching=rng.random() < 0.95,
        window_repair=rng.random() < 0.7,
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
        driver.begin(tokens, boundaries, reads_cache=rng.random() < 0.95)

    for _ in range(100):
        driver.now_s += rng.random()
        draw = rng.random()
        if draw < 0.3 and len(driver.sequences) < max_lives:
            begin()
            driver.plan_fork_checkpoint(-1, rng.randrange(12))
        elif draw < 0.4:
            driver.complete(rng.randrange(9), rng.choice(KINDS), chunk=rng.choice([1, 5, 40]))
        elif draw < 0.44:
            driver.release(rng.randrange(9), rng.choice(KINDS))
        elif draw < 0.47:
            driver.preempt(rng.randrange(9))
        elif draw < 0.472:
            driver.evict_all()
        elif draw < 0.52 and has_host:
            driver.load()
        elif draw < 0.58 and has_disk:
            driver.bring(rng.choice(seen))
            begin()
        elif draw < 0.6 and receives:
            driver.receive_blocks(rng.choice(seen))
            begin()
        elif draw < 0.62 and (has_disk or receives):
            driver.end_imports()
        elif driver.sequences and len(driver.steps) < 3 and draw < 0.76:
            driver.plan([(rng.randrange(9), rng.choice([1, 3, 10, 40])) for _ in range(rng.randrange(1, 5))])
        else:
            driver.receive()
    driver.finish()
    return driver


@pytest.mark.parametrize("mix", ALL_MIXES, ids="+".join)
def test_random_operations(mix: tuple[str, ...]) -> None:
    """In half of the lives blocks are spilled and loaded. What is found in a tier has the contents that its digest names."""
    drivers = [random_life(mix, seed, has_host=seed % 2 == 1) for seed in range(3, 3 + num_examples(2, 50))]
    stats = [driver.cache.stats() for driver in drivers]
    assert sum(driver.num_refused for driver in drivers) > 0  # the pools are tiny enough to matter
    assert sum(sum(group.reuse_interval.counts) for each in stats for group in each.groups) > 0
    reasons = {reason for each in stats for group in each.groups for reason in group.evicted_blocks}
    assert {"own_group"} <= reasons
    assert ("other_group" in reasons) == (len(mix) > 1)
    assert sum(driver.num_spilled for driver in drivers) > 0
    assert sum(driver.num_loaded for driver in drivers) > 0


@pytest.mark.usefixtures("one_block_in_flight")
@pytest.mark.parametrize("mix", ALL_MIXES, ids="+".join)
def test_random_operations_with_a_disk(mix: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that leave the memory go to a disk, and prefixes come back from there, if there is a host tier to bring them to."""
    monkeypatch.setattr(load_rates, "LEAST_READ_TOKENS", 1)
    drivers = [random_life(mix, seed, has_host=True, has_disk=True) for seed in range(num_examples(3, 30))]
    assert sum(driver.num_imported for driver in drivers) > 0
    from_device = [random_life(mix, seed, has_disk=True) for seed in range(4, num_examples(5, 30))]
    assert any(driver.disk for driver in from_device)
    assert not any(driver.num_imported for driver in from_device)


@pytest.mark.parametrize("mix", MIXES, ids="+".join)
def test_random_operations_beside_another_worker(mix: tuple[str, ...]) -> None:
    """Blocks of another worker come to the device where active blocks leave room, else to the host tier."""
    drivers = [random_life(mix, seed, has_host=True, receives=True) for seed in range(num_examples(1, 30))]
    assert sum(driver.num_received[DEVICE] for driver in drivers) > 0
