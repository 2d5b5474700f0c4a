"""A rank made of plain Python: replays plans on its own tables and a slab of tags, and checks every key that would be read.

Each layer's keys are tags of the prefix that they were computed from, or WRONG where a window repair could not compute them:
what a replay leaves wrong spreads upwards from layer to layer, as it would in a model.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field

from transom_worker.contract import Logprob, TokenLogprobs
from transom_worker.kvcache.groups import GroupKind, GroupSpec
from transom_worker.kvcache.layout import ArenaLayout
from transom_worker.scheduling.step import NO_ID, NewSequence, StepPlan, StepResult

VOCABULARY = 50
WRONG = b"wrong"
ENTRIES = (GroupKind.COMPRESSED, GroupKind.INDEXER)

Content = tuple[int, dict[int, bytes]]  # position, tag by layer


@dataclass
class RankTable:
    sink_blocks: list[int] = field(default_factory=list)
    run: list[int] = field(default_factory=list)
    first_block: int = 0

    def at(self, logical: int, num_sink_blocks: int) -> int:
        assert logical < num_sink_blocks or logical >= self.first_block
        return self.sink_blocks[logical] if logical < num_sink_blocks else self.run[logical - self.first_block]

    def replace(self, logical: int, block: int, num_sink_blocks: int) -> None:
        self.at(logical, num_sink_blocks)  # must be there
        if logical < num_sink_blocks:
            self.sink_blocks[logical] = block
        else:
            self.run[logical - self.first_block] = block


@dataclass
class RankSequence:
    new: NewSequence
    token_ids: list[int]
    tables: list[RankTable]


def sampled_token(request_id: str, position: int) -> int:
    """What any executor answers for this request at this output position."""
    return hashlib.sha256(f"{request_id}/{position}".encode()).digest()[0] % VOCABULARY


class ReplayExecutor:
    """Slab contents are (position, prefix digest): a key is right only if it was computed from the same prefix."""

    def __init__(self, layout: ArenaLayout) -> None:
        self.layout = layout
        self.specs = [group.spec for group in layout.groups]
        self.writer: dict[int, int] = {}  # page -> the group that wrote last; bytes of others there are gone
        self.layers = sorted((layer, group) for group, spec in enumerate(self.specs) for layer in spec.layers)
        self.slab: list[dict[tuple[int, int], Content]] = [{} for _ in layout.groups]
        self.num_computed = 0  # tokens
        self.num_repaired = 0  # those of them that were there before, but for their windows
        self.sequences: dict[int, RankSequence] = {}
        self.plans: deque[StepPlan] = deque()
        self.inputs: dict[str, dict[int, int]] = {}  # request -> position -> input token
        self._last_row: dict[int, int] = {}  # row of the step before -> sampled id
        self._last_step = -1
        self._forgotten: set[int] = set()  # named by plans that never ran

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)

    def fail(self) -> None:
        """All waiting plans come to nothing; sequences that they end are forgotten, those that they begin never were."""
        for plan in self.plans:
            self._last_step = plan.step_id
            self._forgotten.update(plan.finished, (new.seq_id for new in plan.new_sequences))
            for seq_id in plan.finished:
                self.sequences.pop(seq_id, None)
            for new in plan.new_sequences:
                self.inputs.setdefault(new.request_id, {})
        self.plans.clear()

    def receive(self) -> StepResult:
        plan = self.plans.popleft()
        self._change(plan)
        result = StepResult(step_id=plan.step_id)
        rows: dict[int, int] = {}
        for row, seq_id in enumerate(plan.seq_ids):
            sequence = self.sequences[seq_id]
            self._input(plan, row, sequence)
            self._forward(plan, row, sequence)
            self._prompt_logprobs(plan, row, sequence, result)
            if plan.sample[row]:
                end = plan.start[row] + plan.count[row]
                rows[row] = sampled_token(sequence.new.request_id, end - sequence.new.num_prompt_tokens)
                result.sampled_ids.append(rows[row])
        self._last_row, self._last_step = rows, plan.step_id
        return result

    def _change(self, plan: StepPlan) -> None:
        assert plan.step_id == self._last_step + 1
        for seq_id in plan.finished:
            assert seq_id in self.sequences or seq_id in self._forgotten
            self.sequences.pop(seq_id, None)
        for new in plan.new_sequences:
            assert new.seq_id not in self.sequences
            self.sequences[new.seq_id] = RankSequence(new, list(new.token_ids), [RankTable() for _ in self.specs])
        keys = list(zip(plan.delta_seq, plan.delta_group, strict=True))
        assert len(set(keys)) == len(keys)
        for d, (seq_id, group) in enumerate(keys):
            table = self.sequences[seq_id].tables[group]
            blocks = plan.delta_blocks[plan.delta_offset[d] : plan.delta_offset[d + 1]]
            assert plan.delta_dropped[d] <= len(table.run)
            del table.run[: plan.delta_dropped[d]]
            missing = self.specs[group].num_sink_blocks - len(table.sink_blocks)
            table.sink_blocks += blocks[:missing]
            table.run += blocks[missing:]
            table.first_block = plan.delta_first_block[d]
        self._move(plan)
        self._copy(plan)

    def _move(self, plan: StepPlan) -> None:
        moves = zip(plan.moved_seq, plan.moved_group, plan.moved_logical, plan.moved_block, strict=True)
        for seq_id, group, logical, block in moves:
            self.sequences[seq_id].tables[group].replace(logical, block, self.specs[group].num_sink_blocks)

    def _copy(self, plan: StepPlan) -> None:
        """In order; a target holds what its source held and nothing else."""
        for group, source, target in zip(plan.copy_group, plan.copy_source, plan.copy_target, strict=True):
            self._claim(group, target)
            contents = [self.slab[group].get((source, offset)) for offset in range(self.specs[group].block_size)]
            for offset, content in enumerate(contents):
                self.slab[group].pop((target, offset), None)
                if content is not None:
                    self.slab[group][target, offset] = content

    def _claim(self, group: int, block: int) -> None:
        page = block * self.layout.groups[group].stride_bytes // self.layout.page_bytes
        before = self.writer.setdefault(page, group)
        if before != group:
            self.writer[page] = group
            ids = range(self.layout.first_block(page, before), self.layout.end_block(page, before))
            for key in [key for key in self.slab[before] if key[0] in ids]:
                del self.slab[before][key]

    def _input(self, plan: StepPlan, row: int, sequence: RankSequence) -> None:
        end = plan.start[row] + plan.count[row]
        if plan.input_id[row] != NO_ID:
            sequence.token_ids.append(plan.input_id[row])
        elif plan.input_row[row] != NO_ID:
            sequence.token_ids.append(self._last_row[plan.input_row[row]])
        assert end <= len(sequence.token_ids)
        seen = self.inputs.setdefault(sequence.new.request_id, {})
        for position in range(plan.start[row], end):
            assert seen.setdefault(position, sequence.token_ids[position]) == sequence.token_ids[position]

    def _forward(self, plan: StepPlan, row: int, sequence: RankSequence) -> None:
        start, end = plan.start[row], plan.start[row] + plan.count[row]
        tags = _tags(sequence.token_ids[:end])
        replays = any(bounds[row] for bounds in plan.attend_from)
        exact_from = max(bounds[row] for bounds in plan.write_from)  # no query reads outputs below it
        assert replays or exact_from == start
        self.num_computed += end - start
        self.num_repaired += min(end, exact_from) - start
        wrong: set[int] = set()  # positions whose input to this layer is wrong
        for layer, group in self.layers:
            spec, attend_from = self.specs[group], plan.attend_from[group][row]
            assert not (replays and spec.keeps_everything) or attend_from == 0
            for position in range(max(start, plan.write_from[group][row]), end):
                for written in _written(spec, position):
                    self._write(layer, group, sequence, written, WRONG if position in wrong else tags[written])
            queries = range(start, end) if replays else {start, end - 1}
            if (
                spec.kind is GroupKind.COMPRESSOR_STATE
            ):  # read for entries alone, which are there below the replay's end
                queries = [query for query in queries if query >= exact_from]
            reads = ((query, self._read(layer, group, sequence, query, tags, attend_from)) for query in queries)
            wrong |= {query for query, right in reads if not right}
            assert replays or not wrong
        assert all(query < exact_from for query in wrong)

    def _write(self, layer: int, group: int, sequence: RankSequence, position: int, tag: bytes) -> None:
        slot = self._slot(group, sequence, position)
        self._claim(group, slot[0])
        if layer == self.specs[group].layers[0]:
            self.slab[group][slot] = (position, {})
        self.slab[group][slot][1][layer] = tag

    def _read(
        self, layer: int, group: int, sequence: RankSequence, query: int, tags: list[bytes], attend_from: int
    ) -> bool:
        """Whether the query reads all keys that it should, and none that a repair left wrong; a key of another prefix is an
        error.
        """
        right = True
        spec = self.specs[group]
        own = () if spec.kind in ENTRIES else ((query, query + 1),)
        for begin, stop in (*spec.live(query), *own):
            for position in range(begin, stop):
                if spec.sinks <= position < attend_from:
                    right = False
                    continue
                found, by_layer = self.slab[group][self._slot(group, sequence, position)]
                assert found == position
                assert by_layer[layer] in (WRONG, tags[position])
                right &= by_layer[layer] != WRONG
        return right

    def _slot(self, group: int, sequence: RankSequence, position: int) -> tuple[int, int]:
        spec = self.specs[group]
        block = sequence.tables[group].at(position // spec.block_size, spec.num_sink_blocks)
        return block, position % spec.block_size

    def _prompt_logprobs(self, plan: StepPlan, row: int, sequence: RankSequence, result: StepResult) -> None:
        end = min(plan.start[row] + plan.count[row], sequence.new.num_prompt_tokens - 1)
        if sequence.new.params.prompt_logprobs is not None and plan.logits_from[row] < end:
            result.prompt_logprobs[row] = [
                TokenLogprobs(Logprob(sequence.token_ids[position + 1], -float(position), 1))
                for position in range(plan.logits_from[row], end)
            ]


def _written(spec: GroupSpec, position: int) -> range:
    """Positions whose content comes with this one: its own, or those of the entry that it completes."""
    if spec.kind not in ENTRIES:
        return range(position, position + 1)
    return range(position + 1 - spec.ratio if (position + 1) % spec.ratio == 0 else position + 1, position + 1)


def _tags(token_ids: list[int]) -> list[bytes]:
    digest = hashlib.sha256()
    tags = []
    for token in token_ids:
        digest.update(token.to_bytes(4, "little"))
        tags.append(digest.digest()[:8])
    return tags
