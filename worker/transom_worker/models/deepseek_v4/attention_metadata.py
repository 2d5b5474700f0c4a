"""Computes the attention metadata of a DeepSeek V4 forward pass: the cache slots that queries read and that entries are made from.

A *latent row* is one vector per token that is key and value of all heads. A *compressed entry* is a latent row that stands for R
tokens. A token *closes* an entry if it is the last of the entry's R tokens. With R = 4 a prompt chunk of the tokens 5 to 12 closes
entry 1 (token 7) and entry 2 (token 11); entry 3 stays open. The first layer that needs a tensor of this module computes it, and
the other layers reuse it.

A *slot* is a row's place in a cache: block * rows per block + row. A slot of -1 means that there is nothing to read.

Legend: T tokens, B sequences, W window, N entries of the longest sequence, E entries that the step closes, R tokens per entry,
G groups of R tokens that an entry reads.
"""

import torch

from transom_kernels.paged_attention.inputs import PagedBatch
from transom_worker.models.layers.forward_batch import CompressedCache, ForwardBatch
from transom_worker.models.layers.rotary_embedding import RotaryEmbedding, RotaryTables


class AttentionMetadata:
    """Slots, entry counts and entry rotations of one forward pass."""

    def __init__(self, batch: ForwardBatch, entry_rotary: RotaryEmbedding | None) -> None:
        """`entry_rotary` is the rotary embedding of compressed entries; None if no layer has any."""
        self.batch, self._entry_rotary = batch, entry_rotary
        tokens = batch.groups[batch.group_of_layer[0]]
        self._tokens, self.sequence_T = tokens, _sequence_of_row(tokens)
        self._ends = [start + count for start, count in zip(tokens.start_host, tokens.count_host, strict=True)]
        self._slots_cache: dict[tuple[object, ...], torch.Tensor] = {}
        self._tables: dict[int, RotaryTables] = {}

    def num_entries(self, ratio: int) -> int:
        """Return N: the entries of the longest sequence, including those that this step closes."""
        return max(self._ends) // ratio

    def num_visible(self, ratio: int) -> torch.Tensor:
        """Return the number of entries that each query may read, [T], including an entry that the query's own token closes."""
        return (self.batch.positions + 1) // ratio

    def window(self, group: int, size: int) -> torch.Tensor:
        """Return the slots of the last `size` tokens of each query, [T, W]; the query's own token comes last."""
        key = ("window", group, size)
        if key not in self._slots_cache:
            positions = self.batch.positions
            offsets = torch.arange(1 - size, 1, device=positions.device)
            self._slots_cache[key] = _slots(
                self.batch.groups[group], self.sequence_T[:, None], positions[:, None] + offsets
            )
        return self._slots_cache[key]

    def entries(self, group: int, ratio: int) -> torch.Tensor:
        """Return the slots of each sequence's entries, [B, N]; -1 after a sequence's last entry."""
        key = ("entries", group)
        if key not in self._slots_cache:
            paged = self.batch.groups[group]
            device = self.batch.positions.device
            numbers = torch.arange(self.num_entries(ratio), device=device)
            ends = self._tokens.start + self._tokens.query_offset.diff()  # tokens of each sequence after this step
            ends = ends // ratio
            rows = torch.where(numbers < ends[:, None], numbers, -1)
            self._slots_cache[key] = _slots(paged, torch.arange(len(ends), device=device)[:, None], rows)
        return self._slots_cache[key]

    def visible_entries(self, group: int, ratio: int) -> torch.Tensor:
        """Return the slots of all entries that each query may read, [T, N]; -1 for the others."""
        key = ("visible", group)
        if key not in self._slots_cache:
            slots_BN = self.entries(group, ratio)
            numbers = torch.arange(slots_BN.shape[1], device=slots_BN.device)
            unseen = numbers >= self.num_visible(ratio)[:, None]
            self._slots_cache[key] = slots_BN[self.sequence_T].masked_fill_(unseen, -1)
        return self._slots_cache[key]

    def closes_entries(self, cache: CompressedCache) -> bool:
        """Return whether the step closes any entry of this cache."""
        return sum(self.batch.groups[cache.entries.group].count_host) > 0

    def state(self, cache: CompressedCache, ratio: int, num_groups: int) -> torch.Tensor:
        """Return the slots of the compressor's (kv, gate) rows that each closing entry is made from, [E, G R]."""
        key = ("state", cache.state.group, ratio, num_groups)
        if key not in self._slots_cache:
            sequence_E, numbers_E = self._closing(cache)
            offsets = torch.arange((1 - num_groups) * ratio, ratio, device=numbers_E.device)
            positions = numbers_E[:, None] * ratio + offsets
            self._slots_cache[key] = _slots(self.batch.groups[cache.state.group], sequence_E[:, None], positions)
        return self._slots_cache[key]

    def entry_tables(self, cache: CompressedCache, ratio: int) -> RotaryTables:
        """Return the rotary tables [E, 1, rotated width] of the closing entries, each at the position of its first token."""
        assert self._entry_rotary is not None
        if ratio not in self._tables:
            self._tables[ratio] = self._entry_rotary(self._closing(cache)[1] * ratio)
        return self._tables[ratio]

    def _closing(self, cache: CompressedCache) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sequence and the number of each entry that this step closes, [E] each."""
        paged = self.batch.groups[cache.entries.group]
        sequence_E = _sequence_of_row(paged)
        rows = torch.arange(len(sequence_E), device=sequence_E.device)
        return sequence_E, rows - paged.query_offset[sequence_E] + paged.start[sequence_E]


def _sequence_of_row(paged: PagedBatch) -> torch.Tensor:
    """Return the number of the sequence that each row of a batch belongs to."""
    counts = (paged.query_offset[1:] - paged.query_offset[:-1]).long()
    numbers = torch.arange(len(counts), device=counts.device)
    return numbers.repeat_interleave(counts, output_size=sum(paged.count_host))


def _slots(paged: PagedBatch, sequence: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the slots of rows [A, C] of the sequences [A, 1]; -1 for rows below 0 or below the sequence's `attend_from`.

    Raises:
        IndexError: a row that will be read has no block (checked on CPUs only).
    """
    is_read = (rows >= 0) & (rows >= paged.attend_from[sequence])
    column = (rows // paged.block_size - paged.first_block[sequence]).masked_fill_(~is_read, 0)
    width = paged.block_table.shape[1]
    block = paged.block_table[sequence, column.clamp(0, width - 1)].long()
    is_missing = is_read & ((column < 0) | (column >= width) | (block < 0))
    if rows.device.type == "cpu" and is_missing.any():  # on other devices the check would wait for the device
        first = tuple(is_missing.nonzero()[0].tolist())
        raise IndexError(f"Row {int(rows[first])} of batch row {int(sequence[first[0], 0])} is read but has no block.")
    return torch.where(is_read, block * paged.block_size + rows % paged.block_size, -1)
