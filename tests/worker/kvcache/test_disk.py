"""Imports from the disk: what they keep, what they leave to others, and when there is none. See `test_cache_random` as well."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.worker.kvcache.cache_driver import ROOT, CacheDriver
from tests.worker.kvcache.cache_model import BLOCK
from transom_core.kv_cache import load_rates
from transom_core.kv_cache.hashing import extend_chain
from transom_core.kv_cache.prefix_search import PrefixHit
from transom_core.kv_cache.tiers import HOST
from transom_worker.kvcache.prefix.tree import CheckpointKind


@pytest.fixture(autouse=True)
def small_prompts_are_worth_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_rates, "LEAST_READ_TOKENS", 1)


def disk_driver(*, host_pages: int) -> CacheDriver:
    return CacheDriver(("full",), num_pages=40, host_pages=host_pages, has_disk=True)


def find_files(driver: CacheDriver, chain: Sequence[bytes]) -> PrefixHit:
    """Have the cache know that these blocks have files; return the hit on the whole chain."""
    driver.cache.tiers.disk.add(0, chain)
    return driver.cache.find(chain, len(chain) * BLOCK + 1, with_disk=True)


def tokens(seed: int, length: int) -> list[int]:
    return [seed, *(random.Random(seed).randrange(9) for _ in range(length - 1))]


def run(driver: CacheDriver, token_ids: list[int]) -> None:
    """A request over these tokens, to its end."""
    assert driver.begin(token_ids)
    driver.complete(len(driver.sequences) - 1, CheckpointKind.GENERATION, chunk=16)


def test_a_reset_stores_nothing_and_voids_imports() -> None:
    driver = disk_driver(host_pages=40)
    run(driver, tokens(1, 60))
    driver.evict_all()
    assert not driver.cache.copies.take()
    chain = [bytes([number]) * 32 for number in range(8)]
    opened = driver.cache.tiers.imports.begin(chain, find_files(driver, chain))
    assert opened is not None
    assert len(opened.blocks) == 8
    driver.cache.evict_all()
    driver.cache.tiers.imports.publish(opened)
    assert not driver.cache.tiers.host.blocks[0]
    driver.cache.tiers.imports.end(opened)
    driver.finish()


def test_an_import_larger_than_the_host_tier_is_refused() -> None:
    driver = disk_driver(host_pages=1)
    chain = [bytes([number]) * 32 for number in range(100)]
    hit = find_files(driver, chain)
    assert hit.num_hash_blocks == 100
    assert driver.cache.tiers.imports.begin(chain, hit) is None
    driver.finish()


def test_the_device_gives_up_what_lies_above_an_import() -> None:
    """A locked node in the host tier holds the nodes above it on the device; memory that they pin was promised to others."""
    driver = disk_driver(host_pages=40)
    first = tokens(1, 40)
    run(driver, first)
    run(driver, first + tokens(2, 40))
    cache = driver.cache
    lower = max(cache.checkpoints.tree.nodes(), key=lambda node: node.boundary)
    while lower.tier != HOST:
        assert cache.eviction.evict_one()
    assert lower.parent is not None
    assert lower.parent.tier != HOST
    chain: list[bytes] = []
    extend_chain(chain, ROOT, first + tokens(2, 40), BLOCK)
    chain = [*chain[: lower.boundary], bytes(32)]
    cache.tiers.disk.add(0, [bytes(32)])
    hit = cache.find(chain, len(chain) * BLOCK + 1, with_disk=True)
    opened = cache.tiers.imports.begin(chain, hit)
    assert opened is not None
    assert opened.locked is lower
    while cache.eviction.evict_one():
        pass
    assert not any(cache.pools[0].pins)
    cache.tiers.imports.end(opened)
    driver.finish()


def test_an_import_keeps_what_it_goes_on_from_in_the_host_tier() -> None:
    """Blocks that were imported before are pinned by no node; room for the rest of the prefix is not made of them."""
    driver = disk_driver(host_pages=4)
    cache = driver.cache
    chain = [bytes([number]) * 32 for number in range(200)]
    most = sum(len(cache.tiers.host.arena.blocks(page, 0)) for page in range(cache.tiers.host.arena.num_pages))
    begin, end = most // 2, most
    first = cache.tiers.imports.begin(chain, find_files(driver, chain[:begin]))
    assert first is not None
    cache.tiers.imports.publish(first)
    cache.tiers.imports.end(first)
    cache.tiers.disk.add(0, chain[begin : end + 1])
    longer = cache.find(chain, (end + 1) * BLOCK + 1, with_disk=True)
    assert cache.tiers.imports.begin(chain, longer) is None  # one block too many: it would have to evict what it needs
    assert all(digest in cache.tiers.host.blocks[0] for digest in chain[:begin])
    fits = cache.find(chain, end * BLOCK + 1, with_disk=True)
    second = cache.tiers.imports.begin(chain, fits)
    assert second is not None
    assert len(second.blocks) == end - begin
    assert all(digest in cache.tiers.host.blocks[0] for digest in chain[:begin])
    cache.tiers.imports.end(second)
    driver.finish()
