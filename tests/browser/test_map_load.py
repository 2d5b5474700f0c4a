"""100,000 blocks, four frames a second: all frames are taken and drawn."""

from __future__ import annotations

import pytest

from tests.browser.busy_worker import BusyWorker
from tests.browser.map_page import MapPage
from tests.browser.map_server import event

pytestmark = pytest.mark.browser

NUM_DIFFS = 12


def test_a_hundred_thousand_blocks_keep_up(block_map: MapPage) -> None:
    busy = BusyWorker()
    assert busy.num_blocks == 100_000
    texts = [event("frame", busy.whole()), *(event("frame", busy.diff()) for _ in range(NUM_DIFFS))]
    block_map.server.periods = (0.25, texts)
    block_map.open()
    block_map.wait_for_frames(1 + NUM_DIFFS)
    shown = block_map.evaluate(
        """() => {
          const { live, history, nextSequence } = transomBlockMap.workers.get("w0");
          const numBlocks = live.states.reduce((sum, state) => sum + (state > 0), 0);
          return [numBlocks, history.entries.length, nextSequence];
        }"""
    )
    assert shown == [100_000, 1 + NUM_DIFFS, 1 + NUM_DIFFS]
    live = block_map.all_pixels()
    block_map.page.keyboard.press(",")
    assert block_map.all_pixels() != live
    block_map.page.keyboard.press(".")
    assert block_map.all_pixels() == live
