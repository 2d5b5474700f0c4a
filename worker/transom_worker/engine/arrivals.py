"""`Arrivals`: requests on their way into the engine, a piece of each group between two steps.

A *group* is what one `submit` brings: the choices and prompts of an HTTP request, of which all are admitted or none. To add a
request takes a fraction of a millisecond, and a group may have a thousand, so that only `MAX_PIECE` requests are added between two
steps; clients take turns where several send more. The requests of a group that takes longer are held until its last one is there.

    add          a group has come; as much of it is added as this turn of the loop allows
    next_turn    a step has run: the groups that came before go on
    abort        a request has ended before it was added
    flush        the engine has ended, and refuses what is left
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Container
from concurrent.futures import Future
from dataclasses import dataclass, field

from transom_core.contract import ErrorInfo, Request
from transom_core.errors import Overloaded

MAX_PIECE = 32  # requests that are added between two steps
MAX_PIECE_TOKENS = 65_536  # of their prompts; one request may have more
MAX_TURN = 8  # requests that one client adds where others wait
MAX_PENDING = 8192  # requests that wait to be added; beyond them a client has its share alone


@dataclass(slots=True, kw_only=True)
class Group:
    """The requests of one `submit`, which came at `arrival_s`; those with ids in `fetched` await a prefix from another worker."""

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
    """Only the engine's thread calls it, or whoever acts for it once it has ended.

    `add(group, request)` gives a request to the engine and returns the error of a refused one; `end(group)` is called when all are
    there, or one was refused.
    """

    def __init__(self, add: Callable[[Group, Request], ErrorInfo | None], end: Callable[[Group], None]) -> None:
        self._add, self._end = add, end
        self._waiting: OrderedDict[str, deque[Group]] = OrderedDict()  # client -> its groups; the next client first
        self._group_of: dict[str, Group] = {}  # request id -> its group, of those that wait to be added
        self._num_requests, self._num_tokens = MAX_PIECE, MAX_PIECE_TOKENS  # that this turn of the loop may still add

    @property
    def is_busy(self) -> bool:
        """Whether a request waits to be added."""
        return bool(self._waiting)

    def add(self, group: Group) -> None:
        """Begin to add a group; one that is too much is refused."""
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
        self._go_on()

    def next_turn(self) -> None:
        """Add the next piece."""
        self._num_requests, self._num_tokens = MAX_PIECE, MAX_PIECE_TOKENS
        self._go_on()

    def flush(self) -> None:
        """Add all that is left."""
        while self._waiting:
            self.next_turn()

    def abort(self, request_id: str) -> None:
        """Do not add a request that has ended; any other id is ignored."""
        if (group := self._group_of.get(request_id)) is not None:
            group.aborted.add(request_id)

    def _go_on(self) -> None:
        while self._waiting and self._num_requests > 0 and self._num_tokens > 0:
            client, groups = self._waiting.popitem(last=False)
            self._add_piece(groups[0], min(self._num_requests, MAX_TURN if self._waiting else MAX_PIECE))
            if len(groups[0].results) == len(groups[0].requests):
                self._end(groups.popleft())
            if groups:
                self._waiting[client] = groups  # after all others

    def _add_piece(self, group: Group, count: int) -> None:
        """Add up to `count` requests of a group; after a refusal none of it is needed."""
        first = len(group.results)
        piece = group.requests[first : first + count]
        group.is_held = group.is_held or len(piece) < len(group.requests)
        for request in piece:
            self._num_tokens -= len(request.prompt_token_ids)
            is_wanted = request.request_id not in group.aborted
            group.results.append(self._add(group, request) if is_wanted else None)
        self._num_requests -= len(piece)
        if any(group.results):
            group.results += [None] * (len(group.requests) - len(group.results))
        for request in group.requests[first : len(group.results)]:
            self._group_of.pop(request.request_id, None)
