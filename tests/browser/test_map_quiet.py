"""The page marks a worker whose stream is open but sends no frames."""

from __future__ import annotations

import pytest

from tests.browser.block_frames import fake_with_a_request
from tests.browser.map_page import MapPage

pytestmark = pytest.mark.browser

ANNOUNCED = """() => {
  globalThis.said = [];
  const region = document.getElementById("announcer");
  const watched = { childList: true, characterData: true, subtree: true };
  new MutationObserver(() => said.push(region.textContent)).observe(region, watched);
}"""


def note(block_map: MapPage, name: str) -> str:
    block_map.settle()
    heading = block_map.page.locator(".worker-heading").filter(has=block_map.page.get_by_text(name, exact=True))
    text: str = heading.locator("em").text_content() or ""
    return text


def told(block_map: MapPage, text: str) -> int:
    return sum(text in said for said in block_map.evaluate("said"))


def test_a_hung_worker_is_told_from_one_that_rests(block_map: MapPage) -> None:
    block_map.freeze_clock()
    block_map.open()
    block_map.evaluate(ANNOUNCED)
    hangs, rests = fake_with_a_request("hangs"), fake_with_a_request("rests")
    block_map.send(hangs.frame(whole=True), rests.frame(whole=True))
    for seconds in (5, 7, 1):
        assert note(block_map, "hangs") == ""
        block_map.pass_time(seconds)
        block_map.send(rests.frame())
    assert note(block_map, "hangs") == "nothing for 13 s"
    assert note(block_map, "rests") == ""
    colour = block_map.page.locator(".worker-heading em").first.evaluate("note => getComputedStyle(note).color")
    assert colour == "rgb(168, 50, 0)", "as what is wrong looks"
    block_map.pass_time(5)
    block_map.send(rests.frame())
    assert note(block_map, "hangs") == "nothing for 18 s"
    assert told(block_map, "hangs: nothing for 1") == 1
    assert told(block_map, "nothing for") == 1, "once, however long it lasts"
    block_map.send(hangs.frame())
    assert note(block_map, "hangs") == ""
    for _ in range(3):
        block_map.pass_time(5)
        block_map.send(rests.frame())
    assert told(block_map, "hangs: nothing for") == 2, "it is another time"


def test_a_stream_that_was_lost_is_no_workers_silence(block_map: MapPage) -> None:
    block_map.freeze_clock()
    block_map.open()
    fake = fake_with_a_request("w0")
    block_map.send(fake.frame(whole=True))
    block_map.server.drop()
    block_map.page.wait_for_selector("#status[data-kind=lost]")
    block_map.pass_time(20)
    assert note(block_map, "w0") == ""
    block_map.page.wait_for_selector("#status[data-kind=live]")
    block_map.pass_time(2)
    assert note(block_map, "w0") == "", "it has had no time to send anything"
    block_map.pass_time(13)
    assert note(block_map, "w0") == "nothing for 15 s"
