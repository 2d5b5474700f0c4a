"""Takes snapshots for the block map on the engine's thread: the cache's changes, the sequences with blocks, and the newest events.

A block table grows at its end and shrinks at its front, so a snapshot has only the blocks that were appended since the last
snapshot. Compaction (moving blocks together to clear pages) changes tables in the middle, so the snapshot after it has whole
tables. Tables with gaps, from which KV policies remove blocks anywhere, are short, and a snapshot always has them whole; so are
those of recurrent layers' states.

With a host tier a snapshot also has the *swapped* sequences: they were preempted, and all their blocks are in the host tier.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from transom_core.clock import steady_time_s
from transom_worker.kvcache.blocks.block_table import BlockTable, GappedBlockTable, StateTable
from transom_worker.kvcache.blocks.sequence_blocks import SequenceBlocks
from transom_worker.kvcache.cache_snapshot import CacheSnapshot
from transom_worker.kvcache.prefix.prefix_outcome import HIT, REPAIRED
from transom_worker.scheduling.scheduler import Scheduler
from transom_worker.scheduling.sequence import Sequence as ScheduledSequence, SequenceStatus
from transom_worker.telemetry.blockmap.log import BlockMapLog, MapEvent

SWAPPED_PHASE = "swapped"


class TablePieces(NamedTuple):
    """One block table: its bounds, and the blocks that no earlier snapshot had, as pieces of (first logical index, blocks)."""

    is_new: bool  # the pieces are the whole table
    num_sink_blocks: int  # blocks of sink tokens, from logical index 0 on, which never slide out
    first_block: int  # logical index of the first block after the sink blocks
    pieces: list[tuple[int, list[int]]]
    # (logical index, block) of blocks that a KV policy dropped and that are kept so that the policy can be measured.
    aside: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSnapshot:
    """One sequence with blocks. `replay` is the token range that its window repair computes; None if none is under way."""

    seq_id: int
    request_id: str
    phase: str
    processed: int
    num_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    replay: tuple[int, int] | None
    tables: list[TablePieces]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of cache and sequences at one moment between two steps."""

    time_s: float
    cache: CacheSnapshot
    sequences: list[SequenceSnapshot]
    num_running: int
    num_waiting: int
    totals: dict[str, int]
    events: list[MapEvent]
    num_dropped_events: int


