"""The page's modules on their own: decoder, server-sent events, history, geometry, layout; 100,000 blocks."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from tests.browser.block_frames import ACTIVE, EVICTABLE, FakeWorker
from tests.browser.busy_worker import BusyWorker
from tests.browser.map_page import MapPage
from tests.browser.map_server import event

pytestmark = pytest.mark.browser


@pytest.fixture
def modules(block_map: MapPage) -> MapPage:
    """A page whose scripts can import the modules."""
    block_map.open()
    return block_map


def run(modules: MapPage, names: str, body: str, argument: Any = None) -> Any:
    imports = "".join(f"const {{ {name} }} = await import('/blocks/assets/{file}.js');" for file, name in pairs(names))
    return modules.evaluate(f"async (argument) => {{ {imports} {body} }}", argument)


def pairs(names: str) -> list[tuple[str, str]]:
    return [(part.split(":")[0], part.split(":")[1]) for part in names.split()]


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
    found = run(modules, "frames:decodeFrame,fromBase64", body, frames)
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
    assert run(modules, "frame_sources:SseParser", body, {"stream": stream, "size": size}) == [
        {"event": "frame", "data": "AAAA"},
        {"event": "message", "data": "first\nsecond"},
        {"event": "workers", "data": "[]"},
    ]


def test_history_stays_within_its_memory_and_minutes(modules: MapPage) -> None:
    busy = BusyWorker(num_pages=20)
    frames = [text(busy.whole()), *(text(busy.diff(0.1)) for _ in range(120))]
    body = """const worker = new Worker("w0"), limits = { maxBytes: argument.maxBytes, maxAge_s: argument.maxAge_s };
    Object.assign(worker.history, limits);
    let most = 0;
    argument.frames.forEach((text, i) => {
      const bytes = fromBase64(text);
      worker.takeFrame(decodeFrame(bytes), bytes, i);
      most = Math.max(most, worker.history.numBytes);
    });
    const { entries, numBytes } = worker.history, last = worker.history.stateAt(entries.length - 1);
    const names = ["states", "references", "logical", "hashes", "born", "owners", "tally"];
    const same = names.every(name => last[name].join() === worker.live[name].join());
    const standsAlone = entries[0].whole || entries[0].key !== null;
    const sum = entries.reduce((total, entry) => total + entry.numBytes, 0) === numBytes;
    return { most, count: entries.length, oldest: entries[0].at_s, same, sum, standsAlone };"""
    names = "workers:Worker frames:decodeFrame,fromBase64"
    roomy = run(modules, names, body, {"frames": frames, "maxBytes": 1e9, "maxAge_s": 60})
    assert roomy["same"]
    assert roomy["sum"]
    assert roomy["standsAlone"]
    assert 50 <= roomy["oldest"] <= 60, "a minute is there, and hardly more"
    tight = run(modules, names, body, {"frames": frames, "maxBytes": 200_000, "maxAge_s": 300})
    assert tight["same"]
    assert tight["most"] < 300_000, "over the limit by no more than the run up to the next key"
    assert 1 < tight["count"] < roomy["count"]


def test_any_moment_of_the_history_is_what_the_live_state_was(modules: MapPage) -> None:
    busy = BusyWorker(num_pages=6, blocks_per_page=50)
    frames = [text(busy.whole()), *(text(busy.diff(0.3)) for _ in range(20))]
    body = """const worker = new Worker("w0"), then = [];
    const names = ["states", "references", "logical", "hashes", "born", "owners", "tally"];
    const print = state => JSON.stringify([
      names.map(name => state[name].join()), [...state.sequences.keys()], state.time_s, state.evicted]);
    argument.forEach((text, i) => {
      const bytes = fromBase64(text);
      worker.takeFrame(decodeFrame(bytes), bytes, i);
      then.push(print(worker.live));
    });
    const same = then.map((was, i) => was === print(worker.history.stateAt(i)));
    return [same, worker.history.entries.filter(e => e.key).length];"""
    same, num_keys = run(modules, "workers:Worker frames:decodeFrame,fromBase64", body, frames)
    assert same == [True] * 21
    assert num_keys > 0, "key states were tried as well"


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
    names = "geometry:Geometry,layoutPages,blockRect,pageAt,blockAt frames:decodeFrame,fromBase64"
    assert run(modules, names, body, text(fake.frame(whole=True))) == []


def test_a_page_that_changes_hands_forgets_the_old_groups_blocks(modules: MapPage) -> None:
    fake = FakeWorker(num_pages=4)
    fake.lease(0, 0)
    fake.put(0, 1, EVICTABLE)
    first = text(fake.frame(whole=True))
    fake.owners[0] = 2
    fake._changed_pages.add(0)
    second = text(fake.frame())  # says nothing about blocks
    body = """const worker = new Worker("w0");
    argument.forEach((text, i) => { const bytes = fromBase64(text); worker.takeFrame(decodeFrame(bytes), bytes, i); });
    const { states, geometry } = worker.live, [, second] = geometry.offsets;
    return [0, second].map((from, g) => states.subarray(from, from + geometry.groups[g].num_blocks).filter(Boolean).length);"""
    assert run(modules, "workers:Worker frames:decodeFrame,fromBase64", body, [first, second]) == [0, 32]


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
