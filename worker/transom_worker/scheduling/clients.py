"""`Clients`: the clients whose requests are at this worker, and whose sequence is admitted next.

Terms:

    sequence      one request inside the scheduler
    weight        a client's part compared with others': with weights 2 and 1, the first client gets twice as much
    running slot  up to `max_num_seqs` sequences run at once, each in a slot; one that awaits a prefix keeps a slot as well
    level         a client's running slots, divided by its weight
    service       tokens that were computed for a client, divided by its weight: its *virtual time*
    turn          clients take turns at running slots: the client with the lowest level admits its next sequence
    share         what a client may use of something while others need it too: its weight divided by the weights of all
    place         where an unfinished sequence is: in the queue, awaiting a prefix, held (not yet to be admitted), or running

The calls for one sequence `s`, each of which `AdmissionControl` or `Scheduler` makes:

    clients.join(s); waiting.put(s, InQueue())                 # it arrives
    clients.admitted(s); waiting.remove(s); running.add(s)     # it is admitted
    clients.served(s); running.remove(s)                       # it stops running: its client is charged; then either
    waiting.put(s, InQueue())                                  #     it was preempted, or
    clients.leave(s)                                           #     it has finished

Of clients with equal levels the one with less service is first (`virtual_time`), so that clients get tokens in the ratio of their
weights even if there is a single slot. The sequences of one client have the order of `queue`, priorities included.

Example with 4 slots and equal weights: A has 1,000 sequences, of which 4 run, and B's first one arrives. B's level is 0 and A's is
4, so B gets the next slot, and also the one after that. When B has nothing more to run, A gets all slots again.

A single client always has the turn, so that nothing but the order of its own sequences counts.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice

from transom_core.contract import Request
from transom_core.virtual_time import VirtualTime
from transom_worker.scheduling.queue import OrderedQueue
from transom_worker.scheduling.sequence import AwaitsPrefix, Held, InQueue, OrderKey, Sequence, Wait

# With which a worker's unfinished requests may arrive, some 1.5 GB of integers; beyond it a client may have its share only.
MAX_TOKENS = 2**25


class Client:
    """One client's unfinished sequences by place, and its service. Only the other classes of this module change it."""

    def __init__(self, name: str, service: float) -> None:
        self.name = name
        self.weight = 1.0
        self.queue = OrderedQueue()  # sequences that may be admitted, the first one first
        self.awaiting_prefix = OrderedQueue()
        self.held = OrderedQueue()
        self.running = OrderedQueue()
        self.num_sequences = 0  # at all four places together
        self.num_tokens = 0  # with which these sequences arrived
        self.service = service  # of its sequences that have stopped running
        # Its entry in `Clients._turns`; None without a queue.
        self.turn: tuple[float, float, OrderKey, Client] | None = None

    @property
    def num_slots(self) -> int:
        """Running slots in use."""
        return len(self.running) + len(self.awaiting_prefix)

    @property
    def level(self) -> float:
        """Running slots in use, divided by the weight."""
        return self.num_slots / self.weight


