"""The fields `kv_policy` and `kv_quality`: what a worker gets, and what a client is told."""

import asyncio
import json

import pytest

from tests.cluster.conftest import Api, running_api
from tests.cluster.stub_worker import MAX_MODEL_LEN, StubWorker
from transom_core.contract import AdaptivePolicy, HeavyPolicy, KvPolicy, KvQuality, OutputEvent, Usage, WindowPolicy
from transom_core.contract.kv_policy import MAX_LONG_PROMPT_TOKENS, MAX_STREAM_TOKENS

WINDOW = {"type": "window", "sinks": 2, "window": 64}


@pytest.mark.parametrize(
    ("field", "policy"),
    [
        (WINDOW, WindowPolicy(sinks=2, window=64)),
        ({"type": "window", "window": 64}, WindowPolicy(sinks=4, window=64)),
        (
            {"type": "adaptive", "min_window": 8, "max_window": 64, "threshold": 0.02},
            AdaptivePolicy(sinks=4, min_window=8, max_window=64, threshold=0.02),
        ),
        ({"type": "heavy", "budget": 128, "sinks": 0}, HeavyPolicy(sinks=0, budget=128)),
        ({"type": "full"}, None),
        (None, None),
    ],
)
async def test_workers_get_the_policy(field: object, policy: KvPolicy | None) -> None:
    async with running_api() as api:
        for send in (api.complete, api.chat):
            response = await send(kv_policy=field, n=2)
            assert response.status_code == 200, response.text
            assert "kv_quality" not in response.json()["usage"]
        assert [request.kv_policy for request in api.worker.submitted] == [policy] * 4


async def test_a_model_that_takes_no_policy_refuses_it_by_name() -> None:
    async with running_api(StubWorker(kv_policy_obstacle="in this one 2 of its 4 layers have sliding windows")) as api:
        response = await api.complete(kv_policy=WINDOW)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "kv_policy")
        assert "in this one 2 of its 4 layers have sliding windows; leave it out" in error["message"]
        assert (await api.complete(kv_policy={"type": "full"})).status_code == 200


async def test_a_window_may_run_past_the_model_s_length() -> None:
    prompt = "x" * (2 * MAX_MODEL_LEN)
    async with running_api() as api:
        response = await api.complete(prompt=prompt, kv_policy=WINDOW, max_tokens=3)
        assert response.status_code == 200, response.text
        for fields in ({}, {"kv_policy": {"type": "heavy", "budget": 64}}, {"kv_policy": WINDOW, "kv_quality": True}):
            error = (await api.complete(prompt=prompt, max_tokens=3, **fields)).json()["error"]
            assert error["code"] == "context_length_exceeded"
        error = (await api.complete(prompt=prompt, kv_policy=WINDOW, max_tokens=MAX_STREAM_TOKENS)).json()["error"]
        assert str(MAX_STREAM_TOKENS) in error["message"]
        longest = [120] * MAX_LONG_PROMPT_TOKENS  # hashed on the event loop
        error = (await api.complete(prompt=longest, kv_policy=WINDOW, max_tokens=3)).json()["error"]
        assert error["code"] == "context_length_exceeded"


async def push_quality(api: Api, *qualities: KvQuality) -> None:
    """End the requests at the worker, each with its quality."""
    await api.worker.until(lambda: len(api.worker.submitted) == len(qualities))
    for request, quality in zip(api.worker.submitted, qualities, strict=True):
        assert request.kv_quality
        usage = Usage(num_prompt_tokens=2, num_output_tokens=1, num_cached_tokens=0, kv_quality=quality)
        event = OutputEvent(
            request_id=request.request_id, position=0, token_ids=(97,), text="a", finish_reason="length", usage=usage
        )
        api.worker.push(event)


async def test_usage_has_the_quality_of_all_choices() -> None:
    async with running_api(StubWorker(max_events=0)) as api:
        answer = asyncio.create_task(api.complete(kv_policy=WINDOW, kv_quality=True, n=2, max_tokens=1))
        await push_quality(
            api,
            KvQuality(num_tokens=3, kl=0.3, max_kl=0.2, num_agreeing=3, dropped_mass=0.6),
            KvQuality(num_tokens=1, kl=0.5, max_kl=0.5, num_agreeing=0, dropped_mass=0.2),
        )
        assert (await answer).json()["usage"]["kv_quality"] == {
            "compared_tokens": 4,
            "mean_kl": pytest.approx(0.2),
            "max_kl": 0.5,
            "top_token_agreement": 0.75,
            "dropped_attention": pytest.approx(0.2),
        }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/responses", {"input": "hi", "max_output_tokens": 1}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}),
    ],
)
async def test_other_apis_have_quality_in_their_usage(path: str, fields, stream: bool) -> None:
    async with running_api(StubWorker(max_events=0)) as api:
        body = fields | {"kv_policy": WINDOW, "kv_quality": True, "stream": stream}
        answer = asyncio.create_task(api.client.post(path, json=body))
        await push_quality(api, KvQuality(num_tokens=2, kl=0.3, max_kl=0.2, num_agreeing=1, dropped_mass=0.6))
        text = (await answer).text
        told = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")] or [json.loads(text)]
        *_, usage = (found for event in told if (found := event.get("response", event).get("usage")))
        assert (usage["kv_quality"]["compared_tokens"], usage["kv_quality"]["top_token_agreement"]) == (2, 0.5)
