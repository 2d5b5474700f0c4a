"""Lets clients take turns in a router's request queue: `TurnQueue` and `WaitingRequests`.

Terms:

    cost     of a request: its prompt's tokens, and `SEQUENCE_TOKENS` more for the sequence itself, divided by its client's weight
    account  of a client: the cost of all its requests that were placed so far (`virtual_time`)

The client with the smallest account is next. The requests of one client are in the order of `InFlightRequest.queue_order`, which
includes priorities.

Example: A enters 1,000 requests, and 32 of them are placed. Then B enters 2 requests of the same cost. B's account begins where A's
last turn began, so the order is B, A, B, A, A, A, ...: B waits for at most one of A's requests, however many A has.
"""

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count

from transom_cluster.router.in_flight_requests import InFlightRequest
from transom_core.config import SchedulingPolicy
from transom_core.virtual_time import VirtualTime

SEQUENCE_TOKENS = 256  # a sequence with a short prompt takes a worker as long as about this many prompt tokens


def cost_of(request: InFlightRequest) -> float:
    """Return the cost that a request adds to its client's account."""
    return (SEQUENCE_TOKENS + num_own_tokens(request)) / request.original.client_weight


def num_own_tokens(request: InFlightRequest) -> int:
    """Return the number of a request's prompt tokens; 0 for all choices of a prompt but the first."""
    return request.original.num_prompt_tokens if request.original.choice_index == 0 else 0


def charge(accounts: VirtualTime, request: InFlightRequest) -> None:
    """Note the turn of a request, for which a worker was chosen, and add its cost to its client's account."""
    client = request.original.client
    begin = accounts.account(client)
    accounts.take_turn(begin)
    accounts.remember(client, begin + cost_of(request))


class TurnQueue:
    """A queue whose requests leave it by turns of their clients: first all requests whose streams have begun, then new ones.

    A *place* is a client's entry in a heap that `take` reads from the smallest account up. A client gets a place when its first
    request comes and after each of its turns, so that a turn costs O(log clients). A place is out of date if another request of the
    client is next now, or if the client's account has grown; `take` corrects it when it reaches the top of the heap.
    """

    def __init__(self, turns: VirtualTime, policy: SchedulingPolicy) -> None:
        self._turns, self._policy = turns, policy
        self._numbers = count()  # numbers of entries, so that equal entries keep their order
        # (is a new request, client) -> heap of requests, the next one first
        self._heaps: dict[tuple[bool, str], list[tuple[tuple[bool, float], int, InFlightRequest]]] = {}
        # Heap of clients' places: (is a new request, account, order and number of the client's next request, client)
        self._places: list[tuple[bool, float, tuple[bool, float], int, str]] = []
        self._accounts: dict[str, float] = {}  # accounts that include the requests that have left the queue

    def __bool__(self) -> bool:
        return bool(self._heaps)

    def add(self, request: InFlightRequest) -> None:
        """Add a request."""
        order, number = request.queue_order(self._policy), next(self._numbers)
        key = order[0], request.original.client
        heap = self._heaps.setdefault(key, [])
        heappush(heap, (order, number, request))
        if heap[0][1] == number:
            self._enter_place(key)

    def take(self, num_requests: int) -> list[InFlightRequest]:
        """Remove up to `num_requests` requests that have not ended from the queue, and return them in order."""
        taken: list[InFlightRequest] = []
        while self._heaps and len(taken) < num_requests:
            is_new, account, _, number, client = heappop(self._places)
            key = is_new, client
            if key not in self._heaps or self._heaps[key][0][1] != number:
                continue  # the client has a place for the request that is next now
            if account < max(self._turns.own_account(client), self._accounts.get(client, 0.0)):
                self._enter_place(key)
                continue
            _, _, request = heappop(self._heaps[key])
            if not request.has_ended:
                self._accounts[client] = self._account(client) + cost_of(request)
                taken.append(request)
            if self._heaps[key]:
                self._enter_place(key)
            else:
                del self._heaps[key]
        if not self._heaps:
            self._accounts.clear()
            self._places.clear()
        return taken

    def _enter_place(self, key: tuple[bool, str]) -> None:
        order, number, _ = self._heaps[key][0]
        heappush(self._places, (key[0], self._account(key[1]), order, number, key[1]))

    def _account(self, client: str) -> float:
        return max(self._turns.account(client), self._accounts.get(client, 0.0))


class WaitingRequests:
    """The requests that no worker may take now, by client."""

    def __init__(self) -> None:
        self._by_client: dict[str, dict[InFlightRequest, None]] = {}  # sets in the order of entry
        self._tokens_of: dict[str, int] = {}  # client -> prompt tokens of its requests
        self._num_requests = 0
        self.num_tokens = 0  # prompt tokens; all choices of a prompt share it, so it counts once

    def __len__(self) -> int:
        return self._num_requests

    def __iter__(self) -> Iterator[InFlightRequest]:
        for requests in list(self._by_client.values()):
            yield from list(requests)

    def __contains__(self, request: InFlightRequest) -> bool:
        return request in self._by_client.get(request.original.client, ())

    def add(self, request: InFlightRequest) -> None:
        """Add a request, unless it is there already."""
        requests = self._by_client.setdefault(request.original.client, {})
        if request not in requests:
            requests[request] = None
            self._num_requests += 1
            self._count_tokens(request, 1)

    def discard(self, request: InFlightRequest) -> None:
        """Remove a request, if it is there."""
        client = request.original.client
        requests = self._by_client.get(client)
        if requests is None or request not in requests:
            return
        del requests[request]
        self._num_requests -= 1
        self._count_tokens(request, -1)
        if not requests:
            del self._by_client[client], self._tokens_of[client]

    def one_to_displace(
        self, newcomer: InFlightRequest, *, max_requests: int, max_tokens: int
    ) -> InFlightRequest | None:
        """Return the request that makes room for a newcomer in a queue that is full with `max_requests` or `max_tokens`.

        A client's *level* is its share of the queue, by requests or by tokens, whichever is larger, divided by its weight. Of the
        clients that have new requests, the one with the highest level loses its newest new request. Return None if no such client
        has a higher level than the newcomer's client would have with the newcomer: then the newcomer itself must go.
        """

        def level(num_requests: int, num_tokens: int, weight: float) -> float:
            return max(num_requests / max_requests, num_tokens / max_tokens) / weight

        own, weight = newcomer.original.client, newcomer.original.client_weight
        num_requests = len(self._by_client.get(own, ())) + 1
        newcomers_level = level(num_requests, self._tokens_of.get(own, 0) + num_own_tokens(newcomer), weight)
        levels = {
            client: level(len(requests), self._tokens_of[client], next(iter(requests)).original.client_weight)
            for client, requests in self._by_client.items()
        }
        for client in sorted(levels, key=levels.__getitem__, reverse=True):
            if levels[client] <= newcomers_level:
                return None
            for request in reversed(self._by_client[client]):
                if not request.was_accepted:  # a stream that migrates always waits
                    return request
        return None

    def _count_tokens(self, request: InFlightRequest, sign: int) -> None:
        client, num_tokens = request.original.client, sign * num_own_tokens(request)
        self._tokens_of[client] = self._tokens_of.get(client, 0) + num_tokens
        self.num_tokens += num_tokens
