"""`ByteBudget`: bounds how many bytes of all transfers of a worker are on their way at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator


class ByteBudget:
    """Callers get bytes in the order in which they asked. A caller that asks for more than the limit waits until no other holds
    any."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.used_bytes = 0

    @contextlib.asynccontextmanager
    async def taken(self, num_bytes: int) -> AsyncIterator[None]:
        """Hold `num_bytes` of the budget while the context is open."""
        num_bytes = min(num_bytes, self._limit_bytes)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_bytes, turn))
        self._admit()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self.used_bytes -= num_bytes
            else:
                self._waiting.remove((num_bytes, turn))
            self._admit()

    def _admit(self) -> None:
        while self._waiting:
            num_bytes, turn = self._waiting[0]
            if turn.cancelled():  # its caller removes it
                return
            if self.used_bytes + num_bytes > self._limit_bytes:
                return
            self._waiting.popleft()
            self.used_bytes += num_bytes
            turn.set_result(None)
