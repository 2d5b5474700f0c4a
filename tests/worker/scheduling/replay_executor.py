"""`ReplayExecutor`: a rank made of plain Python for tests of the scheduler: it applies plans and checks every key that a query
reads.

Terms:

    tag            stands for the key of a position in one layer: a digest of all tokens up to the position
    WRONG          the tag of a key that a window repair computes from wrong inputs
    slab           the rank's KV memory (`rank_model.Slab`)
    window repair  a row that computes cached tokens again, so that sliding windows get their keys (`step.StepPlan`)
    entry          in groups of compressed attention, what stands for `ratio` tokens

A query that reads a tag of another prefix, or no content, fails the test. In a window repair some inputs of a layer are missing:
the outputs there are wrong, and so are the keys that the layers above compute from them, as in a model. The executor checks that no
query whose output counts reads a WRONG key.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tests.worker.kvcache.rank_model import RankTable, Slab, prefix_tags
from transom_core.contract import Logprob, LogprobTable, TokenLogprobs, WindowPolicy
from transom_core.kv_cache.groups import GroupKind, GroupSpec
from transom_core.kv_cache.layout import ArenaLayout
from transom_worker.scheduling.step import (
    NO_ID,
    TIER_DEVICE,
    TIER_HOST,
    WHOLE_TABLE,
    NewSequence,
    PolicyQuality,
    StepPlan,
    StepResult,
)

VOCAB_SIZE = 50
WRONG = b"wrong"
ENTRY_KINDS = (GroupKind.COMPRESSED, GroupKind.INDEXER)

Contents = dict[int, tuple[int, dict[int, bytes]]]  # of a block: offset -> (position, tag by layer)


@dataclass
class RankSequence:
    """What the rank knows of one sequence; `tables` and `specs` are by group."""

    new: NewSequence
    token_ids: list[int]
    tables: list[RankTable]
    specs: list[GroupSpec]

    @classmethod
    def of(cls, new: NewSequence, specs: list[GroupSpec]) -> RankSequence:
        policy = new.kv_policy
        num_sinks = [spec.num_sink_blocks for spec in specs]
        if policy is not None:
            num_sinks = [-(-policy.sinks // spec.block_size) for spec in specs]
            if isinstance(policy, WindowPolicy):
                specs = [spec.with_window(sinks=policy.sinks, window=policy.window) for spec in specs]
        tables = [RankTable(num, keeps_aside=new.kv_quality) for num in num_sinks]
        return cls(new, list(new.token_ids), tables, specs)

    def tags(self, end: int) -> list[bytes]:
        """The right tag of each position below `end`: keys depend on the policy, and with a history on the sequence itself."""
        policy = self.new.kv_policy
        root = b"" if policy is None else policy.text.encode()
        if policy is not None and policy.depends_on_history:
            root += self.new.request_id.encode()
        return prefix_tags(self.token_ids[:end], root)


def sampled_token(request_id: str, position: int) -> int:
    """Return the token that every step samples for this request at this output position."""
    return hashlib.sha256(f"{request_id}/{position}".encode()).digest()[0] % VOCAB_SIZE


class ReplayExecutor:
    """Queues the submitted plans; `receive` runs the oldest one and returns its result."""

    def __init__(self, layout: ArenaLayout, *, load_after: Callable[[], int] = lambda: 0) -> None:
        """`load_after` says for each load how many results later it is done; its blocks are copied at the last moment."""
        self.layout = layout
        self.host: list[dict[int, Contents]] = [{} for _ in layout.groups]  # by group and block
        # (ticket, (group, source, target)), in order
        self.loads: deque[tuple[int, list[tuple[int, int, int]]]] = deque()
        self.num_loaded = 0  # blocks that came back from the host tier
        self._load_after = load_after
        self._wait = 0  # results before the oldest load is done
        self.specs = [group.spec for group in layout.groups]
        # (layer, group) pairs, the lowest layer first
        self.layers = sorted((layer, group) for group, spec in enumerate(self.specs) for layer in spec.layers)
        self.slab = Slab(layout)
        self.num_computed = 0  # tokens
        self.num_repaired = 0  # tokens that window repairs computed again
        self.sequences: dict[int, RankSequence] = {}
        self.plans: deque[StepPlan] = deque()
        self.kept: dict[str, dict[int, set[int]]] = {}  # request -> query -> logical blocks that it could read
        self.inputs: dict[str, dict[int, int]] = {}  # request -> position -> input token
        self._last_sampled: dict[int, int] = {}  # row of the step before -> sampled id
        self._last_step = -1
        self._failed_ids: set[int] = set()  # sequence ids that failed plans finished or began

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)

    def fail(self, *, makes_copies: bool = False) -> None:
        """Fail all submitted plans: sequences that they finish are removed, and sequences that they begin are never known."""
        for plan in self.plans:
            if makes_copies:
                self._copy(plan)
            self._last_step = plan.step_id
            self._failed_ids.update(plan.finished, (new.seq_id for new in plan.new_sequences))
            for seq_id in plan.finished:
                self.sequences.pop(seq_id, None)
            for new in plan.new_sequences:
                self.inputs.setdefault(new.request_id, {})
        self.plans.clear()

    def receive(self) -> StepResult:
        plan = self.plans.popleft()
        self._apply_sequences_and_tables(plan)
        result = StepResult(step_id=plan.step_id)
        self._load(result, is_idle=not plan.seq_ids)
        rows: dict[int, int] = {}
        for row, seq_id in enumerate(plan.seq_ids):
            sequence = self.sequences[seq_id]
            self._append_input(plan, row, sequence)
            self._forward(plan, row, sequence)
            self._policy(plan, row, sequence, result)
            self._prompt_logprobs(plan, row, sequence, result)
            if plan.sample[row]:
                end = plan.start[row] + plan.count[row]
                rows[row] = sampled_token(sequence.new.request_id, end - sequence.new.num_prompt_tokens)
                result.sampled_ids.append(rows[row])
        self._last_sampled, self._last_step = rows, plan.step_id
        return result

    def _apply_sequences_and_tables(self, plan: StepPlan) -> None:
        """Apply the plan's finished and new sequences, deltas, moves and block copies, in the order that `StepPlan` prescribes."""
        assert plan.step_id == self._last_step + 1
        for seq_id in plan.finished:
            assert seq_id in self.sequences or seq_id in self._failed_ids
            self.sequences.pop(seq_id, None)
        for new in plan.new_sequences:
            assert new.seq_id not in self.sequences
            self.sequences[new.seq_id] = RankSequence.of(new, self.specs)
        keys = list(zip(plan.delta_seq, plan.delta_group, strict=True))
        assert len(set(keys)) == len(keys)
        for d, (seq_id, group) in enumerate(keys):
            blocks = plan.delta_blocks[plan.delta_offset[d] : plan.delta_offset[d + 1]]
            self.sequences[seq_id].tables[group].apply(plan.delta_dropped[d], blocks, plan.delta_first_block[d])
        for seq_id, group, logical in zip(plan.removed_seq, plan.removed_group, plan.removed_logical, strict=True):
            self.sequences[seq_id].tables[group].remove(logical)
        self._move(plan)
        self._copy(plan)

    def _move(self, plan: StepPlan) -> None:
        moves = zip(plan.moved_seq, plan.moved_group, plan.moved_logical, plan.moved_block, strict=True)
        for seq_id, group, logical, block in moves:
            self.sequences[seq_id].tables[group].replace(logical, block)

    def _copy(self, plan: StepPlan) -> None:
        """Copy blocks in the plan's order; afterwards a target has the contents of its source and nothing else."""
        columns = (plan.copy_group, plan.copy_source, plan.copy_target, plan.copy_source_tier, plan.copy_target_tier)
        tickets = plan.copy_ticket or [0] * len(plan.copy_group)
        for (group, source, target, source_tier, target_tier), ticket in zip(
            zip(*columns, strict=True), tickets, strict=True
        ):
            if ticket:
                assert (source_tier, target_tier) == (TIER_HOST, TIER_DEVICE)
                if not self.loads or self.loads[-1][0] != ticket:
                    self.loads.append((ticket, []))
                    self._wait = self._wait or self._load_after()
                self.loads[-1][1].append((group, source, target))
            elif target_tier == TIER_HOST:
                self.host[group][target] = _copied(self.slab.contents(group, source))
            else:
                self.slab.put(group, target, _copied(self.slab.contents(group, source)))

    def _load(self, result: StepResult, *, is_idle: bool) -> None:
        """Do the oldest load if it is due, or if there is nothing else to wait for, and report it."""
        if not self.loads:
            return
        self._wait -= 1
        if self._wait <= 0 or is_idle:
            ticket, copies = self.loads.popleft()
            for group, source, target in copies:
                # Nothing is there if the copy to the host was in a plan that failed; then nothing may read the target.
                self.slab.put(group, target, _copied(self.host[group].get(source, {})))
                self.num_loaded += 1
            result.loaded.append(ticket)
            result.load_s.append(1e-3)
            self._wait = self._load_after()

    def _append_input(self, plan: StepPlan, row: int, sequence: RankSequence) -> None:
        """Append the row's new input token, and check that a position always has the same token, also after a preemption."""
        end = plan.start[row] + plan.count[row]
        if plan.input_id[row] != NO_ID:
            sequence.token_ids.append(plan.input_id[row])
        elif plan.input_row[row] != NO_ID:
            sequence.token_ids.append(self._last_sampled[plan.input_row[row]])
        assert end <= len(sequence.token_ids)
        seen = self.inputs.setdefault(sequence.new.request_id, {})
        for position in range(plan.start[row], end):
            assert seen.setdefault(position, sequence.token_ids[position]) == sequence.token_ids[position]

    def _forward(self, plan: StepPlan, row: int, sequence: RankSequence) -> None:
        start, end = plan.start[row], plan.start[row] + plan.count[row]
        tags = sequence.tags(end)
        by_token = [group for group, spec in enumerate(self.specs) if not spec.is_state]
        repairs = any(plan.attend_from[group][row] for group in by_token)
        # The repair's end: outputs below it do not count.
        exact_from = max(plan.write_from[group][row] for group in by_token)
        assert repairs or exact_from == start
        self.num_computed += end - start
        self.num_repaired += min(end, exact_from) - start
        wrong: set[int] = set()  # positions whose input to this layer is wrong
        for layer, group in self.layers:
            spec, attend_from = self.specs[group], plan.attend_from[group][row]
            if spec.is_state:
                self._update_state(plan, row, sequence, layer, group)
                continue
            assert not (repairs and spec.keeps_everything) or attend_from == 0
            for position in range(max(start, plan.write_from[group][row]), end):
                for written in _written(spec, position):
                    self._write(layer, group, sequence, written, WRONG if position in wrong else tags[written])
            # Outside of repairs the first and the last query are enough: the first reads the earliest keys, the last the latest.
            queries: Iterable[int] = range(start, end) if repairs else {start, end - 1}
            # Compressor state is read to compute entries, and entries below the repair's end are cached.
            if spec.kind is GroupKind.COMPRESSOR_STATE:
                queries = [query for query in queries if query >= exact_from]
            reads = ((query, self._reads_right(layer, group, sequence, query, tags, attend_from)) for query in queries)
            wrong |= {query for query, right in reads if not right}
            assert repairs or not wrong
        assert all(query < exact_from for query in wrong)

    def _update_state(self, plan: StepPlan, row: int, sequence: RankSequence, layer: int, group: int) -> None:
        """Check the state that a row begins with, and leave the state after its last token."""
        start, blocks = plan.start[row], sequence.tables[group].blocks
        read, written = plan.attend_from[group][row], blocks[plan.write_from[group][row]]
        assert (read == NO_ID) == (start == 0)
        end = start + plan.count[row]
        tags = sequence.tags(end)
        # The group's first layer takes the state's place, so its others find theirs there.
        if layer == self.specs[group].layers[0]:
            if start:
                assert self.slab.at(group, 0, blocks[read]) == (start, tags[start - 1])
            self.slab.write(group, 0, written, (end, tags[-1]))

    def _write(self, layer: int, group: int, sequence: RankSequence, position: int, tag: bytes) -> None:
        """Write a position's key of one layer. The group's first layer removes what the slot had before."""
        block = self._block(group, sequence, position)
        if layer == self.specs[group].layers[0]:
            self.slab.write(group, position, block, (position, {}))
        self.slab.at(group, position, block)[1][layer] = tag

    def _reads_right(
        self, layer: int, group: int, sequence: RankSequence, query: int, tags: list[bytes], attend_from: int
    ) -> bool:
        """Return whether a query reads all keys that it should, and no WRONG one. Fails if it reads a key of another prefix."""
        right = True
        spec = sequence.specs[group]
        own = () if spec.kind in ENTRY_KINDS else ((query, query + 1),)
        for begin, stop in (*spec.live(query), *own):
            for position in range(begin, stop):
                if spec.sinks <= position < attend_from:
                    right = False
                    continue
                if _left_by_history(sequence, group, position):
                    continue
                found, by_layer = self.slab.at(group, position, self._block(group, sequence, position))
                assert found == position
                assert by_layer[layer] in (WRONG, tags[position])
                right &= by_layer[layer] != WRONG
        return right

    def _block(self, group: int, sequence: RankSequence, position: int) -> int:
        """Return the id of the block that has a position."""
        return sequence.tables[group].blocks[position // self.specs[group].block_size]

    def _policy(self, plan: StepPlan, row: int, sequence: RankSequence, result: StepResult) -> None:
        """Check what the plan says of a row with a KV policy, and report its attention mass and its quality."""
        policy, end = sequence.new.kv_policy, plan.start[row] + plan.count[row]
        if policy is None:
            assert not plan.row_window or plan.row_window[row] == plan.measure[row] == 0
            return
        (table,), block_size = sequence.tables, self.specs[0].block_size
        assert plan.row_sinks[row] == policy.sinks
        assert plan.row_window[row] == (policy.window if isinstance(policy, WindowPolicy) else WHOLE_TABLE)
        assert plan.wants_mass[row] == policy.depends_on_history
        if policy.depends_on_history:
            self.kept.setdefault(sequence.new.request_id, {}).update(
                {query: set(table.blocks) for query in range(plan.start[row], end)}
            )
            tags = sequence.tags(end)
            result.attention_mass[row] = [
                sum(block_mass(tags[query], b) for query in range(plan.start[row], end) if b * block_size <= query)
                for b in table.blocks
            ]
        if plan.measure[row]:
            assert plan.count[row] == 1
            everything, tags = table.blocks | table.aside, sequence.tags(end)
            for position in range(end):
                found, by_layer = self.slab.at(0, position, everything[position // block_size])
                assert found == position
                assert set(by_layer.values()) == {tags[position]}
            result.quality[row] = PolicyQuality(0.5, True, 0.25)

    def _prompt_logprobs(self, plan: StepPlan, row: int, sequence: RankSequence, result: StepResult) -> None:
        end = min(plan.start[row] + plan.count[row], sequence.new.num_prompt_tokens - 1)
        if sequence.new.params.prompt_logprobs is not None and plan.logits_from[row] < end:
            result.prompt_logprobs[row] = LogprobTable.of(
                TokenLogprobs(Logprob(sequence.token_ids[position + 1], -float(position), 1))
                for position in range(plan.logits_from[row], end)
            )


def _written(spec: GroupSpec, position: int) -> range:
    """Return the positions that are written when this one is computed: itself, or those of the entry that it completes, if any."""
    if spec.kind not in ENTRY_KINDS:
        return range(position, position + 1)
    return range(position + 1 - spec.ratio if (position + 1) % spec.ratio == 0 else position + 1, position + 1)


def block_mass(tag: bytes, logical: int) -> float:
    """The attention that a query with this tag pays to a block: an invention that every sum of is exact."""
    return hashlib.sha256(tag + logical.to_bytes(4, "little")).digest()[0] % 16 / 64


def _left_by_history(sequence: RankSequence, group: int, position: int) -> bool:
    """Whether a policy that depends on history may have removed the position's block."""
    policy = sequence.new.kv_policy
    if policy is None or not policy.depends_on_history:
        return False
    return position // sequence.specs[group].block_size not in sequence.tables[group].blocks


def _copied(contents: Contents) -> Contents:
    """Return a copy whose tags later writes do not change."""
    return {
        offset: (position, dict(tags) if isinstance(tags, dict) else tags)
        for offset, (position, tags) in contents.items()
    }
