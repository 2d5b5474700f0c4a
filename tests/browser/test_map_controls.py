"""Filters."""

import pytest

from tests.browser.block_frames import ACTIVE, EVICTABLE, FakeWorker
from tests.browser.map_page import MapPage

pytestmark = pytest.mark.browser

BLUE, VERMILLION = "#0072b2", "#d55e00"


@pytest.fixture
def worker() -> FakeWorker:
    """Two requests, each with blocks of its own in both groups, and a cached block."""
    fake = FakeWorker(running=2)
    fake.lease(0, 0, 1)
    fake.lease(1, 2)
    window = fake.blocks_of(1, 2)[0]
    for block in (0, 1, 2, 3):
        fake.put(0, block, ACTIVE, references=1, logical=block % 2)
    for block in (window, window + 1):
        fake.put(1, block, ACTIVE, references=1, logical=1)
    fake.put(0, 8, EVICTABLE)
    fake.sequence(1, "cmpl-Alpha", [[[0, 0, 2]], [[1, window, 1]]])
    fake.sequence(2, "cmpl-beta", [[[0, 2, 2]], [[1, window + 1, 1]]])
    return fake


def lit(block_map: MapPage, worker: FakeWorker) -> list[bool]:
    """Which of the six active blocks have their full colour."""
    block_map.settle()
    window = worker.blocks_of(1, 2)[0]
    blocks = [(0, 0), (0, 1), (0, 2), (0, 3), (1, window), (1, window + 1)]
    return [block_map.colours(group, block) == {(BLUE, VERMILLION)[group]} for group, block in blocks]


def test_part_of_a_request_id_dims_the_others(block_map: MapPage, worker: FakeWorker) -> None:
    block_map.show(worker)
    block_map.page.fill("#request-filter", "alpha")
    assert lit(block_map, worker) == [True, True, False, False, True, False]
    block_map.page.fill("#request-filter", "CMPL")
    assert lit(block_map, worker) == [True] * 6
    block_map.page.fill("#request-filter", "unknown")
    assert lit(block_map, worker) == [False] * 6
    block_map.page.click("#clear-filters")
    assert lit(block_map, worker) == [True] * 6


def test_a_filtered_request_that_grows_lights_its_new_block(block_map: MapPage, worker: FakeWorker) -> None:
    block_map.show(worker)
    block_map.page.fill("#request-filter", "alpha")
    assert lit(block_map, worker)[2] is False
    worker.sequence(1, "cmpl-Alpha", [[[0, 0, 3]], []])
    block_map.send(worker.frame())
    assert lit(block_map, worker) == [True, True, True, False, False, False]
    worker.end(1)
    block_map.send(worker.frame())
    assert lit(block_map, worker) == [False] * 6


def test_a_click_on_a_blocks_request_selects_it(block_map: MapPage, worker: FakeWorker) -> None:
    block_map.show(worker)
    block_map.hover(0, 2)
    block_map.page.mouse.down()
    block_map.page.mouse.up()
    block_map.page.click("#inspector [data-requests] button")
    assert lit(block_map, worker) == [False, False, True, True, False, True]
    assert block_map.page.input_value("#request-filter") == "cmpl-beta"
    pressed = block_map.page.locator("#requests button").evaluate_all(
        "all => all.map(b => b.getAttribute('aria-pressed'))"
    )
    assert pressed == ["false", "true"]
    block_map.page.keyboard.press("Escape")
    assert lit(block_map, worker) == [True] * 6
    assert block_map.page.locator("#cursor").is_visible()
    block_map.page.mouse.move(0, 0)
    block_map.page.keyboard.press("Escape")
    assert not block_map.page.locator("#cursor").is_visible()


def test_the_group_filter_dims_and_the_worker_filter_hides(block_map: MapPage, worker: FakeWorker) -> None:
    block_map.show(worker, FakeWorker(worker="w1"))
    block_map.page.select_option("#group-filter", "window(128)")
    assert lit(block_map, worker) == [False, False, False, False, True, True]
    block_map.page.select_option("#group-filter", "")
    block_map.page.select_option("#worker-filter", "w1")
    block_map.settle()
    assert block_map.page.locator(".worker-heading b").all_inner_texts() == ["w1"]
    block_map.page.select_option("#worker-filter", "w0")
    assert lit(block_map, worker) == [True] * 6
