"""A worker without a model: every running request gets one token per step, and steps come at a fixed pace.

It takes the place of `transom_worker.replica.WorkerReplica` in `token_path.py`, so that only the token path is measured.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from transom_core.contract import ErrorInfo, OutputEvent, Request, Usage

STEP_S = 0.05


class PacedWorker:
    """The worker's Serve methods. The first token comes at once, the others every `STEP_S`."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[list[OutputEvent]] = asyncio.Queue()
        self._running: dict[str, tuple[Request, int]] = {}
        self._stepper: asyncio.Task[None] | None = None

    async def open_stream(self, router_id: str) -> AsyncIterator[list[OutputEvent]]:
        """One list of events per step."""
        self._stepper = self._stepper or asyncio.create_task(self._step_for_ever())
        yield []
        while True:
            yield await self._queue.get()

    async def submit(self, router_id: str, requests: list[Request]) -> list[ErrorInfo | None]:
        """Everything is admitted."""
        self._queue.put_nowait([self._token(request, 0) for request in requests])
        return [None] * len(requests)

    async def abort(self, router_id: str, request_ids: list[str]) -> None:
        """Forget requests."""
        for request_id in request_ids:
            self._running.pop(request_id, None)

    async def info(self) -> dict[str, Any]:
        """What a router needs to know."""
        return {
            "max_model_len": 8192,
            "vocab_size": 49152,
            "device": "none",
            "weight_bytes": 0,
            "kv_bytes": 0,
            "groups": [],
        }

    async def metrics_text(self, *, openmetrics: bool = False) -> str:
        """Nothing to tell."""
        return ""

    async def _step_for_ever(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            if self._running:
                self._queue.put_nowait([self._token(request, n) for request, n in list(self._running.values())])

    def _token(self, request: Request, position: int) -> OutputEvent:
        is_last = position + 1 >= (request.params.max_tokens or 1)
        if is_last:
            self._running.pop(request.request_id, None)
        else:
            self._running[request.request_id] = (request, position + 1)
        usage = Usage(num_prompt_tokens=request.num_prompt_tokens, num_output_tokens=position + 1, num_cached_tokens=0)
        return OutputEvent(
            request_id=request.request_id,
            position=position,
            token_ids=(260 + position % 1000,),
            text=" word",
            text_offset=5 * position,
            finish_reason="length" if is_last else None,
            usage=usage if is_last or position == 0 else None,
        )
