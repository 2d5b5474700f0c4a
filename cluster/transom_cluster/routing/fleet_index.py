"""`FleetPrefixIndex`: a router's copy of all workers' prefix indexes in one structure, searched for all workers in one walk.

- **prefix index**: which blocks of a worker's prefix cache can be found, by cache group and digest.
- **digest**: the hash of a hash block's tokens and of all tokens before it. So a prompt is a path in a tree of prefixes; the index
  stores each block of the tree once, with the set of workers that have it.
- **version**: a counter that the worker increments with each change of its index. An update says after which version it applies.

For example, at version 7 an update `after=7, version=9` applies and makes it version 9. An update `after=8` shows a gap: the
router forgets that worker's blocks and asks the worker for its whole index (`resync`).

A prompt of 8,192 hash blocks among 200 workers: the search (`hit_search`) looks each block up once, and keeps the workers that have
all blocks so far as 200 bits. It ends with the last worker. Sliding groups are searched backwards from there, again for all workers
together. The search is Python over runs of blocks with equal holders; the table in which they are looked up is compiled code
(`index_code`), for its memory's sake.

Plainer tables were measured, which pass the same tests. *Sets*: a set of digests for each worker, searched by the worker's own
`find_hit`. *Dict*: one dict from a block's key to its workers as the bits of one Python int. CPU milliseconds of a search without
the hash (one full group and one window of 1,024 tokens, blocks of 16 tokens, two workers with the whole prompt, the others with its
first 64 blocks; in brackets three of four workers with the whole prompt, for sets all of them), on two cores that other programs
used:

    tokens    workers   here           dict           sets
    10,000    16        0.05 (0.07)    0.5 (1.4)      0.6 (0.8)
              64        0.09 (0.10)    0.3 (1.6)      6.1 (9.4)
    131,072   16        0.9  (1.0)     19  (18)       1.2 (15.5), 100,000 tokens
              64        1.0  (1.0)     16  (19)       7.7 (64), 100,000 tokens

A block of one worker takes 15 bytes here (25 of the process, with what loading leaves), 77 of the process as a dict's entry, and
about 110 in a set. Windows with a hole at every 50th block take 0.1 to 0.8 ms at 10,000 tokens. numpy alone (arrays as here, many
keys at once) took 3 ms for 10,000 tokens, and 4 ms for an update while its arrays grew. A router places requests on one event loop,
so each millisecond is a tenth of it at 100 requests a second.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import numpy.typing as npt

from transom_cluster.routing.hit_rules import HitRules
from transom_cluster.routing.hit_search import Found, HitSearch
from transom_cluster.routing.index_code import NUM_PARTS, Integers
from transom_cluster.routing.prefix_table import PrefixTable
from transom_cluster.routing.prompt_hashes import PromptChain
from transom_core.contract import WindowPolicy
from transom_core.contract.kv_events import CacheShape, KvRun, KvUpdate
from transom_core.kv_cache.load_rates import LoadRates
from transom_core.kv_cache.prefix_search import hit_limit

HOLDERS_PER_WORKER = 4  # for device, host and disk tier, and one that is not used
# Cleared with each update, while blocks name workers that have left: parts of the table, and fewer where they are large.
CLEARED_PARTS = 16
CLEARED_SLOTS = 8_192


@dataclass(frozen=True, slots=True)
class Hits:
    """For each of some workers the first token that it must compute.

    `device_start` is where it would start with its device alone, `memory_start` without its disk tier. `load_s` are the seconds to
    read and load what lies between `device_start` and `start`.
    """

    start: Integers
    memory_start: Integers
    device_start: Integers
    load_s: npt.NDArray[np.float64]

    @classmethod
    def of_device(cls, start: Integers) -> Hits:
        """Hits on the workers' devices alone."""
        return cls(start.copy(), start.copy(), start, np.zeros(len(start)))

    @classmethod
    def none(cls, num_workers: int) -> Hits:
        """No worker has anything."""
        return cls.of_device(np.zeros(num_workers, np.int64))

    def put(self, positions: Integers, hits: Hits) -> None:
        """Write the hits of the workers at these positions."""
        self.start[positions], self.memory_start[positions] = hits.start, hits.memory_start
        self.device_start[positions], self.load_s[positions] = hits.device_start, hits.load_s


class PrefixIndexMirror:
    """One worker's prefix index as the router knows it, at one version; its blocks are in the `FleetPrefixIndex` that made it.

    It is empty, and at version 0, until a whole index has come.
    """

    def __init__(self, index: FleetPrefixIndex, rules: HitRules) -> None:
        self.shape = rules.shape
        self.version = 0
        self.num_blocks = 0  # that can be found, in all groups
        self.rules = rules
        self.holder = index.new_holder()  # of the device; those of the other tiers are the next numbers
        self.rates: LoadRates | None = None
        self._index = index
        self._is_whole = False

    def apply(self, update: KvUpdate) -> bool:
        """Apply an update; False where it shows a gap: the blocks are forgotten, and the worker must send its whole index.

        Until a whole index comes, other updates are ignored and return True. So each gap is reported once.
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
        """The rules of this cache for requests with a KV policy `window`; None: for those without one."""
        if window is None:
            return self.rules
        groups = tuple(group.with_window(sinks=window.sinks, window=window.window) for group in self.shape.groups)
        return HitRules(replace(self.shape, groups=groups))

    def leave(self) -> None:
        """Forget the worker. It cannot be used any more."""
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

    Blocks name a worker by its *holder* number. Those of a worker that has left are cleared little by little, with each update that
    comes; its number is not given to another worker before that is done, and no search asks for it.
    """

    def __init__(self) -> None:
        _compile()
        self.table = PrefixTable()
        self._rules: dict[CacheShape, HitRules] = {}
        self._num_holders = 0
        self._free_holders: list[int] = []
        self._left: dict[int, int] = {}  # the holder of a worker that has left -> the parts that may still name it
        self._next_part = 0  # to be cleared

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
        """Return for each worker what of `num_tokens` tokens it need not compute. The mirrors are of one shape.

        `prompt` has the digests of the tokens, and `window` is the request's KV policy, if it has one. At equal versions
        `start`, `memory_start` and `device_start` are those of the worker's own `find_hit`.
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
        """Apply an update's changes to a holder; return how many more blocks it has (fewer: negative)."""
        self._clear_some_parts()
        return self.table.apply(holder, update.runs)

    def new_holder(self) -> int:
        """The number of a worker's device, which no block names, nor the next ones, which are those of its other tiers."""
        if self._free_holders:
            return self._free_holders.pop()
        self._num_holders += HOLDERS_PER_WORKER
        self.table.fit_holders(self._num_holders)
        return self._num_holders - HOLDERS_PER_WORKER

    def free_holder(self, holder: int, *, is_named: bool) -> None:
        """Use a worker's numbers again, as soon as no block names them any more."""
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
    """Replace worker i's hit by a longer one on its first `tiers` tiers, by the worker's own rule: if loading (and reading) takes
    no longer than the computing that it spares."""
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
    """Have everything compiled or loaded, so that the first request does not wait for it."""
    table = PrefixTable()
    digests = PromptChain(range(4), bytes(32), 1).hashed(4)
    run = KvRun("added", 0, tuple(digest.tobytes() for digest in digests))
    for holder in range(0, 6, 2):
        table.apply(holder, [run])
    table.find_runs(digests, 0, 1, 0, 4)
    table.clear(0, [0])
