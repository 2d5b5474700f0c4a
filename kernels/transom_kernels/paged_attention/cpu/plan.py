"""Plans a step for the CPU kernels: which sequences are computed in tiles, which row by row, and how many items share a row.

Legend: B sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from transom_kernels.cpu.pool import pool
from transom_kernels.paged_attention.cpu.layout import MAX_DECODING_ROWS
from transom_kernels.paged_attention.inputs import AttentionBatch

# slots share decoding rows until there are this many items, so that threads end at about the same time
_ITEMS_PER_THREAD = 4
_MAX_PARTIAL_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Plan:
    """The sequences that are computed in tiles, and those that are computed row by row."""

    tiles: torch.Tensor | None  # [num_tiles, 2] int32: sequence and first token
    num_tiles: int
    decoding: torch.Tensor | None  # [num_decoding] int32: numbers of the sequences computed by row; None: all
    num_decoding: int


def plan_of(batch: AttentionBatch, tile_tokens: int) -> Plan:
    """Return the step's plan. The first layer with tiles of this size makes it; the batch keeps it for the other layers."""
    key = ("attention on CPUs", tile_tokens)
    if key not in batch.scratch:
        batch.scratch[key] = _plan(batch, tile_tokens)
    plan: Plan = batch.scratch[key]
    return plan


def _plan(batch: AttentionBatch, tile_tokens: int) -> Plan:
    """Cut prompts into tiles. Tiles with the most keys come first, so that no thread starts a long one last."""
    prompts = [b for b, count in enumerate(batch.count_host) if count > MAX_DECODING_ROWS]
    num_sequences = batch.start.shape[0]
    if not prompts:
        return Plan(tiles=None, num_tiles=0, decoding=None, num_decoding=num_sequences)
    tiles = [(b, token) for b in prompts for token in range(0, batch.count_host[b], tile_tokens)]
    starts = batch.start.tolist()
    tiles.sort(key=lambda tile: -starts[tile[0]] - tile[1])
    decoding = np.setdiff1d(np.arange(num_sequences, dtype=np.int32), np.array(prompts, dtype=np.int32))
    return Plan(
        tiles=torch.tensor(tiles, dtype=torch.int32),
        num_tiles=len(tiles),
        decoding=torch.from_numpy(decoding),
        num_decoding=len(decoding),
    )


def num_slots_for(num_items: int, max_units: int, partial_bytes: int) -> int:
    """Return how many items share each decoding row and KV head, so that `num_items` of these keep all threads busy.

    At most `max_units - 2` units of a row's run are worth an item of their own. Rows are not shared if partial results, which take
    `partial_bytes` for one unit of all rows, would take more than _MAX_PARTIAL_BYTES.
    """
    if not num_items or max_units * partial_bytes > _MAX_PARTIAL_BYTES:
        return 1
    wanted = -(-_ITEMS_PER_THREAD * pool().num_threads // num_items)
    return max(1, min(wanted, max_units - 2))
