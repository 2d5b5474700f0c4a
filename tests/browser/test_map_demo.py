"""The page decodes the recorded trace, which the server's encoder made, and the trace has every state and event."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.map_page import MapPage
from tests.browser.map_server import STATIC

pytestmark = pytest.mark.browser

SHARED, REPAIR, EVICTED = 7, 5, 6
LOOK = """async () => {
  const { decodeFrame, splitTrace } = await import("/blocks/assets/frames.js");
  const { Worker } = await import("/blocks/assets/workers.js");
  const most = new Array(8).fill(0), worker = new Worker("demo"), kinds = new Set();
  let numWrong = 0;
  for (const bytes of splitTrace(await (await fetch("/blocks/demo.bin")).arrayBuffer())) {
    const frame = decodeFrame(bytes);
    if (!worker.takeFrame(frame, bytes, frame.header.time_s)) numWrong += 1;
    for (const event of frame.header.events) kinds.add(event.kind);
    const { live } = worker, states = live.states.subarray(0, live.geometry.groups[0].num_blocks);
    const leased = states.filter(Boolean).length, isUsed = (state, i) => [2, 5, 6].includes(state) && live.references[i] > 0;
    const { active, held, loose, empty } = frame.header.counts[0];
    if (leased - live.evicted.filter(([g, b]) => g === 0 && live.owners[live.geometry.pageOf(g, b)] !== 1).length
        !== active + held + loose + empty) numWrong += 1;
    if (states.filter(isUsed).length !== active || live.numBlocks(0, 2) !== active) numWrong += 1;
    for (let g = 0; g < live.geometry.groups.length; g++) most.forEach((m, c) => { most[c] = Math.max(m, live.numBlocks(g, c)); });
  }
  return { numWrong, most, kinds: [...kinds] };
}"""


@pytest.fixture
def demo(block_map: MapPage) -> MapPage:
    block_map.server.demo = Path(STATIC, "demo.bin").read_bytes()
    return block_map


def test_the_recorded_trace_holds_together_and_has_everything(demo: MapPage) -> None:
    demo.open()
    found = demo.evaluate(LOOK)
    assert found["numWrong"] == 0, "no frame is missing, and blocks add up to the header's counts"
    assert all(found["most"][column] > 0 for column in (SHARED, REPAIR, EVICTED))
    assert {"hit", "repair", "evicted", "preempted", "admitted", "finished"} <= set(found["kinds"])
