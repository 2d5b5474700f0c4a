from __future__ import annotations

import itertools
import time

import pytest

from load_answers import summarise
from load_client import Load, LoadClient
from tests.benchmarks.stub_server import StubServer, completion


def bodies(num_tokens=3):
    return itertools.repeat({"prompt": [1, 2], "max_tokens": num_tokens, "stream": True})


def client(server, **options):
    return LoadClient(base_url=server.url, api="completions", api_key=None, timeout_s=120, **options)


@pytest.mark.parametrize("keep_alive", [False, True])
async def test_closed_loop_sends_every_request_once_and_counts_tokens(keep_alive):
    async with StubServer(completion, keep_alive=keep_alive) as server, client(server) as load:
        raws = await load.run(Load(concurrency=3), bodies(), 7, seed=0)
    summary = summarise("closed 3", raws, client_cpu_s=0.0)
    assert len(server.bodies) == summary.num_answers == 7
    assert summary.num_output_tokens == 21
    assert summary.num_cached_tokens == 7 * 16
    assert not summary.errors
    assert server.num_connections == (3 if keep_alive else 7)
    assert 0 < summary.first_token_ms.p50 <= summary.end_to_end_ms.p99


async def test_closed_loop_never_has_more_in_flight_than_clients():
    in_flight = peak = 0

    class Counting(LoadClient):
        async def stream(self, body):
            nonlocal in_flight, peak
            in_flight += 1
            peak = max(peak, in_flight)
            raw = await super().stream(body)
            in_flight -= 1
            return raw

    async with (
        StubServer(completion) as server,
        Counting(base_url=server.url, api="completions", api_key=None, timeout_s=120) as load,
    ):
        await load.run(Load(concurrency=2), bodies(), 9, seed=0)
    assert peak == 2


async def test_open_loop_spreads_arrivals_over_time():
    async with StubServer(completion) as server, client(server) as load:
        begin_s = time.perf_counter()
        raws = await load.run(Load(rate_per_s=200.0), bodies(), 20, seed=1)
    sent_s = [raw.sent_s - begin_s for raw in raws]
    assert sent_s == sorted(sent_s)
    assert sent_s[-1] > 0.02  # 20 arrivals at 200 a second take about 0.1 s
    assert not summarise("open", raws, client_cpu_s=0.0).errors


async def test_refusals_and_broken_streams_are_errors_not_figures():
    answers = iter([(429, ['{"error": "slow down"}']), (200, ['data: {"choices": [{"text": "a"}]}\n\n'])])
    async with StubServer(lambda body: next(answers)) as server, client(server) as load:
        raws = await load.run(Load(concurrency=1), bodies(), 2, seed=0)
    summary = summarise("closed 1", raws, client_cpu_s=0.0)
    assert summary.num_answers == 0
    assert sorted(summary.errors) == ['HTTP 429: {"error": "slow down"}', "the stream ended before [DONE]"]


async def test_a_server_that_is_not_there_is_an_error():
    async with StubServer(completion) as server:
        load = client(server)
    async with load:
        raw = await load.stream(next(bodies()))
    assert raw.error is not None
    assert raw.error.startswith("ConnectionRefusedError")


async def test_url_may_end_in_v1_and_the_key_is_sent():
    async with StubServer(completion) as server:
        url = server.url + "/v1/"
        async with LoadClient(base_url=url, api="completions", api_key="secret", timeout_s=120) as load:
            raw = await load.stream(next(bodies()))
    assert raw.error is None
    assert server.headers[0].startswith("POST /v1/completions ")
    assert "authorization: bearer secret" in server.headers[0].lower()


async def test_a_connection_that_the_server_closed_while_idle_is_replaced():
    async with StubServer(completion, keep_alive=True) as server, client(server) as load:
        await load.stream(next(bodies()))
        load._idle[0]._transport.abort()  # as a reload of a proxy does
        raw = await load.stream(next(bodies()))
    assert raw.error is None
    assert server.num_connections == 2


async def test_an_answer_that_never_ends_is_given_up():
    class Silent(StubServer):
        async def _write_chunked(self, writer, status, events):
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")

    async with (
        Silent(completion, keep_alive=True) as server,
        LoadClient(base_url=server.url, api="completions", api_key=None, timeout_s=0.05) as load,
    ):
        raw = await load.stream(next(bodies()))
    assert raw.error == "no complete answer in 0.05 s"
