"""`ChangeLog`: records the changes of the prefix index, in order, until the engine takes them and sends them to routers.

The prefix index has each cached block's digest, per tier and group. Its *version* is the number of changes since start: publishing
3 blocks and evicting 1 brings version 10 to version 14. New load rates are one change, since they change what a search finds.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from transom_core.contract.kv_events import KvRun, KvUpdate
from transom_core.kv_cache.load_rates import LoadRates

MAX_UNREAD_CHANGES = 65_536


class ChangeLog:
    """Counts every change of the index, and keeps the changes that were not taken yet, at most `max_unread` of them.

    `tiers` is the index itself: per tier and group the digests of its blocks. When there are too many changes, `take` returns
    the whole index. `rates` are the present load rates; None without a host tier.
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
        """Note that the index has one more tier from now on, which is empty."""
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
        """Record that other load rates hold from now on."""
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
        """Return the whole index, without taking any changes."""
        runs = tuple(
            KvRun("added", group, tuple(found), tier)
            for tier, groups in enumerate(self._tiers)
            for group, found in enumerate(groups)
        )
        return KvUpdate(after=self.version, version=self.version, runs=runs, whole=True, rates=self.rates)
