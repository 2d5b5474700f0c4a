"""Every block is a cell in its place, whose look shows its state."""

import pytest

from tests.browser.block_frames import ACTIVE, EVICTABLE, EVICTED, FREE, PINNED, REPAIR, FakeWorker
from tests.browser.map_page import MapPage

pytestmark = pytest.mark.browser

BLUE, VERMILLION, WHITE, TEXT = "#0072b2", "#d55e00", "#ffffff", "#16191d"


@pytest.fixture
def worker() -> FakeWorker:
    """Pages 0 to 3 are full's, 4 and 5 the window's, the others free."""
    fake = FakeWorker()
    fake.lease(0, 0, 1, 2, 3)
    fake.lease(1, 4, 5)
    return fake


def brightness(colour: str) -> int:
    return sum(int(colour[i : i + 2], 16) for i in (1, 3, 5))


def test_each_state_has_its_own_look_and_each_group_its_hue(block_map: MapPage, worker: FakeWorker) -> None:
    first_of_window = worker.blocks_of(1, 4)[0]
    worker.put(1, first_of_window, ACTIVE, references=1)
    for block, state in enumerate((FREE, ACTIVE, EVICTABLE, PINNED, REPAIR, EVICTED)):
        worker.put(0, block, state, references=int(state in (ACTIVE, REPAIR)))
    block_map.show(worker)
    free, active, evictable, pinned, repair, evicted = (block_map.colours(0, block) for block in range(6))
    assert active == {BLUE}
    assert repair == {BLUE, WHITE}
    assert evicted == {TEXT, WHITE}
    assert len(free) == len(evictable) == 1
    assert pinned == evictable | {BLUE}, "a frame around the colour of cached blocks"
    assert brightness(BLUE) < brightness(*evictable) < brightness(*free) < brightness(WHITE)
    assert block_map.colours(1, first_of_window) == {VERMILLION}, "hue is the group"
    wide, narrow = block_map.rect(0, 16), block_map.rect(1, first_of_window)
    assert wide[2] * wide[3] > 1.5 * narrow[2] * narrow[3], "area is bytes: a block of full has twice as many"


def test_pages_lie_in_slab_order_and_free_ones_are_blank(block_map: MapPage, worker: FakeWorker) -> None:
    block_map.show(worker)
    corners = [block_map.rect(0, worker.blocks_of(0, page)[0])[:2] for page in range(24)]
    assert corners == sorted(corners, key=lambda corner: (corner[1], corner[0]))
    assert len({tuple(corner) for corner in corners}) == 24
    assert block_map.colours(0, worker.blocks_of(0, 10)[3]) == {WHITE}
    x, y = block_map.rect(0, worker.blocks_of(0, 10)[0])[:2]
    outline = block_map.evaluate(
        "([x, y]) => [...document.getElementById('map').getContext('2d').getImageData(x - 1, y, 1, 1).data]", [x, y]
    )
    assert outline[:3] != [255, 255, 255], "a page has an outline"


