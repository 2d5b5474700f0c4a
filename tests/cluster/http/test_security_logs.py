"""No log line and no metric contains a prompt or an output, for every end of a request, unless --log-prompts is set."""

import contextlib
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.cluster.conftest import Api, running_api
from tests.cluster.stub_worker import StubWorker
from transom_core.config import LimitsConfig
from transom_core.contract import ErrorInfo
from transom_core.errors import Overloaded, RequestTimeout, RequestTooLarge, StepFailed

MARK = "zebra4711"
CHAT = {"messages": [{"role": "user", "content": MARK}]}
TEXT = {"prompt": MARK, "max_tokens": 3}


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG)
    for name in ("transom", "transom.router", "uvicorn.error", "asyncio"):
        caplog.set_level(logging.DEBUG, logger=name)
    return caplog


def lines(logged: pytest.LogCaptureFixture) -> str:
    """All records as any handler could show them, but those of the test's own client."""
    records = [record for record in logged.records if not record.name.startswith("httpx")]
    return "\n".join(logging.Formatter().format(record) + repr(record.__dict__) for record in records)


@contextlib.asynccontextmanager
async def unseen(
    logged: pytest.LogCaptureFixture, worker: StubWorker | None = None, **config: Any
) -> AsyncIterator[Api]:
    async with running_api(worker or StubWorker(), **config) as api:
        yield api
        page = (await api.client.get("/metrics")).text
    assert "transom_router_requests_total" in page
    assert MARK not in page
    assert MARK not in lines(logged)


@pytest.mark.parametrize("stream", [True, False])
async def test_answers(logged, stream):
    async with unseen(logged) as api:
        for fields in ({}, {"n": 2}, {"stop": MARK}, {"cache_salt": MARK}, {"user": MARK}, {"metadata": {"a": MARK}}):
            assert (await api.complete(**TEXT, **fields, stream=stream)).status_code == 200
            assert (await api.chat(**CHAT, **fields, stream=stream)).status_code == 200
        assert MARK in (await api.complete(**TEXT, echo=True, logprobs=1, stream=stream)).text
    assert logged.records


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
async def test_refused_fields_and_bodies(logged, path):
    good = CHAT if "chat" in path else {"tokens": list(MARK.encode())} if path == "/detokenize" else {"prompt": MARK}
    names = ("model", "prompt", "messages", "tokens", "max_tokens", "temperature", "stop", "logit_bias", "tools", MARK)
    async with unseen(logged) as api:
        for name in names:
            for value in (
                MARK,
                [MARK],
                {MARK: MARK},
                [{"role": MARK}],
                [{"role": "user", "content": [{"type": MARK}]}],
            ):
                response = await api.client.post(path, json={**good, name: value})
                assert response.status_code in (200, 400, 404)
        for content in (f'{{"prompt": "{MARK}', f'["{MARK}"]', f'"{MARK}"', MARK, f'{{"prompt": "{MARK}\\ud800"}}'):
            assert (await api.client.post(path, content=content.encode())).status_code == 400
        assert (await api.client.post(path, json={**good, "prompt": MARK * 100})).status_code in (200, 400)


async def test_requests_over_a_limit(logged):
    config: dict[str, Any] = {"max_body_bytes": 2048, "api_keys": ("k",), "limits": LimitsConfig(requests_per_minute=4)}
    async with unseen(logged, **config) as api:
        assert (await api.complete(**TEXT)).status_code == 401
        assert (await api.client.get("/v1/models", headers={"authorization": f"Bearer {MARK}"})).status_code == 401
        api.client.headers["authorization"] = "Bearer k"
        assert (await api.complete(prompt=MARK * 1000)).status_code == 413
        assert (await api.complete(prompt=MARK * 100)).status_code == 400
        assert (await api.client.get(f"/{MARK}")).status_code == 404
        assert (await api.complete(**TEXT, user=MARK)).status_code == 200
        assert [(await api.complete(**TEXT)).status_code for _ in range(3)][-1] == 429


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "error", [Overloaded("full"), RequestTooLarge("large"), RequestTimeout("late"), StepFailed("x")]
)
async def test_errors_of_workers(logged, error, stream):
    async with unseen(logged, StubWorker(admission_error=ErrorInfo.of(error))) as api:
        assert (await api.complete(**TEXT, stream=stream)).status_code >= 400
    async with unseen(logged, StubWorker(step_error=ErrorInfo.of(error))) as api:
        assert "error" in (await api.chat(**CHAT, stream=stream)).text


@pytest.mark.parametrize("stream", [True, False])
async def test_crashes_of_workers_and_clients_that_leave(logged, stream):
    async with unseen(logged, StubWorker(poison=ord("z"))) as api:
        assert "error" in (await api.complete(**TEXT, stream=stream)).text
    async with unseen(logged, StubWorker(max_events=1)) as api:
        call = api.call("/v1/completions", {**TEXT, "stream": stream})
        await api.worker.until(lambda: api.worker.submitted)
        await call.leave()


BUGS = ["tokenizer", "template", "router", "stream", "cause"]


def break_it(api: Api, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something below a route raises an error that quotes the prompt."""

    def bug(*_: Any, **__: Any) -> None:
        try:
            raise KeyError(MARK)
        except KeyError as error:
            raise ValueError(f"cannot do {MARK}") from (error if where == "cause" else None)

    if where == "tokenizer":
        monkeypatch.setattr(api.router.tokenizer, "encode", bug)
    elif where == "template":
        monkeypatch.setattr(api.router.tokenizer, "apply_chat_template", bug)
    elif where == "stream":
        monkeypatch.setattr("transom_cluster.openai.answer.usage.UsageTotals.add", bug)
    else:
        monkeypatch.setattr(api.router, "generate", bug)


@pytest.mark.parametrize("where", BUGS)
async def test_bugs(logged, monkeypatch, where):
    """A bug is logged with the place and the kind of its error, and reaches no web server, which would log its message."""
    async with unseen(logged) as api:
        break_it(api, where, monkeypatch)
        path, body = ("/v1/chat/completions", CHAT) if where == "template" else ("/v1/completions", TEXT)
        for stream in (False, True):
            call = api.call(path, {**body, "stream": stream})
            await call.ended()
            assert MARK not in call.text
            last = [line for line in call.text.splitlines() if line][-1]
            assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
    text = lines(logged)
    assert "ValueError" in text
    assert "in bug" in text
    assert where != "cause" or "KeyError" in text


async def test_on_request_prompts_and_messages_of_bugs_are_logged(logged, monkeypatch):
    async with running_api(log_prompts=True) as api:
        await api.complete(**TEXT)
        assert MARK in lines(logged)
        logged.clear()
        break_it(api, "tokenizer", monkeypatch)
        await api.complete(**TEXT)
        assert f"cannot do {MARK}" in lines(logged)
