"""The protocol of KV transfer between two workers, whatever happens on the way: the held request is let go exactly once, and
neither side keeps anything."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.worker.engine.transfer.fake_store import BLOCK, BLOCK_BYTES, FakeStore, Notes, chain, on_loop
from transom_core.client_queue import Sharer
from transom_core.config import TransferConfig
from transom_core.contract import PrefixSource, Request, SamplingParams
from transom_core.contract.kv_transfer import BlockRange, PrefixOffer, PrefixQuery
from transom_core.contract.prefix_peers import Bytes
from transom_core.kv_cache.groups import GroupKind, GroupSpec
from transom_worker.engine.transfer.fetches import PrefixFetches
from transom_worker.engine.transfer.handovers import Handovers
from transom_worker.engine.transfer.served_exports import MAX_EXPORTS, PrefixExports
from transom_worker.engine.transfer.wires import ByteBudget
from transom_worker.telemetry.transfer_report import FetchReport

CHAIN = chain("p", 10)
CONFIG = TransferConfig(is_on=True, timeout_s=30.0)


def asked(name: str, **fields: Any) -> Request:
    return Request(request_id=name, prompt_token_ids=(1,), params=SamplingParams(), seed=0, **fields)


class Pair:
    """A source with all of CHAIN, and a target without; `before` is called before each call to the source, by its name."""

    def __init__(self, *, config: TransferConfig = CONFIG, source_config: TransferConfig = CONFIG) -> None:
        self.source, self.target = FakeStore(), FakeStore()
        self.source.put(CHAIN)
        self.notes, self.source_notes = Notes(), Notes()
        self.exports = PrefixExports(self.source, on_loop, source_config, self.source_notes)
        self.fetches = PrefixFetches(self, self.target, on_loop, config, on_end=self._end, observer=self.notes)
        self.ended: dict[str, FetchReport] = {}
        self.offered: list[int] = []  # blocks of unasked offers
        self.before: Callable[[str], Any] = lambda _: None
        self.most_bytes = self.bytes_in_flight = 0

    async def open_export(self, worker: str, query: PrefixQuery) -> PrefixOffer | str:
        await self._called("open")
        return await self.exports.open(query)

    async def own_query(self, worker: str, query: PrefixQuery) -> PrefixQuery | None:
        await self._called("own")
        return self.fetches.own_query(query)

    async def fetch_early(
        self, worker: str, source: PrefixSource, query: PrefixQuery, offer: PrefixOffer, sharer: Sharer
    ) -> bool:
        await self._called("early")
        self.offered.append(sum(map(len, offer.blocks)))
        return await self.fetches.fetch_early(source, query, offer, sharer)

    async def read_export(self, worker: str, export_id: str, blocks: BlockRange) -> list[Bytes]:
        self.bytes_in_flight += BLOCK_BYTES * len(blocks.blocks)
        self.most_bytes = max(self.most_bytes, self.bytes_in_flight)
        try:
            await self._called("read")
            return await self.exports.read(export_id, blocks)
        finally:
            self.bytes_in_flight -= BLOCK_BYTES * len(blocks.blocks)

    async def close_export(self, worker: str, export_id: str, read_bytes: int) -> bool:
        await self._called("close")
        return self.exports.close(export_id, read_bytes)

    async def _called(self, name: str) -> None:
        waits = self.before(name)
        if waits is not None:
            await waits

    def start(
        self, request_id: str = "r", *, worker: str = "a", time_left_s: float | None = None, is_known: bool = True
    ) -> None:
        if is_known:
            self.target.requests[request_id] = CHAIN
        source = PrefixSource(worker=worker, num_tokens=10 * BLOCK)
        self.fetches.start(asked(request_id, time_left_s=time_left_s, prefix_source=source))

    async def until_ended(self, *request_ids: str) -> None:
        async with asyncio.timeout(60):
            while not self.ended.keys() >= set(request_ids):
                await asyncio.sleep(0)

    async def fetch(self) -> None:
        """Start the fetch of request "r", and wait for its end."""
        self.start()
        await self.until_ended("r")

    async def until_quiet(self) -> None:
        """Wait until neither side has anything of a transfer."""
        async with asyncio.timeout(60):
            while self.source.exports or self.target.imports or len(self.fetches) or len(self.exports):
                await asyncio.sleep(0)

    def close_exports(self) -> None:
        for export_id in list(self.source.exports):
            self.exports.close(export_id)

    def _end(self, request_id: str, report: FetchReport) -> None:
        assert not request_id or request_id not in self.ended
        self.ended[request_id] = report


async def test_a_prefix_comes_in_pieces_and_is_published_as_a_whole() -> None:
    pair = Pair()
    pair.target.put(CHAIN[:3])
    await pair.fetch()
    assert pair.target.cached.keys() == set(CHAIN)
    report = FetchReport(
        source="a", outcome="fetched", num_tokens=28, num_blocks=7, num_bytes=56, full_length_bytes=56, wire="ray"
    )
    await pair.until_quiet()
    assert [replace(pair.ended["r"], seconds=0.0, read_s=0.0)] == pair.notes.reports == [report]
    assert pair.source_notes.num_bytes == 56
    assert pair.source_notes.exports == ["read"]


async def test_choices_of_one_prompt_fetch_it_once() -> None:
    pair = Pair()
    for name in "abc":
        pair.start(name)
    await pair.until_ended(*"abc")
    assert sorted(one.outcome for one in pair.ended.values()) == ["fetched", "present", "present"]
    assert pair.source_notes.num_bytes == 10 * BLOCK_BYTES


async def test_a_prompt_comes_while_it_is_computed_and_a_request_waits_for_its_last_part() -> None:
    """The source offers what it has without being asked, so its next step delays nothing."""
    pair, asks = Pair(), []
    pair.source.cached.clear()
    pair.source.requests["p"] = CHAIN
    pair.before = asks.append
    handovers = Handovers(
        "a", "node", pair, pair.source, pair.exports, CONFIG, is_here=pair.source.requests.__contains__
    )
    handovers.start([asked("p", decoder="b"), asked("no decoder")])
    for end in (3, 5, 9):
        pair.source.put(CHAIN[:end])
        async with asyncio.timeout(60):
            while len(pair.target.cached) < end:
                await asyncio.sleep(0)
    pair.source.put(CHAIN)  # with the last chunk comes the first token, and the request ends here
    del pair.source.requests["p"]
    async with asyncio.timeout(60):
        while asks.count("early") < 4:
            await asyncio.sleep(0)
    pair.start("r")
    pair.start("s")
    await pair.until_ended("r", "s")
    assert pair.ended["r"].outcome == pair.ended["s"].outcome == "present"
    await pair.until_quiet()
    assert ("open" in asks, sum(pair.offered)) == (False, len(CHAIN))
    assert pair.target.kept_for[-3:] == ["", "r", "s"]
    assert [report.num_blocks for report in pair.notes.reports if report.outcome == "fetched"] == [3, 2, 4, 1]
    assert (pair.ended[""].num_blocks, pair.ended[""].place) == (1, "node/device")  # they count for the measured speeds
    assert not handovers._tasks


async def hand_over(pair: Pair, *, is_here: bool = True, config: TransferConfig = CONFIG) -> None:
    """Hand over the prompt of a request that is, or is not, at the source any more."""
    pair.source.requests["p"] = CHAIN
    handovers = Handovers("a", "", pair, pair.source, pair.exports, config, is_here=lambda _: is_here)
    async with asyncio.timeout(60):
        await handovers._run(asked("p", decoder="b"))


async def test_what_comes_after_an_unasked_offer_has_expired_is_not_published() -> None:
    pair = Pair()
    pair.before = lambda name: pair.close_exports() if name == "close" else None
    await hand_over(pair)
    await pair.until_quiet()
    assert (pair.ended[""].outcome, len(pair.target.cached), pair.target.num_free) == ("source_lost", 0, 100)


@pytest.mark.parametrize("at", ["own", "early"])
async def test_a_decoder_that_is_stopped_keeps_neither_tasks_nor_exports(at: str) -> None:
    pair = Pair()
    pair.before = lambda name: asyncio.Event().wait() if name == at else None
    await hand_over(pair, config=replace(CONFIG, timeout_s=0.01))
    await pair.until_quiet()


@pytest.mark.parametrize(("num_cached", "num_moved"), [(10, 10), (9, 0)])
async def test_of_a_request_that_is_gone_the_whole_prompt_alone_is_offered(num_cached: int, num_moved: int) -> None:
    pair = Pair()
    pair.source.cached.clear()
    pair.source.put(CHAIN[:num_cached])
    await hand_over(pair, is_here=False)
    assert (len(pair.target.cached), pair.target.kept_for) == (num_moved, ["", "awaited"] * bool(num_moved))
    await pair.until_quiet()


async def test_an_unasked_offer_overtakes_the_request_that_asks() -> None:
    """The source answers after its step; its offer came before that step."""
    pair, stepped = Pair(), asyncio.Event()
    pair.before = lambda name: stepped.wait() if name == "open" else None
    pair.start("r")
    await hand_over(pair)
    await pair.until_ended("r")
    assert (pair.ended["r"].outcome, pair.target.kept_for) == ("present", ["", "r"])
    stepped.set()
    await pair.until_quiet()
    assert [one.outcome for one in pair.notes.reports] == ["fetched", "present"]


@pytest.mark.parametrize("is_asked", [True, False])
async def test_a_source_serves_a_bounded_number_of_exports(is_asked: bool) -> None:
    """Offers that no one has asked for count, too."""
    pair = Pair()
    pair.source.requests["p"] = CHAIN
    query = pair.source.handed_over(asked("p"))
    for _ in range(MAX_EXPORTS):
        if is_asked:
            assert isinstance(await pair.exports.open(query), PrefixOffer)
        else:
            assert await pair.exports.open_early("p", query, more_than=0, num_held=0)
    assert await pair.exports.open_early("p", query, more_than=0, num_held=0) is None
    assert await pair.exports.open(query) == "refused"
    pair.close_exports()
    await pair.until_quiet()


async def test_bytes_in_flight_are_bounded_over_all_fetches() -> None:
    pair = Pair(config=replace(CONFIG, max_bytes_in_flight=3 * 2 * BLOCK_BYTES))
    other = chain("q", 10)
    pair.source.put(other)
    pair.start("r")
    pair.start("s")
    pair.target.requests["s"] = other
    await pair.until_ended("r", "s")
    assert {one.outcome for one in pair.ended.values()} == {"fetched"}
    assert pair.most_bytes == 3 * 2 * BLOCK_BYTES


@pytest.mark.parametrize(("at", "after"), [("open", 1), ("read", 1), ("read", 3)])
async def test_a_source_that_dies_costs_nothing_but_the_prefix(at: str, after: int) -> None:
    pair, calls = Pair(), []

    def die(name: str) -> None:
        calls.append(name)
        if "dead" in calls or calls.count(at) >= after:
            calls.append("dead")
            raise ConnectionError("the source is gone")

    pair.before = die
    await pair.fetch()
    assert pair.ended["r"].outcome == "source_lost"
    pair.close_exports()  # the source's process has ended
    await pair.until_quiet()
    assert not pair.target.cached
    assert pair.target.num_free == 100


@pytest.mark.parametrize(("at", "by_deadline"), [("open", False), ("open", True), ("read", False), ("close", False)])
async def test_a_source_that_hangs_is_given_up(at: str, by_deadline: bool) -> None:
    """After the timeout of a transfer, or at the request's own deadline if that is earlier."""
    lease = replace(CONFIG, timeout_s=0.3) if at == "close" else CONFIG
    has_time = by_deadline or at == "close"
    pair = Pair(config=CONFIG if has_time else replace(CONFIG, timeout_s=0.05), source_config=lease)
    pair.before = lambda name: asyncio.Event().wait() if name == at else None
    pair.start(time_left_s=0.01 if by_deadline else None)
    await pair.until_ended("r")
    assert pair.ended["r"].outcome == ("fetched" if at == "close" else "timeout")
    await pair.until_quiet()
    assert pair.target.num_free == (90 if at == "close" else 100)
    if at != "open":
        assert pair.source_notes.exports == (["read"] if at == "read" else ["expired"])


