"""The server under test: its settings, its processes and pages, how it is deployed again, and when it is whole.

Whole: every router that should be there has open streams to all workers that should be there, to none that is lost, and every rank
that a worker names is a living process.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from benchmarks.json_child import ROOT
from benchmarks.server_process import Server
from benchmarks.serving.process_names import processes_named, ray_address
from benchmarks.serving.soak.journal import Journal

REDEPLOY = ROOT / "tests/end_to_end/redeploy.py"
LOOK_S = 0.5
WHOLE_S = 400.0
PAGE_S = 30.0

COMMON: dict[str, Any] = {
    # windows over full layers, so that hits, repairs and evictions of every kind come up; 16 sequences fill the pool
    "dtype": "float32",
    "window": 64,
    "sinks": 4,
    "window_pattern": "SSF",
    "max_model_len": 2048,
    "kv_cache_memory_bytes": "4MiB",
    "swap_space": "4MiB",  # with it workers fetch from each other
    "disk_space": "8MiB",  # is full before the steady phase: indices of workers and routers take 0.5 KiB for each file
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "num_threads": 1,
    "router_replicas": 2,
    "max_body_bytes": 1 << 20,
    "worker_wait_s": 240.0,  # a single worker that is killed starts again within this time, also on a busy machine
    "step_timeout_s": 20.0,
}


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to deploy the app: settings beside `COMMON`, and how many workers that makes."""

    name: str
    settings: dict[str, Any]
    workers: tuple[int, int]  # least and most
    ranks_per_worker: int = 1


TWO_WORKERS = Layout("two workers", {"replicas": 2}, (2, 2))
LAYOUTS = (
    TWO_WORKERS,
    Layout("two workers of other settings", {"replicas": 2, "block_size": 32, "max_num_seqs": 4, "routing_policy": "round_robin",
           "kv_cache_memory_bytes": "3MiB", "scheduling_policy": "priority"}, (2, 2)),
    Layout("a prefill and a decode worker", {"replicas": 1, "role": "decode",
           "worker_group": [{"role": "prefill", "replicas": 1}]}, (2, 2)),
    Layout("one worker of two ranks", {"replicas": 1, "tensor_parallel_size": 2}, (1, 1), 2),
    Layout("one to two workers", {"replicas": 1, "min_replicas": 1, "max_replicas": 2, "upscale_delay_s": 1.0,
           "downscale_delay_s": 15.0, "first_token_objective_s": 0.3}, (1, 2)),
)  # fmt: skip


def settings_of(layout: Layout, disk: Path) -> dict[str, Any]:
    """The settings of a layout, whose workers keep their blocks in the folder `disk`."""
    return {**COMMON, **layout.settings, "disk_cache": str(disk)}


@dataclass(slots=True)
class Page:
    """A page of metrics: samples by name."""

    samples: dict[str, list[Sample]]

    @classmethod
    def read(cls, text: str) -> Page:
        """Read Prometheus' text format."""
        samples: dict[str, list[Sample]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append(sample)
        return cls(samples)

    def sum(self, name: str, **labels: str) -> float:
        """Sum of the samples whose labels match."""
        return sum(one.value for one in self._matching(name, labels))

    def labels(self, name: str, label: str, **labels: str) -> set[str]:
        """All values of a label."""
        return {one.labels[label] for one in self._matching(name, labels) if label in one.labels}

    def _matching(self, name: str, labels: dict[str, str]) -> list[Sample]:
        found = self.samples.get(name, [])
        return [one for one in found if all(one.labels.get(key) == value for key, value in labels.items())]


@dataclass(slots=True)
class Cluster:
    """A running server of one of two models of equal geometry; each redeploy serves the other folder."""

    server: Server
    folders: tuple[Path, Path]
    disk: Path
    journal: Journal
    layout: Layout = TWO_WORKERS
    is_second: bool = False
    _http: httpx.AsyncClient = field(init=False)

    def __post_init__(self) -> None:
        limits = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.AsyncClient(base_url=self.server.url, timeout=PAGE_S, limits=limits, trust_env=False)

    async def close(self) -> None:
        """Close the connections that look at pages."""
        await self._http.aclose()

    async def page(self) -> Page | None:
        """The page of metrics; None where none comes."""
        try:
            reply = await self._http.get("/metrics")
        except httpx.TransportError:
            return None
        return Page.read(reply.text) if reply.status_code == 200 else None

    async def processes(self, *kinds: str) -> list[psutil.Process]:
        """Living processes of these kinds (`process_names.NAMES`)."""
        return await asyncio.to_thread(processes_named, self.server, *kinds)

    async def until_whole(self, *, without: Sequence[psutil.Process] = ()) -> bool:
        """Wait until the cluster is whole without these processes; whether that came within `WHOLE_S`."""
        begin_s = self.journal.now_s
        state = ""
        while self.journal.now_s < begin_s + WHOLE_S:
            if not (state := await self.what_is_missing(await self.page(), without)):
                return True
            await asyncio.sleep(LOOK_S)
        self.journal.note("not whole", missing=state, layout=self.layout.name)
        return False

    async def what_is_missing(self, page: Page | None, without: Sequence[psutil.Process] = ()) -> str:
        """What a page shows that is not whole; empty where all is."""
        if page is None:
            return "no page"
        routers = page.labels("transom_router_workers", "router")
        if len(routers) != COMMON["router_replicas"]:
            return f"{len(routers)} routers"
        least, most = self.layout.workers
        for router in routers:
            is_open = page.sum("transom_router_workers", router=router, state="open")
            closed = page.sum("transom_router_workers", router=router, state="closed")
            if not least <= is_open <= most or closed:
                return f"{router}: {is_open} open, {closed} closed"
        pids = {int(pid) for pid in page.labels("transom_rank_info", "pid")}
        living = {process.pid for process in await self.processes("worker", "rank")}
        lost = {process.pid for process in without}
        if len(pids) < least * self.layout.ranks_per_worker or not pids <= living or pids & lost:
            return f"ranks {pids} of {living}"
        return ""

    def exchange_models(self) -> None:
        """Write each folder's weights over the other's. Workers that run keep theirs; those that start load the others."""
        weights = [folder / "model.safetensors" for folder in self.folders]
        for file, contents in zip(weights, [file.read_bytes() for file in reversed(weights)], strict=True):
            file.write_bytes(contents)
        self.journal.note("models exchanged")

    async def redeploy(self, layout: Layout) -> bool:
        """Deploy the app with other settings and the other folder, as `serve deploy` does; whether that succeeded."""
        self.layout, self.is_second = layout, not self.is_second
        address = await asyncio.to_thread(ray_address, self.server)
        settings = json.dumps({"model": str(self.folders[self.is_second]), **settings_of(layout, self.disk)})
        deploying = await asyncio.create_subprocess_exec(
            sys.executable, str(REDEPLOY), address, settings,
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, errors = await deploying.communicate()
        if deploying.returncode:
            self.journal.note("redeploy failed", errors=errors.decode(errors="replace")[-4000:])
        return deploying.returncode == 0
