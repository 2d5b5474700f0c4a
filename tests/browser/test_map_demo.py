"""The page decodes the recorded trace, which the server's encoder made; test_block_map_demo.py says what the trace shows."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from tests.browser.map_page import MapPage
from tests.browser.map_server import STATIC

pytestmark = pytest.mark.browser

LOOK = """async () => {
  const { decodeFrame, splitTrace } = await import("/blocks/assets/frames.js");
  const { Worker } = await import("/blocks/assets/workers.js");
  const worker = new Worker("demo");
  let numWrong = 0;
  for (const bytes of splitTrace(await (await fetch("/blocks/demo.bin")).arrayBuffer())) {
    const frame = decodeFrame(bytes);
    if (!worker.takeFrame(frame, bytes, frame.header.time_s)) numWrong += 1;
    const { live } = worker, states = live.states.subarray(0, live.geometry.groups[0].num_blocks);
    const leased = states.filter(Boolean).length, isUsed = (state, i) => [2, 5, 6].includes(state) && live.references[i] > 0;
    const { active, held, loose, empty } = frame.header.counts[0];
    if (leased - live.evicted.filter(([g, b]) => g === 0 && live.owners[live.geometry.pageOf(g, b)] !== 1).length
        !== active + held + loose + empty) numWrong += 1;
    if (states.filter(isUsed).length !== active || live.numBlocks(0, 2) !== active) numWrong += 1;
  }
  return numWrong;
}"""


def test_the_recorded_trace_holds_together(block_map: MapPage) -> None:
    """No frame is missing, and blocks add up to the header's counts."""
    block_map.server.demo = gzip.decompress(Path(STATIC, "demo.bin.gz").read_bytes())
    block_map.open()
    assert block_map.evaluate(LOOK) == 0
