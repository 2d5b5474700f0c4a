"""`Router`: takes tokenised requests, has workers compute them, and streams their output. It depends on neither Ray nor HTTP.

    router.start()
    async with router.generate(requests, events) as output:   # for each HTTP request
        while output.num_unfinished: await output.next()      # events of its choices
    await router.stop()

The router owns these parts, and the HTTP routes use them directly:

- `connections`: a `WorkerConnection` for each worker, kept by the `WorkerPool`;
- `queue`: the requests that no worker has, and the rule that gives them to workers;
- `adapters`: the LoRA adapters that requests may choose by name; `adapter_loader` changes them;
- `limits`: the model's limits, as workers reported them;
- `peers`: the other routers of the application;
- `metrics`, `timelines`, `tracing`: the router's telemetry.
"""

import asyncio
import contextlib
import logging
import math
import re
from collections.abc import AsyncIterator, Sequence
from zlib import crc32

from transom_cluster.openai.answer.answer_markup import AnswerMarkup
from transom_cluster.openai.answer.error_responses import HttpError
from transom_cluster.router.adapter_loader import AdapterLoader
from transom_cluster.router.adapter_registry import AdapterRegistry
from transom_cluster.router.eligibility import by_identity
from transom_cluster.router.in_flight_requests import InFlightRequest
from transom_cluster.router.model_limits import ModelLimitsTracker
from transom_cluster.router.output_stream import OutputStream
from transom_cluster.router.peers import NoPeers, RouterPeers
from transom_cluster.router.request_queue import RequestQueue
from transom_cluster.router.timings import RouterTimings
from transom_cluster.router.worker_client import WorkerDirectory
from transom_cluster.router.worker_connection import WorkerConnection
from transom_cluster.router.worker_events import WorkerEvents
from transom_cluster.router.worker_pool import WorkerPool
from transom_cluster.routing.autoscaling import wanted_replicas
from transom_cluster.routing.placer import Placer
from transom_cluster.telemetry.request_events import Arrived, Ended, RequestEvents
from transom_cluster.telemetry.request_timeline import RequestTimeline, RequestTimelines
from transom_cluster.telemetry.router_metrics import RouterMetrics
from transom_cluster.telemetry.router_state import RouterState
from transom_cluster.telemetry.router_tracing import RouterTracing
from transom_core.config import AutoscalingConfig, ServerConfig
from transom_core.contract import Request
from transom_core.contract.kv_policy import kv_policy_from_json
from transom_core.errors import WorkerLost
from transom_core.grammar import GrammarChecker
from transom_core.text.tokenizer import Tokenizer

logger = logging.getLogger("transom.router")

# with `--serve-claude-names`: up to 100 characters, since answers repeat it
_CLAUDE_NAME = re.compile(r"claude-.{1,93}")
MAX_NAMES = 20  # of models and adapters in an error
_STOPPING = "This router is being stopped; send the request again."


