"""What metrics count for requests that did not end as their status said: broken streams, clients that disconnect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.conftest import Api, make_router, running_api, until
from tests.cluster.stub_worker import StubWorker
from transom_cluster.http.api import build_api
from transom_cluster.openai.answer.completion_writer import CompletionWriter
from transom_core.config import FailoverConfig, LimitsConfig
from transom_core.contract import ErrorInfo, OutputEvent
from transom_core.errors import Overloaded, PoisonRequest, RequestError, RequestTimeout, StepFailed

PATH = "/v1/completions"
SECRET = "who has seen my ring"
ASKED = {"prompt": "hi", "max_tokens": 3, "stream": True}


def counts(api: Api, family: str, label: str) -> dict[str, float]:
    """What was counted at the endpoint of completions, by a label; zeros left out."""
    found = {}
    for metric in api.router.metrics.registry.collect():
        for sample in metric.samples:
            if sample.name == family and sample.labels["endpoint"] == PATH and sample.value:
                found[sample.labels[label]] = sample.value
    return found


def ended(api: Api) -> tuple[dict[str, float], dict[str, float]]:
    return (
        counts(api, "transom_router_requests_total", "status"),
        counts(api, "transom_router_broken_answers_total", "reason"),
    )


def known(api: Api) -> set[tuple[str, ...]]:
    """The series of all counters that requests have."""
    names = ("transom_router_requests", "transom_router_broken_answers")
    families = [one for one in text_string_to_metric_families(api.router.metrics.text()) if one.name in names]
    return {tuple(sample.labels.values()) for family in families for sample in family.samples}


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (StepFailed("x"), "500", "step_failed"),
        (RequestTimeout("x"), "408", "request_timeout"),
        (PoisonRequest("x"), "500", "poison_request"),
        (Overloaded("x"), "503", "overloaded"),
        (RequestError("x"), "400", "request_refused"),
    ],
)
async def test_a_broken_stream_counts_as_its_error(
    error: Exception, status: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_api(
        StubWorker(step_error=ErrorInfo.of(error)), limits=LimitsConfig(request_timeout_s=60.0)
    ) as api:
        series = known(api)
        response = await api.complete(stream=True)
        assert response.status_code == 200
        assert '"error"' in response.text
        assert ended(api) == ({status: 1}, {reason: 1})
        assert known(api) == series
        lines = [line.getMessage() for line in caplog.records if "broke off" in line.getMessage()]
        request_id = api.worker.submitted[0].request_id
        told = [f"The stream of {request_id} broke off: {type(error).__name__}, {reason}"]
        assert lines == ([] if isinstance(error, RequestError) else told)  # a client's error is not logged


async def test_a_stream_whose_worker_is_lost_for_good_counts_as_its_error() -> None:
    async with running_api(StubWorker(max_events=1), failover=FailoverConfig(wait_s=0.05)) as api:
        call = api.call(PATH, ASKED)
        await call.begun()
        api.worker.kill()
        await call.ended()
        assert call.status == 200
        assert ended(api) == ({"503": 1}, {"worker_unavailable": 1})


async def test_an_error_before_the_first_byte_is_not_a_broken_response() -> None:
    async with running_api(StubWorker(admission_error=ErrorInfo.of(Overloaded("full")))) as api:
        assert (await api.complete(stream=True)).status_code == 503
        assert ended(api) == ({"503": 1}, {})


async def test_a_client_that_disconnects_is_not_a_server_error() -> None:
    async with running_api(StubWorker(max_events=1)) as api:
        before = api.call(PATH, {**ASKED, "stream": False})
        await until(lambda: api.worker.num_silent == 1)
        await before.leave()
        assert ended(api) == ({"499": 1}, {})
        after = api.call(PATH, ASKED)
        await after.begun()
        await after.leave()
        assert after.status == 200
        assert ended(api) == ({"499": 2}, {"client_left": 1})


async def test_a_bug_in_mid_stream_counts_and_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = CompletionWriter.chunks

    def broken(self: CompletionWriter, index: int, event: OutputEvent) -> Iterator[str]:
        if event.position:
            raise KeyError(SECRET)
        return write(self, index, event)

    async with running_api() as api:
        monkeypatch.setattr(CompletionWriter, "chunks", broken)
        assert "internal_error" in (await api.complete(stream=True)).text
        assert ended(api) == ({"500": 1}, {"internal_error": 1})
        assert "KeyError" in caplog.text
        assert SECRET not in caplog.text


async def test_a_bug_after_the_last_chunk_counts_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: CompletionWriter) -> Iterator[str]:
        raise KeyError

    async with running_api() as api:
        monkeypatch.setattr(CompletionWriter, "stream_end", broken)
        call = api.call(PATH, {**ASKED, "max_tokens": 1})
        await call.ended()
        assert ended(api) == ({"500": 1}, {"internal_error": 1})


async def test_no_request_adds_a_series() -> None:
    """So that rates see the first error of every kind."""
    limits = LimitsConfig(requests_per_minute=5, max_header_bytes=2000, request_timeout_s=60.0)
    async with running_api(limits=limits, api_keys=("k", "j"), max_body_bytes=200) as api:
        series = known(api)
        key = {"authorization": "Bearer k"}
        post, get, bodies = (
            api.client.post,
            api.client.get,
            ["{", '{"prompt": 1}', '{"prompt": "x", "model": "y"}', "x" * 300],
        )
        statuses = [(await post(PATH, content=body, headers=key)).status_code for body in bodies]
        statuses += [(await post(PATH, json=ASKED, headers=key)).status_code for _ in range(2)]
        api.worker.admission_error = ErrorInfo.of(Overloaded("full"))
        other = {"authorization": "Bearer j"}
        statuses += [(await post(PATH, json=ASKED, headers=other)).status_code]
        statuses += [(await post(path, json={})).status_code for path in (PATH, "/tokenize", "/nothing")]
        paths = (
            "/",
            "/docs",
            "/metrics/process",
            "/metrics/process?name=x/y",
            "/nothing",
            "/blocks/assets/nothing",
            PATH,
            "/debug/requests?limit=0",
            "/debug/requests/x",
            "/v1/models/x",
            "/blocks/describe",
            "/v1/models",
        )
        statuses += [(await get(path, headers=key)).status_code for path in paths]
        statuses += [(await get("/", headers={**key, "x": "y" * 3000})).status_code]
        statuses += [(await api.client.request("GET", "/v1/models", content="x" * 300, headers=key)).status_code]
        assert statuses[-1] == 413
        assert set(statuses) == {200, 400, 401, 404, 405, 413, 429, 431, 503}
        assert known(api) == series


def test_statuses_that_the_settings_rule_out_have_no_series() -> None:
    def statuses(**config: Any) -> set[str]:
        router = make_router(StubWorker(), **config)
        build_api(router)
        family = next(one for one in router.metrics.registry.collect() if one.name == "transom_router_requests")
        return {sample.labels["status"] for sample in family.samples if sample.labels["endpoint"] == PATH}

    always = {"200", "400", "404", "405", "408", "413", "429", "431", "499", "500", "503"}
    assert statuses() == always
    assert statuses(api_keys=("k",)) == always | {"401"}
