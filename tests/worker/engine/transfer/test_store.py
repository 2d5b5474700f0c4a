"""A prefix moves from one cache to another, with bytes that say which block they are; then the books of both are in order."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from tests.prefix_chains import chain_of
from tests.worker.kvcache.cache_model import BLOCK, ENTRY_MIXES, MIXES, check_cache, layout
from transom_core.config import SchedulerConfig
from transom_core.contract import HeavyPolicy, Request, SamplingParams
from transom_core.contract.kv_transfer import PrefixOffer, PrefixQuery
from transom_core.kv_cache.hashing import chain_root
from transom_core.kv_cache.kv_shares import KvShares
from transom_core.kv_cache.tiers import DEVICE, HOST
from transom_worker.engine.transfer.store import RANKS_LOST, ImportPlan, TransferStore
from transom_worker.execution.executor import ReadEnd, RemoteRead
from transom_worker.kvcache.manager import KvCache
from transom_worker.kvcache.tiers.imports import MAX_AWAITED_S, MAX_KEPT_S, KeptImports
from transom_worker.scheduling.scheduler import Scheduler


class Slabs:
    """The memory of one rank: what each block of each tier has."""

    def __init__(self) -> None:
        self.contents: dict[tuple[int, int, int], bytes] = {}  # by tier, group, block

    def read_blocks(self, tier: int, group: int, blocks: Sequence[int]) -> list[bytes]:
        return [b"".join(self.contents[tier, group, block] for block in blocks)]

    def on_read_end(self, callback: Any) -> None:
        self.read_ended = callback

    def take_read_ends(self) -> None:
        pass

    def begin_read(self, read: RemoteRead) -> None:
        self.read = read

    def write_blocks(self, tier: int, group: int, blocks: Sequence[int], data: Sequence[bytes]) -> None:
        (own,) = data
        size = len(own) // len(blocks)
        for i, block in enumerate(blocks):
            self.contents[tier, group, block] = own[i * size : (i + 1) * size]


class Worker:
    """A scheduler with two tiers over made-up memory."""

    def __init__(self, mix: Sequence[str], *, num_pages: int = 60, host_pages: int = 60) -> None:
        arena = layout(mix, num_pages=num_pages)
        self.slabs = Slabs()
        self.cache = KvCache(arena, replace(arena, num_pages=host_pages), block_size=BLOCK)
        self.scheduler = Scheduler(SchedulerConfig(), self.cache, max_model_len=400)
        shares = KvShares(groups=(arena.groups,), heads=(((0, 1),) * 2 * len(mix),))
        executor: Any = self.slabs
        self.now_s = 0.0
        self.kept = KeptImports(
            self.cache.tiers.imports, is_waiting=self.scheduler.waits_for_admission, clock=lambda: self.now_s
        )
        self.store = TransferStore(self.scheduler, executor, shares, self.kept)

    def compute(self, tokens: list[int]) -> None:
        """Compute a prompt, and give every published block the bytes of its digest."""
        chain = chain_of(tokens, BLOCK)
        blocks = self.cache.begin(chain, chain_root(BLOCK), hit=self.cache.find(chain, len(tokens)))
        for end in range(blocks.processed + 1, len(tokens) + 1):
            assert self.cache.extend(blocks, end)
            self.cache.advance(blocks, tokens, end)
        self.cache.release(blocks)
        self.fill()

    def fill(self) -> None:
        for group, found in enumerate(self.cache.index.tiers[DEVICE]):
            for digest, block in found.items():
                self.slabs.contents[DEVICE, group, block] = self.bytes_of(group, digest)

    def bytes_of(self, group: int, digest: bytes) -> bytes:
        size = self.cache.layout.groups[group].block_bytes
        return (digest * -(-size // len(digest)))[:size]

    def hold(self, tokens: Sequence[int], request_id: str = "held", **fields: Any) -> None:
        """Queue a request that waits for its prefix."""
        request = Request(
            request_id=request_id,
            prompt_token_ids=tuple(tokens),
            params=fields.pop("params", SamplingParams(max_tokens=1)),
            seed=0,
            **fields,
        )
        self.scheduler.add(request, is_held=True)

    def check(self) -> None:
        """Nothing is kept for the held request any more, and the books are in order."""
        self.scheduler.abort("held")
        self.kept.end_admitted()
        check_cache(self.cache, ())


def fetch(source: Worker, target: Worker, num_tokens: int = 1) -> tuple[PrefixQuery, PrefixOffer | None]:
    query = target.store.query("held", num_tokens)
    assert query is not None
    return query, source.store.open_export("e", query)


def offered(source: Worker, target: Worker, tokens: Sequence[int]) -> tuple[PrefixQuery, PrefixOffer]:
    """The source's offer of a prompt that it has computed, for the held request "held"."""
    source.compute(list(tokens))
    target.hold([*tokens, 1])
    query, offer = fetch(source, target)
    assert offer is not None
    return query, offer


