"""The tile plan of the CPU path: every row is in one tile, padding has a bound, blocks hold the keys that rows see."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.paged_case import Sequence, Shape, make_case
from transom_kernels.paged_attention.rule import MaskRule
from transom_kernels.paged_attention.tile_plan import PADDING_BLOCKS, PIECE_ROWS, TILE_BLOCKS, plan_tiles

SEQUENCES = st.lists(
    st.builds(Sequence, start=st.integers(0, 300), count=st.just(1) | st.integers(1, 300), attend_from=st.just(0)),
    min_size=1,
    max_size=12,
)
RULES = st.builds(
    MaskRule,
    window=st.none() | st.integers(1, 200),
    num_sink_tokens=st.just(0) | st.integers(0, 40),
    chunk=st.none() | st.integers(1, 200),
)


def plan_of(sequences, rule, allow_causal=True):
    batch = make_case(sequences, Shape(heads=1, kv_heads=1, size=2, block_size=1)).batch
    return batch, plan_tiles(batch, rule, allow_causal=allow_causal)


@settings(max_examples=40, deadline=None)
@given(SEQUENCES, RULES, st.booleans(), st.integers(0, 400))
def test_every_row_is_in_one_tile_or_keyless(sequences, rule, allow_causal, attend_from):
    sequences[0].attend_from = attend_from
    batch, plan = plan_of(sequences, rule, allow_causal)
    rows = list(plan.keyless_rows)
    for query_rows in [query_rows for tile in plan.dense for query_rows in tile]:
        rows.extend(range(query_rows.row, query_rows.row + query_rows.count))
        assert query_rows.count <= PIECE_ROWS
    for chunk in plan.causal:
        rows.extend(range(chunk.row, chunk.row + chunk.count))
    assert sorted(rows) == list(range(sum(batch.count_host)))
    assert allow_causal or not plan.causal


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 700), min_size=1, max_size=30), RULES)
def test_decoding_tiles_stay_within_their_bounds(starts, rule):
    _, plan = plan_of([Sequence(start=start, count=1) for start in starts], rule)
    assert sorted(reader.row for tile in plan.dense for reader in tile) == list(range(len(starts)))
    for tile in plan.dense:
        widest = max(query_rows.num_blocks for query_rows in tile)
        assert sum(widest - query_rows.num_blocks for query_rows in tile) <= PADDING_BLOCKS
        assert len(tile) == 1 or len(tile) * widest <= TILE_BLOCKS
        assert [query_rows.row for query_rows in tile] == sorted(query_rows.row for query_rows in tile)


def test_equal_lengths_share_a_tile():
    _, plan = plan_of([Sequence(start=20, count=1)] * 9, MaskRule())
    assert len(plan.dense) == 1


def test_plain_prompts_need_no_mask():
    sequences = [Sequence(start=0, count=40), Sequence(start=30, count=40)]
    _, plan = plan_of(sequences, MaskRule())
    assert [(chunk.start, chunk.first_key) for chunk in plan.causal] == [(0, 0), (30, 0)]
    _, plan = plan_of(sequences, MaskRule(window=70))
    assert len(plan.causal) == 2
    _, plan = plan_of(sequences, MaskRule(window=69))
    assert len(plan.causal) == 1
