"""Drivers for prompts that arrive together, and what tests read from them."""

from __future__ import annotations

import pytest

from tests.worker.scheduling.scheduler_driver import Driver, layout
from transom_worker.scheduling.step import StepPlan

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
    return {} if plan is None else rows(driver, plan)


def rows(driver: Driver, plan: StepPlan) -> dict[str, tuple[int, int]]:
    names = {sequence.seq_id: sequence.request.request_id for sequence in driver.scheduler.admission.running}
    return {
        names[seq_id]: (start, count) for seq_id, start, count in zip(plan.seq_ids, plan.start, plan.count, strict=True)
    }


def cached(driver: Driver) -> dict[str, int]:
    driver.run()
    driver.check_idle()
    return {name: outputs[0].num_cached_tokens for name, outputs in driver.outputs.items() if outputs}


def num_waiters(driver: Driver) -> int:
    return len(driver.scheduler.admission.waiting.awaiting_prefix)
