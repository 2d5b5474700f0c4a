"""The page in a browser, as a test looks at it: pixels of the canvas, texts of panels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.browser.block_frames import FakeWorker
from tests.browser.map_server import MapServer

if TYPE_CHECKING:
    from playwright.sync_api import Page

RECT = """([id, tier, group, block]) => {
  const app = transomBlockMap, worker = app.workers.get(id), { state } = worker;
  const { geometry } = tier === "host" ? state.host : state;
  const rect = app.map.rectOf({ worker, tier, page: geometry.pageOf(group, block), group, block });
  return [rect[0], rect[1] - app.map.scrollPx, rect[2], rect[3]];
}"""
PIXELS = """([x, y, w, h]) => {
  const data = document.getElementById("map").getContext("2d").getImageData(x, y, w, h).data, rows = [];
  for (let r = 0; r < h; r++) {
    const row = [];
    for (let i = 4 * r * w; i < 4 * (r + 1) * w; i += 4) {
      row.push("#" + [...data.slice(i, i + 3)].map(value => value.toString(16).padStart(2, "0")).join(""));
    }
    rows.push(row);
  }
  return rows;
}"""
TAKEN = "(n) => transomBlockMap.numFrames >= n && !transomBlockMap.isRenderDue"
ALL_PIXELS = """() => {
  const canvas = document.getElementById("map");
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  return crypto.subtle ? crypto.subtle.digest("SHA-256", data).then(d => [...new Uint8Array(d)].join()) : data.join();
}"""


class MapPage:
    """Waits for what it looks at; `errors` are the console's and the page's."""

    def __init__(self, page: Page, server: MapServer) -> None:
        self.page = page
        self.server = server
        self.errors: list[str] = []
        self.num_sent = 0
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)

    def open(self, query: str = "", *, waits_for_stream: bool = True) -> None:
        """Open the page, with its stream."""
        self.page.goto(f"{self.server.url}/blocks{query}")
        if waits_for_stream:
            self.page.wait_for_selector("#status[data-kind=live]")

    def show(self, *workers: FakeWorker) -> None:
        """Open the page and send a whole frame of each worker."""
        self.open()
        self.send(*(worker.frame(whole=True) for worker in workers))

    def send(self, *frames: bytes) -> None:
        """Send frames one by one, and wait until each is drawn."""
        for frame in frames:
            self.server.send(frame)
            self.num_sent += 1
            self.wait_for_frames(self.num_sent)

    def wait_for_frames(self, number: int) -> None:
        """Wait until this number of frames was taken and drawn."""
        self.page.wait_for_function(TAKEN, arg=number)

    def settle(self) -> None:
        """Wait until what was asked for is drawn."""
        self.page.wait_for_function("() => !transomBlockMap.isRenderDue")

    def rect(self, group: int, block: int, worker: str = "w0", *, tier: str = "device") -> list[int]:
        """Where a block lies on the canvas, in its pixels."""
        found: list[int] = self.page.evaluate(RECT, [worker, tier, group, block])
        return found

    def cell(self, group: int, block: int, worker: str = "w0") -> list[list[str]]:
        """A block's pixels, as #rrggbb."""
        return self.pixels(self.rect(group, block, worker))

    def pixels(self, rect: list[int]) -> list[list[str]]:
        """The pixels of a rectangle of the canvas, as #rrggbb."""
        pixels: list[list[str]] = self.page.evaluate(PIXELS, rect)
        return pixels

    def colours(self, group: int, block: int, worker: str = "w0") -> set[str]:
        """The colours of a block's pixels."""
        return {pixel for row in self.cell(group, block, worker) for pixel in row}

    def all_pixels(self) -> str:
        """Something that is equal for equal snapshots of the map."""
        self.settle()
        found: str = self.page.evaluate(ALL_PIXELS)
        return found

    def hover(self, group: int, block: int, worker: str = "w0", *, tier: str = "device") -> None:
        """Point at a block."""
        x, y, w, h = self.rect(group, block, worker, tier=tier)
        ratio = self.page.evaluate("devicePixelRatio")
        self.page.locator("#map").hover(position={"x": (x + w / 2) / ratio, "y": (y + h / 2) / ratio})

    def text(self, selector: str) -> str:
        """The visible text of an element, once what was asked for is drawn."""
        self.settle()
        return self.page.locator(selector).inner_text()

    def rows(self, selector: str) -> dict[str, str]:
        """A list of terms as a mapping."""
        script = (
            "list => [...list.querySelectorAll('dt')].map(term => [term.textContent, term.nextSibling.textContent])"
        )
        pairs: list[tuple[str, str]] = self.page.locator(selector).evaluate(script)
        return dict(pairs)

    def evaluate(self, script: str, argument: Any = None) -> Any:
        """Run a script in the page."""
        return self.page.evaluate(script, argument)
