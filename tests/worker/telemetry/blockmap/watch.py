"""A watcher of a scheduler's blocks, without threads, and what it must see, found by asking the cache block by block."""

import random
from collections.abc import Callable
from typing import Any

from tests.block_map_decoder import ACTIVE, EMPTY, EVICTED, GONE, HELD, LOOSE, REPAIR, Block, Map, decode
from transom_core.kv_cache.tiers import DEVICE
from transom_worker.kvcache.blocks.block_table import BlockTable, StateTable
from transom_worker.scheduling.scheduler import Scheduler
from transom_worker.scheduling.sequence import SequenceStatus
from transom_worker.telemetry.blockmap.describe import describe_block
from transom_worker.telemetry.blockmap.encoder import Encoder, WorkerIdentity
from transom_worker.telemetry.blockmap.log import BlockMapLog
from transom_worker.telemetry.blockmap.snapshot import SnapshotTaker

COUNTED = {"held": HELD, "loose": LOOSE, "empty": EMPTY}
STATE_NAMES = {ACTIVE: "active", REPAIR: "repair", **{state: name for name, state in COUNTED.items()}}


class Watch:
    """A watcher of a driver's scheduler, without threads."""

    def __init__(self, scheduler: Scheduler, between: Callable[[], object] = lambda: None) -> None:
        self.scheduler = scheduler
        self.log = BlockMapLog()
        scheduler.admission.listeners.append(self.log)
        self.snapshots = SnapshotTaker(scheduler, self.log)
        host = self.snapshots.cache.host
        self.encoder = Encoder(
            WorkerIdentity("w", "m"), scheduler.cache.layout, self.log.history, None if host is None else host.layout
        )
        self.map = Map()
        self.number = 0
        self.snapshots.begin()
        for group in range(len(scheduler.cache.layout.groups)):
            self.encoder.start(group, self.snapshots.cache.copy(group))
            between()  # the engine runs meanwhile
        if host is not None:
            for pages in host.pieces:
                self.encoder.start_host(host.copy(pages))
                between()
        self.states: set[int] = set()  # ever shown
        self.host_states: set[int] = set()
        self.needs: set[str] = set()  # what ever needed a described host block: checkpoints by kind, and sequences

    def look(self) -> Map:
        first = not self.number
        frame = self.encoder.update(self.snapshots.take())
        if first:  # what happened before is in the totals alone
            self.before = dict(decode(frame.numbered(0)).header["totals"])
            frame = self.encoder.whole(0.0)
        self.map.take(frame.numbered(self.number))
        self.states |= {block.state for block in self.map.blocks.values()}
        self.host_states |= set(self.map.host_blocks.values())
        self.number += 1
        return self.map


def plain(scheduler: Scheduler) -> dict[tuple[int, int], Block]:
    """What a map without evictions must show, asked block by block."""
    cache = scheduler.cache
    logical: dict[tuple[int, int], int] = {}
    repaired = set()
    for sequence in scheduler.sequences_with_blocks():
        blocks = sequence.blocks
        assert blocks is not None
        for group, table in enumerate(blocks.tables):
            for index, block in held(table).items():
                assert logical.setdefault((group, block), index) == index
            logical |= {(group, block): index for index, block in table.aside.items()}
            if blocks.processed < blocks.repair.end and not cache.retentions[group].keeps_everything:
                repaired |= {(group, block) for block in table.run}
    shown = {}
    for page, owner in enumerate(cache.arena.owner):
        for block in cache.arena.blocks(page, owner) if owner >= 0 else ():
            pool = cache.pools[owner]
            name = pool.published.get(block)
            if pool.refs[block]:
                state = REPAIR if (owner, block) in repaired else ACTIVE
            else:
                state = HELD if pool.pins[block] else LOOSE if name else EMPTY
            digest = int.from_bytes(name[0][:4], "big") if name else 0
            at = logical.get((owner, block), name[1] if name else None)
            shown[owner, block] = Block(state, pool.refs[block], at, digest, None)
    return shown


def without_logical_of_others(
    scheduler: Scheduler, shown: dict[tuple[int, int], Block]
) -> dict[tuple[int, int], Block]:
    """A map without the logical indices of blocks that only exports and ended requests' loads hold: no table has them, and what
    the map says of them is what was true before.
    """
    cache = scheduler.cache
    lent = {
        (one.group, one.block) for opened in cache.tiers.exports.opened for one in opened.blocks if one.tier == DEVICE
    }
    loads = [enumerate(load.blocks.tables) for load in cache.tiers.loads.by_ticket.values()]
    loading = {(group, block) for tables in loads for group, table in tables for block in held(table).values()}
    return {
        key: block._replace(logical=None) if not block.hash and key in lent | loading else block
        for key, block in shown.items()
    }


