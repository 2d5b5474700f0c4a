"""`ByteBudget`: bounds how many bytes a worker's fetches have in flight at once, on all wires together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from transom_core.client_queue import NO_CLIENT, ClientQueue, Sharer


class _Wanted(NamedTuple):
    """Bytes that a caller waits for; `turn` is done when it has them."""

    sharer: Sharer
    num_bytes: int
    turn: asyncio.Future[None]


class ByteBudget:
    """Clients take turns by bytes. A caller that asks for more than the limit takes the whole limit: it waits until no other caller
    holds any bytes, and its client is charged for all that it asked for."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._waiting: ClientQueue[_Wanted] = ClientQueue()
        self.used_bytes = 0

    async def take(self, num_bytes: int, sharer: Sharer = NO_CLIENT) -> Callable[[], None]:
        """Wait for `num_bytes` of the budget, and return a function that gives them back."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        wanted = _Wanted(sharer, num_bytes, turn)
        self._waiting.add(sharer.client, wanted)
        self._admit()
        try:
            await turn
        except BaseException:
            self._waiting.remove(sharer.client, wanted)
            if turn.cancelled():
                self._admit()
            else:  # the bytes were granted, but the caller was cancelled right after
                self._give_back(num_bytes)
            raise
        return partial(self._give_back, num_bytes)

    def _give_back(self, num_bytes: int) -> None:
        self.used_bytes -= min(num_bytes, self._limit_bytes)
        self._admit()

    def _admit(self) -> None:
        """Grant bytes to the callers that wait, by turns, until the first one that does not fit."""
        while (wanted := self._waiting.first) is not None:
            if wanted.turn.cancelled():  # its caller removes it in `take` and calls `_admit` again
                return
            held_bytes = min(wanted.num_bytes, self._limit_bytes)
            if self.used_bytes + held_bytes > self._limit_bytes:
                return
            self._waiting.take()
            self._waiting.charge(wanted.sharer.client, wanted.num_bytes / wanted.sharer.weight)
            self.used_bytes += held_bytes
            wanted.turn.set_result(None)
