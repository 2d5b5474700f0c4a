"""The other replicas of Ray Serve's router deployment, as `RouterPeers`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from transom_cluster.router.peers import PeerQuery, QueriedRouter

logger = logging.getLogger("transom.router")

T = TypeVar("T")


class ServeRouterPeers:
    """Implements `RouterPeers`: sends a query to all running replicas, the own one included, and drops the own answer.

    `find_handle` returns Serve's handle of the router deployment. It may block, and is called once, on another thread.
    """

    def __init__(self, router_id: str, find_handle: Callable[[], Any]) -> None:
        self._router_id = router_id
        self._find_handle = find_handle
        self._handle: Any = None

    async def ask_others(self, query: PeerQuery[T], *, timeout_s: float) -> list[T | BaseException]:
        """Send a query to every other router, as `RouterPeers` says."""
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        try:
            async with asyncio.timeout_at(deadline_s):
                calls = await self._call_all(query)
        except Exception as error:  # Serve is starting or stopping: no replica is known
            logger.info("The other routers did not get the query %s: %r", type(query).__name__, error)
            return []
        answers = await asyncio.gather(*(_answer(call, deadline_s) for call in calls))
        return [answer for router_id, answer in answers if router_id != self._router_id]

    async def _call_all(self, query: PeerQuery[Any]) -> list[Any]:
        """Call each replica, and return the calls without waiting for their results.

        Serve's public `results_async` returns all results or, if one is late, none. So this class waits for each call by itself.
        """
        if self._handle is None:
            self._handle = await asyncio.to_thread(self._find_handle)
        response = self._handle.broadcast("answer_peer", self._router_id, query)
        calls: list[Any] = await response._fetch_replica_results_async()
        return calls


def answer_peer(router: QueriedRouter, asker_id: str, query: PeerQuery[T]) -> tuple[str, T | None]:
    """Answer a query that the router `asker_id` sent: this router's id and its answer; None instead of an answer to itself."""
    return router.router_id, None if asker_id == router.router_id else query.answer(router)


async def _answer(call: Any, deadline_s: float) -> tuple[str, Any]:
    """The id of the replica that answered, and its answer; an empty id and the exception where no answer came in time."""
    try:
        async with asyncio.timeout_at(deadline_s):
            answer: tuple[str, Any] = await call.get_async()
            return answer
    except Exception as error:
        return "", error
