"""What metrics count for requests that did not end as their status said: broken streams, clients that disconnect."""

from collections.abc import Iterator

import pytest

from tests.cluster.conftest import Api, running_api, until
from tests.cluster.stub_worker import StubWorker
from transom_cluster.openai.answer.completion_writer import CompletionWriter
from transom_core.config import FailoverConfig, LimitsConfig
from transom_core.contract import ErrorInfo
from transom_core.errors import Overloaded, PoisonRequest, RequestError, RequestTimeout, StepFailed

PATH = "/v1/completions"
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
        response = await api.complete(stream=True)
        assert response.status_code == 200
        assert '"error"' in response.text
        assert ended(api) == ({status: 1}, {reason: 1})
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
        await until(lambda: len(api.worker.aborted) == 1)
        assert ended(api) == ({"499": 1}, {})
        after = api.call(PATH, ASKED)
        await after.begun()
        await after.leave()
        assert after.status == 200
        assert ended(api) == ({"499": 2}, {"client_left": 1})


async def test_a_bug_after_the_last_chunk_counts_as_an_internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: CompletionWriter) -> Iterator[str]:
        raise KeyError

    async with running_api() as api:
        monkeypatch.setattr(CompletionWriter, "stream_end", broken)
        call = api.call(PATH, {**ASKED, "max_tokens": 1})
        await call.ended()
        assert ended(api) == ({"500": 1}, {"internal_error": 1})
