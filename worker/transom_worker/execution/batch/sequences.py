"""What a rank remembers of its sequences from plan to plan: token ids and block tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from transom_core.kv_cache.groups import GroupSpec
from transom_worker.execution.batch.block_tables import BlockTables
from transom_worker.execution.batch.compact_tables import CompactTable
from transom_worker.scheduling.step import NewSequence, StepPlan


class SequenceTokens:
    """One sequence's token ids, in a growing buffer, and the number of its row in the block tables."""

    def __init__(self, new: NewSequence, row: int) -> None:
        self.row = row
        self.num_prompt_tokens = new.num_prompt_tokens
        self.prompt_logprobs = new.params.prompt_logprobs
        self.compact: tuple[CompactTable, ...] | None = None  # by group, if the sequence has a KV policy
        self.num_tokens = len(new.token_ids)
        self._ids = np.empty(max(64, 2 * self.num_tokens), dtype=np.int64)
        self._ids[: self.num_tokens] = new.token_ids

    def tokens(self, start: int, end: int) -> NDArray[np.int64]:
        """Return the token ids at positions [start, end).

        Raises:
            ValueError: the rank does not have all of these tokens yet.
        """
        if end > self.num_tokens:
            raise ValueError(f"A plan computes up to position {end}; only {self.num_tokens} tokens are known.")
        return self._ids[start:end]

    def append_token(self, position: int, token_id: int) -> bool:
        """Store the token at `position`, at most one past the end; return whether the rank did not have it yet.

        Raises:
            ValueError: there is a gap before `position`, or the rank has another token there.
        """
        if position < self.num_tokens:
            if int(self._ids[position]) != token_id:
                raise ValueError(f"A plan gives token {token_id} at {position}, which is {int(self._ids[position])}.")
            return False
        if position > self.num_tokens:
            raise ValueError(f"A plan gives a token at {position}; only {self.num_tokens} are known.")
        if position == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
        self._ids[position] = token_id
        self.num_tokens += 1
        return True

    def set_token(self, position: int, token_id: int) -> None:
        """Replace the stand-in at `position` (`device_queue.in_row`) by the token, which has arrived from the device."""
        self._ids[position] = token_id


class SequenceStore:
    """All sequences of a rank, by id, and their block tables, by group."""

    def __init__(self, groups: Sequence[GroupSpec], *, max_num_seqs: int) -> None:
        self.tables = tuple(BlockTables(spec, num_rows=max_num_seqs) for spec in groups)
        self._sequences: dict[int, SequenceTokens] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))  # the last one is taken first, so row 0 comes first
        self._num_rows = max_num_seqs

    def __getitem__(self, seq_id: int) -> SequenceTokens:
        try:
            return self._sequences[seq_id]
        except KeyError:
            raise ValueError(f"A plan names sequence {seq_id}, which was never given or has finished.") from None

    def find(self, seq_id: int) -> SequenceTokens | None:
        """Return a sequence, or None if it has finished."""
        return self._sequences.get(seq_id)

    def add(self, new: NewSequence) -> None:
        """Add a sequence with empty tables; it replaces a sequence of the same id."""
        self.remove(new.seq_id)
        if not self._free_rows:
            self._add_rows()
        sequence = self._sequences[new.seq_id] = SequenceTokens(new, self._free_rows[-1])
        if new.kv_policy is not None:
            sequence.compact = tuple(
                CompactTable(
                    num_sink_blocks=-(-new.kv_policy.sinks // tables.block_size), remembers_gone=new.kv_quality
                )
                for tables in self.tables
            )
        self._free_rows.pop()  # only now, since the lines above may run out of memory

    def remove(self, seq_id: int) -> None:
        """Forget a sequence. Unknown ids are ignored: the plan that named the sequence first may have been dropped."""
        sequence = self._sequences.pop(seq_id, None)
        if sequence is not None:
            for tables in self.tables:
                tables.clear(sequence.row)
            self._free_rows.append(sequence.row)

    def update_tables(self, plan: StepPlan) -> None:
        """Apply the plan's deltas to the block tables, then its removals and its moves of single blocks.

        Raises:
            ValueError: the plan names a sequence or a block that does not exist.
        """
        for index, seq_id in enumerate(plan.delta_seq):
            group, sequence = plan.delta_group[index], self[seq_id]
            dropped, first_block = plan.delta_dropped[index], plan.delta_first_block[index]
            blocks = plan.delta_blocks[plan.delta_offset[index] : plan.delta_offset[index + 1]]
            if sequence.compact is not None:
                sequence.compact[group].apply(dropped=dropped, first_block=first_block, blocks=blocks)
            else:
                self.tables[group].apply(sequence.row, dropped=dropped, first_block=first_block, blocks=blocks)
        for seq_id, group, logical in zip(plan.removed_seq, plan.removed_group, plan.removed_logical, strict=True):
            compact = self[seq_id].compact
            if compact is None:
                raise ValueError(f"A plan removes a block of sequence {seq_id}, which has no KV policy.")
            compact[group].remove(logical)
        for seq_id, group, logical, block in zip(
            plan.moved_seq, plan.moved_group, plan.moved_logical, plan.moved_block, strict=True
        ):
            sequence = self[seq_id]
            if sequence.compact is not None:
                sequence.compact[group].move(logical=logical, block=block)
            else:
                self.tables[group].move(sequence.row, logical=logical, block=block)

    def _add_rows(self) -> None:
        """Double the number of rows."""
        for tables in self.tables:
            tables.add_rows(self._num_rows)
        self._free_rows = list(range(2 * self._num_rows - 1, self._num_rows - 1, -1))
        self._num_rows *= 2
