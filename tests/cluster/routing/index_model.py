"""What the fleet's prefix index must hold, kept as plain sets for each worker, and the checks of its arrays."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from transom_cluster.routing import index_code as code
from transom_cluster.routing.fleet_index import FleetPrefixIndex, PrefixIndexMirror
from transom_cluster.routing.prompt_hashes import PromptChain
from transom_core.contract.kv_events import CacheShape, KvUpdate
from transom_core.kv_cache.load_rates import LoadRates
from transom_core.kv_cache.prefix_search import PrefixHit, find_hit, hit_limit
from transom_core.kv_cache.retention import Retention

GROUP_STEP = 0x9E3779B97F4A7C15


class KnownChain(PromptChain):
    """Digests that a test made up."""

    def __init__(self, digests: Sequence[bytes], block_size: int) -> None:
        super().__init__(range(len(digests) * block_size), bytes(32), block_size)
        self._digests[:] = np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 4)
        self._num_hashed = len(digests)


class MirrorModel:
    """One worker's index: a set of digests for each group, searched by the worker's own function."""

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        self.rates: LoadRates | None = None
        self.forget()
        self._retentions = [Retention(group) for group in shape.groups]

    def apply(self, update: KvUpdate) -> None:
        if update.whole:
            self.forget()
        self.rates = update.rates or self.rates
        for run in update.runs:
            groups = self.tiers[run.tier]
            if run.action == "added":
                groups[run.group].update(run.digests)
            else:
                groups[run.group].difference_update(run.digests)

    def forget(self) -> None:
        self.rates = None
        self.tiers: list[list[set[bytes]]] = [
            [set() for _ in self.shape.groups] for _ in range(1 + self.shape.has_host_tier + self.shape.has_disk_tier)
        ]

    def find(self, digests: Sequence[bytes], num_tokens: int) -> PrefixHit:
        limit = hit_limit(num_tokens, self.shape.block_size)
        repair = self.shape.window_repair
        host, disk, *_ = [*self.tiers[1:], None, None]
        return find_hit(
            self._retentions,
            self.tiers[0],
            digests,
            limit,
            window_repair=repair,
            host=host,
            disk=disk,
            rates=self.rates,
        )


def find(
    index: FleetPrefixIndex, mirrors: Sequence[PrefixIndexMirror], digests: Sequence[bytes], num: int
) -> list[int]:
    """Of each worker the first token to compute; the mirrors may be of several shapes."""
    return [start for start, *_ in find_by_tier(index, mirrors, digests, num)]


def find_by_tier(
    index: FleetPrefixIndex, mirrors: Sequence[PrefixIndexMirror], digests: Sequence[bytes], num: int
) -> list[tuple[int, int, int, int]]:
    """Of each worker the first token to compute, the same without its disk tier, the same on its device alone, and the nanoseconds
    that reading and loading take."""
    found = {}
    for shape in {mirror.shape for mirror in mirrors}:
        same = [mirror for mirror in mirrors if mirror.shape == shape]
        hits = index.find_hits(same, KnownChain(digests, shape.block_size), num)
        load_ns = np.rint(hits.load_s * 1e9).astype(int)
        columns = (hits.start.tolist(), hits.memory_start.tolist(), hits.device_start.tolist(), load_ns.tolist())
        found.update(zip(same, zip(*columns, strict=True), strict=True))
    return [found[mirror] for mirror in mirrors]


def keys_of(groups: Sequence[set[bytes]]) -> set[int]:
    """The keys under which the index stores blocks of these groups."""
    return {
        int.from_bytes(digest[:8], "little") ^ group * GROUP_STEP % 2**64
        for group, digests in enumerate(groups)
        for digest in digests
    }


def stored_keys(index: FleetPrefixIndex) -> dict[int, set[int]]:
    """The keys of each holder, as the arrays have them. Checks what must hold for the arrays."""
    table = index.table
    values: dict[int, int] = {}
    for part, (address, capacity, count) in enumerate(table.parts.tolist()):
        slots = table._slots[part]
        assert (address, len(slots)) == (slots.ctypes.data, capacity * code.SLOT_BYTES)
        keys, of_keys = slots[: 8 * capacity].view(np.uint64).tolist(), slots[8 * capacity :].view(np.int32).tolist()
        used = [slot for slot in range(capacity) if of_keys[slot]]
        assert len(used) == count < capacity
        for slot in used:
            key = keys[slot]
            assert key >> 54 == part
            assert key not in values
            values[key] = of_keys[slot]
            home = (key >> 22 & 0xFFFFFFFF) * capacity >> 32
            assert all(of_keys[i % capacity] for i in range(home, slot if slot >= home else slot + capacity))
    uses = Counter(value for value in values.values() if value > 0)
    assert dict(uses) == {number: int(n) for number, n in enumerate(table._uses) if n}
    rows = {number: table.sets[number].tobytes() for number in uses}
    assert len(set(rows.values())) == len(rows)
    assert table._counts[code.NUM_SETS] == len(rows)
    held: dict[int, set[int]] = {}
    for key, value in values.items():
        holders = (
            [-value - 1]
            if value < 0
            else np.flatnonzero(np.unpackbits(table.sets[value].view(np.uint8), bitorder="little"))
        )
        assert value < 0 or len(holders) > 1
        for holder in holders:
            held.setdefault(int(holder), set()).add(key)
    return held


def keys_of_mirror(index: FleetPrefixIndex, mirror: PrefixIndexMirror) -> set[int]:
    keys = stored_keys(index).get(mirror.holder, set())
    assert mirror.num_blocks == len(keys)
    assert mirror.holder % 4 == 0
    return keys
