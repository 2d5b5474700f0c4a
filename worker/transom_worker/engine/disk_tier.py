"""`EngineDiskTier`: what an engine does with its disk tier: it follows which files there are (`disk_watch`), imports the
prefixes of requests from there (`disk_imports`), and writes what is cached when it is stopped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from transom_core.config import CacheConfig
from transom_core.contract import Request
from transom_worker.engine.disk_imports import DiskImports
from transom_worker.execution.executor import Executor, ExecutorInfo
from transom_worker.kvcache.tiers.disk.folder import BlockFolder
from transom_worker.kvcache.tiers.disk.watch import DiskWatch
from transom_worker.kvcache.tiers.kept_imports import KeptImports
from transom_worker.scheduling.scheduler import Scheduler
from transom_worker.scheduling.step import StepResult

logger = logging.getLogger("transom.worker")

FLUSH_S = 5.0  # for which an engine that is stopped writes what is cached
FLUSH_PIECE_BYTES = 8 << 20  # of each rank, in one plan


class NoDiskTier:
    """The disk tier of an engine without one: no file comes or goes, and no request waits for one."""

    exists = False

    @property
    def is_busy(self) -> bool:
        """Whether a request waits for a load from the disk, or files were found to have come or gone."""
        return False

    def on_news(self, call: Callable[[], object]) -> None:
        """Call this, on another thread, when files have come or gone."""

    def begin(self, request: Request) -> bool:
        """Begin to import the prefix of a new request; False if it need not be held."""
        return False

    def take_news(self) -> None:
        """Take note of the files that have come and gone."""

    def step_done(self, result: StepResult) -> None:
        """Take note of the loads that have ended."""

    def forget_loads(self) -> None:
        """End all imports, since the ranks were restarted. All requests have ended."""

    def close(self) -> None:
        """End the thread that lists the files."""

    def flush(self, executor: Executor) -> None:
        """Write what is cached, the most valuable prefixes first, as far as it takes no longer than `FLUSH_S`."""


class EngineDiskTier(NoDiskTier):
    """The disk tier of one engine, whose thread calls it.

    `end_hold` lets a request be admitted of whose prefix a number of tokens were imported; `kept` keeps what was imported.
    """

    exists = True

    def __init__(
        self,
        scheduler: Scheduler,
        folder: BlockFolder,
        kept: KeptImports,
        *,
        end_hold: Callable[[str, int], object],
    ) -> None:
        self._scheduler = scheduler
        tiers = scheduler.cache.tiers
        tiers.open_disk(scheduler.cache.layout)
        self.watch = DiskWatch(folder, tiers.disk)
        self._imports = DiskImports(scheduler, self.watch, kept, end_hold=end_hold)

    def on_news(self, call: Callable[[], object]) -> None:
        """Call this, on another thread, when files have come or gone."""
        self.watch.on_news(call)

    @property
    def is_busy(self) -> bool:
        """Whether a request waits for a load from the disk, or files were found to have come or gone."""
        return self._imports.is_busy or self.watch.has_news

    def begin(self, request: Request) -> bool:
        """Begin to import the prefix of a new request; False if it need not be held."""
        self.watch.take_news()
        return self._imports.begin(request)

    def take_news(self) -> None:
        """Take note of the files that have come and gone."""
        self.watch.take_news()

    def step_done(self, result: StepResult) -> None:
        """Take note of the loads that have ended."""
        self._imports.step_done(result)

    def forget_loads(self) -> None:
        """End all imports, since the ranks were restarted. All requests have ended."""
        self._imports.forget()

    def close(self) -> None:
        """End the thread that lists the files."""
        self.watch.close()

    def flush(self, executor: Executor) -> None:
        """Write what is cached, the most valuable prefixes first, as far as it takes no longer than `FLUSH_S`."""
        until_s = time.perf_counter() + FLUSH_S
        try:
            executor.drop_in_flight()
            for plan in self._scheduler.plans_to_store_all(piece_bytes=FLUSH_PIECE_BYTES):
                if time.perf_counter() >= until_s:
                    break
                executor.submit(plan)
                executor.receive()
        except Exception as error:  # the engine must end, even if the cache is lost
            logger.warning("What is cached could not be written to the disk tier: %s", error)


def open_disk_tier(
    config: CacheConfig,
    info: ExecutorInfo,
    scheduler: Scheduler,
    kept: KeptImports,
    *,
    end_hold: Callable[[str, int], object],
) -> NoDiskTier:
    """Return the disk tier that the settings say."""
    if config.disk_cache is None:
        return NoDiskTier()
    folder = BlockFolder(Path(config.disk_cache), info.disk_fingerprint, space_bytes=config.disk_space_bytes)
    return EngineDiskTier(scheduler, folder, kept, end_hold=end_hold)
