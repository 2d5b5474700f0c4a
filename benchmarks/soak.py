"""Runs a real cluster on loopback for hours, with mixed traffic and random kills, and checks the promises of docs/reliability.md.

    python benchmarks/soak.py --hours 1
    python benchmarks/soak.py --minutes 10 --seed 7 --json soak.json

The model is a tiny random one in float32, whose texts do not depend on batches, hits or the number of ranks. Four phases follow one
another: *calm* (every request, which gives the texts to compare with, and many of them again), *disturbed* (traffic, kills, bursts,
redeploys with other settings), *steady* (the same traffic without kills: memory must be flat) and *end* (nothing may be left in
use). A journal has every event with its time. The exit status is 1 if a promise broke; the report names it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import platform
import random
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from served import READY, Served, name_of, serving, wait_until_ready

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests.tiny_checkpoints

from soaking import journal as promises
from soaking.accounts import check_page, compare, left_tasks, quiet_page
from soaking.cases import make_cases, make_conversations
from soaking.cluster import LAYOUTS, TWO_WORKERS, Cluster, copy_sources, flags_of
from soaking.disturbances import Disturbances, disturb_until
from soaking.journal import Journal
from soaking.page import Page
from soaking.process_watch import ProcessWatch, Sample, leftovers, write_samples
from soaking.report import Report, gap_figures
from soaking.tally import Tally
from soaking.traffic import Known, Traffic
from transom_cluster.commands.process_tree import is_running

DISTURBED_SHARE, STEADY_SHARE = 0.6, 0.3  # of the time; the rest is for the calm phase and the end
STARTS = 6  # Ray gives its own processes 30 s to start, of which a full machine may make too little
WARM_UP_S = 240.0  # of a process, before its memory counts; in short soaks a third of the steady phase
NUM_FILLING = 80  # requests of 100 choices: each router and worker keeps the timelines of its last 2,000 (some 14 MB)
MIN_FLAT_S = 600.0  # of a steady phase: over less a slope is noise, and is only reported
FLAT_MIB_PER_H = 30.0
OURS = ("worker", "rank", "router", "transom serve")  # Ray's own processes are only reported
SPARE = 12  # descriptors and threads that a process may have more than at the start
REPORTS = Path(__file__).parent / "results" / "local"


@dataclass(slots=True)
class Soak:
    """One soak of a running server."""

    options: argparse.Namespace
    cluster: Cluster
    journal: Journal
    report: Report
    known: Known = field(init=False)
    traffic: Traffic = field(init=False)
    watch: ProcessWatch = field(init=False)
    idle_page: Page | None = None

    def __post_init__(self) -> None:
        seed = self.options.seed
        self.known = Known(cases=make_cases(seed), conversations=make_conversations(seed))
        self.traffic = Traffic(self.cluster.served.url, self.known, self.journal)
        self.watch = ProcessWatch(self.cluster.served)

    async def run(self) -> None:
        """All phases. `KeyboardInterrupt` ends them early; the report then has what there is."""
        is_over = asyncio.Event()
        watching = asyncio.create_task(self.watch.run(is_over.is_set))
        try:
            before = await self._calm()
            with self._phase("disturbed"):
                await self._disturbed()
            with self._phase("steady"):
                await self._steady()
            with self._phase("end"):
                await self._end(before)
        finally:
            is_over.set()
            await watching
            self.report.longest_gaps_s = gap_figures(self.traffic.longest_gaps_s)
            write_samples(self.watch.samples, self.journal.path.with_suffix(".csv"))
            await self.traffic.close()
            await self.cluster.close()

    async def _calm(self) -> list[Sample]:
        """Every request twice; the processes' descriptors and threads afterwards."""
        with self._phase("calm"):
            if not await self.cluster.until_whole():
                raise RuntimeError("the cluster did not become whole at its start")
            page = await quiet_page(self.cluster, self.journal)
            await self.traffic.calm_answers()
            source = random.Random(0)
            for _ in range(20):
                await self.traffic.once("conversation", source)
            for _ in range(len(self.known.cases)):
                await self.traffic.once("single", source)
            self.idle_page = await self._settle("calm", page, exact=True)
            return await asyncio.to_thread(self.watch.look)

    async def _disturbed(self) -> None:
        source = random.Random(f"{self.options.seed}/disturbances")
        disturbances = Disturbances(
            self.cluster, self.traffic, self.journal, source, self.options.hangs, self.report.recoveries
        )
        phase_s = self.options.seconds * DISTURBED_SHARE
        over = asyncio.Event()

        async def disturb() -> None:
            for layout in LAYOUTS:
                end = self._after(phase_s / len(LAYOUTS))
                if layout is not self.cluster.layout:
                    await disturbances.redeploy(layout)
                await disturb_until(disturbances, self.options.disturb_s, end)
            await disturbances.redeploy(TWO_WORKERS)
            over.set()

        disturbing = asyncio.create_task(disturb())
        disturbing.add_done_callback(lambda _: over.set())
        await self.traffic.run(
            self.options.clients, self.options.pause_s, f"{self.options.seed}/disturbed", over.is_set
        )
        await disturbing

    async def _steady(self) -> None:
        page = await quiet_page(self.cluster, self.journal)
        self.traffic.tally = Tally()
        steady_s = self.options.seconds * STEADY_SHARE
        if steady_s >= MIN_FLAT_S:
            await self.traffic.fill(NUM_FILLING)
        begin_s, end = time.time(), self._after(steady_s)
        await self.traffic.run(self.options.clients, self.options.pause_s, f"{self.options.seed}/steady", end)
        self._check_memory(begin_s, time.time())
        await self._settle("steady", page, exact=False)

    async def _end(self, before: list[Sample]) -> None:
        page = await quiet_page(self.cluster, self.journal)
        self.traffic.tally = Tally()
        source = random.Random(1)
        for _ in range(len(self.known.cases)):
            await self.traffic.once("single", source)
        await self._settle("end", page, exact=True)
        found: list[str] = []
        for _ in range(12):  # what was closed on the other side is closed here a little later
            found = leftovers(before, await asyncio.to_thread(self.watch.look), SPARE)
            if self.idle_page and (idle_now := await self.cluster.page()):
                found += left_tasks(self.idle_page, idle_now)
            if not found:
                break
            await asyncio.sleep(5.0)
        self.report.leftovers = found
        for one in found:
            self.journal.broke(promises.LEFTOVERS, one)

    async def _settle(self, phase: str, before: Page | None, *, exact: bool) -> Page | None:
        """Wait until all is quiet, and compare the server's counts with the clients'; the page at that time."""
        after = await quiet_page(self.cluster, self.journal)
        if after is not None:
            check_page(after, self.journal)
            if before is not None:
                self.report.sums[phase] = compare(before, after, self.traffic.tally, self.journal, exact=exact)
        return after

    def _check_memory(self, begin_s: float, end_s: float) -> None:
        warm_up_s = min(WARM_UP_S, (end_s - begin_s) / 3)
        self.report.growth = self.watch.growth(begin_s, end_s, warm_up_s)
        self.report.growth_all = self.watch.growth(0.0, end_s, warm_up_s)
        if end_s - begin_s < MIN_FLAT_S:
            return
        for one in self.report.growth:
            if one.kind in OURS and one.rss_mib_per_h > FLAT_MIB_PER_H:
                self.journal.broke(promises.MEMORY, f"{one.kind}: {one.rss_mib_per_h:+.1f} MiB/h")

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        begin_s = self.journal.now_s
        self.journal.note("phase", name=name)
        print(f"{begin_s / 60:6.1f} min  {name}", flush=True)
        try:
            yield
        finally:
            self.report.phases_s[name] = round(self.journal.now_s - begin_s, 1)

    def _after(self, seconds: float) -> Callable[[], bool]:
        end_s = self.journal.now_s + seconds
        return lambda: self.journal.now_s >= end_s


