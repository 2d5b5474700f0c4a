"""The union of several Prometheus pages: each family once, with the samples of every page."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence

from transom_cluster.metrics import RouterMetrics
from transom_cluster.worker_client import WorkerClient

logger = logging.getLogger("transom.router")

SCRAPE_TIMEOUT_S = 2.0


async def collect_page(metrics: RouterMetrics, clients: Sequence[WorkerClient]) -> str:
    """This router's metrics and those of all workers that answer in time; the others are dropped and counted."""
    results = await asyncio.gather(*(_scrape(client) for client in clients))
    pages = [page for page in results if page is not None]
    metrics.dropped_scrapes.inc(len(results) - len(pages))
    return merge_pages([metrics.text(), *pages])


def merge_pages(pages: Iterable[str]) -> str:
    """Pages in the text format as one valid page: a family's lines have to stand together."""
    families: dict[str, tuple[list[str], list[str]]] = {}  # name -> its comment lines, its samples
    for page in pages:
        name, is_new = "", True
        for line in page.splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                is_new = name not in families
            if not line or line == "# EOF":
                continue
            comments, samples = families.setdefault(name, ([], []))
            if not line.startswith("#"):
                samples.append(line)
            elif is_new:
                comments.append(line)
    return "".join(line + "\n" for lines in families.values() for part in lines for line in part)


async def _scrape(client: WorkerClient) -> str | None:
    try:
        return await asyncio.wait_for(client.metrics_text(), SCRAPE_TIMEOUT_S)
    except Exception as error:
        logger.info("A worker's metrics were left out: %r", error)
        return None
