"""`AdapterLoader`: loads and unloads a router's LoRA adapters at run time, and keeps all routers' adapters equal.

A client's request reaches any one of the routers. That router has a worker try a new adapter, and then tells all other routers.
Routers also send each other everything that they know, every `RouterTimings.adapters_period_s`, and a router asks the others when a
request names an adapter that it does not know. So a router that was starting when an adapter was loaded hears of it, too.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial

from transom_cluster.openai.answer.error_responses import HttpError
from transom_cluster.router.adapter_registry import MAX_CHANGES, AdapterChange, AdapterRegistry
from transom_cluster.router.background_tasks import BackgroundTasks
from transom_cluster.router.peers import RouterPeers, exchange_adapters
from transom_cluster.router.timings import RouterTimings
from transom_cluster.router.worker_connection import WorkerConnection
from transom_core.config import ServerConfig
from transom_core.contract import Adapter
from transom_core.errors import ConfigError, Overloaded, RequestError, WorkerLost
from transom_core.model_files.adapter_files import resolve_adapter

ASK_PERIOD_S = 1.0


class AdapterLoader:
    """Changes the adapters of one router. `connections` are its workers, by id. Runs on the router's event loop."""

    def __init__(
        self,
        registry: AdapterRegistry,
        config: ServerConfig,
        peers: RouterPeers,
        connections: Mapping[str, WorkerConnection],
        timings: RouterTimings,
        *,
        wake_workers: Callable[[], None],
    ) -> None:
        """Add the adapters of `--lora-modules` to the registry. Raises ConfigError: one cannot be served."""
        self._registry, self._config, self._peers = registry, config, peers
        self._connections, self._timings = connections, timings
        self._wake_workers = wake_workers
        self._tasks = BackgroundTasks()
        self._asking: asyncio.Task[None] | None = None
        self._asked_s = 0.0
        for name, path in config.lora_modules:
            try:
                registry.merge({name: AdapterChange(0.0, self._find(name, path))})
            except RequestError as error:
                raise ConfigError(f"--lora-modules {name}: {error}") from None

    def start(self) -> None:
        """Begin to exchange changes with the other routers, if this server takes adapters."""
        if self._config.enable_lora:
            self._tasks.spawn(self._exchange_for_ever())

    async def stop(self) -> None:
        """Stop exchanging changes."""
        await self._tasks.cancel()

    async def ask_others(self) -> None:
        """Ask the other routers for their changes, since a request names an adapter that is unknown here; at most once a second."""
        now_s = asyncio.get_running_loop().time()
        if self._asking is None or (self._asking.done() and now_s - self._asked_s > ASK_PERIOD_S):
            self._asked_s, self._asking = now_s, self._tasks.spawn(self._exchange({}))
        await asyncio.wait((self._asking,))

    async def load(self, name: str, path: str, *, in_place: bool) -> None:
        """Load an adapter under a name, at this router and all others, after a worker has tried it. With `in_place` it replaces one
        of this name; requests that run go on with the old one.

        Raises:
            RequestError: the name is taken, or the adapter cannot be served.
            WorkerLost: there is no worker.  Overloaded: all slots of the worker stayed in use.
        """
        self._check_is_on()
        if name in self._config.model_names:
            raise RequestError(f"{name!r} is the model's own name; give the adapter another.", param="lora_name")
        if self._registry.get(name) is not None and not in_place:
            raise RequestError(
                f"The LoRA adapter {name!r} has already been loaded; to replace it, send load_inplace true.",
                param="lora_name",
            )
        if len(self._registry.names) >= MAX_CHANGES and self._registry.get(name) is None:
            raise RequestError(f"There are {MAX_CHANGES} LoRA adapters; unload one first.", param="lora_name")
        adapter = await asyncio.to_thread(self._find, name, path)
        await self._try(adapter)
        await self._change(name, adapter)

    async def unload(self, name: str) -> None:
        """Unload an adapter at this router and all others. Requests that run go on.

        Raises:
            HttpError: no adapter has this name (status 404).
        """
        self._check_is_on()
        if self._registry.get(name) is None:
            raise HttpError(404, f"The LoRA adapter {name!r} cannot be found.", param="lora_name", code="not_found")
        await self._change(name, None)

    def _check_is_on(self) -> None:
        if not self._config.enable_lora:
            raise RequestError("This server takes no LoRA adapters; start it with --enable-lora.")

    def _find(self, name: str, path: str) -> Adapter:
        files = resolve_adapter(path, max_rank=self._config.max_lora_rank)
        return Adapter(name=name, path=files.name, identity=files.identity())

    async def _try(self, adapter: Adapter) -> None:
        """Have the worker with the fewest requests load an adapter."""
        workers = [one for one in self._connections.values() if one.takes_requests]
        if not workers:
            self._wake_workers()
            raise WorkerLost("No worker is ready to load the adapter; try again in a moment.")
        worker = min(workers, key=lambda one: len(one.in_flight))
        try:
            async with asyncio.timeout(self._timings.adapter_trial_s):
                refusal = await worker.client.load_adapter(adapter)
        except TimeoutError:
            raise Overloaded(
                "The worker's slots for adapters stayed in use; try again, or raise --max-loras."
            ) from None
        except Exception as error:
            raise WorkerLost(f"A worker did not answer: {type(error).__name__}.") from error
        if refusal is not None:
            raise refusal.error()

    async def _change(self, name: str, adapter: Adapter | None) -> None:
        """Give a name an adapter, or none, and tell the other routers."""
        before_s = self._registry.changes[name].time_s if name in self._registry.changes else 0.0
        # Later than the change before, even if another host's clock is ahead.
        change = {name: AdapterChange(max(time.time(), before_s + 1e-3), adapter)}
        self._registry.merge(change)
        await self._exchange(change)

    async def _exchange(self, changes: Mapping[str, AdapterChange]) -> None:
        """Tell the other routers of changes, and apply those that they know."""
        query = partial(exchange_adapters, changes=dict(changes))
        for answer in await self._peers.ask_others(query, timeout_s=self._timings.scrape_timeout_s):
            if not isinstance(answer, BaseException):
                self._registry.merge(answer)

    async def _exchange_for_ever(self) -> None:
        while True:
            await self._exchange(self._registry.changes)
            await asyncio.sleep(self._timings.adapters_period_s)