@pytest.mark.parametrize("how", ["it hangs", "it fails"])
@pytest.mark.parametrize("at", ["open", "read"])
async def test_a_source_that_does_not_answer_is_not_asked_until_it_does(
    monkeypatch: pytest.MonkeyPatch, at: str, how: str
) -> None:
    monkeypatch.setattr("transom_worker.engine.transfer.wires.AWAY_S", 60.0)
    pair = Pair(config=replace(CONFIG, timeout_s=0.5))

    def fail(name: str) -> Any:
        if name == at and how == "it fails":
            raise ConnectionError("the source is gone")
        return asyncio.Event().wait() if name == at else None

    def wanted() -> list[str]:
        both = [asked(one, prefix_source=PrefixSource(worker=one, num_tokens=8)) for one in "ab"]
        return list(pair.fetches.wanted_by(both, "own"))

    assert wanted() == ["a", "b"]
    pair.before = fail
    await pair.fetch()
    assert wanted() == ["b"]
    pair.fetches.calls.away.until_s["a"] -= 60.0
    assert wanted() == ["a", "b"]  # this one tries
    assert wanted() == ["b"]
    pair.before = lambda _: None
    pair.start("again")
    await pair.until_ended("again")
    assert wanted() == ["a", "b"]


async def wait_for_ever(reached: asyncio.Event) -> None:
    reached.set()
    await asyncio.Event().wait()


