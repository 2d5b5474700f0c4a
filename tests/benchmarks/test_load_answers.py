from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from load_answers import BrokenAnswer, Percentiles, events, has_token, read_answer
from load_client import RawAnswer


def raw(*timed_events, sent_s=0.0):
    packets = [(sent_s, b"HTTP/1.1 200 OK\r\n\r\n")]
    for time_s, event in timed_events:
        packets.append((time_s, f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()))
    return RawAnswer(sent_s=sent_s, done_s=packets[-1][0], packets=packets)


def delta(**content):
    return {"choices": [{"delta": content}]}


def test_chat_first_token_is_the_first_text_not_the_role():
    answer = read_answer(
        raw(
            (1.0, delta(role="assistant", content="")),
            (1.5, delta(content="Hi")),
            (1.7, delta(content=" you")),
            (2.0, {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}),
            (2.1, "[DONE]"),
            sent_s=0.5,
        )
    )
    assert answer.first_token_s == pytest.approx(1.0)
    assert answer.gaps_s == pytest.approx((0.2,))
    assert answer.end_to_end_s == pytest.approx(1.6)
    assert (answer.num_prompt_tokens, answer.num_output_tokens) == (9, 2)


def test_without_usage_events_are_counted():
    answer = read_answer(raw((1.0, delta(content="a")), (2.0, delta(content="b")), (2.0, "[DONE]")))
    assert answer.num_output_tokens == 2


@pytest.mark.parametrize(
    ("timed_events", "message"),
    [
        ([(1.0, delta(content="a"))], "ended before"),
        ([(1.0, "[DONE]")], "no token"),
        ([(1.0, delta(content="a")), (2.0, {"error": {"message": "boom"}})], "boom"),
    ],
)
def test_broken_answers(timed_events, message):
    with pytest.raises(BrokenAnswer, match=message):
        read_answer(raw(*timed_events))


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"text": "a", "finish_reason": None}, True),
        ({"text": "", "finish_reason": None}, True),
        ({"text": "", "finish_reason": "stop"}, False),
        ({"text": "a", "finish_reason": "length"}, True),
        ({"delta": {"content": ""}}, False),
        ({"delta": {"reasoning_content": "hm"}}, True),
    ],
)
def test_which_events_are_tokens(choice, expected):
    assert has_token({"choices": [choice]}) is expected


@given(st.lists(st.integers(1, 9), max_size=12))
def test_events_do_not_depend_on_how_bytes_were_cut(cuts):
    stream = b'data: {"a": 1}\r\n\r\n: a comment\n\ndata: {"b": 2}\n\ndata: [DONE]\n\n'
    chunks, begin = [], 0
    for time_s, size in enumerate(cuts):
        chunks.append((float(time_s), stream[begin : begin + size]))
        begin += size
    chunks.append((99.0, stream[begin:]))
    found = list(events(chunks))
    assert [data for _, data in found] == [b'{"a": 1}', b'{"b": 2}', b"[DONE]"]
    assert [time_s for time_s, _ in found] == sorted(time_s for time_s, _ in found)


@given(st.lists(st.floats(0, 1e3), min_size=1))
def test_percentiles_are_ordered_and_inside_the_values(seconds):
    figures = Percentiles.of(seconds)
    low, high = 1e3 * min(seconds), 1e3 * max(seconds)
    slack = 1e-9 * high
    assert low - slack <= figures.p50 <= figures.p90 + slack
    assert figures.p90 <= figures.p99 + slack <= high + 2 * slack


def test_percentiles_interpolate():
    assert Percentiles.of([0.001, 0.002, 0.003]) == Percentiles(mean=2.0, p50=2.0, p90=2.8, p99=2.98)
    assert Percentiles.of([]).p99 == 0.0
