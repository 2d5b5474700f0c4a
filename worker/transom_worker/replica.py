"""One worker as a Ray Serve replica: an engine on its thread, and one message stream per router.

After each step, the engine's thread wakes the event loop once and hands it all of the step's events. The loop groups them by router
and puts each group into that router's outbox (`router_outbox`), so a step costs a router at most one message. The stream also
carries the worker's load and the changes of its prefix index; each router keeps a mirror of that index.
"""

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import asdict
from typing import Any, TypeVar

from transom_core.client_queue import Sharer
from transom_core.config import EngineConfig
from transom_core.contract import (
    Adapter,
    ErrorInfo,
    KvGroupInfo,
    OutputEvent,
    PauseMode,
    PrefixSource,
    Request,
    WorkerInfo,
    WorkerLoad,
    WorkerMessage,
)
from transom_core.contract.kv_transfer import BlockRange, PrefixOffer, PrefixQuery
from transom_core.contract.prefix_peers import Bytes, PrefixPeers
from transom_core.contract.worker import MAX_CALL_MESSAGES
from transom_core.errors import EngineDead, TransomError
from transom_core.logs import show_logs
from transom_core.machine.cores import keep_to_share
from transom_core.machine.host_memory import freeze_objects, keep_returning_freed_memory
from transom_core.machine.openmp import call_on_thread
from transom_worker.engine.engine import Engine
from transom_worker.engine.engine_thread import EngineThread
from transom_worker.engine.router_outbox import SILENT_ROUTER_S, RouterOutbox
from transom_worker.engine.startup import build_engine
from transom_worker.engine.transfer.fetches import PrefixFetches
from transom_worker.engine.transfer.handovers import Handovers
from transom_worker.engine.transfer.served_exports import PrefixExports
from transom_worker.scheduling.request_validation import ids_in_use
from transom_worker.telemetry.blockmap.block_map import BlockMap
from transom_worker.telemetry.blockmap.encoder import WorkerIdentity

logger = logging.getLogger("transom.worker")

T = TypeVar("T")

LAST_EVENTS_S = 1.0  # time for the event loop to send error events before a hung process exits
MAX_REPLACED = 8  # identities of earlier weights that routers are told
QUIET_POLL_S = 0.02  # between two looks at whether a pause has come into effect
HUNG_EXIT_CODE = 70  # EX_SOFTWARE of sysexits.h: an internal error


