"""`FleetPrefixIndex`: a router's copy of all workers' prefix indexes in one structure, so that one walk searches all workers.

- **prefix index**: the blocks of a worker's prefix cache that can be found, by cache group and digest.
- **digest**: the hash of a hash block's tokens and of all tokens before it. So a prompt is a path in a tree of prefixes; the index
  stores each block of the tree once, with the set of workers that have it.
- **version**: a counter that the worker increments with each change of its index. An update says after which version it applies.

For example, if a router's copy has version 7, an update `after=7, version=9` applies and makes it version 9. An update `after=8`
shows a gap: the router forgets that worker's blocks and asks the worker for its whole index (`resync`).

For a prompt of 8,192 hash blocks and 200 workers, the search (`hit_search`) looks up each block once, and keeps the workers that
have all blocks so far as 200 bits. It ends when no worker is left. Sliding groups are then searched backwards from each worker's
last block, again for all workers together. The search is Python code over runs of blocks with equal holders. The table in which it
looks up blocks is compiled code on arrays (`index_code`), because that takes a fraction of the memory of Python objects.

Two simpler tables that pass the same tests were measured, too. *Sets*: a set of digests for each worker, searched by the worker's
own `find_hit`. *Dict*: one dict from a block's key to its workers as the bits of one Python int. The table shows CPU milliseconds
of a search without the hashing, on two cores that other programs used, with one full group, one window of 1,024 tokens and blocks
of 16 tokens. Two workers had the whole prompt and the others its first 64 blocks; in brackets, three of four workers had the whole
prompt (for sets, all of them):

    tokens    workers   here           dict           sets
    10,000    16        0.05 (0.07)    0.5 (1.4)      0.6 (0.8)
              64        0.09 (0.10)    0.3 (1.6)      6.1 (9.4)
    131,072   16        0.9  (1.0)     19  (18)       1.2 (15.5), 100,000 tokens
              64        1.0  (1.0)     16  (19)       7.7 (64), 100,000 tokens

A block of one worker takes 15 bytes here (25 bytes of the process's memory, with what loading leaves), 77 as a dict's entry, and
about 110 in a set. Windows with a hole at every 50th block take 0.1 to 0.8 ms at 10,000 tokens. Pure numpy (the same arrays, many
keys at once) took 3 ms for 10,000 tokens, and 4 ms for an update while its arrays grew. A router places requests on one event loop,
so at 100 requests a second each millisecond of a search takes a tenth of the loop's time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import numpy.typing as npt

from transom_cluster.routing.hit_search import Found, HitRules, HitSearch
from transom_cluster.routing.index_code import NUM_PARTS, Integers
from transom_cluster.routing.prefix_table import PrefixTable
from transom_cluster.routing.prompt_hashes import PromptChain
from transom_core.contract import WindowPolicy
from transom_core.contract.kv_events import CacheShape, KvRun, KvUpdate
from transom_core.kv_cache.load_rates import LoadRates
from transom_core.kv_cache.prefix_search import hit_limit

HOLDERS_PER_WORKER = 4  # for device, host and disk tier, and one that is not used
# While blocks still name workers that have left, each update clears up to this many parts of the table, or until it has cleared
# this many slots.
CLEARED_PARTS = 16
CLEARED_SLOTS = 8_192


@dataclass(frozen=True, slots=True)
class Hits:
    """The hits of several workers: `start` has for each worker the first token that it must compute.

    `device_start` is the first token if the worker uses only its device's blocks, and `memory_start` if it does not use its disk
    tier. `load_s` has the seconds to read and load the blocks between `device_start` and `start`.
    """

    start: Integers
    memory_start: Integers
    device_start: Integers
    load_s: npt.NDArray[np.float64]

    @classmethod
    def of_device(cls, start: Integers) -> Hits:
        """Make hits that use only the workers' devices."""
        return cls(start.copy(), start.copy(), start, np.zeros(len(start)))

    @classmethod
    def none(cls, num_workers: int) -> Hits:
        """Make hits for workers that have nothing cached."""
        return cls.of_device(np.zeros(num_workers, np.int64))

    def put(self, positions: Integers, hits: Hits) -> None:
        """Write the hits of the workers at these positions."""
        self.start[positions], self.memory_start[positions] = hits.start, hits.memory_start
        self.device_start[positions], self.load_s[positions] = hits.device_start, hits.load_s


