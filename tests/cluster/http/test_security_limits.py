"""Limits of a client's requests: rate, concurrency, size, nesting, and time."""

import asyncio
import time

import httpx
import pytest

from tests.cluster.conftest import GIVE_UP_S, http_server, running_api
from tests.cluster.http.test_http_errors import problem
from tests.cluster.stub_worker import StubWorker
from transom_cluster.http import client_limits
from transom_cluster.http.admission_middleware import duration_text
from transom_cluster.http.client_limits import MAX_IDLE_CLIENTS, Budget, ClientLimits
from transom_cluster.openai.request import request_limits
from transom_cluster.openai.request.request_limits import MAX_TOKENIZE_BYTES
from transom_core.config import LimitsConfig, PriorityConfig
from transom_core.contract import ErrorInfo, FinishReason, OutputEvent
from transom_core.errors import Overloaded, RateLimited, RequestError, RequestTimeout, StepFailed, WorkerLost


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def limits(**values: int) -> tuple[ClientLimits, Clock]:
    clock = Clock()
    return ClientLimits("requests", **values, clock=clock), clock


def take(counted: ClientLimits, client: str = "a") -> float | None:
    """One short request: None, or after how many seconds to come back."""
    try:
        with counted.request(client):
            return None
    except RateLimited as error:
        return error.retry_after_s


def test_idle_clients_are_forgotten_after_a_minute():
    counted, clock = limits(per_minute=10, concurrent=1)
    with counted.request("busy"):
        for minute in range(5):
            clock.now_s = 61.0 * minute
            for client in range(MAX_IDLE_CLIENTS):
                take(counted, f"{minute}-{client}")
        assert len(counted._clients) <= MAX_IDLE_CLIENTS + 1
        assert take(counted, "busy") == 1  # its first request still counts


async def test_a_client_over_its_rate_learns_when_to_retry():
    async with running_api(limits=LimitsConfig(requests_per_minute=2), api_keys=("a", "b")) as api:
        api.client.headers["authorization"] = "Bearer a"
        assert (await api.complete(temperature=-1)).status_code == 400  # counted as well
        assert (await api.client.post("/tokenize", json={"prompt": "x"})).status_code == 200
        response = await api.complete(stream=True)
        wanted = {"type": "rate_limit_error", "param": None, "code": "rate_limit_exceeded"}
        assert problem(response, 429).items() >= wanted.items()
        assert 1 <= int(response.headers["retry-after"]) <= 30
        for path in ("/v1/models", "/metrics", "/health"):
            assert (await api.client.get(path)).status_code == 200  # these have limits of their own
        assert (await api.complete()).status_code == 429
        api.client.headers["authorization"] = "Bearer wrong"
        assert (await api.complete()).status_code == 401
        api.client.headers["authorization"] = "Bearer b"
        assert (await api.complete()).status_code == 200


async def test_gets_have_limits_of_their_own_but_at_open_paths():
    async with running_api(limits=LimitsConfig(get_requests_per_minute=3), api_keys=("a", "b")) as api:
        api.client.headers["authorization"] = "Bearer a"
        paths = ("/v1/models", "/nothing", "/debug/requests", "/v1/models")
        assert [(await api.client.get(path)).status_code for path in paths] == [200, 404, 200, 429]
        assert "3 GET requests a minute" in problem(await api.client.get("/metrics"), 429)["message"]
        assert (await api.client.get("/metrics")).headers["retry-after"] == "20"
        for path in ("/health", "/blocks"):
            assert [(await api.client.get(path)).status_code for _ in range(5)] == [200] * 5
        assert (await api.complete()).status_code == 200
        api.client.headers["authorization"] = "Bearer b"
        assert (await api.client.get("/v1/models")).status_code == 200


async def test_gets_and_block_map_streams_of_one_client_are_bounded():
    async with running_api(limits=LimitsConfig(concurrent_get_requests=3, block_map_streams=2)) as api:
        streams = [api.call("/blocks/stream", {}, method="GET") for _ in range(2)]
        for stream in streams:
            await stream.begun()
        third = api.call("/blocks/stream", {}, method="GET")
        await third.ended()
        assert third.status == 429
        assert "2 concurrent streams of the block map" in third.text
        waiting = api.call("/v1/models", {}, method="GET")
        await waiting.ended()
        assert waiting.status == 200  # the third; a stream that was refused does not count
        await streams[0].leave()
        again = api.call("/blocks/stream", {}, method="GET")
        await again.begun()
        assert again.status == 200
        for stream in (streams[1], again):
            await stream.leave()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("end", ["answer", "leave", "error", "cancel"])
