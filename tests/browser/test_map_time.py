"""The user can pause time, step back and resume; the map of a past moment is pixel for pixel what it was."""

from __future__ import annotations

import pytest

from tests.browser.block_frames import ACTIVE, EVICTABLE, EVICTED, FREE, FakeWorker
from tests.browser.map_page import MapPage

pytestmark = pytest.mark.browser

NUM_MOMENTS = 6


def worker_in_motion(name: str = "w0") -> FakeWorker:
    fake = FakeWorker(worker=name)
    fake.lease(0, 0, 1)
    fake.lease(1, 2)
    return fake


def move(fake: FakeWorker, moment: int) -> bytes:
    """Each moment looks different: a block more is active, one more was evicted, a page comes and goes."""
    fake.put(0, moment, ACTIVE, references=1 + moment % 2)
    fake.put(0, 16 + moment, EVICTED if moment % 3 == 1 else EVICTABLE, age=0)
    if moment % 2:
        fake.lease(1, 5)
    elif fake.owners[5]:
        fake.give_back(5)
    fake.event("hit", request=f"cmpl-{moment}", count=16)
    fake.totals["hit_tokens"] += 16
    return fake.frame(whole=moment in (0, 3))


@pytest.fixture
def snapshots(block_map: MapPage) -> list[str]:
    """The map after each of some frames."""
    fake = worker_in_motion()
    block_map.open()
    found = []
    for moment in range(NUM_MOMENTS):
        block_map.send(move(fake, moment))
        found.append(block_map.all_pixels())
    assert len(set(found)) == NUM_MOMENTS
    return found


def test_steps_back_and_forth_restore_the_pixels(block_map: MapPage, snapshots: list[str]) -> None:
    """A whole frame between others is a moment as any other, and is what the frames before it told."""
    block_map.page.click("#toggle")
    assert block_map.all_pixels() == snapshots[-1]
    for moment in reversed(range(NUM_MOMENTS - 1)):
        block_map.page.click("#back")
        assert block_map.all_pixels() == snapshots[moment]
    block_map.page.click("#back")
    assert block_map.all_pixels() == snapshots[0], "there is nothing before"
    for moment in range(1, NUM_MOMENTS):
        block_map.page.click("#forth")
        assert block_map.all_pixels() == snapshots[moment]


def test_panels_go_back_as_well(block_map: MapPage, snapshots: list[str]) -> None:
    hit_row = "#counters tbody tr:nth-child(1)"
    assert block_map.text(hit_row).split()[-2:] == ["80", "96"]
    assert block_map.page.locator("#events li").count() == NUM_MOMENTS
    for _ in range(3):
        block_map.page.click("#back")
    block_map.settle()
    assert block_map.text(hit_row).split()[-2:] == ["32", "48"]
    assert block_map.page.locator("#events li").count() == 3
    assert block_map.text("#moment").startswith("Paused at ")
    assert block_map.text("#toggle") == "Resume"


def test_frames_go_on_while_time_is_paused(block_map: MapPage) -> None:
    fake = worker_in_motion()
    block_map.open()
    block_map.send(move(fake, 0), move(fake, 1))
    block_map.page.click("#toggle")
    paused = block_map.all_pixels()
    block_map.send(move(fake, 2), move(fake, 3))
    assert block_map.all_pixels() == paused
    block_map.page.click("#go-live")
    live = block_map.all_pixels()
    assert live != paused
    block_map.page.click("#back")
    block_map.page.click("#back")
    assert block_map.all_pixels() == paused


def test_the_slider_goes_to_any_moment(block_map: MapPage, snapshots: list[str]) -> None:
    slider = block_map.page.locator("#slider")
    slider.evaluate("slider => { slider.value = slider.min; slider.dispatchEvent(new Event('input')); }")
    assert block_map.all_pixels() == snapshots[0]
    slider.focus()
    block_map.page.keyboard.press("ArrowRight")
    assert block_map.all_pixels() == snapshots[1]
    block_map.page.keyboard.press("ArrowLeft")
    assert block_map.all_pixels() == snapshots[0]
    block_map.page.click("#forth")
    block_map.page.locator("#strip canvas").first.click(position={"x": 3, "y": 20})
    assert block_map.all_pixels() == snapshots[0], "before the oldest frame there is only the oldest"
    assert "Paused at" in (slider.get_attribute("aria-valuetext") or "")


def test_the_strip_begins_with_the_frames_history(block_map: MapPage) -> None:
    fake = worker_in_motion()
    now = int(fake.time_s)
    fake.history = [[now - 300 + i, 20, [16, 0, 0, 16], [0, 0, 32, 0]] for i in range(300)]
    block_map.open()
    block_map.send(fake.frame(whole=True, after_s=0))
    labels = block_map.page.locator("#strip .strip-row p").all_inner_texts()
    assert labels == [
        "full 32 leased: 0 % active, 0 % pinned, 0 % evictable, 100 % free",
        "window(128) 32 leased: 0 % active, 0 % pinned, 0 % evictable, 100 % free",
    ]
    column = """canvas => {
      const { width, height } = canvas, data = canvas.getContext("2d").getImageData(Math.round(width / 2), 0, 1, height).data;
      return [...new Set(Array.from({ length: height }, (_, y) => data.slice(4 * y, 4 * y + 3).join()))];
    }"""
    full = block_map.page.locator("#strip canvas").first.evaluate(column)
    assert "0,114,178" in full, "active is the group's hue"
    assert len(full) >= 3, "active and empty, and an edge above them"


def test_a_worker_that_rests_leaves_no_gap_in_the_strip(block_map: MapPage) -> None:
    rests, works = worker_in_motion("w0"), worker_in_motion("w1")
    block_map.open()
    block_map.send(rests.frame(whole=True), works.frame(whole=True), works.frame(after_s=5), rests.frame(after_s=5))
    block_map.send(works.frame(after_s=5))
    samples = """() => [...transomBlockMap.workers.values()].map(({ series }) =>
      Array.from({ length: 11 }, (_, i) => series.at(1700000000 + i)).filter((sample) => sample !== null).length)"""
    assert block_map.page.evaluate(samples) == [11, 11]
    block_map.page.evaluate("() => transomBlockMap.requestRender(true)")
    block_map.settle()
    assert block_map.page.locator("#strip .strip-row p").first.inner_text().startswith("full 64 leased"), "of both"


def test_an_empty_map_cannot_be_paused(block_map: MapPage) -> None:
    block_map.open()
    assert block_map.page.locator("#toggle").is_disabled()
    assert block_map.page.locator("#nothing").is_visible()
    fake = worker_in_motion()
    fake.put(0, 0, FREE)
    block_map.send(fake.frame(whole=True))
    assert block_map.page.locator("#toggle").is_enabled()
    assert not block_map.page.locator("#nothing").is_visible()
