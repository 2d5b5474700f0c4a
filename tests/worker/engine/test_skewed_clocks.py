"""Hosts' clocks may differ by any amount: a worker measures, and ends requests, by durations alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine_driver import make_engine, make_request, run
from transom_core.clock import steady_time_s
from transom_worker.telemetry.engine_timelines import Clock

HOUR_S = 3600.0


def skewed(by_s: float) -> Clock:
    """The clock of a host that is ahead of the router's."""
    return lambda: steady_time_s() + by_s


@pytest.mark.parametrize("skew_s", [-24 * HOUR_S, 0.0, 24 * HOUR_S])
def test_a_deadline_and_the_first_token_time_do_not_depend_on_the_hosts_clock(tiny_model: Path, skew_s: float) -> None:
    engine = make_engine(str(tiny_model), clock=skewed(skew_s))
    run(engine, [make_request("cold", [5, 6, 7], max_tokens=2)])
    for name, waited_s in (("a", 0.0), ("b", HOUR_S)):  # what it waited in its router is not this worker's
        in_time = replace(make_request(name, [5, 6, 7], max_tokens=3), time_left_s=HOUR_S, waited_s=waited_s)
        [output] = run(engine, [in_time])
        assert output.finish_reason == "length"
    assert 0 < engine.load().first_token_s < HOUR_S / 2
    engine.add(replace(make_request("late", [5, 6], max_tokens=500), time_left_s=0.0))
    [event] = engine.step()
    assert event.error is not None
    assert event.error.kind == "RequestTimeout"
    engine.shutdown()