class SnapshotTaker:
    """Takes snapshots of one scheduler. Call `begin`, then have `cache` copy each group and the host tier. After that, each `take`
    returns the changes since the last one.

    The engine's thread calls all methods.
    """

    def __init__(self, scheduler: Scheduler, log: BlockMapLog) -> None:
        self.cache = scheduler.cache.snapshots
        self._scheduler = scheduler
        self._log = log
        # Sequence id -> by group: the logical index up to which snapshots have had its table.
        self._ends: dict[int, list[int]] = {}
        self._num_compacted = 0

    def begin(self) -> None:
        """Begin to record changes: there is a watcher."""
        self.cache.begin()
        self._log.begin()

    def take(self) -> Snapshot:
        """Take a snapshot."""
        scheduler = self._scheduler
        cache = self.cache.take()
        if cache.num_compacted != self._num_compacted:
            self._ends, self._num_compacted = {}, cache.num_compacted
        sequences = [self._sequence(sequence) for sequence in scheduler.sequences_with_blocks()]
        if cache.host is not None:
            for one in scheduler.by_request.values():
                if one.swapped is not None:
                    nothing = [TablePieces(True, 0, 0, []) for _ in one.swapped.tables]
                    sequences.append(_snapshot(one, one.swapped, nothing, phase=SWAPPED_PHASE))
        present = {sequence.seq_id for sequence in sequences}
        self._ends = {seq_id: ends for seq_id, ends in self._ends.items() if seq_id in present}
        events, num_dropped = self._log.take()
        return Snapshot(
            time_s=steady_time_s(),
            cache=cache,
            sequences=sequences,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            totals=self._totals(cache),
            events=events,
            num_dropped_events=num_dropped,
        )

    def end(self) -> None:
        """Stop recording changes: the last watcher has left."""
        self.cache.end()
        self._log.end()

    def _sequence(self, sequence: ScheduledSequence) -> SequenceSnapshot:
        blocks = sequence.blocks
        assert blocks is not None
        ends = self._ends.get(sequence.seq_id)
        is_new = ends is None
        if ends is None:
            ends = self._ends[sequence.seq_id] = [0] * len(blocks.tables)
        tables = []
        for group, table in enumerate(blocks.tables):
            tables.append(_pieces(table, ends[group], is_new=is_new))
            ends[group] = table.end_block
        replays = blocks.processed < blocks.repair.end
        snapshot = _snapshot(sequence, blocks, tables, phase=_phase(sequence, blocks.processed, replays=replays))
        return replace(snapshot, replay=(blocks.repair.start, blocks.repair.end)) if replays else snapshot

    def _totals(self, cache: CacheSnapshot) -> dict[str, int]:
        scheduler = self._scheduler
        tokens = cache.outcome_tokens
        host = {} if cache.host is None else cache.host.moves
        moves = {f"{name}_blocks": sum(counts) for name, counts in host.items()}
        return moves | {
            "hit_tokens": tokens.get(HIT, 0),
            "repaired_tokens": tokens.get(REPAIRED, 0),
            "missed_tokens": sum(count for name, count in tokens.items() if name not in (HIT, REPAIRED)),
            "evicted_blocks": sum(sum(group.num_evicted.values()) for group in cache.groups),
            "preemptions": sum(scheduler.work.preemptions.values()),
            "repairs": cache.num_repairs,
        }


def _snapshot(
    sequence: ScheduledSequence, blocks: SequenceBlocks, tables: list[TablePieces], *, phase: str
) -> SequenceSnapshot:
    return SequenceSnapshot(
        seq_id=sequence.seq_id,
        request_id=sequence.request.request_id,
        phase=phase,
        processed=blocks.processed,
        num_tokens=len(sequence.token_ids),
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_cached_tokens=sequence.num_cached_tokens,
        replay=None,
        tables=tables,
    )


def _phase(sequence: ScheduledSequence, processed: int, *, replays: bool) -> str:
    if sequence.status is SequenceStatus.LOADING:
        return "loading"
    if sequence.status is not SequenceStatus.RUNNING:
        return "leaving"
    if replays:
        return "repair"
    return "decode" if len(sequence.token_ids) - processed <= 1 and sequence.has_output else "prefill"


def _pieces(table: BlockTable, num_known: int, *, is_new: bool) -> TablePieces:
    if isinstance(table, GappedBlockTable):
        return _all_pieces(table)
    if isinstance(table, StateTable):
        return TablePieces(True, 0, 0, [(at, [block]) for at, block in zip(table.places, table.run, strict=True)])
    num_sink_blocks, first_block = len(table.sink_blocks), table.first_block
    pieces = []
    if num_known < num_sink_blocks:
        pieces.append((num_known, table.sink_blocks[num_known:]))
    begin = max(num_known, first_block)
    if begin < first_block + len(table.run):
        pieces.append((begin, table.run[begin - first_block :]))
    return TablePieces(is_new, num_sink_blocks, first_block, pieces)


def _all_pieces(table: GappedBlockTable) -> TablePieces:
    pieces = [(0, table.sink_blocks)] if table.sink_blocks else []
    for logical, block in zip(table.run_logicals, table.run, strict=True):
        if len(pieces) > 1 and logical == pieces[-1][0] + len(pieces[-1][1]):
            pieces[-1][1].append(block)
        else:
            pieces.append((logical, [block]))
    return TablePieces(True, len(table.sink_blocks), table.first_block, pieces, tuple(table.aside.items()))
