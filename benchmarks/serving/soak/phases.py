"""The four phases of a soak of a running server, and what must hold at the end of each."""

import argparse
import asyncio
import random
import time
from collections.abc import Callable

from benchmarks.serving.soak import journal as promises
from benchmarks.serving.soak.accounts import Tally, check_page, compare, left_tasks, quiet_page
from benchmarks.serving.soak.cases import make_cases, make_conversations
from benchmarks.serving.soak.cluster import LAYOUTS, TWO_WORKERS, Cluster, Page
from benchmarks.serving.soak.disturbances import Disturbances
from benchmarks.serving.soak.journal import Journal
from benchmarks.serving.soak.process_watch import ProcessWatch, Sample, leftovers
from benchmarks.serving.soak.traffic import Known, Traffic

DISTURBED_SHARE, STEADY_SHARE = 0.45, 0.45  # of the time; the rest is for the calm phase and the end
# From the start of a process and of the steady phase, whose first requests have filled the caches, until its memory counts; in
# short soaks a third of the steady phase.
WARM_UP_S = 480.0
NUM_FILLING = 4_400  # each of two routers and workers keeps the timelines of its last 2,000 requests
MIN_FLAT_S = 600.0  # of a steady phase: over less a slope is noise, and is only reported
FLAT_MIB_PER_H = 10.0
OURS = ("worker", "rank", "router", "transom serve")  # Ray's own processes are only reported
CLIENT_PAUSE_S = 1.5  # mean pause of a client between two requests
HOSTILE_PAUSE_S = 10.0  # mean pause between two attacks
SPARE = 12  # descriptors and threads that a process may have more than at the start


class Soak:
    """One soak of a running server."""

    def __init__(self, options: argparse.Namespace, cluster: Cluster, journal: Journal) -> None:
        self._options, self._cluster, self._journal = options, cluster, journal
        self._known = Known(cases=make_cases(options.seed), conversations=make_conversations(options.seed))
        self._traffic = Traffic(cluster.server.url, self._known, journal)
        self._watch = ProcessWatch(cluster.server)
        self._idle_page: Page | None = None

    async def run(self) -> None:
        """All phases. `KeyboardInterrupt` ends them early; the report then has what there is."""
        is_over = asyncio.Event()
        watching = asyncio.create_task(self._watch.run(is_over.is_set))
        try:
            self._journal.phase("calm")
            before = await self._calm()
            self._journal.phase("disturbed")
            await self._disturbed()
            self._journal.phase("steady")
            await self._steady()
            self._journal.phase("end")
            await self._end(before)
        finally:
            is_over.set()
            await watching
            await self._traffic.close()
            await self._cluster.close()

    async def _calm(self) -> list[Sample]:
        """Every request twice with each model; the processes' descriptors and threads afterwards."""
        await self._calm_answers()
        if not await self._cluster.redeploy(TWO_WORKERS):
            raise RuntimeError("the redeploy with the second model failed")
        self._traffic.tally = Tally()
        await self._calm_answers()
        if len({model for model, _ in self._known.answers}) != 2:
            raise RuntimeError("the two models have not two names")
        return await asyncio.to_thread(self._watch.look)

    async def _calm_answers(self) -> None:
        if not await self._cluster.until_whole():
            raise RuntimeError("the cluster did not become whole at its start")
        page = await quiet_page(self._cluster, self._journal)
        await self._traffic.calm_answers()
        source = random.Random(0)
        for _ in range(20):
            await self._traffic.once("conversation", source)
        await self._ask_each(source)
        self._idle_page = await self._settle(page, exact=True)

    async def _disturbed(self) -> None:
        source = random.Random(f"{self._options.seed}/disturbances")
        disturbances = Disturbances(self._cluster, self._traffic, self._journal, source)
        over = asyncio.Event()

        async def disturb() -> None:
            await disturbances.exchange_models()
            for layout in LAYOUTS:
                end = self._after(self._options.seconds * DISTURBED_SHARE / len(LAYOUTS))
                if layout is not self._cluster.layout:
                    await disturbances.redeploy(layout)
                await disturbances.until(end)
            await disturbances.redeploy(TWO_WORKERS)

        disturbing = asyncio.create_task(disturb())
        disturbing.add_done_callback(lambda _: over.set())
        await self._clients("disturbed", over.is_set)
        await disturbing

    async def _steady(self) -> None:
        page = await quiet_page(self._cluster, self._journal)
        self._traffic.tally = Tally()
        steady_s = self._options.seconds * STEADY_SHARE
        if steady_s >= MIN_FLAT_S:
            await self._traffic.fill(NUM_FILLING)
        begin_s, end = time.time(), self._after(steady_s)
        await self._clients("steady", end)
        self._check_memory(begin_s, time.time())
        await self._settle(page, exact=False)

    async def _clients(self, phase: str, is_over: Callable[[], bool]) -> None:
        """All clients, the hostile one too, until `is_over()`."""
        seed = f"{self._options.seed}/{phase}"
        await asyncio.gather(
            self._traffic.run(self._options.clients, CLIENT_PAUSE_S, seed, is_over),
            self._traffic.hostile(seed, HOSTILE_PAUSE_S, is_over),
        )

    async def _end(self, before: list[Sample]) -> None:
        page = await quiet_page(self._cluster, self._journal)
        self._traffic.tally = Tally()
        await self._ask_each(random.Random(1))
        await self._settle(page, exact=True)
        found: list[str] = []
        for _ in range(12):  # what was closed on the other side is closed here a little later
            found = leftovers(before, await asyncio.to_thread(self._watch.look), SPARE)
            if self._idle_page and (idle_now := await self._cluster.page()):
                found += left_tasks(self._idle_page, idle_now)
            if not found:
                break
            await asyncio.sleep(5.0)
        for one in found:
            self._journal.broke(promises.LEFTOVERS, one)

    async def _ask_each(self, source: random.Random) -> None:
        """As many single requests as there are cases."""
        for _ in range(len(self._known.cases)):
            await self._traffic.once("single", source)

    async def _settle(self, before: Page | None, *, exact: bool) -> Page | None:
        """Wait until all is quiet, and compare the server's counts with the clients'; the page at that time."""
        after = await quiet_page(self._cluster, self._journal)
        if after is not None:
            check_page(after, self._journal)
            if before is not None:
                compare(before, after, self._traffic.tally, self._journal, exact=exact)
        return after

    def _check_memory(self, begin_s: float, end_s: float) -> None:
        warm_up_s = min(WARM_UP_S, (end_s - begin_s) / 3)
        self._journal.growth_mib_per_h = self._watch.growth_mib_per_h(begin_s, end_s, warm_up_s)
        self._journal.note("memory", mib_by_minute=self._watch.levels_mib(begin_s, end_s))
        if end_s - begin_s < MIN_FLAT_S:
            return
        for kind, growth in self._journal.growth_mib_per_h.items():
            if kind in OURS and growth > FLAT_MIB_PER_H:
                self._journal.broke(promises.MEMORY, f"{kind}: {growth:+.1f} MiB/h")

    def _after(self, seconds: float) -> Callable[[], bool]:
        end_s = self._journal.now_s + seconds
        return lambda: self._journal.now_s >= end_s
