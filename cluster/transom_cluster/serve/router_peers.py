"""The other routers as replicas of Ray Serve's router deployment."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("transom.router")


class ServeRouterPeers:
    """Implements `RouterPeers`: asks all running replicas at once, itself included, and drops its own answer.

    `find_handle` returns Serve's handle of the router deployment. It may block, and is called once, on another thread.
    """

    def __init__(self, router_id: str, find_handle: Callable[[], Any]) -> None:
        self._router_id = router_id
        self._find_handle = find_handle
        self._handle: Any = None

    async def ask_others(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """See `RouterPeers`."""
        give_up_s = asyncio.get_running_loop().time() + timeout_s
        try:
            async with asyncio.timeout_at(give_up_s):
                calls = await self._call_all(method, args)
        except Exception as error:  # Serve is starting, or going away: nobody is known who could be asked
            logger.info("The other routers were not asked for %s: %r", method, error)
            return []
        answers = await asyncio.gather(*(_answer(call, give_up_s) for call in calls))
        return [answer for router_id, answer in answers if router_id != self._router_id]

    async def _call_all(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        """A call to each replica, not waited for.

        Serve's public `results_async` returns all answers or, if one is late, none; so the calls are taken one by one.
        """
        if self._handle is None:
            self._handle = await asyncio.to_thread(self._find_handle)
        response = self._handle.broadcast("answer_peer", self._router_id, method, args)
        calls: list[Any] = await response._fetch_replica_results_async()
        return calls


async def _answer(call: Any, give_up_s: float) -> tuple[str, Any]:
    """Who answered and what; an exception of nobody where none came."""
    try:
        async with asyncio.timeout_at(give_up_s):
            answer: tuple[str, Any] = await call.get_async()
            return answer
    except Exception as error:
        return "", error
