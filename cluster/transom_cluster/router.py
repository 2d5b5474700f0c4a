"""The router's core, independent of Ray and HTTP: a tokenizer, links to workers, and answers in flight."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

from transom_cluster.dispatcher import WorkerLink
from transom_cluster.metrics import RouterMetrics
from transom_cluster.openai.errors import unknown_model
from transom_cluster.openai.to_contract import ModelLimits
from transom_cluster.requests_in_flight import Answer
from transom_cluster.worker_client import WorkerClient
from transom_worker.config import ServerConfig
from transom_worker.contract import Request
from transom_worker.errors import EngineDead
from transom_worker.tokenizer import Tokenizer


class Router:
    """What the routes work with. `start` and `stop` run on the event loop that serves."""

    def __init__(
        self,
        *,
        worker: WorkerClient,
        tokenizer: Tokenizer,
        config: ServerConfig,
        router_id: str,
        engine_seed: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.engine_seed = engine_seed
        self.metrics = RouterMetrics(router_id)
        self.link = WorkerLink(worker, router_id)

    @property
    def clients(self) -> list[WorkerClient]:
        """All workers, for metrics."""
        return [self.link.client]

    @property
    def is_ready(self) -> bool:
        """Whether a worker's stream is open."""
        return self.link.is_open

    @property
    def limits(self) -> ModelLimits:
        """The served model's limits.

        Raises:
            EngineDead: no worker is ready.
        """
        if self.link.limits is None:
            raise EngineDead("The worker is not ready (starting, or being replaced); try again in a moment.")
        return self.link.limits

    def check_model(self, name: str | None) -> None:
        """Raise HttpError (404) unless `name` is served here; None means the served one."""
        if name is not None and name != self.config.served_model_name:
            raise unknown_model(name, self.config.served_model_name)

    def start(self) -> None:
        """Connect to the worker."""
        self.link.start()

    async def stop(self) -> None:
        """Disconnect."""
        await self.link.stop()

    @contextlib.asynccontextmanager
    async def answer(self, requests: Sequence[Request]) -> AsyncIterator[Answer]:
        """Submit requests; on leaving, for whatever reason, what has not ended is aborted at once.

        Raises:
            TransomError: a request was refused.
        """
        answer = Answer(requests)
        try:
            await self.link.submit(answer)
            yield answer
        finally:
            self.link.abandon(answer)
