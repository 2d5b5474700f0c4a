"""`PlanBuilder`: fills one `StepPlan` row by row, and advances the counters of the sequences that the plan computes.

Terms, as `step.StepPlan` uses them:

    row            one sequence's part of the step: it computes the tokens `[start, start + count)`
    pending token  a token that a step in flight (planned, not answered) samples; its id is not known yet
    block table    the block ids of a sequence in one KV cache group; the ranks keep copies of the tables
    delta          how a block table grew and shrank since the ranks were last told
    move           another id for a block of a table, which compaction (moving blocks together to clear pages) has copied there
    window repair  a row that computes cached tokens again, so that sliding windows get their blocks
    KV policy      a request's own rule for which keys and values it keeps and reads
    grammar        a request's grammar decides which tokens its sequence may sample; the engine computes their mask
    sliding group  a KV cache group with a window, chunk or compressor state; the others keep every token

    builder = PlanBuilder(step_id, ...)
    builder.introduce(sequence)                 # only if the ranks do not know it
    for index, sequence in builder.add_decodes(running, ...):
        builder.add_row(sequence, blocks, count)    # for each sequence of the step that does more than decode
    plan = builder.finish(finished, copies)
"""

from collections.abc import Iterable, Iterator, Mapping

from transom_core.contract import WindowPolicy
from transom_core.kv_cache.retention_set import RetentionSet
from transom_worker.kvcache.blocks.block_copies import BlockCopy
from transom_worker.kvcache.blocks.block_table import StateTable
from transom_worker.kvcache.blocks.sequence_blocks import SequenceBlocks
from transom_worker.scheduling.sequence import Sequence
from transom_worker.scheduling.step import NO_ID, TIER_DISK, WHOLE_TABLE, NewSequence, StepPlan
from transom_worker.scheduling.step_budget import StepBudget
from transom_worker.scheduling.work_counts import WorkCounts

MEASURED_PERIOD = 13
"""Of a sequence with `kv_quality`, one token in this many is compared with full attention. No block size is a multiple of it, so
that tokens at all positions inside blocks are compared."""


