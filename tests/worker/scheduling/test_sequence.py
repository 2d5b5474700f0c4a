"""A sequence's status."""

from __future__ import annotations

import pytest

from tests.worker.scheduling.scheduler_driver import request
from tests.worker.scheduling.shared_prompts import make_driver
from transom_worker.scheduling.sequence import SequenceStatus


def test_a_status_changes_as_the_table_allows() -> None:
    driver = make_driver()
    driver.add(request("a", range(8), 1))
    with pytest.raises(AssertionError, match=r"a: .*WAITING -> .*PREEMPTING"):
        driver.scheduler.by_request["a"].move_to(SequenceStatus.PREEMPTING)
