"""The cache slots that a DeepSeek V4 step reads, against slots computed by hand."""

from __future__ import annotations

import pytest
import torch

from transom_kernels.paged_attention.batch import PagedBatch
from transom_worker.models.deepseek_v4.attention_metadata import AttentionMetadata
from transom_worker.models.layers.forward_batch import CachePart, CompressedCache, ForwardBatch, LayerCache
from transom_worker.models.layers.rotary_embedding import RotaryEmbedding

NOTHING = LayerCache(torch.empty(0), torch.empty(0))
WINDOW, ENTRIES, STATE = 0, 1, 2
CACHE = CompressedCache(entries=CachePart(NOTHING, ENTRIES), state=CachePart(NOTHING, STATE))


def paged(
    block_size: int, tables: list[list[int]], first: list[int], starts: list[int], counts: list[int], attend: list[int]
) -> PagedBatch:
    def ints(values: list[int] | list[list[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return PagedBatch(
        block_size=block_size,
        num_sink_blocks=0,
        block_table=ints(tables),
        first_block=ints(first),
        attend_from=ints(attend),
        slots=torch.zeros(sum(counts), dtype=torch.int64),
        query_offset=ints([sum(counts[:b]) for b in range(len(counts) + 1)]),
        start=ints(starts),
        block_table_host=tables,
        first_block_host=first,
        attend_from_host=attend,
        start_host=starts,
        count_host=counts,
    )


def make_metadata(window_tables: list[list[int]]) -> AttentionMetadata:
    """Two sequences: tokens 9 to 12, and token 3; blocks of 2 tokens, entries of 4 tokens, 2 to a block."""
    token = ([9, 3], [4, 1], [0, 0])
    batch = ForwardBatch(
        token_ids=torch.zeros(5, dtype=torch.int64),
        positions=torch.tensor([9, 10, 11, 12, 3]),
        groups=(
            paged(2, window_tables, [3, 0], token[0], token[1], [7, 0]),
            paged(2, [[5, 6], [8, -1]], [0, 0], [2, 0], [1, 1], [0, 0]),
            paged(2, [[40, 41, 42, 43, 44], [50, 51, -1, -1, -1]], [2, 0], *token),
        ),
        group_of_layer=(WINDOW,),
        caches=(NOTHING,),
        logit_rows=torch.tensor([3, 4]),
    )
    return AttentionMetadata(batch, RotaryEmbedding(torch.tensor([0.5]), dtype=torch.float32, interleaved=True))


def test_rows_by_position() -> None:
    step = make_metadata([[30, 31, 32, 33], [20, 21, -1, -1]])
    assert step.sequence_T.tolist() == [0, 0, 0, 0, 1]
    assert step.window(WINDOW, 3).tolist() == [
        [61, 62, 63],  # 7, 8, 9: block 3 of the sequence is id 30, of which token 6 is not to be read
        [62, 63, 64],
        [63, 64, 65],
        [64, 65, 66],
        [41, 42, 43],
    ]
    assert step.window(WINDOW, 4)[0].tolist() == [-1, 61, 62, 63]
    assert step.window(WINDOW, 5)[4].tolist() == [-1, 40, 41, 42, 43]


def test_entries_and_their_state() -> None:
    step = make_metadata([[30, 31, 32, 33], [20, 21, -1, -1]])
    assert step.num_entries(4) == 3
    assert step.entries(ENTRIES, 4).tolist() == [[10, 11, 12], [16, -1, -1]]
    assert step.num_visible(4).tolist() == [2, 2, 3, 3, 1]
    assert step.visible_entries(ENTRIES, 4).tolist() == [
        *([[10, 11, -1]] * 2),
        *([[10, 11, 12]] * 2),
        [16, -1, -1],
    ]
    assert step.closes_entries(CACHE)
    own, other = [84, 85, 86, 87], [100, 101, 102, 103]  # tokens 8 to 11 and 0 to 3
    assert step.state(CACHE, 4, 1).tolist() == [own, other]
    assert step.state(CACHE, 4, 2).tolist() == [[80, 81, 82, 83, *own], [-1, -1, -1, -1, *other]]
    angles = torch.tensor([8 * 0.5, 0.0])
    torch.testing.assert_close(step.entry_tables(CACHE, 4).cos[:, 0, 0], angles.cos())


def test_a_row_without_a_block_is_an_error() -> None:
    step = make_metadata([[30, -1, 32, 33], [20, 21, -1, -1]])
    with pytest.raises(IndexError, match="Row 8 of batch row 0 is read but has no block"):
        step.window(WINDOW, 3)
