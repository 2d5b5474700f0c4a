"""Streams that need a key, break, or skip a frame."""

import pytest

from tests.browser.block_frames import ACTIVE, FREE, FakeWorker
from tests.browser.map_page import MapPage
from tests.browser.map_server import event

pytestmark = pytest.mark.browser

BLUE = "#0072b2"


@pytest.fixture
def worker() -> FakeWorker:
    """Its first page is full's, and a request uses its first block."""
    fake = FakeWorker(running=1)
    fake.lease(0, 0)
    fake.put(0, 0, ACTIVE, references=1)
    return fake


def test_a_key_is_asked_for_and_kept_for_the_tab(block_map: MapPage, worker: FakeWorker) -> None:
    block_map.server.key = "right"
    block_map.server.on_open = lambda: [event("frame", worker.frame(whole=True))]
    block_map.open(waits_for_stream=False)
    dialog = block_map.page.locator("#key-dialog")
    dialog.wait_for(state="visible")
    assert block_map.text("#status").endswith("API key wanted")
    block_map.page.keyboard.press("Escape")
    dialog.wait_for(state="visible")
    block_map.page.keyboard.type("wrong")
    block_map.page.keyboard.press("Enter")
    block_map.page.locator("[data-refused]").wait_for(state="visible")
    block_map.page.keyboard.type("right")
    block_map.page.keyboard.press("Enter")
    block_map.wait_for_frames(1)
    assert block_map.colours(0, 0) == {BLUE}
    assert block_map.evaluate("sessionStorage.getItem('transom.api_key')") == "right"
    assert block_map.evaluate("localStorage.length") == 0
    block_map.page.reload()
    block_map.wait_for_frames(1)
    assert not dialog.is_visible()
    refused = [error for error in block_map.errors if "401" in error]
    assert len(refused) == len(block_map.errors) == 2, "the browser itself notes the refused fetches"
    block_map.errors.clear()


def test_a_stream_that_breaks_is_opened_again(block_map: MapPage, worker: FakeWorker) -> None:
    block_map.server.on_open = lambda: [event("frame", worker.frame(whole=True))]
    block_map.open()
    block_map.wait_for_frames(1)
    block_map.server.drop()
    block_map.page.wait_for_selector("#status[data-kind=lost]")
    assert "The server closed the stream. Trying again in 0.5 s." in block_map.text("#status-message")
    worker.put(0, 0, FREE)
    block_map.wait_for_frames(2)
    assert BLUE not in block_map.colours(0, 0)
    assert block_map.text("#status").endswith("Connected")
    assert len(block_map.server.stream_queries) == 2


def test_a_missed_frame_opens_the_stream_again(block_map: MapPage, worker: FakeWorker) -> None:
    block_map.server.on_open = lambda: [event("frame", worker.frame(whole=True))]
    block_map.open()
    block_map.wait_for_frames(1)
    worker.put(0, 1, ACTIVE, references=1)
    worker.frame()  # lost on the way
    block_map.server.send(worker.frame())
    block_map.wait_for_frames(2)
    assert block_map.colours(0, 1) == {BLUE}
    assert len(block_map.server.stream_queries) == 2


def test_a_worker_that_refuses_a_watcher_is_named(block_map: MapPage) -> None:
    block_map.open()
    block_map.server.send_event("workers", [{"worker": "w0", "model": "demo", "state": "open"}])
    block_map.server.send_event("problem", {"worker": "w0", "message": "16 watch it already"})
    block_map.page.wait_for_selector("#problems:not(:empty)")
    assert block_map.text("#problems") == "w0: 16 watch it already"


def test_the_address_chooses_worker_and_period(block_map: MapPage) -> None:
    block_map.open("?worker=w7&period_s=2")
    assert block_map.server.stream_queries == [{"worker": "w7", "period_s": "2"}]


def test_nothing_comes_from_elsewhere(block_map: MapPage, worker: FakeWorker) -> None:
    asked: list[str] = []
    block_map.page.on("request", lambda request: asked.append(request.url))
    block_map.show(worker)
    assert len(asked) > 20
    assert [url for url in asked if not url.startswith(f"{block_map.server.url}/blocks")] == []
