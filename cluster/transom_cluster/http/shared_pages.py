"""`SharedPages`: collects each metrics page about once a second, however many clients ask for it.

A page takes a few milliseconds in each process that it covers, and tens of milliseconds in the router, which merges their parts. So
each page has a token bucket: a collection takes a token, and every second adds one. Without a token, callers get the page of the
last collection, which is at most a second old. Callers that come while a collection runs wait for its page.

Example: Prometheus asks every 15 s and always gets a new page. At a steady 35 requests per second, one per second collects a page.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any

from transom_cluster.http.client_limits import TokenBucket
from transom_cluster.router.background_tasks import BackgroundTasks

COLLECTIONS_PER_S = 1.0
MAX_BURST = 5.0  # after an idle time, up to this number of collections of a page may follow without a pause


@dataclass(slots=True)
class _Page(TokenBucket):
    """One page's bucket, and the task of its running or last collection."""

    task: asyncio.Task[str] | None = None


class SharedPages:
    """Keeps the last page for each key, which names the page's processes and format. All calls come from one event loop."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tasks = BackgroundTasks()
        self._pages: dict[Hashable, _Page] = {}

    def __len__(self) -> int:
        return len(self._pages)

    async def get(self, key: Hashable, collect: Callable[[], Coroutine[Any, Any, str]]) -> str:
        """Return the page; `collect` makes it if it is time for a new one. If that raises, callers get the error instead."""
        now_s = self._clock()
        self._forget_full(now_s)
        page = self._pages.setdefault(key, _Page(MAX_BURST, COLLECTIONS_PER_S, now_s))
        page.refill(now_s)
        if page.task is None or (page.task.done() and page.left >= 1):
            page.left -= 1
            page.task = self._tasks.spawn(collect())
        return await asyncio.shield(page.task)  # the collection continues if this caller leaves

    def _forget_full(self, now_s: float) -> None:
        """Forget pages whose buckets are full again: no client has asked for them for some seconds."""
        for key, page in list(self._pages.items()):
            page.refill(now_s)
            if page.left >= MAX_BURST and (page.task is None or page.task.done()):
                del self._pages[key]
