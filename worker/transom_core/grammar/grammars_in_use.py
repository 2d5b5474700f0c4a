"""`GrammarsInUse`: counts the memory of the grammars that requests hold, and decides whether a client may have one more.

A request holds its compiled grammar from the moment it is ready to the request's end, even while it waits in the scheduler's queue.
The cache of compiled grammars is bounded, but a grammar that a request holds stays in memory after the cache has evicted it: 1,000
waiting requests with grammars of 50 MiB each would take 50 GiB. So while a client's grammars take its share of `max_bytes`, no
other text of the client is compiled; its request waits until other requests of the client have ended. Each client may hold one
grammar in any case.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Generic, TypeVar

MAX_BYTES = 1 << 30  # of all grammars in use; clients share it evenly

Owner = TypeVar("Owner")


@dataclass(slots=True)
class _Text:
    client: str  # its bytes count for this client, which was the first one to hold it
    num_bytes: int
    num_owners: int = 0


class GrammarsInUse(Generic[Owner]):
    """The texts whose compiled grammars requests hold: `hold` when a request gets one, `release` when it ends. Not thread-safe."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._texts: dict[str, _Text] = {}
        self._text_of: dict[Owner, str] = {}
        self._client_bytes: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        """Return the memory of all grammars that requests hold."""
        return self._client_bytes.total()

    def has_room(self, client: str, text: str, num_bytes: int) -> bool:
        """Return whether a client may hold one more text. The clients that hold any share the bytes evenly."""
        own = self._client_bytes[client]
        if text in self._texts or not own:
            return True
        num_clients = sum(count > 0 for count in self._client_bytes.values())
        return own + num_bytes <= self._max_bytes / num_clients

    def hold(self, owner: Owner, client: str, text: str, num_bytes: int) -> None:
        """Note that a request holds a grammar."""
        self.release(owner)
        held = self._texts.get(text)
        if held is None:
            held = self._texts[text] = _Text(client, num_bytes)
            self._client_bytes[client] += num_bytes
        held.num_owners += 1
        self._text_of[owner] = text

    def release(self, owner: Owner) -> None:
        """Note that a request has ended; a request without a grammar is ignored."""
        text = self._text_of.pop(owner, None)
        if text is None:
            return
        held = self._texts[text]
        held.num_owners -= 1
        if not held.num_owners:
            del self._texts[text]
            self._client_bytes[held.client] -= held.num_bytes
            if not self._client_bytes[held.client]:
                del self._client_bytes[held.client]
