"""A request's timeline over HTTP: over several workers and routers, for its own client alone, without any text of the prompt. No
log line and no metric contains a prompt or an output, for every end of a request, unless --log-prompts is set."""

import contextlib
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.conftest import Api, StubPeers, running_api, until
from tests.cluster.engine_server import engine_server
from tests.cluster.stub_worker import StubWorker
from transom_cluster.http.request_timeline_routes import phase_times
from transom_core.config import FailoverConfig, LimitsConfig
from transom_core.contract import ErrorInfo
from transom_core.errors import Overloaded, RequestTimeout, RequestTooLarge, StepFailed

MARK = "zebra4711"
CHAT = {"messages": [{"role": "user", "content": MARK}]}
TEXT = {"prompt": MARK, "max_tokens": 3}


async def timeline_of(api: Api, request_id: str, **headers: str) -> dict[str, Any]:
    response = await api.client.get(f"/debug/requests/{request_id}", headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


async def lines_of(api: Api, query: str = "", **headers: str) -> list[dict[str, Any]]:
    return (await api.client.get(f"/debug/requests{query}", headers=headers)).json()["requests"]


def kinds(timeline: dict[str, Any]) -> list[str]:
    return [step["what"] for step in timeline["steps"]]


def the(timeline: dict[str, Any], what: str) -> dict[str, Any]:
    [step] = [step for step in timeline["steps"] if step["what"] == what]
    return step


USUAL = ["arrived", "tokenised", "placed", "sent", "accepted", "first_token", "finished", "ended"]


async def test_a_timeline_from_arrival_to_the_end(api: Api) -> None:
    response = await api.complete(max_tokens=4)
    request_id = response.json()["id"]
    assert response.headers["x-request-id"] == request_id
    timeline = await timeline_of(api, request_id)
    assert sorted(kinds(timeline), key=USUAL.index) == USUAL
    assert the(timeline, "arrived").items() >= {"endpoint": "/v1/completions", "prompt_tokens": 2, "choices": 1}.items()
    placed = {"worker": "w0", "policy": "kv", "reason": "only_one", "predicted_hit_tokens": 0}
    assert the(timeline, "placed").items() >= placed.items()
    assert the(timeline, "first_token")["hit_tokens"] == 3
    assert the(timeline, "finished").items() >= {"reason": "length", "output_tokens": 4}.items()
    assert timeline["state"] == "finished"
    assert (timeline["workers"], timeline["resumes"], timeline["hit_tokens"]) == (["w0"], 0, 3)
    after = [step["after_s"] for step in timeline["steps"]]
    assert (after[0], after) == (0, sorted(after))
    assert timeline["worker_parts"] == {"w0": "forgotten"}


async def test_a_request_is_found_by_its_x_request_id_too(api: Api) -> None:
    """As Ray Serve gives one to every request, and answers with it by itself."""
    response = await api.client.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "my-own-1"})
    assert "x-request-id" not in response.headers
    timeline = await timeline_of(api, "my-own-1")
    assert (timeline["id"], timeline["x_request_id"]) == (response.json()["id"], "my-own-1")
    response = await api.client.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "job/7/a"})
    for path in ("job/7/a", "job%2F7%2Fa"):
        assert (await timeline_of(api, path))["id"] == response.json()["id"]
    await api.client.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "x" * 1000})
    assert [line["x_request_id"] for line in await lines_of(api)] == ["x" * 128, "job/7/a", "my-own-1"]


async def test_workers_steps_have_the_routers_number_of_their_choice(api: Api) -> None:
    """Over all prompts: a request with two prompts and three choices of each has the choices 0 to 5."""
    request_id = (await api.complete(prompt=["a", "b"], n=3)).json()["id"]
    own = await timeline_of(api, request_id)
    assert (own["prompts"], own["choices"]) == (2, 6)
    for place in ("0-0", "0-2", "1-0", "1-2+1"):
        one = {"worker": "w0", "request_id": f"{request_id}-{place}", "what": "queued"}
        api.worker.timeline.append({"at_s": own["arrival_s"] + len(api.worker.timeline), **one})
    steps = (await timeline_of(api, request_id))["steps"]
    assert [step["choice"] for step in steps if step["what"] == "queued"] == [0, 2, 3, 5]
    assert {step["choice"] for step in steps if step["what"] == "placed"} == set(range(6))


