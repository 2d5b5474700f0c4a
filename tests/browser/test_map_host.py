"""A worker with a host tier has a second section on the map: states, moves, requests that load or are swapped, and numbers."""

import pytest

from tests.browser.block_frames import EVICTABLE, EVICTED, FREE, PINNED, UNLEASED, FakeWorker
from tests.browser.map_page import MapPage

pytestmark = pytest.mark.browser

STATES = """(worker) => {
  const host = transomBlockMap.workers.get(worker).state.host;
  return host === null ? null : [[...host.states], [...host.owners]];
}"""
SECTIONS = "() => transomBlockMap.map.placed.sections.map(({ worker, tier, top }) => [worker.id, tier, top])"
PER_PAGE = 16  # blocks of group 0


def worker_with_host(num_pages: int = 48) -> FakeWorker:
    worker = FakeWorker(host_pages=num_pages)
    worker.lease(0, 0)
    return worker


def test_both_tiers_are_drawn_and_numbered(block_map: MapPage) -> None:
    worker = worker_with_host()
    worker.put_host(0, 0, 8, PINNED)
    worker.put_host(0, 8, 2, EVICTABLE)
    worker.put_host(0, 10, 6, FREE)
    worker.totals["spilled_blocks"] = 10
    block_map.show(worker)
    assert [section[:2] for section in block_map.evaluate(SECTIONS)] == [["w0", "device"], ["w0", "host"]]
    states, owners = block_map.evaluate(STATES, "w0")
    assert states[:17] == [PINNED] * 8 + [EVICTABLE] * 2 + [FREE] * 6 + [UNLEASED]
    assert owners[:2] == [1, 0]
    headings = block_map.text("#map-world")
    assert "w0, host tier" in headings
    assert f"full 10 of {48 * PER_PAGE} blocks" in headings
    assert "Needed" in block_map.text("#host-legend")
    assert "Spilled blocks" in block_map.text("#counters")
    block_map.send(FakeWorker(worker="w1").frame(whole=True))
    assert [section[:2] for section in block_map.evaluate(SECTIONS)][2:] == [["w1", "device"]]


def test_pages_follow_their_blocks_and_requests_their_phases(block_map: MapPage) -> None:
    worker = worker_with_host()
    worker.put(0, 3, EVICTABLE, hash_prefix=7)
    worker.sequence(1, "waits", [[], []], phase="swapped")
    block_map.server.description = {
        "tier": "host",
        "references": 2,
        "sequences": [{"id": 1, "request": "waits", "processed": 32}],
        "logical": 4,
        "tokens": 16,
        "hash": "ab" * 8,
        "first_byte": 5120,
        "checkpoints": [{"kind": "turn", "boundary_tokens": 80, "turns": 0, "running": 0, "part": "chain"}],
    }
    block_map.show(worker)
    assert "swapped, 32 of 33 tokens" in block_map.text("#requests")
    assert "0 loading, 1 swapped" in block_map.text("#map-world")
    worker.put(0, 3, EVICTED)
    worker.put_host(0, 20, 1, PINNED)
    worker.event("spilled", group=0)
    block_map.send(worker.frame())
    assert block_map.evaluate(STATES, "w0")[1][1] == 1
    assert "spilled1 block of full" in block_map.text("#events").replace("\n", "")
    block_map.hover(0, 20, tier="host")
    assert block_map.text("#tooltip") == "host tier, full block 20: needed"
    assert block_map.rows("#inspector [data-rows]")["State"] == "needed"
    block_map.page.wait_for_function("() => document.querySelector('#inspector [data-details]').children.length > 0")
    assert block_map.rows("#inspector [data-details]") == {
        "Checkpoint": "turn, at 80 tokens, which needs it for its chain",
        "Request": "waits",
        "References": "2",
        "Tokens": "64 to 79 (logical block 4)",
        "Hash": "abababababababab…",
        "First byte": "5,120",
    }
    assert block_map.server.described == [{"worker": "w0", "group": "0", "block": "20", "tier": "host"}]
    worker.put_host(0, 20, 1, UNLEASED)
    block_map.send(worker.frame())
    assert block_map.evaluate(STATES, "w0")[1][1] == 0