def move(source: Worker, target: Worker, query: PrefixQuery, offer: PrefixOffer) -> ImportPlan | None:
    """Move and publish what of an offer the target lacks, if it can."""
    plan = target.store.begin_import("i", query, offer)
    if not isinstance(plan, ImportPlan):
        return None
    for blocks, _ in plan.pieces:
        data = [np.frombuffer(part, np.uint8) for part in source.store.read_export("e", blocks)]
        target.store.write_import("i", blocks, target.store.convert(offer, blocks, data))
    target.store.publish_import("i", ["held"])
    return plan


@pytest.mark.parametrize("mix", [*MIXES, *ENTRY_MIXES], ids="+".join)
@pytest.mark.parametrize("seed", range(3))
def test_what_was_a_hit_there_is_one_here(mix: tuple[str, ...], seed: int) -> None:
    rng = random.Random(seed)
    source, target = Worker(mix), Worker(mix)
    tokens = [rng.randrange(50) for _ in range(rng.randrange(40, 90))]
    source.compute(tokens)
    if seed:
        target.compute(tokens[: rng.randrange(8, 40)])
    target.hold([*tokens, 1, 2, 3])
    query, offer = fetch(source, target)
    there = source.cache.find(query.chain, len(query.chain) * BLOCK + 1).start
    if not there:
        assert offer is None
        return
    assert offer is not None
    before = target.cache.find(query.chain, len(query.chain) * BLOCK + 1).start
    plan = move(source, target, query, offer)
    if plan is not None:
        assert plan.num_tokens == max(0, there - before)
        assert sum(len(one.blocks) for one, _ in plan.pieces) == plan.num_blocks
        assert sum(size for _, size in plan.pieces) <= plan.full_length_bytes
        assert target.cache.find(query.chain, len(query.chain) * BLOCK + 1).start >= there
        for tier, group in product((DEVICE, HOST), range(len(offer.blocks))):
            for digest, block in target.cache.index.tiers[tier][group].items():
                assert target.slabs.contents[tier, group, block] == target.bytes_of(group, digest)
    source.store.close_export("e")
    source.store.close_export("e")
    for worker in (source, target):
        worker.check()


def test_a_request_that_reads_no_prefix_cache_asks_for_nothing() -> None:
    target = Worker(("full",))
    target.hold(range(40), kv_policy=HeavyPolicy(sinks=4, budget=16))
    assert target.store.query("held", 1) is None
    target.check()


def test_what_is_exported_stays_and_an_emptied_cache_says_so() -> None:
    source, target = Worker(("full", "window")), Worker(("full", "window"))
    query, offer = offered(source, target, range(60))
    assert source.cache.tiers.exports.reads_device
    plan = target.store.begin_import("i", query, offer)
    assert isinstance(plan, ImportPlan)
    first, *_ = plan.pieces[0]
    assert source.store.read_export("e", first)
    source.cache.evict_all()
    target.cache.evict_all()
    with pytest.raises(KeyError):
        source.store.read_export("e", first)
    with pytest.raises(KeyError):
        target.store.write_import("i", first, [])
    target.store.publish_import("i", ["held"])
    assert not any(map(len, target.cache.index.tiers[HOST]))
    source.store.close_export("e")
    assert not source.cache.tiers.exports.reads_device
    for worker in (source, target):
        worker.check()
        assert worker.cache.arena.num_free == worker.cache.arena.num_pages


@pytest.mark.parametrize("prompt", [8, 20, 40])
def test_no_byte_comes_into_a_page_that_a_queued_copy_has_yet_to_read(prompt: int) -> None:
    """A page that was another group's, too: a sequence that ends at once has moved cached blocks to the host tier."""
    source, target = Worker(("window", "full")), Worker(("window", "full"), num_pages=40)
    for number in range(8):
        target.compute([100 + number] * 40)
    target.cache.copies.take()
    blocks = target.cache.begin(chain_of([7] * 200, BLOCK), chain_root(BLOCK))
    assert target.cache.extend(blocks, 200)
    target.cache.release(blocks, kind=None)
    query, offer = offered(source, target, range(prompt))
    assert isinstance(target.store.begin_import("i", query, offer), ImportPlan)
    assert target.store.awaits_copies("i")
    assert target.scheduler.has_work
    plan = target.scheduler.schedule()
    assert plan is not None
    assert plan.copy_group
    assert not target.store.awaits_copies("i")
    assert target.store.drop_import("i")
    with pytest.raises(KeyError):
        target.store.awaits_copies("i")
    target.check()


