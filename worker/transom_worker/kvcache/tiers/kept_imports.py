"""`KeptImports`: keeps complete imports in the host tier until the requests for which they were made are admitted.

A published import is cached only in the host tier, where other blocks could evict it while its request still waits in the queue. A
kept import is not evicted until every request that wants it is admitted or has ended, or until `MAX_KEPT_S` have passed: a request
that waits longer may have to compute its prefix, but does not block the host tier for all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from transom_worker.kvcache.tiers.imports import BlockImport, Imports

MAX_KEPT_S = 60.0


@dataclass(slots=True)
class _Kept:
    blocks: BlockImport
    request_ids: set[str]
    until_s: float


class KeptImports:
    """The complete imports of one engine. `is_waiting` says whether a request still waits for admission; `clock` gives seconds."""

    def __init__(self, imports: Imports, *, is_waiting: Callable[[str], bool], clock: Callable[[], float]) -> None:
        self._imports, self._is_waiting, self._clock = imports, is_waiting, clock
        self._kept: list[_Kept] = []

    def publish(self, blocks: BlockImport, request_ids: Iterable[str]) -> None:
        """Publish an import that is complete, and keep it for these requests."""
        self._imports.publish(blocks)
        self._kept.append(_Kept(blocks, set(request_ids), self._clock() + MAX_KEPT_S))
        self.end_admitted()

    def join(self, request_id: str, chain: Iterable[bytes]) -> None:
        """Keep the imports of a prefix of this chain for one more request."""
        wanted = set(chain)
        for one in self._kept:
            if any(block.digest in wanted for block in one.blocks.blocks):
                one.request_ids.add(request_id)

    def end_admitted(self) -> None:
        """End the imports that no request waits for any more, and those that were kept for long enough."""
        now_s, kept = self._clock(), []
        for one in self._kept:
            if now_s < one.until_s and any(map(self._is_waiting, one.request_ids)):
                kept.append(one)
            else:
                self._imports.end(one.blocks)
        self._kept = kept

    def forget(self) -> None:
        """End all kept imports, because the cache is emptied."""
        for one in self._kept:
            self._imports.end(one.blocks)
        self._kept = []
