"""Nodes that leave the memory go to a disk, and prefixes come back from there: blocks have the contents that their digests say."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from tests.how_many import num_examples
from tests.worker.kvcache.cache_driver import ROOT, CacheDriver
from tests.worker.kvcache.cache_model import BLOCK, ENTRY_MIXES, MIXES
from tests.worker.kvcache.rank_model import copy_blocks
from transom_core.kv_cache import load_rates
from transom_core.kv_cache.hashing import extend_chain
from transom_core.kv_cache.tiers import DISK, HOST
from transom_worker.kvcache.blocks.block_copies import BlockCopy
from transom_worker.kvcache.prefix.tree import CheckpointKind
from transom_worker.kvcache.tiers.imports import BlockImport

Contents = dict[int, Any]
ALL_MIXES = (*MIXES, *ENTRY_MIXES)


@pytest.fixture(autouse=True)
def small_prompts_are_worth_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_rates, "LEAST_READ_TOKENS", 1)


class DiskDriver(CacheDriver):
    """Ranks with a disk that keeps everything."""

    def __init__(self, mix: Sequence[str], *, num_pages: int, host_pages: int = 0) -> None:
        super().__init__(mix, num_pages=num_pages, host_pages=host_pages)
        self.cache.tiers.open_disk(self.layout)
        if self.cache.changes.rates is not None:
            self.cache.changes.set_rates(
                self.cache.changes.rates._replace(token_ns=10**12)
            )  # reading is worth its time
        self.disk: dict[tuple[int, bytes], Contents] = {}
        self.opened: dict[int, BlockImport] = {}  # by ticket
        self.num_imported = 0

    def receive(self) -> None:
        if not self.steps:
            return
        step, copies = self.steps[0], self.steps[0].copies
        step.copies = []
        for copy in copies:
            if copy.target_tier == DISK:
                self._store(copy)
            elif copy.ticket:
                step.copies.append(copy)
            else:
                copy_blocks(self.slabs, [copy])
        super().receive()

    def load(self) -> None:
        if self.loads and self.loads[0][0].source_tier == DISK:
            copies = self.loads.popleft()
            for copy in copies:
                self._fetch(copy)
            self.cache.tiers.imports.publish(self.opened[copies[0].ticket])
            self._check()
        else:
            super().load()

    def bring(self, token_ids: list[int]) -> BlockImport | None:
        """Import what the disk has of a prompt beyond the memory."""
        chain: list[bytes] = []
        extend_chain(chain, ROOT, token_ids, BLOCK)
        hit = self.cache.find(chain, len(token_ids), with_disk=True)
        opened = self.cache.tiers.imports.begin(chain, hit)
        self._check()
        if opened is not None:
            self.opened[self.cache.tiers.imports.fetch(opened)] = opened
            self.num_imported += len(opened.blocks)
            self.plan([])
            while self.steps:
                self.receive()
            while self.loads:
                self.load()
            for one in opened.blocks:
                assert self.cache.tiers.host.blocks[one.group][one.digest] == one.block
        return opened

    def note_file(self, group: int, digest: bytes) -> None:
        """Have the cache know that a block has a file."""
        if self.cache.tiers.disk.is_open:
            self.cache.tiers.disk.add(group, [digest])

    def _store(self, copy: BlockCopy) -> None:
        contents = self.slabs[copy.source_tier].contents(copy.group, copy.source)
        assert [content for _, content in sorted(contents.items())] == self.truth[copy.group, copy.digest]
        self.disk[copy.group, copy.digest] = contents
        self.note_file(copy.group, copy.digest)

    def _fetch(self, copy: BlockCopy) -> None:
        self.slabs[HOST].put(copy.group, copy.target, dict(self.disk[copy.group, copy.digest]))


def tokens(seed: int, length: int) -> list[int]:
    return [seed, *(random.Random(seed).randrange(9) for _ in range(length - 1))]


def pages_for(mix: Sequence[str]) -> int:
    """Pages of a pool that holds a few prompts: windows alone take little."""
    return 24 if any(retention.keeps_everything for retention in CacheDriver(mix, num_pages=9).cache.retentions) else 6


def run(driver: CacheDriver, token_ids: list[int]) -> bool:
    """A request over these tokens, to its end."""
    if not driver.begin(token_ids):
        return False
    driver.complete(len(driver.sequences) - 1, CheckpointKind.GENERATION, chunk=16)
    return True


def run_after_import(driver: DiskDriver, token_ids: list[int]) -> bool:
    opened = driver.bring(token_ids)
    done = run(driver, token_ids)
    if opened is not None:
        driver.cache.tiers.imports.end(opened)
        driver._check()
    return done


@pytest.mark.parametrize("mix", ALL_MIXES, ids="+".join)
@pytest.mark.parametrize("host_pages", [10, 30])
def test_what_was_dropped_comes_back(mix: tuple[str, ...], host_pages: int) -> None:
    num_pages = pages_for(mix)
    driver = DiskDriver(mix, num_pages=num_pages, host_pages=host_pages * num_pages // 24)
    prompts = [tokens(seed, 60) for seed in range(num_examples(daily=16, exhaustive=50))]
    for more in ([], [3], [4, 5, 6]):
        for prompt in prompts:
            assert run_after_import(driver, prompt + more)
    assert driver.disk
    assert driver.num_imported > 0
    driver.finish()


@pytest.mark.parametrize("mix", ALL_MIXES, ids="+".join)
def test_without_a_host_tier_the_device_stores(mix: tuple[str, ...]) -> None:
    driver = DiskDriver(mix, num_pages=pages_for(mix))
    for seed in range(8):
        assert run(driver, tokens(seed, 60))
    assert driver.disk
    assert driver.bring(tokens(0, 60)) is None  # nowhere to bring it
    driver.finish()


def test_a_reset_stores_nothing_and_voids_imports() -> None:
    driver = DiskDriver(("full",), num_pages=40, host_pages=40)
    assert run(driver, tokens(1, 60))
    driver.evict_all()
    assert not driver.cache.copies.take()
    chain = [bytes([number]) * 32 for number in range(8)]
    for digest in chain:
        driver.note_file(0, digest)
    hit = driver.cache.find(chain, 8 * BLOCK + 1, with_disk=True)
    opened = driver.cache.tiers.imports.begin(chain, hit)
    assert opened is not None
    assert len(opened.blocks) == 8
    driver.cache.evict_all()
    driver.cache.tiers.imports.publish(opened)
    assert not driver.cache.tiers.host.blocks[0]
    driver.cache.tiers.imports.end(opened)
    driver.finish()


def test_an_import_larger_than_the_host_tier_is_refused() -> None:
    driver = DiskDriver(("full",), num_pages=40, host_pages=1)
    chain = [bytes([number]) * 32 for number in range(100)]
    for digest in chain:
        driver.note_file(0, digest)
    hit = driver.cache.find(chain, 100 * BLOCK + 1, with_disk=True)
    assert hit.num_hash_blocks == 100
    assert driver.cache.tiers.imports.begin(chain, hit) is None
    driver.finish()


def test_the_device_gives_up_what_lies_above_an_import() -> None:
    """A locked node in the host tier holds the nodes above it on the device; memory that they pin was promised to others."""
    driver = DiskDriver(("full",), num_pages=40, host_pages=40)
    first = tokens(1, 40)
    assert run(driver, first)
    assert run(driver, first + tokens(2, 40))
    cache = driver.cache
    lower = max(cache.checkpoints.tree.nodes(), key=lambda node: node.boundary)
    while lower.tier != HOST:
        assert cache.eviction.evict_one()
    assert lower.parent is not None
    assert lower.parent.tier != HOST
    chain: list[bytes] = []
    extend_chain(chain, ROOT, first + tokens(2, 40), BLOCK)
    chain = [*chain[: lower.boundary], bytes(32)]
    driver.note_file(0, bytes(32))
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
    driver = DiskDriver(("full",), num_pages=40, host_pages=4)
    cache = driver.cache
    chain = [bytes([number]) * 32 for number in range(200)]
    most = sum(len(cache.tiers.host.arena.blocks(page, 0)) for page in range(cache.tiers.host.arena.num_pages))
    begin, end = most // 2, most
    for digest in chain[:begin]:
        driver.note_file(0, digest)
    first = cache.tiers.imports.begin(chain, cache.find(chain, begin * BLOCK + 1, with_disk=True))
    assert first is not None
    cache.tiers.imports.publish(first)
    cache.tiers.imports.end(first)
    for digest in chain[begin : end + 1]:
        driver.note_file(0, digest)
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
