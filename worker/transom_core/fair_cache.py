"""`FairCache`: a cache with a bound in bytes, of which no client can take more than a quarter.

A client may send any number of texts that are used only once. In a plain LRU cache they would evict what other clients use. Here an
entry is charged to the client that brought it, and each client has an LRU order of its own:

    put(k, v, client=a)    a has more than a quarter of the bytes    a's own oldest entry is evicted
                           all together have too many bytes          the oldest entry of the client with the most bytes is evicted

So a client loses an entry to another client only while it has at least as many bytes as that one. Lookups find the entries of all
clients.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

CLIENT_SHARE = 1 / 4


@dataclass(frozen=True, slots=True)
class _Entry(Generic[Value]):
    value: Value
    num_bytes: int
    client: str
    until_s: float


class FairCache(Generic[Key, Value]):
    """A cache of at most `max_bytes` bytes, as the callers of `put` count them. Not thread-safe."""

    def __init__(self, max_bytes: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._clock = clock
        self._entries: dict[Key, _Entry[Value]] = {}
        # client -> its keys, the most recently used one last
        self._by_client: dict[str, OrderedDict[Key, None]] = {}
        self._client_bytes: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def bytes_of(self, client: str) -> int:
        """Return the bytes of a client's entries."""
        return self._client_bytes.get(client, 0)

    def get(self, key: Key) -> Value | None:
        """Return the value of a key, and note that it was used; None if there is none, or if its `keep_s` have passed."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry.until_s <= self._clock():
            self.remove(key)
            return None
        self._by_client[entry.client].move_to_end(key)
        return entry.value

    def put(self, key: Key, value: Value, *, num_bytes: int, client: str = "", keep_s: float = float("inf")) -> None:
        """Keep a value for at most `keep_s` seconds. A value larger than a client's share is not kept."""
        self.remove(key)
        if num_bytes > self.max_bytes * CLIENT_SHARE:
            return
        self._entries[key] = _Entry(value, num_bytes, client, self._clock() + keep_s)
        self._by_client.setdefault(client, OrderedDict())[key] = None
        self._client_bytes[client] = self.bytes_of(client) + num_bytes
        self.num_bytes += num_bytes
        while self._client_bytes[client] > self.max_bytes * CLIENT_SHARE:
            self._remove_oldest_of(client)
        while self.num_bytes > self.max_bytes:
            self._remove_oldest_of(max(self._client_bytes, key=self._client_bytes.__getitem__))

    def remove(self, key: Key) -> None:
        """Forget an entry, if it is there."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self.num_bytes -= entry.num_bytes
        self._client_bytes[entry.client] -= entry.num_bytes
        del self._by_client[entry.client][key]
        if not self._by_client[entry.client]:
            del self._by_client[entry.client], self._client_bytes[entry.client]

    def _remove_oldest_of(self, client: str) -> None:
        self.remove(next(iter(self._by_client[client])))