class PlanBuilder:
    """Collects what one step computes. `retentions` has one `Retention` per KV cache group."""

    def __init__(self, step_id: int, retentions: RetentionSet, work: WorkCounts) -> None:
        self.plan = StepPlan(step_id=step_id)
        self.rows: list[Sequence] = []
        self.grammar_rows: list[tuple[int, str]] = []  # among the rows that sample: number and request id
        self._num_not_sampling = 0  # rows that sample no token
        self._columns: list[tuple[int, ...]] = []  # one tuple per row; `finish` turns them into the plan's arrays
        self._retentions = retentions
        self._work = work
        self._policy_rows: list[tuple[int, Sequence]] = []  # rows of sequences with a KV policy
        self._repairing_rows: list[tuple[int, SequenceBlocks]] = []  # rows that begin inside a window repair

    def introduce(self, sequence: Sequence) -> None:
        """Add an admitted sequence, with all its known tokens, to the plan's new sequences."""
        request = sequence.request
        num_tokens = sequence.num_tokens_on_ranks = len(sequence.token_ids)
        is_prompt = num_tokens == request.num_prompt_tokens
        self.plan.new_sequences.append(
            NewSequence(
                seq_id=sequence.seq_id,
                request_id=request.request_id,
                token_ids=request.prompt_token_ids if is_prompt else tuple(sequence.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                params=request.params,
                seed=request.seed,
                choice_index=request.choice_index,
                kv_policy=request.kv_policy,
                kv_quality=request.kv_quality,
                adapter_slot=sequence.adapter_slot,
            )
        )

    def add_decodes(
        self, running: Iterable[Sequence], budget: StepBudget, shares: Mapping[Sequence, int] | None
    ) -> Iterator[tuple[int, Sequence]]:
        """Add the rows of sequences that only decode (`Sequence.decodes_until`), and yield each other sequence in its turn with its
        index, until the budget has no token left. `shares` are those of `StepShares.of_step`.

        This saves time, since most rows of most steps only decode: they need neither blocks nor deltas. The budget of extra blocks
        does not matter for them, because at most two tokens of such a sequence are in flight.
        """
        rows, columns, step_id = self.rows, self._columns, self.plan.step_id
        for index, sequence in enumerate(running):
            if budget.num_tokens <= 0:
                return
            start, blocks = sequence.scheduled, sequence.blocks
            if (
                start >= sequence.decodes_until
                or blocks is None
                or blocks.tables_changed
                or start > blocks.processed + 1
                or (shares is not None and not shares.get(sequence, 1))
            ):
                yield index, sequence
                continue
            budget.num_tokens -= 1
            pending = sequence.num_pending  # and `_new_input`, written out: a call less for each row
            assert not pending or sequence.sampled_step == step_id - 1
            input_id, input_row = (NO_ID, sequence.sampled_row) if pending else (sequence.token_ids[-1], NO_ID)
            sequence.sampled_step, sequence.sampled_row = step_id, len(rows)
            sequence.num_pending = pending + 1
            sequence.num_in_flight += 1
            sequence.scheduled = sequence.num_tokens_on_ranks = start + 1
            columns.append((sequence.seq_id, start, 1, input_id, input_row, start, 1))
            rows.append(sequence)

    def add_row(self, sequence: Sequence, blocks: SequenceBlocks, count: int) -> None:
        """Add a row that computes the next `count` tokens of a sequence, whose KV blocks are allocated."""
        start = sequence.scheduled
        end = start + count
        pending = sequence.num_pending
        samples = end == len(sequence.token_ids) + pending
        logits_from = end
        # The row's last input token, if the ranks do not know it: its id, or the row of the previous step that samples it.
        input_id = input_row = NO_ID
        if end > sequence.num_tokens_on_ranks:
            input_id, input_row = self._new_input(sequence)
            sequence.num_tokens_on_ranks = end
        # Block tables and counters.
        if blocks.tables_changed:
            self._add_deltas(sequence.seq_id, blocks)
        if start < sequence.decode_from:
            self._work.row_before_decode(sequence, blocks, start, end)
        if start < blocks.repair.end:
            self._repairing_rows.append((len(self.rows), blocks))
        if sequence.request.kv_policy is not None:
            self._policy_rows.append((len(self.rows), sequence))
        # Which positions need logits.
        if samples:
            sequence.sampled_step, sequence.sampled_row = self.plan.step_id, len(self.rows)
            sequence.num_pending = pending + 1
            logits_from = end - 1
            if sequence.request.grammar is not None:
                self.grammar_rows.append((len(self.rows) - self._num_not_sampling, sequence.request.request_id))
            elif sequence.request.kv_policy is None and end >= sequence.decode_from:
                sequence.decodes_until = min(blocks.capacity_tokens, sequence.max_tokens_total - 1)
        else:
            self._num_not_sampling += 1
        if not sequence.has_output and sequence.wants_prompt_logprobs and start < sequence.num_prompt_tokens - 1:
            logits_from = start
        if (pooling := sequence.request.params.pooling) is not None and not sequence.has_output:
            logits_from = start if pooling == "mean" else logits_from
            self.plan.keeps_hidden = True
        self._columns.append((sequence.seq_id, start, count, input_id, input_row, logits_from, int(samples)))
        sequence.scheduled = end
        sequence.num_in_flight += 1
        self.rows.append(sequence)

    def _new_input(self, sequence: Sequence) -> tuple[int, int]:
        """Return the newest token of a sequence as a row's (`input_id`, `input_row`)."""
        if not sequence.num_pending:
            return sequence.token_ids[-1], NO_ID
        assert sequence.sampled_step == self.plan.step_id - 1
        return NO_ID, sequence.sampled_row

    def finish(self, finished: list[int], copies: list[BlockCopy]) -> StepPlan:
        """Return the complete plan; `finished` are ids of released sequences, `copies` the block copies."""
        plan = self.plan
        plan.finished = finished
        columns = [list(column) for column in zip(*self._columns, strict=True)] or [[] for _ in range(7)]
        plan.seq_ids, plan.start, plan.count, plan.input_id, plan.input_row, plan.logits_from, plan.sample = columns
        if copies:
            self._add_moves()
        plan.attend_from = [[0] * len(plan.seq_ids) for _ in self._retentions]
        plan.write_from = [plan.start.copy() for _ in self._retentions]
        self._add_states()
        for row, blocks in self._repairing_rows:
            self._bound_repair(row, blocks)
        if self._policy_rows:
            self._add_policies()
        for copy in copies:
            self._add_copy(copy)
        return plan

    def _add_states(self) -> None:
        """Set which block's state each row begins with, and in which block it leaves its own."""
        for group, retention in enumerate(self._retentions):
            if not retention.spec.is_state:
                continue
            for row, (sequence, start) in enumerate(zip(self.rows, self.plan.start, strict=True)):
                table = sequence.blocks.tables[group] if sequence.blocks is not None else None
                assert isinstance(table, StateTable)
                read = table.read_by(start)
                self.plan.attend_from[group][row] = NO_ID if read is None else read
                self.plan.write_from[group][row] = table.written_by(start)

    def _add_copy(self, copy: BlockCopy) -> None:
        """Add a block copy. Its end on the disk, if any, is an index into `disk_digests` instead of a block id."""
        plan, source, target = self.plan, copy.source, copy.target
        if TIER_DISK in (copy.source_tier, copy.target_tier):
            index = len(plan.disk_digests)
            plan.disk_digests.append(copy.digest)
            source, target = (index, target) if copy.source_tier == TIER_DISK else (source, index)
        plan.copy_group.append(copy.group)
        plan.copy_source.append(source)
        plan.copy_target.append(target)
        plan.copy_source_tier.append(copy.source_tier)
        plan.copy_target_tier.append(copy.target_tier)
        plan.copy_ticket.append(copy.ticket)

    def _bound_repair(self, row: int, blocks: SequenceBlocks) -> None:
        """Set what a row inside a window repair reads and writes, by group.

        Below the repair's end, groups that keep everything read the cache and write nothing. Sliding groups have only their
        sink blocks (first blocks, which hold attention sinks) in the cache, and no other blocks below the repair's start.
        """
        start = self.plan.start[row]
        for group, retention in enumerate(self._retentions):
            cached = blocks.repair.end
            if not retention.keeps_everything:
                cached = min(cached, retention.num_sink_blocks * retention.block_size)
                self.plan.attend_from[group][row] = blocks.repair.start
            self.plan.write_from[group][row] = max(start, cached)

    def _add_policies(self) -> None:
        """Set what the rows of sequences with a KV policy read, and what the ranks report of them."""
        plan = self.plan
        plan.row_window, plan.row_sinks, plan.wants_mass, plan.measure = ([0] * len(self.rows) for _ in range(4))
        for row, sequence in self._policy_rows:
            request = sequence.request
            policy = request.kv_policy
            assert policy is not None
            plan.row_window[row] = policy.window if isinstance(policy, WindowPolicy) else WHOLE_TABLE
            plan.row_sinks[row] = policy.sinks
            plan.wants_mass[row] = int(policy.depends_on_history)
            is_measured = request.kv_quality and plan.count[row] == 1 and plan.start[row] % MEASURED_PERIOD == 0
            plan.measure[row] = int(is_measured)

    def _add_moves(self) -> None:
        """Add the moves of this plan's sequences, since compaction may run after a row was added.

        The moves of other sequences are added to the plan that has their next row.
        """
        for sequence in self.rows:
            assert sequence.blocks is not None
            self._add_moves_of(sequence.seq_id, sequence.blocks)

    def _add_deltas(self, seq_id: int, blocks: SequenceBlocks) -> None:
        """Add what changed in a sequence's block tables since the ranks were last told."""
        plan = self.plan
        for group, delta in blocks.take_deltas():
            plan.delta_seq.append(seq_id)
            plan.delta_group.append(group)
            plan.delta_dropped.append(delta.dropped)
            plan.delta_first_block.append(delta.first_block)
            plan.delta_blocks += delta.appended
            plan.delta_offset.append(len(plan.delta_blocks))
        for group, logical in blocks.take_removed():
            plan.removed_seq.append(seq_id)
            plan.removed_group.append(group)
            plan.removed_logical.append(logical)
        self._add_moves_of(seq_id, blocks)

    def _add_moves_of(self, seq_id: int, blocks: SequenceBlocks) -> None:
        """Add the moves of one sequence's blocks since the ranks were last told."""
        plan = self.plan
        for group, table in enumerate(blocks.tables):
            for logical, block in table.take_moves():
                plan.moved_seq.append(seq_id)
                plan.moved_group.append(group)
                plan.moved_logical.append(logical)
                plan.moved_block.append(block)
