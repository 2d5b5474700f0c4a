"""What a rank remembers of its sequences from plan to plan: token ids and block tables.

A sequence is introduced with all its known tokens. Each later token comes with the plan that computes it and is read by no other
plan, so only the newest one is kept.

Legend: B sequences of a step, T tokens of a step.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from transom_core.kv_cache.groups import GroupSpec
from transom_worker.execution.batch.block_tables import BlockTables, CompactTable
from transom_worker.scheduling.step import NO_ADAPTER, NewSequence, StepPlan

Ints = NDArray[np.int64]


class SequenceTokens:
    """The tokens with which one sequence was introduced, and the number of its row in the store."""

    def __init__(self, new: NewSequence, row: int) -> None:
        self.row = row
        self.num_prompt_tokens = new.num_prompt_tokens
        self.prompt_logprobs, self.pooling = new.params.prompt_logprobs, new.params.pooling
        self.compact: tuple[CompactTable, ...] | None = None  # by group, if the sequence has a KV policy
        self.adapter_slot = new.adapter_slot
        self.ids = np.array(new.token_ids, dtype=np.int64)


class SequenceStore:
    """All sequences of a rank, by id, with a row each in the block tables, by group, and in arrays of numbers."""

    def __init__(self, groups: Sequence[GroupSpec], *, max_num_seqs: int) -> None:
        self.tables = tuple(BlockTables(spec, num_rows=max_num_seqs) for spec in groups)
        self._sequences: dict[int, SequenceTokens] = {}
        self.adapted: set[int] = set()  # the sequences that have LoRA adapters
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))  # the last one is taken first, so row 0 comes first
        self._num_rows = max_num_seqs
        # By row: the tokens of the introduction, all tokens, and the last one of these if it came later.
        self._num_given, self._num_tokens, self._newest = np.zeros((3, max_num_seqs), dtype=np.int64)
        # The last ids that were looked up, their sequences and rows: the steps of a batch that only decodes have the same.
        self._last: tuple[list[int], list[SequenceTokens], Ints] = ([], [], np.empty(0, dtype=np.int64))

    def __getitem__(self, seq_id: int) -> SequenceTokens:
        try:
            return self._sequences[seq_id]
        except KeyError:
            raise ValueError(f"A plan names sequence {seq_id}, which was never given or has finished.") from None

    def all_of(self, seq_ids: list[int]) -> tuple[list[SequenceTokens], Ints]:
        """Return these sequences and their rows, [B]. Raises ValueError, as `[]` does."""
        if self._last[0] != seq_ids:
            try:
                sequences = list(map(self._sequences.__getitem__, seq_ids))
            except KeyError as error:
                sequences = [self[error.args[0]]]  # raises
            self._last = (seq_ids, sequences, np.array([sequence.row for sequence in sequences], dtype=np.int64))
        return self._last[1:]

    def append(self, seq_ids: list[int], positions_B: Ints, token_ids_B: Ints) -> None:
        """Store each sequence's new token, or its stand-in (`device_queue.in_row`), at its position.

        Raises:
            ValueError: a position is not the next one.
        """
        rows = self.all_of(seq_ids)[1]
        if (wrong := np.flatnonzero(positions_B != self._num_tokens[rows])).size:
            known = self._num_tokens[rows[wrong[0]]]
            raise ValueError(f"A plan gives a token at {positions_B[wrong[0]]}; {known} are known.")
        self._newest[rows] = token_ids_B
        self._num_tokens[rows] += 1

    def token_ids(self, seq_ids: list[int], start_B: Ints, end_B: Ints) -> Ints:
        """Return the tokens at positions [start, end) of each of these sequences, [T].

        Raises:
            ValueError: the rank does not have all of these tokens, or not any more.
        """
        (sequences, rows), offset_B = self.all_of(seq_ids), np.cumsum(end_B - start_B)
        num_given, num_tokens = self._num_given[rows], self._num_tokens[rows]
        is_new = end_B > num_given  # the row ends with the newest token
        wrong = np.flatnonzero(is_new & ((end_B != num_tokens) | (end_B - 1 > np.maximum(start_B, num_given))))
        if wrong.size:
            b = wrong[0]
            raise ValueError(f"A plan computes up to position {end_B[b]}; only {num_tokens[b]} tokens are known.")
        ids_T = np.empty(int(offset_B[-1]) if len(offset_B) else 0, dtype=np.int64)
        ids_T[offset_B[is_new] - 1] = self._newest[rows[is_new]]
        for b in np.flatnonzero(start_B < num_given).tolist():
            given = sequences[b].ids[start_B[b] : end_B[b]]
            begin = offset_B[b] - (end_B[b] - start_B[b])
            ids_T[begin : begin + len(given)] = given
        return ids_T

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
        if new.adapter_slot != NO_ADAPTER:
            self.adapted.add(new.seq_id)
        row = self._free_rows.pop()  # only now, since the lines above may run out of memory
        self._num_given[row] = self._num_tokens[row] = len(new.token_ids)

    def remove(self, seq_id: int) -> None:
        """Forget a sequence. Unknown ids are ignored: the plan that named the sequence first may have been dropped."""
        sequence = self._sequences.pop(seq_id, None)
        self.adapted.discard(seq_id)
        if sequence is not None:
            self._last = ([], [], self._last[2][:0])
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
        numbers = np.stack([self._num_given, self._num_tokens, self._newest])
        self._num_given, self._num_tokens, self._newest = np.concatenate([numbers, np.zeros_like(numbers)], axis=1)
        self._free_rows = list(range(2 * self._num_rows - 1, self._num_rows - 1, -1))
        self._num_rows *= 2
