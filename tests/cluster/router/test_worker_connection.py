"""Event streams, repeated output, lost workers and clients that leave: every accepted request ends in tokens or an error, once."""

import asyncio
from typing import Any

import pytest
from hypothesis import given, strategies as st

from tests.cluster.asgi_call import AsgiCall
from tests.cluster.conftest import make_router, num_in_flight, running_api, stream_events, timings, until
from tests.cluster.stub_worker import StubWorker
from transom_cluster.router import output_stream
from transom_cluster.router.in_flight_requests import AttemptState, InFlightRequest
from transom_cluster.router.output_stream import MAX_BUFFERED, MAX_JOINED_TOKENS, OutputStream, joined
from transom_cluster.router.timings import RouterTimings
from transom_cluster.router.worker_connection import WorkerConnection
from transom_cluster.routing.placer import PlacementDecision
from transom_cluster.routing.worker_view import HitTokens
from transom_core.config import FailoverConfig
from transom_core.contract import OutputEvent, Request, SamplingParams
from transom_core.errors import WorkerLost

TEXT = "the quick brown fox"


def request(request_id: str = "r", **more: Any) -> Request:
    return Request(request_id=request_id, prompt_token_ids=(1,), params=SamplingParams(), seed=0, **more)


def event(start: int, stop: int, *, last: bool = False) -> OutputEvent:
    """Characters [start, stop) of TEXT, one token each."""
    return OutputEvent(
        request_id="r",
        position=start,
        token_ids=tuple(range(start, stop)),
        text=TEXT[start:stop],
        text_offset=start,
        finish_reason="stop" if last else None,
    )


def sent(*requests: Request) -> tuple[list[InFlightRequest], OutputStream]:
    """Requests whose attempts a worker has."""
    output = OutputStream(requests)
    in_flight = [InFlightRequest(output, index, one) for index, one in enumerate(requests)]
    for one in in_flight:
        place(one)
        one.send()
    return in_flight, output


def place(one_request: InFlightRequest) -> Request:
    """Give the next attempt to a worker; not sent yet."""
    one_request.begin_attempt()
    decision = PlacementDecision(worker_id="w0", reason="least_loaded", predicted=HitTokens(0))
    one_request.place(decision, policy="kv")
    return one_request.attempt


positions = st.integers(0, len(TEXT) - 1)


@given(st.lists(st.tuples(positions, positions)))
def test_duplicates_and_overlaps_are_dropped_by_position(ranges):
    """A resumed stream may repeat any part of what came before."""
    (one_request,), output = sent(request())
    end = 0
    for start, stop in [*map(sorted, ranges), (0, len(TEXT))]:
        start = min(start, end)
        end = max(end, stop)
        assert one_request.take(event(start, stop, last=stop == len(TEXT)))
    events = [e for _, e in asyncio.run(output.next())]
    assert "".join(e.text for e in events) == TEXT
    assert [t for e in events for t in e.token_ids] == list(range(len(TEXT)))
    assert (output.num_unfinished, one_request.has_ended) == (0, True)


async def test_an_attempt_that_has_moved_meanwhile_is_not_marked_as_sent():
    worker = StubWorker(max_events=0)
    one_request = InFlightRequest(OutputStream([request()]), 0, request())
    old = place(one_request)
    one_request.leave_worker()
    place(one_request)
    await WorkerConnection("w0", worker, "r0", RouterTimings()).submit([(one_request, old)])
    assert one_request.state is AttemptState.PLACED
    worker.kill()


def state_of(request: InFlightRequest) -> AttemptState:
    """The state now; a type checker would take a property that was compared once to stay as it was."""
    return request.state


def test_the_first_event_may_come_before_the_reply() -> None:
    (one_request,), output = sent(request())
    assert one_request.awaits_reply
    one_request.take(event(0, 1))
    assert one_request.state is AttemptState.STREAMING
    one_request.accept()
    assert one_request.state is AttemptState.STREAMING
    asyncio.run(output.admitted())
    one_request.leave_worker()
    assert state_of(one_request) is AttemptState.WAITING


