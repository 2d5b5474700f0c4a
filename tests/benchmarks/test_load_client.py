"""The load generator's client, and how its bytes are read: nothing depends on how they were cut."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.serving.load_answers import BrokenAnswer, has_token, read_answer, summarise
from benchmarks.serving.load_client import Load, LoadClient, RawAnswer
from tests.benchmarks.stub_server import StubServer, completion


def bodies(num_tokens=3):
    return itertools.repeat({"prompt": [1, 2], "max_tokens": num_tokens, "stream": True})


def client(server, **options):
    return LoadClient(**({"base_url": server.url, "timeout_s": 120} | options))


@pytest.mark.parametrize("keep_alive", [False, True])
async def test_closed_loop_sends_every_request_once_and_counts_tokens(keep_alive):
    async with StubServer(completion, keep_alive=keep_alive) as server:
        raws = await client(server).run(Load(concurrency=3), bodies(), 7)
    summary = summarise("closed 3", raws, client_cpu_s=0.0)
    assert len(server.bodies) == summary.num_answers == 7
    assert summary.num_output_tokens == 21
    assert summary.num_cached_tokens == 7 * 16
    assert not summary.errors
    assert 0 < summary.first_token_ms.p50 <= summary.end_to_end_ms.p99


async def test_refusals_and_broken_streams_are_errors_not_figures():
    answers = iter([(429, ['{"error": "slow down"}']), (200, ['data: {"choices": [{"text": "a"}]}\n\n'])])
    async with StubServer(lambda body: next(answers)) as server:
        raws = await client(server).run(Load(concurrency=1), bodies(), 2)
    summary = summarise("closed 1", raws, client_cpu_s=0.0)
    assert summary.num_answers == 0
    assert sorted(summary.errors) == ['HTTP 429: {"error": "slow down"}', "the stream ended before [DONE]"]


async def test_a_server_that_is_not_there_is_an_error():
    async with StubServer(completion) as server:
        load = client(server)
    raw = await load.stream(next(bodies()))
    assert str(raw.error).startswith("ConnectionRefusedError")
    assert summarise("closed 1", [raw], client_cpu_s=0.0).num_answers == 0


async def test_url_may_end_in_v1_and_the_key_is_sent():
    async with StubServer(completion) as server:
        raw = await client(server, base_url=server.url + "/v1/", api_key="secret").stream(next(bodies()))
    assert raw.error is None
    assert server.headers[0].startswith("POST /v1/completions ")
    assert "authorization: bearer secret" in server.headers[0].lower()


async def test_an_answer_that_never_ends_is_given_up():
    class Silent(StubServer):
        async def _write_chunked(self, writer, status, events):
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")

    async with Silent(completion, keep_alive=True) as server:
        raw = await client(server, timeout_s=0.05).stream(next(bodies()))
    assert raw.error == "no complete answer in 0.05 s"


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
EVENTS = [
    b'data: {"choices": [{"text": "a"}]}\r\n\r\n',
    b": a comment\n\n",
    b'data: {"choices": [{"text": "b"}]}\n\n',
    b"data: [DONE]\n\n",
]
BODY = b"".join(EVENTS)
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(b"%x\r\n%s\r\n" % (len(one), one) for one in EVENTS)
ANSWERS = {
    "chunked": CHUNKED + b"0\r\n\r\n",
    "sized": HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY,
    "to the end": HEAD + b"\r\n" + BODY,
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
@given(sizes=st.lists(st.integers(1, 40), max_size=20))
def test_reading_does_not_depend_on_how_packets_were_cut(answer, sizes):
    ends = [*itertools.accumulate(sizes, initial=0), len(answer)]
    pieces = [answer[begin:end] for begin, end in itertools.pairwise(ends)]
    packets = [(float(i), piece) for i, piece in enumerate(pieces) if piece]
    found = read_answer(RawAnswer(packets=packets))
    assert found.num_output_tokens == 2
    assert 0 <= found.first_token_s <= found.first_token_s + found.gaps_s[0] <= found.end_to_end_s


@pytest.mark.parametrize("answer", [CHUNKED, ANSWERS["sized"][:-1], b"", b"SMTP ready\r\n\r\n", HEAD])
def test_what_broke_off_or_is_not_http_is_an_error(answer):
    with pytest.raises(BrokenAnswer, match="broke off"):
        read_answer(RawAnswer(packets=[(0.0, answer)] if answer else []))


def raw(*timed_events, sent_s=0.0):
    packets = [(sent_s, b"HTTP/1.1 200 OK\r\n\r\n")]
    for time_s, event in timed_events:
        packets.append((time_s, f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()))
    return RawAnswer(sent_s=sent_s, packets=packets)


TOKEN = {"choices": [{"text": "a"}]}


def test_times_count_from_the_sending_and_usage_is_no_token():
    usage = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5}}
    answer = read_answer(raw((1.5, TOKEN), (1.7, TOKEN), (2.0, usage), (2.1, "[DONE]"), sent_s=0.5))
    assert answer.first_token_s == pytest.approx(1.0)
    assert answer.gaps_s == pytest.approx((0.2,))
    assert answer.end_to_end_s == pytest.approx(1.6)
    assert (answer.num_prompt_tokens, answer.num_output_tokens) == (9, 5)


@pytest.mark.parametrize(
    ("timed_events", "message"),
    [
        ([(1.0, TOKEN)], "ended before"),
        ([(1.0, "[DONE]")], "no token"),
        ([(1.0, TOKEN), (2.0, {"error": {"message": "boom"}})], "boom"),
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
    ],
)
def test_which_events_are_tokens(choice, expected):
    assert has_token({"choices": [choice]}) is expected
