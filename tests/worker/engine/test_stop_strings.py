"""Stop strings: against a search of the whole text for each of them, and the work that they cost."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.how_many import num_examples
from transom_worker.engine.stop_strings import StopStrings


class BruteForce:
    """The rule itself: after each piece, search the text that is not final yet for every stop string."""

    def __init__(self, stops: tuple[str, ...], *, include: bool) -> None:
        self.stops, self.include, self.held = stops, include, ""

    def push(self, text: str, *, may_stop: bool) -> tuple[str, str | None]:
        self.held += text
        if not may_stop or not self.stops:
            return self.flush(), None
        found = [(at, stop) for stop in self.stops if (at := self.held.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda hit: (hit[0], -len(hit[1])))
            final, self.held = self.held[: at + len(stop) if self.include else at], ""
            return final, stop
        ends = (self.held[-n:] for n in range(len(self.held), 0, -1))
        keep = next((end for end in ends if any(stop.startswith(end) for stop in self.stops)), "")
        final, self.held = self.held[: len(self.held) - len(keep)], keep
        return final, None

    def flush(self) -> str:
        final, self.held = self.held, ""
        return final


PIECES = st.lists(
    st.tuples(st.text(alphabet="abc", max_size=6), st.sampled_from([True, True, True, False])), max_size=12
)


@settings(max_examples=num_examples(daily=100, exhaustive=20_000), deadline=None)
@given(
    pieces=PIECES,
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=6), max_size=6),
    include=st.booleans(),
)
def test_equals_a_search_for_each_stop(pieces: list[tuple[str, bool]], stops: list[str], include: bool) -> None:
    """Pieces of any length, also when the text goes on after a stop, and where `min_tokens` releases what was held back."""
    got, want = StopStrings(tuple(stops), include=include), BruteForce(tuple(stops), include=include)
    for text, may_stop in pieces:
        assert got.push(text, may_stop=may_stop) == want.push(text, may_stop=may_stop)
    assert got.flush() == want.flush()


def lines_run(call: Callable[[], object]) -> int:
    """Run `call`; returns how many lines of the searched module it ran: a measure of work that no load on the machine changes.

    A line of a loop or a comprehension counts as often as it ran.
    """
    count = 0

    def on_line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return on_line

    def on_call(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_globals.get("__name__") != StopStrings.__module__:
            return None
        frame.f_trace_opcodes = False
        return on_line(frame, "line", argument)

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def lines_for(stops: tuple[str, ...], text: str) -> int:
    """The lines that searching `text` runs, in tokens of four characters."""
    found = StopStrings(stops, include=False)

    def push_all() -> None:
        for at in range(0, len(text), 4):
            assert found.push(text[at : at + 4], may_stop=True)[1] is None

    return lines_run(push_all)


@pytest.mark.parametrize(
    ("stops", "text"),
    [
        (tuple("a" * 1_022 + chr(98 + i) + "!" for i in range(16)), "a" * 4_096),
        (("a" * 1_022 + "b!", *(chr(98 + i) * 1_024 for i in range(15))), "a" * 4_096),
        (tuple("a" * (64 * i + 62) + "b!" for i in range(16)), ("a" * 1_021 + "b") * 4),
        (tuple("ab" * (32 * i + 31) + "c!" for i in range(16)), ("ab" * 510 + "a") * 4),
        (tuple(chr(97 + i) + "z" * 1_022 + "!" for i in range(16)), "az" * 2_048),
    ],
    ids=["one beginning", "one held back", "stops in stops", "periods", "few beginnings"],
)
def test_sixteen_long_stops_cost_no_more_than_the_text(stops: tuple[str, ...], text: str) -> None:
    """A node is made once, a move is made twice per character at most: a bounded number of lines for each character."""
    first, second = lines_for(stops, text), lines_for(stops, text + text) - lines_for(stops, text)
    num_nodes = min(sum(map(len, stops)), 16 * len(text))
    assert first <= 20 * len(text) + 60 * num_nodes
    assert second <= 20 * len(text), "no new node is reached, so only moves are left"


def test_stops_that_the_text_never_begins_cost_nothing() -> None:
    few, many = (lines_for(tuple(chr(65 + i) * 1_024 for i in range(n)), "some text " * 40) for n in (1, 16))
    assert few == many


def test_a_request_with_long_stops_builds_only_their_first_characters() -> None:
    stops = tuple(chr(65 + i) * 1_024 for i in range(16))
    assert lines_run(lambda: StopStrings(stops, include=False)) < 300
