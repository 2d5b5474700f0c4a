"""`SharedPages`: collects each metrics page about once a second, however many clients ask for it.

Making a page takes a few milliseconds in every process, and some tens in the router that merges them. So each page has a token
bucket: a collection takes a token, and every second adds one. Without a token, callers get the page of the last collection, which
is at most a second old. Callers that come while a collection runs wait for its page.

Example: Prometheus asks every 15 s and always gets a new page. Of 35 requests in a second, one starts a collection.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any

from transom_cluster.http.client_limits import TokenBucket
from transom_cluster.router.background_tasks import BackgroundTasks

COLLECTIONS_PER_S = 1.0
MAX_BURST = 5.0  # how many collections of a page may follow each other at once after an idle time


@dataclass(slots=True)
class _Page(TokenBucket):
    """One page's bucket, and the task of its running or last collection."""

    task: asyncio.Task[str] | None = None


class SharedPages:
    """The last pages, by a key for the processes and the format. All calls come from one event loop."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tasks = BackgroundTasks()
        self._pages: dict[Hashable, _Page] = {}

    def __len__(self) -> int:
        return len(self._pages)

    async def get(self, key: Hashable, collect: Callable[[], Coroutine[Any, Any, str]]) -> str:
        """Return the page. If it is time for a new one, `collect` makes it. An error of `collect` stands for its page."""
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
