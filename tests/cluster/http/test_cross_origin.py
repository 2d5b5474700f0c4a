"""Pages of other origins, where they are allowed: preflights need no key, and errors can be read. And HEAD and OPTIONS."""

from __future__ import annotations

import httpx
import pytest

from tests.cluster.conftest import running_api
from tests.cluster.http.test_http_errors import problem

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
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == PAGE
        assert "authorization" in asked.headers["access-control-allow-headers"]
        assert "POST" in asked.headers["access-control-allow-methods"]
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "stream": True}
        headers = {"origin": PAGE, "authorization": "Bearer secret"}
        answer = await api.client.post(CHAT, json=body, headers=headers)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in answer.headers["access-control-expose-headers"]


async def test_a_page_can_read_why_its_request_was_refused():
    async with running_api(allowed_origins=(PAGE,), api_keys=("secret",), max_body_bytes=1024) as api:
        for key, status in (("wrong", 401), ("secret", 413)):
            headers = {"origin": PAGE, "authorization": f"Bearer {key}"}
            answer = await api.client.post(CHAT, content=b"x" * 2000, headers=headers)
            problem(answer, status)
            assert answer.headers["access-control-allow-origin"] == PAGE


async def test_another_origin_gets_no_permission():
    async with running_api(allowed_origins=(PAGE,)) as api:
        other = "https://evil.example.com"
        asked = await api.client.options(CHAT, headers={**PREFLIGHT, "origin": other})
        assert other in problem(asked, 400)["message"]
        answer = await api.client.get("/v1/models", headers={"origin": other})
        for response in (asked, answer):
            assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(("origins", "allowed"), [((), None), (("*",), "*"), ((PAGE,), PAGE)])
async def test_origins_have_permission_only_where_the_server_names_them(origins, allowed):
    async with running_api(allowed_origins=origins) as api:
        answer = await api.client.get("/v1/models", headers={"origin": PAGE})
        assert answer.headers.get("access-control-allow-origin") == allowed
        asked = await api.client.options(CHAT, headers=PREFLIGHT)
        assert asked.headers.get("access-control-allow-origin") == allowed


@pytest.mark.parametrize(
    "path", ["/", "/health", "/version", "/v1/models", "/v1/models/stub", "/metrics", "/openapi.json"]
)
async def test_head_answers_as_get_does(api, path):
    head, got = await api.client.head(path), await api.client.get(path)
    assert (head.status_code, head.headers["content-type"]) == (got.status_code, got.headers["content-type"])
    allow = (await api.client.options(path)).headers["allow"]
    assert {"GET", "HEAD", "OPTIONS"} <= set(allow.split(", "))


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