class Router:
    """One router. `start` and `stop` run on the event loop that serves HTTP.

    Without `placer` or `tracing`, the router makes them from `config`.
    """

    def __init__(
        self,
        *,
        workers: WorkerDirectory,
        tokenizer: Tokenizer,
        config: ServerConfig,
        router_id: str,
        engine_seed: int | None = None,
        timings: RouterTimings | None = None,
        placer: Placer | None = None,
        peers: RouterPeers | None = None,
        autoscaling: AutoscalingConfig | None = None,
        tracing: RouterTracing | None = None,
        grammar_checker: GrammarChecker | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.grammar_checker = grammar_checker or GrammarChecker(tokenizer)
        self.config = config
        self.timings = timings or RouterTimings()
        self.answer_markup = AnswerMarkup.choose(
            tokenizer,
            tool_parser=config.tool_call_parser,
            reasoning_parser=config.reasoning_parser,
            auto_tool_choice=config.enable_auto_tool_choice,
        )
        logger.info("Answers are read with %s.", self.answer_markup.description)
        self.engine_seed = engine_seed
        self.kv_policy = None if config.kv_policy is None else kv_policy_from_json(config.kv_policy)
        self.router_id = router_id
        self.peers = peers or NoPeers()
        self.metrics = RouterMetrics(
            router_id,
            model=config.served_model_name,
            tool_parser=self.answer_markup.tool_parser,
            state=self.state,
            compat=config.metrics_compat,
        )
        self.timelines = RequestTimelines(router_id)
        self.tracing = tracing
        if tracing is None and config.tracing is not None:
            self.tracing = RouterTracing.from_config(config.tracing, router_id, model=config.served_model_name)
        self.limits = ModelLimitsTracker(wake_workers=workers.wake)
        self.connections: dict[str, WorkerConnection] = {}
        self.adapters = AdapterRegistry()
        self.adapter_loader = AdapterLoader(
            self.adapters, config, self.peers, self.connections, self.timings, wake_workers=workers.wake
        )
        self.is_draining = False
        placer = placer or Placer(config.routing_policy, seed=crc32(router_id.encode()), observer=self.metrics.routing)
        self.placer = placer
        self.queue = RequestQueue(
            self.connections,
            placer,
            config.failover,
            policy=config.priorities.policy,
            wake_workers=workers.wake,
            timings=self.timings,
        )
        events = WorkerEvents(
            connections=self.connections,
            queue=self.queue,
            placer=placer,
            config=config.failover,
            metrics=self.metrics,
            limits=self.limits,
            timings=self.timings,
        )
        self._pool = WorkerPool(
            directory=workers,
            router_id=router_id,
            connections=self.connections,
            events=events,
            metrics=self.metrics,
            timings=self.timings,
            tokenizer=tokenizer.digest,
        )
        self._autoscaling = autoscaling
        self._running: dict[OutputStream, list[InFlightRequest]] = {}
        self._has_none_running = asyncio.Event()

    @property
    def is_ready(self) -> bool:
        """Return whether the router takes requests: a worker's stream is open, and the router is not being stopped."""
        return not self.is_draining and any(connection.takes_requests for connection in self.connections.values())

    @property
    def served(self) -> dict[str, list[WorkerConnection]]:
        """Return the workers that take requests, by the identity of their model, the newest identity first."""
        return by_identity(one for one in self.connections.values() if one.takes_requests)

    def state(self) -> RouterState:
        """Return the numbers of requests and workers now, and the number of workers that the autoscaling policy would ask for."""
        workers_by_state = {"open": 0, "closed": 0, "draining": 0}
        for connection in self.connections.values():
            workers_by_state[connection.state] += 1
        return RouterState(
            num_waiting=len(self.queue),
            num_tasks=_num_tasks(),
            workers_by_state=workers_by_state,
            workers_by_identity={identity: len(workers) for identity, workers in self.served.items()},
            in_flight_by_worker={one.worker_id: len(one.in_flight) for one in self.connections.values()},
            desired_workers=None if self._autoscaling is None else self._desired_workers(self._autoscaling),
        )

    def check_model(self, name: str | None) -> None:
        """Check that the router serves the model or LoRA adapter `name`; None stands for the served model, and so may names of
        Anthropic's.

        Raises:
            HttpError: the model is not served here (status 404).
        """
        if not self._serves(name):
            names = " and ".join(map(repr, [*self.config.model_names, *self.adapters.names][:MAX_NAMES]))
            message = f"The model {name!r} does not exist; this server has {names}."
            raise HttpError(404, message, param="model", code="model_not_found")

    def _serves(self, name: str | None) -> bool:
        config = self.config
        is_alias = config.serve_claude_names and name is not None and _CLAUDE_NAME.fullmatch(name)
        return name is None or name in config.model_names or bool(is_alias) or self.adapters.get(name) is not None

    async def prepare(self, model: str | None) -> None:
        """Check the model's name in a request that has a prompt, and wait until the model's limits are known.

        Raises:
            HttpError: the model is not served here (status 404).
            WorkerLost: there is no worker, or the router is being stopped.
        """
        if self.config.enable_lora and not self._serves(model):
            await self.adapter_loader.ask_others()
        self.check_model(model)
        if self.is_draining:
            raise WorkerLost(_STOPPING)
        await self.limits.wait(min(self.config.failover.wait_s, self.config.limits.request_timeout_s or math.inf))

    def start(self) -> None:
        """Connect to the workers."""
        self._pool.start()
        self.adapter_loader.start()

    def begin_drain(self) -> None:
        """Refuse new requests from now on, and say so at `/health`. Running requests continue."""
        self.is_draining = True

    async def stop(self) -> None:
        """Give running requests `timings.drain_s` to end, end the others with an error, and disconnect from the workers."""
        self.begin_drain()
        if self._running:
            self._has_none_running.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._has_none_running.wait(), self.timings.drain_s)
        for requests in self._running.values():
            unfinished = [request for request in requests if not request.has_ended]
            self.queue.withdraw(unfinished)
            for request in unfinished:
                request.fail(WorkerLost(_STOPPING))
        await self.queue.stop()
        await self._pool.stop()
        await self.adapter_loader.stop()
        self.grammar_checker.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)

    @contextlib.asynccontextmanager
    async def generate(
        self, requests: Sequence[Request], events: RequestEvents | None = None
    ) -> AsyncIterator[OutputStream]:
        """Have workers compute the choices of one HTTP request, and yield their output once workers have accepted all of them.

        Leaving the context aborts the choices that have not ended, without waiting for the workers.

        Raises:
            TransomError: a worker refused a request, or the router is being stopped.
        """
        if self.is_draining:
            raise WorkerLost(_STOPPING)
        events = events or RequestEvents(RequestTimeline(requests, self.timelines.store), self.metrics)
        output = OutputStream(requests)
        in_flight = [InFlightRequest(output, index, request, events) for index, request in enumerate(requests)]
        self._running[output] = in_flight
        events.report(Arrived(choices=in_flight))
        try:
            self.queue.enter(in_flight)
            await output.admitted()
            yield output
        finally:
            self.queue.withdraw(in_flight)
            del self._running[output]
            if not self._running:
                self._has_none_running.set()
            events.report(Ended())

    def _desired_workers(self, config: AutoscalingConfig) -> int:
        """Return how many workers should run: those that Serve's autoscaler wants, and those of the further groups, which it leaves
        as they are."""
        present = [connection for connection in self.connections.values() if not connection.is_draining]
        scaled = [connection for connection in present if connection.client.is_scaled]
        loads = [connection.load for connection in scaled if connection.load is not None]
        wanted = wanted_replicas(loads, num_unplaced=len(self.queue), num_target=len(scaled), config=config)
        return wanted + len(present) - len(scaled)


def _num_tasks() -> int:
    """Return the number of tasks of this thread's event loop; 0 if none runs, as before a router starts."""
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        return 0
