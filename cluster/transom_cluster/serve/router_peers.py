"""`ServeRouterPeers`: sends queries to the other replicas of Ray Serve's router deployment."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from transom_cluster.router.peers import PeerQuery, QueriedRouter

logger = logging.getLogger("transom.router")

T = TypeVar("T")


class ServeRouterPeers:
    """Implements `RouterPeers`. A query goes to all running replicas, including this one, whose answer is dropped.

    `find_handle` returns Serve's handle of the router deployment. It may block, so it is called once, on another thread.
    """

    def __init__(self, router_id: str, find_handle: Callable[[], Any]) -> None:
        self._router_id = router_id
        self._find_handle = find_handle
        self._handle: Any = None

    async def ask_others(self, query: PeerQuery[T], *, timeout_s: float) -> list[T | BaseException]:
        """Send a query to every other router, as `RouterPeers` says. If one router is late, Serve returns no results at all; the
        result is then one TimeoutError for all routers."""
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        try:
            async with asyncio.timeout_at(deadline_s):
                if self._handle is None:
                    self._handle = await asyncio.to_thread(self._find_handle)
            response = self._handle.broadcast("answer_peer", self._router_id, query)
            left_s = max(0.0, deadline_s - asyncio.get_running_loop().time())
            results = await response.results_async(timeout_s=left_s, return_exceptions=True)
        except TimeoutError as late:
            return [late]
        except Exception as error:  # Serve is starting or stopping, so that it knows no replica
            logger.info("The other routers did not get the query %s: %r", getattr(query, "func", query).__name__, error)
            return []
        answers = [("", result) if isinstance(result, BaseException) else result for result in results]
        return [answer for router_id, answer in answers if router_id != self._router_id]


def answer_peer(router: QueriedRouter, asker_id: str, query: PeerQuery[T]) -> tuple[str, T | None]:
    """Answer a query that the router `asker_id` sent: return this router's id and its answer, or None to its own query."""
    return router.router_id, None if asker_id == router.router_id else query(router)
