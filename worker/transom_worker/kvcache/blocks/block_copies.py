"""The block copies that the ranks must make, within a tier or between tiers: `CopyQueue` has them in order, and `LoadTurns` sends
the loads among them in turns of the clients that want them.

All copies of all plans take effect in the order in which they were queued. So a block may be the source of one copy and the target
of a later one: its old contents are copied to the host before new contents replace them.

A *load* is an asynchronous copy from the host to the device, or from the disk to the host. All its copies have *tickets*, numbers
above 0; until the ranks have reported them, no other copy and no step reads or writes the load's blocks. So a load may be queued
later than copies that came after it. The ranks make loads one after the other, in the order in which plans bring them. So a load is
cut into *pieces* of about `PIECE_S`, and only pieces for about `window_s` are *in flight* at the ranks; the others wait here. When
there is room, the client that has had the fewest bytes for its weight sends its next piece (`client_queue`). A client alone uses
the whole bandwidth; a client beside others waits for what is in flight, and then for as many bytes of each other client as of its
own.

    ticket = turns.add(copies, sharer)           a load begins; its ticket is that of its first piece
    turns.take_due()                             the pieces that the next plan carries
    turns.ended(result)                          replaces the tickets of pieces in a step's result by those of whole loads

Pieces are sent only with plans, after results. So the window is long enough to keep the ranks busy for `STEPS_IN_WINDOW` of the
longest recent steps: until a result arrives, and until the ranks have got the plan after it, which may wait for a step in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from transom_core.client_queue import ClientQueue, Sharer
from transom_core.kv_cache.load_rates import LoadRates
from transom_core.kv_cache.tiers import DEVICE, DISK


class BlockCopy(NamedTuple):
    """A copy of the contents of block `source` to block `target` of the same group.

    With ticket 0 it is made before the next forward pass. On the disk, `digest` names the block, and that end's id is 0.
    """

    group: int
    source: int
    target: int
    source_tier: int = DEVICE
    target_tier: int = DEVICE
    ticket: int = 0
    digest: bytes = b""


PIECE_S = 0.02
WINDOW_S = 0.25  # at least
STEPS_IN_WINDOW = 2.0
STEP_DECAY = 0.9  # a step counts as this much shorter with each later one, as long as no later one took longer


@dataclass(slots=True, eq=False)
class _Load:
    """A load whose pieces were not all reported: some wait, and `num_in_flight` are at the ranks."""

    ticket: int
    sharer: Sharer
    waiting: dict[_Piece, None] = field(default_factory=dict)
    num_in_flight: int = 0
    num_ended: int = 0
    seconds: float = 0.0  # that the ended pieces took
    has_failed: bool = False


@dataclass(slots=True, eq=False)
class _Piece:
    load: _Load
    ticket: int
    copies: list[BlockCopy]
    num_bytes: int
    estimated_ns: int


class LoadTurns:
    """The unfinished loads of one kind. `block_bytes` are the bytes of a group's block; `block_ns()` returns the nanoseconds that
    moving a block is estimated to take, by group; `next_ticket()` returns a new ticket."""

    def __init__(
        self, block_bytes: Sequence[int], block_ns: Callable[[], Sequence[int]], next_ticket: Callable[[], int]
    ) -> None:
        self._block_bytes, self._block_ns, self._next_ticket = block_bytes, block_ns, next_ticket
        self._loads: dict[int, _Load] = {}  # by ticket
        self._waiting: ClientQueue[_Piece] = ClientQueue()
        self._in_flight: dict[int, _Piece] = {}  # by the piece's ticket
        self._in_flight_ns = 0
        self._step_s = 0.0  # the longest recent step

    @property
    def window_s(self) -> float:
        """For how long the ranks have work with the pieces that are in flight."""
        return max(WINDOW_S, STEPS_IN_WINDOW * self._step_s)

    def stepped(self, step_s: float) -> None:
        """Note how long a step took."""
        self._step_s = max(step_s, STEP_DECAY * self._step_s)

    def add(self, copies: Sequence[BlockCopy], sharer: Sharer) -> int:
        """Begin a load, and return its ticket."""
        load = _Load(0, sharer)
        for piece in self._pieces(load, copies):
            load.ticket = load.ticket or piece.ticket
            load.waiting[piece] = None
            self._waiting.add(sharer.client, piece)
        self._loads[load.ticket] = load
        return load.ticket

    def take_due(self) -> list[BlockCopy]:
        """Return the copies of the pieces that are due; the next plan must carry them."""
        due: list[BlockCopy] = []
        while self._in_flight_ns < self.window_s * 1e9 and (piece := self._waiting.take()) is not None:
            load = piece.load
            self._waiting.charge(load.sharer.client, piece.num_bytes / load.sharer.weight)
            del load.waiting[piece]
            load.num_in_flight += 1
            self._in_flight[piece.ticket] = piece
            self._in_flight_ns += piece.estimated_ns
            due += (copy._replace(ticket=piece.ticket) for copy in piece.copies)
        return due

    def ended(self, ticket: int, seconds: float, *, has_failed: bool) -> _Load | None:
        """Note that the ranks have reported a piece; return its load if that was the last piece. Other tickets are ignored.

        If a piece fails, those of the load that still wait are never sent.
        """
        piece = self._in_flight.pop(ticket, None)
        if piece is None:
            return None
        self._in_flight_ns -= piece.estimated_ns
        load = piece.load
        load.num_in_flight -= 1
        load.num_ended += 1
        load.seconds += seconds
        load.has_failed |= has_failed
        if load.has_failed:
            self._drop_waiting(load)
        if load.num_in_flight or load.waiting or load.ticket not in self._loads:
            return None
        return self._loads.pop(load.ticket)

    def progress(self, ticket: int) -> int | None:
        """Return how many pieces of a load have ended; None if none is in flight, so that the load waits for its turn."""
        load = self._loads[ticket]
        return load.num_ended if load.num_in_flight else None

    def num_waiting(self, ticket: int) -> int:
        """Return how many copies of this load, its last ones, still wait for their turn."""
        return sum(len(piece.copies) for piece in self._loads[ticket].waiting)

    def cut(self, ticket: int) -> bool:
        """Do not send the pieces of a load that still wait. Return whether others are in flight; if not, the load is forgotten."""
        load = self._loads[ticket]
        self._drop_waiting(load)
        if not load.num_in_flight:
            del self._loads[ticket]
        return load.num_in_flight > 0

    def withdraw(self, tickets: Iterable[int]) -> list[int]:
        """Forget the loads of these pieces, whose plans the ranks may not have received, and return the loads' tickets."""
        pieces = [self._in_flight[ticket] for ticket in tickets if ticket in self._in_flight]
        loads = dict.fromkeys(piece.load for piece in pieces)
        for load in loads:
            self._drop_waiting(load)
            del self._loads[load.ticket]
        for piece in [one for one in self._in_flight.values() if one.load in loads]:
            self._in_flight_ns -= self._in_flight.pop(piece.ticket).estimated_ns
        return [load.ticket for load in loads]

    def clear(self) -> None:
        """Forget all loads, since the ranks were restarted."""
        for load in self._loads.values():
            self._drop_waiting(load)
        self._loads, self._in_flight, self._in_flight_ns = {}, {}, 0

    def _drop_waiting(self, load: _Load) -> None:
        for piece in load.waiting:
            self._waiting.remove(load.sharer.client, piece)
        load.waiting.clear()

    def _pieces(self, load: _Load, copies: Sequence[BlockCopy]) -> Iterator[_Piece]:
        """Cut a load into pieces of at least one copy and about `PIECE_S`."""
        block_ns = self._block_ns()
        piece = _Piece(load, 0, [], 0, 0)
        for copy in copies:
            piece.copies.append(copy)
            piece.num_bytes += self._block_bytes[copy.group]
            piece.estimated_ns += max(1, block_ns[copy.group])  # tiny blocks may be estimated at 0
            if piece.estimated_ns >= PIECE_S * 1e9 or copy is copies[-1]:
                piece.ticket = self._next_ticket()
                yield piece
                piece = _Piece(load, 0, [], 0, 0)


