"""Where a sequence's blocks are: only the moves of the table are made, and the picture has every state."""

from __future__ import annotations

from itertools import product

import pytest

from transom_core.kv_cache.retention_set import RetentionSet
from transom_worker.kvcache.blocks import sequence_blocks
from transom_worker.kvcache.blocks.sequence_blocks import (
    TRANSITIONS,
    BlocksState,
    PendingLoad,
    SequenceBlocks,
)


@pytest.mark.parametrize(("state", "to"), list(product(BlocksState, BlocksState)), ids=lambda state: state.name)
def test_a_move_that_the_table_lacks_is_refused(state: BlocksState, to: BlocksState) -> None:
    blocks = SequenceBlocks.at(None, [], b"", RetentionSet.of((), block_size=4), block_size=4)
    blocks.state = state
    if to in TRANSITIONS[state]:
        blocks.move_to(to, PendingLoad([[7]], 1))
        assert (blocks.state, blocks.load.ticket) == (to, 1)
    else:
        with pytest.raises(RuntimeError, match=f"are {state.name} and cannot become {to.name}"):
            blocks.move_to(to)


def test_the_picture_has_every_state() -> None:
    assert set(TRANSITIONS) == set(BlocksState)
    assert all(state.name in (sequence_blocks.__doc__ or "") for state in BlocksState)
