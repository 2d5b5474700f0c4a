"""`Arrivals`: adds arriving requests to the engine, at most `MAX_PIECE` of them between two steps.

A *group* has the requests of one `submit`: the choices and prompts of an HTTP request, of which all are admitted or none. Adding a
request takes a fraction of a millisecond, and a group may have a thousand requests. So large groups are added in pieces, one per
*turn* of the engine's loop, so that steps are not delayed; clients take turns if several have more. If a group takes more than one
turn, its requests are held until its last one is there.

    add          a group has arrived: it waits for the next turn
    next_turn    the groups that arrived during a step are here: add pieces of those that wait
    abort        a request has ended before it was added, and takes no part of a turn
    flush        the engine has ended, and refuses all requests that are left
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Container
from concurrent.futures import Future
from dataclasses import dataclass, field

from transom_core.contract import ErrorInfo, Request
from transom_core.errors import Overloaded

MAX_PIECE = 32  # requests that are added between two steps
MAX_PIECE_TOKENS = 65_536  # of their prompts; one request may have more
MAX_TURN = 8  # requests that one client adds before the next client, if others wait
# Requests that wait to be added; if more wait, a client may have only its equal share of this number.
MAX_PENDING = 8192


@dataclass(slots=True, kw_only=True)
class Group:
    """The requests of one `submit`, which arrived at `arrival_s`; those with ids in `fetched` await a prefix from another
    worker."""

    requests: list[Request]
    arrival_s: float
    fetched: Container[str]
    future: Future[list[ErrorInfo | None]]
    results: list[ErrorInfo | None] = field(default_factory=list)  # of the requests that were added or refused
    aborted: set[str] = field(default_factory=set)
    is_held: bool = False  # until its last request is there

    @property
    def client(self) -> str:
        """The client that sent the group."""
        return self.requests[0].client if self.requests else ""


class Arrivals:
    """The groups that are not added completely. Only the engine's thread calls the methods, or the thread that ends the engine.

    `add(group, request)` gives a request to the engine, and returns the error if the engine refuses it. `end(group)` is called
    when all requests of a group were added, or one was refused.
    """

    def __init__(self, add: Callable[[Group, Request], ErrorInfo | None], end: Callable[[Group], None]) -> None:
        self._add, self._end = add, end
        self._waiting: OrderedDict[str, deque[Group]] = OrderedDict()  # client -> its groups; the next client first
        self._group_of: dict[str, Group] = {}  # request id -> its group, of those that wait to be added
        self._num_requests = self._num_tokens = 0  # that this turn of the loop may still add

    @property
    def is_busy(self) -> bool:
        """Whether a request waits to be added."""
        return bool(self._waiting)

    def add(self, group: Group) -> None:
        """Queue a group, or refuse it if too many requests of its client wait to be added."""
        own = self._waiting.get(group.client, ())
        num_clients = len(self._waiting) + (not own)
        num_own = sum(len(one.requests) - len(one.results) for one in own)
        if len(self._group_of) >= MAX_PENDING and num_own >= MAX_PENDING / num_clients:
            error = Overloaded(f"{len(self._group_of)} requests wait to be queued; try again later.")
            group.results = [ErrorInfo.of(error)] * len(group.requests)
            self._end(group)
            return
        self._group_of |= {request.request_id: group for request in group.requests}
        self._waiting.setdefault(group.client, deque()).append(group)

    def next_turn(self) -> None:
        """Add up to `MAX_PIECE` requests in pieces of the waiting groups, client by client."""
        self._num_requests, self._num_tokens = MAX_PIECE, MAX_PIECE_TOKENS
        while self._waiting and self._num_requests > 0 and self._num_tokens > 0:
            client, groups = self._waiting.popitem(last=False)
            self._add_piece(groups[0], min(self._num_requests, MAX_TURN if self._waiting else MAX_PIECE))
            if len(groups[0].results) == len(groups[0].requests):
                self._end(groups.popleft())
            if groups:
                self._waiting[client] = groups  # after all others

    def flush(self) -> None:
        """Add all requests that are left."""
        while self._waiting:
            self.next_turn()

    def abort(self, request_id: str) -> None:
        """Do not add a request that has ended; any other id is ignored."""
        if (group := self._group_of.get(request_id)) is not None:
            group.aborted.add(request_id)

    def _add_piece(self, group: Group, count: int) -> None:
        """Add up to `count` requests of a group; after a refusal its other requests are not tried."""
        first = len(group.results)
        left, aborted = range(first, len(group.requests)), group.aborted
        wanted = [number for number in left if group.requests[number].request_id not in aborted]
        end = wanted[count] if len(wanted) > count else len(group.requests)
        group.is_held = group.is_held or end < len(group.requests)
        for request in group.requests[first:end]:
            if request.request_id in aborted:
                group.results.append(None)
                continue
            group.results.append(self._add(group, request))
            self._num_requests -= 1
            self._num_tokens -= len(request.prompt_token_ids)
        if any(group.results):
            group.results += [None] * (len(group.requests) - len(group.results))
        for request in group.requests[first : len(group.results)]:
            if self._group_of.get(request.request_id) is group:  # else it was aborted, and its id is used again
                del self._group_of[request.request_id]
