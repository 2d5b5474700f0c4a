"""`Clients`: the clients whose requests are at this worker, and which of them is admitted next.

Terms:

    running slot  one of the `max_num_seqs` places of running sequences; a sequence that awaits a prefix keeps one as well
    level         a client's running slots, divided by its weight
    service       tokens that were computed for a client, divided by its weight: its *virtual time*
    share         what a client may use of something while others want it too: its weight divided by the weights of all

Clients take turns at running slots: the client with the lowest level admits its next sequence. Of equal levels the one with less
service is first (`virtual_time`), so that clients get tokens in the ratio of their weights even where there is a single slot.
Inside a client sequences have the order of `queue`, priorities included.

Example with 4 slots and equal weights: A has 1,000 sequences, of which 4 run, and B's first one comes. B's level is 0 and A's is 4,
so B has the next slot, and also the one after that, unless it has nothing more to run: then A has all slots again.

A single client is always the next one, so that nothing but the order of its own sequences counts.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice

from transom_core.contract import Request
from transom_core.virtual_time import VirtualTime
from transom_worker.scheduling.queue import OrderedQueue
from transom_worker.scheduling.sequence import AwaitsPrefix, Held, InQueue, OrderKey, Sequence, Wait


class Client:
    """One client's unfinished sequences by place, and its service. `Clients` changes it."""

    def __init__(self, name: str, service: float) -> None:
        self.name = name
        self.weight = 1.0
        self.queue = OrderedQueue()  # may be admitted, the first one first
        self.awaiting_prefix = OrderedQueue()
        self.held = OrderedQueue()
        self.running = OrderedQueue()
        self.num_sequences = 0  # at these places
        self.service = service
        self.turn: tuple[float, float, OrderKey, Client] | None = None  # its entry in the order of turns

    @property
    def num_slots(self) -> int:
        """Running slots in use."""
        return len(self.running) + len(self.awaiting_prefix)

    @property
    def level(self) -> float:
        """Running slots in use, divided by the weight."""
        return self.num_slots / self.weight


class Clients:
    """All clients that have unfinished sequences. Every change of a client costs the logarithm of their number."""

    def __init__(self) -> None:
        self._by_name: dict[str, Client] = {}
        self._with_slots: dict[Client, None] = {}  # those that have running slots
        self._turns: list[tuple[float, float, OrderKey, Client]] = []  # of clients with a queue, the next one first
        self._time = VirtualTime()
        self._total_weight = 0.0

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Client]:
        return iter(self._by_name.values())

    def of(self, sequence: Sequence) -> Client:
        """Return the client of an unfinished sequence."""
        return self._by_name[sequence.request.client]

    def next_waiting(self, num_clients: int | None = None) -> Iterator[Client]:
        """Yield the clients that have a queue in the order of their turns, `num_clients` at most. Changes end the iteration."""
        return (entry[3] for entry in islice(self._turns, num_clients))

    @property
    def with_slots(self) -> Iterable[Client]:
        """The clients that have running slots: no more than there are slots."""
        return self._with_slots

    def exceeds_share(self, request: Request, num_places: int) -> bool:
        """Return whether one more sequence of this request's client would be more than its share of `num_places`."""
        client = self._by_name.get(request.client)
        if client is None:
            return False
        return client.num_sequences + 1 > max(1.0, num_places * client.weight / self._total_weight)

    def join(self, sequence: Sequence) -> None:
        """Count a new sequence, before it is put anywhere. The newest request decides the weight of its client."""
        request = sequence.request
        client = self._by_name.get(request.client)
        if client is None:
            client = self._by_name[request.client] = Client(request.client, self._time.account(request.client))
        else:
            self._total_weight -= client.weight
        self._total_weight += request.client_weight
        client.weight = request.client_weight
        client.num_sequences += 1
        self.changed(client)

    def leave(self, sequence: Sequence) -> None:
        """Forget a finished sequence, which is at no place any more, and its client with its last one."""
        client = self.of(sequence)
        client.num_sequences -= 1
        if client.num_sequences:
            return
        del self._by_name[client.name]
        self._total_weight = self._total_weight - client.weight if self._by_name else 0.0
        self._time.remember(client.name, client.service)

    def admitted(self, sequence: Sequence) -> None:
        """Note that a sequence has its client's turn."""
        self._time.take_turn(self.of(sequence).service)

    def served(self, sequence: Sequence) -> None:
        """Charge a client for a sequence that stops running: the tokens that were computed since it was admitted."""
        client = self.of(sequence)
        client.service += max(1, num_computed(sequence)) / client.weight

    def running_in_turns(self) -> list[Sequence]:
        """Return the running sequences in the order in which they get tokens where there are too few: the first one of each client,
        then the second ones, by weight.
        """
        ranked = (
            ((rank + 1) / client.weight, sequence.order_key, sequence)
            for client in self
            for rank, sequence in enumerate(client.running)
        )
        return [sequence for _, _, sequence in sorted(ranked, key=lambda one: one[:2])]

    def reserved_before(self, sequence: Sequence, *, num_free_slots: int) -> int:
        """Return how many tokens of a step a running sequence leaves to former waiters of its client that stand before it in order.

        Had they not waited for a prefix, they would be running and be served first. Only as many of them count as can be
        admitted: the number of free running slots. Example: former waiters with 64 and 80 reserved tokens stand before the
        sequence, and one slot is free: 64 tokens.
        """
        reserved_tokens = 0
        for waiting in islice(self.of(sequence).queue, max(0, num_free_slots)):
            if not waiting.reserved_tokens or waiting.order_key > sequence.order_key:
                break
            reserved_tokens += waiting.reserved_tokens
        return reserved_tokens

    def changed(self, client: Client) -> None:
        """Put a client where it belongs in the order of turns."""
        if client.num_slots:
            self._with_slots[client] = None
        else:
            self._with_slots.pop(client, None)
        if client.turn is not None:
            del self._turns[bisect_left(self._turns, client.turn)]
            client.turn = None
        if client.queue:
            client.turn = (client.level, client.service, client.queue.first.order_key, client)
            insort(self._turns, client.turn)


class ClientsQueue(OrderedQueue):
    """The sequences of all clients at one place, in order; each is also in its client's own queue of that place."""

    def __init__(self, clients: Clients, place: Callable[[Client], OrderedQueue]) -> None:
        super().__init__()
        self._clients, self._place = clients, place

    def add(self, sequence: Sequence) -> None:
        """Insert a sequence, in order."""
        super().add(sequence)
        client = self._clients.of(sequence)
        self._place(client).add(sequence)
        self._clients.changed(client)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, which must be in the queue."""
        super().remove(sequence)
        client = self._clients.of(sequence)
        self._place(client).remove(sequence)
        self._clients.changed(client)

    def num_before(self, sequence: Sequence) -> int:
        """Return how many sequences of the same client come before this one in order; others' do not keep it waiting."""
        return self._place(self._clients.of(sequence)).num_before(sequence)


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


def num_computed(sequence: Sequence) -> int:
    """Return how many tokens of a running sequence plans have computed since its admission."""
    return sequence.scheduled - sequence.num_found_at_admission