class PrefixIndexMirror:
    """A router's copy of one worker's prefix index, at one version. Its blocks are stored in the `FleetPrefixIndex` that made it.

    The mirror is empty and has version 0 until a whole index has come.
    """

    def __init__(self, index: FleetPrefixIndex, rules: HitRules) -> None:
        self.shape = rules.shape
        self.version = 0
        self.num_blocks = 0  # blocks that can be found, in all groups
        self.rules = rules
        self.holder = index.new_holder()  # the device's number; the next numbers are the other tiers'
        self.rates: LoadRates | None = None
        self._index = index
        self._is_whole = False

    def apply(self, update: KvUpdate) -> bool:
        """Apply an update. If it shows a gap, forget all blocks and return False: the worker must send its whole index.

        Until a whole index comes, other updates are ignored and return True, so that each gap is reported once.
        """
        if update.whole:
            self._forget()
            self._is_whole = True
        elif not self._is_whole:
            return True
        elif update.after != self.version:
            self._forget()
            return False
        self.num_blocks += self._index.apply(self.holder, update)
        self.rates = update.rates or self.rates
        self.version = update.version
        return True

    def rules_under(self, window: WindowPolicy | None) -> HitRules:
        """Return the rules of this cache for requests with the KV policy `window`, or for those without a policy if it is None."""
        if window is None:
            return self.rules
        groups = tuple(group.with_window(sinks=window.sinks, window=window.window) for group in self.shape.groups)
        return HitRules(replace(self.shape, groups=groups))

    def leave(self) -> None:
        """Forget the worker. The mirror cannot be used any more."""
        self._index.free_holder(self.holder, is_named=self.num_blocks > 0)

    def _forget(self) -> None:
        if self.num_blocks:
            self._index.free_holder(self.holder, is_named=True)
            self.holder = self._index.new_holder()
        self.version = self.num_blocks = 0
        self.rates = None
        self._is_whole = False