class WorkerReplica:
    """One worker.

    Routers call the public methods, which run on Serve's event loop. The constructor runs before that loop exists. The engine's
    thread calls `_deliver` once per step.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_name: str = "",
        worker: str = "0",
        *,
        engine: Engine | None = None,
        peers: PrefixPeers | None = None,
        node: str = "",
        ends_process: bool = False,
    ) -> None:
        """Build the engine that `config` describes, unless `engine` is given, and start its thread.

        `peers` are the other workers, from which this one fetches prefixes, and `node` names its host. With `ends_process`, this
        process exits if the engine hangs, because a thread that hangs cannot be ended in any other way.
        """
        show_logs(config.log_format, f"worker/{worker}")
        keep_returning_freed_memory()
        begin_s, self._loaded_at_s = time.perf_counter(), time.time()
        self._replaced: tuple[str, ...] = ()
        if config.ranks.size == 1:  # several ranks divide the cores among themselves
            keep_to_share(config.core_share)
        self.engine = engine or call_on_thread(lambda: build_engine(config, model_name=model_name, worker=worker))
        freeze_objects()
        self._start_s = time.perf_counter() - begin_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._worker, self._node = worker, node
        self._load = WorkerLoad(max_num_seqs=self.engine.config.scheduler.max_num_seqs)
        self._outboxes: dict[str, RouterOutbox] = {}  # router id -> outbox, while the router's stream is open
        self._routers: dict[str, str] = {}  # request id -> router id
        self._paused: dict[str, asyncio.TimerHandle] = {}  # router id -> the end of its stream, unless it is resumed
        on_hang = _end_process if ends_process else lambda: None
        self._thread = EngineThread(self.engine, self._deliver, on_hang=on_hang, ends_process=ends_process)
        self.block_map = BlockMap(
            WorkerIdentity(worker, model_name or config.model.model, self.engine.info.identity),
            self.engine.scheduler,
            self.engine.block_map_log,
            self._on_engine,
        )
        self._handovers: Handovers | None = None
        # Both sides of KV transfer. Prefixes are fetched, if there is a host tier, from workers that `peers` reaches.
        self.exports: PrefixExports | None = None
        self.fetches: PrefixFetches | None = None
        store, transfers = self.engine.transfer_store, self.engine.metrics.transfers
        if store is not None:
            self.exports = PrefixExports(store, self._on_engine, config.transfer, transfers)
            if config.transfer.is_on and peers is not None:
                self._handovers = Handovers(
                    worker, node, peers, store, self.exports, config.transfer, is_here=self._routers.__contains__
                )
            if config.transfer.is_on and peers is not None and self.engine.scheduler.cache.tiers.host.exists:
                on_end = self._thread.stop_holding
                self.fetches = PrefixFetches(
                    peers, store, self._on_engine, config.transfer, on_end=on_end, observer=transfers
                )
        logger.info("Worker %s is ready after %.1f s.", worker, self._start_s)

    @property
    def num_requests(self) -> int:
        """Return the number of requests that routers have at this worker."""
        return len(self._routers)

    async def open_stream(self, router_id: str, *, resumes: bool = False) -> AsyncGenerator[WorkerMessage, None]:
        """Stream the events of this router's requests, the prefix index's changes and the load; `router_outbox` says when it sends.

        The first message has the whole prefix index. If a router opens a second stream, its first one ends, and so does the stream
        of a router that calls `abort` no longer. When a stream ends, the worker aborts the router's requests.

        After `MAX_CALL_MESSAGES` messages the call ends and the stream pauses: a call with `resumes` continues it with the next
        message. It ends at once if there is no such stream.
        """
        self._loop = asyncio.get_running_loop()
        if (timer := self._paused.pop(router_id, None)) is not None:
            timer.cancel()
        elif resumes:
            return
        older = self._outboxes.get(router_id)
        if resumes and older is not None:
            outbox = older
        else:
            outbox = self._outboxes[router_id] = RouterOutbox()
            if older is not None:
                older.close()
            self._send_index(outbox)
        is_paused = False
        try:
            for _ in range(MAX_CALL_MESSAGES):
                if (message := await outbox.receive()) is None:
                    break
                yield message
            else:
                is_paused = self._outboxes.get(router_id) is outbox
        finally:
            if is_paused:
                self._paused[router_id] = self._loop.call_later(SILENT_ROUTER_S, self._end_stream, router_id, outbox)
            else:
                self._end_stream(router_id, outbox)

    async def resync(self, router_id: str) -> None:
        """Send the whole prefix index to this router again."""
        if (outbox := self._outboxes.get(router_id)) is not None:
            self._send_index(outbox)

    async def submit(self, router_id: str, requests: list[Request]) -> list[ErrorInfo | None]:
        """Admit all requests or none. Return one entry per request: its error, or None if admission found nothing wrong.

        The requests' events come on the router's stream, which must be open.
        """
        if router_id not in self._outboxes:
            return [ErrorInfo.of(EngineDead("The router's event stream is not open; open it and try again."))] * len(
                requests
            )
        request_ids = [request.request_id for request in requests]
        # The scheduler checks this too; here it keeps `_routers` from losing the router of a running request with the same id.
        if any(errors := ids_in_use(requests, self._routers)):
            return [None if error is None else ErrorInfo.of(error) for error in errors]
        for request_id in request_ids:
            self._routers[request_id] = router_id  # before admission: the first events may come before its result
        held = {} if self.fetches is None else self.fetches.wanted_by(requests, self._worker)
        results_to_come = self._thread.submit(requests, held=held.keys())
        if self._handovers is not None:
            self._handovers.start(requests)  # before a step, which may compute the whole prompt
        try:
            results = await asyncio.wrap_future(results_to_come)
        except asyncio.CancelledError:  # the router no longer waits
            await self.abort(router_id, request_ids)
            raise
        if any(results):
            for request_id in request_ids:
                self._routers.pop(request_id, None)
        elif router_id not in self._outboxes:  # the router left while its requests were admitted
            await self.abort(router_id, request_ids)
        else:
            for request_id, request in held.items():
                if self.fetches is not None and request_id in self._routers:
                    self.fetches.start(request)
        return results

    async def abort(self, router_id: str, request_ids: list[str]) -> None:
        """Drop requests of this router, and free their blocks before the next step; without any, hear that the router is there."""
        if (outbox := self._outboxes.get(router_id)) is not None:
            outbox.hear()
        self._drop([request_id for request_id in request_ids if self._routers.get(request_id) == router_id])

    async def info(self) -> WorkerInfo:
        """Return this worker's identity and limits. Raises if the step loop has ended, because the worker is lost then."""
        self.check_health()
        info = self.engine.info
        return WorkerInfo(
            worker=self._worker,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            cache=self.engine.scheduler.cache.shape,
            tokenizer=self.engine.tokenizer.digest,
            loaded_at_s=self._loaded_at_s,
            replaced=self._replaced,
            kv_groups=tuple(
                KvGroupInfo(name=group.name, dtype=group.dtype, bytes_per_token=group.bytes_per_token)
                for group in info.plan.groups
            ),
            role=self.engine.config.role,
            node=self._node,
            block_bytes=info.block_bytes,
            can_fetch=self.fetches is not None,
            kv_policy_obstacle=self.engine.scheduler.kv_policy_obstacle,
            device=info.memory.device,
            num_ranks=self.engine.config.ranks.size,
            weight_bytes=info.memory.weight_bytes,
            kv_bytes=info.memory.kv_bytes,
            hidden_size=info.hidden_size,
            start_s=self._start_s,
            report=self.engine.report,
        )

    async def pause(self, mode: PauseMode | None) -> None:
        """Pause the engine, and return when it computes nothing any more; None ends a pause."""
        await self._on_engine(lambda: self.engine.pause(mode))
        while not await self._on_engine(lambda: self.engine.is_quiet or self.engine.pause_mode is None):
            await asyncio.sleep(QUIET_POLL_S)

    async def update_weights(self, model: str) -> ErrorInfo | None:
        """Replace the weights of the paused engine (`Engine.update_weights`), and tell the routers; return why that was refused."""
        begin_s = time.time()
        try:
            await self._on_engine(lambda: self.engine.update_weights(model))
        except TransomError as error:
            return ErrorInfo.of(error)
        self._loaded_at_s = begin_s
        self._replaced = (*self._replaced, self.block_map.identity.identity)[-MAX_REPLACED:]
        self.block_map.identity = self.block_map.identity._replace(identity=self.engine.info.identity)
        for outbox in self._outboxes.values():
            outbox.put(WorkerMessage(identity=self.engine.info.identity))
            self._send_index(outbox)
        return None

    async def load_adapter(self, adapter: Adapter) -> ErrorInfo | None:
        """Load a LoRA adapter into a slot, as the first request for it would; return why that failed."""
        try:
            await asyncio.wrap_future(await self._on_engine(lambda: self.engine.load_adapter(adapter)))
        except TransomError as error:
            return ErrorInfo.of(error)
        return None

    async def open_export(self, query: PrefixQuery) -> PrefixOffer | str:
        """Return what this worker offers of the prefix that another worker asks for, or why it offers nothing."""
        return "refused" if self.exports is None else await self.exports.open(query)

    async def own_query(self, query: PrefixQuery) -> PrefixQuery | None:
        """Return a query for a prompt that another worker computes, as this worker asks it; None if this worker would not."""
        return None if self.fetches is None else self.fetches.own_query(query)

    async def fetch_early(self, source: PrefixSource, query: PrefixQuery, offer: PrefixOffer, sharer: Sharer) -> bool:
        """Fetch what another worker offers of a prompt that this worker will continue; return whether it is here then."""
        return self.fetches is not None and await self.fetches.fetch_early(source, query, offer, sharer)

    async def measure_fetch(self, source: str, num_bytes: int, wire: str) -> dict[str, Any]:
        """Fetch about `num_bytes` of any cached blocks from another worker, drop them, and return the report's fields."""
        if self.fetches is None:
            raise ValueError("This worker has no host tier to fetch into.")
        place = PrefixSource(worker=source, num_tokens=0)
        return asdict(await self.fetches.measure(place, num_bytes, by_calls=wire == "ray"))

    async def read_export(self, export_id: str, blocks: BlockRange) -> list[Bytes]:
        """Return blocks of an export, which another worker reads."""
        if self.exports is None:
            raise KeyError(export_id)
        return await self.exports.read(export_id, blocks)

    async def close_export(self, export_id: str, read_bytes: int) -> bool:
        """Close an export that another worker no longer needs, and return whether it was open; `read_bytes` of it were read out of
        this worker's memory."""
        return self.exports is not None and self.exports.close(export_id, read_bytes)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load for Ray Serve's autoscaler, by the fields of `WorkerLoad`. Serve calls the method by this name."""
        return {name: value for name, value in asdict(self._load).items() if not isinstance(value, dict)}

    async def metrics_text(self, *, openmetrics: bool = False) -> str:
        """Return this worker's metrics in Prometheus' text format, or in the OpenMetrics format, which has exemplars."""
        return self.engine.metrics.text(openmetrics=openmetrics).decode()

    async def request_timeline(self, request_id: str) -> list[dict[str, Any]]:
        """Return the timeline events of a response's requests at this worker, as JSON values; empty if the worker does not know
        (or no longer knows) the requests."""
        return self.engine.timelines.events_of(request_id)

    async def watch_blocks(self, router_id: str, period_s: float) -> AsyncIterator[bytes]:
        """Stream frames of the live block map while the router's event stream is open; the first one has all blocks.
        docs/block_map.md has the format. The call ends after `MAX_CALL_MESSAGES` frames."""
        async with contextlib.aclosing(self.block_map.watch(period_s)) as frames:
            num_frames = 0
            async for frame in frames:
                if router_id not in self._outboxes:
                    return  # the router was killed: Ray reads on, and its watchers would use up the places of others
                yield frame
                num_frames += 1
                if num_frames == MAX_CALL_MESSAGES:
                    return

    async def describe_block(self, group: int, block: int, tier: str = "device") -> dict[str, Any]:
        """Describe the present state of one block of a tier ("device" or "host") as JSON values; only `error` is set if there is
        no such block."""
        return await self.block_map.describe(group, block, tier)

    def check_health(self) -> None:
        """Raise if the step loop has ended, so that Serve replaces this replica."""
        if self._thread.dead is not None:
            # A new exception each time: Python adds to the traceback of one that is raised again.
            raise EngineDead(f"The engine's step loop has ended: {self._thread.dead!r}") from self._thread.dead

    async def stop(self) -> None:
        """Shut down, and return when that is done: a disk tier then has what was cached, and the process may end."""
        await asyncio.to_thread(self.shutdown)

    def shutdown(self) -> None:
        """End the engine's thread and the engine; requests that still run get an error event. Idempotent."""
        self._thread.shutdown()

    def __del__(self) -> None:
        if hasattr(self, "_thread"):
            self.shutdown()

    def _on_engine(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Run a function on the engine's thread; it runs whether or not the result is awaited."""
        return asyncio.wrap_future(self._thread.call(function))

    def _end_stream(self, router_id: str, outbox: RouterOutbox) -> None:
        """Abort the router's requests, unless a newer stream has replaced the one with this outbox."""
        if self._outboxes.get(router_id) is outbox:
            del self._outboxes[router_id]
            self._paused.pop(router_id, None)
            self._drop([request_id for request_id, owner in self._routers.items() if owner == router_id])

    def _drop(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            del self._routers[request_id]
            self._end_fetch(request_id)
        if request_ids:
            self._thread.abort(request_ids)

    def _end_fetch(self, request_id: str) -> None:
        if self.fetches is not None:
            self.fetches.cancel(request_id)

    def _send_index(self, outbox: RouterOutbox) -> None:
        loop = asyncio.get_running_loop()
        self._thread.send_index(lambda message: _call_on(loop, outbox.put, message))

    def _deliver(self, message: WorkerMessage) -> None:
        """Hand a step's message to the event loop. Runs on the engine's thread, once per step."""
        self._load = message.load or self._load
        if self._loop is not None:
            _call_on(self._loop, self._dispatch, message)

    def _dispatch(self, message: WorkerMessage) -> None:
        """Put each router's part of a message into its outbox: its requests' events, and the ids of those just admitted."""
        taken: dict[str, list[str]] = {}
        for request_id in message.taken:
            taken.setdefault(self._routers.get(request_id, ""), []).append(request_id)
        events: dict[str, list[OutputEvent]] = {}
        for event in message.events:
            router_id = self._routers.get(event.request_id)
            if router_id is None:
                continue  # the request was aborted meanwhile
            events.setdefault(router_id, []).append(event)
            if event.finish_reason is not None or event.is_handover:
                del self._routers[event.request_id]
                self._end_fetch(event.request_id)
        for router_id, outbox in self._outboxes.items():
            its_events, its_taken = tuple(events.get(router_id, ())), tuple(taken.get(router_id, ()))
            outbox.put(WorkerMessage(events=its_events, kv=message.kv, load=message.load, taken=its_taken))


def _call_on(
    loop: asyncio.AbstractEventLoop, function: Callable[[WorkerMessage], None], message: WorkerMessage
) -> None:
    """Call a function on the event loop, in order with earlier calls; do nothing if the loop is closed."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(function, message)


def _end_process() -> None:
    """End this process after its event loop has had time to send the error events of its requests."""
    threading.Event().wait(LAST_EVENTS_S)
    os._exit(HUNG_EXIT_CODE)
