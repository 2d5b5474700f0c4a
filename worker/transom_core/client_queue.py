"""`ClientQueue`: items that wait for something scarce, which clients use in turns by cost (`virtual_time`).

Each client has a queue of its own, first come first served. Next is the first item of the client with the least service: the sum
of the costs that it was charged, each divided by its weight. Costs are bytes or seconds, and may be charged after the turn, when
they have been measured.

Example: A adds 100 items that cost 10 each, and its first one is taken. Then B adds items that cost 1 each. B begins where A's
turn began, so the next 10 turns are B's, and then one is A's: in the long run both get as much.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from transom_core.virtual_time import VirtualTime

Item = TypeVar("Item", bound=Hashable)


class Sharer(NamedTuple):
    """A client that shares something with others, in proportion to the weights."""

    client: str = ""
    weight: float = 1.0


NO_CLIENT = Sharer()


@dataclass(slots=True)
class _Waiting(Generic[Item]):
    service: float
    items: dict[Item, None] = field(default_factory=dict)  # a set in the order of arrival; never empty


class ClientQueue(Generic[Item]):
    """The queues of all clients that wait. Not thread-safe.

    queue.add(client, item)
    item = queue.take()                      the next item, if there is room for one more
    queue.charge(client, cost / weight)      when its cost is known
    """

    def __init__(self) -> None:
        self._clients: dict[str, _Waiting[Item]] = {}
        self._time = VirtualTime()

    def __bool__(self) -> bool:
        return bool(self._clients)

    def add(self, client: str, item: Item) -> None:
        """Add an item at the end of its client's queue."""
        if client not in self._clients:
            self._clients[client] = _Waiting(self._time.account(client))
        self._clients[client].items[item] = None

    @property
    def first(self) -> Item | None:
        """The item that is next; None if no item waits."""
        return None if not self._clients else next(iter(self._clients[self._next()].items))

    def take(self) -> Item | None:
        """Remove the next item, whose client so has its turn, and return it; None if no item waits."""
        if not self._clients:
            return None
        client = self._next()
        item = next(iter(self._clients[client].items))
        self.begin_turn(client)
        self.remove(client, item)
        return item

    def in_turn(self) -> list[Item]:
        """Return the first item of each client, those of clients with less service first."""
        return [next(iter(one.items)) for one in sorted(self._clients.values(), key=lambda one: one.service)]

    def begin_turn(self, client: str) -> None:
        """Note that a client that waits has its turn."""
        self._time.take_turn(self._clients[client].service)

    def remove(self, client: str, item: Item) -> None:
        """Remove an item, if it waits."""
        waiting = self._clients.get(client)
        if waiting is None:
            return
        waiting.items.pop(item, None)
        if not waiting.items:
            del self._clients[client]
            self._time.remember(client, waiting.service)

    def charge(self, client: str, cost: float) -> None:
        """Charge a client for a turn that it had; `cost` is divided by its weight already."""
        waiting = self._clients.get(client)
        if waiting is not None:
            waiting.service += cost
        else:
            self._time.remember(client, self._time.own_account(client) + cost)

    def _next(self) -> str:
        return min(self._clients, key=lambda client: self._clients[client].service)
