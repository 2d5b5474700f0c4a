"""What is done to a running cluster: random kills, stopped processes, bursts, other weights in the model's folder,
redeploys with the other model; after each it must become whole again.

The choices come from a seeded source, and every one is in the journal with its time and its victim.
"""

import asyncio
import contextlib
import random
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import psutil

from benchmarks.serving.soak import journal as promises
from benchmarks.serving.soak.cluster import LOOK_S, WHOLE_S, Cluster, Layout
from benchmarks.serving.soak.journal import Journal
from benchmarks.serving.soak.traffic import Traffic
from transom_cluster.commands.process_tree import is_running

BURST_CLIENTS, BURST_S = 16, 10.0
PAUSE_S = 20.0  # mean pause between two disturbances
KINDS = {  # weights
    "worker": 6, "router": 4, "rank": 5, "chat template": 1, "two": 3, "hang": 2, "folder": 3, "burst": 3,
}  # fmt: skip


@dataclass(slots=True)
class Disturbances:
    """Disturbs a cluster, one disturbance at a time."""

    cluster: Cluster
    traffic: Traffic
    journal: Journal
    source: random.Random

    async def until(self, is_over: Callable[[], bool]) -> None:
        """One disturbance at least, and then one after another, with random pauses."""
        while True:
            await asyncio.sleep(self.source.uniform(0.3, 1.7) * PAUSE_S)
            try:
                await self._one()
            except Exception as fault:
                self.journal.broke(promises.WHOLE, f"the soak could not disturb: {fault!r}")
            if is_over():
                return

    async def _one(self) -> None:
        """A random one that suits the layout."""
        weights = dict(KINDS)
        if self.cluster.layout.ranks_per_worker == 1:
            del weights["rank"]
        [kind] = self.source.choices(list(weights), list(weights.values()))
        if kind == "burst":
            await self._burst()
        elif kind == "two":
            kinds = self.source.choices(("worker", "router", "rank"), k=2)
            await self._kill(kinds, signal.SIGKILL, pause_s=self.source.uniform(0.0, 8.0))
        elif kind == "folder":
            await self.exchange_models()
        elif kind == "hang":
            await self._kill([self.source.choice(("worker", "rank"))], signal.SIGSTOP)
        else:
            await self._kill([kind], signal.SIGKILL)

    async def _kill(self, kinds: Sequence[str], number: signal.Signals, *, pause_s: float = 0.0) -> None:
        """Send a signal to a process of each of these kinds, and wait until the cluster is whole without them."""
        victims: list[psutil.Process] = []
        with ExitStack() as windows:
            windows.enter_context(self.traffic.disturbed.open())
            if "router" in kinds:
                windows.enter_context(self.traffic.router_killed.open())
            for kind in kinds:
                if victims:
                    await asyncio.sleep(pause_s)
                if victim := await self._strike(kind, number):
                    victims.append(victim)
            await self._recover(f"{number.name} {' and '.join(kinds)}", victims, self.journal.now_s)
            if number == signal.SIGSTOP:
                await self._come_back(victims)

    async def _strike(self, kind: str, number: signal.Signals) -> psutil.Process | None:
        living = await self.cluster.processes(kind) or await self.cluster.processes("worker")
        if not living:
            return None
        victim = self.source.choice(living)
        self.journal.note("strike", kind=kind, signal=number.name, pid=victim.pid)
        try:
            victim.send_signal(number)
        except psutil.NoSuchProcess:
            return None
        return victim

    async def exchange_models(self) -> None:
        """Change the weights in the served folder, and kill a worker or a rank, which then loads the other model."""
        self.cluster.exchange_models()
        await self._kill([self.source.choice(("worker", "rank"))], signal.SIGKILL)

    async def redeploy(self, layout: Layout) -> None:
        """Deploy the app with other settings and the other model under load."""
        self.journal.note("redeploy", layout=layout.name)
        begin_s = self.journal.now_s
        if not await self.cluster.redeploy(layout):
            self.journal.broke(promises.WHOLE, f"the redeploy as {layout.name} failed")
        await self._recover(f"redeploy as {layout.name}", [], begin_s)

    async def _burst(self) -> None:
        """Many clients at once, so that queues fill, sequences are preempted, and the autoscaler adds workers."""
        self.journal.note("burst", clients=BURST_CLIENTS)
        end_s = self.journal.now_s + BURST_S
        seed, kinds = f"burst {self.journal.now_s}", ("single", "conversation")
        await self.traffic.run(BURST_CLIENTS, 0.0, seed, lambda: self.journal.now_s > end_s, only=kinds)

    async def _recover(self, name: str, victims: Sequence[psutil.Process], begin_s: float) -> None:
        if not await self.cluster.until_whole(without=victims):
            self.journal.broke(promises.WHOLE, f"{name} ({self.cluster.layout.name}): not whole after a long time")
            return
        took_s = self.journal.now_s - begin_s
        self.journal.recoveries.append((name, self.cluster.layout.name, took_s))
        self.journal.note("whole", after=name, took_s=round(took_s, 2))

    async def _come_back(self, victims: Sequence[psutil.Process]) -> None:
        """Let stopped processes that were replaced run on: they must end, and do no harm meanwhile.

        Ray's kill of a stopped process mostly ends it, and sometimes is never delivered.
        """
        for victim in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.send_signal(signal.SIGCONT)
        end_s = self.journal.now_s + WHOLE_S
        while living := [victim.pid for victim in victims if is_running(victim)]:
            if self.journal.now_s > end_s:
                self.journal.broke(promises.LEFTOVERS, f"{living} were replaced, and have not ended")
                return
            await asyncio.sleep(LOOK_S)
