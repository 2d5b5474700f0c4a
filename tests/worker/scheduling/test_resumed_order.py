"""A stream that migrated from a lost worker does not stand at the end of the queue: its client is reading it."""

from __future__ import annotations

import pytest

from tests.worker.scheduling.scheduler_driver import Driver, layout, request


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_resumed_stream_is_served_before_those_that_wait(policy: str) -> None:
    driver = Driver(layout(["full"], num_pages=200), max_num_seqs=1, policy=policy)
    driver.add(request("runs", range(5), 6))
    driver.step()
    for i in range(3):
        driver.add(request(f"waits{i}", range(5), 3))
    driver.add(request("resumed", range(5), 4, resumed=(7, 8), waited_s=60.0))
    driver.run()
    assert driver.finished == ["runs", "resumed", "waits0", "waits1", "waits2"]
