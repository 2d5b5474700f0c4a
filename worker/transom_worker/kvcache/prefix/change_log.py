"""`ChangeLog`: records the changes of the prefix index, in order, until the engine takes them and sends them to routers.
`PendingChanges`: joins updates that wait for one router into one with their net effect.

The *prefix index* has each cached block's digest, per tier (device, host, disk) and KV cache group. Its *version* is the number of
changes since start: publishing 3 blocks and evicting 1 raises it from 10 to 14. *Load rates* are the measured costs of computing
tokens and of loading blocks. New rates count as one change, since a search compares these costs.

    log.add("added", DEVICE, 0, digests)    # `BlockRegistry` and `DiskIndex`, at each change
    update = log.take()                     # the engine, after a step: what has changed since the last call
"""

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


class PendingChanges:
    """The changes between the version of one *mirror*, a router's copy of the index, and the present version. Empty until a whole
    index was added.

    If an update adds a digest and a later one removes it before the router reads either, the joined update does not mention the
    digest. So even if a router does not read for long, the changes that wait for it are bounded by the size of the index: the
    digests that its mirror must remove and those that it must add.

    Updates must be added in order and without a gap, as `ChangeLog.take` returns them. An update with the whole index replaces all
    changes before it.
    """

    def __init__(self) -> None:
        self._whole: KvUpdate | None = None  # not taken yet
        self._has_index = False
        self._after = 0  # version of the mirror
        self._version = 0  # version after all added updates
        # (tier, group) -> digest -> its net change
        self._by_digest: dict[tuple[int, int], dict[bytes, Literal["added", "removed"]]] = {}
        self._rates: LoadRates | None = None  # the newest, if the mirror does not have them

    @property
    def has_whole(self) -> bool:
        """Whether a whole index waits to be taken."""
        return self._whole is not None

    @property
    def is_empty(self) -> bool:
        """Whether the mirror has every change that was added here."""
        return self._whole is None and self._after == self._version

    def add(self, update: KvUpdate) -> None:
        """Add the next update. Updates before the first whole index are ignored: a mirror cannot apply changes to nothing."""
        if update.whole:
            self._whole, self._has_index = update, True
            self._by_digest, self._rates = {}, None
            self._after = self._version = update.version
        elif self._has_index:
            assert update.after == self._version
            self._version = update.version
            self._rates = update.rates or self._rates
            for run in update.runs:
                self._add_run(run)

    def take(self) -> KvUpdate | None:
        """Return one update that brings the mirror to the present version; None if the mirror has that version.

        Within the update, removals come before additions.
        """
        if self.is_empty:
            return None
        runs = self._whole.runs if self._whole else ()
        for (tier, group), by_digest in self._by_digest.items():
            for action in ("removed", "added"):
                if digests := tuple(digest for digest, change in by_digest.items() if change == action):
                    runs += (KvRun(action, group, digests, tier),)
        rates = self._rates or (self._whole.rates if self._whole else None)
        update = KvUpdate(
            after=self._after, version=self._version, runs=runs, whole=self._whole is not None, rates=rates
        )
        self._whole, self._by_digest, self._rates, self._after = None, {}, None, self._version
        return update

    def _add_run(self, run: KvRun) -> None:
        by_digest = self._by_digest.setdefault((run.tier, run.group), {})
        for digest in run.digests:
            # The index adds only digests that it lacks and removes only those that it has, so a second change undoes the first.
            if by_digest.pop(digest, run.action) == run.action:
                by_digest[digest] = run.action