@pytest.mark.parametrize("at", ["open", "read"])
async def test_a_request_that_ends_takes_its_fetch_along(at: str) -> None:
    pair, reached = Pair(), asyncio.Event()
    pair.before = lambda name: wait_for_ever(reached) if name == at else None
    pair.start()
    await reached.wait()
    pair.fetches.cancel("r")
    await pair.until_quiet()
    assert (pair.ended, pair.target.num_free, pair.target.cached) == ({}, 100, {})


async def test_the_fetch_of_a_request_that_ends_at_once_is_reported() -> None:
    pair = Pair()
    pair.fetches._on_end = lambda request_id, report: pair.fetches.cancel(request_id)
    pair.start()
    await pair.until_quiet()
    assert [report.outcome for report in pair.notes.reports] == ["fetched"]


async def test_a_request_whose_prefix_another_fetch_has_brought_takes_its_own_fetch_along() -> None:
    pair, reads, gate = Pair(), 0, asyncio.Event()

    def hang_once(name: str) -> Any:
        nonlocal reads
        reads += name == "read"
        return gate.wait() if name == "read" and reads == 1 else None

    pair.before = hang_once
    pair.start("slow", worker="b")
    while not reads:
        await asyncio.sleep(0)
    pair.start("fast")
    await pair.until_ended("slow", "fast")
    assert {name: report.outcome for name, report in pair.ended.items()} == {"slow": "present", "fast": "fetched"}
    pair.fetches.cancel("slow")
    for _ in range(20):  # far less than until the time limit
        await asyncio.sleep(0)
    assert (len(pair.fetches), pair.target.imports, pair.source.exports) == (0, {}, {})
    pair.ended.clear()
    pair.start("slow", worker="b")
    await pair.until_quiet()
    assert pair.ended["slow"].outcome == "present"


