"""Groups of requests come into the engine in pieces: none holds a step, none stands before another client's, all or none run."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from tests.engine_driver import WAIT_S, OnThread, make_request
from tests.worker.conftest import Start
from transom_core.contract import ErrorInfo, Request
from transom_core.errors import Overloaded
from transom_worker.engine.arrivals import MAX_PIECE, Arrivals, Group

REFUSED = ErrorInfo.of(Overloaded("full"))


class Engine:
    """Notes what is added, and refuses what the test names."""

    def __init__(self) -> None:
        self.added: list[str] = []
        self.ended: list[Group] = []
        self.refuses = ""
        self.arrivals = Arrivals(self._add, self.ended.append)

    def _add(self, group: Group, request: Request) -> ErrorInfo | None:
        self.added.append(request.request_id)
        return REFUSED if request.request_id == self.refuses else None

    def submit(self, client: str, count: int, *, num_tokens: int = 1, name: str = "") -> Group:
        item = replace(make_request("", [1] * num_tokens), client=client)
        requests = [replace(item, request_id=f"{client}{name}{number}") for number in range(count)]
        group = Group(requests=requests, arrival_s=0.0, fetched=(), future=Future())
        self.arrivals.add(group)
        return group

    def turn(self) -> list[str]:
        """Return what one more turn of the loop adds."""
        before = len(self.added)
        self.arrivals.next_turn()
        return self.added[before:]


def test_a_large_group_is_added_in_pieces_and_held_until_it_is_there() -> None:
    engine = Engine()
    group = engine.submit("a", 3 * MAX_PIECE + 1)
    assert [len(engine.turn()) for _ in range(5)] == [MAX_PIECE] * 3 + [1, 0]
    assert group.is_held
    assert engine.ended == [group]
    whole = engine.submit("a", MAX_PIECE)
    assert len(engine.turn()) == MAX_PIECE
    assert not whole.is_held
    for name in "xyz":
        engine.submit("a", 1, num_tokens=40_000, name=name)
    assert len(engine.turn()) == 2  # long prompts count, too
    assert engine.arrivals.is_busy


def test_clients_take_turns() -> None:
    engine = Engine()
    for _ in range(3):
        engine.submit("a", 1000)
    engine.turn()
    engine.submit("b", 2)
    assert {"b0", "b1"} <= set(engine.turn())  # the turn after it has come, although A has more than a turn
    engine.submit("c", 100)
    assert sum(name.startswith("c") for name in engine.turn()) == MAX_PIECE // 2


def test_a_group_that_is_left_or_refused_is_not_added_to_the_end() -> None:
    engine = Engine()
    left = engine.submit("a", 100)
    engine.turn()
    for request in left.requests:
        engine.arrivals.abort(request.request_id)
    engine.arrivals.abort("unknown")
    engine.refuses = "b40"
    refused = engine.submit("b", 100)
    assert len(engine.turn()) == MAX_PIECE  # none of which is an aborted request
    assert engine.ended == [left]
    engine.arrivals.flush()
    assert engine.ended == [left, refused]
    assert [name for name in engine.added if name[0] == "a"] == [f"a{number}" for number in range(MAX_PIECE)]
    assert len(engine.added) <= 32 + 41 + MAX_PIECE
    assert refused.results == [REFUSED if number == 40 else None for number in range(100)]
    assert left.results == [None] * 100


def test_what_waits_to_be_added_is_bounded_and_each_client_has_its_share() -> None:
    engine = Engine()
    for number in range(8):
        engine.submit("a", 1024, name=f"{number}-")
    refused = engine.submit("a", 1024)
    assert engine.ended == [refused]
    assert refused.results[0] is not None
    assert refused.results[0].kind == "Overloaded"
    engine.submit("b", 1024)
    assert engine.ended == [refused]


def test_a_stream_goes_on_between_the_pieces_of_another_client_s_group(start: Start) -> None:
    """The audit's attack: one POST of 1,024 prompts. Before, no step ran before the last of them was added."""
    engine = start(max_waiting=2000)
    order: list[str] = []
    add, step = engine.add, engine.step

    def noted_add(request: Request, **options: object) -> None:
        order.append("add")
        add(request, **options)  # type: ignore[arg-type]

    def noted_step(*deliver: Any) -> object:
        order.append("step")
        return step(*deliver)

    engine.add, engine.step = noted_add, noted_step  # type: ignore[method-assign, assignment]
    on_thread = OnThread(engine)
    thread = on_thread.thread
    try:
        on_thread.submit(replace(make_request("victim", [5, 6], max_tokens=100), client="victim"))
        prompts = [replace(make_request(f"h{number}", [7], max_tokens=1), client="hostile") for number in range(300)]
        assert on_thread.submit(*prompts) == [None] * 300
        left = [
            replace(one, request_id=f"left {one.request_id}", params=replace(one.params, max_tokens=500))
            for one in prompts
        ]
        future = thread.submit(left)
        thread.abort([one.request_id for one in left])  # while most of them are still to be added
        assert future.result(WAIT_S) == [None] * 300
        ended = set()
        while len(ended) < 301:
            ended |= {
                event.request_id for event in on_thread.delivered.get(timeout=WAIT_S).events if event.finish_reason
            }
        assert ended == {"victim", *(one.request_id for one in prompts)}
    finally:
        thread.shutdown()
    pieces = [len(piece.split()) for piece in " ".join(order).split("step")]
    assert max(pieces) <= MAX_PIECE
