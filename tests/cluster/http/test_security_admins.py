"""Admin keys: they alone open routes that show all clients together, and they open all other routes as well."""

from pathlib import Path
from typing import cast

import httpx
import pytest
from starlette.routing import Route

from tests.cluster.conftest import Api, make_router, running_api
from tests.cluster.stub_worker import StubWorker
from transom_cluster.http.api import build_api
from transom_cluster.http.api_keys import needs_admin_key

SHARED = ("/metrics", "/metrics/sd", "/metrics/process", "/blocks/describe", "/blocks/stream?worker=none")
MEASURE = "/transfers/measure"
ADAPTERS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
OPERATORS = (MEASURE, "/pause", "/resume", "/update_weights_from_disk", *ADAPTERS)


@pytest.fixture
def admins(tmp_path: Path) -> str:
    path = tmp_path / "admins"
    path.write_text("# of people\nboss\n")
    path.chmod(0o600)
    return str(path)


async def status(api: Api, path: str, key: str | None) -> int:
    response = await api.client.get(path, headers={"authorization": f"Bearer {key}"} if key else {})
    if response.status_code in (401, 403):
        error = response.json()["error"]
        wanted = {401: ("authentication_error", "invalid_api_key"), 403: ("permission_error", "admin_api_key_required")}
        assert (error["type"], error["code"]) == wanted[response.status_code]
    return response.status_code


async def test_admins_alone_see_what_all_clients_do(admins: str) -> None:
    async with running_api(api_keys=("k",), admin_api_key_file=admins) as api:
        for path in (*SHARED, *OPERATORS):
            assert await status(api, path, "k") == 403
            assert [await status(api, path, key) for key in (None, "wrong")] == [401, 401]
            assert await status(api, path, "boss") in (200, 400, 404, 405)
        for path in ("/", "/v1/models", "/debug/requests", "/version"):
            assert [await status(api, path, key) for key in ("k", "boss", None, "wrong")] == [200, 200, 401, 401]
        for path in ("/health", "/blocks"):
            assert await status(api, path, None) == 200
        page = (await api.client.get("/metrics", headers={"authorization": "Bearer boss"})).text
        assert 'transom_router_requests_total{endpoint="/metrics",model="stub",router="r0",status="403"} 1.0' in page


async def test_a_clients_key_does_not_open_what_takes_time_from_all() -> None:
    async with running_api(api_keys=("k",)) as api:
        assert [await status(api, path, "k") for path in (*OPERATORS, "/metrics")] == [403] * 6 + [200]
        page = (await api.client.get("/metrics", headers={"authorization": "Bearer k"})).text
        labels = f'endpoint="{MEASURE}",model="stub",router="r0",status="403"'
        assert f"transom_router_requests_total{{{labels}}} 1.0" in page
    async with running_api() as api:
        assert await status(api, MEASURE, None) == 405


def test_the_openapi_document_shows_which_routes_need_an_admin_key(admins: str) -> None:
    paths = build_api(make_router(StubWorker(), admin_api_key_file=admins)).openapi()["paths"]
    assert paths["/metrics"]["get"]["responses"].keys() >= {"401", "403"}
    assert paths["/metrics"]["get"]["security"]
    assert "security" not in paths["/v1/models"]["get"]
    assert "403" not in build_api(make_router(StubWorker())).openapi()["paths"]["/metrics"]["get"]["responses"]


def test_all_metrics_and_block_map_data_need_an_admin_key() -> None:
    paths = {route.path for route in cast("list[Route]", build_api(make_router(StubWorker())).routes)}
    shared = {path for path in paths if needs_admin_key(path, has_keys=False, has_admins=True)}
    assert shared == {path.split("?")[0] for path in (*SHARED, *OPERATORS)}
    assert {path for path in paths if path.startswith(("/metrics", "/blocks/"))} - shared == {"/blocks/assets/{name}"}


@pytest.mark.parametrize("path", ["/metrics", "/metrics/sd", "/blocks/describe", "/blocks/stream"])
async def test_a_line_feed_after_a_path_opens_nothing(admins: str, path: str) -> None:
    """Patterns of routes match in front of one."""
    path += "%0A?worker=none"
    async with running_api(api_keys=("k",), admin_api_key_file=admins) as api:
        assert [await status(api, path, key) for key in ("k", None)] == [403, 401]
    async with running_api(admin_api_key_file=admins) as api:  # where clients need no key
        assert await status(api, path, None) == 401
        assert (await api.complete()).status_code == 200
        assert [await status(api, "/metrics", key) for key in (None, "any", "boss")] == [401, 401, 200]


async def test_an_app_that_is_mounted_below_a_prefix_has_the_same_rules(admins: str) -> None:
    router = make_router(StubWorker(), api_keys=("k",), admin_api_key_file=admins)
    transport = httpx.ASGITransport(app=build_api(router), root_path="/llm")
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for path in SHARED:
            assert (await client.get(f"/llm{path}", headers={"authorization": "Bearer k"})).status_code == 403
        assert (await client.get("/llm/health")).status_code == 503  # no worker is ready, and no key is wanted
        assert (await client.get("/llm/version")).status_code == 401
    counts = router.metrics.text()
    for endpoint, refused in (("/metrics", 403), ("/blocks/stream", 403), ("/health", 503), ("/version", 401)):
        assert f'endpoint="{endpoint}",model="stub",router="r0",status="{refused}"}} 1.0' in counts