def check(watch: Watch) -> None:
    """The map, but for blocks that it shows as evicted, is what is there."""
    scheduler, seen = watch.scheduler, watch.map
    expected, shown = (without_logical_of_others(scheduler, states) for states in (plain(scheduler), seen.shown))
    for key, block in shown.items():
        if block.state == EVICTED:
            there = expected.get(key, Block(GONE, 0, None, 0, None))
            assert block == there._replace(state=EVICTED)
    evicted = {key for key, block in shown.items() if block.state == EVICTED}
    assert {key: b for key, b in shown.items() if key not in evicted} == {
        key: b for key, b in expected.items() if key not in evicted
    }
    arena = scheduler.cache.arena
    assert seen.owners == {page: owner + 1 for page, owner in enumerate(arena.owner)}
    assert seen.header["free_pages"] == arena.num_free
    swapped = [sequence for sequence in scheduler.by_request.values() if sequence.swapped is not None]
    assert set(seen.sequences) == {one.seq_id for one in [*scheduler.sequences_with_blocks(), *swapped]}
    for sequence in swapped:
        check_swapped(seen, sequence)
    for sequence in scheduler.sequences_with_blocks():
        check_sequence(seen, sequence)
    for group, counts in enumerate(seen.header["counts"]):
        states = [block.state for (of, _), block in expected.items() if of == group]
        assert counts["active"] == states.count(ACTIVE) + states.count(REPAIR)
        assert (counts["held"], counts["loose"], counts["empty"]) == tuple(map(states.count, (HELD, LOOSE, EMPTY)))


def check_swapped(seen: Map, sequence: Any) -> None:
    told = seen.sequences[sequence.seq_id]
    assert (told["phase"], told["request"]) == ("swapped", sequence.request.request_id)
    assert not any(told["runs"])


def check_sequence(seen: Map, sequence: Any) -> None:
    told = seen.sequences[sequence.seq_id]
    blocks = sequence.blocks
    assert told["request"] == sequence.request.request_id
    assert told["processed"] == blocks.processed
    assert told["num_tokens"] == len(sequence.token_ids)
    assert (told["phase"] == "loading") == (sequence.status is SequenceStatus.LOADING)
    assert (told["phase"] == "repair") <= (told["repair"] == [blocks.repair.start, blocks.repair.end])
    for table, runs in zip(blocks.tables, told["runs"], strict=True):
        flat = {first + k: block + k for first, block, count in runs for k in range(count)}
        assert flat == held(table)


def held(table: BlockTable) -> dict[int, int]:
    """The blocks of a table by what they stand for."""
    if isinstance(table, StateTable):
        return dict(zip(table.places, table.run, strict=True))
    return {index: block for index in range(table.end_block) if (block := table.at(index)) is not None}


def in_host_tier(scheduler: Scheduler) -> dict[tuple[int, int], int]:
    """The states that a map must show of the host tier but for evictions, asked block by block."""
    host = scheduler.cache.tiers.host
    shown = {}
    for page, owner in enumerate(host.arena.owner):
        for block in host.arena.blocks(page, owner) if owner >= 0 else ():
            pool = host.pools[owner]
            cached = LOOSE if block in pool.published else EMPTY
            shown[owner, block] = HELD if pool.refs[block] else cached
    return shown


def check_host(watch: Watch) -> None:
    """The map of the host tier, but for blocks that it shows as evicted, is what is there, and so are its counts."""
    expected, shown = in_host_tier(watch.scheduler), watch.map.shown_in_host
    flashing = {key for key, state in shown.items() if state == EVICTED}
    assert all(expected.get(key, EMPTY) == EMPTY for key in flashing)
    assert {key: state for key, state in shown.items() if key not in flashing} == {
        key: state for key, state in expected.items() if key not in flashing
    }
    told, host = watch.map.header["host"], watch.scheduler.cache.tiers.host
    assert told["free_pages"] == host.arena.num_free
    for group, counts in enumerate(told["counts"]):
        states = [state for (of, _), state in expected.items() if of == group]
        assert counts == {name: states.count(state) for name, state in COUNTED.items()}


def check_described(watch: Watch, rng: random.Random) -> None:
    """The description of a block says what is there, in both tiers."""
    scheduler, cache = watch.scheduler, watch.scheduler.cache
    on_device, in_host = plain(scheduler), in_host_tier(scheduler)
    for group, block in rng.sample(sorted(on_device), min(20, len(on_device))):
        told, there = describe_block(scheduler, group, block), on_device[group, block]
        assert (told["state"], told["references"]) == (STATE_NAMES[there.state], there.refs)
        assert told["logical"] == there.logical
        assert int((told["hash"] or "0")[:8], 16) == there.hash
        assert len(told["checkpoints"]) == cache.pools[group].pins[block]
        assert {one["request"] for one in told["sequences"]} == {
            sequence.request.request_id
            for sequence in scheduler.sequences_with_blocks()
            if sequence.blocks is not None and sequence.blocks.tables[group].holds(block)
        }
    for group, block in rng.sample(sorted(in_host), min(20, len(in_host))):
        told = describe_block(scheduler, group, block, "host")
        assert told["state"] == STATE_NAMES[in_host[group, block]]
        assert told["references"] == cache.tiers.host.pools[group].refs[block]
        needs = len(told["checkpoints"]) + len(told["sequences"])
        assert needs <= told["references"], "imports, exports and loads of requests that ended need it too"
        watch.needs |= {one["kind"] for one in told["checkpoints"]} | {"sequence" for _ in told["sequences"]}