class FleetPrefixIndex:
    """The blocks of all workers. Not thread-safe.

    The table names a worker by its *holder* number. When a worker has left, every further update clears a few of the entries that
    name it. Its number is not given to another worker until all are cleared, and searches do not ask for it meanwhile.
    """

    def __init__(self) -> None:
        _compile()
        self.table = PrefixTable()
        self._rules: dict[CacheShape, HitRules] = {}
        self._num_holders = 0
        self._free_holders: list[int] = []
        self._left: dict[int, int] = {}  # holder of a worker that has left -> number of parts that may still name it
        self._next_part = 0  # the part to clear next

    def join(self, shape: CacheShape) -> PrefixIndexMirror:
        """Add a worker with a cache of this shape; it has no blocks yet."""
        rules = self._rules.get(shape)
        if rules is None:
            rules = self._rules[shape] = HitRules(shape)
        return PrefixIndexMirror(self, rules)

    def find_hits(
        self,
        mirrors: Sequence[PrefixIndexMirror],
        prompt: PromptChain,
        num_tokens: int,
        window: WindowPolicy | None = None,
    ) -> Hits:
        """Return for each worker how much of a prompt of `num_tokens` tokens it need not compute. The mirrors have one shape.

        `prompt` has the digests of the tokens, and `window` is the request's KV policy, if it has one. If a mirror has the same
        version as its worker's index, `start`, `memory_start` and `device_start` equal the results of the worker's own `find_hit`.
        """
        rules = mirrors[0].rules_under(window)
        limit = min(hit_limit(num_tokens, rules.shape.block_size), prompt.num_blocks)
        search = HitSearch(self.table, rules, prompt, limit)
        found = search.find(_bits(mirrors), tiers=1)
        hits = Hits.of_device(np.array([found[mirror.holder].start for mirror in mirrors]) * rules.shape.block_size)
        for tiers in range(2, 2 + rules.shape.has_host_tier + rules.shape.has_disk_tier):
            longest = limit * rules.shape.block_size
            may_load = {i: one for i, one in enumerate(mirrors) if one.rates and hits.start[i] < longest}
            found = search.find(_bits(may_load.values()), tiers=tiers)
            for i, mirror in may_load.items():
                _take_if_faster(hits, i, mirror, search, found[mirror.holder], tiers=tiers)
        return hits

    def apply(self, holder: int, update: KvUpdate) -> int:
        """Apply an update's changes to a holder; return how many blocks it has gained (negative if it has lost some)."""
        self._clear_some_parts()
        return self.table.apply(holder, update.runs)

    def new_holder(self) -> int:
        """Return a free number for a worker's device; the next `HOLDERS_PER_WORKER - 1` numbers are free for its other tiers."""
        if self._free_holders:
            return self._free_holders.pop()
        self._num_holders += HOLDERS_PER_WORKER
        self.table.fit_holders(self._num_holders)
        return self._num_holders - HOLDERS_PER_WORKER

    def free_holder(self, holder: int, *, is_named: bool) -> None:
        """Free a worker's numbers for reuse once no block names them. `is_named` says whether some block does now."""
        if is_named:
            self._left[holder] = NUM_PARTS
        else:
            self._free_holders.append(holder)

    def _clear_some_parts(self) -> None:
        num_parts = num_slots = 0
        while self._left and num_parts < CLEARED_PARTS and num_slots < CLEARED_SLOTS:
            left = [number for holder in self._left for number in range(holder, holder + HOLDERS_PER_WORKER)]
            num_slots += self.table.clear(self._next_part, left)
            num_parts += 1
            self._next_part = (self._next_part + 1) % NUM_PARTS
            for holder in list(self._left):
                self._left[holder] -= 1
                if not self._left[holder]:
                    del self._left[holder]
                    self._free_holders.append(holder)


def _bits(mirrors: Iterable[PrefixIndexMirror]) -> int:
    return sum(1 << mirror.holder for mirror in mirrors)


def _take_if_faster(
    hits: Hits, i: int, mirror: PrefixIndexMirror, search: HitSearch, found: Found, *, tiers: int
) -> None:
    """Replace worker i's hit by a longer one on its first `tiers` tiers, if loading (and reading from disk) takes no longer than
    the computation that it saves. Workers decide by the same rule."""
    start = found.start * mirror.shape.block_size
    spared_tokens = start - int(hits.start[i])
    rates = mirror.rates
    if spared_tokens <= 0 or rates is None:
        return
    load_ns = rates.load_ns(search.num_missing(mirror.holder, found, tiers=1))
    if tiers == 2:
        if spared_tokens * rates.token_ns < load_ns:
            return
        hits.memory_start[i] = start
    else:
        load_ns += rates.reading_ns(search.num_missing(mirror.holder, found, tiers=2))
        more_ns = load_ns - round(float(hits.load_s[i]) * 1e9)
        if not rates.are_worth_reading(spared_tokens, more_ns=more_ns):
            return
    hits.start[i], hits.load_s[i] = start, load_ns * 1e-9


@cache
def _compile() -> None:
    """Call every compiled function once, so that it is compiled or loaded before the first request."""
    table = PrefixTable()
    digests = PromptChain(range(4), bytes(32), 1).hashed(4)
    run = KvRun("added", 0, tuple(digest.tobytes() for digest in digests))
    for holder in range(0, 6, 2):
        table.apply(holder, [run])
    table.find_runs(digests, 0, 1, 0, 4)
    table.clear(0, [0])