def main() -> None:
    options = read_options()
    if "RAY_AUTH_MODE" not in os.environ:  # the server and the processes that deploy on it share a token
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    report_path = Path(options.json or REPORTS / f"{time.strftime('%Y-%m-%d-%H%M')}-soak.json")
    journal = Journal(report_path.with_suffix(".events.jsonl"))
    machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "machine": platform.machine()}
    report = Report(setup={"seed": options.seed, "clients": options.clients, "hangs": options.hangs, **machine})
    try:
        soak(options, journal, report)
    finally:
        report.write(report_path, journal)
        print(report_path.with_suffix(".md").read_text())
        print(f"Report: {report_path}\nEvents: {journal.path}")
        journal.close()
    for promise in sorted({one.promise for one in journal.broken}):
        print(f"BROKEN: {promise}", file=sys.stderr)
    raise SystemExit(bool(journal.broken))


def soak(options: argparse.Namespace, journal: Journal, report: Report) -> None:
    """Start a server, run all phases, and end it."""
    from tests.tiny_checkpoints import tiny_llama

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sources, model = copy_sources(folder / "sources"), tiny_llama(folder / "model")
        served = start(stack, model, journal)
        cluster = Cluster(served, sources, model, journal)
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(Soak(options, cluster, journal, report).run())
        log = served.log.read_text()
    journal.note("log", text=log[log.find(READY) :][-20000:])
    code, left = served.process.wait(), processes_of_session(served.process.pid)
    if code or left:
        journal.broke(promises.LEFTOVERS, f"the server ended with status {code}; of its processes run on: {left}")


def processes_of_session(leader: int) -> list[str]:
    """Names of the living processes of a session, also of those whose parents have ended."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == leader and is_running(process):
                found.append(name_of(process))
    return found


def start(stack: ExitStack, model: Path, journal: Journal) -> Served:
    """Start the server; it ends with the stack."""
    for attempt in range(STARTS):
        with ExitStack() as attempted:
            served = attempted.enter_context(serving(str(model), flags_of(TWO_WORKERS)))
            try:
                wait_until_ready(served)
            except RuntimeError as error:
                journal.note("start failed", attempt=attempt, error=str(error))
                continue
            stack.enter_context(attempted.pop_all())
            return served
    raise SystemExit("The server did not start; the journal has its log.")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Traffic and kills on a cluster of this machine; exit status 1 if a promise broke."
    )
    parser.add_argument("--hours", type=float, default=0.0)
    parser.add_argument("--minutes", type=float, default=0.0, help="Added to --hours; 10 if both are missing.")
    parser.add_argument("--seed", type=int, default=0, help="Of every random choice.")
    parser.add_argument("--clients", type=int, default=6, help="Clients at once, bursts apart.")
    parser.add_argument("--pause-s", type=float, default=1.5, help="Mean pause of a client between two requests.")
    parser.add_argument("--disturb-s", type=float, default=20.0, help="Mean pause between two disturbances.")
    parser.add_argument(
        "--hangs", action=argparse.BooleanOptionalAction, default=True, help="Stop processes (SIGSTOP), too."
    )
    parser.add_argument("--json", default="", help="The report; Markdown and events are written beside it.")
    options = parser.parse_args()
    options.seconds = 3600 * options.hours + 60 * options.minutes or 600.0
    return options


if __name__ == "__main__":
    main()
