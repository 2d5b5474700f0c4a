"""The routes besides generation: tokenize, detokenize, health, version, metrics, the index."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.conftest import running_api
from tests.cluster.stub_worker import MAX_MODEL_LEN, StubWorker
from transom_core import __version__
from transom_core.contract import KvGroupInfo


async def test_tokenize_and_back(api):
    response = await api.client.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})
    assert response.json() == {
        "count": 3,
        "max_model_len": MAX_MODEL_LEN,
        "tokens": [104, 195, 169],
        "token_strs": ["h", "\\xc3", "\\xa9"],
    }
    response = await api.client.post("/detokenize", json={"tokens": [104, 195, 169]})
    assert response.json() == {"prompt": "hé"}
    chat = {"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": False}
    assert (await api.client.post("/tokenize", json=chat)).json()["count"] == len("user:x;")
    wrong_tools = {"prompt": "x", "tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]}
    for body in ({}, {"prompt": "x", "messages": chat["messages"]}, {**chat, "add_special_tokens": True}, wrong_tools):
        assert (await api.client.post("/tokenize", json=body)).status_code == 400
    assert (await api.client.post("/detokenize", json={"tokens": [9999]})).json()["error"]["param"] == "tokens"


async def test_health_version_index_and_docs(api):
    assert (await api.client.get("/health")).status_code == 200
    assert (await api.client.get("/version")).json() == {"version": __version__}
    index = (await api.client.get("/")).json()
    assert index["model"] == "stub"
    assert "/v1/chat/completions" in index["paths"]
    schemas = (await api.client.get("/openapi.json")).json()["components"]["schemas"]
    assert schemas.keys() >= {"ChatCompletionRequest", "ChatMessage", "CompletionRequest"}


async def test_models_say_how_the_kv_cache_keeps_numbers():
    groups = (
        KvGroupInfo(name="full", dtype="int8", bytes_per_token=72.0),
        KvGroupInfo(name="window", dtype="bfloat16", bytes_per_token=128.0),
    )
    async with running_api(StubWorker(kv_groups=groups)) as api:
        expected = [
            {"group": "full", "dtype": "int8", "bytes_per_token": 72.0},
            {"group": "window", "dtype": "bfloat16", "bytes_per_token": 128.0},
        ]
        assert (await api.client.get("/v1/models")).json()["data"][0]["kv_cache"] == expected
        assert (await api.client.get("/v1/models/stub")).json()["kv_cache"] == expected


async def test_models_are_listed_before_a_worker_is_known():
    async with running_api(StubWorker(can_open=False)) as api:
        card = (await api.client.get("/v1/models")).json()["data"][0]
        assert (card["kv_cache"], card["max_model_len"]) == ([], None)


async def test_metrics_are_the_union_and_parse(api):
    await api.complete(max_tokens=3, stream=True)
    await api.complete(temperature=-1)
    await api.client.get("/made/up/path")
    page = (await api.client.get("/metrics")).text
    families = {family.name: family for family in text_string_to_metric_families(page)}
    assert families["transom_requests_running"].samples[0].labels == {"worker": "0"}
    counts = {
        (sample.labels["endpoint"], sample.labels["status"]): sample.value
        for sample in families["transom_router_requests"].samples
        if sample.name.endswith("_total") and sample.value
    }
    assert counts == {("/v1/completions", "200"): 1, ("/v1/completions", "400"): 1, ("other", "404"): 1}
    assert value(page, "transom_router_first_token_seconds_count") == 1
    assert value(page, "transom_router_inter_token_seconds_count") == 2
    assert value(page, "transom_router_open_streams") == 0
    assert value(page, "transom_router_dropped_scrapes_total") == 0


def value(page: str, name: str) -> float:
    return sum(s.value for family in text_string_to_metric_families(page) for s in family.samples if s.name == name)
