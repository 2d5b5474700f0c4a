"""Where a step's queries read and its entries come from: worked out once, used by every layer.

Legend: T tokens, B sequences, W window, N entries of the longest sequence, E entries that the step closes, R tokens per entry,
G groups of R tokens that an entry reads.
"""

from __future__ import annotations

import torch

from transom_kernels.paged_attention.batch import PagedBatch
from transom_worker.layers.forward_batch import CompressedCache, ForwardBatch
from transom_worker.layers.rope import RotaryEmbedding, RotaryTables


class AttentionMetadata:
    """One forward pass. Slots are those of a group's caches; -1: nothing to read."""

    def __init__(self, batch: ForwardBatch, entry_rotary: RotaryEmbedding | None) -> None:
        """`entry_rotary` turns compressed entries."""
        self.batch, self._entry_rotary = batch, entry_rotary
        tokens = batch.groups[batch.group_of_layer[0]]
        self._tokens, self.sequence_T = tokens, _sequence_of_row(tokens)
        self._ends = [start + count for start, count in zip(tokens.start_host, tokens.count_host, strict=True)]
        self._made: dict[tuple[object, ...], torch.Tensor] = {}
        self._tables: dict[int, RotaryTables] = {}

    def num_entries(self, ratio: int) -> int:
        """N: entries of the longest sequence, those that this step closes included."""
        return max(self._ends) // ratio

    def num_visible(self, ratio: int) -> torch.Tensor:
        """Entries that each query sees, [T]: the one that its own token closes, too."""
        return (self.batch.positions + 1) // ratio

    def window(self, group: int, size: int) -> torch.Tensor:
        """Slots of the last `size` tokens of each query, its own the last, [T, W]."""
        key = ("window", group, size)
        if key not in self._made:
            positions = self.batch.positions
            back = torch.arange(1 - size, 1, device=positions.device)
            self._made[key] = _slots(self.batch.groups[group], self.sequence_T[:, None], positions[:, None] + back)
        return self._made[key]

    def entries(self, group: int, ratio: int) -> torch.Tensor:
        """Slots of each sequence's entries, [B, N]; -1 behind its last."""
        key = ("entries", group)
        if key not in self._made:
            paged = self.batch.groups[group]
            device = self.batch.positions.device
            numbers = torch.arange(self.num_entries(ratio), device=device)
            ends = self._tokens.start + self._tokens.query_offset.diff()
            ends = ends // ratio
            wanted = torch.where(numbers < ends[:, None], numbers, -1)
            self._made[key] = _slots(paged, torch.arange(len(ends), device=device)[:, None], wanted)
        return self._made[key]

    def visible_entries(self, group: int, ratio: int) -> torch.Tensor:
        """Slots of all the entries that each query sees, [T, N]."""
        key = ("visible", group)
        if key not in self._made:
            slots_BN = self.entries(group, ratio)
            numbers = torch.arange(slots_BN.shape[1], device=slots_BN.device)
            unseen = numbers >= self.num_visible(ratio)[:, None]
            self._made[key] = slots_BN[self.sequence_T].masked_fill_(unseen, -1)
        return self._made[key]

    def closes_entries(self, cache: CompressedCache) -> bool:
        """Whether E is above 0."""
        return sum(self.batch.groups[cache.entries.group].count_host) > 0

    def state(self, cache: CompressedCache, ratio: int, num_groups: int) -> torch.Tensor:
        """Slots of the compressor's rows that each closing entry reads, [E, G R]."""
        key = ("state", cache.state.group, ratio, num_groups)
        if key not in self._made:
            sequence_E, numbers_E = self._closing(cache)
            back = torch.arange((1 - num_groups) * ratio, ratio, device=numbers_E.device)
            positions = numbers_E[:, None] * ratio + back
            self._made[key] = _slots(self.batch.groups[cache.state.group], sequence_E[:, None], positions)
        return self._made[key]

    def entry_tables(self, cache: CompressedCache, ratio: int) -> RotaryTables:
        """Rotation of the closing entries, each at its first token's position, [E, 1, rotated width]."""
        assert self._entry_rotary is not None
        if ratio not in self._tables:
            self._tables[ratio] = self._entry_rotary(self._closing(cache)[1] * ratio)
        return self._tables[ratio]

    def _closing(self, cache: CompressedCache) -> tuple[torch.Tensor, torch.Tensor]:
        """Sequence and number of each entry that this step closes."""
        paged = self.batch.groups[cache.entries.group]
        sequence_E = _sequence_of_row(paged)
        rows = torch.arange(len(sequence_E), device=sequence_E.device)
        return sequence_E, rows - paged.query_offset[sequence_E] + paged.start[sequence_E]


def _sequence_of_row(paged: PagedBatch) -> torch.Tensor:
    counts = (paged.query_offset[1:] - paged.query_offset[:-1]).long()
    numbers = torch.arange(len(counts), device=counts.device)
    return numbers.repeat_interleave(counts, output_size=sum(paged.count_host))


def _slots(paged: PagedBatch, sequence: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Slots of rows [A, C] of the sequences [A, 1]; -1 below `attend_from` and below 0.

    Raises:
        IndexError: a row that is to be read has no block.
    """
    wanted = (rows >= 0) & (rows >= paged.attend_from[sequence])
    column = (rows // paged.block_size - paged.first_block[sequence]).masked_fill_(~wanted, 0)
    width = paged.block_table.shape[1]
    block = paged.block_table[sequence, column.clamp(0, width - 1)].long()
    lacking = wanted & ((column < 0) | (column >= width) | (block < 0))
    if rows.device.type == "cpu" and lacking.any():  # elsewhere looking would wait for the device
        place = tuple(lacking.nonzero()[0].tolist())
        raise IndexError(f"Row {int(rows[place])} of batch row {int(sequence[place[0], 0])} is read but has no block.")
    return torch.where(wanted, block * paged.block_size + rows % paged.block_size, -1)
