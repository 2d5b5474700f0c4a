"""What the engine's observer keeps for the block map: all of it together costs an addition a call while nobody watches."""

from __future__ import annotations

from transom_worker.blockmap.events import EventLog
from transom_worker.blockmap.history import History
from transom_worker.kvcache.manager import KvCache


class BlockMapLog:
    """One engine's. Written on the engine's thread."""

    def __init__(self) -> None:
        self.history = History()
        self.events = EventLog()
        self.num_changes = 0  # grows whenever a picture may look different from now on; read from any thread

    def changed(self) -> None:
        """Requests or blocks are not as they were."""
        self.num_changes += 1

    def published(self, cache: KvCache) -> None:
        """A few times a second, and when the engine rests."""
        self.num_changes += 1
        self.history.note(cache)
