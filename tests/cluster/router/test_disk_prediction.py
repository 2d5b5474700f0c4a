"""A router predicts by tier what real engines with a disk tier find: after a restart, and at any time.

No other process changes the directory, and the engines list it before each request, so the prediction is exact.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine_driver import make_engine, make_request
from tests.how_many import num_examples
from transom_cluster.routing.placer import PlacementObserver, Placer
from transom_cluster.routing.worker_view import HitTokens
from transom_core.contract import Request, Usage, WindowPolicy, WorkerInfo, WorkerMessage
from transom_worker.engine.disk_tier import EngineDiskTier
from transom_worker.engine.engine import Engine
from transom_worker.kvcache.tiers.disk.listing import BlockKey

SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "block_size": 8,
    "kv_cache_memory_bytes": 600 << 10,
    "swap_space": "400KiB",
    "max_model_len": 512,
    "max_num_seqs": 4,
    "disk_space": "64MiB",
}
LAYERS: dict[str, dict[str, Any]] = {"full": {}, "windows": {"window": 40, "window_pattern": "SF"}}


class Hits(PlacementObserver):
    """Keeps what was predicted and what was found, in order."""

    def __init__(self) -> None:
        self.measured: list[tuple[HitTokens, HitTokens]] = []

    def hit_measured(self, *, predicted: HitTokens, actual: HitTokens) -> None:
        self.measured.append((predicted, actual))


class Workers:
    """Engines by name and one router of theirs, which hears of everything at once."""

    def __init__(self, model: Path, folder: Path, **settings: Any) -> None:
        self.hits = Hits()
        self.placer = Placer("kv", observer=self.hits)
        self.engines: dict[str, Engine] = {}
        self.num_lost = 0  # reads of files that were removed after their listing
        self._model, self._settings = model, {**SETTINGS, "disk_cache": str(folder), **settings}

    def start(self, name: str, **settings: Any) -> Engine:
        engine = self.engines[name] = make_engine(str(self._model), **{**self._settings, **settings})
        assert isinstance(engine._disk, EngineDiskTier)
        forget = engine._disk.watch.forget

        def lost(blocks: Sequence[BlockKey]) -> None:
            self.num_lost += 1
            forget(blocks)

        engine._disk.watch.forget = lost  # type: ignore[method-assign]
        info = WorkerInfo(worker=name, max_model_len=512, vocab_size=1000, cache=engine.scheduler.cache.shape)
        self.placer.add_worker(name, info)
        engine.scheduler.cache.changes.take()
        self.placer.update(name, WorkerMessage(kv=engine.scheduler.cache.changes.whole(), load=engine.load()))
        return engine

    def stop(self, name: str) -> None:
        self.engines.pop(name).shutdown()
        self.placer.remove_worker(name)

    def hear(self) -> None:
        """Every engine lists its folder once all files are written, and the router learns of it."""
        for engine in self.engines.values():  # a write may remove files that another engine knows, for want of space
            tier = engine.executor._runner.tiers._disk  # type: ignore[attr-defined]
            while tier is not None and tier._queued_bytes:
                os.sched_yield()
        for name, engine in self.engines.items():
            if isinstance(engine._disk, EngineDiskTier):
                engine._disk.watch.look()
                engine._disk.take_news()
            self.placer.update(name, WorkerMessage(kv=engine.scheduler.cache.changes.take(), load=engine.load()))

    def serve(self, request: Request) -> tuple[str, Usage]:
        """Place one request and run it to its end; return its worker and what that found.

        An import may make room in the host tier, whose blocks go to the disk, where the write makes room in turn: it may remove
        a file before the import has read it. Such a request computes its prompt, and is not counted.
        """
        self.hear()
        num_lost = self.num_lost
        placed = self.placer.place(request, list(self.engines))
        engine = self.engines[placed.worker_id]
        engine.add(request)
        first: Usage | None = None
        while engine.has_work:
            for event in engine.step():
                assert event.error is None, event.error
                if event.usage is not None and first is None:
                    first = event.usage
        assert first is not None
        self.placer.first_event(request.request_id, first)
        self.placer.ended(request.request_id)
        if self.num_lost > num_lost:
            self.hits.measured.pop()
        return placed.worker_id, first

    def check(self) -> None:
        """Every prediction was exact, tier by tier."""
        assert self.num_lost <= len(self.hits.measured) // 10
        assert [one for one in self.hits.measured if one[0] != one[1]] == []


def prompt(seed: int, length: int = 256) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 900) for _ in range(length)]


@pytest.mark.parametrize("layers", LAYERS)
def test_predictions_are_exact_by_tier_whatever_happens_to_the_disk(
    tiny_model: Path, tmp_path: Path, fast_reads: None, layers: str
) -> None:
    """Sessions that go on, tenants, windows, restarts, evictions for want of space, and files that are removed or broken."""
    rng = random.Random(layers)
    workers = Workers(tiny_model, tmp_path, **LAYERS[layers], disk_space="1500KiB")
    num_started = 0
    sessions = [prompt(number, rng.randrange(40, 200)) for number in range(8)]
    policies = (None, None, WindowPolicy(sinks=4, window=60)) if layers == "full" else (None,)
    for number in range(num_examples(daily=60, exhaustive=400)):
        if len(workers.engines) < 2:
            num_started += 1
            workers.start(f"w{num_started}")
        elif rng.random() < 0.08:
            workers.stop(rng.choice(sorted(workers.engines)))
            continue
        if rng.random() < 0.1:
            files = sorted(tmp_path.rglob("*.kv"))
            for path in rng.sample(files, min(len(files), 3)):
                path.unlink()
        session = rng.randrange(len(sessions))
        if len(sessions[session]) > 400:
            sessions[session] = prompt(1000 + number, rng.randrange(40, 200))
        request = replace(
            make_request(f"r{number}", sessions[session], max_tokens=4),
            cache_salt=rng.choice([None, None, None, "tenant"]),
            kv_policy=policies[session % len(policies)],
        )
        workers.serve(request)
        sessions[session] = [*sessions[session], *prompt(2000 + number, rng.randrange(1, 60))]
    workers.check()
    found = [actual for _, actual in workers.hits.measured]
    assert sum(bool(one.disk) for one in found) > 3
    assert any(one.host for one in found)
    assert any(one.device for one in found)
    for name in list(workers.engines):
        workers.stop(name)
