"""Drivers for prompts that arrive together, and what tests read from them."""

from __future__ import annotations

import pytest

from tests.worker.scheduling.scheduler_driver import Driver, layout

STEPS = pytest.mark.parametrize("steps_in_flight", [1, 2])
MIXES = [("full",), ("window",), ("full", "window"), ("full", "sinks_window"), ("full", "window", "ragged_chunk")]
PROMPT = range(40)


def make_driver(*mix: str, num_pages: int = 200, **config: object) -> Driver:
    settings: dict[str, object] = dict(min_shared_tokens=1, max_num_batched_tokens=64) | config
    return Driver(layout(mix or ("full", "window"), num_pages=num_pages), **settings)  # type: ignore[arg-type]


def planned(driver: Driver) -> dict[str, tuple[int, int]]:
    """The next plan: (start, count) by request."""
    plan = driver.schedule()
    driver.check()
    if plan is None:
        return {}
    names = {sequence.seq_id: sequence.request.request_id for sequence in driver.scheduler.admission.running}
    rows = zip(plan.seq_ids, plan.start, plan.count, strict=True)
    return {names[seq_id]: (start, count) for seq_id, start, count in rows}


def cached(driver: Driver) -> dict[str, int]:
    driver.run()
    driver.check_idle()
    return {name: outputs[0].num_cached_tokens for name, outputs in driver.outputs.items() if outputs}


def num_waiters(driver: Driver) -> int:
    return len(driver.scheduler.admission.waiting.awaiting_prefix)
