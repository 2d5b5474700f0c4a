"""The page's modules on their own: decoder, server-sent events, geometry, layout."""

import base64
from typing import Any

import pytest

from tests.browser.block_frames import ACTIVE, EVICTABLE, FakeWorker
from tests.browser.map_page import MapPage

pytestmark = pytest.mark.browser


@pytest.fixture
def modules(block_map: MapPage) -> MapPage:
    """A page whose scripts can import the modules."""
    block_map.open()
    return block_map


def run(modules: MapPage, body: str, argument: Any, **names: str) -> Any:
    """Run a script with what it imports: module -> names."""
    imports = "".join(f"const {{ {name} }} = await import('/blocks/assets/{file}.js');" for file, name in names.items())
    return modules.evaluate(f"async (argument) => {{ {imports} {body} }}", argument)


def text(frame: bytes) -> str:
    return base64.b64encode(frame).decode()


def test_the_decoder_reads_any_alignment(modules: MapPage) -> None:
    frames = []
    for length in range(4):
        fake = FakeWorker(worker="w" * (length + 1))
        fake.lease(0, 0)
        fake.put(0, 3, ACTIVE, references=2, logical=7, hash_prefix=0xDEADBEEF, age=12)
        frames.append(text(fake.frame(whole=True)))
    body = """return argument.flatMap(text => [0, 1, 2, 3].map(start => {
      const bytes = fromBase64(text), moved = new Uint8Array(bytes.length + start).subarray(start);
      moved.set(bytes);
      return [...decodeFrame(moved).blocks.slice(15, 20)];
    }));"""
    found = run(modules, body, frames, frames="decodeFrame, fromBase64")
    assert found == [[ACTIVE << 8 | 2 << 16, 3, 7, 0xDEADBEEF, 12]] * 16


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_server_sent_events_come_in_any_pieces(modules: MapPage, size: int) -> None:
    stream = ": a comment\r\n\r\nevent: frame\r\ndata: AAAA\r\n\r\ndata:first\ndata: second\nid: 7\n\n"
    stream += "event: workers\ndata: []\n\ndata: cut"
    body = """const parser = new SseParser(), found = [];
    for (let i = 0; i < argument.stream.length; i += argument.size) {
      found.push(...parser.push(argument.stream.slice(i, i + argument.size)));
    }
    return found;"""
    assert run(modules, body, {"stream": stream, "size": size}, frame_sources="SseParser") == [
        {"event": "frame", "data": "AAAA"},
        {"event": "message", "data": "first\nsecond"},
        {"event": "workers", "data": "[]"},
    ]


def test_the_middle_of_every_cell_belongs_to_its_block(modules: MapPage) -> None:
    fake = FakeWorker(page_bytes=1000, num_pages=17, strides={"odd": 96, "wide": 490, "even": 250})
    body = """const { header } = decodeFrame(fromBase64(argument)), geometry = new Geometry(header), wrong = [];
    for (const [width, side] of [[1000, 3], [777, 9], [90, 40], [30, 12]]) {
      const layout = layoutPages(geometry, width, side);
      const check = (g, p, b) => {
        const [x, y, w, h] = blockRect(layout, geometry, g, b), [cx, cy] = [x + w / 2, y + h / 2];
        const isFound = pageAt(layout, 17, cx, cy) === p && blockAt(layout, geometry, p, g, cx, cy) === b;
        if (!isFound || w < 1 || h < 1) wrong.push([width, g, p, b]);
      };
      for (let g = 0; g < 3; g++) {
        for (let p = 0; p < 17; p++) {
          for (let b = geometry.firstBlocks[g][p]; b < geometry.endBlocks[g][p]; b++) check(g, p, b);
        }
      }
    }
    return wrong;"""
    names = {"geometry": "Geometry, layoutPages, blockRect, pageAt, blockAt", "frames": "decodeFrame, fromBase64"}
    assert run(modules, body, text(fake.frame(whole=True)), **names) == []


def test_a_page_that_changes_hands_forgets_the_old_groups_blocks(modules: MapPage) -> None:
    fake = FakeWorker(num_pages=4)
    fake.lease(0, 0)
    fake.put(0, 1, EVICTABLE)
    first = text(fake.frame(whole=True))
    fake.owners[0] = 2
    fake._changed_pages.add(0)
    second = text(fake.frame())  # says nothing about blocks
    body = """const worker = new Worker("w0");
    for (const text of argument) worker.takeFrame(decodeFrame(fromBase64(text)));
    const { states, geometry } = worker.state, [, second] = geometry.offsets;
    return [0, second].map((from, g) => states.subarray(from, from + geometry.groups[g].num_blocks).filter(Boolean).length);"""
    assert run(modules, body, [first, second], app="Worker", frames="decodeFrame, fromBase64") == [0, 32]
