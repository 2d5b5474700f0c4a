"""`PendingChanges`: joins updates of the prefix index, which wait for one router, into one update with their net effect.

A router keeps a copy of each worker's prefix index, its *mirror*. If an update adds a digest and a later one removes it before the
router reads either, the joined update does not mention the digest. So even if a router does not read for long, the changes that
wait for it are bounded by the size of the index: the digests that its mirror must remove and those that it must add.
"""

from __future__ import annotations

from typing import Literal

from transom_core.contract.kv_events import KvRun, KvUpdate
from transom_core.kv_cache.load_rates import LoadRates


class PendingChanges:
    """The changes between the version of one mirror and the present version. Empty until a whole index was added.

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
