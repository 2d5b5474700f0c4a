"""`ChangeLog`: records the changes of the prefix index, in order, until the engine takes them and sends them to routers.

The *prefix index* has each cached block's digest, per tier (device, host, disk) and KV cache group. Its *version* is the number of
changes since start: publishing 3 blocks and evicting 1 raises it from 10 to 14. *Load rates* are the measured costs of computing
tokens and of loading blocks. New rates count as one change, since a search compares these costs.

    log.add("added", DEVICE, 0, digests)    # `BlockRegistry` and `DiskIndex`, at each change
    update = log.take()                     # the engine, after a step: what has changed since the last call
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from transom_core.contract.kv_events import KvRun, KvUpdate
from transom_core.kv_cache.load_rates import LoadRates

MAX_UNREAD_CHANGES = 65_536  # so that a log that is not taken for long does not grow without bound


class ChangeLog:
    """Counts every change of the index, and keeps up to `max_unread` changes that were not taken yet.

    If there are more, the kept ones are dropped, and `take` returns the whole index instead. `tiers` is the index itself:
    `tiers[tier][group]` has the digests of its blocks. `rates` are the present load rates; None without a host tier.
    """

    def __init__(self, tiers: Sequence[Sequence[Collection[bytes]]], rates: LoadRates | None = None) -> None:
        self.version = 0
        self.rates = rates
        self._tiers = list(tiers)
        self.max_unread = MAX_UNREAD_CHANGES
        self.unread_runs: list[KvRun] = []
        self._taken = 0  # the version up to which changes were taken
        self._num_unread = 0
        self._has_new_rates = False

    def add_tier(self, groups: Sequence[Collection[bytes]]) -> None:
        """Note that the index has one more tier from now on, which is empty and gets the next number."""
        self._tiers.append(groups)

    def add(self, action: Literal["added", "removed"], tier: int, group: int, digests: Sequence[bytes]) -> None:
        """Record that blocks of one group were added to a tier's index or removed from it."""
        self.version += len(digests)
        self._num_unread += len(digests)
        if self._num_unread > self.max_unread:
            self.unread_runs = []
        else:
            self.unread_runs.append(KvRun(action, group, tuple(digests), tier))

    def set_rates(self, rates: LoadRates) -> None:
        """Replace the load rates, and record that as one change."""
        self.rates = rates
        self.version += 1
        self._has_new_rates = True

    def take(self) -> KvUpdate | None:
        """Return the changes since the last call, or the whole index if they are too many; None if there are none."""
        if self._taken == self.version:
            return None
        if self._num_unread > self.max_unread:
            update = self.whole()
        else:
            rates = self.rates if self._has_new_rates else None
            update = KvUpdate(after=self._taken, version=self.version, runs=tuple(self.unread_runs), rates=rates)
        self.unread_runs = []
        self._num_unread = 0
        self._has_new_rates = False
        self._taken = self.version
        return update

    def whole(self) -> KvUpdate:
        """Return an update with the whole index. Changes that wait to be taken still wait."""
        runs = tuple(
            KvRun("added", group, tuple(found), tier)
            for tier, groups in enumerate(self._tiers)
            for group, found in enumerate(groups)
        )
        return KvUpdate(after=self.version, version=self.version, runs=runs, whole=True, rates=self.rates)
