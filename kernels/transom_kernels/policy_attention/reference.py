"""The arguments of `policy_attention` and `add_block_mass`, and both in torch: the specification, and the fallback where no kernel
runs.

A KV policy may drop any blocks of a sequence. A *compact* block table has a column for each block that is left, in ascending order
of positions, and `key_blocks` says which logical block each column is. With blocks of 4 tokens:

    column               0   1   2   3
    block_table         17   3  20   8      block ids
    key_blocks           0   5   9  10      logical blocks: the keys at positions 0-3, 20-23, 36-39 and 40-43

A *table index* is a key's place in the table (column * P + offset). Since columns ascend, the keys that a row sees are one or two
ranges of table indices: the sink tokens, and the run.

Torch computes in float32, one sequence at a time, and long prompts in tiles of query tokens.

Legend: T query tokens, R query tokens of a tile, L keys that its sequence's table holds, H query heads, D key width, Dv value
width, B sequences, N table columns, P block size in tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from transom_kernels.paged_attention.inputs import AttentionBatch, AttentionInputs
from transom_kernels.paged_attention.reference import scores_of, softmax_of, stored_rows, tiles_of, weighted_sum

LOG2_E = 1.4426950408889634


@dataclass(slots=True, kw_only=True)
class PolicyBatch(AttentionBatch):
    """Everything that `policy_attention` reads, besides queries and caches.

    The query at position p sees key k of the table if k <= p and (k < sinks or window == 0 or k > p - window). The blocks of a
    sequence's new tokens are always in its table. Columns of `block_table` from `num_columns` on may hold anything.
    """

    key_blocks: torch.Tensor  # [B, N] int32 logical block of each column, ascending
    num_columns: torch.Tensor  # [B] int32
    window: torch.Tensor  # [B] int32 tokens, the query counted; 0: all that the table holds
    sinks: torch.Tensor  # [B] int32: keys below this position are seen with any window


@dataclass(slots=True, kw_only=True)
class PolicyInputs(AttentionInputs):
    """Queries and caches (`AttentionInputs`), compact block tables, and two tensors that only some policies need."""

    batch: PolicyBatch
    sink_q: torch.Tensor | None = None  # [T, H, D]: multiplied with the keys of sink tokens instead of q
    statistics: torch.Tensor | None = None  # [T, H, 2] float32: maximum (base 2) and sum of each row's softmax

    def check(self) -> None:
        """Raise ValueError unless shapes, dtypes and options fit together."""
        super(PolicyInputs, self).check()
        for name, value, shape in (
            ("sink_q", self.sink_q, self.q.shape),
            ("statistics", self.statistics, (*self.q.shape[:2], 2)),
        ):
            if value is not None and tuple(value.shape) != tuple(shape):
                raise ValueError(f"{name} has shape {tuple(value.shape)}; it must be {tuple(shape)}.")


def policy_attention_reference(inputs: PolicyInputs) -> torch.Tensor:
    """Return attention [T, H, Dv] of `q` [T, H, D]: softmax(scale q k^T) v over the keys of its compact table that a query sees.

    If they are given, `sink_q` replaces `q` for the keys of sink tokens, and `statistics` [T, H, 2] is written.
    """
    out = inputs.q.new_zeros(*inputs.q.shape[:2], inputs.value_width)
    for tile in _tiles(inputs):
        scores = _scores(inputs, tile).masked_fill(~tile.visible, float("-inf"))
        top, total, weights = softmax_of(scores, inputs.sink_logits)
        if inputs.statistics is not None:
            inputs.statistics[tile.rows] = torch.stack([top.T * LOG2_E, total.T], dim=-1)
        values = stored_rows(inputs.v_cache, inputs.v_scale, tile.place)
        # values that no query sees may be NaN, and 0 * NaN is NaN
        values = values.masked_fill(~tile.visible.any(dim=0)[:, None, None], 0.0)
        out[tile.rows] = weighted_sum(weights, values).to(out.dtype)
    return out


def add_block_mass_reference(mass: torch.Tensor, inputs: PolicyInputs) -> None:
    """Add to `mass` [B, N] the probabilities exp2(score - maximum) / sum of each block's keys, summed over all rows and heads."""
    assert inputs.statistics is not None
    for tile in _tiles(inputs):
        top, total = inputs.statistics[tile.rows].permute(2, 1, 0)[..., None]  # [H, R, 1] each
        share = torch.where(tile.visible, torch.exp2(_scores(inputs, tile) * LOG2_E - top) / total, 0.0)
        by_block = share.sum(dim=(0, 1)).view(-1, inputs.batch.block_size).sum(dim=-1)
        mass[tile.sequence, : len(by_block)] += by_block


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tile:
    """Some query tokens of one sequence, and all keys of its table."""

    sequence: int
    rows: slice
    place: tuple[torch.Tensor, torch.Tensor]  # block ids and offsets of the keys, [L] each
    is_sink: torch.Tensor  # [L]
    visible: torch.Tensor  # [R, L]


def _tiles(inputs: PolicyInputs) -> Iterator[_Tile]:
    """Yield the tiles of all sequences, in the order of their rows."""
    batch, device = inputs.batch, inputs.q.device
    offsets = torch.arange(batch.block_size, device=device)
    for b, columns in enumerate(batch.num_columns.tolist()):
        first, last = batch.query_offset[b : b + 2].tolist()
        start, window, sinks = int(batch.start[b]), int(batch.window[b]), int(batch.sinks[b])
        blocks, logical = batch.block_table[b, :columns].long(), batch.key_blocks[b, :columns].long()
        keys = (logical[:, None] * batch.block_size + offsets).flatten()  # [L] positions
        place = (blocks.repeat_interleave(batch.block_size), offsets.repeat(columns))
        for begin, end in tiles_of(last - first, inputs.q.shape[1] * len(keys)):
            positions = torch.arange(start + begin, start + end, device=device)[:, None]
            visible = keys <= positions
            if window:
                visible &= (keys > positions - window) | (keys < sinks)
            yield _Tile(
                sequence=b, rows=slice(first + begin, first + end), place=place, is_sink=keys < sinks, visible=visible
            )


def _scores(inputs: PolicyInputs, tile: _Tile) -> torch.Tensor:
    """Return scores [H, R, L]; those of keys that no row sees may be NaN."""
    keys = stored_rows(inputs.k_cache, inputs.k_scale, tile.place)
    scores = scores_of(inputs, inputs.q[tile.rows], keys)
    if inputs.sink_q is None:
        return scores
    return torch.where(tile.is_sink, scores_of(inputs, inputs.sink_q[tile.rows], keys), scores)
