"""Streams outlive one to four random kills from outside: none is stopped as a poison request, and none is given up."""

from __future__ import annotations

import pytest

from tests.cluster.router.kill_sequences import STREAMS_PER_ROUTER, KillSequence
from tests.how_many import num_examples


@pytest.mark.parametrize("seed", range(num_examples(1, 4)))
async def test_kills_from_outside_cost_no_stream(seed: int) -> None:
    num_losses = 0.0
    for number in range(num_examples(20, 200)):
        outcome = await KillSequence(1000 * seed + number).run()
        assert (outcome.broken, outcome.stopped) == ([], 0), number
        assert outcome.whole >= STREAMS_PER_ROUTER
        num_losses += outcome.losses
    assert num_losses  # streams were lost, and migrated