@pytest.mark.parametrize("ahead_s", [-86_400.0, 0.0, 86_400.0])
async def test_workers_steps_are_merged_in_order_of_time_even_if_clocks_differ(api: Api, ahead_s: float) -> None:
    request_id = (await api.complete()).json()["id"]
    own = await timeline_of(api, request_id)
    last_s = own["arrival_s"] + own["steps"][-1]["after_s"]  # the last event of the router
    for what, after_s in (("queued", 0.5), ("admitted", 0.75), ("first_token", 1.75), ("finished", 3.75)):
        step = {"at_s": last_s + after_s, "worker": "w0", "request_id": f"{request_id}-0-0", "what": what}
        api.worker.timeline.append(step)
    api.worker.clock_ahead_s = ahead_s
    timeline = await timeline_of(api, request_id)
    assert kinds(timeline)[-4:] == ["queued", "admitted", "first_token", "finished"]
    assert not any("choice" in step for step in timeline["steps"]), "there is only one"
    assert timeline["worker_parts"] == {"w0": "told"}
    assert timeline["times"] == pytest.approx({"queue_s": 0.25, "prefill_s": 1.0, "decode_s": 2.0}, abs=1e-5)
    assert -1.0 < timeline["steps"][-1]["after_s"] - 3.75 < 60.0


def test_times_are_those_of_the_slowest_choice_over_its_attempts() -> None:
    def step(request_id: str, what: str, at_s: float, **facts: float) -> dict[str, Any]:
        return {"request_id": request_id, "what": what, "at_s": at_s, **facts}

    steps = [
        *(step("a-0-0", what, at_s) for what, at_s in (("queued", 0), ("admitted", 1), ("first_token", 3))),
        step("a-0-0", "decode", 3, seconds=2.0),
        *(step("a-0-0+1", what, at_s) for what, at_s in (("queued", 6), ("admitted", 7), ("first_token", 8))),
        step("a-0-0+1", "preempted", 9),
        step("a-0-0+1", "finished", 10),
        *(step("a-0-1", what, at_s) for what, at_s in (("queued", 0), ("finished", 5))),
    ]
    assert phase_times(steps) == {"queue_s": 5.0, "prefill_s": 3.0, "decode_s": 4.0}
    assert phase_times([]) == {}


async def test_a_worker_that_dies_in_mid_stream() -> None:
    workers = (StubWorker(worker="w0", max_events=3), StubWorker(worker="w1", max_events=3))
    async with running_api(*workers, routing_policy="round_robin", failover=FailoverConfig(wait_s=120.0)) as api:
        call = api.call("/v1/completions", {"prompt": "hi", "max_tokens": 6, "stream": True})
        await until(lambda: any(worker.num_silent for worker in workers))
        first, second = sorted(workers, key=lambda worker: -worker.num_silent)
        second.go()
        first.kill()
        await call.ended()
        [line] = await lines_of(api)
        timeline = await timeline_of(api, line["id"])
    placed = [step for step in timeline["steps"] if step["what"] == "placed"]
    assert [step["worker"] for step in placed] == [first.worker, second.worker] == timeline["workers"]
    lost = {"worker": first.worker, "cause": "lost", "tokens_so_far": 3}
    assert the(timeline, "lost").items() >= lost.items()
    assert (placed[1]["resumed_tokens"], timeline["resumes"]) == (3, 1)
    assert the(timeline, "finished")["output_tokens"] == 6
    assert timeline["worker_parts"][first.worker] in ("gone", "no answer")


async def test_a_refusal_names_its_kind_and_its_id() -> None:
    async with running_api(StubWorker(admission_error=ErrorInfo.of(Overloaded(f"full of {MARK}")))) as api:
        response = await api.complete()
        assert response.status_code == 503
        timeline = await timeline_of(api, response.headers["x-request-id"])
    assert the(timeline, "turned_away").items() >= {"worker": "w0", "error": "Overloaded"}.items()
    assert the(timeline, "failed")["error"] == timeline["error"] == "Overloaded"
    assert timeline["state"] == "failed"
    assert MARK not in json.dumps(timeline)


async def test_lists_have_the_newest_first_and_are_filtered(api: Api) -> None:
    ids = [(await api.complete()).json()["id"] for _ in range(3)] + [(await api.chat()).json()["id"]]
    assert [line["id"] for line in await lines_of(api)] == ids[::-1]
    assert [line["id"] for line in await lines_of(api, "?limit=2")] == ids[:1:-1]
    assert len(await lines_of(api, "?state=finished")) == 4
    assert await lines_of(api, "?state=running") == []
    for query in ("?state=odd", "?limit=0", "?limit=x"):
        response = await api.client.get(f"/debug/requests{query}")
        assert (response.status_code, response.json()["error"]["param"]) == (400, query[1:].partition("=")[0])