async def test_a_request_counts_until_its_last_byte_or_until_the_client_disconnects(stream, end):
    worker = StubWorker(max_events=1)
    async with running_api(worker, limits=LimitsConfig(concurrent_requests=1)) as api:
        call = api.call("/v1/completions", {"prompt": "hi", "max_tokens": 5, "stream": stream})
        await worker.until(lambda: worker.submitted)
        if stream:
            await call.begun()
        second = api.call("/v1/completions", {"prompt": "hi"})
        await second.ended()
        assert second.status == 429
        assert "rate_limit_exceeded" in second.text
        if end == "leave":
            await call.leave()
        elif end == "cancel":
            call.task.cancel()
            await asyncio.gather(call.task, return_exceptions=True)
        else:
            request = worker.submitted[0]
            worker.max_events = None
            error = ErrorInfo.of(StepFailed("x")) if end == "error" else None
            reason: FinishReason = "error" if error else "stop"
            worker.push(OutputEvent(request_id=request.request_id, position=1, finish_reason=reason, error=error))
            await call.ended()
        worker.max_events = None
        third = api.call("/v1/completions", {"prompt": "hi", "max_tokens": 2})
        await third.ended()
        assert third.status == 200


async def test_a_client_that_disconnects_before_its_body_is_complete_no_longer_counts():
    async with running_api(limits=LimitsConfig(concurrent_requests=1)) as api:
        call = api.call("/v1/completions", {}, body_so_far=b"")
        await asyncio.sleep(0)
        await call.leave()
        assert call.sent == []
        page = (await api.client.get("/metrics")).text
        assert 'endpoint="/v1/completions",model="stub",router="r0",status="499"' in page
        assert (await api.complete()).status_code == 200


def test_headers_over_the_limit_are_431_from_a_real_server_too():
    with (
        http_server(limits=LimitsConfig(max_header_bytes=4096), api_keys=("k",)) as server,
        httpx.Client(base_url=server.url, headers={"authorization": "Bearer k"}, timeout=GIVE_UP_S) as client,
    ):
        for headers in ({"x-long": "y" * 4096}, {f"x-{i}": "y" * 100 for i in range(60)}, {"x": "y" * 2**20}):
            response = client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
            assert problem(response, 431)["code"] == "request_headers_too_large"
        assert problem(client.get("/v1/models?" + "x" * 4096), 431)
        assert client.post("/v1/completions", json={"prompt": "x"}, headers={"x": "y" * 3000}).status_code == 200


FIELDS_OF_ANY_DEPTH = [
    ("/v1/completions", "metadata"),
    ("/v1/chat/completions", "tools"),
    ("/v1/chat/completions", "chat_template_kwargs"),
    ("/detokenize", "tokens"),
]


@pytest.mark.parametrize("opening", ["[", '{"a":'])
@pytest.mark.parametrize("is_closed", [True, False])
@pytest.mark.parametrize(("path", "field"), FIELDS_OF_ANY_DEPTH)
async def test_json_that_is_nested_too_deep(api, path, field, opening, is_closed):
    closing = {"[": "]", '{"a":': "}"}[opening]
    for depth, reason in ((2000, "recursion limit"), (100_000, "arrays and objects")):
        end = "1" + closing * depth + "}" if is_closed else ""
        body = f'{{"{field}": {opening * depth}{end}'
        assert reason in problem(await api.client.post(path, content=body), 400)["message"]


async def test_error_messages_quote_little(api):
    long = "x" * 100_000
    for response in (
        await api.complete(model=long),
        await api.complete(**{long: 1}),
        await api.complete(temperature=long),
        await api.chat(messages=[{"role": "user", "content": [{"type": long}]}]),
        await api.client.get("/" + long[:20_000]),
    ):
        assert problem(response, response.status_code)
        assert len(response.content) < 1500


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
async def test_a_priority_outside_the_deployments_range_is_400_and_names_the_range(policy):
    async with running_api(priorities=PriorityConfig(policy=policy, max_priority=2)) as api:
        for priority in (-3, 3, 2**31 - 1):
            error = problem(await api.complete(priority=priority), 400)
            assert error["param"] == "priority"
            assert f"priority is {priority}; this server takes priorities from -2 (runs first) to 2" in error["message"]
        for allowed in (-2, 0, 2, None):
            assert (await api.complete(priority=allowed)).status_code == 200
        assert [request.priority for request in api.worker.submitted] == [-2, 0, 2, 0]


