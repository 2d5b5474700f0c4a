"""The protocol of KV transfer where ranks read the source's memory: what is not whole is not published, and host blocks are not
free before nothing is read into them."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.worker.engine.transfer.fake_store import contents
from tests.worker.engine.transfer.test_transfers import CHAIN, CONFIG, Pair
from transom_core.config import TransferConfig
from transom_core.contract.kv_transfer import PrefixOffer
from transom_core.errors import StepFailed
from transom_worker.engine.transfer.store import RANKS_LOST


def reading_pair(num_looks: int = 3, *, config: TransferConfig = CONFIG) -> Pair:
    """A pair whose target reads memory; a read takes `num_looks` looks."""
    pair = Pair(config=config)
    pair.target.num_looks = num_looks
    return pair


async def test_memory_is_read_with_one_call_and_the_export_is_closed_later() -> None:
    calls: list[str] = []
    pair = reading_pair()
    pair.before = calls.append
    pair.target.put(CHAIN[:3])
    await pair.fetch()
    assert pair.target.cached.keys() == set(CHAIN)
    assert (pair.ended["r"].wire, pair.ended["r"].num_bytes) == ("nixl", 56)
    await pair.until_quiet()
    assert calls == ["open", "close"]
    assert pair.source_notes.num_bytes == 56
    assert pair.source_notes.exports == ["read"]


async def test_other_bytes_are_not_published_and_calls_bring_the_next_ones_until_one_fetch_reads_again() -> None:
    pair = reading_pair(config=replace(CONFIG, verify="all"))
    pair.target.bring = lambda digest: contents(CHAIN[0] if digest == CHAIN[7] else digest)
    await pair.fetch()
    assert pair.ended["r"].outcome == "source_lost"
    await pair.until_quiet()
    assert (pair.target.cached, pair.target.num_free) == ({}, 100)
    pair.target.bring = contents
    for wire in ("ray", "nixl", "nixl"):  # the second one tries
        assert "a" not in pair.fetches.calls.away.until_s
        pair.target.cached.clear()
        pair.start(wire)
        await pair.until_ended(wire)
        assert (pair.ended[wire].outcome, pair.ended.pop(wire).wire) == ("fetched", wire)
        assert pair.target.cached.keys() == set(CHAIN)
        away = pair.fetches.memory_wire._away
        away.until_s = {source: 0.0 for source in away.until_s}


@pytest.mark.parametrize("error", ["the agent cannot connect", RANKS_LOST, StepFailed("the ranks do not run"), None])
async def test_a_read_that_fails_costs_nothing_but_the_prefix(error: str | StepFailed | None) -> None:
    """None: it took as long as the source keeps blocks of which it hears nothing, so what was read may have been overwritten."""
    pair = reading_pair(num_looks=0)

    def fail(import_id: str, offer: PrefixOffer, on_end: Callable[[str, float], None]) -> None:
        if isinstance(error, StepFailed):
            raise error
        on_end(error or "", 0.0)

    if error is None:
        pair.exports._lease_s = 0.0
    else:
        pair.target.begin_read = fail  # type: ignore[method-assign]
    await pair.fetch()
    is_own_fault = error == RANKS_LOST or isinstance(error, StepFailed)
    assert pair.ended["r"].outcome == ("failed" if is_own_fault else "source_lost")
    assert pair.fetches.memory_wire.is_asked("a") == is_own_fault
    await pair.until_quiet()
    assert (pair.target.cached, pair.target.num_free) == ({}, 100)
    assert pair.fetches.calls.budget.used_bytes == 0


@pytest.mark.parametrize("by", ["timeout", "client"])
async def test_blocks_bytes_and_export_stay_while_an_abandoned_read_is_in_flight(by: str) -> None:
    pair = reading_pair(10**9, config=replace(CONFIG, timeout_s=0.05) if by == "timeout" else CONFIG)
    pair.start()
    while not pair.target.reads:
        await asyncio.sleep(0)
    assert pair.fetches.calls.budget.used_bytes == 80
    if by == "client":
        pair.fetches.cancel("r")
    else:
        await pair.until_ended("r")
        assert pair.ended["r"].outcome == "timeout"
    await asyncio.sleep(0.2)
    assert (pair.target.num_free, pair.fetches.calls.budget.used_bytes) == (90, 80)
    assert len(pair.source.exports) == len(pair.exports) == 1
    pair.fetches.memory_wire._away.until_s.clear()
    assert not pair.fetches.memory_wire.is_asked("a")  # so that such reads cannot fill the budget
    pair.target.num_looks = 0  # the source goes on, or dies
    await pair.until_quiet()
    assert (pair.target.cached, pair.target.num_free) == ({}, 100)
    assert pair.source_notes.exports == ["read"]
    assert pair.fetches.calls.budget.used_bytes == 0
    assert pair.fetches.memory_wire.is_asked("a")