class Clients:
    """All clients that have unfinished sequences.

    Finding a client's entry in the order of turns takes time in proportion to the logarithm of the number of clients.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, Client] = {}
        self._with_slots: dict[Client, None] = {}  # those that have running slots, as an ordered set
        # (level, service, order key of the first sequence, client) of each client with a queue; the next one in turn first. Order
        # keys differ, so clients are never compared.
        self._turns: list[tuple[float, float, OrderKey, Client]] = []
        self._time = VirtualTime()
        self._total_weight = 0.0
        self.num_tokens = 0  # with which all unfinished sequences arrived

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Client]:
        return iter(self._by_name.values())

    def of(self, sequence: Sequence) -> Client:
        """Return the client of an unfinished sequence."""
        return self._by_name[sequence.request.client]

    def next_waiting(self, num_clients: int | None = None) -> Iterator[Client]:
        """Yield the clients that have a queue in the order of their turns, `num_clients` at most.

        The caller must not go on with the iteration after a change.
        """
        return (entry[3] for entry in islice(self._turns, num_clients))

    @property
    def with_slots(self) -> Iterable[Client]:
        """The clients that have running slots: no more than there are slots."""
        return self._with_slots

    def exceeds_share(self, request: Request, *, num_places: float = math.inf, num_tokens: float = math.inf) -> bool:
        """Return whether one more sequence of this request's client would exceed its share of `num_places` or `num_tokens`.

        That is how many sequences, and tokens of them, the worker takes in all. A client without sequences never exceeds its
        share.
        """
        client = self._by_name.get(request.client)
        if client is None:
            return False
        share, own_tokens = client.weight / self._total_weight, client.num_tokens + num_arriving(request)
        return client.num_sequences + 1 > max(1.0, num_places * share) or own_tokens > num_tokens * share

    def join(self, sequence: Sequence) -> None:
        """Count a new sequence, before it is put at any place. The newest request decides the weight of its client."""
        request = sequence.request
        client = self._by_name.get(request.client)
        if client is None:
            client = self._by_name[request.client] = Client(request.client, self._time.account(request.client))
        else:
            self._total_weight -= client.weight
        self._total_weight += request.client_weight
        client.weight = request.client_weight
        client.num_sequences += 1
        client.num_tokens += num_arriving(request)
        self.num_tokens += num_arriving(request)
        self.changed(client)

    def leave(self, sequence: Sequence) -> None:
        """Forget a finished sequence, which must have left its place; forget its client too if this was the client's last one."""
        client = self.of(sequence)
        client.num_sequences -= 1
        client.num_tokens -= num_arriving(sequence.request)
        self.num_tokens -= num_arriving(sequence.request)
        if client.num_sequences:
            return
        del self._by_name[client.name]
        # Exactly 0 without clients: sums of weights are rounded.
        self._total_weight = self._total_weight - client.weight if self._by_name else 0.0
        self._time.remember(client.name, client.service)

    def admitted(self, sequence: Sequence) -> None:
        """Note that a sequence was admitted, so that its client has had its turn (`VirtualTime.take_turn`)."""
        self._time.take_turn(self.of(sequence).service)

    def served(self, sequence: Sequence) -> None:
        """Charge a client for a sequence that stops running: the tokens that were computed since it was admitted."""
        client = self.of(sequence)
        # At least one token, so that a turn is never free.
        client.service += max(1, num_computed(sequence)) / client.weight

    def running_in_turns(self) -> list[Sequence]:
        """Return the running sequences in the order in which they get tokens if a step has too few for all.

        The n-th sequence of a client (n from 1) has the rank n / weight, and lower ranks come first: so clients get tokens in the
        ratio of their weights. Example: A with weight 2 runs a1, a2 and a3 (ranks 0.5, 1 and 1.5), B with weight 1 runs b1 (rank
        1). The order is a1, then a2 and b1 by their order keys, then a3.
        """
        ranked = (
            ((rank + 1) / client.weight, sequence.order_key, sequence)
            for client in self
            for rank, sequence in enumerate(client.running)
        )
        return [sequence for _, _, sequence in sorted(ranked, key=lambda one: one[:2])]

    def reserved_before(self, sequence: Sequence, *, num_free_slots: int) -> int:
        """Return how many tokens of a step a running sequence leaves to former waiters of its client that stand before it in order.

        If they had not waited for a prefix, they would be running and be served first. Only as many of them count as can be
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
        """Move a client to its new position in the order of turns, after its queue, slots or service have changed."""
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
        """Return how many sequences of the same client come before this one in order; those of others do not delay it."""
        return self._place(self._clients.of(sequence)).num_before(sequence)


class WaitingSequences:
    """Every WAITING sequence, each at one of three places; `Sequence.wait` says at which, and what it waits for.

    Iteration yields all of them: those of the queue first, then those that await a prefix, then held ones.
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
        """Move a sequence to the place of this `wait`, from the place where it waited before, if any. Its order key stays."""
        self.remove(sequence)
        sequence.wait = wait
        self._places[type(wait)].add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, if it waits."""
        if sequence.wait is not None:
            self._places[type(sequence.wait)].remove(sequence)
            sequence.wait = None


def num_arriving(request: Request) -> int:
    """Return the number of tokens with which a request arrives."""
    return len(request.prompt_token_ids) + len(request.resumed_output_ids)


def num_computed(sequence: Sequence) -> int:
    """Return how many tokens of a running sequence plans have scheduled since its admission."""
    return sequence.scheduled - sequence.num_found_at_admission