async def test_the_deadline_goes_to_the_worker_and_its_passing_is_408_or_an_event():
    worker = StubWorker(step_error=ErrorInfo.of(RequestTimeout("late")))
    begin_s = time.monotonic()
    async with running_api(worker, limits=LimitsConfig(request_timeout_s=120.5)) as api:
        assert problem(await api.complete(max_tokens=5), 408)["code"] == "request_timeout"
        assert '"code":"request_timeout"' in (await api.complete(max_tokens=5, stream=True)).text
        for request in worker.submitted:
            assert request.time_left_s is not None
            assert 120.5 - (time.monotonic() - begin_s) <= request.time_left_s <= 120.5
    async with running_api() as api:
        await api.complete()
        assert api.worker.submitted[0].time_left_s is None


async def test_a_body_that_does_not_come_is_408():
    async with running_api(limits=LimitsConfig(request_timeout_s=0.02)) as api:
        call = api.call("/v1/completions", {}, body_so_far=b'{"prompt"')
        await call.ended()
        assert call.status == 408
        assert "body did not arrive" in call.text


def encoded_lengths(api, monkeypatch):
    """The lengths of the texts that are encoded from now on."""
    calls, encode = [], api.router.tokenizer.encode

    def counted(text, **options):
        calls.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(api.router.tokenizer, "encode", counted)
    return calls


async def test_long_texts_are_not_tokenised(api, monkeypatch):
    """8 MiB became 8.4 million ids; several requests of a client had their ids at once."""
    calls = encoded_lengths(api, monkeypatch)
    text = "x" * MAX_TOKENIZE_BYTES
    assert (await api.client.post("/tokenize", json={"prompt": text})).json()["count"] == MAX_TOKENIZE_BYTES
    for body in ({"prompt": text + "x"}, {"messages": [{"role": "user", "content": text + "x"}]}):
        error = (await api.client.post("/tokenize", json=body)).json()["error"]
        assert error["param"] in body
        assert "at most 2,097,152 are tokenised at once" in error["message"]
    assert calls == [MAX_TOKENIZE_BYTES]


async def test_the_tokens_of_all_prompts_together_are_bounded(api, monkeypatch):
    """Prompts are encoded until they are too many."""
    monkeypatch.setattr(request_limits, "MAX_PROMPT_TOKENS", 600)
    assert (await api.complete(prompt=["x" * 100] * 2, n=3)).status_code == 200
    error = problem(await api.complete(prompt=["x" * 101] * 2, n=3), 400)
    assert error["param"] == "prompt"
    assert all(number in error["message"] for number in ("606", "600"))
    calls = encoded_lengths(api, monkeypatch)
    problem(await api.complete(prompt=["x" * 300] * 100), 400)
    assert calls == [300] * 3


async def test_sequences_of_a_client_are_bounded_whatever_the_requests():
    """One request of 1,024 sequences locked every other client out, within a limit of one request."""
    async with running_api(limits=LimitsConfig(concurrent_sequences=4), api_keys=("a", "b")) as api:
        api.client.headers["authorization"] = "Bearer a"
        api.worker.max_events = 0  # they run for ever
        running = asyncio.create_task(api.complete(prompt=["x"] * 3))
        await api.worker.until(lambda: len(api.worker.submitted) == 3)
        assert "3 concurrent sequences" in problem(await api.complete(n=2), 429)["message"]
        assert problem(await api.complete(n=5), 400)["param"] == "n"
        last = asyncio.create_task(api.complete())
        await api.worker.until(lambda: len(api.worker.submitted) == 4)
        running.cancel()
        last.cancel()
        await api.worker.until(lambda: len(api.worker.aborted) == 4)
        api.worker.max_events = None
        assert (await api.complete(n=4)).status_code == 200
        api.client.headers["authorization"] = "Bearer b"
        assert (await api.complete(n=4)).status_code == 200


