"""`WaitingSequences`: all sequences that wait, each at one place."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from transom_worker.scheduling.clients import Clients, ClientsQueue
from transom_worker.scheduling.queue import OrderedQueue
from transom_worker.scheduling.sequence import AwaitsPrefix, Held, InQueue, Sequence, Wait


class WaitingSequences:
    """Every WAITING sequence, each at one of three places; `Sequence.wait` says which, and what it waits for.

    Iteration and length count all of them: those of the queue first, then those that await a prefix, then held ones.
    """

    def __init__(self, clients: Clients) -> None:
        self.queue = ClientsQueue(clients, lambda client: client.queue)  # may be admitted
        self.awaiting_prefix = ClientsQueue(clients, lambda client: client.awaiting_prefix)
        self.held = ClientsQueue(clients, lambda client: client.held)
        self._places: dict[type[Wait], OrderedQueue] = {
            InQueue: self.queue,
            AwaitsPrefix: self.awaiting_prefix,
            Held: self.held,
        }

    def __len__(self) -> int:
        return sum(map(len, self._places.values()))

    def __iter__(self) -> Iterator[Sequence]:
        return chain.from_iterable(self._places.values())

    def num_before(self, sequence: Sequence) -> int:
        """Return how many waiting sequences of the same client stand before this one."""
        return sum(place.num_before(sequence) for place in self._places.values())

    def put(self, sequence: Sequence, wait: Wait) -> None:
        """Let a sequence wait like this from now on, wherever it waited before. It keeps its place in the order."""
        self.remove(sequence)
        sequence.wait = wait
        self._places[type(wait)].add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, if it waits."""
        if sequence.wait is not None:
            self._places[type(sequence.wait)].remove(sequence)
            sequence.wait = None