@pytest.mark.parametrize("error", ["", "ERR", RANKS_LOST])
def test_a_fetch_that_is_given_up_keeps_its_blocks_until_nothing_is_read(error: str) -> None:
    """The prefix's beginning, which the target had, is not needed any more, which is news to waiting sequences."""
    source, target = Worker(("full",)), Worker(("full",))
    target.compute(list(range(20)))
    target.cache.copies.take()
    query, offer = offered(source, target, range(40))
    assert isinstance(target.store.begin_import("i", query, offer), ImportPlan)
    ends: list[str] = []
    places = tuple(tuple((DEVICE, block) for block in blocks) for blocks in offer.blocks)
    target.store.begin_read("i", replace(offer, places=places), lambda error, seconds: ends.append(error))
    num_releases = target.cache.num_releases
    for _ in range(2):
        assert not target.store.drop_import("i")
        [held] = target.cache.tiers.imports.opened
        assert len(held.blocks) == len(offer.blocks[0]) - 20 // BLOCK == len(target.slabs.read.blocks)
        assert {one.target_tier for one in target.slabs.read.blocks} == {DEVICE}
    assert target.cache.num_releases > num_releases
    if error == RANKS_LOST:
        target.store.end_reads()
    else:
        target.slabs.read_ended(0, ReadEnd("i", error, 0.1))
    assert ends == [error]
    assert target.store.drop_import("i")
    target.check()
    target.cache.evict_all()
    assert target.cache.arena.num_free == target.cache.arena.num_pages


def test_a_cache_of_other_groups_is_refused_and_an_ended_request_asks_nothing() -> None:
    source, target = Worker(("full", "window")), Worker(("full", "chunk"))
    target.hold(list(range(20)))
    with pytest.raises(ValueError, match="chunk"):
        fetch(source, target)
    target.scheduler.abort("held")
    assert target.store.query("held", 1) is None


def imported(source: Worker, target: Worker, tokens: Sequence[int]) -> PrefixQuery:
    """Bring a prefix for the held request "held"."""
    query, offer = offered(source, target, tokens)
    assert move(source, target, query, offer) is not None
    source.store.close_export("e")
    return query


def press(worker: Worker, turn: int) -> None:
    """Spill more than the host tier holds, prompts of many lengths; each turn has others."""
    for number in range(20):
        worker.compute([100 + 20 * turn + number] * (20 + 4 * number))
    worker.cache.copies.take()


@pytest.mark.parametrize("mix", [("full",), ("full", "window")], ids="+".join)
@pytest.mark.parametrize("how", ["admitted", "aborted", "too late"])
def test_an_imported_prefix_is_kept_until_its_request_is_admitted(mix: tuple[str, ...], how: str) -> None:
    """Or has ended, or waits for too long; the other requests' blocks that the device evicts do not take its place before."""
    source, target = Worker(mix), Worker(mix, num_pages=16, host_pages=16)
    target.cache.tiers.imports.take_blocks = lambda needs: None  # active blocks fill the device
    query = imported(source, target, range(40))
    target.scheduler.stop_holding("held")
    reach = target.cache.find(query.chain, 41).start
    assert reach >= 36
    for turn in range(3):
        press(target, turn)
        target.kept.end_admitted()
        assert target.cache.find(query.chain, 41).start == reach
    held = [group.held_blocks for group in target.scheduler.stats().host_groups]
    assert held == [group.imported_blocks for group in target.scheduler.stats().host_groups]
    assert held[0] == reach // BLOCK
    target.now_s += 0.0 if how != "too late" else MAX_KEPT_S
    if how == "aborted":
        target.scheduler.abort("held")
    elif how == "admitted":
        target.scheduler.schedule()
        [sequence] = target.scheduler.by_request.values()
        assert sequence.was_admitted
        assert sequence.num_cached_tokens == reach
    target.kept.end_admitted()
    assert not target.cache.tiers.imports.opened
    assert not any(group.held_blocks for group in target.scheduler.stats().host_groups)
    if how != "admitted":
        press(target, 3)
        assert target.cache.find(query.chain, 41).start == 0
        target.check()


