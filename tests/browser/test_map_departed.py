"""Workers that depart, whose past the page keeps for as long as any history, and workers whose open stream sends no frames."""

from __future__ import annotations

import re

import pytest

from tests.browser.block_frames import ACTIVE, FakeWorker, fake_with_a_request
from tests.browser.map_page import MapPage

pytestmark = pytest.mark.browser

BLUE = "#0072b2"
Crashed = tuple[FakeWorker, FakeWorker, list[str]]  # the worker that departs, the other one, snapshots of the map
GONE = re.compile(r"gone since \d\d:\d\d:\d\d")


def present(block_map: MapPage, *names: str) -> None:
    """Say which workers are there, and wait until the page has taken it."""
    block_map.server.send_event("workers", [{"worker": name, "model": "demo", "state": "open"} for name in names])
    said = (
        "names => [...transomBlockMap.workers.values()].filter(w => !w.presence.isGone).map(w => w.id).join() === names"
    )
    block_map.page.wait_for_function(said, arg=",".join(names))
    block_map.settle()


@pytest.fixture(autouse=True)
def opened(block_map: MapPage) -> None:
    """The page is open, and its clock stands."""
    block_map.freeze_clock()
    block_map.open()


def headings(block_map: MapPage) -> list[str]:
    block_map.settle()
    return block_map.page.locator(".worker-heading").all_inner_texts()


def shown(block_map: MapPage) -> list[str]:
    block_map.settle()
    return block_map.page.locator(".worker-heading b").all_inner_texts()


@pytest.fixture
def crashed(block_map: MapPage) -> Crashed:
    """Two workers, of which the first has departed, and the snapshots of the map at two moments before, five seconds apart."""
    first, second = fake_with_a_request("w0"), fake_with_a_request("w1")
    present(block_map, "w0", "w1")
    block_map.send(first.frame(whole=True))
    block_map.pass_time(1)
    block_map.send(second.frame(whole=True))
    snapshots = [block_map.all_pixels()]
    block_map.pass_time(5)
    first.put(0, 3, ACTIVE, references=1)
    block_map.send(first.frame())
    snapshots.append(block_map.all_pixels())
    block_map.pass_time(5)
    present(block_map, "w1")
    return first, second, snapshots


def test_who_left_is_dimmed_for_ten_seconds(block_map: MapPage, crashed: Crashed) -> None:
    gone, there = headings(block_map)
    assert gone.startswith("w0")
    assert GONE.search(gone)
    assert not GONE.search(there)
    assert BLUE not in block_map.colours(0, 0, "w0")
    assert block_map.colours(0, 0, "w1") == {BLUE}
    assert block_map.text("#request-counts") == "1 running, 0 waiting", "what is gone runs nothing"
    assert block_map.text("#legend tbody tr:nth-child(1) td:nth-child(2)") == "1"
    block_map.pass_time(9)
    assert shown(block_map) == ["w0", "w1"]
    block_map.pass_time(1)
    assert shown(block_map) == ["w1"]


def test_one_can_step_back_to_before_the_crash(block_map: MapPage, crashed: Crashed) -> None:
    _, second, snapshots = crashed
    block_map.pass_time(20)
    block_map.send(second.frame())
    live = block_map.all_pixels()
    block_map.page.click("#toggle")
    assert shown(block_map) == ["w1"], "it was gone for long at that moment"
    assert block_map.all_pixels() == live
    for snapshot in reversed(snapshots):
        block_map.page.click("#back")
        assert block_map.all_pixels() == snapshot
        assert shown(block_map) == ["w0", "w1"]
        assert GONE.search(headings(block_map)[0])
    block_map.page.click("#back")
    assert shown(block_map) == ["w0"], "the other one's first frame came later"
    block_map.page.click("#go-live")
    assert block_map.all_pixels() == live


def test_the_last_worker_leaves_its_past(block_map: MapPage) -> None:
    fake = fake_with_a_request("w0")
    present(block_map, "w0")
    block_map.send(fake.frame(whole=True))
    before = block_map.all_pixels()
    present(block_map)
    block_map.pass_time(11)
    assert shown(block_map) == []
    assert GONE.search(block_map.text("#nothing"))
    block_map.page.click("#toggle")
    assert block_map.all_pixels() == before
    block_map.pass_time(400)
    assert shown(block_map) == ["w0"], "what the user looks at stays"
    block_map.page.click("#go-live")
    block_map.pass_time(2)
    assert block_map.evaluate("transomBlockMap.workers.size") == 0
    assert block_map.text("#nothing").startswith("No blocks yet")


def test_eight_are_kept_at_most_and_the_oldest_goes_first(block_map: MapPage) -> None:
    names = [f"w{i}" for i in range(11)]
    present(block_map, *names, "idle")
    block_map.send(*(fake_with_a_request(name).frame(whole=True) for name in names))
    for left in range(1, 11):
        block_map.pass_time(1)
        present(block_map, *names[left:])
    assert block_map.evaluate("[...transomBlockMap.workers.keys()]") == names[2:], "one that said nothing has no past"
    shares = block_map.evaluate("[...transomBlockMap.workers.values()].map(({ history }) => history.maxBytes)")
    assert sum(shares) == pytest.approx(64 * 2**20)


def test_a_worker_that_comes_back_was_away_between(block_map: MapPage, crashed: Crashed) -> None:
    first, second, _ = crashed
    block_map.pass_time(20)
    block_map.send(second.frame())
    block_map.pass_time(20)
    present(block_map, "w0", "w1")
    block_map.send(first.frame(whole=True))
    assert shown(block_map) == ["w0", "w1"]
    assert not any(GONE.search(heading) for heading in headings(block_map))
    assert block_map.colours(0, 0, "w0") == {BLUE}
    block_map.page.click("#back")
    assert shown(block_map) == ["w1"]
    block_map.page.click("#back")
    assert shown(block_map) == ["w0", "w1"]


def test_a_filter_for_who_left_is_taken_back_but_can_be_set_again(block_map: MapPage) -> None:
    first, second = fake_with_a_request("w0"), fake_with_a_request("w1")
    present(block_map, "w0", "w1")
    block_map.send(first.frame(whole=True), second.frame(whole=True))
    block_map.page.select_option("#worker-filter", "w0")
    present(block_map, "w1")
    assert block_map.page.input_value("#worker-filter") == ""
    block_map.pass_time(11)
    block_map.page.select_option("#worker-filter", "w0")
    block_map.pass_time(2)
    assert "Step back" in block_map.text("#nothing")
    block_map.page.click("#back")
    assert shown(block_map) == ["w0"]


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
