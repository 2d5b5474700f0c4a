"""The load generator against a stub server: every level is measured, failures are no figures, and no figure depends on packets."""

import asyncio
import itertools
import json
from typing import Any

import pytest
import typer
from hypothesis import given, strategies as st
from rich.console import Console

from benchmarks.serving import load
from benchmarks.serving.load_answers import BrokenAnswer, has_token, read_answer, summarise
from benchmarks.serving.load_client import Load, LoadClient, RawAnswer, Workload
from tests.benchmarks.stub_server import completion, stub_server

SMALL: dict[str, Any] = {"prompt_tokens": (4, 8), "output_tokens": (2, 4)}


def bodies(num_tokens=3):
    return itertools.repeat({"prompt": [1, 2], "max_tokens": num_tokens, "stream": True})


def client(server, **options):
    return LoadClient(**({"base_url": server.url, "timeout_s": 120} | options))


async def test_every_level_is_measured():
    loads = [Load(concurrency=3), Load(rate_per_s=500.0)]
    with stub_server(completion) as server:
        own = client(server, base_url=server.url + "/v1/", api_key="secret")
        used, summaries = await load.measure(own, Workload(model="", **SMALL), loads, 6, 2, Console(quiet=True))
    assert used.model == "stub"
    assert [(summary.load, summary.num_answers) for summary in summaries] == [("closed 3", 6), ("open 500/s", 6)]
    assert all(summary.num_output_tokens >= 12 and not summary.errors for summary in summaries)
    assert 0 < summaries[0].first_token_ms.p50 <= summaries[0].end_to_end_ms.p99
    assert len(server.bodies) == 1 + 2 + 6 + 6  # probe, warm-up, two levels
    assert server.headers["authorization"] == "Bearer secret"
    assert load.table(summaries, title="t").row_count == 2


async def test_refusals_and_broken_streams_are_errors_not_figures():
    answers = iter([(429, ['{"error": "slow down"}']), (200, ['data: {"choices": [{"text": "a"}]}\n\n'])])
    with stub_server(lambda body: next(answers)) as server:
        raws = await client(server).run(Load(concurrency=1), bodies(), 2)
    gone = await client(server).stream(next(bodies()))
    summary = summarise("closed 1", [*raws, gone], client_cpu_s=0.0)
    assert summary.num_answers == 0
    absent, refused, broken = sorted(summary.errors)
    assert (refused, broken) == ('HTTP 429: {"error": "slow down"}', "the stream ended before [DONE]")
    assert absent.startswith("ConnectionRefusedError")


async def test_an_answer_that_never_ends_is_given_up():
    async def silent():
        yield ": a comment\n\n"
        await asyncio.Event().wait()

    with stub_server(lambda body: (200, silent())) as server:
        raw = await client(server, timeout_s=0.05).stream(next(bodies()))
    assert raw.error == "no complete answer in 0.05 s"


def test_ranges_and_levels_are_checked():
    assert (load.read_range("32-512"), load.read_range("64")) == ((32, 512), (64, 64))
    for wrong in ("9-3", "0-4", "x"):
        with pytest.raises(typer.BadParameter):
            load.read_range(wrong)
    for wrong in ("0", "x", "1,-2"):
        with pytest.raises(typer.BadParameter):
            load.read_loads(wrong, "")


def test_prompts_have_the_drawn_lengths_and_are_the_same_for_the_same_seed():
    def first(count: int, label: str) -> list[dict[str, Any]]:
        return list(itertools.islice(Workload(model="m", shared_prefix_tokens=3, **SMALL).bodies(label), count))

    found = first(200, "a")
    assert {len(body["prompt"]) for body in found} == {4, 5, 6, 7, 8}
    assert {body["max_tokens"] for body in found} == {2, 3, 4}
    assert len({tuple(body["prompt"][:3]) for body in found}) == 1
    assert len({tuple(body["prompt"][3:]) for body in found}) == 200
    assert found == first(200, "a") != first(200, "b")


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
TOKEN = {"choices": [{"text": "a"}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5}}
EVENTS = [
    b"data: " + json.dumps(TOKEN).encode() + b"\r\n\r\n",
    b": a comment\n\n",
    b"data: " + json.dumps(TOKEN).encode() + b"\n\n",
    b"data: " + json.dumps(USAGE).encode() + b"\n\n",
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
    found = read_answer(RawAnswer(packets=[(float(i), piece) for i, piece in enumerate(pieces) if piece]))
    assert (found.num_output_tokens, len(found.gaps_s)) == (5, 1)
    assert 0 <= found.first_token_s <= found.first_token_s + found.gaps_s[0] <= found.end_to_end_s


@pytest.mark.parametrize("answer", [CHUNKED, ANSWERS["sized"][:-1], b"", b"SMTP ready\r\n\r\n", HEAD])
def test_what_broke_off_or_is_not_http_is_an_error(answer):
    with pytest.raises(BrokenAnswer, match="broke off"):
        read_answer(RawAnswer(packets=[(0.0, answer)] if answer else []))


@pytest.mark.parametrize(
    ("events", "message"), [(["[DONE]"], "no token"), ([json.dumps(TOKEN), '{"error": {"message": "boom"}}'], "boom")]
)
def test_streams_without_a_token_or_with_an_error_are_broken(events, message):
    packets = [(0.0, HEAD + b"\r\n"), *((1.0, f"data: {event}\n\n".encode()) for event in events)]
    with pytest.raises(BrokenAnswer, match=message):
        read_answer(RawAnswer(packets=packets))


def test_which_events_are_tokens():
    """An event that ends the answer carries a token only if it has text; others do even if a character is unfinished."""
    choices = [(text, reason) for text in ("a", "") for reason in (None, "stop")]
    found = [has_token({"choices": [{"text": text, "finish_reason": reason}]}) for text, reason in choices]
    assert found == [True, True, True, False]
