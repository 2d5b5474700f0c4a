"""What the fleet's prefix index must hold, kept as plain sets for each worker, and the checks of its arrays."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

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
        limit, repair = hit_limit(num_tokens, self.shape.block_size), self.shape.window_repair
        host, disk, *_ = [*self.tiers[1:], None, None]
        tiers: dict[str, Any] = {"host": host, "disk": disk, "rates": self.rates}
        return find_hit(self._retentions, self.tiers[0], digests, limit, window_repair=repair, **tiers)


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
    addresses, capacities, counts = table.parts.T
    for address, capacity, slots in zip(addresses.tolist(), capacities.tolist(), table._slots, strict=True):
        assert (address, len(slots)) == (slots.__array_interface__["data"][0], capacity * code.SLOT_BYTES)
    # All parts at once, each of which has its keys, two words each, before their values, a word each.
    parts, capacity = np.repeat(np.arange(code.NUM_PARTS), capacities), np.repeat(capacities, capacities)
    first = np.repeat(capacities.cumsum() - capacities, capacities)
    slot, words = np.arange(len(first)) - first, np.concatenate(table._slots).view(np.uint32)
    of_keys = words[3 * first + 2 * capacity + slot].view(np.int32)
    keys = words[3 * first + 2 * slot] | words[3 * first + 2 * slot + 1].astype(np.uint64) << 32
    used = of_keys.nonzero()[0]
    assert (np.bincount(parts[used], minlength=code.NUM_PARTS) == counts).all()
    assert (counts < capacities).all()
    assert (keys[used] >> 54 == parts[used]).all()
    home = ((keys >> 22 & 0xFFFFFFFF) * capacity.astype(np.uint64) >> 32).astype(np.int64)
    for at in used[home[used] != slot[used]]:
        between = np.arange(home[at], slot[at] + (capacity[at] if slot[at] < home[at] else 0)) % capacity[at]
        assert of_keys[first[at] + between].all()
    values = dict(zip(keys[used].tolist(), of_keys[used].tolist(), strict=True))
    assert len(values) == len(used)
    uses = Counter(value for value in values.values() if value > 0)
    assert dict(uses) == {number: int(n) for number, n in enumerate(table._uses) if n}
    rows = {number: table.sets[number].tobytes() for number in uses}
    assert len(set(rows.values())) == len(rows)
    assert table._counts[code.NUM_SETS] == len(rows)
    bits = {number: np.unpackbits(table.sets[number].view(np.uint8), bitorder="little") for number in uses}
    sets = {number: np.flatnonzero(of_holders).tolist() for number, of_holders in bits.items()}
    assert all(len(holders) > 1 for holders in sets.values())
    held: dict[int, set[int]] = {}
    for key, value in values.items():
        for holder in [-value - 1] if value < 0 else sets[value]:
            held.setdefault(holder, set()).add(key)
    return held