def test_a_shared_prefix_is_marked_without_colour(block_map: MapPage, worker: FakeWorker) -> None:
    block_map.open()
    worker.sequence(1, "cmpl-first", [[[0, 0, 4]], []])
    for block in range(4):
        worker.put(0, block, ACTIVE, references=1, logical=block)
    block_map.send(worker.frame(whole=True))
    assert block_map.colours(0, 2) == {BLUE}
    worker.sequence(2, "cmpl-second", [[[0, 0, 3], [3, 8, 1]], []])
    for block in range(3):
        worker.put(0, block, ACTIVE, references=2, logical=block)
    worker.put(0, 8, ACTIVE, references=1, logical=3)
    block_map.send(worker.frame())
    for block in range(3):
        cell = block_map.cell(0, block)
        assert cell[0][0] == BLUE
        assert cell[len(cell) // 2][len(cell[0]) // 2] == WHITE, "an inset square"
    assert block_map.colours(0, 3) == block_map.colours(0, 8) == {BLUE}
    assert block_map.text("#legend tbody tr:nth-child(2) td:nth-child(2)") == "3"
    block_map.hover(0, 1)
    assert block_map.rows("#inspector [data-rows]")["References"] == "2"
    assert block_map.page.locator("#inspector [data-requests] button").all_inner_texts() == [
        "cmpl-first",
        "cmpl-second",
    ]


def test_the_legend_counts_as_the_header_does(block_map: MapPage, worker: FakeWorker) -> None:
    states = [ACTIVE, ACTIVE, REPAIR, EVICTED, EVICTED, EVICTED, EVICTABLE, PINNED, PINNED]
    references = [1, 2, 1, 1, 2, 0, 0, 0, 0]
    for block, (state, num) in enumerate(zip(states, references, strict=True)):
        worker.put(0, block, state, references=num)
    block_map.show(worker)
    rows = block_map.page.locator("#legend tbody tr")
    counts = worker.counts()[0]
    cells = rows.locator("td:nth-child(2)").all_inner_texts()
    assert cells == [str(n) for n in (5, 2, 1, counts["held"], counts["loose"], counts["empty"], 3)]
    assert counts["active"] == 5


def test_hover_tells_what_the_frames_and_the_worker_know(block_map: MapPage, worker: FakeWorker) -> None:
    worker.put(0, 17, ACTIVE, references=1, logical=2, hash_prefix=0x00C0FFEE, age=125)
    worker.sequence(1, "cmpl-hovered", [[[0, 0, 1], [1, 16, 2]], []], phase="prefill")
    block_map.server.description = {
        "checkpoints": [{"kind": "turn", "boundary_tokens": 48, "turns": 2, "running": 1, "part": "chain"}],
        "hash": "00c0ffee00000001",
        "cached_s": None,
        "first_byte": 4352,
    }
    block_map.show(worker)
    block_map.hover(0, 17)
    assert block_map.rows("#inspector [data-rows]") == {
        "Worker": "w0",
        "Group": "full",
        "Block": "17, 248 B",
        "Page": "1",
        "State": "active",
        "For": "13 s",
        "References": "1",
        "Tokens": "32 to 47 (logical block 2)",
        "Hash": "00c0ffee…",
    }
    assert block_map.text("#tooltip") == "full block 17: active, cmpl-hovered"
    assert "tokens 32 to 47 (logical block 2), prefill" in block_map.text("#inspector [data-requests]")
    block_map.page.wait_for_function("() => document.querySelector('#inspector [data-details]').children.length > 0")
    assert block_map.rows("#inspector [data-details]") == {
        "Checkpoint": "turn, at 48 tokens, which needs it for its chain; came back 2 times; 1 request on it",
        "Longer hash": "00c0ffee00000001…",
        "First byte": "4,352",
    }
    block_map.hover(0, worker.blocks_of(0, 12)[0])
    assert block_map.text("#tooltip") == "Page 12: free"
    assert block_map.server.described == [{"worker": "w0", "group": "0", "block": "17"}]


def test_every_worker_is_a_section(block_map: MapPage, worker: FakeWorker) -> None:
    other = FakeWorker(worker="w1", strides={"window(128)": 128}, num_pages=8)
    other.lease(0, 0)
    other.put(0, 0, ACTIVE, references=1)
    worker.put(0, 0, ACTIVE, references=1)
    block_map.show(worker, other)
    assert block_map.colours(0, 0, "w0") == {BLUE}
    assert block_map.colours(0, 0, "w1") == {VERMILLION}, "the same name has the same hue everywhere"
    assert block_map.rect(0, 0, "w1")[1] > block_map.rect(0, 383, "w0")[1]
    headings = block_map.page.locator(".worker-heading").all_inner_texts()
    assert [text[:2] for text in headings] == ["w0", "w1"]
    assert all("demo · identity 0123456789abcdef · " in text for text in headings)
    block_map.page.select_option("#worker-filter", "w0")
    block_map.server.send_event("workers", [{"worker": "w1", "model": "demo", "state": "ready"}])
    block_map.page.wait_for_function("() => document.querySelector('.worker-heading b').innerText === 'w1'")
    assert block_map.page.input_value("#worker-filter") == "", "the filter of a worker that has gone is cleared"
    block_map.server.send_event("problem", {"worker": "w1", "message": "does not answer"})
    block_map.page.wait_for_function(
        "() => document.querySelector('.worker-heading').innerText.includes('does not answer')"
    )
