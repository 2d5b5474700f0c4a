"""Replays recorded messages of workers into a router's real worker connections, queue and placer, and measures the CPU time.

A message is pickled before and unpickled by the measured code, as Ray does with what a stream yields. What Ray itself costs for
each message is measured by `stream_messages.py`.
"""

from __future__ import annotations

import asyncio
import gc
import pickle
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transom_cluster.openai.answer.answer_markup import PLAIN
from transom_cluster.router.router import Router
from transom_core.config import ServerConfig
from transom_core.contract import WorkerInfo, WorkerLoad, WorkerMessage
from transom_core.contract.kv_events import KvUpdate


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a replay came to."""

    cpu_s: float
    num_messages: int
    num_without_events: int
    num_bytes: int


class RecordedClient:
    """A `WorkerClient` whose stream has what is put into `messages`."""

    def __init__(self, info: WorkerInfo) -> None:
        self._info = info
        self.messages: asyncio.Queue[bytes] = asyncio.Queue()

    async def open_stream(self, router_id: str) -> AsyncGenerator[WorkerMessage, None]:
        """The stream."""
        while True:
            yield pickle.loads(await self.messages.get())

    async def info(self) -> WorkerInfo:
        """As recorded."""
        return self._info

    async def resync(self, router_id: str) -> None:
        """No update is missing."""
        raise AssertionError


class Directory:
    """A `WorkerDirectory` whose workers neither come nor go."""

    def __init__(self, clients: Mapping[str, Any]) -> None:
        self._clients = clients

    async def changes(self) -> AsyncGenerator[Mapping[str, Any], None]:
        """Once."""
        yield self._clients
        await asyncio.Event().wait()

    def wake(self) -> None:
        """There are workers."""


def replayed_cpu_s(
    infos: dict[str, WorkerInfo], messages: Sequence[tuple[float, str, WorkerMessage]], *, from_s: float
) -> Figures:
    """The CPU time of messages (time, worker, message) from `from_s` on; what comes before is replayed and not measured."""
    return asyncio.run(_replay(infos, messages, from_s))


async def _replay(
    infos: dict[str, WorkerInfo], messages: Sequence[tuple[float, str, WorkerMessage]], from_s: float
) -> Figures:
    clients = {worker_id: RecordedClient(info) for worker_id, info in infos.items()}
    config = ServerConfig(served_model_name="simulated")
    router = Router(
        workers=Directory(clients),
        tokenizer=None,  # type: ignore[arg-type]
        config=config,
        router_id="r",
        answer_markup=PLAIN,
    )
    opened = {worker_id for _, worker_id, message in messages if message.kv is not None and message.kv.whole}
    for worker_id in clients.keys() - opened:
        clients[worker_id].messages.put_nowait(pickle.dumps(OPENING, protocol=5))
    router.start()
    pickled = [(worker_id, pickle.dumps(message, protocol=5)) for _, worker_id, message in messages]
    first = sum(time_s < from_s for time_s, _, _ in messages)
    await _feed(clients, pickled[:first])
    while not all(connection.is_open for connection in router.connections.values()) or not router.connections:
        await asyncio.sleep(0.01)
    gc.collect()
    gc.freeze()  # a router has no millions of recorded digests, over which collections would go
    begin_s = time.process_time()
    await _feed(clients, pickled[first:])
    cpu_s = time.process_time() - begin_s
    gc.unfreeze()
    await router.stop()
    measured = messages[first:]
    return Figures(
        cpu_s=cpu_s,
        num_messages=len(measured),
        num_without_events=sum(not message.events for _, _, message in measured),
        num_bytes=sum(len(data) for _, data in pickled[first:]),
    )


OPENING = WorkerMessage(kv=KvUpdate(after=0, version=0, runs=(), whole=True), load=WorkerLoad(max_num_seqs=64))


async def _feed(clients: dict[str, RecordedClient], pickled: Sequence[tuple[str, bytes]]) -> None:
    """Give each message a turn of the event loop of its own."""
    for worker_id, data in pickled:
        queue = clients[worker_id].messages
        queue.put_nowait(data)
        await asyncio.sleep(0)
        while not queue.empty():
            await asyncio.sleep(0)