def test_an_import_on_the_device_is_kept_until_other_requests_need_its_blocks() -> None:
    source, target = Worker(("full", "window")), Worker(("full", "window"), num_pages=16)
    query = imported(source, target, range(40))
    cache, imports = target.cache, target.cache.tiers.imports
    assert not any(map(len, cache.index.tiers[HOST]))
    held = sorted(imports.on_device())
    press(target, 0)
    assert sorted(imports.on_device()) == held
    assert cache.find(query.chain, 41).start == 40
    assert cache.tiers.others_hold_device
    num_releases = cache.num_releases
    target.compute([7] * 230)  # does not fit beside it
    assert not cache.tiers.others_hold_device
    assert cache.find(query.chain, 41).start < 40
    target.scheduler.abort("held")
    target.kept.end_admitted()
    assert cache.num_releases > num_releases
    target.check()


def test_imports_that_wait_for_their_bytes_leave_half_of_the_device_to_running_sequences() -> None:
    source, target = Worker(("full",), num_pages=200), Worker(("full",), num_pages=40, host_pages=200)
    for number in range(12):
        target.compute([100 + number] * 60)
    cache = target.cache
    cache.copies.take()
    query, offer = offered(source, target, [n % 50 for n in range(300)])
    plans = [target.store.begin_import(name, query, offer) for name in "abc"]
    assert [plan.on_device for plan in plans if isinstance(plan, ImportPlan)] == [True, False, False]
    num_releases = cache.num_releases
    assert target.store.drop_import("b")
    assert cache.num_releases == num_releases  # it had nothing on the device
    assert target.store.drop_import("a")
    assert cache.num_releases > num_releases
    assert target.store.drop_import("c")
    target.check()


def test_an_offer_leaves_out_what_the_target_has() -> None:
    """Of groups that keep every token; where the target lacks these, it takes nothing."""
    source, target = Worker(("full", "window")), Worker(("full", "window"))
    query, whole = offered(source, target, range(40))
    part = source.store.open_export("p", query, num_held=3)
    assert part is not None
    assert part.blocks == (whole.blocks[0][3:], whole.blocks[1])
    assert target.store.begin_import("i", query, part) == "not_found"
    assert move(source, target, query, whole) is not None
    assert target.cache.find(query.chain, 41).start == 40
    assert target.store.begin_import("i", query, part) == "present"
    source.store.close_export("p")
    source.store.close_export("e")
    target.check()


def test_the_rest_of_a_prefix_does_not_evict_its_beginning() -> None:
    source, target = Worker(("full",)), Worker(("full",))
    imported(source, target, range(20))
    target.check()
    cache = target.cache
    blocks = cache.begin(chain_of([7] * 400, BLOCK), chain_root(BLOCK))
    assert cache.extend(blocks, cache.arena.num_free * cache.arena.blocks_per_page[0] * BLOCK)  # all that is free
    query, offer = offered(source, target, range(40))
    assert isinstance(target.store.begin_import("i", query, offer), ImportPlan)
    assert cache.find(query.chain[: 20 // BLOCK], 21).start == 20
    assert target.store.drop_import("i")
    cache.release(blocks, kind=None)
    target.check()


def test_a_second_request_for_the_prefix_keeps_it_too() -> None:
    source, target = Worker(("full",)), Worker(("full",), num_pages=16, host_pages=16)
    press(target, 9)
    tokens = list(range(40))
    query = imported(source, target, tokens)
    target.hold([*tokens, 1], "second")
    assert target.store.has("second", replace(query, num_tokens=40))
    target.scheduler.abort("held")
    target.kept.end_admitted()
    press(target, 0)
    assert target.cache.find(query.chain, 41).start == 40
    target.scheduler.abort("second")
    target.kept.end_admitted()
    press(target, 1)
    assert target.cache.find(query.chain, 41).start == 0
    target.check()


@pytest.mark.parametrize("is_awaited", [True, False])
def test_an_import_whose_request_has_gone_is_not_kept_unless_another_will_come(*, is_awaited: bool) -> None:
    source, target = Worker(("full",)), Worker(("full",))
    query, offer = offered(source, target, range(40))
    assert isinstance(target.store.begin_import("i", query, offer), ImportPlan)
    target.scheduler.abort("held")
    target.store.publish_import("i", ["held"], is_awaited=is_awaited)
    assert bool(target.cache.tiers.imports.opened) == is_awaited
    target.now_s += MAX_AWAITED_S
    target.kept.end_admitted()
    assert not target.cache.tiers.imports.opened
    target.check()