async def test_what_is_not_there_or_does_not_fit_is_said() -> None:
    pair = Pair()
    pair.source.cached.clear()
    pair.start("evicted")
    await pair.until_ended("evicted")
    pair.source.put(CHAIN[:4])
    pair.target.num_free = 3
    pair.start("full")
    await pair.until_ended("full")
    pair.target.put(CHAIN)
    pair.start("known")
    pair.start("unknown", is_known=False)
    await pair.until_ended("known", "unknown")
    outcomes = {name: report.outcome for name, report in pair.ended.items()}
    assert outcomes == {"evicted": "not_found", "full": "no_space", "known": "present", "unknown": "cancelled"}
    await pair.until_quiet()


async def test_a_source_of_another_model_refuses() -> None:
    pair = Pair()
    pair.target.groups = (GroupSpec(name="other", kind=GroupKind.FULL, layers=(0,), block_size=BLOCK),)
    await pair.fetch()
    assert pair.ended["r"].outcome == "refused"
    assert pair.source_notes.exports == ["refused"]


async def test_a_cache_that_was_emptied_meanwhile_publishes_nothing() -> None:
    """The ranks were started again, so that what was written is gone."""
    pair = Pair()
    pair.before = lambda name: pair.target.imports.clear() if name == "read" else None
    await pair.fetch()
    assert pair.ended["r"].outcome == "failed"
    assert not pair.target.cached
    await pair.until_quiet()


async def test_the_budget_is_given_in_order_and_back_from_those_that_leave() -> None:
    budget, order = ByteBudget(10), []

    async def take(name: str, num_bytes: int, until: asyncio.Event) -> None:
        give_back = await budget.take(num_bytes)
        order.append(name)
        await until.wait()
        give_back()

    ends = [asyncio.Event() for _ in range(4)]
    tasks = [asyncio.create_task(take(f"{i}", size, ends[i])) for i, size in enumerate((6, 50, 2, 4))]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (order, budget.used_bytes) == (["0"], 6)
    tasks[1].cancel()  # it waits for all of the budget
    await asyncio.wait([tasks[1]])
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (order, budget.used_bytes) == (["0", "2"], 8)
    for end in ends:
        end.set()
    await asyncio.wait(tasks)
    assert (order, budget.used_bytes) == (["0", "2", "3"], 0)


async def test_clients_take_turns_at_the_budget_by_bytes() -> None:
    budget, order = ByteBudget(10), []

    async def take(client: str, num_bytes: int) -> None:
        give_back = await budget.take(num_bytes, Sharer(client))
        order.append(client)
        await asyncio.sleep(0)
        give_back()

    sizes = {"a": 10, "b": 5}
    await asyncio.gather(*(take(client, sizes[client]) for client in "aaaabbbb"))
    assert "".join(order) == "abbabbaa"
