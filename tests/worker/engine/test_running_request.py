"""Running requests: when they end, what text they hold back, and that a replay of their tokens rebuilds them. Stop strings:
against a search of the whole text for each of them, and the work that they cost."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings, strategies as st

from tests.how_many import num_examples
from transom_core.contract import OutputEvent, Request, SamplingParams
from transom_worker.engine.running_request import RunningRequest
from transom_worker.engine.stop_strings import StopStrings
from transom_worker.scheduling.outputs import SequenceOutput


class Letters:
    """A tokenizer whose token i is the i-th letter; 25 ("z") is the end of text."""

    vocab_size = 26
    whole_texts: ClassVar[dict[bool, dict[int, str]]] = {False: {}, True: {}}

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([97 + token_id])

    def is_special(self, token_id: int) -> bool:
        return token_id == 25

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(97 + i) for i in ids if not (skip_special_tokens and i == 25))


def ids(text: str) -> list[int]:
    return [ord(c) - 97 for c in text]


def running_request(resumed: str = "", **params: Any) -> RunningRequest:
    request = Request(
        request_id="r",
        prompt_token_ids=(0,),
        params=SamplingParams(**{"max_tokens": 100, **params}),
        seed=0,
        resumed_output_ids=tuple(ids(resumed)),
    )
    return RunningRequest(request, Letters(), eos_token_ids=frozenset({25}), max_model_len=50, arrival_s=1.0)  # type: ignore[arg-type]


def push(running: RunningRequest, token_id: int) -> OutputEvent:
    position = running.num_output_tokens
    return running.token_event(
        SequenceOutput("r", token_id, position, num_cached_tokens=0, index_version=0, is_first=False, at_limit=False)
    )


def outcome(event: OutputEvent) -> tuple[str, int, str | None, int | str | None]:
    return event.text, event.text_offset, event.finish_reason, event.stop_reason


def run(text: str, **params: Any) -> tuple[str, str | None, int | str | None]:
    """Text, finish and stop reason of a request that gets `text` letter by letter."""
    running, out = running_request(**params), ""
    for token in ids(text):
        event = push(running, token)
        assert event.text_offset == len(out)
        out += event.text
        if event.finish_reason:
            return out, event.finish_reason, event.stop_reason
    return out, None, None


@pytest.mark.parametrize(
    ("text", "params", "expected"),
    [
        ("abcz", {}, ("abc", "stop", None)),
        ("abczd", {"ignore_eos": True, "max_tokens": 5}, ("abcd", "length", None)),
        ("abcdef", {"stop": ("cd",)}, ("ab", "stop", "cd")),
        ("abcdef", {"stop": "cd"}, ("ab", "stop", "cd")),
        ("abcdef", {"stop_token_ids": (3,)}, ("abc", "stop", 3)),
        ("abcdef", {"stop_token_ids": (3,), "include_stop_str_in_output": True}, ("abcd", "stop", 3)),
        ("abcdef", {"max_tokens": 2}, ("ab", "length", None)),
        ("abcdef", {"max_tokens": 3, "stop": ("cx",)}, ("abc", "length", None)),
        ("abcz", {"stop": ("cx",)}, ("abc", "stop", None)),
        ("cdabcd", {"stop": ("cd",), "min_tokens": 3}, ("cdab", "stop", "cd")),
        ("zzabz", {"min_tokens": 3}, ("ab", "stop", None)),
        ("a" * 60, {"max_tokens": None}, ("a" * 49, "length", None)),  # the model's length
    ],
)
def test_how_requests_end(text: str, params: dict[str, Any], expected: tuple[object, ...]) -> None:
    assert run(text, **params) == expected


@given(
    text=st.text(alphabet="abcz", max_size=20),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=3), max_size=3),
    min_tokens=st.integers(0, 5),
    include=st.booleans(),
    cut=st.integers(0, 20),
)
def test_a_replay_goes_on_where_the_first_stopped(
    text: str, stops: list[str], min_tokens: int, include: bool, cut: int
) -> None:
    params: dict[str, Any] = dict(
        stop=tuple(stops), min_tokens=min_tokens, include_stop_str_in_output=include, max_tokens=18
    )
    whole, events = running_request(**params), []
    for token in ids(text):
        events.append(push(whole, token))
        if events[-1].finish_reason:
            break
    cut = min(cut, len(events))
    again = running_request(resumed=text[:cut], **params)
    if cut == len(events) and events and events[-1].finish_reason:
        last, end = events[-1], again.end_event()
        assert (end.finish_reason, end.stop_reason) == (last.finish_reason, last.stop_reason)
        assert (end.text, end.text_offset) == ("", last.text_offset + len(last.text))
        assert end.position == last.position + 1
        return
    assert again.finish_reason is None
    rest = [outcome(push(again, token)) for token in ids(text[cut : len(events)])]
    assert rest == [outcome(event) for event in events[cut:]]


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


@settings(max_examples=num_examples(daily=100, exhaustive=20_000))
@given(
    pieces=PIECES, stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=6), max_size=6), include=st.booleans()
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
