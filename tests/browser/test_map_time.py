"""The user can pause the map and resume it."""

import pytest

from tests.browser.block_frames import ACTIVE, FakeWorker
from tests.browser.map_page import MapPage
from tests.browser.map_server import event

pytestmark = pytest.mark.browser


@pytest.fixture
def worker() -> FakeWorker:
    fake = FakeWorker()
    fake.lease(0, 0, 1)
    fake.lease(1, 2)
    return fake


def test_a_paused_map_stays_as_it_is_and_resumes_with_what_is_there_then(
    block_map: MapPage, worker: FakeWorker
) -> None:
    block_map.server.on_open = lambda: [event("frame", worker.frame(whole=True))]
    block_map.open(waits_for_stream=False)
    block_map.wait_for_frames(1)
    paused = block_map.all_pixels()
    assert block_map.text("#moment").startswith("Live, ")
    block_map.page.click("#toggle")
    block_map.page.wait_for_selector("#status[data-kind=paused]")
    assert block_map.text("#moment").startswith("Paused at ")
    assert block_map.text("#toggle") == "Resume"
    worker.put(0, 1, ACTIVE, references=1)
    assert block_map.all_pixels() == paused
    block_map.hover(0, 1)
    assert block_map.text("#tooltip") == "full block 1: free"
    block_map.page.click("#toggle")
    block_map.wait_for_frames(2)
    block_map.hover(0, 1)
    assert block_map.text("#tooltip") == "full block 1: active"
    assert block_map.text("#toggle") == "Pause"
    assert block_map.all_pixels() != paused