def test_tokens_come_back_by_the_minute_and_outputs_leave_a_debt():
    counted, clock = limits(per_minute=60)
    with counted.request("a", cost=1000):  # more than the bucket ever holds: it starts with a full one
        counted.charge("a", 20)
    assert (counted.budget("a"), take(counted)) == (Budget(60, 0, 1020.0), 961)
    clock.now_s = 960.0
    for client in range(MAX_IDLE_CLIENTS + 1):
        take(counted, f"other {client}")
    assert take(counted) == 1  # the debt is not forgotten
    clock.now_s = 961.0
    assert take(counted) is None
    clock.now_s = 991.0
    assert counted.budget("a") == Budget(60, 30, 30.0)


async def test_tokens_of_a_client_are_bounded_and_headers_tell_what_is_left():
    limits = LimitsConfig(tokens_per_minute=100, requests_per_minute=60)
    async with running_api(limits=limits, api_keys=("a", "b")) as api:
        api.client.headers["authorization"] = "Bearer a"
        for stream in (True, False):
            response = await api.complete(prompt="x" * 30, n=2, max_tokens=10, stream=stream)
            assert response.status_code == 200
        headers = response.headers
        assert [headers[f"x-ratelimit-limit-{name}"] for name in ("requests", "tokens")] == ["60", "100"]
        assert headers["x-ratelimit-remaining-requests"] == "58"
        assert headers["x-ratelimit-remaining-tokens"] == "0"  # two prompts of 30, and 40 tokens of output
        assert all(headers[f"x-ratelimit-reset-{name}"].endswith("s") for name in ("requests", "tokens"))
        refused = await api.complete(prompt="x" * 10)
        assert "more than 100 tokens a minute" in problem(refused, 429)["message"]
        assert 1 <= int(refused.headers["retry-after"]) <= 6
        assert refused.headers["x-ratelimit-limit-tokens"] == "100"
        api.client.headers["authorization"] = "Bearer b"
        response = await api.complete(prompt="x")
        assert response.headers["x-ratelimit-remaining-tokens"] != "0"


@pytest.mark.parametrize(
    ("error", "status"),
    [(Overloaded("full"), 503), (WorkerLost("It starts again."), 503), (RequestError("wrong", param="n"), 400)],
)
async def test_a_refused_request_gets_the_tokens_of_its_prompt_back(error, status):
    async with running_api(limits=LimitsConfig(tokens_per_minute=100)) as api:
        api.worker.admission_error = ErrorInfo.of(error)
        for stream in (False, True, False):
            problem(await api.complete(prompt="x" * 90, stream=stream), status)
        api.worker.admission_error = None
        assert (await api.complete(prompt="x" * 90)).status_code == 200
        problem(await api.complete(prompt="x" * 90), 429)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (0.12, "120ms"), (7.66, "7.66s"), (360, "6m0s"), (90.4, "1m30s")]
)
def test_durations_are_written_as_openai_writes_them(seconds, text):
    assert duration_text(seconds) == text


async def test_the_choices_of_a_request_are_configurable():
    async with running_api(limits=LimitsConfig(max_choices=3)) as api:
        assert (await api.complete(prompt=["x"] * 3)).status_code == 200
        for path, fields in (
            ("/v1/completions", {"prompt": ["x"] * 2, "n": 2}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 4}),
        ):
            assert "at most 3 choices a request" in problem(await api.client.post(path, json=fields), 400)["message"]


async def test_who_comes_back_at_once_waits_for_further_refusals(monkeypatch):
    """16 connections that asked for /metrics beyond their limit took a core for refusals."""
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(client_limits, "REFUSALS_PER_MINUTE", 2)
    monkeypatch.setattr(client_limits, "sleep", sleep)
    limits = LimitsConfig(requests_per_minute=1, get_requests_per_minute=1)
    async with running_api(limits=limits, api_keys=("a", "b")) as api:
        for key in "aab":
            api.client.headers["authorization"] = f"Bearer {key}"
            for _ in range(2):
                await api.client.get("/v1/models")
                await api.client.post("/tokenize", json={"prompt": "a"})
    # 6 of a's 8 requests were refused, 2 of them at once, and 2 of b's
    assert pauses == [client_limits.SLOW_REFUSAL_S] * 4


async def test_costly_gets_have_a_limit_of_their_own():
    async with running_api(limits=LimitsConfig(costly_get_requests_per_minute=2)) as api:
        paths = ("/metrics", "/debug/requests?limit=1", "/debug/requests/x", "/metrics/sd", "/v1/models")
        assert [(await api.client.get(path)).status_code for path in paths] == [200, 200, 429, 429, 200]