class CopyQueue:
    """Collects copies until a plan takes them; `waiting` has those that no plan carries yet, without the loads that wait for their
    turn.

    `block_bytes` are the bytes of a group's block; `rates()` returns the present load rates, None without a host tier.
    """

    def __init__(self, block_bytes: Sequence[int], rates: Callable[[], LoadRates | None]) -> None:
        self.waiting: list[BlockCopy] = []
        next_ticket = count(1).__next__
        self.loads = LoadTurns(block_bytes, lambda: _known(rates()).block_ns, next_ticket)  # from the host
        self.reads = LoadTurns(block_bytes, lambda: _known(rates()).read_ns, next_ticket)  # from the disk

    def add(
        self, group: int, source: int, target: int, *, source_tier: int = DEVICE, target_tier: int = DEVICE
    ) -> None:
        """Queue a copy that is made before the next forward pass."""
        self.waiting.append(BlockCopy(group, source, target, source_tier, target_tier))

    def add_store(self, group: int, block: int, tier: int, digest: bytes) -> None:
        """Queue a copy of a block of this tier to the disk. The ranks read its contents before a later copy overwrites them."""
        self.waiting.append(BlockCopy(group, block, 0, tier, DISK, digest=digest))

    def add_load(self, copies: Sequence[BlockCopy], sharer: Sharer) -> int:
        """Queue the copies of one load for their client's turns, and return its ticket."""
        ticket = (self.reads if copies[0].source_tier == DISK else self.loads).add(copies, sharer)
        self._send_due()
        return ticket

    def ended(
        self, loaded: Sequence[int], load_s: Sequence[float], failed: Sequence[int], *, step_s: float = 0.0
    ) -> tuple[list[int], list[float], list[int]]:
        """Note the pieces of loads that a step's result reports; return the same three lists of the loads that have ended so.

        `step_s` is how long the step took, without its copies.
        """
        for turns in (self.loads, self.reads):
            turns.stepped(step_s)
        reports = [*zip(loaded, load_s, strict=True), *((ticket, 0.0) for ticket in failed)]
        ended = [
            load
            for at, (ticket, seconds) in enumerate(reports)
            for turns in (self.loads, self.reads)
            if (load := turns.ended(ticket, seconds, has_failed=at >= len(loaded))) is not None
        ]
        self._send_due()
        whole = [load for load in ended if not load.has_failed]
        return (
            [load.ticket for load in whole],
            [load.seconds for load in whole],
            [load.ticket for load in ended if load.has_failed],
        )

    def clear(self) -> None:
        """Forget all copies, since the ranks were restarted."""
        self.waiting = []
        self.loads.clear()
        self.reads.clear()

    def take(self) -> list[BlockCopy]:
        """Return the copies since the last call, in order; the next plan must carry them."""
        copies, self.waiting = self.waiting, []
        return copies

    def _send_due(self) -> None:
        self.waiting += self.loads.take_due() + self.reads.take_due()


def _known(rates: LoadRates | None) -> LoadRates:
    assert rates is not None  # there are loads, so there is a host tier
    return rates
