"""The routes besides generation: tokenize, detokenize, health, version, metrics, the index; HEAD and OPTIONS; and pages of other
origins, where they are allowed: preflights need no key, and errors can be read."""

import httpx
import pytest

from tests.cluster.conftest import running_api
from tests.cluster.http.test_http_errors import problem
from tests.cluster.stub_worker import MAX_MODEL_LEN, StubWorker
from transom_core import __version__
from transom_core.contract import KvGroupInfo


async def test_tokenize_and_back(api):
    response = await api.client.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})
    tokens = {"tokens": [104, 195, 169], "token_strs": ["h", "\\xc3", "\\xa9"]}
    assert response.json() == {"count": 3, "max_model_len": MAX_MODEL_LEN, **tokens}
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
    sizes = (("full", "int8", 72.0), ("window", "bfloat16", 128.0))
    groups = tuple(KvGroupInfo(name=name, dtype=dtype, bytes_per_token=size) for name, dtype, size in sizes)
    async with running_api(StubWorker(kv_groups=groups)) as api:
        expected = [{"group": name, "dtype": dtype, "bytes_per_token": size} for name, dtype, size in sizes]
        assert (await api.client.get("/v1/models")).json()["data"][0]["kv_cache"] == expected
        assert (await api.client.get("/v1/models/stub")).json()["kv_cache"] == expected


async def test_models_are_listed_before_a_worker_is_known():
    async with running_api(StubWorker(can_open=False)) as api:
        card = (await api.client.get("/v1/models")).json()["data"][0]
        assert (card["kv_cache"], card["max_model_len"]) == ([], None)


PAGE = "https://chat.example.com"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type",
}
CHAT = "/v1/chat/completions"


async def test_a_preflight_works_without_a_key_and_the_request_with_one():
    async with running_api(allowed_origins=(PAGE,), api_keys=("secret",)) as api:
        asked = await api.client.options(CHAT, headers=PREFLIGHT)
        assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, PAGE)
        assert "authorization" in asked.headers["access-control-allow-headers"]
        assert "POST" in asked.headers["access-control-allow-methods"]
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "stream": True}
        answer = await api.client.post(CHAT, json=body, headers={"origin": PAGE, "authorization": "Bearer secret"})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
        assert "x-request-id" in answer.headers["access-control-expose-headers"]


async def test_a_page_can_read_why_its_request_was_refused():
    async with running_api(allowed_origins=(PAGE,), api_keys=("secret",), max_body_bytes=1024) as api:
        for key, status in (("wrong", 401), ("secret", 413)):
            headers = {"origin": PAGE, "authorization": f"Bearer {key}"}
            answer = await api.client.post(CHAT, content=b"x" * 2000, headers=headers)
            problem(answer, status)
            assert answer.headers["access-control-allow-origin"] == PAGE


@pytest.mark.parametrize(
    ("origins", "allowed"), [((), None), (("*",), "*"), ((PAGE,), PAGE), (("https://other.example.com",), None)]
)
async def test_origins_have_permission_only_where_the_server_names_them(origins, allowed):
    async with running_api(allowed_origins=origins) as api:
        answer = await api.client.get("/v1/models", headers={"origin": PAGE})
        asked = await api.client.options(CHAT, headers=PREFLIGHT)
        assert [one.headers.get("access-control-allow-origin") for one in (answer, asked)] == [allowed] * 2


@pytest.mark.parametrize(
    "path", ["/", "/health", "/version", "/v1/models", "/v1/models/stub", "/metrics", "/openapi.json"]
)
async def test_head_answers_as_get_does(api, path):
    head, got = await api.client.head(path), await api.client.get(path)
    assert (head.status_code, head.headers["content-type"]) == (got.status_code, got.headers["content-type"])
    assert {"GET", "HEAD", "OPTIONS"} <= set((await api.client.options(path)).headers["allow"].split(", "))


def test_head_has_no_body_and_leaves_the_connection_usable(server):
    with httpx.Client(base_url=server.url) as client:
        for _ in range(2):
            head, got = client.head("/v1/models"), client.get("/v1/models")
            assert (head.content, head.headers["content-length"]) == (b"", str(len(got.content)))


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize", "/detokenize"])
async def test_routes_for_post_alone_say_so(api, path):
    assert (await api.client.head(path)).status_code == 405
    asked = await api.client.options(path)
    assert (asked.status_code, asked.headers["allow"], asked.content) == (204, "POST, OPTIONS", b"")


async def test_other_paths_stay_unknown_and_a_stream_without_end_has_no_head(api):
    assert (await api.client.options("/v2")).status_code == 404
    assert (await api.client.head("/v2")).status_code == 404
    assert (await api.client.head("/blocks/stream")).status_code == 405