def test_a_slow_reader_gets_everything_and_few_events(monkeypatch):
    num_copied = 0

    def counted(events):
        nonlocal num_copied
        num_copied += sum(len(one.token_ids) for one in events)
        return joined(events)

    monkeypatch.setattr(output_stream, "joined", counted)
    in_flight, output = sent(request("a"), request("b"))
    count = 30 * MAX_BUFFERED
    for i in range(count):
        for one in in_flight:
            one.take(event(0, 1, last=i == count - 1)._replace(position=i, text_offset=i))
    got = asyncio.run(output.next())
    assert len(got) <= MAX_BUFFERED + 4 + 2 * count // MAX_JOINED_TOKENS
    assert max(len(e.token_ids) for _, e in got) <= MAX_JOINED_TOKENS + MAX_BUFFERED
    assert num_copied < 5 * 2 * count
    for index in (0, 1):
        assert sum(len(e.token_ids) for i, e in got if i == index) == count
        assert "".join(e.text for i, e in got if i == index) == TEXT[0] * count
        assert [e.finish_reason for i, e in got if i == index][-1] == "stop"
    assert output.num_unfinished == 0


NO_FAILOVER = {"failover": FailoverConfig(max_resumes=0, wait_s=0.05)}
NO_PAUSES = timings(first_reconnect_pause_s=0.0)


async def test_lost_requests_are_aborted_even_if_the_stream_opens_only_at_the_third_attempt():
    async with running_api(StubWorker(max_events=1), timings=NO_PAUSES, **NO_FAILOVER) as api:
        waiting = asyncio.create_task(api.complete(max_tokens=5))
        await api.worker.until(lambda: len(api.worker.submitted) == 1)
        open_stream, attempts = api.worker.open_stream, []

        async def open_at_third(router_id):
            attempts.append(router_id)
            if len(attempts) < 3:
                raise ConnectionError("not yet")
            async for events in open_stream(router_id):
                yield events

        api.worker.open_stream = open_at_third  # type: ignore[method-assign]
        api.worker.die()
        assert (await waiting).status_code == 503
        await api.worker.until(lambda: api.worker.aborted)
        assert (len(attempts), api.worker.aborted) == (3, [api.worker.submitted[0].request_id])


async def test_a_worker_without_a_heartbeat_is_lost_and_its_stream_is_opened_again():
    worker = StubWorker(max_events=1)
    async with running_api(worker, timings=timings(silence_s=0.1, first_reconnect_pause_s=0.01), **NO_FAILOVER) as api:
        assert (await api.complete()).status_code == 503
        await until(lambda: worker.num_streams >= 3)  # silent again each time


async def test_a_router_shows_its_workers_that_it_is_there():
    worker, shown = StubWorker(), []

    async def note(router_id, request_ids):
        shown.append((router_id, request_ids))

    worker.abort = note  # type: ignore[method-assign]
    async with running_api(worker, timings=timings(presence_s=0.0)) as api:
        await api.complete()
        await until(lambda: (api.router.router_id, []) in shown)


async def test_a_submission_that_hangs_ends_when_the_link_breaks():
    worker = StubWorker()
    async with running_api(worker, **NO_FAILOVER) as api:
        never: Any = asyncio.Event().wait
        worker.submit = lambda *_: never()  # type: ignore[method-assign]
        waiting = asyncio.create_task(api.complete())
        await until(lambda: num_in_flight(api.router))
        worker.die()
        async with asyncio.timeout(120):
            assert (await waiting).status_code == 503
        await until(lambda: not api.router.queue._submissions)  # the router waits for no reply of the worker any more


async def test_stopping_the_router_ends_what_runs():
    router = make_router(StubWorker(max_events=1))
    router.start()
    await until(lambda: router.is_ready)
    async with router.generate([request()]) as output:
        await router.stop()
        while output.num_unfinished:
            *_, (_, last) = await output.next()
    assert last.error is not None
    assert last.error.kind == "WorkerLost"
    with pytest.raises(WorkerLost):
        async with router.generate([request("s")]):
            pass


async def test_the_last_tokens_may_come_while_the_headers_are_sent(api):
    """The reader must not take "everything has arrived" for "everything was read"."""

    class SlowCall(AsgiCall):
        async def _send(self, message):
            if message["type"] == "http.response.start":
                await until(lambda: not num_in_flight(api.router))
            await super()._send(message)

    call = SlowCall(api.app, "/v1/completions", {"prompt": "x", "max_tokens": 5, "stream": True})
    await call.ended()
    assert call.text.count('"text"') == len(stream_events(call.text)) == 5


def test_text_that_trails_its_tokens_is_kept():
    """The detokeniser holds back text that may become part of a stop string or of a character."""
    (one_request,), output = sent(request())
    held = event(0, 2)._replace(text="t")
    rest = event(2, 3)._replace(text="he", text_offset=1)
    for one in (held, rest, rest):
        one_request.take(one)
    assert "".join(e.text for _, e in asyncio.run(output.next())) == "the"
