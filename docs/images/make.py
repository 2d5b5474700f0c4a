#!/usr/bin/env python3
"""Take the README's picture of the live block map from `transom serve` with the demo model and conversations. `plots.py` draws the
plot; the picture of a dashboard was drawn by this file's predecessor at 4a5ad8d5, from Prometheus and Grafana's panel components.

    .venv/bin/python -m docs.images.make        needs Chromium
"""

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from PIL import Image
from playwright.sync_api import sync_playwright

from benchmarks.server_process import serving

PICTURE = Path(__file__).with_name("block_map.png")
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SETTINGS = {"window": 256, "sinks": 4, "window_pattern": "SSF", "kv_cache_memory_bytes": "40MiB"}
NUM_SESSIONS = 5
TURN_TOKENS = 24
TRAFFIC_S = 60.0


def main() -> None:
    """Serve, converse, and take the picture."""
    program = next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)  # Playwright's own downloads are not used
    if program is None:
        sys.exit("No Chromium on PATH; on Debian: apt-get install chromium.")
    with serving("smollm2", **SETTINGS) as (_, url), traffic(url), sync_playwright() as playwright:
        time.sleep(TRAFFIC_S)
        arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=program, args=arguments)
        page = browser.new_page(viewport={"width": 1200, "height": 700}, color_scheme="dark")
        page.goto(f"{url}/blocks")
        page.wait_for_function("() => transomBlockMap.numFrames >= 20")
        page.screenshot(path=PICTURE)
        browser.close()
    Image.open(PICTURE).convert("RGB").quantize(32, dither=Image.Dither.NONE).save(PICTURE, optimize=True)
    print(f"{PICTURE.name}: {PICTURE.stat().st_size} bytes")


@contextlib.contextmanager
def traffic(url: str) -> Iterator[None]:
    """Conversations that take turns, until the caller leaves."""
    ended = threading.Event()
    threads = [threading.Thread(target=converse, args=(url, index, ended)) for index in range(NUM_SESSIONS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def converse(url: str, index: int, ended: threading.Event) -> None:
    """One user: a long system prompt that all share, and questions that come back with the whole conversation."""
    system = "You are a patient guide who answers in short sentences. " * 12
    while not ended.is_set():
        messages: list[dict[str, str]] = [{"role": "system", "content": system}]
        for turn in range(6):
            question = f"Question {turn} of traveller {index}: what should I see along river number {turn * 7 + index}, and why? "
            messages.append({"role": "user", "content": question * 4})
            body = {"model": "smollm2", "messages": messages, "max_tokens": TURN_TOKENS, "temperature": 0.8}
            response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300.0)
            if ended.is_set() or response.status_code != 200:
                return
            messages.append({"role": "assistant", "content": response.json()["choices"][0]["message"]["content"]})
            ended.wait(0.5 * index)


if __name__ == "__main__":
    main()
