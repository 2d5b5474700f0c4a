"""`PendingChanges`: joins updates of the prefix index into one update with their net effect.

For example, a digest that one update adds and a later one removes is in no run of the result, since the router's mirror never had
it and need not have it. So even if a router does not read for long, what waits for it is bounded by the size of the index: the
digests that its mirror must drop and those that it must add.
"""

from __future__ import annotations

from typing import Literal

from transom_core.contract.kv_events import KvRun, KvUpdate
from transom_core.kv_cache.load_rates import LoadRates


class PendingChanges:
    """The changes between the version that one mirror has and the present version. Empty until a whole index was added.

    Updates must be added in order and without a gap, as `ChangeLog.take` returns them; a whole index replaces what came before.
    """

    def __init__(self) -> None:
        self._whole: KvUpdate | None = None  # not taken yet
        self._has_index = False
        self._after = 0
        self._version = 0
        # By (tier, group): the net effect.
        self._by_digest: dict[tuple[int, int], dict[bytes, Literal["added", "removed"]]] = {}
        self._rates: LoadRates | None = None  # that the mirror does not have

    @property
    def has_whole(self) -> bool:
        """Whether a whole index waits to be taken."""
        return self._whole is not None

    @property
    def is_empty(self) -> bool:
        """Whether the mirror has everything."""
        return self._whole is None and self._after == self._version

    def add(self, update: KvUpdate) -> None:
        """Add the next update. Updates before the first whole index are ignored, since a mirror can do nothing with them."""
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
        """Return one update that brings the mirror to the present version; None if it is there."""
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