@pytest.mark.parametrize("request_id", ["chatcmpl", "cmpl-0", "-", "%00", "x" * 500])
async def test_an_unknown_request_is_not_found(api: Api, request_id: str) -> None:
    await api.chat()
    response = await api.client.get(f"/debug/requests/{request_id}")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "request_not_found")


async def test_clients_see_their_own_requests_only() -> None:
    mine, yours = {"authorization": "Bearer mine"}, {"authorization": "Bearer yours"}
    async with running_api(StubWorker(), api_keys=("mine", "yours")) as api:
        body = {"prompt": MARK, "max_tokens": 2, "cache_salt": MARK, "user": MARK}
        request_id = (await api.client.post("/v1/completions", json=body, headers=mine)).json()["id"]
        assert await lines_of(api, **yours) == []
        assert (await api.client.get(f"/debug/requests/{request_id}", headers=yours)).status_code == 404
        for headers in (yours, mine):  # both choose the same id
            chosen = {**headers, "x-request-id": "same"}
            own_id = (await api.client.post("/v1/completions", json={"prompt": "a"}, headers=chosen)).json()["id"]
            assert (await timeline_of(api, "same", **headers))["id"] == own_id
        for path in ("/debug/requests", f"/debug/requests/{request_id}"):
            assert (await api.client.get(path)).status_code == 401
        assert len(await lines_of(api, **yours)) == 1
        *_, line = await lines_of(api, **mine)
        told = json.dumps([line, await timeline_of(api, request_id, **mine)])
    assert "mine" not in told
    assert MARK not in told
    assert "client" not in line


async def test_any_router_knows_what_another_one_served() -> None:
    keys = ("mine", "yours")
    mine, yours = {"authorization": "Bearer mine"}, {"authorization": "Bearer yours"}
    async with running_api(StubWorker(), api_keys=keys) as api, running_api(StubWorker(), api_keys=keys) as asked:
        asked.router.peers = StubPeers(TimeoutError("a third one"), api.router)
        request_id = (await api.client.post("/v1/completions", json={"prompt": "a"}, headers=mine)).json()["id"]
        own_id = (await asked.client.post("/v1/completions", json={"prompt": "a"}, headers=mine)).json()["id"]
        assert (await timeline_of(asked, request_id, **mine))["id"] == request_id
        assert (await asked.client.get(f"/debug/requests/{request_id}", headers=yours)).status_code == 404
        assert [line["id"] for line in await lines_of(asked, **mine)] == [own_id, request_id]
        assert await lines_of(asked, **yours) == []


def test_through_a_real_engine(tiny_model: Path) -> None:
    with engine_server(tiny_model, kv_cache_memory_bytes="8MiB", num_threads=1, block_size=8) as server:
        body = {"prompt": list(range(10, 40)), "max_tokens": 5, "ignore_eos": True, "temperature": 0}
        with httpx.Client(base_url=server.url, timeout=120, trust_env=False) as client:
            timelines = []
            for _ in range(2):
                request_id = client.post("/v1/completions", json=body).json()["id"]
                timelines.append(client.get(f"/debug/requests/{request_id}").json())
    first, second = timelines
    of_worker = [step["what"] for step in first["steps"] if step.get("request_id")]
    assert of_worker == ["queued", "admitted", "prefill", "first_token", "decode", "finished"]
    assert (first["hit_tokens"], second["hit_tokens"]) == (0, 24)
    assert the(second, "placed")["predicted_hit_tokens"] == the(second, "admitted")["hit"] == 24
    assert set(second["times"]) == {"queue_s", "prefill_s", "decode_s"}
    assert sum(second["times"].values()) <= second["seconds"] + 1e-3


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
async def unseen(logged: pytest.LogCaptureFixture, *workers: StubWorker, **config: Any) -> AsyncIterator[Api]:
    async with running_api(*workers, **config) as api:
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
    values = (MARK, [MARK], {MARK: MARK}, [{"role": MARK}], [{"role": "user", "content": [{"type": MARK}]}])
    async with unseen(logged) as api:
        for name in names:
            for value in values:
                assert (await api.client.post(path, json={**good, name: value})).status_code in (200, 400, 404)
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
