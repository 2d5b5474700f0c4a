"""The statuses of a sequence: one table says what may follow each, and the docstring shows it."""

from __future__ import annotations

from itertools import product

import pytest

from tests.worker.scheduling.scheduler_driver import request
from tests.worker.scheduling.shared_prompts import make_driver
from transom_worker.scheduling import sequence as module
from transom_worker.scheduling.sequence import TRANSITIONS, SequenceStatus, transition_table


@pytest.mark.parametrize(("source", "target"), product(SequenceStatus, SequenceStatus))
def test_a_status_changes_as_the_table_allows(source: SequenceStatus, target: SequenceStatus) -> None:
    driver = make_driver()
    driver.add(request("a", range(8), 1))
    sequence = driver.scheduler.by_request["a"]
    sequence.status = source
    if target in TRANSITIONS[source]:
        sequence.move_to(target)
        assert sequence.status is target
    else:
        with pytest.raises(AssertionError, match=f"a: .*{source.name} -> .*{target.name}"):
            sequence.move_to(target)


def test_the_docstring_shows_the_table_and_every_status_can_end() -> None:
    assert module.__doc__ is not None
    assert transition_table() in module.__doc__
    for source, targets in TRANSITIONS.items():
        assert (SequenceStatus.FINISHED in targets) == (source is not SequenceStatus.FINISHED)
